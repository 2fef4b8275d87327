"""A copy of a KV cache's pages in host memory ("host buffer" mode), and the copies to and from it."""

from collections.abc import Iterator, Sequence

import msgspec
import torch

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.linux import leave_out_of_dumps
from vllm_kvtier.store.memory.memory_limits import format_bytes, memory_limits
from vllm_kvtier.wire.geometry import GroupView
from vllm_kvtier.wire.slots import align
from vllm_kvtier.worker.cache_view import CacheView, dense_region

# Bytes staged at once between a device and the host: large enough for the full rate of a pinned copy,
# small enough to be noise beside the cache itself.
_STAGE_BYTES = 64 << 20
# Pages in a mirror begin at multiples of this, so that any word size may read them.
_ALIGN = 64


def mirror(view: CacheView, ranks: int = 1) -> CacheView:
    """Host memory of the same geometry as ``view``.

    As in the cache, a block belongs to one group at a time, so groups share its bytes. A block's pages are dense and
    consecutive, so that a block of a group is contiguous. Raises KVTierError if the memory is not free.
    """
    slot = max((sum(align(r.block_bytes, _ALIGN) for r in g.regions) for g in view.groups), default=0)
    nbytes, limits = view.num_blocks * slot + _ALIGN, memory_limits()
    if nbytes * ranks > limits.fits:  # else the kernel would kill the engine
        raise KVTierError(
            f"a host buffer for the whole KV cache takes {format_bytes(nbytes * ranks)} of host memory"
            f"{f' on {ranks} ranks' * (ranks > 1)}, and {format_bytes(limits.fits)} are free ({limits.source})"
        )
    # Not pinned: torch would take up to twice as much, and copies to and from it are the CPU's (``_carry``). Alignment
    # by hand: malloc promises no more than 16 bytes.
    memory = torch.empty(nbytes, dtype=torch.uint8)
    leave_out_of_dumps(memory.data_ptr(), nbytes)
    memory.zero_()
    base = align(memory.data_ptr(), _ALIGN)
    groups = []
    for group in view.groups:
        at, regions = base, []
        for region in group.regions:
            regions.append(dense_region(region, at, slot, region.order))
            at += align(region.block_bytes, _ALIGN)
        groups.append(msgspec.structs.replace(group, regions=tuple(regions)))
    return CacheView(groups, view.num_blocks, "cpu", [memory.untyped_storage()], view.cpu_page_layouts)


def copy_blocks(source: CacheView, target: CacheView, group: int, ids: Sequence[int]) -> None:
    """Copy blocks of one group between two views of equal geometry. Returns when a host target is written; a device
    target is written in the order of the current CUDA stream.

    Raises ValueError if an id is out of range.
    """
    if len(ids) and not (0 <= min(ids) and max(ids) < source.num_blocks):
        raise ValueError(f"block ids {min(ids)}..{max(ids)} outside 0..{source.num_blocks - 1}")
    a, b = source.groups[group], target.groups[group]
    step = max(1, _STAGE_BYTES // max(1, a.block_bytes))
    for start in range(0, len(ids), step):
        some = ids[start : start + step]
        _scatter(target, b, some, _carry(_gather(source, a, some), target.device))


def _index(view: CacheView, ids: Sequence[int]) -> torch.Tensor:
    return torch.as_tensor(ids, dtype=torch.int64).to(view.device)


def _parts(view: CacheView, group: GroupView, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(pages, their part of ``rows`` in the same shape) of each region: in a row regions follow one another."""
    parts = rows.split([region.block_bytes for region in group.regions], dim=1)
    for region, part in zip(group.regions, parts, strict=True):
        yield view.pages(region), part.unflatten(1, (region.outer, region.tokens, region.inner))


def _gather(view: CacheView, group: GroupView, ids: Sequence[int]) -> torch.Tensor:
    """uint8 [n, block_bytes]: the logical bytes of the blocks."""
    index = _index(view, ids)
    rows = torch.empty((len(ids), group.block_bytes), dtype=torch.uint8, device=view.device)
    for pages, part in _parts(view, group, rows):
        part.copy_(pages[index])
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
    for pages, part in _parts(view, group, rows):
        pages[index] = part
