"""Rates between a GPU's cache and encoded slots of pinned host memory, by codec.

For each codec, shape and direction (from the GPU, to it, both): GB/s of logical KV (10^9 bytes in the cache), with
checksums, for random blocks and slots, and one pinned memcpy of raw bytes in the same run. Every round trip is compared
with the codec's reference first, and a flipped bit and a wrong key must be detected.

    python benchmarks/codec [--quick] [--codecs fp8 int4 ...] [--out codec.json]
    python benchmarks/codec --ways        # also other cuts, programs and pieces, and the kernels by themselves
    python benchmarks/codec --plot codec.json docs/codec.png
"""

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from pathlib import Path

import torch

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def ways() -> dict[str, dict]:
    """What to change of the tuned choices, by the name that the table shows."""
    return {
        "p8": {"programs": 8}, "p12": {"programs": 12}, "p20": {"programs": 20}, "p24": {"programs": 24},
        "dma2": {"dma_streams": 2},
        "64x2": {"piece_bytes": 64 * MIB, "ring": 2}, "32x2": {"piece_bytes": 32 * MIB, "ring": 2},
    }  # fmt: skip


def cuts():
    """Tiles of the kernels by themselves: (numbers, warps, stages)."""
    return [
        (0, 0, 1), (8192, 4, 1), (8192, 8, 1), (16384, 4, 1), (16384, 8, 1), (16384, 16, 1), (32768, 8, 1),
        (32768, 16, 1), (16384, 8, 2),
    ]  # fmt: skip


def measure(runners: dict, repeats: int, deadline: float, errors: dict[str, str]) -> dict[tuple[str, str], dict]:
    from rounds import rates  # of benchmarks/copy

    def failed(name: str, direction: str, error: Exception) -> None:
        errors[f"{name}, {direction}"] = f"{type(error).__name__}: {error}"

    return {
        (name, direction): {"GB/s": round(rate, 2), "host_us": round(statistics.median(runners[name].host_us))}
        for (name, direction), rate in rates(runners, repeats, deadline, failed).items()
    }


def print_kernels(rows: list[dict]) -> None:
    print("\nkernels alone, logical GB/s (sum: stored GB/s)")
    for r in rows:
        cut = f"p{r['programs']:<3d} {r['numbers']:6d} w{r['warps']:<2d} s{r['stages']}"
        numbers = "  ".join(f"{k} {r[k]:7.1f}" for k in ("encode", "encode+sum", "decode", "decode+sum", "sum"))
        print(f"  {r['shape']:10s} {r['codec']:8s} {cut}  {numbers}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--codecs", nargs="+", help="all of them where none is named")
    parser.add_argument("--ways", action="store_true", help="also other ways than the tuned one")
    parser.add_argument("--kernels", action="store_true", help="also the kernels by themselves")
    parser.add_argument("--only-kernels", action="store_true")
    parser.add_argument("--seconds", type=float, default=80, help="stop repeating after so long")
    parser.add_argument("--stored-mib", type=int, default=2048, help="bytes in slots of one measurement")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("JSON", "PNG"))
    args = parser.parse_args()
    if args.plot:
        from picture import draw

        draw(*args.plot)
        return
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here: this benchmark measures one")
    run(args)


