"""Replay a recorded trace over many nodes: which node serves a request, where its KV comes from, and the load on
network, master and router.

More nodes need more requests: the trace is repeated (``prompts``). Pieces of prompts have ``grain`` blocks at most.
With a grain of 1, one node finds what ``replay`` finds.
"""

import heapq
import itertools
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.plan.node import Cluster, Holders, Node, Tier
from vllm_kvtier.plan.pays import Prefill
from vllm_kvtier.plan.prompts import Prompts, arrivals, ideal, scatter
from vllm_kvtier.plan.trace import TOKENS, Requests

ROUTINGS = ("kv", "prefix-hash", "least-load", "round-robin")
SHARED = ("none", "nodes", "pool")
WINDOW_SECONDS = 60.0  # peaks are averages of so long
MAX_HOLDERS = 8  # nodes with a prefix that routing compares
EXACT_BLOCKS, COARSE_GRAIN = 1_000_000, 16  # the default grain is 1 up to so many blocks, and then coarse
PREFILL = Prefill.parse("25000")  # where no measurement is given

# Seconds of the master for a key, from calls of a client that shared two cores with it: upper limits. 1,000 keys of 110
# characters: exist 0.3 to 2 ms, query of replicas 4 ms. Puts have no figure; one is taken as two such queries.
EXIST_SECONDS, QUERY_SECONDS, PUT_SECONDS = 2e-6, 4e-6, 8e-6
ROUTER_SECONDS = 1.6e-3  # of the proxy for a request, measured with 16 clients (docs/proxy.md)


@dataclass(frozen=True)
class Costs:
    """Of a block of the trace: ``block_bytes`` in a store, ``block_tokens``, ``hash_blocks``, and ``block_keys`` in the
    pool (one per hash block, group and rank). Rates in bytes/s."""

    block_bytes: float = 1.0
    block_tokens: int = TOKENS
    hash_blocks: int = TOKENS // 16
    block_keys: int = TOKENS // 16
    prefill: Prefill = PREFILL
    memory_rate: float = 50e9
    disk_rate: float = 3e9
    network_rate: float = 10e9


# -- routing -------------------------------------------------------------------------------------------------------


class _Router:
    """Chooses the node of a request. ``kv``: where its first token is expected soonest, among the idlest node and those
    that hold the longest prefix. It knows what nodes hold, and not what the pool does."""

    def __init__(self, cluster: Cluster, costs: Costs, nodes: list[Node], holders: Holders, common: int):
        self._nodes, self._holders, self._common = nodes, holders, common
        self._loads = cluster.shared == "nodes"  # a node loads what another one has
        self._token_seconds = costs.prefill.seconds(10_000) / 10_000 * costs.block_tokens  # of a block
        self._load_seconds = costs.block_bytes / costs.network_rate
        self._idlest = [(0.0, node.number) for node in nodes]
        self._next = itertools.cycle(nodes)
        self.choose = {
            "kv": self._kv, "prefix-hash": self._hash, "least-load": self._least, "round-robin": self._turn,
        }[cluster.routing]  # fmt: skip

    def took(self, node: Node) -> None:
        """The node's ``free_at`` has changed."""
        heapq.heappush(self._idlest, (node.free_at, node.number))

    def _turn(self, when: float, keys: Sequence[int], sizes: Sequence[int]) -> Node:
        return next(self._next)

    def _hash(self, when: float, keys: Sequence[int], sizes: Sequence[int]) -> Node:
        key = keys[min(self._common, len(keys) - 1)]
        return self._nodes[int(scatter(key) * len(self._nodes))]

    def _least(self, when: float, keys: Sequence[int], sizes: Sequence[int]) -> Node:
        while self._idlest[0][0] != self._nodes[self._idlest[0][1]].free_at:
            heapq.heappop(self._idlest)
        return self._nodes[self._idlest[0][1]]

    def _kv(self, when: float, keys: Sequence[int], sizes: Sequence[int]) -> Node:
        best, node = 0, self._least(when, keys, sizes)
        found: Iterable[int] = ()
        for at in range(len(keys), 0, -1):
            if holding := self._holders.get(keys[at - 1]):
                best, found = sum(sizes[:at]), itertools.islice(holding, MAX_HOLDERS)
                break
        if not best:
            return node
        total = sum(sizes)

        def seconds(candidate: Node) -> float:
            here = sum(sizes[: candidate.reach(keys)])
            known = max(here, best) if self._loads else here
            wait = max(0.0, candidate.free_at - when)
            return wait + (total - known) * self._token_seconds + (known - here) * self._load_seconds

        return min([node, *(self._nodes[number] for number in found)], key=seconds)  # of equals, the idlest


