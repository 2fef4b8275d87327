"""From pages to the address lists of a one-sided transfer.

Everything is vectorized: a pull of 512 blocks of 36 layers is 18,432 pages, and the lists are built on the
worker's thread between two steps.
"""

from collections.abc import Sequence

import numpy as np

from vllm_kvtier.worker.views import GroupView, Region

# No descriptor is longer. UCX splits large reads into fragments itself, but a failed or slow descriptor is
# retried and accounted as a whole, and lengths beyond 2 GiB overflow 32-bit counters in some transports.
MAX_DESCRIPTOR_BYTES = 64 << 20


def page_chunks(region: Region) -> list[tuple[int, int]]:
    """The contiguous pieces of one page as ``(offset in the page, length)`` in bytes, by address."""
    return _split(region, _dense_level(region))


def _dense_level(region: Region) -> int:
    """What is contiguous: 0 single cells, 1 all cells of the inner dimension in memory, 2 the page."""
    (n1, s1), (n2, s2) = _by_address(region)
    if n1 > 1 and s1 != region.inner:
        return 0
    if n2 > 1 and s2 != n1 * region.inner:
        return 1
    return 2


def _by_address(region: Region) -> tuple[tuple[int, int], tuple[int, int]]:
    """(size, stride) of the dimension that is inner in memory, then of the other one."""
    outer, token = (region.outer, region.outer_stride), (region.tokens, region.token_stride)
    if region.order == "token" or region.tokens == 1:
        return outer, token
    return token, outer


def _split(region: Region, level: int) -> list[tuple[int, int]]:
    """One page in pieces of the given level, by address; level must not exceed the region's own."""
    (n1, s1), (n2, s2) = _by_address(region)
    if level == 2:
        return [(0, n1 * n2 * region.inner)]
    if level == 1:
        return [(j * s2, n1 * region.inner) for j in range(n2)]
    return [(j * s2 + i * s1, region.inner) for j in range(n2) for i in range(n1)]


def pair_descriptors(
    local: GroupView,
    remote: GroupView,
    local_ids: Sequence[int] | np.ndarray,
    remote_ids: Sequence[int] | np.ndarray,
    local_device: int = 0,
    remote_device: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Descriptors for copying ``remote_ids[j]`` to ``local_ids[j]`` for all j, all regions of the group.

    Returns ``(local, remote)``: np.uint64 arrays [n, 3] of (address, length, device id), equal in length
    row by row. Neighbours that are adjacent on both sides are merged, up to MAX_DESCRIPTOR_BYTES.

    Raises ValueError if the ids differ in number or the groups in geometry (compare geometries first).
    """
    near, far = np.asarray(local_ids, dtype=np.int64), np.asarray(remote_ids, dtype=np.int64)
    if near.shape != far.shape or near.ndim != 1:
        raise ValueError(f"{near.shape} local block ids for {far.shape} remote ones")
    pieces = _page_pieces(local, remote)
    if not len(near) or not len(pieces):
        empty = np.empty((0, 3), dtype=np.uint64)
        return empty, empty.copy()
    base_l, stride_l, base_r, stride_r, length = pieces.T
    # [pieces, blocks]: a row walks the blocks of one piece of a page.
    address_l = base_l[:, None] + stride_l[:, None] * near
    address_r = base_r[:, None] + stride_r[:, None] * far
    return _merge(address_l, address_r, length, local_device, remote_device)


def row_descriptors(
    local_base: int,
    remote_base: int,
    row_bytes: int,
    local_rows: Sequence[int] | np.ndarray,
    remote_rows: Sequence[int] | np.ndarray,
    local_device: int = 0,
    remote_device: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """As :func:`pair_descriptors`, for rows of two dense tables (the checksums beside the pages)."""
    near, far = np.asarray(local_rows, dtype=np.int64), np.asarray(remote_rows, dtype=np.int64)
    if near.shape != far.shape or near.ndim != 1:
        raise ValueError(f"{near.shape} local rows for {far.shape} remote ones")
    if not len(near):
        empty = np.empty((0, 3), dtype=np.uint64)
        return empty, empty.copy()
    return _merge(
        (local_base + near * row_bytes)[None],
        (remote_base + far * row_bytes)[None],
        np.array([row_bytes], dtype=np.int64),
        local_device,
        remote_device,
    )


def _page_pieces(local: GroupView, remote: GroupView) -> np.ndarray:
    """int64 [m, 5]: local base and block stride, remote base and block stride, length of each piece.

    Pieces of one block that are adjacent on both sides, across regions too, are one.
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
                    and last[4] + length <= MAX_DESCRIPTOR_BYTES
                ):
                    last[4] += length
                    continue
            rows.append([here, a.block_stride, there, b.block_stride, length])
    return np.array(rows, dtype=np.int64).reshape(-1, 5)


def _merge(
    address_l: np.ndarray, address_r: np.ndarray, length: np.ndarray, device_l: int, device_r: int
) -> tuple[np.ndarray, np.ndarray]:
    """Merges along rows of [pieces, blocks] addresses; ``length`` [pieces] in bytes."""
    pieces, blocks = address_l.shape
    start = np.ones((pieces, blocks), dtype=bool)
    near = address_l[:, 1:] == address_l[:, :-1] + length[:, None]
    far = address_r[:, 1:] == address_r[:, :-1] + length[:, None]
    np.logical_not(near & far, out=start[:, 1:])
    # Break long runs: count within each run, and start anew when a descriptor would pass the cap.
    where = np.arange(blocks)
    run_start = np.maximum.accumulate(np.where(start, where, 0), axis=1)
    most = np.maximum(MAX_DESCRIPTOR_BYTES // length, 1)[:, None]
    start |= (where - run_start) % most == 0
    first = np.flatnonzero(start.ravel())
    count = np.diff(first, append=start.size)
    total = count * length[first // blocks]
    return tuple(
        np.stack([a.ravel()[first], total, np.full(len(first), device)], axis=1).astype(np.uint64)
        for a, device in ((address_l, device_l), (address_r, device_r))
    )
