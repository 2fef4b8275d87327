"""Copies blocks between the paged KV cache and rows, with their checksums in the same pass; the reference is
``kernels.page_copy_reference``.

A *row* is one rank's part of a slot (``wire.slots``): a block's regions one after another, each dense in logical order,
then the checksum of :mod:`checksum` over them. Rows are named by address: GPU memory that a DMA engine fills or drains,
or registered host memory that the kernel reads or writes over the link. One launch copies all layers of a group and any
number of blocks (one launch for each kind of alignment among the regions, usually one).

Three launches make a copy:

    begin    copies the table of rows from pinned host memory to the device and clears the sums. A memcpy instead of a
             kernel would queue behind the megabytes that the DMA engine is moving.
    move     copies tiles of ROWS blocks by COLUMNS words and adds their terms to the blocks' sums
    finish   gathering: writes each checksum behind its row. Scattering: compares it with the one there, writes results

Addition modulo 2^64 commutes, so the result depends neither on the number of programs nor on their order.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from . import checksum

if TYPE_CHECKING:
    import torch

triton = checksum.triton
if triton is not None:
    import triton.language as tl

    from .checksum import finish, multipliers, terms

# Columns of the region table [regions, 12]: those of the checksum, then the region's offset in a row (bytes).
REGION_FIELDS = (*checksum.REGION_FIELDS, "row_offset")
# Columns of the table of rows [n, 4].
ROW_FIELDS = ("block", "key", "address", "result")
# A tile is ROWS blocks by COLUMNS words. With 32 KiB in flight per program, 16 programs cover some 2 us of latency over
# PCIe 5 several times. Small pages share the multipliers of a column among 4 blocks; a page of 32 KiB fills a tile
# alone, so that a batch of one or two large blocks does not leave three quarters of a tile empty.
TILES = ((4096, 1), (1024, 4))  # (COLUMNS, ROWS): the first whose COLUMNS the region fills, else the last
GOOD, BAD = 0, 1

if triton is not None:

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

    # Not specialized: compiling for each kind of number would stall a step for a second.
    @triton.jit(do_not_specialize=["n", "tiles", "programs"])
    def _move(
        rows_ptr,  # int64 [n, 4]: block id, key, address of the row, address of the result
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
                    # The compiler cannot infer it from the tables: two words are adjacent and copied together.
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
                r = multipliers(first_word + column.to(tl.int64))[None, :]  # [1, COLUMNS]
                part = tl.sum(terms(value.to(tl.uint64), r), axis=1)  # [ROWS]
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
        h = finish(acc, count.to(tl.uint64), key)
        there = tl.load(rows_ptr + row * 4 + 2, mask=exists, other=0) + sum_offset
        there = there.to(tl.pointer_type(tl.uint64))
        if GATHER:
            tl.store(there, h, mask=exists)
        else:
            right = tl.load(there, mask=exists, other=0) == h
            result = tl.load(rows_ptr + row * 4 + 3, mask=exists, other=0).to(tl.pointer_type(tl.uint8))
            tl.store(result, tl.where(right, 0, 1).to(tl.uint8), mask=exists)


def plan(regions: np.ndarray) -> list[tuple[dict[str, int | bool], np.ndarray]]:
    """Split a region table into launches: (constexpr flags of the move, int32 tiles [m, 2]) of each.

    ``regions``: int64 [regions, 12] as in REGION_FIELDS. Raises ValueError for rows that cannot be copied by whole
    words: a region must begin at a multiple of 16 bytes in the row, and of 4 in the cache.
    """
    launches: dict[tuple, list[tuple[int, int]]] = {}
    for number, line in enumerate(regions.tolist()):
        flags, together = checksum.access(line)
        if together % 4 or line[-1] % 16:
            raise ValueError(
                f"region {number} is at {line[0]:#x} with strides {line[1:4]} in the cache and at {line[-1]} in a row: "
                "the copy kernels need multiples of 4 bytes in the cache and of 16 in a row"
            )
        columns, rows = next((tile for tile in TILES if line[4] >= tile[0]), TILES[-1])
        launches.setdefault((rows, columns, *flags), []).extend((number, at) for at in range(0, line[4], columns))
    names = ("ROWS", "COLUMNS", *checksum.ACCESS_FLAGS)
    return [
        (dict(zip(names, flags, strict=True)), np.array(tiles, dtype=np.int32)) for flags, tiles in launches.items()
    ]


# Launches a compiled kernel: (function, programs, threads, bytes of shared memory, stream, array of addresses of its
# arguments).
Start = Callable[[int, int, int, int, int, ctypes.Array], None]


@contextmanager
def without_compile_hook() -> Iterator[None]:
    """Disable vLLM's hook that reports kernels compiled while it serves. Triton 3.6 describes a kernel to it in JSON,
    which fails if a constant is another function, as in ours. Ours are compiled in the background while an engine
    starts, so that vLLM's report would be wrong anyway."""
    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)  # Triton 3.4 and later
    if not hasattr(runtime, "jit_post_compile_hook"):
        yield
        return
    hook, runtime.jit_post_compile_hook = runtime.jit_post_compile_hook, None
    try:
        yield
    finally:
        runtime.jit_post_compile_hook = hook


