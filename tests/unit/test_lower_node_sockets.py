"""Stores of different nodes that ask and answer over real loopback sockets; the NIXL agents are stand-ins."""

import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq
from store_support import chain_of
from support import eventually

from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.nodes import asking as node_asking
from vllm_kvtier.store.lower.nodes import mover as node_mover
from vllm_kvtier.store.lower.nodes import peers as node_peers
from vllm_kvtier.store.lower.nodes import serving as node_serving
from vllm_kvtier.store.lower.nodes import wire as w
from vllm_kvtier.store.lower.nodes.options import Address, NodeOptions
from vllm_kvtier.store.lower.nodes.serving import Serving
from vllm_kvtier.store.messages import HASH, PAGE, GroupShape
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.reactor import Reactor

SPACE = b"a space 16 bytes"
GROUP = GroupShape(units=1, slot_pages=4)
POOL = 64 << 20
CHAIN = chain_of((8, "x"))


def an_ask(chain: bytes = CHAIN, id: int = 0) -> w.Ask:
    return w.Ask(id, SPACE, 16, [GROUP], chain, 0)


class FakeAgent:
    name, generation, metadata = "agent", 0, b"metadata"

    def register(self, pieces):
        self.generation = 1


class Store:
    """One that is asked: a Serving, and a server that lends ``units`` of any chain at once; None: never answers.
    ``below``: so many might be had; asked with patience, it says that they come, and lends them when told to."""

    def __init__(self, units: int | None = 6, key=None, instance="server", slot=4, port=0, below: int = 0):
        self.units, self.slot, self.heard, self.agent = units, slot, [], FakeAgent()
        self.below = below
        self.agent.name = f"agent of {instance}"
        self.reactor = Reactor("store")
        with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
            self.port = port or probe.bind_to_random_port("tcp://127.0.0.1")
        self.address = Address("127.0.0.1", self.port)
        self.serving = Serving(self, instance, NodeOptions((), self.address, key), self.agent, 0, POOL, lambda: None)
        self.reactor.start()

    def send(self, message):
        self.heard.append(message)
        if isinstance(message, m.Lend) and self.units is not None:
            if message.patience and self.below:
                self.reactor.call_soon(lambda: self.serving.coming(m.Coming(message.id, self.below, 2.5)))
            else:
                self.lend(message, self.units)

    def lend(self, ask: m.Lend, units: int) -> None:
        slots = [[self.slot + 4 * i for i in range(units)]]
        lent = m.Lent(ask.id, 100 + ask.id if units else 0, units, slots, 0 if ask.patience else self.below)
        self.reactor.call_soon(lambda: self.serving.lent(lent))

    def asked_with_patience(self) -> m.Lend:
        """The next one."""
        return eventually(lambda: next((ask for ask in self.of(m.Lend) if ask.patience), None))

    def of(self, kind) -> list:
        return [message for message in self.heard if isinstance(message, kind)]

    def stop(self):
        self.reactor.stop()


class Asker:
    """A NodeMover without a process."""

    def __init__(self, *stores: Store, key=None, objects=""):
        self.pool = SimpleNamespace(address=1 << 40, nbytes=POOL)
        self.reactor, self.heard, self.failed = Reactor("asker"), [], []
        self.guard, self.fail = lambda call: call, self.failed.append
        self.mover = node_mover.NodeMover(self, {"nodes": ",".join(str(s.address) for s in stores)})
        self.mover._options = self.mover._peers._options = NodeOptions(
            tuple(store.address for store in stores), None, key, objects
        )
        self.reactor.start()

    def send(self, message):
        self.heard.append(message)

    def do(self, call):
        done, out = threading.Event(), []
        self.reactor.call_soon(lambda: (out.append(call()), done.set()))
        assert done.wait(10)
        return out[0]

    def begin(self, nodes=(), chain=CHAIN) -> None:
        self.do(lambda: self.mover.handle(m.Look(1, SPACE, 16, [GROUP], chain, 0, list(nodes))))

    def look(self, nodes=(), chain=CHAIN) -> m.Located:
        before = len(self.heard)
        self.begin(nodes, chain)
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


def test_the_best_answer_is_kept(made):
    stores = [made(Store, units, instance=f"s{units}") for units in (2, 6, 0, 4)]
    asker = made(Asker, *stores)
    located = asker.look()
    assert located.units == 6 and located.token
    eventually(lambda: stores[0].of(m.Return) and stores[3].of(m.Return))
    asker.do(lambda: asker.mover.handle(m.Release(located.token)))
    eventually(lambda: stores[1].of(m.Return))
    assert asker.look(chain=CHAIN[: 2 * HASH]).units == 2


