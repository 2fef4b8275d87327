"""The store's disk tier: its mover, the process that a store starts, asked as a store asks; blocks of 2.25 MiB.

Beside it what the disk does for plain threads with O_DIRECT at random places, as ``fio`` would find, and on the same
file system. What is written here is gone when this ends.
"""

import itertools
import mmap
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_kvtier.bench.row import Row, rates
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.runner import Pool
from vllm_kvtier.store.messages import PAGE, GroupShape
from vllm_kvtier.store.records import ZERO
from vllm_kvtier.wire.stream import read_frame, write_frame

BLOCK_PAGES = (9 << 18) // PAGE
BATCH = 14  # blocks of one message: 32 MiB, as the store makes them
PLAIN = 1 << 20  # bytes of one plain read or write
THREADS = 16
SPACE = b"kvtier bench 16b"
ANSWER_SECONDS = 120.0


class Mover:
    """The mover's process over a directory, with a tier full of blocks."""

    def __init__(self, folder: Path, nbytes: int):
        """Raises KVTierError with the mover's words if it cannot use the directory."""
        self._blocks = nbytes // (BLOCK_PAGES * PAGE)
        pool_bytes = (2 * BATCH * BLOCK_PAGES + 1) * PAGE
        self._fd = os.memfd_create("kvtier-bench", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, pool_bytes)
        self._pool = Pool(self._fd, pool_bytes)
        self._pool.view[:] = random.randbytes(1 << 20) * (pool_bytes >> 20) + bytes(pool_bytes % (1 << 20))
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(ANSWER_SECONDS)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm_kvtier.store.lower.runner", "--kind=disk"),
                *(f"--socket={theirs.fileno()}", f"--pool={self._fd}", f"--bytes={pool_bytes}"),
            ],
            pass_fds=[theirs.fileno(), self._fd],
        )
        theirs.close()
        self._ids, self._names = itertools.count(1), itertools.count(1)
        self._there: dict[int, bytes] = {}  # block number -> name
        options = {"path": str(folder), "size": (self._blocks * BLOCK_PAGES + 2) * PAGE}
        self._tell(m.Open(options, pool_bytes))
        while isinstance(said := self._hear(), m.Kept):
            continue
        if not isinstance(said, m.Opened):
            self.close()
            raise KVTierError(f"the disk tier cannot use {folder}: {getattr(said, 'reason', said)}")
        self.note = said.note
        for at in range(0, self._blocks, BATCH):
            self._tell(self._write(list(range(at, min(at + BATCH, self._blocks))), 0))
            self._answer()

    def read(self, seconds: float) -> tuple[int, float]:
        return self._run(self._read, seconds)

    def write(self, seconds: float) -> tuple[int, float]:
        """Each in the place of another, with its journal and its syncs."""
        return self._run(self._write, seconds)

    def _run(self, make: Callable[[list[int], int], m.Read | m.Write], seconds: float) -> tuple[int, float]:
        begun, moved = time.perf_counter(), 0
        free, under_way = [0, 1], {}  # halves of the pool: as a store, two batches under way
        while under_way or time.perf_counter() - begun < seconds or not moved:
            more = time.perf_counter() - begun < seconds or not moved
            if more and free:
                # Not blocks of the other batch: a store writes and reads each only once at a time.
                busy = {block for _, blocks in under_way.values() for block in blocks}
                rest = [block for block in range(self._blocks) if block not in busy]
                half, blocks = free.pop(), random.sample(rest, min(BATCH, len(rest)))
                message = make(blocks, half)
                under_way[message.id] = half, blocks
                self._tell(message)
                moved += len(blocks) * BLOCK_PAGES * PAGE
            else:
                half, _ = under_way.pop(self._answer())
                free.append(half)
        return moved, time.perf_counter() - begun

    def _write(self, blocks: list[int], bank: int) -> m.Write:
        gone = [self._place(block) for block in blocks if block in self._there]
        for block in blocks:
            self._there[block] = next(self._names).to_bytes(16, "big")
        return m.Write(next(self._ids), self._moves(blocks, bank), gone, [m.SpaceShape(SPACE, 16, [SHAPE])])

    def _read(self, blocks: list[int], bank: int) -> m.Read:
        return m.Read(next(self._ids), 0, self._moves(blocks, bank))

    def _moves(self, blocks: list[int], bank: int) -> list[m.Move]:
        slots = (1 + (bank * BATCH + n) * BLOCK_PAGES for n in range(len(blocks)))
        return [
            m.Move(SPACE, 0, self._there[block], ZERO, b"", slot, BLOCK_PAGES, self._place(block))
            for block, slot in zip(blocks, slots, strict=True)
        ]

    def _place(self, block: int) -> int:
        return 1 + block * BLOCK_PAGES

    def _answer(self) -> int:
        """The message that is done."""
        answer = self._hear()
        if not isinstance(answer, m.Moved) or not all(answer.good):
            raise KVTierError(f"the disk tier failed: {getattr(answer, 'error', answer)}")
        return answer.id

    def _tell(self, message) -> None:
        write_frame(self._socket, m.encode(message))

    def _hear(self):
        try:
            return m.decode_to_server(read_frame(self._socket, time.monotonic() + ANSWER_SECONDS, [], m.MAX_FRAME))
        except (EOFError, OSError) as error:
            raise KVTierError(f"the disk tier's process ended: {error or type(error).__name__}") from error

    def close(self) -> None:
        self._socket.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._fd)


