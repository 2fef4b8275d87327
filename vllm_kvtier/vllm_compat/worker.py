"""The worker process's place in the engine, and what its device can do."""

from typing import Any

import torch


def rank_in_engine() -> int:
    """Rank within one data-parallel replica: pipeline stage times tensor-parallel size plus tensor-parallel rank."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tp = get_tp_group()
    return get_pp_group().rank_in_group * tp.world_size + tp.rank_in_group


def wants_host_buffer(option: str, vllm_config: Any, device: torch.device) -> bool:
    """``auto`` follows vLLM's ``kv_buffer_device``: "cpu" on an accelerator means that peers cannot read it."""
    if option != "auto":
        return option == "always"
    return device.type != "cpu" and vllm_config.kv_transfer_config.kv_buffer_device == "cpu"


def cache_device(kv_caches: dict[str, Any]) -> torch.device:
    """The device of the KV cache; some layers hand over several tensors."""
    first = next(iter(kv_caches.values()))
    return (first if isinstance(first, torch.Tensor) else first[0]).device
