"""Tokens in and out with prefill and decode engines, and the routes that are forwarded to one engine."""

import asyncio
import importlib.util
import itertools
import json
import re
from pathlib import Path

import pytest
from proxy_fakes import Cluster, events, text_of

from vllm_kvtier.proxy.engines.engine import Engine, EngineSlot
from vllm_kvtier.proxy.messages.buffers import Held
from vllm_kvtier.proxy.routes import passthrough

JSON_UTF8 = "application/json ; charset=utf-8"
GENERATE = "/inference/v1/generate"


def tokens_in(**fields):
    body = {"model": "m", "token_ids": list(range(300)), "sampling_params": {"max_tokens": 9, "temperature": 0}}
    return body | fields


def extra(seen):
    """The params where vLLM 0.25 takes them, which must be those at the top, where 0.33 does."""
    found = seen.body["sampling_params"]["extra_args"]["kv_transfer_params"]
    assert found == seen.body["kv_transfer_params"]
    return found


@pytest.mark.parametrize(
    ("path", "full", "status"),
    [("/v1/embeddings", False, 502), ("/v1/embeddings", True, 503), ("/v1/responses", True, 502)],
)
async def test_answer_too_large_of_forwarded_request_makes_no_engine_unavailable(path, full, status):
    """A client does not send again what must not run twice."""
    async with Cluster(d=3, max_body_bytes=1 << 20, max_event_bytes=1 << 20, max_buffered_bytes=1 << 20) as c:
        for engine in c.d:
            engine.name = "D" * (1 << (17 if full else 20))  # in its answers
        with Held(c.core.answers) as others:
            others.resize((1 << 20) * full)
            reply = await c.client.post(path, json={"input": "a"})
        assert reply.status_code == status, reply.text
        assert ("retry-after" in reply.headers) == (status == 503)
        assert sum(len(engine.passed) for engine in c.d) == 1, "another engine's would be as large"
        assert all(engine.healthy and not engine.outstanding for engine in c.core.decode)


# ---------------------------------------------------------------- tokens in, tokens out


@pytest.mark.parametrize("stream", [False, True])
async def test_generate_route_is_disaggregated(stream):
    async with Cluster() as c:
        body = tokens_in(stream=stream, output_mode="text", features=None)
        body["sampling_params"] |= {"n": 2, "min_tokens": 3, "logprobs": 1, "stop_token_ids": [7], "seed": 5}
        reply = await c.client.post(GENERATE, json=body)
        assert reply.status_code == 200
        text = text_of(reply.content) if stream else reply.json()["choices"][0]["text"]
        assert text == "".join(c.d[0].text(body, i) for i in range(4 if stream else 1))
        assert b'kv_transfer_params":{' not in reply.content
        (to_p,), (to_d,) = c.p[0].seen, c.d[0].seen
        assert to_p.path == to_d.path == GENERATE
        sampling = dict(to_p.body["sampling_params"])
        assert extra(to_p)["do_remote_decode"] is True
        del sampling["extra_args"]
        assert sampling == {"max_tokens": 1, "n": 1, "temperature": 0, "stop_token_ids": [7], "seed": 5}
        assert to_p.body["stream"] is False and to_p.body["output_mode"] == "tokens"
        assert extra(to_d)["kvtier"]["export"] == "secret-export-P0-1"
        assert to_d.body["sampling_params"]["n"] == 2 and to_d.body["output_mode"] == "text"
        assert to_d.body["cache_salt"] == to_p.body["cache_salt"] != ""
        assert to_d.body["token_ids"] == body["token_ids"]


async def test_token_conversation_is_recognised():
    async with Cluster(d=2) as c:
        body = tokens_in()
        await c.client.post(GENERATE, json=body)
        home = next(d for d in c.d if d.seen)
        await c.client.post(GENERATE, json=body | {"token_ids": [*body["token_ids"], 5, 6]})
        assert len(home.seen) == 2
        assert extra(c.p[0].seen[1])["kvtier"]["sources"][0]["engine_id"] == f"id-{home.name}-1"


@pytest.mark.parametrize("name", ["prompt_logprobs", "prompt_logprob_token_ids"])
async def test_requests_that_need_compute_on_decode_engine(name):
    async with Cluster() as c:
        body = tokens_in()
        body["sampling_params"][name] = None
        await c.client.post(GENERATE, json=body)
        assert len(c.p[0].seen) == 1
        body["sampling_params"][name] = 1
        await c.client.post(GENERATE, json=body)
        assert len(c.p[0].seen) == 1 and len(c.d[0].seen) == 2


