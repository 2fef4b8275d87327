"""The proxy with policy ``kv_events``, from a client's request to the engine that gets it."""

import asyncio
import contextlib
import gc
from array import array
from types import SimpleNamespace

import msgspec
from kv_event_publisher import BLOCK, publishing, stored
from proxy_fakes import Cluster, turn

from vllm_kvtier.proxy.config import EngineAddress
from vllm_kvtier.proxy.deadlines import time_limit
from vllm_kvtier.proxy.kv_events import prompt_tokens
from vllm_kvtier.proxy.kv_events.index import PromptTokens
from vllm_kvtier.proxy.kv_events.load_costs import LoadCosts
from vllm_kvtier.proxy.kv_events.shared_blocks import SharedBlocks
from vllm_kvtier.proxy.messages.request_bodies import ClientRequest, Route
from vllm_kvtier.proxy.routing.conversations import Name

LONG = "Hello. " * 200  # its tokens are its bytes
TURN = [LONG, "Well?", "And then?"]


@contextlib.asynccontextmanager
async def cluster(count: int = 2, **options):
    """(Cluster of decode engines, a publisher for each)"""
    with contextlib.ExitStack() as stack:
        publishers = [stack.enter_context(publishing()) for _ in range(count)]
        options = {"tokenize_timeout": 20.0} | options  # half a second may pass on a busy machine
        async with Cluster(p=0, d=count, routing_policy="kv_events", **options) as c:
            c.addresses = tuple(
                EngineAddress(engine.url, events=publisher.address, replay=publisher.replay)
                for engine, publisher in zip(c.d, publishers, strict=True)
            )
            c.core.apply(c.config(decode=c.addresses))
            yield c, publishers


def salt(c: Cluster) -> str:
    return c.core.tenants.salt(c.core.tenants.identify({}), None)


async def known(c: Cluster, count: int) -> None:
    """Until the proxy knows of so many blocks in all."""
    await c.until(lambda: sum(len(each.index) for each in c.core.events) >= count)


def got(c: Cluster) -> list[int]:
    """Requests that each engine has got."""
    return [len(engine.seen) for engine in c.d]


