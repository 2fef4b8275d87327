"""Turns of vLLM's scheduler: what other threads want done happens between them, once, and nobody waits."""

import threading
import time
from types import SimpleNamespace

import pytest
from support import Uncontained

from vllm_kvtier.containment import Containment
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.turns import Turns


class Scheduler:
    """Whose pool breaks if two threads are at it."""

    def __init__(self):
        self.inside = 0
        self.during = lambda: None

    def schedule(self, *args, **kwargs):
        self.inside += 1
        assert self.inside == 1
        self.during()
        self.inside -= 1
        return args, kwargs

    def update_from_output(self, output):
        return self.schedule(output)  # one within the other

    def finish_requests(self):
        raise ValueError("vLLM's own")

    def reset_prefix_cache(self):
        return True

    def reset_connector_cache(self):
        return True


@pytest.fixture
def turns():
    made = Turns(Uncontained())
    made.scheduler = Scheduler()
    assert not made.known
    made.watch(made.scheduler)
    assert made.known
    return made


def test_methods_do_what_they_did(turns):
    assert turns.scheduler.schedule(1, x=2) == ((1,), {"x": 2})
    assert turns.scheduler.update_from_output("o") == (("o",), {})
    with pytest.raises(ValueError, match="vLLM's own"):
        turns.scheduler.finish_requests()
    turns.watch(turns.scheduler)  # again
    ran = []
    turns.run(lambda: ran.append(1))
    assert ran == [1], "a turn that raised is over"


def test_a_job_is_done_at_once_between_turns_and_at_the_end_within_one(turns):
    ran, seen = [], []

    def another_thread():
        thread = threading.Thread(target=lambda: turns.run(lambda: ran.append(threading.get_ident())))
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "it waited for the turn to end"
        seen.append(list(ran))

    another_thread()
    assert len(seen[0]) == 1, "nobody had a turn"
    turns.scheduler.during = another_thread
    turns.scheduler.update_from_output("o")
    assert seen[1] == seen[0], "in the middle of a turn it is left"
    assert len(ran) == 2 and ran[1] == threading.get_ident(), "to the thread that had it"


def test_a_job_that_fails_costs_nobody(turns, caplog):
    ran, turns._contain = [], Containment(Counters())
    turns.run(lambda: 1 / 0)
    turns.run(lambda: ran.append(1))
    assert ran == [1] and "ZeroDivisionError" in caplog.text
    turns.scheduler.schedule()


def test_a_job_may_ask_for_another(turns):
    ran = []
    turns.run(lambda: turns.run(lambda: ran.append(1)))
    assert ran == [1]


def test_threads_never_meet_and_no_job_is_lost(turns):
    """Four threads, each with thousands of jobs, beside a scheduler that is always at work."""
    pool = SimpleNamespace(busy=False, done=0)

    def job():
        assert not pool.busy and not turns.scheduler.inside
        pool.busy = True
        time.sleep(0)
        pool.done += 1
        pool.busy = False

    def during():
        assert not pool.busy
        time.sleep(0)

    turns.scheduler.during = during
    failures = []

    def asker():
        try:
            for _ in range(1000):
                turns.run(job)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=asker) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        turns.scheduler.schedule()
        turns.scheduler.update_from_output(1)
    for thread in threads:
        thread.join()
    turns.turn(lambda: None)()
    assert not failures and pool.done == 4000


def test_watch_of_a_scheduler_that_lacks_a_method_wraps_none_of_them():
    turns, bare = Turns(Uncontained()), SimpleNamespace(schedule=(schedule := lambda: 7))
    turns.watch(None)
    assert not turns.known
    turns.watch(bare)
    assert not turns.known and bare.schedule is schedule


def test_vllms_schedulers_have_them():
    from vllm.v1.core.sched.scheduler import Scheduler as Real

    for name in ("schedule", "update_from_output", "finish_requests", "reset_prefix_cache", "reset_connector_cache"):
        assert callable(getattr(Real, name))
