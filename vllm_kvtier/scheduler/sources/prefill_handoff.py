"""The prefill of a prefill engine that its router named for the request."""

from functools import partial
from typing import Any

from vllm_kvtier.codecs import Codec
from vllm_kvtier.scheduler.leases.exports import GroupBlocks
from vllm_kvtier.scheduler.sources import job_builder
from vllm_kvtier.scheduler.sources.base import Candidate, LookupHit, Need, PendingLookup, RequestState
from vllm_kvtier.scheduler.sources.peer_lease import PeerLeaseSource
from vllm_kvtier.vllm_compat import requests as vr


class PrefillHandoffSource(PeerLeaseSource):
    """The export is leased by its name, and the digest of the prompt proves that it is this prompt's.

    *Early read*: if the request's params say all that the lease would, the workers begin to read before the lease is
    granted. The lookup stays under way, so that a lease covers the read soon after it began and can be released at its
    end. The checksums decide whether what was read is right.

    The lease is asked from token 0 on, whatever vLLM has: its prefix cache may evict that while the request waits for
    blocks. Only what is lacking then is read.

    The prefill engine keeps the export until it is consumed, released (``release_export``) or its time limit passes.
    """

    name = "handoff"

    def candidates(self, state: RequestState) -> list[Candidate]:
        handoff = state.hints.handoff
        return [Candidate(self, handoff.address)] if handoff is not None and not handoff.follow else []

    def last_state(self, state: RequestState) -> int:
        return self._exported_tokens(state) if self.candidates(state) else 0

    def lookup(self, state: RequestState, candidate: Candidate, need: Need) -> PendingLookup | None:
        if self._too_little(state, need):
            self.release_export(state)
            return None
        tokens, hash_block_size = self._exported_tokens(state), self._geometry.hash_block_size
        hashes = self._block_hashes(state, tokens)
        return self._ask(
            state, candidate.address, 0, hashes[-1:], export=state.hints.handoff.export,
            digest=self._digest(state, hashes, tokens, hash_block_size), rehash=partial(self._rehash, state, tokens),
            **self._reply_address(),
        )  # fmt: skip

    def _rehash(self, state: RequestState, tokens: int, hash_block_size: int) -> dict[str, Any]:
        """As ``Rehash``."""
        others = self._other_hashes(state, hash_block_size)[: tokens // hash_block_size]
        return {"block_hashes": others[-1:], "digest": self._digest(state, others, tokens, hash_block_size)}

    def _exported_tokens(self, state: RequestState) -> int:
        """Tokens of the export, as the request's params say. Without them: all that can be of use."""
        most, early = self._geometry.lookup_tokens(state.request.num_tokens), state.hints.handoff.early_read
        alignment = self._geometry.alignment if self._geometry.whole_blocks else 1
        return early.tokens if early is not None and 0 < early.tokens <= most else most // alignment * alignment

    def _digest(self, state: RequestState, hashes: list[bytes], tokens: int, hash_block_size: int) -> bytes:
        return vr.prefix_digest(hashes, job_builder.tail_hash(state, tokens, hash_block_size, hashes))

    def early_hit(self, state: RequestState) -> LookupHit | None:
        """None with a codec: encoding takes longer than a checksum, and what is read before its end is read in vain."""
        if self._config.wire_codec != Codec.RAW:
            return None
        early, address, start = state.hints.handoff.early_read, state.hints.handoff.address, state.pending.start
        if early is None or early.digest != state.pending.answer.request.digest:
            return None
        if len(early.blocks) != len(self._geometry.groups):
            return None
        ranks = self._lease_client.known(address, early.instance)
        if ranks is None:
            return None
        if (block_ids := early.block_ids()) is None:
            return None
        pairs = zip(block_ids, self._geometry.groups, strict=True)
        groups = [GroupBlocks(size, ids, kind) for ids, (size, kind) in pairs]
        if not all(group.cover(start, early.tokens) for group in groups):
            return None
        blocks = [group.ids[start // group.block_tokens :] for group in groups]
        hit = LookupHit(self, early.instance, 0, start, early.tokens, blocks, address=address, ranks=ranks)
        return hit if self.fits(state, hit) else None

    def fits(self, state: RequestState, hit: LookupHit) -> bool:
        return self._fits(hit, state.pending.start, state.request.num_tokens)

    def release_hit(self, state: RequestState) -> None:
        pending = state.pending
        answer = pending.poll() if pending is not None else None
        if state.hit.lease:
            self.release(state.hit, True)
        elif answer is not None and answer.found:
            self.release(answer, True)
        else:  # read early; the lease was not granted yet, or refused
            if pending is not None and answer is None:
                self.cancel(pending)
            self.release_export(state)

    def release_export(self, state: RequestState) -> None:
        handoff = state.hints.handoff
        if handoff is not None and not handoff.follow:
            self._lease_client.release_export(handoff.address, handoff.export)
