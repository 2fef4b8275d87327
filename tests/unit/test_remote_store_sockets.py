"""Stores of different nodes that ask and answer over real loopback sockets; the NIXL agents are stand-ins."""

import socket
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from store_support import block_hashes_of
from support import eventually

from vllm_kvtier.remote_store import lease_client as node_peers
from vllm_kvtier.remote_store import lookup as node_asking
from vllm_kvtier.remote_store import options as node_options
from vllm_kvtier.remote_store import protocol as w
from vllm_kvtier.remote_store.options import Address, NodeOptions
from vllm_kvtier.store.protocol import HASH_BYTES, MAX_NODES, PAGE, GroupShape
from vllm_kvtier.store.tiers.nodes import lease_server as node_serving
from vllm_kvtier.store.tiers.nodes import process as node_mover
from vllm_kvtier.store.tiers.nodes.lease_server import NodeLeaseServer
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.reactor import Reactor

NAMESPACE_ID = b"a space 16 bytes"
GROUP = GroupShape(hash_blocks_per_block=1, slot_pages=4)
POOL = 64 << 20
BLOCK_HASHES = block_hashes_of((8, "x"))


def an_ask(block_hashes: bytes = BLOCK_HASHES, id: int = 0) -> w.LookupRequest:
    return w.LookupRequest(id, NAMESPACE_ID, 16, [GROUP], block_hashes, 0)


class FakeAgent:
    name, generation, metadata = "agent", 0, b"metadata"

    def register(self, pieces):
        self.generation = 1


class Store:
    """One that is asked: a NodeLeaseServer, and a server that leases ``num_hash_blocks`` of any prefix at once; None:
    never answers. ``below``: so many might be had; asked with ``wait_seconds``, it says that they are promoted, and
    leases them on command."""

    def __init__(
        self, num_hash_blocks: int | None = 6, key=None, instance="server", slot=4, port=0, below=0, host="127.0.0.1"
    ):
        self.num_hash_blocks, self.slot, self.heard, self.agent = num_hash_blocks, slot, [], FakeAgent()
        self.below = below
        self.agent.name = f"agent of {instance}"
        self.reactor = Reactor("store")
        with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
            self.port = port or probe.bind_to_random_port("tcp://127.0.0.1")
        self.address = Address(host, self.port)
        self.pool = SimpleNamespace(address=0, nbytes=POOL)
        self.serving = NodeLeaseServer(self, instance, NodeOptions((), self.address, key), self.agent, lambda: None)
        self.reactor.start()

    def send(self, message):
        self.heard.append(message)
        if isinstance(message, m.LeaseRequest) and self.num_hash_blocks is not None:
            if message.wait_seconds and self.below:
                status = m.PromotionStatus(message.id, self.below, 2.5)
                self.reactor.call_soon(lambda: self.serving.promotion_status(status))
            else:
                self.lend(message, self.num_hash_blocks)

    def lend(self, ask: m.LeaseRequest, num_hash_blocks: int) -> None:
        slots = [[self.slot + 4 * i for i in range(num_hash_blocks)]]
        lent = m.LeaseReply(
            ask.id,
            100 + ask.id if num_hash_blocks else 0,
            num_hash_blocks,
            slots,
            0 if ask.wait_seconds else self.below,
        )
        self.reactor.call_soon(lambda: self.serving.lease_reply(lent))

    def asked_with_patience(self) -> m.LeaseRequest:
        """The next one."""
        return eventually(lambda: next((ask for ask in self.of(m.LeaseRequest) if ask.wait_seconds), None))

    def of(self, kind) -> list:
        return [message for message in self.heard if isinstance(message, kind)]

    def stop(self):
        self.reactor.stop()


