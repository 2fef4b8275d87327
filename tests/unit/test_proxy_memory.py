"""What the proxy holds of requests and answers is bounded, and so are descriptors and waits for names."""

import asyncio
import contextlib
import errno
import gc
import json
import os
import socket
import threading
from functools import partial

import aiohttp
import pytest
from proxy_fakes import Cluster, events, text_of, turn

from vllm_kvtier.proxy.engines.engine_http import EngineFailure, EngineHttp
from vllm_kvtier.proxy.messages.buffers import Held
from vllm_kvtier.proxy.messages.request_bodies import ClientRequest
from vllm_kvtier.proxy.routes import generation

# ---------------------------------------------------------------- memory of all requests together

MB = 1_000_000
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
BOUND = dict(max_body_bytes=MB, max_event_bytes=MB, max_buffered_bytes=MB)


class Full:
    """A session of a process that may open no more."""

    async def request(self, *_, **__):
        raise aiohttp.ClientConnectorError(None, OSError(errno.EMFILE, os.strerror(errno.EMFILE)))


def buffered(c):
    return c.core.state()["buffered_bytes"]


async def test_bodies_beyond_the_bound_of_all_get_503():
    async with Cluster(p=0, **BOUND) as c:
        c.d[0].hold = asyncio.Event()
        first = asyncio.create_task(c.chat("x" * 600_000))
        await c.d[0].until_seen(1)
        assert 500_000 < buffered(c)["bodies"] < 600_000
        reply = await c.chat("y" * 600_000)
        assert reply.status_code == reply.json()["error"]["code"] == 503
        assert reply.headers["retry-after"] == "1" and reply.json()["error"]["type"] == "overloaded_error"
        small = asyncio.create_task(c.chat("hello"))
        await c.d[0].until_seen(2)
        c.d[0].hold.set()
        assert (await first).status_code == (await small).status_code == 200
        assert (await c.chat("y" * 600_000)).status_code == 200
        assert buffered(c) == {"bodies": 0, "answers": 0} and c.core.state()["counts"]["memory_full"] == 1


async def test_bodies_are_dropped_when_their_answers_begin():
    """Streams last long."""
    async with Cluster(**BOUND) as c:
        bodies = lambda: sum(type(each) is ClientRequest for each in gc.get_objects())  # noqa: E731
        c.d[0].gate, before = asyncio.Semaphore(1), bodies()
        async with c.client.stream("POST", "/v1/chat/completions", json=turn("x" * 600_000, stream=True)) as reply:
            pieces = reply.aiter_bytes()
            await anext(pieces)
            assert buffered(c) == {"bodies": 0, "answers": 0}
            assert bodies() == before
            for _ in range(3):
                c.d[0].gate.release()
            assert b"[DONE]" in b"".join([piece async for piece in pieces])


@pytest.mark.parametrize("probe", ["check", "probe_in_background"])
async def test_probe_without_descriptors_says_nothing_of_its_engine(monkeypatch, probe):
    async with Cluster(p=0) as c:
        engine, connected, left = c.core.decode[0], EngineHttp._connected, [True, True]
        monkeypatch.setattr(EngineHttp, "_connected", lambda self: Full() if left and left.pop() else connected(self))
        getattr(engine, probe)()
        await asyncio.wait([engine._prober])
        assert engine.healthy and not engine.instance and not left and c.d[0].probes == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/responses"])
async def test_proxy_without_descriptors_makes_no_engine_unavailable(monkeypatch, path):
    async with Cluster(d=2) as c:
        monkeypatch.setattr(EngineHttp, "_connected", lambda self: Full())
        reply = await c.client.post(path, json=turn("hello"))
        assert reply.status_code == 503 and "retry-after" in reply.headers
        assert all(engine.healthy and engine.instance == 0 for engine in c.core.fleet)
        assert c.core.state()["counts"]["memory_full"] == 1


