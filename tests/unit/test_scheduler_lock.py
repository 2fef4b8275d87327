"""The scheduler lock: jobs of other threads run between vLLM's calls, once, and no thread waits."""

import threading
import time
from types import SimpleNamespace

import pytest
from support import Clock, Uncontained

from vllm_kvtier.containment import Containment
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.hooks.scheduler_lock import JOBS_SECONDS, SchedulerLock


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
def lock():
    made = SchedulerLock(Uncontained())
    made.scheduler = Scheduler()
    assert not made.known
    made.install(made.scheduler)
    assert made.known
    return made


def test_scheduler_lock_keeps_results_and_errors_of_methods(lock):
    assert lock.scheduler.schedule(1, x=2) == ((1,), {"x": 2})
    assert lock.scheduler.update_from_output("o") == (("o",), {})
    with pytest.raises(ValueError, match="vLLM's own"):
        lock.scheduler.finish_requests()
    lock.install(lock.scheduler)  # again
    ran = []
    lock.run_when_free(lambda: ran.append(1))
    assert ran == [1], "a turn that raised is over"


def test_scheduler_lock_runs_job_at_once_or_when_freed(lock):
    ran, seen = [], []

    def another_thread():
        thread = threading.Thread(target=lambda: lock.run_when_free(lambda: ran.append(threading.get_ident())))
        thread.start()
        thread.join(10)
        assert not thread.is_alive(), "it waited for the turn to end"
        seen.append(list(ran))

    another_thread()
    assert len(seen[0]) == 1, "no job ran"
    lock.scheduler.during = another_thread
    lock.scheduler.update_from_output("o")
    assert seen[1] == seen[0], "in the middle of a turn it is left"
    assert len(ran) == 2 and ran[1] == threading.get_ident(), "to the thread that had it"


def test_scheduler_lock_failed_job_does_not_affect_others(lock, caplog):
    ran, lock._contain = [], Containment(Counters())
    lock.run_when_free(lambda: 1 / 0)
    lock.run_when_free(lambda: ran.append(1))
    assert ran == [1] and "ZeroDivisionError" in caplog.text
    lock.scheduler.schedule()


def test_scheduler_lock_job_may_start_another_job(lock):
    ran = []
    lock.run_when_free(lambda: lock.run_when_free(lambda: ran.append(1)))
    assert ran == [1]


def test_scheduler_lock_threads_never_overlap_and_lose_no_job(lock):
    """Four threads, each with thousands of jobs, beside a scheduler that is always at work."""
    pool = SimpleNamespace(busy=False, done=0)

    def job():
        assert not pool.busy and not lock.scheduler.inside
        pool.busy = True
        time.sleep(0)
        pool.done += 1
        pool.busy = False

    def during():
        assert not pool.busy
        time.sleep(0)

    lock.scheduler.during = during
    failures = []

    def asker():
        try:
            for _ in range(1000):
                lock.run_when_free(job)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=asker) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        lock.scheduler.schedule()
        lock.scheduler.update_from_output(1)
    for thread in threads:
        thread.join()
    lock.held(lambda: None)()
    assert not failures and pool.done == 4000


def test_scheduler_lock_release_refuses_jobs_beyond_its_time():
    """A peer that asks faster than its jobs run would keep vLLM's thread from the next step for as long as it asks."""
    clock, done, refused, kept = Clock(), [], [], []
    lock = SchedulerLock(Uncontained(), clock)

    def job():
        clock.now += JOBS_SECONDS / 8
        done.append(1)

    def step():
        for _ in range(1000):
            lock.run_when_free(job, lambda: refused.append(1))
        lock.run_when_free(lambda: kept.append(1))

    lock.held(step)()
    assert (len(done), len(refused), len(kept)) == (8, 992, 1)
    lock.held(step)()
    assert (len(done), len(refused), len(kept)) == (16, 1984, 2)


class SignallingLock:
    """Says when a thread is about to wait for it."""

    def __init__(self, lock):
        self._lock, self.waits = lock, threading.Event()
        self.acquire, self.release = lock.acquire, lock.release

    def __enter__(self):
        self.waits.set()
        return self._lock.__enter__()

    def __exit__(self, *error):
        return self._lock.__exit__(*error)


def test_scheduler_lock_begins_no_job_while_scheduler_waits(lock):
    signal = lock._lock = SignallingLock(lock._lock)
    begun, order = threading.Event(), []

    def first():
        begun.set()
        assert signal.waits.wait(10)
        lock.run_when_free(lambda: order.append("second"))

    def asks():
        lock.run_when_free(first)
        lock.run_when_free(lambda: order.append("third"))

    thread = threading.Thread(target=asks)
    thread.start()
    assert begun.wait(10)
    lock.scheduler.during = lambda: order.append("step")
    lock.scheduler.schedule()
    thread.join(10)
    assert order[0] == "step" and sorted(order) == ["second", "step", "third"]


def test_scheduler_lock_install_on_incomplete_scheduler_wraps_nothing():
    lock, bare = SchedulerLock(Uncontained()), SimpleNamespace(schedule=(schedule := lambda: 7))
    lock.install(None)
    assert not lock.known
    lock.install(bare)
    assert not lock.known and bare.schedule is schedule


def test_vllm_scheduler_has_the_locked_methods():
    from vllm.v1.core.sched.scheduler import Scheduler as Real

    for name in ("schedule", "update_from_output", "finish_requests", "reset_prefix_cache", "reset_connector_cache"):
        assert callable(getattr(Real, name))
