"""What is pulled, what is not, and that the other engine learns it at once."""

import asyncio
import os
import random
import signal

import pytest
from engine_client import PREFILL, SYSTEM, driving, facts, known_from, question, random_tokens, told, with_sources
from engine_fixtures import BLOCK, ENGINE_FLAGS, EXTRA, HANDOFF_SECONDS, NUM_BLOCKS, THRESHOLD, start_missing

from vllm_kvtier.devtools.engines import Engine
from vllm_kvtier.devtools.processes import start_all

pytestmark = pytest.mark.usefixtures("fleet_is_idle_afterwards", "p_holds_nothing_yet")


@pytest.mark.parametrize("length", [17, 31, 32, 33, 63, 64, 65, 300, 1024, 1025, 3001])
async def test_prefill_is_pulled_including_partial_last_block(fleet, driver, length):
    """Partial last block included: all that is left to the decode engine is the last token, which samples."""
    prompt = random_tokens(random.Random(f"whole {length}"), length)
    before = await driver.sources(fleet.decode)
    first, reply = await driver.hand_off(fleet.prefill, fleet.decode, prompt)
    counted = await driver.sources(fleet.decode) - before
    assert (reply.report["local_tokens"], reply.pulled) == (0, length), reply.report
    assert reply.report["pulled_from"] == fleet.prefill.kv_address
    assert counted.pulled == length and counted.computed <= 1, "vLLM counts otherwise"
    assert first.report["num_tokens"] == length
    await driver.until_no_exports(fleet.prefill)
    await driver.assert_right(reply, prompt)


async def test_pulled_chat_recalls_fact(demo_model, make_engine):
    rng = random.Random("chat")
    codes = facts(rng, 30)
    name = rng.choice(list(codes))
    messages = [SYSTEM, {"role": "user", "content": told(codes)}, {"role": "assistant", "content": "Noted 30 codes."}]
    messages.append({"role": "user", "content": question(name)})
    engines = [make_engine(name, EXTRA, model=demo_model, **ENGINE_FLAGS) for name in ("P", "D")]
    start_missing(engines)
    async with driving(engines[0]) as driver:
        _, reply = await driver.hand_off(*engines, messages, 20, ignore_eos=False)
        assert reply.pulled == len(reply.prompt)
        assert codes[name] in reply.text
        await driver.assert_right(reply, messages, ignore_eos=False)


@pytest.mark.parametrize("hint", ["sources", "params", "none"])
async def test_prefill_engine_pulls_conversation_from_decode_engine(fleet, driver, hint):
    """By what a router tells, by the decode engine's own params, or because the decode engine pulled this chain from
    the prefill engine before."""
    rng = random.Random(f"back {hint}")
    prompt = random_tokens(rng, 70)
    _, reply = await driver.hand_off(fleet.prefill, fleet.decode, prompt, 100)
    longer = [*prompt, *reply.tokens, *random_tokens(rng, 20)]
    params = {"sources": with_sources(fleet.decode), "params": known_from(reply), "none": PREFILL}[hint]
    first, second = await driver.hand_off(fleet.prefill, fleet.decode, longer, params=params)
    local, held = 70 // BLOCK * BLOCK, (70 + 100 - 1) // BLOCK * BLOCK
    assert (first.report["local_tokens"], first.pulled) == (local, held - local), first.report
    assert first.report["pulled_from"] == fleet.decode.kv_address
    assert second.pulled + second.report["local_tokens"] == len(longer)
    await driver.assert_right(second, longer)


