"""Why a prompt, or its end, was not found by an engine.

What is known: how long a prefix each engine has in each place, under which salts; what engines compare before they
share; and the store's counts. Nobody lists what it holds, so a salt can only be tried, and whether a block was
evicted or never stored only be told from what the store has forgotten so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvtier.doctor.compatibility import differences
from vllm_kvtier.doctor.endpoint import EndpointProbe
from vllm_kvtier.doctor.engines import Engine
from vllm_kvtier.doctor.report import Check, fail, ok, unknown, warn
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.messages import Counts
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.messages import Holding


@dataclass(frozen=True)
class Prompt:
    """``salts``: others than its own that it may have been sent with. ``threshold``: the engines' pull_threshold."""

    tokens: list[int]
    salt: str = ""
    salts: tuple[str, ...] = ()
    threshold: int = 64


@dataclass
class Found:
    """What an engine has of it; ``elsewhere``: under another salt, tokens."""

    engine: Engine
    holding: Holding
    elsewhere: dict[str, int]

    @property
    def tokens(self) -> int:
        return longest(self.holding)

    @property
    def unit(self) -> int:
        return self.engine.identity.block_tokens if self.engine.identity is not None else 0

    @property
    def name(self) -> str:
        return f"prompt on {self.engine.name}"


def longest(holding: Holding) -> int:
    return max(holding.gpu_cache, holding.exported, holding.stored)


def look_up(prompt: Prompt, engine: Engine, key: ClusterKey | None, seconds: float = 5.0) -> Found:
    """Raises KVTierError if the engine does not say."""
    with EndpointProbe(engine.address, key, seconds) as probe:
        holding = probe.holding(prompt.tokens, prompt.salt)
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
    if here.tokens >= whole:
        return [ok(here.name, f"all {whole} tokens of whole blocks are there ({places})")]
    causes = [*_salts(here), *_other_engines(prompt, here, others)] or [_store(here, counts)]
    begin = f"tokens from {here.tokens} on" if here.tokens else "all of it"
    had = f" (the {here.tokens} before are there: {places})" if here.tokens else ""
    return [Check(c.name, c.state, f"{begin} of {length} tokens missed{had}: {c.sentence}", c.remedy) for c in causes]


def _places(holding: Holding) -> str:
    places = {"GPU cache": holding.gpu_cache, "exported": holding.exported, "node store": holding.stored}
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


def _store(here: Found, counts: Counts | None) -> Check:
    """Nobody who was asked has more: it is no longer there, or never was."""
    store = here.engine.inspection.store
    if not store:
        return warn(
            here.name,
            "this engine uses no node store, and its own prefix cache has nothing (more) of it",
            "leave store at its default (auto), and see the engine's log for why it has none",
        )
    if counts is None:
        return unknown(here.name, "it is not in its node store", "give --socket, the store's, to learn more")
    if counts.instance != store:
        return fail(
            here.name,
            "the engine uses another node store than the one that answers at this socket",
            "give --socket as in the engine's option store; engines of several containers share one through a volume",
        )
    metrics = here.engine.metrics
    refused = {k: n for k, n in metrics.kinds("not_stored").items() if k != "stored already"} if metrics else {}
    note = (
        f"; this engine did not store {', '.join(f'{n:.0f} blocks ({k})' for k, n in refused.items())}"
        if refused
        else ""
    )
    below = [tier.name for tier in counts.tiers if tier.blocks]
    where = f"; it may lie on {' or '.join(below)}, which is not looked through here" if below else ""
    if counts.index.evictions:
        stay = counts.seconds * counts.index.entries / counts.index.evictions
        return warn(
            here.name,
            f"evicted, or never stored: the store was full and has evicted {counts.index.evictions} blocks; one that "
            f"nobody asks for stays about {_duration(stay)}{note}{where}",
            "`kvtier warm` brings it up from below, `kvtier pin` keeps it; a larger store_size or a disk keeps more",
        )
    return warn(
        here.name,
        f"never stored: the store has evicted nothing since it started {_duration(counts.seconds)} ago, so no prompt "
        f"that begins with these tokens has been through an engine that shares with this one{note}{where}",
        "compare it with the prompt that you expected to share with (--like): one different character at the beginning "
        "is enough",
    )


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


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
