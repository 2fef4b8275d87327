"""The reactor: sleeps when idle, never starves sockets or timers, survives faults; and the link to the workers."""

import contextlib
import os
import select
import socket
import stat
import threading
import time

import pytest
import zmq
from support import eventually
from zmq.utils.monitor import recv_monitor_message

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire import link as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.dealer import Dealer, SocketEvents
from vllm_kvtier.wire.link import LinkClient, LinkPlace, LinkRelay, LinkServer, link_path
from vllm_kvtier.wire.reactor import MIN_SWEEP, Reactor, drain


@pytest.fixture
def reactor():
    reactor = Reactor("test")
    yield reactor
    reactor.stop()


def cpu_seconds(thread: threading.Thread) -> float:
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def test_reactor_calls_and_timers_run_in_order(reactor):
    seen = []
    done = threading.Event()
    reactor.call_soon(lambda: seen.append("soon"))
    reactor.call_later(0.02, lambda: seen.append("late"))
    reactor.call_later(0.04, done.set)
    reactor.call_later(0.01, lambda: seen.append("early"))
    cancelled = reactor.call_later(0.005, lambda: seen.append("cancelled"))
    cancelled.cancel()
    cancelled.cancel()
    reactor.start()
    assert done.wait(5)
    assert seen == ["soon", "early", "late"]


@pytest.mark.parametrize("days", [30, 1e300, float("inf")])
def test_reactor_timer_beyond_what_poll_takes_does_not_end_it(reactor, days):
    """As of a store with ``idle_seconds`` of a month, which has no other timer: it never answered."""
    read_end, write_end = os.pipe()
    done = threading.Event()
    os.write(write_end, b"x")
    reactor.add_fd(read_end, lambda events: (os.read(read_end, 1), done.set()))  # it is seen by polling only
    reactor.call_later(days * 86400.0, lambda: None)
    reactor.start()
    assert done.wait(5)
    reactor.stop()
    os.close(read_end)
    os.close(write_end)


def test_reactor_forgets_cancelled_timers_that_are_not_due(reactor):
    """A peer's messages move a deadline: 100,000 a second, each of a timer that is due in minutes."""
    done = threading.Event()
    live = [reactor.call_later(3600.0 + number, done.set) for number in range(100)]
    for _ in range(20 * MIN_SWEEP):
        reactor.call_later(480.0, done.set).cancel()
    assert len(reactor._timers) <= 2 * MIN_SWEEP
    assert {timer for *_, timer in reactor._timers} >= set(live)
    reactor.call_later(0.0, done.set)
    reactor.start()
    assert done.wait(5)


def test_reactor_call_within_wakes_it_after_that_time_or_with_another_call(reactor):
    seen, done = [], threading.Event()
    reactor.start()
    for seconds, wakes in ((0.2, 1), (60.0, 2), (0.01, 1)):
        began = time.monotonic()
        done.clear()
        reactor.call_within(seconds, done.set)
        if wakes > 1:
            assert not done.wait(0.1)
            reactor.call_soon(lambda: None)
        assert done.wait(30)
        seen.append(time.monotonic() - began)
    assert seen[0] >= 0.2 and 0.1 <= seen[1] < 30


def test_reactor_alarm_that_rings_while_the_last_one_is_read_is_not_lost(reactor, monkeypatch):
    """Another thread sets it at that moment, and keeps the interpreter until it has rung."""
    done, again, threads = threading.Event(), threading.Event(), []

    def read(descriptor: int, size: int) -> bytes:
        if descriptor == reactor._alarm and not threads:
            threads.append(threading.Thread(target=reactor.call_within, args=(1e-3, lambda: None)))
            threads[0].start()
            threads[0].join(0.1)  # it has set the alarm, or waits for the lock
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            assert poller.poll(5000)
        return os_read(descriptor, size)

    os_read = os.read
    monkeypatch.setattr(os, "read", read)
    reactor.start()
    reactor.call_within(1e-3, done.set)
    assert done.wait(5)
    threads[0].join(5)
    reactor.call_within(1e-3, again.set)
    assert again.wait(5)


