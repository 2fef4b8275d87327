"""``CudaCopier``: its streams and events on fakes and in the interpreter, and the whole of it on a GPU.

Under compute-sanitizer, which then sees each tensor as an allocation of its own:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 7 python -m pytest -q \\
        tests/kernels -m gpu -k "every_size or alignment or (round_trip and 4096)"
"""

from contextlib import contextmanager
from types import SimpleNamespace

import copier_fakes as fakes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support import WITHOUT_SHRINKING

from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.wire.slots import PAGE, part_layout, slot_layout
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.copy import cuda_copier, part_tables, pinned_buffers
from vllm_kvtier.worker.copy.part_tables import adjacent
from vllm_kvtier.worker.tuning import Choice, fixed


def make_view(device, blocks=12, layers=3, heads=2, tokens=4, inner=48, seed=0) -> CacheView:
    page = heads * tokens * inner
    rng = np.random.default_rng(seed)
    memory = torch.from_numpy(rng.integers(0, 256, layers * blocks * page + 64, dtype=np.uint8)).to(device)
    base = -(-memory.data_ptr() // 64) * 64
    regions = tuple(
        Region(f"l{i}", base + i * blocks * page, page, heads, tokens * inner, 0, tokens, inner, inner)
        for i in range(layers)
    )
    return CacheView([GroupView(0, tokens, "full", None, regions)], blocks, device, [memory.untyped_storage()])


def content(view: CacheView, block: int) -> bytes:
    return b"".join(view.pages(r)[block].cpu().numpy().tobytes() for r in view.groups[0].regions)


def make_pool(pages: int):
    memory = np.zeros((pages + 1) * PAGE, dtype=np.uint8)
    address = -(-memory.ctypes.data // PAGE) * PAGE
    start = address - memory.ctypes.data
    return memory[start : start + pages * PAGE], (address, pages * PAGE, memory)


CHOICES = st.builds(
    Choice,
    way=st.sampled_from(["direct", "staged", "mixed"]),
    programs=st.integers(3, 5),
    warps=st.just(4),
    piece_bytes=st.sampled_from([1, 2000, 4096, 100_000]),
    ring=st.integers(1, 3),
    dma_streams=st.integers(1, 3),
    pause_bytes=st.sampled_from([1, 3000, 1 << 20]),
    direct_share=st.sampled_from([0, 0.3, 1]),
    direct_programs=st.integers(1, 2),
    on_model_stream=st.booleans(),
)


@contextmanager
def faked(seed):
    """Fakes in place of torch.cuda in the copier; the world of their streams."""
    if torch.cuda.is_available():
        pytest.skip("the interpreter is not in use here")
    world = fakes.World(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        real = cuda_copier.torch
        names = ("device", "empty", "uint8", "int64", "Tensor")
        patch.setattr(
            cuda_copier, "torch", SimpleNamespace(cuda=fakes.FakeCuda(world), **{n: getattr(real, n) for n in names})
        )
        patch.setattr(pinned_buffers, "pinned", lambda n: real.empty(n, dtype=real.uint8))
        patch.setattr(cuda_copier, "PIECE_BYTES", 24 * PAGE)
        patch.setattr(part_tables.page_copy, "PageCopier", fakes.later(part_tables.page_copy.PageCopier))
        patch.setattr(
            part_tables.encoded_pages, "EncodedPageCopier", fakes.later(part_tables.encoded_pages.EncodedPageCopier)
        )
        yield world


@given(CHOICES, CHOICES, st.integers(0, 2**32), st.data())
@settings(max_examples=60, phases=WITHOUT_SHRINKING)
def test_cuda_copier_round_trip_with_any_stream_order(store_choice, load_choice, seed, data):
    with faked(seed) as world:
        check_round_trip(world, data, store_choice, load_choice)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("load", [False, True])
def test_cuda_copier_failed_call_writes_nothing_after_it_raised(load, at):
    """Its blocks are another request's then: a scatter that comes later would overwrite what is computed there."""
    choice = Choice(way="staged", programs=2, warps=4, piece_bytes=1, ring=2, dma_streams=1)
    with faked(0) as world:
        view = make_view("cpu")
        layout = part_layout(view.groups[0])
        pool, handle = make_pool(40)
        driver = fakes.FakeDriver()
        offset = slot_layout([layout]).part_offsets[0]
        copier = cuda_copier.CudaCopier(view, handle, [layout], [offset], fixed(choice, choice), driver=driver)
        copier.register(0, 24 * PAGE)
        blocks, keys, slots = np.array([3, 5, 7]), np.arange(3, dtype=np.uint64), np.array([20, 4, 9])
        copier.store(0, blocks, keys, slots).wait()
        copy_batch, left = driver.copy_batch, [at]

        def failing(*arguments):
            left[0] -= 1
            if left[0] == -1:
                raise RuntimeError("cuMemcpyBatchAsync failed")
            copy_batch(*arguments)

        driver.copy_batch = failing
        after = fakes.Event(driver)
        after.record(fakes.Stream())
        with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync"):
            (copier.load if load else copier.store)(0, blocks + 1, keys, slots, after)
        assert not any(stream.queue for stream in world.streams[:-1])
        again = copier.load(0, blocks, keys, slots)  # the lane works as before
        again.wait()
        assert not (load and again.bad.any())
        copier.close()


def check_round_trip(world, data, store_choice, load_choice) -> None:
    view = make_view("cpu", layers=2)
    layout = part_layout(view.groups[0])
    slots = slot_layout([layout, layout])
    pool, handle = make_pool(40)
    tuning, driver = fixed(store_choice, load_choice), fakes.FakeDriver()
    copier = cuda_copier.CudaCopier(view, handle, [layout], [slots.part_offsets[1]], tuning, driver=driver)
    copier.register(0, 24 * PAGE)
    copier.register(24 * PAGE, 16 * PAGE)
    places = data.draw(st.permutations(range(1, 40 // slots.pages)))
    places = [p * slots.pages for p in places if (p * slots.pages < 24) == ((p + 1) * slots.pages <= 24)]
    n = data.draw(st.integers(1, 6))
    if data.draw(st.booleans()):
        places = sorted(places)
    sources = np.array(data.draw(st.lists(st.integers(0, 11), min_size=n, max_size=n, unique=True)))
    before = [content(view, b) for b in range(12)]
    keys = np.arange(n, dtype=np.uint64) + 3
    where = np.array(places[:n])
    after = fakes.Event(driver)
    ahead = fakes.Stream()
    after.record(ahead)
    cut = data.draw(st.integers(0, n))
    on = [data.draw(st.sampled_from([None, world.forward] if copier.on_model_stream else [None])) for _ in range(2)]
    stores = [
        copier.store(0, sources[:cut], keys[:cut], where[:cut], after, on[0]),
        copier.store(0, sources[cut:], keys[cut:], where[cut:], None, on[1]),
    ]
    for copy in stores:
        copy.wait()
    assert copier.idle() and all(c.bad is None for c in stores)
    targets = np.array(data.draw(st.permutations(range(12)))[:n])
    flipped = data.draw(st.integers(0, n - 1)) if data.draw(st.booleans()) else None
    if flipped is not None:
        at = where[flipped] * PAGE + slots.part_offsets[1] + data.draw(st.integers(0, layout.sum_offset + 7))
        pool[at] ^= 1 << data.draw(st.integers(0, 7))
    load = copier.load(0, targets, keys, where, after)
    assert not load.done() and load.bad is None
    load.make_stream_wait()
    seen = []
    world.enqueue(world.forward, ("work", lambda: seen.extend(content(view, b) for b in targets)))
    if data.draw(st.booleans()):
        load.wait()
    world.run(lambda: seen)
    load.wait()
    assert seen == [content(view, b) for b in targets], "the forward behind it saw all of it"
    assert load.done() and load.nbytes == n * layout.nbytes
    assert np.flatnonzero(load.bad).tolist() == ([] if flipped is None else [flipped])
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if i != flipped:
            assert content(view, target) == before[source]
    untouched = set(range(12)) - set(targets.tolist())
    assert all(content(view, b) == before[b] for b in untouched)
    copier.close()
    copier.close()
    assert list(driver.events) == [after.cuda_event] and not driver.registered


@given(
    st.integers(1, 3), st.integers(1, 3), st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=8), st.data()
)
@settings(max_examples=15, phases=WITHOUT_SHRINKING)
def test_cuda_copier_gathers_on_the_models_stream_only_if_it_need_not_wait(ring, dmas, calls, data):
    """Where it would, the store gathers on its own stream; the kernels of both may run at once."""
    with faked(data.draw(st.integers(0, 99))) as world:
        view = make_view("cpu", layers=1)
        layout = part_layout(view.groups[0])
        choice = Choice(way="staged", programs=2, warps=4, piece_bytes=layout.nbytes, ring=ring, dma_streams=dmas)
        choice = replace(choice, on_model_stream=True)
        pool, handle = make_pool(40)
        driver = fakes.FakeDriver()
        copier = cuda_copier.CudaCopier(view, handle, [layout], [0], fixed(choice, choice), driver=driver)
        copier.register(0, 40 * PAGE)
        slots, stores, used = iter(range(1, 40)), [], 0
        for n, run in calls:
            free, before = copier.free_pieces(world.forward), len(world.forward.queue)
            driver.batches.clear()
            where = np.array([next(slots) for _ in range(n)])
            blocks = where % 12
            stores.append((where, blocks, copier.store(0, blocks, where.astype(np.uint64), where, None, world.forward)))
            added = world.forward.queue[before:]
            assert bool(added) == (n <= free), "one block is a piece"
            assert all(what in world.reached for kind, what in added if kind == "wait")
            assert not added or all(not isinstance(batch, tuple) or "pause" not in batch for batch in driver.batches)
            used += bool(added)
            if run:
                stores[data.draw(st.integers(0, len(stores) - 1))][2].wait()
        assert used or not calls or calls[0][0] > ring
        for where, blocks, copy in stores:
            copy.wait()
            load = copier.load(0, blocks, where.astype(np.uint64), where)
            load.wait()
            assert not load.bad.any()
        assert copier.free_pieces(world.forward) == ring
        copier.close()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("turn", [1, 2, 3, 100])
def test_cuda_copier_stores_pause_within_batch_limit_and_loads_never(turn, together):
    """In blocks: at most ``turn`` of them, or one, between two pauses, over all pieces and calls; loads never pause."""
    with faked(0):
        view = make_view("cpu")
        layout = part_layout(view.groups[0])
        choice = Choice(way="staged", programs=2, warps=4, piece_bytes=4 * layout.nbytes, ring=2)
        choice = replace(choice, pause_bytes=turn * layout.nbytes + 7)
        _, handle = make_pool(40)
        driver = fakes.FakeDriver()
        copier = cuda_copier.CudaCopier(view, handle, [layout], [0], fixed(choice, choice), driver=driver)
        copier.register(0, 40 * PAGE)
        slots = np.arange(1, 11) if together else np.array([3, 30, 9, 1, 22, 14, 7, 35, 18, 26])
        blocks, keys = np.arange(10), np.arange(10, dtype=np.uint64)
        copier.store(0, blocks[:7], keys[:7], slots[:7]).wait()
        copier.store(0, blocks[7:], keys[7:], slots[7:]).wait()
        counts = [0]
        for batch in driver.batches:
            match batch:
                case ("pause", _):
                    counts.append(0)
                case (_, height):
                    counts[-1] += height
                case count:
                    counts[-1] += count
        assert sum(counts) == 10 and counts[0] == 0 and max(counts) == min(turn, 10)
        assert counts[1:-1] == [turn] * (len(counts) - 2)
        driver.batches.clear()
        load = copier.load(0, blocks, keys, slots)
        load.wait()
        assert not load.bad.any() and not any("pause" in batch for batch in driver.batches if isinstance(batch, tuple))
        copier.close()


def test_cuda_copier_joins_adjacent_slots_into_one_copy():
    edges = np.zeros(6, dtype=np.int64)
    slots = np.array([4096, 8192, 12288, 40960, 45056, 90112])
    single, runs, distance = adjacent(slots, edges, 4000)
    assert (single.tolist(), runs, distance) == ([5], [(0, 3), (3, 2)], 4096)
    edges[1:] = 1
    single, runs, _ = adjacent(slots, edges, 4000)
    assert (single.tolist(), runs) == ([0, 5], [(1, 2), (3, 2)])
    assert adjacent(slots[::-1], edges, 4000) == (None, [], 0)
    assert adjacent(slots[:1], edges[:1], 4000) == (None, [], 0)


GPU_CHOICES = [
    Choice("direct", 4),
    Choice("staged", 16, dma_streams=1, ring=2, piece_bytes=1 << 20),
    Choice("staged", 8, dma_streams=2, ring=3, piece_bytes=1 << 20),
    Choice("mixed", 16, dma_streams=4, ring=1, piece_bytes=2 << 20, direct_share=0.5),
]


@pytest.mark.gpu
@pytest.mark.parametrize("choice", GPU_CHOICES, ids=lambda c: f"{c.way}-{c.dma_streams}")
@pytest.mark.parametrize("inner, tokens", [(12, 4), (24, 4), (256, 16), (4096, 16)])
@pytest.mark.parametrize("together", [False, True], ids=["scattered", "adjacent"])
def test_cuda_copier_round_trip_on_gpu(choice, inner, tokens, together, monkeypatch):
    device = torch.device("cuda", 0)
    view = make_view(device, blocks=200, layers=5, heads=2, tokens=tokens, inner=inner)
    layout = part_layout(view.groups[0])
    parts = slot_layout([layout, layout])
    pool, handle = make_pool(parts.pages * 200)
    copier = cuda_copier.CudaCopier(view, handle, [layout], [parts.part_offsets[1]], fixed(choice, choice))
    half = len(pool) // PAGE // 2 // parts.pages * parts.pages * PAGE
    monkeypatch.setattr(cuda_copier, "PIECE_BYTES", half)
    copier.register(0, half)
    copier.register(half, len(pool) - half)
    copier.warm_up()
    rng = np.random.default_rng(3)
    n = 90
    blocks = rng.permutation(200)
    places = np.arange(1, 200) if together else rng.permutation(np.arange(1, 200))
    slots, keys = places[:n] * parts.pages, rng.integers(0, 1 << 63, n, dtype=np.uint64)
    before = [content(view, b) for b in blocks[:n]]
    after = torch.cuda.Event()
    after.record()
    stores = [copier.store(0, blocks[a : a + 30], keys[a : a + 30], slots[a : a + 30], after) for a in (0, 30, 60)]
    for copy in stores:
        copy.wait()
    pages = [view.pages(r).cpu().numpy() for r in view.groups[0].regions]
    for i in (0, n - 1):
        row = pool[slots[i] * PAGE + parts.part_offsets[1] :][: layout.nbytes]
        expected = np.zeros_like(row)
        from vllm_kvtier.kernels import page_copy_reference

        page_copy_reference.encode(
            [p[blocks[i]] for p in pages], int(keys[i]), expected, layout.region_offsets, layout.sum_offset
        )
        for r, offset in zip(view.groups[0].regions, layout.region_offsets, strict=True):
            assert (row[offset : offset + r.block_bytes] == expected[offset : offset + r.block_bytes]).all()
        assert (row[layout.sum_offset : layout.sum_offset + 8] == expected[layout.sum_offset :][:8]).all()
    at = slots[40] * PAGE + parts.part_offsets[1] + layout.region_offsets[-1] + 5
    pool[at] ^= 64
    index = torch.from_numpy(blocks[n : 2 * n].copy()).to(device)
    load = copier.load(0, blocks[n : 2 * n], keys, slots, after)
    load.make_stream_wait()
    behind = [view.pages(r)[index] for r in view.groups[0].regions]
    load.wait()
    assert np.flatnonzero(load.bad).tolist() == [40]
    assert all(torch.equal(b, view.pages(r)[index]) for b, r in zip(behind, view.groups[0].regions, strict=True))
    for i in range(n):
        if i != 40:
            assert content(view, blocks[n + i]) == before[i], i
    assert copier.idle()
    copier.close()


@pytest.mark.gpu
def test_cuda_copier_store_does_not_delay_token_copy():
    """The order that things end in, on the device: a copy of a few bytes to the host, enqueued behind a store of 1 GiB,
    is over long before it."""
    device = torch.device("cuda", 0)
    view = make_view(device, blocks=512, layers=8, heads=2, tokens=16, inner=8192)
    layout = part_layout(view.groups[0])
    pool, handle = make_pool(512 * slot_layout([layout]).pages)
    choice = Choice("staged", 8)
    copier = cuda_copier.CudaCopier(view, handle, [layout], [0], fixed(choice, choice))
    for start in range(0, len(pool), cuda_copier.PIECE_BYTES):
        copier.register(start, min(cuda_copier.PIECE_BYTES, len(pool) - start))
    copier.warm_up()
    token, there, stream = torch.ones(8, device=device), torch.zeros(8).pin_memory(), torch.cuda.Stream(device)
    slots = np.arange(1, 500) * slot_layout([layout]).pages
    per_piece = cuda_copier.PIECE_BYTES // PAGE
    slots = slots[slots // per_piece == (slots + slot_layout([layout]).pages - 1) // per_piece]
    blocks, keys = np.arange(len(slots)), np.arange(len(slots), dtype=np.uint64)
    copier.store(0, blocks, keys, slots).wait()  # the first time has its own costs
    torch.cuda.synchronize()
    seen = 0
    for _ in range(20):
        store = copier.store(0, blocks, keys, slots)
        with torch.cuda.stream(stream):
            there.copy_(token, non_blocking=True)
        stream.synchronize()
        seen += not store.done()
        store.wait()
    assert seen == 20
    copier.close()
