"""The proxy in good health, before engines on real sockets."""

import asyncio
import contextlib
import gc
import json
import resource
import sys
from functools import partial

import anyio
import httpx
import pytest
from proxy_fakes import ALONE, Cluster, alone, events, text_of, turn

from vllm_kvtier.proxy.routes.connections import MAX_HEAD_BYTES, MAX_HEADERS, MAX_PIPELINED, BoundedProtocol
from vllm_kvtier.scheduler.matching.transfer_params import Hints, read

JSON = {"Content-Type": "application/json"}
REPORT = {"X-KVTier-Report": "1"}


async def test_generation_prefills_then_decodes():
    async with Cluster() as c:
        reply = await c.chat("hello", max_tokens=5, temperature=0, headers={"X-Request-Id": "req-1"})
        assert reply.status_code == 200 and reply.headers["x-request-id"] == "req-1"
        (to_p,), (to_d,) = c.p[0].seen, c.d[0].seen
        assert reply.json()["choices"][0]["text"] == c.d[0].text(turn("hello"), 0)
        assert "kv_transfer_params" not in reply.json()
        assert to_p.body["max_tokens"] == 1 and to_p.body["kv_transfer_params"]["do_remote_decode"] is True
        assert to_d.body["max_tokens"] == 5
        assert to_d.body["kv_transfer_params"]["kvtier"]["export"] == "secret-export-P0-1"
        assert to_p.headers["x-request-id"] == to_d.headers["x-request-id"] == "req-1"
        assert c.released.empty()


async def test_proxy_stream_is_not_buffered():
    """Each chunk reaches the client before the engine may make the next."""
    async with Cluster() as c:
        c.d[0].gate = asyncio.Semaphore(0)
        request = c.client.build_request("POST", "/v1/chat/completions", json=turn("hello", stream=True))
        c.d[0].gate.release()
        reply = await c.client.send(request, stream=True)
        got = []
        async for chunk in reply.aiter_raw():
            got.append(chunk)
            assert not c.d[0].seen[0].finished or len(got) >= c.d[0].chunks
            c.d[0].gate.release()
        await reply.aclose()
        assert len(got) >= c.d[0].chunks
        assert reply.headers["x-accel-buffering"] == "no"
        assert text_of(b"".join(got)) == "".join(c.d[0].text(turn("hello"), i) for i in range(4))
        assert b"secret-export" not in b"".join(got) and got[-1].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_of_next_turn_gets_decode_engine_as_source(stream):
    async with Cluster() as c:
        await c.chat("u1", stream=stream)
        await c.chat("u1", "a1", "u2", stream=stream)
        first, second = (seen.body["kv_transfer_params"] for seen in c.p[0].seen)
        assert "kvtier" not in first
        params = c.d[0].params({})
        assert second["kvtier"]["sources"] == [
            {"engine_id": "id-D0-1", "host": "127.0.0.1", "port": params["remote_port"]}
        ]
        assert second["remote_host"] is None


async def test_proxy_endpoint_option_replaces_missing_params():
    async with Cluster(kv=("10.0.0.9", 777)) as c:
        c.d[0].stream_params = False
        await c.chat("u1", stream=True)
        await c.chat("u1", "a1", "u2", stream=True)
        source = {"engine_id": "", "host": "10.0.0.9", "port": 777}
        assert c.p[0].seen[1].body["kv_transfer_params"]["kvtier"]["sources"] == [source]


async def test_bidirectional_off_gives_prefill_engine_no_sources():
    async with Cluster(bidirectional=False) as c:
        await c.chat("u1")
        await c.chat("u1", "a1", "u2")
        assert all("kvtier" not in seen.body["kv_transfer_params"] for seen in c.p[0].seen)


