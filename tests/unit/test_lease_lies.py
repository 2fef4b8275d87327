"""What an engine that lies, or any process that connects, sends over real sockets: it affects no other peer."""

import contextlib
import os
import socket
import threading
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from endpoint_support import BLOCK_HASHES, Asker, Source, export, making, ranks, raw
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import eventually

from vllm_kvtier.scheduler.leases.exports import LeaseKind
from vllm_kvtier.scheduler.leases.lease_client import LeasedBlocks
from vllm_kvtier.scheduler.sources.base import LookupMiss
from vllm_kvtier.wire import dealer
from vllm_kvtier.wire import messages as m

pytestmark = pytest.mark.usefixtures("way")


@pytest.fixture
def make():
    yield from making()


frames = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [
            m.encode(m.LeaseGranted(1, 1, 4, 0, [[1]], 1.0)),
            m.encode(m.Welcome(1, "x", [])),
            m.encode(m.LeaseRefused(0, "x", "y")),
            m.encode(m.Release(1)),
            m.encode(m.Ping()),
            m.encode(m.ReleaseExport("other")),
            m.encode(m.LeaseRequest(1, "source/1", 1 << 40, BLOCK_HASHES)),
            m.encode(m.LeaseRequest(1, "source/1", 0, [])),
            msgspec.msgpack.encode({"type": "ask", "ask": 1}),
            msgspec.msgpack.encode({"type": "ask", "ask": -1, "instance": "i", "start": 0, "chain": []}),
            msgspec.msgpack.encode({"type": "ping", "x": [[[[[1]]]]]}),
            b"\x82\xa4type\xa4ping\xa1x" + b"\x91" * 5000 + b"\xc0",  # nested deep in an unknown field
            b"\xdd\xff\xff\xff\xff",  # an array of four billion elements, it says
            b"\x81\xa4type\xdb\xff\xff\xff\xff",
            b"\x82\xa4type\xa4drop\xa6export\xa2\xff\xff",  # not UTF-8
            b"\xc1",
            b"",
        ]
    ),
)


@given(st.lists(st.lists(frames, min_size=0, max_size=4), min_size=1, max_size=6))
@example([[b"\x82\xa4type\xa4ping\xa1x" + b"\x91" * 100000 + b"\xc0"]])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lease_server_malformed_messages_do_not_affect_other_peers(shared_source, caplog, garbage):
    source, asker = shared_source
    caplog.clear()
    offer = asker.answer(source.address, export="keep", digest=b"digest")
    assert isinstance(offer, LeasedBlocks)
    with raw(source.address, greet=len(garbage) % 2 == 0) as (socket, send, _):
        for parts in garbage:
            if parts:
                socket.send_multipart(parts)
        send(m.Query(1, []))
        before = len(source.queries)
        eventually(lambda: len(source.queries) > before or source.queries, 5)
        eventually(lambda: source.on_reactor(lambda: True))
    assert offer.lease in source.table._leases
    asker.peers.release(offer, done=False)
    eventually(lambda: offer.lease not in source.table._leases)
    assert "Traceback" not in caplog.text, caplog.text[-2000:]


@pytest.fixture(scope="module")
def shared_source():
    source, asker = Source(lease_seconds=60.0), Asker()  # no lease ends by itself
    source.table.add(export("keep", kind=LeaseKind.RETAINED, seconds=1000))
    yield source, asker
    asker.stop()
    source.stop()


def test_lease_server_oversized_message_disconnects_sender(make, monkeypatch):
    monkeypatch.setattr(m, "MAX_MESSAGE", 100_000)
    source, asker = make(Source), make(Asker)
    source.table.add(export("keep"))
    with raw(source.address) as (socket, send, receive):
        send(m.LeaseRequest(1, "source/1", 0, BLOCK_HASHES))
        assert isinstance(receive(), m.LeaseGranted)
        socket.send(b"\x00" * 200_000)
        eventually(lambda: source.leases() == 0, 3)
    assert isinstance(asker.answer(source.address), LeasedBlocks)


def test_lease_server_does_not_look_at_connections_without_leases(make, monkeypatch):
    """ZMQ does not report those that have gone: after days they are thousands, and a step took milliseconds longer."""
    source, looked = make(Source, lease_seconds=0.2), []
    for _ in range(3):
        with raw(source.address):
            pass
    with raw(source.address) as (socket, send, receive):
        disconnect = source.table.disconnect
        monkeypatch.setattr(source.table, "disconnect", lambda each: (looked.append(each), disconnect(each))[1])
        source.table.add(export("keep"))
        send(m.LeaseRequest(1, "source/1", 0, BLOCK_HASHES))
        assert isinstance(receive(), m.LeaseGranted)
        eventually(lambda: source.leases() == 0)  # it sends no heartbeat
    assert len(looked) == 1 and len(source.endpoint._connections) == 4


