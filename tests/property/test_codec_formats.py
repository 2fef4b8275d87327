"""Codecs' references: how far numbers move, what a bad number does and to which numbers, sizes, and which codec a group
gets."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_kvtier import codecs
from vllm_kvtier.codecs.base import DTYPES, INFINITE, rounded
from vllm_kvtier.codecs.keep import KEEP
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.wire import slots
from vllm_kvtier.wire.geometry import Field, GroupView, Region

FORMATS = sorted({f for n in codecs.names() for f in codecs.get(n).formats.values()}, key=lambda f: f.name)
LOSSY = [f for f in FORMATS if f.lossy]
HEADS = (64, 80, 96, 112, 128, 192, 256, 512)
# Bits a number at 128 numbers a token and head, blocks of 16 tokens, over all of a part.
BITS = {"raw": 16.0, "fp8": 8.125, "int8": 8.125, "int4": 4.5, "k8v4": 6.2}
BEST = 4.7  # of the other 4-bit ones

dtypes = st.sampled_from(list(DTYPES.values()))
SPECIAL = (0.0, -0.0, 1.0, -1.0, 65504.0, 61440.0, 60000.0, -65504.0, 448.0, 464.0, 2.0**-14, 2.0**-24, -(2.0**-24))
SPECIAL_BF16 = (2.0**126 * 0.99, -(2.0**126) * 0.99, 2.0**-126, 2.0**-133, -(2.0**-130), 1e-30, 1e30)


@st.composite
def lines(draw, line: int, dtype: torch.dtype, bad: bool) -> torch.Tensor:
    """Finite lines [n, G] of all sizes, with outliers, zeros, denormals; ``bad``: some have what is not finite."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(1, 12))
    x = rng.standard_normal((n, line))
    wide = 90 if dtype == torch.bfloat16 else 10
    x *= np.exp2(rng.integers(-wide, wide, (n, 1)).astype(float))
    x += (rng.random((n, 1)) < 0.3) * rng.standard_normal((n, 1)) * 30 * np.abs(x).max(axis=1, keepdims=True)
    limit = torch.finfo(torch.float16).max if dtype == torch.float16 else 2.0**125
    found = torch.from_numpy(np.clip(x, -limit, limit)).to(dtype)
    values = SPECIAL + (SPECIAL_BF16 if dtype == torch.bfloat16 else ())
    for _ in range(draw(st.integers(0, 6))):
        found[draw(st.integers(0, n - 1)), draw(st.integers(0, line - 1))] = draw(st.sampled_from(values))
    if draw(st.booleans()):
        found[draw(st.integers(0, n - 1))] = draw(st.sampled_from(values))
    if bad:
        awful = ["nan", "inf", "-inf"] + (["8.6e37", "-3e38"] if dtype == torch.bfloat16 else [])
        for _ in range(draw(st.integers(1, 3))):
            found[draw(st.integers(0, n - 1)), draw(st.integers(0, line - 1))] = float(draw(st.sampled_from(awful)))
    return found


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16)


@pytest.mark.parametrize("form", LOSSY, ids=repr)
@given(data=st.data(), dtype=dtypes, count=st.sampled_from(HEADS))
@settings(max_examples=60)
def test_codec_error_of_finite_numbers_is_within_tolerance(form, data, dtype, count):
    line = form.line(count)
    assert count % line == 0 if line else count not in (64, 128), "heads of these sizes are encoded"
    if not line:
        return  # such groups stay raw
    x = data.draw(lines(line, dtype, bad=False))
    encoded, scales = form.encode(x)
    assert encoded.dtype == scales.dtype == torch.uint8
    assert encoded.shape == (len(x), form.data_bytes(line)) and scales.shape == (len(x), form.scale_bytes(line))
    y = form.decode(encoded, scales, dtype)
    assert y.dtype == dtype and y.shape == x.shape
    assert y.isfinite().all()
    error = (y.double() - x.double()).abs()
    excess = error - form.tolerance(x).double()
    at = int(excess.argmax())
    assert excess.max() <= 0, (x.reshape(-1)[at], y.reshape(-1)[at], form.tolerance(x).max())


@pytest.mark.parametrize("form", [f for f in LOSSY if f.name.startswith(("int8", "uint4"))], ids=repr)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_codec_tolerance_uses_the_stored_scale(form, dtype):
    """In one line of thousands another way of computing it ends in the next bfloat16."""
    x = torch.from_numpy(np.random.default_rng(5).standard_normal((1 << 17, 64))).to(dtype)
    _, scales = form.encode(x)
    step = scales[:, -2:].contiguous().view(torch.bfloat16).float()
    assert torch.equal(form.tolerance(x), rounded(step * 0.5001, x))


