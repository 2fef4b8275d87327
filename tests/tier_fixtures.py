"""An engine and a node store with a disk tier, and the faults that tests inject into them."""

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np
import pytest
from engine_client import Reply, random_tokens
from node_events import Follower
from node_fixtures import OPTIONS, RETAIN_SECONDS, SLOT_PAGES, NodeDriver, NodeStore
from store_support import RawClient, block_hashes_of, items_of
from support import eventually
from tier_processes import tier_process_of

from vllm_kvtier.devtools.engines import Engine
from vllm_kvtier.devtools.stores import StoreFailed, counts_when_idle, open_tier, tier_of
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.tiers.base import TierCounts

BLOCK = 32
POOL_BLOCKS = 100  # 3,200 tokens, less than the engine's prefix cache
POOL_BYTES = (POOL_BLOCKS * SLOT_PAGES + 1) * m.PAGE  # no block is at page 0
DISK_BYTES = 256 << 20
NOBODYS = b"other namespace1"
TIER_OPTIONS = {
    **OPTIONS,
    "store_size": POOL_BYTES,
    "store_disk_size": DISK_BYTES,
    "store_disk_admission": "all",
    "load_policy": "always",
}


class TieredNode(NamedTuple):
    engine: Engine  # loads whatever the store has
    coded: Engine  # its slots are encoded
    single: Engine  # without a connector: what it answers greedily is right
    store: NodeStore
    truths: dict
    disk: Path

    @property
    def engines(self) -> list[Engine]:
        return [self.engine, self.coded]


def serve_options(disk: Path, nbytes: int = DISK_BYTES) -> list[str]:
    """Of a store of a test's own, like the one that the engine starts."""
    return [f"--size={POOL_BYTES}", f"--disk-path={disk}", f"--disk-size={nbytes}", "--disk-admission=all"]


