"""Copies over CUDA IPC out of a process that serves, that overwrites what it leases, and that is killed.

On two GPUs where there are two, else both processes on one.
"""

import multiprocessing
import os
import signal
from contextlib import contextmanager

import numpy as np
import peer_source as far
import pytest
import torch

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.transfer_jobs import GroupPull
from vllm_kvtier.shapes.tp_mapping import map_source_ranks
from vllm_kvtier.worker.integrity.checksums import BlockChecksums
from vllm_kvtier.worker.peer_fetch.base import CopyJob
from vllm_kvtier.worker.peer_fetch.cuda_copier import CudaPeerCopier

pytestmark = pytest.mark.gpu


class Reader:
    def __init__(self, info, device: torch.device):
        self.view = far.make_view(device)
        self.table = torch.full((far.BLOCKS,), -1, dtype=torch.int64, device=device)
        self.copier = CudaPeerCopier(self.view, self.table)
        self.parts = map_source_ranks(self.view.groups, far.HEAD_RANGES, 0, [info])
        self.copier.add("source", self.parts)

    def order(self, local, remote, lives) -> CopyJob:
        full = np.full(len(local), far.TOKENS, dtype=np.int32)
        return CopyJob("source", [GroupPull(0, local, remote, far.keys_of(remote, lives), full)])

    def check(self, job: CopyJob, lives: np.ndarray, bad: set[int]) -> int:
        """Accepted blocks are what their checksums say and what they were in those lives; how many there are."""
        pull = job.groups[0]
        good = np.array([i for i, block in enumerate(pull.local.tolist()) if block not in bad], dtype=np.int64)
        if not len(good):
            return 0
        device = self.view.device
        index = torch.from_numpy(pull.local[good]).to(device)
        checksums = BlockChecksums(self.view).compute(0, pull.local[good], pull.keys[good], pull.valid[good])
        assert torch.equal(checksums, self.table[index])
        remote, now = (torch.from_numpy(a[good]).to(device) for a in (pull.remote, lives))
        for layer in range(far.LAYERS):
            assert torch.equal(far.words(self.view, layer)[index], far.content(layer, remote, now))
        return len(good)


@contextmanager
def source(restless: bool = False, visible: str | None = None):
    """(pid, its pages, lives of its blocks, the device to read on)."""
    context = multiprocessing.get_context("spawn")
    lives = torch.zeros(far.BLOCKS, dtype=torch.int64).share_memory_()
    pipe, end = context.Pipe()
    child = context.Process(target=far.serve, args=(end, 0, lives, restless), daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        if visible is not None:
            patch.setenv("CUDA_VISIBLE_DEVICES", visible)
        child.start()
    end.close()
    try:
        assert pipe.poll(120), "the source does not start"
        pid, info = pipe.recv()
        mine = torch.device("cuda", 1 if torch.cuda.device_count() > 1 else 0)
        torch.cuda.set_device(mine)
        yield child, info, lives, mine
    finally:
        if child.is_alive():
            pipe.send(None)
            child.join(20)
        if child.exitcode is None:
            child.kill()
        torch.cuda.set_device(0)


@pytest.mark.parametrize("visible", [None, "0"], ids=["sees-all", "sees-its-own"])
def test_peer_process_blocks_are_copied_over_cuda_ipc(visible):
    with source(visible=visible) as (child, info, lives, device):
        reader = Reader(info, device)
        rng = np.random.default_rng(2)
        local, remote = rng.permutation(far.BLOCKS), rng.permutation(far.BLOCKS)
        now = lives.numpy()[remote].copy()
        now[3] += 1  # of another life than it is in
        copy = reader.copier.start([reader.order(local, remote, now)])
        after = torch.cuda.Stream(device)
        copy.wait_on(after)
        with torch.cuda.stream(after):
            seen = far.words(reader.view, far.LAYERS - 1).clone()
        assert copy.wait(10) and copy.bad(0) == {int(local[3])}
        after.synchronize()
        assert torch.equal(seen, far.words(reader.view, far.LAYERS - 1))
        assert reader.check(reader.order(local, remote, now), now, copy.bad(0)) == far.BLOCKS - 1
        assert reader.table[int(local[3])] == 0
        reader.copier.remove("source")
        with pytest.raises(KeyError):
            reader.copier.start([reader.order(local, remote, now)])
        reader.copier.add("source", reader.parts)
        copy = reader.copier.start([reader.order(local, remote, now)])
        assert copy.wait(10) and len(copy.bad(0)) == 1
        reader.copier.close()


def test_peer_process_overwriting_source_never_passes_wrong_block():
    with source(restless=True) as (child, info, lives, device):
        reader = Reader(info, device)
        rng = np.random.default_rng(3)
        accepted = refused = 0
        for _ in range(200):
            local, remote = rng.permutation(far.BLOCKS), rng.permutation(far.BLOCKS)
            now = lives.numpy()[remote].copy()
            job = reader.order(local, remote, now)
            copy = reader.copier.start([job])
            assert copy.wait(10)
            bad = copy.bad(0)
            accepted += reader.check(job, now, bad)
            refused += len(bad)
        print(f"accepted {accepted}, refused {refused} of {200 * far.BLOCKS}")
        assert accepted > 10 * far.BLOCKS and refused, "this shows nothing"
        reader.copier.close()


def test_peer_process_killed_during_read_raises_no_device_error():
    """No error on our device: a mapping keeps the memory. Then nothing of it can be mapped any more."""
    with source() as (child, info, lives, device):
        reader = Reader(info, device)
        rng = np.random.default_rng(4)
        local, remote = rng.permutation(far.BLOCKS), rng.permutation(far.BLOCKS)
        now = lives.numpy()[remote].copy()
        job = reader.order(local, remote, now)
        first = reader.copier.start([job])
        assert first.wait(10) and not first.bad(0)
        # Some 100 ms: each is larger than what the host needs to order it.
        copies = [reader.copier.start([job] * 8) for _ in range(60)]
        os.kill(child.pid, signal.SIGKILL)
        under_way = sum(not copy.done() for copy in copies)
        child.join(20)
        alive = sum(not copy.done() for copy in copies)
        assert all(copy.wait(20) for copy in copies)
        wrong = [len(copy.bad(number)) for copy in copies for number in range(8)]
        # The process is gone for good; what it left is read on.
        more = reader.copier.start([job])
        assert more.wait(10)
        print(
            f"{under_way} of {len(copies)} copies were under way when it was killed, {alive} when it was gone; blocks "
            f"refused: {sum(wrong)}, of those read later {len(more.bad(0))} of {far.BLOCKS}"
        )
        assert under_way
        reader.check(job, now, more.bad(0))
        reader.copier.remove("source")
        torch.cuda.synchronize()
        with pytest.raises(KVTierError, match="has ended"):
            reader.copier.add("source", reader.parts)
        assert torch.ones(1000, device=device).sum().item() == 1000
        reader.copier.close()
