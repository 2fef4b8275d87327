"""What raises on the reactor's thread costs blocks their place in the store at most: no pin or answer is lost."""

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offloader_harness import GROUPS, Engine, flush, run, stored
from support import WITHOUT_SHRINKING

from vllm_kvtier.scheduler.offload import offloader as offloading

PARTS = ["jobs._order", "jobs._send", "_store.commit", "_store.abort"]


def raises_once(engine, name):
    """The next call of a part of the offloader raises, before it has done anything. Returns what disarms it."""
    *path, last = name.split(".")
    owner = functools.reduce(getattr, path, engine.offloader)
    real = getattr(owner, last)

    def fails(*arguments, **options):
        disarm()
        raise RuntimeError("on purpose")

    def disarm():
        setattr(owner, last, real)

    setattr(owner, last, fails)
    return disarm


def turn(engine):
    """As the reactor: an event that raises is dropped."""
    while engine.reactor.queue:
        try:
            engine.reactor.run()
        except RuntimeError as error:
            assert str(error) == "on purpose"


@pytest.mark.parametrize("groups", sorted(GROUPS))
@pytest.mark.parametrize("name", [*PARTS, "_counters.count"])
def test_offloader_one_reactor_error_stores_all_and_leaves_no_pin(groups, name):
    engine = Engine(GROUPS[groups], 5, 0)
    r = engine.new_request([i % 7 for i in range(61)], 60)
    while r.request.num_computed_tokens < 20:
        engine.step(every=1.1)
    flush(engine, r)
    raises_once(engine, name)
    engine.tier.answer(0, engine.full)
    turn(engine)
    for rank in (0, 1):
        for order in list(engine.orders[rank]):
            if name == "_store.abort":
                engine.fail(rank, order)
            else:
                engine.copy(rank, order)
    turn(engine)
    engine.offloader.cancel_all(1.0)
    assert engine.offloader.pinned == 0
    run(engine, r)
    engine.read_outputs()
    engine.finish(r, True)
    engine.settle_down()
    for g in engine.full:
        assert stored(engine, r, g) == list(range(60 // engine.groups[g][0])), "it was offered again"
    engine.end()


@pytest.mark.parametrize("groups", sorted(GROUPS))
@given(seed=st.integers(0, 1 << 32), share=st.sampled_from([0.05, 0.3, 0.9]))
@settings(max_examples=40, phases=WITHOUT_SHRINKING)
def test_offloader_random_reactor_errors_lose_no_pin_and_leave_no_gap(groups, seed, share):
    """``FakeTier`` looks for gaps, ``Engine.copy`` for what is not what its hash says."""
    engine = Engine(GROUPS[groups], seed, 0, share=share, lot=(1, 3, 16)[seed % 3])
    armed = {}

    def fault():
        name = engine.rng.choice(PARTS)
        armed.pop(name, lambda: None)()
        armed[name] = raises_once(engine, name)

    events = {
        engine.step: 8, engine.new_request: 2, engine.finish: 1.2, engine.preempt: 0.5, lambda: turn(engine): 6,
        engine.store_answers: 6, engine.worker_acts: 12, fault: 2,
        lambda: engine.offloader.cancel_for_requests(engine.rng.randint(1, 9)): 1,
    }  # fmt: skip
    for _ in range(300):
        engine.rng.choices(list(events), list(events.values()))[0]()
        engine.bounds()
    turn(engine)
    for disarm in armed.values():
        disarm()
    for r in list(engine.requests.values()):
        engine.finish(r, False)
    engine.settle_down()
    jobs = engine.offloader.jobs
    assert engine.offloader.pinned == 0 and not jobs._flights and not any(jobs._queues)
    assert jobs._sent == jobs._answered and not jobs._gaps and not jobs._flying


def test_offloader_reserve_error_is_retried():
    engine = Engine(GROUPS["full"], 5, 0)
    r = engine.new_request([i % 7 for i in range(61)], 60)
    while r.request.num_computed_tokens < 20:
        engine.step(every=1.1)
    raises_once(engine, "_store.reserve")
    flush(engine, r)
    jobs = engine.offloader.jobs
    assert jobs._sent == jobs._answered and not engine.tier.asked
    run(engine, r)
    engine.finish(r, True)
    engine.settle_down()
    assert stored(engine, r) == list(range(15))


def test_offloader_copy_lost_during_reserve_stores_nothing_after_it():
    """The store gets the reservation before the message that its parent is aborted."""
    engine = Engine(GROUPS["full"], 1, 0, share=1.0)
    r = engine.new_request([i % 7 for i in range(60)], 59)
    while r.request.num_computed_tokens < 20:
        engine.step(every=1.1)
    flush(engine, r)
    engine.tier.answer(0, engine.full)
    turn(engine)
    first = [order.order for order in engine.orders[0]]
    while r.request.num_computed_tokens < 40:
        engine.step(every=1.1)
    reserve = engine.tier.reserve

    def reserve_and_lose_its_parents(*arguments):
        pending = reserve(*arguments)
        engine.tier.answer(len(engine.tier.asked) - 1, engine.full)
        for rank in (0, 1):
            for order in [order for order in engine.orders[rank] if order.order in first]:
                engine.fail(rank, order)
        pending.then = lambda callback: engine.reactor.call_soon(lambda: callback(pending))  # it is read after that
        return pending

    engine.tier.reserve = reserve_and_lose_its_parents
    flush(engine, r)
    engine.tier.reserve = reserve
    run(engine, r)
    engine.read_outputs()
    engine.finish(r, True)
    engine.settle_down()
    assert stored(engine, r) == list(range(14))
    engine.end()


@pytest.mark.parametrize("answered", [False, True])
def test_offloader_reconnect_stores_all_blocks_again(answered):
    """What was reserved on the old one is void: copies of it are no stored blocks, whatever the workers say."""
    engine = Engine(GROUPS["full"], 1, 0, share=1.0)
    r = engine.new_request([i % 7 for i in range(60)], 59)
    run(engine, r)
    engine.read_outputs()
    engine.finish(r, True)
    engine.reactor.run()
    engine.tier.answer(0, engine.full)
    if answered:
        turn(engine)
        for rank in (0, 1):
            for order in list(engine.orders[rank]):
                engine.copy(rank, order)
    engine.tier.die("s1")
    engine.offloader.jobs.lost()
    engine.tier.live()
    turn(engine)
    assert not engine.counters.take().get("stored_blocks|")
    engine.settle_down()
    assert stored(engine, r) == list(range(14))
    engine.end()


def test_offloader_ended_requests_are_stored_after_store_returns():
    engine = Engine(GROUPS["full"], 1, 0, share=1.0)
    engine.tier.die("s1")
    requests = []
    for n in range(3):
        r = engine.new_request([(i + n) % 7 for i in range(21)], 20)
        run(engine, r)
        engine.read_outputs()
        requests.append(r)
        engine.finish(r, True)
    assert engine.offloader.pinned == 0 and len(engine.offloader._ended) == 3
    for h in requests[0].request.block_hashes:
        engine.fake.cached.pop((bytes(h), 0), None)
    engine.step()
    assert len(engine.offloader._ended) == 3, "nothing is looked at without a store"
    engine.tier.live()
    engine.settle_down()
    assert not engine.offloader._ended, "what vLLM has evicted is forgotten"
    assert [len(stored(engine, r)) for r in requests] == [0, 5, 5]


def ends(engine, plan, prompt=4):
    r = engine.new_request(list(plan), prompt)
    run(engine, r)
    engine.read_outputs()
    engine.finish(r, True)
    return r


def kept(engine):
    """Blocks of ended requests that are to be offered again."""
    offloader = engine.offloader
    return sum(offloader._last(t, 0, t.ended) - t.offered[0] for t in offloader._ended.values())


def test_offloader_equal_ended_requests_without_store_wait_once():
    engine = Engine(GROUPS["full"], 1, 0, share=1.0)
    engine.tier.die("s1")
    requests = [ends(engine, [i % 7 for i in range(21)]) for _ in range(20)]
    assert len(engine.offloader._ended) == 1 and kept(engine) == 5
    engine.tier.live()
    engine.step()
    assert engine.offloader.pinned == 5, "no block is pinned twice"
    engine.settle_down()
    assert stored(engine, requests[0]) == list(range(5))
    engine.end()


@pytest.mark.parametrize("instance", ["s1", "s2"])
def test_offloader_newest_ended_request_offers_blocks_of_earlier_one(instance):
    """It found that in the prefix cache, and what it computed itself is no more there to be refused."""
    engine = Engine(GROUPS["full"], 1, 0, share=1.0)
    plan = [i % 7 for i in range(21)]
    if instance == "s1":
        engine.tier.die("s1")
    first = ends(engine, plan)
    engine.reactor.run()
    engine.tier.die("s1")
    second = engine.new_request(plan, 21)
    engine.hit = lambda r: (16, [[engine.fake.cached[bytes(h), 0] for h in r.request.block_hashes[:4]]])
    run(engine, second)
    engine.finish(second, True)
    assert len(engine.offloader._ended) == 1
    del engine.fake.cached[bytes(first.request.block_hashes[4]), 0]
    engine.tier.die(instance)
    engine.tier.live()
    engine.settle_down()
    assert stored(engine, second) == stored(engine, first) == list(range(4))


def test_offloader_oldest_ended_request_is_dropped_beyond_limit(monkeypatch):
    monkeypatch.setattr(offloading, "MAX_ENDED_TABLES", 3)
    engine = Engine(GROUPS["full"], 1, 0, share=1.0)
    engine.tier.die("s1")
    requests = [ends(engine, [n, *(i % 7 for i in range(8))]) for n in range(5)]
    assert len(engine.offloader._ended) == 3
    assert engine.counters.take() == {"stores_skipped|store_unavailable": 4}
    engine.tier.live()
    engine.settle_down()
    assert sum(len(stored(engine, r)) for r in requests) == 6
    engine.end()
