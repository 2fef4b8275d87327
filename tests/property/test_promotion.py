"""What comes up from below: in order, once, for everybody who waits, whatever tiers and requests do meanwhile."""

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_kvtier.store.entries import Shape
from vllm_kvtier.store.extents import SlotPool
from vllm_kvtier.store.index import Index
from vllm_kvtier.store.lower import promotion as module
from vllm_kvtier.store.lower.base import Block, Find, Tier, TierCounts, Want
from vllm_kvtier.store.lower.promotion import Promotion
from vllm_kvtier.store.messages import GroupShape
from vllm_kvtier.store.records import HASH

SPACE = b"S" * HASH
ONE = (GroupShape(1, 1),)
WINDOWED = (GroupShape(1, 1), GroupShape(2, 2, window=4 * 16))
UNIT = 16
EVERYTHING = 1 << 30
ENGINE = 1


def chain_of(name: str, units: int) -> bytes:
    return b"".join(f"{name}{i}".encode().ljust(HASH, b"\0") for i in range(units))


class FakeTier(Tier):
    """Has the first ``units[name]`` of a chain; answers, and is through with reads, when it is told to."""

    def __init__(self, name: str, at_once: bool = True):
        self.name, self.at_once, self.up = name, at_once, True
        self.units: dict[bytes, int] = {}  # by the first hash of a chain
        self.asked: list[tuple[Want, object]] = []
        self.reads: list[tuple[list[Block], object]] = []
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
        find = Find(want, max(want.start, min(want.units, self.units.get(want.chain[:HASH], 0))))
        if find.units > want.start:
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
        return nbytes / 1e6

    def latency(self):
        return 0.0 if self.at_once else 0.02

    def has(self, space, group, block_hash):
        return False

    def write(self, blocks, done):
        raise AssertionError("nothing is written here")

    def discard(self, space, group, block_hash): ...
    def clear(self, space): ...
    def start(self): ...
    def stop(self): ...

    def counts(self):
        return TierCounts(self.name)


@dataclass
class Clock:
    now: float = 0.0
    timers: list = field(default_factory=list)

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
    def __init__(self, *tiers: FakeTier, pages: int = 64, groups=ONE):
        self.clock = Clock()
        self.index = Index(SlotPool(pages + 1, pages + 1), None, lambda: self.clock.now)
        self.index.grow(pages + 1)
        self.groups = groups
        self.index.connect(ENGINE, UNIT, list(groups))
        self.tiers = tiers
        self.promotion = Promotion(self.index, tiers, -1, self.clock.call_later, lambda: self.clock.now)

    def want(self, chain: bytes, start: int = 0, nodes=()) -> Want:
        return Want(SPACE, UNIT, [Shape(g.units, g.window, g.slot_pages) for g in self.groups], chain, start, nodes)

    def ahead(self, chain: bytes, start: int = 0):
        return self.promotion.ahead(self.want(chain, start), EVERYTHING)

    def here(self, chain: bytes) -> int:
        return self.index.inspect(ENGINE, SPACE, chain).units

    def quiet(self) -> bool:
        """Nothing is left of what was begun, but the blocks."""
        stats = self.index.stats()
        return not (stats.leases or stats.reservations or len(self.promotion) or any(t.found for t in self.tiers))


def expected(world: World, ahead) -> tuple[float, float]:
    below = world.promotion.below(ahead)
    return below.seconds, below.asking


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BLOCKS", 4)


def test_a_chain_comes_up_in_order_and_whoever_waits_hears_of_it():
    disk = FakeTier("disk")
    world, chain, heard = World(disk), chain_of("a", 10), []
    disk.units[chain[:HASH]] = 9
    ahead = world.ahead(chain)
    assert (ahead.units, ahead.over) == (9, False) and expected(world, ahead) == (9 * 4096 / 1e6, 0.0)
    world.promotion.wait(ahead, 10.0, lambda: heard.append(world.here(chain)))
    assert [len(blocks) for blocks, _ in disk.reads] == [4, 4]
    disk.finish()
    assert world.here(chain) == 4 and not heard
    assert expected(world, ahead)[0] == pytest.approx(5 * 4096 / 1e6)
    disk.finish()
    disk.finish()
    assert heard == [9] and ahead.over and world.quiet()
    names = [block.hash for block in disk.read_blocks]
    assert names == [chain[i * HASH : (i + 1) * HASH] for i in range(9)]
    assert all(b.parent == a.hash for a, b in pairwise(disk.read_blocks))


