"""Who of this node's engines has which blocks in its own cache, and who has a chain from some unit on.

Engines of one *family* make the same key of the same content, and can read each other; families never mix. A block's
key has 64 bits, which is not enough to trust: the directory only says whom to ask, and the holder answers for what it
has. So it may be behind by what is under way, and nothing here is leased.
"""

import itertools
import operator
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vllm_kvtier.store import messages as m
from vllm_kvtier.store.records import HASH, BadRequest

KEY = 8  # bytes
SWEEP = 1 << 14  # keys of somebody who left that are forgotten in one go: a few milliseconds


@dataclass(frozen=True, slots=True)
class Sought:
    """Blocks of a chain, from block ``first`` on; a block has ``stride`` units. A key is a head XOR ``mix``."""

    first: int
    stride: int
    heads: Sequence[int]  # 64 bits each
    mix: int

    def keys(self) -> Iterator[int]:
        """Made as they are wanted: of most chains nobody has the first block."""
        return map(operator.xor, self.heads, itertools.repeat(self.mix))


def sought(chain: bytes, start: int, mix: bytes, stride: int) -> Sought | None:
    """What a Lookup asks the directory for; None: nothing. Raises BadRequest.

    chain: whole hashes. start: in units; where a block has begun before it, that block is sought too.
    """
    if not mix:
        return None
    if len(mix) != KEY:
        raise BadRequest(f"a mix of {len(mix)} bytes: it has {KEY}, or none where the directory is not asked")
    first = start // stride
    words = HASH // KEY
    heads = _unpacked(chain)[((first + 1) * stride - 1) * words :: stride * words]
    return Sought(first, stride, heads, int.from_bytes(mix, "little"))


def _unpacked(keys: bytes) -> Sequence[int]:
    """Of 8 bytes each, little-endian, as every machine is that this runs on. Nothing is copied, and the store's
    process goes without numpy."""
    return memoryview(keys).cast("Q") if keys else ()  # an empty view has no cast


@dataclass(eq=False, slots=True)
class _Engine:
    family: "_Family"
    bit: int  # of the family's masks
    host: str
    port: int
    instance: str
    keys: set[int] = field(default_factory=set)
    named: int = 0  # when it was last named first


@dataclass(eq=False, slots=True)
class _Family:
    name: bytes
    masks: dict[int, int] = field(default_factory=dict)  # by key: bits of those who have it
    engines: dict[int, _Engine] = field(default_factory=dict)  # by bit
    present: int = 0  # bits of ``engines``
    taken: int = 0  # these, and those of who left and may still be in ``masks``

    def drop(self, key: int, bit: int) -> None:
        left = self.masks[key] & ~bit
        if left:
            self.masks[key] = left
        else:
            del self.masks[key]


