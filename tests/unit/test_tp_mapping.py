"""Which ranks of a source are read for what, for every pair of tensor-parallel and pipeline sizes, and refusals."""

import itertools
from types import SimpleNamespace

import msgspec
import pytest
from peer_caches import Group, Layout, head_range, held, ranks_of

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.shapes.tp_mapping import check_memory, map_source_ranks
from vllm_kvtier.vllm_compat.worker_info import heads
from vllm_kvtier.wire import messages as m

SIZES = (1, 2, 4, 8)


def infos(model, tp, stages=1, layout=None):
    return [rank.info for rank in ranks_of(model, 4, tp, stages, layout)]


def what(part):
    """[(group, layer, first head, heads, where)] that a part brings."""
    return [
        (g.group, r.source.layer, r.first_outer, r.outers, r.target_outer)
        for g in part.groups
        for r in g.regions
        if r.target is not None
    ]


@pytest.mark.parametrize("total", [1, 2, 4, 8])
@pytest.mark.parametrize("mine, theirs", list(itertools.product(SIZES, SIZES)))
def test_tp_mapping_each_head_comes_once(total, mine, theirs):
    model = (Group(heads=total), Group(layers=3, heads=1, kind="mla"))
    ours, others = ranks_of(model, 4, mine), infos(model, theirs)
    read = []
    for rank, us in enumerate(ours):
        parts = map_source_ranks(us.view.groups, us.heads, rank, others)
        read.append([part.source.rank for part in parts])
        for group, g in enumerate(model):
            found = {}
            for part in parts:
                span = head_range(g, theirs, part.source.rank)
                for each in (r for pg in part.groups if pg.group == group for r in pg.regions):
                    assert each.source in part.source.groups[group].regions
                    if each.target is None:
                        assert not each.outers
                        continue
                    assert each.target.layer == each.source.layer
                    for i in range(each.outers):
                        head = us.heads[group].first + each.target_outer + i
                        assert head == span.first + each.first_outer + i
                        assert (each.target.layer, head) not in found
                        found[each.target.layer, head] = part.source.rank
            wanted = range(us.heads[group].first, us.heads[group].first + held(g, mine))
            assert set(found) == {(r.layer, h) for r in us.view.groups[group].regions for h in wanted}
    for rank, sources in enumerate(read):
        # As few as have it, and where sizes are equal only the same rank.
        assert len(sources) <= max(1, min(theirs, total) // min(mine, total)) + 1
        if mine == theirs:
            assert sources == [rank]


def test_tp_mapping_covers_all_regions_and_marks_identical_layouts():
    model = (Group(layers=3, heads=4),)
    [one], two = ranks_of(model, 4), ranks_of(model, 4, 2)
    [part] = map_source_ranks(two[1].view.groups, two[1].heads, 1, [one.info])
    assert what(part) == [(0, f"g0.l{n}", 2, 2, 0) for n in range(3)] and not part.groups[0].identical_layout
    first, second = map_source_ranks(one.view.groups, one.heads, 0, [rank.info for rank in two])
    assert what(first) == [(0, f"g0.l{n}", 0, 2, 0) for n in range(3)] and not first.groups[0].identical_layout
    assert what(second) == [(0, f"g0.l{n}", 0, 2, 2) for n in range(3)]
    [same] = map_source_ranks(two[1].view.groups, two[1].heads, 1, [rank.info for rank in two])
    assert same.source.rank == 1 and same.groups[0].identical_layout
    other = infos(model, 2, layout=Layout(token=True, blocks=True, gap=(4, 8, 12)))
    [same] = map_source_ranks(two[1].view.groups, two[1].heads, 1, other)
    assert same.groups[0].identical_layout, "strides and the order of dimensions do not matter"
    assert [r.source for r in same.groups[0].regions] == list(other[1].groups[0].regions)


def test_tp_mapping_replicated_ranks_divide_the_readers():
    model = (Group(heads=1, kind="mla"),)
    theirs = infos(model, 4)
    for rank, us in enumerate(ranks_of(model, 4, 8)):
        [part] = map_source_ranks(us.view.groups, us.heads, rank, theirs)
        assert part.source.rank == rank % 4 and part.groups[0].identical_layout


@pytest.mark.parametrize("mine, theirs", list(itertools.product((1, 2, 4), (1, 2, 4))))
def test_tp_mapping_of_pipeline_stages(mine, theirs):
    model = (Group(layers=4, heads=2), Group(layers=4, heads=1, kind="mla"))
    others = infos(model, 2, theirs)
    for rank, us in enumerate(ranks_of(model, 4, 2, mine)):
        parts = map_source_ranks(us.view.groups, us.heads, rank, others)
        found = [each for part in parts for each in what(part)]
        names = [(group, layer) for group, layer, *_ in found]
        assert sorted(names) == sorted((g.group, r.layer) for g in us.view.groups for r in g.regions)
        for part in parts:
            for group in part.groups:
                regions = part.source.groups[group.group].regions
                assert tuple(r.source for r in group.regions) == regions, "the sum is over all of them"
                assert group.identical_layout == (mine == theirs)


def replaced(info, group=0, region=0, geometry=None, **changes):
    groups = list(info.groups)
    regions = list(groups[group].regions)
    if region is None:
        groups[group] = msgspec.structs.replace(groups[group], **changes)
    else:
        regions[region] = msgspec.structs.replace(regions[region], **changes)
        groups[group] = msgspec.structs.replace(groups[group], regions=tuple(regions))
    return msgspec.structs.replace(info, groups=tuple(groups))


def info_with(**changes):
    return lambda info: msgspec.structs.replace(info, **changes)


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda i: replaced(i, dtype="float16"), "dtype uint8 here, float16 there"),
        (lambda i: replaced(i, packing="cpu-amx-1"), "packed as tokens here, as cpu-amx-1 there"),
        (lambda i: replaced(i, tokens=2), "4 cells of 1 tokens a part of a block here, 2 cells"),
        (lambda i: replaced(i, cell_tokens=2), "4 cells of 2 tokens there"),
        (lambda i: replaced(i, inner=8), "16 bytes a token and head here, 8 there"),
        (lambda i: replaced(i, first_token=2), "no part of a block begins with token 0 there"),
        (lambda i: replaced(i, layer="other"), "layer g0.l0 of KV cache group 0 is on none of its ranks"),
        (lambda i: replaced(i, region=1, layer="g0.l0"), "two parts of KV cache group 0 on rank 0 have the same name"),
        (lambda i: replaced(i, region=None, block_tokens=6), "block size 4 here, 6 there .* multiple of the other"),
        (lambda i: replaced(i, region=None, block_tokens=0), "block size 4 here, 0 there .* multiple of the other"),
        (lambda i: replaced(i, region=None, block_tokens=1 << 30), "at most 64 times as large"),
        (lambda i: replaced(i, region=None, block_tokens=32), "pages there do not hold all tokens of a block"),
        (lambda i: replaced(i, region=None, kind="sliding", window=64), "full attention here, sliding attention"),
        (info_with(groups=()), "rank 0 has no KV cache group 0"),
        (info_with(heads=()), "does not name the heads"),
        (info_with(heads=(m.HeadRange(1, 4),)), "heads 1 to 4 of 4 of g0.l0 do not exist"),
        (info_with(heads=(m.HeadRange(4, 8),)), "only engines with the same tensor parallel size"),
        (info_with(heads=(m.HeadRange(0, 0),)), "only engines with the same tensor parallel size"),
        (lambda i: replaced(i, outer=3), "none of its ranks holds KV head 3"),
        (lambda i: info_with(geometry=msgspec.structs.replace(i.geometry, byte_order="big"))(i), "byte order"),
    ],
)
def test_tp_mapping_mismatch_raises_with_cause(spoil, words):
    model = (Group(heads=4),)
    [us], [them] = ranks_of(model, 4), infos(model, 1)
    assert map_source_ranks(us.view.groups, us.heads, 0, [them])
    with pytest.raises(KVTierError, match=words):
        map_source_ranks(us.view.groups, us.heads, 0, [spoil(them)])


