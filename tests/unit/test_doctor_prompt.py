"""`kvtier doctor` names why a prompt missed: planted causes, engines on real sockets, and a real node store."""

import json
import os
import signal

import pytest
from doctor_fakes import HASH_BLOCK_SIZE, METRICS, FakeEngine, FakeServer, changed, counter, ranks
from store_process import POOL, Store
from store_support import BLOCK_PAGES, EVERYTHING, RawClient, items_of, tool_hello
from support import eventually
from typer.testing import CliRunner

from vllm_kvtier.cli.__main__ import app
from vllm_kvtier.store import protocol as sm
from vllm_kvtier.store.protocol import PAGE
from vllm_kvtier.wire import messages as wm

TEXT = "A prompt that is as long as it takes: " + "word " * 40  # 238 tokens, 14 blocks
BLOCKS = len(TEXT) // HASH_BLOCK_SIZE


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


def test_doctor_prompt_fully_cached_is_no_finding(make, store, asked):
    engine = make(FakeEngine, store=store.path)
    assert engine.stores(TEXT) == BLOCKS
    code, checks = asked([engine])
    assert (
        code == 0
        and f"all {BLOCKS * HASH_BLOCK_SIZE} tokens of whole blocks are cached (store memory" in checks[0]["message"]
    )


def test_doctor_prompt_shorter_than_a_block_is_explained(make, store, asked):
    code, checks = asked([make(FakeEngine, store=store.path)], text="Hello")
    assert code == 1 and "it has 5 tokens, fewer than a block of 16" in checks[0]["message"]


def test_doctor_prompt_never_stored_is_explained(make, store, asked):
    code, checks = asked([make(FakeEngine, store=store.path)])
    assert code == 1 and len(checks) == 1
    assert "all 238 tokens missed: tokens 0 to 224: never stored: no engine that" in checks[0]["message"]
    assert "since the store started" in checks[0]["message"] and "--compare-with" in checks[0]["fix"]


def test_doctor_prompt_evicted_is_explained(make, store, asked):
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT)
    fill_up(engine, store)
    code, checks = asked([engine])
    assert code == 1 and len(checks) == 1
    assert "tokens 0 to 224: evicted, " in checks[0]["message"] and " ago: no secondary tier" in checks[0]["message"]
    assert "store_size" in checks[0]["fix"]


def test_doctor_prompt_cleared_and_partly_stored_is_explained(make, store, asked):
    """Each stretch has its own cause; and what happened last counts."""
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT)
    with RawClient(store.path, tool_hello()) as tool:
        assert tool.ask(sm.Clear(1)).count == BLOCKS
    engine.stores(TEXT[:64])
    code, checks = asked([engine])
    assert code == 1 and "tokens 64 to 238 missed (0 to 64 are cached: store memory 64)" in checks[0]["message"]
    assert "tokens 64 to 224: cleared, " in checks[0]["message"] and "by `kvtier clear`" in checks[0]["message"]


@pytest.mark.parametrize(
    ("reserved", "cause"),
    [
        (False, "its checksum was wrong when it was loaded"),
        (True, "the engine that was storing it dropped the copy"),
        (None, "being stored at the moment"),
    ],
)
def test_doctor_prompt_with_missing_middle_block_is_explained(make, store, asked, reserved, cause):
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT[:64])
    block_hashes = engine.block_hashes(TEXT)
    hello = sm.Hello("writer", 1, "engine", hash_block_size=HASH_BLOCK_SIZE, groups=[sm.GroupShape(1, BLOCK_PAGES)])
    with RawClient(store.path, hello) as client:
        groups, hashes, parents = items_of(block_hashes, 4)
        slots = client.ask(sm.Reserve(1, engine.namespace_id, b"", groups, hashes, parents, EVERYTHING)).slots
        if reserved is False:
            client.send(sm.Commit(slots))
            client.send(sm.Discard(engine.namespace_id, 0, block_hashes[64:80], slots[0]))
        elif reserved:
            client.send(sm.Abort(slots))
        client.stat()
        code, checks = asked([engine])
        assert code == 1 and cause in checks[0]["message"] and "tokens 64 to " in checks[0]["message"]
        if reserved is False:
            assert "tokens 64 to 80" in checks[0]["message"] and len(checks) == 1, "what is behind it is there"
    if reserved is None:
        eventually(lambda: "the engine that was storing it ended" in asked([engine])[1][0]["message"])


def test_doctor_prompt_cached_but_compute_is_faster(make, store, asked):
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT)
    engine.load_decisions = [wm.LoadEstimate("host", 0, 224, False, "slower", 0.025, 0.004)]
    code, checks = asked([engine])
    assert code == 1 and len(checks) == 1
    words = "compute tokens 0 to 224 of the store's memory: load 25.0 ms, compute 4.0 ms (computing is faster)"
    assert words in checks[0]["message"]
    engine.load_decisions = [wm.LoadEstimate("host", 0, 224, True, "faster", 0.002, 0.004)]
    code, checks = asked([engine])
    assert code == 0 and "all 224 tokens" in checks[0]["message"]


