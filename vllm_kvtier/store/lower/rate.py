"""How long reads of a tier take, learned from those that were."""

import math

FOLLOW = 0.3  # of what an observation is off, that is believed
LIMIT = math.log(8.0)  # one observation counts as eight times off at most
FAR = 12.0  # e**12 times the guess, either way, is no device's pace: keeps the arithmetic finite


class Rate:
    """Seconds of a transfer = latency + bytes / bandwidth, behind what is under way; and how long it was busy.

    bandwidth (bytes/s), latency (s): what is believed at first. A transfer's own time is taken to begin when the one
    before it is over. How far it is off is blamed on latency and bandwidth by their shares of what was expected, so
    small transfers teach the one and large ones the other.
    """

    def __init__(self, bandwidth: float, latency: float):
        self._guess = latency, 1 / bandwidth
        self._off = [0.0, 0.0]  # logarithms of factors on the guess
        self.under_way = 0  # transfers
        self.waiting_bytes = 0
        self._since = self._last = 0.0  # when it became busy, and when a transfer was over last
        self._busy = 0.0

    def begin(self, nbytes: int, now: float) -> float:
        """A transfer starts; returns what ``end`` wants back."""
        if not self.under_way:
            self._since = now
        self.under_way += 1
        self.waiting_bytes += nbytes
        return now

    def end(self, begun: float, nbytes: int, now: float, good: bool) -> None:
        """It is over; one that went wrong teaches nothing."""
        self.under_way -= 1
        self.waiting_bytes -= nbytes
        own = now - max(begun, self._last)
        self._last = now
        if not self.under_way:
            self._busy += now - self._since
        if not good or own <= 0:
            return
        latency, moving = self._parts(nbytes)
        surprise = FOLLOW * min(max(math.log(own / (latency + moving)), -LIMIT), LIMIT)
        for i, part in enumerate((latency, moving)):
            self._off[i] = min(max(self._off[i] + surprise * part / (latency + moving), -FAR), FAR)

    def seconds(self, nbytes: int) -> float:
        """From now until a transfer of so much would be over."""
        return sum(self._parts(self.waiting_bytes + nbytes))

    def busy_seconds(self, now: float) -> float:
        """With at least one transfer under way, so far."""
        return self._busy + (now - self._since if self.under_way else 0.0)

    def _parts(self, nbytes: int) -> tuple[float, float]:
        return self._guess[0] * math.exp(self._off[0]), nbytes * self._guess[1] * math.exp(self._off[1])
