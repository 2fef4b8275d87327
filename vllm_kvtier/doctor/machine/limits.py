"""Limits of this machine and container for engines and their store. ``root``: parent of /proc and /sys."""

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from vllm_kvtier.doctor.report import Check, fail, ok, unknown, warn
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.store.memory.memory_limits import MemoryLimits, format_bytes, memory_limits, pool_bytes

_IPC_LOCK = 14  # linux/capability.h
_MIN_SHM_BYTES = 1 << 30  # docker's default is 64 MiB
_AIO_REQUESTS = 1024  # requests that the disk tier's process reserves in the kernel
_MIN_OPEN_FILES = 4096


def memory(size: str, root: str = "/", tiers: Mapping[str, int] = MappingProxyType({})) -> Check:
    """Whether a store of ``size`` (as the option store_size) fits. ``tiers``: as of ``pool_bytes``."""
    smaller = "a smaller store_size" + " or store_mooncake_segment" * ("mooncake_segment" in tiers)
    limits = memory_limits(root)
    if size.strip().lower() == "off":
        return ok("memory", _free(limits))
    try:
        wanted = pool_bytes(size, limits, tiers)
    except ConfigError as error:
        fix = f"{smaller}, or more memory for the container (docker run --memory, the pod's limits)"
        return fail("memory", f"the node store does not fit: {error}", fix)
    store = f"a store of {format_bytes(wanted)}"
    store += "".join(f", beside it {format_bytes(n)} of {what}," for what, n in tiers.items())
    if limits.counted(wanted) + sum(tiers.values()) > limits.fits * 0.9:
        message = f"{store} takes nearly all free memory: {_free(limits)}"
        return warn("memory", message, f"{smaller}: engines need host memory too")
    return ok("memory", f"{store} fits: {_free(limits)}")


def _free(limits: MemoryLimits) -> str:
    return f"{format_bytes(limits.free)} free of {format_bytes(limits.limit)} ({limits.source})"


def memlock(size: str, root: str = "/", limit: int | None = None, segment: int = 0) -> Check:
    """Locked memory: memory registered with RDMA devices counts, memory pinned by CUDA does not.

    ``segment``: bytes that one process registers beside the store's (Mooncake over RDMA).
    """
    devices = sorted(device.name for device in Path(root).glob("sys/class/infiniband/*"))
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    shown = "unlimited" if limit == resource.RLIM_INFINITY else format_bytes(limit)
    if not devices:
        return ok("locked memory", f"limit {shown}; without an RDMA device nothing counts against it")
    if limit == resource.RLIM_INFINITY or _may_lock(Path(root)):
        return ok("locked memory", f"limit {shown}, which does not apply to this user")
    try:
        needed = pool_bytes(size, memory_limits(root)) + segment
    except ConfigError:
        needed = (1 << 30) + segment
    if limit >= needed:
        return ok("locked memory", f"limit {shown}, enough for the store's memory")
    message = f"the limit on locked memory (memlock) is {shown}: {', '.join(devices)} cannot register the "
    message += f"{format_bytes(needed)} of the node store{' and mooncake_segment' * (segment > 0)}, and transfers "
    message += "between nodes fail"
    fix = "ulimit -l unlimited; in containers docker run --ulimit memlock=-1; in systemd units LimitMEMLOCK=infinity"
    return fail("locked memory", message, fix)


def _may_lock(root: Path) -> bool:
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
        mask = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    except (OSError, StopIteration, ValueError):
        return False
    return bool(mask >> _IPC_LOCK & 1)


def shared_memory(path: str = "/dev/shm", statvfs=os.statvfs, engines: bool = True) -> Check:
    """/dev/shm, which vLLM's workers and UCX use; the node store's memory is elsewhere. ``engines``: False if this may
    be the store's container alone."""
    name, fix = "shared memory", "docker run --shm-size=8g (or --ipc=host); in pods an emptyDir of medium Memory"
    try:
        found = statvfs(path)
    except OSError as error:
        return fail(name, f"{path} cannot be used: {error.strerror}; vLLM's workers and UCX need it", fix)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    if not engines and size < _MIN_SHM_BYTES:
        return unknown(name, f"{path} is only {format_bytes(size)}: enough for the node store, not for engines", fix)
    if free < 64 << 20:
        message = f"{path} has {format_bytes(free)} left of {format_bytes(size)}"
        message += ": vLLM's workers and UCX end with SIGBUS there"
        return fail(name, message, fix + "; or remove files of dead processes")
    if size < _MIN_SHM_BYTES:
        return warn(name, f"{path} is only {format_bytes(size)}: enough for one GPU, not for tensor parallelism", fix)
    return ok(name, f"{path} has {format_bytes(free)} of {format_bytes(size)}")


def asynchronous_io(root: str = "/") -> Check:
    """The kernel's limit on asynchronous I/O requests, which the disk tier uses for reads and writes."""
    folder = Path(root) / "proc/sys/fs"
    try:
        maximum, used = (int((folder / name).read_text()) for name in ("aio-max-nr", "aio-nr"))
    except (OSError, ValueError):
        return unknown("asynchronous I/O", "this kernel does not report its limit")
    if maximum - used < 4 * _AIO_REQUESTS:
        message = f"{used:,} of {maximum:,} requests of the kernel are in use, a disk tier needs {_AIO_REQUESTS:,}"
        return warn("asynchronous I/O", message, "sysctl fs.aio-max-nr=1048576")
    return ok("asynchronous I/O", f"{used:,} of {maximum:,} requests are in use")


def open_files(limit: int | None = None) -> Check:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if limit != resource.RLIM_INFINITY and limit < _MIN_OPEN_FILES:
        message = f"a process may have {limit} files and connections open; a store of many ranks or a proxy needs more"
        return warn("open files", message, "ulimit -n 65536")
    return ok("open files", f"limit {'none' if limit == resource.RLIM_INFINITY else f'{limit:,}'}")