async def test_engines_are_reached_while_dns_does_not_answer(monkeypatch):
    async with Cluster() as c:
        port, dns, answers = int(c.core.decode[0].url.rpartition(":")[2]), {}, threading.Event()
        real = socket.getaddrinfo

        def getaddrinfo(host, *args, **options):
            if host != "engine.test":
                return real(host, *args, **options)
            if dns:
                dns["fault"]()
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

        def fails(error):
            raise socket.gaierror(error, "no answer")

        async def health(http, timeout=5.0):
            with contextlib.suppress(AttributeError):
                http._session.connector.clear_dns_cache()
            reply = await http.ask("GET", "/health", None, {"connection": "close"}, timeout, True)
            reply.close()
            return reply.status

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        known, new = (EngineHttp("D0", f"http://engine.test:{port}", 0.1) for _ in range(2))
        assert await health(known) == 200
        for dns["fault"] in (partial(fails, socket.EAI_AGAIN), answers.wait):
            assert await health(known) == 200
            with pytest.raises(EngineFailure) as caught:
                await health(new)
            assert caught.value.unreached
        answers.set()
        dns["fault"] = partial(fails, socket.EAI_NONAME)
        await c.until(lambda: not known._resolver._asking)
        with pytest.raises(EngineFailure):
            await health(known)
        await known.aclose()
        await new.aclose()


async def test_probe_while_dns_hangs_takes_the_last_address(monkeypatch):
    """The probe's limit passed just before the resolver's, which was the same. Of asyncio's threads none is kept."""
    async with Cluster() as c:
        port, dns = int(c.core.decode[0].url.rpartition(":")[2]), []
        answers, real = threading.Event(), socket.getaddrinfo

        def getaddrinfo(host, *args, **options):
            if dns:
                assert threading.current_thread().name.startswith("kvtier names")
                dns.append(host)
                answers.wait()
            return real("127.0.0.1", *args, **options)

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        http = EngineHttp("D0", f"http://engine.test:{port}", 1000.0)
        for timeout in (1000.0, 5.0, 0.4):  # from the second on, there is no time to wait for DNS
            reply = await http.ask("GET", "/health", None, {"connection": "close"}, timeout, True)
            reply.close()
            assert reply.status == 200
            dns.append("hangs")
            http._session.connector.clear_dns_cache()
        assert dns.count("engine.test") == 1, "the lookup goes on, and is used by all"
        answers.set()
        await http.aclose()


async def test_prompts_are_not_held_parsed_while_requests_wait():
    async with Cluster() as c:
        c.p[0].hold = asyncio.Event()
        task = asyncio.create_task(c.chat(*["not parsed"] * 301))
        await c.p[0].until_seen(1)
        requests = [each for each in gc.get_objects() if type(each) is ClientRequest]
        (request,) = (each for each in requests if b"not parsed" in bytes(each.fields.get("messages", b"")))
        assert request.prompt is None
        c.p[0].hold.set()
        assert (await task).status_code == 200 and len(c.d[0].seen[0].body["messages"]) == 301


async def test_bodies_of_clients_that_leave_are_not_counted():
    async with Cluster(p=0, **BOUND) as c:
        c.d[0].hold = asyncio.Event()
        task = asyncio.create_task(c.chat("x" * 600_000))
        seen = await c.d[0].until_seen(1)
        task.cancel()
        await asyncio.wait_for(seen.aborted.wait(), 10)
        await c.until(lambda: buffered(c) == {"bodies": 0, "answers": 0})


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_beyond_the_bound_of_all_get_503(stream):
    async with Cluster(**BOUND) as c:
        c.d[0].text = lambda body, i: "x" * 600_000
        with Held(c.core.answers) as others:
            others.resize(MB)
            reply = await c.chat("hello", stream=stream)
            assert reply.status_code == 503 and reply.headers["retry-after"] == "1"
            assert c.core.decode[0].healthy and not c.core.decode[0].outstanding
            assert c.core.state()["counts"]["memory_full"] == 1
            c.d[0].text = lambda body, i: "short"
            assert (await c.chat("hello", stream=stream)).status_code == 200, "small answers are not counted"
        c.d[0].text = lambda body, i: "x" * 600_000
        assert (await c.chat("hello", stream=stream)).status_code == 200
        assert buffered(c)["answers"] == 0


