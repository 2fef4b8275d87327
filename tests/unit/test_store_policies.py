"""Eviction policies by themselves and under the index: what they keep, and that none can stall or stray."""

import gc
import random

import pytest
from support import Clock

from vllm_kvtier.store.entries import Entry
from vllm_kvtier.store.extents import SlotPool
from vllm_kvtier.store.index import EXISTS, HASH, NO_PARENT_STORED, NO_ROOM, BadRequest, Index
from vllm_kvtier.store.messages import GroupShape
from vllm_kvtier.store.policies import DEFAULT_POLICY, POLICIES
from vllm_kvtier.store.policies.aging import CLASSES

SPACE = b"S" * HASH
NOWHERE = 1 << 40
every_policy = pytest.mark.parametrize("name", sorted(POLICIES))


def entry(i: int) -> Entry:
    return Entry(None, 0, i.to_bytes(HASH, "big"), None, 1, None, b"")


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
def test_holds_exactly_what_was_added_and_not_removed(name):
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
    for victim in list(held):
        policy.remove(victim, evicted=False)
    assert policy.coldest() is None and len(policy) == 0


@every_policy
def test_deferring_names_everything_in_time(name):
    """However old, used or protected its neighbours are: one block that may go is found among many that may not."""
    rng, policy = random.Random(2), POLICIES[name]()
    held = [entry(i) for i in range(200)]
    for e in held:
        policy.add(e)
    for _ in range(300):
        policy.touch(rng.sample(held, 3))
    named = set()
    for _ in range(200 * 2 * CLASSES):
        named.add(policy.coldest())
        policy.defer([policy.coldest()])
    assert named == set(held)


@every_policy
def test_ghosts_are_bounded(name):
    cache = Cache(name, 50)
    for i in range(5000):
        cache.use(i)
    seen = [value for value in vars(cache.policy).values() if hasattr(value, "__len__")]
    sizes = [len(v) if not isinstance(v, (tuple, list)) else sum(map(len, v)) for v in seen]
    assert sum(sizes) <= 2 * 50 + 2


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"lru"}))
def test_a_long_prompt_that_never_returns_does_not_cost_what_is_used_often(name):
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
def test_what_comes_back_too_late_is_kept_longer_the_next_time(name):
    cache = Cache(name, 100)
    for i in range(90):
        cache.use(i)
    for i in range(1000, 1105):
        cache.use(i)
    assert not any(cache.use(i) for i in range(20, 30))  # gone, but remembered
    for i in range(2000, 2105):
        cache.use(i)
    assert all(i in cache.held for i in range(20, 30))


def test_lru_is_lru():
    cache = Cache("lru", 3)
    assert [cache.use(i) for i in (1, 2, 3, 1, 4, 2, 1)] == [False] * 3 + [True, False, False, True]


def test_aging_weighs_age_by_uses():
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


def test_the_default_is_one_of_them():
    assert DEFAULT_POLICY in POLICIES


# -- under the index -----------------------------------------------------------------------------------------------


def make(pages: int = 101, shapes=None, policy: str = "lru", **options) -> Index:
    pool = SlotPool(pages, 64, slab_pages=8)
    index = Index(pool, POLICIES[policy], Clock(), **options)
    index.grow(pages)
    index.connect(1, 16, shapes or [GroupShape(units=1, slot_pages=1)])
    return index


def chain(name: str, n: int) -> bytes:
    return b"".join(f"{name}{i}".encode().ljust(HASH, b".") for i in range(n))


def store(index: Index, hashes: bytes, group: int = 0, tenant: bytes = b"", space: bytes = SPACE) -> list[int]:
    n = len(hashes) // HASH
    parents = (bytes(HASH) + hashes)[: len(hashes)]
    slots = index.reserve(1, space, tenant, [group] * n, hashes, parents, NOWHERE)
    index.commit(1, [slot for slot in slots if slot > 0])
    return slots


def there(index: Index, hashes: bytes, space: bytes = SPACE) -> int:
    return index.inspect(1, space, hashes).units


@every_policy
def test_prefixes_go_from_the_tail(name):
    index = make(policy=name)
    old = chain("a", 60)
    store(index, old)
    store(index, chain("b", 40))
    before = 60
    for i in range(6):
        store(index, chain(f"c{i}.", 10))
        blocks = index.inspect(1, SPACE, old).blocks[0] if there(index, old) else 0
        assert there(index, old) == blocks <= before, "a hole in a prefix"
        before = blocks
    assert before < 60


