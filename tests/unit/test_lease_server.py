"""Endpoint and peers over real loopback sockets: everything that can go wrong between two engines' scheduler halves."""

import contextlib
import os
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
from context_fakes import engine_of
from endpoint_support import BLOCK_HASHES, FAST, HASH_BLOCK_SIZE, NAMESPACE, Asker, Source, export, making, ranks
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import eventually

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.jobs.transfer_jobs import MAX_PEERS_REMEMBERED
from vllm_kvtier.scheduler.leases.exports import ExportTable, LeaseKind, Refusal
from vllm_kvtier.scheduler.leases.lease_client import SAME_NODE, LeasedBlocks
from vllm_kvtier.scheduler.leases.lease_server import LeaseServer, LeaseServerEvents
from vllm_kvtier.scheduler.sources.base import LookupMiss
from vllm_kvtier.shapes.read_paths import Reach, ReadPath
from vllm_kvtier.wire import dealer, lease_connections
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.reactor import Reactor

pytestmark = pytest.mark.usefixtures("way")


@pytest.fixture
def make():
    yield from making()


@contextmanager
def raw(address, greet=True):
    """A hand-made client: (socket, send, receive)."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(f"tcp://{address[0]}:{address[1]}")

    def receive(seconds=5.0):
        assert socket.poll(seconds * 1000), "no answer"
        return m.decode_engine(socket.recv_multipart()[-1])

    try:
        if greet:
            socket.send(m.encode(m.Hello(m.PROTOCOL, "raw/1", NAMESPACE)))
            assert isinstance(receive(), m.Welcome)
        yield socket, lambda message: socket.send(m.encode(message)), receive
    finally:
        context.destroy(linger=0)


# -- healthy -------------------------------------------------------------------------------------------------------


@pytest.fixture
def ipv6():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_lease_over_ipv6_is_granted_however_its_address_is_written(make, ipv6, host):
    """A pod's own address has no brackets, and the proxy names it without them, too."""
    source, asker = make(Source, endpoint_host=host), make(Asker)
    source.table.add(export())
    assert source.endpoint.host == "::1"
    for written in ("::1", "[::1]"):
        assert isinstance(asker.answer((written, source.endpoint.port), export="e", digest=b"digest"), LeasedBlocks)


@pytest.mark.parametrize("host, found", [("::1", ["::1"]), ("127.0.0.1", ["::1", "127.0.0.1"])])
def test_lease_from_named_engine_is_over_ipv6_if_the_name_has_no_other_address(make, ipv6, monkeypatch, host, found):
    def getaddrinfo(name, port, family=0, *_):
        families = {address: socket.AF_INET6 if ":" in address else socket.AF_INET for address in found}
        of_family = [address for address in found if family in (0, families[address])]
        if not of_family:
            raise socket.gaierror(socket.EAI_ADDRFAMILY, "no address of this family")
        return [(families[address], socket.SOCK_STREAM, 6, "", (address, port)) for address in of_family]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    key = ClusterKey(zmq.curve_keypair()[1])
    source, asker = make(Source, key=key, endpoint_host=host), make(Asker, key=key)
    source.table.add(export())
    answer = asker.answer(("machine", source.endpoint.port), export="e", digest=b"digest")
    assert isinstance(answer, LeasedBlocks)


def test_lease_of_handoff_by_export_id_is_granted_and_released(make):
    source, asker = make(Source), make(Asker)
    source.table.add(export(tokens=8 * HASH_BLOCK_SIZE - 1))
    offer = asker.answer(
        source.address, export="e", digest=b"digest", block_hashes=BLOCK_HASHES[-1:], start=HASH_BLOCK_SIZE
    )
    assert isinstance(offer, LeasedBlocks)
    assert (offer.start, offer.tokens, offer.blocks) == (
        HASH_BLOCK_SIZE,
        8 * HASH_BLOCK_SIZE - 1,
        [[2, 3, 4, 5, 6, 7, 8]],
    )
    assert (offer.instance, asker.held(), source.leases()) == ("source/1", 1, 1)
    eventually(lambda: source.serving == [True])
    asker.peers.release(offer, done=True)
    eventually(lambda: sorted(source.freed) == [1, 2, 3, 4, 5, 6, 7, 8] and source.serving == [True, False])
    assert asker.held() == 0 and not any(source.table.counts().values())
    assert asker.answer(source.address, export="e", digest=b"digest").code == "unknown_export"


