"""What lies where on a tier that has places of its own, for as long as one mover lives; and what was given up there.

A place is given up here first. Its mover must know before it writes another block there, or after a crash the old
block's name would lead to the new one's bytes; and where a block was discarded or cleared it must know at once.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from vllm_kvtier.store.entries import READY, Entry, Shape
from vllm_kvtier.store.extents import SlotPool
from vllm_kvtier.store.index import Index
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.base import Block, Want
from vllm_kvtier.store.messages import GroupShape
from vllm_kvtier.store.policies import Policy
from vllm_kvtier.store.records import BadRequest, Found, IndexStats

Name = tuple[bytes, int, bytes]  # space, group, hash
Shapes = tuple[int, Sequence[Shape]]  # tokens a unit, groups

LEASE_SECONDS = 3600.0  # ends what somebody forgot to release; reads have leases of their own, without an end
RESTORE_STEP = 2048  # blocks put back before others get their turn: some 10 ms


class Gone:
    """Places given up, until the mover is known to know. Outlives the movers of a tier.

    An answered write says that it and all that was said before were heard. What nobody answered for when a mover
    went is ``banned``: it may come back with what the next one finds. Harmless to say twice, or of an empty place.
    """

    def __init__(self):
        # By place and name: of one place several may have been given up since the mover last answered.
        self._unsaid: set[tuple[int, Name]] = set()
        self._said: set[tuple[int, Name]] = set()
        self._asked: set[tuple[int, Name]] = set()  # said with, or before, the write that is under way
        self.banned: set[tuple[int, Name]] = set()

    def __len__(self) -> int:
        return len(self._unsaid)

    def add(self, place: int, name: Name) -> None:
        self._unsaid.add((place, name))

    def say(self, writing: bool) -> list[int]:
        """What goes with the next message. ``writing``: it is a write; one at a time."""
        places = sorted({place for place, _ in self._unsaid})
        self._said |= self._unsaid
        self._unsaid = set()
        if writing:
            self._asked, self._said = self._said, set()
        return places

    def answered(self, any_good: bool) -> None:
        """The write was. If any of its blocks is kept, then all was heard that had to be before: it may not be said
        again, because a kept block may lie in such a place."""
        if not any_good:
            self._unsaid |= self._asked
        self._asked = set()

    def down(self) -> None:
        """The mover is no more."""
        self.banned |= self._asked | self._said | self._unsaid
        self._unsaid, self._said, self._asked = set(), set(), set()


class Places:
    """An Index over a tier's pages, filled from what a mover found there. Nothing is found before ``filled``.

    It hears from the index what is given up, for ``gone``. ``later``: what was to be forgotten before it was known
    what is there; a mover that fails before it says so leaves that to the next one.
    """

    def __init__(
        self,
        policy: Callable[[], Policy] | None,
        clock: Callable[[], float],
        tenant_share: float,
        gone: Gone,
        moved: Callable[[bytes, int, bytes], None] = lambda *name: None,
    ):
        """``moved(space, group, hash)``: a block is found from now on, or no more."""
        self.filled = False
        self.blocks_found = 0  # of an earlier life
        self._policy, self._clock, self._tenant_share, self._gone = policy, clock, tenant_share, gone
        self._moved = moved
        self._index: Index | None = None
        self._pages = 0
        self._clients: dict[tuple, int] = {}  # by shapes
        self._told: set[bytes] = set()  # spaces whose shapes the mover has
        self._committed: set[Entry] = set()
        self.forgotten = False  # some of the last write's blocks were, while it was under way
        self._kept: list[m.Move] = []
        self._shapes: dict[bytes, Shapes] = {}  # of _kept
        self.later: list[Callable[[Index], object]] = []

    # -- what a mover found -------------------------------------------------------------------------------------

    def hear(self, kept: m.Kept) -> None:
        self._kept += kept.moves
        for space in kept.spaces:
            groups = [Shape(g.units, g.window, g.slot_pages) for g in space.groups]
            self._shapes[space.space] = space.unit_tokens, groups

    def fill(self, pages: int) -> Iterator[None]:
        """Put back what was found on a tier of so many pages; a step at a time. ``filled`` after the last."""
        pool = SlotPool(pages, piece_pages=pages)
        index = Index(
            pool,
            self._policy,
            self._clock,
            lease_seconds=LEASE_SECONDS,
            reserve_seconds=float("inf"),  # a write ends with its answer, or with its mover
            tenant_share=self._tenant_share,
        )
        kept, self._kept = self._kept, []
        taken: set[int] = set()
        for moves in _pieces(sorted(kept, key=attrgetter("place"))):
            right = [move for move in moves if self._is_right(move)]
            good = pool.restore([move.place for move in right], [move.pages for move in right])
            taken.update(id(move) for move, is_good in zip(right, good, strict=True) if is_good)
            yield
        index.grow(pages)
        for moves in _pieces(kept):
            for is_taken, some in groupby(moves, lambda move: id(move) in taken):
                if is_taken:
                    for space, blocks in groupby(some, attrgetter("space")):
                        self._give_up(index.restore(space, *self._shapes[space], list(blocks)))
                else:
                    self._give_up(some)
            yield
        self._told.update(self._shapes)
        self._gone.banned.clear()
        self.blocks_found = index.stats().entries
        index.watch = self
        self._index, self._pages, self.filled, self._shapes = index, pages, True, {}
        later, self.later = self.later, []
        for forget in later:
            forget(index)

    def _give_up(self, moves: Iterable[m.Move]) -> None:
        for move in moves:
            self._gone.add(move.place, (move.space, move.group, move.hash))

    def _is_right(self, move: m.Move) -> bool:
        if move.space not in self._shapes or (move.place, (move.space, move.group, move.hash)) in self._gone.banned:
            return False
        groups = self._shapes[move.space][1]
        return move.group < len(groups) and groups[move.group].size == move.pages

    # -- reading ------------------------------------------------------------------------------------------------

    def find(self, want: Want) -> Found | None:
        """Leased; None: nothing."""
        if not self.filled or want.start >= want.units:
            return None
        try:
            client = self._client(want.unit_tokens, want.shapes)
            self._index.tick()
            found = self._index.lookup(client, want.space, want.chain, want.start, self._pages)
        except BadRequest:
            return None  # what is kept under this name has other groups: of use to others than who asks
        return found if found.units > want.start else None

    def release(self, want: Want, lease: int) -> None:
        self._index.release(self._client(want.unit_tokens, want.shapes), lease)

    def hold(self, names: Sequence[Name]) -> tuple[int, list[int]]:
        """(lease without an end, places; 0 where there is nothing)."""
        return self._index.hold(self._client(1, []), names, forever=True)

    def let_go(self, lease: int) -> None:
        self._index.release(self._client(1, []), lease)

    def has(self, name: Name) -> bool:
        return self.filled and self._index.find(*name) is not None

    def is_ready(self, name: Name) -> bool:
        entry = self._index.find(*name)
        return entry is not None and entry.state is READY

    # -- writing ------------------------------------------------------------------------------------------------

    def reserve(self, blocks: Sequence[Block], shapes: Callable[[bytes], Shapes | None]) -> list[int]:
        """A place for each, or what ``Index.reserve`` says instead; 0 where the space is not known, or is another."""
        places = []
        for (space, tenant), some in groupby(blocks, lambda block: (block.space, block.tenant)):
            these = list(some)
            known = shapes(space) or self._index.shapes(space)
            if self._index.shapes(space) is None:
                self._told.discard(space)  # a mover may forget a space of which it has no block
            try:
                if known is None:
                    raise BadRequest("nobody knows the groups of this space any more")
                places += self._index.reserve(
                    self._client(*known),
                    space,
                    tenant,
                    [block.group for block in these],
                    b"".join(block.hash for block in these),
                    b"".join(block.parent for block in these),
                    self._pages,
                )
            except BadRequest:
                places += [0] * len(these)
        return places

    def untold(self, spaces: Iterable[bytes]) -> list[m.SpaceShape]:
        """What the mover must hear of these before it keeps their blocks."""
        told = []
        for space in set(spaces) - self._told:
            unit_tokens, shapes = self._index.shapes(space)
            told.append(m.SpaceShape(space, unit_tokens, [GroupShape(s.units, s.size, s.window) for s in shapes]))
        return told

    def settle(self, moves: Sequence[m.Move], good: Sequence[bool], told: Iterable[bytes]) -> list[bool]:
        """A write was answered: which blocks are kept. Those forgotten meanwhile, and those that failed (and may be
        there all the same), are given up. ``told``: spaces that the mover knows now."""
        kept, right, wrong = [], [], []
        for move, is_good in zip(moves, good, strict=True):
            (right if is_good else wrong).append(move)
        self._committed = set()
        for client in self._clients.values():
            self._index.commit(client, [move.place for move in right])
            self._index.abort(client, [move.place for move in wrong])
        committed = {entry.slot for entry in self._committed}
        self.forgotten = len(committed) < len(right)
        for move, is_good in zip(moves, good, strict=True):
            there = is_good and move.place in committed
            kept.append(there)
            if not there:
                self._gone.add(move.place, (move.space, move.group, move.hash))
        self._told.update(told)
        return kept

    def give_up_forgotten(self, moves: Iterable[m.Move]) -> None:
        """Of a write that will have no answer, but may have been done: what was forgotten meanwhile."""
        for move in moves:
            entry = self._index.find(move.space, move.group, move.hash)
            if entry is None or entry.slot != move.place:
                self._give_up([move])

    # -- forgetting ---------------------------------------------------------------------------------------------

    def discard(self, name: Name) -> None:
        if self.filled:
            self._index.forget(*name)
        else:
            self.later.append(lambda index: index.forget(*name))

    def clear(self, space: bytes | None) -> None:
        if self.filled:
            self._index.clear(space)
        else:
            self.later.append(lambda index: index.clear(space))

    def stats(self) -> IndexStats:
        return self._index.stats() if self._index is not None else IndexStats()

    # -- the index's watch --------------------------------------------------------------------------------------

    def stored(self, entries: Sequence[Entry]) -> None:
        self._committed.update(entries)
        for entry in entries:
            self._moved(entry.space.name, entry.group, entry.hash)

    def used(self, entries: Sequence[Entry]) -> None:
        pass

    def gone(self, entry: Entry) -> None:
        self._gone.add(entry.slot, (entry.space.name, entry.group, entry.hash))
        self._moved(entry.space.name, entry.group, entry.hash)

    # -- inside -------------------------------------------------------------------------------------------------

    def _client(self, unit_tokens: int, shapes: Sequence[Shape]) -> int:
        """The index's client with these groups: it asks a space's shapes of who asks."""
        key = unit_tokens, tuple((s.units, s.size, s.window) for s in shapes)
        client = self._clients.get(key)
        if client is None:
            client = self._clients[key] = len(self._clients) + 1
            self._index.connect(client, unit_tokens, [GroupShape(*group) for group in key[1]])
        return client


def _pieces(moves: list[m.Move]) -> Iterator[list[m.Move]]:
    return (moves[start : start + RESTORE_STEP] for start in range(0, len(moves), RESTORE_STEP))