@pytest.mark.parametrize("how", ["text", "field", "header"])
async def test_conversations_stay_on_their_engine(how):
    async with Cluster(p=2, d=2) as c:
        conversations = {f"c{i}": [f"begin {i}"] for i in range(6)}
        places = {name: set() for name in conversations}
        for _ in range(4):
            for name, texts in conversations.items():
                fields = {"conversation_id": name} if how == "field" else {}
                headers = REPORT | ({"X-Conversation-Id": name} if how == "header" else {})
                reply = await c.chat(*texts, headers=headers, **fields)
                proxy = reply.json()["kv_transfer_params"]["kvtier"]["proxy"]
                places[name].add((proxy["prefill_engine"], proxy["decode_engine"]))
                texts += [reply.json()["choices"][0]["text"], "and then?"]
        assert all(len(place) == 1 for place in places.values())
        assert len({p for place in places.values() for p, _ in place}) == 2, "both prefill engines are used"
        assert len({d for place in places.values() for _, d in place}) == 2, "both decode engines are used"
        assert all("conversation_id" not in seen.body for e in (*c.p, *c.d) for seen in e.seen)


async def test_edited_history_goes_to_engine_of_common_prefix():
    async with Cluster(d=2) as c:
        await c.chat("other")
        await c.chat("u1")
        await c.chat("u1", "a1", "u2")
        await c.chat("u1", "a1", "u2", "a2", "u3")
        home = next(d for d in c.d if len(d.seen) == 3)
        await c.chat("u1", "a1", "edited", "new answer", "u3")
        assert len(home.seen) == 4
        await c.chat("edited from the beginning", "a1", "u2")
        assert "kvtier" not in c.p[0].seen[-1].body["kv_transfer_params"]


async def test_tenants_with_equal_conversation_ids_are_separate():
    async with Cluster(d=2, trust_tenant_header=True) as c:
        who = [{"Authorization": "Bearer ann"}, {"Authorization": "Bearer bob"}, {"X-Tenant": "cat"}, {}]
        same = {"conversation_id": "c1", "cache_salt": "guess"}
        for headers in who:
            await c.chat("the same text", headers=headers, **same)
            # No engine got a source: it is each tenant's first turn.
            assert "kvtier" not in c.p[0].seen[-1].body["kv_transfer_params"]
        salts = {seen.body["cache_salt"] for seen in c.p[0].seen}
        assert len(salts) == 4 and "guess" not in salts
        for to_p in c.p[0].seen:
            (to_d,) = (
                s for d in c.d for s in d.seen if s.headers["x-request-id"] == to_p.headers["x-request-id"]
            )
            assert to_d.body["cache_salt"] == to_p.body["cache_salt"]
        await c.chat("the same text", "a", "u2", headers=who[0], **same)
        assert "kvtier" in c.p[0].seen[-1].body["kv_transfer_params"]
        assert len({seen.body["cache_salt"] for seen in c.p[0].seen}) == 4
        assert c.p[0].seen[0].headers["authorization"] == "Bearer ann"


@pytest.mark.parametrize(("trusted", "status"), [(True, 400), (False, 200)])
async def test_tenant_that_is_named_twice_is_refused(trusted, status):
    """The client's header, and that of a gateway which adds its own."""
    async with Cluster(trust_tenant_header=trusted) as c:
        named = [("X-Tenant", "the victim"), ("x-tenant", "cat")]
        reply = await c.chat("the same text", headers=named)
        assert reply.status_code == status and len(c.p[0].seen) == (status == 200)


@pytest.mark.parametrize("stream", [False, True])
async def test_proxy_report_is_returned_on_request(stream):
    async with Cluster() as c:
        reply = await c.chat("u1", stream=stream, headers=REPORT)
        if stream:
            (params,) = (
                e["kv_transfer_params"] for e in events(reply.content)[:-1] if e["kv_transfer_params"]
            )
        else:
            params = reply.json()["kv_transfer_params"]
        counts = {
            "num_tokens": 7,
            "pulled_tokens": 5,
            "local_tokens": 1,
            "computed_tokens": 1,
        }
        assert set(params) == {"kvtier"} and set(params["kvtier"]) == {"prefill", "decode", "proxy"}
        assert params["kvtier"]["prefill"] == params["kvtier"]["decode"] == counts
        assert b"secret-export" not in reply.content and b"10.9.8.7" not in reply.content


