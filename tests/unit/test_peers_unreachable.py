"""Peers whose connection ends or cannot be made: asks on it end when the socket says so, not when their time is over.

Everywhere ``lookup_timeout`` is so long that a test which waited for it would fail.
"""

import os
import resource
import socket
import threading
from contextlib import contextmanager

import msgspec
import pytest
import zmq
from endpoint_support import Asker, Source, SourceProcess, export, making, ranks
from support import eventually

from vllm_kvtier.scheduler.leases import lease_client
from vllm_kvtier.scheduler.leases.exports import LeaseKind
from vllm_kvtier.scheduler.leases.lease_client import LeasedBlocks
from vllm_kvtier.scheduler.sources.base import LookupMiss
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey

LONG = dict(lookup_timeout=60.0, handshake_timeout=60.0)
SOON = 20.0  # seconds: what a busy machine may take for what happens at once


@pytest.fixture
def make():
    yield from making(**LONG)


@pytest.fixture
def nobody():
    """A port that is ours and on which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()


def on_reactor(asker, callback):
    done, out = threading.Event(), []
    asker.reactor.call_soon(lambda: (out.append(callback()), done.set()))
    assert done.wait(SOON)
    return out[0]


def assert_nothing_left(asker):
    reactor, peers = asker.reactor, asker.peers
    assert not peers._connections and not reactor._handlers and not reactor._monitors
    assert not [timer for _, _, timer in reactor._timers if timer.callback is not None]


# -- unreachable ------------------------------------------------------------------------------------------------------


def test_refused_port_is_unreachable_and_remembered(make, nobody):
    asker = make(Asker)
    got = asker.answer(nobody, SOON)
    assert (got.code, got.reason) == ("unreachable", "no connection can be made")
    assert asker.answer(nobody, SOON) == got
    assert nobody in asker.peers._paused, "remembered: the next request does not even try"
    on_reactor(asker, lambda: assert_nothing_left(asker))


def test_lookups_waiting_for_handshake_all_end(make, nobody):
    asker = make(Asker)
    asks = [asker.ask(nobody) for _ in range(50)]
    for ask in asks:
        ask.wait(SOON)
        assert ask.outcome.code == "unreachable"


def test_thousand_lookups_leave_no_socket_descriptor_or_timer(make, nobody):
    asker = make(Asker)

    def one():
        on_reactor(asker, asker.peers._paused.clear)
        return asker.answer(nobody, SOON)

    one()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(100):
        asks = [asker.ask(nobody) for _ in range(9)]
        assert one().code == "unreachable"
        assert [eventually(lambda ask=ask: ask.outcome, SOON).code for ask in asks] == ["unreachable"] * 9
    on_reactor(asker, lambda: assert_nothing_left(asker))
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before, SOON, "ZMQ's own threads close descriptors")


def test_connections_exceed_zmq_default_limit(make):
    """Of 1023 sockets; each connection is three."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("too few descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    try:
        asker = make(Asker)
        with socket.socket() as listener:
            listener.bind(("", 0))
            listener.listen(1024)  # no accept: no handshake ends
            port = listener.getsockname()[1]
            asks = [asker.ask((f"127.0.{i // 250}.{i % 250 + 1}", port)) for i in range(400)]
            assert on_reactor(asker, lambda: len(asker.peers._connections)) == 400
            assert not any(ask.outcome for ask in asks)
        asker.stop()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_export_releases_to_dead_peer_do_not_accumulate(make, nobody):
    asker = make(Asker)
    for i in range(3000):
        asker.peers.release_export(nobody, f"export-{i}")
    eventually(lambda: nobody in asker.peers._paused, SOON)
    for i in range(3000):
        asker.peers.release_export(nobody, f"export-{i}")
    on_reactor(asker, lambda: assert_nothing_left(asker))


def test_silent_peer_costs_the_timeout(make):
    """As a machine that is gone, or a firewall: no event tells of it."""
    asker = make(Asker, lookup_timeout=0.3)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        assert asker.answer(listener.getsockname(), SOON).code == "timeout"


def test_client_with_all_its_connections_open_gives_up_the_longest_unused(make, monkeypatch):
    """A request may name any addresses, and in a large cluster there are many."""
    monkeypatch.setattr(lease_client, "MAX_CONNECTIONS", 2)
    asker, sources = make(Asker), [make(Source, f"source/{n}") for n in range(3)]
    for source in sources:
        source.table.add(export(kind=LeaseKind.RETAINED))
    held = asker.answer(sources[0].address, SOON)
    asker.peers.release(asker.answer(sources[1].address, SOON), done=False)
    other = asker.answer(sources[2].address, SOON)
    assert isinstance(other, LeasedBlocks) and asker.held() == 2, "the first is in use, the second was not"
    assert asker.answer(sources[1].address, SOON).code == "unreachable"
    asker.peers.release(held, done=False)
    assert asker.answer(("192.0.2.1", 7), SOON).code == "unreachable" and asker.held() == 1
    assert on_reactor(asker, lambda: len(asker.peers._connections)) == 2, "an address that is refused closes none"
    assert isinstance(asker.answer(sources[1].address, SOON), LeasedBlocks) and asker.held() == 2