def test_nothing_below_is_over_at_once():
    world, chain = World(FakeTier("disk")), chain_of("a", 10)
    assert world.ahead(chain).over and world.quiet()
    assert world.ahead(chain, 10) is None
    world.tiers[0].up = False
    assert world.ahead(chain) is None


def test_each_tier_is_asked_from_where_the_one_before_ended():
    disk, s3 = FakeTier("disk"), FakeTier("object", at_once=False)
    world, chain = World(disk, s3), chain_of("a", 12)
    disk.units[chain[:HASH]], s3.units[chain[:HASH]] = 4, 10
    ahead = world.ahead(chain)
    assert ahead.units == 4 and expected(world, ahead)[1] == 0.02
    disk.finish()
    assert not ahead.over  # it is not known yet whether there is more
    s3.answer()
    assert ahead.units == 10 and s3.reads[0][0][0].unit == 5
    s3.finish()
    s3.finish()
    assert ahead.over and world.here(chain) == 10 and world.quiet()


def test_who_waits_is_told_when_what_was_found_is_here_and_more_is_asked_for():
    disk, s3 = FakeTier("disk"), FakeTier("object", at_once=False)
    world, chain, heard = World(disk, s3), chain_of("a", 8), []
    disk.units[chain[:HASH]], s3.units[chain[:HASH]] = 4, 8
    ahead = world.ahead(chain)
    world.promotion.wait(ahead, 60.0, lambda: heard.append(world.here(chain)))
    disk.finish()
    assert heard == [4] and not ahead.over and expected(world, ahead) == (0.0, 0.02)
    world.promotion.wait(ahead, 60.0, lambda: heard.append(world.here(chain)))
    s3.answer()
    s3.finish()
    assert heard == [4, 8] and ahead.over and world.quiet()


def test_patience_ends_and_the_rest_comes_all_the_same():
    disk = FakeTier("disk")
    world, chain, heard = World(disk), chain_of("a", 8), []
    disk.units[chain[:HASH]] = 8
    ahead = world.ahead(chain)
    world.promotion.wait(ahead, 1.0, lambda: heard.append(world.here(chain)))
    disk.finish()
    world.clock.pass_(2.0)
    assert heard == [4] and not ahead.over
    disk.finish()
    assert world.here(chain) == 8 and heard == [4] and world.quiet()


def test_who_cannot_be_served_in_time_is_told_as_soon_as_that_is_known():
    far = FakeTier("far", at_once=False)
    world, chain, heard = World(far), chain_of("a", 8), []
    far.units[chain[:HASH]] = 8
    ahead = world.ahead(chain)
    for patience in (0.02, 5.0):  # 8 pages take 0.033 s
        world.promotion.wait(ahead, patience, lambda patience=patience: heard.append(patience))
    far.answer()
    assert heard == [0.02] and not ahead.over
    far.finish()
    far.finish()
    assert heard == [0.02, 5.0] and world.quiet()


def test_two_who_want_the_same_share_what_is_read():
    disk = FakeTier("disk")
    world, short, long = World(disk), chain_of("a", 6), chain_of("a", 9)
    disk.units[short[:HASH]] = 9
    first, second = world.ahead(short), world.ahead(long)
    assert first is not second and world.ahead(short) is first
    while disk.reads:
        disk.finish()
    assert first.over and second.over and world.here(long) == 9 and world.quiet()
    assert len(disk.read_blocks) == 9


def test_a_block_that_cannot_be_read_ends_it_there():
    disk = FakeTier("disk")
    world, chain, heard = World(disk), chain_of("a", 12), []
    disk.units[chain[:HASH]] = 12
    ahead = world.ahead(chain)
    world.promotion.wait(ahead, 9.0, lambda: heard.append(world.here(chain)))
    disk.finish(good=lambda block: block.unit != 3)
    disk.finish()
    assert not disk.reads and ahead.over and heard == [2] and world.quiet()
    assert world.promotion.failed_blocks == 1


def test_no_room_ends_it_and_what_came_is_kept():
    disk = FakeTier("disk")
    world, chain = World(disk, pages=6), chain_of("a", 12)
    disk.units[chain[:HASH]] = 12
    ahead = world.ahead(chain)
    while disk.reads:
        disk.finish()
    assert ahead.over and world.here(chain) == 6 and world.promotion.refused_room and world.quiet()