async def test_report_of_stream_that_arrives_in_one_piece_names_its_engine():
    async with Cluster(d=2) as c:
        for fake in c.d:

            async def in_one_piece(seen, events=fake._stream):
                yield "".join([event async for event in events(seen)])

            fake._stream = in_one_piece
        reply = await c.chat("u1", stream=True, headers=REPORT)
        (params,) = (e["kv_transfer_params"] for e in events(reply.content)[:-1] if e["kv_transfer_params"])
        proxy = params["kvtier"]["proxy"]
        assert (proxy["decode_engine"], proxy["decode_attempts"]) == (0 if c.d[0].seen else 1, 1)


async def test_proxy_reports_can_be_disabled_and_params_exposed():
    async with Cluster(allow_report=False, expose_params=True) as c:
        params = (await c.chat("u1", headers=REPORT)).json()["kv_transfer_params"]
        assert params["kvtier"]["export"] == "secret-export-D0-1" and "proxy" not in params["kvtier"]


@pytest.mark.parametrize(
    ("prompt", "by_p"),
    [("short", False), ("a longer prompt", True), ([1, 2, 3], True), (["two", "prompts" * 9], False)],
)
async def test_completions_that_are_prefilled_elsewhere(prompt, by_p):
    async with Cluster(min_prefill_chars=10) as c:
        reply = await c.client.post("/v1/completions", json={"model": "m", "prompt": prompt})
        assert reply.status_code == 200
        body = c.d[0].seen[0].body
        assert body["prompt"] == prompt
        assert len(c.p[0].seen) == by_p != alone(c.d[0].seen[0])


async def test_short_chat_with_a_picture_is_prefilled():
    """Its address is short, its tokens are not."""
    picture = {"type": "image_url", "image_url": {"url": "http://a/b.png"}}
    async with Cluster(min_prefill_chars=256) as c:
        for content, by_p in (("hello", 0), ([picture], 1)):
            body = turn("") | {"messages": [{"role": "user", "content": content}]}
            assert (await c.client.post("/v1/chat/completions", json=body)).status_code == 200
            assert len(c.p[0].seen) == by_p


async def test_decode_without_prefill_gets_conversation_sources():
    async with Cluster(p=0, d=2, affinity_slack=0) as c:
        await c.chat("u1")
        home, other = c.d if c.d[0].seen else c.d[::-1]
        await c.chat("u1", "a1", "u2")
        assert alone(home.seen[0]) and alone(home.seen[1]), "itself it need not ask"
        home.hold = asyncio.Event()
        waiting = asyncio.create_task(c.chat("u1", "a1", "u2", "a2", "held"))
        await home.until_seen(3)
        reply = await c.chat("u1", "a1", "u2", "a2", "u3", headers=REPORT)
        source = {
            "engine_id": f"id-{home.name}-1",
            "host": "127.0.0.1",
            "port": home.params({})["remote_port"],
        }
        sent = other.seen[0].body["kv_transfer_params"]
        assert sent == ALONE | {"kvtier": {"sources": [source]}}
        # The connector reads it as it is meant, and its report comes back.
        assert read(sent) == Hints(peers=(("127.0.0.1", source["port"]),), asked=True)
        assert read(ALONE) == Hints(asked=True)
        report = reply.json()["kv_transfer_params"]["kvtier"]
        assert report["prefill"] is None and report["decode"]["pulled_tokens"] == 5
        # Prompt logprobs need the prompt computed.
        await c.chat("u1", "a1", "u2", "a2", "u3", "a3", "u4", prompt_logprobs=1)
        assert alone(other.seen[-1])
        home.hold.set()
        await waiting


async def test_decode_retry_gets_only_live_sources():
    async with Cluster(p=0, d=3, backoff_initial=60, backoff_max=60) as c:
        await c.chat("u1")
        home = next(d for d in c.d if d.seen)
        await home.kill()
        await c.chat("u1", "a1", "u2")
        (taker,) = (d for d in c.d if d.seen and d is not home)
        assert alone(taker.seen[0])


