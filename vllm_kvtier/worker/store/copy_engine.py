"""Copies between the KV cache and the node store: which, when, and how much at once.

Knows jobs (``jobs.transfer_jobs``), batches (``worker.store.copy_queues``) and the memory with its copier
(``worker.store.store_memory``); nothing of devices. One thread at a time: the worker's reactor, or others under a lock
that ``StoreMemory`` has too. Jobs are submitted in any order with the launches of their steps; the caller polls when
``next_poll`` says so.

``poll`` reports each job exactly once: a load as a LoadResult, a store by its id in ``stored`` or, with the number of
its first blocks that are stored, in ``cut``. From then on no copy reads or writes its blocks and slots.

Loads and stores are two lanes that do not wait for each other. Each gives the copier a few milliseconds of work ahead,
so that the link is busy while this thread waits for the interpreter; and no more, so that a short load is not stuck
behind a long one.
"""

import bisect
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from vllm_kvtier.jobs.results import LoadResult
from vllm_kvtier.jobs.transfer_jobs import LoadJob, StoreJob
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.options import STORE_SECONDS
from vllm_kvtier.worker.copy.base import Copy
from vllm_kvtier.worker.store.copy_queues import CopyBatch, LoadQueue, StoreQueue
from vllm_kvtier.worker.store.store_memory import Backing, StoreMemory
from vllm_kvtier.worker.tuning import MODEL_STREAM_SECONDS

logger = get_logger(__name__)

# Seconds of work given to the copier ahead: at least, and at most after the copier ran out of work before a poll
# (CPython switches threads every 5 ms at the earliest if another one computes). More of it delays later loads.
LOADS_AHEAD = (4e-3, 12e-3)
STORES_AHEAD = (8e-3, 40e-3)
# The factors when the copier ran out of work, and when it did not.
AHEAD_GROWTH, AHEAD_DECAY = 1.5, 0.97
# Longest pauses between polls, in seconds. Requests wait for loads; a late poll of stores only frees blocks later.
LOADS_PAUSE = 0.5e-3
STORES_PAUSE = 5e-3
# The same where nothing waits for the stores that run, and each poll would take its time from a step.
ENDING_STORES_PAUSE = 20e-3
SHORTEST_PAUSE = 50e-6
# A copy that takes longer than estimated (its event has not passed) is polled less and less often: after this share of
# the time that it is late by, and of the time that it should have taken.
LATE_PAUSE_SHARE, MIN_PAUSE_SHARE = 0.25, 0.03
# A decode step fills few blocks. They wait this long for those of the next steps: a call costs the interpreter as much
# for one block as for a batch, and no request waits for stores.
STORE_BATCH_DELAY = 50e-3
# On the model's stream, stores wait this long after the last step, or until another is launched: behind it they are not
# in the way of a request that follows at once (on an H200 the first token of 2,048 tokens comes 1.0 ms sooner).
QUIET_SECONDS = 25e-3
MAX_CALLS = 16  # calls of the copier at a time: each is polled; only very small batches reach this
# Longest run of calls, in seconds: where copies run on this thread, it has sockets and pulls to serve.
MAX_RUN = 1e-3
FIRST_RATE = 4e9  # bytes/s before any was measured: less than any GPU's link, about what a CPU core copies
# Events kept. A later event than that of a store's own step is safe too: the engine's stream runs in order.
STEP_EVENTS = 16
STEP_ENDS = 256  # steps whose end is remembered


class EndedCopy(NamedTuple):
    """All that ended since the last ``poll``."""

    loads: list[LoadResult]
    stored: list[int]  # ids of store jobs
    cut: list[tuple[int, int]]  # of those that were stored in part: id, and the number of first blocks


class CopyRate:
    """Bytes/s over about the last ten samples, each weighted by its time."""

    def __init__(self, first: float):
        self._bytes, self._seconds = first * 1e-3, 1e-3

    def add(self, nbytes: int, seconds: float) -> None:
        self._bytes = 0.9 * self._bytes + nbytes
        self._seconds = 0.9 * self._seconds + seconds

    @property
    def value(self) -> float:
        return max(1.0, self._bytes / self._seconds)


