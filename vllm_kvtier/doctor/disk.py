"""The directory that a disk tier is to use: tried with a file that has no name, so that nothing is ever left there."""

import errno
import mmap
import os
from pathlib import Path

from vllm_kvtier.doctor.report import Check, fail, ok, warn
from vllm_kvtier.store.limits import in_words
from vllm_kvtier.store.lower.disk.files import FULL, Files

_TRY = 64 << 10  # bytes
_REMOTE = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"}


def disk(folder: Path, size: int, files: Files | None = None, mounts: Path = Path("/proc/self/mounts")) -> list[Check]:
    """``size``: bytes that the tier may take there. ``files``: of tests, a disk that fails."""
    files, name = files or Files(), f"disk {folder}"
    parent = folder
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir():
        return [fail(name, f"{parent} is no directory", "choose a directory, on a local SSD")]
    try:
        fd = files.open(str(parent), os.O_TMPFILE | os.O_RDWR)
    except OSError as error:
        return [_unwritable(name, parent, error)]
    try:
        try:
            files.allocate(fd, 0, _TRY)
            with mmap.mmap(-1, _TRY) as page:
                files.pwrite(fd, page, 0)
            files.sync(fd)
        except OSError as error:
            return [_unwritable(name, parent, error)]
        checks = _room(name, parent, folder, size)
    finally:
        files.close(fd)
    return checks + _kind(name, parent, files, mounts)


def _unwritable(name: str, folder: Path, error: OSError) -> Check:
    if error.errno in FULL:
        return fail(name, f"{folder} is full: {error.strerror}", "make room there, or choose another disk")
    if error.errno == errno.EROFS:
        return fail(
            name, f"{folder} is on a file system that is mounted read-only", "mount it rw, or choose another disk"
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        remedy = "let the user who runs the engines own the directory"
        return fail(name, f"this user (uid {os.getuid()}) may not write to {folder}", remedy)
    if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):
        return warn(
            name,
            f"the file system of {folder} has no unnamed files, so writing there was not tried",
            "a local disk with ext4 or xfs is what the tier is made for",
        )
    return fail(name, f"{folder} cannot be written: {error.strerror or error}", "look at dmesg; choose another disk")


def _room(name: str, parent: Path, folder: Path, size: int) -> list[Check]:
    found = os.statvfs(parent)
    free = found.f_bavail * found.f_frsize
    if folder.is_dir():  # what an earlier store left is used again
        free += sum(each.stat().st_blocks * 512 for each in folder.iterdir() if each.is_file())
    if free < size:
        return [
            warn(
                name,
                f"{in_words(free)} are free there, {in_words(size)} are to be used: the tier stops at what there is",
                "a smaller store_disk_size, or room on that disk",
            )
        ]
    return [ok(name, f"{in_words(free)} free for {in_words(size)}")]


def _kind(name: str, parent: Path, files: Files, mounts: Path) -> list[Check]:
    kind = _file_system(parent, mounts)
    if kind == "tmpfs":
        return [warn(name, "it is memory (tmpfs), not a disk: it counts against the container", "choose a disk")]
    if kind in _REMOTE:
        return [warn(name, f"it is remote ({kind}): another node's store may not use it too", "choose a local disk")]
    try:
        files.close(files.open(str(parent), os.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return [
            warn(
                name,
                f"its file system ({kind or 'unknown'}) has no O_DIRECT: reads and writes go through the page cache",
                "a local disk with ext4 or xfs",
            )
        ]
    return []


def _file_system(path: Path, mounts: Path) -> str:
    best, kind = -1, ""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    where = path.resolve()
    for words in map(str.split, lines):
        point = Path(words[1].replace("\\040", " "))
        if where.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), words[2]
    return kind
