"""Which block lies in which slot, who is reading or writing it, and what is found of a chain.

A block is RESERVED by one client while that writes it, then READY, then forgotten. Forgetting it by force (its
checksum failed, its writer gave up or died, the space was cleared) leaves the blocks after it where they are:
nobody finds them, because a lookup ends at the gap; they hang under it again when the block is stored anew, or grow
old and are evicted. Eviction itself makes no gap: it takes blocks on which no other depends.

A forgotten block's slot is free when nobody reads it under a lease and nobody writes it under a reservation. Both
end by a deadline, too, and then somebody slow may still be reading or writing a slot that is given to another
block. That is safe, not prevented: the checksum in every slot is keyed by the block's hash, so the reader sees that
it got something else, or a mixture.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm_kvtier.store.blocks import Blocks
from vllm_kvtier.store.claims import Claims
from vllm_kvtier.store.entries import READY, RESERVED, Entry, Space
from vllm_kvtier.store.extents import SlotPool
from vllm_kvtier.store.fates import Fate
from vllm_kvtier.store.policies import DEFAULT_POLICY, POLICIES, Policy
from vllm_kvtier.store.records import (
    EXISTS,
    HASH,
    NO_PARENT_STORED,
    NO_ROOM,
    ZERO,
    BadRequest,
    Found,
    GroupShape,
    Holding,
    IndexStats,
)


class Index(Blocks):
    """Single-threaded; no I/O. ``client`` is any int that the server gives a connection; ``connect`` comes first.

    pool: whose memory. policy: makes an eviction policy (``policies.POLICIES[name]``; None: the default).
    clock: seconds, monotonic. lease_seconds, reserve_seconds: after these a lease or a reservation protects nothing.
    pin_share: of the pool, that pins may hold. tenant_share: see ``Room``.
    """

    def __init__(
        self,
        pool: SlotPool,
        policy: Callable[[], Policy] | None,
        clock: Callable[[], float],
        *,
        lease_seconds: float = 60.0,
        reserve_seconds: float = 120.0,
        pin_share: float = 0.5,
        tenant_share: float = 1.0,
    ):
        super().__init__(pool, policy or POLICIES[DEFAULT_POLICY], tenant_share)
        self._pin_share = pin_share
        self._claims = Claims(clock, lease_seconds, reserve_seconds)

    # -- clients -------------------------------------------------------------------------------------------------

    def connect(self, client: int, unit_tokens: int, groups: Sequence[GroupShape]) -> None:
        """Hello of a client; ``groups`` may be empty (a tool: pin and inspect use what engines said of the space)."""
        self._claims.connect(client, unit_tokens, groups)

    def disconnect(self, client: int) -> None:
        """Leases end and reservations are aborted, at once. Unknown clients are ignored."""
        gone = self._claims.find(client)
        if gone is not None:
            for lease in list(gone.leases):
                self.release(client, lease)
            self.abort(client, list(gone.reserved), Fate.DIED)
            self._claims.forget(client)

    def held(self, client: int) -> tuple[int, int]:
        """(leases, reserved slots) of a client."""
        known = self._claims.known(client)
        return len(known.leases), len(known.reserved)

    # -- reading -------------------------------------------------------------------------------------------------

    def lookup(self, client: int, space: bytes, chain: bytes, start: int, pages_limit: int) -> Found:
        """Longest usable run of the chain from unit ``start``, leased. Touches it and what precedes ``start``.

        The run ends where blocks of all groups end; full-attention groups have all blocks of it, windowed groups
        those that tokens after it can see. Only slots that end at or below page ``pages_limit`` count.
        """
        total = len(chain) // HASH
        if len(chain) % HASH or start > total:
            raise BadRequest(f"lookup of {len(chain)} bytes of hashes from unit {start}: not whole, or beyond its end")
        here = self._space(client, space)
        self._stats.lookups += 1
        self._stats.looked_up_units += total - start
        self._now += 1
        shapes = here.shapes if here else self._claims.known(client).shapes
        if here is None:
            return Found(0, start, [[] for _ in shapes])
        units, found, skipped = here.match(chain, start, pages_limit)
        self._touch(here, chain, start, found)
        entries = [entry for blocks in found for entry in blocks]
        if not entries:
            return Found(0, start, [[] for _ in shapes])
        self._stats.found_units += units - start
        self._mark_leased(entries)
        slots = [[0] * zeros + [entry.slot for entry in row] for zeros, row in zip(skipped, found, strict=True)]
        return Found(self._claims.lease(client, entries), units, slots)

    def hold(
        self, client: int, names: Sequence[tuple[bytes, int, bytes]], forever: bool = False
    ) -> tuple[int, list[int]]:
        """Leases those of the blocks (space, group, hash) that are ready: (lease, slot of each; 0 where it is not).

        The lease is 0 if none is. It ends as a lookup's does, or, ``forever``, by ``release`` or ``disconnect``
        alone: for who is bound to say when it is done. Nothing is touched.
        """
        self._claims.known(client)
        entries = [self.find(*name) for name in names]
        ready = [entry for entry in entries if entry is not None and entry.state is READY]
        slots = [0 if entry is None or entry.state is not READY else entry.slot for entry in entries]
        if not ready:
            return 0, slots
        self._mark_leased(ready)
        return self._claims.lease(client, ready, forever), slots

    def release(self, client: int, lease: int) -> bool:
        """False: no such lease (released, expired)."""
        entries = self._claims.end_lease(client, lease)
        for entry in entries:
            entry.leases -= 1
            if not entry.leases:
                self._stats.leased_entries -= 1
                self._settle(entry)
        return bool(entries)

    def touch(self, client: int, space: bytes, chain: bytes) -> int:
        """The chain is in use: how many of its blocks are here."""
        here = self._space(client, space)
        if here is None:
            return 0
        self._now += 1
        end = len(chain) // HASH
        return self._touch(here, chain, end - end % here.align, [[] for _ in here.shapes])

    def inspect(self, client: int, space: bytes, chain: bytes) -> Holding:
        """What is here, without lease or touch. ``blocks`` is [] for a space that nobody has used."""
        here = self._space(client, space)
        if here is None:
            return Holding(0, [])
        units, found, skipped = here.match(chain, 0, self._pool.pages)
        blocks = []
        for g, (shape, run, before) in enumerate(zip(here.shapes, found, skipped, strict=True)):
            total = len(chain) // HASH // shape.units
            rest = here.row(g, chain, 0, before) + here.row(g, chain, before + len(run), total)
            blocks.append(len(run) + len([entry for entry in rest if entry is not None and entry.state is READY]))
        return Holding(units, blocks)

    # -- writing -------------------------------------------------------------------------------------------------

    def reserve(
        self,
        client: int,
        space: bytes,
        tenant: bytes,
        groups: Sequence[int],
        hashes: bytes,
        parents: bytes,
        pages_limit: int,
        forever: bool = False,
    ) -> list[int]:
        """A slot (> 0) per item to write into, or EXISTS, NO_ROOM, NO_PARENT_STORED. Items of a group: parents first.

        groups: n group indices. hashes, parents: n * HASH bytes; a parent of zeros: the first block. Windowed
        groups have no parent rule. Slots end at or below page ``pages_limit``. ``forever``: as in ``hold``.
        """
        self.tick()
        known = self._claims.known(client)
        count = len(groups)
        if len(hashes) != count * HASH or len(parents) != count * HASH:
            raise BadRequest(f"{count} items to reserve with {len(hashes)} bytes of hashes, {len(parents)} of parents")
        if count and max(groups) >= len(known.shapes):
            raise BadRequest(f"group {max(groups)} of an engine that has {len(known.shapes)}")
        if not count:
            return []
        here = self._space(client, space, make=True)
        self._now += 1
        answer = [EXISTS] * count
        wanted: dict[int, list[tuple[int, Entry]]] = {}  # by slot size
        for i, group in enumerate(groups):
            at = i * HASH
            block_hash = hashes[at : at + HASH]
            table, shape = here.tables[group], here.shapes[group]
            if block_hash in table:
                continue
            parent = before = None
            if (parent_hash := parents[at : at + HASH]) != ZERO:
                before = table.get(parent_hash)
            if shape.window is not None or parent_hash == ZERO:
                parent_hash = None
            elif before is None:
                answer[i] = NO_PARENT_STORED
                continue
            else:
                parent = before
            entry = Entry(here, group, block_hash, parent_hash, shape.size, client, tenant)
            entry.depth = shape.units + (before.depth if before is not None else 0)
            here.insert(entry, parent)
            wanted.setdefault(shape.size, []).append((i, entry))
        got: list[Entry] = []
        for items in wanted.values():
            entries = [entry for _, entry in items]
            n = self._room.take(entries, pages_limit)
            for i, entry in items[:n]:
                answer[i] = entry.slot
            for i, entry in reversed(items[n:]):
                answer[i] = NO_ROOM
                here.remove(entry)
                if self.fates is not None:
                    self.fates.record((space, entry.group, entry.hash), Fate.NO_ROOM)
            got += entries[:n]
        if got:
            self._claims.reserve(client, got, forever)
        if here.empty:
            self._spaces.pop(space, None)
        stats = self._stats
        stats.reservations += len(got)
        stats.reserved_slots += len(got)
        stats.refused_exists += answer.count(EXISTS)
        stats.refused_room += answer.count(NO_ROOM)
        stats.refused_parent += answer.count(NO_PARENT_STORED)
        return answer

    def commit(self, client: int, slots: Sequence[int]) -> int:
        """Written: may be found from now on. Counts those that were this client's reservations; ignores others."""
        self._now += 1
        ready = []
        for entry in self._end_reservations(client, slots):
            if entry.state is RESERVED:
                entry.state, entry.used = READY, self._now
                ready.append(entry)
        self._room.admit(reversed(ready))
        self._stats.entries += len(ready)
        self._stats.commits += len(ready)
        if ready and self.watch is not None:
            self.watch.stored(ready)
        return len(ready)

    def abort(self, client: int, slots: Sequence[int], fate: Fate = Fate.ABORTED) -> int:
        """Not written: free again. Counts and ignores like commit. ``fate``: what is remembered of them."""
        ended = self._end_reservations(client, slots)
        for entry in reversed(ended):
            if entry.state is RESERVED:
                self._forget(entry, fate)
        self._stats.aborts += len(ended)
        return len(ended)

    # -- by hand -------------------------------------------------------------------------------------------------

    def discard(self, client: int, space: bytes, group: int, block_hash: bytes, slot: int) -> bool:
        """The block's checksum failed: forget it, if it still lies in ``slot``. The slot is reused when unleased."""
        here = self._space(client, space)
        if here is None or group >= len(here.tables):
            return False
        entry = here.tables[group].get(block_hash)
        if entry is None or entry.state is not READY or entry.slot != slot:
            return False
        self._forget(entry, Fate.DISCARDED)
        self._stats.discards += 1
        return True

    def pin(self, client: int, space: bytes, chain: bytes, pinned: bool) -> int:
        """Pin (or unpin) what is here of the chain: number of blocks that this changed.

        Pins go from the start of the chain until they hold ``pin_share`` of the pool. They outlive their client.
        """
        here = self._space(client, space)
        if here is None:
            return 0
        blocks = []  # (where it ends, group, entry): groups side by side, so that what fits is of use
        for g, shape in enumerate(here.shapes):
            row = here.row(g, chain, 0, len(chain) // HASH // shape.units)
            blocks += [((j + 1) * shape.units, g, entry) for j, entry in enumerate(row) if entry is not None]
        changed = []
        for _, _, entry in sorted(blocks, key=lambda block: block[:2]):
            if entry.state is not READY or entry.pinned == pinned:
                continue
            if pinned:
                if self._stats.pinned_pages + entry.size > self._pin_share * self._pool.pages:
                    break
                self._room.withdraw(entry)
            self._mark_pinned(entry, pinned)
            changed.append(entry)
        if not pinned:
            self._room.admit(reversed(changed))
        return len(changed)

    # -- time and numbers ----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Ends leases and reservations whose deadline has passed. Call when ``next_deadline`` comes."""
        while lease := self._claims.expired_lease():
            self.release(lease.client, lease.name)
            self._stats.expired_leases += 1
        for entry in reversed(self._claims.expired_reservations()):
            self._stats.expired_reservations += self.abort(entry.client, (entry.slot,))

    def next_deadline(self) -> float | None:
        """Clock time at which ``tick`` may have something to do; None: nothing is leased or reserved."""
        return self._claims.next_deadline()

    def stats(self) -> IndexStats:
        """Cheap (no walk over the entries)."""
        return replace(
            self._stats,
            pool_pages=self._pool.pages,
            ready_pages=self._pool.ready,
            used_pages=self._pool.used,
            leases=self._claims.leases(),
            spaces=len(self._spaces),
            tenants=self._room.tenants,
            evictions=self._room.evictions,
        )

    # -- inside --------------------------------------------------------------------------------------------------

    def _space(self, client: int, name: bytes, make: bool = False) -> Space | None:
        known = self._claims.known(client)
        here = self._spaces.get(name)
        if here is not None:
            return self._checked(here, known.unit_tokens, known.shapes)
        return self._make(name, known.unit_tokens, known.shapes) if make else None

    def _mark_leased(self, entries: list[Entry]) -> None:
        fresh = 0
        for entry in entries:
            if not entry.leases:
                fresh += 1
            entry.leases += 1
        self._stats.leased_entries += fresh

    def _end_reservations(self, client: int, slots: Sequence[int]) -> list[Entry]:
        ended = self._claims.end_reservations(client, slots)
        self._stats.reservations -= len(ended)
        for entry in ended:
            self._settle(entry)
        return ended
