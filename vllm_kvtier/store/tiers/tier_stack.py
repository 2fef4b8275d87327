"""The secondary tiers behind the server's memory, as one object."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

from vllm_kvtier.store.eviction import DEFAULT_POLICY, POLICIES
from vllm_kvtier.store.index.index import Index
from vllm_kvtier.store.index.types import BadRequest, Found
from vllm_kvtier.store.launcher import run_module
from vllm_kvtier.store.memory.memory_limits import memory_limits, parse_bytes
from vllm_kvtier.store.memory.pool_memory import PoolMemory
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.protocol import TierQuery
from vllm_kvtier.store.tiers.admission import Admission, admission
from vllm_kvtier.store.tiers.base import Tier, TierCounts, Want
from vllm_kvtier.store.tiers.content_tier import REMEMBERED_BYTES
from vllm_kvtier.store.tiers.demotion import Demotion, DemotionLimits
from vllm_kvtier.store.tiers.disk.block_limit import TABLE_BYTES
from vllm_kvtier.store.tiers.disk.tier import DiskTier
from vllm_kvtier.store.tiers.mooncake.options import MooncakeOptions
from vllm_kvtier.store.tiers.mooncake.tier import MooncakeTier
from vllm_kvtier.store.tiers.nodes.lease_table import NodeLeaseTable
from vllm_kvtier.store.tiers.nodes.tier import NodesTier
from vllm_kvtier.store.tiers.objects.object_names import store_digest
from vllm_kvtier.store.tiers.objects.tier import ObjectTier
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.tier_process import TierContext
from vllm_kvtier.store.tiers.promotion import Promotion
from vllm_kvtier.store.tiers.promotion_queue import Waiter
from vllm_kvtier.store.tiers.read_time import Durations
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.slots import PAGE

# Client numbers in the index; connections count up from 1, promotion and leases count down.
PROMOTION, DEMOTION, LEASES = -1, -1_000_000, -1_000_001

AHEAD_SHARE = 0.5  # of the memory, for promotions of requests that will come


class TierStack:
    """On the server's reactor thread. ``tiers``: nearest first."""

    def __init__(self, index: Index, tiers: list[Tier], demotion: Demotion | None, promotion: Promotion):
        self._index, self._tiers = index, tiers
        self._demotion, self._promotion = demotion, promotion
        self._waiting: dict[int, set[Waiter]] = {}  # by client
        self._stopped = False
        if demotion is not None:
            index.watches.append(demotion)
            if index.removal_history is not None:
                index.removal_history.eviction_reason = demotion.removal_reason
        for tier in tiers:
            tier.on_change = self._tiers_changed

    @property
    def names(self) -> list[str]:
        return [tier.name for tier in self._tiers]

    @property
    def only_named(self) -> list[str]:
        """Names of those that find blocks only for lookups that name other nodes."""
        return [tier.name for tier in self._tiers if tier.only_named]

    @property
    def all(self) -> list[Tier]:
        """Nearest first."""
        return list(self._tiers)

    @property
    def leases_granted(self) -> int:
        """Leases of this memory that other nodes got, since the start."""
        return sum(tier.leases_granted for tier in self._tiers)

    def start(self) -> None:
        for tier in self._tiers:
            if not tier.pins_pool:
                tier.start()

    def pool_committed(self) -> None:
        """All of the pool that can be is committed. Idempotent."""
        if self._stopped:  # the server's last pieces of memory
            return
        for tier in self._tiers:
            if tier.pins_pool:
                tier.start()
            else:
                tier.pool_committed()

    def stop(self) -> None:
        self._stopped = True
        for tier in self._tiers:
            tier.stop()

    def lookup(
        self,
        client: int,
        want: Want,
        pages_limit: int,
        wait_seconds: float,
        answer: Callable[[Found, TierQuery | None], None],
    ) -> None:
        """Look up ``want.block_hashes`` from ``want.start`` in the index, and promote the rest from the tiers.

        ``answer(found, more)`` is called once: at once, or within ``wait_seconds`` if more is being promoted; not at
        all if the client disconnects first. ``more`` None: nothing more is expected.
        """

        def look() -> Found:
            return self._index.lookup(client, want.namespace_id, want.block_hashes, want.start, pages_limit)

        found = look()
        job = self._promotion.start(replace(want, start=found.num_hash_blocks), pages_limit)
        if job is None or (not job.waits_for and job.asking is None):
            if job is not None and job.num_hash_blocks > found.num_hash_blocks:  # another job had promoted it
                self._index.release(client, found.lease)
                found = look()
            answer(found, None)
            return
        if wait_seconds <= 0:
            answer(found, self._promotion.expected(job))
            return

        def over() -> None:
            waiting.discard(waiter)
            if found.lease:
                self._index.release(client, found.lease)
            try:
                again = look()
            except BadRequest:  # the namespace was cleared, and an engine with other groups uses it now
                again = Found(0, want.start, [[] for _ in want.shapes])
            more = not job.over and (job.asking is not None or job.num_hash_blocks > again.num_hash_blocks)
            answer(again, self._promotion.expected(job) if more else None)

        waiting = self._waiting.setdefault(client, set())
        waiter = self._promotion.wait(job, wait_seconds, over)
        waiting.add(waiter)

    def prefetch(self, want: Want, pages_limit: int) -> None:
        """Promote the blocks of a request that will come, unless so many are to be promoted already that the first
        would be evicted before their requests' turn. Leases nothing to a client."""
        if self._promotion.left_bytes > AHEAD_SHARE * self._index.stats().pool_pages * PAGE:
            return
        num_hash_blocks = self._index.reach(want.namespace_id, want.block_hashes, 0, pages_limit)
        self._promotion.start(replace(want, start=num_hash_blocks), pages_limit)

    def peek(self, want: Want) -> int:
        """End of the hash blocks that the tiers might have from ``want.start`` on. Promotes nothing."""
        return self._promotion.peek(want)

    def remove_client(self, client: int) -> None:
        """The client disconnected: cancel its waits. Its promotions go on."""
        for waiter in self._waiting.pop(client, ()):
            waiter.cancel()

    def _tiers_changed(self) -> None:
        if self._demotion is not None:
            self._demotion.tiers_changed()
        self._promotion.tiers_changed()

    def discard(self, namespace_id: bytes, group: int, block_hash: bytes) -> None:
        for tier in self._tiers:
            tier.discard(namespace_id, group, block_hash)

    def clear_in_steps(self, namespace_id: bytes | None) -> Iterator[None]:
        for tier in self._tiers:
            yield from tier.clear_in_steps(namespace_id)

    def clear(self, namespace_id: bytes | None) -> None:
        for tier in self._tiers:
            tier.clear(namespace_id)

    def when_recorded(self, done: Callable[[str], None]) -> None:
        """As a tier's, for all of them; the reason names the tiers."""
        waiting, reasons = {tier.name for tier in self._tiers}, list[str]()

        def recorded(name: str, reason: str) -> None:
            waiting.discard(name)
            reasons.extend([f"{name} tier: {reason}"] if reason else [])
            if not waiting:
                done("; ".join(reasons))

        if not self._tiers:
            done("")
        for tier in self._tiers:
            tier.when_recorded(functools.partial(recorded, tier.name))

    def durations(self) -> dict[tuple[str, str], Durations]:
        """Response times of the tier processes, by tier and kind of request: a snapshot."""
        return {(tier.name, kind): d.copy() for tier in self._tiers for kind, d in tier.durations.items()}

    def counts(self) -> list[TierCounts]:
        """Nearest first; ``extra`` includes the counts of demotion and promotion."""
        lanes = self._demotion.stats() if self._demotion is not None else {}
        counts = [tier.counts() for tier in self._tiers]
        for tier, each in zip(self._tiers, counts, strict=True):
            refused = {f"refused_{reason}": count for reason, count in self._promotion.refused(tier).items()}
            each.extra = {**each.extra, **lanes.get(each.name, {}), **refused}
        return counts


