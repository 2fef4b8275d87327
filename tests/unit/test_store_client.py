"""A client of the node store never waits, always gets an outcome, and finds a store again that died or hung."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from store_support import EVERYTHING, SPACE, RawClient, chain_of, engine_hello, items_of, tool_hello
from support import eventually, stop

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import client as client_module
from vllm_kvtier.store import messages as m
from vllm_kvtier.store import starting
from vllm_kvtier.store.client import Failed, StoreClient
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.server import StoreServer
from vllm_kvtier.wire.reactor import Reactor

CHAIN = chain_of((20, "a"))


def make(path, **options) -> StoreServer:
    server = StoreServer(str(path), StoreOptions(**{"size": "1MiB", **options}))
    server.start()
    eventually(lambda: server.memory.ready == server.memory.usable)
    return server


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "s.sock")


@pytest.fixture
def server(path):
    server = make(path)
    yield server
    server.stop()


@pytest.fixture
def reactor():
    reactor = Reactor("test")
    reactor.start()
    yield reactor
    reactor.stop()


@pytest.fixture
def connect(reactor, path):
    def connect(start=True, **options) -> StoreClient:
        client = StoreClient(reactor, path, options.pop("hello", engine_hello()), **options)
        if start:
            client.start()
        return client

    return connect


@pytest.fixture
def client(server, connect):
    client = connect()
    eventually(lambda: client.connected)
    return client


def outcome(pending):
    assert pending.wait(10)
    return pending.outcome


def store(client: StoreClient, chain: bytes) -> list[int]:
    groups, hashes, parents = items_of(chain)
    pending = client.reserve(SPACE, b"", groups, hashes, parents, EVERYTHING)
    slots = outcome(pending).slots
    client.commit([slot for slot in slots if slot > 0], pending.session)
    return slots


def test_questions_are_answered(server, client):
    assert (client.instance, client.reason, client.pool_pages) == (server.instance, "", 256)
    slots = store(client, CHAIN)
    pending = client.lookup(SPACE, CHAIN, 0, EVERYTHING)
    found = outcome(pending)
    assert found.units == 20 and found.slots == [slots]
    client.touch(SPACE, CHAIN)
    client.release(found.lease, pending.session)
    assert outcome(client.stat()).index.leases == 0
    assert outcome(client.pin(SPACE, CHAIN)).count == 20
    assert outcome(client.pin(SPACE, CHAIN, False)).count == 20
    assert outcome(client.inspect(SPACE, CHAIN)).blocks == [20]
    client.discard(SPACE, 0, CHAIN[:16], slots[0])
    assert outcome(client.lookup(SPACE, CHAIN, 0, EVERYTHING)).units == 0
    outcome(client.clear())
    groups, hashes, parents = items_of(CHAIN)
    again = client.reserve(SPACE, b"", groups, hashes, parents, EVERYTHING)
    client.abort(outcome(again).slots, again.session)
    assert outcome(client.stat()).index.used_pages == 0


def test_then_is_called_once_wherever_the_answer_is_already(client, reactor):
    threads = []
    early = client.stat()
    early.then(lambda p: threads.append((p.outcome, threading.current_thread())))
    outcome(early)
    eventually(lambda: threads)
    early.then(lambda p: threads.append((p.outcome, threading.current_thread())))
    assert [t for _, t in threads] == [reactor._thread, threading.current_thread()]
    assert all(isinstance(o, m.Counts) for o, _ in threads)


def test_a_fault_in_what_follows_stops_nothing(client, caplog):
    pending = client.stat()
    called = threading.Event()
    pending.then(lambda _: 1 / 0)
    pending.then(lambda _: called.set())
    outcome(pending)
    assert called.wait(5) and isinstance(outcome(client.stat()), m.Counts)


def test_a_fault_in_on_change_does_not_cost_the_connection(server, connect, caplog):
    client = connect(on_change=lambda: 1 / 0)
    eventually(lambda: client.connected)
    assert isinstance(outcome(client.stat()), m.Counts)
    server.stop()
    eventually(lambda: client._retry_timer is not None, what="it goes on trying")
    assert "ZeroDivisionError" in caplog.text


def test_many_threads_get_their_own_answers(client):
    chains = [chain_of((n + 1, n)) for n in range(6)]
    for chain in chains:
        store(client, chain)
    wrong = []

    def ask(number: int) -> None:
        for _ in range(100):
            pending = client.lookup(SPACE, chains[number], 0, EVERYTHING)
            found = outcome(pending)
            if found.units != number + 1:
                wrong.append((number, found))
            client.release(found.lease, pending.session)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and outcome(client.stat()).index.leases == 0


def test_large_messages_pass(client):
    chain = os.urandom(16 * 100_000)
    assert outcome(client.lookup(SPACE, chain, 0, EVERYTHING)).units == 0
    too_long = os.urandom(16 * (m.MAX_UNITS + 1))
    assert outcome(client.lookup(SPACE, too_long, 0, EVERYTHING)).units == 0, "cut, not disconnected"
    with pytest.raises(ValueError):
        client.reserve(SPACE, b"", [0] * (m.MAX_ITEMS + 1), b"", b"", 0)


def test_without_a_store_every_question_fails_at_once(connect, path):
    client = connect()
    eventually(lambda: "no node store listens" in client.reason)
    started = time.monotonic()
    pending = client.lookup(SPACE, CHAIN, 0, EVERYTHING)
    assert isinstance(pending.outcome, Failed) and path in pending.outcome.reason
    for tell in (lambda: client.release(1), lambda: client.commit([1]), lambda: client.touch(SPACE, CHAIN)):
        tell()
    assert client.open_pool() is None and time.monotonic() - started < 0.5
    assert client.instance == "" and not client.connected


def test_a_store_that_appears_later_is_found(connect, path):
    changes = []
    client = connect(on_change=lambda: changes.append((client.connected, client.reason)), start=False)
    client.start()
    eventually(lambda: changes)
    server = make(path)
    eventually(lambda: client.connected)
    assert client.ready_pages >= 0 and changes[-1] == (True, "")
    eventually(lambda: client.ready_pages == 256)
    server.stop()


def test_it_survives_a_restart_and_old_numbers_mean_nothing(server, client, path):
    store(client, CHAIN)
    old = client.lookup(SPACE, CHAIN, 0, EVERYTHING)
    lease, instance = outcome(old).lease, client.instance
    pool = client.open_pool()
    pool.buffer[4096] = 7
    server.stop()
    eventually(lambda: not client.connected)
    assert "closed the connection" in client.reason and client.ready_pages == 0
    server = make(path)
    eventually(lambda: client.connected)
    assert client.instance not in ("", instance) and client.session > old.session
    assert pool.buffer[4096] == 7 and pool.instance == instance
    pool.close()
    groups, hashes, parents = items_of(CHAIN)
    new = client.reserve(SPACE, b"", groups, hashes, parents, EVERYTHING)
    slots = outcome(new).slots
    client.commit(slots, old.session)
    client.release(lease, old.session)
    client.abort(slots, old.session)
    assert outcome(client.lookup(SPACE, CHAIN, 0, EVERYTHING)).units == 0
    client.commit(slots, new.session)
    assert outcome(client.lookup(SPACE, CHAIN, 0, EVERYTHING)).units == 20
    with client.open_pool().buffer as fresh:
        assert fresh[4096] == 0
    server.stop()


def test_questions_under_way_when_it_dies_fail(path, connect):
    """A server that takes questions and never answers, then goes."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        client = connect(ask_timeout=30)
        sock = _greet(listener)
        eventually(lambda: client.connected)
        pending = [client.stat() for _ in range(5)]
        assert not any(p.outcome for p in pending)
        sock.close()
        assert all("Connection reset" in outcome(p).reason for p in pending)


