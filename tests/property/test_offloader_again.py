"""What the store lost, or never got, or got too late, is offered again: what is of use, and not for ever."""

import gc
import weakref
from types import SimpleNamespace

import offloader_harness
import pytest
from offloader_harness import GROUPS, HASH_BLOCK_SIZE, Engine, cached_states, flush, run, stored
from support import make_request
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from vllm_kvtier.scheduler.offload import offloader
from vllm_kvtier.scheduler.offload.kv_events import Events
from vllm_kvtier.store.client import Failed
from vllm_kvtier.store.protocol import HASH_BYTES
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.wire import link as m


def test_offloader_reoffers_after_parent_was_lost():
    engine = Engine(GROUPS["full"], 1, 0)
    r = engine.new_request([i % 7 for i in range(60)], 24)
    for _ in range(6):
        engine.step(every=1.1)
    engine.settle_down()
    engine.tier.forget(set(engine.tier.items))
    assert stored(engine, r) == []
    for _ in range(100):  # it generates on
        engine.step(every=1.1)
        engine.settle_down()
    assert stored(engine, r) == list(range(15))


@pytest.mark.parametrize("groups", sorted(GROUPS))
def test_offloader_restarted_store_is_offered_all_blocks(groups):
    """With the next block that fills, as often as that happens; no refusal is needed for it."""
    engine = Engine(GROUPS[groups], 1, 0, share=1.0)
    r = engine.new_request([i % 7 for i in range(60 * HASH_BLOCK_SIZE)], 24)
    align = max(size for size, _ in engine.groups)
    for life in range(2 + offloader.MAX_REWINDS):
        engine.tier.die(f"s{life + 2}")
        engine.settle_down()
        for _ in range(10):
            engine.step(every=1.1)
        engine.tier.live()
        begun = r.request.num_computed_tokens
        while r.request.num_computed_tokens < begun + 2 * align:
            engine.step(every=1.1)
        flush(engine, r)
        engine.settle_down()
        for g, group in enumerate(engine.groups):
            if not group.kind.by_position:
                assert set(cached_states(engine, r, g)) <= set(stored(engine, r, g))
                continue
            full = r.request.num_computed_tokens // align * align // group.block_tokens
            needed = group.num_skipped_blocks(full * group.block_tokens)
            assert set(range(needed, full)) <= set(stored(engine, r, g)), f"group {g}: it could not be loaded"
    assert not any("parent_not_stored" in key for key in engine.counters.take())
    engine.end()


@pytest.mark.parametrize("ends", [False, True])
def test_store_request_lost_in_hung_store_is_offered_again(ends):
    """It comes back with what it had: no more than that is offered anew, also if the request ends just then."""
    engine = Engine(GROUPS["full"], 1, 0)
    r = engine.new_request([i % 7 for i in range(64)], 24)
    for at_least in (24, 36):
        while r.request.num_computed_tokens < at_least:
            engine.step(every=1.1)
        flush(engine, r)
        if at_least == 24:
            engine.settle_down()
    assert engine.tier.asked
    had = stored(engine, r)
    engine.tier.die(engine.tier.instance)
    engine.reactor.run()
    engine.tier.live()
    before = len(engine.tier.items)
    if ends:
        engine.step(every=1.1)
        engine.finish(r, True)
    else:
        run(engine, r)
        flush(engine, r)
    engine.settle_down()
    last = 9 if ends else 16
    assert 0 < len(had) < 9 and stored(engine, r) == list(range(last))
    assert len(engine.tier.items) - before == last - len(had)
    assert not any("parent_not_stored" in key for key in engine.counters.take())


def test_offloader_reoffers_to_forgetful_store_are_bounded():
    engine = Engine(GROUPS["full"], 1, 0)
    engine.new_request([i % 7 for i in range(40 * HASH_BLOCK_SIZE)], 4)
    for _ in range(40 * HASH_BLOCK_SIZE + 9):
        engine.step(every=1.1)
        engine.settle_down()
        engine.tier.forget(set(engine.tier.items))
    offered = len(engine.tier.items)
    assert offered <= 40 * (1 + offloader.MAX_REWINDS)


def test_offloader_lost_prefix_costs_one_rewind():
    """Several batches of a chain are under way when the first refusal comes."""
    engine = Engine(GROUPS["full"], 1, 0)
    r = engine.new_request([i % 7 for i in range(200)], 8)
    while r.request.num_computed_tokens < 8:
        engine.step(every=1.1)
    flush(engine, r)
    engine.settle_down()
    assert stored(engine, r) == [0, 1]
    engine.tier.forget(set(engine.tier.items))
    for _ in range(3 * offloader.RESERVE_AFTER_STEPS[1]):
        engine.step(every=1.1)
    engine.reactor.run()
    assert len(engine.tier.asked) >= 2
    table = engine.tables._tables[r.request.request_id]
    engine.settle_down()
    assert table.rewinds == 1


