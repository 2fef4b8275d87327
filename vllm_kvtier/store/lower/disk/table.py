"""What lies where on a disk: the rows of its journal that still hold, as arrays, because there may be millions."""

import bisect
import struct
from collections.abc import Iterable, Iterator

import numpy as np

from vllm_kvtier.store.lower.moving import Move
from vllm_kvtier.store.records import HASH

# One block. ``mark``: see disk_data.marks. ``tenant`` is padded with zeros; ``tenant_bytes`` of it count.
ROW = np.dtype(
    [
        ("space", f"V{HASH}"),
        ("hash", f"V{HASH}"),
        ("parent", f"V{HASH}"),
        ("tenant", f"V{HASH}"),
        ("place", "<u8"),  # 4 KiB pages from the file's start
        ("pages", "<u4"),
        ("mark", "<u4"),
        ("group", "u1"),
        ("tenant_bytes", "u1"),
        ("spare", "V6"),
    ]
)
_STRUCT = struct.Struct("<16s16s16s16sQIIBB6x")
assert _STRUCT.size == ROW.itemsize
_ZERO = np.zeros(1, f"V{HASH}")[0]


def pack(move: Move, mark: int) -> bytes:
    return _STRUCT.pack(
        move.space, move.hash, move.parent, move.tenant, move.place, move.pages, mark, move.group, len(move.tenant)
    )


def unpack(rows: np.ndarray) -> Iterator[Move]:
    """As moves, of slot 0."""
    for space, name, parent, tenant, place, pages, _, group, length in _STRUCT.iter_unpack(rows.tobytes()):
        yield Move(space, group, name, parent, tenant[:length], 0, pages, place)


class Table:
    """Rows that hold, none of which overlaps another, in the order in which they came."""

    def __init__(self, capacity: int, rows: np.ndarray):
        """``capacity``: pages. ``rows``: of what was found; none may overlap another."""
        self._rows, self._count = rows.copy(), len(rows)
        self._bytes = _bytes(self._rows)  # the same memory: numpy is slow at one row
        self._holds = np.ones(len(rows), bool)
        self._by_place = dict(zip(rows["place"].tolist(), range(len(rows)), strict=True))
        # 1 at a row's first page. A byte a page is a four-thousandth of the disk, and needs no tree to be searched.
        self._begins = bytearray(capacity)
        np.frombuffer(self._begins, np.uint8)[rows["place"]] = 1
        self._longest = int(rows["pages"].max(initial=0))

    def __len__(self) -> int:
        return len(self._by_place)

    def mark(self, move: Move) -> int | None:
        """Of the row that is this block, at its place; None: there is none."""
        number = self._by_place.get(move.place)
        if number is None:
            return None
        space, name, _, _, _, pages, mark, group, _ = self._row(number)
        same = name == move.hash and space == move.space and (group, pages) == (move.group, move.pages)
        return mark if same else None

    def add(self, packed: Iterable[bytes]) -> np.ndarray:
        """Rows of ``pack``, which overlap nothing here; as they go to the journal."""
        rows = np.frombuffer(b"".join(packed), ROW)
        if self._count + len(rows) > len(self._rows):
            self._grow(len(rows))
        begin, self._count = self._count, self._count + len(rows)
        self._rows[begin : self._count] = rows
        self._holds[begin : self._count] = True
        places = rows["place"]
        self._by_place.update(zip(places.tolist(), range(begin, self._count), strict=True))
        np.frombuffer(self._begins, np.uint8)[places] = 1
        self._longest = max(self._longest, int(rows["pages"].max(initial=0)))
        return rows

    def remove(self, places: Iterable[int]) -> list[int]:
        """Those of them that had rows."""
        removed = []
        for place in places:
            number = self._by_place.pop(place, None)
            if number is not None:
                self._holds[number], self._begins[place] = False, 0
                removed.append(place)
        return removed

    def within(self, place: int, pages: int) -> list[int]:
        """Places of the rows that overlap these pages."""
        found, at = [], max(0, place - self._longest + 1)
        while (at := self._begins.find(1, at, place + pages)) >= 0:
            if at >= place or at + self._row(self._by_place[at])[5] > place:
                found.append(at)
            at += 1
        return found

    def _row(self, number: int) -> tuple:
        return _STRUCT.unpack_from(self._bytes, number * _STRUCT.size)

    def rows(self) -> np.ndarray:
        """A copy of those that hold."""
        return self._rows[: self._count][self._holds[: self._count]]

    def _grow(self, more: int) -> None:
        """Room for more; forgets the holes."""
        rows = self.rows()
        self._count, size = len(rows), 2 * (len(rows) + more) + 1024
        self._rows, self._holds = np.zeros(size, ROW), np.zeros(size, bool)
        self._bytes = _bytes(self._rows)
        self._rows[: self._count], self._holds[: self._count] = rows, True
        self._by_place = dict(zip(rows["place"].tolist(), range(self._count), strict=True))


