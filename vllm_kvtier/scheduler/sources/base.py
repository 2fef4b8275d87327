"""The contract of a source: one place from which KV of a request's prompt can be read.

A request's way through a source, all on vLLM's scheduler thread:

1. ``candidates``: what the source could be asked for this request. The sources' candidates are asked in the order of
   the list of sources. A candidate that another source's answer names is asked before those that are left.
2. ``lookup``: asks, and returns at once. The answer arrives on the engine's reactor thread. ``PendingLookup.poll``
   turns it into a ``LookupHit`` or a ``LookupMiss`` on the scheduler thread, once. Every lookup ends by its
   ``deadline``; the matcher gives up a second later, in case the reactor's thread died.
3. The answer. A hit of a source with ``holds_hit`` is kept while the other candidates are asked for more (``beats``).
   Any other hit is taken if ``fits`` accepts it: it was made by another process, and its numbers become indices here.
   ``retry_lookup`` may ask again in place of taking the answer.
4. ``build_job``: vLLM gave the request blocks; the workers fill them.
5. ``on_load_failed`` for each rank's failed result, ``on_loaded`` once if all ranks succeeded.
6. ``release_hit``: the hit's lease goes back.

What ends what. The caller is ``SourceSelector``, unless named otherwise:

* ``cancel``: a pending lookup; its lease, granted or still to come, goes back. Also called by ``LookupPrefetcher``.
* ``release``: the lease of a hit that was not taken.
* ``release_hit``: the lease of ``request.hit``, whose load ended or does not happen.
* ``release_export``: the export that a prefill engine keeps for this request. Also called by the hand-off source.
* ``cancel_prefetch``: a lookup that was sent before the request was matched.

``RequestMatcher.release_all`` ends all of them for a request that is computed here. ``RequestMatcher.release_steps``
does so after an exception: it returns a step for each, and its caller runs every step, even if another one raises.
Each is ended exactly once; only ``cancel_prefetch`` and ``release_export`` may be repeated.

Two deadlines limit a hit. Before blocks are allocated, ``max_hold_seconds`` and the option ``transfer_timeout`` limit
how long it is used. After that, it stays leased until the workers report that nothing reads it any more.

What differs between sources is a method or an attribute below. The matcher, the selector and the load results compare
neither classes nor names.
"""

# ruff: noqa: B027 - a source overrides the methods that concern it; the others do nothing

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from vllm_kvtier.cache_kinds import CacheGroup
from vllm_kvtier.jobs.results import Result
from vllm_kvtier.jobs.transfer_jobs import FailedJob, LoadJob, PeerFetchJob, PullJob
from vllm_kvtier.scheduler.matching.transfer_params import Address
from vllm_kvtier.shapes.read_paths import ReadPath
from vllm_kvtier.wire import messages as m

Job = PullJob | LoadJob | PeerFetchJob
BlockIds = tuple[list[int], ...]  # by group
RequestState = Any  # ``matching.request_state.RequestState``, which uses what this module defines


@dataclass(frozen=True)
class Candidate:
    """Something that ``source`` can be asked for. A peer engine has an address. If another source named the peer, it
    also has an instance, and about the first ``tokens`` tokens of the prompt. ``whole_blocks``: no partial block, since
    the one that it has holds other tokens."""

    source: "KVSource"
    address: Address = ("", 0)
    instance: str = ""
    tokens: int = 0
    whole_blocks: bool = False


@dataclass(frozen=True)
class Need:
    """What a request lacks when a candidate is asked.

    ``start``: its first token that vLLM has not. ``tokens``: tokens from there on that a source could bring; at least
    one token of a prompt is computed. ``tokens_after_held_hit``: those of them after the end of the held hit; all of
    them without one. ``alone``: no other request is in the engine.
    """

    start: int
    tokens: int
    tokens_after_held_hit: int
    alone: bool


