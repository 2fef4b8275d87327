"""The size of the pool: the requested size, checked against the memory that this container may use.

The limit is the smallest of the machine's memory and the limits of this process's control groups (v2: memory.max and
memory.high, of this group and all above; v1: memory.limit_in_bytes). The size of /dev/shm does not matter: a memfd is
on the kernel's internal mount, which has no limit. Reserved huge pages are counted by none of these: the kernel took
them from the machine's memory before.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.wire.slots import PAGE

HUGE_PAGE = 2 << 20  # bytes
MIN_POOL = 16 * PAGE  # bytes; page 0 is never used
AUTO_OF_LIMIT, AUTO_OF_FREE = 4, 0.8  # "auto": a quarter of the limit, and at most this share of what is free
# Left free for other processes, so that the pool does not wake the OOM killer.
MARGIN_SHARE, MAX_MARGIN = 0.02, 2 << 30
_FACTORS: dict[str, float] = {"": 1, "b": 1} | {
    suffix: base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in ((letter, 1024), (f"{letter}ib", 1024), (f"{letter}i", 1024), (f"{letter}b", 1000))
}
_HUGE_PAGES = "sys/kernel/mm/hugepages/hugepages-2048kB"
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*|%)\s*")


class MemoryInUse(ConfigError):
    """A size that would fit if other processes gave memory back."""


@dataclass(frozen=True)
class MemoryLimits:
    """In bytes. ``limit``: of all processes here together; ``source``: its origin. ``free``: now. ``huge``: free
    reserved pages of 2 MiB, which the others do not include. ``reserved``: all of these pages."""

    limit: int
    free: int
    source: str
    huge: int = 0
    reserved: int = 0

    @property
    def fits(self) -> int:
        """The largest pool that fits now, in whole pages."""
        margin = min(int(self.limit * MARGIN_SHARE), MAX_MARGIN)
        return max(0, self.free - margin) // PAGE * PAGE

    def counted(self, pool: int, huge_pages: str = "auto") -> int:
        """Bytes of a pool that count against ``free``. ``huge_pages``: as in StoreOptions."""
        return 0 if pool <= self.huge and huge_pages != "never" else pool


ANY_MACHINE = MemoryLimits(1 << 60, 1 << 60, "the largest memory")


def memory_limits(root: str = "/") -> MemoryLimits:
    """Read the limits. ``root``: the folder of /proc and /sys, for tests."""
    base = Path(root)
    info = dict(re.findall(r"^(\w+):\s+(\d+) kB", (base / "proc/meminfo").read_text(), re.M))
    limits = [(int(info["MemTotal"]) << 10, int(info["MemAvailable"]) << 10, "this machine's memory")]
    limits += _cgroup_v2(base)
    limits += _cgroup_v1(base)
    limit, _, source = min(limits)
    huge, reserved = free_huge_pages(root), _number(base / _HUGE_PAGES / "nr_hugepages") or 0
    return MemoryLimits(limit, min(free for _, free, _ in limits), source, huge * HUGE_PAGE, reserved * HUGE_PAGE)


def free_huge_pages(root: str = "/") -> int:
    """2 MiB huge pages that are reserved and not promised to a process."""
    folder = Path(root) / _HUGE_PAGES
    try:
        free, promised = (int((folder / name).read_text()) for name in ("free_hugepages", "resv_hugepages"))
    except (OSError, ValueError):
        return 0
    return max(0, free - promised)


def pool_bytes(
    size: str, limits: MemoryLimits, tiers: Mapping[str, int] = MappingProxyType({}), huge_pages: str = "auto"
) -> int:
    """Bytes of the pool, a multiple of PAGE. ``tiers``: bytes that the store's tiers take beside it, perhaps later, by
    what they are. ``huge_pages``: as in StoreOptions. Raises ConfigError if ``size`` is invalid, or all of it does not
    fit, and MemoryInUse if it does not fit now."""
    beside = sum(tiers.values())
    if size.strip().lower() == "auto":
        parsed: int | None = min(limits.limit // AUTO_OF_LIMIT, int((limits.fits - beside) * AUTO_OF_FREE))
    else:
        parsed = _bytes(size, {**_FACTORS, "%": limits.limit / 100})
    if parsed is None or (parsed > limits.limit and "%" in size):
        raise ConfigError(f"pool size {size!r}: give bytes, 64GiB, 64G, 64GB, 10% (at most 100%) or auto")
    wanted = max(0, parsed) // PAGE * PAGE
    more = "".join(f", beside it {format_bytes(n)} of {what}" for what, n in tiers.items())
    if wanted < MIN_POOL:
        raise ConfigError(
            f"a pool of {size} ({wanted} bytes{more}) is too small for the node store: at least {MIN_POOL} bytes are "
            "required"
        )
    best = replace(limits, free=limits.limit, huge=limits.reserved)
    if huge_pages == "always" and limits.huge < wanted <= best.huge:
        pages = f"{format_bytes(limits.huge)} of {format_bytes(best.huge)} of 2 MiB pages are free now"
        raise MemoryInUse(f"a pool of {size} ({format_bytes(wanted)}) does not fit: {pages}")
    if limits.counted(wanted, huge_pages) + beside > limits.fits:
        fits = max(0, limits.fits - beside) // PAGE * PAGE
        in_use = best.counted(wanted, huge_pages) + beside <= best.fits
        raise (MemoryInUse if in_use else ConfigError)(
            f"a pool of {size} ({format_bytes(wanted)}{more}) does not fit: {limits.source} is "
            f"{format_bytes(limits.limit)}, {format_bytes(limits.free)} of it are free now; at most "
            f"{format_bytes(fits)} ({fits} bytes) would fit"
        )
    return wanted


def parse_bytes(size: str, what: str) -> int:
    """Parse a size without a limit; a multiple of PAGE. Raises ConfigError that names ``what``."""
    nbytes = _bytes(size, _FACTORS)
    if nbytes is None or (nbytes := nbytes // PAGE * PAGE) <= 0:
        raise ConfigError(f"{what} {size!r}: give bytes, 500GiB, 500G or 500GB")
    return nbytes


def format_bytes(nbytes: int) -> str:
    """A size for people, rounded down, so that a size that is shown to fit does."""
    for suffix, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{int(nbytes * 100 / (1 << shift)) / 100:g} {suffix}"
    return f"{nbytes} bytes"


def _bytes(size: str, factors: Mapping[str, float]) -> int | None:
    match = _SIZE.fullmatch(size)
    factor = factors.get(match[2].lower()) if match else None
    return None if match is None or factor is None else int(float(match[1]) * factor)


def _number(path: Path) -> int | None:
    """The number in a file; None without a file or a limit ("max")."""
    try:
        text = path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
    return int(text) if text.isdigit() else None


def _file_cache(path: Path, names: tuple[str, ...]) -> int:
    """Bytes of file cache, which the kernel frees before it refuses memory. Does not include shared memory."""
    try:
        found = dict(line.split() for line in path.read_text().splitlines())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return 0
    return sum(int(found.get(name, 0)) for name in names)


def _groups(base: Path, mount: Path, controller: str) -> Iterator[Path]:
    """This process's control group and all above it. In a container the path may be the host's; then only the mount's
    root exists, which is the container's own group."""
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
