"""Clients of the node store for its tests: a blocking one, and a process that loads the store and checks its answers.

    python tests/store_support.py PATH SECONDS SEED     the process; prints when it is connected, and how much it did;
                                                        exit status 3: a leased slot had wrong bytes
"""

import hashlib
import os
import random
import socket
import sys
import time
import weakref

from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.client import Failed, StoreClient
from vllm_kvtier.store.index.block_entry import BlockEntry
from vllm_kvtier.store.memory.client_mapping import PoolMapping, shake_hands
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.stream import read_frame, write_frame

NAMESPACE_ID = b"a space 16 bytes"
EVERYTHING = 1 << 40  # a pages_limit
BLOCK_PAGES = 4


def map_pool(path: str) -> PoolMapping:
    """The pool of the store at ``path``; it does not follow a restart of the store. Raises KVTierError."""
    welcome, fd = shake_hands(path, m.Hello("mapping", os.getpid(), "tool"), 5.0)
    return PoolMapping(fd, welcome.pool_pages * m.PAGE, welcome.instance)


def block_hashes_of(*lengths_and_names: tuple[int, object]) -> bytes:
    """Block hashes: (count, name) pairs; each hash depends on its name and all hashes before."""
    hashes, last = [], b""
    for length, name in lengths_and_names:
        for number in range(length):
            last = hashlib.blake2b(last + repr((name, number)).encode(), digest_size=m.HASH_BYTES).digest()
            hashes.append(last)
    return b"".join(hashes)


class _Depth(float):
    """A block's, which ends with the block."""


def life_of(entry: BlockEntry) -> weakref.ref:
    """A weak reference that dies with the block, which has none itself."""
    entry.depth = _Depth(entry.depth)
    return weakref.ref(entry.depth)


