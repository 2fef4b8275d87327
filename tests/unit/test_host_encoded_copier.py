"""The host copier with codecs: rows, checksums and pages against a reference that goes line by line."""

import mmap
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_kvtier.kernels.checksum_reference import block_checksum

from vllm_kvtier import codecs
from vllm_kvtier.codecs.base import DTYPES, Codec
from vllm_kvtier.codecs.int8 import Int8
from vllm_kvtier.codecs.keep import KEEP
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.wire.geometry import Field, GroupView, Region
from vllm_kvtier.wire.slots import PAGE, layout_digest, slot_layout
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.copy import host_encoded_copier
from vllm_kvtier.worker.copy.base import make_copier

BLOCKS = 5
FIELDS = {
    "kv": (Field("k", 32), Field("v", 32)),
    "uneven": (Field("k", 48), Field("v", 16)),
    "mla": (Field("latent", 128), Field("rope", 16)),
}


def make_view(
    fields="kv", layers=2, outer=2, tokens=8, cell_tokens=1, order="outer", gap=0, dtype="bfloat16", mix=None, seed=0
) -> CacheView:
    """``mix``: for cells of several tokens, how their numbers lie: "plain", "transposed", "pairs" (vector units), or
    a seed of any permutation at all."""
    fields = FIELDS[fields]
    numbers = cell_tokens * sum(f.count for f in fields)
    inner, cells = 2 * numbers, tokens // cell_tokens
    page = outer * cells * inner + gap
    generator = torch.Generator().manual_seed(seed)
    memory = torch.randn(layers * BLOCKS * page // 2, generator=generator).to(DTYPES[dtype])
    outer_stride, cell_stride = (cells * inner, inner) if order == "outer" else (inner, outer * inner)
    regions = tuple(
        Region(
            f"l{i}", memory.data_ptr() + i * BLOCKS * page, page, outer, outer_stride if outer > 1 else 0, 0, cells,
            cell_stride if cells > 1 else 0, inner, cell_tokens, f"mixed {mix}" if cell_tokens > 1 else "", dtype,
            fields,
        )
        for i in range(layers)
    )  # fmt: skip
    cpu_page_layouts = {}
    if cell_tokens > 1:
        cpu_page_layouts = {(regions[0].packing, cell_tokens, fields): cpu_page_layout(fields, cell_tokens, mix)}
    group = GroupView(0, tokens, "full", None, regions)
    return CacheView([group], BLOCKS, "cpu", [memory.untyped_storage()], cpu_page_layouts)


def cpu_page_layout(fields: tuple[Field, ...], tokens: int, mix) -> torch.Tensor:
    at, found = 0, []
    for field in fields:
        index = torch.arange(tokens * field.count)
        if mix == "transposed":
            index = index.view(field.count, tokens).t()
        elif mix == "pairs":
            index = index.view(field.count // 2, tokens, 2).transpose(0, 1)
        found.append(at + index.flatten())
        at += index.numel()
    if isinstance(mix, int):
        return torch.randperm(at, generator=torch.Generator().manual_seed(mix)).int()
    return torch.cat(found).int()


def logical(view: CacheView, block: int, region: Region, field: int) -> torch.Tensor:
    """[outer, tokens, count] of a block, number by number."""
    dtype = DTYPES[region.dtype]
    page = view.pages(region)[block].contiguous().view(dtype)  # [outer, cells, numbers]
    before = sum(f.count for f in region.fields[:field]) * region.cell_tokens
    count = region.fields[field].count
    index = torch.arange(before, before + region.cell_tokens * count)
    order = view.cpu_page_layout(region)
    if order is not None:
        index = order[index].long()
    return page[..., index].reshape(region.outer, region.block_tokens, count)


def numbers(view: CacheView, block: int) -> list[torch.Tensor]:
    return [logical(view, block, r, f) for r in view.groups[0].regions for f in range(len(r.fields))]


def make(view: CacheView, codec: Codec, parts: int = 2, part: int = 1, slots: int = BLOCKS + 1):
    layout = part_layout(view.groups[0], codec)
    assert layout.encoded
    slot = slot_layout([layout] * parts)
    pool = make_pool(slots * slot.pages)
    return open_copier(view, pool, layout, slot.part_offsets[part]), pool, layout, slot


def make_pool(pages: int) -> np.ndarray:
    memory = np.full((pages + 1) * PAGE, 0xA5, dtype=np.uint8)
    start = -memory.ctypes.data % PAGE
    return memory[start : start + pages * PAGE]


def open_copier(view: CacheView, pool: np.ndarray, layout, offset=0):
    copier = make_copier(view, (pool.ctypes.data, pool.nbytes, SimpleNamespace(buffer=pool)), [layout], [offset])
    copier.register(0, pool.nbytes)
    return copier


def check_row(row: np.ndarray, layout, view: CacheView, block: int, key: int) -> None:
    """``row`` holds each line's encoding where the layout says, and the checksum of all before it."""
    for part in layout.encoded:
        region = view.groups[0].regions[part.region]
        lines = logical(view, block, region, part.field).reshape(-1, part.line)
        assert len(lines) == part.lines
        data, scales = (c.numpy() for c in part.format.encode(lines))
        for at, encoded in ((part.data_offset, data), (part.scale_offset, scales)):
            assert row[at : at + encoded.size].tobytes() == encoded.tobytes()
    total = block_checksum([row[None, None, : layout.sum_offset]], [1], key)
    assert int.from_bytes(row[layout.sum_offset :][:8].tobytes(), "little") == total


def decoded(layout, view: CacheView, block: int) -> list[torch.Tensor]:
    """What a block's numbers are after a round trip."""
    found = []
    for part in layout.encoded:
        x = logical(view, block, view.groups[0].regions[part.region], part.field)
        lines = x.reshape(-1, part.line)
        found.append(part.format.decode(*part.format.encode(lines), lines.dtype).reshape(x.shape))
    return found


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in zip(a, b, strict=True))


VIEWS = st.builds(
    make_view,
    fields=st.sampled_from(list(FIELDS)),
    layers=st.integers(1, 3),
    outer=st.integers(1, 3),
    cell_tokens=st.sampled_from([1, 2, 8]),
    order=st.sampled_from(["outer", "token"]),
    gap=st.sampled_from([0, 8]),
    dtype=st.sampled_from(list(DTYPES)),
    mix=st.one_of(st.sampled_from(["plain", "transposed", "pairs"]), st.integers(0, 3)),
)


@settings(max_examples=30)
@given(
    view=VIEWS,
    name=st.sampled_from(["int8", "int4"]),
    tile=st.sampled_from([100, 300, 32 << 10]),
    rows=st.sampled_from([1, 3, 99]),
    data=st.data(),
)
def test_host_encoded_copier_equals_reference_and_round_trips(view, name, tile, rows, data):
    codec = codecs.get(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_encoded_copier, "TILE_NUMBERS", tile)
        patch.setattr(host_encoded_copier, "TILE_WORDS", data.draw(st.sampled_from([8, 16 << 10])))
        patch.setattr(host_encoded_copier, "_ROWS_BYTES", rows * part_layout(view.groups[0], codec).sum_offset)
        copier, pool, layout, slot = make(view, codec)
        n = data.draw(st.integers(1, BLOCKS))
        blocks = np.array(data.draw(st.permutations(range(BLOCKS)))[:n])
        slots = (np.array(data.draw(st.permutations(range(BLOCKS)))[:n]) + 1) * slot.pages
        keys = np.array([data.draw(st.integers(0, 2**64 - 1)) for _ in range(n)], dtype=np.uint64)
        copy = copier.store(0, blocks, keys, slots)
        assert copy.done() and copy.bad is None and copy.nbytes == n * layout.nbytes
        starts = slots * PAGE + slot.part_offsets[1]
        others = np.ones(len(pool), dtype=bool)
        for block, start, key in zip(blocks, starts, keys, strict=True):
            check_row(pool[start : start + layout.nbytes], layout, view, block, int(key))
            others[start : start + layout.sum_offset + 8] = False
        assert (pool[others] == 0xA5).all()  # the other rank's parts, too
        before = [numbers(view, b) for b in range(BLOCKS)]
        after = [decoded(layout, view, b) for b in range(BLOCKS)]
        flipped = data.draw(st.integers(0, n - 1))
        bit = data.draw(st.integers(0, 8 * (layout.sum_offset + 8) - 1))
        pool[starts[flipped] + bit // 8] ^= 1 << bit % 8
        targets = np.array(data.draw(st.permutations(range(BLOCKS)))[:n])
        assert np.flatnonzero(copier.load(0, targets, keys, slots).bad).tolist() == [flipped]
        for i, (source, target) in enumerate(zip(blocks, targets, strict=True)):
            if i == flipped:  # what came in its place may be NaN, which the comparison must accept
                assert not any(part.any() for part in numbers(view, target))
            else:
                assert same(numbers(view, target), after[source])
        for block in set(range(BLOCKS)) - set(targets.tolist()):
            assert same(numbers(view, block), before[block])


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_host_encoded_copier_different_token_orders_share_slots(name):
    """Tokens before heads with gaps on one, packed pages of a vector unit on the other: one digest, the same KV."""
    one = make_view(order="token", gap=8, seed=1)
    other = make_view(cell_tokens=8, mix="pairs", seed=2)
    codec = codecs.get(name)
    layouts = [part_layout(v.groups[0], codec) for v in (one, other)]
    assert layouts[0] == layouts[1]
    assert len({layout_digest(v.groups, [layout]) for v, layout in zip((one, other), layouts, strict=True)}) == 1
    pool = make_pool(8)
    keys, slots = np.array([1, 2], dtype=np.uint64), np.array([3, 5])
    open_copier(one, pool, layouts[0]).store(0, np.array([2, 4]), keys, slots)
    assert not open_copier(other, pool, layouts[1]).load(0, np.array([0, 1]), keys, slots).bad.any()
    for source, target in ((2, 0), (4, 1)):
        assert same(numbers(other, target), decoded(layouts[0], one, source))


def test_host_encoded_copier_raw_fields_and_groups_are_exact():
    """A group with a codec whose formats lose nothing, beside one that is raw: every bit comes back."""
    encoded, raw = make_view("mla", outer=1), make_view(seed=3)
    encoded.pages(encoded.groups[0].regions[0])[:, :, :, :4] = 0xFF  # NaNs, too
    views = CacheView(
        [*encoded.groups, *raw.groups], BLOCKS, "cpu", [s for v in (encoded, raw) for s in v._storages]
    )
    layouts = [
        part_layout(views.groups[0], Codec("kept", "for tests", {"latent": KEEP, "rope": KEEP})),
        part_layout(views.groups[1], codecs.get("raw")),
    ]
    assert layouts[0].encoded and not layouts[1].encoded
    pool = make_pool(32)
    copier = make_copier(views, (pool.ctypes.data, pool.nbytes, SimpleNamespace(buffer=pool)), layouts, [64, 0])
    copier.register(0, pool.nbytes)
    keys = np.array([7], dtype=np.uint64)
    for group, slot in ((0, 3), (1, 13)):
        regions = views.groups[group].regions
        before = [views.pages(r)[1].clone() for r in regions]
        copier.store(group, np.array([1]), keys, np.array([slot]))
        assert not copier.load(group, np.array([4]), keys, np.array([slot])).bad.any()
        assert all(torch.equal(views.pages(r)[4], b) for r, b in zip(regions, before, strict=True))


class Meddling(Int8):
    """Whenever something is decoded, another client writes over the pool."""

    pool: np.ndarray

    def decode(self, data, scales, dtype):
        self.pool[PAGE:] = 0x3C
        return super().decode(data, scales, dtype)


def test_host_encoded_copier_decodes_the_verified_bytes(monkeypatch):
    monkeypatch.setattr(host_encoded_copier, "TILE_NUMBERS", 64)  # many calls of decode a block
    form = Meddling()
    view = make_view()
    copier, pool, layout, slot = make(view, Codec("meddling", "for tests", {"k": form, "v": form}))
    form.pool = pool[:0]
    expected = decoded(layout, view, 2)
    keys, slots = np.array([9], dtype=np.uint64), np.array([slot.pages])
    copier.store(0, np.array([2]), keys, slots)
    # The copier looks at the checksum afterwards; only what comes before it is overwritten.
    form.pool = pool[: slots[0] * PAGE + slot.part_offsets[1] + layout.sum_offset]
    assert not copier.load(0, np.array([3]), keys, slots).bad.any()
    assert same(numbers(view, 3), expected) and (form.pool[PAGE:] == 0x3C).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_host_encoded_copier_non_finite_value_affects_its_row_only(name, value):
    view = make_view()
    copier, _, layout, slot = make(view, codecs.get(name))
    region = view.groups[0].regions[1]
    pages = view.pages(region)
    pages[0, 1, 3] = torch.full((64,), 1.0).bfloat16().view(torch.uint8)
    expected = decoded(layout, view, 0)
    pages[0, 1, 3, 10:12] = torch.tensor([value]).bfloat16().view(torch.uint8)
    keys, slots = np.array([1], dtype=np.uint64), np.array([slot.pages])
    copier.store(0, np.array([0]), keys, slots)
    copier.load(0, np.array([0]), keys, slots)
    found = numbers(view, 0)
    line = found[2][1, 3]  # the second layer's K
    assert line.isnan().all()
    line.copy_(expected[2][1, 3])
    assert same(found, expected)


def test_host_encoded_copier_close_releases_the_pool():
    view = make_view()
    layout = part_layout(view.groups[0], codecs.get("int8"))
    mapping = mmap.mmap(-1, 8 * PAGE)
    buffer = memoryview(mapping)
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    copier = make_copier(view, (address, 8 * PAGE, SimpleNamespace(buffer=buffer)), [layout], [0])
    copier.register(0, 8 * PAGE)
    copier.store(0, np.array([1]), np.zeros(1, np.uint64), np.array([2]))
    copier.close()
    del copier
    buffer.release()
    mapping.close()


@pytest.mark.parametrize("name", [name for name in codecs.names() if codecs.get(name).formats])
def test_host_encoded_copier_uses_one_core(name):
    """torch would spread operations over as many threads as the model is computed with."""
    view = make_view(layers=24, tokens=64)
    copier, _, _, slot = make(view, codecs.get(name))
    orders = 0, np.arange(BLOCKS), np.zeros(BLOCKS, np.uint64), (np.arange(BLOCKS) + 1) * slot.pages
    counts: list[int] = []

    def copy() -> None:
        for call in (lambda: None, lambda: copier.store(*orders), lambda: copier.load(*orders)):
            call()
            counts.append(len(os.listdir("/proc/self/task")))
            assert torch.get_num_threads() == 3  # again

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert len(counts) == 3 and len(set(counts)) == 1, counts


def test_host_encoded_copier_has_smaller_pieces_than_raw():
    view = make_view()
    encoded = make(view, codecs.get("int8"))[0]
    raw = part_layout(view.groups[0], codecs.get("raw"))
    assert encoded.piece_bytes < open_copier(view, make_pool(4), raw).piece_bytes


def test_host_encoded_copier_layout_of_other_cache_raises():
    layout = part_layout(make_view(outer=1).groups[0], codecs.get("int8"))
    with pytest.raises(ValueError, match="lines of 32"):
        open_copier(make_view(outer=2), make_pool(8), layout)
