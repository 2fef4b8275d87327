"""The worker's offload engine: what is copied between the KV cache and the node store, when, and how much at once.

It knows orders (``worker.work``), pieces (``worker.queues``), and the memory with its copier (``worker.pool``);
nothing of devices. One thread at a time: the worker's reactor thread, or others under a lock that the pool has too.
In use::

    pool = Pool(reactor, connect, copier_factory, on_change)      # on_change: drive soon, tell the scheduler half
    offload = Offload(pool, [layout.nbytes for layout in layouts])
    offload.step_launched(step, fence)     # each step that has orders, behind its forward; before or after them
    offload.submit_store(order)            # copied once the forward of order.after_step was launched
    offload.submit_load(order, fence)      # blocks may be written once the fence has passed
    offload.cancel(orders); offload.cancel_loads(request_ids)
    offload.load_now()                     # all that was submitted; the caller's stream goes on behind it
    ended = offload.drive()                # never waits for a copy; Ended(loads, stored, cut)
    pause = offload.next_poll()            # seconds after which to call drive again; None: nothing to wait for
    if offload.active: ...                 # copies run: pauses are short, up to a few ms; else a timer will do

Each order submitted comes back from ``drive`` exactly once: a load as a LoadResult, a store's id in ``stored`` or, with
how many of its first blocks are stored, in ``cut``; from then on nothing of ours reads or writes its blocks and slots.

Loads and stores are two lanes that do not wait for each other. Each gives the copier a few milliseconds of work ahead,
so that the link is busy while this thread waits for the interpreter, and no more, so that a short load is not stuck
behind a long one that has gone out already.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_kvtier.logs import get_logger
from vllm_kvtier.worker.copier import Copy
from vllm_kvtier.worker.pool import Backing, Pool
from vllm_kvtier.worker.queues import ABORTED, LoadQueue, LoadResult, Piece, StoreQueue
from vllm_kvtier.worker.work import LoadOrder, StoreOrder

logger = get_logger("vllm.kvtier.offload")

# Work given to the copier ahead, in seconds of its rate: at least, and at most while the copier has run out of work
# before this thread came by (CPython hands the interpreter over every 5 ms at the earliest when somebody computes).
# Loads pay for more with the latency of those that come later.
LOADS_AHEAD = (4e-3, 12e-3)
STORES_AHEAD = (8e-3, 40e-3)
# The copier ran out of work: so much more ahead; it did not: slowly less again.
AHEAD_MORE, AHEAD_LESS = 1.5, 0.97
# Longest pauses between polls. A request waits for loads; blocks are freed a little later by slow polls of stores.
LOADS_PAUSE = 0.5e-3
STORES_PAUSE = 5e-3
SHORTEST_PAUSE = 50e-6
# A copy that takes longer than estimated (its fence has not passed) is polled less and less often: after so large a
# share of the time that it is late by, and of the time that it should have taken.
LATE_SHARE, FINENESS = 0.25, 0.03
# A decode step fills few blocks. They wait so long for those of the next steps: a call costs the interpreter as much
# for one block as for a piece, and nobody waits for stores.
STORES_LINGER = 20e-3
# Calls of the copier at a time, each of which is polled: only pieces far below the copier's size come to this.
MOST_CALLS = 16
# Longest stretch of making calls: where copies run on this very thread, sockets and pulls get their turn.
STRETCH = 1e-3
# Less than any GPU's link and about what a CPU core copies.
FIRST_RATE = 4e9
# Fences kept. Any later one than a store's own step serves too: the engine's stream runs in order.
FENCES = 16


class Ended(NamedTuple):
    """What ended since the last ``drive``."""

    loads: list[LoadResult]
    stored: list[int]  # ids of store orders
    cut: list[tuple[int, int]]  # of those that were not stored whole: id, and how many of the first blocks were


class Rate:
    """Bytes a second over about the last ten samples, each weighed with its time."""

    def __init__(self, first: float):
        self._bytes, self._seconds = first * 1e-3, 1e-3

    def add(self, nbytes: int, seconds: float) -> None:
        self._bytes = 0.9 * self._bytes + nbytes
        self._seconds = 0.9 * self._seconds + seconds

    @property
    def value(self) -> float:
        return max(1.0, self._bytes / self._seconds)


@dataclass
class _Call:
    piece: Piece
    copy: Copy
    backing: Backing


class _Lane:
    """One direction: the copier's calls that have not ended, how fast they end, and when to look again."""

    def __init__(self, ahead: tuple[float, float], pieces: int, longest_pause: float, first_rate: float):
        self._pieces = pieces  # at least so many calls ahead, however slow they seem
        self._least, self._most = ahead
        self._ahead, self._longest = self._least, longest_pause
        self.rate = Rate(first_rate)
        self.calls: list[_Call] = []  # oldest first
        self.nbytes = 0  # of them
        self.total = 0  # bytes of all calls that ended
        self._looked = 0.0  # when calls were last seen to end, or the first one began
        self._turn = 0.0  # when the oldest call's turn came, as far as the rate tells

    def room(self, piece_bytes: int) -> bool:
        window = max(self._pieces * piece_bytes, self._ahead * self.rate.value)
        return len(self.calls) < MOST_CALLS and self.nbytes < window

    def add(self, call: _Call, began: float) -> None:
        if not self.calls:
            self._looked = self._turn = began
        self.calls.append(call)
        self.nbytes += call.piece.nbytes

    def remove(self, calls: Sequence[_Call], more: bool, now: float, timed: bool) -> None:
        """These ended, as was seen ``now`` (``timed``: just now); ``more``: there was work to be given ahead."""
        nbytes = sum(call.piece.nbytes for call in calls)
        if timed:
            self.rate.add(nbytes, now - self._looked)
        self._looked = now
        self.nbytes -= nbytes
        self.total += nbytes
        self.calls = [call for call in self.calls if call not in calls]
        self._turn += nbytes / self.rate.value
        if self.calls:
            # What has not ended yet cannot have begun earlier than so.
            self._turn = min(now, max(self._turn, now - self.calls[0].piece.nbytes / self.rate.value))
            self._ahead = max(self._least, self._ahead * AHEAD_LESS)
        elif more:
            self._ahead = min(self._most, self._ahead * AHEAD_MORE)

    def pause(self, more: bool, now: float) -> float:
        """Seconds until a poll probably finds something worth the poll: an order that ends, or (if there is
        ``more`` to do) half of what was given ahead done."""
        enough = self.nbytes / 2 if more else self.nbytes
        nbytes = 0
        for call in self.calls:
            nbytes += call.piece.nbytes
            if call.piece.final or nbytes >= enough:
                break
        whole, passed = nbytes / self.rate.value, now - self._turn
        left = whole - passed if passed < whole else max((passed - whole) * LATE_SHARE, whole * FINENESS)
        return min(self._longest, max(SHORTEST_PAUSE, left))


