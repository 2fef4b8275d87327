"""One node of a replay over many: its tiers under the policies of the store, and when it is free.

The table of blocks is a dictionary here, which makes 1,000 nodes affordable. It holds pieces of prompts, which are
stored and evicted whole, leaves first.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_kvtier.store.eviction import DEFAULT_POLICY, POLICIES
from vllm_kvtier.store.eviction.base import Policy
from vllm_kvtier.store.tiers.admission import admission


@dataclass(frozen=True)
class Cluster:
    """``cache``, ``memory``, ``disk``: blocks of the trace in each node's tiers.

    ``shared``: where a node looks for blocks that it lacks. ``none``: nowhere. ``nodes``: in other nodes' stores, of
    which it asks ``peers``. ``pool``: in a pool to which each node gives ``pool`` blocks, with ``replicas`` of each.
    """

    nodes: int
    memory: int
    disk: int = 0
    cache: int = 0
    routing: str = "kv"
    shared: str = "none"
    peers: int = 64
    pool: int = 0
    replicas: int = 1
    memory_policy: str = DEFAULT_POLICY
    disk_admission: str = "reuse"


@dataclass(eq=False, slots=True)
class Piece:
    """What a policy takes for an index's entry."""

    key: int
    size: int  # blocks
    parent: "Piece | None" = None
    children: "dict[Piece, None] | None" = None
    mark: int = 0
    stamp: int = 0


class Tier:
    """``blocks`` of room for pieces. ``linked``: a piece is stored only if the piece before it is."""

    def __init__(self, blocks: int, policy: str, on_evicted: Callable[[Piece], None], linked: bool = True):
        self.pieces: dict[int, Piece] = {}
        self._blocks = self._free = blocks
        self._policy: Policy = POLICIES[policy]()
        self._on_evicted, self._linked = on_evicted, linked

    def find(self, keys: Sequence[int], start: int) -> int:
        """The end of the pieces that follow one another from ``start``."""
        for at in range(start, len(keys)):
            if keys[at] not in self.pieces:
                return at
        return len(keys)

    def touch(self, keys: Sequence[int]) -> list[Piece]:
        """Those of the pieces that are here, last first."""
        found = [piece for key in reversed(keys) if (piece := self.pieces.get(key)) is not None]
        if found:
            self._policy.touch(found)
        return found

    def add(self, keys: Sequence[int], sizes: Sequence[int], start: int) -> list[Piece]:
        """Store pieces from ``start`` as far as they fit beside those before it. Returns the new ones."""
        if self._linked and start and keys[start - 1] not in self.pieces:
            return []
        left, new = self._blocks - sum(sizes[:start]), []
        for at in range(start, len(keys)):
            left -= sizes[at]
            if left < 0:
                break
            if keys[at] not in self.pieces:
                new.append(Piece(keys[at], sizes[at]))
        self._make_room(sum(piece.size for piece in new), keys)
        before = self.pieces.get(keys[start - 1]) if self._linked and start else None
        for piece in new if self._linked else ():
            if before is not None:
                piece.parent = before
                before.children = before.children or {}
                before.children[piece] = None
            before = piece
        for piece in reversed(new):
            self.pieces[piece.key] = piece
            self._policy.add(piece)
            self._free -= piece.size
        return new

    def _make_room(self, blocks: int, keys: Sequence[int]) -> None:
        """Evict what is coldest, and before it what follows it; none of ``keys``."""
        while self._free < blocks:
            path = [self._policy.coldest()]
            while path[-1].children and path[-1].key not in keys:
                path.append(next(iter(path[-1].children)))
            if path[-1].key in keys:
                in_use, piece = [], path[-1]
                while piece is not None:
                    in_use.append(piece)
                    piece = piece.parent
                self._policy.defer(in_use)
                continue
            while path and self._free < blocks and not path[-1].children:
                self._evict(path.pop())

    def _evict(self, piece: Piece) -> None:
        self._policy.remove(piece, True)
        del self.pieces[piece.key]
        if piece.parent is not None:
            del piece.parent.children[piece]
        self._free += piece.size
        self._on_evicted(piece)


Holders = defaultdict[int, set[int]]  # nodes that have a piece in memory or on disk


class Node:
    def __init__(self, number: int, cluster: Cluster, holders: Holders):
        self.number, self._holders = number, holders
        self.cache = Tier(cluster.cache, "lru", lambda piece: None) if cluster.cache else None
        self.memory = Tier(cluster.memory, cluster.memory_policy, self._left_memory)
        self.disk = Tier(cluster.disk, DEFAULT_POLICY, self._left_disk) if cluster.disk else None
        self._admission = admission(cluster.disk_admission)
        self.free_at = self.busy = 0.0  # when it has computed all that it was given; seconds spent so far

    def reach(self, keys: Sequence[int]) -> int:
        """Leading pieces in memory or on disk."""
        end = self.memory.find(keys, 0)
        return end if self.disk is None else self.disk.find(keys, end)

    def load(self, keys: Sequence[int], sizes: Sequence[int]) -> tuple[int, int, int]:
        """Find a prefix: its end in the engine's cache, in memory behind that, and on disk, which goes to memory."""
        cached = 0
        if self.cache is not None:
            cached = self.cache.find(keys, 0)
            self.cache.touch(keys[:cached])
            self.cache.add(keys, sizes, cached)
            if cached:
                self._used(keys, sizes, cached)
        found = self.memory.find(keys, cached)
        self._used(keys, sizes, found)
        end = found
        if self.disk is not None and (end := self.disk.find(keys, found)) > found:
            self.disk.touch(keys[:end])
            self.store(keys[:end], sizes, found)
        return cached, found, end

    def store(self, keys: Sequence[int], sizes: Sequence[int], start: int) -> int:
        """Store the pieces from ``start`` in memory. Returns the number of new blocks."""
        new = self.memory.add(keys, sizes, start)
        for piece in new:
            self._holders[piece.key].add(self.number)
        if self.disk is not None:
            admitted = [piece.key for piece in new if self._admission.stored(piece)]
            if admitted:
                self._demote(keys, sizes, admitted[-1])
        return sum(piece.size for piece in new)

    def _used(self, keys: Sequence[int], sizes: Sequence[int], end: int) -> None:
        touched = self.memory.touch(keys[:end])
        if self.disk is not None and touched and self._admission.used(touched[0]):
            self._demote(keys, sizes, touched[0].key)

    def _demote(self, keys: Sequence[int], sizes: Sequence[int], last: int) -> None:
        keys = keys[: keys.index(last) + 1]
        self.disk.add(keys, sizes, self.disk.find(keys, 0))

    def _left_memory(self, piece: Piece) -> None:
        if self.disk is not None:
            self._admission.gone(piece)
            if piece.key in self.disk.pieces:
                return
        self._holders[piece.key].discard(self.number)

    def _left_disk(self, piece: Piece) -> None:
        if piece.key not in self.memory.pieces:
            self._holders[piece.key].discard(self.number)
