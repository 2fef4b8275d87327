"""What the numbers of a token and head mean in vLLM's KV caches: which of them are K and V, latent and rotary part.

Known for the attention backends of ``layout`` whose pages the strides describe, and for the CPU kernels. In 0.25.1
K and V are apart ([2, ...] or [B, 2, ...]) or one behind the other in a cell (different head sizes, CPU); from 0.29 on
always the latter. MLA caches hold ``kv_lora_rank`` numbers of the latent, then ``qk_rope_head_dim`` of the rotary part.
Whatever else a cache may be has no fields here and is kept byte for byte: quantized formats with or without scales,
compressed states, heads padded or split into slots of their own.
"""

from typing import Any

import torch

from vllm_kvtier.vllm_compat.probe import Feature, granted, value
from vllm_kvtier.wire.geometry import Field

ATTENTION = frozenset(
    {
        "CPU_ATTN",
        "FLASH_ATTN",
        "FLASH_ATTN_DIFFKV",
        "FLASHINFER",
        "FLEX_ATTENTION",
        "TRITON_ATTN",
        "TRITON_ATTN_DIFFKV",
    }
)
MLA = frozenset(
    {
        "CPU_MLA",
        "CUTLASS_MLA",
        "FLASH_ATTN_MLA",
        "FLASHINFER_MLA",
        "FLASHMLA",
        "TOKENSPEED_MLA",
        "TRITON_MLA",
    }
)
# By exact name, as in ``layout``: a subclass may mean something else.
_ATTENTION_SPECS = frozenset({"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"})
_DTYPES = (torch.bfloat16, torch.float16)


def token_fields(tensor: torch.Tensor, spec: Any, backend: str, module: Any) -> tuple[Field, ...]:
    """The fields of one token and head, K's and V's together even where they lie apart; () if not known.

    ``spec``: the layer's KVCacheSpec; ``module``: its attention layer, None if unknown. Whether the numbers fill the
    cells remains to be checked.
    """
    if tensor.dtype not in _DTYPES or spec.dtype != tensor.dtype:
        return ()
    if spec.kv_quant_mode.name != "NONE" or not granted(Feature.CODECS):
        return ()
    if any(value(spec, f"AttentionSpec.{name}") is not None for name in ("state_content_bytes", "num_head_slots")):
        return ()
    kind = type(spec).__name__
    if value(spec, "AttentionSpec.tokens_per_state") != 1:
        return ()
    if kind == "MLAAttentionSpec" and value(spec, "MLAAttentionSpec.compress_ratio") != 1:
        return ()
    if backend in ATTENTION and kind in _ATTENTION_SPECS:
        size = spec.head_size
        return (Field("k", size), Field("v", getattr(spec, "head_size_v", None) or size))
    if backend in MLA and kind == "MLAAttentionSpec":
        latent, rope = (getattr(module, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
        if isinstance(latent, int) and isinstance(rope, int) and latent > 0 <= rope:
            return (Field("latent", latent), Field("rope", rope)) if rope else (Field("latent", latent),)
    return ()
