"""Engines that die, stop, come back and fall silent: every wait ends, answers are right, nothing stays held."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest
from engine_client import PREFILL, Refused, random_tokens, with_sources
from engine_fixtures import SHORT

from vllm_kvtier.devtools.processes import free_port

HANDOFF, LEASE, TRANSFER = SHORT["handoff_seconds"], SHORT["lease_seconds"], SHORT["transfer_timeout"]
PULLS = "vllm:kvtier_pulls_total"
SLACK = 8.0  # beyond what the options promise, for two busy cores


@asynccontextmanager
async def listening(answer: bytes | None):
    """A TCP port where connections are accepted; ``answer`` is sent, then closed, or None: nothing ever happens."""

    async def serve(reader, writer):
        if answer is not None:
            writer.write(answer)
            await writer.drain()
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def happened(driver, faults, what: str, count: int = 1) -> None:
    async def enough() -> bool:
        return faults.happened(what) >= count

    await driver.until(enough, 30.0, f"fault '{what}'")


async def assert_pulls_again(driver, trio, rng, engine=None) -> None:
    """An engine that was unavailable is used again, soon; afterwards the two know each other."""
    engine = engine or trio.decode

    async def pulled() -> bool:
        prompt = random_tokens(rng, 100)
        _, reply = await driver.hand_off(trio.prefill, engine, prompt)
        await driver.assert_right(reply, prompt)
        return reply.pulled == 100

    await driver.until(pulled, 20.0, f"{engine.name} pulls from P again")


async def test_prefill_engine_death_before_pull_recomputes_and_new_instance_serves(trio, driver):
    rng = random.Random("p dies")
    for engine in (trio.decode, trio.strict):  # they know the prefill engine
        await assert_pulls_again(driver, trio, rng, engine)
    prompts = [random_tokens(rng, 300) for _ in range(3)]
    firsts = [await driver.prefill(trio.prefill, prompt) for prompt in prompts]
    trio.prefill.kill()
    replies = await asyncio.gather(
        *(driver.ask(trio.decode, *pair) for pair in ((prompts[i], 8, firsts[i].params) for i in (0, 1)))
    )
    for i, reply in enumerate(replies):
        assert reply.pulled == 0 and reply.seconds < SHORT["lookup_timeout"] + SLACK
        await driver.assert_right(reply, prompts[i])
    # Restarted under the same address between the prefill and the pull: it does not know that export.
    trio.prefill.start()
    await asyncio.to_thread(trio.prefill.wait_ready)
    reply = await driver.ask(trio.decode, prompts[2], 8, firsts[2].params)
    assert reply.pulled == 0 and reply.seconds < SHORT["handshake_timeout"] + SLACK
    await driver.assert_right(reply, prompts[2])
    await assert_pulls_again(driver, trio, rng)
    prompt = random_tokens(rng, 100)
    _, reply = await driver.hand_off(trio.prefill, trio.strict, prompt)
    assert reply.pulled == 100, "a decode engine that knew the first prefill engine asks the second one at once"
    await driver.assert_right(reply, prompt)


async def test_prefill_engine_death_during_pull_recomputes_or_fails_strictly(trio, driver):
    """One read was not posted yet when the prefill engine died, for another it is unknown how far it got; the strict
    engine says so."""
    rng = random.Random("p dies in transfer")
    for engine in (trio.decode, trio.strict):  # connections exist: the death is found by the read itself
        await assert_pulls_again(driver, trio, rng, engine)
    prompts = [random_tokens(rng, 1500) for _ in range(2)]
    firsts = [await driver.prefill(trio.prefill, prompt) for prompt in prompts]
    for name in ("FD", "FS"):
        trio.faults[name].set(hold_before=True)
    lenient = asyncio.create_task(driver.ask(trio.decode, prompts[0], 8, firsts[0].params))
    strict = asyncio.create_task(driver.ask(trio.strict, prompts[1], 8, firsts[1].params))
    for name in ("FD", "FS"):
        await happened(driver, trio.faults[name], "hold_before")
    trio.prefill.kill()
    for name in ("FD", "FS"):
        trio.faults[name].set()
    reply = await lenient
    assert reply.pulled == 0 and reply.seconds < TRANSFER + SLACK
    await driver.assert_right(reply, prompts[0])
    with pytest.raises(Refused) as refusal:
        await strict
    assert refusal.value.status >= 500
    trio.prefill.start()  # for the next test; it takes longer than what is left of this one
    for engine in (trio.decode, trio.strict):
        await driver.until_idle(engine, seconds=SHORT["retain_seconds"] + SLACK)
    fresh = random_tokens(rng, 50)
    await driver.assert_right(await driver.ask(trio.strict, fresh), fresh, "the strict engine lives")


async def test_decode_engine_death_ends_its_lease_after_lease_time(trio, driver):
    """The prefill engine's blocks are free again once the decode engine is silent for as long as a lease lasts, and the
    hand-off's time is over."""
    rng = random.Random("d dies")
    await assert_pulls_again(driver, trio, rng)
    trio.faults["FD"].set(hold_before=True)
    prompt = random_tokens(rng, 600)
    first = await driver.prefill(trio.prefill, prompt)
    asked = asyncio.create_task(driver.ask(trio.decode, prompt, 8, first.params))

    async def leased() -> bool:
        return (await driver.inspect(trio.prefill)).leases == 1

    await happened(driver, trio.faults["FD"], "hold_before")
    await driver.until(leased, 10.0, "a lease is out")
    trio.decode.kill()
    await asyncio.wait([asked])
    assert asked.exception() is not None
    trio.decode.start()  # for the next test; its new life has nothing to do with this

    async def void() -> bool:
        return (await driver.inspect(trio.prefill)).leases == 0

    await driver.until(void, LEASE + SLACK, "the lease is void")
    await driver.until_no_exports(trio.prefill, HANDOFF + SLACK)
    await driver.assert_right(await driver.ask(trio.prefill, prompt), prompt)


