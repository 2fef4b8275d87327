"""The node store dies, hangs, fills up, rots and comes back under real engines: their answers stay right, no wait is
longer than was promised, and nothing stays held."""

import asyncio
import os
import random
import subprocess
import sys
import time

import httpx
import pytest
from engine_client import assert_same, random_tokens
from node_fixtures import ASK_TIMEOUT, ASKED, SLOT_PAGES, Node, NodeDriver, seeded

from vllm_kvtier.devtools.engines import Engine
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import protocol as m

BLOCK = 32
SLACK = 8.0  # beyond what the options promise, for two busy cores
START_SECONDS = 20.0  # of an engine: none is killed that could not be back before the end
LONGEST = 45.0  # of any request, while engines start next to it


STARTER = """
import sys
from vllm_kvtier.store.launcher import start_store
from vllm_kvtier.store.options import StoreOptions
start_store(sys.argv[1], StoreOptions(size="384MiB", idle_seconds=60))
"""


@pytest.fixture(autouse=True)
async def whole_again(node: Node, nodes):
    """Each test begins with engines that use a store in which nothing is, and ends with nothing held anywhere."""
    await asyncio.gather(*map(nodes.uses_store, node.engines))
    await asyncio.to_thread(node.store.clear)
    for engine in node.engines:
        await nodes.reset(engine)
    yield
    if node.store.pid:
        node.store.resume()
    await asyncio.gather(*(nodes.uses_store(engine, 90) for engine in node.engines))
    await nodes.nothing_left(*node.engines)
    await asyncio.to_thread(node.store.clear)


async def right_without(nodes: NodeDriver, engine: Engine, prompts: list[list[int]]) -> list[float]:
    """Seconds of right answers that nothing was loaded for."""
    seconds = []
    for prompt in prompts:
        reply = await nodes.asked(engine, prompt)
        assert reply.pulled == 0, reply.report
        seconds.append(reply.seconds)
    return seconds


async def test_engines_without_store_answer_correctly(node: Node, nodes):
    """It is gone, and no engine starts one; then one does."""
    rng = seeded("no store")
    prompts = [random_tokens(rng, 300) for _ in range(3)]
    await asyncio.gather(*map(nodes.truth, prompts))
    await nodes.asked(node.first, prompts[0])
    await nodes.stored(node.first, prompts[0])
    with node.store.alone():
        await asyncio.to_thread(node.store.kill)
        for engine in node.engines:
            await nodes.reset(engine)
            assert max(await right_without(nodes, engine, prompts)) < SLACK
            assert (await nodes.inspect(engine)).store == ""
        starters = [subprocess.Popen([sys.executable, "-c", STARTER, node.store.path]) for _ in range(8)]
        assert not node.store.processes()
    # Both engines and eight more start one at the same time: it is one, and both use it.
    codes = [await asyncio.to_thread(starter.wait, 60) for starter in starters]
    assert codes == [0] * 8 and len(node.store.processes()) == 1
    await asyncio.gather(*map(nodes.uses_store, node.engines))
    assert (await nodes.inspect(node.first)).store == (await nodes.inspect(node.second)).store != ""


async def test_store_killed_under_load_is_restarted_by_engines(node: Node, nodes):
    rng = seeded("killed")
    prompts = [random_tokens(rng, rng.randrange(700, 1300)) for _ in range(8)]
    await asyncio.gather(*map(nodes.truth, prompts))
    lost = [await nodes.kvtier(engine, "store_disconnects") for engine in node.engines]

    async def client(number: int) -> None:
        for i in range(8):
            await nodes.asked(node.engines[number % 2], prompts[(i + 3 * number) % 8])

    clients = [asyncio.create_task(client(number)) for number in range(4)]
    for _ in range(3):
        await asyncio.sleep(rng.uniform(0.5, 1.5))
        pid = node.store.pid
        await asyncio.to_thread(node.store.kill)
        counts = await asyncio.to_thread(node.store.until_up)
        assert counts.pid != pid, "the engines started it"
    await asyncio.gather(*clients)
    for engine, before in zip(node.engines, lost, strict=True):
        await nodes.flushed(engine)
        assert await nodes.kvtier(engine, "store_disconnects") - before >= 3


async def test_hung_store_costs_one_wait_and_is_used_again(node: Node, nodes):
    """SIGSTOP: its socket is there and nothing answers. That costs one wait, and counts again when it goes on."""
    rng = seeded("hangs")
    prompts = [random_tokens(rng, 300) for _ in range(4)]
    await asyncio.gather(*map(nodes.truth, prompts))
    for prompt in prompts:
        await nodes.asked(node.first, prompt)
        await nodes.stored(node.first, prompt)
    for engine in node.engines:
        await nodes.reset(engine)
    node.store.pause()
    for engine in node.engines:
        [first] = await right_without(nodes, engine, prompts[:1])
        assert (await nodes.inspect(engine)).store == "", "a store that does not answer is not asked again"
        assert first < ASK_TIMEOUT + SLACK and max(await right_without(nodes, engine, prompts[1:])) < SLACK
        await nodes.reset(engine)
    await right_without(nodes, node.first, prompts)
    instance = await asyncio.to_thread(_resumed_instance, node)
    await nodes.uses_store(node.first)
    await nodes.uses_store(node.second)
    assert (await nodes.inspect(node.first)).store == instance, "the same store, with what it had"
    assert (await nodes.loaded(node.second, prompts[3])).pulled > 0


