"""Places at engines: who waits, who is served next, who is told to come back later, and when."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_desk import D, turns
from proxy_fakes import Cluster, text_of, turn

from vllm_kvtier.proxy.admission import Admission, Choice, Rate, TooBusy
from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.engines import Engine


class Desk:
    """An admission with engines of one role, each with room for ``room`` requests."""

    def __init__(self, engines=1, room=1, **options):
        config = ProxyConfig(decode=D, engine_requests=room, **options)
        self.admission = Admission(config, ("decode",))
        self.engines = [Engine("decode", i, EngineAddress(f"http://d:{i}"), config) for i in range(engines)]
        for engine in self.engines:
            engine.on_left = lambda engine: self.admission.left("decode")

    def choose(self) -> Choice | None:
        usable = [engine for engine in self.engines if engine.usable]
        if not usable:
            return None
        return Choice(next((engine for engine in usable if not engine.full), None))

    def enter(self, seconds=5.0):
        return asyncio.create_task(self.admission.enter("decode", b"tenant", self.choose, seconds))


# ---------------------------------------------------------------- the queue


async def test_first_come_first_served():
    desk = Desk()
    first = await desk.enter()
    waiting = [desk.enter() for _ in range(3)]
    await turns()
    assert desk.admission.waiting("decode") == 3 and not any(task.done() for task in waiting)
    for task in waiting:
        first.leave()
        await turns()
        assert task.done() and [t.done() for t in waiting].count(True) == waiting.index(task) + 1
        first = task.result()
    first.leave()
    first.leave()
    assert desk.engines[0].outstanding == 0 and desk.admission.waiting("decode") == 0


async def test_who_leaves_the_queue_takes_nothing_with_him():
    desk = Desk()
    place = await desk.enter()
    waiting = [desk.enter() for _ in range(3)]
    await turns()
    waiting[0].cancel()
    await turns()
    assert desk.admission.waiting("decode") == 2
    # Cancelled in the same moment in which it gets its place.
    place.leave()
    waiting[1].cancel()
    await turns(10)
    assert waiting[2].done() and desk.engines[0].outstanding == 1
    waiting[2].result().leave()
    assert desk.engines[0].outstanding == 0


async def test_a_full_queue_and_a_long_wait_are_refused():
    desk = Desk(queue_limit=2)
    place = await desk.enter()
    waiting = [desk.enter(0.05) for _ in range(2)]
    await turns()
    with pytest.raises(TooBusy, match="Too many"):
        await desk.enter()
    for task in waiting:
        with pytest.raises(TooBusy, match="in time"):
            await task
    assert desk.admission.waiting("decode") == 0
    place.leave()
    (await desk.enter()).leave()


async def test_nobody_waits_for_what_is_not_there():
    desk = Desk()
    place = await desk.enter()
    waiting = desk.enter()
    await turns()
    desk.engines[0].drained = True
    desk.admission.turn("decode")
    assert await waiting is None
    assert await desk.enter() is None
    place.leave()


@given(st.lists(st.sampled_from(["enter", "leave", "cancel"]), max_size=80), st.integers(1, 3), st.integers(1, 3))
def test_the_queue_against_a_model(actions, engines, room):
    """Never more than there is room for, never a free place while somebody waits, always in order."""

    async def scenario():
        desk = Desk(engines, room, queue_limit=1000)
        inside, waiting = [], []
        for action in actions:
            if action == "enter":
                waiting.append(desk.enter())
            elif action == "leave" and inside:
                inside.pop(0).leave()
            elif action == "cancel" and waiting:
                waiting.pop(len(waiting) // 2).cancel()
            await turns()
            served = [task.done() for task in waiting]
            assert served == sorted(served, reverse=True), "somebody was served out of turn"
            inside += [task.result() for task in waiting if task.done()]
            waiting = [task for task in waiting if not task.done()]
            assert len(inside) == sum(engine.outstanding for engine in desk.engines) <= engines * room
            assert not waiting or len(inside) == engines * room
            assert desk.admission.waiting("decode") == len(waiting)
        for task in waiting:
            task.cancel()

    asyncio.run(scenario())


# ---------------------------------------------------------------- Retry-After


def test_the_rate_is_measured():
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


async def test_retry_after_is_the_queue_by_the_rate():
    now = 0.0
    config = ProxyConfig(decode=D, engine_requests=1, retry_after_most=60)
    admission = Admission(config, ("decode",), lambda: now)
    assert admission.retry_after("decode", b"tenant") == 60, "nothing has ended yet"
    for _ in range(400):
        now += 0.5
        admission.left("decode")
    assert admission.retry_after("decode", b"tenant") == 1
    waiting = [asyncio.create_task(admission.enter("decode", b"tenant", lambda: Choice(None), 5)) for _ in range(19)]
    await turns()
    assert admission.retry_after("decode", b"tenant") == 10, "twenty at two a second"
    assert admission.retry_after("decode", b"another") == 1, "itself, and one of the others before it"
    for task in waiting:
        task.cancel()


# ---------------------------------------------------------------- over HTTP


async def test_full_engines_make_requests_wait_and_then_refuse_them():
    async with Cluster(engine_requests=1, queue_limit=1, queue_timeout=10) as c:
        c.d[0].hold = asyncio.Event()
        one = asyncio.create_task(c.chat("u1"))
        await c.d[0].until_seen(1)
        two = asyncio.create_task(c.chat("u2"))
        await c.until(lambda: c.core.admission.waiting("decode") == 1)
        assert len(c.p[0].seen) == 1, "P computes nothing that D has no room for"
        three = await c.chat("u3")
        assert three.status_code == 429 and three.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(three.headers["retry-after"]) <= 60
        c.d[0].hold.set()
        for reply in (await one, await two):
            assert reply.status_code == 200
        assert c.core.state()["counts"]["too_busy"] == 1
        assert c.core.decode[0].outstanding == c.core.prefill[0].outstanding == 0


async def test_a_request_waits_so_long_and_no_longer():
    async with Cluster(p=0, engine_requests=1, queue_timeout=0.1) as c:
        c.d[0].hold = asyncio.Event()
        one = asyncio.create_task(c.chat("u1"))
        await c.d[0].until_seen(1)
        reply = await asyncio.wait_for(c.chat("u2"), 5)
        assert reply.status_code == 429 and "retry-after" in reply.headers
        assert len(c.d[0].seen) == 1
        c.d[0].hold.set()
        assert (await one).status_code == 200


async def test_a_client_that_leaves_the_queue_is_forgotten():
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


async def test_a_streams_place_is_held_to_its_end():
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


async def test_those_who_wait_for_an_engine_that_dies_do_not_wait_on():
    async with Cluster(d=1, engine_requests=1, backoff_first=60, backoff_most=60) as c:
        c.p[0].hold = asyncio.Event()
        one = asyncio.create_task(c.chat("u1"))
        await c.p[0].until_seen(1)
        two = asyncio.create_task(c.chat("u2"))
        await c.until(lambda: c.core.admission.waiting("prefill") == 1)
        await c.p[0].kill()
        for task in (one, two):
            assert (await asyncio.wait_for(task, 5)).status_code == 200
        assert len(c.d[0].seen) == 2


async def test_a_p_that_is_lost_while_its_request_waits_for_d_is_not_asked():
    async with Cluster(p=2, engine_requests=1, backoff_first=60, backoff_most=60) as c:
        c.d[0].hold = asyncio.Event()
        one = asyncio.create_task(c.chat("u1"))
        await c.d[0].until_seen(1)
        two = asyncio.create_task(c.chat("u2"))
        await c.until(lambda: c.core.admission.waiting("decode") == 1)
        chosen = next(engine for engine in c.core.prefill if engine.outstanding)
        chosen.set_aside("It is said to have failed.")
        c.d[0].hold.set()
        assert [(await task).status_code for task in (one, two)] == [200, 200]
        other = c.p[1 - chosen.index]
        assert [seen.body["messages"][0]["content"] for seen in other.seen][-1] == "u2"
        assert all(engine.outstanding == 0 for engine in c.core.fleet)


async def test_an_engine_that_is_full_for_itself_is_passed_over():
    async with Cluster(d=2) as c:
        c.d[0].status = 429
        c.core.decode[1].turns = 1e9
        reply = await c.chat("u1")
        assert reply.status_code == 200 and c.core.decode[0].well
        assert len(c.d[0].seen) == len(c.d[1].seen) == 1
        c.d[1].status = 429
        assert (await c.chat("u2")).status_code == 429
