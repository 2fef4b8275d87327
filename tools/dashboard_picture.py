#!/usr/bin/env python3
"""Draw the dashboard's panels from a real run: docs/dashboard.png.

usage: python tools/dashboard_picture.py [--seconds 150] [--data FILE] [PICTURE]

Two engines on this machine's processor (models/recall-6m) with one node store, its disk, and the proxy in front of
them; conversations and documents for so many seconds; a real Prometheus that scrapes all of it. Then every query of
examples/grafana/kvtier.json is asked as Grafana would ask it, and drawn with matplotlib: Grafana itself is not needed.
``--data`` keeps the answers in FILE, or, if FILE is there, draws those without a run. Needs what the tests need.
"""

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
DASHBOARD = ROOT / "examples" / "grafana" / "kvtier.json"
PICTURE = ROOT / "docs" / "dashboard.png"
INTERVAL = 1.0  # seconds between scrapes
WINDOW = "15s"  # of rates; Grafana's $__rate_interval is four scrapes
# The panels in the picture; the rows are those of the dashboard.
SHOWN = (
    "Prompt tokens not computed", "Loaded by kvtier", "Requests/s", "Store memory in use", "Wrong checksums, 1 h",
    "Stores and tiers up", "Prompt tokens by source", "Time to first token", "Requests by source of their prefix",
    "Bytes by source and codec", "Loads, fetches and pulls: p95", "Duration of a host hit, by stage",
    "Full blocks: stored or skipped", "Waits for promotions", "Memory", "Tiers: bandwidth", "Tiers: requests, p95",
    "Leases between engines", "Blocks kept for leases", "Lookups: p95", "Decisions by reason",
    "Actual over expected duration", "Expected bandwidth", "Requests by outcome", "First byte and whole answer",
    "Known of prompts",
)  # fmt: skip


# -- the run -----------------------------------------------------------------------------------------------------------


def run(seconds: float) -> dict[str, Any]:
    """{"from", "to": seconds since 1970, "panels": {title: {legend: [[second, value], ...]}}}."""
    import prometheus_server
    from engine_fixtures import ENGINE_FLAGS
    from node_fixtures import OPTIONS, SLOT_PAGES, runtime_dir, store_env

    from vllm_kvtier.devtools.engines import Engine, kvtier, proxy
    from vllm_kvtier.devtools.processes import free_port, kill_all, start_all, wait_all
    from vllm_kvtier.store.protocol import PAGE

    program, metrics_port, services = prometheus_server.programs()["prometheus"], free_port(), []
    model = str(ROOT / "models" / "recall-6m")
    with runtime_dir() as folder, tempfile.TemporaryDirectory() as scratch:
        options = {
            **OPTIONS, "store_size": 160 * SLOT_PAGES * PAGE, "store_metrics_port": metrics_port,
            "store_disk_path": f"{scratch}/disk", "store_disk_size": "2GiB", "store_disk_admission": "all",
            "retain_seconds": 20.0, "codec": "int8",
        }  # fmt: skip
        try:
            for name in ("A", "B"):
                kv = kvtier({**options, "endpoint_port": free_port()})
                flags = {**ENGINE_FLAGS, "args": ("--dtype", "bfloat16"), "log_dir": scratch, "env": store_env(folder)}
                services.append(Engine(model, name=f"dashboard-{name}", kv=kv, **flags))
            engines = list(services)
            services.append(proxy(engines[:1], engines[1:], log_dir=scratch))
            start_all(services)
            wait_all(services)
            targets = {
                "vllm": [f"127.0.0.1:{engine.port}" for engine in engines],
                "kvtier-store": [f"127.0.0.1:{metrics_port}"], "kvtier-proxy": [f"127.0.0.1:{services[-1].port}"],
            }  # fmt: skip
            with prometheus_server.Prometheus(program, Path(scratch), targets, INTERVAL) as prometheus:
                while set(prometheus.scraped().values()) != {"up"}:
                    time.sleep(INTERVAL)
                begin = time.time()
                urls = [engine.base_url for engine in engines]
                asyncio.run(load(services[-1].base_url, urls, seconds))
                return {"from": begin, "to": time.time(), "panels": answers(prometheus, begin, time.time())}
        finally:
            kill_all(services)


