"""Copies blocks from another GPU's KV cache, mapped into this process, and verifies the copied words; the reference is
:mod:`peer_copy_reference`.

Loads over NVLink take one to two microseconds. Bytes in flight hide this latency, so a program

  * issues the loads of the next tile before it sums and stores the current one, and processes all of its tiles in one
    loop, across blocks, layers, requests and sources, so that the pipeline never drains;
  * keeps one sum per thread for as long as it stays with the same blocks. No tile synchronizes the warps: some compute
    while others wait.

Work consists of *rows* (one block of one group on one rank of a source) in groups of ROWS, and of *segments*:
consecutive row groups with the same tiles and strides; :mod:`peer_copy_plan` makes them. A tile is ROWS blocks by
COLUMNS words of one region. All copies of a step are one launch for each kind of page (usually one), between two small
ones:

    begin    copies the rows and segments from pinned host memory to the device and clears the sums; a memcpy would
             queue behind the copies of the DMA engines
    move     copies the tiles and adds up the terms of :mod:`checksum`
    finish   reads the source's table of checksums, after the words: a block that the source reused meanwhile does not
             match. Writes results, and the checksums of blocks that we now have completely

The checksum covers all words that the source's rank has of a block; some heads of it may be stored. Words of tokens
beyond the valid ones are neither read nor written.
"""

import ctypes
from typing import TYPE_CHECKING

from . import checksum, page_copy
from .peer_copy_plan import ROW, SEGMENT, SHAPE, START, Flags, Shape

if TYPE_CHECKING:
    import torch

triton = checksum.triton
if triton is not None:
    import triton.language as tl

    from .checksum import finish, multipliers, terms

GOOD, BAD = page_copy.GOOD, page_copy.BAD