def test_lease_request_gets_longest_prefix_and_records_puller(make):
    source, asker = make(Source), make(Asker)
    source.table.add(export(tokens=5 * HASH_BLOCK_SIZE, kind=LeaseKind.RETAINED))
    offer = asker.answer(source.address, reply_host="127.0.0.1", reply_port=7)
    assert offer.tokens == 5 * HASH_BLOCK_SIZE
    assert [a.reply_port for a in source.pullers] == [7]
    asker.peers.release(offer, done=True)
    eventually(lambda: source.leases() == 0)
    assert source.table.counts()["exports"] == 1, "a retained export is not consumed"
    assert asker.answer(source.address, block_hashes=[b"\xee" * 8]).code == "no_matching_blocks"
    assert asker.answer(source.address, export="e", digest=b"other").code == "digest_mismatch"


def test_lease_is_renewed_by_heartbeats(make):
    """Pings renew them: three lease times later they are still there."""
    source, asker = make(Source), make(Asker)
    source.table.add(export())
    offer = asker.answer(source.address)
    deadlines = set()
    lease = source.table._leases[offer.lease]
    end = time.monotonic() + 3 * FAST["lease_seconds"]
    eventually(lambda: deadlines.add(lease.deadline) or time.monotonic() > end)
    assert source.leases() == 1 and len(deadlines) > 3
    assert source.serving == [True]


def test_lease_server_query_is_answered_from_another_thread(make):
    source = make(Source)
    with raw(source.address, greet=False) as (_, send, receive):
        send(m.Query(5, [1, 2, 3]))
        query, answer = eventually(lambda: source.queries)[0]
        answer(m.PrefixLengths(query.question, len(query.tokens), 0, 0))
        assert receive() == m.PrefixLengths(5, 3, 0, 0)


# -- exports whose checksums are not made yet ----------------------------------------------------------------------


def test_lease_revoked_blocks_are_served_until_reader_releases(make):
    """Not served, a read by NIXL would hang until its own time limit, and end its agent."""
    source, asker = make(Source), make(Asker)
    source.table.add(export())
    offer = asker.answer(source.address)
    assert isinstance(offer, LeasedBlocks)
    source.table.clear()
    assert not source.table.has_freed(), "it is being read"
    source.table.revoke(0.0)
    assert sum(source.table.take_freed(), []) == list(range(1, 9))
    assert source.leases() == 1 and source.serving == [True]
    source.table.revoke(1e9)  # there is nothing to wait for any more
    asker.peers.release(offer, True)
    eventually(lambda: source.serving == [True, False])
    assert source.leases() == 0 and not source.freed and not source.table.has_freed()


def test_lease_request_waits_for_checksums(make):
    source, asker = make(Source), make(Asker)
    source.table.add(export(ready=3))
    pending = asker.ask(source.address)
    eventually(lambda: source.on_reactor(lambda: len(source.endpoint._parked)) == 1)
    source.reactor.call_soon(lambda: source.endpoint.checksums_ready(2))
    assert source.on_reactor(lambda: len(source.endpoint._parked)) == 1 and pending.outcome is None
    source.reactor.call_soon(lambda: source.endpoint.checksums_ready(3))
    assert isinstance(eventually(lambda: pending.outcome), LeasedBlocks)
    # The workers must learn it at once, or an emulated read would wait for the next message.
    eventually(lambda: source.serving == [True], 0.15)


def test_lease_request_without_checksums_is_refused_at_timeout(make):
    source, asker = make(Source, lookup_timeout=0.2), make(Asker)
    source.table.add(export(ready=3))
    assert asker.answer(source.address).code == "checksums_not_ready"
    assert not source.on_reactor(lambda: source.endpoint._parked)


def test_lease_request_of_disconnected_peer_is_dropped(make):
    source = make(Source)
    source.table.add(export(ready=3))
    with raw(source.address) as (socket, send, receive):
        send(m.LeaseRequest(1, "source/1", 0, BLOCK_HASHES))
        eventually(lambda: source.on_reactor(lambda: len(source.endpoint._parked)) == 1)
        socket.send(b"\xc1")
        assert receive().code == "malformed"
        source.on_reactor(lambda: source.endpoint.checksums_ready(3))
        assert source.leases() == 0


