"""The fields of a token and head in vLLM's KV caches: K and V, or latent and rotary part.

Known for the attention backends of ``vllm_compat.layout.kv_layout`` whose pages are described by strides, and for the
CPU kernels. In 0.25.1 K and V are separate ([2, ...] or [B, 2, ...]) or consecutive in a cell (different head sizes,
CPU); from 0.29 on always the latter. MLA caches hold ``kv_lora_rank`` numbers of the latent, then ``qk_rope_head_dim``
of the rotary part. All other caches have no fields and are copied byte for byte: quantized formats with or without
scales, compressed states, heads that are padded or split into slots.
"""

from typing import Any

import torch

from vllm_kvtier import cache_kinds
from vllm_kvtier.cache_kinds import Contents
from vllm_kvtier.vllm_compat.probe.features import granted, value
from vllm_kvtier.vllm_compat.probe.row import Feature
from vllm_kvtier.wire.geometry import Field

# The last two are pairs of these, which share a cache: vLLM's choice for models that see pictures both ways (Gemma 3).
ATTENTION = frozenset("""
    CPU_ATTN FLASH_ATTN FLASH_ATTN_DIFFKV FLASHINFER FLEX_ATTENTION TRITON_ATTN TRITON_ATTN_DIFFKV
    TRITON_FLASH_ATTN TRITON_FLASHINFER
""".split())  # fmt: skip
MLA = frozenset(
    {"CPU_MLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "FLASHMLA", "TOKENSPEED_MLA", "TRITON_MLA"}
)
_DTYPES = (torch.bfloat16, torch.float16)


def token_fields(tensor: torch.Tensor, spec: Any, backend: str, module: Any) -> tuple[Field, ...]:
    """The fields of one token and head, K's and V's together even if they are in separate regions; () if unknown.

    ``spec``: the layer's KVCacheSpec; ``module``: its attention layer, None if unknown. The caller checks that the
    numbers fill the cells.
    """
    if tensor.dtype not in _DTYPES or spec.dtype != tensor.dtype:
        return ()
    if spec.kv_quant_mode.name != "NONE" or not granted(Feature.CODECS):
        return ()
    if any(value(spec, f"AttentionSpec.{name}") is not None for name in ("state_content_bytes", "num_head_slots")):
        return ()
    name = type(spec).__name__
    kind = cache_kinds.of_spec(name)
    contents = kind.specs[name] if kind is not None else Contents.OPAQUE
    if value(spec, "AttentionSpec.tokens_per_state") != 1:
        return ()
    if contents is Contents.LATENT and value(spec, "MLAAttentionSpec.compress_ratio") != 1:
        return ()
    if backend in ATTENTION and contents is Contents.KV:
        size = spec.head_size
        return (Field("k", size), Field("v", getattr(spec, "head_size_v", None) or size))
    if backend in MLA and contents is Contents.LATENT:
        latent, rope = (getattr(module, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
        if isinstance(latent, int) and isinstance(rope, int) and latent > 0 <= rope:
            return (Field("latent", latent), Field("rope", rope)) if rope else (Field("latent", latent),)
    return ()
