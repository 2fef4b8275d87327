"""Delay of a step's inputs and output tokens by the GPU's DMA engines while blocks are stored.

    python benchmarks/turns.py --out turns.json

vLLM copies every step's tokens to the host, a few bytes on the critical path, by the DMA engine that also stores. Here
one thread stores continuously through the connector's copier (Qwen3-8B's blocks, random slots), and another one
simulates steps: inputs to the device, twenty large matrix products, tokens to the host. Reported for each way to store:
GB/s, and milliseconds by the device's clock (p50, p95, max) of inputs, products and tokens. ``pause_bytes`` is the
maximum that a store copies before it yields (``worker/tuning.py``); ``never``: it does not yield. Needs a GPU.
"""

import argparse
import json
import threading
import time
from pathlib import Path

import torch

from vllm_kvtier.bench import copies
from vllm_kvtier.worker.tuning import Choice, fixed

NEVER = 1 << 62
WAYS = {
    "nothing": None,
    "staged, never": Choice(pause_bytes=NEVER),
    **{f"staged, {mib} MiB": Choice(pause_bytes=mib << 20) for mib in (2, 4, 8, 16, 32)},
    "8 MiB pieces, never": Choice(piece_bytes=8 << 20, ring=4, pause_bytes=NEVER),
    "kernels, 8 programs": Choice("direct", 8),
    "kernels, 4 programs": Choice("direct", 4),
}


class Steps:
    """One after the other, timed on the device."""

    def __init__(self, size: int = 4096, products: int = 20):
        self._matrix = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
        self._inputs, self._there = torch.zeros(size).pin_memory(), torch.zeros(size, device="cuda")
        self._tokens, self._here = torch.zeros(32, device="cuda"), torch.zeros(32).pin_memory()
        self._aside, self._products = torch.cuda.Stream(), products

    def once(self) -> tuple[float, float, float]:
        """Milliseconds for inputs, products, tokens."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        events[0].record()
        self._there.copy_(self._inputs, non_blocking=True)
        events[1].record()
        for _ in range(self._products):
            torch.mm(self._matrix, self._matrix)
        events[2].record()
        with torch.cuda.stream(self._aside):
            self._aside.wait_event(events[2])
            self._here.copy_(self._tokens, non_blocking=True)
            events[3].record(self._aside)
        events[3].synchronize()
        return tuple(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False))


class Storing:
    """Stores on a separate thread within the context; ``rate`` in GB/s afterwards."""

    def __init__(self, mover: copies.CopyRunner | None):
        self._mover, self._stop, self._done = mover, threading.Event(), []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while self._mover is not None and not self._stop.is_set():
            self._done.append(self._mover.store(0.1))

    def __enter__(self) -> "Storing":
        self._thread.start()
        while self._mover is not None and not self._done and self._thread.is_alive():
            time.sleep(0.01)
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def rate(self) -> float:
        return sum(n for n, _ in self._done) / max(1e-9, sum(s for _, s in self._done)) / 1e9


def spread(values: list[float]) -> list[float]:
    found = sorted(values)
    return [round(found[min(len(found) - 1, int(share * len(found)))], 3) for share in (0.5, 0.95, 1.0)]


def measure(steps: Steps, scene: copies.Scene, name: str, seconds: float) -> dict:
    choice = WAYS[name]
    by = copies.CopyRunner(scene, "raw", fixed(choice, choice)) if choice is not None else None
    try:
        with Storing(by) as storing:
            until, taken = time.monotonic() + seconds, [steps.once()]
            while time.monotonic() < until:
                taken.append(steps.once())
    finally:
        if by is not None:
            by.close()
    inputs, products, tokens = (spread([step[i] for step in taken]) for i in range(3))
    rate = round(storing.rate, 1)
    return {"way": name, "GB/s": rate, "steps": len(taken), "inputs": inputs, "products": products, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seconds", type=float, default=2.0, help="of each")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    scene, steps = copies.scene(True, False), Steps()
    for _ in range(20):
        steps.once()
    rows = []
    for name in args.ways:
        rows.append(measure(steps, scene, name, args.seconds))
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        meta = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
