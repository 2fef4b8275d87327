"""A real node store says where each block of a chain is, and of what it no longer has, what became of it."""

import os
import signal
from dataclasses import replace

import pytest
from lower_fakes import FakeReactor
from store_process import Engine, Store
from store_support import EVERYTHING, SPACE, RawClient, chain_of, engine_hello, items_of, tool_hello
from support import Clock, eventually

from vllm_kvtier.store import messages as m
from vllm_kvtier.store.entries import LOOKED_AT, Shape, Space
from vllm_kvtier.store.extents import SlotPool
from vllm_kvtier.store.fates import Fate, Fates
from vllm_kvtier.store.fates_told import MOST_ASKED, MOST_MISSING, SLICE, Reach, Teller, walk
from vllm_kvtier.store.index import Index
from vllm_kvtier.store.lower.base import Find, TierCounts, Want

CHAIN = chain_of((32, "a prompt"))


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    yield store
    store.kill()


def start(store: Store, *options: str) -> None:
    store.start(*options)
    eventually(lambda: (counts := store.counts()).ready_bytes == counts.pool_bytes)


def inspect(store: Store, chain: bytes = CHAIN, hello: m.Hello | None = None, patience: float = 0.0) -> m.Holding:
    with RawClient(store.path, hello or engine_hello("asker")) as client:
        return client.ask(m.Inspect(7, SPACE, chain, spans=True, patience=patience))


def told(holding: m.Holding) -> list[tuple[int, str, int]]:
    (row,) = holding.spans
    assert all(0 <= span.newest <= span.oldest <= holding.seconds for span in row)
    return [(span.blocks, span.place, span.fate) for span in row]


def fill_up(engine: Engine, times: int = 1) -> None:
    for number in range(8 * times):
        assert engine.fill(chain_of((32, f"another {number}"))) == 32


def test_each_end_has_its_word(store):
    start(store)
    assert told(inspect(store)) == [(32, "", 0)]  # nothing is known of it
    with Engine(store) as engine:
        slots = engine.reserve(CHAIN)
        assert told(inspect(store)) == [(32, "writing", 0)]
        engine.tell(m.Commit(slots[:20]))
        engine.tell(m.Abort(slots[20:24]))
        engine.stat()
        assert told(inspect(store)) == [(20, "memory", 0), (4, "", Fate.ABORTED), (8, "writing", 0)]
    eventually(lambda: told(inspect(store))[-1] == (8, "", Fate.DIED))  # it left, and what it was writing with it
    with Engine(store) as engine:
        block = CHAIN[19 * m.HASH : 20 * m.HASH]
        engine.tell(m.Discard(SPACE, 0, block, slots[19]))
        engine.stat()
        assert told(inspect(store))[:2] == [(19, "memory", 0), (1, "", Fate.DISCARDED)]
        fill_up(engine)
        gone = told(inspect(store))
        assert gone[:2] == [(19, "", Fate.EVICTED), (1, "", Fate.DISCARDED)], "each its own, of its last life"
        engine.fill(CHAIN)
    with RawClient(store.path, tool_hello()) as tool:
        assert told(inspect(store)) == [(32, "memory", 0)]  # stored again: it has no fate
        tool.ask(m.Clear(1))
    holding = inspect(store)
    assert told(holding) == [(32, "", Fate.CLEARED)]
    assert holding.known == holding.seconds, "nothing was forgotten since the start"


def test_no_room(store):
    start(store)
    with Engine(store) as writer, Engine(store) as other:
        held = [writer.reserve(chain_of((32, f"held {n}"))) for n in range(9)]
        assert any(slot == -2 for slots in held for slot in slots), "it is full of what is being written"
        assert set(other.reserve(CHAIN)) <= {-2, -3}
        assert told(inspect(store)) == [(32, "", Fate.NO_ROOM)]


def test_who_asks_for_numbers_alone_gets_no_more(store):
    start(store)
    with Engine(store) as engine:
        engine.fill(CHAIN)
        holding = engine.ask(m.Inspect(1, SPACE, CHAIN))
    assert holding == m.Holding(1, 32, [32])


def test_a_tool_learns_what_engines_said_of_the_space(store):
    start(store)
    assert inspect(store, hello=tool_hello()).spans == []
    with Engine(store) as engine:
        engine.fill(CHAIN)
        assert told(inspect(store, hello=tool_hello())) == [(32, "memory", 0)]


