"""Base class of the sources that read GPU blocks of another engine, under a lease of ``LeaseClient``.

The lease client chooses the path (``shapes.read_paths``) when it asks; here it selects the workers' job.
"""

import math
from typing import Any

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.results import Result
from vllm_kvtier.jobs.transfer_jobs import FailedJob, PeerFetchJob
from vllm_kvtier.scheduler.context import LoadContext
from vllm_kvtier.scheduler.leases.pending_leases import LeasedBlocks
from vllm_kvtier.scheduler.matching.request_state import lora_fingerprint_of
from vllm_kvtier.scheduler.matching.transfer_params import Address
from vllm_kvtier.scheduler.sources import job_builder
from vllm_kvtier.scheduler.sources.base import (
    BlockIds,
    Job,
    KVSource,
    LookupHit,
    LookupMiss,
    Need,
    PendingLookup,
    RequestState,
)
from vllm_kvtier.vllm_compat import requests as vr

PEER_GPU = "peer_gpu"  # cost key of copies from other engines' mapped memory

# Of a prompt, in blocks of another engine: half of what a message may have, because the reactor does nothing else
# meanwhile. 2.4 microseconds each (sha256_cbor, blocks of 16 tokens), 0.16 s.
MAX_OTHER_HASHES = 1 << 16


