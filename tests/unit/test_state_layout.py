"""Recurrent states in vLLM's tensors: one cell a block, which holds all states of a layer."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from vllm_kvtier import codecs
from vllm_kvtier.codecs import choice
from vllm_kvtier.errors import UnsupportedLayout
from vllm_kvtier.vllm_compat.layout.groups import cache_kind
from vllm_kvtier.vllm_compat.layout.kv_layout import cache_view
from vllm_kvtier.wire.geometry import geometry_mismatch

SHAPES, DTYPES = ((3, 8), (2, 4, 4)), (torch.bfloat16, torch.float32)
NBYTES, PAGE, BLOCKS = 3 * 8 * 2 + 2 * 4 * 4 * 4, 256, 5
PARALLEL = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)


def spec(**fields):
    return MambaSpec(**{"block_size": 32, "shapes": SHAPES, "dtypes": DTYPES, "mamba_cache_mode": "align", **fields})


def caches(nbytes=NBYTES):
    """Two layers whose pages are padded, side by side in one allocation, as vLLM hands them over."""
    memory = torch.arange(2 * BLOCKS * PAGE, dtype=torch.int64).to(torch.int8)
    return {
        name: memory[layer * PAGE :].as_strided((BLOCKS, 1, 1, nbytes), (2 * PAGE, nbytes, nbytes, 1))
        for layer, name in enumerate("ab")
    }


def view_of(spec, caches):
    config = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(list(caches), spec)])
    return cache_view(caches, config, SimpleNamespace(parallel_config=PARALLEL), "cpu")


def test_state_layout_covers_states_without_padding():
    tensors = caches()
    view = view_of(spec(), tensors)
    (group,) = view.groups
    assert (group.kind, group.window, group.block_tokens, group.block_bytes) == ("mamba", None, 32, 2 * NBYTES)
    for region in group.regions:
        assert (region.tokens, region.cell_tokens, region.fields, region.block_tokens) == (1, 32, (), 32)
        assert torch.equal(view.pages(region), tensors[region.layer].view(torch.uint8))


@pytest.mark.parametrize("codec", [name for name in codecs.names() if name != "raw"])
def test_states_are_stored_raw_whatever_the_codec(codec, caplog):
    """Also of numbers that a codec would encode if they were K and V."""
    halves = view_of(spec(dtypes=(torch.bfloat16,) * 2), caches(3 * 8 * 2 + 2 * 4 * 4 * 2)).groups[0]
    for group in (view_of(spec(), caches()).groups[0], halves):
        for option in (codec, {"mamba": codec}):
            assert [each.name for each in choice.by_group(option, [[group]])] == ["raw"]
    assert "stored raw" in caplog.text


@pytest.mark.parametrize("other", [
    {"shapes": ((8, 3), (2, 4, 4))}, {"dtypes": (torch.float16, torch.float32)}, {"shapes": ((3, 8), (4, 2, 4))},
])  # fmt: skip
def test_state_layout_of_other_shapes_and_dtypes_mismatches(other):
    """Of as many bytes."""
    reason = geometry_mismatch(view_of(spec(), caches()).geometry(), view_of(spec(**other), caches()).geometry())
    assert reason is not None and "packed" in reason


def test_state_layout_of_a_convolution_stored_the_other_way_mismatches(monkeypatch):
    here = view_of(spec(), caches()).geometry()
    monkeypatch.setattr("vllm.model_executor.layers.mamba.mamba_utils.get_conv_state_layout", lambda: "DS")
    assert "packed" in geometry_mismatch(here, view_of(spec(), caches()).geometry())


def test_state_layout_of_unknown_shape_raises():
    for tensors in (caches(NBYTES - 4), {n: t[:3] for n, t in caches().items()}):
        with pytest.raises(UnsupportedLayout, match="does not hold 5 states of 176 bytes"):
            view_of(spec(), tensors)


def test_state_without_positions_to_continue_from_is_refused():
    """vLLM keeps one state a request, and no prefixes of it."""
    with pytest.raises(UnsupportedLayout, match="mamba_cache_mode none, and align is needed"):
        cache_kind(spec(mamba_cache_mode="none"))
    assert cache_kind(FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)).whole_prefix
