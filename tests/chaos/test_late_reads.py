"""A peer that hangs in the middle of a pull and comes back when its blocks are another request's, with NIXL over
TCP."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import pytest
import torch
from support import eventually, stop

from vllm_kvtier.jobs.transfer_jobs import ChecksumJob, GroupPull, PullJob
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory
from vllm_kvtier.worker.nixl_pull.nixl_transport import NixlTransport
from vllm_kvtier.worker.nixl_pull.pulls import Pulls

PAGE, BLOCKS, LAYERS = 1 << 20, 65, 2
ROLE = "KVTIER_LATE_READS_ROLE"


def memory() -> CacheMemory:
    """130 MiB: over TCP, some 100 ms."""
    pages = torch.zeros((LAYERS, BLOCKS, PAGE), dtype=torch.uint8)
    regions = tuple(Region(f"l{n}", pages[n].data_ptr(), PAGE, 1, PAGE, 0, 4, PAGE // 4, PAGE // 4) for n in range(2))
    view = CacheView([GroupView(0, 4, "full", None, regions)], BLOCKS, pages.device, [pages.untyped_storage()])
    return CacheMemory(view, host_buffer=False)


def pages(of: CacheMemory) -> list[np.ndarray]:
    """A layer each: uint8[blocks, page]."""
    made = []
    for region in of.view.groups[0].regions:
        memory = (ctypes.c_uint8 * (PAGE * BLOCKS)).from_address(region.base)
        made.append(np.frombuffer(memory, np.uint8).reshape(BLOCKS, PAGE))
    return made


def paint(layers: list[np.ndarray], value: int) -> None:
    for layer in layers:
        layer[:] = value


def share(layers: list[np.ndarray], value: int) -> float:
    """Of what has this value, in samples."""
    return float(np.mean([layer[:, :: 64 << 10] == value for layer in layers]))


def info_of(name: str, transport: NixlTransport, kept: CacheMemory) -> m.RankInfo:
    return m.RankInfo(
        0, name, transport.metadata(), "DRAM", 0, BLOCKS, kept.transfer_view.groups, kept.geometry(),
        kept.table.data_ptr(),
    )  # fmt: skip


def source(name: str) -> None:
    """Serve pages of nothing but 7 until standard input ends."""
    kept, transport = memory(), NixlTransport(name, ["UCX"])
    paint(pages(kept), 7)
    ids = np.arange(1, BLOCKS)
    kept.compute_checksums([ChecksumJob(0, ids, ids.astype(np.uint64), np.full(len(ids), 4, np.int32))], None)
    kept.register(transport)
    print(json.dumps(msgspec.msgpack.encode(info_of(name, transport, kept)).hex()), flush=True)
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    while not over.wait(100e-6):
        transport.progress()
    os._exit(0)


@pytest.fixture
def start():
    started = []

    def start(name: str) -> tuple[subprocess.Popen, m.RankInfo]:
        process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, ROLE: name, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        for line in process.stdout:
            if line.startswith('"'):
                return process, msgspec.msgpack.decode(bytes.fromhex(json.loads(line)), type=m.RankInfo)
        raise AssertionError("the source did not start")

    yield start
    for process in started:
        process.kill()
        process.wait()


def order(name: str, source: str, ids, seconds: float) -> PullJob:
    ids = np.array(ids)
    return PullJob(
        name, source, [GroupPull(0, ids, ids, ids.astype(np.uint64), np.full(len(ids), 4, np.int32))], seconds
    )


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(signal.SIGSTOP, id="stopped"),
        pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.slow),
    ],
)
def test_late_read_of_hung_peer_writes_no_block(start, monkeypatch, end):
    pytest.importorskip("nixl")
    monkeypatch.setenv("UCX_TLS", "tcp")  # else UCX sees one machine, and reads the peer's memory without it
    process, first = start("first")
    _, second = start("second")
    kept, transport = memory(), NixlTransport("reader", ["UCX"])
    mine = pages(kept)
    kept.register(transport)
    pulls = Pulls(transport, kept, 0)
    pulls.add_engine("first", [first])
    pulls.add_engine("second", [second])

    def whole(name: str, ids) -> None:
        assert pulls.start(order(name, name, ids, 20.0)) is None
        [result] = eventually(pulls.poll, 20)
        assert not result.failed, result.reason

    for name in ("first", "second"):
        whole(name, [1, 2])
    paint(mine, 1)
    assert pulls.start(order("stuck", "first", range(1, BLOCKS), 2.0)) is None
    assert eventually(lambda: pulls.poll() or share(mine, 7) > 0, 10) is True, "it comes within its time"
    stop(process.pid) if end == signal.SIGSTOP else process.kill()
    assert share(mine, 7) < 0.9, "in the middle"
    began = time.monotonic()
    results = {}
    while "stuck" not in results:
        results |= {result.request_id: result for result in pulls.poll()}
        assert time.monotonic() - began < 20
    assert results["stuck"].failed and results["stuck"].bad_blocks == set(range(1, BLOCKS)) and not pulls.active
    assert not pulls.connected("second"), "the agent that read has ended"
    paint(mine, 3)  # the blocks are others' by now
    os.kill(process.pid, signal.SIGCONT)
    again = time.monotonic() + 0.5
    while time.monotonic() < again:
        whole("second", [5, 6])  # with it comes whatever else is there for the reader
    others = [layer[[i for i in range(BLOCKS) if i not in (5, 6)]] for layer in mine]
    late = sum(int((layer != 3).sum()) for layer in others)
    assert not late, f"{late} bytes came late"
    assert all((layer[5:7] == 7).all() for layer in mine)


if __name__ == "__main__":
    source(os.environ[ROLE])
