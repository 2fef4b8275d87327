"""What this engine would find of a prompt, where, and what it would do with it: for people who ask why it missed."""

from collections.abc import Callable, Mapping, Sequence

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.exports import ExportTable
from vllm_kvtier.scheduler.planner import NOTHING, Planner
from vllm_kvtier.scheduler.tier import HostTier
from vllm_kvtier.store import messages as sm
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.adapters import ADAPTERS
from vllm_kvtier.vllm_compat.blocks import BlockPool
from vllm_kvtier.vllm_compat.facts import EngineFacts
from vllm_kvtier.vllm_compat.probe import Feature, granted, refused
from vllm_kvtier.wire import messages as m

MOST_STRETCHES = 1 << 12

Answer = Callable[[m.Explanation], None]


def stretches(
    spans: Sequence[Sequence[sm.Span]], groups: Sequence[tuple[int, int | None]], tokens: int
) -> list[m.Stretch]:
    """Where a chain is, in tokens. ``spans``: by group; ``groups``: (block tokens, window); ``tokens``: of the prompt.

    All of groups of full attention. Of windowed ones only what is in the window before the place where memory's run
    of the others ends (or the prompt, without others): what precedes it nobody would look for.
    """
    told: list[m.Stretch] = []
    end = tokens
    rows = sorted(zip(range(len(groups)), groups, spans, strict=False), key=lambda row: row[1][1] is not None)
    for group, (size, window), row in rows:
        at, first = 0, 0 if window is None else max(0, end - window)
        for span in row:
            start, at = at, at + span.blocks * size
            if window is None and span.place != "memory":
                end = min(end, start)
            if at > first and (window is None or start < end):
                told.append(m.Stretch(group, start, at, span.place, span.fate, span.newest, span.oldest))
                if len(told) == MOST_STRETCHES:  # the engine's own thread makes these
                    return told
    return told


class Explainer:
    """``ask`` on the reactor's thread; the answer is put together on the engine's, which ``on_engine`` gets to.

    bytes_of: what one rank would copy for so many tokens from another engine of the node.
    """

    def __init__(
        self,
        config: KVTierConfig,
        facts: EngineFacts,
        pool: BlockPool,
        exports: ExportTable,
        tier: HostTier | None,
        planner: Planner,
        bytes_of: Callable[[int], int],
        on_engine: Callable[[Callable[[], None]], None],
    ):
        self._config, self._facts, self._pool, self._exports = config, facts, pool, exports
        self._tier, self._planner, self._bytes_of, self._on_engine = tier, planner, bytes_of, on_engine

    def ask(self, question: m.Explain, answer: Answer) -> None:
        unit = self._pool.hash_block_tokens
        lora, variant = None, b""
        if question.adapter:
            found = ADAPTERS.named(question.adapter)
            if found is None:
                reason = f"no request to this engine has used an adapter {question.adapter!r} since it started"
                answer(m.Explanation(question.question, len(question.tokens), unit, problem=reason[:512]))
                return
            lora, variant = found
        tokens = question.tokens[: self._facts.max_tokens]
        chain = vr.hash_prompt(tokens, question.cache_salt, self._facts.hash_function(), unit, lora)
        pending = self._tier.explain(chain, variant) if self._tier is not None and chain else None

        def on(outcome: object) -> None:
            self._on_engine(lambda: answer(self._explained(question, chain, variant, outcome)))

        if pending is None:
            on(None)
        else:
            pending.then(lambda p: on(p.outcome))

    def _explained(self, question: m.Explain, chain: list[bytes], variant: bytes, outcome: object) -> m.Explanation:
        unit, tokens = self._pool.hash_block_tokens, len(question.tokens)
        there = outcome if isinstance(outcome, sm.Holding) else None
        cached = self._pool.cached_tokens(chain, self._facts.full_groups, unit)
        stored = there.units * unit if there is not None else 0
        engines = [m.Source(f"{h.host}:{h.port}", h.units * unit) for h in there.holders] if there is not None else []
        return m.Explanation(
            question.question,
            tokens,
            unit,
            cached,
            self._exports.longest_prefix(chain, variant),
            stored,
            self._tier.instance if self._tier is not None else "",
            there.seconds if there is not None else 0.0,
            there.known if there is not None else 0.0,
            stretches(there.spans, self._facts.groups, tokens) if there is not None else [],
            [tier_source(tier, unit) for tier in there.tiers] if there is not None else [],
            engines,
            self._weighed(cached, stored, engines, tokens),
            self._config.pull_threshold,
            self._problem(tokens, getattr(outcome, "reason", ""))[:512],
        )

    def _problem(self, tokens: int, failure: str) -> str:
        if self._facts.unsupported:
            return self._facts.unsupported
        if not granted(Feature.PROMPTS):
            return f"it is not known how this vLLM hashes prompts ({refused(Feature.PROMPTS)})"
        if tokens > self._facts.max_tokens:
            return f"the prompt has {tokens} tokens, this engine takes at most {self._facts.max_tokens}"
        if self._tier is None:
            return "it uses no node store (option store: off)"
        return failure or self._tier.problem

    def _weighed(self, cached: int, stored: int, engines: Sequence[m.Source], tokens: int) -> list[m.Weighed]:
        """As a request would be that is alone in the engine."""
        found = []
        if stored > cached:
            nbytes = self._tier.load_bytes(stored) - self._tier.load_bytes(cached)
            found.append(self._weigh("host", cached, min(stored, tokens), nbytes, tokens))
        for engine in engines[:1]:
            end = min(engine.tokens, tokens)
            if end <= cached:
                continue
            if end - cached < max(1, self._config.pull_threshold):
                found.append(m.Weighed("gpu", cached, end, False, "below threshold", 0.0))
            else:
                found.append(self._weigh("gpu", cached, end, self._bytes_of(end - cached), tokens))
        return [each for each in found if each.reason != NOTHING]

    def _weigh(self, source: str, start: int, end: int, nbytes: int, tokens: int) -> m.Weighed:
        decision = self._planner.weigh(source, start, end, nbytes, tokens)
        always = self._config.load_policy == "always" and not decision.load
        return m.Weighed(
            source, start, end, decision.load or always, "always" if always else decision.reason,
            decision.load_seconds, decision.compute_seconds,
        )  # fmt: skip


