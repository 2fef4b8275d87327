"""What a request lacks in memory is looked for in the tiers below, and brought up into the pool.

A lookup that ends in the middle of its chain begins an *ahead*: the tiers are asked in their order how far they go on
from there, each from where the one before ended, and what they have is read into slots in chunks. A chunk's blocks
are reserved like an engine's, found by everybody once they are read, and leased by us until the ahead is over, so that
its beginning is still there when its end arrives. Several aheads may want the same blocks: whoever reserves one reads
it, and the others are over no sooner than he. Nobody is needed to wait: an ahead goes on when its request is gone.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.entries import Shape
from vllm_kvtier.store.fates import Fate
from vllm_kvtier.store.index import Index
from vllm_kvtier.store.lower.base import Block, Find, Tier, Want
from vllm_kvtier.store.messages import Below, GroupShape
from vllm_kvtier.store.records import EXISTS, HASH, NO_ROOM, ZERO, BadRequest
from vllm_kvtier.wire.slots import PAGE

logger = get_logger(__name__)

# Large enough for a disk's or a network's full rate, small enough that short chains come in between and that what a
# request gets before its patience ends is most of what was read by then.
CHUNK_BYTES = 32 << 20
CHUNK_BLOCKS = 256
IN_FLIGHT = 2  # chunks of one segment: the tier has the next one when it is through with the first
# Where all memory is in use, finding that out takes milliseconds, in which nobody is answered. Nothing new is begun for
# so many times as long.
FULL_PAUSE = 20.0
MOST_AHEADS = 256  # at a time; what is asked beyond these gets what is in memory

_Key = tuple[bytes, int, bytes]  # space, group, hash


class Handle(Protocol):
    def cancel(self) -> None: ...


class Waiter:
    """Somebody who wants to know when an ahead is over; ``cancel`` if he goes."""

    __slots__ = ("_call", "_timer", "until")

    def __init__(self, call: Callable[[], None], until: float):
        self._call: Callable[[], None] | None = call
        self._timer: Handle | None = None
        self.until = until

    def fire(self) -> None:
        call = self._call
        self.cancel()
        if call is not None:
            call()

    def cancel(self) -> None:
        self._call = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Segment:
    """Blocks that one tier has for one ahead, and how far they have come."""

    def __init__(self, ahead: "Ahead", tier: Tier, find: Find, blocks: list[Block]):
        self.ahead, self.tier, self.find = ahead, tier, find
        self.rest = blocks  # not reserved yet, the last of the chain first
        self.left_bytes = sum(b.pages for b in blocks) * PAGE  # not arrived yet
        self.in_flight = 0
        self.over = False
        self.awaited_by: set[Ahead] = set()


class Ahead:
    """Attributes: ``units``: the chain's end as far as it has been found; ``asking``: a tier is being asked, for
    ``asked``; ``coming``: (end of the chain, time) that it says its answer is going to have, if it does."""

    def __init__(self, key: tuple, want: Want, pages_limit: int):
        self.key, self.want, self.pages_limit = key, want, pages_limit
        self.units = want.start
        self.asking: Tier | None = None
        self.asked: Want | None = None
        self.coming: tuple[int, float] | None = None
        self.waits_for: set[Segment] = set()  # its own, and those of others that read what it wants
        self.waiters: list[Waiter] = []
        self.leases: list[int] = []  # on what has come
        self.over = False

    @property
    def hopeful(self) -> bool:
        """No: it waits for a tier that is down, perhaps for ever: for a process that cannot even be killed."""
        tiers = {segment.tier for segment in self.waits_for} | ({self.asking} if self.asking is not None else set())
        return all(tier.usable for tier in tiers)


class Promotion:
    """On the server's reactor thread. ``client``: a number no connection has; ours in the index, one a kind of space.

    ``call_later(seconds, call)`` returns what can be cancelled.
    """

    def __init__(
        self,
        index: Index,
        tiers: Sequence[Tier],
        client: int,
        call_later: Callable[[float, Callable[[], None]], Handle],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._index, self._tiers, self._call_later, self._clock = index, list(tiers), call_later, clock
        self._next_client = client
        self._clients: dict[tuple, int] = {}  # by what an engine's hello says of its groups
        self._aheads: dict[tuple, Ahead] = {}
        self._inbound: dict[_Key, Segment] = {}
        self._left_bytes: dict[Tier, int] = dict.fromkeys(self._tiers, 0)
        self._full_until = 0.0  # no room before that
        for tier in self._tiers:
            tier.on_coming = self._coming
        self.promoted_blocks = self.promoted_bytes = self.refused_room = self.failed_blocks = 0

    # -- asking --------------------------------------------------------------------------------------------------

    def ahead(self, want: Want, pages_limit: int) -> Ahead | None:
        """Look for the rest of a chain and bring it; None: no tier can be asked, or nothing is left to ask for, or
        nobody can say when it comes.

        One that is over when this returns found nothing, or nothing that could be read.
        """
        if want.start >= want.units or not any(tier.usable for tier in self._tiers_for(want)):
            return None
        key = (want.space, want.chain[-HASH:], want.nodes, want.skip)
        known = self._aheads.get(key)
        if known is not None:
            return known if known.hopeful else None
        if len(self._aheads) >= MOST_AHEADS or self._clock() < self._full_until:
            return None
        ahead = self._aheads[key] = Ahead(key, want, pages_limit)
        self._seek(ahead, iter(self._tiers_for(want)))
        return ahead

    def peek(self, want: Want) -> int:
        """How far the chain might go on below: known where tiers answer at once, else perhaps all of it. Nothing is
        brought up."""
        units = want.start
        for tier in self._tiers_for(want):
            if units >= want.units or not tier.usable:
                continue
            if tier.latency():
                return want.units
            found: list[int] = []

            def look(find: Find, tier=tier, found=found) -> None:
                found.append(find.units)
                if find.units > find.want.start:
                    tier.release(find)

            tier.find(replace(want, start=units), look)
            units = max(units, *found)
        return units

    def below(self, ahead: Ahead) -> Below:
        """What is expected of it: the end of the chain as far as it is known, the seconds until that is here, and
        those until it is known whether there is more."""
        arrive = max((s.tier.seconds(self._left_bytes[s.tier]) for s in ahead.waits_for), default=0.0)
        if ahead.asking is None:
            return Below(ahead.units, arrive, 0.0)
        if ahead.coming is None:
            return Below(ahead.units, arrive, ahead.asking.latency())
        units, when = ahead.coming
        answer = max(ahead.asking.latency(), when - self._clock())
        if units <= ahead.units or ahead.waits_for:  # first things first
            return Below(ahead.units, arrive, answer)
        nbytes = sum(block.pages for block in _blocks(Find(ahead.asked, units))) * PAGE
        return Below(units, answer + ahead.asking.seconds(nbytes), 0.0 if units == ahead.want.units else answer)

    def wait(self, ahead: Ahead, patience: float, call: Callable[[], None]) -> Waiter:
        """``call`` when all that was found is here, or known not to be in time; ``patience`` seconds from now
        at the latest; never from within this."""
        waiter = Waiter(call, self._clock() + patience)
        waiter._timer = self._call_later(0.0 if ahead.over else max(0.0, patience), waiter.fire)
        ahead.waiters.append(waiter)
        return waiter

    def __len__(self) -> int:
        return len(self._aheads)

    # -- looking -------------------------------------------------------------------------------------------------

    def _seek(self, ahead: Ahead, tiers: Iterable[Tier]) -> None:
        """Ask the next tier for what follows what was found so far."""
        want = ahead.want
        for tier in tiers:
            if ahead.units >= want.units:
                break
            if not tier.usable:
                continue
            ahead.asking = tier
            ahead.asked = replace(want, start=ahead.units)
            tier.find(ahead.asked, lambda find, tier=tier: self._found(ahead, tiers, tier, find))
            return
        ahead.asking = None
        self._settle(ahead)
        if not ahead.over:
            self._tell_who_waits_in_vain(ahead)

    def _coming(self, want: Want, units: int, seconds: float) -> None:
        """A tier that is being asked says what its answer is going to be, and when."""
        ahead = next((ahead for ahead in self._aheads.values() if ahead.asked is want), None)
        if ahead is not None and ahead.asking is not None:
            ahead.coming = units, self._clock() + seconds
            if units > ahead.units and not ahead.waits_for:
                self._tell_who_waits_in_vain(ahead)

    def _tell_who_waits_in_vain(self, ahead: Ahead) -> None:
        soonest = self._clock() + self.below(ahead).seconds
        for waiter in [waiter for waiter in ahead.waiters if waiter.until < soonest]:
            ahead.waiters.remove(waiter)
            waiter.fire()

    def _tiers_for(self, want: Want) -> list[Tier]:
        return [tier for tier in self._tiers if tier.name not in want.skip]

    def _found(self, ahead: Ahead, tiers: Iterable[Tier], tier: Tier, find: Find) -> None:
        ahead.asked = ahead.coming = None
        if find.units > find.want.start:
            ahead.units = find.units
            self._begin(ahead, tier, find)
        self._seek(ahead, tiers)

    def _begin(self, ahead: Ahead, tier: Tier, find: Find) -> None:
        segment = Segment(ahead, tier, find, _blocks(find))
        ahead.waits_for.add(segment)
        segment.awaited_by.add(ahead)
        self._left_bytes[tier] += segment.left_bytes
        self._go_on(segment)

    # -- reading -------------------------------------------------------------------------------------------------

    def _go_on(self, segment: Segment) -> None:
        while segment.rest and segment.in_flight < IN_FLIGHT:
            blocks = self._reserve(segment, _chunk(segment.rest))
            if blocks:
                segment.in_flight += 1
                segment.tier.read(
                    segment.find, blocks, lambda good, blocks=blocks: self._arrived(segment, blocks, good)
                )
        if not segment.rest and not segment.in_flight and not segment.over:
            self._end(segment)

    def _reserve(self, segment: Segment, chunk: list[Block]) -> list[Block]:
        """Those of a chunk that are ours to read now, with their slots."""
        space, client = segment.find.want.space, self._client(segment.find.want)
        began = self._clock()
        try:
            slots = self._index.reserve(
                client,
                space,
                b"",
                [b.group for b in chunk],
                b"".join(b.hash for b in chunk),
                b"".join(b.parent for b in chunk),
                segment.ahead.pages_limit,
                forever=True,  # the tier may write to them for as long as its read takes
            )
        except BadRequest as error:  # since the chain was asked for, the space was cleared, and is another's now
            logger.warning("kvtier: what was asked for is not brought up: %s", error)
            slots = [NO_ROOM] * len(chunk)
        if slots[-1] == NO_ROOM:
            now = self._clock()
            self._full_until = now + FULL_PAUSE * (now - began)
        got = []
        for block, slot in zip(chunk, slots, strict=True):
            key = (space, block.group, block.hash)
            if slot > 0:
                got.append(Block(space, block.group, block.hash, block.parent, b"", slot, block.pages, block.unit))
                self._inbound[key] = segment
                continue
            self._less(segment, block.pages * PAGE)
            if slot == EXISTS:
                other = self._inbound.get(key)
                if other is not None and other is not segment:
                    other.awaited_by.add(segment.ahead)
                    segment.ahead.waits_for.add(other)
            elif segment.rest:  # no room, or what precedes it went away: what follows would be of no use
                self.refused_room += 1
                self._give_up(segment)
        return got

    def _arrived(self, segment: Segment, blocks: list[Block], good: list[bool]) -> None:
        client = self._client(segment.find.want)
        right = [block for block, ok in zip(blocks, good, strict=True) if ok]
        wrong = [block for block, ok in zip(blocks, good, strict=True) if not ok]
        for block in blocks:
            key = (block.space, block.group, block.hash)
            if self._inbound.get(key) is segment:  # else it was cleared, and somebody else reads it again
                del self._inbound[key]
            self._less(segment, block.pages * PAGE)
        self._index.commit(client, [block.slot for block in right])
        self._index.abort(client, [block.slot for block in wrong], Fate.UNREAD)
        if right:
            lease, _ = self._index.hold(client, [(b.space, b.group, b.hash) for b in right], forever=True)
            if lease:
                segment.ahead.leases.append(lease)
        self.promoted_blocks += len(right)
        self.promoted_bytes += sum(block.pages for block in right) * PAGE
        self.failed_blocks += len(wrong)
        segment.in_flight -= 1
        if wrong:
            self._give_up(segment)
        self._go_on(segment)

    def _give_up(self, segment: Segment) -> None:
        self._less(segment, sum(block.pages for block in segment.rest) * PAGE)
        segment.rest = []

    def _less(self, segment: Segment, nbytes: int) -> None:
        segment.left_bytes -= nbytes
        self._left_bytes[segment.tier] -= nbytes

    def _end(self, segment: Segment) -> None:
        segment.over = True
        segment.tier.release(segment.find)
        for ahead in segment.awaited_by:
            ahead.waits_for.discard(segment)
        for ahead in segment.awaited_by:
            self._settle(ahead)
            if not ahead.over and not ahead.waits_for:
                # What was found is here, and another tier is still being asked: whether that is worth waiting for, who
                # waits knows.
                waiters, ahead.waiters = ahead.waiters, []
                for waiter in waiters:
                    waiter.fire()

    def _settle(self, ahead: Ahead) -> None:
        if ahead.over or ahead.asking is not None or ahead.waits_for:
            return
        ahead.over = True
        self._aheads.pop(ahead.key, None)
        # Those who waited look the chain up while our leases still hold it.
        waiters, ahead.waiters = ahead.waiters, []
        for waiter in waiters:
            waiter.fire()
        client = self._client(ahead.want)
        for lease in ahead.leases:
            self._index.release(client, lease)

    def _client(self, want: Want) -> int:
        shapes = [GroupShape(shape.units, shape.size, shape.window) for shape in want.shapes]
        kind = (want.unit_tokens, *shapes)
        client = self._clients.get(kind)
        if client is None:
            client = self._clients[kind] = self._next_client
            self._next_client -= 1
            self._index.connect(client, want.unit_tokens, shapes)
        return client


def _blocks(find: Find) -> list[Block]:
    """What has to be read for units [start, units) of a chain: the last to be read first, parents after children."""
    want = find.want
    ends = []
    for group, shape in enumerate(want.shapes):
        rows = range(_first(want, shape, find.units), find.units // shape.units)
        ends += [(block + 1, shape, group) for block in rows]
    ends.sort(key=lambda end: (end[0] * end[1].units, end[2]), reverse=True)
    blocks = []
    for end, shape, group in ends:
        last = end * shape.units * HASH
        first = last - shape.units * HASH
        parent = want.chain[first - HASH : first] if first and shape.window is None else ZERO
        blocks.append(
            Block(want.space, group, want.chain[last - HASH : last], parent, b"", 0, shape.size, end * shape.units)
        )
    return blocks


def _first(want: Want, shape: Shape, units: int) -> int:
    """First of a group's blocks behind what is at hand that a token at unit ``units`` can see."""
    first = want.start // shape.units
    if shape.window is None:
        return first
    seen = max(0, units * want.unit_tokens - shape.window)
    return max(first, seen // (shape.units * want.unit_tokens))


def _chunk(rest: list[Block]) -> list[Block]:
    """Takes the next blocks off the end of ``rest``."""
    taken, pages = [], 0
    while rest and len(taken) < CHUNK_BLOCKS and (not taken or (pages + rest[-1].pages) * PAGE <= CHUNK_BYTES):
        taken.append(rest.pop())
        pages += taken[-1].pages
    return taken
