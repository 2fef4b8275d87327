"""Loads that a step's forward waits for, on the worker: each is judged in its own step, and vLLM hears of none."""

import numpy as np
import pytest
from test_worker_half import half  # noqa: F401

from vllm_kvtier.worker.fetches import FetchResult
from vllm_kvtier.worker.hurried import Hurried
from vllm_kvtier.worker.queues import LoadResult
from vllm_kvtier.worker.work import FetchOrder, GroupLoad, GroupPull, LoadOrder, StepWork


def order(name, hurried=True):
    blocks = np.array([3, 4, 5])
    return LoadOrder(name, [GroupLoad(0, blocks, blocks.astype(np.uint64), blocks)], 60.0, "life", hurried)


def result(name, *bad, ticket=0):
    return LoadResult(name, set(bad), "", 30, 0.1, 0.0, ticket=ticket)


class Tier:
    """Loads end in ``settle``, unless they are ``late``."""

    def __init__(self, owner):
        self.owner, self.late, self.log, self.bad = owner, False, [], ()
        self.begun = []

    def launching(self):
        pass

    def load_now(self, loads, after):
        self.log.append(("now", [o.request_id for o in loads]))
        self.begun += loads

    def load(self, loads, after):
        self.log.append(("load", [o.request_id for o in loads]))

    def settle(self, seconds):
        self.log.append(("settle", seconds))
        if not self.late:
            self.end()

    def end(self):
        begun, self.begun = self.begun, []
        for each in begun:
            self.owner._finish(result(each.request_id, *self.bad, ticket=each.ticket))

    def step(self, step, fence):
        self.log.append(("step", step))

    def collect(self, idle):
        self.log.append("collect")

    def cancel_loads(self, names):
        pass


@pytest.fixture
def worker(half):  # noqa: F811
    half._tier = Tier(half)
    return half


def test_it_is_begun_before_the_forward_and_judged_before_anything_is_stored(worker):
    work = StepWork(7, loads=[order("r"), order("s", False)])
    worker.hurry(work)
    worker.submit(work)
    out = worker.collect()
    assert worker._tier.log == [("now", ["r"]), ("settle", 60.0), ("load", ["s"]), ("step", 7), "collect"]
    assert [r.request_id for r in out.results] == ["r"] and not out.finished and not out.bad_blocks
    worker._finish(result("s"))
    assert worker.collect().finished == {"s"}


def test_what_was_wrong_is_reported_with_the_step(worker):
    work = StepWork(7, loads=[order("r")])
    worker._tier.bad = (4, 5)
    worker.hurry(work)
    worker.submit(work)
    out = worker.collect()
    assert (out.finished, out.failed, out.bad_blocks) == (set(), {"r"}, {4, 5})
    assert worker.collect().results == []


@pytest.mark.parametrize("how", ["no tier", "never begun", "raised", "late"])
def test_what_did_not_come_in_time_failed(worker, how, monkeypatch, caplog):
    tier, work = worker._tier, StepWork(7, loads=[order("r")])
    if how == "no tier":
        worker._tier = None
    elif how == "raised":
        monkeypatch.setattr(tier, "load_now", lambda loads: 1 / 0)
    tier.late = how == "late"
    if how != "never begun":
        worker.hurry(work)
    worker.submit(work)
    out = worker.collect()
    [judged] = out.results
    assert (judged.request_id, judged.bad_blocks, out.finished) == ("r", {3, 4, 5}, set()) and judged.reason
    if how == "late":  # its end is nobody's business any more; a later load of the same request is
        tier.end()
    worker._outstanding["r"] = order("r", False)
    worker._finish(result("r"))
    assert worker.collect().finished == {"r"}
    assert not worker.collect().results


def test_what_comes_of_a_load_whose_begin_failed_midway_is_nobody_s(worker, monkeypatch):
    """vLLM ends an engine that tells it of the end of a load that its request does not wait for."""
    tier, work = worker._tier, StepWork(7, loads=[order("r")])
    begin = tier.load_now
    monkeypatch.setattr(tier, "load_now", lambda loads: begin(loads) or 1 / 0)
    tier.late = True
    worker.hurry(work)
    worker.submit(work)
    assert [r.bad_blocks for r in worker.collect().results] == [{3, 4, 5}]
    tier.end()
    out = worker.collect()
    assert not out.finished and not out.results and not out.bad_blocks


@pytest.mark.parametrize("hurried", [False, True])
def test_a_late_one_is_not_taken_for_the_next_of_its_request(worker, hurried):
    """Nor are both taken for late when they end together: an asynchronous one's request would wait for ever."""
    tier, first = worker._tier, StepWork(7, loads=[order("r")])
    tier.late = True
    worker.hurry(first)
    worker.submit(first)
    assert [r.bad_blocks for r in worker.collect().results] == [{3, 4, 5}]
    late, tier.begun = tier.begun, []
    second = StepWork(8, loads=[order("r", hurried)])
    worker.hurry(second)
    [judged_by] = tier.begun or [second.loads[0]]
    worker.submit(second)
    worker._finish(result("r", ticket=late[0].ticket))
    if hurried:
        out = worker.collect()
        assert [r.bad_blocks for r in out.results] == [{3, 4, 5}], "the first one says nothing of the second"
        return
    worker._finish(result("r", 4, ticket=judged_by.ticket))
    out = worker.collect()
    assert out.finished == {"r"} and [r.bad_blocks for r in out.results] == [{4}]


