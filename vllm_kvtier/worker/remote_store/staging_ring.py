"""The ring of buffers that a worker reads remote stores' slots into, and the copier between it and the cache.

Its memory is the cache's device, or the host where NIXL cannot reach that. To the copier the ring is a node store's
memory, and the slots that arrived in it are slots. Only the copier writes the blocks themselves: data that a peer sends
late arrives in a buffer that is not used again before the agent that read has ended.
"""

import mmap
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.remote_store.nixl_agent import Kind
from vllm_kvtier.store.linux import leave_out_of_dumps
from vllm_kvtier.store.memory.memory_limits import format_bytes, memory_limits
from vllm_kvtier.wire.slots import PAGE, PartLayout, align
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.copy.base import Copier, make_copier
from vllm_kvtier.worker.nixl_pull.nixl_transport import nixl_api
from vllm_kvtier.worker.tuning import Choice, Rule, Tuning

# (number, bytes) of buffers; one read fills one buffer. On a GPU they are large enough for a thread in Python to keep
# up with a fast network, and enough to read while others are verified; on a host small, since copying takes this
# thread.
DEVICE_BUFFERS = 8, 24 << 20
HOST_BUFFERS = 8, 8 << 20
MIN_BUFFERS = 2  # however large a block is

# Within the GPU's memory a DMA engine is no faster than the kernel.
_DIRECT = (Rule(None, Choice(way="direct", programs=24, piece_bytes=DEVICE_BUFFERS[1])),)
_TUNING = Tuning("from device memory", _DIRECT, _DIRECT, _DIRECT, _DIRECT)


class StagingRing:
    """``address``, ``nbytes``: of the whole ring; its first page stays unused, as in a pool. A buffer is named by its
    first page. Raises KVTierError if the memory is not free."""

    def __init__(self, view: CacheView, part_bytes: Sequence[int], on_device: bool):
        """``part_bytes``: of one block, by group. ``on_device``: in the memory of a CUDA device."""
        count, size = DEVICE_BUFFERS if on_device else HOST_BUFFERS
        largest = max(align(nbytes, PAGE) for nbytes in part_bytes)
        self.buffer_bytes = max(size, largest)
        count = max(MIN_BUFFERS, count * size // self.buffer_bytes)
        self.nbytes = PAGE + count * self.buffer_bytes
        self._view, self.on_device = view, on_device
        self._memory: Any = None
        self.address = self._on_device() if on_device else self._on_host()
        memory, device = ("VRAM", view.device.index or 0) if on_device else ("DRAM", 0)
        self.kind = Kind(memory, device, piece=self.nbytes, load=nixl_api)
        self.free = [1 + n * self.buffer_bytes // PAGE for n in reversed(range(count))]
        self.count = count

    def copier(self, layouts: Sequence[PartLayout]) -> Copier:
        """A copier between the parts of slots in the ring, each at the beginning of a page, and the cache."""
        offsets = [0] * len(layouts)
        if self.on_device:
            # CUDA's modules are imported where there is CUDA.
            from vllm_kvtier.worker.copy.cuda_copier import CudaCopier
            from vllm_kvtier.worker.device.cuda_driver import DeviceDriver

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
                f"{format_bytes(self.nbytes)} of GPU memory are needed to read from remote stores, and are not free: "
                "lower --gpu-memory-utilization"
            ) from error
        return align(self._memory.data_ptr(), PAGE)

    def _on_host(self) -> int:
        limits = memory_limits()
        if self.nbytes > limits.fits:
            raise KVTierError(
                f"{format_bytes(self.nbytes)} of host memory are needed to read from remote stores, and "
                f"{format_bytes(limits.fits)} are free ({limits.source})"
            )
        self._memory = mmap.mmap(-1, self.nbytes)
        address = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        leave_out_of_dumps(address, self.nbytes)
        return address
