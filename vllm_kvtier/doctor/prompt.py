"""Why an engine did not find a prompt, or the end of it.

An engine tells the longest prefix that it has in each tier under a given salt, the fields that engines compare before
they share, the tier or removal reason of each block in its node store, and its load decision. No engine lists its
blocks, so other salts can only be tried.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_kvtier.doctor import removal_text
from vllm_kvtier.doctor.engines.checks import Engine
from vllm_kvtier.doctor.engines.compatibility import differences
from vllm_kvtier.doctor.engines.endpoint import EndpointProbe
from vllm_kvtier.doctor.report import Check, fail, ok, unknown, warn
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.protocol import Counts
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.messages import Explanation

MAX_GAPS = 6  # reported for one engine


@dataclass(frozen=True)
class Prompt:
    """``salts``: other salts that requests may have carried. ``threshold``: the engines' pull_threshold."""

    tokens: list[int]
    salt: str = ""
    salts: tuple[str, ...] = ()
    threshold: int = 64
    adapter: str = ""


@dataclass
class Found:
    """The prefix that an engine has; ``elsewhere``: {another salt: tokens of the prefix under it}."""

    engine: Engine
    holding: Explanation
    elsewhere: dict[str, int]

    @property
    def tokens(self) -> int:
        return max(_longest(self.holding), *(each.end for each in self.holding.load_decisions if each.load), 0)

    @property
    def name(self) -> str:
        return f"prompt on {self.engine.name}"


def _longest(holding: Explanation) -> int:
    return max(holding.gpu_cache, holding.exported, holding.stored)


def look_up(prompt: Prompt, engine: Engine, key: ClusterKey | None, seconds: float = 5.0) -> Found:
    """Raises KVTierError if the engine does not answer."""
    with EndpointProbe(engine.address, key, seconds) as probe:
        holding = probe.explanation(prompt.tokens, prompt.salt, prompt.adapter)
        others = dict.fromkeys([*prompt.salts, ""]) if prompt.salt or prompt.salts else {}
        elsewhere = {
            salt: _longest(probe.explanation(prompt.tokens, salt, prompt.adapter))
            for salt in others
            if salt != prompt.salt
        }
    return Found(engine, holding, elsewhere)


def why(prompt: Prompt, engines: Sequence[Engine], key: ClusterKey | None, counts: Counts | None) -> list[Check]:
    """One check for an engine that has the prompt, otherwise one for each cause. ``counts``: of the node store."""
    found, checks = [], []
    for engine in (each for each in engines if each.inspection is not None):  # an earlier check reports the others
        try:
            found.append(look_up(prompt, engine, key))
        except KVTierError as error:
            checks.append(unknown(f"prompt on {engine.name}", str(error), "the engine hangs or is busy: try again"))
    for each in found:
        checks += _causes(prompt, each, [other for other in found if other is not each], counts)
    return checks


_DECLINED = (
    "no action needed; load_policy=always forces loads from the store, a lower pull_threshold allows shorter loads "
    "from engines, `kvtier plan` tells from which length on loading is faster"
)


def _causes(prompt: Prompt, here: Found, others: Sequence[Found], counts: Counts | None) -> Iterator[Check]:
    length, size = len(prompt.tokens), here.holding.hash_block_size
    if length < size:
        message = f"it has {length} tokens, fewer than a block of {size}; only whole blocks are stored"
        yield warn(here.name, message, "no action needed; a smaller --block-size stores shorter prompts")
        return
    whole = length // size * size if size else length
    tiers = _tiers(here.holding)
    declined = [
        each for each in here.holding.load_decisions
        if not each.load and each.end > here.tokens - (each.source == "host")
    ]  # fmt: skip
    for each in declined:
        yield warn(here.name, f"cached, but the engine would {removal_text.decision(each)}", _DECLINED)
    if here.tokens >= whole:
        if not declined:
            yield ok(here.name, f"all {whole} tokens of whole blocks are cached ({tiers})")
        return
    missed = f"tokens {here.tokens} to {length}" if here.tokens else f"all {length} tokens"
    cached = f" (0 to {here.tokens} are cached: {tiers})" if here.tokens else ""
    for cause in [*_salts(here), *_other_engines(prompt, here, others)] or _store(here, whole, counts):
        yield Check(cause.name, cause.state, f"{missed} missed{cached}: {cause.message}", cause.fix)


def _tiers(holding: Explanation) -> str:
    tiers = {"GPU cache": holding.gpu_cache, "exported": holding.exported, "store memory": holding.stored}
    tiers |= {f"GPU cache of peer {each.name}": each.tokens or 0 for each in holding.peers}
    return ", ".join(f"{name} {tokens}" for name, tokens in tiers.items() if tokens)


