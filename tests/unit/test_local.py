"""Engines of one node find each other by sockets in their user's runtime directory; whoever cannot, over TCP.

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
from endpoint_support import CHAIN, NAMESPACE, UNIT, Asker, Source, SourceProcess, export, making
from support import eventually

from vllm_kvtier.scheduler.exports import Kind, Refusal
from vllm_kvtier.scheduler.offers import Offer
from vllm_kvtier.wire import local
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.dealer import Dealer
from vllm_kvtier.wire.local import LocalDealer, local_path, sweep

SOON = 20.0
LONG = dict(ask_timeout=60.0, handshake_timeout=60.0, lease_seconds=60.0)  # seconds: nothing here waits for them


@pytest.fixture
def make(run_dir):
    yield from making(**LONG)


def lending(make, **kwargs):
    source = make(Source, **kwargs)
    source.table.add(export(kind=Kind.RETAINED))
    return source


def answer(asker, source, near="source/1"):
    pending = asker.peers.ask(source.address, near=near, start=0, chain=export().chain, variant=b"")
    return eventually(lambda: pending.outcome, SOON)


def way(asker) -> type:
    (connection,) = asker.peers._connections.values()
    return type(connection.dealer)


def streams(source) -> dict:
    return source.endpoint._local._streams


def test_an_engine_of_this_node_is_asked_over_its_socket(make):
    source, asker = lending(make), make(Asker)
    offer = answer(asker, source)
    assert offer.tokens == 8 * UNIT and way(asker) is LocalDealer
    mode = os.stat(local_path("source/1"))
    assert stat.S_ISSOCK(mode.st_mode) and not os.stat(Path(local_path("x")).parent).st_mode & 0o077
    asker.peers.release(offer, done=True)
    eventually(lambda: source.leases() == 0)


def test_what_is_large_comes_whole_and_in_order(make):
    source, asker = lending(make), make(Asker)
    offers = [asker.peers.ask(source.address, near="source/1", start=0, chain=export().chain * 4000, variant=b"")
              for _ in range(40)]  # fmt: skip
    leases = [eventually(lambda p=p: p.outcome, SOON).lease for p in offers]
    assert leases == sorted(set(leases)) and source.leases() == 40
    for pending in offers:
        asker.peers.release(pending.outcome, done=True)
    eventually(lambda: source.leases() == 0)


@pytest.mark.parametrize("near", ["", "somebody/else"])
def test_who_has_no_socket_here_is_reached_over_tcp(make, near):
    source, asker = lending(make), make(Asker)
    assert isinstance(answer(asker, source, near), Offer) and way(asker) is Dealer


def test_without_a_directory_of_its_own_an_engine_answers_over_tcp(make, run_dir, caplog):
    os.chmod(Path(local_path("any")).parent, 0o755)
    source, asker = lending(make), make(Asker)
    assert "over TCP" in caplog.text and "0700" in caplog.text
    assert isinstance(answer(asker, source), Offer) and way(asker) is Dealer


def test_a_path_that_is_taken_is_no_end(make, caplog):
    """By a file that nobody removes: another instance's name cannot be ours."""
    Path(local_path("source/1")).write_text("")
    source, asker = lending(make), make(Asker)
    assert "over TCP" in caplog.text
    assert isinstance(answer(asker, source), Offer) and way(asker) is Dealer


def test_who_can_reach_the_socket_needs_no_key(make, tmp_path):
    """It is the same user, in the same container: it could read the key, and the memory."""
    ClusterKey.create(str(tmp_path / "key"))
    source, asker = lending(make, key=ClusterKey.load(str(tmp_path / "key"))), make(Asker)
    assert isinstance(answer(asker, source), Offer)


def test_a_lender_that_is_killed_is_known_to_be_gone_at_once(make):
    asker = make(Asker)
    with SourceProcess() as source:
        kept = answer(asker, source)
        assert asker.held() == 1
        pending = asker.peers.ask(source.address, near="source/1", start=0, chain=[], variant=b"", lend=True)
        source.await_ask()
        source.kill()
        assert eventually(lambda: pending.outcome, SOON).code == "unreachable"
    eventually(lambda: not asker.peers._connections, SOON)
    asker.peers.release(kept, done=True)  # a release of what is void says nothing to anybody
    assert asker.held() == 0 and not asker.reactor._fds.keys() - {asker.reactor._wake}


READER = """
import sys
sys.path[:0] = sys.argv[2].split(":")
from endpoint_support import Asker, export
from support import eventually
asker = Asker(lease_seconds=60.0)
ask = asker.peers.ask(("127.0.0.1", int(sys.argv[1])), near="source/1", start=0, chain=export().chain, variant=b"")
eventually(lambda: ask.outcome, 20)
print("holds", flush=True)
sys.stdin.read()
"""


def test_what_a_reader_held_is_free_as_soon_as_it_is_killed(make):
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


def test_what_killed_engines_left_is_removed_by_the_next(make):
    with SourceProcess() as source:
        path = Path(local_path("source/1"))
        assert path.exists()
        source.kill()
    assert path.exists()
    other = make(Source, "source/2")
    assert not path.exists() and Path(local_path("source/2")).exists()
    sweep(path.parent)
    assert Path(local_path("source/2")).exists(), "somebody listens there"
    other.stop()
    assert not Path(local_path("source/2")).exists()


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 40, m.encode(m.Refused(0, "nothing", ""))], ids=["empty", "garbage", "an answer"]
)
def test_a_message_that_is_none_costs_its_sender_the_connection(make, data, caplog):
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