@dataclass(frozen=True)
class PendingPromotion:
    """What a store is reading from its secondary tiers: tokens [0, ``tokens``) as far as is known, expected in memory
    in ``seconds``. ``asking``: seconds until more is expected to be known; 0: no tier is being asked."""

    tokens: int
    seconds: float
    asking: float


@dataclass(frozen=True)
class LookupHit:
    """Blocks of tokens [start, tokens), under a lease of ``source``.

    ``instance``: the engine or store that has them, as it was when it granted the lease. ``lease``: its number, 0 if
    the lease is not granted yet. ``blocks``: by group, block ids of an engine or slots of a store; 0: not included.
    ``nbytes``: what one rank transfers. ``candidates``: what other sources can be asked, as this source says.
    """

    source: "KVSource"
    instance: str
    lease: int
    start: int
    tokens: int
    blocks: list[list[int]]
    nbytes: int = field(default=0, kw_only=True)
    candidates: tuple[Candidate, ...] = field(default=(), kw_only=True)
    pending_promotion: PendingPromotion | None = field(default=None, kw_only=True)
    # of engines
    address: Address = field(default=("", 0), kw_only=True)
    ranks: list[m.RankInfo] | None = field(default=None, kw_only=True)  # workers need them to reach the engine
    path: ReadPath = field(default=ReadPath.DIRECT, kw_only=True)  # how our ranks read the engine
    same_layout: bool = field(default=True, kw_only=True)  # rank for rank, the engine's pages are as ours
    grows: bool = field(default=False, kw_only=True)  # a prefill that goes on: its later blocks are not leased yet
    hash_block_size: int = field(default=0, kw_only=True)  # of the engine; 0: as ours
    block_tokens: tuple[int, ...] = field(default=(), kw_only=True)  # of its blocks, by group; (): as ours
    # of stores
    session: int = field(default=0, kw_only=True)  # the connection that the lease is on
    epoch: int = field(default=0, kw_only=True)  # of this engine's namespaces, when the store was asked
    logical_bytes: int = field(default=0, kw_only=True)  # of KV, all ranks, that the blocks become

    found: ClassVar[Literal[True]] = True

    def block_sizes(self, groups: Sequence[CacheGroup]) -> tuple[int, ...]:
        """Tokens of its blocks, by group; ``groups``: ours."""
        return self.block_tokens or tuple(size for size, _ in groups)

    def bytes_from(self, start: int) -> int:
        """What one rank transfers of it from token ``start`` on."""
        return self.nbytes * max(0, self.tokens - max(start, self.start)) // max(1, self.tokens - self.start)

    @property
    def mapped(self) -> bool:
        return self.path is ReadPath.MAPPED


@dataclass(frozen=True)
class LookupMiss:
    """``code``: the reason, for the metrics. ``searched``: the source searched its memory and found nothing; False: the
    lookup failed, or its answer could not be used. ``candidates``, ``pending_promotion``: as a hit's."""

    code: str
    reason: str
    searched: bool = False
    candidates: tuple[Candidate, ...] = ()
    pending_promotion: PendingPromotion | None = None

    found: ClassVar[Literal[False]] = False


class PendingLookup:
    """One lookup under way (scheduler thread).

    ``answer``: the client's; its ``outcome`` is set once, on the client's thread, by its ``deadline``. Tokens [start,
    max_tokens) were asked for. ``epoch``: of the engine's namespaces at that time; ``instance``: the store's.
    ``state``: of the request that it is for, if the source compares the answer with it.
    """

    __slots__ = ("answer", "epoch", "instance", "max_tokens", "outcome", "source", "start", "state")

    def __init__(
        self, source: "KVSource", answer: Any, start: int, max_tokens: int, epoch: int = 0, instance: str = ""
    ):
        self.source, self.answer, self.start, self.max_tokens = source, answer, start, max_tokens
        self.epoch, self.instance = epoch, instance
        self.state: RequestState | None = None
        self.outcome: LookupHit | LookupMiss | None = None  # what ``poll`` returned

    @property
    def deadline(self) -> float:
        deadline: float = self.answer.deadline
        return deadline

    def poll(self) -> LookupHit | LookupMiss | None:
        """The result, None while there is no answer. The first call with an answer reads it."""
        if self.outcome is None and self.answer.outcome is not None:
            self.outcome = self.source.read_answer(self)
        return self.outcome

    def wait(self, seconds: float) -> None:
        """Block until there is an answer, at most so long."""
        self.answer.wait(seconds)


