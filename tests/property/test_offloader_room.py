"""Blocks pinned for copies: how many there may be, what becomes of the rest, and how they give way."""

import threading
import time

import offloader_fakes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offloader_harness import BLOCKS, GROUPS, HASH_BLOCK_SIZE, Engine, cached_states, flush, run, stored
from support import WITHOUT_SHRINKING

from vllm_kvtier.scheduler.offload import offloader, store_jobs
from vllm_kvtier.store.protocol import HASH_BYTES, Reserved


def test_offloader_pins_are_bounded_and_all_blocks_are_stored():
    engine = Engine(GROUPS["full"], 5, 0, share=0.1)
    r = engine.new_request([i % 7 for i in range(100)], 80)
    for _ in range(200):
        engine.step(every=1.1)
        engine.bounds()
        engine.settle_down()
    assert stored(engine, r) == list(range(25)) and lost(engine) == {}


def test_empty_step_unpins_blocks_only_where_they_are_lacking():
    """It comes before the output of the step that ends a prompt is read: that would wait for it."""
    engine = Engine(GROUPS["full"], 5, 0)
    [r] = computed(engine, 1, 40)
    flush(engine, r)
    engine.tier.answer(0, engine.full)
    engine.orders_end(engine.copy)
    pinned = engine.offloader.pinned
    assert engine.offloader.jobs.returned
    engine.offloader.begin_step(engine.step_number + 1, [], idle=True)
    assert engine.offloader.pinned == pinned
    engine.offloader.begin_step(engine.step_number + 2, [], needed=1, idle=True)
    assert engine.offloader.pinned < pinned


def lost(engine):
    """Blocks that are never stored, by reason."""
    counts = engine.counters.take()
    return {k.partition("|")[2]: n for k, n in counts.items() if k.startswith("stores_skipped|") and "already" not in k}


def computed(engine, count, tokens, salt=None):
    """So many requests, each computed to its end in steps of all of them."""
    requests = [engine.new_request([i * 100 + j for j in range(tokens)], tokens, salt) for i in range(1, count + 1)]
    while any(r.request.num_computed_tokens < tokens for r in requests):
        engine.step(every=1.1)
        engine.bounds()
    return requests


@pytest.mark.parametrize("groups", sorted(GROUPS))
@pytest.mark.parametrize("share", [0.05, 0.2])
def test_offloader_stores_all_blocks_of_ended_burst(groups, share):
    """Far more blocks than may be pinned at a time, and no copy ends before the last request has."""
    engine = Engine(GROUPS[groups], 5, 0, share=share)
    requests = computed(engine, 3, 8 * HASH_BLOCK_SIZE + 1)
    for r in requests:
        engine.finish(r, True)
    assert engine.offloader.pinned <= engine.most
    engine.settle_down()
    for r in requests:
        for g, group in enumerate(engine.groups):
            if not group.kind.by_position:
                assert set(cached_states(engine, r, g)) <= set(stored(engine, r, g))
                continue
            full = 8 * HASH_BLOCK_SIZE // group.block_tokens
            needed = group.num_skipped_blocks(8 * HASH_BLOCK_SIZE)
            assert set(range(needed, full)) <= set(stored(engine, r, g))
    assert lost(engine) == {} or groups != "full"
    engine.end()