class Directory:
    """Single-threaded; no I/O. ``client`` is any int that the server gives a connection. ``limit``: keys of each."""

    def __init__(self, limit: int = m.MAX_RESIDENT):
        self._limit = limit
        self._families: dict[bytes, _Family] = {}
        self._engines: dict[int, _Engine] = {}  # by client
        self._left: deque[tuple[_Family, int, set[int]]] = deque()  # whose keys are to be forgotten yet
        self._named = 0  # answers so far that named somebody

    # -- who is there --------------------------------------------------------------------------------------------

    def present(self, client: int, family: bytes, host: str, port: int, instance: str) -> None:
        """The client holds blocks, and this is where to ask it for them. Said again, it replaces what was said before;
        its keys stay unless the family is another one."""
        engine = self._engines.get(client)
        if engine is not None and engine.family.name == family:
            engine.host, engine.port, engine.instance = host, port, instance
            return
        self.leave(client)
        self._enter(client, family, host, port, instance)

    def leave(self, client: int) -> None:
        """It is named no more; ``sweep`` forgets its keys. Clients that are not present are ignored."""
        engine = self._engines.pop(client, None)
        if engine is None:
            return
        engine.family.present &= ~engine.bit
        del engine.family.engines[engine.bit]
        self._left.append((engine.family, engine.bit, engine.keys))

    def sweep(self, limit: int = SWEEP) -> bool:
        """Forget up to so many keys of those who left; whether there are more. Call it until there are not: only then
        are their bits given to others."""
        while self._left and limit > 0:
            here, bit, keys = self._left[0]
            for _ in range(min(limit, len(keys))):
                here.drop(keys.pop(), bit)
                limit -= 1
            if not keys:
                self._left.popleft()
                here.taken &= ~bit
                if not here.taken:
                    del self._families[here.name]
        return bool(self._left)

    def _enter(self, client: int, family: bytes, host: str, port: int, instance: str) -> _Engine:
        here = self._families.get(family)
        if here is None:
            here = self._families[family] = _Family(family)
        bit = ~here.taken & (here.taken + 1)  # the lowest that is free
        engine = _Engine(here, bit, host, port, instance)
        here.taken |= bit
        here.present |= bit
        here.engines[bit] = self._engines[client] = engine
        return engine

    def others(self) -> dict[int, int]:
        """By client: how many others of its family are present."""
        return {client: len(engine.family.engines) - 1 for client, engine in self._engines.items()}

    def counts(self) -> m.DirectoryCounts:
        return m.DirectoryCounts(len(self._engines), sum(len(engine.keys) for engine in self._engines.values()))

    # -- what they have ------------------------------------------------------------------------------------------

    def update(self, client: int, added: bytes, gone: bytes, anew: bool = False) -> None:
        """The client has the blocks of keys ``added`` (packed), and then no longer those ``gone``; what it had, or had
        not, already is ignored. ``anew``: it has no others (``sweep``, then). Raises BadRequest, and changes nothing,
        if it is not present or has too many."""
        engine = self._engines.get(client)
        if engine is None:
            raise BadRequest("resident blocks of an engine that has not said where to ask for them")
        if len(added) % KEY or len(gone) % KEY:
            raise BadRequest(f"{len(added)} and {len(gone)} bytes of keys: a key has {KEY}")
        new = set(_unpacked(added))
        if not anew:
            new -= engine.keys
        count = len(new) + (0 if anew else len(engine.keys))
        if count > self._limit:
            raise BadRequest(f"{count} resident blocks of one engine, {self._limit} are possible")
        if anew and engine.keys:
            before = engine
            self.leave(client)
            engine = self._enter(client, before.family.name, before.host, before.port, before.instance)
            engine.named = before.named
        mine, masks, bit = engine.keys, engine.family.masks, engine.bit
        mine |= new
        for key in new:
            masks[key] = masks.get(key, 0) | bit
        old = mine.intersection(_unpacked(gone))
        mine -= old
        for key in old:
            engine.family.drop(key, bit)

    def holders(self, client: int, sought: Sought | None) -> list[m.Holder]:
        """Who else of the client's family has blocks of these from the first one on: the longest first, at most
        messages.MAX_HOLDERS. Among equals whoever was named first longest ago: so they share the work. A client that
        is not present has no family, and gets nobody."""
        engine = self._engines.get(client)
        if sought is None or engine is None:
            return []
        here = engine.family
        others = here.present & ~engine.bit
        if not others:
            return []
        masks = map(here.masks.get, sought.keys(), itertools.repeat(0))
        run = itertools.accumulate(masks, operator.and_, initial=others)
        left = list(itertools.takewhile(bool, run))  # [i]: who has the first i blocks; fewer and fewer
        found: list[tuple[int, _Engine]] = []
        blocks, seen = len(left) - 1, 0
        while blocks > 0 and len(found) < m.MAX_HOLDERS:
            mask = left[blocks]
            equals = [here.engines[bit] for bit in _bits(mask & ~seen)]
            found += [(blocks, each) for each in sorted(equals, key=lambda each: each.named)]
            seen = mask
            # Each is a part of the one before it, and so a smaller number: where it was last more than this?
            blocks = bisect_left(left, -mask, hi=blocks, key=operator.neg) - 1
        if found:
            self._named += 1
            found[0][1].named = self._named
        return [
            m.Holder(each.host, each.port, each.instance, (sought.first + blocks) * sought.stride)
            for blocks, each in found[: m.MAX_HOLDERS]
        ]


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
