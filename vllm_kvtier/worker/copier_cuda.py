"""Copies between a GPU's KV cache and slots in registered host memory: kernels, DMA engines, events, no waiting.

Each direction is a :class:`_Lane` with streams, a ring and scratch of its own, so neither waits for the other. What a
call enqueues is in order within its lane only. How blocks go (by a kernel over the link, through the ring, or both)
is ``worker.tuning``'s choice; see ``tuning.Choice`` for the ways.

Staged, a store goes

    kernels' stream    [gather piece 1][gather 2]   ...      waits for ``after``, and for the buffer to be drained
    DMA stream                         [ piece 1  ][ 2 ...

and a load the reverse, where only the scatter waits for ``after``. Parts that a codec encodes always go so, and the
kernels encode and decode as they gather and scatter. Between its copies a store lets the DMA engine go now and then
(``tuning.TURN``): the tokens of every step leave by the same one.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from vllm_kvtier.kernels import pages
from vllm_kvtier.wire.slots import PAGE, PIECE, PartLayout
from vllm_kvtier.worker import tuning as tunings
from vllm_kvtier.worker.copier_parts import MAX_ROWS, ROW_ALIGN, Part, adjacent, mostly_adjacent
from vllm_kvtier.worker.copier_sheets import Sheet
from vllm_kvtier.worker.cuda import ANY_ORDER, ORDERED, Driver
from vllm_kvtier.worker.tuning import Choice, Tuning
from vllm_kvtier.worker.views import CacheView


class CudaCopy:
    """See ``copier.Copy``."""

    def __init__(self, nbytes: int, n: int, load: bool, lane: "_Lane"):
        self.nbytes = nbytes
        self.bad: np.ndarray | None = None
        self._n, self._load, self._lane = n, load, lane
        self._events: list[int] = []
        self._sheet: Sheet | None = None

    def begun(self, events: list[int], sheet: Sheet) -> None:
        self._events, self._sheet = events, sheet

    def done(self) -> bool:
        if self._sheet is None:
            return True
        lane = self._lane
        while self._events:
            if not lane.driver.reached(self._events[-1]):
                return False
            lane.spare_events.append(self._events.pop())
        if self._load:
            self.bad = self._sheet.verdicts[: self._n] != pages.GOOD
        lane.sheets.append(self._sheet)
        self._sheet = None
        return True

    def hold(self) -> None:
        # The events that are left: what ``done`` has taken away was reached.
        stream = torch.cuda.current_stream(self._lane.device).cuda_stream
        for event in self._events:
            self._lane.driver.wait(stream, event)

    def wait(self) -> None:
        for event in self._events:
            self._lane.driver.synchronize(event)
        self.done()


class _Lane:
    """One direction's streams and memory."""

    def __init__(
        self,
        device: torch.device,
        driver: Driver,
        gather: bool,
        parts: Sequence[Part],
        tuning: Tuning,
        checked: bool,
    ):
        self.device, self.driver, self._gather = device, driver, gather
        self.choices = [tuning.choose(gather, p.nbytes, p.coded) for p in parts]
        # Before the model's kernels (0): these take few SMs for a moment, and behind each of a prefill's kernels, which
        # fill the GPU for milliseconds, they would not keep up (3.4 GB/s were seen on an H200).
        priority = -1 if gather else -2
        staged = [(c, p) for c, p in zip(self.choices, parts, strict=True) if c.way != "direct"]
        dmas = max((c.dma_streams for c, _ in staged), default=0)
        # Kept as objects, since a stream lives as long as its object; used by their handles.
        self._streams = [torch.cuda.Stream(device, priority=priority) for _ in range(2 + dmas)]
        self._kernels, self._direct, *dma_streams = self._streams
        self._handle = self._kernels.cuda_stream
        self._dma_handles = [s.cuda_stream for s in dma_streams]
        largest = max((max(c.piece_bytes, p.pitch) for c, p in staged), default=0)
        self._buffer_bytes = -(-largest // ROW_ALIGN) * ROW_ALIGN
        self._buffers = max((c.ring for c, _ in staged), default=0)
        self._ring = torch.empty(self._buffers * self._buffer_bytes + ROW_ALIGN, dtype=torch.uint8, device=device)
        self._ring_base = -(-self._ring.data_ptr() // ROW_ALIGN) * ROW_ALIGN
        # Per buffer: recorded where its bytes have arrived, and where they are needed no more.
        self._filled, self._drained = (
            [[driver.new_event() for _ in range(n)] for _ in range(self._buffers)]
            for n in ((1, dmas) if gather else (dmas, 1))
        )
        self._next = 0
        # What each DMA stream may still copy in this turn (of loads, one lasts for ever), and a word to pause with.
        self._turns = dict.fromkeys(self._dma_handles, 0 if gather else 1 << 62)
        self._word = torch.empty(1, dtype=torch.int64, device=device)
        # (through the ring, directly) for each group; coded parts have one for both, of which a tuning uses one only.
        # All of one kind share a stream, and so the scratch.
        scratch = [
            (
                torch.empty((MAX_ROWS, 4), dtype=torch.int64, device=device),
                torch.empty(MAX_ROWS, dtype=torch.int64, device=device),
            )
            for _ in range(2)
        ]
        self._movers = [
            p.movers(gather, c, scratch, checked, driver.launcher)
            for c, p in zip(self.choices, parts, strict=True)
        ]
        self.spare_events: list[int] = []
        self.sheets: list[Sheet] = []
        self._under_way: list[CudaCopy] = []
        self._lost: list[Sheet] = []  # of a call that failed half way, until it is settled

    def settle(self) -> None:
        """Waits for what a call that failed half way has enqueued: once it has raised, its blocks are others'."""
        for stream in self._streams:
            stream.synchronize()
        self.sheets += self._lost
        self._lost.clear()

    def busy(self) -> bool:
        self._under_way = [c for c in self._under_way if not c.done()]
        return bool(self._under_way)

    def copy(
        self,
        number: int,
        part: Part,
        blocks: np.ndarray,
        keys: np.ndarray,
        slots: np.ndarray,  # int64 [n] addresses of the parts
        edges: np.ndarray | None,  # int64 [n] registration that each lies in; None: all in one
        after: torch.cuda.Event | None,
        alone: bool,  # nothing is under way in the other direction
    ) -> CudaCopy:
        n = len(slots)
        copy = CudaCopy(n * part.nbytes, n, not self._gather, self)
        sheet = self._sheet(n)
        self._lost.append(sheet)
        sheet.table[:n, 0] = blocks
        sheet.table[:n, 1] = keys.view(np.int64)
        if not self._gather:
            sheet.verdicts[:n] = pages.BAD
        fence = after.cuda_event if after is not None else 0
        choice = self.choices[number]
        direct = n if choice.way == "direct" else 0
        # Kernels over the link both ways at once reach 0.7 of what DMA does; and adjacent slots need no help.
        if choice.way == "mixed" and alone and not mostly_adjacent(slots, part.nbytes):
            direct = round(n * choice.direct_share)
        ends: list[int] = []
        if direct < n:
            self._staged(number, part, sheet, slots, edges, fence, direct)
            ends += self._dma_handles[: choice.dma_streams] if self._gather else [self._handle]
        if direct:
            sheet.table[:direct, 2] = slots[:direct]
            if fence:
                self.driver.wait(self._direct.cuda_stream, fence)
            for a in range(0, direct, MAX_ROWS):
                self._movers[number][-1].launch(sheet.address + a * 32, min(direct - a, MAX_ROWS), self._direct)
            ends.append(self._direct.cuda_stream)
        events = [self.spare_events.pop() if self.spare_events else self.driver.new_event() for _ in ends]
        for event, stream in zip(events, ends, strict=True):
            self.driver.record(event, stream)
        copy.begun(events, sheet)
        self._lost.pop()
        self._under_way.append(copy)
        return copy

    def _sheet(self, n: int) -> Sheet:
        for i, sheet in enumerate(self.sheets):
            if sheet.capacity >= n:
                return self.sheets.pop(i)
        return Sheet(max(1024, 1 << (n - 1).bit_length()))

    def _staged(self, number, part, sheet, slots, edges, fence, start) -> None:
        driver, choice, mover = self.driver, self.choices[number], self._movers[number][0]
        lines = choice.dma_streams
        for a, b in self._pieces(choice, part, start, len(slots)):
            buffer = self._next
            self._next = (buffer + 1) % self._buffers
            base = self._ring_base + buffer * self._buffer_bytes
            rows = part.row_offsets[: b - a] + base
            sheet.table[a:b, 2] = rows
            filled, drained = self._filled[buffer], self._drained[buffer]
            if lines == 1:
                shares = [(0, 0, b - a)]
            else:
                cuts = [(b - a) * i // lines for i in range(lines + 1)]
                # Turned by one each time, or pieces of one block would all go to the same stream.
                shares = [((i + buffer) % lines, *cuts[i : i + 2]) for i in range(lines) if cuts[i + 1] > cuts[i]]
            if self._gather:
                for event in drained:
                    driver.wait(self._handle, event)
                if fence and a == start:
                    driver.wait(self._handle, fence)
                mover.launch(sheet.address + a * 32, b - a, self._kernels)
                driver.record(filled[0], self._handle)
            for i, first, last in shares:
                stream = self._dma_handles[i]
                driver.wait(stream, filled[0] if self._gather else drained[0])
                there, where = slots[a + first : a + last], edges[a + first : a + last] if edges is not None else None
                self._move(stream, part, there, where, rows[first:last], choice.turn_bytes)
                driver.record(drained[i] if self._gather else filled[i], stream)
            if not self._gather:
                for i, _, _ in shares:
                    driver.wait(self._handle, filled[i])
                if fence and a == start:
                    driver.wait(self._handle, fence)
                mover.launch(sheet.address + a * 32, b - a, self._kernels)
                driver.record(drained[0], self._handle)

    def _pieces(self, choice: Choice, part: Part, start: int, end: int) -> list[tuple[int, int]]:
        """(first, last + 1) blocks of each turn of the ring."""
        step = min(MAX_ROWS, max(1, min(choice.piece_bytes, self._buffer_bytes) // part.pitch))
        # Loads end with a small piece: a request waits until the last one is scattered.
        tail = 0 if self._gather else min(step // 4, (end - start) // 4)
        count = -(-(end - start - tail) // step)
        bounds = [start + (end - start - tail) * i // count for i in range(count + 1)]
        return list(zip(bounds, bounds[1:], strict=False)) + ([(end - tail, end)] if tail else [])

    def _move(
        self, stream: int, part: Part, slots: np.ndarray, edges: np.ndarray | None, rows: np.ndarray, turn: int
    ) -> None:
        """Enqueues the copies between slots and rows of the ring: adjacent slots in one."""
        driver, nbytes = self.driver, part.nbytes
        single, runs, distance = adjacent(slots, edges, nbytes)
        for start, n in runs:
            for first, count in self._in_turns(stream, start, n, nbytes, turn):
                slot, row = int(slots[first]), int(rows[first])
                if self._gather:
                    driver.copy_lines(slot, distance, row, part.pitch, nbytes, count, stream)
                else:
                    driver.copy_lines(row, part.pitch, slot, distance, nbytes, count, stream)
        there, here = slots.view(np.uint64), rows.view(np.uint64)
        if single is not None:
            there, here = there[single], here[single]
        for first, count in self._in_turns(stream, 0, len(there), nbytes, turn):
            slot, row, sizes = there[first : first + count], here[first : first + count], part.sizes[:count]
            if self._gather:
                driver.copy_batch(slot, row, sizes, stream, ORDERED)
            else:
                # What a slot holds was written long ago: nothing on this stream, and nothing under way, writes it.
                driver.copy_batch(row, slot, sizes, stream, ANY_ORDER)

    def _in_turns(self, stream: int, start: int, n: int, nbytes: int, turn: int) -> Iterator[tuple[int, int]]:
        """(first, count) of ``n`` copies of ``nbytes`` each, with a pause between turns of ``turn`` bytes, or of one
        copy if that has more."""
        while n:
            left = self._turns[stream]
            if left < nbytes:
                self.driver.set_word(self._word.data_ptr(), stream)
                left = max(turn, nbytes)
            count = min(n, left // nbytes)
            self._turns[stream] = left - count * nbytes
            yield start, count
            start, n = start + count, n - count

    def warm_up(self) -> None:
        """Compiles this lane's kernels, copying nothing (tables of no rows)."""
        self.sheets.append(Sheet(1024))
        for movers in self._movers:
            for mover, stream in zip(movers, (self._kernels, self._direct), strict=False):
                mover.launch(self.sheets[-1].address, 0, stream)

    def close(self) -> None:
        for copy in self._under_way:
            copy.wait()
        self._under_way.clear()
        for event in [*self.spare_events, *sum(self._filled + self._drained, [])]:
            self.driver.destroy_event(event)
        self.spare_events.clear()
        self._filled, self._drained = [], []


class CudaCopier:
    """See ``copier.Copier``."""

    def __init__(
        self,
        view: CacheView,
        pool: tuple[int, int, Any],
        layouts: Sequence[PartLayout],
        part_offsets: Sequence[int],
        tuning: Tuning | None = None,
        checked: bool = True,
        driver: Driver | None = None,
    ):
        """``checked``: False leaves the checksums out, for measurements: all loads are then reported bad.
        ``driver``: in place of the device's own, closed with the copier.
        """
        self._pool, self._pool_bytes, self._keep = pool
        self._blocks = view.num_blocks
        self._device = view.device
        if self._device.index is None:
            self._device = torch.device(self._device.type, torch.cuda.current_device())
        self._driver = driver or Driver(self._device.index)
        self.tuning = tuning or tunings.for_device(torch.cuda.get_device_name(self._device))
        self._view = view
        self._driver.enter()
        with torch.cuda.device(self._device):
            self._parts = [Part(*each) for each in zip(view.groups, layouts, part_offsets, strict=True)]
            self._stores, self._loads = (
                _Lane(self._device, self._driver, gather, self._parts, self.tuning, checked)
                for gather in (True, False)
            )
        self.piece_bytes = max(c.piece_bytes for lane in (self._stores, self._loads) for c in lane.choices)
        self._registered = 0  # bytes from the pool's start
        self._starts: list[int] = []  # addresses of the registrations
        self._closed = False

    def register(self, start: int, nbytes: int) -> None:
        if start != self._registered or start % PIECE or nbytes <= 0 or start + nbytes > self._pool_bytes:
            raise ValueError(
                f"registering {nbytes} bytes at {start} of a pool of {self._pool_bytes}, after {self._registered}: "
                f"pieces begin at multiples of {PIECE}, where no slot lies across"
            )
        self._driver.register(self._pool + start, nbytes)
        self._starts.append(self._pool + start)
        self._registered += nbytes

    def store(self, group, blocks, keys, slots, after=None) -> CudaCopy:
        return self._copy(self._stores, self._loads, group, blocks, keys, slots, after)

    def load(self, group, blocks, keys, slots, after=None) -> CudaCopy:
        return self._copy(self._loads, self._stores, group, blocks, keys, slots, after)

    def _copy(self, lane: _Lane, other: _Lane, group: int, blocks, keys, slots, after) -> CudaCopy:
        part = self._parts[group]
        blocks, slots = np.asarray(blocks, dtype=np.int64), np.asarray(slots, dtype=np.int64)
        keys = np.asarray(keys, dtype=np.uint64)
        n = len(blocks)
        if not blocks.shape == keys.shape == slots.shape == (n,):
            raise ValueError(f"{blocks.shape} blocks, {keys.shape} keys, {slots.shape} slots")
        if not n:
            copy = CudaCopy(0, 0, lane is self._loads, lane)
            copy.bad = np.zeros(0, dtype=bool) if lane is self._loads else None
            return copy
        # As unsigned numbers, negative ones are too large.
        if blocks.view(np.uint64).max() >= self._blocks:
            raise ValueError(f"blocks {blocks.min()}..{blocks.max()} outside 0..{self._blocks - 1}")
        offsets = slots * PAGE
        offsets += part.part_offset
        if slots.min() <= 0 or int(offsets.max()) + part.nbytes > self._registered:
            raise ValueError(
                f"slots {slots.min()}..{slots.max()} of {part.nbytes} bytes outside the "
                f"{self._registered} bytes that are registered"
            )
        edges = None
        if len(self._starts) > 1:
            edges = offsets // PIECE
            if int((offsets - edges * PIECE).max()) + part.nbytes > PIECE:
                raise ValueError(f"a slot lies across a multiple of {PIECE} bytes, where another piece is pinned")
        offsets += self._pool
        self._driver.enter()
        lane.busy()  # takes back what ended
        try:
            return lane.copy(group, part, blocks, keys, offsets, edges, after, not other.busy())
        except Exception:
            lane.settle()
            raise

    def warm_up(self) -> None:
        self._driver.enter()
        with torch.cuda.device(self._device):
            for lane in (self._stores, self._loads):
                lane.warm_up()
            torch.cuda.synchronize(self._device)

    def idle(self) -> bool:
        self._driver.enter()
        return not (self._stores.busy() | self._loads.busy())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._driver.enter()
        self._stores.close()
        self._loads.close()
        for address in self._starts:
            self._driver.unregister(address)
        self._starts.clear()
        self._registered = 0
        self._driver.close()
        self._keep = None
