"""ARC: adaptive replacement cache (Megiddo and Modha, FAST 2003)."""

from collections import OrderedDict
from collections.abc import Iterable

from vllm_kvtier.store.eviction.base import Policy
from vllm_kvtier.store.index.block_entry import BlockEntry, Key

ONCE, OFTEN = 0, 1  # entry.mark: which list


class Arc(Policy):
    """Two LRU lists, blocks used once and blocks used again, each with its last evicted keys (its ghosts).

    A ghost that returns shows that its list was too short: ``target``, the length of the first list, moves towards it,
    by more the fewer ghosts that list has. The victim is the first list's oldest while the list is longer than its
    target, else the second's. A returning ghost joins the second list. The published algorithm has a fixed size; here
    the size is the current number of blocks, so that memory may change.
    """

    def __init__(self) -> None:
        self._lists: tuple[OrderedDict[BlockEntry, None], ...] = (OrderedDict(), OrderedDict())
        self._ghosts: tuple[OrderedDict[Key, None], ...] = (OrderedDict(), OrderedDict())
        self._target = 0.0
        self._other = False  # try the other list first: this one's victim is in use

    def add(self, entry: BlockEntry) -> None:
        key = entry.key
        once, often = self._ghosts
        if key in once:
            del once[key]
            self._target = min(float(len(self)), self._target + max(1.0, len(often) / (len(once) + 1)))
            entry.mark = OFTEN
        elif key in often:
            del often[key]
            self._target = max(0.0, self._target - max(1.0, len(once) / (len(often) + 1)))
            entry.mark = OFTEN
        else:
            entry.mark = ONCE
        self._lists[entry.mark][entry] = None

    def touch(self, entries: Iterable[BlockEntry]) -> None:
        once, often = self._lists
        for entry in entries:
            if entry.mark == OFTEN:
                often.move_to_end(entry)
            else:
                del once[entry]
                entry.mark = OFTEN
                often[entry] = None

    def remove(self, entry: BlockEntry, evicted: bool) -> None:
        size = len(self)
        del self._lists[entry.mark][entry]
        if not evicted:
            return
        self._other = False
        once, often = self._ghosts
        self._ghosts[entry.mark][entry.key] = None
        while once and len(once) + len(self._lists[ONCE]) > size:
            once.popitem(last=False)
        while len(once) + len(often) > size:
            (often or once).popitem(last=False)

    def coldest(self) -> BlockEntry | None:
        once, often = self._lists
        if once and ((len(once) > self._target) != self._other or not often):
            return next(iter(once))
        return next(iter(often), None)

    def defer(self, entries: Iterable[BlockEntry]) -> None:
        self._other = not self._other
        for entry in entries:
            self._lists[entry.mark].move_to_end(entry)

    def __len__(self) -> int:
        return len(self._lists[ONCE]) + len(self._lists[OFTEN])
