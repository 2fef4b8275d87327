"""What the lease client returns: requests whose answers another thread awaits, and the blocks that were leased."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm_kvtier.scheduler.matching.transfer_params import Address
from vllm_kvtier.scheduler.sources.base import LookupMiss
from vllm_kvtier.shapes.read_paths import ReadPath
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.reactor import Timer

# {field of the LeaseRequest: value} for an engine with this ``hash_block_size``. On the reactor's thread.
Rehash = Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class LeasedBlocks:
    """Blocks of the engine ``instance`` for tokens [start, tokens), by group. ``nbytes``: what one rank of ours would
    copy. ``path``: how our ranks read them. ``same_layout``: rank for rank, its pages are as ours. ``tail``: hash of
    the partial block at the end. ``final``: False for a stretch of a prefill that goes on. ``hash_block_size``,
    ``block_tokens``: as in ``LookupHit``."""

    address: Address
    instance: str
    lease: int
    start: int
    tokens: int
    blocks: list[list[int]]
    ranks: list[m.RankInfo]
    path: ReadPath = ReadPath.DIRECT
    same_layout: bool = True
    nbytes: int = 0
    tail: bytes = b""
    final: bool = True
    hash_block_size: int = 0
    block_tokens: tuple[int, ...] = ()


@dataclass
class PendingLease:
    """``request``: in blocks of our size. ``outcome`` turns from None to the answer once; ``cancelled``
    makes a late grant go back at once."""

    address: Address
    request: m.LeaseRequest
    deadline: float
    same_node_instance: str = ""  # the instance, if it should be on this node
    prefer_mapped: bool = False
    rehash: Rehash | None = None
    on_this_node: bool = False  # an engine that we shook hands with before, on this node
    path: ReadPath = ReadPath.DIRECT  # once it is sent
    outcome: LeasedBlocks | LookupMiss | None = None
    cancelled: bool = False
    again: bool = False  # asked a second time, of the instance that took the first one's place
    tries: bool = False  # the last read from that instance failed, and this is the next
    timer: Timer | None = field(default=None, repr=False)
    answered: threading.Event = field(default_factory=threading.Event, repr=False)

    def wait(self, seconds: float) -> None:
        """Until there is an outcome, at most so long."""
        self.answered.wait(seconds)


@dataclass
class FollowedLease(PendingLease):
    """A lease request that follows a prefill. ``outcome``: the first grant, or why there is none.

    The reactor appends to ``grants`` in the order of the prompt, then sets ``ended`` if the last of them is not
    ``final``: why no more come. It calls ``notify`` after each change. It ends after ``max_wait`` seconds without a
    grant or a sign that the prefill's engine is there, and at ``last_deadline`` if there was no grant until then.
    """

    max_wait: float = 0.0
    last_deadline: float = 0.0
    notify: Callable[[], object] = lambda: None
    grants: list[LeasedBlocks] = field(default_factory=list)
    ended: LookupMiss | None = None

    @property
    def complete(self) -> bool:
        return bool(self.grants) and self.grants[-1].final
