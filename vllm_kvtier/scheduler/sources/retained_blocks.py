"""Blocks that another engine retained from an earlier turn of the conversation."""

import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from vllm_kvtier.scheduler.context import LoadContext
from vllm_kvtier.scheduler.matching.transfer_params import Address
from vllm_kvtier.scheduler.sources import job_builder
from vllm_kvtier.scheduler.sources.base import Candidate, LookupHit, LookupMiss, Need, PendingLookup, RequestState
from vllm_kvtier.scheduler.sources.peer_lease import PeerLeaseSource
from vllm_kvtier.wire import messages as m

MAX_PULLERS = 1 << 16  # prefixes remembered (about 100 bytes each)


class PullerIndex:
    """The engine that last pulled a prefix from this one: it has the conversation, even if no router says so."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._at: OrderedDict[bytes, tuple[Address, float]] = OrderedDict()

    def record(self, last_hash: bytes, address: Address) -> None:
        """Any thread (one assignment)."""
        self._at[last_hash] = (address, time.monotonic() + self._seconds)
        self._at.move_to_end(last_hash)
        while len(self._at) > MAX_PULLERS:
            self._at.popitem(last=False)

    def find(self, block_hashes: list[bytes]) -> Address | None:
        for block_hash in reversed(block_hashes):
            found = self._at.get(block_hash)
            if found and found[1] > time.monotonic():
                return found[0]
        return None


class RetainedBlocksSource(PeerLeaseSource):
    """The engines that the request's params name, then the one that last pulled this prefix. The lease is asked by
    block hashes. Not asked for a request with a hand-off: its prefill engine has all of the prompt.

    Recurrent states: what the other engine has is mostly the one at the end of its answer, within a block. It may lease
    that, and says which tokens are in the partial block. If they are others here, it is asked again, for whole blocks.
    """

    name = "retained"

    def __init__(self, context: LoadContext):
        super().__init__(context)
        self.puller_index = PullerIndex(self._config.retain_seconds)

    def record_puller(self, request: m.LeaseRequest) -> None:
        """Any thread: a peer that exports too leased this prefix from us."""
        if request.block_hashes:
            self.puller_index.record(request.block_hashes[-1], (request.reply_host, request.reply_port))

    def candidates(self, state: RequestState) -> Iterable[Candidate]:
        if state.hints.handoff or not self._config.bidirectional or not self._engine.info.supports_partial_prefix:
            return []
        puller = self.puller_index.find(self._block_hashes(state, state.request.num_tokens))
        addresses = dict.fromkeys(filter(None, (*state.hints.peers, puller)))
        addresses.pop(self._engine.identity.address, None)
        return [Candidate(self, address) for address in addresses]

    def lookup(self, state: RequestState, candidate: Candidate, need: Need) -> PendingLookup | None:
        if self._too_little(state, need):
            return None
        most = self._geometry.lookup_tokens(state.request.num_tokens)
        most = min(most, m.MAX_BLOCK_HASHES * self._geometry.hash_block_size)  # more would end the connection
        hashes = self._block_hashes(state, most)
        partial = 0 if self._geometry.by_position or self._geometry.whole_blocks or candidate.whole_blocks else most

        def rehash(hash_block_size: int) -> dict[str, Any]:
            others = self._other_hashes(state, hash_block_size)
            return {"block_hashes": others[: most // hash_block_size], "partial_up_to": 0}

        return self._ask(
            state, candidate.address, need.start, hashes, partial_up_to=partial, rehash=rehash,
            **self._reply_address(),
        )  # fmt: skip

    def read_answer(self, pending: PendingLookup) -> LookupHit | LookupMiss:
        result = super().read_answer(pending)
        if not result.found or result.tokens % self._geometry.alignment == 0:
            return result
        if result.hash_block_size not in (0, self._geometry.hash_block_size):
            return result  # whole blocks of that engine
        tail = job_builder.tail_hash(pending.state, result.tokens, self._geometry.hash_block_size)
        if tail == pending.answer.outcome.tail:
            return result
        self.release(result, False)
        if not pending.answer.request.partial_up_to:  # it would be asked so again, without end
            return LookupMiss("malformed", "a partial block was leased where whole ones were asked for")
        again = Candidate(self, pending.answer.address, whole_blocks=True)
        return LookupMiss("no_matching_blocks", "the partial block there has other tokens", candidates=(again,))
