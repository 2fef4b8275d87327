"""Hand-offs between engines of one node that the decode engine's step waits for, from mapped memory: right, or computed
if what came was not."""

import asyncio
import random

import pytest
from engine_client import Driver, Reply, random_tokens, with_sources
from engine_fixtures import BLOCK, ENGINE_FLAGS, SHORT, TESTS_ON_PATH, start_missing
from faults import VARIABLE, FaultFile
from test_following import both, go_on_when_read, params_of, read_early

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all
from vllm_kvtier.vllm_compat.version import check_supported

pytestmark = pytest.mark.skipif(check_supported() < (0, 29, 0), reason="this vLLM's forward waits for no load")
SYNCHRONOUS = "vllm:kvtier_synchronous_loads_total"
STEP = 1100  # tokens of a prompt that the prefill engine computes in a step
FAILURES = "vllm:kvtier_integrity_failures_total"


@pytest.fixture(scope="module")
def engines(model_path, log_dir):
    faults, made = {}, []
    for name in ("mapped-P", "mapped-D"):
        extra = {**SHORT, "endpoint_port": free_port(), "same_node_pulls": "mapped", "sync_load_ms": 10_000}
        kv = {**kvtier(extra), "kv_connector": "FaultyConnector", "kv_connector_module_path": "faulty_connector"}
        faults[name] = FaultFile(log_dir / f"{name}.faults")
        env = {**TESTS_ON_PATH, VARIABLE: str(log_dir / f"{name}.faults"), "VLLM_SERVER_DEV_MODE": "1"}
        steps = ("--max-num-batched-tokens", str(STEP)) if name == "mapped-P" else ()
        flags = {**ENGINE_FLAGS, "args": (*ENGINE_FLAGS["args"], *steps)}
        made.append(Engine(model_path, name=name, kv=kv, log_dir=log_dir, env=env, **flags))
    yield (*made, faults)
    kill_all(made)


@pytest.fixture
async def pair(engines, driver):
    """A prefill and a decode engine that has mapped the other's memory."""
    p, d, faults = engines
    start_missing([p, d])
    await driver.hand_off(p, d, random_tokens(random.Random(), 100))
    yield p, d
    for each in faults.values():
        each.set()
    await driver.until_idle(*[engine for engine in (p, d) if engine.running])


async def loads(driver: Driver, d: Engine, outcome: str = "ok") -> float:
    await driver.ask(d, [300, 301], 1)  # counters leave with the next step
    return await driver.metric(d, SYNCHRONOUS, f'kind="{outcome}"')


async def all_right(driver: Driver, prompts: list[list[int]], replies: list[Reply]) -> None:
    """Long answers are computed together."""
    pairs = zip(prompts, replies, strict=True)
    await asyncio.gather(*(driver.assert_right(reply, prompt, len(prompt)) for prompt, reply in pairs))


async def hand_off(driver: Driver, p: Engine, d: Engine, prompt: list[int], way: str, max_tokens: int = 8):
    """``follow``: as a router sends it to both engines, but the prefill has ended when it is first asked for."""
    if way == "pull":
        return (await driver.hand_off(p, d, prompt, max_tokens))[1]
    to_p, to_d = params_of(p)
    await driver.prefill(p, prompt, to_p)
    return await driver.ask(d, prompt, max_tokens, to_d)


@pytest.mark.parametrize("way", ["pull", "follow"])
async def test_synchronous_handoff_leaves_one_token_to_compute(pair, driver, way):
    p, d = pair
    rng = random.Random(f"whole {way}")
    for length in (17, 32, 33, 64, 300, 1025, 3001):
        prompt, before = random_tokens(rng, length), await loads(driver, d)
        counted = await driver.sources(d)
        reply = await hand_off(driver, p, d, prompt, way)
        counted = await driver.sources(d) - counted
        assert (reply.report["local_tokens"], reply.pulled) == (0, length), reply.report
        assert (counted.pulled, counted.computed) == (length - 1, 1), (length, counted)
        await driver.until_no_exports(p)
        assert await loads(driver, d) - before == 1, length
        await driver.assert_right(reply, prompt)
        longer = [*prompt, *reply.tokens, *random_tokens(rng, 5)]
        await driver.assert_right(await driver.ask(d, longer), longer, "on what is in the cache now")


