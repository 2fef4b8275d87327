"""Reads from other nodes' pools into memory of ours: cut into transfers, a few at a time, and answered when nothing of
them can arrive any more. A store's mover reads into the store's pool so, an engine's worker into a ring of its own.

A read that failed, or did not come on, condemns the reader (``agent`` says why): nothing new begins with it, what
others are reading may end within a while, then it is closed, the failed reads are answered, and a new one is made.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.lower.nodes.agent import Pool, Reader, runs

logger = get_logger(__name__)

TRANSFER_BYTES = 8 << 20  # of one transfer: where copying it takes the processor, 2 ms of that
IN_FLIGHT = 4  # transfers of one source
STALL_SECONDS = 4.0  # in which no transfer of a source ends: it does not come on
GRACE_SECONDS = 2.0  # for others' transfers when the reader is condemned
MOST_SECONDS = 60.0  # of one read, from when it was asked for


class Source(Protocol):
    """Whose pool is read: one object a connection, compared by identity. ``agent``: of NIXL, "" if that is not known
    yet; ``base``: address of the pool there; ``generation``: of ``metadata``, never the same for another."""

    @property
    def agent(self) -> str: ...
    @property
    def base(self) -> int: ...
    @property
    def metadata(self) -> bytes: ...
    @property
    def generation(self) -> int: ...


@dataclass(slots=True, eq=False)
class Job:
    """One read. ``tag``: by which the reader's user knows it; ``good``: of its blocks, so far."""

    tag: Any
    source: Source
    good: list[bool]
    rows: deque[tuple[np.ndarray, list[int]]]  # (near, far, bytes) of each transfer that has not begun; its blocks
    started: float
    running: int = 0
    error: str = ""


@dataclass(slots=True, eq=False)
class Running:
    handle: Any
    job: Job
    blocks: list[int]


@dataclass(slots=True, eq=False)
class Queue:
    """Of one source."""

    jobs: deque[Job] = field(default_factory=deque)
    running: list[Running] = field(default_factory=list)
    last_end: float = 0.0