def test_one_that_does_not_answer_costs_a_moment(made):
    stores = [made(Store, units=3, instance="quick"), made(Store, units=None, instance="slow")]
    asker = made(Asker, *stores)
    began = time.monotonic()
    assert asker.look().units == 3
    assert time.monotonic() - began < 0.9
    alone = made(Asker, stores[1])
    assert alone.look().token == 0
    time.sleep(0.2)
    began = time.monotonic()
    assert alone.look().token == 0  # and is not asked again while it owes an answer
    assert time.monotonic() - began < 0.5


def test_late_answers_go_back(made, monkeypatch):
    monkeypatch.setattr(node_asking, "ASK_SECONDS", 0.2)
    store = made(Store, units=None)
    asker = made(Asker, store)
    assert asker.look().token == 0
    lend = store.of(m.Lend)[0]
    store.reactor.call_soon(lambda: store.serving.lent(m.Lent(lend.id, 9, 1, [[4]])))
    eventually(lambda: [back.lease for back in store.of(m.Return)] == [9])


def test_leases_die_with_the_connection(made, monkeypatch):
    monkeypatch.setattr(node_serving, "CHECK_SECONDS", 0.05)
    monkeypatch.setattr(w, "SILENT_SECONDS", 0.4)
    monkeypatch.setattr(w, "PING_SECONDS", 0.1)
    store = made(Store)
    asker = made(Asker, store)
    assert asker.look().units == 6
    time.sleep(0.8)
    assert not store.of(m.Left)  # it says that it is still there
    asker.stop()
    eventually(lambda: [left.asker for left in store.of(m.Left)] == [1])


def test_who_sends_nonsense_is_forgotten(made):
    store = made(Store)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.rcvtimeo = 5000
        socket.connect(str(store.address.endpoint))
        hear = lambda: w.decode_from_server([socket.recv()])  # noqa: E731
        socket.send(w.encode(an_ask()))
        assert isinstance(hear(), w.Refused)  # no hello
        for nonsense in (b"\xc1", w.encode(w.Pong()), w.encode(an_ask(CHAIN[:-1]))):
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


def test_keys(made, monkeypatch):
    monkeypatch.setattr(node_asking, "ASK_SECONDS", 0.5)
    ours, theirs = (ClusterKey(zmq.curve_keypair()[1]) for _ in range(2))
    store = made(Store, key=ours)
    assert made(Asker, store, key=theirs).look().token == 0
    assert made(Asker, store).look().token == 0
    assert not store.of(m.Lend)
    assert made(Asker, store, key=ours).look().units == 6


