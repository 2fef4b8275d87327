"""What the node store and other nodes' stores have in common as sources: which lookups are worth it, waiting for
promotions, and lookups for requests that vLLM will match soon."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from vllm_kvtier.codecs import Codec
from vllm_kvtier.jobs.results import LoadResult, Result
from vllm_kvtier.jobs.transfer_jobs import LoadJob
from vllm_kvtier.scheduler.context import LoadContext
from vllm_kvtier.scheduler.matching.lookup_prefetch import LookupPrefetcher
from vllm_kvtier.scheduler.matching.request_state import lora_fingerprint_of
from vllm_kvtier.scheduler.matching.transfer_params import hints
from vllm_kvtier.scheduler.sources import job_builder
from vllm_kvtier.scheduler.sources.base import (
    BlockIds,
    Candidate,
    KVSource,
    LookupHit,
    LookupMiss,
    Need,
    PendingLookup,
    RequestState,
)
from vllm_kvtier.scheduler.sources.promotion_wait import PromotionWait
from vllm_kvtier.scheduler.sources.slot_layout import SlotPlan, plan_slots
from vllm_kvtier.store.protocol import HASH_BYTES, HOLD_SECONDS, MAX_HASH_BLOCKS
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.wire import link as lm
from vllm_kvtier.wire import messages as m

# A step, which there is in any case, computes so few tokens (or less than a block) as fast as a single one. A prompt of
# whole blocks that the GPU has but for the last one is not worth a lookup, for which the request would wait.
FEW_TOKENS = 16


def packed(block_hashes: list[bytes]) -> bytes:
    """The first ``HASH_BYTES`` bytes of each hash; all are of one length."""
    block_hashes = block_hashes[:MAX_HASH_BLOCKS]
    if not block_hashes:
        return b""
    return np.frombuffer(b"".join(block_hashes), np.uint8).reshape(len(block_hashes), -1)[:, :HASH_BYTES].tobytes()


class StoreSource(KVSource):
    """A store that answers lookups by block hash with leased slots.

    Its first answer says what is in memory, and what it has begun to promote from its secondary tiers. ``retry_lookup``
    asks a second time and lets the store wait, if ``PromotionWait`` expects that to be faster than computing.

    A hit of an earlier ``epoch`` is not used: a reset of the engine's cache began new namespaces, which the old blocks
    are not in.
    """

    name = cost_key = "host"
    stage_metric = "host_hit_seconds"
    answers_soon = holds_hit = can_cancel_load = looks_ahead = True
    slots_by_node = False  # whether each node of the engine has a store of its own
    max_hold_seconds = HOLD_SECONDS

    def __init__(self, context: LoadContext, prefetches: bool):
        """``prefetches``: whether lookups are sent for queued requests too."""
        self._context, self._engine = context, context.engine
        self._config, self._counters, self._geometry = (
            context.engine.config,
            context.engine.counters,
            context.engine.geometry,
        )
        self._namespace_ids = context.namespace_ids
        self._info, self._hash_block_size = context.engine.info, context.engine.geometry.hash_block_size
        self._few_tokens = min(FEW_TOKENS, self._hash_block_size)
        self._reactor = context.engine.reactor
        self._plan: SlotPlan | None = None
        self._promotion_wait = PromotionWait(context, self.load_bytes)
        # How far vLLM's prefix cache reaches is guessed by its blocks, without states.
        self._prefetches = prefetches and self._info.supports_partial_prefix and self._geometry.by_position
        self.prefetcher = LookupPrefetcher(self, self._hash_block_size)

    # -- what a store does -------------------------------------------------------------------------------------------

    def open(
        self, namespace: m.Namespace, described: dict[int, lm.Described], codec: str | Mapping[str, str] = Codec.RAW
    ) -> None:
        """All ranks are known (reactor's thread): lay out the slots, connect, and set up the workers.

        ``codec``: the option's value as ``choice.resolve`` returned it. Raises ValueError for blocks that fit no slot.
        """
        plan = plan_slots(
            namespace, described, codec, self._geometry.groups, self._hash_block_size, self._info.release,
            self.slots_by_node,
        )  # fmt: skip
        self._plan, self._namespace_ids.base = plan, plan.base
        self._connect(plan)

    @abstractmethod
    def _connect(self, plan: SlotPlan) -> None: ...

    @property
    def opened(self) -> bool:
        return self._plan is not None

    @property
    def plan(self) -> SlotPlan:
        """Of an opened store."""
        assert self._plan is not None
        return self._plan

    @property
    def codecs(self) -> list[Codec]:
        """By group; [] until the store is opened."""
        return self._plan.codecs if self._plan is not None else []

    @abstractmethod
    def reached(self, message: lm.PoolReady) -> None:
        """A worker reports how much of the store's memory it can read (reactor's thread)."""

    def lost(self, message: lm.RemoteStoreLost) -> None:
        """A worker cannot read a remote store's memory (reactor's thread)."""

    def tunnelled(self, message: lm.StoreFrame) -> None:
        """From the store of another node of this engine (reactor's thread)."""

    def link_renewed(self, rank: int) -> None:
        """Messages of this rank, or to it, may have been lost (reactor's thread)."""

    @property
    def epoch(self) -> int:
        return self._namespace_ids.epoch

    def namespace_id(self, lora_fingerprint: bytes) -> bytes:
        return self._namespace_ids.of(lora_fingerprint)

    def renew(self) -> None:
        """Start new namespaces: this engine uses nothing any more that is stored so far."""
        self._namespace_ids.renew()

    @abstractmethod
    def limit(self) -> int:
        """0: nothing can be loaded from the store now."""

    @abstractmethod
    def ask(
        self,
        start: int,
        block_hashes: list[bytes],
        lora_fingerprint: bytes,
        nodes: tuple[str, ...] = (),
        wait_seconds: float = 0.0,
    ) -> PendingLookup | None:
        """What the store has of ``block_hashes`` from token ``start`` on; None if it cannot be asked.

        ``nodes``: other nodes' stores that may have it. ``wait_seconds``: how long it may wait for promotions.
        """

    def lacks(
        self, block_hashes: list[bytes], start: int, lora_fingerprint: bytes, nodes: tuple[str, ...] = ()
    ) -> bool:
        """Whether it is certain without asking that ``ask`` would find nothing."""
        return False

    @abstractmethod
    def touch(self, block_hashes: list[bytes], lora_fingerprint: bytes) -> None:
        """Tell the store that these blocks are in use, in the GPU's cache."""

    @abstractmethod
    def promote(self, block_hashes: list[bytes], lora_fingerprint: bytes, nodes: tuple[str, ...] = ()) -> bool:
        """Have the store promote these blocks, which will be looked up. False: it has no secondary tier."""

    @abstractmethod
    def discard(self, lora_fingerprint: bytes, group: int, block_hash: bytes, slot: int, session: int) -> None:
        """Discard a block whose checksum is wrong."""

    def load_bytes(self, tokens: int) -> int:
        """Bytes that one rank loads for so many tokens, see ``SlotPlan.full_bytes``."""
        return self.plan.full_bytes(self._info.groups, tokens)

    # -- before a request is matched ---------------------------------------------------------------------------------

    def prefetch_lookup(self, request: Any) -> None:
        self.prefetcher.add(request)

    def on_matched(self, request_id: str) -> None:
        self.prefetcher.on_matched(request_id)

    def cancel_prefetch(self, request_id: str) -> None:
        self.prefetcher.cancel(request_id)

    def expire_prefetches(self) -> bool:
        return self.prefetcher.expire()

    def prefetch_promotion(self, request: Any) -> bool:
        asked, lora_fingerprint = hints(request), vr.lora_fingerprint(request)
        block_hashes = self._hashes(request)
        if lora_fingerprint is None or not block_hashes or asked.handoff:
            return False
        return self.promote(block_hashes, lora_fingerprint, asked.stores)

    # -- lookup ------------------------------------------------------------------------------------------------------

    def candidates(self, state: RequestState) -> Iterable[Candidate]:
        return [Candidate(self)] if self._info.supports_partial_prefix or state.hints.handoff else []

    def candidates_after_loss(self) -> Iterable[Candidate]:
        return [Candidate(self)]

    def lookup(self, state: RequestState, candidate: Candidate, need: Need) -> PendingLookup | None:
        vllm_request, start = state.request, need.start
        hashes, lora_fingerprint = self._hashes(vllm_request), lora_fingerprint_of(vllm_request)
        state.asked_from, state.epoch = start, self.epoch
        in_store = len(hashes) * self._hash_block_size
        if need.tokens < self._few_tokens or in_store <= start or start % self._geometry.alignment:
            if hashes:
                self.touch(hashes, lora_fingerprint)  # the store should keep what the GPU has
            state.miss_reason = "less_than_one_block"
            self.cancel_prefetch(vllm_request.request_id)
            return None
        if start >= MAX_HASH_BLOCKS * self._hash_block_size:
            self.cancel_prefetch(vllm_request.request_id)
            state.decline_lookup(self._counters, "prompt_too_long")
            return None
        if self.lacks(hashes, start, lora_fingerprint, state.hints.stores):
            self.cancel_prefetch(vllm_request.request_id)
            state.decline_lookup(self._counters, "not_in_store")
            return None
        sent = self.prefetcher.take(vllm_request, hashes, start)
        if sent is None and not need.alone and self._cannot_beat_compute(vllm_request, start, probe=True):
            self.touch(hashes, lora_fingerprint)
            state.decline_lookup(self._counters, "lookup_slower_than_compute")
            return None
        pending = sent or self.ask(start, hashes, lora_fingerprint, state.hints.stores)
        if pending is None:
            state.miss_reason = "store_unavailable"
        return pending

    def lookup_queued(self, request: Any, lora_fingerprint: bytes) -> PendingLookup | None:
        """Send the lookup of a queued request (vLLM's own object). None: not worth it now, or not possible."""
        if not self._prefetches:
            return None
        asked, hashes = hints(request), self._hashes(request)
        if asked.handoff or not hashes or not self.limit():
            return None
        # about the tokens that vLLM's prefix cache has
        cached = self._engine.pool.cached_about(hashes, self._info.full_groups, self._geometry.alignment)
        start = cached // self._geometry.alignment * self._geometry.alignment
        if len(hashes) * self._hash_block_size <= start or request.num_tokens - 1 - start < self._few_tokens:
            return None
        if request.skip_reading_prefix_cache or self._cannot_beat_compute(request, start, probe=False):
            return None
        return self.ask(start, hashes, lora_fingerprint, asked.stores)

    def _cannot_beat_compute(self, request: Any, start: int, probe: bool) -> bool:
        """As ``LoadPlanner.cannot_beat_compute``, for the prompt from ``start`` on with other requests in the engine.
        ``probe``: sometimes False, so that a load is tried."""
        if self._config.load_policy != "measured":
            return False
        # A synchronous load is of use as soon as it has ended.
        least = 0.0 if self._context.sync_load.possible else self._context.planner.handover_seconds()
        return self._context.planner.cannot_beat_compute(
            start, request.num_tokens - 1, request.num_tokens, probe, least
        )

    def _hashes(self, request: Any) -> list[bytes]:
        return vr.block_hashes(request, self._geometry.lookup_tokens(request.num_tokens), self._hash_block_size)

    def retry_lookup(self, state: RequestState, result: LookupHit | LookupMiss) -> PendingLookup | None:
        if not result.found and not result.searched:
            return None
        have = result.tokens if result.found else state.asked_from
        promotion = result.pending_promotion
        if promotion is not None and any(each.tokens >= promotion.tokens for each in result.candidates):
            return None  # a GPU of this node has it already
        wait_seconds = self._promotion_wait.wait_seconds(state, have, promotion)
        if not wait_seconds:
            return None
        fingerprint = lora_fingerprint_of(state.request)
        return self.ask(
            state.asked_from, self._hashes(state.request), fingerprint, state.hints.stores, wait_seconds
        )

    def on_held(self, state: RequestState, hit: LookupHit) -> None:
        if state.waits_since:
            self._promotion_wait.on_promoted(state, hit.tokens)

    def is_current(self, state: RequestState, hit: LookupHit) -> bool:
        return hit.epoch == self.epoch

    # -- load --------------------------------------------------------------------------------------------------------

    def build_job(self, state: RequestState, block_ids: BlockIds, tokens: int) -> LoadJob:
        keys, timeout = self._engine.identity.content_keys(), self._config.transfer_timeout
        return job_builder.load_job(state, self._geometry, keys, block_ids, tokens, timeout)

    def on_loaded(self, state: RequestState) -> None:
        self._counters.count("loaded_tokens", self.name, state.num_external_tokens)
        self._counters.count("loaded_logical_bytes", amount=state.hit.logical_bytes)

    def on_load_failed(self, state: RequestState, result: Result) -> None:
        """The store discards the blocks whose checksum is wrong."""
        if not isinstance(result, LoadResult):  # the late result of an earlier job of another source
            return
        fingerprint, session = lora_fingerprint_of(state.request), state.hit.session
        for group, slot, block_hash in job_builder.hashes_of(state, self._geometry, result.corrupt):
            self.discard(fingerprint, group, block_hash, slot, session)

    def tokens_by_source(self, state: RequestState, tokens: int) -> dict[str, int]:
        promoted = min(state.promoted_tokens, tokens)
        return {"secondary_tier": promoted, self.name: tokens - promoted}
