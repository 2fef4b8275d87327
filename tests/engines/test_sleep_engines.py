"""Prefill and decode engines sleep and wake: what they had is forgotten, nothing reads memory that is gone, and then
all goes on.

On a GPU (vLLM 0.33 tells its connector; before, its workers' methods are followed), all three engines on one device,
about a minute:

    KVTIER_TEST_GPUS=0 python -m pytest tests/engines/test_sleep_engines.py

On a CPU a worker of the tests' own stands for vLLM's. The prefill engine is ``kv_producer`` and the decode engine
``kv_consumer``, each on a node of its own: what one has of the other comes through NIXL.
"""

import asyncio
import random
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from engine_client import PREFILL, Reply, driving, random_tokens, with_sources
from engine_fixtures import TESTS_ON_PATH, start_missing
from model_shapes import GPU_FLAGS, GPUS
from node_fixtures import ASKED, OPTIONS, Node, NodeDriver, runtime_dir, seeded, store_env, store_in, wrong_checksums

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all
from vllm_kvtier.scheduler.leases.lease_client import DOWN_PAUSE

BLOCK = 16 if GPUS else 32
NUM_BLOCKS = 4480 // BLOCK
MAX_LENGTH = 2048
EXTRA = {**OPTIONS, "store_size": 192 << 20, "retain_seconds": 12.0, "retain_share": 0.5, "load_policy": "always"}
# In float32 on a GPU other kernels compute a prefill than a decode step.
TOLERANCE = 1e-2 if GPUS else 5e-4


class Pair(NamedTuple):
    prefill: Engine
    decode: Engine
    nodes: dict[str, Node]  # by the engine's name: as NodeDriver knows them


@pytest.fixture(scope="module")
def pair(model_path, log_dir, plain):
    with ExitStack() as stack:
        made, nodes, single = [], {}, plain
        flags = dict(block_size=BLOCK, max_model_len=MAX_LENGTH, log_dir=log_dir)
        if GPUS:
            flags["gpus"], sleeps, env = [GPUS[0]], ("--enable-sleep-mode",), {}
            single = Engine(model_path, name="sleep-S", args=("--dtype", "float32", *GPU_FLAGS), **flags)
        else:
            flags["kv_cache_bytes"], sleeps = 128 << 20, ("--worker-cls", "sleeping_worker.SleepingWorker")
            env = TESTS_ON_PATH
        for name, role in (("P", "kv_producer"), ("D", "kv_consumer")):
            folder = stack.enter_context(runtime_dir())
            store = store_in(folder)
            engine = Engine(
                model_path, name=f"sleep-{name}", kv=kvtier({**EXTRA, "endpoint_port": free_port()}, role),
                num_blocks=NUM_BLOCKS, env={**store_env(folder), **env},
                args=("--dtype", "float32", *GPU_FLAGS, *sleeps), **flags,
            )  # fmt: skip
            made.append(engine)
            nodes[engine.name] = Node(engine, engine, single, store, {})
        start_missing([*made, single])
        yield Pair(*made, nodes)
        kill_all([*made, single] if GPUS else made)


