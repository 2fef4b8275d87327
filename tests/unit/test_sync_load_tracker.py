"""Loads that a step's forward waits for, on the worker: each is judged in its own step, and vLLM hears of none."""

import numpy as np
import pytest
from test_connector_worker import half  # noqa: F401

from vllm_kvtier.jobs.results import FetchResult, LoadResult
from vllm_kvtier.jobs.transfer_jobs import GroupLoad, GroupPull, LoadJob, PeerFetchJob, StepWork
from vllm_kvtier.worker.integrity.sync_load_tracker import SyncLoadTracker


def order(name, synchronous=True):
    blocks = np.array([3, 4, 5])
    return LoadJob(name, [GroupLoad(0, blocks, blocks.astype(np.uint64), blocks)], 60.0, "life", synchronous)


def result(name, *bad, load_id=0):
    return LoadResult(name, set(bad), "", 30, 0.1, 0.0, load_id=load_id)


class Tier:
    """Loads end in ``settle``, unless they are ``late``."""

    def __init__(self, owner):
        self.owner, self.late, self.log, self.bad = owner, False, [], ()
        self.begun = []

    def load_now(self, loads, after):
        self.log.append(("now", [o.request_id for o in loads]))
        self.begun += loads

    def load(self, loads, after):
        self.log.append(("load", [o.request_id for o in loads]))

    def wait_until_done(self, seconds):
        self.log.append(("wait", seconds))
        if not self.late:
            self.end()

    def end(self):
        begun, self.begun = self.begun, []
        for each in begun:
            self.owner._jobs.finish(result(each.request_id, *self.bad, load_id=each.load_id))

    def step(self, step, fence, lone):
        self.log.append(("step", step))

    def collect(self, idle):
        self.log.append("collect")

    def cancel_loads(self, names):
        pass


@pytest.fixture
def worker(half):  # noqa: F811
    half._store = Tier(half)
    return half


def test_sync_load_tracker_order_of_load_verify_store(worker):
    work = StepWork(7, loads=[order("r"), order("s", False)])
    worker.sync_load(work)
    worker.submit(work)
    out = worker.collect()
    assert worker._store.log == [("now", ["r"]), ("wait", 60.0), ("load", ["s"]), ("step", 7), "collect"]
    assert [r.request_id for r in out.results] == ["r"] and not out.finished and not out.bad_blocks
    worker._jobs.finish(result("s"))
    assert worker.collect().finished == {"s"}


def test_sync_load_tracker_reports_bad_blocks_with_step(worker):
    work = StepWork(7, loads=[order("r")])
    worker._store.bad = (4, 5)
    worker.sync_load(work)
    worker.submit(work)
    out = worker.collect()
    assert [each.bad_blocks for each in out.results] == [{4, 5}]
    assert not (out.finished or out.failed or out.bad_blocks), "vLLM takes back those of models with one group only"
    assert worker.collect().results == []


@pytest.mark.parametrize("how", ["no tier", "never begun", "raised", "late"])
def test_sync_load_tracker_late_load_fails(worker, how, monkeypatch, caplog):
    tier, work = worker._store, StepWork(7, loads=[order("r")])
    if how == "no tier":
        worker._store = None
    elif how == "raised":
        monkeypatch.setattr(tier, "load_now", lambda loads: 1 / 0)
    tier.late = how == "late"
    if how != "never begun":
        worker.sync_load(work)
    worker.submit(work)
    out = worker.collect()
    [verified] = out.results
    assert (verified.request_id, verified.bad_blocks, out.finished) == ("r", {3, 4, 5}, set()) and verified.reason
    if how == "late":  # its end has no owner any more; a later load of the same request is
        tier.end()
    worker._jobs.outstanding["r"] = order("r", False)
    worker._jobs.finish(result("r"))
    assert worker.collect().finished == {"r"}
    assert not worker.collect().results


def test_sync_load_tracker_drops_result_of_failed_start(worker, monkeypatch):
    """vLLM ends an engine that tells it of the end of a load that its request does not wait for."""
    tier, work = worker._store, StepWork(7, loads=[order("r")])
    begin = tier.load_now
    monkeypatch.setattr(tier, "load_now", lambda loads: begin(loads) or 1 / 0)
    tier.late = True
    worker.sync_load(work)
    worker.submit(work)
    assert [r.bad_blocks for r in worker.collect().results] == [{3, 4, 5}]
    tier.end()
    out = worker.collect()
    assert not out.finished and not out.results and not out.bad_blocks


@pytest.mark.parametrize("synchronous", [False, True])
def test_sync_load_tracker_separates_late_load_from_next_one(worker, synchronous):
    """Nor are both taken for late when they end together: an asynchronous one's request would wait for ever."""
    tier, first = worker._store, StepWork(7, loads=[order("r")])
    tier.late = True
    worker.sync_load(first)
    worker.submit(first)
    assert [r.bad_blocks for r in worker.collect().results] == [{3, 4, 5}]
    late, tier.begun = tier.begun, []
    second = StepWork(8, loads=[order("r", synchronous)])
    worker.sync_load(second)
    [judged_by] = tier.begun or [second.loads[0]]
    worker.submit(second)
    worker._jobs.finish(result("r", load_id=late[0].load_id))
    if synchronous:
        out = worker.collect()
        assert [r.bad_blocks for r in out.results] == [{3, 4, 5}], "the first one says nothing of the second"
        return
    worker._jobs.finish(result("r", 4, load_id=judged_by.load_id))
    out = worker.collect()
    assert out.finished == {"r"} and [r.bad_blocks for r in out.results] == [{4}]