async def test_bidirectional_off_gives_decode_engine_no_sources():
    async with Cluster(p=0, d=2, affinity_slack=0, bidirectional=False) as c:
        for i in range(6):
            await c.chat("u1", *("a", "u") * i)
        assert all(alone(seen) for d in c.d for seen in d.seen)


async def test_generation_without_connector_or_prefill_engine():
    async with Cluster(p=0) as c:
        c.d[0].returns_params = False
        assert (await c.chat("u1")).status_code == 200
        assert alone(c.d[0].seen[0])
    async with Cluster() as c:
        c.p[0].returns_params = False
        assert (await c.chat("u1")).status_code == 200
        assert alone(c.d[0].seen[0])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("also_prefill", [False, True])
async def test_engine_refusals_reach_the_client_unchanged(also_prefill, stream):
    async with Cluster(d=2) as c:
        for engine in (*c.d, *(c.p if also_prefill else ())):
            engine.status = 422
        reply = await c.chat("u1", stream=stream)
        assert reply.status_code == 422 and "says 422" in reply.json()["error"]["message"]
        state = (await c.client.get("/kvtier/state")).json()
        assert all(engine["healthy"] for engine in state["prefill"] + state["decode"])
        assert len(c.d[0].seen) + len(c.d[1].seen) == 1
        if not also_prefill:
            # No decode engine pulled the export, so it is released.
            assert (await c.released.get()).export == "secret-export-P0-1"


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_request_that_only_the_prefill_engine_refuses_is_decoded_alone(status):
    """It may lack a parser of tools, or take shorter prompts."""
    async with Cluster() as c:
        c.p[0].status = status
        assert (await c.chat("u1")).status_code == 200 and alone(c.d[0].seen[0])
        assert c.core.prefill[0].healthy


@pytest.mark.parametrize("role", ["p", "d"])
async def test_engine_that_hangs_is_probed_when_an_impatient_client_leaves(role):
    async with Cluster(d=2, probe_timeout=0.1) as c:
        hangs = getattr(c, role)[0]
        hangs.hold, hangs.health = asyncio.Event(), 503
        engine = next(engine for engine in c.core.fleet if engine.url == hangs.url)
        for n in range(12):  # of two decode engines either may be asked
            asked = asyncio.create_task(c.chat(f"u{n}"))
            await asyncio.wait([asked], timeout=0.4)
            asked.cancel()
            await asyncio.wait([asked])
            if not engine.healthy:
                break
        assert hangs.seen and not engine.healthy
        assert (await c.chat("another")).status_code == 200


async def test_engine_that_serves_is_available_whatever_its_probe_says():
    """Its API server is busy, and the probe is late."""
    async with Cluster(p=0) as c:
        engine, c.d[0].health_hold = c.core.decode[0], asyncio.Event()
        engine.check()
        probe = engine._prober
        await c.until(lambda: c.d[0].probes)
        assert (await c.chat("hello")).status_code == 200
        await asyncio.wait([probe])
        c.d[0].health_hold.set()
        assert engine.healthy and not engine.instance


