"""`kvtier doctor` names why a prompt missed: planted causes, engines on real sockets, and a real node store."""

import json
import os
import signal

import pytest
from doctor_fakes import METRICS, UNIT, FakeEngine, FakeServer, changed, counter, ranks
from store_process import POOL, Store
from store_support import BLOCK_PAGES, EVERYTHING, RawClient, items_of, tool_hello
from support import eventually
from typer.testing import CliRunner

from vllm_kvtier.cli.__main__ import app
from vllm_kvtier.store import messages as sm
from vllm_kvtier.store.messages import PAGE
from vllm_kvtier.wire import messages as wm

TEXT = "A prompt that is as long as it takes: " + "word " * 40  # 238 tokens, 14 blocks
BLOCKS = len(TEXT) // UNIT


@pytest.fixture
def make():
    made = []

    def make(kind, *args, **kwargs):
        made.append(kind(*args, **kwargs))
        return made[-1]

    yield make
    for each in reversed(made):
        each.stop()


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path)
    start(made)
    yield made
    made.kill()


def start(store: Store, *options: str) -> None:
    """Returns when there is room: memory is touched behind the server's back."""
    store.start(*options)
    eventually(lambda: (counts := store.counts()).ready_bytes == counts.pool_bytes)


@pytest.fixture
def asked(make, tmp_path, store):
    """Ask doctor about TEXT (or another) with these engines: exit status, checks of the prompt."""
    server = make(FakeServer)

    def ask(engines, *arguments, text=TEXT, servers=None):
        file = tmp_path / "prompt.txt"
        file.write_text(text)
        given = ["--prompt", str(file), "--socket", store.path]
        for url in [s.url for s in servers or [server]]:
            given += ["--server", url]
        for engine in engines:
            given += ["--endpoint", engine.address]
        result = CliRunner().invoke(app, ["doctor", "--json", "--remote", *given, *map(str, arguments)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        checks = json.loads(result.stdout)
        return result.exit_code, [check for check in checks if check["name"].startswith("prompt")]

    return ask


def fill_up(engine: FakeEngine, store: Store) -> None:
    """Other prompts, until the store has forgotten what was in it."""
    before = store.counts().index.evictions
    for number in range(4 * POOL // (BLOCK_PAGES * PAGE) // BLOCKS):
        engine.stores(f"{number:4} another prompt" + "x" * len(TEXT))
    assert store.counts().index.evictions > before


def test_nothing_missed(make, store, asked):
    engine = make(FakeEngine, store=store.path)
    assert engine.stores(TEXT) == BLOCKS
    code, checks = asked([engine])
    assert code == 0 and f"all {BLOCKS * UNIT} tokens of whole blocks are there (node store" in checks[0]["sentence"]


def test_below_a_block(make, store, asked):
    code, checks = asked([make(FakeEngine, store=store.path)], text="Hello")
    assert code == 1 and "it has 5 tokens, fewer than a block of 16" in checks[0]["sentence"]


def test_never_stored(make, store, asked):
    code, checks = asked([make(FakeEngine, store=store.path)])
    assert code == 1 and len(checks) == 1
    assert "all of it of 238 tokens missed: tokens 0 to 224: never stored: no engine that" in checks[0]["sentence"]
    assert "since the store started" in checks[0]["sentence"] and "--like" in checks[0]["remedy"]


def test_evicted(make, store, asked):
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT)
    fill_up(engine, store)
    code, checks = asked([engine])
    assert code == 1 and len(checks) == 1
    assert "tokens 0 to 224: evicted " in checks[0]["sentence"] and " ago to make room" in checks[0]["sentence"]
    assert "store_size" in checks[0]["remedy"]


def test_cleared_and_then_stored_in_part(make, store, asked):
    """Each stretch has its own cause; and what happened last counts."""
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT)
    with RawClient(store.path, tool_hello()) as tool:
        assert tool.ask(sm.Clear(1)).count == BLOCKS
    engine.stores(TEXT[:64])
    code, checks = asked([engine])
    assert code == 1 and "(the 64 before are there: node store 64)" in checks[0]["sentence"]
    assert "tokens 64 to 224: cleared by a person" in checks[0]["sentence"]


@pytest.mark.parametrize(
    ("reserved", "cause"),
    [
        (False, "its checksum was wrong when it was loaded"),
        (True, "never finished: the engine that was storing it gave up"),
        (None, "being written to the node store just now"),
    ],
)
def test_a_block_in_the_middle(make, store, asked, reserved, cause):
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT[:64])
    chain = engine.chain(TEXT)
    hello = sm.Hello("writer", 1, "engine", unit_tokens=UNIT, groups=[sm.GroupShape(1, BLOCK_PAGES)])
    with RawClient(store.path, hello) as client:
        groups, hashes, parents = items_of(chain, 4)
        slots = client.ask(sm.Reserve(1, engine.space, b"", groups, hashes, parents, EVERYTHING)).slots
        if reserved is False:
            client.tell(sm.Commit(slots))
            client.tell(sm.Discard(engine.space, 0, chain[64:80], slots[0]))
        elif reserved:
            client.tell(sm.Abort(slots))
        client.stat()
        code, checks = asked([engine])
        assert code == 1 and cause in checks[0]["sentence"] and "tokens 64 to " in checks[0]["sentence"]
        if reserved is False:
            assert "tokens 64 to 80" in checks[0]["sentence"] and len(checks) == 1, "what is behind it is there"
    if reserved is None:
        eventually(lambda: "the engine that was storing it went away" in asked([engine])[1][0]["sentence"])


