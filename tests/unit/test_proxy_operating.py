"""What operators see and do: readiness, drains, reloads, keys, metrics, logs."""

import asyncio
import logging
import re

import pytest
from proxy_fakes import Cluster, FakeEngine, turn, unanswered

from vllm_kvtier.errors import ConfigError
from vllm_kvtier.proxy.config import EngineAddress
from vllm_kvtier.proxy.engines.engine_http import EngineFailure
from vllm_kvtier.proxy.keys import ApiKeys
from vllm_kvtier.proxy.logs import AddRequestId
from vllm_kvtier.wire.auth import ClusterKey

ANN, BOB, ADMIN = "ann-0123456789abcdef", "bob-0123456789abcdef", "adm-0123456789abcdef"


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


# ---------------------------------------------------------------- readiness


async def test_ready_needs_an_engine_that_answered():
    async with Cluster(p=1, d=2, probe_on_start=True) as c:
        await c.until(lambda: c.core.ready)
        assert c.d[0].probes + c.d[1].probes >= 1
        assert (await c.client.get("/ready")).json() == {"prefill": 1, "decode": 2, "ready": True}


async def test_ready_after_first_engine_answers():
    async with Cluster(d=1) as c:
        await c.d[0].kill()
        for engine in c.core.fleet:
            engine.probe_in_background()
        await c.until(lambda: not c.core.decode[0].healthy)
        ready = await c.client.get("/ready")
        assert ready.status_code == 503 and ready.json()["ready"] is False
        await c.d[0].start()
        await c.until(lambda: c.core.ready)
        assert (await c.client.get("/ready")).status_code == 200


async def test_proxies_with_one_cluster_key_have_one_salt(tmp_path, caplog):
    """Otherwise a restart of the proxy would make all that engines and stores have useless."""
    caplog.set_level(logging.INFO)
    key, own = tmp_path / "cluster.key", tmp_path / "salt"
    ClusterKey.create(str(key))
    own.write_text("0123456789abcdef")

    async def salt(**options) -> str:
        caplog.clear()
        async with Cluster(p=0, d=1, **options) as c:
            await c.chat("hello")
            return c.d[0].seen[0].body["cache_salt"]

    first = await salt(cluster_key_file=str(key))
    assert first == await salt(cluster_key_file=str(key))
    other = await salt(cluster_key_file=str(key), salt_secret_file=str(own))
    assert first != other == await salt(salt_secret_file=str(own))
    assert "salts are random" not in caplog.text
    assert await salt() not in (first, other) and "salts are random" in caplog.text


# ---------------------------------------------------------------- drains


async def test_drained_engine_finishes_requests_and_gets_no_new_ones():
    async with Cluster(d=2) as c:
        c.d[0].gate = asyncio.Semaphore(1)
        c.core.decode[1].weighted_picks = 1e9
        request = c.client.build_request("POST", "/v1/chat/completions", json=turn("u1", stream=True))
        reply = await c.client.send(request, stream=True)
        pieces = reply.aiter_raw()
        got = await anext(pieces)
        state = await c.client.post("/kvtier/drain", json={"engine": c.d[0].url})
        assert state.status_code == 200 and state.json()["decode"][0]["drained"] is True
        for i in range(4):
            await c.chat(f"other {i}")
        assert len(c.d[0].seen) == 1 and len(c.d[1].seen) == 4
        for _ in range(9):
            c.d[0].gate.release()
        got += b"".join([piece async for piece in pieces])
        assert got.endswith(b"data: [DONE]\n\n") and b"error" not in got
        await c.client.post("/kvtier/resume", json={"engine": c.d[0].url, "role": "decode"})
        await c.chat("again")
        assert len(c.d[0].seen) == 2


