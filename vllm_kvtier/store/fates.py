"""What became of blocks that the store no longer has: a bounded memory of their ends, for whoever asks why one is gone.

A ring of (64-bit name, time, fate), written in the order in which blocks end, and beside it where in the ring a name
was written last. The oldest end is forgotten when the ring is full. A name is the hash of (space, group, block hash):
two that clash would cost a wrong sentence, and nothing is loaded by it.

It takes what it needs, up to ``MOST``: then some 50 MB. An end costs about a microsecond.
"""

import enum
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_kvtier.store.entries import Entry

MOST = 1 << 18  # ends remembered

BlockName = tuple[bytes, int, bytes]  # space, group, hash


class Fate(enum.IntEnum):
    """How a block's last life here ended. The numbers are part of the protocol."""

    EVICTED = 1  # for room, and nothing below memory had it
    BELOW = 2  # for room, and a tier below memory had it then
    WAITED = 3  # for room, before its turn came to be written below
    CLEARED = 4  # by a person
    DISCARDED = 5  # its checksum was wrong
    ABORTED = 6  # its writer gave up, or took too long, before it was whole
    DIED = 7  # its writer went away before it was whole
    NO_ROOM = 8  # it was not taken: all memory was in use, pinned or being written
    UNREAD = 9  # it was to come up from below, and could not be read


class Fates:
    """Single-threaded; no I/O. ``judge``: of a block that is evicted, which of EVICTED, BELOW and WAITED it is."""

    def __init__(self, clock: Callable[[], float], most: int = MOST):
        self._clock, self._most = clock, most
        self._began = clock()
        self._names, self._when, self._fates = array("q"), array("d"), array("B")  # the ring
        self._next = 0  # place in it
        self._last: dict[int, int] = {}  # name -> its place
        self._forgot: float | None = None  # the time of the last end that was forgotten
        self.judge: Callable[[Entry], Fate] = lambda entry: Fate.EVICTED

    def __len__(self) -> int:
        return len(self._last)

    def record(self, name: BlockName, fate: Fate) -> None:
        """The block's life ended now. What it was told to have come to before is no longer of interest."""
        key, at = hash(name), self._next
        if at < len(self._names):
            old = self._names[at]
            if self._last.get(old) == at:
                del self._last[old]
                self._forgot = self._when[at]
            self._names[at], self._when[at], self._fates[at] = key, self._clock(), fate
        else:
            self._names.append(key)
            self._when.append(self._clock())
            self._fates.append(fate)
        self._last[key] = at
        self._next = at + 1 if at + 1 < self._most else 0

    def evicted(self, entry: "Entry") -> None:
        self.record((entry.space.name, entry.group, entry.hash), self.judge(entry))

    def find(self, name: BlockName) -> tuple[Fate, float] | None:
        """(how its last life ended, seconds ago); None: none that is remembered (``ages``)."""
        at = self._last.get(hash(name))
        return None if at is None else (Fate(self._fates[at]), self._clock() - self._when[at])

    def ages(self) -> tuple[float, float]:
        """(of the last so many seconds every end is remembered, seconds since the start): equal until one was
        forgotten."""
        now = self._clock()
        return now - (self._began if self._forgot is None else self._forgot), now - self._began
