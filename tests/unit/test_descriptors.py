"""Descriptors of transfers against a byte-by-byte copy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvtier.wire.geometry import GroupView, Region, geometry_mismatch
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.nixl_pull import descriptors, exported_memory
from vllm_kvtier.worker.nixl_pull.descriptors import PageRows, Side, page_chunks
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory

ORDERS = {
    "LBHNC": "lbhn",
    "LBNHC": "lbnh",
    "LHBNC": "lhbn",
    "BLHNC": "blhn",
    "BLNHC": "blnh",
    "BHLNC": "bhln",
}


def build(order: str, layers=2, blocks=4, heads=2, tokens=4, inner=8, gap=0, seed=0) -> CacheView:
    """A cache in one of vLLM's physical orders, with ``gap`` bytes after each step of a dimension."""
    sizes = {"l": layers, "b": blocks, "h": heads, "n": tokens}
    stride, step = {}, inner
    for dim in reversed(ORDERS[order]):
        stride[dim] = step + gap
        step = stride[dim] * sizes[dim]
    memory = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, step, dtype=np.uint8))
    regions = tuple(
        Region(
            f"layer{i}",
            memory.data_ptr() + i * stride["l"],
            stride["b"],
            heads,
            stride["h"] if heads > 1 else 0,
            0,
            tokens,
            stride["n"] if tokens > 1 else 0,
            inner,
        )
        for i in range(layers)
    )
    return CacheView(
        [GroupView(0, tokens, "full", None, regions)], blocks, "cpu", [memory.untyped_storage()]
    )


def elements(rows: np.ndarray, wanted: np.ndarray) -> list[tuple[int, int, int]]:
    """(address, length, device) of elements of a strided descriptor list, as NIXL expands it."""
    every = [(a + i * stride, n, device) for a, n, device, stride, count in rows.tolist() for i in range(count)]
    return [every[i] for i in wanted.tolist()]


def execute(target: CacheView, source: CacheView, near: list, far: list) -> None:
    """What NIXL would do: copies far -> near by address."""
    to, to_bytes = memory_of(target)
    start, from_bytes = memory_of(source)
    for (a, n, _), (b, m, _) in zip(near, far, strict=True):
        assert n == m
        to_bytes[a - to : a - to + n] = from_bytes[b - start : b - start + n]


def page_rows(here: CacheView, there: CacheView) -> PageRows:
    tables = (1 << 50, 1 << 51)  # far from any page
    return PageRows(
        Side(here.groups, here.num_blocks, tables[0], 3), Side(there.groups, there.num_blocks, tables[1], 5)
    )


def memory_of(view: CacheView) -> tuple[int, np.ndarray]:
    (base, nbytes), (storage,) = view.spans[0], view._storages
    return base, torch.empty(0, dtype=torch.uint8).set_(storage).numpy()[:nbytes]


@st.composite
def pulls(draw):
    a, b = draw(
        st.sampled_from(
            [
                (x, y)
                for x in ORDERS
                for y in ORDERS
                if (x.index("H") < x.index("N")) == (y.index("H") < y.index("N"))
            ]
        )
    )
    shape = {
        "layers": draw(st.integers(1, 3)),
        "heads": draw(st.integers(1, 3)),
        "tokens": draw(st.integers(1, 4)),
        "inner": draw(st.sampled_from([4, 24])),
    }
    gap = st.sampled_from([0, 0, 4])
    here = build(a, blocks=draw(st.integers(1, 6)), gap=draw(gap), seed=1, **shape)
    there = build(b, blocks=draw(st.integers(1, 6)), gap=draw(gap), seed=2, **shape)
    most = min(here.num_blocks, there.num_blocks)
    n = draw(st.integers(0, most))
    local = draw(st.permutations(range(here.num_blocks)))[:n]
    remote = draw(st.permutations(range(there.num_blocks)))[:n]
    if draw(st.booleans()):
        local, remote = sorted(local), sorted(remote)
    return here, there, local, remote


