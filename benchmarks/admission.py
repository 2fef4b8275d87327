"""What the disk tier finds of a recorded request trace, and what is written to it, by what is admitted.

    python benchmarks/admission.py TRACE.jsonl.xz -o benchmarks/results/admission.json

A line of the trace is a request; its ``hash_ids`` name its prompt's blocks (512 tokens each in Mooncake's). Each one
looks its chain up in memory, brings up what the disk has of the rest, and stores what neither has. Index, disk tier
and demotion are the store's own; the mover answers at once, so that nothing is missed for want of speed. A slot holds
one block. ``--scan``: so many blocks, in prompts of 128k tokens that never return, come in between.
"""

import argparse
import heapq
import itertools
import json
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from policies import NEVER, SPACE, ideal, read

from vllm_kvtier.store.entries import Shape
from vllm_kvtier.store.extents import SlotPool
from vllm_kvtier.store.index import HASH, Index
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.admission import DEFAULT, Admission, admission
from vllm_kvtier.store.lower.base import Block, Want
from vllm_kvtier.store.lower.demotion import Demotion
from vllm_kvtier.store.lower.disk.tier import DiskTier
from vllm_kvtier.store.lower.mover import OPENING, READY
from vllm_kvtier.store.messages import GroupShape
from vllm_kvtier.store.policies import DEFAULT_POLICY, POLICIES
from vllm_kvtier.wire.reactor import Timer
from vllm_kvtier.wire.slots import PAGE

TOKENS = 512  # a block
SCAN_PROMPT = 256  # blocks
ENGINE, PROMOTION, DEMOTION = 1, 2, 3
SHAPE = Shape(1, None, 1)


class Time:
    """The trace's clock, and the reactor's part that waits for it."""

    def __init__(self):
        self.now = 0.0
        self._soon: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def __call__(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self.now + delay, callback)
        heapq.heappush(self._timers, (timer.when, next(self._order), timer))
        return timer

    def pass_until(self, until: float) -> None:
        while self._soon or (self._timers and self._timers[0][0] <= until):
            while self._soon:
                self._soon.popleft()()
            if self._timers and self._timers[0][0] <= until:
                timer = heapq.heappop(self._timers)[2]
                if timer.callback is not None:
                    self.now = max(self.now, timer.when)
                    timer.callback()
        self.now = until


class AtOnce:
    """A mover whose disk takes no time."""

    def __init__(self, kind, options, pool_fd, pool_bytes, reactor, on_message, on_up, on_down, **seconds):
        self.state, self.reason, self.restarts, self.timeouts = OPENING, "", 0, 0
        self._on_up, self._ids = on_up, itertools.count(1)
        self._soon = reactor.call_soon

    def start(self) -> None:
        self.state = READY
        self._on_up(m.Opened(True))

    def next_id(self) -> int:
        return next(self._ids)

    def send(self, message) -> bool:
        return True

    def request(self, message, seconds, on_reply) -> None:
        self._soon(lambda: on_reply(m.Moved(message.id, [True] * len(message.moves))))


def replay(
    requests: list[tuple[float, list[int]]],
    memory: int,
    disk: int,
    made: Callable[[], Admission],
    policy: str = DEFAULT_POLICY,
) -> dict:
    """Hit rates of memory and disk of so many blocks each, and what was written. Requests with negative ids are the
    scan's: they count nowhere."""
    clock = Time()
    index = Index(SlotPool(memory + 1, piece_pages=memory + 1), POLICIES[DEFAULT_POLICY], clock)
    index.grow(memory + 1)
    for client in (ENGINE, PROMOTION):
        index.connect(client, TOKENS, [GroupShape(units=1, slot_pages=1)])
    tier = DiskTier(
        {"size": (disk + 1) * PAGE}, -1, 0, clock, index.shapes, policy=POLICIES[policy], clock=clock, make_mover=AtOnce
    )
    demotion = Demotion(index, [tier], DEMOTION, lambda tier: made(), 1 << 40, 1 << 40, clock, clock)
    index.watch = demotion
    tier.start()
    clock.pass_until(0.0)
    asked = hits = below = stored = 0
    begun = time.process_time()
    for when, ids in requests:
        clock.pass_until(max(when, clock.now))
        chain = b"".join((i % (1 << 63) + 1).to_bytes(HASH, "big") for i in ids)
        found = index.lookup(ENGINE, SPACE, chain, 0, NEVER)
        up = promote(index, tier, clock, chain, found.units) if found.units < len(ids) else 0
        start = found.units + up
        rest = chain[start * HASH :]
        before = chain[(start - 1) * HASH : start * HASH] if start else bytes(HASH)
        slots = index.reserve(ENGINE, SPACE, b"", [0] * (len(ids) - start), rest, (before + rest)[: len(rest)], NEVER)
        written = [slot for slot in slots if slot > 0]
        index.commit(ENGINE, written)
        if found.lease:
            index.release(ENGINE, found.lease)
        clock.pass_until(clock.now + 0.1)  # what was stored goes down before the next one comes
        stored += len(written)
        if ids[0] >= 0:
            asked, hits, below = asked + len(ids), hits + found.units, below + up
    counts = tier.counts()
    return {
        "memory_hits": hits / asked,
        "disk_hits": below / asked,
        "hits": (hits + below) / asked,
        "stored_blocks": stored,
        "written_blocks": counts.written_blocks,
        "read_blocks": counts.read_blocks,
        "us_per_block": 1e6 * (time.process_time() - begun) / asked,
    }


def promote(index: Index, tier: DiskTier, clock: Time, chain: bytes, start: int) -> int:
    """Brings up what the disk has of the chain from block ``start`` on: number of blocks."""
    found = []
    tier.find(Want(SPACE, TOKENS, [SHAPE], chain, start), found.append)
    find = found[0]
    count = find.units - start
    if not count:
        return 0
    hashes = chain[start * HASH : find.units * HASH]
    before = chain[(start - 1) * HASH : start * HASH] if start else bytes(HASH)
    parents = (before + hashes)[: len(hashes)]
    slots = index.reserve(PROMOTION, SPACE, b"", [0] * count, hashes, parents, NEVER)
    blocks = [
        Block(SPACE, 0, hashes[i * HASH : (i + 1) * HASH], parents[i * HASH : (i + 1) * HASH], b"", slot, 1)
        for i, slot in enumerate(slots)
        if slot > 0
    ]
    good: list[bool] = []
    tier.read(find, blocks, good.extend)
    clock.pass_until(clock.now)
    assert len(good) == len(blocks) and all(good)
    tier.release(find)
    return index.commit(PROMOTION, [block.slot for block in blocks])


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
