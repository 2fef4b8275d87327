"""Why a prompt, or its end, was not found by an engine.

What is known: how long a prefix each engine has in each place, under which salts; what engines compare before they
share; where the engine's node store has each block, or what became of it; and what the engine would do with what it
finds. Nobody lists what it holds, so a salt can only be tried.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvtier.doctor import ends
from vllm_kvtier.doctor.compatibility import differences
from vllm_kvtier.doctor.endpoint import EndpointProbe
from vllm_kvtier.doctor.engines import Engine
from vllm_kvtier.doctor.report import Check, fail, ok, unknown, warn
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.messages import Counts
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.messages import Explanation, Holding

MOST_GAPS = 6  # that are told of one engine


@dataclass(frozen=True)
class Prompt:
    """``salts``: others than its own that it may have been sent with. ``threshold``: the engines' pull_threshold."""

    tokens: list[int]
    salt: str = ""
    salts: tuple[str, ...] = ()
    threshold: int = 64
    adapter: str = ""


@dataclass
class Found:
    """What an engine has of it; ``elsewhere``: under another salt, tokens."""

    engine: Engine
    holding: Explanation
    elsewhere: dict[str, int]

    @property
    def tokens(self) -> int:
        return max(longest(self.holding), *(each.end for each in self.holding.weighed if each.load), 0)

    @property
    def unit(self) -> int:
        return self.holding.unit

    @property
    def name(self) -> str:
        return f"prompt on {self.engine.name}"


def longest(holding: Holding | Explanation) -> int:
    return max(holding.gpu_cache, holding.exported, holding.stored)


def look_up(prompt: Prompt, engine: Engine, key: ClusterKey | None, seconds: float = 5.0) -> Found:
    """Raises KVTierError if the engine does not say."""
    with EndpointProbe(engine.address, key, seconds) as probe:
        holding = probe.explanation(prompt.tokens, prompt.salt, prompt.adapter)
        others = dict.fromkeys([*prompt.salts, ""]) if prompt.salt or prompt.salts else {}
        elsewhere = {s: longest(probe.holding(prompt.tokens, s)) for s in others if s != prompt.salt}
    return Found(engine, holding, elsewhere)


def why(prompt: Prompt, engines: Sequence[Engine], key: ClusterKey | None, counts: Counts | None) -> list[Check]:
    """A check an engine that has it, else one for each cause that is found. ``counts``: of the node store."""
    found, checks = [], []
    for engine in engines:
        if engine.inspection is None:
            continue  # said already
        try:
            found.append(look_up(prompt, engine, key))
        except KVTierError as error:
            checks.append(
                unknown(f"prompt on {engine.name}", str(error), "the engine hangs or is very busy: try again")
            )
    for each in found:
        checks += _causes(prompt, each, [other for other in found if other is not each], counts)
    return checks


def _causes(prompt: Prompt, here: Found, others: Sequence[Found], counts: Counts | None) -> list[Check]:
    length, unit = len(prompt.tokens), here.unit
    if length < unit:
        return [
            warn(
                here.name,
                f"it has {length} tokens, fewer than a block of {unit}: so short a prompt is never kept",
                "no fault; a smaller --block-size keeps shorter ones",
            )
        ]
    whole = length // unit * unit if unit else length
    places = _places(here.holding)
    declined = _declined(here)
    if here.tokens >= whole:
        return declined or [ok(here.name, f"all {whole} tokens of whole blocks are there ({places})")]
    causes = [*_salts(here), *_other_engines(prompt, here, others)] or _store(here, whole, counts)
    begin = f"tokens from {here.tokens} on" if here.tokens else "all of it"
    had = f" (the {here.tokens} before are there: {places})" if here.tokens else ""
    missed = f"{begin} of {length} tokens missed{had}: "
    return declined + [Check(c.name, c.state, missed + c.sentence, c.remedy) for c in causes]


def _declined(here: Found) -> list[Check]:
    """It is there, and would be computed all the same."""
    return [
        warn(
            here.name,
            f"what is there would not be loaded: the engine would {ends.weighed(each)}",
            "no fault: `kvtier plan` tells from which length on loading pays; load_policy=always loads from the store "
            "all the same, a lower pull_threshold less from other engines",
        )
        for each in here.holding.weighed
        if not each.load and each.end > here.tokens - (each.source == "host")
    ]


def _places(holding: Explanation) -> str:
    places = {"GPU cache": holding.gpu_cache, "exported": holding.exported, "node store": holding.stored}
    places |= {f"GPU cache of {each.name}, which lends it,": each.tokens or 0 for each in holding.engines}
    return ", ".join(f"{name} {tokens}" for name, tokens in places.items() if tokens)


