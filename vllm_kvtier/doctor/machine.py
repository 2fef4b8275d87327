"""Limits of this machine and container that engines and their store run into. ``root``: where /proc and /sys are."""

import os
import resource
from pathlib import Path

from vllm_kvtier.doctor.report import Check, fail, ok, unknown, warn
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.store.limits import MemoryLimits, in_words, memory_limits, pool_bytes

_IPC_LOCK = 14  # linux/capability.h
_SHM_LEAST = 1 << 30  # bytes; docker's default is 64 MiB
_AIO_QUEUE = 1024  # what the disk tier's mover asks the kernel for
_FILES_LEAST = 4096


def memory(size: str, root: str = "/") -> Check:
    """Whether a store of ``size`` (as the option store_size) fits."""
    limits = memory_limits(root)
    if size.strip().lower() == "off":
        return ok("memory", _free(limits))
    try:
        wanted = pool_bytes(size, limits)
    except ConfigError as error:
        return fail(
            "memory",
            f"no room for the node store: {error}",
            "a smaller store_size, or more memory for the container (docker run --memory, the pod's limits)",
        )
    if wanted > limits.fits * 0.9:
        return warn(
            "memory",
            f"a store of {in_words(wanted)} takes nearly all that is free: {_free(limits)}",
            "a smaller store_size: engines need host memory too",
        )
    return ok("memory", f"a store of {in_words(wanted)} fits: {_free(limits)}")


def _free(limits: MemoryLimits) -> str:
    return f"{in_words(limits.free)} free of {in_words(limits.limit)} ({limits.source})"


def memlock(size: str, root: str = "/", limit: int | None = None) -> Check:
    """Locked memory: what RDMA devices register counts; what CUDA pins does not."""
    devices = _names(Path(root) / "sys/class/infiniband")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    words = "unlimited" if limit == resource.RLIM_INFINITY else in_words(limit)
    if not devices:
        return ok("locked memory", f"limit {words}; no RDMA device is here, so nothing counts against it")
    if limit == resource.RLIM_INFINITY or _may_lock(Path(root)):
        return ok("locked memory", f"limit {words}, which does not bind this user")
    try:
        needed = pool_bytes(size, memory_limits(root))
    except ConfigError:
        needed = 1 << 30
    if limit >= needed:
        return ok("locked memory", f"limit {words}, enough for the store's memory")
    return fail(
        "locked memory",
        f"the limit on locked memory (memlock) is {words}: {', '.join(devices)} cannot register the "
        f"{in_words(needed)} of the node store, and transfers between nodes fail",
        "ulimit -l unlimited; in containers docker run --ulimit memlock=-1; in systemd units LimitMEMLOCK=infinity",
    )


def _may_lock(root: Path) -> bool:
    try:
        lines = (root / "proc/self/status").read_text().splitlines()
        mask = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    except (OSError, StopIteration, ValueError):
        return False
    return bool(mask >> _IPC_LOCK & 1)


def shared_memory(path: str = "/dev/shm", statvfs=os.statvfs) -> Check:
    """vLLM's workers and UCX speak through it; the node store's memory does not lie there."""
    name, remedy = "shared memory", "docker run --shm-size=8g (or --ipc=host); in pods an emptyDir of medium Memory"
    try:
        found = statvfs(path)
    except OSError as error:
        return fail(name, f"{path} cannot be used: {error.strerror}; vLLM's workers and UCX need it", remedy)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    if free < 64 << 20:
        return fail(
            name,
            f"{path} has {in_words(free)} left of {in_words(size)}: vLLM's workers and UCX end with SIGBUS there",
            remedy + "; or remove what dead processes left in it",
        )
    if size < _SHM_LEAST:
        return warn(name, f"{path} is only {in_words(size)}: enough for one GPU, not for tensor parallelism", remedy)
    return ok(name, f"{path} has {in_words(free)} of {in_words(size)}")


def asynchronous_io(root: str = "/") -> Check:
    """Places in the kernel's table of asynchronous I/O, which the disk tier queues its reads and writes in."""
    folder = Path(root) / "proc/sys/fs"
    try:
        most, used = (int((folder / name).read_text()) for name in ("aio-max-nr", "aio-nr"))
    except (OSError, ValueError):
        return unknown("asynchronous I/O", "this kernel does not say how much of it is left")
    if most - used < 4 * _AIO_QUEUE:
        return warn(
            "asynchronous I/O",
            f"{used:,} of {most:,} places of the kernel's asynchronous I/O are taken, a disk tier takes {_AIO_QUEUE}",
            "sysctl fs.aio-max-nr=1048576",
        )
    return ok("asynchronous I/O", f"{used:,} of {most:,} places are taken")


def open_files(limit: int | None = None) -> Check:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    if limit != resource.RLIM_INFINITY and limit < _FILES_LEAST:
        return warn(
            "open files",
            f"a process may have {limit} files and connections open, which a store of many ranks or a router exceeds",
            "ulimit -n 65536",
        )
    return ok("open files", f"limit {'none' if limit == resource.RLIM_INFINITY else f'{limit:,}'}")


def _names(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return []
