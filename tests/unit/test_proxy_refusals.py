"""What one engine refuses with 4xx, another may serve: engines may differ in models, adapters, parsers and lengths."""

import asyncio

import pytest
from proxy_fakes import Cluster, alone, turn
from proxy_queue_harness import ProxyQueue, run_loop
from test_proxy_following import both_asked, following

from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.engines.engine import EngineSlot
from vllm_kvtier.proxy.engines.fleet import Fleet
from vllm_kvtier.proxy.routing.admission import Choice
from vllm_kvtier.scheduler.matching.transfer_params import read


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


@pytest.mark.parametrize("status, prefills, decodes", [(400, 2, 1), (422, 2, 1), (404, 4, 4)])
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


@pytest.mark.parametrize("others, status", [("fail", 503), ("answer 500", 500), ("answer 503", 503)])
async def test_client_gets_the_error_of_an_engine_that_may_have_its_model(others, status):
    """vLLM answers 503 when it is full; a client does not send again what gets 404."""
    async with Cluster(p=0, d=2) as c:
        preferred(c, "decode")[0].status = 404
        if others == "fail":
            await c.d[1].kill()
        else:
            c.d[1].status = status
        for path in ("/v1/chat/completions", "/v1/messages"):
            for _ in range(3):
                assert (await c.client.post(path, json=turn("u1"))).status_code == status
        asked = 3 if others == "fail" else 1  # it is known to lack it, but no other one is available
        assert len(c.d[0].seen) == len(c.d[0].passed) == asked


@pytest.mark.parametrize("status", [404, 429])
async def test_client_error_does_not_wait_for_an_unavailable_engine(status):
    async with Cluster(p=0, d=2, backoff_initial=60, backoff_max=60) as c:
        c.core.decode[1].mark_unavailable("It hangs.")
        c.d[0].status, c.d[1].hold = status, asyncio.Event()
        assert (await c.chat("u1")).status_code == (503 if status == 404 else status) and not c.d[1].seen


@pytest.mark.parametrize("all_refuse", [False, True])
@pytest.mark.parametrize("status", [400, 404, 503])
async def test_decode_engines_leave_the_release_of_an_export_to_the_proxy(status, all_refuse):
    async with Cluster(d=2) as c:
        preferred(c, "decode")[0].status = status
        c.d[1].status = status if all_refuse else 200
        reply = await c.chat("u1")
        sent = [read(seen.body["kv_transfer_params"]).handoff for each in c.d for seen in each.seen]
        assert len(sent) == (1 if status == 400 else 2) and len(set(sent)) == 1
        assert all(each.router_releases for each in sent) and sent[0].export == "secret-export-P0-1"
        if reply.status_code == 200:
            assert c.released.empty()
        else:
            assert (await asyncio.wait_for(c.released.get(), 5)).export == sent[0].export and c.released.empty()


async def test_params_without_an_export_are_passed_on_as_they_are():
    """The proxy cannot release what it does not know."""
    async with Cluster() as c:
        own = c.p[0].params({"max_tokens": 1})
        own["kvtier"].pop("export")
        c.p[0].params = lambda body: own
        await c.chat("u1")
        assert c.d[0].seen[0].body["kv_transfer_params"] == own


async def test_export_of_a_followed_prefill_is_left_to_the_proxy():
    """Also that of a prefill which has not ended: the decode engine may not have asked for it."""
    async with following() as c:
        asked = asyncio.create_task(c.chat("hello"))
        await c.p[0].until_seen(1)
        handoff = read((await c.d[0].until_seen(1)).body["kv_transfer_params"]).handoff
        assert handoff.follow and handoff.router_releases
        asked.cancel()
        export = await asyncio.wait_for(c.released.get(), 5)
        assert (export.export, (export.host, export.port)) == (handoff.export, handoff.address)


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
        (wants,) = engine.lacking._until
        engine.lacking._until[wants] -= 31
        assert wants not in engine.lacking and (await c.chat("u7")).status_code == 200 and len(fake.seen) == 2
        engine.lacking.add(wants)
        engine.mark_unavailable("It was restarted.")
        assert wants not in engine.lacking


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
        first.lacking.add((route, "x"))
        second.lacking.add((route, "y"))
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
        lacking.lacking.add(("/v1/chat/completions", turn("u")["model"]))
        dead.weighted_picks = -1e9
        slot = EngineSlot(full)
        await c.d[2].kill()
        assert (await c.chat("u1")).status_code == 200 and len(c.d[1].seen) == 1 and not c.d[0].seen
        slot.release()


