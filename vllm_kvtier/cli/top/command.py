"""``kvtier top``: the node store and its engines, live."""

import io
import re
import threading
import time
from collections import deque
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from vllm_kvtier.cli import inputs
from vllm_kvtier.cli.top.frame import frame
from vllm_kvtier.cli.top.readings import Reading, Watcher
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.launcher import store_path

_MAX_READINGS = 40  # readings
_SVG_COLUMNS = 136

Servers = Annotated[
    list[str] | None,
    typer.Option("--server", help="A vLLM server, http://HOST:PORT, whose /metrics are shown; repeatable."),
]
Interval = Annotated[float, typer.Option("--interval", min=0.05, help="Seconds between two readings.")]
Once = Annotated[bool, typer.Option("--once", help="Print one frame with rates over one interval, and exit.")]
Count = Annotated[int, typer.Option("--readings", min=2, help="With --once: number of readings to take first.")]
Svg = Annotated[Path | None, typer.Option("--svg", help="With --once: also write the frame to this SVG file.")]


def top(
    name: inputs.StoreName = "default",
    socket: inputs.StoreSocket = None,
    server: Servers = None,
    interval: Interval = 1.0,
    once: Once = False,
    readings: Count = 2,
    svg: Svg = None,
) -> None:
    """Show tiers, what lookups find, bandwidths and leases live, until Ctrl-C.

    Rates are of the last interval; hits of memory are counted in hash blocks. In a pipe or a file, frames are printed
    one below the other. Exit status of --once: 1 if no store and no engine answered.
    """
    if svg is not None and not once:
        raise typer.BadParameter("needs --once", param_hint="--svg")
    with inputs.errors_as_messages():
        path = socket or store_path(name)
        with Watcher(path, server or []) as watcher:
            seen: deque[Reading] = deque([watcher.read()], maxlen=_MAX_READINGS)
            if once:
                _print_one(watcher, seen, path, interval, readings, svg)
                raise typer.Exit(int(not seen[-1].anything))
            _show_live(watcher, seen, path, interval)


def _show_live(watcher: Watcher, seen: deque[Reading], path: str, interval: float) -> None:
    timer = threading.Event()  # never set: its wait is the timer, and Ctrl-C interrupts it
    console = Console(markup=False)
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
    for _ in range(readings - 1):
        time.sleep(interval)
        seen.append(watcher.read())
    console = Console(markup=False)
    console.print(frame(list(seen), path, console.width))
    if svg is not None:
        console = Console(markup=False, record=True, width=_SVG_COLUMNS, file=io.StringIO(), force_terminal=True)
        console.print(frame(list(seen), path, console.width))
        # Without rich's links to fonts elsewhere: a picture loads nothing, and monospace is near enough.
        drawn = re.sub(r"@font-face\s*{[^}]*}", "", console.export_svg(title="kvtier top"))
        try:
            svg.write_text(drawn, "utf-8")
        except OSError as error:
            raise KVTierError(f"cannot write {svg}: {error.strerror or error}") from error