async def test_stopped_prefill_engine_costs_bounded_wait_and_is_pulled_again(trio, driver):
    """SIGSTOP: its sockets stay open and nothing answers. It costs a bounded wait, and counts again when it goes on."""
    rng = random.Random("stopped")
    await assert_pulls_again(driver, trio, rng)
    prompts = [random_tokens(rng, 300) for _ in range(3)]
    firsts = [await driver.prefill(trio.prefill, prompt) for prompt in prompts]
    trio.prefill.pause()
    try:
        for prompt, first in zip(prompts[:2], firsts[:2], strict=True):
            reply = await driver.ask(trio.decode, prompt, 8, first.params)
            # Memory of a stopped process can be read on one machine; then what arrives is verified and right.
            assert reply.pulled in (0, 300) and reply.seconds < TRANSFER + SLACK
            await driver.assert_right(reply, prompt)
    finally:
        trio.prefill.resume()
    reply = await driver.ask(trio.decode, prompts[2], 8, firsts[2].params)
    assert reply.seconds < TRANSFER + SLACK
    await driver.assert_right(reply, prompts[2])
    await assert_pulls_again(driver, trio, rng)
    await driver.until_no_exports(trio.prefill, LEASE + HANDOFF + SLACK)


async def test_prefill_engine_query_of_stopped_source_times_out(trio, driver):
    """Decode to prefill engine: the requester waits no longer than its time limit, and computes."""
    rng = random.Random("stopped source")
    prompt = random_tokens(rng, 300)
    reply = await driver.ask(trio.decode, prompt)
    params = with_sources(trio.decode)
    trio.decode.pause()
    try:
        first = await driver.prefill(trio.prefill, [*prompt, *reply.tokens, 400], params)
    finally:
        trio.decode.resume()
    assert first.pulled == 0 and first.seconds < SHORT["handshake_timeout"] + SLACK
    await driver.assert_right(first, [*prompt, *reply.tokens, 400])


