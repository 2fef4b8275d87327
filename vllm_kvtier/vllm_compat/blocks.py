"""vLLM's GPU block pool: pinning, freeing, asking. Only on the engine's thread; the pool has no lock."""

from collections.abc import Iterable
from typing import Any


class BlockPool:
    def __init__(self, pool: Any):
        self._pool = pool
        self.hash_block_tokens: int = pool.hash_block_size
        self.num_blocks: int = pool.num_gpu_blocks

    def pin(self, ids: Iterable[int]) -> list[int]:
        """Take a reference on each block; returns the ids pinned (block 0 is vLLM's null block, never pinned)."""
        blocks = [self._pool.blocks[i] for i in ids if i]
        self._pool.touch(blocks)
        return [block.block_id for block in blocks]

    def free(self, ids: list[int]) -> None:
        """Give the references back; the end of a sequence is evicted before its beginning."""
        self._pool.free_blocks([self._pool.blocks[i] for i in reversed(ids)])

    def free_count(self) -> int:
        return self._pool.get_num_free_blocks()

    def cached_tokens(self, chain: list[bytes], groups: list[int], unit: int) -> int:
        """Tokens of the longest prefix of ``chain`` that is in the GPU prefix cache (all full-attention ``groups``; 0 without one)."""
        if not groups:
            return 0
        for i, block_hash in enumerate(chain):
            if self._pool.get_cached_block(block_hash, groups) is None:
                return i * unit
        return len(chain) * unit
