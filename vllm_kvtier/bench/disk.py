"""The store's disk tier: its tier process with the requests of a store, in blocks of 2.25 MiB.

The limit is the rate of plain threads with O_DIRECT at random positions of the same file system, as of ``fio``. The
files are removed at the end.
"""

import contextlib
import itertools
import mmap
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_kvtier import __version__
from vllm_kvtier.bench.row import Row, rates
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import linux
from vllm_kvtier.store.index.types import ZERO
from vllm_kvtier.store.launcher import package_environment, run_module
from vllm_kvtier.store.protocol import PAGE, GroupShape
from vllm_kvtier.store.tiers.disk.file_ops import Files
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.main import Pool
from vllm_kvtier.wire.stream import read_frame, write_frame

BLOCK_PAGES = (9 << 18) // PAGE
BATCH_BLOCKS = 14  # of one message: 32 MiB, as the store makes them
PLAIN_BYTES = 1 << 20  # of one plain read or write
THREADS = 16
NAMESPACE_ID = b"kvtier bench 16b"
ANSWER_SECONDS = 120.0


class DiskTierClient:
    """The tier process of a directory, with a tier full of blocks."""

    def __init__(self, folder: Path, nbytes: int):
        """Raises KVTierError with the tier process's reason if it cannot use the directory."""
        pool_bytes = (2 * BATCH_BLOCKS * BLOCK_PAGES + 1) * PAGE
        self._fd = linux.memfd_create("kvtier-bench")
        os.ftruncate(self._fd, pool_bytes)
        self._pool = Pool(self._fd, pool_bytes)
        self._pool.view[:] = random.randbytes(1 << 20) * (pool_bytes >> 20) + bytes(pool_bytes % (1 << 20))
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(ANSWER_SECONDS)
        self._process = subprocess.Popen(
            [
                *(*run_module("vllm_kvtier.store.tiers.process.main"), "--kind=disk"),
                *(f"--socket={theirs.fileno()}", f"--pool={self._fd}", f"--bytes={pool_bytes}"),
            ],
            env=package_environment(),
            pass_fds=[theirs.fileno(), self._fd],
        )
        theirs.close()
        self._ids, self._names = itertools.count(1), itertools.count(1)
        self._there: dict[int, bytes] = {}  # block number -> name
        try:
            self._fill(folder, nbytes, pool_bytes)
        except BaseException:
            self.close()
            raise

    def _fill(self, folder: Path, nbytes: int, pool_bytes: int) -> None:
        self._send(m.Open({"path": str(folder), "size": nbytes}, pool_bytes, __version__))
        while isinstance(reply := self._receive(), m.Kept):
            continue
        if not isinstance(reply, m.Opened):
            raise KVTierError(f"the disk tier cannot use {folder}: {getattr(reply, 'reason', reply)}")
        self.note, self._blocks = reply.note, (reply.capacity_pages - 1) // BLOCK_PAGES
        if not self._blocks:
            raise KVTierError(f"the disk tier cannot use {folder}: {self.note}")
        for at in range(0, self._blocks, BATCH_BLOCKS):
            self._send(self._write(list(range(at, min(at + BATCH_BLOCKS, self._blocks))), 0))
            self._answer()

    def read(self, seconds: float) -> tuple[int, float]:
        return self._run(self._read, seconds)

    def write(self, seconds: float) -> tuple[int, float]:
        """Overwrite blocks, with journal and syncs."""
        return self._run(self._write, seconds)

    def _run(self, make: Callable[[list[int], int], m.Read | m.Write], seconds: float) -> tuple[int, float]:
        begun, moved = time.perf_counter(), 0
        free, under_way = [0, 1], {}  # halves of the pool: two batches under way, as in a store
        while under_way or time.perf_counter() - begun < seconds or not moved:
            more = time.perf_counter() - begun < seconds or not moved
            if more and free:
                # A store has one operation for a block at a time, so not blocks of the other batch.
                busy = {block for _, blocks in under_way.values() for block in blocks}
                rest = [block for block in range(self._blocks) if block not in busy]
                half, blocks = free.pop(), random.sample(rest, min(BATCH_BLOCKS, len(rest)))
                message = make(blocks, half)
                under_way[message.id] = half, blocks
                self._send(message)
                moved += len(blocks) * BLOCK_PAGES * PAGE
            else:
                half, _ = under_way.pop(self._answer())
                free.append(half)
        return moved, time.perf_counter() - begun

    def _write(self, blocks: list[int], bank: int) -> m.Write:
        gone = [self._position(block) for block in blocks if block in self._there]
        for block in blocks:
            self._there[block] = next(self._names).to_bytes(16, "big")
        return m.Write(next(self._ids), self._moves(blocks, bank), gone, [m.NamespaceShape(NAMESPACE_ID, 16, [SHAPE])])

    def _read(self, blocks: list[int], bank: int) -> m.Read:
        return m.Read(next(self._ids), 0, self._moves(blocks, bank))

    def _moves(self, blocks: list[int], bank: int) -> list[m.Move]:
        slots = (1 + (bank * BATCH_BLOCKS + n) * BLOCK_PAGES for n in range(len(blocks)))
        return [
            m.Move(NAMESPACE_ID, 0, self._there[block], ZERO, b"", slot, BLOCK_PAGES, self._position(block))
            for block, slot in zip(blocks, slots, strict=True)
        ]

    def _position(self, block: int) -> int:
        return 1 + block * BLOCK_PAGES

    def _answer(self) -> int:
        """The id of the message that is done."""
        answer = self._receive()
        if not isinstance(answer, m.Moved) or not all(answer.good):
            raise KVTierError(f"the disk tier failed: {getattr(answer, 'error', answer)}")
        return answer.id

    def _send(self, message) -> None:
        write_frame(self._socket, m.encode(message))

    def _receive(self):
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


