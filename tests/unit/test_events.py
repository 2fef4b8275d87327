"""KV events of tiers: what is published of blocks, in vLLM's format, and by which engine; small cases, one promise
each."""

import hashlib
import random
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from events_model import FakeTier, Loop, Router, Wire, fake_request
from support import Clock, make_request
from tier_fakes import make_tier
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash

from vllm_kvtier.scheduler.offload import kv_events as kv_events_module
from vllm_kvtier.scheduler.offload.kv_events import Events
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.index.index import HASH_BYTES, Index
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.store.server import event_feed as event_feed_module
from vllm_kvtier.store.server.event_feed import EventFeed
from vllm_kvtier.telemetry.events import PLACES, Label, Removed, Stored
from vllm_kvtier.vllm_compat import kv_events as vllm_events
from vllm_kvtier.vllm_compat import requests as vr

HASH_BLOCK_SIZE = 4
ONE, OTHER = b"1" * HASH_BYTES, b"2" * HASH_BYTES
TOKENS = list(range(6 * HASH_BLOCK_SIZE))
HASHES = []
for at in range(0, len(TOKENS), HASH_BLOCK_SIZE):
    HASHES.append(hashlib.sha256((HASHES[-1] if HASHES else b"") + bytes(TOKENS[at : at + HASH_BLOCK_SIZE])).digest())
CPU, DISK, BUCKET, CLUSTER = PLACES
EVENT_GROUPS = [(0, "full_attention", None)]


class World:
    """One engine and a store of one group, and everything delivered at once."""

    def __init__(self, tiers=("disk", "object"), label_bytes=1 << 20):
        self.loop, self.woken = Loop(), 0
        self.events = Events([(HASH_BLOCK_SIZE, None)], HASH_BLOCK_SIZE, self.loop, self.wake)
        self.events.join(ONE)
        self.index = Index(SlotPool(100, 100), None, Clock())
        self.index.grow(100)
        self.tiers = {name: FakeTier(name) for name in tiers}
        self.wire = Wire(1, self.events, list(tiers))
        self.changes = EventFeed(
            self.index,
            list(self.tiers.values()),
            lambda number, message: self.wire.to_engine.append(m.encode(message)),
            self.loop.call_soon,
            label_bytes,
        )
        self.index.connect(1, HASH_BLOCK_SIZE, [m.GroupShape(1, 1)])
        self.wire.connect(self.changes)
        self.deliver()

    def wake(self):
        self.woken += 1

    def deliver(self):
        self.loop.run()
        while self.wire.deliver_to_store() | self.wire.deliver_to_engine():
            self.loop.run()

    def store(self, count, namespace_id=ONE, first=0, labels=True):
        parents = [b"\0" * HASH_BYTES, *(each[:HASH_BYTES] for each in HASHES)]
        hashes = b"".join(each[:HASH_BYTES] for each in HASHES[first:count])
        slots = self.index.reserve(
            1, namespace_id, b"", [0] * (count - first), hashes, b"".join(parents[first:count]), 1 << 30
        )
        if labels:
            self.label(count, namespace_id, first)
        self.index.commit(1, [slot for slot in slots if slot > 0])

    def label(self, count, namespace_id=ONE, first=0):
        rows = range(first, count)
        self.events.send_labels(namespace_id, self.events.describe(namespace_id, fake_request(TOKENS, HASHES), 0, rows))

    def said(self):
        self.deliver()
        return self.events.take(1000)


def hashes_in(said):
    return [label.hash for label in said.labels]


def test_events_keep_block_metadata_once():
    """An engine knows of each block in the store: some hundred thousand, where each byte counts."""
    world = World()
    world.store(3)
    world.said()
    view, told = world.events._view[ONE], world.events._published
    labels = [view[0, each[:HASH_BYTES]][1] for each in HASHES[:3]]
    assert all(label.parent is before.hash for before, label in zip(labels, labels[1:], strict=False))
    assert all(told[ONE, key] is known for key, known in view.items())


