"""The GPU cache of another engine of this node."""

import time
from collections import OrderedDict
from collections.abc import Iterable

from vllm_kvtier.jobs.results import Result
from vllm_kvtier.jobs.transfer_jobs import FailedJob, remember_peer
from vllm_kvtier.scheduler.context import LoadContext
from vllm_kvtier.scheduler.sources import job_builder
from vllm_kvtier.scheduler.sources.base import (
    BlockIds,
    Candidate,
    Job,
    LookupHit,
    LookupMiss,
    Need,
    PendingLookup,
    RequestState,
)
from vllm_kvtier.scheduler.sources.peer_lease import PEER_GPU, PeerLeaseSource

# Seconds that a request may wait for blocks that a peer computes, while the cost of computing is not known.
UNKNOWN_COST_WAIT = 0.25
ANSWER_SECONDS = 1e-3  # that an engine of this node takes to answer
CORRUPT_BACKOFF_SECONDS = 10.0  # after a wrong checksum, before the engine is asked again
LOOKUP_TIMEOUT = 0.5  # an engine of this node that does not answer by then hangs; the store may have the same blocks


class PeerGpuSource(PeerLeaseSource):
    """The node store names engines that have a prompt's blocks; this source has no candidates of its own.

    Three ways to get the KV are compared, by rates measured while the engine runs: copy from the peer, load from host
    memory, compute. Before a peer is asked, the copy that it might grant is compared with the held hit and with
    computing. When it has granted a lease, the lease is compared with the held hit.

    The ranks copy from the peer's mapped memory. A peer whose memory cannot be mapped is read by NIXL.
    """

    name = cost_key = PEER_GPU
    stage_metric = "peer_hit_seconds"
    answers_soon = True
    max_hold_seconds = 1.0  # the peer cannot reuse these blocks meanwhile

    def __init__(self, context: LoadContext):
        super().__init__(context)
        self._backoff_until: dict[str, float] = {}  # instance -> until when it is not asked
        self._unreadable: OrderedDict[str, None] = OrderedDict()  # instances; the lease client has logged the reason

    def candidates(self, state: RequestState) -> Iterable[Candidate]:
        return ()

    def lookup(self, state: RequestState, candidate: Candidate, need: Need) -> PendingLookup | None:
        if need.tokens <= 0:
            return None
        if not self.is_eligible(state, candidate, need.start, need.alone):
            return None
        if state.epoch != self._context.namespace_ids.epoch:
            return None
        wait_seconds = self.wait_seconds(state, candidate, need.start)
        most = self._geometry.lookup_tokens(state.request.num_tokens)
        hashes = self._block_hashes(state, min(candidate.tokens, most))
        return self._ask(
            state, candidate.address, need.start, hashes, LOOKUP_TIMEOUT + wait_seconds,
            same_node_instance=candidate.instance, prefer_mapped=True, from_prefix_cache=True,
            wait_seconds=wait_seconds,
        )  # fmt: skip

    def read_answer(self, pending: PendingLookup) -> LookupHit | LookupMiss:
        result, groups = super().read_answer(pending), self._geometry.groups
        if result.found and result.block_sizes(groups) != tuple(size for size, _ in groups):
            self.release(result, False)  # its hashes cover as many tokens nevertheless
            result = LookupMiss("layout", "its blocks have other sizes")
        if not result.found and result.code == "layout":
            remember_peer(self._unreadable, pending.answer.same_node_instance, None)
        return result

    def is_eligible(self, state: RequestState, candidate: Candidate, start: int, alone: bool = True) -> bool:
        """Whether the candidate is worth asking. ``alone``: no other request is in the engine."""
        instance, prompt = candidate.instance, state.request.num_tokens
        tokens = min(candidate.tokens, prompt)
        reason = None
        if instance == self._engine.identity.instance or instance in state.failed or start % self._geometry.alignment:
            return False
        if instance in self._unreadable or self._backoff_until.get(instance, 0.0) > time.monotonic():
            return False
        nbytes = self._engine.identity.bytes_for(tokens - start)
        if tokens - start < max(1, self._config.pull_threshold):
            reason = "below_threshold"
        elif not self._context.has_blocks(self._geometry.load_blocks(start, tokens)):
            reason = "no_free_blocks"
        elif not alone and self._computed_meanwhile(instance, nbytes, start, tokens, prompt):
            reason = "compute_within_step"
        elif state.held is not None and not self._is_faster(state, tokens, nbytes, state.held):
            reason = "store_faster"
        if reason is not None:
            self._counters.count("peer_fetches_skipped", reason)
        return reason is None

    def _computed_meanwhile(self, instance: str, nbytes: int, start: int, tokens: int, prompt: int) -> bool:
        """Whether computing the tokens ends before a copy is of use: after steps of other requests or, if the copy is
        short, after the peer's answer and the copy."""
        if self._config.load_policy == "always":
            return False
        short_load_seconds = self._context.sync_load.short_load_seconds(self.cost_key, nbytes, instance)
        seconds = self._context.planner.compute_seconds(start, tokens, prompt)
        least = (
            self._context.planner.handover_seconds()
            if short_load_seconds is None
            else short_load_seconds + ANSWER_SECONDS
        )
        return seconds is not None and seconds < least

    def wait_seconds(self, state: RequestState, candidate: Candidate, start: int) -> float:
        """Seconds that the request may wait for blocks that the peer is computing: no longer than computing them."""
        prompt, known = state.request.num_tokens, None
        have = max(start, state.held.tokens if state.held is not None else 0)
        tokens = min(candidate.tokens, prompt)
        if tokens > have:
            known = self._context.planner.compute_seconds(have, tokens, prompt)
        return UNKNOWN_COST_WAIT if known is None else known

    def fits(self, state: RequestState, hit: LookupHit) -> bool:
        whole = not any(hit.start % size or hit.tokens % size for size, _ in self._geometry.groups)
        return whole and super().fits(state, hit)  # a prefix cache has whole blocks only

    def beats(self, state: RequestState, hit: LookupHit, held: LookupHit) -> bool:
        return self._is_faster(state, min(hit.tokens, state.request.num_tokens), hit.nbytes, held)

    def _is_faster(self, state: RequestState, tokens: int, nbytes: int, held: LookupHit) -> bool:
        """Whether a copy of ``nbytes`` for ``tokens`` tokens is expected to bring the first token sooner than
        ``held``."""
        planner, prompt = self._context.planner, state.request.num_tokens
        here = planner.load_seconds(self.cost_key, nbytes)
        there = planner.load_seconds(held.source.cost_key, held.nbytes)
        few, many = sorted((tokens, min(held.tokens, prompt)))
        rest = planner.compute_seconds(few, many, prompt) if few < many else 0.0
        if rest is None:  # the cost of computing is not known: more is better
            return tokens > held.tokens
        if tokens < held.tokens:
            here += rest
        else:
            there += rest
        return here <= there

    def is_current(self, state: RequestState, hit: LookupHit) -> bool:
        """False after a reset of this engine's cache: peers have blocks of the namespace before."""
        return bool(state.epoch == self._context.namespace_ids.epoch)

    def supports_sync_load(self, hit: LookupHit) -> bool:
        return hit.mapped

    def timed_as(self, hit: LookupHit) -> str:
        return self.cost_key

    def build_job(self, state: RequestState, block_ids: BlockIds, tokens: int) -> Job | FailedJob:
        if not state.hit.mapped:
            return super().build_job(state, block_ids, tokens)
        keys, timeout = self._engine.identity.content_keys(), self._config.transfer_timeout
        return job_builder.peer_fetch_job(state, self._geometry, keys, block_ids, tokens, timeout)

    def on_loaded(self, state: RequestState) -> None:
        self._counters.count("fetched_tokens", "", state.num_external_tokens)
        self._remember_read(state.hit)

    def on_load_failed(self, state: RequestState, result: Result) -> None:
        super().on_load_failed(state, result)
        if self._is_of(state.hit, result) and result.checksum_mismatch:
            now = time.monotonic()
            self._backoff_until = {name: until for name, until in self._backoff_until.items() if until > now}
            self._backoff_until[state.hit.instance] = now + CORRUPT_BACKOFF_SECONDS

    def describe(self, hit: LookupHit) -> str:
        return f"gpu {super().describe(hit)}"
