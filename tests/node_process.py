"""A process with a pool, an index and a tier of other nodes, like a store, controlled by its stdin.

    python tests/node_process.py OPTIONS        a JSON object: pool_mib, and options of NodesTier

Each line of stdin and stdout is a JSON object: a command, and its result. ``NodeProcess`` is the client in tests.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
from store_support import block_hashes_of, items_of

from vllm_kvtier.store.index.index import Index, IndexLimits
from vllm_kvtier.store.memory.pool_memory import PoolMemory
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.store.protocol import HASH_BYTES, PAGE, PIECE_BYTES, GroupShape
from vllm_kvtier.store.tiers.base import Block, Want
from vllm_kvtier.store.tiers.nodes.lease_table import NodeLeaseTable
from vllm_kvtier.store.tiers.nodes.tier import NodesTier
from vllm_kvtier.store.tiers.process.tier_process import TierContext
from vllm_kvtier.wire.reactor import Reactor

NAMESPACE_ID = b"a space 16 bytes"
US = 1  # our own client
HASH_BLOCK_SIZE = 16
EVERYTHING = 1 << 40


class NodeProcess:
    """Started by ``start(command)``, such as subprocess.Popen or a NetnsPair's. Use as a context."""

    def __init__(self, start: Callable[..., subprocess.Popen] = subprocess.Popen, env: dict | None = None, **options):
        here = os.path.dirname(__file__)
        path = os.pathsep.join([here, os.path.dirname(here), os.environ.get("PYTHONPATH", "")])
        self.process = start(
            [sys.executable, __file__, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **(env or {})},
            text=True,
        )

    def send(self, do: str, **arguments) -> None:
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict:
        line = self.process.stdout.readline()
        assert line, "the process ended"
        return json.loads(line)

    def ask(self, do: str, **arguments) -> dict:
        self.send(do, **arguments)
        return self.hear()

    def kill(self) -> None:
        """Kill the process and its tier process at once, as if the machine died."""
        tier_process = self.ask("stat")["mover"]
        self.process.kill()
        os.kill(tier_process, signal.SIGKILL)
        self.process.wait()  # or it is taken for one that lives

    def __enter__(self) -> "NodeProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


