"""Which way copies go: rules by size, the cache of a machine's own measurements, what is refused."""

import msgspec
import pytest

from vllm_kvtier.worker import tuning
from vllm_kvtier.worker.tuning import Choice, Rule, Tuning


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


SMALL, LARGE = Choice("direct", 8), Choice("staged", 16)
SAMPLE = Tuning("NVIDIA X/200", (Rule(1000, SMALL), Rule(None, LARGE)), (Rule(None, LARGE),))


def test_the_first_rule_that_holds():
    assert SAMPLE.choose(True, 999) is SMALL
    assert SAMPLE.choose(True, 1000) is LARGE
    assert SAMPLE.choose(False, 1) is LARGE


def test_coded_parts_have_rules_of_their_own_and_never_go_directly():
    assert SAMPLE.choose(True, 1, coded=True) == tuning.CODED
    assert SAMPLE.choose(False, 1 << 30, coded=True) == tuning.CODED_LOAD
    both = tuning.fixed(SMALL, LARGE)
    assert both.choose(True, 1).way == "direct" and both.choose(True, 1, coded=True) == Choice("staged", 8)
    more = tuning.changed(both, programs=3)
    assert more.choose(False, 1, coded=True).programs == 3 and more.choose(False, 1).programs == 16
    with pytest.raises(ValueError, match="no such way to coded_load"):
        tuning.save(msgspec.structs.replace(SAMPLE, coded_load=(Rule(None, SMALL),)))


def test_what_a_machine_measured_is_used_there(home):
    assert tuning.for_device("NVIDIA X/200") == tuning.DEFAULT
    file = tuning.save(SAMPLE)
    assert file.is_relative_to(home) and file.suffix == ".json"
    assert tuning.for_device("NVIDIA X/200") == SAMPLE
    assert tuning.for_device("NVIDIA X100") == tuning.DEFAULT
    assert [f.name for f in file.parent.iterdir()] == [file.name]  # no draft is left


@pytest.mark.parametrize("content", [b"", b"{}", b'{"device": "x", "store": [], "load": []}'])
def test_a_broken_file_is_named_and_not_used(content, caplog):
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
def test_impossible_choices_are_not_kept(choice):
    with pytest.raises(ValueError, match="no such way"):
        tuning.save(tuning.fixed(choice, Choice()))


@pytest.mark.parametrize("known", [tuning.DEFAULT, *tuning.MEASURED.values()], ids=lambda t: t.device)
def test_built_in_tunings_are_sound(known):
    """They can be kept and read back, and take at most 16 programs."""
    tuning.save(known)
    assert tuning.for_device(known.device) == known
    assert all(r.choice.programs <= 16 for r in (*known.store, *known.load))
    assert msgspec.json.decode(msgspec.json.encode(known), type=Tuning) == known
