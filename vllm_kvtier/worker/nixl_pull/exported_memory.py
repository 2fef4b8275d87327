"""This rank's raw KV cache as peers see it: pages, the table of their checksums, and the verification on arrival.

``transfer_view`` is the memory that NIXL reads and writes: the cache itself, or its mirror in host memory where NIXL
cannot read the device ("host buffer"). ``table[b]`` is the keyed checksum of block b, in the same kind of memory, so
that a peer reads pages and checksums in one transfer. On CUDA, work runs on a stream of its own behind an event of the
engine's stream; on a CPU it runs at once on the calling thread.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from vllm_kvtier.jobs.transfer_jobs import ChecksumJob, GroupPull
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.copy.pinned_buffers import upload
from vllm_kvtier.worker.integrity.checksums import BlockChecksums, counted_cells
from vllm_kvtier.worker.nixl_pull.host_mirror import copy_blocks, mirror
from vllm_kvtier.worker.nixl_pull.peer_memory import PeerMemory

# SMs that verify a pull: the whole GPU, since a request waits for it. 1.2 GB take half a millisecond (H200: 2.2 TB/s
# with 132 programs, 0.6 with the 32 that checksums of a step get).
CHECK_PROGRAMS = 132
# The most of the blocks' pages that are copied aside while they are rearranged: memory that the engine may not have.
MOVED_BYTES = 64 << 20


@dataclass
class Pending:
    """Work enqueued on the device; ``event`` is None if it has ended."""

    event: torch.cuda.Event | None

    def done(self) -> bool:
        return self.event is None or self.event.query()


@dataclass
class Check(Pending):
    parts: list[tuple[np.ndarray, torch.Tensor]]  # (our block ids, which of them mismatch)


class CacheMemory(PeerMemory):
    def __init__(self, view: CacheView, host_buffer: bool, ranks: int = 1):
        """``ranks``: on this node; all make a host buffer now, if ``host_buffer``."""
        self.view = view
        self.mirror = mirror(view, ranks) if host_buffer else None
        self.transfer_view = self.mirror or view
        self._checksums = BlockChecksums(view)
        self._checks = BlockChecksums(view, CHECK_PROGRAMS)
        self._cuda = view.device.type == "cuda"
        on_device = self._cuda and self.mirror is None
        self.memory_type = "VRAM" if on_device else "DRAM"
        self.device_id = (view.device.index or 0) if on_device else 0
        self._home = view.device if on_device else torch.device("cpu")
        pinned = self._cuda and not on_device
        self.table = torch.zeros(view.num_blocks, dtype=torch.int64, device=self._home, pin_memory=pinned)
        # By our block id, the source's checksum of the block that was read into it.
        self.arrived = torch.zeros_like(self.table, pin_memory=pinned)
        self._stream = torch.cuda.Stream(view.device) if self._cuda else None
        self.on_device = on_device
        with self._on_stream(None):
            self._checksums.warm_up()  # seconds, for which the first hand-off or pull would wait

    # -- checksums ---------------------------------------------------------------------------------------------

    def compute_checksums(self, batches: list[ChecksumJob], after: torch.cuda.Event | None) -> Pending:
        """Write the checksums of ``batches`` into the table (and the blocks into the mirror), behind ``after``."""
        with self._on_stream(after):
            for batch in batches:
                checksums = self._checksums.compute(batch.group, batch.ids, batch.keys, batch.valid)
                self._write_table(batch.ids, checksums)
                if self.mirror is not None:
                    copy_blocks(self.view, self.mirror, batch.group, batch.ids.tolist())
            return Pending(self._mark())

    def clear_checksums(self) -> None:
        with self._on_stream(None):
            self.table.zero_()  # no reader accepts 0
        if self._stream is not None:
            self._stream.synchronize()  # copies on other streams write checksums from now on

    def begin_check(self, groups: list[GroupPull], moves: Sequence[tuple[int, np.ndarray, np.ndarray]] = ()) -> Check:
        """Compute the checksums of arrived blocks with our own keys and compare them with the source's.

        ``moves``: (group, from ids, to ids) of blocks that were read into each other's positions.
        """
        try:
            with self._on_stream(None):
                return self._check(groups, moves)
        except Exception:  # such as a lack of memory
            if self._stream is not None:
                self._stream.synchronize()  # once this has raised, vLLM may reuse the blocks that kernels write
            raise

    def _check(self, groups: list[GroupPull], moves: Sequence[tuple[int, np.ndarray, np.ndarray]]) -> Check:
        parts = []
        for group, start, end in moves:
            self._rearrange(group, start, end)
        for g in groups:
            if not len(g.local):
                continue
            if self.mirror is not None:
                copy_blocks(self.mirror, self.view, g.group, g.local.tolist())
            checksums = self._checks.compute(g.group, g.local, g.keys, g.valid)
            index = upload(g.local, self.arrived.device)
            wrong = checksums != self.arrived[index].to(checksums.device)
            parts.append((g.local, wrong.to("cpu", non_blocking=True)))
            if not self._cuda:
                self._clear(g, np.where(wrong.numpy(), 0, g.valid))
            # Right blocks can be exported without another pass; no reader accepts 0.
            self._write_table(g.local, torch.where(wrong, torch.zeros_like(checksums), checksums))
        return Check(self._mark(), parts)

    def end_check(self, check: Check) -> set[int] | None:
        """Our block ids whose checksum is wrong; None while the device is computing."""
        if not check.done():
            return None
        return {int(i) for ids, wrong in check.parts for i in ids[wrong.numpy()]}

    def clear_unread(self, groups: list[GroupPull]) -> None:
        for g in groups if not self._cuda else ():
            self._clear(g, np.zeros(len(g.local), dtype=np.int64))

    def _clear(self, g: GroupPull, valid: np.ndarray) -> None:
        """Zero all that arrived behind the ``valid`` first tokens of each block. No request uses it as read, but vLLM's
        CPU attention multiplies the unused part of a block by zero: NaN times zero is NaN."""
        for region in self.view.groups[g.group].regions:
            pages, counted = self.view.pages(region), counted_cells(region, valid)
            for i in np.flatnonzero(counted < region.tokens).tolist():
                pages[int(g.local[i]), :, int(counted[i]) :] = 0

    def _rearrange(self, group: int, start: np.ndarray, end: np.ndarray) -> None:
        """Move blocks ``start[i]`` to ``end[i]`` (the same blocks in another order), with their checksums."""
        source, target = (upload(ids, self.view.device) for ids in (start, end))
        for region in self.view.groups[group].regions:
            pages = _wide(self.view.pages(region))
            step = max(1, pages.shape[1] * MOVED_BYTES // max(1, len(start) * pages[0].nbytes))
            for part in pages.split(step, dim=1):
                part.index_copy_(0, target, part.index_select(0, source))
        self.arrived.index_copy_(0, target, self.arrived.index_select(0, source))

    def _write_table(self, ids: np.ndarray, checksums: torch.Tensor) -> None:
        index = upload(ids.astype(np.int64, copy=False), self.table.device)
        self.table.index_copy_(0, index, checksums.to(self.table.device))

    def _on_stream(self, after: torch.cuda.Event | None):
        if self._stream is None:
            return nullcontext()
        if after is not None:
            self._stream.wait_event(after)
        return torch.cuda.stream(self._stream)

    def _mark(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self._stream)
        return event


def _wide(pages: torch.Tensor) -> torch.Tensor:
    """uint8 [blocks, outer, tokens, inner] as words of 8 or 4 bytes; a contiguous page has one dimension."""
    for words in (torch.int64, torch.int32):
        size = words.itemsize
        if pages.storage_offset() % size == 0 and all(n % size == 0 for n in (*pages.stride()[:-1], pages.shape[-1])):
            pages = pages.view(words)
            break
    return pages.flatten(1) if pages[0].is_contiguous() else pages