@pytest.mark.parametrize("ranks", [[], [0, 0], [1]])
def test_tp_mapping_with_missing_ranks_is_refused(ranks):
    model = (Group(heads=4),)
    us = ranks_of(model, 4)[0]
    theirs = infos(model, 2)
    with pytest.raises(KVTierError, match="ranks|holds KV head 0, 1"):
        map_source_ranks(us.view.groups, us.heads, 0, [theirs[i] for i in ranks])


@pytest.mark.parametrize(
    "spoil",
    [
        info_with(shared=None),
        info_with(checksum_table_addr=0),
        info_with(num_blocks=0),
        info_with(num_blocks=1 << 30),
        lambda i: info_with(checksum_table_addr=i.checksum_table_addr + 8)(i),
        lambda i: info_with(checksum_table_addr=i.checksum_table_addr + 4, num_blocks=3)(i),
        lambda i: replaced(i, base=i.groups[0].regions[0].base - 64),
        lambda i: replaced(i, base=-8),
        lambda i: replaced(i, region=1, block_stride=1 << 20),
        lambda i: replaced(i, block_stride=-256),
        lambda i: replaced(i, outer_stride=0),
        lambda i: replaced(i, token_stride=0),
        lambda i: replaced(i, outer=1 << 40, outer_stride=0),
        lambda i: replaced(i, outer=0),
        lambda i: replaced(i, inner=1 << 30),
        lambda i: replaced(i, inner=6),
        lambda i: replaced(i, first_token=-1),
        lambda i: info_with(shared=msgspec.structs.replace(i.shared, spans=()))(i),
        lambda i: info_with(shared=msgspec.structs.replace(i.shared, spans=i.shared.spans[:1]))(i),
    ],
)
def test_tp_mapping_reads_only_shared_memory(spoil):
    """A kernel that reads elsewhere would cost the engine its device."""
    [info] = infos((Group(heads=4),), 1, layout=Layout(gap=(0, 0, 64)))
    check_memory(info)
    with pytest.raises(KVTierError):
        check_memory(spoil(info))


