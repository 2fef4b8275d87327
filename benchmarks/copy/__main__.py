"""Rates of blocks between a GPU's KV cache and slots of pinned host memory, by the size of a layer's page.

A block's slot has one page of each layer; blocks and slots are random. For each page size and direction (from the GPU,
to it, both), and for one pinned memcpy of 2 GiB:

  kvtier     this project's copier with its tuning, with checksums and without
  direct / staged / mixed ...   its ways separately (``worker.tuning.Choice``)
  swap_blocks_batch, triton     vLLM's copies of the same pages, if vLLM is installed
  memcpy_batch                  cuMemcpyBatchAsync of the same pages (called by swap_blocks_batch)

Medians of several repetitions, interleaved by way; GB = 10^9 bytes of pages. The bytes of every way are checked once: a
round trip into other blocks is exact, and flipped bytes are detected.

    python benchmarks/copy [--quick] [--out copy.json]   # some minutes; --quick under one
    python benchmarks/copy --tune                        # writes the best ways to this user's cache
    python benchmarks/copy --plot copy.json docs/copy.png
"""

import argparse
import gc
import json
import mmap
import statistics
import sys
import time
import traceback
from pathlib import Path

import dma
import torch
from ours import Bench, Ours
from peers import memcpy, peers
from rounds import DIRECTIONS, rates

from vllm_kvtier.store.memory.pool_memory import PoolMemory
from vllm_kvtier.wire.slots import PIECE_BYTES
from vllm_kvtier.worker import tuning
from vllm_kvtier.worker.device.cuda_driver import Driver
from vllm_kvtier.worker.tuning import Choice

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# (page bytes, layers): Qwen3-8B has 36 layers, a 70B rank at TP 8 has 80; slots stay around 40 MiB.
SHAPES = [
    (8 * KIB, 36), (8 * KIB, 80), (16 * KIB, 36), (32 * KIB, 36), (64 * KIB, 36), (64 * KIB, 80), (256 * KIB, 36),
    (MIB, 36), (4 * MIB, 10),
]  # fmt: skip
QUICK_SHAPES = [(8 * KIB, 36), (8 * KIB, 80), (64 * KIB, 36), (MIB, 36)]


def ways(quick: bool) -> dict[str, tuple[Choice, Choice]]:
    """The choices (to store, to load) to compare; names are what the table shows."""
    found = {}
    for programs in (8,) if quick else (4, 8, 16):
        found[f"direct p{programs}"] = (Choice("direct", programs),) * 2
    for programs, piece, ring in [(8, 64, 2), (8, 32, 3)] + ([] if quick else [(4, 64, 2), (16, 64, 2), (8, 16, 4)]):
        choice = Choice("staged", programs, piece_bytes=piece * MIB, ring=ring)
        found[f"staged {piece}x{ring} p{programs}"] = (choice, choice)
    for share in (0.6,) if quick else (0.4, 0.6, 0.8):
        found[f"mixed {share} / staged"] = (Choice("mixed", 16, direct_share=share), Choice("staged"))
    return found


def make_pool(kind: str, nbytes: int) -> tuple[torch.Tensor, str]:
    """uint8 [nbytes] at a multiple of PIECE_BYTES, touched, and words about its pages."""
    if kind == "memfd":
        memory = PoolMemory(nbytes)
        memory.start(lambda: None)
        while memory.ready < memory.usable:
            time.sleep(0.01)
        mapping = mmap.mmap(memory.fd, nbytes)
        # At whatever address: slots keep clear of multiples of PIECE_BYTES in the pool, not in the address space.
        pool = torch.frombuffer(mapping, dtype=torch.uint8)
        word = "hugetlb" if memory.huge_pages else "transparent" if memory._transparent else "none"
        return pool, f"memfd, huge pages: {word}"
    block = torch.empty(nbytes + PIECE_BYTES, dtype=torch.uint8)
    start = -block.data_ptr() % PIECE_BYTES
    pool = block[start : start + nbytes]
    pool.zero_()
    return pool, "anonymous memory"


