"""Time to first token of a prompt that another node's engine has computed, by stores that read from each other and by
Mooncake Store, beside plain copies.

    python benchmarks/cluster_first_token.py [--out benchmarks/results/cluster_first_token.json]      # CPUs
    python benchmarks/cluster_first_token.py --model benchmarks/models/qwen3-8b-shapes --dummy --gpus 0 1 \\
        --lengths 2048 8192 32768 --repeats 8 5 3 --out device.json

Of each kind two nodes' stores and an engine on each, with its own device. All run at once, and the kinds alternate.
Each node is a network namespace, which needs root; else (``network`` says it) an address of the loopback. Each prompt
is new: the first node's engine computes it, and the second node's engine gets it once the first one's store has it, as
other nodes find it. Medians in ms to the second engine's first token:

  other     from the other node; beyond: the median of other - hit, prompt by prompt
  hit       again: from its GPU's prefix cache
  memory    again, after a reset of that cache: from its own node's store
  computed  another new prompt

brought: share of the prompt that the connector brought, other and memory. same: share of these answers that begin as
the first engine's own hit did, the token's probability included. ``plain``, in ``other``: as many bytes over one TCP
connection between the two nodes and nothing else (``plain_socket.py``); GB/s of the others: their bytes by beyond.
Prompts end in a few tokens that are in no cache (tiers.TAIL). ``mooncake`` needs its package; only the first node has a
segment, with room for all of its prompts, so that none is evicted and none is written on the second. Each store has
memory for two and a half of the longest prompts: 48 GB of all four for the second command, and 30 of the segment.
--options '{"load_policy": "always"}' loads what would be computed sooner, too.
"""

import argparse
import functools
import itertools
import json
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import clusters  # before what is in tests
import httpx
import mooncake_master
import netns
import tiers
from store_process import Store

from vllm_kvtier.devtools.processes import ServiceFailed
from vllm_kvtier.devtools.stores import StoreFailed, counts_when_idle
from vllm_kvtier.wire.auth import ClusterKey

MODEL = tiers.ROOT / "models/recall-6m"
WARM_UP = 3  # rounds before the measured ones, in which connections are made and rates measured; one a further length
PROMPTS = 2.5  # of the longest, for which a store and a GPU have memory
SLACK = 16 << 20
FAILURES = (tiers.PeerFailed, ServiceFailed, StoreFailed, httpx.HTTPError, AssertionError)


class Loopback:
    """In the place of netns.NetnsStar: addresses of one network, that of this process."""

    def __init__(self, nodes: int):
        self.addresses = [f"127.0.0.{i + 1}" for i in range(nodes + 1)]

    def before(self, _: int) -> list[str]:
        return []


def rounds(args: argparse.Namespace) -> list[tuple[int, int, int]]:
    """(tokens, rounds that warm up, measured rounds) by length."""
    repeats = itertools.chain(args.repeats, itertools.repeat(args.repeats[-1]))
    return [(n, 1 if i else WARM_UP, count) for i, (n, count) in enumerate(zip(args.lengths, repeats, strict=False))]