# -- counting ------------------------------------------------------------------------------------------------------


class _Load:
    """Sums over the run and the largest of a window, by name; of the network by node and by pair of nodes."""

    def __init__(self, nodes: int):
        self.totals: Counter[str] = Counter()
        self.peaks: Counter[str] = Counter()
        self.links: Counter[tuple[int, int]] = Counter()
        self._window: Counter[str] = Counter()
        self._sent, self._received = [0.0] * nodes, [0.0] * nodes
        self._end = WINDOW_SECONDS

    def pass_until(self, when: float) -> None:
        if when >= self._end:
            self.close()
            self._end += WINDOW_SECONDS * (1 + (when - self._end) // WINDOW_SECONDS)

    def add(self, name: str, count: float) -> None:
        self._window[name] += count

    def send(self, source: int, target: int, nbytes: float) -> None:
        if source != target:
            self._window["bytes"] += nbytes
            self._sent[source] += nbytes
            self._received[target] += nbytes
            self.links[source, target] += nbytes

    def close(self) -> None:
        """End the window."""
        for name, row in (("node_sent", self._sent), ("node_received", self._received)):
            self.peaks[name] = max(self.peaks[name], *row)
            row[:] = [0.0] * len(row)
        for name, count in self._window.items():
            self.totals[name] += count
            self.peaks[name] = max(self.peaks[name], count)
        self._window.clear()


# -- the replay ----------------------------------------------------------------------------------------------------


def simulate(requests: Requests, copies: float, cluster: Cluster, costs: Costs = Costs(), grain: int = 0) -> dict:
    """Replay ``copies`` of the trace (a fraction: that share of its conversations) over the nodes. ``grain`` 0: chosen.

    Raises KVTierError for a routing or a kind of sharing that does not exist, and for no request at all.
    """
    if cluster.routing not in ROUTINGS or cluster.shared not in SHARED:
        raise KVTierError(
            f"routing {cluster.routing!r}, shared {cluster.shared!r}: choose one of {', '.join(ROUTINGS)}, and one of "
            f"{', '.join(SHARED)}"
        )
    order = arrivals(requests, copies)
    if not order:
        raise KVTierError(f"{copies} copies of the trace hold no request")
    blocks = sum(len(requests[i][1]) for *_, i in order)
    grain = grain or (1 if blocks <= EXACT_BLOCKS else COARSE_GRAIN)
    return _Replay(Prompts(requests, grain), cluster, costs).run(order) | {
        "requests": len(order),
        "tokens": blocks * costs.block_tokens,
        "grain": grain,
        "ideal": ideal(requests, copies),
    }


class _Replay:
    def __init__(self, prompts: Prompts, cluster: Cluster, costs: Costs):
        self._prompts, self._cluster, self._costs = prompts, cluster, costs
        holders: Holders = defaultdict(set)
        self._holders = holders
        self._nodes = [Node(number, cluster, holders) for number in range(cluster.nodes)]
        self._router = _Router(cluster, costs, self._nodes, holders, prompts.common)
        self._homes: dict[int, list[int]] = {}  # nodes with a replica of a piece of the pool
        size = cluster.nodes * cluster.pool // cluster.replicas
        self._pool = Tier(size, "lru", lambda piece: self._homes.pop(piece.key), linked=False)
        self._read = {"none": self._nowhere, "nodes": self._from_peers, "pool": self._from_pool}[cluster.shared]
        self._load = _Load(cluster.nodes)
        self._hits: Counter[str] = Counter()
        self._first_token = array("d")

    def run(self, order: list[tuple[float, int, int]]) -> dict:
        prompts = self._prompts
        for when, copy, index in order:
            keys, sizes = prompts.keys[index], prompts.sizes[index]
            if copy:
                added = copy * prompts.stride
                keys = keys[: prompts.common] + [key + added for key in keys[prompts.common :]]
            self._load.pass_until(when)
            self._serve(when, keys, sizes)
        self._load.close()
        return self._result(max(WINDOW_SECONDS, order[-1][0]))

    def _serve(self, when: float, keys: list[int], sizes: list[int]) -> None:
        node, costs, load = self._router.choose(when, keys, sizes), self._costs, self._load
        ends = [0, *node.load(keys, sizes)]
        ends.append(self._read(node, keys, sizes, ends[-1]) if ends[-1] < len(keys) else ends[-1])
        cached, memory, disk, remote = (sum(sizes[a:b]) for a, b in itertools.pairwise(ends))
        for name, count in (("cache", cached), ("memory", memory), ("disk", disk), ("cluster", remote)):
            self._hits[name] += count
        total, known = sum(sizes), sum(sizes[: ends[-1]])
        self._hits["asked"] += total
        load.add("requests", 1)
        load.add("stored", node.store(keys, sizes, ends[3]))
        seconds = costs.prefill.seconds
        compute = seconds(total * costs.block_tokens) - (seconds(known * costs.block_tokens) if known else 0.0)
        loading = (memory + disk + remote) / costs.memory_rate + disk / costs.disk_rate + remote / costs.network_rate
        begin = max(when, node.free_at)
        node.free_at = begin + compute
        node.busy += compute
        self._router.took(node)
        self._first_token.append(begin - when + costs.block_bytes * loading + compute)

    def _nowhere(self, node: Node, keys: list[int], sizes: list[int], start: int) -> int:
        return start

    def _from_peers(self, node: Node, keys: list[int], sizes: list[int], start: int) -> int:
        """Read the longest continuation that one of the asked nodes has."""
        num_nodes, peers = self._cluster.nodes, min(self._cluster.peers, self._cluster.nodes - 1)
        self._load.add("asks", peers)
        here, end, source = node.number, start, -1
        found = [n for n in self._holders.get(keys[start], ()) if 0 < (n - here) % num_nodes <= peers]
        while found and end < len(keys):
            end, source = end + 1, min(found, key=lambda n: (n - here) % num_nodes)
            found = [n for n in found if n in self._holders.get(keys[end], ())] if end < len(keys) else []
        if end > start:
            self._nodes[source].memory.touch(keys[:end])
            self._load.send(source, here, sum(sizes[start:end]) * self._costs.block_bytes)
        return end

    def _from_pool(self, node: Node, keys: list[int], sizes: list[int], start: int) -> int:
        """Read what the pool has, and put what it lacks."""
        load, costs, here = self._load, self._costs, node.number
        num_keys = costs.block_keys
        end = self._pool.find(keys, start)
        self._pool.touch(keys[start:end])
        for at in range(start, end):
            homes = self._homes[keys[at]]
            home = here if here in homes else homes[here % len(homes)]
            load.send(home, here, sizes[at] * costs.block_bytes)
        new = self._pool.add(keys, sizes, end)
        for piece in new:
            homes = self._homes[piece.key] = [here]
            for replica in range(1, self._cluster.replicas):
                home = (here + 1 + (piece.key + replica) % max(1, self._cluster.nodes - 1)) % self._cluster.nodes
                homes.append(home)
                load.send(here, home, piece.size * costs.block_bytes)
        asked, read = sum(sizes[start:]) * num_keys, sum(sizes[start:end]) * num_keys
        put = sum(piece.size for piece in new) * num_keys
        load.add("master_calls", 1 + (read > 0) + 2 * (put > 0))
        load.add("master_keys", asked + read + 2 * put)
        load.add("master_seconds", asked * EXIST_SECONDS + read * QUERY_SECONDS + put * PUT_SECONDS)
        return end

    def _result(self, seconds: float) -> dict:
        hits, load, costs = self._hits, self._load, self._costs
        asked = hits.pop("asked")
        tiers = {name: count / asked for name, count in hits.items()}
        busy = [node.busy / seconds for node in self._nodes]
        times = sorted(self._first_token)

        def rates(name: str, factor: float = 1.0) -> dict[str, float]:
            return {"mean": factor * load.totals[name] / seconds, "peak": factor * load.peaks[name] / WINDOW_SECONDS}

        return {
            "hits": tiers,
            "found": sum(tiers.values()),
            "seconds": seconds,
            "busy": {"mean": sum(busy) / len(busy), "max": max(busy)},
            "first_token_seconds": {f"p{p}": times[min(len(times) - 1, len(times) * p // 100)] for p in (50, 90, 99)},
            "network_bytes_per_second": rates("bytes")
            | {
                "node_sent_peak": load.peaks["node_sent"] / WINDOW_SECONDS,
                "node_received_peak": load.peaks["node_received"] / WINDOW_SECONDS,
                "link_mean_max": max(load.links.values(), default=0.0) / seconds,
            },
            "asks_per_second": rates("asks"),
            "master_calls_per_second": rates("master_calls"),
            "master_keys_per_second": rates("master_keys"),
            "master_cores": rates("master_seconds"),
            "router_requests_per_second": rates("requests"),
            "router_cores": rates("requests", ROUTER_SECONDS),
            "event_blocks_per_second": rates("stored", costs.hash_blocks),
        }