async def test_invalid_request_reaches_no_engine():
    async with Cluster(max_body_bytes=1000) as c:
        post = lambda body: c.client.post("/v1/chat/completions", content=body, headers=JSON)  # noqa: E731
        for body, status in ((b"{", 400), (b'{"cache_salt": 5}', 400), (b"x" * 1001, 413)):
            reply = await post(body)
            assert reply.status_code == status and reply.json()["error"]["code"] == status
        assert not c.p[0].seen and not c.d[0].seen


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/inference/v1/generate"])
@pytest.mark.parametrize("given", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", None])
async def test_generation_refuses_what_browsers_send_for_any_page(path, given):
    """Without asking first (CORS). vLLM refuses it with 400, too."""
    async with Cluster() as c:
        body = json.dumps(turn("hello") | {"prompt": "hello", "token_ids": [1]}).encode()
        headers = {"Origin": "https://evil.example"} | ({} if given is None else {"Content-Type": given})
        reply = await c.client.post(path, content=body, headers=headers)
        error = reply.json()["error"]
        assert reply.status_code == error["code"] == 400 and "Only 'application/json' is allowed" in error["message"]
        assert not c.p[0].seen and not c.d[0].seen
        for right in ("application/json", "Application/JSON; charset=utf-8"):
            assert (await c.client.post(path, content=body, headers={"Content-Type": right})).status_code == 200


DEEP = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/kvtier/query"])
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff\xfe", b'{"messages": [1, }', b'{"a": "\\ud800"}', DEEP]
)
async def test_invalid_json_returns_400_with_cause(path, body):
    async with Cluster() as c:
        with anyio.fail_after(5):
            reply = await c.client.post(path, content=body, headers={"X-Request-Id": "r", **JSON})
        error = reply.json()["error"]
        assert reply.status_code == error["code"] == 400 and error["type"] == "invalid_request_error"
        assert reply.headers["x-request-id"] == "r"
        assert not c.p[0].seen and not c.d[0].seen


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/sleep", 404),
        ("POST", "/collective_rpc", 404),
        ("POST", "/v1/load_lora_adapter", 404),
        ("POST", "/v1/responses/resp_1/../../sleep", 404),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/kvtier/query", 405),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("POST", "/v1//chat/completions", 404),
    ],
)
async def test_unknown_routes_return_404(method, path, status):
    async with Cluster() as c:
        with anyio.fail_after(5):
            reply = await c.client.request(method, path, content=b"x" * 10_000)
        assert reply.status_code == reply.json()["error"]["code"] == status
        assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("chunked", [False, True])
async def test_request_body_too_large_is_refused_before_its_end(chunked):
    async with Cluster(max_body_bytes=100_000, client_timeout=2) as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]))
        length = b"transfer-encoding: chunked" if chunked else b"content-length: 1000000000"
        writer.write(HEAD + b"Content-Type: application/json\r\n" + length + b"\r\n\r\n")
        with anyio.fail_after(5):
            # More than a socket's buffers hold: the client would not see an answer sent before the body is read.
            for _ in range(2000):
                piece = b"x" * 10_000
                writer.write(b"2710\r\n" + piece + b"\r\n" if chunked else piece)
                await writer.drain()
            assert b"413" in await reader.readline()
            # The rest never comes, and the connection does not wait for it.
            with contextlib.suppress(ConnectionResetError):
                while await reader.read(65536):
                    continue
        writer.close()
        assert not c.p[0].seen


@pytest.mark.parametrize("stream", [False, True])
async def test_answer_too_large_makes_no_engine_unavailable(stream):
    """A client asks for it, by logprobs of a long prompt: on every engine that it is sent to."""
    async with Cluster(d=3, max_body_bytes=100_000, max_event_bytes=100_000) as c:
        for engine in c.d:
            engine.text = lambda body, i: "x" * 1_000_000
        reply = await c.chat("hello", stream=stream)
        assert reply.status_code == 502 and "larger" in reply.json()["error"]["message"]
        assert sum(len(engine.seen) for engine in c.d) == 1, "another engine's would be as large"
        assert all(engine.healthy and not engine.instance and not engine.outstanding for engine in c.core.decode)


async def test_prefill_answer_too_large_leaves_prompt_to_decode_engine():
    """Another prefill engine's would be as large, and none becomes unavailable."""
    async with Cluster(p=2, max_event_bytes=100_000) as c:
        for engine in c.p:
            engine.text = lambda body, i: "x" * 1_000_000
        assert (await c.chat("hello")).status_code == 200
        assert sum(len(engine.seen) for engine in c.p) == 1 and alone(c.d[0].seen[0])
        assert all(engine.healthy and not engine.outstanding for engine in c.core.prefill)


async def test_request_ids_are_generated_or_kept_if_valid():
    async with Cluster() as c:
        made = (await c.chat("u1")).headers["x-request-id"]
        assert len(made) == 32
        odd = (await c.chat("u1", headers={"X-Request-Id": "a b/" + "x" * 200})).headers["x-request-id"]
        assert len(odd) == 32 != made
        assert [seen.headers["x-request-id"] for seen in c.d[0].seen] == [made, odd]