@dataclass(eq=False)
class _Call:
    batch: CopyBatch
    backing: Backing
    copy: Copy = field(init=False)  # set once it was begun


class _Lane:
    """One direction: the copier's calls that have not ended, their rate, and when to poll."""

    def __init__(self, ahead: tuple[float, float], batches: int, max_pause: float, first_rate: float):
        self._min_batches = batches  # calls ahead at least, however slow they seem
        self._min_ahead, self._max_ahead = ahead
        self._ahead, self._max_pause = self._min_ahead, max_pause
        self.rate = CopyRate(first_rate)
        self.calls: list[_Call] = []  # oldest first
        self.nbytes = 0  # of them
        self.total = 0  # bytes of all calls that ended
        self._last_ended = 0.0  # when calls were last seen to end, or the first one began
        self._oldest_began = 0.0  # when the oldest call began, by the rate

    def room(self, piece_bytes: int) -> bool:
        window = max(self._min_batches * piece_bytes, self._ahead * self.rate.value)
        return len(self.calls) < MAX_CALLS and self.nbytes < window

    def add(self, call: _Call, began: float) -> None:
        if not self.calls:
            self._last_ended = self._oldest_began = began
        self.calls.append(call)
        self.nbytes += call.batch.nbytes

    def drop(self, call: _Call) -> None:
        """It was not begun."""
        if call in self.calls:
            self.calls.remove(call)
            self.nbytes -= call.batch.nbytes

    def remove(self, calls: Sequence[_Call], more: bool, now: float, timed: bool) -> None:
        """These ended, as a poll saw ``now``; ``timed``: not long before. ``more``: there was work to be given
        ahead."""
        nbytes = sum(call.batch.nbytes for call in calls)
        if timed:
            self.rate.add(nbytes, now - self._last_ended)
        self._last_ended = now
        self.nbytes -= nbytes
        self.total += nbytes
        self.calls = [call for call in self.calls if call not in calls]
        self._oldest_began += nbytes / self.rate.value
        if self.calls:
            # A call that has not ended cannot have begun earlier than that.
            self._oldest_began = min(now, max(self._oldest_began, now - self.calls[0].batch.nbytes / self.rate.value))
            self._ahead = max(self._min_ahead, self._ahead * AHEAD_DECAY)
        elif more:
            self._ahead = min(self._max_ahead, self._ahead * AHEAD_GROWTH)

    def pause(self, more: bool, now: float) -> float:
        """Seconds until a poll probably finds a job that ended, or (if there is ``more`` to do) half of the work ahead
        done."""
        enough = self.nbytes / 2 if more else self.nbytes
        nbytes = 0
        for call in self.calls:
            nbytes += call.batch.nbytes
            if call.batch.final or nbytes >= enough:
                break
        whole, passed = nbytes / self.rate.value, now - self._oldest_began
        left = whole - passed if passed < whole else max((passed - whole) * LATE_PAUSE_SHARE, whole * MIN_PAUSE_SHARE)
        return min(self._max_pause, max(SHORTEST_PAUSE, left))


