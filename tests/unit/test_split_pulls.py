"""Pulls of many reads: posted as several transfers, one at each poll, between which other pulls begin and end."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from pull_fakes import LAYERS, Pair, batch_of, pull_of, split_reads
from worker_halves import worker_without_threads

from vllm_kvtier.jobs.transfer_jobs import StepWork
from vllm_kvtier.worker.nixl_pull import descriptors
from vllm_kvtier.worker.nixl_pull import pulls as pulls_module
from vllm_kvtier.worker.nixl_pull.descriptors import PageRows, Side

BLOCKS = 128
ROWS = LAYERS + 1  # and the table of checksums
MAX_READS = 2 * ROWS


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(now=100.0)
    monkeypatch.setattr(pulls_module, "time", SimpleNamespace(monotonic=lambda: now.now))
    return now


@pytest.fixture
def pair(monkeypatch):
    """Connected, with the reads of each call that posts in ``posted``, and their bytes in ``sizes``."""
    split_reads(monkeypatch, MAX_READS)
    pair = Pair(blocks=(BLOCKS, BLOCKS))
    pair.there.compute_checksums([batch_of(range(1, BLOCKS))], None)
    assert not pair.run(pair.order(pull_of([1], [1]))).failed
    real, pair.posted, pair.sizes = pair.transport.read, [], []

    def read(peer, local, near, remote, far, size):
        joined = (np.diff(near) == 1) & (np.diff(far) == 1)
        transfer = real(peer, local, near, remote, far, size)
        pair.posted.append(1 + int((~joined).sum()))
        pair.sizes.append(size)
        return transfer

    pair.transport.read = read
    return pair


def long(start: int, blocks: int):
    """None is adjacent to the next."""
    return pull_of([start + 2 * n for n in range(blocks)], [start + 2 * n + 1 for n in range(blocks)])


def landed(pair, pull) -> bool:
    return all(pair.equal(*each) for each in zip(pull.local.tolist(), pull.remote.tolist(), strict=True))


def test_long_pull_is_posted_in_parts_one_a_poll(pair):
    pull = long(2, 9)
    assert pair.pulls.start(pair.order(pull)) is None
    assert pair.posted == [MAX_READS], "the reactor and the lock waited for all"
    results = []
    for _ in range(4):
        assert not results and pair.pulls.poll(quick=True) == [], "nor does the model runner post"
        before = len(pair.posted)
        results = pair.pulls.poll()
        assert len(pair.posted) <= before + 1
    [result] = results or pair.pulls.poll() or pair.pulls.poll()
    assert pair.posted == [MAX_READS] * 4 + [ROWS] and not result.failed and landed(pair, pull)
    assert result.bytes == 9 * (pair.here.view.groups[0].block_bytes + 8) and not pair.transport.running


def test_transfers_of_a_long_pull_are_under_way_together(pair):
    pair.transport.polls = 20
    assert pair.pulls.start(pair.order(long(2, 8))) is None
    while len(pair.posted) < 4:
        assert pair.pulls.poll() == []
    assert len(pair.transport.running) == 4 and not pair.goes_on(100).failed and landed(pair, long(2, 8))


def test_adjacent_blocks_are_one_transfer(pair):
    assert pair.pulls.start(pair.order(pull_of(range(2, 60), range(3, 61)))) is None
    assert pair.posted == [ROWS] and not pair.goes_on(9).failed


@pytest.mark.parametrize("begin", ["in one step", "before"])
def test_long_pulls_end_in_the_order_of_arrival(pair, begin):
    orders = [pair.order(long(2 + 20 * n, 8), name=f"long {n}") for n in range(4)]
    ended = []
    for order in orders:
        assert pair.pulls.start(order) is None
        if begin == "before":
            ended += pair.pulls.poll()
    assert len(pair.posted) <= 4
    while pair.pulls.active:
        results = pair.pulls.poll()
        ended += results
        if results and results[0].request_id == "long 0":
            assert len(pair.posted) <= 4 + 3, "it was reported before the others were posted"
    assert [r.request_id for r in ended] == [o.request_id for o in orders] and not any(r.failed for r in ended)
    assert len(pair.posted) == 4 * 4


def test_short_pulls_do_not_wait_for_a_long_one(pair):
    assert pair.pulls.start(pair.order(long(2, 40), name="long")) is None
    assert pair.pulls.poll() == []
    posted = len(pair.posted)
    for n in range(3):
        assert pair.pulls.start(pair.order(pull_of([100 + n], [90 + n]), name=f"short {n}"), quick=True) is None
    ended = []
    while len(ended) < 3:
        ended += pair.pulls.poll()
    assert [r.request_id for r in ended] == ["short 0", "short 1", "short 2"]
    assert len(pair.posted) <= posted + 3 + 3 and pair.goes_on(50).request_id == "long"


class Lock:
    """With what each hold of it posted."""

    def __init__(self, pair):
        self.pair, self.holds = pair, []

    def __enter__(self):
        self.before = len(self.pair.posted)

    def __exit__(self, *_):
        self.holds.append(len(self.pair.posted) - self.before)


def test_reactor_holds_the_lock_for_one_transfer_of_long_pulls(pair):
    """The model runner and the reactor's messages waited for all reads of all pulls."""
    exchange, ended = worker_without_threads()._exchange, []
    exchange.pulls, exchange.memory, exchange.lock, exchange._finish = pair.pulls, pair.here, Lock(pair), ended.append
    exchange.step(StepWork(1, pulls=[pair.order(long(2 + 20 * n, 8), name=f"{n}") for n in range(4)]), None, None)
    while exchange._poll() is not None:
        assert len(exchange.lock.holds) < 1000
    assert max(exchange.lock.holds) == 1 and sum(exchange.lock.holds) == 4 * 4
    assert [(r.request_id, r.failed) for r in ended] == [(f"{n}", False) for n in range(4)]


