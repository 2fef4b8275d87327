"""``kvtier top``: the node store and its engines, live."""

import re
import threading
from collections import deque
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from vllm_kvtier.cli import inputs
from vllm_kvtier.cli.frame import frame
from vllm_kvtier.cli.readings import Reading, Watcher
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.launch import store_path

_HISTORY = 40  # readings
_SVG_COLUMNS = 136

Name = Annotated[str, typer.Option("--name", help="Several stores on one node have different names.")]
Socket = Annotated[
    str | None, typer.Option("--socket", help="The store's socket, instead of what follows from --name.")
]
Servers = Annotated[
    list[str] | None,
    typer.Option("--server", help="A vLLM server, http://HOST:PORT, whose /metrics are shown; repeatable."),
]
Interval = Annotated[float, typer.Option("--interval", min=0.05, help="Seconds between two readings.")]
Once = Annotated[bool, typer.Option("--once", help="Print one picture, of rates over one interval, and end.")]
Count = Annotated[int, typer.Option("--readings", min=2, help="With --once: take so many readings first.")]
Svg = Annotated[Path | None, typer.Option("--svg", help="With --once: write the picture to this file too.")]


def top(
    name: Name = "default",
    socket: Socket = None,
    server: Servers = None,
    interval: Interval = 1.0,
    once: Once = False,
    readings: Count = 2,
    svg: Svg = None,
) -> None:
    """Watch tiers, hit rates, bandwidths and leases as they change, until Ctrl-C.

    Shares and rates are of the last interval; "found" of memory counts blocks of prompts. Into a pipe or a file one
    picture goes below the other. Exit status of --once: 1 if nobody answered.
    """
    if svg is not None and not once:
        raise typer.BadParameter("needs --once", param_hint="--svg")
    with inputs.errors_in_words():
        path = socket or store_path(name)
        with Watcher(path, server or []) as watcher:
            seen: deque[Reading] = deque([watcher.read()], maxlen=_HISTORY)
            if once:
                _print_one(watcher, seen, path, interval, readings, svg)
                raise typer.Exit(int(not seen[-1].anything))
            _go_on(watcher, seen, path, interval)


def _go_on(watcher: Watcher, seen: deque[Reading], path: str, interval: float) -> None:
    timer = threading.Event()  # never set: its wait is the timer, and Ctrl-C interrupts it
    console = Console()
    try:
        if not console.is_terminal:
            while not timer.wait(interval):
                seen.append(watcher.read())
                console.print(frame(list(seen), path, console.width))
        with Live(frame(seen, path, console.width), console=console, screen=True, auto_refresh=False) as live:
            while not timer.wait(interval):
                seen.append(watcher.read())
                live.update(frame(list(seen), path, console.width), refresh=True)
    except KeyboardInterrupt:
        return


def _print_one(
    watcher: Watcher, seen: deque[Reading], path: str, interval: float, readings: int, svg: Path | None
) -> None:
    timer = threading.Event()
    for _ in range(readings - 1):
        timer.wait(interval)
        seen.append(watcher.read())
    console = Console()
    console.print(frame(list(seen), path, console.width))
    if svg is not None:
        console = Console(record=True, width=_SVG_COLUMNS, file=_Nowhere(), force_terminal=True)
        console.print(frame(list(seen), path, console.width))
        # Without rich's links to fonts elsewhere: a picture loads nothing, and monospace is near enough.
        drawn = re.sub(r"@font-face\s*{[^}]*}", "", console.export_svg(title="kvtier top"))
        try:
            svg.write_text(drawn, "utf-8")
        except OSError as error:
            raise KVTierError(f"the picture cannot be written to {svg}: {error.strerror or error}") from error


class _Nowhere:
    """A file for what is only recorded."""

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back."""


def add_to(app: typer.Typer) -> None:
    app.command("top")(top)
