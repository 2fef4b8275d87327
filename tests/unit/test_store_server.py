"""The node store answers out of its index, owns nothing of a connection longer than it lives, and survives nonsense."""

import os
import socket
import stat
import struct
import threading
import time

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_support import EVERYTHING, SPACE, RawClient, chain_of, engine_hello, items_of, tool_hello
from support import eventually

from vllm_kvtier.errors import ConfigError, KVTierError
from vllm_kvtier.store import messages as m
from vllm_kvtier.store.address import ServedAlready
from vllm_kvtier.store.lower.tiers import Lower
from vllm_kvtier.store.mapping import PoolMapping, shake_hands
from vllm_kvtier.store.memory import PoolMemory
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.server import StoreServer
from vllm_kvtier.wire.stream import write_frame

CHAIN = chain_of((10, "a"))


def make(path, on_idle=lambda: None, **options) -> StoreServer:
    server = StoreServer(str(path), StoreOptions(**{"size": "1MiB", **options}), on_idle)
    server.start()
    eventually(lambda: server.memory.ready == server.memory.usable)
    return server


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


def test_a_welcome_brings_the_memory(server, client):
    welcome = client.welcome
    assert (welcome.protocol, welcome.instance, welcome.pid) == (m.PROTOCOL, server.instance, os.getpid())
    assert welcome.pool_pages == welcome.ready_pages == 256
    (fd,) = client.fds
    assert os.fstat(fd).st_size == 256 * m.PAGE


def test_reserve_commit_lookup_release(client):
    slots = client.reserve(CHAIN)
    assert len(set(slots)) == 10 and min(slots) > 0
    assert client.lookup(CHAIN).units == 0, "nothing is found before it is written"
    assert client.reserve(CHAIN) == [m.EXISTS] * 10
    client.tell(m.Commit(slots[:7]))
    client.tell(m.Abort(slots[7:]))
    found = client.lookup(CHAIN)
    assert (found.units, found.slots) == (7, [slots[:7]]) and found.lease
    later = client.lookup(CHAIN, 3)
    assert (later.units, later.slots) == (7, [slots[3:7]]) and later.lease != found.lease
    assert client.stat().index.leases == 2
    for lease in (found.lease, later.lease, 12345):
        client.tell(m.Release(lease))
    counts = client.stat()
    assert (counts.index.leases, counts.index.reservations) == (0, 0)


def test_another_engine_finds_it_too_and_a_space_is_a_wall(server, client):
    slots = client.store(CHAIN)
    with RawClient(server.path, engine_hello("other")) as other:
        assert other.lookup(CHAIN).slots == [slots]
        nothing = other.ask(m.Lookup(1, bytes(16), CHAIN, 0, EVERYTHING))
        assert (nothing.units, nothing.lease) == (0, 0)


def test_inspect_pin_clear(client):
    client.store(CHAIN)
    assert client.ask(m.Inspect(1, SPACE, CHAIN + bytes(16))) == m.Holding(1, 10, [10])
    assert client.ask(m.Inspect(1, SPACE, bytes(16) + CHAIN)) == m.Holding(1, 0, [10])
    assert client.ask(m.Inspect(1, bytes(16), CHAIN)) == m.Holding(1, 0, [])
    assert client.stat().index.leases == 0
    assert client.ask(m.Pin(1, SPACE, CHAIN, True)).count == 10
    assert client.ask(m.Pin(1, SPACE, CHAIN, False)).count == 10
    assert client.ask(m.Clear(1, SPACE)).count == 10
    assert client.lookup(CHAIN).units == 0


def test_discard_forgets_a_block_that_was_found_broken(client):
    slots = client.store(CHAIN)
    client.tell(m.Discard(SPACE, 0, CHAIN[64:80], slots[5]))
    assert client.lookup(CHAIN).units == 10, "it is no longer that block's slot"
    client.tell(m.Discard(SPACE, 0, CHAIN[64:80], slots[4]))
    assert client.lookup(CHAIN).units == 4


def test_a_client_sees_only_what_it_can_reach(client):
    slots = client.store(CHAIN)
    limit = sorted(slots)[5]
    found = client.ask(m.Lookup(1, SPACE, CHAIN, 0, limit))
    assert 0 < found.units < 10 and max(found.slots[0]) < limit