async def test_prompt_of_a_model_that_no_prefill_engine_has_waits_for_none():
    async with Cluster(p=1, d=1, engine_requests=1) as c:
        c.core.prefill[0].lacking.add(("/v1/chat/completions", turn("u")["model"]))
        slot = EngineSlot(c.core.prefill[0])
        assert (await c.chat("u1")).status_code == 200 and alone(c.d[0].seen[0])
        slot.release()


@pytest.mark.parametrize("status", [403, 404])
async def test_prompts_that_wait_are_decoded_alone_once_no_prefill_engine_has_their_model(status):
    """Also when it is tried again after a while. Before them in the queue, others wait for that engine."""
    async with Cluster(p=1, d=1, queue_timeout=5) as c:
        fake, engine = c.p[0], c.core.prefill[0]
        engine.limit, fake.hold, fake.refuses = 1, asyncio.Event(), {"l": status}
        asked = {"base": [], "l": []}

        async def one_waits(model):
            number = c.core.admission.waiting("prefill") + 1
            asked[model].append(asyncio.create_task(c.chat("u", model=model)))
            await c.until(lambda: c.core.admission.waiting("prefill") == number)

        def end_one():
            held, fake.hold = fake.hold, asyncio.Event()
            held.set()

        asked["base"].append(asyncio.create_task(c.chat("u", model="base")))
        await fake.until_seen(1)
        for number in (1, 2):
            for model in ("l", "base", "base", "l", "l"):
                await one_waits(model)
            end_one()
            assert {reply.status_code for reply in await asyncio.gather(*asked["l"])} == {200}
            assert c.core.admission.waiting("prefill") == engine.outstanding == 1, "base"
            end_one()
            await fake.until_seen(1 + 3 * number)
            assert [seen.body["model"] for seen in fake.seen] == ["base", *["l", "base", "base"] * number]
            (wants,) = engine.lacking._until
            engine.lacking._until[wants] -= 31
        fake.hold.set()
        assert {reply.status_code for reply in await asyncio.gather(*asked["base"])} == {200}
        assert [alone(seen) for seen in c.d[0].seen].count(True) == 6


async def test_prompt_does_not_wait_for_its_model_after_the_only_prefill_engine_with_it_has_failed():
    """Though another one is before it in the queue, for the engine that is left."""
    async with Cluster(p=2, d=1, queue_timeout=5, backoff_initial=60, backoff_max=60) as c:
        lacking, other = c.core.prefill
        lacking.lacking.add(("/v1/chat/completions", "l"))
        lacking.limit = other.limit = 1
        slots = [EngineSlot(engine) for engine in (lacking, other)]
        asked = []
        for model in ("base", "l"):
            asked.append(asyncio.create_task(c.chat("u", model=model)))
            await c.until(lambda: c.core.admission.waiting("prefill") == len(asked))
        other.mark_unavailable("It died.")
        assert (await asked[1]).status_code == 200 and alone(c.d[0].seen[0]) and not asked[0].done()
        slots[0].release()
        assert (await asked[0]).status_code == 200 and len(c.p[0].seen) == 1


def test_waiting_requests_are_asked_once_when_no_engine_has_their_model():
    """Clients make names up, and all engines refuse these again and again."""
    calls = []
    fleet = Fleet(lambda engine: None, lambda engine: None, lambda *what: calls.append(what))
    addresses = tuple(EngineAddress(f"http://d:{n}") for n in (1, 2, 3))
    fleet.apply(ProxyConfig(decode=addresses), probe_on_start=False)
    x, y = ("/v1/completions", "x"), ("/v1/completions", "y")
    first, second, gone = fleet.decode
    gone.drained = True
    for engine, wants in [(first, x), (first, None), (second, None), (second, y)]:
        engine.lacks(wants)
    assert not calls
    for _ in range(3):
        for engine in (second, first):
            engine.lacking.tried(x)
            engine.lacks(x)
    assert calls == [("decode", x)]
    first.lacking._until[x] -= 31
    first.lacking.tried(x)
    assert x in first.lacking and len(calls) == 1, "it may have the model now"
    for _ in range(3):
        first.lacks(x)
    assert calls == [("decode", x)] * 2