def run(args: argparse.Namespace) -> None:
    from cases import SHAPES, Bench, Coded, fill
    from peers import memcpy
    from rates import Kernels, compile_all
    from vllm_kvtier.kernels import encoded_pages as encoded

    from vllm_kvtier import codecs
    from vllm_kvtier.store.memory.pool_memory import PoolMemory
    from vllm_kvtier.wire.slots import PIECE_BYTES
    from vllm_kvtier.worker import tuning
    from vllm_kvtier.worker.device.cuda_driver import Driver

    began = time.monotonic()
    repeats = args.repeats or (3 if args.quick else 5)
    limit = min(args.seconds, 25) if args.quick else args.seconds
    names = args.codecs or codecs.names()
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, {torch.cuda.get_device_properties(0).multi_processor_count} SMs")
    current = tuning.for_device(device)
    choices = [current.choose(gather, MIB, encoded=True) for gather in (True, False)]
    tuned = [encoded.Shape(c.numbers, c.warps if c.numbers else 0, c.stages) for c in choices]
    sweep = [encoded.Shape(*c) for c in cuts()] if args.ways else []
    kernels_too = args.ways or args.kernels or args.only_kernels
    compile_all([(s, n, list(dict.fromkeys(tuned + sweep))) for s in SHAPES for n in names if codecs.get(n).formats])
    print(f"compiled in {time.monotonic() - began:.1f} s", flush=True)

    stored = args.stored_mib * MIB
    cache = torch.empty(2 * 4 * stored, dtype=torch.uint8, device="cuda")
    fill(cache)
    pool_bytes = -(-(2 * stored + GIB) // PIECE_BYTES) * PIECE_BYTES
    memory = PoolMemory(pool_bytes)
    memory.start(lambda: None)
    while memory.ready < memory.usable:
        time.sleep(0.01)
    import mmap

    mapping = mmap.mmap(memory.fd, pool_bytes)
    pool_tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    driver = Driver(torch.cuda.current_device())
    for at in range(0, pool_bytes, PIECE_BYTES):
        driver.register(pool_tensor.data_ptr() + at, PIECE_BYTES)
    pool = (pool_tensor.data_ptr(), pool_bytes, pool_tensor)
    # Of memory that the runtime knows as pinned: torch does not see our registration and would stage.
    buffer = torch.empty(2 * GIB if args.quick else 4 * GIB, dtype=torch.uint8, pin_memory=True)
    reference = memcpy(repeats, 2 * GIB, buffer, cache)
    print(f"memcpy GB/s: {reference}; {time.monotonic() - began:.1f} s so far", flush=True)

    rows: list[dict] = []
    alone: list[dict] = []
    errors: dict[str, str] = {}
    began_copies = time.monotonic()
    for number, shape in enumerate(SHAPES):
        runners: dict[str, Coded] = {}
        benches: dict[str, Bench] = {}
        for name in names:
            benches[name] = bench = Bench(shape, codecs.get(name), stored, cache, pool)
            changes = {"tuned": {}} | (ways() if args.ways and bench.layout.encoded else {})
            try:
                if bench.layout.encoded and kernels_too:
                    measured = Kernels(bench, 2 * GIB)
                    alone += [measured.row(16, cut) for cut in (sweep or tuned[:1])]
                    if args.ways:
                        alone += [measured.row(p, tuned[0]) for p in (4, 8, 16, 32)]
                    del measured
            except Exception as error:
                errors[f"{name} kernels, {shape.name}"] = f"{type(error).__name__}: {error}"
                traceback.print_exc()
            for way, change in changes.items():
                if args.only_kernels:
                    break
                try:
                    runner = Coded(bench, tuning.changed(current, **change))
                    if way == "tuned":
                        runner.check()
                    runners[f"{name} | {way}"] = runner
                except Exception as error:
                    errors[f"{name} {way}, {shape.name}"] = f"{type(error).__name__}: {error}"
                    traceback.print_exc()
            # The rings of many ways at once would take the GPU's memory.
            done = measure(runners, repeats, began_copies + limit * (number + 1) / len(SHAPES), errors)
            show = []
            for (key, direction), value in done.items():
                _, way = key.split(" | ")
                row = {"shape": shape.name, "codec": name, "way": way, "direction": direction}
                rows.append(row | {"bits": round(bench.bits, 3), **value})
                show.append(rows[-1])
            for way in dict.fromkeys(r["way"] for r in show):
                cells = {r["direction"]: r for r in show if r["way"] == way}
                line = "  ".join(f"{r['GB/s']:7.1f} ({r['GB/s'] / reference[d]:.2f})" for d, r in cells.items())
                host = " / ".join(str(r["host_us"]) for r in cells.values())
                what = f"{shape.name:10s} {name:6s} {bench.bits:6.3f} bits  {way:9s}"
                print(f"  {what} {line}  host us a call: {host}", flush=True)
            for runner in runners.values():
                runner.close()
            runners.clear()
            gc.collect()
            torch.cuda.empty_cache()
        if args.out:
            result = {"device": device, "torch": torch.__version__, "memcpy": reference, "rows": rows}
            result |= {"kernels": alone, "errors": errors, "seconds": round(time.monotonic() - began)}
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    if alone:
        print_kernels(alone)
    print("\nmemcpy GB/s at the end:", memcpy(repeats, 2 * GIB, buffer, cache), " errors:", errors)
    print(f"{time.monotonic() - began:.0f} s")
    if errors:
        sys.exit(1)


if __name__ == "__main__":
    main()
