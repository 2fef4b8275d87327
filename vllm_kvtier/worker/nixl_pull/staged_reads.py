"""Pulls from engines whose pages lie otherwise than ours, or are divided over ranks otherwise, and cannot be mapped.

NIXL reads whole blocks, as they lie there, into a *ring* of ours. Then a peer copier takes them from the ring as it
does from mapped memory: it verifies each block against the source's checksum, which came with it, and writes the
layers and heads that this rank holds into our pages.

The ring consists of chunks. A round of a pull reads blocks of one group from one rank of the source into one chunk,
in the order of the source's ids: reads merge where those are adjacent, wherever the blocks go here. A pull makes its
rounds one after another; other pulls use other chunks meanwhile. A chunk is given back when its blocks are verified
or, if its read failed, when the agent that read has ended.
"""

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.transfer_jobs import GroupPull, PullJob
from vllm_kvtier.shapes.tp_mapping import SourceGroup, SourceRank, map_source_ranks
from vllm_kvtier.wire.geometry import CacheGeometry, GroupView
from vllm_kvtier.wire.messages import HeadRange, RankInfo, Shared, SharedSpan
from vllm_kvtier.wire.slots import align
from vllm_kvtier.worker.cache_view import dense_region
from vllm_kvtier.worker.nixl_pull.descriptors import PageRows, Side
from vllm_kvtier.worker.nixl_pull.direct_reads import check_blocks
from vllm_kvtier.worker.nixl_pull.nixl_transport import NixlTransport, Transfer
from vllm_kvtier.worker.nixl_pull.peer_memory import PeerMemory
from vllm_kvtier.worker.peer_fetch.base import Copy, CopyJob, PeerCopier
from vllm_kvtier.worker.peer_fetch.cuda_ipc import Mapped
from vllm_kvtier.worker.peer_fetch.host_copier import HostPeerCopier

NUM_CHUNKS = 4
CHUNK_BYTES = 16 << 20  # at least; a chunk holds at least one block of every engine that is read
_ALIGN = 64  # of chunks, and of regions where layers are outermost
_WORD_ALIGN = 16  # of regions within a block


@dataclass
class _Part:
    """One group of one rank of a source. By chunk: rows, NIXL's list of ours, the copier's name of the chunk."""

    info: RankInfo
    group: int
    shifts: list[int]  # that it is read for
    slots: int  # blocks of a chunk
    rows: list[PageRows]
    local: list[Any]
    names: list[str]
    remote: Any = None


class StagedReads:
    def __init__(self, transport: NixlTransport, memory: PeerMemory, rank: int, heads: Sequence[HeadRange]):
        self.transport, self._memory, self._rank, self._heads = transport, memory, rank, heads
        self.ring: _Ring | None = None  # made for the first source
        self._rings: list[_Ring] = []  # it, and smaller ones before it: NIXL has their memory registered
        self.copier: PeerCopier | None = None
        self._parts: dict[str, list[_Part]] = {}  # by source

    def open(self, job: PullJob, ranks: Sequence[RankInfo]) -> "StagedRead":
        """Raises KVTierError if this source cannot be read, or for a block that does not exist."""
        parts = self.parts(job.instance, ranks)
        check_blocks(job, min(part.info.num_blocks for part in parts))
        return StagedRead(self, job, ranks)

    def connected(self, instance: str) -> bool:
        return instance in self._parts

    def parts(self, instance: str, ranks: Sequence[RankInfo]) -> list[_Part]:
        """Connect to its ranks and prepare lists, once per agent of ours."""
        found = self._parts.get(instance)
        if found is None:
            mapped = map_source_ranks(self._memory.view.groups, self._heads, self._rank, ranks)
            ring = self._ring(max(_chunk_bytes(_laid_out(p, g), 1) for p in mapped for g in p.groups))
            found = []
            try:
                for part in mapped:
                    for number in dict.fromkeys(group.group for group in part.groups):
                        same = [group for group in part.groups if group.group == number]
                        self._prepare(instance, part, same, ring, found)
            except Exception:
                self._remove(found)
                raise
            self._parts[instance] = found
        return found

    def release_lists(self) -> None:
        """They keep the agent alive that reads."""
        while self._parts:
            self._remove(self._parts.popitem()[1])

    def _remove(self, parts: Sequence[_Part]) -> None:
        for name in [name for part in parts for name in part.names]:
            self.copier.remove(name)

    def close(self) -> None:
        """Wait for copies under way. The ring stays: a read that did not end may write to it."""
        if self.copier is not None:
            self.copier.close()

    def _ring(self, largest: int) -> "_Ring":
        """A larger one if blocks need it and none is being read, at least twice as large: the one before stays."""
        before = self.ring
        if before is None or (largest > before.chunk_bytes and len(before.free) == NUM_CHUNKS):
            copier = self.copier or _copier(self._memory)
            try:
                ring = _Ring(self._memory, max(CHUNK_BYTES, largest, 2 * before.chunk_bytes if before else 0))
                self.transport.register([ring.span], self._memory.memory_type, self._memory.device_id)
            except Exception:  # such as a lack of memory: the next pull tries again
                if self.copier is None:
                    copier.close()
                raise
            self.release_lists()
            self._rings.append(ring)
            self.ring, self.copier = ring, copier
        elif largest > before.chunk_bytes:
            raise KVTierError(
                f"a block of that engine takes {largest} bytes of the ring for pulls, whose chunks have "
                f"{before.chunk_bytes} bytes; a larger one is made when no other pull uses it"
            )
        return self.ring

    def _prepare(
        self, instance: str, part: SourceRank, groups: Sequence[SourceGroup], ring: "_Ring", found: list[_Part]
    ) -> None:
        """Add to ``found``. ``groups``: one group of that rank, for each shift."""
        group = groups[0]
        info, theirs, memory = part.source, _laid_out(part, group), self._memory
        self.transport.add_peer(info.agent_metadata, info.agent)
        slots = _slots(theirs, ring.chunk_bytes, info.num_blocks)
        made = _Part(info, group.group, [each.shift for each in groups], slots, [], [], [])
        found.append(made)
        there = Side([theirs], info.num_blocks, info.checksum_table_addr, info.device)
        for number, base in enumerate(ring.chunks):
            here = _place(theirs, base + align(8 * slots, _ALIGN), slots)
            rows = PageRows(Side([here], slots, base, memory.device_id), there)
            name = f"{instance} {info.rank} {group.group} {number}"
            self.copier.add(name, [ring.as_source(here, slots, base, groups)])
            made.names.append(name)
            made.rows.append(rows)
            made.local.append(self.transport.prepare(info.agent, rows.local, memory.memory_type, ours=True))
        made.remote = self.transport.prepare(info.agent, made.rows[0].remote, info.memory, ours=False)


