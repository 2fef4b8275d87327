"""Leases between two engines' scheduler halves over real loopback sockets: granted, renewed, ended, after restarts."""

import socket
import threading
import time
from dataclasses import replace

import msgspec
import pytest
import zmq
from context_fakes import engine_of
from endpoint_support import BLOCK_HASHES, FAST, HASH_BLOCK_SIZE, NAMESPACE, Asker, Source, export, making, ranks, raw
from source_fakes import load_context, make_matcher
from support import eventually, make_request

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.scheduler.leases.exports import ExportTable, LeaseKind
from vllm_kvtier.scheduler.leases.lease_client import SAME_NODE, LeasedBlocks
from vllm_kvtier.scheduler.leases.lease_server import LeaseServer, LeaseServerEvents
from vllm_kvtier.scheduler.matching.transfer_params import PrefillHandoff
from vllm_kvtier.scheduler.sources.base import LookupMiss
from vllm_kvtier.shapes.read_paths import Reach
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.wire import dealer
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.reactor import Reactor

pytestmark = pytest.mark.usefixtures("way")


@pytest.fixture
def make():
    yield from making()


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


@pytest.mark.parametrize("options", [{}, {"lease_seconds": 60.0}])
@pytest.mark.parametrize("follows", [False, True])
def test_lease_is_renewed_by_heartbeats(make, options, follows):
    """Pings renew them: three lease times later they are still there. The time is the source's; the asker may send some
    pings already, for a lease that it waits for."""
    source, asker = make(Source), make(Asker, **options)
    source.table.add(export())
    if follows:
        ask = {"start": 0, "block_hashes": [], "export": "other", "digest": b"digest", "lora_fingerprint": b""}
        asker.peers.follow(source.address, 60.0, lambda: None, **ask)
    offer = asker.answer(source.address)
    deadlines = set()
    lease = source.table._leases[offer.lease]
    end = time.monotonic() + 3 * FAST["lease_seconds"]
    eventually(lambda: deadlines.add(lease.deadline) or time.monotonic() > end)
    assert source.leases() == 1 and len(deadlines) > 3
    assert source.serving == [True]


@pytest.mark.parametrize("end, options", [("scheduled", {"handoff_seconds": 2.0}), ("aborted", {})])
def test_export_outlives_handoff_seconds_while_its_request_is_queued(make, end, options):
    """With more requests than the decode engine takes at a time. It computed their prompts itself, after 30 s in its
    queue, which became longer for it. The time is the prefill engine's: its own may be longer, and another's was kept
    before."""
    source, asker = make(Source, handoff_seconds=2.0), make(Asker, lookup_timeout=8.0, **options)
    source.table.add(export(seconds=2.0))
    source.endpoint.changed()
    matcher = make_matcher(load_context([(HASH_BLOCK_SIZE, None)], HASH_BLOCK_SIZE, asker.peers))
    params = {"do_remote_prefill": True, "remote_request_id": "kvtier/e"}
    params |= {"remote_host": source.address[0], "remote_port": source.address[1]}
    for request_id, seconds in (("q", 30.0), ("r", 2.0)):
        params |= {"kvtier": {"export": {"q": "other", "r": "e"}[request_id], "expires_in": seconds}}
        request = make_request(request_id, list(range(40)), HASH_BLOCK_SIZE, dict(params))
        matcher.keep_export(request)
    until = time.monotonic() + 4.5
    eventually(lambda: time.monotonic() > until)
    offer = asker.answer(source.address, export="e", digest=b"digest")
    assert isinstance(offer, LeasedBlocks)
    asker.peers.release(offer, done=False)
    if end == "scheduled":
        matcher.allocated(request, ([1],), 0)
    else:
        matcher.finished(request)
    eventually(lambda: sorted(source.freed) == list(range(1, 9)))


