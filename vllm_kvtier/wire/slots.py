"""How a block lies in a slot of the node store: the same bytes whatever the engine's layout (no torch here).

A *slot* is a whole number of pages of the pool and holds one block of one KV cache group, all layers. It is made
of *parts*, one for each rank that holds something of the block (one in all where heads are replicated). A part is
what one copy moves: the group's regions one after another, each dense in logical order (outer, cell, byte within
the cell), then the 64-bit checksum of those bytes (``kernels.checksum``), little-endian. Where a codec encodes the
group the part is made of lines instead (``codecs.parts``), and the checksum is that of the part's bytes before it.

Two engines can use each other's slots exactly if their :func:`layout_digest` is equal: it covers what the bytes
mean and where they lie in the slot, and leaves out strides and the order of dimensions in the GPU's memory; for a
coded part also how bytes lie within the cache's cells.
"""

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_kvtier.wire.geometry import GroupView

# The pool's unit: what memory is mapped by, and what the DMA engine likes to begin at.
PAGE = 4096
# Host memory is pinned in pieces of this size; no slot straddles a multiple of it, so that no copy crosses from
# one registration into the next, which CUDA refuses.
PIECE = 256 << 20
# Regions, and the areas of a coded part, begin here: the widest access of a GPU thread.
REGION_ALIGN = 16
# Parts are a multiple of this, so that each begins on a line of the cache and of the link.
PART_ALIGN = 64
SUM_BYTES = 8
# Part of the digest: another number here, and slots of older versions are not read.
FORMAT = 1


class PartLayout(msgspec.Struct, frozen=True):
    """Where things lie in one part; all numbers in bytes from the part's start.

    ``region_offsets`` are in the order of ``GroupView.regions``; () for a coded part, which ``coded`` describes: a
    ``codecs.parts.FieldPart`` for each region and field. Bytes between regions or areas, and from the checksum's
    end to ``nbytes``, mean nothing; those before the checksum count in that of a coded part all the same.
    """

    nbytes: int
    region_offsets: tuple[int, ...]
    sum_offset: int
    coded: tuple[Any, ...] = ()  # not named: this module knows no codecs and no torch


class SlotLayout(msgspec.Struct, frozen=True):
    """Where each rank's part begins in the slot (bytes), and how many pages a slot takes."""

    part_offsets: tuple[int, ...]
    pages: int


def align(value: int, unit: int) -> int:
    """The least multiple of ``unit`` that is not less than ``value``."""
    return -(-value // unit) * unit


def part_layout(group: GroupView) -> PartLayout:
    """One rank's part of a block of ``group``, kept byte for byte."""
    at, offsets = 0, []
    for region in group.regions:
        at = align(at, REGION_ALIGN)
        offsets.append(at)
        at += region.block_bytes
    sum_offset = align(at, SUM_BYTES)
    return PartLayout(align(sum_offset + SUM_BYTES, PART_ALIGN), tuple(offsets), sum_offset)


def slot_layout(parts: Sequence[PartLayout | int]) -> SlotLayout:
    """A slot of these parts (layouts, or their ``nbytes``), in the order of the ranks.

    Raises ValueError if there is none, or if they do not fit a piece of pinned memory.
    """
    at, offsets = 0, []
    for part in parts:
        offsets.append(at)
        at += align(part if isinstance(part, int) else part.nbytes, PART_ALIGN)
    if not 0 < at <= PIECE:
        raise ValueError(
            f"a block takes {at} bytes in {len(offsets)} parts; the node store holds blocks of 1 to {PIECE} bytes: "
            "choose a smaller block size (--block-size)"
        )
    return SlotLayout(tuple(offsets), align(at, PAGE) // PAGE)


def layout_digest(groups: Sequence[GroupView], layouts: Sequence[PartLayout] | None = None) -> bytes:
    """32 bytes that are equal for two ranks exactly if they can read each other's parts.

    ``layouts``: of each group's parts; None: all are kept byte for byte. Covers, for each group, tokens a block,
    kind and window, and for each region the layer, the logical shape, dtype and packing; the host's byte order; and
    :data:`FORMAT`. Not addresses, strides or physical order. Of a coded group not the packing, but the fields, how
    each is kept, and where.
    """
    if layouts is None:
        layouts = [part_layout(g) for g in groups]
    words: list = [FORMAT, sys.byteorder]
    for g, layout in zip(groups, layouts, strict=True):
        where = (layout.nbytes, layout.region_offsets, layout.sum_offset)
        if layout.coded:
            regions = [(r.layer, r.outer, r.first_token, r.block_tokens, r.fields, r.dtype) for r in g.regions]
            where = (*where, [part.identity for part in layout.coded])
        else:
            regions = [
                (r.layer, r.outer, r.first_token, r.tokens, r.cell_tokens, r.inner, r.packing, r.dtype)
                for r in g.regions
            ]
        words.append((g.block_tokens, g.kind, g.window, regions, where))
    return hashlib.sha256(msgspec.msgpack.encode(words)).digest()
