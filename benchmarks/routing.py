"""Routing policies of the proxy beside each other on a recorded conversation trace (Mooncake's).

``simulate`` is a discrete simulation of four engines on two nodes. The router, its policies, the index of KV events and
the tables of prefixes and conversations are the proxy's own code; engines, caches and stores are models. What computing
and loading cost was measured on an H200 (Qwen3-8B shapes, ``results/side_by_side_4xh200.json``: 2k, 8k and 32k tokens
computed in 55, 224 and 1,285 ms, loaded from host memory in 21, 43 and 127 ms). Engines compute the oldest prompt
first, in chunks of 8,192 tokens between decode steps, and load what is faster loaded than computed.

    python benchmarks/routing.py simulate --trace mooncake_conversation_trace.jsonl.xz --speed 1 2

``decide`` measures the processor time of one choice of a decode engine among many, by policy ``kv_events``, where the
whole prompt is in the GPU cache of one engine, in those of all, or in a cluster that all share; blocks have 16 tokens.

    python benchmarks/routing.py decide --engines 4 32 90 --tokens 12000
"""

import argparse
import hashlib
import heapq
import itertools
import json
import lzma
import platform
import random
import statistics
import sys
import time
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path

from vllm_kvtier.proxy.config import ROUTING_POLICIES, EngineAddress, ProxyConfig
from vllm_kvtier.proxy.engines.engine import EngineSlot
from vllm_kvtier.proxy.engines.fleet import Fleet
from vllm_kvtier.proxy.kv_events.feeds import KVEvents
from vllm_kvtier.proxy.kv_events.index import BlockIndex, PromptTokens
from vllm_kvtier.proxy.kv_events.messages import Removed, Stored, Tier
from vllm_kvtier.proxy.kv_events.shared_blocks import SharedBlocks
from vllm_kvtier.proxy.routing.conversations import ConversationRoute, Holder, Name, RouteTable
from vllm_kvtier.proxy.routing.policies import POLICIES
from vllm_kvtier.proxy.routing.prefixes import Piece, PrefixMemory
from vllm_kvtier.proxy.routing.prompt import Prompt
from vllm_kvtier.proxy.routing.router import Router

BLOCK = 512  # tokens of a block of the trace
CHUNK = 8192


def compute_seconds(begin: int, end: int) -> float:
    """To compute the tokens [begin, end) of a prompt: through the measured points of 8k and 32k."""
    return 2.34e-5 * (end - begin) + 4.82e-10 * (end**2 - begin**2)


def load_seconds(tokens: int) -> float:
    """From host memory."""
    return 0.014 + 3.4e-6 * tokens


def decode_seconds(sequences: int) -> float:
    """Of a decode step."""
    return (0.007 + 5e-5 * sequences) if sequences else 0.0


@dataclass(eq=False)
class Request:
    at: float
    tokens: int
    output: int
    ids: list[int]
    held: tuple[int, int] = (0, 0)  # tokens found in the GPU cache, and loaded
    done: int = 0
    first: float = 0.0
    slot: EngineSlot | None = None
    finished: bool = field(default=False)


def read_trace(path: Path, speed: float, limit: int | None) -> list[Request]:
    opened = lzma.open(path, "rt") if path.suffix == ".xz" else path.open()
    with opened as lines:
        rows = [json.loads(line) for line in itertools.islice(lines, limit)]
    return [
        Request(row["timestamp"] / 1000 / speed, row["input_length"], row["output_length"], row["hash_ids"])
        for row in rows
    ]


class Blocks:
    """An LRU cache of blocks that publishes its changes to the indexes of ``readers``."""

    def __init__(self, tier: Tier, capacity: int, readers: list[BlockIndex]):
        self._tier, self._capacity, self._readers = tier, capacity, readers
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def prefix(self, ids: list[int], begin: int = 0) -> int:
        """Blocks from number ``begin`` on that are here."""
        return sum(1 for _ in itertools.takewhile(self._blocks.__contains__, ids[begin:]))

    def add(self, ids: list[int]) -> None:
        """All whole blocks of a prompt; the first become the most recently used."""
        for begin, run in itertools.groupby(range(len(ids)), lambda i: ids[i] in self._blocks):
            if not begin:
                self._publish(ids, list(run))
        for each in reversed(ids):
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        gone = []
        while len(self._blocks) > self._capacity:
            gone.append(self._blocks.popitem(last=False)[0] + 1)
        for index in self._readers if gone else ():
            index.apply([Removed(self._tier, 0, gone)])

    def _publish(self, ids: list[int], run: list[int]) -> None:
        parent = ids[run[0] - 1] + 1 if run[0] else None
        tokens = [each for i in run for each in [ids[i]] * BLOCK]
        extra = [("",) if i == 0 else None for i in run]
        for index in self._readers:
            index.apply([Stored(self._tier, 0, BLOCK, parent, [ids[i] + 1 for i in run], tokens, extra)])