def test_what_lies_below(store, tmp_path):
    start(store, f"--disk-path={tmp_path}/disk", "--disk-size=64MiB", "--disk-admission=all")
    with Engine(store) as engine:
        engine.fill(CHAIN)
        eventually(lambda: store.disk().written_blocks >= 32, 30)
        fill_up(engine)
        holding = inspect(store)
        assert told(holding) == [(32, "disk", 0)] and holding.units == 0
        assert holding.tiers == [m.TierReach("disk", "ready", "", 32)]
        assert engine.ask(m.Inspect(1, SPACE, CHAIN)).units == 0, "asking brings nothing up"
        # The disk's process is killed and cannot come back: it was there when memory gave it up, and is no more.
        (tmp_path / "disk").rename(tmp_path / "gone")
        (tmp_path / "disk").write_text("no directory")
        os.kill(store.mover(), signal.SIGKILL)
        eventually(lambda: store.disk().state == "set aside", 30)
        holding = inspect(store)
        assert told(holding) == [(32, "", Fate.BELOW)]
        assert holding.tiers[0].state == "set aside" and holding.tiers[0].reason and holding.tiers[0].units is None


def test_what_the_disk_did_not_take(store, tmp_path):
    start(store, f"--disk-path={tmp_path}/disk", "--disk-size=64MiB")  # what is seen twice goes down
    with Engine(store) as engine:
        engine.fill(CHAIN)
        fill_up(engine)
    assert told(inspect(store)) == [(32, "", Fate.EVICTED)]


# -- without a process ----------------------------------------------------------------------------------------


class Slow:
    """A tier that answers when the test says so."""

    def __init__(self, name: str, latency: float = 0.01, usable: bool = True):
        self.name, self._latency, self.usable = name, latency, usable
        self.asked, self.released = [], []

    def latency(self) -> float:
        return self._latency

    def has(self, *name) -> bool:
        return False

    def find(self, want, done) -> None:
        self.asked.append((want, done))

    def answer(self, units: int) -> None:
        want, done = self.asked.pop(0)
        done(Find(want, units))

    def release(self, find) -> None:
        self.released.append(find)

    def counts(self) -> TierCounts:
        return TierCounts(self.name, state="ready" if self.usable else "set aside", reason="" if self.usable else "it")


WANT = Want(SPACE, 16, [Shape(1, None, 4)], CHAIN, 4)


@pytest.fixture
def reach():
    """(start asking tiers, what came of it, their reactor)"""
    reactor, said = FakeReactor(Clock()), []
    return lambda tiers, patience, want=WANT: Reach(tiers, want, patience, reactor, said.append), said, reactor


def test_tiers_are_asked_one_from_where_the_other_ends(reach):
    ask, said, reactor = reach
    first, away, second = Slow("nodes"), Slow("disk", usable=False), Slow("object")
    ask([first, away, second], 1.0)
    assert first.asked[0][0].start == 4 and not second.asked and not said
    first.answer(10)
    assert second.asked[0][0].start == 10 and len(first.released) == 1
    second.answer(10)
    assert [(tier.name, tier.state, tier.units) for tier in said.pop()] == [
        ("nodes", "ready", 10), ("disk", "set aside", None), ("object", "ready", 10)
    ]  # fmt: skip
    assert not second.released, "nothing was found"
    reactor.run(5)
    assert not said, "once"


def test_a_tier_that_does_not_answer_is_not_waited_for(reach):
    ask, said, reactor = reach
    slow = Slow("nodes")
    ask([slow], 1.0)
    reactor.run(0.9)
    assert not said
    reactor.run(0.2)
    assert said == [[m.TierReach("nodes", "ready", "", None)]]
    slow.answer(20)  # late: let go all the same
    assert len(slow.released) == 1 and len(said) == 1


def test_without_patience_only_those_are_asked_that_answer_at_once(reach):
    ask, said, _ = reach
    slow, quick = Slow("nodes"), Slow("disk", latency=0.0)
    ask([slow, quick], 0.0)
    quick.answer(6)
    assert not slow.asked and [tier.units for tier in said[0]] == [None, 6]


def spans(index: Index, want: Want) -> list[list[m.Span]]:
    told: list[list[m.Span]] = []
    for _ in walk(index, [], want, told):
        pass
    return told


