"""The checksum of :mod:`checksum` in plain numpy, block by block; exact and slow, for tests and as documentation."""

from collections.abc import Sequence

import numpy as np

from .checksum import F1, F2, M1, M2

_MASK = (1 << 64) - 1


def multipliers(first: int, count: int) -> np.ndarray:
    """uint64 [count]: r(i) for i = first .. first + count - 1."""
    f = np.arange(first + 1, first + 1 + count, dtype=np.uint64) * np.uint64(M1)
    g = (f ^ (f >> np.uint64(32))) * np.uint64(M2)
    return (g ^ (g >> np.uint64(29))) | np.uint64(1)


def finish(total: int, words: int, key: int) -> int:
    """The block's checksum as an unsigned 64-bit integer from the sum of its terms, their number and its key."""
    h = ((total + words * M1) & _MASK) ^ (key & _MASK)
    for factor in (F1, F2):
        h = ((h ^ (h >> 33)) * factor) & _MASK
    return h ^ (h >> 33)


def block_checksum(pages: Sequence[np.ndarray], cells: Sequence[int], key: int) -> int:
    """The checksum of one block, 0 <= checksum < 2^64.

    ``pages``: one uint8 array [outer, tokens, inner] for each region, ``inner`` a multiple of 4. ``cells``:
    for each region the number of its cells that count.
    """
    total = words = first = 0
    for page, count in zip(pages, cells, strict=True):
        word = "<u8" if page.shape[-1] % 8 == 0 else "<u4"
        w = np.ascontiguousarray(page).view(word).astype(np.uint64)  # [outer, tokens, words of a cell]
        r = multipliers(first, w.size).reshape(w.shape)
        x = w * r
        y = (x ^ (x >> np.uint64(32))) * r
        y = y[:, :count]
        total = (total + int(y.sum(dtype=np.uint64))) & _MASK
        words += y.size
        first += w.size
    return finish(total, words, key)
