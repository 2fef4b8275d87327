"""A figure and the limit beside it."""

import statistics
import time
from collections.abc import Callable

import msgspec

GB = 1e9
ROUNDS = 3


class Row(msgspec.Struct, frozen=True):
    """``bytes_per_second``: median of rounds, in bytes of KV before encoding. ``limit``: the machine's rate for the
    same bytes, with its name; 0 if unknown."""

    bench: str
    name: str
    bytes_per_second: float
    limit: float = 0.0
    limit_is: str = ""
    remark: str = ""

    @property
    def share(self) -> float | None:
        return self.bytes_per_second / self.limit if self.limit else None


def rates(ways: dict[str, Callable[[float], tuple[int, float]]], seconds: float) -> dict[str, float]:
    """Median bytes/s of each way over ROUNDS alternating rounds, ``seconds`` in all.

    A way moves for about the given seconds, and returns (bytes, seconds).
    """
    share = seconds / (ROUNDS * len(ways))
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            nbytes, took = way(share)
            seen[name].append(nbytes / took)
    return {name: statistics.median(found) for name, found in seen.items()}


def repeat(once: Callable[[], int], seconds: float) -> tuple[int, float]:
    """``once`` moves something and returns its bytes; again and again, at least once."""
    nbytes, begun = 0, time.perf_counter()
    while True:
        nbytes += once()
        took = time.perf_counter() - begun
        if took >= seconds:
            return nbytes, took
