"""How long requests took, as a histogram that Prometheus can add up over stores."""

from bisect import bisect_left

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # seconds, inclusive


# Of what a process does between two messages.
FINE = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1.0)


class Durations:
    """``counts[i]``: of those up to ``bounds[i]`` and above the bound before it; the last: longer than all.
    ``seconds``: their sum."""

    def __init__(self, counts: list[int] | None = None, seconds: float = 0.0, bounds: tuple[float, ...] = BOUNDS):
        self.counts = counts or [0] * (len(bounds) + 1)
        self.seconds, self.bounds = seconds, bounds

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.seconds += seconds

    def copy(self) -> "Durations":
        return Durations(list(self.counts), self.seconds, self.bounds)
