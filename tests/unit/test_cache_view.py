"""Views, geometries and mirrors of hand-made caches."""

import msgspec
import pytest
import torch

from vllm_kvtier.errors import KVTierError, UnsupportedLayout
from vllm_kvtier.store.memory.memory_limits import MemoryLimits
from vllm_kvtier.wire.geometry import CacheGeometry, Field, GroupView, Region, geometry_mismatch
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.nixl_pull import host_mirror
from vllm_kvtier.worker.nixl_pull.host_mirror import copy_blocks, mirror


def cache(groups=2, blocks=6, heads=2, tokens=4, inner=12, tokens_first=False, seed=0) -> CacheView:
    """``groups`` groups over the same memory, as vLLM lays hybrid groups."""
    torch.manual_seed(seed)
    memory = torch.randint(0, 256, (2, blocks, heads * tokens * inner), dtype=torch.uint8)
    outer, token = (inner, heads * inner) if tokens_first else (tokens * inner, inner)
    page = heads * tokens * inner
    made = []
    for g in range(groups):
        regions = tuple(
            Region(
                f"g{g}.l{layer}",
                memory.data_ptr() + layer * blocks * page,
                page,
                heads,
                outer,
                0,
                tokens,
                token,
                inner,
                dtype="bfloat16",
            )
            for layer in range(2)
        )
        made.append(GroupView(g, tokens, "sliding" if g else "full", 64 if g else None, regions))
    return CacheView(made, blocks, "cpu", [memory.untyped_storage()] * 3)


def test_cache_view_pages_alias_the_memory():
    view = cache()
    assert len(view.spans) == 1 and view.spans[0][1] == 2 * 6 * 96
    a, b = (view.pages(g.regions[1]) for g in view.groups)
    a[3, 1, 2, 5] = 77
    assert b[3, 1, 2, 5] == 77 and a.shape == (6, 2, 4, 12)
    assert view.groups[0].block_bytes == 2 * 96


@pytest.mark.parametrize("tokens_first", [False, True])
def test_cache_view_copies_blocks(tokens_first):
    view = cache(tokens_first=tokens_first)
    before = [view.pages(region).clone() for region in view.groups[1].regions]
    view.copy_blocks([(1, 1, 5), (0, 2, 4)])
    view.copy_blocks([(1, 3, 2)])
    for region, old in zip(view.groups[1].regions, before, strict=True):
        assert torch.equal(view.pages(region), old[[0, 1, 3, 3, 2, 1]])


def test_cache_view_pages_outside_memory_raise():
    view = cache()
    region = msgspec.structs.replace(view.groups[0].regions[1], block_stride=97)
    with pytest.raises(UnsupportedLayout, match="g0.l1"):
        CacheView([GroupView(0, 4, "full", None, (region,))], 6, "cpu", view._storages)


def test_cache_geometry_round_trips():
    geometry = cache().geometry()
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(geometry), type=CacheGeometry)
    assert sent == geometry and geometry_mismatch(geometry, sent) is None


FIELDS = (Field("k", 4), Field("v", 2))


def with_fields(cell_tokens: int, cpu_page_layouts: dict, fields=FIELDS) -> CacheView:
    """One group whose cells hold ``cell_tokens`` tokens of six numbers each."""
    view = cache(groups=1, tokens=4 // cell_tokens, inner=12 * cell_tokens)
    regions = tuple(
        msgspec.structs.replace(r, cell_tokens=cell_tokens, packing="p", fields=fields) for r in view.groups[0].regions
    )
    group = msgspec.structs.replace(view.groups[0], regions=regions)
    return CacheView([group], 6, "cpu", view._storages, cpu_page_layouts)


def test_cache_view_fields_of_multi_token_cells_need_page_layout():
    order = torch.arange(12, dtype=torch.int32)
    view = with_fields(2, {("p", 2, FIELDS): order})
    region = view.groups[0].regions[1]
    assert view.cpu_page_layout(region) is order and region.block_tokens == 4
    assert view.cpu_page_layout(msgspec.structs.replace(region, fields=())) is None
    one = with_fields(1, {})
    assert one.cpu_page_layout(one.groups[0].regions[0]) is None
    for cpu_page_layouts in ({}, {("p", 2, FIELDS): order[:6]}, {("q", 2, FIELDS): order}):
        with pytest.raises(ValueError, match="g0.l0: no layout of the 12 numbers"):
            with_fields(2, cpu_page_layouts)
    with pytest.raises(ValueError, match="do not fill cells of 12 bytes"):
        with_fields(1, {}, FIELDS[:1])


def test_cache_view_fields_round_trip_and_do_not_affect_geometry():
    """Pages that are copied as they lie mean the same whether or not an engine knows what their numbers are."""
    view = with_fields(1, {})
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(view.groups[0]), type=GroupView)
    assert sent == view.groups[0]
    bare = msgspec.structs.replace(
        sent, regions=tuple(msgspec.structs.replace(r, fields=()) for r in sent.regions)
    )
    other = CacheView([bare], 6, "cpu", view._storages)
    assert geometry_mismatch(view.geometry(), other.geometry()) is None


