"""What the DMA engines do with one copy a slot, without kernels: sizes, odd tails, alignment, ways to submit."""

import statistics
import time

import numpy as np
import torch

from vllm_kvtier.wire.slots import PIECE_BYTES
from vllm_kvtier.worker.device.cuda_driver import ANY_ORDER, ORDERED, Driver

KIB, MIB = 1 << 10, 1 << 20
TOTAL = 512 * MIB


def measure(pool: torch.Tensor, cache: torch.Tensor, repeats: int = 3) -> list[dict]:
    """GB/s of each combination. ``pool``: registered uint8 on the host; ``cache``: uint8 on the device."""
    driver = Driver(torch.cuda.current_device())
    streams = [torch.cuda.Stream() for _ in range(4)]
    rows = []
    variants = [  # (name, bytes more than the round size, distance of slots, row alignment, streams, order, batches)
        ("plain", 0, 4096, 4096, 1, ORDERED, True),
        ("tail 64", 64, 4096, 512, 1, ORDERED, True),
        ("tail 128", 128, 4096, 512, 1, ORDERED, True),
        ("tail 256", 256, 4096, 512, 1, ORDERED, True),
        ("tail 512", 512, 4096, 512, 1, ORDERED, True),
        ("tail 4096", 4096, 4096, 4096, 1, ORDERED, True),
        ("tail 64, slots at 64K", 64, 65536, 65536, 1, ORDERED, True),
        ("plain, slots at 64K", 0, 65536, 65536, 1, ORDERED, True),
        ("plain, 2 streams", 0, 4096, 4096, 2, ORDERED, True),
        ("plain, 4 streams", 0, 4096, 4096, 4, ORDERED, True),
        ("plain, any order", 0, 4096, 4096, 1, ANY_ORDER, True),
        ("plain, one call each", 0, 4096, 4096, 1, ORDERED, False),
        ("plain, halves", 0, 4096, 4096, 1, ORDERED, True),
    ]
    for size in (288 * KIB, 640 * KIB, 2304 * KIB):
        for name, tail, unit, align, lanes, order, batches in variants:
            nbytes = size + tail
            distance = -(-(nbytes + 1) // unit) * unit
            n = TOTAL // nbytes
            places = np.random.default_rng(0).permutation(pool.numel() // distance - 1) * distance
            places = places[places % PIECE_BYTES + nbytes <= PIECE_BYTES][
                :n
            ]  # a copy across two registrations is refused
            n = len(places)
            host = (pool.data_ptr() + places).astype(np.uint64)
            pitch = -(-nbytes // align) * align
            here = (cache.data_ptr() + np.arange(n) * pitch).astype(np.uint64)
            sizes = np.full(n, nbytes, dtype=np.uint64)
            if name.endswith("halves"):
                half = np.uint64(nbytes // 2)
                host, here = (np.stack([a, a + half], axis=1).ravel() for a in (host, here))
                sizes = np.full(2 * n, nbytes // 2, dtype=np.uint64)
            row = {"bytes": size, "variant": name}
            for direction in ("store", "load"):
                times, calls = [], []
                for _ in range(repeats + 1):
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    driver.batches = batches
                    for i, stream in enumerate(streams[:lanes]):
                        a, b, c = (x[i::lanes].copy() for x in (host, here, sizes))
                        arrays = (a, b, c) if direction == "store" else (b, a, c)
                        driver.copy_batch(*(x.ctypes.data for x in arrays), len(c), stream.cuda_stream, order)
                    calls.append(time.perf_counter() - start)
                    torch.cuda.synchronize()
                    times.append(time.perf_counter() - start)
                driver.batches = True
                row[direction] = round(n * nbytes / statistics.median(times[1:]) / 1e9, 2)
                row[f"{direction}_us_per_copy"] = round(statistics.median(calls[1:]) / len(sizes) * 1e6, 2)
            rows.append(row)
            print(
                f"  {size // KIB:5d} KiB {name:24s} D2H {row['store']:6.2f}  H2D {row['load']:6.2f} GB/s; submitting "
                f"{row['store_us_per_copy']:.2f} / {row['load_us_per_copy']:.2f} us a copy",
                flush=True,
            )
    return rows
