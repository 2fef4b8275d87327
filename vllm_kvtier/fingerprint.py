"""Which model this is, read from its files: equal for an engine that serves it and a tool that measured it."""

import hashlib
import json
import os
import stat
import time
from collections.abc import Iterator, Sequence
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


def process_start() -> int:
    """When this process began, in the nanoseconds of ``stat``; one that was forked began then."""
    ticks = int(Path("/proc/self/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(age * 1e9)


def changed_since(moment: int, model: str, revision: str | None, files: Sequence[Path]) -> bool:
    """Whether who read this model at any time since ``moment`` may have read something else than ``files`` (not empty;
    as ``model_files``) now hold. Raises OSError. What is compared are change times, which cannot be set."""
    path = Path(model).expanduser()
    if not path.exists():  # a hub's snapshot never changes, but the one that a revision's name means may
        name = files[0].parents[2] / "refs" / (revision or "main")
        return name.exists() and os.stat(name).st_ctime_ns > moment
    looked = [*files, path, *path.glob("*.json"), *path.glob("*.py")]
    return any(os.stat(each).st_ctime_ns > moment or _moved_since(moment, each.absolute()) for each in looked)


def _moved_since(moment: int, path: Path) -> bool:
    """Whether a link on the way to it may be another one now, or a folder have got its name."""
    return any(
        state.st_ctime_ns > moment
        # Renaming a folder changes both; where it alone changed, other entries were made in it.
        and (stat.S_ISLNK(state.st_mode) or step != step.parent and os.stat(step.parent).st_ctime_ns > moment)
        for step, state in steps(path)
    )


def steps(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """All folders and links on the way to an absolute path, and itself, also those that the links lead to."""
    for step in (*reversed(path.parents), path):
        state = os.lstat(step)
        yield step, state
        if stat.S_ISLNK(state.st_mode):
            yield from steps(step.parent / os.readlink(step))


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
