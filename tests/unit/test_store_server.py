"""The node store answers out of its index, owns nothing of a connection longer than it lives, and survives nonsense."""

import fcntl
import itertools
import os
import socket
import struct

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_servers import assert_serves, make
from store_support import (
    EVERYTHING,
    NAMESPACE_ID,
    RawClient,
    block_hashes_of,
    engine_hello,
    items_of,
    tool_hello,
)
from support import eventually

from vllm_kvtier.store import options
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.index import index as index_module
from vllm_kvtier.store.index.presence_filter import COUNTERS, PresenceView
from vllm_kvtier.store.server import server as server_module
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.stream import StreamLimits, write_frame

BLOCK_HASHES = block_hashes_of((10, "a"))
OTHER = b"another  16 byte"


@pytest.fixture
def server(tmp_path):
    server = make(tmp_path / "s.sock")
    yield server
    server.stop()


@pytest.fixture
def client(server):
    with RawClient(server.path, engine_hello()) as client:
        yield client


# -- what clients ask -----------------------------------------------------------------------------------------


def test_store_welcome_passes_pool_memory(server, client):
    welcome = client.welcome
    assert (welcome.protocol, welcome.instance, welcome.pid) == (m.PROTOCOL, server.instance, os.getpid())
    assert welcome.pool_pages == welcome.ready_pages == 256
    fd, presence = client.fds
    assert os.fstat(fd).st_size == 256 * m.PAGE
    assert os.fstat(presence).st_size == COUNTERS and fcntl.fcntl(presence, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY


def test_store_welcome_says_which_tiers_need_names(tmp_path):
    ClusterKey.create(str(tmp_path / "key"))
    for number, (nodes, only_named) in enumerate({"": ["nodes"], "127.0.0.1:9": [], "dns:localhost:9": []}.items()):
        path = tmp_path / f"{number}.sock"
        server = make(path, cluster_key_file=str(tmp_path / "key"), nodes=nodes)
        with RawClient(str(path), engine_hello()) as client:
            assert (client.welcome.tiers, client.welcome.only_named) == (["nodes"], only_named)
            assert client.welcome.places == ({"nodes": nodes} if nodes else {})
        server.stop()


def test_store_presence_view_has_blocks_from_commit_until_they_are_gone(server, client):
    view = PresenceView(os.dup(client.fds[1]))
    hashes = [BLOCK_HASHES[at : at + m.HASH_BYTES] for at in range(0, len(BLOCK_HASHES), m.HASH_BYTES)]

    def present():
        client.stat()  # an answer: all that was sent before is done
        return [view.may_have(NAMESPACE_ID, each) for each in hashes]

    slots = client.reserve(BLOCK_HASHES)
    assert present() == [False] * 10
    client.send(m.Commit(slots[:7]))
    assert present() == [True] * 7 + [False] * 3
    assert not view.may_have(b"another namespace"[: m.HASH_BYTES], hashes[0])
    client.send(m.Discard(NAMESPACE_ID, 0, hashes[6], slots[6]))
    assert present() == [True] * 6 + [False] * 4
    client.ask(m.Clear(3, NAMESPACE_ID))
    assert present() == [False] * 10


def test_store_reserve_commit_lookup_release(client):
    slots = client.reserve(BLOCK_HASHES)
    assert len(set(slots)) == 10 and min(slots) > 0
    assert client.lookup(BLOCK_HASHES).num_hash_blocks == 0, "nothing is found before it is written"
    assert client.reserve(BLOCK_HASHES) == [m.EXISTS] * 10
    client.send(m.Commit(slots[:7]))
    client.send(m.Abort(slots[7:]))
    found = client.lookup(BLOCK_HASHES)
    assert (found.num_hash_blocks, found.slots) == (7, [slots[:7]]) and found.lease
    later = client.lookup(BLOCK_HASHES, 3)
    assert (later.num_hash_blocks, later.slots) == (7, [slots[3:7]]) and later.lease != found.lease
    assert client.stat().index.leases == 2
    for lease in (found.lease, later.lease, 12345):
        client.send(m.Release(lease))
    counts = client.stat()
    assert (counts.index.leases, counts.index.reservations) == (0, 0)


def test_store_blocks_are_shared_within_a_namespace_only(server, client):
    slots = client.store(BLOCK_HASHES)
    with RawClient(server.path, engine_hello("other")) as other:
        assert other.lookup(BLOCK_HASHES).slots == [slots]
        nothing = other.ask(m.Lookup(1, bytes(16), BLOCK_HASHES, 0, EVERYTHING))
        assert (nothing.num_hash_blocks, nothing.lease) == (0, 0)


def test_store_inspect_pin_clear(client):
    client.store(BLOCK_HASHES)
    assert client.ask(m.Inspect(1, NAMESPACE_ID, BLOCK_HASHES + bytes(16))) == m.Explained(1, 10, [10])
    assert client.ask(m.Inspect(1, NAMESPACE_ID, bytes(16) + BLOCK_HASHES)) == m.Explained(1, 0, [10])
    assert client.ask(m.Inspect(1, bytes(16), BLOCK_HASHES)) == m.Explained(1, 0, [])
    assert client.stat().index.leases == 0
    assert client.ask(m.Pin(1, NAMESPACE_ID, BLOCK_HASHES, True)).count == 10
    assert client.ask(m.Pin(1, NAMESPACE_ID, BLOCK_HASHES, False)).count == 10
    assert client.ask(m.Clear(1, NAMESPACE_ID)).count == 10
    assert client.lookup(BLOCK_HASHES).num_hash_blocks == 0


def test_store_unpins_a_namespace_that_its_last_engine_has_left(server, client):
    """After each sleep of an engine the pins of before held memory for good, and nothing could name them."""
    client.store(BLOCK_HASHES)
    assert client.ask(m.Pin(1, NAMESPACE_ID, BLOCK_HASHES, True)) == m.Done(1, 10)
    assert client.ask(m.Pin(1, NAMESPACE_ID, b"", False)) == m.Done(1, 0), "of a prompt of less than a block"
    with RawClient(server.path, engine_hello("other")) as other:
        other.send(m.Touch(NAMESPACE_ID, b""))  # it has had no request yet
        assert other.stat().index.pinned_entries == 10
        assert client.ask(m.Pin(1, NAMESPACE_ID, b"", False, leaves=True)).count == 0
        assert client.stat().index.pinned_entries == 10
        assert other.ask(m.Pin(1, NAMESPACE_ID, b"", False, leaves=True)).count == 10
    assert client.stat().index.pinned_entries == 0
    client.store(block_hashes_of((60, "more")))
    assert client.ask(m.Inspect(1, NAMESPACE_ID, BLOCK_HASHES)).num_hash_blocks < 10, "they are evicted again"


def test_store_pins_of_unused_namespaces_give_way(server):
    """Half of the memory was filled with pins of engines that are gone, and `kvtier pin` pinned nothing."""
    half = block_hashes_of((120, "a system prompt"))
    with RawClient(server.path, engine_hello("another model", pages=1)) as other:
        with RawClient(server.path, engine_hello(pages=1)) as client:
            client.store(half)
            assert client.ask(m.Pin(1, NAMESPACE_ID, half, True)) == m.Done(1, 120)
            there = m.Reserve(2, OTHER, b"", *items_of(half), EVERYTHING)
            other.send(m.Commit([slot for slot in other.ask(there).slots if slot > 0]))
            done = other.ask(m.Pin(3, OTHER, half, True))
            assert done.count == 8 and done.reason.startswith("8 blocks are pinned and 112 are not"), done
            assert "50% of the memory (pin_share)" in done.reason and client.stat().index.pinned_entries == 128
        eventually(lambda: len(other.stat().clients) == 1)
        assert other.ask(m.Pin(4, OTHER, half, True)) == m.Done(4, 112)
        assert other.stat().index.pinned_entries == 120
        with RawClient(server.path, tool_hello()) as tool:
            assert tool.ask(m.Inspect(5, NAMESPACE_ID, half)).num_hash_blocks == 120, "they are kept as others are"


def test_store_answers_others_while_it_clears(client, monkeypatch):
    monkeypatch.setattr(server_module, "CLEAR_STEP", 4)
    client.store(BLOCK_HASHES)
    begin, rest = BLOCK_HASHES[: 2 * m.HASH_BYTES], BLOCK_HASHES[2 * m.HASH_BYTES :]
    client.socket.sendall(
        b"".join(
            struct.pack("<I", len(frame)) + frame
            for frame in map(m.encode, (m.Clear(1), m.Stat(2), m.Lookup(3, NAMESPACE_ID, begin, 0, EVERYTHING)))
        )
    )
    assert client.hear().index.entries == 6
    found = client.hear()
    assert (found.id, found.num_hash_blocks) == (3, 2)
    assert client.hear() == m.Done(1, 10)
    assert client.stat().index.entries == 0 and client.lookup(rest).num_hash_blocks == 0


def test_store_discard_removes_block_of_that_slot_only(client):
    slots = client.store(BLOCK_HASHES)
    client.send(m.Discard(NAMESPACE_ID, 0, BLOCK_HASHES[64:80], slots[5]))
    assert client.lookup(BLOCK_HASHES).num_hash_blocks == 10, "it is no longer that block's slot"
    client.send(m.Discard(NAMESPACE_ID, 0, BLOCK_HASHES[64:80], slots[4]))
    assert client.lookup(BLOCK_HASHES).num_hash_blocks == 4


def test_store_discard_reaches_the_tiers_only_if_the_block_was_in_that_slot(server, client, monkeypatch):
    """After a lease has expired the slot may hold another block when it is read: copies in the tiers, which other
    nodes share, may be good."""
    discarded = []
    monkeypatch.setattr(server.tiers, "discard", lambda *name: discarded.append(name))
    slots, name = client.store(BLOCK_HASHES), (NAMESPACE_ID, 0, BLOCK_HASHES[64:80])
    client.send(m.Discard(*name, slots[4] + 1))
    assert client.stat().index.discards == 0 and discarded == [], "memory has another copy than the one that failed"
    client.send(m.Discard(*name, slots[4]))
    assert client.stat().index.discards == 1 and discarded == [name]
    other = (NAMESPACE_ID, 0, BLOCK_HASHES[16:32])
    client.store(block_hashes_of((500, "b")))
    assert client.lookup(BLOCK_HASHES).num_hash_blocks == 0, "evicted"
    client.send(m.Discard(*other, slots[1]))
    assert client.stat().index.discards == 1 and discarded == [name]


def test_store_lookup_is_limited_to_mapped_slots(client):
    slots = client.store(BLOCK_HASHES)
    limit = sorted(slots)[5]
    found = client.ask(m.Lookup(1, NAMESPACE_ID, BLOCK_HASHES, 0, limit))
    assert 0 < found.num_hash_blocks < 10 and max(found.slots[0]) < limit


def test_store_stat_reports_pool_and_clients(server, client):
    counts = client.stat()
    assert counts.pool_bytes == counts.ready_bytes == 1 << 20 and counts.note == "" and counts.policy
    assert [(c.name, c.kind) for c in counts.clients] == [("engine", "engine")]


def test_store_tool_client_may_not_lease(server):
    with RawClient(server.path, tool_hello()) as tool:
        assert tool.stat().pid == os.getpid()
        assert tool.ask(m.Clear(1)).count == 0
        tool.send(m.Lookup(1, NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING))
        assert tool.ended()


# -- what a connection leaves behind ---------------------------------------------------------------------------


def test_store_client_exit_releases_leases_and_reservations(server):
    with RawClient(server.path, engine_hello()) as writer, RawClient(server.path, tool_hello()) as tool:
        writer.store(BLOCK_HASHES)
        leaver = RawClient(server.path, engine_hello("leaver"))
        leaver.lookup(BLOCK_HASHES)
        leaver.reserve(block_hashes_of((5, "b")))
        index = tool.stat().index
        assert (index.leases, index.reservations) == (1, 5)
        leaver.close()
        eventually(lambda: (lambda i: (i.leases, i.reservations))(tool.stat().index) == (0, 0))
        assert min(writer.reserve(block_hashes_of((5, "b")))) > 0


def test_store_answers_others_while_leases_of_one_end(server, client, monkeypatch):
    """2,000 leases of 2,048 blocks took it 0.4 s."""
    monkeypatch.setattr(index_module, "RELEASE_STEP", 20)
    client.store(BLOCK_HASHES)
    leaver = RawClient(server.path, engine_hello("leaver"))
    for _ in range(9):
        leaver.lookup(BLOCK_HASHES)
    left, call_soon = [], server.reactor.call_soon

    def note(callback):
        left.append(server.index.stats().leases)
        call_soon(callback)

    monkeypatch.setattr(server.reactor, "call_soon", note)
    leaver.close()
    eventually(lambda: not server.index.stats().leases)
    assert left == [7, 5, 3, 1]
    assert client.lookup(BLOCK_HASHES).num_hash_blocks == 10 and client.stat().index.leases == 1


def test_store_ends_expired_leases_in_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "RELEASE_STEP", 20)
    monkeypatch.setattr(options, "HOLD_SECONDS", 0.0)
    server, left = make(tmp_path / "s.sock", lease_seconds=0.5), []
    tick = server.index.tick
    monkeypatch.setattr(server.index, "tick", lambda: [tick(), left.append(server.index.stats().leases)][0])
    with RawClient(server.path, engine_hello()) as client:
        client.store(BLOCK_HASHES)
        for _ in range(9):
            client.lookup(BLOCK_HASHES)
        eventually(lambda: not client.stat().index.leases)
    assert all(before - after <= 2 for before, after in itertools.pairwise(left))
    server.stop()