def test_offloader_with_cache_of_two_steps_stores_all():
    """What a step makes is half of all blocks; the next step needs the other half while that is copied."""
    engine = Engine(GROUPS["full"], 5, 0, share=0.9, step_tokens=BLOCKS // 2 * HASH_BLOCK_SIZE)
    requests = []
    for n in range(1, 6):
        r = engine.new_request([n * 1000 + i for i in range(45 * HASH_BLOCK_SIZE + 1)], 45 * HASH_BLOCK_SIZE + 1)
        requests.append(r)
        for _ in range(100):
            engine.step(every=1.1)
            if r.request.num_computed_tokens == len(r.plan):
                break
        engine.finish(r, True)
        engine.settle_down()  # the link takes a step's blocks in less than a step
    assert [len(stored(engine, r)) for r in requests] == [45] * 5 and lost(engine) == {}


def test_offloader_splits_reservations_beyond_message_limit(monkeypatch):
    monkeypatch.setattr(store_jobs, "MAX_ITEMS", 7)
    monkeypatch.setattr(offloader_fakes, "MAX_ITEMS", 7)
    engine = Engine(GROUPS["full"], 5, 0)
    r = engine.new_request([i % 7 for i in range(81)], 81)
    run(engine, r)
    flush(engine, r)
    assert engine.offloader.pinned == 20
    engine.settle_down()
    assert stored(engine, r) == list(range(20))


def test_offloader_counts_block_evicted_before_store_once():
    """In each step what is needed of the beginning is offered again: that is not another block."""
    engine = Engine(GROUPS["full"], 5, 0, share=0.1)
    r = engine.new_request([i % 7 for i in range(102)], 80)
    run(engine, r, 200)
    engine.read_outputs()
    assert lost(engine) == {}
    engine.finish(r, True)
    assert lost(engine) == {}
    evict(engine, r, 20)
    engine.settle_down()
    assert stored(engine, r) == list(range(20)) and lost(engine) == {"inflight_limit": 5}


def evict(engine, r, first):
    """vLLM hands the blocks of this request from ``first`` on to another."""
    for h in r.request.block_hashes[first:]:
        block = engine.fake.cached[bytes(h), 0]
        engine.fake.take(block)
        engine.content[block] = [None] * len(engine.content[block])
        engine.give_back([block])


def test_offloader_forgets_evicted_blocks_of_ended_requests():
    engine = Engine(GROUPS["full"], 5, 0, share=0.03)
    requests = computed(engine, 12, 2 * HASH_BLOCK_SIZE + 1)
    for r in requests:
        engine.finish(r, True)
    assert len(engine.offloader._ended) > offloader.MIN_PRUNED_TABLES and engine.offloader.pinned == engine.most
    engine.fake.cached = {}
    for _ in range(2):
        engine.step()
    assert not engine.offloader._ended and sum(lost(engine).values()) == 24 - engine.most
    engine.settle_down()
    assert sum(len(stored(engine, r)) for r in requests) == engine.most


def test_offloader_without_a_store_looks_at_no_ended_request(monkeypatch):
    """Each step of an engine whose store is down looked at dozens of a thousand: 0.3 ms."""
    engine = Engine(GROUPS["full"], 5, 0, share=0.9)
    engine.tier.up = False
    (r,) = computed(engine, 1, 10 * HASH_BLOCK_SIZE + 1)
    engine.finish(r, True)
    assert engine.offloader._ended
    with monkeypatch.context() as patch:
        patch.setattr(engine.offloader, "_collect", lambda *table: pytest.fail("a request was looked at"))
        engine.step()
        engine.offloader.idle()
    engine.tier.up = True
    engine.settle_down()
    assert stored(engine, r) == list(range(10))


def test_offloader_idle_leaves_free_blocks_for_next_step():
    engine = Engine(GROUPS["full"], 5, 0, share=0.1, step_tokens=10 * HASH_BLOCK_SIZE)
    r, = computed(engine, 1, 30 * HASH_BLOCK_SIZE + 1)
    engine.finish(r, True)
    cached = set(engine.fake.cached.values())
    taken = [engine.fake.take(i) for i in engine.fake.free_ids() if i not in cached]
    engine.offloader.pinned, pinned = 0, engine.offloader.pinned
    assert len(engine.fake.free_ids()) == 20 and pinned == 10
    engine.offloader.idle()
    assert engine.offloader.pinned == 10 and len(engine.fake.free_ids()) == 10
    engine.offloader.pinned += pinned
    engine.give_back(taken)
    engine.settle_down()
    assert stored(engine, r) == list(range(30))


def test_offloader_waits_for_verification_before_pinning_cached_blocks():
    engine = Engine(GROUPS["full"], 5, 0, share=0.1)
    engine.offloader._unverified = lambda block_hash: True
    r, = computed(engine, 1, 30 * HASH_BLOCK_SIZE + 1)
    engine.finish(r, True)
    engine.settle_down()
    had = len(stored(engine, r))
    assert had < 30 and lost(engine) == {}
    engine.offloader._unverified = lambda block_hash: False
    engine.settle_down()
    assert stored(engine, r) == list(range(30))


def test_offloader_pins_states_beside_another_requests_unverified_load():
    """They were offered with a later block, when vLLM may have evicted them."""
    engine = Engine(GROUPS["states"], 5, 0, share=0.9, lot=16)
    engine.keeps = "last"
    length = 10 * HASH_BLOCK_SIZE + 1
    other, = computed(engine, 1, length)
    loading = set(map(bytes, other.request.block_hashes))
    engine.offloader._unverified = loading.__contains__
    r = engine.new_request(list(range(1000, 1006 + length)), length, None)
    while r.request.num_computed_tokens < length:
        engine.step(every=1.1)
    (state,) = cached_states(engine, r, 1)
    engine.fake.cached = {key: i for key, i in engine.fake.cached.items() if not key[1] or key[0] in loading}
    engine.offloader._unverified = lambda block_hash: False
    for each in (r, other):
        engine.finish(each, True)
    engine.settle_down()
    assert stored(engine, r, 1) == [state]


def test_offloader_reset_drops_blocks_of_old_namespace():
    engine = Engine(GROUPS["full"], 5, 0, share=0.1)
    r, = computed(engine, 1, 30 * HASH_BLOCK_SIZE + 1)
    engine.finish(r, True)
    engine.tier.namespace_id = lambda lora_fingerprint: b"another".ljust(HASH_BYTES)
    engine.settle_down()
    assert len(stored(engine, r)) == 10 and lost(engine) == {"inflight_limit": 20}


@pytest.mark.parametrize("groups", sorted(GROUPS))
@pytest.mark.parametrize("lag", [0, 1], ids=["", "asynchronous"])
@given(seed=st.integers(0, 1 << 32), share=st.sampled_from([0.05, 0.3, 0.9]))
@settings(max_examples=40, phases=WITHOUT_SHRINKING)
def test_offloader_successful_copies_store_all_blocks_still_cached(groups, lag, seed, share):
    """Whatever the order of steps, answers, copies, ends, preemptions and pressure: of each request that ended well and
    computed something, up to the first block that the store lacks and it computed vLLM has evicted some. What it found
    in the prefix cache the store may lack as well: it hears of that when it offers the next block, if that is there."""
    lot = (1, 3, 16)[seed % 3]
    engine = Engine(GROUPS[groups], seed, lag, share=share, step_tokens=2 * HASH_BLOCK_SIZE, oldest=True, lot=lot)
    events = {
        engine.step: 8, engine.new_request: 2, lambda: engine.finish(well=True): 1.2, engine.preempt: 0.5,
        engine.reactor.run: 6, lambda: engine.tier.asked and engine.tier.answer(0, engine.full): 6,
        lambda: engine.worker_acts(faults=0): 12,
        lambda: engine.offloader.cancel_for_requests(engine.rng.randint(1, 9)): 1,
    }  # fmt: skip
    for _ in range(300):
        engine.rng.choices(list(events), list(events.values()))[0]()
        engine.bounds()
    for r in list(engine.requests.values()):
        engine.finish(r, True)
    engine.settle_down()
    for r, written, step in engine.well:
        for g in engine.full:
            size = engine.groups[g][0]
            have, full = stored(engine, r, g), written // size
            assert have == list(range(len(have))), "a gap"
            if len(have) < full and r.hit < full * size:
                first = max(len(have), r.hit // size)
                names = [bytes(r.request.block_hashes[(i + 1) * size // HASH_BLOCK_SIZE - 1]) for i in range(first + 1)]
                there = [(h, g) in engine.fake.cached and engine.entered[h, g] <= step for h in names]
                assert not all(there), f"{len(have)} of {full}"
        for g in set(range(len(engine.groups))) - engine.full:
            # With room for hardly a block, a state that gave way to requests at its request's end may be left out.
            if not engine.groups[g].kind.by_position and share > 0.05:
                size, have = engine.groups[g].block_tokens, stored(engine, r, g)
                for i in cached_states(engine, r, g):
                    name = bytes(r.request.block_hashes[(i + 1) * size // HASH_BLOCK_SIZE - 1]), g
                    computed = engine.owners[name] is r and r.hit < (i + 1) * size <= written
                    assert i in have or not computed, f"state {i}"
    engine.end()


def test_offloader_reoffers_blocks_unpinned_for_requests():
    engine = Engine(GROUPS["full"], 5, 0)
    r = engine.new_request([i % 7 for i in range(40)], 8)
    engine.tier.up = True
    while r.request.num_computed_tokens < 24:
        engine.step(every=1.1)
        engine.offloader.cancel_for_requests(1)  # before anything was asked for
    engine.reactor.run()
    assert engine.offloader.pinned == 0 or engine.tier.asked
    run(engine, r)
    engine.read_outputs()
    engine.finish(r, True)
    engine.settle_down()
    assert stored(engine, r) == list(range(10))


def test_offloader_relieve_unpins_only_needed_blocks():
    engine = Engine(GROUPS["full"], 5, 0)
    for salt in (None, "tenant"):
        engine.new_request([5] * 12, 12, salt)
    while any(r.request.num_computed_tokens < 12 for r in engine.requests.values()):
        engine.step(every=1.1)
    assert not engine.tier.asked and engine.offloader.pinned == 6, "two tenants, two batches"
    engine.offloader.cancel_for_requests(1)
    assert engine.offloader.pinned == 6, "their requests use these blocks: letting go of them frees none"
    for r in list(engine.requests.values()):
        engine.release(r)
    engine.offloader._step += offloader.RECOUNT_AFTER_STEPS
    engine.offloader.cancel_for_requests(7)
    assert engine.offloader.pinned == 6, "not enough, whatever is given up"
    for pinned in (5, 4, 3, 2):
        engine.offloader.cancel_for_requests(1)
        assert engine.offloader.pinned == pinned, "block by block"
    engine.offloader.cancel_for_requests(0)
    assert engine.offloader.pinned == 2


def test_offloader_relieve_cancels_newest_copies_from_their_end():
    """What the workers have begun stays, and so does what is not needed; the rest is stored when it can be."""
    engine = Engine(GROUPS["full"], 5, 0)
    first, second = computed(engine, 2, 10 * HASH_BLOCK_SIZE + 1)
    for r in (first, second):
        engine.finish(r, True)
    engine.reactor.run()
    engine.tier.answer(0, engine.full)
    engine.reactor.run()
    assert engine.offloader.pinned == 20
    for rank in (0, 1):
        engine.copy(rank, engine.orders[rank][0], 3 + rank)
    engine.offloader.cancel_for_requests(6)
    engine.reactor.run()
    assert [engine.given[rank, 1] for rank in (0, 1)] == [[3, 14], [4, 14]]
    engine.offloader.cancel_for_requests(18)
    engine.reactor.run()
    engine.offloader.drain()
    assert engine.offloader.pinned == 0
    assert {len(stored(engine, first)), len(stored(engine, second))} == {3, 0}, "what both ranks had begun"
    engine.settle_down()
    assert stored(engine, first) == stored(engine, second) == list(range(10)) and lost(engine) == {}


@pytest.mark.parametrize("first", [True, False])
def test_offloader_block_dropped_by_a_rank_is_stored_before_later_ones(first):
    """It fails in the middle of the first of two orders, and the other rank copies both whole; that is known
    ``first``, or when the second has ended."""
    engine = Engine(GROUPS["full"], 5, 0)
    r = engine.new_request([i % 7 for i in range(60)], 60)
    for tokens in (20, 40):
        while r.request.num_computed_tokens < tokens:
            engine.step(every=1.1)
        flush(engine, r)
        while engine.tier.asked:
            engine.tier.answer(0, engine.full)
        engine.reactor.run()
    orders = list(engine.orders[0])
    assert len(orders) >= 2
    for order in orders:
        engine.copy(1, order)
    engine.copy(0, orders[0], 2)
    for order in orders[1:] if first else ():
        engine.copy(0, order)
    engine.fail(0, orders[0])
    for order in () if first else orders[1:]:
        engine.copy(0, order)
    engine.reactor.run()
    had = stored(engine, r)
    assert had == list(range(len(had))) and len(had) <= 2
    run(engine, r)
    engine.read_outputs()
    engine.finish(r, True)
    engine.settle_down()
    assert stored(engine, r) == list(range(15)) and lost(engine) == {}


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("times", [1, 9])
def test_offloader_retries_full_store_a_few_times(ends, times):
    """While its request runs and when it has ended; what is not offered again is counted."""
    engine = Engine(GROUPS["full"], 5, 0)
    r = engine.new_request([i % 7 for i in range(60)], 40)
    while r.request.num_computed_tokens < 40:
        engine.step(every=1.1)
    if ends:
        engine.finish(r, True)
    for _ in range(times):
        flush(engine, r)
        while engine.tier.asked:
            engine.tier.answer(0, engine.full, lambda: len(engine.tier.entries) < 6)
        engine.orders_end(engine.copy)
        engine.offloader.idle()
        engine.step(every=1.1)
    if not ends:
        run(engine, r)
        engine.finish(r, True)
    engine.settle_down()
    full = 10 if ends else 15
    assert stored(engine, r) == list(range(full if times == 1 else 6))
    assert sum(lost(engine).values()) == (0 if times == 1 else full - 6)


def test_offloader_retries_of_failing_copy_are_bounded():
    engine = Engine(GROUPS["full"], 5, 0)
    r, = computed(engine, 1, 10 * HASH_BLOCK_SIZE + 1)
    engine.finish(r, True)
    for _ in range(20):
        engine.reactor.run()
        while engine.tier.asked:
            engine.tier.answer(0, engine.full)
        engine.orders_end(engine.fail)
        engine.offloader.idle()
    assert not engine.offloader.pinned and len(engine.tier.items) == 10 * (1 + offloader.MAX_REWINDS)
    assert lost(engine) == {"copy_dropped": 10}


def test_offloader_retries_after_malformed_answers_are_bounded():
    engine = Engine(GROUPS["full"], 5, 0)
    r, = computed(engine, 1, 10 * HASH_BLOCK_SIZE + 1)
    engine.finish(r, True)
    asked = 0
    for _ in range(20):
        while engine.tier.asked:
            engine.tier.asked.pop()[0].resolve(Reserved(1, [5]))
            asked += 1
        engine.reactor.run()
        engine.offloader.idle()
    assert asked == 1 + offloader.MAX_REWINDS and not engine.offloader.pinned
    assert lost(engine) == {"malformed_answer": 10}


def test_offloader_stores_shared_block_after_other_request_failed():
    """Its content was on its way already when this one offered it."""
    engine = Engine(GROUPS["full"], 5, 0)
    first, second = (engine.new_request([9] * (4 * HASH_BLOCK_SIZE + 1), 4 * HASH_BLOCK_SIZE + 1) for _ in range(2))
    for r in (first, second):  # both of them compute it
        tokens = r.request.num_tokens
        engine.hit = lambda r: (0, [[]])
        while r.request.num_computed_tokens < tokens:
            engine.step(every=1.1)
    engine.finish(first, False)
    engine.finish(second, True)
    engine.reactor.run()
    while engine.tier.asked:
        engine.tier.answer(0, engine.full)
    engine.reactor.run()
    for rank in (0, 1):
        for order in list(engine.orders[rank]):
            engine.fail(rank, order, 0)
    engine.reactor.run()
    engine.settle_down()
    assert stored(engine, second) == list(range(4))


def test_offloader_settle_waits_for_copies_and_unpins_all():
    """vLLM resets its prefix cache right after, which fails if a block is held."""
    for seed in range(5):
        engine = Engine(GROUPS["full"], seed, 0)
        commit = engine.tier.commit
        # The other thread may lose the interpreter at any moment, here too.
        engine.tier.commit = lambda *args, commit=commit: (time.sleep(0.02), commit(*args))
        r = engine.new_request([i % 7 for i in range(40)], 40)
        run(engine, r)
        flush(engine, r)
        assert engine.offloader.pinned == 10

        def others(engine=engine):
            engine.tier.answer(0, engine.full)
            engine.orders_end(engine.copy)

        thread = threading.Thread(target=others)
        thread.start()
        engine.offloader.cancel_all(10.0)
        assert engine.offloader.pinned == 0
        thread.join()


def test_offloader_settle_returns_at_timeout():
    engine = Engine(GROUPS["full"], 0, 0)
    r = engine.new_request([i % 7 for i in range(40)], 40)
    run(engine, r)
    flush(engine, r)
    began = time.monotonic()
    engine.offloader.cancel_all(0.05)
    assert time.monotonic() - began < 2 and engine.offloader.pinned == 10, "the copies may still run"
    engine.end()


def test_offloader_copies_leave_blocks_for_next_part_of_running_prompt():
    """vLLM would preempt it: two blocks a running request are less than the next part of a prompt may need."""
    engine = Engine(GROUPS["full"], 5, 0, share=0.9, step_tokens=30 * HASH_BLOCK_SIZE)
    done = engine.new_request([1000 + i for i in range(40 * HASH_BLOCK_SIZE + 1)], 40 * HASH_BLOCK_SIZE + 1)
    run(engine, done)
    flush(engine, done)
    while engine.tier.asked:
        engine.tier.answer(0, engine.full)
    engine.reactor.run()
    engine.new_request([2000 + i for i in range(45 * HASH_BLOCK_SIZE)], 45 * HASH_BLOCK_SIZE)
    engine.rng.randint = lambda low, high: high  # tokens of a step: 5 * UNIT
    engine.step(every=1.1)
    engine.finish(done, False)
    taken = [engine.fake.take(i) for i in engine.fake.free_ids()[10:]]
    to_copy = lambda: sum(engine.given[0, order.order][1] for order in engine.orders[0])  # noqa: E731
    assert engine.offloader.pinned == 45 and to_copy() == 40
    engine.step(every=1.1)
    engine.reactor.run()
    engine.offloader.drain()
    free = len(engine.fake.free_ids())
    assert free < 30 and to_copy() == 15, "the others make it 30, and no more are given up"
    engine.give_back(taken)
    engine.end()


def test_offloader_failed_relieve_is_not_repeated_until_a_request_ends():
    engine = Engine(GROUPS["full"], 5, 0, share=0.5)
    requests = computed(engine, 2, 8 * HASH_BLOCK_SIZE + 1)
    looks = []
    pool = engine.offloader._pool
    real = pool.held_once
    pool.held_once = lambda ids, *most: looks.append(len(ids)) or real(ids, *most)
    assert engine.offloader.pinned == 16
    for _ in range(5):
        engine.offloader.cancel_for_requests(3)
    assert looks == [16], "running requests hold them all"
    engine.finish(requests[0], False)
    engine.offloader.cancel_for_requests(3)
    assert len(looks) > 1 and engine.offloader.pinned <= 16


def test_offloader_does_not_pin_again_what_a_waiting_request_needs():
    """It was cut for that request in the same step: pinned again in each step, it would never be free in vLLM's."""
    engine = Engine(GROUPS["full"], 5, 0)
    r, = computed(engine, 1, 3 * HASH_BLOCK_SIZE + 1)
    engine.new_request([7], 1)
    engine.finish(r, True)
    assert engine.offloader.pinned == 3 and not engine.tier.asked, "collected, and not reserved yet"
    engine.offloader.cancel_for_requests(3)
    needed = engine.fake.get_num_free_blocks()
    for step in range(1, 3 * offloader.RESERVE_AFTER_STEPS[0]):
        engine.offloader.begin_step(engine.step_number + step, [], needed)
        assert engine.fake.get_num_free_blocks() >= needed
    engine.offloader.begin_step(engine.step_number + step + 1, [])
    assert engine.offloader.pinned == 3, "served: they are offered again"
    engine.settle_down()
    assert stored(engine, r) == [0, 1, 2]
