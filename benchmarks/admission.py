"""Hit rate and writes of the disk tier for a recorded request trace, by admission policy.

    python benchmarks/admission.py TRACE.jsonl.xz -o benchmarks/results/admission.json

``vllm_kvtier.plan.replay`` replays the trace. ``--scan``: blocks, in prompts of 128k tokens that never return, that are
inserted in between.
"""

import argparse
import itertools
import json
from pathlib import Path

from vllm_kvtier.plan.replay import replay
from vllm_kvtier.plan.trace import ideal, read
from vllm_kvtier.store.tiers.admission import DEFAULT, admission

SCAN_PROMPT = 256  # blocks


def with_scan(requests: list[tuple[float, list[int]]], blocks: int) -> list[tuple[float, list[int]]]:
    """The scan's prompts in the middle third, evenly."""
    prompts = [[-1 - i for i in range(at, at + SCAN_PROMPT)] for at in range(0, blocks, SCAN_PROMPT)]
    first, last = len(requests) // 3, 2 * len(requests) // 3
    step = (last - first) / len(prompts)
    at = {}
    for n, prompt in enumerate(prompts):
        at.setdefault(first + int(n * step), []).append(prompt)
    out = []
    for n, request in enumerate(requests):
        out += [(request[0], prompt) for prompt in at.get(n, [])]
        out.append(request)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path, help="JSON lines, .xz or plain")
    parser.add_argument("-o", "--output", type=Path, help="JSON file for the figures")
    parser.add_argument(
        "--sizes",
        nargs="+",
        default=["2000:20000", "5000:50000", "10000:100000"],
        help="blocks in memory and on the disk",
    )
    parser.add_argument("--scan", type=int, default=100_000, help="blocks that are asked for once, in a second run")
    parser.add_argument("--min-tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--explore", action="store_true", help="what else was tried")
    args = parser.parse_args()
    requests = read(args.trace)
    cases: dict[str, dict] = {"all": {"made": lambda: admission("all")}, "reuse": {"made": lambda: admission("reuse")}}
    for tokens in args.min_tokens:
        cases[f"all, {tokens} tokens"] = {"made": lambda tokens=tokens: admission("all", tokens)}
        cases[f"reuse, {tokens} tokens"] = {"made": lambda tokens=tokens: admission("reuse", tokens)}
    if args.explore:
        for name in ("all", "reuse"):
            cases[f"{name}, lru"] = {"made": lambda name=name: admission(name), "policy": "lru"}
    result = {
        "trace": args.trace.name,
        "requests": len(requests),
        "blocks_asked": sum(len(ids) for _, ids in requests),
        "ideal": ideal(requests),
        "default": DEFAULT,
        "scan_blocks": args.scan,
        "runs": [],
    }
    print(
        f"{result['requests']} requests, {result['blocks_asked']} blocks; infinite memory finds "
        f"{100 * result['ideal']:.2f} %"
    )
    print("Percent of blocks found in memory + on disk; blocks written, per 100 asked for")
    traces = {"trace": requests, "with a scan": with_scan(requests, args.scan)}
    for (what, trace), size in itertools.product(traces.items(), args.sizes):
        memory, disk = map(int, size.split(":"))
        print(f"\n{what}, memory {memory:,}, disk {disk:,}")
        for name, case in cases.items():
            run = replay(trace, memory, disk, **case)
            result["runs"].append({"what": what, "memory": memory, "disk": disk, "admission": name, **run})
            label = f"{name} (default)" if name == DEFAULT else name
            print(
                f"{label:22}{100 * run['memory_hits']:7.2f} + {100 * run['disk_hits']:5.2f} = {100 * run['hits']:5.2f}"
                f"   written {100 * run['written_blocks'] / result['blocks_asked']:6.1f}"
                f"   us a block {run['us_per_block']:.0f}",
                flush=True,
            )
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
