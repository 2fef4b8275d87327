"""Which ranks hold the same KV heads, of models whose layers have different numbers of them."""

import itertools
from types import SimpleNamespace

import pytest

from vllm_kvtier.cache_kinds import Split
from vllm_kvtier.vllm_compat.worker_info import heads, shards
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


def config_of(name, size, draft=None):
    total, text, _ = MODELS[name]

    def model(text):
        return SimpleNamespace(
            hf_text_config=SimpleNamespace(to_dict=lambda: text), get_total_num_kv_heads=lambda: total
        )

    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=size), model_config=model(text),
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
