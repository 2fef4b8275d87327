"""A real node store says where each block of a chain is, and of what it no longer has, what became of it."""

import os
import signal
from dataclasses import replace

import pytest
from store_process import Engine, Store
from store_support import EVERYTHING, NAMESPACE_ID, RawClient, block_hashes_of, engine_hello, items_of, tool_hello
from support import Clock, eventually
from tier_backend_fakes import FakeReactor

from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.index.block_entry import LOOKUP_BATCH, NamespaceBlocks
from vllm_kvtier.store.index.index import Index
from vllm_kvtier.store.index.removal_history import RemovalHistory, RemovalReason
from vllm_kvtier.store.index.types import GroupShape
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.store.server.explain_query import MAX_MISSING, MAX_QUERIES, SLICE_BLOCKS, ExplainQuery, Reach, walk
from vllm_kvtier.store.tiers.base import Find, TierCounts, Want

BLOCK_HASHES = block_hashes_of((32, "a prompt"))


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    yield store
    store.kill()


def start(store: Store, *options: str) -> None:
    store.start(*options)
    eventually(lambda: (counts := store.counts()).ready_bytes == counts.pool_bytes)


def inspect(
    store: Store, block_hashes: bytes = BLOCK_HASHES, hello: m.Hello | None = None, wait_seconds: float = 0.0
) -> m.Explained:
    with RawClient(store.path, hello or engine_hello("asker")) as client:
        return client.ask(m.Inspect(7, NAMESPACE_ID, block_hashes, spans=True, wait_seconds=wait_seconds))


def told(holding: m.Explained) -> list[tuple[int, str, int]]:
    (row,) = holding.spans
    assert all(0 <= span.newest <= span.oldest <= holding.seconds for span in row)
    return [(span.blocks, span.tier, span.removal_reason) for span in row]


def fill_up(engine: Engine, times: int = 1) -> None:
    for number in range(8 * times):
        assert engine.fill(block_hashes_of((32, f"another {number}"))) == 32


def test_explain_reports_state_and_removal_reason_of_blocks(store):
    start(store)
    assert told(inspect(store)) == [(32, "", 0)]  # nothing is known of it
    with Engine(store) as engine:
        slots = engine.reserve(BLOCK_HASHES)
        assert told(inspect(store)) == [(32, "writing", 0)]
        engine.send(m.Commit(slots[:20]))
        engine.send(m.Abort(slots[20:24]))
        engine.stat()
        assert told(inspect(store)) == [(20, "memory", 0), (4, "", RemovalReason.ABORTED), (8, "writing", 0)]
    # it left, and what it was writing with it
    eventually(lambda: told(inspect(store))[-1] == (8, "", RemovalReason.DIED))
    with Engine(store) as engine:
        block = BLOCK_HASHES[19 * m.HASH_BYTES : 20 * m.HASH_BYTES]
        engine.send(m.Discard(NAMESPACE_ID, 0, block, slots[19]))
        engine.stat()
        assert told(inspect(store))[:2] == [(19, "memory", 0), (1, "", RemovalReason.DISCARDED)]
        fill_up(engine)
        gone = told(inspect(store))
        assert gone[:2] == [(19, "", RemovalReason.EVICTED), (1, "", RemovalReason.DISCARDED)], (
            "each its own, of its last life"
        )
        engine.fill(BLOCK_HASHES)
    with RawClient(store.path, tool_hello()) as tool:
        assert told(inspect(store)) == [(32, "memory", 0)]  # stored again: it has no removal reason
        tool.ask(m.Clear(1))
    holding = inspect(store)
    assert told(holding) == [(32, "", RemovalReason.CLEARED)]
    assert holding.known == holding.seconds, "nothing was forgotten since the start"


def test_explain_reports_tier_full(store):
    start(store)
    with Engine(store) as writer, Engine(store) as other:
        held = [writer.reserve(block_hashes_of((32, f"held {n}"))) for n in range(9)]
        assert any(slot == -2 for slots in held for slot in slots), "it is full of what is being written"
        assert set(other.reserve(BLOCK_HASHES)) <= {-2, -3}
        assert told(inspect(store)) == [(32, "", RemovalReason.NO_ROOM)]


def test_explain_counts_only_returns_no_spans(store):
    start(store)
    with Engine(store) as engine:
        engine.fill(BLOCK_HASHES)
        holding = engine.ask(m.Inspect(1, NAMESPACE_ID, BLOCK_HASHES))
    assert holding == m.Explained(1, 32, [32])


def test_inspect_by_tool_uses_namespace_of_engines(store):
    start(store)
    assert inspect(store, hello=tool_hello()).spans == []
    with Engine(store) as engine:
        engine.fill(BLOCK_HASHES)
        assert told(inspect(store, hello=tool_hello())) == [(32, "memory", 0)]


