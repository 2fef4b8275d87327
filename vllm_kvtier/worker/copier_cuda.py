"""Copies between a GPU's KV cache and slots in registered host memory: kernels, DMA engines, events, no waiting.

Each direction is a :class:`_Lane` with streams, a ring and scratch of its own, so neither waits for the other. What a
call enqueues is in order within its lane only. How blocks go (by a kernel over the link, through the ring, or both)
is ``worker.tuning``'s choice; see ``tuning.Choice`` for the ways.

Staged, a store goes

    kernels' stream    [gather piece 1][gather 2]   ...      waits for ``after``, and for the buffer to be drained
    DMA streams                        [ piece 1  ][ 2 ...   each a share of the piece's blocks

and a load the reverse, where only the scatter waits for ``after``. Two DMA streams, so that one engine's setting up
of a copy falls into the other's copying.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vllm_kvtier.kernels import pages
from vllm_kvtier.wire.slots import PAGE, PartLayout
from vllm_kvtier.worker import tuning as tunings
from vllm_kvtier.worker.copier_parts import MAX_ROWS, ROW_ALIGN, Part, adjacent
from vllm_kvtier.worker.cuda import ANY_ORDER, ORDERED, Driver
from vllm_kvtier.worker.tuning import Choice, Tuning
from vllm_kvtier.worker.views import CacheView


def pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class _Sheet:
    """Pinned host memory for the table of rows and the verdicts of one call."""

    def __init__(self, rows: int):
        self.capacity = rows
        self._memory = pinned(rows * 33)
        self.address = self._memory.data_ptr()
        flat = self._memory.numpy()
        self.table = flat[: rows * 32].view(np.int64).reshape(rows, 4)
        self.verdicts = flat[rows * 32 :]
        self.table[:, 3] = self.address + rows * 32 + np.arange(rows)


class CudaCopy:
    """See ``copier.Copy``."""

    def __init__(self, nbytes: int, n: int, load: bool):
        self.nbytes = nbytes
        self.bad: np.ndarray | None = None
        self._n, self._load = n, load
        self._events: list[torch.cuda.Event] = []
        self._sheet: _Sheet | None = None
        self._sheets: list[_Sheet] = []

    def begun(self, events: list[torch.cuda.Event], sheet: _Sheet, sheets: list[_Sheet]) -> None:
        self._events, self._sheet, self._sheets = events, sheet, sheets

    def done(self) -> bool:
        while self._events:
            if not self._events[-1].query():
                return False
            self._events.pop()
        if self._sheet is not None:
            if self._load:
                self.bad = self._sheet.verdicts[: self._n] != pages.GOOD
            self._sheets.append(self._sheet)
            self._sheet = None
        return True

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()
        self.done()


class _Lane:
    """One direction's streams and memory."""

    def __init__(
        self,
        device: torch.device,
        driver: Driver,
        gather: bool,
        groups: Sequence[Part],
        tuning: Tuning,
        checked: bool,
    ):
        self._driver, self._gather = driver, gather
        self.choices = [tuning.choose(gather, g.nbytes) for g in groups]
        # A request waits for loads; stores only have to keep up.
        priority = 0 if gather else -1
        self._kernels, self._direct = (torch.cuda.Stream(device, priority=priority) for _ in range(2))
        staged = [(c, g) for c, g in zip(self.choices, groups, strict=True) if c.way != "direct"]
        dmas = max((c.dma_streams for c, _ in staged), default=0)
        self._dma = [torch.cuda.Stream(device, priority=priority) for _ in range(dmas)]
        self._buffer_bytes = max((max(c.piece_bytes, g.pitch) for c, g in staged), default=0)
        self._buffers = max((c.ring for c, _ in staged), default=0)
        self._ring = torch.empty(self._buffers * self._buffer_bytes + ROW_ALIGN, dtype=torch.uint8, device=device)
        self._ring_base = -(-self._ring.data_ptr() // ROW_ALIGN) * ROW_ALIGN
        # Per buffer: recorded where its bytes have arrived, and where they are needed no more.
        self._filled = [self._events(1 if gather else dmas) for _ in range(self._buffers)]
        self._drained = [self._events(dmas if gather else 1) for _ in range(self._buffers)]
        self._next = 0
        # Scratch (rows, sums) for each of the two kernel streams, whose launches follow one another.
        self._scratch = [
            (
                torch.empty((MAX_ROWS, 4), dtype=torch.int64, device=device),
                torch.empty(MAX_ROWS, dtype=torch.int64, device=device),
            )
            for _ in range(2)
        ]
        # (through the ring, directly) for each group.
        self._movers = [
            [
                pages.Mover(gather, g.table, g.sum_offset, device, programs, c.warps, checked)
                for programs in _split(c)
            ]
            for c, g in zip(self.choices, groups, strict=True)
        ]

    @staticmethod
    def _events(n: int) -> list[torch.cuda.Event]:
        return [torch.cuda.Event() for _ in range(n)]

    def copy(
        self,
        number: int,
        group: Part,
        sheet: _Sheet,
        slots: np.ndarray,  # int64 [n] addresses of the parts
        edges: np.ndarray,  # int64 [n] registration that each lies in
        after: torch.cuda.Event | None,
    ) -> list[torch.cuda.Event]:
        """Enqueues the copy of a filled sheet (all but the addresses of rows); events that mark its end."""
        choice, n = self.choices[number], len(slots)
        direct = {"direct": n, "staged": 0, "mixed": round(n * choice.direct_share)}[choice.way]
        ends: list[torch.cuda.Stream] = []
        if direct < n:
            self._staged(number, group, sheet, slots, edges, after, direct)
            ends += self._dma[: choice.dma_streams] if self._gather else [self._kernels]
        if direct:
            sheet.table[:direct, 2] = slots[:direct]
            if after is not None:
                self._direct.wait_event(after)
            for a in range(0, direct, MAX_ROWS):
                b = min(direct, a + MAX_ROWS)
                self._movers[number][1].launch(sheet.address + a * 32, b - a, *self._scratch[1], self._direct)
            ends.append(self._direct)
        events = self._events(len(ends))
        for event, stream in zip(events, ends, strict=True):
            event.record(stream)
        return events

    def _staged(self, number, group, sheet, slots, edges, after, start) -> None:
        choice, mover = self.choices[number], self._movers[number][0]
        step = min(MAX_ROWS, max(1, min(choice.piece_bytes, self._buffer_bytes) // group.pitch))
        n = len(slots)
        # Pieces of equal size: a last one of a few blocks would be all latency.
        count = -(-(n - start) // step)
        bounds = [start + (n - start) * i // count for i in range(count + 1)]
        for a, b in zip(bounds, bounds[1:], strict=False):
            buffer = self._next
            self._next = (buffer + 1) % self._buffers
            base = self._ring_base + buffer * self._buffer_bytes
            rows = base + np.arange(b - a, dtype=np.int64) * group.pitch
            sheet.table[a:b, 2] = rows
            lines = choice.dma_streams
            shares = [(b - a) * i // lines for i in range(lines + 1)]
            # Turned by one each time, or pieces of one block would all go to the same stream.
            parts = [((i + buffer) % lines, *shares[i : i + 2]) for i in range(lines) if shares[i + 1] > shares[i]]
            filled, drained = self._filled[buffer], self._drained[buffer]
            if self._gather:
                for event in drained:
                    self._kernels.wait_event(event)
                if after is not None and a == start:
                    self._kernels.wait_event(after)
                mover.launch(sheet.address + a * 32, b - a, *self._scratch[0], self._kernels)
                filled[0].record(self._kernels)
                for i, s, e in parts:
                    self._dma[i].wait_event(filled[0])
                    self._move(self._dma[i], group, slots[a + s : a + e], edges[a + s : a + e], rows[s:e])
                    drained[i].record(self._dma[i])
            else:
                for i, s, e in parts:
                    self._dma[i].wait_event(drained[0])
                    self._move(self._dma[i], group, slots[a + s : a + e], edges[a + s : a + e], rows[s:e])
                    filled[i].record(self._dma[i])
                    self._kernels.wait_event(filled[i])
                if after is not None and a == start:
                    self._kernels.wait_event(after)
                mover.launch(sheet.address + a * 32, b - a, *self._scratch[0], self._kernels)
                drained[0].record(self._kernels)

    def _move(self, stream: torch.cuda.Stream, group: Part, slots, edges, rows) -> None:
        """Enqueues the copies between slots and rows of the ring: adjacent slots in one."""
        handle = stream.cuda_stream
        single, runs, distance = adjacent(slots, edges, group.nbytes)
        for first, count in runs:
            slot, row = int(slots[first]), int(rows[first])
            if self._gather:
                self._driver.copy_lines(slot, distance, row, group.pitch, group.nbytes, count, handle)
            else:
                self._driver.copy_lines(row, group.pitch, slot, distance, group.nbytes, count, handle)
        there, here = slots.view(np.uint64), rows.view(np.uint64)
        if single is not None:
            there, here = there[single], here[single]
        sizes = group.sizes[: len(there)]
        if self._gather:
            self._driver.copy_batch(there, here, sizes, handle, ORDERED)
        else:
            # What a slot holds was written long ago: nothing on this stream, and nothing under way, writes it.
            self._driver.copy_batch(here, there, sizes, handle, ANY_ORDER)

    def warm_up(self, sheet: _Sheet) -> None:
        """Compiles this lane's kernels, copying nothing (tables of no rows)."""
        for movers in self._movers:
            for mover, stream, scratch in zip(movers, (self._kernels, self._direct), self._scratch, strict=True):
                mover.launch(sheet.address, 0, *scratch, stream)


def _split(choice: Choice) -> tuple[int, int]:
    """Programs of a kernel to or from the ring, and of one to or from slots, where there are such."""
    if choice.way == "mixed":
        return choice.programs - choice.direct_programs, choice.direct_programs
    return choice.programs, choice.programs


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
        with torch.cuda.device(self._device):
            self._groups = [
                Part(g, layout, offset)
                for g, layout, offset in zip(view.groups, layouts, part_offsets, strict=True)
            ]
            self._stores, self._loads = (
                _Lane(self._device, self._driver, gather, self._groups, self.tuning, checked)
                for gather in (True, False)
            )
        self.piece_bytes = max(c.piece_bytes for lane in (self._stores, self._loads) for c in lane.choices)
        self._starts = np.zeros(0, dtype=np.int64)  # addresses of the registrations, ascending
        self._registered = 0  # bytes from the pool's start
        self._sheets: list[_Sheet] = []
        self._under_way: list[CudaCopy] = []
        self._closed = False

    def register(self, start: int, nbytes: int) -> None:
        if start != self._registered or start % PAGE or nbytes <= 0 or start + nbytes > self._pool_bytes:
            raise ValueError(
                f"registering {nbytes} bytes at {start} of a pool of {self._pool_bytes}, after {self._registered}"
            )
        self._driver.register(self._pool + start, nbytes)
        self._starts = np.append(self._starts, self._pool + start)
        self._registered += nbytes

    def store(self, group, blocks, keys, slots, after=None) -> CudaCopy:
        return self._copy(self._stores, group, blocks, keys, slots, after)

    def load(self, group, blocks, keys, slots, after=None) -> CudaCopy:
        return self._copy(self._loads, group, blocks, keys, slots, after)

    def _copy(self, lane: _Lane, group: int, blocks, keys, slots, after) -> CudaCopy:
        target = self._groups[group]
        blocks, slots = (np.asarray(a, dtype=np.int64) for a in (blocks, slots))
        keys = np.asarray(keys, dtype=np.uint64)
        n = len(blocks)
        if not (blocks.shape == keys.shape == slots.shape == (n,)):
            raise ValueError(f"{blocks.shape} blocks, {keys.shape} keys, {slots.shape} slots")
        self._under_way = [c for c in self._under_way if not c.done()]
        copy = CudaCopy(n * target.nbytes, n, lane is self._loads)
        if not n:
            copy.bad = np.zeros(0, dtype=bool) if lane is self._loads else None
            return copy
        if blocks.min() < 0 or blocks.max() >= self._blocks:
            raise ValueError(f"blocks {blocks.min()}..{blocks.max()} outside 0..{self._blocks - 1}")
        last = int(slots.max()) * PAGE + target.part_offset + target.nbytes
        if slots.min() <= 0 or last > self._registered:
            raise ValueError(
                f"slots {slots.min()}..{slots.max()} of {target.nbytes} bytes outside the "
                f"{self._registered} bytes that are registered"
            )
        addresses = slots * PAGE + (self._pool + target.part_offset)
        edges = self._starts.searchsorted(addresses, side="right")
        if (self._starts.searchsorted(addresses + (target.nbytes - 1), side="right") != edges).any():
            raise ValueError("a slot lies in two registrations")
        sheet = self._sheet(n)
        sheet.table[:n, 0] = blocks
        sheet.table[:n, 1] = keys.view(np.int64)
        sheet.verdicts[:n] = pages.BAD
        self._driver.enter()
        events = lane.copy(group, target, sheet, addresses, edges, after)
        copy.begun(events, sheet, self._sheets)
        self._under_way.append(copy)
        return copy

    def _sheet(self, n: int) -> _Sheet:
        for i, sheet in enumerate(self._sheets):
            if sheet.capacity >= n:
                return self._sheets.pop(i)
        return _Sheet(max(1024, 1 << (n - 1).bit_length()))

    def warm_up(self) -> None:
        self._driver.enter()
        sheet = self._sheet(1)
        with torch.cuda.device(self._device):
            for lane in (self._stores, self._loads):
                lane.warm_up(sheet)
            torch.cuda.synchronize(self._device)
        self._sheets.append(sheet)

    def idle(self) -> bool:
        self._under_way = [c for c in self._under_way if not c.done()]
        return not self._under_way

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for copy in self._under_way:
            copy.wait()
        self._under_way.clear()
        for address in self._starts.tolist():
            self._driver.unregister(address)
        self._starts = self._starts[:0]
        self._registered = 0
        self._driver.close()
        self._keep = None