def test_store_leases_and_reservations_of_hung_client_expire(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "STORE_SECONDS", 0.0)
    monkeypatch.setattr(options, "HOLD_SECONDS", 0.0)
    server = make(tmp_path / "s.sock", lease_seconds=0.1, reserve_seconds=0.1)
    with RawClient(server.path, engine_hello()) as client:
        client.store(BLOCK_HASHES)
        client.lookup(BLOCK_HASHES)
        client.reserve(block_hashes_of((5, "b")))
        eventually(lambda: (lambda i: (i.leases, i.reservations))(client.stat().index) == (0, 0))
        eventually(lambda: server._tick is None, what="no timer while nothing is held")
    server.stop()


# -- nonsense -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "nonsense",
    [
        b"",
        b"\xc1",
        b"nonsense",
        msgspec.msgpack.encode({"type": "lookup"}),
        msgspec.msgpack.encode({"type": "unheard of"}),
        m.encode(m.Welcome(1, "", "", 1, 1, 1, False)),
        m.encode(engine_hello()),
        m.encode(m.Lookup(1, NAMESPACE_ID, bytes(17), 0, EVERYTHING)),
        m.encode(m.Lookup(1, NAMESPACE_ID, BLOCK_HASHES, 11, EVERYTHING)),
        m.encode(m.Reserve(1, NAMESPACE_ID, b"", [0], b"", b"", EVERYTHING)),
        m.encode(m.Reserve(1, NAMESPACE_ID, b"", [1], bytes(16), bytes(16), EVERYTHING)),
        m.encode(m.Pin(1, NAMESPACE_ID, bytes(15), True)),
        b"\x91" * 5000,
    ],
)
def test_store_malformed_message_closes_only_its_connection(server, client, nonsense):
    with RawClient(server.path, engine_hello("witness")) as witness:
        client.lookup(BLOCK_HASHES)
        assert isinstance(client.ask(nonsense), m.Refused)
        assert client.ended()
        assert witness.stat().instance == server.instance
        assert len(witness.stat().clients) == 1


