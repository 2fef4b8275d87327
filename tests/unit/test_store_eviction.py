"""Eviction policies by themselves and under the index: what they keep, and that none can stall or stray."""

import gc
import random
from types import SimpleNamespace

import pytest
from store_support import life_of
from support import Clock

from vllm_kvtier.store.eviction import DEFAULT_POLICY, POLICIES
from vllm_kvtier.store.eviction.aging import USE_CLASSES
from vllm_kvtier.store.index import block_entry
from vllm_kvtier.store.index.block_entry import BlockEntry
from vllm_kvtier.store.index.index import EXISTS, HASH_BYTES, NO_PARENT_STORED, NO_ROOM, BadRequest, Index, IndexLimits
from vllm_kvtier.store.memory import slot_allocator
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.store.protocol import GroupShape

NAMESPACE_ID = b"S" * HASH_BYTES
NOWHERE = 1 << 40
every_policy = pytest.mark.parametrize("name", sorted(POLICIES))


def entry(i: int) -> BlockEntry:
    return BlockEntry(None, 0, i.to_bytes(HASH_BYTES, "big"), None, 1, None, b"")


class Cache:
    """A policy alone, over numbers: a fixed size, no prefixes."""

    def __init__(self, name: str, size: int):
        self.policy, self.size, self.held = POLICIES[name](), size, {}

    def use(self, i: int) -> bool:
        if i in self.held:
            self.policy.touch([self.held[i]])
            return True
        while len(self.held) >= self.size:
            victim = self.policy.coldest()
            self.policy.remove(victim, evicted=True)
            del self.held[int.from_bytes(victim.hash, "big")]
        self.held[i] = entry(i)
        self.policy.add(self.held[i])
        return False


@every_policy
def test_eviction_policy_holds_added_minus_removed_entries(name):
    rng, policy, held = random.Random(1), POLICIES[name](), []
    for step in range(3000):
        event = rng.random()
        if event < 0.4 or not held:
            held.append(entry(rng.randint(0, 300)))
            policy.add(held[-1])
        elif event < 0.6:
            policy.touch(rng.sample(held, rng.randint(0, min(5, len(held)))))
        elif event < 0.7:
            policy.defer([policy.coldest()])
        else:
            victim = policy.coldest() if event < 0.9 else rng.choice(held)
            assert victim in held and policy.coldest() is policy.coldest()
            held.remove(victim)
            policy.remove(victim, evicted=event < 0.9)
        assert len(policy) == len(held), step
    for victim in held:
        policy.remove(victim, evicted=False)
    assert policy.coldest() is None and len(policy) == 0


@every_policy
def test_eviction_policy_defer_reaches_every_entry(name):
    """However old, used or protected its neighbours are: one block that may go is found among many that may not."""
    rng, policy = random.Random(2), POLICIES[name]()
    held = [entry(i) for i in range(200)]
    for e in held:
        policy.add(e)
    for _ in range(300):
        policy.touch(rng.sample(held, 3))
    named = set()
    for _ in range(200 * 2 * USE_CLASSES):
        named.add(policy.coldest())
        policy.defer([policy.coldest()])
    assert named == set(held)


@every_policy
def test_eviction_policy_ghosts_are_bounded(name):
    cache = Cache(name, 50)
    for i in range(5000):
        cache.use(i)
    seen = [value for value in vars(cache.policy).values() if hasattr(value, "__len__")]
    sizes = [len(v) if not isinstance(v, (tuple, list)) else sum(map(len, v)) for v in seen]
    assert sum(sizes) <= 2 * 50 + 2


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"lru"}))
def test_eviction_policy_scan_keeps_frequent_blocks(name):
    """LRU loses all of it; that is what the others are for."""
    hits = {}
    for which in (name, "lru"):
        cache, rng = Cache(which, 100), random.Random(3)
        for _ in range(40):
            for _ in range(60):
                cache.use(rng.randint(0, 59))
            for _ in range(120):
                cache.use(rng.randint(1000, 1 << 30))
        hits[which] = sum(cache.use(i) for i in range(60))
    assert hits["lru"] == 0 and hits[name] >= 25