async def test_client_transfer_params_in_extra_args_are_removed():
    aim = {"do_remote_prefill": True, "remote_host": "victim"}
    async with Cluster() as c:
        body = tokens_in(kv_transfer_params=aim, ec_transfer_params=aim)
        body["sampling_params"]["extra_args"] = {"kv_transfer_params": aim, "ec_transfer_params": aim, "mine": 1}
        assert (await c.client.post(GENERATE, json=body)).status_code == 200
        for seen in (*c.p[0].seen, *c.d[0].seen):
            assert "victim" not in json.dumps(seen.body)
            assert seen.body["sampling_params"]["extra_args"]["mine"] == 1


@pytest.mark.parametrize("sampling", [5, [], "x", None])
async def test_invalid_sampling_params_return_400(sampling):
    async with Cluster() as c:
        reply = await c.client.post(GENERATE, json=tokens_in(sampling_params=sampling))
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "sampling_params"


@pytest.mark.parametrize("status", [404, 405, 429])
async def test_prefill_engine_without_route_leaves_prompt_to_decode_engine(status):
    """vLLM serves it with --enable-scale-out only. The prefill engine stays available for its other routes."""
    async with Cluster() as c:
        c.p[0].status = status
        assert (await c.client.post(GENERATE, json=tokens_in())).status_code == 200
        assert c.core.prefill[0].healthy and c.core.state()["counts"]["prefill_declined"] == 1


# ---------------------------------------------------------------- passing on


async def test_pooling_goes_to_pooling_engines_or_decode_engines():
    async with Cluster(pooling=1) as c:
        reply = await c.client.post("/v1/embeddings?x=1", json={"input": "a"}, headers={"X-Request-Id": "r1"})
        assert reply.json()["engine"] == "E0" and "x=1" in reply.json()["query"]
        (seen,) = c.pooling[0].passed
        assert seen.headers["x-request-id"] == reply.headers["x-request-id"] == "r1"
        assert len(seen.body.pop("cache_salt")) == 64 and seen.body == {"input": "a"}
    async with Cluster() as c:
        assert (await c.client.post("/v1/embeddings", json={"input": "a"})).json()["engine"] == "D0"


async def test_passthrough_salts_requests_by_tenant():
    aim = {"remote_host": "victim"}
    async with Cluster() as c:
        for client in ("ann", "bob"):
            body = {"input": "x", "kv_transfer_params": aim, "cache_salt": "s"}
            body["vllm_xargs"] = {"kv_transfer_params": aim}
            await c.client.post("/v1/responses", json=body, headers={"Authorization": f"Bearer {client}"})
        one, two = (seen.body for seen in c.d[0].passed)
        assert one["cache_salt"] != two["cache_salt"] and "victim" not in json.dumps(one)
        # The same tenant's salt is the same on every route, so that its KV is.
        await c.chat("u", headers={"Authorization": "Bearer bob"}, cache_salt="s")
        assert c.d[0].seen[0].body["cache_salt"] == two["cache_salt"]


@pytest.mark.parametrize(
    ("path", "given"),
    [
        *itertools.product(("/v1/responses", "/v1/messages", "/custom"), ("Application/JSON", JSON_UTF8)),
        *(("/custom", given) for given in ("text/plain", None)),
    ],
)
async def test_passthrough_salts_whatever_the_content_type_says(path, given):
    """vLLM compares it without regard to case, and older releases of FastAPI take a body without one for JSON."""
    aim = {"do_remote_prefill": True, "remote_host": "victim"}
    async with Cluster(extra_routes=("/custom",)) as c:
        body = json.dumps({"input": "x", "messages": [], "kv_transfer_params": aim}).encode()
        headers = {"content-type": given} if given else {}
        assert (await c.client.post(path, content=body, headers=headers)).status_code == 200
        (seen,) = c.d[0].passed
        sent = seen.body if isinstance(seen.body, bytes) else json.dumps(seen.body).encode()
        assert b"victim" not in sent and b"cache_salt" in sent and seen.headers.get("content-type") == given


