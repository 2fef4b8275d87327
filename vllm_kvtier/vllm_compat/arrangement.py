"""How vLLM's CPU attention kernels lay K and V within a head's page, learnt from the kernel that writes them.

The arrangement depends on the vector unit, on the dtype and on vLLM's version (K is transposed, with AMX in pairs of
numbers; V is cut into columns), and changes without a word. So vLLM's own operator is asked: it writes numbers into
a scratch page, and each number says which one it is.
"""

import functools

import torch

from vllm_kvtier.logs import get_logger
from vllm_kvtier.vllm_compat.probe import Feature, granted

logger = get_logger("vllm.kvtier.layout")

# Integers below 2^8 are exact in bfloat16 and float16: a number's index is learnt so many bits at a time.
_BITS = 8


@functools.cache
def cpu_arrangement(isa: str, dtype: torch.dtype, tokens: int, head_size: int) -> torch.Tensor | None:
    """int32 [2 * tokens * head_size]: where each number lies in a head's page of ``tokens`` tokens, in the logical
    order (K or V, token, number); None if this vLLM does not say, or its page is not just a permutation.

    ``isa``: as vLLM names the kernels of a layer. Only to be asked of kernels that this machine runs.
    """
    count = 2 * tokens * head_size
    index = torch.arange(count)
    found = torch.zeros(count, dtype=torch.int64)
    if not granted(Feature.CPU_CODECS):
        return None
    try:
        for shift in range(0, max(1, (count - 1).bit_length()), _BITS):
            code = index >> shift & (1 << _BITS) - 1
            found |= _written(isa, code.to(dtype), tokens, head_size) << shift
    except Exception as e:  # whatever a version's operator raises costs the codecs, not the whole connector
        logger.info("kvtier: KV pages of the CPU kernels (%s) are kept as they are, codecs do not apply: %s", isa, e)
        return None
    if not torch.equal(found.sort().values, index):
        logger.info("kvtier: KV pages of the CPU kernels (%s) hold more than numbers: codecs do not apply", isa)
        return None
    arrangement = torch.empty(count, dtype=torch.int32)
    arrangement[found] = index.int()
    return arrangement


def _written(isa: str, code: torch.Tensor, tokens: int, head_size: int) -> torch.Tensor:
    """int64 [numbers of a page]: a head's page after ``code`` was written as its K, then its V.

    Raises ValueError if the two heads of a block differ, or another block changed: then pages are not what they seem.
    """
    from vllm import _custom_ops as ops

    heads, half = 2, tokens * head_size
    pages = torch.zeros(2, heads, 2 * tokens, head_size, dtype=code.dtype)
    keys, values = pages.chunk(2, dim=2)  # as the backend does, whatever lies where
    k, v = (side.view(tokens, 1, head_size).repeat(1, heads, 1) for side in (code[:half], code[half:]))
    slots = torch.arange(tokens, 2 * tokens)  # of the second block
    ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto")
    if pages[0].any() or not torch.equal(pages[1, 0], pages[1, 1]):
        raise ValueError("a token's numbers lie outside its head's page")
    return pages[1, 0].flatten().to(torch.int64)