class Cluster:
    """A kind's two stores, and an engine on each."""

    def __init__(self, kind: str, net: netns.NetnsStar | Loopback, model: Path, args: argparse.Namespace):
        self.kind, self._net = kind, net
        longest, per_token = max(args.lengths), tiers.bytes_per_token(model)
        self._pool = int(PROMPTS * longest * per_token) + SLACK
        self._segment = sum(length * (warm + count) for length, warm, count in rounds(args)) * per_token + SLACK
        self._master = mooncake_master.Master(net.addresses[-1], net.before(2)) if kind == "mooncake" else None
        folders = [args.logs / f"{kind}-{node}" for node in range(2)]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        tcp = {"UCX_TLS": "tcp,cuda_copy" if args.gpus else "tcp"}  # beside GPUs NIXL refuses "tcp"
        self.stores = [Store(folder, net.before(node), tcp) for node, folder in enumerate(folders)]
        self.engines = [self._engine(node, model, int(PROMPTS * longest), args) for node in range(2)]

    def _engine(self, node: int, model: Path, tokens: int, args: argparse.Namespace) -> tiers.Peer:
        name = f"{self.kind}-{node}"
        own = {"gpu": args.gpus[node] if args.gpus else None}
        own["variants"] = {name: {**args.options, "store": self.stores[node].path}}
        return tiers.Peer(f"kvtier:{name}", argparse.Namespace(**{**vars(args), **own}), model, tokens, 0)

    def start_stores(self, key: Path) -> None:
        if self._master is not None:
            self._master.start()
        for node, store in enumerate(self.stores):
            options = clusters.store_options(self._net, 2, node, key, self._master, 0 if node else self._segment)
            if node and self._master is not None:
                options.append("--mooncake-admission=reuse")  # what it computes stays out of the first one's segment
            store.start(f"--size={self._pool}", *options)

    def wait_ready(self) -> None:
        for peer in self.engines:
            peer.engine.wait_ready()
            peer.first_token([1000] * 64)

    def idle(self, node: int) -> None:
        counts_when_idle(self.stores[node].path, seconds=60)

    def read_bytes(self) -> int:
        """By the second node, from elsewhere."""
        return self.stores[1].counts().tiers[0].read_bytes

    def close(self) -> None:
        tiers.stop(self.engines)
        for store in self.stores:
            store.kill()
        if self._master is not None:
            self._master.kill()


def sample(cluster: Cluster, prompt: list[int], other: list[int]) -> dict[str, float]:
    first, second = cluster.engines
    first.first_token(prompt)
    first.first_token(prompt)
    cluster.idle(0)
    before = cluster.read_bytes()
    found = {}

    def brought(name: str) -> None:
        hits = second.total(tiers.HOST_HITS)
        found[name] = second.first_token(prompt)
        found[f"{name} brought"] = (second.total(tiers.HOST_HITS) - hits) / (len(prompt) - tiers.TAIL)
        found[f"{name} same"] = float(second.opening == first.opening)

    brought("other")
    found["hit"] = second.first_token(prompt)
    cluster.idle(1)
    found["bytes"] = cluster.read_bytes() - before
    second.forget()
    brought("memory")
    found["computed"] = second.first_token(other)
    cluster.idle(1)
    return {**found, "beyond": found["other"] - found["hit"]}


def summary(kind: str, tokens: int, nbytes: int, taken: list[dict[str, float]]) -> dict[str, Any]:
    def of(name: str) -> float:
        return statistics.median(each[name] for each in taken)

    def ms(name: str) -> float:
        return round(1e3 * of(name), 1)

    def span(name: str) -> str:
        return f"{1e3 * min(each[name] for each in taken):.1f} to {1e3 * max(each[name] for each in taken):.1f}"

    return {
        "kind": kind, "tokens": tokens, "MB": round(nbytes / 1e6, 1), "n": len(taken),
        "computed": ms("computed"), "hit": ms("hit"), "other": ms("other"), "other span": span("other"),
        "beyond": ms("beyond"), "GB/s": round(nbytes / of("beyond") / 1e9, 2),
        "memory": ms("memory"), "memory span": span("memory"), "read MB": round(of("bytes") / 1e6, 1),
        "brought": [round(of(f"{name} brought"), 3) for name in ("other", "memory")],
        "same": [round(statistics.mean(each[f"{name} same"] for each in taken), 2) for name in ("other", "memory")],
    }  # fmt: skip


def up(kinds: list[Cluster], key: Path) -> list[Cluster]:
    """Those that came up."""

    def start(cluster: Cluster) -> None:
        cluster.start_stores(key)
        for peer in cluster.engines:
            peer.engine.start()

    with ThreadPoolExecutor(len(kinds)) as pool:
        starting = [pool.submit(start, cluster) for cluster in kinds]
    running = []
    for cluster, started in zip(kinds, starting, strict=True):
        try:
            started.result()
            cluster.wait_ready()
            running.append(cluster)
        except FAILURES as error:
            print(f"LEFT OUT: {cluster.kind}: {error!r}", flush=True)
            cluster.close()
    return running


