"""Engines that die, stall and lie, and clients that leave."""

import asyncio
import random
import socket
import time

import httpx
import pytest
from proxy_fakes import Cluster, FakeEngine, alone, events, text_of, turn, unanswered

from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.engines import engine as engine_module
from vllm_kvtier.proxy.engines import export_release
from vllm_kvtier.proxy.engines.engine import Engine, EngineFailure
from vllm_kvtier.proxy.engines.engine_http import Secrets
from vllm_kvtier.proxy.routes.generation import Generation


async def begin_stream(c: Cluster, *texts: str, **fields) -> httpx.Response:
    request = c.client.build_request("POST", "/v1/chat/completions", json=turn(*texts, stream=True, **fields))
    return await c.client.send(request, stream=True)


async def until_asked(c: Cluster, engine: FakeEngine) -> None:
    """Send requests until ``engine`` gets one; all are served."""
    before = len(engine.seen)
    for i in range(10):
        assert (await c.chat(f"{before} {i}")).status_code == 200
        if len(engine.seen) > before:
            return
    raise AssertionError("it gets no requests")


async def within(seconds: float, awaitable):
    return await asyncio.wait_for(awaitable, seconds)


# ---------------------------------------------------------------- the prefill engine


async def test_prefill_engine_dead_decode_engine_computes_until_it_is_back():
    async with Cluster() as c:
        await c.p[0].kill()
        for _ in range(2):
            reply = await within(5, c.chat("u1"))
            assert reply.status_code == 200
        assert all(alone(seen) for seen in c.d[0].seen)
        counts = c.core.state()["counts"]
        assert counts["prefill_failures"] == 1, "an unavailable prefill engine gets no request"
        assert counts["decoded_alone"] == 2
        await c.p[0].start()
        await c.until(lambda: c.core.prefill[0].healthy)
        await c.chat("u1")
        assert not alone(c.d[0].seen[-1])


async def test_prefill_engine_killed_while_computing_leaves_prompt_to_decode_engine():
    async with Cluster() as c:
        c.p[0].hold = asyncio.Event()
        asked = asyncio.create_task(c.chat("u1"))
        await c.p[0].until_seen(1)
        await c.p[0].kill()
        reply = await within(5, asked)
        assert reply.status_code == 200 and alone(c.d[0].seen[0])


async def test_stalled_prefill_engine_meets_deadline_and_is_aborted():
    async with Cluster(prefill_timeout=0.2) as c:
        c.p[0].hold = asyncio.Event()
        reply = await within(5, c.chat("u1"))
        assert reply.status_code == 200 and len(c.d[0].seen) == 1
        await within(5, c.p[0].seen[0].aborted.wait())
        assert c.core.prefill[0].failures and c.core.prefill[0].instance


async def test_prefill_engine_that_had_but_the_rest_of_the_time_is_only_probed(monkeypatch):
    """Others had most of it. This one is well, and computes."""
    monkeypatch.setattr(Generation, "_prefill_deadline", lambda self: time.monotonic() + 0.1)
    async with Cluster(prefill_timeout=600) as c:
        c.p[0].hold = asyncio.Event()
        reply = await within(5, c.chat("u1"))
        assert reply.status_code == 200 and alone(c.d[0].seen[0])
        await c.until(lambda: c.p[0].probes)
        engine = c.core.prefill[0]
        assert engine.healthy and not engine.failures and not engine.instance
        monkeypatch.undo()
        c.p[0].hold = None
        await c.chat("u2")
        assert not alone(c.d[0].seen[-1])


async def test_prefill_retry_uses_another_engine_and_backoff_grows(monkeypatch):
    monkeypatch.setattr(engine_module, "_ERROR_SECONDS", 0.0)
    async with Cluster(p=2) as c:
        c.p[0].status = 500
        for _ in range(6):
            await until_asked(c, c.p[0])
            await c.until(lambda: c.core.prefill[0].healthy)
        assert c.core.prefill[0].failures == 2, "a good probe does not make up for bad requests"
        c.p[0].status = 200
        await until_asked(c, c.p[0])
        assert c.core.prefill[0].failures == 0


