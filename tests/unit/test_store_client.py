"""A client of the node store never waits, always gets an outcome, and finds a store again that died or hung."""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from store_process import Store
from store_servers import make
from store_support import EVERYTHING, NAMESPACE_ID, RawClient, block_hashes_of, engine_hello, items_of, tool_hello
from support import eventually, stop

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import client as client_module
from vllm_kvtier.store import launcher
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.client import Failed, StoreClient
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.server.server import StoreServer
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.stream import read_frame

BLOCK_HASHES = block_hashes_of((20, "a"))


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


def store(client: StoreClient, block_hashes: bytes) -> list[int]:
    groups, hashes, parents = items_of(block_hashes)
    pending = client.reserve(NAMESPACE_ID, b"", groups, hashes, parents, EVERYTHING)
    slots = outcome(pending).slots
    client.commit([slot for slot in slots if slot > 0], pending.session)
    return slots


def test_store_client_requests_are_answered(server, client):
    assert (client.instance, client.reason, client.pool_pages) == (server.instance, "", 256)
    assert (client.pid, client.places) == (os.getpid(), server.options.places())
    slots = store(client, BLOCK_HASHES)
    pending = client.lookup(NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING)
    found = outcome(pending)
    assert found.num_hash_blocks == 20 and found.slots == [slots]
    client.touch(NAMESPACE_ID, BLOCK_HASHES)
    client.release(found.lease, pending.session)
    assert outcome(client.stat()).index.leases == 0
    assert outcome(client.pin(NAMESPACE_ID, BLOCK_HASHES)).count == 20
    assert outcome(client.pin(NAMESPACE_ID, BLOCK_HASHES, False)).count == 20
    assert outcome(client.inspect(NAMESPACE_ID, BLOCK_HASHES)).blocks == [20]
    client.discard(NAMESPACE_ID, 0, BLOCK_HASHES[:16], slots[0])
    assert outcome(client.lookup(NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING)).num_hash_blocks == 0
    outcome(client.clear())
    groups, hashes, parents = items_of(BLOCK_HASHES)
    again = client.reserve(NAMESPACE_ID, b"", groups, hashes, parents, EVERYTHING)
    client.abort(outcome(again).slots, again.session)
    assert outcome(client.stat()).index.used_pages == 0


def test_store_client_callback_runs_once_before_or_after_answer(client, reactor):
    threads = []
    early = client.stat()
    early.then(lambda p: threads.append((p.outcome, threading.current_thread())))
    outcome(early)
    eventually(lambda: threads)
    early.then(lambda p: threads.append((p.outcome, threading.current_thread())))
    assert [t for _, t in threads] == [reactor._thread, threading.current_thread()]
    assert all(isinstance(o, m.Counts) for o, _ in threads)


def test_store_client_out_of_descriptors_connects_later(server, connect, monkeypatch):
    make_socket, refusals = socket.socket, [OSError(errno.EMFILE, "Too many open files")]

    def refuse(*args, **options):
        if refusals:
            raise refusals.pop()
        return make_socket(*args, **options)

    monkeypatch.setattr(client_module.socket, "socket", refuse)
    client = connect()
    eventually(lambda: client.connected)
    assert not refusals


@pytest.mark.parametrize(("user", "owner", "used"), [(7, 8, False), (7, 7, True), (7, 0, True), (0, 8, True)])
def test_store_client_refuses_a_store_of_another_user(server, connect, monkeypatch, user, owner, used):
    """Its path may be in a folder where others can listen."""
    monkeypatch.setattr(client_module.os, "getuid", lambda: user)
    monkeypatch.setattr(client_module.Stream, "peer", lambda stream: (1, owner if stream._limits.max_fds else user))
    client = connect()
    eventually(lambda: client.connected or "belongs to user" in client.reason)
    assert client.connected == used