def test_store_request_before_hello_is_refused(server):
    with RawClient(server.path) as client:
        assert "protocol" in client.ask(m.Stat(1)).reason
        assert client.ended()


def test_store_other_protocol_is_refused_with_versions(server):
    with RawClient(server.path) as client:
        refused = client.ask(m.Hello("new", 1, "engine", protocol=99, version="9.9"))
        assert "protocol" in refused.reason and "99" in refused.reason and "9.9" in refused.reason
        assert client.ended()


def test_store_client_of_other_user_is_refused(server, monkeypatch):
    monkeypatch.setattr("vllm_kvtier.store.server.server.Stream.peer", lambda self: (1, 4242))
    with RawClient(server.path) as client:
        assert "4242" in client.hear().reason
        assert client.ended()
    monkeypatch.undo()
    assert_serves(server)


def test_store_silent_client_is_disconnected(server, monkeypatch):
    monkeypatch.setattr("vllm_kvtier.store.server.server.HELLO_SECONDS", 0.1)
    with RawClient(server.path) as silent:
        assert silent.ended()


def test_store_too_many_clients_are_refused_with_cause(server, monkeypatch):
    monkeypatch.setattr("vllm_kvtier.store.server.server.MAX_CLIENTS", 2)
    with RawClient(server.path, tool_hello()), RawClient(server.path, tool_hello()):
        with RawClient(server.path) as third:
            assert "2 clients" in third.hear().reason
    eventually(lambda: not server._clients)
    assert_serves(server)


