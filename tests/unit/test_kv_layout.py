"""vLLM's cache tensors as pages: real spec classes and, for new layouts, vLLM's own allocation."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from cache_shapes import (
    ORDERS,
    MLAAttentionSpec,
    SlidingWindowSpec,
    allocate,
    bytes_of,
    config_of,
    full,
    group,
    new_config,
    new_layouts,
    old_config,
    spec_module,
)

from vllm_kvtier.errors import UnsupportedLayout
from vllm_kvtier.vllm_compat.layout.context_parallel import ContextShard
from vllm_kvtier.vllm_compat.layout.kv_layout import cache_view
from vllm_kvtier.wire.geometry import geometry_mismatch
from vllm_kvtier.worker.cache_view import CacheView


def assert_bhnc(view: CacheView, caches) -> None:
    """Every page is the [B, H, N, C] tensor vLLM handed over."""
    for g in view.groups:
        for r in g.regions:
            assert torch.equal(view.pages(r), bytes_of(caches[r.layer])), r.layer


@new_layouts
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("heads", [1, 2])
def test_kv_layout_of_new_layouts(order, heads):
    layers = ["a", "b", "c"]
    config = new_config(5, order, group(layers, full(heads=heads)))
    caches = allocate(config, order)
    view = cache_view(caches, config, config_of("FLASH_ATTN", layers), "cpu")
    (g,) = view.groups
    assert (g.kind, g.window, g.block_tokens, len(g.regions)) == ("full", None, 16, 3)
    assert g.block_bytes == 3 * 16 * heads * 2 * 8 * 2
    assert view.num_blocks == 5 and len(view.spans) == 1
    assert_bhnc(view, caches)
    if heads > 1:
        heads_first = order.index("H") < order.index("N")
        assert {r.order for r in g.regions} == {"outer" if heads_first else "token"}


@new_layouts
def test_kv_layout_head_and_token_first_orders_mismatch():
    views = {}
    for order in ORDERS:
        config = new_config(3, order, group("ab", full()))
        views[order] = cache_view(allocate(config, order), config, config_of("FLASH_ATTN", "ab"), "cpu")
    here = views["LBHNC"].geometry()
    assert geometry_mismatch(here, views["LHBNC"].geometry()) is None
    assert geometry_mismatch(here, views["BHLNC"].geometry()) is None
    assert "heads before tokens" in geometry_mismatch(here, views["LBNHC"].geometry())


@new_layouts
def test_kv_layout_hybrid_groups_may_share_bytes():
    sliding = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=128
    )
    config = new_config(4, "LBHNC", group("ab", full()), group("cd", sliding), aliased=True)
    caches = allocate(config, "LBHNC")
    view = cache_view(caches, config, config_of("FLASH_ATTN", "abcd"), "cpu")
    assert [(g.kind, g.window) for g in view.groups] == [("full", None), ("sliding", 128)]
    assert view.groups[0].regions[1].base == view.groups[1].regions[1].base
    assert_bhnc(view, caches)


@new_layouts
def test_kv_layout_with_kernel_blocks_smaller_than_blocks():
    config = new_config(4, "LBHNC", group("a", full(block_size=64)))
    caches = allocate(config, "LBHNC", [16])
    view = cache_view(caches, config, config_of("FLASH_ATTN", "a"), "cpu")
    regions = view.groups[0].regions
    assert [r.first_token for r in regions] == [0, 16, 32, 48]
    kernel_blocks = bytes_of(caches["a"]).unflatten(0, (4, 4))
    for part, r in enumerate(regions):
        assert (r.tokens, r.cell_tokens) == (16, 1)
        assert torch.equal(view.pages(r), kernel_blocks[:, part])


@new_layouts
def test_kv_layout_skips_padding_between_pages():
    config = new_config(4, "LBHNC", group("a", full(page_size_padded=2048)))
    caches = allocate(config, "LBHNC")
    view = cache_view(caches, config, config_of("FLASH_ATTN", "a"), "cpu")
    (r,) = view.groups[0].regions
    assert (r.block_stride, r.block_bytes) == (2048, 1024)
    assert_bhnc(view, caches)


@new_layouts
@pytest.mark.parametrize(
    "backend, content, inner", [("FLASHMLA", None, 576 * 2), ("FLASHMLA_SPARSE", 656, 16 * 656)]
)
def test_kv_layout_of_mla(backend, content, inner):
    spec = MLAAttentionSpec(
        block_size=16,
        num_kv_heads=1,
        head_size=576,
        dtype=torch.uint8 if content else torch.bfloat16,
        state_content_bytes=content,
        cache_dtype_str="fp8_ds_mla" if content else "auto",
        kv_quant_mode=spec_module.KVQuantMode.FP8_PER_TENSOR if content else spec_module.KVQuantMode.NONE,
    )
    config = new_config(3, "LBHNC", group("ab", spec))
    view = cache_view(allocate(config, "LBHNC"), config, config_of(backend, "ab"), "cpu")
    (g,) = view.groups
    assert g.kind == "mla" and g.block_bytes == 2 * 16 * (content or 1152)
    assert {r.inner for r in g.regions} == {inner}  # sparse kernels' pages are opaque
    assert {r.dtype for r in g.regions} == {"fp8_per_tensor:fp8_ds_mla" if content else "bfloat16"}


@new_layouts
def test_kv_layout_with_several_tokens_per_state():
    spec = MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=32, dtype=torch.bfloat16, tokens_per_state=4
    )
    config = new_config(3, "LBHNC", group("a", spec))
    view = cache_view(allocate(config, "LBHNC"), config, config_of("TRITON_MLA", "a"), "cpu")
    (r,) = view.groups[0].regions
    assert (r.tokens, r.cell_tokens, r.inner) == (16, 4, 64)


@new_layouts
@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_kv_layout_cpu_pages_are_opaque_with_packing(isa):
    config = new_config(3, "LBHNC", group("a", full(block_size=32, heads=2, size=32)))
    caches = allocate(config, "LBHNC")
    view = cache_view(caches, config, config_of("CPU_ATTN", "a", isa=isa), "cpu")
    (r,) = view.groups[0].regions
    assert (r.outer, r.tokens, r.cell_tokens, r.inner) == (2, 1, 32, 32 * 2 * 32 * 2)
    assert r.packing.startswith(f"cpu-{isa}-")
    assert torch.equal(view.pages(r).flatten(2), bytes_of(caches["a"]).flatten(2))


def test_kv_layout_cpu_packing_defaults_to_vllm_isa(monkeypatch):
    cpu = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    monkeypatch.setattr(cpu, "_get_attn_isa", lambda *a: "vec16")
    config = old_config(3, group("a", full()))
    view = cache_view({"a": torch.zeros(3, 2, 16, 16)}, config, config_of("CPU_ATTN", "a"), "cpu")
    assert view.groups[0].regions[0].packing.startswith("cpu-vec16-")


@new_layouts
@pytest.mark.parametrize("order, cells", [("LBHNC", (1, 512)), ("LBNHC", (1, 512)), ("BHLNC", (2, 256))])
def test_kv_layout_of_unknown_backend_is_opaque(order, cells):
    config = new_config(3, order, group("ab", full(block_size=8)))
    caches = allocate(config, order)
    view = cache_view(caches, config, config_of("SOMETHING_NEW", "ab"), "cpu")
    r = view.groups[0].regions[1]
    assert (r.outer, r.inner, r.tokens, r.cell_tokens) == (*cells, 1, 8)
    assert r.packing.startswith("opaque-SOMETHING_NEW-")
    page = caches["b"] if order != "LBNHC" else caches["b"].transpose(1, 2)
    assert torch.equal(view.pages(r).flatten(1), bytes_of(page).flatten(1))


@new_layouts
def test_kv_layout_of_unknown_scattered_pages_raises():
    config = new_config(3, "LBNHC", group("a", full()))
    caches = {"a": torch.zeros(3, 16, 2, 20, dtype=torch.bfloat16).transpose(1, 2)[..., :16]}
    with pytest.raises(UnsupportedLayout, match="SOMETHING_NEW.*scattered"):
        cache_view(caches, config, config_of("SOMETHING_NEW", "a"), "cpu")


# -- layouts to 0.28 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("kv_first", [False, True])
@pytest.mark.parametrize("blocks", [3, 5])
def test_kv_layout_of_old_separate_k_and_v(order, kv_first, blocks):
    spec = full()
    inner = (16, 2, 8) if order == "NHD" else (2, 16, 8)
    raw = torch.randn((2, blocks, *inner) if kv_first else (blocks, 2, *inner)).to(torch.bfloat16)
    cache = raw if order == "NHD" else raw.transpose(2, 3)
    config = old_config(blocks, group("a", spec))
    view = cache_view({"a": cache}, config, config_of("FLASH_ATTN", "a"), "cpu")
    (g,) = view.groups
    assert [r.layer for r in g.regions] == ["a.k", "a.v"] and g.block_bytes == spec.page_size_bytes
    for side, r in enumerate(g.regions):
        kv = cache[side] if kv_first else cache[:, side]  # [B, N, H, D]
        assert torch.equal(view.pages(r), bytes_of(kv.transpose(1, 2)))
        assert r.order == ("token" if order == "NHD" else "outer")


def test_kv_layout_of_old_kernel_blocks():
    cache = torch.randn(12, 2, 16, 2, 8).to(torch.bfloat16)
    config = old_config(3, group("a", full(block_size=64)))
    view = cache_view({"a": cache}, config, config_of("FLASH_ATTN", "a"), "cpu")
    regions = view.groups[0].regions
    assert [(r.layer, r.first_token) for r in regions[:3]] == [("a.k", 0), ("a.v", 0), ("a.k", 16)]
    for n, r in enumerate(regions):
        expect = cache.unflatten(0, (3, 4))[:, n // 2, n % 2].transpose(1, 2)
        assert torch.equal(view.pages(r), bytes_of(expect))


def test_kv_layout_of_old_cpu_mla_and_joint_caches():
    cpu = torch.randn(3, 2, 16, 16).to(torch.bfloat16)
    view = cache_view(
        {"a": cpu}, old_config(3, group("a", full())), config_of("CPU_ATTN", "a", isa="vec"), "cpu"
    )
    assert (view.groups[0].regions[0].outer, view.groups[0].regions[0].inner) == (2, 16 * 16 * 2)

    mla = torch.randn(3, 16, 24).to(torch.bfloat16)
    spec = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
    view = cache_view({"a": mla}, old_config(3, group("a", spec)), config_of("TRITON_MLA", "a"), "cpu")
    (r,) = view.groups[0].regions
    assert (r.outer, r.tokens, r.inner) == (1, 16, 48)
    assert torch.equal(view.pages(r)[:, 0], bytes_of(mla))

    joint = torch.randn(3, 16, 2, 12).to(torch.bfloat16)
    config = old_config(3, group("a", full()))
    view = cache_view({"a": joint}, config, config_of("FLASH_ATTN_DIFFKV", "a"), "cpu")
    (r,) = view.groups[0].regions
    assert (r.outer, r.tokens, r.inner, r.order) == (2, 16, 24, "token")
    assert torch.equal(view.pages(r), bytes_of(joint.transpose(1, 2)))


# -- layers and groups -------------------------------------------------------------------------------------


def test_kv_layout_shared_cache_of_layers_is_one_region():
    cache = torch.zeros(3, 2, 16, 2, 8, dtype=torch.bfloat16)
    config = old_config(3, group("ab", full()))
    view = cache_view({"a": cache, "b": cache}, config, config_of("FLASH_ATTN", "ab"), "cpu")
    assert [r.layer for r in view.groups[0].regions] == ["a.k", "a.v"]
    alone = old_config(3, group("a", full()))
    view = cache_view({"a": cache, "b": cache}, alone, config_of("FLASH_ATTN", "ab"), "cpu")
    assert len(view.groups[0].regions) == 2


def test_kv_layout_uniform_type_group_uses_each_layer_spec():
    specs = {"a": full(), "b": full(size=16)}
    uniform = spec_module.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    caches = {n: torch.zeros(3, 2, 16, 2, s.head_size, dtype=torch.bfloat16) for n, s in specs.items()}
    view = cache_view(
        caches, old_config(3, group("ab", uniform)), config_of("FLASH_ATTN", "ab"), "cpu"
    )
    assert [r.inner for r in view.groups[0].regions] == [16, 16, 32, 32]


def test_kv_layout_unknown_spec_field_raises_unless_default():
    """As a vLLM of next week may have."""
    newer = dataclasses.make_dataclass(
        "FullAttentionSpec", [("pages_per_token", int, 1)], bases=(type(full()),), frozen=True, kw_only=True
    )
    cache = torch.zeros(3, 2, 16, 2, 8, dtype=torch.bfloat16)
    fields = dict(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    flash = config_of("FLASH_ATTN", "a")
    cache_view({"a": cache}, old_config(3, group("a", newer(**fields))), flash, "cpu")
    with pytest.raises(UnsupportedLayout, match="pages_per_token of its FullAttentionSpec is 2"):
        cache_view({"a": cache}, old_config(3, group("a", newer(**fields, pages_per_token=2))), flash, "cpu")


def test_kv_layout_group_with_different_windows_raises():
    sliding = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=128
    )
    mixed = SimpleNamespace(block_size=16, kv_cache_specs={"a": full(), "b": sliding})
    caches = {n: torch.zeros(3, 2, 16, 2, 8, dtype=torch.bfloat16) for n in "ab"}
    with pytest.raises(UnsupportedLayout, match="full attention and sliding attention over 128"):
        cache_view(caches, old_config(3, group("ab", mixed)), config_of("FLASH_ATTN", "ab"), "cpu")


def test_kv_layout_leaves_groups_without_prefixes_out():
    """Our groups are numbered without them, and their memory is not described."""

    class RingSpec(spec_module.FullAttentionSpec):
        prefix_cacheable = False

    ring = RingSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    caches = {n: torch.zeros(3, 2, 16, 2, 8, dtype=torch.bfloat16) for n in "abc"}
    copies = group("b", full(), enable_kv_transfer=False)
    config = old_config(3, group("a", ring), copies, group("c", full()))
    (g,) = cache_view(caches, config, config_of("FLASH_ATTN", "abc"), "cpu").groups
    assert g.group == 0 and {region.layer[0] for region in g.regions} == {"c"}


def test_kv_layout_unsupported_raises_with_cause():
    cache = torch.zeros(3, 2, 16, 2, 8, dtype=torch.bfloat16)
    config = old_config(3, group("a", full()))
    flash = config_of("FLASH_ATTN", "a")
    mamba = spec_module.MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    cases = [
        ({"a": [cache]}, old_config(3, group("a", mamba)), flash, "mamba_cache_mode none"),
        ({"a": [cache, cache]}, config, flash, "several cache tensors"),
        ({}, config, flash, "registered no KV cache for layer a"),
        ({"a": cache, "x": cache.clone()}, config, flash, "layer x has a KV cache that belongs to no"),
        ({"a": cache}, old_config(4, group("a", full())), flash, "does not hold 4 blocks"),
        ({"a": cache[..., 0]}, config, flash, "last dimension"),
        ({"a": cache.flatten()}, config, flash, "1 dimensions"),
        ({"a": cache.flatten(2)}, config, flash, "names no KV heads"),
        ({"a": cache[:, :1]}, config, flash, "no K/V dimension"),
        ({"a": cache[..., :7]}, config, flash, "not a multiple of 4"),
        ({"a": cache}, old_config(3, group("a", full(), host_resident=True)), flash, "host_resident"),
        ({"a": cache}, old_config(3, group("", full())), flash, "no layer on this worker|no KV cache group"),
    ]
    for caches, kv_config, vllm_config, words in cases:
        with pytest.raises(UnsupportedLayout, match=words):
            cache_view(caches, kv_config, vllm_config, "cpu")


def test_kv_layout_fp8_formats_have_canonical_names():
    spec = full(dtype=torch.uint8, kv_quant_mode=spec_module.KVQuantMode.FP8_PER_TENSOR)
    cache = torch.zeros(3, 2, 16, 2, 8, dtype=torch.uint8)
    config = old_config(3, group("a", spec))
    names = []
    for label in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        vllm_config = config_of("FLASH_ATTN", "a", cache_dtype=label)
        names.append(cache_view({"a": cache}, config, vllm_config, "cpu").groups[0].regions[0].dtype)
    assert names == ["fp8_per_tensor:fp8_e4m3"] * 2 + ["fp8_per_tensor:fp8_e5m2"]


def test_kv_layout_of_rocm_names_what_else_orders_a_page(monkeypatch):
    """Else an engine that was restarted with the other setting read its disk's blocks as they are not."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    config = old_config(3, group("a", full()))
    found = set()
    for shuffled, interleaved in (("0", False), ("1", False), ("0", True)):
        monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", shuffled)
        vllm_config = config_of("ROCM_ATTN", "a", impl=SimpleNamespace(_use_interleaved_v_cache=interleaved))
        caches = {"a": torch.zeros(3, 2, 16, 2, 8, dtype=torch.bfloat16)}
        found.add(cache_view(caches, config, vllm_config, "cpu").groups[0].regions[0].packing)
    assert len(found) == 3


