"""Texts for what an engine's Explanation says of a prompt's blocks; shared by `kvtier inspect` and `kvtier doctor`."""

from typing import NamedTuple

from vllm_kvtier.doctor.report import duration
from vllm_kvtier.store.index.removal_history import RemovalReason
from vllm_kvtier.wire.messages import ExplainedSpan, Explanation, LoadEstimate

_SPACE = "a larger store_size or a disk (store_disk_path) keeps more; `kvtier pin` keeps this prompt"
_NONE = "no action needed; "
#: Of a prompt that is not found at all.
ABOUT_SALTS = "if it came through `kvtier proxy`, give --salt-secret and --tenant: the proxy salts every request"


class Cause(NamedTuple):
    """Why blocks are not in the store. `inspect` shows ``name``; `doctor` adds ``detail`` and ``fix``."""

    name: str
    detail: str
    fix: str


_R = RemovalReason
CAUSES = {
    _R.EVICTED: Cause("evicted", "no secondary tier had it", _SPACE),
    _R.BELOW: Cause("evicted, then lost in a secondary tier", "the tier had it when memory evicted it", _SPACE),
    _R.WAITED: Cause(
        "evicted before its demotion", "it was still queued for a secondary tier",
        "the tier is slower than the engines store: a larger store_size gives it more time",
    ),
    _R.CLEARED: Cause("cleared", "by `kvtier clear`", f"{_NONE}it is stored again on its next use"),
    _R.DISCARDED: Cause(
        "discarded", "its checksum was wrong when it was loaded",
        "no output was affected; if this repeats, test this machine's memory, disk and network",
    ),
    _R.ABORTED: Cause(
        "not completed",
        "the engine that was storing it dropped the copy, which took too long or whose blocks were needed",
        "see stores_skipped in that engine's metrics; store_inflight_share if copies are too many or slow",
    ),
    _R.DIED: Cause("not completed", "the engine that was storing it ended", "see that engine's log"),
    _R.NO_ROOM: Cause(
        "no space", "all of the store's memory was in use, pinned or being written",
        "a larger store_size, or unpin something",
    ),
    _R.UNREAD: Cause(
        "lost in a secondary tier", "its promotion failed to read it",
        "see the tier's checks, dmesg, and the store's log beside its socket",
    ),
    _R.NO_STATE: Cause(
        "no state stored",
        "vLLM keeps recurrent states only at the end of a prompt's last whole block and where prompts part",
        f"{_NONE}with --prefix-cache-retention-interval it keeps more, and all of them are stored",
    ),
    0: Cause(
        "never stored", "no engine that shares with this one has stored a prompt with this prefix {since}",
        "compare it with the prompt that should have the same prefix (--compare-with): one different character at the "
        f"beginning is enough; {ABOUT_SALTS}",
    ),
}  # fmt: skip
NEVER_STORED = "never_stored"


def _cause(reason: int) -> Cause:
    newer = Cause(f"removed (reason {reason})", "only a newer vllm-kvtier knows the reason", _SPACE)
    return CAUSES.get(reason, newer)


def key(span: ExplainedSpan) -> str:
    """For --json: the removal reason in snake_case; "" if the span is in some tier."""
    if span.tier or not span.removal_reason:
        return "" if span.tier else NEVER_STORED
    known = {reason.value: reason.name.lower() for reason in RemovalReason}
    return known.get(span.removal_reason, str(span.removal_reason))


def short(span: ExplainedSpan) -> str:
    """The cell of a table: the tier that has the span, or why none has it and since when."""
    if span.tier:
        return {"memory": "in memory", "writing": "being stored"}.get(span.tier, f"on {span.tier}, not in memory")
    removed = span.removal_reason not in (0, RemovalReason.NO_STATE)
    return _cause(span.removal_reason).name + (f", {_ago(span)} ago" if removed else "")


def message_and_fix(span: ExplainedSpan, all: Explanation) -> tuple[str, str]:
    """For `doctor`: which tier has the span, or why none has it; and what to do."""
    if span.tier == "writing":
        return "being stored at the moment", f"{_NONE}try again"
    if span.tier == "memory":
        return "in memory, behind missing blocks", f"{_NONE}it is found again once those are stored"
    if span.tier:
        return (
            f"on {span.tier}, not in memory: promoted when a request needs it, if that is faster than computing",
            "`kvtier warm` promotes it now; a larger store_size keeps more in memory",
        )
    _, detail, fix = _cause(span.removal_reason)
    since = f"in the last {duration(all.history_seconds)} (the store's history ends there)"
    if all.history_seconds >= all.store_seconds:
        since = f"since the store started {duration(all.store_seconds)} ago"
    message = f"{short(span)}: {detail.format(since=since)}"
    if span.removal_reason in (RemovalReason.EVICTED, RemovalReason.BELOW):
        unusable = (each for each in all.tiers if each.state not in ("", "ready"))
        message += "".join(f" ({each.name} is {each.state}: {each.reason})" for each in unusable)
        writable = [each.name for each in all.tiers if each.name != "nodes" and each.state == "ready"]
        if span.removal_reason == RemovalReason.EVICTED and writable:
            message += f"; not admitted to {' and '.join(writable)}"
            fix = f"store_disk_admission=all demotes every block, reuse only those used twice; {fix}"
    return message, fix


def missing(all: Explanation, have: int, whole: int) -> list[ExplainedSpan]:
    """Spans that are not in memory and overlap tokens ``have`` to ``whole``, in order of tokens."""
    gaps = [each for each in all.spans if each.end > have and each.start < whole and each.tier != "memory"]
    return sorted(gaps, key=lambda each: (max(each.start, have), each.group))


_SOURCES = {"host": "the store's memory", "peer_gpu": "a peer's GPU cache"}
_REASONS = {
    "faster": "loading is faster",
    "not_measured": "speeds are not measured yet",
    "slower": "computing is faster",
    "queued": "computing is faster than waiting for queued loads",
    "compute_within_step": "computed before a load could be used",
    "policy_always": "computing is faster, but load_policy is always",
}


def decision(each: LoadEstimate) -> str:
    """What the engine would do with a prefix that it finds, and why."""
    tokens = f"tokens {each.start} to {each.end}"
    text = f"load {tokens} from" if each.load else f"compute {tokens} of"
    text = f"{text} {_SOURCES.get(each.source, each.source)}: "
    if each.reason == "below_threshold":
        return f"{text}fewer than pull_threshold"
    compute = "not measured" if each.compute_seconds is None else f"{each.compute_seconds * 1e3:.1f} ms"
    reason = _REASONS.get(each.reason, each.reason)
    return f"{text}load {each.load_seconds * 1e3:.1f} ms, compute {compute} ({reason})"


def _ago(span: ExplainedSpan) -> str:
    if span.oldest < 2 * span.newest + 2:
        return duration(span.newest)
    return f"{duration(span.newest)} to {duration(span.oldest)}"
