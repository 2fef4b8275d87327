"""Copies between a KV cache in host memory and slots of the node store: plain copies, done when the call returns.

Tiles of blocks go through a buffer that stays in the core's L2 cache: into it from one side, out of it to the other,
and its words are summed there. So memory is read and written once, and what a load checks is what it wrote, whatever
another process does to the slot meanwhile. ``copier_host_coded`` does the same for groups that a codec encodes.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_kvtier.kernels import checksum
from vllm_kvtier.kernels.checksum_reference import multipliers
from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.wire.slots import PAGE, PartLayout
from vllm_kvtier.worker.copier_host_coded import CodedGroup
from vllm_kvtier.worker.copier_host_tiles import TILE_WORDS, finish, terms, tiles
from vllm_kvtier.worker.views import CacheView

# Work worth one call: some milliseconds, after which the thread that copies looks after its other business.
PIECE_BYTES = 8 << 20
# The same of encoded bytes, which take a core some ten times as long.
CODED_PIECE_BYTES = 1 << 20


class HostCopy:
    """See ``copier.Copy``; done from the beginning."""

    def __init__(self, nbytes: int, bad: np.ndarray | None):
        self.nbytes, self.bad = nbytes, bad

    def done(self) -> bool:
        return True

    def hold(self) -> None:
        """It has ended."""


class HostCopier:
    """See ``copier.Copier``. Events are of no use here: what came before has been done."""

    def __init__(
        self,
        view: CacheView,
        pool: tuple[int, int, Any],
        layouts: Sequence[PartLayout],
        part_offsets: Sequence[int],
    ):
        """``pool[2].buffer``: the pool's bytes. Raises ValueError if a region's cells are no multiple of 4 bytes, or if
        a coded layout does not fit its group."""
        address, nbytes, mapping = pool
        self._bytes, self._registered = nbytes, 0
        memory = torch.frombuffer(mapping.buffer, dtype=torch.uint8)
        self._words = memory.numpy()[: nbytes // 8 * 8].view(np.uint64)
        whole = max(offset + layout.nbytes for layout, offset in zip(layouts, part_offsets, strict=True))
        pages = max(0, nbytes - whole) // PAGE + 1
        self._groups: list[_Group | CodedGroup] = []
        for group, layout, offset in zip(view.groups, layouts, part_offsets, strict=True):
            if layout.coded:
                self._groups.append(CodedGroup(view, group, layout, self._words[offset // 8 :]))
            else:
                # A view of slots: "block" ids are page numbers, so that all that knows views knows slots.
                dense = _slots(group, layout, address + offset)
                slots = CacheView([dense], pages, "cpu", [memory.untyped_storage()])
                self._groups.append(_Group(view, group, slots, dense))
        self._ends = [offset + layout.nbytes for layout, offset in zip(layouts, part_offsets, strict=True)]
        self._part_bytes = [layout.nbytes for layout in layouts]
        self._sum_words = [(o + layout.sum_offset) // 8 for layout, o in zip(layouts, part_offsets, strict=True)]
        self._blocks = view.num_blocks
        self._pages = [[view.pages(region) for region in group.regions] for group in view.groups]
        self.piece_bytes = CODED_PIECE_BYTES if any(layout.coded for layout in layouts) else PIECE_BYTES

    def store(self, group, blocks, keys, slots, after=None) -> HostCopy:
        self._check(group, blocks, keys, slots)
        sums = self._groups[group].copy(blocks, slots, keys, to_slots=True)
        self._words[slots * (PAGE // 8) + self._sum_words[group]] = sums
        return HostCopy(len(blocks) * self._part_bytes[group], None)

    def load(self, group, blocks, keys, slots, after=None) -> HostCopy:
        self._check(group, blocks, keys, slots)
        sums = self._groups[group].copy(blocks, slots, keys, to_slots=False)
        bad = self._words[slots * (PAGE // 8) + self._sum_words[group]] != sums
        if bad.any():
            # Nobody reads them as what they should have been; but as the last block of another request they may come to
            # lie, half used, where vLLM's CPU attention multiplies all of it, by zero: and NaN times zero is NaN.
            for pages in self._pages[group]:
                pages[torch.from_numpy(blocks[bad])] = 0
        return HostCopy(len(blocks) * self._part_bytes[group], bad)

    def _check(self, group: int, blocks: np.ndarray, keys: np.ndarray, slots: np.ndarray) -> None:
        if not blocks.shape == keys.shape == slots.shape == (len(blocks),):
            raise ValueError(f"{blocks.shape} blocks, {keys.shape} keys, {slots.shape} slots")
        if not len(blocks):
            return
        if blocks.min() < 0 or blocks.max() >= self._blocks:
            raise ValueError(f"blocks {blocks.min()}..{blocks.max()} outside 0..{self._blocks - 1}")
        if slots.min() <= 0 or int(slots.max()) * PAGE + self._ends[group] > self._registered:
            raise ValueError(f"slots {slots.min()}..{slots.max()} outside the {self._registered} bytes in use")

    def register(self, start: int, nbytes: int) -> None:
        if start != self._registered or nbytes <= 0 or start + nbytes > self._bytes:
            raise ValueError(f"{nbytes} bytes at {start} of a pool of {self._bytes}, after {self._registered}")
        self._registered += nbytes

    def warm_up(self) -> None:
        """Nothing to compile."""

    def idle(self) -> bool:
        return True

    def close(self) -> None:
        """Drops every view of the pool, so that it can be unmapped."""
        self._groups, self._pages, self._words = [], [], None
        self._registered = 0


class _Group:
    def __init__(self, view: CacheView, group: GroupView, slots: CacheView, slot_group: GroupView):
        first = 0
        # (cache, pool, multipliers): arrays [blocks or pages, outer, cells, words of a cell], [outer, cells, words]
        self._regions: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for region, slot in zip(group.regions, slot_group.regions, strict=True):
            word = np.dtype(f"<u{checksum.word_bytes(region.inner)}")
            cache, pool = (v.pages(r).numpy().view(word) for v, r in ((view, region), (slots, slot)))
            count = region.block_bytes // word.itemsize
            if cache[0].flags.c_contiguous and pool[0].flags.c_contiguous:
                # One long line is copied and cut into tiles with less ado than many cells.
                cache, pool = (_flat(a, count) for a in (cache, pool))
            self._regions.append((cache, pool, multipliers(first, count).reshape(cache.shape[1:])))
            first += count
        self._count = first
        self._buffers = [np.empty(TILE_WORDS, dtype=np.uint64) for _ in range(2)]

    def copy(self, blocks: np.ndarray, slots: np.ndarray, keys: np.ndarray, to_slots: bool) -> np.ndarray:
        """Copies blocks to slots or back; uint64 [n], the checksums of what was copied."""
        total = np.zeros(len(blocks), dtype=np.uint64)
        blocks, slots = blocks.tolist(), slots.tolist()
        for cache, pool, r in self._regions:
            source, target = (cache, pool) if to_slots else (pool, cache)
            froms, tos = (blocks, slots) if to_slots else (slots, blocks)
            for outer, cells, rows in tiles(len(blocks), r.shape, TILE_WORDS):
                factor = r[outer, cells]
                shape = (rows.stop - rows.start, *factor.shape)
                words = shape[0] * factor.size
                wide, spare = (b[: max(words, 1)] for b in self._wide(words))
                narrow = spare.view(source.dtype)[:words].reshape(shape)
                tile = wide.reshape(shape) if source.dtype.itemsize == 8 else narrow
                for i, block in enumerate(froms[rows]):
                    np.copyto(tile[i], source[block, outer, cells])
                for i, block in enumerate(tos[rows]):
                    np.copyto(target[block, outer, cells], tile[i])
                if tile is narrow:
                    np.copyto(wide.reshape(shape), narrow)
                total[rows] += terms(wide.reshape(shape[0], -1), factor.reshape(-1), spare.reshape(shape[0], -1))
        return finish(total, self._count, keys)

    def _wide(self, words: int) -> list[np.ndarray]:
        # A cell larger than a tile is a tile of its own.
        if words > len(self._buffers[0]):
            self._buffers = [np.empty(words, dtype=np.uint64) for _ in range(2)]
        return self._buffers


def _flat(pages: np.ndarray, count: int) -> np.ndarray:
    """[blocks, outer, cells, words] of dense pages as [blocks, 1, count, 1]: each word a cell."""
    strides = (pages.strides[0], 0, pages.itemsize, pages.itemsize)
    return np.lib.stride_tricks.as_strided(pages, (pages.shape[0], 1, count, 1), strides)


def _slots(group: GroupView, layout: PartLayout, base: int) -> GroupView:
    """The group's regions as they lie in slots: dense, in logical order, a "block" at each page of the pool."""
    regions: list[Region] = [
        msgspec.structs.replace(
            region,
            base=base + offset,
            fields=(),
            block_stride=PAGE,
            outer_stride=region.tokens * region.inner if region.outer > 1 else 0,
            token_stride=region.inner if region.tokens > 1 else 0,
        )
        for region, offset in zip(group.regions, layout.region_offsets, strict=True)
    ]
    return msgspec.structs.replace(group, regions=tuple(regions))