def bytes_beside_pool(options: StoreOptions) -> dict[str, int]:
    """Memory that the tiers of these options take beside the pool once they are full, by what it is: Mooncake's
    segment, what tiers of blocks named by content remember, and the tables of a disk with blocks of 3 MB (for more
    of them see ``BlockLimit``). Raises ConfigError for invalid options."""
    tables = (bool(options.mooncake_master) + bool(options.object_url)) * REMEMBERED_BYTES
    if options.disk_path:
        tables += parse_bytes(options.disk_size, "store option disk_size") // PAGE * TABLE_BYTES
    segment = MooncakeOptions.parse(options.named("mooncake_")).segment_bytes if options.mooncake_master else 0
    beside = {"mooncake_segment": segment, "tables of its tiers": tables}
    return {what: nbytes for what, nbytes in beside.items() if nbytes}


def open_tiers(
    options: StoreOptions, index: Index, memory: PoolMemory, reactor: Reactor, tick: Callable[[], None]
) -> TierStack:
    """The tiers that the options name, nearest first: disk, other nodes' memory, Mooncake, object store. Not
    started yet.

    ``tick``: the index has a new deadline to watch. Raises ConfigError for invalid options.
    """
    context = TierContext(memory.fd, memory.nbytes, reactor, limit=lambda: memory.usable)
    admissions: dict[Tier, Admission] = {}  # of the tiers that blocks are written to
    tiers: list[Tier] = []
    leases = None
    if options.disk_path:
        disk_options: m.Options = {
            "path": options.disk_path,
            "size": parse_bytes(options.disk_size, "store option disk_size"),
            "preallocate": options.disk_preallocate,
            "backend": options.disk_backend,
            "direct": options.disk_direct,
        }
        policy = POLICIES[options.policy or DEFAULT_POLICY]
        others = sum(bytes_beside_pool(replace(options, disk_path="")).values())

        def free_memory() -> int:
            to_commit = 0 if memory.huge_pages else memory.usable - memory.ready
            return memory_limits().fits - to_commit - others

        disk = DiskTier(context, disk_options, index.shapes, policy, options.tenant_share, free_memory)
        tiers.append(disk)
        admissions[disk] = admission(options.disk_admission, options.disk_min_tokens)
    if options.nodes or options.node_listen or options.cluster_key_file:
        shared = {}
        if options.mooncake_master:
            shared[MooncakeTier.name] = MooncakeOptions.parse(options.named("mooncake_")).cluster_digest
        if options.object_url:
            shared[ObjectTier.name] = store_digest(options.object_url, options.object_endpoint)
        shared = {tier: digest for tier, digest in shared.items() if digest}
        leases = NodeLeaseTable(index, LEASES, tick, shared=shared)
        node_options: m.Options = {
            "nodes": options.nodes,
            "node_listen": options.node_listen,
            "cluster_key_file": options.cluster_key_file,
            "shared": " ".join(shared.values()),
        }
        tiers.append(NodesTier(context, node_options, leases))
    if options.mooncake_master:
        mooncake = MooncakeTier(context, options.named("mooncake_"))
        tiers.append(mooncake)
        admissions[mooncake] = admission(options.mooncake_admission, options.disk_min_tokens)
    if options.object_url:
        object_options: m.Options = {
            "url": options.object_url,
            "endpoint": options.object_endpoint,
            "region": options.object_region,
            "size": parse_bytes(options.object_size, "store option object_size"),
        }
        bucket = ObjectTier(context, object_options)
        tiers.append(bucket)
        admissions[bucket] = admission(options.object_admission, options.disk_min_tokens)
    if tiers:
        run_module(__name__)  # what it asks a Python process is cached: the reactor must not wait for that
    demotion = None
    if admissions:
        # Queued blocks hold no memory and may be evicted before they are written. Blocks that are being written hold
        # memory: an eighth at most, so that promotions find room.
        limits = DemotionLimits(options.disk_queue_mib << 20 or memory.nbytes, memory.nbytes // 8)
        demotion = Demotion(index, admissions, DEMOTION, limits, reactor)
    # Of each tier, too, reads hold an eighth at most: a device that hangs may keep it for hours.
    promotion = Promotion(index, tiers, PROMOTION, reactor.call_later, in_flight_bytes=memory.nbytes // 8)
    stack = TierStack(index, tiers, demotion, promotion)
    if leases is not None:
        leases.secondary_tiers = stack
    return stack