def test_many_short_pulls_are_not_posted_at_once(pair):
    """The model runner's thread posted as many as a step brought."""
    for n in range(8):
        assert pair.pulls.start(pair.order(pull_of([10 + n], [90 + n]), name=f"{n}"), quick=True) is None
    assert sum(pair.posted) <= MAX_READS
    ended = []
    while pair.pulls.active:
        before = sum(pair.posted)
        ended += pair.pulls.poll(quick=True)
        assert sum(pair.posted) <= before + MAX_READS
    assert [r.request_id for r in ended] == [f"{n}" for n in range(8)]


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("fault, words", [("fails", "failed"), ("start", "cannot start"), ("never", "within 2 s")])
def test_long_pull_fails_when_nothing_can_arrive(pair, clock, monkeypatch, number, fault, words):
    pair.transport.polls = 3  # earlier parts are under way
    real = pair.transport.read

    def read(*given):
        pair.transport.fault = fault if len(pair.posted) == number else None
        return real(*given)

    monkeypatch.setattr(pair.transport, "read", read)
    pair.transport.refuse_end = 2
    result = pair.pulls.start(pair.order(long(2, 8), timeout=2.0))
    while result is None:
        clock.now += 0.1
        result = next(iter(pair.pulls.poll()), None)
        assert bool(result) or pair.pulls.active
    assert not pair.transport.late_data() and not pair.transport.running and not pair.pulls.active
    assert words in result.reason and result.bad_blocks == set(long(2, 8).local.tolist())
    assert result.unreadable == (fault != "start") and result.bytes == sum(pair.sizes)
    monkeypatch.setattr(pair.transport, "read", real)
    pair.transport.fault, pair.transport.polls = None, 0
    assert not pair.run(pair.order(long(2, 8))).failed and landed(pair, long(2, 8))


