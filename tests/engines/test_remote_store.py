"""Two stores, each with an engine, as on two nodes: A fills its store, and B's store reads its memory by NIXL."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from engine_client import assert_same, driving, random_tokens
from engine_fixtures import BLOCK, ENGINE_FLAGS, start_missing
from node_fixtures import OPTIONS, STORE_SIZE, Memory, NodeDriver, NodeStore, runtime_dir, seeded, store_env, store_in
from tier_processes import tier_process_of

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all
from vllm_kvtier.devtools.stores import StoreFailed, open_tier, tier_of

# Room for all prompts that a test reads at once, and less than what all tests read. B stores nothing itself.
READER = {**OPTIONS, "store_size": 96 << 20, "store_write": "off", "load_policy": "always"}


class Nodes(NamedTuple):
    near: Engine  # "A": writes to its store, which other nodes may read
    reader: Engine  # "B": with a store that reads from A's
    single: Engine  # without a connector: what it answers greedily is right
    store: NodeStore  # A's
    truths: dict
    address: str
    folder: Path
    serve: list[str]
    reading: NodeStore  # B's


class NodesDriver(NodeDriver):
    node: Nodes

    async def filled(self, *prompts: list[int]) -> None:
        """A has computed them, and the store has their whole blocks."""
        for prompt in prompts:
            await self.asked(self.node.near, prompt)
            await self.stored(self.node.near, prompt)

    async def read_again(self, rng: random.Random) -> None:
        """B's store reads from A's, however long that was left alone for what went wrong."""

        async def again() -> bool:
            prompt = random_tokens(rng, 200)
            await self.filled(prompt)
            return (await self.asked(self.node.reader, prompt)).pulled == whole(prompt)

        await self.until(again, 90, "B's store reads from A's again")

    def lent(self) -> int:
        return tier_of(self.node.store.counts(), "nodes").extra["leases_granted"]

    async def nothing_lent(self) -> None:
        def held() -> int:
            counts = [self.node.store.counts(), self.node.reading.counts()]
            return sum(each.index.leases for each in counts) + tier_of(counts[0], "nodes").extra["leases_out"]

        await self.until(lambda: asyncio.to_thread(lambda: not held()), 10, "no lease is out")


def new_key(file: Path) -> Path:
    subprocess.run([sys.executable, "-m", "vllm_kvtier.wire.auth", str(file)], check=True, capture_output=True)
    return file


@pytest.fixture(scope="module")
def node(model_path, log_dir, plain) -> Iterator[Nodes]:
    """Tests leave it as they found it: engines running, and a store serving that leases."""
    with runtime_dir() as folder, runtime_dir() as other:
        key, address, store = new_key(folder / "cluster.key"), f"127.0.0.1:{free_port()}", store_in(folder)
        serve = [f"--size={STORE_SIZE}", f"--node-listen={address}", f"--cluster-key-file={key}"]
        with store.alone():
            Path(store.path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            store.serve(*serve)
        reads = {"store_nodes": f"{address},127.0.0.1:1", "cluster_key_file": str(key)}
        common = dict(log_dir=log_dir, **ENGINE_FLAGS)
        engines = [
            Engine(model_path, name=f"nodes-{name}", kv=kvtier(kv), env=store_env(where), **common)
            for name, kv, where in (
                ("A", {**OPTIONS, "endpoint_port": free_port()}, folder),
                ("B", {**READER, **reads, "endpoint_port": free_port()}, other),
            )
        ]
        start_missing([*engines, plain])
        reading = store_in(other)
        open_tier(reading.path, "nodes")
        yield Nodes(*engines, plain, store, {}, address, folder, serve, reading)
        kill_all(engines)


@pytest.fixture
def folders() -> Iterator[list[Path]]:
    """Of two more nodes."""
    with runtime_dir() as one, runtime_dir() as other:
        yield [one, other]


@pytest.fixture
async def nodes(node) -> AsyncIterator[NodesDriver]:
    async with driving(node.single, NodesDriver) as driver:
        driver.node = node
        yield driver
        await driver.nothing_lent()


def whole(prompt: list[int]) -> int:
    """Tokens in its whole blocks."""
    return len(prompt) // BLOCK * BLOCK


async def test_blocks_of_another_node_are_loaded_not_computed(node, nodes):
    """Prompts around the ends of blocks; then two that begin alike, and one that no store has."""
    rng = seeded("nodes lengths")
    prompts = [random_tokens(rng, length) for length in (32, 33, 257, 1100, 2048)]
    await nodes.filled(*prompts)
    await nodes.asked(node.reader, random_tokens(rng, 40))  # an engine's first request takes seconds, whatever it is
    before = nodes.lent()
    for prompt in prompts:
        reply = await nodes.asked(node.reader, prompt)
        assert reply.pulled == whole(prompt) and reply.report["pulled_from"] == "host", reply.report
        print(f"\n{len(prompt)} tokens: {reply.seconds * 1e3:.0f} ms from another node", end="")
    assert nodes.lent() > before
    await nodes.reset(node.reader)
    longer = prompts[3][:900] + random_tokens(rng, 200)
    assert (await nodes.asked(node.reader, longer)).pulled == whole(longer[:900])
    assert (await nodes.asked(node.reader, random_tokens(rng, 200))).pulled == 0
    await nodes.flushed(node.reader)
    loaded = await nodes.kvtier(node.reader, "loaded_tokens", "host")
    assert loaded >= sum(map(whole, prompts))


async def test_remote_store_serves_many_requests_at_once(node, nodes):
    rng = seeded("nodes many")
    prompts = [random_tokens(rng, rng.randrange(300, 900)) for _ in range(6)]
    await nodes.filled(*prompts)
    replies = await asyncio.gather(*(nodes.asked(node.reader, prompt) for prompt in prompts))
    assert sum(reply.pulled for reply in replies) == sum(map(whole, prompts)), [reply.report for reply in replies]


async def test_remote_store_flipped_bit_is_recomputed_and_not_read_again(node, nodes):
    """What precedes it is loaded; it is noticed once, and not taken from there again."""
    rng = seeded("nodes flipped")
    prompt = random_tokens(rng, 1000)
    with node.store.memory() as memory:
        await flipped(memory, rng, prompt, node, nodes)


async def flipped(memory: Memory, rng: random.Random, prompt: list[int], node: Nodes, nodes: NodesDriver) -> None:
    before = memory.written()
    await nodes.filled(prompt)
    ours = sorted(memory.written() - before)
    where = memory.flip(rng, ours[len(ours) // 2])
    await nodes.flushed(node.reader)
    noticed = await nodes.kvtier(node.reader, "integrity_failures")
    reply = await nodes.asked(node.reader, prompt)
    assert 0 <= reply.pulled < whole(prompt), reply.report
    await nodes.flushed(node.reader)
    assert await nodes.kvtier(node.reader, "integrity_failures") == noticed + 1
    await nodes.reset(node.reader)
    reply = await nodes.asked(node.reader, prompt)
    assert 0 < reply.pulled < whole(prompt), reply.report
    await nodes.flushed(node.reader)
    assert await nodes.kvtier(node.reader, "integrity_failures") == noticed + 1, "it is not asked for again"
    memory.flip_back(where)


async def test_remote_store_killed_during_load_recomputes_and_is_used_again(node, nodes):
    """All answers are right; and when it is there again, it is asked again."""
    rng = seeded("nodes killed")
    prompts = [random_tokens(rng, 1100) for _ in range(4)]
    await nodes.filled(*prompts)

    async def kill() -> None:
        await asyncio.sleep(rng.uniform(0.02, 0.15))
        await asyncio.to_thread(node.store.kill)

    with node.store.alone():
        await asyncio.gather(kill(), *(nodes.asked(node.reader, prompt) for prompt in prompts))
        await nodes.asked(node.reader, random_tokens(rng, 300))
        await asyncio.to_thread(node.store.serve, *node.serve)
    await nodes.uses_store(node.near)
    await nodes.read_again(rng)


async def test_remote_store_hung_during_load_recomputes_and_is_used_again(node, nodes):
    """No request waits longer than a read may stand still; what arrives when it goes on does no harm."""
    rng = seeded("nodes hangs")
    prompts = [random_tokens(rng, 1100) for _ in range(4)]
    await nodes.filled(*prompts)
    for prompt in prompts:
        await nodes.truth(prompt)
    tier_process = tier_process_of(node.store.pid, "nodes")

    async def hang() -> None:
        await asyncio.sleep(rng.uniform(0.02, 0.1))
        os.kill(tier_process, signal.SIGSTOP)

    began = time.monotonic()
    try:
        await asyncio.gather(hang(), *(nodes.asked(node.reader, prompt) for prompt in prompts))
        assert time.monotonic() - began < 30
        await nodes.asked(node.reader, random_tokens(rng, 300))
    finally:
        os.kill(tier_process, signal.SIGCONT)
    for prompt in prompts:
        await nodes.asked(node.reader, prompt)
    await nodes.read_again(rng)


@pytest.mark.slow
async def test_remote_store_named_by_request_loads_and_other_key_is_refused(node, nodes, make_engine, folders):
    """Two more engines with stores: one knows the key and no other store, one A's store and another key."""
    rng = seeded("nodes named")
    prompts = [random_tokens(rng, 500) for _ in range(2)]
    await nodes.filled(*prompts)
    right, wrong = str(node.folder / "cluster.key"), str(new_key(node.folder / "other.key"))
    knows, stranger = (
        make_engine(name, kv=kvtier(kv), env=store_env(folder), **ENGINE_FLAGS)
        for name, folder, kv in (
            ("knows", folders[0], {**READER, "store_nodes": "127.0.0.1:1", "cluster_key_file": right}),
            ("stranger", folders[1], {**READER, "store_nodes": node.address, "cluster_key_file": wrong}),
        )
    )
    start_missing([knows, stranger])
    for folder in folders:  # neither's list has a store that answers
        with pytest.raises(StoreFailed, match="0 of 1 nodes answer"):
            open_tier(store_in(folder).path, "nodes")
    before = nodes.lent()
    assert (await nodes.asked(stranger, prompts[0])).pulled == 0
    assert (await nodes.asked(knows, prompts[0])).pulled == 0
    assert nodes.lent() == before
    named = {"kvtier": {"stores": [node.address]}}
    reply = await nodes.ask(knows, prompts[1], 8, named)
    assert reply.pulled == whole(prompts[1]), reply.report
    assert_same(reply, await nodes.truth(prompts[1]))

    def said() -> bool:
        return "the same cluster_key_file" in Path(store_in(folders[1]).path).with_suffix(".log").read_text()

    await nodes.until(lambda: asyncio.to_thread(said), 15, "it says why")
    assert nodes.lent() == before + 1