async def test_request_goes_where_events_say_its_prefix_is():
    async with cluster() as (c, publishers):
        tokens = list(LONG.encode())
        publishers[1].publish(stored(tokens, salt=salt(c)))
        await known(c, len(tokens) // BLOCK)
        for _ in range(3):
            assert (await c.chat(LONG)).status_code == 200
        assert got(c) == [0, 3]
        page = (await c.client.get("/metrics")).text
        assert f'kv_blocks{{events="{publishers[1].address}",tier="gpu"}} {len(tokens) // BLOCK}.0' in page
        assert f'kv_event_batches_total{{events="{publishers[1].address}",outcome=' in page
        # Another tenant's prompt is not there.
        await c.chat(LONG, headers={"Authorization": "Bearer ann"})
        assert got(c) == [1, 3]


async def test_prompt_is_looked_up_once_for_all_engines(monkeypatch):
    async with cluster(count=4) as (c, publishers):
        tokens = list(range(1000, 1000 + 100 * BLOCK))
        shared = {"medium": "EXTERNAL", "locality": "REMOTE"}
        publishers[0].publish(stored(tokens, salt=salt(c), **shared))
        for publisher in publishers[1:]:  # they use the cluster, too
            publisher.publish(stored([7] * BLOCK, **shared))
        await known(c, 103)
        found, ranked = [], []
        find, expect = SharedBlocks.find, c.core.router.policy.expect
        monkeypatch.setattr(SharedBlocks, "find", lambda self, key: found.append(key) or find(self, key))
        monkeypatch.setattr(c.core.router.policy, "expect", lambda prompt: ranked.append(prompt) or expect(prompt))
        assert (await c.client.post("/v1/completions", json={"model": "m", "prompt": tokens})).status_code == 200
        assert 100 <= len(found) <= 101 and len(ranked) == 1


async def test_token_ids_of_request_are_used_as_they_are():
    async with cluster() as (c, publishers):
        tokens = list(range(1000, 1000 + 100 * BLOCK))
        publishers[0].publish(stored(tokens, medium="CPU", salt=salt(c)))
        await known(c, 100)
        for _ in range(3):
            await c.client.post("/v1/completions", json={"model": "m", "prompt": tokens})
            await c.client.post("/inference/v1/generate", json={"model": "m", "token_ids": tokens})
        assert got(c) == [6, 0] and not any(engine.tokenized for engine in c.d)


async def test_blocks_that_a_full_index_left_out_are_unknown_not_absent():
    """The engine that got a prompt before gets it again, although its events could not be entered."""
    async with cluster(max_blocks=4) as (c, publishers):
        await c.chat(LONG)
        first = got(c).index(1)
        for publisher, text in zip(publishers, ("x" * 400, "y" * 400), strict=True):
            publisher.publish(stored(list(text.encode()), salt=salt(c)))
        await c.until(lambda: all(each.index.dropped == 96 for each in c.core.events))
        other = c.core.decode[1 - first]
        for _ in range(3):
            await c.chat(LONG)
        assert got(c)[first] == 4 and other.healthy
        page = (await c.client.get("/metrics")).text
        assert f'kv_blocks_dropped_total{{events="{publishers[0].address}"}} 96.0' in page


async def test_conversation_is_tokenized_again_only_when_much_is_new():
    async with cluster() as (c, _):
        await c.chat(*TURN[:1])
        await c.chat(*TURN)
        assert sum(len(engine.tokenized) for engine in c.d) == 1
        await c.chat(*TURN, "Yes.", LONG)
        assert sum(len(engine.tokenized) for engine in c.d) == 2
        # Other tools make other tokens.
        await c.chat(*TURN, tools=[{"type": "function", "function": {"name": "f"}}])
        assert sum(len(engine.tokenized) for engine in c.d) == 3
        assert c.core.state()["counts"]["tokens_kept"] == 1
        await c.chat("short")
        assert sum(len(engine.tokenized) for engine in c.d) == 3


async def test_engine_that_does_not_tokenize_delays_one_request_only():
    async with cluster(tokenize_timeout=0.05) as (c, _):
        for engine in c.d:
            engine.tokenize_hold = asyncio.Event()
        for i in range(6):
            assert (await c.chat(f"{i} {LONG}")).status_code == 200
        assert sum(len(engine.tokenized) for engine in c.d) == 1
        assert c.core.state()["counts"]["tokenize_failed"] == 1 and all(engine.healthy for engine in c.core.decode)
        # By the text of prefixes: the engine that had the prompt gets it again.
        before = got(c)
        await c.chat(f"0 {LONG}")
        assert sorted(now - was for now, was in zip(got(c), before, strict=True)) == [0, 1]
        for engine in c.d:
            engine.tokenize_hold.set()


async def test_prompt_too_long_to_tokenize_in_time_leaves_ids_to_shorter_ones():
    async with cluster(tokenize_timeout=0.5) as (c, _):
        for engine in c.d:
            engine.tokenize_hold = asyncio.Event()
        assert (await c.chat(3 * LONG)).status_code == 200
        for engine in c.d:
            engine.tokenize_hold.set()
        for text in (LONG, 4 * LONG, 2 * LONG):
            assert (await c.chat(text)).status_code == 200
        counts = c.core.state()["counts"]
        assert (counts["tokenize_failed"], counts["tokenized"]) == (1, 2)


async def test_prompts_are_not_held_parsed_while_engine_tokenizes():
    async with cluster(tokenize_timeout=60) as (c, _):
        for engine in c.d:
            engine.tokenize_hold = asyncio.Event()
        task = asyncio.create_task(c.chat(*[f"tokenized {LONG}"] * 3))
        await c.until(lambda: any(engine.tokenized for engine in c.d))
        requests = [each for each in gc.get_objects() if type(each) is ClientRequest]
        (request,) = (each for each in requests if b"tokenized" in bytes(each.fields.get("messages", b"")))
        assert request.prompt is None
        for engine in c.d:
            engine.tokenize_hold.set()
        assert (await task).status_code == 200 and sum(map(len, (engine.seen for engine in c.d))) == 1


async def test_token_ids_are_held_packed():
    async with cluster() as (c, _):
        for ids, held in (list(range(1000, 2000)), array("I", range(1000, 2000))), ([-1] * 1000, None):
            request = ClientRequest(Route.COMPLETIONS, msgspec.json.encode({"prompt": ids}))
            prompt = await c.core.tokenizer.prompt(request, Name((), None, explicit=False), "", {})
            assert prompt.tokens == 1000 and (prompt.ids.tokens if prompt.ids else None) == held


async def test_streams_do_not_hold_their_prompts():
    async with cluster() as (c, _):
        c.d[0].gate = c.d[1].gate = asyncio.Semaphore(1)
        body = {"model": "m", "prompt": list(range(5000, 6000)), "stream": True}
        async with c.client.stream("POST", "/v1/completions", json=body) as reply:
            pieces = reply.aiter_raw()
            await anext(pieces)
            held = [each for each in gc.get_objects() if type(each) is PromptTokens and each.tokens[0] == 5000]
            assert held == []
            for _ in range(10):
                c.d[0].gate.release()
            assert b"[DONE]" in b"".join([piece async for piece in pieces])


async def test_kept_ids_of_prompts_of_few_tokens_are_bounded(monkeypatch):
    """Between the fields of JSON, clients can put spaces, which are no tokens."""
    monkeypatch.setattr(prompt_tokens, "_MAX_KEPT_TOKENS", 1000)
    async with cluster() as (c, _):
        for i in range(20):
            body = b'{"model":"m","messages":[{"role":"user","content":"%d"%s}]}' % (i, b" " * 2000)
            await c.client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert c.core.state()["counts"]["tokenized"] == 20
        assert len(c.core.tokenizer._kept) == 1000 // 130


async def test_refused_tokenization_and_media_are_routed_without_ids():
    async with cluster() as (c, _):
        for engine in c.d:
            engine.tokenize_status = 400
        assert (await c.chat(LONG)).status_code == 200
        content = [{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": "data:,x"}}]
        body = turn("x") | {"messages": [{"role": "user", "content": content}]}
        assert (await c.client.post("/v1/chat/completions", json=body)).status_code == 200
        assert sum(len(engine.tokenized) for engine in c.d) == 1
        assert c.core.state()["counts"]["tokenize_refused"] == 1


async def test_two_proxies_agree(tmp_path):
    """Also one that starts later, from the replay."""
    secret = tmp_path / "salt"
    secret.write_bytes(b"0123456789abcdef")
    async with cluster(3, salt_secret_file=str(secret)) as (c, publishers):
        prompts = [f"{i} {LONG}" for i in range(6)]
        for i, prompt in enumerate(prompts):
            publishers[i % 3].publish(stored(list(prompt.encode()), salt=salt(c), medium="CPU"))
        blocks = sum(len(prompt) // BLOCK for prompt in prompts)
        await known(c, blocks)
        async with Cluster(p=0, d=0, routing_policy="kv_events", salt_secret_file=str(secret), decode=c.addresses) as o:
            await known(o, blocks)
            for i, prompt in enumerate(prompts):
                before = got(c)
                await c.chat(prompt)
                await o.chat(prompt)
                more = [now - was for now, was in zip(got(c), before, strict=True)]
                assert more == [2 * (j == i % 3) for j in range(3)]


async def test_policy_changes_with_configuration():
    async with cluster() as (c, _):
        assert len(list(c.core.events)) == 2
        c.core.apply(c.config(decode=c.addresses, routing_policy="prefix_hash"))
        assert list(c.core.events) == [] and c.core.router.policy.name == "prefix_hash"
        await c.chat(LONG)
        assert not any(engine.tokenized for engine in c.d)
        c.core.apply(c.config(decode=c.addresses[:1]))
        assert len(list(c.core.events)) == 1
        await c.chat(LONG + "!")
        assert not any(engine.tokenized for engine in c.d), "there is one engine, hence no choice"


async def test_costs_of_engines_that_left_are_forgotten(monkeypatch):
    """Pods come back under other addresses."""
    engines, costs = [SimpleNamespace(url=f"http://10.0.0.{i}", usable=i > 1) for i in range(4)], LoadCosts()

    async def read(engine):
        engines[:] = engines[1:] or [SimpleNamespace(url="http://10.0.0.9", usable=True)]
        return b""

    monkeypatch.setattr("vllm_kvtier.proxy.kv_events.load_costs._page", read)
    monkeypatch.setattr("vllm_kvtier.proxy.kv_events.load_costs._INTERVAL", 0.0)
    task = asyncio.create_task(costs.measure(engines))
    async with time_limit(10):
        while list(costs._measured) != ["http://10.0.0.9"]:
            await asyncio.sleep(0)
    task.cancel()


async def test_engines_measure_what_loading_costs(monkeypatch):
    page = b"vllm:request_prefill_time_seconds_sum 10.0\nvllm:request_prefill_kv_computed_tokens_sum 100000.0\n"
    page += b'vllm:kvtier_load_seconds_sum{kind="ok"} 5.0\nvllm:kvtier_loaded_tokens_total{kind="host"} 100000.0\n'

    async def read(engine):
        return page

    monkeypatch.setattr("vllm_kvtier.proxy.kv_events.load_costs._page", read)
    async with cluster() as (c, _):
        await c.until(lambda: c.core.events.load_costs.of(c.core.decode[1])[1] == 0.5)
        assert msgspec.json.encode(c.core.state())
