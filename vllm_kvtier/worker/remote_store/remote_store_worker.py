"""This rank's loads from remote stores: it reads their memory by NIXL and copies the verified blocks into the cache.

It takes ``StoreWorker``'s place where the engine has no node store. A batch of a load (``worker.store.copy_queues``) is
read by NIXL (``remote_store.transfers``) into a buffer of the ring. From there the copier verifies and decodes it, as
from a node store's memory. A load ends when the copier no longer writes its blocks. NIXL may write only into the ring:
the buffer of a failed read is used again when the agent that read has ended.

Runs on the reactor's thread, under a lock that keeps vLLM's sleep mode out; the model runner's thread only hands over.
"""

import os
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.results import LoadResult
from vllm_kvtier.jobs.transfer_jobs import LoadJob, RemoteStoreInfo
from vllm_kvtier.logs import get_logger
from vllm_kvtier.remote_store.nixl_agent import Poller, Reader
from vllm_kvtier.remote_store.transfers import Job, NodeReads, ReadEvents
from vllm_kvtier.wire import link as m
from vllm_kvtier.wire.slots import PAGE, align
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.context import ASLEEP, RankContext
from vllm_kvtier.worker.copy.base import Copy
from vllm_kvtier.worker.remote_store.staging_ring import StagingRing
from vllm_kvtier.worker.store.copy_engine import CopyRate
from vllm_kvtier.worker.store.copy_queues import CopyBatch, LoadQueue
from vllm_kvtier.worker.store_load_worker import StoreLoadWorker

logger = get_logger(__name__)

MAX_STORES = 64  # whose connection is kept: requests name them
FIRST_RATE = 6e9  # bytes/s before any was measured
IDLE_SECONDS = 3e-3  # an idle step waits this long for the reactor's thread to end a load
SPARE_BUFFERS = 2  # kept for other stores: a store that hangs must not hold the whole ring
FAULT_PAUSE = 0.1


@dataclass(eq=False)
class _Store:
    """One instance of a remote store; a ``transfers.Source``. ``num_transfers``: its batches that have a buffer."""

    instance: str
    agent: str
    base: int
    metadata: bytes
    generation: int
    queue: LoadQueue
    num_transfers: int = 0


@dataclass(eq=False)
class _Transfer:
    """A batch that is read into ``buffer`` and then copied. ``dead``: it has been reported as failed."""

    store: _Store
    batch: CopyBatch
    buffer: int
    slots: np.ndarray  # pages of the ring
    copy: Copy | None = None
    dead: bool = False