def test_store_client_out_of_threads_launches_later(connect, monkeypatch):
    start_thread, refusals, launched = threading.Thread.start, [RuntimeError("can't start new thread")], []

    def refuse(thread) -> None:
        if refusals and thread.name == "kvtier-launch":
            raise refusals.pop()
        start_thread(thread)

    monkeypatch.setattr(launcher, "BACKOFF_SECONDS", (0.01, 0.01))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    connect(launch=lambda: launched.append(1))
    eventually(lambda: launched)
    assert not refusals


def test_store_client_callback_error_affects_nothing_else(client, caplog):
    pending = client.stat()
    called = threading.Event()
    pending.then(lambda _: 1 / 0)
    pending.then(lambda _: called.set())
    outcome(pending)
    assert called.wait(5) and isinstance(outcome(client.stat()), m.Counts)


def test_store_client_on_change_error_keeps_connection(server, connect, caplog):
    client = connect(on_change=lambda: 1 / 0)
    eventually(lambda: client.connected)
    assert isinstance(outcome(client.stat()), m.Counts)
    server.stop()
    eventually(lambda: client._retry_timer is not None, what="it goes on trying")
    assert "ZeroDivisionError" in caplog.text


def test_store_client_answers_are_per_thread(client):
    prefixes = [block_hashes_of((n + 1, n)) for n in range(6)]
    for block_hashes in prefixes:
        store(client, block_hashes)
    wrong = []

    def ask(number: int) -> None:
        for _ in range(100):
            pending = client.lookup(NAMESPACE_ID, prefixes[number], 0, EVERYTHING)
            found = outcome(pending)
            if found.num_hash_blocks != number + 1:
                wrong.append((number, found))
            client.release(found.lease, pending.session)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and outcome(client.stat()).index.leases == 0


def test_store_client_large_messages_pass_and_lookups_are_cut(client):
    block_hashes = os.urandom(16 * 100_000)
    assert outcome(client.lookup(NAMESPACE_ID, block_hashes, 0, EVERYTHING)).num_hash_blocks == 0
    too_long = os.urandom(16 * (m.MAX_HASH_BLOCKS + 1))
    assert outcome(client.lookup(NAMESPACE_ID, too_long, 0, EVERYTHING)).num_hash_blocks == 0, "cut, not disconnected"
    with pytest.raises(ValueError):
        client.reserve(NAMESPACE_ID, b"", [0] * (m.MAX_ITEMS + 1), b"", b"", 0)


def test_store_client_without_store_fails_requests_at_once(connect, path):
    client = connect()
    eventually(lambda: "no node store listens" in client.reason)
    started = time.monotonic()
    pending = client.lookup(NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING)
    assert isinstance(pending.outcome, Failed) and path in pending.outcome.reason
    for send in (
        lambda: client.release(1),
        lambda: client.commit([1]),
        lambda: client.touch(NAMESPACE_ID, BLOCK_HASHES),
    ):
        send()
    assert client.open_pool() is None and time.monotonic() - started < 0.5
    assert client.instance == "" and not client.connected


def test_store_client_finds_store_started_later(connect, path):
    changes = []
    client = connect(on_change=lambda: changes.append((client.connected, client.reason)), start=False)
    client.start()
    eventually(lambda: changes)
    server = make(path)
    eventually(lambda: client.connected)
    assert client.ready_pages >= 0 and changes[-1] == (True, "")
    eventually(lambda: client.ready_pages == 256)
    server.stop()


def test_store_client_reconnects_and_drops_old_leases(server, client, path):
    store(client, BLOCK_HASHES)
    old = client.lookup(NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING)
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
    groups, hashes, parents = items_of(BLOCK_HASHES)
    new = client.reserve(NAMESPACE_ID, b"", groups, hashes, parents, EVERYTHING)
    slots = outcome(new).slots
    client.commit(slots, old.session)
    client.release(lease, old.session)
    client.abort(slots, old.session)
    assert outcome(client.lookup(NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING)).num_hash_blocks == 0
    client.commit(slots, new.session)
    assert outcome(client.lookup(NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING)).num_hash_blocks == 20
    with client.open_pool().buffer as fresh:
        assert fresh[4096] == 0
    server.stop()


