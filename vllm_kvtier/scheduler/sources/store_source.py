"""The node store as a source of KV for this engine's requests: which lookups are worth it, waiting for promotions, and
lookups for requests that vLLM will match soon."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from vllm_kvtier.jobs.results import LoadResult, Result
from vllm_kvtier.jobs.transfer_jobs import LoadJob
from vllm_kvtier.scheduler.context import LoadContext
from vllm_kvtier.scheduler.leases.peer_directory_client import PeerDirectoryClient
from vllm_kvtier.scheduler.matching.lookup_prefetch import LookupPrefetcher
from vllm_kvtier.scheduler.matching.request_state import lora_fingerprint_of
from vllm_kvtier.scheduler.matching.transfer_params import hints
from vllm_kvtier.scheduler.offload.kv_events import Events
from vllm_kvtier.scheduler.sources import job_builder
from vllm_kvtier.scheduler.sources.base import (
    BlockIds,
    Candidate,
    KVSource,
    LookupHit,
    LookupMiss,
    Need,
    PendingLookup,
    PendingPromotion,
    RequestState,
)
from vllm_kvtier.scheduler.sources.node_store import NodeStore
from vllm_kvtier.scheduler.sources.peer_gpu import PeerGpuSource
from vllm_kvtier.scheduler.sources.promotion_wait import PromotionWait
from vllm_kvtier.store.client import Failed, Pending, StoreClient
from vllm_kvtier.store.joined_client import JoinedStoreClient
from vllm_kvtier.store.protocol import HASH_BYTES, HOLD_SECONDS, MAX_HASH_BLOCKS, Found
from vllm_kvtier.vllm_compat import requests as vr

# A step, which there is in any case, computes so few tokens (or less than a block) as fast as a single one. A prompt of
# whole blocks that the GPU has but for the last one is not worth a lookup, for which the request would wait.
FEW_TOKENS = 16
# Seconds after which the store gets a touch, with others: the request that it is for is computed meanwhile.
TOUCH_WITHIN = 20e-3


def packed(block_hashes: list[bytes]) -> bytes:
    """The first ``HASH_BYTES`` bytes of each hash; all are of one length."""
    block_hashes = block_hashes[:MAX_HASH_BLOCKS]
    if not block_hashes:
        return b""
    return np.frombuffer(b"".join(block_hashes), np.uint8).reshape(len(block_hashes), -1)[:, :HASH_BYTES].tobytes()


class NodeStoreSource(NodeStore, KVSource):
    """It answers lookups by block hash with leased slots.

    The first answer says what is in memory, and what it has begun to promote from its secondary tiers. ``retry_lookup``
    asks a second time and lets the store wait, if ``PromotionWait`` expects that to be faster than computing.

    A hit of an earlier ``epoch`` is not used: a reset of the engine's cache began new namespaces, which the old blocks
    are not in.
    """

    name = cost_key = "host"
    stage_metric = "host_hit_seconds"
    answers_soon = holds_hit = can_cancel_load = looks_ahead = True
    max_hold_seconds = HOLD_SECONDS

    def __init__(
        self,
        context: LoadContext,
        send: Callable[..., None],
        on_lost: Callable[[], None],
        peer_gpu: PeerGpuSource,
        sharing: PeerDirectoryClient | None = None,
        events: Events | None = None,
    ):
        """As ``NodeStore``. ``peer_gpu``: reads what the store says that peers have."""
        super().__init__(context, send, on_lost, sharing, events)
        self.peer_gpu, self._context, self._engine = peer_gpu, context, context.engine
        self._counters = context.engine.counters
        self._few_tokens = min(FEW_TOKENS, self._hash_block_size)
        self._promotion_wait = PromotionWait(context, self.load_bytes)
        # How far vLLM's prefix cache reaches is guessed by its blocks, without states.
        self._prefetches = self._info.supports_partial_prefix and self._geometry.by_position
        self.prefetcher = LookupPrefetcher(self, self._hash_block_size)
        whole = [size // self._hash_block_size for size, kind in self._geometry.groups if kind.whole_prefix]
        self._first_hash = whole[0] - 1 if whole else None  # index of the hash of a prompt's first block

    # -- messages to the store, and its answers ----------------------------------------------------------------------

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
        limit = self.limit()
        if not limit or start >= MAX_HASH_BLOCKS * self._hash_block_size:
            return None
        if self.events is not None:
            self.events.join(self.namespace_id(lora_fingerprint))
        key_mask, hash_blocks_per_block = self.directory_key_params(lora_fingerprint)
        client = self.opened_client
        instance = client.instance  # before the lookup: slots must not be taken for those of a later instance
        answer = client.lookup(
            self.namespace_id(lora_fingerprint),
            packed(block_hashes),
            start // self._hash_block_size,
            limit,
            wait_seconds,
            nodes,
            key_mask=key_mask,
            hash_blocks_per_block=hash_blocks_per_block,
        )
        try:
            most = len(block_hashes) * self._hash_block_size
            return PendingLookup(self, answer, start, most, self.epoch, instance)
        except Exception:
            self._release_answer(answer)
            raise

    def lacks(
        self, block_hashes: list[bytes], start: int, lora_fingerprint: bytes, nodes: tuple[str, ...] = ()
    ) -> bool:
        """Whether it is certain without asking that ``ask`` would find nothing: by ``PresenceView``, which knows the
        store's memory; not if secondary tiers or peers may have blocks. A hit needs the first block from ``start`` on
        of each group whose whole prefix is needed."""
        client = self.client
        if client is None or self._first_hash is None or client.peer_count or nodes:
            return False
        if client.tiers and self._looks_below(client, nodes):
            return False
        presence, last = client.presence, start // self._hash_block_size + self._first_hash
        if presence is None or last >= len(block_hashes):
            return False
        namespace_id = self.namespace_id(lora_fingerprint)
        if self.events is not None:
            self.events.join(namespace_id)  # as ``ask`` does: others may store there later
        return not presence.may_have(namespace_id, block_hashes[last])

    @staticmethod
    def _looks_below(client: StoreClient | JoinedStoreClient, nodes: tuple[str, ...]) -> bool:
        """Whether the store asks a secondary tier for a request that names these nodes."""
        return any(nodes or tier not in client.only_named for tier in client.tiers)

    def directory_key_params(self, lora_fingerprint: bytes) -> tuple[bytes, int]:
        """As ``PeerDirectoryClient.key_params``."""
        return self.sharing.key_params(lora_fingerprint) if self.sharing is not None else (b"", 1)

    def promote(self, block_hashes: list[bytes], lora_fingerprint: bytes, nodes: tuple[str, ...] = ()) -> bool:
        """Have the store promote these blocks, which will be looked up. False: it has no secondary tier."""
        limit, client = self.limit(), self.client
        if not limit or client is None or not self._looks_below(client, nodes):
            return False
        client.warm(self.namespace_id(lora_fingerprint), packed(block_hashes), limit, nodes)
        return True

    def read_answer(self, pending: PendingLookup) -> LookupHit | LookupMiss:
        """Check the answer: the store is another process, and its numbers become addresses here."""
        found, session = pending.answer.outcome, pending.answer.session
        if isinstance(found, Failed):
            return LookupMiss("store_unavailable", found.reason)
        if not isinstance(found, Found):
            return LookupMiss("malformed", f"an answer of type {type(found).__name__}")
        size, below, limit = self._hash_block_size, found.promotion, self.limit()
        tokens, promotion = found.num_hash_blocks * size, None
        candidates: tuple[Candidate, ...] = ()
        if below is not None:
            promotion = PendingPromotion(below.num_hash_blocks * size, below.seconds, below.asking)
        if pending.epoch == self.epoch:
            candidates = tuple(
                Candidate(self.peer_gpu, (h.host, h.port), h.instance, h.num_hash_blocks * size) for h in found.holders
            )
        if not found.lease:
            return LookupMiss("not_in_store", "", True, candidates, promotion)
        if tokens <= pending.start or pending.epoch != self.epoch:
            self.opened_client.release(found.lease, session)
            return LookupMiss("not_in_store", "")
        right = tokens <= pending.max_tokens and len(found.slots) == len(self._info.groups)
        if not right or any(
            tokens % size
            or len(slots) != (tokens - pending.start) // size
            or max(slots, default=0) + shape.slot_pages > limit
            or (kind.whole_prefix and not all(slots))
            for (size, kind), shape, slots in zip(self._info.groups, self.plan.shapes, found.slots, strict=True)
        ):
            self.opened_client.release(found.lease, session)
            if not limit:
                return LookupMiss("store_unavailable", "the store went away")
            return LookupMiss("malformed", "slots that this engine cannot reach")
        nbytes, logical = self.plan.hit_bytes(found.slots)
        return LookupHit(
            self, pending.instance, found.lease, pending.start, tokens, found.slots, nbytes=nbytes,
            candidates=candidates, pending_promotion=promotion, session=session, epoch=pending.epoch,
            logical_bytes=logical,
        )  # fmt: skip

    def release(self, hit: LookupHit, consumed: bool) -> None:
        self.opened_client.release(hit.lease, hit.session)

    def cancel(self, pending: PendingLookup) -> None:
        self._release_answer(pending.answer)

    def _release_answer(self, answer: Pending) -> None:
        """Release the lease of an answer, now or when it arrives."""
        answer.then(
            lambda p: (
                self.opened_client.release(p.outcome.lease, p.session)
                if isinstance(p.outcome, Found) and p.outcome.lease
                else None
            )
        )

    def touch(self, block_hashes: list[bytes], lora_fingerprint: bytes) -> None:
        """Tell the store that these blocks are in use, in the GPU's cache."""
        client = self.client
        if client is not None and not self.lacks(block_hashes, 0, lora_fingerprint):
            namespace_id = self.namespace_id(lora_fingerprint)
            self._reactor.call_within(TOUCH_WITHIN, lambda: client.touch(namespace_id, packed(block_hashes)))

    # -- before a request is matched ---------------------------------------------------------------------------------

    def prefetch_lookup(self, request: Any) -> None:
        lora_fingerprint = vr.lora_fingerprint(request)
        # From the prompt's first block on: the store keeps no prefix without its beginning.
        if lora_fingerprint is None or not self.lacks(request.block_hashes, 0, lora_fingerprint):
            self.prefetcher.add(request)

    def on_matched(self, request_id: str) -> None:
        self.prefetcher.on_matched(request_id)

    def cancel_prefetch(self, request_id: str) -> None:
        self.prefetcher.cancel(request_id)

    def expire_prefetches(self) -> bool:
        return self.prefetcher.expire()

    def prefetch_promotion(self, request: Any) -> bool:
        if self.client is None or not self.client.tiers:
            return False
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

    def supports_sync_load(self, hit: LookupHit) -> bool:
        return True

    def build_job(self, state: RequestState, block_ids: BlockIds, tokens: int) -> LoadJob:
        keys, timeout = self._engine.identity.content_keys(), self._config.transfer_timeout
        job = job_builder.load_job(state, self._geometry, keys, block_ids, tokens, timeout)
        if self._joined is not None:
            for load in job.groups:
                load.by_node = self._joined.slots_of(state.hit.lease, load.group, load.slots)
        return job

    def on_allocated(self, state: RequestState, num_tokens: int) -> None:
        """Publish that these blocks are in this engine's cache too."""
        if self.events is not None and self.is_current(state, state.hit):
            start = state.num_computed_tokens
            namespace_id = self.namespace_id(lora_fingerprint_of(state.request))
            self.events.loaded(namespace_id, state.request, start, start + num_tokens)

    def on_loaded(self, state: RequestState) -> None:
        self._counters.count("loaded_tokens", self.name, state.num_external_tokens)
        self._counters.count("loaded_logical_bytes", amount=state.hit.logical_bytes)

    def on_load_failed(self, state: RequestState, result: Result) -> None:
        """The store discards the blocks whose checksum is wrong."""
        if not isinstance(result, LoadResult):  # the late result of an earlier job of another source
            return
        joined, lease = self._joined, state.hit.lease
        namespace_id = self.namespace_id(lora_fingerprint_of(state.request))
        if joined is None:
            for group, slot, block_hash in job_builder.hashes_of(state, self._geometry, result.corrupt):
                self._one_node_client.discard(namespace_id, group, block_hash[:HASH_BYTES], slot, state.hit.session)
            return
        for group, slot in result.corrupt:
            [first] = joined.slots_of(lease, group, np.array([slot], np.int64), result.node)[0].tolist()
            for _, _, block_hash in job_builder.hashes_of(state, self._geometry, [(group, first)]):
                joined.discard_at(result.node, namespace_id, group, block_hash[:HASH_BYTES], slot, lease)

    def tokens_by_source(self, state: RequestState, tokens: int) -> dict[str, int]:
        promoted = min(state.promoted_tokens, tokens)
        return {"secondary_tier": promoted, self.name: tokens - promoted}

    def hit_sources(self, state: RequestState, tokens: int) -> dict[str, int]:
        """Label "host": they were in memory; "disk", "peer": the tier that they were promoted from; "secondary": one of
        several tiers."""
        promoted, tiers = min(state.promoted_tokens, tokens), self.client.tiers if self.client is not None else ()
        kind = "disk" if tiers == ("disk",) else "peer" if tiers in (("nodes",), ("mooncake",)) else "secondary"
        return {"host": tokens - promoted, kind: promoted}
