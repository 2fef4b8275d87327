"""Queues of copies on a worker, and the choice of the next batch. Pure bookkeeping: no clock, no copier, no threads.

A *job* comes from the scheduler side. A *batch* is the work of one call of the copier: blocks of one group, of one or
several jobs. The caller takes batches with ``next_batch`` and reports each with ``ended``. A job ends exactly once:
when none of its blocks waits and none of its batches runs. A job that failed or was cancelled stays until its last
batch has ended, because its blocks and slots are in use until then.

- :class:`StoreQueue`: first come, first served. Jobs of one group are joined into batches in their order; less than a
  batch waits a moment for more.
- :class:`LoadQueue`: the load with the least ``seconds of copying left + time of arrival`` goes first. So the shortest
  load goes first, and a load that has waited for as long as it takes alone is as urgent as an instant load that arrives
  now: after that no new load overtakes it.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_kvtier.jobs.results import LoadResult
from vllm_kvtier.jobs.transfer_jobs import GroupLoad, LoadJob, StoreJob


@dataclass(eq=False)
class CopyBatch:
    """``spans``: the owners of the blocks, in order: (entry of a queue; index in its groups for a load, or its first
    block here for a store; number of blocks)."""

    group: int
    blocks: np.ndarray  # int64[n]
    keys: np.ndarray  # uint64[n]
    slots: np.ndarray  # int64[n]
    nbytes: int
    spans: list[tuple[Any, int, int]]
    after: Any = None  # loads: the event to wait for
    after_step: int = -1  # stores: wait for the forward of this step
    final: bool = False  # a job ends with it


def _copy_batch(group: int, block_bytes: int, parts: list[tuple[Any, int, Any, int, int]]) -> CopyBatch:
    """``parts``: (entry, as in ``spans``, its arrays, first block, one past the last)."""

    def joined(name: str) -> np.ndarray:
        cut = [getattr(arrays, name)[start:stop] for _, _, arrays, start, stop in parts]
        return cut[0] if len(cut) == 1 else np.concatenate(cut)

    spans = [(entry, at, stop - start) for entry, at, _, start, stop in parts]
    nbytes = block_bytes * sum(count for _, _, count in spans)
    return CopyBatch(group, joined("blocks"), joined("keys"), joined("slots"), nbytes, spans)


@dataclass(eq=False)
class _Store:
    job: StoreJob
    number: int  # in order of arrival
    nbytes: int
    since: float
    stop: int  # number of its first blocks that go to batches
    kept: int  # number of its first blocks that are stored when its batches have ended
    issued: int = 0  # blocks given to batches
    running: int = 0  # batches

    @property
    def waits(self) -> bool:
        return self.issued < self.stop


class StoreQueue:
    """Unbounded: the scheduler side bounds the blocks that wait, since it holds them."""

    def __init__(self, block_bytes: Sequence[int], batch_delay: float, timeout: float):
        """``block_bytes``: of one block, by group. ``batch_delay``: seconds for which less than a batch waits for more.
        ``timeout``: seconds after which blocks that have not begun are left out."""
        self._block_bytes, self._batch_delay, self._timeout = list(block_bytes), batch_delay, timeout
        self._stores: dict[int, _Store] = {}
        self._waiting: list[deque[_Store]] = [deque() for _ in block_bytes]
        self._waiting_bytes = [0 for _ in block_bytes]
        self._arrivals = 0
        self._done: list[int] = []
        self._cut: list[tuple[int, int]] = []
        self.nbytes = 0  # of jobs that have not ended

    def ids(self) -> Collection[int]:
        """Ids of jobs that have not ended."""
        return self._stores.keys()

    def add(self, job: StoreJob, now: float) -> None:
        """Queue. Raises ValueError for an id that has not ended."""
        if job.id in self._stores:
            raise ValueError(f"store job {job.id} has not ended yet; ids are never used twice")
        count = len(job.blocks)
        nbytes = count * self._block_bytes[job.group]
        store = _Store(job, self._arrivals, nbytes, now, count, count)
        self._arrivals += 1
        self._stores[job.id] = store
        self.nbytes += nbytes
        if count:
            self._waiting[job.group].append(store)
            self._waiting_bytes[job.group] += nbytes
        else:
            self._finish_if_done(store)

    def ready_at(self, launched: float, nbytes: int) -> float:
        """When ``next_batch`` returns a batch if no job is added before; infinity: never."""
        return min(self._ready_times(launched, nbytes), default=(math.inf, 0))[0]

    def next_batch(self, launched: int, nbytes: int, now: float) -> CopyBatch | None:
        """About ``nbytes`` of the oldest job that may be copied, and of the later jobs of its group; at least one
        block. ``launched``: the last step whose forward was launched."""
        ready = [group for at, group in self._ready_times(launched, nbytes) if at <= now]
        if not ready:
            return None
        group = min(ready, key=lambda g: self._waiting[g][0].number)
        size = self._block_bytes[group]
        room = max(1, nbytes // size)
        parts: list[tuple[Any, int, Any, int, int]] = []
        waiting = self._waiting[group]
        for store in waiting:
            if not room or store.job.after_step > launched:
                break
            start, stop = store.issued, min(store.stop, store.issued + room)
            room -= stop - start
            parts.append((store, start, store.job, start, stop))
        batch = _copy_batch(group, size, parts)
        batch.after_step = max(store.job.after_step for store, *_ in parts)
        batch.final = any(stop == store.stop for store, *_, stop in parts)
        for store, *_, stop in parts:  # last: after an error the blocks still wait
            store.issued = stop
            store.running += 1
            if stop == store.stop:
                waiting.popleft()
        self._waiting_bytes[group] -= batch.nbytes
        return batch

    def oldest_step(self) -> int | None:
        """The step that the oldest job waits for; None: no block waits."""
        oldest = min((waiting[0] for waiting in self._waiting if waiting), key=lambda each: each.number, default=None)
        return None if oldest is None else oldest.job.after_step

    def ended(self, batch: CopyBatch, ok: bool) -> None:
        """A batch ended. If it failed, its jobs' blocks from its first on count as not stored."""
        for store, start, _ in batch.spans:
            store.running -= 1
            if ok:
                self._finish_if_done(store)
            else:
                self._stop(store, store.issued, start)

    def cancel(self, jobs: Iterable[tuple[int, int]]) -> None:
        """Store only (id, number) first blocks of these jobs, or those that are in a batch already."""
        for id, count in jobs:
            store = self._stores.get(id)
            if store is not None:
                self._stop(store, max(store.issued, count))

    def drop(self, which: Callable[[StoreJob], bool]) -> None:
        """Drop these jobs, even those whose last batch runs."""
        for store in [s for s in self._stores.values() if which(s.job)]:
            self._stop(store, store.issued, 0)

    def expire(self, now: float) -> None:
        for waiting in self._waiting:
            while waiting and waiting[0].since + self._timeout <= now:
                self._stop(waiting[0], waiting[0].issued)

    def next_deadline(self) -> float:
        """When ``expire`` may have work; infinity for never."""
        return min((w[0].since + self._timeout for w in self._waiting if w), default=math.inf)

    @property
    def has_results(self) -> bool:
        return bool(self._done or self._cut)

    def take_results(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Since the last call: ids of jobs that were stored, and (id, number of first blocks stored) of those that were
        stored in part."""
        results = self._done, self._cut
        self._done, self._cut = [], []
        return results

    def _ready_times(self, launched: float, nbytes: int) -> list[tuple[float, int]]:
        """(when, group) of the groups whose oldest job may be copied."""
        times = []
        for group, waiting in enumerate(self._waiting):
            if waiting and waiting[0].job.after_step <= launched:
                enough = self._waiting_bytes[group] >= nbytes
                times.append((-math.inf if enough else waiting[0].since + self._batch_delay, group))
        return times

    def _stop(self, store: _Store, stop: int, kept: int | None = None) -> None:
        """Give no block from ``stop`` on to a batch; count none from ``kept`` on as stored."""
        if stop < store.stop:
            group = store.job.group
            self._waiting_bytes[group] -= (store.stop - stop) * self._block_bytes[group]
            store.stop = stop
            if not store.waits:
                self._waiting[group].remove(store)
        store.kept = min(store.kept, store.stop if kept is None else kept)
        self._finish_if_done(store)

    def _finish_if_done(self, store: _Store) -> None:
        if store.running or store.waits or store.job.id not in self._stores:
            return
        del self._stores[store.job.id]
        self.nbytes -= store.nbytes
        if store.kept == len(store.job.blocks):
            self._done.append(store.job.id)
        else:
            self._cut.append((store.job.id, store.kept))


@dataclass(eq=False)
class _Load:
    job: LoadJob
    after: Any
    since: float
    deadline: float
    issued: list[int]  # blocks given to batches, by index in job.groups
    left: int  # bytes that are in no batch yet
    passed: Callable[[], bool] | None  # whether ``after`` has passed; None: it has, or there is no need to ask
    fenced: float = 0.0  # seconds after which it still had not
    running: int = 0  # batches
    _at: int = 0  # no index before it has blocks left
    began: float | None = None
    reason: str = ""
    bytes: int = 0
    bad: set[int] = field(default_factory=set)
    corrupt: list[tuple[int, int]] = field(default_factory=list)

    @property
    def at(self) -> int:
        """The index in job.groups whose blocks go next, if any are left."""
        while self.issued[self._at] >= len(self.job.groups[self._at].blocks):
            self._at += 1
        return self._at

    @property
    def current(self) -> GroupLoad:
        return self.job.groups[self.at]


class LoadQueue:
    def __init__(self, block_bytes: Sequence[int]):
        """``block_bytes``: of one block, by group."""
        self._block_bytes = list(block_bytes)
        self._loads: dict[_Load, None] = {}  # in order of arrival
        self._results: list[LoadResult] = []
        self._next_deadline = math.inf  # a lower bound; computed again when it has passed
        self.nbytes = 0  # in no batch yet; other threads read it too

    def __len__(self) -> int:
        """Loads that have not ended."""
        return len(self._loads)

    def request_ids(self) -> set[str]:
        """Requests of loads that have not ended, or whose results were not taken yet."""
        return {request_id for request_id, _ in self.names()}

    def names(self) -> set[tuple[str, int]]:
        """(request, load_id) of these loads."""
        each = [*(load.job for load in self._loads), *self._results]
        return {(one.request_id, one.load_id) for one in each}

    def add(self, job: LoadJob, after: Any, now: float, passed: Callable[[], bool] | None = None) -> None:
        """``passed``: whether ``after`` has passed, so that the blocks may be written; None: unknown."""
        left = sum(len(group.blocks) * self._block_bytes[group.group] for group in job.groups)
        load = _Load(job, after, now, now + job.timeout, [0] * len(job.groups), left, passed)
        self._loads[load] = None
        self.nbytes += left
        self._next_deadline = min(self._next_deadline, load.deadline)
        self._finish_if_done(load, now)

    def check_events(self, now: float) -> None:
        """Ask which loads' events have not passed, so that their blocks must not be written yet."""
        for load in self._loads:
            if load.passed is not None:
                if load.passed():
                    load.passed = None
                else:
                    load.fenced = now - load.since

    def next_batch(self, nbytes: int, rate: float, now: float) -> CopyBatch | None:
        """About ``nbytes`` of the first load, at least one block, filled up with loads at the same group behind the
        same event. ``rate``: bytes/s of loads, to compare size with age."""
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
        batch = _copy_batch(group, size, parts)
        batch.after, batch.final = first.after, final
        for load, at, _, start, stop in parts:  # last: after an error the blocks still wait
            self._dequeue(load, at, stop - start)
            load.running += 1
            load.began = now if load.began is None else load.began
        return batch

    def ended(self, batch: CopyBatch, bad: np.ndarray | None, now: float, reason: str = "") -> None:
        """A batch ended; ``bad``: bool[n], True where the checksum is wrong. None: all of it failed for ``reason``, and
        the rest of its loads is not tried."""
        start = 0
        for load, at, count in batch.spans:
            load.running -= 1
            load.bytes += count * self._block_bytes[batch.group]
            blocks = batch.blocks[start : start + count]
            if bad is None:
                load.bad.update(blocks.tolist())
                self._fail(load, reason)
            elif (wrong := np.flatnonzero(bad[start : start + count])).size:
                load.bad.update(blocks[wrong].tolist())
                load.corrupt += [(batch.group, slot) for slot in batch.slots[start : start + count][wrong].tolist()]
                # After a block that must be recomputed, vLLM recomputes this group's blocks too.
                self._skip(load, at)
            self._finish_if_done(load, now)
            start += count

    def cancel(self, which: Callable[[LoadJob], bool], reason: str, now: float) -> None:
        """Begin no more of these loads; they end as failed when their running batches have ended."""
        for load in [load for load in self._loads if which(load.job)]:
            self._fail(load, reason)
            self._finish_if_done(load, now)

    def expire(self, now: float) -> None:
        if now < self._next_deadline:
            return
        for load in [load for load in self._loads if load.left and load.deadline <= now]:
            self._fail(load, f"the load did not end within {load.job.timeout:g} s")
            self._finish_if_done(load, now)
        self._next_deadline = min((load.deadline for load in self._loads if load.left), default=math.inf)

    def next_deadline(self) -> float:
        """When ``expire`` may have work; infinity for never."""
        return self._next_deadline if self.nbytes else math.inf

    @property
    def has_results(self) -> bool:
        return bool(self._results)

    def untime_results(self) -> None:
        """These loads ended before the first poll: their seconds are upper bounds."""
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
        """Load no more of this group."""
        skipped = load.job.groups[at].blocks[load.issued[at] :].tolist()
        load.bad.update(skipped)
        self._dequeue(load, at, len(skipped))

    def _dequeue(self, load: _Load, at: int, count: int) -> None:
        """The next ``count`` blocks of this group wait no longer."""
        nbytes = count * self._block_bytes[load.job.groups[at].group]
        load.issued[at] += count
        load.left -= nbytes
        self.nbytes -= nbytes

    def _fail(self, load: _Load, reason: str) -> None:
        load.reason = load.reason or reason
        for at in range(len(load.job.groups)):
            self._skip(load, at)

    def _finish_if_done(self, load: _Load, now: float) -> None:
        if load.running or load.left or load not in self._loads:
            return
        del self._loads[load]
        if not load.bad:
            reason = ""  # cancelled or late, but all of it was under way and arrived
        elif load.corrupt and not load.reason:
            total = sum(len(g.blocks) for g in load.job.groups)
            reason = f"{len(load.corrupt)} of {total} blocks from the node store have a wrong checksum"
        else:
            reason = load.reason
        queued = (load.began if load.began is not None else now) - load.since
        job, seconds = load.job, now - load.since
        self._results.append(
            LoadResult(
                job.request_id, load.bad, reason, load.bytes, seconds, queued, load.corrupt, load_id=job.load_id,
                fenced=load.fenced,
            )
        )


def _urgency(load: _Load, rate: float) -> float:
    return load.left / rate + load.since