def items_of(block_hashes: bytes, start: int = 0) -> tuple[list[int], bytes, bytes]:
    """(groups, hashes, parents) of a Reserve for blocks from ``start``; one group, one hash block per block."""
    hashes = block_hashes[start * m.HASH_BYTES :]
    before = block_hashes[(start - 1) * m.HASH_BYTES : start * m.HASH_BYTES] if start else m.NO_PARENT
    return [0] * (len(hashes) // m.HASH_BYTES), hashes, (before + hashes[: -m.HASH_BYTES])


def engine_hello(name: str = "engine", pages: int = BLOCK_PAGES) -> m.Hello:
    return m.Hello(
        name,
        os.getpid(),
        "engine",
        hash_block_size=16,
        groups=[m.GroupShape(hash_blocks_per_block=1, slot_pages=pages)],
    )


def tool_hello() -> m.Hello:
    return m.Hello("test", os.getpid(), "tool")


class RawClient:
    """A blocking connection: sends any message, also malformed ones, and reads answers."""

    def __init__(self, path: str, hello: m.Hello | None = None, seconds: float = 10.0):
        self.seconds, self.fds = seconds, []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(seconds)
        self.socket.connect(path)
        self.welcome = self.ask(hello) if hello is not None else None

    def send(self, message) -> None:
        write_frame(self.socket, message if isinstance(message, bytes) else m.encode(message))

    def hear(self):
        """The next message that is not Ready."""
        while True:
            reply = m.decode_reply(read_frame(self.socket, time.monotonic() + self.seconds, self.fds))
            if not isinstance(reply, m.Ready):
                return reply

    def ask(self, message):
        self.send(message)
        return self.hear()

    def ended(self) -> bool:
        """Waits for the end of the connection."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True

    def lookup(self, block_hashes: bytes, start: int = 0) -> m.Found:
        return self.ask(m.Lookup(1, NAMESPACE_ID, block_hashes, start, EVERYTHING))

    def reserve(self, block_hashes: bytes, start: int = 0) -> list[int]:
        groups, hashes, parents = items_of(block_hashes, start)
        return self.ask(m.Reserve(2, NAMESPACE_ID, b"", groups, hashes, parents, EVERYTHING)).slots

    def store(self, block_hashes: bytes) -> list[int]:
        """Reserve and commit; the slots given. Everybody can find them on return."""
        slots = [slot for slot in self.reserve(block_hashes) if slot > 0]
        self.send(m.Commit(slots))
        self.stat()  # answered behind the commit
        return slots

    def stat(self) -> m.Counts:
        return self.ask(m.Stat(3))

    def close(self) -> None:
        self.socket.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()


def pattern(block_hash: bytes) -> bytes:
    return block_hash * (BLOCK_PAGES * m.PAGE // m.HASH_BYTES)


class WrongBytes(Exception):
    pass


class Busy:
    """Look up, check, reserve, write, commit, abort or omit that, at random, over prompts that all clients share."""

    def __init__(self, path: str, seed: int):
        self.random = random.Random(seed)
        self.reactor = Reactor("busy")
        self.client = StoreClient(self.reactor, path, engine_hello(f"busy-{seed}"))
        self.client.start()
        self.reactor.start()
        self.pool = None
        self.held: list[tuple[int, int]] = []  # lease, session
        self.rounds = self.loaded = self.stored = 0

    def run(self, seconds: float) -> None:
        while not self.mapped():
            time.sleep(0.01)
        print("begins", flush=True)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.mapped():
                self.round()
            else:
                time.sleep(0.01)  # another process restarts the store
        self.reactor.stop()

    def mapped(self) -> bool:
        instance = self.client.instance
        if not instance:
            return False
        if self.pool is None or self.pool.instance != instance:
            if self.pool is not None:
                self.pool.close()
            self.pool = self.client.open_pool()
        return self.pool is not None and self.pool.instance == instance

    def round(self) -> None:
        self.rounds += 1
        conversation = self.random.randrange(60)
        block_hashes = block_hashes_of((8, conversation % 6), (self.random.randrange(1, 40), conversation))
        num_hash_blocks = len(block_hashes) // m.HASH_BYTES
        pending = self.client.lookup(NAMESPACE_ID, block_hashes, 0, EVERYTHING)
        found = self.outcome(pending)
        if found is None or pending.session != self.client.session or self.pool.instance != self.client.instance:
            return
        if found.num_hash_blocks:
            self.check(block_hashes, found.slots[0], pending.session)
            self.held.append((found.lease, pending.session))
        while self.held and (len(self.held) > 4 or self.random.random() < 0.7):
            self.client.release(*self.held.pop(self.random.randrange(len(self.held))))
        if found.num_hash_blocks < num_hash_blocks:
            self.store(block_hashes, found.num_hash_blocks)
        if self.random.random() < 0.02:
            self.outcome(self.client.clear(NAMESPACE_ID) if self.random.random() < 0.1 else self.client.stat())
        if self.random.random() < 0.05:
            self.outcome(self.client.pin(NAMESPACE_ID, block_hashes, self.random.random() < 0.5))

    def check(self, block_hashes: bytes, slots: list[int], session: int) -> None:
        for block, slot in enumerate(slots):
            there = self.pool.buffer[slot * m.PAGE : (slot + BLOCK_PAGES) * m.PAGE]
            if there != pattern(block_hashes[block * m.HASH_BYTES : (block + 1) * m.HASH_BYTES]):
                if self.client.session != session:
                    return  # the lease ended meanwhile
                raise WrongBytes(f"block {block} in slot {slot}")
            self.loaded += 1

    def store(self, block_hashes: bytes, start: int) -> None:
        groups, hashes, parents = items_of(block_hashes, start)
        pending = self.client.reserve(NAMESPACE_ID, b"", groups, hashes, parents, EVERYTHING)
        reserved = self.outcome(pending)
        if reserved is None or self.pool.instance != self.client.instance:
            return
        given = [(block, slot) for block, slot in enumerate(reserved.slots, start) if slot > 0]
        for block, slot in given:
            data = pattern(block_hashes[block * m.HASH_BYTES : (block + 1) * m.HASH_BYTES])
            self.pool.buffer[slot * m.PAGE : (slot + BLOCK_PAGES) * m.PAGE] = data
        slots = [slot for _, slot in given]
        self.stored += len(slots)
        cut = len(slots) if self.random.random() < 0.7 else self.random.randrange(len(slots) + 1)
        self.client.commit(slots[:cut], pending.session)
        self.client.abort(slots[cut:], pending.session)

    def outcome(self, pending):
        pending.wait(30)
        return None if isinstance(pending.outcome, Failed) else pending.outcome


if __name__ == "__main__":
    busy = Busy(sys.argv[1], int(sys.argv[3]))
    try:
        busy.run(float(sys.argv[2]))
    except WrongBytes as error:
        print(f"wrong bytes: {error}", file=sys.stderr)
        sys.exit(3)
    print(busy.rounds, busy.loaded, busy.stored)
