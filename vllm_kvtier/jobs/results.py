"""Results that workers report for the jobs of ``jobs.transfer_jobs``."""

from collections.abc import Hashable, Set
from dataclasses import dataclass, field
from typing import ClassVar

from vllm_kvtier.jobs.transfer_jobs import FillingJob, PeerFetchJob, PullJob


@dataclass
class PullResult:
    kind: ClassVar[str] = "pull"

    request_id: str
    bad_blocks: set[int]  # our block ids that must be recomputed
    failed: bool
    reason: str
    bytes: int
    seconds: float
    checksum_mismatch: bool = False  # the reason of the failure
    load_id: int = 0  # of its job
    unreadable: bool = False  # NIXL's read failed, or did not end in time

    @property
    def corrupt_blocks(self) -> Set[Hashable]:
        """Those that count as corrupt, alike on all ranks: all that are bad."""
        return self.bad_blocks if self.checksum_mismatch else set()


@dataclass
class FetchResult(PullResult):
    kind: ClassVar[str] = "fetch"

    unmappable: str = ""  # why this source's memory can never be read; then all blocks are bad


ABORTED = "the request was aborted"  # reason of a load that was stopped because its request ended


@dataclass
class LoadResult:
    """A load ended: nothing writes its blocks any more. All but ``bad_blocks`` hold the requested KV."""

    kind: ClassVar[str] = "load"

    request_id: str
    bad_blocks: set[int]  # our block ids that must be recomputed: wrong, or not loaded
    reason: str  # why some are bad; "" if none is
    bytes: int  # copied, right or wrong
    seconds: float  # since the worker got the job
    queued: float  # of these, until its first batch began
    corrupt: list[tuple[int, int]] = field(default_factory=list)  # (group, slot) whose checksum is wrong
    timed: bool = True  # False: it had ended before the first poll; ``seconds`` is an upper bound
    load_id: int = 0  # of its job
    node: int = 0  # of an engine over several nodes: whose slots ``corrupt`` has
    fenced: float = 0.0  # of ``seconds``, at least: earlier steps still used its blocks, the link was idle

    @property
    def failed(self) -> bool:
        return bool(self.bad_blocks)

    @property
    def checksum_mismatch(self) -> bool:
        """Whether a stored block is wrong (not only late or hit by an error)."""
        return bool(self.corrupt)

    @property
    def corrupt_blocks(self) -> Set[Hashable]:
        return {(self.node, *each) for each in self.corrupt}


Result = PullResult | FetchResult | LoadResult


def failed_result(job: FillingJob, reason: str, seconds: float = 0.0, unmappable: str = "") -> Result:
    """The result of a job that nothing works on any more; none of its blocks holds the requested KV."""
    request_id, blocks = job.request_id, job.all_blocks
    if isinstance(job, PullJob):
        return PullResult(request_id, blocks, True, reason, 0, seconds)
    if isinstance(job, PeerFetchJob):
        return FetchResult(request_id, blocks, True, reason, 0, seconds, unmappable=unmappable, load_id=job.load_id)
    return LoadResult(request_id, blocks, reason, 0, seconds, 0.0, load_id=job.load_id)


@dataclass
class StepResults:
    """All that ended since the last step, for vLLM and for the scheduler side."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)
    results: list[Result] = field(default_factory=list)
