"""Requests that the proxy sends to a prefill engine and a decode engine at once."""

import asyncio
import json
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp
import pytest
from proxy_fakes import Cluster, text_of, turn

from vllm_kvtier.proxy.engines.engine_http import EngineFailure, EngineHttp
from vllm_kvtier.proxy.messages.transfer_params import find_params
from vllm_kvtier.scheduler.matching.transfer_params import read


@asynccontextmanager
async def following(**options):
    """A cluster whose prefill engines are known, both engines of the next request held."""
    async with Cluster(max_followed_prefills=16, **options) as c:
        for engine in c.p:
            engine.follow = True
        for _ in c.p:
            await c.chat(f"first {_}")
        for engine in (*c.p, *c.d):
            engine.seen.clear()
            engine.hold = asyncio.Event()
        yield c


async def both_asked(c):
    return await c.p[0].until_seen(1), await c.d[0].until_seen(1)


@pytest.mark.parametrize("stream", [False, True])
async def test_request_is_sent_to_both_engines_at_once(stream):
    async with following() as c:
        asked = asyncio.create_task(c.chat("hello", stream=stream, max_tokens=5))
        to_p, to_d = await both_asked(c)
        prefill, decode = (read(seen.body["kv_transfer_params"]) for seen in (to_p, to_d))
        assert prefill.export_prefill and prefill.export_as == decode.handoff.export and decode.handoff.follow
        assert decode.handoff.address == ("127.0.0.1", c.p[0].params({})["remote_port"])
        assert (to_p.body["max_tokens"], to_d.body["max_tokens"]) == (1, 5)
        assert c.core.decode[0].followed_prefills == 1
        c.p[0].hold.set()
        await c.until(lambda: c.core.prefill[0].outstanding == 0)
        c.d[0].hold.set()
        reply = await asked
        text = text_of(reply.content) if stream else reply.json()["choices"][0]["text"]
        assert text.startswith(c.d[0].text(turn("hello"), 0))
        assert len(c.p[0].seen) == len(c.d[0].seen) == 1 and c.core.decode[0].followed_prefills == 0
        assert c.released.empty()


async def test_finished_prefill_is_no_prefill_to_follow():
    """Its params are passed on as they are; the decode engine must not wait for an export that has gone."""
    async with Cluster() as c:
        c.p[0].follow = True
        await c.chat("hello")
        assert read(c.d[0].seen[0].body["kv_transfer_params"]).handoff.follow is False


async def test_names_of_exports_differ():
    async with following() as c:
        c.p[0].hold = c.d[0].hold = None
        await asyncio.gather(*(c.chat(f"hello {i}") for i in range(4)))
        names = [seen.body["kv_transfer_params"]["kvtier"]["export_as"] for seen in c.p[0].seen]
        assert len(set(names)) == 4


@pytest.mark.parametrize("why", ["unknown endpoint", "old engine", "off", "too many"])
async def test_requests_are_sent_one_after_the_other(why):
    async with Cluster(max_followed_prefills=0 if why == "off" else 1) as c:
        c.p[0].follow = why != "old engine"
        if why != "unknown endpoint":
            await c.chat("first")
        if why == "too many":
            c.core.decode[0].followed_prefills = 1
        c.p[0].hold = asyncio.Event()
        count = len(c.d[0].seen)
        asked = asyncio.create_task(c.chat("hello"))
        await c.p[0].until_seen(len(c.p[0].seen) + 1)
        assert len(c.d[0].seen) == count
        c.p[0].hold.set()
        await asked
        assert "follow" not in c.d[0].seen[-1].body["kv_transfer_params"]["kvtier"] or c.p[0].follow
        assert c.d[0].seen[-1].body["kv_transfer_params"]["kvtier"]["export"].startswith("secret-export")