class Asker:
    """A NodeProcess without a process."""

    def __init__(self, *stores: Store, key=None, shared=(), names=""):
        self.pool = SimpleNamespace(address=1 << 40, nbytes=POOL)
        self.reactor, self.heard, self.failed = Reactor("asker"), [], []
        self.guard, self.fail = lambda call: call, self.failed.append
        nodes = ",".join([*(str(s.address) for s in stores), names])
        self.tier_process = node_mover.NodeProcess(self, {"nodes": nodes})
        self.tier_process._options = self.tier_process._peers._options = NodeOptions(
            tuple(store.address for store in stores), None, key, shared
        )
        self.reactor.start()

    def send(self, message):
        self.heard.append(message)

    def do(self, call):
        done, out = threading.Event(), []
        self.reactor.call_soon(lambda: (out.append(call()), done.set()))
        assert done.wait(10)
        return out[0]

    def begin(self, nodes=(), block_hashes=BLOCK_HASHES) -> None:
        self.do(lambda: self.tier_process.handle(m.Look(1, NAMESPACE_ID, 16, [GROUP], block_hashes, 0, list(nodes))))

    def look(self, nodes=(), block_hashes=BLOCK_HASHES) -> m.Located:
        before = len(self.heard)
        self.begin(nodes, block_hashes)
        eventually(lambda: len(self.heard) > before)
        return self.heard[before]

    def stop(self):
        self.reactor.stop()


@pytest.fixture
def made():
    things = []

    def make(kind, *arguments, **options):
        things.append(kind(*arguments, **options))
        return things[-1]

    yield make
    for thing in reversed(things):
        thing.stop()


def test_remote_store_best_answer_is_kept_and_others_released(made):
    stores = [made(Store, num_hash_blocks, instance=f"s{num_hash_blocks}") for num_hash_blocks in (2, 6, 0, 4)]
    asker = made(Asker, *stores)
    located = asker.look()
    assert located.num_hash_blocks == 6 and located.token and located.store == "s6"
    eventually(lambda: stores[0].of(m.Return) and stores[3].of(m.Return))
    asker.do(lambda: asker.tier_process.handle(m.Release(located.token)))
    eventually(lambda: stores[1].of(m.Return))
    assert asker.look(block_hashes=BLOCK_HASHES[: 2 * HASH_BYTES]).num_hash_blocks == 2


def test_remote_store_silent_delays_lookup_by_timeout(made, monkeypatch):
    stores = [made(Store, num_hash_blocks=3, instance="quick"), made(Store, num_hash_blocks=None, instance="slow")]
    asker, alone = made(Asker, *stores), made(Asker, stores[1])
    assert alone.look().token == 0
    time.sleep(0.2)
    monkeypatch.setattr(node_asking, "ASK_SECONDS", 20.0)
    began = time.monotonic()
    assert asker.look().num_hash_blocks == 3
    assert alone.look().token == 0  # and is not asked again while it owes an answer
    assert time.monotonic() - began < 15.0


@pytest.mark.parametrize("refuses", [True, False])
def test_remote_store_that_failed_before_delays_no_lookup_until_it_answers(made, monkeypatch, refuses):
    """A list names nodes that are down. Each was tried again, and waited for, about once a minute."""
    monkeypatch.setattr(node_peers, "GREETING_SECONDS", 0.2)
    monkeypatch.setattr(node_peers, "BACKOFF_SECONDS", (0.05, 0.1))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if not refuses:
            silent.listen(8)
        down = SimpleNamespace(address=Address("127.0.0.1", silent.getsockname()[1]))
        asker = made(Asker, made(Store, num_hash_blocks=0))
        connections = asker.tier_process._peers._connections
        asker.look([str(down.address)])
        eventually(lambda: asker.do(lambda: down.address not in connections))
        monkeypatch.setattr(node_peers, "GREETING_SECONDS", 9.0)
        monkeypatch.setattr(node_asking, "ASK_SECONDS", 8.0)
        time.sleep(0.1)
        began = time.monotonic()
        asker.look([str(down.address)])
        assert time.monotonic() - began < 4.0
        assert asker.do(lambda: down.address in connections), "it is tried again"
    made(Store, port=down.address.port, instance="back")
    eventually(lambda: asker.look([str(down.address)]).num_hash_blocks == 6)


def test_remote_store_answers_all_lookups_of_a_burst(made, monkeypatch):
    monkeypatch.setattr(node_asking, "ASK_SECONDS", 60.0)
    for limit in ("SLOW_SECONDS", "GREETING_SECONDS", "ANSWER_SECONDS"):
        monkeypatch.setattr(node_peers, limit, 60.0)
    store = made(Store, num_hash_blocks=None)
    asker = made(Asker, store)
    looks = [m.Look(i, NAMESPACE_ID, 16, [GROUP], BLOCK_HASHES, 0, []) for i in range(600)]
    asker.do(lambda: [asker.tier_process.handle(look) for look in looks])
    eventually(lambda: len(store.of(m.LeaseRequest)) == 600, 50)
    for asked in store.of(m.LeaseRequest):
        store.lend(asked, 6)
    eventually(lambda: len(asker.heard) == 600, 50)
    assert all(located.num_hash_blocks == 6 for located in asker.heard)


