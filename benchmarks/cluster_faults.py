"""A trace played on three nodes that share KV, while nodes are killed, stopped, cut off and slowed at random.

    python benchmarks/cluster_faults.py [--seed 24] [--out benchmarks/results/cluster_faults.json]

Each node has a store in a network namespace (clusters.py) and an engine. Requests of a trace in Mooncake's format,
whole sessions drawn at random, are asked in its order, its times compressed to --seconds, at whichever node is free,
one at a time at each; each engine's prefix cache is emptied before each, so that what is not computed comes from its
node's store or another node. Meanwhile, --every seconds after the last fault, a node or Mooncake's master gets one of
--fault seconds:

  kill          its engine and its store, which are started again; meanwhile other faults go on
  store kill    its store, which is started again; the engine goes on
  stop          its store is stopped (SIGSTOP), as when a machine hangs; the engine goes on
  cut           its cable is pulled
  slow          its store runs a tenth of the time
  slow network  its cable carries --rate each way, with a queue of 100 ms
  master kill, master stop   (Mooncake)

A block of the trace is a message with two codes of five digits (about 37 tokens for 512: prompts are 14 times shorter,
and cut at BLOCKS). What is asked is one of the codes, which this model repeats. Left out are requests that it gets
wrong when it computes all, and those where two tokens of that answer are nearly a tie; of the others each token is
compared. ``brought``: of the tokens of blocks that were stored before (each node is asked what its store has of a
prompt after the answer), the share that the connector brought, by the nodes that had stored them and were not killed
since: *here* this one, else *others* (a healthy one; *before master kill*: and Mooncake's master was killed later),
else *faulty* ones, else *killed* only. A node is under a fault from a request's beginning to its answer, and two
seconds beyond the fault's end; while the node that is asked is, the same with *own fault: * before it. Needs root, for
the namespaces. Ten minutes on two cores.
"""

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import clusters
import httpx
import netns
from engine_client import SYSTEM, facts, question, told
from replay import trace
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vllm_kvtier.devtools.clients import Answer, PromptTokens, complete, prompt_tokens
from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port
from vllm_kvtier.doctor.engines.endpoint import parse_address
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.client import AsyncEndpointClient

MODEL = Path(__file__).resolve().parent.parent / "models/recall-6m"
SAMPLE = Path(__file__).resolve().parent / "replay/data/conversation_sample.jsonl"
NODES, BLOCKS, ANSWER = 3, 48, 24  # blocks of the trace in a prompt, tokens of an answer
BLOCK = 32  # tokens, of vLLM on CPUs
POOL = 512 << 20  # bytes of a store: all that is asked fits
TIE = 0.25  # nats: twice the steps in which this model's bfloat16 gives its largest logits
RECOVERY_SECONDS = 2.0  # from a fault's end until nodes have surely found each other again (clusters.py: 1.3)
STORED_SECONDS = 1.0  # for the copies of an answer's blocks
FAULTS = ["kill", "store kill", "stop", "cut", "slow", "slow network", "master kill", "master stop"]


class Prompt:
    """``ids``: of the trace's blocks; ``ends[i]``: tokens of the first ``i`` of them, in whole blocks of vLLM's;
    ``due``: seconds after the run's beginning; ``answer``: of an engine that computes all; ``certain``: no token of
    it is nearly a tie."""

    answer: list[int]
    certain: bool

    def __init__(self, request: trace.Request, due: float, seed: int, tokenizer: PreTrainedTokenizerBase):
        self.due, self.ids = due, request.ids[:BLOCKS]
        told_codes = [facts(random.Random(f"{seed} {each}"), 2) for each in self.ids]
        messages, ends = [SYSTEM], [0]
        for codes in told_codes:
            messages += [{"role": "user", "content": told(codes)}, {"role": "assistant", "content": "OK."}]
            ends.append(len(self._tokens(tokenizer, messages, False)))
        self.ends = [end // BLOCK * BLOCK for end in ends]
        named = Counter(name for codes in told_codes for name in codes)
        once = [pair for codes in told_codes for pair in codes.items() if named[pair[0]] == 1]
        name, self.code = random.Random(f"{seed} {self.ids}").choice(once)
        self.tokens = self._tokens(tokenizer, [*messages, {"role": "user", "content": question(name)}], True)

    @staticmethod
    def _tokens(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], generate: bool) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
        return tokenizer.encode(text, add_special_tokens=False)

    def computed(self, url: str) -> bool:
        """Have the engine answer it. Whether it names the code."""
        body = {"model": "model", "prompt": self.tokens, "max_tokens": ANSWER, "temperature": 0}
        body |= {"logprobs": 2, "return_token_ids": True}
        response = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False).raise_for_status()
        choice = response.json()["choices"][0]
        self.answer = choice["token_ids"]
        likely = [sorted(each.values())[-2:] for each in choice["logprobs"]["top_logprobs"]]
        self.certain = all(best - second > TIE for second, best in likely)
        return self.code in choice["text"]

    def known(self, ids: set[int]) -> int:
        """Of its first blocks, how many are among them."""
        return sum(1 for _ in itertools.takewhile(ids.__contains__, self.ids))


