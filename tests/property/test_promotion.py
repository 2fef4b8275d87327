"""Promotions: in order, once, for every waiting request, whatever tiers and requests do meanwhile."""

import math
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_kvtier.store.index.index import Index, IndexLimits
from vllm_kvtier.store.index.types import HASH_BYTES
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.store.protocol import GroupShape
from vllm_kvtier.store.tiers import promotion as module
from vllm_kvtier.store.tiers import promotion_queue
from vllm_kvtier.store.tiers.base import Block, Find, Tier, TierCounts, Want
from vllm_kvtier.store.tiers.promotion import Promotion
from vllm_kvtier.store.tiers.promotion_queue import num_bytes

NAMESPACE_ID = b"S" * HASH_BYTES
ONE = (GroupShape(1, 1),)
WINDOWED = (GroupShape(1, 1), GroupShape(2, 2, window=4 * 16))
HASH_BLOCK_SIZE = 16
EVERYTHING = 1 << 30
ENGINE = 1


def block_hashes_of(name: str, num_hash_blocks: int) -> bytes:
    return b"".join(f"{name}{i}".encode().ljust(HASH_BYTES, b"\0") for i in range(num_hash_blocks))


class FakeTier(Tier):
    """Has the first ``num_hash_blocks[name]`` of a chain; answers, and is through with reads, when it is asked to."""

    def __init__(self, name: str, at_once: bool = True):
        self.name, self.at_once, self.up = name, at_once, True
        self.num_hash_blocks: dict[bytes, int] = {}  # by the first hash of a chain
        self.asked: list[tuple[Want, object]] = []
        self.reads: list[tuple[list[Block], object]] = []
        self.tenants: dict[bytes, bytes] = {}  # by hash
        self.found: set[Find] = set()
        self.read_blocks: list[Block] = []

    usable = property(lambda self: self.up)
    writable = property(lambda self: False)

    def find(self, want, done):
        if self.at_once:
            self._answer(want, done)
        else:
            self.asked.append((want, done))

    def answer(self):
        asked, self.asked = self.asked, []
        for want, done in asked:
            self._answer(want, done)

    def _answer(self, want, done):
        find = Find(
            want,
            max(want.start, min(want.num_hash_blocks, self.num_hash_blocks.get(want.block_hashes[:HASH_BYTES], 0))),
        )
        if find.num_hash_blocks > want.start:
            self.found.add(find)
        done(find)

    def release(self, find):
        self.found.remove(find)

    def read(self, find, blocks, done):
        assert find in self.found
        if self.up:
            self.reads.append((blocks, done))
        else:
            done([False] * len(blocks))

    def finish(self, at: int = 0, good=lambda block: True):
        blocks, done = self.reads.pop(at)
        self.read_blocks += blocks
        done([good(block) for block in blocks])

    def seconds(self, nbytes):
        return (nbytes + sum(num_bytes(blocks) for blocks, _ in self.reads)) / 1e6

    def latency(self):
        return 0.0 if self.at_once else 0.02

    def has(self, namespace_id, group, block_hash):
        return False

    def tenant_of(self, namespace_id, group, block_hash):
        return self.tenants.get(block_hash, b"")

    def write(self, blocks, done):
        raise AssertionError("nothing is written here")

    def discard(self, namespace_id, group, block_hash): ...
    def clear(self, namespace_id): ...
    def start(self): ...
    def stop(self): ...

    def counts(self):
        return TierCounts(self.name)


@dataclass
class Clock:
    now: float = 0.0
    step: float = 0.0  # passes each time that it is read
    timers: list = field(default_factory=list)

    def read(self) -> float:
        self.now += self.step
        return self.now

    def call_later(self, delay, call):
        timer = _Timer(self.now + delay, call)
        self.timers.append(timer)
        return timer

    def pass_(self, seconds: float):
        self.now += seconds
        for timer in [t for t in self.timers if t.when <= self.now]:
            self.timers.remove(timer)
            if timer.call is not None:
                timer.call()


@dataclass
class _Timer:
    when: float
    call: object

    def cancel(self):
        self.call = None


