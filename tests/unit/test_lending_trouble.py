"""What an engine that lends, or one that asks it, could do to the other or to itself."""

import time
import tracemalloc
from collections import Counter, deque
from types import SimpleNamespace

import pytest
from support import FakePool, Uncontained, make_request

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.exports import Export, ExportTable, GroupBlocks, Kind, Lease
from vllm_kvtier.scheduler.half import SchedulerHalf
from vllm_kvtier.scheduler.ledger import Entry, Keys, Ledger
from vllm_kvtier.scheduler.lending import Lender
from vllm_kvtier.scheduler.lifecycle import Lifecycle, State
from vllm_kvtier.scheduler.matching import Matcher
from vllm_kvtier.scheduler.offers import Loan, PendingAsk
from vllm_kvtier.scheduler.sharing import Holder
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.blocks import BlockPool
from vllm_kvtier.wire import messages as m

UNIT = 4
KEYS = Keys(3)


class Peers:
    def __init__(self):
        self.given_back = []

    def ask(self, address, timeout, near="", **fields):
        return PendingAsk(address, m.Ask(1, "", **fields), time.monotonic() + 2.0)

    def release(self, offer, done):
        self.given_back.append(offer.lease)

    def cancel(self, pending):
        pending.cancelled = True


def offered(tokens_of_prompt, groups, tokens, blocks, hurry=None):
    """A matcher whose request asked an engine of this node, which answers with a loan of ``tokens``."""
    Lifecycle.violations = 0
    ledger = Ledger([size for size, _ in groups])
    matcher = Matcher(
        KVTierConfig(pull_threshold=1), Peers(), ledger, lambda: KEYS, groups, UNIT, lambda: ("me", 9), Counters(),
        hurry=hurry,
    )
    request = make_request("r", list(range(tokens_of_prompt)), UNIT)
    t = matcher.track(request)
    t.sources, t.begun_at = deque([Holder(("there", 1), "it/1", tokens_of_prompt)]), time.monotonic()
    assert matcher.match(request, 0) == (None, False) and t.life.state is State.ASKING
    t.pending.outcome = Loan(("there", 1), "it/1", 7, 0, tokens, blocks, [], mapped=True, nbytes=10)
    return matcher, request, t, ledger


def test_a_block_that_was_not_lent_is_not_taken_for_one_that_came():
    """An id of 0 in a group that keeps whole prefixes: nothing would be copied there, and nobody would say so."""
    matcher, request, t, _ = offered(13, [(UNIT, None)], 12, [[5, 0, 7]])
    external, _ = matcher.match(request, 0)
    if not external:
        return  # it was not taken
    matcher.allocated(request, ([11, 12, 13, 14],), external)
    (order,), _ = matcher.take_orders()
    assert order.groups[0].local.tolist() == [11, 12, 13], "vLLM computes on block 12, which nobody reads into"


@pytest.mark.parametrize("groups, tokens, blocks", [
    ([(UNIT, None)], 6, [[5, 6]]),
    ([(2 * UNIT, None)], 4, [[5]]),
])  # fmt: skip
def test_a_loan_that_ends_within_a_block_costs_no_engine(groups, tokens, blocks):
    matcher, request, t, _ = offered(17, groups, tokens, blocks)
    external, _ = matcher.match(request, 0)
    if external:
        matcher.allocated(request, (list(range(11, 11 + len(blocks[0]))),), external)  # raises in vLLM's schedule()


def test_a_last_block_that_was_computed_again_has_no_checksum():
    """A hurried copy of a whole prompt: the step computes the last token again, into the last block. What the source
    had summed there is not what is there now."""
    hurry = SimpleNamespace(
        awaits_verdict=False, possible=True, suits=lambda t, computed, tracked: True,
        begin=lambda t, order: setattr(order, "hurried", True),
    )  # fmt: skip
    matcher, request, t, ledger = offered(12, [(UNIT, None)], 12, [[5, 6, 7]], hurry)
    external, asynchronous = matcher.match(request, 0)
    assert (external, asynchronous) == (11, False) and t.hurried
    matcher.allocated(request, ([11, 12, 13],), external)
    ledger.forget([13])  # as BlockTables has it when the request is admitted, in the same step
    matcher.loaded("r", failed=False)
    made = {entry: ledger.has(Entry(0, entry, KEYS.key(bytes(request.block_hashes[i]), 0, b""), UNIT))
            for i, entry in enumerate((11, 12, 13))}  # fmt: skip
    assert made == {11: True, 12: True, 13: False}


# -- the lender -----------------------------------------------------------------------------------------------------