def test_it_is_there_and_computing_is_faster(make, store, asked):
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT)
    engine.weighed = [wm.Weighed("host", 0, 224, False, "slower", 0.025, 0.004)]
    code, checks = asked([engine])
    assert code == 1 and len(checks) == 1
    assert (
        "loading from the node store's memory 25.0 ms, computing 4.0 ms (computing is faster)"
        in (checks[0]["sentence"])
    )
    engine.weighed = [wm.Weighed("host", 0, 224, True, "faster", 0.002, 0.004)]
    code, checks = asked([engine])
    assert code == 0 and "all 224 tokens" in checks[0]["sentence"]


def test_another_engine_of_the_node_lends_it(make, store, asked):
    engine = make(FakeEngine, store=store.path)
    engine.lent = [wm.Source("127.0.0.1:7200", 224)]
    engine.weighed = [wm.Weighed("gpu", 0, 224, True, "faster", 0.002, 0.004)]
    code, checks = asked([engine])
    assert code == 0 and "GPU cache of 127.0.0.1:7200, which lends it, 224" in checks[0]["sentence"]
    engine.weighed = [wm.Weighed("gpu", 0, 224, False, "below threshold", 0.0)]
    code, checks = asked([engine])
    assert code == 1 and "fewer than pull_threshold" in checks[0]["sentence"]
    assert "never stored" in checks[1]["sentence"]


def test_only_its_beginning_is_there(make, store, asked):
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT[:100] + "but then something else" * 10)
    _, checks = asked([engine])
    assert "tokens from 96 on of 238 tokens missed (the 96 before are there: node store 96)" in checks[0]["sentence"]


def test_another_salt(make, store, asked):
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT, salt="tenant-a")
    code, checks = asked([engine], "--cache-salt", "tenant-b", "--cache-salt", "tenant-a")
    assert code == 2 and "stored with the cache salt 'tenant-a'" in checks[0]["sentence"]
    code, checks = asked([engine], "--cache-salt", "tenant-a")
    assert code == 0


def test_stored_without_a_salt(make, store, asked):
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT)
    code, checks = asked([engine], "--cache-salt", "tenant-b")
    assert code == 2 and "were stored with no cache salt, and salts keep tenants apart" in checks[0]["sentence"]


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"hash_seed": "0ddb"}, "hash seed differs: 0ddb on {b}, 5eed on {a}"),
        ({"model": "model-b"}, "weights differs: model-b on {b}"),
        ({"cache_dtype": "fp8"}, "KV cache dtype differs: fp8 on {b}"),
    ],
)
def test_another_engine_has_it_and_differs(make, store, asked, fields, cause):
    a, b = make(FakeEngine, store=store.path), make(FakeEngine, changed(**fields), store=store.path)
    a.stores(TEXT)
    code, checks = asked([a, b])
    missed = next(check for check in checks if b.address in check["name"])
    assert code == 2 and missed["state"] == "fail"
    assert f"{a.address} has 224 tokens of it, but" in missed["sentence"]
    assert cause.format(a=a.address, b=b.address) in missed["sentence"]


def test_another_tensor_parallel_size(make, store, asked):
    a, b = make(FakeEngine), make(FakeEngine, ranks=ranks(2), store=store.path)
    a.gpu_cache[TEXT, ""] = 224
    _, checks = asked([a, b])
    assert "its tensor parallel size differs: 1 ranks there, 2 here" in checks[1]["sentence"]


def test_another_store(make, store, asked, tmp_path):
    (tmp_path / "other").mkdir()
    other = Store(tmp_path / "other")
    start(other)
    try:
        a, b = make(FakeEngine, store=store.path), make(FakeEngine, store=other.path)
        a.stores(TEXT)
        _, checks = asked([a, b])
        assert "in another node store than the one that this engine uses" in checks[1]["sentence"]
        _, checks = asked([b])
        assert "the engine uses another node store than the one that answers" in checks[0]["sentence"]
    finally:
        other.kill()


