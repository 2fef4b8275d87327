"""Memory of other processes of this node: this process's identity, the memory that it shares, and reading others'.

Linux copies between processes on the reader's time (``process_vm_readv``): the other process may be busy, stopped or
dead. The same user may read. Where Yama restricts that to parents (``ptrace_scope`` 1) a process may permit others,
which this one does when it shares its memory.
"""

import ctypes
import errno
import functools
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.fingerprint import process_fields
from vllm_kvtier.wire.messages import Shared, SharedSpan

_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)  # prctl(2)
_IOV_MAX = 1024  # of one call, on each side


class Identity(NamedTuple):
    node: str  # this boot and this pid namespace, within which a pid is unique
    pid: int
    started: int  # clock ticks since boot


def identity() -> Identity:
    """Of this process. Raises KVTierError without /proc."""
    pid = os.getpid()
    try:
        return Identity(_node(pid), pid, _started(pid))
    except OSError as error:
        raise KVTierError(f"/proc has no identity of this process ({error}): its memory cannot be shared") from error


def node_name() -> str:
    """``Identity.node``. Where /proc has none: the host's name, so that an engine's ranks tell their nodes apart; no
    memory is shared by it."""
    try:
        return _node(os.getpid())
    except OSError:
        return socket.gethostname()


@functools.cache
def _node(pid: int) -> str:
    """``pid``: ours; a child of fork may be in another namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def share(spans: Sequence[tuple[int, int]]) -> Shared:
    """Permit processes of this user on this node to read our memory, and describe ``spans`` (base, nbytes) of it.
    Raises KVTierError without /proc."""
    node, pid, started = identity()
    libc = _libc()
    # EINVAL: no Yama here. Every other error shows in the first read.
    libc.prctl(_SET_PTRACER, _ANY, 0, 0, 0)
    return Shared(node, pid, started, "", tuple(SharedSpan(base, nbytes, b"") for base, nbytes in spans))


def check(shared: Shared) -> None:
    """Raise KVTierError unless the process that shares this is alive and on this node."""
    if shared.node != node_name():
        raise KVTierError(f"process {shared.pid} is on another node or in another container (pid namespace)")
    try:
        started = _started(shared.pid)
    except ProcessLookupError:
        raise KVTierError(f"process {shared.pid} has ended") from None
    except OSError as error:
        raise KVTierError(f"process {shared.pid} cannot be looked up in /proc: {error}") from error
    if started != shared.started:
        raise KVTierError(f"process {shared.pid} has ended, and another has its pid now")


class ProcessMemory:
    """Reads the memory that a process of this node shares."""

    def __init__(self, shared: Shared):
        """Raises KVTierError if it cannot be read."""
        self._shared = shared
        check(shared)
        probe = np.empty(1, dtype=np.uint8)
        where = next((span.base for span in shared.spans if span.nbytes), None)
        if where is None:
            raise KVTierError(f"process {shared.pid} shares no memory")
        self.read(np.array([probe.ctypes.data]), np.array([where]), np.array([1]))

    def read(self, local: np.ndarray, remote: np.ndarray, sizes: np.ndarray) -> None:
        """Copy ``sizes[i]`` bytes from the process's address ``remote[i]`` to our address ``local[i]``: int64 [n] each.
        Releases the interpreter.

        Raises KVTierError if any of it cannot be read, or if another process had the pid by then: the copied bytes are
        invalid.
        """
        pieces = [np.empty((len(sizes), 2), dtype=np.uint64) for _ in range(2)]  # struct iovec
        for piece, address in zip(pieces, (local, remote), strict=True):
            piece[:, 0], piece[:, 1] = address, sizes
        libc, pid = _libc(), self._shared.pid
        for start in range(0, len(sizes), _IOV_MAX):
            count = min(_IOV_MAX, len(sizes) - start)
            local_iov, remote_iov = (piece[start : start + count].ctypes.data for piece in pieces)
            got = libc.process_vm_readv(pid, local_iov, count, remote_iov, count, 0)
            if got < 0:
                raise KVTierError(self._why(ctypes.get_errno()))
            if got != int(sizes[start : start + count].sum()):
                raise KVTierError(f"process {pid} no longer has all of the memory that it shared")
        check(self._shared)

    def _why(self, number: int) -> str:
        pid = self._shared.pid
        if number == errno.ESRCH:
            return f"process {pid} has ended"
        if number == errno.EFAULT:
            return f"process {pid} no longer has the memory that it shared"
        if number == errno.EPERM:
            return (
                f"this process is not permitted to read the memory of process {pid}: engines must run as the same "
                "user, and in containers with the capability SYS_PTRACE"
            )
        if number == errno.ENOSYS:
            return "this system has no process_vm_readv: the memory of other processes cannot be read"
        return f"the memory of process {pid} cannot be read: {os.strerror(number)}"


def _started(pid: int) -> int:
    """Raises ProcessLookupError if there is no such process, or only its exit status."""
    try:
        fields = process_fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(errno.ESRCH, f"no process {pid}") from None
    if fields[0] in "ZX":
        raise ProcessLookupError(errno.ESRCH, f"process {pid} has ended")
    return int(fields[19])


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
    ]  # fmt: skip
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    libc.prctl.restype = ctypes.c_int
    return libc