def make_lender(groups, blocks=64, budget=0.5):
    pool = FakePool(blocks, UNIT)
    ledger = Ledger([size for size, _ in groups])
    ledger.publish(0)
    table = ExportTable(UNIT, {kind: int(blocks * budget) for kind in Kind})
    table.mark_summed(10)
    turns = SimpleNamespace(known=True, run=lambda job: job())
    lender = Lender(turns, BlockPool(pool), ledger, table, lambda: KEYS, groups, UNIT, 1, Counters())
    return SimpleNamespace(lender=lender, pool=pool, ledger=ledger, table=table)


def put(world, block, block_hash, group=0, size=UNIT):
    world.pool.cached[(bytes(block_hash), group)] = block
    world.ledger.mark(Entry(group, block, KEYS.key(bytes(block_hash), group, b""), size), 1)


def ask(world, chain, start=0):
    answers = []
    world.lender.ask(m.Ask(1, "", start, chain, lend=True, mapped=True), "reader", 5.0, answers.append)
    return answers[0]


def test_a_reset_of_the_prefix_cache_does_not_fail_for_what_is_lent():
    """vLLM's reset fails, and pausing or sleeping raises, while any block is held: readers find out by checksums."""
    world = make_lender([(UNIT, None)])
    chain = [bytes(h) for h in make_request("r", list(range(12)), UNIT).block_hashes]
    for i, block_hash in enumerate(chain):
        put(world, 5 + i, block_hash)
    assert isinstance(ask(world, chain), Lease)
    half = SchedulerHalf.__new__(SchedulerHalf)
    half._exports, half._ledger, half._config = world.table, world.ledger, KVTierConfig()
    half._offloader = half._events = None
    half._contain = Uncontained()
    half._hurry = SimpleNamespace(unpin=lambda: None)

    def drain():
        for ids in world.table.take_freed():
            BlockPool(world.pool).free(ids)

    half._exporter = SimpleNamespace(drain=drain)
    half._before_reset()
    assert [b.block_id for b in world.pool.blocks if b.ref_cnt] == []
    assert world.table.counts()["lent_blocks"] == 0


def test_a_start_far_beyond_the_chain_costs_nothing():
    world = make_lender([(UNIT, None)])
    chain = [bytes(h) for h in make_request("r", list(range(12)), UNIT).block_hashes]
    tracemalloc.start()
    try:
        answer = ask(world, chain, start=1 << 24)  # up to 1 << 40 can be sent
        assert not isinstance(answer, Lease)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_window_that_is_gone_does_not_stop_the_engine(monkeypatch):
    """The prefix is here, the window's blocks are not (they are evicted first): found by a few looks a block."""
    units, window = 8192, 128
    world = make_lender([(UNIT, None), (UNIT, window)], blocks=2 * units)
    chain = [n.to_bytes(32, "little") for n in range(1, units + 1)]
    holds, looked = {}, Counter()
    for i, block_hash in enumerate(chain):
        world.ledger.mark(Entry(0, 1 + i, KEYS.key(block_hash, 0, b""), UNIT), 1)
        holds[1 + i] = block_hash
    world.lender._pool.holds = lambda block, block_hash, group: holds.get(block) == block_hash and group == 0
    find, cover = world.ledger.find, GroupBlocks.cover

    def count_find(key):
        looked["find"] += 1
        return find(key)

    def count_cover(self, start, tokens):
        looked["cover"] += (min(tokens - start, self.window) if self.window else tokens - start) // UNIT
        return cover(self, start, tokens)

    monkeypatch.setattr(world.ledger, "find", count_find)
    monkeypatch.setattr(GroupBlocks, "cover", count_cover)
    assert not isinstance(ask(world, chain), Lease)
    assert units <= looked["find"] <= 2 * units and units / 2 <= looked["cover"] <= units * window // UNIT, looked


def test_a_block_is_found_as_long_as_any_block_has_its_content():
    """Two requests compute one prefix at once. vLLM goes on with the first copy; the second is evicted first."""
    ledger = Ledger([UNIT])
    ledger.publish(0)
    ledger.mark(Entry(0, 5, 77, UNIT), 1)
    ledger.mark(Entry(0, 6, 77, UNIT), 1)
    ledger.take_changes()
    ledger.forget([6])
    assert ledger.find(77) == (5, 1)
    assert ledger.take_changes() == ([], []), "the directory is told that it is gone"


# -- the reader -----------------------------------------------------------------------------------------------------


