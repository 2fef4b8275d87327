"""The node store's socket, lock and memory, from its start to the end of its last client."""

import errno
import fcntl
import logging
import os
import shutil
import socket
import stat
import subprocess
import threading
import time
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path

import msgspec
import pytest
from store_servers import assert_serves, make
from store_support import (
    NAMESPACE_ID,
    RawClient,
    block_hashes_of,
    engine_hello,
    map_pool,
    tool_hello,
)
from support import descriptors, eventually

from vllm_kvtier import runtime_dir
from vllm_kvtier.errors import ConfigError, KVTierError
from vllm_kvtier.store import launcher
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.memory.client_mapping import shake_hands
from vllm_kvtier.store.memory.memory_limits import MemoryLimits
from vllm_kvtier.store.memory.pool_memory import PoolMemory
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.server import listen_socket
from vllm_kvtier.store.server import server as server_module
from vllm_kvtier.store.server.listen_socket import ServedAlready
from vllm_kvtier.store.server.server import StoreServer
from vllm_kvtier.store.tiers.tier_stack import TierStack

BLOCK_HASHES = block_hashes_of((10, "a"))


@pytest.fixture
def server(tmp_path):
    server = make(tmp_path / "s.sock")
    yield server
    server.stop()


@pytest.fixture
def client(server):
    with RawClient(server.path, engine_hello()) as client:
        yield client


# -- the socket and the memory ---------------------------------------------------------------------------------


def test_store_socket_is_private_to_user(server):
    mode = os.stat(server.path).st_mode
    assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600


def test_store_path_in_use_raises(server):
    with pytest.raises(ServedAlready, match=str(os.getpid())):
        StoreServer(server.path, StoreOptions(size="1MiB"))
    assert_serves(server)


def test_store_stale_socket_is_replaced(tmp_path):
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


def test_store_whose_files_were_removed_leaves_those_of_the_next_one(tmp_path):
    """As by a logout, which empties the runtime directory, or what cleans /tmp. The next store's socket went with the
    end of the first, and no engine could reach or start one."""
    first = make(tmp_path / "s.sock")
    for file in tmp_path.iterdir():
        file.unlink()
    second = make(tmp_path / "s.sock")
    first.stop()
    assert_serves(second)
    second.stop()
    assert not (tmp_path / "s.sock").exists()


