"""Which model this is, read from its files: equal for an engine that serves it and a tool that measured it."""

import hashlib
import json
from pathlib import Path

# Says nothing about the values in the cache, and differs between copies of the same model.
IGNORED = {"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache"}


def sampled_bytes(file: Path, pieces: int = 64, length: int = 4096) -> bytes:
    """Size, head and ``pieces`` evenly spaced samples of a file: tells weights apart without reading them all."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        parts = [size.to_bytes(8, "little")]
        for i in range(pieces):
            stream.seek(max(0, size - length) * i // (pieces - 1))
            parts.append(stream.read(length))
    return b"".join(parts)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's weights, in the order in which they are digested."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))


def model_folder(model: str, revision: str | None = None) -> Path | None:
    """A model's directory on this machine: itself, or its place in the hub's cache; None if it is in neither."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:  # the hub library has many ways to say "not in the cache"
        return None


def of_files(model: str, revision: str | None = None) -> str | None:
    """32 hexadecimal digits: a digest of config.json and of samples of the weight files. None without such files.

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
        for file in weights:
            digest.update(file.name.encode() + sampled_bytes(file))
    except (OSError, ValueError):
        return None
    return digest.hexdigest()
