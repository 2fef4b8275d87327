"""The node store as processes: a process that dies, hangs or restarts costs the others nothing and leaks nothing."""

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from store_support import EVERYTHING, NAMESPACE_ID, RawClient, block_hashes_of, engine_hello, tool_hello
from support import eventually, stop

from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.client import Failed, StoreClient
from vllm_kvtier.store.launcher import serves, start_store
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.wire.reactor import Reactor

BLOCK_HASHES = block_hashes_of((20, "a"))
CLIENTS = 4
LOOKUP_TIMEOUT = 1.0
BUSY_SECONDS = 1.2  # until a busy client ends by itself
LIFE_SECONDS = 0.05, 2.0  # until it is killed, if it still lives


class Store:
    """A server process at a path of its own."""

    def __init__(self, path: Path, *options: str):
        self.path, self.options = str(path), options
        self.process: subprocess.Popen | None = None

    def start(self) -> "Store":
        command = [sys.executable, "-m", "vllm_kvtier.store", "--socket", self.path, "--log-level=warning"]
        self.process = subprocess.Popen([*command, *self.options])
        eventually(lambda: serves(self.path), 30)
        eventually(lambda: self.counts().ready_bytes == self.counts().pool_bytes)
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def counts(self) -> m.Counts:
        with RawClient(self.path, tool_hello()) as tool:
            return tool.stat()


@pytest.fixture
def store(tmp_path):
    # 300 slots of 4 pages for far more blocks than that, so that eviction is always at work.
    store = Store(tmp_path / "s.sock", f"--size={1200 * m.PAGE}").start()
    yield store
    store.kill()


@pytest.fixture
def client(store):
    reactor = Reactor("test")
    reactor.start()
    client = StoreClient(reactor, store.path, engine_hello(), lookup_timeout=LOOKUP_TIMEOUT)
    client.start()
    eventually(lambda: client.connected)
    yield client
    reactor.stop()


def outcome(pending):
    assert pending.wait(10)
    return pending.outcome


HOLDER = """
import sys
sys.path.insert(0, sys.argv[2])
from store_support import RawClient, block_hashes_of, engine_hello
client = RawClient(sys.argv[1], engine_hello("holder"))
assert client.lookup(block_hashes_of((20, "a"))).num_hash_blocks == 20
assert min(client.reserve(block_hashes_of((50, "b")))) > 0
print("holds", flush=True)
sys.stdin.read()
"""


def test_killed_client_releases_leases_and_reservations_at_once(store, root):
    with RawClient(store.path, engine_hello()) as client:
        client.store(BLOCK_HASHES)
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, store.path, str(root / "tests")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=root,
        )
        assert holder.stdout.readline() == b"holds\n"
        index = client.stat().index
        assert (index.leases, index.leased_entries, index.reservations) == (1, 20, 50)
        holder.kill()
        holder.communicate()
        eventually(lambda: client.stat().index.reservations == 0)  # long before their time ends
        index = client.stat().index
        assert (index.leases, index.leased_entries) == (0, 0)
        assert index.used_pages == 20 * 4
        client.ask(m.Clear(1))
        assert client.stat().index.used_pages == 0


def test_killed_store_is_replaced_and_old_mapping_stays_valid(store, client):
    pool = client.open_pool()
    pool.buffer[m.PAGE : m.PAGE + 4] = b"data"
    first = client.instance
    store.kill()
    eventually(lambda: not client.connected)
    assert isinstance(client.lookup(NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING).outcome, Failed)
    pool.buffer[-4:] = b"late"
    assert bytes(pool.buffer[m.PAGE : m.PAGE + 4]) == b"data"
    store.start()
    eventually(lambda: client.connected)
    assert client.instance != first
    fresh = client.open_pool()
    assert fresh.instance != pool.instance and bytes(fresh.buffer[-4:]) == bytes(4)
    pool.close()
    fresh.close()


def test_hung_store_costs_one_timeout_and_releases_leases(store, client):
    with RawClient(store.path, engine_hello("writer")) as writer:
        writer.store(BLOCK_HASHES)
    assert outcome(client.lookup(NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING)).num_hash_blocks == 20
    stop(store.process.pid)
    started = time.monotonic()
    asked = [client.lookup(NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING) for _ in range(50)]
    assert time.monotonic() - started < LOOKUP_TIMEOUT, "asking never waits"
    assert all(isinstance(outcome(pending), Failed) for pending in asked)
    assert time.monotonic() - started < len(asked) / 4 * LOOKUP_TIMEOUT, "one timeout for all"
    assert isinstance(client.stat().outcome, Failed), "later questions fail at once"
    time.sleep(LOOKUP_TIMEOUT + 0.5)  # long enough for an attempt to greet it in vain
    os.kill(store.process.pid, signal.SIGCONT)
    eventually(lambda: client.connected)
    eventually(lambda: store.counts().index.leases == 0)
    assert outcome(client.lookup(NAMESPACE_ID, BLOCK_HASHES, 0, EVERYTHING)).num_hash_blocks == 20, "nothing was lost"