async def test_query_reports_cached_tokens_and_computes_nothing(fleet, driver):
    rng = random.Random("query")
    prompt = random_tokens(rng, 150)
    _, reply = await driver.hand_off(fleet.prefill, fleet.decode, prompt, 30)
    whole = [*prompt, *reply.tokens]
    before = [await driver.sources(e) for e in fleet[:2]]
    on_d = await driver.query(fleet.decode, whole)
    held = (150 + 30 - 1) // BLOCK * BLOCK  # the last token was sampled, not computed
    assert (on_d.prompt, on_d.gpu_cache, on_d.exported) == (180, held, held)
    await driver.until_no_exports(fleet.prefill)
    on_p = await driver.query(fleet.prefill, whole)
    assert (on_p.gpu_cache, on_p.exported) == (150 // BLOCK * BLOCK, 0), "the hand-off was fetched; the cache stays"
    assert (await driver.query(fleet.decode, [*whole[:40], 7, *whole[41:]])).gpu_cache == 32
    assert (await driver.query(fleet.decode, random_tokens(rng, 100))).gpu_cache == 0
    assert (await driver.query(fleet.decode, whole, salt="another")).gpu_cache == 0
    assert (await driver.query(fleet.decode, [])).gpu_cache == 0
    assert [await driver.sources(e) for e in fleet[:2]] == before


async def test_query_respects_cache_salt(fleet, driver):
    prompt = random_tokens(random.Random("salted"), 100)
    await driver.ask(fleet.decode, prompt, cache_salt="mine")
    assert (await driver.query(fleet.decode, prompt, salt="mine")).gpu_cache == 96
    assert (await driver.query(fleet.decode, prompt)).gpu_cache == 0


async def test_other_cache_salt_pulls_nothing(fleet, driver):
    """Equal prompts, another salt: not by the export's id, not by hash; the rightful tenant still can."""
    rng = random.Random("tenants")
    prompt = random_tokens(rng, 200)
    first = await driver.prefill(fleet.prefill, prompt, cache_salt="a")
    thief = await driver.ask(fleet.decode, prompt, params=first.params, cache_salt="b")
    unsalted = await driver.ask(fleet.decode, prompt, params=first.params)
    assert (thief.pulled, unsalted.pulled) == (0, 0)
    assert thief.report["local_tokens"] == unsalted.report["local_tokens"] == 0
    owner = await driver.ask(fleet.decode, prompt, params=first.params, cache_salt="a")
    assert owner.pulled == 200
    # The other way, by hash. The prefill engine has the first 192 tokens of tenant a itself.
    longer = [*prompt, *random_tokens(rng, 100)]
    await driver.ask(fleet.decode, longer, cache_salt="a")
    for salt, local, pulled in (("c", 0, 0), ("a", 192, 96)):
        first = await driver.prefill(fleet.prefill, longer, with_sources(fleet.decode), cache_salt=salt)
        assert (first.report["local_tokens"], first.pulled) == (local, pulled), (salt, first.report)
        await driver.assert_right(first, longer)


async def test_pull_below_threshold_is_skipped_and_export_released(fleet, driver):
    prompt = random_tokens(random.Random("short"), THRESHOLD)
    first, reply = await driver.hand_off(fleet.prefill, fleet.decode, prompt)
    assert first.report["num_tokens"] == THRESHOLD and reply.pulled == 0
    await driver.until_no_exports(fleet.prefill)
    await driver.assert_right(reply, prompt)


async def test_full_local_hit_pulls_nothing_and_releases_export(fleet, driver):
    prompt = random_tokens(random.Random("local"), 2 * BLOCK + 8)
    await driver.ask(fleet.decode, prompt)
    _, reply = await driver.hand_off(fleet.prefill, fleet.decode, prompt)
    assert (reply.report["local_tokens"], reply.pulled) == (2 * BLOCK, 0)
    await driver.until_no_exports(fleet.prefill)
    await driver.assert_right(reply, prompt)


async def test_partial_local_hit_pulls_the_rest(fleet, driver):
    rng = random.Random("partial")
    prompt = random_tokens(rng, 130)
    await driver.ask(fleet.decode, prompt[:70])
    _, reply = await driver.hand_off(fleet.prefill, fleet.decode, prompt)
    assert (reply.report["local_tokens"], reply.pulled) == (64, 66)
    await driver.until_no_exports(fleet.prefill)
    await driver.assert_right(reply, prompt)


async def test_prompt_logprobs_request_skips_the_pull(fleet, driver):
    """Logprobs of the prompt cannot be pulled."""
    prompt = random_tokens(random.Random("skip"), 200)
    first = await driver.prefill(fleet.prefill, prompt)
    reply = await driver.ask(fleet.decode, prompt, params=first.params, prompt_logprobs=1)
    assert reply.pulled == 0
    await driver.until_no_exports(fleet.prefill)
    await driver.assert_right(reply, prompt)


@pytest.mark.parametrize("busy", [False, True])
async def test_client_leaving_releases_export_at_once(fleet, driver, busy):
    """Whether the decode engine was reading, was still asking, or had not even looked at the request behind a long
    prefill."""
    rng = random.Random(f"abort {busy}")
    for after in (0.1, 0.2, 0.35):
        prompt = random_tokens(rng, 400)
        first = await driver.prefill(fleet.prefill, prompt)
        others = [driver.ask(fleet.decode, random_tokens(rng, 2500), 1)] if busy else []
        await asyncio.gather(driver.leave(fleet.decode, prompt, after, first.params), *others)
        await driver.until_no_exports(fleet.prefill)


async def test_aborted_prefill_exports_nothing(fleet, driver):
    rng = random.Random("aborted prefill")
    for after in (0.05, 0.2, 0.5):
        await driver.disconnect(fleet.prefill, random_tokens(rng, 2000), after, PREFILL)

    async def gone() -> bool:
        return (await driver.inspect(fleet.prefill)).requests == 0

    await driver.until(gone, 20.0, "P forgot the aborted requests")
    await driver.until_no_exports(fleet.prefill)


async def test_export_without_reader_expires(fleet, driver):
    """Also while the engine has nothing else to do."""
    await driver.prefill(fleet.prefill, random_tokens(random.Random("unwanted"), 200))
    assert (await driver.inspect(fleet.prefill)).exports == 1
    await driver.until_no_exports(fleet.prefill, seconds=HANDOFF_SECONDS + 8.0)


async def test_engine_that_drains_ends_when_its_handoff_is_read(fleet, driver, make_engine):
    args = (*ENGINE_FLAGS["args"], "--shutdown-timeout", "120")
    leaving = make_engine(extra={**EXTRA, "handoff_seconds": 100.0}, **{**ENGINE_FLAGS, "args": args})
    start_all([leaving])
    prompt = random_tokens(random.Random("draining"), 1000)
    first = await driver.prefill(leaving, prompt)
    os.kill(leaving.pid, signal.SIGTERM)
    await driver.until(lambda: asyncio.to_thread(drains, leaving), 10.0, "the engine drains")
    reply = await driver.ask(fleet.decode, prompt, 8, first.params)
    assert reply.pulled == 1000, reply.report

    async def gone() -> bool:
        return not leaving.running

    await driver.until(gone, 60.0, "the engine ended")
    await driver.assert_right(reply, prompt)


def drains(engine: Engine) -> bool:
    return "EngineCore: start mode=drain" in engine.log_path.read_text("utf-8", "replace")


async def test_handoffs_beyond_capacity_drop_the_oldest(fleet, driver):
    rng = random.Random("flood")
    prompts = [random_tokens(rng, 700) for _ in range(8)]  # 176 blocks of 139
    firsts = [await driver.prefill(fleet.prefill, prompt) for prompt in prompts]
    for at in (0, 7):
        reply = await driver.ask(fleet.decode, prompts[at], params=firsts[at].params)
        assert reply.pulled == (700 if at else 0), reply.report
        await driver.assert_right(reply, prompts[at])
    inspection = await driver.inspect(fleet.prefill)
    assert inspection.free_blocks > 0 and inspection.exported_blocks <= 0.9 * NUM_BLOCKS
