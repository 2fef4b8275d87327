"""Real engines over a store with a disk below its memory: what memory gave up comes back from there, and is right,
also if a process is killed meanwhile or the disk fails."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_client import Reply, assert_same, driving, random_tokens
from engine_fixtures import ENGINE_FLAGS, start_missing
from node_events import Follower, publishing
from node_fixtures import ASKED, runtime_dir, store_env, store_in
from support import eventually, stop
from tier_fixtures import (
    BLOCK,
    POOL_BLOCKS,
    SLOT_PAGES,
    TIER_OPTIONS,
    DataFile,
    TierDriver,
    TieredNode,
    prompts_of,
    read_only,
    seeded,
    serve_options,
    small_disk,
    while_under_way,
    written_since,
)
from tier_processes import tier_process_of

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, kill_all, lives
from vllm_kvtier.store.protocol import PAGE


@pytest.fixture(scope="module")
def node(model_path, log_dir, plain) -> Iterator[TieredNode]:
    """Tests leave it as they found it: both engines running, and a store with a disk that they use."""
    with runtime_dir() as folder:
        disk = folder / "disk"

        def engine(name: str, **extra) -> Engine:
            options = {**TIER_OPTIONS, "store_disk_path": str(disk), "endpoint_port": free_port(), **extra}
            exact = (*ENGINE_FLAGS["args"], *publishing(events_at(disk)))
            flags = {**ENGINE_FLAGS, "args": ("--dtype", "bfloat16") if "codec" in extra else exact}
            kv, env = kvtier(options), store_env(folder)
            return Engine(model_path, name=f"tiers-{name}", kv=kv, log_dir=log_dir, env=env, **flags)

        engines = [engine("A"), engine("coded", codec="int8")]
        start_missing([*engines, plain])
        yield TieredNode(*engines, plain, store_in(folder), {}, disk)
        kill_all(engines)
        for log in folder.rglob("*.log"):
            shutil.copy(log, log_dir / "tiers-store.log")


def events_at(disk: Path) -> str:
    """Where the engine publishes its KV events."""
    return f"ipc://{disk.parent}/events"


@pytest.fixture
async def tiers(node) -> AsyncIterator[TierDriver]:
    """The disk is there, and nothing in it or in memory; afterwards nothing is held."""
    async with driving(node.single, TierDriver) as driver:
        driver.node = node
        await asyncio.to_thread(node.store.until_up)
        await driver.is_open()
        await asyncio.to_thread(node.store.clear)
        yield driver
        await driver.nothing_held()


def whole(prompt: list[int]) -> int:
    """Tokens in its whole blocks."""
    return len(prompt) // BLOCK * BLOCK


async def test_blocks_evicted_from_memory_load_from_disk(node, tiers):
    """Prompts around the ends of blocks and of steps; and of two that begin alike, the beginning once."""
    rng = seeded("lengths")
    prompts = [random_tokens(rng, length) for length in (32, 33, 257, 1100, 2048)]
    first = await tiers.kept(*prompts)
    assert not any(reply.pulled for reply in first)
    for prompt, computed in zip(prompts, first, strict=True):
        await tiers.gone_from_memory(prompt)
        reply, read = await tiers.from_disk(node.engine, prompt)
        assert (reply.pulled, read) == (whole(prompt), whole(prompt)), reply.report
        print(f"\n{len(prompt)} tokens: {computed.seconds * 1e3:.0f} ms, {reply.seconds * 1e3:.0f} from disk", end="")
    await tiers.gone_from_memory(*prompts)
    longer = prompts[3][:900] + random_tokens(rng, 200)
    reply, read = await tiers.from_disk(node.engine, longer)
    assert (reply.pulled, read) == (whole(longer[:900]), whole(longer[:900]))


async def test_kv_events_report_memory_and_disk_blocks(node, tiers):
    """A router that hears them has the store's own view, tier by tier, whatever becomes of the blocks."""
    prompts = prompts_of("events", 3, 700)
    with Follower(events_at(node.disk)) as follower:
        await tiers.until_heard(node.engine, follower)
        await asyncio.to_thread(node.store.clear)

        async def same(memory: bool = True) -> bool:
            counts = await asyncio.to_thread(node.store.counts)
            mine = counts.index.entries if memory else 0
            return follower.count("CPU") == mine and follower.count("STORAGE") == (await tiers.disk()).blocks

        await tiers.until(same, 20, "what was published before is removed: the store was emptied")
        await tiers.kept(*prompts)
        await tiers.until(same, 20, "what is stored is published")
        for prompt in prompts:
            assert follower.prefix(prompt).items() >= {"CPU": whole(prompt), "STORAGE": whole(prompt)}.items()
            assert follower.prefix(prompt)["CPU"] == (await tiers.query(node.engine, prompt)).stored
        await tiers.gone_from_memory(prompts[0])  # blocks of other prompts take its place
        below = {"CPU": 0, "STORAGE": whole(prompts[0])}
        await tiers.until(lambda: tiers.says(follower, prompts[0], below), 20, "memory gave it up")
        by_source = "vllm:prompt_tokens_cached_by_source_total"
        before = await tiers.metric(node.engine, by_source, '"disk"')
        reply, _ = await tiers.from_disk(node.engine, prompts[0])
        assert reply.pulled == whole(prompts[0])
        if await tiers.metric(node.engine, by_source):  # vLLM asks for it since 0.32
            assert await tiers.metric(node.engine, by_source, '"disk"') - before == whole(prompts[0])
        await tiers.until(lambda: tiers.says(follower, prompts[0], {"CPU": whole(prompts[0])}), 20, "it came up again")
        await asyncio.to_thread(node.store.clear)
        await tiers.until(same, 20, "nothing is left")
        assert not follower.count("CPU") and not follower.count("STORAGE")
        # A store that is killed takes its memory with it; the next one has the disk, whose blocks are published one
        # after the other.
        await tiers.kept(prompts[1])
        await tiers.until(lambda: tiers.says(follower, prompts[1], {"CPU": whole(prompts[1])}), 20, "stored again")
        await asyncio.to_thread(node.store.kill)
        await tiers.until(lambda: tiers.says(follower, prompts[1], {"CPU": 0, "STORAGE": 0}), 20, "the store is dead")
        await asyncio.to_thread(node.store.until_up)
        await tiers.is_open()
        await tiers.uses_store(node.engine)
        await tiers.reset(node.engine)
        reply, _ = await tiers.from_disk(node.engine, prompts[1])
        assert reply.pulled == whole(prompts[1])
        both = {"CPU": whole(prompts[1]), "STORAGE": whole(prompts[1])}
        await tiers.until(lambda: tiers.says(follower, prompts[1], both), 20, "found again, and labelled")
        assert not follower.missed


