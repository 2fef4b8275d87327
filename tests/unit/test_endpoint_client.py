"""The client of engines' endpoints, as the proxy uses it for weeks: engines come and go, each at another address."""

import asyncio
import os
import socket

import pytest
import zmq.asyncio

from vllm_kvtier.errors import PeerRefused
from vllm_kvtier.proxy.deadlines import time_limit
from vllm_kvtier.wire import client as c
from vllm_kvtier.wire import messages as m


@pytest.fixture
def engine():
    """(a ROUTER that answers nothing by itself, its port)."""
    context = zmq.asyncio.Context()
    router = context.socket(zmq.ROUTER)
    yield router, router.bind_to_random_port("tcp://127.0.0.1")
    context.destroy(linger=0)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.timeout(20)
async def test_endpoint_client_ends_connections_to_engines_that_are_gone(monkeypatch):
    monkeypatch.setattr(c, "MAX_CONNECTIONS", 4)
    async with c.AsyncEndpointClient() as client:
        for port in range(1, 9):
            await client.release("127.0.0.1", port, "e")
        before = descriptors()
        for port in range(9, 60):
            await client.release("127.0.0.1", port, "e")
        while descriptors() > before:  # their unsent messages stay for a moment
            await asyncio.sleep(0.02)


async def test_endpoint_client_seldom_tries_engines_that_are_gone():
    """Fifty of them took 3 % of a processor."""
    async with c.AsyncEndpointClient() as client:
        await client.release("127.0.0.1", 1, "e")
        (connection,) = client._connections.values()
        assert connection.socket.getsockopt(zmq.RECONNECT_IVL_MAX) == 2000


async def test_endpoint_client_keeps_connections_in_use(monkeypatch, engine):
    monkeypatch.setattr(c, "MAX_CONNECTIONS", 1)
    router, port = engine
    async with c.AsyncEndpointClient(timeout=20.0) as client:
        asked = asyncio.create_task(client.query("127.0.0.1", port, [1, 2, 3]))
        identity, frame = await router.recv_multipart()
        for other in range(1, 9):
            await client.release("127.0.0.1", other, "e")
        question = m.decode_engine(frame).question
        await router.send_multipart([identity, m.encode(m.PrefixLengths(question, 3, 3, 2))])
        assert (await asked).gpu_cache == 3


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
@pytest.mark.parametrize("host", ["::1", "machine"])
async def test_endpoint_client_reaches_an_ipv6_address(monkeypatch, host):
    def getaddrinfo(name, port, *_):
        return [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", port, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    context = zmq.asyncio.Context()
    try:
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.IPV6, 1)
        try:
            port = router.bind_to_random_port("tcp://[::1]")
        except zmq.ZMQError as error:
            pytest.skip(f"no IPv6 loopback: {error}")
        async with c.AsyncEndpointClient() as client:
            await client.release(host, port, "e")
            received = await asyncio.wait_for(router.recv_multipart(), 5.0)
            assert m.decode_engine(received[1]) == m.ReleaseExport("e")
    finally:
        context.destroy(linger=0)


async def test_endpoint_client_says_that_a_name_has_no_address(monkeypatch):
    def getaddrinfo(name, port, *_):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with c.AsyncEndpointClient(timeout=20.0) as client:
        with pytest.raises(PeerRefused, match="machine:1 can be made: .*not known"):
            await client.release("machine", 1, "e")


async def test_endpoint_client_connects_again_after_a_malformed_answer(engine):
    router, port = engine
    async with c.AsyncEndpointClient(timeout=20.0) as client:
        for answer, then in ((b"nonsense", pytest.raises(PeerRefused)), (None, None)):
            asked = asyncio.create_task(client.query("127.0.0.1", port, [1]))
            identity, frame = await router.recv_multipart()
            good = m.encode(m.PrefixLengths(m.decode_engine(frame).question, 1, 1, 0))
            await router.send_multipart([identity, answer or good])
            if then is None:
                assert (await asked).gpu_cache == 1
            else:
                with then:
                    await asked


async def test_endpoint_client_keeps_no_question_after_its_timeout():
    """Of a machine that takes nothing, a hundred prompts would be kept, of some megabytes each."""
    context = zmq.asyncio.Context()
    try:
        with socket.socket() as reserved:
            reserved.bind(("127.0.0.1", 0))  # and does not listen
            port = reserved.getsockname()[1]
            async with c.AsyncEndpointClient(timeout=0.3) as client:
                with pytest.raises(TimeoutError):
                    await client.query("127.0.0.1", port, [1])
                with pytest.raises(TimeoutError):
                    async with time_limit(0.05):
                        await client.query("127.0.0.1", port, [2])
                reserved.close()
                router = context.socket(zmq.ROUTER)
                router.bind(f"tcp://127.0.0.1:{port}")
                client._timeout = 20.0
                asked = asyncio.create_task(client.query("127.0.0.1", port, [3]))
                _, frame = await router.recv_multipart()
                asked.cancel()
                assert m.decode_engine(frame).tokens == [3]
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("host", ["no such host", "*", "a b"])
async def test_endpoint_client_refuses_addresses_that_are_none(host):
    """An engine names its own address: a wrong one must not fail a query of all engines."""
    async with c.AsyncEndpointClient() as client:
        with pytest.raises(PeerRefused):
            await client.query(host, 5600, [1])


async def test_endpoint_client_raises_the_same_timeout_error_on_every_python(monkeypatch, engine):
    """Before Python 3.11, asyncio's is a class of its own, which callers do not catch."""

    class OfAsyncio(Exception):
        pass

    async def wait_for(work, timeout):
        work.close()
        raise OfAsyncio

    monkeypatch.setattr(asyncio, "TimeoutError", OfAsyncio)
    monkeypatch.setattr(asyncio, "wait_for", wait_for)
    async with c.AsyncEndpointClient() as client:
        with pytest.raises(TimeoutError, match="no answer in time"):
            await client.query("127.0.0.1", engine[1], [1])
