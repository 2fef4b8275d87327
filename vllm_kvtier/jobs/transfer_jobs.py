"""Jobs that the scheduler side gives the workers in a step; vLLM carries them as connector metadata."""

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

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
    """A row is a block of the source and a block of ours that it has tokens for. If the source has another block size,
    a block of either side is in several rows."""

    group: int
    local: np.ndarray  # int64[n] our block ids
    remote: np.ndarray  # int64[n] block ids of the source
    keys: np.ndarray  # uint64[n] of the source's blocks
    valid: np.ndarray  # int32[n] valid tokens of the source's blocks
    shifts: np.ndarray | None = None  # int32[n], see ``shapes.tp_mapping``; None: all 0

    @property
    def blocks(self) -> np.ndarray:
        """The same name as in GroupLoad."""
        return self.local

    @classmethod
    def join(cls, group: int, parts: Sequence["GroupPull"]) -> "GroupPull":
        """The rows of all ``parts``, which are of this group and of one source."""
        fields = [("local", np.int64), ("remote", np.int64), ("keys", np.uint64), ("valid", np.int32)]
        if any(part.shifts is not None for part in parts):
            fields.append(("shifts", np.int32))
        return cls(group, *(np.concatenate([np.zeros(0, t), *(getattr(p, n) for p in parts)]) for n, t in fields))

    @property
    def num_blocks(self) -> int:
        """Of ours."""
        return len(self.local) if self.shifts is None else len(np.unique(self.local))

    def rows(self, rows: np.ndarray) -> "GroupPull":
        """Some of its rows: indices, or bool[n]."""
        shifts = None if self.shifts is None else self.shifts[rows]
        return GroupPull(
            self.group, self.local[rows], self.remote[rows], self.keys[rows], self.valid[rows], shifts
        )  # fmt: skip

    def at_shift(self, shift: int) -> "GroupPull":
        """Its rows with this shift."""
        if self.shifts is None:
            return self if shift == 0 else self.rows(np.zeros(len(self.local), bool))
        return self.rows(self.shifts == shift)

    def rounds(self, most: int) -> "Iterator[tuple[np.ndarray, np.ndarray, GroupPull]]":
        """Its rows in rounds of at most ``most`` different blocks of the source, in the order of their ids: (these
        blocks, for each row the number of its block among them, the rows)."""
        blocks, places = np.unique(self.remote, return_inverse=True)
        order = np.argsort(places, kind="stable")
        starts = np.searchsorted(places[order], np.arange(0, len(blocks), most))
        for number, start in enumerate(starts.tolist()):
            end = starts[number + 1] if number + 1 < len(starts) else len(order)
            rows, first = order[start:end], number * most
            yield blocks[first : first + most], places[rows] - first, self.rows(rows)


class FillingJob:
    """Access to the blocks that a job fills."""

    request_id: str
    groups: list[Any]
    synchronous: bool = False  # the step's forward computes on it: begun before, and ended within the step
    more: bool = False  # more jobs of this request's load follow; it ends with the last of them
    load_id: int = 0  # given by the worker to each synchronous job; its result repeats it
    state_copies: Sequence[tuple[int, int, int]] = ()  # of a synchronous one, see ``job_builder.state_copies``

    @property
    def block_list(self) -> list[int]:
        """In prompt order, each once."""
        return list(dict.fromkeys(block for group in self.groups for block in group.blocks.tolist()))

    @property
    def all_blocks(self) -> set[int]:
        return set(self.block_list)


@dataclass(eq=False)  # arrays do not compare
class PullJob(FillingJob):
    step_list: ClassVar[str] = "pulls"  # of ``StepWork``

    request_id: str
    instance: str  # of the engine that is read
    groups: list[GroupPull]
    timeout: float  # seconds from when the worker gets it
    promised: bool = False  # read before the lease is granted: the source may still lack checksums
    staged: bool = False  # through a ring of ours, because pages or ranks there differ
    more: bool = False


@dataclass(eq=False)
class PeerFetchJob(FillingJob):
    """Blocks to copy from the caches of another engine of this node; each rank's worker reads them."""

    step_list: ClassVar[str] = "fetches"

    request_id: str
    instance: str  # of the engine that is read
    groups: list[GroupPull]
    timeout: float  # seconds from when the worker gets it
    synchronous: bool = False
    load_id: int = 0
    more: bool = False


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
    slots: np.ndarray  # int64[n] page numbers in the store's memory, of the first node's if there are several
    by_node: np.ndarray | None = None  # int64[nodes, n], of an engine over several nodes


@dataclass(eq=False)
class LoadJob(FillingJob):
    step_list: ClassVar[str] = "loads"

    request_id: str
    groups: list[GroupLoad]
    timeout: float  # seconds from when the worker gets it
    instance: str = ""  # of the store whose memory has the slots
    synchronous: bool = False
    load_id: int = 0


@dataclass(eq=False)
class FailedJob(FillingJob):
    """A load, or the rest of one, that vLLM counts on and that nothing brings: the workers report it as failed.
    ``reason``: "": it could not be built."""

    step_list: ClassVar[str] = "failed"

    request_id: str
    groups: list[GroupLoad]
    synchronous: bool = False
    timeout: float = math.inf
    load_id: int = 0
    reason: str = ""


# Engines whose ranks the workers remember. Each restart of an engine makes another.
MAX_PEERS_REMEMBERED = 512
_Facts = TypeVar("_Facts")


def remember_peer(known: OrderedDict[str, _Facts], instance: str, facts: _Facts) -> list[str]:
    """Enter an engine. Returns those that are removed for it, which were named longest ago. Other threads may look
    engines up, and remove some, meanwhile: one that is known stays so."""
    known[instance] = facts
    with suppress(KeyError):  # it has just ended
        known.move_to_end(instance)
    removed = list(known)[: max(0, len(known) - MAX_PEERS_REMEMBERED)]
    for each in removed:
        known.pop(each, None)
    return removed


@dataclass
class StepWork:
    """One step's work. ``new_peers``: instance -> ranks of the engines that ``pulls`` or ``fetches`` name and the
    workers may not know, because they are new or were named so long ago that they are forgotten."""

    step: int
    checksums: list[ChecksumJob] = field(default_factory=list)
    pulls: list[PullJob] = field(default_factory=list)
    new_peers: dict[str, list[RankInfo]] = field(default_factory=dict)
    loads: list[LoadJob] = field(default_factory=list)
    fetches: list[PeerFetchJob] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)  # requests that ended and whose loads may be under way
    idle: bool = False  # nothing is computed in this step
    lone: bool = False  # it begins a request, and computes nothing else
    urgent: bool = False  # a peer waits for the checksums of this step
    failed: list[FailedJob] = field(default_factory=list)
    generation: int = 0  # of the checksums: vLLM has reset its prefix cache so often, and none from before counts
