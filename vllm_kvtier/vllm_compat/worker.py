"""The worker process's place in the engine, and what its device can do."""

from typing import Any

import torch


def rank_in_engine() -> int:
    """Rank within one data-parallel replica: pipeline stage times tensor-parallel size plus tensor-parallel rank."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tp = get_tp_group()
    return get_pp_group().rank_in_group * tp.world_size + tp.rank_in_group


def shards(vllm_config: Any, kinds: list[str], rank: int) -> tuple[int, ...]:
    """By group (its kind of attention), which part of a block this rank holds; ranks with the same one hold the same.

    Tensor parallelism divides KV heads over ranks and repeats them where there are more ranks than heads; MLA's
    latent is on every rank. Each pipeline stage has layers of its own.
    """
    size = vllm_config.parallel_config.tensor_parallel_size
    stage, place = divmod(rank, size)
    heads = max(1, vllm_config.model_config.get_total_num_kv_heads())
    copies = size // heads if size > heads and size % heads == 0 else 1
    return tuple(stage * size + (0 if "mla" in kind else place // copies) for kind in kinds)


def wants_host_buffer(option: str, vllm_config: Any, device: torch.device) -> bool:
    """``auto`` follows vLLM's ``kv_buffer_device``: "cpu" on an accelerator means that peers cannot read it."""
    if option != "auto":
        return option == "always"
    return device.type != "cpu" and vllm_config.kv_transfer_config.kv_buffer_device == "cpu"


def cache_device(kv_caches: dict[str, Any]) -> torch.device:
    """The device of the KV cache; some layers hand over several tensors."""
    first = next(iter(kv_caches.values()))
    return (first if isinstance(first, torch.Tensor) else first[0]).device