class Offload:
    """See the module. ``block_bytes``: this rank's part of one block, by group."""

    def __init__(
        self,
        pool: Pool,
        block_bytes: Sequence[int],
        *,
        store_timeout: float = 90.0,
        first_rate: float = FIRST_RATE,
        pieces: tuple[int, int] = (2, 2),
        clock: Callable[[], float] = time.monotonic,
    ):
        """``store_timeout``: seconds after which what has not begun of a store is left out; less than the node store's
        reserve_seconds, or its slots may be another block's by then. ``first_rate``: bytes a second of either
        direction before any was measured. ``pieces``: at least so many of loads, of stores given ahead: what a
        store waits for (the forward that writes its blocks) is no sign of a slow link."""
        self._pool, self._clock = pool, clock
        self._loads = LoadQueue(block_bytes)
        self._stores = StoreQueue(block_bytes, STORES_LINGER, store_timeout)
        self._loading = _Lane(LOADS_AHEAD, pieces[0], LOADS_PAUSE, first_rate)
        self._storing = _Lane(STORES_AHEAD, pieces[1], STORES_PAUSE, first_rate)
        self._backing: Backing | None = None  # that of the orders in the queues
        self._launched = -1
        self._fences: deque[tuple[int, Any]] = deque(maxlen=FENCES)
        self._logged: set[str] = set()
        self._unwatched = False  # loads were given out and not looked after since

    # -- orders ----------------------------------------------------------------------------------------------------

    def step_launched(self, step: int, fence: Any | None) -> None:
        """The forward of ``step``, and of every step before it, was launched. ``fence`` marks its end for the
        copier; None: it has ended. Raises ValueError for steps that go backwards."""
        if step < self._launched:
            raise ValueError(f"step {step} was launched after step {self._launched}")
        self._launched = step
        self._fences.append((step, fence))

    def submit_store(self, order: StoreOrder) -> None:
        """Raises ValueError for an id that has not ended yet."""
        now = self._clock()
        self._follow(now)
        self._stores.add(order, now)
        if self._unusable(order.instance) is not None:
            self._stores.cancel([(order.id, 0)])

    def submit_load(self, order: LoadOrder, after: Any | None, passed: Callable[[], bool] | None = None) -> None:
        """``after``: behind it the blocks may be written (what read them before has been launched ahead of it);
        ``passed``: whether it has passed."""
        now = self._clock()
        self._follow(now)
        self._loads.add(order, after, now, passed)
        reason = self._unusable(order.instance)
        if reason is not None:
            self._loads.cancel(lambda other: other is order, reason, now)

    def cancel(self, orders: Iterable[tuple[int, int]]) -> None:
        """Of these stores (id, blocks) copy no more than so many of the first blocks, or than were given to the copier
        already; each of them is still reported."""
        self._stores.cancel(orders)

    def cancel_loads(self, request_ids: Sequence[str]) -> None:
        """Load no more for these requests; their results come when nothing writes their blocks any more."""
        gone = set(request_ids)
        self._loads.cancel(lambda order: order.request_id in gone, ABORTED, self._clock())

    def cancel_orders(self, orders: Sequence[LoadOrder]) -> None:
        """The same for these orders, whatever of them was submitted."""
        self._loads.cancel(lambda order: any(order is each for each in orders), ABORTED, self._clock())

    def cancel_all(self, reason: str) -> None:
        """Begin nothing of what waits; stores that run count as dropped."""
        self._stores.drop(lambda order: True)
        self._loads.cancel(lambda order: True, reason, self._clock())

    # -- work ------------------------------------------------------------------------------------------------------

    def load_now(self) -> None:
        """Give the copier all loads that wait, however much it has to do. What the calling thread launches on its
        current stream from now on runs behind them, and behind those that were under way."""
        now = self._clock()
        self._follow(now)
        self._loads.look(now)
        while self._loads.nbytes:
            began = self._clock()
            piece = self._loads.next_piece(self._loads.nbytes, self._loading.rate.value, began)
            self._start(self._loading, self._backing.copier.load, piece, piece.after, began)
        for call in self._loading.calls:
            call.copy.hold()
        self._unwatched = bool(self._loading.calls)

    def drive(self, stores: bool = True) -> Ended:
        """See what ended, give the copier more; never waits for a copy. ``stores``: whether to begin such."""
        now = self._clock()
        self._follow(now)
        self._loads.look(now)
        self._reap(self._loading, self._loading.calls)
        if self._unwatched:
            self._loads.untime_results()
            self._unwatched = False
        self._reap(self._storing, self._storing.calls)
        self._loads.expire(now)
        self._stores.expire(now)
        # In turns, a load first: where copies run on this thread, each lane gets half of it at least.
        while self._issue_load() | (stores and self._issue_store()):
            if self._clock() >= now + STRETCH:
                break
        # Here, where nothing can raise any more: what is taken is known to nobody else.
        return Ended(self._loads.take_results(), *self._stores.take_results())

    @property
    def active(self) -> bool:
        """Whether copies run, or might: ``drive`` has something to look for or to do right now."""
        return bool(self._loading.calls or self._storing.calls) or self.next_poll() == 0.0

    def next_poll(self) -> float | None:
        """Seconds until the next ``drive`` makes sense; None: not before a call of another method, or a change of
        the pool. An order that waits always has an end to wait for."""
        if self._loads.has_results or self._stores.has_results:
            return 0.0
        now, size = self._clock(), self._piece_bytes
        pauses = [self._loads.next_deadline() - now, self._stores.next_deadline() - now]
        for lane in (self._loading, self._storing):
            at = self._work_at(lane)
            if lane.calls:
                pauses.append(lane.pause(at <= now, now))
            if lane.room(size):
                pauses.append(at - now)
        pause = min(pauses)
        return None if pause == math.inf else max(0.0, pause)

    @property
    def loading(self) -> bool:
        """Whether any request waits for a load."""
        return len(self._loads) > 0

    def loads_under_way(self) -> set[str]:
        """Requests whose loads have not ended, or whose results were not taken yet."""
        return self._loads.request_ids()

    def stores_under_way(self) -> Collection[int]:
        """Ids of stores that have not ended."""
        return self._stores.ids()

    def load_names(self) -> set[tuple[str, int]]:
        """The same: request and ticket of each."""
        return self._loads.names()

    @property
    def queued_load_bytes(self) -> int:
        """Of loads that have not ended, what is not copied yet."""
        return self._loads.nbytes + self._loading.nbytes

    @property
    def queued_store_bytes(self) -> int:
        """Of stores that have not ended."""
        return self._stores.nbytes

    @property
    def awaits_step(self) -> bool:
        """Whether a store's turn has come whose step was not launched yet: it may begin with the next one."""
        return self._stores.awaits(self._launched)

    @property
    def totals(self) -> tuple[int, int]:
        """Bytes loaded and stored since the start, whatever became of them."""
        return self._loading.total, self._storing.total

    @property
    def rates(self) -> tuple[float, float]:
        """Bytes a second of recent loads and stores while there were any, as a poll sees it (waits included)."""
        return self._loading.rate.value, self._storing.rate.value

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _piece_bytes(self) -> int:
        return self._backing.copier.piece_bytes if self._backing is not None else 1

    def _work_at(self, lane: _Lane) -> float:
        """When the lane has work that could begin."""
        if lane is self._storing:
            return self._stores.ready_at(self._launched, self._piece_bytes)
        return -math.inf if self._loads.nbytes else math.inf

    def _follow(self, now: float) -> None:
        """If the memory is another than it was, orders for the old one end; what runs there ends there."""
        backing = self._pool.current
        if backing is self._backing:
            return
        self._backing = backing
        instance = None if backing is None else backing.instance
        self._stores.drop(lambda order: order.instance != instance)
        self._loads.cancel(lambda order: order.instance != instance, "the node store was restarted", now)

    def _unusable(self, instance: str) -> str | None:
        if self._backing is None:
            return "the node store's memory is not mapped here"
        if self._backing.instance != instance:
            return "the order is for another instance of the node store"
        return None

    def _issue_load(self) -> bool:
        if not (self._loads.nbytes and self._loading.room(self._piece_bytes)):
            return False
        began = self._clock()
        piece = self._loads.next_piece(self._piece_bytes, self._loading.rate.value, began)
        self._start(self._loading, self._backing.copier.load, piece, piece.after, began)
        return True

    def _issue_store(self) -> bool:
        if not self._storing.room(self._piece_bytes):
            return False
        began = self._clock()
        piece = self._stores.next_piece(self._launched, self._piece_bytes, began)
        if piece is None:
            return False
        # If its own fence is not kept any more, one that comes later; none for what was written before any step.
        fence = next((fence for step, fence in self._fences if step >= piece.after_step), None)
        self._start(self._storing, self._backing.copier.store, piece, fence, began)
        return True

    def _start(self, lane: _Lane, copy: Callable[..., Copy], piece: Piece, fence: Any, began: float) -> None:
        try:
            self._backing.take()
        except Exception as error:
            self._failed(lane, piece, error)
            return
        try:
            call = _Call(piece, copy(piece.group, piece.blocks, piece.keys, piece.slots, fence), self._backing)
        except Exception as error:  # whatever a driver raises costs these orders, not the engine
            self._failed(lane, piece, error)
            self._backing.give()
            return
        lane.add(call, began)
        self._reap(lane, [call])  # where copies run on this thread, it has ended

    def _reap(self, lane: _Lane, calls: Sequence[_Call]) -> None:
        """Which of these have ended."""
        ended, outcomes = [], []  # of each call: which of its blocks are wrong, why it failed
        for call in calls:
            try:
                if not call.copy.done():
                    continue
                outcomes.append((call.copy.bad if lane is self._loading else None, None))
            except Exception as error:  # the device failed: no copy will ever end, nor any forward
                outcomes.append((None, error))
            ended.append(call)
        if not ended:
            return
        now = self._clock()
        lane.remove(ended, self._work_at(lane) <= now, now, not (self._unwatched and lane is self._loading))
        for call, (bad, error) in zip(ended, outcomes, strict=True):
            if error is not None:
                self._failed(lane, call.piece, error)
            elif lane is self._loading:
                self._loads.ended(call.piece, bad, now)
            else:
                self._stores.ended(call.piece, ok=True)
            call.backing.give()

    def _failed(self, lane: _Lane, piece: Piece, error: Exception) -> None:
        if lane is self._loading:
            self._loads.ended(piece, None, self._clock(), f"copying from the node store failed: {error}")
        else:
            self._stores.ended(piece, ok=False)
        way = "from" if lane is self._loading else "to"
        if way not in self._logged:
            self._logged.add(way)
            logger.warning(
                "kvtier: copying %d blocks %s the node store failed: %s: %s; such blocks are computed or not kept "
                "(said once)", len(piece.blocks), way, type(error).__name__, error,
            )
