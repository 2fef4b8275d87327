"""How long the GPU takes from one kernel of a CUDA graph to the next, after kernels on other streams.

    python benchmarks/kernel_gaps.py --runs 3        # about 15 s a run, one GPU

A graph of the matrix products of 36 small layers, some 360 kernels, is replayed without a pause; what is done between
two measurements is on the command line, in order: "base" nothing; "idle" nothing for 0.4 s; "side" a kernel on another
stream behind every 16th replay, and a copy of its result to the host; "main" the same with the kernel on the graph's
stream; "dma" only the copy. Printed: the median milliseconds of a replay in each quarter of 240. Each run is a process
of its own, since the state of the GPU that this shows lasts.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from step_delay import Model

HIDDEN, LAYERS, BATCH = 2048, 36, 64
REPLAYS, EVERY = 240, 16
LOT_BYTES = 16 << 20
STEPS = ("base", "side", "base", "main", "base", "dma", "base", "idle", "side", "main", "idle", "main")


class Bench:
    def __init__(self) -> None:
        self._graph = Model(LAYERS, BATCH, HIDDEN).graph
        self._side, self._dma = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)
        self._cache, self._ring = (torch.ones(LOT_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
        self._host = torch.empty(LOT_BYTES, dtype=torch.uint8, pin_memory=True)

    def lot(self, kind: str) -> None:
        model = torch.cuda.current_stream()
        kernels = self._side if kind == "side" else model
        if kernels is not model:
            kernels.wait_stream(model)
        if kind != "dma":
            with torch.cuda.stream(kernels):
                self._ring.add_(self._cache)
        self._dma.wait_stream(kernels)
        with torch.cuda.stream(self._dma):
            self._host.copy_(self._ring, non_blocking=True)

    def measure(self, kind: str) -> list[float]:
        if kind == "idle":
            torch.cuda.synchronize()
            time.sleep(0.4)  # the idle time that this is about
        events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
        events[0].record()
        for i in range(REPLAYS):
            self._graph.replay()
            events[i + 1].record()
            if kind not in ("base", "idle") and i % EVERY == EVERY // 2:
                self.lot(kind)
            if i > 1:
                events[i - 1].synchronize()
        events[-1].synchronize()
        times = [a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)]
        quarter = REPLAYS // 4
        return [statistics.median(times[i : i + quarter]) for i in range(0, REPLAYS, quarter)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--steps", nargs="+", choices=sorted(set(STEPS)), default=list(STEPS))
    args = parser.parse_args()
    if args.runs > 1:
        run: Callable[[], int] = lambda: subprocess.run(  # noqa: E731
            [sys.executable, __file__, "--steps", *args.steps], check=False
        ).returncode
        sys.exit(max(run() for _ in range(args.runs)))
    bench = Bench()
    for kind in args.steps:
        print(f"{kind:5}", *(f"{ms:.3f}" for ms in bench.measure(kind)), flush=True)
    print()


if __name__ == "__main__":
    main()