def test_connection_of_a_machine_that_vanished_ends(make, monkeypatch):
    """The kernel finds out, on both sides: with ZMQ's defaults it would hold a descriptor for ever."""
    monkeypatch.setattr(Asker, "near", "")  # over TCP
    source, asker, seconds = make(Source), make(Asker), []
    assert isinstance(asker.answer(source.address), LookupMiss)
    for fd in [int(name) for name in os.listdir("/proc/self/fd") if Path("/proc/self/fd", name).is_socket()]:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as each:  # OSError: it listens
            if source.address in (each.getsockname(), each.getpeername()):
                assert each.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                seconds.append(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE))
    assert seconds == [120, 120]


def test_lease_server_takes_no_more_from_a_client_than_it_reads(make, monkeypatch):
    """A question of two million tokens takes longer to read than to send."""
    monkeypatch.setattr(dealer, "MAX_RECEIVED_BYTES", 16 << 20)
    monkeypatch.setattr(m, "MAX_MESSAGE", 4 << 20)
    source, busy, sent = make(Source), threading.Event(), 0
    source.reactor.call_soon(lambda: busy.wait(60))
    question = m.encode(m.Query(1, [1 << 30] * (3 << 18)))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 1)
        socket.connect(f"tcp://{source.address[0]}:{source.address[1]}")
        while sent < 100 and socket.poll(1000, zmq.POLLOUT):
            socket.send(question)
            sent += 1
    busy.set()
    assert len(question) > 3 << 20 and 0 < sent < 40, f"{sent} questions of {len(question)} bytes wait"


def test_lease_server_malformed_message_releases_leases_of_sender(make):
    source = make(Source, lease_seconds=60)
    source.table.add(export())
    with raw(source.address) as (socket, send, receive):
        send(m.LeaseRequest(1, "source/1", 0, BLOCK_HASHES))
        assert isinstance(receive(), m.LeaseGranted)
        source.table.end_export("e")
        socket.send(b"\xc1")
        eventually(lambda: len(source.freed) == 8, 3)
        assert source.leases() == 0
        eventually(lambda: source.serving == [True, False])


@contextmanager
def liar(reply):
    """A server that greets properly, then answers each ask with ``reply(ask)`` (bytes or a message)."""
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    server.setsockopt(zmq.LINGER, 0)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    stop = threading.Event()

    def serve():
        while not stop.is_set():
            if not server.poll(20):
                continue
            identity, frame = server.recv_multipart()
            message = m.decode_engine(frame)
            if isinstance(message, m.Hello):
                server.send_multipart([identity, m.encode(m.Welcome(m.PROTOCOL, "liar/1", ranks()))])
            elif isinstance(message, m.LeaseRequest):
                answer = reply(message)
                server.send_multipart([identity, answer if isinstance(answer, bytes) else m.encode(answer)])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield ("127.0.0.1", port)
    finally:
        stop.set()
        thread.join(5)
        context.destroy(linger=0)


@pytest.mark.parametrize(
    "reply",
    [
        lambda ask: b"\xc1",
        lambda ask: b"\x82\xa4type\xa4ping\xa1x" + b"\x91" * 100000 + b"\xc0",
        lambda ask: m.Ping(),
        lambda ask: m.LeaseRefused(0, "namespace_mismatch", "no"),
    ],
    ids=["garbage", "deep", "unexpected", "refused"],
)
def test_lease_client_malformed_answer_ends_connection(make, reply, caplog):
    asker = make(Asker)
    with liar(reply) as address:
        got = asker.answer(address, 1.0)
        assert isinstance(got, LookupMiss) and got.code in ("malformed", "namespace_mismatch")
        assert not asker.peers._connections and asker.held() == 0
    assert "Traceback" not in caplog.text


def test_lease_client_oversized_answer_ends_request(make, monkeypatch):
    """ZMQ closes the connection, and does not try again by itself."""
    monkeypatch.setattr(m, "MAX_MESSAGE", 100_000)
    asker = make(Asker, lookup_timeout=60)
    with liar(lambda ask: b"\x00" * 200_000) as address:
        for _ in range(2):
            assert asker.answer(address, 20).code == "unreachable"
            assert not asker.peers._connections
