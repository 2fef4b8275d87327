"""A prefill and a decode engine whose MultiConnector has NixlConnector and ours: it hands off, ours stores and loads.

Both take the same ``kv_transfer_params``. vLLM ends an engine in which both answer them.
"""

import random
from collections.abc import Iterator

import httpx
import pytest
from engine_client import PREFILL, driving, random_tokens
from engine_fixtures import BLOCK, ENGINE_FLAGS, start_missing
from model_shapes import GPUS
from node_fixtures import ASKED, OPTIONS, runtime_dir, store_env

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all


def engine(name: str, nixl_first: bool, model_path, folder, log_dir) -> Engine:
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", **({} if GPUS else {"kv_buffer_device": "cpu"})}
    ours = kvtier({**OPTIONS, "store_size": "128MiB", "load_policy": "always", "endpoint_port": free_port()})
    children = [nixl, ours] if nixl_first else [ours, nixl]
    kv = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": children}}
    env = {**store_env(folder), "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    return Engine(model_path, name=name, kv=kv, log_dir=log_dir, env=env, **ENGINE_FLAGS)


@pytest.fixture(scope="module")
def engines(plain, model_path, log_dir) -> Iterator[list[Engine]]:
    """In either order of the two connectors, each with a store of its own."""
    with runtime_dir() as one, runtime_dir() as other:
        made = [engine(f"beside-{n}", n == 0, model_path, folder, log_dir) for n, folder in enumerate((one, other))]
        start_missing([*made, plain])
        yield made
        kill_all(made)


@pytest.mark.parametrize("prefill", [0, 1])
async def test_beside_nixl_connector_it_hands_off_and_ours_stores(engines, plain, prefill):
    p, d = engines[prefill], engines[1 - prefill]
    prompt = random_tokens(random.Random(f"beside {prefill}"), 300)
    async with driving(plain) as driver, httpx.AsyncClient(base_url=p.base_url) as http:
        before = await driver.sources(d)
        first, reply = await driver.hand_off(p, d, prompt, params={**PREFILL, **ASKED})
        assert first.params["remote_host"] and "export" not in first.params["kvtier"]
        await driver.assert_right(reply, prompt)
        assert (await driver.sources(d) - before).pulled, "by NixlConnector"

        async def loaded():
            (await http.post("/reset_prefix_cache")).raise_for_status()
            again = await driver.ask(p, prompt, 8, ASKED)
            await driver.assert_right(again, prompt)
            return again.pulled >= len(prompt) // BLOCK * BLOCK

        await driver.until(loaded, 20.0, "the prompt is loaded from the store")
