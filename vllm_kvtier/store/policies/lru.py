"""Least recently used."""

from collections import OrderedDict
from collections.abc import Iterable

from vllm_kvtier.store.entries import Entry
from vllm_kvtier.store.policies.base import Policy


class Lru(Policy):
    """One queue; a use moves to its end. A long prompt that never returns pushes everything else out."""

    def __init__(self):
        self._queue: OrderedDict[Entry, None] = OrderedDict()

    def add(self, entry: Entry) -> None:
        self._queue[entry] = None

    def touch(self, entries: Iterable[Entry]) -> None:
        move = self._queue.move_to_end
        for entry in entries:
            move(entry)

    def remove(self, entry: Entry, evicted: bool) -> None:
        del self._queue[entry]

    def coldest(self) -> Entry | None:
        return next(iter(self._queue), None)

    def defer(self, entries: Iterable[Entry]) -> None:
        self.touch(entries)

    def __len__(self) -> int:
        return len(self._queue)