def test_an_error_while_waiting_costs_the_load_not_the_engine(worker, monkeypatch, caplog):
    tier, work = worker._tier, StepWork(7, loads=[order("r")])
    monkeypatch.setattr(tier, "settle", lambda seconds: 1 / 0)
    worker.hurry(work)
    worker.submit(work)
    assert [r.bad_blocks for r in worker.collect().results] == [{3, 4, 5}]
    assert "waiting for a load failed" in caplog.text


def test_steps_without_such_loads_cost_nothing():
    hurried, done = Hurried(), [result("a")]
    hurried.settle(LoadOrder, object())  # as a far tier: nothing of it can be waited for
    assert hurried.judge(done) == (done, [])


# -- fetches -----------------------------------------------------------------------------------------------------------


def fetch(name, hurried=True, timeout=30.0):
    blocks = np.array([7, 8])
    return FetchOrder(name, "s/1", [GroupPull(0, blocks, blocks, blocks.astype(np.uint64), blocks)], timeout, hurried)


def fetched(name, *bad, ticket=0):
    return FetchResult(name, set(bad), bool(bad), "", 30, 0.1, ticket=ticket)


class Fetching:
    """As ``Tier``."""

    def __init__(self, owner):
        self.owner, self.late, self.log, self.bad = owner, False, [], ()
        self.known, self.begun = {}, []

    def introduce(self, sources):
        self.known.update(sources)

    def begin_now(self, orders, after):
        assert all(order.source in self.known for order in orders)
        self.log.append(("now", [o.request_id for o in orders]))
        self.begun += orders

    def begin(self, orders, after):
        self.log.append(("begin", [o.request_id for o in orders]))

    def settle(self, seconds):
        self.log.append(("settle", seconds))
        if not self.late:
            self.end()

    def end(self):
        begun, self.begun = self.begun, []
        for each in begun:
            self.owner._finish(fetched(each.request_id, *self.bad, ticket=each.ticket))

    def collect(self, idle):
        self.log.append("collect")


@pytest.fixture
def fetcher(worker):
    worker._fetching = Fetching(worker)
    return worker


def test_a_fetch_is_begun_before_the_forward_and_judged_with_its_step(fetcher):
    work = StepWork(7, fetches=[fetch("r"), fetch("s", False)], sources={"s/1": []})
    fetcher.hurry(work)
    assert fetcher._fetching.log == [("now", ["r"])]
    fetcher.submit(work)
    out = fetcher.collect()
    assert fetcher._fetching.log[1:] == [("settle", 30.0), ("begin", ["s"]), "collect"]
    assert [r.request_id for r in out.results] == ["r"] and not out.finished and not out.bad_blocks
    fetcher._finish(fetched("s"))
    assert fetcher.collect().finished == {"s"}


@pytest.mark.parametrize("how", ["not set up", "never begun", "raised", "late", "wrong"])
def test_a_fetch_that_did_not_come_in_time_failed(fetcher, how, monkeypatch):
    fetching, work = fetcher._fetching, StepWork(7, fetches=[fetch("r")], sources={"s/1": []})
    if how == "not set up":
        fetcher._fetching = None
    elif how == "raised":
        monkeypatch.setattr(fetching, "begin_now", lambda orders, after: 1 / 0)
    elif how == "wrong":
        fetching.bad = (7, 8)
    fetching.late = how == "late"
    if how != "never begun":
        fetcher.hurry(work)
    fetcher.submit(work)
    out = fetcher.collect()
    [judged] = out.results
    assert isinstance(judged, FetchResult) and judged.bad_blocks == out.bad_blocks == {7, 8} and judged.failed
    assert out.failed == {"r"} and not out.finished and bool(judged.reason) == (how != "wrong")
    if how == "late":
        fetching.end()
    fetcher._outstanding["r"] = fetch("r", False)
    fetcher._finish(fetched("r"))
    assert fetcher.collect().finished == {"r"}
    assert not fetcher.collect().results


def test_a_load_and_a_fetch_of_one_request_are_two(fetcher):
    work = StepWork(7, loads=[order("r")], fetches=[fetch("r")], sources={"s/1": []})
    fetcher._tier.bad, fetcher._fetching.late = (4,), True
    fetcher.hurry(work)
    fetcher.submit(work)
    out = fetcher.collect()
    assert [(type(r), r.bad_blocks) for r in out.results] == [(LoadResult, {4}), (FetchResult, {7, 8})]
    fetcher._outstanding["r"] = fetch("r", False)
    fetcher._finish(result("r"))
    assert fetcher.collect().finished == {"r"}, "the load is another one"
    fetcher._fetching.end()
    assert not fetcher.collect().results