class PairDriver(NodeDriver):
    pair: Pair

    async def right(self, reply: Reply, prompt: list[int]) -> Reply:
        truth = await self.truth(prompt, len(reply.tokens))
        for i, (got, want) in enumerate(zip(reply.tokens, truth.tokens, strict=True)):
            best, second = truth.top[i]
            if got != want:
                assert best - second < TOLERANCE, (i, got, want, reply.report)
                return reply  # from here on they are other prompts
            assert abs(reply.logprobs[i] - truth.logprobs[i]) < TOLERANCE, (i, reply.report)
        return reply

    async def asked_right(self, engine: Engine, prompt: list[int], count: int = 8) -> Reply:
        return await self.right(await self.ask(engine, prompt, count, ASKED), prompt)

    async def handed_off(self, prompt: list[int], count: int = 8) -> Reply:
        """The prefill engine computes it, the decode engine pulls all of it and answers right."""
        first, reply = await self.hand_off(self.pair.prefill, self.pair.decode, prompt, count)
        assert reply.pulled == len(prompt), (first.report, reply.report)
        return await self.right(reply, prompt)

    async def given_back(self, prompt: list[int], answer: Reply, rng: random.Random) -> None:
        """The conversation goes on: the prefill engine pulls the answer from the decode engine."""
        longer = [*prompt, *answer.tokens, *random_tokens(rng, 40)]
        first = await self.prefill(self.pair.prefill, longer, with_sources(self.pair.decode))
        held = (len(prompt) + len(answer.tokens) - 1) // BLOCK * BLOCK
        assert first.pulled == held - first.report["local_tokens"] > 0, first.report
        await self.right(first, longer)

    async def stored_and_loaded(self, engine: Engine, prompt: list[int]) -> None:
        """From the node store, when vLLM's prefix cache has forgotten."""
        self.node = self.pair.nodes[engine.name]
        whole = len(prompt) // BLOCK * BLOCK
        await self.asked_right(engine, prompt)
        await self.stored(engine, prompt, whole)
        await self.reset(engine)
        reply = await self.asked_right(engine, prompt)
        assert (reply.pulled, reply.report["local_tokens"]) == (whole, 0), reply.report

    async def post(self, engine: Engine, path: str, **params) -> None:
        (await self._http.post(f"{engine.base_url}/{path}", params=params)).raise_for_status()

    async def lives(self, engine: Engine) -> int:
        """How often its cache was set up for peers."""
        text = await asyncio.to_thread(engine.log_path.read_text)
        return text.count(" answers on ")

    async def wake(self, engine: Engine) -> None:
        before = await self.lives(engine)
        await self.post(engine, "wake_up")

        async def back() -> bool:
            return await self.lives(engine) > before

        await self.until(back, 20, f"{engine.name} is set up again")
        await asyncio.sleep(DOWN_PAUSE)  # for so long it is not asked by engines that found it asleep


@pytest.fixture
async def both(pair: Pair):
    async with driving(pair.nodes[pair.prefill.name].single, PairDriver) as driver:
        driver.pair, driver.node = pair, pair.nodes[pair.prefill.name]
        yield driver
        for engine in pair[:2]:
            await driver.reset(engine)  # which revokes exports that would expire later
        await driver.until_idle(*pair[:2], seconds=EXTRA["retain_seconds"] + 10)
        for engine in pair[:2]:
            await driver.flushed(engine)
            counters = await driver.counters(engine)
            assert not wrong_checksums(counters) and not counters.get("loads failed"), counters


async def test_prefill_engine_after_sleep_pulls_exports_stores_and_loads(both):
    p, d, rng = both.pair.prefill, both.pair.decode, seeded("P sleeps")
    prompts = [random_tokens(rng, length) for length in (300, 701, 900, 500)]
    await both.handed_off(prompts[0])
    kept = await both.prefill(p, prompts[1])  # handed off, not pulled yet
    await both.post(p, "sleep", level=1)
    for prompt, params in ((prompts[1], kept.params), (random_tokens(rng, 90), with_sources(p))):
        reply = await both.ask(d, prompt, 8, params)
        assert reply.pulled == 0, "what P had is gone"
        await both.right(reply, prompt)
    await both.wake(p)
    first = await both.asked_right(p, prompts[0])
    # vLLM 0.32 has its connector forget what it stored as well, 0.33 does not.
    assert not first.report["local_tokens"], "the cache is empty"
    assert first.report.get("source") in (None, "host"), "it asks no engine for what it had"
    answer = await both.handed_off(prompts[2], 70)
    await both.given_back(prompts[2], answer, rng)
    await both.stored_and_loaded(p, prompts[3])
    await both.handed_off(random_tokens(rng, 400))


async def test_decode_engine_after_sleep_pulls_exports_stores_and_loads(both):
    d, rng = both.pair.decode, seeded("D sleeps")
    prompts = [random_tokens(rng, length) for length in (310, 650)]
    answer = await both.handed_off(prompts[0], 70)
    for _ in range(2):
        await both.post(d, "sleep", level=1)
        longer = [*prompts[0], *answer.tokens, *random_tokens(rng, 40)]
        first = await both.prefill(both.pair.prefill, longer, with_sources(d))
        assert first.pulled == 0, "what D had is gone"
        await both.right(first, longer)
        await both.wake(d)
        prompts[0] = random_tokens(rng, 333)
        answer = await both.handed_off(prompts[0], 70)
        await both.given_back(prompts[0], answer, rng)
    await both.stored_and_loaded(d, prompts[1])