def _resumed_instance(node: Node) -> str:
    node.store.resume()
    return node.store.until_up().instance


async def test_full_store_evicts_but_long_prompt_does_not_evict_itself(node: Node, nodes):
    """Room for 60 blocks: less than one long prompt, whose beginning it keeps. Then one with more room."""
    rng = seeded("full")
    prompts = [random_tokens(rng, length) for length in (900, 1300, 2600, 1000)]
    await asyncio.gather(*map(nodes.truth, prompts))
    with node.store.alone():
        await asyncio.to_thread(node.store.kill)
        await asyncio.to_thread(node.store.serve, f"--size={(60 * SLOT_PAGES + 1) * m.PAGE}")
        await asyncio.gather(*map(nodes.uses_store, node.engines))
        loaded = 0
        for _ in range(2):
            for prompt in prompts:
                for engine in node.engines:
                    await nodes.reset(engine)
                    loaded += (await nodes.asked(engine, prompt)).pulled
        counts = await nodes.nothing_left(*node.engines)
        assert counts.index.evictions > 60 and counts.index.entries > 40, counts.index
        assert counts.index.refused_room > 0, "a prompt longer than the store does not evict itself"
        assert loaded > 2000
        await asyncio.to_thread(node.store.kill)


async def test_store_flipped_bits_are_each_counted_recomputed_and_stored_again(node: Node, nodes):
    """A bit in each of many blocks: each costs one block, counted once, computed and stored again."""
    rng = seeded("flips")
    await asyncio.to_thread(node.store.kill)  # so that the memory is new, and what is written in it known
    await asyncio.gather(*map(nodes.uses_store, node.engines))
    prompts = [random_tokens(rng, 50 + 350 * i) for i in range(1, 5)]
    await asyncio.gather(*map(nodes.truth, prompts))
    flips = []  # of each prompt
    with node.store.memory() as memory:
        assert memory.instance == (await nodes.inspect(node.first)).store
        for i, prompt in enumerate(prompts):
            before = memory.written()
            await nodes.asked(node.first, prompt)
            await nodes.stored(node.first, prompt)
            await nodes.nothing_left(node.first)
            pages = sorted(memory.written() - before)
            slots = [pages[at : at + SLOT_PAGES] for at in range(0, len(pages), SLOT_PAGES)]
            assert len(slots) == len(prompt) // BLOCK and all(len(slot) == SLOT_PAGES for slot in slots)
            chosen = rng.sample(slots, 1 if i % 2 else 4)
            for slot in chosen:
                memory.flip(rng, rng.choice(slot))
            flips.append(len(chosen))
    bad, discards = await nodes.kvtier(node.first, "integrity_failures"), node.store.counts().index.discards
    for prompt, count in zip(prompts, flips, strict=True):
        loaded, loads = -1, 0
        while loaded < len(prompt) // BLOCK * BLOCK:
            assert loads <= count, "each load finds one at least, and what it found is mended"
            loads += 1
            await nodes.reset(node.first)
            loaded = (await nodes.asked(node.first, prompt)).pulled
            await nodes.stored(node.first, prompt)
        assert loads > 1
    await nodes.flushed(node.first)
    assert await nodes.kvtier(node.first, "integrity_failures") - bad == sum(flips)
    assert node.store.counts().index.discards - discards == sum(flips)
    for prompt in prompts:  # whole again, also for others
        assert (await nodes.asked(node.second, prompt)).pulled % BLOCK == 0
    assert await nodes.kvtier(node.second, "loads", "failed") == 0