async def test_requests_that_fail_at_prefill_engines_only_do_not_take_them_from_others(monkeypatch):
    """As pictures of a host that refuses the prefill engines, and not the decode engine."""
    monkeypatch.setattr(engine_module, "_ERROR_SECONDS", 0.0)
    async with Cluster(p=2) as c:
        for i in range(8):
            c.p[0].status = c.p[1].status = 500
            assert (await c.chat(f"bad {i}")).status_code == 200 and alone(c.d[0].seen[-1])
            c.p[0].status = c.p[1].status = 200
            assert (await c.chat(f"good {i}")).status_code == 200 and not alone(c.d[0].seen[-1])


async def test_errors_in_a_row_count_as_the_engines_own_only_after_a_while(monkeypatch):
    """Else a client's burst would take the engine from requests that it computes."""
    monkeypatch.setattr(engine_module, "_ERROR_SECONDS", 1000.0)
    async with Cluster(backoff_initial=60, backoff_max=60) as c:
        c.p[0].status = 500
        for i in range(10):
            assert (await c.chat(f"u{i}")).status_code == 200
        assert len(c.p[0].seen) == 10 and c.core.prefill[0].healthy
        monkeypatch.setattr(engine_module, "_ERROR_SECONDS", 0.0)
        await c.chat("the last")
        assert not c.core.prefill[0].healthy


async def test_prefill_engine_with_failing_health_stays_unavailable():
    async with Cluster() as c:
        c.p[0].status, c.p[0].health = 503, 503
        await c.chat("u1")
        await c.until(lambda: c.p[0].probes >= 3)
        assert not c.core.prefill[0].healthy and c.core.prefill[0].failures >= 3
        assert len(c.p[0].seen) == 1


@pytest.mark.parametrize("drops", [1, 2])
async def test_connection_closed_under_request_is_retried_once(drops):
    """An engine may close a kept connection just as a request arrives on it; that is no sick engine."""
    connections = 0

    async def serve(reader, writer):
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        if connections > drops:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    config = ProxyConfig(decode=(EngineAddress("http://unused:1"),), backoff_initial=60, backoff_max=60)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        engine = Engine("prefill", 0, EngineAddress(f"http://127.0.0.1:{port}"), config, Secrets())
        if drops == 1:
            reply = await within(5, engine.ask("POST", "/v1/completions", b"{}", {}, 5))
            assert await reply.read(10, 5) == b"{}"
            reply.close()
        else:
            with pytest.raises(EngineFailure, match="broke off"):
                await within(5, engine.ask("POST", "/v1/completions", b"{}", {}, 5))
        assert connections == 2
        await engine.aclose()


async def test_malformed_kv_transfer_params_of_engines_are_ignored():
    async with Cluster() as c:
        c.p[0].params = lambda body: ["not", "an", "object"]
        c.d[0].params = lambda body: {"remote_port": "x", "remote_host": 5, "kvtier": []}
        assert (await c.chat("u1")).status_code == 200
        assert (await c.chat("u1", stream=True)).status_code == 200
        assert c.core.decode[0].source is None


# ---------------------------------------------------------------- the decode engine


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_engine_dead_another_gets_the_same_params(stream):
    async with Cluster(d=2) as c:
        await c.chat("u1")
        home, other = c.d if c.d[0].seen else c.d[::-1]
        await home.kill()
        reply = await within(5, c.chat("u1", "a1", "u2", stream=stream))
        assert reply.status_code == 200
        assert other.name in (text_of(reply.content) if stream else reply.text)
        assert len(c.p[0].seen) == 2, "P is not asked again"
        assert other.seen[0].body["kv_transfer_params"]["kvtier"]["export"] == "secret-export-P0-2"
        # The dead one is no source any more, also when it is back with an empty cache.
        await home.start()
        await c.until(lambda: all(d.healthy for d in c.core.decode))
        await c.chat("u1", "a1", "u2", "a2", "u3")
        sources = c.p[0].seen[-1].body["kv_transfer_params"]["kvtier"]["sources"]
        assert [s["engine_id"] for s in sources] == [f"id-{other.name}-1"]
        assert len(other.seen) == 2, "the conversation lives where it went"


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_engine_killed_before_first_byte_is_retried(stream):
    async with Cluster(d=2) as c:
        for d in c.d:
            d.hold = asyncio.Event()
        asked = asyncio.create_task(c.chat("u1", stream=stream))
        await c.until(lambda: c.d[0].seen or c.d[1].seen)
        first, other = c.d if c.d[0].seen else c.d[::-1]
        other.hold = None
        await first.kill()
        reply = await within(5, asked)
        assert reply.status_code == 200 and other.name in reply.text and first.name not in reply.text
        assert c.released.empty(), "the other D took the export"