class StagedRead:
    """One pull."""

    unposted = ()  # a round is one transfer

    def __init__(self, reads: StagedReads, job: PullJob, ranks: Sequence[RankInfo]):
        self._reads, self._job, self._ranks = reads, job, ranks
        self.bytes = 0
        parts = reads.parts(job.instance, ranks)
        for g in job.groups:
            known = [shift for part in parts if part.group == g.group for shift in part.shifts]
            if g.shifts is not None and not np.isin(g.shifts, known).all():
                raise KVTierError(f"blocks begin {set(g.shifts.tolist())} tokens after the source's, not in {known}")
        self._rounds = deque(_rounds(job, parts))
        if not self._rounds:
            raise KVTierError("the job has no blocks")
        self._chunk: int | None = None
        self._copy_job: CopyJob | None = None
        self._copy: Copy | None = None
        self._bad: set[int] = set()

    @property
    def more(self) -> bool:
        """Whether ``start`` must be called again once the round is verified."""
        return bool(self._rounds)

    def start(self) -> Transfer | None:
        """Begin the next round; None if no chunk is free."""
        reads, ring = self._reads, self._reads.ring
        parts = reads.parts(self._job.instance, self._ranks)
        if not ring.free:
            return None
        chunk = self._chunk = ring.free.pop()
        number, blocks, slots, pull = self._rounds.popleft()
        part = parts[number]
        elements = part.rows[chunk].indices([(0, np.arange(len(blocks)), blocks)])
        self._copy_job = CopyJob(part.names[chunk], [replace(pull, remote=slots)])
        self.bytes += elements.size
        return reads.transport.read(
            part.info.agent, part.local[chunk], elements.local, part.remote, elements.remote, elements.size
        )

    def begin_check(self) -> None:
        self._copy = self._reads.copier.start([self._copy_job])

    def end_check(self) -> set[int] | None:
        """Our ids of the blocks that are wrong so far; None while they are copied. Raises KVTierError if copying
        failed."""
        if not self._copy.done():
            return None
        why = self._copy.why(0)
        if why:
            raise KVTierError(why)
        self._bad |= self._copy.bad(0)
        self.close()
        return self._bad

    def close(self) -> None:
        """Give the chunk back; nothing writes to it or reads it any more."""
        if self._chunk is not None:
            self._reads.ring.free.append(self._chunk)
            self._chunk = None


