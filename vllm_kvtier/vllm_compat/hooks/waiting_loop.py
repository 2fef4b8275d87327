"""Ends vLLM's loop over its waiting requests early, in a step in which many of them were skipped.

For a request that the connector gives no answer for yet, vLLM goes on to the next one, which takes nothing of the
step's budget. So one ``schedule()`` may go through the whole queue, while the running requests wait. vLLM (0.25.1 to
0.33) leaves the loop when as many requests run as may, and reads that limit for each request. It is lowered to those
that run, until ``schedule()`` returns. The next step begins with the requests that were skipped, in their order.
"""

import functools
import math
import time
from typing import Any

# About 5 ms of a step. Requests behind wait a step longer; none of those before them waits without a time limit.
MAX_SKIPPED = 256
# What a request counts that was looked up in this step: sending a lookup and receiving the answer take about 0.3 ms.
LOOKED_UP = 8


class WaitingLoop:
    """Scheduler thread."""

    def __init__(self) -> None:
        self._scheduler: Any = None
        self._limit = ""  # the attribute
        self._skipped, self._began = 0, math.inf  # the latter: when this step began

    def install(self, scheduler: Any) -> None:
        """Outside of ``schedule``. Idempotent. Does nothing for a scheduler of the user's own without such a limit."""
        # Up to 0.30 there is a single limit.
        limits = [name for name in ("max_num_active_reqs", "max_num_running_reqs") if hasattr(scheduler, name)]
        if scheduler is self._scheduler or not limits:
            return
        schedule, limit = scheduler.schedule, limits[0]

        @functools.wraps(schedule)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            most, self._skipped, self._began = getattr(scheduler, limit), 0, time.monotonic()
            try:
                return schedule(*args, **kwargs)
            finally:
                setattr(scheduler, limit, most)

        scheduler.schedule = bounded
        self._scheduler, self._limit = scheduler, limit

    def skipped(self, looked_up_at: float = 0.0) -> None:
        """vLLM is about to skip a request. ``looked_up_at``: when (monotonic) it was last looked up."""
        self._skipped += LOOKED_UP if looked_up_at >= self._began else 1
        if self._skipped >= MAX_SKIPPED and self._scheduler is not None:
            setattr(self._scheduler, self._limit, len(self._scheduler.running))