@pytest.mark.parametrize("answer", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 4096, b""])
async def test_pull_from_address_of_no_engine_recomputes_within_timeout(trio, driver, answer):
    """A port that accepts and never answers, or answers with anything else."""
    rng = random.Random(f"no engine {answer}")
    async with listening(answer) as port:
        address = {"remote_host": "127.0.0.1", "remote_port": port, "remote_request_id": "kvtier/x"}
        for params in ({**PREFILL, **address}, {"do_remote_prefill": True, "do_remote_decode": False, **address}):
            prompt = random_tokens(rng, 100)
            reply = await driver.ask(trio.decode, prompt, 8, params)
            assert reply.pulled == 0 and reply.seconds < SHORT["handshake_timeout"] + SLACK
            await driver.assert_right(reply, prompt)


async def test_pull_from_address_without_listener_recomputes(trio, driver):
    prompt = random_tokens(random.Random("nobody"), 100)
    address = {"remote_host": "127.0.0.1", "remote_port": free_port()}
    params = {"do_remote_prefill": True, "remote_request_id": "kvtier/x", **address}
    for engine in (trio.decode, trio.strict):  # nothing was loaded that could fail: also the strict one computes
        reply = await driver.ask(engine, prompt, 8, params)
        assert reply.pulled == 0 and reply.seconds < SHORT["handshake_timeout"] + SLACK
        await driver.assert_right(reply, prompt)


async def test_pull_of_expired_export_is_refused_and_recomputed(trio, driver):
    prompts = [random_tokens(random.Random(name), 300) for name in ("expired", "overwritten")]
    firsts = [await driver.prefill(trio.prefill, prompt) for prompt in prompts]
    await driver.until_no_exports(trio.prefill, HANDOFF + SLACK)
    reply = await driver.ask(trio.decode, prompts[0], 8, firsts[0].params)
    assert reply.seconds < SHORT["lookup_timeout"] + SLACK, "the decode engine waits after the refusal"
    await driver.assert_right(reply, prompts[0])
    # Its blocks may still hold the very same tokens, and be read and verified; once they are overwritten they are not.
    for i in range(2):
        await driver.ask(trio.prefill, random_tokens(random.Random(f"flood {i}"), 3000), 1)
    reply = await driver.ask(trio.decode, prompts[1], 8, firsts[1].params)
    assert reply.pulled == 0 and reply.seconds < SHORT["lookup_timeout"] + SLACK
    await driver.assert_right(reply, prompts[1])


async def test_lease_expired_during_read_fails_pull_and_recomputes(trio, driver):
    """The decode engine's pings are lost and its read is slow: the prefill engine hands the blocks out anew. The decode
    engine reads the wrong bytes and sees it, or reads nothing because the prefill engine no longer serves it; either
    way the pull fails and the answer is right."""
    rng = random.Random("lapsed")
    await assert_pulls_again(driver, trio, rng)
    failed = await driver.metric(trio.decode, PULLS, 'kind="failed"')
    trio.faults["FD"].set(hold_before=True, drop=["ping"])
    prompt = random_tokens(rng, 600)
    first = await driver.prefill(trio.prefill, prompt)
    asked = asyncio.create_task(driver.ask(trio.decode, prompt, 8, first.params))
    await happened(driver, trio.faults["FD"], "hold_before")
    await driver.until_no_exports(trio.prefill, HANDOFF + LEASE + SLACK)
    for _ in range(2):
        await driver.ask(trio.prefill, random_tokens(rng, 3000), 1)
    trio.faults["FD"].set()
    reply = await asked
    assert reply.pulled == 0 and reply.seconds < TRANSFER + SLACK
    await driver.assert_right(reply, prompt)

    async def counted() -> bool:
        await driver.ask(trio.decode, [300, 301], 1)  # counters leave with the next step
        return await driver.metric(trio.decode, PULLS, 'kind="failed"') == failed + 1

    await driver.until(counted, 20.0, "the failed pull was counted")


