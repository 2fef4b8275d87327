"""Clients of the node store for its tests: one that blocks, and a process that keeps the store busy and checks it.

    python tests/store_support.py PATH SECONDS SEED     the process; it says when it is connected, and how much it
                                                        did; exit status 3: a leased slot held wrong bytes
"""

import hashlib
import os
import random
import socket
import sys
import time

from vllm_kvtier.store import messages as m
from vllm_kvtier.store.client import Failed, StoreClient
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.stream import read_frame, write_frame

SPACE = b"a space 16 bytes"
EVERYTHING = 1 << 40  # a pages_limit
BLOCK_PAGES = 4


def chain_of(*lengths_and_names: tuple[int, object]) -> bytes:
    """A chain of hashes: so many units that follow from a name, then so many of another, each from all before."""
    hashes, last = [], b""
    for length, name in lengths_and_names:
        for number in range(length):
            last = hashlib.blake2b(last + repr((name, number)).encode(), digest_size=m.HASH).digest()
            hashes.append(last)
    return b"".join(hashes)


def items_of(chain: bytes, start: int = 0) -> tuple[list[int], bytes, bytes]:
    """(groups, hashes, parents) of a Reserve for blocks ``start`` and later of a chain; one group, one unit a block."""
    hashes = chain[start * m.HASH :]
    before = chain[(start - 1) * m.HASH : start * m.HASH] if start else m.NO_PARENT
    return [0] * (len(hashes) // m.HASH), hashes, (before + hashes[: -m.HASH])


def engine_hello(name: str = "engine", pages: int = BLOCK_PAGES) -> m.Hello:
    return m.Hello(name, os.getpid(), "engine", unit_tokens=16, groups=[m.GroupShape(units=1, slot_pages=pages)])


def tool_hello() -> m.Hello:
    return m.Hello("test", os.getpid(), "tool")


class RawClient:
    """A connection that blocks: says what it is told to, also nonsense, and reads what comes."""

    def __init__(self, path: str, hello: m.Hello | None = None, seconds: float = 10.0):
        self.seconds, self.fds = seconds, []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(seconds)
        self.socket.connect(path)
        self.welcome = self.ask(hello) if hello is not None else None

    def tell(self, message) -> None:
        write_frame(self.socket, message if isinstance(message, bytes) else m.encode(message))

    def hear(self):
        """The next message that is not Ready."""
        while True:
            reply = m.decode_reply(read_frame(self.socket, time.monotonic() + self.seconds, self.fds))
            if not isinstance(reply, m.Ready):
                return reply

    def ask(self, message):
        self.tell(message)
        return self.hear()

    def ended(self) -> bool:
        """Waits for the end of the connection."""
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True

    def lookup(self, chain: bytes, start: int = 0) -> m.Found:
        return self.ask(m.Lookup(1, SPACE, chain, start, EVERYTHING))

    def reserve(self, chain: bytes, start: int = 0) -> list[int]:
        groups, hashes, parents = items_of(chain, start)
        return self.ask(m.Reserve(2, SPACE, b"", groups, hashes, parents, EVERYTHING)).slots

    def store(self, chain: bytes) -> list[int]:
        """Reserve and commit; the slots given. Everybody can find them on return."""
        slots = [slot for slot in self.reserve(chain) if slot > 0]
        self.tell(m.Commit(slots))
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
    return block_hash * (BLOCK_PAGES * m.PAGE // m.HASH)


class WrongBytes(Exception):
    pass


class Busy:
    """Looks up, checks, reserves, writes, commits, aborts and forgets to, at random, over chains shared by all."""

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
                time.sleep(0.01)  # the store is being restarted by somebody else
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
        chain = chain_of((8, conversation % 6), (self.random.randrange(1, 40), conversation))
        units = len(chain) // m.HASH
        pending = self.client.lookup(SPACE, chain, 0, EVERYTHING)
        found = self.outcome(pending)
        if found is None or pending.session != self.client.session or self.pool.instance != self.client.instance:
            return
        if found.units:
            self.check(chain, found.slots[0], pending.session)
            self.held.append((found.lease, pending.session))
        while self.held and (len(self.held) > 4 or self.random.random() < 0.7):
            self.client.release(*self.held.pop(self.random.randrange(len(self.held))))
        if found.units < units:
            self.store(chain, found.units)
        if self.random.random() < 0.02:
            self.outcome(self.client.clear(SPACE) if self.random.random() < 0.1 else self.client.stat())
        if self.random.random() < 0.05:
            self.outcome(self.client.pin(SPACE, chain, self.random.random() < 0.5))

    def check(self, chain: bytes, slots: list[int], session: int) -> None:
        for block, slot in enumerate(slots):
            there = self.pool.buffer[slot * m.PAGE : (slot + BLOCK_PAGES) * m.PAGE]
            if there != pattern(chain[block * m.HASH : (block + 1) * m.HASH]):
                if self.client.session != session:
                    return  # the lease ended meanwhile
                raise WrongBytes(f"block {block} in slot {slot}")
            self.loaded += 1

    def store(self, chain: bytes, start: int) -> None:
        groups, hashes, parents = items_of(chain, start)
        pending = self.client.reserve(SPACE, b"", groups, hashes, parents, EVERYTHING)
        reserved = self.outcome(pending)
        if reserved is None or self.pool.instance != self.client.instance:
            return
        given = [(block, slot) for block, slot in enumerate(reserved.slots, start) if slot > 0]
        for block, slot in given:
            data = pattern(chain[block * m.HASH : (block + 1) * m.HASH])
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
