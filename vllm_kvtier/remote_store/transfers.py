"""Reads from other nodes' pools into this store's.

A read is split into transfers, few in flight. It is reported when none of its data can arrive any more. UCX does not
say how far a transfer is, and transfers in flight share the link, so that all may end together. Hence they are sized by
the rate that was measured: in flight is what arrives in 0.1 s, or little. If none ends for seconds, nothing arrives.

A failed or stalled read condemns the reader (``remote_store.nixl_agent`` gives the reason): no new transfer starts, the
transfers of other sources get a grace time, then the reader is closed and replaced, and the failed reads are reported.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.remote_store.lease_client import Peer
from vllm_kvtier.remote_store.nixl_agent import Pool, Reader, runs
from vllm_kvtier.wire.slots import PIECE_BYTES

logger = get_logger(__name__)

TRANSFER_BYTES = 8 << 20  # most of one transfer, unless a block is longer; 2 ms where the CPU copies it
MIN_TRANSFER_BYTES = 1 << 20  # the first ones of a source have so many
TRANSFER_SECONDS = 0.025  # a transfer has what arrives in this time; all in flight cover a round trip of 0.1 s
IN_FLIGHT = 4  # transfers of one source
STALL_SECONDS = 4.0  # a source has stalled if none of its transfers ends within this time
GRACE_SECONDS = 2.0  # for other sources' transfers after the reader is condemned
MAX_READ_SECONDS = 50.0  # of one read, from its request until its last transfer begins


@dataclass(slots=True, eq=False)
class Job:
    """One read. ``tag``: the caller's; ``good``: which blocks have arrived."""

    tag: Any
    source: Peer
    good: list[bool]
    rows: deque[tuple[np.ndarray, list[int]]]  # transfers not started: rows (local, remote, bytes), block numbers
    started: float
    running: int = 0
    error: str = ""


@dataclass(slots=True, eq=False)
class Running:
    """``ahead``: bytes in flight when it began, its own included."""

    handle: Any
    job: Job
    blocks: list[int]
    nbytes: int
    ahead: int
    began: float


@dataclass(slots=True, eq=False)
class Queue:
    """The reads of one source."""

    jobs: deque[Job] = field(default_factory=deque)
    running: list[Running] = field(default_factory=list)
    last_end: float = 0.0

    @property
    def in_flight(self) -> int:
        return sum(running.nbytes for running in self.running)


@dataclass(frozen=True)
class ReadEvents:
    """``on_done(job, seconds)``: no data of the read can arrive any more. ``on_broken(source, reason)``: the connection
    must be closed. ``on_stuck(reason)``: the reader cannot be closed, so the memory of failed reads is lost until this
    process ends; they are never reported, and nothing may be started again."""

    on_done: Callable[[Job, float], None]
    on_broken: Callable[[Peer, str], None]
    on_stuck: Callable[[str], None]


