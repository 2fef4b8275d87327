"""vLLM's TieringOffloadingSpec for engines without a GPU, which it refuses: its manager and its tiers as they are, and
a plain copy between the KV cache and its memory in place of the DMA engine's.

    {"spec_name": "PlainTieringSpec", "spec_module_path": "cpu_offloading", ...}
"""

import time
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class PlainCopies(OffloadingWorker):
    """Each copy is made when it is asked for."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion, blocks_per_chunk: int):
        self._region, self._per_chunk, self._refs = region, blocks_per_chunk, caches.group_data_refs
        self._cache, self._memory = [], []
        for each in caches.tensors:
            page = each.page_size_bytes
            rows = region.create_next_worker_view(page * blocks_per_chunk)
            self._cache.append(each.tensor.view(torch.int8).view(-1, page))
            sizes, strides = (len(rows), blocks_per_chunk, page), (rows.stride(0), page, 1)
            self._memory.append(rows.as_strided(sizes, strides))
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, load=False)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, load=True)

    def _copy(self, job_id: int, cache: GPULoadStoreSpec, memory: CPULoadStoreSpec, load: bool) -> bool:
        began, nbytes, block, chunk = time.perf_counter(), 0, 0, 0
        for refs, size, first in zip(self._refs, cache.group_sizes, cache.block_indices, strict=True):
            if not size:
                continue
            places = first % self._per_chunk + np.arange(size)
            chunks = torch.from_numpy(memory.block_ids[chunk + places // self._per_chunk])
            inner, blocks = torch.from_numpy(places % self._per_chunk), cache.block_ids[block : block + size]
            for ref in refs:
                here, there = self._cache[ref.tensor_idx], self._memory[ref.tensor_idx]
                if load:
                    here[blocks] = there[chunks, inner]
                else:
                    there[chunks, inner] = here[blocks]
                nbytes += size * here.shape[1]
            block, chunk = block + size, chunk + int(places[-1]) // self._per_chunk + 1
        self._done.append(TransferResult(job_id, True, nbytes, time.perf_counter() - began))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """All are done."""

    def shutdown(self) -> None:
        self._cache.clear(), self._memory.clear()
        self._region.cleanup()


class PlainTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id, num_chunks=self.num_chunks, rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
            )  # fmt: skip
            self._worker = PlainCopies(kv_caches, region, self.blocks_per_chunk)
        return self._worker