class KVSource(ABC):
    """One source; see the module. All methods run on the scheduler thread and never wait.

    Of ``request`` (a ``RequestState``) a source reads what it needs. It writes only the fields that are documented as a
    source's.
    """

    name: ClassVar[str]  # label of metrics
    cost_key: ClassVar[str] = ""  # the planner's queue; "": taken without an estimate, above ``pull_threshold``
    stage_metric: ClassVar[str] = ""  # histogram of a hit's stages, if it has a ``cost_key``
    answers_soon: ClassVar[bool] = False  # on this node, or like it: the matcher may wait some milliseconds
    holds_hit: ClassVar[bool] = False  # its hit is kept while other candidates are asked for more
    can_cancel_load: ClassVar[bool] = False  # the workers can stop a load that no request waits for
    others_may_have_it: ClassVar[bool] = False  # after a failed transfer the request is matched anew
    looks_ahead: ClassVar[bool] = False  # it looks up queued requests
    loads_in_parts: ClassVar[bool] = False  # a load may have several jobs: see ``grown``
    submit: Callable[[Any], object]  # the matcher's, if ``loads_in_parts``: the next step gets this job
    grown: Collection[str] = ()  # requests whose loads may go on; if not empty, ``more_jobs`` is called in each step
    max_hold_seconds: ClassVar[float] = math.inf  # how long a request that waits for blocks may keep its hit

    # -- before a request is matched: called if ``looks_ahead`` ------------------------------------------------------

    def prefetch_lookup(self, request: Any) -> None:
        """Send the lookup of a queued request (vLLM's own object) before vLLM matches it."""

    def on_matched(self, request_id: str) -> None:
        """vLLM came to the request."""

    def cancel_prefetch(self, request_id: str) -> None:
        """Cancel the lookup that was sent for a request that ended or goes on without it. Idempotent."""

    def expire_prefetches(self) -> bool:
        """Once a step: cancel lookups that were sent too early. Returns whether any is left, or will be sent."""
        return False

    def prefetch_promotion(self, request: Any) -> bool:
        """Have the source promote what a queued request (vLLM's) will look up. False: it has no secondary tier."""
        return False

    # -- lookup ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def candidates(self, state: RequestState) -> Iterable[Candidate]:
        """What can be asked for the request, in order; empty if the source does not apply to it."""

    def candidates_after_loss(self) -> Iterable[Candidate]:
        """What is asked again for a request that lost its blocks (preempted, or evicted while it waited), or whose
        transfer from another engine failed."""
        return ()

    def last_state(self, state: RequestState) -> int:
        """Tokens behind which a hit for this request will have recurrent states, if that is known before it is asked:
        where the hit ends, mostly where the prompt is computed on. 0: not known, or the source does not apply to it."""
        return 0

    @abstractmethod
    def lookup(self, state: RequestState, candidate: Candidate, need: Need) -> PendingLookup | None:
        """Ask. None: not worth asking, or not possible; ``state.miss_reason`` says why, if a reason is known."""

    @abstractmethod
    def read_answer(self, pending: PendingLookup) -> LookupHit | LookupMiss:
        """The client's answer as a result. What the answer leased and the result does not hold is released here."""

    def answers_at_once(self, pending: PendingLookup) -> bool:
        """Whether the answer is expected within milliseconds."""
        return self.answers_soon

    def early_hit(self, state: RequestState) -> LookupHit | None:
        """A hit that can be read while ``state.pending`` has no answer yet."""
        return None

    def retry_lookup(self, state: RequestState, result: LookupHit | LookupMiss) -> PendingLookup | None:
        """Ask again and wait, if more is being promoted and waiting is expected to be faster than computing."""
        return None

    def fits(self, state: RequestState, hit: LookupHit) -> bool:
        """Whether a hit, in answer to ``state.pending``, has what was asked for. False: malformed."""
        return True

    def beats(self, state: RequestState, hit: LookupHit, held: LookupHit) -> bool:
        """Whether a hit is to be taken in place of the one that is held."""
        return False

    def on_held(self, state: RequestState, hit: LookupHit) -> None:
        """A hit is about to become ``state.held``."""

    def is_current(self, state: RequestState, hit: LookupHit) -> bool:
        """False: the engine's cache was reset since the lookup, and the blocks are of no use to it any more."""
        return True

    # -- load --------------------------------------------------------------------------------------------------------

    def supports_sync_load(self, hit: LookupHit) -> bool:
        """Whether a step can wait for the load on the device."""
        return False

    def timed_as(self, hit: LookupHit) -> str:
        """The cost key by which the planner knows how long the load takes, also if it does not decide about it; "":
        not known."""
        return self.cost_key

    @abstractmethod
    def build_job(self, state: RequestState, block_ids: BlockIds, tokens: int) -> Job | FailedJob:
        """The workers' job for ``state.hit``: tokens [num_computed_tokens, tokens) into the blocks that vLLM
        allocated. Sets ``state.positions``, and ``state.entries`` if what comes has its checksum in the workers'
        tables."""

    def on_allocated(self, state: RequestState, num_tokens: int) -> None:
        """``num_tokens`` tokens are being loaded."""

    def more_jobs(self) -> Iterable[Any]:
        """Jobs of loads that go on, whose earlier jobs had ``more``. Called if ``loads_in_parts``."""
        return ()

    def end_waiting_loads(self) -> None:
        """The engine pauses: each load under way ends as soon as nothing of it is being read. What it lacks is computed
        later. Called if ``loads_in_parts``."""

    def cancel_load(self, state: RequestState) -> None:
        """The request of a load under way ended: begin no more of it than has to be."""

    def remove_load(self, state: RequestState) -> None:
        """What ``build_job`` returned does not get to the workers; a failed job takes its place."""

    def on_result(self, state: RequestState, result: Result) -> None:
        """A rank's job for ``state.hit`` ended, well or not."""

    @abstractmethod
    def on_loaded(self, state: RequestState) -> None:
        """All ranks loaded ``state.hit``: count its tokens."""

    def on_load_failed(self, state: RequestState, result: Result) -> None:
        """A rank's load of ``state.hit`` failed: discard what is corrupt, back off from a bad peer."""

    # -- release -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def cancel(self, pending: PendingLookup) -> None:
        """End a lookup: its lease, granted or still to come, goes back."""

    @abstractmethod
    def release(self, hit: LookupHit, consumed: bool) -> None:
        """End a hit's lease. ``consumed``: a prefill engine may free what it exported."""

    def release_hit(self, state: RequestState) -> None:
        """End the lease of ``state.hit``, whose load ended or does not happen."""
        self.release(state.hit, True)

    def release_export(self, state: RequestState) -> None:
        """Tell a peer that keeps blocks for this request that it will not read them."""

    # -- reports -----------------------------------------------------------------------------------------------------

    def describe(self, hit: LookupHit) -> str:
        """Where a hit is, for the request's params."""
        return self.name

    def tokens_by_source(self, state: RequestState, tokens: int) -> dict[str, int]:
        """``tokens`` tokens that were loaded from here, by the labels of ``prompt_tokens``."""
        return {self.name: tokens}

    def hit_sources(self, state: RequestState, tokens: int) -> dict[str, int]:
        """The same for vLLM's ``get_external_cache_hit_sources``: "host", "disk", "secondary" or "peer"."""
        return {"peer": tokens}