async def test_draining_proxy_serves_but_is_not_ready():
    async with Cluster() as c:
        await c.chat("u1")
        assert (await c.client.get("/ready")).status_code == 200
        await c.client.post("/kvtier/drain")
        assert (await c.client.get("/ready")).status_code == 503
        assert (await c.client.get("/health")).status_code == 200
        reply = await c.chat("u1")
        assert reply.status_code == 200 and reply.headers["connection"] == "close"
        await c.client.post("/kvtier/resume")
        assert (await c.client.get("/ready")).status_code == 200


async def test_all_decode_engines_drained_returns_503():
    async with Cluster() as c:
        await c.client.post("/kvtier/drain", json={"engine": c.d[0].url})
        reply = await c.chat("u1")
        assert reply.status_code == 503 and "drained" in reply.json()["error"]["message"]
        assert not c.p[0].seen


@pytest.mark.parametrize(
    ("body", "status"),
    [(b'{"engine": "http://unknown:1"}', 404), (b'{"engin": 1}', 400), (b"[", 400), (b'{"role": "x"}', 400)],
)
async def test_drain_of_unknown_engine_or_malformed_body_is_refused(body, status):
    async with Cluster() as c:
        assert (await c.client.post("/kvtier/drain", content=body)).status_code == status
        assert not c.core.draining


# ---------------------------------------------------------------- reloads


async def test_engines_added_and_removed_lose_no_output():
    async with Cluster(d=2) as c:
        c.d[0].gate = asyncio.Semaphore(1)
        c.core.decode[1].weighted_picks = 1e9
        request = c.client.build_request("POST", "/v1/chat/completions", json=turn("u1", stream=True))
        reply = await c.client.send(request, stream=True)
        pieces = reply.aiter_raw()
        got = await anext(pieces)
        leaver, stayer = c.core.decode
        newcomer = await FakeEngine("D9").start()
        old, c.d = c.d, [c.d[1], newcomer]
        c.core.apply(c.config())
        assert c.core.decode[0] is stayer and c.core.decode[1].index == 2 and leaver.leaving
        assert c.core.state()["leaving"][0]["outstanding"] == 1
        for i in range(4):
            assert (await c.chat(f"other {i}")).status_code == 200
        assert len(newcomer.seen) >= 1 and len(old[0].seen) == 1
        for _ in range(9):
            old[0].gate.release()
        got += b"".join([piece async for piece in pieces])
        assert got.endswith(b"data: [DONE]\n\n") and b"error" not in got
        await c.until(lambda: c.core.state()["leaving"] == [])
        await old[0].kill()


async def test_removed_engine_gets_no_requests():
    async with Cluster() as c:
        await c.chat("u1")
        (engine,) = c.core.decode
        closing = asyncio.create_task(engine.aclose())
        await asyncio.sleep(0)
        for _ in range(2):
            with pytest.raises(EngineFailure, match="no longer used") as caught:
                await engine.ask("GET", "/health", None, {}, 5)
            assert caught.value.unreached
            await closing


async def test_removed_engine_that_fails_is_not_probed():
    async with Cluster(d=2, backoff_initial=60, backoff_max=60) as c:
        engine = c.core.decode[0]
        c.d = c.d[1:]
        c.core.apply(c.config())
        engine.mark_unavailable("It broke.")
        assert not any(task.get_name().startswith("probe") for task in asyncio.all_tasks())


async def test_proxy_internal_error_returns_500_and_is_logged(caplog):
    async with Cluster() as c:
        c.core.routes = None
        reply = await c.chat("u1", headers={"X-Request-Id": "id-9"})
        assert reply.status_code == 500 and reply.json()["error"]["type"] == "internal_error"
        assert "AttributeError" in caplog.text and reply.headers["x-request-id"] == "id-9"
        assert c.core.decode[0].outstanding == c.core.prefill[0].outstanding == 0


async def test_invalid_reload_keeps_old_configuration():
    async with Cluster() as c:
        before = c.core.decode[0]
        for changes in ({"engine": {"api_key_file": "/none"}}, {"api_keys_file": "/none"}, {"admin_key_file": "/none"}):
            with pytest.raises(ConfigError, match="/none"):
                c.core.apply(c.config(queue_limit=5, **({"engine": {"weight": 9.0}} | changes)))
            assert (
                c.core.decode == [before]
                and before.weight == 1.0
                and c.core.config.queue_limit == 1024
                and not before.leaving
            )
        assert (await c.chat("u1")).status_code == 200


