"""KV events where much waits, one engine sends wrong events, or one takes all: nothing gets slow, lost or stuck by
it."""

import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from cache_groups import cache_groups
from events_model import FakeTier, Loop, Wire, fake_request
from offloader_fakes import FakeReactor
from offloader_fakes import FakeTier as FakeStore
from support import Clock
from test_events import CPU, HASH_BLOCK_SIZE, HASHES, ONE, OTHER, TOKENS, World, hashes_in
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from vllm_kvtier.scheduler import connector_scheduler as connector_scheduler_module
from vllm_kvtier.scheduler.connector_scheduler import KVTierConnectorScheduler
from vllm_kvtier.scheduler.offload.block_tables import Table
from vllm_kvtier.scheduler.offload.kv_events import Events
from vllm_kvtier.scheduler.offload.offloader import Offloader
from vllm_kvtier.scheduler.offload.store_jobs import Batch, Item, StoreJobs
from vllm_kvtier.scheduler.sources.slot_layout import NamespaceIds
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.index.index import HASH_BYTES, Index
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.store.server import event_feed as event_feed_module
from vllm_kvtier.store.server.event_feed import EventFeed
from vllm_kvtier.telemetry.events import Label, Removed
from vllm_kvtier.telemetry.stats import Counters


def quickest(act, times: int) -> float:
    """Seconds: the least of so many, which does not depend on what else the machine does."""

    def took() -> float:
        began = time.perf_counter()
        act()
        return time.perf_counter() - began

    return min(took() for _ in range(times))


def name_of(number: int) -> bytes:
    return number.to_bytes(HASH_BYTES, "big")


class Shelf:
    """A store's ``EventFeed`` over blocks of a tier; what is sent is kept in ``sent``, without answers."""

    def __init__(self, label_bytes: int, namespaces=(ONE, OTHER)):
        self.loop, self.sent, self.tier = Loop(), [], FakeTier("disk")
        index = Index(SlotPool(1, 1), None, Clock())
        index.connect(1, HASH_BLOCK_SIZE, [m.GroupShape(1, 1)])
        self.changes = EventFeed(
            index, [self.tier], lambda number, message: self.sent.append(message), self.loop.call_soon, label_bytes
        )
        self.changes.follow(1, list(namespaces))

    def label(self, first: int, count: int, namespace_id=ONE, content=b"") -> None:
        names = [name_of(first + i) for i in range(count)]
        for name in names:
            self.tier.kept.add((namespace_id, 0, name))
        self.changes.label(1, m.Labels(namespace_id, [0] * count, b"".join(names), [content] * count))


# -- what it costs ---------------------------------------------------------------------------------------------------