async def test_working_set_of_three_times_memory_loads_from_disk(node, tiers):
    """One after the other, then several at a time that share what memory there is."""
    prompts = prompts_of("working set", 9, 1100)
    assert sum(map(len, prompts)) > 3 * POOL_BLOCKS * BLOCK
    await tiers.kept(*prompts)
    await tiers.reset(node.engine)
    before = await tiers.disk()
    for prompt in prompts:
        reply = await tiers.asked(node.engine, prompt)
        assert reply.pulled == whole(prompt), reply.report
    read = (await tiers.disk()).read_blocks - before.read_blocks
    assert read * BLOCK > 0.6 * sum(map(len, prompts)), "the rest was still in memory"
    replies = await asyncio.gather(*(tiers.ask(node.engine, prompt, 8, ASKED) for prompt in prompts))
    for prompt, reply in zip(prompts, replies, strict=True):
        assert_same(reply, await tiers.truth(prompt), reply.report)
    found = sum(reply.pulled + reply.report["local_tokens"] for reply in replies)
    assert found >= whole(prompts[0]), "the memory is too small for all at a time, but not for some"
    print(f"\n{found} of {sum(map(len, prompts))} tokens found, nine at a time", end="")


async def test_tier_process_killed_while_reading_recomputes(node, tiers):
    """SIGKILL in the middle of a promotion: what had come stays, the rest is computed, and the disk comes back."""
    stopped, random = prompts_of("killed reading", 2)
    await tiers.kept(stopped, random)
    await tiers.gone_from_memory(stopped, random)
    before = await tiers.disk()
    tier_process = await tiers.tier_process()
    stop(tier_process)  # it has been asked to read, and will not

    async def kill() -> None:
        await tiers.in_flight(lambda counts: counts.index.reservations > 0)
        os.kill(tier_process, signal.SIGKILL)

    reply = await while_under_way(tiers.asked(node.engine, stopped), kill)
    assert reply.pulled == 0, reply.report
    after = await tiers.is_open_again(before)
    assert after.blocks >= before.blocks, (before, after)

    async def kill_soon() -> None:
        await asyncio.sleep(seeded("when").uniform(0.002, 0.02))
        os.kill(await tiers.tier_process(), signal.SIGKILL)

    await while_under_way(tiers.asked(node.engine, random), kill_soon)
    await tiers.is_open_again(after)
    await tiers.gone_from_memory(random)
    reply, read = await tiers.from_disk(node.engine, random)
    assert reply.pulled == read == whole(random), reply.report


