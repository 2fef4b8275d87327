"""The disk tier's journal: which block lies where, in a file that is only appended to.

A file is a run of frames: 32 bytes of header (magic, CRC, kind, length, number, ``durable``), the content, and
zeros up to a multiple of 8. The CRC begins from the file's own, so that nothing left over from another file counts.
The first frame names the storage; then comes a snapshot, closed by END; then what happened since: places that were
given up (GONE), rows that were added (PUT), shapes of spaces (SPACE), in this order in time. Of one place the last
word counts.

A frame's ``durable`` is the number of the last frame that was known to be on the disk when it was written. Reading
stops at the first frame that is not whole, which after a crash is one that nobody relied on. Where a later frame
says that it had been durable, the disk has lost or changed what it held: then nothing in the file is believed, since
what was given up and written over since might come back under its old name.
"""

import contextlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from vllm_kvtier.store.lower.disk.files import FULL, Files, read_all, write_all
from vllm_kvtier.store.lower.disk.table import ROW, without_conflicts
from vllm_kvtier.store.lower.moving import SpaceShape

FORMAT = 1
HEAD, SPACE, PUT, GONE, END = range(1, 6)
STORAGE_ID = 16  # bytes
_MAGIC = b"KVTJ"
_FRAME = struct.Struct("<4sIB3xIQQ")
_HEAD = struct.Struct(f"<I{STORAGE_ID}sQ")  # format, storage, number of the file
_ROWS_A_FRAME = 8192
_ROOM = 1 << 20  # bytes allocated ahead, so that an append changes no metadata and seldom finds the disk full
RESERVE = 128 << 10  # of them, for what is given up: that must not come back even where nothing new fits
_encode, _decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(SpaceShape).decode

Entry = tuple[int, bytes]  # kind, content


def put(rows: np.ndarray) -> list[Entry]:
    return [(PUT, rows[at : at + _ROWS_A_FRAME].tobytes()) for at in range(0, len(rows), _ROWS_A_FRAME)]


def gone(places: Iterable[int]) -> Entry:
    return GONE, np.fromiter(places, "<u8").tobytes()


def space(shape: SpaceShape) -> Entry:
    return SPACE, _encode(shape)


def snapshot(rows: np.ndarray, shapes: Iterable[SpaceShape]) -> list[Entry]:
    return [space(s) for s in shapes] + put(rows) + [(END, struct.pack("<Q", len(rows)))]


@dataclass
class Found:
    """What was read. ``places``: of rows that do not hold although nothing says that they were given up."""

    number: int = 0  # of the newest file
    rows: np.ndarray = field(default_factory=lambda: np.zeros(0, ROW))
    places: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    shapes: dict[bytes, SpaceShape] = field(default_factory=dict)
    end: int = 0  # bytes that count
    frames: int = 0
    base: int = 0  # bytes of them that are the snapshot; 0: there is nothing to go on with
    note: str = ""


def path_of(folder: str, number: int) -> str:
    return os.path.join(folder, f"journal.{number}")


def numbers(files: Files, folder: str) -> list[int]:
    """Of the files there, newest first."""
    names = (name.partition("journal.")[2] for name in files.names(folder))
    return sorted((int(n) for n in names if n.isdigit()), reverse=True)