@given(pulls(), st.sampled_from([0, 10**9]), st.booleans())
def test_descriptors_cover_exactly_blocks_and_checksums(pull, least, rearrange):
    here, there, local, remote = pull
    assert geometry_mismatch(here.geometry(), there.geometry()) is None
    before = [here.pages(r).clone() for r in here.groups[0].regions]
    rows = page_rows(here, there)
    triple = (0, np.array(local, np.int64), np.array(remote, np.int64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(descriptors, "MIN_READS_SAVED", least - 1)
        a, b, size, moves = rows.indices([triple], rearrange=rearrange)
    assert rearrange or not moves
    assert a.dtype == b.dtype == np.int32 and a.shape == b.shape
    near, far = elements(rows.local, a), elements(rows.remote, b)
    assert {d for *_, d in near} <= {3} and {d for *_, d in far} <= {5}
    assert size == sum(n for _, n, _ in near) == len(local) * (here.groups[0].block_bytes + 8)
    place = {int(i): int(j) for _, start, end in moves for i, j in zip(start, end, strict=True)}
    sums = [(x, y) for x, y in zip(near, far, strict=True) if x[0] >= 1 << 50]
    landed = [((x[0] - (1 << 50)) // 8, (y[0] - (1 << 51)) // 8) for x, y in sums]
    assert sorted((place.get(i, i), j) for i, j in landed) == sorted(zip(local, remote, strict=True))
    pages = [(x, y) for x, y in zip(near, far, strict=True) if x[0] < 1 << 50]
    execute(here, there, [x for x, _ in pages], [y for _, y in pages])
    memory = CacheMemory(here, host_buffer=False)
    for group, start, end in moves:
        memory._rearrange(group, start, end)
    for region, other, old in zip(here.groups[0].regions, there.groups[0].regions, before, strict=True):
        old[local] = there.pages(other)[remote]
        assert torch.equal(here.pages(region), old)


@given(st.sampled_from(list(ORDERS)), st.sampled_from([0, 4]), st.integers(1, 3), st.integers(1, 3))
def test_page_chunks_cover_exactly_the_page(order, gap, heads, tokens):
    view = build(order, heads=heads, tokens=tokens, gap=gap)
    region = view.groups[0].regions[1]
    chunks = page_chunks(region)
    assert chunks == sorted(chunks) and sum(n for _, n in chunks) == region.block_bytes
    cells = {
        o * region.outer_stride + t * region.token_stride + i
        for o in range(region.outer)
        for t in range(region.tokens)
        for i in range(region.inner)
    }
    assert {at + i for at, n in chunks for i in range(n)} == cells
    if gap == 0 and order in ("LBHNC", "LBNHC", "BLHNC", "BLNHC"):
        assert len(chunks) == 1


def test_descriptors_keep_adjacent_blocks_adjacent():
    """NIXL merges neighbours of a list, so the order decides how many reads there are."""
    view = build("LBHNC", layers=2, blocks=100)
    rows = page_rows(view, view)
    backwards = np.arange(60, 10, -1)  # the order in which vLLM hands out a freed request's blocks
    a, *_ = rows.indices([(0, backwards, backwards)])
    addresses = [x for x, _, _ in elements(rows.local, a)]
    page = view.groups[0].regions[0].block_bytes
    steps = np.diff(addresses)
    assert (steps == page).sum() == 2 * 49 and (steps == 8).sum() == 49


def test_descriptors_of_block_major_layout_are_one_per_block():
    view = build("BLHNC", layers=5, blocks=8)
    rows = page_rows(view, view)
    assert rows.local[:, 1].tolist() == [view.groups[0].block_bytes, 8]


def test_descriptors_of_different_geometries_raise():
    a, b = build("LBHNC"), build("LBNHC")
    with pytest.raises(ValueError, match="differ in geometry"):
        page_rows(a, b)
    with pytest.raises(ValueError, match="regions"):
        page_rows(a, build("LBHNC", layers=3))


def test_descriptors_of_long_prompt_have_one_element_per_block_layer_and_checksum():
    """A benchmark would say how quick; this only keeps it from being done block by block in Python."""
    view = build("LBHNC", layers=36, blocks=2048)
    ids = np.random.default_rng(0).permutation(2048)[:512]
    a, *_ = page_rows(view, view).indices([(0, ids, ids)])
    assert len(a) == 512 * 37


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "BHLNC"])
def test_blocks_are_rearranged_with_little_memory(monkeypatch, order):
    """Half a gigabyte of the GPU for 128k tokens, where a layer's pages of all blocks were copied aside at once."""
    view, aside = build(order, blocks=40, heads=4), []
    memory, region = CacheMemory(view, host_buffer=False), view.groups[0].regions[1]
    ids = np.arange(3, 33)
    before, select = view.pages(region).clone(), torch.Tensor.index_select

    def record(*given):
        aside.append(select(*given))
        return aside[-1]

    monkeypatch.setattr(exported_memory, "MOVED_BYTES", len(ids) * region.block_bytes // 4)
    monkeypatch.setattr(torch.Tensor, "index_select", record)
    memory._rearrange(0, ids, ids[::-1].copy())
    assert max(each.nbytes for each in aside) <= exported_memory.MOVED_BYTES
    before[3:33] = before[3:33].flip(0)
    assert torch.equal(view.pages(region), before)


def test_descriptors_of_reversed_runs_are_read_joined_and_moved():
    view = build("LBHNC", layers=36, blocks=200)
    rows = page_rows(view, view)
    near, far = np.arange(100, 150), np.arange(60, 10, -1)
    straight = rows.indices([(0, near, far)])
    assert len({a - i for i, a in enumerate(elements_of(rows, straight))}) > 1000 and not straight.moves
    turned = rows.indices([(0, near, far)], rearrange=True)
    ((_, start, end),) = turned.moves
    assert (start == near).all() and (end == near[::-1]).all()


def elements_of(rows: PageRows, read) -> list[int]:
    """Distance of each element's two sides, which is constant within a read."""
    near, far = elements(rows.local, read.local), elements(rows.remote, read.remote)
    return [a[0] - b[0] for a, b in zip(near, far, strict=True)]
