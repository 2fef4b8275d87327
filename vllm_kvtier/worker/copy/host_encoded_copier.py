"""Copies of encoded groups: blocks to and from their parts of slots in host memory.

A few rows (parts of slots) at a time are in a buffer of their own, where their checksums are computed. So a load
decodes the bytes that it verified, even if another process changes the slot meanwhile. Lines of the cache go through a
smaller buffer that stays in the core's cache together with its encoded form; small layers share one, since a call of
the format costs some tens of microseconds whatever its size.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from vllm_kvtier.codecs.base import DTYPES
from vllm_kvtier.kernels.checksum_reference import multipliers
from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.wire.slots import PAGE, PartLayout
from vllm_kvtier.worker.cache_view import NUMBER_BYTES, CacheView
from vllm_kvtier.worker.copy.host_tiles import TILE_WORDS, finish, terms, tiles
from vllm_kvtier.worker.device.cpu_threads import one_core

if TYPE_CHECKING:
    from vllm_kvtier.codecs.base import Format
    from vllm_kvtier.codecs.parts import FieldPart

# Numbers of a tile: half a MiB of a core's L2 cache, and half as much again for their encoded form.
TILE_NUMBERS = 256 << 10
# Numbers of a call of a format: fewer, since its several intermediates are float32.
_CALL_NUMBERS = 128 << 10
# Bytes of rows at a time, unless one row is larger.
_ROWS_BYTES = 1 << 20

# (outer, cells, rows) of a tile
_Box = tuple[slice, slice, slice]


class EncodedGroup:
    """One group's blocks; ``copy`` as that of ``worker.copy.host_copier``'s groups."""

    def __init__(self, view: CacheView, group: GroupView, layout: PartLayout, pool: np.ndarray):
        """``pool``: uint64, the pool's words from where the group's part of slot 0 begins."""
        self._pool = pool
        self._count = layout.sum_offset // 8
        rows = min(max(1, _ROWS_BYTES // layout.sum_offset), TILE_WORDS)
        self._rows = np.zeros((rows, self._count), dtype=np.uint64)
        self._factors = multipliers(0, self._count)
        self._words = [np.empty(TILE_WORDS, dtype=np.uint64) for _ in range(2)]
        area = self._rows.view(np.uint8)
        kinds: dict[tuple, list[_Lines]] = {}
        for part in layout.encoded:
            region = group.regions[part.region]
            kinds.setdefault((part.format, part.line, region.dtype), []).append(_Lines(view, region, part, area))
        self._kinds = [_Kind(*kind, lines) for kind, lines in kinds.items()]

    def copy(self, blocks: np.ndarray, slots: np.ndarray, keys: np.ndarray, to_slots: bool) -> np.ndarray:
        """Copy blocks to slots or back; uint64 [n], the checksums of the copied bytes."""
        with one_core():
            return self._copy(blocks, slots, keys, to_slots)

    def _copy(self, blocks: np.ndarray, slots: np.ndarray, keys: np.ndarray, to_slots: bool) -> np.ndarray:
        total = np.empty(len(blocks), dtype=np.uint64)
        for first in range(0, len(blocks), len(self._rows)):
            some = slice(first, min(len(blocks), first + len(self._rows)))
            ids = blocks[some].tolist()
            starts = (slots[some] * (PAGE // 8)).tolist()
            if to_slots:
                for kind in self._kinds:
                    kind.encode(ids)
            for row, start in zip(self._rows, starts, strict=False):
                slot = self._pool[start : start + self._count]
                np.copyto(*((slot, row) if to_slots else (row, slot)))
            total[some] = self._checksums(len(ids))
            if not to_slots:
                for kind in self._kinds:
                    kind.decode(ids)
        return finish(total, self._count, keys)

    def _checksums(self, n: int) -> np.ndarray:
        total = np.zeros(n, dtype=np.uint64)
        step = max(1, TILE_WORDS // n)
        for first in range(0, self._count, step):
            factor = self._factors[first : first + step]
            wide, spare = (b[: n * len(factor)].reshape(n, -1) for b in self._words)
            np.copyto(wide, self._rows[:n, first : first + step])
            total += terms(wide, factor, spare)
        return total


class _Lines:
    """One field of one region: its numbers in the cache and its lines in the buffer of rows.

    ``shape``: (outer, cells, numbers of this field in a cell) of a block.
    """

    def __init__(self, view: CacheView, region: Region, part: "FieldPart", rows: np.ndarray):
        tokens, count = region.cell_tokens, region.fields[part.field].count
        self.shape = (region.outer, region.tokens, tokens * count)
        if part.lines * part.line != region.outer * region.tokens * tokens * count:
            raise ValueError(f"{region.layer}: {part.lines} lines of {part.line} for {self.shape} numbers of a block")
        self._cell: tuple[int, ...] = self.shape[2:]  # the numbers of a cell, as ``_cache`` has them
        pages = view.pages(region).numpy().view(np.int16)
        first, last = tokens * part.offset, tokens * (part.offset + count)
        cpu_page_layout = view.cpu_page_layout(region)
        # The indices of logical numbers in a cell of ``_cache``, None if they are in order; and the reverse.
        self._order: np.ndarray | None = None
        self._back: np.ndarray | None = None
        if cpu_page_layout is None:
            self._cache = pages[..., first:last]
        else:
            order = cpu_page_layout[first:last].numpy().astype(np.intp)
            first, last = int(order.min()), int(order.max()) + 1
            self._cache = pages[..., first:last]
            order -= first
            inner, steps = _grid(order)
            if steps is not None:  # a transposition at most: [blocks, outer, cells, numbers / inner, inner]
                shape = (*pages.shape[:3], len(order) // inner, inner)
                strides = (*pages.strides[:3], *(NUMBER_BYTES * step for step in steps))
                self._cache = np.lib.stride_tricks.as_strided(self._cache, shape, strides)
                self._cell = shape[3:]
            else:
                self._order = order
                # A field whose numbers fill one span of the cell can be written back by the reverse indices.
                if last - first == len(order):
                    self._back = np.argsort(order)
        self._data, self._scales = (
            _area(rows, offset, (*self.shape[:2], self.shape[2] // part.line * nbytes))
            for offset, nbytes in (
                (part.data_offset, part.format.data_bytes(part.line)),
                (part.scale_offset, part.format.scale_bytes(part.line)),
            )
        )

    def size(self, box: _Box) -> int:
        """Numbers in a box."""
        outer, cells, rows = (s.stop - s.start for s in box)
        return outer * cells * rows * self.shape[2]

    def take(self, blocks: list[int], box: _Box, numbers: np.ndarray) -> None:
        """Reads ``numbers`` (int16 [n]), in logical order, from the cache."""
        outer, cells, rows = box
        for block, tile in zip(blocks[rows], self._boxes(numbers, box), strict=True):
            if self._order is None:
                np.copyto(tile, self._cache[block, outer, cells])
            else:
                # ``mode`` only avoids a buffer: the indices are within bounds.
                np.take(self._cache[block, outer, cells], self._order, axis=2, out=tile, mode="clip")

    def put(self, blocks: list[int], box: _Box, numbers: np.ndarray) -> None:
        """The reverse."""
        outer, cells, rows = box
        for block, tile in zip(blocks[rows], self._boxes(numbers, box), strict=True):
            if self._order is None:
                self._cache[block, outer, cells] = tile
            elif self._back is None:
                self._cache[block, outer, cells][..., self._order] = tile
            else:
                self._cache[block, outer, cells] = np.take(tile, self._back, axis=2, mode="clip")

    def areas(self, box: _Box) -> tuple[np.ndarray, np.ndarray]:
        """uint8 [rows, outer, cells, bytes of a cell's lines]: the data and the scales of a box in the rows."""
        outer, cells, rows = box
        return self._data[rows, outer, cells], self._scales[rows, outer, cells]

    def _boxes(self, numbers: np.ndarray, box: _Box) -> np.ndarray:
        outer, cells, rows = (s.stop - s.start for s in box)
        return numbers.reshape(rows, outer, cells, *self._cell)


class _Kind:
    """Fields of all layers that one format encodes in lines of one length and dtype."""

    def __init__(self, form: "Format", line: int, dtype: str, lines: list[_Lines]):
        self._format, self._line, self._lines = form, line, lines
        self._dtype = DTYPES[dtype]
        most = max(TILE_NUMBERS, *(x.shape[2] for x in lines))
        self._numbers = np.empty(most, dtype=np.int16)
        # The same memory as a tensor.
        self._tensor = torch.from_numpy(self._numbers)
        self._encoded = [
            np.empty((most // line, nbytes), dtype=np.uint8)
            for nbytes in (form.data_bytes(line), form.scale_bytes(line))
        ]

    def encode(self, blocks: list[int]) -> None:
        """Blocks of the cache to the first rows."""
        for tile, ends in self._batches(len(blocks)):
            for (lines, box), (a, b) in zip(tile, pairwise(ends), strict=True):
                lines.take(blocks, box, self._numbers[a:b])
            x = self._tensor[: ends[-1]].view(self._dtype).view(-1, self._line)
            for some in self._calls(len(x)):
                for whole, encoded in zip(self._encoded, self._format.encode(x[some]), strict=True):
                    whole[some] = encoded.numpy()
            for (lines, box), (a, b) in zip(tile, pairwise(ends), strict=True):
                for area, encoded in zip(lines.areas(box), self._encoded, strict=True):
                    area[...] = encoded[a // self._line : b // self._line].reshape(area.shape)

    def decode(self, blocks: list[int]) -> None:
        """The first rows to blocks of the cache."""
        for tile, ends in self._batches(len(blocks)):
            for (lines, box), (a, b) in zip(tile, pairwise(ends), strict=True):
                for area, encoded in zip(lines.areas(box), self._encoded, strict=True):
                    np.copyto(encoded[a // self._line : b // self._line].reshape(area.shape), area)
            x = self._tensor[: ends[-1]].view(self._dtype).view(-1, self._line)
            for some in self._calls(len(x)):
                pieces = (torch.from_numpy(encoded[some]) for encoded in self._encoded)
                x[some] = self._format.decode(*pieces, self._dtype)
            for (lines, box), (a, b) in zip(tile, pairwise(ends), strict=True):
                lines.put(blocks, box, self._numbers[a:b])

    def _calls(self, n: int) -> list[slice]:
        """n lines in equal parts, each for one call of the format."""
        calls = -(-n * self._line // _CALL_NUMBERS)
        step = -(-n // calls)
        return [slice(a, min(n, a + step)) for a in range(0, n, step)]

    def _batches(self, n: int) -> Iterator[tuple[list[tuple[_Lines, _Box]], list[int]]]:
        """Boxes of the first n rows that go to the format together, and the first number of each."""
        boxes: list[tuple[_Lines, _Box]] = []
        ends = [0]
        for lines in self._lines:
            for box in tiles(n, lines.shape, TILE_NUMBERS):
                size = lines.size(box)
                if ends[-1] + size > len(self._numbers):
                    yield boxes, ends
                    boxes, ends = [], [0]
                boxes.append((lines, box))
                ends.append(ends[-1] + size)
        if boxes:
            yield boxes, ends


def _area(rows: np.ndarray, offset: int, shape: tuple[int, int, int]) -> np.ndarray:
    """uint8 [rows, *shape]: dense bytes from ``offset`` of each row."""
    nbytes = int(np.prod(shape))
    return rows[:, offset : offset + nbytes].reshape(len(rows), *shape)


def _grid(order: np.ndarray) -> tuple[int, tuple[int, int] | None]:
    """If ``order`` (indices from 0 on) reads a grid row by row: (length of a row, steps from row to row and within a
    row); else (1, None)."""
    step = int(order[1] - order[0]) if len(order) > 1 else 1
    breaks = np.flatnonzero(np.diff(order) != step)
    inner = int(breaks[0]) + 1 if len(breaks) else len(order)
    if order[0] or len(order) % inner:
        return 1, None
    rows = order[::inner]
    across = int(rows[1] - rows[0]) if len(rows) > 1 else 0
    expected = rows[0] + across * np.arange(len(rows))[:, None] + step * np.arange(inner)
    return (inner, (across, step)) if (order.reshape(-1, inner) == expected).all() else (1, None)
