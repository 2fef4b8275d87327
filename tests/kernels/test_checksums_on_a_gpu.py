"""Checksums behind a step's fence: ordered while the step computes, without waiting for it."""

import numpy as np
import pytest
import torch

from vllm_kvtier.jobs.transfer_jobs import ChecksumJob, GroupPull
from vllm_kvtier.wire.geometry import GroupView, Region
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.integrity.checksums import BlockChecksums
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory

BLOCKS, TOKENS, INNER = 8, 4, 64
LONG = 1 << 31  # cycles of an SM: about a second


@pytest.fixture
def memory() -> CacheMemory:
    device = torch.device("cuda", 0)
    cache = torch.randint(0, 256, (BLOCKS, TOKENS * INNER), dtype=torch.uint8, device=device)
    region = Region("a", cache.data_ptr(), TOKENS * INNER, 1, 0, 0, TOKENS, INNER, INNER)
    group = GroupView(0, TOKENS, "full", None, (region,))
    memory = CacheMemory(CacheView([group], BLOCKS, device, [cache.untyped_storage()]), host_buffer=False)
    # Whatever is used for the first time is compiled, loaded or allocated, and the host waits for that.
    for _ in range(2):
        cache.add_(1)
        _order(memory, None)
        memory.end_check(memory.begin_check([GroupPull(0, _blocks()[0], *_blocks())]))
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
    memory.table.zero_()
    memory.cache = cache
    return memory


def _blocks():
    ids = np.array([5, 1, 6], np.int64)
    return ids, np.array([7, 8, 9], np.uint64), np.full(3, TOKENS, np.int32)


def _order(memory: CacheMemory, fence: torch.cuda.Event | None):
    return memory.compute_checksums([ChecksumJob(0, *_blocks())], fence)


@pytest.mark.gpu
def test_checksum_launch_does_not_wait_for_step(memory):
    fence = torch.cuda.Event()
    torch.cuda._sleep(LONG)
    memory.cache.add_(1)  # what the step writes, last
    fence.record()
    pending = _order(memory, fence)
    assert not pending.done()
    torch.cuda.synchronize()
    assert pending.done()
    ids, keys, valid = _blocks()
    right = BlockChecksums(memory.view).compute(0, ids, keys, valid)
    assert torch.equal(memory.table[torch.from_numpy(ids).cuda()], right)
    assert int(memory.table.count_nonzero()) == 3


@pytest.mark.gpu
def test_verification_launch_does_not_wait_for_step(memory):
    _order(memory, None)
    torch.cuda.synchronize()
    memory.arrived.copy_(memory.table)
    memory.arrived[6] ^= 1
    torch.cuda.synchronize()
    ids, keys, valid = _blocks()
    with torch.cuda.stream(memory._stream):
        torch.cuda._sleep(LONG)
    check = memory.begin_check([GroupPull(0, ids, ids, keys, valid)])
    assert memory.end_check(check) is None
    torch.cuda.synchronize()
    assert memory.end_check(check) == {6}
