"""Routing policies of the proxy beside each other, on four engines of two nodes; ``routing.py`` simulates them.

    python benchmarks/routing_engines.py [--json benchmarks/results/routing_engines.json]

Each node has a store and two engines, which publish KV events. Each policy has a proxy of its own, which gets the same
requests: whole sessions of a trace in Mooncake's format, drawn at random, at its times compressed to --seconds. Prompts
are those of cluster_faults.py, 14 times shorter than the trace's, and so are the answers; one without the code that was
asked for is wrong. Requests that the model gets wrong when it computes all are left out. Caches and stores are emptied
before each policy; --cache and --store have room for a small part of what is asked.

All run on this machine's cores, so first tokens can be compared only while these are not too busy (``cores``). Choose
--requests so that they are idle a third of the time.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from cluster_faults import ANSWER, BLOCK, MODEL, SAMPLE, Prompt, prompts_of
from node_events import publishing
from proxy_overhead import cpu_seconds
from serve import counters
from serve.client import new_session
from serve.control import Hands
from serve.conversations import Conversation, Turn
from serve.engines import vocabulary
from serve.load import Form, Limits, Load, Record
from serve.stats import milliseconds
from serve.targets import Target, targets_of
from store_process import Store
from store_support import RawClient, tool_hello
from tiers import bytes_per_token
from transformers import AutoTokenizer

from vllm_kvtier.devtools.engines import Engine, kvtier, proxy
from vllm_kvtier.devtools.processes import Service, start_all
from vllm_kvtier.proxy.config import ROUTING_POLICIES
from vllm_kvtier.store import protocol as m

NODES, ENGINES = 2, 2  # of a node
WARM_UP = 40  # requests that are not measured: an engine's first ones are slower, and nothing is known of loads
SLOT_SHARE = 1.03  # of a block's bytes in a store
ANSWERED = "vllm:request_success_total"


class Cluster:
    """The stores and engines."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        self._folder, self._size = folder, int(options.store * bytes_per_token(MODEL) * SLOT_SHARE)
        self._request_cost = options.request_cost_tokens
        self.stores = []
        for i in range(NODES):
            (folder / f"n{i}").mkdir()
            self.stores.append(Store(folder / f"n{i}"))
        self.engines = [self._engine(store, i, options) for store in self.stores for i in range(ENGINES)]
        self.targets = targets_of([engine.base_url for engine in self.engines])

    def _engine(self, store: Store, number: int, options: argparse.Namespace) -> Engine:
        name = f"{store.folder.name}-{number}"
        return Engine(
            MODEL, name=name, kv=kvtier({"store": store.path}), max_model_len=2048, num_blocks=options.cache // BLOCK,
            args=publishing(*self._events(name)), env={"VLLM_SERVER_DEV_MODE": "1"}, log_dir=self._folder,
        )  # fmt: skip

    def _events(self, name: str) -> tuple[str, str]:
        """Where an engine publishes its events, and repeats them."""
        return f"ipc://{self._folder}/{name}.events", f"ipc://{self._folder}/{name}.replay"

    def start(self) -> None:
        for store in self.stores:
            store.start(f"--size={self._size}", "--log-level=warning")
        start_all(self.engines)

    def proxy(self, policy: str) -> Service:
        args = ["--routing-policy", policy, "--request-cost-tokens", str(self._request_cost)]
        for engine in self.engines:
            events, replay = self._events(engine.name)
            args += ["--decode", f"{engine.base_url},events={events},replay={replay}"]
        return proxy([], [], name=policy, args=args, log_dir=self._folder)

    async def empty(self, hands: Hands) -> None:
        for target in self.targets:
            await hands.settle(target)
            await hands.forget(target)
        for store in self.stores:
            with RawClient(store.path, tool_hello()) as tool:
                tool.ask(m.Clear(1))

    def close(self) -> None:
        for each in (*self.engines, *self.stores):
            each.kill()


class Cores:
    """How busy they are from now on, as shares of their time: ``own``, by this benchmark, and ``all``."""

    def __init__(self, cluster: Cluster, front: Service):
        self._services, self._stores = [*cluster.engines, front], [store.process.pid for store in cluster.stores]
        self._began, self._before, self._load = time.monotonic(), self._read(), os.getloadavg()[0]

    def _read(self) -> tuple[float, float]:
        """Seconds of them that were used, by this benchmark and by all."""
        own = sum(each.cpu_seconds() for each in self._services) + sum(map(cpu_seconds, self._stores))
        user, nice, system, _, _, *others = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:9])
        return own + time.process_time(), (user + nice + system + sum(others)) / os.sysconf("SC_CLK_TCK")

    def result(self) -> dict:
        seconds = (time.monotonic() - self._began) * os.cpu_count()
        own, every = ((now - before) / seconds for now, before in zip(self._read(), self._before, strict=True))
        return {"own": round(own, 3), "all": round(every, 3), "loadavg": [self._load, os.getloadavg()[0]]}