def _greet(listener: socket.socket) -> socket.socket:
    listener.settimeout(10)
    sock, _ = listener.accept()
    sock.settimeout(10)
    sock.recv(1 << 16)
    welcome = m.encode(m.Welcome(m.PROTOCOL, "0", "instance", 1, 1, 1, False))
    with open("/dev/zero") as file:
        socket.send_fds(sock, [len(welcome).to_bytes(4, "little") + welcome], [file.fileno()])
    return sock


def test_a_store_that_hangs_counts_as_gone_and_only_once(path, connect):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        client = connect(ask_timeout=0.3)
        sock = _greet(listener)
        eventually(lambda: client.connected)
        started = time.monotonic()
        pending = [client.stat(), client.stat()]
        assert "has not answered for 0.3 s" in outcome(pending[0]).reason
        assert 0.2 < time.monotonic() - started < 2 and outcome(pending[1])
        assert sock.recv(1 << 16) and sock.recv(1) == b"", "the connection ended, and with it what the store lent"
        assert isinstance(client.stat().outcome, Failed), "the next question does not wait again"
        sock.close()
        # It tries again, and again gives up on a greeting that is not answered.
        sock, _ = listener.accept()
        eventually(lambda: "does not answer a greeting" in client.reason)
        sock.close()
        sock = _greet(listener)
        eventually(lambda: client.connected)
        sock.close()


@pytest.mark.parametrize("answer", [b"\xc1", m.encode(m.Ready(1, 1)), m.encode(m.Welcome(9, "9", "i", 1, 1, 1, False))])
def test_a_store_that_answers_a_greeting_with_something_else(path, connect, answer):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        client = connect()
        sock, _ = listener.accept()
        sock.sendall(len(answer).to_bytes(4, "little") + answer)
        eventually(lambda: "another version" in client.reason)
        assert not client.connected
        sock.close()


def test_a_refusal_is_in_words_and_not_asked_for_again_soon(server, connect, monkeypatch):
    client = connect(hello=m.Hello("new", 1, "engine", protocol=7, version="9.9"))
    eventually(lambda: "refuses" in client.reason)
    assert "9.9" in client.reason and not client.connected
    assert client._retry_timer.when - time.monotonic() > client_module.REFUSED_SECONDS / 2


