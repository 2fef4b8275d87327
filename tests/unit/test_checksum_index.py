"""Content keys, the checksum index, and the batches made from its entries."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumEntry, ChecksumIndex, ContentKeys, batches
from vllm_kvtier.scheduler.offload.block_tables import Table

hashes = st.binary(min_size=8, max_size=32)


@given(st.integers(0, (1 << 64) - 1), hashes, st.integers(0, 200), st.binary(max_size=20))
def test_content_keys_are_64_bits_and_depend_on_every_input(salt, block_hash, group, lora_fingerprint):
    key = ContentKeys(salt).key(block_hash, group, lora_fingerprint)
    assert 0 <= key < 1 << 64 and np.uint64(key) == key
    assert key != ContentKeys(salt ^ 1).key(block_hash, group, lora_fingerprint)
    assert key != ContentKeys(salt).key(block_hash, group + 1, lora_fingerprint)
    assert key != ContentKeys(salt).key(bytes([block_hash[0] ^ 1]) + block_hash[1:], group, lora_fingerprint)
    head = (lora_fingerprint[:1] or b"\0")[0]
    assert key != ContentKeys(salt).key(block_hash, group, bytes([head ^ 1]) + lora_fingerprint[1:])


def test_checksum_index_entry_lives_from_order_to_reuse_of_block():
    checksum_index = ChecksumIndex()
    a, b = ChecksumEntry(0, 5, 111, 4), ChecksumEntry(0, 6, 222, 4)
    assert checksum_index.take_missing([a, b], 3) == [a, b] and checksum_index.take_missing([a, b], 4) == []
    assert checksum_index.ready_step([a, b]) == 3 and checksum_index.ready_step([]) == -1
    other = ChecksumEntry(0, 6, 222, 2)
    assert checksum_index.take_missing([a, other], 7) == [other] and checksum_index.ready_step([a, other]) == 7
    assert not checksum_index.has(b), "a block has one checksum at a time"
    checksum_index.remove(range(5, 6))
    assert not checksum_index.has(a) and checksum_index.has(other)
    checksum_index.mark(a)
    assert checksum_index.ready_step([a]) == -1, "pulled and verified: in the table already"
    checksum_index.clear()
    assert not checksum_index.has(a) and not checksum_index.has(other)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 99), st.integers(0, (1 << 64) - 1), st.integers(1, 64))))
def test_checksum_batches_hold_every_entry_once_by_group(rows):
    made = batches([ChecksumEntry(*row) for row in rows])
    assert [b.group for b in made] == sorted({row[0] for row in rows})
    assert [(b.ids.dtype, b.keys.dtype, b.valid.dtype) for b in made] == [(np.int64, np.uint64, np.int32)] * len(made)
    back = [(b.group, *r) for b in made for r in zip(b.ids.tolist(), b.keys.tolist(), b.valid.tolist(), strict=True)]
    assert sorted(back) == sorted(rows)


def test_block_tables_do_not_share_lists():
    a, b = Table([[1], [2]]), Table([[1], [2]])
    a.checksums_ready[0] = 9
    assert b.checksums_ready == [0, 0]