# -- killed ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_key", [False, True], ids=["plain", "key"])
def test_peer_killed_during_lookup_is_unreachable_until_restart(make, tmp_path, with_key, way):
    key_file = str(tmp_path / "key") if with_key else ""
    if with_key:
        ClusterKey.create(key_file)
    asker = make(Asker, key=ClusterKey.load(key_file) if with_key else None)
    with SourceProcess(key_file=key_file) as source:
        asks = [asker.ask(source.address, from_prefix_cache=True) for _ in range(5)]
        for _ in asks:
            source.await_ask()
        assert not [ask for ask in asks if ask.outcome]
        source.kill()
        for ask in asks:
            got = eventually(lambda ask=ask: ask.outcome, SOON)
            assert got.code == "unreachable" and "closed" in got.reason
        on_reactor(asker, lambda: assert_nothing_left(asker))
        assert asker.answer(source.address, SOON).reason == "no connection can be made"
    with SourceProcess(source.address[1], "source/2", key_file) as again:

        def retry():
            got = asker.answer(again.address, SOON)
            assert isinstance(got, LeasedBlocks) or got.code == "unreachable"
            return got if isinstance(got, LeasedBlocks) else None

        assert eventually(retry, SOON).instance == "source/2"


def test_peer_restarted_between_lookups_is_used(make, way):
    """No ask in between: nothing is remembered, and the next is answered."""
    asker = make(Asker)
    with SourceProcess() as source:
        asker.peers.release(asker.answer(source.address, SOON), done=True)
        eventually(lambda: not asker.held())
        source.kill()
        eventually(lambda: not asker.peers._connections, SOON)
    with SourceProcess(source.address[1], "source/2") as again:
        assert asker.answer(again.address, SOON).instance == "source/2"


def test_death_of_hung_peer_ends_backoff(make, way):
    asker = make(Asker)
    with SourceProcess() as source:
        assert asker.answer(source.address, SOON, from_prefix_cache=True, timeout=0.2).code == "timeout"
        assert asker.peers._paused
        source.kill()
        eventually(lambda: not asker.peers._paused, SOON)
    with SourceProcess(source.address[1], "source/2") as again:
        assert asker.answer(again.address, SOON).instance == "source/2"


def test_peer_killed_with_leases_ends_them_and_is_not_queried(make):
    """What it leased is void when the lease would be, or given back, whichever is first; nothing is asked meanwhile.
    (On its own node its end is known for certain: ``test_local.py``.)"""
    asker = make(Asker, lease_seconds=3.0)
    with SourceProcess() as source:
        kept, returned = (asker.answer(source.address, SOON) for _ in range(2))
        assert asker.peers.known(source.address, "source/1") is not None
        ask = asker.ask(source.address, from_prefix_cache=True)
        source.await_ask()
        source.kill()
        assert eventually(lambda: ask.outcome, SOON).code == "unreachable"
        assert asker.held() == 2 and asker.peers.known(source.address, "source/1") is None
        assert asker.answer(source.address, SOON).code == "unreachable"
        asker.peers.release(returned, done=True)
        for i in range(3000):
            asker.peers.release_export(source.address, f"export-{i}")
        eventually(lambda: not asker.peers._connections, SOON)
        asker.peers.release(kept, done=True)
        on_reactor(asker, lambda: assert_nothing_left(asker))


# -- what was answered ------------------------------------------------------------------------------------------------


@contextmanager
def last_words(answer):
    """An engine that answers its first ask with ``answer(ask)`` and closes its socket behind it."""
    context = zmq.Context()
    server = context.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")

    def serve():
        while True:
            identity, frame = server.recv_multipart()
            message = m.decode_engine(frame)
            if isinstance(message, m.Hello):
                server.send_multipart([identity, m.encode(m.Welcome(m.PROTOCOL, "brief/1", ranks()))])
            elif isinstance(message, m.LeaseRequest):
                server.send_multipart([identity, m.encode(answer(message))])
                server.close(linger=10_000)
                return

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield ("127.0.0.1", port)
    finally:
        thread.join(SOON)
        context.term()


