"""What a request asks somebody for, and what comes of it: an offer of blocks, or why there is none."""

import threading
from dataclasses import dataclass, field

from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.reactor import Timer

Address = tuple[str, int]


@dataclass(frozen=True)
class Offer:
    """Blocks of the peer ``instance`` for tokens [start, tokens), under a lease; ``lease`` 0: only promised so far."""

    address: Address
    instance: str
    lease: int
    start: int
    tokens: int
    blocks: list[list[int]]
    ranks: list[m.RankInfo]
    mapped: bool = field(default=False, kw_only=True)  # to be copied from the peer's mapped memory
    alike: bool = field(default=True, kw_only=True)  # rank for rank, its pages are as ours

    @property
    def place(self) -> str:
        """By what name the planner knows how long it takes; "": it is not weighed."""
        return ""


@dataclass(frozen=True)
class Loan(Offer):
    """Blocks of the prefix cache of an engine on this node; ``nbytes``: what one rank of ours copies."""

    nbytes: int = field(default=0, kw_only=True)

    @property
    def place(self) -> str:
        return "gpu"


@dataclass(frozen=True)
class NoOffer:
    code: str
    reason: str


@dataclass
class PendingAsk:
    """``outcome`` turns from None to the answer once; ``cancelled`` makes a late grant go back at once."""

    address: Address
    ask: m.Ask
    deadline: float
    near: str = ""  # the instance, if it is said to be on this node
    outcome: Offer | NoOffer | None = None
    cancelled: bool = False
    again: bool = False  # asked a second time, of the instance that took the first one's place
    timer: Timer | None = field(default=None, repr=False)
    settled: threading.Event = field(default_factory=threading.Event, repr=False)

    def wait(self, seconds: float) -> None:
        """Until there is an outcome, at most so long."""
        self.settled.wait(seconds)
