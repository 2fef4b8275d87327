"""The socket of a store: owned by one process at a time, and closed to other users."""

import os
import select
import socket
import stat
from contextlib import suppress
from pathlib import Path

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.runtime_dir import make_again
from vllm_kvtier.store import linux
from vllm_kvtier.store.launcher import lock_now, serves

END_SECONDS = 10.0  # time that a new store waits for the end of an old one
QUEUE_LENGTH = 512  # connections waiting to be accepted


class ServedAlready(KVTierError):
    """Another process serves this path."""


def take(path: str, wait: bool = True) -> int:
    """Take the lock of the serving process. The kernel frees it when the process ends. No store removes the file,
    because it could be another process's by then; one that cleans directories may. ``wait``: for an owner's end."""
    folder, lock = Path(path).parent, f"{path}.lock"
    if not folder.is_dir():
        raise KVTierError(f"{folder} is not a directory; no store can listen at {path}")
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            owner = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            if not lock_now(fd) and not (wait and _wait_end(path, owner) and lock_now(fd)):
                raise ServedAlready(f"a store serves {path} already (pid {owner or 'unknown'})")
            _check_unserved(path)  # where the file was removed, a store may serve without it
            if file_id(lock) == file_id(fd):
                os.ftruncate(fd, 0)
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # the file was removed meanwhile


def listen_again(path: str, lock: int) -> tuple[int, socket.socket]:
    """Listen where files of the store that holds ``lock`` were removed, and their directory, perhaps. Returns the lock,
    which is another one if that was removed, too. Raises KVTierError and OSError, and never waits for another store."""
    make_again(path)
    if file_id(f"{path}.lock") == file_id(lock):
        _check_unserved(path)
        return lock, listen(path)
    new = take(path, wait=False)
    try:
        return new, listen(path)
    except BaseException:
        os.close(new)
        raise


def _check_unserved(path: str) -> None:
    if os.path.exists(path) and serves(path):
        raise ServedAlready(f"a store serves {path} already")


def file_id(file: str | int) -> tuple[int, int] | None:
    """Device and inode; None if there is no such file. ``file``: its path, or a descriptor."""
    try:
        found = os.fstat(file) if isinstance(file, int) else os.lstat(file)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _wait_end(path: str, owner: str) -> bool:
    """Wait for the end of an owner that no longer serves: freeing its memory takes time. True: it has ended."""
    if not owner.isdigit() or serves(path):
        return False
    try:
        pidfd = linux.pidfd_open(int(owner))
    except OSError:
        return True  # it has ended, or is in another pid namespace: the lock tells
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return bool(poller.poll(END_SECONDS * 1000))
    finally:
        os.close(pidfd)


def listen(path: str) -> socket.socket:
    """Listen at ``path``. The caller holds the lock, so an existing socket is a dead store's; other files are kept."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise KVTierError(f"{path} exists and is not a socket; choose another path or remove it")
        os.unlink(path)
    except FileNotFoundError:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    previous = os.umask(0o177)  # no other user may connect, from its creation on
    try:
        listener.bind(path)
        listener.listen(QUEUE_LENGTH)
    except OSError as error:
        listener.close()
        raise KVTierError(f"cannot listen at {path}: {error.strerror or error}") from error
    finally:
        os.umask(previous)
    return listener


def sign(lock: int) -> None:
    """Write this process's id into the lock; a new store reads it to wait for the process's end."""
    with suppress(OSError):  # the file system is full
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
