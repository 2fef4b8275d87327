"""Which way copies go: rules by size, the cache of a machine's own measurements, what is refused."""

import importlib.util
import os
import pwd
from pathlib import Path

import msgspec
import pytest

from vllm_kvtier import file_digests
from vllm_kvtier.quality import record
from vllm_kvtier.worker import tuning
from vllm_kvtier.worker.tuning import Choice, Rule, Tuning


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


COPY = Path(__file__).parents[2] / "benchmarks" / "copy"
SMALL, LARGE = Choice("direct", 8), Choice("staged", 16)
SAMPLE = Tuning("NVIDIA X/200", (Rule(1000, SMALL), Rule(None, LARGE)), (Rule(None, LARGE),))


def test_tuning_first_matching_rule_applies():
    assert SAMPLE.choose(True, 999) is SMALL
    assert SAMPLE.choose(True, 1000) is LARGE
    assert SAMPLE.choose(False, 1) is LARGE


def test_tuning_encoded_parts_have_own_rules():
    assert SAMPLE.choose(True, 1, encoded=True) == tuning.ENCODED
    assert SAMPLE.choose(False, 1 << 30, encoded=True) == tuning.ENCODED_LOAD
    both = tuning.fixed(SMALL, LARGE)
    assert both.choose(True, 1).way == "direct" and both.choose(True, 1, encoded=True) == Choice("staged", 8)
    more = tuning.changed(both, programs=3)
    assert more.choose(False, 1, encoded=True).programs == 3 and more.choose(False, 1).programs == 16
    more = tuning.changed(both, "store", programs=3)
    assert [more.choose(*which).programs for which in ((True, 1), (False, 1), (True, 1, True))] == [3, 16, 8]
    with pytest.raises(ValueError, match="an impossible choice for encoded_load"):
        tuning.save(msgspec.structs.replace(SAMPLE, encoded_load=(Rule(None, SMALL),)))


def test_tuning_measured_choice_is_used(home):
    assert tuning.for_device("NVIDIA X/200") == tuning.DEFAULT
    file = tuning.save(SAMPLE)
    assert file.is_relative_to(home) and file.suffix == ".json"
    assert tuning.for_device("NVIDIA X/200") == SAMPLE
    assert tuning.for_device("NVIDIA X100") == tuning.DEFAULT
    assert [f.name for f in file.parent.iterdir()] == [file.name]  # no draft is left


def test_tuning_by_benchmark_leaves_stores_on_the_model_s_stream(monkeypatch):
    monkeypatch.syspath_prepend(COPY)
    spec = importlib.util.spec_from_file_location("copy_benchmark", COPY / "__main__.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    row = {"page": 8192, "layers": 36, "way": "w", "GB/s": 50.0}
    rows = [{**row, "direction": direction} for direction in benchmark.DIRECTIONS]
    for device in ("NVIDIA H200", "NVIDIA X/200"):
        tuned = benchmark.best(rows, {"w": (LARGE, LARGE)}, device, dict.fromkeys(benchmark.DIRECTIONS, 55.0))
        default = tuning.for_device(device)
        assert tuned.choose(True, 1).on_model_stream == default.choose(True, 1).on_model_stream
        assert tuned.choose(False, 1) == LARGE


def test_caches_of_user_without_home_directory_raise_nothing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    assert tuning.for_device("NVIDIA X/200") == tuning.DEFAULT
    assert record.load("a model") is None
    (tmp_path / "weights").write_bytes(b"w")
    monkeypatch.setattr(file_digests, "SETTLED_NS", -10_000_000_000)  # as if it were old
    assert file_digests.file_digests([tmp_path / "weights"])
    assert os.listdir(tmp_path) == ["weights"], "no folder named ~"


def test_tuning_hopper_cards_share_what_was_measured_on_one():
    assert {tuning.for_device(name).load for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")} == {
        tuning.MEASURED["NVIDIA H200"].load
    }
    assert tuning.for_device("NVIDIA H100 80GB HBM3").load != tuning.DEFAULT.load


@pytest.mark.parametrize("content", [b"", b"{}", b'{"device": "x", "store": [], "load": []}'])
def test_tuning_broken_file_is_logged_and_ignored(content, caplog):
    file = tuning.save(SAMPLE)
    file.write_bytes(content)
    tuning.logger.addHandler(caplog.handler)  # vLLM's logger, once there is one, hands nothing up
    assert tuning.for_device("NVIDIA X/200") == tuning.DEFAULT
    tuning.logger.removeHandler(caplog.handler)
    assert file.name in caplog.text and "--tune" in caplog.text


@pytest.mark.parametrize(
    "choice",
    [
        Choice("staged", ring=0),
        Choice("direct", programs=0),
        Choice("mixed", programs=8, direct_programs=8),
        Choice("mixed", direct_share=1.5),
    ],
)
def test_tuning_impossible_choice_raises(choice):
    with pytest.raises(ValueError, match="an impossible choice"):
        tuning.save(tuning.fixed(choice, Choice()))


@pytest.mark.parametrize("known", [tuning.DEFAULT, *tuning.MEASURED.values()], ids=lambda t: t.device)
def test_tuning_built_in_choices_are_valid(known):
    """They can be kept and read back; kernels that last as long as the link takes have few programs."""
    tuning.save(known)
    assert tuning.for_device(known.device) == known
    assert all(r.choice.way != "direct" for r in (*known.store, *known.load))
    assert all(r.choice.direct_programs <= 8 for r in (*known.store, *known.load))
    assert msgspec.json.decode(msgspec.json.encode(known), type=Tuning) == known