def test_only_in_another_gpus_cache(make, store, asked):
    a, b = make(FakeEngine), make(FakeEngine)
    a.gpu_cache[TEXT, ""] = 224
    _, checks = asked([a, b])
    assert "only in its own GPU's prefix cache, and it exports nothing" in checks[1]["sentence"]


def test_below_the_threshold(make, store, asked):
    a, b = make(FakeEngine), make(FakeEngine)
    a.exported[TEXT, ""], b.exported[TEXT, ""] = 224, 192
    _, checks = asked([a, b])
    assert "32 tokens more are fewer than pull_threshold (64)" in checks[1]["sentence"]
    _, checks = asked([a, b], "--pull-threshold", 16)
    assert "pull_threshold" not in checks[1]["sentence"]


def test_an_engine_without_a_store(make, store, asked):
    code, checks = asked([make(FakeEngine)])
    assert code == 1 and "this engine uses no node store" in checks[0]["sentence"]


def test_what_the_engine_did_not_store(make, store, asked):
    server = make(FakeServer, metrics=METRICS + counter("not_stored", 12, "copies too slow"))
    _, checks = asked([make(FakeEngine, store=store.path)], servers=[server])
    assert "this engine did not store 12 blocks (copies too slow)" in checks[0]["sentence"]


def test_other_tokens(make, store, asked):
    odd = make(FakeServer, tokens=lambda text: [1, *text.encode()])
    code, checks = asked([make(FakeEngine)], servers=[make(FakeServer), odd])
    assert code == 2 and "make different tokens of it, from token 0 on" in checks[0]["sentence"]


def test_where_two_prompts_part(make, store, asked, tmp_path):
    like = tmp_path / "like.txt"
    like.write_text(TEXT[:40] + "!" + TEXT[41:])
    _, checks = asked([make(FakeEngine)], "--like", like)
    assert "their first 40 tokens are equal, 32 of them in whole blocks; from token 40 on" in checks[0]["sentence"]
    like.write_text(TEXT + "and more")
    _, checks = asked([make(FakeEngine)], "--like", like)
    assert checks[0]["state"] == "ok" and "one is the beginning of the other" in checks[0]["sentence"]


def test_a_chat(make, store, tmp_path):
    engine, server = make(FakeEngine, store=store.path), make(FakeServer)
    engine.stores(f"<user>{TEXT}")
    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"model": "m", "messages": [{"role": "user", "content": TEXT}]}))
    given = ["--server", server.url, "--endpoint", engine.address, "--socket", store.path, "--messages", str(file)]
    result = CliRunner().invoke(app, ["doctor", "--remote", *given])
    assert result.exit_code == 0 and "all 240 tokens of whole blocks are there" in result.stdout
    assert server.asked[0]["add_generation_prompt"] is True


def test_files_that_are_no_prompts(tmp_path):
    file = tmp_path / "chat.json"
    for text, cause in (("{", "is no JSON"), ('{"messages": []}', "holds no messages")):
        file.write_text(text)
        result = CliRunner().invoke(app, ["doctor", "--remote", "--messages", str(file)])
        assert result.exit_code == 2 and cause in result.stderr.replace("\n", " ")


def test_no_endpoint_knows(make, store, asked):
    code, checks = asked([])
    assert code == 0 and checks[0]["state"] == "unknown" and "238 tokens" in checks[0]["sentence"]


def test_what_lies_below_is_named(make, tmp_path, asked, store):
    store.kill()
    start(store, f"--disk-path={tmp_path}/disk", "--disk-size=64MiB", "--disk-admission=all")
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT)
    eventually(lambda: store.disk().written_blocks >= BLOCKS, 30)
    fill_up(engine, store)
    _, checks = asked([engine])
    assert "tokens 0 to 224: not in memory but on disk" in checks[0]["sentence"]
    assert "kvtier warm" in checks[0]["remedy"]
    # The disk's process is killed and cannot come back: the tier is set aside, and what it had with it.
    (tmp_path / "disk").rename(tmp_path / "gone")
    (tmp_path / "disk").write_text("no directory")
    os.kill(store.mover(), signal.SIGKILL)
    eventually(lambda: store.disk().state == "set aside", 30)
    _, checks = asked([engine])
    assert "a tier below had it then, and has it no more (disk is set aside: " in checks[0]["sentence"]


def test_what_the_disk_did_not_admit(make, tmp_path, asked, store):
    store.kill()
    start(store, f"--disk-path={tmp_path}/disk", "--disk-size=64MiB")
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT)
    fill_up(engine, store)
    _, checks = asked([engine])
    assert "no tier below memory had it; disk had not taken it" in checks[0]["sentence"]
    assert "disk_admission=all" in checks[0]["remedy"]