# -- what is published ---------------------------------------------------------------------------------------------


def test_consecutive_stored_blocks_are_one_event():
    world = World()
    world.store(4)
    [stored] = world.said()
    assert (stored.place, hashes_in(stored)) == (CPU, HASHES[:4])
    world.store(6)
    [stored] = world.said()
    assert hashes_in(stored) == HASHES[4:] and stored.labels[0].parent == HASHES[3]
    assert not world.said()


def test_events_wake_idle_engine_once():
    world = World()
    world.store(6)
    world.deliver()
    assert world.woken == 1
    assert len(world.events.take(2)[0].labels) == 2
    assert len(world.events.take(100)[0].labels) == 4 and not world.events.take(100)
    world.index.clear(None)
    world.deliver()
    assert world.woken == 2


def test_events_name_each_tier_of_a_block():
    world = World()
    world.store(1)
    world.said()
    name = ONE, 0, HASHES[0][:HASH_BYTES]
    for tier, place in (("disk", DISK), ("object", BUCKET)):
        world.tiers[tier].put(name)
        [stored] = world.said()
        assert (type(stored), stored.place) == (Stored, place)
    world.index.clear(None)  # of the memory
    assert world.said() == [Removed(0, CPU, [HASHES[0]])]
    # It is in storage still, which a reader that ignores localities must get again.
    world.tiers["disk"].lose(name)
    removed, stored = world.said()
    assert removed == Removed(0, DISK, [HASHES[0]]) and (stored.place, hashes_in(stored)) == (BUCKET, HASHES[:1])
    world.tiers["object"].lose(name)
    assert world.said() == [Removed(0, BUCKET, [HASHES[0]])]
    assert world.changes.labelled == (0, 0)


def test_events_name_the_cluster_beside_storage():
    """Its medium is its own: a reader without localities takes neither for the other."""
    world = World(tiers=("disk", "mooncake", "object"))
    world.store(1)
    world.said()
    name = ONE, 0, HASHES[0][:HASH_BYTES]
    for tier, place in (("mooncake", CLUSTER), ("object", BUCKET)):
        world.tiers[tier].put(name)
        [stored] = world.said()
        assert (stored.place, hashes_in(stored)) == (place, HASHES[:1])
    world.index.clear(None)
    assert world.said() == [Removed(0, CPU, [HASHES[0]])]
    world.tiers["object"].lose(name)
    assert world.said() == [Removed(0, BUCKET, [HASHES[0]])]
    world.tiers["mooncake"].turn(False)
    assert world.said() == [Removed(0, CLUSTER, [HASHES[0]])]
    world.tiers["mooncake"].turn(True)
    assert [(each.place, hashes_in(each)) for each in world.said()] == [(CLUSTER, HASHES[:1])]
    world.tiers["mooncake"].lose(name)
    assert world.said() == [Removed(0, CLUSTER, [HASHES[0]])] and world.changes.labelled == (0, 0)


@pytest.mark.parametrize("comes_back", [0, 1, 2])
def test_events_of_the_only_tier_come_back_with_it(comes_back):
    """Its blocks have left memory. It lacks some when it can be used again; nothing is kept of those."""
    world = World()
    world.store(3)
    names = [(ONE, 0, each[:HASH_BYTES]) for each in HASHES[:3]]
    for name in names[:2]:
        world.tiers["disk"].put(name)
    world.index.clear(None)
    world.said()
    world.tiers["disk"].turn(False)
    [removed] = world.said()
    assert removed == Removed(0, DISK, HASHES[:2]) and world.changes.labelled[0] == 2
    world.tiers["object"].turn(False)
    assert world.said() == [] and world.changes.labelled[0] == 2
    world.tiers["disk"].kept = set(names[:comes_back])
    world.tiers["disk"].turn(True)
    found = [(each.place, hashes_in(each)) for each in world.said()]
    assert found == ([(DISK, HASHES[:comes_back])] if comes_back else []) and world.changes.labelled[0] == comes_back


