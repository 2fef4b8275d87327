"""What waits to be copied on a worker, and what goes next. Pure bookkeeping: no clock, no copier, no threads.

An *order* is what the scheduler half asked for; a *piece* is what one call of the copier gets: blocks of one group,
of one order or of several. Whoever runs pieces takes them with ``next_piece`` and says ``ended`` for each. An order
ends exactly once, when nothing of it waits and none of its pieces runs: one that has failed or was cancelled before
stays until its last piece has ended, because until then its blocks and slots are in use ("two deadlines").

- :class:`StoreQueue`: first come, first served. Orders of one group are joined into pieces in their order; what is
  little waits a moment for company.
- :class:`LoadQueue`: the least ``seconds of copying left + time of arrival`` goes first. So the shortest goes first,
  and a load that waited as long as it takes alone is as urgent as one that comes now and is done in no time: after
  that nothing new overtakes it.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_kvtier.worker.work import GroupLoad, LoadOrder, StoreOrder


@dataclass(eq=False)
class Piece:
    """``spans`` says whose blocks these are, in turn: (entry of a queue, for a load the index in its groups and for a
    store its first block here, how many blocks)."""

    group: int
    blocks: np.ndarray  # int64[n]
    keys: np.ndarray  # uint64[n]
    slots: np.ndarray  # int64[n]
    nbytes: int
    spans: list[tuple[Any, int, int]]
    after: Any = None  # loads: the fence to wait for
    after_step: int = -1  # stores: wait for the forward of this step
    final: bool = False  # an order ends with it


def _piece(group: int, block_bytes: int, parts: list[tuple[Any, int, Any, int, int]]) -> Piece:
    """``parts``: (entry, as in ``spans``, its arrays, first block, one past the last)."""

    def joined(name: str) -> np.ndarray:
        cut = [getattr(arrays, name)[start:stop] for _, _, arrays, start, stop in parts]
        return cut[0] if len(cut) == 1 else np.concatenate(cut)

    spans = [(entry, at, stop - start) for entry, at, _, start, stop in parts]
    nbytes = block_bytes * sum(count for _, _, count in spans)
    return Piece(group, joined("blocks"), joined("keys"), joined("slots"), nbytes, spans)


@dataclass(eq=False)
class _Store:
    order: StoreOrder
    number: int  # in order of arrival
    nbytes: int
    since: float
    stop: int  # so many of its first blocks are to be given to pieces
    kept: int  # so many are stored when its pieces have ended, as far as is known
    issued: int = 0  # blocks given to pieces
    running: int = 0  # pieces

    @property
    def waits(self) -> bool:
        return self.issued < self.stop


class StoreQueue:
    """Without a bound of its own: the scheduler half holds the blocks of all that waits, and bounds these."""

    def __init__(self, block_bytes: Sequence[int], linger: float, timeout: float):
        """``block_bytes``: of one block, by group. ``linger``: seconds for which less than a piece waits for more.
        ``timeout``: seconds after which what has not begun is left out."""
        self._block_bytes, self._linger, self._timeout = list(block_bytes), linger, timeout
        self._stores: dict[int, _Store] = {}
        self._waiting: list[deque[_Store]] = [deque() for _ in block_bytes]
        self._waiting_bytes = [0 for _ in block_bytes]
        self._arrivals = 0
        self._done: list[int] = []
        self._cut: list[tuple[int, int]] = []
        self.nbytes = 0  # of orders that have not ended

    def __len__(self) -> int:
        """Orders that have not ended."""
        return len(self._stores)

    def ids(self) -> Collection[int]:
        """Of these."""
        return self._stores.keys()

    def add(self, order: StoreOrder, now: float) -> None:
        """Queue. Raises ValueError for an id that has not ended."""
        if order.id in self._stores:
            raise ValueError(f"store order {order.id} has not ended yet; ids are never used twice")
        count = len(order.blocks)
        nbytes = count * self._block_bytes[order.group]
        store = _Store(order, self._arrivals, nbytes, now, count, count)
        self._arrivals += 1
        self._stores[order.id] = store
        self.nbytes += nbytes
        if store.waits:
            self._waiting[order.group].append(store)
            self._waiting_bytes[order.group] += nbytes
        self._settle(store)

    def ready_at(self, launched: int, nbytes: int) -> float:
        """When ``next_piece`` has something to give, unless more comes before; infinity: not of itself."""
        return min(self._ready_times(launched, nbytes), default=(math.inf, 0))[0]

    def awaits(self, launched: int) -> bool:
        """Whether the oldest order of a group waits for a step after ``launched``."""
        return any(waiting and waiting[0].order.after_step > launched for waiting in self._waiting)

    def next_piece(self, launched: int, nbytes: int, now: float) -> Piece | None:
        """About ``nbytes`` of the oldest order that may be copied, and of those of its group that came after it;
        at least one block. ``launched``: the last step whose forward was launched."""
        ready = [group for at, group in self._ready_times(launched, nbytes) if at <= now]
        if not ready:
            return None
        group = min(ready, key=lambda g: self._waiting[g][0].number)
        size = self._block_bytes[group]
        room = max(1, nbytes // size)
        parts: list[tuple[Any, int, Any, int, int]] = []
        waiting = self._waiting[group]
        for store in waiting:
            if not room or store.order.after_step > launched:
                break
            start, stop = store.issued, min(store.stop, store.issued + room)
            room -= stop - start
            parts.append((store, start, store.order, start, stop))
        piece = _piece(group, size, parts)
        piece.after_step = max(store.order.after_step for store, *_ in parts)
        piece.final = any(stop == store.stop for store, *_, stop in parts)
        for store, *_, stop in parts:  # last: had anything raised, these blocks would still wait
            store.issued = stop
            store.running += 1
            if stop == store.stop:
                waiting.popleft()
        self._waiting_bytes[group] -= piece.nbytes
        return piece

    def ended(self, piece: Piece, ok: bool) -> None:
        """A piece ran. If it went wrong, what its orders have from there on is not stored."""
        for store, start, _ in piece.spans:
            store.running -= 1
            if ok:
                self._settle(store)
            else:
                self._stop(store, store.issued, start)

    def cancel(self, orders: Iterable[tuple[int, int]]) -> None:
        """Of these orders store only so many of their first blocks, or those that have gone to a piece already."""
        for id, count in orders:
            store = self._stores.get(id)
            if store is not None:
                self._stop(store, max(store.issued, count))

    def drop(self, which: Callable[[StoreOrder], bool]) -> None:
        """Drop these orders, even those whose last piece runs."""
        for store in [s for s in self._stores.values() if which(s.order)]:
            self._stop(store, store.issued, 0)

    def expire(self, now: float) -> None:
        for waiting in self._waiting:
            while waiting and waiting[0].since + self._timeout <= now:
                self._stop(waiting[0], waiting[0].issued)

    def next_deadline(self) -> float:
        """When ``expire`` may have something to do; infinity for never."""
        return min((w[0].since + self._timeout for w in self._waiting if w), default=math.inf)

    @property
    def has_results(self) -> bool:
        return bool(self._done or self._cut)

    def take_results(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of the orders that were stored since the last call; of those that were not stored whole also how many of
        their first blocks were."""
        results = self._done, self._cut
        self._done, self._cut = [], []
        return results

    def _ready_times(self, launched: int, nbytes: int) -> list[tuple[float, int]]:
        """(when, group) of the groups whose oldest order may be copied."""
        times = []
        for group, waiting in enumerate(self._waiting):
            if waiting and waiting[0].order.after_step <= launched:
                enough = self._waiting_bytes[group] >= nbytes
                times.append((-math.inf if enough else waiting[0].since + self._linger, group))
        return times

    def _stop(self, store: _Store, stop: int, kept: int | None = None) -> None:
        """Give no block from ``stop`` on to a piece; count none from ``kept`` on as stored."""
        if stop < store.stop:
            group = store.order.group
            self._waiting_bytes[group] -= (store.stop - stop) * self._block_bytes[group]
            store.stop = stop
            if not store.waits:
                self._waiting[group].remove(store)
        store.kept = min(store.kept, store.stop if kept is None else kept)
        self._settle(store)

    def _settle(self, store: _Store) -> None:
        if store.running or store.waits or store.order.id not in self._stores:
            return
        del self._stores[store.order.id]
        self.nbytes -= store.nbytes
        if store.kept == len(store.order.blocks):
            self._done.append(store.order.id)
        else:
            self._cut.append((store.order.id, store.kept))