@dataclass(frozen=True)
class Pass:
    """``answered``: requests by engine."""

    records: list[Record]
    answered: list[int]
    tokens: dict[str, float]
    wrong: int
    cores: dict


async def play(
    policy: str, cluster: Cluster, prompts: Sequence[Prompt], session: aiohttp.ClientSession, hands: Hands
) -> Pass:
    await cluster.empty(hands)
    conversations = [Conversation(i, [], [Turn(each.tokens, ANSWER, each.due)]) for i, each in enumerate(prompts)]
    with cluster.proxy(policy) as front:
        before: counters.Counts = {}
        for target in cluster.targets:
            before |= await hands.settle(target)
        load = Load(conversations, [Target(front.base_url)], lambda *_: 0, Limits(len(prompts)), Form("model"))
        cores = Cores(cluster, front)
        records = await load.play(session)
        busy = cores.result()
        after = await counters.read(session, cluster.targets)
    text_of = AutoTokenizer.from_pretrained(MODEL).decode
    answers = [text_of(each.answers.get(0, [])) for each in conversations]
    return Pass(
        records, [_answered(after[name]) - _answered(before[name]) for name in before],
        counters.tokens(counters.total(counters.difference(before, after))),
        sum(each.code not in answer for each, answer in zip(prompts, answers, strict=True)), busy,
    )  # fmt: skip


def _answered(samples: dict[str, float]) -> int:
    return int(sum(value for name, value in samples.items() if name.startswith(ANSWERED)))


def row(policy: str, passes: Sequence[Pass]) -> dict:
    """Of all rounds."""
    records = [record for each in passes for record in each.records]
    tokens = {source: sum(each.tokens[source] for each in passes) for source in counters.SOURCES}
    return {
        "policy": policy, "ttft_ms": milliseconds(record.ttft for record in records),
        **{source: round(count / sum(tokens.values()), 4) for source, count in tokens.items()},
        "prompt_tokens": sum(tokens.values()), "wrong": sum(each.wrong for each in passes),
        "errors": [record.error for record in records if record.error],
        "answered": [sum(counts) for counts in zip(*(each.answered for each in passes), strict=True)],
        "latency_ms": milliseconds(record.latency for record in records),
        "late_ms": milliseconds(record.late for record in records), "cores": [each.cores for each in passes],
        "ttft_ms_of_rounds": [milliseconds(record.ttft for record in each.records) for each in passes],
    }  # fmt: skip


async def play_all(cluster: Cluster, prompts: list[Prompt], options: argparse.Namespace) -> list[dict]:
    passes: dict[str, list[Pass]] = {policy: [] for policy in options.policies}
    async with new_session(60.0) as session:
        hands = Hands(session, "model", {}, vocabulary(MODEL))
        for target in cluster.targets:
            await hands.until_usable(target, options.store * bytes_per_token(MODEL))
        await play("round_robin", cluster, prompts[:WARM_UP], session, hands)
        for number in range(options.rounds):
            for policy in options.policies[:: -1 if number % 2 else 1]:
                for _ in range(options.tries):
                    found = await play(policy, cluster, prompts, session, hands)
                    print(json.dumps(row(policy, [found])), flush=True)
                    if found.cores["all"] - found.cores["own"] <= options.others:
                        break
                passes[policy].append(found)
    return [row(*each) for each in passes.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=SAMPLE, help="in Mooncake's format")
    parser.add_argument("--requests", type=int, default=300, help="of the trace")
    parser.add_argument("--rounds", type=int, default=2, help="of all policies, in turn forwards and backwards")
    parser.add_argument("--seconds", type=float, default=50.0, help="of each policy in a round")
    parser.add_argument("--others", type=float, default=0.15, help="most of the cores that other processes may use ...")
    parser.add_argument("--tries", type=int, default=1, help="... or a policy has its turn again, so often in all")
    parser.add_argument("--cache", type=int, default=8192, help="tokens, of each engine")
    parser.add_argument("--store", type=int, default=32768, help="tokens, of each node's store")
    parser.add_argument("--request-cost-tokens", type=int, default=18, help="of the proxy: its default, 14 times less")
    parser.add_argument("--seed", type=int, default=24)
    parser.add_argument("--policies", nargs="+", default=list(ROUTING_POLICIES), choices=ROUTING_POLICIES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvr-") as folder:
        prompts = prompts_of(options, Path(folder))
        cluster = Cluster(Path(folder), options)
        try:
            cluster.start()
            rows = asyncio.run(play_all(cluster, prompts, options))
        finally:
            cluster.close()
    meta = {"command": " ".join(["python", *sys.argv]), "cores": os.cpu_count(), "requests": len(prompts),
            "prompt_tokens": sum(len(each.tokens) for each in prompts)}  # fmt: skip
    if options.json is not None:
        options.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
