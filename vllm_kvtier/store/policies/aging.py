"""Age by uses: our own small variation, made for conversations and shared prefixes."""

from collections import OrderedDict
from collections.abc import Iterable

from vllm_kvtier.store.entries import Entry
from vllm_kvtier.store.policies.base import Policy

CLASSES = 4  # more uses than this give no longer life: a prefix that everybody had must be able to die
GHOSTS = 1.0  # keys remembered for each block held


class Aging(Policy):
    """A block used n times grows old n times slower; the oldest, so weighted, goes.

    One LRU queue for each number of uses (1, 2, 3, CLASSES or more), so only the queues' heads compete:
    ``age / uses``, where age counts blocks stored since the last use (the cache's own time: it stands still when
    nothing is stored). Uses are remembered for as many evicted keys as blocks are held: the turn of a conversation
    that comes just too late stores its history anew, and finds it worth more the next time.

    Against LRU: a long prompt that never returns is in the first queue and leaves first, while a system prompt or a
    conversation on its third turn stays three times as long. Against ARC and S3-FIFO: nothing is decided by one
    use for good, and there is no share of the memory to tune.
    """

    def __init__(self):
        self._queues: list[OrderedDict[Entry, None]] = [OrderedDict() for _ in range(CLASSES)]
        self._ghosts: OrderedDict[tuple, int] = OrderedDict()  # key -> uses
        self._held = 0
        self._now = 0  # blocks stored so far; entry.stamp: its value at the last use; entry.mark: uses - 1

    def add(self, entry: Entry) -> None:
        self._now += 1
        self._held += 1
        entry.mark = min(self._ghosts.pop(entry.key, -1) + 1, CLASSES - 1)
        entry.stamp = self._now
        self._queues[entry.mark][entry] = None

    def touch(self, entries: Iterable[Entry]) -> None:
        queues, now, top = self._queues, self._now, CLASSES - 1
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

    def remove(self, entry: Entry, evicted: bool) -> None:
        del self._queues[entry.mark][entry]
        self._held -= 1
        if evicted:
            self._ghosts[entry.key] = entry.mark
            while len(self._ghosts) > GHOSTS * self._held + 1:
                self._ghosts.popitem(last=False)

    def coldest(self) -> Entry | None:
        after, oldest, found = self._now + 1, -1.0, None
        for queue in self._queues:
            for entry in queue:  # its head
                age = (after - entry.stamp) / (entry.mark + 1)
                if age > oldest:
                    oldest, found = age, entry
                break
        return found

    def defer(self, entries: Iterable[Entry]) -> None:
        self._now += 1  # or, of blocks with different uses, one in use would be named for ever
        for entry in entries:
            entry.stamp = self._now + 1
            self._queues[entry.mark].move_to_end(entry)

    def __len__(self) -> int:
        return self._held
