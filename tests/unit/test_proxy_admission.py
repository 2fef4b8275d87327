"""Engine slots: which requests wait, which is served next, which is refused, and its Retry-After."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_fakes import Cluster, text_of, turn
from proxy_queue_harness import D, run_loop

from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.engines.engine import Engine
from vllm_kvtier.proxy.engines.engine_http import Secrets
from vllm_kvtier.proxy.routing.admission import Admission, Choice, QueueFull, Rate


class ProxyQueue:
    """An admission with engines of one role, each with room for ``room`` requests."""

    def __init__(self, engines=1, room=1, **options):
        config = ProxyConfig(decode=D, engine_requests=room, **options)
        self.admission = Admission(config, ("decode",))
        self.engines = [Engine("decode", i, EngineAddress(f"http://d:{i}"), config, Secrets()) for i in range(engines)]
        for engine in self.engines:
            engine.on_request_end = lambda engine: self.admission.request_ended("decode")

    def choose(self) -> Choice | None:
        usable = [engine for engine in self.engines if engine.usable]
        if not usable:
            return None
        return Choice(next((engine for engine in usable if not engine.full), None))

    def enter(self, seconds=5.0):
        return asyncio.create_task(self.admission.acquire("decode", b"tenant", self.choose, seconds))


# ---------------------------------------------------------------- the queue


async def test_admission_serves_in_order():
    queue = ProxyQueue()
    first = await queue.enter()
    waiting = [queue.enter() for _ in range(3)]
    await run_loop()
    assert queue.admission.waiting("decode") == 3 and not any(task.done() for task in waiting)
    for task in waiting:
        first.release()
        await run_loop()
        assert task.done() and [t.done() for t in waiting].count(True) == waiting.index(task) + 1
        first = task.result()
    first.release()
    first.release()
    assert queue.engines[0].outstanding == 0 and queue.admission.waiting("decode") == 0


async def test_admission_cancelled_waiter_leaks_no_slot():
    queue = ProxyQueue()
    slot = await queue.enter()
    waiting = [queue.enter() for _ in range(3)]
    await run_loop()
    waiting[0].cancel()
    await run_loop()
    assert queue.admission.waiting("decode") == 2
    # Cancelled in the same moment in which it gets its place.
    slot.release()
    waiting[1].cancel()
    await run_loop(10)
    assert waiting[2].done() and queue.engines[0].outstanding == 1
    waiting[2].result().release()
    assert queue.engines[0].outstanding == 0


async def test_admission_full_queue_and_timeout_raise_queue_full():
    queue = ProxyQueue(queue_limit=2)
    slot = await queue.enter()
    waiting = [queue.enter(0.05) for _ in range(2)]
    await run_loop()
    with pytest.raises(QueueFull, match="Too many"):
        await queue.enter()
    for task in waiting:
        with pytest.raises(QueueFull, match="in time"):
            await task
    assert queue.admission.waiting("decode") == 0
    slot.release()
    (await queue.enter()).release()


async def test_admission_without_engines_answers_at_once():
    queue = ProxyQueue()
    slot = await queue.enter()
    waiting = queue.enter()
    await run_loop()
    queue.engines[0].drained = True
    queue.admission.serve_waiting("decode")
    assert await waiting is None
    assert await queue.enter() is None
    slot.release()


async def test_request_for_one_engine_does_not_hold_up_others():
    queue = ProxyQueue(engines=2, queue_limit=2)
    slots = [await queue.enter() for _ in range(2)]
    full, free = queue.engines

    def only_first() -> Choice:
        return Choice(None, full=full) if full.full else Choice(full)

    bound = asyncio.create_task(queue.admission.acquire("decode", b"tenant", only_first, 5.0))
    await run_loop()
    general = queue.enter()
    await run_loop()
    slots.pop().release()
    await run_loop()
    assert general.done() and not bound.done()
    general.result().release()
    late = await queue.enter()
    assert late.engine is free, "it does not wait behind it, either"
    after = queue.enter()
    await run_loop()
    slots.pop().release()
    await run_loop()
    assert bound.done() and not after.done() and bound.result().engine is full, "first come, first served"
    late.release()
    for slot in (bound.result(), await after):
        slot.release()
    assert full.outstanding == free.outstanding == queue.admission.waiting("decode") == 0


async def test_requests_for_a_full_engine_are_passed_with_one_choice():
    queue = ProxyQueue(engines=2, queue_limit=1026)
    slots = [await queue.enter() for _ in range(2)]
    full, free = queue.engines
    asked = []

    def only(engine: Engine, name: int) -> asyncio.Task:
        def choose() -> Choice:
            asked.append(name)
            return Choice(None, full=engine) if engine.full else Choice(engine)

        tenant = b"a" if name % 2 else b"b"
        return asyncio.create_task(queue.admission.acquire("decode", tenant, choose, 60.0))

    waiting = [only(full, i) for i in range(1024)]
    await run_loop()
    behind = [only(free, i) for i in (1024, 1025)]
    await run_loop()
    asked.clear()
    slots[1].release()
    await run_loop()
    assert behind[0].done() and not behind[1].done(), "another engine is free"
    assert asked == [0, 1024, 1025]
    asked.clear()
    slots[0].release()
    await run_loop()
    assert [i for i, task in enumerate(waiting) if task.done()] == [1], "the other tenant has had a slot"
    assert len(asked) == 3
    for task in (*waiting, *behind):
        task.cancel()


@given(st.lists(st.sampled_from(["enter", "leave", "cancel"]), max_size=80), st.integers(1, 3), st.integers(1, 3))
def test_admission_random_operations_keep_invariants(actions, engines, room):
    """Never more requests than slots, no free slot while a request waits, always in order."""

    async def scenario():
        queue = ProxyQueue(engines, room, queue_limit=1000)
        inside, waiting = [], []
        for action in actions:
            if action == "enter":
                waiting.append(queue.enter())
            elif action == "leave" and inside:
                inside.pop(0).release()
            elif action == "cancel" and waiting:
                waiting.pop(len(waiting) // 2).cancel()
            await run_loop()
            served = [task.done() for task in waiting]
            assert served == sorted(served, reverse=True), "a request was served out of order"
            inside += [task.result() for task in waiting if task.done()]
            waiting = [task for task in waiting if not task.done()]
            assert len(inside) == sum(engine.outstanding for engine in queue.engines) <= engines * room
            assert not waiting or len(inside) == engines * room
            assert queue.admission.waiting("decode") == len(waiting)
        for task in waiting:
            task.cancel()

    asyncio.run(scenario())


# ---------------------------------------------------------------- Retry-After


def test_rate_of_events_is_measured_and_decays():
    now = 0.0
    rate = Rate(lambda: now)
    assert rate.value() == 0
    for _ in range(50):
        now += 0.1
        rate.tick()
    assert rate.value() == pytest.approx(10, rel=0.1), "though less time has passed than it looks back"
    for _ in range(2000):
        now += 0.1
        rate.tick()
    assert rate.value() == pytest.approx(10, rel=0.02)
    now += 200
    assert rate.value() < 0.01


async def test_admission_retry_after_is_queue_length_over_rate():
    now = 0.0
    config = ProxyConfig(decode=D, engine_requests=1, retry_after_max=60)
    admission = Admission(config, ("decode",), lambda: now)
    assert admission.retry_after("decode", b"tenant") == 60, "nothing has ended yet"
    for _ in range(400):
        now += 0.5
        admission.request_ended("decode")
    assert admission.retry_after("decode", b"tenant") == 1
    waiting = [asyncio.create_task(admission.acquire("decode", b"tenant", lambda: Choice(None), 5)) for _ in range(19)]
    await run_loop()
    assert admission.retry_after("decode", b"tenant") == 10, "twenty at two a second"
    assert admission.retry_after("decode", b"another") == 1, "itself, and one of the others before it"
    for task in waiting:
        task.cancel()


# ---------------------------------------------------------------- over HTTP


async def test_proxy_full_engines_queue_then_return_429():
    async with Cluster(engine_requests=1, queue_limit=1, queue_timeout=10) as c:
        c.d[0].hold = asyncio.Event()
        one = asyncio.create_task(c.chat("u1"))
        await c.d[0].until_seen(1)
        two = asyncio.create_task(c.chat("u2"))
        await c.until(lambda: c.core.admission.waiting("decode") == 1)
        assert len(c.p[0].seen) == 1, "no prefill without a decode slot"
        three = await c.chat("u3")
        assert three.status_code == 429 and three.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(three.headers["retry-after"]) <= 60
        c.d[0].hold.set()
        for reply in (await one, await two):
            assert reply.status_code == 200
        assert c.core.state()["counts"]["too_busy"] == 1
        assert c.core.decode[0].outstanding == c.core.prefill[0].outstanding == 0


async def test_proxy_queued_request_returns_429_at_timeout():
    async with Cluster(p=0, engine_requests=1, queue_timeout=0.1) as c:
        c.d[0].hold = asyncio.Event()
        one = asyncio.create_task(c.chat("u1"))
        await c.d[0].until_seen(1)
        reply = await asyncio.wait_for(c.chat("u2"), 5)
        assert reply.status_code == 429 and "retry-after" in reply.headers
        assert len(c.d[0].seen) == 1
        c.d[0].hold.set()
        assert (await one).status_code == 200


async def test_proxy_client_leaving_queue_is_removed():
    async with Cluster(p=0, engine_requests=1) as c:
        c.d[0].hold = asyncio.Event()
        one = asyncio.create_task(c.chat("u1"))
        await c.d[0].until_seen(1)
        two = asyncio.create_task(c.chat("u2"))
        await c.until(lambda: c.core.admission.waiting("decode") == 1)
        two.cancel()
        await c.until(lambda: c.core.admission.waiting("decode") == 0)
        c.d[0].hold.set()
        await one
        assert len(c.d[0].seen) == 1 and c.core.decode[0].outstanding == 0


async def test_proxy_stream_holds_its_slot_until_end():
    async with Cluster(p=0, engine_requests=1) as c:
        c.d[0].gate = asyncio.Semaphore(1)
        request = c.client.build_request("POST", "/v1/chat/completions", json=turn("u1", stream=True))
        reply = await c.client.send(request, stream=True)
        pieces = reply.aiter_raw()
        got = await anext(pieces)
        two = asyncio.create_task(c.chat("u2"))
        await c.until(lambda: c.core.admission.waiting("decode") == 1)
        for _ in range(10):
            c.d[0].gate.release()
        got += b"".join([piece async for piece in pieces])
        assert text_of(got).count(";") == 4
        assert (await asyncio.wait_for(two, 5)).status_code == 200


async def test_admission_waiters_of_dead_engine_are_answered():
    async with Cluster(d=1, engine_requests=1, backoff_initial=60, backoff_max=60) as c:
        c.p[0].hold = asyncio.Event()
        one = asyncio.create_task(c.chat("u1"))
        await c.p[0].until_seen(1)
        two = asyncio.create_task(c.chat("u2"))
        await c.until(lambda: c.core.admission.waiting("prefill") == 1)
        await c.p[0].kill()
        for task in (one, two):
            assert (await asyncio.wait_for(task, 5)).status_code == 200
        assert len(c.d[0].seen) == 2


async def test_prefill_engine_lost_during_decode_wait_gets_no_request():
    async with Cluster(p=2, engine_requests=1, backoff_initial=60, backoff_max=60) as c:
        c.d[0].hold = asyncio.Event()
        one = asyncio.create_task(c.chat("u1"))
        await c.d[0].until_seen(1)
        two = asyncio.create_task(c.chat("u2"))
        await c.until(lambda: c.core.admission.waiting("decode") == 1)
        chosen = next(engine for engine in c.core.prefill if engine.outstanding)
        chosen.mark_unavailable("It failed.")
        c.d[0].hold.set()
        assert [(await task).status_code for task in (one, two)] == [200, 200]
        other = c.p[1 - chosen.index]
        assert [seen.body["messages"][0]["content"] for seen in other.seen][-1] == "u2"
        assert all(engine.outstanding == 0 for engine in c.core.fleet)


async def test_proxy_engine_answering_429_is_skipped():
    async with Cluster(d=2) as c:
        c.d[0].status = 429
        c.core.decode[1].weighted_picks = 1e9
        reply = await c.chat("u1")
        assert reply.status_code == 200 and c.core.decode[0].healthy
        assert len(c.d[0].seen) == len(c.d[1].seen) == 1
        c.d[1].status = 429
        assert (await c.chat("u2")).status_code == 429