@contextmanager
def small_disk(folder: Path, nbytes: int) -> Iterator[Path]:
    """A file system of its own with room for so much; skips the test where this process may not mount one."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def read_only(folder: Path) -> None:
    """Remount; waits for killed processes that still have files open there."""

    def done() -> bool:
        command = ["mount", "-o", "remount,ro", str(folder)]
        return not subprocess.run(command, capture_output=True).returncode

    eventually(done, 10, f"{folder} is busy")


class TierDriver(NodeDriver):
    """A NodeDriver whose ``node`` is a TieredNode."""

    node: TieredNode

    async def disk(self) -> TierCounts:
        return tier_of(await asyncio.to_thread(self.node.store.counts))

    async def is_open(self, seconds: float = 30.0) -> TierCounts:
        """The disk, when it can be used (again)."""

        async def ready() -> TierCounts | None:
            try:
                counts, _ = await asyncio.to_thread(open_tier, self.node.store.path)
            except StoreFailed:
                return None  # the store starts, or the disk is unavailable for a while
            return tier_of(counts)

        return await self.until(ready, seconds, "the store's disk is ready")

    async def is_open_again(self, before: TierCounts) -> TierCounts:
        """The same after its process was killed: for a moment the store does not know, and says that it is ready."""

        async def noticed() -> bool:
            return (await self.disk()).restarts > before.restarts

        await self.until(noticed, 30.0, "the store starts the disk's process anew")
        return await self.is_open()

    async def quiet(self) -> m.Counts:
        """When everything is written that will be."""
        return await asyncio.to_thread(counts_when_idle, self.node.store.path, 0.1)

    async def kept(self, *prompts: list[int], engine: Engine | None = None, count: int = 8) -> list[Reply]:
        """Right answers, after which the prompts' whole blocks are in memory and on disk."""
        replies = []
        for prompt in prompts:
            replies.append(await self.asked(engine or self.node.engine, prompt, count))
            await self.stored(engine or self.node.engine, prompt)
            await self.quiet()  # or memory would give up, for the next, what has not been written yet
        return replies

    async def gone_from_memory(self, *prompts: list[int], engine: Engine | None = None) -> None:
        """Neither the engine nor the store's memory has anything of them; the disk has what it had."""
        engine = engine or self.node.engine
        await self.reset(engine)
        number = 0

        async def pushed_out() -> bool:
            nonlocal number
            number += 1
            await asyncio.to_thread(self._fill, number)
            return not any([(await self.query(engine, prompt)).stored for prompt in prompts])

        await self.until(pushed_out, 20, "the store's memory gives the prompts up")
        await self.quiet()  # blocks under write cannot be evicted for promotions

    def _fill(self, number: int) -> None:
        """Fill it with blocks that no engine requests, as an engine of another model might."""
        hello = m.Hello("other", os.getpid(), "engine", hash_block_size=BLOCK, groups=[m.GroupShape(1, SLOT_PAGES)])
        with RawClient(self.node.store.path, hello) as client:
            for part in range(4):
                groups, hashes, parents = items_of(
                    block_hashes_of((POOL_BLOCKS // 4, f"{number} {part} {os.getpid()}"))
                )
                slots = client.ask(m.Reserve(2, NOBODYS, b"", groups, hashes, parents, 1 << 40)).slots
                client.send(m.Commit([slot for slot in slots if slot > 0]))
                client.stat()  # answered behind the commit

    async def from_disk(self, engine: Engine, prompt: list[int], count: int = 8) -> tuple[Reply, int]:
        """A right answer, and the tokens that the disk was read for."""
        before = (await self.disk()).read_blocks
        reply = await self.asked(engine, prompt, count)
        return reply, ((await self.disk()).read_blocks - before) * BLOCK

    async def tier_process(self, seconds: float = 10.0) -> int:
        """Process id of the disk's tier process."""

        async def living() -> int:
            return tier_process_of(self.node.store.pid)

        return await self.until(living, seconds, "the disk has a tier process")

    async def in_flight(self, holds: Callable[[m.Counts], bool], seconds: float = 5.0) -> None:
        async def so() -> bool:
            return holds(await asyncio.to_thread(self.node.store.counts))

        await self.until(so, seconds, "it is under way")

    async def says(self, follower: Follower, prompt: list[int], tokens: dict[str, int]) -> bool:
        """How many of the prompt's tokens are where, as published."""
        found = follower.prefix(prompt)
        return all(found.get(place, 0) == count for place, count in tokens.items())

    async def nothing_held(self) -> None:
        """No block, lease or reservation, of whomever."""
        await self.until_idle(*self.node.engines, seconds=RETAIN_SECONDS + 10)

        async def none() -> bool:
            index = (await asyncio.to_thread(self.node.store.counts)).index
            return (index.leases, index.leased_entries, index.reservations) == (0, 0, 0)

        await self.until(none, 10, "no lease and no reservation in the store")


async def while_under_way(request: Awaitable[Reply], act: Callable[[], Awaitable[None]]) -> Reply:
    """``act`` happens while the request is answered."""
    asked = asyncio.ensure_future(request)
    try:
        await act()
    except BaseException:
        asked.cancel()
        raise
    return await asked


# -- damage --------------------------------------------------------------------------------------------------------


class DataFile:
    """The disk's data file, for tests that corrupt it."""

    def __init__(self, disk: Path):
        self._path = disk / "slots"

    def pages(self) -> np.ndarray:
        """uint8[pages, PAGE], a copy."""
        content = np.fromfile(self._path, np.uint8)
        return content[: content.size // m.PAGE * m.PAGE].reshape(-1, m.PAGE)

    def flip(self, rng: Random, pages: list[int]) -> None:
        """A bit of each."""
        fd = os.open(self._path, os.O_RDWR)
        try:
            for page in pages:
                at = page * m.PAGE + rng.randrange(m.PAGE)
                os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1 << rng.randrange(8)]), at)
            os.fsync(fd)
        finally:
            os.close(fd)


def written_since(before: np.ndarray, now: np.ndarray) -> list[int]:
    """Pages that are not what they were; ``before`` may have been fewer."""
    changed = now.any(axis=1)
    changed[: len(before)] = (now[: len(before)] != before).any(axis=1)
    return np.flatnonzero(changed).tolist()


def seeded(what: object) -> Random:
    return Random(f"tiers {what}")


def prompts_of(what: object, count: int, length: int = 1000) -> list[list[int]]:
    rng = seeded(what)
    return [random_tokens(rng, length + i) for i in range(count)]
