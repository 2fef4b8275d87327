"""Decode and prefill context parallelism (DCP, PCP) on two GPUs: stores, hand-offs, and engines without it.

    KVTIER_TEST_GPUS=0,1 python -m pytest tests/engines/test_gpu_context_parallel.py

No attention backend of CPUs has it, and this has not run yet: until it has passed, the option ``context_parallel`` is
off by default. A tiny model with MLA, two ranks an engine. What an engine without the connector answers is right, and
zeroed blocks change the answers, or the comparisons would prove nothing. What vLLM does not serve here is skipped.
"""

import json
from typing import NamedTuple

import pytest
import tiny_models
from altering_connector import VARIABLE, altered
from engine_client import driving, off, random_tokens
from engine_fixtures import TESTS_ON_PATH
from model_shapes import GPU_FLAGS, GPUS
from node_fixtures import ASKED, OPTIONS, Node, NodeDriver, runtime_dir, seeded, store_env, store_in
from test_gpu_kinds import certain, known, noticed, warmed

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(len(GPUS) < 2, reason="KVTIER_TEST_GPUS names fewer than two devices"),
]

BLOCK, ANSWER, LENGTH = 64, 8, 1420  # tokens; the prompt ends within a block


class Kind(NamedTuple):
    tolerance: float = 0.3  # of logprobs, as of MLA in ``test_gpu_kinds``


def dcp(interleave: int) -> tuple[str, ...]:
    return "--decode-context-parallel-size", "2", "--cp-kv-cache-interleave-size", str(interleave)


# Name -> flags, ranks of tensor parallelism. "none" and "plain" have no context parallelism.
ENGINES = {
    "plain": ((), 1),
    "none": ((), 1),
    "dcp 1": (dcp(1), 2),
    "dcp 1 again": (dcp(1), 2),
    "dcp 64": (dcp(BLOCK), 2),
    "dcp 64 again": (dcp(BLOCK), 2),
    "pcp": (("--prefill-context-parallel-size", "2"), 1),
}
# Two engines of the same shape: a hand-off is pulled as it lies, and the second loads what the first stored.
ALIKE = [("dcp 1", "dcp 1 again"), ("dcp 64", "dcp 64 again")]
HANDOFFS = [*ALIKE, ("none", "dcp 64"), ("dcp 64", "none"), ("pcp", "dcp 64"), ("pcp", "none")]


class Made(NamedTuple):
    engines: dict[str, Engine]
    unserved: dict[str, str]
    driver: NodeDriver
    plan: object


@pytest.fixture(scope="module")
def model(model_path, log_dir):
    return tiny_models.build("mla", log_dir / "models" / "context", model_path)


@pytest.fixture(scope="module")
def folder():
    with runtime_dir() as folder:
        yield folder


@pytest.fixture(scope="module")
def started(model, folder, log_dir):
    """All at once. (engines by name, for those that vLLM does not serve: why)"""
    plan = log_dir / "context.alter"
    plan.write_text("")
    made, unserved = {}, {}
    for name, (flags, ranks) in ENGINES.items():
        kv = None
        if name != "plain":
            extra = {**OPTIONS, "store_size": "2GiB", "load_policy": "always", "endpoint_port": free_port()}
            extra |= {"lookup_timeout": 10, "handshake_timeout": 30, "handoff_seconds": 60, "retain_seconds": 2}
            extra |= {"sync_load_ms": 0, "pull_threshold": 1, "context_parallel": "unverified"}
            named = {"kv_connector": "AlteringConnector", "kv_connector_module_path": "altering_connector"}
            kv = {**kvtier(extra), **named}
        made[name] = Engine(
            model, name=name.replace(" ", "-"), kv=kv, block_size=BLOCK, tensor_parallel=ranks, log_dir=log_dir,
            args=("--dtype", "bfloat16", "--max-num-batched-tokens", "512", *flags, *GPU_FLAGS),
            gpus=GPUS[:2] if flags else GPUS[:1], kv_cache_bytes=256 << 20, ready_seconds=300,
            env={**store_env(folder), **TESTS_ON_PATH, VARIABLE: str(plan)},
        )  # fmt: skip
    try:
        for engine in made.values():
            engine.start()
        for name, engine in list(made.items()):
            try:
                engine.wait_ready()
            except Exception as error:  # the other engines go on
                unserved[name] = f"{error!r}\n{engine.log_tail(30)}"
                kill_all([engine])
        yield made, unserved, plan
    finally:
        kill_all(made.values())


