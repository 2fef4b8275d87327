"""Copies between a GPU's KV cache and slots in registered host memory, by kernels and DMA engines, without waiting.

Each direction is a :class:`_Lane` with its own streams, ring and scratch, so neither waits for the other. The work of a
call is in order within its lane only. ``worker.tuning`` chooses the way that blocks take (by a kernel over the link,
through the ring, or both); see ``tuning.Choice``.

Staged, a store goes

    kernels' stream    [gather piece 1][gather 2]   ...      waits for ``after``, and for the buffer to be drained
    DMA stream                         [ piece 1  ][ 2 ...

and a load the reverse, where only the scatter waits for ``after``. Encoded parts are always staged, and the kernels
encode and decode as they gather and scatter. Between its copies a store pauses the DMA engine now and then
(``tuning.PAUSE_BYTES``): the tokens of every step leave by the same engine.

A store can gather on the model's stream instead of its own (``tuning.MODEL_STREAM_PROGRAMS`` says why): only as many
pieces as the ring has buffers that are drained, so that the model never waits for the link; and without pauses, which
are kernels too.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from vllm_kvtier.kernels import page_copy
from vllm_kvtier.wire.slots import PAGE, PIECE_BYTES, PartLayout
from vllm_kvtier.worker import tuning as tunings
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.copy.part_tables import MAX_ROWS, ROW_ALIGN, Part, adjacent, mostly_adjacent
from vllm_kvtier.worker.copy.pinned_buffers import PinnedArgs
from vllm_kvtier.worker.device.cuda_driver import ANY_ORDER, ORDERED, Driver
from vllm_kvtier.worker.tuning import Choice, Tuning

_ROW_WORDS = len(page_copy.ROW_FIELDS)
_ROW_BYTES = 8 * _ROW_WORDS


class CudaCopy:
    """See ``worker.copy.base.Copy``."""

    def __init__(self, nbytes: int, n: int, load: bool, lane: "_Lane"):
        self.nbytes = nbytes
        self.bad: np.ndarray | None = None
        self._n, self._load, self._lane = n, load, lane
        self._events: list[int] = []
        self._args: PinnedArgs | None = None

    def begun(self, events: list[int], args: PinnedArgs) -> None:
        self._events, self._args = events, args

    def done(self) -> bool:
        if self._args is None:
            return True
        lane = self._lane
        while self._events:
            if not lane.driver.reached(self._events[-1]):
                return False
            lane.spare_events.append(self._events.pop())
        if self._load:
            self.bad = self._args.results[: self._n] != page_copy.GOOD
        lane.spare_args.append(self._args)
        self._args = None
        return True

    def make_stream_wait(self) -> None:
        # ``done`` has removed the events that were reached.
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
        self, device: torch.device, driver: Driver, gather: bool, parts: Sequence[Part], tuning: Tuning, checked: bool
    ):
        self.device, self.driver, self._gather = device, driver, gather
        self.choices = [tuning.choose(gather, p.nbytes, p.encoded) for p in parts]
        priority = tunings.STORE_PRIORITY if gather else tunings.LOAD_PRIORITY
        staged = [(c, p) for c, p in zip(self.choices, parts, strict=True) if c.way != "direct"]
        dmas = max((c.dma_streams for c, _ in staged), default=0)
        # The objects keep the streams alive; the handles are used.
        self._streams = [torch.cuda.Stream(device, priority=priority) for _ in range(2 + dmas)]
        self._kernels, self._direct, *dma_streams = self._streams
        self._handle = self._kernels.cuda_stream
        self._dma_handles = [s.cuda_stream for s in dma_streams]
        largest = max((max(c.piece_bytes, p.pitch) for c, p in staged), default=0)
        self._buffer_bytes = -(-largest // ROW_ALIGN) * ROW_ALIGN
        self._buffers = max((c.ring for c, _ in staged), default=0)
        self._ring = torch.empty(self._buffers * self._buffer_bytes + ROW_ALIGN, dtype=torch.uint8, device=device)
        self._ring_base = -(-self._ring.data_ptr() // ROW_ALIGN) * ROW_ALIGN
        # Per buffer: events recorded when its bytes have arrived, and when they are needed no more.
        self._filled, self._drained = (
            [[driver.new_event() for _ in range(n)] for _ in range(self._buffers)]
            for n in ((1, dmas) if gather else (dmas, 1))
        )
        self._next = 0
        # Bytes that each DMA stream may copy before its next pause (loads never pause), and a word to pause with.
        self._until_pause = dict.fromkeys(self._dma_handles, 0 if gather else 1 << 62)
        self._word = torch.empty(1, dtype=torch.int64, device=device)
        self._word_address = self._word.data_ptr()
        # (through the ring, directly) for each group; encoded parts have only the first.
        # All of one kind share a stream, and so the scratch. The last two: for the model's stream.
        scratch = [
            (
                torch.empty((MAX_ROWS, 4), dtype=torch.int64, device=device),
                torch.empty(MAX_ROWS, dtype=torch.int64, device=device),
            )
            for _ in range(4)
        ]
        self._page_copiers = [
            p.page_copiers(gather, c, scratch, checked, driver.launcher)
            for c, p in zip(self.choices, parts, strict=True)
        ]
        # The same for the model's stream; kernels of both may run at once.
        self._model_stream_copiers: list[page_copy.Launches] = []
        self.on_model_stream = (
            gather and len(staged) == len(parts)
            and all(c.on_model_stream and not p.encoded for c, p in staged)
        )  # fmt: skip
        if self.on_model_stream:
            wide = [replace(c, way="staged", programs=tunings.MODEL_STREAM_PROGRAMS) for c in self.choices]
            self._model_stream_copiers = [
                p.page_copiers(gather, c, scratch[2:], checked, driver.launcher)[0]
                for c, p in zip(wide, parts, strict=True)
            ]
        self._model_stream: torch.cuda.Stream | None = None  # the last one that was used
        self.spare_events: list[int] = []
        self.spare_args: list[PinnedArgs] = []
        self._under_way: list[CudaCopy] = []
        self._beginning: list[PinnedArgs] = []  # of the call that is being enqueued

    def wait_for_failed_call(self) -> None:
        """Wait for what a call enqueued before it failed: once it has raised, vLLM may reuse its blocks."""
        for stream in self._streams if self._model_stream is None else (*self._streams, self._model_stream):
            stream.synchronize()
        self.spare_args += self._beginning
        self._beginning.clear()

    def free_pieces(self, stream: torch.cuda.Stream) -> int:
        if self.driver.is_capturing(stream.cuda_stream):
            return 0
        for count in range(self._buffers):
            if not all(map(self.driver.reached, self._drained[(self._next + count) % self._buffers])):
                return count
        return self._buffers

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
        edges: np.ndarray | None,  # int64 [n] registration that holds each; None: one holds all
        after: torch.cuda.Event | None,
        alone: bool,  # nothing is under way in the other direction
        stream: torch.cuda.Stream | None = None,  # the model's, to gather on
    ) -> CudaCopy:
        n = len(slots)
        copy = CudaCopy(n * part.nbytes, n, not self._gather, self)
        args = self._take_args(n)
        self._beginning.append(args)
        table = args.words.reshape(-1, _ROW_WORDS)
        table[:n, 0] = blocks
        table[:n, 1] = keys.view(np.int64)
        if not self._gather:
            args.results[:n] = page_copy.BAD
        after_event = after.cuda_event if after is not None else 0
        choice = self.choices[number]
        if stream is not None and len(self._pieces(choice, part, 0, n)) > self.free_pieces(stream):
            stream = None
        direct = n if choice.way == "direct" else 0
        # Kernels over the link in both directions at once reach 0.7 of DMA's rate; adjacent slots need no kernel.
        if choice.way == "mixed" and alone and stream is None and not mostly_adjacent(slots, part.nbytes):
            direct = round(n * choice.direct_share)
        ends: list[int] = []
        if direct < n:
            self._staged(number, part, args, slots, edges, after_event, direct, stream)
            ends += self._dma_handles[: choice.dma_streams] if self._gather else [self._handle]
        if direct:
            table[:direct, 2] = slots[:direct]
            if after_event:
                self.driver.wait(self._direct.cuda_stream, after_event)
            for a in range(0, direct, MAX_ROWS):
                rows = min(direct - a, MAX_ROWS)
                self._page_copiers[number][-1].launch(args.address + a * _ROW_BYTES, rows, self._direct)
            ends.append(self._direct.cuda_stream)
        events = [self.spare_events.pop() if self.spare_events else self.driver.new_event() for _ in ends]
        for event, stream in zip(events, ends, strict=True):
            self.driver.record(event, stream)
        copy.begun(events, args)
        self._beginning.pop()
        self._under_way.append(copy)
        return copy

    def _take_args(self, n: int) -> PinnedArgs:
        for i, args in enumerate(self.spare_args):
            if args.num_rows >= n:
                return self.spare_args.pop(i)
        return _new_args(max(1024, 1 << (n - 1).bit_length()))

    def _staged(self, number, part, args, slots, edges, after_event, start, on_model_stream) -> None:
        driver, choice, page_copier = self.driver, self.choices[number], self._page_copiers[number][0]
        kernels, pause = self._kernels, choice.pause_bytes
        if on_model_stream is not None:
            self._model_stream = kernels = on_model_stream
            page_copier, pause = self._model_stream_copiers[number], None
        handle = kernels.cuda_stream
        table = args.words.reshape(-1, _ROW_WORDS)
        lines = choice.dma_streams
        for a, b in self._pieces(choice, part, start, len(slots)):
            buffer = self._next
            self._next = (buffer + 1) % self._buffers
            base = self._ring_base + buffer * self._buffer_bytes
            rows = part.row_offsets[: b - a] + base
            table[a:b, 2] = rows
            filled, drained = self._filled[buffer], self._drained[buffer]
            if lines == 1:
                shares = [(0, 0, b - a)]
            else:
                cuts = [(b - a) * i // lines for i in range(lines + 1)]
                # Rotated by one each time, or pieces of one block would all go to the same stream.
                shares = [((i + buffer) % lines, *cuts[i : i + 2]) for i in range(lines) if cuts[i + 1] > cuts[i]]
            if self._gather:
                for event in drained:
                    driver.wait(handle, event)
                if after_event and a == start:
                    driver.wait(handle, after_event)
                page_copier.launch(args.address + a * _ROW_BYTES, b - a, kernels)
                driver.record(filled[0], handle)
            for i, first, last in shares:
                stream = self._dma_handles[i]
                driver.wait(stream, filled[0] if self._gather else drained[0])
                some, where = slots[a + first : a + last], edges[a + first : a + last] if edges is not None else None
                self._move(stream, part, some, where, rows[first:last], pause)
                driver.record(drained[i] if self._gather else filled[i], stream)
            if not self._gather:
                for i, _, _ in shares:
                    driver.wait(self._handle, filled[i])
                if after_event and a == start:
                    driver.wait(self._handle, after_event)
                page_copier.launch(args.address + a * _ROW_BYTES, b - a, self._kernels)
                driver.record(drained[0], self._handle)

    def _pieces(self, choice: Choice, part: Part, start: int, end: int) -> list[tuple[int, int]]:
        """(first, last + 1) blocks of each buffer of the ring, in turn."""
        step = min(MAX_ROWS, max(1, min(choice.piece_bytes, self._buffer_bytes) // part.pitch))
        # Loads end with a small piece: a request waits until the last one is scattered.
        tail = 0 if self._gather else min(step // 4, (end - start) // 4)
        count = -(-(end - start - tail) // step)
        bounds = [start + (end - start - tail) * i // count for i in range(count + 1)]
        return list(zip(bounds, bounds[1:], strict=False)) + ([(end - tail, end)] if tail else [])

    def _move(
        self, stream: int, part: Part, slots: np.ndarray, edges: np.ndarray | None, rows: np.ndarray, pause: int | None
    ) -> None:
        """Enqueues the copies between slots and rows of the ring: adjacent slots in one."""
        driver, nbytes = self.driver, part.nbytes
        single, runs, distance = adjacent(slots, edges, nbytes)
        for start, n in runs:
            for first, count in self._with_pauses(stream, start, n, nbytes, pause):
                slot, row = int(slots[first]), int(rows[first])
                if self._gather:
                    driver.copy_lines(slot, distance, row, part.pitch, nbytes, count, stream)
                else:
                    driver.copy_lines(row, part.pitch, slot, distance, nbytes, count, stream)
        slots, rows = slots.view(np.uint64), rows.view(np.uint64)
        if single is not None:
            slots, rows = slots[single], rows[single]
        targets, sources, sizes = slots.ctypes.data, rows.ctypes.data, part.sizes.ctypes.data
        order = ORDERED
        if not self._gather:  # slots were written long ago: nothing on this stream, and no copy under way, writes them
            targets, sources, order = sources, targets, ANY_ORDER
        for first, count in self._with_pauses(stream, 0, len(slots), nbytes, pause):
            driver.copy_batch(targets + 8 * first, sources + 8 * first, sizes, count, stream, order)

    def _with_pauses(
        self, stream: int, start: int, n: int, nbytes: int, pause: int | None
    ) -> Iterator[tuple[int, int]]:
        """(first, count) of ``n`` copies of ``nbytes`` each, with a pause after every ``pause`` bytes, or after each
        copy if it has more. None: no pause."""
        if pause is None:
            if n:
                yield start, n
            return
        while n:
            left = self._until_pause[stream]
            if left < nbytes:
                self.driver.set_word(self._word_address, stream)
                left = max(pause, nbytes)
            count = min(n, left // nbytes)
            self._until_pause[stream] = left - count * nbytes
            yield start, count
            start, n = start + count, n - count

    def warm_up(self) -> None:
        """Compile this lane's kernels, copying nothing (tables of no rows)."""
        self.spare_args.append(_new_args(1024))
        for page_copiers in self._page_copiers:
            for page_copier, stream in zip(page_copiers, (self._kernels, self._direct), strict=False):
                page_copier.launch(self.spare_args[-1].address, 0, stream)
        for page_copier in self._model_stream_copiers:
            page_copier.launch(self.spare_args[-1].address, 0, self._kernels)

    def close(self) -> None:
        for copy in self._under_way:
            copy.wait()
        self._under_way.clear()
        for events in (self.spare_events, *self._filled, *self._drained):
            for event in events:
                self.driver.destroy_event(event)
        self.spare_events.clear()
        self._filled, self._drained = [], []


