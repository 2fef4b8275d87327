"""What one engine refuses with 4xx, another may serve: engines may differ in models, adapters, parsers and lengths."""

import asyncio

import pytest
from proxy_fakes import Cluster, alone, turn
from test_proxy_following import both_asked, following

from vllm_kvtier.proxy.engines.engine import EngineSlot


def preferred(c, role):
    """The first engine of a role, which the router takes before the others."""
    for engine in getattr(c.core, role)[1:]:
        engine.weighted_picks = 1e9
    return getattr(c, role[0])[0], getattr(c.core, role)[0]


def logged(caplog):
    return caplog.text.count("to a request that another engine served")


@pytest.mark.parametrize("status", [400, 404, 429])
async def test_prompt_that_a_prefill_engine_refuses_is_prefilled_by_another(status, caplog):
    async with Cluster(p=2) as c:
        fake, engine = preferred(c, "prefill")
        fake.status = status
        for n in range(3):
            assert (await c.chat(f"u{n}")).status_code == 200
            export = c.d[0].seen[n].body["kv_transfer_params"]["kvtier"]["export"]
            assert export.startswith("secret-export-P1") and len(fake.seen) == (1 if status == 404 else n + 1)
        assert engine.healthy and not engine.failures and not engine.instance
        counts = c.core.state()["counts"]
        assert counts["prefill_declined"] == len(fake.seen) and "prefill_failures" not in counts
        assert logged(caplog) == (status != 429), "one line for an engine"


async def test_prompt_that_prefill_engines_refuse_is_decoded_alone():
    async with Cluster(p=3) as c:
        for engine in c.p:
            engine.status = 400
        assert (await c.chat("u1")).status_code == 200 and alone(c.d[0].seen[0])
        assert sum(len(engine.seen) for engine in c.p) == 2, "max_prefill_attempts"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [403, 404, 405])
async def test_request_that_a_decode_engine_has_no_model_for_goes_to_another(status, stream, caplog):
    async with Cluster(d=2) as c:
        fake, engine = preferred(c, "decode")
        fake.status = status
        replies = await asyncio.gather(*(c.chat(f"u{n}", stream=stream) for n in range(12)))
        assert {reply.status_code for reply in replies} == {200} and len(c.d[1].seen) == 12
        assert all("export" in seen.body["kv_transfer_params"]["kvtier"] for seen in c.d[1].seen)
        assert engine.healthy and not engine.failures and logged(caplog) == bool(fake.seen) == 1


@pytest.mark.parametrize("status, prefills, decodes", [(400, 2, 1), (422, 2, 1), (404, 2, 3)])
async def test_bad_request_is_sent_to_few_engines_and_counts_as_no_failure(status, prefills, decodes, caplog):
    async with Cluster(p=4, d=4) as c:
        for engine in (*c.p, *c.d):
            engine.status = status
        reply = await c.chat("u1")
        assert reply.status_code == status and f"says {status}" in reply.json()["error"]["message"]
        assert sum(len(engine.seen) for engine in c.p) == prefills
        assert sum(len(engine.seen) for engine in c.d) == decodes
        assert all(each.healthy and not each.failures and each._prober is None for each in c.core.fleet)
        assert not {"refused", "prefill_failures"} & set(c.core.state()["counts"]) and not logged(caplog)


@pytest.mark.parametrize("others", ["fail", "answer 500"])
async def test_client_error_stays_one_if_other_engines_fail(others):
    async with Cluster(p=0, d=2) as c:
        preferred(c, "decode")[0].status = 404
        if others == "fail":
            await c.d[1].kill()
        else:
            c.d[1].status = 500
        assert (await c.chat("u1")).status_code == 404


@pytest.mark.parametrize("status", [404, 429])
async def test_client_error_does_not_wait_for_an_unavailable_engine(status):
    async with Cluster(p=0, d=2, backoff_initial=60, backoff_max=60) as c:
        c.core.decode[1].mark_unavailable("It hangs.")
        c.d[0].status, c.d[1].hold = status, asyncio.Event()
        assert (await c.chat("u1")).status_code == status and not c.d[1].seen


