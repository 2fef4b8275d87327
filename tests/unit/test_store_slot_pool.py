"""Slots of the pool: apart, within pieces, side by side, nothing lost, and memory that moves between sizes."""

import random

import pytest

from vllm_kvtier.store.memory.slot_pool import SLAB_PAGES, SlotPool

ALL = 1 << 60


def pool_of(pages: int, piece: int, **kwargs) -> SlotPool:
    pool = SlotPool(pages, piece, **kwargs)
    pool.grow(pages)
    return pool


@pytest.mark.parametrize("size", [1, 3, 7, 31, 64])
def test_slot_pool_of_one_size_wastes_only_piece_ends(size):
    pool = pool_of(300, 64)
    pieces = [(1, 64), (64, 128), (128, 192), (192, 256), (256, 300)]
    slots = pool.alloc(size, 10_000, ALL)
    expected = sum((end - start) // size for start, end in pieces)
    assert len(slots) == expected == len(set(slots))
    assert all(slot // 64 == (slot + size - 1) // 64 for slot in slots), "a slot straddles two pieces"
    assert pool.used == expected * size
    for slot in slots:
        pool.free(slot)
    assert tuple(pool._extents) == tuple(pieces) and not pool._slabs and pool.used == 0


def test_slot_pool_never_allocates_page_0_or_unready_pages():
    pool = SlotPool(256, 64)
    assert pool.alloc(1, 5, ALL) == []
    pool.grow(10)
    assert pool.alloc(1, 100, ALL) == list(range(1, 10))
    pool.grow(5)  # never shrinks
    assert pool.ready == 10
    pool.grow(1000)
    assert pool.ready == 256 and pool.alloc(1, 3, ALL) == [10, 11, 12]


def test_slot_pool_grown_in_steps_equals_full_pool():
    stepwise = SlotPool(256, 64)
    got = []
    for ready in range(0, 257, 5):
        stepwise.grow(ready)
        got += stepwise.alloc(7, 100, ALL)
    assert sorted(got) == pool_of(256, 64).alloc(7, 1000, ALL)


def test_slot_pool_limit_bounds_end_of_slots():
    pool = pool_of(256, 64)
    assert pool.alloc(8, 100, 40) == [1, 9, 17, 25]
    assert pool.alloc(8, 1, 40) == []
    assert pool.alloc(8, 1, ALL) == [33]


def test_slot_pool_finds_a_slot_below_the_limit_behind_many_slabs_beyond_it():
    """An engine that is still registering memory finds what was evicted for it, whatever is free beyond its limit."""
    pool = pool_of(1 + 10 * 200, 1 << 16, slab_pages=10)
    slots = pool.alloc(1, 2000, ALL)
    for slot in [*slots[1000::10], slots[505]]:
        pool.free(slot)
    assert pool.alloc(1, 3, slots[1000]) == [slots[505]]
    assert pool.alloc(1, 100, ALL) == slots[1000::10]


def test_slot_pool_slots_of_one_request_are_adjacent():
    pool = pool_of(1 << 20, 1 << 16)
    slots = pool.alloc(576, 512, ALL)
    breaks = sum(b - a != 576 for a, b in zip(slots, slots[1:], strict=False))
    assert slots == sorted(slots) and breaks == 512 // (65536 // 576)  # only at the ends of pieces
    # In a full pool: what was freed side by side is given side by side again, crumbs only when need be.
    full = pool_of(1 << 16, 1 << 16)
    everything = full.alloc(16, 1 << 16, ALL)
    for slot in everything[::9]:
        full.free(slot)
    for slot in everything[1000:1032]:
        if slot not in everything[::9]:
            full.free(slot)
    assert full.alloc(16, 32, ALL) == everything[999:1031]  # 999 is one of the crumbs


def test_slot_pool_takes_smallest_fitting_run():
    pool = pool_of(1 << 16, 1 << 16, slab_pages=1 << 15)
    slots = pool.alloc(4, 100, ALL)
    for i in [*range(10, 18), *range(40, 43), *range(60, 80)]:
        pool.free(slots[i])
    assert pool.alloc(4, 3, ALL) == slots[40:43]


def test_slot_pool_slab_size_is_bounded():
    pool = pool_of(1 << 16, 1 << 16)
    pool.alloc(8, 1, ALL)
    pool.alloc(9, 1, ALL)
    first, second = pool._slabs
    assert first.end - first.start <= SLAB_PAGES and second.start == first.end
    giant = SlotPool(1 << 18, 1 << 16)
    giant.grow(1 << 18)
    assert len(giant.alloc(40_000, 9, ALL)) == 4  # larger than a slab: one a piece


def test_slot_pool_around_names_slabs_to_reclaim():
    pool = pool_of(128, 64, slab_pages=8)
    small = pool.alloc(4, 100, ALL)
    assert pool.alloc(20, 1, ALL) == []
    slabs = pool.around(small[8], 20, ALL)
    assert any(small[8] in slab.slots() for slab in slabs)
    for slab in slabs:
        for slot in slab.slots():
            pool.free(slot)
    assert len(slabs) <= 4 and len(pool.alloc(20, 1, ALL)) == 1
    assert pool.around(small[0], 64, ALL) is None, "page 0 is not to be had, so this piece never holds 64"
    assert pool.around(small[0], 20, 10) is None, "beyond the limit"
    assert pool.around(small[-1], 60, ALL) is not None


@pytest.mark.parametrize("seed", range(30))
def test_slot_pool_random_operations_lose_and_duplicate_nothing(seed):
    rng = random.Random(seed)
    pool = SlotPool(1000, 128, slab_pages=rng.choice([8, 32, 200]))
    sizes = rng.sample([1, 2, 3, 5, 8, 13, 40], rng.randint(1, 3))
    held: dict[int, int] = {}
    for _ in range(300):
        event = rng.random()
        if event < 0.1:
            pool.grow(pool.ready + rng.randint(0, 200))
        elif event < 0.6 or not held:
            size, limit = rng.choice(sizes), rng.choice([ALL, ALL, rng.randint(0, 1000)])
            slots = pool.alloc(size, rng.randint(1, 20), limit)
            assert slots == sorted(slots) and all(slot + size <= min(limit, pool.ready) for slot in slots)
            assert not held.keys() & set(slots)
            held |= dict.fromkeys(slots, size)
        else:
            for slot in rng.sample(sorted(held), rng.randint(1, len(held))):
                del held[slot]
                pool.free(slot)
        spans = sorted((slot, slot + size) for slot, size in held.items())
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))
        assert all(a > 0 and a // 128 == (b - 1) // 128 for a, b in spans)
        assert pool.used == sum(held.values())
        free = list(pool._extents)
        covered = sorted(free + [(slab.start, slab.end) for slab in pool._slabs])
        assert sum(b - a for a, b in covered) == max(0, pool.ready - 1)
        assert all(a[1] <= b[0] for a, b in zip(covered, covered[1:], strict=False))
        assert all(a[1] < b[0] or b[0] % 128 == 0 for a, b in zip(free, free[1:], strict=False)), "not merged"
    for slot in held:
        pool.free(slot)
    assert not pool._slabs


@pytest.mark.parametrize("seed", range(20))
def test_slot_pool_restore_reproduces_allocation(seed):
    rng = random.Random(seed)
    pool = SlotPool(1000, 128, slab_pages=rng.choice([8, 32, 200]))
    pool.grow(1000)
    held: dict[int, int] = {}
    for _ in range(60):
        size = rng.choice([1, 3, 8, 40])
        held |= dict.fromkeys(pool.alloc(size, rng.randint(1, 12), ALL), size)
        for slot in rng.sample(sorted(held), rng.randint(0, len(held) // 2)):
            del held[slot]
            pool.free(slot)
    again = SlotPool(1000, 128, slab_pages=rng.choice([8, 32, 200]))
    slots = sorted(held)
    cut = rng.randint(0, len(slots))
    for some in (slots[:cut], slots[cut:]):
        assert all(again.restore(some, [held[slot] for slot in some]))
    again.grow(1000)
    assert again.used == pool.used
    assert sorted(slot for slab in again._slabs for slot in slab.slots()) == slots
    covered = sorted([*again._extents, *((slab.start, slab.end) for slab in again._slabs)])
    assert sum(b - a for a, b in covered) == 999
    assert all(a[1] <= b[0] for a, b in zip(covered, covered[1:], strict=False))
    more = again.alloc(3, 1000, ALL)
    assert not {page for slot in more for page in range(slot, slot + 3)} & {
        page for slot, size in held.items() for page in range(slot, slot + size)
    }
    for slot in [*held, *more]:
        again.free(slot)
    assert not again._slabs and not again.used


def test_slot_pool_invalid_restore_is_refused():
    pool = SlotPool(100, 32)
    assert pool.restore([0, 1, 2, 30, 90, 99, 101], [1, 2, 1, 3, 0, 2, 1]) == [False, True] + [False] * 5
    pool.grow(100)
    assert pool.used == 2
    with pytest.raises(ValueError):
        pool.restore([50], [1])