# -- time ------------------------------------------------------------------------------------------------------------


def test_exports_without_messages_expire(make):
    source = make(Source)
    source.table.add(export(seconds=0.1))
    source.endpoint.changed()  # what the engine's thread calls after ``add``
    eventually(lambda: len(source.freed) == 8, 2)


def test_lease_of_silent_peer_expires(make):
    source = make(Source)
    source.table.add(export())
    with raw(source.address) as (_, send, receive):
        send(m.LeaseRequest(1, "source/1", 0, BLOCK_HASHES))
        assert isinstance(receive(), m.LeaseGranted)
        assert source.leases() == 1
        eventually(lambda: source.leases() == 0, 3)
    eventually(lambda: source.serving == [True, False])
    assert source.table.counts()["exports"] == 1, "the hand-off stays for a second request"


def test_lease_of_killed_peer_expires_and_frees_blocks(make):
    source, asker = make(Source), make(Asker)
    source.table.add(export(kind=LeaseKind.RETAINED))
    assert isinstance(asker.answer(source.address), LeasedBlocks)
    source.table.end_export("e")
    assert source.freed == [] and source.leases() == 1
    asker.reactor._on_stop.clear()  # a killed process says no goodbye
    asker.stop()
    eventually(lambda: len(source.freed) == 8, 3)


def test_lease_of_stopped_peer_is_released_at_once(make):
    source, asker = make(Source, lease_seconds=60), make(Asker, lease_seconds=60)
    source.table.add(export(kind=LeaseKind.RETAINED))
    assert isinstance(asker.answer(source.address), LeasedBlocks)
    asker.stop()
    eventually(lambda: source.leases() == 0, 3)


def test_lease_with_lost_release_expires(make):
    """The asker forgot the lease (its connection was closed under it), so nothing renews it."""
    source, asker = make(Source), make(Asker)
    source.table.add(export())
    offer = asker.answer(source.address)
    (connection,) = asker.peers._connections.values()
    asker.reactor.call_soon(lambda: asker.peers._close(connection, LookupMiss("test", "test"), 0.0))
    asker.peers.release(offer, done=True)
    eventually(lambda: source.leases() == 0, 3)
    assert asker.held() == 0


def test_lease_granted_after_timeout_or_cancel_is_released(make):
    source, asker = make(Source, lookup_timeout=5), make(Asker, lookup_timeout=0.2)
    source.table.add(export(ready=1, kind=LeaseKind.RETAINED))
    timed_out, cancelled = asker.ask(source.address), asker.ask(source.address)
    eventually(lambda: source.on_reactor(lambda: len(source.endpoint._parked)) == 2)
    asker.peers.cancel(cancelled)
    assert eventually(lambda: timed_out.outcome).code == "timeout"
    source.on_reactor(lambda: source.endpoint.checksums_ready(1))
    eventually(lambda: source.serving[:1] == [True] and source.leases() == 0, 5)
    assert next(source.table._lease_ids) == 3, "both were granted"
    assert asker.held() == 0 and not isinstance(cancelled.outcome, LeasedBlocks)


def test_lease_client_waits_once_for_hung_peer(make):
    source, asker = make(Source), make(Asker, lookup_timeout=0.3)
    assert asker.answer(source.address).code == "no_matching_blocks"
    hangs, go = threading.Event(), threading.Event()
    source.reactor.call_soon(lambda: (hangs.set(), go.wait(30)))
    assert hangs.wait(10)
    try:
        assert asker.answer(source.address).code == "timeout"
        begin = time.monotonic()
        assert asker.answer(source.address).code == "timeout"
        assert time.monotonic() - begin < 0.2
    finally:
        go.set()


def test_lease_client_cancelled_answered_request_causes_no_backoff(make):
    source, asker = make(Source), make(Asker, lookup_timeout=1.0)
    source.table.add(export(kind=LeaseKind.RETAINED))
    assert isinstance(asker.answer(source.address), LeasedBlocks)
    asker.peers.cancel(asker.ask(source.address))
    eventually(lambda: next(source.table._lease_ids) > 2, 3, "the second was granted too")
    time.sleep(1.2)  # beyond its time limit
    assert isinstance(asker.answer(source.address), LeasedBlocks), "the source is paused for nothing"


