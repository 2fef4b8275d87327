"""A real engine that may hold few of its blocks for copies to the node store stores all that it computes."""

import asyncio
from types import SimpleNamespace

from drive import driving, random_tokens
from fleet import ENGINE_FLAGS, start_missing
from node_fleet import OPTIONS, NodeDriver, runtime_dir, seeded, store_env


async def test_of_prompts_sent_together_all_is_stored_though_few_blocks_may_be_held(make_engine, plain):
    """Six of 16 blocks each in large steps, of which 14 may be pinned at a time. The engine idles when they have ended:
    what found no room goes from vLLM's prefix cache."""
    prompts = [random_tokens(seeded(f"bound {n}"), 16 * 32 + 5) for n in range(6)]
    flags = {**ENGINE_FLAGS, "args": (*ENGINE_FLAGS["args"], "--max-num-batched-tokens", "4096")}
    with runtime_dir() as folder:
        extra = {**OPTIONS, "bidirectional": False, "load_policy": "always", "store_hold_share": 0.1}
        engine = make_engine("bound", extra, env=store_env(folder), **flags)
        start_missing([engine, plain])
        async with driving(plain, NodeDriver) as driver:
            driver.node = SimpleNamespace(truths={})
            await driver.ask(engine, random_tokens(seeded("bound"), 40), 1)
            await asyncio.gather(*(driver.ask(engine, prompt, 4) for prompt in prompts))
            for prompt in prompts:
                await driver.stored(engine, prompt)
            await driver.flushed(engine)
            lost = {k: n for k, n in (await driver.counters(engine)).items() if k.startswith("not_stored")}
            assert not set(lost) - {"not_stored stored already"}, lost
            await driver.reset(engine)
            for prompt in prompts:
                assert (await driver.asked(engine, prompt, 4)).pulled == 16 * 32
