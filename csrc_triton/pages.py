"""Blocks between the paged KV cache and rows, with their checksum in the same pass; ``pages_reference`` in plain
numpy.

A *row* is one rank's part of a slot (``wire.slots``): a block's regions one after another, each dense in logical
order, then the checksum of :mod:`checksum` over them. Rows are given by address: GPU memory that a DMA engine
fills or drains, or registered host memory that the kernel itself reads or writes over the link. All layers of a
group and any number of blocks go in one launch (one for each kind of alignment among the regions, usually one).

Three launches make a copy:

    begin    brings the table of rows from pinned host memory to the device and clears the sums. A kernel and no
             memcpy: that would wait its turn behind the megabytes that the DMA engine is moving.
    move     copies tiles of ROWS blocks by COLUMNS words and adds their terms to the blocks' sums
    finish   gathering: writes each sum behind its row. Scattering: compares it with the one there, writes verdicts

Addition modulo 2^64 commutes, so neither the number of programs nor their order shows in the result.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from . import checksum

if TYPE_CHECKING:
    import torch

triton = checksum.triton
if triton is not None:
    import triton.language as tl

# Columns of the region table [regions, 12]: those of the checksum, then where the region begins in a row (bytes).
REGION_FIELDS = (*checksum.REGION_FIELDS, "row_offset")
# Columns of the table of rows [n, 4].
ROW_FIELDS = ("block", "key", "address", "verdict")
# A tile is ROWS blocks by COLUMNS words; 32 KiB in flight a program is what 16 of them need to cover some 2 us of
# latency over PCIe 5 several times. Small pages share the multipliers of a column among 4 blocks; a page of 32 KiB
# fills a tile alone, so that a piece of one or two large blocks does not leave three quarters of a tile empty.
TILES = ((4096, 1), (1024, 4))  # (COLUMNS, ROWS), the first whose COLUMNS the region fills, else the last
_FLAGS = ("ROWS", "COLUMNS", "WORD", "DENSE", "SPLIT", "PAIRS")  # in the order of the kernel's signature
GOOD, BAD = 0, 1

if triton is not None:
    _M1 = tl.constexpr(checksum.M1)
    _M2 = tl.constexpr(checksum.M2)
    _F1 = tl.constexpr(checksum.F1)
    _F2 = tl.constexpr(checksum.F2)

    @triton.jit(do_not_specialize=["source", "n"])
    def _begin(
        rows_ptr,  # int64 [n, 4], on the device
        acc_ptr,  # int64 [n]
        source,  # address of the table in pinned host memory
        n,
        SIZE: tl.constexpr,
    ):
        at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        there = source + at.to(tl.int64) * 8
        word = tl.load(there.to(tl.pointer_type(tl.int64)), mask=at < n * 4, other=0)
        tl.store(rows_ptr + at, word, mask=at < n * 4)
        tl.store(acc_ptr + at, tl.zeros_like(word), mask=at < n)

    # Not specialized: a compilation for each kind of number would stall a step for a second.
    @triton.jit(do_not_specialize=["n", "tiles", "programs"])
    def _move(
        rows_ptr,  # int64 [n, 4]: block id, key, address of the row, address of the verdict
        acc_ptr,  # int64 [n]: the sums so far
        regions_ptr,  # int64 [regions, 12]
        tiles_ptr,  # int32 [tiles, 2]: region, first word
        n,
        tiles,
        programs,
        GATHER: tl.constexpr,  # cache to rows, else rows to cache
        SUM: tl.constexpr,
        FIELDS: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        WORD: tl.constexpr,  # bytes
        DENSE: tl.constexpr,  # cells follow each other in the cache in logical order
        SPLIT: tl.constexpr,  # addresses in the cache are multiples of 4 only
        PAIRS: tl.constexpr,  # two words at a time are contiguous and aligned to 16 bytes in the cache
    ):
        groups = tl.cdiv(n, ROWS)
        for item in range(tl.program_id(0), tiles * groups, programs):
            tile = item // groups
            row = (item % groups) * ROWS + tl.arange(0, ROWS)  # [ROWS]
            exists = row < n
            region = tl.load(tiles_ptr + tile * 2)
            first = tl.load(tiles_ptr + tile * 2 + 1)
            table = regions_ptr + region * FIELDS
            base = tl.load(table)
            block_stride = tl.load(table + 1)
            words = tl.load(table + 4).to(tl.int32)
            row_offset = tl.load(table + 11)
            block = tl.load(rows_ptr + row * 4, mask=exists, other=0)  # [ROWS] int64
            start = tl.load(rows_ptr + row * 4 + 2, mask=exists, other=0) + row_offset

            column = first + tl.arange(0, COLUMNS)  # [COLUMNS] word within the region
            dense = column.to(tl.int64) * WORD
            if DENSE:
                offset = dense
            else:
                outer_stride = tl.load(table + 2)
                token_stride = tl.load(table + 3)
                cell_words = tl.load(table + 5).to(tl.int32)
                tokens = tl.load(table + 6).to(tl.int32)
                cell = column // cell_words
                outer = (cell // tokens).to(tl.int64)
                token = (cell % tokens).to(tl.int64)
                inner = (column % cell_words).to(tl.int64)
                offset = outer * outer_stride + token * token_stride + inner * WORD
            in_cache = (base + block * block_stride)[:, None] + offset[None, :]  # [ROWS, COLUMNS] addresses
            in_row = start[:, None] + dense[None, :]
            mask = exists[:, None] & (column < words)[None, :]

            if WORD == 4:
                page = in_cache.to(tl.pointer_type(tl.uint32))
                line = in_row.to(tl.pointer_type(tl.uint32))
            elif SPLIT:
                page = in_cache.to(tl.pointer_type(tl.uint32))
                line = in_row.to(tl.pointer_type(tl.uint64))
            else:
                page = in_cache.to(tl.pointer_type(tl.uint64))
                line = in_row.to(tl.pointer_type(tl.uint64))
                if PAIRS:
                    # Not to be seen from the tables: two words lie together and are copied together.
                    page = tl.max_contiguous(tl.multiple_of(page, [1, 16]), [1, 2])
                    line = tl.max_contiguous(tl.multiple_of(line, [1, 16]), [1, 2])
                    mask = tl.max_constancy(mask, [1, 2])

            if GATHER:
                if SPLIT:
                    low = tl.load(page, mask=mask, other=0).to(tl.uint64)
                    high = tl.load(page + 1, mask=mask, other=0).to(tl.uint64)
                    value = low | (high << 32)
                else:
                    value = tl.load(page, mask=mask, other=0)
                tl.store(line, value, mask=mask)
            else:
                value = tl.load(line, mask=mask, other=0)
                if SPLIT:
                    tl.store(page, (value & 0xFFFFFFFF).to(tl.uint32), mask=mask)
                    tl.store(page + 1, (value >> 32).to(tl.uint32), mask=mask)
                else:
                    tl.store(page, value, mask=mask)

            if SUM:
                first_word = tl.load(table + 7)
                f = (first_word + column.to(tl.int64) + 1).to(tl.uint64) * _M1
                g = (f ^ (f >> 32)) * _M2
                r = ((g ^ (g >> 29)) | 1)[None, :]  # [1, COLUMNS]
                x = value.to(tl.uint64) * r
                y = (x ^ (x >> 32)) * r  # 0 where masked, since the value is
                part = tl.sum(y.to(tl.int64, bitcast=True), axis=1)  # [ROWS]
                tl.atomic_add(acc_ptr + row, part, mask=exists, sem="relaxed")

    @triton.jit(do_not_specialize=["n", "words", "sum_offset"])
    def _finish(
        rows_ptr,
        acc_ptr,
        n,
        words,  # of a block
        sum_offset,  # bytes, within a row
        GATHER: tl.constexpr,
        SIZE: tl.constexpr,
    ):
        row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        exists = row < n
        key = tl.load(rows_ptr + row * 4 + 1, mask=exists, other=0).to(tl.uint64, bitcast=True)
        acc = tl.load(acc_ptr + row, mask=exists, other=0).to(tl.uint64, bitcast=True)
        count = tl.full([SIZE], 0, tl.int64) + words
        h = (acc + count.to(tl.uint64) * _M1) ^ key
        h = (h ^ (h >> 33)) * _F1
        h = (h ^ (h >> 33)) * _F2
        h = h ^ (h >> 33)
        there = tl.load(rows_ptr + row * 4 + 2, mask=exists, other=0) + sum_offset
        there = there.to(tl.pointer_type(tl.uint64))
        if GATHER:
            tl.store(there, h, mask=exists)
        else:
            right = tl.load(there, mask=exists, other=0) == h
            verdict = tl.load(rows_ptr + row * 4 + 3, mask=exists, other=0).to(tl.pointer_type(tl.uint8))
            tl.store(verdict, tl.where(right, 0, 1).to(tl.uint8), mask=exists)


def plan(regions: np.ndarray) -> list[tuple[dict[str, int | bool], np.ndarray]]:
    """Splits a region table into launches: (constexpr flags of the move, int32 tiles [m, 2]) of each.

    ``regions``: int64 [regions, 12] as in REGION_FIELDS. Raises ValueError where a row cannot be copied by whole
    words: a region must begin at a multiple of 16 bytes in the row, and of 4 in the cache.
    """
    launches: dict[tuple, list[tuple[int, int]]] = {}
    for number, line in enumerate(regions.tolist()):
        base, block_stride, outer_stride, token_stride, words, cell_words, tokens, *_, word, row_offset = line
        cells = words // cell_words
        inner = cell_words * word
        outer = cells // tokens
        dense = (tokens == 1 or token_stride == inner) and (outer == 1 or outer_stride == tokens * inner)
        # A stride along a dimension of size one is never taken.
        strides = block_stride | (outer_stride if outer > 1 else 0) | (token_stride if tokens > 1 else 0)
        together = base | strides
        if together % 4 or row_offset % 16:
            raise ValueError(
                f"region {number} lies at {base:#x} with strides {line[1:4]} in the cache and at {row_offset} in a "
                "row: the copy kernels need multiples of 4 bytes there and of 16 here"
            )
        split = word == 8 and together % 8 != 0
        pairs = word == 8 and together % 16 == 0 and inner % 16 == 0
        columns, rows = next((tile for tile in TILES if words >= tile[0]), TILES[-1])
        flags = (rows, columns, word, dense, split, pairs)
        launches.setdefault(flags, []).extend((number, first) for first in range(0, words, columns))
    return [
        (dict(zip(_FLAGS, flags, strict=True)), np.array(tiles, dtype=np.int32)) for flags, tiles in launches.items()
    ]


# Launches a compiled kernel: (function, programs, threads, bytes of shared memory, stream, array of addresses of its
# arguments).
Start = Callable[[int, int, int, int, int, ctypes.Array], None]


@contextmanager
def _compiling_unheard() -> Iterator[None]:
    """Without the hook by which vLLM hears of kernels compiled while it serves: Triton 3.6 describes them to it in
    JSON, and fails where a constant of one is another function, as in ours. Ours are compiled in the background
    while an engine starts, and what it would say is not vLLM's concern."""
    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)  # Triton 3.4 and later
    if not hasattr(runtime, "jit_post_compile_hook"):
        yield
        return
    hook, runtime.jit_post_compile_hook = runtime.jit_post_compile_hook, None
    try:
        yield
    finally:
        runtime.jit_post_compile_hook = hook