def _salts(here: Found) -> Iterator[Check]:
    for salt, tokens in here.elsewhere.items():
        if tokens > here.tokens:
            stored = f"the cache salt {salt!r}" if salt else "no cache salt"
            message = f"{tokens} tokens of it were stored with {stored}; requests with different salts share no blocks"
            fix = "send both requests with the same cache_salt (the proxy derives one from the API key)"
            yield fail(here.name, message, fix)


def _other_engines(prompt: Prompt, here: Found, others: Sequence[Found]) -> list[Check]:
    checks: list[Check] = []
    for other in others:
        if other.tokens <= here.tokens or here.engine.identity is None or other.engine.identity is None:
            continue
        mine, theirs = here.engine.identity, other.engine.identity
        had = f"{other.engine.name} has {other.tokens} tokens of it, but "
        for _, message, fix in differences(mine, theirs):
            checks.append(fail(here.name, had + message.format(a=here.engine.name, b=other.engine.name), fix))
        if checks:
            continue
        more, check = other.tokens - here.tokens, warn
        if len(mine.ranks) != len(theirs.ranks):
            reason = f"its tensor parallel size differs: {len(theirs.ranks)} ranks, {len(mine.ranks)} on this engine"
            fix, check = "give both the same --tensor-parallel-size", fail
        elif here.engine.inspection.store != other.engine.inspection.store and other.holding.stored:
            reason = "in another node store than this engine's"
            fix = "give engines in several containers the same socket (store=/run/kvtier.sock, in a shared volume)"
            check = fail
        elif more < prompt.threshold:
            reason = f"{more} tokens more are fewer than pull_threshold ({prompt.threshold})"
            fix = "no action needed; a lower pull_threshold allows shorter pulls"
        elif not other.holding.exported and not other.holding.stored:
            reason = "only in its GPU's prefix cache, and it exports nothing of that"
            fix = "bidirectional=true on that engine, or a node store for both"
        else:
            reason = "requests to this engine did not name that one as a source"
            fix = "send requests through a proxy that names the engine, or use a node store"
        checks.append(check(here.name, had + reason, fix))
    return checks


def _store(here: Found, whole: int, counts: Counts | None) -> Iterator[Check]:
    """No engine has more of the prompt: report the missing spans and why they are missing, in order of tokens."""
    found = here.holding
    if not here.engine.inspection.store:
        message = "this engine uses no node store, and its own prefix cache has no more of it"
        fix = "leave store at its default (auto), and see the engine's log for why it has none"
        fix += "" if here.tokens else f"; {removal_text.ABOUT_SALTS}"
        yield warn(here.name, message + (f": {found.problem}" if found.problem else ""), fix)
        return
    if counts is not None and counts.instance != here.engine.inspection.store:
        fix = "give --socket as in the engine's option store; containers share a socket through a volume"
        yield fail(here.name, "the engine uses another node store than the one at this socket", fix)
        return
    gaps = removal_text.missing(found, here.tokens, whole)
    if not gaps:
        reason = found.problem or "the store gives no removal reason"
        yield unknown(here.name, f"not in its node store; {reason}", "try again; see the engine's log")
    for gap in gaps[:MAX_GAPS]:
        message, fix = removal_text.message_and_fix(gap, found)
        if removal_text.key(gap) == removal_text.NEVER_STORED:
            message += _not_stored(here)
        start, end = max(gap.start, here.tokens), min(gap.end, whole)
        yield warn(here.name, f"tokens {start} to {end}: {message}", fix)
    if len(gaps) > MAX_GAPS:
        yield unknown(here.name, f"and {len(gaps) - MAX_GAPS} more spans: `kvtier inspect` lists them")


def _not_stored(here: Found) -> str:
    skipped = here.engine.metrics.stores_skipped() if here.engine.metrics else {}
    reasons = ", ".join(f"{n:.0f} blocks ({kind})" for kind, n in skipped.items())
    return f"; this engine skipped the store of {reasons}" if reasons else ""


def tokens_differ(name: str, tokens: list[int], other: list[int], hash_block_size: int) -> Check:
    """The first token in which two prompts differ."""
    shorter = min(len(tokens), len(other))
    same = next((i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), shorter)
    whole = same // hash_block_size * hash_block_size if hash_block_size else same
    equal = f"the first {same} tokens are equal" + (f", {whole} of them in whole blocks" if hash_block_size else "")
    if same == shorter:
        return ok(name, f"one is a prefix of the other: {equal}")
    message = f"{equal}; they differ at token {same} ({tokens[same : same + 3]} and {other[same : same + 3]})"
    return warn(name, message, "put what changes (dates, names, ids) behind what stays the same")