class World:
    def __init__(
        self, *tiers: FakeTier, pages: int = 64, groups=ONE, tenant_share: float = 1.0, in_flight: float = math.inf
    ):
        self.clock = Clock()
        limits = IndexLimits(tenant_share=tenant_share)
        self.index = Index(SlotPool(pages + 1, pages + 1), None, lambda: self.clock.now, limits)
        self.index.grow(pages + 1)
        self.groups = groups
        self.index.connect(ENGINE, HASH_BLOCK_SIZE, list(groups))
        self.tiers = tiers
        self.promotion = Promotion(
            self.index, tiers, -1, self.clock.call_later, self.clock.read, in_flight_bytes=in_flight
        )

    def want(self, block_hashes: bytes, start: int = 0, nodes=()) -> Want:
        return Want(
            NAMESPACE_ID,
            HASH_BLOCK_SIZE,
            self.groups,
            block_hashes,
            start,
            nodes,
        )

    def ahead(self, block_hashes: bytes, start: int = 0):
        return self.promotion.start(self.want(block_hashes, start), EVERYTHING)

    def here(self, block_hashes: bytes) -> int:
        return self.index.inspect(ENGINE, NAMESPACE_ID, block_hashes).num_hash_blocks

    def quiet(self) -> bool:
        """Nothing is left of what was begun, but the blocks."""
        stats = self.index.stats()
        reads = any(q._in_flight or any(read.rest for read in q._reads) for q in self.promotion._queues.values())
        return not (
            stats.leases or stats.reservations or reads or len(self.promotion) or any(t.found for t in self.tiers)
        )


def expected(world: World, ahead) -> tuple[float, float]:
    below = world.promotion.expected(ahead)
    return below.seconds, below.asking


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(promotion_queue, "CHUNK_BYTES", 4 * 4096)


def test_promotion_of_prefix_is_in_order_and_answers_waiting_lookup():
    disk = FakeTier("disk")
    world, block_hashes, heard = World(disk), block_hashes_of("a", 10), []
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 9
    ahead = world.ahead(block_hashes)
    assert (ahead.num_hash_blocks, ahead.over) == (9, False) and expected(world, ahead) == (9 * 4096 / 1e6, 0.0)
    world.promotion.wait(ahead, 10.0, lambda: heard.append(world.here(block_hashes)))
    assert [len(blocks) for blocks, _ in disk.reads] == [4, 4]
    disk.finish()
    assert world.here(block_hashes) == 4 and not heard
    assert expected(world, ahead)[0] == pytest.approx(5 * 4096 / 1e6)
    disk.finish()
    disk.finish()
    assert heard == [9] and ahead.over and world.quiet()
    names = [block.hash for block in disk.read_blocks]
    assert names == [block_hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES] for i in range(9)]
    assert all(b.parent == a.hash for a, b in pairwise(disk.read_blocks))


@pytest.mark.parametrize("groups", [ONE, WINDOWED, (GroupShape(1, 1), GroupShape(6, 2))])
def test_promotion_of_what_follows_a_gpus_blocks_needs_nothing_before_it_in_memory(groups):
    """The beginning is in the engine's cache, and memory has evicted it. When it is stored again, the rest is its
    child: eviction takes children first."""
    disk = FakeTier("disk")
    world, block_hashes, start = World(disk, pages=100, groups=groups), block_hashes_of("a", 24), 12
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 24
    ahead = world.ahead(block_hashes, start)
    while disk.reads:
        disk.finish()
    found = world.index.lookup(ENGINE, NAMESPACE_ID, block_hashes, start, EVERYTHING)
    assert ahead.over and found.num_hash_blocks == 24
    world.index.release(ENGINE, found.lease)
    assert world.here(block_hashes) == 0 and world.quiet()
    world.ahead(block_hashes)
    while disk.reads:
        disk.finish()
    assert world.here(block_hashes) == 24 and world.quiet()
    assert len({b.name for b in disk.read_blocks}) == len(disk.read_blocks), "what was in memory is not read again"
    first = world.index.find(NAMESPACE_ID, 0, block_hashes[(start - 1) * HASH_BYTES : start * HASH_BYTES])
    assert not first.evictable and first.first.hash == block_hashes[start * HASH_BYTES : (start + 1) * HASH_BYTES]