@every_policy
def test_a_leased_chain_is_passed_over_in_bounded_time(name):
    """All of it is the coldest there is, and nothing of it may go: the block behind it is found all the same."""
    index = make(pages=3001, policy=name)
    store(index, chain("a", 2900))
    store(index, chain("b", 100))
    found = index.lookup(1, SPACE, chain("a", 2900), 0, NOWHERE)
    assert found.units == 2900
    for i in range(3):
        store(index, chain("c", 40 * (i + 1)))
    assert there(index, chain("c", 120)) == 100 and there(index, chain("a", 2900)) == 2900
    assert store(index, chain("d", 3)).count(NO_ROOM) == 0  # of c, which nobody holds
    index.release(1, found.lease)
    assert all(slot > 0 for slot in store(index, chain("e", 500)))
    assert there(index, chain("a", 2900)) < 2900


def test_parents_of_what_is_being_stored_are_not_evicted_for_it():
    index = make(pages=11)
    store(index, chain("a", 10))
    longer = chain("a", 15)
    slots = index.reserve(1, SPACE, b"", [0] * 5, longer[10 * HASH :], longer[9 * HASH : -HASH], NOWHERE)
    assert slots == [NO_ROOM] * 5 and there(index, longer) == 10


def test_cold_memory_of_another_size_is_taken_and_hot_memory_is_not():
    shapes = [GroupShape(units=1, slot_pages=1), GroupShape(units=1, slot_pages=5, window=16)]
    index = make(pages=129, shapes=shapes)
    store(index, chain("a", 128))
    assert index.stats().used_pages == 128
    big = store(index, chain("b", 4), group=1)
    assert all(slot > 0 for slot in big), "nothing of its own to evict: takes what is coldest"
    left = index.inspect(1, SPACE, chain("a", 128))
    assert left.blocks[0] >= 80
    hot = chain("a", left.blocks[0])
    for i in range(30):
        index.touch(1, SPACE, hot)
        store(index, chain(f"c{i}.", 1), group=1)
    assert index.inspect(1, SPACE, hot).blocks[0] == left.blocks[0], "hot blocks gave way to cold ones of another size"
    for i in range(60):
        store(index, chain(f"d{i}.", 2), group=1)
        index.touch(1, SPACE, chain(f"d{i}.", 2))
    assert index.inspect(1, SPACE, hot).blocks[0] < left.blocks[0] / 2, "cold blocks kept their memory"


def test_one_cold_block_does_not_give_a_hot_slab_away():
    shapes = [GroupShape(units=1, slot_pages=1), GroupShape(units=1, slot_pages=8, window=16)]
    index = make(pages=65, shapes=shapes)
    store(index, chain("cold", 1))
    store(index, chain("hot", 7))  # the rest of that slab
    assert all(slot > 0 for i in range(6) for slot in store(index, chain(f"b{i}.", 1), group=1))
    index.touch(1, SPACE, chain("hot", 7))
    assert store(index, chain("c", 1), group=1)[0] > 0
    assert index.inspect(1, SPACE, chain("hot", 7)).blocks[0] == 7
    assert index.inspect(1, SPACE, chain("b0.", 1)).blocks[1] == 0, "its own coldest went"


def test_a_tenant_over_its_share_pays_with_its_own():
    index = make(pages=101, tenant_share=0.3)
    store(index, chain("x", 60), tenant=b"")  # names no tenant: no share
    store(index, chain("a", 30), tenant=b"a")
    assert there(index, chain("a", 30)) == 30
    store(index, chain("b", 10), tenant=b"b")
    store(index, chain("c", 20), tenant=b"a")
    assert there(index, chain("x", 60)) == 60 and there(index, chain("b", 10)) == 10
    assert there(index, chain("c", 20)) == 20 and there(index, chain("a", 30)) == 10
    # With nothing of its own that may go it gets no more, while others do.
    leases = [index.lookup(1, SPACE, chain(name, 30), 0, NOWHERE).lease for name in "ac"]
    assert store(index, chain("d", 2), tenant=b"a") == [NO_ROOM] * 2
    assert all(slot > 0 for slot in store(index, chain("d", 2), tenant=b"b"))
    for lease in leases:
        index.release(1, lease)
    assert all(slot > 0 for slot in store(index, chain("e", 2), tenant=b"a"))