def test_reactor_requeued_call_does_not_starve_others(reactor):
    """The worker polls like this for as long as something is under way; sockets and stop must get a turn."""
    a, b = reactor.context.socket(zmq.PAIR), reactor.context.socket(zmq.PAIR)
    a.bind("inproc://x")
    b.connect("inproc://x")
    heard, timer = threading.Event(), threading.Event()
    reactor.add_socket(a, lambda: drain(a, lambda frames: heard.set()))
    reactor.add_socket(b, lambda: None)
    spins = []

    def spin() -> None:
        spins.append(1)
        reactor.call_soon(spin)

    reactor.call_soon(spin)
    reactor.call_soon(lambda: b.send(b"hello"))
    reactor.call_later(0.01, timer.set)
    reactor.start()
    assert heard.wait(5) and timer.wait(5) and spins
    reactor.stop()
    assert not reactor._thread.is_alive()


def test_peers_that_say_nothing_cost_nothing(reactor):
    """ZMQ's poll takes 0.4 us for each socket whenever anything happens, and an engine may have 512 peers."""
    ignore = SocketEvents(lambda frames: None, lambda why: None, lambda: None)
    polled, files = len(reactor._poller.sockets), len(os.listdir("/proc/self/fd"))
    dealers = [Dealer(reactor, "tcp://127.0.0.1:9", None, 1 << 20, ignore) for _ in range(50)]
    assert len(reactor._poller.sockets) == polled
    reactor.start()
    reactor.call_soon(lambda: [dealer.close() for dealer in dealers])
    eventually(lambda: not (reactor._many or reactor._by_fd or reactor._unsure))
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= files + 5)


def test_dealers_miss_no_message_whatever_they_send_meanwhile(reactor):
    """Sending takes the signal for what has arrived from a socket's descriptor."""
    context, dealers, rounds = zmq.Context(), [], 100
    server, left, all_over = context.socket(zmq.ROUTER), [rounds] * 20, threading.Event()
    port = server.bind_to_random_port("tcp://127.0.0.1")

    def serve() -> None:
        while not all_over.is_set():
            if server.poll(50):
                identity, number = server.recv_multipart()
                for _ in range(int(number) % 3):
                    server.send_multipart([identity, b"other"])
                server.send_multipart([identity, number])

    def on_message(i: int, frames: list[bytes]) -> None:
        if left[i] and frames == [str(left[i]).encode()]:
            left[i] -= 1
            dealers[i].send(str(left[i]).encode())
            dealers[i].send(b"1000")  # its answer is none that is waited for
            if not any(left):
                all_over.set()

    def connect() -> None:
        for i in range(len(left)):
            events = SocketEvents(lambda frames, i=i: on_message(i, frames), lambda why: None, lambda: None)
            dealers.append(Dealer(reactor, f"tcp://127.0.0.1:{port}", None, 1 << 20, events))
            dealers[i].send(str(rounds).encode())

    thread = threading.Thread(target=serve)
    thread.start()
    reactor.call_soon(connect)
    reactor.start()
    arrived = all_over.wait(120)
    all_over.set()
    thread.join()
    context.destroy(linger=0)
    assert arrived, left


def test_reactor_error_affects_only_its_event(reactor, caplog):
    done = threading.Event()
    reactor.call_soon(lambda: 1 / 0)
    reactor.call_later(0.0, lambda: 1 / 0)
    reactor.call_later(0.01, done.set)
    reactor.start()
    assert done.wait(5)
    assert caplog.text.count("ZeroDivisionError") == 2


def test_reactor_error_is_counted(reactor):
    """So that a search for what it was about can begin."""
    reactor.call_soon(lambda: 1 / 0)
    reactor.start()
    eventually(lambda: reactor.errors == 1)


def test_reactor_stop_is_idempotent(reactor):
    stopped = []
    reactor.on_stop(lambda: stopped.append(1))
    reactor.start()
    reactor.stop()
    reactor.stop()
    reactor.call_soon(lambda: stopped.append("late"))
    assert stopped == [1] and not reactor._thread.is_alive()


def test_reactor_stop_from_its_own_thread(reactor):
    reactor.start()
    reactor.call_soon(reactor.stop)
    reactor._thread.join(5)
    assert not reactor._thread.is_alive()


def test_link_message_sent_while_stopping_arrives(reactor):
    """Leases are given back in ``on_stop``; the messages must leave the process."""
    other = zmq.Context()
    server = other.socket(zmq.ROUTER)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    client = reactor.context.socket(zmq.DEALER)
    client.setsockopt(zmq.LINGER, 500)
    client.connect(f"tcp://127.0.0.1:{port}")
    reactor.add_socket(client, lambda: None)
    reactor.on_stop(lambda: [client.send(b"bye") for _ in range(50)])
    reactor.start()
    reactor.stop()
    got = 0
    while server.poll(2000 if got < 50 else 0):
        server.recv_multipart()
        got += 1
    other.destroy(linger=0)
    assert got == 50