def test_promotion_from_the_beginning_does_not_join_that_of_the_end():
    disk = FakeTier("disk")
    world, block_hashes, heard = World(disk), block_hashes_of("a", 12), []
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 12
    late, whole = world.ahead(block_hashes, 8), world.ahead(block_hashes)
    assert world.ahead(block_hashes, 8) is whole, "it has what the other has"
    world.promotion.wait(whole, 9.0, lambda: heard.append(world.here(block_hashes)))
    while disk.reads:
        disk.finish()
    assert heard == [12] and late.over and whole.over and len(disk.read_blocks) == 12 and world.quiet()


def test_promotion_from_second_tier_does_not_wait_for_the_firsts_reservations():
    """The first has more than it reads at a time."""
    disk, objects = FakeTier("disk"), FakeTier("object")
    world, block_hashes = World(disk, objects), block_hashes_of("a", 20)
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]], objects.num_hash_blocks[block_hashes[:HASH_BYTES]] = 12, 20
    ahead = world.ahead(block_hashes)
    while disk.reads or objects.reads:
        (disk if disk.reads else objects).finish()
    assert ahead.over and world.here(block_hashes) == 20 and world.quiet()


def test_promotion_of_a_tenants_blocks_counts_in_its_share_of_memory():
    disk = FakeTier("disk")
    world, block_hashes = World(disk, tenant_share=0.25), block_hashes_of("a", 40)
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 40
    disk.tenants = {block_hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]: b"A" if i >= 6 else b"" for i in range(40)}
    ahead = world.ahead(block_hashes)
    while disk.reads:
        disk.finish()
    assert ahead.over and world.quiet()
    assert world.here(block_hashes) == 6 + 65 // 4, "all of no tenant, and as many as tenant A may have"


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_promotion_beyond_a_tenants_share_stops_only_that_tenants_promotions(share):
    disk = FakeTier("disk")
    world, of_a, of_b, more = World(disk, tenant_share=share), *(block_hashes_of(name, 80) for name in "abc")
    world.clock.step = 0.001  # so long takes each reservation
    tenants = {of_a: b"A", of_b: b"B", more: b"A"}
    for block_hashes, tenant in tenants.items():
        disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 80
        disk.tenants |= {block_hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES]: tenant for i in range(80)}
    lease = 0
    for block_hashes in tenants:
        world.ahead(block_hashes)
        while disk.reads:
            disk.finish()
        lease = lease or world.index.lookup(ENGINE, NAMESPACE_ID, of_a, 0, EVERYTHING).lease  # A's blocks stay
    there = [world.here(block_hashes) for block_hashes in tenants]
    assert there == ([16, 16, 0] if share < 1 else [64, 0, 0])
    world.index.release(ENGINE, lease)
    world.clock.pass_(1.0)
    world.ahead(more)
    while disk.reads:
        disk.finish()
    assert world.here(more) == (16 if share < 1 else 64)


def test_promotions_of_a_hung_tier_end_and_hinder_no_others(monkeypatch):
    """Its process may not be killable; its reads end with it."""
    monkeypatch.setattr(module, "MAX_JOBS", 2)
    disk, s3, heard = FakeTier("disk"), FakeTier("object", at_once=False), []
    world, (a, b, c) = World(disk, s3), (block_hashes_of(name, 4) for name in "abc")
    disk.num_hash_blocks = {a[:HASH_BYTES]: 4, c[:HASH_BYTES]: 4}
    s3.num_hash_blocks = {b[:HASH_BYTES]: 4, c[:HASH_BYTES]: 4}
    hung, late = world.ahead(a), world.ahead(b)
    s3.asked, asked = [], s3.asked  # the disk finds nothing of the second
    for ahead in hung, late:
        world.promotion.wait(ahead, 99.0, lambda ahead=ahead: heard.append(ahead))
    assert world.ahead(c) is None, "as many jobs as there may be"
    disk.up = s3.up = False
    world.promotion.tiers_changed()
    assert heard == [hung, late] and hung.over and late.over and not len(world.promotion)
    parents = (bytes(HASH_BYTES) + a)[: len(a)]
    slots = world.index.reserve(ENGINE, NAMESPACE_ID, b"", [0] * 4, a, parents, EVERYTHING)
    assert not {block.slot for block in disk.reads[0][0]} & set(slots), "the read may still write to its slots"
    assert world.index.commit(ENGINE, slots) == world.here(a) == 4
    s3.up = True
    assert not world.ahead(c).over
    s3.answer()
    s3.finish()
    assert world.here(c) == 4
    disk.finish()
    s3.asked = asked
    s3.answer()
    assert world.here(a) == 4 and world.quiet()


