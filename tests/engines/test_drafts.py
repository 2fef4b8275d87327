"""A draft model's KV comes with the target's: behind what was loaded as many drafts are accepted as behind what was
computed. Also on a GPU:

    KVTIER_TEST_GPUS=0 python -m pytest tests/engines/test_drafts.py

The draft model is the target, so that with its right KV almost every draft is accepted, and without it few are.
"""

import json

import pytest
from engine_client import driving, random_tokens
from engine_fixtures import TESTS_ON_PATH, start_missing
from faults import ALTER
from model_shapes import GPU_FLAGS, GPUS
from node_fixtures import OPTIONS, Node, NodeDriver, runtime_dir, seeded, store_env, store_in

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port

BLOCK, DRAFTS, ANSWER = 32, 3, 24  # tokens
ACCEPTED, PROPOSED = (f"vllm:spec_decode_num_{name}_total" for name in ("accepted_tokens", "draft_tokens"))
TIE = 0.02  # a candidate that is closer than this to the best one may take its place in the other model's steps


@pytest.fixture
async def speculating(plain, model_path, log_dir):
    """(driver, engine, plan of ``altering_connector``)."""
    plan = log_dir / "drafts.alter"
    plan.write_text("")
    with runtime_dir() as folder:
        extra = {**OPTIONS, "load_policy": "always", "lookup_timeout": 10, "endpoint_port": free_port()}
        named = {"kv_connector": "AlteringConnector", "kv_connector_module_path": "altering_connector"}
        config = {"method": "draft_model", "model": str(model_path), "num_speculative_tokens": DRAFTS}
        engine = Engine(
            model_path, name="drafts", kv={**kvtier(extra), **named}, block_size=BLOCK, log_dir=log_dir,
            args=("--dtype", "float32", *GPU_FLAGS, "--speculative-config", json.dumps(config)), gpus=GPUS[:1],
            kv_cache_bytes=128 << 20, env={**store_env(folder), **TESTS_ON_PATH, ALTER: str(plan)},
        )  # fmt: skip
        try:
            start_missing([engine, plain])
            async with driving(plain, NodeDriver) as driver:
                driver.node = Node(engine, engine, plain, store_in(folder), {})
                yield driver, engine, plan
        finally:
            engine.kill()


async def test_drafts_behind_loaded_kv_are_accepted_as_behind_computed(speculating):
    driver, engine, plan = speculating
    rng = seeded("drafts")

    async def certain() -> list[int]:
        while True:
            prompt = random_tokens(rng, rng.randrange(3 * BLOCK, 9 * BLOCK))
            if all(best - second > TIE for best, second in (await driver.truth(prompt, ANSWER)).top):
                return prompt

    async def counts(prompts) -> list[tuple[float, float, bool]]:
        """Accepted and proposed tokens of each prompt's answer, and whether KV was loaded for it."""
        found = []
        for prompt in prompts:
            before = [await driver.metric(engine, name) for name in (ACCEPTED, PROPOSED)]
            reply = await driver.asked(engine, prompt, ANSWER)
            await driver.flushed(engine)
            after = [await driver.metric(engine, name) for name in (ACCEPTED, PROPOSED)]
            found.append((after[0] - before[0], after[1] - before[1], reply.pulled > 0))
        return found

    prompts = [await certain() for _ in range(6)]
    computed = await counts(prompts)
    assert not any(loaded for *_, loaded in computed)
    for prompt in prompts:
        await driver.stored(engine, prompt)
    results = {}
    for how in ("", "drafts 0"):
        await driver.reset(engine)
        plan.write_text(how)
        try:
            results[how] = await counts(prompts)
        finally:
            plan.write_text("")
        assert all(loaded for *_, loaded in results[how])
    assert [each[:2] for each in results[""]] == [each[:2] for each in computed], (computed, results[""])
    right, wrong = (sum(a for a, *_ in each) / sum(p for _, p, _ in each) for each in results.values())
    assert right > 0.9 and wrong < 0.5, (right, wrong)
