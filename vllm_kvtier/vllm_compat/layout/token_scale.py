"""Scales per token and head, which vLLM's Triton attention keeps in the cells of quantized caches
(``--kv-cache-dtype`` fp8, int8 or int4 with ``_per_token_head``).

A layer makes its views of them when it first writes or reads its cache, and then sets them to 1.0 in all blocks. In an
engine that is not warmed up (``--enforce-eager``, vLLM 0.31 on) that is in its first step, when blocks may have been
loaded.
"""

from collections.abc import Iterable
from typing import Any

import torch


def make_scale_views(layers: Iterable[str], vllm_config: Any) -> None:
    """Have these layers make their views now; a layer does it once. On the model runner's thread, when vLLM has given
    the layers their tensors and before any block is loaded."""
    modules = vllm_config.compilation_config.static_forward_context
    for name in layers:
        module = modules.get(name)
        impl = getattr(module, "impl", None)
        if getattr(impl, "_is_per_token_head_quant", False) and hasattr(impl, "_ensure_scale_caches"):
            impl._ensure_scale_caches(module.kv_cache)  # the tensor of its forward, which may have smaller blocks


def scale_fault(module: Any) -> str:
    """Why pages of an attention layer with such scales cannot be moved; "" if they can."""
    impl = getattr(module, "impl", None)
    made = [getattr(impl, name, None) for name in ("_k_scale_cache", "_v_scale_cache")]
    if any(view is None for view in made):
        return "its scales per token and head are not made yet: its first forward may set those of all blocks"
    if [_place(view) for view in made] != [_place(view) for view in _scale_views_in(module.kv_cache)]:
        # vLLM 0.25.1 places them as if each page had tokens before heads and no padding.
        return "its scales per token and head are not in the cells of their tokens and heads"
    return ""


def _scale_views_in(cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """K's and V's scales [B, N, H], each the last four bytes of a token and head."""
    words = cache.view(torch.float32)
    if cache.dim() == 5:  # vLLM 0.25: [B, 2, N, H, D]
        return words[..., -1].unbind(1)
    return words.unflatten(-1, (2, -1))[..., -1].transpose(1, 2).unbind(-1)  # [B, H, N, 2 * D]


def _place(view: torch.Tensor) -> tuple[int, torch.Size, list[int]]:
    strides = [stride for size, stride in zip(view.shape, view.stride(), strict=True) if size > 1]
    return view.data_ptr(), view.shape, strides
