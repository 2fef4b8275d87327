"""A request that is alone is computed in the step that loads it: right, and taken back if what came was not."""

import asyncio
import random

import numpy as np
import pytest
from engine_client import assert_same, random_tokens
from node_fixtures import ASKED, SLOT_PAGES, Memory, Node, NodeDriver, seeded

from vllm_kvtier.store.protocol import PAGE

BLOCK = 32


@pytest.fixture(autouse=True)
async def new_memory(node: Node, nodes: NodeDriver):
    """Of which is known what was written in it; and nothing is left when a test has ended."""
    await asyncio.to_thread(node.store.kill)
    await asyncio.gather(*map(nodes.uses_store, node.engines))
    yield
    await nodes.nothing_left(*node.engines)
    await asyncio.to_thread(node.store.clear)


async def kept(nodes: NodeDriver, memory: Memory, prompt: list[int]) -> list[list[int]]:
    """Have A compute and store a prompt; the pages of its blocks, in the order of the prompt."""
    before = memory.written()
    await nodes.asked(nodes.node.first, prompt, 1)
    await nodes.stored(nodes.node.first, prompt)
    await nodes.nothing_left(nodes.node.first)
    await nodes.reset(nodes.node.first)
    pages = sorted(memory.written() - before)
    slots = [pages[at : at + SLOT_PAGES] for at in range(0, len(pages), SLOT_PAGES)]
    assert len(slots) == len(prompt) // BLOCK and all(len(slot) == SLOT_PAGES for slot in slots)
    return slots


def spoil(memory: Memory, slot: list[int]) -> None:
    """Other numbers, that change every answer: one flipped bit is noticed too, but an answer computed on it may still
    be right."""
    numbers = np.random.default_rng(slot[0]).standard_normal((SLOT_PAGES - 1, PAGE // 4), np.float32)
    memory.pages[slot[:-1]] = 3 * numbers.view(np.uint8)


async def loads(nodes: NodeDriver, outcome: str) -> tuple[float, float]:
    """Of A until now: (those that a step waited for, all)."""
    await nodes.flushed(nodes.node.first)
    counts = await nodes.counters(nodes.node.first)
    return counts.get(f"synchronous_loads {outcome}", 0), counts.get(f"loads {outcome}", 0)


async def test_sync_load_computes_in_the_loading_step(node: Node, nodes):
    """Of whole blocks and not, with nothing to compute but the last token, and with more than a step of it."""
    rng = seeded("synchronous")
    prompts = [random_tokens(rng, length) for length in (32, 33, 640, 700, 1500)]
    for prompt in prompts:
        await nodes.asked(node.first, prompt)
        await nodes.stored(node.first, prompt)
    for more, count in ((0, 8), (0, 1), (700, 8)):
        before = await loads(nodes, "ok")
        await nodes.reset(node.first)
        for prompt in prompts:
            longer = prompt + random_tokens(rng, more)
            reply = await nodes.asked(node.first, longer, count)
            assert (reply.pulled, reply.report["local_tokens"]) == (len(prompt) // BLOCK * BLOCK, 0), reply.report
        after = await loads(nodes, "ok")
        assert [a - b for a, b in zip(after, before, strict=True)] == [len(prompts)] * 2
    # What was computed behind a load is stored, and found.
    await nodes.stored(node.first, longer)


@pytest.mark.parametrize("count", [1, 8])
async def test_sync_load_bad_blocks_roll_back_the_step(node: Node, nodes, count):
    """In the first block, in the last, and in some between: with the next step under way or none, the answer is right,
    nothing wrong stays in vLLM's prefix cache, and the store has the blocks anew."""
    rng = seeded(f"bad {count}")
    with node.store.memory() as memory:
        for length, which in ((640, [0]), (700, [20]), (1300, [3, 4, 30])):
            prompt = random_tokens(rng, length)
            longer = prompt + random_tokens(rng, 40)
            slots = await kept(nodes, memory, prompt)
            for at in which:
                spoil(memory, slots[at])
            bad, discards = await nodes.kvtier(node.first, "integrity_failures"), node.store.counts().index.discards
            before = await loads(nodes, "failed")
            reply = await nodes.asked(node.first, prompt, count)
            assert reply.pulled == 0, reply.report
            after = await loads(nodes, "failed")
            assert [a - b for a, b in zip(after, before, strict=True)] == [1, 1]
            assert await nodes.kvtier(node.first, "integrity_failures") - bad == len(which)
            assert node.store.counts().index.discards - discards == len(which)
            for again in (prompt, longer):
                reply = await nodes.asked(node.first, again, 8)
                assert reply.report["local_tokens"] >= (length - 1) // BLOCK * BLOCK, reply.report
            await nodes.stored(node.first, longer)
            await nodes.nothing_left(node.first)
            await nodes.reset(node.first)
            reply = await nodes.asked(node.first, longer, 8)
            assert reply.pulled == len(longer) // BLOCK * BLOCK, "whole again"


async def test_unverified_sync_load_is_not_shared(node: Node, nodes):
    """Several arrive at a moment, one of them first and alone: they share its beginning, in which a block is bad."""
    rng = seeded("shared")
    with node.store.memory() as memory:
        for at in (0, 17):
            shared = random_tokens(rng, 640)
            slots = await kept(nodes, memory, shared)
            prompts = [shared + random_tokens(rng, 20 * i) for i in range(4)]
            truths = await asyncio.gather(*map(nodes.truth, prompts))
            spoil(memory, slots[at])

            async def ask(number: int, prompt: list[int]):
                await asyncio.sleep(0.01 * number * random.random())
                return await nodes.ask(node.first, prompt, 8, ASKED)

            replies = await asyncio.gather(*(ask(i, prompt) for i, prompt in enumerate(prompts)))
            for reply, truth in zip(replies, truths, strict=True):
                assert_same(reply, truth, reply.report)
            for prompt in prompts:
                await nodes.asked(node.first, prompt)
            await nodes.nothing_left(node.first)


async def test_sync_load_client_leaving_before_verification_leaks_nothing(node: Node, nodes):
    rng = seeded("left alone")
    with node.store.memory() as memory:
        prompt = random_tokens(rng, 1300)
        slots = await kept(nodes, memory, prompt)
        for i in range(6):
            if i == 3:
                spoil(memory, slots[30])
            await nodes.disconnect(node.first, prompt, rng.uniform(0.0, 0.12))
            await nodes.asked(node.first, prompt)  # whatever it finds
            await nodes.nothing_left(node.first)
            await nodes.reset(node.first)
