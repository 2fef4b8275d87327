"""Reservations of the store's index end before their deadline, mostly: what is left of them until then."""

import sys

import pytest
from support import Clock

from vllm_kvtier.store.index.index import Index, IndexLimits
from vllm_kvtier.store.index.types import GroupShape
from vllm_kvtier.store.memory.slot_pool import SlotPool

NAMESPACE_ID, FIRST, OTHER, PAGES, SECONDS = b"n" * 16, b"a" * 16, b"b" * 16, 2, 50.0


@pytest.fixture
def index():
    made = Index(SlotPool(PAGES), None, Clock(), IndexLimits(reserve_seconds=SECONDS))
    made.grow(PAGES)
    made.connect(1, 16, [GroupShape(1, 1)])
    return made


def reserve(index, block_hash):
    (slot,) = index.reserve(1, NAMESPACE_ID, b"", [0], block_hash, bytes(16), PAGES)
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