def test_lease_client_late_answer_ends_backoff(make):
    source, asker = make(Source, lookup_timeout=10), make(Asker, lookup_timeout=0.2)
    source.table.add(export(ready=1, kind=LeaseKind.RETAINED))
    assert asker.answer(source.address).code == "timeout"
    source.on_reactor(lambda: source.endpoint.checksums_ready(1))
    eventually(lambda: not asker.peers._paused)
    assert isinstance(asker.answer(source.address), LeasedBlocks)


def test_lease_client_cancel_releases_granted_lease(make):
    source, asker = make(Source), make(Asker)
    source.table.add(export())
    pending = asker.ask(source.address)
    eventually(lambda: pending.outcome)
    asker.peers.cancel(pending)
    eventually(lambda: source.leases() == 0)


def test_lease_client_unanswered_requests_leave_no_state(make):
    """A peer that shook hands and then ignores every question."""
    asker = make(Asker, lookup_timeout=0.1)
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    try:
        pending = asker.ask(("127.0.0.1", port))
        assert server.poll(5000)
        identity, _ = server.recv_multipart()
        server.send_multipart([identity, m.encode(m.Welcome(m.PROTOCOL, "mute/1", ranks()))])
        assert eventually(lambda: pending.outcome).code == "timeout"
        for _ in range(20):
            asker.answer(("127.0.0.1", port))
        for connection in asker.peers._connections.values():
            assert not connection.asked and not connection.waiting
    finally:
        context.destroy(linger=0)


# -- handshakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, words",
    [
        ("model", "model's configuration or weights"),
        ("hash_seed", "PYTHONHASHSEED"),
    ],
)
def test_namespace_mismatch_is_refused_with_cause_and_remembered(make, field, words, caplog):
    value = 99 if isinstance(getattr(NAMESPACE, field), int) else "other"
    source, asker = make(Source), make(Asker, namespace=msgspec.structs.replace(NAMESPACE, **{field: value}))
    first = asker.answer(source.address)
    assert first.code == "namespace_mismatch" and words in first.reason
    begin = time.monotonic()
    assert asker.answer(source.address) == first
    assert time.monotonic() - begin < 0.5
    assert caplog.text.count(words) == 1, "logged once"


def test_lease_of_other_block_size_is_asked_in_its_hashes(make, caplog):
    """The requester hashes its prompt in blocks of the engine that it asks."""
    source = make(Source, hash_block_size=HASH_BLOCK_SIZE)
    source.table.add(export())
    asker = make(Asker, namespace=msgspec.structs.replace(NAMESPACE, hash_block_size=2 * HASH_BLOCK_SIZE))
    sizes = []

    def rehash(size):
        sizes.append(size)
        return {"block_hashes": BLOCK_HASHES[:5]}

    got = asker.answer(source.address, start=6, block_hashes=[b"other" * 4], rehash=rehash)
    assert (got.tokens, got.start, got.blocks) == (5 * HASH_BLOCK_SIZE, 6, [[2, 3, 4, 5]])
    assert sizes == [got.hash_block_size] == [HASH_BLOCK_SIZE]
    followed = asker.peers.follow(
        source.address, 20.0, lambda: None, lambda size: {"digest": b"digest"}, start=0, block_hashes=[], export="e"
    )
    assert eventually(lambda: followed.outcome).hash_block_size == HASH_BLOCK_SIZE
    asker.peers.stop_following(followed, done=False)
    assert asker.answer(source.address, rehash=lambda size: 1 / 0).code == "layout"
    refused = asker.answer(source.address)
    assert refused.code == "layout" and "the block size differs: 8 here, 4 there" in refused.reason
    assert "the block size differs" in caplog.text


@pytest.mark.parametrize("size", [1, 1 << 30])
def test_lease_of_absurd_hash_block_size_is_not_asked(make, size):
    source, asker = make(Source, hash_block_size=size), make(Asker, namespace=msgspec.structs.replace(
        NAMESPACE, hash_block_size=128))  # fmt: skip
    assert asker.answer(source.address, rehash=lambda size: pytest.fail("hashed")).code == "layout"