@pytest.mark.parametrize("path", sorted(passthrough._JSON))
async def test_passed_routes_of_json_refuse_what_browsers_send_for_any_page(path):
    """Without asking first (CORS). vLLM refuses it with 400, too."""
    async with Cluster() as c:
        for given in ("text/plain", "multipart/form-data", "", None):
            headers = {"Origin": "https://evil.example"} | ({} if given is None else {"Content-Type": given})
            reply = await c.client.post(path, content=b'{"input": "x", "messages": []}', headers=headers)
            error = reply.json().get("error", {})
            assert reply.status_code == error.get("code") == 400, reply.text
            assert "Only 'application/json' is allowed" in error["message"]
        assert not c.core.state()["counts"].get("passed_on")


async def test_large_body_without_a_type_is_forwarded_without_one():
    async with Cluster(extra_routes=("/custom",)) as c:
        body = json.dumps({"rows": "x" * (2 << 20)}).encode()
        assert (await c.client.post("/custom", content=body)).status_code == 200
        assert "content-type" not in c.d[0].passed[0].headers and len(c.d[0].passed[0].body) > len(body)


@pytest.mark.parametrize("content_type", ["application/json", "text/plain", None])
@pytest.mark.parametrize("body", [b"", b"plain", b"[1]"])
async def test_extra_routes_take_what_is_no_object(body, content_type):
    """As vLLM's own for operators, which have no body: /reset_prefix_cache, /sleep."""
    async with Cluster(extra_routes=("/custom",)) as c:
        headers = {} if content_type is None else {"content-type": content_type}
        assert (await c.client.post("/custom", content=body, headers=headers)).status_code == 200


def test_routes_of_json_are_those_of_vllm():
    """Those that depend on ``validate_json_request`` there; a few are of other releases only."""
    root = Path(importlib.util.find_spec("vllm").origin).parent / "entrypoints"
    checked, others = set(), set()
    for file in root.rglob("*router.py"):
        for options in re.findall(r'@\w+\.post\((.*?)\n\s*async def ', file.read_text(), re.DOTALL):
            path = re.search(r'"(/[^"]*)"', options)[1]
            (checked if "validate_json_request" in options else others).add(path)
    assert passthrough._JSON & checked > {"/v1/messages", "/v1/responses", "/v1/embeddings", "/tokenize"}
    assert not passthrough._JSON & others and others > set(passthrough._AUDIO)


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/completions", GENERATE, "/v1/embeddings", "/v1/messages", "/tokenize", "/custom"],
)
async def test_media_that_tenants_name_alike_are_kept_apart(path):
    part = {"type": "image_url", "image_url": {"url": "data:,"}, "uuid": "logo"}
    body = {"messages": [{"role": "user", "content": [part]}], "content_parts": [part], "prompt": "a", "token_ids": [1]}
    async with Cluster(extra_routes=("/custom",)) as c:
        for client in ("ann", "bob"):
            reply = await c.client.post(path, json=body, headers={"Authorization": f"Bearer {client}"})
            assert reply.status_code == 200, reply.text
        sent = [seen.body for engine in (*c.p, *c.d) for seen in (*engine.seen, *engine.passed)]
        sent += [body for engine in c.d for body in engine.tokenized]
        names = {each[0]["uuid"] for one in sent for each in (one["messages"][0]["content"], one["content_parts"])}
        assert len(names) == 2 and "logo" not in names