async def test_followed_prefill_of_one_step_is_read_synchronously(pair, driver):
    """Both engines get the request at the same time."""
    p, d = pair
    rng = random.Random("one step")
    for length in (40, 300, 1025, 640):
        prompt, before = random_tokens(rng, length), await loads(driver, d)
        to_p, to_d = params_of(p)
        _, reply = await asyncio.gather(driver.prefill(p, prompt, to_p), driver.ask(d, prompt, 8, to_d))
        assert reply.pulled == length, reply.report
        assert await loads(driver, d) - before == 1, length
        await driver.assert_right(reply, prompt)
        await driver.until_no_exports(p)


@pytest.mark.parametrize("corrupt", ["", "pages"])
async def test_last_part_of_followed_prefill_is_read_synchronously(pair, engines, driver, corrupt):
    """Steps before it are read while the prefill goes on. ``corrupt``: pages of the last step are wrong. It is one read
    with what came before if that is still being read, as on a slow machine."""
    p, d = pair
    faults = engines[2]["mapped-P"]
    rng, before = random.Random(f"last {corrupt}"), await loads(driver, d)
    for length in (3000, 2700, 3300):
        prompt, early = random_tokens(rng, length), await read_early(driver, d)
        faults.set(hold_behind=2 * STEP)
        answers = asyncio.create_task(both(driver, p, d, prompt))
        await go_on_when_read(driver, faults, d, early, 2 * STEP // BLOCK * BLOCK, corrupt=corrupt)
        _, reply = await answers
        faults.set()
        await driver.assert_right(reply, prompt)
        assert reply.pulled == (0 if corrupt else length), reply.report
        await driver.until_no_exports(p)
    synchronous = await loads(driver, d) - before
    assert synchronous == 0 if corrupt else 1 <= synchronous <= 3


async def test_synchronous_handoff_behind_own_prefix_and_back(pair, driver):
    """The decode engine has the beginning; later the prefill engine reads the answer back, synchronously too."""
    p, d = pair
    rng = random.Random("prefix")
    prompt = random_tokens(rng, 700)
    await driver.ask(d, prompt[:330])
    before = await loads(driver, d)
    _, reply = await driver.hand_off(p, d, prompt, 40)
    assert (reply.report["local_tokens"], reply.pulled) == (320, 380), reply.report
    assert await loads(driver, d) - before == 1
    await driver.assert_right(reply, prompt)
    for turn in range(2):  # the first one maps the decode engine's memory
        prompt = [*prompt, *reply.tokens, *random_tokens(rng, 70)]
        before = await loads(driver, p)
        first = await driver.prefill(p, prompt, with_sources(d))
        assert first.pulled >= 32 and first.report["pulled_from"] == d.kv_address, first.report
        assert await loads(driver, p) - before == turn
        reply = await driver.ask(d, prompt, 40, first.params)
        await driver.assert_right(reply, prompt)


@pytest.mark.parametrize("way", ["pull", "follow"])
@pytest.mark.parametrize("kind", ["pages", "checksums"])
async def test_flipped_bit_at_prefill_engine_is_recomputed(pair, engines, driver, kind, way):
    p, d = pair
    fault, rng = engines[2]["mapped-P"], random.Random(f"flip {kind} {way}")
    for length, max_tokens in ((40, 8), (333, 1), (1024, 8), (1024, 1)):
        prompt, bad = random_tokens(rng, length), await driver.metric(d, FAILURES)
        before = await loads(driver, d, "failed")
        fault.set(corrupt=kind)
        reply = await hand_off(driver, p, d, prompt, way, max_tokens)
        fault.set()
        assert fault.happened(kind) and reply.pulled == 0, reply.report
        await driver.assert_right(reply, prompt, f"{kind}, {length} tokens")
        assert await loads(driver, d, "failed") - before == 1
        assert await driver.metric(d, FAILURES) > bad
        longer = [*prompt, *random_tokens(rng, 40)]
        await driver.assert_right(await driver.ask(d, longer), longer, "nothing wrong is in the cache")
        await driver.until_no_exports(p)
    prompt, before = random_tokens(rng, 200), await loads(driver, d)
    reply = await hand_off(driver, p, d, prompt, way)
    assert reply.pulled == 200 and await loads(driver, d) - before == 1


async def test_clients_that_leave_before_verification_leak_nothing(pair, driver):
    p, d = pair
    rng = random.Random("leave")
    for _ in range(8):
        prompt = random_tokens(rng, 2500)
        first = await driver.prefill(p, prompt)
        await driver.disconnect(d, prompt, rng.uniform(0.0, 0.1), first.params)
        await driver.until_no_exports(p, seconds=10.0)  # a server that never saw the request leaves them their time
        await driver.assert_right(await driver.ask(d, prompt), prompt, "whatever it finds")


async def test_synchronous_handoffs_beside_generating_requests(pair, engines, driver):
    """Short ones are read in a step of the others; a wrong one alone is taken back."""
    p, d = pair
    fault, rng = engines[2]["mapped-P"], random.Random("beside")
    engines[2]["mapped-D"].set(short_loads=True)
    generating, prompts = ([random_tokens(rng, length) for length in lengths] for lengths in ((40, 40, 40), (100,) * 6))
    fault.set(corrupt="pages")
    done = fault.happened("pages")
    firsts = {number: await driver.prefill(p, prompts[number]) for number in (1, 4)}

    async def both_wrong() -> bool:
        return fault.happened("pages") >= done + 2

    await driver.until(both_wrong, 30.0, "both have their checksums")
    fault.set()
    firsts |= {number: await driver.prefill(p, prompts[number]) for number in (0, 2, 3, 5)}
    before = [await loads(driver, d, outcome) for outcome in ("ok", "failed")]
    others = [asyncio.create_task(driver.ask(d, prompt, 500)) for prompt in generating]

    async def all_generate() -> bool:
        return await driver.metric(d, "vllm:num_requests_running") == len(others)

    await driver.until(all_generate, 30.0, "three requests run")
    replies = [await driver.ask(d, prompt, 8, firsts[number].params) for number, prompt in enumerate(prompts)]
    assert not any(task.done() for task in others), "the others generate all the time"
    await all_right(driver, [*generating, *prompts], [*await asyncio.gather(*others), *replies])
    assert [reply.pulled for reply in replies] == [0 if number in (1, 4) else 100 for number in range(6)]
    after = [await loads(driver, d, outcome) for outcome in ("ok", "failed")]
    ok, failed = [a - b for a, b in zip(after, before, strict=True)]
    assert (ok, failed) == (4, 2)


async def test_many_handoffs_that_preempt_each_other_are_right(pair, driver):
    """More than the decode engine's cache holds."""
    p, d = pair
    rng = random.Random("many")
    prompts = [random_tokens(rng, length) for length in (17, 33, 64, 300, 1025, 800, 500, 100, 900, 40, 1500, 65)]
    firsts = [await driver.prefill(p, prompt) for prompt in prompts[:6]]
    before = await driver.metric(d, "vllm:num_preemptions_total")

    async def one(number: int, prompt: list[int]):
        await asyncio.sleep(0.1 * number * rng.random())
        return await driver.ask(d, prompt, 300, firsts[number].params if number < len(firsts) else None)

    replies = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
    await all_right(driver, prompts, replies)
    assert await driver.metric(d, "vllm:num_preemptions_total") > before
    await driver.until_no_exports(p, 20.0)


async def test_prefill_engine_that_dies_costs_its_handoffs(pair, driver):
    """Before the lease, while it is asked, and while its memory is read."""
    p, d = pair
    rng = random.Random("dies")
    for _ in range(3):
        prompts = [random_tokens(rng, 1500), random_tokens(rng, 700)]
        firsts = [await driver.prefill(p, prompt) for prompt in prompts]
        asked = [asyncio.create_task(driver.ask(d, *pair, first.params)) for pair, first in
                 zip(((prompt, 8) for prompt in prompts), firsts, strict=True)]  # fmt: skip
        await asyncio.sleep(rng.uniform(0.0, 0.03))
        p.kill()
        for prompt, reply in zip(prompts, await asyncio.gather(*asked), strict=True):
            await driver.assert_right(reply, prompt)
        await driver.until_idle(d)
        start_missing([p])
        prompt = random_tokens(rng, 100)
        for number in range(2):
            before = await loads(driver, d)
            prompt = random_tokens(rng, 100)
            _, reply = await driver.hand_off(p, d, prompt)
            await driver.assert_right(reply, prompt)
            assert (reply.pulled, await loads(driver, d) - before) == (100, number), "its memory is mapped anew first"
