"""`kvtier inspect`, and what `kvtier` says of itself and of wrong options."""

import json

import pytest
from doctor_fakes import FakeEngine, FakeServer
from store_process import Store
from store_support import RawClient, tool_hello
from support import eventually
from typer.testing import CliRunner

from vllm_kvtier.cli.__main__ import app
from vllm_kvtier.cli.inputs import tokenize
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import protocol as sm
from vllm_kvtier.wire import messages as wm

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


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path)
    made.start()
    eventually(lambda: (counts := made.counts()).ready_bytes == counts.pool_bytes)
    yield made
    made.kill()


def test_inspect_formats_numbers(make, given):
    engine, gone = make(FakeEngine), make(FakeEngine)
    engine.gpu_cache[TEXT, ""], engine.exported[TEXT, ""] = 96, 64
    gone.stop()
    result = CliRunner().invoke(app, [*given, "--endpoint", engine.address, "--endpoint", gone.address, "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and found["prompt_tokens"] == 100
    first = found["engines"][0]
    assert (first["endpoint"], first["block_tokens"]) == (engine.address, 16)
    assert (first["gpu_cache_tokens"], first["exported_tokens"], first["stored_tokens"]) == (96, 64, 0)
    assert first["spans"] == first["tiers"] == [] and "uses no node store" in first["problem"]
    assert found["engines"][1] == {"endpoint": gone.address, "unknown": f"nothing listens on {gone.address}"}


def test_inspect_prints_table(make, given):
    engine = make(FakeEngine)
    engine.gpu_cache[TEXT, ""] = 50
    result = CliRunner().invoke(app, [*given, "--endpoint", engine.address])
    line = next(line for line in result.stdout.splitlines() if "GPU" in line)
    assert "100 tokens" in result.stdout and " 50 " in line
    assert line.count("█") == 20 and line.count("░") == 20


def test_inspect_shows_tiers_and_removal_reasons(make, given, store):
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT)
    with RawClient(store.path, tool_hello()) as tool:
        tool.ask(sm.Clear(1))
    engine.stores(TEXT[:32])
    engine.lent = [wm.Source("127.0.0.1:7200", 64)]
    engine.load_decisions = [wm.LoadEstimate("peer_gpu", 32, 64, True, "not_measured", 0.001)]
    given += ["--endpoint", engine.address]
    found = json.loads(CliRunner().invoke(app, [*given, "--json"]).stdout)["engines"][0]
    assert found["stored_tokens"] == 32 and found["peers"] == [{"endpoint": "127.0.0.1:7200", "tokens": 64}]
    spans = [(each["start"], each["end"], each["tier"], each["removal_reason"]) for each in found["spans"]]
    assert spans == [(0, 32, "memory", ""), (32, 96, "", "cleared")]
    assert found["load_decisions"][0]["load"] is True and found["history_seconds"] == found["store_seconds"] > 0

    table = CliRunner().invoke(app, given).stdout
    memory, lent = (next(line for line in table.splitlines() if word in line) for word in ("store memory", "peer"))
    assert " 32 " in memory and memory.count("█") == 13 and "peer 127.0.0.1:7200" in lent and " 64 " in lent
    assert "tokens 32 to 96: cleared, " in table and " ago" in table
    assert "it would load tokens 32 to 64 from a peer's GPU cache" in table and "compute not measured" in table


@pytest.mark.parametrize("columns", ["20", "40", "200"])
def test_inspect_table_fits_any_terminal_width(make, given, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    engine = make(FakeEngine)
    engine.gpu_cache[TEXT, ""] = 50
    result = CliRunner().invoke(app, [*given, "--endpoint", engine.address])
    line = next(line for line in result.stdout.splitlines() if "GPU" in line)
    assert result.exit_code == 0 and "50" in line
    assert line.count("█") + line.count("░") == (40 if columns == "200" else 0)


def test_inspect_prints_the_namespace_that_clear_takes(make, given, store):
    """Nothing printed it: one model's blocks could not be dropped without all others'."""
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT)
    given += ["--endpoint", engine.address]
    namespace = json.loads(CliRunner().invoke(app, [*given, "--json"]).stdout)["engines"][0]["namespace"]
    assert f"namespace {namespace} (for `kvtier clear --namespace`)" in CliRunner().invoke(app, given).stdout
    cleared = CliRunner().invoke(app, ["clear", "--socket", store.path, "--namespace", namespace])
    assert cleared.exit_code == 0 and cleared.stdout == "6 blocks dropped\n"


def test_inspect_cache_salt_is_applied(make, given):
    engine = make(FakeEngine)
    engine.gpu_cache[TEXT, "tenant"] = 80
    given += ["--endpoint", engine.address, "--json"]
    assert json.loads(CliRunner().invoke(app, given).stdout)["engines"][0]["gpu_cache_tokens"] == 0
    salted = CliRunner().invoke(app, [*given, "--cache-salt", "tenant"])
    assert json.loads(salted.stdout)["engines"][0]["gpu_cache_tokens"] == 80


def test_inspect_failure_prints_cause_and_exit_status(make, given):
    engine = make(FakeEngine)
    engine.stop()
    assert CliRunner().invoke(app, [*given, "--endpoint", engine.address]).exit_code == 1
    given[2] = f"http://{engine.address}"
    result = CliRunner().invoke(app, [*given, "--endpoint", engine.address])
    assert result.exit_code == 1 and "no vLLM server answers" in result.stderr


def test_pin_uses_the_server_tokenizer(make):
    server = make(FakeServer)
    assert tokenize(server.url, "ab") == [97, 98]
    with pytest.raises(KVTierError, match="no vLLM server answers"):
        tokenize("http://127.0.0.1:9", "ab")


@pytest.mark.parametrize("command", ["pin", "unpin", "warm"])
def test_pin_of_a_file_that_is_not_utf8_says_so(tmp_path, command):
    file = tmp_path / "prompt"
    file.write_bytes("Grüße".encode("latin-1"))
    given = [command, "--server", "http://127.0.0.1:9", "--endpoint", "127.0.0.1:9", "--file", str(file)]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 1 and f"{file} cannot be read" in result.stderr


@pytest.fixture
def keeps(make, store, tmp_path):
    """(run a command on an engine whose store has this chat, the file with the chat's messages)."""
    engine, server = make(FakeEngine, store=store.path), make(FakeServer)
    (chat := tmp_path / "chat.json").write_text(json.dumps([{"role": "system", "content": TEXT}]))
    engine.stores(f"<system>{TEXT}")

    def run(command, *prompt):
        return CliRunner().invoke(app, [command, "--server", server.url, "--endpoint", engine.address, *prompt])

    return run, str(chat)


def test_pin_keeps_what_a_chat_computed(keeps, store):
    run, chat = keeps
    for command, blocks, pinned in (("pin", 6, 6), ("pin", 0, 6), ("unpin", 6, 0)):
        done = run(command, "--messages", chat)
        assert (done.exit_code, done.output) == (0, f"{blocks} blocks of 108 tokens are {command}ned\n")
        assert store.counts().index.pinned_entries == pinned


def test_pin_of_more_than_may_be_pinned_fails(make, tmp_path):
    """It printed "0 blocks of 108 tokens are pinned", with exit status 0."""
    store = Store(tmp_path)
    store.start("--pin-share=0.01")
    try:
        eventually(lambda: (counts := store.counts()).ready_bytes == counts.pool_bytes)
        engine = make(FakeEngine, store=store.path)
        engine.stores(TEXT)
        given = ["pin", "--server", make(FakeServer).url, "--endpoint", engine.address, "--prompt", TEXT]
        done = CliRunner().invoke(app, given)
    finally:
        store.kill()
    assert done.exit_code == 1 and "blocks are pinned and" in done.stderr and "pin_share" in done.stderr


@pytest.mark.parametrize("command", ["pin", "unpin"])
def test_pin_of_blocks_that_the_store_lacks_fails_with_a_hint(keeps, command):
    """A chat's text alone has other tokens than the chat: no block is the same."""
    run, chat = keeps
    done = run(command, "--prompt", TEXT)
    assert done.exit_code == 1 and "none of its 100 tokens is in the store" in done.stderr
    assert "--messages" in done.stderr and "kvtier inspect" in done.stderr
    assert run(command, "--prompt", TEXT, "--messages", chat).exit_code == 2


COMMANDS = ["store", "stats", "clear", "pin", "unpin", "warm", "prefetch", "quality", "doctor", "inspect"]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_print_help(command):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0 and len(result.stdout.split()) > 30


def test_commands_with_wrong_options_exit_2():
    wrong = [["store", "--numa", "all"], ["store", "--name", "a/b"], ["store", "--tenant-share", "2"]]
    for arguments in (["doctor", "--nonsense"], ["inspect"], ["clear"], ["nonsense"], *wrong):
        assert CliRunner().invoke(app, arguments).exit_code == 2, arguments
