"""Engines that break off an answer that they have begun: by the request's fault, or because they have died or hang."""

import asyncio

import pytest
from proxy_fakes import Cluster, turn

from vllm_kvtier.proxy.engines import engine as engine_module

STREAMS = ("/v1/responses", "/v1/messages", "/custom", "/v1/chat/completions")
OPTIONS = dict(p=0, backoff_initial=60, backoff_max=60, extra_routes=("/custom",))
BODY = turn("hello", stream=True, input="hello")


async def probed(c, fake, count=1):
    """The engine has been asked for its health, and the proxy has the answer."""
    await c.until(lambda: fake.probes == count and all(engine._prober is None for engine in c.core.decode))


@pytest.mark.parametrize("path", STREAMS)
async def test_stream_that_breaks_off_by_its_request_takes_no_engine_from_others(path):
    """vLLM breaks off streams of /v1/responses that ask for what it does not have, behind ``response.created``."""
    async with Cluster(**OPTIONS) as c:
        (fake,), (engine,) = c.d, c.core.decode
        await c.chat("u1", conversation_id="others")
        fake.breaks = True
        for count in (1, 2, 3):
            reply = await c.client.post(path, json=BODY)
            assert reply.status_code == 200 and b"The engine that generated this answer failed." in reply.content
            assert (await c.client.get("/ready")).status_code == 200
            await probed(c, fake, count)
            assert c.core.state()["counts"]["broken_streams"] == count
        fake.breaks = False
        assert engine.healthy and not engine.failures and not engine.instance and engine.last_named is not None
        assert (await c.chat("u1", "a1", "u2", conversation_id="others")).status_code == 200


@pytest.mark.parametrize("path", STREAMS)
async def test_engine_that_dies_within_a_stream_is_unavailable_at_once(path):
    async with Cluster(**OPTIONS) as c:
        (fake,), (engine,) = c.d, c.core.decode
        fake.gate = asyncio.Semaphore(1)
        async with c.client.stream("POST", path, json=BODY) as reply:
            pieces = reply.aiter_raw()
            await anext(pieces)
            await fake.kill()
            rest = b"".join([piece async for piece in pieces])
        assert b"failed" in rest
        await c.until(lambda: not engine.healthy)
        assert engine.instance == engine.failures == 1 and engine.last_named is None
        assert c.core.state()["counts"]["broken_streams"] == 1


async def test_engine_that_ends_while_it_is_unavailable_is_forgotten():
    """It may come back before its next probe, with an empty cache."""
    async with Cluster(**OPTIONS) as c:
        (fake,), (engine,) = c.d, c.core.decode
        fake.gate = asyncio.Semaphore(1)
        async with c.client.stream("POST", "/v1/messages", json=BODY) as reply:
            pieces = reply.aiter_raw()
            await anext(pieces)
            engine.mark_unavailable("It is shut down.", may_have_restarted=False)
            assert not engine.instance
            await fake.kill()
            assert b"failed" in b"".join([piece async for piece in pieces])
        assert engine.instance == 1 and not fake.probes


async def test_engine_that_breaks_off_and_hangs_is_unavailable_after_the_probe():
    async with Cluster(**OPTIONS, probe_timeout=0.05) as c:
        (fake,), (engine,) = c.d, c.core.decode
        fake.breaks, fake.health_hold = True, asyncio.Event()
        await c.client.post("/v1/messages", json=BODY)
        await c.until(lambda: not engine.healthy)
        assert engine.instance == fake.probes == 1


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize("hangs", [False, True])
async def test_engine_that_is_silent_within_a_stream_is_probed(path, hangs):
    """vLLM's parsers of tools may send nothing for long."""
    async with Cluster(**OPTIONS, stream_idle_timeout=0.05, probe_timeout=0.2) as c:
        (fake,), (engine,) = c.d, c.core.decode
        fake.gate = asyncio.Semaphore(1)
        fake.health_hold = asyncio.Event() if hangs else None
        assert b"failed" in (await c.client.post(path, json=BODY)).content
        await probed(c, fake) if not hangs else await c.until(lambda: not engine.healthy)
        assert engine.healthy is not hangs and engine.instance == hangs


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/completions"])
async def test_stream_that_breaks_off_before_its_first_event_goes_to_another_engine(path):
    async with Cluster(**OPTIONS, d=2) as c:
        fake, (engine, spare) = c.d[0], c.core.decode
        fake.chunks, fake.breaks, spare.weighted_picks = 0, True, 1e9

        def ask(text):  # another one each time, or the conversation stays where it was served
            return c.client.post(path, json=turn(text, stream=True, prompt=text))

        for text in ("one", "two"):
            reply = await ask(text)
            assert reply.status_code == 200 and b"D1/" in reply.content and b"failed" not in reply.content
        await c.until(lambda: engine._prober is None)
        assert engine.healthy and spare.healthy and not engine.instance
        engine._first_error -= 11.0  # and it has served nothing since
        assert (await ask("three")).status_code == 200
        assert not engine.healthy and not engine.instance and spare.healthy