async def test_reload_applies_connect_timeout_to_engines_in_use():
    async with Cluster(p=0, connect_timeout=1000) as c:
        await c.chat("u1")
        await c.d[0].kill()
        c.core.apply(c.config(connect_timeout=0.05))
        with unanswered(c.d[0].port):
            assert (await asyncio.wait_for(c.chat("u2"), 10)).status_code == 503


async def test_reload_applies_weights_limits_and_serves_waiting():
    async with Cluster(p=0, engine_requests=1) as c:
        c.d[0].hold = asyncio.Event()
        asked = [asyncio.create_task(c.chat(f"u{i}")) for i in range(3)]
        await c.until(lambda: c.core.admission.waiting("decode") == 2)
        c.core.apply(c.config(engine_requests=2))
        await c.d[0].until_seen(2)
        assert c.core.admission.waiting("decode") == 1
        c.core.apply(c.config(engine={"weight": 2.0, "max_requests": 0}))
        await c.d[0].until_seen(3)
        assert c.core.decode[0].weight == 2.0 and c.core.decode[0].index == 0
        c.d[0].hold.set()
        assert [(await task).status_code for task in asked] == [200] * 3


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_waiting_requests_go_to_the_engines_that_replace_all_others(role):
    """They were refused: none of the old engines was left, and the new ones were not there yet."""
    async with Cluster(p=2, d=2, engine_requests=1) as c:
        fakes = c.p if role == "prefill" else c.d
        old, new = ({role: (EngineAddress(fake.url),)} for fake in fakes)
        c.core.apply(c.config(**old))
        fakes[0].hold = asyncio.Event()
        first = asyncio.create_task(c.chat("u1"))
        await fakes[0].until_seen(1)
        second = asyncio.create_task(c.chat("u2"))
        await c.until(lambda: c.core.admission.waiting(role) == 1)
        c.core.apply(c.config(**new))
        assert (await second).status_code == 200 and len(fakes[1].seen) == 1 and not first.done()
        fakes[0].hold.set()
        assert (await first).status_code == 200


async def _embed(c, text):
    return (await c.client.post("/v1/embeddings", json={"input": text})).status_code


async def test_waiting_embeddings_go_to_decode_engines_once_there_are_no_pooling_engines():
    """They stayed in the pooling engines' queue, whose turn did not come: 429 after queue_timeout."""
    async with Cluster(p=0, d=1, pooling=1, engine_requests=1) as c:
        (pooling,), (decode,) = c.pooling, c.d
        pooling.hold, decode.hold = asyncio.Event(), asyncio.Event()
        chat, first = asyncio.create_task(c.chat("u1")), asyncio.create_task(_embed(c, "a"))
        await c.until(lambda: c.core.decode[0].full and c.core.fleet.pooling[0].full)
        second = asyncio.create_task(_embed(c, "b"))
        await c.until(lambda: c.core.admission.waiting("pooling") == 1)
        c.core.apply(c.config(pooling=()))
        decode.hold.set()
        assert (await chat).status_code == 200 and await asyncio.wait_for(second, 10) == 200
        assert len(decode.passed) == 1 and not first.done()
        pooling.hold.set()
        assert await first == 200


