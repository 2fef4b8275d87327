"""Content keys, the ledger of checksums, and the batches made from its entries."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvtier.scheduler.ledger import Entry, Keys, Ledger, batches
from vllm_kvtier.scheduler.tables import Table

hashes = st.binary(min_size=8, max_size=32)


@given(st.integers(0, (1 << 64) - 1), hashes, st.integers(0, 200), st.binary(max_size=20))
def test_keys_are_64_bits_and_depend_on_everything(salt, block_hash, group, variant):
    key = Keys(salt).key(block_hash, group, variant)
    assert 0 <= key < 1 << 64 and np.uint64(key) == key
    assert key != Keys(salt ^ 1).key(block_hash, group, variant)
    assert key != Keys(salt).key(block_hash, group + 1, variant)
    assert key != Keys(salt).key(bytes([block_hash[0] ^ 1]) + block_hash[1:], group, variant)
    head = (variant[:1] or b"\0")[0]
    assert key != Keys(salt).key(block_hash, group, bytes([head ^ 1]) + variant[1:])


def test_an_entry_counts_from_its_order_until_its_block_is_handed_out():
    ledger = Ledger()
    a, b = Entry(0, 5, 111, 4), Entry(0, 6, 222, 4)
    assert ledger.take_missing([a, b], 3) == [a, b] and ledger.take_missing([a, b], 4) == []
    assert ledger.ready_step([a, b]) == 3 and ledger.ready_step([]) == -1
    other = Entry(0, 6, 222, 2)
    assert ledger.take_missing([a, other], 7) == [other] and ledger.ready_step([a, other]) == 7
    assert not ledger.has(b), "a block has one checksum at a time"
    ledger.forget(range(5, 6))
    assert not ledger.has(a) and ledger.has(other)
    ledger.mark(a)
    assert ledger.ready_step([a]) == -1, "pulled and verified: in the table already"
    ledger.clear()
    assert not ledger.has(a) and not ledger.has(other)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 99), st.integers(0, (1 << 64) - 1), st.integers(1, 64))))
def test_batches_hold_every_entry_once_by_group(rows):
    made = batches([Entry(*row) for row in rows])
    assert [b.group for b in made] == sorted({row[0] for row in rows})
    assert [(b.ids.dtype, b.keys.dtype, b.valid.dtype) for b in made] == [(np.int64, np.uint64, np.int32)] * len(made)
    back = [(b.group, *r) for b in made for r in zip(b.ids.tolist(), b.keys.tolist(), b.valid.tolist(), strict=True)]
    assert sorted(back) == sorted(rows)


def test_tables_do_not_share_their_lists():
    a, b = Table([[1], [2]]), Table([[1], [2]])
    a.summed[0] = 9
    assert b.summed == [0, 0]
