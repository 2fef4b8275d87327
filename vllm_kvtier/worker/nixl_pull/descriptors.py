"""NIXL's descriptor lists of pages, for one-sided transfers.

A pull of 512 blocks of 36 layers is 18,432 pages. NIXL takes 30 ms to check so many descriptors one by one, and no time
to select them from a prepared list (measured on an H200). So lists of all pages are prepared once per peer.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from vllm_kvtier.wire.geometry import GroupView, Region

# Reads saved from which rearranging is faster. UCX posts a read over NVLink in 4.7 us, whatever its size; moving the
# blocks of a pull within the GPU costs two launches a layer and four passes over its memory, 0.6 ms and more (H200).
MIN_READS_SAVED = 1000


def page_chunks(region: Region) -> list[tuple[int, int]]:
    """The contiguous pieces of one page as ``(offset in the page, length)`` in bytes, by address."""
    return _split(region, _dense_level(region))


def _dense_level(region: Region) -> int:
    """The largest contiguous unit: 0 a cell, 1 all cells of the inner dimension in memory, 2 the page."""
    (n1, s1), (n2, s2) = _by_address(region)
    if n1 > 1 and s1 != region.inner:
        return 0
    if n2 > 1 and s2 != n1 * region.inner:
        return 1
    return 2


def _by_address(region: Region) -> tuple[tuple[int, int], tuple[int, int]]:
    """(size, stride) of the inner dimension in memory, then of the other one."""
    outer, token = (region.outer, region.outer_stride), (region.tokens, region.token_stride)
    if region.order == "token" or region.tokens == 1:
        return outer, token
    return token, outer


def _split(region: Region, level: int) -> list[tuple[int, int]]:
    """One page in pieces of this level, by address; at most the region's own level."""
    (n1, s1), (n2, s2) = _by_address(region)
    if level == 2:
        return [(0, n1 * n2 * region.inner)]
    if level == 1:
        return [(j * s2, n1 * region.inner) for j in range(n2)]
    return [(j * s2 + i * s1, region.inner) for j in range(n2) for i in range(n1)]


class Side(NamedTuple):
    """One engine's part of a transfer: its pages, the address of its int64 table of checksums, and their device."""

    groups: Sequence[GroupView]
    num_blocks: int
    checksum_table_addr: int
    device: int = 0


class PageRows:
    """Strided rows of two engines' pages for NIXL's prepared descriptor lists.

    ``local`` and ``remote`` are np.uint64 [m, 5] rows (address, length, device, block stride, blocks): row r is one
    contiguous piece of a page, of every block. Element ``r * blocks + b`` of a list made from them is that piece of
    block b; ``indices`` returns the elements of a pull. The last row is the table of checksums (8 bytes per block), for
    all groups.
    """

    def __init__(self, local: Side, remote: Side):
        """Raises ValueError if the groups differ in geometry."""
        self._local_blocks, self._remote_blocks = local.num_blocks, remote.num_blocks
        pieces = [_page_pieces(a, b) for a, b in zip(local.groups, remote.groups, strict=True)]
        tables = [local.checksum_table_addr, 8, remote.checksum_table_addr, 8, 8]
        pieces.append(np.array([tables], dtype=np.int64))
        ends = np.cumsum([len(p) for p in pieces])
        self._rows = [np.arange(end - len(p), end) for end, p in zip(ends, pieces, strict=True)]
        base_l, stride_l, base_r, stride_r, self._length = np.concatenate(pieces).T
        # Whether NIXL merges elements of adjacent blocks.
        self._dense = (stride_l == self._length) & (stride_r == self._length)
        self.local = _strided(base_l, self._length, local.device, stride_l, local.num_blocks)
        self.remote = _strided(base_r, self._length, remote.device, stride_r, remote.num_blocks)

    def indices(self, groups: Sequence[tuple[int, np.ndarray, np.ndarray]], rearrange: bool = False) -> "Elements":
        """The elements that read the blocks of (group, local ids, remote ids) triples.

        A row's blocks are in the order of their local ids, so that blocks adjacent on both sides are adjacent in the
        list, where NIXL merges them into one read (vLLM frees a request's blocks in reverse order). If that leaves many
        reads although the ids of each side form runs, and ``rearrange`` allows it, both sides are in the order of their
        own ids: blocks then arrive in each other's positions, and ``moves`` tells how to move them.
        """
        here, there, size, moves = [], [], 0, []
        for group, local_ids, remote_ids in groups:
            rows = np.concatenate([self._rows[group], self._rows[-1]])
            order = np.argsort(local_ids, kind="stable")
            local_ids, remote_ids = local_ids[order], remote_ids[order]
            if rearrange and len(local_ids):
                by_remote = np.argsort(remote_ids, kind="stable")
                saved = _breaks(local_ids, remote_ids) - _breaks(local_ids, remote_ids[by_remote])
                if saved * len(rows) > MIN_READS_SAVED:
                    moves.append((group, local_ids, local_ids[by_remote]))
                    remote_ids = remote_ids[by_remote]
            here.append((rows[:, None] * self._local_blocks + local_ids).ravel())
            there.append((rows[:, None] * self._remote_blocks + remote_ids).ravel())
            size += int(self._length[rows].sum()) * len(local_ids)
        return Elements(np.concatenate(here).astype(np.int32), np.concatenate(there).astype(np.int32), size, moves)

    def split(self, elements: "Elements", max_reads: int) -> Iterator["Elements"]:
        """The same in parts. NIXL makes so many reads of each, or fewer of the last one."""
        row = elements.local // self._local_blocks
        merged = (np.diff(elements.local) == 1) & (np.diff(elements.remote) == 1) & self._dense[row[1:]]
        for part in pairwise([0, *(np.flatnonzero(~merged)[max_reads - 1 :: max_reads] + 1), len(row)]):
            a = slice(*part)
            yield Elements(elements.local[a], elements.remote[a], int(self._length[row[a]].sum()), [])

    def num_reads(self, group: int, local_ids: np.ndarray, remote_ids: np.ndarray, rearrange: bool) -> int:
        """Reads of these blocks that NIXL makes, at least; arguments as of ``indices``."""
        dense = self._dense[np.append(self._rows[group], -1)]
        return int(np.where(dense, fewest_reads(local_ids, remote_ids, rearrange), len(local_ids)).sum())