def test_explain_reports_secondary_tiers(store, tmp_path):
    start(store, f"--disk-path={tmp_path}/disk", "--disk-size=64MiB", "--disk-admission=all")
    with Engine(store) as engine:
        engine.fill(BLOCK_HASHES)
        eventually(lambda: store.disk().written_blocks >= 32, 30)
        fill_up(engine)
        holding = inspect(store)
        assert told(holding) == [(32, "disk", 0)] and holding.num_hash_blocks == 0
        assert holding.tiers == [m.TierReach("disk", "ready", "", 32)]
        assert engine.ask(m.Inspect(1, NAMESPACE_ID, BLOCK_HASHES)).num_hash_blocks == 0, "asking brings nothing up"
        # The disk's process is killed and cannot come back: it was there when memory gave it up, and is no more.
        (tmp_path / "disk").rename(tmp_path / "gone")
        (tmp_path / "disk").write_text("no directory")
        os.kill(store.tier_process(), signal.SIGKILL)
        eventually(lambda: store.disk().state == "unavailable", 30)
        holding = inspect(store)
        assert told(holding) == [(32, "", RemovalReason.BELOW)]
        assert (
            holding.tiers[0].state == "unavailable"
            and holding.tiers[0].reason
            and holding.tiers[0].num_hash_blocks is None
        )


def test_explain_reports_blocks_not_admitted(store, tmp_path):
    start(store, f"--disk-path={tmp_path}/disk", "--disk-size=64MiB")  # what is seen twice goes down
    with Engine(store) as engine:
        engine.fill(BLOCK_HASHES)
        fill_up(engine)
    assert told(inspect(store)) == [(32, "", RemovalReason.EVICTED)]


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

    def answer(self, num_hash_blocks: int) -> None:
        want, done = self.asked.pop(0)
        done(Find(want, num_hash_blocks))

    def release(self, find) -> None:
        self.released.append(find)

    def counts(self) -> TierCounts:
        state, reason = ("ready", "") if self.usable else ("unavailable", "it")
        return TierCounts(self.name, state=state, reason=reason)


WANT = Want(NAMESPACE_ID, 16, [GroupShape(1, 4)], BLOCK_HASHES, 4)


@pytest.fixture
def reach():
    """(start asking tiers, what came of it, their reactor)"""
    reactor, said = FakeReactor(Clock()), []
    return lambda tiers, wait_seconds, want=WANT: Reach(tiers, want, wait_seconds, reactor, said.append), said, reactor


def test_explain_queries_each_tier_from_end_of_previous(reach):
    ask, said, reactor = reach
    first, away, second = Slow("nodes"), Slow("disk", usable=False), Slow("object")
    ask([first, away, second], 1.0)
    assert first.asked[0][0].start == 4 and not second.asked and not said
    first.answer(10)
    assert second.asked[0][0].start == 10 and len(first.released) == 1
    second.answer(10)
    assert [(tier.name, tier.state, tier.num_hash_blocks) for tier in said.pop()] == [
        ("nodes", "ready", 10), ("disk", "unavailable", None), ("object", "ready", 10)
    ]  # fmt: skip
    assert not second.released, "nothing was found"
    reactor.run(5)
    assert not said, "once"


def test_explain_tier_without_answer_times_out(reach):
    ask, said, reactor = reach
    slow = Slow("nodes")
    ask([slow], 1.0)
    reactor.run(0.9)
    assert not said
    reactor.run(0.2)
    assert said == [[m.TierReach("nodes", "ready", "", None)]]
    slow.answer(20)  # late: let go nevertheless
    assert len(slow.released) == 1 and len(said) == 1


def test_explain_without_timeout_asks_memory_tiers_only(reach):
    ask, said, _ = reach
    slow, quick = Slow("nodes"), Slow("disk", latency=0.0)
    ask([slow, quick], 0.0)
    quick.answer(6)
    assert not slow.asked and [tier.num_hash_blocks for tier in said[0]] == [None, 6]


def spans(index: Index, want: Want) -> list[list[m.Span]]:
    told: list[list[m.Span]] = []
    for _ in walk(index, [], want, told):
        pass
    return told


def test_explain_spans_are_bounded():
    """However long the prefix and however mixed its removal reasons: so many spans, so many blocks that are looked
    for."""
    index = Index(SlotPool(64, 64), None, Clock())
    removal_history = index.removal_history = RemovalHistory(Clock())
    long = block_hashes_of((MAX_MISSING + 500, "long"))
    want = replace(WANT, block_hashes=long, start=0)
    (row,) = spans(index, want)
    assert [span.blocks for span in row] == [MAX_MISSING]
    for block in range(0, 3 * m.MAX_SPANS, 2):
        removal_history.record(
            (NAMESPACE_ID, 0, long[block * m.HASH_BYTES : (block + 1) * m.HASH_BYTES]), RemovalReason.CLEARED
        )
    (row,) = spans(index, want)
    assert len(row) == m.MAX_SPANS


