"""The order of K and V within a head's page of vLLM's CPU attention kernels, found by calling the kernel that writes
it.

The order depends on the vector unit, the dtype and vLLM's version (K is transposed, with AMX in pairs of numbers; V is
cut into columns), and is not documented. So vLLM's own operator writes numbers into a scratch page; each number encodes
its index.
"""

import functools

import torch

from vllm_kvtier.logs import get_logger
from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature

logger = get_logger(__name__)

# Bits of an index that are found at a time: integers below 2^8 are exact in bfloat16 and float16.
_BITS = 8


@functools.cache
def cpu_page_layout(isa: str, dtype: torch.dtype, tokens: int, head_size: int) -> torch.Tensor | None:
    """int32 [2 * tokens * head_size]: the index in a head's page of ``tokens`` tokens of each number in logical order
    (K or V, token, number). None if this vLLM has no such operator, or the page is not a permutation.

    ``isa``: vLLM's name of a layer's kernels; this machine must be able to run them.
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
    except Exception as error:  # an error of a version's operator costs the codecs, not the connector
        logger.info("kvtier: layout: the order in CPU pages (%s) is unknown (%s); codecs do not apply", isa, error)
        return None
    if not torch.equal(found.sort().values, index):
        logger.info("kvtier: layout: CPU pages (%s) hold more than K and V; codecs do not apply", isa)
        return None
    layout = torch.empty(count, dtype=torch.int32)
    layout[found] = index.int()
    return layout


def _written(isa: str, code: torch.Tensor, tokens: int, head_size: int) -> torch.Tensor:
    """int64 [numbers of a page]: a head's page after ``code`` was written as its K, then its V.

    Raises ValueError if the two heads of a block differ, or another block changed: then the page's layout is unknown.
    """
    from vllm import _custom_ops as ops

    heads, half = 2, tokens * head_size
    pages = torch.zeros(2, heads, 2 * tokens, head_size, dtype=code.dtype)
    keys, values = pages.chunk(2, dim=2)  # as the backend does
    k, v = (side.view(tokens, 1, head_size).repeat(1, heads, 1) for side in (code[:half], code[half:]))
    slots = torch.arange(tokens, 2 * tokens)  # of the second block
    ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto")
    if pages[0].any() or not torch.equal(pages[1, 0], pages[1, 1]):
        raise ValueError("a token's numbers are outside its head's page")
    return pages[1, 0].flatten().to(torch.int64)
