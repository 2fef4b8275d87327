"""A lock for vLLM's scheduler and its block pool, which have none.

Another engine of the node wants blocks of this engine's prefix cache pinned at once: a step of the model can take
longer than recomputing them. So the scheduler's methods that use the pool hold this lock, and other threads run *jobs*
between them, while the device computes or the engine sleeps. No other thread waits for the lock: the scheduler thread
runs the jobs that came meanwhile when it releases the lock. Peers decide how many come. So no other thread begins one
while the scheduler thread waits, and that spends ``JOBS_SECONDS`` on them; those left are refused.
"""

import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm_kvtier.containment import Containment
from vllm_kvtier.vllm_compat.hooks.interpreter import SwitchInterval

# All methods of the scheduler that allocate, free or evict blocks (0.25.1 to 0.33).
METHODS = ("schedule", "update_from_output", "finish_requests", "reset_prefix_cache", "reset_connector_cache")
JOBS_SECONDS = 10e-3  # after which a release of the lock begins no further job that can be refused

Job = Callable[[], object]


class SchedulerLock:
    def __init__(self, containment: Containment, clock: Callable[[], float] = time.monotonic) -> None:
        self._contain, self._clock = containment, clock
        self._lock = threading.RLock()
        self._depth = 0  # of nested calls on the scheduler thread; under the lock
        self._wanted = False  # the scheduler thread waits for the lock
        self._jobs: deque[tuple[Job, Job | None]] = deque()  # and what refuses each
        self._scheduler: Any = None

    @property
    def known(self) -> bool:
        """Whether the scheduler's methods hold the lock, which they do once it was found. Before, run no job."""
        return self._scheduler is not None

    def install(self, scheduler: Any) -> None:
        """Make this scheduler's methods hold the lock. Scheduler thread, outside of them. Idempotent.

        Does nothing for a scheduler (of the user's own) that lacks one of the methods: its use of the pool is
        unknown."""
        if scheduler is self._scheduler or not all(hasattr(scheduler, name) for name in METHODS):
            return
        for name in METHODS:
            setattr(scheduler, name, self.held(getattr(scheduler, name)))
        self._scheduler = scheduler

    def held(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method``, holding the lock; calls may be nested. It runs once, and its exceptions pass."""

        @functools.wraps(method)
        def holding(*args: Any, **kwargs: Any) -> Any:
            try:
                self._wanted = True
                with self._lock:
                    self._wanted = False
                    if not self._depth:
                        sys.setswitchinterval(SwitchInterval.own)
                    self._depth += 1
                    try:
                        return method(*args, **kwargs)
                    finally:
                        self._depth -= 1
            finally:
                if self._jobs:
                    self._contain.attempt("jobs behind the scheduler", self._run)

        return holding

    def run_when_free(self, job: Job, refuse: Job | None = None) -> None:
        """Run ``job`` under the lock: now on this thread if it is free, else on the scheduler thread when that releases
        it. Any thread. A job must not wait. ``refuse`` is run in its place if there are too many; None: never."""
        self._jobs.append((job, refuse))
        self._run()

    def _run(self) -> None:
        # The holder of the lock checks again after releasing it, so that no job is left.
        until = self._clock() + JOBS_SECONDS
        while self._jobs and not self._wanted and self._lock.acquire(blocking=False):
            try:
                if self._depth:
                    return  # the scheduler thread, in a nested call
                while self._jobs and not self._wanted:
                    job, refuse = self._jobs.popleft()
                    try:
                        (refuse if refuse is not None and self._clock() >= until else job)()
                    except Exception:  # an error of a peer's job must not reach this engine
                        self._contain.failed("a job under the scheduler's lock")
            finally:
                self._lock.release()
