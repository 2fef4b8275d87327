"""Several tenants wait for places: turns by what they have had, and who goes when too many wait."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_desk import REQUEST, Desk, turns
from proxy_fakes import Cluster

from vllm_kvtier.proxy.admission import _OWING_KEPT, TooBusy

# ---------------------------------------------------------------- whose turn it is


async def test_tenants_take_turns_and_within_one_it_is_first_come_first_served():
    desk = Desk()
    await desk.full("a1", "a2", "a3", "a4", "b1", "b2", "c1")
    await desk.free(7)
    assert desk.order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


async def test_who_comes_late_waits_for_one_turn_of_each():
    desk = Desk()
    await desk.full(*(f"{tenant}{i}" for i in range(50) for tenant in "abc"))
    assert await desk.free(10) == "abcabcabca"
    desk.enter("q")
    await turns()
    assert await desk.free(5) == "bcaqb"


async def test_a_long_prompt_of_who_has_had_nothing_waits_no_longer_but_is_paid_for():
    desk = Desk()
    await desk.full(*(f"a{i}" for i in range(50)))
    for name in ("q1", "q2"):
        desk.enter(name, tokens=9 * REQUEST)
    await turns()
    assert await desk.free(14) == "aq" + 9 * "a" + "qaa"


async def test_one_request_after_the_other_is_no_cheaper_than_two_at_once():
    desk = Desk()
    await desk.full(*(f"a{i}" for i in range(200)))
    desk.enter("q", tokens=9 * REQUEST)
    await turns()
    served = ""
    for _ in range(112):
        served += await desk.free()
        if served[-1] == "q":
            desk.enter("q", tokens=9 * REQUEST)
            await turns()
    assert served.count("q") == pytest.approx(served.count("a") / 10, abs=1)


async def test_to_have_been_away_is_no_credit():
    desk = Desk()
    await desk.full("q", *(f"a{i}" for i in range(60)))
    assert await desk.free(40) == "q" + 39 * "a"
    for i in range(10):
        desk.enter(f"q{i}")
    await turns()
    assert await desk.free(10) == "aqaqaqaqaq"


async def test_to_come_and_go_is_no_credit():
    desk = Desk()
    await desk.full("a1", "a2", "b1")
    quitter = desk.enter("q")
    await turns()
    quitter.cancel()
    await turns()
    desk.enter("b2")
    desk.enter("q")
    await turns()
    assert await desk.free(5) == "abqab"


async def test_new_tenants_without_end_do_not_hold_up_an_old_one():
    desk = Desk()
    names = iter(chr(i) for i in range(0x4E00, 0x9000))
    await desk.full(*(f"a{i}" for i in range(20)), tokens=2 * REQUEST)
    served, missing = "", 6
    for _ in range(200):
        # Six new ones wait at any time, each of them a tenant of its own.
        for _ in range(missing):
            desk.enter(next(names))
        await turns()
        served += await desk.free()
        missing = served[-1] != "a"
    gaps = [len(gap) for gap in served.split("a")[1:-1]]
    assert len(gaps) > 5 and max(gaps) <= 3 * 6, "for three times the cost, after three rounds of six"


async def test_what_tenants_have_had_is_not_remembered_without_end():
    desk = Desk()
    await desk.full("a1", "a2")
    line = desk.admission._lines["decode"]
    for i in range(_OWING_KEPT + 100):
        gone = desk.enter(chr(0x4E00 + i))
        await turns(2)
        gone.cancel()
        await turns(2)
    assert len(line._owing) == _OWING_KEPT
    await desk.free(2)
    assert not line._owing and not line._tenants


@given(st.lists(st.integers(0, 9), min_size=2, max_size=5), st.lists(st.integers(0, 20), min_size=1, max_size=30))
def test_the_turn_is_of_who_has_had_least(sizes, extras):
    """Tenants that all wait all the time, with prompts of ``sizes`` and now and then ``extras``."""

    async def scenario():
        desk = Desk()
        await desk.full()
        had = dict.fromkeys("abcde"[: len(sizes)], 0)
        costs: dict[str, list[int]] = {tenant: [] for tenant in had}
        more = iter(extras * 3)

        def join(tenant: str) -> None:
            size = REQUEST * (sizes["abcde".index(tenant)] + (next(more, 0) if tenant == "a" else 0))
            costs[tenant].append(size + REQUEST)
            desk.enter(tenant, tokens=size)

        for tenant in list(had) * 2:
            join(tenant)
        await turns()
        for _ in range(60):
            tenant = await desk.free()
            assert had[tenant] == min(had.values()), (tenant, had)
            had[tenant] += costs[tenant].pop(0)
            join(tenant)
            await turns()
        await _end_all()

    asyncio.run(scenario())


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0, 1, 30])), min_size=4, max_size=40),
    st.integers(0, 12),
)
def test_nobody_has_two_turns_before_who_is_new(waiting, before):
    async def scenario():
        desk = Desk()
        await desk.full()
        for name, size in waiting:
            desk.enter(name, tokens=size * REQUEST // 3)
        await turns()
        await desk.free(min(before, len(waiting)))
        desk.enter("q", tokens=10**6)
        await turns()
        served = ""
        while "q" not in desk.order:
            served += await desk.free()
        assert all(served.count(tenant) <= 1 for tenant in "abcq"), served
        await _end_all()

    asyncio.run(scenario())


async def _end_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ---------------------------------------------------------------- a place lost as it is given


async def test_a_turn_that_was_none_costs_nothing():
    desk = Desk()
    a1, *_ = await desk.full("a1", tokens=50 * REQUEST)
    for name in ("a2", "b1", "b2", "b3"):
        desk.enter(name)
    await turns()
    desk.inside.pop(0).leave()
    a1.cancel()
    await turns()
    assert desk.order == ["a2"], "it is still its tenant's turn"
    assert await desk.free(3) == "bbb"
    assert desk.engine.outstanding == 1


async def test_nor_if_its_tenant_comes_back_later():
    desk = Desk()
    a1, *_ = await desk.full("a1", tokens=50 * REQUEST)
    for i in range(9):
        desk.enter(f"b{i}")
    await turns()
    desk.inside.pop(0).leave()
    a1.cancel()
    await turns()
    assert desk.order == ["b0"]
    desk.enter("a2")
    await turns()
    assert await desk.free(3) == "bab"


async def test_nor_is_it_a_credit_if_all_was_forgotten_meanwhile():
    desk = Desk()
    (a1,) = await desk.full("a1", tokens=50 * REQUEST)
    for i in range(6):
        desk.enter(f"a{i}")
        desk.enter(f"b{i}")
    # They come when a1 has its place, and nobody waits, and a1 does not know that it has lost it.
    desk.inside.pop(0).leave()
    a1.cancel()
    await turns()
    assert desk.order == ["a0"]
    assert await desk.free(6) == "bababa"


# ---------------------------------------------------------------- a full queue


async def _refused(task: asyncio.Task) -> TooBusy:
    await turns()
    assert task.done() and "Too many" in str(task.exception())
    return task.exception()


async def test_who_has_fewer_waiting_takes_the_place_of_the_newest_of_who_has_most():
    desk = Desk(queue_limit=4)
    a1, a2, a3, b1 = await desk.full("a1", "a2", "a3", "b1")
    q = desk.enter("q1")
    error = await _refused(a3)
    assert error.displaced and error.retry_after == 60
    assert not any(task.done() for task in (a1, a2, b1, q)) and desk.admission.waiting("decode") == 4
    for name in ("a4", "a5"):  # of who has most
        assert not (await _refused(desk.enter(name))).displaced
    b2 = desk.enter("b2")
    assert (await _refused(a2)).displaced and not b2.done()
    assert not (await _refused(desk.enter("b3"))).displaced, "its tenant has most by now"
    assert await desk.free(4) == "abqb"
    assert desk.admission.waiting("decode") == 0


async def test_who_has_as_many_as_anybody_is_refused():
    desk = Desk(queue_limit=4)
    await desk.full("a1", "a2", "b1", "b2")
    for name in ("a3", "b3"):
        assert not (await _refused(desk.enter(name))).displaced
    assert await desk.free(4) == "abab"
    nobody = Desk(queue_limit=0)
    await nobody.full()
    assert not (await _refused(nobody.enter("q"))).displaced


async def test_each_of_two_who_come_at_once_takes_a_place_of_its_own():
    desk = Desk(queue_limit=4)
    a = await desk.full("a1", "a2", "a3", "a4")
    q, r = desk.enter("q"), desk.enter("r")
    await turns()
    assert [task.done() for task in (*a, q, r)] == [False, False, True, True, False, False]
    assert desk.admission.waiting("decode") == 4


async def test_the_newest_request_goes_not_the_one_that_came_last_to_this_queue():
    """What has had its turn at P has waited before; who came while it did is newer."""
    desk = Desk(queue_limit=3)
    await desk.full()
    newest = desk.enter("a1", seconds=1000, role="prefill")
    await turns()
    passed_p = [desk.enter(name, seconds=990) for name in ("a2", "a3")]
    await turns()
    desk.enter("q")
    await turns()
    assert newest.done() and newest.exception().displaced and not any(task.done() for task in passed_p)
    assert desk.admission.waiting("prefill") == 0 and desk.admission.waiting("decode") == 3


async def test_who_is_leaving_anyway_goes_rather_than_the_newest():
    desk = Desk(queue_limit=3)
    a1, a2, a3 = await desk.full("a1", "a2", "a3")
    q = desk.enter("q")
    a1.cancel()  # its task ends after q has come
    await turns()
    assert a1.cancelled() and not any(task.done() for task in (a2, a3, q))
    assert desk.admission.waiting("decode") == 3


async def test_retry_after_counts_those_who_go_before():
    desk = Desk()
    await desk.full(*(f"a{i}" for i in range(20)), "b1", "b2", "b3", "c1")
    desk.admission._rates["decode"].value = lambda: 1.0
    assert {t: desk.admission.retry_after("decode", t.encode()) for t in "abcq"} == {
        "a": 21 + 3 + 1,
        "b": 4 + 4 + 1,
        "c": 2 + 2 + 2,
        "q": 1 + 1 + 1 + 1,
    }


# ---------------------------------------------------------------- over HTTP

FLOOD, QUIET = {"authorization": "Bearer flood"}, {"authorization": "Bearer quiet"}


async def _flooded(c: Cluster, waiting: int) -> list[asyncio.Task]:
    """One of the flood's at D, and ``waiting`` more in the queue."""
    c.d[0].hold = asyncio.Event()
    tasks = [asyncio.create_task(c.chat("f0", headers=FLOOD))]
    await c.d[0].until_seen(1)
    for i in range(1, waiting + 1):
        tasks.append(asyncio.create_task(c.chat(f"f{i}", headers=FLOOD)))
        await c.until(lambda i=i: sum(map(c.core.admission.waiting, ("prefill", "decode"))) == i)
    return tasks