async def test_decode_engine_that_refused_beside_the_prefill_is_not_asked_again():
    async with following(d=2, max_decode_attempts=2) as c:
        asked = asyncio.create_task(c.chat("hello"))
        await c.p[0].until_seen(1)
        await c.until(lambda: any(engine.seen for engine in c.d))
        refusing, other = sorted(c.d, key=lambda engine: not engine.seen)
        refusing.status, other.hold = 404, None
        refusing.hold.set()
        c.p[0].hold.set()
        assert (await asked).status_code == 200 and len(refusing.seen) == len(other.seen) == 1


async def test_followed_prefill_that_is_aborted_cancels_decode_request():
    """An engine that is shut down with --shutdown-timeout answers 200, and the decode engine would wait for its KV."""
    async with following() as c:
        asked = asyncio.create_task(c.chat("hello"))
        _, to_d = await both_asked(c)
        c.p[0].ends = True
        c.p[0].hold.set()
        await asyncio.wait_for(to_d.aborted.wait(), 5)
        c.d[0].hold.set()
        assert (await asked).status_code == 200 and len(c.d[0].seen) == 2
        assert "export" not in c.d[0].seen[1].body["kv_transfer_params"]["kvtier"], "it computes the prompt"


@pytest.mark.parametrize("path, d, how", [
    ("/v1/chat/completions", 1, "refuses"), ("/v1/chat/completions", 1, "fails"),
    ("/v1/chat/completions", 2, "fails"), ("/v1/messages", 2, "fails"),
])  # fmt: skip
async def test_prompt_that_another_engine_did_not_compute_counts_at_the_decode_engine(path, d, how):
    """``d`` is 2: the first decode engine fails, otherwise the prefill engine does."""
    async with Cluster(p=2 - d, d=d) as c:
        first = preferred(c, "prefill" if d == 1 else "decode")[0]
        if how == "fails":
            await first.kill()
        else:
            first.status = 400
        fake, engine = c.d[-1], c.core.decode[-1]
        fake.hold = asyncio.Event()
        asked = asyncio.create_task(c.client.post(path, json=turn("word " * 2000)))
        await c.until(lambda: fake.seen or fake.passed)
        assert engine.tokens > 2000
        fake.hold.set()
        assert (await asked).status_code == 200
        assert not any(each.tokens or each.outstanding for each in c.core.fleet)


@pytest.mark.parametrize("status", [403, 404])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_engine_without_a_model_is_not_asked_for_it_again_for_a_while(role, status):
    """It would be free at all times, and its requests would go to the others however full these are. vLLM from 0.32 on
    answers 403 on /inference/v1/generate without --enable-scale-out."""
    async with Cluster(p=2, d=2, engine_requests=2) as c:
        (fake, engine), (other, _) = preferred(c, role), (getattr(c, role[0])[1], None)
        fake.status = status
        assert (await c.chat("u0")).status_code == 200 and len(fake.seen) == 1
        other.hold = asyncio.Event()
        asked = [asyncio.create_task(c.chat(f"u{n}")) for n in range(1, 7)]
        await c.until(lambda: c.core.admission.waiting(role) == 4)
        assert len(fake.seen) == 1 and getattr(c.core, role)[1].outstanding == 2, "its limit"
        other.hold.set()
        assert {reply.status_code for reply in await asyncio.gather(*asked)} == {200} and len(fake.seen) == 1
        fake.status = 200
        (wants,) = engine._lacking
        engine._lacking[wants] -= 31
        assert not engine.lacks(wants) and (await c.chat("u7")).status_code == 200 and len(fake.seen) == 2
        engine.now_lacks(wants)
        engine.mark_unavailable("It was restarted.")
        assert not engine.lacks(wants)