class _Ring:
    def __init__(self, memory: PeerMemory, chunk_bytes: int):
        self.chunk_bytes = align(chunk_bytes, _ALIGN)
        nbytes = NUM_CHUNKS * self.chunk_bytes + _ALIGN
        device = memory.view.device if memory.on_device else "cpu"
        pinned = memory.view.device.type == "cuda" and not memory.on_device
        # For a stream of its own: the model's may still write memory that it gave back.
        with torch.cuda.stream(torch.cuda.Stream(device)) if memory.on_device else nullcontext():
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        self.span = self._memory.data_ptr(), nbytes
        first = align(self.span[0], _ALIGN)
        self.chunks = [first + n * self.chunk_bytes for n in range(NUM_CHUNKS)]
        self.free = list(range(NUM_CHUNKS))
        self._shared = Shared("", 0, 0, "", (SharedSpan(*self.span, b""),))

    def as_source(self, here: GroupView, slots: int, table: int, groups: Sequence[SourceGroup]) -> SourceRank:
        """A chunk as the copier's source, in place of the rank whose blocks are read into it."""
        placed = []
        for group in groups:
            regions = tuple(replace(r, source=own) for r, own in zip(group.regions, here.regions, strict=True))
            placed.append(replace(group, regions=regions))
        info = RankInfo(
            0, "", b"", "", 0, slots, (here,), CacheGeometry((), ""), checksum_table_addr=table, shared=self._shared
        )
        return SourceRank(info, tuple(placed))


class _OwnHostMemory:
    """In place of ``process_memory.ProcessMemory``: the source is memory of this process."""

    def read(self, local: np.ndarray, remote: np.ndarray, sizes: np.ndarray) -> None:
        for target, source, nbytes in zip(local.tolist(), remote.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, nbytes)


class _OwnDeviceMemory:
    """In place of ``cuda_ipc.Mappings``, likewise."""

    def open(self, shared: Shared) -> Mapped:
        return Mapped([(span, span.base) for span in shared.spans], [])

    def close(self, mapped: Mapped) -> None:
        """Nothing is mapped."""


def _copier(memory: PeerMemory) -> PeerCopier:
    """A copier of its own, since two threads use it and that of peer fetches."""
    if memory.view.device.type != "cuda":
        return HostPeerCopier(memory.view, memory.table, open_memory=lambda shared: _OwnHostMemory())
    from vllm_kvtier.worker.peer_fetch.cuda_copier import CudaPeerCopier

    table = memory.table
    if not memory.on_device:  # the kernel writes checksums on the device; no reader looks there
        table = torch.zeros(memory.view.num_blocks, dtype=torch.int64, device=memory.view.device)
    return CudaPeerCopier(memory.view, table, mappings=_OwnDeviceMemory())


def _rounds(job: PullJob, parts: Sequence[_Part]) -> Iterator[tuple[int, np.ndarray, np.ndarray, GroupPull]]:
    """(number of the part, and of one round as ``GroupPull.rounds``)."""
    for number, part in enumerate(parts):
        for g in job.groups:
            if g.group == part.group:
                own = g if g.shifts is None else g.rows(np.isin(g.shifts, part.shifts))
                yield from ((number, *each) for each in own.rounds(part.slots))


def _laid_out(part: SourceRank, group: SourceGroup) -> GroupView:
    theirs = next(g for g in part.source.groups if g.group == group.group)
    return msgspec.structs.replace(theirs, regions=tuple(r.source for r in group.regions))


def _layers_outermost(group: GroupView) -> bool:
    """Whether a region's pages of adjacent blocks are adjacent."""
    return all(region.block_stride == region.page_extent for region in group.regions)


def _block_stride(group: GroupView) -> int:
    return sum(align(region.block_bytes, _WORD_ALIGN) for region in group.regions)


def _chunk_bytes(group: GroupView, slots: int) -> int:
    """What a chunk needs for so many blocks, at most."""
    return align(8 * slots, _ALIGN) + slots * _block_stride(group) + len(group.regions) * _ALIGN


def _slots(group: GroupView, chunk_bytes: int, num_blocks: int) -> int:
    """The most blocks that a chunk holds; never more than the source has."""
    spare = chunk_bytes - _ALIGN - len(group.regions) * _ALIGN
    return max(1, min(num_blocks, spare // (_block_stride(group) + 8)))


def _place(group: GroupView, base: int, slots: int) -> GroupView:
    """The group's pages in a chunk, without gaps: laid out as there, so that blocks that are adjacent there are
    adjacent here, and a run of them is one read."""
    offsets, at, outermost = {}, 0, _layers_outermost(group)
    for number in sorted(range(len(group.regions)), key=lambda n: group.regions[n].base):
        offsets[number] = at
        nbytes = group.regions[number].block_bytes
        at += align(nbytes * slots, _ALIGN) if outermost else align(nbytes, _WORD_ALIGN)
    regions = tuple(
        msgspec.structs.replace(
            dense_region(region, base + offsets[number], region.block_bytes if outermost else at, region.order),
            fields=(),
        )
        for number, region in enumerate(group.regions)
    )
    return msgspec.structs.replace(group, regions=regions)