def test_idle_reactor_uses_no_cpu(reactor):
    """Under a hundredth of a core, sockets and far timers included."""
    pair = reactor.context.socket(zmq.ROUTER)
    pair.bind_to_random_port("tcp://127.0.0.1")
    reactor.add_socket(pair, lambda: drain(pair, print))
    port = pair.getsockopt_string(zmq.LAST_ENDPOINT)
    Dealer(reactor, port, None, 1 << 20, SocketEvents(print, print, lambda: None))
    reactor.call_later(3600, lambda: None)
    reactor.start()
    woke = threading.Event()
    reactor.call_soon(woke.set)
    assert woke.wait(5)
    process, thread, begin = time.process_time(), cpu_seconds(reactor._thread), time.monotonic()
    threading.Event().wait(1.5)  # measuring, not waiting for anything
    span = time.monotonic() - begin
    assert cpu_seconds(reactor._thread) - thread < 0.01 * span
    assert time.process_time() - process < 0.01 * span  # ZMQ's own threads too


# -- link ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def runtime(run_dir):
    return run_dir / f"kvtier-{os.getuid()}"


def test_link_sends_both_ways_in_either_start_order(runtime):
    path = link_path("engine", "instance")
    up, down = [], [[], []]
    worker_reactors = [Reactor(f"w{i}") for i in range(2)]
    clients = [LinkClient(r, LinkPlace(path), down[i].append) for i, r in enumerate(worker_reactors)]
    for i, r in enumerate(worker_reactors):
        r.start()
        r.call_soon(lambda i=i: clients[i].send(m.ChecksumsReady(i, 7)))  # no listener yet
    scheduler = Reactor("s")
    server = LinkServer(scheduler, path, up.append)
    scheduler.start()
    eventually(lambda: sorted(x.rank for x in up) == [0, 1])
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    scheduler.call_soon(lambda: server.send(m.Serve(True)))
    eventually(lambda: all(d == [m.Serve(True)] for d in down))
    # A worker that is gone, and garbage on the link, do no harm.
    worker_reactors[0].stop()
    worker_reactors[1].call_soon(lambda: clients[1]._socket.send(b"\xc1garbage"))
    worker_reactors[1].call_soon(lambda: clients[1].send(m.ChecksumsReady(1, 8)))
    scheduler.call_soon(lambda: server.send(m.Serve(False)))
    eventually(lambda: m.ChecksumsReady(1, 8) in up and down[1][-1] == m.Serve(False))
    for r in (worker_reactors[1], scheduler):
        r.stop()
    assert not os.path.exists(path)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_link_relay_passes_messages_of_workers_with_the_key_only(runtime, tmp_path, host):
    path, key_file = link_path("engine", "instance"), str(tmp_path / "key")
    ClusterKey.create(key_file)
    key = ClusterKey.load(key_file)
    up, down, reactors = [], [[], [], []], [Reactor(f"w{i}") for i in range(3)]
    relay = LinkRelay(path, host, key)
    endpoint = f"tcp://[{host}]:{relay.port}" if ":" in host else f"tcp://{host}:{relay.port}"
    met = threading.Event()
    places = [LinkPlace(path), LinkPlace(endpoint, key), LinkPlace(endpoint)]  # the last one has no key
    clients = [LinkClient(r, places[i], down[i].append, met.set if i == 1 else int) for i, r in enumerate(reactors)]
    for i, r in enumerate(reactors):
        r.start()
        r.call_soon(lambda i=i: clients[i].send(m.ChecksumsReady(i, 7)))
    scheduler = Reactor("s")
    server = LinkServer(scheduler, path, up.append)  # after the others
    scheduler.start()
    assert met.wait(5)
    eventually(lambda: sorted(x.rank for x in up) == [0, 1])
    scheduler.call_soon(lambda: server.send(m.Serve(True)))
    eventually(lambda: down[:2] == [[m.Serve(True)]] * 2)
    reactors[1].call_soon(lambda: clients[1].send(m.ChecksumsReady(1, 8)))
    eventually(lambda: m.ChecksumsReady(1, 8) in up)
    assert not down[2] and all(x.rank != 2 for x in up)
    reactors[1].stop()  # what is for a worker that is gone is dropped
    scheduler.call_soon(lambda: server.send(m.Serve(False)))
    eventually(lambda: down[0][-1] == m.Serve(False))
    for r in (reactors[0], reactors[2], scheduler):
        r.stop()
    relay.shutdown()


