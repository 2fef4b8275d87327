"""What is written down: hears from the index what is stored and used, and keeps a queue for each tier below.

Blocks go down in batches, one under way a tier, those before them in the chain first. They are leased only while
they are written: one that memory gives up earlier is skipped, because waiting blocks must not fill memory. Writes let
reads pass, for a while.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from vllm_kvtier.store.entries import READY, Entry
from vllm_kvtier.store.fates import Fate
from vllm_kvtier.store.index import Index
from vllm_kvtier.store.lower.admission import Admission
from vllm_kvtier.store.lower.base import Block, Tier
from vllm_kvtier.store.records import ZERO
from vllm_kvtier.wire.reactor import Reactor, Timer
from vllm_kvtier.wire.slots import PAGE

BATCH_BYTES, BATCH_BLOCKS = 32 << 20, 256
# A batch that is not full waits so long for more: each costs the disk three syncs, whatever is in it.
LINGER_SECONDS = 0.05
# So long a batch lets reads go first: they are what a request waits for.
YIELD_SECONDS = 1.0


@dataclass
class LaneCounts:
    """Of one tier: blocks since the start, but what is ``queued``, which is as of now."""

    queued_blocks: int = 0
    queued_bytes: int = 0
    admitted: int = 0  # to the queue
    written: int = 0
    failed: int = 0  # the tier did not keep them
    dropped_full: int = 0  # the queue was
    dropped_evicted: int = 0  # memory gave them up before their turn
    dropped_parent: int = 0  # what precedes them is neither there nor to be had


class _Lane:
    def __init__(self, tier: Tier, admission: Admission):
        self.tier, self.admission = tier, admission
        self.queue: dict[Entry, float] = {}  # -> since when; oldest first
        self.flying: set[Entry] = set()
        self.timer: Timer | None = None
        self.due = 0.0  # of the timer
        self.counts = LaneCounts()


class Demotion:
    """``index.watch`` of the store's memory. All of it on the reactor's thread.

    tiers: those that are ever written to. client: a number of the index's that nobody else uses. admission(tier): what
    decides for it. queue_bytes: of blocks that may wait for one tier; beyond that what comes is not written.
    batch_bytes: of blocks that are leased for being written at a time, at most BATCH_BYTES.
    """

    def __init__(
        self,
        index: Index,
        tiers: Sequence[Tier],
        client: int,
        admission: Callable[[Tier], Admission],
        queue_bytes: int,
        batch_bytes: int,
        reactor: Reactor,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._index, self._client, self._queue_bytes = index, client, queue_bytes
        self._batch_bytes = min(batch_bytes, BATCH_BYTES)
        self._reactor, self._clock = reactor, clock
        self._lanes = [_Lane(tier, admission(tier)) for tier in tiers]
        index.connect(client, 1, [])
        for lane in self._lanes:
            lane.tier.on_quiet = lambda lane=lane: self._arm(lane)

    def stats(self) -> dict[str, dict[str, int]]:
        """By tier: ``LaneCounts``."""
        return {lane.tier.name: asdict(lane.counts) for lane in self._lanes}

    def tiers_changed(self) -> None:
        """One may take writes again. Call it from ``Tier.on_change``."""
        for lane in self._lanes:
            self._arm(lane)

    # -- the index's watch --------------------------------------------------------------------------------------

    def stored(self, entries: Sequence[Entry]) -> None:
        for lane in self._lanes:
            if lane.tier.writable:
                lost: dict[Entry, str] = {}
                for entry in entries:
                    # Asked even if it is there already: the admission learns from it.
                    if lane.admission.stored(entry) and not self._is_down(lane, entry):
                        self._want(lane, entry, lost)
                self._arm(lane)

    def used(self, entries: Sequence[Entry]) -> None:
        for lane in self._lanes:
            if lane.tier.writable:
                lost: dict[Entry, str] = {}
                passed = None
                for entry in entries:
                    # The last of a chain decides for all of it: what precedes it is there if it is, or goes with it.
                    if entry.group == passed:
                        continue
                    passed = None if entry.parent is None else entry.group
                    if not self._is_down(lane, entry) and lane.admission.used(entry):
                        self._want(lane, entry, lost)
                self._arm(lane)

    def gone(self, entry: Entry) -> None:
        for lane in self._lanes:
            lane.admission.gone(entry)

    def fate(self, entry: Entry) -> Fate:
        """Of a block that memory gives up now, for room."""
        if any(lane.tier.has(entry.space.name, entry.group, entry.hash) for lane in self._lanes):
            return Fate.BELOW
        return Fate.WAITED if any(entry in lane.queue for lane in self._lanes) else Fate.EVICTED

    # -- inside -------------------------------------------------------------------------------------------------

    def _is_down(self, lane: _Lane, entry: Entry) -> bool:
        """In the tier, or on its way."""
        return entry in lane.queue or entry in lane.flying or lane.tier.has(entry.space.name, entry.group, entry.hash)

    def _want(self, lane: _Lane, entry: Entry, lost: dict[Entry, str]) -> None:
        """Queue it, and first what precedes it and is not there. ``lost``: what could not be, of the same request, and
        why; so a long chain is walked once, not once for each of its blocks."""
        path, above = [entry], entry.parent
        while above is not None and above not in lost and not self._is_down(lane, above):
            path.append(above)
            above = above.parent
        first, counts = path[-1], lane.counts
        reason = lost.get(above, "")
        if above is None and first.parent_hash is not None:
            if not lane.tier.has(first.space.name, first.group, first.parent_hash):
                reason = "dropped_parent"
        now = self._clock()
        while path and not reason:
            each = path[-1]
            if each.state is not READY:  # being written; the next use of the chain asks again
                reason = "dropped_parent"
            elif counts.queued_bytes + each.size * PAGE > self._queue_bytes:
                reason = "dropped_full"
            else:
                lane.queue[path.pop()] = now
                counts.admitted += 1
                counts.queued_blocks += 1
                counts.queued_bytes += each.size * PAGE
        if path:
            lost.update(dict.fromkeys(path, reason))
            setattr(counts, reason, getattr(counts, reason) + len(path))

    def _arm(self, lane: _Lane) -> None:
        """See to it that a batch begins when it is time. Never at once: the index may be in the midst of something."""
        if lane.flying or not lane.queue or not lane.tier.writable:
            return
        full = len(lane.queue) >= BATCH_BLOCKS or lane.counts.queued_bytes >= self._batch_bytes
        due = next(iter(lane.queue.values()))
        due += YIELD_SECONDS if lane.tier.reading else 0.0 if full else LINGER_SECONDS
        if lane.timer is not None:
            if lane.due <= due:
                return
            lane.timer.cancel()
        lane.due = due
        lane.timer = self._reactor.call_later(max(0.0, due - self._clock()), lambda: self._begin(lane))

    def _begin(self, lane: _Lane) -> None:
        lane.timer = None
        if lane.flying or not lane.tier.writable:
            return
        if lane.tier.reading and self._clock() < next(iter(lane.queue.values()), math.inf) + YIELD_SECONDS:
            self._arm(lane)
            return
        entries = self._next_batch(lane)
        if entries:
            self._write(lane, entries)

    def _write(self, lane: _Lane, entries: list[Entry]) -> None:
        names = [(entry.space.name, entry.group, entry.hash) for entry in entries]
        lease, slots = self._index.hold(self._client, names, forever=True)
        lane.flying.update(entries)
        blocks = [_block(entry, slot) for entry, slot in zip(entries, slots, strict=True)]

        def over(kept: list[bool]) -> None:
            self._index.release(self._client, lease)
            lane.flying.clear()
            lane.counts.written += sum(kept)
            lane.counts.failed += len(kept) - sum(kept)
            self._arm(lane)

        lane.tier.write(blocks, over)

    def _next_batch(self, lane: _Lane) -> list[Entry]:
        entries: list[Entry] = []
        nbytes, counts = 0, lane.counts
        while lane.queue and len(entries) < BATCH_BLOCKS:
            entry = next(iter(lane.queue))
            size = entry.size * PAGE
            if entries and nbytes + size > self._batch_bytes:
                break
            del lane.queue[entry]
            counts.queued_blocks -= 1
            counts.queued_bytes -= size
            if entry.state is READY:
                entries.append(entry)
                nbytes += size
            else:
                counts.dropped_evicted += 1
        return entries


def _block(entry: Entry, slot: int) -> Block:
    return Block(
        entry.space.name,
        entry.group,
        entry.hash,
        entry.parent_hash or ZERO,
        entry.tenant,
        slot,
        entry.size,
        entry.depth,
    )
