"""The node store's messages keep their bounds, and its frames survive every way of being cut, late or forged."""

import os
import socket
import struct
import threading

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from support import descriptors, eventually

from vllm_kvtier.store import protocol as m
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.stream import Stream, StreamLimits, read_frame, write_frame

NAMESPACE_ID = bytes(16)


@pytest.fixture
def reactor():
    reactor = Reactor("test")
    reactor.start()
    yield reactor
    reactor.stop()


class End:
    """One end of a connection on a reactor, and its messages."""

    def __init__(self, reactor: Reactor, sock: socket.socket, **limits):
        self.frames, self.reasons = [], []
        self.on_frame = self.frames.append
        made = threading.Event()

        def make() -> None:
            self.stream = Stream(reactor, sock, lambda f: self.on_frame(f), self.reasons.append, StreamLimits(**limits))
            made.set()

        reactor.call_soon(make)
        assert made.wait(5)


@pytest.fixture
def ends(reactor):
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    a.settimeout(10)
    yield a, End(reactor, b, max_frame=1 << 20, backlog=1 << 20)
    a.close()


# -- messages -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        m.Hello("e", 1, "engine", 16, [m.GroupShape(1, 4, None), m.GroupShape(4, 1, 1024)]),
        m.Lookup(1, NAMESPACE_ID, bytes(160), 3, 1 << 30),
        m.Reserve(1, NAMESPACE_ID, b"tenant", [0, 0], bytes(32), bytes(32), 5),
        m.Commit([1, 2, 3]),
        m.Discard(NAMESPACE_ID, 0, bytes(16), 7),
        m.Pin(1, NAMESPACE_ID, b"", False, leaves=True),
        m.Clear(1),
        m.Clear(1, NAMESPACE_ID),
        m.Lookup(1, NAMESPACE_ID, bytes(160), 3, 1 << 30, 1.5, ["node:1"], bytes(8), 4),
        m.Present(bytes(8), "127.0.0.1", 65535, "instance"),
        m.Cached(bytes(m.MAX_HASH_BLOCKS * 8), bytes(8), True),
        m.Follow([NAMESPACE_ID] * m.MAX_FOLLOWED),
        m.Labels(NAMESPACE_ID, [0, 1], bytes(32), [b"", bytes(m.MAX_LABEL)]),
        m.ChangesAck(),
    ],
)
def test_store_requests_round_trip(message):
    assert m.decode_request(m.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        m.Lookup(1, b"short", b"", 0, 0),
        m.Lookup(-1, NAMESPACE_ID, b"", 0, 0),
        m.Lookup(1, NAMESPACE_ID, bytes(m.MAX_HASH_BLOCKS * 16 + 1), 0, 0),
        m.Reserve(1, NAMESPACE_ID, bytes(17), [], b"", b"", 0),
        m.Reserve(1, NAMESPACE_ID, b"", [64], bytes(16), bytes(16), 0),
        m.Reserve(1, NAMESPACE_ID, b"", [0] * (m.MAX_ITEMS + 1), b"", b"", 0),
        m.Commit([0]),
        m.Commit([1 << 50]),
        m.Discard(NAMESPACE_ID, 0, bytes(15), 1),
        m.Hello("e", 1, "king"),
        m.Hello("e", 1, "engine", 16, [m.GroupShape(0, 1)]),
        m.Hello("e", 1, "engine", 16, [m.GroupShape(1, m.PIECE_BYTES // m.PAGE + 1)]),
        m.Hello("e" * 300, 1, "engine"),
        m.Done(1, 1),
        m.Lookup(1, NAMESPACE_ID, b"", 0, 0, key_mask=bytes(9)),
        m.Lookup(1, NAMESPACE_ID, b"", 0, 0, key_mask=bytes(8), hash_blocks_per_block=0),
        m.Lookup(1, NAMESPACE_ID, b"", 0, 0, key_mask=bytes(8), hash_blocks_per_block=(1 << 16) + 1),
        m.Present(bytes(7), "h", 1, "i"),
        m.Present(bytes(9), "h", 1, "i"),
        m.Present(bytes(8), "h" * 257, 1, "i"),
        m.Present(bytes(8), "h", 0, "i"),
        m.Present(bytes(8), "h", 65536, "i"),
        m.Present(bytes(8), "h", 1, "i" * 257),
        m.Cached(bytes(m.MAX_HASH_BLOCKS * 8 + 1), b""),
        m.Cached(b"", bytes(m.MAX_HASH_BLOCKS * 8 + 1)),
        m.PeerCount(1),
        m.Follow([NAMESPACE_ID] * (m.MAX_FOLLOWED + 1)),
        m.Follow([b"short"]),
        m.Labels(NAMESPACE_ID, [0], bytes(16), [bytes(m.MAX_LABEL + 1)]),
        m.Labels(NAMESPACE_ID, [m.MAX_GROUPS], bytes(16), [b""]),
        m.Changes(NAMESPACE_ID, False, [], b"", [], []),
    ],
)
def test_store_requests_out_of_bounds_raise(message):
    with pytest.raises(msgspec.DecodeError):
        m.decode_request(m.encode(message))


HOLDERS = [m.Holder("127.0.0.1", 7000, f"engine {n}", 12 - n) for n in range(m.MAX_HOLDERS)]


@pytest.mark.parametrize(
    "message",
    [
        m.PeerCount(3),
        m.Found(1, 0, 4, [[]], None, HOLDERS),
        m.Found(1, 2, 4, [[7]], m.TierQuery(4, 1.0, 0.0), HOLDERS[:1]),
    ],
)
def test_store_replies_round_trip(message):
    assert m.decode_reply(m.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        m.PeerCount(-1),
        m.Found(1, 0, 4, [[]], None, [*HOLDERS, *HOLDERS]),
        m.Found(1, 0, 4, [[]], None, [m.Holder("h", 0, "i", 1)]),
        m.Found(1, 0, 4, [[]], None, [m.Holder("h", 1, "i", -1)]),
        m.Found(1, 0, 4, [[]], None, [m.Holder("h" * 257, 1, "i", 1)]),
        m.Present(bytes(8), "h", 1, "i"),
    ],
)
def test_store_replies_out_of_bounds_raise(message):
    with pytest.raises(msgspec.DecodeError):
        m.decode_reply(m.encode(message))


SMALL = st.integers(0, 1 << 20)
WORDS = st.text(max_size=12)
HOLDER = st.builds(m.Holder, WORDS, st.integers(1, 65535), WORDS, SMALL)
SLOTS = st.lists(st.lists(SMALL, max_size=5), max_size=3)


@given(
    message=st.one_of(
        st.builds(m.Present, st.binary(min_size=8, max_size=8), WORDS, st.integers(1, 65535), WORDS),
        st.builds(m.Cached, st.binary(max_size=80), st.binary(max_size=80), st.booleans()),
        st.builds(
            m.Lookup,
            SMALL,
            st.just(NAMESPACE_ID),
            st.binary(max_size=80),
            SMALL,
            SMALL,
            key_mask=st.binary(max_size=8),
            hash_blocks_per_block=st.integers(1, 1 << 16),
        ),
        st.builds(m.PeerCount, SMALL),
        st.builds(m.Found, SMALL, SMALL, SMALL, SLOTS, holders=st.lists(HOLDER, max_size=m.MAX_HOLDERS)),
    ),
    damage=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=3),
    cut=st.integers(0, 400),
)
def test_store_damaged_messages_decode_within_bounds_or_raise(message, damage, cut):
    request = isinstance(message, m.Request)
    assert (m.decode_request if request else m.decode_reply)(m.encode(message)) == message
    frame = bytearray(m.encode(message))
    for place, value in damage:
        frame[place % len(frame)] = value
    for decode in (m.decode_request, m.decode_reply):
        try:
            heard = decode(bytes(frame)[: 400 - cut])
        except msgspec.DecodeError:
            continue
        assert decode(m.encode(heard)) == heard, "what was let through is within the bounds"


