"""By which paths one engine's ranks can read another's, and the refusals."""

import msgspec
import pytest
from peer_caches import Group, Layout, ranks_of

from vllm_kvtier.shapes.read_paths import ReadPath, direct_source, reach
from vllm_kvtier.wire import messages as m

DIRECT, MAPPED, STAGED = ReadPath
MODEL = (Group(heads=4),)
TOKENS_FIRST = Layout(token=True)


def infos(tp=1, stages=1, model=MODEL, layout=None, **changes):
    made = [rank.info for rank in ranks_of(model, 4, tp, stages, layout)]
    return [msgspec.structs.replace(i, **{"agent": f"agent {i.rank}", **changes}) for i in made]


def elsewhere(ranks):
    return [msgspec.structs.replace(i, shared=msgspec.structs.replace(i.shared, node="another")) for i in ranks]


@pytest.mark.parametrize(
    "ours, theirs, paths, reason",
    [
        (infos(2), infos(2), {DIRECT, MAPPED, STAGED}, ""),
        (infos(2), infos(1), {MAPPED, STAGED}, "2 KV heads (or parts of a page) here, 4 there"),
        (infos(1), infos(4), {MAPPED, STAGED}, "4 KV heads (or parts of a page) here, 1 there"),
        (infos(1), infos(1, layout=TOKENS_FIRST), {MAPPED, STAGED}, "tokens before heads there"),
        (infos(2), infos(1, 2), {MAPPED, STAGED}, "2 layers here, 1 there"),
        (infos(2), elsewhere(infos(1)), {STAGED}, "2 KV heads"),
        (infos(2), elsewhere(infos(2)), {DIRECT, STAGED}, ""),
        (infos(2), infos(1, shared=None), {STAGED}, "2 KV heads"),
        (infos(2, shared=None), infos(1), {STAGED}, "2 KV heads"),
        (infos(2), infos(1, agent=""), {MAPPED}, "2 KV heads"),
        (infos(2), infos(2, agent=""), {MAPPED}, "NIXL does not work there"),
        (infos(2, agent=""), elsewhere(infos(1)), set(), "NIXL does not work here"),
        (infos(2, heads=()), infos(2), {DIRECT}, ""),  # of an engine that does not name its heads
        (infos(2), infos(1, heads=()), set(), "tensor or pipeline parallelism differs: 2 ranks here, 1 there"),
        ([], infos(1), set(), "0 ranks here, 1 there"),
    ],
)  # fmt: skip
def test_read_paths_of_two_shapes(ours, theirs, paths, reason):
    found = reach(ours, theirs)
    assert found.paths == paths and reason in found.reason and bool(found.reason) == bool(reason)


@pytest.mark.parametrize("theirs, ours", [(1, 2), (4, 1), (2, 4)])
def test_read_paths_repeated_heads_are_read_directly(theirs, ours):
    """MLA's latent, or one KV head for all: what a rank needs lies there as here."""
    model = (Group(heads=1, kind="mla"), Group(heads=1))
    there = infos(theirs, model=model)
    assert reach(infos(ours, model=model), there).paths == {DIRECT, MAPPED, STAGED}
    for info in infos(ours, model=model):
        assert direct_source(info.rank, info.geometry, info.heads, there).rank == info.rank % theirs


def packed(ranks, packing):
    def changed(info):
        groups = tuple(
            msgspec.structs.replace(g, regions=tuple(msgspec.structs.replace(r, packing=packing) for r in g.regions))
            for g in info.groups
        )
        regions = info.geometry.groups
        geometry = tuple(
            msgspec.structs.replace(g, regions=tuple(msgspec.structs.replace(r, packing=packing) for r in g.regions))
            for g in regions
        )
        return msgspec.structs.replace(
            info, groups=groups, geometry=msgspec.structs.replace(info.geometry, groups=geometry)
        )

    return [changed(info) for info in ranks]


@pytest.mark.parametrize(
    "ours, theirs, words",
    [
        (infos(1), packed(infos(2), "cpu-amx-1"), "layer g0.l0: pages packed as tokens here, as cpu-amx-1 there"),
        (infos(1), infos(2, model=(Group(heads=4, inner=32),)), "16 bytes a token and head here, 32 there"),
        (infos(1), infos(2, model=(Group(heads=4, cells=6),)), "block size 4 here, 6 there"),
        (infos(1), infos(2, model=(Group(heads=4), Group())), "1 KV cache groups here, 2 there"),
        (infos(1), infos(2, model=(Group(heads=4, layers=1),)), "layer g0.l1 of KV cache group 0 is on none"),
        (infos(1), infos(2, heads=(m.HeadRange(7, 0),)), "only engines with the same tensor parallel size"),
        (packed(infos(2), "encoded 1a"), packed(infos(1), "encoded 2b"), "1 there (with a wire_codec"),
        (packed(infos(1), "encoded 1a"), packed(infos(1), "encoded 2b"), "as encoded 2b there (with a wire_codec"),
    ],
)  # fmt: skip
def test_read_paths_refuse_what_cannot_be_translated_with_cause(ours, theirs, words):
    found = reach(ours, theirs)
    assert not found.paths and words in found.reason


def test_read_paths_encoded_rows_are_read_by_equal_ranks_only():
    """A row says neither its heads nor its layers: equal rows of two stages have other content."""
    rows = packed(infos(2), "encoded 1a")
    assert reach(rows, rows).paths == {DIRECT}
    assert not reach(rows, rows[:1]).paths


@pytest.mark.parametrize("device, ours, by_kernels", [("GPU-1", 1, True), ("", 1, False), ("GPU-1", 2, True)])
def test_read_paths_mapped_memory_of_gpus_is_copied_by_kernels(device, ours, by_kernels):
    def on(ranks):
        return [msgspec.structs.replace(i, shared=msgspec.structs.replace(i.shared, device=device)) for i in ranks]

    assert reach(on(infos(ours)), on(infos(1))).by_kernels is by_kernels
    assert not reach(on(infos(ours)), elsewhere(on(infos(1)))).by_kernels
