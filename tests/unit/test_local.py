"""Engines of one node find each other by sockets in their user's runtime directory, and otherwise over TCP.

That asks, leases and their ends are the same either way is in ``test_endpoint_peers.py``.
"""

import errno
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from endpoint_support import BLOCK_HASHES, HASH_BLOCK_SIZE, NAMESPACE, Asker, Source, SourceProcess, export, making
from support import eventually

from vllm_kvtier.scheduler.leases.exports import LeaseKind, Refusal
from vllm_kvtier.scheduler.leases.lease_client import LeasedBlocks
from vllm_kvtier.wire import local
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.dealer import Dealer
from vllm_kvtier.wire.link import link_path
from vllm_kvtier.wire.local import LocalDealer, local_path, sweep

SOON = 20.0
LONG = dict(lookup_timeout=60.0, handshake_timeout=60.0, lease_seconds=60.0)  # seconds: nothing here waits for them


@pytest.fixture
def make(run_dir):
    yield from making(**LONG)


def lending(make, **kwargs):
    source = make(Source, **kwargs)
    source.table.add(export(kind=LeaseKind.RETAINED))
    return source


def answer(asker, source, near="source/1"):
    pending = asker.peers.ask(
        source.address, same_node_instance=near, start=0, block_hashes=export().block_hashes, lora_fingerprint=b""
    )
    return eventually(lambda: pending.outcome, SOON)


def way(asker) -> type:
    (connection,) = asker.peers._connections.values()
    return type(connection.dealer)


def streams(source) -> dict:
    return source.endpoint._local._streams


def test_local_engine_is_queried_over_unix_socket(make):
    source, asker = lending(make), make(Asker)
    offer = answer(asker, source)
    assert offer.tokens == 8 * HASH_BLOCK_SIZE and way(asker) is LocalDealer
    mode = os.stat(local_path("source/1"))
    assert stat.S_ISSOCK(mode.st_mode) and not os.stat(Path(local_path("x")).parent).st_mode & 0o077
    asker.peers.release(offer, done=True)
    eventually(lambda: source.leases() == 0)


def test_local_large_messages_arrive_whole_and_in_order(make):
    source, asker = lending(make), make(Asker)
    offers = [asker.peers.ask(source.address, same_node_instance="source/1", start=0,
                              block_hashes=export().block_hashes * 4000, lora_fingerprint=b"")
              for _ in range(40)]  # fmt: skip
    leases = [eventually(lambda p=p: p.outcome, SOON).lease for p in offers]
    assert leases == sorted(set(leases)) and source.leases() == 40
    for pending in offers:
        asker.peers.release(pending.outcome, done=True)
    eventually(lambda: source.leases() == 0)


@pytest.mark.parametrize("near", ["", "somebody/else"])
def test_local_engine_without_unix_socket_is_reached_over_tcp(make, near):
    source, asker = lending(make), make(Asker)
    assert isinstance(answer(asker, source, near), LeasedBlocks) and way(asker) is Dealer


def test_local_unsafe_directory_falls_back_to_tcp(make, run_dir, caplog, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(run_dir))
    os.chmod(Path(local_path("any")).parent, 0o755)
    source, asker = lending(make), make(Asker)
    assert "over TCP" in caplog.text and "0700" in caplog.text
    assert isinstance(answer(asker, source), LeasedBlocks) and way(asker) is Dealer


def test_local_socket_path_in_use_falls_back_to_tcp(make, caplog):
    """By a file that stays: another instance's name cannot be ours."""
    Path(local_path("source/1")).write_text("")
    source, asker = lending(make), make(Asker)
    assert "over TCP" in caplog.text
    assert isinstance(answer(asker, source), LeasedBlocks) and way(asker) is Dealer


def test_local_unix_socket_client_needs_no_key(make, tmp_path):
    """It is the same user, in the same container: it could read the key, and the memory."""
    ClusterKey.create(str(tmp_path / "key"))
    source, asker = lending(make, key=ClusterKey.load(str(tmp_path / "key"))), make(Asker)
    assert isinstance(answer(asker, source), LeasedBlocks)


def test_local_killed_source_ends_lookups_at_once(make):
    asker = make(Asker)
    with SourceProcess() as source:
        kept = answer(asker, source)
        assert asker.held() == 1
        pending = asker.peers.ask(
            source.address,
            same_node_instance="source/1",
            start=0,
            block_hashes=[b"h" * 32],
            lora_fingerprint=b"",
            from_prefix_cache=True,
        )
        source.await_ask()
        source.kill()
        assert eventually(lambda: pending.outcome, SOON).code == "unreachable"
    eventually(lambda: not asker.peers._connections, SOON)
    asker.peers.release(kept, done=True)  # a release of what is void sends nothing
    own = {asker.reactor._wake, asker.reactor._alarm, asker.reactor._epoll.fileno()}
    assert asker.held() == 0 and asker.reactor._fds.keys() <= own