def test_blocks_behind_a_gap_come_back_with_the_block_that_is_missing():
    index = make()
    hashes = chain("a", 5)
    slots = store(index, hashes)
    assert index.discard(1, SPACE, 0, hashes[2 * HASH : 3 * HASH], slots[2])
    assert there(index, hashes) == 2 and index.stats().entries == 4
    assert store(index, hashes)[:2] == [EXISTS] * 2 and there(index, hashes) == 5
    assert index.stats().reserved_slots == 6


def test_chains_that_lie():
    index = make()
    a, b = (name.ljust(HASH, b".") for name in (b"a", b"b"))
    assert index.reserve(1, SPACE, b"", [0, 0], a + b, b + a, NOWHERE) == [NO_PARENT_STORED, NO_PARENT_STORED]
    assert index.reserve(1, SPACE, b"", [0], a, a, NOWHERE) == [NO_PARENT_STORED], "its own parent"
    # A circle: b under a; a is forgotten and comes back under b.
    slots = index.reserve(1, SPACE, b"", [0, 0], a + b, bytes(HASH) + a, NOWHERE)
    index.commit(1, slots)
    index.discard(1, SPACE, 0, a, slots[0])
    again = index.reserve(1, SPACE, b"", [0], a, b, NOWHERE)
    index.commit(1, again)
    for i in range(5):
        assert all(slot > 0 for slot in store(index, chain(f"c{i}.", 100)[: 90 * HASH]))
    # The same hash over and over in a chain to look up: leased as often, and released as often.
    lease = index.lookup(1, SPACE, chain("c4.", 1) * 50, 0, NOWHERE)
    assert lease.units == 50
    assert index.release(1, lease.lease) and index.stats().leased_entries == 0


def test_requests_that_no_client_makes_are_refused_and_change_nothing():
    index = make()
    store(index, chain("a", 3))
    before = index.stats()
    index.connect(2, 32, [GroupShape(units=1, slot_pages=1)])
    index.connect(3, 16, [])
    for bad in (
        lambda: index.lookup(7, SPACE, b"", 0, 1),
        lambda: index.lookup(1, SPACE, b"odd", 0, 1),
        lambda: index.lookup(1, SPACE, chain("a", 3), 4, 1),
        lambda: index.reserve(1, SPACE, b"", [0], b"short", bytes(HASH), 1),
        lambda: index.reserve(1, SPACE, b"", [0], bytes(HASH), b"short", 1),
        lambda: index.reserve(1, SPACE, b"", [1], bytes(HASH), bytes(HASH), 1),
        lambda: index.reserve(3, SPACE, b"", [0], bytes(HASH), bytes(HASH), 1),
        lambda: index.reserve(2, SPACE, b"", [0], bytes(HASH), bytes(HASH), NOWHERE),
        lambda: index.lookup(2, SPACE, chain("a", 3), 0, NOWHERE),
        lambda: index.connect(1, 16, []),
    ):
        with pytest.raises(BadRequest):
            bad()
    assert index.stats() == before and index.next_deadline() is not None


def test_what_is_evicted_is_freed_without_the_cycle_collector():
    """A collection that walks a million blocks takes a second; the server may put it off."""
    index = make(pages=101, policy=DEFAULT_POLICY)
    gc.collect()
    gc.disable()
    try:
        for i in range(200):
            slots = store(index, chain(f"a{i}.", 30))
            found = index.lookup(1, SPACE, chain(f"a{i}.", 30), 0, NOWHERE)
            if i % 3:
                index.release(1, found.lease)
            if i % 7 == 0:
                index.discard(1, SPACE, 0, chain(f"a{i}.", 3)[2 * HASH :], slots[2])
            if i % 50 == 0:
                index.clear(SPACE)
            if i % 20 == 0:
                index.disconnect(1)
                index.connect(1, 16, [GroupShape(units=1, slot_pages=1)])
        assert index.stats().evictions > 1000
        del slots, found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [x for x in gc.garbage if isinstance(x, Entry)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