async def test_stored_response_that_breaks_off_before_its_first_event_is_not_run_twice():
    async with Cluster(**OPTIONS, d=2) as c:
        for fake in c.d:
            fake.chunks, fake.breaks = 0, True
        assert (await c.client.post("/v1/responses", json=BODY)).status_code == 502
        assert sum(len(fake.passed) for fake in c.d) == 1
        await c.until(lambda: sum(fake.probes for fake in c.d) == 1)
        assert all(engine.healthy for engine in c.core.decode)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/custom"])
async def test_answer_beyond_answer_timeout_is_504_and_takes_no_engine_from_others(path):
    """It may just be long: three engines computed it in vain, and none was left."""
    async with Cluster(**OPTIONS, d=3, answer_timeout=0.1) as c:
        for fake in c.d:
            fake.hold = asyncio.Event()
        reply = await c.client.post(path, json=turn("hello"))
        assert reply.status_code == 504 and "longer than 0.1 s" in reply.text
        assert reply.headers["x-should-retry"] == "false"
        await c.until(lambda: sum(fake.probes for fake in c.d) == 1 and not any(e._prober for e in c.core.decode))
        assert sum(len(fake.seen) + len(fake.passed) for fake in c.d) == 1
        assert all(engine.healthy and not engine.instance for engine in c.core.decode)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_stream_that_begins_late_is_tried_once_more_and_takes_no_engine_from_others(path):
    async with Cluster(**OPTIONS, d=3, first_byte_timeout=0.1) as c:
        for fake in c.d:
            fake.hold = asyncio.Event()
        assert (await c.client.post(path, json=BODY)).status_code == 503
        await c.until(lambda: sum(fake.probes for fake in c.d) == 2 and not any(e._prober for e in c.core.decode))
        assert sum(len(fake.seen) + len(fake.passed) for fake in c.d) == 2
        assert all(engine.healthy and not engine.instance for engine in c.core.decode)


async def test_late_engine_that_hangs_is_unavailable_after_the_probe():
    async with Cluster(**OPTIONS, answer_timeout=0.05, probe_timeout=0.05) as c:
        (fake,), (engine,) = c.d, c.core.decode
        fake.hold = fake.health_hold = asyncio.Event()
        assert (await c.chat("u1")).status_code == 504
        await c.until(lambda: not engine.healthy)
        assert engine.instance == fake.probes == 1


async def test_late_engine_that_answers_probes_is_used_less_and_less(monkeypatch):
    """As vLLM's API server does whose GPU or collective hangs: /health tells only whether the core process lives."""
    monkeypatch.setattr(engine_module, "_ERROR_SECONDS", 0.0)
    options = OPTIONS | {"backoff_initial": 0.01, "backoff_max": 3600}
    async with Cluster(**options, first_byte_timeout=0.05) as c:
        (fake,), (engine,) = c.d, c.core.decode
        fake.hold = asyncio.Event()

        async def late():
            await c.client.post("/v1/chat/completions", json=BODY)

        for times in (1, 2):
            await late()
            assert engine.healthy and engine._errors == times
        await late()
        assert not engine.healthy and engine.failures == 1 and not engine.instance
        await c.until(lambda: engine.healthy)
        await late()
        assert not engine.healthy and engine.failures == 2, "nothing has succeeded since"
        fake.hold = None
        await c.until(lambda: engine.healthy)
        assert (await c.chat("u1")).status_code == 200
        assert engine.failures == engine._errors == 0
