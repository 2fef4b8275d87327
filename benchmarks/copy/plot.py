"""The README's plot from the JSON of a run (needs matplotlib)."""

import json
from pathlib import Path

from peers import DIRECTIONS

KIB, MIB = 1 << 10, 1 << 20


def plot(source: Path, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    data = json.loads(source.read_text())
    rows = [r for r in data["rows"] if r["layers"] <= 36]
    shown = {
        "kvtier": ("vllm-kvtier, checksum on", "#1b7837", "o-"),
        "swap_blocks_batch": ("vLLM swap_blocks_batch", "#998ec3", "s--"),
        "triton": ("vLLM's Triton kernel", "#f1a340", "^--"),
    }
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6))
    titles = {"store": "out of the GPU", "load": "into the GPU", "both": "both at once"}
    for axis, direction in zip(axes, DIRECTIONS, strict=True):
        axis.axhline(data["memcpy"][direction], color="black", linewidth=1, label="pinned memcpy")
        for way, (label, color, style) in shown.items():
            points = sorted((r["page"], r["GB/s"]) for r in rows if (r["way"], r["direction"]) == (way, direction))
            if points:
                axis.plot(*zip(*points, strict=True), style, color=color, label=label)
        axis.set(xscale="log", title=titles[direction], xlabel="page of one layer", ylim=(0, None))
        ticks = sorted({r["page"] for r in rows})
        axis.set_xticks(ticks, [f"{t // KIB}K" if t < MIB else f"{t // MIB}M" for t in ticks])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("GB/s")
    axes[-1].legend(fontsize=8)
    figure.suptitle(f"KV blocks in random slots, {data['device']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=130)
