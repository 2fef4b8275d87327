"""The tables that are printed, and throughput at the limits of the p99."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from . import hits
from .capacity import Point, at_p99


def capacities(data: dict[str, Any]) -> list[dict]:
    """By workload, limit and variant: requests a second at a p99 of at most the limit, and the ratio to the first
    variant's."""
    out = []
    for workload in _several(row["workload"] for row in data["levels"]):
        for limit in data["settings"]["p99"]:
            variants = _several(row["variant"] for row in data["levels"])
            first = at_p99(_points(data["levels"], workload, variants[0]), limit).throughput
            for variant in variants:
                found = at_p99(_points(data["levels"], workload, variant), limit)
                out.append({
                    "workload": workload, "p99_s": limit, "variant": variant,
                    "requests_per_s": None if found.throughput is None else round(found.throughput, 3),
                    "at_least": found.at_least,
                    "ratio": round(found.throughput / first, 3) if found.throughput and first else None,
                })  # fmt: skip
    return out


def _points(rows: Iterable[dict], workload: str, variant: str) -> list[Point]:
    return [
        Point(row["offered"], _p99(row), row["requests_per_s"] or 0.0)
        for row in rows
        if (row["workload"], row["variant"]) == (workload, variant)
    ]


def _p99(row: dict) -> float | None:
    """Seconds. A request that failed, or for which there was no time, would have been the slowest."""
    missed = row["errors"] + row["left_out"] + row["given_up"]
    return None if missed or not row["ttft_ms"] else row["ttft_ms"]["p99"] / 1000


def show(console: Console, data: dict[str, Any]) -> None:
    for text in (levels(data), capacity(data)):
        console.print(Markdown(text) if console.is_terminal else text, markup=False, highlight=False, soft_wrap=True)


def levels(data: dict[str, Any]) -> str:
    """A row a level and variant, as Markdown."""
    heads = ["load", "variant", "requests", "errors", "req/s", "output tokens/s", "ratio", "TTFT p50, ms", "p90", "p99",
             "ITL p50, ms", "p99", *(f"{tier}, %" for tier in hits.TIERS)]  # fmt: skip
    loads: dict[tuple[str, float], list[dict]] = {}
    for row in data["levels"]:
        loads.setdefault((row["workload"], row["offered"]), []).append(row)
    order = {name: number for number, name in enumerate(_several(row["variant"] for row in data["levels"]))}
    rows = []
    for (workload, offered), some in sorted(loads.items(), key=lambda item: (item[0][0] != "trace", item[0][1])):
        name = f"{workload} {offered:g}"
        some.sort(key=lambda row: order[row["variant"]])
        first = some[0]["requests_per_s"] or 0.0
        rows += [_row(name, row, first) for row in some]
        lru = (some[0]["lru"].get(tier) for tier in hits.TIERS)
        shown = ["" if share is None else f"{100 * share:.1f}" for share in lru]
        rows.append([name, "*LRU of these sizes*", *[""] * 10, *shown])
    return _markdown(heads, rows)


def _row(name: str, row: dict, first: float) -> list[str]:
    """``first``: requests a second of the first variant."""
    missed, rate = row["errors"] + row["left_out"] + row["given_up"], row["requests_per_s"] or 0.0
    return [
        name, row["variant"], f"{row['requests']:,}", str(missed), f"{rate:.2f}",
        f"{row['output_tokens_per_s'] or 0:,.0f}", f"{rate / first:.2f}" if first else "",
        *_times(row["ttft_ms"], "p50", "p90", "p99"), *_times(row["itl_ms"], "p50", "p99"),
        *(f"{100 * row['hits'][tier]:.1f}" for tier in hits.TIERS),
    ]  # fmt: skip


def capacity(data: dict[str, Any]) -> str:
    """A row a workload and limit, a column a variant, as Markdown."""
    variants = _several(row["variant"] for row in data["capacity"])
    cells: dict[tuple, dict[str, str]] = {}
    for row in data["capacity"]:
        text = "-" if row["requests_per_s"] is None else f"{row['requests_per_s']:.2f}" + "+" * row["at_least"]
        if row["ratio"] and row["variant"] != variants[0]:
            text += f" ({row['ratio']:.2f}x)"
        cells.setdefault((row["workload"], row["p99_s"]), {})[row["variant"]] = text
    heads = ["requests/s at a p99 TTFT of at most", *variants]
    rows = [[f"{load}: {limit:g} s", *(found.get(v, "") for v in variants)] for (load, limit), found in cells.items()]
    return _markdown(heads, rows)


def _times(values: dict | None, *names: str) -> list[str]:
    if not values:
        return ["-"] * len(names)
    return [f"{values[name]:,.0f}" if values[name] > 99 else f"{values[name]:.1f}" for name in names]


def _markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _several(values: Iterable[str]) -> list[str]:
    """Each once, in their order."""
    return list(dict.fromkeys(values))
