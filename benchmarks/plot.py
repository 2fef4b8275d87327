"""The README's plots from the JSON that the benchmarks write (needs matplotlib).

    python benchmarks/plot.py benchmarks/results docs
"""

import json
import sys
from pathlib import Path

import matplotlib
import matplotlib.ticker

matplotlib.use("Agg")
import matplotlib.pyplot as plt

NAMES = {"kvtier": "vllm-kvtier", "nixl": "NixlConnector"}
COLORS = {"kvtier": "#1b7837", "nixl": "#998ec3", "computed": "#bbbbbb"}


def first_token(results: Path, out: Path) -> None:
    """TTFT on the decode engine by prompt length: pulled by each connector, and computed."""
    files = {"vLLM 0.33.0": results / "pd_vllm033.json", "vLLM 0.25.1": results / "pd_vllm0251.json"}
    figure, axes = plt.subplots(1, len(files), figsize=(5 * len(files), 3.4), squeeze=False, sharey=True)
    for axis, (title, file) in zip(axes[0], files.items(), strict=True):
        rows = json.loads(file.read_text())
        lengths = sorted({row["tokens"] for row in rows})
        for connector in ("nixl", "kvtier"):
            values = [r["pulled"] for n in lengths for r in rows if (r["connector"], r["tokens"]) == (connector, n)]
            axis.plot(lengths, values, "o-", label=f"pulled, {NAMES[connector]}", color=COLORS[connector])
        kvtier = {r["tokens"]: r for r in rows if r["connector"] == "kvtier"}
        axis.plot(lengths, [kvtier[n]["computed"] for n in lengths], "s--", label="computed", color=COLORS["computed"])
        axis.plot(lengths, [kvtier[n]["hit"] for n in lengths], "^:", label="local prefix hit", color="black")
        axis.set(xscale="log", yscale="log", xlabel="prompt tokens", title=title)
        axis.set_xticks(lengths, [f"{n // 1024}k" for n in lengths])
        axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        axis.grid(alpha=0.3, which="both")
    axes[0][0].set_ylabel("time to first token on the decode engine, ms")
    axes[0][-1].legend(fontsize=8)
    figure.suptitle("P/D over NVLink, two H200s, Qwen3-8B shapes, eager", fontsize=10)
    figure.tight_layout()
    figure.savefig(out / "first_token.png", dpi=130)


def multiturn(results: Path, out: Path) -> None:
    """Percentiles of TTFT of later turns, pulls from the decode engine off and on."""
    off, on = json.loads((results / "multiturn.json").read_text())
    names = list(off["ttft_ms"])
    figure, axis = plt.subplots(figsize=(5, 3))
    places = range(len(names))
    axis.bar([p - 0.2 for p in places], [off["ttft_ms"][n] for n in names], 0.4, label="off", color="#bbbbbb")
    axis.bar([p + 0.2 for p in places], [on["ttft_ms"][n] for n in names], 0.4, label="on", color=COLORS["kvtier"])
    axis.set_xticks(list(places), names)
    axis.set(ylabel="time to first token, ms", title="Multi-turn with P/D, bidirectional pulls")
    axis.legend()
    axis.grid(alpha=0.3, axis="y")
    figure.tight_layout()
    figure.savefig(out / "multiturn.png", dpi=130)


def data_parallel(results: Path, out: Path) -> None:
    """Percentiles of TTFT under load, and its mean from turn to turn: four ranks without a connector, and with ours."""
    rows = json.loads((results / "serve_dp4_2xh200.json").read_text())["variants"]
    names = {"off": "no connector", "on": "vllm-kvtier"}
    colors = {"off": "#bbbbbb", "on": COLORS["kvtier"]}
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4))
    shares = ("p50", "mean", "p90", "p99")
    for row in rows:
        warm = row["pass"] == "warm"
        label = f"{names[row['variant']]}, {row['pass']}"
        aside = (0.2 if warm else -0.2) + (0.1 if row["variant"] == "on" else -0.1)
        heights = [row["ttft_ms"][share] for share in shares]
        places = [place + aside for place in range(len(shares))]
        style = dict(color=colors[row["variant"]], hatch="" if warm else "//", edgecolor="white")
        left.bar(places, heights, 0.2, label=label, **style)
        means = [turn["ttft_ms"]["mean"] for turn in row["turns"]]
        right.plot(range(1, len(means) + 1), means, "-" if warm else "--", color=colors[row["variant"]], label=label)
    left.set_xticks(range(len(shares)), shares)
    left.set(ylabel="time to first token, ms", yscale="log", ylim=(30, None))
    left.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    left.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    right.set(xlabel="turn", ylabel="mean time to first token, ms", ylim=(0, None))
    right.xaxis.get_major_locator().set_params(integer=True)
    for axis in (left, right):
        axis.grid(alpha=0.3, axis="y")
        axis.legend(fontsize=8)
    figure.suptitle("Four ranks on two H200s, each turn at a random rank, Qwen3-8B shapes, vLLM 0.33.0", fontsize=10)
    figure.tight_layout()
    figure.savefig(out / "data_parallel.png", dpi=130)


if __name__ == "__main__":
    first_token(Path(sys.argv[1]), Path(sys.argv[2]))
    data_parallel(Path(sys.argv[1]), Path(sys.argv[2]))
    multiturn(Path(sys.argv[1]), Path(sys.argv[2]))
