"""How far a pass is: a bar on a terminal, one line when it is over anywhere."""

import time
from collections import deque

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .load import Record
from .stats import percentile

REFRESH_SECONDS = 0.25  # between two changes of what is shown: drawing takes time from measuring
RECENT = 200


class Bar:
    """``with Bar(console, "cold, on", total) as bar: ... bar.seen(record)``"""

    def __init__(self, console: Console, title: str, total: int):
        self._title, self._errors, self._done, self._shown = title, 0, 0, 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal, auto_refresh=False,
        )  # fmt: skip
        self._task = self._progress.add_task(title, total=total, note="")

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def seen(self, record: Record) -> None:
        self._done += 1
        self._errors += bool(record.error)
        if record.ttft is not None:
            self._recent.append(record.ttft)
        now = time.monotonic()
        if self._progress.disable or now - self._shown < REFRESH_SECONDS:
            return
        self._shown = now
        note = f"TTFT {percentile(self._recent, 0.5) * 1000:,.0f} ms" if self._recent else ""
        note += f", {self._errors} errors" if self._errors else ""
        self._progress.update(self._task, completed=self._done, note=note, refresh=True)


def line(title: str, summary: dict) -> str:
    """A pass in one line."""

    def three(name: str) -> str:
        values = summary[name]
        return " / ".join(f"{values[p]:,.1f}" for p in ("p50", "p90", "p99")) if values else "none"

    text = f"{title}: {summary['requests']:,} requests in {summary['seconds']:,.1f} s, TTFT {three('ttft_ms')} ms, "
    text += f"ITL {three('itl_ms')} ms (p50 / p90 / p99), {summary['output_tokens_per_s'] or 0:,.0f} tokens/s"
    if "tokens" in summary:
        text += f", hit rate {summary['tokens']['hit_rate']:.1%}"
    if summary["errors"]:
        text += f", {summary['errors']} ERRORS, the first: {next(iter(summary['error_kinds']))}"
    return text