def test_link_relay_that_cannot_listen_leaves_nothing(tmp_path):
    key_file, threads = str(tmp_path / "key"), threading.active_count()
    ClusterKey.create(key_file)
    with pytest.raises(zmq.ZMQError):
        LinkRelay("/nowhere", "203.0.113.1", ClusterKey.load(key_file))  # no address of this machine
    assert threading.active_count() == threads


def test_link_relay_finds_a_worker_again_whose_connection_was_cut(runtime, tmp_path):
    """The worker of an idle engine sends nothing afterwards."""
    path, key_file = link_path("engine", "instance"), str(tmp_path / "key")
    ClusterKey.create(key_file)
    key, down, met = ClusterKey.load(key_file), [], threading.Event()
    reactors = [Reactor("far"), Reactor("s")]
    relay = LinkRelay(path, "127.0.0.1", key)
    monitor = relay._socket.get_monitor_socket(zmq.EVENT_ACCEPTED)
    server = LinkServer(reactors[1], path, lambda message: None)
    LinkClient(reactors[0], LinkPlace(f"tcp://127.0.0.1:{relay.port}", key), down.append, met.set)
    for each in reactors:
        each.start()
    assert met.wait(5)
    with socket.socket(fileno=os.dup(recv_monitor_message(monitor)["value"])) as connection:
        connection.shutdown(socket.SHUT_RDWR)
    assert monitor.poll(5000)  # the worker is back

    def reaches_it() -> bool:
        reactors[1].call_soon(lambda: server.send(m.Serve(True)))
        return bool(down)

    eventually(reaches_it)
    assert len(server._workers) == 1
    relay._socket.disable_monitor()
    for each in reactors:
        each.stop()
    relay.shutdown()


class Way:
    """A TCP way to a port of this machine. While ``lossy`` what is sent is lost; ``losses``: of both directions."""

    def __init__(self, port):
        self.lossy, self.losses, self._target, self._open = False, [threading.Event(), threading.Event()], port, []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while self._listener.fileno() >= 0:
            ends = [self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._target))]
            self._open += ends
            for i in range(2):
                threading.Thread(target=self._pass, args=(ends[i], ends[1 - i], self.losses[i]), daemon=True).start()

    def _pass(self, source, target, lost):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.lossy:
                    lost.set()
                else:
                    target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)

    def cut(self):
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def test_link_between_nodes_repeats_what_a_cut_connection_lost(runtime, tmp_path):
    """A lost Register left the engine closed."""
    path, key_file = link_path("engine", "instance"), str(tmp_path / "key")
    ClusterKey.create(key_file)
    key, up, down, met = ClusterKey.load(key_file), [], [], threading.Event()
    far, scheduler = Reactor("far"), Reactor("s")
    relay = LinkRelay(path, "127.0.0.1", key)
    way = Way(relay.port)
    server = LinkServer(scheduler, path, up.append)
    client = LinkClient(far, LinkPlace(f"tcp://127.0.0.1:{way.port}", key), down.append, met.set)
    for each in (far, scheduler):
        each.start()
    assert met.wait(5)
    way.lossy, state = True, [m.Described(1, (), (), "node"), m.Unusable(1, "no NIXL")]
    for message in (state[0], m.Asleep(1), state[1]):
        far.call_soon(lambda message=message: client.send(message))
    scheduler.call_soon(lambda: server.send(m.Serve(True)))
    assert all(each.wait(5) for each in way.losses) and not (up or down)
    way.lossy = False
    way.cut()
    eventually(lambda: up[-2:] == state and down[-1:] == [m.Serve(True)])  # not what was true before
    for each in (far, scheduler):
        each.stop()
    relay.shutdown()


def test_link_message_names_all_of_a_pool_of_terabytes():
    ready = m.PoolReady(0, "store", 3 << 40)
    assert m.decode_link(m.encode(ready)) == ready


def test_link_message_names_the_stores_of_many_nodes():
    order = m.StoreBlocks(1, " ".join(["0123456789abcdef" * 2] * 64), 0, 1, b"", b"", b"")
    assert m.decode_link(m.encode(order)) == order


def test_link_path_too_long_raises_with_cause(tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(KVTierError, match="107"):
        link_path("e", "i")
