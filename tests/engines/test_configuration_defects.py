"""Configurations in which the connector once did harm or nothing: real engines, each answering as it should.

"pooling": a decoder whose vectors are means over the whole prompt. "multi": windows, beside a connector that does not
know hybrid groups, so that vLLM keeps windows as full attention. An engine without a loop, which takes failed requests
only as vLLM did before 0.30, runs in a process of its own: this file as a script.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx
import model_shapes
import pytest
import zmq.asyncio
from engine_client import Reply, driving, random_tokens
from engine_fixtures import start_missing
from node_fixtures import ASKED, OPTIONS, Memory, Node, NodeDriver, NodeStore, runtime_dir, seeded, store_env, store_in
from store_support import map_pool

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all
from vllm_kvtier.wire import messages as m

TOLERANCE = 2e-3  # rounding, and what is computed together with what, move a logprob of these models by less
EXTRA = {**OPTIONS, "store_size": "128MiB", "load_policy": "always"}
FLAGS = ("--dtype", "float32")
MEAN = ("--runner", "pooling", "--convert", "embed", "--pooler-config", '{"seq_pooling_type": "MEAN"}')


class Defects(NamedTuple):
    pooling: Engine
    multi: Engine
    store: NodeStore


@pytest.fixture(scope="module")
def defects(plain, model_path, log_dir):
    with runtime_dir() as folder:
        hybrid = model_shapes.write(model_shapes.HYBRID, log_dir / "models" / "hybrid", model_path)
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        env = {**store_env(folder), "PYTHONPATH": path}

        def engine(name: str, model: Path, *args: str, among: bool = False) -> Engine:
            kv = kvtier({**EXTRA, "endpoint_port": free_port()})
            if among:
                idle = {"kv_connector": "IdleConnector", "kv_connector_module_path": "idle_connector"}
                children = {"connectors": [kv, {**idle, "kv_role": "kv_both"}]}
                kv = {**kv, "kv_connector": "MultiConnector", "kv_connector_extra_config": children}
            return Engine(model, name=f"defects-{name}", kv=kv, block_size=32, args=args, log_dir=log_dir, env=env)

        made = [
            engine("pooling", model_path, *FLAGS, *MEAN),
            engine("multi", hybrid, *FLAGS, among=True),
        ]
        start_missing([*made, plain])
        yield Defects(*made, store_in(folder))
        kill_all(made)


@pytest.fixture
async def driver(defects, plain):
    async with driving(plain, NodeDriver) as driver:
        driver.node = Node(plain, plain, plain, defects.store, {})  # only the store matters here
        yield driver


def address(engine: Engine) -> tuple[str, int]:
    """Of our connector's endpoint, wherever in the configuration it is."""
    extra = engine.kv["kv_connector_extra_config"]
    extra = extra["connectors"][0]["kv_connector_extra_config"] if "connectors" in extra else extra
    return "127.0.0.1", extra["endpoint_port"]


def assert_equal(got: Reply, want: Reply) -> None:
    assert got.tokens == want.tokens
    assert max(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True)) < TOLERANCE


async def test_pooling_over_whole_prompt_disables_connector(defects, driver):
    """Vectors of a prompt whose beginning was stored would be means over the rest, and ended vLLM's engine."""
    rng, engine = seeded("pooling"), defects.pooling
    stem = random_tokens(rng, 200)
    async with httpx.AsyncClient(timeout=60) as http:

        async def vector(prompt: list[int]) -> list[float]:
            body = {"model": "model", "input": [prompt]}
            reply = (await http.post(f"{engine.base_url}/v1/embeddings", json=body)).raise_for_status().json()
            return reply["data"][0]["embedding"]

        first = await vector(stem)
        longer = [await vector([*stem, *random_tokens(rng, 50)]) for _ in range(4)]
        again = await vector(stem)
        assert max(abs(a - b) for a, b in zip(first, again, strict=True)) < 1e-4
        assert all(max(abs(a - b) for a, b in zip(first, each, strict=True)) > 1e-3 for each in longer)
        assert (await http.get(f"{engine.base_url}/health")).status_code == 200
    assert "neither pulled, stored nor loaded" in engine.log_path.read_text()
    await refuses_peers(engine, "pooling")


async def refuses_peers(engine: Engine, why: str) -> None:
    hello = m.Hello(m.PROTOCOL, "raw/1", m.Namespace("model", "bf16", "sha256", "seed", 32, 1, 1))
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        host, port = address(engine)
        socket.connect(f"tcp://{host}:{port}")
        await socket.send(m.encode(hello))
        assert await socket.poll(10_000), "no answer"
        refused = m.decode_engine((await socket.recv_multipart())[-1])
    assert isinstance(refused, m.LeaseRefused) and why in refused.reason


