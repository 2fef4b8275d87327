"""The layout of a block in a slot of the node store: independent of the engine's own layout. Does not import torch.

A *slot* is a whole number of pages of the pool and holds one block of one KV cache group, all layers. It consists of
*parts*, one for each rank that holds a share of the block (one in all where heads are replicated). One copy moves one
part. A part holds the group's regions one after another, each dense in logical order (outer, cell, byte within the
cell), then the 64-bit checksum of those bytes (``kernels.checksum``), little-endian. If a codec encodes the group, the
part consists of lines instead (``codecs.parts``), and the checksum covers the part's bytes before it.

Two engines can use each other's slots exactly if their :func:`layout_digest` is equal. It covers the meaning of the
bytes and their offsets in the slot. It leaves out strides and the order of dimensions in GPU memory and, for an encoded
part, the byte order within the cache's cells.
"""

import hashlib
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_kvtier.wire.geometry import GroupView

# Granularity of the pool: the size of a mapped page, and a good alignment for DMA.
PAGE = 4096
# Host memory is pinned in pieces of this size. No slot crosses a multiple of it: CUDA refuses a copy that spans two
# registrations.
PIECE_BYTES = 256 << 20
# Alignment of regions and of the areas of an encoded part: the widest access of a GPU thread.
REGION_ALIGN = 16
# Alignment of parts: a cache line, also of the link.
PART_ALIGN = 64
SUM_BYTES = 8
# Part of the digest: raise it if the format changes, so that slots of older versions are not read.
FORMAT = 2


class PartLayout(msgspec.Struct, frozen=True):
    """Offsets within one part, in bytes from its start.

    ``region_offsets`` are in the order of ``GroupView.regions``. They are () for an encoded part, which ``encoded``
    describes: a ``codecs.parts.FieldPart`` for each region and field. Bytes between regions or areas, and from the
    checksum's end to ``nbytes``, are padding. The checksum of an encoded part covers the padding before it.
    """

    nbytes: int
    region_offsets: tuple[int, ...]
    sum_offset: int
    encoded: tuple[Any, ...] = ()  # not named: this module knows no codecs and no torch


class SlotLayout(msgspec.Struct, frozen=True):
    """The offset of each rank's part in the slot (bytes), and the pages of a slot."""

    part_offsets: tuple[int, ...]
    pages: int


def align(value: int, step: int) -> int:
    """The least multiple of ``step`` that is not less than ``value``."""
    return -(-value // step) * step


def part_layout(group: GroupView) -> PartLayout:
    """One rank's part of a block of ``group``, stored byte for byte."""
    at, offsets = 0, list[int]()
    for region in group.regions:
        at = align(at, REGION_ALIGN)
        offsets.append(at)
        at += region.block_bytes
    sum_offset = align(at, SUM_BYTES)
    return PartLayout(align(sum_offset + SUM_BYTES, PART_ALIGN), tuple(offsets), sum_offset)


def slot_layout(parts: Sequence[PartLayout | int]) -> SlotLayout:
    """The slot of these parts (layouts, or their ``nbytes``), in the order of the ranks.

    Raises ValueError if there is no part, or if the parts exceed a piece of pinned memory.
    """
    at, offsets = 0, list[int]()
    for part in parts:
        offsets.append(at)
        at += align(part if isinstance(part, int) else part.nbytes, PART_ALIGN)
    if not 0 < at <= PIECE_BYTES:
        raise ValueError(
            f"a block takes {at} bytes in {len(offsets)} parts; the node store allows 1 to {PIECE_BYTES} bytes: "
            "choose a smaller block size (--block-size)"
        )
    return SlotLayout(tuple(offsets), align(at, PAGE) // PAGE)


def layout_digest(groups: Sequence[GroupView], layouts: Sequence[PartLayout] | None = None) -> bytes:
    """32 bytes that are equal for two ranks exactly if they can read each other's parts.

    ``layouts``: of each group's parts; None: all are stored byte for byte. Covers, for each group, tokens per block,
    kind and window, and for each region the layer, the logical shape, dtype and packing; the host's byte order; and
    :data:`FORMAT`. Leaves out addresses, strides and physical order. For an encoded group, the fields, their formats
    and offsets replace the packing.
    """
    if layouts is None:
        layouts = [part_layout(g) for g in groups]
    content: list[Any] = [FORMAT, sys.byteorder]
    for g, layout in zip(groups, layouts, strict=True):
        where: tuple[Any, ...] = (layout.nbytes, layout.region_offsets, layout.sum_offset)
        regions: list[tuple[Any, ...]]
        if layout.encoded:
            regions = [(r.layer, r.outer, r.first_token, r.block_tokens, r.fields, r.dtype) for r in g.regions]
            where = (*where, [part.identity for part in layout.encoded])
        else:
            regions = [
                (r.layer, r.outer, r.first_token, r.tokens, r.cell_tokens, r.inner, r.packing, r.dtype)
                for r in g.regions
            ]
        content.append((g.block_tokens, g.kind, g.window, regions, where))
    return hashlib.sha256(msgspec.msgpack.encode(content)).digest()