async def test_proxy_models_health_and_state_routes():
    async with Cluster(p=2) as c:
        models = await c.client.get("/v1/models", headers={"Authorization": "Bearer k"})
        assert models.json() == {"data": [{"id": "D0", "auth": "Bearer k"}]}
        assert (await c.client.get("/health")).json() == {"prefill": 2, "decode": 1, "ready": True}
        secret = {"Authorization": "Bearer my-api-key"}
        await c.chat("my words", headers=secret, conversation_id="my-id", cache_salt="my-salt")
        state = (await c.client.get("/kvtier/state")).text
        assert json.loads(state)["conversations"] == 1
        assert json.loads(state)["counts"] == {"passed_on": 1, "requests": 1, "prefilled": 1, "released": 0}
        assert json.loads(state)["decode"][0]["engine_id"] == "id-D0-1"
        assert "my-" not in state and "my words" not in state and "secret-export" not in state
        assert c.d[0].seen[0].body["cache_salt"] not in state


async def test_proxy_concurrent_requests_get_their_answers():
    async with Cluster(p=2, d=2) as c:

        async def conversation(i: int) -> None:
            texts = [f"begin {i}"]
            for _ in range(3):
                reply = await c.chat(*texts, stream=bool(i % 2))
                text = text_of(reply.content) if i % 2 else reply.json()["choices"][0]["text"]
                engine = c.d[int(text[1])]
                length = engine.chunks if i % 2 else 1
                assert text == "".join(engine.text(turn(*texts), k) for k in range(length))
                texts += [text, "more"]

        await asyncio.gather(*(conversation(i) for i in range(30)))
        state = (await c.client.get("/kvtier/state")).json()
        assert all(engine["outstanding"] == 0 for engine in state["prefill"] + state["decode"])
        assert state["counts"]["prefilled"] == 90
        assert min(len(engine.seen) for engine in (*c.p, *c.d)) >= 30


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"


@pytest.mark.parametrize(
    ("begin", "more", "answer"),
    [
        (b"GET /", b"a" * 1000, b"HTTP/1.1 400"),
        (HEAD, b"a: b\r\n", b"HTTP/1.1 400"),
        (HEAD + b"a: ", b"b" * 1000, b"HTTP/1.1 400"),
        (CHUNKED, b"a: b\r\n", b""),
        (CHUNKED + b"a: ", b"b" * 1000, b""),
    ],
    ids=["url", "headers", "header", "trailers", "trailer"],
)
async def test_request_heads_without_end_are_not_held(begin, more, answer):
    async with Cluster() as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]))
        writer.write(begin)
        await writer.drain()
        for _ in range(1 if answer else 9):  # what is read together with a body's end is not counted
            writer.write(more * (MAX_HEAD_BYTES // len(more) + 1))
        with anyio.fail_after(20), contextlib.suppress(ConnectionError):
            assert (await reader.read()).startswith(answer)
        writer.close()
        assert (await c.chat("hello", headers={"x": "y" * 60_000})).status_code == 200


@pytest.mark.parametrize("first", [b"", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"], ids=["", "second"])
@pytest.mark.parametrize("begin", [b"", HEAD], ids=["silent", "head"])
async def test_connections_without_request_are_ended(first, begin):
    async with Cluster(client_timeout=0.2) as c:
        c.d[0].hold = asyncio.Event()
        held = asyncio.create_task(c.chat("hello"))
        await c.d[0].until_seen(1)
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]))
            writer.write(first)
            if first:
                await reader.readuntil(b"}")
            writer.write(begin)
            with anyio.fail_after(20):
                assert await reader.read() == b""
            writer.close()
        # A request is not ended, however long it takes.
        c.d[0].hold.set()
        assert (await held).status_code == 200


async def test_connections_are_kept_for_client_timeout():
    """Load balancers keep theirs for a minute, uvicorn for 5 s: requests would meet one that has just ended."""
    async with Cluster() as c:
        c._proxy.config.timeout_keep_alive = 0
        reader, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]))
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert await reader.readuntil(b"}")
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(1), 0.2)
        writer.close()


