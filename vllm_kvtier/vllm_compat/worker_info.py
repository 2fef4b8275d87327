"""The worker's rank in the engine, the heads that it holds, and its device. On the model runner's thread."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from vllm_kvtier.cache_kinds import KINDS, Split
from vllm_kvtier.vllm_compat.layout.context_parallel import WHOLE, ContextShard
from vllm_kvtier.wire.geometry import GroupView
from vllm_kvtier.wire.messages import HeadRange


def rank_in_engine() -> int:
    """Rank within one data-parallel replica, in vLLM's order: pipeline stage, prefill context, tensor parallelism."""
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

    tp, pcp = get_tp_group(), get_pcp_group()
    return (get_pp_group().rank_in_group * pcp.world_size + pcp.rank_in_group) * tp.world_size + tp.rank_in_group


def spans_nodes(vllm_config: Any) -> bool:
    """Whether the engine's ranks may be on several nodes."""
    parallel = vllm_config.parallel_config
    return bool(parallel.nnodes > 1 or parallel.use_ray)


def from_first_rank(texts: tuple[str, ...]) -> tuple[str, ...]:
    """The first rank's ``texts``, on all ranks of this replica, which must all call it."""
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

    box = [texts]
    for group in (get_tp_group(), get_pcp_group(), get_pp_group()):  # in its stage, then from the first to the others
        torch.distributed.broadcast_object_list(box, src=group.first_rank, group=group.cpu_group)
    return box[0]


def ranks_on_node(world_size: int, device: torch.device) -> int:
    """Of an engine of ``world_size`` ranks. vLLM's workers see all GPUs that the engine has on their node."""
    return min(world_size, torch.cuda.device_count()) if device.type == "cuda" else world_size


def in_last_stage() -> bool:
    """Whether this rank is in the pipeline's last stage, which samples and drafts."""
    from vllm.distributed.parallel_state import get_pp_group

    return bool(get_pp_group().is_last_rank)


# Names of numbers of KV heads in models' configurations.
_KV_HEADS = re.compile(r"(kv|key_value)_.*heads?|n_head_kv|kv_n_heads|num_attention_groups|multi_query_group_num")
_NOT_NUMBERS = re.compile(r".*_(dims?|size)")


def _total_kv_heads(vllm_config: Any) -> int:
    """A number of KV heads by which ranks hold the same heads of every layer, or not. vLLM has one number for a model,
    but layers may have others (windows of MiMo and Step; a draft model): then the least common multiple of all that
    the configuration names."""
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    draft = speculative.draft_model_config if speculative is not None else None
    configs = [each.hf_text_config.to_dict() for each in (model, draft) if each is not None]
    named = [count for config in configs for count in _named_kv_heads(config, config.get("num_attention_heads"))]
    return math.lcm(max(1, model.get_total_num_kv_heads()), *named)


def _named_kv_heads(config: object, query_heads: int | None) -> Iterator[int]:
    if isinstance(config, list | tuple):
        for each in config:
            yield from _named_kv_heads(each, query_heads)
    for name, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, dict | list | tuple):
            yield from _named_kv_heads(value, query_heads)
        if name == "n_heads_in_group" and value and query_heads:  # Nemotron-NAS: query heads of a KV head
            yield query_heads // value
        elif _KV_HEADS.search(str(name)) and not _NOT_NUMBERS.fullmatch(str(name)):
            for count in value if isinstance(value, list | tuple) else [value]:
                if type(count) is int and count > 0:
                    yield count


def shards(vllm_config: Any, kinds: list[str], rank: int, shard: ContextShard = WHOLE) -> tuple[int, ...]:
    """By group (the name of its kind), the part of a block that this rank holds; ranks with equal parts hold equal
    bytes.

    Tensor parallelism divides KV heads over ranks and repeats them if there are more ranks than heads; every rank has
    MLA's latent. Each pipeline stage has layers of its own. Decode context parallelism (``shard``) divides tokens,
    prefill context parallelism nothing.
    """
    parallel = vllm_config.parallel_config
    size = parallel.tensor_parallel_size
    stage, position = rank // (size * parallel.prefill_context_parallel_size), rank % size
    heads = _total_kv_heads(vllm_config)
    copies = size // heads if size > heads and size % heads == 0 else 1
    part = {Split.HEADS: position // copies, Split.COPIES: 0, Split.RANKS: position}
    return tuple((stage * size + part[KINDS[kind].split]) * shard.size + shard.rank for kind in kinds)


def heads(vllm_config: Any, groups: Sequence[GroupView], rank: int) -> tuple[HeadRange, ...]:
    """By group, the KV heads in its pages on this rank; unknown (``of`` 0) if the number of heads in a page does not
    match the model's: several heads in one cell, or layers with a number of their own. Of states, their shares."""
    size = vllm_config.parallel_config.tensor_parallel_size
    position = rank % size
    total = _total_kv_heads(vllm_config)
    if total % size == 0:
        count, first = total // size, position * (total // size)
    elif size % total == 0:
        count, first = 1, position // (size // total)
    else:
        count, first = 0, 0
    # Unique for each rank of each size.
    unknown = HeadRange(size << 16 | position, 0)

    def of(group: GroupView) -> HeadRange:
        outer = {region.outer for region in group.regions}
        split = group.cache_kind.split
        if split is Split.COPIES:
            return HeadRange(0, 1) if outer == {1} else unknown
        if split is Split.RANKS:
            shares = group.regions[0].shares
            known = shares > 0 and all(region.shares == shares for region in group.regions)
            return HeadRange(position * shares, size * shares) if known else unknown
        return HeadRange(first, total) if split is Split.HEADS and outer == {count} else unknown

    return tuple(of(group) for group in groups)


def wants_host_buffer(option: str, vllm_config: Any, device: torch.device) -> bool:
    """``auto`` follows vLLM's ``kv_buffer_device``: "cpu" on an accelerator means that peers cannot read the device."""
    if option != "auto":
        return option == "always"
    return device.type != "cpu" and vllm_config.kv_transfer_config.kv_buffer_device == "cpu"


def cache_device(kv_caches: dict[str, Any]) -> torch.device:
    """The device of the KV cache; some layers have several tensors."""
    first = next(iter(kv_caches.values()))
    return (first if isinstance(first, torch.Tensor) else first[0]).device
