"""Recurrent states that tensor parallelism divides, read by an engine of another size: what lands equals the slices of
a plain model's state, as vLLM's own ranks would have them; spoilt states are found, and unknown divisions refused."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peer_caches import Rank, keys_of, pull_of
from pull_fakes import FakeTransport
from support import WITHOUT_SHRINKING
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Backend
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.transfer_jobs import ChecksumJob, PullJob
from vllm_kvtier.shapes.read_paths import ReadPath, reach
from vllm_kvtier.shapes.tp_mapping import map_source_ranks
from vllm_kvtier.vllm_compat.layout.state_layout import state_region
from vllm_kvtier.vllm_compat.worker_info import heads
from vllm_kvtier.wire.geometry import GroupView
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory
from vllm_kvtier.worker.nixl_pull.pulls import Pulls

BLOCKS, LAYERS, TOKENS, SIZES = 6, 2, 32, (1, 2, 4)
KINDS = (Backend.GDN_ATTN, Backend.MAMBA2, Backend.MAMBA1, Backend.SHORT_CONV)


class Model:
    """Of random sizes, each a multiple of four ranks. ``parts``: of the convolution's channels, of all ranks."""

    def __init__(self, seed: int, kind: Backend, groups: int = 0):
        self.kind, rng = kind, np.random.default_rng(seed)
        self.wide, self.kernel = 4 * 64 * int(rng.integers(1, 4)), int(rng.integers(2, 5))
        self.dtypes = (torch.bfloat16, torch.float32 if rng.integers(2) else torch.bfloat16)
        self.groups = groups or 4 * int(rng.integers(1, 3))
        self.heads, self.value, self.key = self.groups * int(rng.integers(1, 4)), *rng.choice([8, 16], 2).tolist()
        other, values = self.groups * self.key, self.heads * self.value
        self.parts = {Backend.GDN_ATTN: (other, other, values), Backend.MAMBA2: (values, other, other)}.get(
            kind, (self.wide,)
        )
        channels, rows = sum(self.parts), self.kernel - 1
        state = {Backend.MAMBA1: (self.wide, 16), Backend.SHORT_CONV: (0,)}.get(
            kind, (self.heads, self.value, self.key)
        )
        self.conv = [rng.integers(0, 256, (BLOCKS, rows, channels, 2), dtype=np.uint8) for _ in range(LAYERS)]
        size = self.dtypes[1].itemsize
        self.state = [rng.integers(0, 256, (BLOCKS, *state, size), dtype=np.uint8) for _ in range(LAYERS)]

    def shapes(self, size: int):
        """vLLM's, of a rank."""
        if self.kind is Backend.GDN_ATTN:
            return Shapes.gated_delta_net_state_shape(size, self.groups, self.heads, self.key, self.value, self.kernel)
        if self.kind is Backend.MAMBA2:
            return Shapes.mamba2_state_shape(
                size, self.heads * self.value, self.groups, self.heads, self.value, self.key, self.kernel
            )
        if self.kind is Backend.MAMBA1:
            return Shapes.mamba1_state_shape(size, self.wide, 16, self.kernel)
        return Shapes.short_conv_state_shape(size, self.wide, self.kernel)

    def pages(self, layer: int, size: int, position: int) -> np.ndarray:
        """uint8 [blocks, bytes]: what vLLM has on a rank."""
        parts, at = [], 0
        for width in self.parts:
            share = width // size
            parts.append(self.conv[layer][:, :, at + position * share : at + (position + 1) * share])
            at += width
        conv = np.concatenate(parts, axis=2)
        if mamba_utils.is_conv_state_dim_first():
            conv = conv.swapaxes(1, 2)
        share = self.state[layer].shape[1] // size
        state = self.state[layer][:, position * share : (position + 1) * share]
        return np.concatenate([conv.reshape(BLOCKS, -1), state.reshape(BLOCKS, -1)], axis=1)


def ranks_of(model: Model, size: int, filled: bool) -> list[Rank]:
    found = []
    shapes = model.shapes(size)
    spec = MambaSpec(block_size=TOKENS, shapes=shapes, dtypes=model.dtypes[: len(shapes)], mamba_type=model.kind)
    nbytes = sum(torch.Size(s).numel() * d.itemsize for s, d in zip(shapes, spec.dtypes, strict=True))
    parallel = SimpleNamespace(tensor_parallel_size=size)
    config = SimpleNamespace(
        parallel_config=parallel,
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 4, hf_text_config=SimpleNamespace(to_dict=dict)),
        speculative_config=None,
    )
    for number in range(size):
        memory = torch.zeros((LAYERS, BLOCKS, nbytes + 64), dtype=torch.int8)
        regions = []
        for layer in range(LAYERS):
            pages = memory[layer, :, :nbytes].view(BLOCKS, 1, 1, nbytes)
            regions.append(state_region(f"layers.{layer}", pages, spec, BLOCKS))
            if filled:
                pages[:, 0, 0] = torch.from_numpy(model.pages(layer, size, number).view(np.int8))
        groups = [GroupView(0, TOKENS, "mamba", None, tuple(regions))]
        view = CacheView(groups, BLOCKS, "cpu", [memory.untyped_storage()])
        rank = Rank(view, heads(config, groups, number), CacheMemory(view, host_buffer=False))
        rank.info = msgspec.structs.replace(rank.info, rank=number, agent=f"agent {number}", agent_metadata=b"metadata")
        if filled:
            ids = np.arange(BLOCKS)
            job = ChecksumJob(0, ids, keys_of(ids), np.full(BLOCKS, TOKENS, np.int32))
            assert rank.memory.compute_checksums([job], None).done()
        found.append(rank)
    return found


