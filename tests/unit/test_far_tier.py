"""FarTier: an engine's own questions to other nodes' stores over real loopback sockets, and what is made of answers."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from far_fakes import LendingStore
from support import eventually
from tier_fakes import NAMESPACE, described, make_tier

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.scheduler import orders
from vllm_kvtier.scheduler.far import FarOffer, FarTier, is_far, tier_bandwidth
from vllm_kvtier.scheduler.ledger import Keys
from vllm_kvtier.scheduler.offers import NoOffer
from vllm_kvtier.scheduler.tier import NotInMemory
from vllm_kvtier.store.lower import moving as moving
from vllm_kvtier.store.lower.nodes import asking as node_asking
from vllm_kvtier.store.messages import HASH
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.reactor import Reactor

ONE = [(16, None)]
CHAIN = [bytes([i]) * 32 for i in range(12)]


class Engine:
    """A FarTier that asks ``stores``, all of whose ranks can read."""

    def __init__(
        self, *stores: LendingStore, groups=ONE, ranks=1, nodes=None, key_file=None, ready=True, buffer="cuda"
    ):
        listed = ",".join(str(store.address) for store in stores) if nodes is None else nodes
        self.config = KVTierConfig(store="off", store_nodes=listed, cluster_key_file=key_file)
        transfer = SimpleNamespace(kv_buffer_device=buffer)
        facts = SimpleNamespace(
            groups=groups, world_size=ranks, engine_id="engine", link_bandwidth=1e9, release="1",
            config=SimpleNamespace(kv_transfer_config=transfer),
        )  # fmt: skip
        self.reactor, self.told = Reactor("far engine"), []
        self.tier = FarTier(self.config, facts, 16, self.reactor, self.told.append)
        self.described = {r: described(r, groups, [r] * len(groups)) for r in range(ranks)}
        self.tier.open(NAMESPACE, self.described)
        self.reactor.start()
        if ready:
            for rank in range(ranks):
                self.tier.reached(m.PoolReady(rank, "far", 1 << 20))

    def ask(self, start=0, chain=CHAIN, **more):
        ask = self.tier.ask(start, chain, b"", **more)
        eventually(lambda: ask.outcome is not None, 15)
        return ask.outcome

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


def test_what_another_node_has_is_an_offer_until_it_is_released(made):
    store = made(LendingStore, 6)
    engine = made(Engine, store)
    offer = engine.ask()
    assert isinstance(offer, FarOffer) and (offer.start, offer.tokens, offer.place) == (0, 96, "host")
    assert offer.blocks == [[4 + 4 * i for i in range(6)]] and offer.lease
    plan = engine.tier._plan
    assert offer.nbytes == 6 * plan.part_bytes[0] and offer.logical == 6 * plan.logical[0]
    [lend] = store.of(moving.Lend)
    assert (lend.space, lend.chain, lend.start) == (engine.tier.space(b""), b"".join(h[:HASH] for h in CHAIN), 0)
    assert not store.of(moving.Return)
    engine.tier.release(offer)
    eventually(lambda: store.of(moving.Return))
    engine.tier.release(offer)
    assert engine.tier._loans == {}


def test_it_finds_what_engines_with_a_store_of_their_own_have_stored(made):
    """The same spaces, the same layout of a slot."""
    for groups, ranks in ((ONE, 1), (ONE, 2), ([(32, None), (16, 100)], 1)):
        engine = made(Engine, groups=groups, ranks=ranks, nodes="127.0.0.1:9")
        others = make_tier(groups, [engine.described[r] for r in range(ranks)], unit=16)
        assert engine.tier.space(b"adapter") == others.tier.space(b"adapter")
        [setup] = engine.told
        assert setup.offsets == others.setup.offsets and setup.codecs == others.setup.codecs and not setup.host
        assert setup.slot_pages == [shape.slot_pages for shape in others.client.hello.groups]
        assert m.decode_link(m.encode(setup)) == setup
    assert made(Engine, nodes="127.0.0.1:9", buffer="cpu").told[0].host, "as pulls go"


def test_the_store_helps_from_the_order_to_the_release(made):
    store = made(LendingStore, 4)
    engine = made(Engine, store)
    offer = engine.ask()
    assert not store.serving.reading
    request = SimpleNamespace(request_id="r", block_hashes=CHAIN, lora_request=None, cache_salt=None)
    t = SimpleNamespace(request=request, offer=offer, local=16, places={})
    order = orders.load_order(t, ONE, 16, Keys(5), ([9, 8, 7, 6],), 64, 60.0)
    assert order.far == offer.source and order.instance == "server" and order.far.agent == "agent of server"
    assert order.far.metadata == b"metadata" and order.far.base == 1 << 30
    assert np.array_equal(order.groups[0].slots, [8, 12, 16]) and np.array_equal(order.groups[0].blocks, [8, 7, 6])
    eventually(lambda: store.serving.reading)
    other = engine.ask()  # a lease that nothing is read under
    engine.tier.release(offer)
    eventually(lambda: not store.serving.reading and store.of(moving.Return))
    assert list(engine.tier._loans) == [other.lease]


def test_the_best_of_several_and_those_that_a_request_names(made):
    listed, named = made(LendingStore, 2, instance="listed"), made(LendingStore, 5, instance="named")
    engine = made(Engine, listed)
    assert engine.ask().tokens == 32
    offer = engine.ask(nodes=(str(named.address), "nonsense"))
    assert offer.tokens == 80 and offer.source.instance == "named"
    eventually(lambda: listed.of(moving.Return))


def test_nothing_anywhere(made):
    engine = made(Engine, made(LendingStore, 0))
    outcome = engine.ask()
    assert isinstance(outcome, NotInMemory) and outcome.further is None


def test_what_is_below_memory_is_waited_for_where_that_is_worth_it(made):
    store = made(LendingStore, 2, below=9)
    engine = made(Engine, store)
    offer = engine.ask()
    assert offer.tokens == 32 and offer.further.tokens == 32 and offer.further.asking > 0
    more = engine.ask(patience=5.0)
    assert more.tokens == 144 and more.further is None
    assert [lend.patience for lend in store.of(moving.Lend)] == [0, 0, 5.0]
    nothing = made(Engine, made(LendingStore, 0, below=3, instance="below only")).ask()
    assert isinstance(nothing, NotInMemory) and nothing.further.tokens == 0 and nothing.further.asking > 0


def test_a_question_that_nobody_answers_takes_no_longer_than_it_may(made, monkeypatch):
    monkeypatch.setattr(node_asking, "ASK_SECONDS", 0.2)
    engine = made(Engine, made(LendingStore, None))
    began = time.monotonic()
    assert isinstance(engine.ask(), NotInMemory)
    assert 0.1 < time.monotonic() - began < 2


def test_an_answer_for_nobody_goes_back(made):
    store = made(LendingStore, 3)
    engine = made(Engine, store)
    engine.tier.cancel(engine.tier.ask(0, CHAIN, b""))
    eventually(lambda: store.of(moving.Return))
    kept = engine.tier.ask(0, CHAIN, b"")
    engine.tier.renew()
    eventually(lambda: kept.outcome is not None)
    assert isinstance(kept.outcome, NoOffer) and kept.outcome.code == "not stored"
    eventually(lambda: len(store.of(moving.Return)) == 2)
    spaces = {lend.space for lend in store.of(moving.Lend)}
    engine.ask()
    assert store.of(moving.Lend)[-1].space not in spaces and engine.tier.epoch == 1


def test_what_came_wrong_is_not_taken_again(made):
    store = made(LendingStore, 6)
    engine = made(Engine, store)
    first = engine.ask()
    engine.tier.discard(b"", 0, CHAIN[4], 20, first.session)
    offer = engine.ask()
    assert offer.tokens == 64 and len(offer.blocks[0]) == 4
    engine.tier.release(first)
    eventually(lambda: first.lease not in engine.tier._loans)
    engine.tier.discard(b"", 0, CHAIN[1], 8, first.session)
    assert engine.ask().tokens == 64, "what was not lent any more says nothing"
    engine.tier.discard(b"", 0, CHAIN[0], 4, offer.session)
    assert isinstance(engine.ask(), NoOffer)
    eventually(lambda: len(store.of(moving.Return)) == 2)


def test_a_store_whose_memory_cannot_be_read_is_left_alone_for_a_while(made):
    store = made(LendingStore, 6)
    engine = made(Engine, store)
    offer = engine.ask()
    engine.reactor.call_soon(lambda: engine.tier.lost(m.FarLost(0, "server", "a read failed")))
    assert isinstance(engine.ask(), NotInMemory)
    assert engine.tier._loans == {} and len(store.of(moving.Lend)) == 1
    engine.tier.release(offer)


def test_one_that_dies_takes_its_leases_with_it(made, monkeypatch):
    monkeypatch.setattr("vllm_kvtier.store.lower.nodes.wire.SILENT_SECONDS", 0.3)
    monkeypatch.setattr("vllm_kvtier.store.lower.nodes.wire.PING_SECONDS", 0.05)
    store = made(LendingStore, 6)
    engine = made(Engine, store)
    offer = engine.ask()
    store.stop()
    eventually(lambda: not engine.tier._loans)
    offer.begin()
    engine.tier.release(offer)
    assert isinstance(engine.ask(), NotInMemory)


def test_who_has_no_ring_is_not_counted_on(made):
    engine = made(Engine, nodes="127.0.0.1:9", ranks=2, ready=False)
    assert engine.tier.ask(0, CHAIN, b"") is None
    engine.tier.reached(m.PoolReady(0, "far", 100))
    assert engine.tier.limit() == 0
    engine.tier.reached(m.PoolReady(1, "far", 100))
    assert engine.tier.limit() == 1
    engine.tier.reached(m.PoolReady(1, "far", 0))
    assert engine.tier.ask(0, CHAIN, b"") is None


def test_keys(made, tmp_path):
    def written(name) -> str:
        public, secret = zmq.curve_keypair()
        file = tmp_path / name
        file.touch(mode=0o600)
        file.write_bytes(secret)
        return str(file)

    ours, theirs = written("ours"), written("theirs")
    store = made(LendingStore, 6, key=ClusterKey.load(ours))
    for key in (theirs, None):
        assert isinstance(made(Engine, store, key_file=key).ask(), NotInMemory)
    assert not store.of(moving.Lend)
    assert made(Engine, store, key_file=ours).ask().tokens == 96


def test_words_for_options_that_cannot_be_meant():
    for nodes, words in (("10.0.0.2:7200", "cluster key"), ("nonsense", "host:port")):
        with pytest.raises(ConfigError, match=words):
            Engine(nodes=nodes)
    assert is_far(KVTierConfig(store="off", store_nodes="h:1"))
    assert not is_far(KVTierConfig(store="off")) and not is_far(KVTierConfig(store_nodes="h:1"))
    facts = SimpleNamespace(link_bandwidth=20e9)
    assert tier_bandwidth(KVTierConfig(store="off", store_nodes="h:1"), facts) < 20e9
    assert tier_bandwidth(KVTierConfig(), facts) == 20e9


def test_there_is_nothing_to_pin_warm_or_touch(made):
    tier = made(Engine, nodes="127.0.0.1:9").tier
    assert tier.pin(CHAIN, True) is None and tier.inspect(CHAIN) is None and not tier.warm(CHAIN, b"")
    assert tier.touch(CHAIN, b"") is None and tier.instance == "" and tier.sharing is None
    assert tier.load_bytes(64) == 4 * tier._plan.part_bytes[0] and [c.name for c in tier.codecs] == ["raw"]
