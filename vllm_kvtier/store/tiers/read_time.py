"""Estimates of the read times of a tier from measured reads."""

import math
from bisect import bisect_left

LATEST_WEIGHT = 0.3  # of the latest observation
MAX_LOG_ERROR = math.log(8.0)  # a larger error of one observation counts as this
MAX_LOG_FACTOR = 12.0  # bound of the estimate's factor on the guess, so that the arithmetic stays finite


class ReadTime:
    """Estimates a transfer as latency + bytes / bandwidth, behind the transfers in flight, and counts busy time.

    ``bandwidth`` (bytes/s), ``latency`` (s): initial guess. A transfer's own time begins when the previous one ends.
    The logarithm of (measured / expected) corrects latency and bandwidth by their shares of the expected time: small
    transfers adjust the latency, large ones the bandwidth.
    """

    def __init__(self, bandwidth: float, latency: float):
        self._guess = latency, 1 / bandwidth
        self._log_factors = [0.0, 0.0]  # on the guess
        self.under_way = 0  # transfers
        self.waiting_bytes = 0
        self._since = self._last = 0.0  # when it became busy, and when a transfer ended last
        self._busy = 0.0

    def begin(self, nbytes: int, now: float) -> float:
        """A transfer starts. Returns the argument ``begun`` of ``end``."""
        if not self.under_way:
            self._since = now
        self.under_way += 1
        self.waiting_bytes += nbytes
        return now

    def end(self, begun: float, nbytes: int, now: float, good: bool) -> None:
        """A transfer ended. A failed one does not change the estimate."""
        self.under_way -= 1
        self.waiting_bytes -= nbytes
        own = now - max(begun, self._last)
        self._last = now
        if not self.under_way:
            self._busy += now - self._since
        if not good or own <= 0:
            return
        latency, moving = self._parts(nbytes)
        error = LATEST_WEIGHT * _clamp(math.log(own / (latency + moving)), MAX_LOG_ERROR)
        for i, part in enumerate((latency, moving)):
            self._log_factors[i] = _clamp(self._log_factors[i] + error * part / (latency + moving), MAX_LOG_FACTOR)

    def seconds(self, nbytes: int) -> float:
        """Expected time from now until a transfer of ``nbytes`` would end."""
        return sum(self._parts(self.waiting_bytes + nbytes))

    def busy_seconds(self, now: float) -> float:
        """Total time with at least one transfer in flight."""
        return self._busy + (now - self._since if self.under_way else 0.0)

    def _parts(self, nbytes: int) -> tuple[float, float]:
        latency, bandwidth = (math.exp(factor) for factor in self._log_factors)
        return self._guess[0] * latency, nbytes * self._guess[1] * bandwidth


def _clamp(value: float, bound: float) -> float:
    return min(max(value, -bound), bound)


BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # seconds, inclusive

# For the work of a process between two messages.
FINE_BOUNDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1.0)


class Durations:
    """A histogram. ``counts[i]``: durations up to ``bounds[i]`` and above the bound before it; the last: above all.
    ``seconds``: their sum."""

    def __init__(self, counts: list[int] | None = None, seconds: float = 0.0, bounds: tuple[float, ...] = BOUNDS):
        self.counts = counts or [0] * (len(bounds) + 1)
        self.seconds, self.bounds = seconds, bounds

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.seconds += seconds

    def copy(self) -> "Durations":
        return Durations(list(self.counts), self.seconds, self.bounds)