async def test_failed_read_recomputes_or_fails_strict_request_only(trio, driver):
    """By default the request is computed; the strict engine fails this request alone."""
    rng = random.Random("reads fail")
    for engine in (trio.decode, trio.strict):
        await assert_pulls_again(driver, trio, rng, engine)
    for name in ("FD", "FS"):
        trio.faults[name].set(fail_reads=True)
    prompt = random_tokens(rng, 700)
    before = await driver.metric(trio.decode, PULLS, 'kind="failed"')
    _, reply = await driver.hand_off(trio.prefill, trio.decode, prompt)
    assert reply.pulled == 0
    await driver.assert_right(reply, prompt)
    with pytest.raises(Refused) as refusal:
        await driver.hand_off(trio.prefill, trio.strict, prompt)
    assert refusal.value.status >= 500
    await driver.until_no_exports(trio.prefill)
    for name in ("FD", "FS"):
        trio.faults[name].set()
    for engine in (trio.decode, trio.strict):
        prompt = random_tokens(rng, 200)
        _, reply = await driver.hand_off(trio.prefill, engine, prompt)
        assert reply.pulled == 200, "a failed read is no reason not to read again"
        await driver.assert_right(reply, prompt)
    assert await driver.metric(trio.decode, PULLS, 'kind="failed"') == before + 1


@pytest.mark.parametrize("lost", ["release", "lease_granted", "lease_refused", "ping"])
async def test_lost_messages_recompute_and_release(trio, driver, lost):
    """Each kind of message, lost from both sides: answers are right, and time limits free what it would have."""
    rng = random.Random(f"lost {lost}")
    for name in ("FP", "FD"):
        trio.faults[name].set(drop=[lost, "release_export"])

    def met() -> bool:
        """A ping is only sent while a lease gets old; an engine that was unavailable in a test before is not asked at
        once."""
        return lost == "ping" or trio.faults["FD" if lost == "release" else "FP"].happened(f"drop {lost}") > 0

    for number in range(6):
        if number >= 2 and met():
            break
        prompt = random_tokens(rng, 300)
        first = await driver.prefill(trio.prefill, prompt)
        if lost == "lease_refused":  # what there is to refuse: an export that the prefill engine does not have
            first.params["kvtier"]["export"] = first.params["remote_request_id"] = "gone"
            first.params["remote_block_ids"] = []
        reply = await driver.ask(trio.decode, prompt, 8, first.params)
        assert reply.seconds < SHORT["lookup_timeout"] + SHORT["handshake_timeout"] + SLACK
        await driver.assert_right(reply, prompt)
    assert met()
    # Meanwhile a connection whose pings were lost is given up too, which is not to happen in the next test.
    await driver.until_no_exports(trio.prefill, LEASE + HANDOFF + SLACK)
    trio.faults["FP"].set()
    trio.faults["FD"].set()
    await assert_pulls_again(driver, trio, rng)


async def test_abort_during_pull_releases_export_after_the_read(trio, driver):
    """Not before: the prefill engine may not reuse what is still being read."""
    rng = random.Random("abort in read")
    await assert_pulls_again(driver, trio, rng)
    trio.faults["FD"].set(hold_after=True)
    prompt = random_tokens(rng, 600)
    first = await driver.prefill(trio.prefill, prompt)
    before = trio.faults["FD"].happened("hold_after")
    leaving = asyncio.create_task(driver.ask(trio.decode, prompt, 400, first.params))
    await happened(driver, trio.faults["FD"], "hold_after", before + 1)

    async def leased() -> bool:  # a read may begin before
        return (await driver.inspect(trio.prefill)).leases == 1

    await driver.until(leased, 10, "the prefill engine grants the lease")
    leaving.cancel()
    await asyncio.wait([leaving])
    # The engine hears of it, and still holds what is being written.
    waiting = await driver.ask(trio.decode, random_tokens(rng, 40), 4)
    assert len(waiting.tokens) == 4
    d, p = await driver.inspect(trio.decode), await driver.inspect(trio.prefill)
    assert d.free_blocks < d.blocks - 1 - 600 // 32 and d.requests == 1
    assert p.free_blocks < p.blocks - 1 - 600 // 32 and p.leases == 1
    trio.faults["FD"].set()
    await driver.until_no_exports(trio.prefill)
    await driver.until_idle(trio.decode, seconds=SHORT["retain_seconds"] + SLACK)
