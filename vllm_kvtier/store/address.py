"""The place where a store listens: held by one process at a time, and closed to other users."""

import fcntl
import os
import select
import socket
import stat
from pathlib import Path

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.launch import serves

END_SECONDS = 10.0  # how long a new store waits for an old one that is ending
QUEUE = 512  # connections that may wait to be accepted


class ServedAlready(KVTierError):
    """Another process serves this path."""


def take(path: str) -> int:
    """The lock that says who serves; held for life, and freed by the kernel however that ends. The file stays: who
    removed it could remove another's."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise KVTierError(f"{folder} is no directory, so no store can listen at {path}")
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _locked(fd):
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            if not (_wait_end(path, owner) and _locked(fd)):
                raise ServedAlready(f"a store serves {path} already (pid {owner or 'unknown'})")
    except BaseException:
        os.close(fd)
        raise
    os.ftruncate(fd, 0)
    return fd


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_end(path: str, owner: str) -> bool:
    """True once the owner ended, if it no longer serves: giving gigabytes back takes it a moment."""
    if not owner.isdigit() or serves(path):
        return False
    try:
        pidfd = os.pidfd_open(int(owner))
    except OSError:
        return True  # it is gone, or is not to be seen from here: the lock says which
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return bool(poller.poll(END_SECONDS * 1000))
    finally:
        os.close(pidfd)


def listen(path: str) -> socket.socket:
    """The lock is ours, so a socket that is there already is a dead store's; anything else is not touched."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise KVTierError(f"{path} is there and is no socket; choose another path or remove it")
        os.unlink(path)
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    previous = os.umask(0o177)  # from the moment it exists nobody else may connect
    try:
        listener.bind(path)
        listener.listen(QUEUE)
    except OSError as error:
        listener.close()
        raise KVTierError(f"cannot listen at {path}: {error.strerror or error}") from error
    finally:
        os.umask(previous)
    return listener


def sign(lock: int) -> None:
    """Write into the lock who holds it: whoever waits for that process's end reads it."""
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