def test_store_client_pending_requests_fail_when_store_dies(path, connect):
    """A server that takes questions and never answers, then goes."""
    with greeted(path, connect) as (client, sock):
        pending = [client.stat() for _ in range(5)]
        assert not any(p.outcome for p in pending)
        sock.close()
        assert all("Connection reset" in outcome(p).reason for p in pending)


@contextmanager
def greeted(path, connect):
    """A client, and the socket of its server, which has welcomed it and says nothing by itself."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        client = connect(lookup_timeout=30)
        sock = _greet(listener)
        eventually(lambda: client.connected)
        yield client, sock


def _greet(listener: socket.socket) -> socket.socket:
    listener.settimeout(10)
    sock, _ = listener.accept()
    sock.settimeout(10)
    sock.recv(1 << 16)
    welcome = m.encode(m.Welcome(m.PROTOCOL, "0", "instance", 1, 1, 1, False))
    with open("/dev/zero") as file:
        socket.send_fds(sock, [len(welcome).to_bytes(4, "little") + welcome], [file.fileno()])
    return sock


def test_store_client_hung_store_is_disconnected_once(path, connect):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        client = connect(lookup_timeout=0.3)
        sock = _greet(listener)
        eventually(lambda: client.connected)
        started = time.monotonic()
        pending = [client.stat(), client.stat()]
        assert "has not answered for 0.3 s" in outcome(pending[0]).reason
        assert 0.2 < time.monotonic() - started < 2 and outcome(pending[1])
        assert sock.recv(1 << 16) and sock.recv(1) == b"", "the connection ended, and with it what the store leased"
        assert isinstance(client.stat().outcome, Failed), "the next question does not wait again"
        sock.close()
        # It tries again, and again gives up on a greeting that is not answered.
        sock, _ = listener.accept()
        eventually(lambda: "does not answer Hello" in client.reason)
        sock.close()
        sock = _greet(listener)
        eventually(lambda: client.connected)
        sock.close()


def test_store_client_that_was_stopped_itself_reads_before_it_gives_up(server, client, reactor):
    """A busy interpreter, SIGSTOP, a paused machine: the answers are there, more than one read takes."""
    store(client, BLOCK_HASHES)
    session, goes_on = client.session, threading.Event()
    reactor.call_soon(goes_on.wait)
    reactor.call_soon(client._watch)
    pending = [client.lookup(NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING) for _ in range(100)]
    eventually(lambda: server.index.stats().leases == 100)
    for each in pending:
        each.deadline = 0.0
    client._received = 0.0
    goes_on.set()
    assert {type(outcome(each)) for each in pending} == {m.Found}
    assert client.connected and client.session == session


def test_store_client_late_answer_fails_alone(path, connect, reactor):
    """What it leases and reserves is given back: no other code knows of it."""
    with greeted(path, connect) as (client, sock):
        late = client.lookup(NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING)
        late_too = client.reserve(NAMESPACE_ID, b"", *items_of(BLOCK_HASHES), EVERYTHING)
        stat = client.stat()
        ids = [m.decode_request(_frame(sock)).id for _ in range(3)]
        late.deadline = late_too.deadline = 0.0
        reactor.call_soon(client._watch)
        assert "too slow" in outcome(late).reason and "too slow" in outcome(late_too).reason
        assert client.connected and stat.outcome is None
        for reply in (m.Found(ids[0], 7, 1, [[5]]), m.Reserved(ids[1], [9, m.EXISTS]), m.Done(ids[2], 1)):
            frame = m.encode(reply)
            sock.sendall(len(frame).to_bytes(4, "little") + frame)
        assert outcome(stat) == m.Done(ids[2], 1)
        assert [m.decode_request(_frame(sock)) for _ in range(2)] == [m.Release(7), m.Abort([9])]
        sock.close()


def _frame(sock: socket.socket) -> bytes:
    return read_frame(sock, time.monotonic() + 10, [])


@pytest.mark.parametrize("answer", [b"\xc1", m.encode(m.Ready(1, 1)), m.encode(m.Welcome(9, "9", "i", 1, 1, 1, False))])
def test_store_client_wrong_hello_answer_is_other_version(path, connect, answer):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        client = connect()
        sock, _ = listener.accept()
        sock.sendall(len(answer).to_bytes(4, "little") + answer)
        eventually(lambda: "another version" in client.reason)
        assert not client.connected
        sock.close()


def test_store_of_another_version_is_replaced_once_unused(connect, path, monkeypatch):
    monkeypatch.setattr(client_module, "REFUSED_SECONDS", 0.01)
    ended, launched = threading.Event(), threading.Event()
    old = StoreServer(path, StoreOptions(size="1MiB"), ended.set)
    old.start()
    hello = m.Hello("new", 1, "engine", protocol=m.PROTOCOL + 1)
    connect(hello=hello, launch=launched.set)
    assert ended.wait(10)
    old.stop()
    assert launched.wait(10)


def test_store_that_refuses_the_engine_that_launched_it_is_not_launched_at_once_again(connect, path, monkeypatch):
    """The package was replaced under a running engine. The new one's store ended, and was launched every 15 s."""
    monkeypatch.setattr(client_module, "REFUSED_SECONDS", 0.01)
    monkeypatch.setattr(launcher, "BACKOFF_SECONDS", (60.0, 60.0))
    servers, ended = [], threading.Event()

    def launch() -> None:
        servers.append(StoreServer(path, StoreOptions(size="1MiB"), ended.set))
        servers[-1].start()

    client = connect(hello=m.Hello("old", 1, "engine", protocol=m.PROTOCOL + 1), launch=launch, start=False)
    tries, not_listening = [], client._not_listening
    client._not_listening = lambda: tries.append(1) or not_listening()
    client.start()
    assert ended.wait(10)
    servers[0].stop()
    count = len(tries)
    eventually(lambda: len(tries) > count + 1 and not client._starter._running)
    assert len(servers) == 1 and "it refuses" in client.reason