class SimulatedEngine:
    """``later(seconds, callback)``: the simulation's clock."""

    def __init__(self, now, later, gpu: Blocks, host: Blocks):
        self._now, self._later, self._gpu, self._host = now, later, gpu, host
        self._loaded_until = 0.0
        self._queue: deque[Request] = deque()
        self._ends: list[tuple[int, int, Request]] = []  # by number of decode step
        self._steps, self._order, self._busy = 0, itertools.count(), False
        self.computed = self.busy_seconds = 0.0

    def submit(self, request: Request) -> None:
        whole = request.ids[: (request.tokens - 1) // BLOCK]  # a prompt's last token is always computed
        here = self._gpu.prefix(whole)
        more = self._host.prefix(whole, here)
        begin, end = here * BLOCK, (here + more) * BLOCK
        if more and load_seconds(end - begin) < compute_seconds(begin, end):
            self._loaded_until = max(self._now(), self._loaded_until) + load_seconds(end - begin)
            request.held, request.done = (begin, end - begin), end
            self._later(self._loaded_until - self._now(), lambda: self._ready(request))
        else:
            request.held, request.done = (begin, 0), begin
            self._ready(request)

    def _ready(self, request: Request) -> None:
        self._queue.append(request)
        if not self._busy:
            self._step()

    def _step(self) -> None:
        """One step: a token for each running request, and a chunk of the oldest prompts."""
        left, seconds, completed = CHUNK, decode_seconds(len(self._ends)), []
        while left and self._queue:
            request = self._queue[0]
            end = min(request.tokens, request.done + left)
            seconds += compute_seconds(request.done, end)
            self.computed += end - request.done
            left -= end - request.done
            request.done = end
            if end < request.tokens:
                break
            completed.append(self._queue.popleft())
        self._busy = bool(seconds)
        if self._busy:
            self.busy_seconds += seconds
            self._later(seconds, lambda: self._stepped(completed))

    def _stepped(self, completed: list[Request]) -> None:
        self._steps += 1
        for request in completed:
            request.first = self._now()
            request.slot.prompt_computed()
            whole = request.ids[: request.tokens // BLOCK]
            self._gpu.add(whole)
            self._host.add(whole)
            heapq.heappush(self._ends, (self._steps + request.output, next(self._order), request))
        while self._ends and self._ends[0][0] <= self._steps:
            heapq.heappop(self._ends)[2].slot.release()
        self._step()


class Simulation:
    """``engines`` engines, two a node, behind the router with one policy."""

    def __init__(self, policy: str, options: argparse.Namespace):
        self.time = 0.0
        self._due: list = []
        self._order = itertools.count()
        addresses = tuple(EngineAddress(f"http://engine:{i + 1}", events="x:1") for i in range(options.engines))
        config = ProxyConfig(decode=addresses, routing_policy=policy, engine_requests=0)
        self.fleet = Fleet(lambda engine: None, lambda engine: None, lambda role, wants: None)
        self.fleet.apply(config, probe_on_start=False)
        self.prefixes = PrefixMemory(config.max_prefixes)
        self.routes = RouteTable(config.max_conversations, config.conversation_ttl, lambda: self.time)
        self.indexes = [BlockIndex(1 << 20) for _ in addresses]
        events = KVEvents(self.fleet)
        events.index_of = lambda engine: self.indexes[engine.index]
        self.router = Router(self.fleet, POLICIES[policy](self.prefixes, events), config)
        self.engines = []
        for i in range(options.engines):
            if i % 2 == 0:
                host = Blocks(Tier.HOST, options.host_tokens // BLOCK, self.indexes[i : i + 2])
            gpu = Blocks(Tier.GPU, options.gpu_tokens // BLOCK, [self.indexes[i]])
            self.engines.append(SimulatedEngine(lambda: self.time, self.later, gpu, host))
        self.routing_seconds = 0.0
        self.picks: Counter[int] = Counter()

    def later(self, seconds: float, callback) -> None:
        heapq.heappush(self._due, (self.time + seconds, next(self._order), callback))

    def run(self, requests: list[Request]) -> None:
        for request in requests:
            self.later(request.at, lambda request=request: self._arrived(request))
        while self._due:
            self.time, _, callback = heapq.heappop(self._due)
            callback()

    def _arrived(self, request: Request) -> None:
        begin = time.perf_counter()
        prompt = self._prompt(request)
        route = self.routes.find(prompt.name)
        choice = self.router.choose_decode(prompt, route, prefilled=False)
        self.routing_seconds += time.perf_counter() - begin
        engine = choice.engine
        request.slot = EngineSlot(engine, choice.tokens)
        self.picks[engine.index] += 1
        self.routes.enter(prompt.name, (route or ConversationRoute(())).moved_to(Holder(engine.index, 0)))
        self.prefixes.enter(prompt.name.pieces, engine)
        self.engines[engine.index].submit(request)

    def _prompt(self, request: Request) -> Prompt:
        whole = request.ids[: request.tokens // BLOCK]
        pieces, state = [], b""
        for i, each in enumerate(whole):
            state = hashlib.blake2b(state + each.to_bytes(8, "big"), digest_size=16).digest()
            pieces.append(Piece(state, (i + 1) * BLOCK))
        # A turn ends somewhere in a block; the first block is a system prompt that all conversations share.
        digests = tuple(piece.digest for piece in reversed(pieces[1:]))
        name = Name(digests, digests[0] if digests else None, False, tuple(pieces))
        ids = [each for i in whole for each in [i] * BLOCK]
        return Prompt(name, request.tokens, PromptTokens(ids, ""))


def percentiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    shown = {"mean": statistics.mean(values), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}
    return {name: round(1000 * value, 1) for name, value in shown.items()}


def simulate(options: argparse.Namespace) -> list[dict]:
    rows = []
    for speed, policy in itertools.product(options.speed, options.policies):
        requests = read_trace(options.trace, speed, options.requests)
        simulation = Simulation(policy, options)
        simulation.run(requests)
        total = sum(request.tokens for request in requests)
        busy = [engine.busy_seconds for engine in simulation.engines]
        rows.append(
            {
                "policy": policy,
                "speed": speed,
                "ttft_ms": percentiles([request.first - request.at for request in requests]),
                "from_gpu": round(sum(request.held[0] for request in requests) / total, 4),
                "from_host": round(sum(request.held[1] for request in requests) / total, 4),
                "computed": round(sum(engine.computed for engine in simulation.engines) / total, 4),
                "busy": round(sum(busy) / len(busy) / simulation.time, 3),
                "busiest": round(max(busy) / statistics.mean(busy), 3),
                "picks": [simulation.picks[i] for i in range(options.engines)],
                "us_per_choice": round(1e6 * simulation.routing_seconds / len(requests)),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


PLACES = {"one": Tier.GPU, "all": Tier.GPU, "cluster": Tier.CLUSTER}


def decide(options: argparse.Namespace) -> list[dict]:
    rows = []
    for count, tokens, place in itertools.product(options.engines, options.tokens, PLACES):
        router = _router_of(count, tokens, place)
        prompts = [Prompt(Name((), None, False), tokens, PromptTokens(range(tokens), "")) for _ in range(options.runs)]
        router.choose_decode(prompts.pop(), None, prefilled=False)
        begin = time.process_time()
        for prompt in prompts:
            router.choose_decode(prompt, None, prefilled=False)
        milliseconds = 1e3 * (time.process_time() - begin) / len(prompts)
        rows.append({"engines": count, "tokens": tokens, "prefix_in": place, "ms": round(milliseconds, 2)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def _router_of(count: int, tokens: int, place: str) -> Router:
    addresses = tuple(EngineAddress(f"http://engine:{i + 1}", events="x:1") for i in range(count))
    config = ProxyConfig(decode=addresses, routing_policy="kv_events", engine_requests=0)
    fleet = Fleet(lambda engine: None, lambda engine: None, lambda role, wants: None)
    fleet.apply(config, probe_on_start=False)
    events, shared, size = KVEvents(fleet), SharedBlocks(), 16
    indexes = [BlockIndex(1 << 20, shared) for _ in addresses]
    events.index_of = lambda engine: indexes[engine.index]
    hashes = [random.getrandbits(63) for _ in range(tokens // size)]
    for i, index in enumerate(indexes):
        # The others have a block that is not of the prompt, in the same tier.
        ids, named = (range(tokens), hashes) if i == 0 or place == "all" else ([-1] * size, [random.getrandbits(63)])
        index.apply([Stored(PLACES[place], 0, size, None, named, ids, [[""], *[None] * (len(named) - 1)])])
    return Router(fleet, POLICIES["kv_events"](PrefixMemory(1), events), config)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    simulated = commands.add_parser("simulate")
    simulated.add_argument("--engines", type=int, default=4)
    simulated.add_argument("--speed", type=float, nargs="+", default=[1.0, 2.0, 3.0], help="of the trace's clock")
    simulated.add_argument("--gpu-tokens", type=int, default=650_000, help="of each engine's cache")
    simulated.add_argument("--host-tokens", type=int, default=3_400_000, help="of each node's store: 500 GB")
    simulated.add_argument("--trace", type=Path, required=True)
    simulated.add_argument("--requests", type=int, help="only the first ones")
    simulated.add_argument("--policies", nargs="+", default=list(ROUTING_POLICIES), choices=ROUTING_POLICIES)
    simulated.add_argument("--json", type=Path)
    decided = commands.add_parser("decide")
    decided.add_argument("--engines", type=int, nargs="+", default=[4, 32, 90])
    decided.add_argument("--tokens", type=int, nargs="+", default=[12_000])
    decided.add_argument("--runs", type=int, default=20)
    decided.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = (simulate if options.command == "simulate" else decide)(options)
    if options.json is not None:
        meta = {"command": " ".join(["python", *sys.argv]), "machine": platform.processor() or platform.machine()}
        options.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