async def test_waiting_embeddings_go_to_pooling_engines_that_were_added():
    """They stayed among the requests for the decode engines, behind chats."""
    async with Cluster(p=0, d=1, pooling=1, engine_requests=1) as c:
        (pooling,), (decode,) = c.pooling, c.d
        c.core.apply(c.config(pooling=()))
        pooling.hold, decode.hold = asyncio.Event(), asyncio.Event()
        chats, embeddings = [], []
        for tasks, call in ((chats, c.chat), (chats, c.chat), (embeddings, None), (embeddings, None)):
            held = len(chats) + len(embeddings)
            tasks.append(asyncio.create_task(call(f"u{held}") if call else _embed(c, "a")))
            await c.until(lambda: c.core.decode[0].full and c.core.admission.waiting("decode") == held)  # noqa: B023
        c.core.apply(c.config())
        await c.until(lambda: c.core.fleet.pooling[0].full and c.core.admission.waiting("pooling") == 1)
        assert c.core.admission.waiting("decode") == 1
        pooling.hold.set()
        assert await asyncio.wait_for(asyncio.gather(*embeddings), 10) == [200, 200]
        assert len(pooling.passed) == 2 and not any(chat.done() for chat in chats)
        decode.hold.set()
        assert [(await chat).status_code for chat in chats] == [200, 200]


# ---------------------------------------------------------------- keys


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# clients\nann {ANN}\n\nbob {BOB}\n")
    file.chmod(0o600)
    return file


async def test_proxy_api_keys_are_required_and_hidden_from_engines_and_logs(keys, caplog):
    caplog.set_level(logging.DEBUG)
    async with Cluster(api_keys_file=str(keys)) as c:
        for headers in ({}, bearer("wrong-0123456789abc"), {"Authorization": f"Basic {ANN}"}, bearer(ANN[:-1])):
            for path in ("/v1/chat/completions", "/v1/models", "/kvtier/query", "/nowhere"):
                reply = await c.client.post(path, json=turn("u"), headers=headers)
                assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
        assert not c.p[0].seen and not c.d[0].seen
        assert (await c.chat("u1", headers=bearer(ANN))).status_code == 200
        assert (await c.client.get("/v1/models", headers=bearer(BOB))).json()["data"][0]["auth"] is None
        assert "authorization" not in c.p[0].seen[0].headers and "authorization" not in c.d[0].seen[0].headers
        for page in ("/health", "/ready", "/metrics"):
            assert (await c.client.get(page)).status_code != 401
        told = caplog.text + (await c.client.get("/kvtier/state")).text + (await c.client.get("/metrics")).text
        assert ANN not in told and BOB not in told and "key=ann" in told


async def test_tenant_leaves_memory_for_bodies_of_others(keys):
    size = dict.fromkeys(("max_body_bytes", "max_event_bytes", "max_buffered_bytes"), 1 << 20)
    async with Cluster(p=0, api_keys_file=str(keys), **size) as c:
        c.d[0].hold = asyncio.Event()
        large = "x" * (300 << 10)
        held = [asyncio.create_task(c.chat(large, headers=bearer(ANN))) for _ in range(3)]
        await c.d[0].until_seen(3)
        refused = await c.chat(large, headers=bearer(ANN))
        assert refused.status_code == 503 and refused.headers["retry-after"]
        held.append(asyncio.create_task(c.chat(large, headers=bearer(BOB))))
        await c.d[0].until_seen(4)
        c.d[0].hold.set()
        assert [(await task).status_code for task in held] == [200] * 4
        assert not c.core.bodies.by_tenant and not c.core.bodies.held
        # One request may be as large as all.
        assert (await c.chat("x" * 900_000, headers=bearer(ANN))).status_code == 200


async def test_tenant_follows_key_owner_when_keys_change(keys):
    async with Cluster(api_keys_file=str(keys)) as c:
        await c.chat("u1", headers=bearer(ANN))
        keys.write_text(f"ann {ANN[::-1]}\nbob {BOB}\n")
        c.core.apply(c.config())
        assert (await c.chat("u1", headers=bearer(ANN))).status_code == 401
        await c.chat("u1", headers=bearer(ANN[::-1]))
        await c.chat("u1", headers=bearer(BOB))
        salts = [seen.body["cache_salt"] for seen in c.d[0].seen]
        assert salts[0] == salts[1] != salts[2]