def measure(runners: dict, bench: Bench, repeats: int, deadline: float, errors: dict[str, str]) -> list[dict]:
    """GB/s of every runner in every direction."""

    def failed(name: str, direction: str, error: Exception) -> None:
        errors[f"{name}, {bench.page} x {bench.layers}"] = f"{direction}: {type(error).__name__}: {error}"

    rows = []
    for (name, direction), rate in rates(runners, repeats, deadline, failed).items():
        row = {"page": bench.page, "layers": bench.layers, "way": name, "direction": direction, "GB/s": round(rate, 2)}
        host = getattr(runners[name], "host_us", None)
        if host:
            row["host_us"] = round(statistics.median(host))
        rows.append(row)
    return rows


def table(rows: list[dict], reference: dict[str, float]) -> None:
    for page, layers in dict.fromkeys((r["page"], r["layers"]) for r in rows):
        print(f"\n{page // KIB} KiB x {layers} layers: GB/s (share of memcpy); host us per 64 MiB")
        here = [r for r in rows if (r["page"], r["layers"]) == (page, layers)]
        for way in dict.fromkeys(r["way"] for r in here):
            cells = []
            for direction in DIRECTIONS:
                row = next((r for r in here if r["way"] == way and r["direction"] == direction), None)
                share = row["GB/s"] / reference[direction] if row else 0
                cells.append(f"{row['GB/s']:7.1f} ({share:.3f})" if row else "      -        ")
                host = row.get("host_us", "") if row else ""
            print(f"  {way:24s}" + "  ".join(cells) + f"  {host}", flush=True)


