"""Tiles and checksums for copies in host memory: blocks are cut into tiles that stay in a core's cache, and the
checksum of ``kernels.checksum`` is computed over many blocks at once, tile by tile."""

from collections.abc import Iterator

import numpy as np

from vllm_kvtier.kernels import checksum

# Words of 8 bytes in a tile: with a second tile for shifted words and with the multipliers, within an L2 cache of 1
# MiB.
TILE_WORDS = 16 << 10
_SHIFT = np.uint64(32)


def terms(words: np.ndarray, factor: np.ndarray, spare: np.ndarray) -> np.ndarray:
    """uint64 [n]: the sum of the terms of each row of ``words`` [n, m], which are overwritten.

    ``factor``: their multipliers, uint64 [m]; ``spare``: uint64 [n, m] to work in.
    """
    np.multiply(words, factor, out=words)
    np.right_shift(words, _SHIFT, out=spare)
    np.bitwise_xor(words, spare, out=words)
    return words @ factor


def finish(total: np.ndarray, count: int, keys: np.ndarray) -> np.ndarray:
    """uint64 [n]: the checksums of blocks of ``count`` words from the sums of their terms and their keys."""
    h = (total + np.uint64(count * checksum.M1 & (1 << 64) - 1)) ^ keys
    for factor in (checksum.F1, checksum.F2):
        h = (h ^ (h >> np.uint64(33))) * np.uint64(factor)
    return h ^ (h >> np.uint64(33))


def tiles(n: int, shape: tuple[int, int, int], max_words: int) -> Iterator[tuple[slice, slice, slice]]:
    """(outer, cells, blocks) slices that cover n pages of this shape (outer, cells, words or numbers of a cell), each
    of ``max_words`` words at most unless one cell is more."""
    outer, cells, words = shape
    step_cells = max(1, min(cells, max_words // words))
    step_outer = max(1, min(outer, max_words // (cells * words)))
    step = max(1, max_words // (step_outer * step_cells * words))
    for o in range(0, outer, step_outer):
        for c in range(0, cells, step_cells):
            for a in range(0, n, step):
                yield (
                    slice(o, min(outer, o + step_outer)),
                    slice(c, min(cells, c + step_cells)),
                    slice(a, min(n, a + step)),
                )
