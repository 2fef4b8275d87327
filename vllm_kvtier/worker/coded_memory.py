"""This rank's KV cache as peers see it when pulls carry a codec (``wire_codec``): encoded blocks in host memory.

Row b holds block b as a slot of the node store would, its checksum at the end,
so that the copiers of the node store do all the work: a hand-off's blocks are encoded into their rows where otherwise
their checksums would be made; a pull reads rows into the rows of our blocks and decodes them from there, which checks
them. Two engines understand each other exactly if their rows are made alike: that is the geometry they exchange.
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
from vllm_kvtier.store.limits import in_words, memory_limits
from vllm_kvtier.wire.geometry import CacheGeometry, GroupView, Region
from vllm_kvtier.wire.slots import PAGE, PartLayout, align, layout_digest
from vllm_kvtier.worker.copier import Copy, make_copier
from vllm_kvtier.worker.peer_memory import PeerMemory
from vllm_kvtier.worker.views import CacheView
from vllm_kvtier.worker.work import GroupPull, SumBatch

POLL = 1e-4  # seconds


@dataclass
class Copies:
    """Encodings or decodings under way."""

    copies: list[tuple[np.ndarray, Copy]]  # our block ids, and what is done with them

    def done(self) -> bool:
        return all([copy.done() for _, copy in self.copies])  # each is looked at: that frees what it used


class CodedMemory(PeerMemory):
    def __init__(self, view: CacheView, codecs: Sequence[Codec], option: str | dict[str, str] = ""):
        """``codecs``: by group, as they apply to the whole engine; ``option``: ``wire_codec``, of which they come.
        Raises KVTierError where there is no memory."""
        self.view, self.wire_codec = view, option
        self.layouts = layouts = [part_layout(*each) for each in zip(view.groups, codecs, strict=True)]
        # A block belongs to one group at a time: groups share its row.
        self._pages = max(align(layout.nbytes, PAGE) for layout in layouts) // PAGE
        nbytes = view.num_blocks * self._pages * PAGE
        limits = memory_limits()
        if nbytes > limits.fits:  # to be told so is better than to be killed
            raise KVTierError(
                f"wire_codec takes {in_words(nbytes)} of host memory, for the whole KV cache as it is encoded, and "
                f"{in_words(limits.fits)} are free ({limits.source}): choose a smaller codec or leave wire_codec at raw"
            )
        self._rows = mmap.mmap(-1, nbytes)
        rows = torch.frombuffer(self._rows, dtype=torch.uint8)
        if view.device.type == "cuda":
            rows.zero_()  # touched here, on all cores: the driver would do it page by page, holding everybody up
        address = rows.data_ptr()
        pool = (address, nbytes, SimpleNamespace(buffer=memoryview(self._rows)))
        self._copier = make_copier(view, pool, layouts, [0] * len(layouts))
        self._copier.register(0, nbytes)
        self._copier.warm_up()
        stride = self._pages * PAGE
        groups = [_row(g, layout, address, stride) for g, layout in zip(view.groups, layouts, strict=True)]
        # By group, the checksum of each row.
        words = np.frombuffer(self._rows, dtype=np.uint64)
        self._sums = [words[layout.sum_offset // 8 :: stride // 8] for layout in layouts]
        self.transfer_view = CacheView(groups, view.num_blocks, "cpu", [rows.untyped_storage()])
        # Checksums lie in the rows. A pull reads a table beside the pages all the same: one that is always 0.
        self.table = torch.zeros(view.num_blocks, dtype=torch.int64)
        self.arrived = torch.zeros_like(self.table)

    def close(self) -> None:
        self._copier.close()

    def geometry(self) -> CacheGeometry:
        return self.transfer_view.geometry()

    def make_sums(self, batches: list[SumBatch], after: torch.cuda.Event | None) -> Copies:
        """Encode the blocks of ``batches`` into their rows, behind ``after``; a part of a block counts whole.

        Until that is done, or if it cannot be, a row vouches for nothing: what it holds may bear the same key, made of
        a block that was given away while its turn to be encoded had not come, or with other weights.
        """
        for batch in batches:
            self._sums[batch.group][batch.ids] = 0
        return Copies(
            [(b.ids, self._copier.store(b.group, b.ids, b.keys, self._slots(b.ids), after)) for b in batches]
        )

    def begin_check(self, groups: list[GroupPull], moves: Sequence[tuple[int, np.ndarray, np.ndarray]] = ()) -> Copies:
        """Decode what arrived in our blocks' rows into the blocks, under our own keys."""
        if moves:
            raise ValueError("rows are read into their places")
        begun = Copies([])
        try:
            for g in groups:
                if len(g.local):
                    copy = self._copier.load(g.group, g.local, g.keys, self._slots(g.local))
                    begun.copies.append((g.local, copy))
        except Exception:
            while not begun.done():  # milliseconds: the blocks are others' as soon as this has failed
                time.sleep(POLL)
            raise
        return begun

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
