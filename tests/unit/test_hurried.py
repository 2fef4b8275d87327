"""Loads that a step's forward waits for, on the worker: each is judged in its own step, and vLLM hears of none."""

from types import SimpleNamespace

import numpy as np
import pytest
from test_worker_half import half  # noqa: F401

from vllm_kvtier.worker.hurried import Hurried
from vllm_kvtier.worker.queues import LoadResult
from vllm_kvtier.worker.work import GroupLoad, LoadOrder, StepWork


def order(name, hurried=True):
    blocks = np.array([3, 4, 5])
    return LoadOrder(name, [GroupLoad(0, blocks, blocks.astype(np.uint64), blocks)], 60.0, "life", hurried)


def result(name, *bad):
    return LoadResult(name, set(bad), "", 30, 0.1, 0.0)


class Tier:
    """Loads end in ``settle``, unless they are ``late``."""

    def __init__(self, owner):
        self.owner, self.late, self.log, self.bad = owner, False, [], ()

    def load_now(self, loads):
        self.log.append(("now", [o.request_id for o in loads]))

    def load(self, loads):
        self.log.append(("load", [o.request_id for o in loads]))

    def settle(self, seconds):
        self.log.append(("settle", seconds))
        if not self.late:
            self.owner._finish(result("r", *self.bad))

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
        worker._finish(result("r"))
        assert not worker.collect().results
    worker._finish(result("r"))
    assert worker.collect().finished == {"r"}


def test_steps_without_such_loads_cost_nothing():
    hurried, done = Hurried(), [result("a")]
    hurried.settle(SimpleNamespace())
    assert hurried.judge(done) == (done, [])
