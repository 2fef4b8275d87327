"""Which codec keeps a group: the options' values, auto by what was measured, and what two engines say of it."""

import logging
from types import SimpleNamespace

import msgspec
import pytest
from tier_fakes import NAMESPACE, group_view

from vllm_kvtier import codecs
from vllm_kvtier.codecs import choice
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.quality import record
from vllm_kvtier.wire.geometry import Field


def numbers(view):
    """The group with pages that a codec can encode."""
    regions = []
    for region in view.regions:
        half = region.inner // 4
        fields = (Field("k", half), Field("v", half))
        regions.append(msgspec.structs.replace(region, inner=4 * half, dtype="bfloat16", fields=fields))
    return msgspec.structs.replace(view, regions=tuple(regions))


FULL = numbers(group_view(0, 16))
SLIDING = msgspec.structs.replace(numbers(group_view(1, 16, 64)), kind="sliding")


@pytest.mark.parametrize("value", ["raw", "auto", "int8", {"full": "fp8", "sliding": "auto"}, {}])
def test_codec_options_valid_are_accepted(value):
    choice.check("codec", value)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("int9", ["codec: no codec is named 'int9'", "int8"]),
        ({"full": "fp9"}, ["no codec is named 'fp9'"]),
        ({"ful": "fp8"}, ["'ful' is no kind of KV cache", "full, sliding"]),
    ],
)
def test_codec_options_invalid_raise_with_allowed_values(value, words):
    with pytest.raises(ConfigError) as error:
        choice.check("codec", value)
    assert all(word in str(error.value) for word in words)


def test_codec_choice_is_per_group():
    chosen = choice.by_group({"full": "int8", "sliding": "int4"}, [[FULL, SLIDING], [FULL, SLIDING]])
    assert [codec.name for codec in chosen] == ["int8", "int4"]
    assert [codec.name for codec in choice.by_group({"sliding": "int4"}, [[FULL, SLIDING]])] == ["raw", "int4"]


def test_codec_choice_unsupported_by_one_rank_is_raw(caplog):
    bare = group_view(0, 16)
    with caplog.at_level(logging.WARNING):
        chosen = choice.by_group("fp8", [[FULL, SLIDING], [bare, SLIDING]])
    assert [codec.name for codec in chosen] == ["raw", "fp8"]
    assert "fp8 does not apply to KV cache group 0" in caplog.text


def test_codec_choice_auto_takes_admitted_codec_else_raw(monkeypatch, caplog):
    asked = []
    monkeypatch.setattr(record, "load", lambda fingerprint: asked.append(fingerprint))
    with caplog.at_level(logging.WARNING):
        assert choice.resolve("auto", lambda: "model 1") == "raw"
        assert choice.resolve("auto", lambda: None) == "raw"
    assert asked == ["model 1"] and "kvtier quality" in caplog.text and "no local files" in caplog.text
    monkeypatch.setattr(record, "load", lambda fingerprint: SimpleNamespace())
    monkeypatch.setattr(record, "admitted", lambda found: ["rot4", "int8"])
    assert choice.resolve({"full": "auto", "sliding": "fp8"}, lambda: "model 1") == {"full": "rot4", "sliding": "fp8"}
    monkeypatch.setattr(record, "admitted", lambda found: [])
    assert choice.resolve("auto", lambda: "model 1") == "raw"


def test_codec_choice_mismatch_keeps_namespaces_apart():
    assert choice.format_codecs("raw", "raw") == choice.format_codecs({"full": "raw"}, {}) == ""
    kinds = {
        choice.format_codecs(*each)
        for each in [("raw", "raw"), ("int8", "raw"), ("raw", "int8"), ({"full": "int8"}, "raw"), ("fp8", "int8")]
    }
    assert len(kinds) == 5
    exact = NAMESPACE
    lossy = msgspec.structs.replace(NAMESPACE, codecs=choice.format_codecs("int8", "raw"))
    assert "nothing here, store int8 there" in exact.mismatch(lossy)
    assert lossy.mismatch(lossy) is None and set(codecs.names()) > {"raw", "int8"}