READER = """
import sys
sys.path[:0] = sys.argv[2].split(":")
from endpoint_support import Asker, export
from support import eventually
asker = Asker(lease_seconds=60.0)
ask = asker.peers.ask(("127.0.0.1", int(sys.argv[1])), same_node_instance="source/1",
    start=0, block_hashes=export().block_hashes, lora_fingerprint=b"")
eventually(lambda: ask.outcome, 20)
print("holds", flush=True)
sys.stdin.read()
"""


def test_local_killed_reader_releases_leases_at_once(make):
    source = lending(make)
    path = ":".join([str(Path(__file__).parent.parent), *sys.path])
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(source.address[1]), path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with reader:
        assert reader.stdout.readline() == "holds\n" and source.leases() == 1
        began = time.monotonic()
        reader.kill()
        eventually(lambda: source.leases() == 0, SOON)
        assert time.monotonic() - began < LONG["lease_seconds"] / 2, "that was the lease's end"


def test_local_files_of_killed_engines_are_removed(make):
    with SourceProcess() as source:
        path = Path(local_path("source/1"))
        assert path.exists()
        source.kill()
    assert path.exists()
    other = make(Source, "source/2")
    assert not path.exists() and Path(local_path("source/2")).exists()
    sweep(path.parent)
    assert Path(local_path("source/2")).exists(), "an engine listens there"
    other.stop()
    assert not Path(local_path("source/2")).exists()


def test_local_links_of_killed_engines_are_removed(run_dir):
    paths = [Path(link_path("engine", each)) for each in ("dead", "live", "new")]
    store = paths[0].with_name("store-default.sock")
    with ExitStack() as sockets:
        for path in (*paths, store):
            sock = sockets.enter_context(socket.socket(socket.AF_UNIX))
            sock.bind(str(path))
            if path == paths[0]:
                sock.close()
            if path == paths[1]:
                sock.listen()
                live = sock
            if path != paths[2]:
                os.utime(path, (0, 0))
        sweep(store.parent)
        live.setblocking(False)
        with pytest.raises(BlockingIOError):  # a connection ends an engine that has no file descriptor left
            live.accept()
    assert [path.exists() for path in (*paths, store)] == [False, True, True, True]


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 40, m.encode(m.LeaseRefused(0, "no_matching_blocks", ""))],
    ids=["empty", "garbage", "an answer"],
)
def test_local_malformed_message_disconnects_sender(make, data, caplog):
    source = lending(make)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(SOON)
        stranger.connect(local_path("source/1"))
        greeting = m.encode(m.Hello(m.PROTOCOL, "raw/1", NAMESPACE))
        stranger.sendall(frame(greeting) + frame(data) * 500 + frame(greeting))
        said = b""
        with suppress(ConnectionResetError):  # closed before all of it was read
            while chunk := stranger.recv(1 << 16):
                said += chunk
    assert said.count(b"source/1") <= 1, "it was greeted, once"
    eventually(lambda: not streams(source) and not source.endpoint._connections)
    assert sum("kvtier" in record.message for record in caplog.records) == 1


def test_local_many_connections_leak_nothing(make):
    source, asker = lending(make), make(Asker)
    held = answer(asker, source)
    stop = threading.Event()

    def come_and_go():
        while not stop.is_set():
            with socket.socket(socket.AF_UNIX) as visitor, suppress(BlockingIOError):
                visitor.setblocking(False)
                visitor.connect(local_path("source/1"))

    visitors = threading.Thread(target=come_and_go)
    visitors.start()
    try:
        for _ in range(20):
            pending = asker.peers.ask(
                source.address, same_node_instance="source/1", start=0, block_hashes=[b"x" * 8], lora_fingerprint=b""
            )
            assert eventually(lambda p=pending: p.outcome, SOON).code == "no_matching_blocks"
    finally:
        stop.set()
        visitors.join()
    eventually(lambda: len(streams(source)) == 1, SOON)
    asker.peers.release(held, done=True)
    eventually(lambda: source.leases() == 0)


def test_local_connections_are_bounded(make, monkeypatch):
    monkeypatch.setattr(local, "MAX_CONNECTIONS", 3)
    source = lending(make)
    with ExitStack() as stack:
        guests = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(4)]
        for guest in guests:
            guest.settimeout(SOON)
            guest.connect(local_path("source/1"))
        assert guests[3].recv(1) == b"", "one too many"
        assert len(streams(source)) == 3
    eventually(lambda: not streams(source))


def test_local_without_file_descriptors_accepts_later(make, monkeypatch, caplog):
    """A connection that comes while there are none is accepted when there are; if it ends meanwhile, it ends."""
    source, asker = lending(make), make(Asker)
    full = threading.Event()
    listener = source.endpoint._local._listener

    class Full:
        fileno, close = listener.fileno, listener.close

        def accept(self):
            if full.is_set():
                raise OSError(errno.EMFILE, "Too many open files")
            return listener.accept()

    full.set()
    source.on_reactor(lambda: setattr(source.endpoint._local, "_listener", Full()))
    pending = asker.peers.ask(
        source.address, same_node_instance="source/1", start=0, block_hashes=export().block_hashes, lora_fingerprint=b""
    )
    eventually(lambda: "accepting clients is paused" in caplog.text, SOON)
    full.clear()
    assert isinstance(eventually(lambda: pending.outcome, SOON), LeasedBlocks)
    full.set()
    caplog.clear()
    with socket.socket(socket.AF_UNIX) as late:
        late.connect(local_path("source/1"))
        eventually(lambda: "accepting clients is paused" in caplog.text, SOON)
        source.stop()
        assert not Path(local_path("source/1")).exists() and not streams(source)
        eventually(lambda: not asker.peers._connections, SOON)
    assert "unexpected error" not in caplog.text


