"""Blocks that failed their checksum. They are not requested again from the store that served them while they are
remembered, because it would serve the same bytes again. Another store may hold a valid copy."""

import math
from collections.abc import Sequence
from typing import Protocol

from vllm_kvtier.store.index.types import HASH_BYTES

MAX_REMEMBERED = 4096


class Shape(Protocol):
    """The blocks of a group. ``hash_blocks_per_block``: hash blocks that one covers."""

    @property
    def hash_blocks_per_block(self) -> int: ...


class BadBlocks:
    """``store``: an instance that has copies of its own; "" where all are one."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[bytes, int, bytes, str], None] = {}  # oldest first

    def add(self, namespace_id: bytes, group: int, block_hash: bytes, store: str = "") -> None:
        self._blocks[namespace_id, group, block_hash, store] = None
        if len(self._blocks) > MAX_REMEMBERED:
            del self._blocks[next(iter(self._blocks))]

    def __contains__(self, name: tuple[bytes, int, bytes]) -> bool:
        return (*name, "") in self._blocks

    def remove(self, name: tuple[bytes, int, bytes]) -> None:
        """The store has a valid copy now."""
        self._blocks.pop((*name, ""), None)

    def good_hash_blocks(
        self,
        namespace_id: bytes,
        block_hashes: bytes,
        shapes: Sequence[Shape],
        start: int,
        num_hash_blocks: int,
        store: str = "",
    ) -> int:
        """End of the longest prefix of hash blocks [start, num_hash_blocks) without a bad block. A block of every group
        ends there."""
        if not self._blocks:
            return num_hash_blocks
        align = math.lcm(*(shape.hash_blocks_per_block for shape in shapes))
        for group, shape in enumerate(shapes):
            for end in range(start + shape.hash_blocks_per_block, num_hash_blocks + 1, shape.hash_blocks_per_block):
                block_hash = block_hashes[(end - 1) * HASH_BYTES : end * HASH_BYTES]
                if (namespace_id, group, block_hash, store) in self._blocks:
                    num_hash_blocks = max(start, (end - shape.hash_blocks_per_block) // align * align)
                    break
        return num_hash_blocks