def test_a_question_has_an_end():
    """However long the chain and however wild its fates: so many spans, so many blocks that are looked for."""
    index = Index(SlotPool(64, 64), None, Clock())
    fates = index.fates = Fates(Clock())
    long = chain_of((MOST_MISSING + 500, "long"))
    want = replace(WANT, chain=long, start=0)
    (row,) = spans(index, want)
    assert [span.blocks for span in row] == [MOST_MISSING]
    for block in range(0, 3 * m.MAX_SPANS, 2):
        fates.record((SPACE, 0, long[block * m.HASH : (block + 1) * m.HASH]), Fate.CLEARED)
    (row,) = spans(index, want)
    assert len(row) == m.MAX_SPANS


LONG = chain_of((2 * SLICE + 100, "long"))


@pytest.fixture
def full():
    """An index that has all of LONG, and how many blocks each look at it asked for."""
    units, looks = len(LONG) // m.HASH, []
    index = Index(SlotPool(units + 64, 64), None, Clock())
    index.grow(units + 64)
    index.fates = Fates(Clock())
    index.connect(1, 16, [m.GroupShape(1, 1)])
    groups, hashes, parents = items_of(LONG)
    assert index.commit(1, index.reserve(1, SPACE, b"", groups, hashes, parents, EVERYTHING)) == units
    find = index.find
    index.find = lambda *name: (looks.append(name), find(*name))[1]
    return index, looks


def test_a_long_chain_is_looked_at_in_slices_and_others_wait_their_turn(full):
    index, looks = full
    reactor, said = FakeReactor(Clock()), []
    teller = Teller(index, [], reactor)
    want = replace(WANT, chain=LONG, start=0, shapes=[Shape(1, None, 1)])
    teller.tell(want, 0.0, m.Holding(1, 0, []), said.append)
    teller.tell(replace(want, chain=LONG[: 10 * m.HASH]), 0.0, m.Holding(2, 0, []), said.append)
    done = []
    while not said:
        assert len(looks) <= (len(done) + 1) * SLICE
        done.append(len(looks))
        reactor.step()
    reactor.run()
    assert done == [SLICE, 2 * SLICE], "a slice each time that others have had their turn"
    assert [(each.id, each.spans) for each in said] == [
        (1, [[m.Span(2 * SLICE + 100, "memory")]]), (2, [[m.Span(10, "memory")]])
    ]  # fmt: skip
    teller.tell(replace(want, chain=LONG[: 10 * m.HASH]), 0.0, m.Holding(3, 0, []), said.append)
    assert said[-1].id == 3, "few blocks are answered at once"


def test_a_fault_in_one_answer_costs_the_others_nothing(full):
    index, _ = full
    reactor, said = FakeReactor(Clock()), []
    teller = Teller(index, [], reactor)
    want = replace(WANT, chain=LONG, start=0, shapes=[Shape(1, None, 1)])
    teller.tell(want, 0.0, m.Holding(1, 0, []), lambda told: 1 / 0)
    teller.tell(want, 0.0, m.Holding(2, 0, []), said.append)
    with pytest.raises(ZeroDivisionError):
        reactor.run()
    reactor.run()
    assert [each.id for each in said] == [2]


def test_too_many_questions_at_once_are_told_no_spans(full):
    index, _ = full
    reactor, said = FakeReactor(Clock()), []
    teller = Teller(index, [], reactor)
    want = replace(WANT, chain=LONG, start=0, shapes=[Shape(1, None, 1)])
    for number in range(MOST_ASKED + 2):
        teller.tell(want, 0.0, m.Holding(number, 0, []), said.append)
    assert [(each.id, each.spans) for each in said] == [(MOST_ASKED, []), (MOST_ASKED + 1, [])]
    reactor.run()
    assert [each.id for each in said[2:]] == list(range(MOST_ASKED)) and all(each.spans for each in said[2:])


@pytest.mark.parametrize("known", ["all of it", "all but the first", "nothing"])
def test_inspect_looks_each_block_up_once(full, monkeypatch, known):
    """The part of a question that is not sliced."""
    index, _ = full
    units, rows, row = len(LONG) // m.HASH, [], Space.row
    monkeypatch.setattr(Space, "row", lambda *a: (rows.append(max(0, a[4] - a[3])), row(*a))[1])
    if known == "all but the first":
        index.discard(1, SPACE, 0, LONG[: m.HASH], index.find(SPACE, 0, LONG[: m.HASH]).slot)
    chain = LONG if known != "nothing" else chain_of((units, "another"))
    found = index.inspect(1, SPACE, chain)
    assert (found.units, found.blocks) == {
        "all of it": (units, [units]), "all but the first": (0, [units - 1]), "nothing": (0, [0])
    }[known]  # fmt: skip
    assert sum(rows) <= units + LOOKED_AT