class PeerLeaseSource(KVSource):
    """Blocks count as pulled, by whichever path."""

    others_may_have_it = True

    def __init__(self, context: LoadContext):
        self._context, self._engine = context, context.engine
        self._config, self._counters, self._geometry = (
            context.engine.config,
            context.engine.counters,
            context.engine.geometry,
        )
        self._lease_client = context.lease_client

    def _block_hashes(self, state: RequestState, tokens: int) -> list[bytes]:
        return vr.block_hashes(state.request, tokens, self._geometry.hash_block_size)

    def _ask(
        self,
        state: RequestState,
        address: Address,
        start: int,
        block_hashes: list[bytes],
        timeout: float = math.inf,
        **fields: Any,
    ) -> PendingLookup:
        """``fields``: of ``LeaseClient.ask``."""
        max_tokens = max(len(block_hashes) * self._geometry.hash_block_size, fields.get("partial_up_to", 0))
        fields["lora_fingerprint"] = lora_fingerprint_of(state.request)
        if not self._can_rehash():
            fields.pop("rehash", None)
        answer = self._lease_client.ask(address, timeout, block_hashes=block_hashes, start=start, **fields)
        try:
            pending = PendingLookup(self, answer, start, max_tokens)
        except Exception:
            self._lease_client.cancel(answer)
            raise
        pending.state = state
        return pending

    def _can_rehash(self) -> bool:
        """Whether engines with other block sizes can be asked."""
        return not self._engine.info.hash_lookahead and vr.hashes_blocks_of_other_sizes()

    def _other_hashes(self, state: RequestState, hash_block_size: int) -> list[bytes]:
        """The block hashes of all of the request's tokens, as an engine with this block size makes them. On the
        reactor's thread, while the request waits for its lookup. KVTierError if they are too many."""
        if state.request.num_tokens > MAX_OTHER_HASHES * hash_block_size:
            raise KVTierError(f"this prompt has more than {MAX_OTHER_HASHES} blocks of {hash_block_size} tokens")
        known = state.other_hashes.get(hash_block_size, [])
        hash_fn = self._engine.info.hash_function()
        made = vr.hash_blocks(state.request, state.request.num_tokens, hash_block_size, hash_fn, known)
        state.other_hashes[hash_block_size] = made
        return made

    def _too_little(self, state: RequestState, need: Need) -> bool:
        """Decline the lookup if fewer than ``pull_threshold`` tokens lack."""
        if need.tokens_after_held_hit >= max(1, self._config.pull_threshold):
            return False
        reason = "below_threshold" if need.tokens_after_held_hit > 0 else "local_cache_hit"
        state.decline_lookup(self._counters, reason)
        return True

    def _reply_address(self) -> dict[str, Any]:
        """Where the peer finds this engine, if it may pull from this engine later."""
        host, port = self._engine.identity.address if self._config.bidirectional else ("", 0)
        return {"reply_host": host, "reply_port": port}

    def read_answer(self, pending: PendingLookup) -> LookupHit | LookupMiss:
        leased = pending.answer.outcome
        if isinstance(leased, LookupMiss):
            return leased
        return LookupHit(
            self, leased.instance, leased.lease, leased.start, leased.tokens, leased.blocks, address=leased.address,
            ranks=leased.ranks, path=leased.path, same_layout=leased.same_layout, nbytes=leased.nbytes,
            hash_block_size=leased.hash_block_size, block_tokens=leased.block_tokens,
        )  # fmt: skip

    def fits(self, state: RequestState, hit: LookupHit) -> bool:
        most = state.pending.max_tokens
        if hit.hash_block_size not in (0, self._geometry.hash_block_size):
            most = len(state.other_hashes.get(hit.hash_block_size, ())) * hit.hash_block_size
        return self._fits(hit, state.pending.start, most)

    def _fits(self, hit: LookupHit | LeasedBlocks, start: int, max_tokens: int) -> bool:
        groups = self._geometry.groups
        if not (start <= hit.start < hit.tokens <= max_tokens and len(hit.blocks) == len(groups)):
            return False
        if hit.block_tokens and len(hit.block_tokens) != len(groups):
            return False
        sizes = hit.block_tokens or tuple(size for size, _ in groups)
        for ids, size, (_, kind) in zip(hit.blocks, sizes, groups, strict=True):
            if len(ids) != -(-hit.tokens // size) - hit.start // size:
                return False
            if kind.whole_prefix and not all(ids):
                return False  # vLLM would compute on a block that no rank reads into
        return True

    def beats(self, state: RequestState, hit: LookupHit, held: LookupHit) -> bool:
        return hit.tokens >= held.tokens + max(1, self._config.pull_threshold)

    def supports_sync_load(self, hit: LookupHit) -> bool:
        """A load that others do not wait for finds out whether the engine's memory can be mapped."""
        sizes = tuple(size for size, _ in self._geometry.groups)
        whole = not hit.grows and tuple(hit.block_sizes(self._geometry.groups)) == sizes
        return whole and hit.mapped and self._context.sync_load.is_mapped(hit.instance)

    def timed_as(self, hit: LookupHit) -> str:
        """All copies from mapped memory are the same work. A load that grows mostly waits for its prefill, and counts
        only if it has to map the engine's memory, which no step should wait for."""
        waits = hit.grows and self._context.sync_load.is_mapped(hit.instance)
        return PEER_GPU if hit.mapped and not waits else ""

    def answers_at_once(self, pending: PendingLookup) -> bool:
        return self.answers_soon or pending.answer.on_this_node

    def build_job(self, state: RequestState, block_ids: BlockIds, tokens: int) -> Job | FailedJob:
        keys = self._engine.identity.content_keys_of(state.hit.hash_block_size)
        timeout = self._config.transfer_timeout
        job = job_builder.pull_job(state, self._geometry, keys, block_ids, tokens, timeout)
        if not state.hit.mapped:
            return job
        state.positions = job_builder.positions(self._geometry, block_ids, state.num_computed_tokens, tokens)
        return PeerFetchJob(job.request_id, job.instance, job.groups, timeout)

    def on_loaded(self, state: RequestState) -> None:
        self._counters.count("pulled_tokens", self.name, state.num_external_tokens)
        self._remember_read(state.hit)

    def _remember_read(self, hit: LookupHit) -> None:
        if hit.mapped:
            self._context.sync_load.mapped(hit.instance)
        else:
            self._lease_client.readable(hit.instance)

    def on_load_failed(self, state: RequestState, result: Result) -> None:
        hit = state.taken_hit
        if not self._is_of(hit, result):
            return
        if getattr(result, "unmappable", ""):
            self._lease_client.unmappable(hit.instance)
        elif getattr(result, "unreadable", False):
            state.unreadable = hit.instance
            self._lease_client.unreadable(hit.instance)
        elif result.checksum_mismatch and not hit.mapped and state.unreadable != hit.instance:
            self._lease_client.readable(hit.instance)  # bytes came

    @staticmethod
    def _is_of(hit: LookupHit, result: Result) -> bool:
        """False: the late result of an earlier job of another source."""
        return result.kind == ("fetch" if hit.mapped else "pull")

    def cancel(self, pending: PendingLookup) -> None:
        self._lease_client.cancel(pending.answer)

    def release(self, hit: LookupHit, consumed: bool) -> None:
        self._lease_client.release(hit, consumed)

    def describe(self, hit: LookupHit) -> str:
        return f"{hit.address[0]}:{hit.address[1]}"