async def load(proxy_url: str, engine_urls: list[str], seconds: float) -> None:
    """Conversations through the proxy, and questions about long documents to the engines in turn, some at a time: the
    documents together are more than the store's memory holds."""
    import httpx

    rng, end = random.Random(7), time.monotonic() + seconds
    documents = [[rng.randrange(300, 2000) for _ in range(rng.randrange(600, 2200))] for _ in range(14)]

    async with httpx.AsyncClient(timeout=120, trust_env=False) as http:

        async def ask(url: str, path: str, **body: Any) -> dict[str, Any]:
            answer = await http.post(f"{url}/v1/{path}", json={"model": "model", "temperature": 0, **body})
            return answer.raise_for_status().json()

        async def converse(number: int) -> None:
            mine, turns = random.Random(number), []
            while time.monotonic() < end:
                words = " ".join(f"word{mine.randrange(1000)}" for _ in range(20))
                turns.append({"role": "user", "content": f"{number}: {words}"})
                found = await ask(proxy_url, "chat/completions", messages=turns, max_tokens=16)
                turns.append({"role": "assistant", "content": found["choices"][0]["message"]["content"] or "yes"})
                if len(turns) > 12:
                    turns.clear()
                await asyncio.sleep(mine.expovariate(0.5))

        async def read(number: int) -> None:
            mine = random.Random(100 + number)
            while time.monotonic() < end:
                # Some documents are asked about often, others now and then.
                document = documents[min(mine.randrange(14), mine.randrange(14))]
                question = [mine.randrange(300, 2000) for _ in range(20)]
                await ask(mine.choice(engine_urls), "completions", prompt=document + question, max_tokens=8)
                await asyncio.sleep(mine.expovariate(0.7))

        await asyncio.gather(*(converse(i) for i in range(3)), *(read(i) for i in range(3)))