@pytest.mark.parametrize("connected", [True, False])
def test_remote_store_burst_beyond_what_a_peer_takes_loses_no_lookup(made, monkeypatch, connected):
    """ZMQ drops messages without a word beyond a limit of its own; the peer counted as hung then."""
    monkeypatch.setattr(node_asking, "ASK_SECONDS", 60.0)
    for limit in ("SLOW_SECONDS", "GREETING_SECONDS", "ANSWER_SECONDS"):
        monkeypatch.setattr(node_peers, limit, 60.0)
    store = made(Store, num_hash_blocks=0)
    asker, total = made(Asker, store), 3 * w.MAX_LOOKUPS
    if connected:
        asker.look()
    store.num_hash_blocks, before = None, len(asker.heard)
    looks = [m.Look(i, NAMESPACE_ID, 16, [GROUP], BLOCK_HASHES, 0, []) for i in range(2, 2 + total)]
    asker.do(lambda: [asker.tier_process.handle(look) for look in looks])
    eventually(lambda: len(store.of(m.LeaseRequest)) == w.MAX_LOOKUPS + connected, 50)
    [peer] = asker.tier_process._peers._connections.values()
    assert asker.do(lambda: len(peer.lookups)) == w.MAX_LOOKUPS, "what was not sent does not wait for an answer"
    for asked in store.of(m.LeaseRequest)[connected:]:
        store.lend(asked, 6)
    eventually(lambda: len(asker.heard) - before == total, 50)
    found = [located.num_hash_blocks for located in asker.heard[before:]]
    assert found.count(6) == w.MAX_LOOKUPS and found.count(0) == total - w.MAX_LOOKUPS and not peer.closed
    store.num_hash_blocks = 6
    assert asker.look().num_hash_blocks == 6


def test_remote_store_that_reads_no_message_is_disconnected(made, monkeypatch):
    """A Release that is lost would keep its blocks leased while the connection lives."""
    store = made(Store)
    asker = made(Asker, store)
    located = asker.look()
    [peer] = asker.tier_process._peers._connections.values()
    monkeypatch.setattr(peer.dealer, "send", lambda frame: False)
    asker.do(lambda: asker.tier_process.handle(m.Release(located.token)))
    eventually(lambda: peer.closed)


def test_remote_store_that_answers_late_is_asked_less_often(made, monkeypatch):
    """Each request would wait for it, one after the other."""
    monkeypatch.setattr(node_peers, "SLOW_SECONDS", 0.0)  # every answer is late
    monkeypatch.setattr(node_peers, "BACKOFF_SECONDS", (100.0, 150.0))
    store = made(Store)
    asker = made(Asker, store)
    assert asker.look().num_hash_blocks == 6 and asker.look().num_hash_blocks == 0
    [peer] = asker.tier_process._peers._connections.values()
    assert len(store.of(m.LeaseRequest)) == 1 and peer.slow[1] == 100.0
    peer.slow = 0.0, peer.slow[1]
    assert asker.look().num_hash_blocks == 6 and peer.slow[1] == 150.0
    monkeypatch.setattr(node_peers, "SLOW_SECONDS", 1.0)
    peer.slow = 0.0, peer.slow[1]
    assert asker.look().num_hash_blocks == 6 and peer.slow == (0.0, 0.0)
    assert asker.look().num_hash_blocks == 6 and not peer.closed


def test_remote_store_late_lease_is_returned(made, monkeypatch):
    monkeypatch.setattr(node_asking, "ASK_SECONDS", 0.2)
    store = made(Store, num_hash_blocks=None)
    asker = made(Asker, store)
    assert asker.look().token == 0
    lend = store.of(m.LeaseRequest)[0]
    store.reactor.call_soon(lambda: store.serving.lease_reply(m.LeaseReply(lend.id, 9, 1, [[4]])))
    eventually(lambda: [back.lease for back in store.of(m.Return)] == [9])


def test_remote_store_keeps_no_hashes_of_lookups_that_wait(made):
    store = made(Store, num_hash_blocks=None)
    made(Asker, store).begin()
    eventually(lambda: store.serving._pending)
    objects = [each for pair in store.serving._pending.values() for each in pair]
    assert not any(getattr(each, "block_hashes", b"") for each in objects)


