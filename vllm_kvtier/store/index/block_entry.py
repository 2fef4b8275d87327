"""A stored block, and the tree of a group's blocks by parent links, if a prefix needs all of them.

Children are a ring of siblings (``first`` of the parent, ``next``/``prev``), oldest first: a few words per block, much
less than a set.
"""

import enum
from dataclasses import dataclass, field
from typing import cast

import msgspec

from vllm_kvtier.store.index.types import HASH_BYTES, GroupShape

LOOKUP_BATCH = 1 << 10  # blocks looked up at a time: most lookups miss from some block on

Key = tuple[bytes, int]  # hash, group
BlockName = tuple[bytes, int, bytes]  # namespace, group, hash


class State(enum.Enum):
    RESERVED = 1  # a client writes it
    READY = 2
    GONE = 3  # not listed; its slot is freed when it is neither leased nor reserved


RESERVED, READY, GONE = State


class BlockEntry(msgspec.Struct, eq=False, gc=False):
    """Not tracked by the garbage collector: visiting millions of blocks would stop the server for seconds. Hence one
    that is removed must not be part of a cycle of references."""

    namespace: "NamespaceBlocks"
    group: int
    hash: bytes
    parent_hash: bytes | None  # None: a first block, or one that needs no parent
    size: int  # pages
    client: int | None  # that reserved it; None: not being written
    tenant: bytes
    depth: int = 0  # hash blocks up to its end; fewer if the block before it was unknown
    state: State = RESERVED
    slot: int = 0  # page number; 0: none yet
    leases: int = 0
    pinned: bool = False
    used: int = 0  # time of the last use, in the index's count of requests
    mark: int = 0  # the policy's
    stamp: int = 0  # the policy's
    parent: "BlockEntry | None" = None
    first: "BlockEntry | None" = None
    # None while it has no parent: without self-references a dead entry does not wait for the cycle collector.
    prev: "BlockEntry | None" = None
    next: "BlockEntry | None" = None

    def __repr__(self) -> str:
        return f"<block {self.hash.hex()[:8]} of group {self.group}, {self.state.name}>"

    @property
    def name(self) -> BlockName:
        return self.namespace.name, self.group, self.hash

    @property
    def is_state(self) -> bool:
        """Whether it holds a recurrent state."""
        return self.namespace.states[self.group]

    @property
    def key(self) -> Key:
        """The name that a policy remembers after eviction. Without the namespace: a clash only costs a worse guess."""
        return self.hash, self.group

    @property
    def in_use(self) -> bool:
        return bool(self.leases) or self.pinned or self.state is not READY

    @property
    def evictable(self) -> bool:
        return self.first is None and not self.leases and not self.pinned and self.state is READY

    def adopt(self, child: "BlockEntry") -> None:
        child.parent = self
        if self.first is None:
            self.first = child
            child.prev = child.next = child
        else:
            last = self.first.prev
            assert last is not None
            child.prev, child.next = last, self.first
            last.next = self.first.prev = child

    def leave(self) -> None:
        """Detach from the parent, if there is one."""
        parent, prev, next = self.parent, self.prev, self.next
        if parent is None or prev is None or next is None:
            return
        if next is self:
            parent.first = None
        else:
            prev.next, next.prev = next, prev
            if parent.first is self:
                parent.first = next
        self.parent = self.prev = self.next = None

    def children(self) -> list["BlockEntry"]:
        found: list[BlockEntry] = []
        child = self.first
        while child is not None:
            found.append(child)
            child = child.next if child.next is not self.first else None
        return found