@pytest.mark.parametrize("status", [400, 404, 429, 500])
async def test_prefill_that_is_refused_cancels_decode_request(status):
    async with following() as c:
        asked = asyncio.create_task(c.chat("hello"))
        _, to_d = await both_asked(c)
        c.p[0].status = status
        c.p[0].hold.set()
        await asyncio.wait_for(to_d.aborted.wait(), 10)
        c.d[0].hold.set()
        reply = await asked
        assert reply.status_code == 200 and len(c.d[0].seen) == 2
        assert "export" not in c.d[0].seen[1].body["kv_transfer_params"]["kvtier"], "it computes the prompt"


@pytest.mark.parametrize("also", ["", "an address is configured", "another rank answered since"])
async def test_engine_with_several_endpoints_is_not_followed(monkeypatch, also):
    """Data-parallel ranks behind one URL: the decode engine asked the wrong one."""
    options = {"engine": {"kv_host": "127.0.0.1", "kv_port": 4320}} if also == "an address is configured" else {}
    async with following(**options) as c:
        asked = asyncio.create_task(c.chat("hello"))
        _, to_d = await both_asked(c)
        if also == "another rank answered since":
            first = find_params(json.dumps({"kv_transfer_params": c.p[0].params({})}).encode())
            learn = c.core.prefill[0].learn
            monkeypatch.setattr(c.core.prefill[0], "learn", lambda params: (learn(params), learn(first)))
        c.p[0].kv_port = 4321
        c.p[0].hold.set()
        await asyncio.wait_for(to_d.aborted.wait(), 10)
        c.d[0].hold.set()
        assert (await asked).status_code == 200
        assert c.d[0].seen[1].body["kv_transfer_params"]["remote_port"] == 4321
        await c.chat("again")
        assert c.core.state()["counts"]["followed"] == 1


@pytest.mark.parametrize("status", [400, 500])
async def test_failed_prefill_is_tried_at_another_engine(status):
    async with following(p=2) as c:
        asked = asyncio.create_task(c.chat("hello"))
        to_d = await c.d[0].until_seen(1)
        failing, other = sorted(c.p, key=lambda engine: not engine.seen)
        other.hold, failing.status = None, status
        failing.hold.set()
        await asyncio.wait_for(to_d.aborted.wait(), 10)
        c.d[0].hold.set()
        assert (await asked).status_code == 200 and len(failing.seen) == len(other.seen) == 1
        export = c.d[0].seen[1].body["kv_transfer_params"]["kvtier"]["export"]
        assert export.startswith(f"secret-export-{other.name}")


async def test_decode_request_goes_on_when_prefill_engine_dies():
    """The decode engine computes what it lacks."""
    async with following() as c:
        asked = asyncio.create_task(c.chat("hello"))
        _, to_d = await both_asked(c)
        await c.p[0].kill()
        await c.until(lambda: not c.core.prefill[0].healthy)
        assert not to_d.aborted.is_set()
        c.d[0].hold.set()
        assert (await asked).status_code == 200 and len(c.d[0].seen) == 1


@pytest.mark.parametrize("unreached", [True, False])
async def test_prefill_that_did_not_reach_its_engine_is_not_followed(monkeypatch, unreached):
    """The engine may be well but for its HTTP server: the decode engine would wait long for a name that never comes."""

    async def ask(*_):
        raise EngineFailure("no", unreached=unreached)

    async with following() as c:
        monkeypatch.setattr(c.core.prefill[0]._http, "ask", ask)
        asked = asyncio.create_task(c.chat("hello"))
        await c.until(lambda: not c.core.prefill[0].healthy)
        c.d[0].hold.set()
        assert (await asked).status_code == 200
        assert read(c.d[0].seen[-1].body["kv_transfer_params"]).handoff is None if unreached else len(c.d[0].seen) == 1


