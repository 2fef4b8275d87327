"""Records as a picture (needs matplotlib).

python -m vllm_kvtier.quality.plot RECORD.json ... PICTURE.png
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.quality.record import Record

MARKERS = "os^D"
COLORS = ("#1b7837", "#762a83", "#2166ac", "#b35806")


def plot(records: Sequence[Record], file: Path) -> None:
    """Price against size, one colour a model: perplexity with its error, and divergence.

    Raises KVTierError where matplotlib is missing or the file cannot be written.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise KVTierError("a plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    for record, color, marker in zip(records, COLORS, MARKERS, strict=False):
        rows = sorted(record.codecs, key=lambda codec: codec.bits)
        bits = [codec.bits for codec in rows]
        left.errorbar(
            bits,
            [100 * codec.perplexity for codec in rows],
            [100 * codec.perplexity_error for codec in rows],
            fmt=marker, color=color, capsize=3, label=Path(record.model).name,
        )  # fmt: skip
        right.plot(bits, [codec.divergence for codec in rows], marker, color=color, label=Path(record.model).name)
        for codec in rows:
            name = dict(textcoords="offset points", xytext=(6, 4), fontsize=8, color=color)
            left.annotate(codec.name, (codec.bits, 100 * codec.perplexity), **name)
            right.annotate(codec.name, (codec.bits, codec.divergence), **name)
    left.axhline(0, color="#bbbbbb", lw=0.8)
    left.set(xlabel="bits a number of the cache (raw: 16)", ylabel="perplexity, change in %")
    right.set(xlabel="bits a number of the cache (raw: 16)", ylabel="KL divergence, nats a token", yscale="log")
    for axis in (left, right):
        axis.margins(x=0.15, y=0.12)
        axis.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(file, dpi=130)
    except (OSError, ValueError) as error:
        raise KVTierError(f"the plot cannot be written to {file}: {error}") from error
    finally:
        plt.close(figure)


if __name__ == "__main__":
    *given, picture = map(Path, sys.argv[1:])
    plot([msgspec.json.decode(file.read_bytes(), type=Record) for file in given], picture)