async def inspected(driver: NodeDriver, engine: Engine):
    return await driver._endpoints.inspect(*address(engine))


async def stored(driver: NodeDriver, engine: Engine, prompt: list[int]) -> None:
    async def enough() -> bool:
        found = await driver._endpoints.query(*address(engine), prompt, "")
        return found.stored >= len(prompt) // 32 * 32

    await driver.until(enough, 20, "the prompt is in the store")


async def reset(engine: Engine) -> None:
    async with httpx.AsyncClient(timeout=60) as http:
        reply = (await http.post(f"{engine.base_url}/reset_prefix_cache")).raise_for_status()
        assert reply.json()["success"]


async def test_sliding_windows_kept_as_full_attention_are_loaded(defects, driver):
    """vLLM has no hybrid groups beside such a connector; the model's windows are in the specs nevertheless."""
    rng, engine = seeded("windows"), defects.multi
    prompts = [random_tokens(rng, length) for length in (70, 200, 512)]
    cold = [await driver.ask(engine, prompt, 8, ASKED) for prompt in prompts]
    for prompt, want in zip(prompts, cold, strict=True):
        assert want.pulled == 0
        await stored(driver, engine, prompt)
    await reset(engine)
    for prompt, want in zip(prompts, cold, strict=True):
        got = await driver.ask(engine, prompt, 8, ASKED)
        assert got.pulled == len(prompt) // 32 * 32, got.report
        assert_equal(got, want)


async def test_failed_load_within_multi_connector_is_recomputed(defects, driver):
    """As ``kv_load_failure_policy`` of the connector says; vLLM's own, of the MultiConnector, is "fail"."""
    rng, engine = seeded("multi"), defects.multi
    prompt = random_tokens(rng, 300)
    want = await driver.ask(engine, prompt, 8, ASKED)
    await stored(driver, engine, prompt)
    await reset(engine)
    with defects.store.memory() as memory:
        for page in memory.written():
            memory.flip(rng, page)
    got = await driver.ask(engine, prompt, 8, ASKED)
    assert got.pulled == 0
    assert_equal(got, want)
    await driver.flushed(engine)
    assert await driver.kvtier(engine, "integrity_failures") > 0
    defects.store.clear()


def held_hand_off(trio, driver, prompt: list[int]) -> tuple[asyncio.Task, Callable[[], bool]]:
    """A hand-off whose read is held until ``trio.faults["FD"].set()``, and whether it is held already."""
    faults = trio.faults["FD"]
    before = faults.happened("hold_before")
    faults.set(hold_before=True)
    asked = asyncio.create_task(driver.hand_off(trio.prefill, trio.decode, prompt))
    return asked, lambda: faults.happened("hold_before") > before


@pytest.mark.parametrize("pauses", [False, True], ids=["reset", "pause"])
async def test_reset_during_handoff_read_succeeds_and_recomputes(trio, driver_of_trio, pauses):
    """The prefill engine forgets what the decode engine is about to read, and fills its blocks anew; the decode engine
    finds that out by the checksums."""
    driver, rng = driver_of_trio, random.Random(f"reset {pauses}")
    prompt, faults = random_tokens(rng, 400), trio.faults["FD"]
    asked, held = held_hand_off(trio, driver, prompt)

    async def leased() -> bool:
        return held() and (await driver.inspect(trio.prefill)).leases == 1

    await driver.until(leased, 20, "D holds a lease and reads nothing yet")
    if pauses:
        async with httpx.AsyncClient(base_url=trio.prefill.base_url, timeout=60) as http:
            (await http.post("/pause", params={"mode": "abort", "clear_cache": True})).raise_for_status()
            (await http.post("/resume")).raise_for_status()
    else:
        await reset(trio.prefill)
    left = await driver.inspect(trio.prefill)
    assert (left.exports, left.free_blocks) == (0, left.blocks - 1)
    for _ in range(2):  # more than all of the prefill engine's blocks
        await driver.ask(trio.prefill, random_tokens(rng, 2300), 1)
    faults.set()
    _, reply = await asked
    assert reply.pulled == 0
    await driver.assert_right(reply, prompt)
    await driver.until_no_exports(trio.prefill)
    prompt = random_tokens(rng, 400)
    _, reply = await driver.hand_off(trio.prefill, trio.decode, prompt)
    assert reply.pulled == 400
    await driver.assert_right(reply, prompt)


