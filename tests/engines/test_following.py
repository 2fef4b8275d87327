"""A decode engine that gets a request together with its prefill engine, and reads the prompt's KV step by step."""

import asyncio
import random
import uuid
from collections.abc import Iterator

import httpx
import pytest
from engine_client import PREFILL, random_tokens
from engine_fixtures import BLOCK, ENGINE_FLAGS, EXTRA, TESTS_ON_PATH, start_missing
from faults import VARIABLE, FaultFile

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all

STEP = 128  # tokens of a prompt that the prefill engine computes in a step
FOLLOWED = "vllm:kvtier_followed_tokens_total"


@pytest.fixture(scope="module")
def faults_file(log_dir) -> FaultFile:
    return FaultFile(log_dir / "slow-P.faults")


@pytest.fixture
def faults(faults_file) -> Iterator[FaultFile]:
    """Of the prefill engine."""
    yield faults_file
    faults_file.set()


@pytest.fixture(scope="module")
def prefill(model_path, log_dir, faults_file):
    flags = {**ENGINE_FLAGS, "args": (*ENGINE_FLAGS["args"], "--max-num-batched-tokens", str(STEP))}
    kv = kvtier({**EXTRA, "endpoint_port": free_port()})
    kv |= {"kv_connector": "FaultyConnector", "kv_connector_module_path": "faulty_connector"}
    env = {**TESTS_ON_PATH, VARIABLE: str(log_dir / "slow-P.faults")}
    engine = Engine(model_path, name="slow-P", kv=kv, log_dir=log_dir, env=env, **flags)
    yield engine
    kill_all([engine])


@pytest.fixture
async def pair(fleet, prefill, driver):
    """A prefill engine with small steps, and the session's decode engine, both without anything held."""
    start_missing([prefill])
    yield prefill, fleet.decode
    await driver.until_idle(*[engine for engine in (prefill, fleet.decode) if engine.running])


def params_of(engine: Engine) -> tuple[dict, dict]:
    """What a router gives to the prefill engine, and at the same time to the decode engine."""
    name = uuid.uuid4().hex
    host, port = engine.kv_address.rsplit(":", 1)
    own = {"export": name, "follow": True}
    decode = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": host, "remote_port": port}
    return {**PREFILL, "kvtier": {"export_as": name}}, {**decode, "kvtier": own}


async def read_early(driver, engine) -> float:
    """Tokens that the engine began to read before the prefill had ended, so far."""
    return await driver.metric(engine, FOLLOWED, "while_prefilling")


async def go_on_when_read(driver, faults, d, early, tokens, **plan) -> int:
    """The prefill, which is held, goes on, with the faults of ``plan``, once the decode engine has begun to read
    ``tokens`` beside the ``early`` ones of before. Returns how often that was asked for two tokens meanwhile: its
    counters leave with steps."""
    asked = 0

    async def has_read() -> bool:
        nonlocal asked
        asked += 1
        await driver.ask(d, [300, 301], 1)
        return await read_early(driver, d) - early >= tokens

    await driver.until(has_read, 30.0, "the decode engine reads while the prefill goes on")
    faults.set(**plan)
    return asked


async def both(driver, p, d, prompt, max_tokens=8, **body):
    to_p, to_d = params_of(p)
    decode = driver.ask(d, prompt, max_tokens, to_d, **body)
    return await asyncio.gather(driver.prefill(p, prompt, to_p, **body), decode)


