"""The KV cache as pages: the addresses of each block's bytes, whatever vLLM's layout. Any thread; no vLLM import.

``vllm_compat.layout.kv_layout`` builds a :class:`CacheView` from the engine's tensors. Descriptors, checksums and host
mirrors are made from it alone.
"""

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import msgspec
import torch

from vllm_kvtier.errors import UnsupportedLayout
from vllm_kvtier.wire.geometry import CacheGeometry, Field, GroupGeometry, GroupView, Region

# Names the order of numbers within a kind of cells: (packing, cell_tokens, fields) of their regions.
CpuPageKey = tuple[str, int, tuple[Field, ...]]
NUMBER_BYTES = 2  # bytes: regions with fields hold bfloat16 or float16


def dense_region(region: Region, base: int, block_stride: int, order: str) -> Region:
    """``region`` at ``base`` with pages without gaps, its dimensions in ``order`` (``Region.order``)."""
    outer_stride, token_stride = region.tokens * region.inner, region.inner
    if order == "token":
        outer_stride, token_stride = region.inner, region.outer * region.inner
    return msgspec.structs.replace(
        region,
        base=base,
        block_stride=block_stride,
        outer_stride=outer_stride if region.outer > 1 else 0,
        token_stride=token_stride if region.tokens > 1 else 0,
    )


class CacheView:
    """All groups' pages, and the memory under them.

    ``spans`` are the ``(base, nbytes)`` of the distinct allocations, sorted, to register with NIXL.
    The view keeps those allocations alive. ``num_blocks`` blocks exist, ids ``0 .. num_blocks - 1``.

    ``cpu_page_layouts``: the order of numbers in cells of several tokens, as int32 [numbers of a cell] on the CPU: for
    each number in logical order (``wire.geometry.Region.fields``) its index within the cell. Every region with fields
    and such cells has one.

    ``token_layout(region)``, of a region of ours or of another engine with the same packing: int64 [tokens of a cell,
    numbers of a token], the index of each number within the cell; None if it is unknown. The order of a token's numbers
    is the same for cells of any number of tokens.
    """

    def __init__(
        self,
        groups: Iterable[GroupView],
        num_blocks: int,
        device: torch.device | str,
        storages: Iterable[torch.UntypedStorage],
        cpu_page_layouts: Mapping[CpuPageKey, torch.Tensor] = MappingProxyType({}),
        token_layout: Callable[[Region], torch.Tensor | None] = lambda region: None,
    ):
        """Raises UnsupportedLayout if a page lies outside the given storages, ValueError if fields do not fill
        their cells or a layout that they need is missing."""
        self.groups, self.token_layout = tuple(groups), token_layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        unique = {(s.data_ptr(), s.nbytes()): s for s in storages}
        self.spans: tuple[tuple[int, int], ...] = tuple(sorted(unique))
        self._storages = [unique[span] for span in self.spans]
        self._starts = [base for base, _ in self.spans]
        self.cpu_page_layouts = dict(cpu_page_layouts)
        self._pages: dict[int, list[torch.Tensor]] = {}  # by group, of ``copy_blocks``
        for group in self.groups:
            for region in group.regions:
                self._storage_of(region)
                self.cpu_page_layout(region)

    def _storage_of(self, region: Region) -> tuple[torch.UntypedStorage, int]:
        at = bisect_right(self._starts, region.base) - 1
        last = region.base + (self.num_blocks - 1) * region.block_stride + region.page_extent
        if at < 0 or last > self._starts[at] + self.spans[at][1]:
            raise UnsupportedLayout(
                f"the pages of {region.layer} end outside the memory of its tensor "
                f"({last - region.base} bytes from its first page for {self.num_blocks} blocks): "
                "this KV cache layout is not understood; please report it with the vLLM version"
            )
        return self._storages[at], region.base - self._starts[at]

    def pages(self, region: Region) -> torch.Tensor:
        """uint8 [num_blocks, outer, tokens, inner] over the cache's own memory, which writes to it change."""
        storage, offset = self._storage_of(region)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(
            storage,
            offset,
            (self.num_blocks, region.outer, region.tokens, region.inner),
            (region.block_stride, region.outer_stride, region.token_stride, 1),
        )

    def copy_blocks(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """(group, from block, to block): copy within the cache, on the device's current stream."""
        sources, targets = [], []
        for group, source, target in copies:
            if group not in self._pages:
                self._pages[group] = [self.pages(region) for region in self.groups[group].regions]
            sources += [pages[source] for pages in self._pages[group]]
            targets += [pages[target] for pages in self._pages[group]]
        torch._foreach_copy_(targets, sources)

    def cpu_page_layout(self, region: Region) -> torch.Tensor | None:
        """The layout of this region's cells; None if they hold one token, in logical order, or the region has no
        fields. Raises ValueError as the constructor does."""
        if not region.fields:
            return None
        numbers = region.cell_tokens * sum(field.count for field in region.fields)
        if numbers * NUMBER_BYTES != region.inner:
            raise ValueError(
                f"{region.layer}: {numbers} numbers of {region.fields} do not fill cells of {region.inner} bytes"
            )
        if region.cell_tokens == 1:
            return None
        found = self.cpu_page_layouts.get((region.packing, region.cell_tokens, region.fields))
        if found is None or found.shape != (numbers,):
            raise ValueError(f"{region.layer}: no layout of the {numbers} numbers in cells of {region.packing}")
        return found

    def geometry(self) -> CacheGeometry:
        """The geometry that another engine must have for its pages to be copied here byte for byte."""
        groups = msgspec.convert(self.groups, tuple[GroupGeometry, ...], from_attributes=True)
        return CacheGeometry(groups, sys.byteorder)
