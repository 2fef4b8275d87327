"""Rows as a picture: a bar a figure, a mark where the machine's limit is (needs matplotlib)."""

from collections.abc import Sequence
from pathlib import Path

from vllm_kvtier.bench.row import GB, Row
from vllm_kvtier.errors import KVTierError

_COLORS = {"copy": "#1b7837", "codec": "#762a83", "disk": "#2166ac", "pull": "#b35806"}


def draw(rows: Sequence[Row], file: Path, title: str = "") -> None:
    """Raises KVTierError where matplotlib is missing or the file cannot be written."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise KVTierError("a plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 0.6 + 0.32 * len(rows)))
    for place, row in enumerate(rows):
        axis.barh(place, row.bytes_per_second / GB, color=_COLORS.get(row.bench, "#777777"), height=0.7)
        if row.limit:
            axis.plot([row.limit / GB] * 2, [place - 0.45, place + 0.45], color="black", lw=2)
        axis.annotate(f"{row.bytes_per_second / GB:.2f}", (row.bytes_per_second / GB, place), fontsize=8, va="center")
    axis.set_yticks(range(len(rows)), [f"{row.bench}: {row.name}" for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set(xscale="log", xlabel="GB/s of KV; black: the machine's limit", title=title)
    axis.title.set_size(9)
    axis.grid(alpha=0.3, axis="x")
    figure.tight_layout()
    try:
        figure.savefig(file, dpi=130)
    except (OSError, ValueError) as error:
        raise KVTierError(f"the plot cannot be written to {file}: {error}") from error
    finally:
        plt.close(figure)
