"""Reads from other nodes' pools into ours: cut into transfers, a few at a time, and answered when nothing of them can
arrive any more.

A read that failed, or did not come on, condemns the reader (``node_agent`` says why): nothing new begins with it, what
others are reading may end within a while, then it is closed, the failed reads are answered, and a new one is made.
"""

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.nodes.agent import Pool, Reader, pieces_of, runs
from vllm_kvtier.store.lower.nodes.peers import Peer
from vllm_kvtier.wire.slots import PAGE

logger = logging.getLogger(__name__)

TRANSFER_PAGES = (8 << 20) // PAGE  # of one transfer: where copying it takes the processor, 2 ms of that
IN_FLIGHT = 4  # transfers of one peer
STALL_SECONDS = 4.0  # in which no transfer of a peer ends: it does not come on
GRACE_SECONDS = 2.0  # for others' transfers when the reader is condemned
MOST_SECONDS = 60.0  # of one read, from when it was asked for


@dataclass(slots=True, eq=False)
class Job:
    """One Read. ``good``: of its moves, so far."""

    message: m.Read
    peer: Peer
    good: list[bool]
    rows: deque[tuple[np.ndarray, list[int]]]  # (near, far, pages) of each transfer that has not begun; its moves
    started: float
    running: int = 0
    error: str = ""


@dataclass(slots=True, eq=False)
class Running:
    handle: Any
    job: Job
    moves: list[int]


@dataclass(slots=True, eq=False)
class Queue:
    """Of one peer."""

    jobs: deque[Job] = field(default_factory=deque)
    running: list[Running] = field(default_factory=list)
    last_end: float = 0.0


