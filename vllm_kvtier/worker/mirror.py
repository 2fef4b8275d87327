"""A copy of a KV cache's pages in host memory ("host buffer" mode), and the copies to and from it."""

from collections.abc import Sequence

import msgspec
import torch

from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.worker.views import CacheView

# Bytes staged at once between a device and the host: large enough for the full rate of a pinned copy,
# small enough to be noise beside the cache itself.
_STAGE_BYTES = 64 << 20
# Pages in a mirror begin at multiples of this, so that any word size may read them.
_ALIGN = 64


def mirror(view: CacheView, num_blocks: int | None = None, pin: bool | None = None) -> CacheView:
    """Host memory of the same geometry as ``view``, for ``num_blocks`` blocks (default: as many).

    Block ids are the mirror's own. As in the cache, a block is used by one group at a time: groups share
    its bytes. Pinned if CUDA is available unless ``pin`` says otherwise. The block's pages lie dense and
    one after another, so that a block of a group is one contiguous piece.
    """
    num_blocks = view.num_blocks if num_blocks is None else num_blocks
    pin = torch.cuda.is_available() if pin is None else pin
    slot = max((_packed_bytes(g) for g in view.groups), default=0)
    # Alignment by hand: neither malloc nor the pinned allocator promises more than 16 bytes.
    memory = torch.empty(num_blocks * slot + _ALIGN, dtype=torch.uint8, pin_memory=pin)
    memory.zero_()
    base = -(-memory.data_ptr() // _ALIGN) * _ALIGN
    groups = []
    for group in view.groups:
        at, regions = base, []
        for region in group.regions:
            regions.append(_dense(region, at, slot))
            at += _round(region.block_bytes)
        groups.append(msgspec.structs.replace(group, regions=tuple(regions)))
    return CacheView(groups, num_blocks, "cpu", [memory.untyped_storage()], view.arrangements)


def copy_blocks(
    source: CacheView, source_ids: Sequence[int], target: CacheView, target_ids: Sequence[int], group: int
) -> None:
    """Copies blocks of one group between two views of equal geometry; returns when the target is written
    for a host target, and in order on the current CUDA stream for a device target.

    Raises ValueError if the numbers of ids differ or an id is out of range.
    """
    if len(source_ids) != len(target_ids):
        raise ValueError(f"{len(source_ids)} source blocks for {len(target_ids)} target blocks")
    for ids, view in ((source_ids, source), (target_ids, target)):
        if len(ids) and not (0 <= min(ids) and max(ids) < view.num_blocks):
            raise ValueError(f"block ids {min(ids)}..{max(ids)} outside 0..{view.num_blocks - 1}")
    a, b = source.groups[group], target.groups[group]
    step = max(1, _STAGE_BYTES // max(1, a.block_bytes))
    for start in range(0, len(source_ids), step):
        rows = _gather(source, a, source_ids[start : start + step])
        _scatter(target, b, target_ids[start : start + step], _carry(rows, target.device))


def _round(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _packed_bytes(group: GroupView) -> int:
    return sum(_round(r.block_bytes) for r in group.regions)


def _dense(region: Region, base: int, block_stride: int) -> Region:
    """The region at ``base`` without gaps, its dimensions in the same order in memory."""
    if region.order == "token":
        token_stride, outer_stride = region.outer * region.inner, region.inner
    else:
        token_stride = region.inner if region.tokens > 1 else 0
        outer_stride = region.tokens * region.inner if region.outer > 1 else 0
    return msgspec.structs.replace(
        region, base=base, block_stride=block_stride, outer_stride=outer_stride, token_stride=token_stride
    )


def _index(view: CacheView, ids: Sequence[int]) -> torch.Tensor:
    return torch.as_tensor(ids, dtype=torch.int64).to(view.device)


def _gather(view: CacheView, group: GroupView, ids: Sequence[int]) -> torch.Tensor:
    """uint8 [n, block_bytes]: the logical bytes of the blocks, regions one after another."""
    index = _index(view, ids)
    rows = torch.empty((len(ids), group.block_bytes), dtype=torch.uint8, device=view.device)
    at = 0
    for region in group.regions:
        part = rows[:, at : at + region.block_bytes]
        part.unflatten(1, (region.outer, region.tokens, region.inner)).copy_(view.pages(region)[index])
        at += region.block_bytes
    return rows


def _carry(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
    if rows.device == device:
        return rows
    if device.type == "cpu":
        # Through pinned memory (torch keeps and reuses it): pageable copies reach a third of the rate.
        staged = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True)
        staged.copy_(rows, non_blocking=True)
        torch.cuda.current_stream(rows.device).synchronize()
        return staged
    staged = rows if rows.is_pinned() else rows.pin_memory()
    return staged.to(device, non_blocking=True)


def _scatter(view: CacheView, group: GroupView, ids: Sequence[int], rows: torch.Tensor) -> None:
    index = _index(view, ids)
    at = 0
    for region in group.regions:
        part = rows[:, at : at + region.block_bytes]
        view.pages(region)[index] = part.unflatten(1, (region.outer, region.tokens, region.inner))
        at += region.block_bytes