@dataclass(eq=False)
class NamespaceBlocks:
    """The blocks of a namespace, and those that are ``pinned``. ``orphans``: entries by (group, hash of their parent,
    which is not listed)."""

    name: bytes
    hash_block_size: int
    shapes: list[GroupShape]
    align: int  # hash blocks between positions where blocks of all groups end
    tables: list[dict[bytes, BlockEntry]] = field(init=False)  # per group: by hash
    states: list[bool] = field(init=False)  # per group: whether its blocks hold recurrent states
    orphans: dict[tuple[int, bytes], dict[BlockEntry, None]] = field(default_factory=dict)
    pinned: set[BlockEntry] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tables = [{} for _ in self.shapes]
        self.states = [not shape.cache_kind.by_position for shape in self.shapes]

    @property
    def empty(self) -> bool:
        return not any(self.tables)

    def insert(self, entry: BlockEntry, parent: BlockEntry | None) -> None:
        """List an entry below its parent; as an orphan if its parent is not listed. It adopts the children of an
        earlier copy of this block."""
        self.tables[entry.group][entry.hash] = entry
        if parent is not None:
            parent.adopt(entry)
        orphans = self.orphans.pop((entry.group, entry.hash), None)
        if orphans:
            ancestors = set()  # real hashes form no cycle, but a client may send one
            while parent is not None:
                ancestors.add(parent)
                parent = parent.parent
            for child in orphans:
                if child in ancestors:
                    child.parent_hash = None
                else:
                    entry.adopt(child)
        if entry.parent is None and entry.parent_hash is not None:
            self.orphans.setdefault((entry.group, entry.parent_hash), {})[entry] = None

    def remove(self, entry: BlockEntry) -> None:
        """Unlist an entry. Its children stay, unreachable until the block is stored again."""
        del self.tables[entry.group][entry.hash]
        if entry.parent is not None:
            entry.leave()
        elif entry.parent_hash is not None:
            siblings = self.orphans.get((entry.group, entry.parent_hash))
            if siblings is not None and siblings.pop(entry, self) is None and not siblings:
                del self.orphans[entry.group, entry.parent_hash]
        if entry.first is not None:
            children = entry.children()
            for child in children:
                child.leave()
            self.orphans[entry.group, entry.hash] = dict.fromkeys(children)

    def row(self, group: int, block_hashes: bytes, first: int, last: int) -> list[BlockEntry | None]:
        """The group's blocks [first, last) of a prefix; None: not listed."""
        step, get = self.shapes[group].hash_blocks_per_block * HASH_BYTES, self.tables[group].get
        return [get(block_hashes[end - HASH_BYTES : end]) for end in range((first + 1) * step, last * step + 1, step)]

    def match(self, block_hashes: bytes, start: int, limit: int) -> tuple[int, list[list[BlockEntry]], list[int]]:
        """Find the longest usable prefix from hash block ``start`` with slots below page ``limit``.

        Returns (its end; per group its entries; per group the number of blocks before these that are not needed).
        Nothing usable: (start, empty lists, zeros).
        """
        end = len(block_hashes) // HASH_BYTES
        bases = [start // shape.hash_blocks_per_block for shape in self.shapes]  # the first block of each group
        rows: list[list[BlockEntry | None]] = [[] for _ in self.shapes]
        sparse = [g for g, shape in enumerate(self.shapes) if not shape.cache_kind.whole_prefix]
        for g, shape in enumerate(self.shapes):
            if g not in sparse:
                rows[g] = self._run(g, block_hashes, bases[g], end // shape.hash_blocks_per_block, limit)
                end = min(end, (bases[g] + len(rows[g])) * shape.hash_blocks_per_block)
        end -= end % self.align
        for g in sparse:
            rows[g] = self.row(g, block_hashes, bases[g], end // self.shapes[g].hash_blocks_per_block)
        usable_from = [end] * len(rows)  # per group: all its blocks from here to the end of those examined are usable
        while end > start:  # each iteration ends before the last needed block that is missing
            gap = min((self._gap(g, rows[g], start, end, limit, usable_from) for g in sparse), default=end)
            if gap == end:
                break
            end = gap - gap % self.align
        if end <= start:
            return start, [[] for _ in rows], [0] * len(rows)
        firsts, usable = [], []
        for shape, base, row in zip(self.shapes, bases, rows, strict=True):
            first = shape.first_block(self.hash_block_size, start, end) - base
            firsts.append(first)
            usable.append(cast("list[BlockEntry]", row[first : end // shape.hash_blocks_per_block - base]))
        return end, usable, firsts

    def _run(self, group: int, block_hashes: bytes, first: int, last: int, limit: int) -> list[BlockEntry | None]:
        """The group's blocks from ``first`` on, up to ``last`` or the first that is not usable."""
        found: list[BlockEntry | None] = []
        for at in range(first, last, LOOKUP_BATCH):
            row = self.row(group, block_hashes, at, min(at + LOOKUP_BATCH, last))
            usable = _num_usable(row, limit)
            found += row[:usable]
            if usable < len(row):
                break
        return found

    def _gap(
        self, group: int, row: list[BlockEntry | None], start: int, end: int, limit: int, usable_from: list[int]
    ) -> int:
        """Begin of the last missing block of those needed before ``end``; ``end`` if none is missing. Blocks from
        ``usable_from[group]`` on were examined for a later end, and are not again: that would take seconds."""
        shape = self.shapes[group]
        base = start // shape.hash_blocks_per_block
        first = shape.first_block(self.hash_block_size, start, end)
        for block in range(min(end // shape.hash_blocks_per_block, usable_from[group]) - 1, first - 1, -1):
            if not _num_usable(row[block - base : block - base + 1], limit):
                return block * shape.hash_blocks_per_block
        usable_from[group] = first
        return end


def _num_usable(row: list[BlockEntry | None], limit: int) -> int:
    """Number of entries before the first that is missing, not ready or beyond page ``limit``."""
    for i, entry in enumerate(row):
        if entry is None or entry.state is not READY or entry.slot + entry.size > limit:
            return i
    return len(row)
