"""What the numbers of a cache mean, by backend and version, and where the CPU kernels put them."""

import pytest
import torch
from cache_shapes import (
    ORDERS,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    allocate,
    config_of,
    full,
    group,
    new_config,
    new_layouts,
    old_config,
    spec_module,
)

from vllm_kvtier import codecs
from vllm_kvtier.vllm_compat.layout import cpu_page_layout, kv_fields
from vllm_kvtier.vllm_compat.layout.kv_layout import cache_view
from vllm_kvtier.wire.geometry import Field
from vllm_kvtier.worker.nixl_pull.host_mirror import mirror

KV = (Field("k", 8), Field("v", 8))
MLA = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
RANKS = {"kv_lora_rank": 16, "qk_rope_head_dim": 8}


def fields_of(caches, config, vllm_config) -> list[tuple[Field, ...]]:
    view = cache_view(caches, config, vllm_config, "cpu")
    return [r.fields for g in view.groups for r in g.regions]


def of_new(spec, backend="FLASH_ATTN", order="LBHNC", **more):
    config = new_config(3, order, group("a", spec))
    return fields_of(allocate(config, order), config, config_of(backend, "a", **more))


def of_old(cache, spec, backend="FLASH_ATTN", **more):
    return fields_of({"a": cache}, old_config(3, group("a", spec)), config_of(backend, "a", **more))


@new_layouts
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "backend", ["FLASH_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TRITON_ATTN", "TRITON_FLASH_ATTN", "TRITON_FLASHINFER"]
)
def test_kv_fields_of_new_layouts_are_k_then_v(backend, order):
    config = new_config(3, order, group("ab", full()))
    assert fields_of(allocate(config, order), config, config_of(backend, "ab")) == [KV, KV]


@new_layouts
def test_kv_fields_of_new_layouts_with_other_shapes():
    assert of_new(full(size=24, head_size_v=8), "TRITON_ATTN_DIFFKV") == [(Field("k", 24), Field("v", 8))]
    assert of_new(MLA, "FLASHMLA", **RANKS) == [(Field("latent", 16), Field("rope", 8))]
    assert of_new(full(dtype=torch.float16)) == [KV]
    sliding = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=128
    )
    assert of_new(sliding) == [KV]


@new_layouts
@pytest.mark.parametrize(
    "spec, backend",
    [
        (full(dtype=torch.float32), "FLASH_ATTN"),
        (full(dtype=torch.uint8, kv_quant_mode=spec_module.KVQuantMode.FP8_PER_TENSOR), "FLASH_ATTN"),
        (full(), "SOMETHING_NEW"),
        (MLA, "FLASHMLA"),  # the layer does not say what is latent and what rotary
    ],
    ids=["float32", "quantized", "unknown backend", "unknown ranks"],
)
def test_kv_fields_of_unknown_backend_are_none(spec, backend):
    assert of_new(spec, backend) == [()]


@new_layouts
def test_kv_fields_of_packed_cells_are_empty():
    assert of_new(full(state_content_bytes=40)) == [()]
    assert of_new(full(num_head_slots=4)) == [()]
    states = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=24, dtype=torch.bfloat16, tokens_per_state=4
    )
    assert of_new(states, "TRITON_MLA", **RANKS) == [()]
    assert of_new(MLA, "TRITON_MLA", kv_lora_rank=16, qk_rope_head_dim=4) == [()]  # does not fill the cell


@pytest.mark.parametrize("shape", [(3, 2, 16, 2, 8), (2, 3, 16, 2, 8)])
@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"])
def test_kv_fields_of_old_separate_layouts(shape, backend):
    cache = torch.zeros(shape, dtype=torch.bfloat16)
    assert of_old(cache, full(), backend) == [KV[:1], KV[1:]]
    assert of_old(cache.transpose(2, 3).contiguous().transpose(2, 3), full(), backend) == [KV[:1], KV[1:]]
    assert of_old(cache.float(), full(), backend) == [(), ()]


def test_kv_fields_of_old_joint_layouts():
    joint = torch.zeros(3, 16, 2, 12, dtype=torch.bfloat16)
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, head_size_v=4, dtype=torch.bfloat16)
    assert of_old(joint, spec, "FLASH_ATTN_DIFFKV") == [(Field("k", 8), Field("v", 4))]
    assert of_old(joint, full(), "FLASH_ATTN_DIFFKV") == [()]  # 8 + 8 do not fill the cell
    mla = torch.zeros(3, 16, 24, dtype=torch.bfloat16)
    assert of_old(mla, MLA, "TRITON_MLA", **RANKS) == [(Field("latent", 16), Field("rope", 8))]
    assert of_old(mla, MLA, "TRITON_MLA", kv_lora_rank=24, qk_rope_head_dim=0) == [(Field("latent", 24),)]


