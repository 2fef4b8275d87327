"""Fair queuing of tenants by cost, and displacement when the queue is full."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_fakes import Cluster
from proxy_queue_harness import REQUEST, ProxyQueue, run_loop

from vllm_kvtier.proxy.routing.admission import MAX_IDLE_TENANTS, QueueFull

# ---------------------------------------------------------------- whose turn it is


async def test_fairness_between_tenants_and_fifo_within_one():
    queue = ProxyQueue()
    await queue.full("a1", "a2", "a3", "a4", "b1", "b2", "c1")
    await queue.free(7)
    assert queue.order == ["a1", "b1", "c1", "a2", "b2", "a3", "a4"]


async def test_fairness_late_tenant_waits_one_turn_of_each():
    queue = ProxyQueue()
    await queue.full(*(f"{tenant}{i}" for i in range(50) for tenant in "abc"))
    assert await queue.free(10) == "abcabcabca"
    queue.enter("q")
    await run_loop()
    assert await queue.free(5) == "bcaqb"


async def test_fairness_first_long_prompt_waits_no_longer_but_is_charged():
    queue = ProxyQueue()
    await queue.full(*(f"a{i}" for i in range(50)))
    for name in ("q1", "q2"):
        queue.enter(name, tokens=9 * REQUEST)
    await run_loop()
    assert await queue.free(14) == "aq" + 9 * "a" + "qaa"


async def test_fairness_sequential_requests_cost_as_concurrent_ones():
    queue = ProxyQueue()
    await queue.full(*(f"a{i}" for i in range(200)))
    queue.enter("q", tokens=9 * REQUEST)
    await run_loop()
    served = ""
    for _ in range(112):
        served += await queue.free()
        if served[-1] == "q":
            queue.enter("q", tokens=9 * REQUEST)
            await run_loop()
    assert served.count("q") == pytest.approx(served.count("a") / 10, abs=1)


async def test_fairness_no_credit_for_idle_time():
    queue = ProxyQueue()
    await queue.full("q", *(f"a{i}" for i in range(60)))
    assert await queue.free(40) == "q" + 39 * "a"
    for i in range(10):
        queue.enter(f"q{i}")
    await run_loop()
    assert await queue.free(10) == "aqaqaqaqaq"


async def test_fairness_no_credit_for_cancelled_requests():
    queue = ProxyQueue()
    await queue.full("a1", "a2", "b1")
    quitter = queue.enter("q")
    await run_loop()
    quitter.cancel()
    await run_loop()
    queue.enter("b2")
    queue.enter("q")
    await run_loop()
    assert await queue.free(5) == "abqab"


async def test_fairness_stream_of_new_tenants_does_not_starve_old_one():
    queue = ProxyQueue()
    names = iter(chr(i) for i in range(0x4E00, 0x9000))
    await queue.full(*(f"a{i}" for i in range(20)), tokens=2 * REQUEST)
    served, missing = "", 6
    for _ in range(200):
        # Six new ones wait at any time, each of them a tenant of its own.
        for _ in range(missing):
            queue.enter(next(names))
        await run_loop()
        served += await queue.free()
        missing = served[-1] != "a"
    gaps = [len(gap) for gap in served.split("a")[1:-1]]
    assert len(gaps) > 5 and max(gaps) <= 3 * 6, "for three times the cost, after three rounds of six"


async def test_fairness_idle_tenants_are_bounded():
    queue = ProxyQueue()
    await queue.full("a1", "a2")
    line = queue.admission._queues["decode"]
    for i in range(MAX_IDLE_TENANTS + 100):
        gone = queue.enter(chr(0x4E00 + i))
        await run_loop(2)
        gone.cancel()
        await run_loop(2)
    assert len(line._idle_due) == MAX_IDLE_TENANTS
    await queue.free(2)
    assert not line._idle_due and not line._tenants


@given(st.lists(st.integers(0, 9), min_size=2, max_size=5), st.lists(st.integers(0, 20), min_size=1, max_size=30))
def test_fairness_serves_tenant_with_least_cost(sizes, extras):
    """Tenants that all wait all the time, with prompts of ``sizes`` and now and then ``extras``."""

    async def scenario():
        queue = ProxyQueue()
        await queue.full()
        had = dict.fromkeys("abcde"[: len(sizes)], 0)
        costs: dict[str, list[int]] = {tenant: [] for tenant in had}
        more = iter(extras * 3)

        def join(tenant: str) -> None:
            size = REQUEST * (sizes["abcde".index(tenant)] + (next(more, 0) if tenant == "a" else 0))
            costs[tenant].append(size + REQUEST)
            queue.enter(tenant, tokens=size)

        for tenant in list(had) * 2:
            join(tenant)
        await run_loop()
        for _ in range(60):
            tenant = await queue.free()
            assert had[tenant] == min(had.values()), (tenant, had)
            had[tenant] += costs[tenant].pop(0)
            join(tenant)
            await run_loop()
        await _end_all()

    asyncio.run(scenario())


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([0, 1, 30])), min_size=4, max_size=40),
    st.integers(0, 12),
)
def test_fairness_new_tenant_waits_for_at_most_one_turn_of_others(waiting, before):
    async def scenario():
        queue = ProxyQueue()
        await queue.full()
        for name, size in waiting:
            queue.enter(name, tokens=size * REQUEST // 3)
        await run_loop()
        await queue.free(min(before, len(waiting)))
        queue.enter("q", tokens=10**6)
        await run_loop()
        served = ""
        while "q" not in queue.order:
            served += await queue.free()
        assert all(served.count(tenant) <= 1 for tenant in "abcq"), served
        await _end_all()

    asyncio.run(scenario())


async def _end_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ---------------------------------------------------------------- a place lost as it is given


async def test_fairness_cancelled_turn_is_not_charged():
    queue = ProxyQueue()
    a1, *_ = await queue.full("a1", tokens=50 * REQUEST)
    for name in ("a2", "b1", "b2", "b3"):
        queue.enter(name)
    await run_loop()
    queue.inside.pop(0).release()
    a1.cancel()
    await run_loop()
    assert queue.order == ["a2"], "it is still its tenant's turn"
    assert await queue.free(3) == "bbb"
    assert queue.engine.outstanding == 1


async def test_fairness_cancelled_turn_is_not_charged_when_tenant_returns():
    queue = ProxyQueue()
    a1, *_ = await queue.full("a1", tokens=50 * REQUEST)
    for i in range(9):
        queue.enter(f"b{i}")
    await run_loop()
    queue.inside.pop(0).release()
    a1.cancel()
    await run_loop()
    assert queue.order == ["b0"]
    queue.enter("a2")
    await run_loop()
    assert await queue.free(3) == "bab"


async def test_fairness_no_credit_after_queue_was_empty():
    queue = ProxyQueue()
    (a1,) = await queue.full("a1", tokens=50 * REQUEST)
    for i in range(6):
        queue.enter(f"a{i}")
        queue.enter(f"b{i}")
    # They arrive when a1 has a slot, no request waits, and a1 does not know yet that it lost the slot.
    queue.inside.pop(0).release()
    a1.cancel()
    await run_loop()
    assert queue.order == ["a0"]
    assert await queue.free(6) == "bababa"


# ---------------------------------------------------------------- a full queue


async def _refused(task: asyncio.Task) -> QueueFull:
    await run_loop()
    assert task.done() and "Too many" in str(task.exception())
    return task.exception()


async def test_queue_full_displaces_newest_of_largest_tenant():
    queue = ProxyQueue(queue_limit=4)
    a1, a2, a3, b1 = await queue.full("a1", "a2", "a3", "b1")
    q = queue.enter("q1")
    error = await _refused(a3)
    assert error.displaced and error.retry_after == 60
    assert not any(task.done() for task in (a1, a2, b1, q)) and queue.admission.waiting("decode") == 4
    for name in ("a4", "a5"):  # of the tenant with most waiting
        assert not (await _refused(queue.enter(name))).displaced
    b2 = queue.enter("b2")
    assert (await _refused(a2)).displaced and not b2.done()
    assert not (await _refused(queue.enter("b3"))).displaced, "its tenant has most by now"
    assert await queue.free(4) == "abqb"
    assert queue.admission.waiting("decode") == 0


async def test_queue_full_refuses_tenant_with_most_waiting():
    queue = ProxyQueue(queue_limit=4)
    await queue.full("a1", "a2", "b1", "b2")
    for name in ("a3", "b3"):
        assert not (await _refused(queue.enter(name))).displaced
    assert await queue.free(4) == "abab"
    nobody = ProxyQueue(queue_limit=0)
    await nobody.full()
    assert not (await _refused(nobody.enter("q"))).displaced


async def test_fairness_two_concurrent_requests_displace_two():
    queue = ProxyQueue(queue_limit=4)
    a = await queue.full("a1", "a2", "a3", "a4")
    q, r = queue.enter("q"), queue.enter("r")
    await run_loop()
    assert [task.done() for task in (*a, q, r)] == [False, False, True, True, False, False]
    assert queue.admission.waiting("decode") == 4


async def test_fairness_full_queue_displaces_newest_request():
    """A request with a prefill slot has waited before; one that arrived meanwhile is newer."""
    queue = ProxyQueue(queue_limit=3)
    await queue.full()
    newest = queue.enter("a1", seconds=1000, role="prefill")
    await run_loop()
    passed_p = [queue.enter(name, seconds=990) for name in ("a2", "a3")]
    await run_loop()
    queue.enter("q")
    await run_loop()
    assert newest.done() and newest.exception().displaced and not any(task.done() for task in passed_p)
    assert queue.admission.waiting("prefill") == 0 and queue.admission.waiting("decode") == 3


async def test_queue_full_displaces_cancelled_waiter_first():
    queue = ProxyQueue(queue_limit=3)
    a1, a2, a3 = await queue.full("a1", "a2", "a3")
    q = queue.enter("q")
    a1.cancel()  # its task ends after q has come
    await run_loop()
    assert a1.cancelled() and not any(task.done() for task in (a2, a3, q))
    assert queue.admission.waiting("decode") == 3


async def test_retry_after_counts_requests_served_before():
    queue = ProxyQueue()
    await queue.full(*(f"a{i}" for i in range(20)), "b1", "b2", "b3", "c1")
    queue.admission._rates["decode"].value = lambda: 1.0
    assert {t: queue.admission.retry_after("decode", t.encode()) for t in "abcq"} == {
        "a": 21 + 3 + 1,
        "b": 4 + 4 + 1,
        "c": 2 + 2 + 2,
        "q": 1 + 1 + 1 + 1,
    }


# ---------------------------------------------------------------- over HTTP

FLOOD, QUIET = {"authorization": "Bearer flood"}, {"authorization": "Bearer quiet"}


async def _flooded(c: Cluster, waiting: int) -> list[asyncio.Task]:
    """One request of the flood at the decode engine, and ``waiting`` more in the queue."""
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
async def test_fairness_flooding_tenant_waits_behind_others(p):
    async with Cluster(p=p, engine_requests=1) as c:
        flood = await _flooded(c, 12)
        quiet = asyncio.create_task(c.chat("q", headers=QUIET))
        await c.until(lambda: sum(map(c.core.admission.waiting, ("prefill", "decode"))) == 13)
        c.d[0].hold.set()
        replies = await asyncio.gather(quiet, *flood)
        assert {reply.status_code for reply in replies} == {200}
        # At most: one at the decode engine, one with a prefill slot, and one that was due before.
        assert _asked(c.d[0]).index("q") <= 2 + p
        assert [text for text in _asked(c.d[0]) if text != "q"] == [f"f{i}" for i in range(13)]
        assert all(engine.outstanding == 0 for engine in c.core.fleet)


async def test_queue_full_of_one_tenant_admits_others():
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


async def test_fairness_covers_passthrough_routes():
    async with Cluster(p=0, engine_requests=1, queue_limit=2) as c:
        flood = await _flooded(c, 2)
        call = {"json": {"model": "m", "input": "q"}, "headers": QUIET}
        quiet = asyncio.create_task(c.client.post("/v1/embeddings", **call))
        assert (await asyncio.wait_for(flood[2], 5)).status_code == 429
        c.d[0].hold.set()
        assert [(await task).status_code for task in (quiet, *flood[:2])] == [200] * 3
        assert c.core.state()["counts"]["displaced"] == 1


async def test_fairness_pictures_count_for_tokens_not_bytes():
    def picture(i: int) -> dict:
        url = {"url": f"data:image/png;base64,{i}" + "A" * 1_000_000}
        content = [{"type": "text", "text": f"f{i}"}, {"type": "image_url", "image_url": url}]
        return {"model": "m", "messages": [{"role": "user", "content": content}]}

    async with Cluster(p=1, engine_requests=1) as c:
        flood = await _flooded(c, 1)  # now both engines are taken
        calls = [c.client.post("/v1/chat/completions", json=picture(i), headers=FLOOD) for i in range(3)]
        calls += [c.chat(f"{i}" + " q" * 2000, headers=QUIET) for i in range(9)]
        tasks = [asyncio.create_task(call) for call in calls]
        await c.until(lambda: sum(map(c.core.admission.waiting, ("prefill", "decode"))) == 13)
        c.d[0].hold.set()
        assert {reply.status_code for reply in await asyncio.gather(*flood, *tasks)} == {200}
        pictures = [i for i, content in enumerate(_asked(c.d[0])) if isinstance(content, list)]
        assert len(pictures) == 3 and pictures[-1] <= 8, "about as many tokens as a text of 4,000 characters"