@pytest.mark.parametrize("window", [6, 9])
def test_offloader_late_store_gets_no_block_outside_the_window(window):
    """vLLM gave these up long ago; they are another request's by now."""
    engine = Engine([(HASH_BLOCK_SIZE, None), (HASH_BLOCK_SIZE, window)], 3, 0)
    engine.tier.die("s2")
    r = engine.new_request([i % 7 for i in range(60)], 30)
    while r.request.num_computed_tokens < 44:
        engine.step(every=1.1)
    other = engine.new_request([3] * 40, 39)  # takes what was given up
    engine.step(every=1.1)
    engine.tier.live()
    while r.request.num_computed_tokens < len(r.plan):
        engine.step(every=1.1)
        flush(engine, r)
        engine.settle_down()  # each copy compares the block with its hash
    assert stored(engine, r, 0) == list(range(15)) and stored(engine, r, 1)[-1] == 14
    assert engine.copies and other.request.num_computed_tokens


def of_adapter(engine):
    """A request of an adapter, which the offloader hears of when it ends."""
    r = engine.new_request([i % 7 for i in range(8 * HASH_BLOCK_SIZE)], 8 * HASH_BLOCK_SIZE - 1)
    r.request.lora_request = SimpleNamespace(lora_name="a", lora_path="")
    setattr(r.request, vr._LORA_FINGERPRINT, b"its files")
    begin = engine.offloader.begin_step
    engine.offloader.begin_step = lambda step, growth, **rest: begin(step, [])
    run(engine, r)
    assert not engine.tier.asked
    return r


@pytest.mark.parametrize("why", ["store gone", "too many"])
def test_offloader_adapter_blocks_are_offered_once(why):
    """What vLLM's prefix cache has under their hashes later may have been computed with its new weights."""
    engine = Engine(GROUPS["full"], 1, 0, share=0.04 if why == "too many" else 0.5)
    r = of_adapter(engine)
    engine.finish(r, True)
    engine.reactor.run()
    [(pending, items)] = engine.tier.asked
    assert len(items) == (4 if why == "too many" else 8) - (why != "too many")
    engine.tier.asked.clear()
    pending.resolve(Failed("gone"))
    for _ in range(3):
        engine.reactor.run()
        engine.offloader.idle()
    assert not engine.tier.asked and engine.offloader.pinned == 0 and not engine.offloader._ended
    assert sum(amount for name, amount in engine.counters.take().items() if name.startswith("stores_skipped")) == 7


def test_offloader_adapter_hit_blocks_are_offered_with_computed_ones():
    """The request that computed them may have been aborted, or still run: then nothing of them is stored."""
    engine = Engine(GROUPS["full"], 1, 0)
    r = of_adapter(engine)
    engine.tables._tables[r.request.request_id].offered = [3]
    engine.finish(r, True)
    engine.reactor.run()
    [(_, items)] = engine.tier.asked
    assert [item.hash for item in items] == [bytes(h)[:HASH_BYTES] for h in r.request.block_hashes[:7]]


def test_offloader_stores_current_chunk_when_first_store_comes_late():
    """A reader of four whole blocks needs the fourth, the first of its chunk; vLLM has freed those before it."""
    engine = Engine(GROUPS["chunks"], 1, 0, share=1.0)
    engine.tier.die("s1")
    r = engine.new_request([i % 7 for i in range(4 * HASH_BLOCK_SIZE + 3)], 4 * HASH_BLOCK_SIZE + 2)
    run(engine, r)
    engine.read_outputs()
    engine.finish(r, True)
    engine.tier.live()
    engine.settle_down()
    assert stored(engine, r, 1) == [0, 1, 2, 3] and 3 in stored(engine, r, 0)


@pytest.mark.parametrize("groups", ["states", "states alone"])
@pytest.mark.parametrize("ends", [False, True])
def test_offloader_late_store_gets_states_that_vllm_keeps(groups, ends):
    """A step names its states once, and the store's memory may be mapped after the first prompts."""
    engine = Engine(GROUPS[groups], 1, 0, share=1.0)
    engine.tier.die("s1")
    r = engine.new_request([i % 7 for i in range(64)], 30)
    while r.request.num_computed_tokens < 40:
        engine.step(every=1.1)
    if ends:
        engine.read_outputs()
        engine.finish(r, True)
    engine.tier.live()
    if not ends:
        run(engine, r)
        flush(engine, r)
    engine.settle_down()
    for g, group in enumerate(engine.groups):
        if not group.kind.by_position:
            last = 29 // group.block_tokens - 1
            assert last in cached_states(engine, r, g) and last in stored(engine, r, g)
    engine.end()


