"""A model's identity, read from its files: equal for an engine that serves it and a tool that measured it. Any
thread."""

import functools
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_kvtier.file_digests import file_digests

# Fields of config.json that change no value in the cache and differ between copies of the same model.
IGNORED = {"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype", "use_cache"}

# Change times of other file systems may be a server's, whose clock may be behind by so much; it cannot be asked without
# writing to it.
OWN_CLOCK = frozenset(("bcachefs", "btrfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "overlay", "squashfs", "tmpfs",
                       "xfs", "zfs"))  # fmt: skip
MAX_CLOCK_SKEW_NS = 10_000_000_000

KINDS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*/*.safetensors")  # the last: Diffusers' folders (Cosmos 3)

# Folders in it that have weights of the model, too: the adapter that Jina's embedding models merge into theirs, and the
# encoders of Kimi-Audio and MiMo-Audio. Other folders are there or not by how a model was downloaded.
_PARTS = ("whisper-large-v3", "audio_tokenizer")
_OF_PARTS = (".json", ".safetensors", ".bin", ".pt", ".pth", ".gguf")


def weight_files(path: Path, kinds: Sequence[str] = KINDS) -> list[Path]:
    """A model's files of weights, in the order of their digest: those of the first kind in its folder, or ``path``
    itself if that is a file."""
    return [path] if path.is_file() else next((files for kind in kinds if (files := sorted(path.glob(kind)))), [])


def other_files(path: Path, weights: Sequence[Path], task: str = "") -> list[Path]:
    """What else a model's weights may depend on: the list of the files that vLLM loads of ``weights``, and what is in
    folders with parts of it. ``task``: the adapter, if one of several is merged. Raises OSError."""
    if not path.is_dir():
        return []
    lists = []
    if any(file.suffix == ".safetensors" for file in weights):
        mistral = all(file.name.startswith("consolidated") for file in weights)
        lists = sorted(path.glob(f"{'consolidated' * mistral}*.safetensors.index.json"))
    within = [file for folder in _part_folders(path, task) for file in sorted(folder.iterdir())]
    parts = [file for file in within if file.suffix in _OF_PARTS and file not in weights and os.path.isfile(file)]
    return lists + [file for file in parts if os.access(file, os.R_OK)]


def _part_folders(path: Path, task: str = "") -> list[Path]:
    one = path / "adapters" / task
    adapters = [one] if task and os.path.isdir(one) else path.glob("adapters/*")
    folders = sorted([*adapters, *(path / name for name in _PARTS)])
    return [folder for folder in folders if os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK)]


def model_folder(model: str, revision: str | None = None, download_dir: str | None = None) -> Path | None:
    """A model's directory on this machine: ``model`` itself or its place in the hub's cache. None if it is in neither,
    or if vLLM takes it from ModelScope."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if os.environ.get("VLLM_USE_MODELSCOPE", "").strip().lower() in ("1", "true"):
        return None  # vLLM reads another hub's copy
    try:
        from huggingface_hub import snapshot_download

        # Without a pattern, releases from 1.22 on raise for a snapshot that lacks any file of the repository. vLLM
        # leaves out those that it does not need.
        found = snapshot_download(
            model, revision=revision, cache_dir=download_dir, local_files_only=True, ignore_patterns="*"
        )
        return Path(found)
    except Exception:  # the hub library has many ways to say "not in the cache"
        return None


def process_start() -> int:
    """When this process began (a forked one, when it was forked), in the nanoseconds of ``stat``."""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(process_fields("self")[19]) / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(age * 1e9)


def process_fields(pid: int | str) -> list[str]:
    """Of /proc/PID/stat, from the state on: the name before it may hold anything, and is cut within a character."""
    return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()


def changed_since(moment: int, model: str, revision: str | None, files: Sequence[Path]) -> bool:
    """Whether a reader of this model at any time since ``moment`` may have read other bytes than ``files`` (not empty;
    ``weight_files``, then ``other_files``) hold now. Compares change times, which no tool can set. Raises OSError."""
    path = Path(model).expanduser()
    own, processes = _devices(OWN_CLOCK), _devices({"proc"})

    def changed(state: os.stat_result) -> bool:
        # The time of a process's link to its root, by which KServe mounts models, is when that was first looked up.
        later = state.st_ctime_ns > moment - (0 if state.st_dev in own else MAX_CLOCK_SKEW_NS)
        return later and state.st_dev not in processes

    if not path.exists():  # a hub's snapshot never changes, but a revision's name may mean another one now
        return any(_renamed(changed, revision or "main", each) for each in files)
    parts = [each for folder in _part_folders(path) for each in (folder, folder.parent)]
    looked = [*files, path, *parts, *path.glob("*.json"), *path.glob("*.py")]
    states = [state for each in looked if has_own_times(state := os.stat(each))]
    return any(map(changed, states)) or any(_moved(changed, each.absolute()) for each in looked)


def has_own_times(state: os.stat_result) -> bool:
    """False for a folder in a bucket that is mounted (gcsfuse, blobfuse2): both of its times are those of a look at it,
    the same or some nanoseconds apart."""
    together = abs(state.st_ctime_ns - state.st_mtime_ns) < 1_000_000
    return not (stat.S_ISDIR(state.st_mode) and together and is_on("fuse", state.st_dev))


@functools.lru_cache(256)
def is_on(kind: str, device: int) -> bool:
    """Whether a file of this ``st_dev`` is on a file system of this kind, as ``_devices``."""
    return device in _devices((kind,))


def _renamed(changed: Callable[[os.stat_result], bool], revision: str, file: Path) -> bool:
    """Whether this revision's name may have meant another snapshot of the hub, with another such file or with weights
    but without it. The hub library before 1.31 writes the name anew at each download, also if it means the same."""
    own = next((each for each in file.parents if each.parent.name == "snapshots"), file.parent)
    name = own.parents[1] / "refs" / revision
    if not name.exists() or not changed(os.stat(name)):
        return False
    if name.read_text("utf-8", "replace").strip() != own.name:
        return True
    others = {each: each / file.relative_to(own) for each in own.parent.iterdir() if each != own and each.is_dir()}
    return any(
        os.path.realpath(other) != os.path.realpath(file) and (os.path.lexists(other) or bool(weight_files(snapshot)))
        for snapshot, other in others.items()
    )


def _moved(changed: Callable[[os.stat_result], bool], path: Path) -> bool:
    """Whether a link on the path may lead elsewhere now, or a folder on it may have been renamed."""
    return any(
        changed(state)
        and has_own_times(state)
        # Renaming a folder changes one of its times and its parent; new entries in it change both of its times.
        and (stat.S_ISLNK(state.st_mode) or (state.st_ctime_ns != state.st_mtime_ns and changed(os.stat(step.parent))))
        for step, state in steps(path)
        if step != step.parent
    )


def _devices(kinds: Collection[str]) -> set[int]:
    """Mounted file systems of these kinds ("fuse" for each "fuse.NAME"), by ``st_dev``."""
    found = set()
    for line in Path("/proc/self/mountinfo").read_text("utf-8", "replace").splitlines():
        mount, _, source = line.partition(" - ")
        if source.split()[0].partition(".")[0] in kinds:
            found.add(os.makedev(*map(int, mount.split()[2].split(":"))))
    return found


def steps(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The folders and links on an absolute path, the path itself, and the same of what the links point to."""
    for step in (*reversed(path.parents), path):
        state = os.lstat(step)
        yield step, state
        if stat.S_ISLNK(state.st_mode):
            yield from steps(step.parent / os.readlink(step))


def configuration(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """That file, without fields that change no value in the cache. Raises OSError and ValueError."""
    config = json.loads((folder / name).read_text("utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{name} in {folder} is not an object")
    return {key: value for key, value in config.items() if key not in IGNORED}


def of_files(model: str, revision: str | None = None, download_dir: str | None = None) -> str | None:
    """32 hexadecimal digits: a digest of config.json and of the weight files (``file_digests``). None without them.
    Of a model of the hub, vLLM has only the weights in ``download_dir``.

    Names the records of ``kvtier quality``. It is not the engine's namespace, which also depends on the command line.
    Quantization at load time keeps the fingerprint, because it hardly changes a codec's cost.
    """
    folder = model_folder(model, revision, download_dir)
    if folder is None:
        return None
    weights = weight_files(folder)
    if not weights:
        return None
    described = folder if (folder / "config.json").exists() else model_folder(model, revision) or folder
    try:
        digest = hashlib.blake2b(json.dumps(configuration(described), sort_keys=True).encode(), digest_size=16)
        for file, found in zip(weights, file_digests(weights), strict=True):
            digest.update(f"{file.name}|{found}|".encode())
    except (OSError, ValueError):
        return None
    return digest.hexdigest()
