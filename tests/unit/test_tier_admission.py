"""What each admission makes of a block that is stored, used and forgotten."""

import pytest

from vllm_kvtier.store.index.block_entry import BlockEntry, NamespaceBlocks
from vllm_kvtier.store.index.types import GroupShape
from vllm_kvtier.store.tiers.admission import Reuse, admission


def entry(n: int, depth: int = 1) -> BlockEntry:
    made = BlockEntry(
        NamespaceBlocks(b"s" * 16, 16, [GroupShape(1, 1)], 1), 0, n.to_bytes(16, "big"), None, 1, None, b""
    )
    made.depth = depth
    return made


def test_admission_all_writes_every_block():
    made = admission("all")
    assert made.stored(entry(1)) and made.used(entry(1))
    made.gone(entry(1))


def test_admission_reuse_remembers_bounded_evictions():
    made = Reuse(ghosts=2)
    assert not made.stored(entry(1)) and made.used(entry(1))
    for n in (1, 2, 3):
        made.gone(entry(n))
    assert not made.stored(entry(1))  # the oldest of three
    assert made.stored(entry(2)) and made.stored(entry(3))
    assert not made.stored(entry(3))  # once for each time it was forgotten


def test_admission_min_tokens_applies():
    made = admission("reuse", 64)
    assert not made.used(entry(1, 3)) and made.used(entry(1, 4))
    made.gone(entry(2, 3))
    assert not made.stored(entry(2, 3))
    made.gone(entry(3, 4))
    assert made.stored(entry(3, 4)) and not made.stored(entry(4, 4))


def test_admission_unknown_policy_raises():
    with pytest.raises(KeyError):
        admission("never")
