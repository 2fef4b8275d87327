"""What copies on a GPU need to know of a group's parts: the kernels' tables, and which parts make one DMA copy."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_kvtier.codecs.base import DTYPES
from vllm_kvtier.kernels import checksum, coded, pages
from vllm_kvtier.wire.geometry import GroupView
from vllm_kvtier.wire.slots import PAGE, PartLayout
from vllm_kvtier.worker.tuning import Choice

if TYPE_CHECKING:
    import torch

# Rows in the ring begin at multiples of this: the DMA engines are fast where both ends are aligned alike.
ROW_ALIGN = 512
# Blocks of one launch at most; the scratch on the device is made for so many.
MAX_ROWS = 4096
# Adjacent slots are one copy of lines if they are no further apart than so many parts (the ranks of a slot).
_MAX_SPREAD = 16


class Part:
    """Sizes and offsets of one group's parts."""

    def __init__(self, group: GroupView, layout: PartLayout, part_offset: int):
        self.coded = bool(layout.coded)
        # What is copied as it is, and what is encoded; one of them says nothing.
        self.table, self.fields = None, ()
        if self.coded:
            self.fields = coded_lines(group, layout)
        elif len(layout.region_offsets) != len(group.regions):
            raise ValueError(f"a layout of {len(layout.region_offsets)} regions for {len(group.regions)}")
        else:
            self.table = region_table(group, layout)
        self.nbytes, self.sum_offset, self.part_offset = layout.nbytes, layout.sum_offset, part_offset
        self.pitch = -(-layout.nbytes // ROW_ALIGN) * ROW_ALIGN
        self.row_offsets = np.arange(MAX_ROWS, dtype=np.int64) * self.pitch
        self.sizes = np.full(MAX_ROWS, layout.nbytes, dtype=np.uint64)

    def movers(
        self,
        gather: bool,
        choice: Choice,
        scratch: "Sequence[tuple[torch.Tensor, torch.Tensor]]",
        checked: bool,
        start: pages.Start | None,
    ) -> list[pages.Launches]:
        """What copies between the cache and the ring, and, of parts that are not coded, between the cache and slots;
        with a scratch each."""
        some = others = choice.programs
        if choice.way == "mixed":
            some, others = choice.programs - choice.direct_programs, choice.direct_programs
        if self.coded:
            shape = coded.Shape(choice.numbers, choice.warps if choice.numbers else 0, choice.stages)
            sizes = (self.sum_offset, scratch[0], choice.programs, shape)
            return [coded.CodedMover(gather, self.fields, *sizes, checked, start)]
        return [
            pages.Mover(gather, self.table, self.sum_offset, where, programs, choice.warps, checked, start)
            for programs, where in zip((some, others), scratch, strict=True)
        ]


def region_table(group: GroupView, layout: PartLayout) -> np.ndarray:
    """int64 [regions, 12] as in ``pages.REGION_FIELDS``."""
    rows, first = [], 0
    for r, offset in zip(group.regions, layout.region_offsets, strict=True):
        word = checksum.word_bytes(r.inner)
        words = r.block_bytes // word
        strides = (r.block_stride, r.outer_stride, r.token_stride)
        cells = (words, r.inner // word, r.tokens, first, r.first_token, r.cell_tokens)
        rows.append((r.base, *strides, *cells, word, offset))
        first += words
    return np.array(rows, dtype=np.int64)


def coded_lines(group: GroupView, layout: PartLayout) -> list[coded.Lines]:
    """What the kernels need of each field of a coded part; ValueError for pages that a GPU cannot code."""
    found = []
    for part in layout.coded:
        r, code = group.regions[part.region], part.format.kernels
        if r.cell_tokens != 1 or r.dtype not in DTYPES:
            raise ValueError(f"{r.layer}: cells of {r.cell_tokens} tokens of {r.dtype} are not coded on a GPU")
        where = (r.base + 2 * part.offset, r.block_stride, r.outer_stride, r.token_stride, r.outer, r.tokens)
        cell_lines = r.fields[part.field].count // part.line
        size = (cell_lines, part.line, r.dtype == "float16", part.data_offset, part.scale_offset)
        how = (
            (code.bits, part.format.scale_bytes(part.line), code.encode, code.decode, code.fused, *code.tiles)
            if code
            else ()
        )
        found.append(coded.Lines(*where, *size, *how))
    return found


def _near(slots: np.ndarray, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    steps = slots[1:] - slots[:-1]
    return steps, (steps >= nbytes) & (steps <= _MAX_SPREAD * nbytes + PAGE)


def mostly_adjacent(slots: np.ndarray, nbytes: int) -> bool:
    """Whether half of the parts, or more, are likely to go in one copy with another."""
    return 2 * np.count_nonzero(_near(slots, nbytes)[1]) >= len(slots)


def adjacent(
    slots: np.ndarray, edges: np.ndarray | None, nbytes: int
) -> tuple[np.ndarray | None, list[tuple[int, int]], int]:
    """Splits parts at addresses ``slots`` (int64 [n], in the order of their rows) into what one copy can take.

    Returns (indices of parts on their own, None if all are; [(first, count)] of runs at equal distances; that
    distance). A run stays within one registration (``edges`` int64 [n]: which; None: there is one).
    """
    n = len(slots)
    steps, near = _near(slots, nbytes)
    if not near.any():
        return None, [], 0
    distance = int(steps[near].min())
    apart = steps != distance
    if edges is not None:
        apart |= edges[1:] != edges[:-1]
    firsts = np.concatenate(([0], np.flatnonzero(apart) + 1, [n]))
    counts = firsts[1:] - firsts[:-1]
    together = counts > 1
    firsts = firsts[:-1]
    return firsts[~together], list(zip(firsts[together].tolist(), counts[together].tolist(), strict=True)), distance
