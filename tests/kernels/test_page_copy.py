"""The copy kernels against the plain reference, bit for bit: any strides, shapes, page sizes and word sizes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_checksum import on_device, views
from vllm_kvtier.kernels import page_copy, page_copy_reference

from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.wire.slots import part_layout
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.copy.part_tables import region_table
from vllm_kvtier.worker.device.cuda_driver import Driver

FILL_BYTE = 0xA5  # what rows hold where nothing is written


def on_host(view: CacheView) -> list[np.ndarray]:
    """Each region's pages, uint8 [blocks, outer, cells, inner], copied."""
    return [view.pages(r).cpu().numpy().copy() for r in view.groups[0].regions]


class Rows:
    """Rows in memory of the device, each at a random multiple of 64 bytes, and the scratch of a launch."""

    def __init__(self, view: CacheView, n: int, places: list[int], programs: int, warps: int = 4):
        group = view.groups[0]
        self.view, self.n, self.layout = view, n, part_layout(group)
        self.regions = region_table(group, self.layout)
        device = view.device
        self.memory = torch.full(
            ((n + 1) * (self.layout.nbytes + 64) + 64,), FILL_BYTE, dtype=torch.uint8, device=device
        )
        self.starts = [p * (self.layout.nbytes + 64) for p in places]
        first = -(-self.memory.data_ptr() // 64) * 64
        self.shift = first - self.memory.data_ptr()
        self.addresses = np.array([first + s for s in self.starts], dtype=np.int64)
        pin = device.type == "cuda"
        self.table = torch.zeros(n, 4, dtype=torch.int64, pin_memory=pin)
        self.verdicts = torch.full((n,), page_copy.BAD, dtype=torch.uint8, pin_memory=pin)
        self.scratch = (
            torch.full((n + 3, 4), -1, dtype=torch.int64, device=device),
            torch.full((n + 3,), -1, dtype=torch.int64, device=device),
        )
        self.programs, self.warps = programs, warps
        self.stream = torch.cuda.Stream() if pin else None

    def page_copier(self, gather: bool, checked: bool = True) -> page_copy.PageCopier:
        start = Driver(self.view.device.index).launch if self.view.device.type == "cuda" else None
        setup = page_copy.LaunchSetup(self.scratch, self.programs, checked, start)
        return page_copy.PageCopier(gather, self.regions, self.layout.sum_offset, setup, self.warps)

    def launch(self, gather: bool, blocks, keys, checked: bool = True) -> list[bool]:
        self.table[:, 0] = torch.tensor(blocks)
        self.table[:, 1] = torch.from_numpy(np.asarray(keys, dtype=np.uint64).view(np.int64))
        self.table[:, 2] = torch.from_numpy(self.addresses)
        self.table[:, 3] = self.verdicts.data_ptr() + torch.arange(self.n)
        self.verdicts.fill_(page_copy.BAD)
        page_copier = self.page_copier(gather, checked)
        if self.view.device.type == "cuda":
            # Twice, the second time by the compiled kernel alone, and that one shows.
            for _ in range(2):
                torch.cuda.synchronize()
                self.verdicts.fill_(page_copy.BAD)
                page_copier.launch(self.table.data_ptr(), self.n, self.stream)
            assert page_copier._ready
            torch.cuda.synchronize()
        else:
            page_copier.launch(self.table.data_ptr(), self.n, None)
        return [v == page_copy.GOOD for v in self.verdicts.tolist()]

    def bytes(self) -> np.ndarray:
        return self.memory.cpu().numpy()[self.shift :].copy()

    def poke(self, row: int, at: int, flip: int) -> None:
        self.memory[self.shift + self.starts[row] + at] ^= flip


@st.composite
def questions(draw):
    view = draw(views())
    n = draw(st.integers(1, min(9, view.num_blocks)))
    blocks = draw(st.permutations(range(view.num_blocks)))[:n]
    keys = np.array([draw(st.integers(0, 2**64 - 1)) for _ in range(n)], dtype=np.uint64)
    places = draw(st.permutations(range(n + 1)))[:n]
    return view, blocks, keys, places, draw(st.integers(1, 5))


@given(questions(), st.data())
@settings(max_examples=50)
def test_page_copy_equals_reference_and_round_trips(kernel_device, question, data):
    host_view, blocks, keys, places, programs = question
    view = on_device(host_view, kernel_device)
    before = on_host(view)
    rows = Rows(view, len(blocks), places, programs)
    layout = rows.layout
    rows.launch(True, blocks, keys)
    # Gathering writes regions and sums, and nothing beside them.
    expected = np.full_like(rows.bytes(), FILL_BYTE)
    for start, block, key in zip(rows.starts, blocks, keys, strict=True):
        row = expected[start : start + layout.nbytes]
        page_copy_reference.encode([p[block] for p in before], int(key), row, layout.region_offsets, layout.sum_offset)
    assert (rows.bytes() == expected).all()
    assert all((a == b).all() for a, b in zip(on_host(view), before, strict=True))

    # Scattering them into other blocks writes those, and nothing beside them; one flipped bit shows.
    targets = data.draw(st.permutations(range(view.num_blocks)))[: len(blocks)]
    flipped = data.draw(st.integers(0, len(blocks) - 1))
    region = data.draw(st.integers(0, len(before) - 1))
    at = layout.region_offsets[region] + data.draw(st.integers(0, before[region][0].size - 1))
    at = data.draw(st.sampled_from([at, layout.sum_offset + 3]))
    rows.poke(flipped, at, 1 << data.draw(st.integers(0, 7)))
    good = rows.launch(False, targets, keys)
    assert [i for i, g in enumerate(good) if not g] == [flipped]
    wanted, stored = [p.copy() for p in before], rows.bytes()
    for start, block, key in zip(rows.starts, targets, keys, strict=True):
        row = stored[start : start + layout.nbytes]
        right = page_copy_reference.decode(
            row, int(key), [p[block] for p in wanted], layout.region_offsets, layout.sum_offset
        )
        assert right == (start != rows.starts[flipped])
    assert all((a == b).all() for a, b in zip(on_host(view), wanted, strict=True))


def layered(device: torch.device, inner: int, tokens: int, layers: int, blocks: int = 5, base: int = 0) -> CacheView:
    page = tokens * inner
    memory = torch.from_numpy(np.random.default_rng(4).integers(0, 256, layers * blocks * page + 128, dtype=np.uint8))
    start = -(-memory.data_ptr() // 64) * 64 + base
    regions = tuple(
        Region(f"l{i}", start + i * blocks * page, page, 1, 0, 0, tokens, inner if tokens > 1 else 0, inner)
        for i in range(layers)
    )
    group = GroupView(0, tokens, "full", None, regions)
    return on_device(CacheView([group], blocks, "cpu", [memory.untyped_storage()]), device)


@pytest.mark.parametrize("inner, tokens", [(16 << 10, 3), (40 << 10, 1), (8 << 10, 1), (656, 64), (20, 3)])
def test_page_copy_of_pages_of_every_size_equals_reference(kernel_device, inner, tokens):
    """Larger than a tile of either shape, exactly one, and less than one; 656 bytes a token is fp8_ds_mla."""
    view = layered(kernel_device, inner, tokens, layers=2)
    rows = Rows(view, 5, [5, 2, 0, 1, 3], programs=16)
    keys = np.arange(5, dtype=np.uint64)
    rows.launch(True, [3, 1, 4, 0, 2], keys)
    before = on_host(view)
    assert rows.launch(False, [0, 1, 2, 3, 4], keys) == [True] * 5
    after = on_host(view)
    assert all((a == b[[3, 1, 4, 0, 2]]).all() for a, b in zip(after, before, strict=True))
    assert rows.launch(False, [0, 1, 2, 3, 4], keys + np.uint64(1)) == [False] * 5


@pytest.mark.parametrize("base", [0, 4, 8])
def test_page_copy_is_independent_of_cache_alignment(kernel_device, base):
    """16-, 8- and 4-byte accesses make the same rows."""
    keys = np.array([9, 8], dtype=np.uint64)
    plain, made = layered(torch.device("cpu"), 96, 4, layers=2), []
    for at in (0, base):
        view = layered(kernel_device, 96, 4, layers=2, base=at)
        for r, p in zip(view.groups[0].regions, plain.groups[0].regions, strict=True):
            view.pages(r).copy_(plain.pages(p))
        rows = Rows(view, 2, [0, 1], programs=3)
        rows.launch(True, [4, 2], keys)
        made.append(rows.bytes()[: 2 * (rows.layout.nbytes + 64)])
        launches = rows.page_copier(True).launches
        assert {f["SPLIT"] for f, _ in launches} == {at == 4}
        assert {f["PAIRS"] for f, _ in launches} == {at == 0}
    assert (made[0] == made[1]).all()


def test_page_copy_is_independent_of_number_of_programs(kernel_device):
    view = layered(kernel_device, 2048, 8, layers=3)
    made = []
    for programs, warps in ((1, 4), (2, 4), (7, 8), (64, 8)):
        rows = Rows(view, 5, [0, 1, 2, 3, 4], programs, warps)
        rows.launch(True, [4, 3, 2, 1, 0], np.arange(5, dtype=np.uint64))
        made.append(rows.bytes()[: 5 * (rows.layout.nbytes + 64)])
    assert all((m == made[0]).all() for m in made)


def test_copy_without_checksum_writes_same_bytes(kernel_device):
    view = layered(kernel_device, 64, 4, layers=2)
    rows = Rows(view, 2, [0, 1], programs=2)
    rows.launch(True, [1, 2], np.zeros(2, np.uint64), checked=False)
    bare = rows.bytes()
    rows.launch(True, [1, 2], np.zeros(2, np.uint64))
    differs = np.flatnonzero(bare != rows.bytes())
    assert len(differs) and all(any(0 <= d - s - rows.layout.sum_offset < 8 for s in rows.starts) for d in differs)


def test_page_copy_of_no_rows_changes_nothing(kernel_device):
    """What warms the kernels up: nothing is copied."""
    view = layered(kernel_device, 64, 4, layers=2)
    rows = Rows(view, 1, [0], programs=2)
    if kernel_device.type == "cpu":
        pytest.skip("the interpreter takes no empty grid")
    page_copier = rows.page_copier(True)
    for _ in range(2):
        page_copier.launch(rows.table.data_ptr(), 0, rows.stream)
    torch.cuda.synchronize()
    assert (rows.bytes() == FILL_BYTE).all()


def test_copy_not_word_aligned_is_refused():
    view = layered(torch.device("cpu"), 96, 4, layers=1, base=2)
    table = region_table(view.groups[0], part_layout(view.groups[0]))
    with pytest.raises(ValueError, match="multiples of 4 bytes"):
        page_copy.plan(table)


def test_page_copy_without_triton_raises(monkeypatch):
    monkeypatch.setattr(page_copy, "triton", None)
    with pytest.raises(RuntimeError, match="need Triton"):
        page_copy.PageCopier(True, np.zeros((1, 12), np.int64), 0, page_copy.LaunchSetup((None, None), 1), 1)


@pytest.mark.skipif(page_copy.triton is None, reason="Triton is not installed")
def test_page_copy_compile_restores_vllm_compile_hook():
    runtime = page_copy.triton.knobs.runtime
    before = runtime.jit_post_compile_hook
    runtime.jit_post_compile_hook = hook = lambda **_: None
    try:
        with pytest.raises(RuntimeError), page_copy.without_compile_hook():
            assert runtime.jit_post_compile_hook is None
            raise RuntimeError
        assert runtime.jit_post_compile_hook is hook
    finally:
        runtime.jit_post_compile_hook = before
