"""How far vLLM goes through a queue of requests that are not answered yet, in one step."""

import itertools
import time
from types import SimpleNamespace

import pytest
from support import Uncontained
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.request import RequestStatus

from vllm_kvtier.containment import Containment
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.hooks.waiting_loop import LOOKED_UP, MAX_SKIPPED, LoadedFirst, WaitingLoop


class Scheduler:
    """With vLLM's loop over the waiting requests."""

    def __init__(self, loop, limit, running=3):
        self.loop, self.limit, self.looked_up, self.before = loop, limit, False, time.monotonic()
        setattr(self, limit, 8)
        self.running, self.waiting = list(range(running)), list(range(10_000))
        self.asked: list[int] = []

    def schedule(self):
        self.asked = []
        for request in self.waiting:
            if len(self.running) >= getattr(self, self.limit):
                break
            self.asked.append(request)
            self.loop.skipped(time.monotonic() if self.looked_up else self.before)
        if self.asked == [0]:
            raise ValueError("vLLM's own")


@pytest.mark.parametrize("limit", ["max_num_active_reqs", "max_num_running_reqs"])
@pytest.mark.parametrize("looked_up", [False, True])
def test_waiting_loop_ends_after_some_skipped_requests_in_each_step(limit, looked_up):
    loop = WaitingLoop()
    scheduler = Scheduler(loop, limit)
    loop.install(scheduler)
    loop.install(scheduler)
    scheduler.looked_up = looked_up
    for _ in range(3):
        scheduler.schedule()
        assert scheduler.asked == list(range(MAX_SKIPPED // (LOOKED_UP if looked_up else 1)))
        assert getattr(scheduler, limit) == 8


def test_waiting_loop_limit_is_back_after_an_exception():
    loop = WaitingLoop()
    scheduler = Scheduler(loop, "max_num_active_reqs")
    loop.install(scheduler)
    scheduler.waiting = [0]
    with pytest.raises(ValueError, match="vLLM's own"):
        scheduler.schedule()
    assert scheduler.max_num_active_reqs == 8


def test_waiting_loop_leaves_other_schedulers_alone():
    loop = WaitingLoop()
    scheduler = SimpleNamespace(schedule=lambda: "step")
    loop.install(scheduler)
    for _ in range(2 * MAX_SKIPPED):
        loop.skipped(time.monotonic())
    assert vars(scheduler).keys() == {"schedule"} and scheduler.schedule() == "step"


# -- loaded requests first, up to vLLM 0.30 ----------------------------------------------------------------------------


class Waiting:
    def __init__(self, name, needs, priority=0, status=RequestStatus.WAITING, computed=0):
        self.request_id, self.needs, self.priority, self.status = name, needs, priority, status
        self.num_computed_tokens, self.arrival_time = computed, next(_arrivals)

    def __lt__(self, other):
        return (self.priority, self.arrival_time) < (other.priority, other.arrival_time)


_arrivals = itertools.count()
LOADS = RequestStatus.WAITING_FOR_REMOTE_KVS


class OldScheduler:
    """vLLM 0.30's queues: its loop ends at the first request that it has no blocks for."""

    def __init__(self, policy, *waiting, free=2):
        self.policy, self.free, self.running, self.max_num_running_reqs = policy, free, [], 8
        self.waiting, self.skipped_waiting = create_request_queue(policy), create_request_queue(policy)
        self.requests, self.finished_recving_kv_req_ids = {r.request_id: r for r in waiting}, set()
        for request in waiting:
            (self.skipped_waiting if request.status is LOADS else self.waiting).add_request(request)

    def _select_waiting_queue_for_scheduling(self):
        queues = [queue for queue in (self.skipped_waiting, self.waiting) if queue]
        return queues[0] if self.policy is SchedulingPolicy.FCFS else min(queues, key=lambda q: q.peek_request())

    def schedule(self):
        skipped = create_request_queue(self.policy)
        while self.waiting or self.skipped_waiting:
            queue = self._select_waiting_queue_for_scheduling()
            request = queue.peek_request()
            if request.status is LOADS:
                if request.request_id not in self.finished_recving_kv_req_ids:
                    skipped.prepend_request(queue.pop_request())
                    continue
                self.finished_recving_kv_req_ids.remove(request.request_id)
                request.status = RequestStatus.WAITING
            if request.needs > self.free:
                break
            self.free -= request.needs
            self.running.append(queue.pop_request().request_id)
            request.status = RequestStatus.RUNNING
        self.skipped_waiting.prepend_requests(skipped)

    def names(self):
        return [request.request_id for queue in (self.skipped_waiting, self.waiting) for request in queue]


def loaded(name, needs=0, priority=0):
    return Waiting(name, needs, priority, LOADS, computed=8)


def with_loaded_first(scheduler, contain=None):
    first = LoadedFirst(contain or Uncontained())
    first.install(scheduler)
    first.install(scheduler)
    return first


@pytest.mark.parametrize("policy", list(SchedulingPolicy))
def test_loaded_requests_come_before_one_that_lacks_their_blocks(policy):
    """Also if that one has a higher priority, or waits in the queue of those that were skipped."""
    old, b, c, d = Waiting("old", 9, -1), loaded("b", priority=2), loaded("c", priority=1), loaded("d")
    scheduler = OldScheduler(policy, old, b, c, d)
    scheduler.waiting.remove_requests([old])
    scheduler.skipped_waiting.prepend_request(old)
    with_loaded_first(scheduler)
    scheduler.schedule()
    assert not scheduler.running, "none has loaded"
    scheduler.finished_recving_kv_req_ids |= {"b", "c", "gone"}
    scheduler.schedule()
    assert scheduler.running == (["b", "c"] if policy is SchedulingPolicy.FCFS else ["c", "b"])
    assert sorted(scheduler.names()) == ["d", "old"]
    scheduler.finished_recving_kv_req_ids.add("d")
    scheduler.schedule()
    assert scheduler.running[2:] == ["d"] and scheduler.names() == ["old"]


@pytest.mark.parametrize("policy", list(SchedulingPolicy))
def test_loaded_requests_keep_their_place_until_they_run(policy):
    """One lacks a block for its next token: it, and those loaded behind it, are first in the next step as well."""
    scheduler = OldScheduler(policy, Waiting("old", 9, -1), loaded("b", needs=3), loaded("c", needs=3))
    first = with_loaded_first(scheduler)
    scheduler.finished_recving_kv_req_ids |= {"b", "c"}
    scheduler.schedule()
    assert not scheduler.running and sorted(scheduler.names()) == ["b", "c", "old"] and not first.queue
    scheduler.free = 6
    scheduler.schedule()
    assert scheduler.running == ["b", "c"] and scheduler.names() == ["old"]
    scheduler.free = 9
    scheduler.schedule()
    assert scheduler.running == ["b", "c", "old"]


def test_loaded_requests_alone_stay_in_the_queues():
    """The loop ends when both are empty."""
    scheduler = OldScheduler(SchedulingPolicy.FCFS, loaded("b"), loaded("c"))
    with_loaded_first(scheduler)
    scheduler.finished_recving_kv_req_ids |= {"b", "c"}
    scheduler.schedule()
    assert scheduler.running == ["b", "c"]


@pytest.mark.parametrize("method", ["_take_out", "_put_back"])
def test_loaded_requests_are_not_lost_by_an_internal_error(method, monkeypatch):
    scheduler = OldScheduler(SchedulingPolicy.FCFS, Waiting("old", 9), loaded("b", needs=3), loaded("c"))
    first = with_loaded_first(scheduler, Containment(Counters()))
    scheduler.finished_recving_kv_req_ids |= {"b", "c"}
    original, raised = getattr(first, method), []

    def once():
        if not raised:
            raised.append(1)
            raise RuntimeError("ours")
        original()

    monkeypatch.setattr(first, method, once)
    scheduler.schedule()
    assert raised and sorted(scheduler.names()) == ["b", "c", "old"]
    scheduler.free = 3
    scheduler.schedule()
    assert sorted(scheduler.running) == ["b", "c"]