@pytest.mark.parametrize("quantized, differs", [(True, True), (False, False)])
def test_kv_layout_tells_fp8_of_mi300_from_others(monkeypatch, quantized, differs):
    mode = spec_module.KVQuantMode.FP8_PER_TENSOR if quantized else spec_module.KVQuantMode.NONE
    dtype = torch.uint8 if quantized else torch.bfloat16
    config = old_config(3, group("a", full(dtype=dtype, kv_quant_mode=mode)))
    vllm_config = config_of("TRITON_ATTN", "a", cache_dtype="fp8" if quantized else "auto")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    found = set()
    for arch in ("gfx942:sramecc+:xnack-", "gfx950:sramecc+:xnack-"):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, arch=arch: SimpleNamespace(gcnArchName=arch))
        caches = {"a": torch.zeros(3, 2, 16, 2, 8, dtype=dtype)}
        found.add(cache_view(caches, config, vllm_config, "cpu").groups[0].regions[0].dtype)
    assert (len(found) == 2) == differs


@pytest.mark.parametrize("shape, run, words", [
    ((3, 2, 16, 2, 8), 12, "runs of 12 tokens do not divide"),  # nor do tokens of two heads follow one another
    ((3, 2, 16, 2, 8), 4, "the tokens of a run of 4 are not contiguous"),
])  # fmt: skip
def test_kv_layout_of_runs_that_cannot_be_described_raises(shape, run, words):
    config, shard = old_config(3, group("a", full())), ContextShard(2, 1, run)
    with pytest.raises(UnsupportedLayout, match=words):
        cache_view(
            {"a": torch.zeros(shape, dtype=torch.bfloat16)}, config, config_of("FLASH_ATTN", "a"), "cpu", shard
        )


def test_kv_layout_of_a_shard_of_opaque_pages():
    """Of a page that is one cell: the tokens that it has are known, their order in it is not."""
    cache = torch.zeros(3, 16, 8, dtype=torch.bfloat16)
    config = old_config(3, group("a", MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=cache.dtype)))
    for run, begins, tokens, packing in ((16, 16, 16, ""), (2, 2, 32, ", runs of 2 over 2 ranks")):
        view = cache_view({"a": cache}, config, config_of("OTHER", "a"), "cpu", ContextShard(2, 1, run))
        [region] = view.groups[0].regions
        assert (view.groups[0].block_tokens, region.first_token, region.cell_tokens) == (32, begins, tokens)
        assert region.packing.startswith("opaque-OTHER") and region.packing.endswith(packing)
