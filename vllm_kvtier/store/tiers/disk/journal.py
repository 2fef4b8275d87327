"""The disk tier's journal: the positions of blocks, in an append-only file.

A file is a sequence of frames: 32 bytes of header (magic, CRC, kind, length, number, ``durable``), the content, and
zeros up to a multiple of 8. The CRC is seeded with the file's id, so that frames of another file are invalid. The first
frame holds the storage id. A snapshot follows, closed by END, and then the changes in order of time: removed positions
(GONE), added rows (PUT), shapes of namespaces (NAMESPACE_ID). The last change of a position counts.

A frame's ``durable`` is the number of the last frame known to be durable when it was written. Reading stops at the
first incomplete frame; after a crash, no write depended on it. If a later frame shows that it had been durable, the
disk has lost data. Then the whole file is ignored, because a removed block, overwritten since, might reappear under its
old name.
"""

import contextlib
import errno
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from vllm_kvtier.store.tiers.disk.file_ops import FULL, Files, read_all, write_all
from vllm_kvtier.store.tiers.disk.slot_table import ROW, without_conflicts
from vllm_kvtier.store.tiers.process.protocol import NamespaceShape

FORMAT_VERSION = 1
HEAD, NAMESPACE_ID, PUT, GONE, END = range(1, 6)
STORAGE_ID = 16  # bytes
_MAGIC = b"KVTJ"
_FRAME = struct.Struct("<4sIB3xIQQ")
_HEAD = struct.Struct(f"<I{STORAGE_ID}sQ")  # format, storage, number of the file
_MAX_ROWS = 8192  # per frame
_PREALLOCATED_BYTES = 1 << 20  # so that an append changes no metadata and seldom finds the disk full
REMOVAL_RESERVE_BYTES = 128 << 10  # of them, for removals, which must be recorded even if nothing new fits
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(NamespaceShape).decode

Entry = tuple[int, bytes]  # kind, content


def put(rows: np.ndarray) -> list[Entry]:
    return [(PUT, rows[at : at + _MAX_ROWS].tobytes()) for at in range(0, len(rows), _MAX_ROWS)]


def gone(positions: Iterable[int]) -> Entry:
    return GONE, np.fromiter(positions, "<u8").tobytes()


def namespace_id(shape: NamespaceShape) -> Entry:
    return NAMESPACE_ID, _encode(shape)


def snapshot(rows: np.ndarray, shapes: Iterable[NamespaceShape]) -> list[Entry]:
    return [namespace_id(s) for s in shapes] + put(rows) + [(END, struct.pack("<Q", len(rows)))]


@dataclass
class Found:
    """The content of a journal. ``positions``: of invalid rows that no frame removed."""

    number: int = 0  # of the newest file
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, ROW))
    positions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    shapes: dict[bytes, NamespaceShape] = field(default_factory=dict)
    end: int = 0  # bytes of valid frames
    frames: int = 0
    base: int = 0  # bytes of the snapshot; 0: there is no valid file
    note: str = ""


def path_of(folder: str, number: int) -> str:
    return os.path.join(folder, f"journal.{number}")


def numbers(files: Files, folder: str) -> list[int]:
    """Numbers of the journal files, newest first."""
    names = (name.partition("journal.")[2] for name in files.names(folder))
    return sorted((int(n) for n in names if n.isdigit()), reverse=True)


def read(files: Files, folder: str, storage: bytes, capacity: int) -> Found:
    """Read the newest file of ``storage`` with ``capacity`` pages; changes nothing. Raises OSError.

    Older files are ignored: they were replaced by a rename, and reading one could bring back removed blocks.
    """
    for number in numbers(files, folder)[:1]:
        fd = files.open(path_of(folder, number), os.O_RDONLY)
        try:
            data = bytearray(files.size(fd))
            del data[read_all(files, fd, memoryview(data), 0) :]
        finally:
            files.close(fd)
        return _understand(data, number, storage, capacity)
    return Found()


