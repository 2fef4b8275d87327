"""Other ways to copy the same bytes: one pinned memcpy, and a copy for each page."""

import statistics
import time

import numpy as np
import torch
from ours import Bench
from rounds import DIRECTIONS

from vllm_kvtier.wire.slots import PAGE
from vllm_kvtier.worker.device.cuda_driver import ORDERED, Driver

# Copies of one measurement where each page is one: they take some 3 us each however small.
_MAX_COPIES = 32768


class PageCopies:
    """The same pages, one copy each, by a function of (sources, targets, sizes) int64 tensors on the host."""

    def __init__(self, bench: Bench, name: str, function):
        self.bench, self.name, self.function = bench, name, function
        self.streams = {n: torch.cuda.Stream() for n in ("store", "load")}
        layer = np.arange(bench.layers)
        self.orders = {}
        count = min(bench.count, max(1, _MAX_COPIES // bench.layers))
        self.nbytes = count * bench.page * bench.layers
        for n in ("store", "load"):
            blocks, slots = bench.blocks[n][:count, None], bench.slots[n][:count, None]
            cache = bench.base + layer[None] * (bench.num_blocks * bench.page) + blocks * bench.page
            host = bench.pool[0] + slots * PAGE + layer[None] * bench.page
            sizes = np.full(cache.size, bench.page, dtype=np.int64)
            arrays = (cache, host, sizes) if n == "store" else (host, cache, sizes)
            self.orders[n] = [torch.from_numpy(np.ascontiguousarray(a, dtype=np.int64).ravel()) for a in arrays]

    def run(self, direction: str) -> float:
        names = ("store", "load") if direction == "both" else (direction,)
        torch.cuda.synchronize()
        start = time.perf_counter()
        step = max(1, (128 << 20) // self.bench.page)
        count = len(self.orders["store"][0])
        for a in range(0, count, step):
            for n in names:
                with torch.cuda.stream(self.streams[n]):
                    self.function(*(t[a : a + step] for t in self.orders[n]), n)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def close(self) -> None:
        self.orders.clear()


def peers(bench: Bench, skipped: dict[str, str]) -> dict[str, PageCopies]:
    """What else can copy these pages here; the reasons why others cannot go to ``skipped``."""
    found = {}
    driver = Driver(torch.cuda.current_device())

    def memcpy_batch(sources, targets, sizes, name):
        stream = torch.cuda.current_stream().cuda_stream
        driver.copy_batch(*(t.data_ptr() for t in (targets, sources, sizes)), len(sizes), stream, ORDERED)

    found["memcpy_batch"] = PageCopies(bench, "memcpy_batch", memcpy_batch)
    try:
        from vllm import _custom_ops as ops

        def swap(sources, targets, sizes, name):
            ops.swap_blocks_batch(sources, targets, sizes, is_src_access_order_any=name == "load")

        runner = PageCopies(bench, "swap_blocks_batch", swap)
        with torch.cuda.stream(torch.cuda.Stream()):  # batches are refused on the default one
            swap(*(t[:2] for t in runner.orders["store"]), "store")
        torch.cuda.synchronize()
        found["swap_blocks_batch"] = runner
    except Exception as error:  # whatever an import of vLLM may raise: the other ways are still wanted
        skipped["swap_blocks_batch"] = f"{type(error).__name__}: {error}"[:200]
    try:
        from vllm.v1.kv_offload.cpu import swap_blocks_triton as theirs

        chunk = min(bench.page, 8192)

        def by_triton(sources, targets, sizes, name):
            theirs.swap_blocks_batch(sources, targets, sizes, bytes_per_chunk=chunk)

        found["triton"] = PageCopies(bench, "triton", by_triton)
    except Exception as error:
        skipped["triton"] = f"{type(error).__name__}: {error}"[:200]
    return found


def memcpy(repeats: int, nbytes: int, pool: torch.Tensor, cache: torch.Tensor) -> dict[str, float]:
    """GB/s of one pinned copy of ``nbytes`` each way, and of both at once."""
    streams = {n: torch.cuda.Stream() for n in ("store", "load")}
    nbytes = min(nbytes, pool.numel() // 2, cache.numel() // 2)
    host = {"store": pool[:nbytes], "load": pool[nbytes : 2 * nbytes]}
    gpu = {"store": cache[:nbytes], "load": cache[nbytes : 2 * nbytes]}
    result = {}
    for direction in DIRECTIONS:
        names = ("store", "load") if direction == "both" else (direction,)
        times = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for n in names:
                with torch.cuda.stream(streams[n]):
                    if n == "store":
                        host[n].copy_(gpu[n], non_blocking=True)
                    else:
                        gpu[n].copy_(host[n], non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        result[direction] = round(len(names) * nbytes / statistics.median(times) / 1e9, 2)
    return result
