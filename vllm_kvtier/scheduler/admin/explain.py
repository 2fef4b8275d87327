"""Explains a prompt's cache misses: what this engine would find, where, and whether it would load it."""

from collections.abc import Callable, Sequence

from vllm_kvtier.cache_kinds import CacheGroup
from vllm_kvtier.scheduler.admin.gpu_prefix import gpu_prefix
from vllm_kvtier.scheduler.admin.store_admin import StoreAdmin
from vllm_kvtier.scheduler.context import LoadContext
from vllm_kvtier.scheduler.leases.exports import ExportTable
from vllm_kvtier.scheduler.planner.load_planner import NOTHING
from vllm_kvtier.store import protocol as sm
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.adapters import ADAPTERS
from vllm_kvtier.vllm_compat.probe.features import granted, refused
from vllm_kvtier.vllm_compat.probe.row import Feature
from vllm_kvtier.wire import messages as m

MAX_SPANS = 1 << 12

Answer = Callable[[m.Explanation], None]


def spans_in_tokens(
    spans: Sequence[Sequence[sm.Span]], groups: Sequence[CacheGroup], tokens: int
) -> list[m.ExplainedSpan]:
    """Where a prefix is, in tokens. ``spans``: by group; ``tokens``: of the prompt.

    All of groups with ``whole_prefix``. Of others only what is needed at the end of these groups' run in memory (or the
    prompt's end, without such groups): no lookup asks for what precedes it.
    """
    explained: list[m.ExplainedSpan] = []
    end = tokens
    rows = sorted(zip(range(len(groups)), groups, spans, strict=False), key=lambda row: not row[1].kind.whole_prefix)
    for group, (size, kind), row in rows:
        at, first, whole = 0, kind.first_needed(end), kind.whole_prefix
        for span in row:
            start, at = at, at + span.blocks * size
            if whole and span.tier != "memory":
                end = min(end, start)
            if at > first and (whole or start < end):
                never = 0 if span.tier or kind.by_position else sm.RemovalReason.NO_STATE
                reason = span.removal_reason or never
                explained.append(m.ExplainedSpan(group, start, at, span.tier, reason, span.newest, span.oldest))
                if len(explained) == MAX_SPANS:  # the engine's own thread makes these
                    return explained
    return explained


class Explainer:
    """``ask`` runs on the reactor ``kvtier-scheduler``. ``on_engine`` has vLLM's scheduler thread make the answer."""

    def __init__(
        self,
        context: LoadContext,
        exports: ExportTable,
        store: StoreAdmin | None,
        on_engine: Callable[[Callable[[], None]], None],
    ):
        engine = context.engine
        self._config, self._info, self._pool, self._exports = engine.config, engine.info, engine.pool, exports
        self._store, self._planner, self._on_engine = store, context.planner, on_engine
        self._bytes_for, self._groups = engine.identity.bytes_for, engine.geometry.groups

    def ask(self, question: m.Explain, answer: Answer) -> None:
        hash_block_size = self._pool.hash_block_size
        lora, lora_fingerprint = None, b""
        if question.adapter:
            found = ADAPTERS.named(question.adapter)
            if found is None:
                reason = f"no request to this engine has used an adapter {question.adapter!r} since it started"
                answer(m.Explanation(question.question, len(question.tokens), hash_block_size, problem=reason[:512]))
                return
            lora, lora_fingerprint = found
        number, prompt = question.question, len(question.tokens)
        tokens = question.tokens[: self._info.max_tokens]
        block_hashes = vr.hash_prompt(self._info, tokens, question.cache_salt, hash_block_size, lora)
        pending = self._store.explain(block_hashes, lora_fingerprint) if self._store and block_hashes else None

        def on(outcome: object) -> None:
            self._on_engine(lambda: answer(self._explained(number, prompt, block_hashes, lora_fingerprint, outcome)))

        on(None) if pending is None else pending.then(lambda p: on(p.outcome))

    def _explained(
        self, number: int, tokens: int, block_hashes: list[bytes], lora_fingerprint: bytes, outcome: object
    ) -> m.Explanation:
        hash_block_size = self._pool.hash_block_size
        there = outcome if isinstance(outcome, sm.Explained) else sm.Explained(0, 0, [])
        cached = gpu_prefix(self._pool, self._info, block_hashes)
        stored = there.num_hash_blocks * hash_block_size
        peers = [m.Source(f"{h.host}:{h.port}", h.num_hash_blocks * hash_block_size) for h in there.holders]
        return m.Explanation(
            number, tokens, hash_block_size,
            gpu_cache=cached, exported=self._exports.longest_prefix(block_hashes, lora_fingerprint), stored=stored,
            store=self._store.instance if self._store is not None else "",
            store_seconds=there.seconds, history_seconds=there.known,
            spans=spans_in_tokens(there.spans, self._groups, tokens),
            tiers=[tier_source(tier, hash_block_size) for tier in there.tiers],
            peers=peers, load_decisions=self._load_decisions(cached, stored, peers, tokens),
            pull_threshold=self._config.pull_threshold,
            problem=self._problem(tokens, getattr(outcome, "reason", ""))[:512],
            namespace=self._store.namespace(lora_fingerprint) if self._store is not None else "",
        )  # fmt: skip

    def _problem(self, tokens: int, failure: str) -> str:
        if self._info.unsupported:
            return self._info.unsupported
        if not granted(Feature.PROMPTS):
            return f"it is not known how this vLLM hashes prompts ({refused(Feature.PROMPTS)})"
        if self._info.hash_lookahead:
            return "this engine's block hashes cover tokens behind their blocks, those of this prompt are not known"
        if tokens > self._info.max_tokens:
            return f"the prompt has {tokens} tokens, this engine takes at most {self._info.max_tokens}"
        if self._store is None:
            return "it uses no node store (option store: off)"
        return failure or self._store.problem

    def _load_decisions(
        self, cached: int, stored: int, peers: Sequence[m.Source], tokens: int
    ) -> list[m.LoadEstimate]:
        """The decisions for a request that is alone in the engine. ``peers``: the one with the longest prefix first."""
        found = []
        if self._store is not None and stored > cached:
            nbytes = self._store.load_bytes(stored) - self._store.load_bytes(cached)
            found.append(self._decide("host", cached, min(stored, tokens), nbytes, tokens))
        end = min(peers[0].tokens or 0, tokens) if peers else 0
        if 0 < end - cached < self._config.pull_threshold:
            found.append(m.LoadEstimate("peer_gpu", cached, end, False, "below_threshold", 0.0))
        elif end > cached:
            found.append(self._decide("peer_gpu", cached, end, self._bytes_for(end - cached), tokens))
        return [each for each in found if each.reason != NOTHING]

    def _decide(self, source: str, start: int, end: int, nbytes: int, tokens: int) -> m.LoadEstimate:
        decision = self._planner.weigh(source, start, end, nbytes, tokens)
        always = self._config.load_policy == "always" and not decision.should_load
        return m.LoadEstimate(
            source, start, end, decision.should_load or always, "policy_always" if always else decision.reason,
            decision.load_seconds, decision.compute_seconds,
        )  # fmt: skip


def tier_source(tier: sm.TierReach, hash_block_size: int) -> m.Source:
    tokens = None if tier.num_hash_blocks is None else tier.num_hash_blocks * hash_block_size
    return m.Source(tier.name, tokens, tier.state, tier.reason[:512])