def test_store_without_lock_file_that_serves_is_not_replaced(server):
    """systemd-tmpfiles removes old files from /tmp, and no live socket."""
    os.unlink(f"{server.path}.lock")
    with pytest.raises(ServedAlready):
        StoreServer(server.path, StoreOptions(size="1MiB"))
    assert_serves(server)


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A store in the runtime directory that looks at its socket all the time."""
    monkeypatch.setattr(server_module, "SOCKET_SECONDS", 0.02)
    folder = tmp_path / "run" / f"kvtier-{os.getuid()}"
    folder.mkdir(0o700, parents=True)
    server = make(folder / "s.sock")
    yield server
    server.stop()


def instance_at(path: str) -> str:
    """"": no store listens there."""
    try:
        welcome, fd = shake_hands(path, tool_hello(), 5.0)
    except KVTierError:
        return ""
    os.close(fd)
    return welcome.instance


@pytest.mark.parametrize("gone", ["socket", "directory"])
def test_store_whose_socket_was_removed_listens_again(watched, gone):
    """A logout or what cleans /tmp: no engine found the store any more, and the next one's was a second store."""
    before = descriptors().total()
    folder = Path(watched.path).parent
    with RawClient(watched.path, engine_hello()) as client:
        os.unlink(watched.path) if gone == "socket" else shutil.rmtree(folder)
        assert eventually(lambda: instance_at(watched.path) == watched.instance)
        assert client.stat().instance == watched.instance
        assert stat.S_IMODE(os.stat(watched.path).st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
        with pytest.raises(ServedAlready, match=f"pid {os.getpid()}"):
            StoreServer(watched.path, StoreOptions(size="1MiB"))
    assert eventually(lambda: descriptors().total() <= before)
    watched.stop()
    assert not os.path.exists(watched.path)


def test_store_whose_directory_was_removed_writes_its_log_there_again(watched, caplog):
    caplog.set_level(logging.INFO)
    folder = Path(watched.path).parent
    log = RotatingFileHandler(folder / "s.log")
    logging.getLogger().addHandler(log)
    try:
        shutil.rmtree(folder)
        assert eventually(lambda: (folder / "s.log").exists())
        assert eventually(lambda: f"it listens at {watched.path} again" in (folder / "s.log").read_text())
    finally:
        logging.getLogger().removeHandler(log)
        log.close()


def test_store_whose_directory_cannot_be_made_again_waits_for_the_next_login(watched, caplog):
    parent = Path(watched.path).parents[1]
    shutil.rmtree(parent)
    assert eventually(lambda: "new engines cannot find it" in caplog.text)
    time.sleep(0.1)
    assert caplog.text.count("new engines cannot find it") == 1
    parent.mkdir()
    assert eventually(lambda: instance_at(watched.path) == watched.instance)


@pytest.mark.parametrize("lock", [True, False])
def test_store_started_at_a_removed_path_keeps_it(watched, caplog, lock):
    """Until it ends; then the first one has it again. Also if a cleaner removes the second one's lock, too."""
    busy, started = threading.Event(), threading.Event()
    watched.reactor.call_soon(lambda: busy.set() or started.wait(10))
    assert busy.wait(10)
    shutil.rmtree(Path(watched.path).parent)
    runtime_dir.make_again(watched.path)
    second = make(watched.path)
    if not lock:
        os.unlink(f"{watched.path}.lock")
    started.set()
    assert eventually(lambda: "new engines cannot find it" in caplog.text)
    for _ in range(5):
        assert_serves(second)
        assert instance_at(watched.path) == second.instance
    second.stop()
    assert eventually(lambda: instance_at(watched.path) == watched.instance)


def test_store_that_ends_leaves_its_removed_path_to_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(server_module, "SOCKET_SECONDS", 0.02)
    idle = threading.Event()
    server = make(tmp_path / "s.sock", idle.set, idle_seconds=0.05)
    assert idle.wait(5)
    os.unlink(server.path)
    time.sleep(0.2)
    assert not os.path.exists(server.path)
    server.stop()


def test_store_lock_file_removed_while_it_is_taken_is_made_again(tmp_path, monkeypatch):
    lock, locked = tmp_path / "s.sock.lock", listen_socket.lock_now

    def slow(fd):
        monkeypatch.undo()
        lock.unlink()
        return locked(fd)

    monkeypatch.setattr(listen_socket, "lock_now", slow)
    server = make(tmp_path / "s.sock")
    with lock.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    server.stop()


def test_store_starts_in_a_full_directory(tmp_path, monkeypatch):
    """Socket and lock need no space, and the process id in the lock is only to wait for its end."""

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(listen_socket.os, "pwrite", full)
    server = make(tmp_path / "s.sock")
    try:
        assert_serves(server)
        with pytest.raises(ServedAlready, match="pid unknown"):
            StoreServer(server.path, StoreOptions(size="1MiB"))
    finally:
        server.stop()


def test_store_path_of_regular_file_raises(tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    for _ in range(2):
        with pytest.raises(KVTierError, match="not a socket"):
            StoreServer(str(path), StoreOptions(size="1MiB"))
    assert path.read_text() == "data"


def test_operators_store_waits_for_memory_of_the_one_before(tmp_path, monkeypatch):
    """Engines keep that for some seconds: a store that takes most of a machine failed at once when it was started
    again, a few times a second, and service managers give up then."""
    monkeypatch.setattr(server_module, "IN_USE_POLL_SECONDS", 0.01)
    free, path = [1 << 20] * 3 + [1 << 23] * 2, str(tmp_path / "s.sock")
    monkeypatch.setattr(server_module, "memory_limits", lambda: MemoryLimits(1 << 23, free.pop(0), "its memory"))
    server = StoreServer(path, StoreOptions(size="4MiB"), launched=False)
    server.start()
    server.stop()
    assert not free
    free += [1 << 20] * 2
    for size, launched in (("4MiB", True), ("8MiB", False)):  # engines say so at once; it never will
        with pytest.raises(ConfigError, match="does not fit"):
            StoreServer(path, StoreOptions(size=size), launched=launched)


def test_store_asks_how_children_find_the_package_before_it_serves(tmp_path, monkeypatch):
    """A whole start of Python: the reactor waited for it at the first tier process."""
    run, threads = subprocess.run, []

    def noted(*args, **options):
        threads.append(threading.current_thread())
        return run(*args, **options)

    launcher._found_by_child.cache_clear()
    monkeypatch.setattr(launcher.subprocess, "run", noted)
    make(tmp_path / "s.sock").stop()
    assert not threads, "without tiers it starts none"
    disk = StoreOptions(size="4MiB", disk_path=str(tmp_path / "disk"), disk_size="8MiB")
    server = StoreServer(str(tmp_path / "s.sock"), disk)
    server.start()
    try:
        with RawClient(server.path, tool_hello()) as tool:
            eventually(lambda: tool.stat().tiers[0].state == "ready", 30)
    finally:
        server.stop()
    assert threads == [threading.current_thread()]


def test_store_that_fits_in_forbidden_huge_pages_only_is_refused(tmp_path, monkeypatch):
    """Small pages of the same size would fill its container, and an engine's with it."""
    limits = MemoryLimits(1 << 23, 1 << 23, "this container's memory", 1 << 30, 1 << 30)
    monkeypatch.setattr(server_module, "memory_limits", lambda: limits)
    monkeypatch.setattr(PoolMemory, "_try_huge", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="does not fit"):
        StoreServer(str(tmp_path / "s.sock"), StoreOptions(size="64MiB"))


def test_store_failed_start_releases_lock(tmp_path):
    path = str(tmp_path / "s.sock")
    before = descriptors()
    with pytest.raises(ConfigError, match="does not fit"):
        StoreServer(path, StoreOptions(size="1000TiB"))
    with pytest.raises(ConfigError, match="policy"):
        StoreServer(path, StoreOptions(policy="best"))
    with pytest.raises(KVTierError, match="not a directory"):
        StoreServer(str(tmp_path / "none" / "s.sock"), StoreOptions())
    with pytest.raises(KVTierError, match="cannot listen"):
        StoreServer(str(tmp_path / ("long" * 40)), StoreOptions(size="1MiB"))
    assert descriptors() <= before
    make(path).stop()


def test_store_releases_all_slots_at_end(tmp_path):
    make(tmp_path / "warm.sock").stop()
    before = descriptors()
    server = make(tmp_path / "s.sock")
    client = RawClient(server.path, engine_hello())
    server.stop()
    server.stop()
    assert client.ended()
    client.close()
    assert descriptors() <= before


def test_store_registered_memory_is_announced_and_used(tmp_path, monkeypatch):
    """Serving starts before any of it is."""
    go = threading.Event()
    inner = PoolMemory._commit

    def slow(self, start, end, hands):
        assert go.wait(10)
        go.clear()
        inner(self, start, end, hands)

    monkeypatch.setattr(PoolMemory, "_commit", slow)
    server = StoreServer(str(tmp_path / "s.sock"), StoreOptions(size="20MiB"))
    server.start()
    with RawClient(server.path, engine_hello()) as client:
        assert (client.welcome.ready_pages, client.welcome.pool_pages) == (0, 5120)
        assert client.reserve(BLOCK_HASHES)[0] == m.NO_ROOM
        for ready in (4096, 5120):
            go.set()
            told = m.decode_reply(_next_frame(client))
            assert told == m.Ready(ready, 5120)
        assert min(client.reserve(BLOCK_HASHES)) > 0
    go.set()
    server.stop()


def test_store_that_ran_out_of_memory_takes_shares_of_what_it_has(tmp_path, monkeypatch):
    inner = PoolMemory._commit

    def first(self, start, end, threads):
        if start:
            raise OSError(errno.ENOMEM, "no more")
        inner(self, start, end, threads)

    monkeypatch.setattr(PoolMemory, "_commit", first)
    limited = threading.Event()
    monkeypatch.setattr(TierStack, "pool_committed", lambda self: limited.set())
    server = make(tmp_path / "s.sock", size="256MiB")  # 16 MiB of it
    assert limited.wait(10)
    with RawClient(server.path, engine_hello(pages=512)) as client:
        assert eventually(lambda: client.stat().pool_bytes == 16 << 20)
        assert len(client.store(BLOCK_HASHES)) == 7
        assert client.ask(m.Pin(1, NAMESPACE_ID, BLOCK_HASHES, True)).count == 4  # pin_share: half
        assert client.stat().index.pool_pages == 4096
    server.stop()


def _next_frame(client: RawClient) -> bytes:
    from vllm_kvtier.wire.stream import read_frame

    return read_frame(client.socket, time.monotonic() + 10, client.fds)


# -- idleness -------------------------------------------------------------------------------------------------


def test_store_without_clients_exits(tmp_path):
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


def test_launched_store_makes_way_for_a_version_with_kinds_of_cache_unknown_here(tmp_path):
    """It decoded the whole Hello first, and stayed."""
    idle = threading.Event()
    server = make(tmp_path / "s.sock", idle.set)
    hello = msgspec.to_builtins(engine_hello())
    hello["groups"][0]["kind"] = "ring"
    for protocol in (m.PROTOCOL, m.PROTOCOL + 1):
        assert not idle.is_set()
        with RawClient(server.path) as client:
            refused = client.ask(msgspec.msgpack.encode({**hello, "protocol": protocol, "version": "9.9"})).reason
    assert "9.9 with protocol" in refused and idle.wait(5)
    server.stop()


def test_launched_store_makes_way_for_another_version_once_unused(tmp_path):
    """Before, new engines had no store for ten minutes after the last old one had left."""
    idle = threading.Event()
    server = make(tmp_path / "s.sock", idle.set)
    other = m.Hello("new", 1, "engine", protocol=m.PROTOCOL + 1, version="9.9")
    with RawClient(server.path, engine_hello()) as ours:
        with RawClient(server.path) as client:
            assert "ends once its own engines have left" in client.ask(other).reason
        assert ours.stat() and not idle.is_set(), "it is used"
    eventually(lambda: not server._used())
    with RawClient(server.path) as client:
        client.ask(msgspec.structs.replace(other, kind="tool"))
    with RawClient(server.path, tool_hello()) as client:
        assert client.stat() and not idle.is_set(), "another version's statistics want no store"
    with RawClient(server.path) as client:
        client.ask(other)
        assert idle.wait(5)
    server.stop()


def test_operators_store_stays_for_another_version(tmp_path):
    idle = threading.Event()
    server = StoreServer(str(tmp_path / "s.sock"), StoreOptions(size="1MiB"), idle.set, launched=False)
    server.start()
    with RawClient(server.path) as client:
        refused = client.ask(m.Hello("new", 1, "engine", protocol=m.PROTOCOL + 1))
        assert "run one of the engines' version" in refused.reason
    assert_serves(server)
    assert not idle.is_set()
    server.stop()


def test_store_used_by_other_nodes_is_not_idle(tmp_path, monkeypatch):
    idle, lent = threading.Event(), iter(range(5))
    monkeypatch.setattr(TierStack, "leases_granted", property(lambda lower: next(lent, 5)))
    server = make(tmp_path / "s.sock", idle.set, idle_seconds=0.3)
    started = time.monotonic()
    assert idle.wait(5)
    assert time.monotonic() - started > 0.8
    server.stop()


def test_store_idle_zero_means_never(server, tmp_path):
    other = make(tmp_path / "o.sock", idle_seconds=0)
    assert other._idle is None and server._idle is not None
    other.stop()


# -- mapping --------------------------------------------------------------------------------------------------


def test_store_mappings_share_memory_and_outlive_store(server):
    one, two = map_pool(server.path), map_pool(server.path)
    assert one.nbytes == 1 << 20 and one.instance == server.instance
    server.stop()
    one.buffer[4096:4100] = b"abcd"
    assert bytes(two.buffer[4096:4100]) == b"abcd"
    one.close()
    two.close()


def test_store_mapping_without_store_raises_with_cause(tmp_path):
    with pytest.raises(KVTierError, match="no node store answers at .*No such file"):
        map_pool(str(tmp_path / "none"))


@pytest.mark.parametrize("owner", ["ours", "another"])
def test_directory_that_is_there_is_used_if_it_is_not_another_users(tmp_path, monkeypatch, owner):
    """Whatever its mode: a path in it was given by the user, for a volume perhaps. All users may write to /tmp."""
    folder = tmp_path / f"kvtier-{os.getuid()}"
    folder.mkdir(mode=0o755)
    if owner == "ours":
        runtime_dir.make_again(str(folder / "store.sock"))
        assert folder.stat().st_mode & 0o777 == 0o755
    else:
        info = os.stat_result((stat.S_IFDIR | 0o777, 1, 1, 2, 65534, 65534, 0, 0, 0, 0))
        monkeypatch.setattr(Path, "lstat", lambda self: info)
        with pytest.raises(KVTierError, match="belongs to user 65534"):
            runtime_dir.make_again(str(folder / "store.sock"))


def test_lock_that_is_a_link_is_not_opened(tmp_path):
    """It may be of another user's making, and lead to a file of this one."""
    (tmp_path / "theirs").write_text("")
    start = partial(launcher.start_store, options=None)
    for name, opened in (("s.sock.lock", listen_socket.take), ("s.sock.start", start)):
        (tmp_path / name).symlink_to(tmp_path / "theirs")
        with pytest.raises((OSError, KVTierError), match="symbolic links"):
            opened(str(tmp_path / "s.sock"))
