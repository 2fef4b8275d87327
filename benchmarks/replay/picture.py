"""A picture of a run: throughput over the p99 of the first token, and where prompts' tokens came from (matplotlib)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve.picture import NoMatplotlib

from . import hits

COLORS = {"gpu": "#1b7837", "memory": "#5aae61", "disk": "#a6dba0", "external": "#a6cee3", "computed": "#dddddd"}


def draw(data: Mapping[str, Any], path: Path) -> None:
    """Raises NoMatplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise NoMatplotlib("no picture: matplotlib is not installed") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    workloads = list(dict.fromkeys(row["workload"] for row in data["levels"]))
    if not workloads:
        return
    figure, axes = plt.subplots(len(workloads), 2, figsize=(11, 3.4 * len(workloads)), squeeze=False)
    variants = list(dict.fromkeys(row["variant"] for row in data["levels"]))
    for (left, right), workload in zip(axes, workloads, strict=True):
        rows = [row for row in data["levels"] if row["workload"] == workload and row["ttft_ms"]]
        for number, variant in enumerate(variants):
            own = sorted((row for row in rows if row["variant"] == variant), key=lambda row: row["offered"])
            times, rates = [row["ttft_ms"]["p99"] for row in own], [row["requests_per_s"] for row in own]
            left.plot(times, rates, marker="o", color=f"C{number}", label=variant)
        left.set(title=workload, xlabel="time to first token, p99, ms", ylabel="requests/s", xscale="log")
        left.set_ylim(bottom=0)
        left.grid(alpha=0.3)
        left.legend(fontsize=8)
        _shares(right, rows)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _shares(axis: Any, rows: list[dict]) -> None:
    ordered = sorted(rows, key=lambda row: row["offered"])
    left = [0.0] * len(ordered)
    for tier in hits.TIERS:
        shares = [row["hits"][tier] for row in ordered]
        if any(shares):
            axis.barh(range(len(ordered)), shares, left=left, color=COLORS[tier], label=tier)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.set_yticks(range(len(ordered)), [f"{row['variant']}, {row['offered']:g}" for row in ordered], fontsize=8)
    axis.invert_yaxis()
    axis.set(xlabel="share of prompt tokens", xlim=(0, 1))
    axis.legend(fontsize=8, loc="lower right")
