"""A staged pull whose blocks the kernel takes from the ring, in the interpreter: the ring is memory of this process."""

import pytest
from staged_support import StagedPair
from test_peer_cuda_copier import SHAPE, IpcDriver, faked

from vllm_kvtier.worker.nixl_pull import staged_reads
from vllm_kvtier.worker.peer_fetch.cuda_copier import CudaPeerCopier


@pytest.mark.parametrize("theirs, chunk_bytes", [(1, 1), (1, 1 << 16), (4, 1 << 12)])
def test_staged_pull_by_kernel_equals_reference(monkeypatch, theirs, chunk_bytes):
    with faked() as world:
        driver = IpcDriver()

        def copier(memory):
            mappings = staged_reads._OwnDeviceMemory()
            return CudaPeerCopier(memory.view, memory.table, SHAPE, driver=driver, mappings=mappings)

        monkeypatch.setattr(staged_reads, "_copier", copier)
        monkeypatch.setattr(staged_reads, "CHUNK_BYTES", chunk_bytes)
        pair = StagedPair(tp=theirs)
        # A word that counts, of a rank that is read.
        rank = pair.source[0]
        rank.view.pages(rank.view.groups[0].regions[2])[10, 0, 3, 15] ^= 64
        assert pair.start([1, 3, 5, 7], [4, 2, 10, 6]) is None
        results = []
        while not results:
            results += pair.pulls.poll()
            world.run()
        assert results[0].bad_blocks == {5} and results[0].checksum_mismatch
        assert all(map(pair.landed, [1, 3, 7], [4, 2, 6]))
        assert pair.free_chunks == staged_reads.NUM_CHUNKS
        pair.pulls._staged.release_lists()
        pair.pulls._staged.close()
        assert not driver.mapped and not driver.opened
