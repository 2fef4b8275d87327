"""What the scheduler half remembers of one request, and what it may be asked to load for it."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_kvtier.scheduler.ledger import Entry
from vllm_kvtier.scheduler.lifecycle import Lifecycle
from vllm_kvtier.scheduler.offers import Address, Loan, Offer, PendingAsk
from vllm_kvtier.scheduler.params import Handoff, Hints, Report
from vllm_kvtier.scheduler.planner import Decision
from vllm_kvtier.scheduler.sharing import Holder
from vllm_kvtier.scheduler.tier import HostAsk, HostOffer
from vllm_kvtier.worker.work import FailedOrder, FetchOrder, LoadOrder


@dataclass
class Tracked:
    """One request. ``sources`` still to be tried; ``local`` tokens vLLM had when it last asked us."""

    request: Any
    hints: Hints
    life: Lifecycle
    sources: deque[Handoff | Holder | Address] | None = None  # made at the first match: needs the hash chain
    pending: PendingAsk | HostAsk | None = None
    asking: Handoff | Holder | Address | None = None
    failed: set[str] = field(default_factory=set)  # instances whose loans failed
    held: HostOffer | None = None  # the store's, while somebody else is asked for more
    offer: Offer | None = None
    begun_at: float = 0.0  # when it was first matched
    offered_at: float = 0.0
    ordered_at: float = 0.0  # when vLLM gave it blocks to load into
    local: int = 0
    waits_since: float = 0.0  # when it began to wait for what the store brings up; 0: it does not
    waits_for_answer: bool = False  # whether there is anything at all
    had: int = 0  # tokens that were in the store's memory when it began to wait
    risen: int = 0  # tokens that came up meanwhile
    asked_at: float = 0.0  # when somebody was last asked
    missed: str = ""  # why the last one who was asked, or could have been, brought nothing
    accounted: bool = False  # it was counted where the KV of its prompt came from
    asked_from: int = 0  # what ``local`` was when the store was last asked
    epoch: int = 0  # of the store's spaces, then
    pulled: int = 0
    preemptions: int = 0
    lingered: int = 0  # times that others waited a moment for an answer to this one
    awaited: str = ""  # request that loads what this one needs
    among: bool = False  # other requests were there when it was last decided whether to load
    hurried: bool = False  # the step that it is given blocks in is to wait for its load
    planned_for: Offer | None = None  # its bytes count as under way for the planner
    plan: Decision | None = None
    planned: tuple[int, int] = (0, 0)  # the tokens it was made for
    inbound: list[bytes] = field(default_factory=list)  # block hashes being loaded
    entries: list[Entry] = field(default_factory=list)  # of a pull or a fetch
    load: LoadOrder | FetchOrder | FailedOrder | None = None
    places: dict[int, np.ndarray] = field(default_factory=dict)  # group -> which block of the chain each row of it is

    @property
    def source(self) -> str:
        """Where its KV came from, in a word: handoff, retained, host or gpu (another engine's of this node)."""
        if isinstance(self.offer, HostOffer):
            return "host"
        if isinstance(self.offer, Loan):
            return "gpu"
        return "handoff" if self.hints.handoff else "retained"

    def report(self) -> Report:
        source = None
        if self.offer and self.pulled:
            host = isinstance(self.offer, HostOffer)
            source = "host" if host else f"{self.offer.address[0]}:{self.offer.address[1]}"
            source = f"gpu {source}" if isinstance(self.offer, Loan) else source
        return Report(self.request.num_prompt_tokens, self.local, self.pulled, source)
