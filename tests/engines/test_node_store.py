"""Real engines and a real store: what the GPU-side cache lost comes back, right, and for every engine of the node."""

import asyncio
import subprocess
import sys
import time

import pytest
from engine_client import assert_same, driving, random_tokens
from node_events import Follower
from node_fixtures import ASKED, Node, NodeDriver, events_of, seeded, wrong_checksums

from vllm_kvtier.cli import inputs
from vllm_kvtier.devtools.engines import Engine

BLOCK = 32


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left(node):
    """Not a block, lease or reservation, whatever these tests did; and nothing that was loaded was wrong."""

    async def failures(leave_nothing: bool) -> list[float]:
        async with driving(node.single, NodeDriver) as nodes:
            nodes.node = node
            if leave_nothing:
                await nodes.nothing_left(*node.engines)
            counts = [await nodes.counters(engine) for engine in node.engines]
            return [n for c in counts for n in (wrong_checksums(c), c.get("loads failed", 0))]

    before = asyncio.run(failures(False))
    yield
    after = asyncio.run(failures(True))
    assert all(a in (0, b) for a, b in zip(after, before, strict=True)), "0: restarted meanwhile"


@pytest.fixture(autouse=True)
def an_empty_store(node):
    """What is stored while the store is full may be gone again soon."""
    node.store.until_up()
    node.store.clear()


def expected(length: int) -> int:
    """Tokens that a prompt whose whole blocks are stored does not compute."""
    return length // BLOCK * BLOCK


async def several(nodes: NodeDriver, engine: Engine, prompts: list[list[int]], at_once: int, count: int = 8):
    """(replies, seconds) of all prompts, so many at a time; all are right."""
    limit = asyncio.Semaphore(at_once)
    truths = await asyncio.gather(*(nodes.truth(prompt, count) for prompt in prompts))

    async def one(prompt: list[int]):
        async with limit:
            return await nodes.ask(engine, prompt, count, ASKED)

    started = time.monotonic()
    replies = await asyncio.gather(*map(one, prompts))
    seconds = time.monotonic() - started
    for reply, truth in zip(replies, truths, strict=True):
        assert_same(reply, truth, f"{engine.name}: {reply.report}")
    return replies, seconds


async def test_two_engines_share_one_store(node: Node, nodes):
    """Which they started themselves, together."""
    counts = await asyncio.to_thread(node.store.until_up)
    for engine in node.engines:
        await nodes.uses_store(engine)
        assert (await nodes.inspect(engine)).store == counts.instance
    clients = [c.kind for c in (await asyncio.to_thread(node.store.counts)).clients if c.kind != "tool"]
    assert sorted(clients) == ["engine", "engine", "worker", "worker"]


async def test_kv_events_of_each_engine_name_loadable_blocks(node: Node, nodes):
    """Also what the other one stored: a router that asks which engine has a prompt finds both right, and right no
    longer when it is gone."""
    prompt = random_tokens(seeded("events"), 500)
    tokens = expected(len(prompt))
    with Follower(events_of(node.store, "A")) as first, Follower(events_of(node.store, "B")) as second:
        await nodes.until_heard(node.first, first)
        await nodes.until_heard(node.second, second)
        await asyncio.to_thread(node.store.clear)
        await nodes.asked(node.first, prompt)
        await nodes.stored(node.first, prompt)

        async def both(count: int) -> bool:
            return all(follower.prefix(prompt).get("CPU", 0) == count for follower in (first, second))

        await nodes.until(lambda: both(tokens), 20, "both publish it, one of them idle")

        async def all_of_it() -> bool:
            entries = (await asyncio.to_thread(node.store.counts)).index.entries
            return first.count("CPU") == second.count("CPU") == entries

        await nodes.until(all_of_it, 20, "and nothing else than what is stored")
        assert not second.prefix(prompt).get("GPU"), "that would be the other's"
        # vLLM forgets its prefix cache; what is in the store stays published, also to readers that take the reset for
        # the end of all.
        await nodes.reset(node.first)
        await nodes.until(lambda: both(tokens), 20, "still there")
        await asyncio.to_thread(node.store.clear)

        async def nothing() -> bool:
            return not first.count("CPU") and not second.count("CPU")

        await nodes.until(nothing, 20, "all is removed")
        assert not first.missed and not second.missed