def test_many_that_come_and_go_keep_nobody_waiting_and_leave_nothing(make):
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
            pending = asker.peers.ask(source.address, near="source/1", start=0, chain=[b"x" * 8], variant=b"")
            assert eventually(lambda p=pending: p.outcome, SOON).code == "nothing"
    finally:
        stop.set()
        visitors.join()
    eventually(lambda: len(streams(source)) == 1, SOON)
    asker.peers.release(held, done=True)
    eventually(lambda: source.leases() == 0)


def test_connections_are_bounded(make, monkeypatch):
    monkeypatch.setattr(local, "MOST", 3)
    source = lending(make)
    with ExitStack() as stack:
        guests = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(4)]
        for guest in guests:
            guest.settimeout(SOON)
            guest.connect(local_path("source/1"))
        assert guests[3].recv(1) == b"", "one too many"
        assert len(streams(source)) == 3
    eventually(lambda: not streams(source))


def test_without_descriptors_it_waits_and_ends_in_order(make, monkeypatch, caplog):
    """Whoever comes while there are none is heard when there are; and when it ends meanwhile, it ends."""
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
    pending = asker.peers.ask(source.address, near="source/1", start=0, chain=export().chain, variant=b"")
    eventually(lambda: "has to wait" in caplog.text, SOON)
    full.clear()
    assert isinstance(eventually(lambda: pending.outcome, SOON), Offer)
    full.set()
    caplog.clear()
    with socket.socket(socket.AF_UNIX) as late:
        late.connect(local_path("source/1"))
        eventually(lambda: "has to wait" in caplog.text, SOON)
        source.stop()
        assert not Path(local_path("source/1")).exists() and not streams(source)
        eventually(lambda: not asker.peers._connections, SOON)
    assert "unexpected error" not in caplog.text


def test_last_words_are_heard_though_an_answer_cannot_be_given(make):
    source = lending(make)
    with socket.socket(socket.AF_UNIX) as brief:
        brief.connect(local_path("source/1"))
        words = [m.Hello(m.PROTOCOL, "raw/1", NAMESPACE), m.Ask(1, "source/1", 0, list(export().chain))]
        drops = [m.Drop(f"gone-{n}") for n in range(300)] + [m.Drop("e")]
        held = threading.Event()
        source.reactor.call_soon(lambda: held.wait(SOON))
        brief.sendall(b"".join(frame(m.encode(word)) for word in words + drops))
    held.set()
    eventually(lambda: not source.table.counts()["exports"], SOON, "the last thing it said")
    eventually(lambda: source.leases() == 0 and not streams(source))


def test_an_ask_of_who_is_gone_is_not_kept(make):
    """It was given a lease, or put off, after the connection had ended."""
    asked = []
    source = make(Source, lend=lambda *given: asked.append(given))
    with socket.socket(socket.AF_UNIX) as brief:
        brief.connect(local_path("source/1"))
        words = [m.Hello(m.PROTOCOL, "raw/1", NAMESPACE),
                 *(m.Ask(n, "source/1", 0, CHAIN, lend=True, patience=9.0) for n in (1, 2))]  # fmt: skip
        brief.sendall(b"".join(frame(m.encode(word)) for word in words))
        eventually(lambda: len(asked) == 2)
    eventually(lambda: not source.endpoint._connections)

    def answer_both():
        (ask, identity, seconds, settle), (_, _, _, put_off) = asked
        settle(source.table.lend(export(kind=Kind.LENT), 0, identity, seconds, served=False))
        put_off(Refusal.NOT_READY)

    source.on_reactor(answer_both)
    eventually(lambda: source.leases() == 0)
    assert not source.on_reactor(lambda: source.endpoint._parked)


def test_each_way_has_its_own_connection(make):
    """One that was made for something else does not keep asks on the longer way, and an instance has one to itself."""
    first, second = lending(make), lending(make, instance="source/2")
    asker = make(Asker)
    over_tcp, near = answer(asker, first, ""), answer(asker, first)
    assert {type(c.dealer) for c in asker.peers._connections.values()} == {Dealer, LocalDealer}
    # As in two containers with a network each: the same address, and it is not the same engine.
    pending = asker.peers.ask(first.address, near="source/2", start=0, chain=export().chain, variant=b"")
    other = eventually(lambda: pending.outcome, SOON)
    assert (near.instance, other.instance, other.address) == ("source/1", "source/2", first.address)
    assert (first.leases(), second.leases()) == (2, 1)
    for offer in (over_tcp, near, other):
        asker.peers.release(offer, done=True)
    eventually(lambda: first.leases() == second.leases() == asker.held() == 0)


def test_an_asker_that_ends_closes_its_connections(make):
    source, asker = lending(make), make(Asker)
    answer(asker, source)
    asker.stop()
    eventually(lambda: not streams(source) and source.leases() == 0)


def test_a_socket_is_seen_when_it_listens_and_not_before(make, monkeypatch):
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
    assert isinstance(answer(asker, source), Offer) and way(asker) is LocalDealer
    assert [path.suffix for path in Path(local_path("source/1")).parent.iterdir()] == [".near"]


def test_a_live_engine_whose_queue_is_full_is_not_swept(run_dir):
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
def test_a_frame_longer_than_any_message_costs_its_sender_the_connection(make, more):
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