async def test_most_of_prompt_is_read_before_its_prefill_ends(pair, driver, faults):
    p, d = pair
    prompt = random_tokens(random.Random("follow"), 3001)
    early, late = [await driver.metric(d, FOLLOWED, kind) for kind in ("while_prefilling", "after_prefill")]
    before = await driver.metric(d, "vllm:kvtier_pulled_bytes_total")
    counted = await driver.sources(d)
    faults.set(hold_behind=len(prompt) - STEP)
    answers = asyncio.create_task(both(driver, p, d, prompt))
    others = await go_on_when_read(driver, faults, d, early, 0.8 * len(prompt))
    _, reply = await answers
    assert (reply.report["local_tokens"], reply.pulled) == (0, len(prompt)), reply.report
    assert (await driver.sources(d) - counted).computed <= 1 + 2 * others
    early, late = await read_early(driver, d) - early, await driver.metric(d, FOLLOWED, "after_prefill") - late
    assert early + late == len(prompt), "a token was read twice"
    assert early >= 0.8 * len(prompt) and late, (early, late)
    block_bytes = (await driver.metric(d, "vllm:kvtier_pulled_bytes_total") - before) / -(-len(prompt) // BLOCK)
    assert block_bytes == int(block_bytes), "each block once"
    await driver.assert_right(reply, prompt)


async def test_samples_of_one_request_read_its_prefill_once(pair, driver):
    p, d = pair
    prompt = random_tokens(random.Random("samples"), 47 * BLOCK + 8)
    to_p, to_d = params_of(p)
    before = await driver.sources(d)
    asked = driver.ask(d, prompt, 8, to_d, n=4, temperature=0.01)
    _, reply = await asyncio.gather(driver.prefill(p, prompt, to_p), asked)
    counted = await driver.sources(d) - before
    assert counted.pulled == len(prompt) and counted.computed <= 4 * BLOCK
    await driver.until_no_exports(p)
    await driver.assert_right(reply, prompt)


async def test_retained_conversations_give_way_to_a_followed_prefill(pair, driver, faults):
    p, d = pair
    rng = random.Random("retained")
    for _ in range(3):  # nearly half of the cache
        prompt = random_tokens(rng, 700)
        await driver.ask(d, prompt, 2, (await driver.prefill(p, prompt)).params)
    state, prompt = await driver.inspect(d), random_tokens(rng, 3000)
    assert state.exports == 3 and state.free_blocks < len(prompt) / BLOCK
    faults.set(hold_behind=2000)
    answers = asyncio.create_task(both(driver, p, d, prompt))
    await go_on_when_read(driver, faults, d, await read_early(driver, d), len(prompt) / 2)
    await driver.assert_right((await answers)[1], prompt)


@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_order_of_arrival_does_not_matter(pair, driver, first):
    p, d = pair
    prompt = random_tokens(random.Random(f"order {first}"), 700)
    to_p, to_d = params_of(p)
    if first == "prefill":
        await driver.prefill(p, prompt, to_p)
        reply = await driver.ask(d, prompt, 8, to_d)
    else:
        asked = asyncio.create_task(driver.ask(d, prompt, 8, to_d))

        async def waits() -> bool:
            return (await driver.inspect(d)).requests == 1

        await driver.until(waits, 10.0, "the decode engine has the request")
        await driver.prefill(p, prompt, to_p)
        reply = await asked
    assert reply.pulled == len(prompt)
    await driver.assert_right(reply, prompt)


async def test_many_at_once_more_than_either_cache_holds(pair, driver):
    rng = random.Random("many")
    p, d = pair
    prompts = [random_tokens(rng, length) for length in (17, 33, 64, 300, 1025, 2000, 1500, 1800, 900, 2500)]
    replies = await asyncio.gather(*(both(driver, p, d, prompt, 12) for prompt in prompts))
    for prompt, (_, reply) in zip(prompts, replies, strict=True):
        await driver.assert_right(reply, prompt)


async def test_prefix_that_decode_engine_has_is_not_read(pair, driver):
    rng = random.Random("partial")
    p, d = pair
    prompt = random_tokens(rng, 1200)
    await driver.ask(d, prompt[:500])
    _, reply = await both(driver, p, d, prompt)
    held = 500 // BLOCK * BLOCK
    assert (reply.report["local_tokens"], reply.pulled) == (held, len(prompt) - held)
    await driver.assert_right(reply, prompt)


async def test_other_prompt_reads_nothing(pair, driver):
    rng = random.Random("other")
    p, d = pair
    to_p, to_d = params_of(p)
    mine, other = random_tokens(rng, 900), random_tokens(rng, 900)
    _, reply = await asyncio.gather(driver.prefill(p, other, to_p), driver.ask(d, mine, 8, to_d))
    assert reply.pulled == 0
    await driver.assert_right(reply, mine)


async def test_proxy_sends_requests_to_both_engines(pair, driver, make_proxy, faults):
    """The first one tells it where the prefill engine's endpoint is."""
    p, d = pair
    rng = random.Random("proxy")
    with make_proxy([p], [d], args=["--max-followed-prefills", "16"]) as proxy:
        for prompt, tokens in ((random_tokens(rng, 100), 0), (random_tokens(rng, 2000), 1000)):
            early = await read_early(driver, d)
            faults.set(hold_behind=1500)
            asked = asyncio.create_task(driver.ask(proxy, prompt))
            await go_on_when_read(driver, faults, d, early, tokens)
            await driver.assert_right(await asked, prompt)
        state = httpx.get(f"{proxy.base_url}/kvtier/state").json()
    assert state["counts"]["followed"] == 1


async def until_reading(driver, d, prompt):
    """Its blocks are allocated when the first of them are read. Metrics come later, when the prefill may have ended."""

    async def reading() -> bool:
        state = await driver.inspect(d)
        return state.blocks - state.free_blocks > len(prompt) // BLOCK

    await driver.until(reading, 20.0, "the decode engine has begun to read")


async def test_client_leaving_decode_engine_frees_both(pair, driver, faults):
    p, d = pair
    faults.set(hold_behind=1500)
    prompt = random_tokens(random.Random("leave"), 3000)
    to_p, to_d = params_of(p)
    asks = driver.prefill(p, prompt, to_p), driver.ask(d, prompt, 400, to_d)
    tasks = [asyncio.create_task(each) for each in asks]
    await until_reading(driver, d, prompt)
    tasks[1].cancel()

    async def released() -> bool:
        state = await driver.inspect(d)  # the prefill engine, which is held, answers nothing
        return state.requests == 0 and state.held_leases == 0

    await driver.until(released, 20.0, "the decode engine reads nothing any more")
    faults.set()
    await asyncio.wait(tasks)
    assert tasks[0].result().report.get("export") is None, "no engine wants it any more"
    await driver.until_no_exports(p)


async def test_aborted_prefill_costs_what_is_missing(pair, driver, faults):
    p, d = pair
    faults.set(hold_behind=1500)
    prompt = random_tokens(random.Random("abort"), 3000)
    to_p, to_d = params_of(p)
    early, counted = await read_early(driver, d), await driver.sources(d)
    tasks = [asyncio.create_task(driver.prefill(p, prompt, to_p)), asyncio.create_task(driver.ask(d, prompt, 8, to_d))]
    await until_reading(driver, d, prompt)
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    faults.set()
    reply = await tasks[1]
    await driver.assert_right(reply, prompt)
    early, counted = await read_early(driver, d) - early, await driver.sources(d) - counted
    assert 0 < early < len(prompt) and counted.computed <= len(prompt) - early + BLOCK, (early, counted)


async def test_killed_prefill_engine_costs_what_is_missing(pair, driver, faults):
    p, d = pair
    faults.set(hold_behind=1500)
    prompt = random_tokens(random.Random("kill"), 3000)
    to_p, to_d = params_of(p)
    early = await read_early(driver, d)

    async def prefilling() -> None:
        with pytest.raises(httpx.TransportError):
            await driver.prefill(p, prompt, to_p)

    tasks = [asyncio.create_task(prefilling()), asyncio.create_task(driver.ask(d, prompt, 8, to_d))]
    await until_reading(driver, d, prompt)
    p.kill()
    reply = await tasks[1]
    await tasks[0]
    await driver.assert_right(reply, prompt)
    assert 0 < await read_early(driver, d) - early < len(prompt)
