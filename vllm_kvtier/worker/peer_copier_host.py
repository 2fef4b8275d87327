"""Blocks out of the caches of other processes of this node, by plain copies (``peer_copier`` says what for).

Piece by piece: the source's pages are read into a scratch of ours, gaps left out and otherwise as they lie there; the
scratch is summed; and what is right goes into our pages. So nothing that was not checked is ever in the cache, where
vLLM's CPU attention would multiply even what is beyond a block's tokens. A source that writes, or dies, in the middle
makes a wrong sum or an error, no matter when: what is compared is the content that came with our own key of it.

``done`` does one piece, so that whoever calls it can do something else in between. Most of a piece is system calls and
operations of numpy on large arrays, which leave the interpreter to others and use no core but the caller's.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import torch

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.worker.cover import Part, PartGroup, PartRegion
from vllm_kvtier.worker.descriptors import page_chunks
from vllm_kvtier.worker.peer_copier import CopyJob
from vllm_kvtier.worker.process_memory import ProcessMemory
from vllm_kvtier.worker.sums import BlockSums
from vllm_kvtier.worker.views import CacheView

# A piece: 4 ms of a core that reads and checks 1 GB/s.
PIECE_BYTES = 4 << 20
_ALIGN = 64  # of the scratch and the regions in it


class HostPeerCopier:
    def __init__(self, view: CacheView, table: torch.Tensor, piece_bytes: int = PIECE_BYTES):
        """``table``: int64 [num_blocks], our checksums. ``piece_bytes``: read at once, at least a block."""
        self._view, self._table, self._piece_bytes = view, table.numpy(), piece_bytes
        self._sources: dict[str, list[_Reader]] = {}
        # Sources whose pages have one shape share a scratch: only one piece is under way.
        self._scratches: WeakValueDictionary[tuple, _Scratch] = WeakValueDictionary()
        self._closed = False

    def add(self, source: str, parts: Sequence[Part]) -> None:
        if source in self._sources:
            return
        readers = []
        for part in parts:
            memory = ProcessMemory(part.source.shared)
            for group in part.groups:
                readers.append(_Reader(memory, part, group, self._scratch(part, group), self._view))
        self._sources[source] = readers

    def forget(self, source: str) -> None:
        self._sources.pop(source, None)  # what is under way keeps its own

    def start(self, jobs: Sequence[CopyJob], after: Any | None = None) -> "HostCopy":
        for job in jobs:
            for g in job.groups:
                self._table[g.local] = 0
        return HostCopy(self, [(job, self._sources[job.source]) for job in jobs])

    def warm_up(self) -> None:
        """Nothing to compile."""

    def close(self) -> None:
        self._closed = True
        self._sources.clear()
        self._scratches.clear()

    @property
    def closed(self) -> bool:
        return self._closed

    def vouch(self, blocks: np.ndarray, sums: np.ndarray) -> None:
        self._table[blocks] = sums

    def _scratch(self, part: Part, group: PartGroup) -> "_Scratch":
        theirs = next(g for g in part.source.groups if g.group == group.group)
        theirs = msgspec.structs.replace(theirs, regions=tuple(r.source for r in group.regions))
        key = tuple((r.outer, r.order, r.first_token, r.tokens, r.inner, r.cell_tokens) for r in theirs.regions)
        found = self._scratches.get(key)
        if found is None:
            found = self._scratches[key] = _Scratch(theirs, self._piece_bytes)
        return found


class HostCopy:
    def __init__(self, copier: HostPeerCopier, jobs: "list[tuple[CopyJob, list[_Reader]]]"):
        self._copier = copier
        self._jobs = jobs
        # Of a group that nothing is read of nothing is right.
        self._bad: list[set[int]] = [_unread(job, readers) for job, readers in jobs]
        self._why = ["" for _ in jobs]
        self.nbytes = 0
        self._pieces = self._cut()

    def done(self) -> bool:
        """Does one piece."""
        piece = next(self._pieces, None)
        if piece is None:
            return True
        number, reader, rows = piece
        blocks, remote, keys, valid = rows
        try:
            if self._copier.closed:
                raise KVTierError("this engine gave its cache away meanwhile")
            if time.monotonic() >= self._jobs[number][0].until:
                raise KVTierError("it did not end in time")
            sums, right = reader.copy(blocks, remote, keys, valid)
        except KVTierError as error:
            self._why[number] = str(error)
            self._bad[number].update(block for g in self._jobs[number][0].groups for block in g.local.tolist())
            return False
        self.nbytes += len(blocks) * reader.block_bytes
        self._bad[number].update(blocks[~right].tolist())
        if reader.whole:
            self._copier.vouch(blocks[right], sums[right])
        return False

    def bad(self, job: int) -> set[int]:
        return self._bad[job]

    def why(self, job: int) -> str:
        return self._why[job]

    def wait_on(self, stream: Any) -> None:
        """Nothing on a CPU runs behind anything: ``wait``."""

    def wait(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self.done():
            if time.monotonic() >= until:
                return False
        return True

    def _cut(self) -> "Iterator[tuple[int, _Reader, tuple[np.ndarray, ...]]]":
        """(number of the job, who reads, (local, remote, keys, valid)), until each job's end or first error."""
        for number, (job, readers) in enumerate(self._jobs):
            for reader in readers:
                for g in job.groups:
                    if g.group != reader.group:
                        continue
                    nearest = np.argsort(g.remote)  # blocks that lie together there are read together
                    for start in range(0, len(nearest), reader.most):
                        if self._why[number]:
                            break
                        cut = nearest[start : start + reader.most]
                        yield number, reader, (g.local[cut], g.remote[cut], g.keys[cut], g.valid[cut])


