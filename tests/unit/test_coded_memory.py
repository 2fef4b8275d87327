"""Pulls that carry a codec: rows of encoded blocks between two engines' caches."""

import numpy as np
import pytest
import torch
from pull_fakes import TOKENS, Pair, batch_of, cache_of_numbers, pull_of
from support import eventually

from vllm_kvtier import codecs
from vllm_kvtier.wire.geometry import geometry_mismatch
from vllm_kvtier.worker.coded_memory import CodedMemory
from vllm_kvtier.worker.memory import CacheMemory


def numbers(memory, block):
    """float32 [layers, heads, tokens, numbers] of a block."""
    return torch.stack(
        [memory.view.pages(r)[block].view(torch.bfloat16).float() for r in memory.view.groups[0].regions]
    )


def rows(memory, block):
    (region,) = memory.transfer_view.groups[0].regions
    return memory.transfer_view.pages(region)[block].flatten()


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
@pytest.mark.parametrize("codec", [name for name in codecs.names() if name != "raw"])
def test_a_good_pull_brings_what_the_codec_keeps(codec, device):
    pair = Pair(codec=codec, device=device)
    made = pair.there.make_sums([batch_of([3, 4, 9])], pair.there.fence())
    eventually(made.done, 10)
    untouched = numbers(pair.here, 2)
    result = pair.run(pair.order(pull_of([5, 6, 1], [3, 4, 9])))
    assert not result.failed and not result.bad_blocks and not pair.pulls.active
    assert torch.equal(numbers(pair.here, 2), untouched)
    for here, there in ((5, 3), (6, 4), (1, 9)):
        off = (numbers(pair.here, here) - numbers(pair.there, there)).abs().max()
        assert 0 < off < 0.4, "encoded: near, and not the same"
        assert torch.equal(rows(pair.here, here), rows(pair.there, there)), "can be exported as it came"
    raw = 3 * len(numbers(pair.here, 1).flatten()) * 2
    assert result.bytes < raw, "and fewer bytes crossed"


@DEVICES
def test_what_is_wrong_in_a_row_is_computed(device):
    pair = Pair(codec="int8", device=device)
    eventually(pair.there.make_sums([batch_of([3, 4, 9, 7])], pair.there.fence()).done, 10)
    rows(pair.there, 4)[11] ^= 0x10
    (layout,) = pair.there.layouts
    rows(pair.there, 9)[layout.sum_offset + 3] ^= 1
    order = pull_of([5, 6, 1, 2], [3, 4, 9, 7])
    order.keys[3] ^= np.uint64(1)  # another block than was asked for
    result = pair.run(pair.order(order))
    assert result.failed and result.checksum and result.bad_blocks == {6, 1, 2}


def test_a_row_that_was_never_made_is_computed():
    pair = Pair(codec="int8")
    pair.there.make_sums([batch_of([3])], None)
    result = pair.run(pair.order(pull_of([5, 6], [3, 4])))
    assert result.failed and result.bad_blocks == {6}


def test_only_engines_with_the_same_codec_understand_each_other():
    view = cache_of_numbers(4, 1)
    kinds = {name: CodedMemory(view, [codecs.get(name)]).geometry() for name in ("int8", "fp8")}
    kinds["raw"] = CacheMemory(view, host_buffer=False).geometry()
    for a, here in kinds.items():
        for b, there in kinds.items():
            reason = geometry_mismatch(here, there)
            assert (reason is None) == (a == b), reason
            if a != b:
                assert "encoded" in reason or "parts" in reason or "layer" in reason
    assert TOKENS == view.groups[0].block_tokens