def test_sync_load_tracker_wait_error_fails_the_load(worker, monkeypatch, caplog):
    tier, work = worker._store, StepWork(7, loads=[order("r")])
    monkeypatch.setattr(tier, "wait_until_done", lambda seconds: 1 / 0)
    worker.sync_load(work)
    worker.submit(work)
    assert [r.bad_blocks for r in worker.collect().results] == [{3, 4, 5}]
    assert "waiting for a load failed" in caplog.text


def test_sync_load_tracker_without_loads_passes_results_through():
    synchronous, done = SyncLoadTracker(), [result("a")]
    synchronous.wait_until_done(LoadJob, object())  # as a far tier: nothing of it can be waited for
    assert synchronous.split(done) == (done, [])


# -- fetches -----------------------------------------------------------------------------------------------------------


def fetch(name, synchronous=True, timeout=30.0):
    blocks = np.array([7, 8])
    return PeerFetchJob(
        name, "s/1", [GroupPull(0, blocks, blocks, blocks.astype(np.uint64), blocks)], timeout, synchronous
    )


def fetched(name, *bad, load_id=0):
    return FetchResult(name, set(bad), bool(bad), "", 30, 0.1, load_id=load_id)


class Fetching:
    """As ``Tier``."""

    def __init__(self, owner):
        self.owner, self.late, self.log, self.bad = owner, False, [], ()
        self.known, self.begun = {}, []

    def add_engines(self, sources):
        self.known.update(sources)

    def begin_now(self, orders, after):
        assert all(order.instance in self.known for order in orders)
        self.log.append(("now", [o.request_id for o in orders]))
        self.begun += orders

    def begin(self, orders, after):
        self.log.append(("begin", [o.request_id for o in orders]))

    def wait_until_done(self, seconds):
        self.log.append(("wait", seconds))
        if not self.late:
            self.end()

    def end(self):
        begun, self.begun = self.begun, []
        for each in begun:
            self.owner._jobs.finish(fetched(each.request_id, *self.bad, load_id=each.load_id))

    def collect(self, idle):
        self.log.append("collect")


@pytest.fixture
def fetcher(worker):
    worker._exchange.fetching = Fetching(worker)
    return worker


def test_sync_load_tracker_fetch_is_verified_with_its_step(fetcher):
    work = StepWork(7, fetches=[fetch("r"), fetch("s", False)], new_peers={"s/1": []})
    fetcher.sync_load(work)
    assert fetcher._exchange.fetching.log == [("now", ["r"])]
    fetcher.submit(work)
    out = fetcher.collect()
    assert fetcher._exchange.fetching.log[1:] == [("wait", 30.0), ("begin", ["s"]), "collect"]
    assert [r.request_id for r in out.results] == ["r"] and not out.finished and not out.bad_blocks
    fetcher._jobs.finish(fetched("s"))
    assert fetcher.collect().finished == {"s"}


@pytest.mark.parametrize("how", ["not set up", "never begun", "raised", "late", "wrong"])
def test_sync_load_tracker_late_fetch_fails(fetcher, how, monkeypatch):
    fetching, work = fetcher._exchange.fetching, StepWork(7, fetches=[fetch("r")], new_peers={"s/1": []})
    if how == "not set up":
        fetcher._exchange.fetching = None
    elif how == "raised":
        monkeypatch.setattr(fetching, "begin_now", lambda orders, after: 1 / 0)
    elif how == "wrong":
        fetching.bad = (7, 8)
    fetching.late = how == "late"
    if how != "never begun":
        fetcher.sync_load(work)
    fetcher.submit(work)
    out = fetcher.collect()
    [verified] = out.results
    assert isinstance(verified, FetchResult) and verified.bad_blocks == {7, 8} and verified.failed
    assert not (out.failed or out.bad_blocks or out.finished) and bool(verified.reason) == (how != "wrong")
    if how == "late":
        fetching.end()
    fetcher._jobs.outstanding["r"] = fetch("r", False)
    fetcher._jobs.finish(fetched("r"))
    assert fetcher.collect().finished == {"r"}
    assert not fetcher.collect().results


def test_sync_load_tracker_separates_load_and_fetch_of_a_request(fetcher):
    work = StepWork(7, loads=[order("r")], fetches=[fetch("r")], new_peers={"s/1": []})
    fetcher._store.bad, fetcher._exchange.fetching.late = (4,), True
    fetcher.sync_load(work)
    fetcher.submit(work)
    out = fetcher.collect()
    assert [(type(r), r.bad_blocks) for r in out.results] == [(LoadResult, {4}), (FetchResult, {7, 8})]
    fetcher._jobs.outstanding["r"] = fetch("r", False)
    fetcher._jobs.finish(result("r"))
    assert fetcher.collect().finished == {"r"}, "the load is another one"
    fetcher._exchange.fetching.end()
    assert not fetcher.collect().results
