"""RemoteStoreSource: an engine's own questions to other nodes' stores over real loopback sockets, and what is made of
answers."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from remote_store_fakes import LendingStore
from source_fakes import load_context
from support import eventually
from tier_fakes import NAMESPACE, described, make_tier

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.jobs.results import LoadResult
from vllm_kvtier.remote_store import lookup as node_asking
from vllm_kvtier.scheduler.integrity.checksum_index import ContentKeys
from vllm_kvtier.scheduler.sources.remote_store import (
    RemoteStoreSource,
    store_bandwidth,
    uses_remote_store,
)
from vllm_kvtier.store.protocol import HASH_BYTES
from vllm_kvtier.store.tiers.process import protocol as moving
from vllm_kvtier.wire import link as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.reactor import Reactor

ONE = [(16, None)]
BLOCK_HASHES = [bytes([i]) * 32 for i in range(12)]


class Engine:
    """A RemoteStoreSource that asks ``stores``, all of whose ranks can read."""

    def __init__(
        self, *stores: LendingStore, groups=ONE, ranks=1, nodes=None, key_file=None, ready=True, buffer="cuda"
    ):
        listed = ",".join(str(store.address) for store in stores) if nodes is None else nodes
        self.config = KVTierConfig(store="off", store_nodes=listed, cluster_key_file=key_file)
        transfer = SimpleNamespace(kv_buffer_device=buffer)
        info = {"world_size": ranks, "config": SimpleNamespace(kv_transfer_config=transfer)}
        self.reactor, self.told = Reactor("far engine"), []
        load = load_context(groups, 16, config=self.config, reactor=self.reactor, info=info, keys=ContentKeys(5))
        self.tier = RemoteStoreSource(load, self.told.append)
        self.described = {r: described(r, groups, [r] * len(groups)) for r in range(ranks)}
        self.tier.open(NAMESPACE, self.described)
        self.reactor.start()
        if ready:
            for rank in range(ranks):
                self.tier.reached(m.PoolReady(rank, "far", 1 << 20))

    def ask(self, start=0, block_hashes=BLOCK_HASHES, **more):
        ask = self.tier.ask(start, block_hashes, b"", **more)
        eventually(lambda: ask.poll() is not None, 15)
        return ask.poll()

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


def test_remote_store_hit_is_leased_until_release(made):
    store = made(LendingStore, 6)
    engine = made(Engine, store)
    offer = engine.ask()
    assert offer.source is engine.tier and (offer.start, offer.tokens, offer.source.cost_key) == (0, 96, "host")
    assert offer.blocks == [[4 + 4 * i for i in range(6)]] and offer.lease
    plan = engine.tier._plan
    assert offer.nbytes == 6 * plan.part_bytes[0] and offer.logical_bytes == 6 * plan.logical[0]
    [request] = store.of(moving.LeaseRequest)
    assert (request.namespace_id, request.block_hashes, request.start) == (
        engine.tier.namespace_id(b""),
        b"".join(h[:HASH_BYTES] for h in BLOCK_HASHES),
        0,
    )
    assert not store.of(moving.Return)
    engine.tier.release(offer, True)
    eventually(lambda: store.of(moving.Return))
    engine.tier.release(offer, True)
    assert engine.tier._leases == {}


def test_remote_store_source_finds_blocks_of_other_node(made):
    """The same spaces, the same layout of a slot."""
    for groups, ranks in ((ONE, 1), (ONE, 2), ([(32, None), (16, 100)], 1)):
        engine = made(Engine, groups=groups, ranks=ranks, nodes="127.0.0.1:9")
        others = make_tier(groups, [engine.described[r] for r in range(ranks)], hash_block_size=16)
        assert engine.tier.namespace_id(b"adapter") == others.tier.namespace_id(b"adapter")
        [setup] = engine.told
        assert setup.offsets == others.setup.offsets and setup.codecs == others.setup.codecs and not setup.host
        assert setup.slot_pages == [shape.slot_pages for shape in others.client.hello.groups]
        assert m.decode_link(m.encode(setup)) == setup
    assert made(Engine, nodes="127.0.0.1:9", buffer="cpu").told[0].host, "as pulls go"


def test_remote_store_serves_reads_from_job_to_release(made):
    store = made(LendingStore, 4)
    engine = made(Engine, store)
    offer = engine.ask()
    assert not store.serving.reading
    request = SimpleNamespace(request_id="r", block_hashes=BLOCK_HASHES, lora_request=None, cache_salt=None)
    t = SimpleNamespace(request=request, hit=offer, num_computed_tokens=16, positions={})
    order = engine.tier.build_job(t, ([9, 8, 7, 6],), 64)
    assert order.remote_store == offer.remote and order.instance == "server"
    assert order.remote_store.agent == "agent of server"
    assert order.remote_store.metadata == b"metadata" and order.remote_store.base == 1 << 30
    assert np.array_equal(order.groups[0].slots, [8, 12, 16]) and np.array_equal(order.groups[0].blocks, [8, 7, 6])
    eventually(lambda: store.serving.reading)
    other = engine.ask()  # a lease that nothing is read under
    engine.tier.release(offer, True)
    eventually(lambda: not store.serving.reading and store.of(moving.Return))
    assert list(engine.tier._leases) == [other.lease]


def test_remote_store_longest_of_listed_and_named_stores_is_used(made):
    listed, named = made(LendingStore, 2, instance="listed"), made(LendingStore, 5, instance="named")
    engine = made(Engine, listed)
    assert engine.ask().tokens == 32
    offer = engine.ask(nodes=(str(named.address), "nonsense"))
    assert offer.tokens == 80 and offer.remote.instance == "named"
    eventually(lambda: listed.of(moving.Return))


def test_remote_lookup_miss_everywhere_reports_reason(made):
    engine = made(Engine, made(LendingStore, 0))
    outcome = engine.ask()
    assert outcome.searched and outcome.pending_promotion is None


def test_remote_store_promotion_wait_if_faster_than_compute(made):
    store = made(LendingStore, 2, below=9)
    engine = made(Engine, store)
    offer = engine.ask()
    assert offer.tokens == 32 and offer.pending_promotion.tokens == 32 and offer.pending_promotion.asking > 0
    more = engine.ask(wait_seconds=5.0)
    assert more.tokens == 144 and more.pending_promotion is None
    assert [lend.wait_seconds for lend in store.of(moving.LeaseRequest)] == [0, 0, 5.0]
    nothing = made(Engine, made(LendingStore, 0, below=3, instance="below only")).ask()
    assert (
        nothing.searched
        and nothing.pending_promotion.tokens == 0
        and nothing.pending_promotion.asking > 0
    )


def test_remote_lookup_without_answer_ends_at_deadline(made, monkeypatch):
    monkeypatch.setattr(node_asking, "ASK_SECONDS", 0.2)
    engine = made(Engine, made(LendingStore, None))
    began = time.monotonic()
    assert engine.ask().searched
    assert 0.1 < time.monotonic() - began < 2


def test_remote_lease_without_request_is_released(made):
    store = made(LendingStore, 3)
    engine = made(Engine, store)
    engine.tier.cancel(engine.tier.ask(0, BLOCK_HASHES, b""))
    eventually(lambda: store.of(moving.Return))
    kept = engine.tier.ask(0, BLOCK_HASHES, b"")
    engine.tier.renew()
    eventually(lambda: kept.poll() is not None)
    assert kept.poll().code == "not_in_store"
    eventually(lambda: len(store.of(moving.Return)) == 2)
    namespaces = {lend.namespace_id for lend in store.of(moving.LeaseRequest)}
    engine.ask()
    assert store.of(moving.LeaseRequest)[-1].namespace_id not in namespaces and engine.tier.epoch == 1


def test_remote_store_bad_block_is_not_loaded_again(made):
    store = made(LendingStore, 6)
    engine = made(Engine, store)
    first = engine.ask()
    engine.tier.discard(b"", 0, BLOCK_HASHES[4], 20, first.session)
    offer = engine.ask()
    assert offer.tokens == 64 and len(offer.blocks[0]) == 4
    engine.tier.release(first, True)
    eventually(lambda: first.lease not in engine.tier._leases)
    engine.tier.discard(b"", 0, BLOCK_HASHES[1], 8, first.session)
    assert engine.ask().tokens == 64, "what was not leased any more says nothing"
    engine.tier.discard(b"", 0, BLOCK_HASHES[0], 4, offer.session)
    assert not engine.ask().found
    eventually(lambda: len(store.of(moving.Return)) == 2)
    engine.tier.release(offer, True)


def test_remote_store_bad_block_is_loaded_from_another_store(made):
    bad, good = made(LendingStore, 6), made(LendingStore, 6, instance="good")
    engine = made(Engine, nodes=str(bad.address))
    first = engine.ask()
    engine.tier.discard(b"", 0, BLOCK_HASHES[0], 4, first.session)
    assert not engine.ask().found
    bad.num_hash_blocks = 0
    offer = engine.ask(nodes=(str(good.address),))
    assert offer.found and offer.tokens == 96 and offer.instance == "good"


def test_remote_store_after_lost_read_is_skipped_for_a_while(made):
    store = made(LendingStore, 6)
    engine = made(Engine, store)
    offer = engine.ask()
    lost = m.RemoteStoreLost(0, "server", offer.remote.generation, "a read failed")
    engine.reactor.call_soon(lambda: engine.tier.lost(lost))
    assert engine.ask().searched
    assert engine.tier._leases == {} and len(store.of(moving.LeaseRequest)) == 1
    engine.tier.release(offer, True)


@pytest.mark.parametrize("seconds, found", [(5.0, True), (60.0, False)])
def test_remote_store_after_a_read_beyond_its_time_limit_is_skipped_for_a_while(made, seconds, found):
    """It answers, so that each further request would wait for that limit as well. A read that failed otherwise ends no
    backoff, and begins none: the workers say when the connection is lost."""
    store = made(LendingStore, 6)
    engine, ended = made(Engine, store), []
    engine.tier._peers.reached = ended.append
    hit = engine.ask()
    request = SimpleNamespace(request_id="r", block_hashes=BLOCK_HASHES, lora_request=None, cache_salt=None)
    state = SimpleNamespace(request=request, hit=hit, num_computed_tokens=0, positions={}, job=None)
    engine.tier.build_job(state, (list(range(1, 7)),), 96)
    engine.tier.on_load_failed(state, LoadResult("r", {1}, "it failed", 0, seconds, 0.0))
    engine.tier.release(hit, True)
    eventually(lambda: store.of(moving.Return))
    assert not ended and engine.ask().found is found and len(store.of(moving.LeaseRequest)) == 1 + found


def test_remote_store_read_that_succeeds_ends_the_pause(made):
    store = made(LendingStore, 6)
    engine = made(Engine, store)
    first, second = engine.ask(), engine.ask()
    request = SimpleNamespace(request_id="r", block_hashes=BLOCK_HASHES, lora_request=None, cache_salt=None)
    for hit in first, second:
        state = SimpleNamespace(request=request, hit=hit, num_computed_tokens=0, positions={}, job=None)
        engine.tier.build_job(state, (list(range(1, 7)),), 96)
    late = SimpleNamespace(request=request, hit=first, job=None)
    engine.tier.on_load_failed(late, LoadResult("r", {1}, "it failed", 0, 60.0, 0.0))
    assert engine.ask().searched
    engine.tier.release(second, True)
    assert engine.ask().found


def test_remote_store_lost_by_another_rank_keeps_the_new_connection(made):
    """Both ranks read over the first; the second rank's read fails when the first rank's has ended it."""
    store = made(LendingStore, 6)
    engine = made(Engine, store, ranks=2)
    lost = [m.RemoteStoreLost(rank, "server", engine.ask().remote.generation, "a read failed") for rank in (0, 1)]
    engine.reactor.call_soon(lambda: engine.tier.lost(lost[0]))
    eventually(lambda: not engine.tier._leases)
    engine.tier._peers._paused.clear()
    offer = engine.ask()
    ended = []
    engine.reactor.call_soon(lambda: (engine.tier.lost(lost[1]), ended.append(True)))
    eventually(lambda: ended)
    assert offer.lease in engine.tier._leases and offer.remote.generation > lost[1].generation
    lost = m.RemoteStoreLost(1, "server", offer.remote.generation, "a read failed")
    engine.reactor.call_soon(lambda: engine.tier.lost(lost))
    eventually(lambda: not engine.tier._leases)


def test_remote_store_death_ends_leases(made, monkeypatch):
    monkeypatch.setattr("vllm_kvtier.remote_store.protocol.SILENT_SECONDS", 0.3)
    monkeypatch.setattr("vllm_kvtier.remote_store.protocol.PING_SECONDS", 0.05)
    store = made(LendingStore, 6)
    engine = made(Engine, store)
    offer = engine.ask()
    assert engine.tier.is_current(SimpleNamespace(), offer)
    store.stop()
    eventually(lambda: not engine.tier._leases)
    assert not engine.tier.is_current(SimpleNamespace(), offer), "it is computed; a load of it would fail"
    engine.reactor.call_soon(lambda: engine.tier._begin(offer.lease))
    engine.tier.release(offer, True)
    assert engine.ask().searched


def test_remote_store_source_without_staging_ring_is_not_eligible(made):
    engine = made(Engine, nodes="127.0.0.1:9", ranks=2, ready=False)
    assert engine.tier.ask(0, BLOCK_HASHES, b"") is None
    engine.tier.reached(m.PoolReady(0, "far", 100))
    assert engine.tier.limit() == 0
    engine.tier.reached(m.PoolReady(1, "far", 100))
    assert engine.tier.limit() == 1
    engine.tier.reached(m.PoolReady(1, "far", 0))
    assert engine.tier.ask(0, BLOCK_HASHES, b"") is None


def test_remote_store_source_with_other_cluster_key_misses(made, tmp_path):
    def written(name) -> str:
        public, secret = zmq.curve_keypair()
        file = tmp_path / name
        file.touch(mode=0o600)
        file.write_bytes(secret)
        return str(file)

    ours, theirs = written("ours"), written("theirs")
    store = made(LendingStore, 6, key=ClusterKey.load(ours))
    for key in (theirs, None):
        assert made(Engine, store, key_file=key).ask().searched
    assert not store.of(moving.LeaseRequest)
    assert made(Engine, store, key_file=ours).ask().tokens == 96


def test_remote_store_options_that_conflict_raise():
    for nodes, words in (("10.0.0.2:7200", "cluster key"), ("nonsense", "host:port")):
        with pytest.raises(ConfigError, match=words):
            Engine(nodes=nodes)
    assert uses_remote_store(KVTierConfig(store="off", store_nodes="h:1"))
    assert not uses_remote_store(KVTierConfig(store="off")) and not uses_remote_store(KVTierConfig(store_nodes="h:1"))
    facts = SimpleNamespace(link_bandwidth=20e9)
    assert store_bandwidth(KVTierConfig(store="off", store_nodes="h:1"), facts) < 20e9
    assert store_bandwidth(KVTierConfig(), facts) == 20e9


def test_remote_store_source_does_not_prefetch_or_touch(made):
    tier = made(Engine, nodes="127.0.0.1:9").tier
    assert not tier.promote(BLOCK_HASHES, b"") and tier.touch(BLOCK_HASHES, b"") is None and not len(tier.prefetcher)
    assert tier.load_bytes(64) == 4 * tier._plan.part_bytes[0] and [c.name for c in tier.codecs] == ["raw"]
