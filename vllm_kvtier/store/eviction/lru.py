"""Least recently used."""

from collections import OrderedDict
from collections.abc import Iterable

from vllm_kvtier.store.eviction.base import Policy
from vllm_kvtier.store.index.block_entry import BlockEntry


class Lru(Policy):
    """One queue; a used block moves to its end. A long prompt that does not return evicts all other blocks."""

    def __init__(self) -> None:
        self._queue: OrderedDict[BlockEntry, None] = OrderedDict()

    def add(self, entry: BlockEntry) -> None:
        self._queue[entry] = None

    def touch(self, entries: Iterable[BlockEntry]) -> None:
        move = self._queue.move_to_end
        for entry in entries:
            move(entry)

    def remove(self, entry: BlockEntry, evicted: bool) -> None:
        del self._queue[entry]

    def coldest(self) -> BlockEntry | None:
        return next(iter(self._queue), None)

    def defer(self, entries: Iterable[BlockEntry]) -> None:
        self.touch(entries)

    def __len__(self) -> int:
        return len(self._queue)
