"""Blocks that failed their checksum: which prefixes are requested without them, and what a lookup costs."""

import math
import os

from hypothesis import given
from hypothesis import strategies as st

from vllm_kvtier.remote_store import bad_blocks
from vllm_kvtier.remote_store.bad_blocks import BadBlocks
from vllm_kvtier.store.protocol import GroupShape

NAMESPACE_ID, OTHER = b"n" * 16, b"o" * 16
NAMES = st.tuples(
    st.sampled_from([NAMESPACE_ID, OTHER]), st.integers(0, 2), st.integers(0, 30), st.sampled_from(["", "a"])
)


def hash_of(n: int) -> bytes:
    return bytes([n % 4]) * 8 + n.to_bytes(8, "little")  # many begin alike


HASHES = b"".join(map(hash_of, range(30)))


@given(
    st.lists(st.tuples(st.booleans(), NAMES), max_size=30),
    st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3), st.integers(0, 3), st.integers(0, 30),
    st.sampled_from(["", "a"]),
)  # fmt: skip
def test_bad_blocks_end_the_prefix_as_a_look_at_each_block_does(changes, sizes, first, length, store):
    blocks, shapes, known = BadBlocks(), [GroupShape(size, 1) for size in sizes], set()
    for added, (namespace_id, group, n, of) in changes:
        if added:
            blocks.add(namespace_id, group, hash_of(n), of)
            known.add((namespace_id, group, hash_of(n), of))
        else:
            blocks.remove((namespace_id, group, hash_of(n)))
            known.discard((namespace_id, group, hash_of(n), ""))
    align = math.lcm(*sizes)
    start = first * align
    length = max(start, length // align * align)
    expected = length
    for group, size in enumerate(sizes):
        for end in range(start + size, expected + 1, size):
            if (NAMESPACE_ID, group, HASHES[(end - 1) * 16 : end * 16], store) in known:
                expected = max(start, (end - size) // align * align)
                break
    assert blocks.good_hash_blocks(NAMESPACE_ID, HASHES, shapes, start, length, store) == expected


def test_bad_block_of_another_store_or_namespace_costs_lookups_nothing():
    """Each later lookup of any prompt walked through all its blocks, on a store's only thread."""

    class Untouched(bytes):
        def __getitem__(self, key):
            raise AssertionError("looked at")

    blocks, hashes = BadBlocks(), os.urandom(16 * 1000)
    blocks.add(NAMESPACE_ID, 0, hashes[:16], "another")
    blocks.add(OTHER, 0, hashes[:16], "")
    shapes = [GroupShape(1, 1)] * 6
    assert blocks.good_hash_blocks(NAMESPACE_ID, Untouched(hashes), shapes, 0, 1000) == 1000
    blocks.add(NAMESPACE_ID, 0, b"no block of this".ljust(16))
    assert blocks.good_hash_blocks(NAMESPACE_ID, Untouched(hashes), shapes, 0, 1000) == 1000


def test_remembered_bad_blocks_are_read_once_for_many_lookups():
    """4,096 of them cost each lookup of a short prompt 2.5 ms."""

    class Counted(bytes):
        reads = 0

        def __getitem__(self, key):
            Counted.reads += 1
            return super().__getitem__(key)

    blocks, shapes = BadBlocks(), [GroupShape(1, 1)]
    blocks.add(NAMESPACE_ID, 0, Counted(b"no block of this".ljust(16)))
    assert [blocks.good_hash_blocks(NAMESPACE_ID, HASHES, shapes, 0, 30) for _ in range(3)] == [30] * 3
    assert Counted.reads == 1


def test_bad_blocks_are_forgotten_oldest_first(monkeypatch):
    monkeypatch.setattr(bad_blocks, "MAX_REMEMBERED", 2)
    blocks = BadBlocks()
    for n in range(3):
        blocks.add(NAMESPACE_ID, 0, hash_of(n))
    assert [(NAMESPACE_ID, 0, hash_of(n)) in blocks for n in range(3)] == [False, True, True]
    assert blocks.good_hash_blocks(NAMESPACE_ID, HASHES, [GroupShape(1, 1)], 0, 30) == 1
    for n in (0, 1, 2):
        blocks.remove((NAMESPACE_ID, 0, hash_of(n)))
    assert blocks.good_hash_blocks(NAMESPACE_ID, HASHES, [GroupShape(1, 1)], 0, 30) == 30
    assert not blocks._blocks and not blocks._by_store and not blocks._begins