def test_events_of_unavailable_tier_remove_its_blocks():
    world = World()
    world.store(3)
    for each in HASHES[:3]:
        world.tiers["disk"].put((ONE, 0, each[:HASH_BYTES]))
    world.said()
    world.tiers["disk"].turn(False)
    [removed] = world.said()
    assert removed.place == DISK and set(removed.hashes) == set(HASHES[:3])
    world.tiers["disk"].turn(True)
    assert [(each.place, hashes_in(each)) for each in world.said()] == [(DISK, HASHES[:3])]


def test_events_of_blocks_stored_and_removed_before_send_are_dropped():
    world = World()
    world.store(5)
    world.deliver()
    world.index.clear(None)
    assert not world.said()


def test_unwritten_blocks_send_no_event():
    world = World()
    slots = world.index.reserve(1, ONE, b"", [0], HASHES[0][:HASH_BYTES], b"\0" * HASH_BYTES, 1 << 30)
    world.label(1)
    assert not world.said()
    world.index.commit(1, slots)
    assert [hashes_in(each) for each in world.said()] == [HASHES[:1]]


def test_events_of_hash_in_two_namespaces_remove_it_with_the_last():
    """As when an engine with new weights stores the same prompts in its new space."""
    world = World()
    world.store(2)
    world.events.join(OTHER)
    world.deliver()
    world.store(2, OTHER)
    assert [hashes_in(each) for each in world.said()] == [HASHES[:2]], "once"
    world.index.clear(ONE)
    assert not world.said(), "the other has them"
    world.index.clear(OTHER)
    [removed] = world.said()
    assert sorted(removed.hashes) == sorted(HASHES[:2])


def test_events_after_store_death_remove_all_and_resend_on_reconnect():
    world = World()
    world.store(4)
    world.said()
    world.wire.lose()
    removed = [each for _ in range(2) for each in world.events.take(2)]
    assert [each.place for each in removed] == [CPU, CPU] and not world.events.take()
    assert sorted(h for each in removed for h in each.hashes) == sorted(HASHES[:4])
    world.wire.connect(world.changes)
    [stored] = world.said()
    assert sorted(hashes_in(stored)) == sorted(HASHES[:4])


def test_events_after_leaving_namespaces_remove_their_blocks():
    world = World()
    world.store(4)
    world.said()
    world.events.leave()
    world.events.join(OTHER)
    [removed] = world.said()
    assert sorted(removed.hashes) == sorted(HASHES[:4])
    world.store(5)
    assert not world.said(), "no engine here can load it"
    world.events.leave()
    world.events.join(ONE)
    world.deliver()
    assert {h for each in world.said() for h in hashes_in(each)} == set(HASHES[:4]), "the fifth has no label"


def test_events_of_a_new_adapter_replace_those_of_one_that_is_not_used(monkeypatch):
    """Each adapter is a namespace, and so is each version of its files: in weeks there are more than are followed."""
    monkeypatch.setattr(kv_events_module, "MAX_FOLLOWED", 2)
    monkeypatch.setattr(kv_events_module.time, "monotonic", clock := Clock())
    world, third = World(), b"T" * HASH_BYTES

    def published():
        world.said()
        return sorted((name, group) for name, (group, _) in world.events._published)

    for name in (ONE, OTHER, third):
        world.events.join(name)
        world.store(2, name)
        world.deliver()
    assert published() == [(ONE, 0)] * 2 + [(OTHER, 0)] * 2, "both others are in use"
    for unused, other in ((OTHER, third), (third, OTHER)):
        clock.now += kv_events_module.UNUSED_SECONDS + 1
        world.events.join(ONE)
        world.events.join(other)
        world.deliver()
        world.label(2, other)
        assert published() == sorted([(ONE, 0)] * 2 + [(other, 0)] * 2)
        world.events.join(unused)
        assert published() == sorted([(ONE, 0)] * 2 + [(other, 0)] * 2), "both others are in use"