class Reads:
    """make_reader: a new one. on_done(job, seconds). on_broken(peer, reason): it is to be closed. on_stuck(reason):
    the process has to end, because the memory of a failed read cannot be had back otherwise."""

    def __init__(
        self,
        pool: Pool,
        make_reader: Callable[[str], Reader],
        on_done: Callable[[Job, float], None],
        on_broken: Callable[[Peer, str], None],
        on_stuck: Callable[[str], None],
    ):
        self._pool, self._make_reader = pool, make_reader
        self._on_done, self._on_broken, self._on_stuck = on_done, on_broken, on_stuck
        self._names = itertools.count(1)
        self._reader: Reader | None = None
        self._condemned_until = 0.0
        self._failed: list[Job] = []  # to be answered when their reader is gone
        self._queues: dict[Peer, Queue] = {}
        self._strangers: list[str] = []  # agents to be forgotten
        self.replaced = 0

    @property
    def active(self) -> bool:
        return bool(self._queues or self._failed)

    def open(self) -> None:
        """Make a reader now, so that what is missing is known. Raises KVTierError."""
        if self._reader is None:
            self._reader = self._make_reader(f"reader {next(self._names)}")

    def start(self, message: m.Read, peer: Peer, far: Sequence[int]) -> None:
        """``far``: the peer's slot of each move, 0 where it has none. Begun and ended in ``drive``."""
        near = np.array([move.slot for move in message.moves], np.int64)
        pages = np.array([move.pages for move in message.moves], np.int64)
        there = np.array(far, np.int64)
        usable = np.flatnonzero((there > 0) & (near > 0) & (pages > 0) & (near + pages <= self._pool.nbytes // PAGE))
        rows, row_of = runs(near[usable], there[usable], pages[usable], TRANSFER_PAGES)
        job = Job(message, peer, [False] * len(message.moves), _batches(rows, usable, row_of), time.monotonic())
        if not len(usable):
            job.error = "the store that was to have these blocks does not have them"
        queue = self._queues.setdefault(peer, Queue(last_end=job.started))
        if not queue.jobs:
            queue.last_end = job.started
        queue.jobs.append(job)

    def gone(self, peer: Peer, reason: str) -> None:
        """Its connection ended: nothing new is read from it."""
        if peer in self._queues:
            self._break(peer, reason)
        elif peer.welcome is not None:
            self._strangers.append(peer.welcome.agent)

    def drive(self) -> bool:
        """One look at everything; whether there is more to do."""
        now = time.monotonic()
        while self._strangers and self._reader is not None and not self._failed:
            self._reader.forget(self._strangers.pop())  # before it is read from again, by a new connection
        for peer, queue in list(self._queues.items()):
            if peer in self._queues:
                self._advance(peer, queue, now)
        if self._failed:
            self._replace_reader(now)
        return self.active

    # -- of one peer --------------------------------------------------------------------------------------------

    def _advance(self, peer: Peer, queue: Queue, now: float) -> None:
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
                self._break(peer, f"a read failed: {error}", clean=False)
                return
            for move in running.moves:
                job.good[move] = True
            self._end_if_over(peer, queue, job, now)
        if peer not in self._queues:
            return
        if queue.running and now - queue.last_end > STALL_SECONDS:
            self._break(peer, f"a read did not come on within {STALL_SECONDS:g} s; can its network be reached?")
        elif any(now - job.started > MOST_SECONDS for job in itertools.islice(queue.jobs, 1)):
            self._break(peer, f"a read took more than {MOST_SECONDS:g} s")
        elif not self._failed:
            self._begin_more(peer, queue, now)

    def _begin_more(self, peer: Peer, queue: Queue, now: float) -> None:
        for job in list(queue.jobs):
            while job.rows and len(queue.running) < IN_FLIGHT:
                rows, moves = job.rows.popleft()
                try:
                    self.open()
                    self._reader.register(pieces_of(rows[:, 0]))
                    self._reader.introduce(peer.welcome.agent, peer.metadata, peer.generation)
                    sizes = (rows[:, 2] * PAGE).astype(np.uint64)
                    zeros = np.zeros(len(rows), np.uint64)
                    near = (rows[:, 0] * PAGE + self._pool.address).astype(np.uint64)
                    far = (rows[:, 1] * PAGE).astype(np.uint64) + np.uint64(peer.welcome.base)
                    handle = self._reader.begin(
                        peer.welcome.agent, np.stack([near, sizes, zeros], 1), np.stack([far, sizes, zeros], 1)
                    )
                except KVTierError as error:
                    self._break(peer, str(error))
                    return
                if not queue.running:
                    queue.last_end = now
                queue.running.append(Running(handle, job, moves))
                job.running += 1
            if not job.rows and not job.running:
                self._end_if_over(peer, queue, job, now)
            if len(queue.running) >= IN_FLIGHT:
                return

    def _end_if_over(self, peer: Peer, queue: Queue, job: Job, now: float) -> None:
        if job.rows or job.running or job not in queue.jobs:
            return
        queue.jobs.remove(job)
        if not queue.jobs:
            del self._queues[peer]
        self._on_done(job, now - job.started)

    def _break(self, peer: Peer, reason: str, clean: bool = True) -> None:
        """All reads from it have failed. Unless nothing can arrive any more, which ``clean`` says of those that are
        over, they are answered when the reader is gone."""
        queue = self._queues.pop(peer)
        now = time.monotonic()
        for job in queue.jobs:
            job.error = job.error or reason
        if clean and not queue.running:
            self._strangers.append(peer.welcome.agent)
            for job in queue.jobs:
                self._on_done(job, now - job.started)
        else:
            if not self._failed:
                self._condemned_until = now + GRACE_SECONDS
            self._failed += queue.jobs
            for running in queue.running:
                self._reader.release(running.handle)
            queue.running.clear()  # whoever holds a handle keeps the agent alive
        self._on_broken(peer, reason)

    # -- the reader ---------------------------------------------------------------------------------------------

    def _replace_reader(self, now: float) -> None:
        others = [peer for peer, queue in self._queues.items() if queue.running]
        if others and now < self._condemned_until:
            return
        for peer in others:
            self._break(peer, "another read did not end, and this one did not in time")
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


def _batches(rows: np.ndarray, moves: np.ndarray, row_of: np.ndarray) -> deque[tuple[np.ndarray, list[int]]]:
    """Rows as transfers of about TRANSFER_PAGES, each with the numbers of its moves."""
    batches: deque[tuple[np.ndarray, list[int]]] = deque()
    if not len(rows):
        return batches
    of_row = np.cumsum(rows[:, 2]) - rows[:, 2]
    batch_of = of_row // TRANSFER_PAGES
    for batch in np.unique(batch_of):
        mine = batch_of == batch
        batches.append((rows[mine], moves[mine[row_of]].tolist()))
    return batches