class LaunchSetup(NamedTuple):
    """``scratch``: int64 [m, 4] and [m] on the device, for copies of up to m blocks; only launches on one stream may
    share it. ``programs``: SMs that a copy may use. ``checked``: False leaves the checksum out, for measurements.
    ``start`` None: every launch goes through Triton."""

    scratch: "tuple[torch.Tensor, torch.Tensor]"
    programs: int
    checked: bool = True
    start: Start | None = None


class Launches(ABC):
    """The kernels of copies of one group's blocks in one direction, with all arguments that do not change.

    The first launch compiles (about a second). Later ones pass the compiled kernels and prepared arguments to the
    driver, some 3 us each instead of the 30 that Triton needs to inspect its arguments. For one device.
    """

    def __init__(self, gather: bool, sum_offset: int, setup: LaunchSetup):
        """``gather``: cache to rows, else the reverse. ``sum_offset``: of the checksum within a row, in bytes.

        Raises RuntimeError without Triton.
        """
        if triton is None:
            raise RuntimeError("copies on a GPU need Triton, which vLLM for CUDA brings: pip install triton")
        self._gather, self._sum_offset = gather, sum_offset
        (self._rows, self._acc), self._programs, self._checked, self._start = setup
        self._device = self._rows.device
        self._ready: list[_Prepared] = []
        # The arguments that change; the prepared arguments point to them.
        self._n, self._table = ctypes.c_int32(), ctypes.c_int64()

    def launch(self, table: int, n: int, stream: "torch.cuda.Stream | None") -> None:
        """Enqueue the copy of n blocks on ``stream`` (None: the current one); does not wait for the device.

        ``table``: address of int64 [n, 4] as in ROW_FIELDS, readable by the device, valid until the work has ended.
        ``address`` of each row is a multiple of 16; ``result`` is the address of a byte that scattering sets to GOOD or
        BAD. n = 0 only compiles.
        """
        if not self._ready:
            self._first(table, n, stream)
        elif n:
            self._n.value, self._table.value = n, table
            handle = stream.cuda_stream
            for kernel in self._ready:
                kernel.programs.value = programs = min(kernel.max_programs, kernel.items * -(-n // kernel.rows))
                self._start(kernel.function, programs, kernel.threads, kernel.shared, handle, kernel.arguments)

    def _first(self, table: int, n: int, stream: "torch.cuda.Stream | None") -> None:
        """Launch through Triton, and prepare the compiled kernels."""
        if stream is None:
            self._by_triton(table, n)
            return
        import torch

        # The kernels are compiled for this alignment, which torch's allocations have.
        if (self._rows.data_ptr() | self._acc.data_ptr()) % 16:
            raise ValueError("the scratch of a copy must begin at a multiple of 16 bytes")
        with torch.cuda.device(self._device), torch.cuda.stream(stream), without_compile_hook():
            compiled = self._by_triton(table, n)
        if self._start is not None and all(_plain(c) for c, *_ in compiled):
            self._ready = [_Prepared(*kernel) for kernel in compiled]

    @abstractmethod
    def _by_triton(self, table: int, n: int) -> list[tuple]:
        """The compiled kernels, in the order of launches, each with the arguments of :class:`_Prepared`."""

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


class PageCopier(Launches):
    """Copies byte for byte."""

    def __init__(self, gather: bool, table: np.ndarray, sum_offset: int, setup: LaunchSetup, warps: int):
        """As :class:`Launches`; ``table``: int64 [regions, 12] as in REGION_FIELDS.

        Raises RuntimeError without Triton, ValueError for regions that :func:`plan` refuses.
        """
        super().__init__(gather, sum_offset, setup)
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
    """Whether a kernel needs only the arguments of its signature, and no scratch from Triton."""
    meta = compiled.metadata
    return not any(getattr(meta, name, 1) for name in ("global_scratch_size", "profile_scratch_size"))


class _Prepared:
    """A compiled kernel and its arguments in the driver's form.

    Its work is ``items`` tiles for each group of ``rows`` blocks, done by at most ``max_programs`` programs.
    """

    def __init__(self, compiled, arguments: tuple, items: int, rows: int, max_programs: int):
        compiled._init_handles()
        self.function, self.shared = compiled.function, compiled.metadata.shared
        self.threads = 32 * compiled.metadata.num_warps
        self.items, self.rows, self.max_programs = items, rows, max_programs
        self.programs = ctypes.c_int32()
        self._keep = []  # the array holds addresses only
        for a in arguments:
            if a is PROGRAMS:
                a = self.programs
            self._keep.append(ctypes.c_uint64(a.data_ptr()) if hasattr(a, "data_ptr") else a)
        # Triton adds pointers to its own scratch behind a kernel's arguments; a kernel without them ignores these.
        self._keep += [ctypes.c_uint64(0)] * 2
        self.arguments = (ctypes.c_void_p * len(self._keep))(*(ctypes.addressof(a) for a in self._keep))
