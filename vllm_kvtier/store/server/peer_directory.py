"""The directory of blocks in the GPU caches of this node's engines, by content key.

Engines with the same *compat id* compute equal keys for equal content and can read each other's caches. A key has 64
bits, which is not enough to identify a block: the directory names peers to ask, and the peer checks. So the directory
may lag behind, and it leases nothing.
"""

import itertools
import operator
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.index.types import HASH_BYTES, BadRequest

KEY_BYTES = 8  # bytes
SWEEP_KEYS = 1 << 14  # keys of a disconnected engine removed at a time: a few milliseconds


@dataclass(frozen=True, slots=True)
class DirectoryQuery:
    """Blocks of a prefix from block ``first`` on, of ``hash_blocks_per_block`` hash blocks each. A key is a head (the
    first 8 bytes of a hash) XOR ``key_mask``."""

    first: int
    hash_blocks_per_block: int
    heads: Sequence[int]  # 64 bits each
    key_mask: int

    def keys(self) -> Iterator[int]:
        """The keys, computed lazily: for most prefixes no engine has the first block."""
        return map(operator.xor, self.heads, itertools.repeat(self.key_mask))


def directory_query(
    block_hashes: bytes, start: int, key_mask: bytes, hash_blocks_per_block: int
) -> DirectoryQuery | None:
    """The directory's part of a Lookup; None: none. Raises BadRequest.

    start: in hash blocks; a block that contains it is included.
    """
    if not key_mask:
        return None
    if len(key_mask) != KEY_BYTES:
        raise BadRequest(f"a key mask of {len(key_mask)} bytes; {KEY_BYTES} or, without a directory query, none")
    first = start // hash_blocks_per_block
    words = HASH_BYTES // KEY_BYTES
    heads = _unpacked(block_hashes)[((first + 1) * hash_blocks_per_block - 1) * words :: hash_blocks_per_block * words]
    return DirectoryQuery(first, hash_blocks_per_block, heads, int.from_bytes(key_mask, "little"))


def _unpacked(keys: bytes) -> Sequence[int]:
    """Keys as integers, without a copy: 8 bytes each, little-endian as all supported machines. Without numpy, which
    the store's process does not load."""
    return memoryview(keys).cast("Q") if keys else ()  # an empty view has no cast


@dataclass(eq=False, slots=True)
class _Engine:
    group: "_CompatGroup"
    bit: int  # of the group's masks
    host: str
    port: int
    instance: str
    keys: set[int] = field(default_factory=set)
    named: int = 0  # the last answer that named it first


@dataclass(eq=False, slots=True)
class _CompatGroup:
    name: bytes
    masks: dict[int, int] = field(default_factory=dict)  # by key: bits of the engines that have it
    engines: dict[int, _Engine] = field(default_factory=dict)  # by bit
    present: int = 0  # bits of ``engines``
    taken: int = 0  # these, and bits of disconnected engines that may still be in ``masks``

    def remove(self, key: int, bit: int) -> None:
        left = self.masks[key] & ~bit
        if left:
            self.masks[key] = left
        else:
            del self.masks[key]