def test_promotion_reads_of_a_tier_hold_bounded_memory():
    disk, far = FakeTier("disk"), FakeTier("far")
    world, order = World(disk, far, pages=200, in_flight=5 * 4096), []
    wanted = [block_hashes_of(name, 10) for name in "abcdef"]
    for block_hashes in wanted:
        disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 10
    far.num_hash_blocks[(other := block_hashes_of("x", 4))[:HASH_BYTES]] = 4
    jobs = [world.ahead(block_hashes) for block_hashes in [*wanted, other]]
    far.finish()  # its reads do not wait for the disk's
    while disk.reads:
        assert world.index.stats().reservations <= 8, "of the limit, and of a chunk beyond"
        order.append(disk.reads[0][0][0].hash[:1])
        disk.finish()
    assert all(job.over for job in jobs) and world.quiet()
    assert [world.here(block_hashes) for block_hashes in wanted] == [10] * 6
    assert b"".join(order).startswith(b"aaabbbcccddd"), "one after the other"


def test_promotion_many_queued_reads_of_lost_blocks_end(monkeypatch):
    """Each ends at once: in as many nested calls there would be no stack left."""
    disk = FakeTier("disk")
    world, jobs = World(disk, pages=1000, in_flight=4096), []
    for number in range(256):
        block_hashes = block_hashes_of(f"{number}-", 4)
        disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 4
        jobs.append(world.ahead(block_hashes))
    assert len(disk.reads) == 1
    monkeypatch.setattr(disk, "read", lambda find, blocks, done: done([False] * len(blocks)))
    disk.finish()
    assert all(job.over for job in jobs) and world.quiet()


def test_promotion_without_blocks_in_tiers_ends_at_once():
    world, block_hashes = World(FakeTier("disk")), block_hashes_of("a", 10)
    assert world.ahead(block_hashes).over and world.quiet()
    assert world.ahead(block_hashes, 10) is None
    world.tiers[0].up = False
    assert world.ahead(block_hashes) is None


def test_promotion_queries_each_tier_from_end_of_previous():
    disk, s3 = FakeTier("disk"), FakeTier("object", at_once=False)
    world, block_hashes = World(disk, s3), block_hashes_of("a", 12)
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]], s3.num_hash_blocks[block_hashes[:HASH_BYTES]] = 4, 10
    ahead = world.ahead(block_hashes)
    assert ahead.num_hash_blocks == 4 and expected(world, ahead)[1] == 0.02
    disk.finish()
    assert not ahead.over  # it is not known yet whether there is more
    s3.answer()
    assert ahead.num_hash_blocks == 10 and s3.reads[0][0][0].end_hash_block == 5
    s3.finish()
    s3.finish()
    assert ahead.over and world.here(block_hashes) == 10 and world.quiet()


def test_promotion_wait_answers_found_blocks_and_extends():
    disk, s3 = FakeTier("disk"), FakeTier("object", at_once=False)
    world, block_hashes, heard = World(disk, s3), block_hashes_of("a", 8), []
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]], s3.num_hash_blocks[block_hashes[:HASH_BYTES]] = 4, 8
    ahead = world.ahead(block_hashes)
    world.promotion.wait(ahead, 60.0, lambda: heard.append(world.here(block_hashes)))
    disk.finish()
    assert heard == [4] and not ahead.over and expected(world, ahead) == (0.0, 0.02)
    world.promotion.wait(ahead, 60.0, lambda: heard.append(world.here(block_hashes)))
    s3.answer()
    s3.finish()
    assert heard == [4, 8] and ahead.over and world.quiet()


def test_promotion_timeout_answers_and_promotion_continues():
    disk = FakeTier("disk")
    world, block_hashes, heard = World(disk), block_hashes_of("a", 8), []
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 8
    ahead = world.ahead(block_hashes)
    world.promotion.wait(ahead, 1.0, lambda: heard.append(world.here(block_hashes)))
    disk.finish()
    world.clock.pass_(2.0)
    assert heard == [4] and not ahead.over
    disk.finish()
    assert world.here(block_hashes) == 8 and heard == [4] and world.quiet()


