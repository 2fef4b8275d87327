"""A store process of a test's own, with tiers below its memory, and an engine that writes and checks blocks in it."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from store_support import BLOCK_PAGES, EVERYTHING, NAMESPACE_ID, RawClient, engine_hello, pattern, tool_hello
from support import eventually

from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.launcher import serves
from vllm_kvtier.store.memory.client_mapping import PoolMapping
from vllm_kvtier.store.tiers.base import TierCounts

POOL = 4 << 20  # 256 blocks


class Store:
    """``python -m vllm_kvtier.store`` over a directory; tests kill and restart it.

    ``before``: words before the command, ``ip netns exec NAME`` perhaps. ``env``: beside this process's.
    """

    def __init__(self, folder: Path, before: Sequence[str] = (), env: Mapping[str, str] | None = None):
        self.folder, self.path = folder, str(folder / "s.sock")
        self.process: subprocess.Popen | None = None
        self._before, self._env = list(before), {**os.environ, **(env or {})}
        self.await_tiers = True

    def start(self, *options: str) -> None:
        """Returns when all its tiers are open, or, not ``await_tiers``, when it serves."""
        command = [*self._before, sys.executable, "-m", "vllm_kvtier.store", "--socket", self.path]
        with (self.folder / "store.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, f"--size={POOL}", "--idle-seconds=0", *options], stdout=log, stderr=log, env=self._env
            )
        eventually(lambda: Path(self.path).exists() and serves(self.path), 30)
        if self.await_tiers:
            eventually(self._tiers_are_open, 30, "its tiers are open")

    def _tiers_are_open(self) -> bool:
        """That of other nodes' stores is when it lists them, whether they answer or not."""
        return all(tier.state == "ready" or tier.nodes for tier in self.counts().tiers)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def counts(self) -> m.Counts:
        with RawClient(self.path, tool_hello()) as tool:
            return tool.stat()

    def tier(self, name: str) -> TierCounts:
        return next(tier for tier in self.counts().tiers if tier.name == name)

    def disk(self) -> TierCounts:
        return self.tier("disk")

    def tier_process(self) -> int:
        """Pid of the disk's tier process; 0 if there is none."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    parent = int((entry / "stat").read_text().rpartition(") ")[2].split()[1])
                except OSError:
                    continue
                if b"vllm_kvtier.store.tiers.process.main" in words and parent == self.process.pid:
                    return int(entry.name)
        return 0


class Engine(RawClient):
    """Writes the pattern of each block, and checks what it finds."""

    def __init__(self, store: Store):
        super().__init__(store.path, engine_hello())
        self.pool = PoolMapping(os.dup(self.fds[0]), POOL, "here")

    def fill(self, block_hashes: bytes) -> int:
        """Blocks newly stored."""
        num_hash_blocks = self.lookup(block_hashes)
        self.send(m.Release(num_hash_blocks.lease))
        if num_hash_blocks.num_hash_blocks * m.HASH_BYTES == len(block_hashes):
            return 0
        slots = self.reserve(block_hashes, num_hash_blocks.num_hash_blocks)
        for block, slot in enumerate(slots, num_hash_blocks.num_hash_blocks):
            if slot > 0:
                data = pattern(block_hashes[block * m.HASH_BYTES : (block + 1) * m.HASH_BYTES])
                self.pool.buffer[slot * m.PAGE : (slot + BLOCK_PAGES) * m.PAGE] = data
        written = [slot for slot in slots if slot > 0]
        self.send(m.Commit(written))
        return len(written)

    def find(self, block_hashes: bytes, wait_seconds: float = 20.0) -> int:
        """Blocks found, all of them right."""
        found = self.ask(m.Lookup(1, NAMESPACE_ID, block_hashes, 0, EVERYTHING, wait_seconds))
        for block, slot in enumerate(found.slots[0]):
            there = self.pool.buffer[slot * m.PAGE : (slot + BLOCK_PAGES) * m.PAGE]
            assert there == pattern(block_hashes[block * m.HASH_BYTES : (block + 1) * m.HASH_BYTES]), (
                f"block {block} in slot {slot}"
            )
        self.send(m.Release(found.lease))
        return found.num_hash_blocks

    def close(self) -> None:
        self.pool.close()
        super().close()