def test_stat(server, client):
    counts = client.stat()
    assert counts.pool_bytes == counts.ready_bytes == 1 << 20 and counts.note == "" and counts.policy
    assert [(c.name, c.kind) for c in counts.clients] == [("engine", "engine")]


def test_tools_may_ask_but_not_hold(server):
    with RawClient(server.path, tool_hello()) as tool:
        assert tool.stat().pid == os.getpid()
        assert tool.ask(m.Clear(1)).count == 0
        tool.tell(m.Lookup(1, SPACE, CHAIN, 0, EVERYTHING))
        assert tool.ended()


# -- what a connection leaves behind ---------------------------------------------------------------------------


def test_what_a_client_held_is_free_when_it_leaves(server):
    with RawClient(server.path, engine_hello()) as writer, RawClient(server.path, tool_hello()) as tool:
        writer.store(CHAIN)
        leaver = RawClient(server.path, engine_hello("leaver"))
        leaver.lookup(CHAIN)
        leaver.reserve(chain_of((5, "b")))
        index = tool.stat().index
        assert (index.leases, index.reservations) == (1, 5)
        leaver.close()
        eventually(lambda: (lambda i: (i.leases, i.reservations))(tool.stat().index) == (0, 0))
        assert min(writer.reserve(chain_of((5, "b")))) > 0


def test_leases_and_reservations_of_a_client_that_hangs_end(tmp_path):
    server = make(tmp_path / "s.sock", lease_seconds=0.1, reserve_seconds=0.1)
    with RawClient(server.path, engine_hello()) as client:
        client.store(CHAIN)
        client.lookup(CHAIN)
        client.reserve(chain_of((5, "b")))
        eventually(lambda: (lambda i: (i.leases, i.reservations))(client.stat().index) == (0, 0))
        eventually(lambda: server._tick is None, what="no timer while nothing is held")
    server.stop()


# -- nonsense -------------------------------------------------------------------------------------------------


def assert_serves(server: StoreServer) -> None:
    with RawClient(server.path, engine_hello("check")) as client:
        assert client.stat().instance == server.instance


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
        m.encode(m.Lookup(1, SPACE, bytes(17), 0, EVERYTHING)),
        m.encode(m.Lookup(1, SPACE, CHAIN, 11, EVERYTHING)),
        m.encode(m.Reserve(1, SPACE, b"", [0], b"", b"", EVERYTHING)),
        m.encode(m.Reserve(1, SPACE, b"", [1], bytes(16), bytes(16), EVERYTHING)),
        m.encode(m.Pin(1, SPACE, bytes(15), True)),
        b"\x91" * 5000,
    ],
)
def test_nonsense_costs_its_sender_the_connection_and_nobody_else(server, client, nonsense):
    with RawClient(server.path, engine_hello("witness")) as witness:
        client.lookup(CHAIN)
        assert isinstance(client.ask(nonsense), m.Refused)
        assert client.ended()
        assert witness.stat().instance == server.instance
        assert len(witness.stat().clients) == 1


def test_a_request_before_the_greeting_is_refused_in_words(server):
    with RawClient(server.path) as client:
        assert "protocol" in client.ask(m.Stat(1)).reason
        assert client.ended()


def test_another_protocol_is_refused_in_words(server):
    with RawClient(server.path) as client:
        refused = client.ask(m.Hello("new", 1, "engine", protocol=99, version="9.9"))
        assert "protocol" in refused.reason and "99" in refused.reason and "9.9" in refused.reason
        assert client.ended()


def test_another_user_is_refused_in_words(server, monkeypatch):
    monkeypatch.setattr("vllm_kvtier.store.server.Stream.peer", lambda self: (1, 4242))
    with RawClient(server.path) as client:
        assert "4242" in client.hear().reason
        assert client.ended()
    monkeypatch.undo()
    assert_serves(server)


def test_whoever_says_nothing_is_not_waited_for(server, monkeypatch):
    monkeypatch.setattr("vllm_kvtier.store.server.HELLO_SECONDS", 0.1)
    with RawClient(server.path) as silent:
        assert silent.ended()


def test_too_many_clients_are_told_so(server, monkeypatch):
    monkeypatch.setattr("vllm_kvtier.store.server.MAX_CLIENTS", 2)
    with RawClient(server.path, tool_hello()), RawClient(server.path, tool_hello()):
        with RawClient(server.path) as third:
            assert "2 clients" in third.hear().reason
    eventually(lambda: not server._clients)
    assert_serves(server)