def test_events_take_time_is_independent_of_backlog():
    """Each step's thread would wait for it."""
    events = Events([(HASH_BLOCK_SIZE, None)], HASH_BLOCK_SIZE, Loop(), lambda: None)
    count = 60_000
    events._differing.update({(ONE, (0, name_of(i))): False for i in range(count)})
    first = quickest(lambda: events.take(500), 10)
    for _ in range(count // 500 - 20):
        events.take(500)
    assert quickest(lambda: events.take(500), 10) < 6 * first and not events.behind


def test_event_feed_backlog_is_sent_as_fast_at_its_end():
    shelf, count = Shelf(1 << 30, [ONE]), 60_000
    shelf.changes.follow(1, [ONE])
    shelf.loop.run()
    shelf.label(0, count)
    first = quickest(lambda: shelf.changes.acknowledged(1), 10)
    for _ in range(count // event_feed_module.BATCH_BLOCKS - 20):
        shelf.changes.acknowledged(1)
    assert quickest(lambda: shelf.changes.acknowledged(1), 10) < 6 * first


def test_event_label_eviction_time_is_independent_of_count():
    def full(count: int) -> float:
        shelf = Shelf(count * event_feed_module.LABEL_COST, [ONE])
        shelf.label(0, count)
        numbers = iter(range(count, 1 << 30, 16))
        return quickest(lambda: shelf.label(next(numbers), 16), 30)

    assert full(200_000) < 8 * full(1000)


def test_event_feed_snapshot_of_removed_blocks_is_sent_in_parts(monkeypatch):
    """Its list is looked at a part at a time."""
    monkeypatch.setattr(event_feed_module, "MAX_CHECKED_NAMES", 10)
    shelf = Shelf(1 << 30, [OTHER])
    shelf.label(0, 35, OTHER)
    shelf.changes.follow(1, [])
    shelf.changes.follow(1, [OTHER, ONE])
    for i in range(35):
        shelf.tier.lose((OTHER, 0, name_of(i)))
    follower, turns = shelf.changes._followers[1], 0
    while follower.rest or follower.anew:
        shelf.changes.acknowledged(1)
        before = sum(each.__length_hint__() for each in follower.rest.values())
        if shelf.loop._soon:
            shelf.loop._soon.popleft()()
        after = sum(each.__length_hint__() for each in follower.rest.values())
        assert before - after <= 10
        turns += 1
    assert turns >= 3 and not any(any(each.places) for each in shelf.sent)


def test_repeated_event_waits_once():
    """Each reset of the prefix cache would add all that there is."""
    world = World()
    world.store(6)
    world.said()
    for _ in range(50):
        world.events.publish_again()
        world.deliver()
        last = world.events.take(1)
    assert len(world.events._sweeps) == 1
    again = [*last, *(each for _ in range(3) for each in world.events.take(3))]
    assert {h for each in again for h in hashes_in(each)} == set(HASHES)


def test_busy_namespace_does_not_starve_others(monkeypatch):
    """A new follower has to hear of that one from its beginning."""
    monkeypatch.setattr(event_feed_module, "BATCH_BLOCKS", 4)
    shelf = Shelf(1 << 30)
    shelf.label(0, 40, OTHER)
    shelf.changes.follow(1, [])
    shelf.changes.follow(1, [ONE, OTHER])
    for turn in range(30):
        shelf.label(100 + turn, 1, ONE)
        shelf.changes.acknowledged(1)
    told = {
        namespace_id: sum(len(each.groups) for each in shelf.sent if each.namespace_id == namespace_id)
        for namespace_id in (ONE, OTHER)
    }
    assert told[OTHER] == 40 and told[ONE] >= 28


# -- the order of publication ------------------------------------------------------------------------------------------


def test_event_labels_of_new_namespace_get_their_share():
    shelf = Shelf(100 * event_feed_module.LABEL_COST)
    shelf.label(0, 100)
    for i in range(10):
        shelf.label(1000 + 10 * i, 10, OTHER)
    held = {namespace_id: len(labels) for namespace_id, labels in shelf.changes._labels.items()}
    assert min(held[ONE], held[OTHER]) >= 40 and sum(held.values()) <= 100
    assert shelf.changes.labelled[1] == sum(shelf.changes._sizes.values())
    shelf.changes.follow(1, [OTHER])
    shelf.label(2000, 30, OTHER)
    assert len(shelf.changes._labels[ONE]) < held[ONE], "the oldest without readers"


def test_event_label_of_aborted_rewrite_is_dropped(monkeypatch):
    monkeypatch.setattr(event_feed_module, "MAX_AWAITED_LABELS", 2)
    world = World()
    world.changes._max_awaited = 2
    names = [(ONE, 0, each[:HASH_BYTES]) for each in HASHES]
    for i, name in enumerate(names):
        world.tiers["disk"].put(name)
        slots = world.index.reserve(1, ONE, b"", [0], name[2], b"\0" * HASH_BYTES, 1 << 30)
        world.label(i + 1, first=i)
        world.deliver()
        world.tiers["disk"].lose(name)
        world.index.abort(1, slots)
    world.said()
    assert world.changes.labelled[0] <= 4


# -- wrong events ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repeat", [False, True])
def test_event_label_with_equal_hash_prefix_is_tolerated(repeat):
    """Some process of the node made it; the engine's scheduler must not fall over it."""
    events = Events([(HASH_BLOCK_SIZE, None)], HASH_BLOCK_SIZE, Loop(), lambda: None)
    wire = Wire(1, events, ["disk"])
    wire.connected, wire.session = True, 1
    events.join(ONE)
    events.store_changed(wire, True)
    tokens = np.arange(HASH_BLOCK_SIZE, dtype="<i4").tobytes()
    true, false = HASHES[0], HASHES[0][:HASH_BYTES] + b"a lie".ljust(16)

    def send(block_hash: bytes | None, places: int) -> None:
        content = msgspec.msgpack.encode(Label(block_hash, b"", tokens)) if block_hash else b""
        events.changed(m.Changes(ONE, False, [0], true[:HASH_BYTES], [places], [content]))
        if repeat:
            events.publish_again()
            events._reactor.run()

    send(true, 3)
    assert {h for each in events.take() for h in hashes_in(each)} == {true}
    send(false, 1)
    said = events.take()
    assert {h for each in said if isinstance(each, Removed) for h in each.hashes} == {true}
    assert {h for each in said if not isinstance(each, Removed) for h in hashes_in(each)} == {false}
    send(None, 0)
    assert events.take() == [Removed(0, CPU, [false])]
    assert not events._claims and not events._published


def test_events_unencodable_label_loses_only_itself():
    world = World()
    world.store(3, labels=False)
    raws = world.events.describe(ONE, fake_request(TOKENS, HASHES), 0, range(3))
    raws[1] = (*raws[1][:4], (None, [object()]))
    world.events.send_labels(ONE, raws)
    assert {h for each in world.said() for h in hashes_in(each)} == {HASHES[0], HASHES[2]}


def with_extra(raws, *sizes):
    """Labels of about so many bytes."""
    return [(*raw[:4], (None, ["x" * size])) for raw, size in zip(raws, sizes, strict=True)]


def test_event_label_beyond_limit_is_dropped_and_logged(caplog):
    """Of blocks of thousands of tokens, as models with state layers have, or of many images."""
    world = World()
    world.store(5, labels=False)
    raws = world.events.describe(ONE, fake_request(TOKENS, HASHES), 0, range(5))
    world.events.send_labels(ONE, with_extra(raws, 9 << 10, m.MAX_LABEL - 500, m.MAX_LABEL, 2 * m.MAX_LABEL, 70_000))
    assert {h for each in world.said() for h in hashes_in(each)} == set(HASHES[:2])
    said = [record.getMessage() for record in caplog.records]
    assert [each.split()[1] for each in said] == ["1", "2"] and world.events.too_long == 3
    assert f"{m.MAX_LABEL} are possible" in said[0]


def test_event_labels_are_split_to_fit_frames():
    world, sent = World(), []
    world.wire.label = lambda namespace_id, groups, hashes, labels: sent.append(
        m.Labels(namespace_id, groups, hashes, labels)
    )
    raw = world.events.describe(ONE, fake_request(TOKENS, HASHES), 0, range(1))
    world.events.send_labels(ONE, with_extra(raw * 700, *[m.MAX_LABEL - 500] * 700))
    world.events.send_labels(ONE, raw * 2500)
    world.loop.run()
    assert all(len(m.encode(message)) < m.MAX_FRAME // 2 for message in sent)
    assert all(
        len(each.groups) * HASH_BYTES == len(each.hashes) and len(each.labels) == len(each.groups) for each in sent
    )
    counts = [len(each.labels) for each in sent]
    assert sum(counts) == 3200 and counts[-3:] == [1024, 1024, 452]


# -- events without readers ----------------------------------------------------------------------------------------


def test_events_after_reconnect_report_removed_blocks_when_idle():
    """As when the connection to the store ended and came again, and few blocks went meanwhile."""
    world = World()
    world.store(6)
    world.said()
    world.wire.lose()
    for slot in [each.slot for each in list(world.index._namespaces[ONE].tables[0].values())][5:]:
        assert world.index.discard(1, ONE, 0, HASHES[5][:HASH_BYTES], slot)
    world.wire.connect(world.changes)
    world.deliver()
    published, woken = [], []
    half = SimpleNamespace(
        _engine=SimpleNamespace(
            scheduler=SimpleNamespace(
                kv_cache_manager=SimpleNamespace(take_events=list),
                kv_event_publisher=SimpleNamespace(publish=published.append),
            ),
            wake=lambda: woken.append(True),
        ),
        _events=world.events,
        take_events=lambda: connector_scheduler_module.vllm_events.vllm_events(
            world.events.take(2), [("full_attention", None)]
        ),
    )
    for _ in range(5):
        KVTierConnectorScheduler._publish_idle(half)
    removed = [h for batch in published for event in batch.events for h in event.block_hashes]
    assert removed == [maybe_convert_block_hash(HASHES[5])] and not world.events.behind
    assert not woken or len(woken) < 5, "and sleeps at last"


def test_events_report_blocks_stored_without_lookup():
    """A decode engine takes an adapter's prompts from other engines, and never asks the store for them."""
    joined = []
    offloader = SimpleNamespace(
        _store=SimpleNamespace(namespace_id=lambda lora_fingerprint: b"of " + lora_fingerprint),
        _open={},
        _step=1,
        _keys=lambda: SimpleNamespace(of=lambda hashes, group, lora_fingerprint: []),
        events=SimpleNamespace(join=joined.append),
    )
    Offloader._batch(offloader, SimpleNamespace(cache_salt=None), b"an adapter")
    assert joined == [b"of an adapter"]


def test_event_label_is_sent_again_for_block_stored_again():
    """The engine does not know yet that the block is gone, and would think that the store has the label."""
    world = World()
    world.store(2)
    world.said()
    world.index.clear(None)
    jobs = StoreJobs(
        FakeStore([{0}], {0}), cache_groups([(4, None)]), Counters(), FakeReactor(), lambda message: None, lambda: None
    )
    table, hashes = Table([[7, 8]]), [each[:HASH_BYTES] for each in HASHES[:2]]
    items = [
        Item(table, 0, i, 7 + i, 0, ONE, h, b"\0" * HASH_BYTES, 0, world.events.label_of(ONE, 0, HASHES[i]))
        for i, h in enumerate(hashes)
    ]
    assert not world.events.describe(ONE, fake_request(TOKENS, HASHES), 0, range(2)), "as far as it knows"
    slots = world.index.reserve(1, ONE, b"", [0], hashes[0], b"\0" * HASH_BYTES, 1 << 30)
    reserved = m.Reserved(1, [*slots, m.EXISTS])
    answer = SimpleNamespace(outcome=reserved, session=1)
    jobs.reserved(Batch(ONE, b"", since=0, keys=lambda hashes, group: []), items, answer, "", world.events)
    world.deliver()
    world.index.commit(1, slots)
    [removed] = world.said()
    assert removed == Removed(0, CPU, [HASHES[1]]), "the other is there again before that was published"
    assert world.events.label_of(ONE, 0, HASHES[0]) is not None


# -- weights that change before anything was stored ------------------------------------------------------------------


def test_namespace_renewed_before_base_is_known_differs_later():
    """Weights are loaded into it in place, and its caches reset, before the first request."""
    namespaces, other = NamespaceIds(), NamespaceIds()
    namespaces.renew()
    assert not namespaces.base and namespaces.epoch == 1
    namespaces.base = other.base = b"of the plan"
    assert namespaces.of(b"") != other.of(b"")
    before = namespaces.of(b"an adapter")
    for _ in range(100):
        namespaces.renew()
    assert namespaces.of(b"an adapter") != before and len(namespaces.base) < 100, "it does not grow"
