"""Opens the disk tier's directory: ``lock``, the data file ``slots``, and the newest ``journal.N``.

Page 0 of the data file holds the storage's id instead of a block. The journal holds the same id: after the data file
was replaced, no journal matches, and the tier begins empty.
"""

import errno
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.memory.memory_limits import format_bytes as size_text
from vllm_kvtier.store.protocol import PAGE
from vllm_kvtier.store.tiers.disk import journal as j
from vllm_kvtier.store.tiers.disk.file_ops import FULL, Files, error_text, read_all, write_all
from vllm_kvtier.store.tiers.disk.mounts import has_own, mount_of, unmounted
from vllm_kvtier.store.tiers.disk.slot_table import SlotTable
from vllm_kvtier.store.tiers.process.protocol import NamespaceShape

MIN_PAGES = 16
JOURNAL_SHARE = 0.02  # of the tier's size, and of the file system's room: three journals of blocks of 16 KiB
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_HEADER = struct.Struct(f"<8sI{j.STORAGE_ID}s")
_MAGIC = b"KVTSLOTS"


@dataclass
class Storage:
    """An open directory. ``notes``: for the operator. ``writable``: ``journal`` is not None. ``sparse``: the file
    system has not allocated all blocks of the data file."""

    folder: str
    capacity: int  # pages
    left: int = 0  # bytes of its file system that stay free for others
    writable: bool = True
    sparse: bool = True
    direct: bool = False
    notes: list[str] = field(default_factory=list)
    data_fd: int = -1  # for blocks, with O_DIRECT if ``direct``
    file_fd: int = -1  # for other operations on the data file
    lock_fd: int = -1
    journal: j.Journal | None = None
    table: SlotTable = field(default_factory=lambda: SlotTable(0, j.Found().rows))
    shapes: dict[bytes, NamespaceShape] = field(default_factory=dict)

    @property
    def lock_path(self) -> str:
        return os.path.join(self.folder, "lock")

    @property
    def slots_path(self) -> str:
        return os.path.join(self.folder, "slots")

    def only_reads(self, reason: str) -> None:
        self.writable, self.journal = False, None
        self.notes.append(f"read only: {reason}")

    def close(self, files: Files) -> None:
        for fd in (self.data_fd, self.file_fd, self.lock_fd):
            if fd >= 0:
                files.close(fd)


def open_storage(files: Files, folder: str, nbytes: int, *, preallocate: bool, direct: bool) -> Storage:
    """Raises KVTierError if it can be neither read nor written, or if another process uses it. ``nbytes``: of the data
    file and the journal."""
    storage = Storage(folder, data_pages(nbytes))
    if nbytes < MIN_PAGES * PAGE:
        raise KVTierError(f"a disk tier of {nbytes} bytes is too small: at least {MIN_PAGES * PAGE} are required")
    try:
        _lock(files, storage)
        _open_slots(files, storage, direct)
        _limit_to_room(files, storage, nbytes)
        _recover(files, storage, preallocate)
    except OSError as error:
        storage.close(files)
        raise KVTierError(f"the disk tier cannot use {folder}: {error_text(error)}") from error
    except KVTierError:
        storage.close(files)
        raise
    return storage