def _salts(here: Found) -> list[Check]:
    return [
        fail(
            here.name,
            f"{tokens} tokens of it were stored with {f'the cache salt {salt!r}' if salt else 'no cache salt'}, and "
            "salts keep tenants apart",
            "send both requests with the same cache_salt (the router makes one from the API key)",
        )
        for salt, tokens in here.elsewhere.items()
        if tokens > here.tokens
    ]


def _other_engines(prompt: Prompt, here: Found, others: Sequence[Found]) -> list[Check]:
    checks = []
    for other in others:
        if other.tokens <= here.tokens or here.engine.identity is None or other.engine.identity is None:
            continue
        mine, theirs = here.engine.identity, other.engine.identity
        had = f"{other.engine.name} has {other.tokens} tokens of it, but "
        for _, sentence, remedy in differences(mine, theirs):
            words = sentence.format(a=here.engine.name, b=other.engine.name)
            checks.append(fail(here.name, f"{had}{words}", remedy))
        if checks:
            continue
        if len(mine.ranks) != len(theirs.ranks):
            words = f"its tensor parallel size differs: {len(theirs.ranks)} ranks there, {len(mine.ranks)} here"
            checks.append(fail(here.name, had + words, "give both the same --tensor-parallel-size"))
        elif here.engine.inspection.store != other.engine.inspection.store and other.holding.stored:
            words = "in another node store than the one that this engine uses"
            remedy = "give engines in several containers the same socket (store=/run/kvtier.sock, in a shared volume)"
            checks.append(fail(here.name, had + words, remedy))
        elif other.tokens - here.tokens < prompt.threshold:
            words = f"{other.tokens - here.tokens} tokens more are fewer than pull_threshold ({prompt.threshold})"
            checks.append(
                warn(here.name, had + words, "no fault: so few are computed as fast; or a lower pull_threshold")
            )
        elif not other.holding.exported and not other.holding.stored:
            words = "only in its own GPU's prefix cache, and it exports nothing of that"
            checks.append(warn(here.name, had + words, "bidirectional=true on that engine, or a node store for both"))
        else:
            words = "this engine was not told to look there, or has not needed it yet"
            checks.append(
                warn(
                    here.name, had + words, "send requests through a router that names the engine, or use a node store"
                )
            )
    return checks


def _store(here: Found, whole: int, counts: Counts | None) -> list[Check]:
    """Nobody who was asked has more: what became of it, the first that is missing first."""
    found = here.holding
    if not here.engine.inspection.store:
        return [
            warn(
                here.name,
                "this engine uses no node store, and its own prefix cache has nothing (more) of it"
                + (f": {found.problem}" if found.problem else ""),
                "leave store at its default (auto), and see the engine's log for why it has none",
            )
        ]
    if counts is not None and counts.instance != here.engine.inspection.store:
        return [
            fail(
                here.name,
                "the engine uses another node store than the one that answers at this socket",
                "give --socket as in the engine's option store; engines of several containers share one through a "
                "volume",
            )
        ]
    gaps = ends.missing(found, here.tokens, whole)
    if not gaps:
        reason = found.problem or "it does not say what became of it"
        return [unknown(here.name, f"it is not in its node store; {reason}", "try again; look at the engine's log")]
    checks = []
    for gap in gaps[:MOST_GAPS]:
        sentence, remedy = ends.words(gap, found)
        if ends.key(gap) == ends.NEVER_STORED:
            sentence += _not_stored(here)
        start, end = max(gap.start, here.tokens), min(gap.end, whole)
        checks.append(warn(here.name, f"tokens {start} to {end}: {sentence}", remedy))
    if len(gaps) > MOST_GAPS:
        checks.append(unknown(here.name, f"and {len(gaps) - MOST_GAPS} more stretches: `kvtier inspect` lists them"))
    return checks


def _not_stored(here: Found) -> str:
    metrics = here.engine.metrics
    refused = {k: n for k, n in metrics.kinds("not_stored").items() if k != "stored already"} if metrics else {}
    if not refused:
        return ""
    return f"; this engine did not store {', '.join(f'{n:.0f} blocks ({k})' for k, n in refused.items())}"


def tokens_differ(name: str, tokens: list[int], like: list[int], unit: int) -> Check:
    """Where two prompts that were expected to share their beginning part."""
    same = next((i for i, (a, b) in enumerate(zip(tokens, like, strict=False)) if a != b), min(len(tokens), len(like)))
    whole = same // unit * unit if unit else same
    words = (
        f"their first {same} tokens are equal, {whole} of them in whole blocks" if unit else f"{same} tokens are equal"
    )
    if same >= min(len(tokens), len(like)):
        return ok(name, f"one is the beginning of the other: {words}")
    return warn(
        name,
        f"{words}; from token {same} on they differ ({tokens[same : same + 3]} and {like[same : same + 3]})",
        "put what changes (dates, names, ids) behind what stays the same",
    )
