"""The layout of an encoded block in its part of a slot.

An *encoded part* consists of areas that begin at multiples of 16 bytes: for each region of the group and each of its
fields the data of all lines, then the scales of all lines, if the format has any; then the checksum. A *line* is
``line`` consecutive numbers of one field of one token and head. Lines are counted in logical order (head, token, line
within the token's numbers), whatever the cache's strides and the order of numbers within its cells: engines with
different layouts share slots.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_kvtier.wire import slots
from vllm_kvtier.wire.geometry import GroupView
from vllm_kvtier.wire.slots import PART_ALIGN, REGION_ALIGN, SUM_BYTES, PartLayout, align

if TYPE_CHECKING:
    from vllm_kvtier.codecs.base import Codec, Format


@dataclass(frozen=True)
class FieldPart:
    """One field of one region of a block; offsets in bytes from the part's start.

    ``region`` and ``field`` are indices, the latter in ``Region.fields``. ``offset``: numbers of a token and head
    that come before this field's (where a cell holds T tokens, T times as many numbers of the cell, in logical
    order). ``lines`` of ``line`` numbers make a block.
    """

    region: int
    field: int
    offset: int
    format: "Format"
    line: int
    lines: int
    data_offset: int
    scale_offset: int

    @property
    def data_bytes(self) -> int:
        """Of all lines of a block."""
        return self.lines * self.format.data_bytes(self.line)

    @property
    def scale_bytes(self) -> int:
        """Of all lines of a block; 0 if the format has no scales, and then ``scale_offset`` has no meaning."""
        return self.lines * self.format.scale_bytes(self.line)

    @property
    def identity(self) -> tuple[int | str, ...]:
        """Must be equal for two engines to read each other's parts."""
        return (
            self.region, self.field, self.offset, self.format.name, self.line, self.lines, self.data_offset,
            self.scale_offset,
        )  # fmt: skip


def part_layout(group: GroupView, codec: "Codec") -> PartLayout:
    """One rank's part of a block of ``group`` in ``codec``; byte for byte where that does not apply."""
    if not codec.formats or not codec.applies(group):
        return slots.part_layout(group)
    at, parts = 0, []
    for r, region in enumerate(group.regions):
        offset = 0
        for f, field in enumerate(region.fields):
            form = codec.formats[field.name]
            line = form.line(field.count)
            if line <= 0 or field.count % line:
                raise ValueError(f"{form.name} cuts {field.count} numbers into lines of {line}")
            lines = region.outer * region.block_tokens * (field.count // line)
            data = at
            scales = align(data + lines * form.data_bytes(line), REGION_ALIGN)
            at = align(scales + lines * form.scale_bytes(line), REGION_ALIGN)
            parts.append(FieldPart(r, f, offset, form, line, lines, data, scales))
            offset += field.count
    # The checksum is at a multiple of 16, as REGION_ALIGN is: the kernels sum two words at a time.
    return PartLayout(align(at + SUM_BYTES, PART_ALIGN), (), at, tuple(parts))