def test_what_came_first_is_there_when_the_last_comes():
    """Others fill the pool while it comes up: leases keep the beginning."""
    disk = FakeTier("disk")
    world, chain, heard = World(disk, pages=16), chain_of("a", 12), []
    disk.units[chain[:HASH]] = 12
    ahead = world.ahead(chain)
    world.promotion.wait(ahead, 9.0, lambda: heard.append(world.here(chain)))
    for name in "bcdefgh":
        if disk.reads:
            disk.finish()
        other = chain_of(name, 4)
        parents = (bytes(HASH) + other)[: len(other)]
        slots = world.index.reserve(ENGINE, SPACE, b"", [0] * 4, other, parents, EVERYTHING)
        world.index.commit(ENGINE, [slot for slot in slots if slot > 0])
    assert heard == [12]


def test_windows_get_only_what_can_be_seen():
    disk = FakeTier("disk")
    world, chain = World(disk, groups=WINDOWED), chain_of("a", 16)
    disk.units[chain[:HASH]] = 16
    ahead = world.ahead(chain)
    while disk.reads:
        disk.finish()
    assert ahead.over and world.here(chain) == 16
    # A window of 4 units ending at unit 16 sees blocks 6 and 7 of two units each.
    assert [b.unit for b in disk.read_blocks if b.group == 1] == [14, 16]


def test_who_left_is_not_told():
    disk = FakeTier("disk")
    world, chain, heard = World(disk), chain_of("a", 4), []
    disk.units[chain[:HASH]] = 4
    waiter = world.promotion.wait(world.ahead(chain), 1.0, lambda: heard.append(1))
    waiter.cancel()
    disk.finish()
    world.clock.pass_(5.0)
    assert not heard and world.here(chain) == 4 and world.quiet()


class Machine(RuleBasedStateMachine):
    """Random requests over a few chains and two tiers, one of which answers late; reads end in any order, or fail."""

    NAMES = "abc"

    def __init__(self):
        super().__init__()
        self.near, self.far = FakeTier("near"), FakeTier("far", at_once=False)
        self.world = World(self.near, self.far, pages=24)
        self.waiting: list[dict] = []

    @rule(name=st.sampled_from(NAMES), units=st.integers(0, 12), tier=st.integers(0, 1))
    def hold(self, name, units, tier):
        (self.near, self.far)[tier].units[chain_of(name, 1)] = units

    @rule(name=st.sampled_from(NAMES), units=st.integers(1, 12), patience=st.sampled_from([0.5, 5.0]))
    def ask(self, name, units, patience):
        chain = chain_of(name, units)
        ahead = self.world.ahead(chain, self.world.here(chain))
        if ahead is not None:
            one = {"until": self.world.clock.now + patience, "heard": 0}

            def hear(one=one):
                one["heard"] += 1

            self.world.promotion.wait(ahead, patience, hear)
            self.waiting.append(one)

    @rule()
    def answer(self):
        self.far.answer()

    @precondition(lambda self: self.near.reads or self.far.reads)
    @rule(pick=st.randoms(use_true_random=False), fails=st.booleans())
    def finish(self, pick, fails):
        tier = pick.choice([tier for tier in (self.near, self.far) if tier.reads])
        bad = pick.randrange(20) if fails else -1
        tier.finish(pick.randrange(len(tier.reads)), lambda block: block.unit != bad)

    @rule(name=st.sampled_from("xyz"), units=st.integers(1, 8))
    def others_store(self, name, units):
        chain = chain_of(name, units)
        parents = (bytes(HASH) + chain)[: len(chain)]
        slots = self.world.index.reserve(ENGINE, SPACE, b"", [0] * units, chain, parents, EVERYTHING)
        self.world.index.commit(ENGINE, [slot for slot in slots if slot > 0])

    @rule(pick=st.integers(0, 3))
    def clear(self, pick):
        if not pick:
            self.world.index.clear(None)

    @rule(tier=st.integers(0, 1), up=st.booleans())
    def goes_or_comes(self, tier, up):
        (self.near, self.far)[tier].up = up

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
        assert self.world.quiet() and not any(self.world.promotion._left_bytes.values())


TestRandomly = Machine.TestCase
TestRandomly.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