def test_promotion_wait_that_cannot_succeed_answers_at_once():
    far = FakeTier("far", at_once=False)
    world, block_hashes, heard = World(far), block_hashes_of("a", 8), []
    far.num_hash_blocks[block_hashes[:HASH_BYTES]] = 8
    ahead = world.ahead(block_hashes)
    for wait_seconds in (0.02, 5.0):  # 8 pages take 0.033 s
        world.promotion.wait(ahead, wait_seconds, lambda wait_seconds=wait_seconds: heard.append(wait_seconds))
    far.answer()
    assert heard == [0.02] and not ahead.over
    far.finish()
    far.finish()
    assert heard == [0.02, 5.0] and world.quiet()


def test_promotion_of_same_blocks_is_read_once():
    disk = FakeTier("disk")
    world, short, long = World(disk), block_hashes_of("a", 6), block_hashes_of("a", 9)
    disk.num_hash_blocks[short[:HASH_BYTES]] = 9
    first, second = world.ahead(short), world.ahead(long)
    assert first is not second and world.ahead(short) is first
    while disk.reads:
        disk.finish()
    assert first.over and second.over and world.here(long) == 9 and world.quiet()
    assert len(disk.read_blocks) == 9


def test_promotion_ends_at_unreadable_block():
    disk = FakeTier("disk")
    world, block_hashes, heard = World(disk), block_hashes_of("a", 12), []
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 12
    ahead = world.ahead(block_hashes)
    world.promotion.wait(ahead, 9.0, lambda: heard.append(world.here(block_hashes)))
    disk.finish(good=lambda block: block.end_hash_block != 3)
    disk.finish()
    assert not disk.reads and ahead.over and heard == [2] and world.quiet()
    assert world.promotion.failed_blocks == 1


def test_promotion_without_space_ends_and_keeps_promoted_blocks():
    disk = FakeTier("disk")
    world, block_hashes = World(disk, pages=6), block_hashes_of("a", 12)
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 12
    ahead = world.ahead(block_hashes)
    while disk.reads:
        disk.finish()
    assert ahead.over and world.here(block_hashes) == 6 and world.promotion.refused_room and world.quiet()


def test_promotion_keeps_first_blocks_until_last_arrive():
    """Others fill the pool during the promotion: leases keep the beginning."""
    disk = FakeTier("disk")
    world, block_hashes, heard = World(disk, pages=16), block_hashes_of("a", 12), []
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 12
    ahead = world.ahead(block_hashes)
    world.promotion.wait(ahead, 9.0, lambda: heard.append(world.here(block_hashes)))
    for name in "bcdefgh":
        if disk.reads:
            disk.finish()
        other = block_hashes_of(name, 4)
        parents = (bytes(HASH_BYTES) + other)[: len(other)]
        slots = world.index.reserve(ENGINE, NAMESPACE_ID, b"", [0] * 4, other, parents, EVERYTHING)
        world.index.commit(ENGINE, [slot for slot in slots if slot > 0])
    assert heard == [12]


def test_promotion_of_windowed_group_reads_visible_blocks_only():
    disk = FakeTier("disk")
    world, block_hashes = World(disk, groups=WINDOWED), block_hashes_of("a", 16)
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 16
    ahead = world.ahead(block_hashes)
    while disk.reads:
        disk.finish()
    assert ahead.over and world.here(block_hashes) == 16
    # A window of 4 units ending at unit 16 sees blocks 6 and 7 of two units each.
    assert [b.end_hash_block for b in disk.read_blocks if b.group == 1] == [14, 16]


def test_promotion_after_client_left_answers_nothing():
    disk = FakeTier("disk")
    world, block_hashes, heard = World(disk), block_hashes_of("a", 4), []
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 4
    waiter = world.promotion.wait(world.ahead(block_hashes), 1.0, lambda: heard.append(1))
    waiter.cancel()
    disk.finish()
    world.clock.pass_(5.0)
    assert not heard and world.here(block_hashes) == 4 and world.quiet()


