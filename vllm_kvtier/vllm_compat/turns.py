"""When vLLM's scheduler is at work on its block pool, which has no lock, and when somebody else may look at it.

Another engine of the node wants blocks of this one's prefix cache pinned at once; a step of the model can take longer
than computing them. So the scheduler's methods that touch the pool become *turns* of the engine's thread, and between
them, while the device computes or the engine sleeps, another thread has its own. Nobody waits for a turn to end: what
comes in the middle of one is done by the engine's thread at its end.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm_kvtier.containment import Containment

# All of the scheduler's methods in which blocks are handed out, freed or forgotten (0.25.1 to 0.33).
METHODS = ("schedule", "update_from_output", "finish_requests", "reset_prefix_cache", "reset_connector_cache")


class Turns:
    def __init__(self, containment: Containment) -> None:
        self._contain = containment
        self._lock = threading.RLock()
        self._depth = 0  # of the engine's thread; read and written under the lock
        self._jobs: deque[Callable[[], None]] = deque()
        self._scheduler: Any = None

    @property
    def known(self) -> bool:
        """Whether turns are told apart: from when the engine's loop has started. Before, nothing may be run."""
        return self._scheduler is not None

    def watch(self, scheduler: Any) -> None:
        """Engine's thread, outside any turn: from now on this scheduler's methods are turns. Idempotent.

        Of a scheduler that lacks one of them, as one of the user's own may, it is not known when it is at work."""
        if scheduler is self._scheduler or not all(hasattr(scheduler, name) for name in METHODS):
            return
        for name in METHODS:
            setattr(scheduler, name, self.turn(getattr(scheduler, name)))
        self._scheduler = scheduler

    def turn(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method`` as a turn of the engine's thread; may be nested. It runs once, and what it raises passes."""

        @functools.wraps(method)
        def turn(*args: Any, **kwargs: Any) -> Any:
            try:
                with self._lock:
                    self._depth += 1
                    try:
                        return method(*args, **kwargs)
                    finally:
                        self._depth -= 1
            finally:
                self._contain.attempt("end of a turn", self._run)

        return turn

    def run(self, job: Callable[[], None]) -> None:
        """Run ``job`` between turns: now, on this thread, or at the end of the present turn, on the engine's. Any
        thread. It must not wait for anything."""
        self._jobs.append(job)
        self._run()

    def _run(self) -> None:
        # Whoever holds the lock looks again after giving it back, so that no job is left behind.
        while self._jobs and self._lock.acquire(blocking=False):
            try:
                if self._depth:
                    return  # the engine's thread, in an outer turn
                while self._jobs:
                    job = self._jobs.popleft()
                    try:
                        job()
                    except Exception:  # another engine's wish must not cost this one anything
                        self._contain.failed("a job between the scheduler's turns")
            finally:
                self._lock.release()
