"""What other routers send, field by field: vLLM's toy proxy and its proxy for several turns, llm-d, Dynamo."""

import asyncio
import json
import random
import sys
import types
import uuid

import httpx
import pytest
from engine_client import PREFILL, random_tokens

from vllm_kvtier import dynamo
from vllm_kvtier.vllm_compat.version import check_supported

pytestmark = pytest.mark.usefixtures("fleet_is_idle_afterwards", "p_holds_nothing_yet")


async def one_token(http: httpx.AsyncClient, engine, body: dict, params: dict, request_id: str) -> dict:
    """The probe of such a router: same request, one token, not streamed."""
    probe = {**body, "kv_transfer_params": params, "stream": False, "max_tokens": 1}
    if "max_completion_tokens" in probe:
        probe["max_completion_tokens"] = 1
    probe.pop("stream_options", None)
    headers = {"X-Request-Id": request_id}
    response = await http.post(f"{engine.base_url}/v1/completions", json=probe, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()["kv_transfer_params"]


async def streamed(http: httpx.AsyncClient, engine, body: dict, params: dict, request_id: str):
    """Text and the params on the last chunk, None where vLLM cannot put them there."""
    body, headers = {**body, "kv_transfer_params": params, "stream": True}, {"X-Request-Id": request_id}
    text, found = "", None
    async with http.stream("POST", f"{engine.base_url}/v1/completions", json=body, headers=headers) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                found = event.get("kv_transfer_params") or found
                text += "".join(choice["text"] for choice in event["choices"])
    return text, found


@pytest.fixture
async def http():
    async with httpx.AsyncClient(timeout=60) as http:
        yield http


def request_for(prompt: list[int], tokens: int) -> dict:
    return {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


async def test_vllm_toy_proxy_works_unchanged(fleet, driver, http):
    """The prefill engine's params reach the decode engine unchanged, with the same request id; it streams."""
    prompt = random_tokens(random.Random("toy"), 333)
    request_id, body = str(uuid.uuid4()), request_for(prompt, 12)
    before = await driver.sources(fleet.decode)
    params = await one_token(http, fleet.prefill, body, PREFILL, request_id)
    names = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids", "tp_size")
    assert all(params[name] for name in names) and params["do_remote_prefill"] and not params["do_remote_decode"]
    text, _ = await streamed(http, fleet.decode, body, params, request_id)
    assert text == (await driver.truth(prompt, 12)).text
    assert (await driver.sources(fleet.decode) - before).pulled == 333
    await driver.until_no_exports(fleet.prefill)


async def test_router_with_nixl_fields_only_still_pulls(fleet, driver, http):
    """A router that copies only the fields it knows drops ours; pulls still work."""
    prompt = random_tokens(random.Random("known fields"), 200)
    request_id, body = str(uuid.uuid4()), request_for(prompt, 12)
    params = await one_token(http, fleet.prefill, body, PREFILL, request_id)
    assert params.pop("kvtier")
    reply = await driver.ask(fleet.decode, prompt, 12, params)
    assert reply.pulled == 200
    await driver.assert_right(reply, prompt)


async def test_export_outlives_the_refusal_of_a_router_that_releases(fleet, driver, http):
    """vLLM submits what its server refuses, aborted, with the same params; the router may ask another engine."""
    prompts = [random_tokens(random.Random(name), 200) for name in ("kept", "released")]
    kept, released = [(await driver.prefill(fleet.prefill, prompt)).params for prompt in prompts]
    kept["kvtier"]["router_releases"] = True
    for prompt, params in zip(prompts, (kept, released), strict=True):
        body = {**request_for(prompt, 12), "model": "none", "kv_transfer_params": params}
        assert (await http.post(f"{fleet.decode.base_url}/v1/completions", json=body)).status_code == 404

    async def is_released() -> bool:
        return (await driver.query(fleet.prefill, prompts[1])).exported == 0

    await driver.until(is_released, 5.0, "the other one is released, after this one would be")
    assert (await driver.query(fleet.prefill, prompts[0])).exported >= 192
    reply = await driver.ask(fleet.decode, prompts[0], 12, kept)
    assert reply.pulled == 200
    await driver.assert_right(reply, prompts[0])
    await driver.until_no_exports(fleet.prefill)


# llm-d's P2P sharing (experimental) names a peer of OffloadingConnector, at a port where nothing of ours listens.
KV_SOURCE = {"remote_kv_source": {"kv_request_id": "kv-1", "remote_host": "127.0.0.1", "remote_port": 7777}}


@pytest.mark.parametrize("added", [{}, KV_SOURCE], ids=["plain", "with_a_peer"])
async def test_llm_d_sidecar_nixlv2_pulls(fleet, driver, http, added):
    """The sidecar's default: null fields to the prefill engine, its answer unread to the decode engine."""
    prompt = random_tokens(random.Random(f"nixlv2 {sorted(added)}"), 210)
    request_id, body = str(uuid.uuid4()), request_for(prompt, 12)
    params = await one_token(http, fleet.prefill, body, {**PREFILL, **added}, request_id)
    reply = await driver.ask(fleet.decode, prompt, 12, params)
    assert reply.pulled == 210
    await driver.assert_right(reply, prompt)
    await driver.until_no_exports(fleet.prefill)


async def test_llm_d_sidecar_offloading_computes_on_both(fleet, driver, http):
    """Its keys mean another connector's peers: both engines answer right, and neither pulls nor holds anything."""
    prompt = random_tokens(random.Random("offloading"), 150)
    prefiller = {"kv_request_id": "kv-2", "remote_host": "127.0.0.1", "remote_port": 7777}
    params = [{"remote_decoder": {"kv_request_id": "kv-2"}}, {"remote_prefiller": prefiller}]
    params.append({"remote_decoder": {"kv_request_id": "kv-2"}, **KV_SOURCE})
    engines = [fleet.prefill, fleet.decode, fleet.prefill]
    asked = (driver.ask(engine, prompt, 12, each) for engine, each in zip(engines, params, strict=True))
    for reply in await asyncio.gather(*asked):
        assert reply.pulled == 0
        await driver.assert_right(reply, prompt)


async def test_dynamo_params_pull(fleet, driver, http, monkeypatch):
    """Dynamo's worker takes the params from the registered protocol, and adds hints for other connectors."""
    module = types.ModuleType(dynamo.MODULE)
    module.KvConnectorProtocol, module.KV_CONNECTOR_PROTOCOLS = object, {}
    monkeypatch.setitem(sys.modules, dynamo.MODULE, module)
    assert dynamo.register("KVTierConnector")
    protocol = module.KV_CONNECTOR_PROTOCOLS["KVTierConnector"]()
    prompt = random_tokens(random.Random("dynamo"), 180)
    asked = {**protocol.prefill_request_kv_transfer_params(), "kv_hint": {"type": "transfer", "sources": []}}
    answer = await one_token(http, fleet.prefill, request_for(prompt, 12), asked, str(uuid.uuid4()))
    params = protocol.decode_request_kv_transfer_params(types.SimpleNamespace(kv_transfer_params=answer))
    reply = await driver.ask(fleet.decode, prompt, 12, params)
    assert reply.pulled == 180
    await driver.assert_right(reply, prompt)
    await driver.until_no_exports(fleet.prefill)


async def test_vllm_multi_turn_proxy_works_unchanged(fleet, driver, http):
    """The decode engine's params go to the prefill engine of the next turn, at the top level, with do_remote_decode."""
    rng, prompt, known = random.Random("multi turn"), [], {}
    for turn in range(3):
        prompt = [*prompt, *random_tokens(rng, 70)]
        request_id, body = str(uuid.uuid4()), request_for(prompt, 80)
        asked = {**PREFILL, **known, "do_remote_decode": True, "do_remote_prefill": False}
        params = await one_token(http, fleet.prefill, body, asked, request_id)
        if turn:
            assert params["kvtier"]["pulled_tokens"] >= 64
            assert params["kvtier"]["pulled_from"] == fleet.decode.kv_address
        answer = await driver.ask(fleet.decode, prompt, 80, params)
        await driver.assert_right(answer, prompt)
        assert answer.params["do_remote_decode"] and not answer.params["do_remote_prefill"]
        known = {name: answer.params[name] for name in answer.params if name.startswith(("remote_", "tp_"))}
        prompt = [*prompt, *answer.tokens]


async def test_streamed_answers_carry_kv_transfer_params_where_vllm_supports_it(fleet, driver, http):
    """vLLM 0.33 can. Before, the prefill engine still finds the decode engine's part by hash: the decode engine sent
    its address when it pulled."""
    rng = random.Random("streamed")
    prompt = random_tokens(rng, 70)
    request_id, body = str(uuid.uuid4()), request_for(prompt, 80)
    params = await one_token(http, fleet.prefill, body, PREFILL, request_id)
    text, found = await streamed(http, fleet.decode, body, params, request_id)
    truth = await driver.truth(prompt, 80)
    assert text == truth.text
    if check_supported() >= (0, 33, 0):
        assert found["do_remote_decode"] and found["remote_port"]
    first = await driver.prefill(fleet.prefill, [*prompt, *truth.tokens, *random_tokens(rng, 20)])
    assert first.pulled >= 64
