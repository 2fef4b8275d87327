"""How far vLLM goes through a queue of requests that are not answered yet, in one step."""

import time
from types import SimpleNamespace

import pytest

from vllm_kvtier.vllm_compat.hooks.waiting_loop import LOOKED_UP, MAX_SKIPPED, WaitingLoop


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
