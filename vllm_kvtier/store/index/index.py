"""The index: the slot of each block, its leases and reservations, and lookups of prefixes.

A block is RESERVED while a client writes it, then READY, then removed. Removing it by force (wrong checksum, its writer
aborted or died, the namespace was cleared) leaves its descendants listed. A lookup ends at the gap and does not find
them. They are adopted when the block is stored again, or are evicted. Eviction makes no gaps: it takes blocks without
children.

The slot of a removed block is free when it is neither leased nor reserved. Leases and reservations also end by a
deadline; a slow client may then still read or write a slot that holds another block. That is not prevented but
detected: the checksum in each slot is keyed by the block's hash, and by what of the block an engine keeps there.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace

from vllm_kvtier.store.eviction import DEFAULT_POLICY, POLICIES
from vllm_kvtier.store.eviction.base import Policy
from vllm_kvtier.store.index.block_entry import READY, RESERVED, BlockEntry, BlockName, NamespaceBlocks
from vllm_kvtier.store.index.block_table import BlockTable
from vllm_kvtier.store.index.leases import LeaseTable
from vllm_kvtier.store.index.removal_history import RemovalReason
from vllm_kvtier.store.index.types import (
    EXISTS,
    HASH_BYTES,
    NO_PARENT_STORED,
    NO_ROOM,
    ZERO,
    BadRequest,
    Found,
    GroupShape,
    Holding,
    IndexStats,
)
from vllm_kvtier.store.memory.slot_pool import SlotPool

RELEASE_STEP = 1 << 16  # leased blocks released before other messages are handled: some 10 ms


@dataclass(frozen=True)
class IndexLimits:
    """``lease_seconds``, ``reserve_seconds``: deadlines of leases and reservations. ``pin_share``: of the pool, for
    pinned blocks. ``tenant_share``, ``state_share``: see ``SlotAllocator``."""

    lease_seconds: float = 60.0
    reserve_seconds: float = 120.0
    pin_share: float = 0.5
    tenant_share: float = 1.0
    state_share: float = 1.0


class Index(BlockTable):
    """Single-threaded; no I/O. ``client`` is any int that the server gives a connection; ``connect`` comes first.

    policy: makes an eviction policy (``POLICIES[name]``; None: the default). clock: monotonic seconds.
    """

    def __init__(
        self,
        pool: SlotPool,
        policy: Callable[[], Policy] | None,
        clock: Callable[[], float],
        limits: IndexLimits = IndexLimits(),
    ):
        super().__init__(pool, policy or POLICIES[DEFAULT_POLICY], limits.tenant_share, limits.state_share)
        self._pin_share = limits.pin_share
        self._lease_table = LeaseTable(clock, limits.lease_seconds, limits.reserve_seconds)

    # -- clients -------------------------------------------------------------------------------------------------

    def connect(self, client: int, hash_block_size: int, groups: Sequence[GroupShape]) -> None:
        """Add a client. A tool has no ``groups``: its pin and inspect use those of the engines."""
        self._lease_table.connect(client, hash_block_size, groups)

    def disconnect(self, client: int) -> None:
        """Remove a client: its leases end, its reservations are aborted. Unknown clients are ignored."""
        for _ in self.disconnect_in_steps(client):
            pass

    def disconnect_in_steps(self, client: int) -> Iterator[None]:
        """``disconnect``, some ``RELEASE_STEP`` leased blocks at a time. It must ask for nothing meanwhile."""
        gone = self._lease_table.clients.get(client)
        if gone is None:
            return
        self.abort(client, list(gone.reserved), RemovalReason.DIED)
        released = 0
        while gone.leases:
            if released >= RELEASE_STEP:
                released = 0
                yield
                continue  # they may have expired
            released += self.release(client, next(iter(gone.leases)))
        del self._lease_table.clients[client]

    def client_counts(self, client: int) -> tuple[int, int]:
        """(leases, reserved slots) of a client."""
        known = self._lease_table.known(client)
        return len(known.leases), len(known.reserved)

    # -- reading -------------------------------------------------------------------------------------------------

    def lookup(self, client: int, namespace_id: bytes, block_hashes: bytes, start: int, pages_limit: int) -> Found:
        """Find and lease the longest usable prefix from hash block ``start``. Touches it and the blocks before it.

        It ends where blocks of all groups end. Each group has the blocks that its kind needs for such a prefix. Only
        slots that end at or below page ``pages_limit`` count.
        """
        total = len(block_hashes) // HASH_BYTES
        if len(block_hashes) % HASH_BYTES or start > total:
            raise BadRequest(f"lookup of {len(block_hashes)} bytes of hashes from hash block {start}")
        here = self._namespace(client, namespace_id)
        self._stats.lookups += 1
        self._stats.prefix_queries += total - start
        self._now += 1
        shapes = here.shapes if here else self._lease_table.known(client).shapes
        if here is None:
            return Found(0, start, [[] for _ in shapes])
        num_hash_blocks, found, skipped = here.match(block_hashes, start, pages_limit)
        self._touch(here, block_hashes, start, found)
        entries = [entry for blocks in found for entry in blocks]
        if not entries:
            return Found(0, start, [[] for _ in shapes])
        self._stats.prefix_hits += num_hash_blocks - start
        self._mark_leased(entries)
        slots = [[0] * zeros + [entry.slot for entry in row] for zeros, row in zip(skipped, found, strict=True)]
        return Found(self._lease_table.lease(client, entries), num_hash_blocks, slots)

    def lease_blocks(
        self, client: int, names: Sequence[tuple[bytes, int, bytes]], forever: bool = False
    ) -> tuple[int, list[int]]:
        """Lease those of the blocks (namespace, group, hash) that are ready: (lease, slot of each; 0: not ready).

        The lease is 0 if none is ready. ``forever``: it has no deadline; for clients that always release. Touches
        nothing.
        """
        self._lease_table.known(client)
        entries = [self.find(*name) for name in names]
        ready = [entry for entry in entries if entry is not None and entry.state is READY]
        slots = [0 if entry is None or entry.state is not READY else entry.slot for entry in entries]
        if not ready:
            return 0, slots
        self._mark_leased(ready)
        return self._lease_table.lease(client, ready, forever), slots

    def release(self, client: int, lease: int) -> int:
        """End a lease. Returns the number of its blocks; 0: there is none (released, expired)."""
        entries = self._lease_table.end_lease(client, lease)
        for entry in entries:
            entry.leases -= 1
            if not entry.leases:
                self._stats.leased_entries -= 1
                self._free_if_unused(entry)
        return len(entries)

    def touch(self, client: int, namespace_id: bytes, block_hashes: bytes) -> int:
        """Touch a prefix. Returns the number of its blocks in memory."""
        here = self._namespace(client, namespace_id)
        if here is None:
            return 0
        self._now += 1
        end = len(block_hashes) // HASH_BYTES
        return self._touch(here, block_hashes, end - end % here.align, [[] for _ in here.shapes])

    def inspect(self, client: int, namespace_id: bytes, block_hashes: bytes) -> Holding:
        """The blocks in memory, without lease or touch. ``blocks`` is [] for an unknown namespace."""
        here = self._namespace(client, namespace_id)
        if here is None:
            return Holding(0, [])
        num_hash_blocks, found, skipped = here.match(block_hashes, 0, self._pool.pages)
        blocks = []
        for g, (shape, run, before) in enumerate(zip(here.shapes, found, skipped, strict=True)):
            total = len(block_hashes) // HASH_BYTES // shape.hash_blocks_per_block
            rest = here.row(g, block_hashes, 0, before) + here.row(g, block_hashes, before + len(run), total)
            blocks.append(len(run) + len([entry for entry in rest if entry is not None and entry.state is READY]))
        return Holding(num_hash_blocks, blocks)

    # -- writing -------------------------------------------------------------------------------------------------

    def reserve(
        self,
        client: int,
        namespace_id: bytes,
        tenant: bytes,
        groups: Sequence[int],
        hashes: bytes,
        parents: bytes,
        pages_limit: int,
        forever: bool = False,
        orphans: Container[int] = (),
    ) -> list[int]:
        """Reserve a slot (> 0) per item, or EXISTS, NO_ROOM, NO_PARENT_STORED. Items of a group: parents first.

        groups: n group indices. hashes, parents: n * HASH_BYTES bytes; a parent of zeros: the first block. Blocks of
        groups without ``whole_prefix`` need no parent. Slots end at or below page ``pages_limit``. ``forever``: as in
        ``lease_blocks``. ``orphans``: items whose parent may be missing; it adopts them when it is stored.
        """
        self.tick()
        known = self._lease_table.known(client)
        count = len(groups)
        if len(hashes) != count * HASH_BYTES or len(parents) != count * HASH_BYTES:
            raise BadRequest(f"{count} items to reserve with {len(hashes)} bytes of hashes, {len(parents)} of parents")
        if count and max(groups) >= len(known.shapes):
            raise BadRequest(f"group {max(groups)} of an engine that has {len(known.shapes)}")
        if not count:
            return []
        here = self._namespace(client, namespace_id) or self._make(namespace_id, known.hash_block_size, known.shapes)
        self._now += 1
        answer = [EXISTS] * count
        wanted: dict[tuple[int, bool], list[tuple[int, BlockEntry]]] = {}  # by slot size, and whether they are states
        linked = [shape.cache_kind.whole_prefix for shape in here.shapes]
        for i, group in enumerate(groups):
            at = i * HASH_BYTES
            block_hash = hashes[at : at + HASH_BYTES]
            table, shape = here.tables[group], here.shapes[group]
            if block_hash in table:
                continue
            parent_hash: bytes | None = parents[at : at + HASH_BYTES]
            before = table.get(parent_hash) if parent_hash and parent_hash != ZERO else None
            parent = None
            if not linked[group] or parent_hash == ZERO:
                parent_hash = None
            elif before is None and i not in orphans:
                answer[i] = NO_PARENT_STORED
                continue
            else:
                parent = before
            depth = shape.hash_blocks_per_block + (before.depth if before is not None else 0)
            entry = BlockEntry(here, group, block_hash, parent_hash, shape.slot_pages, client, tenant, depth)
            here.insert(entry, parent)
            wanted.setdefault((entry.size, entry.is_state), []).append((i, entry))
        got: list[BlockEntry] = []
        for items in wanted.values():
            entries = [entry for _, entry in items]
            n = self._room.take(entries, pages_limit)
            for i, entry in items[:n]:
                answer[i] = entry.slot
            for i, entry in reversed(items[n:]):
                answer[i] = NO_ROOM
                here.remove(entry)
                if self.removal_history is not None:
                    self.removal_history.record(entry.name, RemovalReason.NO_ROOM)
            got += entries[:n]
        if got:
            self._lease_table.reserve(client, got, forever)
        if here.empty:
            self._namespaces.pop(namespace_id, None)
        stats = self._stats
        stats.reservations += len(got)
        stats.reserved_slots += len(got)
        stats.refused_exists += answer.count(EXISTS)
        stats.refused_room += answer.count(NO_ROOM)
        stats.refused_parent += answer.count(NO_PARENT_STORED)
        return answer

    def exceeds_share(self, tenant: bytes, pages: int) -> bool:
        """Whether a block of so many pages would be more than the tenant's share, so that memory may not be full."""
        return self._room.exceeds_share(tenant, pages)

    def commit(self, client: int, slots: Sequence[int]) -> int:
        """These slots are written: their blocks are ready. Returns the number; slots not reserved by this client are
        ignored."""
        self._now += 1
        ready = []
        for entry in self._end_reservations(client, slots):
            if entry.state is RESERVED:
                entry.state, entry.used = READY, self._now
                ready.append(entry)
        self._room.admit(reversed(ready))
        self._stats.entries += len(ready)
        self._stats.commits += len(ready)
        for watch in self.watches if ready else ():
            watch.stored(ready)
        return len(ready)

    def abort(self, client: int, slots: Sequence[int], removal_reason: RemovalReason = RemovalReason.ABORTED) -> int:
        """These slots will not be written: free them. Returns the number; ignores slots as ``commit`` does."""
        ended = self._end_reservations(client, slots)
        for entry in reversed(ended):
            if entry.state is RESERVED:
                self._remove(entry, removal_reason)
        self._stats.aborts += len(ended)
        return len(ended)

    def abandon(self, client: int, name: BlockName, removal_reason: RemovalReason) -> None:
        """Unlist a block that this client writes, so that others can store it. Its slot stays reserved."""
        entry = self.find(*name)
        if entry is not None and entry.client == client:
            self._remove(entry, removal_reason)

    # -- discard and pin -----------------------------------------------------------------------------------------

    def discard(self, client: int, namespace_id: bytes, group: int, block_hash: bytes, slot: int) -> bool:
        """Remove a block whose checksum failed, if it is still in ``slot``. The slot is freed when unleased."""
        here = self._namespace(client, namespace_id)
        if here is None or group >= len(here.tables):
            return False
        entry = here.tables[group].get(block_hash)
        if entry is None or entry.state is not READY or entry.slot != slot:
            return False
        self._remove(entry, RemovalReason.DISCARDED)
        self._stats.discards += 1
        return True

    def pin(
        self,
        client: int,
        namespace_id: bytes,
        block_hashes: bytes,
        pinned: bool,
        in_use: Callable[[bytes], bool] = lambda namespace_id: True,
    ) -> tuple[int, int]:
        """Pin (or unpin) the blocks of a prefix in memory. Returns the number of changed blocks, and of those that
        could not be pinned.

        Pins from the start until pinned blocks hold ``pin_share`` of the pool; then those of namespaces that are not
        ``in_use`` are unpinned. Pins outlive their client.
        """
        here = self._namespace(client, namespace_id)
        if here is None:
            return 0, 0
        blocks = []  # (end, group, entry): sorted by end, so that a partial pin is a usable prefix
        for g, shape in enumerate(here.shapes):
            row = here.row(g, block_hashes, 0, len(block_hashes) // HASH_BYTES // shape.hash_blocks_per_block)
            blocks += [
                ((j + 1) * shape.hash_blocks_per_block, g, entry) for j, entry in enumerate(row) if entry is not None
            ]
        entries = [entry for _, _, entry in sorted(blocks, key=lambda block: block[:2])]
        entries = [entry for entry in entries if entry.state is READY and entry.pinned != pinned]
        if not pinned:
            self._unpin(entries)
            return len(entries), 0
        for count, entry in enumerate(entries):
            if not self._pin_fits(entry, in_use):
                return count, len(entries) - count
            self._room.withdraw(entry)
            self._mark_pinned(entry, True)
        return len(entries), 0

    def unpin_namespace(self, namespace_id: bytes) -> int:
        """Unpin all of its blocks. Returns their number."""
        here = self._namespaces.get(namespace_id)
        entries = sorted(here.pinned, key=lambda entry: entry.depth) if here is not None else []
        self._unpin(entries)
        return len(entries)

    def _unpin(self, entries: Sequence[BlockEntry]) -> None:
        """Parents first."""
        for entry in entries:
            self._mark_pinned(entry, False)
        self._room.admit(reversed(entries))

    def _pin_fits(self, entry: BlockEntry, in_use: Callable[[bytes], bool]) -> bool:
        """Whether the share of pinned blocks has room for it, after others gave way."""
        while self._stats.pinned_pages + entry.size > self._pin_share * self._pool.pages:
            others = (here for here in self._namespaces.values() if here.pinned and here is not entry.namespace)
            unused = next((here.name for here in others if not in_use(here.name)), None)
            if unused is None:
                return False
            self.unpin_namespace(unused)
        return True

    # -- time and numbers ----------------------------------------------------------------------------------------

    def tick(self) -> bool:
        """End leases and reservations past their deadline. To be called at ``next_deadline``, and again if it returns
        True: some ``RELEASE_STEP`` leased blocks are released at once."""
        released = 0
        while released < RELEASE_STEP and (lease := self._lease_table.expired_lease()):
            released += self.release(lease.client, lease.name)
            self._stats.expired_leases += 1
        for entry in reversed(self._lease_table.expired_reservations()):
            if entry.client is not None:
                self._stats.expired_reservations += self.abort(entry.client, (entry.slot,))
        return released >= RELEASE_STEP

    def next_deadline(self) -> float | None:
        """Clock time of the next deadline; None: nothing is leased or reserved."""
        return self._lease_table.next_deadline()

    def stats(self) -> IndexStats:
        """Statistics; cheap, without a walk over the entries."""
        return replace(
            self._stats,
            pool_pages=self._pool.pages,
            ready_pages=self._pool.ready,
            used_pages=self._pool.used,
            leases=self._lease_table.leases(),
            namespaces=len(self._namespaces),
            tenants=self._room.tenants,
            evictions=self._room.evictions,
        )

    # -- inside --------------------------------------------------------------------------------------------------

    def _namespace(self, client: int, name: bytes) -> NamespaceBlocks | None:
        known = self._lease_table.known(client)
        here = self._namespaces.get(name)
        if here and known.shapes and (known.hash_block_size, known.shapes) != (here.hash_block_size, here.shapes):
            raise BadRequest(
                f"namespace {name.hex()} has other groups or another hash block size than this engine's: two engines "
                f"that differ in these must not share a namespace ({here.shapes} against {known.shapes})"
            )
        return here

    def _mark_leased(self, entries: list[BlockEntry]) -> None:
        fresh = 0
        for entry in entries:
            if not entry.leases:
                fresh += 1
            entry.leases += 1
        self._stats.leased_entries += fresh

    def _end_reservations(self, client: int, slots: Sequence[int]) -> list[BlockEntry]:
        ended = self._lease_table.end_reservations(client, slots)
        self._stats.reservations -= len(ended)
        for entry in ended:
            self._free_if_unused(entry)
        return ended