def tier_source(tier: sm.TierReach, unit: int) -> m.Source:
    tokens = None if tier.units is None else tier.units * unit
    return m.Source(tier.name, tokens, tier.state, tier.reason[:512])


def identity(
    facts: EngineFacts,
    config: KVTierConfig,
    namespace: m.Namespace | None,
    ranks: Mapping[int, m.RankInfo],
    codec: str | Mapping[str, str],
    wire_codec: str | Mapping[str, str],
) -> list[tuple[str, str]]:
    """For Identified. ``codec``, ``wire_codec``: as ``choice.resolve`` returned them; [] while the engine starts."""
    if namespace is None:
        return []
    parts = facts.in_words(namespace, config.model_fingerprint)
    parts += [("codec of the store", _codec_words(codec)), ("codec between engines", _codec_words(wire_codec))]
    layouts = dict.fromkeys(_layout_words(info) for info in ranks.values())
    parts.append(("KV cache layout", "; ".join(layouts)[:512] or "not known: its workers cannot be read from"))
    return parts


def _codec_words(codec: str | Mapping[str, str]) -> str:
    return codec if isinstance(codec, str) else ", ".join(f"{kind}: {name}" for kind, name in sorted(codec.items()))


def _layout_words(info: m.RankInfo) -> str:
    """Of one rank's pages; equal words do not make equal layouts, which engines compare in full."""
    words = []
    for group in info.geometry.groups:
        shape = ""
        if group.regions:
            first = group.regions[0]
            order = {"outer": ", heads before tokens", "token": ", tokens before heads"}.get(first.order, "")
            shape = f" of {first.outer} heads, {first.inner} bytes a token, {first.dtype or 'bytes'}{order}"
        window = f" over {group.window}" if group.window is not None else ""
        layers = len({region.layer for region in group.regions})
        words.append(f"{layers} layers of {group.kind} attention{window}{shape}, blocks of {group.block_tokens} tokens")
    return "; ".join(words)