def _lock(files: Files, storage: Storage) -> None:
    path, folder = storage.lock_path, Path(storage.folder)
    if (point := unmounted(folder)) is not None:
        raise KVTierError(f"the disk tier cannot use {folder}: nothing is mounted at {point}, which /etc/fstab names")
    try:
        if files.make_folder(storage.folder):
            storage.notes.append(f"{folder} is new, on the file system that is mounted at {mount_of(folder).point}")
        elif reason := files.refusal(storage.folder):
            raise KVTierError(f"the disk tier does not use {folder}: {reason}")
        storage.lock_fd = files.open(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        storage.only_reads(f"{storage.folder} cannot be written to ({error_text(error)})")
        try:
            storage.lock_fd = files.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return
    if not files.lock(storage.lock_fd):
        raise KVTierError(f"another store uses {storage.folder}: set a different disk_path for each store")


def _open_slots(files: Files, storage: Storage, direct: bool) -> None:
    path = storage.slots_path
    if storage.writable:
        try:
            storage.file_fd = files.open(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            storage.only_reads(f"{path} cannot be written to ({error_text(error)})")
    if not storage.writable:
        storage.file_fd = files.open(path, os.O_RDONLY)
    flags = os.O_RDWR if storage.writable else os.O_RDONLY
    try:
        storage.data_fd = files.open(path, flags | (os.O_DIRECT if direct else 0))
        storage.direct = direct
    except OSError as error:
        if not direct or error.errno != errno.EINVAL:
            raise
        storage.data_fd = files.open(path, flags)
        storage.notes.append("its file system has no O_DIRECT: reads and writes also fill the page cache")


def data_pages(nbytes: int) -> int:
    """Pages of the data file of a tier that may take ``nbytes``."""
    return max(MIN_PAGES, int(nbytes * (1 - JOURNAL_SHARE)) // PAGE)


def _limit_to_room(files: Files, storage: Storage, nbytes: int) -> None:
    """A tier larger than its file system's room could neither write nor evict once that is full, nor could others."""
    storage.left = 0 if has_own(Path(storage.folder)) else files.left_to_others(storage.folder)
    _, room = files.room(storage.file_fd, storage.folder, storage.left)
    if room < nbytes and storage.writable:
        storage.capacity = data_pages(room)
        reason = " beside what stays free for others" if storage.left else ""
        text = f"it may take {size_text(room)} of its {size_text(nbytes)}: its file system has no more room"
        storage.notes.append(text + reason)


def _recover(files: Files, storage: Storage, preallocate: bool) -> None:
    name = _name(files, storage.file_fd)
    had_journal = bool(j.numbers(files, storage.folder))
    if name is not None:
        found = j.read(files, storage.folder, name, storage.capacity)
    else:
        found = j.Found(max(j.numbers(files, storage.folder), default=0))
        if had_journal:
            found.note = "its data file was replaced or damaged"
        if not storage.writable:
            raise KVTierError(f"the disk tier cannot write to {storage.folder}, which holds no blocks to read")
        name = os.urandom(j.STORAGE_ID)
        header = _HEADER.pack(_MAGIC, j.FORMAT_VERSION, name)
        write_all(files, storage.file_fd, header + struct.pack("<I", zlib.crc32(header)), 0)
        files.sync(storage.file_fd)
    if found.note:
        storage.notes.append(f"it begins empty: {found.note}")
    if storage.writable:
        try:
            if files.size(storage.file_fd) > storage.capacity * PAGE:  # first: a full file system has no room to log it
                files.truncate(storage.file_fd, storage.capacity * PAGE)
            storage.journal = j.Journal(files, storage.folder, name, found)
            storage.journal.open()
            if len(found.positions):
                storage.journal.append([j.gone(found.positions)])
            _size(files, storage, preallocate)
        except OSError as error:
            storage.only_reads(f"its journal or data file in {storage.folder} cannot be written ({error_text(error)})")
    storage.table = SlotTable(storage.capacity, found.rows)
    storage.shapes = found.shapes


def _name(files: Files, fd: int) -> bytes | None:
    data = bytearray(_HEADER.size + 4)
    if read_all(files, fd, memoryview(data), 0) < len(data):
        return None
    magic, version, name = _HEADER.unpack_from(data)
    whole = struct.unpack_from("<I", data, _HEADER.size)[0] == zlib.crc32(data[: _HEADER.size])
    return name if whole and (magic, version) == (_MAGIC, j.FORMAT_VERSION) else None


def _size(files: Files, storage: Storage, preallocate: bool) -> None:
    """Set the data file's size to the tier's capacity."""
    nbytes = storage.capacity * PAGE
    if files.size(storage.file_fd) != nbytes:
        files.truncate(storage.file_fd, nbytes)
    if not preallocate:
        return
    try:
        files.allocate(storage.file_fd, 0, nbytes)
        storage.sparse = False
    except OSError as error:
        storage.notes.append(f"its {size_text(nbytes)} could not be preallocated ({error_text(error)})")


class Room:
    """Allocates file system blocks before a write, so that a full file system is reported for each block, and before
    any data is lost. ``pages``: of the file; 0: all are allocated."""

    def __init__(self, files: Files, fd: int, pages: int, rows: np.ndarray):
        self._files, self._fd = files, fd
        self._allocated = bytearray(pages + 1)
        if pages:
            change = np.frombuffer(self._allocated, np.int8)  # no two blocks begin, or end, at one page
            change[rows["place"]] += 1
            change[rows["place"] + rows["pages"]] -= 1
            np.cumsum(change, out=change)

    def is_allocated(self, spans: Sequence[tuple[int, int]]) -> bool:
        """``spans``: (position, pages)."""
        return all(self._allocated.find(0, position, position + pages) < 0 for position, pages in spans)

    def allocate(self, spans: Sequence[tuple[int, int]]) -> tuple[list[bool], str]:
        """(which fit, why others do not). Blocking; one call at a time. Raises OSError for other errors."""
        fits, text = [], ""
        for position, pages in spans:
            try:
                if not self.is_allocated([(position, pages)]):
                    self._files.allocate(self._fd, position * PAGE, pages * PAGE)
                    self._allocated[position : position + pages] = b"\1" * pages
                fits.append(True)
            except OSError as error:
                if error.errno == errno.EOPNOTSUPP:
                    self._allocated = bytearray()  # the write reports a full file system
                    fits.append(True)
                    continue
                if error.errno not in FULL:
                    raise
                fits.append(False)
                text = f"the file system is full ({error_text(error)})"
        return fits, text