def test_lease_of_different_layout_is_granted_for_mapped_reads_only(make):
    """Other ranks or strides: not by NIXL, which reads pages as they lie."""
    lent = []

    def lend(ask, connection, seconds, answer):
        lent.append(ask)
        answer(Refusal.BUSY)

    source = make(Source, lend=lend)
    asker = make(Asker, reach=lambda ranks: Reach(frozenset({ReadPath.MAPPED}), "2 ranks here, 1 there"))
    assert asker.answer(source.address, from_prefix_cache=True).code == "peer_busy" and lent.pop().mapped
    asker.peers.unmappable("source/1")
    got = asker.answer(source.address, from_prefix_cache=True)
    assert (got.code, got.reason) == ("layout", "2 ranks here, 1 there") and not lent
    for n in range(2 * MAX_PEERS_REMEMBERED):  # engines come and go
        asker.peers.unmappable(f"other/{n}")
    assert len(asker.peers._unmappable) == MAX_PEERS_REMEMBERED


def test_lease_server_refuses_other_protocol_and_layout(make):
    source = make(Source)
    with raw(source.address, greet=False) as (_, send, receive):
        send(m.Hello(m.PROTOCOL + 1, "x", NAMESPACE))
        assert "run the same vllm-kvtier on both" in receive().reason
    asker = make(Asker, reach=lambda ranks: Reach(frozenset(), "16 heads here, 8 there"))
    got = asker.answer(source.address)
    assert (got.code, got.reason) == ("layout", "16 heads here, 8 there")


def test_lease_server_of_starting_engine_refuses(make):
    source, asker = make(Source, is_open=False), make(Asker)
    got = asker.answer(source.address)
    assert got.code == "peer_starting" and "starting" in got.reason
    greyer = make(Asker, hello=None)
    assert greyer.answer(source.address).code == "unreachable"


def test_handshake_without_listener_or_answer_times_out(make):
    asker = make(Asker, lookup_timeout=0.2, handshake_timeout=0.6)
    context = zmq.Context()
    mute = context.socket(zmq.ROUTER)
    port = mute.bind_to_random_port("tcp://127.0.0.1")
    try:
        assert asker.answer(("127.0.0.1", port)).code == "timeout"
        eventually(lambda: not asker.peers._connections, 3, "the handshake is given up")
        begin = time.monotonic()
        assert asker.answer(("127.0.0.1", port)).code == "unreachable"
        assert time.monotonic() - begin < 0.15, "remembered: the next request does not wait"
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize(
    "host", ["", "*", "no such host", "a;b", "x" * 255, "\x00", "\ud800", "a\nb", "256.1.1.1", "a/b"], ids=ascii
)
def test_lease_client_invalid_addresses_are_unreachable(make, host, caplog):
    asker = make(Asker, lookup_timeout=0.2, handshake_timeout=0.2)
    assert asker.answer((host, 9)).code in ("unreachable", "timeout")
    eventually(lambda: not asker.peers._connections, 3)
    assert "Traceback" not in caplog.text
    for record in caplog.records:
        assert record.getMessage().isascii() and "\n" not in record.getMessage()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "machine"])
def test_lease_client_without_key_connects_to_loopback_only(make, monkeypatch, host):
    """An engine without a key listens nowhere else, and a client may name any host."""
    monkeypatch.setattr(Asker, "near", "")  # over TCP

    def getaddrinfo(name, port, *_):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    source, asker = make(Source), make(Asker)
    source.table.add(export(kind=LeaseKind.RETAINED))
    answer = asker.answer((host, source.address[1]))
    if host == "machine":
        assert answer.code == "unreachable" and not asker.peers._connections
    else:
        assert isinstance(answer, LeasedBlocks)


