"""The blocks themselves: where each lies, from when it is listed until its slot is free again. No clients here."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from vllm_kvtier.store.entries import GONE, READY, Entry, Shape, Space
from vllm_kvtier.store.extents import SlotPool
from vllm_kvtier.store.fates import Fate, Fates
from vllm_kvtier.store.policies import Policy
from vllm_kvtier.store.records import ZERO, BadRequest, IndexStats
from vllm_kvtier.store.room import Room


class Watch(Protocol):
    """Hears what becomes of blocks, at once. It may look (``find``), and must not change anything meanwhile."""

    def stored(self, entries: Sequence[Entry]) -> None:
        """Committed by one message, in the order it named them: they can be found from now on."""

    def used(self, entries: Sequence[Entry]) -> None:
        """Found or touched by one request; of each group the last block of the chain first."""

    def gone(self, entry: Entry) -> None:
        """Was ready, and is found no more: evicted, discarded or cleared. Its slot may be leased still."""


class Kept(Protocol):
    """A block that an earlier life of a tier left behind, in slot ``place``."""

    group: int
    hash: bytes
    parent: bytes  # ZERO: none
    tenant: bytes
    place: int


class Blocks:
    """What ``Index`` builds on. ``watch``, and ``fates``, which remembers what is gone: set them before anything is
    stored."""

    def __init__(self, pool: SlotPool, policy: Callable[[], Policy], tenant_share: float):
        self.watch: Watch | None = None
        self.fates: Fates | None = None
        self._pool = pool
        self._room = Room(pool, policy, tenant_share, self._evicted)
        self._spaces: dict[bytes, Space] = {}
        self._now = 0  # requests so far: what entry.used counts in
        self._stats = IndexStats()

    def grow(self, ready_pages: int) -> None:
        """Memory below this page is usable. Never shrinks."""
        self._pool.grow(ready_pages)

    def find(self, space: bytes, group: int, block_hash: bytes) -> Entry | None:
        """The block if it is listed: ready, or being written. To look at, not to keep."""
        here = self._spaces.get(space)
        return here.tables[group].get(block_hash) if here is not None and group < len(here.tables) else None

    def shapes(self, space: bytes) -> tuple[int, list[Shape]] | None:
        """(tokens a unit, groups) of a space that blocks are listed of."""
        here = self._spaces.get(space)
        return None if here is None else (here.unit_tokens, here.shapes)

    def reach(self, space: bytes, chain: bytes, start: int, pages_limit: int) -> int:
        """The unit where a lookup from ``start`` would end; nothing is leased or touched."""
        here = self._spaces.get(space)
        return start if here is None else here.match(chain, start, pages_limit)[0]

    def forget(self, space: bytes, group: int, block_hash: bytes) -> bool:
        """By force, also a block that is just being written; False: there is none."""
        entry = self.find(space, group, block_hash)
        if entry is None:
            return False
        self._forget(entry, Fate.DISCARDED)
        self._stats.discards += 1
        return True

    def clear(self, space: bytes | None) -> int:
        """Forget a space (None: all), pins included: number of blocks. Slots being read or written free later."""
        gone = 0
        for here in list(self._spaces.values()) if space is None else filter(None, [self._spaces.get(space)]):
            for table in here.tables:
                for entry in reversed(list(table.values())):
                    self._forget(entry, Fate.CLEARED)
                    gone += 1
        return gone

    def restore(self, space: bytes, unit_tokens: int, shapes: Sequence[Shape], kept: Sequence[Kept]) -> list[Kept]:
        """Blocks of an earlier life, found again from now on. Older ones first; parents before children.

        Their slots have been taken with ``SlotPool.restore``. Returns those that could not be: of other groups than
        the space's, or there twice; their slots are free again. One whose parent is missing hangs in the air, as
        after a ``forget``. ``watch`` is not told.
        """
        here = self._open(space, unit_tokens, shapes)
        refused, ready = [], []
        for block in kept:
            group, block_hash = block.group, block.hash
            if here is None or group >= len(here.shapes) or block_hash in here.tables[group]:
                refused.append(block)
                self._pool.free(block.place)
                continue
            shape, table = here.shapes[group], here.tables[group]
            parent_hash = None if shape.window is not None or block.parent == ZERO else block.parent
            parent = None if parent_hash is None else table.get(parent_hash)
            entry = Entry(here, group, block_hash, parent_hash, shape.size, None, block.tenant)
            entry.state, entry.slot, entry.used = READY, block.place, self._now
            entry.depth = shape.units + (parent.depth if parent else 0)
            here.insert(entry, parent)
            if parent is None and parent_hash is not None:
                here.orphans.setdefault((group, parent_hash), {})[entry] = None
            self._room.put_back(entry)
            ready.append(entry)
        if here is not None and here.empty:
            del self._spaces[space]
        ready.reverse()
        self._room.admit(ready)
        self._stats.entries += len(ready)
        return refused

    # -- inside --------------------------------------------------------------------------------------------------

    def _open(self, name: bytes, unit_tokens: int, shapes: Sequence[Shape]) -> Space | None:
        """The space, made if it is not there; None: it is of other groups."""
        here = self._spaces.get(name)
        if here is None:
            here = self._make(name, unit_tokens, shapes)
        return here if (here.unit_tokens, here.shapes) == (unit_tokens, list(shapes)) else None

    def _make(self, name: bytes, unit_tokens: int, shapes: Sequence[Shape]) -> Space:
        align = math.lcm(*(shape.units for shape in shapes))
        here = self._spaces[name] = Space(name, unit_tokens, list(shapes), align)
        return here

    def _checked(self, here: Space, unit_tokens: int, shapes: Sequence[Shape]) -> Space:
        if shapes and (unit_tokens, shapes) != (here.unit_tokens, here.shapes):
            raise BadRequest(
                f"space {here.name.hex()} holds blocks of other groups or another unit than this engine's: two engines "
                f"that differ in these must not share a space ({here.shapes} against {shapes})"
            )
        return here

    def _touch(self, here: Space, chain: bytes, start: int, found: list[list[Entry]]) -> int:
        """``found``, and of what lies before ``start`` all of full attention and the windows there."""
        count, used = 0, []
        for g, shape in enumerate(here.shapes):
            row = here.row(g, chain, here.first_needed(shape, 0, start), start // shape.units) + found[g]
            row.reverse()
            held = []
            for entry in row:
                if entry is not None and entry.state is READY:
                    entry.used = self._now
                    count += 1
                    if not entry.pinned:
                        held.append(entry)
            self._room.touch(shape.size, held)
            if self.watch is not None:
                used += [entry for entry in row if entry is not None and entry.state is READY]
        if used:
            self.watch.used(used)
        return count

    def _settle(self, entry: Entry) -> None:
        """Free the slot of a forgotten block that nobody reads or writes any more."""
        if entry.state is GONE and not entry.leases and entry.client is None:
            self._room.free(entry)

    def _evicted(self, entry: Entry) -> None:
        """For room, of a block in no policy any more."""
        if self.fates is not None:
            self.fates.evicted(entry)
        self._unlist(entry)

    def _forget(self, entry: Entry, fate: Fate) -> None:
        """By force: whatever hangs under it becomes unreachable."""
        if self.fates is not None:
            self.fates.record((entry.space.name, entry.group, entry.hash), fate)
        if entry.state is READY:
            if entry.pinned:
                self._mark_pinned(entry, False)
            else:
                self._room.withdraw(entry)
            self._unlist(entry)
        else:
            self._remove(entry)
        self._settle(entry)

    def _unlist(self, entry: Entry) -> None:
        """Of a ready block, in no policy any more."""
        self._stats.entries -= 1
        self._remove(entry)
        if self.watch is not None:
            self.watch.gone(entry)

    def _remove(self, entry: Entry) -> None:
        here = entry.space
        here.remove(entry)
        entry.state = GONE
        if not here.tables[entry.group] and here.empty and self._spaces.get(here.name) is here:
            del self._spaces[here.name]

    def _mark_pinned(self, entry: Entry, pinned: bool) -> None:
        entry.pinned = pinned
        sign = 1 if pinned else -1
        self._stats.pinned_entries += sign
        self._stats.pinned_pages += sign * entry.size