def test_what_no_correct_client_says_is_not_said_again_and_again(server, client):
    client.lookup(SPACE, CHAIN, 21, EVERYTHING)
    eventually(lambda: "refuses" in client.reason)
    assert "unit 21" in client.reason
    assert client._retry_timer.when - time.monotonic() > client_module.REFUSED_SECONDS / 2


def test_a_full_queue_of_connections_is_waited_out(path, connect):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        waiting = []
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            waiting.append(sock)
            if sock.connect_ex(path):
                break
        client = connect()
        eventually(lambda: "no connection" in client.reason)
        for _ in waiting[:-1]:
            listener.accept()[0].close()
        sock = _greet(listener)
        eventually(lambda: client.connected)
        for one in (*waiting, sock):
            one.close()


def test_launch_is_called_where_nobody_listens_and_once_at_a_time(path, connect):
    calls, servers, go = [], [], threading.Event()

    def launch() -> None:
        calls.append(threading.current_thread())
        assert go.wait(10)
        servers.append(make(path))

    client = connect(launch=launch)
    eventually(lambda: calls)
    eventually(lambda: client.reason == "the node store is being started")
    assert isinstance(client.stat().outcome, Failed)
    go.set()
    eventually(lambda: client.connected)
    assert len(calls) == 1
    servers[0].stop()
    eventually(lambda: len(calls) == 2 and client.connected)
    servers[1].stop()


def test_a_launch_that_hangs_does_not_keep_it_from_another_store(path, connect):
    hang = threading.Event()
    client = connect(launch=lambda: hang.wait(20))
    eventually(lambda: "being started" in client.reason)
    server = make(path)
    eventually(lambda: client.connected)
    hang.set()
    assert isinstance(outcome(client.stat()), m.Counts)
    server.stop()


def test_a_launch_that_fails_is_told_and_tried_less_and_less(path, connect, monkeypatch):
    monkeypatch.setattr(starting, "PAUSE_SECONDS", (0.02, 0.05))
    monkeypatch.setattr(client_module, "RETRY_SECONDS", (0.05, 0.1))
    calls = []

    def launch() -> None:
        calls.append(time.monotonic())
        raise KVTierError("the pool does not fit") if len(calls) < 3 else RuntimeError("a bug")

    client = connect(launch=launch)
    eventually(lambda: "does not fit" in client.reason)
    eventually(lambda: "a bug" in client.reason)
    assert calls[1] - calls[0] > 0.015
    monkeypatch.setattr(starting, "PAUSE_SECONDS", (60.0, 60.0))
    client._starter._pause = 60.0
    eventually(lambda: client._starter._after > time.monotonic() + 30)
    server = make(path)
    eventually(lambda: client.connected, what="another store is found all the same")
    server.stop()


def test_close_ends_everything(server, client, reactor):
    slow = client.stat()
    client.close()
    client.close()
    eventually(lambda: not client.connected)
    assert outcome(slow)
    assert outcome(client.stat()).reason.endswith("closed here")
    with RawClient(server.path, tool_hello()) as tool:
        eventually(lambda: len(tool.stat().clients) == 1)


def test_the_reactors_end_is_the_clients(server, path):
    reactor = Reactor("short")
    before = len(os.listdir("/proc/self/fd"))
    client = StoreClient(reactor, path, engine_hello())
    client.start()
    reactor.start()
    eventually(lambda: client.connected)
    reactor.stop()
    assert not client.connected
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_an_idle_client_sleeps(client, reactor):
    outcome(client.stat())
    time.sleep(0.2)
    clock = time.pthread_getcpuclockid(reactor._thread.ident)
    before = time.clock_gettime(clock)
    time.sleep(0.5)
    assert time.clock_gettime(clock) - before < 0.01


def test_memory_is_announced_as_it_becomes_usable(path, connect, reactor):
    seen = []
    server = StoreServer(path, StoreOptions(size="100MiB"))
    server.start()
    client = connect(on_change=lambda: seen.append(client.ready_pages), start=False)
    client.start()
    eventually(lambda: client.ready_pages == client.pool_pages == 25600)
    assert seen == sorted(seen)
    server.stop()


def test_a_stopped_server_process_costs_one_timeout(path, connect):
    """SIGSTOP: the kernel goes on taking connections and messages in its name."""
    process = subprocess.Popen([sys.executable, "-m", "vllm_kvtier.store", "--socket", path, "--size=1MiB"])
    try:
        client = connect(ask_timeout=0.5)
        eventually(lambda: client.connected)
        stop(process.pid)
        started = time.monotonic()
        assert isinstance(outcome(client.lookup(SPACE, CHAIN, 0, EVERYTHING)), Failed)
        assert time.monotonic() - started < 2
        os.kill(process.pid, signal.SIGCONT)
        eventually(lambda: client.connected)
        assert outcome(client.stat()).index.leases == 0
    finally:
        process.kill()
        process.wait()
