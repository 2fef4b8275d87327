"""Engines on a vLLM that lacks something: they serve without the feature that it carries."""

import time
from collections.abc import Iterator

import pytest
from engine_fixtures import BLOCK, TESTS_ON_PATH, start_missing

from vllm_kvtier.devtools.clients import complete, prompt_tokens
from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import ServiceFailed, group_members
from vllm_kvtier.vllm_compat.probe.row import Feature

SMALL = 24  # blocks of the engine's prefix cache: two of the prompts below
PROMPTS = [[300 + (i * k) % 1500 for i in range(10 * BLOCK)] for k in (1, 7, 11)]


def without(row: str, model_path, log_dir, **more) -> Engine:
    """An engine whose vLLM lacks what this row of the probe's table is about."""
    kv = kvtier({"store_size": 64 << 20, "load_policy": "always"}, kv_connector_module_path="without_rows")
    env = {**TESTS_ON_PATH, "KVTIER_WITHOUT": row}
    kv["kv_connector"] = "ConnectorWithoutRows"
    return Engine(
        model_path, name=f"without-{row.replace(' ', '-')}", kv=kv, env=env, log_dir=log_dir, block_size=BLOCK,
        num_blocks=SMALL, max_model_len=16 * BLOCK, args=("--dtype", "float32"), **more,
    )  # fmt: skip


@pytest.fixture
def lacking(model_path, log_dir, run_dir, plain) -> Iterator[tuple[Engine, Engine]]:
    """(without the idle hook, without the block pool)"""
    made = without("idle hook", model_path, log_dir), without("block pool", model_path, log_dir)
    start_missing([*made[:1], plain])
    made[1].start()
    yield made
    for engine in made:
        engine.kill()


def test_missing_feature_is_disabled_and_missing_requirement_stops_start(lacking, single):
    idle, pool = lacking
    with pytest.raises(ServiceFailed, match="cannot work with vLLM .*block pool: a test took it away"):
        pool.wait_ready()
    assert not group_members(pool.pid)
    # Each is gone from the engine's prefix cache when it is asked for again. Copies go on with each step only.
    deadline = time.monotonic() + 60
    while not prompt_tokens(idle.base_url).pulled and time.monotonic() < deadline:
        for prompt in PROMPTS:
            truth = complete(single.base_url, prompt, max_tokens=4)
            assert complete(idle.base_url, prompt, max_tokens=4).token_ids == truth.token_ids
    assert prompt_tokens(idle.base_url).pulled > 0, "nothing was loaded from the node store"
    said = [line for line in idle.log_path.read_text().splitlines() if "kvtier: probe:" in line]
    assert len(said) == 1 and "idle hook: a test took it away" in said[0], said
    assert Feature.SYNC_LOADS.value in said[0] and Feature.PEER_FETCH.value in said[0]
