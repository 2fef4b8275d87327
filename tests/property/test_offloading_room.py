"""Blocks pinned for copies: how many there may be, what becomes of the rest, and how they give way."""

import threading
import time

import pytest
from offloading_world import GROUPS, Engine, flush, run, stored

from vllm_kvtier.scheduler.tables import Growth

TOO_MANY = "not_stored|too many copies under way"


def test_pins_are_bounded_and_the_rest_follows():
    engine = Engine(GROUPS["full"], 5, 0, share=0.1)
    r = engine.new_request([i % 7 for i in range(100)], 80)
    for _ in range(200):
        engine.step(every=1.1)
        engine.bounds()
        engine.settle_down()
        if stored(engine, r) == list(range(25)):
            break
    else:
        # What was left when it had all its blocks goes when it ends, as far as there is room then.
        assert stored(engine, r) == list(range(len(stored(engine, r)))) != []


@pytest.mark.parametrize("groups", ["full", "windows"])
def test_what_finds_no_room_is_counted_once_if_it_is_never_stored(groups):
    """In each step what is needed of the beginning is offered again: that is not another block. A window's is not: by
    then it may be another request's."""
    engine = Engine(GROUPS[groups], 5, 0, share=0.1)
    r = engine.new_request([i % 7 for i in range(102)], 80)
    run(engine, r, 200)
    engine.read_outputs()
    early = engine.counters.take().get(TOO_MANY, 0)
    assert early == sum(25 - collected(engine, g) for g in range(len(GROUPS[groups])) if g not in engine.full)
    engine.finish(r, True)
    refused = early + engine.counters.take()[TOO_MANY]
    engine.settle_down()
    assert refused == sum(25 - len(stored(engine, r, g)) for g in range(len(GROUPS[groups])))
    assert stored(engine, r)


def collected(engine, g):
    """Blocks of the group that were collected and not asked for yet, or asked for and not answered."""
    asked = sum(item.group == g for _, items in engine.tier.asked for item in items)
    return asked + sum(batch.groups.count(g) for batch in engine.offloader._open.values())


def test_what_finds_room_later_is_not_counted():
    engine = Engine(GROUPS["full"], 5, 0, share=0.1)
    r = engine.new_request([i % 7 for i in range(102)], 80)
    run(engine, r, 200)
    engine.read_outputs()
    while len(stored(engine, r)) < 25 - engine.most:
        engine.offloader.begin_step(99, [Growth(r.tracked, engine.tables._tables[r.request.request_id], 100)])
        flush(engine, r)
        engine.settle_down()
    engine.finish(r, True)
    engine.settle_down()
    assert stored(engine, r) == list(range(25)) and TOO_MANY not in engine.counters.take()


def test_what_gives_way_to_requests_is_offered_again():
    engine = Engine(GROUPS["full"], 5, 0)
    r = engine.new_request([i % 7 for i in range(40)], 8)
    engine.tier.up = True
    while r.request.num_computed_tokens < 24:
        engine.step(every=1.1)
        engine.offloader.relieve(1)  # before anything was asked for
    assert engine.offloader.pinned == 0 or engine.tier.asked
    run(engine, r)
    engine.read_outputs()
    engine.finish(r, True)
    engine.settle_down()
    assert stored(engine, r) == list(range(10))


def test_relieve_gives_up_no_more_than_is_needed():
    engine = Engine(GROUPS["full"], 5, 0)
    for salt in (None, "tenant"):
        engine.new_request([5] * 12, 12, salt)
    while any(r.request.num_computed_tokens < 12 for r in engine.requests.values()):
        engine.step(every=1.1)
    assert not engine.tier.asked and engine.offloader.pinned == 6, "two tenants, two batches"
    engine.offloader.relieve(1)
    assert engine.offloader.pinned == 6, "their requests use these blocks: letting go of them frees none"
    for r in list(engine.requests.values()):
        engine.release(r)
    engine.offloader.relieve(7)
    assert engine.offloader.pinned == 6, "not enough, whatever is given up"
    engine.offloader.relieve(1)
    assert engine.offloader.pinned == 3
    engine.offloader.relieve(0)
    assert engine.offloader.pinned == 3


def test_settle_waits_for_copies_and_returns_with_nothing_pinned():
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
            engine.reactor.run()
            for rank in (0, 1):
                for order in list(engine.orders[rank]):
                    engine.copy(rank, order)
                    engine.report(rank, [order.order], [])
            engine.reactor.run()

        thread = threading.Thread(target=others)
        thread.start()
        engine.offloader.settle(10.0)
        assert engine.offloader.pinned == 0
        thread.join()


def test_settle_is_bounded():
    engine = Engine(GROUPS["full"], 0, 0)
    r = engine.new_request([i % 7 for i in range(40)], 40)
    run(engine, r)
    flush(engine, r)
    began = time.monotonic()
    engine.offloader.settle(0.05)
    assert time.monotonic() - began < 2 and engine.offloader.pinned == 10, "the copies may still run"
    engine.end()