def _bytes(rows: np.ndarray) -> memoryview:
    return memoryview(rows.view(np.uint8)) if len(rows) else memoryview(b"")


def without_conflicts(rows: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows that may hold together, places of the others), both in order. Of two that overlap, or bear one name, the
    later holds; none lies beyond ``capacity`` pages.

    Under a correct server there are no others, but for a disk that was made smaller.
    """
    place, pages = rows["place"].astype(np.int64), rows["pages"].astype(np.int64)
    good = (pages > 0) & (place > 0) & (place < capacity) & (pages <= capacity - place)
    names: set[bytes] = set()
    for number in reversed(_alike(_keys(rows, "hash"))):
        row = rows[number]
        name = row["space"].tobytes() + row["hash"].tobytes() + row["group"].tobytes()
        good[number] &= name not in names
        names.add(name)
    numbers = np.flatnonzero(good)
    numbers = numbers[np.argsort(place[numbers])]
    begin, end = place[numbers], (place + pages)[numbers]
    reach = np.maximum.accumulate(end)
    into = np.zeros(len(numbers), bool)
    into[1:] = begin[1:] < reach[:-1]  # begins within an earlier one
    involved = into.copy()
    involved[:-1] |= into[1:] | (end[:-1] > begin[1:])
    if into.any():
        # One that reaches over several others has no neighbour that shows it: look at all below its end.
        for at in np.flatnonzero(involved):
            involved[at : np.searchsorted(begin, end[at])] = True
        taken: list[tuple[int, int]] = []
        for number in sorted(numbers[involved].tolist(), reverse=True):
            span = (int(place[number]), int(place[number] + pages[number]))
            at = bisect.bisect(taken, span)
            if (at and taken[at - 1][1] > span[0]) or (at < len(taken) and taken[at][0] < span[1]):
                good[number] = False
            else:
                taken.insert(at, span)
    return rows[good], rows["place"][~good]


def parents_first(rows: np.ndarray) -> np.ndarray:
    """The same rows, each after its parent where that is among them; they nearly always are already."""
    keys, parents = _keys(rows, "hash"), _keys(rows, "parent")
    order = np.argsort(keys, kind="stable")
    at = np.minimum(np.searchsorted(keys[order], parents), max(0, len(rows) - 1))
    parent = order[at] if len(rows) else order
    known = (keys[parent] == parents) & (rows["parent"] != _ZERO)
    if not (known & (parent > np.arange(len(rows)))).any():
        return rows
    above, placed, sequence = np.where(known, parent, -1).tolist(), [False] * len(rows), []
    for number in range(len(rows)):
        line = []
        while number >= 0 and not placed[number]:
            placed[number] = True  # at once, so that a circle (keys are short) ends
            line.append(number)
            number = above[number]
        sequence += reversed(line)
    return rows[sequence]


def _keys(rows: np.ndarray, name: str) -> np.ndarray:
    """uint64 of (space, group, the field ``name``); equal for equal ones, and nearly never for others."""

    def first(field: str) -> np.ndarray:
        return np.ascontiguousarray(rows[field]).view("<u8").reshape(-1, 2)[:, 0]

    return first(name) ^ (first("space") * np.uint64(0x9E3779B97F4A7C15)) ^ rows["group"].astype(np.uint64)


def _alike(keys: np.ndarray) -> list[int]:
    """Numbers of those that are not the only one of their kind, ascending."""
    order = np.argsort(keys, kind="stable")
    same = keys[order][1:] == keys[order][:-1]
    alike = np.zeros(len(keys), bool)
    alike[order[1:][same]] = alike[order[:-1][same]] = True
    return np.flatnonzero(alike).tolist()