class Storm:
    """Clients that ask and check, and one that breaks things, for so many seconds and until enough has happened."""

    def __init__(self, nodes: NodeDriver, rng: random.Random, seconds: float):
        self.nodes, self.node, self.rng = nodes, nodes.node, rng
        self.ends = time.monotonic() + seconds
        self.lives = {engine.name: 0 for engine in self.node.engines}
        self.prompts: list[list[int]] = []
        self.done = dict.fromkeys(("right", "lost", "loaded", "killed stores", "hung", "flips", "resets", "killed"), 0)
        self.slowest = 0.0

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.ends and self.enough

    @property
    def enough(self) -> bool:
        broken = all(self.done[what] for what in ("killed stores", "flips", "killed"))
        return broken and self.done["right"] > 30 and self.done["loaded"] > 1000

    async def run(self) -> None:
        stems = [random_tokens(self.rng, self.rng.randrange(600, 1500)) for _ in range(6)]
        self.prompts = [stem + random_tokens(self.rng, self.rng.randrange(1, 90)) for stem in stems for _ in range(2)]
        await asyncio.gather(*map(self.nodes.truth, self.prompts))
        await asyncio.gather(*(self.client(i) for i in range(5)), self.breaker(), self.killer())

    async def client(self, number: int) -> None:
        rng = random.Random(self.rng.random())
        while not self.over:
            alive = [e for e in self.node.engines if self.lives[e.name] % 2 == 0]
            engine = rng.choice(alive if rng.random() < 0.95 else self.node.engines)
            life = self.lives[engine.name]
            prompt = rng.choice(self.prompts) if rng.random() < 0.85 else random_tokens(rng, rng.randrange(33, 200))
            try:
                reply = await self.nodes.ask(engine, prompt, 8, ASKED)
            except (httpx.TransportError, AssertionError) as error:
                # Only of an engine that was killed meanwhile, or is not up again.
                if self.lives[engine.name] == life and life % 2 == 0:
                    raise AssertionError(f"{engine.name} did not answer: {error!r}") from error
                self.done["lost"] += 1
                await asyncio.sleep(0.3)
                continue
            assert_same(reply, await self.nodes.truth(prompt), f"{engine.name}: {reply.report}")
            self.slowest = max(self.slowest, reply.seconds)
            self.done["right"] += 1
            self.done["loaded"] += reply.pulled

    async def breaker(self) -> None:
        """The store, or what lies in it."""
        rng = random.Random(self.rng.random())
        store = self.node.store
        while not self.over:
            await asyncio.sleep(rng.uniform(0.3, 2.0))
            match rng.choice(("kill", "hang", "flip", "flip", "flip", "reset")):
                case "kill" if store.pid:
                    await asyncio.to_thread(store.kill)
                    self.done["killed stores"] += 1
                case "hang" if store.pid:
                    store.pause()
                    await asyncio.sleep(rng.uniform(0.1, 2.5 * ASK_TIMEOUT))
                    store.resume()
                    self.done["hung"] += 1
                case "flip":
                    self.done["flips"] += await asyncio.to_thread(self.flip, rng)
                case "reset":
                    engine = rng.choice(self.node.engines)
                    if self.lives[engine.name] % 2 == 0:
                        self.done["resets"] += 1
                        await self.try_reset(engine)

    async def try_reset(self, engine: Engine) -> None:
        """vLLM resets nothing while requests run, and says so: what is asked for must not hurt."""
        life = self.lives[engine.name]
        try:
            await self.nodes._http.post(f"{engine.base_url}/reset_prefix_cache")
        except httpx.TransportError:
            assert self.lives[engine.name] != life

    def flip(self, rng: random.Random) -> int:
        try:
            with self.node.store.memory() as memory:
                pages = rng.sample(range(1, len(memory.pages)), 500)
                hit = [page for page in pages if memory.pages[page].any()][:3]
                flipped = [memory.flip(rng, page) for page in hit]
                if rng.random() < 0.4:
                    # For a moment only: a reader that copied wrong bytes must not find right ones when it looks again.
                    time.sleep(rng.uniform(0, 0.02))
                    for one in flipped:
                        memory.flip_back(one)
                return len(hit)
        except KVTierError:
            return 0  # it is down just now

    async def killer(self) -> None:
        """An engine at a time dies at any moment; a new one takes its place."""
        rng = random.Random(self.rng.random())
        while not self.over:
            await asyncio.sleep(rng.uniform(1, 12))
            if self.done["killed"] and self.ends - time.monotonic() < START_SECONDS:
                return
            engine = rng.choice(self.node.engines)
            self.lives[engine.name] += 1
            await asyncio.to_thread(engine.kill)
            self.done["killed"] += 1
            engine.start()
            await asyncio.to_thread(engine.wait_ready)
            self.lives[engine.name] += 1


@pytest.mark.parametrize("seconds", [30, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
async def test_random_kills_and_flipped_bits_keep_answers_correct(node: Node, nodes, seconds):
    """Store and engines killed and stopped at random moments under load, bits flipped wherever something is."""
    seed = os.environ.get("KVTIER_SEED", f"storm {seconds}")
    storm = Storm(nodes, seeded(seed), seconds)
    await storm.run()
    print(f"\nseed {seed!r}: {storm.done}, slowest {storm.slowest:.1f} s")
    assert storm.enough, storm.done
    assert storm.slowest < LONGEST


async def test_store_of_other_protocol_version_is_refused_and_not_replaced(node: Node, nodes):
    """It refuses, which is reported with the reason; the engines serve without, and do not start another."""
    rng = seeded("version")
    prompts = [random_tokens(rng, 300) for _ in range(2)]
    await asyncio.gather(*map(nodes.truth, prompts))
    with node.store.alone():
        await asyncio.to_thread(node.store.kill)
        await asyncio.to_thread(node.store.serve, code="import vllm_kvtier.store.protocol as m; m.PROTOCOL = 99")
        for engine in node.engines:
            assert max(await right_without(nodes, engine, prompts)) < SLACK
            assert (await nodes.inspect(engine)).store == ""
        await asyncio.to_thread(node.store.kill)