SHAPE = GroupShape(units=1, slot_pages=BLOCK_PAGES)


class Plain:
    """Threads, and one unnamed file."""

    def __init__(self, folder: Path, nbytes: int):
        self._pieces = nbytes // PLAIN
        self._fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._fd, 0, self._pieces * PLAIN)
            path = f"/proc/self/fd/{self._fd}"
            try:
                self._direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            except OSError:  # this file system has no O_DIRECT: then neither goes round the page cache
                self._direct = os.dup(self._fd)
            self._threads = ThreadPoolExecutor(THREADS)
            self._buffers = [mmap.mmap(-1, PLAIN) for _ in range(THREADS)]
            for buffer in self._buffers:
                buffer.write(random.randbytes(PLAIN))
            for at in range(0, self._pieces, THREADS):
                self._round(os.pwritev, range(at, min(at + THREADS, self._pieces)))
            os.fdatasync(self._direct)
        except OSError as error:
            os.close(self._fd)
            raise KVTierError(f"{folder} has no room for {nbytes >> 20} MiB: {error.strerror}") from error

    def read(self, seconds: float) -> tuple[int, float]:
        return self._run(os.preadv, seconds, False)

    def write(self, seconds: float) -> tuple[int, float]:
        """With a sync for as many as the mover syncs at once."""
        return self._run(os.pwritev, seconds, True)

    def _run(self, call, seconds: float, sync: bool) -> tuple[int, float]:
        begun, moved = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds or not moved:
            places = random.sample(range(self._pieces), min(2 * THREADS, self._pieces))
            moved += self._round(call, places)
            if sync:
                os.fdatasync(self._direct)
        return moved, time.perf_counter() - begun

    def _round(self, call, places) -> int:
        places = list(places)

        def one(n: int) -> int:
            return sum(call(self._direct, [self._buffers[n]], place * PLAIN) for place in places[n::THREADS])

        return sum(self._threads.map(one, range(THREADS)))

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._direct)
        os.close(self._fd)


def measure(seconds: float, folder: Path, nbytes: int = 512 << 20) -> list[Row]:
    """``folder``: where; ``nbytes``: written there, twice. Raises KVTierError if it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        place = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=folder))
    except OSError as error:
        raise KVTierError(f"{folder} cannot be written to: {error.strerror}") from error
    try:
        mover = Mover(place / "tier", nbytes)
        try:
            plain = Plain(place, nbytes)
            try:
                ways = {"plain read": plain.read, "read": mover.read, "plain write": plain.write, "write": mover.write}
                found = rates(ways, seconds)
            finally:
                plain.close()
        finally:
            mover.close()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    word = f"{THREADS} threads of plain O_DIRECT"
    return [Row("disk", way, found[way], found[f"plain {way}"], word, mover.note) for way in ("read", "write")]
