"""How an engine reaches another one over real loopback sockets, and the refusals: names, versions, layouts, paths."""

import socket
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from endpoint_support import BLOCK_HASHES, HASH_BLOCK_SIZE, NAMESPACE, Asker, Source, export, making, ranks, raw
from support import eventually

from vllm_kvtier.jobs.transfer_jobs import MAX_PEERS_REMEMBERED
from vllm_kvtier.scheduler.leases import lease_client
from vllm_kvtier.scheduler.leases.exports import LeaseKind, Refusal
from vllm_kvtier.scheduler.leases.lease_client import LeasedBlocks
from vllm_kvtier.scheduler.sources.base import LookupMiss
from vllm_kvtier.shapes.read_paths import Reach, ReadPath
from vllm_kvtier.wire import dealer, lease_connections
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey

pytestmark = pytest.mark.usefixtures("way")


@pytest.fixture
def make():
    yield from making()


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
    assert asker.answer(source.address) == first
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


def test_lease_of_engine_that_restarts_with_our_block_size_is_asked_in_our_hashes(make):
    source = make(Source, hash_block_size=HASH_BLOCK_SIZE)
    asker = make(Asker, namespace=msgspec.structs.replace(NAMESPACE, hash_block_size=2 * HASH_BLOCK_SIZE))
    source.table.add(replace(export(ready=5), digest=b"theirs"))
    asker.near = ""  # an engine that restarts ends its connections on the node, and their requests with them
    pending = asker.ask(
        source.address, block_hashes=[], export="e", digest=b"ours", rehash=lambda size: {"digest": b"theirs"}
    )
    eventually(lambda: source.endpoint._parked)

    def restart():
        source.endpoint.close("it restarts")
        source.table.add(replace(export(), digest=b"ours"))
        source.endpoint.open(NAMESPACE, m.Welcome(m.PROTOCOL, "source/2", ranks(), 2 * HASH_BLOCK_SIZE))

    source.on_reactor(restart)
    assert isinstance(eventually(lambda: pending.outcome), LeasedBlocks)


@pytest.mark.parametrize("size", [1, 1 << 30])
def test_lease_of_absurd_hash_block_size_is_not_asked(make, size):
    source, asker = make(Source, hash_block_size=size), make(Asker, namespace=msgspec.structs.replace(
        NAMESPACE, hash_block_size=128))  # fmt: skip
    assert asker.answer(source.address, rehash=lambda size: pytest.fail("hashed")).code == "layout"


def test_lease_of_different_layout_is_granted_for_mapped_reads_only(make):
    """Other ranks or strides: not by NIXL, which reads pages as they lie."""
    leased = []

    def lend(ask, connection, seconds, answer):
        leased.append(ask)
        answer(Refusal.BUSY)

    source = make(Source, lend=lend)
    asker = make(Asker, reach=lambda ranks: Reach(frozenset({ReadPath.MAPPED}), "2 ranks here, 1 there"))
    assert asker.answer(source.address, from_prefix_cache=True).code == "peer_busy" and leased.pop().mapped
    asker.peers.unmappable("source/1")
    got = asker.answer(source.address, from_prefix_cache=True)
    assert (got.code, got.reason) == ("layout", "2 ranks here, 1 there") and not leased
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
        assert asker.answer(("127.0.0.1", port)).code == "unreachable", "remembered: else it would be a timeout again"
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


def test_engine_that_answers_but_cannot_be_read_is_tried_by_one_request_at_a_time(make, monkeypatch):
    """As behind a firewall that lets control messages pass: each of its prompts waited for ``transfer_timeout``."""
    source = make(Source)
    source.table.add(export(kind=LeaseKind.RETAINED))
    asker = make(Asker, transfer_timeout=30.0)
    later = [0.0]
    monkeypatch.setattr(lease_client, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later[0]))

    def granted(**fields) -> bool:
        got = asker.answer(source.address, **fields)
        if isinstance(got, LookupMiss):
            assert got.code == "unreachable" and "NIXL's last read" in got.reason
            return False
        asker.peers.release(got, done=False)
        return True

    assert granted() and granted()
    for _ in range(2):
        asker.peers.unreadable("source/1")
        assert asker.peers.known(source.address, "source/1") is None, "nor is it read before the lease is granted"
        assert [granted() for _ in range(3)] == [True, False, False]
        asker.peers.unreadable("source/1")
        assert not granted() and granted(prefer_mapped=True)
        later[0] += 31.0
    assert granted() and not granted()
    asker.peers.readable("source/1")
    assert granted() and granted()
    for n in range(2 * MAX_PEERS_REMEMBERED):  # engines come and go
        asker.peers.unreadable(f"other/{n}")
    assert len(asker.peers._unreadable) == MAX_PEERS_REMEMBERED


def test_lease_that_was_asked_before_a_read_failed_does_not_try_again(make, monkeypatch):
    """It may have been read early, and that read have failed before the grant came."""
    source = make(Source)
    source.table.add(export(kind=LeaseKind.RETAINED))
    asker = make(Asker, transfer_timeout=30.0)
    granted, failed = asker.peers._granted, []

    def read_fails_before(connection, message):
        if not failed:
            failed.append(True)
            asker.peers.unreadable("source/1")
        granted(connection, message)

    monkeypatch.setattr(asker.peers, "_granted", read_fails_before)
    for allowed in (True, True, False):
        got = asker.answer(source.address)
        assert failed and isinstance(got, LookupMiss) != allowed
        if allowed:
            asker.peers.release(got, done=False)


def test_lease_client_option_nixl_refuses_what_only_maps(make):
    asker = make(Asker, reach=lambda ranks: Reach(frozenset({MAPPED}), "4 KV heads here"), same_node_pulls="nixl")
    got = asker.answer(make(Source).address)
    assert (got.code, got.reason) == ("layout", "4 KV heads here")


def test_peer_that_refuses_us_has_one_handshake_for_many_releases(make, monkeypatch):
    """Its exports are for requests that are computed here; each would be kept until its time limit."""
    monkeypatch.setattr(lease_client, "REFUSED_RELEASES", 0.3)
    source, asker = make(Source), make(Asker, namespace=msgspec.structs.replace(NAMESPACE, model="other"))
    hellos, greet = [], source.endpoint._hello
    monkeypatch.setattr(source.endpoint, "_hello", lambda *greeting: (hellos.append(1), greet(*greeting))[1])
    for i in range(50):
        source.table.add(export(name=f"e{i}"))
    for i in range(50):
        assert asker.answer(source.address, export=f"e{i}", digest=b"digest").code == "namespace_mismatch"
        asker.peers.release_export(source.address, f"e{i}")
    eventually(lambda: not source.table.counts()["exports"], 10.0)
    assert len(hellos) <= 4, "the first one, and those for the releases"