async def test_decode_engine_killed_between_headers_and_first_byte_is_retried():
    async with Cluster(d=2) as c:
        for d in c.d:
            d.gate = asyncio.Semaphore(0)
        asked = asyncio.create_task(c.chat("u1", stream=True))
        await c.until(lambda: c.d[0].seen or c.d[1].seen)
        first, other = c.d if c.d[0].seen else c.d[::-1]
        other.gate = None
        await first.kill()
        reply = await within(5, asked)
        assert text_of(reply.content) == "".join(other.text(turn("u1"), i) for i in range(4))


@pytest.mark.parametrize("stream", [False, True])
async def test_decode_engine_stalled_meets_deadline(stream):
    """An answer that is not streamed may be a long one: it is not computed again."""
    async with Cluster(d=2, first_byte_timeout=0.3, answer_timeout=0.3) as c:
        for d in c.d:
            d.hold = asyncio.Event()
        asked = asyncio.create_task(c.chat("u1", stream=stream))
        await c.until(lambda: c.d[0].seen or c.d[1].seen)
        first, other = c.d if c.d[0].seen else c.d[::-1]
        other.hold = None
        reply = await within(5, asked)
        assert (reply.status_code, other.name in reply.text) == ((200, True) if stream else (504, False))
        await within(5, first.seen[0].aborted.wait())
        await c.until(lambda: stream or not c.released.empty())


async def test_decode_engine_killed_after_first_bytes_ends_stream_with_error():
    async with Cluster(d=2) as c:
        for d in c.d:
            d.gate = asyncio.Semaphore(2)
        reply = await begin_stream(c, "u1")
        got = b""
        async for chunk in reply.aiter_raw():
            got += chunk
            if got.count(b"\n\n") == 2:
                await next(d for d in c.d if d.seen).kill()
        *chunks, error, done = events(got)
        name = next(d for d in c.d if d.seen).name
        assert [e["choices"][0]["text"][:2] for e in chunks] == [name, name]
        assert error["error"]["code"] == 502 and done == "[DONE]"
        assert sum(len(d.seen) for d in c.d) == 1, "what the client has seen is not made again"
        assert c.core.state()["counts"]["broken_streams"] == 1


@pytest.mark.parametrize("body", [turn("u1"), {"prompt": "u1"}], ids=["chat", "completion"])
async def test_stream_that_is_only_an_error_is_retried(body):
    """As of an engine whose core process has died: vLLM has answered 200 by then."""

    async def ask() -> httpx.Response:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        return await within(5, c.client.post(path, json=body | {"model": "m", "stream": True}))

    async with Cluster(d=2) as c:
        for d in c.d:
            d.stream_error = 500
        reply = await ask()
        assert reply.status_code == 500 and reply.json()["error"]["message"] == "it died"
        assert [len(d.seen) for d in c.d] == [1, 1] and all(engine.healthy for engine in c.core.decode)
        c.d[1].stream_error = None
        for _ in range(3):
            assert text_of((await ask()).content) == "".join(c.d[1].text(body, i) for i in range(4))


