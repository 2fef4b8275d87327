"""The store's index against a plain model: what is found, what gets a slot, what is evicted, and which client still
holds it."""

import math
import random
from dataclasses import dataclass, field

from cache_groups import needs
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support import WITHOUT_SHRINKING, Clock

from vllm_kvtier.store.eviction import POLICIES
from vllm_kvtier.store.index.block_entry import READY
from vllm_kvtier.store.index.index import EXISTS, HASH_BYTES, NO_PARENT_STORED, NO_ROOM, BadRequest, Index, IndexLimits
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.store.protocol import GroupShape
from vllm_kvtier.store.tiers.process.protocol import Move

HASH_BLOCK_SIZE = 4  # tokens
PIECE_BYTES = 32  # pages
PAGES = 96
CLIENTS = (1, 2, 3)
TOOL = 9  # never says which groups it has
LEASE, REMOVAL_RESERVE_BYTES = 30.0, 50.0
NOWHERE = 1 << 30  # a pages_limit that limits nothing

SHAPES = [
    [GroupShape(hash_blocks_per_block=1, slot_pages=3)],
    [GroupShape(hash_blocks_per_block=2, slot_pages=5)],
    [GroupShape(hash_blocks_per_block=1, slot_pages=3), GroupShape(hash_blocks_per_block=1, slot_pages=3, window=6)],
    [GroupShape(hash_blocks_per_block=2, slot_pages=5), GroupShape(hash_blocks_per_block=1, slot_pages=2, window=9)],
    [GroupShape(hash_blocks_per_block=1, slot_pages=2), GroupShape(hash_blocks_per_block=3, slot_pages=7)],
    [GroupShape(hash_blocks_per_block=2, slot_pages=3), GroupShape(hash_blocks_per_block=1, slot_pages=3)],
    [GroupShape(hash_blocks_per_block=1, slot_pages=4, window=5)],
    [GroupShape(hash_blocks_per_block=1, slot_pages=3), GroupShape(1, slot_pages=2, window=12, kind="chunked")],
    [GroupShape(hash_blocks_per_block=2, slot_pages=3, window=10, kind="chunked")],
    [GroupShape(hash_blocks_per_block=1, slot_pages=2), GroupShape(2, slot_pages=9, kind="mamba")],
    [GroupShape(hash_blocks_per_block=1, slot_pages=7, kind="mamba")],
]


def block_hashes_of(tokens: list[int]) -> list[bytes]:
    """Chained hashes of units, readable in failures: which prefix it is."""
    return [bytes(tokens[: n + 1]).ljust(HASH_BYTES, b"\xff") for n in range(len(tokens))]


@dataclass(eq=False)
class Block:
    key: tuple[bytes, int, bytes]  # space, group, hash
    parent: bytes | None
    slot: int
    size: int
    writer: int | None
    deadline: float
    tenant: bytes
    ready: bool = False
    pinned: bool = False
    leases: set[int] = field(default_factory=set)

    @property
    def held(self) -> bool:
        return bool(self.leases) or self.writer is not None


class Witness:
    """The index's watch: names of blocks that can be found, by the calls that it gets."""

    def __init__(self, names=()):
        self.names = set(names)

    def stored(self, entries):
        assert all(entry.state is READY for entry in entries)
        self.names |= (told := {name_of(entry) for entry in entries})
        assert len(told) == len(entries) > 0

    def used(self, entries):
        assert entries and all(name_of(entry) in self.names for entry in entries)
        seen = set()
        for entry in entries:
            assert entry.parent not in seen, "a parent before its child"
            seen.add(entry)

    def gone(self, entry):
        self.names.remove(name_of(entry))
        assert entry.slot


def name_of(entry) -> tuple[bytes, int, bytes]:
    return entry.namespace.name, entry.group, entry.hash


