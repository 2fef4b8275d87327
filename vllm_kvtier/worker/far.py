"""A worker's loads from other nodes' stores: it reads their memory itself, and copies what arrived into the cache.

It stands in ``TierWorker``'s place where the engine has no node store. What ``worker.queues`` says of loads holds here
too; a piece is read by NIXL (``store.lower.nodes.reads``, as a store's mover does) into a buffer of the ring, and goes
on from there as from a node store's memory: the copier checks it against its checksum and decodes it. A load ends when
the copier writes its blocks no more. What NIXL may still write is the ring's: a buffer of a read that went wrong is
used again when the agent that read has ended.

On the reactor's thread, under a lock that keeps vLLM's sleep mode apart; the model runner's thread only hands over.
"""

import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_kvtier import codecs
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.lower.nodes.agent import Drive, Reader
from vllm_kvtier.store.lower.nodes.reads import Job, Reads
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.slots import PAGE, align
from vllm_kvtier.worker.copier import Copy
from vllm_kvtier.worker.far_ring import Ring
from vllm_kvtier.worker.offload import Rate
from vllm_kvtier.worker.queues import ABORTED, LoadQueue, LoadResult, Piece
from vllm_kvtier.worker.views import CacheView
from vllm_kvtier.worker.work import FarSource, LoadOrder

logger = get_logger("vllm.kvtier.far")

MAX_STORES = 64  # remembered: requests name them
FIRST_RATE = 6e9  # bytes a second, before any was measured
# An engine whose requests all wait goes through empty steps; this thread rather lets the reactor's have its turn.
IDLE_STRETCH = 3e-3  # seconds
SPARE = 2  # buffers
FAULT_PAUSE = 0.1
ASLEEP = "the engine went to sleep"


@dataclass(eq=False)
class _Store:
    """One life of another node's store; a ``reads.Source``. ``flights``: pieces of it that have a buffer."""

    instance: str
    agent: str
    base: int
    metadata: bytes
    generation: int
    queue: LoadQueue
    flights: int = 0


@dataclass(eq=False)
class _Flight:
    """A piece on its way: being read to ``buffer``, then copied. ``dead``: it has been reported as failed."""

    store: _Store
    piece: Piece
    buffer: int
    slots: np.ndarray  # pages of the ring
    copy: Copy | None = None
    dead: bool = False


