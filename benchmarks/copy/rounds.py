"""Ways to copy, measured in turn."""

import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Protocol

DIRECTIONS = ("store", "load", "both")


class Way(Protocol):
    nbytes: int  # of one direction

    def run(self, direction: str) -> float:
        """Seconds that one measurement took."""


def rates(
    ways: Mapping[str, Way], repeats: int, deadline: float, failed: Callable[[str, str, Exception], None]
) -> dict[tuple[str, str], float]:
    """GB/s of each (way, direction), medians of repetitions interleaved by way; a first one warms up. After
    ``deadline`` (time.monotonic) nothing is repeated. ``failed`` hears of a way that cannot, which then is left out."""
    times: dict[tuple[str, str], list[float]] = {}
    dead = set()
    for repetition in range(repeats + 1):
        for direction in DIRECTIONS:
            for name, way in ways.items():
                if name in dead or (repetition > 1 and time.monotonic() > deadline):
                    continue
                try:
                    seconds = way.run(direction)
                except Exception as error:
                    dead.add(name)
                    failed(name, direction, error)
                    traceback.print_exc()
                    continue
                if repetition:
                    times.setdefault((name, direction), []).append(seconds)
    return {
        (name, direction): ways[name].nbytes * (2 if direction == "both" else 1) / statistics.median(values) / 1e9
        for (name, direction), values in times.items()
    }
