"""Checksums of KV blocks, on whatever device the cache is; ``csrc_triton/checksum.py`` defines them."""

from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch

from vllm_kvtier.kernels import checksum
from vllm_kvtier.kernels.checksum_reference import multipliers
from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.worker.upload import upload
from vllm_kvtier.worker.views import CacheView

# Bytes of pages that a CPU works on at once: with the multipliers and two temporaries this stays within an
# L2 cache of 1 MiB (measured on a Cascade Lake core: 128 to 256 KiB is best, half the rate beyond 512 KiB).
_TILE_BYTES = 128 << 10


class BlockSums:
    """Sums blocks of one cache view. Not thread-safe; one instance for each thread and view."""

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
        self,
        group: int,
        block_ids: Sequence[int] | np.ndarray,
        keys: np.ndarray,
        valid_tokens: np.ndarray,
    ) -> torch.Tensor:
        """int64 [n] on the view's device: the checksums of n blocks of a group.

        ``keys``: uint64 [n], content keys. ``valid_tokens``: int32 [n], tokens of the block that count (a
        cell that holds several counts if its first one does). On a GPU the work is enqueued on the current
        stream and the result is good in its order; the host does not wait.

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
        """Compiles what the first ``compute`` would (seconds on a GPU, nothing on a CPU)."""
        if self._view.device.type == "cuda":
            one = np.ones(1, dtype=np.int64)
            for group in self._groups:
                group.compute(one - 1, one.astype(np.uint64), one)


def _cells(region: Region, valid: np.ndarray) -> np.ndarray:
    """int64 [n]: how many cells of the region count in blocks with so many valid tokens."""
    return np.clip(-(-(valid - region.first_token) // region.cell_tokens), 0, region.tokens)


def _words(group: GroupView) -> list[int]:
    return [r.block_bytes // checksum.word_bytes(r.inner) for r in group.regions]


class _HostGroup:
    def __init__(self, view: CacheView, group: GroupView):
        first = 0
        self._regions: list[tuple[Region, np.ndarray, np.ndarray]] = []
        for region, words in zip(group.regions, _words(group), strict=True):
            word = np.dtype("<u8") if checksum.word_bytes(region.inner) == 8 else np.dtype("<u4")
            pages = view.pages(region).numpy().view(word)  # [blocks, outer, tokens, words of a cell]
            self._regions.append((region, pages, multipliers(first, words).reshape(pages.shape[1:])))
            first += words

    def compute(self, ids: np.ndarray, keys: np.ndarray, valid: np.ndarray) -> torch.Tensor:
        total = np.zeros(len(ids), dtype=np.uint64)
        for region, pages, r in self._regions:
            cells = _cells(region, valid)
            total += cells.astype(np.uint64) * np.uint64(region.outer * r.shape[2]) * np.uint64(checksum.M1)
            for count in np.unique(cells).tolist():
                if count:
                    rows = np.flatnonzero(cells == count)
                    total[rows] += _terms(pages[:, :, :count], r[:, :count], ids[rows])
        h = total ^ keys
        for factor in (checksum.F1, checksum.F2):
            h = (h ^ (h >> np.uint64(33))) * np.uint64(factor)
        h ^= h >> np.uint64(33)
        return torch.from_numpy(h.view(np.int64))


def _terms(pages: np.ndarray, r: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """uint64 [n]: the sum of all terms of one region's pages [blocks, outer, cells, words of a cell]."""
    _, outer, cells, words = pages.shape
    shift = np.uint64(32)
    result = np.zeros(len(ids), dtype=np.uint64)
    # Tiles of whole pages if they fit, else of as many of the outer indices of one page.
    line = cells * words * 8
    step_outer = max(1, min(outer, _TILE_BYTES // line))
    step = max(1, _TILE_BYTES // (step_outer * line))
    for o in range(0, outer, step_outer):
        part = pages[:, o : o + step_outer]
        factor = np.ascontiguousarray(r[o : o + step_outer]).reshape(-1)
        for at in range(0, len(ids), step):
            w = part[ids[at : at + step]]  # copies, dense
            x = w.reshape(len(w), -1).astype(np.uint64, copy=False)
            np.multiply(x, factor, out=x)
            np.bitwise_xor(x, x >> shift, out=x)
            result[at : at + step] += x @ factor
    return result


class _DeviceGroup:
    def __init__(self, group: GroupView, device: torch.device, max_programs: int):
        rows, first = [], 0
        for r, words in zip(group.regions, _words(group), strict=True):
            word = checksum.word_bytes(r.inner)
            strides = (r.block_stride, r.outer_stride, r.token_stride)
            cells = (words, r.inner // word, r.tokens, first, r.first_token, r.cell_tokens)
            rows.append((r.base, *strides, *cells, word))
            first += words
        table = np.array(rows, dtype=np.int64)
        self._cell_words = [(r, n // r.tokens) for r, n in zip(group.regions, _words(group), strict=True)]
        self._device = device
        self._max_programs = max_programs
        self._regions = torch.from_numpy(table).to(device)
        self._launches = [(f, torch.from_numpy(t).to(device)) for f, t in checksum.plan(table)]

    def compute(self, ids: np.ndarray, keys: np.ndarray, valid: np.ndarray) -> torch.Tensor:
        words = sum(_cells(r, valid) * n for r, n in self._cell_words)
        rows = np.stack([ids, keys.view(np.int64), valid, words], axis=1)
        # Triton launches on the thread's current device, which need not be the cache's.
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            blocks = upload(rows, self._device)
            acc = torch.zeros(len(ids), dtype=torch.int64, device=self._device)
            checksum.launch(acc, blocks, self._regions, self._launches, self._max_programs)
        return acc