async def test_only_those_that_want_what_no_engine_has_are_asked_anew():
    queue, asked = ProxyQueue(), []
    await queue.full()

    def enter(name):
        def choose():
            asked.append(name)
            return Choice(None)

        return asyncio.create_task(queue.admission.acquire("decode", b"t", choose, 1000.0, ("/v1/completions", name)))

    tasks = [enter(name) for name in "xyxy"]
    await run_loop()
    asked.clear()
    queue.admission.serve_waiting("decode", anew=True, wants=("/v1/completions", "y"))
    assert asked == ["y", "y"]
    for task in tasks:
        task.cancel()


async def test_models_that_clients_make_up_are_not_remembered_without_a_limit():
    async with Cluster() as c:
        engine = c.core.decode[0]
        for n in range(1000):
            engine.lacking.add(("/v1/completions", f"m{n}"))
        assert len(engine.lacking._until) <= 256 and ("/v1/completions", "m999") in engine.lacking


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


# ---------------------------------------------------------------- routes that are passed through

PASSED = {
    "/v1/embeddings": {"model": "m", "input": "a"},
    "/v1/messages": {"model": "m", "messages": []},
    "/v1/responses": {"model": "m", "input": "a"},
    "/tokenize": {"model": "m", "prompt": "a"},
}


@pytest.mark.parametrize("status", [403, 404, 429])
@pytest.mark.parametrize("path", PASSED)
async def test_passed_request_that_one_engine_refuses_goes_to_another(path, status):
    async with Cluster(p=0, d=2, pooling=2 if path == "/v1/embeddings" else 0) as c:
        role = "pooling" if path == "/v1/embeddings" else "decode"
        fakes, (engine, other) = c.pooling or c.d, getattr(c.core.fleet, role)
        fakes[0].status = fakes[0].tokenize_status = status
        other.weighted_picks = 1e9

        def asked():
            return [len(fake.passed) + len(fake.tokenized) for fake in fakes]

        for _ in range(3):
            assert (await c.client.post(path, json=PASSED[path])).status_code == 200
        assert asked() == [3 if status == 429 else 1, 3]
        assert engine.healthy and not engine.failures
        fakes[0].status = fakes[0].tokenize_status = 200
        assert (await c.client.post(path, json=PASSED[path] | {"model": "other"})).status_code == 200
        assert asked() == [4 if status == 429 else 2, 3], "only of that model"


async def test_passed_request_waits_for_the_engine_that_has_its_model():
    """Behind it, those of other models go on."""
    async with Cluster(p=0, d=2, engine_requests=1) as c:
        c.core.decode[0].lacking.add(("/v1/messages", "m"))
        slot = EngineSlot(c.core.decode[1])
        asked = asyncio.create_task(c.client.post("/v1/messages", json=PASSED["/v1/messages"]))
        await c.until(lambda: c.core.admission.waiting("decode") == 1)
        other = EngineSlot(c.core.decode[0])
        behind = asyncio.create_task(c.client.post("/v1/messages", json=PASSED["/v1/messages"] | {"model": "x"}))
        await c.until(lambda: c.core.admission.waiting("decode") == 2)
        other.release()
        assert (await behind).json()["engine"] == "D0" and not asked.done()
        slot.release()
        assert (await asked).json()["engine"] == "D1"


@pytest.mark.parametrize("path, body", [
    ("/v1/embeddings", PASSED["/v1/embeddings"]), ("/custom", {"a": 1}),
    ("/v1/responses", {"model": "m", "previous_response_id": "resp_x"}),
])  # fmt: skip
async def test_passed_request_that_all_engines_refuse_is_refused(path, body):
    """What may run only once, or may be found missing for another reason, says nothing of a model."""
    async with Cluster(p=0, d=4, extra_routes=("/custom",)) as c:
        for fake in c.d:
            fake.status = 404
        reply = await c.client.post(path, json=body)
        assert reply.status_code == 404 and "says 404" in reply.text
        known = path == "/v1/embeddings"
        assert sum(len(fake.passed) for fake in c.d) == (4 if known else 1)
        assert sum(len(engine.lacking._until) for engine in c.core.decode) == (4 if known else 0)
        assert (await c.client.post(path, json=body)).status_code == 404
        assert sum(len(fake.passed) for fake in c.d) == (8 if known else 2), "one may have been given the model"


async def test_pooling_engine_that_answers_errors_to_what_others_serve_becomes_unavailable():
    async with Cluster(p=0, d=1, pooling=2, backoff_initial=60, backoff_max=60) as c:
        engine, other = c.core.fleet.pooling
        c.pooling[0].status, other.weighted_picks = 500, 1e9
        for _ in range(2):
            assert (await c.client.post("/v1/embeddings", json=PASSED["/v1/embeddings"])).status_code == 200
        assert engine.healthy
        engine._first_error -= 11.0
        assert (await c.client.post("/v1/embeddings", json=PASSED["/v1/embeddings"])).status_code == 200
        assert not engine.healthy and other.healthy