def measure(
    running: list[Cluster],
    net: netns.NetnsStar | Loopback,
    model: Path,
    args: argparse.Namespace,
    add: Callable[[dict[str, Any]], None],
) -> None:
    rng, vocab = random.Random(24), tiers.vocabulary(model)
    deadline = time.monotonic() + args.seconds
    for length, warm, count in rounds(args):
        taken: dict[str, list[dict[str, float]]] = {cluster.kind: [] for cluster in running}
        for i in range(warm + count):
            if time.monotonic() > deadline:
                print(f"out of time: {length} tokens, {i} of {warm + count} rounds", flush=True)
                break
            prompts = [tiers.tailed_prompt(rng, vocab, length) for _ in range(2)]
            for cluster in list(running):
                try:
                    values = sample(cluster, *prompts)
                except FAILURES as error:
                    print(f"LEFT OUT from here: {cluster.kind}: {error!r}", flush=True)
                    running.remove(cluster)
                    cluster.close()
                    continue
                if i >= warm:
                    taken[cluster.kind].append(values)
        nbytes = length * tiers.bytes_per_token(model)
        for kind, values in taken.items():
            if values:
                add(summary(kind, length, nbytes, values))
        if any(taken.values()):
            seconds = clusters.plain_copies(net, 1, count, [nbytes])[nbytes]
            plain = {"kind": "plain", "tokens": length, "MB": round(nbytes / 1e6, 1), "n": count}
            add({**plain, "other": round(1e3 * seconds, 1), "GB/s": round(nbytes / seconds / 1e9, 2)})


def run(net: netns.NetnsStar | Loopback, args: argparse.Namespace) -> None:
    began = time.monotonic()
    model = tiers.prepare(args.model, int(PROMPTS * max(args.lengths)))
    key = Path(tempfile.mkdtemp()) / "key"
    ClusterKey.create(str(key))
    rows: list[dict[str, Any]] = []
    meta: dict[str, Any] = {"network": "loopback" if isinstance(net, Loopback) else "namespaces"}

    def write() -> None:
        if args.out is not None:
            args.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        write()  # a run that is killed leaves what there is

    kinds = [Cluster(kind, net, model, args) for kind in args.kinds]
    try:
        running = up(kinds, key)
        if not running:
            sys.exit("no cluster came up")
        meta |= {
            "model": args.model.name, "vllm": running[0].engines[0].client.get("/version").json()["version"],
            "device": tiers.device(argparse.Namespace(gpu=args.gpus[1] if args.gpus else None)),
            "options": args.options, "start_seconds": round(time.monotonic() - began),
        }  # fmt: skip
        print(json.dumps(meta), flush=True)
        measure(running, net, model, args, add)
        for cluster in running:  # the first place to look when a row is odd
            meta[f"counters of {cluster.kind}"] = cluster.engines[1].counters()
        write()
    finally:
        for cluster in kinds:
            cluster.close()
    names = functools.reduce(lambda names, row: names | row, rows, {})
    print(tiers.table([{name: row.get(name, "") for name in names} for row in rows]))
    print(f"{time.monotonic() - began:.0f} s in all")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--gpus", type=int, nargs="*", default=[], help="of the first and the second node; none: CPU")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1440])
    parser.add_argument("--repeats", type=int, nargs="+", default=[8], help="by length; the last one: of all others")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON, of our connector, the store's beside")
    parser.add_argument("--engine-args", type=shlex.split, default=[], metavar="FLAGS", help="more flags, as one word")
    parser.add_argument("--seconds", type=float, default=600, help="of measurements; then no new round is begun")
    parser.add_argument("--ready", type=float, default=240, help="seconds an engine may take to start")
    parser.add_argument("--loopback", action="store_true", help="also where namespaces could be made")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp(prefix="kvtier-bench-")))
    args = clusters.parse(parser, loopback=True)
    if len(args.gpus) not in (0, 2):
        parser.error("--gpus: two")
    of_engines = argparse.ArgumentParser()
    tiers.add_arguments(of_engines)
    args = of_engines.parse_args(["--model", str(args.model)], args)
    reason = "--loopback" if args.loopback else netns.why_not()
    if reason:
        print(f"loopback instead of network namespaces: {reason}", flush=True)
    network: AbstractContextManager = nullcontext(Loopback(2)) if reason else netns.NetnsStar(2)
    with network as net:
        run(net, args)


if __name__ == "__main__":
    main()
