"""One stored block, and how blocks hang together: a tree a full-attention group, by parent links.

Children are a ring of siblings (``first`` of the parent, ``next``/``prev``), oldest first: a few words a block,
where a set each would be more than the rest of it.
"""

import enum
from dataclasses import dataclass, field

from vllm_kvtier.store.records import HASH

LOOKED_AT = 1 << 10  # blocks of a run that are looked up together: most chains are missed from some block on


class State(enum.Enum):
    RESERVED = 1  # one client writes it
    READY = 2
    GONE = 3  # nobody finds it any more; its slot is freed when nobody reads or writes it


RESERVED, READY, GONE = State


class Entry:
    __slots__ = (
        "space",
        "group",
        "hash",
        "parent_hash",  # None: the first of its chain, or of a windowed group
        "slot",  # page number; 0: none yet
        "size",  # pages
        "state",
        "client",  # that reserved it; None: nobody writes it
        "tenant",
        "leases",
        "pinned",
        "depth",  # units of the chain up to its end; fewer where what precedes it was not known then
        "used",  # when, in the index's count of requests
        "mark",  # the policy's own
        "stamp",  # the policy's own
        "parent",
        "first",
        "prev",
        "next",
    )

    def __init__(self, space, group: int, block_hash: bytes, parent_hash: bytes | None, size: int, client, tenant):
        self.space, self.group, self.hash, self.parent_hash = space, group, block_hash, parent_hash
        self.size, self.client, self.tenant = size, client, tenant
        self.slot = self.leases = self.depth = self.used = self.mark = self.stamp = 0
        self.state = RESERVED
        self.pinned = False
        self.parent = self.first = None
        self.prev = self.next = None  # nothing points to itself: a dead entry must not wait for the cycle collector

    @property
    def key(self) -> tuple[bytes, int]:
        """What a policy remembers of it after eviction. Spaces apart: a clash would cost a guess, no more."""
        return self.hash, self.group

    @property
    def in_use(self) -> bool:
        return bool(self.leases) or self.pinned or self.state is not READY

    @property
    def evictable(self) -> bool:
        return self.first is None and not self.leases and not self.pinned and self.state is READY

    def adopt(self, child: "Entry") -> None:
        child.parent = self
        if self.first is None:
            self.first = child
            child.prev = child.next = child
        else:
            last = self.first.prev
            child.prev, child.next = last, self.first
            last.next = self.first.prev = child

    def leave(self) -> None:
        """Away from the parent, if there is one."""
        parent = self.parent
        if parent is None:
            return
        if self.next is self:
            parent.first = None
        else:
            self.prev.next, self.next.prev = self.next, self.prev
            if parent.first is self:
                parent.first = self.next
        self.parent = self.prev = self.next = None

    def children(self) -> list["Entry"]:
        found = []
        child = self.first
        while child is not None:
            found.append(child)
            child = child.next if child.next is not self.first else None
        return found


@dataclass
class Shape:
    """A KV cache group, with what follows from it."""

    units: int
    window: int | None  # tokens
    size: int  # slot pages


@dataclass(eq=False)
class Space:
    """Blocks that are interchangeable. ``orphans``: entries by (group, hash of the parent they lost by force)."""

    name: bytes
    unit_tokens: int
    shapes: list[Shape]
    align: int  # units: where blocks of all groups end
    tables: list[dict[bytes, Entry]] = field(init=False)  # a group: by hash
    orphans: dict[tuple[int, bytes], dict[Entry, None]] = field(default_factory=dict)

    def __post_init__(self):
        self.tables = [{} for _ in self.shapes]

    @property
    def empty(self) -> bool:
        return not any(self.tables)

    def insert(self, entry: Entry, parent: Entry | None) -> None:
        """Under its parent, and over the children that an earlier copy of this block left behind."""
        self.tables[entry.group][entry.hash] = entry
        if parent is not None:
            parent.adopt(entry)
        orphans = self.orphans.pop((entry.group, entry.hash), None)
        if orphans:
            above = set()  # hashes cannot be chained in a circle, but a client can say so
            while parent is not None:
                above.add(parent)
                parent = parent.parent
            for child in orphans:
                if child in above:
                    child.parent_hash = None
                else:
                    entry.adopt(child)

    def remove(self, entry: Entry) -> None:
        """Not found any more. Children that it has stay, unreachable until the block is stored anew."""
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

    def row(self, group: int, chain: bytes, first: int, last: int) -> list[Entry | None]:
        """What is listed of the group's blocks [first, last) of a chain."""
        units, get = self.shapes[group].units, self.tables[group].get
        at = range(((first + 1) * units - 1) * HASH, last * units * HASH, units * HASH)
        return [get(chain[i : i + HASH]) for i in at]

    def first_needed(self, shape: Shape, start: int, end: int) -> int:
        """First of the group's blocks from unit ``start`` on that a token at unit ``end`` can see."""
        if shape.window is None:
            return start // shape.units
        seen = max(0, end * self.unit_tokens - shape.window)
        return max(start // shape.units, seen // (shape.units * self.unit_tokens))

    def match(self, chain: bytes, start: int, limit: int) -> tuple[int, list[list[Entry]], list[int]]:
        """The longest usable run from unit ``start`` with slots below page ``limit``.

        Returns (the unit where it ends; per group its entries; per group how many blocks before these are not
        needed). Nothing usable: (start, empty lists, zeros).
        """
        end = len(chain) // HASH
        rows: list[list[Entry]] = [[] for _ in self.shapes]
        for g, shape in enumerate(self.shapes):
            if shape.window is None:
                rows[g] = self._run(g, chain, start // shape.units, end // shape.units, limit)
                end = min(end, (start // shape.units + len(rows[g])) * shape.units)
        end -= end % self.align
        windowed = [g for g, shape in enumerate(self.shapes) if shape.window is not None]
        for g in windowed:
            rows[g] = self.row(g, chain, start // self.shapes[g].units, end // self.shapes[g].units)
        while end > start:  # each turn ends before the last block that is missing in a window
            gap = min((self._gap(g, rows[g], start, end, limit) for g in windowed), default=end)
            if gap == end:
                break
            end = gap - gap % self.align
        if end <= start:
            return start, [[] for _ in rows], [0] * len(rows)
        firsts = [self.first_needed(shape, start, end) - start // shape.units for shape in self.shapes]
        last = [end // shape.units - start // shape.units for shape in self.shapes]
        return end, [row[a:b] for row, a, b in zip(rows, firsts, last, strict=True)], firsts

    def _run(self, group: int, chain: bytes, first: int, last: int, limit: int) -> list[Entry]:
        """The group's blocks from ``first`` on, up to ``last`` or the first that is not usable."""
        found: list[Entry] = []
        for at in range(first, last, LOOKED_AT):
            row = self.row(group, chain, at, min(at + LOOKED_AT, last))
            usable = _usable(row, limit)
            found += usable
            if len(usable) < len(row):
                break
        return found

    def _gap(self, group: int, row: list[Entry | None], start: int, end: int, limit: int) -> int:
        """First unit of the last missing block of the window before ``end``; ``end`` if none is missing."""
        shape = self.shapes[group]
        base = start // shape.units
        for block in range(end // shape.units - 1, self.first_needed(shape, start, end) - 1, -1):
            if not _usable(row[block - base : block - base + 1], limit):
                return block * shape.units
        return end


def _usable(row: list[Entry | None], limit: int) -> list[Entry]:
    """The entries before the first that is missing, not ready or beyond page ``limit``."""
    for i, entry in enumerate(row):
        if entry is None or entry.state is not READY or entry.slot + entry.size > limit:
            return row[:i]
    return row