async def test_client_that_leaves_a_pipelined_request_is_noticed():
    async with Cluster(p=0) as c:
        c.d[0].hold = asyncio.Event()
        _, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]))
        body = json.dumps(turn("a")).encode()
        head = HEAD + b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        writer.write(head + body + b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        await c.d[0].until_seen(1)
        assert c.core.decode[0].outstanding == 1
        writer.transport.abort()
        with anyio.fail_after(20):
            await c.d[0].seen[0].aborted.wait()
        await c.until(lambda: c.core.decode[0].outstanding == 0)


async def test_proxy_command_starts_and_serves():
    """It serves; and an impossible option ends it with one sentence."""
    async with Cluster() as c:
        command = [sys.executable, "-m", "vllm_kvtier.proxy", "--port", "0", "--prefill", c.p[0].url]
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        process = await asyncio.create_subprocess_exec(
            *(*command, "--decode", c.d[0].url, "--log-level", "info"),
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=partial(resource.setrlimit, resource.RLIMIT_NOFILE, (200, most)),
        )
        url = None
        while url is None:
            line = (await asyncio.wait_for(process.stderr.readline(), 20)).decode()
            assert line, "the proxy ended"
            url = line.partition("running on ")[2].split(" ")[0].strip() or None
        async with httpx.AsyncClient(trust_env=False) as client:
            reply = await client.post(f"{url}/v1/chat/completions", json=turn("hello"))
            assert reply.json()["choices"][0]["text"] == c.d[0].text(turn("hello"), 0)
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (most, most)
        process.terminate()
        await asyncio.wait_for(process.communicate(), 20)

        bad = await asyncio.create_subprocess_exec(
            *command, "--decode", "nonsense", stderr=asyncio.subprocess.PIPE
        )
        _, told = await asyncio.wait_for(bad.communicate(), 20)
        assert bad.returncode == 2 and told.decode().startswith("error: The engine URL 'nonsense' is invalid")


INNER = json.dumps(turn("smuggled")).encode()
INNER = b"Host: a\r\nX-Tenant: victim\r\nContent-Length: %d\r\n\r\n" % len(INNER) + INNER
INNER = b"POST /v1/chat/completions HTTP/1.1\r\n" + INNER
FRAMING = {
    "length": b"Content-Length: %d\r\n\r\n" % len(INNER),
    "chunked": b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(INNER),
    "no-body": b"\r\n",
}
UPGRADE = b"Host: a\r\nConnection: keep-alive, Upgrade\r\nUpgrade: %s\r\n"
OUTER = {
    "h2c": b"POST /v1/audio/transcriptions HTTP/1.1\r\n" + UPGRADE % b"h2c",
    "websocket": b"GET /v1/realtime HTTP/1.1\r\n" + UPGRADE % b"websocket",
    "websocket-post": b"POST /v1/chat/completions HTTP/1.1\r\n" + UPGRADE % b"WebSocket",
    "connect": b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n",
}


@pytest.mark.parametrize("pieces", [1, 2, 50])
@pytest.mark.parametrize("framing", FRAMING)
@pytest.mark.parametrize("outer", OUTER)
async def test_body_of_request_that_asks_for_another_protocol_is_no_request(outer, framing, pieces):
    sent, refused = OUTER[outer] + FRAMING[framing], framing != "no-body" or outer == "connect"
    async with Cluster(trust_tenant_header=True) as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]))
        if pieces == 1:
            writer.write(sent + INNER)
        else:
            writer.write(sent)
            await writer.drain()
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 400 " if refused else b"HTTP/1.1 ")
        with anyio.fail_after(20), contextlib.suppress(ConnectionError):
            for at in range(0, len(INNER) if pieces > 1 else 0, len(INNER) // (pieces - 1 or 1)):
                writer.write(INNER[at : at + len(INNER) // (pieces - 1)])
                await writer.drain()
            answers = await reader.read()
            assert answers.count(b"HTTP/1.1 ") == (pieces == 1) and (b"without Upgrade" in answers) is refused
        writer.close()
        await c.chat("hello")
        assert not any("smuggled" in json.dumps(seen.body) for engine in (*c.p, *c.d) for seen in engine.seen)


@pytest.mark.parametrize("length", [b"", b"Content-Length: 0\r\n"])
async def test_request_without_body_that_asks_for_another_protocol_is_the_last_one(length, caplog):
    """As Apache's and Java's clients send their first ones."""
    async with Cluster() as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]))
        writer.write(b"GET /v1/models HTTP/1.1\r\n" + UPGRADE % b"TLS/1.2" + length + b"\r\n" + INNER)
        with anyio.fail_after(20):
            answers = await reader.read()
        assert answers.startswith(b"HTTP/1.1 200 ") and answers.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in answers.lower() and not c.d[0].seen
        assert "upgrade" not in caplog.text.lower()
        writer.close()


