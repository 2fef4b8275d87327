"""A node's object tier for tests: the tier with a pool, a reactor, and a tier process of its own."""

import hashlib
import mmap
import os
import sys
import threading
from pathlib import Path

from s3_server import REGION
from support import eventually

from vllm_kvtier.store import linux
from vllm_kvtier.store.index.types import HASH_BYTES, ZERO, GroupShape
from vllm_kvtier.store.tiers.base import Block, Find, Want
from vllm_kvtier.store.tiers.objects.tier import ObjectTier
from vllm_kvtier.store.tiers.process.child import spawn
from vllm_kvtier.store.tiers.process.tier_process import TierContext
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.slots import PAGE

NAMESPACE_ID = b"a space 16 bytes"
BUCKET = "kv-blocks"
BLOCKS, PAGES = 24, 16  # of 64 KiB
SIZE = PAGES * PAGE
POOL = (1 + 2 * BLOCKS * PAGES) * PAGE


def block_hashes_of(name: str, length: int = BLOCKS) -> bytes:
    return b"".join(hashlib.blake2b(f"{name} {i}".encode(), digest_size=HASH_BYTES).digest() for i in range(length))


def contents(block: Block) -> bytes:
    return (hashlib.sha512(block.hash).digest() * (SIZE // 64 + 1))[:SIZE]


def blocks_of(block_hashes: bytes, half: int = 0) -> list[Block]:
    """Of a chain, in the first half of a pool or in the second."""
    hashes = [block_hashes[i : i + HASH_BYTES] for i in range(0, len(block_hashes), HASH_BYTES)]
    first = 1 + half * BLOCKS * PAGES
    return [
        Block(NAMESPACE_ID, 0, block_hash, hashes[i - 1] if i else ZERO, b"", first + i * PAGES, PAGES, i + 1)
        for i, block_hash in enumerate(hashes)
    ]


class TierNode:
    """A tier with a pool and a reactor, as a store has them; its calls block here. ``make(context)``: the tier.
    ``before``: words before the commands of its tier processes."""

    def __init__(self, make, before=()):
        self.pids: list[int] = []
        self.command_lines: list[str] = []
        self.latest: dict[str, int] = {}  # the pid of each kind of tier process
        self.before = before
        self.fd = linux.memfd_create("pool")
        os.ftruncate(self.fd, POOL)
        self.pool = mmap.mmap(self.fd, POOL)
        self.reactor = Reactor("node")
        self.tier = make(TierContext(self.fd, POOL, self.reactor, spawn=self._spawn))
        self.reactor.call_soon(self.tier.start)
        self.reactor.start()

    def _spawn(self, kind, sock, pool_fd, pool_bytes):
        """As ``spawn_mover``; it logs all that it may."""
        command = [sys.executable, "-m", "vllm_kvtier.store.tiers.process.main", f"--kind={kind}", "--log-level=debug"]
        command += [f"--socket={sock.fileno()}", f"--pool={pool_fd}", f"--bytes={pool_bytes}"]
        child = spawn([*self.before, *command], (sock.fileno(), pool_fd))
        self.pids.append(child.pid)
        self.latest[kind] = child.pid
        self.command_lines.append(Path(f"/proc/{child.pid}/cmdline").read_bytes().decode())
        return child

    def ready(self) -> "Node":
        eventually(lambda: self.tier.usable, 30, "usable")
        return self

    def stop(self) -> None:
        self.on(self.tier.stop)
        self.reactor.stop()
        os.close(self.fd)

    def on(self, call):
        done, result = threading.Event(), []
        self.reactor.call_soon(lambda: (result.append(call()), done.set()))
        assert done.wait(20)
        return result[0]

    def begin(self, call) -> list:
        """``call(done)`` on the reactor; the arguments of done, as soon as it is called."""
        told: list = []
        self.reactor.call_soon(lambda: call(told.append))
        return told

    def ask(self, call):
        told = self.begin(call)
        eventually(lambda: told, 40)
        return told[0]

    def find(self, block_hashes: bytes, start: int = 0):
        return self.ask(
            lambda done: self.tier.find(Want(NAMESPACE_ID, 16, [GroupShape(1, PAGES)], block_hashes, start), done)
        )

    def fill(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.pool[block.slot * PAGE : block.slot * PAGE + SIZE] = contents(block)

    def write(self, blocks: list[Block]) -> list[bool]:
        self.fill(blocks)
        return self.ask(lambda done: self.tier.write(blocks, done))

    def read(self, block_hashes: bytes) -> tuple[list[bool], list[bool]]:
        """(what is reported as read, what is right) of all that is found."""
        find = self.find(block_hashes)
        if not find.num_hash_blocks:
            return [], []
        blocks = blocks_of(block_hashes, half=1)[: find.num_hash_blocks]
        good = self.ask(lambda done: self.tier.read(find, blocks, done))
        return good, self.are_right(blocks)

    def read_all(self, block_hashes: bytes) -> list[bool]:
        """As if a lookup had found all."""
        want = Want(NAMESPACE_ID, 16, [GroupShape(1, PAGES)], block_hashes, 0)
        blocks = blocks_of(block_hashes, half=1)
        return self.ask(lambda done: self.tier.read(Find(want, len(blocks), 1), blocks, done))

    def are_right(self, blocks: list[Block]) -> list[bool]:
        right = [self.pool[b.slot * PAGE : b.slot * PAGE + SIZE] == contents(b) for b in blocks]
        return right


class Node(TierNode):
    """With an object tier."""

    def __init__(self, endpoint: str, url: str = f"s3://{BUCKET}/shared", **more):
        region = REGION if url.startswith("s3:") else ""
        options = {"url": url, "endpoint": endpoint, "region": region, "size": 1 << 30}
        waits = {"timeout": 2.0, "look_seconds": 4.0, "read_seconds": 5.0, **more}
        super().__init__(lambda context: ObjectTier(context, {**options, **waits}))