def test_store_client_that_never_reads_is_disconnected(server, client):
    client.store(BLOCK_HASHES)
    with RawClient(server.path, engine_hello("deaf")) as deaf:
        frame = m.encode(m.Lookup(1, NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING))
        # The default bound is far above what honest clients leave unread; this one is lowered to get there soon.
        number = max(server._clients)
        server._clients[number].stream._limits = StreamLimits(backlog=100_000)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(200_000):
                write_frame(deaf.socket, frame)
    eventually(lambda: client.stat().index.leases == 0)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    server = make(tmp_path_factory.mktemp("fuzz") / "s.sock")
    with RawClient(server.path, engine_hello("other")):  # without one, a Hello of another protocol ends the store
        yield server
    server.stop()


HASHES = st.one_of(st.binary(max_size=100), st.integers(0, 12).map(lambda n: BLOCK_HASHES[: n * 16]))
IDS = st.integers(0, 1 << 53)
PAGES = st.one_of(st.integers(0, 300), st.integers(0, 1 << 40))
NAMESPACE_IDS = st.sampled_from([NAMESPACE_ID, bytes(16)])
SLOTS = st.lists(st.integers(1, 300), max_size=20)
FAMILIES = st.sampled_from([b"family 1", b"family 2"])
KEYS = st.one_of(st.binary(max_size=40), st.integers(0, 9).map(lambda n: bytes(range(8 * n))))
REQUESTS = st.one_of(
    st.builds(m.Present, FAMILIES, st.text(max_size=5), st.integers(1, 65535), st.text(max_size=5)),
    st.builds(m.Cached, KEYS, KEYS, st.booleans()),
    st.builds(
        m.Lookup,
        IDS,
        NAMESPACE_IDS,
        HASHES,
        st.integers(0, 20),
        PAGES,
        key_mask=st.sampled_from([b"", bytes(8), bytes(7)]),
        hash_blocks_per_block=st.integers(1, 5),
    ),
    st.builds(m.Lookup, IDS, NAMESPACE_IDS, HASHES, st.integers(0, 20), PAGES),
    st.builds(m.Touch, NAMESPACE_IDS, HASHES),
    st.builds(m.Release, st.integers(0, 50)),
    st.builds(
        m.Reserve,
        IDS,
        NAMESPACE_IDS,
        st.binary(max_size=16),
        st.lists(st.integers(0, 3), max_size=12),
        HASHES,
        HASHES,
        PAGES,
    ),
    st.builds(m.Commit, SLOTS),
    st.builds(m.Abort, SLOTS),
    st.builds(m.Discard, NAMESPACE_IDS, st.integers(0, 3), st.binary(min_size=16, max_size=16), st.integers(1, 300)),
    st.builds(m.Pin, IDS, NAMESPACE_IDS, HASHES, st.booleans()),
    st.builds(m.Clear, IDS, st.one_of(st.none(), NAMESPACE_IDS)),
    st.builds(m.Stat, IDS),
    st.builds(m.Inspect, IDS, NAMESPACE_IDS, HASHES),
    st.builds(m.Hello, st.text(max_size=5), IDS, st.just("engine")),
)
SHAPES = st.lists(
    st.builds(m.GroupShape, st.integers(1, 4), st.integers(1, 5), st.one_of(st.none(), st.integers(1, 100))), max_size=3
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    shapes=SHAPES,
    requests=st.lists(REQUESTS, max_size=12),
    damage=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=2),
)
def test_fuzz_store_messages_do_not_affect_other_clients(target, shapes, requests, damage):
    hello = m.Hello("fuzz", 1, "engine", hash_block_size=16, groups=shapes)
    frames = [m.encode(message) for message in (hello, *requests)]
    data = bytearray(b"".join(struct.pack("<I", len(frame)) + frame for frame in frames))
    for place, value in damage:
        data[place % len(data)] = value
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(10)
        sock.connect(target.path)
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                pass
        except (BrokenPipeError, ConnectionResetError):
            pass
    with RawClient(target.path, tool_hello()) as tool:
        counts = tool.stat()
        assert (counts.index.leases, counts.index.reservations) == (0, 0)
        assert counts.directory == m.DirectoryCounts(0, 0)


def test_store_fuzz_leaks_no_slot(target):
    with RawClient(target.path, engine_hello(pages=1)) as client:
        client.ask(m.Clear(1))
        assert client.stat().index.used_pages == 0
        slots = client.store(block_hashes_of((255, "whole pool")))
        assert sorted(slots) == list(range(1, 256))
        assert not target._peer_directory._directory._groups and not target._peer_directory._sent


# -- items ----------------------------------------------------------------------------------------------------


def test_store_test_helper_items_have_parents(client):
    """Of the helper that all these tests use: parents before children, the first one without."""
    groups, hashes, parents = items_of(BLOCK_HASHES, 4)
    assert (
        client.ask(m.Reserve(1, NAMESPACE_ID, b"", groups, hashes, parents, EVERYTHING)).slots
        == [m.NO_PARENT_STORED] * 6
    )