def _new_args(rows: int) -> PinnedArgs:
    """With the address of each row's result in its last column."""
    args = PinnedArgs(rows * _ROW_WORDS, rows)
    args.words.reshape(rows, _ROW_WORDS)[:, 3] = args.results_address + np.arange(rows)
    return args


class CudaCopier:
    """See ``worker.copy.base.Copier``."""

    checked = True  # False leaves the checksums out, for measurements: all loads are then reported bad

    def __init__(
        self,
        view: CacheView,
        pool: tuple[int, int, Any],
        layouts: Sequence[PartLayout],
        part_offsets: Sequence[int],
        tuning: Tuning | None = None,
        driver: Driver | None = None,
    ):
        """``driver`` replaces the device's own and is closed with the copier."""
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
                _Lane(self._device, self._driver, gather, self._parts, self.tuning, self.checked)
                for gather in (True, False)
            )
        self.piece_bytes = max(c.piece_bytes for lane in (self._stores, self._loads) for c in lane.choices)
        self.on_model_stream = self._stores.on_model_stream
        self._registered = 0  # bytes from the pool's start
        self._starts: list[int] = []  # addresses of the registrations
        self._closed = False

    def register(self, start: int, nbytes: int) -> None:
        if start != self._registered or start % PIECE_BYTES or nbytes <= 0 or start + nbytes > self._pool_bytes:
            raise ValueError(
                f"registering {nbytes} bytes at {start} of a pool of {self._pool_bytes}, after {self._registered}: "
                f"pieces begin at multiples of {PIECE_BYTES}, where no slot lies across"
            )
        self._driver.register(self._pool + start, nbytes)
        self._starts.append(self._pool + start)
        self._registered += nbytes

    def free_pieces(self, stream: torch.cuda.Stream) -> int:
        self._driver.enter()
        return self._stores.free_pieces(stream)

    def store(self, group, blocks, keys, slots, after=None, stream=None) -> CudaCopy:
        return self._copy(self._stores, self._loads, group, blocks, keys, slots, after, stream)

    def load(self, group, blocks, keys, slots, after=None) -> CudaCopy:
        return self._copy(self._loads, self._stores, group, blocks, keys, slots, after)

    def _copy(self, lane: _Lane, other: _Lane, group: int, blocks, keys, slots, after, stream=None) -> CudaCopy:
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
        # As unsigned numbers, negative ids are too large.
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
            edges = offsets // PIECE_BYTES
            if int((offsets - edges * PIECE_BYTES).max()) + part.nbytes > PIECE_BYTES:
                raise ValueError(f"a slot lies across a multiple of {PIECE_BYTES} bytes, where another piece is pinned")
        offsets += self._pool
        self._driver.enter()
        lane.busy()  # takes back events and arguments of copies that ended
        try:
            return lane.copy(group, part, blocks, keys, offsets, edges, after, not other.busy(), stream)
        except Exception:
            lane.wait_for_failed_call()
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