class Journal:
    """The file that is written. All methods but ``__init__`` run on the writing thread. Each may raise OSError;
    ``broken`` then says whether the file is unusable."""

    def __init__(self, files: Files, folder: str, storage: bytes, found: Found):
        self._files, self._folder, self._storage = files, folder, storage
        self.broken = False
        self._fd = -1
        self._number, self._end, self._frames = found.number, found.end, found.frames
        self._durable = self._frames
        self._room = 0
        self.base = found.base  # bytes of its snapshot

    @property
    def appended(self) -> int:
        """Bytes since the snapshot."""
        return self._end - self.base

    def open(self) -> None:
        """Continue after the valid frames, or begin a new file."""
        if not self.base:
            self.replace(snapshot(np.zeros(0, ROW), ()))
            return
        self._fd = self._files.open(path_of(self._folder, self._number), os.O_RDWR)
        # Remove an incomplete frame, which must not mix with the next one. Sync the frames that were read, and the
        # file's name: the last process may have died before they were durable.
        self._files.truncate(self._fd, self._end)
        self._allocate(0)
        self._files.sync(self._fd)
        self._files.sync_folder(self._folder)
        self.sweep()

    def append(self, entries: list[Entry]) -> None:
        """Append durably. After an error nothing was appended, unless ``broken``."""
        data, frames = self._frames_of(entries, self._number, self._frames, self._durable)
        self._make_room(len(data), 0 if all(kind == GONE for kind, _ in entries) else REMOVAL_RESERVE_BYTES)
        try:
            write_all(self._files, self._fd, data, self._end)
            self._files.sync(self._fd)
        except OSError:
            self.broken = True  # the state on disk is unknown
            raise
        self._end += len(data)
        self._frames = self._durable = frames

    def replace(self, entries: list[Entry]) -> None:
        """Start a new file with this snapshot."""
        if self._fd >= 0 and not self._files.is_at(path_of(self._folder, self._number), self._fd):
            raise OSError(errno.ESTALE, "its folder was removed or replaced")  # by another store's, perhaps
        number = self._number + 1
        new = path_of(self._folder, number)
        head = (HEAD, _HEAD.pack(FORMAT_VERSION, self._storage, number))
        data, frames = self._frames_of([head, *entries], number, 0, 0)
        fd = self._files.open(f"{new}.new", os.O_RDWR | os.O_CREAT)
        try:
            if self._files.size(fd):  # not O_TRUNC, which comes before a file of others is refused
                self._files.truncate(fd, 0)
            write_all(self._files, fd, data, 0)
            self._files.sync(fd)
        except OSError:
            self._files.close(fd)
            self.sweep()
            raise
        try:
            self._files.rename(f"{new}.new", new)
            self._files.sync_folder(self._folder)
        except OSError:
            self.broken = True  # a restart may read either file
            raise
        old, self._fd = self._fd, fd
        self._number, self._end, self._frames, self._durable = number, len(data), frames, frames
        self.base, self._room = len(data), 0
        self._allocate(0)
        if old >= 0:
            self._files.close(old)
        self.sweep()

    def sweep(self) -> None:
        """Remove old files. Errors are ignored: the next snapshot tries again."""
        with contextlib.suppress(OSError):
            for name in self._files.names(self._folder):
                number, _, rest = name.removeprefix("journal.").partition(".")
                if name.startswith("journal.") and number.isdigit() and (rest or int(number) < self._number):
                    self._files.unlink(os.path.join(self._folder, name))

    def _make_room(self, nbytes: int, spare: int) -> None:
        if self._end + nbytes + spare <= self._room:
            return
        error = self._allocate(nbytes)
        # If the file system has no fallocate, the write reports a full disk. If it is full, the reserve remains for
        # removals.
        if error is not None and spare and error.errno in FULL:
            raise error

    def _allocate(self, nbytes: int) -> OSError | None:
        nbytes += REMOVAL_RESERVE_BYTES + _PREALLOCATED_BYTES
        try:
            self._files.allocate(self._fd, self._end, nbytes)
        except OSError as error:
            return error
        self._room = self._end + nbytes
        return None

    def _frames_of(self, entries: list[Entry], file: int, number: int, durable: int) -> tuple[bytes, int]:
        """(the bytes, the number of the last frame)."""
        parts: list[bytes] = []
        for kind, content in entries:
            number += 1
            tail = _FRAME.pack(_MAGIC, 0, kind, len(content), number, durable)[8:]
            crc = zlib.crc32(content, zlib.crc32(tail, 0 if kind == HEAD else _seed(self._storage, file)))
            parts += (_MAGIC, struct.pack("<I", crc), tail, content, bytes(-len(content) % 8))
        return b"".join(parts), number