@pytest.mark.parametrize("errors, unreached", [(["refused"], True), (["broken", "refused"], False)])
async def test_request_on_a_broken_connection_may_have_reached_its_engine(monkeypatch, errors, unreached):
    made = {
        "refused": aiohttp.ClientConnectorError(SimpleNamespace(host="h", port=1, ssl=True), OSError(111, "refused")),
        "broken": aiohttp.ServerDisconnectedError(),
    }
    left = [made[each] for each in errors]

    async def ask_once(*_):
        raise left.pop(0)

    http = EngineHttp("P0", "http://h:1", 1.0)
    monkeypatch.setattr(http, "_ask_once", ask_once)
    with pytest.raises(EngineFailure) as failed:
        await http.ask("POST", "/", None, {}, 5.0, True)
    assert failed.value.unreached is unreached and not left


async def test_decode_engine_that_answers_first_ends_prefill():
    async with following() as c:
        asked = asyncio.create_task(c.chat("hello"))
        to_p, _ = await both_asked(c)
        c.d[0].hold.set()
        assert (await asked).status_code == 200
        await asyncio.wait_for(to_p.aborted.wait(), 10)
        await c.until(lambda: c.core.prefill[0].outstanding == 0)


@pytest.mark.parametrize("how", ["dies", "answers 500"])
async def test_next_decode_engine_gets_export_of_finished_prefill(how):
    async with following(d=2) as c:
        asked = asyncio.create_task(c.chat("hello"))
        await c.p[0].until_seen(1)
        await c.until(lambda: any(engine.seen for engine in c.d))
        failing, other = sorted(c.d, key=lambda engine: not engine.seen)
        other.hold = None
        if how == "dies":
            await failing.kill()
        else:
            failing.status = 500
            failing.hold.set()
        if how == "dies":
            await c.until(lambda: sum(not engine.healthy for engine in c.core.decode) == 1)
        assert not other.seen
        c.p[0].hold.set()
        assert (await asked).status_code == 200
        assert other.seen[0].body["kv_transfer_params"]["kvtier"]["export"].startswith("secret-export-P0")


async def test_decode_request_beside_prefill_counts_as_an_attempt():
    """A request that crashes engines must not crash one more because it was followed."""
    async with following(d=3, max_decode_attempts=2) as c:
        for engine in c.d:
            engine.hold, engine.status = None, 500
        asked = asyncio.create_task(c.chat("hello"))
        await c.until(lambda: any(engine.seen for engine in c.d))
        c.p[0].hold.set()
        assert (await asked).status_code == 500
        assert sum(len(engine.seen) for engine in c.d) == 2


@pytest.mark.parametrize("status", [429, 500])
async def test_answer_of_only_decode_attempt_is_the_client_s(status):
    async with following(d=2, max_decode_attempts=1) as c:
        for engine in c.d:
            engine.hold, engine.status = None, status
        asked = asyncio.create_task(c.chat("hello"))
        await c.until(lambda: any(engine.seen for engine in c.d))
        c.p[0].hold.set()
        assert (await asked).status_code == status and sum(len(engine.seen) for engine in c.d) == 1


async def test_prefill_timeout_is_for_all_prefills_of_a_request():
    """The followed one hangs: when its time is over, no other prefill engine is asked."""
    async with following(p=2, prefill_timeout=0.3) as c:
        asked = asyncio.create_task(c.chat("hello"))
        to_d = await c.d[0].until_seen(1)
        await asyncio.wait_for(to_d.aborted.wait(), 10)
        c.d[0].hold.set()
        assert (await asked).status_code == 200
        assert sum(len(engine.seen) for engine in c.p) == 1 and len(c.d[0].seen) == 2
        assert "export" not in c.d[0].seen[1].body["kv_transfer_params"]["kvtier"], "it computes the prompt"


async def test_client_that_leaves_ends_both_requests():
    async with following() as c:
        asked = asyncio.create_task(c.chat("hello"))
        to_p, to_d = await both_asked(c)
        asked.cancel()
        for seen in (to_p, to_d):
            await asyncio.wait_for(seen.aborted.wait(), 10)
        await c.until(lambda: not any(e.outstanding for e in (*c.core.prefill, *c.core.decode)))
        assert c.core.decode[0].followed_prefills == 0
