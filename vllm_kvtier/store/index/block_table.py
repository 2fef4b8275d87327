"""The listed blocks and their slots, from reservation until the slot is free again. Knows no clients."""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Protocol, TypeVar

from vllm_kvtier.store.eviction.base import Policy
from vllm_kvtier.store.index.block_entry import GONE, READY, BlockEntry, NamespaceBlocks
from vllm_kvtier.store.index.removal_history import RemovalHistory, RemovalReason
from vllm_kvtier.store.index.types import ZERO, GroupShape, IndexStats
from vllm_kvtier.store.memory.slot_allocator import SlotAllocator
from vllm_kvtier.store.memory.slot_pool import SlotPool


class Watch(Protocol):
    """Callbacks for changes, called at once. They may call ``find`` and must not change the index."""

    def stored(self, entries: Sequence[BlockEntry]) -> None:
        """These blocks were committed by one message, in its order, and are ready now."""

    def used(self, entries: Sequence[BlockEntry]) -> None:
        """These blocks were found or touched by one request; of each group the last block of the prefix first."""

    def gone(self, entry: BlockEntry) -> None:
        """A ready block was evicted, discarded or cleared. Its slot may still be leased."""


class Kept(Protocol):
    """A block found on disk, in slot ``position``."""

    @property
    def group(self) -> int: ...
    @property
    def hash(self) -> bytes: ...
    @property
    def parent(self) -> bytes:
        """ZERO: none."""

    @property
    def tenant(self) -> bytes: ...
    @property
    def position(self) -> int: ...


KeptT = TypeVar("KeptT", bound=Kept)