# -- what an engine says of its heads ----------------------------------------------------------------------------------


def config(size, total):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=size),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: total, hf_text_config=SimpleNamespace(to_dict=dict)
        ),
        speculative_config=None,
    )


@pytest.mark.parametrize("total", [1, 2, 8])
@pytest.mark.parametrize("size", SIZES)
def test_tp_mapping_heads_of_a_rank(size, total):
    model = (Group(heads=total), Group(heads=1, kind="mla"))
    for number, rank in enumerate(ranks_of(model, 4, size, 2)):
        found = heads(config(size, total), rank.view.groups, number)
        assert found == (head_range(model[0], size, number % size), m.HeadRange(0, 1))


def test_tp_mapping_layers_with_other_heads_need_equal_size():
    """Of 16 heads as the model says, 4 in these layers: at 16 ranks one head a page, as expected, and not the one."""
    total, model = 16, (Group(heads=4),)

    def engine(size):
        ranks = ranks_of(model, 4, size)
        said = [heads(config(size, total), rank.view.groups, n) for n, rank in enumerate(ranks)]
        return ranks, [
            msgspec.structs.replace(rank.info, heads=each) for rank, each in zip(ranks, said, strict=True)
        ]

    sizes = (1, 2, 4, 8, 16)
    engines = {size: engine(size) for size in sizes}
    for mine, theirs in itertools.product(sizes, sizes):
        (ours, said), (_, others) = engines[mine], engines[theirs]
        for number, us in enumerate(ours):
            if mine == theirs:
                [part] = map_source_ranks(us.view.groups, said[number].heads, number, others)
                assert part.source.rank == number
            else:
                with pytest.raises(KVTierError):
                    map_source_ranks(us.view.groups, said[number].heads, number, others)
