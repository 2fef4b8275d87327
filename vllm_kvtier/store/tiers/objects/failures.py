"""Tells a failed request from a failed object store.

A store that serves many clients answers a few requests with an error, and limits their rate: such a request finds or
moves nothing, and others go on. Only several failures of one kind of request (find, read, write) in a row, without an
answer between them, mean that the store has failed.

While the store limits the rate, no lookup begins and writes wait, for a pause that doubles until an answer comes. The
requests that fail in one pause count as one failure.
"""

import random
import time
from collections import Counter
from collections.abc import Callable

from vllm_kvtier.store.tiers.request_pool import Kind, Trouble

# So many are in a lookup's first round: one lookup finds out that the store is gone. A store that only limits the rate
# has some 10 s of pauses.
MAX_IN_A_ROW = {Kind.PASSING: 4, Kind.THROTTLED: 8}
PAUSES = 0.1, 4.0  # seconds, first and longest; with jitter, so that nodes do not go on at the same time


class FailureCounts:
    """``jitter()``: a random factor of a pause."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = lambda: random.uniform(0.5, 1.0),
    ):
        self._clock, self._jitter = clock, jitter
        self._in_a_row = Counter[str]()  # by kind of request
        self._pause, self._until = PAUSES[0], 0.0

    def ended(self, what: str, result: object) -> None:
        """A request of kind ``what`` has ended with this result, or with a Trouble."""
        kind = result.kind if isinstance(result, Trouble) else None
        paused = bool(self.pause_left)
        if kind not in MAX_IN_A_ROW:
            self._in_a_row[what] = 0
            if not paused:
                self._pause = PAUSES[0]
        elif kind is Kind.PASSING or not paused:
            self._in_a_row[what] += 1
        if kind is Kind.THROTTLED and not paused:
            self._until = self._clock() + self._pause * self._jitter()
            self._pause = min(2 * self._pause, PAUSES[1])

    def excuses(self, what: str, trouble: Trouble) -> bool:
        """Whether the store may work in spite of this failure."""
        return self._in_a_row[what] < MAX_IN_A_ROW.get(trouble.kind, 0)

    @property
    def pause_left(self) -> float:
        """Seconds for which lookups and writes should not begin."""
        return max(0.0, self._until - self._clock())
