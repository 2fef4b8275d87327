"""Replay a recorded trace through an engine's cache, the store's memory and its disk, to estimate hit rates.

Each request looks its block hashes up in memory, promotes what the disk has of the rest, and stores the others. Index,
policies, disk tier and demotion are those of the store. The tier process answers at once, so that no hit is lost to a
slow disk. A slot holds one block of the trace. The engine's cache, if any, is an LRU of blocks in front.
"""

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable

from vllm_kvtier.plan.trace import TOKENS, Requests
from vllm_kvtier.store.eviction import DEFAULT_POLICY, POLICIES
from vllm_kvtier.store.index.index import HASH_BYTES, Index
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.store.protocol import GroupShape
from vllm_kvtier.store.tiers.admission import Admission, admission
from vllm_kvtier.store.tiers.base import Block, Want
from vllm_kvtier.store.tiers.demotion import Demotion, DemotionLimits
from vllm_kvtier.store.tiers.disk.tier import DiskTier
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.tier_process import OPENING, READY, TierContext
from vllm_kvtier.wire.reactor import Timer
from vllm_kvtier.wire.slots import PAGE

NAMESPACE_ID = bytes(HASH_BYTES)
NO_LIMIT = 1 << 60
ENGINE, PROMOTION, DEMOTION = 1, 2, 3
SHAPE = GroupShape(1, 1)


class Time:
    """The trace's clock, and the reactor's timers on it."""

    def __init__(self):
        self.now = 0.0
        self._soon: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self.now + delay, callback)
        heapq.heappush(self._timers, (timer.when, next(self._order), timer))
        return timer

    def pass_until(self, until: float) -> None:
        while self._soon or (self._timers and self._timers[0][0] <= until):
            while self._soon:
                self._soon.popleft()()
            if self._timers and self._timers[0][0] <= until:
                timer = heapq.heappop(self._timers)[2]
                if timer.callback is not None:
                    self.now = max(self.now, timer.when)
                    timer.callback()
        self.now = until


class InstantTierProcess:
    """A tier process whose disk takes no time."""

    def __init__(self, kind, options, context, user, open_seconds, backoff=None):
        self.state, self.reason, self.restarts, self.timeouts = OPENING, "", 0, 0
        self._user, self._ids, self._soon = user, itertools.count(1), context.reactor.call_soon

    def start(self) -> None:
        self.state = READY
        self._user.process_up(m.Opened(True))

    def next_id(self) -> int:
        return next(self._ids)

    def send(self, message) -> bool:
        return True

    def request(self, message, seconds, on_reply) -> None:
        self._soon(lambda: on_reply(m.Moved(message.id, [True] * len(message.moves))))


def replay(
    requests: Requests,
    memory: int,
    disk: int = 0,
    made: Callable[[], Admission] = lambda: admission("reuse"),
    policy: str = DEFAULT_POLICY,
    cache: int = 0,
    memory_policy: str = DEFAULT_POLICY,
) -> dict:
    """Hit rates with ``cache``, ``memory`` and ``disk`` blocks in each tier (0: no tier), and the blocks written.

    ``made``: makes the disk's admission; ``policy``: its eviction policy. Requests with negative ids, which a scan
    makes, are not counted.
    """
    clock = Time()
    index = _index(max(1, memory), memory_policy, clock)
    gpu = _index(cache, "lru", clock) if cache else None
    tier = demotion = None
    if disk:
        context = TierContext(-1, 0, clock, clock, make_process=InstantTierProcess)
        tier = DiskTier(context, {"size": (disk + 1) * PAGE}, index.shapes, POLICIES[policy])
        demotion = Demotion(index, {tier: made()}, DEMOTION, DemotionLimits(1 << 40), clock, clock)
        index.watches.append(demotion)
        tier.start()
    clock.pass_until(0.0)
    total = cached = hits = disk_hits = stored = 0
    begun = time.process_time()
    for when, ids in requests:
        clock.pass_until(max(when, clock.now))
        block_hashes = b"".join((i % (1 << 63) + 1).to_bytes(HASH_BYTES, "big") for i in ids)
        here = _cached(gpu, block_hashes) if gpu is not None else 0
        if here:
            index.touch(ENGINE, NAMESPACE_ID, block_hashes[: here * HASH_BYTES])
        found = index.lookup(ENGINE, NAMESPACE_ID, block_hashes, here, NO_LIMIT)
        promoted = 0
        if tier is not None and found.num_hash_blocks < len(ids):
            promoted = promote(index, tier, clock, block_hashes, found.num_hash_blocks)
        stored += _store(index, block_hashes, found.num_hash_blocks + promoted)
        if found.lease:
            index.release(ENGINE, found.lease)
        clock.pass_until(clock.now + 0.1)  # demotion ends before the next request
        if ids[0] >= 0:
            total, cached = total + len(ids), cached + here
            hits, disk_hits = hits + found.num_hash_blocks - here, disk_hits + promoted
    counts, seconds = tier.counts() if tier is not None else None, time.process_time() - begun
    for each in (index, gpu, tier):
        if each is not None:
            each.clear(None)  # the garbage collector does not see blocks
    return {
        "cache_hits": cached / total,
        "memory_hits": hits / total,
        "disk_hits": disk_hits / total,
        "hits": (cached + hits + disk_hits) / total,
        "stored_blocks": stored,
        "written_blocks": counts.written_blocks if counts else 0,
        "read_blocks": counts.read_blocks if counts else 0,
        "us_per_block": 1e6 * seconds / total,
    }