@pytest.mark.parametrize("at_once", [1, 3])
async def test_working_set_of_three_times_gpu_cache_loads_from_store(node: Node, nodes, at_once):
    """Prompts of 1500 tokens or so, in a cache of 4480: nothing would be there again when its turn comes."""
    rng = seeded("working set")
    prompts = [random_tokens(rng, rng.randrange(1440, 1560)) for _ in range(9)]
    for engine in node.engines:
        await nodes.reset(engine)
    cold, cold_seconds = await several(nodes, node.second, prompts, at_once)
    assert not any(reply.pulled for reply in cold)
    if at_once == 1:
        for prompt in prompts:
            await nodes.stored(node.second, prompt)
    for _ in range(2):  # first they are prompts that this engine never saw
        before = await nodes.sources(node.first)
        warm, warm_seconds = await several(nodes, node.first, prompts, at_once)
        loaded = (await nodes.sources(node.first) - before).pulled
        for prompt, reply in zip(prompts, warm, strict=True):
            # Three at once do not fit into the cache as it is: under such pressure the newest blocks are not stored.
            found = reply.pulled + reply.report["local_tokens"]
            assert found == expected(len(prompt)) or (at_once > 1 and found >= len(prompt) / 2), reply.report
        assert loaded >= (0.9 if at_once == 1 else 0.7) * sum(map(len, prompts))
        print(f"\n{at_once} at once: {cold_seconds:.2f} s computed, {warm_seconds:.2f} s loaded ({loaded} tokens)")


async def test_prompts_of_every_length_load_whole_blocks(node: Node, nodes):
    """Around the ends of blocks, of steps and of the longest prompt; a block short of nothing, and one too short."""
    rng = seeded("lengths")
    lengths = (1, 2, 31, 32, 33, 64, 65, 127, 511, 512, 513, 1025, 3300)
    prompts = [random_tokens(rng, length) for length in lengths]
    await asyncio.gather(*(nodes.truth(prompt, 4) for prompt in prompts))
    for prompt in prompts:
        await nodes.asked(node.first, prompt, 4)
        await nodes.stored(node.first, prompt)
    await nodes.reset(node.first)
    for prompt in prompts:
        reply = await nodes.asked(node.first, prompt, 4)
        # Also of a prompt of whole blocks; its last token is computed again, or there would be no answer.
        assert (reply.pulled, reply.report["local_tokens"]) == (expected(len(prompt)), 0), reply.report


async def test_generated_tokens_are_stored_and_loaded(node: Node, nodes):
    """Three turns of two conversations at a time; each finds the whole last one, prompt and answer."""
    rng = seeded("turns")

    async def talk(number: int) -> None:
        prompt = random_tokens(rng, rng.randrange(300, 600))
        held = 0
        for turn in range(3):
            engine = node.engines[(number + turn) % 2]
            reply = await nodes.asked(engine, prompt, 101)
            if engine is node.first:
                assert reply.pulled + reply.report["local_tokens"] >= held, reply.report
            whole = prompt + reply.tokens
            held = expected(len(whole) - 1)  # the last token's KV was never computed
            await nodes.stored(engine, whole, held)
            prompt = whole + random_tokens(rng, rng.randrange(1, 90))

    async def brought() -> float:
        """By the store or from the other engine's memory, whichever the planner takes for sooner."""
        return await nodes.kvtier(node.first, "loaded_tokens") + await nodes.kvtier(node.first, "fetched_tokens")

    before = await brought()
    await asyncio.gather(*map(talk, range(2)))
    await nodes.flushed(node.first)
    assert await brought() - before >= 500


async def test_cache_salts_isolate_tenants(node: Node, nodes):
    prompt = random_tokens(seeded("salts"), 300)
    await nodes.asked(node.first, prompt, cache_salt="one")
    await nodes.stored(node.first, prompt, salt="one")
    await nodes.reset(node.first)
    for engine in node.engines:
        for salt in ({"cache_salt": f"not for {engine.name}"}, {"cache_salt": f"{engine.name}'s own"}):
            reply = await nodes.asked(engine, prompt, **salt)
            assert (reply.pulled, reply.report["local_tokens"]) == (0, 0), (engine.name, salt)
        reply = await nodes.loaded(engine, prompt, cache_salt="one")
        assert reply.pulled == expected(300), f"{engine.name}: {reply.report}"


async def test_concurrent_requests_of_one_prefix_load_once(node: Node, nodes):
    """Six that share a long beginning, at once: its blocks are brought for one of them."""
    rng = seeded("together")
    shared = random_tokens(rng, 1280)
    prompts = [shared + random_tokens(rng, 40 + i) for i in range(6)]
    await nodes.asked(node.first, shared)
    await nodes.stored(node.first, shared)
    await nodes.reset(node.first)
    await nodes.flushed(node.first)
    before = await nodes.kvtier(node.first, "loaded_bytes")
    truths = await asyncio.gather(*map(nodes.truth, prompts))
    replies = await asyncio.gather(*(nodes.ask(node.first, prompt, 8, ASKED) for prompt in prompts))
    for reply, truth in zip(replies, truths, strict=True):
        assert_same(reply, truth, reply.report)
        assert reply.pulled + reply.report["local_tokens"] >= 1280
    await nodes.flushed(node.first)
    # A block of 32 tokens is 384 KiB; nothing but the beginning was there to load.
    assert (await nodes.kvtier(node.first, "loaded_bytes") - before) / (384 << 10) < 41