class Launches:
    """What copies of one group's blocks in one direction launch, with all that does not change from call to call.

    The first launch compiles (a second or so); later ones hand the compiled kernels and prepared arguments to the
    driver, some 3 us each instead of the 30 that Triton needs to look at its arguments. For one device.
    """

    def __init__(
        self,
        gather: bool,
        sum_offset: int,
        scratch: "tuple[torch.Tensor, torch.Tensor]",
        programs: int,
        checked: bool,
        start: Start | None,
    ):
        """``gather``: cache to rows, else the reverse. ``sum_offset``: bytes within a row. ``scratch``: int64 [m, 4]
        and [m] on the device, for copies of up to m blocks; only launches that follow one another on a stream may
        share it. ``programs``: SMs that a copy may take. ``checked``: False leaves the checksum out, for
        measurements. ``start``: None: every launch goes through Triton.

        Raises RuntimeError without Triton.
        """
        if triton is None:
            raise RuntimeError("copies on a GPU need Triton, which vLLM for CUDA brings: pip install triton")
        self._gather, self._programs, self._checked, self._sum_offset = gather, programs, checked, sum_offset
        self._rows, self._acc = scratch
        self._device = self._rows.device
        self._start = start
        self._ready: list[_Prepared] = []
        # What changes from launch to launch, where the prepared arguments point to.
        self._n, self._table = ctypes.c_int32(), ctypes.c_int64()

    def launch(self, table: int, n: int, stream: "torch.cuda.Stream | None") -> None:
        """Enqueues the copy of n blocks on ``stream`` (None: the current one); does not wait for the device.

        ``table``: address of int64 [n, 4] as in ROW_FIELDS, readable by the device: ``address`` of each row a
        multiple of 16, ``verdict`` the address of a byte that scattering sets to GOOD or BAD (else not used); it
        must stay until the work is done. n = 0 only compiles.
        """
        if not self._ready:
            self._first(table, n, stream)
        elif n:
            self._n.value, self._table.value = n, table
            handle = stream.cuda_stream
            for kernel in self._ready:
                kernel.programs.value = programs = min(kernel.most, kernel.items * -(-n // kernel.rows))
                self._start(kernel.function, programs, kernel.threads, kernel.shared, handle, kernel.arguments)

    def _first(self, table: int, n: int, stream: "torch.cuda.Stream | None") -> None:
        """Launches through Triton, and prepares what it compiled."""
        if stream is None:
            self._by_triton(table, n)
            return
        import torch

        # The pointers' alignment is compiled in; torch aligns what it allocates.
        if (self._rows.data_ptr() | self._acc.data_ptr()) % 16:
            raise ValueError("the scratch of a copy must begin at a multiple of 16 bytes")
        with torch.cuda.device(self._device), torch.cuda.stream(stream), _compiling_unheard():
            compiled = self._by_triton(table, n)
        if self._start is not None and all(_plain(c) for c, *_ in compiled):
            self._ready = [_Prepared(*kernel) for kernel in compiled]

    def _by_triton(self, table: int, n: int) -> list[tuple]:
        """The compiled kernels, in the order of launches, each with what :class:`_Prepared` wants."""
        raise NotImplementedError

    def _begin(self, table: int, n: int) -> tuple:
        grid = (-(-n // _BEGIN_ROWS),)
        begin = _begin[grid](self._rows, self._acc, table, n, SIZE=4 * _BEGIN_ROWS, num_warps=4)
        return begin, (self._rows, self._acc, self._table, self._n), 1, _BEGIN_ROWS, _UNBOUNDED

    def _finish(self, words: int, n: int) -> tuple:
        rows, acc = self._rows, self._acc
        grid = (-(-n // _FINISH_ROWS),)
        finish = _finish[grid](
            rows, acc, n, words, self._sum_offset, GATHER=self._gather, SIZE=_FINISH_ROWS, num_warps=4
        )
        numbers = (ctypes.c_int32(words), ctypes.c_int32(self._sum_offset))
        return finish, (rows, acc, self._n, *numbers), 1, _FINISH_ROWS, _UNBOUNDED


class Mover(Launches):
    """Copies byte for byte."""

    def __init__(
        self,
        gather: bool,
        table: np.ndarray,
        sum_offset: int,
        scratch: "tuple[torch.Tensor, torch.Tensor]",
        programs: int,
        warps: int,
        checked: bool = True,
        start: Start | None = None,
    ):
        """As :class:`Launches`; ``table``: int64 [regions, 12] as in REGION_FIELDS.

        Raises RuntimeError without Triton, ValueError for regions that :func:`plan` refuses.
        """
        super().__init__(gather, sum_offset, scratch, programs, checked, start)
        import torch

        self._warps, self._words = warps, int(table[:, 4].sum())
        self._regions = torch.from_numpy(table).to(self._device)
        self.launches = [(flags, torch.from_numpy(tiles).to(self._device)) for flags, tiles in plan(table)]

    def _by_triton(self, table: int, n: int) -> list[tuple]:
        rows, acc, regions = self._rows, self._acc, self._regions
        done = [self._begin(table, n)]
        for flags, tiles in self.launches:
            m = tiles.shape[0]
            grid = min(self._programs, m * -(-n // flags["ROWS"]))
            move = _move[(grid,)](
                rows, acc, regions, tiles, n, m, max(grid, 1),
                GATHER=self._gather, SUM=self._checked, FIELDS=len(REGION_FIELDS), num_warps=self._warps, **flags,
            )  # fmt: skip
            pointers = (rows, acc, regions, tiles, self._n, ctypes.c_int32(m), PROGRAMS)
            done.append((move, pointers, m, flags["ROWS"], self._programs))
        if self._checked:
            done.append(self._finish(self._words, n))
        return done


_BEGIN_ROWS, _FINISH_ROWS = 256, 128
_UNBOUNDED = 1 << 30
PROGRAMS = object()  # stands for the number of programs among a kernel's arguments


def _plain(compiled) -> bool:
    """Whether a kernel takes what its signature says and nothing else of any use: no scratch from Triton."""
    meta = compiled.metadata
    return not any(getattr(meta, name, 1) for name in ("global_scratch_size", "profile_scratch_size"))


class _Prepared:
    """A compiled kernel and its arguments in the driver's form.

    ``items`` tiles by blocks in groups of ``rows``, by ``most`` programs at most.
    """

    def __init__(self, compiled, arguments: tuple, items: int, rows: int, most: int):
        compiled._init_handles()
        self.function, self.shared = compiled.function, compiled.metadata.shared
        self.threads = 32 * compiled.metadata.num_warps
        self.items, self.rows, self.most = items, rows, most
        self.programs = ctypes.c_int32()
        self._keep = []  # the array holds addresses only
        for a in arguments:
            if a is PROGRAMS:
                a = self.programs
            self._keep.append(ctypes.c_uint64(a.data_ptr()) if hasattr(a, "data_ptr") else a)
        # Triton adds pointers to its own scratch behind a kernel's arguments; a kernel without them ignores these.
        self._keep += [ctypes.c_uint64(0)] * 2
        self.arguments = (ctypes.c_void_p * len(self._keep))(*(ctypes.addressof(a) for a in self._keep))
