"""vLLM's GPU block pool: pins, frees and looks up blocks. On the scheduler thread only: the pool has no lock."""

import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from vllm_kvtier.containment import Containment


class BlockPool:
    def __init__(self, pool: Any, group_ids: Sequence[int] | None = None, group_tokens: Sequence[int] = ()):
        """``group_ids``: of vLLM, by this package's groups; None: they are the same (``layout.groups``).
        ``group_tokens``: tokens of a block, by group; (): there is one, with a block for each hash."""
        self._pool, self._group_ids = pool, group_ids
        self.group_tokens = list(group_tokens) or [pool.hash_block_size]
        self.hash_block_size: int = pool.hash_block_size
        self.num_blocks: int = pool.num_gpu_blocks
        self.free_count: Callable[[], int] = pool.get_num_free_blocks

    def pin(self, ids: Iterable[int]) -> list[int]:
        """Take a reference on each block; returns the ids pinned (block 0 is vLLM's null block, never pinned)."""
        held = [i for i in ids if i]
        self._pool.touch([self._pool.blocks[i] for i in held])
        return held

    def held_once(self, ids: Iterable[int], limit: int | None = None) -> int:
        """The number of these blocks with a single reference: releasing it frees them. Counts to ``limit``."""
        blocks, count = self._pool.blocks, 0
        for i in ids:
            if count == limit:
                break
            count += blocks[i].ref_cnt == 1
        return count

    def unheld(self, ids: Iterable[int]) -> int:
        """The number of these blocks that are free: pinned, they are not available for new requests."""
        return sum(1 for i in ids if not self._pool.blocks[i].ref_cnt)

    def holds(self, block: int, block_hash: bytes, group: int) -> bool:
        """Whether the prefix cache has this content of a group in this block."""
        name = make_block_hash_with_group_id(BlockHash(block_hash), self._id(group))
        return bool(self._pool.blocks[block].block_hash == name)

    def _id(self, group: int) -> int:
        return group if self._group_ids is None else self._group_ids[group]

    def free(self, ids: list[int]) -> None:
        """Release the references; vLLM evicts the end of a sequence before its beginning."""
        self._pool.free_blocks([self._pool.blocks[i] for i in reversed(ids)])

    def around_reset(self, before: Callable[[], object], after: Callable[[], object], containment: Containment) -> None:
        """Call ``before`` when vLLM is about to reset its prefix cache, which fails while any block is held, and
        ``after`` when it has reset it or failed.

        vLLM calls a connector only afterwards, and only with an option of the reset.
        """
        reset = self._pool.reset_prefix_cache

        def reset_prefix_cache(*args: Any, **kwargs: Any) -> Any:
            containment.attempt("before a reset", before, repair=before)
            try:
                return reset(*args, **kwargs)
            finally:
                containment.attempt("after a reset", after, repair=after)

        self._pool.reset_prefix_cache = reset_prefix_cache

    def is_unused(self, pinned: int) -> bool:
        """Whether no block is held, but for vLLM's null block and ``pinned`` ones."""
        return self.free_count() + pinned >= self.num_blocks - 1

    def is_empty(self) -> bool:
        """Whether no block is held and none is in the prefix cache. Checks every block: for rare events."""
        return all(block.is_null or (not block.ref_cnt and block.block_hash is None) for block in self._pool.blocks)

    def cached_block(self, block_hash: bytes, group: int) -> int:
        """A block of this group that holds this content, in use or free; 0 if the prefix cache has none."""
        found = self._pool.get_cached_block(block_hash, [self._id(group)])
        return found[0].block_id if found else 0

    def evict(self, hashes: Iterable[bytes]) -> None:
        """Remove the blocks of all groups with these contents from the prefix cache; requests keep the blocks they
        use."""
        for block_hash in hashes:
            for group in range(len(self.group_tokens)):
                last = 0
                while (block := self.cached_block(block_hash, group)) not in (0, last):  # several may hold the same
                    self._pool.evict_blocks({block})
                    last = block

    def cached_about(self, block_hashes: list[bytes], groups: list[int], tokens: int) -> int:
        """As ``cached_tokens``, with few lookups; too many tokens if a block in between was evicted."""
        ids, ends = self._ends(block_hashes, groups, tokens)
        if not ends or self._pool.get_cached_block(ends[0], ids) is None:  # a single lookup for most prompts
            return 0
        return tokens * bisect.bisect_left(ends, True, 1, key=lambda h: self._pool.get_cached_block(h, ids) is None)

    def cached_tokens(self, block_hashes: list[bytes], groups: list[int], tokens: int) -> int:
        """Tokens of the longest prefix of ``block_hashes`` in the GPU prefix cache, in all ``groups``, 0 without any: a
        multiple of ``tokens``, at which blocks of all of them end."""
        ids, ends = self._ends(block_hashes, groups, tokens)
        for i, block_hash in enumerate(ends):
            if self._pool.get_cached_block(block_hash, ids) is None:
                return i * tokens
        return len(ends) * tokens

    def _ends(self, block_hashes: list[bytes], groups: list[int], tokens: int) -> tuple[list[int], list[bytes]]:
        """vLLM's ids of ``groups``, and of ``block_hashes`` those that end at multiples of ``tokens``."""
        per = tokens // self.hash_block_size
        return [self._id(group) for group in groups], block_hashes[per - 1 :: per] if groups else []
