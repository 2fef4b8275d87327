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


@pytest.mark.parametrize("groups", [["mamba"], ["full", "mamba"], ["sliding", "mamba"]])
def test_admission_min_tokens_applies_to_states_whose_end_is_known(groups):
    """Of models with recurrent states alone nothing was admitted, since a state's block has no stored parent."""
    shapes = [GroupShape(8 if kind == "mamba" else 1, 1, 64 if kind == "sliding" else None, kind) for kind in groups]
    namespace = NamespaceBlocks(b"s" * 16, 16, shapes, 8)
    made = admission("all", 256)
    for tokens in (128, 512):
        block_hash = tokens.to_bytes(16, "big")
        entries = [
            BlockEntry(namespace, group, block_hash, None, 1, None, b"", 8 if kind == "mamba" else tokens // 16)
            for group, kind in enumerate(groups)
        ]
        for each in entries:
            namespace.insert(each, None)
        admitted = tokens >= 256 or groups == ["mamba"]
        assert [made.stored(each) for each in entries] == [made.used(each) for each in entries]
        assert [made.stored(each) for each in entries] == [admitted] * len(groups)


def test_admission_unknown_policy_raises():
    with pytest.raises(KeyError):
        admission("never")