@pytest.mark.slow
async def test_tier_process_killed_while_writing_loses_only_these_blocks(node, tiers):
    before, others = prompts_of("killed writing", 3), prompts_of("then", 2)
    await tiers.kept(before[0])
    first = await tiers.disk()
    tier_process = await tiers.tier_process()
    stop(tier_process)
    await tiers.asked(node.engine, before[1])  # is stored, and asked to be written
    await tiers.stored(node.engine, before[1])
    await asyncio.sleep(0.1)  # batches wait for 0.05 s
    os.kill(tier_process, signal.SIGKILL)
    second = await tiers.is_open_again(first)

    async def kill_soon() -> None:
        await tiers.stored(node.engine, before[2], 64)
        os.kill(await tiers.tier_process(), signal.SIGKILL)

    await while_under_way(tiers.asked(node.engine, before[2]), kill_soon)
    await tiers.is_open_again(second)
    # What was on disk is; what was being written is, or is computed; what comes now is written again.
    await tiers.kept(*others)
    await tiers.gone_from_memory(*before, *others)
    for prompt in (before[0], *others):
        reply, read = await tiers.from_disk(node.engine, prompt)
        assert reply.pulled == read == whole(prompt), reply.report
    for prompt in before[1:]:
        await tiers.asked(node.engine, prompt)