class NodeReads:
    def __init__(
        self,
        pool: Pool,
        make_reader: Callable[[str], Reader],
        events: ReadEvents,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._pool, self._make_reader, self._events = pool, make_reader, events
        self._clock = clock
        self._names = itertools.count(1)
        self._reader: Reader | None = None
        self._condemned_until = 0.0
        self._stuck = False  # a reader could not be closed
        self._failed: list[Job] = []  # to be reported when their reader is closed
        self._queues: dict[Peer, Queue] = {}
        self._rates: dict[Peer, float] = {}  # bytes a second, measured
        self._disconnected: list[str] = []  # agents that the reader must remove

    @property
    def active(self) -> bool:
        return bool(self._queues or self._failed)

    def open(self) -> Reader:
        """The reader, made if there is none. Raises KVTierError."""
        if self._reader is None:
            self._reader = self._make_reader(f"reader {next(self._names)}")
        return self._reader

    def start(self, tag: Any, source: Peer, local: np.ndarray, remote: np.ndarray, sizes: np.ndarray) -> None:
        """Queue a read of blocks of ``sizes`` bytes from ``remote`` in the source's pool to ``local`` in this one:
        int64[n] each, byte offsets; 0 is invalid, because the first page is unused. ``poll`` starts and ends it."""
        usable = np.flatnonzero((remote > 0) & (local > 0) & (sizes > 0) & (local + sizes <= self._pool.nbytes))
        transfer = self._transfer_bytes(source)
        rows, row_of = runs(local[usable], remote[usable], sizes[usable], transfer)
        batches = _batches(rows, usable, row_of, transfer)
        job = Job(tag, source, [False] * len(local), batches, self._clock())
        if not len(usable):
            job.error = "the store that leased these blocks does not have them"
        queue = self._queues.setdefault(source, Queue(last_end=job.started))
        if not queue.jobs:
            queue.last_end = job.started
        queue.jobs.append(job)

    def gone(self, source: Peer, reason: str) -> None:
        """The source's connection ended: its reads fail."""
        self._rates.pop(source, None)
        if source in self._queues:
            self._break(source, reason)
        elif source.agent:
            self._disconnected.append(source.agent)

    def poll(self) -> bool:
        """Advance all reads. Returns whether there is more to do."""
        if self._stuck:
            return False
        now = self._clock()
        if self._reader is None:
            self._disconnected.clear()  # a new reader knows no agent
        elif not self._failed:
            while self._disconnected:
                self._reader.remove_agent(self._disconnected.pop())  # before a new connection reads from the same agent
        for source, queue in list(self._queues.items()):
            if source in self._queues:
                self._advance(source, queue, now)
        if self._failed:
            self._replace_reader(now)
        return self.active and not self._stuck

    # -- of one source ------------------------------------------------------------------------------------------

    def _advance(self, source: Peer, queue: Queue, now: float) -> None:
        for running in list(queue.running):
            reader = self.open()  # it exists while transfers run
            over, error = reader.state(running.handle)
            if not over:
                continue
            queue.running.remove(running)
            queue.last_end = now
            self._measure(source, running.ahead, now - running.began)
            reader.release(running.handle)
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
            self._break(source, f"a read made no progress for {STALL_SECONDS:g} s; check that its network is reachable")
        elif not self._failed:
            self._begin_more(source, queue, now)

    def _measure(self, source: Peer, nbytes: int, seconds: float) -> None:
        """What little arrives soon took a round trip, and the link may be faster."""
        rate = nbytes / max(seconds, 1e-6)
        if seconds > IN_FLIGHT * TRANSFER_SECONDS or rate > self._rates.get(source, 0.0):
            self._rates[source] = rate

    def _transfer_bytes(self, source: Peer) -> int:
        """Of a transfer that begins now, about."""
        return min(TRANSFER_BYTES, max(MIN_TRANSFER_BYTES, int(self._rates.get(source, 0.0) * TRANSFER_SECONDS)))

    def _begin_more(self, source: Peer, queue: Queue, now: float) -> None:
        window = IN_FLIGHT * self._transfer_bytes(source)
        for job in list(queue.jobs):
            if job.rows and now - job.started > MAX_READ_SECONDS:  # the source is slow, but not dead
                job.rows.clear()
                job.error = f"a read took more than {MAX_READ_SECONDS:g} s"
            while job.rows and len(queue.running) < IN_FLIGHT and queue.in_flight < window:
                rows, blocks = job.rows[0]
                try:
                    handle = self._begin(source, rows)
                except KVTierError as error:
                    self._break(source, str(error))
                    return
                if handle is None:
                    return
                job.rows.popleft()
                if not queue.running:
                    queue.last_end = now
                nbytes = int(rows[:, 2].sum())
                queue.running.append(Running(handle, job, blocks, nbytes, queue.in_flight + nbytes, now))
                job.running += 1
            if not job.rows and not job.running:
                self._end_if_over(source, queue, job, now)
            if job.rows:  # enough is in flight
                return

    def _begin(self, source: Peer, rows: np.ndarray) -> Any:
        """The transfer; None: there is more memory to register before it, and the caller tries again later."""
        reader = self.open()
        if reader.register(set(np.unique(rows[:, 0] // PIECE_BYTES).tolist())):
            return None
        reader.add_remote_agent(source.agent, source.metadata, source.generation)
        local, remote, sizes = rows.astype(np.uint64).T
        to = [local + np.uint64(self._pool.address), sizes, np.zeros(len(rows), np.uint64)]
        origin = [remote + np.uint64(source.base), sizes, np.zeros(len(rows), np.uint64)]
        return reader.begin(source.agent, np.stack(to, 1), np.stack(origin, 1))

    def _end_if_over(self, source: Peer, queue: Queue, job: Job, now: float) -> None:
        if job.rows or job.running or job not in queue.jobs:
            return
        queue.jobs.remove(job)
        if not queue.jobs:
            del self._queues[source]
        self._events.on_done(job, now - job.started)

    def _break(self, source: Peer, reason: str, clean: bool = True) -> None:
        """Fail all reads of a source. They are reported at once if no data can arrive: no transfer is running, and
        those that ended were ``clean``. Otherwise they are reported when the reader is closed."""
        queue, now = self._queues.pop(source), self._clock()
        self._rates.pop(source, None)
        for job in queue.jobs:
            job.error = job.error or reason
        if clean and not queue.running:
            self._disconnected.append(source.agent)
            for job in queue.jobs:
                self._events.on_done(job, now - job.started)
        else:
            if not self._failed:
                self._condemned_until = now + GRACE_SECONDS
            self._failed += queue.jobs
            for running in queue.running:
                self.open().release(running.handle)
            queue.running.clear()  # a handle keeps the agent alive
        self._events.on_broken(source, reason)

    # -- the reader ---------------------------------------------------------------------------------------------

    def _replace_reader(self, now: float) -> None:
        others = [source for source, queue in self._queues.items() if queue.running]
        if others and now < self._condemned_until:
            return
        for source in others:
            self._break(source, "the NIXL agent is replaced because another read failed, and this one did not end")
        reader, self._reader = self._reader, None
        self._disconnected.clear()
        if reader is not None and not reader.close():
            self._stuck = True
            self._events.on_stuck("NIXL cannot end a failed read")
            return
        failed, self._failed = self._failed, []
        for job in failed:
            self._events.on_done(job, now - job.started)
        for queue in self._queues.values():
            queue.last_end = now


def _batches(
    rows: np.ndarray, blocks: np.ndarray, row_of: np.ndarray, transfer: int
) -> deque[tuple[np.ndarray, list[int]]]:
    """Group rows into transfers of about ``transfer`` bytes, each with the numbers of its blocks."""
    batches: deque[tuple[np.ndarray, list[int]]] = deque()
    if not len(rows):
        return batches
    batch_of = (np.cumsum(rows[:, 2]) - rows[:, 2]) // transfer
    for batch in np.unique(batch_of):
        mine = batch_of == batch
        batches.append((rows[mine], blocks[mine[row_of]].tolist()))
    return batches
