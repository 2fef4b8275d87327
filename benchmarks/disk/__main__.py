"""Bandwidth of the disk's tier process and of fio, in the same directory, in alternating rounds.

    python benchmarks/disk [--folder DIR] [--gib 4] [--rounds 5]       writes benchmarks/results/disk.json

The tier process is driven over its socket as by the store: Read and Write messages of at most 32 MiB or 256 blocks at
random positions, with two Reads or one Write (for "two writes", two) under way. A Write evicts the old blocks in the
journal, syncs its data, and then the journal again. fio: libaio, O_DIRECT, the same block sizes, the queue depth of one
batch, and an fdatasync for the writes of one batch.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from disk_support import DiskTierProcess, make_pool, name_of  # noqa: E402

from vllm_kvtier.store.index.types import ZERO  # noqa: E402
from vllm_kvtier.store.protocol import PAGE  # noqa: E402
from vllm_kvtier.store.tiers.disk.data_file import PIECE_BYTES, WINDOW_PIECES  # noqa: E402
from vllm_kvtier.store.tiers.process import protocol as m  # noqa: E402
from vllm_kvtier.wire.stream import write_frame  # noqa: E402

SIZES = {"64 KiB": 64 << 10, "256 KiB": 256 << 10, "1 MiB": 1 << 20, "2.25 MiB": 9 << 18}
BATCH_BYTES, BATCH_BLOCKS = 32 << 20, 256
KERNEL_QUEUE = 1024  # of NIXL's POSIX backend
NAMESPACE_ID = b"a space 16 bytes"


def batch_of(size: int) -> int:
    return min(BATCH_BLOCKS, BATCH_BYTES // size)


class Ours:
    """A tier process with a tier full of blocks of one size."""

    def __init__(self, folder: Path, size: int, nbytes: int, seed: int, options: dict):
        self.size, self.pages, self.rng = size, size // PAGE, random.Random(seed)
        self.batch = batch_of(size)
        self.pool = make_pool(4 * self.batch * size + (2 << 20))
        self.pool.view[:] = random.Random(seed).randbytes(1 << 20) * (self.pool.nbytes >> 20) + bytes(
            self.pool.nbytes % (1 << 20)
        )
        self.process = DiskTierProcess(self.pool, {"path": str(folder), "size": nbytes, **options})
        assert isinstance(self.process.opened, m.Opened), self.process.opened
        self.blocks = (self.process.opened.capacity_pages - 1) // self.pages
        self.name, self.id = 0, 0
        self.names = [0] * self.blocks
        order = list(range(self.blocks))
        self._run([self._write(order[at : at + self.batch], 0) for at in range(0, self.blocks, self.batch)], 1)

    def _place(self, block: int) -> int:
        return 1 + block * self.pages

    def _slot(self, bank: int, number: int) -> int:
        return 1 + (bank * self.batch + number) * self.pages

    def _write(self, blocks: list[int], bank: int) -> m.Write:
        moves, gone = [], []
        for number, block in enumerate(blocks):
            if self.names[block]:
                gone.append(self._place(block))
            self.name += 1
            self.names[block] = self.name
            name = name_of(self.name)
            moves.append(
                m.Move(NAMESPACE_ID, 0, name, ZERO, b"", self._slot(bank, number), self.pages, self._place(block))
            )
        self.id += 1
        return m.Write(self.id, moves, gone)

    def _read(self, blocks: list[int], bank: int) -> m.Read:
        self.id += 1
        moves = [
            m.Move(NAMESPACE_ID, 0, name_of(self.names[b]), ZERO, b"", self._slot(bank, n), self.pages, self._place(b))
            for n, b in enumerate(blocks)
        ]
        return m.Read(self.id, 0, moves)

    def _run(self, messages: list, depth: int) -> float:
        """Seconds for all messages, with a limited number under way."""
        frames = [m.encode(message) for message in messages]
        self.process.socket.settimeout(60)
        begun = time.perf_counter()
        answered: set[int] = set()
        for number, frame in enumerate(frames):
            if number >= depth:
                self._wait(messages[number - depth].id, answered)  # its slots are used again
            write_frame(self.process.socket, frame)
        for message in messages[-depth:]:
            self._wait(message.id, answered)
        return time.perf_counter() - begun

    def _wait(self, number: int, answered: set[int]) -> None:
        while number not in answered:
            answer = self.process.hear()
            assert all(answer.good), answer.error
            answered.add(answer.id)

    def rate(self, op: str, nbytes: int, depth: int) -> float:
        """GB/s."""
        batches = max(depth, nbytes // (self.batch * self.size))
        blocks = self.rng.sample(range(self.blocks), min(self.blocks, batches * self.batch))
        make = self._read if op == "read" else self._write
        parts = [blocks[at : at + self.batch] for at in range(0, len(blocks), self.batch)]
        messages = [make(part, number % depth) for number, part in enumerate(parts)]
        return len(blocks) * self.size / self._run(messages, depth) / 1e9

    def stop(self) -> None:
        self.process.stop()


def fio(path: Path, op: str, size: int, nbytes: int, amount: int) -> float:
    depth = min(KERNEL_QUEUE, max(1, WINDOW_PIECES * PIECE_BYTES // size))
    command = [
        *("fio", "--name=x", f"--filename={path}", "--ioengine=libaio", "--direct=1", f"--rw=rand{op}"),
        *(f"--bs={size}", f"--iodepth={depth}", f"--size={nbytes // size * size}", f"--io_size={amount}"),
        *("--output-format=json", "--norandommap", "--randrepeat=0", "--allow_file_create=0"),
        *([f"--fdatasync={batch_of(size)}"] if op == "write" else []),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    job = json.loads(done.stdout)["jobs"][0][op]
    return job["io_bytes"] / (job["runtime"] / 1e3) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("/tmp/kvtier-bench-disk"))
    parser.add_argument("--gib", type=float, default=4.0, help="of the tier and of fio's file")
    parser.add_argument("--round-gib", type=float, default=2.0, help="moved in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/disk.json")
    arguments = parser.parse_args()
    nbytes, amount = int(arguments.gib * (1 << 30)), int(arguments.round_gib * (1 << 30))
    shutil.rmtree(arguments.folder, ignore_errors=True)
    arguments.folder.mkdir(parents=True)
    results = []
    print(f"{'block':>9} {'':10} {'fio':>6} {'ours':>6} {'ratio':>6}   GB/s, medians")
    try:
        target = arguments.folder / "fio"
        fill = ["fio", "--name=fill", f"--filename={target}", f"--size={nbytes}", "--rw=write", "--bs=4M", "--direct=1"]
        subprocess.run([*fill, "--ioengine=libaio", "--iodepth=8"], check=True, capture_output=True)
        for name in arguments.sizes:
            size = SIZES[name]
            folder = arguments.folder / "tier"
            shutil.rmtree(folder, ignore_errors=True)
            ours = Ours(folder, size, nbytes, 1, {"backend": arguments.backend})
            kinds = {"read": ("read", 2), "write": ("write", 1), "two writes": ("write", 2)}
            rates: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
            for number in range(arguments.rounds):
                for kind, (op, depth) in kinds.items():
                    # Who is first changes: a disk has moods.
                    if number % 2:
                        mine = ours.rate(op, amount, depth)
                    its = fio(target, op, size, nbytes, amount)
                    if not number % 2:
                        mine = ours.rate(op, amount, depth)
                    rates[kind].append((its, mine))
            ours.stop()
            for kind, pairs in rates.items():
                its, mine = (statistics.median(column) for column in zip(*pairs, strict=True))
                ratio = statistics.median(b / a for a, b in pairs)
                results.append({"block": size, "kind": kind, "fio": its, "ours": mine, "ratio": ratio, "rounds": pairs})
                print(f"{name:>9} {kind:10} {its:6.2f} {mine:6.2f} {ratio:6.2f}", flush=True)
    finally:
        shutil.rmtree(arguments.folder, ignore_errors=True)
    about = {"cores": os.cpu_count(), "kernel": os.uname().release, "bytes": nbytes, "rounds": arguments.rounds}
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