@pytest.mark.parametrize("body", [turn("u1"), {"prompt": "u1"}], ids=["chat", "completion"])
async def test_stream_that_is_only_a_refusal_is_refused(body):
    """vLLM has answered 200 when it finds out. Another engine would say the same, and this one computes nothing."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    async with Cluster(p=0, d=2) as c:
        c.d[0].stream_error = c.d[1].stream_error = 400
        reply = await within(5, c.client.post(path, json=body | {"model": "m", "stream": True}))
        assert reply.status_code == 400 and reply.json()["error"]["message"] == "it died"
        assert sum(len(d.seen) for d in c.d) == 1 and all(engine.healthy for engine in c.core.decode)
        assert not len(c.core.routes) and not len(c.core.prefixes)
        metrics = (await c.client.get("/metrics")).text
        assert f'kvtier_proxy_requests_total{{outcome="refused",route="{path}"}} 1.0' in metrics


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("body", [turn("u1"), {"prompt": [1, 2, 3]}], ids=["chat", "completion"])
async def test_request_that_an_engine_refuses_while_it_ends_is_sent_elsewhere(body, stream):
    """As vLLM does with --shutdown-timeout until its requests have ended: 200, and no token."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    asked = body | {"model": "m", "stream": stream}
    async with Cluster(p=2, d=2) as c:
        c.p[0].ends = c.d[0].ends = True
        for _ in range(4):
            reply = await within(5, c.client.post(path, json=asked))
            assert reply.status_code == 200 and b"abort" not in reply.content
        assert c.p[1].seen and all(seen.body["kv_transfer_params"].get("do_remote_prefill") for seen in c.d[1].seen)
        c.d[1].ends = True
        assert (await within(5, c.client.post(path, json=asked))).status_code == 503


@pytest.mark.parametrize("how", ["aborts", "answers 500"])
@pytest.mark.parametrize("restarts", [False, True])
async def test_engine_that_answers_keeps_its_cache_until_it_restarts(how, restarts, monkeypatch, caplog):
    """/pause and /abort_requests abort requests of an engine that lives on."""
    monkeypatch.setattr(engine_module, "_ERRORS", 1)
    monkeypatch.setattr(engine_module, "_ERROR_SECONDS", 0.0)
    async with Cluster(d=2) as c:
        await c.chat("u1")
        home = c.d[0] if c.d[0].seen else c.d[1]
        engine = c.core.decode[c.d.index(home)]
        home.ends, home.status = how == "aborts", 500 if how == "answers 500" else 200
        home.health = 503 if restarts else 200
        reply = await within(5, c.chat("u1", "a1", "u2"))
        # It may be available again by now.
        assert reply.status_code == 200 and f"engine unavailable (The decode engine {home.url}" in caplog.text
        if restarts:
            await c.until(lambda: engine.failures > 1)
            home.health = 200
        home.ends, home.status = False, 200
        await c.until(lambda: engine.healthy)
        await c.chat("u1", "a1", "u2", "a2", "u3")
        sources = c.p[0].seen[-1].body["kv_transfer_params"]["kvtier"]["sources"]
        assert [source["engine_id"] == f"id-{home.name}-1" for source in sources] == [False, True][: 2 - restarts]


async def test_silent_stream_ends_with_error_after_idle_timeout():
    async with Cluster(stream_idle_timeout=0.2) as c:
        c.d[0].gate = asyncio.Semaphore(1)
        reply = await begin_stream(c, "u1")
        got = b"".join([chunk async for chunk in reply.aiter_raw()])
        assert events(got)[-2]["error"]["code"] == 502
        await within(5, c.d[0].seen[0].aborted.wait())


async def test_all_decode_engines_dead_returns_error_and_releases_export():
    async with Cluster(d=2) as c:
        for d in c.d:
            await d.kill()
        reply = await within(5, c.chat("u1"))
        assert reply.status_code == 503 and reply.json()["error"]["type"] == "upstream_error"
        assert (await within(5, c.released.get())).export == "secret-export-P0-1"
        assert (await c.client.get("/ready")).status_code == 503
        assert (await c.client.get("/health")).status_code == 200, "the proxy itself lives"
        assert (await c.client.get("/v1/models")).json()["data"][0]["id"] == "P0", "any engine can say"
        # They are tried nevertheless: a decode engine that is back serves before its probe.
        await c.d[1].start()
        assert (await within(5, c.chat("u1"))).status_code == 200