ABORTED = "the request was aborted"  # reason of a load that was stopped because nobody waits for it any more


@dataclass
class LoadResult:
    """A load ended: nothing writes its blocks any more. All but ``bad_blocks`` hold what was asked for."""

    request_id: str
    bad_blocks: set[int]  # our block ids that must be computed: wrong, or never loaded
    reason: str  # why, in words; "" if none is bad
    bytes: int  # copied, right or wrong
    seconds: float  # from when the worker got the order
    queued: float  # of these, until its first piece began
    corrupt: list[tuple[int, int]] = field(default_factory=list)  # (group, slot) whose checksum is wrong
    timed: bool = True  # False: it had ended before anybody looked; ``seconds`` are the most that it took
    ticket: int = 0  # of its order
    fenced: float = 0.0  # of ``seconds``, at least: its blocks could not be written yet; others' steps, not the link

    @property
    def failed(self) -> bool:
        return bool(self.bad_blocks)

    @property
    def checksum(self) -> bool:
        """Whether something that was stored is wrong (not only late, or in the way of an error)."""
        return bool(self.corrupt)


@dataclass(eq=False)
class _Load:
    order: LoadOrder
    after: Any
    since: float
    deadline: float
    sizes: list[int]  # bytes of a block, by index in order.groups
    issued: list[int]  # blocks given to pieces, likewise
    left: int  # bytes that no piece was made of yet
    passed: Callable[[], bool] | None  # whether ``after`` has; None: not to be asked, or no more
    fenced: float = 0.0  # seconds until when it was seen not to have
    _at: int = 0  # no index before it has blocks left
    running: int = 0  # pieces
    began: float | None = None
    reason: str = ""
    bytes: int = 0
    bad: set[int] = field(default_factory=set)
    corrupt: list[tuple[int, int]] = field(default_factory=list)

    @property
    def at(self) -> int:
        """The index whose blocks go next, if any are left."""
        while self.issued[self._at] >= len(self.order.groups[self._at].blocks):
            self._at += 1
        return self._at

    @property
    def current(self) -> GroupLoad:
        return self.order.groups[self.at]


