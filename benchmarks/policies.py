"""Hit rates of the store's eviction policies on a recorded request trace, through the real index.

    python benchmarks/policies.py TRACE.jsonl.xz -o benchmarks/results/policies.json --plot docs/policies.png

A line of the trace is a request; its ``hash_ids`` name its prompt's blocks (512 tokens each in Mooncake's), equal
ids for equal prefixes. Each request looks its chain up, stores what it did not find, and lets go; a slot holds one
block. The hit rate is blocks found, over blocks asked for. Beside the policies stand two that know the future or
have no limit: Belady's (evict, or never store, what is used again last; a bound for blocks without prefixes, a
greedy figure here, where a block is of no use without those before it) and an infinite cache, the ideal.
"""

import argparse
import heapq
import itertools
import json
import time
from collections import defaultdict
from pathlib import Path

from vllm_kvtier.plan.replay import NAMESPACE_ID
from vllm_kvtier.plan.trace import ideal, read
from vllm_kvtier.store.eviction import DEFAULT_POLICY, POLICIES
from vllm_kvtier.store.index.index import HASH_BYTES, Index
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.store.protocol import GroupShape

NEVER = 1 << 60  # later than any use, and than any lease ends


def replay(requests: list[tuple[float, list[int]]], policy: str, blocks: int) -> dict:
    """Hit rate of a store of that many blocks, its time a request, and how far its slots lie side by side."""
    now = 0.0
    pool = SlotPool(blocks + 1, piece_pages=blocks + 1)
    index = Index(pool, POLICIES[policy], lambda: now)
    index.grow(blocks + 1)
    index.connect(1, 512, [GroupShape(hash_blocks_per_block=1, slot_pages=1)])
    hits = asked = stored = runs = 0
    begun = time.process_time()
    for now, ids in requests:  # noqa: B007 (the index's clock reads it)
        block_hashes = b"".join((i + 1).to_bytes(HASH_BYTES, "big") for i in ids)
        found = index.lookup(1, NAMESPACE_ID, block_hashes, 0, NEVER)
        rest = block_hashes[found.num_hash_blocks * HASH_BYTES :]
        before = (
            block_hashes[(found.num_hash_blocks - 1) * HASH_BYTES : found.num_hash_blocks * HASH_BYTES]
            if found.num_hash_blocks
            else bytes(HASH_BYTES)
        )
        slots = index.reserve(
            1, NAMESPACE_ID, b"", [0] * (len(ids) - found.num_hash_blocks), rest, (before + rest)[: len(rest)], NEVER
        )
        written = [slot for slot in slots if slot > 0]
        index.commit(1, written)
        if found.lease:
            index.release(1, found.lease)
        hits += found.num_hash_blocks
        asked += len(ids)
        stored += len(written)
        runs += sum(b != a + 1 for a, b in itertools.pairwise([-1, *written]))
    seconds = time.process_time() - begun
    index.clear(None)  # the garbage collector does not see blocks
    return {
        "hit_rate": hits / asked,
        "stored": stored,
        "us_per_block": 1e6 * seconds / asked,
        "adjacent_slots": stored / max(1, runs),
    }


def belady(requests: list[tuple[float, list[int]]], blocks: int) -> float:
    """Hit rate when the future is known: the leaf that is used again last goes, or is not stored at all."""
    later: dict[int, list[int]] = defaultdict(list)  # id -> request numbers, the next one last
    for number in range(len(requests) - 1, -1, -1):
        for i in requests[number][1]:
            later[i].append(number)
    due: dict[int, int] = {}  # stored id -> its next use
    parent: dict[int, int | None] = {}
    children: dict[int, int] = defaultdict(int)
    heap: list[tuple[int, int]] = []  # (-next use, id); stale ones are skipped
    hits = 0
    for _, ids in requests:
        hits += sum(1 for _ in itertools.takewhile(due.__contains__, ids))
        before, here = None, set(ids)
        for i in ids:
            later[i].pop()
            use = later[i][-1] if later[i] else NEVER
            if i not in due:
                if before is not None and before not in due:
                    continue
                if use == NEVER or (len(due) >= blocks and not _evict_later(due, heap, parent, children, use, here)):
                    before = i
                    continue
                parent[i] = before
                if before is not None:
                    children[before] += 1
            due[i] = use
            heapq.heappush(heap, (-use, i))
            before = i
    return hits / sum(len(ids) for _, ids in requests)