def test_name_that_dns_does_not_answer_holds_no_other_request_up(make, monkeypatch):
    """ZMQ resolved names on the thread that moves all messages: two names of a client cost 15 s."""
    monkeypatch.setattr(Asker, "near", "")  # over TCP
    asked, go_on = threading.Event(), threading.Event()

    def getaddrinfo(host, port, *_):
        if host == "node-a":
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]
        asked.set()
        go_on.wait(60)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    key = ClusterKey(zmq.curve_keypair()[1])
    source, asker = make(Source, key=key), make(Asker, key=key, lookup_timeout=30, handshake_timeout=30)
    source.table.add(export(kind=LeaseKind.RETAINED))
    slow = [asker.ask((f"slow-{i}", 9)) for i in range(dealer.MAX_RESOLVED)]
    assert asked.wait(10)
    assert isinstance(asker.answer(source.address), LeasedBlocks)
    assert "being resolved" in asker.answer(("node-a", source.address[1])).reason
    assert not any(pending.outcome for pending in slow)
    go_on.set()
    assert {eventually(lambda p=pending: p.outcome).code for pending in slow} == {"unreachable"}
    assert isinstance(make(Asker, key=key).answer(("node-a", source.address[1])), LeasedBlocks)


def test_name_without_a_thread_to_resolve_it_is_unreachable(make, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    asker = make(Asker, key=ClusterKey(zmq.curve_keypair()[1]), lookup_timeout=30)
    monkeypatch.setattr(threading.Thread, "start", start)
    for i in range(dealer.MAX_RESOLVED + 1):
        assert asker.answer((f"node-{i}", 9)).reason == "can't start new thread"


def test_lease_client_state_of_addresses_is_bounded(make, monkeypatch):
    """Clients name addresses; a thousand wrong ones must not stay in memory for ever."""
    monkeypatch.setattr(lease_connections, "MAX_REMEMBERED", limit := 100)
    asker = make(Asker, lookup_timeout=0.05, handshake_timeout=0.05)
    for i in range(300):
        asker.ask((f"127.0.0.{i % 250 + 1}", 1000 + i))
    pending = asker.ask(("127.0.0.1", 1))
    eventually(lambda: pending.outcome, 20)
    eventually(lambda: not asker.peers._connections, 20)
    assert 1 < len(asker.peers._paused) <= limit and len(asker.peers._logged) <= limit

    def end_pauses():
        asker.peers._paused = {a: (0.0, *rest) for a, (_, *rest) in asker.peers._paused.items()}

    asker.reactor.call_soon(end_pauses)
    pending = asker.ask(("127.0.0.1", 2))
    eventually(lambda: pending.outcome and not asker.peers._connections, 5)
    assert len(asker.peers._paused) <= 2, "pauses that have ended are forgotten"


# -- restarts --------------------------------------------------------------------------------------------------------


def test_lease_server_restarted_at_same_address_is_used(make):
    source, asker = make(Source, lease_seconds=60), make(Asker)
    source.table.add(export(kind=LeaseKind.RETAINED))
    old = asker.answer(source.address)
    source.endpoint._exports.clear()
    source.stop()
    again = make(Source, instance="source/2", port=source.endpoint.port, lease_seconds=60)
    again.table.add(export(kind=LeaseKind.HANDOFF))

    def retry():
        got = asker.answer(again.address)
        assert isinstance(got, LeasedBlocks) or got.code in ("peer_restarted", "timeout", "unreachable")
        return got if isinstance(got, LeasedBlocks) else None

    new = eventually(retry, 15)
    assert new.instance == "source/2" and new.lease == old.lease, "lease numbers begin anew, as they do in life"
    # Giving back the old engine's lease must not touch the new one's, which has the same number.
    asker.peers.release(old, done=True)
    done = threading.Event()
    asker.reactor.call_soon(done.set)
    assert done.wait(5)
    with raw(again.address, greet=False) as (_, send, _):
        send(m.Query(1, []))  # a message later than that release would be
        eventually(lambda: again.queries)
    assert again.leases() == 1 and asker.held() == 1
    asker.peers.release(new, done=True)
    eventually(lambda: again.leases() == 0)


def test_lease_server_reopened_is_another_instance(make, way):
    """As an engine does that sleeps: peers that know its old memory get the new one."""
    source, asker = make(Source, lease_seconds=60), make(Asker)
    source.table.add(export("late", ready=5))
    parked = asker.ask(source.address, export="late", digest=b"digest")
    eventually(lambda: source.endpoint._parked)
    source.on_reactor(lambda: source.endpoint.close("the engine sleeps"))
    eventually(lambda: parked.outcome)
    assert parked.outcome.code in ("peer_starting", "peer_restarted") and source.leases() == 0
    refused = make(Asker).answer(source.address)
    assert refused.code == "peer_starting" and "sleeps" in refused.reason
    source.table.add(export(kind=LeaseKind.RETAINED, first=30))
    callbacks = len(source.reactor._on_stop)
    source.on_reactor(lambda: source.endpoint.open(NAMESPACE, m.Welcome(m.PROTOCOL, "source/2", ranks("other"))))
    assert len(source.reactor._on_stop) == callbacks, "a trainer's engine sleeps at each step"
    if way == "unix":
        asker.near = "source/2"

    def retry():
        got = asker.answer(source.address)
        return got if isinstance(got, LeasedBlocks) else None

    offer = eventually(retry, 15)
    assert offer.instance == "source/2" and [info.agent for info in offer.ranks] == ["other"]
    address = ("source/2", SAME_NODE) if way == "unix" else source.address
    assert asker.peers.known(address, "source/2") == offer.ranks
    old = make(Asker)
    old.near = "source/1"
    assert isinstance(old.answer(source.address), LeasedBlocks), "by its address, if its socket's name is an old one"


def test_lease_client_suspended_sends_nothing_and_drops_early_read(make):
    """Its workers could not read: with ``kv_load_failure_policy`` "fail" that would cost a request."""
    source, asker = make(Source), make(Asker)
    source.table.add(export(kind=LeaseKind.RETAINED))
    asker.peers.release(asker.answer(source.address), done=False)
    address = (asker.near, SAME_NODE) if asker.near else source.address
    assert asker.peers.known(address, "source/1")
    greeting, asker.greeting = asker.greeting, None
    assert asker.answer(source.address).code == "unreachable" and asker.peers.known(address, "source/1") is None
    eventually(lambda: asker.held() == source.leases() == 0)
    asker.greeting = greeting
    assert isinstance(asker.answer(source.address), LeasedBlocks)


def test_lease_server_port_in_use_raises_with_port(make):
    source = make(Source)
    with pytest.raises(ConfigError, match="endpoint_port"):
        make(Source, port=source.endpoint.port)


def test_lease_server_of_a_rank_beyond_the_last_port_raises():
    """ZMQ took 65538 for 2."""
    engine = engine_of(Reactor("rank 3"), KVTierConfig(endpoint_port=65535))
    engine.info.data_parallel_rank = 3
    with pytest.raises(ConfigError, match="data-parallel rank 3: there is no port 65538"):
        LeaseServer(engine, ExportTable(16, dict.fromkeys(LeaseKind, 1)), None, LeaseServerEvents(*4 * [print]))


# -- drop --------------------------------------------------------------------------------------------------------------


def test_lease_server_release_export_frees_now_or_after_last_lease(make):
    source, asker = make(Source), make(Asker)
    source.table.add(export("a", first=1))
    source.table.add(export("b", first=20))
    offer = asker.answer(source.address, export="a", digest=b"digest")
    asker.peers.release_export(source.address, "b")
    asker.peers.release_export(source.address, "a")
    asker.peers.release_export(source.address, "unknown")
    eventually(lambda: source.freed == list(range(20, 28)))
    asker.peers.release(offer, done=False)
    eventually(lambda: len(source.freed) == 16)


# -- lies and garbage --------------------------------------------------------------------------------------------------

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
    source, asker = Source(), Asker()
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


# -- keys --------------------------------------------------------------------------------------------------------------


def test_lease_server_with_cluster_key_answers_key_holders_only(make, monkeypatch):
    monkeypatch.setattr(Asker, "near", "")  # an engine of this node needs none (test_local.py)
    key, other = (ClusterKey(zmq.curve_keypair()[1]) for _ in range(2))
    source = make(Source, key=key)
    source.table.add(export(kind=LeaseKind.RETAINED))
    wrong, none = make(Asker, key=other, lookup_timeout=30), make(Asker, lookup_timeout=30)
    asks = [wrong.ask(source.address), none.ask(source.address)]
    right = make(Asker, key=key)
    assert isinstance(right.answer(source.address), LeasedBlocks)
    for ask in asks:
        outcome = eventually(lambda ask=ask: ask.outcome)
        assert outcome.code == "unreachable" and "cluster_key_file" in outcome.reason
    assert source.leases() == 1
    process, begin = time.process_time(), time.monotonic()
    for asker in (wrong, none, right):
        asker.stop()
    assert time.monotonic() - begin < 3 and time.process_time() - process < 1


def test_lease_server_beyond_loopback_needs_cluster_key():
    with pytest.raises(ConfigError, match="cluster_key_file"):
        KVTierConfig(endpoint_host="0.0.0.0", advertise_host="10.0.0.1")
    with pytest.raises(ConfigError, match="cluster_key_file"):
        KVTierConfig(endpoint_host="10.0.0.1")


def test_lease_server_and_client_idle_use_no_cpu(make):
    """Connected, greeted, nothing leased; with a key, whose handler thread must sleep too."""
    key = ClusterKey(zmq.curve_keypair()[1])
    source, asker = make(Source, key=key), make(Asker, key=key)
    assert asker.answer(source.address).code == "no_matching_blocks"
    process, begin = time.process_time(), time.monotonic()
    threading.Event().wait(1.5)  # measuring, not waiting for anything
    assert time.process_time() - process < 0.01 * (time.monotonic() - begin)


# -- paths -------------------------------------------------------------------------------------------------------------

DIRECT, MAPPED, STAGED = ReadPath


@pytest.mark.parametrize(
    "option, paths, prefer, wanted",
    [
        ("auto on GPUs", set(ReadPath), False, MAPPED),
        ("auto on GPUs", {DIRECT, STAGED}, False, DIRECT),
        ("nixl on GPUs", set(ReadPath), False, DIRECT),
        ("auto", set(ReadPath), False, DIRECT),
        ("auto", set(ReadPath), True, MAPPED),
        ("auto", {MAPPED, STAGED}, False, MAPPED),
        ("auto", {STAGED}, True, STAGED),
        ("mapped", set(ReadPath), False, MAPPED),
        ("mapped", {DIRECT, STAGED}, False, DIRECT),
        ("nixl", set(ReadPath), False, DIRECT),
        ("nixl", {MAPPED, STAGED}, False, STAGED),
        ("nixl", {MAPPED, STAGED}, True, MAPPED),  # peer fetches are no pulls
    ],
)
def test_lease_client_path_of_a_pull(make, option, paths, prefer, wanted):
    source = make(Source)
    source.table.add(export())
    option, _, on_gpus = option.partition(" on ")
    reach = Reach(frozenset(paths), by_kernels=bool(on_gpus) and MAPPED in paths)
    asker = make(Asker, reach=lambda ranks: reach, same_node_pulls=option)
    got = asker.answer(source.address, export="e", digest=b"digest", prefer_mapped=prefer)
    assert got.path is wanted and got.same_layout is (DIRECT in paths)
    served = source.on_reactor(source.table.counts)["served"]
    assert served == (wanted is not MAPPED), "the source drives NIXL only for those that use it"
    if not asker.near:  # a hand-off's connection
        early = DIRECT in paths and not ((option == "mapped" or (on_gpus and option == "auto")) and MAPPED in paths)
        assert (asker.peers.known(source.address, "source/1") is not None) == early
        again = asker.peers.ask(source.address, start=0, block_hashes=BLOCK_HASHES, lora_fingerprint=b"")
        assert again.on_this_node == (MAPPED in paths), "its answers come soon"
        asker.peers.cancel(again)
    asker.peers.release(got, done=True)


def test_lease_client_reads_unmappable_engine_by_nixl(make):
    source = make(Source)
    source.table.add(export(kind=LeaseKind.RETAINED))
    asker = make(Asker, reach=lambda ranks: Reach(frozenset({MAPPED, STAGED})))
    first = asker.answer(source.address)
    asker.peers.unmappable("source/1")
    second = asker.answer(source.address)
    assert (first.path, second.path) == (MAPPED, STAGED)
    for leased in (first, second):
        asker.peers.release(leased, done=True)


def test_lease_client_option_nixl_refuses_what_only_maps(make):
    asker = make(Asker, reach=lambda ranks: Reach(frozenset({MAPPED}), "4 KV heads here"), same_node_pulls="nixl")
    got = asker.answer(make(Source).address)
    assert (got.code, got.reason) == ("layout", "4 KV heads here")
