"""What another node asks for comes up from this node's own tiers: within its patience, never by way of other nodes."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from test_promotion import ENGINE, ONE, SPACE, UNIT, FakeTier, World, chain_of, expected, small_chunks  # noqa: F401

from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.nodes.lending import MAX_KINDS, Lending
from vllm_kvtier.store.lower.tiers import LENDING, Lower
from vllm_kvtier.store.messages import GroupShape
from vllm_kvtier.store.records import HASH

ASKER = 7


class Lender:
    """A store with these tiers, one of which stands for other nodes, and what it answers to those."""

    def __init__(self, *tiers: FakeTier, objects: str = "", pages: int = 64):
        self.nodes = FakeTier("nodes", at_once=False)
        self.world = World(*tiers, self.nodes, pages=pages)
        self.index, self.clock = self.world.index, self.world.clock
        self.lending = Lending(self.index, LENDING, objects=objects, clock=lambda: self.clock.now)
        self.lending.below = Lower(self.index, [*tiers, self.nodes], None, self.world.promotion)
        self.answers: list[m.Lent | m.Coming] = []
        self._ids = 0

    def lend(self, chain: bytes, patience=0.0, start=0, asker=ASKER, groups=ONE, objects="") -> int:
        self._ids += 1
        ask = m.Lend(self._ids, asker, "them", UNIT, list(groups), SPACE, chain, start, patience, objects)
        self.lending.handle(ask, self.answers.append)
        return self._ids

    def lent(self) -> list[tuple[int, int, int]]:
        """(id, units, below) of what was answered so far."""
        return [(a.id, a.units, a.below) for a in self.answers if isinstance(a, m.Lent)]

    def coming(self) -> list[tuple[int, float]]:
        return [(a.units, a.seconds) for a in self.answers if isinstance(a, m.Coming)]

    def give_back(self) -> None:
        for answer in self.answers:
            if isinstance(answer, m.Lent) and answer.lease:
                self.lending.handle(m.Return(ASKER, answer.lease), None)


def store(world: World, chain: bytes, client: int = ENGINE) -> None:
    parents = (bytes(HASH) + chain)[: len(chain)]
    slots = world.index.reserve(client, SPACE, b"", [0] * (len(chain) // HASH), chain, parents, 1 << 30)
    world.index.commit(client, slots)


def test_without_patience_it_is_told_how_much_there_might_be_and_nothing_comes_up():
    disk = FakeTier("disk")
    lender, chain = Lender(disk), chain_of("a", 10)
    disk.units[chain[:HASH]] = 8
    store(lender.world, chain[: 3 * HASH])
    lender.lend(chain)
    lender.lend(chain_of("b", 4))
    assert lender.lent() == [(1, 3, 8), (2, 0, 0)]
    assert not disk.reads and not disk.found and not lender.nodes.asked
    lender.give_back()
    assert lender.world.quiet()


def test_with_patience_it_gets_what_came_up_under_one_lease():
    disk = FakeTier("disk")
    lender, chain = Lender(disk), chain_of("a", 10)
    disk.units[chain[:HASH]] = 8
    store(lender.world, chain[: 3 * HASH])
    lender.lend(chain, patience=10.0)
    assert lender.coming() == [(8, pytest.approx(5 * 4096 / 1e6))] and not lender.lent()
    while disk.reads:
        disk.finish()
    assert lender.lent() == [(1, 8, 0)] and lender.lending.brought_up == 1
    assert all(lender.answers[-1].slots[0]) and len(lender.answers[-1].slots[0]) == 8
    assert lender.index.stats().leases == 1 and not lender.nodes.asked
    lender.give_back()
    assert lender.world.quiet()


def test_patience_ends_and_it_gets_what_is_there_by_then():
    disk = FakeTier("disk")
    lender, chain = Lender(disk), chain_of("a", 10)
    disk.units[chain[:HASH]] = 10
    lender.lend(chain, patience=2.0)
    disk.finish()
    lender.clock.pass_(2.5)
    assert lender.lent() == [(1, 4, 0)]
    while disk.reads:
        disk.finish()
    lender.lend(chain)  # the rest came all the same
    assert lender.lent()[-1] == (2, 10, 0)
    lender.give_back()
    assert lender.world.quiet()


def test_a_tier_that_is_slower_than_the_patience_is_waited_for_to_its_end():
    """What is there by then is of use; it is not told at once that it is not all."""
    disk = FakeTier("disk")
    disk.seconds = lambda nbytes: 100.0
    lender, chain = Lender(disk), chain_of("a", 8)
    disk.units[chain[:HASH]] = 8
    lender.lend(chain, patience=3.0)
    assert lender.coming() == [(8, 100.0)]
    disk.finish()
    assert not lender.lent()
    lender.clock.pass_(3.0)
    assert lender.lent() == [(1, 4, 0)]


def test_objects_are_looked_for_unless_the_asker_finds_them_itself():
    objects = FakeTier("object", at_once=False)
    lender, chain = Lender(objects, objects="ours"), chain_of("a", 6)
    objects.units[chain[:HASH]] = 6
    lender.lend(chain, objects="ours")
    lender.lend(chain, patience=5.0, objects="ours")
    assert lender.lent() == [(1, 0, 0), (2, 0, 0)] and not objects.asked
    lender.lend(chain, objects="theirs")
    assert lender.lent()[-1] == (3, 0, 6) and not objects.asked  # perhaps: only asking would tell
    lender.lend(chain, patience=5.0, objects="theirs")
    assert lender.coming() == [(0, 0.02)]
    objects.answer()
    objects.finish()
    objects.finish()
    assert lender.lent()[-1] == (4, 6, 0) and not lender.nodes.asked
    lender.give_back()
    assert lender.world.quiet()


def test_disk_and_then_objects():
    disk, objects = FakeTier("disk"), FakeTier("object", at_once=False)
    lender, chain = Lender(disk, objects), chain_of("a", 6)
    disk.units[chain[:HASH]], objects.units[chain[:HASH]] = 3, 6
    lender.lend(chain, patience=5.0)
    disk.finish()
    assert not lender.lent()  # the beginning is here, and perhaps there is more
    objects.answer()
    objects.finish()
    assert lender.lent() == [(1, 6, 0)]
    assert [units for units, _ in lender.coming()][0] == 3


def test_an_engine_asks_other_nodes_meanwhile_and_what_is_read_is_shared():
    disk = FakeTier("disk")
    lender, chain = Lender(disk), chain_of("a", 8)
    disk.units[chain[:HASH]] = 4
    lender.nodes.units[chain[:HASH]] = 8
    ahead = lender.world.ahead(chain)  # for an engine of ours: the disk, then other nodes
    lender.lend(chain, patience=5.0)
    disk.finish()
    assert lender.lent() == [(1, 4, 0)] and len(lender.nodes.asked) == 1 and not ahead.over
    lender.nodes.answer()
    lender.nodes.finish()
    assert ahead.over and lender.world.here(chain) == 8


def test_who_left_gets_no_answer_and_leaves_nothing():
    disk = FakeTier("disk")
    lender, chain = Lender(disk), chain_of("a", 8)
    disk.units[chain[:HASH]] = 8
    lender.lend(chain, patience=5.0)
    lender.lend(chain, patience=5.0, asker=8)
    lender.lending.handle(m.Left(ASKER), None)
    while disk.reads:
        disk.finish()
    assert [id for id, _, _ in lender.lent()] == [2]
    lender.lending.end()
    lender.clock.pass_(10.0)
    assert lender.world.quiet() and len(lender.lent()) == 1


def test_one_that_asks_about_many_kinds_of_groups_is_answered_each_time():
    """Or it would take the connection for dead."""
    disk = FakeTier("disk")
    lender, chain = Lender(disk), chain_of("a", 4)
    disk.units[chain[:HASH]] = 4
    lender.lend(chain, patience=5.0)
    for pages in range(2, MAX_KINDS + 2):
        lender.lend(chain_of("b", 4), groups=(GroupShape(1, pages),))
    assert (1, 0, 0) in lender.lent()
    while disk.reads:
        disk.finish()
    lender.clock.pass_(10.0)
    assert sorted(id for id, _, _ in lender.lent()) == list(range(1, MAX_KINDS + 2))


def test_a_space_that_changes_hands_while_it_waits():
    objects = FakeTier("object", at_once=False)
    disk = FakeTier("disk")
    lender, chain = Lender(disk, objects), chain_of("a", 4)
    disk.units[chain[:HASH]] = 2
    lender.index.connect(2, UNIT, [GroupShape(1, 3)])
    lender.lend(chain, patience=5.0)
    lender.index.clear(None)
    store(lender.world, chain_of("b", 2), client=2)
    disk.finish()
    objects.answer()
    lender.clock.pass_(6.0)
    assert lender.lent() == [(1, 0, 0)]


# -- what the asking side is told before it has an answer --------------------------------------------------------------


def test_who_asks_here_hears_what_another_node_is_bringing_up():
    nodes, objects = FakeTier("nodes", at_once=False), FakeTier("object", at_once=False)
    world, chain, heard = World(nodes, objects), chain_of("a", 10), []
    nodes.units[chain[:HASH]] = 10
    ahead = world.ahead(chain)
    assert world.promotion.below(ahead).units == 0 and expected(world, ahead) == (0.0, 0.02)
    for patience in (0.3, 5.0):
        world.promotion.wait(ahead, patience, lambda patience=patience: heard.append(patience))
    want = nodes.asked[0][0]
    nodes.on_coming(want, 8, 1.0)
    assert heard == [0.3]  # it would come too late for him
    below = world.promotion.below(ahead)
    assert (below.units, below.asking) == (8, 1.0) and below.seconds == pytest.approx(1.0 + 8 * 4096 / 1e6)
    world.clock.pass_(0.5)
    nodes.on_coming(want, 10, 0.1)
    assert expected(world, ahead) == (pytest.approx(0.1 + 10 * 4096 / 1e6), 0.0)  # that is all there can be
    nodes.answer()
    while nodes.reads:
        nodes.finish()
    assert heard == [0.3, 5.0] and world.quiet()
    nodes.on_coming(want, 10, 1.0)  # late: nobody asks any more
    assert len(heard) == 2


def test_what_is_late_is_still_being_asked():
    nodes = FakeTier("nodes", at_once=False)
    world, chain = World(nodes), chain_of("a", 10)
    ahead = world.ahead(chain)
    nodes.on_coming(nodes.asked[0][0], 5, 1.0)
    world.clock.pass_(3.0)
    assert world.promotion.below(ahead).units == 5 and expected(world, ahead)[1] == 0.02
    nodes.answer()  # nothing came of it
    assert ahead.over and ahead.units == 0 and world.quiet()


def test_what_is_read_already_comes_first():
    disk, nodes = FakeTier("disk"), FakeTier("nodes", at_once=False)
    world, chain, heard = World(disk, nodes), chain_of("a", 10), []
    disk.units[chain[:HASH]], nodes.units[chain[:HASH]] = 4, 10
    ahead = world.ahead(chain)
    world.promotion.wait(ahead, 0.5, lambda: heard.append(world.here(chain)))
    nodes.on_coming(nodes.asked[0][0], 10, 2.0)
    below = world.promotion.below(ahead)
    assert not heard and (below.units, below.seconds, below.asking) == (4, pytest.approx(4 * 4096 / 1e6), 2.0)
    disk.finish()
    assert heard == [4] and world.promotion.below(ahead).units == 10
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

    @rule(name=st.sampled_from(NAMES), units=st.integers(0, 12), disk=st.booleans())
    def hold(self, name, units, disk):
        (self.disk if disk else self.objects).units[chain_of(name, 1)] = units

    @rule(
        name=st.sampled_from(NAMES),
        units=st.integers(1, 12),
        patience=st.sampled_from([0.0, 0.5, 5.0]),
        asker=st.integers(1, 2),
    )
    def ask(self, name, units, patience, asker):
        id = self.lender.lend(chain_of(name, units), patience, asker=asker)
        self.until[id] = self.lender.clock.now + patience, asker

    @rule(pick=st.randoms(use_true_random=False), fails=st.booleans())
    def finish(self, pick, fails):
        self.objects.answer()
        busy = [tier for tier in (self.disk, self.objects) if tier.reads]
        if busy:
            tier, bad = pick.choice(busy), pick.randrange(20) if fails else -1
            tier.finish(pick.randrange(len(tier.reads)), lambda block: block.unit != bad)

    @rule()
    def give_back(self):
        for answer in self.lender.answers:
            if isinstance(answer, m.Lent):
                for asker in (1, 2):
                    self.lender.lending.handle(m.Return(asker, answer.lease), None)

    @rule(asker=st.integers(1, 2))
    def leaves(self, asker):
        self.lender.lending.handle(m.Left(asker), None)
        for id in [id for id, (_, of) in self.until.items() if of == asker and id not in self.answers()]:
            del self.until[id]
            self.answered.add(id)  # nobody may answer it any more

    @rule(name=st.sampled_from("xyz"), units=st.integers(1, 8))
    def others_store(self, name, units):
        chain = chain_of(name, units)
        parents = (bytes(HASH) + chain)[: len(chain)]
        slots = self.lender.index.reserve(ENGINE, SPACE, b"", [0] * units, chain, parents, 1 << 30)
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
