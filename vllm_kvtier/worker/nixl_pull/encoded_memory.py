"""This rank's KV cache as peers see it with a ``wire_codec``: encoded blocks in host memory.

Row b holds block b as a slot of the node store does, with its checksum at the end, so that the store's copiers do all
the work. A hand-off's blocks are encoded into their rows instead of getting a checksum. A pull reads rows into the rows
of our blocks and decodes them from there, which verifies them. The geometry that engines exchange names the rows'
layout.
"""

import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from vllm_kvtier.codecs import Codec
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.transfer_jobs import ChecksumJob, GroupPull
from vllm_kvtier.shapes.read_paths import ENCODED
from vllm_kvtier.store.linux import leave_out_of_dumps
from vllm_kvtier.store.memory.memory_limits import format_bytes, memory_limits
from vllm_kvtier.wire.geometry import CacheGeometry, GroupView, Region
from vllm_kvtier.wire.slots import PAGE, PartLayout, align, layout_digest
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.copy.base import Copy, make_copier
from vllm_kvtier.worker.nixl_pull.peer_memory import PeerMemory

POLL_SECONDS = 1e-4


@dataclass
class Copies:
    """Encodings or decodings under way."""

    copies: list[tuple[np.ndarray, Copy]]  # (our block ids, their copy)

    def done(self) -> bool:
        return all([copy.done() for _, copy in self.copies])  # polls each copy, which frees its buffers


class EncodedMemory(PeerMemory):
    def __init__(self, view: CacheView, codecs: Sequence[Codec], option: str | dict[str, str] = "", ranks: int = 1):
        """``codecs``: by group, the same on all ranks; ``option``: the ``wire_codec`` that selected them; ``ranks``: on
        this node, and all make theirs now. Raises KVTierError if the memory for all of them is not free."""
        self.view, self.wire_codec = view, option
        self.layouts = layouts = [part_layout(*each) for each in zip(view.groups, codecs, strict=True)]
        # A block belongs to one group at a time, so groups share its row.
        self._pages = max(align(layout.nbytes, PAGE) for layout in layouts) // PAGE
        nbytes = view.num_blocks * self._pages * PAGE
        limits = memory_limits()
        if nbytes * ranks > limits.fits:  # else the kernel would kill the engine
            raise KVTierError(
                f"wire_codec takes {format_bytes(nbytes * ranks)} of host memory for the encoded form of the whole KV "
                f"cache{f' on {ranks} ranks' * (ranks > 1)}, and {format_bytes(limits.fits)} are free "
                f"({limits.source}): choose a smaller codec or leave wire_codec at raw"
            )
        self._rows = mmap.mmap(-1, nbytes)
        rows = torch.frombuffer(self._rows, dtype=torch.uint8)
        if view.device.type == "cuda":
            rows.zero_()  # faults the pages in on all cores; the driver would do it one by one under its lock
        address = rows.data_ptr()
        leave_out_of_dumps(address, nbytes)
        pool = (address, nbytes, SimpleNamespace(buffer=memoryview(self._rows)))
        self._copier = make_copier(view, pool, layouts, [0] * len(layouts))
        self._copier.register(0, nbytes)
        self._copier.warm_up()
        stride = self._pages * PAGE
        groups = [_row(g, layout, address, stride) for g, layout in zip(view.groups, layouts, strict=True)]
        # By group, the checksum of each row.
        words = np.frombuffer(self._rows, dtype=np.uint64)
        self._checksums = [words[layout.sum_offset // 8 :: stride // 8] for layout in layouts]
        self.transfer_view = CacheView(groups, view.num_blocks, "cpu", [rows.untyped_storage()])
        # Checksums are in the rows. The table that a pull also reads is always 0.
        self.table = torch.zeros(view.num_blocks, dtype=torch.int64)
        self.arrived = torch.zeros_like(self.table)

    def close(self) -> None:
        self._copier.close()

    def geometry(self) -> CacheGeometry:
        return self.transfer_view.geometry()

    def compute_checksums(self, batches: list[ChecksumJob], after: torch.cuda.Event | None) -> Copies:
        """Encode the blocks of ``batches`` into their rows, behind ``after``; a partial block counts as whole.

        Until that has ended, or if it fails, a row's checksum is 0, which no reader accepts. An older row may have the
        same key: of a block that vLLM reused before it was encoded, or of other weights.
        """
        for batch in batches:
            self._checksums[batch.group][batch.ids] = 0
        return Copies([(b.ids, self._copier.store(b.group, b.ids, b.keys, self._slots(b.ids), after)) for b in batches])

    def clear_checksums(self) -> None:
        while not self._copier.idle():  # milliseconds; what is encoded later is of other requests, under the old keys
            time.sleep(POLL_SECONDS)
        for checksums in self._checksums:
            checksums[:] = 0

    def begin_check(self, groups: list[GroupPull], moves: Sequence[tuple[int, np.ndarray, np.ndarray]] = ()) -> Copies:
        """Decode the rows of our blocks that arrived into the blocks, verified with our own keys."""
        if moves:
            raise ValueError(f"{len(moves)} moves: rows are never rearranged")
        begun = Copies([])
        try:
            for g in groups:
                if len(g.local):
                    copy = self._copier.load(g.group, g.local, g.keys, self._slots(g.local))
                    begun.copies.append((g.local, copy))
        except Exception:
            while not begun.done():  # milliseconds; vLLM may reuse the blocks once this has raised
                time.sleep(POLL_SECONDS)
            raise
        return begun

    def end_check(self, check: Copies) -> set[int] | None:
        """Our block ids whose row has a wrong checksum; None while the device is decoding."""
        if not check.done():
            return None
        return {int(i) for ids, copy in check.copies for i in ids[copy.bad]}

    def _slots(self, ids: np.ndarray) -> np.ndarray:
        return ids.astype(np.int64, copy=False) * self._pages


def _row(group: GroupView, layout: PartLayout, address: int, stride: int) -> GroupView:
    """The group as peers read it: a page is an opaque row, named by its layout."""
    region = Region(
        layer="encoded", base=address, block_stride=stride, outer=1, outer_stride=0, first_token=0, tokens=1,
        token_stride=0, inner=layout.nbytes, cell_tokens=group.block_tokens,
        packing=f"{ENCODED}{layout_digest([group], [layout]).hex()[:32]}", dtype="bytes",
    )  # fmt: skip
    return GroupView(group.group, group.block_tokens, group.kind, group.window, (region,))