class Machine(RuleBasedStateMachine):
    """Random requests over a few chains and two tiers, where one answers late; reads end in any order, or fail."""

    NAMES = "abc"

    def __init__(self):
        super().__init__()
        self.near, self.far = FakeTier("near"), FakeTier("far", at_once=False)
        self.world = World(self.near, self.far, pages=24, in_flight=6 * 4096)
        self.waiting: list[dict] = []

    @rule(name=st.sampled_from(NAMES), num_hash_blocks=st.integers(0, 12), tier=st.integers(0, 1))
    def hold(self, name, num_hash_blocks, tier):
        (self.near, self.far)[tier].num_hash_blocks[block_hashes_of(name, 1)] = num_hash_blocks

    @rule(
        name=st.sampled_from(NAMES),
        num_hash_blocks=st.integers(1, 12),
        on_gpu=st.integers(0, 6),
        wait_seconds=st.sampled_from([0.5, 5.0]),
    )
    def ask(self, name, num_hash_blocks, on_gpu, wait_seconds):
        block_hashes = block_hashes_of(name, num_hash_blocks)
        ahead = self.world.ahead(block_hashes, max(min(on_gpu, num_hash_blocks), self.world.here(block_hashes)))
        if ahead is not None:
            one = {"until": self.world.clock.now + wait_seconds, "heard": 0}

            def hear(one=one):
                one["heard"] += 1

            self.world.promotion.wait(ahead, wait_seconds, hear)
            self.waiting.append(one)

    @rule()
    def answer(self):
        self.far.answer()

    @precondition(lambda self: self.near.reads or self.far.reads)
    @rule(pick=st.randoms(use_true_random=False), fails=st.booleans())
    def finish(self, pick, fails):
        tier = pick.choice([tier for tier in (self.near, self.far) if tier.reads])
        bad = pick.randrange(20) if fails else -1
        tier.finish(pick.randrange(len(tier.reads)), lambda block: block.end_hash_block != bad)

    @rule(name=st.sampled_from("xyz"), num_hash_blocks=st.integers(1, 8))
    def others_store(self, name, num_hash_blocks):
        block_hashes = block_hashes_of(name, num_hash_blocks)
        parents = (bytes(HASH_BYTES) + block_hashes)[: len(block_hashes)]
        slots = self.world.index.reserve(
            ENGINE, NAMESPACE_ID, b"", [0] * num_hash_blocks, block_hashes, parents, EVERYTHING
        )
        self.world.index.commit(ENGINE, [slot for slot in slots if slot > 0])

    @rule(pick=st.integers(0, 3))
    def clear(self, pick):
        if not pick:
            self.world.index.clear(None)

    @rule(tier=st.integers(0, 1), up=st.booleans())
    def goes_or_comes(self, tier, up):
        (self.near, self.far)[tier].up = up
        self.world.promotion.tiers_changed()
        if not (self.near.up or self.far.up):
            assert not len(self.world.promotion)

    @rule(seconds=st.sampled_from([0.0, 0.6, 6.0, 200.0]))
    def wait(self, seconds):
        self.world.clock.pass_(seconds)

    @invariant()
    def nobody_waits_too_long(self):
        for one in self.waiting:
            assert one["heard"] <= 1
            assert one["heard"] or one["until"] > self.world.clock.now - 1e-9

    def teardown(self):
        self.near.at_once = self.far.at_once = True
        while self.far.asked or self.near.reads or self.far.reads:
            self.far.answer()
            for tier in (self.near, self.far):
                if tier.reads:
                    tier.finish()
        self.world.clock.pass_(10.0)
        assert all(one["heard"] == 1 for one in self.waiting)
        assert self.world.quiet()


TestRandomly = Machine.TestCase
TestRandomly.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_promotion_of_fast_tier_has_room_beside_a_slow_tiers_queue(monkeypatch):
    """A bucket's queue of prompts that no lookup waits for took all jobs, and an idle disk was not asked any more."""
    monkeypatch.setattr(module, "MAX_JOBS", 4)
    disk, s3 = FakeTier("disk"), FakeTier("object")
    world, queued, waited = World(disk, s3, in_flight=4096), [block_hashes_of(f"{n}-", 8) for n in range(9)], []
    s3.num_hash_blocks = {block_hashes[:HASH_BYTES]: 8 for block_hashes in queued}
    jobs = [world.ahead(block_hashes) for block_hashes in queued[:4]]
    world.promotion.wait(jobs[1], 99.0, lambda: waited.append(jobs[1]))
    jobs += [world.ahead(block_hashes) for block_hashes in queued[4:]]
    # The first is being read, the second is waited for: the others made room.
    assert [job.over for job in jobs] == [False, False, True, True, True, True, True, False, False]
    assert len(s3.found) == len(world.promotion) == 4
    small = block_hashes_of("small", 2)
    disk.num_hash_blocks[small[:HASH_BYTES]] = 2
    assert world.ahead(small) is not None and len(disk.reads) == 1
    disk.finish()
    assert world.here(small) == 2
    while s3.reads:
        s3.finish()
    assert waited == [jobs[1]] and [world.here(block_hashes) for block_hashes in queued] == [8, 8, 0, 0, 0, 0, 0, 0, 8]
    assert world.promotion.refused(s3) == {"jobs": 0, "finds": 0, "dropped": 6} and world.quiet()
    assert world.promotion.refused(disk) == {"jobs": 0, "finds": 0, "dropped": 0}