def _asked(engine) -> list[str]:
    return [seen.body["messages"][0]["content"] for seen in engine.seen]


@pytest.mark.parametrize("p", [0, 1])
async def test_who_floods_the_proxy_waits_behind_who_does_not(p):
    async with Cluster(p=p, engine_requests=1) as c:
        flood = await _flooded(c, 12)
        quiet = asyncio.create_task(c.chat("q", headers=QUIET))
        await c.until(lambda: sum(map(c.core.admission.waiting, ("prefill", "decode"))) == 13)
        c.d[0].hold.set()
        replies = await asyncio.gather(quiet, *flood)
        assert {reply.status_code for reply in replies} == {200}
        # At most: one at D, with P one that has P's place, and one whose turn came before.
        assert _asked(c.d[0]).index("q") <= 2 + p
        assert [text for text in _asked(c.d[0]) if text != "q"] == [f"f{i}" for i in range(13)]
        assert all(engine.outstanding == 0 for engine in c.core.fleet)


async def test_who_fills_the_queue_keeps_nobody_out():
    async with Cluster(p=1, engine_requests=1, queue_limit=3) as c:
        flood = await _flooded(c, 3)
        quiet = asyncio.create_task(c.chat("q", headers=QUIET))
        displaced = await asyncio.wait_for(flood[3], 5)
        assert displaced.status_code == 429 and 1 <= int(displaced.headers["retry-after"]) <= 60
        assert (await c.chat("f9", headers=FLOOD)).status_code == 429
        c.d[0].hold.set()
        replies = await asyncio.gather(quiet, *flood[:3])
        assert {reply.status_code for reply in replies} == {200}
        for engine in (c.p[0], c.d[0]):
            assert sorted(_asked(engine)) == ["f0", "f1", "f2", "q"]
        counts = c.core.state()["counts"]
        assert counts["too_busy"] == 2 and counts["displaced"] == 1
        assert all(engine.outstanding == 0 for engine in c.core.fleet)


async def test_routes_that_are_passed_on_take_turns_too():
    async with Cluster(p=0, engine_requests=1, queue_limit=2) as c:
        flood = await _flooded(c, 2)
        call = {"json": {"model": "m", "input": "q"}, "headers": QUIET}
        quiet = asyncio.create_task(c.client.post("/v1/embeddings", **call))
        assert (await asyncio.wait_for(flood[2], 5)).status_code == 429
        c.d[0].hold.set()
        assert [(await task).status_code for task in (quiet, *flood[:2])] == [200] * 3
        assert c.core.state()["counts"]["displaced"] == 1