def answers(prometheus: Any, begin: float, end: float) -> dict[str, dict[str, list[list[float]]]]:
    """Of every panel, as Grafana would ask."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        lines = found.setdefault(panel["title"], {})
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$__rate_interval", WINDOW).replace("$instance", ".*")
            query = query.replace("$model", ".*")
            data = prometheus.ask("query_range", query=query, start=begin, end=end, step=2)
            for series in data["result"]:
                legend = target["legendFormat"]
                for label, value in series["metric"].items():
                    legend = legend.replace("{{" + label + "}}", value)
                lines[legend] = [[float(at) - begin, float(value)] for at, value in series["values"]]
    return found


# -- the picture -------------------------------------------------------------------------------------------------------

_COLOURS = tuple("#73bf69 #f2cc0c #5794f2 #ff9830 #b877d9 #f2495c #8ab8ff #fade2a #96d98d #ca95e5".split())
_BACK, _FRONT, _TEXT, _GRID = "#111217", "#181b1f", "#d0d1d6", "#2b2e34"
_SCALES = {
    "Bps": ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1, "B/s")),
    "bytes": ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")),
    "s": ((1, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "percentunit": ((0.01, "%"),),
    "reqps": ((1, "req/s"),),
    "ops": ((1, "/s"),),
    "short": ((1e3, "k"), (1, "")),
}


def draw(data: dict[str, Any], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 8, "text.color": _TEXT, "axes.labelcolor": _TEXT, "xtick.color": _TEXT,
                         "ytick.color": _TEXT, "font.family": "DejaVu Sans"})  # fmt: skip
    rows = _rows()
    heights = [height for height, _ in rows]
    figure = plt.figure(figsize=(15, 0.52 * sum(heights)), facecolor=_BACK)
    grid = figure.add_gridspec(
        sum(heights), 24, left=0.012, right=0.988, top=0.988, bottom=0.022, hspace=0.0, wspace=0.0
    )
    top = 0
    for height, panels in rows:
        if isinstance(panels, str):
            axis = figure.add_subplot(grid[top : top + height, :])
            axis.axis("off")
            axis.text(0.0, 0.3, f"▾ {panels}", fontsize=10.5, weight="bold", va="center")
        else:
            left = 0
            for panel in panels:
                width = 24 // len(panels)
                _panel(figure, grid[top : top + height, left : left + width], panel, data)
                left += width
        top += height
    figure.text(0.988, 0.007, "drawn from the dashboard's queries, answered by a real Prometheus; not Grafana itself",
                fontsize=7, ha="right", color="#8e9099")  # fmt: skip
    figure.savefig(file, dpi=110, facecolor=_BACK)
    plt.close(figure)


def _rows() -> list[tuple[int, Any]]:
    """[(height, title of a row, or panels beside each other)]."""
    out: list[tuple[int, Any]] = []
    panels = json.loads(DASHBOARD.read_text())["panels"]
    if missing := set(SHOWN) - {panel["title"] for panel in panels}:
        raise SystemExit(f"no such panels: {missing}; update SHOWN")
    for panel in panels:
        if panel["type"] == "row":
            out.append((1, panel["title"]))
        elif panel["title"] in SHOWN:
            high = 2 if panel["type"] == "stat" else 4
            fits = isinstance(out[-1][1], list) and out[-1][0] == high
            used = sum(each["gridPos"]["w"] for each in out[-1][1]) if fits else 24
            if used + panel["gridPos"]["w"] <= 24:
                out[-1][1].append(panel)
            else:
                out.append((high, [panel]))
    return [row for row, after in zip(out, [*out[1:], (1, "")], strict=True) if not (_is_row(row) and _is_row(after))]


def _is_row(row: tuple[int, Any]) -> bool:
    return isinstance(row[1], str)


def _panel(figure: Any, place: Any, panel: dict[str, Any], data: dict[str, Any]) -> None:
    frame = figure.add_subplot(place, facecolor=_FRONT)
    frame.set(xticks=[], yticks=[])
    for side in frame.spines.values():
        side.set(color=_BACK, linewidth=4)
    unit = panel["fieldConfig"]["defaults"]["unit"]
    lines = {
        legend: [(at, value) for at, value in points if math.isfinite(value)]
        for legend, points in data["panels"].get(panel["title"], {}).items()
    }
    lines = {legend: points for legend, points in lines.items() if any(value for _, value in points)} or dict(
        list(lines.items())[:1]
    )
    if panel["type"] == "stat":
        _stat(frame, panel, unit, next(iter(lines.values()), []))
        return
    frame.text(0.02, 0.955, panel["title"], fontsize=8.5, va="top", transform=frame.transAxes)
    axis = frame.inset_axes((0.085, 0.25, 0.895, 0.60), facecolor=_FRONT)
    highest = max((value for points in lines.values() for _, value in points), default=1.0)
    factor, word = _scale(unit, highest)
    stacked = panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] == "normal"
    _lines(axis, lines, factor, stacked)
    axis.set_xlim(0, data["to"] - data["from"])
    axis.set_ylim(bottom=0)
    axis.grid(color=_GRID, linewidth=0.6)
    axis.tick_params(length=0, labelsize=6.5)
    axis.xaxis.set_major_formatter(lambda seconds, _: f"{int(seconds) // 60}:{int(seconds) % 60:02d}")
    for side in axis.spines.values():
        side.set_visible(False)
    frame.text(0.982, 0.955, word, fontsize=6.5, va="top", ha="right", color="#8e9099", transform=frame.transAxes)
    if axis.get_legend_handles_labels()[1]:
        columns = min(6, max(1, len(lines)))
        frame.legend(*axis.get_legend_handles_labels(), loc="lower center", ncols=columns, fontsize=6, frameon=False,
                     bbox_to_anchor=(0.5, -0.01), handlelength=1, columnspacing=1)  # fmt: skip


def _lines(axis: Any, lines: dict[str, list[tuple[float, float]]], factor: float, stacked: bool) -> None:
    if stacked:
        times = sorted({at for points in lines.values() for at, _ in points})
        heights = [[dict(points).get(at, 0.0) / factor for at in times] for points in lines.values()]
        if times:
            axis.stackplot(times, heights, labels=list(lines), colors=_COLOURS, alpha=0.75, linewidth=0.4)
        return
    for colour, (legend, points) in zip(_COLOURS * 3, lines.items(), strict=False):
        times, values = [at for at, _ in points], [value / factor for _, value in points]
        axis.plot(times, values, label=legend.replace("__auto", ""), color=colour, linewidth=1.1)
        axis.fill_between(times, values, color=colour, alpha=0.08)


def _stat(frame: Any, panel: dict[str, Any], unit: str, points: list[tuple[float, float]]) -> None:
    frame.text(0.05, 0.86, panel["title"], fontsize=8.5, va="top", transform=frame.transAxes)
    if not points:
        return
    value = points[-1][1]
    factor, word = _scale(unit, abs(value))
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    colour = [step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]
    colour = {"blue": "#5794f2", "green": "#73bf69", "red": "#f2495c"}[colour]
    shown = f"{value / factor:.0f}" if unit in ("percentunit", "short") else f"{value / factor:.3g}"
    frame.text(0.5, 0.40, f"{shown}{' ' if word not in ('', '%') else ''}{word}", fontsize=19, weight="bold",
               color=colour, ha="center", va="center", transform=frame.transAxes)  # fmt: skip
    axis = frame.inset_axes((0.02, 0.04, 0.96, 0.22))
    axis.axis("off")
    axis.fill_between([at for at, _ in points], [each for _, each in points], color=colour, alpha=0.25)


def _scale(unit: str, highest: float) -> tuple[float, str]:
    scales = _SCALES[unit]
    return next(((factor, word) for factor, word in scales if highest >= factor), scales[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the dashboard from a real run.")
    parser.add_argument("--seconds", type=float, default=150.0, help="how long there is a load (default: 150)")
    parser.add_argument("--data", type=Path, help="keep what Prometheus answered here, or draw it from here")
    parser.add_argument("picture", type=Path, nargs="?", default=PICTURE)
    options = parser.parse_args()
    if options.data is not None and options.data.exists():
        data = json.loads(options.data.read_text())
    else:
        data = run(options.seconds)
        if options.data is not None:
            options.data.write_text(json.dumps(data))
    draw(data, options.picture)


if __name__ == "__main__":
    main()
