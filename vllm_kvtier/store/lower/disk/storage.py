"""Opening the disk tier's directory: ``lock``, the data file ``slots``, and the newest ``journal.N``.

Page 0 of the data file names the storage, and so does the journal: a data file that was exchanged or made anew
finds no journal to its name, and the tier begins empty. No block lies there.
"""

import errno
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.limits import in_words as bytes_in_words
from vllm_kvtier.store.lower.disk import journal as j
from vllm_kvtier.store.lower.disk.files import FULL, Files, in_words, read_all, write_all
from vllm_kvtier.store.lower.disk.table import Table
from vllm_kvtier.store.lower.moving import SpaceShape
from vllm_kvtier.store.messages import PAGE

MIN_PAGES = 16
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
_HEADER = struct.Struct(f"<8sI{j.STORAGE_ID}s")
_MAGIC = b"KVTSLOTS"


@dataclass
class Storage:
    """An open directory. ``notes``: what a person should know of it. ``writable``: it can be written to, and
    ``journal`` is not None. ``sparse``: writing may need room that the file system has yet to find."""

    folder: str
    capacity: int  # pages
    writable: bool = True
    sparse: bool = True
    direct: bool = False
    notes: list[str] = field(default_factory=list)
    data_fd: int = -1  # for blocks, with O_DIRECT if ``direct``
    file_fd: int = -1  # for everything else about the data file
    lock_fd: int = -1
    journal: j.Journal | None = None
    table: Table = field(default_factory=lambda: Table(0, j.Found().rows))
    shapes: dict[bytes, SpaceShape] = field(default_factory=dict)

    def only_reads(self, reason: str) -> None:
        self.writable, self.journal = False, None
        self.notes.append(f"it is read only: {reason}")

    def close(self, files: Files) -> None:
        for fd in (self.data_fd, self.file_fd, self.lock_fd):
            if fd >= 0:
                files.close(fd)


def open_storage(files: Files, folder: str, nbytes: int, *, preallocate: bool, direct: bool) -> Storage:
    """Raises KVTierError if there is nothing to read and nothing can be written, or another process has it."""
    storage = Storage(folder, nbytes // PAGE)
    if storage.capacity < MIN_PAGES:
        raise KVTierError(f"a disk tier of {nbytes} bytes is too small: the least is {MIN_PAGES * PAGE}")
    try:
        _lock(files, storage)
        _open_slots(files, storage, direct)
        _recover(files, storage, preallocate)
    except OSError as error:
        storage.close(files)
        raise KVTierError(f"the disk tier cannot use {folder}: {in_words(error)}") from error
    except KVTierError:
        storage.close(files)
        raise
    return storage


def _lock(files: Files, storage: Storage) -> None:
    path = os.path.join(storage.folder, "lock")
    try:
        files.make_folder(storage.folder)
        storage.lock_fd = files.open(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
        storage.only_reads(f"{storage.folder} cannot be written to ({in_words(error)})")
        try:
            storage.lock_fd = files.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return
    if not files.lock(storage.lock_fd):
        raise KVTierError(f"another store uses {storage.folder}: each needs a disk_path of its own")


def _open_slots(files: Files, storage: Storage, direct: bool) -> None:
    path = os.path.join(storage.folder, "slots")
    if storage.writable:
        try:
            storage.file_fd = files.open(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            storage.only_reads(f"{path} cannot be written to ({in_words(error)})")
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
        storage.notes.append("no O_DIRECT on its file system: what it reads and writes also fills the page cache")


def _recover(files: Files, storage: Storage, preallocate: bool) -> None:
    name = _name(files, storage.file_fd)
    had_journal = bool(j.numbers(files, storage.folder))
    if name is not None:
        found = j.read(files, storage.folder, name, storage.capacity)
    else:
        found = j.Found(max(j.numbers(files, storage.folder), default=0))
        if had_journal:
            found.note = "its data file was exchanged or damaged"
        if not storage.writable:
            raise KVTierError(f"the disk tier cannot write to {storage.folder}, and nothing is there to be read")
        name = os.urandom(j.STORAGE_ID)
        header = _HEADER.pack(_MAGIC, j.FORMAT, name)
        write_all(files, storage.file_fd, header + struct.pack("<I", zlib.crc32(header)), 0)
        files.sync(storage.file_fd)
    if found.note:
        storage.notes.append(f"it begins empty: {found.note}")
    if storage.writable:
        try:
            storage.journal = j.Journal(files, storage.folder, name, found)
            storage.journal.open()
            if len(found.places):
                storage.journal.append([j.gone(found.places)])
            _size(files, storage, preallocate)
        except OSError as error:
            storage.only_reads(f"its journal or its size in {storage.folder} cannot be written ({in_words(error)})")
    storage.table = Table(storage.capacity, found.rows)
    storage.shapes = found.shapes


def _name(files: Files, fd: int) -> bytes | None:
    data = bytearray(_HEADER.size + 4)
    if read_all(files, fd, memoryview(data), 0) < len(data):
        return None
    magic, version, name = _HEADER.unpack_from(data)
    whole = struct.unpack_from("<I", data, _HEADER.size)[0] == zlib.crc32(data[: _HEADER.size])
    return name if whole and (magic, version) == (_MAGIC, j.FORMAT) else None


def _size(files: Files, storage: Storage, preallocate: bool) -> None:
    """Neither the file nor a block in it reaches beyond what the tier may take."""
    nbytes = storage.capacity * PAGE
    if files.size(storage.file_fd) != nbytes:
        files.truncate(storage.file_fd, nbytes)
    if not preallocate:
        return
    try:
        files.allocate(storage.file_fd, 0, nbytes)
        storage.sparse = False
    except OSError as error:
        storage.notes.append(f"its {bytes_in_words(nbytes)} could not be preallocated ({in_words(error)})")


class Room:
    """Finds the file system's room for blocks before they are written, so that a full one says so in words, of each
    block, and before anything is lost. ``pages``: of the file; 0: all its room is there."""

    def __init__(self, files: Files, fd: int, pages: int, rows: np.ndarray):
        self._files, self._fd = files, fd
        change = np.zeros(pages + 1, np.int8)  # no two blocks begin, or end, at one page
        if pages:
            change[rows["place"]] += 1
            change[rows["place"] + rows["pages"]] -= 1
        self._there = bytearray(np.cumsum(change, dtype=np.int8)[:pages])

    def is_there(self, spans: Sequence[tuple[int, int]]) -> bool:
        """``spans``: (place, pages)."""
        return all(self._there.find(0, place, place + pages) < 0 for place, pages in spans)

    def make(self, spans: Sequence[tuple[int, int]]) -> tuple[list[bool], str]:
        """(which fit, why others do not). Blocks, one call at a time. Raises OSError if it cannot be known."""
        fits, words = [], ""
        for place, pages in spans:
            try:
                if not self.is_there([(place, pages)]):
                    self._files.allocate(self._fd, place * PAGE, pages * PAGE)
                    self._there[place : place + pages] = b"\1" * pages
                fits.append(True)
            except OSError as error:
                if error.errno == errno.EOPNOTSUPP:
                    self._there = bytearray()  # then writing finds out
                    fits.append(True)
                    continue
                if error.errno not in FULL:
                    raise
                fits.append(False)
                words = f"the file system is full ({in_words(error)})"
        return fits, words