def cpu_cache(dtype, tokens, size, heads=2, blocks=3):
    """A cache that vLLM's own operator wrote random K and V into: (cache, K, V [blocks, heads, tokens, size], isa)."""
    cpu = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    ops = pytest.importorskip("vllm._custom_ops")
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("a vLLM without CPU kernels")
    isa = cpu._get_attn_isa(dtype, tokens, size, "auto")
    cache = torch.zeros(blocks, heads, tokens, 2 * size, dtype=dtype)
    k, v = (torch.randn(blocks, heads, tokens, size).to(dtype) for _ in range(2))
    sides = cache.view(blocks, heads, 2 * tokens, size).chunk(2, dim=2)
    rows = [x.transpose(1, 2).reshape(-1, heads, size).contiguous() for x in (k, v)]
    ops.cpu_attn_reshape_and_cache(*rows, *sides, torch.arange(blocks * tokens), isa)
    return cache, k, v, isa


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tokens, size", [(16, 64), (32, 128), (32, 80), (128, 64)])
def test_kv_fields_of_cpu_kernel_pages_are_decoded(dtype, tokens, size):
    cache, k, v, isa = cpu_cache(dtype, tokens, size)
    config = config_of("CPU_ATTN", "a", isa=isa)
    view = cache_view({"a": cache}, old_or_new(full(tokens, 2, size, dtype)), config, "cpu")
    (region,) = view.groups[0].regions
    assert region.fields == (Field("k", size), Field("v", size)) and region.cell_tokens == tokens
    page = view.pages(region).view(dtype)[:, :, 0]  # [blocks, heads, numbers]
    found = page[..., view.cpu_page_layout(region).long()].view(3, 2, 2, tokens, size)
    assert torch.equal(found[:, :, 0], k) and torch.equal(found[:, :, 1], v)
    assert codecs.choose("int8", view.groups[0]).name == "int8"
    host = mirror(view)
    assert torch.equal(host.cpu_page_layout(host.groups[0].regions[0]), view.cpu_page_layout(region))


def old_or_new(spec):
    return old_config(3, group("a", spec)) if new_layouts.args[0] else new_config(3, "LBHNC", group("a", spec))


def test_kv_fields_of_mixed_shapes_have_one_page_layout_each():
    small, *_, isa = cpu_cache(torch.bfloat16, 32, 64)
    large, *_ = cpu_cache(torch.bfloat16, 32, 128)
    specs = {"a": full(32, 2, 64), "b": full(32, 2, 128)}
    uniform = spec_module.UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs=specs)
    view = cache_view(
        {"a": small, "b": large}, old_config(3, group("ab", uniform)), config_of("CPU_ATTN", "ab", isa=isa), "cpu"
    )
    assert [r.fields[0].count for r in view.groups[0].regions] == [64, 128] and len(view.cpu_page_layouts) == 2


def test_cpu_page_layout_of_unknown_kernel_is_none(monkeypatch):
    """Kernels that change numbers, that write outside a head's page, or that are called in another way."""
    ops = pytest.importorskip("vllm._custom_ops")
    ask = cpu_page_layout.cpu_page_layout.__wrapped__

    def lossy(k, v, keys, values, slots, isa, **more):
        keys[1] = k.transpose(0, 1).half().clamp(max=7)
        values[1] = v.transpose(0, 1)

    def elsewhere(k, v, keys, values, slots, isa, **more):
        keys[0], values[1] = k.transpose(0, 1), v.transpose(0, 1)

    def plain(k, v, keys, values, slots, isa, **more):
        keys[1], values[1] = k.transpose(0, 1), v.transpose(0, 1)

    def refused(*arguments, **more):
        raise AssertionError("not so")

    for kernel in (lossy, elsewhere, refused, None):
        monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", kernel)
        assert ask("vec", torch.float16, 8, 16) is None
    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", plain)
    assert ask("vec", torch.float16, 8, 16).tolist() == list(range(256))


def test_kv_fields_of_unknown_cpu_page_layout_are_empty_and_kept_raw(monkeypatch):
    monkeypatch.setattr("vllm_kvtier.vllm_compat.layout.kv_layout.cpu_page_layout", lambda *a: None)
    cache = torch.zeros(3, 2, 16, 16, dtype=torch.bfloat16)
    view = cache_view({"a": cache}, old_or_new(full()), config_of("CPU_ATTN", "a", isa="vec16"), "cpu")
    assert view.groups[0].regions[0].fields == () and not view.cpu_page_layouts
    assert codecs.choose("int8", view.groups[0]).name == "raw"


# Backends whose caches are copied byte for byte: sparse, quantized, compressed, of ROCm and XPU, or not looked at yet.
OPAQUE = set("""
    AMX_MLA B12X CUSTOM CUTLASS_MSA FLASHINFER_MLA_SPARSE FLASHINFER_MLA_SPARSE_DSV4 FLASHINFER_MLA_SPARSE_DSV41
    FLASHINFER_MLA_SPARSE_SM120 FLASHINFER_MLA_SPARSE_SM90 FLASHMLA_MEGA_ATTN_DSV41 FLASHMLA_SPARSE FLASHMLA_SPARSE_DSV4
    FLASHMLA_SPARSE_DSV41 FLASH_ATTN_MLA_SPARSE HPC_ATTN MINIMAX_M3_SPARSE NO_ATTENTION ROCM_AITER_FA ROCM_AITER_MLA
    ROCM_AITER_MLA_SPARSE ROCM_AITER_TRITON_MLA ROCM_AITER_UNIFIED_ATTN ROCM_ATTN ROCM_FLASHMLA_SPARSE_DSV4
    ROCM_OCTAVE ROCM_SEGMENTED_ATTN TORCH_SDPA TRITON_MSA TURBOQUANT ULTRAQUANT XPU_MLA_SPARSE
""".split())


@new_layouts
def test_every_backend_of_vllm_is_listed():
    """With a new one, engines of unequal shape are refused until it is: the pairs of 0.30 went unnoticed."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    known = kv_fields.ATTENTION | kv_fields.MLA
    assert set(AttentionBackendEnum.__members__) - known <= OPAQUE and not OPAQUE & known