def _index(blocks: int, policy: str, clock: Time) -> Index:
    index = Index(SlotPool(blocks + 1, piece_pages=blocks + 1), POLICIES[policy], clock)
    index.grow(blocks + 1)
    for client in (ENGINE, PROMOTION):
        index.connect(client, TOKENS, [GroupShape(hash_blocks_per_block=1, slot_pages=1)])
    return index


def _cached(gpu: Index, block_hashes: bytes) -> int:
    """Blocks that the engine's cache has. Enters all blocks of the prompt afterwards, as far as they fit."""
    found = gpu.lookup(ENGINE, NAMESPACE_ID, block_hashes, 0, NO_LIMIT)
    _store(gpu, block_hashes, found.num_hash_blocks)
    if found.lease:
        gpu.release(ENGINE, found.lease)
    return found.num_hash_blocks


def _store(index: Index, block_hashes: bytes, start: int) -> int:
    """Store the blocks from ``start``; returns the number of new ones."""
    rest, count = block_hashes[start * HASH_BYTES :], len(block_hashes) // HASH_BYTES - start
    before = block_hashes[(start - 1) * HASH_BYTES : start * HASH_BYTES] if start else bytes(HASH_BYTES)
    slots = index.reserve(ENGINE, NAMESPACE_ID, b"", [0] * count, rest, (before + rest)[: len(rest)], NO_LIMIT)
    written = [slot for slot in slots if slot > 0]
    index.commit(ENGINE, written)
    return len(written)


def promote(index: Index, tier: DiskTier, clock: Time, block_hashes: bytes, start: int) -> int:
    """Promote the blocks that the disk has from ``start``; returns their number."""
    found = []
    tier.find(Want(NAMESPACE_ID, TOKENS, [SHAPE], block_hashes, start), found.append)
    find = found[0]
    count = find.num_hash_blocks - start
    if not count:
        return 0
    hashes = block_hashes[start * HASH_BYTES : find.num_hash_blocks * HASH_BYTES]
    before = block_hashes[(start - 1) * HASH_BYTES : start * HASH_BYTES] if start else bytes(HASH_BYTES)
    parents = (before + hashes)[: len(hashes)]
    slots = index.reserve(PROMOTION, NAMESPACE_ID, b"", [0] * count, hashes, parents, NO_LIMIT)
    blocks = [
        Block(
            NAMESPACE_ID,
            0,
            hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES],
            parents[i * HASH_BYTES : (i + 1) * HASH_BYTES],
            b"",
            slot,
            1,
        )
        for i, slot in enumerate(slots)
        if slot > 0
    ]
    good: list[bool] = []
    tier.read(find, blocks, good.extend)
    clock.pass_until(clock.now)
    assert len(good) == len(blocks) and all(good)
    tier.release(find)
    return index.commit(PROMOTION, [block.slot for block in blocks])
