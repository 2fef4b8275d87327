"""Two stores in two network namespaces: found and read across, and everything that can go wrong between them."""

import os
import signal
import time
from contextlib import ExitStack

import netns
import pytest
from node_process import NodeProcess
from support import eventually, stop

from vllm_kvtier.wire.auth import ClusterKey

PORT = 7400
TCP = {"UCX_TLS": "tcp"}  # else UCX sees that both nodes are one machine, and copies without the network


class Nodes:
    """The first listens, the second asks; each is started when needed and kept as long as it lives."""

    def __init__(self, pair: netns.NetnsPair, folder):
        self.pair, self.address = pair, f"{pair.addresses[0]}:{PORT}"
        self.key, self.other_key = str(folder / "key"), str(folder / "other")
        for key in (self.key, self.other_key):
            ClusterKey.create(key)
        self.stack = ExitStack()
        self.server = self._asker = None

    def start(self, side: int, **options) -> NodeProcess:
        options = {"cluster_key_file": self.key, "pool_mib": 256, **options}
        return self.stack.enter_context(NodeProcess(lambda *a, **k: self.pair.popen(side, *a, **k), TCP, **options))

    def both(self) -> tuple[NodeProcess, NodeProcess]:
        """The one that serves, and the one that asks it, with their tiers usable."""
        if self.server is None or self.server.process.poll() is not None:
            self.server = self.start(0, node_listen=self.address)
        if self._asker is None or self._asker.process.poll() is not None:
            self._asker = self.start(1, nodes=self.address)
        ready(self.server, self._asker)
        eventually(lambda: self.server.ask("stat")["leases"] == 0)  # what was found before has been returned
        self.server.ask("clear"), self._asker.ask("clear")
        self.connect()
        return self.server, self._asker

    def connect(self) -> None:
        """A first read over the network: one that UCX fails to begin costs a request its hit, and is tried again."""
        self.server.ask("store", num_hash_blocks=1, name="hello")

        def reads() -> bool:
            self._asker.send("read", num_hash_blocks=1, name="hello", keep=False)
            self._asker.hear()
            answer = self._asker.hear()
            self._asker.ask("written")  # gives back what failed
            return answer["good"] == 1

        eventually(reads, 30)
        eventually(lambda: self.server.ask("stat")["leases"] == 0)
        self.server.ask("clear")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    if netns.why_not():
        pytest.skip(netns.why_not())
    with netns.NetnsPair() as pair:
        nodes = Nodes(pair, tmp_path_factory.mktemp("nodes"))
        with nodes.stack:
            yield nodes


def ready(*nodes: NodeProcess) -> None:
    for node in nodes:
        node.send("ready")
    assert all(node.hear()["ok"] for node in nodes)


def finds(asker: NodeProcess, num_hash_blocks: int, name: str, of: int, seconds: float = 20) -> None:
    """In the end: it may wait for a while before it connects to the server again."""
    eventually(lambda: asker.ask("find", num_hash_blocks=of, name=name)["units"] == num_hash_blocks, seconds)


def reads(asker: NodeProcess, num_hash_blocks: int, name: str, seconds: float = 30) -> None:
    """In the end: a server that hung may be ended by UCX as it wakes, for a reader that has given up; then its process
    begins anew, and what is read until then fails."""

    def good() -> bool:
        finds(asker, num_hash_blocks, name, num_hash_blocks, seconds)
        asker.send("read", num_hash_blocks=num_hash_blocks, name=name)
        asker.hear()
        answer = asker.hear()
        assert answer["wrong"] == 0
        # What failed to come, of this read or an earlier one, comes no more; its slots are free for the next one.
        assert asker.ask("written")["written"] == 0
        return answer["good"] == num_hash_blocks

    eventually(good, seconds)


def read_most(asker: NodeProcess, num_hash_blocks: int, name: str, break_it, mend) -> dict:
    """Read a chain, and break something while it comes. On a busy machine all may have come by then: ``mend``, and once
    more."""
    for _ in range(8):
        finds(asker, num_hash_blocks, name, num_hash_blocks)
        asker.send("read", num_hash_blocks=4, name=name, keep=False)  # connects
        assert asker.hear() and asker.hear()["good"] == 4
        asker.send("read", num_hash_blocks=num_hash_blocks, name=name, keep=False)
        asker.hear()
        time.sleep(0.03)  # some of it is to be there, and some not
        began = time.monotonic()
        break_it()
        answer = asker.hear()
        if answer["good"] < num_hash_blocks:
            assert time.monotonic() - began < 15
            return answer
        mend()
    raise AssertionError("all of it comes before anything can be broken")


