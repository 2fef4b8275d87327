"""Engines of one node find each other by sockets in their user's runtime directory; whoever cannot, over TCP.

That asks, leases and their ends are the same either way is in ``test_endpoint_peers.py``.
"""

import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from endpoint_support import UNIT, Asker, Source, SourceProcess, export
from support import eventually

from vllm_kvtier.scheduler.exports import Kind
from vllm_kvtier.scheduler.peers import Offer
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.dealer import Dealer
from vllm_kvtier.wire.local import LocalDealer, local_path, sweep

SOON = 20.0
LONG = dict(ask_timeout=60.0, handshake_timeout=60.0, lease_seconds=60.0)  # seconds: nothing here waits for them


@pytest.fixture
def make(run_dir):
    made = []

    def make(kind, *args, **kwargs):
        made.append(kind(*args, **{**LONG, **kwargs}))
        return made[-1]

    yield make
    for thing in made:
        thing.stop()


def lending(make, **kwargs):
    source = make(Source, **kwargs)
    source.table.add(export(kind=Kind.RETAINED))
    return source


def answer(asker, source, near="source/1"):
    pending = asker.peers.ask(source.address, near=near, start=0, chain=export().chain, variant=b"")
    return eventually(lambda: pending.outcome, SOON)


def way(asker, source) -> type:
    return type(asker.peers._connections[tuple(source.address)].dealer)


def test_an_engine_of_this_node_is_asked_over_its_socket(make):
    source, asker = lending(make), make(Asker)
    offer = answer(asker, source)
    assert offer.tokens == 8 * UNIT and way(asker, source) is LocalDealer
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
    assert isinstance(answer(asker, source, near), Offer) and way(asker, source) is Dealer


def test_without_a_directory_of_its_own_an_engine_answers_over_tcp(make, run_dir, caplog):
    os.chmod(Path(local_path("any")).parent, 0o755)
    source, asker = lending(make), make(Asker)
    assert "over TCP" in caplog.text and "0700" in caplog.text
    assert isinstance(answer(asker, source), Offer) and way(asker, source) is Dealer


def test_a_path_that_is_taken_is_no_end(make, caplog):
    """By a file that nobody removes: another instance's name cannot be ours."""
    Path(local_path("source/1")).write_text("")
    source, asker = lending(make), make(Asker)
    assert "over TCP" in caplog.text
    assert isinstance(answer(asker, source), Offer) and way(asker, source) is Dealer


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


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 40, b"\x7f" * (1 << 16)], ids=["short", "typed", "long"])
def test_nonsense_costs_its_sender_the_connection(make, garbage):
    source, asker = lending(make), make(Asker)
    held = answer(asker, source)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(local_path("source/1"))
        stranger.sendall((1 << 31).to_bytes(4, "little") + garbage)  # longer than any message
        stranger.settimeout(SOON)
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:  # closed before all of it was read
            assert len(garbage) > 40
    asker.peers.release(held, done=True)
    eventually(lambda: source.leases() == 0)
