"""Plain copies from the caches of other processes of this node; ``worker.peer_fetch.base`` has the contract.

Piece by piece: pages of the source are read into a scratch, in the source's order but without gaps; the scratch's
checksums are computed; right blocks go into our pages. So the cache never holds unverified bytes: vLLM's CPU attention
multiplies even those beyond a block's tokens. If the source writes or dies meanwhile, the read raises or a checksum
does not match, since it is computed over the bytes that arrived, with our own key.

``done`` does one piece, so that its caller can do other work in between. Most of a piece is system calls and operations
of numpy on large arrays, which release the interpreter and use only the caller's core.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import torch

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.transfer_jobs import GroupPull
from vllm_kvtier.shapes.tp_mapping import SourceGroup, SourceRank
from vllm_kvtier.wire.geometry import GroupView
from vllm_kvtier.wire.messages import Shared
from vllm_kvtier.wire.slots import align
from vllm_kvtier.worker.cache_view import CacheView, dense_region
from vllm_kvtier.worker.integrity.checksums import BlockChecksums
from vllm_kvtier.worker.nixl_pull.descriptors import page_chunks
from vllm_kvtier.worker.peer_fetch.base import Copy, CopyJob
from vllm_kvtier.worker.peer_fetch.page_writers import page_writer
from vllm_kvtier.worker.peer_fetch.process_memory import ProcessMemory

# Bytes of a piece: 4 ms of a core that reads and verifies 1 GB/s.
PIECE_BYTES = 4 << 20
_ALIGN = 64  # of the scratch and the regions in it


class Memory(Protocol):
    def read(self, local: np.ndarray, remote: np.ndarray, sizes: np.ndarray) -> None:
        """See ``process_memory.ProcessMemory``."""


class HostPeerCopier:
    def __init__(
        self,
        view: CacheView,
        table: torch.Tensor,
        piece_bytes: int = PIECE_BYTES,
        open_memory: Callable[[Shared], Memory] = ProcessMemory,
    ):
        """``table``: int64 [num_blocks], our checksums. ``piece_bytes``: of one read, at least a block. ``open_memory``
        opens what a source shares."""
        self._view, self.table, self._piece_bytes, self._open_memory = view, table.numpy(), piece_bytes, open_memory
        self._sources: dict[str, list[_Reader]] = {}
        # Sources with pages of one shape share a scratch, since only one piece is under way.
        self._scratches: WeakValueDictionary[tuple, _Scratch] = WeakValueDictionary()
        self.closed = False

    def add(self, instance: str, parts: Sequence[SourceRank]) -> None:
        if instance in self._sources:
            return
        readers = []
        for part in parts:
            memory = self._open_memory(part.source.shared)
            for number in dict.fromkeys(group.group for group in part.groups):
                groups = [group for group in part.groups if group.group == number]
                readers.append(_Reader(memory, part, groups, self._scratch(part, groups[0]), self._view))
        self._sources[instance] = readers

    def remove(self, instance: str) -> None:
        self._sources.pop(instance, None)  # a copy under way keeps its readers

    def start(self, jobs: Sequence[CopyJob], after: Any | None = None) -> "HostCopy":
        for job in jobs:
            for g in job.groups:
                self.table[g.local] = 0
        return HostCopy(self, [(job, self._sources[job.instance]) for job in jobs])

    def warm_up(self) -> None:
        """Nothing to compile."""

    def close(self) -> None:
        self.closed = True
        self._sources.clear()
        self._scratches.clear()

    def _scratch(self, part: SourceRank, group: SourceGroup) -> "_Scratch":
        theirs = next(g for g in part.source.groups if g.group == group.group)
        theirs = msgspec.structs.replace(theirs, regions=tuple(r.source for r in group.regions))
        key = tuple((r.outer, r.order, r.first_token, r.tokens, r.inner, r.cell_tokens) for r in theirs.regions)
        found = self._scratches.get(key)
        if found is None:
            found = self._scratches[key] = _Scratch(theirs, self._piece_bytes)
        return found


class HostCopy(Copy):
    def __init__(self, copier: HostPeerCopier, jobs: "list[tuple[CopyJob, list[_Reader]]]"):
        super().__init__(len(jobs))
        self._copier, self._jobs = copier, jobs
        # Blocks of groups that are not read are bad, and those of rows whose shift no rank has.
        self._bad = [_unread(job, readers) for job, readers in jobs]
        self._pieces = self._cut()

    def done(self) -> bool:
        """Do one piece."""
        piece = next(self._pieces, None)
        if piece is None:
            return True
        number, reader, remote, places, pull = piece
        try:
            if self._copier.closed:
                raise KVTierError("this engine suspended its cache meanwhile")
            if time.monotonic() >= self._jobs[number][0].until:
                raise KVTierError("the copy did not end in time")
            checksums, right = reader.copy(remote, places, pull)
        except KVTierError as error:
            self._why[number] = str(error)
            self._bad[number].update(block for g in self._jobs[number][0].groups for block in g.local.tolist())
            return False
        self.nbytes += len(remote) * reader.block_bytes
        self._bad[number].update(pull.local[~right].tolist())
        if reader.identical_layout:
            self._copier.table[pull.local[right]] = checksums[right]
        return False

    def wait_on(self, stream: Any) -> None:
        """Nothing to do on a CPU: call ``wait``."""

    def _cut(self) -> "Iterator[tuple[int, _Reader, np.ndarray, np.ndarray, GroupPull]]":
        """(number of the job, its reader, and a piece as ``GroupPull.rounds``), until each job's end or first
        error."""
        for number, (job, readers) in enumerate(self._jobs):
            for reader in readers:
                for g in job.groups:
                    if g.group != reader.group:
                        continue
                    # Blocks that are adjacent there are read together.
                    for piece in reader.own(g).rounds(reader.max_blocks):
                        if self._why[number]:
                            break
                        yield number, reader, *piece


def _unread(job: CopyJob, readers: "list[_Reader]") -> set[int]:
    bad: set[int] = set()
    for g in job.groups:
        own = [reader.shifts for reader in readers if reader.group == g.group]
        known = sorted(set().union(*own))
        # Without shifts it must be one, or blocks have other sizes there, and it is unknown which part goes.
        read = np.isin(g.shifts, known) if g.shifts is not None else np.full(len(g.local), known == [0])
        bad.update(g.local[~read].tolist())
    return bad


class _Scratch:
    """Memory for some blocks with pages of one shape: the regions one after another, dense, each in its own order."""

    def __init__(self, group: GroupView, nbytes: int):
        block_bytes = sum(region.block_bytes for region in group.regions)
        self.max_blocks = max(1, nbytes // block_bytes)
        starts, at = [], 0
        for region in group.regions:
            starts.append(at)
            at += align(region.block_bytes * self.max_blocks, _ALIGN)
        memory = torch.empty(at + _ALIGN, dtype=torch.uint8)
        base = align(memory.data_ptr(), _ALIGN)
        self.regions = tuple(
            msgspec.structs.replace(dense_region(r, base + start, r.block_bytes, r.order), fields=())
            for r, start in zip(group.regions, starts, strict=True)
        )
        dense = msgspec.structs.replace(group, regions=self.regions)
        self.view = CacheView([dense], self.max_blocks, "cpu", [memory.untyped_storage()])
        self.checksums = BlockChecksums(self.view)
        self.expected = np.zeros(self.max_blocks, dtype=np.int64)  # the source's checksums


class _Reader:
    """One group of a rank of a source. ``groups``: for each shift."""

    def __init__(
        self, memory: Memory, part: SourceRank, groups: Sequence[SourceGroup], scratch: _Scratch, view: CacheView
    ):
        group = groups[0]
        self._memory, self._checksum_table_addr, self._scratch = memory, part.source.checksum_table_addr, scratch
        self.group, self.identical_layout, self.max_blocks = group.group, group.identical_layout, scratch.max_blocks
        self.block_bytes = sum(r.source.block_bytes for r in group.regions)
        # Of each region's contiguous pieces: (region, offsets in the source's page, in the scratch's page, sizes).
        self._chunks = []
        for region in group.regions:
            there, sizes = np.array(page_chunks(region.source), dtype=np.int64).T
            self._chunks.append((region.source, there, np.cumsum(sizes) - sizes, sizes))
        self._writers = {
            shifted.shift: [
                page_writer(each, dense, scratch.view, view)
                for each, dense in zip(shifted.regions, scratch.regions, strict=True)
                if each.target is not None
            ]
            for shifted in groups
        }

    @property
    def shifts(self) -> Collection[int]:
        return self._writers.keys()

    def own(self, pull: GroupPull) -> GroupPull:
        """The rows that this rank is read for."""
        if pull.shifts is None:
            return pull if list(self._writers) == [0] else pull.rows(slice(0))
        return pull.rows(np.isin(pull.shifts, list(self._writers)))

    def copy(self, remote: np.ndarray, places: np.ndarray, pull: GroupPull) -> tuple[np.ndarray, np.ndarray]:
        """(int64 [n], bool [n]): for each row of ``pull`` the checksum of the block that arrived, and whether it is
        right: then its tokens are in our block. ``remote``: the source's blocks, each once; ``places``: the one of each
        row. Raises KVTierError if the source cannot be read; then nothing was written."""
        self._read(remote)
        # Every row is verified with the key and the length that it names, even if another row has the same block.
        checksums = self._scratch.checksums.compute(0, places, pull.keys, pull.valid).numpy()
        right = checksums == self._scratch.expected[places]
        if pull.shifts is None:
            self._write(0, places, pull, right)
        else:
            for shift in np.unique(pull.shifts).tolist():
                self._write(shift, places, pull, right & (pull.shifts == shift))
        return checksums, right

    def _write(self, shift: int, places: np.ndarray, pull: GroupPull, right: np.ndarray) -> None:
        for writer in self._writers[shift]:
            if right.all():
                writer.write(places, pull.local, pull.valid)
            elif right.any():
                writer.write(places[right], pull.local[right], pull.valid[right])

    def _read(self, remote: np.ndarray) -> None:
        rows = np.arange(len(remote))[:, None]
        parts = []  # (local, remote, sizes)
        for (region, there, here, sizes), dense in zip(self._chunks, self._scratch.regions, strict=True):
            sources = region.base + remote[:, None] * region.block_stride + there
            targets = dense.base + rows * dense.block_stride + here
            parts.append((targets.ravel(), sources.ravel(), np.broadcast_to(sizes, sources.shape).ravel()))
        # The table last: a source writes a block's checksum after its bytes.
        expected = self._scratch.expected.ctypes.data + 8 * rows.ravel()
        parts.append((expected, self._checksum_table_addr + 8 * remote, np.full(len(remote), 8)))
        self._memory.read(*_joined(*(np.concatenate(column) for column in zip(*parts, strict=True))))


def _joined(targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same in fewer pieces: neighbours on both sides are merged."""
    apart = (targets[1:] != targets[:-1] + sizes[:-1]) | (sources[1:] != sources[:-1] + sizes[:-1])
    starts = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return targets[starts], sources[starts], np.add.reduceat(sizes, starts)