LONG = block_hashes_of((2 * SLICE_BLOCKS + 100, "long"))


@pytest.fixture
def full():
    """An index that has all of LONG, and how many blocks each look at it asked for."""
    num_hash_blocks, looks = len(LONG) // m.HASH_BYTES, []
    index = Index(SlotPool(num_hash_blocks + 64, 64), None, Clock())
    index.grow(num_hash_blocks + 64)
    index.removal_history = RemovalHistory(Clock())
    index.connect(1, 16, [m.GroupShape(1, 1)])
    groups, hashes, parents = items_of(LONG)
    assert index.commit(1, index.reserve(1, NAMESPACE_ID, b"", groups, hashes, parents, EVERYTHING)) == num_hash_blocks
    find = index.find
    index.find = lambda *name: (looks.append(name), find(*name))[1]
    return index, looks


def test_explain_long_prompt_is_sliced(full):
    index, looks = full
    reactor, said = FakeReactor(Clock()), []
    explain_query = ExplainQuery(index, [], reactor)
    want = replace(WANT, block_hashes=LONG, start=0, shapes=[GroupShape(1, 1)])
    explain_query.explain(want, 0.0, m.Explained(1, 0, []), said.append)
    explain_query.explain(
        replace(want, block_hashes=LONG[: 10 * m.HASH_BYTES]), 0.0, m.Explained(2, 0, []), said.append
    )
    done = []
    while not said:
        assert len(looks) <= (len(done) + 1) * SLICE_BLOCKS
        done.append(len(looks))
        reactor.step()
    reactor.run()
    assert done == [SLICE_BLOCKS, 2 * SLICE_BLOCKS], "a slice each time that others have had their turn"
    assert [(each.id, each.spans) for each in said] == [
        (1, [[m.Span(2 * SLICE_BLOCKS + 100, "memory")]]), (2, [[m.Span(10, "memory")]])
    ]  # fmt: skip
    explain_query.explain(
        replace(want, block_hashes=LONG[: 10 * m.HASH_BYTES]), 0.0, m.Explained(3, 0, []), said.append
    )
    assert said[-1].id == 3, "few blocks are answered at once"


def test_explain_error_in_one_answer_keeps_others(full):
    index, _ = full
    reactor, said = FakeReactor(Clock()), []
    explain_query = ExplainQuery(index, [], reactor)
    want = replace(WANT, block_hashes=LONG, start=0, shapes=[GroupShape(1, 1)])
    explain_query.explain(want, 0.0, m.Explained(1, 0, []), lambda told: 1 / 0)
    explain_query.explain(want, 0.0, m.Explained(2, 0, []), said.append)
    with pytest.raises(ZeroDivisionError):
        reactor.run()
    reactor.run()
    assert [each.id for each in said] == [2]


def test_explain_too_many_queries_get_no_spans(full):
    index, _ = full
    reactor, said = FakeReactor(Clock()), []
    explain_query = ExplainQuery(index, [], reactor)
    want = replace(WANT, block_hashes=LONG, start=0, shapes=[GroupShape(1, 1)])
    for number in range(MAX_QUERIES + 2):
        explain_query.explain(want, 0.0, m.Explained(number, 0, []), said.append)
    assert [(each.id, each.spans) for each in said] == [(MAX_QUERIES, []), (MAX_QUERIES + 1, [])]
    reactor.run()
    assert [each.id for each in said[2:]] == list(range(MAX_QUERIES)) and all(each.spans for each in said[2:])


@pytest.mark.parametrize("known", ["all of it", "all but the first", "nothing"])
def test_explain_looks_up_each_block_once(full, monkeypatch, known):
    """The part of a question that is not sliced."""
    index, _ = full
    num_hash_blocks, rows, row = len(LONG) // m.HASH_BYTES, [], NamespaceBlocks.row
    monkeypatch.setattr(NamespaceBlocks, "row", lambda *a: (rows.append(max(0, a[4] - a[3])), row(*a))[1])
    if known == "all but the first":
        index.discard(1, NAMESPACE_ID, 0, LONG[: m.HASH_BYTES], index.find(NAMESPACE_ID, 0, LONG[: m.HASH_BYTES]).slot)
    block_hashes = LONG if known != "nothing" else block_hashes_of((num_hash_blocks, "another"))
    found = index.inspect(1, NAMESPACE_ID, block_hashes)
    assert (found.num_hash_blocks, found.blocks) == {
        "all of it": (num_hash_blocks, [num_hash_blocks]), "all but the first": (0, [num_hash_blocks - 1]),
        "nothing": (0, [0])
    }[known]  # fmt: skip
    assert sum(rows) <= num_hash_blocks + LOOKUP_BATCH
