"""All file operations of the disk tier, so that a test can replace them by a failing disk.

Every method may raise OSError. As the system calls, ``pread`` and ``pwrite`` may transfer less than requested;
``write_all`` and ``read_all`` repeat them.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from vllm_kvtier.runtime_dir import distrust
from vllm_kvtier.store.tiers.disk.mounts import mount_of

T = TypeVar("T")
FULL = (errno.ENOSPC, errno.EDQUOT)
LEFT_SHARE = 0.2  # of a shared file system: kubelet evicts pods below 10 % (nodefs) or 15 % (imagefs, often the same)
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Files:
    def make_folder(self, path: str) -> bool:
        """Make the folder durably, with mode 0700; False if it exists. Its parent must exist: if a disk is not mounted,
        its blocks must not go to the file system above."""
        parent = os.path.dirname(os.path.abspath(path))
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            return False
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, f"there is no {parent}: mount its disk, or make it") from None
        self.sync_folder(parent)
        return True

    def refusal(self, folder: str) -> str:
        """Why a folder is not used: another user made it, or a link to it, where every user could; "" if nothing is
        wrong. Elsewhere its owner does not matter: users that could make it were trusted before."""
        if not os.path.exists(folder):
            return "it is a link to nothing"
        link = Path(folder).absolute()
        for path in (link, link.resolve()):
            if _all_may_write(path.parent) and mount_of(path).point != path:
                found = path.lstat()
                if reason := distrust(found, _owners(found, folder)):
                    return reason
        return ""

    def names(self, folder: str) -> list[str]:
        return os.listdir(folder)

    def open(self, path: str, flags: int) -> int:
        """Open a file of this tier, if nothing speaks against it; see ``wrong_file``."""
        if os.path.lexists(path) and stat.S_ISFIFO(os.lstat(path).st_mode):  # whose open may wait for good
            raise PermissionError(errno.EPERM, f"{path} is not used: it is not a file")
        try:
            fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise PermissionError(errno.EPERM, f"{path} is not used: it is a link") from error
        if reason := wrong_file(os.fstat(fd), os.path.dirname(path)):
            os.close(fd)
            raise PermissionError(errno.EPERM, f"{path} is not used: {reason}")
        return fd

    def close(self, fd: int) -> None:
        os.close(fd)

    def lock(self, fd: int) -> bool:
        """Lock for this process until it ends. False: another process holds the lock."""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_at(self, path: str, fd: int) -> bool:
        """Whether the open file is still there: its folder may have been removed, replaced, or mounted over."""
        try:
            return os.path.samestat(os.lstat(path), os.fstat(fd))
        except FileNotFoundError:
            return False

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def left_to_others(self, folder: str) -> int:
        """Bytes that a tier leaves free of a file system that it shares: a part of those that ``df`` adds up, used and
        available."""
        found = os.statvfs(folder)
        return int(LEFT_SHARE * (found.f_blocks - found.f_bfree + found.f_bavail)) * found.f_frsize

    def room(self, fd: int, folder: str, left: int) -> tuple[int, int]:
        """Bytes of the file system that the tier in ``folder`` has, and that it may have if ``left`` stay free, or half
        of what others do not use, if that is less and no kubelet watches. ``fd``: of a file in it. Of a directory's
        quota (ext4, XFS) only the folder's numbers know."""
        found = os.statvfs(folder)
        own = [name for name in self.names(folder) if name.startswith(("slots", "journal."))]
        has = sum(os.lstat(os.path.join(folder, name)).st_blocks * 512 for name in own)
        most = has + found.f_bavail * found.f_frsize if found.f_blocks else sys.maxsize
        kept = left if "KUBERNETES_SERVICE_HOST" in os.environ else min(left, most // 2)
        return has, max(0, min(most - kept, has + _quota_left(fd)))

    def truncate(self, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Allocate these bytes, zeros if new. Not posix_fallocate, which writes all bytes if the file system lacks
        fallocate."""
        while _libc.fallocate(fd, 0, offset, nbytes):
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        return os.preadv(fd, [into], offset)

    def pwrite(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def sync(self, fd: int) -> None:
        """Make written bytes and the file's length durable."""
        os.fdatasync(fd)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def wrong_file(found: os.stat_result, folder: str) -> str:
    """Why a file of a tier is not used: it is a link, or another user may have made it; "" if nothing is wrong."""
    if not stat.S_ISREG(found.st_mode):
        return "it is a link" if stat.S_ISLNK(found.st_mode) else "it is not a file"
    if found.st_nlink > 1:
        return "it has another name (a hard link)"
    return distrust(found, _owners(found, folder)) if _all_may_write(Path(folder)) else ""


def _all_may_write(folder: Path) -> bool:
    return bool(folder.stat().st_mode & stat.S_IWOTH)


def _owners(found: os.stat_result, folder: str) -> set[int]:
    """Users whose files are used: root and this one, by any name that the file system gives it. NFS servers rename."""
    owners = {0, os.geteuid()}
    if found.st_uid not in owners:
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as ours:
            owners.add(os.fstat(ours.fileno()).st_uid)
    return owners


def _quota_left(fd: int) -> int:
    """Bytes that the quotas of this user and group leave: quotactl_fd(2), Q_GETQUOTA. Most file systems have none."""
    left, quota = sys.maxsize, (ctypes.c_uint64 * 9)()  # struct if_dqblk: limit in KiB, soft limit, bytes in use, ...
    for kind, who in enumerate((os.geteuid(), os.getegid())):
        failed = _libc.syscall(ctypes.c_long(443), ctypes.c_int(fd), ctypes.c_uint(0x80000700 | kind), who, quota)
        if not failed and quota[0]:
            left = min(left, max(0, quota[0] * 1024 - quota[2]))
    return left


def write_all(files: Files, fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        done = files.pwrite(fd, view, offset)
        if not done:
            raise OSError(errno.EIO, "nothing could be written")
        view, offset = view[done:], offset + done


def read_all(files: Files, fd: int, into: memoryview, offset: int) -> int:
    """Bytes read: fewer than requested only at the file's end."""
    total = 0
    while total < len(into):
        done = files.pread(fd, into[total:], offset + total)
        if not done:
            break
        total += done
    return total


class Workers:
    """Threads for blocking jobs; ``done(result, error)`` is called on the reactor."""

    def __init__(self, name: str, threads: int, call_soon: Callable[[Callable[[], None]], None]):
        self._pool = ThreadPoolExecutor(threads, name)
        self._call_soon = call_soon

    def submit(self, job: Callable[[], T], done: Callable[[T | None, OSError | None], None]) -> None:
        """An OSError of ``job`` becomes ``error``; the result is None then. Other exceptions are raised on the
        reactor."""

        def finish(future: Future[T]) -> None:
            error = future.exception()
            if error is None or isinstance(error, OSError):
                done(None if error else future.result(), error)
            else:
                raise error

        self._pool.submit(job).add_done_callback(lambda future: self._call_soon(lambda: finish(future)))


def error_text(error: OSError) -> str:
    return error.strerror or str(error)