@pytest.mark.parametrize("hangs", [False, True], ids=["ends", "hangs"])
async def test_pause_that_keeps_requests_lasts_until_reads_have_ended(trio, driver_of_trio, hangs):
    """A read holds blocks, and vLLM's cache cannot be reset before it ends. One that hangs has its time limit."""
    driver, rng = driver_of_trio, random.Random(f"pause, a read {hangs}")
    prompt, faults = random_tokens(rng, 400), trio.faults["FD"]
    asked, held = held_hand_off(trio, driver, prompt)

    async def reading() -> bool:
        return held()

    await driver.until(reading, 20, "D reads")
    async with httpx.AsyncClient(base_url=trio.decode.base_url, timeout=60) as http:

        async def paused() -> bool:
            return (await http.get("/is_paused")).raise_for_status().json()["is_paused"]

        pause = asyncio.create_task(http.post("/pause", params={"mode": "keep", "clear_cache": True}))
        await driver.until(paused, 20, "D is to pause")
        if not hangs:
            faults.set()
        try:
            (await pause).raise_for_status()
            left = await driver.inspect(trio.decode)
            assert left.free_blocks == left.blocks - 1
        finally:
            faults.set()
            (await http.post("/resume")).raise_for_status()
    _, reply = await asked
    await driver.assert_right(reply, prompt)
    await driver.until_no_exports(trio.prefill)
    _, reply = await driver.hand_off(trio.prefill, trio.decode, random_tokens(rng, 100))
    assert reply.pulled == 100, "one read that ends well is enough to go on"


@pytest.fixture
async def driver_of_trio(trio, plain):
    async with driving(plain) as driver:
        yield driver


# -- an engine without a loop, in a process of its own ------------------------------------------------------------


def test_failed_load_in_process_engine_of_old_vllm_is_recomputed(model_path, tmp_path, run_script):
    """vLLM before 0.30 takes failed requests only from its scheduler, which a connector without a loop did not know."""
    model = model_shapes.write(model_shapes.HYBRID, tmp_path / "hybrid", model_path)
    with runtime_dir() as folder:
        output = run_script(__file__, str(model), env={**store_env(folder), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    results = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert results == [{"groups": 3, "good": ["right", 1, 0], "bad": ["right", 0, 1]}]


def main(model: str) -> None:
    from vllm import LLM, SamplingParams

    from vllm_kvtier import connector as ours
    from vllm_kvtier.store.launcher import store_path
    from vllm_kvtier.telemetry.stats import merge
    from vllm_kvtier.vllm_compat import connector_types

    def as_before(step=None, by_request=False):
        finished = set() if step is None else step.finished
        return connector_types.TransferResults(finished_sending=set(), finished_recving=finished, failed_recving=set())

    ours.TransferResults, ours.transfer_results = None, as_before
    extra = {"store_size": "128MiB", "load_policy": "always", "store_idle_seconds": 5}
    llm = LLM(
        model, max_model_len=2048, block_size=32, kv_cache_memory_bytes=64 << 20, dtype="float32", enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "KVTierConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra,
        },
    )  # fmt: skip
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    half, counts = scheduler.connector._scheduler, {}
    take = half.counters.take

    def taken() -> dict[str, float]:
        found = take()
        merge(counts, found)
        return found

    half.counters.take = taken

    def ask(prompt: list[int], count: int) -> list[int]:
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        [answer] = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
        return list(answer.outputs[0].token_ids)

    def until(holds: Callable[[], object], what: str) -> None:
        """Without a loop, requests let time pass."""
        for i in range(200):
            if holds():
                return
            ask([300 + i], 1)
            time.sleep(0.05)
        raise AssertionError(f"{what}: {counts}")

    def loaded(prompt: list[int], truth: list[int]) -> list:
        """(whether the answer is right, loads that were right, that were wrong)."""
        before = [counts.get(name, 0) for name in ("loads|ok", "loads|failed")]
        right = ask(prompt, 16) == truth
        ask([300], 1)
        now = [counts.get(name, 0) for name in ("loads|ok", "loads|failed")]
        return ["right" if right else "wrong", *(int(a - b) for a, b in zip(now, before, strict=True))]

    rng = random.Random(1)
    prompt = random_tokens(rng, 400)
    until(lambda: counts.get("store_registered_bytes"), "the store is up")
    truth = ask(prompt, 16)
    until(lambda: counts.get("stored_blocks", 0) >= 400 // 32 and not half._offloader.pinned, "the prompt is stored")
    until(llm.reset_prefix_cache, "nothing is held")
    told = {"groups": len(half._info.groups), "good": loaded(prompt, truth)}
    assert llm.reset_prefix_cache()
    memory = Memory(map_pool(store_path()))
    for page in memory.written():
        memory.flip(rng, page)
    told["bad"] = loaded(prompt, truth)
    print(json.dumps(told), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
