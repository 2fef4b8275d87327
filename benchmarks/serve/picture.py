"""Pictures of a run: how TTFT is distributed, how it goes from turn to turn, and what the probe found (matplotlib)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .load import Record

STYLES = {"cold": "--", "warm": "-"}
KIND_COLORS = {"computed": "#bbbbbb", "same rank": "#222222", "cross rank": "#1b7837", "host": "#5aae61"}


class NoMatplotlib(RuntimeError):
    """It is not installed."""


def distribution(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Milliseconds to the first token in rising order, and the share of requests that took no longer."""
    times = sorted(record.ttft * 1000 for record in records if record.ttft is not None)
    return times, [(number + 1) / len(times) for number in range(len(times))]


def draw(data: Mapping[str, Any], records: Mapping[tuple[str, str], Sequence[Record]], path: Path) -> None:
    """``records``: by variant and pass. Raises NoMatplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise NoMatplotlib("no picture: matplotlib is not installed") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [
        *((_distributions, _turns) if data["variants"] and any(records.values()) else ()),
        *((_probe,) if data["probe"] else ()),
    ]
    if not panels:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 3.6), squeeze=False)
    names = list(dict.fromkeys(row["variant"] for row in (*data["variants"], *data["probe"])))
    colors = {name: f"C{number}" for number, name in enumerate(names)}
    for panel, axis in zip(panels, axes[0], strict=True):
        panel(axis, data, records, colors)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _distributions(axis: Any, data: Mapping, records: Mapping, colors: Mapping[str, str]) -> None:
    for (variant, name), some in records.items():
        times, shares = distribution(some)
        if times:
            style, label = STYLES.get(name, ":"), f"{variant}, {name}"
            axis.step(times, shares, style, where="post", color=colors[variant], label=label)
    axis.set(xlabel="time to first token, ms", ylabel="share of requests", ylim=(0, 1.01), xscale="log")
    _plain_numbers(axis.xaxis)
    axis.legend(fontsize=8, loc="lower right")


def _turns(axis: Any, data: Mapping, records: Mapping, colors: Mapping[str, str]) -> None:
    for row in data["variants"]:
        turns = [turn for turn in row["turns"] if turn["ttft_ms"]]
        places, middle = [t["turn"] + 1 for t in turns], [t["ttft_ms"]["p50"] for t in turns]
        style = STYLES.get(row["pass"], ":")
        label = f"{row['variant']}, {row['pass']}"
        axis.plot(places, middle, style, marker=".", color=colors[row["variant"]], label=label)
    axis.set(xlabel="turn", ylabel="median time to first token, ms", ylim=(0, None))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize=8)


def _probe(axis: Any, data: Mapping, records: Mapping, colors: Mapping[str, str]) -> None:
    rows = data["probe"]
    groups = list(dict.fromkeys((row["variant"], row["tokens"]) for row in rows))
    several = len({variant for variant, _ in groups}) > 1
    kinds = [kind for kind in KIND_COLORS if any(row["kind"] == kind for row in rows)]
    width = 0.8 / len(kinds)
    for number, kind in enumerate(kinds):
        found = {(row["variant"], row["tokens"]): row["median_ms"] for row in rows if row["kind"] == kind}
        aside = (number - (len(kinds) - 1) / 2) * width
        places = [place + aside for place, group in enumerate(groups) if group in found]
        axis.bar(places, [found[g] for g in groups if g in found], width, color=KIND_COLORS[kind], label=kind)
    labels = [f"{tokens:,}" + (f"\n{variant}" if several else "") for variant, tokens in groups]
    axis.set_xticks(range(len(groups)), labels, fontsize=8)
    axis.set(xlabel="prompt tokens", ylabel="time to first token, ms, one at a time", yscale="log")
    axis.set_ylim(bottom=0.7 * min(row["median_ms"] for row in rows))
    _plain_numbers(axis.yaxis)
    axis.legend(fontsize=8)


def _plain_numbers(axis: Any) -> None:
    """Of a logarithmic axis: 1, 2, 5, 10, ... written out, and nothing in between."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())