async def test_prompt_on_both_engines_is_stored_once(node: Node, nodes):
    rng = seeded("twice")
    prompts = [random_tokens(rng, 640) for _ in range(2)]
    before = await nodes.nothing_left(*node.engines)
    both = [(engine, prompt) for prompt in prompts for engine in node.engines]
    await asyncio.gather(*(nodes.ask(engine, prompt) for engine, prompt in both))
    for prompt in prompts:
        await nodes.stored(node.first, prompt)
    after = await nodes.nothing_left(*node.engines)
    entries = after.index.entries - before.index.entries + after.index.evictions - before.index.evictions
    assert 40 <= entries <= 40 + 1, "and of the short request that asks for counters none"


async def test_preempted_requests_load_lost_blocks(node: Node, nodes):
    """More long answers than there are blocks for: what a request lost is brought back, and goes on right."""
    rng = seeded("preempted")
    prompts = [random_tokens(rng, 1056 - 11 * i) for i in range(4)]
    truths = await asyncio.gather(*(nodes.truth(prompt, 170) for prompt in prompts))
    before = await nodes.metric(node.first, "vllm:num_preemptions_total")
    loads = await nodes.kvtier(node.first, "loads", "ok")
    replies = await asyncio.gather(*(nodes.ask(node.first, prompt, 170, ASKED) for prompt in prompts))
    for reply, truth in zip(replies, truths, strict=True):
        assert_same(reply, truth, reply.report)
    await nodes.flushed(node.first)
    assert await nodes.metric(node.first, "vllm:num_preemptions_total") > before, "nothing was preempted"
    assert await nodes.kvtier(node.first, "loads", "ok") > loads, f"{await nodes.counters(node.first)}"


async def test_clients_leaving_at_any_time_leak_nothing(node: Node, nodes):
    """While the store is asked, while it is loaded, while the answer is made, and while it is stored."""
    rng = seeded("leave")
    prompts = [random_tokens(rng, rng.randrange(1000, 1500)) for _ in range(5)]
    for prompt in prompts:
        await nodes.asked(node.first, prompt)
        await nodes.stored(node.first, prompt)

    async def leave(number: int) -> None:
        engine = node.engines[number % 2]
        prompt = rng.choice(prompts) + random_tokens(rng, rng.randrange(100))
        await nodes.disconnect(engine, prompt, rng.uniform(0, 0.4))

    for _ in range(4):
        for engine in node.engines:
            await nodes.reset(engine)
        await asyncio.gather(*map(leave, range(6)))
    await nodes.nothing_left(*node.engines)
    for engine in node.engines:
        for prompt in prompts[:2]:
            await nodes.asked(engine, prompt)


async def test_load_decisions_are_measured(node: Node, nodes):
    """B weighs every offer, and says what it decided and how far off it was; A takes all."""
    rng = seeded("measured")
    prompts = [random_tokens(rng, length) for length in (40, 100, 400, 1500)]
    for prompt in prompts:
        await nodes.asked(node.first, prompt)
        await nodes.stored(node.first, prompt)
    for engine in node.engines:
        await nodes.flushed(engine)
    before = {e.name: await nodes.kvtier(e, "load_decisions") for e in node.engines}
    taken = {}
    for engine in node.engines:
        await nodes.reset(engine)
        taken[engine.name] = [(await nodes.asked(engine, prompt)).pulled for prompt in prompts]
        await nodes.flushed(engine)
        assert await nodes.kvtier(engine, "load_decisions") - before[engine.name] == len(prompts)
        assert await nodes.kvtier(engine, "load_decision_seconds", "actual") > 0
        assert await nodes.kvtier(engine, "load_decision_seconds", "expected") > 0
    assert taken[node.first.name] == [expected(len(prompt)) for prompt in prompts]
    assert all(n in (0, expected(len(p))) for n, p in zip(taken[node.second.name], prompts, strict=True))
    print(f"\nmeasured: {taken[node.second.name]} of {[len(p) for p in prompts]}")


