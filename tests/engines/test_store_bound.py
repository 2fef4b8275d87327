"""A real engine that may hold few of its blocks for copies to the node store stores all that it computes."""

import asyncio
from types import SimpleNamespace

from engine_client import driving, random_tokens
from engine_fixtures import ENGINE_FLAGS, start_missing
from node_fixtures import OPTIONS, NodeDriver, runtime_dir, seeded, store_env


async def test_store_inflight_limit_stores_all_blocks_of_a_burst(make_engine, plain):
    """Six of 16 blocks each in large steps; 14 may be pinned at a time. The engine idles when they have ended:
    what found no room goes from vLLM's prefix cache."""
    prompts = [random_tokens(seeded(f"bound {n}"), 16 * 32 + 5) for n in range(6)]
    flags = {**ENGINE_FLAGS, "args": (*ENGINE_FLAGS["args"], "--max-num-batched-tokens", "4096")}
    with runtime_dir() as folder:
        extra = {**OPTIONS, "bidirectional": False, "load_policy": "always", "store_inflight_share": 0.1}
        engine = make_engine("bound", extra, env=store_env(folder), **flags)
        start_missing([engine, plain])
        async with driving(plain, NodeDriver) as driver:
            driver.node = SimpleNamespace(truths={})
            await driver.ask(engine, random_tokens(seeded("bound"), 40), 1)
            await asyncio.gather(*(driver.ask(engine, prompt, 4) for prompt in prompts))
            for prompt in prompts:
                await driver.stored(engine, prompt)
            await driver.flushed(engine)
            lost = {k: n for k, n in (await driver.counters(engine)).items() if k.startswith("stores_skipped")}
            assert not set(lost) - {"stores_skipped already_stored"}, lost
            await driver.reset(engine)
            for prompt in prompts:
                assert (await driver.asked(engine, prompt, 4)).pulled == 16 * 32
