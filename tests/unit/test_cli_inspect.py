"""`kvtier inspect`, and what `kvtier` says of itself and of wrong options."""

import json

import pytest
from doctor_fakes import FakeEngine, FakeServer
from typer.testing import CliRunner

from vllm_kvtier.cli.__main__ import app
from vllm_kvtier.cli.pin import tokenize
from vllm_kvtier.errors import KVTierError

TEXT = "word " * 20


@pytest.fixture
def make():
    made = []

    def make(kind, *args, **kwargs):
        made.append(kind(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture
def given(make, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT)
    return ["inspect", "--server", make(FakeServer).url, "--prompt", str(file)]


def test_numbers(make, given):
    engine, gone = make(FakeEngine), make(FakeEngine)
    engine.gpu_cache[TEXT, ""], engine.exported[TEXT, ""] = 96, 64
    gone.stop()
    result = CliRunner().invoke(app, [*given, "--endpoint", engine.address, "--endpoint", gone.address, "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["prompt_tokens"] == 100
    assert found["engines"][0] == {
        "endpoint": engine.address, "block_tokens": 16, "gpu_cache_tokens": 96, "exported_tokens": 64,
        "stored_tokens": 0,
    }  # fmt: skip
    assert found["engines"][1] == {"endpoint": gone.address, "unknown": f"nothing listens on {gone.address}"}


def test_table(make, given):
    engine = make(FakeEngine)
    engine.gpu_cache[TEXT, ""] = 50
    result = CliRunner().invoke(app, [*given, "--endpoint", engine.address])
    line = next(line for line in result.stdout.splitlines() if "GPU" in line)
    assert "100 tokens" in result.stdout and " 50 " in line
    assert line.count("█") == 20 and line.count("░") == 20


def test_a_salt_is_asked_with(make, given):
    engine = make(FakeEngine)
    engine.gpu_cache[TEXT, "tenant"] = 80
    given += ["--endpoint", engine.address, "--json"]
    assert json.loads(CliRunner().invoke(app, given).stdout)["engines"][0]["gpu_cache_tokens"] == 0
    salted = CliRunner().invoke(app, [*given, "--cache-salt", "tenant"])
    assert json.loads(salted.stdout)["engines"][0]["gpu_cache_tokens"] == 80


def test_failures_have_words_and_a_status(make, given):
    engine = make(FakeEngine)
    engine.stop()
    assert CliRunner().invoke(app, [*given, "--endpoint", engine.address]).exit_code == 1
    given[2] = f"http://{engine.address}"
    result = CliRunner().invoke(app, [*given, "--endpoint", engine.address])
    assert result.exit_code == 1 and "no vLLM server answers" in result.stderr


def test_pin_asks_the_same_tokenizer(make):
    server = make(FakeServer)
    assert tokenize(server.url, "ab") == [97, 98]
    with pytest.raises(KVTierError, match="no vLLM server answers"):
        tokenize("http://127.0.0.1:9", "ab")


COMMANDS = ["store", "stats", "clear", "pin", "unpin", "warm", "quality", "doctor", "inspect"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0 and len(result.stdout.split()) > 30


def test_wrong_options_end_with_two():
    for arguments in (["doctor", "--nonsense"], ["inspect"], ["clear"], ["nonsense"]):
        assert CliRunner().invoke(app, arguments).exit_code == 2, arguments