@pytest.mark.parametrize("lease", [True, False])
def test_answer_before_close_is_used(make, lease):
    asker = make(Asker)

    def answer(ask):
        if lease:
            return m.LeaseGranted(ask.lookup_id, 1, 16, 0, [[1, 2, 3, 4]], 60.0)
        return m.LeaseRefused(ask.lookup_id, "no_matching_blocks", "")

    for _ in range(30):
        with last_words(answer) as address:
            got = asker.answer(address, SOON)
            assert isinstance(got, LeasedBlocks) if lease else got.code == "no_matching_blocks"


def test_answer_sent_before_close_is_read(make):
    """The reactor comes late and sees both at once, the close first."""
    asker = make(Asker)
    go = threading.Event()
    granted = m.LeaseGranted(1, 1, 16, 0, [[1, 2, 3, 4]], 60.0)
    with last_words(lambda ask: go.wait(SOON) and msgspec.structs.replace(granted, lookup_id=ask.lookup_id)) as address:
        pending = asker.ask(address)
        connection = eventually(lambda: asker.peers._connections.get(address), SOON)
        eventually(lambda: connection.asked, SOON)

        def close_heard_first():
            monitor = asker.reactor._monitors[connection.dealer._socket]
            go.set()
            assert monitor.poll(SOON * 1000), "the connection ended"
            asker.reactor._handlers[monitor]()
            return pending.outcome

        assert isinstance(on_reactor(asker, close_heard_first), LeasedBlocks)


# -- only the connection breaks ---------------------------------------------------------------------------------------


class Cable:
    """Between an asker and ``target``; can be cut, and mended."""

    def __init__(self, target):
        self._target, self._ends = target, []
        self.address, self.made = ("127.0.0.1", 0), 0
        self.mend()

    def mend(self):
        self._listener = socket.create_server(self.address)
        self.address = self._listener.getsockname()
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener):
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._ends += [near, far]
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()
            self.made += 1

    @staticmethod
    def _pass(source, sink):
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
        except OSError:
            pass

    def cut(self, refuse=True):
        if refuse:
            _shut(self._listener)
        for end in self._ends:
            _shut(end)
        self._ends = []


def _shut(end):
    """What waits for it wakes, as it does not when it is only closed."""
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    end.close()


@pytest.fixture
def cables():
    made = []

    def lay(target):
        made.append(Cable(target))
        return made[-1]

    yield lay
    for cable in made:
        cable.cut()


def test_leases_survive_broken_connection(make, cables):
    asked = threading.Event()
    source = make(Source, lend=lambda *_: asked.set(), lease_seconds=6.0)
    asker = make(Asker, lease_seconds=6.0)
    source.table.add(export(kind=LeaseKind.RETAINED))
    cable = cables(source.address)
    offer = asker.answer(cable.address, SOON)
    lost = asker.ask(cable.address, from_prefix_cache=True)
    assert asked.wait(SOON)
    lease = source.table._leases[offer.lease]
    cable.cut(refuse=False)
    assert eventually(lambda: lost.outcome, SOON) == LookupMiss("unreachable", "the connection was closed")
    assert asker.held() == 1

    def again():
        got = asker.answer(cable.address, SOON)
        return got if isinstance(got, LeasedBlocks) else None

    second = eventually(again, SOON)
    assert cable.made == 2 and second.instance == offer.instance
    deadline = lease.deadline
    eventually(lambda: lease.deadline > deadline, SOON, "pings renew it")
    for each in (offer, second):
        asker.peers.release(each, done=True)
    eventually(lambda: source.leases() == 0, 5, "given back, sooner than it would run out")


def test_unsent_lookup_is_not_sent_after_reconnect(make, cables):
    asked = []
    source = make(Source, lend=lambda ask, *_: asked.append(ask.lookup_id))
    asker = make(Asker)
    cable = cables(source.address)
    first = asker.ask(cable.address, from_prefix_cache=True)
    eventually(lambda: asked, SOON)
    connection = asker.peers._connections[cable.address]

    def ask_over_a_broken_connection():
        cable.cut()
        monitor = asker.reactor._monitors[connection.dealer._socket]
        assert monitor.poll(SOON * 1000), "the event of its end"
        asker.reactor.look_at(monitor)
        return asker.ask(cable.address, from_prefix_cache=True)

    second = on_reactor(asker, ask_over_a_broken_connection)
    for ask in (first, second):
        assert eventually(lambda ask=ask: ask.outcome, SOON).code == "unreachable"
    cable.mend()
    on_reactor(asker, asker.peers._paused.clear)
    third = asker.ask(cable.address, from_prefix_cache=True)
    eventually(lambda: len(asked) > 1, SOON)
    assert asked == [first.request.lookup_id, third.request.lookup_id] and third.outcome is None and cable.made == 2