@pytest.mark.parametrize("name", ["aging", "s3fifo"])  # ARC remembers nothing while all was used once
def test_eviction_late_reuse_extends_retention(name):
    cache = Cache(name, 100)
    for i in range(90):
        cache.use(i)
    for i in range(1000, 1105):
        cache.use(i)
    assert not any(cache.use(i) for i in range(20, 30))  # gone, but remembered
    for i in range(2000, 2105):
        cache.use(i)
    assert all(i in cache.held for i in range(20, 30))


def test_eviction_lru_is_lru():
    cache = Cache("lru", 3)
    assert [cache.use(i) for i in (1, 2, 3, 1, 4, 2, 1)] == [False] * 3 + [True, False, False, True]


def test_eviction_aging_divides_age_by_uses():
    """Used twice, it goes when it is twice as old as what was used once."""
    policy = POLICIES["aging"]()
    twice = entry(0)
    policy.add(twice)
    policy.touch([twice])
    others = [entry(i) for i in range(1, 40)]
    for e in others[:20]:
        policy.add(e)
    for e in others[:9]:
        assert policy.coldest() is e  # 20 .. 12 blocks old, against 20 / 2
        policy.remove(e, evicted=True)
    policy.remove(others[9], evicted=True)
    assert policy.coldest() is twice


def test_eviction_default_policy_exists():
    assert DEFAULT_POLICY in POLICIES


# -- under the index -----------------------------------------------------------------------------------------------


def make(pages: int = 101, shapes=None, policy: str = "lru", **options) -> Index:
    pool = SlotPool(pages, 64, slab_pages=8)
    index = Index(pool, POLICIES[policy], Clock(), IndexLimits(**options))
    index.grow(pages)
    index.connect(1, 16, shapes or [GroupShape(hash_blocks_per_block=1, slot_pages=1)])
    return index


def block_hashes(name: str, n: int) -> bytes:
    return b"".join(f"{name}{i}".encode().ljust(HASH_BYTES, b".") for i in range(n))


