"""What the scheduler half tells the worker half in a step (vLLM carries it as connector metadata)."""

from dataclasses import dataclass, field

import numpy as np

from vllm_kvtier.wire.messages import RankInfo


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


@dataclass(eq=False)  # arrays do not compare
class PullOrder:
    request_id: str
    source: str  # instance of the source engine
    groups: list[GroupPull]
    timeout: float  # seconds from when the worker gets it
    promised: bool = False  # read before the lease was granted: the source may not have made all checksums yet


@dataclass
class StepWork:
    """One step's work. ``sources`` introduces the engines named in ``pulls`` for the first time: instance -> ranks."""

    step: int
    sums: list[SumBatch] = field(default_factory=list)
    pulls: list[PullOrder] = field(default_factory=list)
    sources: dict[str, list[RankInfo]] = field(default_factory=dict)