class Elements(NamedTuple):
    """Elements of both prepared lists to read, the total bytes, and (group, from ids, to ids) of blocks to move after
    the read."""

    local: np.ndarray  # int32
    remote: np.ndarray  # int32
    size: int
    moves: list[tuple[int, np.ndarray, np.ndarray]]


def fewest_reads(local_ids: np.ndarray, remote_ids: np.ndarray, rearrange: bool) -> int:
    """Reads of a row of pairs, in whichever of the orders of ``PageRows.indices`` has fewer."""
    order = np.argsort(local_ids, kind="stable")
    local_ids, remote_ids = local_ids[order], remote_ids[order]
    orders = (remote_ids, np.sort(remote_ids)) if rearrange else (remote_ids,)
    return min(_breaks(local_ids, each) for each in orders) if len(order) else 0


def _breaks(local_ids: np.ndarray, remote_ids: np.ndarray) -> int:
    """Number of reads of a row of pairs: neighbours merge where both ids increase by one."""
    return 1 + int(((np.diff(local_ids) != 1) | (np.diff(remote_ids) != 1)).sum())


def _strided(base: np.ndarray, length: np.ndarray, device: int, stride: np.ndarray, blocks: int) -> np.ndarray:
    rows = [base, length, np.full(len(base), device), stride, np.full(len(base), blocks)]
    return np.stack(rows, axis=1).astype(np.uint64)


def _page_pieces(local: GroupView, remote: GroupView) -> np.ndarray:
    """int64 [m, 5]: local base and block stride, remote base and block stride, length of each piece.

    Pieces of a block that are adjacent on both sides are merged, across regions too.
    """
    if len(local.regions) != len(remote.regions):
        raise ValueError(f"{len(local.regions)} regions here and {len(remote.regions)} there")
    rows: list[list[int]] = []
    for a, b in zip(local.regions, remote.regions, strict=True):
        orders = {a.order, b.order} - {"any"}
        if (a.outer, a.tokens, a.inner) != (b.outer, b.tokens, b.inner) or len(orders) > 1:
            raise ValueError(f"{a.layer} here and {b.layer} there differ in geometry")
        level = min(_dense_level(a), _dense_level(b))
        for (at_a, length), (at_b, _) in zip(_split(a, level), _split(b, level), strict=True):
            here, there = a.base + at_a, b.base + at_b
            if rows:
                last = rows[-1]
                if (
                    last[0] + last[4] == here
                    and last[2] + last[4] == there
                    and last[1] == a.block_stride
                    and last[3] == b.block_stride
                ):
                    last[4] += length
                    continue
            rows.append([here, a.block_stride, there, b.block_stride, length])
    return np.array(rows, dtype=np.int64).reshape(-1, 5)