async def test_requests_of_a_burst_wait_for_the_engine_that_has_their_model():
    """Also while none of them has an answer yet, which tells that the others lack it."""
    async with Cluster(p=0, d=2, engine_requests=2) as c:
        preferred(c, "decode")[0].status = 404
        c.d[1].hold = asyncio.Event()
        asked = [asyncio.create_task(c.chat(f"u{n}")) for n in range(12)]
        await c.until(lambda: c.core.admission.waiting("decode") >= 8)
        assert c.core.decode[1].outstanding <= 4 and len(c.d[0].seen) <= 4
        c.d[1].hold.set()
        assert {reply.status_code for reply in await asyncio.gather(*asked)} == {200}


async def test_request_that_waits_for_its_model_does_not_stop_others():
    async with Cluster(p=0, d=2, engine_requests=1) as c:
        first, second = c.core.decode
        route = "/v1/chat/completions"
        first.now_lacks((route, "x"))
        second.now_lacks((route, "y"))
        for fake in c.d:
            fake.hold = asyncio.Event()
        asked = []
        for model in ("x", "y", "x", "y"):
            body = {**turn(f"u{len(asked)}"), "model": model}
            asked.append(asyncio.create_task(c.client.post(route, json=body)))
            await c.until(
                lambda: first.outstanding + second.outstanding + c.core.admission.waiting("decode") == len(asked)
            )
        assert (first.outstanding, second.outstanding) == (1, 1)
        c.d[0].hold.set()  # of y
        assert (await asked[1]).status_code == (await asked[3]).status_code == 200
        assert not asked[2].done()
        c.d[1].hold.set()
        assert {reply.status_code for reply in await asyncio.gather(*asked)} == {200}


async def test_failed_over_request_prefers_a_full_engine_that_has_its_model():
    async with Cluster(p=0, d=3, engine_requests=1, backoff_initial=60, backoff_max=60) as c:
        lacking, full, dead = c.core.decode
        lacking.now_lacks(("/v1/chat/completions", turn("u")["model"]))
        dead.weighted_picks = -1e9
        slot = EngineSlot(full)
        await c.d[2].kill()
        assert (await c.chat("u1")).status_code == 200 and len(c.d[1].seen) == 1 and not c.d[0].seen
        slot.release()


async def test_prompt_of_a_model_that_no_prefill_engine_has_waits_for_none():
    async with Cluster(p=1, d=1, engine_requests=1) as c:
        c.core.prefill[0].now_lacks(("/v1/chat/completions", turn("u")["model"]))
        slot = EngineSlot(c.core.prefill[0])
        assert (await c.chat("u1")).status_code == 200 and alone(c.d[0].seen[0])
        slot.release()


async def test_models_that_clients_make_up_are_not_remembered_without_a_limit():
    async with Cluster() as c:
        engine = c.core.decode[0]
        for n in range(1000):
            engine.now_lacks(("/v1/completions", f"m{n}"))
        assert len(engine._lacking) <= 256 and engine.lacks(("/v1/completions", "m999"))


async def test_engine_that_fails_meanwhile_is_passed_over_not_the_end_of_the_attempts():
    async with Cluster(p=0, d=3, backoff_initial=60, backoff_max=60) as c:
        _, second, third = c.core.decode
        second.weighted_picks, third.weighted_picks = 1e8, 1e9
        c.d[0].status, c.d[0].hold = 404, asyncio.Event()
        asked = asyncio.create_task(c.chat("x"))
        await c.d[0].until_seen(1)
        second.mark_unavailable("It died, as another request has just found out.")
        c.d[0].hold.set()
        assert (await asked).status_code == 200 and len(c.d[2].seen) == 1


async def test_full_engine_says_more_than_one_without_the_model():
    async with Cluster(p=0, d=2) as c:
        preferred(c, "decode")[0].status = 429
        c.d[1].status = 404
        assert (await c.chat("u1")).status_code == 429
