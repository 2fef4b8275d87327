"""What the scheduler side remembers of one request."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from vllm_kvtier.jobs.transfer_jobs import FailedJob
from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumEntry
from vllm_kvtier.scheduler.matching.request_lifecycle import RequestLifecycle
from vllm_kvtier.scheduler.matching.transfer_params import Hints, report
from vllm_kvtier.scheduler.planner.load_planner import LoadDecision
from vllm_kvtier.scheduler.sources.base import Candidate, Job, LookupHit, PendingLookup
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat import requests as vr


def lora_fingerprint_of(request: Any) -> bytes:
    """Fingerprint of the LoRA adapter of an admitted request (vLLM's own object); b"" without one."""
    found = vr.lora_fingerprint(request)
    assert found is not None, "the request is private"
    return found


class LoadUnderWay(NamedTuple):
    """What the planner counts as under way. ``expected``: seconds, if the source is not planned and its load's duration
    is to be learned."""

    cost_key: str
    nbytes: int
    expected: float | None


@dataclass
class RequestState:
    """One request. ``candidates``: still to be asked. ``num_computed_tokens``: what vLLM had when it last asked us."""

    request: Any
    hints: Hints
    life: RequestLifecycle
    candidates: deque[Candidate] | None = None  # made at the first match: needs the block hashes
    pending: PendingLookup | None = None
    candidate: Candidate | None = None  # the last one that was asked
    asked_again: bool = False  # because vLLM has evicted tokens before those that were asked for, or answers were old
    failed: set[str] = field(default_factory=set)  # instances from which a transfer failed
    held: LookupHit | None = None  # kept while other candidates are asked for more
    hit: LookupHit | None = None  # taken
    begun_at: float = 0.0  # when it was first matched
    hit_at: float = 0.0  # when ``held``, or ``hit``, came
    allocated_at: float = 0.0  # when vLLM gave it blocks to load into
    num_computed_tokens: int = 0
    takes_attention_hit: bool = False  # that may include tokens behind which only a hand-off has the states
    asked_at: float = 0.0  # when a candidate was last asked
    miss_reason: str = ""  # why the last candidate that was asked, or could have been, brought nothing
    counted: bool = False  # the sources of its prompt's KV were counted
    num_external_tokens: int = 0
    preemptions: int = 0
    num_waits: int = 0  # times that others waited a moment for an answer to this one, since it was last looked up anew
    vain_holds: int = 0  # hits that were held too long while no request had blocks
    waits_for: str = ""  # request that loads what this one needs
    awaited_load: tuple[int, list[bytes]] = (0, [])  # its first block, and block hashes
    has_waited: bool = False  # that load ended well
    waiting: list["RequestState"] = field(default_factory=list)  # those that wait for this one's load
    load_wait_began: float = 0.0  # when the first such load began
    others_running: bool = False  # other requests were in the engine when it was last decided whether to load
    synchronous: bool = False  # the step that it is given blocks in is to wait for its load
    under_way: LoadUnderWay | None = None  # for the planner
    plan: LoadDecision | None = None
    planned: tuple[int, int] = (0, 0)  # the tokens it was made for
    loading_hashes: list[bytes] = field(default_factory=list)  # block hashes being loaded
    job: Job | FailedJob | None = None
    can_cancel_load: bool = False
    # Sources write these.
    unreadable: str = ""  # instance from which a rank's read by NIXL failed, or did not end in time
    other_hashes: dict[int, list[bytes]] = field(default_factory=dict)  # block hashes by ``hash_block_size``
    asked_from: int = 0  # ``num_computed_tokens`` when the store was last asked
    epoch: int = 0  # of the engine's namespaces, then
    waits_since: float = 0.0  # when it began to wait for a promotion; 0: it does not
    waiting_for_lookup: bool = False  # whether a secondary tier has anything at all is not known yet
    tokens_before_wait: int = 0  # tokens that were in the store's memory when it began to wait
    promoted_tokens: int = 0  # tokens that were promoted meanwhile
    entries: list[ChecksumEntry] = field(default_factory=list)  # what the load puts into the workers' checksum tables
    positions: dict[int, np.ndarray] = field(default_factory=dict)  # group -> number in the prompt of each row's block

    @property
    def taken_hit(self) -> LookupHit:
        """``hit``, where the request is known to have one."""
        assert self.hit is not None
        return self.hit

    @property
    def source_name(self) -> str:
        """Where its KV came from: the source's name."""
        return self.hit.source.name if self.hit is not None else ""

    def decline_lookup(self, counters: Counters, reason: str) -> None:
        """A candidate was not made use of."""
        self.miss_reason = reason
        counters.count("lookups_declined", reason)

    def report(self) -> dict[str, Any]:
        source = self.hit.source.describe(self.hit) if self.hit is not None and self.num_external_tokens else None
        return report(self.request.num_prompt_tokens, self.num_computed_tokens, self.num_external_tokens, source)
