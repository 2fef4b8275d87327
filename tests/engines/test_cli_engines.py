"""`kvtier doctor`, `inspect` and `top` beside real engines and their store: two that share a node, not a hash seed.

KVTIER_TOP_SVG=$PWD/docs/top.svg pytest tests/engines/test_cli_engines.py -k top -m slow     draws the manual's picture
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from engine_client import driving, random_tokens
from engine_fixtures import BLOCK, ENGINE_FLAGS, start_missing
from node_fixtures import OPTIONS, SLOT_PAGES, NodeDriver, runtime_dir, seeded, store_env, store_in

from vllm_kvtier.devtools.engines import kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all
from vllm_kvtier.doctor.engines.endpoint import EndpointProbe
from vllm_kvtier.doctor.engines.server import Server
from vllm_kvtier.store.protocol import PAGE

POOL = 60 * SLOT_PAGES * PAGE  # blocks of 32 tokens
TEXT = "What the engine has seen before it need not compute again. " * 12


@pytest.fixture(scope="module")
def pair(model_path, log_dir) -> Iterator[tuple]:
    """(A, B whose hash seed is another, their store)."""
    from vllm_kvtier.devtools.engines import Engine

    with runtime_dir() as folder:
        engines = []
        for name, seed in (("A", "0"), ("B", "1")):
            port = free_port()
            options = {**OPTIONS, "store_size": POOL, "endpoint_port": port, "load_policy": "always"}
            env = {**store_env(folder), "PYTHONHASHSEED": seed}
            engine = Engine(
                model_path, name=f"cli-{name}", kv=kvtier(options), log_dir=log_dir, env=env, **ENGINE_FLAGS
            )
            engine.endpoint = f"127.0.0.1:{port}"
            engines.append(engine)
        start_missing(engines)
        store = store_in(folder)
        store.until_up()
        yield (*engines, store)
        kill_all(engines)


@pytest.fixture
async def driver(pair):
    async with driving(pair[0], NodeDriver) as driver:
        yield driver


async def command(*arguments) -> subprocess.CompletedProcess:
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "vllm_kvtier.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "150"},
    )


async def doctor(*arguments) -> tuple[int, list[dict]]:
    done = await command("doctor", "--json", "--remote", *arguments)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def given(*engines) -> list[str]:
    return [word for e in engines for word in ("--server", e.base_url, "--endpoint", e.endpoint)]


async def test_doctor_healthy_engine_exits_zero(pair):
    first, _, store = pair
    code, checks = await doctor(*given(first), "--socket", store.path)
    assert code == 0, checks
    said = " ".join(check["message"] for check in checks)
    assert f"1 rank, blocks of {BLOCK} tokens, a node store in use" in said and "no errors counted" in said


async def test_doctor_different_hash_seeds_are_found(pair):
    first, second, store = pair
    code, checks = await doctor(*given(first, second), "--socket", store.path)
    broken = [check for check in checks if check["state"] == "fail"]
    assert code == 2 and len(broken) == 1, checks
    assert "hash seed differs" in broken[0]["message"] and "PYTHONHASHSEED" in broken[0]["fix"]


async def test_doctor_prompt_never_stored_then_evicted_is_explained(pair, driver, tmp_path):
    first, second, store = pair
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT)
    asked = [*given(first), "--socket", store.path, "--prompt", file]
    _, checks = await doctor(*asked)
    assert "never stored: no engine that" in checks[-1]["message"]
    assert "since the store started" in checks[-1]["message"]

    tokens = await asyncio.to_thread(Server(first.base_url).tokenize, TEXT)
    await driver.ask(first, tokens, 1)
    await driver.stored(first, tokens)
    code, checks = await doctor(*asked)
    whole = len(tokens) // BLOCK * BLOCK
    assert code == 0 and f"all {whole} tokens of whole blocks are cached" in checks[-1]["message"]
    done = await command("inspect", *given(first), "--prompt", file, "--json")
    found = json.loads(done.stdout)["engines"][0]
    assert found["stored_tokens"] == found["gpu_cache_tokens"] == whole
    assert found["block_tokens"] == BLOCK
    spans = [(each["start"], each["end"], each["tier"], each["removal_reason"]) for each in found["spans"]]
    assert spans == [(0, whole, "memory", "")] and not found["load_decisions"], "its prefix cache has it"

    code, checks = await doctor(*given(first, second), "--socket", store.path, "--prompt", file)
    missed = next(check for check in checks if check["name"] == f"prompt on {second.endpoint}")
    assert "hash seed differs" in missed["message"] and first.endpoint in missed["message"]
    assert "fixed by PYTHONHASHSEED" in missed["message"], "in the engine's own words"

    code, checks = await doctor(*asked, "--cache-salt", "somebody")
    assert code == 2 and "were stored with no cache salt" in checks[-1]["message"]

    # Only the store has it: what the engine would do with that follows from what it has measured.
    await driver.until_idle(first)
    await driver.reset(first)
    done = await command("inspect", *given(first), "--prompt", file, "--json")
    found = json.loads(done.stdout)["engines"][0]
    assert (found["gpu_cache_tokens"], found["stored_tokens"]) == (0, whole)
    (weighed,) = found["load_decisions"]
    assert (weighed["source"], weighed["start"], weighed["end"], weighed["load"]) == ("host", 0, whole, True)
    assert weighed["load_seconds"] > 0

    # An adapter that this engine does not know.
    code, checks = await doctor(*asked, "--adapter", "unknown")
    assert "no request to this engine has used an adapter 'unknown'" in checks[-1]["message"], checks[-1]

    # More than the store holds, and the engine's prefix cache emptied.
    for number in range(4):
        await driver.ask(first, random_tokens(seeded(f"doctor {number}"), 1000), 1)
    await driver.until_idle(first)
    await driver.reset(first)
    _, checks = await doctor(*asked)
    assert f"tokens 0 to {whole}: evicted, " in checks[-1]["message"], checks
    assert " ago: no secondary tier had it" in checks[-1]["message"]
    done = await command("inspect", *given(first), "--prompt", file)
    assert "GPU cache" in done.stdout and f"tokens 0 to {whole}: evicted, " in done.stdout, done.stdout

    # What it stores is in the namespace that `kvtier inspect` prints.
    assert f"namespace {found['namespace']} " in done.stdout
    done = await command("clear", "--socket", store.path, "--namespace", found["namespace"])
    assert int(done.stdout.removesuffix(" blocks dropped\n")) > 10, done


async def test_doctor_prompt_reports_remaining_prefix(pair, driver, tmp_path):
    """The end goes first; the rest is found, and doctor says from where on it is not, and why."""
    first, _, store = pair
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT)
    tokens = await asyncio.to_thread(Server(first.base_url).tokenize, TEXT)
    begin = len(tokens) // 2 // BLOCK * BLOCK
    await driver.ask(first, tokens[:begin], 1)
    await driver.stored(first, tokens[:begin])
    code, checks = await doctor(*given(first), "--socket", store.path, "--prompt", file)
    assert code == 1 and f"tokens {begin} to {len(tokens)} missed" in checks[-1]["message"], checks[-1]


async def test_engines_report_their_identity(pair):
    first, second, _ = pair
    told = []
    for engine in (first, second):
        with EndpointProbe(engine.endpoint) as probe:
            told.append(await asyncio.to_thread(probe.description))
    same, other = told
    assert [name for name in same if same[name] != other[name]] == ["hash seed"]
    assert len(same["weights"].split(",")[0]) == 16 and same["codec of the store"] == "raw"
    assert f"{BLOCK} tokens" in same["block size"] and "full attention" in same["KV cache layout"]


@pytest.mark.slow
async def test_top_shows_engines_and_store_under_traffic(pair, driver, tmp_path):
    first, second, store = pair
    ending = asyncio.Event()

    async def talk(engine, name: str) -> None:
        begin = random_tokens(seeded(f"top {name}"), 400)
        while not ending.is_set():
            for turn in range(3):
                await driver.ask(engine, begin + random_tokens(seeded(f"top {name} {turn}"), 200), 16)
            await driver.until_idle(engine)
            await driver.reset(engine)

    talks = [asyncio.create_task(talk(*each)) for each in ((first, "a"), (second, "b"))]
    picture = os.environ.get("KVTIER_TOP_SVG") or tmp_path / "top.svg"
    servers = ["--server", first.base_url, "--server", second.base_url]
    once = ["--once", "--interval", "1", "--readings", "20"]
    done = await command("top", "--socket", store.path, *servers, *once, "--svg", picture)
    ending.set()
    await asyncio.gather(*talks)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    memory = next(line for line in lines if line.strip().startswith("memory"))
    assert "ready" in memory and "%" in done.stdout
    for engine in (first, second):
        line = next(line for line in lines if line.strip().startswith(engine.base_url.partition("://")[2]))
        assert line.split()[3].endswith("%"), line
    assert "<svg" in open(picture).read()
