"""vLLM's loop over its waiting requests: it ends early where many were skipped, and those that are loaded come first.

For a request that the connector gives no answer for yet, vLLM goes on to the next one, which takes nothing of the
step's budget. So one ``schedule()`` may go through the whole queue, while the running requests wait. vLLM (0.25.1 to
0.33) leaves the loop when as many requests run as may, and reads that limit for each request. It is lowered to those
that run, until ``schedule()`` returns. The next step begins with the requests that were skipped, in their order.
"""

import functools
import math
import time
from collections.abc import Iterator
from typing import Any

from vllm.v1.request import Request, RequestStatus

from vllm_kvtier.containment import Containment
from vllm_kvtier.vllm_compat.hooks.admission import READY

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


class LoadedFirst:
    """Up to vLLM 0.30: in each step the requests whose load has ended come before all others, as from 0.31 on.

    They have their blocks, and run when the loop comes to them. But it ends at a request that there are not enough free
    blocks for, and one whose answer came late stands before those that were loaded meanwhile: it would wait for their
    blocks, and they for it. Scheduler thread.
    """

    def __init__(self, containment: Containment):
        self._contain, self._scheduler = containment, None
        self.queue: Any = ()  # during ``schedule``: those that come first
        self._names: list[str] = []  # of requests that were loaded, and perhaps do not run yet

    def install(self, scheduler: Any) -> None:
        """Outside of ``schedule``. Idempotent."""
        if scheduler is self._scheduler or not hasattr(scheduler, "_select_waiting_queue_for_scheduling"):
            return
        from vllm.v1.core.sched.request_queue import create_request_queue

        self._scheduler, self.queue = scheduler, create_request_queue(scheduler.policy)
        select, schedule = scheduler._select_waiting_queue_for_scheduling, scheduler.schedule

        @functools.wraps(select)
        def selected(*args: Any, **kwargs: Any) -> Any:
            return self.queue or select(*args, **kwargs)

        @functools.wraps(schedule)
        def loaded_first(*args: Any, **kwargs: Any) -> Any:
            if self._names or scheduler.finished_recving_kv_req_ids:
                self._contain.attempt("loaded requests first", self._take_out)
            try:
                return schedule(*args, **kwargs)
            finally:
                if self.queue:
                    self._contain.attempt("the queue", self._put_back, repair=self._put_back)

        scheduler._select_waiting_queue_for_scheduling, scheduler.schedule = selected, loaded_first

    def _take_out(self) -> None:
        scheduler, loaded = self._scheduler, sorted(self._loaded(), key=lambda request: request.arrival_time)
        self._names = [request.request_id for request in loaded]
        queues = scheduler.skipped_waiting, scheduler.waiting
        if len(loaded) == sum(map(len, queues)):
            return  # none stands before them; and vLLM's loop ends when both queues are empty
        if len(scheduler.running) >= scheduler.max_num_running_reqs:
            return  # none is scheduled
        for queue in queues:
            queue.remove_requests(loaded)
        for request in loaded:
            self.queue.add_request(request)

    def _loaded(self) -> Iterator[Request]:
        requests, finished = self._scheduler.requests, self._scheduler.finished_recving_kv_req_ids
        for name in dict.fromkeys([*self._names, *finished]):
            request = requests.get(name)
            if request is None:
                continue
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                ready = name in finished
            else:
                ready = request.status in READY and request.num_computed_tokens > 0
            if ready:
                yield request

    def _put_back(self) -> None:
        left = list(self.queue)
        self.queue.remove_requests(left)
        for request in reversed(left):
            if request.num_computed_tokens:
                self._scheduler.skipped_waiting.prepend_request(request)
            else:  # its load was taken back, or failed: before those with blocks it would stop them
                self._scheduler.skipped_waiting.add_request(request)