def test_prefix_is_found_and_read_from_another_node(nodes):
    server, asker = nodes.both()
    assert server.ask("store", num_hash_blocks=40, name="a")["stored"] == 40
    assert asker.ask("find", num_hash_blocks=50, name="a")["units"] == 40
    assert asker.ask("find", num_hash_blocks=50, name="b")["units"] == 0
    asker.send("read", num_hash_blocks=50, name="a")
    assert asker.hear() == {"begins": 40}
    answer = asker.hear()
    assert (answer["units"], answer["good"], answer["wrong"]) == (40, 40, 0)
    # From the middle on.
    assert server.ask("store", num_hash_blocks=60, name="c")["stored"] == 60
    assert asker.ask("store", num_hash_blocks=20, name="c")["stored"] == 20
    asker.send("read", num_hash_blocks=60, name="c", start=20)
    assert asker.hear() == {"begins": 40} and asker.hear()["good"] == 40
    eventually(lambda: server.ask("stat")["leases"] == 0)
    eventually(lambda: asker.ask("stat")["state"] == server.ask("stat")["state"] == "ready")


def test_client_without_cluster_key_is_ignored(nodes):
    server, _ = nodes.both()
    server.ask("store", num_hash_blocks=8, name="k")
    stranger = nodes.start(1, nodes=nodes.address, cluster_key_file=nodes.other_key)
    unnamed = nodes.start(1, cluster_key_file="")
    friend = nodes.start(1)
    ready(stranger, unnamed, friend)
    before = server.ask("stat")["leases_granted"]
    assert stranger.ask("find", num_hash_blocks=8, name="k")["units"] == 0
    answers = [unnamed.ask("find", num_hash_blocks=8, name="k", nodes=[nodes.address]) for _ in range(3)]
    assert not any(answer["units"] for answer in answers)
    assert min(answer["seconds"] for answer in answers) < 0.5  # it was not even asked
    assert server.ask("stat")["leases_granted"] == before
    # With it, also one that a request names.
    assert friend.ask("find", num_hash_blocks=8, name="k")["units"] == 0
    named = ["nonsense", f"{nodes.pair.addresses[0]}:1", nodes.address]
    assert friend.ask("find", num_hash_blocks=8, name="k", nodes=named)["units"] == 8


def test_killed_reading_node_releases_its_leases(nodes):
    server, asker = nodes.both()
    server.ask("store", num_hash_blocks=120, name="d")
    finds(asker, 120, "d", 120)
    asker.send("read", num_hash_blocks=120, name="d")
    asker.hear()
    asker.process.kill()
    asker.process.wait()  # or it is taken for one that lives
    eventually(lambda: server.ask("stat")["leases"] == 0, 10)
    # Somebody else is served.
    server, other = nodes.both()
    server.ask("store", num_hash_blocks=120, name="d")
    finds(other, 120, "d", 120)


@pytest.mark.parametrize(
    "cable", [pytest.param(True, id="cable", marks=pytest.mark.slow), pytest.param(False, id="stopped")]
)
def test_silent_serving_node_fails_read_and_late_data_is_discarded(nodes, cable):
    """The cable is pulled, or its process hangs; then all goes on, and what was on its way arrives."""
    server, asker = nodes.both()
    tier_process = server.ask("stat")["mover"]

    def silence(silent: bool) -> None:
        if cable:
            nodes.pair.plug(0, not silent)
        elif silent:
            stop(tier_process)
        else:
            os.kill(tier_process, signal.SIGCONT)

    server.ask("store", num_hash_blocks=4, name="q")
    server.ask("store", num_hash_blocks=120, name="p")
    answer = read_most(asker, 120, "p", lambda: silence(True), lambda: silence(False))
    assert answer["wrong"] == 0
    if cable:
        eventually(lambda: server.ask("stat")["leases"] == 0, 10)  # the server takes back what it leased
    silence(False)
    # What arrives now must not be found in memory that is another request's by now.
    reads(asker, 4, "q")
    assert asker.ask("stat")["restarts"] == 0
    reads(asker, 120, "p")
    eventually(lambda: server.ask("stat")["leases"] == 0, 10)


def test_serving_node_killed_during_read_fails_rest_and_returns_empty(nodes):
    def serve() -> NodeProcess:
        server, asker = nodes.both()
        server.ask("store", num_hash_blocks=120, name="s")
        return asker

    asker = serve()
    answer = read_most(asker, 120, "s", lambda: nodes.server.kill(), serve)
    assert answer["units"] == 120 and answer["wrong"] == 0
    assert asker.ask("written")["written"] == 0
    stat = eventually(lambda: (stat := asker.ask("stat"))["state"] == "unavailable" and stat)
    assert "0 of 1 nodes answer" in stat["reason"] and (stat["restarts"], stat["reserved"]) == (0, 0)
    assert asker.ask("find", num_hash_blocks=120, name="s")["units"] == 0
    # It comes back, without what it had.
    again, asker = nodes.both()
    again.ask("store", num_hash_blocks=10, name="s")
    finds(asker, 10, "s", 120)
    asker.send("read", num_hash_blocks=10, name="s")
    assert asker.hear() == {"begins": 10} and asker.hear()["good"] == 10