@given(st.binary(max_size=300))
def test_store_any_bytes_decode_or_raise(frame):
    for decode in (m.decode_request, m.decode_reply):
        try:
            decode(frame)
        except msgspec.DecodeError:
            continue


# -- frames ---------------------------------------------------------------------------------------------------


@given(
    frames=st.lists(st.binary(max_size=2000), max_size=8),
    cuts=st.lists(st.integers(1, 700), max_size=40),
)
def test_connection_frames_survive_any_cut(frames, cuts):
    reactor = Reactor("cuts")
    reactor.start()
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end = End(reactor, b)
        data = b"".join(struct.pack("<I", len(f)) + f for f in frames)
        for cut in cuts:
            a.sendall(data[:cut])
            data = data[cut:]
        a.sendall(data)
        eventually(lambda: len(end.frames) == len(frames))
        assert end.frames == frames and not end.reasons
    finally:
        a.close()
        reactor.stop()


def test_connection_many_small_frames_arrive_in_order(ends):
    sock, end = ends
    for start in range(0, 5000, 500):
        sock.sendall(b"".join(struct.pack("<II", 4, n) for n in range(start, start + 500)))
    eventually(lambda: len(end.frames) == 5000)
    assert [struct.unpack("<I", frame)[0] for frame in end.frames] == list(range(5000))


