"""The result of a check."""

from collections.abc import Sequence
from typing import Literal

import msgspec

State = Literal["ok", "warn", "fail", "unknown"]


class Check(msgspec.Struct, frozen=True):
    """``message``: the finding, with the cause of a problem; ``fix``: what to do, "" for ok."""

    name: str
    state: State
    message: str
    fix: str = ""


def ok(name: str, message: str) -> Check:
    return Check(name, "ok", message)


def warn(name: str, message: str, fix: str) -> Check:
    return Check(name, "warn", message, fix)


def fail(name: str, message: str, fix: str) -> Check:
    return Check(name, "fail", message, fix)


def unknown(name: str, message: str, fix: str = "") -> Check:
    return Check(name, "unknown", message, fix)


def exit_code(checks: Sequence[Check]) -> int:
    """2 if a check failed, 1 if one warns, otherwise 0; unknown counts as neither."""
    states = {check.state for check in checks}
    return 2 if "fail" in states else 1 if "warn" in states else 0


def duration(seconds: float) -> str:
    for word, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {word}"
    return f"{seconds:.0f} second{'s' * (round(seconds) != 1)}" if seconds >= 1 else "less than a second"
