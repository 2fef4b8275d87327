"""Rows of :mod:`page_copy` in plain numpy, block by block; exact and slow, for tests and as documentation."""

from collections.abc import Sequence

import numpy as np

from .checksum_reference import block_checksum


def encode(
    pages: Sequence[np.ndarray], key: int, row: np.ndarray, region_offsets: Sequence[int], sum_offset: int
) -> None:
    """Write one block into ``row`` (uint8 [nbytes]); bytes between regions stay as they are.

    ``pages``: the block's page of each region, uint8 [outer, cells, inner].
    """
    for page, offset in zip(pages, region_offsets, strict=True):
        row[offset : offset + page.size] = np.ascontiguousarray(page).reshape(-1)
    total = block_checksum(pages, [page.shape[1] for page in pages], key)
    row[sum_offset : sum_offset + 8] = np.frombuffer(total.to_bytes(8, "little"), dtype=np.uint8)


def decode(
    row: np.ndarray, key: int, pages: Sequence[np.ndarray], region_offsets: Sequence[int], sum_offset: int
) -> bool:
    """Write ``row`` into one block's pages, views of the cache; True if the checksum is right."""
    for page, offset in zip(pages, region_offsets, strict=True):
        page[...] = row[offset : offset + page.size].reshape(page.shape)
    total = block_checksum(pages, [page.shape[1] for page in pages], key)
    return total == int.from_bytes(row[sum_offset : sum_offset + 8].tobytes(), "little")
