"""``CudaCopier`` with groups that a codec encodes: beside others that stay raw, on fakes and on a GPU."""

import copier_fakes as fakes
import msgspec
import numpy as np
import pytest
import torch
from test_cuda_copier import content, faked, make_pool
from test_cuda_copier import make_view as make_raw_view
from test_encoded_pages import lines_of, make_view, same

from vllm_kvtier import codecs
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.wire.slots import PAGE, slot_layout
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.copy import cuda_copier
from vllm_kvtier.worker.copy.part_tables import encoded_lines
from vllm_kvtier.worker.tuning import Choice, fixed

# As in test_coded.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

replace = msgspec.structs.replace
LOSSY = [name for name in codecs.names() if codecs.get(name).lossy]
SMALL = Choice("staged", programs=2, warps=4, piece_bytes=2048, ring=2, dma_streams=2, numbers=1024)


def two_groups(device, blocks: int) -> CacheView:
    """A group that a codec can keep, and one whose bytes mean nothing to it."""
    a = make_view(device, blocks=blocks, tokens=2, layers=2, fields=(("k", 64), ("v", 128)))
    b = make_raw_view(device, blocks=blocks, layers=2)
    return CacheView([a.groups[0], replace(b.groups[0], group=1)], blocks, device, [*a._storages, *b._storages])


def round_trip(copier, view, layouts, offsets, pool, after) -> None:
    group, n = view.groups[0], 5
    sources, targets = np.array([3, 0, 4, 1, 2]), np.array([4, 3, 2, 1, 0])
    keys = np.arange(n, dtype=np.uint64) + 9
    slots = np.array([13, 1, 10, 4, 7])
    before = [[lines_of(view, part, b).clone() for part in layouts[0].encoded] for b in range(view.num_blocks)]
    raw = CacheView([replace(view.groups[1], group=0)], view.num_blocks, view.device, view._storages)
    pages = [content(raw, b) for b in range(view.num_blocks)]
    for number in (0, 1):
        copier.store(number, sources, keys, slots + 24 * number, after).wait()
    at = slots[2] * PAGE + offsets[0] + layouts[0].encoded[-1].scale_offset
    pool[at] ^= 1
    load = copier.load(0, targets, keys, slots, after)
    load.wait()
    assert np.flatnonzero(load.bad).tolist() == [2] and load.nbytes == n * layouts[0].nbytes
    other = copier.load(1, targets, keys, slots + 24)
    other.wait()
    assert not other.bad.any()
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        assert content(raw, target) == pages[source]
        for p, part in enumerate(layouts[0].encoded):
            lines = before[source][p]
            if i != 2:
                wanted = part.format.decode(*part.format.encode(lines), lines.dtype)
                assert same(lines_of(view, part, target), wanted), (i, part)
    for block in set(range(view.num_blocks)) - set(targets.tolist()):
        assert all(same(lines_of(view, p, block), b) for p, b in zip(layouts[0].encoded, before[block], strict=True))
    assert group is view.groups[0] and copier.idle()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("seed, way, share", [(0, "mixed", 0.5), (1, "staged", 0)])
def test_encoded_cuda_copier_round_trip_with_any_stream_order(name, seed, way, share):
    with faked(seed):
        view = two_groups(torch.device("cpu"), 6)
        layouts = [part_layout(g, codecs.choose(name, g)) for g in view.groups]
        assert layouts[0].encoded and not layouts[1].encoded
        parts = [slot_layout([x, x]) for x in layouts]
        assert max(p.pages for p in parts) <= 3
        pool, handle = make_pool(48)
        driver = fakes.FakeDriver()
        offsets = [p.part_offsets[1] for p in parts]
        # However raw blocks go, coded ones are staged.
        choice = replace(SMALL, way=way, ring=1 + seed % 2, programs=3, direct_programs=1, direct_share=share)
        tuning = fixed(choice, replace(choice, way="direct"))
        copier = cuda_copier.CudaCopier(view, handle, layouts, offsets, tuning, driver=driver)
        copier.register(0, 24 * PAGE)
        copier.register(24 * PAGE, 24 * PAGE)
        after = fakes.Event(driver)
        after.record(fakes.Stream())
        round_trip(copier, view, layouts, offsets, pool, after)
        copier.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOSSY)
def test_encoded_cuda_copier_round_trip_on_gpu(name, monkeypatch):
    device = torch.device("cuda", 0)
    view = two_groups(device, 200)
    layouts = [part_layout(g, codecs.choose(name, g)) for g in view.groups]
    pool, handle = make_pool(48)
    choice = Choice("staged", piece_bytes=1 << 20)
    copier = cuda_copier.CudaCopier(view, handle, layouts, [0, 0], fixed(choice, choice))
    monkeypatch.setattr(cuda_copier, "PIECE_BYTES", 24 * PAGE)
    copier.register(0, 24 * PAGE)
    copier.register(24 * PAGE, 24 * PAGE)
    copier.warm_up()
    after = torch.cuda.Event()
    after.record()
    for _ in range(2):
        round_trip(copier, view, layouts, [0, 0], pool, after)
    copier.close()


def test_encoded_lines_of_multi_token_cells_are_refused():
    view = make_view("cpu")
    group = view.groups[0]
    layout = part_layout(group, codecs.get("fp8"))
    regions = tuple(replace(r, cell_tokens=2) for r in group.regions)
    with pytest.raises(ValueError, match="cannot be encoded on a GPU"):
        encoded_lines(replace(group, regions=regions), layout)
