"""Copies of :mod:`peer` in plain numpy, block by block; exact, slow, for tests and for reading."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .checksum_reference import block_sum


class Piece(NamedTuple):
    """One region of a block on both sides: uint8 [outer, cells, inner], views of the caches."""

    source: np.ndarray
    target: np.ndarray | None  # None: it is read for the checksum only
    first_outer: int = 0  # of the source
    outers: int = 0
    target_outer: int = 0


def copy(pieces: Sequence[Piece], cells: Sequence[int], key: int, expected: int) -> tuple[bool, int]:
    """Copies one block; (whether its checksum is the expected one, its checksum).

    ``cells``: for each region how many of its cells count; others are neither summed nor copied.
    """
    total = block_sum([p.source for p in pieces], cells, key)
    for p, count in zip(pieces, cells, strict=True):
        if p.target is not None:
            source = p.source[p.first_outer : p.first_outer + p.outers, :count]
            p.target[p.target_outer : p.target_outer + p.outers, :count] = source
    return total == expected, total
