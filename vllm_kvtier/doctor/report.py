"""What a check found, in words."""

from collections.abc import Sequence
from typing import Literal

import msgspec

State = Literal["ok", "warn", "fail", "unknown"]


class Check(msgspec.Struct, frozen=True):
    """``sentence``: what was found, with the cause where something is wrong; ``remedy``: what to do, "" for ok."""

    name: str
    state: State
    sentence: str
    remedy: str = ""


def ok(name: str, sentence: str) -> Check:
    return Check(name, "ok", sentence)


def warn(name: str, sentence: str, remedy: str) -> Check:
    return Check(name, "warn", sentence, remedy)


def fail(name: str, sentence: str, remedy: str) -> Check:
    return Check(name, "fail", sentence, remedy)


def unknown(name: str, sentence: str, remedy: str = "") -> Check:
    return Check(name, "unknown", sentence, remedy)


def exit_code(checks: Sequence[Check]) -> int:
    """2 if anything fails, 1 if something is to be looked at, else 0; what is not known counts as neither."""
    states = {check.state for check in checks}
    return 2 if "fail" in states else 1 if "warn" in states else 0


def duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} second{'s' * (round(seconds) != 1)}" if seconds >= 1 else "less than a second"
