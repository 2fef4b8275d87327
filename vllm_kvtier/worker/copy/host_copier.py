"""Plain copies between a KV cache in host memory and slots of a store; a copy has ended when the call returns.

Tiles of blocks go through a buffer that stays in the core's L2 cache, where their checksums are computed. So memory is
read and written once, and a load verifies the bytes that it writes, even if another process changes the slot meanwhile.
``worker.copy.host_encoded_copier`` does the same for encoded groups.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.kernels import checksum
from vllm_kvtier.kernels.checksum_reference import multipliers
from vllm_kvtier.wire.geometry import GroupView
from vllm_kvtier.wire.slots import PAGE, PartLayout
from vllm_kvtier.worker.cache_view import CacheView, dense_region
from vllm_kvtier.worker.copy.host_encoded_copier import EncodedGroup
from vllm_kvtier.worker.copy.host_tiles import TILE_WORDS, finish, terms, tiles

# Work of one call: some milliseconds, after which the calling thread has other work to do.
PIECE_BYTES = 8 << 20
# The same for encoded bytes, which take a core some ten times as long.
ENCODED_PIECE_BYTES = 1 << 20


class HostCopy:
    """See ``worker.copy.base.Copy``; it has ended when it is made."""

    def __init__(self, nbytes: int, bad: np.ndarray | None):
        self.nbytes, self.bad = nbytes, bad

    def done(self) -> bool:
        return True

    def make_stream_wait(self) -> None:
        """It has ended."""


class HostCopier:
    """See ``worker.copy.base.Copier``. Events are ignored: all work before a call has ended."""

    on_model_stream = False

    def __init__(
        self, view: CacheView, pool: tuple[int, int, Any], layouts: Sequence[PartLayout], part_offsets: Sequence[int]
    ):
        """``pool[2].buffer``: the pool's bytes. Raises ValueError if a region's cells are no multiple of 4 bytes, or if
        an encoded layout does not match its group, KVTierError if the pool is smaller than a block."""
        address, nbytes, mapping = pool
        self._parts = list(zip(layouts, part_offsets, strict=True))
        if (most := max(offset + layout.nbytes for layout, offset in self._parts)) > nbytes:
            raise KVTierError(f"it has {nbytes} bytes, and a block needs {most}: raise store_size")
        self._view, self._bytes, self._registered = view, nbytes, 0
        memory = torch.frombuffer(mapping.buffer, dtype=torch.uint8)
        self._words = memory.numpy()[: nbytes // 8 * 8].view(np.uint64)
        self._groups: list[_Group | EncodedGroup] = []
        for group, (layout, offset) in zip(view.groups, self._parts, strict=True):
            if layout.encoded:
                self._groups.append(EncodedGroup(view, group, layout, self._words[offset // 8 :]))
            else:
                # A view of slots, in which block ids are page numbers.
                dense = _slots(group, layout, address + offset)
                pages = (nbytes - offset - layout.nbytes) // PAGE + 1
                slots = CacheView([dense], pages, "cpu", [memory.untyped_storage()])
                self._groups.append(_Group(view, group, slots, dense))
        self.piece_bytes = ENCODED_PIECE_BYTES if any(layout.encoded for layout in layouts) else PIECE_BYTES

    def store(self, group, blocks, keys, slots, after=None, stream=None) -> HostCopy:
        return self._copy(group, blocks, keys, slots, to_slots=True)

    def load(self, group, blocks, keys, slots, after=None) -> HostCopy:
        return self._copy(group, blocks, keys, slots, to_slots=False)

    def _copy(self, group: int, blocks: np.ndarray, keys: np.ndarray, slots: np.ndarray, to_slots: bool) -> HostCopy:
        layout, offset = self._parts[group]
        self._check(offset + layout.nbytes, blocks, keys, slots)
        checksums = self._groups[group].copy(blocks, slots, keys, to_slots)
        words, bad = slots * (PAGE // 8) + (offset + layout.sum_offset) // 8, None
        if to_slots:
            self._words[words] = checksums
        else:
            bad = self._words[words] != checksums
            # No request uses bad blocks as loaded. But one may become the half used last block of another request,
            # where vLLM's CPU attention multiplies the unused part by zero: NaN times zero is NaN.
            for region in self._view.groups[group].regions if bad.any() else ():
                self._view.pages(region)[torch.from_numpy(blocks[bad])] = 0
        return HostCopy(len(blocks) * layout.nbytes, bad)

    def _check(self, end: int, blocks: np.ndarray, keys: np.ndarray, slots: np.ndarray) -> None:
        if not blocks.shape == keys.shape == slots.shape == (len(blocks),):
            raise ValueError(f"{blocks.shape} blocks, {keys.shape} keys, {slots.shape} slots")
        if not len(blocks):
            return
        if blocks.min() < 0 or blocks.max() >= self._view.num_blocks:
            raise ValueError(f"blocks {blocks.min()}..{blocks.max()} outside 0..{self._view.num_blocks - 1}")
        if slots.min() <= 0 or int(slots.max()) * PAGE + end > self._registered:
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
        """Drop every view of the pool, so that it can be unmapped."""
        self._groups, self._words = [], None
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
                # One long line is copied and cut into tiles faster than many cells.
                cache, pool = (_flat(a, count) for a in (cache, pool))
            self._regions.append((cache, pool, multipliers(first, count).reshape(cache.shape[1:])))
            first += count
        self._count = first
        self._buffers = [np.empty(TILE_WORDS, dtype=np.uint64) for _ in range(2)]

    def copy(self, blocks: np.ndarray, slots: np.ndarray, keys: np.ndarray, to_slots: bool) -> np.ndarray:
        """Copy blocks to slots or back; uint64 [n], the checksums of the copied bytes."""
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
    """The group's regions within slots: dense, in logical order, a "block" at each page of the pool."""
    regions = (
        msgspec.structs.replace(dense_region(region, base + offset, PAGE, "outer"), fields=())
        for region, offset in zip(group.regions, layout.region_offsets, strict=True)
    )
    return msgspec.structs.replace(group, regions=tuple(regions))
