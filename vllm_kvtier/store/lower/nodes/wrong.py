"""Blocks that came with a wrong checksum: not asked for again as long as they are remembered, because whoever gave them
says the same another time. They may be right in some store, and wrong in another."""

import math
from collections.abc import Sequence
from typing import Protocol

from vllm_kvtier.store.records import HASH

MAX_WRONG = 4096  # remembered


class Shape(Protocol):
    """Of a group's blocks. ``units``: hashes of the chain that one covers."""

    units: int


class WrongBlocks:
    def __init__(self) -> None:
        self._blocks: dict[tuple[bytes, int, bytes], None] = {}  # oldest first

    def add(self, space: bytes, group: int, block_hash: bytes) -> None:
        self._blocks[space, group, block_hash] = None
        if len(self._blocks) > MAX_WRONG:
            del self._blocks[next(iter(self._blocks))]

    def good_units(self, space: bytes, chain: bytes, shapes: Sequence[Shape], start: int, units: int) -> int:
        """Of units [start, units) of a chain, the end of what is not known to be wrong; every group's block ends
        there."""
        if not self._blocks:
            return units
        align = math.lcm(*(shape.units for shape in shapes))
        for group, shape in enumerate(shapes):
            for end in range(start + shape.units, units + 1, shape.units):
                if (space, group, chain[(end - 1) * HASH : end * HASH]) in self._blocks:
                    units = max(start, (end - shape.units) // align * align)
                    break
        return units
