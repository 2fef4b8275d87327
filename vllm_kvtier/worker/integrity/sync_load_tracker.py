"""Tracks synchronous loads and fetches: begun before their step's forward, verified with its output.

The scheduler side must get the result of each with that very output. vLLM must not get it as the result of an
asynchronous load: no request waits for one, and vLLM would end the engine. So a load that was not begun before the
forward, or did not end in time, is reported as failed, and its own result is dropped when it comes. The request may
have another load by then, even a synchronous one: each has a ``load_id`` of its own, which its result repeats.

A late load writes no block of another request. A device runs the forward behind the copies, and the scheduler side
gets the result when that forward has ended; giving up only ends this thread's wait. On a host all loads end in
``begin``, and a late copy begins no further piece.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.results import Result, failed_result
from vllm_kvtier.jobs.transfer_jobs import FailedJob, LoadJob, PeerFetchJob
from vllm_kvtier.logs import get_logger

logger = get_logger(__name__)

SyncJob = LoadJob | PeerFetchJob | FailedJob


class SyncLoadTracker:
    """On the model runner's thread only."""

    def __init__(self) -> None:
        self.due: list[SyncJob] = []  # of the step whose output is being made
        self._begun: dict[int, float] = {}  # by load_id: when the load was begun that the forward waits for
        self._load_ids = itertools.count(1)

    def begin(self, jobs: list[Any], how: Callable[[list[Any]], None]) -> None:
        """Begin ``jobs``, of one kind, by ``how``; before the forward is launched."""
        now = time.monotonic()
        for job in jobs:
            job.load_id = next(self._load_ids)
        try:
            how(jobs)
        except KVTierError as error:
            logger.info("kvtier: synchronous load: not begun (%s); its blocks are recomputed", error)
            return
        except Exception:  # ``wait_until_done`` waits for those that had begun
            logger.exception("kvtier: synchronous load: beginning failed; its blocks are recomputed")
            return
        self._begun.update((job.load_id, now) for job in jobs)

    def wait_until_done(self, kind: type, worker: Any) -> None:
        """Wait by ``worker.wait_until_done(seconds)`` until the due jobs of this class have ended. Call when the
        forward was launched. A worker without synchronous loads needs no such method."""
        timeouts = [job.timeout for job in self.due if isinstance(job, kind)]
        if not timeouts:
            return
        try:
            worker.wait_until_done(max(timeouts))
        except Exception:  # it costs these requests their loads, not all others the engine
            logger.exception("kvtier: synchronous load: waiting for a load failed; its blocks are recomputed")

    def split(self, results: list[Any]) -> tuple[list[Any], list[Result]]:
        """Split results into (those of asynchronous jobs, one for each due job). ``clear_due`` must follow."""
        # An id that is not due is late, and its result is dropped.
        found = {result.load_id: result for result in results}
        verified = []
        for job in self.due:
            began = self._begun.get(job.load_id)
            result = found.get(job.load_id) if began is not None else None
            verified.append(_failed(job, began) if result is None else result)
        return [result for result in results if not result.load_id], verified

    def clear_due(self) -> None:
        for job in self.due:
            self._begun.pop(job.load_id, None)
        self.due = []


def _failed(job: SyncJob, began: float | None) -> Result:
    what = "copy" if isinstance(job, PeerFetchJob) else "load"
    reason = f"the {what} {'was not begun before' if began is None else 'did not end within'} its step"
    return failed_result(job, reason, 0.0 if began is None else time.monotonic() - began)