@pytest.mark.parametrize("found_by", ["the engine", "the tier process"])
async def test_disk_damage_is_detected_and_block_not_read_again(node, tiers, found_by):
    """One bit of one block: what precedes it is loaded, the rest computed, and the block never given again. The tier
    process looks at a sample of each block, the engine at every byte."""
    [prompt] = prompts_of(f"damage {found_by}", 1)
    rng, file = seeded(found_by), DataFile(node.disk)
    before = file.pages()
    await tiers.kept(prompt)
    ours = written_since(before, file.pages())
    # Nearly all: what was there before may have been the same, zeros above all.
    assert len(ours) > 0.9 * whole(prompt) // BLOCK * SLOT_PAGES, len(ours)
    # All of them are in the sample as well; of one it is not known, as it is not where a block begins.
    damaged = ours if found_by == "the tier process" else ours[len(ours) // 2 : len(ours) // 2 + 1]
    file.flip(rng, damaged)
    await tiers.gone_from_memory(prompt)
    await tiers.flushed(node.engine)
    wrong, before = await tiers.kvtier(node.engine, "integrity_failures"), await tiers.disk()
    reply, _ = await tiers.from_disk(node.engine, prompt)
    assert reply.pulled < whole(prompt), reply.report
    await tiers.flushed(node.engine)
    noticed = await tiers.kvtier(node.engine, "integrity_failures") - wrong
    after = await tiers.disk()
    assert noticed or after.read_failures > before.read_failures, (before, after)
    if noticed:
        assert after.discarded_blocks > before.discarded_blocks, (before, after)
    # Computed, stored and written anew: nothing that is wrong is met again.
    await tiers.stored(node.engine, prompt)
    await tiers.quiet()
    await tiers.gone_from_memory(prompt)
    reply, read = await tiers.from_disk(node.engine, prompt)
    assert reply.pulled == read == whole(prompt), reply.report
    await tiers.flushed(node.engine)
    assert await tiers.kvtier(node.engine, "integrity_failures") == wrong + noticed


async def test_killed_store_restores_written_blocks_from_disk(node, tiers):
    """The engine starts another one; in the middle of writing, too, what had been written is there."""
    kept, cut_off = prompts_of("killed store", 2, 1300)
    await tiers.kept(kept)
    before = await tiers.disk()
    tier_process, pid = await tiers.tier_process(), node.store.pid

    async def kill() -> None:
        await tiers.stored(node.engine, cut_off, 256)
        await asyncio.to_thread(node.store.kill)

    await while_under_way(tiers.asked(node.engine, cut_off), kill)
    await asyncio.to_thread(node.store.until_up)
    assert node.store.pid != pid
    after = await tiers.is_open()
    assert before.blocks <= after.blocks, (before, after)
    assert not lives(tier_process), "it ends with its store"
    await tiers.uses_store(node.engine)
    await tiers.reset(node.engine)
    reply, read = await tiers.from_disk(node.engine, kept)
    assert reply.pulled == read == whole(kept), reply.report
    await tiers.asked(node.engine, cut_off)


@contextmanager
def another_store(node: TieredNode, *options: str) -> Iterator[None]:
    """In the place of the engine's own, which a test gets back afterwards."""
    with node.store.alone():
        node.store.kill()
        node.store.serve(*options)
        try:
            yield
        finally:
            tier_process = tier_process_of(node.store.pid)
            node.store.kill()
            eventually(lambda: not lives(tier_process), 10, "the tier process ends with its store")


async def test_disk_smaller_than_working_set_evicts_without_failure(node, tiers):
    """It keeps to its size and gives up the oldest. That is no failure."""
    prompts = prompts_of("small", 4)
    size = 60 * SLOT_PAGES * PAGE
    with another_store(node, *serve_options(node.disk.with_name("small"), size)):
        await tiers.uses_store(node.engine)
        for prompt in prompts:
            await tiers.kept(prompt)
        disk = await tiers.disk()
        assert disk.evicted_blocks > 0 and disk.used_bytes <= size and not disk.write_failures, disk
        await tiers.gone_from_memory(*prompts)
        for prompt in prompts:
            await tiers.asked(node.engine, prompt)
    await tiers.uses_store(node.engine)


async def test_full_then_read_only_file_system_serves_what_fits(node, tiers):
    """What fitted is served; the rest is computed, and the store says why."""
    prompts = prompts_of("full", 4)
    with small_disk(node.disk.with_name("full"), 50 * SLOT_PAGES * PAGE) as folder:
        with another_store(node, *serve_options(folder)):
            await tiers.uses_store(node.engine)
            for prompt in prompts:
                await tiers.asked(node.engine, prompt)
                await tiers.stored(node.engine, prompt)
                await tiers.quiet()
            disk = await tiers.disk()
            assert disk.write_failures > 0, disk
            print(f"\nfull: {disk.state}, {disk.reason!r}, {disk.blocks} blocks", end="")
            await tiers.gone_from_memory(*prompts)
            assert sum([(await tiers.asked(node.engine, prompt)).pulled for prompt in prompts]) > 0
        read_only(folder)
        with another_store(node, *serve_options(folder)):
            await tiers.until(lambda: _opened(tiers), 20, "the disk is open")
            disk = await tiers.disk()
            assert disk.state == "read_only" and disk.reason and disk.blocks > 0, disk
            await tiers.uses_store(node.engine)
            await tiers.reset(node.engine)
            loaded = [(await tiers.asked(node.engine, prompt)).pulled for prompt in prompts]
            assert sum(loaded) > 0, loaded
            assert (await tiers.disk()).written_blocks == 0
    await tiers.uses_store(node.engine)


async def _opened(tiers: TierDriver) -> bool:
    return (await tiers.disk()).state != "opening"


async def test_queued_request_prefetches_its_blocks(node, tiers):
    """Long answers fill the engine's cache; meanwhile the next request's blocks are promoted."""
    [waiting], busy = prompts_of("queue", 1, 640), prompts_of("busy", 2, 1950)
    await tiers.kept(waiting)
    await tiers.gone_from_memory(waiting)
    await tiers.flushed(node.engine)
    warmed, before = await tiers.kvtier(node.engine, "promotion_prefetches"), await tiers.disk()
    talking = [asyncio.ensure_future(tiers.ask(node.engine, prompt, 200)) for prompt in busy]

    async def full() -> bool:
        inspection = await tiers.inspect(node.engine)
        return inspection.free_blocks < len(waiting) // BLOCK

    await tiers.until(full, 10, "the engine's cache is full")
    await tiers.quiet()
    asked = asyncio.ensure_future(tiers.asked(node.engine, waiting))

    async def came_up() -> bool:
        return (await tiers.query(node.engine, waiting)).stored >= whole(waiting)

    await tiers.until(came_up, 10, "the waiting request's blocks are in memory")
    assert not asked.done() and not all(task.done() for task in talking), "it came up while the request waited"
    reply, *_ = await asyncio.gather(asked, *talking)
    assert reply.pulled == whole(waiting), reply.report
    await tiers.flushed(node.engine)
    assert await tiers.kvtier(node.engine, "promotion_prefetches") > warmed
    assert (await tiers.disk()).read_blocks - before.read_blocks >= whole(waiting) // BLOCK


async def test_encoded_slots_demoted_and_promoted_are_unchanged(node, tiers):
    """As bytes, and so to the same answer as from memory."""
    [prompt] = prompts_of("coded", 1)

    async def answer() -> Reply:
        await tiers.reset(node.coded)
        return await tiers.ask(node.coded, prompt, 8, ASKED)

    with node.store.memory() as memory:
        stale = memory.pages.copy()  # what was cleared is not erased
    await tiers.ask(node.coded, prompt, 8)
    await tiers.stored(node.coded, prompt)
    await tiers.quiet()
    from_memory = await answer()
    with node.store.memory() as memory:
        before = {memory.pages[page].tobytes() for page in written_since(stale, memory.pages)}
    await tiers.gone_from_memory(prompt, engine=node.coded)
    read = (await tiers.disk()).read_blocks
    from_disk = await answer()
    assert (await tiers.disk()).read_blocks - read == whole(prompt) // BLOCK
    assert from_memory.pulled == from_disk.pulled == whole(prompt)
    assert (from_disk.tokens, from_disk.logprobs) == (from_memory.tokens, from_memory.logprobs)
    with node.store.memory() as memory:
        after = {page.tobytes() for page in memory.pages}
    assert len(before) > 31 * 20 and before <= after, (len(before), len(before - after))
    await tiers.flushed(node.coded)
    assert await tiers.kvtier(node.coded, "integrity_failures") == 0