class LoadQueue:
    def __init__(self, block_bytes: Sequence[int]):
        """``block_bytes``: of one block, by group."""
        self._block_bytes = list(block_bytes)
        self._loads: dict[_Load, None] = {}  # in order of arrival
        self._results: list[LoadResult] = []
        self._next_deadline = math.inf  # never later than the first one; looked up again when it has passed
        self.nbytes = 0  # that no piece was made of yet; read by other threads too

    def __len__(self) -> int:
        """Loads that have not ended."""
        return len(self._loads)

    def request_ids(self) -> set[str]:
        """Of loads that have not ended, or whose results were not taken yet."""
        return {request_id for request_id, _ in self.names()}

    def names(self) -> set[tuple[str, int]]:
        """The same: request and ticket of each."""
        each = [*(load.order for load in self._loads), *self._results]
        return {(one.request_id, one.ticket) for one in each}

    def add(self, order: LoadOrder, after: Any, now: float, passed: Callable[[], bool] | None = None) -> None:
        """``passed``: whether ``after`` has, so that the blocks may be written; None: that is not known."""
        sizes = [self._block_bytes[g.group] for g in order.groups]
        left = sum(len(group.blocks) * size for group, size in zip(order.groups, sizes, strict=True))
        load = _Load(order, after, now, now + order.timeout, sizes, [0] * len(order.groups), left, passed)
        self._loads[load] = None
        self.nbytes += left
        self._next_deadline = min(self._next_deadline, load.deadline)
        self._settle(load, now)

    def look(self, now: float) -> None:
        """See whose blocks may not be written yet."""
        for load in self._loads:
            if load.passed is not None:
                if load.passed():
                    load.passed = None
                else:
                    load.fenced = now - load.since

    def next_piece(self, nbytes: int, rate: float, now: float) -> Piece | None:
        """About ``nbytes`` of the load that goes first, at least one block; filled up with loads that are at the
        same group behind the same fence. ``rate``: bytes a second that loads make, to weigh size against age."""
        waiting = [load for load in self._loads if load.left]
        if not waiting:
            return None
        first = min(waiting, key=lambda load: _urgency(load, rate))
        group = first.current.group
        size = self._block_bytes[group]
        room = max(1, nbytes // size)
        parts: list[tuple[Any, int, Any, int, int]] = []
        final = False
        for load in self._joinable(first, room, rate):
            arrays, at, start = load.current, load.at, load.issued[load.at]
            stop = min(len(arrays.blocks), start + room)
            room -= stop - start
            parts.append((load, at, arrays, start, stop))
            final = final or load.left == (stop - start) * size
            if not room:
                break
        piece = _piece(group, size, parts)
        piece.after, piece.final = first.after, final
        for load, at, _, start, stop in parts:  # last: had anything raised, these blocks would still wait
            load.issued[at] = stop
            load.left -= (stop - start) * size
            self.nbytes -= (stop - start) * size
            load.running += 1
            load.began = now if load.began is None else load.began
        return piece

    def ended(self, piece: Piece, bad: np.ndarray | None, now: float, reason: str = "") -> None:
        """A piece ran; ``bad``: bool[n], whose checksum is wrong. None: all of it failed, for ``reason``, and the
        rest of its loads is not tried."""
        start = 0
        for load, at, count in piece.spans:
            load.running -= 1
            load.bytes += count * self._block_bytes[piece.group]
            blocks = piece.blocks[start : start + count]
            if bad is None:
                load.bad.update(blocks.tolist())
                self._fail(load, reason)
            elif (wrong := np.flatnonzero(bad[start : start + count])).size:
                load.bad.update(blocks[wrong].tolist())
                load.corrupt += [(piece.group, slot) for slot in piece.slots[start : start + count][wrong].tolist()]
                # Behind a block that must be computed, this group's blocks are computed too.
                self._skip(load, at)
            self._settle(load, now)
            start += count

    def cancel(self, which: Callable[[LoadOrder], bool], reason: str, now: float) -> None:
        """Give up what these loads have not begun; they end as failed when what runs has ended."""
        for load in [load for load in self._loads if which(load.order)]:
            self._fail(load, reason)
            self._settle(load, now)

    def expire(self, now: float) -> None:
        if now < self._next_deadline:
            return
        for load in [load for load in self._loads if load.left and load.deadline <= now]:
            self._fail(load, f"the load did not end within {load.order.timeout:g} s")
            self._settle(load, now)
        self._next_deadline = min((load.deadline for load in self._loads if load.left), default=math.inf)

    def next_deadline(self) -> float:
        """When ``expire`` may have something to do; infinity for never."""
        return self._next_deadline if self.nbytes else math.inf

    @property
    def has_results(self) -> bool:
        return bool(self._results)

    def untime_results(self) -> None:
        """Nobody looked when these loads ended."""
        for result in self._results:
            result.timed = False

    def take_results(self) -> list[LoadResult]:
        results, self._results = self._results, []
        return results

    # -- one load --------------------------------------------------------------------------------------------------

    def _joinable(self, first: _Load, room: int, rate: float) -> list[_Load]:
        if len(first.current.blocks) - first.issued[first.at] >= room:
            return [first]
        group, after = first.current.group, first.after
        others = (
            load
            for load in self._loads
            if load is not first and load.left and load.after is after and load.current.group == group
        )
        return [first, *sorted(others, key=lambda load: _urgency(load, rate))]

    def _skip(self, load: _Load, at: int) -> None:
        """What waits of this group is not loaded."""
        group = load.order.groups[at]
        skipped = group.blocks[load.issued[at] :].tolist()
        load.bad.update(skipped)
        load.issued[at] = len(group.blocks)
        load.left -= len(skipped) * load.sizes[at]
        self.nbytes -= len(skipped) * load.sizes[at]

    def _fail(self, load: _Load, reason: str) -> None:
        load.reason = load.reason or reason
        for at in range(len(load.order.groups)):
            self._skip(load, at)

    def _settle(self, load: _Load, now: float) -> None:
        if load.running or load.left or load not in self._loads:
            return
        del self._loads[load]
        if not load.bad:
            reason = ""  # cancelled or late when everything was under way, and all of it came
        elif load.corrupt and not load.reason:
            total = sum(len(g.blocks) for g in load.order.groups)
            reason = f"{len(load.corrupt)} of {total} blocks from the node store have a wrong checksum"
        else:
            reason = load.reason
        queued = (load.began if load.began is not None else now) - load.since
        order, seconds = load.order, now - load.since
        self._results.append(
            LoadResult(
                order.request_id, load.bad, reason, load.bytes, seconds, queued, load.corrupt, ticket=order.ticket,
                fenced=load.fenced,
            )
        )


def _urgency(load: _Load, rate: float) -> float:
    return load.left / rate + load.since
