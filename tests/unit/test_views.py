"""Views, geometries and mirrors of hand-made caches."""

import msgspec
import pytest
import torch

from vllm_kvtier.errors import UnsupportedLayout
from vllm_kvtier.wire.geometry import CacheGeometry, Field, GroupView, Region, geometry_mismatch
from vllm_kvtier.worker.mirror import copy_blocks, mirror
from vllm_kvtier.worker.views import CacheView


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


def test_pages_are_the_memory_itself():
    view = cache()
    assert len(view.spans) == 1 and view.spans[0][1] == 2 * 6 * 96
    a, b = (view.pages(g.regions[1]) for g in view.groups)
    a[3, 1, 2, 5] = 77
    assert b[3, 1, 2, 5] == 77 and a.shape == (6, 2, 4, 12)
    assert view.groups[0].block_bytes == 2 * 96


def test_pages_outside_the_memory_are_refused():
    view = cache()
    region = msgspec.structs.replace(view.groups[0].regions[1], block_stride=97)
    with pytest.raises(UnsupportedLayout, match="g0.l1"):
        CacheView([GroupView(0, 4, "full", None, (region,))], 6, "cpu", view._storages)


def test_geometry_crosses_the_wire():
    geometry = cache().geometry()
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(geometry), type=CacheGeometry)
    assert sent == geometry and geometry_mismatch(geometry, sent) is None


FIELDS = (Field("k", 4), Field("v", 2))


def with_fields(cell_tokens: int, arrangements: dict, fields=FIELDS) -> CacheView:
    """One group whose cells hold ``cell_tokens`` tokens of six numbers each."""
    view = cache(groups=1, tokens=4 // cell_tokens, inner=12 * cell_tokens)
    regions = tuple(
        msgspec.structs.replace(r, cell_tokens=cell_tokens, packing="p", fields=fields) for r in view.groups[0].regions
    )
    group = msgspec.structs.replace(view.groups[0], regions=regions)
    return CacheView([group], 6, "cpu", view._storages, arrangements)


def test_fields_need_an_arrangement_of_cells_of_several_tokens():
    order = torch.arange(12, dtype=torch.int32)
    view = with_fields(2, {("p", 2, FIELDS): order})
    region = view.groups[0].regions[1]
    assert view.arrangement(region) is order and region.block_tokens == 4
    assert view.arrangement(msgspec.structs.replace(region, fields=())) is None
    one = with_fields(1, {})
    assert one.arrangement(one.groups[0].regions[0]) is None
    for arrangements in ({}, {("p", 2, FIELDS): order[:6]}, {("q", 2, FIELDS): order}):
        with pytest.raises(ValueError, match="g0.l0: no arrangement of the 12 numbers"):
            with_fields(2, arrangements)
    with pytest.raises(ValueError, match="do not fill cells of 12 bytes"):
        with_fields(1, {}, FIELDS[:1])


def test_fields_cross_the_wire_and_leave_pulls_alone():
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
        ({"kind": "mla"}, None, "full attention here, mla there"),
        ({"window": 128}, None, "attention window None here, 128 there"),
        (None, {"layer": "x"}, "layer g0.l0 here, x in its place there"),
        (None, {"dtype": "float16"}, "layer g0.l0: KV cache dtype bfloat16 here, float16 there"),
        (None, {"outer": 1}, "2 KV heads (or parts of a page) here, 1 there"),
        (None, {"inner": 24}, "12 bytes a token and head here, 24 there"),
        (None, {"packing": "cpu-amx-0.32.0"}, "packed as tokens here, as cpu-amx-0.32.0 there"),
        (None, {"tokens": 2}, "tokens 0..3 of a block in one part here, 0..1 there"),
        (None, {"order": "token"}, "heads before tokens within a page here, tokens before heads there"),
    ],
)
def test_mismatches_are_named(group, region, words):
    here = cache().geometry()
    assert words in geometry_mismatch(here, changed(here, group, region))


def test_mismatch_of_counts():
    here = cache().geometry()
    assert geometry_mismatch(here, cache(groups=1).geometry()) == "2 KV cache groups here, 1 there"
    short = changed(here, {"regions": here.groups[0].regions[:1]})
    assert geometry_mismatch(here, short) == "2 layers here, 1 there in KV cache group 0"
    split = changed(here, {"regions": (here.groups[0].regions[0], *here.groups[0].regions)})
    assert "split into 2 parts over all layers here, 3 there" in geometry_mismatch(here, split)
    assert "byte order" in geometry_mismatch(here, msgspec.structs.replace(here, byte_order="big"))


def test_gaps_and_addresses_do_not_matter():
    assert geometry_mismatch(cache(blocks=6).geometry(), cache(blocks=9).geometry()) is None
    assert geometry_mismatch(cache().geometry(), mirror(cache(), pin=False).geometry()) is None


@pytest.mark.parametrize("tokens_first", [False, True])
def test_blocks_travel_through_a_mirror(tokens_first):
    view = cache(tokens_first=tokens_first)
    host = mirror(view, num_blocks=3, pin=False)
    assert host.num_blocks == 3
    assert geometry_mismatch(view.geometry(), host.geometry()) is None
    before = [view.pages(r).clone() for r in view.groups[1].regions]
    copy_blocks(view, [4, 1], host, [0, 2], group=1)
    for region in view.groups[1].regions:
        view.pages(region).zero_()
    copy_blocks(host, [2, 0], view, [5, 0], group=1)
    for region, old in zip(view.groups[1].regions, before, strict=True):
        new = view.pages(region)
        assert torch.equal(new[5], old[1]) and torch.equal(new[0], old[4])
        assert not new[1:5].any()


def test_mirror_copies_refuse_bad_ids():
    view = cache()
    host = mirror(view, num_blocks=2, pin=False)
    with pytest.raises(ValueError, match="outside 0..1"):
        copy_blocks(view, [0], host, [2], 0)
    with pytest.raises(ValueError, match="1 source blocks for 2"):
        copy_blocks(view, [0], host, [0, 1], 0)
    copy_blocks(view, [], host, [], 0)


@pytest.mark.gpu
def test_mirror_of_a_device_cache():
    host = mirror(cache(), pin=True)
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
    copy_blocks(source, [1, 2], device, [3, 0], 0)
    copy_blocks(device, [3, 0], host, [5, 4], 0)
    for a, b in zip(source.groups[0].regions, host.groups[0].regions, strict=True):
        assert torch.equal(host.pages(b)[5], source.pages(a)[1])
        assert torch.equal(host.pages(b)[4], source.pages(a)[2])
