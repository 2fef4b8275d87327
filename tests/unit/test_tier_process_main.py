"""The movers' process and its NIXL agent, without a process: over a socketpair in this one."""

import os
import socket
import threading
import time

import numpy as np
import pytest
from disk_support import NAMESPACE_ID, make_pool

from vllm_kvtier import __version__
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import linux
from vllm_kvtier.store.tiers.process import main
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.nixl_agent import StorageAgent
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.stream import read_frame, write_frame

POOL = 1 << 20


class Backend:
    """Echoes Drop as Kept; does as ``options["do"]`` says."""

    closed = 0
    latest = None

    def __init__(self, host, options):
        self.host, self.do = host, options.get("do", "")
        type(self).latest = self

    def open(self):
        if self.do == "refuse":
            raise KVTierError("it is Monday")
        self.host.send(m.Kept([]))
        return m.Opened(True, "a note", 7)

    def handle(self, message):
        if self.do == "fault":
            raise RuntimeError("a fault")
        if self.do == "later":
            self.host.reactor.call_soon(self.host.guard(lambda: 1 // 0))
        self.host.send(m.Kept([], [m.NamespaceShape(NAMESPACE_ID, 16, [])]))

    def close(self):
        type(self).closed += 1


@pytest.fixture
def peer(monkeypatch):
    """(socket, wait): a tier process's other end; ``wait()`` returns why it ended."""
    Backend.closed = 0
    monkeypatch.setattr(main, "backend_class", lambda kind: Backend)
    pool, result = make_pool(POOL), []
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=lambda: result.append(main.run("disk", theirs, pool.fd, POOL)), daemon=True)
    thread.start()

    def wait() -> str:
        thread.join(10)
        return result[0]

    yield ours, wait
    ours.close()
    thread.join(10)
    Backend.latest = None  # other tests count mappings of pools


def send(sock, message) -> None:
    write_frame(sock, m.encode(message))


def hear(sock):
    return m.decode_to_server(read_frame(sock, time.monotonic() + 10, []))


def ended(sock) -> bool:
    sock.settimeout(10)
    return sock.recv(1) == b""


def test_tier_process_opens_answers_and_exits_at_socket_end(peer):
    sock, wait = peer
    send(sock, m.Open({"do": ""}, POOL, __version__))
    assert hear(sock) == m.Kept([]) and hear(sock) == m.Opened(True, "a note", 7)
    send(sock, m.Drop([1]))
    assert hear(sock).namespaces[0].namespace_id == NAMESPACE_ID
    sock.close()
    assert wait() == "" and Backend.closed == 1


def test_tier_process_refusal_reports_cause(peer):
    sock, wait = peer
    send(sock, m.Open({"do": "refuse"}, POOL, __version__))
    assert hear(sock) == m.Refused("it is Monday")
    assert ended(sock) and wait() == "it is Monday" and Backend.closed == 1


@pytest.mark.parametrize("version", ["", "0.0.1"])
def test_tier_process_of_another_version_than_the_store_refuses(peer, version):
    """The store lives on after an upgrade of the package, and its messages may mean something else."""
    sock, wait = peer
    send(sock, m.Open({"do": ""}, POOL, version) if version else m.Open({"do": ""}, POOL))
    refused = hear(sock)
    assert isinstance(refused, m.Refused) and (version or "another version") in refused.reason
    assert f"package is {__version__}; stop the store" in refused.reason
    assert ended(sock) and wait() == refused.reason and Backend.closed == 0


@pytest.mark.parametrize("do, words", [("fault", "RuntimeError: a fault"), ("later", "ZeroDivisionError")])
def test_tier_process_exits_on_backend_error(peer, do, words):
    sock, wait = peer
    send(sock, m.Open({"do": do}, POOL, __version__))
    hear(sock), hear(sock)
    send(sock, m.Drop([1]))
    assert words in wait() and Backend.closed == 1


@pytest.mark.parametrize(
    "message, words",
    [(m.Drop([1]), "before Open"), (m.Open({}, 2 * POOL), "as the server says"), (m.Opened(True), "Invalid")],
)
def test_tier_process_exits_on_malformed_message(peer, message, words):
    sock, wait = peer
    send(sock, message)
    assert words in wait() and Backend.closed == 0


def test_tier_process_uses_no_memory_that_the_server_could_not_commit(peer):
    """To register it with the network would allocate it."""
    sock, wait = peer
    send(sock, m.Open({"do": ""}, POOL - 4096, __version__))
    hear(sock), hear(sock)
    pool = Backend.latest.host.pool
    assert pool.nbytes == POOL - 4096
    send(sock, m.PoolLimit(8192))
    send(sock, m.Drop([1]))
    hear(sock)
    assert pool.nbytes == 8192 and len(pool.view) == POOL
    send(sock, m.PoolLimit(POOL))
    assert "not" in wait()


def test_tier_process_unloadable_backend_raises(monkeypatch):
    monkeypatch.setitem(main.KINDS, "disk", "vllm_kvtier.no_such_module:Mover")
    with pytest.raises(KVTierError, match="the disk tier cannot be loaded"):
        main.backend_class("disk")


def test_tier_process_pool_too_small_is_refused():
    fd = linux.memfd_create("small")
    os.ftruncate(fd, 4096)
    with pytest.raises(KVTierError, match="4096 bytes, not 8192"):
        main.Pool(fd, 8192)
    os.close(fd)


# -- the agent ------------------------------------------------------------------------------------------------------

SIZE = 64 << 10


class Agent:
    """An agent on a reactor of its own over a pool and a file; ``move`` waits."""

    def __init__(self, path, flags):
        self.pool = make_pool(64 * SIZE)
        self.fd = os.open(path, flags | os.O_CREAT, 0o600)
        self.reactor, self.unsettled = Reactor("test"), []
        self.agent = StorageAgent(
            self.reactor, "test", ["NONE", "POSIX"], {"POSIX": {"use_aio": "true"}}, on_unsettled=self.unsettled.append
        )
        self.agent.register_pool(self.pool.address, self.pool.nbytes)
        self.agent.register_file(self.fd, 64 * SIZE)
        self.reactor.start()

    def begin(self, op, slots, places, done, size=SIZE):
        local = np.array([(self.pool.address + s * SIZE, size, 0) for s in slots], np.uint64)
        remote = np.array([(p * SIZE, size, self.fd) for p in places], np.uint64)
        self.reactor.call_soon(lambda: self.agent.transfer(op, local, remote, done))

    def move(self, op, slots, places, size=SIZE):
        told, over = [], threading.Event()
        self.begin(op, slots, places, lambda good, error: (told.append((good, error)), over.set()), size)
        assert over.wait(20)
        assert len(told) == 1
        return told[0]

    def stop(self):
        self.reactor.stop()
        os.close(self.fd)


@pytest.fixture(params=["disk", "tmpfs", "buffered"])
def agent(request, tmp_path):
    folder = "/dev/shm" if request.param == "tmpfs" else tmp_path
    path = os.path.join(folder, f"kvtier-test-{os.getpid()}")
    direct = 0 if request.param == "buffered" else os.O_DIRECT
    try:
        made = Agent(path, os.O_RDWR | direct)
    except OSError:  # before Linux 6.6, tmpfs knows no O_DIRECT
        made = Agent(path, os.O_RDWR)
    os.truncate(path, 64 * SIZE)
    yield made
    made.stop()
    os.unlink(path)


def test_tier_process_nixl_agent_writes_and_reads(agent):
    assert agent.agent.backend == "POSIX" and "NONE" in agent.agent.note
    rng = np.random.default_rng(0)
    data = rng.bytes(32 * SIZE)
    agent.pool.view[: 32 * SIZE] = data
    places = rng.permutation(64)[:32].tolist()
    assert agent.move("WRITE", range(32), places) == (True, "")
    agent.pool.view[32 * SIZE :] = bytes(32 * SIZE)
    assert agent.move("READ", range(32, 64), places) == (True, "")
    assert bytes(agent.pool.view[32 * SIZE :]) == data
    assert agent.agent.under_way == 0


def test_tier_process_handles_many_messages(agent):
    left, over = [200], threading.Event()

    def done(good, error):
        assert good, error
        left[0] -= 1
        if not left[0]:
            over.set()

    for number in range(200):
        agent.begin("READ" if number % 3 else "WRITE", [number % 64], [number % 64], done)
    assert over.wait(20) and agent.agent.under_way == 0 and not agent.unsettled


def test_tier_process_failure_is_reported(agent):
    os.ftruncate(agent.fd, 8 * SIZE)
    good, error = agent.move("READ", [0, 1], [7, 40])  # one lies behind the file's end
    assert not good and error
    assert agent.move("READ", [0], [7]) == (True, "")
    good, error = agent.move("READ", [], [])
    assert not good and "could not begin" in error


def test_tier_process_without_backend_reports_cause():
    with pytest.raises(KVTierError, match="NIXL has no NONE here"):
        StorageAgent(Reactor("test"), "test", "NONE", on_unsettled=print)
