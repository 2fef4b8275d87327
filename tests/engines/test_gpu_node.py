"""What only an engine with a device does: it sleeps. And how it is preempted and asked to forget, with the node store.

    KVTIER_TEST_GPUS=0 python -m pytest tests/engines/test_gpu_node.py

One engine with a small cache, in float32 (vLLM's Triton kernels), so that its answers are exactly a plain engine's.
"""

import asyncio

import pytest
from engine_client import Reply, driving, random_tokens
from model_shapes import GPU_FLAGS, GPUS
from node_fixtures import ASKED, OPTIONS, Node, NodeDriver, runtime_dir, seeded, store_env, store_in, wrong_checksums
from test_node_store_models import off

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all, start_all

pytestmark = pytest.mark.skipif(not GPUS, reason="KVTIER_TEST_GPUS names no device")

BLOCK = 16
NUM_BLOCKS = 160
MAX_LENGTH = 2048
TOLERANCE = 1e-2


class Sleeper(NodeDriver):
    """Requests to the engine that sleeps, ``node.first``; what the plain one, ``node.single``, answers is right."""

    async def right(self, prompt: list[int], count: int = 8) -> Reply:
        reply = await self.ask(self.node.first, prompt, count, ASKED)
        await self.same(reply, prompt)
        return reply

    async def same(self, reply: Reply, prompt: list[int]) -> None:
        truth = await self.truth(prompt, len(reply.tokens))
        assert off(reply, truth, TOLERANCE) < TOLERANCE, (len(prompt), reply.report)

    async def kept(self, prompt: list[int]) -> None:
        await self.stored(self.node.first, prompt, len(prompt) // BLOCK * BLOCK)

    async def sleep(self, level: int) -> None:
        await self.post("sleep", level=level)
        await self.until(lambda: self._sleeps(), 20, "the engine sleeps")

    async def wake(self, level: int) -> None:
        if level == 2:  # the weights are gone too
            await self.post("wake_up", tags="weights")
            url = f"{self.node.first.base_url}/collective_rpc"
            (await self._http.post(url, json={"method": "reload_weights"})).raise_for_status()
            await self.post("wake_up", tags="kv_cache")
        else:
            await self.post("wake_up")

        async def awake() -> bool:
            return not await self._sleeps()

        await self.until(awake, 20, "the engine is awake")

    async def post(self, path: str, **params) -> None:
        (await self._http.post(f"{self.node.first.base_url}/{path}", params=params)).raise_for_status()

    async def version(self) -> tuple[int, ...]:
        text = (await self._http.get(f"{self.node.first.base_url}/version")).json()["version"]
        return tuple(int(n) for n in text.split("+")[0].split(".")[:2])

    async def sound(self) -> None:
        """Nothing is held, and nothing that was loaded was wrong."""
        engine = self.node.first
        await self.flushed(engine)
        await self.until_idle(engine)
        counters = await self.counters(engine)
        assert not wrong_checksums(counters) and not counters.get("loads failed"), counters
        counts = await asyncio.to_thread(self.node.store.counts)
        assert (counts.index.leases, counts.index.reservations) == (0, 0)
        print(
            {name: value for name, value in counters.items() if "load" in name or "stored" in name or "store_" in name}
        )

    async def _sleeps(self) -> bool:
        return (await self._http.get(f"{self.node.first.base_url}/is_sleeping")).json()["is_sleeping"]


@pytest.fixture(scope="module")
def engines(model_path, log_dir):
    with runtime_dir() as folder:

        def engine(name: str, gpu: int, **options) -> Engine:
            args = ("--dtype", "float32", *GPU_FLAGS, *options.pop("args", ()))
            return Engine(
                model_path, name=f"gpu-{name}", gpus=[gpu], block_size=BLOCK, max_model_len=MAX_LENGTH, args=args,
                log_dir=log_dir, env=store_env(folder), ready_seconds=120, **options,
            )  # fmt: skip

        kv = kvtier({**OPTIONS, "load_policy": "always", "pull_threshold": 8, "endpoint_port": free_port()})
        sleeps = engine("store", GPUS[0], kv=kv, num_blocks=NUM_BLOCKS, args=("--enable-sleep-mode",))
        plain = engine("plain", GPUS[-1])
        start_all([sleeps, plain])
        yield Node(sleeps, sleeps, plain, store_in(folder), {})
        kill_all([sleeps, plain])


@pytest.fixture
async def sleeper(engines: Node):
    async with driving(engines.single, Sleeper) as driver:
        driver.node = engines
        yield driver


async def test_preempted_requests_load_lost_blocks_on_gpu(sleeper: Sleeper):
    """More long answers than there are blocks for: what a request lost is brought back, and goes on right."""
    rng, engine = seeded("gpu preempted"), sleeper.node.first
    prompts = [random_tokens(rng, 600 - 11 * i) for i in range(4)]
    before = await sleeper.metric(engine, "vllm:num_preemptions_total")
    replies = await asyncio.gather(*(sleeper.ask(engine, prompt, 170, ASKED) for prompt in prompts))
    await sleeper.flushed(engine)
    preempted = await sleeper.metric(engine, "vllm:num_preemptions_total") - before
    assert preempted, "nothing was preempted"
    for prompt, reply in zip(prompts, replies, strict=True):
        await sleeper.same(reply, prompt)
    loads = await sleeper.kvtier(engine, "loads", "ok")
    print(f"{preempted:g} preempted, {loads:g} loads")
    assert loads, await sleeper.counters(engine)
    await sleeper.sound()


async def test_prefix_cache_reset_loads_from_store_and_external_reset_does_not(sleeper: Sleeper):
    """vLLM's own: the store has it all. With the connector: nothing that was stored before is its own any more."""
    rng, engine = seeded("gpu reset"), sleeper.node.first
    prompts = [random_tokens(rng, length) for length in (16, 17, 500, 1500)]
    for external in (False, True):
        for prompt in prompts:
            assert (await sleeper.right(prompt)).pulled == 0
            await sleeper.kept(prompt)
        await sleeper.reset(engine)
        for prompt in prompts:
            reply = await sleeper.right(prompt)
            assert (reply.pulled, reply.report["local_tokens"]) == (len(prompt) // BLOCK * BLOCK, 0), reply.report
        if not external:
            await sleeper.reset(engine, external=True)
    await sleeper.sound()


@pytest.mark.parametrize("level", [0, 1, 2])
async def test_engine_asleep_shares_nothing_and_wakes_correct(sleeper: Sleeper, level: int):
    """Level 1 takes the cache away, 2 the weights too. Right after waking all is computed; then the store has it."""
    rng, engine = seeded(f"gpu sleep {level}"), sleeper.node.first
    prompts = [random_tokens(rng, length) for length in (33, 500, 1500)]
    for prompt in prompts:
        assert (await sleeper.right(prompt)).pulled == 0
        await sleeper.kept(prompt)
    await sleeper.reset(engine)
    for prompt in prompts:
        assert (await sleeper.right(prompt)).pulled == len(prompt) // BLOCK * BLOCK
    await sleeper.until_idle(engine)
    await sleeper.sleep(level)
    await sleeper.wake(level)
    for prompt in prompts:
        reply = await sleeper.right(prompt)
        if level:  # it may have other weights now, and knows nothing of before
            assert (reply.pulled, reply.report["local_tokens"]) == (0, 0), reply.report
        await sleeper.kept(prompt)
    await sleeper.reset(engine)
    for prompt in prompts:
        reply = await sleeper.right(prompt)
        assert (reply.pulled, reply.report["local_tokens"]) == (len(prompt) // BLOCK * BLOCK, 0), reply.report
    await sleeper.sound()


async def test_sleep_during_compute_and_load_answers_correctly_afterwards(sleeper: Sleeper):
    """While prompts are computed and stored, and while they are loaded: no copy touches memory that is gone."""
    if await sleeper.version() < (0, 33):
        pytest.skip("this vLLM does not tell a connector that it goes to sleep")
    rng, engine = seeded("gpu sleep in the middle"), sleeper.node.first

    async def busy() -> bool:
        return await sleeper.metric(engine, "vllm:num_requests_running") > 0

    for loads in (False, True, False, True):
        prompts = [random_tokens(rng, rng.randrange(400, 600)) for _ in range(3)]
        if loads:
            for prompt in prompts:
                await sleeper.right(prompt)
                await sleeper.kept(prompt)
            await sleeper.reset(engine)
        asked = [asyncio.create_task(sleeper.ask(engine, prompt, 60, ASKED)) for prompt in prompts]
        if not loads:
            await sleeper.until(busy, 10, "it computes")
        else:
            await asyncio.wait(asked, timeout=0.02)  # about as long as it takes until loads are under way
        await sleeper.sleep(1)
        await sleeper.wake(1)
        await asyncio.gather(*asked, return_exceptions=True)  # vLLM aborts what was under way
        for prompt in prompts:
            await sleeper.right(prompt, 20)
    await sleeper.sound()