async def test_sleep_during_pull_and_load_answers_correctly_afterwards(both):
    p, d, rng = both.pair.prefill, both.pair.decode, seeded("in the middle")
    for sleeper in (p, d, p, d):
        prompts = [random_tokens(rng, rng.randrange(700, 1000)) for _ in range(3)]
        firsts = [await both.prefill(p, prompt) for prompt in prompts]
        asked = [asyncio.create_task(both.ask(d, q, 30, f.params)) for q, f in zip(prompts, firsts, strict=True)]
        await asyncio.wait(asked, timeout=rng.choice((0.0, 0.01, 0.03)))
        await both.post(sleeper, "sleep", level=1)
        await both.wake(sleeper)
        replies = await asyncio.gather(*asked, return_exceptions=True)  # the decode engine's own are aborted
        for prompt, reply in zip(prompts, replies, strict=True):
            if isinstance(reply, Reply) and len(reply.tokens) == 30:
                await both.right(reply, prompt)
        await both.handed_off(random_tokens(rng, 400))


async def test_aborted_requests_on_producer_keep_other_answers_correct(both):
    """Their blocks are given to others at once: vLLM holds blocks back for consumers only."""
    p, d, rng = both.pair.prefill, both.pair.decode, seeded("aborted")
    both.node = both.pair.nodes[p.name]
    answered = []
    for _ in range(3):
        prompt = random_tokens(rng, 500)
        answered.append([*prompt, *(await both.handed_off(prompt, 100)).tokens])
    loaded = [random_tokens(rng, 600) for _ in range(2)]
    for prompt in loaded:
        await both.asked_right(p, prompt)
        await both.stored(p, prompt, len(prompt) // BLOCK * BLOCK)
    await both.reset(p)

    def longer(prompt: list[int]) -> list[int]:
        return [*prompt, *random_tokens(rng, 20)]

    def leaves(prompt: list[int], params: dict) -> asyncio.Task:
        return asyncio.create_task(both.disconnect(p, prompt, 0.005 * rng.randrange(1, 40), params))

    leaving = [leaves(longer(prompt), with_sources(d)) for prompt in answered]
    leaving += [leaves(longer(prompt), PREFILL) for prompt in loaded]
    leaving += [leaves(random_tokens(rng, 900), PREFILL) for _ in range(4)]
    stay = [longer(prompt) for prompt in (*answered, *loaded)] + [random_tokens(rng, 700) for _ in range(2)]
    asked = [asyncio.create_task(both.prefill(p, prompt, with_sources(d))) for prompt in stay]
    replies = await asyncio.gather(*asked)
    await asyncio.gather(*leaving)
    for prompt, reply in zip(stay, replies, strict=True):
        await both.right(reply, prompt)
    # What a request that left had brought is in the prefill engine's prefix cache.
    brought = [reply.pulled + reply.report["local_tokens"] for reply in replies]
    assert all(count > 0 for count in brought[:5]), [reply.report for reply in replies]


@pytest.mark.skipif(bool(GPUS), reason="a GPU's weights are gone then, and a trainer's to bring back")
async def test_prefill_engine_after_sleep_level_2_shares_nothing(both):
    """The last of this module: what they are afterwards has no name, unless the option ``model_fingerprint`` gives one.
    The tests' worker keeps them, so that it is known whether an answer is right."""
    p, d, rng = both.pair.prefill, both.pair.decode, seeded("level 2")
    prompt = random_tokens(rng, 300)
    answer = await both.handed_off(prompt, 70)
    await both.post(p, "sleep", level=2)
    for _ in range(2):
        await both.post(p, "wake_up")
        await both.stored_and_loaded(p, random_tokens(rng, 500))  # in a space of its own
        await asyncio.sleep(DOWN_PAUSE)
        _, reply = await both.hand_off(p, d, fresh := random_tokens(rng, 300), 8)
        assert reply.pulled == 0, "D takes nothing of P"
        await both.right(reply, fresh)
        longer = [*prompt, *answer.tokens, *random_tokens(rng, 40)]
        first = await both.prefill(p, longer, with_sources(d))
        assert first.pulled == 0, "P takes nothing of D"
        await both.right(first, longer)
        await both.post(p, "sleep", level=1)
    await both.post(p, "wake_up")
