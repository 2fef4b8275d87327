"""Promotion: looks up the blocks that a request lacks in memory in the secondary tiers, and reads them into the pool.

A *job* serves one prefix. It asks the tiers in their order, each from the end of the previous tier's blocks, and reads
the blocks into slots in chunks, in its turn (``ReadQueue``). Blocks of a chunk are reserved as an engine's are, visible
to all lookups once they are read, and leased until the job ends, so that the prefix stays complete. If several jobs
need a block, the job that reserves it reads it, and the others wait for that read. A job goes on when its request is
gone, but makes room for a new one while it only queues. It does not wait for an unavailable tier: a device may block
its process for hours.
"""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import msgspec

from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.index.block_entry import BlockName
from vllm_kvtier.store.index.index import Index
from vllm_kvtier.store.index.removal_history import RemovalReason
from vllm_kvtier.store.index.types import EXISTS, HASH_BYTES, NO_ROOM, ZERO, BadRequest, GroupShape
from vllm_kvtier.store.protocol import TierQuery
from vllm_kvtier.store.tiers.base import Block, Find, Tier, Want
from vllm_kvtier.store.tiers.promotion_queue import JobKey, PromotionJob, PromotionRead, ReadQueue, Waiter, num_bytes
from vllm_kvtier.wire.reactor import Timer

logger = get_logger(__name__)

# If all memory is in use, the failed reservation blocks the server for milliseconds. No job starts for this multiple of
# that time. If a tenant has its share, nothing is reserved for that tenant.
FULL_BACKOFF = 20.0
MAX_JOBS = 256  # at a time; further lookups get what is in memory
MAX_FINDS = 128  # of one tier at a time: the rest of the jobs is for other tiers