async def test_answer_that_meets_the_bound_in_its_middle_ends_with_an_error():
    async with Cluster(p=0, **BOUND) as c:
        c.d[0].gate = asyncio.Semaphore(1)
        with Held(c.core.answers) as others:
            async with c.client.stream("POST", "/v1/chat/completions", json=turn("hi", stream=True)) as reply:
                pieces = reply.aiter_bytes()
                first = await anext(pieces)
                others.resize(MB)
                c.d[0].text = lambda body, i: "x" * 600_000
                c.d[0].gate.release()
                found = events(first + b"".join([piece async for piece in pieces]))
        assert found[-1] == "[DONE]" and found[-2]["error"]["code"] == 502
        assert c.core.decode[0].healthy
        await asyncio.wait_for(c.d[0].seen[0].aborted.wait(), 10)


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_that_clients_do_not_read_are_counted_until_the_timeout(stream):
    async with Cluster(p=0, client_timeout=1) as c:
        c.d[0].text, c.d[0].chunks = lambda body, i: "x" * 16 * MB, 1
        held, count = [], c.core.count

        def count_left(event):
            count(event)
            if event == "clients_left":
                held.append(buffered(c)["answers"])

        c.core.count = count_left
        _, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]))
        body = json.dumps(turn("hello", stream=stream)).encode()
        writer.write(HEAD % len(body) + body)
        await c.until(lambda: held)
        writer.close()
        assert held[0] > 15 * MB and buffered(c)["answers"] == 0


@pytest.mark.parametrize("chunks", [1, 64], ids=["whole", "pieces"])
async def test_connections_of_clients_that_do_not_read_are_ended(chunks):
    """What the proxy has handed to the connection is never taken: it would stay, and its descriptor."""
    async with Cluster(p=0, client_timeout=0.3) as c:
        c.d[0].text, c.d[0].chunks = lambda body, i: "x" * (16 * MB // chunks), chunks
        connections = c._proxy.server_state.connections
        _, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]), limit=1024)
        body = json.dumps(turn("hello", stream=chunks > 1)).encode()
        writer.write(HEAD % len(body) + body)
        await c.until(lambda: c.core.state()["counts"].get("clients_left"))
        await c.until(lambda: not connections)
        writer.close()


async def test_kernel_checks_that_machines_of_engines_are_there():
    """A machine that vanishes closes nothing, and silence is no sign: a prompt may take minutes."""
    async with Cluster(p=0) as c:
        c.d[0].gate = asyncio.Semaphore(1)
        body = json.dumps(turn("hello", stream=True)).encode()
        reply = await c.core.decode[0].ask("POST", "/v1/chat/completions", body, {}, 10)
        connection = reply._response.connection.transport.get_extra_info("socket")
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        reply.close()


async def test_answer_that_is_sent_in_pieces_is_whole():
    async with Cluster(p=0) as c:
        c.d[0].text = lambda body, i: f"{i}" * MB
        assert (await c.chat("hello")).json()["choices"][0]["text"] == "0" * MB
        text = text_of((await c.chat("hello", stream=True)).content)
        assert text == "".join(f"{i}" * MB for i in range(c.d[0].chunks))


async def test_events_that_only_name_roles_are_held_up_to_a_limit(monkeypatch):
    """Until one that says something, another engine can be tried; a stream without one was held without end."""
    monkeypatch.setattr(generation, "_MAX_ROLES", 10_000)
    async with Cluster(p=0) as c:
        c.d[0].gate, c.d[0].roles = asyncio.Semaphore(0), 200
        async with c.client.stream("POST", "/v1/chat/completions", json=turn("x", stream=True)) as reply:
            pieces = reply.aiter_raw()
            assert b"role" in await asyncio.wait_for(anext(pieces), 10)
            for _ in range(c.d[0].chunks):
                c.d[0].gate.release()
            rest = b"".join([piece async for piece in pieces])
        assert rest.endswith(b"data: [DONE]\n\n")
