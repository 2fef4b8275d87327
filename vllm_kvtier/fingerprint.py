"""Which model this is, read from its files: equal for an engine that serves it and a tool that measured it."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from vllm_kvtier.file_digests import file_digests

# Says nothing about the values in the cache, and differs between copies of the same model.
IGNORED = {"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache"}


KINDS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def weight_files(folder: Path, kinds: Sequence[str] = KINDS) -> list[Path]:
    """The files that hold a model's weights, in the order in which they are digested: of the first kind there is."""
    return next((files for kind in kinds if (files := sorted(folder.glob(kind)))), [])


def model_folder(model: str, revision: str | None = None, download_dir: str | None = None) -> Path | None:
    """A model's directory on this machine: itself, or its place in the hub's cache; None if it is in neither, or
    vLLM takes it from ModelScope."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):
        return None  # vLLM reads another hub's copy
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True))
    except Exception:  # the hub library has many ways to say "not in the cache"
        return None


def model_files(
    model: str, revision: str | None = None, download_dir: str | None = None, kinds: Sequence[str] = KINDS
) -> list[Path]:
    """As ``weight_files``; [] without any on this machine. ``model`` may be such a file."""
    path = Path(model).expanduser()
    if path.is_file():
        return [path]
    folder = model_folder(model, revision, download_dir)
    return weight_files(folder, kinds) if folder is not None else []


def of_files(model: str, revision: str | None = None) -> str | None:
    """32 hexadecimal digits: a digest of config.json and of the weight files (``file_digests``). None without them.

    By this the records of ``kvtier quality`` are found. It is not the engine's namespace, which also knows what the
    command line changes; quantization at load time keeps the fingerprint, because it hardly moves a codec's price.
    """
    folder = model_folder(model, revision)
    if folder is None:
        return None
    weights = weight_files(folder)
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        if not weights or not isinstance(config, dict):
            return None
        kept = {key: value for key, value in config.items() if key not in IGNORED}
        digest = hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16)
        for file, found in zip(weights, file_digests(weights), strict=True):
            digest.update(f"{file.name}|{found}|".encode())
    except (OSError, ValueError):
        return None
    return digest.hexdigest()