def test_store_refusal_has_cause_and_backoff(server, connect, monkeypatch):
    client = connect(hello=m.Hello("new", 1, "engine", protocol=m.PROTOCOL + 1, version="9.9"))
    eventually(lambda: "refuses" in client.reason)
    assert "9.9" in client.reason and not client.connected
    assert client._retry_timer.when - time.monotonic() > client_module.REFUSED_SECONDS / 2


def test_store_client_malformed_request_is_not_repeated(server, client):
    client.lookup(NAMESPACE_ID, BLOCK_HASHES, 21, EVERYTHING)
    eventually(lambda: "refuses" in client.reason)
    assert "hash block 21" in client.reason
    assert client._retry_timer.when - time.monotonic() > client_module.REFUSED_SECONDS / 2


def test_store_client_retries_while_backlog_is_full(path, connect):
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


def test_store_without_listener_is_launched_once(path, connect):
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
    eventually(lambda: client.connected and servers)
    assert len(calls) == 1
    servers[0].stop()
    eventually(lambda: len(servers) == 2 and client.connected)
    assert len(calls) == 2
    servers[1].stop()


def test_store_of_an_operator_is_theirs_to_start_again(path, connect, monkeypatch):
    """The engine's took its place, without its disk; what a service manager started was refused from then on."""
    monkeypatch.setattr(launcher, "RESTART_SECONDS", 1.0)
    launched = []
    client = connect(launch=lambda: launched.append(time.monotonic()), start=False)
    for again in (False, True):
        server = StoreServer(path, StoreOptions(size="1MiB"), launched=False)
        server.start()
        if not again:
            client.start()
        eventually(lambda: client.connected)
        server.stop()
        ended = time.monotonic()
        eventually(lambda: "if its operator does not" in client.reason)
        assert not launched
    eventually(lambda: launched)
    assert 0.9 < launched[0] - ended