@pytest.mark.parametrize("form", LOSSY, ids=repr)
@given(data=st.data(), dtype=dtypes, count=st.sampled_from((64, 128)))
@settings(max_examples=60)
def test_codec_non_finite_value_affects_its_row_only(form, data, dtype, count):
    x = data.draw(lines(form.line(count), dtype, bad=True))
    encoded, scales = form.encode(x)
    y = form.decode(encoded, scales, dtype)
    bad = (x.float().view(torch.int32) & 0x7FFFFFFF).amax(dim=1) >= INFINITE
    assert bad.any()
    assert y[bad].isnan().all() and y[~bad].isfinite().all()
    for i in range(len(x)):  # each line is coded as if it were alone
        alone = form.encode(x[i : i + 1])
        assert (alone[1][0] == scales[i]).all()
        assert bad[i] or (alone[0][0] == encoded[i]).all()


@pytest.mark.parametrize("form", LOSSY, ids=repr)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_codec_zeros_stay_zero_and_outlier_affects_its_line_only(form, dtype):
    line = form.line(128)
    zeros = torch.zeros(3, line, dtype=dtype)
    zeros[1] = -0.0
    assert (form.decode(*form.encode(zeros), dtype) == 0).all()
    x = torch.randn(2, line, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = form.decode(*form.encode(x), dtype)
    x[1, 5] = 1000.0
    after = form.decode(*form.encode(x), dtype)
    assert (bits(after[0]) == bits(before[0])).all()
    assert ((after[1] - x[1]).abs() <= form.tolerance(x)[1]).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_codec_raw_fields_round_trip_exactly(dtype):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 64)
    encoded, scales = KEEP.encode(every)
    assert scales.shape == (1024, 0) and not KEEP.lossy and KEEP.kernels is None
    assert (bits(KEEP.decode(encoded, scales, dtype)) == bits(every)).all()


@pytest.mark.parametrize("form", [f for f in LOSSY if f.name.startswith("e4m3")], ids=repr)
@given(data=st.data(), dtype=dtypes)
@settings(max_examples=30)
def test_encode_twice_with_power_of_two_scales_is_stable(form, data, dtype):
    x = data.draw(lines(form.line(128), dtype, bad=False))
    x = x[x.float().abs().amax(dim=1) < 2.0**125]  # rounded up, larger ones might count as infinite
    once = form.decode(*form.encode(x), dtype)
    assert (bits(form.decode(*form.encode(once), dtype)) == bits(once)).all()


def group(dtype="bfloat16", kind="full", **fields: int) -> GroupView:
    inner = 2 * sum(fields.values())
    named = tuple(Field(n, c) for n, c in fields.items())
    regions = tuple(
        Region(f"l{i}", 0, 1 << 20, 2, 16 * inner, 0, 16, inner, inner, dtype=dtype, fields=named) for i in range(2)
    )
    return GroupView(0, 16, kind, None, regions)


@pytest.mark.parametrize("name", codecs.names())
def test_codec_layout_is_within_promised_bits(name):
    codec, attention = codecs.get(name), group(k=128, v=128)
    layout = part_layout(attention, codec)
    assert 8 * layout.sum_offset / (attention.block_bytes / 2) <= BITS.get(name, BEST)
    assert codec.title and all(f.bound and f.name for f in codec.formats.values())
    assert codec.lossy == (name != "raw")
    if name == "raw":
        assert layout == slots.part_layout(attention)
    latent = part_layout(group(latent=512, rope=64), codec)
    kept = [p for p in latent.encoded if p.format is KEEP]
    assert [p.field for p in kept] == ([1, 1] if codec.formats else [])


def test_codec_format_names_are_unique():
    assert len({f.name for f in FORMATS}) == len(FORMATS)
    assert codecs.names()[0] == "raw" and {"fp8", "int8", "int4", "k8v4"} < set(codecs.names())


def test_codec_unknown_name_raises_with_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'int8'"):
        codecs.get("int_8")
    with pytest.raises(ConfigError, match="raw, "):
        codecs.choose({"full": "zip"}, group(k=64, v=64))


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"dtype": "float8_e4m3fn"}, "holds float8_e4m3fn"),
        ({"fields": ()}, "is unknown"),
        ({"fields": (Field("k", 64), Field("state", 64))}, "no format for the field 'state'"),
        ({"fields": (Field("k", 124), Field("v", 4))}, "cannot encode 124 numbers"),
    ],
)
def test_codec_choice_of_unsupported_group_is_raw(changed, words):
    whole = group(k=64, v=64)
    regions = (whole.regions[0], msgspec.structs.replace(whole.regions[1], **changed))
    partly = msgspec.structs.replace(whole, regions=regions)
    codec = codecs.get("int4")
    assert codec.applies(whole) and not codec.applies(partly) and words in codec.reason(partly)
    assert codecs.choose("int4", partly).name == "raw" and codecs.get("raw").applies(partly)


def test_codec_choice_may_differ_per_group_kind():
    option = {"full": "int8", "mla": "fp8"}
    assert codecs.choose(option, group(k=64, v=64)).name == "int8"
    assert codecs.choose(option, group(kind="mla", latent=512, rope=64)).name == "fp8"
    assert codecs.choose(option, group(kind="sliding", k=64, v=64)).name == "raw"
