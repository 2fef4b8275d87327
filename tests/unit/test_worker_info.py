"""Which ranks hold the same KV heads, of models whose layers have different numbers of them."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed import parallel_state

from vllm_kvtier.cache_kinds import Split
from vllm_kvtier.vllm_compat.layout.context_parallel import ContextShard, context_shard
from vllm_kvtier.vllm_compat.worker_info import heads, rank_in_engine, shards
from vllm_kvtier.wire.messages import HeadRange

MODELS = {
    "MiMo": (4, {"num_key_value_heads": 4, "swa_num_key_value_heads": 8, "kv_head_dim": 7}, [4, 8]),
    "Step": (4, {"num_attention_groups": 4, "attention_other_setting": {"num_attention_groups": 8}}, [4, 8]),
    "windows with fewer": (8, {"num_key_value_heads": 8, "num_global_key_value_heads": 4}, [8, 4]),
    "by layer": (2, {"num_kv_heads": [2, 8, 4, 0]}, [2, 8, 4]),
    "no multiples": (3, {"num_key_value_heads": 3, "swa_num_key_value_heads": 4}, [3, 4]),
    "groups of queries": (
        2,
        {"num_attention_heads": 64, "block_configs": [{"attention": {"n_heads_in_group": n}} for n in (32, 8, None)]},
        [2, 8],
    ),
    "alike": (2, {"num_key_value_heads": 2, "kv_lora_rank": 512, "use_kv_heads": True, "id2label": {0: "a"}}, [2]),
}


def config_of(name, size, draft=None, pcp=1):
    total, text, _ = MODELS[name]

    def model(text):
        return SimpleNamespace(
            hf_text_config=SimpleNamespace(to_dict=lambda: text), get_total_num_kv_heads=lambda: total
        )

    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=size, prefill_context_parallel_size=pcp),
        model_config=model(text),
        speculative_config=SimpleNamespace(draft_model_config=model(draft)) if draft else None,
    )  # fmt: skip


def held(rank, size, total):
    """As vLLM's QKVParallelLinear divides them."""
    count = max(1, total // size)
    first = rank * count if total >= size else rank // (size // total)
    return range(first, first + count)


SIZES = {(3, 4): (12, 24)}


@pytest.mark.parametrize("name", MODELS)
def test_ranks_that_share_a_part_hold_the_same_heads_of_every_layer(name):
    """Only one of them stores it, and the others load it; its checksum is right for all."""
    counts = MODELS[name][2]
    for size in SIZES.get(tuple(counts), (1, 2, 4, 8, 16)):
        config = config_of(name, size)
        parts = [shards(config, ["full", "sliding", "mla", "mamba"], rank) for rank in range(size)]
        for one, other in itertools.combinations(range(size), 2):
            same = all(held(one, size, n) == held(other, size, n) for n in counts)
            for each in range(2):
                assert same or parts[one][each] != parts[other][each]
        assert all(part[2:] == (0, rank) for rank, part in enumerate(parts))
    # What all layers repeat is kept once.
    assert [shards(config_of("alike", 8), ["full"], rank) for rank in range(8)] == [(n // 4,) for n in range(8)]
    config = config_of("alike", 8, {"num_key_value_heads": 4})
    assert [shards(config, ["full"], rank) for rank in range(8)] == [(n // 2,) for n in range(8)], "a draft model's too"


@pytest.mark.parametrize("name", MODELS)
def test_heads_that_ranks_name_are_those_that_they_hold(name):
    """Whether of this engine or of another, of another size."""
    counts = MODELS[name][2]
    sizes = SIZES.get(tuple(counts), (1, 2, 4, 8, 16))
    for count in counts:
        said: dict[tuple[HeadRange, int], list] = {}
        for size in sizes:
            for rank in range(size):
                held_here = held(rank, size, count)
                split = SimpleNamespace(split=Split.HEADS)
                group = SimpleNamespace(regions=[SimpleNamespace(outer=len(held_here))], cache_kind=split)
                [named] = heads(config_of(name, size), [group], rank)
                if named.of:
                    said.setdefault((named, len(held_here)), []).append(held_here)
        assert all(each == ranges[0] for ranges in said.values() for each in ranges)


@pytest.mark.parametrize("stages, pcp, tp, dcp", [(1, 1, 4, 2), (2, 1, 8, 4), (2, 2, 2, 1), (1, 2, 1, 2), (2, 2, 2, 4)])
def test_ranks_of_context_parallelism_are_vllms_and_share_a_part_if_they_hold_the_same(
    monkeypatch, stages, pcp, tp, dcp
):
    """vLLM's ``initialize_model_parallel``: ranks in the order of stage, PCP, TP; DCP spans PCP first, then TP."""
    order = torch.arange(stages * pcp * tp).reshape(stages, pcp, tp)
    rows = {
        "tp": order.reshape(-1, tp), "pp": order.permute(1, 2, 0).reshape(-1, stages),
        "pcp": order.transpose(1, 2).reshape(-1, pcp), "dcp": order.transpose(1, 2).reshape(-1, dcp),
    }  # fmt: skip
    config, held_by, parts = config_of("alike", tp, pcp=pcp), {}, {}
    config.parallel_config.decode_context_parallel_size = dcp
    config.parallel_config.cp_kv_cache_interleave_size = 16
    for rank in range(order.numel()):
        for name, groups in rows.items():
            at = (groups == rank).nonzero()[0, 1].item()
            group = SimpleNamespace(world_size=groups.shape[1], rank_in_group=at)
            monkeypatch.setattr(parallel_state, f"get_{name}_group", lambda group=group: group)
        assert rank_in_engine() == rank
        shard = context_shard(config.parallel_config)
        tokens = (rows["dcp"] == rank).nonzero()[0, 1].item()
        assert shard == (ContextShard(dcp, tokens, 16) if dcp > 1 else ContextShard())
        parts[rank] = shards(config, ["full", "mla"], rank, shard)
        stage, position = rank // (pcp * tp), rank % tp
        held_by[rank] = (stage, tuple(held(position, tp, 2)), tokens), (stage, tokens)
    for one, other in itertools.combinations(parts, 2):
        for kind in range(2):
            same = held_by[one][kind] == held_by[other][kind]
            assert same == (parts[one][kind] == parts[other][kind]), (one, other)