@pytest.mark.parametrize("name", ["cache_salt", "previous_response_id", "vllm_xargs"])
async def test_passthrough_json_of_too_many_values_is_refused(name):
    async with Cluster() as c:
        body = b'{"input": "x", "%s": [%s1]}' % (name.encode(), b"[]," * (1 << 20))
        reply = await c.client.post("/v1/responses", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 413 and reply.json()["error"]["param"] == name and not c.d[0].passed


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/completions", "/custom"])
async def test_bodies_in_all_encodings_of_json_are_salted(path, encoding):
    """Engines read them by ``json.loads``, which takes all of these."""
    aim = {"do_remote_prefill": True, "remote_host": "victim"}
    async with Cluster(extra_routes=("/custom",)) as c:
        given = {"input": "x", "prompt": "x", "kv_transfer_params": aim}
        body = json.dumps(given).encode(encoding)
        content_type = "text/plain" if path == "/custom" else "application/json"
        reply = await c.client.post(path, content=body, headers={"content-type": content_type})
        assert reply.status_code == 200
        (seen,) = c.d[0].passed or c.d[0].seen
        sent = json.loads(seen.body) if isinstance(seen.body, bytes) else seen.body
        assert sent["input"] == "x" and sent["cache_salt"] and "victim" not in json.dumps(sent)


async def test_passthrough_extra_route_may_take_other_bodies():
    async with Cluster(extra_routes=("/custom",)) as c:
        for path, status in (("/custom", 200), ("/v1/embeddings", 400)):
            reply = await c.client.post(path, content=b"\x00\xff", headers={"content-type": "application/octet-stream"})
            assert reply.status_code == status
        (seen,) = c.d[0].passed
        assert seen.body == b"\x00\xff"
        for body in (b"\xef\xbb\xbf\xff", b"\xff\xfe{"):  # with marks of encodings that they are not in
            reply = await c.client.post("/custom", content=body, headers={"content-type": "audio/wav"})
            assert reply.status_code == 200 and c.d[0].passed[-1].body == body
            assert (await c.client.post("/v1/embeddings", content=body)).status_code == 400


async def test_passthrough_non_json_body_is_unchanged():
    async with Cluster() as c:
        form = {"files": {"file": ("a.wav", b"\x00\xff" * 1000)}, "data": {"model": "m"}}
        assert (await c.client.post("/v1/audio/transcriptions", **form)).status_code == 200
        (seen,) = c.d[0].passed
        assert b"\x00\xff" * 1000 in seen.body and seen.headers["content-type"].startswith("multipart/form-data; b")


@pytest.mark.parametrize(("path", "body"), [("/v1/responses", b"["), ("/v1/embeddings", b'{"cache_salt": 5}')])
async def test_passthrough_invalid_body_reaches_no_engine(path, body):
    async with Cluster() as c:
        reply = await c.client.post(path, content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400 and not c.d[0].passed


@pytest.mark.parametrize(
    ("path", "body", "option"),
    [
        ("/v1/models", None, "probe_timeout"),
        ("/v1/responses/resp_1?stream=true", None, "first_byte_timeout"),
        ("/v1/messages", {"stream": True}, "first_byte_timeout"),
        ("/v1/responses", {"stream": True}, "first_byte_timeout"),
        ("/v1/messages", {"stream": False}, "answer_timeout"),
    ],
)
async def test_answers_have_time_to_begin_by_their_kind(path, body, option, monkeypatch):
    """An engine that takes longer than a timeout is taken for unavailable."""
    given = []

    async def ask(self, method, path, body, headers, timeout, **more):
        given.append(timeout)
        return await ask_engine(self, method, path, body, headers, timeout, **more)

    async with Cluster() as c:
        ask_engine = Engine.ask
        monkeypatch.setattr(Engine, "ask", ask)
        assert (await c.client.request("POST" if body else "GET", path, json=body)).status_code == 200
        assert given == [getattr(c.core.config, option)]


async def test_passthrough_stream_is_not_buffered():
    async with Cluster() as c:
        c.d[0].gate = asyncio.Semaphore(1)
        body = {"input": "x", "messages": "m", "stream": True}
        request = c.client.build_request("POST", "/v1/messages", json=body)
        reply = await c.client.send(request, stream=True)
        got = []
        async for chunk in reply.aiter_raw():
            got.append(chunk)
            assert c.core.decode[0].tokens == 0, "its prompt is computed"
            c.d[0].gate.release()
        await reply.aclose()
        assert len(got) >= c.d[0].chunks and reply.headers["x-accel-buffering"] == "no"
        assert text_of(b"".join(got)).count(";") == c.d[0].chunks


async def test_stored_response_is_requested_from_its_engine():
    async with Cluster(p=0, d=3) as c:
        made = [(await c.client.post("/v1/responses", json={"input": i})).json() for i in range(6)]
        assert len({m["engine"] for m in made}) == 3
        for m in made * 2:
            got = (await c.client.get(f"/v1/responses/{m['id']}")).json()
            assert got["engine"] == m["engine"]
            following = await c.client.post("/v1/responses", json={"input": "x", "previous_response_id": m["id"]})
            assert following.json()["engine"] == m["engine"]


async def _stored(c):
    """(id of a response, the engine that has it, the other one, which answers 404)"""
    made = (await c.client.post("/v1/responses", json={"input": "x"})).json()
    own, other = c.d if c.d[0].name == made["engine"] else c.d[::-1]
    other.status = 404
    return made["id"], c.core.decode[c.d.index(own)], c.core.decode[c.d.index(other)]


@pytest.mark.parametrize("state", ["full", "unavailable", "drained"])
async def test_stored_response_is_not_requested_from_another_engine(state):
    async with Cluster(p=0, d=2, engine_requests=1, queue_timeout=0.5, backoff_initial=60, backoff_max=60) as c:
        response, engine, other = await _stored(c)
        slot = EngineSlot(engine) if state == "full" else None
        if state == "unavailable":
            engine.mark_unavailable("It broke.")
        engine.drained = state == "drained"
        assert (await c.client.get(f"/v1/responses/{response}")).status_code == 200
        assert (await c.client.post(f"/v1/responses/{response}/cancel", json={})).status_code == 200
        following = {"input": "y", "previous_response_id": response}
        reply = await c.client.post("/v1/responses", json=following)
        assert reply.status_code == {"full": 429, "unavailable": 200, "drained": 503}[state]
        assert "retry-after" in reply.headers or reply.json()["engine"]
        if slot is not None:
            asked = asyncio.create_task(c.client.post("/v1/responses", json=following))
            await c.until(lambda: c.core.admission.waiting("decode"))
            slot.release()
            assert (await asked).status_code == 200
        assert engine.outstanding == other.outstanding == 0


@pytest.mark.parametrize("engines", [1, 2])
async def test_continued_responses_that_wait_are_not_each_looked_up(engines, monkeypatch):
    async with Cluster(p=0, d=engines, engine_requests=1) as c:
        response = (await c.client.post("/v1/responses", json={"input": "x"})).json()["id"]
        slots = [EngineSlot(engine) for engine in c.core.decode]
        following = [{"input": "y", "previous_response_id": response}] * 5
        tasks = []
        for body in (*following, {"input": "of any engine"}):
            tasks.append(asyncio.create_task(c.client.post("/v1/responses", json=body)))
            await c.until(lambda: c.core.admission.waiting("decode") == len(tasks))
        looked_up, ranked = [], []
        find, rank = c.core.routes.find, c.core.router.rank_decode
        with monkeypatch.context() as patch:
            patch.setattr(c.core.routes, "find", lambda name: looked_up.append(name) or find(name))
            patch.setattr(c.core.router, "rank_decode", lambda *args: ranked.append(args) or rank(*args))
            c.core.admission.serve_waiting("decode")
        assert len(looked_up) == 1
        assert not ranked, "all are full: no request behind them can be served"
        for slot in slots:
            slot.release()
        assert [reply.status_code for reply in await asyncio.gather(*tasks)] == [200] * 6


# ---------------------------------------------------------------- what may be asked twice


@pytest.mark.parametrize(("path", "body"), [("/v1/embeddings", {}), ("/v1/responses", {"store": False})])
async def test_passthrough_idempotent_request_is_retried(path, body):
    async with Cluster(p=0, d=2) as c:
        await _dies_under(c, path, body)
        reply = await c.client.post(path, json=body)
        assert reply.status_code == 200


async def _dies_under(c, path, body):
    """The first engine dies while it works on the request; the other answers it."""
    for d in c.d:
        d.hold = asyncio.Event()
    asked = asyncio.create_task(c.client.post(path, json=body))
    await c.until(lambda: any(d.passed for d in c.d))
    first, other = c.d if c.d[0].passed else c.d[::-1]
    other.hold = None
    await first.kill()
    reply = await asyncio.wait_for(asked, 5)
    assert reply.status_code == 200 and reply.json()["engine"] == other.name


@pytest.mark.parametrize("path", ["/v1/responses", "/custom"])
async def test_passthrough_non_idempotent_request_is_not_retried(path):
    async with Cluster(p=0, d=2, extra_routes=("/custom",)) as c:
        for d in c.d:
            d.hold = asyncio.Event()
        asked = asyncio.create_task(c.client.post(path, json={}))
        await c.until(lambda: any(d.passed for d in c.d))
        first, other = c.d if c.d[0].passed else c.d[::-1]
        await first.kill()
        reply = await asyncio.wait_for(asked, 5)
        assert reply.status_code == 502 and "not known" in reply.json()["error"]["message"]
        assert not other.passed
        other.hold = None
        # Without a connection, no engine can have executed it.
        c.core.decode[c.d.index(first)].succeeded()
        c.core.decode[c.d.index(other)].weighted_picks = 1e9
        assert (await c.client.post(path, json={})).json()["engine"] == other.name


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses"])
async def test_passthrough_engine_error_tries_another_and_keeps_engine_available(path):
    """An engine that is shut down with --shutdown-timeout answers so until it ends, and is the idlest of all."""
    async with Cluster(p=0, d=2) as c:
        c.d[0].status = 500
        c.core.decode[1].weighted_picks = 1e9
        made = (await c.client.post(path, json={})).json()
        assert made["engine"] == "D1" and c.core.decode[0].healthy
        c.d[0].status, c.d[1].status = 200, 500
        if path == "/v1/responses":  # which D0 does not have
            reply = await c.client.post(path, json={"previous_response_id": made["id"]})
            assert reply.status_code == 500 and not c.d[0].passed[1:]
        c.d[0].status = 500
        assert (await c.client.post(path, json={})).json()["error"]["message"].endswith("says 500")


async def test_passthrough_error_of_extra_route_is_the_answer():
    async with Cluster(p=0, d=2, extra_routes=("/custom",)) as c:
        c.d[0].status = 500
        c.core.decode[1].weighted_picks = 1e9
        assert (await c.client.post("/custom", json={})).status_code == 500 and not c.d[1].passed


async def test_extra_route_may_want_another_authorization(tmp_path):
    file = tmp_path / "engine.key"
    file.write_text("engine-key-1\n")
    options = {"extra_routes": ("/custom",), "backoff_initial": 60, "backoff_max": 60}
    async with Cluster(p=0, engine={"api_key_file": str(file)}, **options) as c:
        c.d[0].api_key = "another"
        for path in ("/custom", "/custom?a=b"):
            assert (await c.client.post(path, json={})).status_code == 401 and c.core.decode[0].healthy
        assert (await c.client.post("/v1/messages", json={})).status_code == 503 and not c.core.decode[0].healthy


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/cohere/v2/chat"])
async def test_passthrough_broken_stream_ends_with_error(path):
    async with Cluster(d=1) as c:
        c.d[0].gate = asyncio.Semaphore(2)
        request = c.client.build_request("POST", path, json={"messages": "m", "stream": True})
        reply = await c.client.send(request, stream=True)
        got = b""
        async for chunk in reply.aiter_raw():
            got += chunk
            if got.count(b"\n\n") == 2:
                await c.d[0].kill()
        found = [part for part in got.split(b"\n\n") if part]
        if path == "/v1/messages":  # Anthropic's clients look at the names of events
            name, data = b"\n\n".join(found[2:]).splitlines()
            error = json.loads(data.removeprefix(b"data: "))
            assert name == b"event: error" and error["type"] == "error" and error["error"]["type"] == "api_error"
        elif path == "/cohere/v2/chat":  # Cohere's look at types
            end, done = events(b"\n\n".join(found[2:]) + b"\n\n")
            assert end["type"] == "message-end" and end["delta"]["finish_reason"] == "ERROR" and done == "[DONE]"
        else:
            assert events(b"\n\n".join(found[2:]) + b"\n\n")[0]["error"]["code"] == 502
        assert c.core.state()["counts"]["broken_streams"] == 1
        assert c.core.decode[0].outstanding == 0


_ERRORS = {
    "/v1/chat/completions": 'data: {"error": {"message": "it died", "type": "InternalServerError", "code": 500}}',
    "/v1/responses": 'data: {"error": {"message": "it died", "type": "InternalServerError", "code": 500}}',
    "/v1/messages": 'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"it died"}}',
    "/cohere/v2/chat": 'data: {"type": "message-end", "delta": {"error": "it died", "finish_reason": "ERROR"}}',
}


@pytest.mark.parametrize("health", [200, 503])
@pytest.mark.parametrize("path", _ERRORS)
async def test_stream_that_its_engine_ends_with_an_error_is_broken_and_the_engine_probed(path, health):
    """vLLM's API server does so if the engine's core dies."""
    async with Cluster(p=0, backoff_initial=60, backoff_max=60) as c:
        (fake,), (engine,) = c.d, c.core.decode
        fake.gate, fake.chunks, fake.late_error = asyncio.Semaphore(1), 2, f"{_ERRORS[path]}\n\n"
        fake.health = health
        body = {"messages": [{"role": "user", "content": "u1"}], "stream": True}
        async with c.client.stream("POST", path, json=body) as reply:
            pieces = reply.aiter_raw()
            got = await anext(pieces)
            fake.gate.release()
            got += b"".join([piece async for piece in pieces])
        assert got.count(b"it died") == 1 and got.endswith(b"data: [DONE]\n\n"), got
        await c.until(lambda: fake.probes == 1 and engine.healthy == (health == 200))
        assert c.core.state()["counts"]["broken_streams"] == 1
        page = (await c.client.get("/metrics")).text
        assert f'requests_total{{outcome="broken",route="{path}"}} 1.0' in page


@pytest.mark.parametrize("path", _ERRORS)
async def test_engine_is_probed_though_the_client_leaves_at_its_error(path):
    """As Anthropic's clients do. The engine has not ended the stream."""
    async with Cluster(p=0) as c:
        (fake,) = c.d
        fake.gate, fake.chunks, fake.late_error = asyncio.Semaphore(1), 2, f"{_ERRORS[path]}\n\n"
        fake.error_gate = asyncio.Event()
        body = {"messages": [{"role": "user", "content": "u1"}], "stream": True}
        async with c.client.stream("POST", path, json=body) as reply:
            pieces = reply.aiter_raw()
            got = await anext(pieces)
            fake.gate.release()
            while b"it died" not in got:
                got += await anext(pieces)
        await c.until(lambda: fake.probes == 1)
        assert c.core.state()["counts"]["broken_streams"] == 1


@pytest.mark.parametrize(
    "event",
    [
        'data: {"error": {"message": "too long", "code": 400}}',
        'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error","message":"too long"}}',
        r'data: {"text": "\"finish_reason\": \"ERROR\" event: error\ndata: {\"type\": \"api_error\"}"}',
    ],
)
async def test_stream_that_ends_with_an_error_of_its_client_is_not_broken(event):
    async with Cluster(p=0) as c:
        c.d[0].late_error = f"{event}\n\n"
        reply = await c.client.post("/v1/messages", json={"messages": [], "stream": True})
        assert event.encode() in reply.content and not c.d[0].probes
        assert "broken_streams" not in c.core.state()["counts"]


_ECHOES = {
    "/v1/responses": 'event: response.completed\ndata: {"type":"response.completed","response":{"metadata":%s}}',
    "/v1/messages": 'event: message_delta\ndata: {"type":"message_delta","delta":%s}',
    "/cohere/v2/chat": 'data: {"type":"tool-call-end","delta":%s}',
    "/custom": 'event: error\ndata: {"type":"row","row":%s}',
}


@pytest.mark.parametrize("path", _ECHOES)
async def test_stream_that_repeats_what_looks_like_an_error_is_not_broken(path):
    """Metadata and tools come back at the end of an answer."""
    error = {"type": "api_error", "code": 500, "finish_reason": "ERROR"}
    text = 'event: error\ndata: {"error":{"code":500}}'
    event = _ECHOES[path] % json.dumps({**error, "error": error, "text": text, "message-end": "message-end"})
    async with Cluster(p=0, extra_routes=("/custom",)) as c:
        c.d[0].late_error = f"{event}\n\n"
        reply = await c.client.post(path, json={"messages": [], "stream": True})
        assert event.encode() in reply.content and not c.d[0].probes
        assert "broken_streams" not in c.core.state()["counts"]


async def test_names_of_media_are_replaced_where_the_route_has_messages():
    picture = {"type": "image_url", "image_url": "data:,", "uuid": "logo"}
    row = [{"content": [picture], "output": [picture]}]
    async with Cluster(extra_routes=("/custom",)) as c:
        for path in ("/v1/responses", "/v2/rerank", "/custom"):
            await c.client.post(path, json={"input": row, "documents": row, "rows": row, "metadata": row[0]})
        chat, score, custom = (seen.body for seen in c.d[0].passed)
    for body in (chat, score, custom):
        assert body["input"][0]["content"][0]["uuid"] not in (None, "logo")
        assert body["input"][0]["output"][0]["uuid"] == body["input"][0]["content"][0]["uuid"]
        assert body["rows"] == row and body["metadata"] == row[0]
        assert (body["documents"] == row) == (body is chat)