def test_a_client_that_never_reads_is_dropped(server, client):
    client.store(CHAIN)
    with RawClient(server.path, engine_hello("deaf")) as deaf:
        frame = m.encode(m.Lookup(1, SPACE, CHAIN, 0, EVERYTHING))
        # The default bound is far above what honest clients leave unread; this one is lowered to get there soon.
        number = max(server._clients)
        server._clients[number].stream._max_backlog = 100_000
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            for _ in range(200_000):
                write_frame(deaf.socket, frame)
    eventually(lambda: client.stat().index.leases == 0)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    server = make(tmp_path_factory.mktemp("fuzz") / "s.sock")
    yield server
    server.stop()


HASHES = st.one_of(st.binary(max_size=100), st.integers(0, 12).map(lambda n: CHAIN[: n * 16]))
IDS = st.integers(0, 1 << 53)
PAGES = st.one_of(st.integers(0, 300), st.integers(0, 1 << 40))
SPACES = st.sampled_from([SPACE, bytes(16)])
SLOTS = st.lists(st.integers(1, 300), max_size=20)
FAMILIES = st.sampled_from([b"family 1", b"family 2"])
KEYS = st.one_of(st.binary(max_size=40), st.integers(0, 9).map(lambda n: bytes(range(8 * n))))
REQUESTS = st.one_of(
    st.builds(m.Present, FAMILIES, st.text(max_size=5), st.integers(1, 65535), st.text(max_size=5)),
    st.builds(m.Resident, KEYS, KEYS, st.booleans()),
    st.builds(
        m.Lookup,
        IDS,
        SPACES,
        HASHES,
        st.integers(0, 20),
        PAGES,
        mix=st.sampled_from([b"", bytes(8), bytes(7)]),
        stride=st.integers(1, 5),
    ),
    st.builds(m.Lookup, IDS, SPACES, HASHES, st.integers(0, 20), PAGES),
    st.builds(m.Touch, SPACES, HASHES),
    st.builds(m.Release, st.integers(0, 50)),
    st.builds(
        m.Reserve, IDS, SPACES, st.binary(max_size=16), st.lists(st.integers(0, 3), max_size=12), HASHES, HASHES, PAGES
    ),
    st.builds(m.Commit, SLOTS),
    st.builds(m.Abort, SLOTS),
    st.builds(m.Discard, SPACES, st.integers(0, 3), st.binary(min_size=16, max_size=16), st.integers(1, 300)),
    st.builds(m.Pin, IDS, SPACES, HASHES, st.booleans()),
    st.builds(m.Clear, IDS, st.one_of(st.none(), SPACES)),
    st.builds(m.Stat, IDS),
    st.builds(m.Inspect, IDS, SPACES, HASHES),
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
def test_fuzz_nothing_that_is_said_harms_the_others(target, shapes, requests, damage):
    hello = m.Hello("fuzz", 1, "engine", unit_tokens=16, groups=shapes)
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


def test_after_all_that_every_slot_is_there(target):
    with RawClient(target.path, engine_hello(pages=1)) as client:
        client.ask(m.Clear(1))
        assert client.stat().index.used_pages == 0
        slots = client.store(chain_of((255, "whole pool")))
        assert sorted(slots) == list(range(1, 256))
        assert not target._company._directory._families and not target._company._told


# -- the socket and the memory ---------------------------------------------------------------------------------


def test_only_this_user_may_connect(server):
    mode = os.stat(server.path).st_mode
    assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600


def test_a_path_is_served_once(server):
    with pytest.raises(ServedAlready, match=str(os.getpid())):
        StoreServer(server.path, StoreOptions(size="1MiB"))
    assert_serves(server)


def test_a_dead_stores_socket_is_replaced(tmp_path):
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = make(path)
    assert_serves(server)
    server.stop()
    assert not path.exists()
    server = make(path)
    assert_serves(server)
    server.stop()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    for _ in range(2):
        with pytest.raises(KVTierError, match="no socket"):
            StoreServer(str(path), StoreOptions(size="1MiB"))
    assert path.read_text() == "data"


def test_what_cannot_be_served_leaves_no_lock_behind(tmp_path):
    path = str(tmp_path / "s.sock")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="does not fit"):
        StoreServer(path, StoreOptions(size="1000TiB"))
    with pytest.raises(ConfigError, match="policy"):
        StoreServer(path, StoreOptions(policy="best"))
    with pytest.raises(KVTierError, match="no directory"):
        StoreServer(str(tmp_path / "none" / "s.sock"), StoreOptions())
    with pytest.raises(KVTierError, match="cannot listen"):
        StoreServer(str(tmp_path / ("long" * 40)), StoreOptions(size="1MiB"))
    assert len(os.listdir("/proc/self/fd")) == before
    make(path).stop()