def test_doctor_prompt_on_peer_gpu_is_reported(make, store, asked):
    engine = make(FakeEngine, store=store.path)
    engine.lent = [wm.Source("127.0.0.1:7200", 224)]
    engine.load_decisions = [wm.LoadEstimate("peer_gpu", 0, 224, True, "faster", 0.002, 0.004)]
    code, checks = asked([engine])
    assert code == 0 and "GPU cache of peer 127.0.0.1:7200 224" in checks[0]["message"]
    engine.load_decisions = [wm.LoadEstimate("peer_gpu", 0, 224, False, "below_threshold", 0.0)]
    code, checks = asked([engine])
    assert code == 1 and "fewer than pull_threshold" in checks[0]["message"]
    assert "never stored" in checks[1]["message"]


def test_doctor_prompt_with_partial_prefix_is_reported(make, store, asked):
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT[:100] + "but then something else" * 10)
    _, checks = asked([engine])
    assert "tokens 96 to 238 missed (0 to 96 are cached: store memory 96)" in checks[0]["message"]


def test_doctor_prompt_with_other_salt_is_explained(make, store, asked):
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT, salt="tenant-a")
    code, checks = asked([engine], "--cache-salt", "tenant-b", "--cache-salt", "tenant-a")
    assert code == 2 and "stored with the cache salt 'tenant-a'" in checks[0]["message"]
    code, checks = asked([engine], "--cache-salt", "tenant-a")
    assert code == 0


def test_doctor_prompt_stored_without_salt_is_explained(make, store, asked):
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT)
    code, checks = asked([engine], "--cache-salt", "tenant-b")
    assert code == 2 and "stored with no cache salt; requests with different salts share no" in checks[0]["message"]


def test_doctor_prompt_stored_with_other_salt_and_same_adapter_is_explained(make, store, asked):
    """What the model without the adapter has is no reason, and was taken for one."""
    engine = make(FakeEngine, store=store.path)
    engine.gpu_cache[TEXT, ""] = 96
    code, checks = asked([engine], "--cache-salt", "tenant-b", "--adapter", "lora")
    assert code == 1 and "never stored" in checks[0]["message"]
    engine.gpu_cache[TEXT, "", "lora"] = 64
    code, checks = asked([engine], "--cache-salt", "tenant-b", "--adapter", "lora")
    assert code == 2 and "64 tokens of it were stored with no cache salt" in checks[0]["message"]


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"hash_seed": "0ddb"}, "hash seed differs: 0ddb on {b}, 5eed on {a}"),
        ({"model": "model-b"}, "weights differs: model-b on {b}"),
        ({"cache_dtype": "fp8"}, "KV cache dtype differs: fp8 on {b}"),
    ],
)
def test_doctor_prompt_on_incompatible_engine_is_explained(make, store, asked, fields, cause):
    a, b = make(FakeEngine, store=store.path), make(FakeEngine, changed(**fields), store=store.path)
    a.stores(TEXT)
    code, checks = asked([a, b])
    missed = next(check for check in checks if b.address in check["name"])
    assert code == 2 and missed["state"] == "fail"
    assert f"{a.address} has 224 tokens of it, but" in missed["message"]
    assert cause.format(a=a.address, b=b.address) in missed["message"]


def test_doctor_prompt_on_other_tensor_parallel_size_is_explained(make, store, asked):
    a, b = make(FakeEngine), make(FakeEngine, ranks=ranks(2), store=store.path)
    a.gpu_cache[TEXT, ""] = 224
    _, checks = asked([a, b])
    assert "its tensor parallel size differs: 1 ranks, 2 on this engine" in checks[1]["message"]


def test_doctor_prompt_in_another_store_is_explained(make, store, asked, tmp_path):
    (tmp_path / "other").mkdir()
    other = Store(tmp_path / "other")
    start(other)
    try:
        a, b = make(FakeEngine, store=store.path), make(FakeEngine, store=other.path)
        a.stores(TEXT)
        _, checks = asked([a, b])
        assert "in another node store than this engine's" in checks[1]["message"]
        _, checks = asked([b])
        assert "the engine uses another node store than the one at this socket" in checks[0]["message"]
    finally:
        other.kill()


def test_doctor_prompt_only_on_peer_gpu_is_reported(make, store, asked):
    a, b = make(FakeEngine), make(FakeEngine)
    a.gpu_cache[TEXT, ""] = 224
    _, checks = asked([a, b])
    assert "only in its GPU's prefix cache, and it exports nothing" in checks[1]["message"]


