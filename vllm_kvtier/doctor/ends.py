"""What an engine's Explanation says of a prompt's blocks, in words: where they are, how they ended, what to do."""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_kvtier.doctor.report import duration
from vllm_kvtier.store.fates import Fate
from vllm_kvtier.wire.messages import Explanation, Source, Stretch, Weighed

_ROOM = "a larger store_size or a disk (store_disk_path) keeps more; `kvtier pin` keeps this prompt"
_PLACES = {"memory": "in the node store's memory", "writing": "being written to the node store just now"}


@dataclass(frozen=True)
class End:
    """``words``: of a clause, with {ago}; ``remedy``: what to do."""

    short: str
    words: str
    remedy: str


ENDS = {
    Fate.EVICTED: End("evicted", "evicted {ago} ago to make room, and no tier below memory had it", _ROOM),
    Fate.BELOW: End(
        "evicted, then lost below", "evicted from memory {ago} ago; a tier below had it then, and has it no more", _ROOM
    ),
    Fate.WAITED: End(
        "evicted before written below",
        "evicted {ago} ago to make room, before its turn came to be written below memory",
        "the disk is slower than what is stored: a larger store_size gives it more time",
    ),
    Fate.CLEARED: End(
        "cleared", "cleared by a person {ago} ago (`kvtier clear`)", "no fault: it is stored again when it is used"
    ),
    Fate.DISCARDED: End(
        "wrong checksum",
        "thrown away {ago} ago, because its checksum was wrong when it was loaded",
        "no wrong token came of it; if it goes on, test this machine's memory, disk and network",
    ),
    Fate.ABORTED: End(
        "given up by its writer",
        "never finished: the engine that was storing it gave up {ago} ago, for want of time or because its blocks were "
        "needed",
        "see not_stored in that engine's counters: store_hold_share where copies are too many or slow",
    ),
    Fate.DIED: End(
        "its writer went away",
        "never finished: the engine that was storing it went away {ago} ago",
        "no fault of the store: see why that engine ended",
    ),
    Fate.NO_ROOM: End(
        "no room",
        "not taken {ago} ago: all of the store's memory was in use, pinned or being written",
        "a larger store_size, or unpin something",
    ),
    Fate.UNREAD: End(
        "could not be read below",
        "lost below: it was to come up {ago} ago and could not be read",
        "look at the tier's checks, at dmesg, and at the store's log beside its socket",
    ),
}  # fmt: skip
NEVER_STORED = "never_stored"
NEVER = End(
    "never stored",
    "never stored: no engine that shares with this one has stored a prompt that begins with these tokens {since}",
    "compare it with the prompt that you expected to share with (--like): one different character at the beginning "
    "is enough",
)


def _end(fate: int) -> End:
    try:
        return ENDS[Fate(fate)] if fate else NEVER
    except ValueError:  # of a newer store
        return End(f"gone (reason {fate})", f"gone {{ago}} ago, for reason {fate} of a newer vllm-kvtier", _ROOM)


def key(stretch: Stretch) -> str:
    """For --json: a word for what became of it; "" where it is somewhere."""
    if stretch.place:
        return ""
    try:
        return Fate(stretch.fate).name.lower() if stretch.fate else NEVER_STORED
    except ValueError:
        return str(stretch.fate)


def short(stretch: Stretch) -> str:
    """A few words for a table."""
    if stretch.place:
        return _PLACES.get(stretch.place, f"on {stretch.place}, below memory")
    ago = f", {_ago(stretch)} ago" if stretch.fate else ""
    return _end(stretch.fate).short + ago


def words(stretch: Stretch, all: Explanation) -> tuple[str, str]:
    """(where it is or what became of it, what to do)."""
    if stretch.place == "writing":
        return "being written to the node store just now", "no fault: ask again in a moment"
    if stretch.place == "memory":
        return "in the node store's memory, behind what is missing before it", "no fault: it is found again with that"
    if stretch.place:
        return (
            f"not in memory but on {stretch.place}: it comes up when a request needs it, if that is sooner than "
            "computing",
            "`kvtier warm` brings it up beforehand; a larger store_size keeps more in memory",
        )
    end = _end(stretch.fate)
    complete = all.known_seconds >= all.store_seconds
    since = (
        f"since the store started {duration(all.store_seconds)} ago"
        if complete
        else f"in the last {duration(all.known_seconds)}; what ended before that the store no longer remembers"
    )
    sentence = end.words.format(ago=_ago(stretch), since=since)
    if stretch.fate in (Fate.EVICTED, Fate.BELOW):
        sentence += "".join(f" ({each.name} is {each.state}: {each.reason})" for each in _unwell(all.tiers))
        written = [each.name for each in all.tiers if each.name != "nodes" and each.state == "ready"]
        if stretch.fate == Fate.EVICTED and written:
            sentence += f"; {' and '.join(written)} had not taken it"
            return sentence, (
                "what is used once only is not written below memory: store_disk_admission=all writes everything; "
                f"{end.remedy}"
            )
    return sentence, end.remedy


def missing(all: Explanation, have: int, whole: int) -> list[Stretch]:
    """What is between the tokens that the engine has and the prompt's last whole block, in order of tokens."""
    gaps = [each for each in all.stretches if each.end > have and each.start < whole and each.place != "memory"]
    return sorted(gaps, key=lambda each: (max(each.start, have), each.group))


def weighed(each: Weighed) -> str:
    """What the engine would do with what it finds."""
    source = SOURCES.get(each.source, each.source)
    what = f"{'load' if each.load else 'compute'} tokens {each.start} to {each.end}"
    if each.reason == "below threshold":
        return f"{what}, which {source} has: fewer than pull_threshold"
    cost = f"loading from {source} {each.load_seconds * 1e3:.1f} ms, computing "
    cost += "not measured yet" if each.compute_seconds is None else f"{each.compute_seconds * 1e3:.1f} ms"
    return f"{what}: {cost} ({_REASONS.get(each.reason, each.reason)})"


_REASONS = {
    "faster": "loading is faster",
    "unmeasured": "not known yet, so it is tried",
    "slower": "computing is faster",
    "queued": "loads under way go first, so computing is faster",
    "short": "it is computed before a load is of use, which comes in between steps of others",
    "always": "computing would be faster, but load_policy is always",
}
SOURCES = {"host": "the node store's memory", "gpu": "another engine's GPU"}


def _ago(stretch: Stretch) -> str:
    if stretch.oldest < 2 * stretch.newest + 2:
        return duration(stretch.newest)
    return f"{duration(stretch.newest)} to {duration(stretch.oldest)}"


def _unwell(tiers: Sequence[Source]) -> list[Source]:
    return [each for each in tiers if each.state not in ("", "ready")]