def test_offloader_conversation_stores_one_state_a_turn(monkeypatch):
    """Not one a step or a block: each prompt has the one before, its answer and something new."""
    monkeypatch.setattr(offloader_harness, "BLOCKS", 300)
    engine = Engine(GROUPS["states"], 4, 0, share=1.0)
    engine.keeps, turns, said = "last", 30, []
    for turn in range(turns):
        said = said + [turn * 9 + i for i in range(5 * HASH_BLOCK_SIZE)]
        r = engine.new_request(said + list(range(3 * HASH_BLOCK_SIZE)), len(said))
        run(engine, r, 1000)
        engine.read_outputs()
        engine.finish(r, True)
        engine.settle_down()
        said = r.plan
    for g in (1, 2):
        kept = [item for item in engine.tier.items.values() if item.group == g and item.outcome == "committed"]
        assert len(kept) == turns < len(said) // engine.groups[g].block_tokens


def test_offloader_keeps_little_of_an_ended_request():
    """While the store is down: not the pixels, nor the request itself. The blocks are stored from the copy, and their
    labels are as the request's own."""
    engine = Engine(GROUPS["full"], 1, 0)
    events = engine.offloader.events = Events(engine.groups, HASH_BLOCK_SIZE, engine.reactor, lambda: None)
    sent = []
    events.send_labels = lambda namespace_id, raws: sent.extend(raws)
    r = engine.new_request([1] * 33, 33, "tenant")
    pixels = Pixels()
    images = [
        MultiModalFeatureSpec(pixels, "image", name, PlaceholderRange(offset=offset, length=6))
        for name, offset in (("cat", 1), ("dog", 14))
    ]
    name = r.request.request_id
    r.request = r.tracked.request = make_request(name, r.plan, HASH_BLOCK_SIZE, salt="tenant", media=images)
    for i, h in enumerate(r.request.block_hashes):
        engine.meaning[bytes(h)[:HASH_BYTES]] = bytes(h), ("tenant", *r.plan[: (i + 1) * HASH_BLOCK_SIZE])
    engine.tier.die("s2")
    while r.request.num_computed_tokens < 33:
        engine.step(every=1.1)
    expected = events.describe(b"space".ljust(HASH_BYTES), r.request, 0, range(8))
    assert [keys for *_, (_, keys) in expected][:3] == [[("cat", 1), "tenant"], [("cat", -3)], None]
    engine.finish(r, True)
    engine.settle_down()
    hashes = [bytes(h)[:HASH_BYTES] for h in r.request.block_hashes]
    gone = weakref.ref(r.request), weakref.ref(pixels)
    engine.well.clear()
    engine.owners.clear()
    del r, pixels, images
    gc.collect()
    assert [each() for each in gone] == [None, None]
    engine.tier.live()
    engine.settle_down()
    assert [item.hash for item in engine.tier.items.values() if item.outcome == "committed"] == hashes
    assert sent == expected and not engine.offloader._ended and not engine.offloader._ended_tokens


class Pixels:
    """Of an image."""


def test_offloader_blocks_of_embeddings_are_offered_once():
    engine = Engine(GROUPS["full"], 1, 0)
    engine.tier.die("s2")
    r = engine.new_request([1] * 33, 33)
    r.request.prompt_embeds = Pixels()
    while r.request.num_computed_tokens < 33:
        engine.step(every=1.1)
    engine.finish(r, True)
    engine.tier.live()
    engine.settle_down()
    assert stored(engine, r) == [] and not engine.offloader._ended
    assert engine.counters.take() == {"stores_skipped|store_unavailable": 8}


def test_time_with_stores_is_that_of_the_ranks_that_write_not_their_sum():
    """With eight ranks it was eight seconds a second."""
    engine = Engine(GROUPS["full"], 1, 0)
    engine.tier.writers = [{0, 1, 2, 3}, {1, 2, 3, 4}]
    for rank in range(5):
        engine.offloader.jobs.stored(m.Stored(rank, [], [], 1000, 2.0))
    assert engine.counters.take()["store_seconds"] == pytest.approx(2.0)


def test_offloader_tokens_of_ended_requests_are_bounded(monkeypatch):
    monkeypatch.setattr(offloader, "MAX_ENDED_TOKENS", 80)
    engine = Engine(GROUPS["full"], 1, 0)
    engine.tier.die("s2")
    for n in range(6):
        r = engine.new_request([n * 100 + i for i in range(33)], 33)
        while r.request.num_computed_tokens < 33:
            engine.step(every=1.1)
        engine.finish(r, True)
        assert engine.offloader._ended_tokens == sum(t.ended for t in engine.offloader._ended.values()) <= 80
    assert len(engine.offloader._ended) == 2 and engine.counters.take() == {"stores_skipped|store_unavailable": 32}
    engine.tier.live()
    engine.settle_down()
    assert stored(engine, r) == list(range(8)) and not engine.offloader._ended_tokens
