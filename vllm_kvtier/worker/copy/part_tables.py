"""Tables of a group's parts for copies on a GPU: for the kernels, and the parts that one DMA copy takes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_kvtier.codecs.base import DTYPES
from vllm_kvtier.kernels import checksum, encoded_pages, page_copy
from vllm_kvtier.wire.geometry import GroupView
from vllm_kvtier.wire.slots import PAGE, PartLayout
from vllm_kvtier.worker.tuning import Choice

if TYPE_CHECKING:
    import torch

# Rows in the ring begin at multiples of this: DMA engines are fast where source and target are aligned alike.
ROW_ALIGN = 512
# Blocks of one launch at most, by the size of the scratch on the device.
MAX_ROWS = 4096
# Adjacent slots are one copy of lines if they are no further apart than so many parts (the ranks of a slot).
_MAX_SPREAD = 16


class Part:
    """Sizes and offsets of one group's parts."""

    def __init__(self, group: GroupView, layout: PartLayout, part_offset: int):
        self.encoded = bool(layout.encoded)
        # Regions that are copied raw, or fields that are encoded; one of the two is empty.
        self.table, self.fields = None, ()
        if self.encoded:
            self.fields = encoded_lines(group, layout)
        elif len(layout.region_offsets) != len(group.regions):
            raise ValueError(f"a layout of {len(layout.region_offsets)} regions for {len(group.regions)}")
        else:
            self.table = region_table(group, layout)
        self.nbytes, self.sum_offset, self.part_offset = layout.nbytes, layout.sum_offset, part_offset
        self.pitch = -(-layout.nbytes // ROW_ALIGN) * ROW_ALIGN
        self.row_offsets = np.arange(MAX_ROWS, dtype=np.int64) * self.pitch
        self.sizes = np.full(MAX_ROWS, layout.nbytes, dtype=np.uint64)

    def page_copiers(
        self,
        gather: bool,
        choice: Choice,
        scratch: "Sequence[tuple[torch.Tensor, torch.Tensor]]",
        checked: bool,
        start: page_copy.Start | None,
    ) -> list[page_copy.Launches]:
        """Kernels that copy between the cache and the ring and, for raw parts, between the cache and slots; with a
        scratch each."""
        some = others = choice.programs
        if choice.way == "mixed":
            some, others = choice.programs - choice.direct_programs, choice.direct_programs
        if self.encoded:
            shape = encoded_pages.Shape(choice.numbers, choice.warps if choice.numbers else 0, choice.stages)
            setup = page_copy.LaunchSetup(scratch[0], choice.programs, checked, start)
            return [encoded_pages.EncodedPageCopier(gather, self.fields, self.sum_offset, setup, shape)]
        setups = (page_copy.LaunchSetup(scratch[i], n, checked, start) for i, n in enumerate((some, others)))
        return [page_copy.PageCopier(gather, self.table, self.sum_offset, setup, choice.warps) for setup in setups]


def checksum_table(group: GroupView) -> np.ndarray:
    """int64 [regions, 11] as in ``checksum.REGION_FIELDS``."""
    rows, first = [], 0
    for r in group.regions:
        word = checksum.word_bytes(r.inner)
        words = r.block_bytes // word
        strides = (r.block_stride, r.outer_stride, r.token_stride)
        cells = (words, r.inner // word, r.tokens, first, r.first_token, r.cell_tokens)
        rows.append((r.base, *strides, *cells, word))
        first += words
    return np.array(rows, dtype=np.int64)


def region_table(group: GroupView, layout: PartLayout) -> np.ndarray:
    """int64 [regions, 12] as in ``page_copy.REGION_FIELDS``."""
    return np.column_stack([checksum_table(group), np.array(layout.region_offsets, dtype=np.int64)])


def encoded_lines(group: GroupView, layout: PartLayout) -> list[encoded_pages.Lines]:
    """The kernels' description of each field of an encoded part. Raises ValueError for fields that they cannot
    encode."""
    found = []
    for part in layout.encoded:
        r, code = group.regions[part.region], part.format.kernels
        if r.cell_tokens != 1 or r.dtype not in DTYPES:
            raise ValueError(f"{r.layer}: cells of {r.cell_tokens} tokens of {r.dtype} cannot be encoded on a GPU")
        if code is None and part.format.data_bytes(part.line) != 2 * part.line:
            raise ValueError(f"{r.layer}: the format {part.format.name} has no kernels")
        where = (r.base + 2 * part.offset, r.block_stride, r.outer_stride, r.token_stride, r.outer, r.tokens)
        cell_lines = r.fields[part.field].count // part.line
        size = (cell_lines, part.line, r.dtype == "float16", part.data_offset, part.scale_offset)
        how = (
            (code.bits, part.format.scale_bytes(part.line), code.encode, code.decode, code.fused, *code.tiles)
            if code
            else ()
        )
        found.append(encoded_pages.Lines(*where, *size, *how))
    return found


def _gaps(slots: np.ndarray, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    steps = slots[1:] - slots[:-1]
    return steps, (steps >= nbytes) & (steps <= _MAX_SPREAD * nbytes + PAGE)


def mostly_adjacent(slots: np.ndarray, nbytes: int) -> bool:
    """Whether half of the parts, or more, are likely to share a copy with another part."""
    return 2 * np.count_nonzero(_gaps(slots, nbytes)[1]) >= len(slots)


def adjacent(
    slots: np.ndarray, edges: np.ndarray | None, nbytes: int
) -> tuple[np.ndarray | None, list[tuple[int, int]], int]:
    """Split parts at addresses ``slots`` (int64 [n], in the order of their rows) into runs that one copy can take.

    Returns (indices of single parts, None if all are; [(first, count)] of runs at equal distances; that distance). A
    run stays within one registration (``edges`` int64 [n]: the registration of each; None: there is only one).
    """
    n = len(slots)
    steps, close = _gaps(slots, nbytes)
    if not close.any():
        return None, [], 0
    distance = int(steps[close].min())
    apart = steps != distance
    if edges is not None:
        apart |= edges[1:] != edges[:-1]
    firsts = np.concatenate(([0], np.flatnonzero(apart) + 1, [n]))
    counts = firsts[1:] - firsts[:-1]
    together = counts > 1
    firsts = firsts[:-1]
    return firsts[~together], list(zip(firsts[together].tolist(), counts[together].tolist(), strict=True)), distance