# ---------------------------------------------------------------- fleets of many models


@pytest.mark.parametrize("status", [403, 404])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/audio/transcriptions"])
async def test_any_number_of_engines_may_lack_what_one_has(path, status):
    """What an engine lacks is no failure: ``max_decode_attempts`` limits those."""
    async with Cluster(p=0, d=6) as c:
        for fake, engine in zip(c.d[:5], c.core.decode, strict=False):
            fake.status, engine.weighted_picks = status, -1e9
        audio = dict(data={"model": "whisper"}, files={"file": b"RIFF"})
        body = audio if "audio" in path else dict(json=turn("u"))
        for _ in range(4):
            assert (await c.client.post(path, **body)).status_code == 200
        assert [len(fake.seen) + len(fake.passed) for fake in c.d] == [1] * 5 + [4]
        (known,) = {tuple(engine.lacking._until) for engine in c.core.decode[:5]}
        assert known == ((path, "whisper" if "audio" in path else turn("u")["model"]),)


async def test_route_that_only_a_prefill_engine_has_is_found():
    async with Cluster(p=1, d=4) as c:
        for fake in c.d:
            fake.tokenize_status = 403
        assert (await c.client.post("/tokenize", json=PASSED["/tokenize"])).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_requests_that_an_engine_has_no_model_for_wait_for_the_limit_of_the_next(path):
    """Also when it is tried again after a while: by one request."""
    async with Cluster(p=0, d=2, engine_requests=8) as c:
        lacking, other = c.core.decode
        other.limit = 4
        c.d[0].status, c.d[1].hold = 404, asyncio.Event()

        def seen():
            return len(c.d[0].seen) + len(c.d[0].passed)

        tasks = [asyncio.create_task(c.client.post(path, json=turn(f"u{n}"))) for n in range(30)]
        await c.until(lambda: c.core.admission.waiting("decode") == 26 and other.outstanding == 4)
        before = seen()
        assert before <= 8, "its limit"
        for number in (1, 2):
            (wants,) = lacking.lacking._until
            lacking.lacking._until[wants] -= 31
            c.core.admission.serve_waiting("decode")
            await c.until(lambda: c.core.admission.waiting("decode") == 26)
            assert seen() == before + number and other.outstanding == 4
        c.d[1].hold.set()
        assert {reply.status_code for reply in await asyncio.gather(*tasks)} == {200}
        assert not lacking.outstanding and not other.outstanding


async def test_prompts_wait_for_the_prefill_engine_that_has_their_model():
    async with Cluster(p=2, d=1, engine_requests=8) as c:
        lacking, other = c.core.prefill
        lacking.lacking.add(("/v1/chat/completions", turn("u")["model"]))
        c.p[0].status, other.limit, c.p[1].hold = 404, 2, asyncio.Event()
        tasks = [asyncio.create_task(c.chat(f"u{n}")) for n in range(12)]
        await c.until(lambda: c.core.admission.waiting("prefill") == 10)
        (wants,) = lacking.lacking._until
        lacking.lacking._until[wants] -= 31
        c.core.admission.serve_waiting("prefill")
        await c.until(lambda: len(c.p[0].seen) == 1)
        assert c.core.admission.waiting("prefill") == 9
        c.p[1].hold.set()
        assert {reply.status_code for reply in await asyncio.gather(*tasks)} == {200}
        assert sum(alone(seen) for seen in c.d[0].seen) <= 1, "the one that tried"


@pytest.mark.parametrize("status", [404, 500, 503])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_request_that_was_answered_is_not_sent_to_an_engine_that_may_hang(path, status):
    async with Cluster(p=0, d=2, backoff_initial=60, backoff_max=60) as c:
        c.d[0].status, c.d[1].hold = status, asyncio.Event()
        c.core.decode[1].mark_unavailable("It hangs.")
        assert (await c.client.post(path, json=turn("u"))).status_code == (503 if status == 404 else status)
        assert not c.d[1].seen and not c.d[1].passed


