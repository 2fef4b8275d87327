"""Decode and prefill context parallelism (DCP, PCP) on two GPUs: stores, hand-offs, and engines without it.

    KVTIER_TEST_GPUS=0,1 python -m pytest tests/engines/test_gpu_context_parallel.py

No attention backend of CPUs has it. A tiny model with MLA, two ranks an engine, about four minutes. What an engine
computes itself is right, and altered blocks change the answers, or the comparisons would prove nothing. What vLLM does
not serve here is skipped.
"""

import asyncio
import json
from random import random
from typing import NamedTuple

import pytest
import tiny_models
from engine_client import Reply, driving, random_tokens
from engine_fixtures import TESTS_ON_PATH
from faults import ALTER, altered
from model_shapes import GPU_FLAGS, GPUS
from node_fixtures import ASKED, OPTIONS, Node, NodeDriver, runtime_dir, seeded, store_env, store_in
from test_gpu_kinds import warmed

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(len(GPUS) < 2, reason="KVTIER_TEST_GPUS names fewer than two devices"),
]

BLOCK, ANSWER, LENGTH = 64, 8, 1420  # tokens; the prompt ends within a block


# Shares of answers that begin as computed ones do. Of prompts computed twice, alone and beside others, 0.9 did.
RIGHT, WRONG = 0.7, 0.3


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
    warm: set[Engine]


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
            extra |= {"sync_load_ms": 0, "pull_threshold": 1}
            named = {"kv_connector": "AlteringConnector", "kv_connector_module_path": "altering_connector"}
            kv = {**kvtier(extra), **named}
        made[name] = Engine(
            model, name=name.replace(" ", "-"), kv=kv, block_size=BLOCK, tensor_parallel=ranks, log_dir=log_dir,
            args=("--dtype", "bfloat16", "--max-num-batched-tokens", "512", *flags, *GPU_FLAGS),
            gpus=GPUS[:2] if flags else GPUS[:1], kv_cache_bytes=256 << 20, ready_seconds=300,
            env={**store_env(folder), **TESTS_ON_PATH, ALTER: str(plan)},
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
        yield made, unserved, plan, set()
    finally:
        kill_all(made.values())


@pytest.fixture
async def made(started, folder):
    engines, unserved, plan, warm = started
    async with driving(engines["plain"], NodeDriver) as driver:
        driver.node = Node(engines["none"], engines["none"], engines["plain"], store_in(folder), {})
        yield Made(engines, unserved, driver, plan, warm)


async def pair(made: Made, *names: str) -> list[Engine]:
    for name in names:
        if name in made.unserved:
            pytest.skip(f"vLLM does not serve {name} here: {made.unserved[name][-3000:]}")
    engines = [made.engines[name] for name in names]
    for engine in engines:
        assert "kvtier: connector: disabled" not in engine.log_tail(100_000), engine.name
        if engine not in made.warm:
            await warmed(engine)
            made.warm.add(engine)
    return engines


async def known(driver: NodeDriver, engine: Engine, prompts: list[list[int]]) -> list[int]:
    """Computed, stored as whole virtual blocks, and in the GPU's prefix cache no more. Returns the tokens stored."""
    lengths = [len(prompt) // (2 * BLOCK) * 2 * BLOCK for prompt in prompts]
    await asyncio.gather(*(driver.ask(engine, prompt, 1) for prompt in prompts))
    for prompt, length in zip(prompts, lengths, strict=True):
        await driver.stored(engine, prompt, length)
    await driver.until_idle(engine, seconds=70)  # exports of a hand-off that failed may be held for a while
    await driver.reset(engine)
    return lengths


async def computed(driver: NodeDriver, engine: Engine, prompts: list[list[int]]) -> list[Reply]:
    """What the engine itself answers without anything of ours: a salt of their own, which nothing was stored under."""
    asked = (driver.ask(engine, prompt, ANSWER, ASKED, cache_salt=f"computed {random()}") for prompt in prompts)
    replies = await asyncio.gather(*asked)
    assert not any(reply.pulled for reply in replies)
    return replies


def agree(what: object, replies: list[Reply], wants: list[Reply]) -> float:
    """The share of answers that begin with the same token. Logprobs of two shapes of engines are up to 0.4 apart here,
    so that single answers tell little; of wrong KV hardly any begin with the same one."""
    same = sum(a.tokens[0] == b.tokens[0] for a, b in zip(replies, wants, strict=True)) / len(wants)
    apart = sorted(abs(a.logprobs[0] - b.logprobs[0]) for a, b in zip(replies, wants, strict=True))
    print(json.dumps({"what": what, "same": round(same, 3), "logprob": apart[len(apart) // 2], "of": len(wants)}))
    return same


@pytest.mark.parametrize("names", ALIKE, ids=" to ".join)
async def test_gpu_dcp_engine_loads_what_another_stored(made, names):
    first, second = await pair(made, *names)
    driver, rng = made.driver, seeded(f"context {names}")
    # Of any length; some shorter than a virtual block, or whole ones.
    prompts = [random_tokens(rng, n) for n in (LENGTH, 2 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 700) for _ in range(4)]
    stored = await known(driver, first, prompts)
    for engine in (second, first):
        replies = [await driver.ask(engine, prompt, ANSWER, ASKED) for prompt in prompts]
        pulled = [reply.pulled for reply in replies]
        assert all(n >= min(m, len(p) - 1) for n, m, p in zip(pulled, stored, prompts, strict=True)), pulled
        assert agree(("loaded", engine.name), replies, await computed(driver, engine, prompts)) >= RIGHT
        grown = [p + r.tokens + random_tokens(rng, 100) for p, r in zip(prompts, replies, strict=True)]
        replies = await asyncio.gather(*(driver.ask(engine, prompt, ANSWER, ASKED) for prompt in grown))
        assert agree(("grown", engine.name), replies, await computed(driver, engine, grown)) >= RIGHT
        assert await driver.kvtier(engine, "integrity_failures") == 0


@pytest.mark.parametrize("names", HANDOFFS, ids=" to ".join)
async def test_gpu_context_parallel_hand_off(made, names):
    prefill, decode = await pair(made, *names)
    driver, rng = made.driver, seeded(f"hand-offs {names}")
    prompts = [random_tokens(rng, n) for n in (LENGTH, 50, 4 * BLOCK, 4 * BLOCK + 1) for _ in range(4)]
    for _ in range(2):
        replies = [(await driver.hand_off(prefill, decode, prompt, ANSWER))[1] for prompt in prompts]
        pulled = [reply.pulled for reply in replies]
        assert min(pulled) > 0, pulled
        assert agree(("handed off", *names, pulled), replies, await computed(driver, decode, prompts)) >= RIGHT
        prompts = [p + r.tokens + random_tokens(rng, 150) for p, r in zip(prompts, replies, strict=True)]
    assert await driver.kvtier(decode, "integrity_failures") == 0


@pytest.mark.parametrize("names", [("dcp 1", "dcp 64"), ("dcp 1", "none")], ids=" to ".join)
async def test_gpu_other_runs_of_tokens_are_refused_and_computed(made, names):
    prefill, decode = await pair(made, *names)
    prompts = [random_tokens(seeded(f"refused {names} {n}"), LENGTH) for n in range(8)]
    replies = [(await made.driver.hand_off(prefill, decode, prompt, ANSWER))[1] for prompt in prompts]
    assert agree(("refused", *names), replies, await computed(made.driver, decode, prompts)) >= RIGHT
    assert not any(reply.pulled for reply in replies) and "runs of 1 over 2 ranks" in decode.log_tail(100_000)


@pytest.mark.parametrize("name", ["dcp 1", "dcp 64"])
async def test_gpu_dcp_altered_blocks_change_the_answer(made, name):
    """Zeroed, or exchanged with those of the prompt before, on both ranks."""
    [engine] = await pair(made, name)
    driver, rng, same = made.driver, seeded(f"altered {name}"), {}
    prompts = [random_tokens(rng, 22 * BLOCK + 2) for _ in range(8)]  # two tokens behind what is loaded
    await known(driver, engine, prompts)
    wants = await computed(driver, engine, prompts)
    for plan in ("", "zero 0", "exchange 0", "again"):
        await driver.until_idle(engine)
        await driver.reset(engine)
        with altered(made.plan, plan):
            replies = [await driver.ask(engine, prompt, ANSWER, ASKED) for prompt in prompts]
        assert min(reply.pulled for reply in replies) > 0, replies[0].report
        same[plan] = agree(("altered", name, plan), replies, wants)
    assert same[""] >= RIGHT and same["again"] >= RIGHT and max(same["zero 0"], same["exchange 0"]) < WRONG, same