class PeerDirectory:
    """Single-threaded; no I/O. ``client`` is any int that the server gives a connection. ``limit``: keys per engine."""

    def __init__(self, limit: int = m.MAX_CACHED_BLOCKS):
        self._limit = limit
        self._groups: dict[bytes, _CompatGroup] = {}
        self._engines: dict[int, _Engine] = {}  # by client
        self._left: deque[tuple[_CompatGroup, int, set[int]]] = deque()  # disconnected engines with keys to remove
        self._named = 0  # answers so far that named an engine

    # -- engines -------------------------------------------------------------------------------------------------

    def present(self, client: int, compat_id: bytes, host: str, port: int, instance: str) -> None:
        """Add a client with its endpoint, or update it; its keys stay unless its compat id changes."""
        engine = self._engines.get(client)
        if engine is not None and engine.group.name == compat_id:
            engine.host, engine.port, engine.instance = host, port, instance
            return
        self.leave(client)
        self._enter(client, compat_id, host, port, instance)

    def leave(self, client: int) -> None:
        """Remove a client; ``sweep`` removes its keys. Clients that are not present are ignored."""
        engine = self._engines.pop(client, None)
        if engine is None:
            return
        engine.group.present &= ~engine.bit
        del engine.group.engines[engine.bit]
        self._left.append((engine.group, engine.bit, engine.keys))

    def sweep(self, limit: int = SWEEP_KEYS) -> bool:
        """Remove up to ``limit`` keys of disconnected engines. Returns whether there are more; to be called until there
        are none, because only then their bits are reused."""
        while self._left and limit > 0:
            here, bit, keys = self._left[0]
            for _ in range(min(limit, len(keys))):
                here.remove(keys.pop(), bit)
                limit -= 1
            if not keys:
                self._left.popleft()
                here.taken &= ~bit
                if not here.taken:
                    del self._groups[here.name]
        return bool(self._left)

    def _enter(self, client: int, compat_id: bytes, host: str, port: int, instance: str) -> _Engine:
        here = self._groups.get(compat_id)
        if here is None:
            here = self._groups[compat_id] = _CompatGroup(compat_id)
        bit = ~here.taken & (here.taken + 1)  # the lowest free one
        engine = _Engine(here, bit, host, port, instance)
        here.taken |= bit
        here.present |= bit
        here.engines[bit] = self._engines[client] = engine
        return engine

    def others(self) -> dict[int, int]:
        """By client: number of other engines with its compat id."""
        return {client: len(engine.group.engines) - 1 for client, engine in self._engines.items()}

    def counts(self) -> m.DirectoryCounts:
        return m.DirectoryCounts(len(self._engines), sum(len(engine.keys) for engine in self._engines.values()))

    # -- blocks --------------------------------------------------------------------------------------------------

    def update(self, client: int, added: bytes, gone: bytes, anew: bool = False) -> None:
        """Add and then remove keys (packed) of a client. ``anew``: it has no others (call ``sweep`` then). Raises
        BadRequest, and changes nothing, if the client is not present or has too many keys."""
        engine = self._engines.get(client)
        if engine is None:
            raise BadRequest("Cached from an engine that has not sent Present")
        if len(added) % KEY_BYTES or len(gone) % KEY_BYTES:
            raise BadRequest(f"{len(added)} and {len(gone)} bytes of keys, which have {KEY_BYTES} each")
        new = set(_unpacked(added))
        if not anew:
            new -= engine.keys
        count = len(new) + (0 if anew else len(engine.keys))
        if count > self._limit:
            raise BadRequest(f"{count} cached blocks of one engine; at most {self._limit} are allowed")
        if anew and engine.keys:
            before = engine
            self.leave(client)
            engine = self._enter(client, before.group.name, before.host, before.port, before.instance)
            engine.named = before.named
        mine, masks, bit = engine.keys, engine.group.masks, engine.bit
        mine |= new
        for key in new:
            masks[key] = masks.get(key, 0) | bit
        old = mine.intersection(_unpacked(gone))
        mine -= old
        for key in old:
            engine.group.remove(key, bit)

    def holders(self, client: int, directory_query: DirectoryQuery | None) -> list[m.Holder]:
        """Other engines with the client's compat id that have a prefix of these blocks, the longest first, at most
        MAX_HOLDERS. Among equal ones the one that was named first longest ago comes first, which spreads the load.
        Empty for a client that is not present."""
        engine = self._engines.get(client)
        if directory_query is None or engine is None:
            return []
        here = engine.group
        others = here.present & ~engine.bit
        if not others:
            return []
        masks = map(here.masks.get, directory_query.keys(), itertools.repeat(0))
        run = itertools.accumulate(masks, operator.and_, initial=others)
        left = list(itertools.takewhile(bool, run))  # [i]: bits of the engines that have the first i blocks
        found: list[tuple[int, _Engine]] = []
        blocks, seen = len(left) - 1, 0
        while blocks > 0 and len(found) < m.MAX_HOLDERS:
            mask = left[blocks]
            equals = [here.engines[bit] for bit in _bits(mask & ~seen)]
            found += [(blocks, each) for each in sorted(equals, key=lambda each: each.named)]
            seen = mask
            # Each mask is a subset of the one before, so the numbers decrease: find the last that is larger.
            blocks = bisect_left(left, -mask, hi=blocks, key=operator.neg) - 1
        if found:
            self._named += 1
            found[0][1].named = self._named
        first, step = directory_query.first, directory_query.hash_blocks_per_block
        return [
            m.Holder(each.host, each.port, each.instance, (first + blocks) * step)
            for blocks, each in found[: m.MAX_HOLDERS]
        ]


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


class PeerDirectoryService:
    """On the server's reactor thread. ``send(client, message)``; ``soon``: the reactor's ``call_soon``. Raises
    BadRequest as PeerDirectory does."""

    def __init__(self, send: Callable[[int, m.PeerCount], None], soon: Callable[[Callable[[], None]], None]):
        self._send, self._soon = send, soon
        self._directory = PeerDirectory()
        self._sent: dict[int, int] = {}  # by client: the last PeerCount
        self._sweeping = False

    def present(self, client: int, r: m.Present) -> None:
        self._directory.present(client, r.compat_id, r.host, r.port, r.instance)
        self._sent.pop(client, None)  # Present is always answered
        self._membership_changed()

    def cached(self, client: int, r: m.Cached) -> None:
        self._directory.update(client, r.added, r.gone, r.anew)
        if r.anew:
            self._begin_sweep()

    def left(self, client: int) -> None:
        """The connection ended."""
        self._directory.leave(client)
        self._sent.pop(client, None)
        self._membership_changed()

    def holders(self, client: int, sought: DirectoryQuery | None) -> list[m.Holder]:
        return self._directory.holders(client, sought)

    def counts(self) -> m.DirectoryCounts:
        return self._directory.counts()

    def _membership_changed(self) -> None:
        for client, others in self._directory.others().items():
            if self._sent.get(client) != others:
                self._sent[client] = others
                self._send(client, m.PeerCount(others))
        self._begin_sweep()

    def _begin_sweep(self) -> None:
        if not self._sweeping:
            self._sweep()

    def _sweep(self) -> None:
        """In slices: an engine may have millions of keys, and other messages are handled between."""
        self._sweeping = self._directory.sweep()
        if self._sweeping:
            self._soon(self._sweep)