@pytest.mark.parametrize(
    "reason, options",
    [
        ("digest_mismatch", {}),  # the prompt is another one
        ("layout", {"reach": lambda ranks: Reach(frozenset(), "the layouts differ")}),
        ("namespace_mismatch", {"namespace": msgspec.structs.replace(NAMESPACE, model="other")}),
    ],
)
def test_export_that_its_reader_cannot_use_is_freed_at_once(make, reason, options):
    """The reader computes the prompt; the blocks were kept for ``handoff_seconds``."""
    source, asker = make(Source), make(Asker, **options)
    source.table.add(export())
    counters = Counters()
    matcher = make_matcher(
        load_context([(HASH_BLOCK_SIZE, None)], HASH_BLOCK_SIZE, asker.peers, counters=counters,
                     config=KVTierConfig(pull_threshold=4))
    )  # fmt: skip
    params = {"do_remote_prefill": True, "kvtier": {"export": "e"}}
    params |= {"remote_host": source.address[0], "remote_port": source.address[1]}
    request = make_request("r", list(range(40)), HASH_BLOCK_SIZE, params)
    eventually(lambda: matcher.match(request, 0) == (0, False))
    assert counters.take()[f"lookups_declined|{reason}"] == 1
    eventually(lambda: sorted(source.freed) == list(range(1, 9)))


def test_export_is_not_kept_for_an_engine_whose_steps_hang(make):
    """Its reactor goes on. The prefill engine's blocks are for others then."""
    source, asker = make(Source, handoff_seconds=1.0), make(Asker, handoff_seconds=1.0)
    source.table.add(export(seconds=1.0))
    source.endpoint.changed()
    asker.peers.steps = lambda: 7
    asker.peers.keep_exports({"r": PrefillHandoff(source.address, "e")}, 1.0)
    begin = time.monotonic()
    eventually(lambda: sorted(source.freed) == list(range(1, 9)))
    assert time.monotonic() - begin < 5.0


def test_export_of_request_that_is_queued_for_ever_ends():
    now = [0.0]
    table = ExportTable(HASH_BLOCK_SIZE, dict.fromkeys(LeaseKind, 1000), clock=lambda: now[0])
    for name, kind in (("e", LeaseKind.HANDOFF), ("k", LeaseKind.RETAINED)):
        table.add(replace(export(name, kind=kind), deadline=30.0))
    ends = {}
    while table.expire() is not None:
        for name in ("e", "k", "unknown"):
            table.keep(name, 30.0)
            if table.has(name):
                ends[name] = now[0]
        now[0] += 10.0
    assert ends == {"e": 290.0, "k": 20.0}


def test_lease_whose_grant_is_lost_is_released(make, monkeypatch):
    """ZMQ drops messages for a peer that does not read, or is gone. These leases were renewed by its heartbeats."""
    monkeypatch.setattr(dealer, "MAX_UNSENT", 2)
    source, asked = make(Source, lease_seconds=60), 100
    source.table.add(export(tokens=10**6))  # a grant of some 700 kB
    request = m.LeaseRequest(1, "source/1", 0, [], export="e", digest=b"digest")
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVHWM, 2)
        client.connect(f"tcp://{source.address[0]}:{source.address[1]}")
        client.send(m.encode(m.Hello(m.PROTOCOL, "raw/1", NAMESPACE)))
        assert isinstance(m.decode_engine(client.recv()), m.Welcome)
        for message in [request] * asked + [m.Query(1, [])]:
            client.send(m.encode(message))
        eventually(lambda: source.queries)  # it has answered all that came before
        held = source.leases()
        assert 0 < held < asked
        assert {m.decode_engine(client.recv()).lease for _ in range(held)} == set(source.table._leases)
    source.on_reactor(lambda: source.endpoint._lease(b"gone", request, 0.0))
    assert source.leases() == held


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
    eventually(lambda: source.serving == [True])
    assert source.leases() == 1
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
    source, asker = make(Source), make(Asker, lookup_timeout=3.0)
    assert asker.answer(source.address).code == "no_matching_blocks"
    hangs, go = threading.Event(), threading.Event()
    source.reactor.call_soon(lambda: (hangs.set(), go.wait(30)))
    assert hangs.wait(10)
    try:
        assert asker.answer(source.address).code == "timeout"
        begin = time.monotonic()
        assert asker.answer(source.address).code == "timeout"
        assert time.monotonic() - begin < 2.5
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
