"""Where a worker reads other nodes' slots to, before they are checked and go into the cache: a ring of buffers on the
cache's device, or in host memory where NIXL cannot reach that, and the copier between it and the cache.

To the copier the ring is a node store's memory, and what arrived in it are slots. The blocks themselves are written by
the copier only: what a peer sends late lands here, in a buffer that nobody uses before the agent that asked for it has
ended.
"""

import mmap
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.limits import in_words, memory_limits
from vllm_kvtier.store.lower.nodes.agent import Kind
from vllm_kvtier.wire.slots import PAGE, PartLayout, align
from vllm_kvtier.worker.copier import Copier, make_copier
from vllm_kvtier.worker.transport import nixl_api
from vllm_kvtier.worker.tuning import Choice, Rule, Tuning
from vllm_kvtier.worker.views import CacheView

# A buffer holds what one read brings. On a GPU large enough that a thread in Python keeps up with a fast network, and
# enough of them that it is busy while others are checked; on a host small, for copying takes this thread.
DEVICE_BUFFERS = 8, 24 << 20
HOST_BUFFERS = 8, 8 << 20
LEAST = 2  # buffers, however large a block is

# From memory of the GPU itself there is nothing that a DMA engine could do better than the kernel.
_DIRECT = (Rule(None, Choice(way="direct", programs=24, piece_bytes=DEVICE_BUFFERS[1])),)
_TUNING = Tuning("from device memory", _DIRECT, _DIRECT, _DIRECT, _DIRECT)


class Ring:
    """``address``, ``nbytes``: of all of it; nothing is read to its first page, as there is none in a pool. Buffers
    are known by their first page. Raises KVTierError where there is no such memory."""

    def __init__(self, view: CacheView, part_bytes: Sequence[int], on_device: bool):
        """``part_bytes``: of one block, by group. ``on_device``: in the memory of a CUDA device."""
        count, size = DEVICE_BUFFERS if on_device else HOST_BUFFERS
        largest = max(align(nbytes, PAGE) for nbytes in part_bytes)
        self.buffer_bytes = max(size, largest)
        count = max(LEAST, count * size // self.buffer_bytes)
        self.nbytes = PAGE + count * self.buffer_bytes
        self._view, self.on_device = view, on_device
        self._memory: Any = None
        self.address = self._on_device() if on_device else self._on_host()
        memory, device = ("VRAM", view.device.index or 0) if on_device else ("DRAM", 0)
        self.kind = Kind(memory, device, piece=self.nbytes, load=nixl_api)
        self.free = [1 + n * self.buffer_bytes // PAGE for n in reversed(range(count))]
        self.count = count

    def copier(self, layouts: Sequence[PartLayout]) -> Copier:
        """Between the parts of slots that arrived here, each at the beginning of a page, and the cache."""
        offsets = [0] * len(layouts)
        if self.on_device:
            # CUDA's modules are imported where there is CUDA.
            from vllm_kvtier.worker.copier_cuda import CudaCopier
            from vllm_kvtier.worker.cuda import DeviceDriver

            pool = (self.address, self.nbytes, self._memory)
            driver = DeviceDriver(self._memory.device.index)
            copier = CudaCopier(self._view, pool, layouts, offsets, _TUNING, driver=driver)
        else:
            pool = (self.address, self.nbytes, SimpleNamespace(buffer=memoryview(self._memory)))
            copier = make_copier(self._view, pool, layouts, offsets)
        copier.register(0, self.nbytes)
        copier.warm_up()
        return copier

    def _on_device(self) -> int:
        try:
            self._memory = torch.empty(self.nbytes + PAGE, dtype=torch.uint8, device=self._view.device)
        except torch.cuda.OutOfMemoryError as error:
            raise KVTierError(
                f"{in_words(self.nbytes)} of GPU memory are needed to read from other nodes' stores, and are not free: "
                "lower --gpu-memory-utilization a little"
            ) from error
        return align(self._memory.data_ptr(), PAGE)

    def _on_host(self) -> int:
        limits = memory_limits()
        if self.nbytes > limits.fits:
            raise KVTierError(
                f"{in_words(self.nbytes)} of host memory are needed to read from other nodes' stores, and "
                f"{in_words(limits.fits)} are free ({limits.source})"
            )
        self._memory = mmap.mmap(-1, self.nbytes)
        return torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