def test_local_last_message_before_close_is_received(make):
    source = lending(make)
    with socket.socket(socket.AF_UNIX) as short_load_seconds:
        short_load_seconds.connect(local_path("source/1"))
        words = [m.Hello(m.PROTOCOL, "raw/1", NAMESPACE), m.LeaseRequest(1, "source/1", 0, list(export().block_hashes))]
        drops = [m.ReleaseExport(f"gone-{n}") for n in range(300)] + [m.ReleaseExport("e")]
        held = threading.Event()
        source.reactor.call_soon(lambda: held.wait(SOON))
        short_load_seconds.sendall(b"".join(frame(m.encode(word)) for word in words + drops))
    held.set()
    eventually(lambda: not source.table.counts()["exports"], SOON, "its last message")
    eventually(lambda: source.leases() == 0 and not streams(source))


def test_local_request_of_closed_client_is_dropped(make):
    """It was given a lease, or put off, after the connection had ended."""
    asked = []
    source = make(Source, lend=lambda *given: asked.append(given))
    with socket.socket(socket.AF_UNIX) as short_load_seconds:
        short_load_seconds.connect(local_path("source/1"))
        words = [m.Hello(m.PROTOCOL, "raw/1", NAMESPACE),
                 *(m.LeaseRequest(n, "source/1", 0, BLOCK_HASHES, from_prefix_cache=True, wait_seconds=9.0) for n in (1,
                 2))]  # fmt: skip
        short_load_seconds.sendall(b"".join(frame(m.encode(word)) for word in words))
        eventually(lambda: len(asked) == 2)
    eventually(lambda: not source.endpoint._connections)

    def answer_both():
        (ask, identity, seconds, settle), (_, _, _, put_off) = asked
        settle(source.table.lease_cached(export(kind=LeaseKind.PEER_FETCH), 0, identity, seconds, served=False))
        put_off(Refusal.NOT_READY)

    source.on_reactor(answer_both)
    eventually(lambda: source.leases() == 0)
    assert not source.on_reactor(lambda: source.endpoint._parked)


def test_local_and_tcp_have_separate_connections(make):
    """One that was made for something else does not keep asks on the longer way, and an instance has one to itself."""
    first, second = lending(make), lending(make, instance="source/2")
    asker = make(Asker)
    over_tcp, near = answer(asker, first, ""), answer(asker, first)
    assert {type(c.dealer) for c in asker.peers._connections.values()} == {Dealer, LocalDealer}
    # As in two containers with a network each: the same address, and it is not the same engine.
    pending = asker.peers.ask(
        first.address, same_node_instance="source/2", start=0, block_hashes=export().block_hashes, lora_fingerprint=b""
    )
    other = eventually(lambda: pending.outcome, SOON)
    assert (near.instance, other.instance, other.address) == ("source/1", "source/2", first.address)
    assert (first.leases(), second.leases()) == (2, 1)
    for offer in (over_tcp, near, other):
        asker.peers.release(offer, done=True)
    eventually(lambda: first.leases() == second.leases() == asker.held() == 0)


def test_local_client_stop_closes_its_connections(make):
    source, asker = lending(make), make(Asker)
    answer(asker, source)
    asker.stop()
    eventually(lambda: not streams(source) and source.leases() == 0)


def test_local_socket_appears_only_when_listening(make, monkeypatch):
    """Or another engine that starts just then would remove it."""
    listen = socket.socket.listen

    def swept(self, *args):
        sweep(Path(local_path("source/1")).parent)
        assert not Path(local_path("source/1")).exists()
        return listen(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(socket.socket, "listen", swept)
        source = lending(make)
    asker = make(Asker)
    assert isinstance(answer(asker, source), LeasedBlocks) and way(asker) is LocalDealer
    assert [path.suffix for path in Path(local_path("source/1")).parent.iterdir()] == [".peer"]


def test_local_socket_with_full_backlog_is_not_removed(run_dir):
    path = local_path("busy/1")
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(0)
        with suppress(BlockingIOError):
            while True:
                guest = stack.enter_context(socket.socket(socket.AF_UNIX))
                guest.setblocking(False)
                guest.connect(path)
        sweep(Path(path).parent)
        assert Path(path).exists()


@pytest.mark.parametrize("more", [b"", b"\x7f" * (1 << 16)], ids=["announced", "begun"])
def test_local_oversized_frame_disconnects_sender(make, more):
    source, asker = lending(make), make(Asker)
    held = answer(asker, source)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(local_path("source/1"))
        stranger.sendall((1 << 31).to_bytes(4, "little") + more)
        stranger.settimeout(SOON)
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:  # closed before all of it was read
            assert more
    asker.peers.release(held, done=True)
    eventually(lambda: source.leases() == 0)