class Store(RuleBasedStateMachine):
    @initialize(
        shapes=st.sampled_from(SHAPES),
        policy=st.sampled_from(sorted(POLICIES)),
        tenant_share=st.sampled_from([1.0, 1.0, 0.4]),
        state_share=st.sampled_from([1.0, 0.3]),
        ready=st.integers(0, PAGES),
    )
    def start(self, shapes, policy, tenant_share, state_share, ready):
        self.shapes, self.policy = shapes, policy
        self.tenant_share, self.state_share = tenant_share, state_share
        self.align = {1: 1, 2: 2, 3: 3}[max(s.hash_blocks_per_block for s in shapes)]
        self.clock = Clock()
        self.make()
        self.index.grow(ready)
        self.listed: dict[tuple, Block] = {}
        self.limbo: set[Block] = set()  # forgotten, but another process still reads or writes the slot
        self.leases: dict[int, tuple[int, float, list[Block]]] = {}
        self.evicted = 0

    def make(self) -> None:
        self.pool = SlotPool(PAGES, PIECE_BYTES, slab_pages=12)
        self.index = Index(
            self.pool,
            POLICIES[self.policy],
            self.clock,
            IndexLimits(
                LEASE,
                REMOVAL_RESERVE_BYTES,
                pin_share=0.3,
                tenant_share=self.tenant_share,
                state_share=self.state_share,
            ),
        )
        for client in CLIENTS:
            self.index.connect(client, HASH_BLOCK_SIZE, self.shapes)
        self.index.connect(TOOL, 1, [])
        self.witness = Witness()
        self.index.watches.append(self.witness)

    # -- the model's side of each event --------------------------------------------------------------------------

    def forget(self, block: Block) -> None:
        del self.listed[block.key]
        block.pinned = False
        if block.held:
            self.limbo.add(block)

    def settle(self, block: Block) -> None:
        if not block.held:
            self.limbo.discard(block)

    def end_lease(self, lease: int) -> None:
        for block in self.leases.pop(lease)[2]:
            block.leases.discard(lease)
            self.settle(block)

    def end_write(self, block: Block, ready: bool) -> None:
        block.writer = None
        if block in self.limbo:
            self.settle(block)
        elif ready:
            block.ready = True
        else:
            self.forget(block)

    def written_by(self, client: int) -> dict[int, Block]:
        return {b.slot: b for b in [*self.listed.values(), *self.limbo] if b.writer == client}

    def children(self, block: Block) -> list[Block]:
        namespace_id, group, block_hash = block.key
        return [b for b in self.listed.values() if b.key[:2] == (namespace_id, group) and b.parent == block_hash]

    def usable(self, namespace_id: bytes, group: int, hashes: list[bytes], place: int, limit: int) -> Block | None:
        block = self.listed.get(
            (namespace_id, group, hashes[(place + 1) * self.shapes[group].hash_blocks_per_block - 1])
        )
        return block if block and block.ready and block.slot + block.size <= limit else None

    def covers(
        self, namespace_id: bytes, hashes: list[bytes], start: int, end: int, limit: int
    ) -> list[list[Block | None]]:
        """Per group the blocks of tokens [start, end) that are needed, spelled out token by token; [] if any lacks."""
        rows = []
        for group, shape in enumerate(self.shapes):
            size = shape.hash_blocks_per_block * HASH_BLOCK_SIZE
            row: list[Block | None] = [None] * (end * HASH_BLOCK_SIZE // size - start * HASH_BLOCK_SIZE // size)
            for token in range(start * HASH_BLOCK_SIZE, end * HASH_BLOCK_SIZE):
                if not needs(shape.cache_kind, end * HASH_BLOCK_SIZE, token):
                    continue
                block = self.usable(namespace_id, group, hashes, token // size, limit)
                if block is None:
                    return []
                row[token // size - start * HASH_BLOCK_SIZE // size] = block
            rows.append(row)
        return rows

    def longest(self, namespace_id: bytes, hashes: list[bytes], start: int, limit: int) -> tuple[int, list]:
        for end in range(len(hashes) // self.align * self.align, start, -self.align):
            rows = self.covers(namespace_id, hashes, start, end, limit)
            if rows:
                return end, rows
        return start, [[] for _ in self.shapes]

    def evictable(self, limit: int, parents: set[tuple]) -> int:
        """How many blocks could go, one after the other, when nothing but one size is stored."""

        def may(block: Block) -> bool:
            free = block.ready and not block.held and not block.pinned and block.key not in parents
            return free and block.slot + block.size <= limit and all(map(may, self.children(block)))

        return sum(map(may, self.listed.values()))

    # -- rules -----------------------------------------------------------------------------------------------------

    def items(self, hashes: list[bytes], first: int, last: int) -> list[tuple[int, bytes, bytes | None]]:
        out = []
        for group, shape in enumerate(self.shapes):
            u = shape.hash_blocks_per_block
            for place in range(first // u, last // u):
                parent = hashes[place * u - 1] if place else None
                out.append((group, hashes[(place + 1) * u - 1], parent))
        return out

    @rule(
        client=st.sampled_from(CLIENTS),
        namespace_id=st.sampled_from([b"A" * HASH_BYTES, b"A" * HASH_BYTES, b"B" * HASH_BYTES]),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        first=st.sampled_from([0, 0, 0, 1, 2, 4]),
        tenant=st.sampled_from([b"", b"t", b"u"]),
        limit=st.sampled_from([NOWHERE, NOWHERE, NOWHERE, 40, 64, 3]),
        shuffle=st.none() | st.randoms(use_true_random=False),
        commit=st.booleans(),
        only=st.sampled_from([None, None, None, 0, 1]),
        orphans=st.booleans(),
    )
    def reserve(self, client, namespace_id, tokens, first, tenant, limit, shuffle, commit, only, orphans):
        block_hashes = block_hashes_of(tokens)
        items = [i for i in self.items(block_hashes, first, len(tokens)) if only is None or i[0] == only]
        self.expire()  # a reservation never waits for the timer
        if shuffle:
            shuffle.shuffle(items)
        hashes = b"".join(h for _, h, _ in items)
        parents = b"".join(p or bytes(HASH_BYTES) for _, _, p in items)
        before = dict(self.listed)
        allowed = {i for i, (_, _, parent) in enumerate(items) if orphans and first and parent in block_hashes[:first]}
        answer = self.index.reserve(
            client, namespace_id, tenant, [g for g, _, _ in items], hashes, parents, limit, orphans=allowed
        )
        assert len(answer) == len(items)
        self.find_evicted(before)

        wanted: dict[tuple, tuple[Block, int]] = {}
        for i, ((group, block_hash, parent), got) in enumerate(zip(items, answer, strict=True)):
            key, shape = (namespace_id, group, block_hash), self.shapes[group]
            linked = shape.cache_kind.whole_prefix
            if key in before or key in wanted:
                assert got == EXISTS
            elif (
                linked
                and parent
                and i not in allowed
                and (namespace_id, group, parent) not in before
                and (namespace_id, group, parent) not in wanted
            ):
                assert got == NO_PARENT_STORED
            else:
                assert got > 0 or got == NO_ROOM
                block = Block(
                    key,
                    parent if linked else None,
                    got,
                    shape.slot_pages,
                    client,
                    self.clock.now + REMOVAL_RESERVE_BYTES,
                    tenant,
                )
                wanted[key] = (block, got)
        for size in {s.slot_pages for s in self.shapes}:
            codes = [got for block, got in wanted.values() if block.size == size]
            granted = [got for got in codes if got > 0]
            assert codes == granted + [NO_ROOM] * (len(codes) - len(granted)), "room for a block but not for its parent"
            assert granted == sorted(granted)
            if len(granted) < len(codes):
                self.really_full(
                    size, limit, len(granted), {(namespace_id, b.key[1], b.parent) for b, _ in wanted.values()}
                )
        for key, (block, got) in wanted.items():
            if got > 0:
                assert got + block.size <= min(limit, self.pool.ready)
                self.listed[key] = block
        self.no_overlap()
        if commit:  # most often written at once, or too little would ever be ready
            self.commit(client, [got for _, got in wanted.values() if got > 0])

    def really_full(self, size, limit, granted, parents):
        """NO_ROOM: every slot of the only size is taken, and nothing that could go is left."""
        if self.tenant_share < 1 or len({s.slot_pages for s in self.shapes}) > 1:
            return
        top = min(limit, self.pool.ready)
        pieces = [(max(1, at), min(at + PIECE_BYTES, top)) for at in range(0, PAGES, PIECE_BYTES)]
        slots = sum(max(0, end - begin) // size for begin, end in pieces)
        busy = [b for b in [*self.listed.values(), *self.limbo] if b.slot + b.size <= top]
        assert granted + len(busy) == slots and self.evictable(limit, parents) == 0

    def find_evicted(self, before) -> None:
        """What the index no longer lists, and no discard removed: all of it may go, and no prefix broke."""
        now = {
            (namespace_id.name, g, h)
            for namespace_id in self.index._namespaces.values()
            for g, t in enumerate(namespace_id.tables)
            for h in t
        }
        gone = [block for key, block in before.items() if key not in now]
        for block in gone:
            assert block.ready and not block.held and not block.pinned, f"evicted although in use: {block}"
            del self.listed[block.key]
        for block in gone:
            assert not self.children(block), f"evicted under its children: {block}"
        self.evicted += len(gone)

    @rule(client=st.sampled_from(CLIENTS), pick=st.randoms(use_true_random=False), ready=st.booleans())
    def some_written(self, client, pick, ready):
        mine = list(self.written_by(client))
        slots = pick.sample(mine, pick.randint(0, len(mine))) + [pick.randint(1, PAGES)]
        if ready:
            self.commit(client, slots)
        else:
            blocks = [b for slot in dict.fromkeys(slots) if (b := self.written_by(client).get(slot))]
            assert self.index.abort(client, slots) == len(blocks)
            for block in blocks:
                self.end_write(block, False)

    def commit(self, client, slots):
        blocks = [b for slot in dict.fromkeys(slots) if (b := self.written_by(client).get(slot))]
        assert self.index.commit(client, slots) == sum(b not in self.limbo for b in blocks)
        for block in blocks:
            self.end_write(block, True)

    @rule(
        client=st.sampled_from(CLIENTS),
        namespace_id=st.sampled_from([b"A" * HASH_BYTES, b"A" * HASH_BYTES, b"B" * HASH_BYTES]),
        tokens=st.lists(st.integers(0, 1), max_size=9),
        start=st.sampled_from([0, 0, 1, 2]),
        limit=st.sampled_from([NOWHERE, NOWHERE, 40]),
    )
    def lookup(self, client, namespace_id, tokens, start, limit):
        hashes, start = block_hashes_of(tokens), start * self.align
        if start > len(hashes):
            try:
                self.index.lookup(client, namespace_id, b"".join(hashes), start, limit)
            except BadRequest:
                return
            raise AssertionError("a start beyond the chain")
        found = self.index.lookup(client, namespace_id, b"".join(hashes), start, limit)
        end, rows = self.longest(namespace_id, hashes, start, limit)
        assert found.num_hash_blocks == end
        assert found.slots == [[block.slot if block else 0 for block in row] for row in rows]
        assert bool(found.lease) == (end > start)
        if found.lease:
            assert found.lease not in self.leases
            blocks = [block for row in rows for block in row if block]
            self.leases[found.lease] = (client, self.clock.now + LEASE, blocks)
            for block in blocks:
                block.leases.add(found.lease)

    @rule(client=st.sampled_from([*CLIENTS, TOOL]), pick=st.randoms(use_true_random=False), forever=st.booleans())
    def hold(self, client, pick, forever):
        names = pick.sample(sorted(self.listed), pick.randint(0, min(3, len(self.listed))))
        names.append((b"A" * HASH_BYTES, pick.randint(0, 2), b"another's".ljust(HASH_BYTES)))
        blocks = [self.listed.get(name) for name in names]
        lease, slots = self.index.lease_blocks(client, names, forever)
        assert slots == [block.slot if block and block.ready else 0 for block in blocks]
        assert bool(lease) == any(slots)
        if lease:
            ready = [block for block in blocks if block and block.ready]
            self.leases[lease] = (client, math.inf if forever else self.clock.now + LEASE, ready)
            for block in ready:
                block.leases.add(lease)

    @rule(pick=st.randoms(use_true_random=False), ordered=st.booleans(), really=st.integers(0, 3))
    def next_life(self, pick, ordered, really):
        """All but what is ready is lost, with some of that; the rest is put back where it was."""
        if really:
            return
        kept = [block for block in self.listed.values() if block.ready and pick.random() < 0.9]
        kept.sort(key=lambda block: len(block.key[2].rstrip(b"\xff")))
        if not ordered:
            pick.shuffle(kept)
        self.make()
        by_slot = sorted(kept, key=lambda block: block.slot)
        assert all(self.pool.restore([b.slot for b in by_slot], [b.size for b in by_slot]))
        self.index.grow(PAGES)
        shapes = list(self.shapes)
        for block in kept:
            namespace_id, group, block_hash = block.key
            move = Move(
                namespace_id,
                group,
                block_hash,
                block.parent or bytes(HASH_BYTES),
                block.tenant,
                0,
                block.size,
                block.slot,
            )
            assert self.index.restore(namespace_id, HASH_BLOCK_SIZE, shapes, [move]) == []
            block.pinned, block.leases = False, set()
        self.listed, self.limbo, self.leases, self.evicted = {block.key: block for block in kept}, set(), {}, 0
        self.witness.names = set(self.listed)

    @rule(pick=st.randoms(use_true_random=False))
    def forget_one(self, pick):
        """By force, also what is just being written."""
        if self.listed and pick.random() < 0.5:
            block = pick.choice(list(self.listed.values()))
            assert self.index.remove(*block.key)
            self.forget(block)
        assert not self.index.remove(b"A" * HASH_BYTES, 0, b"another's".ljust(HASH_BYTES))

    @rule(client=st.sampled_from(CLIENTS), pick=st.randoms(use_true_random=False))
    def release(self, client, pick):
        lease = pick.choice([*self.leases, 12345])
        mine = lease in self.leases and self.leases[lease][0] == client
        assert bool(self.index.release(client, lease)) == mine
        if mine:
            self.end_lease(lease)

    @rule(client=st.sampled_from(CLIENTS))
    def reconnect(self, client):
        self.index.disconnect(client)
        for lease in [name for name, (who, _, _) in self.leases.items() if who == client]:
            self.end_lease(lease)
        for block in self.written_by(client).values():
            self.end_write(block, False)
        self.index.connect(client, HASH_BLOCK_SIZE, self.shapes)
        assert self.index.client_counts(client) == (0, 0)

    @rule(seconds=st.integers(0, 40), tick=st.booleans())
    def time_passes(self, seconds, tick):
        self.clock.now += seconds
        if tick:
            self.index.tick()
            self.expire()
            until = self.index.next_deadline()
            due = [deadline for _, deadline, _ in self.leases.values()]
            due += [b.deadline for b in [*self.listed.values(), *self.limbo] if b.writer is not None]
            due = [deadline for deadline in due if deadline < math.inf]
            assert not due or (until is not None and self.clock.now < until <= min(due))

    def expire(self) -> None:
        for lease in [name for name, (_, deadline, _) in self.leases.items() if deadline <= self.clock.now]:
            self.end_lease(lease)
        for block in [*self.listed.values(), *self.limbo]:
            if block.writer is not None and block.deadline <= self.clock.now:
                self.end_write(block, False)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), pinned=st.booleans(), tool=st.booleans())
    def pin(self, tokens, pinned, tool):
        namespace_id, hashes = b"A" * HASH_BYTES, block_hashes_of(tokens)
        count, left = self.index.pin(TOOL if tool else 1, namespace_id, b"".join(hashes), pinned)
        blocks = []
        for group, shape in enumerate(self.shapes):
            for place in range(len(hashes) // shape.hash_blocks_per_block):
                block = self.listed.get((namespace_id, group, hashes[(place + 1) * shape.hash_blocks_per_block - 1]))
                if block and block.ready and block.pinned != pinned:
                    blocks.append(((place + 1) * shape.hash_blocks_per_block, group, block))
        blocks = [block for _, _, block in sorted(blocks, key=lambda b: b[:2])]
        total = len(blocks)
        if pinned:
            room, fits = int(0.3 * PAGES) - sum(b.size for b in self.listed.values() if b.pinned), []
            for block in blocks:
                room -= block.size
                if room < 0:
                    break
                fits.append(block)
            blocks = fits
        assert (count, left) == (len(blocks), total - len(blocks))
        for block in blocks:
            block.pinned = pinned

    @rule(namespace_id=st.sampled_from([None, b"A" * HASH_BYTES, b"B" * HASH_BYTES]), really=st.integers(0, 5))
    def clear(self, namespace_id, really):
        if really:  # seldom, or nothing ever grows
            return
        mine = [block for block in self.listed.values() if namespace_id in (None, block.key[0])]
        assert self.index.clear(namespace_id) == len(mine)
        for block in mine:
            self.forget(block)

    @rule(pick=st.randoms(use_true_random=False), right=st.booleans())
    def discard(self, pick, right):
        ready = [block for block in self.listed.values() if block.ready]
        if ready:
            block = pick.choice(ready)
            assert self.index.discard(1, *block.key, block.slot if right else block.slot + 1) == right
            if right:
                self.forget(block)

    @rule(
        client=st.sampled_from(CLIENTS), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), tool=st.booleans()
    )
    def touch_and_inspect(self, client, tokens, tool):
        namespace_id, hashes = b"A" * HASH_BYTES, block_hashes_of(tokens)
        self.index.touch(client, namespace_id, b"".join(hashes))
        reach = self.index.reach(namespace_id, b"".join(hashes), 0, NOWHERE)
        assert reach == self.longest(namespace_id, hashes, 0, NOWHERE)[0]
        holding = self.index.inspect(TOOL if tool else client, namespace_id, b"".join(hashes))
        assert holding.num_hash_blocks == self.longest(namespace_id, hashes, 0, NOWHERE)[0]
        if holding.blocks:
            for group, shape in enumerate(self.shapes):
                places = range(len(hashes) // shape.hash_blocks_per_block)
                there = [
                    self.listed.get((namespace_id, group, hashes[(p + 1) * shape.hash_blocks_per_block - 1]))
                    for p in places
                ]
                assert holding.blocks[group] == sum(b is not None and b.ready for b in there)
        else:
            assert not any(key[0] == namespace_id for key in self.listed)

    @rule(pages=st.integers(0, 2 * PAGES))
    def grow(self, pages):
        ready = max(min(pages, PAGES), self.pool.ready)
        self.index.grow(pages)
        assert self.pool.ready == ready

    # -- what always holds ---------------------------------------------------------------------------------------

    def no_overlap(self):
        """Slots in use are apart, within a piece and ready memory; with what is free they are the pool."""
        spans = sorted((b.slot, b.slot + b.size) for b in [*self.listed.values(), *self.limbo])
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False)), "two blocks share a page"
        assert all(0 < a and b <= self.pool.ready and a // PIECE_BYTES == (b - 1) // PIECE_BYTES for a, b in spans)
        assert sorted(slot for slab in self.pool._slabs for slot in slab.slots()) == [a for a, _ in spans]
        pages = sorted(self.pool._extents) + [(s.start, s.end) for s in self.pool._slabs]
        assert sum(b - a for a, b in pages) == max(0, self.pool.ready - 1), "pages lost or counted twice"

    @invariant()
    def numbers_agree(self):
        if not hasattr(self, "index"):
            return
        self.no_overlap()
        assert self.witness.names == {key for key, block in self.listed.items() if block.ready}
        blocks, stats = [*self.listed.values(), *self.limbo], self.index.stats()
        assert stats.used_pages == sum(b.size for b in blocks)
        assert stats.entries == sum(b.ready for b in self.listed.values())
        assert stats.leases == len(self.leases)
        assert stats.leased_entries == sum(bool(b.leases) for b in blocks)
        assert stats.reservations == sum(b.writer is not None for b in blocks)
        assert stats.pinned_entries == sum(b.pinned for b in self.listed.values())
        assert stats.pinned_pages == sum(b.size for b in blocks if b.pinned) <= 0.3 * PAGES
        assert stats.namespaces == len({key[0] for key in self.listed})
        assert stats.tenants == len({b.tenant for b in blocks})
        assert stats.evictions == self.evicted
        states = [b for b in blocks if self.shapes[b.key[1]].kind == "mamba"]
        assert self.index._room.state_pages == sum(b.size for b in states)
        if self.tenant_share < 1:
            for tenant in (b"t", b"u"):
                assert sum(b.size for b in blocks if b.tenant == tenant) <= self.tenant_share * PAGES

    def teardown(self):
        """Everybody goes, everything is cleared: nothing is left anywhere."""
        if not hasattr(self, "index"):
            return
        for client in (*CLIENTS, TOOL):
            self.index.disconnect(client)
        stats = self.index.stats()
        assert not (stats.leases or stats.leased_entries or stats.reservations)
        self.index.clear(None)
        stats = self.index.stats()
        assert not (stats.used_pages or stats.entries or stats.pinned_entries or stats.namespaces or stats.tenants)
        assert not self.pool._slabs
        room = self.index._room
        assert not any(len(queue) for queues in (room._policies, room._states) for queue in queues.values())


Store.TestCase.settings = settings(settings.default, stateful_step_count=40)
TestStore = Store.TestCase


@given(seed=st.integers(0, 1 << 32))
@settings(max_examples=60, phases=WITHOUT_SHRINKING, deadline=None)
def test_store_index_random_operations_keep_invariants(seed):
    """The machine's own rules in long walks under pressure; hypothesis alone seldom fills the pool."""
    rng = random.Random(seed)
    machine = Store()
    machine.start(
        shapes=rng.choice(SHAPES),
        policy=rng.choice(sorted(POLICIES)),
        tenant_share=rng.choice([1.0, 1.0, 0.4]),
        state_share=rng.choice([1.0, 0.3]),
        ready=rng.randint(0, PAGES),
    )

    def tokens():
        return [rng.randint(0, 1) for _ in range(rng.randint(1, 9))]

    def reserve():
        limit = rng.choice([NOWHERE] * 4 + [40, 3])
        machine.reserve(
            client=rng.choice(CLIENTS),
            namespace_id=rng.choice([b"A" * HASH_BYTES] * 3 + [b"B" * HASH_BYTES]),
            tokens=tokens(),
            first=rng.choice([0, 0, 0, 1, 3]),
            tenant=rng.choice([b"", b"t", b"u"]),
            limit=limit,
            shuffle=rng if rng.random() < 0.1 else None,
            commit=rng.random() < 0.8,
            only=rng.choice([None, None, None, 0, 1]),
            orphans=rng.random() < 0.3,
        )

    def lookup():
        machine.lookup(
            client=rng.choice(CLIENTS),
            namespace_id=b"A" * HASH_BYTES,
            tokens=tokens(),
            start=rng.choice([0, 0, 1]),
            limit=rng.choice([NOWHERE, NOWHERE, 40, 50, 65]),
        )

    events = [
        (12, reserve),
        (6, lookup),
        (4, lambda: machine.release(client=rng.choice(CLIENTS), pick=rng)),
        (3, lambda: machine.some_written(client=rng.choice(CLIENTS), pick=rng, ready=rng.random() < 0.7)),
        (1, lambda: machine.reconnect(client=rng.choice(CLIENTS))),
        (1, lambda: machine.time_passes(seconds=rng.randint(0, 40), tick=rng.random() < 0.6)),
        (1, lambda: machine.pin(tokens=tokens(), pinned=rng.random() < 0.5, tool=rng.random() < 0.5)),
        (2, lambda: machine.hold(client=rng.choice([*CLIENTS, TOOL]), pick=rng, forever=rng.random() < 0.3)),
        (0.3, lambda: machine.next_life(pick=rng, ordered=rng.random() < 0.7, really=0)),
        (0.5, lambda: machine.forget_one(pick=rng)),
        (1, lambda: machine.discard(pick=rng, right=rng.random() < 0.7)),
        (1, lambda: machine.touch_and_inspect(client=rng.choice(CLIENTS), tokens=tokens(), tool=rng.random() < 0.5)),
        (1, lambda: machine.grow(pages=rng.randint(0, 2 * PAGES))),
        (0.1, lambda: machine.clear(namespace_id=rng.choice([None, b"A" * HASH_BYTES]), really=0)),
    ]
    for _ in range(250):
        rng.choices([event for _, event in events], [weight for weight, _ in events])[0]()
        machine.numbers_agree()
    machine.teardown()
