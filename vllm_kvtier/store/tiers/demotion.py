"""Demotion: writes blocks from memory to the secondary tiers. The index reports stored and used blocks; each tier has a
queue.

A tier writes one batch at a time, parents before children. Blocks are leased only while they are written, so that
queued blocks do not fill memory; a block that is evicted earlier is skipped. Writes wait for reads, for a bounded time,
and for a tier that opens or pauses.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from vllm_kvtier.store.index.block_entry import READY, BlockEntry
from vllm_kvtier.store.index.index import Index
from vllm_kvtier.store.index.removal_history import RemovalReason
from vllm_kvtier.store.index.types import ZERO
from vllm_kvtier.store.tiers.admission import Admission
from vllm_kvtier.store.tiers.base import Block, Tier
from vllm_kvtier.wire.reactor import Reactor, Timer
from vllm_kvtier.wire.slots import PAGE

BATCH_BYTES, BATCH_BLOCKS = 32 << 20, 256
MAX_STEPS = 4096  # queued blocks looked at for a batch: the tier may have all of them
# Time that a partial batch waits for more blocks: each batch costs the disk three syncs, whatever its size.
BATCH_WAIT_SECONDS = 0.05
# Maximum time that a batch waits for reads: a request waits for a read, none for a write.
YIELD_SECONDS = 1.0


@dataclass
class LaneCounts:
    """Statistics of one tier: ``queued_*`` as of now, the others blocks since the start."""

    queued_blocks: int = 0
    queued_bytes: int = 0
    admitted: int = 0  # to the queue
    written: int = 0
    failed: int = 0  # the tier did not write them
    dropped_full: int = 0  # the queue was full
    dropped_evicted: int = 0  # evicted while queued
    dropped_parent: int = 0  # their parent is neither in the tier nor writable


class _Lane:
    def __init__(self, tier: Tier, admission: Admission):
        self.tier, self.admission = tier, admission
        # -> time of queueing; oldest first. A dict would find its first item slowly when many were taken.
        self.queue: OrderedDict[BlockEntry, float] = OrderedDict()
        self.in_flight: set[BlockEntry] = set()
        self.timer: Timer | None = None
        self.due = 0.0  # of the timer
        self.counts = LaneCounts()


@dataclass(frozen=True)
class DemotionLimits:
    """``queue_bytes``: of a tier's queue; blocks beyond are not written. ``batch_bytes``: of blocks leased for a
    write, at most BATCH_BYTES."""

    queue_bytes: int
    batch_bytes: int = BATCH_BYTES


class Demotion:
    """A watch of the index of the store's memory. On the reactor's thread.

    admissions: of the tiers that accept writes. client: a client number of its own in the index.
    """

    def __init__(
        self,
        index: Index,
        admissions: Mapping[Tier, Admission],
        client: int,
        limits: DemotionLimits,
        reactor: Reactor,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._index, self._client, self._queue_bytes = index, client, limits.queue_bytes
        self._batch_bytes = min(limits.batch_bytes, BATCH_BYTES)
        self._reactor, self._clock = reactor, clock
        self._lanes = [_Lane(tier, admission) for tier, admission in admissions.items()]
        index.connect(client, 1, [])
        for lane in self._lanes:
            lane.tier.on_quiet = partial(self._arm, lane)

    def stats(self) -> dict[str, dict[str, int]]:
        """By tier: ``LaneCounts``."""
        return {lane.tier.name: asdict(lane.counts) for lane in self._lanes}

    def tiers_changed(self) -> None:
        """A tier may be writable again: the callback for ``Tier.on_change``."""
        for lane in self._lanes:
            self._arm(lane)

    # -- the index's watch --------------------------------------------------------------------------------------

    def stored(self, entries: Sequence[BlockEntry]) -> None:
        for lane in self._lanes:
            skipped: dict[BlockEntry, str] = {}
            for entry in entries:
                # The admission is always asked, because it keeps statistics.
                if lane.admission.stored(entry) and not self._is_demoted(lane, entry):
                    self._enqueue(lane, entry, skipped)
            self._arm(lane)

    def used(self, entries: Sequence[BlockEntry]) -> None:
        for lane in self._lanes:
            skipped: dict[BlockEntry, str] = {}
            decided = None
            for entry in entries:
                # The last block of a prefix decides for all before it: they are demoted before it, or with it.
                if entry.group == decided:
                    continue
                decided = None if entry.parent is None else entry.group
                if not self._is_demoted(lane, entry) and lane.admission.used(entry):
                    self._enqueue(lane, entry, skipped)
            self._arm(lane)

    def gone(self, entry: BlockEntry) -> None:
        for lane in self._lanes:
            lane.admission.gone(entry)
            if lane.queue.pop(entry, None) is not None:
                lane.counts.queued_blocks -= 1
                lane.counts.queued_bytes -= entry.size * PAGE
                lane.counts.dropped_evicted += 1

    def removal_reason(self, entry: BlockEntry) -> RemovalReason:
        """The reason for a block that is being evicted now."""
        if any(lane.tier.has(*entry.name) for lane in self._lanes):
            return RemovalReason.BELOW
        return RemovalReason.WAITED if any(entry in lane.queue for lane in self._lanes) else RemovalReason.EVICTED

    # -- inside -------------------------------------------------------------------------------------------------

    def _is_demoted(self, lane: _Lane, entry: BlockEntry) -> bool:
        """Whether the block is in the tier, queued or being written."""
        return entry in lane.queue or entry in lane.in_flight or lane.tier.has(*entry.name)

    def _enqueue(self, lane: _Lane, entry: BlockEntry, skipped: dict[BlockEntry, str]) -> None:
        """Queue the block after the blocks before it that are not demoted. ``skipped``: blocks of the same request that
        could not be queued, and why, so that a long prefix is walked only once; not at all while the queue is full."""
        if lane.counts.queued_bytes + entry.size * PAGE > self._queue_bytes:
            lane.counts.dropped_full += 1
            return
        path, parent = [entry], entry.parent
        while parent is not None and parent not in skipped and not self._is_demoted(lane, parent):
            path.append(parent)
            parent = parent.parent
        first, counts = path[-1], lane.counts
        reason = skipped.get(parent, "") if parent is not None else ""
        if parent is None and first.parent_hash is not None:
            if not lane.tier.has(first.namespace.name, first.group, first.parent_hash):
                reason = "dropped_parent"
        now = self._clock()
        while path and not reason:
            each = path[-1]
            if each.state is not READY:  # not committed; the next use of the prefix tries again
                reason = "dropped_parent"
            elif counts.queued_bytes + each.size * PAGE > self._queue_bytes:
                reason = "dropped_full"
            else:
                lane.queue[path.pop()] = now
                counts.admitted += 1
                counts.queued_blocks += 1
                counts.queued_bytes += each.size * PAGE
        if path:
            skipped.update(dict.fromkeys(path, reason))
            setattr(counts, reason, getattr(counts, reason) + len(path))

    def _arm(self, lane: _Lane) -> None:
        """Schedule the next batch. Always by a timer, because the caller may be in the middle of an index operation."""
        if lane.in_flight or not lane.queue or not lane.tier.writable:
            return
        full = len(lane.queue) >= BATCH_BLOCKS or lane.counts.queued_bytes >= self._batch_bytes
        due = next(iter(lane.queue.values()))
        due += YIELD_SECONDS if lane.tier.reading else 0.0 if full else BATCH_WAIT_SECONDS
        if lane.timer is not None:
            if lane.due <= due:
                return
            lane.timer.cancel()
        lane.due = due
        lane.timer = self._reactor.call_later(max(0.0, due - self._clock()), lambda: self._begin(lane))

    def _begin(self, lane: _Lane) -> None:
        lane.timer = None
        if lane.in_flight or not lane.tier.writable:
            return
        if lane.tier.reading and self._clock() < next(iter(lane.queue.values()), math.inf) + YIELD_SECONDS:
            self._arm(lane)
            return
        entries = self._next_batch(lane)
        if entries:
            self._write(lane, entries)
        else:
            self._arm(lane)

    def _write(self, lane: _Lane, entries: list[BlockEntry]) -> None:
        lease, slots = self._index.lease_blocks(self._client, [entry.name for entry in entries], forever=True)
        lane.in_flight.update(entries)
        blocks = [
            Block(*entry.name, entry.parent_hash or ZERO, entry.tenant, slot, entry.size, entry.depth)
            for entry, slot in zip(entries, slots, strict=True)
        ]

        def over(kept: list[bool]) -> None:
            self._index.release(self._client, lease)
            lane.in_flight.clear()
            lane.counts.written += sum(kept)
            lane.counts.failed += len(kept) - sum(kept)
            self._arm(lane)

        lane.tier.write(blocks, over)

    def _next_batch(self, lane: _Lane) -> list[BlockEntry]:
        entries: list[BlockEntry] = []
        nbytes, counts = 0, lane.counts
        for _ in range(min(len(lane.queue), MAX_STEPS)):
            entry = next(iter(lane.queue))
            size = entry.size * PAGE
            if len(entries) == BATCH_BLOCKS or (entries and nbytes + size > self._batch_bytes):
                break
            del lane.queue[entry]
            counts.queued_blocks -= 1
            counts.queued_bytes -= size
            if lane.tier.has(*entry.name):  # queued before the tier was open, and found in it
                counts.written += 1
            else:
                entries.append(entry)
                nbytes += size
        return entries
