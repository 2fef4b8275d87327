"""Bytes that change between the checksum and the reader: found, computed anew, counted, logged once."""

import asyncio
import random

import pytest
from engine_client import Refused, random_tokens, with_sources

FAILURES = "vllm:kvtier_integrity_failures_total"


async def failures(driver, engine, more_than: float) -> float:
    async def counted() -> float:
        await driver.ask(engine, [300, 301], 1)  # counters leave with the next step
        value = await driver.metric(engine, FAILURES)
        return value if value > more_than else 0.0

    return await driver.until(counted, 20.0, f"more than {more_than:g} integrity failures are counted")


async def corrupted(driver, trio, where: str, kind: str, prompt: list[int]):
    """The decode engine's answer from the prefill engine's KV in which a bit flipped after it was summed and before it
    was read (or on arrival)."""
    source, reader = trio.faults[where], trio.faults["FD"]
    before = source.happened(kind)
    if source is reader:
        reader.set(corrupt=kind)
        _, reply = await driver.hand_off(trio.prefill, trio.decode, prompt)
    else:
        source.set(corrupt=kind)
        reader.set(hold_before=True)  # else the decode engine may have read what it wants before the bit flips
        asked = asyncio.create_task(driver.hand_off(trio.prefill, trio.decode, prompt))

        async def flipped() -> bool:
            return source.happened(kind) > before or asked.done()

        await driver.until(flipped, 20.0, "P flipped a bit")
        reader.set()
        _, reply = await asked
    source.set()
    assert source.happened(kind) > before
    return reply


@pytest.mark.parametrize(("kind", "where"), [("pages", "FP"), ("checksums", "FP"), ("arrival", "FD")])
async def test_pull_with_flipped_bit_is_recomputed_and_counted(trio, driver, kind, where):
    rng = random.Random(f"corrupt {kind}")
    for length in (40, 333, 1024):
        before = await driver.metric(trio.decode, FAILURES)
        prompt = random_tokens(rng, length)
        reply = await corrupted(driver, trio, where, kind, prompt)
        assert reply.pulled == 0, "a block was wrong, so what was pulled does not count"
        await driver.assert_right(reply, prompt, f"{kind}, {length} tokens")
        await failures(driver, trio.decode, before)
        await driver.until_no_exports(trio.prefill)
    prompt = random_tokens(rng, 200)
    _, reply = await driver.hand_off(trio.prefill, trio.decode, prompt)
    assert reply.pulled == 200, "nothing is wrong any more"
    await driver.assert_right(reply, prompt)


async def test_pull_from_decode_engine_with_corruption_is_recomputed(trio, driver):
    rng = random.Random("corrupt back")
    prompt = random_tokens(rng, 300)
    reply = await driver.ask(trio.decode, prompt)
    before = await driver.metric(trio.prefill, FAILURES)
    trio.faults["FP"].set(corrupt="arrival")
    longer = [*prompt, *reply.tokens, *random_tokens(rng, 30)]
    first = await driver.prefill(trio.prefill, longer, with_sources(trio.decode))
    assert first.pulled == 0
    await driver.assert_right(first, longer)
    await failures(driver, trio.prefill, before)


@pytest.mark.parametrize("external", ["false", "true"])
async def test_prefill_from_before_a_reset_of_the_cache_is_computed(trio, driver, external):
    """The weights may be others now. The request's parameters name blocks that still have the KV of the old ones, and
    are read before the lease is refused."""
    rng = random.Random(f"reset {external}")
    await driver.hand_off(trio.prefill, trio.decode, random_tokens(rng, 100))  # they know each other
    prompt = random_tokens(rng, 200)
    first = await driver.prefill(trio.prefill, prompt)
    for engine in (trio.prefill, trio.decode):
        url, params = f"{engine.base_url}/reset_prefix_cache", {"reset_external": external}
        (await driver._http.post(url, params=params)).raise_for_status()
    reply = await driver.ask(trio.decode, prompt, 8, first.params)
    assert reply.pulled == 0, reply.report
    await driver.assert_right(reply, prompt)
    prompt = random_tokens(rng, 200)
    _, reply = await driver.hand_off(trio.prefill, trio.decode, prompt)
    assert reply.pulled == 200, reply.report
    await driver.assert_right(reply, prompt)


async def test_pull_integrity_failure_is_logged_once_per_source(trio, driver):
    rng = random.Random("logged once")
    trio.faults["FD"].set(corrupt="arrival")
    for _ in range(3):
        _, reply = await driver.hand_off(trio.prefill, trio.decode, random_tokens(rng, 100))
        assert reply.pulled == 0
    source = (await driver.prefill(trio.prefill, random_tokens(rng, 40))).params["kvtier"]["instance"]
    lines = trio.decode.log_path.read_text().splitlines()
    said = [line for line in lines if "logged once for this source" in line and source in line]
    assert len(said) == 1, said  # of whatever went wrong with it first


async def test_pull_with_corruption_fails_request_of_strict_engine(trio, driver):
    rng = random.Random("strict")
    trio.faults["FS"].set(corrupt="arrival")
    prompt = random_tokens(rng, 100)
    with pytest.raises(Refused) as refusal:
        await driver.hand_off(trio.prefill, trio.strict, prompt)
    assert refusal.value.status >= 500
    trio.faults["FS"].set()
    _, reply = await driver.hand_off(trio.prefill, trio.strict, prompt)
    assert reply.pulled == 100, "only that request failed"
    await driver.assert_right(reply, prompt)
