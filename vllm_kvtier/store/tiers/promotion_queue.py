"""The reads of promotions from one tier: in which order they go on, and what is ahead of a job.

Reads that lookups wait for come first, in the order in which the waits began, then the others in the order of their
jobs. Of either kind, reads with at most a chunk left come before the rest, so that a short prompt does not wait for a
long one. The first read takes all that its source may have in flight: prompts are complete one after the other, the
first as early as it can be. Only short ones that come later prolong a wait.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.tiers.base import Block, Find, Tier, Want
from vllm_kvtier.wire.reactor import Timer
from vllm_kvtier.wire.slots import PAGE

logger = get_logger(__name__)

# Large enough for the full rate of a disk or a network. Small enough that a prompt that a lookup waits for can go
# between, and that most bytes read before a wait ends are complete blocks.
CHUNK_BYTES = 32 << 20
CHUNK_BLOCKS = 256
CHUNKS_IN_FLIGHT = 2  # of one source: the tier has the next one when it ends the first

JobKey = tuple[bytes, bytes, tuple[str, ...], tuple[str, ...]]


class Waiter:
    """A call at the end of a job or at ``until``; ``cancel`` it if the client disconnects."""

    __slots__ = ("_call", "_job", "timer", "until")

    def __init__(self, job: "PromotionJob", call: Callable[[], None], until: float):
        self._job, self._call, self.until = job, call, until
        self.timer: Timer | None = None
        job.waiters[self] = None

    def fire(self) -> None:
        if self not in self._job.waiters:
            return
        self.cancel()
        try:
            self._call()
        except Exception:  # it costs this lookup its answer; the job must end, and with it its leases
            logger.exception("kvtier: promotion: unexpected error in the answer to a lookup")

    def cancel(self) -> None:
        self._job.waiters.pop(self, None)
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class PromotionJob:
    """``order``: among the jobs that are waited for, or among the others. ``num_hash_blocks``: end of the blocks found
    so far. ``asking``: the tier whose ``find`` of ``asked`` is running. ``next_tiers``: to be asked after it.
    ``status``: (end, time) that this tier expects of its answer, if it has reported that."""

    def __init__(self, key: JobKey, want: Want, pages_limit: int, order: int):
        self.key, self.want, self.pages_limit, self.order = key, want, pages_limit, order
        self.num_hash_blocks = want.start
        self.asking: Tier | None = None
        self.asked: Want | None = None
        self.next_tiers: Iterable[Tier] = ()
        self.status: tuple[int, float] | None = None
        self.waits_for: set[PromotionRead] = set()  # its own, and other jobs' reads of its blocks
        self.waiters: dict[Waiter, None] = {}
        self.leases: list[int] = []  # on the blocks read
        self.over = False


class PromotionRead:
    """The read of one tier's blocks for one job."""

    def __init__(self, job: PromotionJob, tier: Tier, find: Find, blocks: list[Block]):
        self.job, self.tier, self.find = job, tier, find
        self.rest = blocks  # not reserved yet, last block first
        self.rest_bytes = num_bytes(blocks)
        self.in_flight = 0  # chunks
        self.over = False
        self.awaited_by: set[PromotionJob] = set()

    def rank(self, waiting: bool = False) -> tuple[bool, bool, float]:
        """Its place in the order, the smallest first. ``waiting``: if a wait for it began now."""
        orders = [job.order for job in self.awaited_by if job.waiters]
        waiting = waiting or bool(orders)
        if not waiting:
            orders = [job.order for job in self.awaited_by]
        return not waiting, self.rest_bytes > CHUNK_BYTES, min(orders) if orders else math.inf

    def take(self) -> list[Block]:
        """Take the next chunk off ``rest``."""
        taken, pages = list[Block](), 0
        while self.rest and len(taken) < CHUNK_BLOCKS:
            if taken and (pages + self.rest[-1].pages) * PAGE > CHUNK_BYTES:
                break
            taken.append(self.rest.pop())
            pages += taken[-1].pages
        self.rest_bytes -= pages * PAGE
        return taken

    def cancel(self) -> None:
        """Read no more than what is in flight."""
        self.rest, self.rest_bytes = [], 0


class ReadQueue:
    """``max_in_flight``: bytes of all sources that may be in flight, beyond by a chunk. Those of one source are bounded
    by ``CHUNKS_IN_FLIGHT``, so that one that hangs delays no other."""

    def __init__(self, max_in_flight: float):
        self._max_in_flight = max_in_flight
        self._in_flight = Counter[str]()  # bytes, by source
        self._reads: dict[PromotionRead, None] = {}

    def add(self, read: PromotionRead) -> None:
        self._reads[read] = None

    def next(self) -> PromotionRead | None:
        """The read that takes the next chunk; None: there is none, or enough is in flight."""
        for read in [read for read in self._reads if not read.rest]:
            del self._reads[read]
        if self._in_flight.total() >= self._max_in_flight:
            return None
        full = {source for source, nbytes in self._in_flight.items() if nbytes >= CHUNKS_IN_FLIGHT * CHUNK_BYTES}
        free = [read for read in self._reads if read.find.source not in full]
        return min(free, key=PromotionRead.rank, default=None)

    def begin(self, read: PromotionRead, nbytes: int) -> None:
        self._in_flight[read.find.source] += nbytes

    def end(self, read: PromotionRead, nbytes: int) -> None:
        self._in_flight[read.find.source] -= nbytes
        self._in_flight = +self._in_flight

    @property
    def left_bytes(self) -> int:
        return sum(read.rest_bytes for read in self._reads)

    def bytes_ahead(self, job: PromotionJob) -> int:
        """Bytes not yet in flight until the blocks that a job waits for are read, if a lookup waits for it."""
        own = job.waits_for & self._reads.keys()
        last = {read.find.source: (False, False, -1.0) for read in own}
        for read in own:
            last[read.find.source] = max(last[read.find.source], read.rank(waiting=True))
        return sum(
            read.rest_bytes
            for read in self._reads
            if read in own or (read.find.source in last and read.rank() < last[read.find.source])
        )


def num_bytes(blocks: Sequence[Block]) -> int:
    return sum(block.pages for block in blocks) * PAGE