def _seed(storage: bytes, file: int) -> int:
    return zlib.crc32(struct.pack("<Q", file), zlib.crc32(storage))


def _frame(data: bytearray, at: int, seed: int) -> tuple[int, memoryview, int, int] | None:
    """(kind, content, number, durable) of a valid frame; None if it is not."""
    if len(data) - at < _FRAME.size:
        return None
    magic, crc, kind, length, number, durable = _FRAME.unpack_from(data, at)
    begin = at + _FRAME.size
    if magic != _MAGIC or length > len(data) - begin:
        return None
    content = memoryview(data)[begin : begin + length]
    if zlib.crc32(content, zlib.crc32(memoryview(data)[at + 8 : begin], seed)) != crc:
        return None
    return kind, content, number, durable


def _frames(data: bytearray, at: int, seed: int) -> Iterator[tuple[int, memoryview, int]]:
    """(kind, content, end) of the valid frames from the second on. Raises ValueError if an invalid frame had been
    durable."""
    expected = 2
    while (frame := _frame(data, at, seed)) is not None and frame[2] == expected:
        at += _FRAME.size + len(frame[1]) + -len(frame[1]) % 8
        yield frame[0], frame[1], at
        expected += 1
    while (at := data.find(_MAGIC, at + 1)) >= 0:
        frame = None if at % 8 else _frame(data, at, seed)
        if frame is not None and frame[3] >= expected:
            raise ValueError(f"frame {expected} is damaged although it had been durable")


def _understand(data: bytearray, number: int, storage: bytes, capacity: int) -> Found:
    head = _frame(data, 0, 0)
    if head is None or head[0] != HEAD or head[2] != 1 or len(head[1]) != _HEAD.size:
        return Found(number, note="its journal is damaged")
    version, belongs, _ = _HEAD.unpack(head[1])
    if version != FORMAT_VERSION:
        return Found(number, note="its journal is of another version")
    if belongs != storage:
        return Found(number, note="its journal belongs to other data")
    events: list[np.ndarray] = []
    shapes: dict[bytes, NamespaceShape] = {}
    found = Found(number, end=0, frames=1)
    counted = 0
    try:
        for kind, content, end in _frames(data, _FRAME.size + _HEAD.size + -_HEAD.size % 8, _seed(storage, number)):
            if kind == PUT:
                events.append(np.frombuffer(content, ROW))
                counted += len(events[-1]) if not found.base else 0
            elif kind == GONE:
                positions = np.frombuffer(content, "<u8")
                given_up = np.zeros(len(positions), ROW)  # of no pages
                given_up["place"] = positions
                events.append(given_up)
            elif kind == NAMESPACE_ID:
                # A later version's, of a kind of cache unknown here: the server frees the positions of its blocks.
                with contextlib.suppress(msgspec.ValidationError):
                    shape = _decode(content)
                    shapes[shape.namespace_id] = shape
            elif kind == END and (counted,) != struct.unpack("<Q", content):
                return Found(number, note="its journal is damaged: the snapshot is incomplete")
            elif kind == END:
                found.base = end
            found.end, found.frames = end, found.frames + 1
    except (ValueError, msgspec.MsgspecError) as error:
        return Found(number, note=f"its journal is damaged: {error}")
    if not found.base:
        return Found(number, note="its journal is damaged: the snapshot is incomplete")
    rows = np.concatenate([np.zeros(0, ROW), *events])
    last = len(rows) - 1 - np.unique(rows["place"][::-1], return_index=True)[1]
    rows = rows[np.sort(last)]
    found.rows, found.positions = without_conflicts(rows[rows["pages"] > 0], capacity)
    found.shapes = shapes
    return found
