"""Jobs that the scheduler side gives the workers in a step; vLLM carries them as connector metadata."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from vllm_kvtier.wire.messages import RankInfo

# The longest that a step with synchronous loads, and all requests in it, waits for a lock of another worker thread.
MAX_LOCK_SECONDS = 0.1


@dataclass
class ChecksumJob:
    """Blocks of one group whose checksums are computed after this step's forward."""

    group: int
    ids: np.ndarray  # int64[n]
    keys: np.ndarray  # uint64[n]
    valid: np.ndarray  # int32[n] valid tokens of each block


@dataclass
class GroupPull:
    group: int
    local: np.ndarray  # int64[n] our block ids
    remote: np.ndarray  # int64[n] block ids of the source
    keys: np.ndarray  # uint64[n]
    valid: np.ndarray  # int32[n]

    @property
    def blocks(self) -> np.ndarray:
        """The same name as in GroupLoad."""
        return self.local


class FillingJob:
    """Access to the blocks that a job fills."""

    request_id: str
    groups: list[Any]
    synchronous: bool = False  # the step's forward computes on it: begun before, and ended within the step
    load_id: int = 0  # given by the worker to each synchronous job; its result repeats it

    @property
    def block_list(self) -> list[int]:
        """In prompt order."""
        return [block for group in self.groups for block in group.blocks.tolist()]

    @property
    def all_blocks(self) -> set[int]:
        return set(self.block_list)


@dataclass(eq=False)  # arrays do not compare
class PullJob(FillingJob):
    step_list: ClassVar[str] = "pulls"  # of ``StepWork``

    request_id: str
    source: str  # instance of the engine that is read
    groups: list[GroupPull]
    timeout: float  # seconds from when the worker gets it
    promised: bool = False  # read before the lease is granted: the source may still lack checksums
    staged: bool = False  # through a ring of ours, because pages or ranks there differ


@dataclass(eq=False)
class PeerFetchJob(FillingJob):
    """Blocks to copy from the caches of another engine of this node; each rank's worker reads them."""

    step_list: ClassVar[str] = "fetches"

    request_id: str
    source: str  # instance of the engine that is read
    groups: list[GroupPull]
    timeout: float  # seconds from when the worker gets it
    synchronous: bool = False
    load_id: int = 0


@dataclass(eq=False)
class StoreJob:
    """Blocks of one group to copy into slots of the node store after the forward of ``after_step`` wrote them."""

    id: int  # never used twice by an engine
    group: int
    blocks: np.ndarray  # int64[n] our block ids
    keys: np.ndarray  # uint64[n] keys of their checksums
    slots: np.ndarray  # int64[n] page numbers in the store's memory
    after_step: int
    instance: str = ""  # of the store whose memory has the slots


@dataclass
class GroupLoad:
    group: int
    blocks: np.ndarray  # int64[n] our block ids
    keys: np.ndarray  # uint64[n]
    slots: np.ndarray  # int64[n] page numbers in the store's memory


@dataclass(frozen=True)
class RemoteStoreInfo:
    """A remote store whose memory workers read. ``instance``: of the tier process that leases it; ``agent``,
    ``metadata``: of NIXL; ``generation``: of the metadata; ``base``: address of the memory in that process."""

    instance: str
    agent: str
    base: int
    metadata: bytes
    generation: int


@dataclass(eq=False)
class LoadJob(FillingJob):
    step_list: ClassVar[str] = "loads"

    request_id: str
    groups: list[GroupLoad]
    timeout: float  # seconds from when the worker gets it
    instance: str = ""  # of the store whose memory has the slots
    synchronous: bool = False
    remote_store: RemoteStoreInfo | None = None  # the slots are in this store's memory, not in the node store's
    load_id: int = 0


@dataclass(eq=False)
class FailedJob(FillingJob):
    """A load that vLLM counts on and that could not be built: the workers report it as failed."""

    step_list: ClassVar[str] = "failed"

    request_id: str
    groups: list[GroupLoad]
    synchronous: bool = False
    timeout: float = math.inf
    load_id: int = 0


@dataclass
class StepWork:
    """One step's work. ``new_peers``: instance -> ranks of the engines that ``pulls`` or ``fetches`` name for the first
    time."""

    step: int
    checksums: list[ChecksumJob] = field(default_factory=list)
    pulls: list[PullJob] = field(default_factory=list)
    new_peers: dict[str, list[RankInfo]] = field(default_factory=dict)
    loads: list[LoadJob] = field(default_factory=list)
    fetches: list[PeerFetchJob] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)  # requests that ended and whose loads may be under way
    idle: bool = False  # nothing is computed in this step
    urgent: bool = False  # a peer waits for the checksums of this step
    failed: list[FailedJob] = field(default_factory=list)
