"""Checksums of KV blocks in the cache, on its device. ``csrc_triton/checksum.py`` defines them."""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch

from vllm_kvtier.kernels import checksum, page_copy
from vllm_kvtier.kernels.checksum_reference import multipliers
from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.copy.host_tiles import TILE_WORDS, finish, terms, tiles
from vllm_kvtier.worker.copy.part_tables import checksum_table
from vllm_kvtier.worker.copy.pinned_buffers import upload


class BlockChecksums:
    """Computes checksums of blocks of one cache view. Not thread-safe; one instance for each thread and view."""

    def __init__(self, view: CacheView, max_programs: int = checksum.MAX_PROGRAMS):
        """``max_programs``: SMs that the kernel may take on a GPU.

        Raises ValueError if a region's cells are no multiple of 4 bytes.
        """
        self._view = view
        cuda = view.device.type == "cuda"
        self._groups = [
            _DeviceGroup(g, view.device, max_programs) if cuda else _HostGroup(view, g) for g in view.groups
        ]

    def compute(
        self, group: int, block_ids: Sequence[int] | np.ndarray, keys: np.ndarray, valid_tokens: np.ndarray
    ) -> torch.Tensor:
        """int64 [n] on the view's device: the checksums of n blocks of a group.

        ``keys``: uint64 [n], content keys. ``valid_tokens``: int32 [n], tokens of the block that count (a cell of
        several tokens counts if its first one does). On a GPU the work is enqueued on the current stream and the result
        is valid in its order; the host does not wait.

        Raises ValueError for arrays of different lengths or block ids outside the cache.
        """
        ids = np.asarray(block_ids, dtype=np.int64)
        keys = np.asarray(keys, dtype=np.uint64)
        valid = np.asarray(valid_tokens, dtype=np.int64)
        if ids.ndim != 1 or ids.shape != keys.shape or ids.shape != valid.shape:
            raise ValueError(f"{ids.shape} block ids, {keys.shape} keys, {valid.shape} valid tokens")
        if not len(ids):
            return torch.empty(0, dtype=torch.int64, device=self._view.device)
        if ids.min() < 0 or ids.max() >= self._view.num_blocks:
            raise ValueError(f"block ids {ids.min()}..{ids.max()} outside 0..{self._view.num_blocks - 1}")
        return self._groups[group].compute(ids, keys, valid)

    def warm_up(self) -> None:
        """Compile now instead of in the first ``compute`` (seconds on a GPU, nothing on a CPU)."""
        if self._view.device.type == "cuda":
            one = np.ones(1, dtype=np.int64)
            with page_copy.without_compile_hook():
                for group in self._groups:
                    group.compute(one - 1, one.astype(np.uint64), one)


def counted_cells(region: Region, valid: np.ndarray) -> np.ndarray:
    """int64 [n]: cells of the region that count in blocks with ``valid`` tokens."""
    return np.clip(-(-(valid - region.first_token) // region.cell_tokens), 0, region.tokens)


class _HostGroup:
    def __init__(self, view: CacheView, group: GroupView):
        first = 0
        self._regions: list[tuple[Region, np.ndarray, np.ndarray]] = []
        for region in group.regions:
            word = np.dtype(f"<u{checksum.word_bytes(region.inner)}")
            pages = view.pages(region).numpy().view(word)  # [blocks, outer, tokens, words of a cell]
            words = region.block_bytes // word.itemsize
            self._regions.append((region, pages, multipliers(first, words).reshape(pages.shape[1:])))
            first += words

    def compute(self, ids: np.ndarray, keys: np.ndarray, valid: np.ndarray) -> torch.Tensor:
        total = np.zeros(len(ids), dtype=np.uint64)
        for region, pages, r in self._regions:
            cells = counted_cells(region, valid)
            total += cells.astype(np.uint64) * np.uint64(region.outer * r.shape[2]) * np.uint64(checksum.M1)
            for count in np.unique(cells).tolist():
                if count:
                    rows = np.flatnonzero(cells == count)
                    total[rows] += _terms(pages[:, :, :count], r[:, :count], ids[rows])
        return torch.from_numpy(finish(total, 0, keys).view(np.int64))


def _terms(pages: np.ndarray, r: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """uint64 [n]: the sum of all terms of one region's pages [blocks, outer, cells, words of a cell]."""
    result = np.zeros(len(ids), dtype=np.uint64)
    for outer, cells, rows in tiles(len(ids), r.shape, TILE_WORDS):
        w = pages[ids[rows], outer, cells]  # copies, dense
        x = w.reshape(len(w), -1).astype(np.uint64, copy=False)
        result[rows] += terms(x, r[outer, cells].reshape(-1), np.empty_like(x))
    return result


class _DeviceGroup:
    def __init__(self, group: GroupView, device: torch.device, max_programs: int):
        table = checksum_table(group)
        self._cell_words = [(r, n // r.tokens) for r, n in zip(group.regions, table[:, 4].tolist(), strict=True)]
        self._device = device
        self._max_programs = max_programs
        self._regions = torch.from_numpy(table).to(device)
        self._launches = [(f, torch.from_numpy(t).to(device)) for f, t in checksum.plan(table)]

    def compute(self, ids: np.ndarray, keys: np.ndarray, valid: np.ndarray) -> torch.Tensor:
        words = sum(counted_cells(r, valid) * n for r, n in self._cell_words)
        rows = np.stack([ids, keys.view(np.int64), valid, words], axis=1)
        # Triton launches on the thread's current device, which need not be the cache's.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            blocks = upload(rows, self._device)
            acc = torch.zeros(len(ids), dtype=torch.int64, device=self._device)
            checksum.launch(acc, blocks, self._regions, self._launches, self._max_programs)
        return acc
