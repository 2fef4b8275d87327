"""Copies between a KV cache in host memory and slots of the node store: plain copies, done when the call returns."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_kvtier.wire.geometry import GroupView
from vllm_kvtier.wire.slots import PAGE, PartLayout
from vllm_kvtier.worker.sums import BlockSums
from vllm_kvtier.worker.views import CacheView

# Work worth one call: some milliseconds, after which the thread that copies looks after its other business.
PIECE_BYTES = 8 << 20


class HostCopy:
    """See ``copier.Copy``; done from the beginning."""

    def __init__(self, nbytes: int, bad: np.ndarray | None):
        self.nbytes, self.bad = nbytes, bad

    def done(self) -> bool:
        return True


class HostCopier:
    """See ``copier.Copier``. Events are of no use here: what came before has been done."""

    piece_bytes = PIECE_BYTES

    def __init__(
        self,
        view: CacheView,
        pool: tuple[int, int, Any],
        layouts: Sequence[PartLayout],
        part_offsets: Sequence[int],
    ):
        address, nbytes, mapping = pool
        self._bytes, self._registered = nbytes, 0
        memory = torch.frombuffer(mapping.buffer, dtype=torch.uint8)
        self._words = memory.numpy().view(np.uint64)
        groups = [
            _slots(group, layout, address + offset)
            for group, layout, offset in zip(view.groups, layouts, part_offsets, strict=True)
        ]
        # A slot view: "block" ids are page numbers, so that all that knows views knows slots.
        whole = max(offset + layout.nbytes for layout, offset in zip(layouts, part_offsets, strict=True))
        self._slots = CacheView(groups, max(0, nbytes - whole) // PAGE + 1, "cpu", [memory.untyped_storage()])
        self._ends = [offset + layout.nbytes for layout, offset in zip(layouts, part_offsets, strict=True)]
        self._part_bytes = [layout.nbytes for layout in layouts]
        self._sum_words = [(o + layout.sum_offset) // 8 for layout, o in zip(layouts, part_offsets, strict=True)]
        self._sums = BlockSums(self._slots)
        self._blocks = view.num_blocks
        self._pages = [
            [(view.pages(a).numpy(), self._slots.pages(b).numpy()) for a, b in zip(g.regions, s.regions, strict=True)]
            for g, s in zip(view.groups, groups, strict=True)
        ]
        self._tokens = [g.block_tokens for g in view.groups]

    def store(self, group, blocks, keys, slots, after=None) -> HostCopy:
        self._check(group, blocks, keys, slots)
        for cache, pool in self._pages[group]:
            for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True):
                np.copyto(pool[slot], cache[block])
        self._words[self._sum_index(group, slots)] = self._make_sums(group, keys, slots)
        return HostCopy(len(blocks) * self._part_bytes[group], None)

    def load(self, group, blocks, keys, slots, after=None) -> HostCopy:
        self._check(group, blocks, keys, slots)
        for cache, pool in self._pages[group]:
            for block, slot in zip(blocks.tolist(), slots.tolist(), strict=True):
                np.copyto(cache[block], pool[slot])
        bad = self._words[self._sum_index(group, slots)] != self._make_sums(group, keys, slots)
        return HostCopy(len(blocks) * self._part_bytes[group], bad)

    def _sum_index(self, group: int, slots: np.ndarray) -> np.ndarray:
        return slots * (PAGE // 8) + self._sum_words[group]

    def _make_sums(self, group: int, keys: np.ndarray, slots: np.ndarray) -> np.ndarray:
        valid = np.full(len(slots), self._tokens[group], dtype=np.int32)
        return self._sums.compute(group, slots, keys, valid).numpy().view(np.uint64)

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
        self._pages, self._slots, self._sums, self._words = [], None, None, None


def _slots(group: GroupView, layout: PartLayout, base: int) -> GroupView:
    """The group's regions as they lie in slots: dense, in logical order, a "block" at each page of the pool."""
    regions = [
        msgspec.structs.replace(
            region,
            base=base + offset,
            block_stride=PAGE,
            outer_stride=region.tokens * region.inner if region.outer > 1 else 0,
            token_stride=region.inner if region.tokens > 1 else 0,
        )
        for region, offset in zip(group.regions, layout.region_offsets, strict=True)
    ]
    return msgspec.structs.replace(group, regions=tuple(regions))