def test_no_more_is_believed_than_can_be(made):
    store = made(Store, slot=POOL // PAGE - 2)
    asker = made(Asker, store)
    assert asker.look().token == 0
    assert asker.do(lambda: len(asker.mover._peers)) == 0


def test_named_stores(made, monkeypatch):
    monkeypatch.setattr(node_peers, "MAX_CONNECTIONS", 2)
    stores = [made(Store, instance=f"s{i}") for i in range(4)]
    asker = made(Asker)
    assert asker.look().token == 0
    assert asker.look(["10.1.2.3:5", "nonsense", "host:0"]).token == 0
    for store in stores:
        located = asker.look([str(store.address)])
        assert located.units == 6
        asker.do(lambda located=located: asker.mover.handle(m.Release(located.token)))
    assert asker.do(lambda: len(asker.mover._peers)) == 2
    # Nine of them: eight are asked.
    assert asker.look([str(stores[0].address)] * 8 + ["localhost:1"]).units == 6


def test_one_store_with_two_addresses(made):
    store = made(Store)
    asker = made(Asker)
    for name in ("127.0.0.1", "localhost", "127.0.0.1", "localhost"):
        located = asker.look([f"{name}:{store.port}"])
        assert located.units == 6
        asker.do(lambda token=located.token: asker.mover.handle(m.Release(token)))
    assert asker.look([f"127.0.0.1:{store.port}", f"localhost:{store.port}"]).units == 6
    assert asker.do(lambda: len(asker.mover._peers)) == 1
    eventually(lambda: len(store.of(m.Lend)) - len(store.of(m.Return)) == 1)


def test_ourselves_in_the_list_that_all_share(made):
    store = made(Store)
    asker = made(Asker, store)
    store.serving._welcome = msgspec.structs.replace(store.serving._welcome, instance=asker.mover._instance)
    assert asker.look().token == 0
    assert asker.look().token == 0 and not store.of(m.Lend)


def test_a_store_that_was_started_anew(made, monkeypatch):
    monkeypatch.setattr(node_peers, "PAUSES", (0.05, 0.1))
    store = made(Store)
    asker = made(Asker, store)
    assert asker.look().units == 6
    store.stop()
    made(Store, units=3, instance="again", port=store.port)
    eventually(lambda: asker.look().units == 3)


# -- what is below the other's memory ---------------------------------------------------------------------------------


def test_who_might_have_most_on_its_disk_is_asked_to_bring_it_up(made):
    some = made(Store, 3, instance="some")
    deep, deeper = (made(Store, 0, instance=f"d{units}", below=units) for units in (5, 7))
    asker = made(Asker, some, deep, deeper, objects="ours")
    coming = asker.look()
    assert (coming.id, coming.units, coming.seconds) == (1, 7, 2.5) and isinstance(coming, m.Coming)
    ask = deeper.asked_with_patience()
    assert (ask.patience, ask.objects, ask.start) == (node_mover.PATIENCE, "ours", 0)
    assert not some.of(m.Return)  # what it offers is kept in case the other fails
    deeper.lend(ask, 7)
    located = eventually(lambda: asker.heard[1:])[0]
    assert located.units == 7 and located.token
    eventually(lambda: some.of(m.Return))
    assert not any(ask.patience for store in (some, deep) for ask in store.of(m.Lend))


def test_one_that_offers_part_of_what_it_has(made):
    store = made(Store, 2, below=6)
    asker = made(Asker, store)
    assert isinstance(asker.look(), m.Coming)
    store.lend(store.asked_with_patience(), 6)
    assert eventually(lambda: asker.heard[1:])[0].units == 6
    first, second = (100 + ask.id for ask in store.of(m.Lend))
    eventually(lambda: [back.lease for back in store.of(m.Return)] == [first])
    asker.do(lambda: asker.mover.handle(m.Release(asker.heard[1].token)))
    eventually(lambda: [back.lease for back in store.of(m.Return)] == [first, second])


def test_all_of_it_in_one_memory_and_nobodys_disk_is_asked(made):
    memory, disk = made(Store, 8, instance="memory"), made(Store, 0, instance="disk", below=8)
    assert made(Asker, memory, disk).look().units == 8
    assert not any(ask.patience for ask in disk.of(m.Lend))


def test_nothing_came_of_it_and_what_another_offered_is_used(made):
    some, deep = made(Store, 3, instance="some"), made(Store, 0, instance="deep", below=8)
    asker = made(Asker, some, deep)
    asker.begin()
    deep.lend(deep.asked_with_patience(), 0)
    located = eventually(lambda: [x for x in asker.heard if isinstance(x, m.Located)])[0]
    assert located.units == 3 and not some.of(m.Return)


def test_one_that_waits_for_its_disk_is_not_taken_for_dead(made, monkeypatch):
    """Longer than any answer may take without patience; others' questions to it are asked and answered meanwhile."""
    monkeypatch.setattr(node_peers, "SLOW_SECONDS", 0.1)
    monkeypatch.setattr(node_peers, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(w, "PING_SECONDS", 0.05)
    store = made(Store, 0, below=8)
    asker = made(Asker, store)
    assert isinstance(asker.look(), m.Coming)
    time.sleep(0.8)
    assert asker.do(lambda: len(asker.mover._peers)) == 1
    store.units, store.below = 2, 0
    assert asker.look(chain=chain_of((8, "another"))).units == 2
    store.lend(store.asked_with_patience(), 8)
    eventually(lambda: [x.units for x in asker.heard if isinstance(x, m.Located)] == [2, 8])


def test_one_that_does_not_bring_it_in_time(made, monkeypatch):
    """What its memory has is found; its answer, when it comes, goes back; after that, it is taken for dead."""
    monkeypatch.setattr(node_asking, "ASK_SECONDS", 0.2)
    monkeypatch.setattr(node_mover, "PATIENCE", 0.3)
    monkeypatch.setattr(node_peers, "ANSWER_SECONDS", 1.5)
    monkeypatch.setattr(w, "PING_SECONDS", 0.05)
    store = made(Store, 2, below=8)
    asker = made(Asker, store)
    began = time.monotonic()
    assert isinstance(asker.look(), m.Coming)
    assert eventually(lambda: asker.heard[1:])[0].units == 2 and time.monotonic() - began < 1.5
    late = store.asked_with_patience()
    store.lend(late, 8)
    eventually(lambda: [back.lease for back in store.of(m.Return)] == [100 + late.id])
    asker.begin()
    eventually(lambda: asker.do(lambda: len(asker.mover._peers)) == 0, 5)


def test_nobody_promises_what_was_not_asked_for(made):
    store = made(Store, 0, below=8)
    asker = made(Asker, store)
    assert isinstance(asker.look(), m.Coming)
    ask = store.asked_with_patience()
    store.reactor.call_soon(lambda: store.serving.coming(m.Coming(ask.id, 9, 1.0)))
    eventually(lambda: asker.do(lambda: len(asker.mover._peers)) == 0)
    assert eventually(lambda: [x for x in asker.heard if isinstance(x, m.Located)])[0].token == 0