@pytest.fixture
async def made(started, folder):
    engines, unserved, plan = started
    async with driving(engines["plain"], NodeDriver) as driver:
        driver.node = Node(engines["none"], engines["none"], engines["plain"], store_in(folder), {})
        yield Made(engines, unserved, driver, plan)


async def pair(made: Made, *names: str) -> list[Engine]:
    for name in names:
        if name in made.unserved:
            pytest.skip(f"vLLM does not serve {name} here: {made.unserved[name][-3000:]}")
    engines = [made.engines[name] for name in names]
    for engine in engines:
        assert "kvtier: connector: disabled" not in engine.log_tail(100_000), engine.name
        await warmed(engine)
    return engines


async def right(driver: NodeDriver, reply, prompt) -> None:
    want = await driver.truth(prompt, ANSWER)
    assert off(reply, want, Kind().tolerance) < Kind().tolerance, reply.report


@pytest.mark.parametrize("names", ALIKE, ids=" to ".join)
async def test_gpu_dcp_engine_loads_what_another_stored(made, names):
    first, second = await pair(made, *names)
    driver, rng = made.driver, seeded(f"context {names}")
    # Of any length; some shorter than a virtual block, or whole ones.
    for length in (LENGTH, 2 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 700):
        prompt = random_tokens(rng, length)
        stored = await known(driver, first, prompt) if length >= 2 * BLOCK else 0
        for engine in (second, first):
            reply = await driver.ask(engine, prompt, ANSWER, ASKED)
            await right(driver, reply, prompt)
            assert reply.pulled >= min(stored, length - 1), reply.report
            grown = prompt + reply.tokens + random_tokens(rng, 100)
            await right(driver, await driver.ask(engine, grown, ANSWER, ASKED), grown)
        assert stored == length // (2 * BLOCK) * 2 * BLOCK
    for engine in (first, second):
        assert await driver.kvtier(engine, "integrity_failures") == 0


@pytest.mark.parametrize("names", HANDOFFS, ids=" to ".join)
async def test_gpu_context_parallel_hand_off(made, names):
    prefill, decode = await pair(made, *names)
    driver, rng, pulled = made.driver, seeded(f"hand-offs {names}"), []
    for length in (LENGTH, 50, 4 * BLOCK, 4 * BLOCK + 1):
        prompt = random_tokens(rng, length)
        for _ in range(2):
            _, reply = await driver.hand_off(prefill, decode, prompt, ANSWER)
            await right(driver, reply, prompt)
            pulled.append((len(prompt), reply.pulled))
            prompt = prompt + reply.tokens + random_tokens(rng, 150)
    print(json.dumps({"hand-offs": names, "pulled": pulled}))
    assert all(count > 0 for _, count in pulled)
    assert pulled[0][1] >= LENGTH - 2
    assert await driver.kvtier(decode, "integrity_failures") == 0


@pytest.mark.parametrize("names", [("dcp 1", "dcp 64"), ("dcp 1", "none")], ids=" to ".join)
async def test_gpu_other_runs_of_tokens_are_refused_and_computed(made, names):
    prefill, decode = await pair(made, *names)
    prompt = random_tokens(seeded(f"refused {names}"), LENGTH)
    _, reply = await made.driver.hand_off(prefill, decode, prompt, ANSWER)
    await right(made.driver, reply, prompt)
    assert reply.pulled == 0 and "runs of 1 over 2 ranks" in decode.log_tail(100_000)


@pytest.mark.parametrize("name", ["dcp 1", "dcp 64"])
async def test_gpu_dcp_altered_blocks_change_the_answer(made, name):
    """Zeroed, or exchanged with those of another prompt, on both ranks."""
    [engine] = await pair(made, name)
    driver, kind, moved = made.driver, Kind(), {}
    rng = seeded(f"altered {name}")
    length = 2 + await known(driver, engine, random_tokens(rng, LENGTH))
    prompt, other = [await certain(driver, kind, rng, length) for _ in range(2)]
    for each in (prompt, other):
        await known(driver, engine, each)
    want = await driver.truth(prompt, ANSWER)
    for plan in ("", "zero 0", "exchange 0", "again"):
        assert (await driver.ask(engine, other, 1, ASKED)).pulled > 0
        with altered(made.plan, plan):
            reply = await driver.ask(engine, prompt, ANSWER, ASKED)
        assert reply.pulled > 0, reply.report
        moved[plan] = off(reply, want, kind.tolerance)
        want = want if plan else reply
        await driver.until_idle(engine)
        await driver.reset(engine)
    assert noticed(moved, kind), moved