def store(
    index: Index,
    hashes: bytes,
    group: int = 0,
    tenant: bytes = b"",
    namespace_id: bytes = NAMESPACE_ID,
    at_once: int = 1 << 30,
) -> list[int]:
    """In batches of ``at_once``."""
    slots, parents = [], (bytes(HASH_BYTES) + hashes)[: len(hashes)]
    for begin in range(0, len(hashes), at_once * HASH_BYTES):
        batch = slice(begin, min(begin + at_once * HASH_BYTES, len(hashes)))
        groups = [group] * (len(hashes[batch]) // HASH_BYTES)
        got = index.reserve(1, namespace_id, tenant, groups, hashes[batch], parents[batch], NOWHERE)
        index.commit(1, [slot for slot in got if slot > 0])
        slots += got
    return slots


def there(index: Index, hashes: bytes, namespace_id: bytes = NAMESPACE_ID) -> int:
    return index.inspect(1, namespace_id, hashes).num_hash_blocks


@every_policy
def test_eviction_takes_prefixes_from_the_tail(name):
    index = make(policy=name)
    old = block_hashes("a", 60)
    store(index, old)
    store(index, block_hashes("b", 40))
    before = 60
    for i in range(6):
        store(index, block_hashes(f"c{i}.", 10))
        blocks = index.inspect(1, NAMESPACE_ID, old).blocks[0] if there(index, old) else 0
        assert there(index, old) == blocks <= before, "a hole in a prefix"
        before = blocks
    assert before < 60


@every_policy
def test_eviction_skips_leased_prefix_in_bounded_time(name):
    """All of it is the coldest there is, and nothing of it may go: the block behind it is found nevertheless."""
    index = make(pages=3001, policy=name)
    store(index, block_hashes("a", 2900))
    store(index, block_hashes("b", 100))
    found = index.lookup(1, NAMESPACE_ID, block_hashes("a", 2900), 0, NOWHERE)
    assert found.num_hash_blocks == 2900
    for i in range(3):
        store(index, block_hashes("c", 40 * (i + 1)))
    assert there(index, block_hashes("c", 120)) == 100 and there(index, block_hashes("a", 2900)) == 2900
    assert store(index, block_hashes("d", 3)).count(NO_ROOM) == 0  # of c, which no client holds
    index.release(1, found.lease)
    assert all(slot > 0 for slot in store(index, block_hashes("e", 500)))
    assert there(index, block_hashes("a", 2900)) < 2900


@pytest.mark.parametrize("sizes", [1, 2])
def test_eviction_of_many_walks_a_long_prompt_rarely(sizes, monkeypatch):
    """For each of a disk tier's blocks it walked to the end of the prompt: 83 ms for 256 of 6,250."""
    shapes = [GroupShape(hash_blocks_per_block=1, slot_pages=pages) for pages in (1, 2)[:sizes]]
    index, hashes = make(8001, shapes), block_hashes("a", 1000)
    for group in range(sizes):
        store(index, hashes, group, at_once=100)  # the coldest block has the prompt's rest behind it
    walked, walk = [], slot_allocator._path_to_victim

    def walks(*args):
        path = walk(*args)
        walked.append(len(path))
        return path

    monkeypatch.setattr(slot_allocator, "_path_to_victim", walks)
    index.evict(256)
    assert index.stats().entries == 1000 * sizes - 256
    assert sum(walked) <= 1000 * (256 / slot_allocator.EVICT_AT_ONCE + sizes), "not 256,000"


def test_eviction_spares_parents_of_blocks_being_stored():
    index = make(pages=11)
    store(index, block_hashes("a", 10))
    longer = block_hashes("a", 15)
    slots = index.reserve(
        1, NAMESPACE_ID, b"", [0] * 5, longer[10 * HASH_BYTES :], longer[9 * HASH_BYTES : -HASH_BYTES], NOWHERE
    )
    assert slots == [NO_ROOM] * 5 and there(index, longer) == 10


def test_eviction_reclaims_cold_slabs_of_other_size():
    shapes = [
        GroupShape(hash_blocks_per_block=1, slot_pages=1),
        GroupShape(hash_blocks_per_block=1, slot_pages=5, window=16),
    ]
    index = make(pages=129, shapes=shapes)
    store(index, block_hashes("a", 128))
    assert index.stats().used_pages == 128
    big = store(index, block_hashes("b", 4), group=1)
    assert all(slot > 0 for slot in big), "nothing of its own to evict: takes what is coldest"
    left = index.inspect(1, NAMESPACE_ID, block_hashes("a", 128))
    assert left.blocks[0] >= 80
    hot = block_hashes("a", left.blocks[0])
    for i in range(30):
        index.touch(1, NAMESPACE_ID, hot)
        store(index, block_hashes(f"c{i}.", 1), group=1)
    assert index.inspect(1, NAMESPACE_ID, hot).blocks[0] == left.blocks[0], (
        "hot blocks gave way to cold ones of another size"
    )
    for i in range(60):
        store(index, block_hashes(f"d{i}.", 2), group=1)
        index.touch(1, NAMESPACE_ID, block_hashes(f"d{i}.", 2))
    assert index.inspect(1, NAMESPACE_ID, hot).blocks[0] < left.blocks[0] / 2, "cold blocks kept their memory"


def test_eviction_keeps_hot_slab_with_one_cold_block():
    shapes = [
        GroupShape(hash_blocks_per_block=1, slot_pages=1),
        GroupShape(hash_blocks_per_block=1, slot_pages=8, window=16),
    ]
    index = make(pages=65, shapes=shapes)
    store(index, block_hashes("cold", 1))
    store(index, block_hashes("hot", 7))  # the rest of that slab
    assert all(slot > 0 for i in range(6) for slot in store(index, block_hashes(f"b{i}.", 1), group=1))
    index.touch(1, NAMESPACE_ID, block_hashes("hot", 7))
    assert store(index, block_hashes("c", 1), group=1)[0] > 0
    assert index.inspect(1, NAMESPACE_ID, block_hashes("hot", 7)).blocks[0] == 7
    assert index.inspect(1, NAMESPACE_ID, block_hashes("b0.", 1)).blocks[1] == 0, "its own coldest went"


def test_eviction_tenant_over_share_evicts_its_own_blocks():
    index = make(pages=101, tenant_share=0.3)
    store(index, block_hashes("x", 60), tenant=b"")  # names no tenant: no share
    store(index, block_hashes("a", 30), tenant=b"a")
    assert there(index, block_hashes("a", 30)) == 30
    store(index, block_hashes("b", 10), tenant=b"b")
    store(index, block_hashes("c", 20), tenant=b"a")
    assert there(index, block_hashes("x", 60)) == 60 and there(index, block_hashes("b", 10)) == 10
    assert there(index, block_hashes("c", 20)) == 20 and there(index, block_hashes("a", 30)) == 10
    # With nothing of its own that may go it gets no more, while others do.
    leases = [index.lookup(1, NAMESPACE_ID, block_hashes(name, 30), 0, NOWHERE).lease for name in "ac"]
    assert store(index, block_hashes("d", 2), tenant=b"a") == [NO_ROOM] * 2
    assert all(slot > 0 for slot in store(index, block_hashes("d", 2), tenant=b"b"))
    for lease in leases:
        index.release(1, lease)
    assert all(slot > 0 for slot in store(index, block_hashes("e", 2), tenant=b"a"))


@pytest.mark.parametrize("before", [0, 1])
def test_eviction_tenant_over_share_stores_blocks_of_another_size(before):
    """A tenant that filled its share with one model's blocks goes on with another model's."""
    index = make(pages=101, tenant_share=0.3, shapes=[GroupShape(1, slot_pages=1), GroupShape(1, slot_pages=3)])
    store(index, block_hashes("x", 60))
    for i in range(40):
        store(index, block_hashes(f"a{i}.", 1), group=before, tenant=b"a")
    for i in range(40):
        assert store(index, block_hashes(f"b{i}.", 1), group=1 - before, tenant=b"a")[0] > 0
        assert index._room._tenants[b"a"].pages <= 30
    assert index.inspect(1, NAMESPACE_ID, block_hashes("x", 60)).blocks[0] == 60, "others' blocks stayed"


STATES = [GroupShape(hash_blocks_per_block=1, slot_pages=1), GroupShape(1, slot_pages=8, kind="mamba")]


def test_eviction_states_over_share_evict_states():
    """The conversation's prompts leave a state each; its own last one and the KV of another stay."""
    index = make(pages=129, shapes=STATES, state_share=0.5)
    kv, turns = block_hashes("kv", 56), block_hashes("turn", 100)
    store(index, kv)
    for i in range(100):
        assert store(index, turns[i * HASH_BYTES :][:HASH_BYTES], group=1)[0] > 0
        assert index._room.state_pages <= 64
    assert index.inspect(1, NAMESPACE_ID, kv).blocks[0] == 56
    held = index.inspect(1, NAMESPACE_ID, turns).blocks[1]
    newest = index.inspect(1, NAMESPACE_ID, turns[-held * HASH_BYTES :]).blocks[1]
    assert newest == held == 8, "the older ones went"


def test_eviction_states_alone_fill_all_memory():
    index = make(pages=129, shapes=STATES, state_share=0.5)
    for i in range(40):
        assert store(index, block_hashes(f"{i}", 1), group=1)[0] > 0
    assert index._room.state_pages == 15 * 8


def test_index_blocks_after_a_gap_are_found_when_it_is_filled():
    index = make()
    hashes = block_hashes("a", 5)
    slots = store(index, hashes)
    assert index.discard(1, NAMESPACE_ID, 0, hashes[2 * HASH_BYTES : 3 * HASH_BYTES], slots[2])
    assert there(index, hashes) == 2 and index.stats().entries == 4
    assert store(index, hashes)[:2] == [EXISTS] * 2 and there(index, hashes) == 5
    assert index.stats().reserved_slots == 6


def test_index_lookup_examines_each_block_of_a_window_once(monkeypatch):
    """One group lacks every block, another has all of them. 8,192 blocks with a window of 256 took 8 s."""
    examined = []
    usable = block_entry._num_usable
    monkeypatch.setattr(block_entry, "_num_usable", lambda row, limit: examined.append(len(row)) or usable(row, limit))
    index = make(1000, [GroupShape(1, 1), GroupShape(1, 1, window=1600), GroupShape(1, 1, window=32)])
    hashes = block_hashes("a", 300)
    for group in (0, 1):
        store(index, hashes, group=group)
    assert index.lookup(1, NAMESPACE_ID, hashes, 0, NOWHERE).num_hash_blocks == 0
    assert 600 < sum(examined) <= 900, "of each group each block"


def test_index_circular_and_repeated_hashes_are_harmless():
    index = make()
    a, b = (name.ljust(HASH_BYTES, b".") for name in (b"a", b"b"))
    assert index.reserve(1, NAMESPACE_ID, b"", [0, 0], a + b, b + a, NOWHERE) == [NO_PARENT_STORED, NO_PARENT_STORED]
    assert index.reserve(1, NAMESPACE_ID, b"", [0], a, a, NOWHERE) == [NO_PARENT_STORED], "its own parent"
    # A circle: b under a; a is forgotten and comes back under b.
    slots = index.reserve(1, NAMESPACE_ID, b"", [0, 0], a + b, bytes(HASH_BYTES) + a, NOWHERE)
    index.commit(1, slots)
    index.discard(1, NAMESPACE_ID, 0, a, slots[0])
    again = index.reserve(1, NAMESPACE_ID, b"", [0], a, b, NOWHERE)
    index.commit(1, again)
    for i in range(5):
        assert all(slot > 0 for slot in store(index, block_hashes(f"c{i}.", 100)[: 90 * HASH_BYTES]))
    # The same hash over and over in a chain to look up: leased as often, and released as often.
    lease = index.lookup(1, NAMESPACE_ID, block_hashes("c4.", 1) * 50, 0, NOWHERE)
    assert lease.num_hash_blocks == 50
    assert index.release(1, lease.lease) and index.stats().leased_entries == 0


def test_index_malformed_requests_are_refused_without_effect():
    index = make()
    store(index, block_hashes("a", 3))
    before = index.stats()
    index.connect(2, 32, [GroupShape(hash_blocks_per_block=1, slot_pages=1)])
    index.connect(3, 16, [])
    for bad in (
        lambda: index.lookup(7, NAMESPACE_ID, b"", 0, 1),
        lambda: index.lookup(1, NAMESPACE_ID, b"odd", 0, 1),
        lambda: index.lookup(1, NAMESPACE_ID, block_hashes("a", 3), 4, 1),
        lambda: index.reserve(1, NAMESPACE_ID, b"", [0], b"short", bytes(HASH_BYTES), 1),
        lambda: index.reserve(1, NAMESPACE_ID, b"", [0], bytes(HASH_BYTES), b"short", 1),
        lambda: index.reserve(1, NAMESPACE_ID, b"", [1], bytes(HASH_BYTES), bytes(HASH_BYTES), 1),
        lambda: index.reserve(3, NAMESPACE_ID, b"", [0], bytes(HASH_BYTES), bytes(HASH_BYTES), 1),
        lambda: index.reserve(2, NAMESPACE_ID, b"", [0], bytes(HASH_BYTES), bytes(HASH_BYTES), NOWHERE),
        lambda: index.lookup(2, NAMESPACE_ID, block_hashes("a", 3), 0, NOWHERE),
        lambda: index.connect(1, 16, []),
    ):
        with pytest.raises(BadRequest):
            bad()
    assert index.stats() == before and index.next_deadline() is not None


def test_evicted_blocks_are_freed_by_reference_count():
    """The garbage collector does not see blocks: walking a million of them takes a second."""
    index, lives = make(pages=101, policy=DEFAULT_POLICY), []
    stored = lambda entries: lives.extend(map(life_of, entries))  # noqa: E731
    index.watches.append(SimpleNamespace(stored=stored, used=lambda entries: None, gone=lambda entry: None))
    gc.disable()
    try:
        for i in range(200):
            slots = store(index, block_hashes(f"a{i}.", 30))
            found = index.lookup(1, NAMESPACE_ID, block_hashes(f"a{i}.", 30), 0, NOWHERE)
            if i % 3:
                index.release(1, found.lease)
            if i % 7 == 0:
                index.discard(1, NAMESPACE_ID, 0, block_hashes(f"a{i}.", 3)[2 * HASH_BYTES :], slots[2])
            if i % 50 == 0:
                index.clear(NAMESPACE_ID)
            if i % 20 == 0:
                index.disconnect(1)
                index.connect(1, 16, [GroupShape(hash_blocks_per_block=1, slot_pages=1)])
        assert index.stats().evictions > 1000
        index.disconnect(1)
        index._lease_table._clock.now += 1000
        index.tick()  # the queues of deadlines have references too
        assert len([life for life in lives if life() is not None]) == index.stats().entries > 0
        assert not any(map(gc.is_tracked, index._namespaces[NAMESPACE_ID].tables[0].values()))
    finally:
        gc.enable()
