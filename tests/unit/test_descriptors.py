"""Descriptors of transfers against a byte-by-byte copy."""

import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvtier.worker import descriptors
from vllm_kvtier.worker.descriptors import page_chunks, pair_descriptors, row_descriptors
from vllm_kvtier.worker.views import CacheView, GroupView, Region, geometry_mismatch

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


def execute(target: CacheView, source: CacheView, near: np.ndarray, far: np.ndarray) -> None:
    """What NIXL would do: copies far -> near by address."""
    to, to_bytes = memory_of(target)
    start, from_bytes = memory_of(source)
    for (a, n, _), (b, m, _) in zip(near.tolist(), far.tolist(), strict=True):
        assert n == m
        to_bytes[a - to : a - to + n] = from_bytes[b - start : b - start + n]


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


@given(pulls(), st.sampled_from([1 << 26, 64, 8]))
def test_descriptors_copy_exactly_the_blocks(pull, cap):
    here, there, local, remote = pull
    assert geometry_mismatch(here.geometry(), there.geometry()) is None
    before = [here.pages(r).clone() for r in here.groups[0].regions]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(descriptors, "MAX_DESCRIPTOR_BYTES", cap)
        near, far = pair_descriptors(here.groups[0], there.groups[0], local, remote, 3, 5)
    assert near.dtype == far.dtype == np.uint64 and near.shape == far.shape and near.shape[1] == 3
    assert (near[:, 1] == far[:, 1]).all()
    assert (near[:, 1] <= max(cap, here.groups[0].block_bytes)).all()
    assert (near[:, 2] == 3).all() and (far[:, 2] == 5).all()
    assert near[:, 1].sum() == len(local) * here.groups[0].block_bytes
    execute(here, there, near, far)
    for region, other, old in zip(here.groups[0].regions, there.groups[0].regions, before, strict=True):
        old[local] = there.pages(other)[remote]
        assert torch.equal(here.pages(region), old)


@given(st.sampled_from(list(ORDERS)), st.sampled_from([0, 4]), st.integers(1, 3), st.integers(1, 3))
def test_page_chunks_are_the_page(order, gap, heads, tokens):
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


def test_runs_of_blocks_are_merged_up_to_the_cap(monkeypatch):
    view = build("LBHNC", layers=2, blocks=100)
    page = view.groups[0].regions[0].block_bytes
    ids = np.arange(10, 60)
    near, _ = pair_descriptors(view.groups[0], view.groups[0], ids, ids)
    assert near[:, 1].tolist() == [50 * page] * 2
    monkeypatch.setattr(descriptors, "MAX_DESCRIPTOR_BYTES", 20 * page)
    near, _ = pair_descriptors(view.groups[0], view.groups[0], ids, ids)
    assert near[:, 1].tolist() == [20 * page, 20 * page, 10 * page] * 2


def test_block_major_blocks_are_one_descriptor_each():
    view = build("BLHNC", layers=5, blocks=8)
    near, _ = pair_descriptors(view.groups[0], view.groups[0], [1, 3, 4], [1, 5, 6])
    block = view.groups[0].block_bytes
    assert near[:, 1].tolist() == [block, 2 * block]


def test_rows_of_a_table():
    near, far = row_descriptors(1000, 2000, 8, [0, 1, 5], [7, 8, 9], 1, 2)
    assert near.tolist() == [[1000, 16, 1], [1040, 8, 1]]
    assert far.tolist() == [[2056, 16, 2], [2072, 8, 2]]
    assert row_descriptors(0, 0, 8, [], [])[0].shape == (0, 3)


def test_refuses_what_does_not_match():
    a, b = build("LBHNC"), build("LBNHC")
    with pytest.raises(ValueError, match="differ in geometry"):
        pair_descriptors(a.groups[0], b.groups[0], [0], [0])
    with pytest.raises(ValueError, match="block ids"):
        pair_descriptors(a.groups[0], a.groups[0], [0, 1], [0])
    with pytest.raises(ValueError, match="regions"):
        pair_descriptors(a.groups[0], build("LBHNC", layers=3).groups[0], [0], [0])


def test_a_large_pull_is_described_in_milliseconds():
    view = build("LBHNC", layers=36, blocks=1024, inner=16)
    rng = np.random.default_rng(0)
    local, remote = rng.permutation(1024)[:512], rng.permutation(1024)[:512]
    best = min(_timed(view, local, remote) for _ in range(5))
    assert best < 0.05  # about 3 ms here; the bound leaves room for a machine under load


def _timed(view: CacheView, local: np.ndarray, remote: np.ndarray) -> float:
    start = time.perf_counter()
    pair_descriptors(view.groups[0], view.groups[0], local, remote)
    return time.perf_counter() - start