def changed(geometry: CacheGeometry, group: dict | None = None, region: dict | None = None) -> CacheGeometry:
    first, *rest = geometry.groups
    if region:
        regions = (msgspec.structs.replace(first.regions[0], **region), *first.regions[1:])
        first = msgspec.structs.replace(first, regions=regions)
    first = msgspec.structs.replace(first, **(group or {}))
    return msgspec.structs.replace(geometry, groups=(first, *rest))


@pytest.mark.parametrize(
    "group, region, words",
    [
        ({"block_tokens": 32}, None, "block size 4 here, 32 there in KV cache group 0"),
        ({"kind": "mla"}, None, "full attention here, mla attention there"),
        ({"kind": "sliding", "window": 9}, None, "full attention here, sliding attention over 9 there"),
        (None, {"layer": "x"}, "layer g0.l0 here, x in its place there"),
        (None, {"dtype": "float16"}, "layer g0.l0: KV cache dtype bfloat16 here, float16 there"),
        (None, {"outer": 1}, "2 KV heads (or parts of a page) here, 1 there"),
        (None, {"inner": 24}, "12 bytes a token and head here, 24 there"),
        (None, {"packing": "cpu-amx-0.32.0"}, "packed as tokens here, as cpu-amx-0.32.0 there"),
        (None, {"tokens": 2}, "tokens 0..3 of a block in one part here, 0..1 there"),
        (None, {"order": "token"}, "heads before tokens within a page here, tokens before heads there"),
    ],
)
def test_geometry_mismatch_names_the_difference(group, region, words):
    here = cache().geometry()
    assert words in geometry_mismatch(here, changed(here, group, region))


def test_geometry_mismatch_names_different_counts():
    here = cache().geometry()
    assert geometry_mismatch(here, cache(groups=1).geometry()) == "2 KV cache groups here, 1 there"
    short = changed(here, {"regions": here.groups[0].regions[:1]})
    assert geometry_mismatch(here, short) == "2 layers here, 1 there in KV cache group 0"
    split = changed(here, {"regions": (here.groups[0].regions[0], *here.groups[0].regions)})
    assert "split into 2 parts over all layers here, 3 there" in geometry_mismatch(here, split)
    assert "byte order" in geometry_mismatch(here, msgspec.structs.replace(here, byte_order="big"))


def test_geometry_mismatch_ignores_gaps_and_addresses():
    assert geometry_mismatch(cache(blocks=6).geometry(), cache(blocks=9).geometry()) is None
    assert geometry_mismatch(cache().geometry(), mirror(cache()).geometry()) is None


@pytest.mark.parametrize("tokens_first", [False, True])
def test_host_mirror_copies_blocks_both_ways(tokens_first):
    view = cache(tokens_first=tokens_first)
    host = mirror(view)
    assert host.num_blocks == view.num_blocks
    assert geometry_mismatch(view.geometry(), host.geometry()) is None
    before = [view.pages(r).clone() for r in view.groups[1].regions]
    copy_blocks(view, host, 1, [4, 1])
    for region in view.groups[1].regions:
        view.pages(region).zero_()
    copy_blocks(host, view, 1, [1, 4])
    for region, old in zip(view.groups[1].regions, before, strict=True):
        new = view.pages(region)
        assert torch.equal(new[1], old[1]) and torch.equal(new[4], old[4])
        assert not new[[0, 2, 3, 5]].any()


def test_host_mirror_without_free_memory_is_refused(monkeypatch):
    """The kernel would kill the engine."""
    monkeypatch.setattr(host_mirror, "memory_limits", lambda: MemoryLimits(1 << 20, 4 << 10, "a test"))
    with pytest.raises(KVTierError, match=r"host buffer .* of host memory, and .* are free \(a test\)"):
        mirror(cache())


def test_mirror_takes_no_more_memory_than_was_checked(monkeypatch):
    """torch rounds pinned memory up to a power of two: 65 GiB become 128."""
    taken, empty = [], torch.empty
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *size, **how: taken.append(how) or empty(*size, dtype=how["dtype"]))
    mirror(cache())
    assert taken and not any(how.get("pin_memory") for how in taken)


def test_host_mirror_copy_of_invalid_ids_raises():
    view = cache()
    host = mirror(view)
    with pytest.raises(ValueError, match="outside 0..5"):
        copy_blocks(view, host, 0, [6])
    copy_blocks(view, host, 0, [])


@pytest.mark.gpu
def test_host_mirror_of_cuda_cache_copies_blocks():
    host = mirror(cache())
    memory = torch.zeros(2 * 6 * 96, dtype=torch.uint8, device="cuda")
    shift = memory.data_ptr() - cache().groups[0].regions[0].base
    source = cache()
    shift = memory.data_ptr() - source.groups[0].regions[0].base
    groups = [
        msgspec.structs.replace(
            g, regions=tuple(msgspec.structs.replace(r, base=r.base + shift) for r in g.regions)
        )
        for g in source.groups
    ]
    device = CacheView(groups, 6, memory.device, [memory.untyped_storage()])
    copy_blocks(source, device, 0, [1, 2])
    copy_blocks(device, host, 0, [2, 1])
    for a, b in zip(source.groups[0].regions, host.groups[0].regions, strict=True):
        assert torch.equal(host.pages(b)[1], source.pages(a)[1])
        assert torch.equal(host.pages(b)[2], source.pages(a)[2])