class RemoteStoreWorker(StoreLoadWorker):
    def __init__(
        self,
        context: RankContext,
        view: CacheView,
        setup: m.RemoteStoreSetup,
        make_ring: Callable[..., StagingRing] = StagingRing,
        make_reader: Callable[..., Reader] = Reader,
    ):
        super().__init__(context, view, setup)
        self._make_ring, self._make_reader = make_ring, make_reader
        self._slot_pages, self._loopback = setup.slot_pages, setup.loopback
        self._part_pages = [align(nbytes, PAGE) // PAGE for nbytes in self._part_bytes]
        self._stores: dict[str, _Store] = {}  # by instance; the one used last comes last
        self._broken: list[_Store] = []  # with loads that have not ended
        self._transfers: set[_Transfer] = set()
        self._rate = CopyRate(FIRST_RATE)
        self._off = ""  # why this worker reads nothing any more
        self._logged: set[str] = set()
        self._load_ended = threading.Event()
        self._drive = Poller(self._reactor, lambda turn: turn)
        self._drive.add(self._poll)
        self._open(setup.host)
        self._reactor.on_stop(self._close)

    # -- model runner's thread -------------------------------------------------------------------------------------

    def load(self, jobs: list[LoadJob], after: Any) -> None:
        self._suspended = False
        self._load_ended.clear()
        self._reactor.call_soon(lambda: self._load(jobs, after))

    def under_way(self) -> set[str]:
        with self._lock:
            return {request_id for store in self._all_stores() for request_id in store.queue.request_ids()}

    def collect(self, idle: bool = False) -> None:
        """An idle step has time to wait for the end of a load."""
        if idle and any(len(store.queue) for store in self._all_stores()):
            self._load_ended.wait(IDLE_SECONDS)
            self._load_ended.clear()

    # -- reactor's thread: beginning and end -----------------------------------------------------------------------

    def _open(self, host: bool) -> None:
        """Make memory, copier and reader; NIXL reads into the device if it can."""
        os.environ.setdefault("UCX_LOG_LEVEL", "error")  # it would write a line about each abandoned read
        wanted = [True, False] if self.on_device and not host else [False]
        for on_device in wanted:
            try:
                self._set_up(on_device)
                break
            except Exception as error:  # the engine serves on without remote stores
                self._off = str(error)
                if not isinstance(error, KVTierError):
                    logger.exception("kvtier: remote store: setting up reads failed")
                if on_device != wanted[-1]:
                    logger.warning(
                        "kvtier: remote store: NIXL cannot read into the GPU (%s); blocks pass through host memory",
                        error,
                    )
        else:
            logger.warning("kvtier: remote store: unavailable (%s); nothing is loaded from other nodes", self._off)
        self._send_ready()

    def _set_up(self, on_device: bool) -> None:
        ring = self._make_ring(self._view, self._part_bytes, on_device)
        name = uuid.uuid4().hex

        def reader(number: str) -> Reader:
            made = self._make_reader(ring, f"{number} of {name}", replace(ring.kind, loopback=self._loopback))
            made.register({0})
            return made

        events = ReadEvents(self._arrived, self._broke, self._stuck, self._failed)
        reads = NodeReads(ring, reader, events, ring.buffer_bytes)
        # The copier pins host memory before NIXL registers it: UCX pins what is not pinned, and CUDA pins memory once.
        copier = ring.copier(self._layouts)
        try:
            reads.open()
        except Exception:
            copier.close()
            raise
        self._ring, self._reads, self._copier, self._off = ring, reads, copier, ""
        # A batch of any group fits a buffer.
        pages = ring.buffer_bytes // PAGE
        sizes = zip(self._part_bytes, self._part_pages, strict=True)
        self._batch_bytes = min(pages // each * nbytes for nbytes, each in sizes)
        if not self.on_device:
            self._batch_bytes = min(self._batch_bytes, copier.piece_bytes)

    def _send_ready(self) -> None:
        self._send(m.PoolReady(self._rank, "far", 0 if self._off else self._ring.nbytes))

    def _stuck(self, reason: str) -> None:
        """NIXL may still write into the ring, so that no buffer can be used again."""
        self._off = "NIXL does not free the memory of a failed read; restart this engine"
        logger.error("kvtier: remote store: %s; nothing is loaded from other nodes any more", self._off)
        self._cancel_all(self._off)
        self._send_ready()

    def _close(self) -> None:
        with self._lock:
            if not self._off:
                self._off = "the engine ends"
                self._copier.close()

    # -- reactor's thread: jobs ------------------------------------------------------------------------------------

    def _load(self, jobs: list[LoadJob], after: Any) -> None:
        with self._lock:
            now = time.monotonic()
            for job in jobs:
                store = self._store(job.remote_store)
                store.queue.add(job, after, now)
                reason = self._off or (ASLEEP if self._suspended else "")
                if reason:
                    store.queue.cancel(lambda other, job=job: other is job, reason, now)
        self._reactor_poll()

    def _store(self, info: RemoteStoreInfo) -> _Store:
        store = self._stores.pop(info.instance, None)
        if store is None:
            if len(self._stores) >= MAX_STORES:
                self._remove_oldest()
            queue = LoadQueue(self._part_bytes)
            store = _Store(info.instance, info.agent, info.base, info.metadata, info.generation, queue)
        elif store.generation < info.generation:  # an older job may come late
            store.metadata, store.generation = info.metadata, info.generation
        self._stores[info.instance] = store
        return store

    def _remove_oldest(self) -> None:
        """Disconnect from the store that was unused longest."""
        for instance, store in self._stores.items():
            if not (len(store.queue) or store.queue.has_results or store.num_transfers):
                del self._stores[instance]
                self._reads.gone(store, "unused")
                return

    def _all_stores(self) -> list[_Store]:
        return [*self._stores.values(), *self._broken]

    # -- reactor's thread: work ------------------------------------------------------------------------------------

    def _reactor_poll(self) -> None:
        self._drive.wake()

    def _poll(self) -> bool:
        """Poll everything once; whether there is more to do. An internal error must not cost the engine."""
        with self._lock:
            try:
                more = self._advance()
            except Exception as error:
                logger.exception("kvtier: remote store: internal error while reading; the loads fail")
                self._off = self._off or f"an internal error: {error}; restart this engine"
                self._cancel_all(self._off)
                self._send_ready()
                more = False
                self._reactor.call_later(FAULT_PAUSE, self._drive.wake)  # copies end, whatever else does not work
            results = self._results()
        self._report(results)
        return more

    def _advance(self) -> bool:
        now = time.monotonic()
        reading = not self._off and self._reads.poll()
        self._poll_copies(now)
        for store in self._all_stores():
            store.queue.expire(now)
        if not self._off:
            begun = self._begin(now)
            reading = reading or begun
        return reading or self._copying

    @property
    def _copying(self) -> bool:
        return any(transfer.copy is not None for transfer in self._transfers)

    def _begin(self, now: float) -> bool:
        """Give free buffers to the stores in turn, and to each store at most its share."""
        waiting = [store for store in self._stores.values() if store.queue.nbytes]
        share = max(1, min(self._ring.count - SPARE_BUFFERS, self._ring.count // max(1, len(waiting))))
        begun = False
        while self._ring.free and waiting:
            waiting = [store for store in waiting if store.queue.nbytes and store.num_transfers < share]
            for store in sorted(waiting, key=lambda store: store.num_transfers)[: len(self._ring.free)]:
                self._read(store, store.queue.next_batch(self._batch_bytes, self._rate.value, now))
                begun = True
        return begun

    def _read(self, store: _Store, batch: CopyBatch) -> None:
        group, buffer = batch.group, self._ring.free.pop()
        slots = buffer + np.arange(len(batch.blocks), dtype=np.int64) * self._part_pages[group]
        offset, nbytes = self._offsets[group], self._part_bytes[group]
        if not offset and self._part_pages[group] == self._slot_pages[group]:
            nbytes = self._slot_pages[group] * PAGE  # the part is the whole slot: adjacent slots arrive adjacent
        transfer = _Transfer(store, batch, buffer, slots)
        self._transfers.add(transfer)
        store.num_transfers += 1
        remote = np.where(batch.slots > 0, batch.slots * PAGE + offset, 0)
        self._reads.start(transfer, store, slots * PAGE, remote, np.full(len(slots), nbytes, np.int64))

    def _arrived(self, job: Job, seconds: float) -> None:
        """The read ended: all of it has arrived, or the rest never will."""
        transfer: _Transfer = job.tag
        store, batch = transfer.store, transfer.batch
        if transfer.dead:
            self._end(transfer)
            return
        now = time.monotonic()
        reason = job.error or ("" if all(job.good) else "the remote store does not have all of these blocks")
        if not reason:
            self._rate.add(batch.nbytes, seconds)
            try:
                keys = batch.keys ^ self._salts[batch.group]
                transfer.copy = self._copier.load(batch.group, batch.blocks, keys, transfer.slots, batch.after)
                return
            except Exception as error:  # a driver's error costs these loads, not the engine
                reason = f"copying blocks that arrived failed: {error}"
                self._log_once("copying", reason)
        store.queue.ended(batch, None, now, reason)
        self._end(transfer)

    def _poll_copies(self, now: float) -> None:
        for transfer in [transfer for transfer in self._transfers if transfer.copy is not None]:
            try:
                if not transfer.copy.done():
                    continue
                bad, reason = transfer.copy.bad, ""
            except Exception as error:  # the device failed: no copy will ever end, nor any forward
                bad, reason = None, f"copying blocks that arrived failed: {error}"
            transfer.store.queue.ended(transfer.batch, bad, now, reason)
            self._end(transfer)

    def _end(self, transfer: _Transfer) -> None:
        self._transfers.discard(transfer)
        transfer.store.num_transfers -= 1
        self._ring.free.append(transfer.buffer)

    # -- reactor's thread: failures --------------------------------------------------------------------------------

    def _failed(self, job: Job) -> None:
        """A read failed that may still write into its buffer; vLLM may reuse its blocks."""
        self._kill(job.tag, job.error)

    def _broke(self, store: _Store, reason: str) -> None:
        """Read nothing more from this store; the next request for it gets a new connection."""
        if self._stores.get(store.instance) is store:
            del self._stores[store.instance]
        self._broken.append(store)
        store.queue.cancel(lambda job: True, reason, time.monotonic())
        self._log_once(store.instance, f"reading failed: {reason}")
        self._send(m.RemoteStoreLost(self._rank, store.instance, store.generation, reason[:1000]))

    def _cancel(self, which: Callable[[LoadJob], bool], reason: str) -> None:
        for store in self._all_stores():
            store.queue.cancel(which, reason, time.monotonic())

    def _cancel_all(self, reason: str) -> None:
        """Fail all loads; what is being read is not copied, and copies under way end."""
        for transfer in [transfer for transfer in self._transfers if transfer.copy is None]:
            self._kill(transfer, reason)
        self._cancel(lambda job: True, reason)

    def _kill(self, transfer: _Transfer, reason: str) -> None:
        if not transfer.dead:
            transfer.dead = True
            transfer.store.queue.ended(transfer.batch, None, time.monotonic(), reason)

    # -- results ---------------------------------------------------------------------------------------------------

    def _take_ended(self) -> list[LoadResult]:
        while self._copying:
            self._poll_copies(time.monotonic())
        return self._results()

    def _results(self) -> list[LoadResult]:
        stores = self._all_stores()
        self._broken = [store for store in self._broken if len(store.queue)]
        return [result for store in stores for result in store.queue.take_results()]

    def _report(self, results: list[LoadResult]) -> None:
        for result in results:
            if result.corrupt:
                logger.warning("kvtier: remote store: %d blocks have a wrong checksum", len(result.corrupt))
            self._finish(result)
        if results:
            self._load_ended.set()

    def _log_once(self, what: str, text: str) -> None:
        if what not in self._logged and len(self._logged) < MAX_STORES:
            self._logged.add(what)
            logger.warning("kvtier: remote store: %s; these blocks are recomputed (logged once)", text)