async def test_full_engine_is_not_taken_for_one_that_errs():
    """vLLM answers 503 when its own queue is full."""
    async with Cluster(p=0, d=2, backoff_initial=60, backoff_max=60) as c:
        fake, engine = preferred(c, "decode")
        fake.status = 503
        for n in range(5):
            assert (await c.chat(f"u{n}")).status_code == 200
            engine._first_error -= 11.0
        assert len(fake.seen) == 5 and engine.healthy


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_engine_that_gets_a_model_that_none_had_is_found(path):
    """An adapter that is loaded at run time. Before, its clients got 404 for 30 s, from the other engine."""
    async with Cluster(p=0, d=2) as c:
        preferred(c, "decode")
        for fake in c.d:
            fake.status = 404
        assert (await c.client.post(path, json=turn("u"))).status_code == 404
        c.d[1].status = 200
        for _ in range(3):
            assert (await c.client.post(path, json=turn("u"))).status_code == 200


@pytest.mark.parametrize("how", ["restarted", "asked again"])
async def test_waiting_requests_learn_that_more_engines_serve_them(how):
    """The first was refused by that engine and waits for the other one. Those behind it waited for its turn."""
    async with Cluster(p=0, d=2, engine_requests=1) as c:
        lacking, other = c.core.decode
        other.weighted_picks = 1e9
        slot = EngineSlot(other)
        c.d[0].status = 404
        first = asyncio.create_task(c.chat("u1"))
        await c.d[0].until_seen(1)
        await c.until(lambda: c.core.admission.waiting("decode") == 1)
        second = asyncio.create_task(c.chat("u2"))
        await c.until(lambda: c.core.admission.waiting("decode") == 2)
        c.d[0].status = 200
        if how == "restarted":
            lacking.mark_unavailable("It was restarted.")
        else:
            (wants,) = lacking.lacking._until
            lacking.lacking._until[wants] -= 31
            assert (await c.chat("u3")).status_code == 200
        assert (await second).status_code == 200 and not first.done()
        slot.release()
        assert (await first).status_code == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_request_that_waits_for_an_engine_that_fails_may_be_sent_again(path):
    """404 of the other engine would be final."""
    async with Cluster(p=0, d=2, engine_requests=1, backoff_initial=60, backoff_max=60) as c:
        lacking, other = c.core.decode
        other.weighted_picks = 1e9
        slot = EngineSlot(other)
        c.d[0].status = 404
        asked = asyncio.create_task(c.client.post(path, json=turn("u")))
        await c.until(lambda: c.core.admission.waiting("decode") == 1)
        other.mark_unavailable("It died.")
        reply = await asked
        assert reply.status_code == 503 and reply.headers["retry-after"]
        slot.release()


@pytest.mark.parametrize("status", [404, 429, 503])
async def test_request_waits_once_for_all_engines_that_may_have_its_model(status):
    """Not ``queue_timeout`` for each."""
    async with Cluster(p=0, d=3, engine_requests=1, queue_timeout=30.0) as c:
        c.d[0].status = c.d[1].status = status
        for engine, picks in zip(c.core.decode, (0, 1e8, 1e9), strict=True):
            engine.weighted_picks = picks
        slots = [EngineSlot(engine) for engine in c.core.decode[1:]]
        asked = asyncio.create_task(c.chat("u"))
        await c.until(lambda: c.core.admission.waiting("decode") == 1)
        deadlines = []
        for slot in slots:
            (waiter,) = c.core.admission._queues["decode"]
            deadlines.append(waiter.deadline[0])
            if slot is slots[0]:
                await asyncio.sleep(0.5)  # by which another time limit would end later
                slot.release()
                await c.d[1].until_seen(1)
                await c.until(lambda: c.core.admission.waiting("decode") == 1)
        assert deadlines[1] - deadlines[0] < 0.25
        assert c.core.decode[2].outstanding == 1, "its limit"
        slots[1].release()
        assert (await asked).status_code == 200


@pytest.mark.parametrize("has", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_available_engine_is_asked_though_only_an_unavailable_one_was_not_known_to_lack_it(path, has):
    """In a rolling restart with adapters loaded at run time. The unavailable one may hang."""
    async with Cluster(p=0, d=2, backoff_initial=60, backoff_max=60) as c:
        known, other = c.core.decode
        known.lacking.add((path, turn("u")["model"]))
        other.mark_unavailable("It restarts.")
        c.d[0].status, c.d[1].hold = 200 if has else 404, asyncio.Event()
        assert (await c.client.post(path, json=turn("u"))).status_code == (200 if has else 503)
        assert not c.d[1].seen and not c.d[1].passed
