"""The positions of blocks on the disk, for the life of one tier process, and the positions that were freed.

The server frees a position first. The tier process must record that before it writes another block there: after a crash
the old block's name would lead to the new bytes. A discarded or cleared block must be recorded at once.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter

from vllm_kvtier.store.eviction.base import Policy
from vllm_kvtier.store.index.block_entry import READY, BlockEntry, BlockName
from vllm_kvtier.store.index.index import Index, IndexLimits
from vllm_kvtier.store.index.removal_history import RemovalReason
from vllm_kvtier.store.index.types import BadRequest, Found, IndexStats
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.store.protocol import GroupShape
from vllm_kvtier.store.tiers.base import Block, Want
from vllm_kvtier.store.tiers.process import protocol as m

Shapes = tuple[int, Sequence[GroupShape]]  # tokens per hash block, groups

LEASE_SECONDS = 3600.0  # a safeguard against missing releases; reads have leases without a deadline
RESTORE_STEP = 2048  # blocks restored before other events are handled: some 10 ms
MAX_LATER = 1 << 16  # removals remembered until the disk is open
MAX_BAD_POSITIONS = 16  # kept out of use; a disk with more is failing
RESTORE_PAGES = 1 << 16  # pages whose blocks are sorted at a time: to sort millions of blocks takes seconds


class Gone:
    """Freed positions that the tier process has not acknowledged. Outlives the tier processes.

    Each is sent once. The reply to a write acknowledges all messages before it, if it has written a block. Positions
    that were not acknowledged when a tier process ended are ``banned``, after ``ban``: the next one may find their
    blocks.
    """

    def __init__(self) -> None:
        # By position and hash of the name: several blocks of one position may have been freed since the last reply.
        self._unreported: set[tuple[int, int]] = set()
        self.banned: set[tuple[int, int]] = set()
        # These numbers in turn. After a clear they are of millions of blocks: to free as many objects takes seconds.
        self._reported = array("q")
        self._asked = array("q")  # sent with, or before, the write in flight
        self._lost = array("q")  # sent to a tier process that ended, and not banned yet

    def __len__(self) -> int:
        return len(self._unreported)

    def add(self, position: int, name: BlockName) -> None:
        self.add_hashed(position, hash(name))

    def add_hashed(self, position: int, name: int) -> None:
        """``name``: its hash."""
        self._unreported.add((position, name))

    def report(self, writing: bool) -> list[int]:
        """Positions for the next message. ``writing``: it is a Write; one is in flight at a time."""
        positions = sorted({position for position, _ in self._unreported})
        for pair in self._unreported:
            self._reported.extend(pair)
        self._unreported = set()
        if writing:
            self._asked, self._reported = self._reported, array("q")
        return positions

    def answered(self, any_good: bool) -> None:
        """The Write was answered. ``any_good``: a block was written, so all removals before it are recorded. The tier
        process has removed them in any case, and records them once it can."""
        if not any_good:
            self._asked.extend(self._reported)
            self._reported = self._asked
        self._asked = array("q")

    def down(self) -> None:
        """The tier process has ended."""
        self.banned.update(self._unreported)
        self._lost += self._reported + self._asked
        self._unreported, self._reported, self._asked = set(), array("q"), array("q")

    def ban(self) -> Iterator[None]:
        """In steps."""
        for pairs in _taken(self._lost):
            self.banned.update(pairs)
            yield


def _taken(numbers: "array[int]") -> Iterator[Iterator[tuple[int, int]]]:
    """Remove all pairs of numbers, the last ones first, ``RESTORE_STEP`` of them at a time."""
    while numbers:
        some = numbers[-2 * RESTORE_STEP :]
        del numbers[-2 * RESTORE_STEP :]
        yield zip(some[::2], some[1::2], strict=True)


class SlotMap:
    """An Index over a tier's pages, restored from the blocks that a tier process found. Lookups need ``filled``.

    As the index's watch it records removed blocks in ``gone``. ``later``: removals that came before ``filled``; they
    are passed on if the tier process fails first.
    """

    def __init__(
        self,
        policy: Callable[[], Policy] | None,
        clock: Callable[[], float],
        tenant_share: float,
        gone: Gone,
        moved: Callable[[bytes, int, bytes], None] = lambda *name: None,
    ):
        """``moved(namespace_id, group, hash)``: a block was added or removed."""
        self.filled = False
        self.blocks_found = 0  # by the tier process when it opened the disk
        self._policy, self._clock, self._tenant_share, self._gone = policy, clock, tenant_share, gone
        self._moved = moved
        self._index = Index(SlotPool(0), policy, clock)  # ``fill`` sets another
        self._pages = 0
        self._clients: dict[tuple[int, tuple[GroupShape, ...]], int] = {}  # by shapes
        self._known_namespaces: set[bytes] = set()  # whose shapes the tier process has
        self._committed: set[BlockEntry] = set()
        self.removed_meanwhile = False  # some blocks of the last write were removed during it
        self.bad_positions = 0  # that could not be written and are not used again
        self._kept: list[m.Move] = []
        self._shapes: dict[bytes, Shapes] = {}  # of _kept
        # Positions, and hashes of the names, of blocks on the disk that are not restored.
        self._unlisted = array("q")
        self.later: list[Callable[[SlotMap], Iterable[object]]] = []

    # -- restoring ----------------------------------------------------------------------------------------------

    @property
    def blocks_kept(self) -> int:
        """To be restored."""
        return len(self._kept)

    def on_kept(self, kept: m.Kept, beyond: int = 0) -> None:
        """``beyond``: so many of the last ones are not restored. They stay on the disk until they are overwritten or
        cleared: the next tier process finds them again, and there may be memory for more of them."""
        end = max(0, len(kept.moves) - beyond)
        self._kept += kept.moves[:end]
        for move in kept.moves[end:]:
            self._unlisted.extend((move.position, hash((move.namespace_id, move.group, move.hash))))
        for namespace_id in kept.namespaces:
            self._shapes[namespace_id.namespace_id] = namespace_id.hash_block_size, namespace_id.groups

    def fill(self, pages: int) -> Iterator[None]:
        """Restore the blocks found on a tier of ``pages``, in steps. ``filled`` after the last step."""
        pool = SlotPool(pages, piece_pages=pages)
        limits = IndexLimits(LEASE_SECONDS, tenant_share=self._tenant_share)
        self._index = index = Index(pool, self._policy, self._clock, limits)
        yield from self._gone.ban()
        if self._gone.banned:
            found, self._unlisted = self._unlisted, array("q")
            for pairs in _taken(found):
                for pair in pairs:
                    if pair in self._gone.banned:
                        self._gone.add_hashed(*pair)
                    else:
                        self._unlisted.extend(pair)
                yield
        kept, self._kept = self._kept, []
        regions: defaultdict[int, list[m.Move]] = defaultdict(list)
        for first in range(0, len(kept), RESTORE_STEP):
            for move in kept[first : first + RESTORE_STEP]:
                regions[move.position // RESTORE_PAGES].append(move)
            yield
        taken: set[int] = set()
        for region in sorted(regions):
            moves = sorted(regions.pop(region), key=attrgetter("position"))
            valid = [move for move in moves if self._is_valid(move)]
            good = pool.restore([move.position for move in valid], [move.pages for move in valid])
            taken.update(id(move) for move, is_good in zip(valid, good, strict=True) if is_good)
            yield
        index.grow(pages)
        kept.reverse()
        while kept:  # they are freed one step at a time, too
            moves = kept[: -RESTORE_STEP - 1 : -1]
            del kept[-RESTORE_STEP:]
            for is_taken, some in groupby(moves, lambda move: id(move) in taken):
                if is_taken:
                    for namespace_id, blocks in groupby(some, attrgetter("namespace_id")):
                        self._free(index.restore(namespace_id, *self._shapes[namespace_id], list(blocks)))
                else:
                    self._free(some)
            yield
        self._known_namespaces.update(self._shapes)
        while banned := self._gone.banned:  # by now these are freed again, or were not on the disk
            for _ in range(min(RESTORE_STEP, len(banned))):
                banned.pop()
            yield
        self.blocks_found = index.stats().entries
        index.watches.append(self)
        while self.later:  # others may come meanwhile
            for _ in self.later[0](self):
                yield
            del self.later[0]
        self._pages, self.filled, self._shapes = pages, True, {}

    def dismantle(self) -> Iterator[None]:
        """Free the memory of all blocks, in steps: its tier process has ended. Leases can still be released."""
        del self._unlisted[:]  # a clear may be going on
        return self._index.dismantle(RESTORE_STEP)

    def _free(self, moves: Iterable[m.Move]) -> None:
        for move in moves:
            self._gone.add(move.position, (move.namespace_id, move.group, move.hash))

    def _is_valid(self, move: m.Move) -> bool:
        if (
            move.namespace_id not in self._shapes
            or (move.position, hash((move.namespace_id, move.group, move.hash))) in self._gone.banned
        ):
            return False
        groups = self._shapes[move.namespace_id][1]
        return move.group < len(groups) and groups[move.group].slot_pages == move.pages

    # -- reading ------------------------------------------------------------------------------------------------

    def find(self, want: Want) -> Found | None:
        """Look up and lease; None: nothing."""
        if not self.filled or want.start >= want.num_hash_blocks:
            return None
        try:
            client = self._client(want.hash_block_size, want.shapes)
            self._index.tick()
            found = self._index.lookup(client, want.namespace_id, want.block_hashes, want.start, self._pages)
        except BadRequest:
            return None  # the namespace has other groups here
        return found if found.num_hash_blocks > want.start else None

    def release(self, want: Want, lease: int) -> None:
        self._index.release(self._client(want.hash_block_size, want.shapes), lease)

    def lease_blocks(self, names: Sequence[BlockName]) -> tuple[int, list[int]]:
        """(lease without a deadline, positions; 0: not stored)."""
        return self._index.lease_blocks(self._client(1, []), names, forever=True)

    def release_blocks(self, lease: int) -> None:
        self._index.release(self._client(1, []), lease)

    def has(self, name: BlockName) -> bool:
        return self.filled and self._index.find(*name) is not None

    def is_ready(self, name: BlockName) -> bool:
        entry = self._index.find(*name)
        return entry is not None and entry.state is READY

    def position_of(self, name: BlockName) -> int:
        """0: it is not stored."""
        entry = self._index.find(*name)
        return 0 if entry is None else entry.slot

    def tenant_of(self, name: BlockName) -> bytes:
        entry = self._index.find(*name) if self.filled else None
        return b"" if entry is None else entry.tenant

    # -- writing ------------------------------------------------------------------------------------------------

    def reserve(self, blocks: Sequence[Block], shapes: Callable[[bytes], Shapes | None]) -> list[int]:
        """A position for each block, or ``Index.reserve``'s codes; 0: the namespace is unknown or has other groups."""
        positions: list[int] = []
        for (namespace_id, tenant), some in groupby(blocks, lambda block: (block.namespace_id, block.tenant)):
            these = list(some)
            known = shapes(namespace_id) or self._index.shapes(namespace_id)
            if self._index.shapes(namespace_id) is None:
                self._known_namespaces.discard(namespace_id)  # a tier process forgets namespaces without blocks
            try:
                if known is None:
                    raise BadRequest("the groups of this namespace are unknown")
                positions += self._index.reserve(
                    self._client(*known),
                    namespace_id,
                    tenant,
                    [block.group for block in these],
                    b"".join(block.hash for block in these),
                    b"".join(block.parent for block in these),
                    self._pages,
                    forever=True,  # a write ends with its reply or its tier process
                )
            except BadRequest:
                positions += [0] * len(these)
        return positions

    def new_namespaces(self, namespaces: Iterable[bytes]) -> list[m.NamespaceShape]:
        """Shapes that the tier process needs before it writes blocks of these namespaces."""
        new = []
        for namespace_id in set(namespaces) - self._known_namespaces:
            known = self._index.shapes(namespace_id)
            assert known is not None  # a block of it is reserved
            new.append(m.NamespaceShape(namespace_id, known[0], list(known[1])))
        return new

    def end_write(self, moves: Sequence[m.Move], good: Sequence[bool], namespaces: Iterable[bytes]) -> list[bool]:
        """A Write was answered. Returns which blocks are stored. Blocks that were removed meanwhile, or failed (and may
        be stored anyway), are freed. A position that alone failed may be bad on the disk itself, and every later
        write would get it if no other is free: it stays reserved, unlisted. ``namespaces``: those that the tier
        process knows now."""
        self._committed = set()
        succeeded = [move.position for move, is_good in zip(moves, good, strict=True) if is_good]
        failed = [move for move, is_good in zip(moves, good, strict=True) if not is_good]
        for client in self._clients.values():
            self._index.commit(client, succeeded)
        if len(failed) == 1 and self.bad_positions < MAX_BAD_POSITIONS and self._is_listed(failed[0]):
            self._abandon(failed.pop())
            self.bad_positions += 1
        for client in self._clients.values():
            self._index.abort(client, [move.position for move in failed])
        committed = {entry.slot for entry in self._committed}
        self.removed_meanwhile = len(committed) < len(succeeded)
        kept = [is_good and move.position in committed for move, is_good in zip(moves, good, strict=True)]
        self._free(move for move, is_kept in zip(moves, kept, strict=True) if not is_kept)
        self._known_namespaces.update(namespaces)
        return kept

    def _is_listed(self, move: m.Move) -> bool:
        """False: it was removed meanwhile, for which its write may have been refused."""
        entry = self._index.find(move.namespace_id, move.group, move.hash)
        return entry is not None and entry.slot == move.position

    def _abandon(self, move: m.Move) -> None:
        for client in self._clients.values():
            self._index.abandon(client, (move.namespace_id, move.group, move.hash), RemovalReason.ABORTED)

    def free_removed(self, moves: Iterable[m.Move]) -> None:
        """Free the blocks of an unanswered Write, which may have been done, that were removed during it."""
        self._free(move for move in moves if not self._is_listed(move))

    # -- removing -----------------------------------------------------------------------------------------------

    def evict(self, count: int) -> None:
        """Evict so many of the coldest blocks, if they are not in use."""
        self._index.evict(count)

    def discard(self, name: BlockName) -> None:
        if self.filled:
            self._index.remove(*name)
        else:
            self._do_later(lambda here: (here._index.remove(*name),))

    def clear_in_steps(self, namespace_id: bytes | None) -> Iterator[None]:
        return self._clear_in_steps(namespace_id) if self.filled else iter(())

    def _clear_in_steps(self, namespace_id: bytes | None) -> Iterator[None]:
        yield from self._clear_unlisted()
        yield from self._index.clear_in_steps(namespace_id, RESTORE_STEP)

    def clear(self, namespace_id: bytes | None) -> None:
        if self.filled:
            for _ in self._clear_unlisted():  # mostly none: ``clear_in_steps`` comes before
                pass
            self._index.clear(namespace_id)
        else:
            self._do_later(lambda here: here._clear_in_steps(namespace_id))

    def _clear_unlisted(self) -> Iterator[None]:
        """Free the unlisted blocks, of all namespaces, in steps. Where another block is being written, or was, the tier
        process removes the old one by itself; but it may end before."""
        for pairs in _taken(self._unlisted):
            for position, name in pairs:
                if self._index.is_taken(position):
                    self._gone.banned.add((position, name))
                else:
                    self._gone.add_hashed(position, name)
            yield

    def _do_later(self, remove: Callable[["SlotMap"], Iterable[object]]) -> None:
        """So many removals are replaced by that of all blocks: the tier may never open. The first may be going on."""
        self.later.append(remove)
        if len(self.later) > MAX_LATER:
            self.later[1:] = [lambda here: here._clear_in_steps(None)]

    def stats(self) -> IndexStats:
        return self._index.stats() if self.filled else IndexStats()

    # -- the index's watch --------------------------------------------------------------------------------------

    def stored(self, entries: Sequence[BlockEntry]) -> None:
        self._committed.update(entries)
        for entry in entries:
            self._moved(*entry.name)

    def used(self, entries: Sequence[BlockEntry]) -> None:
        pass

    def gone(self, entry: BlockEntry) -> None:
        self._gone.add(entry.slot, entry.name)
        self._moved(*entry.name)

    # -- inside -------------------------------------------------------------------------------------------------

    def _client(self, hash_block_size: int, shapes: Sequence[GroupShape]) -> int:
        """The index's client with these groups: a namespace takes the shapes of its client."""
        key = hash_block_size, tuple(shapes)
        client = self._clients.get(key)
        if client is None:
            client = self._clients[key] = len(self._clients) + 1
            self._index.connect(client, hash_block_size, shapes)
        return client