def test_long_pull_goes_on_with_a_new_agent(pair):
    """Another failed: what was not posted is read by the next agent, and nothing is posted with one that is to end."""
    assert pair.pulls.start(pair.order(long(2, 8), name="long")) is None
    pair.transport.fault = "fails"
    assert pair.pulls.start(pair.order(pull_of([100], [90]), name="bad")) is None
    pair.transport.fault = None
    results, agents = [], []
    while pair.pulls.active:
        retiring, posted = pair.pulls._retire_by is not None, len(pair.posted)
        results += pair.pulls.poll()
        assert not retiring or len(pair.posted) == posted
        agents += [pair.transport.agent] * (len(pair.posted) - posted)
    assert [(r.request_id, r.failed) for r in results] == [("bad", True), ("long", False)]
    assert landed(pair, long(2, 8)) and set(agents) == {2} and len(pair.posted) == 5, "nothing is read again"


def test_long_pull_out_of_time_ends_no_agent_between_its_transfers(pair, clock):
    assert pair.pulls.start(pair.order(long(2, 8), timeout=2.0)) is None
    pair.pulls.poll(quick=True)  # the first has ended
    clock.now += 2.1
    [result] = pair.pulls.poll() or pair.pulls.poll()
    assert result.failed and "in time" in result.reason and not result.unreadable
    assert pair.transport.agent == 1 and pair.posted == [MAX_READS] and not pair.transport.running


def test_long_pull_ends_with_the_cache(pair):
    pair.transport.polls = 100
    assert pair.pulls.start(pair.order(long(2, 8), name="a")) is None and pair.pulls.poll() == []
    assert pair.pulls.start(pair.order(long(30, 8), name="b")) is None and pair.pulls.poll() == []
    pair.transport.close = lambda: None
    assert len(pair.transport.running) == 2
    results = pair.pulls.stop("asleep")
    assert {r.request_id for r in results if r.failed} == {"a", "b"} and not pair.pulls.active
    assert not pair.transport.running and not pair.transport.late_data()


def test_long_pull_is_read_again_from_its_start(pair, clock):
    pull = long(2, 8)
    wrong = pair.there.table.clone()
    pair.there.table.zero_()
    order = dataclasses.replace(pair.order(pull), promised=True)
    assert pair.run(order, 9) is None and len(pair.posted) == 4 and pair.pulls.active
    pair.there.table.copy_(wrong)
    clock.now += pulls_module.REREAD_SECONDS[0] + 0.001
    assert not pair.goes_on(9).failed and len(pair.posted) == 8 and landed(pair, pull)


def test_pages_with_gaps_are_counted_as_reads_of_their_own():
    """NIXL merges only what is adjacent in memory. Of four pages of one layer, every second is another cache's."""
    view = Pair(blocks=(32, 32)).here.view
    import msgspec

    gaps = [msgspec.structs.replace(r, block_stride=2 * r.block_stride) for r in view.groups[0].regions]
    group = msgspec.structs.replace(view.groups[0], regions=tuple(gaps))
    rows = PageRows(Side([group], 16, 1 << 50), Side([group], 16, 1 << 51))
    ids = np.arange(1, 9)
    assert rows.num_reads(0, ids, ids, False) == 8 * LAYERS + 1
    parts = list(rows.split(rows.indices([(0, ids, ids)]), 10))
    assert [len(part.local) for part in parts] == [10, 10, 4 + 8] and sum(part.size for part in parts) == 8 * (
        group.block_bytes + 8
    )


def test_reads_are_counted_as_they_are_posted():
    """Without a device nothing is rearranged: reversed ids counted as few reads, and the model runner posted many."""
    view = Pair(blocks=(64, 64)).here.view
    side = Side(view.groups, 64, 1 << 50)
    rows, ids = PageRows(side, side), np.arange(1, 51)
    for rearrange in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(descriptors, "MIN_READS_SAVED", 0)
            elements = rows.indices([(0, ids, ids[::-1])], rearrange)
        assert rows.num_reads(0, ids, ids[::-1], rearrange) == len(list(rows.split(elements, 1)))


def test_quick_pull_of_reversed_blocks_is_left_to_the_reactor(pair):
    pull = pull_of(range(2, 30), range(60, 32, -1))
    assert pair.pulls.start(pair.order(pull), quick=True) is None and not pair.posted
    assert not pair.goes_on(50).failed and landed(pair, pull)
