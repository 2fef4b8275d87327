"""Engines of one node that copy prefixes from each other's caches: from each other's memory, on GPUs over NVLink.

    KVTIER_TEST_GPUS=0,1 python -m pytest tests/engines/test_peer_fetch.py

The node store keeps nothing (``store_write`` is off): what an engine did not compute itself, it has from another one.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import httpx
import pytest
from engine_client import Reply, driving, random_tokens
from engine_fixtures import ENGINE_FLAGS, start_missing
from model_shapes import GPU_FLAGS, GPUS
from node_fixtures import (
    ASKED,
    OPTIONS,
    STEP_TOKENS,
    Node,
    NodeDriver,
    NodeStore,
    runtime_dir,
    store_env,
    store_in,
    wrong_checksums,
)
from test_node_store_models import off

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all
from vllm_kvtier.doctor.engines.endpoint import EndpointProbe

BLOCK = 32
TOLERANCE = 1e-2  # of logprobs on a device, where rounding depends on the batch
NEAR = {**OPTIONS, "bidirectional": False, "store_write": "off", "store_size": 64 << 20, "load_policy": "always"}


class Ranks(NodeDriver):
    engines: list[Engine]

    async def asked(self, engine: Engine, prompt: list[int], max_tokens: int = 8, **body) -> Reply:
        if not GPUS:
            return await super().asked(engine, prompt, max_tokens, **body)
        reply = await self.ask(engine, prompt, max_tokens, ASKED, **body)
        truth = await self.truth(prompt, max_tokens)
        assert off(reply, truth, TOLERANCE) < TOLERANCE, (engine.name, len(prompt), reply.report)
        return reply

    async def fetched(self, engine: Engine) -> float:
        await self.flushed(engine)
        return await self.kvtier(engine, "fetched_tokens")

    async def published(self, engine: Engine, prompt: list[int], rank: int = 0) -> None:
        """An engine that has the prompt's whole blocks has published them: some moments after it has answered.
        ``engine``: another one, or one of its data-parallel ranks, which looks there."""
        host, port = engine.kv_address.rsplit(":", 1)

        def so() -> bool:
            with EndpointProbe(f"{host}:{int(port) + rank}", seconds=20.0) as probe:
                peers = probe.explanation(prompt, "").peers
            return max((peer.tokens or 0 for peer in peers), default=0) >= len(prompt) // BLOCK * BLOCK

        await self.until(lambda: asyncio.to_thread(so), 20, "the prompt's blocks are in the node's directory")

    async def from_gpu(self, engine: Engine, prompt: list[int], count: int = 8):
        """A right answer, whose prefix came from another engine."""
        await self.published(engine, prompt)
        reply = await self.asked(engine, prompt, count)
        assert reply.report["pulled_from"] and reply.report["pulled_from"].startswith("gpu "), reply.report
        return reply

    async def acquainted(self) -> None:
        """Every engine has fetched from another: mapped, with other engines present."""
        for n, engine in enumerate(self.engines):
            other = self.engines[n - 1]

            async def once(engine=engine, other=other) -> bool:
                prompt = random_tokens(random.Random(f"acquainted {random.random()}"), 4 * BLOCK + 1)
                await self.asked(other, prompt, 1)
                reply = await self.asked(engine, prompt, 1)
                return (reply.report["pulled_from"] or "").startswith("gpu ")

            await self.until(once, 30, f"{engine.name} fetches from {other.name}")

    async def nothing_is_lent(self) -> None:
        await self.until_idle(*self.engines, seconds=15)
        for engine in self.engines:
            inspection = await self.inspect(engine)
            assert (inspection.leases, inspection.held_leases, inspection.violations) == (0, 0, 0), inspection
            assert inspection.free_blocks == inspection.blocks - 1, f"{engine.name} still holds blocks: {inspection}"


def flags() -> dict:
    args = (*ENGINE_FLAGS["args"], "--max-num-batched-tokens", str(STEP_TOKENS), *GPU_FLAGS)
    return {**ENGINE_FLAGS, "args": args}


def make_ranks(count: int, model_path, log_dir, folder) -> list[Engine]:
    """One on each device in turn, if there are any."""
    return [
        Engine(
            model_path, name=f"rank-{count}-{n}", kv=kvtier({**NEAR, "endpoint_port": free_port()}),
            gpus=GPUS[n % len(GPUS):][:1] if GPUS else (), log_dir=log_dir, env=store_env(folder), **flags(),
        )
        for n in range(count)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def right(model_path, log_dir, request) -> Iterator[Engine]:
    """What this one answers is right: on the same kind of device, without a connector."""
    if not GPUS:
        yield request.getfixturevalue("plain")
        return
    engine = Engine(model_path, name="ranks-right", gpus=GPUS[:1], log_dir=log_dir, **flags())
    start_missing([engine])
    yield engine
    engine.kill()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def group(request, model_path, log_dir, right) -> Iterator[tuple[list[Engine], NodeStore, Engine]]:
    with runtime_dir() as folder:
        engines = make_ranks(request.param, model_path, log_dir, folder)
        start_missing([*engines, right])
        yield engines, store_in(folder), right
        kill_all(engines)


@pytest.fixture
async def ranks(group) -> AsyncIterator[Ranks]:
    engines, store, plain = group
    start_missing(engines)
    async with driving(plain, Ranks) as driver:
        driver.engines = engines
        driver.node = Node(engines[0], engines[1], plain, store, {})
        await driver.acquainted()
        yield driver
        await driver.nothing_is_lent()
        for engine in engines:
            counters = await driver.counters(engine)
            assert not wrong_checksums(counters), counters


async def test_peer_fetch_copies_prefix_without_recompute(ranks):
    rng = random.Random("copied")
    source, reader = ranks.engines[:2]
    for length in (3 * BLOCK, 3 * BLOCK + 1, 700, 1900):
        prompt = random_tokens(rng, length)
        await ranks.asked(source, prompt)
        before = await ranks.fetched(reader)
        reply = await ranks.from_gpu(reader, prompt)
        expected = length // BLOCK * BLOCK
        assert reply.pulled == expected and await ranks.fetched(reader) - before == expected
        # And what the reader has it leases again.
        longer = prompt + random_tokens(rng, 100)
        await ranks.asked(reader, longer)
        back = await ranks.from_gpu(source, longer)
        assert back.report["local_tokens"] >= length // BLOCK * BLOCK, "its prefix cache comes first"


async def test_peer_fetch_common_prefix_is_computed_once_on_node(ranks):
    """To random engines: right answers, and each beginning is computed once on the node."""
    rng = random.Random("beginnings")
    beginnings = [random_tokens(rng, rng.randrange(8, 20) * BLOCK) for _ in range(4)]
    before = [await ranks.sources(engine) for engine in ranks.engines]
    prompts = [rng.choice(beginnings) + random_tokens(rng, rng.randrange(1, 90)) for _ in range(24)]
    for prompt in prompts:
        await ranks.asked(rng.choice(ranks.engines), prompt, 4)
    computed = 0
    for engine, was in zip(ranks.engines, before, strict=True):
        now = await ranks.sources(engine)
        computed += now.computed - was.computed
    own = sum(map(len, beginnings)) + sum(len(prompt) % BLOCK + 3 * BLOCK for prompt in prompts)
    assert computed <= own, f"{computed} tokens computed, {own} are different ones at most"


async def test_peer_fetch_of_many_requests_while_sources_evict(ranks):
    """More than the caches hold: whatever is leased is being pushed out all the time."""
    rng = random.Random("pressure")
    beginnings = [random_tokens(rng, rng.randrange(10, 30) * BLOCK) for _ in range(8)]
    prompts = [rng.choice(beginnings) + random_tokens(rng, rng.randrange(1, 400)) for _ in range(32)]
    for prompt in prompts:
        await ranks.truth(prompt, 4)
    before = sum([await ranks.fetched(engine) for engine in ranks.engines])
    limit = asyncio.Semaphore(3)

    async def one(prompt):
        async with limit:
            await ranks.asked(rng.choice(ranks.engines), prompt, 4)

    await asyncio.gather(*map(one, prompts))
    assert sum([await ranks.fetched(engine) for engine in ranks.engines]) > before


async def test_peer_fetch_client_leaving_leaves_answers_correct(ranks):
    rng = random.Random("leave")
    source, reader = ranks.engines[:2]
    async with httpx.AsyncClient() as http:
        for _ in range(6):
            prompt = random_tokens(rng, 1500)
            await ranks.asked(source, prompt, 1)
            body = {"model": "model", "prompt": prompt, "max_tokens": 50, "ignore_eos": True}
            with suppress(httpx.TimeoutException):
                await http.post(f"{reader.base_url}/v1/completions", json=body, timeout=rng.uniform(0.005, 0.15))
            await ranks.asked(reader, prompt, 4)


async def test_peer_fetch_source_killed_or_hung_recomputes_in_time(ranks):
    """At any moment; the reader answers, right and soon."""
    rng = random.Random("killed")
    source, reader = ranks.engines[0], ranks.engines[1]
    for how in ("stop", "kill"):
        prompts = [random_tokens(rng, 1800) for _ in range(3)]
        for prompt in prompts:
            await ranks.asked(source, prompt, 1)
            await ranks.truth(prompt, 4)
        asks = [asyncio.create_task(ranks.asked(reader, prompt, 4)) for prompt in prompts]
        await asyncio.sleep(rng.uniform(0.0, 0.15))  # somewhere in the middle of it
        source.pause() if how == "stop" else source.kill()
        try:
            await asyncio.wait_for(asyncio.gather(*asks), 60)
        finally:
            if how == "stop":
                source.resume()
            else:
                start_missing([source])
        await ranks.acquainted()


async def test_peer_fetch_external_reset_ends_sharing_of_that_engine(ranks):
    """``reset_external``: the weights may have changed; from then on this engine has no family."""
    source, reader = ranks.engines[:2]
    prompt = random_tokens(random.Random("reset"), 20 * BLOCK + 5)
    await ranks.asked(source, prompt, 1)
    await ranks.reset(source, external=True)
    await ranks.asked(source, prompt, 1)
    reply = await ranks.asked(reader, prompt, 4)
    assert not (reply.report["pulled_from"] or "").startswith("gpu "), "it is not known to have the same weights"