class Promotion:
    """On the server's reactor thread. ``client``: this number and smaller ones identify it in the index, one for each
    shape of a namespace. ``call_later(seconds, call)`` returns a handle that can be cancelled. ``in_flight_bytes``: of
    memory that the reads in flight of one tier may take, beyond by one chunk."""

    def __init__(
        self,
        index: Index,
        tiers: Sequence[Tier],
        client: int,
        call_later: Callable[[float, Callable[[], None]], Timer],
        clock: Callable[[], float] = time.monotonic,
        in_flight_bytes: float = math.inf,
    ):
        self._index, self._tiers, self._call_later, self._clock = index, list(tiers), call_later, clock
        self._next_client = client
        self._clients: dict[tuple[int, tuple[GroupShape, ...]], int] = {}  # by hash block size and groups
        self._jobs: dict[PromotionJob, None] = {}
        self._by_prefix: dict[JobKey, PromotionJob] = {}  # of several jobs the one that starts first
        self._inbound: dict[BlockName, PromotionRead] = {}
        self._queues = {tier: ReadQueue(in_flight_bytes) for tier in self._tiers}
        self._order = itertools.count()
        self._finds = Counter[Tier]()  # without an answer
        self._refused = {tier: Counter[str]() for tier in self._tiers}  # by reason
        self._starting = set[Tier]()  # whose queued reads are being started
        self._full_until: dict[bytes, float] = {}  # end of a backoff, by tenant; b"": memory is full
        for tier in self._tiers:
            tier.on_promotion_status = self._on_status
        self.promoted_blocks = self.promoted_bytes = self.refused_room = self.failed_blocks = 0

    # -- jobs ----------------------------------------------------------------------------------------------------

    def start(self, want: Want, pages_limit: int) -> PromotionJob | None:
        """Start, or join, the job that promotes hash blocks from ``want.start`` on. None: nothing is wanted, no tier is
        usable, or the end of the job is unknown. A job that is over when this returns found nothing readable."""
        if want.start >= want.num_hash_blocks or not any(tier.usable for tier in self._tiers_for(want)):
            return None
        key = (want.namespace_id, want.block_hashes[-HASH_BYTES:], want.nodes, want.skip)
        known = self._by_prefix.get(key)
        if known is not None and known.want.start <= want.start:
            return known
        if self._is_full(b""):
            return None
        if len(self._jobs) >= MAX_JOBS and not self._drop_queued():
            for tier in self._tiers_for(want):
                self._refused[tier]["jobs"] += tier.usable
            return None
        job = self._by_prefix[key] = PromotionJob(key, want, pages_limit, next(self._order))
        self._jobs[job] = None
        self._seek(job, iter(self._tiers_for(want)))
        return job

    def _drop_queued(self) -> bool:
        """End the oldest job without waiters and without a chunk in flight. False: there is none.

        A slow tier has a long queue, with prompts that were computed meanwhile; it must not keep lookups from the
        other tiers."""
        for job in self._jobs:
            own = [read for read in job.waits_for if read.job is job]
            if job.waiters or job.asking is not None or any(r.in_flight or len(r.awaited_by) > 1 for r in own):
                continue
            for read in job.waits_for:
                read.awaited_by.discard(job)
            job.waits_for = set()
            for read in own:
                self._refused[read.tier]["dropped"] += 1
                read.cancel()
                self._end_if_read(read)
            self._end_if_done(job)
            return True
        return False

    def refused(self, tier: Tier) -> dict[str, int]:
        """Promotions that were not made, by reason: "jobs" (the table was full, and the tier was not asked), "finds"
        (the tier had not answered so many others), "dropped" (they were queued, and made room for newer ones)."""
        return {reason: self._refused[tier][reason] for reason in ("jobs", "finds", "dropped")}

    def peek(self, want: Want) -> int:
        """End of the hash blocks that the tiers might have: exact for tiers that answer at once, else all that is
        wanted. Promotes nothing."""
        num_hash_blocks = want.start
        for tier in self._tiers_for(want):
            if num_hash_blocks >= want.num_hash_blocks or not tier.usable:
                continue
            if tier.latency():
                return want.num_hash_blocks
            found: list[Find] = []
            tier.find(replace(want, start=num_hash_blocks), found.append)
            if found[0].num_hash_blocks > num_hash_blocks:
                num_hash_blocks = found[0].num_hash_blocks
                tier.release(found[0])
        return num_hash_blocks

    def expected(self, job: PromotionJob) -> TierQuery:
        """The expected result of a job if a lookup waits for it: the end of its blocks as far as known, the seconds
        until they are in memory, and the seconds until more is known."""
        tiers = {read.tier for read in job.waits_for}  # they count what is in flight themselves
        arrive = max((tier.seconds(self._queues[tier].bytes_ahead(job)) for tier in tiers), default=0.0)
        if job.asking is None:
            return TierQuery(job.num_hash_blocks, arrive, 0.0)
        if job.status is None or job.asked is None:
            return TierQuery(job.num_hash_blocks, arrive, job.asking.latency())
        num_hash_blocks, when = job.status
        answer = max(job.asking.latency(), when - self._clock())
        if num_hash_blocks <= job.num_hash_blocks or job.waits_for:  # the blocks found already come first
            return TierQuery(job.num_hash_blocks, arrive, answer)
        nbytes = num_bytes(_blocks(Find(job.asked, num_hash_blocks)))
        return TierQuery(
            num_hash_blocks,
            answer + job.asking.seconds(nbytes),
            0.0 if num_hash_blocks == job.want.num_hash_blocks else answer,
        )

    def wait(self, job: PromotionJob, wait_seconds: float, call: Callable[[], None]) -> Waiter:
        """Call ``call`` when the blocks found are in memory, or cannot be in time, or after ``wait_seconds``; never
        before this returns."""
        if not job.waiters:
            job.order = next(self._order)  # behind those that are waited for already
        waiter = Waiter(job, call, self._clock() + wait_seconds)
        waiter.timer = self._call_later(0.0 if job.over else max(0.0, wait_seconds), waiter.fire)
        return waiter

    def tiers_changed(self) -> None:
        """A tier may be unavailable: the callback for ``Tier.on_change``."""
        lost = [(name, read) for name, read in self._inbound.items() if not read.tier.usable]
        for name, read in lost:
            del self._inbound[name]
            self._index.abandon(self._client(read.find.want), name, RemovalReason.UNREAD)
        for job in list(self._jobs):
            for read in [read for read in job.waits_for if not read.tier.usable]:
                read.cancel()
                self._end_waits(read)
                self._end_if_read(read)
            if job.asking is not None and not job.asking.usable:
                self._seek(job, job.next_tiers)

    @property
    def left_bytes(self) -> int:
        """Bytes found that no read has begun yet."""
        return sum(queue.left_bytes for queue in self._queues.values())

    def __len__(self) -> int:
        return len(self._jobs)

    # -- finding -------------------------------------------------------------------------------------------------

    def _seek(self, job: PromotionJob, tiers: Iterable[Tier]) -> None:
        """Ask the next tier for the blocks after those found so far."""
        want = job.want
        for tier in tiers:
            if job.num_hash_blocks >= want.num_hash_blocks:
                break
            if not tier.usable:
                continue
            if self._finds[tier] >= MAX_FINDS:
                self._refused[tier]["finds"] += 1
                continue
            job.asking, job.next_tiers = tier, tiers
            job.asked = replace(want, start=job.num_hash_blocks)
            self._finds[tier] += 1
            tier.find(job.asked, partial(self._found, job, tier))
            return
        job.asking = job.asked = None
        self._end_if_done(job)
        if not job.over:
            self._end_vain_waits(job)

    def _on_status(self, want: Want, num_hash_blocks: int, seconds: float) -> None:
        job = next((job for job in self._jobs if job.asked is want), None)
        if job is not None and job.asking is not None:
            job.status = num_hash_blocks, self._clock() + seconds
            if num_hash_blocks > job.num_hash_blocks and not job.waits_for:
                self._end_vain_waits(job)

    def _end_vain_waits(self, job: PromotionJob) -> None:
        """Answer the waiters whose wait ends before the blocks are expected."""
        soonest = self._clock() + self.expected(job).seconds
        for waiter in [waiter for waiter in job.waiters if waiter.until < soonest]:
            waiter.fire()

    def _tiers_for(self, want: Want) -> list[Tier]:
        return [tier for tier in self._tiers if tier.name not in want.skip]

    def _found(self, job: PromotionJob, tier: Tier, find: Find) -> None:
        self._finds[tier] -= 1
        if find.want is not job.asked:  # the tier was unavailable meanwhile
            if find.num_hash_blocks > find.want.start:
                tier.release(find)
            return
        job.asked = job.status = None
        if find.num_hash_blocks > find.want.start:
            job.num_hash_blocks = find.num_hash_blocks
            self._begin(job, tier, find)
        self._seek(job, job.next_tiers)

    def _begin(self, job: PromotionJob, tier: Tier, find: Find) -> None:
        read = PromotionRead(job, tier, find, _blocks(find))
        job.waits_for.add(read)
        read.awaited_by.add(job)
        self._queues[tier].add(read)
        self._go_on(tier)

    # -- reading -------------------------------------------------------------------------------------------------

    def _go_on(self, tier: Tier) -> None:
        """Start reads, those first in the queue first."""
        if tier in self._starting:  # a read ended at once; a call for each would exceed the recursion limit
            return
        self._starting.add(tier)
        try:
            while (read := self._queues[tier].next()) is not None:
                blocks = self._reserve(read, read.take())
                if blocks:
                    read.in_flight += 1
                    self._queues[tier].begin(read, num_bytes(blocks))
                    tier.read(read.find, blocks, partial(self._arrived, read, blocks))
                self._end_if_read(read)
        finally:
            self._starting.remove(tier)

    def _end_if_read(self, read: PromotionRead) -> None:
        if not (read.rest or read.in_flight or read.over):
            read.over = True
            read.tier.release(read.find)
            self._end_waits(read)

    def _reserve(self, read: PromotionRead, chunk: list[Block]) -> list[Block]:
        """Reserve slots for a chunk. Returns the blocks to read; other jobs read the rest, or there is no room."""
        slots: list[int] = []
        for tenant, some in groupby(chunk, lambda block: read.tier.tenant_of(*block.name)):
            slots += self._slots(read, tenant, list(some))
        got = []
        for block, slot in zip(chunk, slots, strict=True):
            if slot > 0:
                got.append(msgspec.structs.replace(block, slot=slot))
                self._inbound[block.name] = read
                continue
            if slot == EXISTS:
                other = self._inbound.get(block.name)
                if other is not None and other is not read:
                    other.awaited_by.add(read.job)
                    read.job.waits_for.add(other)
            elif read.rest:  # no room, or its parent was evicted: the blocks after it would be useless
                self.refused_room += 1
                read.cancel()
        return got

    def _slots(self, read: PromotionRead, tenant: bytes, blocks: list[Block]) -> list[int]:
        """``Index.reserve`` for blocks of one tenant."""
        if tenant and self._is_full(tenant):
            return [NO_ROOM] * len(blocks)
        began, want = self._clock(), read.find.want
        steps = [shape.hash_blocks_per_block for shape in want.shapes]
        # The blocks before these may be in the engine's cache only, or be another read's that has not reserved them.
        first = {i for i, block in enumerate(blocks) if block.end_hash_block - steps[block.group] <= want.start}
        try:
            slots = self._index.reserve(
                self._client(want),
                want.namespace_id,
                tenant,
                [b.group for b in blocks],
                b"".join(b.hash for b in blocks),
                b"".join(b.parent for b in blocks),
                read.job.pages_limit,
                forever=True,  # the tier may write to them for as long as its read takes
                orphans=first,
            )
        except BadRequest as error:  # the namespace was cleared, and an engine with other groups uses it now
            logger.warning("kvtier: promotion: blocks are not promoted (%s)", error)
            return [NO_ROOM] * len(blocks)
        if slots[-1] == NO_ROOM:
            now = self._clock()
            self._full_until = {each: until for each, until in self._full_until.items() if now < until}
            full = tenant if self._index.exceeds_share(tenant, blocks[-1].pages) else b""
            self._full_until[full] = now + FULL_BACKOFF * (now - began)
        return slots

    def _is_full(self, tenant: bytes) -> bool:
        return self._clock() < self._full_until.get(tenant, 0.0)

    def _arrived(self, read: PromotionRead, blocks: list[Block], good: list[bool]) -> None:
        client = self._client(read.find.want)
        right = [block for block, ok in zip(blocks, good, strict=True) if ok]
        wrong = [block for block, ok in zip(blocks, good, strict=True) if not ok]
        for block in blocks:
            if self._inbound.get(block.name) is read:  # else the namespace was cleared, and another job reads the block
                del self._inbound[block.name]
        self._index.commit(client, [block.slot for block in right])
        self._index.abort(client, [block.slot for block in wrong], RemovalReason.UNREAD)
        if right and not read.job.over:
            lease, _ = self._index.lease_blocks(client, [block.name for block in right], forever=True)
            if lease:
                read.job.leases.append(lease)
        self.promoted_blocks += len(right)
        self.promoted_bytes += num_bytes(right)
        self.failed_blocks += len(wrong)
        read.in_flight -= 1
        self._queues[read.tier].end(read, num_bytes(blocks))
        if wrong:
            read.cancel()
        self._end_if_read(read)
        self._go_on(read.tier)

    def _end_waits(self, read: PromotionRead) -> None:
        jobs, read.awaited_by = read.awaited_by, set()
        for job in jobs:
            job.waits_for.discard(read)
        for job in jobs:
            self._end_if_done(job)
            if not job.over and not job.waits_for:
                _fire_all(job)  # the blocks found are in memory, and the client decides whether to wait for more

    def _end_if_done(self, job: PromotionJob) -> None:
        if job.over or job.asking is not None or job.waits_for:
            return
        job.over = True
        del self._jobs[job]
        if self._by_prefix.get(job.key) is job:
            del self._by_prefix[job.key]
        _fire_all(job)  # before the release: the waiters' lookups lease the blocks
        client = self._client(job.want)
        for lease in job.leases:
            self._index.release(client, lease)

    def _client(self, want: Want) -> int:
        shape = (want.hash_block_size, tuple(want.shapes))
        client = self._clients.get(shape)
        if client is None:
            client = self._clients[shape] = self._next_client
            self._next_client -= 1
            self._index.connect(client, want.hash_block_size, want.shapes)
        return client


def _fire_all(job: PromotionJob) -> None:
    for waiter in list(job.waiters):
        waiter.fire()


def _blocks(find: Find) -> list[Block]:
    """The blocks to read for a Find, in reverse order of reading: parents after children."""
    want = find.want
    ends = []
    for group, shape in enumerate(want.shapes):
        step = shape.hash_blocks_per_block
        first = shape.first_block(want.hash_block_size, want.start, find.num_hash_blocks)
        ends += [(end, group) for end in range((first + 1) * step, find.num_hash_blocks + 1, step)]
    ends.sort(reverse=True)
    blocks = []
    for end, group in ends:
        shape = want.shapes[group]
        before = (end - shape.hash_blocks_per_block) * HASH_BYTES
        parent = want.block_hashes[before - HASH_BYTES : before] if before and shape.cache_kind.whole_prefix else ZERO
        name = want.block_hashes[(end - 1) * HASH_BYTES : end * HASH_BYTES]
        blocks.append(Block(want.namespace_id, group, name, parent, b"", 0, shape.slot_pages, end))
    return blocks