async def test_pipelined_request_that_asks_for_another_protocol_is_not_answered():
    """Its 400 would be taken for the answer to the one before it."""
    async with Cluster() as c:
        c.d[0].hold = asyncio.Event()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]))
        writer.write(INNER + OUTER["h2c"] + FRAMING["length"] + INNER)
        with anyio.fail_after(20):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("framing", ["length", "chunked"])
@pytest.mark.parametrize("page", ["health", "ready", "metrics"])
async def test_pages_without_a_key_hold_no_body(page, framing, tmp_path):
    (tmp_path / "keys").write_text("ann key-0123456789abcdef\n")
    (tmp_path / "keys").chmod(0o600)
    async with Cluster(api_keys_file=str(tmp_path / "keys")) as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]))
        body = FRAMING[framing].replace(b"%d" % len(INNER), b"1000000")
        writer.write(b"GET /%b HTTP/1.1\r\nHost: a\r\n" % page.encode() + body + INNER)
        with anyio.fail_after(20):
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()


async def test_pipelined_requests_are_answered_up_to_a_limit():
    """Each is held, and costs the more the more there are; no key is looked at before."""
    one = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    async with Cluster() as c:
        for count in (MAX_PIPELINED, 20 * MAX_PIPELINED):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]))
            writer.write(one * (count - 1) + one.replace(b"Host", b"Connection: close\r\nHost"))
            with anyio.fail_after(20), contextlib.suppress(ConnectionError):
                answers = await reader.read()
                assert (answers.count(b"HTTP/1.1 200 ") == count) is (count == MAX_PIPELINED)
                assert answers.count(b"HTTP/1.1 200 ") <= MAX_PIPELINED
            writer.close()


async def test_request_with_too_many_headers_is_refused_before_it_ends():
    async with Cluster() as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]))
        writer.write(b"GET /health HTTP/1.1\r\n" + b"a:\r\n" * (MAX_HEADERS + 2))
        with anyio.fail_after(20):
            answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 ") and b"more than 256 headers" in answer
        writer.close()


@pytest.mark.parametrize("pieces", [1, 2])
async def test_trailers_are_no_headers(pieces):
    """A gateway that sets or removes headers passes trailers on as they are."""
    body = json.dumps(turn("hello")).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    rest = b"%x\r\n%b\r\n0\r\nX-Tenant: victim\r\n\r\n" % (len(body), body)
    async with Cluster(trust_tenant_header=True) as c:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]))
        for piece in [head + rest] if pieces == 1 else [head, rest]:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        with anyio.fail_after(20):
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        await c.chat("hello")
        assert c.d[0].seen[0].body.get("cache_salt") == c.d[0].seen[1].body.get("cache_salt")
        writer.close()


async def test_websocket_attempts_leave_nothing():
    async with Cluster() as c:
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(c.url.rpartition(":")[2]))
            writer.write(OUTER["websocket"] + b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: YQ==\r\n\r\n")
            with anyio.fail_after(20):
                assert (await reader.read()).startswith(b"HTTP/1.1 404 ")
            writer.close()
        await c.chat("hello")
        gc.collect()
        assert len([each for each in gc.get_objects() if type(each) is BoundedProtocol]) <= 2
