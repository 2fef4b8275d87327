"""One frame of ``kvtier top``: tiers, what lookups find, bandwidths, leases, engines."""

import itertools
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_kvtier.cli.inputs import make_table
from vllm_kvtier.cli.top.readings import Rates, Reading
from vllm_kvtier.doctor.engines.server import PREFIX, Scrape
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.memory.memory_limits import format_bytes

_BAR_CHARS = 20  # characters
_ALL_COLUMNS_CHARS = 140  # all columns fit
_MIN_CHARS_FOR_BARS = 120  # narrower terminals get no bars
_ENGINE_CHARS, _COLUMN_CHARS = 24, 9  # widths in an engine's line: its address, and each number
_SPARKS = "▁▂▃▄▅▆▇█"
_STATES = {"ready": "green", "opening": "cyan", "read_only": "yellow", "unavailable": "red"}
_MAX_CLIENTS = 12  # lines


def frame(readings: Sequence[Reading], path: str, width: int = _ALL_COLUMNS_CHARS) -> RenderableType:
    """Render ``readings`` (oldest first): rates between the last two, what was found since the start. In a narrow
    ``width`` (in characters) bars and the last columns are left out."""
    now = readings[-1]
    rates = Rates(readings[-2] if len(readings) > 1 else None, now)
    parts: list[RenderableType] = []
    if now.counts is None:
        parts.append(Panel(Text(now.reason, style="yellow"), title=Text(f"node store {path}"), title_align="left"))
    else:
        parts += [_store(now.counts, rates, readings, path), _tiers(now.counts, rates, width >= _MIN_CHARS_FOR_BARS)]
        if now.counts.clients:
            parts.append(_clients(now.counts))
    if now.engines:
        parts.append(_engines(now, rates, max(1, (width - _ENGINE_CHARS) // _COLUMN_CHARS)))
    return Group(*parts)


def _store(counts: m.Counts, rates: Rates, readings: Sequence[Reading], path: str) -> Panel:
    index = counts.index
    lines = Table.grid(padding=(0, 2))
    history = Text(sparks([_found_share(*pair) for pair in itertools.pairwise(readings)]), "green")
    latest = _found_share(*readings[-2:]) if len(readings) > 1 else None
    lines.add_row("found", "-" if latest is None else f"{latest:.1%}", "of hash blocks asked for", history)
    lines.add_row("", _share(index.prefix_hits, index.prefix_queries), "since the start", "")
    of = (("lookups/s", lambda c: c.index.lookups), ("evicted/s", lambda c: c.index.evictions))
    moves = "   ".join(f"{name} {_number(rates.of_store(value))}" for name, value in of)
    held = f"leases {index.leases}   being written {index.reservations}   pinned {_size(index.pinned_pages * m.PAGE)}"
    lines.add_row("now", "", Text(f"{moves}   {held}"), "")
    directory = getattr(counts, "directory", None)
    if directory is not None and directory.keys:
        lines.add_row("GPUs", "", f"{directory.holders} engines share {directory.keys:,} blocks of their caches", "")
    if counts.note:
        lines.add_row(Text("note", "yellow"), "", Text(counts.note, "yellow"), "")
    title = f"node store {path} (pid {counts.pid}, up {_duration(counts.seconds)}, {counts.policy})"
    return Panel(lines, title=Text(title), title_align="left")


def _tiers(counts: m.Counts, rates: Rates, bars: bool) -> Table:
    index = counts.index
    look = {"box": box.SIMPLE_HEAD} if bars else {"box": None, "padding": (0, 2, 0, 0)}
    table = Table(pad_edge=False, expand=False, **look)
    for name in ("tier", "state", "filled", *([""] if bars else []), "blocks", "found/s", "in", "out", "evicted/s"):
        table.add_column(name, justify="left" if name in ("tier", "state", "filled") else "right", no_wrap=True)
    used, growing = index.used_pages * m.PAGE, counts.ready_bytes < counts.pool_bytes
    block = used / index.entries if index.entries else 0.0  # bytes, on average
    table.add_row(
        "memory",
        Text(f"usable {counts.ready_bytes / counts.pool_bytes:.0%}", "cyan") if growing else Text("ready", "green"),
        *_filled(used, counts.pool_bytes, bars),
        f"{index.entries:,}",
        _number(rates.of_store(lambda c: c.index.prefix_hits)),
        _rate(rates.of_store(lambda c: c.index.commits), block),
        _rate(rates.of_store(lambda c: c.index.prefix_hits), block),
        _number(rates.of_store(lambda c: c.index.evictions)),
    )
    for tier in counts.tiers:

        def per_second(name: str, tier=tier) -> float | None:
            return rates.of_tier(tier.name, lambda t: getattr(t, name))

        table.add_row(
            tier.name,
            Text(tier.state, _STATES.get(tier.state, "")),
            *_filled(tier.used_bytes, tier.capacity_bytes, bars),
            f"{tier.blocks:,}",
            _number(per_second("found_blocks")),
            _rate(per_second("written_bytes")),
            _rate(per_second("read_bytes")),
            _number(per_second("evicted_blocks")),
        )
        if tier.reason:
            table.add_row("", Text(tier.reason, "yellow"))
    return table


def _clients(counts: m.Counts) -> Table:
    table = make_table(("client", "pid", "leases", "writing"), (), left=("client",), box=box.SIMPLE_HEAD)
    busy = sorted(counts.clients, key=lambda c: (c.kind != "engine", -c.leases - c.reservations))
    for client in busy[:_MAX_CLIENTS]:
        table.add_row(f"{client.kind} {client.name}", str(client.pid), str(client.leases), str(client.reservations))
    if len(busy) > _MAX_CLIENTS:
        table.add_row(f"and {len(busy) - _MAX_CLIENTS} more")
    return table


def _engines(now: Reading, rates: Rates, columns: int) -> RenderableType:
    """``columns``: how many numbers of each engine fit."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    heads = ("run", "wait", "cache", "in tok/s", "out tok/s", "GPU hits", "loaded", "load", "store", "pulled", "pull")
    table.add_column("engine", no_wrap=True, min_width=15)
    heads = (*heads, "declined")
    for name in heads[:columns]:
        table.add_column(name, justify="right", no_wrap=True)
    failed: list[Text] = []
    for url, scrape in now.engines.items():
        if not isinstance(scrape, Scrape) or scrape.is_proxy:
            proxy = f"{url} is `kvtier proxy`, not an engine: give the URLs of its engines"
            failed.append(Text(f" {proxy if isinstance(scrape, Scrape) else scrape}", "yellow"))
            continue

        def per_second(name: str, url=url) -> float | None:
            return rates.of_engine(url, lambda s: s.total(name))

        numbers = (
            f"{scrape.total('vllm:num_requests_running'):.0f}",
            f"{scrape.total('vllm:num_requests_waiting'):.0f}",
            f"{scrape.mean('vllm:kv_cache_usage_perc') or 0.0:.0%}",
            _number(per_second("vllm:prompt_tokens")),
            _number(per_second("vllm:generation_tokens")),
            _share(per_second("vllm:prefix_cache_hits"), per_second("vllm:prefix_cache_queries")),
            _number(per_second(PREFIX + "loaded_tokens")),
            _rate(per_second(PREFIX + "loaded_bytes")),
            _rate(per_second(PREFIX + "stored_bytes")),
            _number(per_second(PREFIX + "pulled_tokens")),
            _rate(per_second(PREFIX + "pulled_bytes")),
            _number(per_second(PREFIX + "lookups_declined")),
        )
        table.add_row(url.partition("://")[2], *numbers[:columns])
    if columns < len(heads) and table.row_count:
        failed.append(Text(f" a wider terminal also shows {', '.join(heads[columns:])}", "dim"))
    return Group(*([table] if table.row_count else []), *failed)


def _found_share(before: Reading, after: Reading) -> float | None:
    """Between two readings; None without lookups."""
    rates = Rates(before, after)
    queries = rates.of_store(lambda c: c.index.prefix_queries)
    return rates.of_store(lambda c: c.index.prefix_hits) / queries if queries else None


def sparks(shares: Sequence[float | None]) -> str:
    """A bar of one character for each number from 0 to 1; blank for None."""
    return "".join(
        " " if share is None else _SPARKS[min(len(_SPARKS) - 1, max(0, int(share * len(_SPARKS))))] for share in shares
    )


def _filled(used: int, capacity: int, bars: bool) -> tuple[Text | str, ...]:
    """One cell, or with ``bars`` two."""
    if not capacity:
        return (Text("no limit", "dim"), _size(used)) if bars else (_size(used),)
    share = min(1.0, used / capacity)
    if not bars:
        return (f"{share:.0%}",)
    full = round(_BAR_CHARS * share)
    bar = Text.assemble(("█" * full, "green"), ("░" * (_BAR_CHARS - full), "dim"))
    return bar, f"{_size(used)} of {_size(capacity)}"


def _size(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "0"


def _share(part: float | None, whole: float | None) -> str:
    return f"{part / whole:.1%}" if part is not None and whole else "-"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


def _rate(value: float | None, times: float = 1.0) -> str:
    """Bytes a second."""
    if value is None:
        return "-"
    nbytes = value * times
    for suffix, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {suffix}"
    return f"{nbytes:.0f} B/s"


def _duration(seconds: float) -> str:
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min {seconds % 60:.0f} s"
