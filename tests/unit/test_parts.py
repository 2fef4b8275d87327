"""Coded parts of slots: where lines lie, and which engines can read each other's."""

import msgspec
import pytest

from vllm_kvtier import codecs
from vllm_kvtier.codecs.base import Codec, Format
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.wire import slots
from vllm_kvtier.wire.geometry import Field, GroupView, Region

KV = (Field("k", 128), Field("v", 128))
LATENT = (Field("latent", 512), Field("rope", 64))


def region(layer="l0", outer=2, tokens=16, cell_tokens=1, fields=KV, packing="", dtype="bfloat16", **more) -> Region:
    inner = 2 * cell_tokens * sum(f.count for f in fields)
    return Region(
        layer, 0, 1 << 20, outer, 1 << 16, 0, tokens // cell_tokens, inner, inner, cell_tokens, packing, dtype, fields,
    )  # fmt: skip


def group(*regions: Region, kind="full") -> GroupView:
    return GroupView(0, 16, kind, None, regions or (region(), region("l1")))


class Lines(Format):
    """Lines of ``line`` numbers; only the sizes matter here."""

    def __init__(self, line: int, data: int, scale: int, name="lines"):
        self._sizes, self.name = (line, data, scale), name

    def line(self, count):
        return self._sizes[0]

    def data_bytes(self, line):
        return self._sizes[1]

    def scale_bytes(self, line):
        return self._sizes[2]

    encode = decode = tolerance = kernels = None


def codec(**formats: Format) -> Codec:
    return Codec("test", "for tests", formats)


def test_parts_encoded_areas_are_aligned_and_consecutive():
    layout = part_layout(group(), codec(k=Lines(128, 129, 3), v=Lines(32, 16, 0)))
    assert [(p.region, p.field, p.offset, p.line, p.lines) for p in layout.encoded] == [
        (0, 0, 0, 128, 32), (0, 1, 128, 32, 128), (1, 0, 0, 128, 32), (1, 1, 128, 32, 128),
    ]  # fmt: skip
    at = 0
    for part in layout.encoded:
        assert part.data_offset == slots.align(at, 16)
        at = part.data_offset + part.lines * part.format.data_bytes(part.line)
        if part.scale_bytes:
            assert part.scale_offset == slots.align(at, 16)
            at = part.scale_offset + part.lines * part.format.scale_bytes(part.line)
    assert layout.sum_offset == slots.align(at, 16) == 2 * (32 * 129 + 32 * 3 + 128 * 16)
    assert layout.nbytes == slots.align(layout.sum_offset + 8, 64) and layout.region_offsets == ()


@pytest.mark.parametrize(
    "name, fields, least", [("int8", KV, 1.96), ("fp8", KV, 1.96), ("int4", KV, 3.5), ("int8", LATENT, 1.75)]
)
def test_parts_have_the_codec_compression_ratio(name, fields, least):
    whole = group(region(fields=fields), region("l1", fields=fields))
    layout = part_layout(whole, codecs.get(name))
    assert least < whole.block_bytes / layout.nbytes < least + 0.1
    assert slots.slot_layout([layout]).pages == -(-layout.nbytes // slots.PAGE)


def test_parts_without_applicable_codec_are_raw():
    int8 = codecs.get("int8")
    for one in (
        group(region(dtype="float32")),
        group(region(), msgspec.structs.replace(region("l1"), fields=())),
        group(region(fields=(Field("state", 64),))),
    ):
        assert part_layout(one, int8) == slots.part_layout(one) and not part_layout(one, int8).encoded
    assert part_layout(group(), codecs.get("raw")) == slots.part_layout(group())


def test_parts_line_not_dividing_a_field_raises():
    with pytest.raises(ValueError, match="lines cuts 128 numbers into lines of 48"):
        part_layout(group(), codec(k=Lines(48, 48, 2), v=Lines(48, 48, 2)))


def digest(whole: GroupView, name: str = "int8") -> bytes:
    return slots.layout_digest([whole], [part_layout(whole, codecs.get(name))])


def test_parts_digest_of_encoded_parts_ignores_packing():
    """A GPU's tokens of heads and a CPU's packed pages: the same lines."""
    packed = group(region(cell_tokens=16, packing="a"), region("l1", cell_tokens=16, packing="a"))
    other = group(region(cell_tokens=8, packing="b"), region("l1", cell_tokens=8, packing="b"))
    assert digest(packed) == digest(other) == digest(group())
    assert len({digest(g, "raw") for g in (packed, other, group())}) == 3
    assert part_layout(packed, codecs.get("int4")) == part_layout(group(), codecs.get("int4"))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"layer": "m"},
        {"outer": 1},
        {"tokens": 8},
        {"first_token": 16},
        {"fields": (Field("k", 64), Field("v", 192))},
        {"fields": (Field("v", 128), Field("k", 128))},
        {"fields": (Field("k", 256),)},
    ],
    ids=str,
)
def test_part_layouts_with_other_meaning_have_other_digests(change):
    assert digest(group(msgspec.structs.replace(region(), **change), region("l1"))) != digest(group())


def test_parts_digest_differs_per_codec():
    names = codecs.names()
    assert len({digest(group(), name) for name in names}) == len(names)
    mine = [part_layout(group(), codec(k=Lines(128, 128, 2, n), v=Lines(128, 128, 2, n))) for n in "ab"]
    assert slots.layout_digest([group()], mine[:1]) != slots.layout_digest([group()], mine[1:])


def test_parts_digest_of_raw_parts_ignores_fields():
    bare = [msgspec.structs.replace(r, fields=()) for r in group().regions]
    assert slots.layout_digest([group()]) == slots.layout_digest([group(*bare)])
    assert slots.layout_digest([group()]) == digest(group(), "raw")


def test_parts_digest_with_wrong_number_of_layouts_raises():
    with pytest.raises(ValueError):
        slots.layout_digest([group(), group()], [part_layout(group(), codecs.get("int8"))])