async def test_engine_api_keys_replace_client_keys(tmp_path, keys):
    file = tmp_path / "engine.key"
    file.write_text("engine-key-1\n")
    async with Cluster(engine={"api_key_file": str(file)}) as c:
        for engine in (*c.p, *c.d):
            engine.api_key = "engine-key-1"
        assert (await c.chat("u1", headers=bearer("the-clients-own"))).status_code == 200
        assert (await c.client.post("/v1/embeddings", json={})).status_code == 200
        for engine in (*c.p, *c.d):
            engine.api_key = "engine-key-2"
        assert (await c.chat("u1")).status_code == 503
        assert not any(engine.healthy for engine in c.core.decode), "it is not the client's key that they refuse"
        file.write_text("engine-key-2")
        c.core.apply(c.config())
        await c.until(lambda: all(engine.healthy for engine in c.core.decode))
        assert (await c.chat("u1")).status_code == 200


async def test_engine_that_refuses_the_proxys_key_does_not_attract_requests(tmp_path):
    """It answers at once, and so always has the least load."""
    file = tmp_path / "engine.key"
    file.write_text("engine-key-1\n")
    async with Cluster(d=2, engine={"api_key_file": str(file)}) as c:
        for engine in (*c.p, *c.d):
            engine.api_key = "engine-key-1"
        c.d[0].api_key = "another"
        replies = await asyncio.gather(*(c.chat(f"u{n}") for n in range(12)))
        assert {reply.status_code for reply in replies} == {200} and len(c.d[1].seen) == 12


async def test_engine_that_forbids_a_path_is_not_taken_for_one_that_refuses_the_key(tmp_path):
    """vLLM answers 403 on paths that an engine is not started with, whatever the key."""
    file = tmp_path / "engine.key"
    file.write_text("engine-key-1\n")
    async with Cluster(engine={"api_key_file": str(file)}) as c:
        for engine in (*c.p, *c.d):
            engine.status = 403
        assert (await c.chat("u1")).status_code == 403
        assert all(engine.healthy for engine in (*c.core.prefill, *c.core.decode))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "hold no key"),
        ("ann", "line 1: write NAME KEY"),
        ("# x\nann short", "line 2: the key of ann has 5"),
        (f"ann {ANN}\nbob {ANN}", "line 2: bob has the key of ann"),
    ],
)
def test_api_key_file_invalid_raises_without_revealing_keys(tmp_path, text, words):
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        ApiKeys.load(str(file))
    assert ANN not in str(caught.value)


async def test_admin_routes_check_the_caller(tmp_path):
    file = tmp_path / "admin.key"
    file.write_text(ADMIN)
    async with Cluster() as c:
        assert (await c.client.post("/kvtier/drain")).status_code == 200
        # What a reverse proxy passes on comes from anywhere, and so does what a page makes a browser send.
        for header in ("X-Forwarded-For", "Forwarded", "Via", "X-Real-IP", "Origin"):
            assert (await c.client.post("/kvtier/resume", headers={header: "127.0.0.1"})).status_code == 403
        assert c.core.draining
        assert (await c.client.post("/kvtier/reload")).status_code == 409
        c.core.apply(c.config(admin_key_file=str(file)))
        for headers in ({}, bearer(ANN)):
            assert (await c.client.post("/kvtier/resume", headers=headers)).status_code == 403
        assert (await c.client.post("/kvtier/resume", headers=bearer(ADMIN))).status_code == 200
        assert not c.core.draining


# ---------------------------------------------------------------- metrics and logs


async def test_access_log_escapes_newlines_in_path(caplog):
    caplog.set_level(logging.INFO)
    async with Cluster() as c:
        await c.client.get("/nowhere%0a2026 INFO forged")
    (said,) = [r.getMessage() for r in caplog.records if r.name.endswith("access")]
    assert "\n" not in said and "\\n2026" in said


