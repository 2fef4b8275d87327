"""An engine over two nodes, by vLLM's --nnodes, beside one on a single node: hand-offs and the next turn, both ways,
the stores of both nodes, and the end of one node. Both nodes are this machine; the workers of each find those of the
other as on another one.
"""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import httpx
import pytest
from engine_client import driving, random_tokens, with_sources
from engine_fixtures import BLOCK, ENGINE_FLAGS, SHORT, TESTS_ON_PATH, start_missing
from node_fixtures import NodeDriver, NodeStore, runtime_dir, store_env, store_in
from zygote import Forked, Zygote

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all
from vllm_kvtier.wire.auth import ClusterKey

SCRIPT = str(Path(__file__).parents[1] / "headless_node.py")
LENGTHS = (33, 200, 700)


class Spread(NamedTuple):
    one: Engine
    two: Engine  # over two nodes
    start_second: Callable[[], None]  # node of ``two``
    second: list[Forked]  # the one started last is last
    stores: list[NodeStore]  # by node; ``one`` uses the first too


@pytest.fixture(scope="module")
def key_file(log_dir) -> str:
    path = str(log_dir / "cluster.key")
    ClusterKey.create(path)
    return path


@pytest.fixture(scope="module")
def spread(model_path, log_dir, plain, zygote: Zygote, key_file) -> Iterator[Spread]:
    with runtime_dir() as first, runtime_dir() as second:
        yield from spread_over(first, second, model_path, log_dir, plain, zygote, key_file)


def spread_over(first, second_dir, model_path, log_dir, plain, zygote, key_file) -> Iterator[Spread]:
    runtimes = [first, second_dir]
    named = {"kv_connector": "SpreadConnector", "kv_connector_module_path": "spread_connector"}
    extra = {**SHORT, "lookup_timeout": 5.0, "store": "auto", "store_size": "64MiB", "cluster_key_file": key_file}
    engines = []
    for name, flags in (("one", []), ("two", ["--nnodes", "2", "--node-rank", "0"])):
        if flags:
            flags += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
            flags += ["--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"]
        kv = {**kvtier({**extra, "endpoint_port": free_port()}), **(named if flags else {})}
        env = {**TESTS_ON_PATH, "KVTIER_TESTS_NODE": "0", **store_env(runtimes[0])}
        options = {**ENGINE_FLAGS, "args": (*ENGINE_FLAGS["args"], *flags)}
        engines.append(Engine(model_path, name=f"spread-{name}", kv=kv, log_dir=log_dir, env=env, **options))
    one, two = engines
    second: list[Forked] = []
    flags = two.command[3:]
    flags[flags.index("--node-rank") + 1] = "1"

    def start_second() -> None:
        env = {**zygote.env, **TESTS_ON_PATH, "KVTIER_TESTS_NODE": "1", **store_env(runtimes[1])}
        with (log_dir / "spread-second.log").open("ab") as log:
            second.append(zygote.start_script([SCRIPT, *flags], env, log, log))

    start_second()
    start_missing([one, two, plain])
    yield Spread(one, two, start_second, second, [store_in(each) for each in runtimes])
    kill_all(engines)
    for each in second:
        if each.poll() is None:
            os.killpg(each.pid, signal.SIGKILL)


@pytest.fixture
async def shapes(spread, plain, key_file) -> AsyncIterator[tuple[Spread, NodeDriver]]:
    async with driving(plain, NodeDriver, key=ClusterKey.load(key_file)) as driver:
        driver.node = SimpleNamespace(truths={})
        await driver.until_idle(spread.one, spread.two)  # and before that until they answer
        yield spread, driver
        await driver.until_idle(spread.one, spread.two, seconds=25)
        for engine in (spread.one, spread.two):
            inspection = await driver.inspect(engine)
            assert (inspection.violations, inspection.leases, inspection.held_leases) == (0, 0, 0), inspection


async def test_handoff_and_next_turn_of_an_engine_over_two_nodes(shapes):
    engines, driver = shapes
    for p, d in ((engines.one, engines.two), (engines.two, engines.one)):
        for length in LENGTHS:
            prompt = random_tokens(random.Random(f"{p.name} {length}"), length)
            _, reply = await driver.hand_off(p, d, prompt, 40)
            assert (reply.pulled, reply.report["pulled_from"]) == (len(prompt), p.kv_address), reply.report
            await driver.assert_right(reply, prompt, (p.name, d.name, length))
            longer = prompt + reply.tokens + random_tokens(random.Random(length), 30)
            reply = await driver.prefill(p, longer, with_sources(d))
            assert reply.pulled >= BLOCK, reply.report
            await driver.assert_right(reply, longer, (p.name, d.name, length))


async def from_stores(driver: NodeDriver, engine: Engine, prompt: list[int]) -> int:
    """Tokens of a right answer that come from the stores, when vLLM's prefix cache has nothing."""
    await driver.reset(engine)
    reply = await driver.asked(engine, prompt)
    assert reply.report["pulled_from"] == "host" or not reply.pulled, reply.report
    return reply.pulled


async def test_engine_over_two_nodes_loads_from_the_store_of_each(shapes):
    """As long as both have a prompt: one store's end, hang or wrong bytes cost time, and no answer."""
    engines, driver = shapes
    two, prompt = engines.two, random_tokens(random.Random("stores"), 700)
    whole = len(prompt) // BLOCK * BLOCK

    async def stored_and_loaded(what: str) -> None:
        async def again() -> bool:
            await driver.asked(two, prompt)
            return (await driver.query(two, prompt)).stored >= whole and await from_stores(driver, two, prompt) == whole

        await driver.until(again, 40, what)

    await stored_and_loaded("both nodes store it")
    counts = [await asyncio.to_thread(store.counts) for store in engines.stores]
    assert len({each.instance for each in counts}) == 2
    assert all(each.index.entries >= whole // BLOCK for each in counts), counts
    for store in engines.stores[::-1]:
        await asyncio.to_thread(store.kill)
        assert await from_stores(driver, two, prompt) == 0
        await stored_and_loaded("its worker started another one")
        with store.memory() as memory:
            flipped = [memory.flip(random.Random(page), page) for page in memory.written()]
        assert await from_stores(driver, two, prompt) == 0 and flipped
        await stored_and_loaded("wrong blocks were discarded and stored again")
    store = engines.stores[1]
    store.pause()
    try:
        assert await asyncio.wait_for(from_stores(driver, two, prompt), 20) == 0
    finally:
        store.resume()
    await stored_and_loaded("it goes on")


@pytest.mark.slow
async def test_engine_over_two_nodes_that_lost_one_leaks_nothing_at_its_peer(shapes):
    engines, driver = shapes
    prompt = random_tokens(random.Random("lost"), 700)
    prefilled = await driver.prefill(engines.one, prompt)
    os.killpg(engines.second[-1].pid, signal.SIGKILL)
    with pytest.raises((httpx.HTTPError, TimeoutError)):  # vLLM does not go on without a rank
        await asyncio.wait_for(driver.ask(engines.two, prompt, 20, prefilled.params), 15)
    engines.two.kill()  # it waits for the lost rank
    await driver.until_idle(engines.one)
    engines.start_second()
    start_missing([engines.two])
    await driver.until_idle(engines.two)
    _, reply = await driver.hand_off(engines.one, engines.two, prompt, 20)
    assert reply.pulled == len(prompt), reply.report
    await driver.assert_right(reply, prompt, "restarted")