def test_everything_is_given_back_at_the_end(tmp_path):
    make(tmp_path / "warm.sock").stop()
    before = len(os.listdir("/proc/self/fd"))
    server = make(tmp_path / "s.sock")
    client = RawClient(server.path, engine_hello())
    server.stop()
    server.stop()
    assert client.ended()
    client.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_becomes_usable_is_told_and_used(tmp_path, monkeypatch):
    """Serving starts before any of it is."""
    go = threading.Event()
    inner = PoolMemory._make_usable

    def slow(self, start, end, hands):
        assert go.wait(10)
        go.clear()
        inner(self, start, end, hands)

    monkeypatch.setattr(PoolMemory, "_make_usable", slow)
    server = StoreServer(str(tmp_path / "s.sock"), StoreOptions(size="20MiB"))
    server.start()
    with RawClient(server.path, engine_hello()) as client:
        assert (client.welcome.ready_pages, client.welcome.pool_pages) == (0, 5120)
        assert client.reserve(CHAIN)[0] == m.NO_ROOM
        for ready in (4096, 5120):
            go.set()
            told = m.decode_reply(_next_frame(client))
            assert told == m.Ready(ready, 5120)
        assert min(client.reserve(CHAIN)) > 0
    go.set()
    server.stop()


def _next_frame(client: RawClient) -> bytes:
    from vllm_kvtier.wire.stream import read_frame

    return read_frame(client.socket, time.monotonic() + 10, client.fds)


# -- idleness -------------------------------------------------------------------------------------------------


def test_a_store_that_nobody_uses_ends_itself(tmp_path):
    idle = threading.Event()
    server = make(tmp_path / "s.sock", idle.set, idle_seconds=0.3)
    with RawClient(server.path, engine_hello()):
        assert not idle.wait(0.6), "an engine is there"
    started = time.monotonic()
    with RawClient(server.path, tool_hello()):
        assert idle.wait(5), "statistics do not count as use"
    assert time.monotonic() - started > 0.25
    with pytest.raises(KVTierError, match="no node store answers"):
        shake_hands(server.path, engine_hello(), 1.0)
    server.stop()


def test_a_store_that_only_other_nodes_use_is_used(tmp_path, monkeypatch):
    idle, lent = threading.Event(), iter(range(5))
    monkeypatch.setattr(Lower, "lent", property(lambda lower: next(lent, 5)))
    server = make(tmp_path / "s.sock", idle.set, idle_seconds=0.3)
    started = time.monotonic()
    assert idle.wait(5)
    assert time.monotonic() - started > 0.8
    server.stop()


def test_idle_zero_means_never(server, tmp_path):
    other = make(tmp_path / "o.sock", idle_seconds=0)
    assert other._idle is None and server._idle is not None
    other.stop()


# -- mapping --------------------------------------------------------------------------------------------------


def test_mappings_share_the_memory_and_survive_the_store(server):
    one, two = PoolMapping.connect(server.path), PoolMapping.connect(server.path)
    assert one.nbytes == 1 << 20 and one.instance == server.instance
    server.stop()
    one.buffer[4096:4100] = b"abcd"
    assert bytes(two.buffer[4096:4100]) == b"abcd"
    one.close()
    two.close()


def test_mapping_says_why_not(tmp_path):
    with pytest.raises(KVTierError, match="no node store answers at .*No such file"):
        PoolMapping.connect(str(tmp_path / "none"))


# -- items ----------------------------------------------------------------------------------------------------


def test_items_of_is_what_the_store_means(client):
    """Of the helper that all these tests use: parents before children, the first one without."""
    groups, hashes, parents = items_of(CHAIN, 4)
    assert client.ask(m.Reserve(1, SPACE, b"", groups, hashes, parents, EVERYTHING)).slots == [m.NO_PARENT_STORED] * 6