def read(rank: Rank, number: int, infos):
    """The pull of two states by the staged path."""
    pulls = Pulls(FakeTransport(), rank.memory, number, rank.heads)
    pulls.add_engine("s/1", infos)
    assert pulls.start(PullJob("r", "s/1", [pull_of([1, 4], [3, 2], TOKENS)], 20.0, staged=True)) is None
    for _ in range(100_000):
        if results := pulls.poll():
            return results[0]
    raise AssertionError("the pull does not end")


@pytest.fixture(params=["SD", "DS"])
def layout(request, monkeypatch):
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", request.param)
    mamba_utils.get_conv_state_layout.cache_clear()
    yield request.param
    mamba_utils.get_conv_state_layout.cache_clear()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("layout", ["SD", "DS"], indirect=True)
def test_states_of_other_tensor_parallel_sizes_equal_the_models_slices(layout, kind):
    @given(seed=st.integers(0, 1 << 32), sizes=st.sampled_from([(a, b) for a in SIZES for b in SIZES]))
    @settings(max_examples=12, phases=WITHOUT_SHRINKING, deadline=None)
    def check(seed, sizes):
        theirs, mine = sizes
        model, rng = Model(seed, kind), np.random.default_rng(seed)
        source, ours = ranks_of(model, theirs, True), ranks_of(model, mine, False)
        infos = [rank.info for rank in source]
        found = reach([rank.info for rank in ours], infos)
        assert ReadPath.STAGED in found.paths and ReadPath.MAPPED in found.paths, found.reason
        assert (ReadPath.DIRECT in found.paths) is (theirs == mine)
        spoilt = int(rng.integers(theirs)) if rng.integers(2) else None
        if spoilt is not None:
            region = source[spoilt].view.groups[0].regions[int(rng.integers(LAYERS))]
            page = source[spoilt].view.pages(region)[3, 0, 0]
            page[int(rng.integers(len(page)))] ^= 1 << int(rng.integers(8))
        for number, rank in enumerate(ours):
            result = read(rank, number, infos)
            read_ranks = [part.source.rank for part in map_source_ranks(rank.view.groups, rank.heads, number, infos)]
            assert len(read_ranks) == max(1, theirs // mine)
            bad = {1} if spoilt in read_ranks else set()
            assert result.bad_blocks == bad
            for layer, region in enumerate(rank.view.groups[0].regions):
                pages, want = rank.view.pages(region)[:, 0, 0].numpy(), model.pages(layer, mine, number)
                for block, of in {1: 3, 4: 2}.items():
                    if block not in bad:
                        assert np.array_equal(pages[block], want[of]), (number, layer, block)

    check()


@pytest.mark.parametrize("layout", ["SD"], indirect=True)
def test_states_with_repeated_groups_are_refused_at_another_size(layout):
    """Mamba 2 with one group: each rank has all of it."""
    model = Model(5, Backend.MAMBA2, groups=1)
    model.heads *= 4
    infos = {}
    for size in (1, 2):
        shapes = model.shapes(size)
        assert sum(shapes[0]) > 0
        infos[size] = [rank.info for rank in ranks_of(model, size, False)]
    assert "divided over ranks in a way" in reach(infos[1], infos[2]).reason
    assert "divided over ranks in a way" in reach(infos[2], infos[1]).reason
    assert ReadPath.DIRECT in reach(infos[2], infos[2]).paths


@pytest.mark.parametrize("layout", ["SD"], indirect=True)
@pytest.mark.parametrize("change", [
    dict(runs=()), dict(shares=3), dict(shares=-1), dict(shares=0), dict(runs=(("a", 8),) * 80),
    dict(runs=(("a", -8), ("b", 16))),
], ids=str)  # fmt: skip
def test_states_with_an_impossible_division_are_refused(layout, change):
    model = Model(7, Backend.GDN_ATTN)
    [ours] = ranks_of(model, 1, False)
    infos = [rank.info for rank in ranks_of(model, 2, False)]
    group = infos[1].groups[0]
    regions = tuple(msgspec.structs.replace(region, **change) for region in group.regions)
    infos[1] = msgspec.structs.replace(infos[1], groups=(msgspec.structs.replace(group, regions=regions),))
    with pytest.raises(KVTierError, match="layers.0"):
        map_source_ranks(ours.view.groups, ours.heads, 0, infos)


@pytest.mark.parametrize("layout", ["SD"], indirect=True)
@pytest.mark.parametrize("mine", [[[0, 1], [2, 3]], [[0], [1, 2], [3]], [[0, 1, 2, 3]]], ids=str)
@pytest.mark.parametrize("theirs", [[[0, 1], [2, 3]], [[0], [1, 2], [3]], [[0, 1, 2, 3]]], ids=str)
def test_states_are_read_from_other_stages_of_a_pipeline(layout, mine, theirs):
    """Also where a stage there has as many layers as one here, and other ones."""
    [rank] = ranks_of(Model(7, Backend.GDN_ATTN), 1, False)
    [group] = rank.info.groups

    def stages(layers):
        for number, names in enumerate(layers):
            regions = tuple(msgspec.structs.replace(group.regions[0], layer=f"layers.{name}") for name in names)
            yield msgspec.structs.replace(
                rank.info, rank=number, groups=(msgspec.structs.replace(group, regions=regions),)
            )

    infos = list(stages(theirs))
    for number, ours in enumerate(stages(mine)):
        parts = map_source_ranks(ours.groups, ours.heads, number, infos)
        found = {part.source.rank for part in parts}
        assert found == {n for n, names in enumerate(theirs) if set(names) & set(mine[number])}
