"""The kernel and the host path of the block checksum against the plain reference, bit for bit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_kvtier.kernels import checksum, checksum_reference

from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.integrity.checksums import BlockChecksums, _DeviceGroup

ALIGN = 64


@st.composite
def regions(draw, num_blocks: int, block_tokens: int, name: str, base: int) -> tuple[list[Region], int]:
    """One layer: regions with random shape, gaps and physical order; and their bytes from ``base`` on."""
    parts = draw(st.sampled_from([1, 2]) if block_tokens > 1 else st.just(1))
    cell_tokens = draw(st.sampled_from([n for n in (1, 2, block_tokens) if block_tokens // parts % n == 0]))
    cells = block_tokens // parts // cell_tokens
    outer = draw(st.integers(1, 3))
    unit = draw(st.sampled_from([4, 8, 16]))  # everything is a multiple of this
    inner = unit * draw(st.sampled_from([1, 2, 5, 16, 33]))
    gap = st.sampled_from([0, 0, unit, 3 * unit])
    order = draw(st.sampled_from(["block-outer-token", "block-token-outer", "outer-block-token"]))
    size = {"block": num_blocks, "outer": outer, "token": cells}
    stride, step = {}, inner
    for dim in reversed(order.split("-")):
        stride[dim] = step + draw(gap)
        step = stride[dim] * size[dim]
    found = [
        Region(
            layer=name,
            base=base + part * step,
            block_stride=stride["block"],
            outer=outer,
            outer_stride=stride["outer"] if outer > 1 else 0,
            first_token=part * cells * cell_tokens,
            tokens=cells,
            token_stride=stride["token"] if cells > 1 else 0,
            inner=inner,
            cell_tokens=cell_tokens,
        )
        for part in range(parts)
    ]
    return found, parts * step


@st.composite
def views(draw) -> CacheView:
    num_blocks = draw(st.integers(1, 5))
    block_tokens = draw(st.sampled_from([1, 4, 16]))
    found, at = [], draw(st.sampled_from([0, 4, 8]))
    for layer in range(draw(st.integers(1, 3))):
        more, nbytes = draw(regions(num_blocks, block_tokens, f"layer{layer}", at))
        found += more
        at += nbytes
    memory = _random_memory(at + ALIGN, draw(st.integers(0, 2**32 - 1)))
    base = -(-memory.data_ptr() // ALIGN) * ALIGN
    found = [Region(**{**_fields(r), "base": base + r.base}) for r in found]
    group = GroupView(0, block_tokens, "full", None, tuple(found))
    return CacheView([group], num_blocks, "cpu", [memory.untyped_storage()])


def _fields(region: Region) -> dict:
    return {f: getattr(region, f) for f in region.__struct_fields__}


def _random_memory(nbytes: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


def expected(view: CacheView, ids, keys, valid) -> list[int]:
    group = view.groups[0]
    pages = [view.pages(r).cpu().numpy() for r in group.regions]
    sums = []
    for block, key, tokens in zip(ids, keys, valid, strict=True):
        cells = [
            sum(r.first_token + t * r.cell_tokens < tokens for t in range(r.tokens)) for r in group.regions
        ]
        sums.append(checksum_reference.block_checksum([p[block] for p in pages], cells, int(key)))
    return sums


def on_device(view: CacheView, device: torch.device) -> CacheView:
    """The same cache on a GPU: same bytes, same strides."""
    if device.type == "cpu":
        return view
    (base, nbytes), (storage,) = view.spans[0], view._storages
    # The address must be as aligned as it was: the launch depends on it.
    memory = torch.zeros(nbytes + ALIGN, dtype=torch.uint8, device=device)
    start = base % ALIGN - memory.data_ptr() % ALIGN
    start += ALIGN if start < 0 else 0
    memory[start : start + nbytes] = torch.empty(0, dtype=torch.uint8).set_(storage)
    shift = memory.data_ptr() + start - base
    groups = [
        GroupView(
            g.group,
            g.block_tokens,
            g.kind,
            g.window,
            tuple(Region(**{**_fields(r), "base": r.base + shift}) for r in g.regions),
        )
        for g in view.groups
    ]
    return CacheView(groups, view.num_blocks, device, [memory.untyped_storage()])


def kernel_sums(view: CacheView, ids, keys, valid, device: torch.device, programs: int = 3) -> list[int]:
    if device.type == "cuda":
        sums = BlockChecksums(on_device(view, device), programs).compute(0, ids, keys, valid)
    else:  # BlockChecksums takes numpy for host memory; the interpreter reads the same memory through the kernel
        group = _DeviceGroup(view.groups[0], device, programs)
        sums = group.compute(np.asarray(ids, np.int64), keys, np.asarray(valid, np.int64))
    return sums.cpu().numpy().view(np.uint64).tolist()


@st.composite
def questions(draw):
    view = draw(views())
    n = draw(st.integers(1, 9))
    ids = [draw(st.integers(0, view.num_blocks - 1)) for _ in range(n)]
    keys = np.array([draw(st.integers(0, 2**64 - 1)) for _ in range(n)], dtype=np.uint64)
    full = view.groups[0].block_tokens
    valid = [draw(st.one_of(st.just(full), st.integers(0, full))) for _ in range(n)]
    return view, ids, keys, valid


@given(questions())
def test_checksum_host_path_equals_reference(question):
    view, ids, keys, valid = question
    sums = BlockChecksums(view).compute(0, ids, keys, np.array(valid, dtype=np.int32))
    assert sums.dtype == torch.int64
    assert sums.numpy().view(np.uint64).tolist() == expected(view, ids, keys, valid)


@given(questions())
@settings(max_examples=40)
def test_checksum_kernel_equals_reference(kernel_device, question):
    view, ids, keys, valid = question
    assert kernel_sums(view, ids, keys, valid, kernel_device) == expected(view, ids, keys, valid)


def simple_view(inner: int = 24, tokens: int = 4, outer: int = 2, blocks: int = 3) -> CacheView:
    memory = _random_memory(blocks * outer * tokens * inner, 7)
    page, head = outer * tokens * inner, tokens * inner
    region = Region("a", memory.data_ptr(), page, outer, head, 0, tokens, inner, inner)
    return CacheView(
        [GroupView(0, tokens, "full", None, (region,))], blocks, "cpu", [memory.untyped_storage()]
    )


@pytest.mark.parametrize("inner", [24, 12])
def test_checksum_changes_with_every_single_bit(inner):
    view = simple_view(inner)
    sums = BlockChecksums(view)
    page = view.pages(view.groups[0].regions[0])[1]
    ask = ([1], np.array([5], np.uint64), np.array([4]))
    right = sums.compute(0, *ask).item()
    for o in range(page.shape[0]):
        for t in range(page.shape[1]):
            for i in range(inner):
                for bit in range(8):
                    page[o, t, i] ^= 1 << bit
                    assert sums.compute(0, *ask).item() != right
                    page[o, t, i] ^= 1 << bit
    assert sums.compute(0, *ask).item() == right


def test_checksum_depends_on_key_and_valid_tokens_only():
    view = simple_view()
    sums = BlockChecksums(view)
    keys = np.array([5, 6, 5], np.uint64)
    a, b, c = sums.compute(0, [1, 1, 1], keys, np.array([2, 2, 3])).tolist()
    assert len({a, b, c}) == 3
    page = view.pages(view.groups[0].regions[0])[1]
    page[:, 2:] += 1
    assert sums.compute(0, [1], keys[:1], np.array([2])).item() == a
    page[:, 1] += 1
    assert sums.compute(0, [1], keys[:1], np.array([2])).item() != a


def test_checksum_depends_on_number_of_zero_tokens():
    view = simple_view()
    view.pages(view.groups[0].regions[0]).zero_()
    sums = BlockChecksums(view).compute(0, [0, 0, 0], np.zeros(3, np.uint64), np.array([1, 2, 3])).tolist()
    assert len(set(sums)) == 3


def test_checksum_is_independent_of_memory_order():
    """The same logical bytes, heads first and tokens first, make the same sum."""
    outer, tokens, inner = 3, 4, 40
    logical = _random_memory(outer * tokens * inner, 3).view(outer, tokens, inner)
    views = []
    for tokens_first in (False, True):
        memory = (logical.transpose(0, 1) if tokens_first else logical).contiguous()
        strides = (inner, outer * inner) if tokens_first else (tokens * inner, inner)
        page = memory.numel()
        region = Region("a", memory.data_ptr(), page, outer, strides[0], 0, tokens, strides[1], inner)
        group = GroupView(0, tokens, "full", None, (region,))
        views.append(CacheView([group], 1, "cpu", [memory.untyped_storage()]))
    ask = ([0], np.array([1], np.uint64), np.array([3]))
    a, b = (BlockChecksums(v).compute(0, *ask).item() for v in views)
    assert a == b


def test_checksum_of_pages_larger_than_a_tile_equals_reference(kernel_device):
    view = simple_view(inner=64 << 10, tokens=2, outer=3, blocks=2)
    ask = ([1, 0], np.array([1, 2], np.uint64), [2, 1])
    right = expected(view, *ask)
    assert BlockChecksums(view).compute(0, *ask).numpy().view(np.uint64).tolist() == right
    assert kernel_sums(view, *ask, kernel_device, programs=32) == right


def test_checksum_is_independent_of_number_of_programs(kernel_device):
    view = simple_view(inner=4096, tokens=8, outer=2, blocks=5)
    ask = (list(range(5)), np.arange(5, dtype=np.uint64), [8] * 5)
    assert len({tuple(kernel_sums(view, *ask, kernel_device, programs=p)) for p in (1, 2, 7, 32)}) == 1


def test_checksum_of_no_blocks_is_empty():
    assert BlockChecksums(simple_view()).compute(0, [], np.empty(0, np.uint64), np.empty(0)).shape == (0,)


@pytest.mark.parametrize(
    "ids, keys, valid", [([3], [1], [4]), ([-1], [1], [4]), ([0, 1], [1], [4, 4]), ([0], [1], [4, 4])]
)
def test_checksum_of_missing_blocks_is_refused(ids, keys, valid):
    with pytest.raises(ValueError):
        BlockChecksums(simple_view()).compute(0, ids, np.array(keys, np.uint64), np.array(valid))


def test_checksum_of_cells_not_word_sized_is_refused():
    with pytest.raises(ValueError, match="6 bytes"):
        checksum.word_bytes(6)


def test_checksum_launch_without_triton_raises(monkeypatch):
    monkeypatch.setattr(checksum, "triton", None)
    with pytest.raises(RuntimeError, match="need Triton"):
        checksum.launch(torch.zeros(1), torch.zeros(1, 4), torch.zeros(1, 11), [])


@pytest.mark.skipif(checksum.triton is None, reason="Triton is not installed")
def test_checksum_warm_up_compiles_without_vllm_compile_hook(monkeypatch):
    runtime, compiled = checksum.triton.knobs.runtime, []
    monkeypatch.setattr(runtime, "jit_post_compile_hook", lambda **_: pytest.fail("vLLM counts it as a stall"))
    checksums = BlockChecksums(simple_view())
    checksums._view = SimpleNamespace(device=torch.device("cuda"))
    checksums._groups = [SimpleNamespace(compute=lambda *ask: compiled.append(runtime.jit_post_compile_hook))]
    checksums.warm_up()
    assert compiled == [None]
