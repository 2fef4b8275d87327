"""Aging weighted by uses: a variation of LRU for conversations and shared prefixes."""

from collections import OrderedDict
from collections.abc import Iterable

from vllm_kvtier.store.eviction.base import Policy
from vllm_kvtier.store.index.block_entry import BlockEntry, Key

USE_CLASSES = 4  # more uses count as this many, so that a once popular prefix can be evicted
GHOSTS_PER_BLOCK = 1.0  # evicted keys remembered per block held


class Aging(Policy):
    """A block used n times ages n times slower. The block with the largest weighted age is evicted.

    There is one LRU queue per number of uses (1, 2, 3, USE_CLASSES or more), so only the queues' heads are compared by
    ``age / uses``. Age counts blocks stored since the last use; it stands still while nothing is stored. Uses are
    remembered for as many evicted keys as blocks are held: if a conversation's next turn comes too late, its history is
    stored again with its number of uses.

    Compared with LRU: a long prompt that does not return is in the first queue and is evicted first; a system prompt or
    a conversation on its third turn stays three times as long. Compared with ARC and S3-FIFO: one use does not decide a
    block's class for good, and there is no memory share to tune.
    """

    def __init__(self) -> None:
        self._queues: list[OrderedDict[BlockEntry, None]] = [OrderedDict() for _ in range(USE_CLASSES)]
        self._ghosts: OrderedDict[Key, int] = OrderedDict()  # key -> uses
        self._held = 0
        self._now = 0  # blocks stored so far; entry.stamp: its value at the last use; entry.mark: uses - 1

    def add(self, entry: BlockEntry) -> None:
        self._now += 1
        self._held += 1
        entry.mark = min(self._ghosts.pop(entry.key, -1) + 1, USE_CLASSES - 1)
        entry.stamp = self._now
        self._queues[entry.mark][entry] = None

    def touch(self, entries: Iterable[BlockEntry]) -> None:
        queues, now, top = self._queues, self._now, USE_CLASSES - 1
        last = queues[top]
        for entry in entries:
            entry.stamp = now
            mark = entry.mark
            if mark == top:
                last.move_to_end(entry)
            else:
                del queues[mark][entry]
                entry.mark = mark = mark + 1
                queues[mark][entry] = None

    def remove(self, entry: BlockEntry, evicted: bool) -> None:
        del self._queues[entry.mark][entry]
        self._held -= 1
        if evicted:
            self._ghosts[entry.key] = entry.mark
            while len(self._ghosts) > GHOSTS_PER_BLOCK * self._held + 1:
                self._ghosts.popitem(last=False)

    def coldest(self) -> BlockEntry | None:
        after, oldest, found = self._now + 1, -1.0, None
        for queue in self._queues:
            for entry in queue:  # its head
                age = (after - entry.stamp) / (entry.mark + 1)
                if age > oldest:
                    oldest, found = age, entry
                break
        return found

    def defer(self, entries: Iterable[BlockEntry]) -> None:
        self._now += 1  # otherwise the same block could be named again for ever
        for entry in entries:
            entry.stamp = self._now + 1
            self._queues[entry.mark].move_to_end(entry)

    def __len__(self) -> int:
        return self._held
