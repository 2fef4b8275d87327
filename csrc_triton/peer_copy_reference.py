"""Copies of :mod:`peer_copy` in plain numpy, block by block; exact and slow, for tests and as documentation."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .checksum_reference import block_checksum


class Piece(NamedTuple):
    """One region of a block on both sides: uint8 [outer, cells, inner], views of the caches."""

    source: np.ndarray
    target: np.ndarray | None  # None: read for the checksum only
    first_outer: int = 0  # of the source
    outers: int = 0
    target_outer: int = 0


def copy(pieces: Sequence[Piece], cells: Sequence[int], key: int, expected: int) -> tuple[bool, int]:
    """Copy one block; (whether its checksum is the expected one, its checksum).

    ``cells``: for each region the number of its cells that count; others are neither summed nor copied.
    """
    total = block_checksum([p.source for p in pieces], cells, key)
    for p, count in zip(pieces, cells, strict=True):
        if p.target is not None:
            source = p.source[p.first_outer : p.first_outer + p.outers, :count]
            p.target[p.target_outer : p.target_outer + p.outers, :count] = source
    return total == expected, total