async def test_decode_errors_of_all_engines_reach_client_after_bounded_attempts():
    async with Cluster(d=4, max_decode_attempts=3) as c:
        for d in c.d:
            d.status = 500
        reply = await c.chat("u1")
        assert reply.status_code == 500 and "says 500" in reply.json()["error"]["message"]
        assert sum(len(d.seen) for d in c.d) == 3


async def test_request_that_all_engines_answer_with_500_makes_none_unavailable():
    """vLLM does that if it cannot fetch a picture. One client could keep the proxy from being ready."""
    async with Cluster(p=2, d=3) as c:
        await c.chat("u0")
        for engine in (*c.p, *c.d):
            engine.status = 500
        probes = sum(engine.probes for engine in (*c.p, *c.d))
        assert (await c.chat("u1")).status_code == 500
        assert c.core.ready and all(engine.healthy and engine.failures == 0 for engine in c.core.fleet)
        await c.until(lambda: sum(engine.probes for engine in (*c.p, *c.d)) == probes + 5)
        assert all(engine.healthy for engine in c.core.fleet)
        # An engine that is not well says so.
        c.d[0].health = 503
        assert (await c.chat("u2")).status_code == 500
        await c.until(lambda: [engine.healthy for engine in c.core.decode] == [False, True, True])


async def test_decode_engine_that_only_answers_500_to_what_another_serves_becomes_unavailable(monkeypatch):
    monkeypatch.setattr(engine_module, "_ERROR_SECONDS", 0.0)
    async with Cluster(p=0, d=2, backoff_initial=60, backoff_max=60) as c:
        for status in (500, 500, 200, 500, 500):
            c.d[0].status = status
            await until_asked(c, c.d[0])
        assert c.core.decode[0].healthy, "it served one"
        for i in range(4):
            assert (await c.chat(f"v{i}")).status_code == 200
        assert [engine.healthy for engine in c.core.decode] == [False, True]
        assert len(c.d[0].seen) == 6


@pytest.mark.parametrize("path", ["/v1/models", "/v1/messages"])
async def test_engine_that_only_does_light_work_is_no_engine_that_serves(path, monkeypatch):
    """Its API server may answer what its core cannot."""
    monkeypatch.setattr(engine_module, "_ERROR_SECONDS", 0.0)
    async with Cluster(p=0, d=2, backoff_initial=60, backoff_max=60) as c:
        for _ in range(3):
            c.d[0].status = 500
            await until_asked(c, c.d[0])
            c.d[0].status, c.d[1].status = 200, 500
            reply = await c.client.request("POST" if "messages" in path else "GET", path, json={})
            assert reply.status_code == 200
            c.d[1].status = 200
        assert c.core.decode[0].healthy == (path == "/v1/messages")


# ---------------------------------------------------------------- clients that leave


async def test_client_leaving_during_prefill_aborts_it():
    async with Cluster() as c:
        c.p[0].hold = asyncio.Event()
        asked = asyncio.create_task(c.chat("u1"))
        await c.p[0].until_seen(1)
        asked.cancel()
        await within(5, c.p[0].seen[0].aborted.wait())
        await c.until(lambda: c.core.prefill[0].outstanding == 0)
        assert not c.d[0].seen and c.core.prefill[0].healthy
        assert c.core.state()["counts"]["clients_left"] == 1


async def test_client_leaving_before_decode_starts_aborts_it():
    async with Cluster() as c:
        c.d[0].hold = asyncio.Event()
        asked = asyncio.create_task(c.chat("u1", stream=True))
        await c.d[0].until_seen(1)
        asked.cancel()
        await within(5, c.d[0].seen[0].aborted.wait())
        assert (await within(5, c.released.get())).export == "secret-export-P0-1"
        assert c.core.decode[0].healthy