SHAPE = GroupShape(hash_blocks_per_block=1, slot_pages=BLOCK_PAGES)


class Plain:
    """Threads that read and write one unnamed file."""

    def __init__(self, folder: Path, nbytes: int):
        self._pieces = nbytes // PLAIN_BYTES
        self._fd = os.open(folder, linux.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._fd, 0, self._pieces * PLAIN_BYTES)
            path = f"/proc/self/fd/{self._fd}"
            try:
                self._direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            except OSError:  # this file system has no O_DIRECT, so that both use the page cache
                self._direct = os.dup(self._fd)
            self._threads = ThreadPoolExecutor(THREADS)
            self._buffers = [mmap.mmap(-1, PLAIN_BYTES) for _ in range(THREADS)]
            for buffer in self._buffers:
                buffer.write(random.randbytes(PLAIN_BYTES))
            for at in range(0, self._pieces, THREADS):
                self._round(os.pwritev, range(at, min(at + THREADS, self._pieces)))
            os.fdatasync(self._direct)
        except OSError as error:
            os.close(self._fd)
            raise KVTierError(f"{folder} has no room for {nbytes >> 20} MiB: {error.strerror}") from error

    def read(self, seconds: float) -> tuple[int, float]:
        return self._run(os.preadv, seconds, False)

    def write(self, seconds: float) -> tuple[int, float]:
        """With a sync for as many blocks as the tier process syncs at once."""
        return self._run(os.pwritev, seconds, True)

    def _run(self, call, seconds: float, sync: bool) -> tuple[int, float]:
        begun, moved = time.perf_counter(), 0
        while time.perf_counter() - begun < seconds or not moved:
            positions = random.sample(range(self._pieces), min(2 * THREADS, self._pieces))
            moved += self._round(call, positions)
            if sync:
                os.fdatasync(self._direct)
        return moved, time.perf_counter() - begun

    def _round(self, call, positions) -> int:
        positions = list(positions)

        def one(n: int) -> int:
            mine = positions[n::THREADS]
            return sum(call(self._direct, [self._buffers[n]], position * PLAIN_BYTES) for position in mine)

        return sum(self._threads.map(one, range(THREADS)))

    def close(self) -> None:
        self._threads.shutdown()
        os.close(self._direct)
        os.close(self._fd)


@contextlib.contextmanager
def _own_folder(folder: Path) -> Iterator[Path]:
    """A new folder in ``folder``, which is made as a tier makes its own. What was made is removed at the end."""
    with contextlib.ExitStack() as made:
        try:
            if Files().make_folder(str(folder)):
                made.callback(_remove_if_empty, folder)  # a store may use it by then
            own = Path(tempfile.mkdtemp(prefix="kvtier-bench-", dir=folder))
        except OSError as error:
            raise KVTierError(f"{folder} cannot be written to: {error.strerror}") from error
        made.callback(shutil.rmtree, own, ignore_errors=True)
        yield own


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def measure(seconds: float, folder: Path, nbytes: int = 512 << 20) -> list[Row]:
    """Write ``nbytes`` to ``folder``, twice. Raises KVTierError if that fails."""
    with _own_folder(folder) as own:
        tier = DiskTierClient(own / "tier", nbytes)
        try:
            plain = Plain(own, nbytes)
            try:
                ways = {"plain read": plain.read, "read": tier.read, "plain write": plain.write, "write": tier.write}
                found = rates(ways, seconds)
            finally:
                plain.close()
        finally:
            tier.close()
    word = f"{THREADS} threads of plain O_DIRECT"
    return [Row("disk", way, found[way], found[f"plain {way}"], word, tier.note) for way in ("read", "write")]
