"""The record of what codecs cost: kept, merged, and what it lets ``codec: auto`` take."""

import json
import os
import shutil
from pathlib import Path

import msgspec
import pytest

from vllm_kvtier import fingerprint
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.quality import record as records
from vllm_kvtier.quality.record import CodecQuality, Limits, RecallAt, Record, Text

FINGERPRINT = "0123456789abcdef" * 2
GOOD = dict(bits=8.125, perplexity=0.0003, perplexity_error=0.0001, divergence=1e-4, agreement=0.996)


def quality(name: str = "int8", **changes) -> CodecQuality:
    return CodecQuality(**{"name": name, "formats": {"k": f"{name}.k", "v": f"{name}.v"}, **GOOD, **changes})


def record(*codecs: CodecQuality, **changes) -> Record:
    given = dict(
        fingerprint=FINGERPRINT, model="m", made=1.0, text=Text("t", "d", 8, 64), dtype="bfloat16",
        computed_in="float32 on cpu", nats=1.8, codecs=list(codecs),
    )  # fmt: skip
    return Record(**{**given, **changes})


def formats(*codecs: CodecQuality) -> dict[str, dict[str, str]]:
    return {codec.name: codec.formats for codec in codecs}


def test_quality_record_is_loaded_by_fingerprint(tmp_path):
    saved = record(quality(recall=[RecallAt(500, 10, 10, 9, 1)]))
    file = records.save(saved, tmp_path / "new" / "folder")
    assert file.name == f"{FINGERPRINT}.json"
    assert records.load(FINGERPRINT, file.parent) == saved
    assert records.load("f" * 32, file.parent) is None
    assert [f.name for f in file.parent.iterdir()] == [file.name]  # nothing half-written beside it


def test_quality_record_default_folder_is_user_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert records.save(record(quality())) == tmp_path / "vllm-kvtier" / "quality" / f"{FINGERPRINT}.json"
    assert records.load(FINGERPRINT) == record(quality())


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version": "x"}', b"\xff"])
def test_quality_record_damaged_is_none_and_logged(tmp_path, content, caplog):
    (tmp_path / f"{FINGERPRINT}.json").write_bytes(content)
    assert records.load(FINGERPRINT, tmp_path) is None
    assert "kvtier quality" in caplog.text
    records.save(record(quality()), tmp_path)  # and is replaced
    assert records.load(FINGERPRINT, tmp_path) == record(quality())


@pytest.mark.parametrize("changes", [{"version": 99}, {"fingerprint": "e" * 32}])
def test_quality_record_of_other_version_or_model_is_none(tmp_path, changes):
    (tmp_path / f"{FINGERPRINT}.json").write_bytes(msgspec.json.encode(record(quality(), **changes)))
    assert records.load(FINGERPRINT, tmp_path) is None


def test_quality_record_to_unwritable_path_raises(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KVTierError, match="cannot be written"):
        records.save(record(quality()), tmp_path / "file")


def test_quality_record_on_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def full(source, target):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(KVTierError, match="no space"):
        records.save(record(quality()), tmp_path)
    assert not list(tmp_path.iterdir())


def test_quality_record_keeps_codecs_of_same_text(tmp_path):
    records.save(record(quality("int8"), quality("fp8")), tmp_path)
    records.save(record(quality("int8", perplexity=0.2)), tmp_path)
    kept = {codec.name: codec.perplexity for codec in records.load(FINGERPRINT, tmp_path).codecs}
    assert kept == {"int8": 0.2, "fp8": 0.0003}
    records.save(record(quality("int8"), text=Text("t", "other", 8, 64)), tmp_path)
    assert [codec.name for codec in records.load(FINGERPRINT, tmp_path).codecs] == ["int8"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"perplexity": -0.01}, None),
        ({"perplexity": 0.0051}, "perplexity"),
        ({"perplexity": 0.0045, "perplexity_error": 0.0006}, "perplexity"),  # not known well enough
        ({"perplexity": float("nan")}, "perplexity"),
        ({"perplexity_error": float("inf")}, "perplexity"),
        ({"agreement": 0.969}, "agreement"),
        ({"recall": [RecallAt(500, 200, 200, 200, 0)]}, None),
        ({"recall": [RecallAt(500, 200, 190, 190, 1)]}, "answers"),  # others gained do not make up for one lost
    ],
)
def test_quality_record_passes_at_limits_only(changes, words):
    refused = records.refusal(quality(**changes))
    assert refused is None if words is None else words in refused


def test_quality_record_looser_limits_admit_more():
    rough = quality(perplexity=0.006, agreement=0.95, recall=[RecallAt(500, 200, 200, 198, 2)])
    assert records.refusal(rough) is not None
    assert records.refusal(rough, Limits(perplexity=0.01, recall=0.01, agreement=0.94)) is None


def test_quality_record_admitted_codecs_are_smallest_first():
    codecs = quality("int8"), quality("tiny", bits=2.0, perplexity=0.3), quality("four", bits=4.25)
    assert records.admitted(record(*codecs), formats=formats(*codecs)) == ["four", "int8"]


def test_quality_record_codec_with_changed_format_is_not_admitted():
    measured = quality("int8"), quality("four", bits=4.25), quality("gone", bits=3)
    now = {**formats(measured[0]), "four": {"k": "four.k", "v": "another"}}
    assert records.admitted(record(*measured), formats=now) == ["int8"]


def test_quality_record_present_codecs_name_their_formats():
    now = records.present_formats()
    assert now["raw"] == {}
    assert {"k", "v"} <= now["int8"].keys()
    measured = quality("int8", formats=now["int8"])
    assert records.admitted(record(measured)) == ["int8"]


# -- which model it is


@pytest.fixture
def folder(tmp_path) -> Path:
    (made := tmp_path / "model").mkdir()
    (made / "config.json").write_text(json.dumps({"hidden_size": 8, "dtype": "bfloat16"}))
    (made / "model.safetensors").write_bytes(bytes(range(256)) * 64)
    return made


def test_fingerprint_of_model_copy_is_equal(folder, tmp_path):
    copy = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    (copy / "config.json").write_text(json.dumps({"_name_or_path": "x", "dtype": "float32", "hidden_size": 8}))
    assert fingerprint.of_files(str(copy)) == fingerprint.of_files(str(folder))
    assert len(fingerprint.of_files(str(folder))) == 32


def test_fingerprint_depends_on_weights_and_config(folder):
    before = fingerprint.of_files(str(folder))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    changed = fingerprint.of_files(str(folder))
    (folder / "config.json").write_text(json.dumps({"hidden_size": 16}))
    assert len({before, changed, fingerprint.of_files(str(folder))}) == 3


@pytest.mark.parametrize("spoil", ["no weights", "no config", "not JSON", "a list"])
def test_fingerprint_of_incomplete_model_is_none(folder, spoil):
    config = folder / "config.json"
    match spoil:
        case "no weights":
            (folder / "model.safetensors").unlink()
        case "no config":
            config.unlink()
        case "not JSON":
            config.write_text("{")
        case "a list":
            config.write_text("[]")
    assert fingerprint.of_files(str(folder)) is None


def test_fingerprint_of_absent_model_is_none(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fingerprint.of_files("nobody/has-this-model") is None
