"""A recorded trace through an engine's cache, the store's memory and its disk: what would be found where.

Each request looks its chain up in memory, brings up what the disk has of the rest, and stores what neither has. Index,
policies, disk tier and demotion are the store's own; the mover answers at once, so that nothing is missed for want of
speed. A slot holds one block of the trace. The engine's cache, if there is one, is an LRU of blocks before all that.
"""

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable

from vllm_kvtier.plan.trace import TOKENS, Requests
from vllm_kvtier.store.entries import Shape
from vllm_kvtier.store.extents import SlotPool
from vllm_kvtier.store.index import HASH, Index
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.admission import Admission, admission
from vllm_kvtier.store.lower.base import Block, Want
from vllm_kvtier.store.lower.demotion import Demotion
from vllm_kvtier.store.lower.disk.tier import DiskTier
from vllm_kvtier.store.lower.mover import OPENING, READY
from vllm_kvtier.store.messages import GroupShape
from vllm_kvtier.store.policies import DEFAULT_POLICY, POLICIES
from vllm_kvtier.wire.reactor import Timer
from vllm_kvtier.wire.slots import PAGE

SPACE = bytes(HASH)
NEVER = 1 << 60
ENGINE, PROMOTION, DEMOTION = 1, 2, 3
SHAPE = Shape(1, None, 1)


class Time:
    """The trace's clock, and the reactor's part that waits for it."""

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


class AtOnce:
    """A mover whose disk takes no time."""

    def __init__(self, kind, options, pool_fd, pool_bytes, reactor, on_message, on_up, on_down, **seconds):
        self.state, self.reason, self.restarts, self.timeouts = OPENING, "", 0, 0
        self._on_up, self._ids = on_up, itertools.count(1)
        self._soon = reactor.call_soon

    def start(self) -> None:
        self.state = READY
        self._on_up(m.Opened(True))

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
    """Hit rates of an engine's cache, memory and disk of so many blocks each (0: none), and what was written.

    ``made``: what is written to the disk; ``policy``: what it gives up. Requests with negative ids count nowhere: they
    are a scan's.
    """
    clock = Time()
    index = _index(max(1, memory), memory_policy, clock)
    gpu = _index(cache, "lru", clock) if cache else None
    tier = demotion = None
    if disk:
        tier = DiskTier(
            {"size": (disk + 1) * PAGE}, -1, 0, clock, index.shapes, policy=POLICIES[policy], clock=clock,
            make_mover=AtOnce,
        )  # fmt: skip
        demotion = Demotion(index, [tier], DEMOTION, lambda tier: made(), 1 << 40, 1 << 40, clock, clock)
        index.watch = demotion
        tier.start()
    clock.pass_until(0.0)
    asked = cached = hits = below = stored = 0
    begun = time.process_time()
    for when, ids in requests:
        clock.pass_until(max(when, clock.now))
        chain = b"".join((i % (1 << 63) + 1).to_bytes(HASH, "big") for i in ids)
        here = _cached(gpu, chain) if gpu is not None else 0
        if here:
            index.touch(ENGINE, SPACE, chain[: here * HASH])
        found = index.lookup(ENGINE, SPACE, chain, here, NEVER)
        up = promote(index, tier, clock, chain, found.units) if tier is not None and found.units < len(ids) else 0
        stored += _store(index, chain, found.units + up)
        if found.lease:
            index.release(ENGINE, found.lease)
        clock.pass_until(clock.now + 0.1)  # what was stored goes down before the next one comes
        if ids[0] >= 0:
            asked, cached = asked + len(ids), cached + here
            hits, below = hits + found.units - here, below + up
    counts = tier.counts() if tier is not None else None
    return {
        "cache_hits": cached / asked,
        "memory_hits": hits / asked,
        "disk_hits": below / asked,
        "hits": (cached + hits + below) / asked,
        "stored_blocks": stored,
        "written_blocks": counts.written_blocks if counts else 0,
        "read_blocks": counts.read_blocks if counts else 0,
        "us_per_block": 1e6 * (time.process_time() - begun) / asked,
    }


def _index(blocks: int, policy: str, clock: Time) -> Index:
    index = Index(SlotPool(blocks + 1, piece_pages=blocks + 1), POLICIES[policy], clock)
    index.grow(blocks + 1)
    for client in (ENGINE, PROMOTION):
        index.connect(client, TOKENS, [GroupShape(units=1, slot_pages=1)])
    return index


def _cached(gpu: Index, chain: bytes) -> int:
    """Blocks that the engine's own cache has; all of the chain is in it afterwards, as far as there is room."""
    found = gpu.lookup(ENGINE, SPACE, chain, 0, NEVER)
    _store(gpu, chain, found.units)
    if found.lease:
        gpu.release(ENGINE, found.lease)
    return found.units


def _store(index: Index, chain: bytes, start: int) -> int:
    """Stores the chain from block ``start`` on: blocks newly stored."""
    rest, count = chain[start * HASH :], len(chain) // HASH - start
    before = chain[(start - 1) * HASH : start * HASH] if start else bytes(HASH)
    slots = index.reserve(ENGINE, SPACE, b"", [0] * count, rest, (before + rest)[: len(rest)], NEVER)
    written = [slot for slot in slots if slot > 0]
    index.commit(ENGINE, written)
    return len(written)


def promote(index: Index, tier: DiskTier, clock: Time, chain: bytes, start: int) -> int:
    """Brings up what the disk has of the chain from block ``start`` on: number of blocks."""
    found = []
    tier.find(Want(SPACE, TOKENS, [SHAPE], chain, start), found.append)
    find = found[0]
    count = find.units - start
    if not count:
        return 0
    hashes = chain[start * HASH : find.units * HASH]
    before = chain[(start - 1) * HASH : start * HASH] if start else bytes(HASH)
    parents = (before + hashes)[: len(hashes)]
    slots = index.reserve(PROMOTION, SPACE, b"", [0] * count, hashes, parents, NEVER)
    blocks = [
        Block(SPACE, 0, hashes[i * HASH : (i + 1) * HASH], parents[i * HASH : (i + 1) * HASH], b"", slot, 1)
        for i, slot in enumerate(slots)
        if slot > 0
    ]
    good: list[bool] = []
    tier.read(find, blocks, good.extend)
    clock.pass_until(clock.now)
    assert len(good) == len(blocks) and all(good)
    tier.release(find)
    return index.commit(PROMOTION, [block.slot for block in blocks])
