"""The README's plot from the JSON of a run (needs matplotlib)."""

import json
from pathlib import Path

DIRECTIONS = {"store": "out of the GPU", "load": "into the GPU", "both": "both at once"}


def draw(source: Path, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    data = json.loads(source.read_text())
    rows = [r for r in data["rows"] if r["way"] == "tuned"]
    names = list(dict.fromkeys(r["codec"] for r in sorted(rows, key=lambda r: -r["bits"])))
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), sharey=False)
    for axis, (direction, title) in zip(axes, DIRECTIONS.items(), strict=True):
        for s, shape in enumerate(shapes):
            values = [
                next((r["GB/s"] for r in rows if (r["codec"], r["shape"], r["direction"]) == (n, shape, direction)), 0)
                for n in names
            ]
            at = [i + 0.38 * (s - (len(shapes) - 1) / 2) for i in range(len(names))]
            bars = axis.bar(at, values, 0.36, label=f"{shape} shapes", color=("#1b7837", "#998ec3", "#f1a340")[s])
            for bar, value in zip(bars, values, strict=True):
                ratio = value / data["memcpy"][direction]
                axis.text(bar.get_x() + 0.18, value, f"{ratio:.2f}", ha="center", va="bottom", fontsize=7)
        axis.axhline(data["memcpy"][direction], color="black", linewidth=1, label="pinned memcpy of raw KV")
        axis.set(title=title)
        axis.margins(y=0.12)
        axis.set_xticks(range(len(names)), names)
        axis.grid(alpha=0.3, axis="y")
    axes[0].set_ylabel("GB/s of KV as the model sees it")
    axes[0].legend(fontsize=8, loc="upper left")
    words = f"KV blocks in random slots, encoded and checked; numbers: times memcpy; {data['device']}"
    figure.suptitle(words, fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=130)
