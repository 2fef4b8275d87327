"""Leases and reservations of the store's index end before their deadline, mostly: what is left of them until then."""

import sys

import pytest
from support import Clock

from vllm_kvtier.store.index import leases
from vllm_kvtier.store.index.index import Index, IndexLimits
from vllm_kvtier.store.index.types import GroupShape
from vllm_kvtier.store.memory.slot_pool import SlotPool

NAMESPACE_ID, FIRST, OTHER, PAGES, SECONDS = b"n" * 16, b"a" * 16, b"b" * 16, 2, 50.0


def made_of(pages):
    made = Index(SlotPool(pages), None, Clock(), IndexLimits(lease_seconds=SECONDS, reserve_seconds=SECONDS))
    made.grow(pages)
    made.connect(1, 16, [GroupShape(1, 1)])
    return made


@pytest.fixture
def index():
    return made_of(PAGES)


def reserve(index, block_hash):
    (slot,) = index.reserve(1, NAMESPACE_ID, b"", [0], block_hash, bytes(16), PAGES + 1)
    assert slot > 0
    return slot


@pytest.mark.parametrize("committed", [False, True])
def test_index_keeps_no_block_of_an_ended_reservation(index, committed):
    slot = reserve(index, FIRST)
    entry = index.find(NAMESPACE_ID, 0, FIRST)
    (index.commit if committed else index.abort)(1, [slot])
    index.clear(None)
    assert sys.getrefcount(entry) == 2, "this function's, and that of its call"


def test_index_slot_reserved_anew_has_a_deadline_of_its_own(index):
    clock = index._lease_table._clock
    slot = reserve(index, FIRST)
    index.commit(1, [slot])
    clock.now += SECONDS - 1
    assert reserve(index, OTHER) == slot, "evicted for it"
    clock.now += 2
    index.tick()
    assert index.client_counts(1) == (0, 1) and index.stats().expired_reservations == 0
    clock.now += SECONDS
    index.tick()
    assert index.client_counts(1) == (0, 0) and index.stats().expired_reservations == 1
    assert index.find(NAMESPACE_ID, 0, OTHER) is None


def test_index_forgets_what_ended_behind_a_lease_that_lives():
    """For as long as that lived, each lease kept 190 bytes, and each reservation its slots until its deadline."""
    index = made_of(PAGES + 1)
    index.commit(1, [reserve(index, FIRST)])
    living = [index.lookup(1, NAMESPACE_ID, FIRST, 0, PAGES).lease]
    table = index._lease_table
    for _ in range(10 * leases.MIN_SWEEP):
        table._clock.now += 1e-6
        assert index.release(1, index.lookup(1, NAMESPACE_ID, FIRST, 0, PAGES).lease)
        index.abort(1, [reserve(index, OTHER)])
    assert len(table._leases) <= leases.MIN_SWEEP and len(table._reservations) <= leases.MIN_SWEEP
    living += [index.lookup(1, NAMESPACE_ID, FIRST, 0, PAGES).lease for _ in range(2 * leases.MIN_SWEEP)]
    reserve(index, OTHER)
    assert index.client_counts(1) == (len(living), 1)
    table._clock.now += SECONDS
    for _ in range(len(living)):
        if not index.tick():
            break
    assert index.client_counts(1) == (0, 0) and index.stats().expired_leases == len(living)
    assert index.next_deadline() is None