def _unread(job: CopyJob, readers: "list[_Reader]") -> set[int]:
    known = {reader.group for reader in readers}
    return {block for g in job.groups if g.group not in known for block in g.local.tolist()}


class _Scratch:
    """Memory for some blocks of pages of one shape: a region after the other, dense, each in its own order."""

    def __init__(self, group: GroupView, nbytes: int):
        block_bytes = sum(region.block_bytes for region in group.regions)
        self.most = max(1, nbytes // block_bytes)
        starts, at = [], 0
        for region in group.regions:
            starts.append(at)
            at += -(-region.block_bytes * self.most // _ALIGN) * _ALIGN
        memory = torch.empty(at + _ALIGN, dtype=torch.uint8)
        base = -(-memory.data_ptr() // _ALIGN) * _ALIGN
        self.regions = tuple(_dense(r, base + start) for r, start in zip(group.regions, starts, strict=True))
        dense = msgspec.structs.replace(group, regions=self.regions)
        self.view = CacheView([dense], self.most, "cpu", [memory.untyped_storage()])
        self.sums = BlockSums(self.view)
        self.told = np.zeros(self.most, dtype=np.int64)  # what the source's table says


def _dense(region: Region, base: int) -> Region:
    """Without gaps, dimensions in the order that they have in memory."""
    cell, cells, outer = region.inner, region.tokens, region.outer
    strides = (cell, cell * outer) if region.order == "token" else (cell * cells, cell)
    return msgspec.structs.replace(
        region,
        base=base,
        block_stride=region.block_bytes,
        outer_stride=strides[0] if outer > 1 else 0,
        token_stride=strides[1] if cells > 1 else 0,
        fields=(),
    )


class _Reader:
    """One group of a rank of a source."""

    def __init__(self, memory: ProcessMemory, part: Part, group: PartGroup, scratch: _Scratch, view: CacheView):
        self._memory, self._sums_base, self._scratch = memory, part.source.sums_base, scratch
        self.group, self.whole, self.most = group.group, group.whole, scratch.most
        self.block_bytes = sum(r.source.block_bytes for r in group.regions)
        # (offsets within a page there, and within a page of the scratch; sizes) of its contiguous pieces.
        self._chunks = []
        for region in group.regions:
            there, sizes = np.array(page_chunks(region.source), dtype=np.int64).T
            self._chunks.append((region.source, there, np.cumsum(sizes) - sizes, sizes))
        self._pairs = [
            (each, *_pair(each, dense, scratch.view, view))
            for each, dense in zip(group.regions, scratch.regions, strict=True)
            if each.target is not None
        ]

    def copy(
        self, blocks: np.ndarray, remote: np.ndarray, keys: np.ndarray, valid: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(int64 [n], bool [n]): the checksums of what came, and which are right: those are in our pages then.
        Raises KVTierError if the source cannot be read; then nothing was written."""
        count = len(blocks)
        self._read(remote)
        sums = self._scratch.sums.compute(0, np.arange(count), keys, valid).numpy()
        right = sums == self._scratch.told[:count]
        rows = slice(count) if right.all() else np.flatnonzero(right)
        for each, come, pages in self._pairs:
            _store(each.source, come, rows, pages, blocks[rows], valid[rows])
        return sums, right

    def _read(self, remote: np.ndarray) -> None:
        rows = np.arange(len(remote))[:, None]
        parts = []  # (local, remote, sizes)
        for (region, there, here, sizes), dense in zip(self._chunks, self._scratch.regions, strict=True):
            far = region.base + remote[:, None] * region.block_stride + there
            near = dense.base + rows * dense.block_stride + here
            parts.append((near.ravel(), far.ravel(), np.broadcast_to(sizes, far.shape).ravel()))
        # The table last: what a source that has just finished a block says of it comes after its bytes.
        told = self._scratch.told.ctypes.data + 8 * rows.ravel()
        parts.append((told, self._sums_base + 8 * remote, np.full(len(remote), 8)))
        self._memory.read(*_joined(*(np.concatenate(column) for column in zip(*parts, strict=True))))


def _joined(near: np.ndarray, far: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same with fewer pieces, where they follow each other on both sides."""
    apart = (near[1:] != near[:-1] + sizes[:-1]) | (far[1:] != far[:-1] + sizes[:-1])
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return near[starts], far[starts], np.add.reduceat(sizes, starts)


def _pair(each: PartRegion, dense: Region, scratch: CacheView, view: CacheView) -> tuple[np.ndarray, np.ndarray]:
    """Where this region's heads come from and go to: [blocks, outers, cells, words of a cell], over the memory."""
    come = scratch.pages(dense).numpy()[:, each.first_outer : each.first_outer + each.outers]
    pages = view.pages(each.target).numpy()[:, each.target_outer : each.target_outer + each.outers]
    for word in (np.dtype(np.uint64), np.dtype(np.uint32)):
        size = word.itemsize
        if all(a.ctypes.data % size == 0 and not any(n % size for n in (*a.strides[:-1], a.shape[-1]))
               for a in (come, pages)):  # fmt: skip
            return come.view(word), pages.view(word)
    return come, pages


def _store(
    source: Region, come: np.ndarray, rows: slice | np.ndarray, pages: np.ndarray, blocks: np.ndarray, valid: np.ndarray
) -> None:
    """Cells that hold tokens which count go to our pages; what lies beyond was not checked."""
    if not len(blocks):
        return
    cells = np.clip(-(-(valid.astype(np.int64) - source.first_token) // source.cell_tokens), 0, source.tokens)
    if (cells == source.tokens).all():
        pages[blocks] = come[rows]
        return
    rows = np.arange(len(blocks)) if isinstance(rows, slice) else rows
    for row, block, count in zip(rows.tolist(), blocks.tolist(), cells.tolist(), strict=True):
        pages[block, :, :count] = come[row, :, :count]