@pytest.mark.slow
async def test_encoded_blocks_load_from_remote_store(node, nodes, make_engine, folders):
    """Two more engines: what one decodes that has it from another node's store is what one of that node loads."""
    rng = seeded("nodes encoded")
    prompt = random_tokens(rng, 700)
    key = str(node.folder / "cluster.key")
    reads = {**READER, "store_nodes": node.address, "cluster_key_file": key, "codec": "int8"}
    near = {**OPTIONS, "endpoint_port": free_port(), "load_policy": "always", "codec": "int8"}
    flags = {**ENGINE_FLAGS, "args": ("--dtype", "bfloat16")}
    here, there = (
        make_engine(name, kv=kvtier(kv), env=store_env(folder), **flags)
        for name, kv, folder in (("writes", near, node.folder), ("reads", reads, folders[0]))
    )
    start_missing([here, there])
    open_tier(store_in(folders[0]).path, "nodes")
    await nodes.ask(here, prompt, 8, {"kvtier": {}})
    await nodes.stored(here, prompt)
    await nodes.reset(here)
    loaded, read = [await nodes.ask(engine, prompt, 8, {"kvtier": {}}) for engine in (here, there)]
    assert loaded.pulled == read.pulled == whole(prompt), (loaded.report, read.report)
    assert_same(read, loaded)