def test_blocks_cleared_by_vllm_are_reported_again():
    world = World()
    world.store(3)
    taken, strict, lax = world.said(), Router(), Router(clears=False)
    for router in (strict, lax):
        router.said(taken)
        router.hear([AllBlocksCleared()])
    world.events.publish_again()
    world.deliver()
    again = [each for _ in range(2) for each in world.events.take(2)]
    for router in (strict, lax):
        router.said(again)
        assert router.blocks("CPU", "LOCAL") == {(each, 0) for each in HASHES[:3]}
    world.index.clear(None)
    gone = world.said()
    strict.said(gone)
    assert not strict.blocks("CPU", "LOCAL")


def test_blocks_cleared_while_the_store_connects_again_are_reported_again():
    """The view is gone, and back before any process compared it with what was published: nothing has changed."""
    world, router = World(), Router()
    world.store(3)
    router.said(world.said())
    world.wire.lose()
    world.index.disconnect(1)
    world.index.connect(1, HASH_BLOCK_SIZE, [m.GroupShape(1, 1)])
    world.wire.connect(world.changes)
    router.hear([AllBlocksCleared()])
    world.events.publish_again()
    router.said(world.said())
    assert router.blocks("CPU", "LOCAL") == {(each, 0) for each in HASHES[:3]}


# -- labels ----------------------------------------------------------------------------------------------------------


def test_blocks_stored_without_label_are_reported_once_labelled():
    """By an engine that publishes nothing, or before the store was started anew with a disk."""
    world = World()
    world.store(3, labels=False)
    world.tiers["disk"].put((ONE, 0, HASHES[4][:HASH_BYTES]))
    assert not world.said()
    world.events.loaded(ONE, fake_request(TOKENS, HASHES), 0, 5 * HASH_BLOCK_SIZE)
    assert {(each.place, *hashes_in(each)) for each in world.said()} == {(CPU, *HASHES[:3]), (DISK, HASHES[4])}
    assert not world.events.describe(ONE, fake_request(TOKENS, HASHES), 0, range(3)), "the store knows them"


def test_event_labels_are_bounded_and_oldest_evicted():
    world = World(label_bytes=1500)
    world.store(6)
    world.deliver()
    count, nbytes = world.changes.labelled
    assert 0 < count < 6 and nbytes <= 1500
    said = world.said()
    assert {h for each in said for h in hashes_in(each)} == set(HASHES[6 - count :])


@pytest.mark.parametrize("fault", ["nonsense", "another hash", "too few tokens", "a number"])
def test_events_with_malformed_label_are_not_sent(fault):
    """Some other process made it."""
    world = World()
    tokens = np.arange(HASH_BLOCK_SIZE, dtype="<i4").tobytes()
    content = {
        "nonsense": b"\xc1 nonsense",
        "another hash": msgspec.msgpack.encode(Label(HASHES[1], b"", tokens)),
        "too few tokens": msgspec.msgpack.encode(Label(HASHES[0], b"", tokens[:-4])),
        "a number": msgspec.msgpack.encode(7),
    }[fault]
    world.store(1, labels=False)
    world.wire.label(ONE, [0], HASHES[0][:HASH_BYTES], [content])
    assert not world.said()
    world.index.clear(None)
    assert not world.said()


def test_event_labels_of_long_prompt_are_sent_in_parts(monkeypatch):
    monkeypatch.setattr(kv_events_module, "MAX_LABELS", 2)
    world = World()
    world.store(5)
    assert [hashes_in(each) for each in world.said()] == [HASHES[:5]]


# -- in vLLM's words ---------------------------------------------------------------------------------------------------