def best(
    rows: list[dict], choices: dict[str, tuple[Choice, Choice]], device: str, reference: dict[str, float]
) -> tuning.Tuning:
    """For each direction and size the way whose share of memcpy is best, alone or both at once, whichever is less."""
    share = {(r["page"], r["layers"], r["way"], r["direction"]): r["GB/s"] / reference[r["direction"]] for r in rows}
    sizes = sorted({(r["page"] * r["layers"], r["page"], r["layers"]) for r in rows})
    rules: list[list[tuning.Rule]] = []
    for number, direction in enumerate(("store", "load")):
        winners = []
        for size, *shape in sizes:
            score = {w: min(share.get((*shape, w, d), 0) for d in (direction, "both")) for w in choices}
            winners.append((size, choices[max(score, key=score.get)][number]))
        found = []
        for i, (size, choice) in enumerate(winners):
            # Half way to the next size, by ratio.
            below = None if i + 1 == len(winners) else int((size * winners[i + 1][0]) ** 0.5)
            if found and found[-1].choice == choice:
                found.pop()
            found.append(tuning.Rule(below, choice))
        rules.append(found)
    # What stores cost the model's steps is not measured here.
    on_model_stream = tuning.MEASURED.get(device, tuning.DEFAULT).store[-1].choice.on_model_stream
    return tuning.changed(tuning.Tuning(device, *map(tuple, rules)), "store", on_model_stream=on_model_stream)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="four sizes, fewer ways and repetitions")
    parser.add_argument("--seconds", type=float, default=200, help="stop repeating after so long")
    parser.add_argument("--pool", choices=("memfd", "anonymous"), default="memfd", help="memfd: as the store makes it")
    parser.add_argument("--pool-gib", type=int, default=4)
    parser.add_argument("--dma", action="store_true", help="also what the DMA engines do by themselves")
    parser.add_argument("--only-dma", action="store_true")
    parser.add_argument("--move-mib", type=int, default=1024, help="bytes of one measurement")
    parser.add_argument("--repeats", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", action="store_true", help="keep the best ways for this machine")
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("JSON", "PNG"))
    args = parser.parse_args()
    if args.plot:
        from plot import plot

        plot(*args.plot)
        return
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here: this benchmark measures one")
    began = time.monotonic()
    repeats = args.repeats or (3 if args.quick else 5)
    limit = min(args.seconds, 50) if args.quick else args.seconds
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, {torch.cuda.get_device_properties(0).multi_processor_count} SMs")

    size = args.pool_gib * GIB
    cache = torch.empty(size, dtype=torch.uint8, device="cuda")
    torch.manual_seed(0)
    for at in range(0, size, GIB):
        cache[at : at + GIB] = torch.randint(0, 256, (GIB,), dtype=torch.uint8, device="cuda")
    touched = time.perf_counter()
    pool_memory, huge = make_pool(args.pool, size)
    pinned = time.perf_counter()
    driver = Driver(torch.cuda.current_device())
    for at in range(0, size, PIECE_BYTES):
        driver.register(pool_memory.data_ptr() + at, PIECE_BYTES)
    now = time.perf_counter()
    print(f"pool of {args.pool_gib} GiB ({huge}): touched in {pinned - touched:.2f} s, pinned in {now - pinned:.2f} s")
    pool = (pool_memory.data_ptr(), size, pool_memory)

    # Of memory that the runtime knows as pinned: torch does not see our registration and would stage.
    buffer = torch.empty(4 * GIB if not args.quick else 2 * GIB, dtype=torch.uint8, pin_memory=True)
    reference = memcpy(repeats, 2 * GIB, buffer, cache)
    print("memcpy GB/s:", reference, flush=True)

    engines = []
    if args.dma or args.only_dma:
        try:
            engines = dma.measure(pool_memory, cache)
        except Exception:
            traceback.print_exc()
    if args.only_dma:
        return
    choices = ways(args.quick)
    current = tuning.for_device(device)
    rows: list[dict] = []
    errors: dict[str, str] = {}
    skipped: dict[str, str] = {}
    shapes = QUICK_SHAPES if args.quick else SHAPES
    for number, (page, layers) in enumerate(shapes):
        bench = Bench(page, layers, args.move_mib * MIB, cache, pool)
        runners: dict = {}

        def add(name, *arguments, _bench=bench, _runners=runners, **options):
            try:
                runner = Ours(_bench, *arguments, **options)
                if runner.checked:
                    runner.check()
                _runners[name] = runner
            except Exception as error:
                errors[f"{name}, {_bench.page} x {_bench.layers}"] = f"{type(error).__name__}: {error}"
                traceback.print_exc()

        add("kvtier", current)
        add("kvtier, no checksum", current, checked=False)
        add("kvtier, adjacent slots", current, adjacent=True)
        for name, choice in choices.items():
            add(name, tuning.fixed(*choice))
        try:
            runners |= peers(bench, skipped)
        except Exception as error:
            errors[f"peers, {page} x {layers}"] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        share = began + 5 + (limit - 5) * (number + 1) / len(shapes)
        found = measure(runners, bench, repeats, share, errors)
        table(found, reference)
        rows += found
        for runner in runners.values():
            runner.close()
        runners.clear()
        gc.collect()
        torch.cuda.empty_cache()
        result = {"device": device, "torch": torch.__version__, "memcpy": reference, "rows": rows}
        result |= {"pool": huge, "engines": engines}
        result |= {"errors": errors, "skipped": skipped, "seconds": round(time.monotonic() - began)}
        if args.out:  # after each size, so that a crash leaves what there is
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    again = memcpy(repeats, 2 * GIB, buffer, cache)
    print("\nmemcpy GB/s at the end:", again, " errors:", errors, " skipped:", skipped)
    tuned = best(rows, choices, device, reference)
    for name, rules in (("store", tuned.store), ("load", tuned.load)):
        for rule in rules:
            print(f"best to {name} parts below {rule.below}: {rule.choice}")
    if args.tune:
        print("kept in", tuning.save(tuned))
    print(f"{time.monotonic() - began:.0f} s")
    if errors:
        sys.exit(1)


if __name__ == "__main__":
    main()
