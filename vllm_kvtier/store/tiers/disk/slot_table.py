"""The blocks on a disk: the valid rows of its journal, as numpy arrays, because there may be millions."""

import bisect
import struct
from collections.abc import Iterable, Iterator

import numpy as np

from vllm_kvtier.store.index.types import HASH_BYTES
from vllm_kvtier.store.tiers.process.protocol import Move

# One block. ``space``: namespace id; ``place``: position. ``mark``: see data_file.marks. ``tenant``: padded with zeros.
ROW = np.dtype(
    [
        ("space", f"V{HASH_BYTES}"),
        ("hash", f"V{HASH_BYTES}"),
        ("parent", f"V{HASH_BYTES}"),
        ("tenant", f"V{HASH_BYTES}"),
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
_ZERO = np.zeros(1, f"V{HASH_BYTES}")[0]


def pack(move: Move, mark: int) -> bytes:
    return _STRUCT.pack(
        move.namespace_id,
        move.hash,
        move.parent,
        move.tenant,
        move.position,
        move.pages,
        mark,
        move.group,
        len(move.tenant),
    )


def unpack(rows: np.ndarray) -> Iterator[Move]:
    """Rows as moves with slot 0."""
    for namespace_id, name, parent, tenant, position, pages, _, group, length in _STRUCT.iter_unpack(rows.tobytes()):
        yield Move(namespace_id, group, name, parent, tenant[:length], 0, pages, position)


class SlotTable:
    """Valid rows in order of insertion. No two overlap."""

    def __init__(self, capacity: int, rows: np.ndarray):
        """``capacity``: pages. ``rows``: of the blocks found; no two may overlap."""
        self._rows, self._count = rows.copy(), len(rows)
        self._bytes = _bytes(self._rows)  # the same memory, because numpy is slow for single rows
        self._valid = np.ones(len(rows), bool)
        self._by_position = dict(zip(rows["place"].tolist(), range(len(rows)), strict=True))
        # 1 at a row's first page: a byte per 4 KiB page, searched without a tree.
        self._begins = bytearray(capacity)
        np.frombuffer(self._begins, np.uint8)[rows["place"]] = 1
        self._longest = int(rows["pages"].max(initial=0))

    def __len__(self) -> int:
        return len(self._by_position)

    def mark(self, move: Move) -> int | None:
        """The mark of this block at its position; None: the block is not there."""
        number = self._by_position.get(move.position)
        if number is None:
            return None
        namespace_id, name, _, _, _, pages, mark, group, _ = self._row(number)
        same = name == move.hash and namespace_id == move.namespace_id and (group, pages) == (move.group, move.pages)
        return mark if same else None

    def add(self, packed: Iterable[bytes]) -> np.ndarray:
        """Add rows of ``pack``, which must not overlap others. Returns them for the journal."""
        rows = np.frombuffer(b"".join(packed), ROW)
        if self._count + len(rows) > len(self._rows):
            self._grow(len(rows))
        begin, self._count = self._count, self._count + len(rows)
        self._rows[begin : self._count] = rows
        self._valid[begin : self._count] = True
        positions = rows["place"]
        self._by_position.update(zip(positions.tolist(), range(begin, self._count), strict=True))
        np.frombuffer(self._begins, np.uint8)[positions] = 1
        self._longest = max(self._longest, int(rows["pages"].max(initial=0)))
        return rows

    def remove(self, positions: Iterable[int]) -> list[int]:
        """Remove rows. Returns the positions that had one."""
        removed = []
        for position in positions:
            number = self._by_position.pop(position, None)
            if number is not None:
                self._valid[number], self._begins[position] = False, 0
                removed.append(position)
        return removed

    def within(self, position: int, pages: int) -> list[int]:
        """Positions of the rows that overlap these pages."""
        found, at = [], max(0, position - self._longest + 1)
        while (at := self._begins.find(1, at, position + pages)) >= 0:
            if at >= position or at + self._row(self._by_position[at])[5] > position:
                found.append(at)
            at += 1
        return found

    def _row(self, number: int) -> tuple[bytes, bytes, bytes, bytes, int, int, int, int, int]:
        return _STRUCT.unpack_from(self._bytes, number * _STRUCT.size)

    def rows(self) -> np.ndarray:
        """A copy of the valid rows."""
        valid: np.ndarray = self._rows[: self._count][self._valid[: self._count]]
        return valid

    def _grow(self, more: int) -> None:
        """Make room for ``more`` rows, without the removed ones."""
        rows = self.rows()
        self._count, size = len(rows), 2 * (len(rows) + more) + 1024
        self._rows, self._valid = np.zeros(size, ROW), np.zeros(size, bool)
        self._bytes = _bytes(self._rows)
        self._rows[: self._count], self._valid[: self._count] = rows, True
        self._by_position = dict(zip(rows["place"].tolist(), range(self._count), strict=True))


def _bytes(rows: np.ndarray) -> memoryview:
    return rows.view(np.uint8).data if len(rows) else memoryview(b"")


def without_conflicts(rows: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """(valid rows, positions of the others), both in order. Of two rows that overlap or have the same name, the later
    one is valid; none is beyond ``capacity`` pages. A correct server writes no others, unless the disk was shrunk."""
    position, pages = rows["place"].astype(np.int64), rows["pages"].astype(np.int64)
    good = (pages > 0) & (position > 0) & (position < capacity) & (pages <= capacity - position)
    names: set[bytes] = set()
    for number in reversed(_alike(_keys(rows, "hash"))):
        row = rows[number]
        name = row["space"].tobytes() + row["hash"].tobytes() + row["group"].tobytes()
        good[number] &= name not in names
        names.add(name)
    numbers = np.flatnonzero(good)
    numbers = numbers[np.argsort(position[numbers])]
    begin, end = position[numbers], (position + pages)[numbers]
    reach = np.maximum.accumulate(end)
    into = np.zeros(len(numbers), bool)
    into[1:] = begin[1:] < reach[:-1]  # begins within an earlier one
    involved = into.copy()
    involved[:-1] |= into[1:] | (end[:-1] > begin[1:])
    if into.any():
        # A row may overlap rows that are not its neighbours: include all below its end.
        for at in np.flatnonzero(involved):
            involved[at : np.searchsorted(begin, end[at])] = True
        taken: list[tuple[int, int]] = []
        for number in sorted(numbers[involved].tolist(), reverse=True):
            span = (int(position[number]), int(position[number] + pages[number]))
            at = bisect.bisect(taken, span)
            if (at and taken[at - 1][1] > span[0]) or (at < len(taken) and taken[at][0] < span[1]):
                good[number] = False
            else:
                taken.insert(at, span)
    return rows[good], rows["place"][~good]


def parents_first(rows: np.ndarray) -> np.ndarray:
    """The same rows, each after its parent if that is among them. They nearly always are in this order already."""
    keys, parents = _keys(rows, "hash"), _keys(rows, "parent")
    order = np.argsort(keys, kind="stable")
    at = np.minimum(np.searchsorted(keys[order], parents), max(0, len(rows) - 1))
    parent = order[at] if len(rows) else order
    known = (keys[parent] == parents) & (rows["parent"] != _ZERO)
    if not (known & (parent > np.arange(len(rows)))).any():
        return rows
    parent_of, placed, sequence = np.where(known, parent, -1).tolist(), [False] * len(rows), list[int]()
    for number in range(len(rows)):
        path = []
        while number >= 0 and not placed[number]:
            placed[number] = True  # at once, so that a cycle ends (keys are short)
            path.append(number)
            number = parent_of[number]
        sequence += reversed(path)
    ordered: np.ndarray = rows[sequence]
    return ordered


def _keys(rows: np.ndarray, name: str) -> np.ndarray:
    """uint64 hashes of (namespace, group, the field ``name``); nearly never equal for different ones."""

    def first(field: str) -> np.ndarray:
        return np.ascontiguousarray(rows[field]).view("<u8").reshape(-1, 2)[:, 0]

    keys: np.ndarray = first(name) ^ (first("space") * np.uint64(0x9E3779B97F4A7C15)) ^ rows["group"].astype(np.uint64)
    return keys


def _alike(keys: np.ndarray) -> list[int]:
    """Indices of the keys that occur more than once, ascending."""
    order = np.argsort(keys, kind="stable")
    same = keys[order][1:] == keys[order][:-1]
    alike = np.zeros(len(keys), bool)
    alike[order[1:][same]] = alike[order[:-1][same]] = True
    indices: list[int] = np.flatnonzero(alike).tolist()
    return indices