def test_operators_store_that_hung_before_its_end_is_theirs_to_start_again(path, connect, monkeypatch, tmp_path):
    """A restart of it: the time was over before anything had ended, and an engine's took its place."""
    monkeypatch.setattr(launcher, "RESTART_SECONDS", 1.0)
    launched, store = [], Store(tmp_path)
    store.start()
    client = connect(launch=lambda: launched.append(time.monotonic()), lookup_timeout=0.1)
    eventually(lambda: client.connected)
    stop(store.process.pid)
    began = time.monotonic()
    client.stat()
    eventually(lambda: "does not answer Hello" in client.reason and time.monotonic() > began + 2.0)
    ended = time.monotonic()
    store.kill()
    eventually(lambda: launched)
    assert 0.9 < launched[0] - ended


def test_store_client_hung_launch_does_not_block_other_store(path, connect):
    hang = threading.Event()
    client = connect(launch=lambda: hang.wait(20))
    eventually(lambda: "being started" in client.reason)
    server = make(path)
    eventually(lambda: client.connected)
    hang.set()
    assert isinstance(outcome(client.stat()), m.Counts)
    server.stop()


def test_store_launch_failure_is_reported_with_backoff(path, connect, monkeypatch):
    monkeypatch.setattr(launcher, "BACKOFF_SECONDS", (0.02, 0.05))
    monkeypatch.setattr(client_module, "RETRY_SECONDS", (0.05, 0.1))
    calls = []

    def launch() -> None:
        calls.append(time.monotonic())
        raise KVTierError("the pool does not fit") if len(calls) < 3 else RuntimeError("a bug")

    client = connect(launch=launch)
    eventually(lambda: "does not fit" in client.reason)
    eventually(lambda: "a bug" in client.reason)
    assert calls[1] - calls[0] > 0.015
    monkeypatch.setattr(launcher, "BACKOFF_SECONDS", (60.0, 60.0))
    client._starter._backoff = 60.0
    eventually(lambda: client._starter._after > time.monotonic() + 30)
    server = make(path)
    eventually(lambda: client.connected, what="another store is found nevertheless")
    launched = len(calls)
    server.stop()
    eventually(lambda: len(calls) > launched, what="no backoff is left of before that")


def test_store_client_close_ends_requests_and_connection(server, client, reactor):
    slow = client.stat()
    client.close()
    client.close()
    eventually(lambda: not client.connected)
    assert outcome(slow)
    assert outcome(client.stat()).reason.endswith("closed here")
    with RawClient(server.path, tool_hello()) as tool:
        eventually(lambda: len(tool.stat().clients) == 1)


def test_store_client_ends_with_its_reactor(server, path):
    reactor = Reactor("short")
    before = len(os.listdir("/proc/self/fd"))
    client = StoreClient(reactor, path, engine_hello())
    client.start()
    reactor.start()
    eventually(lambda: client.connected)
    reactor.stop()
    assert not client.connected
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_store_client_idle_uses_no_cpu(client, reactor):
    outcome(client.stat())
    time.sleep(0.2)
    clock = time.pthread_getcpuclockid(reactor._thread.ident)
    before = time.clock_gettime(clock)
    time.sleep(0.5)
    assert time.clock_gettime(clock) - before < 0.01


def test_store_client_reports_ready_memory_as_it_grows(path, connect, reactor):
    seen = []
    server = StoreServer(path, StoreOptions(size="100MiB"))
    server.start()
    client = connect(on_change=lambda: seen.append(client.ready_pages), start=False)
    client.start()
    eventually(lambda: client.ready_pages == client.pool_pages == 25600)
    assert seen == sorted(seen)
    server.stop()


def test_store_client_stopped_store_costs_one_timeout(path, connect):
    """SIGSTOP: the kernel goes on taking connections and messages in its name."""
    process = subprocess.Popen([sys.executable, "-m", "vllm_kvtier.store", "--socket", path, "--size=1MiB"])
    try:
        client = connect(lookup_timeout=0.5)
        eventually(lambda: client.connected)
        stop(process.pid)
        started = time.monotonic()
        assert isinstance(outcome(client.lookup(NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING)), Failed)
        assert time.monotonic() - started < 2
        os.kill(process.pid, signal.SIGCONT)
        eventually(lambda: client.connected)
        assert outcome(client.stat()).index.leases == 0
    finally:
        process.kill()
        process.wait()
