"""The KV cache as pages: where each block's bytes are, whatever vLLM's layout (no vLLM import here).

``vllm_compat.layout`` builds a :class:`CacheView` from the engine's tensors; descriptors, checksums and
host mirrors are made from it alone.
"""

import sys
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch

from vllm_kvtier.errors import UnsupportedLayout
from vllm_kvtier.wire.geometry import CacheGeometry, Field, GroupGeometry, GroupView, Region, RegionGeometry

# Which cells a description of their inner order is of: (packing, cell_tokens, fields) of their regions.
Arrangement = tuple[str, int, tuple[Field, ...]]
NUMBER = 2  # bytes: regions with fields hold bfloat16 or float16


class CacheView:
    """All groups' pages, and the memory under them.

    ``spans`` are the ``(base, nbytes)`` of the distinct allocations, sorted, to register with NIXL.
    The view keeps those allocations alive. ``num_blocks`` blocks exist, ids ``0 .. num_blocks - 1``.

    ``arrangements`` says where the numbers of cells of several tokens lie: int32 [numbers of a cell] on the CPU,
    for each number in logical order (``wire.geometry.Region.fields``) its index within the cell. There is one for
    all regions that have fields and such cells.
    """

    def __init__(
        self,
        groups: Iterable[GroupView],
        num_blocks: int,
        device: torch.device | str,
        storages: Iterable[torch.UntypedStorage],
        arrangements: Mapping[Arrangement, torch.Tensor] = MappingProxyType({}),
    ):
        """Raises UnsupportedLayout if a page lies outside the given storages, ValueError if fields do not fill
        their cells or an arrangement that they need is missing."""
        self.groups = tuple(groups)
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        unique = {(s.data_ptr(), s.nbytes()): s for s in storages}
        self.spans: tuple[tuple[int, int], ...] = tuple(sorted(unique))
        self._storages = [unique[span] for span in self.spans]
        self._starts = [base for base, _ in self.spans]
        self.arrangements = dict(arrangements)
        for group in self.groups:
            for region in group.regions:
                self._storage_of(region)
                self.arrangement(region)

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
        """uint8 [num_blocks, outer, tokens, inner] over the cache's own memory; writing it writes there."""
        storage, offset = self._storage_of(region)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(
            storage,
            offset,
            (self.num_blocks, region.outer, region.tokens, region.inner),
            (region.block_stride, region.outer_stride, region.token_stride, 1),
        )

    def arrangement(self, region: Region) -> torch.Tensor | None:
        """``arrangements`` of this region's cells; None where they hold one token, in logical order, or the region
        has no fields. Raises as the constructor does."""
        if not region.fields:
            return None
        numbers = region.cell_tokens * sum(field.count for field in region.fields)
        if numbers * NUMBER != region.inner:
            raise ValueError(
                f"{region.layer}: {numbers} numbers of {region.fields} do not fill cells of {region.inner} bytes"
            )
        if region.cell_tokens == 1:
            return None
        found = self.arrangements.get((region.packing, region.cell_tokens, region.fields))
        if found is None or found.shape != (numbers,):
            raise ValueError(f"{region.layer}: no arrangement of the {numbers} numbers in cells of {region.packing}")
        return found

    def geometry(self) -> CacheGeometry:
        """What another engine must share for its pages to be copied here byte for byte."""
        return CacheGeometry(
            groups=tuple(
                GroupGeometry(
                    block_tokens=g.block_tokens,
                    kind=g.kind,
                    window=g.window,
                    regions=tuple(
                        RegionGeometry(
                            layer=r.layer,
                            outer=r.outer,
                            first_token=r.first_token,
                            tokens=r.tokens,
                            cell_tokens=r.cell_tokens,
                            inner=r.inner,
                            order=r.order,
                            packing=r.packing,
                            dtype=r.dtype,
                        )
                        for r in g.regions
                    ),
                )
                for g in self.groups
            ),
            byte_order=sys.byteorder,
        )