def _evict_later(due, heap, parent, children, use: int, here: set[int]) -> bool:
    """Make room for a block used again at ``use`` by one used later; False: there is none."""
    while heap:
        key, i = heap[0]
        if due.get(i) != -key or children[i]:
            heapq.heappop(heap)
            continue
        if -key <= use or i in here:
            return False
        heapq.heappop(heap)
        del due[i]
        above = parent[i]
        if above is not None:
            children[above] -= 1
            if not children[above]:
                heapq.heappush(heap, (-due[above], above))
        return True
    return False


def plot(result: dict, file: Path) -> None:
    """Hit rate by size of the store, a line a policy (needs matplotlib)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colors = {"lru": "#bbbbbb", "arc": "#998ec3", "s3fifo": "#d8862b", "aging": "#1b7837"}
    figure, axis = plt.subplots(figsize=(5, 3.4))
    for name, rows in result["policies"].items():
        label = f"{name} (default)" if name == result["default"] else name
        axis.plot(result["sizes"], [100 * row["hit_rate"] for row in rows], "o-", label=label, color=colors.get(name))
    axis.plot(result["sizes"], [100 * rate for rate in result["belady"]], "^:", label="future known", color="black")
    axis.axhline(100 * result["ideal"], ls="--", lw=1, label="infinite", color="black")
    axis.set(xscale="log", xlabel="blocks of 512 tokens", ylabel="prompt blocks found, %", title=result["trace"])
    axis.title.set_size(9)
    axis.set_xticks(result["sizes"], [f"{n / 1000:g}k" for n in result["sizes"]])
    axis.set_xticks([], minor=True)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", type=Path, help="JSON lines, .xz or plain")
    parser.add_argument("-o", "--output", type=Path, help="JSON file for the figures")
    parser.add_argument("--plot", type=Path, help="PNG file")
    parser.add_argument("--blocks", type=int, nargs="+", default=[5000, 10000, 20000, 50000])
    parser.add_argument("--policies", nargs="+", default=["lru", "arc", "s3fifo", "aging"], choices=sorted(POLICIES))
    args = parser.parse_args()
    requests = read(args.trace)
    result = {
        "trace": args.trace.name,
        "requests": len(requests),
        "blocks_asked": sum(len(ids) for _, ids in requests),
        "default": DEFAULT_POLICY,
        "ideal": ideal(requests),
        "sizes": args.blocks,
        "belady": [belady(requests, blocks) for blocks in args.blocks],
        "policies": {name: [replay(requests, name, blocks) for blocks in args.blocks] for name in args.policies},
    }
    print(f"{result['requests']} requests, {result['blocks_asked']} blocks; hit rate, percent")
    print("blocks".ljust(18) + "".join(f"{blocks:9,}" for blocks in args.blocks))
    for name, rows in result["policies"].items():
        label = f"{name} (default)" if name == DEFAULT_POLICY else name
        rates = "".join(f"{100 * row['hit_rate']:9.2f}" for row in rows)
        notes = " / ".join(f"{row['us_per_block']:.0f}" for row in rows)
        runs = " / ".join(f"{row['adjacent_slots']:.1f}" for row in rows)
        print(f"{label:18}{rates}   us a block {notes}; slots side by side {runs}")
    print("Belady".ljust(18) + "".join(f"{100 * rate:9.2f}" for rate in result["belady"]))
    print("infinite".ljust(18) + f"{100 * result['ideal']:9.2f}" * len(args.blocks))
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        plot(result, args.plot)


if __name__ == "__main__":
    main()