def read(files: Files, folder: str, storage: bytes, capacity: int) -> Found:
    """What the newest file says of ``storage`` and its ``capacity`` pages; changes nothing. Raises OSError.

    Older files are what a rename was to replace: believing one of them instead could bring back what is gone.
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
    """The file that is written to. All but ``__init__`` belongs to the one thread that writes; each method raises
    OSError, and then ``broken`` says whether the file can still be gone on with."""

    def __init__(self, files: Files, folder: str, storage: bytes, found: Found):
        self._files, self._folder, self._storage = files, folder, storage
        self.broken = False
        self._fd = -1
        self._number, self._end, self._frames = found.number, found.end, found.frames
        self._durable = self._frames
        self._room = 0
        self.base = found.base  # bytes of the snapshot it began with

    @property
    def appended(self) -> int:
        """Bytes since the snapshot."""
        return self._end - self.base

    def open(self) -> None:
        """Go on behind what was read, or begin with nothing."""
        if not self.base:
            self.replace(snapshot(np.zeros(0, ROW), ()))
            return
        self._fd = self._files.open(path_of(self._folder, self._number), os.O_RDWR)
        # What is left of an unfinished frame must not be there when the next one is half written. And what was read,
        # and the file's very name, may be on the disk only from now on: the last process may have died without the
        # machine.
        self._files.truncate(self._fd, self._end)
        self._allocate(0)
        self._files.sync(self._fd)
        self._files.sync_folder(self._folder)
        self.sweep()

    def append(self, entries: list[Entry]) -> None:
        """Durably, or not at all as long as it is not ``broken``."""
        data, frames = self._frames_of(entries, self._number, self._frames, self._durable)
        self._make_room(len(data), 0 if all(kind == GONE for kind, _ in entries) else RESERVE)
        try:
            write_all(self._files, self._fd, data, self._end)
            self._files.sync(self._fd)
        except OSError:
            self.broken = True  # what of it is on the disk, nobody knows
            raise
        self._end += len(data)
        self._frames = self._durable = frames

    def replace(self, entries: list[Entry]) -> None:
        """By a new file that begins with this snapshot."""
        number = self._number + 1
        new = path_of(self._folder, number)
        head = (HEAD, _HEAD.pack(FORMAT, self._storage, number))
        data, frames = self._frames_of([head, *entries], number, 0, 0)
        fd = self._files.open(f"{new}.new", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
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
        """Remove what is not read any more. Where that fails, it is tried again with the next snapshot."""
        with contextlib.suppress(OSError):
            for name in self._files.names(self._folder):
                number, _, rest = name.removeprefix("journal.").partition(".")
                if name.startswith("journal.") and number.isdigit() and (rest or int(number) < self._number):
                    self._files.unlink(os.path.join(self._folder, name))

    def _make_room(self, nbytes: int, spare: int) -> None:
        if self._end + nbytes + spare <= self._room:
            return
        error = self._allocate(nbytes)
        # Where the file system cannot allocate, writing finds out whether there is room. Where it is full, what is
        # left is kept for what must be written.
        if error is not None and spare and error.errno in FULL:
            raise error

    def _allocate(self, nbytes: int) -> OSError | None:
        nbytes += RESERVE + _ROOM
        try:
            self._files.allocate(self._fd, self._end, nbytes)
        except OSError as error:
            return error
        self._room = self._end + nbytes
        return None

    def _frames_of(self, entries: list[Entry], file: int, number: int, durable: int) -> tuple[bytes, int]:
        """The bytes, and the number of the last frame."""
        parts = []
        for kind, content in entries:
            number += 1
            tail = _FRAME.pack(_MAGIC, 0, kind, len(content), number, durable)[8:]
            crc = zlib.crc32(content, zlib.crc32(tail, 0 if kind == HEAD else _seed(self._storage, file)))
            parts += (_MAGIC, struct.pack("<I", crc), tail, content, bytes(-len(content) % 8))
        return b"".join(parts), number


def _seed(storage: bytes, file: int) -> int:
    return zlib.crc32(struct.pack("<Q", file), zlib.crc32(storage))


def _frame(data: bytearray, at: int, seed: int) -> tuple[int, memoryview, int, int] | None:
    """(kind, content, number, durable) of a whole frame."""
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
    """(kind, content, end) of frames from the second on, as long as they are whole. Raises ValueError if one is not
    that was once durable."""
    expected = 2
    while (frame := _frame(data, at, seed)) is not None and frame[2] == expected:
        at += _FRAME.size + len(frame[1]) + -len(frame[1]) % 8
        yield frame[0], frame[1], at
        expected += 1
    while (at := data.find(_MAGIC, at + 1)) >= 0:
        frame = None if at % 8 else _frame(data, at, seed)
        if frame is not None and frame[3] >= expected:
            raise ValueError(f"frame {expected} is damaged, which had been written safely")


def _understand(data: bytearray, number: int, storage: bytes, capacity: int) -> Found:
    head = _frame(data, 0, 0)
    if head is None or head[0] != HEAD or head[2] != 1 or len(head[1]) != _HEAD.size:
        return Found(number, note="its journal is damaged")
    version, belongs, _ = _HEAD.unpack(head[1])
    if version != FORMAT:
        return Found(number, note="its journal is of another version")
    if belongs != storage:
        return Found(number, note="its journal belongs to other data")
    events: list[np.ndarray] = []
    shapes: dict[bytes, SpaceShape] = {}
    found = Found(number, end=0, frames=1)
    counted = 0
    try:
        for kind, content, end in _frames(data, _FRAME.size + _HEAD.size + -_HEAD.size % 8, _seed(storage, number)):
            if kind == PUT:
                events.append(np.frombuffer(content, ROW))
                counted += len(events[-1]) if not found.base else 0
            elif kind == GONE:
                places = np.frombuffer(content, "<u8")
                given_up = np.zeros(len(places), ROW)  # of no pages
                given_up["place"] = places
                events.append(given_up)
            elif kind == SPACE:
                shape = _decode(content)
                shapes[shape.space] = shape
            elif kind == END and (counted,) != struct.unpack("<Q", content):
                return Found(number, note="its journal is damaged: the snapshot is not whole")
            elif kind == END:
                found.base = end
            found.end, found.frames = end, found.frames + 1
    except (ValueError, msgspec.MsgspecError) as error:
        return Found(number, note=f"its journal is damaged: {error}")
    if not found.base:
        return Found(number, note="its journal is damaged: the snapshot is not whole")
    rows = np.concatenate([np.zeros(0, ROW), *events])
    last = len(rows) - 1 - np.unique(rows["place"][::-1], return_index=True)[1]
    rows = rows[np.sort(last)]
    found.rows, found.places = without_conflicts(rows[rows["pages"] > 0], capacity)
    found.shapes = shapes
    return found
