"""Write blocks that arrived and were verified into our pages, on a host: the heads and tokens that go there."""

from typing import Protocol

import numpy as np

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.shapes.tp_mapping import SourceRegion
from vllm_kvtier.wire.geometry import Region
from vllm_kvtier.worker.cache_view import CacheView


class PageWriter(Protocol):
    def write(self, rows: np.ndarray, blocks: np.ndarray, valid: np.ndarray) -> None:
        """Tokens of the arrived blocks ``rows`` [n] to our ``blocks`` [n]. ``valid`` [n]: tokens of each arrived block
        that were verified; others are not written."""


def page_writer(each: SourceRegion, dense: Region, scratch: CacheView, view: CacheView) -> PageWriter:
    """``dense``: ``each.source`` as it lies in ``scratch``. Raises KVTierError if the order of tokens in packed cells
    is unknown."""
    return (_CellWriter if each.by_cells else _PackedWriter)(each, dense, scratch, view)


class _CellWriter:
    """Whole cells, which are alike on both sides."""

    def __init__(self, each: SourceRegion, dense: Region, scratch: CacheView, view: CacheView):
        self._source = each.source
        self._first, self._cells, target = each.cell_run
        arrived, pages = _heads(each, dense, scratch, view)
        arrived = arrived[:, :, self._first : self._first + self._cells]
        pages = pages[:, :, target : target + self._cells]
        self._arrived, self._pages = _as_words(arrived, pages)

    def write(self, rows: np.ndarray, blocks: np.ndarray, valid: np.ndarray) -> None:
        source = self._source
        counted = -(-(valid.astype(np.int64) - source.first_token) // source.cell_tokens)
        cells = np.clip(counted - self._first, 0, self._cells)
        if (cells == self._cells).all():
            first = int(rows[0]) if len(rows) else 0
            adjacent = np.array_equal(rows, np.arange(first, first + len(rows)))  # as a slice they are not copied twice
            self._pages[blocks] = self._arrived[first : first + len(rows)] if adjacent else self._arrived[rows]
            return
        for row, block, count in zip(rows.tolist(), blocks.tolist(), cells.tolist(), strict=True):
            self._pages[block, :, :count] = self._arrived[row, :, :count]


class _PackedWriter:
    """Tokens of cells that hold several in an order of their own, and another number of them on each side."""

    def __init__(self, each: SourceRegion, dense: Region, scratch: CacheView, view: CacheView):
        run = each.run
        theirs, ours = view.token_layout(each.source), view.token_layout(each.target)
        if run is None or theirs is None or ours is None or theirs.shape[1] != ours.shape[1]:
            raise KVTierError(
                f"layer {each.source.layer}: the order of tokens in cells of {each.source.packing} is unknown"
            )
        self._first_token = each.source.first_token + run.first
        self._theirs = theirs.numpy()[run.first : run.first + run.tokens]  # [tokens, numbers]: indices within the cell
        self._ours = ours.numpy()[run.target : run.target + run.tokens]
        number = np.dtype(f"<u{each.source.inner // theirs.numel()}")
        arrived, pages = _heads(each, dense, scratch, view)
        self._arrived, self._pages = (
            arrived[:, :, 0].view(number),
            pages[:, :, 0].view(number),
        )  # [blocks, heads, numbers]

    def write(self, rows: np.ndarray, blocks: np.ndarray, valid: np.ndarray) -> None:
        counts = np.clip(valid.astype(np.int64) - self._first_token, 0, len(self._ours))
        for row, block, count in zip(rows.tolist(), blocks.tolist(), counts.tolist(), strict=True):
            theirs, ours = self._theirs[:count].ravel(), self._ours[:count].ravel()
            self._pages[block][:, ours] = self._arrived[row][:, theirs]


def _heads(each: SourceRegion, dense: Region, scratch: CacheView, view: CacheView) -> tuple[np.ndarray, np.ndarray]:
    """Views of this region's heads in the scratch and in our pages: uint8 [blocks, outers, cells, bytes of a cell]."""
    arrived = scratch.pages(dense).numpy()[:, each.first_outer : each.first_outer + each.outers]
    return arrived, view.pages(each.target).numpy()[:, each.target_outer : each.target_outer + each.outers]


def _as_words(arrived: np.ndarray, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same as larger words, if both can be."""
    for word in (np.dtype(np.uint64), np.dtype(np.uint32)):
        size = word.itemsize
        if all(a.ctypes.data % size == 0 and not any(n % size for n in (*a.strides[:-1], a.shape[-1]))
               for a in (arrived, pages)):  # fmt: skip
            return arrived.view(word), pages.view(word)
    return arrived, pages