def test_doctor_prompt_below_pull_threshold_is_explained(make, store, asked):
    a, b = make(FakeEngine), make(FakeEngine)
    a.exported[TEXT, ""], b.exported[TEXT, ""] = 224, 192
    _, checks = asked([a, b])
    assert "32 tokens more are fewer than pull_threshold (64)" in checks[1]["message"]
    _, checks = asked([a, b], "--pull-threshold", 16)
    assert "pull_threshold" not in checks[1]["message"]


def test_doctor_prompt_of_engine_without_store_is_explained(make, store, asked):
    code, checks = asked([make(FakeEngine)])
    assert code == 1 and "this engine uses no node store" in checks[0]["message"]


def test_doctor_prompt_skipped_by_offloader_is_explained(make, store, asked):
    server = make(FakeServer, metrics=METRICS + counter("stores_skipped", 12, "copy_dropped"))
    _, checks = asked([make(FakeEngine, store=store.path)], servers=[server])
    assert "this engine skipped the store of 12 blocks (copy_dropped)" in checks[0]["message"]


def test_doctor_prompt_with_other_tokens_is_explained(make, store, asked):
    odd = make(FakeServer, tokens=lambda text: [1, *text.encode()])
    code, checks = asked([make(FakeEngine)], servers=[make(FakeServer), odd])
    assert code == 2 and "tokenize it differently, from token 0 on" in checks[0]["message"]


def test_doctor_prompt_first_different_token_is_found(make, store, asked, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(TEXT[:40] + "!" + TEXT[41:])
    _, checks = asked([make(FakeEngine)], "--compare-with", other)
    assert "the first 40 tokens are equal, 32 of them in whole blocks; they differ at token 40" in checks[0]["message"]
    other.write_text(TEXT + "and more")
    _, checks = asked([make(FakeEngine)], "--compare-with", other)
    assert checks[0]["state"] == "ok" and "one is a prefix of the other" in checks[0]["message"]


def test_doctor_prompt_of_chat_is_tokenized_by_engine(make, store, tmp_path):
    engine, server = make(FakeEngine, store=store.path), make(FakeServer)
    engine.stores(f"<user>{TEXT}")
    file = tmp_path / "chat.json"
    request = {"model": "m", "messages": [{"role": "user", "content": TEXT}], "tools": [{"type": "function"}]}
    file.write_text(json.dumps(request | {"reasoning_effort": "low", "chat_template_kwargs": {"a": 1}, "n": 1}))
    given = ["--server", server.url, "--endpoint", engine.address, "--socket", store.path, "--messages", str(file)]
    result = CliRunner().invoke(app, ["doctor", "--remote", *given])
    assert result.exit_code == 0 and "all 240 tokens of whole blocks are cached" in result.stdout
    template = {"chat_template_kwargs": {"a": 1, "reasoning_effort": "low"}, "add_generation_prompt": True}
    assert server.asked[0] == request | template | {"model": None}


def test_doctor_prompt_malformed_file_exits_with_cause(tmp_path):
    file = tmp_path / "chat.json"
    for text, cause in (("{", "is not JSON"), ('{"messages": []}', "has no messages")):
        file.write_text(text)
        result = CliRunner().invoke(app, ["doctor", "--remote", "--messages", str(file)])
        assert result.exit_code == 2 and cause in result.stderr.replace("\n", " ")


def test_doctor_prompt_without_endpoint_is_reported(make, store, asked):
    code, checks = asked([])
    assert code == 0 and checks[0]["state"] == "unknown" and "238 tokens" in checks[0]["message"]


def test_doctor_prompt_in_secondary_tier_is_reported(make, tmp_path, asked, store):
    store.kill()
    start(store, f"--disk-path={tmp_path}/disk", "--disk-size=64MiB", "--disk-admission=all")
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT)
    eventually(lambda: store.disk().written_blocks >= BLOCKS, 30)
    fill_up(engine, store)
    _, checks = asked([engine])
    assert "tokens 0 to 224: on disk, not in memory" in checks[0]["message"]
    assert "kvtier warm" in checks[0]["fix"]
    # The disk's process is killed and cannot come back: the tier is unavailable, with all its blocks.
    (tmp_path / "disk").rename(tmp_path / "gone")
    (tmp_path / "disk").write_text("no directory")
    os.kill(store.tier_process(), signal.SIGKILL)
    eventually(lambda: store.disk().state == "unavailable", 30)
    _, checks = asked([engine])
    assert "the tier had it when memory evicted it (disk is unavailable: " in checks[0]["message"]


def test_doctor_prompt_not_admitted_to_disk_is_explained(make, tmp_path, asked, store):
    store.kill()
    start(store, f"--disk-path={tmp_path}/disk", "--disk-size=64MiB")
    engine = make(FakeEngine, store=store.path)
    engine.stores(TEXT)
    fill_up(engine, store)
    _, checks = asked([engine])
    assert "no secondary tier had it; not admitted to disk" in checks[0]["message"]
    assert "disk_admission=all" in checks[0]["fix"]
