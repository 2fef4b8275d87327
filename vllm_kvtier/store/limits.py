"""How much memory the pool may take: what was asked for against what this container may use.

What counts is the smallest of the machine's memory and the limits of the control groups this process is in
(v2: memory.max and memory.high, here and in every group above; v1: memory.limit_in_bytes). The size of /dev/shm
does not matter: a memfd lies on the kernel's own, unlimited mount.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.wire.slots import PAGE

MIN_POOL = 16 * PAGE  # bytes; page 0 is never used
AUTO_OF_LIMIT, AUTO_OF_FREE = 4, 0.8  # "auto": a quarter of the limit, and at most this share of what is free
# Left free for everybody else: going to the very edge wakes the OOM killer, which does not choose us.
MARGIN_SHARE, MARGIN_MOST = 0.02, 2 << 30
_UNITS = {"": 1, "b": 1} | {
    suffix: base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in ((letter, 1024), (f"{letter}ib", 1024), (f"{letter}i", 1024), (f"{letter}b", 1000))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*")


@dataclass(frozen=True)
class MemoryLimits:
    """In bytes. ``limit``: the most that processes here may ever use together, and who says so. ``free``: now."""

    limit: int
    free: int
    source: str

    @property
    def fits(self) -> int:
        """The largest pool there is room for now, in whole pages."""
        margin = min(int(self.limit * MARGIN_SHARE), MARGIN_MOST)
        return max(0, self.free - margin) // PAGE * PAGE


def memory_limits(root: str = "/") -> MemoryLimits:
    """``root``: where /proc and /sys are (for tests)."""
    base = Path(root)
    info = dict(re.findall(r"^(\w+):\s+(\d+) kB", (base / "proc/meminfo").read_text(), re.M))
    limits = [(int(info["MemTotal"]) << 10, int(info["MemAvailable"]) << 10, "this machine's memory")]
    limits += _cgroup_v2(base)
    limits += _cgroup_v1(base)
    limit, _, source = min(limits)
    return MemoryLimits(limit, min(free for _, free, _ in limits), source)


def pool_bytes(size: str, limits: MemoryLimits) -> int:
    """Bytes of the pool, a multiple of PAGE. Raises ConfigError where ``size`` makes no sense or does not fit."""
    if size.strip().lower() == "auto":
        wanted = min(limits.limit // AUTO_OF_LIMIT, int(limits.fits * AUTO_OF_FREE))
    else:
        wanted = _parse(size, limits.limit)
    wanted = wanted // PAGE * PAGE
    if wanted < MIN_POOL:
        raise ConfigError(
            f"a pool of {size} ({wanted} bytes) is too small for the node store: the least is {MIN_POOL} bytes"
        )
    if wanted > limits.fits:
        raise ConfigError(
            f"a pool of {size} ({in_words(wanted)}) does not fit: {limits.source} is {in_words(limits.limit)}, of "
            f"which {in_words(limits.free)} are free now; at most {in_words(limits.fits)} ({limits.fits} bytes) would "
            "fit"
        )
    return wanted


def parse_bytes(size: str, what: str) -> int:
    """Bytes of something that has no limit of its own; a multiple of PAGE. Raises ConfigError that names ``what``."""
    match = _SIZE.fullmatch(size.strip())
    factor = _UNITS.get(match[2].lower()) if match and match[2] != "%" else None
    if factor is None or (nbytes := int(float(match[1]) * factor) // PAGE * PAGE) <= 0:
        raise ConfigError(f"{what} {size!r}: give bytes, 500GiB, 500G or 500GB")
    return nbytes


def in_words(nbytes: int) -> str:
    """Rounded down, so that what is said to fit does."""
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{int(nbytes * 100 / (1 << shift)) / 100:g} {unit}"
    return f"{nbytes} bytes"


def _parse(size: str, limit: int) -> int:
    match = _SIZE.fullmatch(size)
    if match and match[2] == "%":
        share = float(match[1])
        if share > 100:
            raise ConfigError(f"a pool of {size} of the memory: at most 100 %")
        return int(limit * share / 100)
    factor = _UNITS.get(match[2].lower()) if match else None
    if factor is None:
        raise ConfigError(f"pool size {size!r}: give bytes, 64GiB, 64G, 64GB, 10% or auto")
    return int(float(match[1]) * factor)


def _number(path: Path) -> int | None:
    """What the file holds; None without a file or a limit in it ("max")."""
    try:
        text = path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    return int(text) if text.isdigit() else None


def _file_cache(path: Path, names: tuple[str, ...]) -> int:
    """Bytes of file cache, which the kernel gives up before it refuses memory; shared memory is not counted there."""
    try:
        found = dict(line.split() for line in path.read_text().splitlines())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return 0
    return sum(int(found.get(name, 0)) for name in names)


def _groups(base: Path, mount: Path, controller: str) -> Iterator[Path]:
    """This process's control group and all above it. In a container the path may be one of the host's, of which
    nothing is to be seen here but the mount's root: that is then the container's own group."""
    try:
        lines = (base / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            group = Path(os.path.normpath(mount / path.lstrip("/")))
            while group.is_relative_to(mount):
                yield group
                group = group.parent


def _cgroup_v2(base: Path) -> Iterator[tuple[int, int, str]]:
    for group in _groups(base, base / "sys/fs/cgroup", ""):
        bounds = [(n, name) for name in ("memory.max", "memory.high") if (n := _number(group / name)) is not None]
        used = _number(group / "memory.current")
        if bounds and used is not None:
            limit, name = min(bounds)
            used -= _file_cache(group / "memory.stat", ("inactive_file", "active_file"))
            yield limit, max(0, limit - used), f"this container's {name}"


def _cgroup_v1(base: Path) -> Iterator[tuple[int, int, str]]:
    for group in _groups(base, base / "sys/fs/cgroup/memory", "memory"):
        limit, used = _number(group / "memory.limit_in_bytes"), _number(group / "memory.usage_in_bytes")
        if limit is not None and used is not None and limit < 1 << 60:  # above that it means none
            used -= _file_cache(group / "memory.stat", ("total_inactive_file", "total_active_file"))
            yield limit, max(0, limit - used), "this container's memory.limit_in_bytes"