def test_event_labels_of_aborted_blocks_are_dropped(monkeypatch):
    """Their reservations were aborted, which is not published."""
    monkeypatch.setattr(event_feed_module, "MAX_AWAITED_LABELS", 2)
    world = World()
    for count in range(1, 7):
        slots = world.index.reserve(1, ONE, b"", [0], HASHES[count - 1][:HASH_BYTES], b"\0" * HASH_BYTES, 1 << 30)
        world.label(count, first=count - 1)
        world.deliver()
        world.index.abort(1, slots)
    assert world.changes.labelled[0] <= 3 and not world.said()


@pytest.mark.parametrize("integers", [False, True])
def test_events_are_decoded_by_vllm(monkeypatch, integers):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(integers)))
    world = World()
    world.store(3)
    stored = world.said()
    world.index.clear(None)
    events = vllm_events.vllm_events([*stored, *world.said()], EVENT_GROUPS)
    batch = msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=events))
    first, second = msgspec.msgpack.Decoder(KVEventBatch).decode(batch).events
    named = [maybe_convert_block_hash(each) for each in HASHES[:3]]
    assert all(isinstance(each, int if integers else bytes) for each in named)
    assert isinstance(first, BlockStored) and first.block_hashes == named and first.parent_block_hash is None
    assert (first.medium, first.block_size, first.token_ids, first.group_idx) == (
        "CPU",
        HASH_BLOCK_SIZE,
        TOKENS[: 3 * HASH_BLOCK_SIZE],
        0,
    )
    assert (first.kv_cache_spec_kind, first.extra_keys) == ("full_attention", [None] * 3)
    later = World()
    later.store(2)
    later.said()
    later.store(3)
    [event] = vllm_events.vllm_events(later.said(), EVENT_GROUPS)
    assert (event.block_hashes, event.parent_block_hash) == (named[2:], named[1])
    assert isinstance(second, BlockRemoved) and set(second.block_hashes) == set(named)
    assert (second.medium, second.group_idx) == ("CPU", 0)
    if "locality" in BlockStored.__struct_fields__:
        assert first.locality == second.locality == "LOCAL"


def test_events_for_older_vllm_have_no_locality(monkeypatch):
    older = msgspec.defstruct("BlockRemoved", ["block_hashes", "medium", "group_idx"])
    monkeypatch.setattr("vllm.distributed.kv_events.BlockRemoved", older)
    [event] = vllm_events.vllm_events([Removed(0, DISK, [HASHES[0]])], EVENT_GROUPS)
    assert (event.medium, getattr(event, "locality", None)) == ("STORAGE", None)


def test_events_include_extra_keys_as_on_the_gpu():
    """A salt is in the first block's event, an adapter in each."""
    salted = make_request("r", TOKENS, HASH_BLOCK_SIZE, salt="a tenant")
    blocks = [(0, HASH_BLOCK_SIZE), (HASH_BLOCK_SIZE, 2 * HASH_BLOCK_SIZE)]
    assert list(vr.event_keys(salted, blocks)) == [(None, ["a tenant"]), (None, None)]
    salted.lora_request = SimpleNamespace(lora_name="poet", lora_path="", adapter_id=3)
    [(lora_name, extra)] = vr.event_keys(salted, blocks[1:])
    assert lora_name == "poet" and extra[0] == "poet"
    label = Label(HASHES[0], b"", bytes(4 * HASH_BLOCK_SIZE), "poet", ["poet", "a tenant"])
    [event] = vllm_events.vllm_events([Stored(0, CPU, [label])], EVENT_GROUPS)
    assert (event.lora_name, event.extra_keys) == ("poet", [("poet", "a tenant")])
    assert event.lora_id is None, "another engine of the store has another adapter of that number"


class Counted(list):
    """How often one was looked at."""

    looks = 0

    def __getitem__(self, at):
        self.looks += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("step", [1, 3])
