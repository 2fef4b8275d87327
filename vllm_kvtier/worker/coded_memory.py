"""This rank's KV cache as peers see it when pulls carry a codec (``wire_codec``): encoded blocks in host memory.

The same face as ``memory.CacheMemory``. Row b holds block b as a slot of the node store would, its checksum at the end,
so that the copiers of the node store do all the work: a hand-off's blocks are encoded into their rows where otherwise
their checksums would be made; a pull reads rows into the rows of our blocks and decodes them from there, which checks
them. Two engines understand each other exactly if their rows are made alike: that is the geometry they exchange.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from vllm_kvtier.codecs import Codec
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.wire.geometry import CacheGeometry, GroupView, Region
from vllm_kvtier.wire.slots import PAGE, PartLayout, align, layout_digest
from vllm_kvtier.worker.copier import Copy, make_copier
from vllm_kvtier.worker.transport import NixlTransport
from vllm_kvtier.worker.views import CacheView
from vllm_kvtier.worker.work import GroupPull, SumBatch


@dataclass
class Copies:
    """Encodings or decodings under way."""

    copies: list[tuple[np.ndarray, Copy]]  # our block ids, and what is done with them

    def done(self) -> bool:
        return all([copy.done() for _, copy in self.copies])  # each is looked at: that frees what it used


class CodedMemory:
    memory_type, device_id = "DRAM", 0
    on_device = False

    def __init__(self, view: CacheView, codecs: Sequence[Codec]):
        """``codecs``: by group, as they apply to the whole engine."""
        self.view = view
        self.layouts = layouts = [part_layout(*each) for each in zip(view.groups, codecs, strict=True)]
        # A block belongs to one group at a time: groups share its row.
        self._pages = max(align(layout.nbytes, PAGE) for layout in layouts) // PAGE
        nbytes = view.num_blocks * self._pages * PAGE
        self._rows = mmap.mmap(-1, nbytes)
        rows = torch.frombuffer(self._rows, dtype=torch.uint8)
        address = rows.data_ptr()
        pool = (address, nbytes, SimpleNamespace(buffer=memoryview(self._rows)))
        self._copier = make_copier(view, pool, layouts, [0] * len(layouts))
        self._copier.register(0, nbytes)
        self._copier.warm_up()
        stride = self._pages * PAGE
        groups = [_row(g, layout, address, stride) for g, layout in zip(view.groups, layouts, strict=True)]
        self.transfer_view = CacheView(groups, view.num_blocks, "cpu", [rows.untyped_storage()])
        # Checksums lie in the rows. A pull reads a table beside the pages all the same: one that is always 0.
        self.table = torch.zeros(view.num_blocks, dtype=torch.int64)
        self.arrived = torch.zeros_like(self.table)

    def geometry(self) -> CacheGeometry:
        return self.transfer_view.geometry()

    def register(self, transport: NixlTransport) -> None:
        spans = list(self.transfer_view.spans)
        spans += [(t.data_ptr(), t.numel() * 8) for t in (self.table, self.arrived)]
        transport.register(spans, self.memory_type, self.device_id)

    def fence(self) -> torch.cuda.Event | None:
        if self.view.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.view.device))
        return event

    def make_sums(self, batches: list[SumBatch], after: torch.cuda.Event | None) -> Copies:
        """Encode the blocks of ``batches`` into their rows, behind ``after``; a part of a block counts whole."""
        return Copies(
            [(b.ids, self._copier.store(b.group, b.ids, b.keys, self._slots(b.ids), after)) for b in batches]
        )

    def begin_check(self, groups: list[GroupPull], moves: Sequence[tuple[int, np.ndarray, np.ndarray]] = ()) -> Copies:
        """Decode what arrived in our blocks' rows into the blocks, under our own keys."""
        if moves:
            raise ValueError("rows are read into their places")
        wanted = [g for g in groups if len(g.local)]
        return Copies([(g.local, self._copier.load(g.group, g.local, g.keys, self._slots(g.local))) for g in wanted])

    def end_check(self, check: Copies) -> set[int] | None:
        """Our block ids whose row has a wrong checksum; None while the device is still at it."""
        if not check.done():
            return None
        return {int(i) for ids, copy in check.copies for i in ids[copy.bad]}

    def _slots(self, ids: np.ndarray) -> np.ndarray:
        return ids.astype(np.int64, copy=False) * self._pages


def _row(group: GroupView, layout: PartLayout, address: int, stride: int) -> GroupView:
    """The group as peers read it: a page is a row, of which nothing is said but how it was made."""
    region = Region(
        layer="encoded", base=address, block_stride=stride, outer=1, outer_stride=0, first_token=0, tokens=1,
        token_stride=0, inner=layout.nbytes, cell_tokens=group.block_tokens,
        packing=f"encoded {layout_digest([group], [layout]).hex()[:32]}", dtype="bytes",
    )  # fmt: skip
    return GroupView(group.group, group.block_tokens, group.kind, group.window, (region,))
