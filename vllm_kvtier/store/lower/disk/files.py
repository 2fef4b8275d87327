"""The file operations of the disk tier, all of them, so that a test can put a disk that fails in their place.

Every method may raise OSError, as the system call does. ``pread`` and ``pwrite`` may do less than they are asked, as
theirs do; ``write_all`` and ``read_all`` go on until it is done.
"""

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

FULL = (errno.ENOSPC, errno.EDQUOT)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Files:
    def make_folder(self, path: str) -> None:
        """With its parents, for this user alone, durably; one that is there stays as it is."""
        path = os.path.abspath(path)
        if os.path.isdir(path):
            return
        self.make_folder(os.path.dirname(path))
        if os.path.lexists(path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        os.mkdir(path, 0o700)
        self.sync_folder(os.path.dirname(path))

    def names(self, folder: str) -> list[str]:
        return os.listdir(folder)

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def lock(self, fd: int) -> bool:
        """For this process alone, until it ends; False: somebody else has it."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Room for these bytes, zeros where nothing was. Not posix_fallocate: where a file system cannot, that would
        write all of it."""
        while _libc.fallocate(fd, 0, offset, nbytes):
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        return os.preadv(fd, [into], offset)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        """What was written is there after a power loss, and the file's length."""
        os.fdatasync(fd)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def sync_folder(self, path: str) -> None:
        """So are the names in it."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_all(files: Files, fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        done = files.pwrite(fd, view, offset)
        if not done:
            raise OSError(errno.EIO, "nothing could be written")
        view, offset = view[done:], offset + done


def read_all(files: Files, fd: int, into: memoryview, offset: int) -> int:
    """How much there was: less than asked only at the file's end."""
    total = 0
    while total < len(into):
        done = files.pread(fd, into[total:], offset + total)
        if not done:
            break
        total += done
    return total


class Workers:
    """Threads for what blocks: one job after the other on each; ``done(result, error)`` comes on the reactor."""

    def __init__(self, name: str, threads: int, call_soon: Callable[[Callable[[], None]], None]):
        self._pool = ThreadPoolExecutor(threads, name)
        self._call_soon = call_soon

    def submit(self, job: Callable[[], object], done: Callable[[object, OSError | None], None]) -> None:
        """``job`` may raise OSError, which is ``error`` then. Any other fault is raised on the reactor."""

        def finish(future: Future) -> None:
            error = future.exception()
            if error is None or isinstance(error, OSError):
                done(None if error else future.result(), error)
            else:
                raise error

        self._pool.submit(job).add_done_callback(lambda future: self._call_soon(lambda: finish(future)))


def in_words(error: OSError) -> str:
    return error.strerror or str(error)
