"""How much of a prompt vLLM's own prefix cache has, for people."""

import math

from vllm_kvtier.vllm_compat.engine_info import EngineInfo
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool


def gpu_prefix(pool: BlockPool, info: EngineInfo, block_hashes: list[bytes]) -> int:
    """Tokens of the longest prefix that has all blocks of the groups with ``whole_prefix``, and recurrent states at its
    end. Windows do not count."""
    size = pool.hash_block_size
    states = [g for g, group in enumerate(info.groups) if not group.kind.by_position]
    align = math.lcm(size, *(info.groups[g].block_tokens for g in info.full_groups))
    cached = pool.cached_tokens(block_hashes, info.full_groups, align)
    if not states:
        return cached
    full = cached // size if info.full_groups else len(block_hashes)
    for last in range(full, 0, -1):
        if all(pool.cached_block(block_hashes[last - 1], g) for g in states):
            return last * size
    return 0