class BlockTable:
    """The base class of ``Index``. ``removal_history`` must be set before the first block is stored."""

    def __init__(self, pool: SlotPool, policy: Callable[[], Policy], tenant_share: float, state_share: float):
        self.watches: list[Watch] = []
        self.removal_history: RemovalHistory | None = None
        self._pool = pool
        self._room = SlotAllocator(pool, policy, tenant_share, state_share, self._evicted)
        self._namespaces: dict[bytes, NamespaceBlocks] = {}
        self._now = 0  # requests so far: the clock of entry.used
        self._stats = IndexStats()

    def grow(self, ready_pages: int) -> None:
        """Memory below this page is usable. Never shrinks."""
        self._pool.grow(ready_pages)

    def limit(self, pages: int) -> None:
        """No more than so many pages will ever be usable: shares are of these."""
        self._pool.pages = min(self._pool.pages, pages)

    def find(self, namespace_id: bytes, group: int, block_hash: bytes) -> BlockEntry | None:
        """The block if it is listed: ready, or being written. The caller must not keep it."""
        here = self._namespaces.get(namespace_id)
        return here.tables[group].get(block_hash) if here is not None and group < len(here.tables) else None

    def shapes(self, namespace_id: bytes) -> tuple[int, list[GroupShape]] | None:
        """(tokens per hash block, groups) of a namespace with listed blocks."""
        here = self._namespaces.get(namespace_id)
        return None if here is None else (here.hash_block_size, here.shapes)

    def reach(self, namespace_id: bytes, block_hashes: bytes, start: int, pages_limit: int) -> int:
        """The end that a lookup from ``start`` would have; leases and touches nothing."""
        here = self._namespaces.get(namespace_id)
        return start if here is None else here.match(block_hashes, start, pages_limit)[0]

    def remove(self, namespace_id: bytes, group: int, block_hash: bytes) -> bool:
        """Remove a block, even while it is being written. False: it is not listed."""
        entry = self.find(namespace_id, group, block_hash)
        if entry is None:
            return False
        self._remove(entry, RemovalReason.DISCARDED)
        self._stats.discards += 1
        return True

    def is_taken(self, slot: int) -> bool:
        """Whether a block, listed or not, begins there."""
        return self._room.is_taken(slot)

    def evict(self, count: int) -> None:
        """Evict up to ``count`` of the coldest blocks, of all sizes."""
        self._room.evict(count)

    def clear(self, namespace_id: bytes | None) -> int:
        """Remove the blocks of a namespace (None: of all), pinned ones too. Returns their number. Slots that are leased
        or reserved are freed later."""
        entries = self._listed(namespace_id)
        for entry in reversed(entries):
            self._remove(entry, RemovalReason.CLEARED)
        return len(entries)

    def clear_in_steps(self, namespace_id: bytes | None, step: int) -> Generator[None, None, int]:
        """``clear`` for the blocks that are listed now, ``step`` at a time: a million takes seconds. Others may come
        meanwhile."""
        entries, count = self._listed(namespace_id), 0
        while entries:
            for _ in range(min(step, len(entries))):
                entry = entries.pop()
                if entry.state is not GONE:
                    self._remove(entry, RemovalReason.CLEARED)
                    count += 1
            if entries:
                yield
        return count

    def dismantle(self, step: int) -> Iterator[None]:
        """Remove all blocks, ``step`` at a time, and all references in cycles; ``watches`` are not called. For a table
        that is used no more but to release leases."""
        self.watches = []
        yield from self.clear_in_steps(None, step)
        self._room.close()

    def restore(
        self, namespace_id: bytes, hash_block_size: int, shapes: Sequence[GroupShape], kept: Sequence[KeptT]
    ) -> list[KeptT]:
        """List blocks found on disk: older ones first, parents before children. ``watches`` are not called.

        ``SlotPool.restore`` has taken their slots. Returns the refused blocks, which are duplicates or have other
        groups than the namespace; their slots are free again. A block without its parent becomes an orphan, as after a
        ``remove``.
        """
        here = self._open(namespace_id, hash_block_size, shapes)
        refused, ready = [], []
        for block in kept:
            group, block_hash = block.group, block.hash
            if here is None or group >= len(here.shapes) or block_hash in here.tables[group]:
                refused.append(block)
                self._pool.free(block.position)
                continue
            shape, table = here.shapes[group], here.tables[group]
            parent_hash = block.parent if shape.cache_kind.whole_prefix and block.parent != ZERO else None
            parent = None if parent_hash is None else table.get(parent_hash)
            depth = shape.hash_blocks_per_block + (parent.depth if parent else 0)
            entry = BlockEntry(here, group, block_hash, parent_hash, shape.slot_pages, None, block.tenant, depth)
            entry.state, entry.slot, entry.used = READY, block.position, self._now
            here.insert(entry, parent)
            self._room.put_back(entry)
            ready.append(entry)
        if here is not None and here.empty:
            del self._namespaces[namespace_id]
        ready.reverse()
        self._room.admit(ready)
        self._stats.entries += len(ready)
        return refused

    # -- inside --------------------------------------------------------------------------------------------------

    def _listed(self, namespace_id: bytes | None) -> list[BlockEntry]:
        """The blocks of a namespace (None: of all), parents before children, mostly."""
        chosen = [here for name, here in self._namespaces.items() if namespace_id in (None, name)]
        return [entry for here in chosen for table in here.tables for entry in table.values()]

    def _open(self, name: bytes, hash_block_size: int, shapes: Sequence[GroupShape]) -> NamespaceBlocks | None:
        """The namespace, created if necessary; None: it has other groups."""
        here = self._namespaces.get(name) or self._make(name, hash_block_size, shapes)
        return here if (here.hash_block_size, here.shapes) == (hash_block_size, list(shapes)) else None

    def _make(self, name: bytes, hash_block_size: int, shapes: Sequence[GroupShape]) -> NamespaceBlocks:
        align = math.lcm(*(shape.hash_blocks_per_block for shape in shapes))
        here = self._namespaces[name] = NamespaceBlocks(name, hash_block_size, list(shapes), align)
        return here

    def _touch(self, here: NamespaceBlocks, block_hashes: bytes, start: int, found: list[list[BlockEntry]]) -> int:
        """Touch ``found`` and, before ``start``, the blocks that a prefix needs."""
        count, used = 0, list[BlockEntry]()
        for g, shape in enumerate(here.shapes):
            first = shape.first_block(here.hash_block_size, 0, start)
            row = here.row(g, block_hashes, first, start // shape.hash_blocks_per_block) + found[g]
            row.reverse()
            held = []
            for entry in row:
                if entry is not None and entry.state is READY:
                    entry.used = self._now
                    count += 1
                    if not entry.pinned:
                        held.append(entry)
            self._room.touch(shape.slot_pages, held)
            if self.watches:
                used += [entry for entry in row if entry is not None and entry.state is READY]
        for watch in self.watches if used else ():
            watch.used(used)
        return count

    def _free_if_unused(self, entry: BlockEntry) -> None:
        """Free the slot of a removed block that is neither leased nor reserved."""
        if entry.state is GONE and not entry.leases and entry.client is None:
            self._room.free(entry)

    def _evicted(self, entry: BlockEntry) -> None:
        """A block, already withdrawn from its policy, is evicted."""
        if self.removal_history is not None:
            self.removal_history.evicted(entry)
        self._unlist(entry)

    def _remove(self, entry: BlockEntry, removal_reason: RemovalReason) -> None:
        """Remove a block that may have children; these become unreachable."""
        if self.removal_history is not None:
            self.removal_history.record(entry.name, removal_reason)
        if entry.state is READY:
            if entry.pinned:
                self._mark_pinned(entry, False)
            else:
                self._room.withdraw(entry)
            self._unlist(entry)
        else:
            self._unlink(entry)
        self._free_if_unused(entry)

    def _unlist(self, entry: BlockEntry) -> None:
        """Unlist a ready block that was withdrawn from its policy."""
        self._stats.entries -= 1
        self._unlink(entry)
        for watch in self.watches:
            watch.gone(entry)

    def _unlink(self, entry: BlockEntry) -> None:
        here = entry.namespace
        here.remove(entry)
        entry.state = GONE
        if not here.tables[entry.group] and here.empty and self._namespaces.get(here.name) is here:
            del self._namespaces[here.name]

    def _mark_pinned(self, entry: BlockEntry, pinned: bool) -> None:
        entry.pinned = pinned
        (entry.namespace.pinned.add if pinned else entry.namespace.pinned.discard)(entry)
        sign = 1 if pinned else -1
        self._stats.pinned_entries += sign
        self._stats.pinned_pages += sign * entry.size