async def test_client_leaving_during_connect_to_decode_engine_releases_export():
    """After the prefill and before the decode request, only the proxy can release the export."""
    async with Cluster(connect_timeout=30) as c:
        await c.d[0].kill()
        with unanswered(c.d[0].port):
            asked = asyncio.create_task(c.chat("u1"))
            await c.until(lambda: c.p[0].seen and c.core.prefill[0].outstanding == 0)
            asked.cancel()
            assert (await within(5, c.released.get())).export == "secret-export-P0-1"
            await c.until(lambda: c.core.decode[0].outstanding == 0)


async def test_client_leaving_during_stream_aborts_decode():
    async with Cluster() as c:
        c.d[0].gate = asyncio.Semaphore(1)
        reply = await begin_stream(c, "u1")
        await anext(reply.aiter_raw())
        await reply.aclose()
        await within(5, c.d[0].seen[0].aborted.wait())
        await c.until(lambda: c.core.decode[0].outstanding == 0)
        assert c.released.empty() and c.core.decode[0].healthy


async def test_client_that_reads_nothing_is_disconnected_after_timeout():
    async with Cluster(client_timeout=0.3) as c:
        c.d[0].chunks = 10**9
        c.d[0].text = lambda body, i: "x" * 65536
        with socket.create_connection(("127.0.0.1", int(c.url.rpartition(":")[2]))) as client:
            body = b'{"model":"m","stream":true,"messages":[{"role":"user","content":"u"}]}'
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
            client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            await c.d[0].until_seen(1)
            await within(20, c.d[0].seen[0].aborted.wait())


async def test_client_that_never_sends_its_body_gets_408():
    async with Cluster(client_timeout=0.2) as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{")
        assert b"408" in await within(5, reader.readline())
        writer.close()


# ---------------------------------------------------------------- releases


async def test_failed_release_is_harmless_and_logged_once(caplog):
    async def unreachable(export):
        raise ConnectionError("not listening")

    releaser = export_release.ExportReleaser(unreachable)
    for _ in range(3):
        releaser.schedule(export_release.Export("h", 5, "secret-export"))
    await releaser.aclose()
    assert releaser.released == 0
    (record,) = [r for r in caplog.records if r.name == export_release.logger.name]
    assert "not listening" in record.getMessage() and "secret-export" not in record.getMessage()


# ---------------------------------------------------------------- all at once


async def test_conversations_continue_while_engines_fail_and_return():
    """Whatever engine dies, complete answers are right, errors are reported, and no slot or export is leaked."""
    rng = random.Random(20261121)
    async with Cluster(p=2, d=3, stream_idle_timeout=5, prefill_timeout=5, first_byte_timeout=5) as c:
        served = broken = left = 0
        over = asyncio.Event()

        async def conversation(i: int) -> None:
            nonlocal served, broken, left
            texts = [f"begin {i}"]
            for _ in range(8):
                stream = rng.random() < 0.5
                if rng.random() < 0.1:
                    asked = asyncio.create_task(c.chat(*texts, stream=stream))
                    await asyncio.sleep(rng.random() * 0.02)
                    asked.cancel()
                    left += 1
                    continue
                reply = await within(15, c.chat(*texts, stream=stream))
                if reply.status_code == 503 or b'"error"' in reply.content:
                    broken += 1
                    continue
                assert reply.status_code == 200
                text = text_of(reply.content) if stream else reply.json()["choices"][0]["text"]
                engine = next(d for d in c.d if d.name == text[:2])
                assert text == "".join(engine.text(turn(*texts), k) for k in range(4 if stream else 1))
                served += 1
                texts += [text, "more"]

        async def chaos() -> None:
            while not over.is_set():
                engine = rng.choice([*c.p, *c.d])
                await engine.kill()
                await asyncio.sleep(rng.random() * 0.05)
                await engine.start()
                await asyncio.sleep(rng.random() * 0.05)

        chaos_task = asyncio.create_task(chaos())
        await asyncio.gather(*(conversation(i) for i in range(12)))
        over.set()
        await chaos_task
        assert served > 40, (served, broken, left)
        await c.until(lambda: all(e.outstanding == 0 and e.healthy for e in (*c.core.prefill, *c.core.decode)))
        assert (await c.chat("and still")).status_code == 200