def test_a_loan_from_before_a_reset_is_not_taken():
    """``reset_prefix_cache(reset_connector=True)`` comes with new weights: a request that waited then must not go on
    with what another engine had computed with the old ones. The store's offers have an epoch for that."""
    matcher, request, t, _ = offered(13, [(UNIT, None)], 12, [[5, 6, 7]])
    tier = SimpleNamespace(epoch=0, ask=lambda *a, **k: None, touch=lambda *a: None, release=lambda o: None)
    matcher._tier = matcher._scales._tier = matcher._asker._tier = tier
    t.asked_from = 0
    external, _ = matcher.match(request, 0)
    assert external == 12 and t.life.state is State.OFFERED  # vLLM has no room yet
    tier.epoch = 1  # SchedulerHalf.reset -> tier.renew()
    external, _ = matcher.match(request, 0)
    assert not external, "KV of the old weights"


def test_a_holder_whose_loan_failed_is_not_asked_again_under_another_name():
    """The store names an address for x/1 at which y/1 answers: else the request would be loaded, and fail, for ever."""
    matcher, request, t, _ = offered(13, [(UNIT, None)], 12, [[5, 6, 7]])
    external, _ = matcher.match(request, 0)
    matcher.allocated(request, ([11, 12, 13],), external)
    t.offer = Loan(("there", 1), "y/1", 7, 0, 12, [[5, 6, 7]], [], mapped=True, nbytes=10)  # as it called itself
    matcher.loaded("r", failed=True)
    assert t.life.state is State.NEW
    assert matcher.nearby.suits(t, Holder(("there", 1), "it/1", 13), 0) is None


def test_an_engine_that_can_copy_from_nobody_says_so():
    """With a wire codec or a host buffer no fetch ever works: the scheduler half must not try one for each request."""
    import threading

    import numpy as np

    from vllm_kvtier.worker.half import WorkerHalf
    from vllm_kvtier.worker.work import FetchOrder, GroupPull, StepWork

    half = WorkerHalf.__new__(WorkerHalf)
    half._fetching, half._unusable, half._done, half._done_lock = None, None, [], threading.Lock()
    one = np.array([1])
    order = FetchOrder("r", "it/1", [GroupPull(0, one, one, one.astype(np.uint64), one.astype(np.int32))], 60.0)
    half._fetch([order], StepWork(1))
    assert half._done[0].failed and half._done[0].unmappable


def test_company_that_comes_late_spoils_nobody_s_checksums():
    """A request that ran alone: blocks behind its window are others' since, with checksums that exports go by."""
    from vllm_kvtier.scheduler.exporting import Exporter
    from vllm_kvtier.scheduler.params import read
    from vllm_kvtier.scheduler.tables import Growth, Table
    from vllm_kvtier.scheduler.tracked import Tracked

    groups, shared = [(UNIT, None), (UNIT, 2 * UNIT)], [False]
    ledger = Ledger([UNIT, UNIT])
    pool = FakePool(64, UNIT)
    exporter = Exporter(
        KVTierConfig(), ExportTable(UNIT, {kind: 64 for kind in Kind}), BlockPool(pool), ledger, lambda: KEYS, groups,
        Counters(), False, lambda: shared[0],
    )
    request = make_request("a", list(range(40)), UNIT)
    t = Tracked(request, read(None), Lifecycle("a"))
    table = Table([list(range(1, 11)), list(range(21, 31))])
    request.num_computed_tokens = 36
    exporter.begin_step([Growth(t, table, 36)])
    others = Entry(1, 22, 999, UNIT)  # vLLM gave block 22 to somebody else meanwhile, whose export is out
    ledger.mark(others, exporter.step)
    shared[0] = True
    exporter.begin_step([Growth(t, table, 40)])
    assert ledger.has(others)


def test_a_reader_that_keeps_a_loan_does_not_keep_our_own_requests_waiting(monkeypatch):
    """It may ping for minutes, its engine standing still; one loan alone may be nearly all of the cache."""
    now = [100.0]
    table = ExportTable(UNIT, {kind: 64 for kind in Kind}, clock=lambda: now[0])
    blocks = list(range(1, 51))
    export = Export("", Kind.LENT, 200, (), b"", b"", [GroupBlocks(UNIT, blocks)], list(blocks), -1, now[0])
    table.lend(export, 0, "reader", 5.0, served=False)
    for _ in range(10):
        now[0] += 3.0
        table.renew("reader", 5.0)
        table.expire()
    assert table.counts()["lent_blocks"] == 50
    table.relieve(10)  # a request of our own needs them
    assert table.counts()["lent_blocks"] == 0