class FarWorker:
    def __init__(
        self,
        reactor: Reactor,
        rank: int,
        view: CacheView,
        setup: m.FarSetup,
        tell: Callable[[m.PoolReady | m.FarLost], None],
        finish: Callable[[LoadResult], None],
        make_ring: Callable[..., Ring] = Ring,
        make_reader: Callable[..., Reader] = Reader,
    ):
        """``tell`` speaks to the scheduler half (reactor's thread), ``finish`` takes results (any thread)."""
        self._reactor, self._rank, self._tell, self._finish = reactor, rank, tell, finish
        self._view, self._on_device = view, view.device.type == "cuda"
        self._make_ring, self._make_reader = make_ring, make_reader
        self._layouts = [
            part_layout(group, codecs.get(name)) for group, name in zip(view.groups, setup.codecs, strict=True)
        ]
        self._offsets, self._slot_pages = setup.offsets[rank], setup.slot_pages
        self._part_bytes = [layout.nbytes for layout in self._layouts]
        self._part_pages = [align(nbytes, PAGE) // PAGE for nbytes in self._part_bytes]
        self._lock = threading.RLock()
        self._stores: dict[str, _Store] = {}  # by instance; the one used last comes last
        self._ending: list[_Store] = []  # broken, and loads of theirs have not ended
        self._flights: set[_Flight] = set()
        self._rate = Rate(FIRST_RATE)
        self._resting = False  # the cache has no memory until the next step
        self._off = ""  # why nothing is read any more
        self._said: set[str] = set()
        self._ended = threading.Event()  # some load has
        self._drive = Drive(reactor, lambda turn: turn)
        self._drive.add(self._turn)
        self._open(setup.host)
        reactor.on_stop(self._close)

    # -- model runner's thread -------------------------------------------------------------------------------------

    def launching(self) -> None:
        """As TierWorker's, which has stores."""

    def step(self, step: int, fence: Any) -> None:
        """The forward of ``step`` was launched."""
        if step >= 0:
            self._resting = False

    def load(self, loads: list[LoadOrder], after: Any) -> None:
        """Begin loads; their blocks may be written behind ``after`` (torch.cuda.Event; None without a device)."""
        self._resting = False
        self._ended.clear()
        self._reactor.call_soon(lambda: self._load(loads, after))

    def under_way(self) -> set[str]:
        """Requests whose loads have not ended. Any thread."""
        with self._lock:
            stores = [*self._stores.values(), *self._ending]
            return {request_id for store in stores for request_id in store.queue.request_ids()}

    def cancel_loads(self, request_ids: list[str]) -> None:
        """Begin no more of these requests' loads. They end, as loads do, when nothing writes their blocks any more."""
        gone = set(request_ids)

        def cancel() -> None:
            with self._lock:
                self._cancel(lambda order: order.request_id in gone, ABORTED)
            self._drive.wake()

        self._reactor.call_soon(cancel)  # behind the loads that went this way

    def rest(self) -> None:
        """The cache's memory is about to be taken away: nothing touches it until the next step."""
        with self._lock:
            self._resting = True
            self._fail_all(ASLEEP)
            if self._on_device:
                torch.cuda.synchronize(self._view.device)
            while any(flight.copy is not None for flight in self._flights):
                self._land(time.monotonic())
            results = self._results()
        self._report(results)

    def collect(self, idle: bool = False) -> None:
        """Call after each step's launch. ``idle``: the step computes nothing, so that this thread has time to see a
        load end."""
        if idle and self._loading:
            self._ended.wait(IDLE_STRETCH)
            self._ended.clear()

    # -- reactor's thread: beginning and end -------------------------------------------------------------------------

    def _open(self, host: bool) -> None:
        """Memory, copier and reader; straight to the device if that is possible."""
        os.environ.setdefault("UCX_LOG_LEVEL", "error")  # it would write a line about each read that was left behind
        wanted = [True, False] if self._on_device and not host else [False]
        for on_device in wanted:
            try:
                self._set_up(on_device)
                break
            except Exception as error:  # the engine serves on without other nodes
                self._off = str(error)
                if not isinstance(error, KVTierError):
                    logger.exception("kvtier: setting up reads from other nodes' stores failed")
                if on_device != wanted[-1]:
                    logger.warning(
                        "kvtier: other nodes' stores cannot be read straight into the GPU (%s); what comes from them "
                        "passes through host memory", error,
                    )
        else:
            logger.warning("kvtier: nothing is read from other nodes' stores: %s", self._off)
        self._tell_ready()

    def _set_up(self, on_device: bool) -> None:
        ring = self._make_ring(self._view, self._part_bytes, on_device)
        name = uuid.uuid4().hex

        def reader(number: str) -> Reader:
            made = self._make_reader(ring, f"{number} of {name}", ring.kind)
            made.register({0})
            return made

        reads = Reads(ring, reader, self._arrived, self._broke, self._stuck, self._failed, ring.buffer_bytes)
        # Host memory is pinned for the device before NIXL has it: UCX pins what nobody has, and CUDA does that once.
        copier = ring.copier(self._layouts)
        try:
            reads.open()
        except Exception:
            copier.close()
            raise
        self._ring, self._reads, self._copier, self._off = ring, reads, copier, ""
        # Whatever group a piece is of, it fits a buffer.
        pages = ring.buffer_bytes // PAGE
        sizes = zip(self._part_bytes, self._part_pages, strict=True)
        self._piece_bytes = min(pages // each * nbytes for nbytes, each in sizes)
        if not self._on_device:
            self._piece_bytes = min(self._piece_bytes, copier.piece_bytes)

    def _tell_ready(self) -> None:
        self._tell(m.PoolReady(self._rank, "far", 0 if self._off else self._ring.nbytes))

    def _stuck(self, reason: str) -> None:
        """What NIXL may still write into cannot be given to anybody."""
        self._off = "NIXL does not give back the memory of a read that failed; restart this engine"
        logger.error("kvtier: nothing is read from other nodes' stores any more: %s", self._off)
        self._fail_all(self._off)
        self._tell_ready()

    def _close(self) -> None:
        with self._lock:
            if not self._off:
                self._off = "the engine ends"
                self._copier.close()

    # -- reactor's thread: orders ------------------------------------------------------------------------------------

    def _load(self, loads: list[LoadOrder], after: Any) -> None:
        with self._lock:
            now = time.monotonic()
            for order in loads:
                store = self._store(order.far)
                store.queue.add(order, after, now)
                reason = self._off or (ASLEEP if self._resting else "")
                if reason:
                    store.queue.cancel(lambda other, order=order: other is order, reason, now)
        self._drive.wake()

    def _store(self, far: FarSource) -> _Store:
        store = self._stores.pop(far.instance, None)
        if store is None:
            if len(self._stores) >= MAX_STORES:
                self._forget_one()
            store = _Store(far.instance, far.agent, far.base, far.metadata, far.generation, LoadQueue(self._part_bytes))
        elif store.generation < far.generation:  # an order may come late
            store.metadata, store.generation = far.metadata, far.generation
        self._stores[far.instance] = store
        return store

    def _forget_one(self) -> None:
        """The one that was unused longest."""
        for instance, store in self._stores.items():
            if not len(store.queue) and not store.flights:
                del self._stores[instance]
                self._reads.gone(store, "unused")
                return

    @property
    def _loading(self) -> bool:
        """Whether any request waits for a load."""
        return any(len(store.queue) for store in [*self._stores.values(), *self._ending])

    # -- reactor's thread: work --------------------------------------------------------------------------------------

    def _turn(self) -> bool:
        """One look at everything; whether there is more to do. What nobody foresaw must not cost the engine."""
        with self._lock:
            try:
                more = self._advance()
            except Exception as error:
                logger.exception("kvtier: reading from other nodes' stores failed in an unforeseen way")
                self._off = self._off or f"an error that nobody foresaw: {error}; restart this engine"
                self._fail_all(self._off)
                self._tell_ready()
                more = False
                self._reactor.call_later(FAULT_PAUSE, self._drive.wake)  # copies end, whatever else does not work
            results = self._results()
        self._report(results)
        return more

    def _advance(self) -> bool:
        now = time.monotonic()
        reading = not self._off and self._reads.drive()
        self._land(now)
        stores = [*self._stores.values(), *self._ending]
        for store in stores:
            store.queue.expire(now)
        if not self._off:
            begun = self._begin(now)
            reading = reading or begun
        return reading or any(flight.copy is not None for flight in self._flights)

    def _begin(self, now: float) -> bool:
        """Give out buffers, to one store after the other. None gets the last ones: another may come while it hangs."""
        waiting = [store for store in self._stores.values() if store.queue.nbytes]
        share = max(1, min(self._ring.count - SPARE, self._ring.count // max(1, len(waiting))))
        begun = False
        while self._ring.free and waiting:
            waiting = [store for store in waiting if store.queue.nbytes and store.flights < share]
            for store in sorted(waiting, key=lambda store: store.flights)[: len(self._ring.free)]:
                self._read(store, store.queue.next_piece(self._piece_bytes, self._rate.value, now))
                begun = True
        return begun

    def _read(self, store: _Store, piece: Piece) -> None:
        group, buffer = piece.group, self._ring.free.pop()
        slots = buffer + np.arange(len(piece.blocks), dtype=np.int64) * self._part_pages[group]
        offset, nbytes = self._offsets[group], self._part_bytes[group]
        if not offset and self._part_pages[group] == self._slot_pages[group]:
            nbytes = self._slot_pages[group] * PAGE  # the slot is the part: side by side there, they are so here
        flight = _Flight(store, piece, buffer, slots)
        self._flights.add(flight)
        store.flights += 1
        far = np.where(piece.slots > 0, piece.slots * PAGE + offset, 0)
        self._reads.start(flight, store, slots * PAGE, far, np.full(len(slots), nbytes, np.int64))

    def _arrived(self, job: Job, seconds: float) -> None:
        """Nothing of it arrives any more: all of it is here, or some never will be."""
        flight: _Flight = job.tag
        store, piece = flight.store, flight.piece
        if flight.dead:
            self._end(flight)
            return
        now = time.monotonic()
        reason = job.error or ("" if all(job.good) else "the other node's store does not have all of these blocks")
        if not reason:
            self._rate.add(piece.nbytes, seconds)
            try:
                flight.copy = self._copier.load(piece.group, piece.blocks, piece.keys, flight.slots, piece.after)
                return
            except Exception as error:  # whatever a driver raises costs these loads, not the engine
                reason = f"copying what arrived from another node failed: {error}"
                self._say_once("copying", reason)
        store.queue.ended(piece, None, now, reason)
        self._end(flight)

    def _land(self, now: float) -> None:
        """Copies that have ended."""
        for flight in [flight for flight in self._flights if flight.copy is not None]:
            try:
                if not flight.copy.done():
                    continue
                bad, reason = flight.copy.bad, ""
            except Exception as error:  # the device failed: no copy will ever end, nor any forward
                bad, reason = None, f"copying what arrived from another node failed: {error}"
            flight.store.queue.ended(flight.piece, bad, now, reason)
            self._end(flight)

    def _end(self, flight: _Flight) -> None:
        self._flights.discard(flight)
        flight.store.flights -= 1
        self._ring.free.append(flight.buffer)

    # -- reactor's thread: what goes wrong ---------------------------------------------------------------------------

    def _failed(self, job: Job) -> None:
        """A read that may still arrive, in its buffer. Its blocks are nobody's concern any more."""
        self._kill(job.tag, job.error)

    def _broke(self, store: _Store, reason: str) -> None:
        """Nothing more is read from it; whoever asks it again has another connection."""
        if self._stores.get(store.instance) is store:
            del self._stores[store.instance]
        self._ending.append(store)
        store.queue.cancel(lambda order: True, reason, time.monotonic())
        self._say_once(store.instance, f"reading from another node's store failed: {reason}")
        self._tell(m.FarLost(self._rank, store.instance, reason[:1000]))

    def _cancel(self, which: Callable[[LoadOrder], bool], reason: str) -> None:
        for store in [*self._stores.values(), *self._ending]:
            store.queue.cancel(which, reason, time.monotonic())

    def _fail_all(self, reason: str) -> None:
        """What is being read is not copied; copies end."""
        for flight in [flight for flight in self._flights if flight.copy is None]:
            self._kill(flight, reason)
        self._cancel(lambda order: True, reason)

    def _kill(self, flight: _Flight, reason: str) -> None:
        if not flight.dead:
            flight.dead = True
            flight.store.queue.ended(flight.piece, None, time.monotonic(), reason)

    # -- results -------------------------------------------------------------------------------------------------------

    def _results(self) -> list[LoadResult]:
        stores = [*self._stores.values(), *self._ending]
        self._ending = [store for store in self._ending if len(store.queue)]
        return [result for store in stores for result in store.queue.take_results()]

    def _report(self, results: list[LoadResult]) -> None:
        for result in results:
            self._finish(result)
        if results:
            self._ended.set()

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._said and len(self._said) < MAX_STORES:
            self._said.add(what)
            logger.warning("kvtier: %s; these blocks are computed (said once)", text)
