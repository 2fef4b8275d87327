"""How much longer steps take while blocks are stored and loaded, by the number of programs of the copies' kernels.

    python benchmarks/step_delay.py --out step_delay.json                      # about 90 s, one GPU

A step is a CUDA graph of the matrix products of Qwen3-8B's 36 layers for 64 requests (weights of 14 GB), launched while
the one before runs, as vLLM does. Copies are the connector's (checksums on, random blocks and slots). Programs that run
beside the model's kernels take SMs from them: a kernel that fills the GPU in one wave then needs two, however few SMs
they are. By case:

  lots    64 requests fill four blocks a step. They are stored in lots: 256 blocks behind every 64th step
  stores  as many as the link takes, all the time; ``loads`` the same in the other direction
  kernel  GB/s of the kernel alone, between the cache and the ring, for 1, 4 and 28 blocks

``mean``, ``p99``: milliseconds of a step. ``lost``: of steps for each GB stored or loaded, beside the mean of the same
steps with no copies. ``gb_s``: of the copies. Needs a GPU.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import mean

import numpy as np
import torch

from vllm_kvtier.bench import copies
from vllm_kvtier.worker import tuning
from vllm_kvtier.worker.tuning import Choice, fixed

HIDDEN = 4096
BATCH = 64
LOT_BLOCKS, LOT_STEPS = 256, 64
CALL_BLOCKS = copies.CALL_BYTES // copies.BLOCK_BYTES
AHEAD = 6  # calls of 64 MiB under way: more than a step's worth of the link
# (programs, warps, priority of both streams or None for those of the connector), the most telling ones first
CASES = [
    (8, 8, None), (132, 8, None), (264, 8, None), (32, 8, None), (528, 8, None), (16, 8, None), (64, 8, None),
    (132, 4, None), (264, 4, None), (8, 8, 0), (132, 8, 0), (528, 4, None), (8, 4, None),
]  # fmt: skip


class Model:
    """Products of one decode step, as a graph. ``hidden``: HIDDEN is Qwen3-8B's."""

    def __init__(self, layers: int, batch: int, hidden: int = HIDDEN):
        heads, wide = 3 * hidden // 2, 3 * hidden
        shapes = [(heads, hidden), (hidden, hidden), (2 * wide, hidden), (hidden, wide)]
        some = [[torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / 64 for n, k in shapes] for _ in range(layers)]
        x = torch.randn(batch, hidden, device="cuda", dtype=torch.bfloat16)
        self._weights, self._out = some, torch.zeros(batch, device="cuda")

        def run() -> None:
            y = x
            for qkv, out, up, down in some:
                attended = torch.nn.functional.linear(y, qkv)[:, :hidden]
                y = torch.nn.functional.rms_norm(y + torch.nn.functional.linear(attended, out), (hidden,))
                gate, value = torch.nn.functional.linear(y, up).chunk(2, dim=1)
                z = torch.nn.functional.silu(gate) * value
                y = torch.nn.functional.rms_norm(y + torch.nn.functional.linear(z, down), (hidden,))
            self._out.copy_(y.float().sum(dim=1))

        torch.cuda.synchronize()
        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            run()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            run()
        self._tokens, self._aside = torch.zeros(batch).pin_memory(), torch.cuda.Stream()

    def step(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Events at the end of the products, and when the tokens are on the host."""
        self.graph.replay()
        done, there = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        done.record()
        with torch.cuda.stream(self._aside):
            self._aside.wait_event(done)
            self._tokens.copy_(self._out, non_blocking=True)
            there.record(self._aside)
        return done, there


class Work:
    """Calls of the copier. ``lot``: blocks behind every LOT_STEPS steps; None: as much as the link takes."""

    def __init__(self, runner: copies.CopyRunner, direction: str, lot: int | None):
        self._runner, self._direction, self._lot = runner, direction, lot
        self._under_way: list = []
        self.nbytes, self._at = 0, 0

    def __call__(self, number: int, after: torch.cuda.Event) -> None:
        self._under_way = [copy for copy in self._under_way if not copy.done()]
        left = self._lot if self._lot is not None and number % LOT_STEPS == LOT_STEPS // 2 else 0
        while left > 0 or (self._lot is None and len(self._under_way) < AHEAD):
            n = CALL_BLOCKS if self._lot is None else min(left, CALL_BLOCKS)
            copy, n = self._runner.enqueue(self._direction, self._at, n, after if self._lot is not None else None)
            self._at = (self._at + n) % self._runner.count
            self._under_way.append(copy)
            left -= n
            self.nbytes += n * copies.BLOCK_BYTES

    def end(self) -> None:
        while self._under_way:
            self._under_way = [copy for copy in self._under_way if not copy.done()]


def steps(model: Model, count: int, work: Work | None = None) -> dict:
    """Milliseconds of ``count`` steps, and GB copied meanwhile."""
    ends = [model.step()]
    begun = time.perf_counter()
    for number in range(count):
        ends.append(model.step())
        if work is not None:
            work(number, ends[-1][0])
        ends[-2][1].synchronize()
    ends[-1][1].synchronize()
    seconds = time.perf_counter() - begun
    gb = work.nbytes / 1e9 if work is not None else 0.0
    if work is not None:
        work.end()
    each = sorted(a[0].elapsed_time(b[0]) for a, b in zip(ends, ends[1:], strict=False))
    return {"mean": mean(each), "p99": each[int(0.99 * len(each))], "steps": count, "gb": gb, "gb_s": gb / seconds}


def kernel_rates(runner: copies.CopyRunner, loads: bool) -> dict[str, float]:
    """GB/s of the kernel between the cache and the ring."""
    copier = runner.copier
    lane = copier._loads if loads else copier._stores
    kernel, part, found = lane._page_copiers[0][0], copier._parts[0], {}
    for n in (1, 4, CALL_BLOCKS):
        args = lane._take_args(n)
        table = args.words.reshape(-1, 4)
        table[:n, 0], table[:n, 1] = np.arange(n) * 7, np.arange(n)
        table[:n, 2] = part.row_offsets[:n] + lane._ring_base
        times = []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(lane._kernels)
            kernel.launch(args.address, n, lane._kernels)
            end.record(lane._kernels)
            end.synchronize()
            times.append(begin.elapsed_time(end))
        found[str(n)] = round(n * part.nbytes / sorted(times)[6] / 1e6, 1)
        lane.spare_args.append(args)
    return found


def measure(case: tuple[int, int, int | None], model: Model, scene: copies.Scene, count: int) -> dict:
    programs, warps, priority = case
    usual = tuning.STORE_PRIORITY, tuning.LOAD_PRIORITY
    if priority is not None:
        tuning.STORE_PRIORITY = tuning.LOAD_PRIORITY = priority
    choice = Choice(programs=programs, warps=warps)
    try:
        runner = copies.CopyRunner(scene, "raw", fixed(choice, choice))
    finally:
        tuning.STORE_PRIORITY, tuning.LOAD_PRIORITY = usual
    row: dict = {"programs": programs, "warps": warps, "priority": priority}
    try:
        runner.store_all()
        row |= {"gather_gb_s": kernel_rates(runner, False), "scatter_gb_s": kernel_rates(runner, True)}
        alone = [steps(model, count // 4)["mean"]]
        works = {
            "lots": (Work(runner, "store", LOT_BLOCKS), count), "stores": (Work(runner, "store", None), count // 2),
            "loads": (Work(runner, "load", None), count // 2),
        }  # fmt: skip
        found = {name: steps(model, n, work) for name, (work, n) in works.items()}
        alone.append(steps(model, count // 4)["mean"])
    finally:
        runner.close()
    row["alone_ms"] = round(mean(alone), 4)
    for name, each in found.items():
        lost = (each["mean"] - row["alone_ms"]) * each["steps"] / max(each["gb"], 1e-9)
        row[name] = {key: round(each[key], 4) for key in ("mean", "p99", "gb_s")} | {"lost": round(lost, 2)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=192, help="of each measurement")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--cases", type=int, default=len(CASES), help="so many of the first")
    parser.add_argument("--seconds", type=float, default=85, help="no case is begun after so long")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begun = time.monotonic()
    scene, model, rows = copies.scene(True, False), Model(args.layers, BATCH), []
    steps(model, 50)
    for case in CASES[: args.cases]:
        if time.monotonic() - begun > args.seconds:
            break
        rows.append(measure(case, model, scene, args.steps))
        print(json.dumps(rows[-1]), flush=True)
        if args.out:
            meta = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "steps": args.steps}
            args.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))
    print(f"{time.monotonic() - begun:.0f} s in all")


if __name__ == "__main__":
    main()