def test_remote_store_answers_others_while_memory_is_registered(made):
    store, asked = made(Store), []

    def register(pieces):
        asked.append(len(store.of(m.LeaseRequest)))
        return asked[-1] < 2  # there is more to register until another has asked

    store.guard, store.agent.generation, store.agent.register = lambda call: call, 1, register
    first, second = made(Asker, store), made(Asker, store)
    first.begin()
    eventually(lambda: asked)
    assert second.look().num_hash_blocks == 6 and asked.count(1) > 1
    assert eventually(lambda: first.heard)[0].num_hash_blocks == 6


def test_remote_store_leases_end_with_the_connection(made, monkeypatch):
    monkeypatch.setattr(node_serving, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(w, "SILENT_SECONDS", 0.4)
    monkeypatch.setattr(w, "PING_SECONDS", 0.1)
    store = made(Store)
    asker = made(Asker, store)
    assert asker.look().num_hash_blocks == 6
    time.sleep(0.8)
    assert not store.of(m.Left)  # it says that it is still there
    asker.stop()
    eventually(lambda: [left.client for left in store.of(m.Left)] == [1])


def test_remote_store_lease_whose_grant_is_lost_is_returned(made):
    """ZMQ drops it if the store that asks is gone or does not read."""
    store = made(Store)
    gone = node_serving.Connection(b"gone", 0.0, 7, "asker")
    store.serving._pending[1] = gone, 5
    store.reactor.call_soon(lambda: store.serving.lease_reply(m.LeaseReply(1, 101, 6, [[4]], 0)))
    eventually(lambda: m.Return(7, 101) in store.heard)
    assert not gone.leases and not gone.metadata_generation, "the next grant brings the metadata"


def test_remote_store_sending_malformed_message_is_disconnected(made):
    store = made(Store)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.rcvtimeo = 5000
        socket.connect(str(store.address.endpoint))
        hear = lambda: w.decode_from_server(socket.recv())  # noqa: E731
        socket.send(w.encode(an_ask()))
        assert isinstance(hear(), w.Refused)  # no hello
        for nonsense in (b"\xc1", w.encode(w.Pong()), w.encode(an_ask(BLOCK_HASHES[:-1]))):
            socket.send(w.encode(w.Hello("me")))
            assert isinstance(hear(), w.Welcome)
            socket.send(w.encode(an_ask(id=5)))
            assert hear().id == 5
            before = len(store.of(m.Left))
            socket.send(nonsense)
            assert isinstance(hear(), w.Refused)
            eventually(lambda before=before: len(store.of(m.Left)) == before + 1)
        socket.send(w.encode(w.Hello("me", protocol=99)))
        assert "protocol" in hear().reason


def test_remote_store_connection_needs_cluster_key(made, monkeypatch):
    monkeypatch.setattr(node_asking, "ASK_SECONDS", 0.5)
    ours, theirs = (ClusterKey(zmq.curve_keypair()[1]) for _ in range(2))
    store = made(Store, key=ours)
    assert made(Asker, store, key=theirs).look().token == 0
    assert made(Asker, store).look().token == 0
    assert not store.of(m.LeaseRequest)
    assert made(Asker, store, key=ours).look().num_hash_blocks == 6


def test_remote_store_impossible_answer_is_refused(made):
    store = made(Store, slot=POOL // PAGE - 2)
    asker = made(Asker, store)
    assert asker.look().token == 0
    assert asker.do(lambda: len(asker.tier_process._peers)) == 0


def test_remote_store_named_addresses_are_asked_and_bounded(made, monkeypatch):
    monkeypatch.setattr(node_peers, "MAX_CONNECTIONS", 2)
    stores = [made(Store, instance=f"s{i}") for i in range(4)]
    asker = made(Asker)
    assert asker.look().token == 0
    assert asker.look(["10.1.2.3:5", "nonsense", "host:0"]).token == 0
    for store in stores:
        located = asker.look([str(store.address)])
        assert located.num_hash_blocks == 6
        asker.do(lambda located=located: asker.tier_process.handle(m.Release(located.token)))
    assert asker.do(lambda: len(asker.tier_process._peers)) == 2
    # Nine of them: eight are asked.
    assert asker.look([str(stores[0].address)] * 8 + ["localhost:1"]).num_hash_blocks == 6


def test_remote_stores_that_requests_name_take_no_connection_of_the_list():
    """With as many as may be listed, each request that named another made all connections anew, one by one."""
    assert node_peers.MAX_CONNECTIONS >= node_options.MAX_NODES + MAX_NODES


def test_remote_store_with_two_addresses_has_one_peer(made):
    store = made(Store)
    asker = made(Asker)
    for name in ("127.0.0.1", "localhost", "127.0.0.1", "localhost"):
        located = asker.look([f"{name}:{store.port}"])
        assert located.num_hash_blocks == 6
        asker.do(lambda token=located.token: asker.tier_process.handle(m.Release(token)))
    asked = len(store.of(m.LeaseRequest))
    assert asker.look([f"127.0.0.1:{store.port}", f"localhost:{store.port}"]).num_hash_blocks == 6
    assert len(store.of(m.LeaseRequest)) == asked + 1
    assert asker.do(lambda: len(asker.tier_process._peers)) == 1
    eventually(lambda: len(store.of(m.LeaseRequest)) - len(store.of(m.Return)) == 1)


def test_remote_store_that_has_the_second_address_of_another_now_is_asked(made, monkeypatch):
    monkeypatch.setattr(node_peers, "BACKOFF_SECONDS", (0.05, 0.1))
    store = made(Store, host="0.0.0.0")
    asker, one, two = made(Asker), f"127.0.0.1:{store.port}", f"127.0.0.2:{store.port}"
    assert [asker.look([each]).num_hash_blocks for each in (one, two, two)] == [6, 6, 6]
    assert asker.do(lambda: len(asker.tier_process._peers)) == 1
    store.stop()
    made(Store, 3, instance="first", port=store.port)
    made(Store, 4, instance="second", port=store.port, host="127.0.0.2")
    eventually(lambda: asker.look([one]).num_hash_blocks == 3)
    eventually(lambda: asker.look([two]).num_hash_blocks == 4)
    assert asker.look([one]).num_hash_blocks == 3


def test_remote_store_own_address_in_list_is_skipped(made):
    store = made(Store)
    asker = made(Asker, store)
    store.serving._welcome = msgspec.structs.replace(store.serving._welcome, instance=asker.tier_process._instance)
    assert asker.look().token == 0
    assert asker.look().token == 0 and not store.of(m.LeaseRequest)


def test_remote_store_restarted_is_found_again(made, monkeypatch):
    monkeypatch.setattr(node_peers, "BACKOFF_SECONDS", (0.05, 0.1))
    store = made(Store)
    asker = made(Asker, store)
    assert asker.look().num_hash_blocks == 6
    store.stop()
    made(Store, num_hash_blocks=3, instance="again", port=store.port)
    eventually(lambda: asker.look().num_hash_blocks == 3)


def test_remote_stores_of_the_list_are_known_before_a_lookup(made, monkeypatch):
    """Which of them answer, and why others do not: none listens, the name has no address, another key."""
    monkeypatch.setattr(node_mover, "GREET_SECONDS", 0.05)
    monkeypatch.setattr(node_peers, "BACKOFF_SECONDS", (0.05, 0.1))
    monkeypatch.setattr(node_peers, "GREETING_SECONDS", 1.0)
    ours, theirs = (ClusterKey(zmq.curve_keypair()[1]) for _ in range(2))
    store, itself, locked = (
        made(Store, instance=name, key=key) for name, key in (("up", ours), ("us", ours), ("locked", theirs))
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        down = SimpleNamespace(address=Address("127.0.0.1", taken.getsockname()[1]))
        nameless = Address("no-such-host.invalid", 7)
        asker = made(Asker, store, itself, locked, down, key=ours)
        asker.tier_process._lookups.listed = [*asker.tier_process._lookups.listed, nameless]
        itself.serving._welcome = msgspec.structs.replace(
            itself.serving._welcome, instance=asker.tier_process._instance
        )
        asker.do(asker.tier_process._greet)

        def errors() -> dict:
            latest = asker.heard[-1].errors
            return dict(latest) if None not in latest.values() and str(itself.address) not in latest else {}

        found = eventually(errors)
    assert found.pop(str(store.address)) == ""
    assert "cluster" in found.pop(str(locked.address))
    assert found.pop(str(down.address)) == "no connection can be made"
    assert "cannot be resolved" in found.pop(str(nameless)) and not found
    store.stop()
    eventually(lambda: asker.heard[-1].errors[str(store.address)])
    made(Store, num_hash_blocks=3, instance="again", port=store.port, key=ours)
    eventually(lambda: asker.heard[-1].errors[str(store.address)] == "")
    assert asker.look().num_hash_blocks == 3


def test_remote_store_that_ended_behind_its_listing_is_connected_no_more(made, monkeypatch):
    """As each rollout's pods, whose addresses have gone from DNS."""
    monkeypatch.setattr(node_mover, "GREET_SECONDS", 0.05)
    store, left = made(Store, instance="stays"), made(Store, instance="leaves")
    asker = made(Asker, store, left)
    peers = asker.tier_process._peers
    asker.do(asker.tier_process._greet)
    eventually(lambda: asker.do(lambda: [peers.error_of(each.address) for each in (store, left)]) == ["", ""])
    asker.do(lambda: setattr(asker.tier_process._lookups, "listed", [store.address]))
    assert asker.do(lambda: len(peers)) == 2, "requests may name it"
    left.stop()
    eventually(lambda: asker.do(lambda: list(peers._connections)) == [store.address])


def test_remote_store_whose_read_broke_stays_unavailable(made):
    """Parts of the read that had come are reported after its end."""
    store = made(Store)
    asker = made(Asker, store)
    assert asker.look().num_hash_blocks == 6
    peers = asker.tier_process._peers
    peer = asker.do(lambda: peers._connections[store.address])
    asker.do(lambda: (peers.close(peer, "a read failed"), peers.reached(peer)))
    assert asker.do(lambda: peers.error_of(store.address)) == "a read failed"
    assert asker.look().token == 0, "its backoff goes on"


# -- what is below the other's memory ---------------------------------------------------------------------------------


def test_remote_store_with_longest_disk_prefix_is_asked_to_promote(made):
    some = made(Store, 3, instance="some")
    deep, deeper = (made(Store, 0, instance=f"d{num_hash_blocks}", below=num_hash_blocks) for num_hash_blocks in (5, 7))
    asker = made(Asker, some, deep, deeper, shared=("ours",))
    coming = asker.look()
    assert coming == m.PromotionStatus(1, 7, 2.5, "d7")
    ask = deeper.asked_with_patience()
    assert (ask.wait_seconds, ask.shared, ask.start) == (node_mover.MAX_WAIT_SECONDS, ["ours"], 0)
    assert not some.of(m.Return)  # what it offers is kept in case the other fails
    deeper.lend(ask, 7)
    located = eventually(lambda: asker.heard[1:])[0]
    assert located.num_hash_blocks == 7 and located.token
    eventually(lambda: some.of(m.Return))
    assert not any(ask.wait_seconds for store in (some, deep) for ask in store.of(m.LeaseRequest))


def test_remote_store_partial_lease_is_used(made):
    store = made(Store, 2, below=6)
    asker = made(Asker, store)
    assert isinstance(asker.look(), m.PromotionStatus)
    store.lend(store.asked_with_patience(), 6)
    assert eventually(lambda: asker.heard[1:])[0].num_hash_blocks == 6
    first, second = (100 + ask.id for ask in store.of(m.LeaseRequest))
    eventually(lambda: [back.lease for back in store.of(m.Return)] == [first])
    asker.do(lambda: asker.tier_process.handle(m.Release(asker.heard[1].token)))
    eventually(lambda: [back.lease for back in store.of(m.Return)] == [first, second])


def test_remote_store_blocks_are_not_read_behind_their_lease(made, monkeypatch):
    """The read waited for others: by now other blocks may be in the slots there."""
    asker = made(Asker, made(Store, 2))
    token = asker.look().token
    read = m.Read(7, token, [m.Move(NAMESPACE_ID, 0, BLOCK_HASHES[:HASH_BYTES], bytes(HASH_BYTES), b"", 1, 1)])
    held = asker.tier_process._held[token]
    begun = []
    monkeypatch.setattr(asker.tier_process._reads, "start", lambda *arguments: begun.append(arguments))
    asker.do(lambda: asker.tier_process.handle(read))
    assert len(begun) == 1
    held.until = time.monotonic() - 1.0
    asker.do(lambda: asker.tier_process.handle(read))
    assert len(begun) == 1 and asker.heard[-1] == m.Moved(7, [False])


def test_remote_store_full_hit_in_memory_skips_promotion(made):
    memory, disk = made(Store, 8, instance="memory"), made(Store, 0, instance="disk", below=8)
    assert made(Asker, memory, disk).look().num_hash_blocks == 8
    assert not any(ask.wait_seconds for ask in disk.of(m.LeaseRequest))


def test_remote_store_failed_promotion_uses_other_offer(made):
    some, deep = made(Store, 3, instance="some"), made(Store, 0, instance="deep", below=8)
    asker = made(Asker, some, deep)
    asker.begin()
    deep.lend(deep.asked_with_patience(), 0)
    located = eventually(lambda: [x for x in asker.heard if isinstance(x, m.Located)])[0]
    assert located.num_hash_blocks == 3 and not some.of(m.Return)


def test_remote_store_waiting_for_disk_is_not_disconnected(made, monkeypatch):
    """Longer than any answer may take without ``wait_seconds``; others' lookups of it are asked and answered
    meanwhile."""
    monkeypatch.setattr(node_peers, "SLOW_SECONDS", 0.1)
    monkeypatch.setattr(node_peers, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(w, "PING_SECONDS", 0.05)
    store = made(Store, 0, below=8)
    asker = made(Asker, store)
    assert isinstance(asker.look(), m.PromotionStatus)
    time.sleep(0.8)
    assert asker.do(lambda: len(asker.tier_process._peers)) == 1
    store.num_hash_blocks, store.below = 2, 0
    assert asker.look(block_hashes=block_hashes_of((8, "another"))).num_hash_blocks == 2
    store.lend(store.asked_with_patience(), 8)
    eventually(lambda: [x.num_hash_blocks for x in asker.heard if isinstance(x, m.Located)] == [2, 8])


def test_remote_store_slow_promotion_is_abandoned(made, monkeypatch):
    """What its memory has is found; its answer, when it comes, goes back; after that, it is taken for dead."""
    monkeypatch.setattr(node_asking, "ASK_SECONDS", 0.2)
    monkeypatch.setattr(node_mover, "MAX_WAIT_SECONDS", 0.3)
    monkeypatch.setattr(node_peers, "ANSWER_SECONDS", 1.5)
    monkeypatch.setattr(w, "PING_SECONDS", 0.05)
    store = made(Store, 2, below=8)
    asker = made(Asker, store)
    began = time.monotonic()
    assert isinstance(asker.look(), m.PromotionStatus)
    assert eventually(lambda: asker.heard[1:])[0].num_hash_blocks == 2 and time.monotonic() - began < 1.5
    late = store.asked_with_patience()
    store.lend(late, 8)
    eventually(lambda: [back.lease for back in store.of(m.Return)] == [100 + late.id])
    asker.begin()
    eventually(lambda: asker.do(lambda: len(asker.tier_process._peers)) == 0, 5)


def test_remote_store_ignores_unrequested_promotion(made):
    store = made(Store, 0, below=8)
    asker = made(Asker, store)
    assert isinstance(asker.look(), m.PromotionStatus)
    ask = store.asked_with_patience()
    store.reactor.call_soon(lambda: store.serving.promotion_status(m.PromotionStatus(ask.id, 9, 1.0)))
    eventually(lambda: asker.do(lambda: len(asker.tier_process._peers)) == 0)
    assert eventually(lambda: [x for x in asker.heard if isinstance(x, m.Located)])[0].token == 0


def test_store_found_by_name_is_asked_until_dns_drops_it(made, monkeypatch):
    """Two addresses of a name, one of them of no store. Blocks are found at the other one; then DNS has none."""
    store = made(Store)
    hosts = ["127.0.0.1", "127.0.0.9"]

    def getaddrinfo(host, port, type):
        if not hosts:
            raise socket.gaierror(socket.EAI_NONAME, "no address")
        return [(socket.AF_INET, type, 6, "", (host, port)) for host in hosts]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    asker = made(Asker, names=f"dns:localhost:{store.port}")
    assert asker.look().num_hash_blocks == 0, "nothing is resolved yet"
    asker.tier_process._names.refresh()
    assert asker.look().num_hash_blocks == 6
    asked = len(store.of(m.LeaseRequest))
    hosts.clear()
    asker.tier_process._names.refresh()
    assert asker.look().num_hash_blocks == 0
    assert len(store.of(m.LeaseRequest)) == asked
