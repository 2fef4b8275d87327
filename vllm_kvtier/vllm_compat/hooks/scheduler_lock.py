"""A lock for vLLM's scheduler and its block pool, which have none.

Another engine of the node wants blocks of this engine's prefix cache pinned at once: a step of the model can take
longer than recomputing them. So the scheduler's methods that use the pool hold this lock, and other threads run *jobs*
between them, while the device computes or the engine sleeps. No thread waits for the lock: the scheduler thread runs
the jobs that came meanwhile when it releases the lock.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm_kvtier.containment import Containment

# All methods of the scheduler that allocate, free or evict blocks (0.25.1 to 0.33).
METHODS = ("schedule", "update_from_output", "finish_requests", "reset_prefix_cache", "reset_connector_cache")


class SchedulerLock:
    def __init__(self, containment: Containment) -> None:
        self._contain = containment
        self._lock = threading.RLock()
        self._depth = 0  # of nested calls on the scheduler thread; under the lock
        self._jobs: deque[Callable[[], None]] = deque()
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
                with self._lock:
                    self._depth += 1
                    try:
                        return method(*args, **kwargs)
                    finally:
                        self._depth -= 1
            finally:
                if self._jobs:
                    self._contain.attempt("jobs behind the scheduler", self._run)

        return holding

    def run_when_free(self, job: Callable[[], None]) -> None:
        """Run ``job`` under the lock: now on this thread if it is free, else on the scheduler thread when that releases
        it. Any thread. A job must not wait."""
        self._jobs.append(job)
        self._run()

    def _run(self) -> None:
        # The holder of the lock checks again after releasing it, so that no job is left.
        while self._jobs and self._lock.acquire(blocking=False):
            try:
                if self._depth:
                    return  # the scheduler thread, in a nested call
                while self._jobs:
                    job = self._jobs.popleft()
                    try:
                        job()
                    except Exception:  # an error of a peer's job must not reach this engine
                        self._contain.failed("a job under the scheduler's lock")
            finally:
                self._lock.release()
