"""The jobs that were submitted to this rank and the results that vLLM does not know yet."""

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_kvtier.jobs.results import PullResult, Result, StepResults, failed_result
from vllm_kvtier.jobs.transfer_jobs import FailedJob, LoadJob, PeerFetchJob, PullJob, StepWork
from vllm_kvtier.worker.integrity.sync_load_tracker import SyncLoadTracker

Job = LoadJob | PeerFetchJob | PullJob | FailedJob
LOST = "an internal error; see the log"  # reason of a job that no part of the worker knows


@dataclass
class _Parts:
    """A load in several jobs (``FillingJob.more``). The scheduler side gets the result of each; vLLM hears of the load,
    and of all its bad blocks, when the last job came and none is ``running`` any more."""

    running: int = 0
    last: bool = False
    failed: bool = False
    bad_blocks: set[int] = field(default_factory=set)
    jobs: list[Job] = field(default_factory=list)


class JobTable:
    """``finish`` is called on any thread, all else on the model runner's. ``outstanding``: asynchronous jobs that vLLM
    waits for, by request; of a load in several jobs the one that came last."""

    def __init__(self) -> None:
        self.outstanding: dict[str, Job] = {}
        self._parts: dict[str, _Parts] = {}
        self.sync_loads = SyncLoadTracker()
        self._done: list[Result] = []
        self._lock = threading.Lock()

    def submit(self, work: StepWork) -> None:
        """From now on the end of each job is reported, whatever happens."""
        jobs: list[Job] = [*work.loads, *work.fetches, *work.failed, *work.pulls]
        for job in sorted(jobs, key=lambda job: not job.more):  # the last of a load may be in an earlier list
            if job.synchronous:  # vLLM waits for no end of it, and of no load whose last part it is
                self.sync_loads.due.append(job)
                self.outstanding.pop(job.request_id, None)
                self._parts.pop(job.request_id, None)
                continue
            self.outstanding[job.request_id] = job
            if job.more or job.request_id in self._parts:
                parts = self._parts.setdefault(job.request_id, _Parts())
                parts.running += 1
                parts.last |= not job.more
                parts.jobs.append(job)
        for pulls in (work.pulls, work.fetches):
            # The end of a load that has nothing left to read.
            for pull in [job for job in pulls if not (job.synchronous or any(len(g.blocks) for g in job.groups))]:
                pulls.remove(pull)
                self.finish(PullResult(pull.request_id, set(), False, "", 0, 0.0))

    def finish(self, result: Result) -> None:
        with self._lock:
            self._done.append(result)

    def fail(self, jobs: Iterable[FailedJob]) -> None:
        """The scheduler side could not build them."""
        for job in jobs:
            if not job.synchronous:
                self.finish(failed_result(job, job.reason or LOST))

    def under_way(self) -> list[Job]:
        """Jobs that have not ended; for two of one load, the later one twice."""
        running = {request_id: parts.running for request_id, parts in self._parts.items()}
        return [job for request_id, job in self.outstanding.items() for _ in range(running.get(request_id, 1))]

    def fail_lost(self, jobs: Iterable[Job], known: set[str]) -> bool:
        """Fail those of ``jobs`` that no part of the worker knows any more. Any thread. False: of some request another
        job has come since they were listed; look again.

        A job may have ended meanwhile, and its request may have another one, which must not end in its place."""
        current, failed = True, Counter[str]()
        with self._lock:
            known = known | {result.request_id for result in self._done}
            for job in jobs:
                name, parts = job.request_id, self._parts.get(job.request_id)
                if name in known or name not in self.outstanding:
                    continue
                if self.outstanding[name] is not job:
                    current = False
                elif parts is None or failed[name] < parts.running:
                    failed[name] += 1
                    self._done.append(failed_result(job, LOST))
        return current

    def results(self) -> StepResults:
        """All that ended since the last call. Results leave the table only when all are put together."""
        with self._lock:
            done = list(self._done)
        others, synchronous = self.sync_loads.split(done)
        # A job that was failed as lost may still end.
        ended = [result for result in others if result.request_id in self.outstanding]
        out = StepResults(results=ended + synchronous)
        counts = Counter(result.request_id for result in ended)
        for request_id, count in counts.items():
            parts = self._parts.get(request_id)
            if parts is None or (parts.last and parts.running <= count):
                out.finished.add(request_id)
        for result in ended:  # of synchronous ones ``SyncLoad.verify`` takes care
            if result.failed and result.request_id not in self._parts:
                out.failed.add(result.request_id)
                out.bad_blocks |= result.bad_blocks
        # Of a load that lost a job: which of its jobs it was is not known.
        lost = {result.request_id: self._parts[result.request_id].jobs for result in ended
                if result.reason == LOST and result.request_id in self._parts}  # fmt: skip
        unread = {name: {block for job in jobs for block in job.all_blocks} for name, jobs in lost.items()}
        self.sync_loads.clear_due()
        for result in ended:
            if (parts := self._parts.get(result.request_id)) is not None:
                parts.running -= 1
                parts.failed |= result.failed or result.request_id in unread
                parts.bad_blocks |= result.bad_blocks | unread.get(result.request_id, set())
        for request_id in out.finished:
            if (parts := self._parts.get(request_id)) is not None and parts.failed:
                out.failed.add(request_id)
                out.bad_blocks |= parts.bad_blocks
        for request_id in out.finished:
            del self.outstanding[request_id]
            self._parts.pop(request_id, None)
        with self._lock:
            del self._done[: len(done)]
        return out
