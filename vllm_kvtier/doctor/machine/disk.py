"""The directory of a disk tier, tested with an unnamed file, which cannot be left behind."""

import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

from vllm_kvtier.doctor.report import Check, fail, ok, warn
from vllm_kvtier.store import linux
from vllm_kvtier.store.memory.memory_limits import format_bytes
from vllm_kvtier.store.tiers.disk.file_ops import FULL, Files, wrong_file
from vllm_kvtier.store.tiers.disk.mounts import REMOTE, TABLE, has_own, mount_of, unmounted

_TEST_BYTES = 64 << 10


def disk(folder: Path, size: int, files: Files | None = None, mounts: Path = TABLE) -> list[Check]:
    """``size``: maximum bytes of the tier. ``files``: tests pass a disk that fails."""
    files, name = files or Files(), f"disk {folder}"
    if (point := unmounted(folder, mounts)) is not None:
        return [fail(name, f"nothing is mounted at {point}, which /etc/fstab names", f"mount {point}")]
    parent = folder
    try:
        if not os.path.lexists(folder):
            parent = folder.parent
        if not parent.exists():
            message = f"there is no {parent}, and a store makes no more than one folder"
            return [fail(name, message, "mount its disk, or make it")]
        if not parent.is_dir():
            return [fail(name, f"{parent} is not a directory", "choose a directory, on a local SSD")]
        if parent == folder and (reason := files.refusal(str(folder)) or _wrong_files(folder)):
            fix = "remove it, so that the store makes it; or give it and its files to the user that runs the store"
            return [fail(name, f"a store of this user does not use it: {reason}", fix)]
        fd = files.open(str(parent.resolve()), linux.O_TMPFILE | os.O_RDWR)
    except OSError as error:
        return [_unwritable(name, parent, error)]
    try:
        try:
            files.allocate(fd, 0, _TEST_BYTES)
            with mmap.mmap(-1, _TEST_BYTES) as page:
                files.pwrite(fd, page, 0)
            files.sync(fd)
        except OSError as error:
            return [_unwritable(name, parent, error)]
        space = _room(name, files, fd, parent, folder, size)
    finally:
        files.close(fd)
    return [space, *_kind(name, parent, files, mounts)]


def _wrong_files(folder: Path) -> str:
    with suppress(PermissionError):  # to list it: `_room` reports that
        for path in folder.iterdir():
            ours = path.name in ("lock", "slots") or path.name.startswith("journal.")
            if ours and (reason := wrong_file(path.lstat(), str(folder))):
                return f"{path.name} is not used: {reason}"
    return ""


def _unwritable(name: str, folder: Path, error: OSError) -> Check:
    if error.errno in FULL:
        return fail(name, f"{folder} is full: {error.strerror}", "free space on it, or choose another disk")
    if error.errno == errno.EROFS:
        message = f"{folder} is on a file system that is mounted read-only"
        return fail(name, message, "mount it rw, or choose another disk")
    if error.errno in (errno.EACCES, errno.EPERM):
        fix = "give the directory to the user that runs the engines"
        return fail(name, f"this user (uid {os.getuid()}) may not write to {folder}", fix)
    if error.errno in (errno.EOPNOTSUPP, errno.EISDIR):
        message = f"the file system of {folder} has no unnamed files, so doctor did not test writing"
        return warn(name, message, "use a local disk with ext4 or xfs")
    return fail(name, f"{folder} cannot be written: {error.strerror or error}", "see dmesg; choose another disk")


def _room(name: str, files: Files, fd: int, parent: Path, folder: Path, size: int) -> Check:
    """``fd``: of a test file in ``parent``, which is ``folder`` if that exists."""
    left = 0 if has_own(folder) else files.left_to_others(str(parent))
    try:
        _, room = files.room(fd, str(parent), left)
    except OSError as error:
        fix = "give the directory to the user that runs the engines"
        return fail(name, f"{folder} cannot be listed: {error.strerror or error}", fix)
    message = f"room for {format_bytes(room)} of the {format_bytes(size)} that are configured"
    message += f"; {format_bytes(left)}, or half of what is free if that is less, stay free for others" if left else ""
    if parent != folder:
        message += f"; it would be made on the file system that is mounted at {mount_of(parent).point}"
    if room < size:
        fix = "a smaller store_disk_size, more free space on that disk, or a disk of its own, mounted there"
        return warn(name, message, fix)
    return ok(name, message)


def _kind(name: str, parent: Path, files: Files, mounts: Path) -> list[Check]:
    kind = mount_of(parent, mounts).kind
    if kind == "tmpfs":
        return [warn(name, "it is memory (tmpfs), not a disk: it counts against the container", "choose a disk")]
    if kind in REMOTE:
        return [warn(name, f"it is remote ({kind}): another node's store must not use it too", "choose a local disk")]
    try:
        files.close(files.open(str(parent.resolve()), linux.O_TMPFILE | os.O_RDWR | os.O_DIRECT))
    except OSError:
        message = f"its file system ({kind or 'unknown'}) has no O_DIRECT: reads and writes go through the page cache"
        return [warn(name, message, "a local disk with ext4 or xfs")]
    return []
