"""The pool's pages as slots: free extents, slabs carved from them, slots inside slabs. Knows no entries and no policy.

A *slab* is a run of pages divided into equal slots, so that slots of one size do not fragment each other. It is carved
from the first free extent that holds a slot, as large as ``slab_pages`` and the extent allow. It is returned (and
merged with its free neighbours) when its last slot is freed, so that memory moves between sizes. Extents end at
multiples of ``piece_pages``, the granularity of registration with CUDA. With a single slot size, only the rest of each
piece, less than a slot, is unused.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from itertools import islice

from vllm_kvtier.wire.slots import PAGE, PIECE_BYTES

PIECE_PAGES = PIECE_BYTES // PAGE
SLAB_PAGES = 8192  # 32 MiB: long for DMA, small compared with the pool
MAX_OPEN = 64  # slabs with free slots below the limit examined per allocation: bounds its time


class Slab:
    """``count`` slots of ``size`` pages from page ``start``; bit i of ``free``: slot i is free."""

    __slots__ = ("start", "size", "count", "free")

    def __init__(self, start: int, size: int, count: int):
        self.start, self.size, self.count = start, size, count
        self.free = (1 << count) - 1

    @property
    def end(self) -> int:
        return self.start + self.size * self.count

    def slots(self) -> list[int]:
        """The slots in use."""
        return [self.start + i * self.size for i in range(self.count) if not self.free >> i & 1]

    def runs(self, limit: int) -> Iterator[tuple[int, int]]:
        """(slot, number of adjacent free slots) in ascending order, below page ``limit``."""
        bits = self.free & ((1 << max(0, min(self.count, (limit - self.start) // self.size))) - 1)
        while bits:
            first = (bits & -bits).bit_length() - 1
            rest = bits >> first
            length = (~rest & (rest + 1)).bit_length() - 1
            yield self.start + first * self.size, length
            bits = rest >> length << (first + length)

    def mark(self, slot: int, length: int, free: bool) -> None:
        mask = ((1 << length) - 1) << ((slot - self.start) // self.size)
        self.free = self.free | mask if free else self.free & ~mask


class SlotPool:
    """``pages`` of the whole pool; page 0 is never used, so that slot 0 means none. ``ready``: usable pages so far."""

    def __init__(self, pages: int, piece_pages: int = PIECE_PAGES, slab_pages: int | None = None):
        self.pages, self.piece_pages = pages, piece_pages
        # Smaller slabs in a small pool, so that one size does not take all of it.
        self.slab_pages = slab_pages or max(1, min(SLAB_PAGES, pages // 64))
        self.ready = 0
        self.used = 0  # pages of slots in use
        self._extents: list[tuple[int, int]] = []  # free [start, end), sorted, none crosses a piece
        self._slabs: list[Slab] = []  # sorted by start
        self._starts: list[int] = []  # of _slabs
        self._open: dict[int, dict[Slab, None]] = {}  # size -> slabs with free slots
        self._no_room: dict[int, int] = {}  # size -> page before which no extent holds a slot

    def grow(self, ready_pages: int) -> None:
        """Pages below ``ready_pages`` are usable (after ``restore``, all must be). A smaller number than before changes
        nothing."""
        start = max(1, self.ready)
        end = min(ready_pages, self.pages)
        restored = self._slabs if not self.ready else ()
        self.ready = max(self.ready, end)
        for slab in restored:
            if slab.free:
                self._open.setdefault(slab.size, {})[slab] = None
            self._give_pieces(start, slab.start)
            start = slab.end
        self._give_pieces(start, end)

    def restore(self, slots: Sequence[int], sizes: Sequence[int]) -> list[bool]:
        """Take slots at given positions. Returns which could be taken. To be called before the first ``grow``; slots
        ascend, also from call to call.

        A slot that overlaps an earlier one, crosses a piece or ends beyond ``pages`` is refused. Gaps between two slots
        of a slab are free.
        """
        if self.ready:
            raise ValueError("slots must be restored before any memory is usable")
        good, piece = [], self.piece_pages
        slab = self._slabs[-1] if self._slabs else None
        for slot, size in zip(slots, sizes, strict=True):
            begin = slab.end if slab is not None else 1
            valid = size > 0 and begin <= slot <= self.pages - size and slot // piece == (slot + size - 1) // piece
            good.append(valid)
            if not valid:
                continue
            if (
                slab is None
                or size != slab.size
                or (slot - slab.start) % size
                or slot + size - slab.start > max(size, self.slab_pages)
                or slot // piece != slab.start // piece
            ):
                slab = Slab(slot, size, 0)
                self._slabs.append(slab)
                self._starts.append(slot)
            at = (slot - slab.start) // size
            slab.free |= (1 << at) - (1 << slab.count)  # the skipped slots
            slab.count = at + 1
            self.used += size
        return good

    def alloc(self, size: int, n: int, limit: int) -> list[int]:
        """Up to ``n`` slots that end at or below page ``limit``, ascending, adjacent if possible."""
        out: list[int] = []
        while len(out) < n:
            runs = self._runs(size, n - len(out), limit)
            fitting = [run for run in runs if run[0] >= n - len(out)]
            if fitting:
                self._take(min(fitting)[2], min(fitting)[1], n - len(out), out)
            elif slab := self._carve(size, limit):
                slot, length = next(slab.runs(limit))
                self._take(slab, slot, min(length, n - len(out)), out)
            elif runs:  # only short runs: the longest first
                for length, slot, slab in sorted(runs, key=lambda run: (-run[0], run[1])):
                    if len(out) < n:
                        self._take(slab, slot, min(length, n - len(out)), out)
            else:
                break
        out.sort()
        return out

    def free(self, slot: int) -> None:
        slab = self._slab_of(slot)
        slab.mark(slot, 1, True)
        self.used -= slab.size
        self._open.setdefault(slab.size, {})[slab] = None
        if slab.free == (1 << slab.count) - 1:
            self._remove_slab(slab)

    def around(self, slot: int, size: int, limit: int) -> list[Slab] | None:
        """Slabs of other sizes, including this slot's, that make room for a slot of ``size`` when emptied.

        None: impossible below page ``limit``, because of a slab of that size or a piece's end.
        """
        at = bisect_right(self._starts, slot) - 1
        slab = self._slabs[at]
        left = right = at
        piece = slab.start // self.piece_pages * self.piece_pages
        low, high = self._stretch(slab.start, slab.end)
        while high - low < size:
            after = self._slabs[right + 1] if right + 1 < len(self._slabs) else None
            before = self._slabs[left - 1] if left else None
            if after and after.start == high and high < piece + self.piece_pages and after.size != size:
                right += 1
            elif before and before.end == low and low > piece and before.size != size:
                left -= 1
            else:
                return None
            low, high = self._stretch(self._slabs[left].start, self._slabs[right].end)
        return self._slabs[left : right + 1] if min(high, limit) - low >= size else None

    def _runs(self, size: int, enough: int, limit: int) -> list[tuple[int, int, Slab]]:
        """(length, slot, slab) of some of the free runs; stops at one that is long enough."""
        found = []
        below = (slab for slab in self._open.get(size, ()) if slab.start + size <= limit)
        for slab in islice(below, MAX_OPEN):
            best = [(length, slot, slab) for slot, length in slab.runs(limit)]
            found += best
            if any(length >= enough for length, _, _ in best):
                break
        return found

    def _carve(self, size: int, limit: int) -> Slab | None:
        below = self._no_room.get(size, 0)
        for i in range(bisect_left(self._extents, (below,)), len(self._extents)):
            start, end = self._extents[i]
            if end - start < size:
                self._no_room[size] = end
                continue
            count = (min(end, limit) - start) // size
            if count <= 0:  # beyond the limit, and so is all that follows
                return None
            slab = Slab(start, size, min(count, max(1, self.slab_pages // size)))
            self._extents[i : i + 1] = [(slab.end, end)] if slab.end < end else []
            at = bisect_left(self._starts, start)
            self._starts.insert(at, start)
            self._slabs.insert(at, slab)
            self._open.setdefault(size, {})[slab] = None
            return slab
        return None

    def _take(self, slab: Slab, slot: int, length: int, out: list[int]) -> None:
        slab.mark(slot, length, False)
        self.used += length * slab.size
        if not slab.free:
            del self._open[slab.size][slab]
        out.extend(range(slot, slot + length * slab.size, slab.size))

    def _slab_of(self, slot: int) -> Slab:
        return self._slabs[bisect_right(self._starts, slot) - 1]

    def _remove_slab(self, slab: Slab) -> None:
        at = bisect_left(self._starts, slab.start)
        del self._starts[at], self._slabs[at]
        slabs = self._open[slab.size]
        del slabs[slab]
        if not slabs:
            del self._open[slab.size]
        self._give(slab.start, slab.end)

    def _stretch(self, low: int, high: int) -> tuple[int, int]:
        """[low, high) with the free extents that touch it, within its piece."""
        for start, end in self._neighbours(low, high):
            low, high = min(low, start), max(high, end)
        return low, high

    def _neighbours(self, low: int, high: int) -> list[tuple[int, int]]:
        at = bisect_left(self._extents, (low,))
        piece, extents = self.piece_pages, self._extents[max(0, at - 1) : at + 1]
        return [(s, e) for s, e in extents if (e == low and low % piece) or (s == high and high % piece)]

    def _give_pieces(self, start: int, end: int) -> None:
        while start < end:
            stop = min(end, (start // self.piece_pages + 1) * self.piece_pages)
            self._give(start, stop)
            start = stop

    def _give(self, start: int, end: int) -> None:
        for extent in self._neighbours(start, end):
            self._extents.remove(extent)
            start, end = min(start, extent[0]), max(end, extent[1])
        insort(self._extents, (start, end))
        for size, below in self._no_room.items():
            if start < below and end - start >= size:
                self._no_room[size] = start