async def test_handoff_is_pulled_although_store_has_it(node: Node, nodes):
    """A prefills, B pulls it from A although the store has it too; then B finds its own answer in the store."""
    rng = seeded("hand-off")
    prompt = random_tokens(rng, 700)
    first, reply = await nodes.hand_off(node.first, node.second, prompt, 70)
    assert_same(reply, await nodes.truth(prompt, 70), reply.report)
    assert reply.pulled == 700 and reply.report["pulled_from"] == node.first.kv_address
    # Both have it now, and the store: nothing moves.
    first, again = await nodes.hand_off(node.first, node.second, prompt, 8)
    assert (first.pulled, again.pulled) == (0, 0) or again.pulled < BLOCK, (first.report, again.report)
    assert_same(again, await nodes.truth(prompt, 8), again.report)
    # The next turn, at A: it lacks the answer. The store has it and names B, which has it too: the faster is taken.
    longer = prompt + reply.tokens + random_tokens(rng, 30)
    await nodes.stored(node.second, longer, expected(769))
    await nodes.reset(node.first)
    first, reply = await nodes.hand_off(node.first, node.second, longer, 8)
    assert_same(reply, await nodes.truth(longer, 8), reply.report)
    assert first.pulled == expected(769)
    assert first.report["pulled_from"] in {"host", f"gpu {node.second.kv_address}"}
    # Who fetches too late finds the export gone, and what is left in A or the store's copy.
    late = random_tokens(rng, 700)
    first = await nodes.prefill(node.first, late)
    await nodes.stored(node.first, late)
    await nodes.ask(node.second, late, 1, first.params)
    await nodes.reset(node.second)
    reply = await nodes.loaded(node.second, late, 8, first.params)
    assert reply.pulled >= expected(700), reply.report  # A's blocks may not have been overwritten yet


async def test_external_reset_hides_own_blocks_until_restart(node: Node, nodes):
    """A is asked to forget: its old blocks are not its own any more, while B keeps them. A new A has them again."""
    with Follower(events_of(node.store, "A")) as follower:
        await nodes.until_heard(node.first, follower)
        await reset_then_restart(node, nodes, follower)


async def reset_then_restart(node: Node, nodes: NodeDriver, follower: Follower) -> None:
    """``follower``: of what A publishes."""
    rng = seeded("reset")
    prompt, after = random_tokens(rng, 500), random_tokens(rng, 500)

    async def publishes(prompt: list[int], count: int) -> None:
        async def so() -> bool:
            return follower.prefix(prompt).get("CPU", 0) == count

        await nodes.until(so, 20, f"{count} tokens of the prompt are published")

    await nodes.asked(node.first, prompt)
    await nodes.stored(node.first, prompt)
    await publishes(prompt, expected(500))
    await nodes.reset(node.first, external=True)
    await publishes(prompt, 0)
    reply = await nodes.asked(node.first, prompt)
    assert (reply.pulled, reply.report["local_tokens"]) == (0, 0)
    assert (await nodes.loaded(node.second, prompt)).pulled == expected(500)
    # What it stores from now on it finds, alone.
    await nodes.asked(node.first, after)
    await nodes.stored(node.first, after)
    await nodes.reset(node.first)
    assert (await nodes.asked(node.first, after)).pulled == expected(500)
    assert (await nodes.asked(node.second, after)).pulled == 0
    await publishes(after, expected(500))

    counts = await asyncio.to_thread(node.store.counts)
    node.first.kill()
    node.first.start()
    await asyncio.to_thread(node.first.wait_ready)

    await nodes.uses_store(node.first)
    assert (await nodes.inspect(node.first)).store == counts.instance
    await nodes.until_heard(node.first, follower)
    # Publishes again what the store has: that may have been published before it was received
    await nodes.reset(node.first)
    await publishes(prompt, expected(500))
    assert (await nodes.asked(node.first, prompt)).pulled == expected(500), "a restarted engine's cache is warm"


async def test_pin_command_pins_and_unpins_a_prompt(node: Node, nodes, single):
    """With the server's own tokenizer; and let go again."""
    engine, text = node.engines[0], "def keep(this):\n    return this\n" * 60
    tokens = await asyncio.to_thread(inputs.tokenize, engine.base_url, text)
    await nodes.ask(engine, tokens, 4)
    await nodes.flushed(engine)
    args = ["--server", engine.base_url, "--endpoint", engine.kv_address, "--prompt", text]
    for command, expected_pins in (("pin", len(tokens) // BLOCK), ("unpin", 0)):
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-m", "vllm_kvtier.cli", command, *args], capture_output=True, text=True
        )
        assert done.returncode == 0 and f"{len(tokens) // BLOCK} blocks" in done.stdout, (done.stdout, done.stderr)
        assert (await asyncio.to_thread(node.store.counts)).index.pinned_entries == expected_pins
    args[3] = "127.0.0.1:1"
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-m", "vllm_kvtier.cli", "pin", *args], capture_output=True, text=True
    )
    assert done.returncode == 1 and "127.0.0.1:1" in done.stderr