def prompts_of(options: argparse.Namespace, folder: Path) -> list[Prompt]:
    """Those that the model gets right when it computes all."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    requests = trace.sample(trace.read(options.trace), options.requests, options.seed)
    pace = options.seconds / requests[-1].time
    prompts = [Prompt(each, each.time * pace, options.seed, tokenizer) for each in requests]
    engine = Engine(MODEL, name="plain", max_model_len=2048, log_dir=folder)
    try:
        url = engine.start().wait_ready().base_url
        with ThreadPoolExecutor(8) as pool:
            right = list(pool.map(lambda each: each.computed(url), prompts))
    finally:
        engine.kill()
    return list(itertools.compress(prompts, right))


class Run:
    """``had``: the trace's blocks that each node has stored since its store was last killed."""

    def __init__(self, cluster: clusters.Cluster, prompts: list[Prompt], folder: Path, options: argparse.Namespace):
        self.cluster, self.options, self.rng = cluster, options, random.Random(options.seed)
        self.engines = [
            Engine(
                MODEL, name=f"{cluster.kind}-{i}", max_model_len=2048,
                # What is found counts, not what pays.
                kv=kvtier({"store": node.store.path, "load_policy": "always", "endpoint_port": free_port()}),
                env={"VLLM_SERVER_DEV_MODE": "1"}, log_dir=folder,
            )
            for i, node in enumerate(cluster.nodes)
        ]  # fmt: skip
        self.prompts = iter(prompts)
        self.had: list[set[int]] = [set() for _ in range(NODES)]
        self.stored: set[int] = set()
        self.before_master_kill: set[int] = set()
        self.faults: dict[int, str] = {}  # by node; NODES: the master
        self.healed: dict[int, float] = {}  # when
        self.down: set[int] = set()  # whose engine does not run
        self.lock = threading.Lock()
        self.began = self.ends = 0.0
        self.rows: list[dict] = []
        self.brought: dict[str, Counter[str]] = defaultdict(Counter)
        self.cut_short = 0  # answers that a kill ended
        self.unexpected: list[str] = []
        self.history: list[dict] = []

    def start(self) -> None:
        for engine in self.engines:
            engine.start()
        for engine in self.engines:
            engine.wait_ready()

    # -- requests -----------------------------------------------------------------------------------------------------

    def ask(self, node: int, prompt: list[int]) -> tuple[Answer, PromptTokens]:
        url = self.engines[node].base_url
        httpx.post(f"{url}/reset_prefix_cache", timeout=60, trust_env=False).raise_for_status()
        before = prompt_tokens(url)
        answer = complete(url, prompt, max_tokens=ANSWER)
        return answer, prompt_tokens(url) - before

    def play(self, node: int) -> None:
        while time.monotonic() < self.ends:
            with self.lock:
                prompt = next(self.prompts, None)
            if prompt is None:
                return
            time.sleep(max(0.0, self.began + prompt.due - time.monotonic()))
            while node in self.down:
                time.sleep(0.2)
            with self.lock:
                had, anywhere = [prompt.known(ids) for ids in self.had], prompt.known(self.stored)
                well, faults = self._well(), dict(self.faults)
            began = time.monotonic()
            try:
                answer, tokens = self.ask(node, prompt.tokens)
                if len(answer.token_ids or []) < len(prompt.answer):
                    raise httpx.ReadError(f"{len(answer.token_ids or [])} tokens, {answer.finish_reason}")
            except httpx.HTTPError as error:
                if "kill" in (faults.get(node), self.faults.get(node)):
                    self.cut_short += 1
                else:
                    self.unexpected.append(f"node {node}: {error!r}")
                continue
            if answer.token_ids != prompt.answer:
                print(f"wrong: {answer.token_ids} instead of {prompt.answer} to {prompt.tokens}", flush=True)
            seconds, well = time.monotonic() - began, well & self._well()
            stored = self._stored(node, prompt)
            with self.lock:
                if not any("kill" in each.get(node, "") for each in (faults, self.faults)):
                    self.had[node].update(prompt.ids[:stored])
                    self.stored.update(prompt.ids[:stored])
                own = "" if node in well else "own fault: "
                known = self._known(node, prompt, had, well)
                self._count(prompt, [(own + where, n) for where, n in [*known, ("killed", anywhere)]], tokens.pulled)
                self.rows.append({
                    "seconds": seconds, "right": answer.token_ids == prompt.answer,
                    "whose": "own" if node in faults else "another's" if faults else "none",
                    "faults": list(faults.values()) or ["none"],
                })  # fmt: skip

    def _stored(self, node: int, prompt: Prompt) -> int:
        """How many of its first blocks the node's store has, a moment after the answer: copies take that."""
        host, port = parse_address(self.engines[node].kv_address)
        deadline, tokens = time.monotonic() + STORED_SECONDS, 0

        async def ask() -> int:
            async with AsyncEndpointClient(timeout=STORED_SECONDS) as client:
                return (await client.query(host, port, prompt.tokens)).stored

        with suppress(KVTierError, TimeoutError):  # it was killed
            while tokens < prompt.ends[-1] and time.monotonic() < deadline:
                tokens = asyncio.run(ask())
        return sum(1 for end in prompt.ends[1:] if end <= tokens)

    def _well(self) -> set[int]:
        """Nodes without a fault, for a while."""
        since = time.monotonic() - RECOVERY_SECONDS
        return {each for each in range(NODES) if each not in self.faults and self.healed.get(each, -math.inf) < since}

    def _known(self, node: int, prompt: Prompt, had: list[int], well: set[int]) -> list[tuple[str, int]]:
        """Where its first blocks are stored, and how many of them. ``had``: by node."""
        others = set(range(NODES)) - {node}
        healthy = max((had[each] for each in others & well), default=0)
        forgotten = healthy and prompt.ids[healthy - 1] in self.before_master_kill
        return [
            ("here", had[node]), ("before master kill" if forgotten else "others", healthy),
            ("faulty", max((had[each] for each in others - well), default=0)),
        ]  # fmt: skip

    def _count(self, prompt: Prompt, known: list[tuple[str, int]], pulled: int) -> None:
        begin = 0
        for where, blocks in known:
            end = max(begin, prompt.ends[blocks])
            self.brought[where].update(tokens=end - begin, brought=min(max(pulled - begin, 0), end - begin))
            begin = end

    # -- faults -------------------------------------------------------------------------------------------------------

    def harm(self, pool: ThreadPoolExecutor) -> None:
        has_master = self.cluster.master is not None
        kinds = [each for each in self.options.faults if has_master or not each.startswith("master")]
        queue: list[str] = []
        kills = []
        while time.monotonic() + self.options.every + self.options.fault < self.ends:
            time.sleep(self.options.every)
            queue = queue or self.rng.sample(kinds, len(kinds))
            what, free = queue.pop(), [each for each in range(NODES) if each not in self.faults]
            if what != "kill":
                self._fault(what, NODES if what.startswith("master") else self.rng.choice(free))
            elif len(free) == NODES:  # one engine at a time: its start takes a minute
                kills.append(pool.submit(self._fault, what, self.rng.choice(free)))
        for each in kills:
            each.result()

    def _fault(self, what: str, node: int) -> None:
        with self.lock:
            self.faults[node] = what
        began = time.monotonic()
        heal = getattr(self, "_" + what.replace(" ", "_"))(node)
        heal(began + self.options.fault)
        healed = time.monotonic() - began
        with self.lock:
            del self.faults[node]
            self.healed[node] = time.monotonic()
        at = round(began - self.began, 1)
        self.history.append({"fault": what, "node": node, "at": at, "seconds": round(healed, 1)})
        print(f"{self.cluster.kind}: {at:.0f} s: {what} of {node}, {healed:.1f} s", flush=True)

    def _kill(self, node: int) -> Callable[[float], None]:
        self.down.add(node)
        self.engines[node].kill()
        start_store = self._store_kill(node)

        def heal(until: float) -> None:
            start_store(until)
            self.engines[node].start().wait_ready()
            self.down.discard(node)

        return heal

    def _store_kill(self, node: int) -> Callable[[float], None]:
        self.cluster.nodes[node].signal(signal.SIGKILL)
        with self.lock:
            self.had[node].clear()

        def heal(until: float) -> None:
            time.sleep(max(0.0, until - time.monotonic()))
            self.cluster.nodes[node].start()

        return heal

    def _stop(self, node: int) -> Callable[[float], None]:
        self.cluster.nodes[node].signal(signal.SIGSTOP)

        def heal(until: float) -> None:
            time.sleep(max(0.0, until - time.monotonic()))
            self.cluster.nodes[node].signal(signal.SIGCONT)

        return heal

    def _cut(self, node: int) -> Callable[[float], None]:
        self.cluster.net.plug(node, False)

        def heal(until: float) -> None:
            time.sleep(max(0.0, until - time.monotonic()))
            self.cluster.net.plug(node, True)

        return heal

    def _slow(self, node: int) -> Callable[[float], None]:
        def heal(until: float) -> None:
            pids = self.cluster.nodes[node].pids()

            def each(number: int) -> None:
                for pid in pids:
                    with suppress(ProcessLookupError):  # a reader of Mooncake's that was replaced
                        os.kill(pid, number)

            while time.monotonic() < until:
                each(signal.SIGSTOP)
                time.sleep(0.09)
                each(signal.SIGCONT)
                time.sleep(0.01)

        return heal

    def _slow_network(self, node: int) -> Callable[[float], None]:
        self.cluster.net.limit(node, self.options.rate)

        def heal(until: float) -> None:
            time.sleep(max(0.0, until - time.monotonic()))
            self.cluster.net.limit(node, None)

        return heal

    def _master_kill(self, _: int) -> Callable[[float], None]:
        self.cluster.master.kill()
        with self.lock:
            self.before_master_kill.update(self.stored)

        def heal(until: float) -> None:
            time.sleep(max(0.0, until - time.monotonic()))
            self.cluster.master.start()

        return heal

    def _master_stop(self, _: int) -> Callable[[float], None]:
        self.cluster.master.stop()

        def heal(until: float) -> None:
            time.sleep(max(0.0, until - time.monotonic()))
            self.cluster.master.go_on()

        return heal

    # -- results ------------------------------------------------------------------------------------------------------

    def go(self) -> dict:
        self.began = time.monotonic()
        self.ends = self.began + self.options.seconds
        with ThreadPoolExecutor(NODES + 2) as pool:
            done = [pool.submit(self.play, node) for node in range(NODES)] + [pool.submit(self.harm, pool)]
            for each in done:
                each.result()
        return {
            "requests": len(self.rows), "wrong": sum(not row["right"] for row in self.rows),
            "ended by a kill": self.cut_short, "unexpected errors": self.unexpected,
            "faults": dict(Counter(each["fault"] for each in self.history)), "history": self.history,
            "answer s": self._table(lambda row: [row["whose"]]),
            "answer s, by fault": self._table(lambda row: row["faults"]),
            "brought": {
                where: {**each, "share": round(each["brought"] / each["tokens"], 3)}
                for where, each in self.brought.items() if each["tokens"]
            },
        }  # fmt: skip

    def _table(self, names: Callable[[dict], list[str]]) -> dict[str, dict]:
        found = defaultdict(list)
        for row in self.rows:
            for name in names(row):
                found[name].append(row)
        return {name: self._seconds(rows) for name, rows in sorted(found.items())}

    @staticmethod
    def _seconds(rows: list[dict]) -> dict:
        seconds = [row["seconds"] for row in rows]
        return {
            "requests": len(rows), "median": round(statistics.median(seconds), 2), "longest": round(max(seconds), 2)
        }

    def close(self) -> None:
        for engine in self.engines:
            engine.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=SAMPLE, help="in Mooncake's format")
    parser.add_argument("--requests", type=int, default=500, help="of the trace")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--every", type=float, default=1.5, help="seconds from a fault's end to the next one")
    parser.add_argument("--fault", type=float, default=4.0, help="seconds")
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=FAULTS, metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--rate", default="20mbit", help="of a slow network, in tc's words")
    parser.add_argument("--seed", type=int, default=24)
    options = clusters.parse(parser)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        prompts = [each for each in prompts_of(options, Path(folder)) if each.certain]
    print(f"{len(prompts)} requests, {sum(len(each.tokens) for each in prompts)} tokens", flush=True)
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder, netns.NetnsStar(NODES) as net:
            cluster = clusters.Cluster(kind, Path(folder), net, POOL)
            run = Run(cluster, prompts, Path(folder), options)
            try:
                run.start()
                results[kind] = run.go()
            finally:
                run.close()
                cluster.close()
        print(kind, json.dumps(results[kind], indent=1), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