class CopyEngine:
    """See the module. ``block_bytes``: this rank's part of one block, by group. ``loads``, ``stores``: jobs that have
    not ended."""

    def __init__(
        self,
        pool: StoreMemory,
        block_bytes: Sequence[int],
        *,
        store_timeout: float = STORE_SECONDS - 10.0,
        first_rate: float = FIRST_RATE,
        batches: tuple[int, int] = (2, 2),
        clock: Callable[[], float] = time.monotonic,
    ):
        """``store_timeout``: seconds after which blocks of a store that have not begun are left out; less than the node
        store's reserve_seconds, after which another block may have their slots. ``first_rate``: bytes/s of either
        direction before any was measured. ``batches``: the least number of loads, and of stores, given ahead: a store
        that waits for its forward is no sign of a slow link."""
        self._pool, self._clock = pool, clock
        self.salts = [np.uint64(0)] * len(block_bytes)  # by group, for the keys of checksums in slots
        self.loads = LoadQueue(block_bytes)
        self.stores = StoreQueue(block_bytes, STORE_BATCH_DELAY, store_timeout)
        self._loading = _Lane(LOADS_AHEAD, batches[0], LOADS_PAUSE, first_rate)
        self._storing = _Lane(STORES_AHEAD, batches[1], STORES_PAUSE, first_rate)
        self._backing: Backing | None = None  # of the jobs in the queues
        self._piece_bytes = 1  # of its copier
        self._launched = -1
        self._behind_step = False  # whether a step was launched since the last poll
        self._step_events: deque[tuple[int, Any]] = deque(maxlen=STEP_EVENTS)
        # Whether the copier gathers stores on the model's stream unless they are overdue; and that (torch.cuda.Stream).
        self.on_model_stream = False
        self.model_stream: Any | None = None
        self._step_ends: deque[tuple[int, float]] = deque(maxlen=STEP_ENDS)  # and when it was first seen
        self._logged: set[str] = set()
        self._unwatched = False  # loads were begun by ``load_now`` and not polled since
        # When it was last polled, and whether this was recent enough to tell how long stores took that ended since.
        self._polled_at, self._watched = -math.inf, True

    # -- jobs ------------------------------------------------------------------------------------------------------

    def step_launched(self, step: int, event: Any | None) -> None:
        """The forward of ``step``, and of every step before it, was launched. ``event`` marks its end; None: it has
        ended. Raises ValueError for steps that go backwards."""
        if step < self._launched:
            raise ValueError(f"step {step} was launched after step {self._launched}")
        self._launched, self._behind_step = step, True
        self._step_events.append((step, event))

    def submit_store(self, job: StoreJob) -> None:
        """Raises ValueError for an id that has not ended yet."""
        now = self._clock()
        self._follow(now)
        self.stores.add(job, now)
        if self._unusable(job.instance) is not None:
            self.stores.cancel([(job.id, 0)])

    def submit_load(self, job: LoadJob, after: Any | None, passed: Callable[[], bool] | None = None) -> None:
        """``after``: behind it the blocks may be written (kernels that read them before were launched ahead of it);
        ``passed``: whether it has passed."""
        now = self._clock()
        self._follow(now)
        self.loads.add(job, after, now, passed)
        reason = self._unusable(job.instance)
        if reason is not None:
            self.loads.cancel(lambda other: other is job, reason, now)

    def cancel_loads(self, which: Callable[[LoadJob], bool], reason: str) -> None:
        """Begin no more of these loads; they are reported when nothing writes their blocks any more."""
        self.loads.cancel(which, reason, self._clock())

    def cancel_all(self, reason: str) -> None:
        """Begin nothing more; stores that run count as dropped."""
        self.stores.drop(lambda job: True)
        self.cancel_loads(lambda job: True, reason)

    # -- work ------------------------------------------------------------------------------------------------------

    def load_now(self) -> None:
        """Give the copier all loads that wait, however much work it has. Kernels that the calling thread launches on
        its current stream from now on run behind them, and behind those that were under way."""
        now = self._clock()
        self._follow(now)
        self.loads.check_events(now)
        while self.loads.nbytes:
            began = self._clock()
            batch = self.loads.next_batch(self.loads.nbytes, self._loading.rate.value, began)
            self._start(self._loading, self._backing.copier.load, batch, batch.after, began)
        for call in self._loading.calls:
            call.copy.make_stream_wait()
        self._unwatched = bool(self._loading.calls)

    def poll(self, stores: bool = True) -> EndedCopy:
        """See what ended and give the copier more; never waits for a copy. ``stores``: whether to begin any."""
        now = self._clock()
        self._follow(now)
        loading = bool(self.loads)
        if loading:
            self.loads.check_events(now)
            self._reap(self._loading, self._loading.calls)
            if self._unwatched:
                self.loads.untime_results()
                self._unwatched = False
            self.loads.expire(now)
        self._watched, self._polled_at = now - self._polled_at <= 2 * STORES_PAUSE, now
        self._reap(self._storing, self._storing.calls)
        self._watched = True
        if self.model_stream is not None and self.stores.nbytes:
            self._note_step_ends(now)
        self.stores.expire(now)
        # Alternately, a load first: where copies run on this thread, each lane gets at least half of its time.
        while (loading and self._issue_load()) | (stores and self._issue_store()):
            if self._clock() >= now + MAX_RUN:
                break
        self._behind_step = False
        # Last, where nothing can raise any more: results that were taken are known nowhere else.
        return EndedCopy(self.loads.take_results(), *self.stores.take_results())

    @property
    def active(self) -> bool:
        """Whether copies run or could begin now."""
        return bool(self._loading.calls or self._storing.calls) or self.next_poll() == 0.0

    def next_poll(self, steps_follow: bool = False) -> float | None:
        """Seconds until the next ``poll`` makes sense; None: not before another method is called or the memory changes.
        A job that waits always has a deadline. ``steps_follow``: others are launched, also those that stores wait for;
        then the end of stores may be seen late."""
        if self.loads.has_results or self.stores.has_results:
            return 0.0
        now, size = self._clock(), self._piece_bytes
        pauses = [self.loads.next_deadline() - now, self.stores.next_deadline() - now]
        for lane in (self._loading, self._storing) if self.loads else (self._storing,):
            at = self.stores_ready_at if steps_follow and lane is self._storing else self._work_at(lane)
            if lane.calls:
                pause = lane.pause(at <= now, now)
                ending = steps_follow and lane is self._storing and at > now
                pauses.append(max(pause, ENDING_STORES_PAUSE) if ending else pause)
            if lane.room(size):
                held = lane is self._storing and at <= now and not self._store_may_begin(now)[0]
                pauses.append((self._held_until(now) if held else at) - now)
        pause = min(pauses)
        return None if pause == math.inf else max(0.0, pause)

    @property
    def stores_ready_at(self) -> float:
        """When stores could begin, if their steps are launched by then."""
        return self.stores.ready_at(math.inf, self._piece_bytes)

    @property
    def queued_load_bytes(self) -> int:
        """Bytes of loads that are not copied yet."""
        return self.loads.nbytes + self._loading.nbytes

    @property
    def totals(self) -> tuple[int, int]:
        """Bytes loaded and stored since the start, failed ones included."""
        return self._loading.total, self._storing.total

    @property
    def rates(self) -> tuple[float, float]:
        """Bytes/s of recent loads and stores while there were any, as polls see it (waits included)."""
        return self._loading.rate.value, self._storing.rate.value

    # -- inside ----------------------------------------------------------------------------------------------------

    def _work_at(self, lane: _Lane) -> float:
        """When the lane has work that could begin."""
        if lane is self._storing:
            return self.stores.ready_at(self._launched, self._piece_bytes)
        return -math.inf if self.loads.nbytes else math.inf

    def _follow(self, now: float) -> None:
        """If the memory changed, end the jobs for the old one; copies that run there end there."""
        backing = self._pool.current
        if backing is self._backing:
            return
        self._backing, self._piece_bytes = backing, 1 if backing is None else backing.copier.piece_bytes
        self.on_model_stream = backing is not None and backing.copier.on_model_stream
        instance = None if backing is None else backing.instance
        self.stores.drop(lambda job: job.instance != instance)
        self.loads.cancel(lambda job: job.instance != instance, "the node store was restarted", now)

    def _unusable(self, instance: str) -> str | None:
        if self._backing is None:
            return "the node store's memory is not mapped here"
        if self._backing.instance != instance:
            return "the job is for another instance of the node store"
        return None

    def _issue_load(self) -> bool:
        if not (self.loads.nbytes and self._loading.room(self._piece_bytes)):
            return False
        began = self._clock()
        batch = self.loads.next_batch(self._piece_bytes, self._loading.rate.value, began)
        self._start(self._loading, self._backing.copier.load, batch, batch.after, began)
        return True

    def _issue_store(self) -> bool:
        if not self._storing.room(self._piece_bytes):
            return False
        began = self._clock()
        may_begin, stream = self._store_may_begin(began)
        batch = self.stores.next_batch(self._launched, self._piece_bytes, began) if may_begin else None
        if batch is None:
            return False
        # A later event if its own is not kept any more; None for blocks that were written before any step.
        event = next((event for step, event in self._step_events if step >= batch.after_step), None)
        store = self._backing.copier.store
        self._start(self._storing, store if stream is None else partial(store, stream=stream), batch, event, began)
        return True

    def _store_may_begin(self, now: float) -> tuple[bool, Any | None]:
        """Whether one may, and the model's stream if it is to gather there."""
        if self.model_stream is None or not self.on_model_stream or self._overdue_at() <= now:
            return True, None
        may = self._quiet_at() <= now and self._backing.copier.free_pieces(self.model_stream) > 0
        return may, self.model_stream

    def _held_until(self, now: float) -> float:
        quiet = self._quiet_at()
        return min(self._overdue_at(), quiet if quiet > now else math.inf)

    def _quiet_at(self) -> float:
        """When the last step will have ended so long ago that stores need not wait for another."""
        step, ended = self._step_ends[-1] if self._step_ends else (-1, -math.inf)
        return ended + QUIET_SECONDS if step == self._launched and not self._behind_step else -math.inf

    def _overdue_at(self) -> float:
        """When the oldest store will have waited for too long; infinity if its step has not ended."""
        step = self.stores.oldest_step()
        if step is None or not self._step_ends or self._step_ends[-1][0] < step:
            return math.inf
        at = bisect.bisect_left(self._step_ends, step, key=lambda each: each[0])
        return self._step_ends[at][1] + MODEL_STREAM_SECONDS

    def _note_step_ends(self, now: float) -> None:
        known = self._step_ends[-1][0] if self._step_ends else -1
        for step, event in reversed(self._step_events):
            if step <= known:
                return
            if event is None or event.query():
                self._step_ends.append((step, now))
                return

    def _start(self, lane: _Lane, copy: Callable[..., Copy], batch: CopyBatch, event: Any, began: float) -> None:
        call = _Call(batch, self._backing)
        try:
            lane.add(call, began)
            keys = batch.keys ^ self.salts[batch.group]
            call.copy = copy(batch.group, batch.blocks, keys, batch.slots, event)
        except Exception as error:  # a driver's error costs these jobs, not the engine
            lane.drop(call)
            self._failed(lane, batch, error)
            return
        call.backing.users += 1
        self._reap(lane, [call])  # where copies run on this thread, it has ended

    def _reap(self, lane: _Lane, calls: Sequence[_Call]) -> None:
        ended = []  # (call, blocks with a wrong checksum, error)
        for call in calls:
            try:
                if call.copy.done():
                    ended.append((call, call.copy.bad if lane is self._loading else None, None))
            except Exception as error:  # the device failed: no copy will ever end, nor any forward
                ended.append((call, None, error))
        if not ended:
            return
        now, timed = self._clock(), not self._unwatched if lane is self._loading else self._watched
        lane.remove([call for call, *_ in ended], self._work_at(lane) <= now, now, timed)
        for call, bad, error in ended:
            if error is not None:
                self._failed(lane, call.batch, error)
            elif lane is self._loading:
                self.loads.ended(call.batch, bad, now)
            else:
                self.stores.ended(call.batch, ok=True)
            call.backing.give()

    def _failed(self, lane: _Lane, batch: CopyBatch, error: Exception) -> None:
        if lane is self._loading:
            self.loads.ended(batch, None, self._clock(), f"copying from the node store failed: {error}")
        else:
            self.stores.ended(batch, ok=False)
        way = "from" if lane is self._loading else "to"
        if way not in self._logged:
            self._logged.add(way)
            logger.warning(
                "kvtier: store worker: copying %d blocks %s the node store failed (%s: %s); such blocks are recomputed "
                "or not stored (logged once)", len(batch.blocks), way, type(error).__name__, error,
            )
