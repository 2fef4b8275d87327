"""The host copier and the layout of slots: bytes, checksums and bounds, against the plain reference."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm_kvtier.kernels import page_copy_reference

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.wire.slots import PAGE, PIECE_BYTES, layout_digest, part_layout, slot_layout
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.copy import host_copier
from vllm_kvtier.worker.copy.base import make_copier

BLOCKS = 7


def make_view(layers=2, outer=2, cells=3, inner=24, order="outer", gap=0, seed=0) -> CacheView:
    """``order``: which of heads and tokens is outermost within a page; ``gap``: bytes between pages."""
    page = outer * cells * inner + gap
    memory = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, layers * BLOCKS * page + 8, dtype=np.uint8))
    base = -(-memory.data_ptr() // 8) * 8
    outer_stride, token_stride = (cells * inner, inner) if order == "outer" else (inner, outer * inner)
    regions = tuple(
        Region(
            f"l{i}", base + i * BLOCKS * page, page, outer, outer_stride if outer > 1 else 0, 0, cells,
            token_stride if cells > 1 else 0, inner, dtype="bfloat16",
        )
        for i in range(layers)
    )  # fmt: skip
    return CacheView([GroupView(0, cells, "full", None, regions)], BLOCKS, "cpu", [memory.untyped_storage()])


def make_pool(pages: int):
    memory = np.full((pages + 1) * PAGE, 0xA5, dtype=np.uint8)
    start = -memory.ctypes.data % PAGE
    pool = memory[start : start + pages * PAGE]
    return pool, (pool.ctypes.data, pool.nbytes, SimpleNamespace(buffer=pool))


def make(view: CacheView, parts: int = 2, part: int = 1, slots: int = BLOCKS + 1):
    layout = part_layout(view.groups[0])
    slot = slot_layout([layout] * parts)
    pool, handle = make_pool(slots * slot.pages)
    copier = make_copier(view, handle, [layout], [slot.part_offsets[part]])
    copier.register(0, len(pool))
    return copier, pool, layout, slot


def pages_of(view: CacheView, block: int) -> list[np.ndarray]:
    return [view.pages(r)[block].numpy() for r in view.groups[0].regions]


@given(
    st.builds(
        make_view,
        layers=st.integers(1, 3),
        outer=st.integers(1, 3),
        cells=st.integers(1, 4),
        inner=st.sampled_from([4, 8, 12, 24, 64]),
        order=st.sampled_from(["outer", "token"]),
        gap=st.sampled_from([0, 8]),
    ),
    st.sampled_from([1, 5, 16 << 10]),
    st.data(),
)
def test_host_copier_equals_reference_and_round_trips(view, tile, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_copier, "TILE_WORDS", tile)
        copier, pool, layout, slot = make(view)
        n = data.draw(st.integers(1, BLOCKS))
        blocks = np.array(data.draw(st.permutations(range(BLOCKS)))[:n])
        slots = (np.array(data.draw(st.permutations(range(BLOCKS)))[:n]) + 1) * slot.pages
        keys = np.array([data.draw(st.integers(0, 2**64 - 1)) for _ in range(n)], dtype=np.uint64)
        before = [[p.copy() for p in pages_of(view, b)] for b in range(BLOCKS)]
        expected = pool.copy()
        for block, where, key in zip(blocks, slots, keys, strict=True):
            row = expected[where * PAGE + slot.part_offsets[1] :][: layout.nbytes]
            page_copy_reference.encode(before[block], int(key), row, layout.region_offsets, layout.sum_offset)
        copy = copier.store(0, blocks, keys, slots)
        assert copy.done() and copy.bad is None and copy.nbytes == n * layout.nbytes
        assert (pool == expected).all()  # the other rank's parts and the gaps, too
        flipped = data.draw(st.integers(0, n - 1))
        region = data.draw(st.integers(0, len(layout.region_offsets) - 1))
        offset = layout.region_offsets[region] + data.draw(st.integers(0, before[0][region].size - 1))
        offset = data.draw(st.sampled_from([offset, layout.sum_offset, layout.sum_offset + 7]))
        pool[slots[flipped] * PAGE + slot.part_offsets[1] + offset] ^= 1 << data.draw(st.integers(0, 7))
        targets = np.array(data.draw(st.permutations(range(BLOCKS)))[:n])
        copy = copier.load(0, targets, keys, slots)
        assert np.flatnonzero(copy.bad).tolist() == [flipped]
        for i, (source, target) in enumerate(zip(blocks, targets, strict=True)):
            if i != flipped:
                assert all((a == b).all() for a, b in zip(before[source], pages_of(view, target), strict=True))
            else:  # what came in its place may be NaN, which the comparison must accept
                assert not any(page.any() for page in pages_of(view, target))
        for block in set(range(BLOCKS)) - set(targets.tolist()):
            assert all((a == b).all() for a, b in zip(before[block], pages_of(view, block), strict=True))
        copier.close()


def test_host_copier_different_layouts_share_slots():
    """Heads first and tokens first, dense and with gaps: the same slots, the same digest."""
    one, other = make_view(order="outer"), make_view(order="token", gap=8, seed=1)
    assert layout_digest(one.groups) == layout_digest(other.groups)
    pool, handle = make_pool(8)
    layout = part_layout(one.groups[0])
    assert layout == part_layout(other.groups[0])
    keys = np.array([1, 2], dtype=np.uint64)
    slots = np.array([3, 5])
    for view, call in ((one, "store"), (other, "load")):
        copier = make_copier(view, handle, [layout], [0])
        copier.register(0, len(pool))
        copy = getattr(copier, call)(0, np.array([2, 4]), keys, slots)
    assert not copy.bad.any()
    for block in (2, 4):
        assert all((a == b).all() for a, b in zip(pages_of(one, block), pages_of(other, block), strict=True))


@pytest.mark.parametrize(
    "change",
    [{"dtype": "float16"}, {"inner": 16}, {"packing": "x"}, {"outer": 1}, {"layer": "m"}, {"first_token": 3}],
    ids=lambda c: next(iter(c)),
)
def test_host_copier_layouts_with_other_meaning_have_other_digests(change):
    group = make_view().groups[0]
    regions = (msgspec.structs.replace(group.regions[0], **change), *group.regions[1:])
    assert layout_digest([group]) != layout_digest([msgspec.structs.replace(group, regions=regions)])


def test_host_copier_reaches_the_last_slot_of_each_group():
    """Of groups with fewer layers a smaller slot fits behind the last one of the largest."""
    few, many = make_view(layers=1, cells=64, inner=64), make_view(layers=4, cells=64, inner=64)
    groups = [many.groups[0], few.groups[0]]
    view = CacheView(groups, BLOCKS, "cpu", many._storages + few._storages)
    layouts = [part_layout(group) for group in groups]
    sizes = [slot_layout([layout]).pages for layout in layouts]
    assert sizes[1] < sizes[0]
    pool, handle = make_pool(pages := 4 * sizes[0])
    copier = make_copier(view, handle, layouts, [0, 0])
    copier.register(0, len(pool))
    for group, size in enumerate(sizes):
        blocks, keys, slots = np.array([3]), np.array([5], dtype=np.uint64), np.array([pages - size])
        copier.store(group, blocks, keys, slots)
        before = [view.pages(region)[3].clone() for region in groups[group].regions]
        for region in groups[group].regions:
            view.pages(region)[3] = 0
        assert not copier.load(group, blocks, keys, slots).bad.any()
        after = [view.pages(region)[3] for region in groups[group].regions]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        with pytest.raises(ValueError, match="outside"):
            copier.store(group, blocks, keys, slots + 1)


def test_host_copier_memory_smaller_than_a_block_is_refused_in_words():
    view = make_view(layers=4, cells=64, inner=64)
    layout = part_layout(view.groups[0])
    _, handle = make_pool(slot_layout([layout]).pages - 1)
    with pytest.raises(KVTierError, match="store_size"):
        make_copier(view, handle, [layout], [0])


def test_host_copier_wrong_key_marks_block_bad():
    copier, _, _, slot = make(make_view())
    blocks, slots = np.array([0, 1]), np.array([1, 2]) * slot.pages
    copier.store(0, blocks, np.array([7, 8], dtype=np.uint64), slots)
    assert copier.load(0, blocks, np.array([7, 9], dtype=np.uint64), slots).bad.tolist() == [False, True]


@pytest.mark.parametrize(
    "blocks, slots", [([BLOCKS], [1]), ([-1], [1]), ([0], [0]), ([0], [-1]), ([0], [BLOCKS + 1]), ([0, 1], [1])]
)
def test_host_copier_refuses_slots_outside_memory(blocks, slots):
    copier, pool, _, slot = make(make_view())
    before = pool.copy()
    with pytest.raises(ValueError):
        copier.store(0, np.array(blocks), np.zeros(len(blocks), np.uint64), np.array(slots) * slot.pages)
    assert (pool == before).all()


def test_host_copier_unregistered_memory_is_refused():
    view = make_view()
    layout = part_layout(view.groups[0])
    pool, handle = make_pool(8)
    copier = make_copier(view, handle, [layout], [0])
    ask = (0, np.array([0]), np.zeros(1, np.uint64), np.array([3]))
    with pytest.raises(ValueError, match="outside"):
        copier.store(*ask)
    copier.register(0, 3 * PAGE)
    with pytest.raises(ValueError, match="outside"):
        copier.store(*ask)
    with pytest.raises(ValueError, match="after"):
        copier.register(4 * PAGE, PAGE)
    copier.register(3 * PAGE, PAGE)
    assert copier.store(*ask).done()


def test_host_copier_slot_layout_is_aligned_and_bounded():
    layout = part_layout(make_view(layers=3, outer=1, cells=1, inner=20).groups[0])
    assert layout.region_offsets == (0, 32, 64) and layout.sum_offset == 88 and layout.nbytes % 64 == 0
    slot = slot_layout([100, 4000, layout])
    assert slot.part_offsets == (0, 128, 4160) and slot.pages == 2
    with pytest.raises(ValueError, match="block size"):
        slot_layout([PIECE_BYTES, 1])
    with pytest.raises(ValueError):
        slot_layout([])


def test_host_copier_wrong_number_of_layouts_raises():
    view = make_view()
    with pytest.raises(ValueError, match="0 layouts"):
        make_copier(view, make_pool(1)[1], [], [])
