"""This rank's KV cache as peers see it: pages, the checksum table beside them, and the checks on arrival.

``transfer_view`` is what NIXL reads and writes: the cache itself, or its mirror in host memory where devices
cannot be read directly ("host buffer"). ``table[b]`` is the keyed checksum of block b, in the same kind of
memory, so that a peer reads pages and checksums in one transfer. On CUDA, work runs on a stream of its own
behind an event of the engine's stream; on CPU it runs at once on the calling thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_kvtier.worker.mirror import copy_blocks, mirror
from vllm_kvtier.worker.peer_memory import PeerMemory
from vllm_kvtier.worker.sums import BlockSums
from vllm_kvtier.worker.upload import upload
from vllm_kvtier.worker.views import CacheView
from vllm_kvtier.worker.work import GroupPull, SumBatch

# A request waits for the check of what it pulled, so the check takes the whole GPU for the half millisecond that
# 1.2 GB need (H200: 2.2 TB/s with 132 programs, 0.6 with the 32 that sums on the side get).
CHECK_PROGRAMS = 132


@dataclass
class Pending:
    """Work enqueued on the device; ``event`` is None where it is already done."""

    event: torch.cuda.Event | None

    def done(self) -> bool:
        return self.event is None or self.event.query()


@dataclass
class Check(Pending):
    parts: list[tuple[np.ndarray, torch.Tensor]]  # our block ids, and which of them mismatch


class CacheMemory(PeerMemory):
    def __init__(self, view: CacheView, host_buffer: bool):
        self.view = view
        self.mirror = mirror(view) if host_buffer else None
        self.transfer_view = self.mirror or view
        self._sums = BlockSums(view)
        self._checks = BlockSums(view, CHECK_PROGRAMS)
        self._cuda = view.device.type == "cuda"
        on_device = self._cuda and self.mirror is None
        self.memory_type = "VRAM" if on_device else "DRAM"
        self.device_id = (view.device.index or 0) if on_device else 0
        self._home = view.device if on_device else torch.device("cpu")
        pinned = self._cuda and not on_device
        self.table = torch.zeros(view.num_blocks, dtype=torch.int64, device=self._home, pin_memory=pinned)
        # What sources say the checksums of blocks read into ours are, by our block id.
        self.arrived = torch.zeros_like(self.table, pin_memory=pinned)
        self._stream = torch.cuda.Stream(view.device) if self._cuda else None
        self.on_device = on_device

    # -- checksums ---------------------------------------------------------------------------------------------

    def make_sums(self, batches: list[SumBatch], after: torch.cuda.Event | None) -> Pending:
        """Write the checksums of ``batches`` into the table (and the blocks into the mirror), behind ``after``."""
        with self._on_stream(after):
            for batch in batches:
                sums = self._sums.compute(batch.group, batch.ids, batch.keys, batch.valid)
                self._write_table(batch.ids, sums)
                if self.mirror is not None:
                    copy_blocks(self.view, batch.ids.tolist(), self.mirror, batch.ids.tolist(), batch.group)
            return Pending(self._mark())

    def begin_check(self, groups: list[GroupPull], moves: Sequence[tuple[int, np.ndarray, np.ndarray]] = ()) -> Check:
        """Compare what arrived in our blocks with what the source says of it, under our own keys.

        ``moves``: (group, from ids, to ids) of blocks that were read into each other's places.
        """
        parts = []
        with self._on_stream(None):
            for group, start, end in moves:
                self._rearrange(group, start, end)
            for g in groups:
                if not len(g.local):
                    continue
                if self.mirror is not None:
                    copy_blocks(self.mirror, g.local.tolist(), self.view, g.local.tolist(), g.group)
                sums = self._checks.compute(g.group, g.local, g.keys, g.valid)
                index = upload(g.local, self.arrived.device)
                wrong = sums != self.arrived[index].to(sums.device)
                parts.append((g.local, wrong.to("cpu", non_blocking=True)))
                # What is right can be exported without another pass; 0 vouches for nothing.
                self._write_table(g.local, torch.where(wrong, torch.zeros_like(sums), sums))
            return Check(self._mark(), parts)

    def end_check(self, check: Check) -> set[int] | None:
        """Our block ids whose checksum is wrong; None while the device is still at it."""
        if not check.done():
            return None
        return {int(i) for ids, wrong in check.parts for i in ids[wrong.numpy()]}

    def _rearrange(self, group: int, start: np.ndarray, end: np.ndarray) -> None:
        """Blocks ``start[i]`` become blocks ``end[i]`` (the same blocks in another order), checksums along."""
        source, target = (upload(ids, self.view.device) for ids in (start, end))
        for region in self.view.groups[group].regions:
            pages = _wide(self.view.pages(region))
            pages.index_copy_(0, target, pages.index_select(0, source))
        self.arrived.index_copy_(0, target, self.arrived.index_select(0, source))

    def _write_table(self, ids: np.ndarray, sums: torch.Tensor) -> None:
        index = upload(ids.astype(np.int64, copy=False), self.table.device)
        self.table.index_copy_(0, index, sums.to(self.table.device))

    def _on_stream(self, after: torch.cuda.Event | None):
        if self._stream is None:
            return _NoStream()
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
    """uint8 [blocks, outer, tokens, inner] in words of 8 or 4 bytes, one dimension a page where it is contiguous."""
    for words in (torch.int64, torch.int32):
        size = words.itemsize
        if pages.storage_offset() % size == 0 and all(n % size == 0 for n in (*pages.stride()[:-1], pages.shape[-1])):
            pages = pages.view(words)
            break
    return pages.flatten(1) if pages[0].is_contiguous() else pages


class _NoStream:
    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False