if triton is not None:
    _ROW, _SEGMENT, _START = tl.constexpr(ROW), tl.constexpr(SEGMENT), tl.constexpr(START)

    @triton.jit(do_not_specialize=["source", "words", "rows"])
    def _begin(
        work_ptr,  # int64 [words], on the device
        acc_ptr,  # int64 [rows]
        source,  # address of the work in pinned host memory
        words,
        rows,
        SIZE: tl.constexpr,
    ):
        at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        there = source + at.to(tl.int64) * 8
        word = tl.load(there.to(tl.pointer_type(tl.int64)), mask=at < words, other=0)
        tl.store(work_ptr + at, word, mask=at < words)
        tl.store(acc_ptr + at, tl.zeros_like(word), mask=at < rows)

    @triton.jit
    def _locate(work_ptr, table, group, tile, OURS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                CELL: tl.constexpr, TOKENS: tl.constexpr, WORD: tl.constexpr, DENSE: tl.constexpr):  # fmt: skip
        """[ROWS, COLUMNS] addresses of a tile's words in the source (OURS 0) or in our cache (1), and the index of the
        first one in the region."""
        entry = tl.load(table + 2).to(tl.pointer_type(tl.int64)) + tile * 4
        base = tl.load(entry + OURS)
        first = tl.load(entry + 3).to(tl.int32)
        row = tl.load(table) + group.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        block = tl.load(work_ptr + row * _ROW + OURS)
        block_stride = tl.load(table + 4 + 3 * OURS)
        outer_stride, token_stride = tl.load(table + 5 + 3 * OURS), tl.load(table + 6 + 3 * OURS)
        if DENSE:
            offset = tl.arange(0, COLUMNS).to(tl.int64) * WORD
            base += first.to(tl.int64) * WORD
        else:
            column = first + tl.arange(0, COLUMNS)
            cell = column // CELL
            outer = (cell // TOKENS).to(tl.int64)
            token = (cell % TOKENS).to(tl.int64)
            offset = outer * outer_stride + token * token_stride + (column % CELL).to(tl.int64) * WORD
        return (block * block_stride + base)[:, None] + offset[None, :], first

    @triton.jit
    def _counting(work_ptr, table, group, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CELL: tl.constexpr,
                  TOKENS: tl.constexpr, CELL_TOKENS: tl.constexpr):  # fmt: skip
        """bool [ROWS, COLUMNS]: words of valid tokens; none in padding rows."""
        row = tl.load(table) + group.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        valid = tl.load(work_ptr + row * _ROW + 3).to(tl.int32)
        first_token = tl.load(table + 13).to(tl.int32)
        cells = (valid - first_token + CELL_TOKENS - 1) // CELL_TOKENS  # [ROWS]
        token = ((first + tl.arange(0, COLUMNS)) // CELL) % TOKENS
        return token[None, :] < cells[:, None]

    @triton.jit
    def _fetch(work_ptr, table, group, tile, left,
               ROWS: tl.constexpr, COLUMNS: tl.constexpr, CELL: tl.constexpr, TOKENS: tl.constexpr,
               CELL_TOKENS: tl.constexpr, WORD: tl.constexpr, DENSE: tl.constexpr, SPLIT: tl.constexpr,
               PAIRS: tl.constexpr):  # fmt: skip
        """The words of a tile, [ROWS, COLUMNS], 0 where they do not count, and all of them unless ``left`` > 0."""
        address, first = _locate(work_ptr, table, group, tile, 0, ROWS, COLUMNS, CELL, TOKENS, WORD, DENSE)
        words = tl.where(left > 0, tl.load(table + 10).to(tl.int32), 0)
        mask = _counting(work_ptr, table, group, first, ROWS, COLUMNS, CELL, TOKENS, CELL_TOKENS)
        mask = mask & (first + tl.arange(0, COLUMNS) < words)[None, :]
        # Bypasses the SM's cache, which has the tables: no word is read twice.
        if WORD == 4:
            page = address.to(tl.pointer_type(tl.uint32))
            value = tl.load(page, mask=mask, other=0, cache_modifier=".cg").to(tl.uint64)
        elif SPLIT:
            page = address.to(tl.pointer_type(tl.uint32))
            low = tl.load(page, mask=mask, other=0, cache_modifier=".cg").to(tl.uint64)
            high = tl.load(page + 1, mask=mask, other=0, cache_modifier=".cg").to(tl.uint64)
            value = low | (high << 32)
        else:
            page = address.to(tl.pointer_type(tl.uint64))
            if PAIRS:
                # The compiler cannot infer it from the tables: two words are adjacent and count together. Stated here,
                # because it does not carry over from a function's result.
                page = tl.max_contiguous(tl.multiple_of(page, [1, 16]), [1, 2])
                mask = tl.max_constancy(mask, [1, 2])
            value = tl.load(page, mask=mask, other=0, cache_modifier=".cg")
        return value

    @triton.jit
    def _put(work_ptr, table, group, tile, value,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr, CELL: tl.constexpr, TOKENS: tl.constexpr,
             CELL_TOKENS: tl.constexpr, WORD: tl.constexpr, DENSE: tl.constexpr, SPLIT: tl.constexpr,
             PAIRS: tl.constexpr):  # fmt: skip
        """Store the words of a tile that this rank needs."""
        address, first = _locate(work_ptr, table, group, tile, 1, ROWS, COLUMNS, CELL, TOKENS, WORD, DENSE)
        # The stored outer indices are consecutive.
        start, end = tl.load(table + 11).to(tl.int32), tl.load(table + 12).to(tl.int32)
        mask = _counting(work_ptr, table, group, first, ROWS, COLUMNS, CELL, TOKENS, CELL_TOKENS)
        column = first + tl.arange(0, COLUMNS)
        mask = mask & ((column >= start) & (column < end))[None, :]
        if WORD == 4:
            tl.store(address.to(tl.pointer_type(tl.uint32)), value.to(tl.uint32), mask=mask)
        elif SPLIT:
            page = address.to(tl.pointer_type(tl.uint32))
            tl.store(page, (value & 0xFFFFFFFF).to(tl.uint32), mask=mask)
            tl.store(page + 1, (value >> 32).to(tl.uint32), mask=mask)
        else:
            page = address.to(tl.pointer_type(tl.uint64))
            if PAIRS:
                page = tl.max_contiguous(tl.multiple_of(page, [1, 16]), [1, 2])
                mask = tl.max_constancy(mask, [1, 2])
            tl.store(page, value, mask=mask)

    # Not specialized: compiling for each kind of number would stall a step for a second.
    @triton.jit(do_not_specialize=["segments", "starts"])
    def _move(
        work_ptr,  # int64: rows [n, 8] first
        acc_ptr,  # int64 [n]: the sums so far
        segments,  # index in ``work_ptr`` of the table of segments
        starts,  # and of the table of program starts
        SUM: tl.constexpr,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        LANES: tl.constexpr,  # words that all threads hold at a time, each with a sum
        CELL: tl.constexpr,  # words of a cell
        TOKENS: tl.constexpr,  # cells of an outer index
        CELL_TOKENS: tl.constexpr,
        WORD: tl.constexpr,  # bytes
        TARGET_DENSE: tl.constexpr,  # cells are contiguous in logical order in our cache
        SOURCE_DENSE: tl.constexpr,  # and in the source's
        SPLIT: tl.constexpr,  # addresses are multiples of 4 only
        PAIRS: tl.constexpr,  # two words at a time are contiguous and aligned to 16 bytes
    ):
        begin = work_ptr + starts + tl.program_id(0) * _START
        segment = tl.load(begin).to(tl.int32)
        group = tl.load(begin + 1).to(tl.int32)
        tile = tl.load(begin + 2).to(tl.int32)
        left = tl.load(begin + 3).to(tl.int32)
        table = work_ptr + segments + segment * _SEGMENT
        value = _fetch(work_ptr, table, group, tile, left,
                       ROWS, COLUMNS, CELL, TOKENS, CELL_TOKENS, WORD, SOURCE_DENSE, SPLIT, PAIRS)  # fmt: skip
        acc = tl.zeros([ROWS, LANES], tl.int64)
        for i in range(left):
            table = work_ptr + segments + segment * _SEGMENT
            # Where the next tile is; this one again if there is none.
            more = i + 1 < left
            new_group = tile + 1 == tl.load(table + 3).to(tl.int32)
            new_segment = new_group & (group + 1 == tl.load(table + 1).to(tl.int32))
            next_tile = tl.where(more, tl.where(new_group, 0, tile + 1), tile)
            next_group = tl.where(more, tl.where(new_segment, 0, tl.where(new_group, group + 1, group)), group)
            next_segment = tl.where(more & new_segment, segment + 1, segment)
            next_table = work_ptr + segments + next_segment * _SEGMENT
            following = _fetch(work_ptr, next_table, next_group, next_tile, left - i - 1,
                               ROWS, COLUMNS, CELL, TOKENS, CELL_TOKENS, WORD, SOURCE_DENSE, SPLIT, PAIRS)  # fmt: skip

            entry = tl.load(table + 2).to(tl.pointer_type(tl.int64)) + tile * 4
            first_word = tl.load(entry + 2)
            _put(work_ptr, table, group, tile, value,
                 ROWS, COLUMNS, CELL, TOKENS, CELL_TOKENS, WORD, TARGET_DENSE, SPLIT, PAIRS)  # fmt: skip
            if SUM:
                r = multipliers(first_word + tl.arange(0, COLUMNS).to(tl.int64))[None, :]  # [1, COLUMNS]
                y = terms(value, r)  # 0 where nothing counts, since the value is
                if COLUMNS > LANES:
                    y = tl.sum(tl.reshape(y, [ROWS, COLUMNS // LANES, LANES]), axis=1)
                acc += y
                if new_group | (i + 1 == left):
                    row = tl.load(table) + group.to(tl.int64) * ROWS + tl.arange(0, ROWS)
                    tl.atomic_add(acc_ptr + row, tl.sum(acc, axis=1), sem="relaxed")
                    acc = tl.zeros([ROWS, LANES], tl.int64)
            value = following
            segment, group, tile = next_segment, next_group, next_tile

    @triton.jit(do_not_specialize=["rows"])
    def _finish(work_ptr, acc_ptr, rows, SIZE: tl.constexpr):
        row = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        line = work_ptr + row.to(tl.int64) * _ROW
        result = tl.load(line + 6, mask=row < rows, other=0)
        exists = result != 0
        key = tl.load(line + 2, mask=exists, other=0).to(tl.uint64, bitcast=True)
        words = tl.load(line + 4, mask=exists, other=0).to(tl.uint64, bitcast=True)
        acc = tl.load(acc_ptr + row, mask=exists, other=0).to(tl.uint64, bitcast=True)
        h = finish(acc, words, key)
        there = tl.load(line + 5, mask=exists, other=0).to(tl.pointer_type(tl.uint64))
        right = exists & (tl.load(there, mask=exists, other=0) == h)
        tl.store(result.to(tl.pointer_type(tl.uint8)), tl.where(right, 0, 1).to(tl.uint8), mask=exists)
        entry = tl.load(line + 7, mask=exists, other=0)
        identical_layout = (entry & 1) != 0
        ours = (entry & -2).to(tl.pointer_type(tl.uint64))
        tl.store(ours, tl.where(right & identical_layout, h, tl.zeros_like(h)), mask=exists & (entry != 0))


class PeerPageCopier:
    """Launches copies; one at a time on one stream, since they share the scratch."""

    def __init__(
        self,
        scratch: "tuple[torch.Tensor, torch.Tensor]",
        shape: Shape = SHAPE,
        checked: bool = True,
        start: page_copy.Start | None = None,
    ):
        """``scratch``: int64 [words] and [rows] on the device, for work of so many words and rows. ``checked``: False
        leaves checksums and results out, for measurements. ``start``: as for ``kernels.page_copy.Launches``; None:
        every launch goes through Triton.

        Raises RuntimeError without Triton.
        """
        if triton is None:
            raise RuntimeError("copies between GPUs need Triton, which vLLM for CUDA brings: pip install triton")
        self.shape = shape
        self._checked, self._start = checked, start
        self._work, self._acc = scratch
        if (self._work.data_ptr() | self._acc.data_ptr()) % 16:
            # The kernels are compiled for this alignment.
            raise ValueError("the scratch of a copy must begin at a multiple of 16 bytes")
        self._ready: dict[tuple, page_copy._Prepared] = {}
        # The arguments that change; the prepared arguments point to them.
        self._source, self._words, self._rows = ctypes.c_int64(), ctypes.c_int32(), ctypes.c_int32()
        self._segments, self._starts = ctypes.c_int32(), ctypes.c_int32()

    def launch(
        self,
        source: int,
        words: int,
        rows: int,
        moves: list[tuple[Flags, int, int, int]],
        stream: "torch.cuda.Stream | None",
    ) -> None:
        """Enqueue a copy on ``stream`` (None: the current one); does not wait for the device.

        ``source``: address of the work, int64 [words] readable by the device, valid until the work has ended: rows
        [rows, 8], then for each of ``moves`` (flags, segments, starts, programs) its tables at those words, as in
        ``kernels.peer_copy_plan``. No rows: only compiles.
        """
        self._source.value, self._words.value, self._rows.value = source, words, rows
        work, acc = self._work, self._acc
        pointers = (work, acc)
        self._run(
            ("begin",), -(-max(words, rows) // 1024), stream,
            lambda grid: _begin[grid](work, acc, source, words, rows, SIZE=1024, num_warps=4),
            (*pointers, self._source, self._words, self._rows),
        )  # fmt: skip
        for flags, segments, starts_at, programs in moves:
            self._segments.value, self._starts.value = segments, starts_at
            self._run(
                flags, programs, stream,
                lambda grid, flags=flags, a=segments, b=starts_at: _move[grid](
                    work, acc, a, b, SUM=self._checked, num_warps=self.shape.warps, **dict(flags)
                ),
                (*pointers, self._segments, self._starts),
            )  # fmt: skip
        if self._checked:
            self._run(
                ("finish",), -(-rows // 128), stream,
                lambda grid: _finish[grid](work, acc, rows, SIZE=128, num_warps=4), (*pointers, self._rows),
            )  # fmt: skip

    def _run(self, name: tuple, grid: int, stream: "torch.cuda.Stream | None", by_triton, arguments: tuple) -> None:
        ready = self._ready.get(name)
        if ready is not None:
            if grid:
                self._start(ready.function, grid, ready.threads, ready.shared, stream.cuda_stream, ready.arguments)
            return
        if stream is None:
            if grid:
                by_triton((grid,))
            return
        import torch

        with torch.cuda.device(self._work.device), torch.cuda.stream(stream), page_copy.without_compile_hook():
            compiled = by_triton((grid,))
        if self._start is not None and page_copy._plain(compiled):
            self._ready[name] = page_copy._Prepared(compiled, arguments, 1, 1, 1)