class Node:
    def __init__(self, pool_mib: int = 64, block_pages: int = 512, lease_seconds: float = 60.0, **options: str):
        self.reactor = Reactor("node")
        self.memory = PoolMemory(pool_mib << 20, huge_pages="never")
        self.pages = block_pages
        self.index = Index(
            SlotPool(self.memory.nbytes // PAGE, PIECE_BYTES // PAGE), None, time.monotonic,
            IndexLimits(lease_seconds=lease_seconds),
        )
        self.index.connect(US, HASH_BLOCK_SIZE, [GroupShape(1, block_pages)])
        self.lending = NodeLeaseTable(self.index, -1)
        given = {"nodes": "", "node_listen": "", "cluster_key_file": "", **options}
        self.tier = NodesTier(TierContext(self.memory.fd, self.memory.nbytes, self.reactor), given, self.lending)
        self.changed, self.lost = threading.Condition(), []
        self.tier.on_change = self._on_change
        self.bytes = np.memmap(f"/proc/self/fd/{self.memory.fd}", np.uint8, "r+")
        self.reactor.start()
        self.memory.start(lambda: self.reactor.call_soon(self._grow))
        self.on_reactor(self.tier.start)

    def _grow(self) -> None:
        self.index.grow(self.memory.ready // PAGE)
        self._on_change()

    def _on_change(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def on_reactor(self, call):
        return self.wait(lambda done: self.reactor.call_soon(lambda: done(call())))

    def wait(self, begin, seconds: float = 60.0):
        """What ``begin(done)`` gives to done."""
        out, event = [], threading.Event()
        begin(lambda result: (out.append(result), event.set()))
        assert event.wait(seconds), "no answer"
        return out[0]

    # -- what can be asked for ------------------------------------------------------------------------------------

    def ready(self, seconds: float = 30.0) -> dict:
        """All memory is usable, and the tier is."""
        with self.changed:
            ok = self.changed.wait_for(
                lambda: self.tier.usable and self.memory.ready == self.memory.nbytes, timeout=seconds
            )
        return {"ok": ok, **self.stat()}

    def reserve(self, block_hashes: bytes, start: int = 0) -> list[int]:
        if len(block_hashes) <= start * HASH_BYTES:
            return []
        return self.on_reactor(
            lambda: self.index.reserve(US, NAMESPACE_ID, b"", *items_of(block_hashes, start), EVERYTHING)
        )

    def store(self, num_hash_blocks: int, name: str) -> dict:
        block_hashes = block_hashes_of((num_hash_blocks, name))
        slots = self.reserve(block_hashes)
        for slot, block in zip(slots, range(num_hash_blocks), strict=True):
            if slot > 0:
                self.slot(slot)[:] = self.pattern(block_hashes, block)
        self.on_reactor(lambda: self.index.commit(US, [slot for slot in slots if slot > 0]))
        return {"stored": sum(slot > 0 for slot in slots)}

    def clear(self) -> dict:
        return {"cleared": self.on_reactor(lambda: self.index.clear(None))}

    def find(self, num_hash_blocks: int, name: str, nodes: tuple = (), start: int = 0) -> dict:
        began = time.monotonic()
        found = self._find(num_hash_blocks, name, nodes, start)
        if found.num_hash_blocks > start:
            self.on_reactor(lambda: self.tier.release(found))
        return {"units": found.num_hash_blocks, "seconds": time.monotonic() - began}

    def read(self, num_hash_blocks: int, name: str, nodes: tuple = (), start: int = 0, keep: bool = True) -> dict:
        """Find, read all of it in chunks, and compare it with what it ought to be. Slots of blocks that failed are kept
        until ``written``."""
        block_hashes = block_hashes_of((num_hash_blocks, name))
        found = self._find(num_hash_blocks, name, nodes, start)
        block_hashes = block_hashes[: found.num_hash_blocks * HASH_BYTES]
        slots = self.reserve(block_hashes, start)
        blocks = [
            Block(
                NAMESPACE_ID,
                0,
                block_hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES],
                bytes(HASH_BYTES),
                b"",
                slot,
                self.pages,
            )
            for i, slot in enumerate(slots, start)
        ]
        assert all(slot > 0 for slot in slots)
        for slot in slots:
            self.slot(slot)[:] = 1
        size = max(1, (32 << 20) // (self.pages * PAGE))
        chunks = [blocks[i : i + size] for i in range(0, len(blocks), size)]
        print(json.dumps({"begins": len(blocks)}), flush=True)
        began, good = time.monotonic(), {}

        def read_all(done) -> None:
            for number, chunk in enumerate(chunks):

                def over(answer, number=number):
                    good[number] = answer
                    if len(good) == len(chunks):
                        done(None)

                self.tier.read(found, chunk, over)
            if not chunks:
                done(None)

        self.wait(lambda done: self.reactor.call_soon(lambda: read_all(done)))
        seconds = time.monotonic() - began
        flat = [ok for number in range(len(chunks)) for ok in good[number]]
        wrong = sum(
            ok and not (self.slot(block.slot) == self.pattern(block_hashes, i)).all()
            for i, (block, ok) in enumerate(zip(blocks, flat, strict=True), start)
        )
        right = [block.slot for block, ok in zip(blocks, flat, strict=True) if ok]
        lost = [block.slot for block, ok in zip(blocks, flat, strict=True) if not ok]
        for slot in lost:
            self.slot(slot)[:] = 2
        self.lost += lost
        if found.num_hash_blocks > start:
            self.on_reactor(lambda: self.tier.release(found))
        self.on_reactor(lambda: (self.index.commit(US, right if keep else []), self.index.abort(US, right)))
        return {"units": found.num_hash_blocks, "good": sum(flat), "wrong": wrong, "seconds": seconds,
                "bytes": len(right) * self.pages * PAGE}  # fmt: skip

    def written(self) -> dict:
        """Slots of failed blocks that were written to after the failure was reported."""
        lost, self.lost = self.lost, []
        written = sum(not (self.slot(slot) == 2).all() for slot in lost)
        self.on_reactor(lambda: self.index.abort(US, lost))
        return {"written": written}

    def stat(self) -> dict:
        def look() -> dict:
            counts, stats = self.tier.counts(), self.index.stats()
            child = self.tier._tier_process._child
            return {"state": counts.state, "reason": counts.reason, "restarts": counts.restarts, **counts.extra,
                    "leases": stats.leases, "reserved": stats.reservations, "mover": child.pid if child else 0,
                    "latency": self.tier.latency(), "seconds": self.tier.seconds(1 << 20)}  # fmt: skip

        return self.on_reactor(look)

    def _find(self, num_hash_blocks: int, name: str, nodes: tuple, start: int):
        shapes = [GroupShape(1, self.pages)]
        want = Want(
            NAMESPACE_ID, HASH_BLOCK_SIZE, shapes, block_hashes_of((num_hash_blocks, name)), start, tuple(nodes)
        )
        return self.wait(lambda done: self.reactor.call_soon(lambda: self.tier.find(want, done)))

    def slot(self, slot: int) -> np.ndarray:
        return self.bytes[slot * PAGE : (slot + self.pages) * PAGE].reshape(-1, HASH_BYTES)

    @staticmethod
    def pattern(block_hashes: bytes, block: int) -> np.ndarray:
        return np.frombuffer(block_hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES], np.uint8)


def main() -> None:
    node = Node(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(getattr(node, task.pop("do"))(**task)), flush=True)
    node.on_reactor(node.tier.stop)
    node.memory.close()
    os._exit(0)


if __name__ == "__main__":
    main()