def test_promotion_dropped_job_leaves_its_blocks_and_others_reads_alone(monkeypatch):
    monkeypatch.setattr(module, "MAX_JOBS", 2)
    disk = FakeTier("disk")
    world, whole, other = World(disk), block_hashes_of("a", 12), block_hashes_of("b", 4)
    for block_hashes in (whole, other):
        disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = len(block_hashes) // HASH_BYTES
    late, first = world.ahead(whole, 8), world.ahead(whole)  # the first waits for the last block's read by the other
    assert world.ahead(other) is None, "all are being read"
    assert world.promotion.refused(disk)["jobs"] == 1
    while disk.reads:
        disk.finish()
    assert late.over and first.over and world.here(whole) == 12 and world.quiet()


def test_promotion_tier_with_many_lookups_is_left_out(monkeypatch):
    """One whose lookups take seconds has half of the jobs."""
    monkeypatch.setattr(module, "MAX_FINDS", 2)
    disk, s3 = FakeTier("disk"), FakeTier("object", at_once=False)
    world, prompts = World(disk, s3), [block_hashes_of(f"{n}-", 4) for n in range(3)]
    disk.num_hash_blocks = {prompts[2][:HASH_BYTES]: 2}
    s3.num_hash_blocks = {block_hashes[:HASH_BYTES]: 4 for block_hashes in prompts}
    asking = [world.ahead(block_hashes) for block_hashes in prompts]
    assert [job.asking for job in asking] == [s3, s3, None] and world.promotion.refused(s3)["finds"] == 1
    disk.finish()
    assert asking[2].over and world.here(prompts[2]) == 2
    s3.answer(), s3.answer()
    while s3.reads:
        s3.finish()
    assert not world.ahead(prompts[2]).over, "it is asked again"
    s3.answer()
    while s3.reads:
        s3.finish()
    assert [world.here(block_hashes) for block_hashes in prompts] == [4] * 3 and world.quiet()


@pytest.mark.parametrize("seed", range(20))
def test_promotion_jobs_that_make_room_leak_nothing(seed, monkeypatch):
    """Prompts with common beginnings on two tiers; each wait ends once, and each find is released once."""
    monkeypatch.setattr(module, "MAX_JOBS", 4)
    monkeypatch.setattr(module, "MAX_FINDS", 2)
    chance = Random(seed)
    disk, s3 = FakeTier("disk"), FakeTier("object", at_once=False)
    world, ended, waits = World(disk, s3, pages=200, in_flight=6 * 4096), [], 0
    for number in range(80):
        block_hashes = block_hashes_of(chance.choice("abcdef"), chance.randrange(4, 30))
        disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = chance.randrange(30)
        s3.num_hash_blocks[block_hashes[:HASH_BYTES]] = chance.randrange(30)
        job = world.ahead(block_hashes, chance.randrange(3))
        if job is not None and not job.over and chance.random() < 0.4:
            world.promotion.wait(job, 5.0, lambda number=number: ended.append(number))
            waits += 1
        assert len(world.promotion) <= 4
        for _ in range(chance.randrange(3)):
            if s3.asked and chance.random() < 0.5:
                s3.answer()
            elif tier := next((tier for tier in (disk, s3) if tier.reads), None):
                tier.finish(good=lambda block: chance.random() < 0.95)
    while disk.reads or s3.reads or s3.asked:
        for tier in (disk, s3):
            if tier.reads:
                tier.finish()
        if s3.asked:
            s3.answer()
    assert world.promotion.refused(s3)["dropped"] + world.promotion.refused(disk)["dropped"] > 0
    assert len(ended) == len(set(ended)) == waits and world.quiet() and not world.promotion._finds.total()