def test_event_extra_keys_of_media_are_computed_in_one_pass(step):
    """Some within a block, some over many, some right behind one another; all blocks of a request, or every third."""
    rng, media, at = random.Random(step), Counted(), 0
    while len(media) < 400:
        length = rng.choice((1, HASH_BLOCK_SIZE, 9 * HASH_BLOCK_SIZE + 1))
        at += rng.choice((0, 1, 5 * HASH_BLOCK_SIZE))
        media.append(
            SimpleNamespace(identifier=f"{at}", mm_position=SimpleNamespace(offset=at, length=length))
        )
        at += length
    request = fake_request(
        list(range(at + 5 * HASH_BLOCK_SIZE)), [bytes([n % 256]) * 32 for n in range(at // HASH_BLOCK_SIZE + 5)]
    )
    request.mm_features = media
    rows = range(0, at // HASH_BLOCK_SIZE + 5, step)
    wanted = []
    for i in rows:
        keys, _ = generate_block_hash_extra_keys(request, i * HASH_BLOCK_SIZE, (i + 1) * HASH_BLOCK_SIZE, 0)
        if keys is not None and hasattr(kv_cache_utils, "to_event_extra_keys"):
            [keys] = kv_cache_utils.to_event_extra_keys([keys])
        wanted.append(None if keys is None else list(keys))
    media.looks = 0
    raws = World().events.describe(ONE, request, 0, rows)
    assert [keys for *_, (_, keys) in raws] == wanted and any(wanted)
    assert media.looks <= len(media) + 4 * len(rows)


def test_events_published_when_idle_include_those_of_vllm():
    published = []
    scheduler = SimpleNamespace(
        kv_cache_manager=SimpleNamespace(take_events=lambda: [AllBlocksCleared()]),
        kv_event_publisher=SimpleNamespace(publish=published.append),
    )
    vllm_events.publish(scheduler, [BlockRemoved(block_hashes=[1], medium="CPU")])
    [batch] = published
    assert [type(each) for each in batch.events] == [AllBlocksCleared, BlockRemoved], "what clears goes first"


@pytest.mark.parametrize("config, wanted", [(None, False), (False, False), (True, True)])
def test_events_are_off_without_vllm_option(config, wanted):
    given = None if config is None else SimpleNamespace(enable_kv_cache_events=config)
    assert vllm_events.enabled(SimpleNamespace(kv_events_config=given)) is wanted


# -- in the engine's tier ----------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self):
        self.joined, self.seen, self.left = [], [], 0

    def join(self, namespace_id):
        self.joined.append(namespace_id)

    def leave(self):
        self.left += 1

    def store_changed(self, client, reachable):
        self.seen.append((client.connected, reachable))


def test_node_store_source_reports_namespaces_and_connection_to_events():
    recorder = Recorder()
    made = make_tier([(16, None)], hash_block_size=16, connect=False, events=recorder)
    tier = made.tier
    assert recorder.joined == [tier.namespace_id(b"")]
    recorder.joined.clear()
    made.client.connect("life 1")
    assert recorder.seen == [(True, False)], "the workers have not mapped its memory yet"
    from vllm_kvtier.wire import link as wire

    tier.reached(wire.PoolReady(0, "life 1", 1 << 30))
    assert recorder.seen[-1] == (True, True)
    tier.ask(0, [bytes(32)], b"")
    tier.ask(0, [bytes(32)], b"a" * 16)
    assert recorder.joined == [tier.namespace_id(b""), tier.namespace_id(b"a" * 16)]
    tier.renew()
    assert recorder.left == 1 and recorder.joined[-1] == tier.namespace_id(b"")
    made.client.lose()
    assert recorder.seen[-1] == (False, False)


def test_events_without_subscriber_are_not_built():
    """No message, no label, no reader of the index."""
    made = make_tier([(16, None)], hash_block_size=16)
    assert made.tier.events is None
    made.tier.ask(0, [bytes(32)], b"")
    made.tier.renew()
    assert [message for message, _ in made.client.told] == ["leave"]
    index = Index(SlotPool(100, 100), None, Clock())
    changes = EventFeed(index, [FakeTier("disk")], lambda *_: pytest.fail("there is no reader"), lambda call: call())
    assert index.watches == [] and changes.labelled == (0, 0)