async def test_proxy_metrics_count_outcomes():
    async with Cluster(d=2) as c:
        await c.chat("u1", stream=True)
        await c.chat("a longer prompt than the others")
        c.d[0].status = c.d[1].status = 422
        await c.chat("u2")
        c.d[0].status = c.d[1].status = 200
        await c.p[0].kill()
        await c.chat("u3")
        await c.client.get("/nowhere")
        page = (await c.client.get("/metrics")).text
        values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        route = 'route="/v1/chat/completions"'
        assert values[f'kvtier_proxy_requests_total{{outcome="ok",{route}}}'] == "3.0"
        assert values[f'kvtier_proxy_requests_total{{outcome="refused",{route}}}'] == "1.0"
        assert values['kvtier_proxy_requests_total{outcome="refused",route="unknown"}'] == "1.0"
        assert values[f"kvtier_proxy_first_byte_seconds_count{{{route}}}"] == "4.0"
        assert values["kvtier_proxy_prefill_seconds_count"] == "3.0"
        assert values['kvtier_proxy_events_total{event="prefill_failures"}'] == "1.0"
        assert values[f'kvtier_proxy_engine_up{{engine="{c.p[0].url}",role="prefill"}}'] == "0.0"
        assert values[f'kvtier_proxy_engine_in_flight{{engine="{c.d[0].url}",role="decode"}}'] == "0.0"
        assert values['kvtier_proxy_queue{role="decode"}'] == "0.0" and values["kvtier_proxy_ready"] == "1.0"
        assert float(values["kvtier_proxy_prompt_tokens_total"]) > 0


@pytest.mark.parametrize(("how", "outcome"), [("the client leaves", "client_left"), ("the proxy ends", "broken")])
async def test_stream_without_its_end_is_not_counted_as_served(how, outcome):
    async with Cluster() as c:
        c.d[0].gate = asyncio.Semaphore(1)
        request = c.client.build_request("POST", "/v1/chat/completions", json=turn("u1", stream=True))
        reply = await c.client.send(request, stream=True)
        await anext(reply.aiter_raw())
        if how == "the client leaves":
            await reply.aclose()
        else:
            for task in c.requests:
                task.cancel()
        await asyncio.wait_for(c.d[0].seen[0].aborted.wait(), 5)
        page = (await c.client.get("/metrics")).text
        counted = re.findall(r'kvtier_proxy_requests_total{outcome="(\w+)",route="/v1/chat/completions"} 1.0', page)
        assert counted == [outcome]
        assert c.core.state()["counts"].get("clients_left", 0) == (outcome == "client_left")


async def test_proxy_counts_known_prompt_tokens():
    async with Cluster() as c:
        text = "word " * 2000
        for _ in range(2):
            await c.chat(text)
        page = (await c.client.get("/metrics")).text
        values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
        known, all_ = (float(values[f"kvtier_proxy_prompt_tokens_{name}total"]) for name in ("known_", ""))
        assert 0.49 < known / all_ < 0.51, "all of the second"


async def test_access_log_lines_have_request_id(caplog):
    caplog.set_level(logging.INFO)
    caplog.handler.addFilter(AddRequestId())
    async with Cluster(p=2, d=2) as c:
        await c.p[0].kill()
        c.core.prefill[1].weighted_picks = 1e9
        await c.chat("u1", headers={"X-Request-Id": "id-1"})
        await c.client.get("/nowhere", headers={"X-Request-Id": "id-2"})
        await c.client.get("/health", headers={"X-Request-Id": "id-3"})
    said = [(r.request_id, r.getMessage()) for r in caplog.records if r.name.startswith("vllm.kvtier")]
    assert [i for i, text in said if "engine unavailable" in text] == ["id-1"]
    ((line),) = [text for i, text in said if i == "id-1" and text.startswith("POST /v1/chat/completions 200 ok")]
    assert f"prefill={c.p[1].url}" in line and "decode=http" in line and "first=" in line and "total=" in line
    assert [text.partition(" total=")[0] for i, text in said if i == "id-2"] == ["GET /nowhere 404 refused"]
    assert "id-3" not in [i for i, text in said], "machines look every few seconds"
