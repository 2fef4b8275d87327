"""Blocks that failed their checksum. They are not requested again from the store that served them while they are
remembered, because it would serve the same bytes again. Another store may hold a valid copy."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

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
        self._by_store: dict[tuple[bytes, str], set[tuple[int, bytes]]] = {}  # by namespace and store
        self._begins: dict[tuple[bytes, str], Any] = {}  # of these, sorted; until they change

    def add(self, namespace_id: bytes, group: int, block_hash: bytes, store: str = "") -> None:
        self._blocks[namespace_id, group, block_hash, store] = None
        self._by_store.setdefault((namespace_id, store), set()).add((group, block_hash))
        self._begins.pop((namespace_id, store), None)
        if len(self._blocks) > MAX_REMEMBERED:
            self._discard(*next(iter(self._blocks)))

    def __contains__(self, name: tuple[bytes, int, bytes]) -> bool:
        return (*name, "") in self._blocks

    def remove(self, name: tuple[bytes, int, bytes]) -> None:
        """The store has a valid copy now."""
        if name in self:
            self._discard(*name, "")

    def _discard(self, namespace_id: bytes, group: int, block_hash: bytes, store: str) -> None:
        del self._blocks[namespace_id, group, block_hash, store]
        bad = self._by_store[namespace_id, store]
        bad.remove((group, block_hash))
        self._begins.pop((namespace_id, store), None)
        if not bad:
            del self._by_store[namespace_id, store]

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
        bad = self._by_store.get((namespace_id, store))
        if not bad:
            return num_hash_blocks
        import numpy as np  # a store starts sooner without, and needs it only now

        align = math.lcm(*(shape.hash_blocks_per_block for shape in shapes))
        # Blocks that begin as a bad one does. A prompt may have 100,000, and all groups are looked at only for these.
        begins = np.frombuffer(block_hashes, "<u8")[:: HASH_BYTES // 8][start:num_hash_blocks]
        bad_begins = self._begins.get((namespace_id, store))
        if bad_begins is None:
            bad_begins = np.sort(np.frombuffer(b"".join(block_hash[:8] for _, block_hash in bad), "<u8"))
            self._begins[namespace_id, store] = bad_begins
        likely = bad_begins.take(np.searchsorted(bad_begins, begins), mode="clip") == begins
        ends = (start + 1 + np.flatnonzero(likely)).tolist()
        for group, shape in enumerate(shapes):
            for end in ends:
                block_hash = block_hashes[(end - 1) * HASH_BYTES : end * HASH_BYTES]
                whole = end <= num_hash_blocks and not (end - start) % shape.hash_blocks_per_block
                if whole and (group, block_hash) in bad:
                    num_hash_blocks = max(start, (end - shape.hash_blocks_per_block) // align * align)
                    break
        return num_hash_blocks
