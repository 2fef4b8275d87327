"""A bounded history of why blocks were removed, for the explain query.

A ring of (64-bit name, time, reason) in order of removal, and an index from a name to its last position in the ring. A
full ring overwrites the oldest record. A name is the hash of (namespace, group, block hash); a collision gives a wrong
explanation and has no other effect.

It grows up to ``MAX_RECORDS``, some 50 MB. A record takes about a microsecond.
"""

import enum
from array import array
from collections.abc import Callable

from vllm_kvtier.store.index.block_entry import BlockEntry, BlockName

MAX_RECORDS = 1 << 18


class RemovalReason(enum.IntEnum):
    """Why a block was removed last. The numbers are part of the protocol, the names of ``kvtier inspect --json``."""

    EVICTED = 1  # to make room; no secondary tier had it
    BELOW = 2  # to make room; a secondary tier had it
    WAITED = 3  # to make room, while it was queued for demotion
    CLEARED = 4  # by an operator
    DISCARDED = 5  # wrong checksum
    ABORTED = 6  # its writer aborted or exceeded its time before the block was complete
    DIED = 7  # its writer disconnected before the block was complete
    NO_ROOM = 8  # no slot: all memory was in use, pinned or being written
    UNREAD = 9  # its promotion failed
    NO_STATE = 10  # not removed: vLLM kept no recurrent state there. Engines set this one, not the store


class RemovalHistory:
    """Single-threaded; no I/O. ``eviction_reason``: EVICTED, BELOW or WAITED, for a block that is being evicted."""

    def __init__(self, clock: Callable[[], float], max_records: int = MAX_RECORDS):
        self._clock, self._max_records = clock, max_records
        self._began = clock()
        self._names, self._when, self._reasons = array("q"), array("d"), array("B")  # the ring
        self._next = 0  # position in it
        self._last: dict[int, int] = {}  # name -> its last position
        self._overwritten_at: float | None = None  # time of the last record that was overwritten
        self.eviction_reason: Callable[[BlockEntry], RemovalReason] = lambda entry: RemovalReason.EVICTED

    def __len__(self) -> int:
        return len(self._last)

    def record(self, name: BlockName, removal_reason: RemovalReason) -> None:
        """Record that the block is removed now."""
        key, at = hash(name), self._next
        if at < len(self._names):
            old = self._names[at]
            if self._last.get(old) == at:
                del self._last[old]
                self._overwritten_at = self._when[at]
            self._names[at], self._when[at], self._reasons[at] = key, self._clock(), removal_reason
        else:
            self._names.append(key)
            self._when.append(self._clock())
            self._reasons.append(removal_reason)
        self._last[key] = at
        self._next = at + 1 if at + 1 < self._max_records else 0

    def evicted(self, entry: BlockEntry) -> None:
        self.record(entry.name, self.eviction_reason(entry))

    def find(self, name: BlockName) -> tuple[RemovalReason, float] | None:
        """(reason of the last removal, seconds ago); None: not recorded (see ``ages``)."""
        at = self._last.get(hash(name))
        return None if at is None else (RemovalReason(self._reasons[at]), self._clock() - self._when[at])

    def ages(self) -> tuple[float, float]:
        """(seconds for which all removals are recorded, seconds since the start): equal until one was overwritten."""
        now = self._clock()
        return now - (self._began if self._overwritten_at is None else self._overwritten_at), now - self._began
