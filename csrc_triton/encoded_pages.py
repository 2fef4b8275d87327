"""Copies blocks between the paged KV cache and encoded rows: lines of numbers, each with scales, and a checksum.

An *encoded row* is a part of a slot in the layout of ``codecs.parts``: for each field of each region the data of all
its lines, dense, and the scales of all its lines, dense; then the checksum of :mod:`checksum` over the bytes before it,
as one region of 8-byte words. The reference is the formats' own ``encode`` and ``decode``.

    begin    as in :mod:`page_copy`
    code     one launch for each kind of line: gathering, encodes lines of the cache into rows; scattering, the reverse
    sum      adds up the rows' words; after the code when gathering, before it when scattering
    finish   as in :mod:`page_copy`

The sum is a separate pass over the encoded bytes, at most half of the numbers' bytes, because words of 8 bytes span the
output of several threads. It covers the row's bytes, gaps included, even if a GPU rounded unlike the reference.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import page_copy
from .casts import triton

if TYPE_CHECKING:
    import torch

if triton is not None:
    import triton.language as tl

    from .casts import from_cache, to_cache
    from .checksum import multipliers, terms

# Columns of the tiles' table [tiles, 8] (int64, on the device); sizes in bytes unless noted.
TILE_FIELDS = (
    "base",  # address of the field's first number in block 0
    "block_stride",
    "outer_stride",
    "token_stride",
    "lines",  # of a block in this field
    "data_offset",  # within a row
    "scale_offset",
    "first",  # line of the tile
)
_FLAGS = (
    "CODE", "BITS", "SCALE", "WORD", "LINE", "WIDTH", "TOKENS", "CELL_LINES", "NARROW", "LINES", "ROWS", "FP16",
    "VECTOR",
    # Without contraction to fused multiply-adds every operation rounds as the reference's.
    "enable_fp_fusion", "num_warps", "times",
)  # fmt: skip
# The sum: ROWS blocks share the multipliers of COLUMNS words, as in pages; 64 KiB in flight a program.
SUM_ROWS, SUM_COLUMNS = 4, 2048


@dataclass(frozen=True)
class Shape:
    """Sizes of the code launches: ``numbers`` of a tile, a power of two; ``warps`` of a program (0: each format's own);
    ``stages`` of tiles in flight."""

    numbers: int = 0
    warps: int = 0
    stages: int = 1


@dataclass(frozen=True)
class Lines:
    """One field of one region: the positions of its lines in the cache and in a row, and its kernels.

    Sizes in bytes. ``base``: address of the field's first number in block 0; ``outer`` x ``tokens`` cells of
    ``cell_lines`` lines of ``line`` numbers. ``bits`` of data per number: 16 (copied; ``encode`` and ``decode`` None),
    8 or 4, see ``codecs.base.Kernels``. ``scale_bytes`` per line.
    """

    base: int
    block_stride: int
    outer_stride: int
    token_stride: int
    outer: int
    tokens: int
    cell_lines: int
    line: int
    fp16: bool
    data_offset: int
    scale_offset: int
    bits: int = 16
    scale_bytes: int = 0
    encode: Any = None
    decode: Any = None
    fused: bool = False
    encode_tile: tuple[int, int, int] = (16384, 8, 1)  # numbers, warps, factor of the programs
    decode_tile: tuple[int, int, int] = (16384, 8, 1)


if triton is not None:
    _UINTS = {0: None, 1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}

    @triton.jit
    def _vectors(address, TYPE: tl.constexpr, VECTOR: tl.constexpr, BYTES: tl.constexpr):
        """Pointers [L, W]: VECTOR neighbours are contiguous and aligned to BYTES, which the compiler cannot
        infer. Both sides of a copy have vectors of equal length, so that no number moves between threads."""
        p = address.to(tl.pointer_type(TYPE))
        return tl.max_contiguous(tl.multiple_of(p, [1, BYTES]), [1, VECTOR])

    # Not specialized: compiling for each kind of number would stall a step for a second.
    @triton.jit(do_not_specialize=["n", "tiles", "programs"])
    def _code(
        rows_ptr,  # int64 [n, 4]: block id, key, address of the row, address of the result
        tiles_ptr,  # int64 [tiles, 8]
        n,
        tiles,
        programs,
        GATHER: tl.constexpr,  # encode
        CODE: tl.constexpr,  # the format's function; None: numbers are copied
        BITS: tl.constexpr,
        SCALE: tl.constexpr,  # bytes of a line's scales
        WORD: tl.constexpr,  # the unsigned type of SCALE bytes
        LINE: tl.constexpr,  # numbers
        WIDTH: tl.constexpr,  # a power of two >= LINE
        TOKENS: tl.constexpr,
        CELL_LINES: tl.constexpr,  # lines of a cell
        NARROW: tl.constexpr,  # offsets within a page are less than 2^31
        LINES: tl.constexpr,  # of a block, in a tile
        ROWS: tl.constexpr,  # blocks of a tile
        FP16: tl.constexpr,
        VECTOR: tl.constexpr,  # numbers that are contiguous and aligned in the cache, at most 8
        STAGES: tl.constexpr,
        FIELDS: tl.constexpr,
    ):
        groups = tl.cdiv(n, ROWS)
        for item in tl.range(tl.program_id(0), tiles * groups, programs, num_stages=STAGES):
            table = tiles_ptr + (item // groups) * FIELDS
            base = tl.load(table)
            block_stride = tl.load(table + 1)
            outer_stride = tl.load(table + 2)
            token_stride = tl.load(table + 3)
            lines = tl.load(table + 4).to(tl.int32)
            data_offset = tl.load(table + 5)
            scale_offset = tl.load(table + 6)
            first = tl.load(table + 7).to(tl.int32)

            at = tl.arange(0, ROWS * LINES)  # [L]
            if ROWS == 1:
                row = item % groups
                line = first + at
                exists = line < lines
                block = tl.load(rows_ptr + row * 4)  # int64
                start = tl.load(rows_ptr + row * 4 + 2)
            else:
                row = (item % groups) * ROWS + at // LINES
                line = first + at % LINES
                exists = (row < n) & (line < lines)
                block = tl.load(rows_ptr + row * 4, mask=exists, other=0)  # [L] int64
                start = tl.load(rows_ptr + row * 4 + 2, mask=exists, other=0)
            cell = line // CELL_LINES
            outer, token = cell // TOKENS, cell % TOKENS
            inner = (line % CELL_LINES) * (LINE * 2)
            if NARROW:
                inner += outer * outer_stride.to(tl.int32) + token * token_stride.to(tl.int32)
                offset = inner.to(tl.int64)
            else:
                offset = outer.to(tl.int64) * outer_stride + token.to(tl.int64) * token_stride + inner
            numbers = base + block * block_stride + offset  # [L]
            encoded = start + data_offset + line * (LINE * BITS // 8)

            HALF: tl.constexpr = LINE // 2
            COLUMNS: tl.constexpr = WIDTH // 2 if BITS == 4 else WIDTH
            column = tl.arange(0, COLUMNS)
            mask = exists[:, None] & (column < (HALF if BITS == 4 else LINE))[None, :]
            mask = tl.max_constancy(mask, [1, VECTOR])
            page = _vectors(numbers[:, None] + (column * 2)[None, :], tl.uint16, VECTOR, VECTOR * 2)
            if BITS == 16:
                there = encoded[:, None] + (column * 2)[None, :]
                there = _vectors(there, tl.uint16, VECTOR, VECTOR * 2)
            else:
                there = encoded[:, None] + column[None, :]
                there = _vectors(there, tl.uint8, VECTOR, VECTOR)
            if SCALE > 0:
                scales = start + scale_offset + line * SCALE
                scales = scales.to(tl.pointer_type(WORD))

            if BITS == 16:
                if GATHER:
                    tl.store(there, tl.load(page, mask=mask, other=0), mask=mask)
                else:
                    tl.store(page, tl.load(there, mask=mask, other=0), mask=mask)
            elif BITS == 8:
                if GATHER:
                    x = from_cache(tl.load(page, mask=mask, other=0), FP16)
                    data, word = CODE(x, FP16, LINE)
                    tl.store(there, data, mask=mask)
                    tl.store(scales, word, mask=exists)
                else:
                    word = tl.load(scales, mask=exists, other=0)
                    x = CODE(tl.load(there, mask=mask, other=0), word, FP16, LINE)
                    tl.store(page, to_cache(x, FP16), mask=mask)
            else:
                second = (numbers + HALF * 2)[:, None] + (column * 2)[None, :]
                second = _vectors(second, tl.uint16, VECTOR, VECTOR * 2)
                if GATHER:
                    lo = from_cache(tl.load(page, mask=mask, other=0), FP16)
                    hi = from_cache(tl.load(second, mask=mask, other=0), FP16)
                    data, word = CODE(lo, hi, FP16, LINE)
                    tl.store(there, data, mask=mask)
                    tl.store(scales, word, mask=exists)
                else:
                    word = tl.load(scales, mask=exists, other=0)
                    lo, hi = CODE(tl.load(there, mask=mask, other=0), word, FP16, LINE)
                    tl.store(page, to_cache(lo, FP16), mask=mask)
                    tl.store(second, to_cache(hi, FP16), mask=mask)

    @triton.jit(do_not_specialize=["n", "words", "programs"])
    def _sum(
        rows_ptr,  # int64 [n, 4]
        acc_ptr,  # int64 [n]: the sums so far
        n,
        words,  # of a row
        programs,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        groups = tl.cdiv(n, ROWS)
        for item in range(tl.program_id(0), tl.cdiv(words, COLUMNS) * groups, programs):
            row = (item % groups) * ROWS + tl.arange(0, ROWS)
            exists = row < n
            start = tl.load(rows_ptr + row * 4 + 2, mask=exists, other=0)
            column = ((item // groups) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
            mask = tl.max_constancy(exists[:, None] & (column < words)[None, :], [1, 2])
            p = _vectors(start[:, None] + (column * 8)[None, :], tl.uint64, 2, 16)
            w = tl.load(p, mask=mask, other=0)
            r = multipliers(column)[None, :]  # [1, COLUMNS]
            tl.atomic_add(acc_ptr + row, tl.sum(terms(w, r), axis=1), mask=exists, sem="relaxed")


def plan(fields: Sequence[Lines], gather: bool, shape: Shape) -> list[tuple[dict[str, Any], np.ndarray]]:
    """Split fields into launches: (flags of the code, int64 tiles [m, 8]) of each.

    Raises ValueError for fields that the kernels cannot address.
    """
    launches: dict[tuple, list[tuple[int, ...]]] = {}
    for f in fields:
        if f.bits not in (4, 8, 16):
            raise ValueError(f"{f.bits} bits per number: the kernels move 4, 8 or 16; other bits go into the scales")
        strides = (f.block_stride, f.outer_stride if f.outer > 1 else 0, f.token_stride if f.tokens > 1 else 0)
        together = f.base | strides[0] | strides[1] | strides[2] | f.line * (1 if f.bits == 4 else 2)
        if together % 2 or (f.data_offset | f.scale_offset) % 16 or f.line % 2:
            raise ValueError(
                f"a field at {f.base:#x} with strides {strides} in the cache, lines of {f.line} numbers at "
                f"{f.data_offset} and their scales at {f.scale_offset} in a row: the kernels need multiples of 2 bytes "
                "in the cache and of 16 in a row, and lines of two halves"
            )
        vector = min(together & -together, 16) // 2
        width = max(1 << (f.line - 1).bit_length(), 64 if f.bits == 4 else 16)  # tensor cores take no less
        lines = f.outer * f.tokens * f.cell_lines
        numbers, warps, times = f.encode_tile if gather else f.decode_tile
        if shape.numbers:
            numbers, warps = shape.numbers, shape.warps
        most = max(16, numbers // width)
        step = min(most, 1 << (lines - 1).bit_length())
        code = (f.encode if gather else f.decode) if f.bits < 16 else None
        scale = f.scale_bytes if f.bits < 16 else 0
        extent = (f.outer - 1) * strides[1] + (f.tokens - 1) * strides[2] + f.cell_lines * f.line * 2
        narrow = 0 <= min(strides) and extent < 1 << 31
        cut = (f.tokens, f.cell_lines, narrow, step, most // step)
        flags = (code, f.bits, scale, _UINTS[scale], f.line, width, *cut, f.fp16, vector, f.fused, warps, times)
        row = (f.base, *strides, lines, f.data_offset, f.scale_offset)
        launches.setdefault(flags, []).extend((*row, first) for first in range(0, lines, step))
    return [
        (dict(zip(_FLAGS, flags, strict=True)), np.array(tiles, dtype=np.int64)) for flags, tiles in launches.items()
    ]


class EncodedPageCopier(page_copy.Launches):
    """Encoding or decoding copies of one group's blocks; see :class:`page_copy.Launches`."""

    def __init__(
        self, gather: bool, fields: Sequence[Lines], sum_offset: int, setup: page_copy.LaunchSetup, shape: Shape
    ):
        """As ``kernels.page_copy.PageCopier``, with ``fields`` instead of its table; ``sum_offset``: a multiple of 16.

        Raises RuntimeError without Triton, ValueError for fields that :func:`plan` refuses.
        """
        super().__init__(gather, sum_offset, setup)
        import torch

        self._shape, self._words = shape, sum_offset // 8
        self.launches = [
            (flags, torch.from_numpy(tiles).to(self._device)) for flags, tiles in plan(fields, gather, shape)
        ]

    def _by_triton(self, table: int, n: int) -> list[tuple]:
        codes = [lambda k=k: self._code(*k, n) for k in self.launches]
        order = [*codes, lambda: self._sum(n)] if self._gather else [lambda: self._sum(n), *codes]
        done = [self._begin(table, n)]
        done += [kernel for each in order if (kernel := each()) is not None]
        if self._checked:
            done.append(self._finish(self._words, n))
        return done

    def _code(self, flags: dict[str, Any], tiles: "torch.Tensor", n: int) -> tuple:
        m, rows = tiles.shape[0], flags["ROWS"]
        flags = flags.copy()
        programs = self._programs * flags.pop("times")
        grid = min(programs, m * -(-n // rows))
        code = _code[(grid,)](
            self._rows, tiles, n, m, max(grid, 1), GATHER=self._gather, STAGES=self._shape.stages,
            FIELDS=len(TILE_FIELDS), **flags,
        )  # fmt: skip
        arguments = (self._rows, tiles, self._n, ctypes.c_int32(m), page_copy.PROGRAMS)
        return code, arguments, m, rows, programs

    def _sum(self, n: int) -> tuple | None:
        if not self._checked:
            return None
        columns = -(-self._words // SUM_COLUMNS)
        grid = min(self._programs, columns * -(-n // SUM_ROWS))
        total = _sum[(grid,)](
            self._rows, self._acc, n, self._words, max(grid, 1), ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=8
        )
        arguments = (self._rows, self._acc, self._n, ctypes.c_int32(self._words), page_copy.PROGRAMS)
        return total, arguments, columns, SUM_ROWS, self._programs