class Reads:
    """make_reader: a new one. on_done(job, seconds): nothing of it arrives any more. on_broken(source, reason): it is
    to be closed. on_stuck(reason): the memory of a failed read cannot be had back before this process ends; what
    failed is never answered, and nothing may be started again. on_failed(job): it has, and is not over yet.
    ``transfer``: bytes of one, unless a block is longer."""

    def __init__(
        self,
        pool: Pool,
        make_reader: Callable[[str], Reader],
        on_done: Callable[[Job, float], None],
        on_broken: Callable[[Source, str], None],
        on_stuck: Callable[[str], None],
        on_failed: Callable[[Job], None] = lambda job: None,
        transfer: int = TRANSFER_BYTES,
    ):
        self._pool, self._make_reader, self._transfer = pool, make_reader, transfer
        self._on_done, self._on_broken, self._on_stuck = on_done, on_broken, on_stuck
        self._on_failed = on_failed
        self._names = itertools.count(1)
        self._reader: Reader | None = None
        self._condemned_until = 0.0
        self._failed: list[Job] = []  # to be answered when their reader is gone
        self._queues: dict[Source, Queue] = {}
        self._strangers: list[str] = []  # agents to be forgotten
        self.replaced = 0

    @property
    def active(self) -> bool:
        return bool(self._queues or self._failed)

    def open(self) -> None:
        """Make a reader now, so that what is missing is known. Raises KVTierError."""
        if self._reader is None:
            self._reader = self._make_reader(f"reader {next(self._names)}")

    def start(self, tag: Any, source: Source, near: np.ndarray, far: np.ndarray, sizes: np.ndarray) -> None:
        """Read blocks of ``sizes`` bytes at ``far`` of the source's pool to ``near`` of ours, int64[n] each, in bytes
        from the pool's beginning, where nothing lies: 0 is no place. Begun and ended in ``drive``."""
        usable = np.flatnonzero((far > 0) & (near > 0) & (sizes > 0) & (near + sizes <= self._pool.nbytes))
        rows, row_of = runs(near[usable], far[usable], sizes[usable], self._transfer)
        batches = _batches(rows, usable, row_of, self._transfer)
        job = Job(tag, source, [False] * len(near), batches, time.monotonic())
        if not len(usable):
            job.error = "the store that was to have these blocks does not have them"
        queue = self._queues.setdefault(source, Queue(last_end=job.started))
        if not queue.jobs:
            queue.last_end = job.started
        queue.jobs.append(job)

    def gone(self, source: Source, reason: str) -> None:
        """Its connection ended: nothing new is read from it."""
        if source in self._queues:
            self._break(source, reason)
        elif source.agent:
            self._strangers.append(source.agent)

    def drive(self) -> bool:
        """One look at everything; whether there is more to do."""
        now = time.monotonic()
        while self._strangers and self._reader is not None and not self._failed:
            self._reader.forget(self._strangers.pop())  # before it is read from again, by a new connection
        for source, queue in list(self._queues.items()):
            if source in self._queues:
                self._advance(source, queue, now)
        if self._failed:
            self._replace_reader(now)
        return self.active

    # -- of one source ------------------------------------------------------------------------------------------

    def _advance(self, source: Source, queue: Queue, now: float) -> None:
        for running in list(queue.running):
            over, error = self._reader.state(running.handle)
            if not over:
                continue
            queue.running.remove(running)
            queue.last_end = now
            self._reader.release(running.handle)
            job = running.job
            job.running -= 1
            if error:
                self._break(source, f"a read failed: {error}", clean=False)
                return
            for block in running.blocks:
                job.good[block] = True
            self._end_if_over(source, queue, job, now)
        if source not in self._queues:
            return
        if queue.running and now - queue.last_end > STALL_SECONDS:
            self._break(source, f"a read did not come on within {STALL_SECONDS:g} s; can its network be reached?")
        elif any(now - job.started > MOST_SECONDS for job in itertools.islice(queue.jobs, 1)):
            self._break(source, f"a read took more than {MOST_SECONDS:g} s")
        elif not self._failed:
            self._begin_more(source, queue, now)

    def _begin_more(self, source: Source, queue: Queue, now: float) -> None:
        for job in list(queue.jobs):
            while job.rows and len(queue.running) < IN_FLIGHT:
                rows, blocks = job.rows.popleft()
                try:
                    handle = self._begin(source, rows)
                except KVTierError as error:
                    self._break(source, str(error))
                    return
                if not queue.running:
                    queue.last_end = now
                queue.running.append(Running(handle, job, blocks))
                job.running += 1
            if not job.rows and not job.running:
                self._end_if_over(source, queue, job, now)
            if len(queue.running) >= IN_FLIGHT:
                return

    def _begin(self, source: Source, rows: np.ndarray) -> Any:
        self.open()
        reader, kind = self._reader, self._reader.kind
        reader.register(set(np.unique(rows[:, 0] // kind.piece).tolist()))
        reader.introduce(source.agent, source.metadata, source.generation)
        near, far, sizes = rows.astype(np.uint64).T
        ours = [near + np.uint64(self._pool.address), sizes, np.full(len(rows), kind.device, np.uint64)]
        theirs = [far + np.uint64(source.base), sizes, np.zeros(len(rows), np.uint64)]
        return reader.begin(source.agent, np.stack(ours, 1), np.stack(theirs, 1))

    def _end_if_over(self, source: Source, queue: Queue, job: Job, now: float) -> None:
        if job.rows or job.running or job not in queue.jobs:
            return
        queue.jobs.remove(job)
        if not queue.jobs:
            del self._queues[source]
        self._on_done(job, now - job.started)

    def _break(self, source: Source, reason: str, clean: bool = True) -> None:
        """All reads from it have failed. Unless nothing can arrive any more, which ``clean`` says of those that are
        over, they are answered when the reader is gone."""
        queue = self._queues.pop(source)
        now = time.monotonic()
        for job in queue.jobs:
            job.error = job.error or reason
        if clean and not queue.running:
            self._strangers.append(source.agent)
            for job in queue.jobs:
                self._on_done(job, now - job.started)
        else:
            if not self._failed:
                self._condemned_until = now + GRACE_SECONDS
            self._failed += queue.jobs
            for running in queue.running:
                self._reader.release(running.handle)
            queue.running.clear()  # whoever holds a handle keeps the agent alive
            for job in queue.jobs:
                self._on_failed(job)
        self._on_broken(source, reason)

    # -- the reader ---------------------------------------------------------------------------------------------

    def _replace_reader(self, now: float) -> None:
        others = [source for source, queue in self._queues.items() if queue.running]
        if others and now < self._condemned_until:
            return
        for source in others:
            self._break(source, "another read did not end, and this one did not in time")
        reader, self._reader = self._reader, None
        self._strangers.clear()
        if reader is not None:
            self.replaced += 1
            if not reader.close():
                self._on_stuck("a read that failed cannot be ended otherwise")
                return
        failed, self._failed = self._failed, []
        for job in failed:
            self._on_done(job, now - job.started)
        for queue in self._queues.values():
            queue.last_end = now


def _batches(
    rows: np.ndarray, blocks: np.ndarray, row_of: np.ndarray, transfer: int
) -> deque[tuple[np.ndarray, list[int]]]:
    """Rows as transfers of about so many bytes, each with the numbers of its blocks."""
    batches: deque[tuple[np.ndarray, list[int]]] = deque()
    if not len(rows):
        return batches
    batch_of = (np.cumsum(rows[:, 2]) - rows[:, 2]) // transfer
    for batch in np.unique(batch_of):
        mine = batch_of == batch
        batches.append((rows[mine], blocks[mine[row_of]].tolist()))
    return batches