def test_clients_restart_a_killed_store_exactly_once(tmp_path):
    path, options = str(tmp_path / "s.sock"), StoreOptions(size="1MiB", idle_seconds=20)
    reactors = [Reactor(f"test{number}") for number in range(6)]
    clients = []
    for reactor in reactors:
        reactor.start()
        client = StoreClient(reactor, path, engine_hello(), launch=lambda: start_store(path, options))
        client.start()
        clients.append(client)
    try:
        seen = set()
        for _ in range(3):
            eventually(lambda: all(client.connected for client in clients), 30)
            (instance,) = {client.instance for client in clients}
            assert instance not in seen
            seen.add(instance)
            os.kill(outcome(clients[0].stat()).pid, signal.SIGKILL)
            eventually(lambda: not any(client.instance in seen for client in clients))
        assert Path(path).with_suffix(".log").read_text().count(" serves 1 MiB") in (3, 4)
    finally:
        for reactor in reactors:
            reactor.stop()
        eventually(lambda: not serves(path) or os.kill(pid_of(path), signal.SIGKILL))


def pid_of(path: str) -> int:
    with RawClient(path, tool_hello()) as tool:
        return tool.welcome.pid


class Member:
    """A busy process, to be killed when it has lived long enough; its life begins when it is connected."""

    def __init__(self, path: str, root: Path, number: int, life: float):
        command = [sys.executable, "tests/store_support.py", path, str(BUSY_SECONDS), str(number)]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        self.process = subprocess.Popen(
            command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.life, self.until, self.printed = life, 0.0, ""

    def overdue(self) -> bool:
        if not self.until and select.select([self.process.stdout], [], [], 0)[0]:
            self.printed = os.read(self.process.stdout.fileno(), 4096).decode()
            self.until = time.monotonic() + self.life
        return bool(self.until) and time.monotonic() > self.until


class Crowd:
    """Busy client processes, killed at random and replaced."""

    def __init__(self, path: str, root: Path, seed: int):
        self.random, self.path, self.root, self.number = random.Random(seed), path, root, seed * 1000
        self.members: list[Member] = []
        self.killed = self.done = self.loaded = 0

    def look_after(self) -> None:
        for member in list(self.members):
            if member.overdue() and member.process.poll() is None:
                member.process.kill()
                member.process.wait()
                self.killed += 1
            if member.process.poll() is not None:
                self.members.remove(member)
                out, err = member.process.communicate()
                assert member.process.returncode in (0, -signal.SIGKILL), err
                assert "Traceback" not in err, err
                if member.process.returncode == 0:
                    self.done += 1
                    self.loaded += int((member.printed + out).split()[-2])
        while len(self.members) < CLIENTS:
            self.number += 1
            self.members.append(Member(self.path, self.root, self.number, self.random.uniform(*LIFE_SECONDS)))

    def tells(self) -> bool:
        return self.killed > 3 and self.done > 3 and self.loaded > 500

    def end(self) -> None:
        for member in self.members:
            member.process.kill()
            member.process.communicate()


def run_crowd(store: Store, root: Path, seconds: float, seed: int, restarts: bool) -> Crowd:
    """At least so many seconds: on a busy machine until the crowd has shown something."""
    crowd = Crowd(store.path, root, seed)
    deadline = time.monotonic() + seconds
    restart = time.monotonic() + 4
    try:
        while (now := time.monotonic()) < deadline or (now < deadline + 60 and not crowd.tells()):
            crowd.look_after()
            if restarts and time.monotonic() > restart:
                store.kill()
                store.start()
                restart = time.monotonic() + crowd.random.uniform(1, 4)
            time.sleep(0.02)  # nothing to wait for: this is the clock of the test
    finally:
        crowd.end()
    return crowd


def assert_nothing_leaked(store: Store) -> None:
    eventually(lambda: len(store.counts().clients) == 1)
    counts = store.counts()
    assert (counts.index.leases, counts.index.leased_entries, counts.index.reservations) == (0, 0, 0)
    assert counts.index.used_pages == counts.index.entries * 4
    with RawClient(store.path, engine_hello(pages=1)) as client:
        client.ask(m.Clear(1))
        index = client.stat().index
        assert (index.used_pages, index.entries, index.pinned_entries) == (0, 0, 0)
        pages = counts.pool_bytes // m.PAGE
        whole = client.store(block_hashes_of((pages - 1, "whole")))
        assert sorted(whole) == list(range(1, pages)), "every page can be had again"
        client.ask(m.Clear(2))  # a namespace that has blocks takes none of another size


@pytest.mark.parametrize("restarts", [False, True], ids=["clients die", "the server dies too"])
def test_many_clients_under_load_read_correct_bytes_and_leak_nothing(store, root, restarts):
    crowd = run_crowd(store, root, 10, seed=1 + restarts, restarts=restarts)
    counts = store.counts().index
    print(f"{crowd.done} ended, {crowd.killed} killed, {crowd.loaded} blocks checked; {counts}")
    assert crowd.tells()
    if not restarts:
        assert counts.evictions > 100
    assert_nothing_leaked(store)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_clients_for_minutes_leak_nothing(store, root):
    for seed in range(10, 16):
        run_crowd(store, root, 60, seed, restarts=seed % 2 == 1)
        assert_nothing_leaked(store)
