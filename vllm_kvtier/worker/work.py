"""What the scheduler half tells the worker half in a step (vLLM carries it as connector metadata)."""

import math
from dataclasses import dataclass, field

import numpy as np

from vllm_kvtier.wire.messages import RankInfo

# A step that waits for its loads, and all requests in it, wait so long at most for another of the worker's threads.
MOST_LOCKED = 0.1  # seconds


@dataclass
class SumBatch:
    """Blocks of one group whose checksum is to be made after this step's forward."""

    group: int
    ids: np.ndarray  # int64[n]
    keys: np.ndarray  # uint64[n]
    valid: np.ndarray  # int32[n] tokens that count


@dataclass
class GroupPull:
    group: int
    local: np.ndarray  # int64[n] our block ids
    remote: np.ndarray  # int64[n] the source's
    keys: np.ndarray  # uint64[n]
    valid: np.ndarray  # int32[n]

    @property
    def blocks(self) -> np.ndarray:
        """As GroupLoad calls them: ours."""
        return self.local


@dataclass(eq=False)  # arrays do not compare
class PullOrder:
    request_id: str
    source: str  # instance of the source engine
    groups: list[GroupPull]
    timeout: float  # seconds from when the worker gets it
    promised: bool = False  # read before the lease was granted: the source may not have made all checksums yet


class _Filled:
    """An order's blocks of ours, which it fills."""

    @property
    def block_list(self) -> list[int]:
        """In the order of the prompt."""
        return [block for group in self.groups for block in group.blocks.tolist()]

    @property
    def all_blocks(self) -> set[int]:
        return set(self.block_list)


@dataclass(eq=False)
class FetchOrder(_Filled):
    """Blocks to copy from the caches of another engine of this node, which all ranks' workers read themselves."""

    request_id: str
    source: str  # instance of the source engine
    groups: list[GroupPull]
    timeout: float  # seconds from when the worker gets it
    hurried: bool = False  # the step's forward computes on it: begun before, and ended within the step
    ticket: int = 0  # a worker's own, of each hurried one that it began: its result has the same



@dataclass(eq=False)
class StoreOrder:
    """Blocks of one group to copy into slots of the node store, once the forward of ``after_step`` wrote them."""

    id: int  # ours, never used twice by an engine
    group: int
    blocks: np.ndarray  # int64[n] our block ids
    keys: np.ndarray  # uint64[n] what their checksums are keyed with
    slots: np.ndarray  # int64[n] page numbers in the store's memory
    after_step: int
    instance: str = ""  # the life of the store whose memory the slots are in


@dataclass
class GroupLoad:
    group: int
    blocks: np.ndarray  # int64[n] our block ids
    keys: np.ndarray  # uint64[n]
    slots: np.ndarray  # int64[n] page numbers in the store's memory


@dataclass(frozen=True)
class FarSource:
    """Another node's store, whose memory workers read themselves. ``instance``: of the mover that lends it; ``agent``,
    ``metadata``: of NIXL, ``generation`` of the latter; ``base``: address of its memory, there."""

    instance: str
    agent: str
    base: int
    metadata: bytes
    generation: int


@dataclass(eq=False)
class LoadOrder(_Filled):
    request_id: str
    groups: list[GroupLoad]
    timeout: float  # seconds from when the worker gets it
    instance: str = ""  # the life of the store whose memory the slots are in
    hurried: bool = False  # the step's forward computes on it: begun before, and ended within the step
    far: FarSource | None = None  # the slots are in another node's memory, not in that of this node's store
    ticket: int = 0  # as FetchOrder's


@dataclass(eq=False)
class FailedOrder(_Filled):
    """A load that vLLM counts on and that could not be ordered: the workers report it as failed."""

    request_id: str
    groups: list[GroupLoad]
    hurried: bool = False  # the step's forward computes on its blocks
    timeout: float = math.inf
    ticket: int = 0


@dataclass
class StepWork:
    """One step's work. ``sources`` introduces the engines named in ``pulls`` or ``fetches`` for the first time:
    instance -> ranks."""

    step: int
    sums: list[SumBatch] = field(default_factory=list)
    pulls: list[PullOrder] = field(default_factory=list)
    sources: dict[str, list[RankInfo]] = field(default_factory=dict)
    loads: list[LoadOrder] = field(default_factory=list)
    fetches: list[FetchOrder] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)  # requests whose loads, ordered before, nobody waits for any more
    idle: bool = False  # nothing is computed in this step
    urgent: bool = False  # a peer waits for the checksums of this step
    failed: list[FailedOrder] = field(default_factory=list)

