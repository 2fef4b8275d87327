"""The jobs that were submitted to this rank and the results that vLLM does not know yet."""

import threading
from collections.abc import Iterable

from vllm_kvtier.jobs.results import Result, StepResults, failed_result
from vllm_kvtier.jobs.transfer_jobs import FailedJob, LoadJob, PeerFetchJob, PullJob, StepWork
from vllm_kvtier.worker.integrity.sync_load_tracker import SyncLoadTracker

Job = LoadJob | PeerFetchJob | PullJob | FailedJob
LOST = "an internal error; see the log"  # reason of a job that no part of the worker knows


class JobTable:
    """``finish`` is called on any thread, all else on the model runner's. ``outstanding``: asynchronous jobs that vLLM
    waits for, by request."""

    def __init__(self) -> None:
        self.outstanding: dict[str, Job] = {}
        self.sync_loads = SyncLoadTracker()
        self._done: list[Result] = []
        self._lock = threading.Lock()

    def submit(self, work: StepWork) -> None:
        """From now on the end of each job is reported, whatever happens."""
        for job in (*work.loads, *work.fetches, *work.failed, *work.pulls):
            if job.synchronous:
                self.sync_loads.due.append(job)
            else:
                self.outstanding[job.request_id] = job

    def finish(self, result: Result) -> None:
        with self._lock:
            self._done.append(result)

    def fail(self, jobs: Iterable[FailedJob]) -> None:
        """The scheduler side could not build them."""
        for job in jobs:
            if not job.synchronous:
                self.finish(failed_result(job, LOST))

    def fail_lost(self, jobs: Iterable[Job], known: set[str]) -> None:
        """Fail those of ``jobs`` that no part of the worker knows any more. Any thread."""
        with self._lock:
            known = known | {result.request_id for result in self._done}
        for job in jobs:
            if job.request_id not in known:
                self.finish(failed_result(job, LOST))

    def results(self) -> StepResults:
        """All that ended since the last call. Results leave the table only when all are put together."""
        with self._lock:
            done = list(self._done)
        others, synchronous = self.sync_loads.split(done)
        # A job that was failed as lost may still end.
        ended = [result for result in others if result.request_id in self.outstanding]
        out = StepResults(results=ended + synchronous)
        out.finished.update(result.request_id for result in ended)
        for result in out.results:
            if result.failed:
                out.failed.add(result.request_id)
                out.bad_blocks |= result.bad_blocks
        self.sync_loads.clear_due()
        for request_id in out.finished:
            del self.outstanding[request_id]
        with self._lock:
            del self._done[: len(done)]
        return out