def test_connection_oversized_frame_closes_before_reading(ends):
    sock, end = ends
    sock.sendall(struct.pack("<I", (1 << 20) + 1))
    assert sock.recv(1) == b""
    eventually(lambda: end.reasons)
    assert "1048577 bytes" in end.reasons[0]


def test_connection_end_is_reported_once(ends, reactor):
    sock, end = ends
    sock.sendall(struct.pack("<I", 100) + b"half")
    sock.close()
    eventually(lambda: end.reasons)
    reactor.call_soon(end.stream.close)
    done = threading.Event()
    reactor.call_soon(done.set)
    assert done.wait(5) and end.reasons == ["the peer closed the connection"] and not end.frames
    assert not end.stream.send(b"too late")


def test_connection_last_message_of_closed_peer_is_received(ends, reactor):
    """Also by one that notices, by sending, that it is gone."""
    sock, end = ends
    busy, go = threading.Event(), threading.Event()
    reactor.call_soon(lambda: (busy.set(), go.wait(5)))
    assert busy.wait(5)
    write_frame(sock, b"because")
    sock.close()
    assert not end.stream.send(b"hello")
    go.set()
    eventually(lambda: end.reasons)
    assert end.frames == [b"because"]


def test_connection_handler_error_closes_that_connection(ends, reactor, caplog):
    sock, end = ends
    end.on_frame = lambda frame: 1 / 0
    write_frame(sock, b"x")
    assert sock.recv(1) == b""
    eventually(lambda: end.reasons)
    assert "ZeroDivisionError" in end.reasons[0]
    alive = threading.Event()
    reactor.call_soon(alive.set)
    assert alive.wait(5)


def test_connection_large_frames_both_ways_at_once(ends):
    """Neither socket buffer holds one, so that both sides write in parts and wait."""
    sock, end = ends
    big = os.urandom(900_000)
    end.on_frame = end.stream.send
    received = []
    reader = threading.Thread(target=lambda: received.append(_read(sock)))
    reader.start()
    write_frame(sock, big)
    reader.join(10)
    assert received == [big]


def _read(sock: socket.socket, fds: list[int] | None = None) -> bytes:
    import time

    return read_frame(sock, time.monotonic() + 10, [] if fds is None else fds)


def test_connection_peer_that_does_not_read_is_closed(ends):
    _, end = ends
    sent = 0
    while end.stream.send(bytes(100_000)):
        sent += 1
        assert sent < 100
    eventually(lambda: end.reasons)
    assert "does not read" in end.reasons[0]


def test_connection_sends_from_many_threads_stay_whole(ends):
    sock, end = ends

    def send(byte: int) -> None:
        for _ in range(50):
            end.stream.send(bytes([byte]) * 3000)

    threads = [threading.Thread(target=send, args=(byte,)) for byte in range(4)]
    for thread in threads:
        thread.start()
    frames = [_read(sock) for _ in range(200)]
    assert all(len(set(frame)) == 1 and len(frame) == 3000 for frame in frames)
    assert sorted(frame[0] for frame in frames) == sorted(list(range(4)) * 50)
    for thread in threads:
        thread.join()


def test_connection_passes_descriptors_only_where_expected(reactor):
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    giver, taker = End(reactor, a), End(reactor, b, max_fds=1)
    read_end, write_end = os.pipe()
    before, count = descriptors(), len(os.listdir("/proc/self/fd"))
    assert giver.stream.send(b"take it", [read_end])
    eventually(lambda: taker.frames)
    (fd,) = taker.stream.take_fds()
    assert not os.get_inheritable(fd)
    os.write(write_end, b"!")
    assert os.read(fd, 1) == b"!"
    os.close(fd)
    # The other way round none is expected: it is not even received.
    assert taker.stream.send(b"unasked", [read_end])
    eventually(lambda: giver.frames)
    assert descriptors() <= before
    # Never taken, it goes with the connection; one too many ends it.
    giver.stream.send(b"again", [read_end])
    giver.stream.send(b"and again", [read_end])
    eventually(lambda: taker.reasons)
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= count - 2)
    os.close(read_end)
    os.close(write_end)


def test_reactor_removed_descriptor_gets_no_event(reactor):
    heard = []
    a, b = socket.socketpair()
    b.send(b"x")

    def add_and_remove():  # in one call: between two of them there may be an event
        reactor.add_fd(a.fileno(), lambda events: heard.append(events))
        reactor.remove_fd(a.fileno())
        reactor.remove_fd(a.fileno())
        reactor.watch_fd(a.fileno(), zmq.POLLIN)

    reactor.call_soon(add_and_remove)
    done = threading.Event()
    reactor.call_soon(lambda: reactor.call_later(0.05, done.set))
    assert done.wait(5) and not heard
    a.close()
    b.close()
