"""The disk's tier process for tests and benchmarks, driven over a socketpair as by the store's server."""

import hashlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from vllm_kvtier import __version__
from vllm_kvtier.store import linux
from vllm_kvtier.store.index.types import ZERO
from vllm_kvtier.store.protocol import PAGE, GroupShape
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.main import Pool
from vllm_kvtier.wire.stream import read_frame, write_frame

ROOT = Path(__file__).resolve().parents[1]
NAMESPACE_ID = b"a space 16 bytes"
SHAPE = m.NamespaceShape(NAMESPACE_ID, 16, [GroupShape(hash_blocks_per_block=1, slot_pages=4)])


def name_of(number: int) -> bytes:
    return hashlib.blake2b(b"%d" % number, digest_size=16).digest()


def content_of(name: bytes, pages: int) -> bytes:
    """What the block of that name holds: its own, and every word of it tells which."""
    seed = np.frombuffer(name, "<u8")[0]
    words = np.arange(pages * PAGE // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ seed
    return words.tobytes()


def move_of(number: int, slot: int, pages: int, position: int, parent: bytes = ZERO) -> m.Move:
    return m.Move(NAMESPACE_ID, 0, name_of(number), parent, b"somebody", slot, pages, position)


def size_of(pages: int) -> int:
    """The size of a tier with a data file of so many pages: 2 % of it are for the journal."""
    return -(-pages * PAGE * 50 // 49)


def make_pool(nbytes: int) -> Pool:
    fd = linux.memfd_create("kvtier-test-pool")
    os.ftruncate(fd, nbytes)
    return Pool(fd, nbytes)


def fill(pool: Pool, move: m.Move) -> None:
    pool.view[move.slot * PAGE : (move.slot + move.pages) * PAGE] = content_of(move.hash, move.pages)


def holds(pool: Pool, move: m.Move) -> bool:
    return bytes(pool.view[move.slot * PAGE : (move.slot + move.pages) * PAGE]) == content_of(move.hash, move.pages)


class DiskTierProcess:
    """``kept``: its messages at the start; ``opened``: Opened or Refused."""

    def __init__(self, pool: Pool, options: dict, kind: str = "disk", seconds: float = 30.0, stderr=None):
        self.pool, self.seconds, self.last = pool, seconds, 0
        ours, theirs = socket.socketpair()
        self.socket = ours
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm_kvtier.store.tiers.process.main", f"--kind={kind}"),
                *(f"--socket={theirs.fileno()}", f"--pool={pool.fd}", f"--bytes={pool.nbytes}"),
            ],
            pass_fds=[theirs.fileno(), pool.fd],
            cwd=ROOT,
            stderr=stderr,
        )
        theirs.close()
        self.kept: list[m.Move] = []
        self.shapes: list[m.NamespaceShape] = []
        self.send(m.Open(options, pool.nbytes, __version__))
        while isinstance(said := self.hear(), m.Kept):
            self.kept += said.moves
            self.shapes += said.namespaces
        self.opened = said

    def send(self, message) -> None:
        self.socket.settimeout(self.seconds)
        write_frame(self.socket, m.encode(message))

    def hear(self):
        return m.decode_to_server(read_frame(self.socket, time.monotonic() + self.seconds, [], m.MAX_FRAME))

    def write(self, moves: list[m.Move], gone: list[int] = (), namespaces: list[m.NamespaceShape] = ()) -> int:
        self.last += 1
        self.send(m.Write(self.last, moves, list(gone), list(namespaces)))
        return self.last

    def read(self, moves: list[m.Move]) -> int:
        self.last += 1
        self.send(m.Read(self.last, 0, moves))
        return self.last

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(self.seconds)
        self.socket.close()

    def stop(self) -> int:
        self.socket.close()
        return self.process.wait(self.seconds)

    def __enter__(self) -> "DiskTierProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
