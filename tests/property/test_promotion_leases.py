"""What another node asks for is promoted from this node's own tiers: within its time limit, never by way of other
nodes."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from test_promotion import (  # noqa: F401
    ENGINE,
    HASH_BLOCK_SIZE,
    NAMESPACE_ID,
    ONE,
    FakeTier,
    World,
    block_hashes_of,
    expected,
    small_chunks,
)

from vllm_kvtier.store.index.types import HASH_BYTES
from vllm_kvtier.store.protocol import GroupShape
from vllm_kvtier.store.tiers.nodes.lease_table import MAX_SHAPES, NodeLeaseTable
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.tier_stack import LEASES, TierStack

ASKER = 7


class Lender:
    """A store with these tiers (one stands for other nodes), and what it answers to those."""

    def __init__(self, *tiers: FakeTier, shared=None, pages: int = 64):
        self.nodes = FakeTier("nodes", at_once=False)
        self.world = World(*tiers, self.nodes, pages=pages)
        self.index, self.clock = self.world.index, self.world.clock
        self.lending = NodeLeaseTable(self.index, LEASES, shared=shared or {}, clock=lambda: self.clock.now)
        self.lending.secondary_tiers = TierStack(self.index, [*tiers, self.nodes], None, self.world.promotion)
        self.answers: list[m.LeaseReply | m.PromotionStatus] = []
        self._ids = 0

    def lend(self, block_hashes: bytes, wait_seconds=0.0, start=0, asker=ASKER, groups=ONE, shared=()) -> int:
        self._ids += 1
        ask = m.LeaseRequest(
            self._ids,
            asker,
            "them",
            HASH_BLOCK_SIZE,
            list(groups),
            NAMESPACE_ID,
            block_hashes,
            start,
            wait_seconds,
            list(shared),
        )
        self.lending.handle(ask, self.answers.append)
        return self._ids

    def lent(self) -> list[tuple[int, int, int]]:
        """(id, units, below) of what was answered so far."""
        return [(a.id, a.num_hash_blocks, a.promotable) for a in self.answers if isinstance(a, m.LeaseReply)]

    def coming(self) -> list[tuple[int, float]]:
        return [(a.num_hash_blocks, a.seconds) for a in self.answers if isinstance(a, m.PromotionStatus)]

    def give_back(self) -> None:
        for answer in self.answers:
            if isinstance(answer, m.LeaseReply) and answer.lease:
                self.lending.handle(m.Return(ASKER, answer.lease), None)


def store(world: World, block_hashes: bytes, client: int = ENGINE) -> None:
    parents = (bytes(HASH_BYTES) + block_hashes)[: len(block_hashes)]
    slots = world.index.reserve(
        client, NAMESPACE_ID, b"", [0] * (len(block_hashes) // HASH_BYTES), block_hashes, parents, 1 << 30
    )
    world.index.commit(client, slots)


def test_lookup_without_promotion_timeout_reports_length_and_promotes_nothing():
    disk = FakeTier("disk")
    lender, block_hashes = Lender(disk), block_hashes_of("a", 10)
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 8
    store(lender.world, block_hashes[: 3 * HASH_BYTES])
    lender.lend(block_hashes)
    lender.lend(block_hashes_of("b", 4))
    assert lender.lent() == [(1, 3, 8), (2, 0, 0)]
    assert not disk.reads and not disk.found and not lender.nodes.asked
    lender.give_back()
    assert lender.world.quiet()


def test_lookup_with_promotion_timeout_gets_promoted_blocks_in_one_lease():
    disk = FakeTier("disk")
    lender, block_hashes = Lender(disk), block_hashes_of("a", 10)
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 8
    store(lender.world, block_hashes[: 3 * HASH_BYTES])
    lender.lend(block_hashes, wait_seconds=10.0)
    assert lender.coming() == [(8, pytest.approx(5 * 4096 / 1e6))] and not lender.lent()
    while disk.reads:
        disk.finish()
    assert lender.lent() == [(1, 8, 0)] and lender.lending.promotions == 1
    assert all(lender.answers[-1].slots[0]) and len(lender.answers[-1].slots[0]) == 8
    assert lender.index.stats().leases == 1 and not lender.nodes.asked
    lender.give_back()
    assert lender.world.quiet()


def test_promotion_timeout_leases_blocks_promoted_so_far():
    disk = FakeTier("disk")
    lender, block_hashes = Lender(disk), block_hashes_of("a", 10)
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 10
    lender.lend(block_hashes, wait_seconds=2.0)
    disk.finish()
    lender.clock.pass_(2.5)
    assert lender.lent() == [(1, 4, 0)]
    while disk.reads:
        disk.finish()
    lender.lend(block_hashes)  # the rest came nevertheless
    assert lender.lent()[-1] == (2, 10, 0)
    lender.give_back()
    assert lender.world.quiet()


def test_promotion_slower_than_timeout_waits_whole_timeout():
    """What is there by then is of use; the answer does not say at once that it is not all."""
    disk = FakeTier("disk")
    disk.seconds = lambda nbytes: 100.0
    lender, block_hashes = Lender(disk), block_hashes_of("a", 8)
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 8
    lender.lend(block_hashes, wait_seconds=3.0)
    assert lender.coming() == [(8, 100.0)]
    disk.finish()
    assert not lender.lent()
    lender.clock.pass_(3.0)
    assert lender.lent() == [(1, 4, 0)]


@pytest.mark.parametrize("name", ["object", "mooncake"])
def test_lookup_queries_shared_tier_unless_client_reads_it_itself(name):
    objects = FakeTier(name, at_once=False)
    lender, block_hashes = Lender(objects, shared={"another": "x", name: "ours"}), block_hashes_of("a", 6)
    objects.num_hash_blocks[block_hashes[:HASH_BYTES]] = 6
    lender.lend(block_hashes, shared=["y", "ours"])
    lender.lend(block_hashes, wait_seconds=5.0, shared=["y", "ours"])
    assert lender.lent() == [(1, 0, 0), (2, 0, 0)] and not objects.asked
    lender.lend(block_hashes, shared=["theirs"])
    assert lender.lent()[-1] == (3, 0, 6) and not objects.asked  # perhaps: only asking would tell
    lender.lend(block_hashes, wait_seconds=5.0, shared=["theirs"])
    assert lender.coming() == [(0, 0.02)]
    objects.answer()
    objects.finish()
    objects.finish()
    assert lender.lent()[-1] == (4, 6, 0) and not lender.nodes.asked
    lender.give_back()
    assert lender.world.quiet()


def test_lookup_promotes_from_disk_then_object_tier():
    disk, objects = FakeTier("disk"), FakeTier("object", at_once=False)
    lender, block_hashes = Lender(disk, objects), block_hashes_of("a", 6)
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]], objects.num_hash_blocks[block_hashes[:HASH_BYTES]] = 3, 6
    lender.lend(block_hashes, wait_seconds=5.0)
    disk.finish()
    assert not lender.lent()  # the beginning is here, and perhaps there is more
    objects.answer()
    objects.finish()
    assert lender.lent() == [(1, 6, 0)]
    assert [num_hash_blocks for num_hash_blocks, _ in lender.coming()][0] == 3


def test_lookup_shares_promotion_with_local_engine():
    disk = FakeTier("disk")
    lender, block_hashes = Lender(disk), block_hashes_of("a", 8)
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 4
    lender.nodes.num_hash_blocks[block_hashes[:HASH_BYTES]] = 8
    ahead = lender.world.ahead(block_hashes)  # for an engine of ours: the disk, then other nodes
    lender.lend(block_hashes, wait_seconds=5.0)
    disk.finish()
    assert lender.lent() == [(1, 4, 0)] and len(lender.nodes.asked) == 1 and not ahead.over
    lender.nodes.answer()
    lender.nodes.finish()
    assert ahead.over and lender.world.here(block_hashes) == 8


def test_remote_client_that_left_gets_no_answer_and_leaks_nothing():
    disk = FakeTier("disk")
    lender, block_hashes = Lender(disk), block_hashes_of("a", 8)
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 8
    lender.lend(block_hashes, wait_seconds=5.0)
    lender.lend(block_hashes, wait_seconds=5.0, asker=8)
    lender.lending.handle(m.Left(ASKER), None)
    while disk.reads:
        disk.finish()
    assert [id for id, _, _ in lender.lent()] == [2]
    lender.lending.end()
    lender.clock.pass_(10.0)
    assert lender.world.quiet() and len(lender.lent()) == 1


def test_lookup_with_many_group_shapes_is_always_answered():
    """Or it would take the connection for dead."""
    disk = FakeTier("disk")
    lender, block_hashes = Lender(disk), block_hashes_of("a", 4)
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 4
    lender.lend(block_hashes, wait_seconds=5.0)
    for pages in range(2, MAX_SHAPES + 2):
        lender.lend(block_hashes_of("b", 4), groups=(GroupShape(1, pages),))
    assert (1, 0, 0) in lender.lent()
    while disk.reads:
        disk.finish()
    lender.clock.pass_(10.0)
    assert sorted(id for id, _, _ in lender.lent()) == list(range(1, MAX_SHAPES + 2))


def test_lookup_waiting_during_namespace_change_gets_empty_answer():
    objects = FakeTier("object", at_once=False)
    disk = FakeTier("disk")
    lender, block_hashes = Lender(disk, objects), block_hashes_of("a", 4)
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]] = 2
    lender.index.connect(2, HASH_BLOCK_SIZE, [GroupShape(1, 3)])
    lender.lend(block_hashes, wait_seconds=5.0)
    lender.index.clear(None)
    store(lender.world, block_hashes_of("b", 2), client=2)
    disk.finish()
    objects.answer()
    lender.clock.pass_(6.0)
    assert lender.lent() == [(1, 0, 0)]


# -- status messages before the answer --------------------------------------------------------------


def test_lookup_reports_promotion_on_another_node():
    nodes, objects = FakeTier("nodes", at_once=False), FakeTier("object", at_once=False)
    world, block_hashes, heard = World(nodes, objects), block_hashes_of("a", 10), []
    nodes.num_hash_blocks[block_hashes[:HASH_BYTES]] = 10
    ahead = world.ahead(block_hashes)
    assert world.promotion.expected(ahead).num_hash_blocks == 0 and expected(world, ahead) == (0.0, 0.02)
    for wait_seconds in (0.3, 5.0):
        world.promotion.wait(ahead, wait_seconds, lambda wait_seconds=wait_seconds: heard.append(wait_seconds))
    want = nodes.asked[0][0]
    nodes.on_promotion_status(want, 8, 1.0)
    assert heard == [0.3]  # it would come too late for him
    below = world.promotion.expected(ahead)
    assert (below.num_hash_blocks, below.asking) == (8, 1.0) and below.seconds == pytest.approx(1.0 + 8 * 4096 / 1e6)
    world.clock.pass_(0.5)
    nodes.on_promotion_status(want, 10, 0.1)
    assert expected(world, ahead) == (pytest.approx(0.1 + 10 * 4096 / 1e6), 0.0)  # that is all there can be
    nodes.answer()
    while nodes.reads:
        nodes.finish()
    assert heard == [0.3, 5.0] and world.quiet()
    nodes.on_promotion_status(want, 10, 1.0)  # late: no lookup waits any more
    assert len(heard) == 2


def test_promotion_late_tier_answer_is_used():
    nodes = FakeTier("nodes", at_once=False)
    world, block_hashes = World(nodes), block_hashes_of("a", 10)
    ahead = world.ahead(block_hashes)
    nodes.on_promotion_status(nodes.asked[0][0], 5, 1.0)
    world.clock.pass_(3.0)
    assert world.promotion.expected(ahead).num_hash_blocks == 5 and expected(world, ahead)[1] == 0.02
    nodes.answer()  # nothing came of it
    assert ahead.over and ahead.num_hash_blocks == 0 and world.quiet()


def test_promotion_blocks_in_memory_are_leased_first():
    disk, nodes = FakeTier("disk"), FakeTier("nodes", at_once=False)
    world, block_hashes, heard = World(disk, nodes), block_hashes_of("a", 10), []
    disk.num_hash_blocks[block_hashes[:HASH_BYTES]], nodes.num_hash_blocks[block_hashes[:HASH_BYTES]] = 4, 10
    ahead = world.ahead(block_hashes)
    world.promotion.wait(ahead, 0.5, lambda: heard.append(world.here(block_hashes)))
    nodes.on_promotion_status(nodes.asked[0][0], 10, 2.0)
    below = world.promotion.expected(ahead)
    assert not heard and (below.num_hash_blocks, below.seconds, below.asking) == (4, pytest.approx(4 * 4096 / 1e6), 2.0)
    disk.finish()
    assert heard == [4] and world.promotion.expected(ahead).num_hash_blocks == 10
    nodes.answer()
    while nodes.reads:
        nodes.finish()
    assert world.quiet()


class Machine(RuleBasedStateMachine):
    """Random asks of two nodes over a disk and objects whose answers and reads end in any order, or fail."""

    NAMES = "abc"

    def __init__(self):
        super().__init__()
        self.disk, self.objects = FakeTier("disk"), FakeTier("object", at_once=False)
        self.lender = Lender(self.disk, self.objects, pages=24)
        self.until: dict[int, tuple[float, int]] = {}  # of each ask that has no answer yet: (when, asker)
        self.answered: set[int] = set()

    @rule(name=st.sampled_from(NAMES), num_hash_blocks=st.integers(0, 12), disk=st.booleans())
    def hold(self, name, num_hash_blocks, disk):
        (self.disk if disk else self.objects).num_hash_blocks[block_hashes_of(name, 1)] = num_hash_blocks

    @rule(
        name=st.sampled_from(NAMES),
        num_hash_blocks=st.integers(1, 12),
        wait_seconds=st.sampled_from([0.0, 0.5, 5.0]),
        asker=st.integers(1, 2),
    )
    def ask(self, name, num_hash_blocks, wait_seconds, asker):
        id = self.lender.lend(block_hashes_of(name, num_hash_blocks), wait_seconds, asker=asker)
        self.until[id] = self.lender.clock.now + wait_seconds, asker

    @rule(pick=st.randoms(use_true_random=False), fails=st.booleans())
    def finish(self, pick, fails):
        self.objects.answer()
        busy = [tier for tier in (self.disk, self.objects) if tier.reads]
        if busy:
            tier, bad = pick.choice(busy), pick.randrange(20) if fails else -1
            tier.finish(pick.randrange(len(tier.reads)), lambda block: block.end_hash_block != bad)

    @rule()
    def give_back(self):
        for answer in self.lender.answers:
            if isinstance(answer, m.LeaseReply):
                for asker in (1, 2):
                    self.lender.lending.handle(m.Return(asker, answer.lease), None)

    @rule(asker=st.integers(1, 2))
    def leaves(self, asker):
        self.lender.lending.handle(m.Left(asker), None)
        for id in [id for id, (_, of) in self.until.items() if of == asker and id not in self.answers()]:
            del self.until[id]
            self.answered.add(id)  # no tier may answer it any more

    @rule(name=st.sampled_from("xyz"), num_hash_blocks=st.integers(1, 8))
    def others_store(self, name, num_hash_blocks):
        block_hashes = block_hashes_of(name, num_hash_blocks)
        parents = (bytes(HASH_BYTES) + block_hashes)[: len(block_hashes)]
        slots = self.lender.index.reserve(
            ENGINE, NAMESPACE_ID, b"", [0] * num_hash_blocks, block_hashes, parents, 1 << 30
        )
        self.lender.index.commit(ENGINE, [slot for slot in slots if slot > 0])

    @rule()
    def clear(self):
        self.lender.index.clear(None)

    @rule(tier=st.integers(0, 1), up=st.booleans())
    def goes_or_comes(self, tier, up):
        (self.disk, self.objects)[tier].up = up

    @rule(seconds=st.sampled_from([0.1, 0.6, 6.0]))
    def wait(self, seconds):
        self.lender.clock.pass_(seconds)

    def answers(self) -> list[int]:
        return [id for id, _, _ in self.lender.lent()]

    @invariant()
    def answered_once_and_in_time(self):
        answers = self.answers()
        assert len(answers) == len(set(answers)) and not self.answered & set(answers)
        for id in set(answers) & self.until.keys():
            del self.until[id]
        assert all(until > self.lender.clock.now - 1e-9 for until, _ in self.until.values())
        assert not self.lender.nodes.asked

    def teardown(self):
        self.objects.at_once = True
        self.disk.up = self.objects.up = True
        while self.objects.asked or self.disk.reads or self.objects.reads:
            self.objects.answer()
            for tier in (self.disk, self.objects):
                if tier.reads:
                    tier.finish()
        self.lender.clock.pass_(10.0)
        self.answered_once_and_in_time()
        assert not self.until
        self.lender.lending.end()
        assert self.lender.world.quiet()


TestRandomly = Machine.TestCase
TestRandomly.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
