"""Engines on three nodes that share what they computed, while nodes are killed, stopped, cut off and slowed at random.

    python benchmarks/cluster_faults.py [--seconds 150] [--out benchmarks/results/cluster_faults.json]
    python benchmarks/cluster_faults.py --kinds mooncake --faults "master kill" kill      # only these

Each node has a store in a network namespace (clusters.py) and an engine. Conversations that grow are asked at nodes
drawn at random, one request at a time at each; each engine's prefix cache is emptied before each, so that what is not
computed comes from its node's store or another node. Meanwhile a node, or Mooncake's master, is drawn every --every
seconds and gets a fault of --fault seconds:

  kill   its engine and its store, which are started again at the fault's end
  stop   its store is stopped (SIGSTOP), as when a machine hangs; the engine goes on
  cut    its cable is pulled
  slow   its store runs a tenth of the time
  master kill, master stop   (Mooncake)

Each question is for a code of five digits from the conversation's first turn, which this model repeats exactly: an
answer without it is wrong. Conversations that the model gets wrong when it computes all are left out. Where earlier
turns were before a question, by the nodes that have been asked for them and were not killed since: *here*, *others* (a
healthy other node), *faulty* (others, all of them under a fault), *nowhere*; ``brought``: the share of those turns'
tokens that the connector brought. Needs root, for the namespaces. Ten minutes on two cores.
"""

import argparse
import json
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
from typing import Any

import clusters
import httpx
import netns
from engine_client import SYSTEM, facts, question, told
from transformers import AutoTokenizer

from vllm_kvtier.devtools.clients import Answer, PromptTokens, complete, prompt_tokens
from vllm_kvtier.devtools.engines import Engine, kvtier

MODEL = Path(__file__).resolve().parent.parent / "models/recall-6m"
NODES, TURNS, CODES, ANSWER = 3, 4, 12, 24  # codes of a turn, tokens of an answer
BLOCK = 32  # tokens, of vLLM on CPUs
FAULTS = ["kill", "stop", "cut", "slow", "master kill", "master stop"]


class Conversation:
    """``asked``: how many turns each node has been asked for since it was last killed."""

    def __init__(self, rng: random.Random, tokenizer: Any):
        codes: dict[str, str] = {}
        while len(codes) < TURNS * CODES:
            codes |= facts(rng, 1)
        names, messages, ends = list(codes), [SYSTEM], []
        self.code, self.prompts = codes[names[0]], []
        for turn in range(TURNS):
            told_codes = told({name: codes[name] for name in names[turn * CODES : (turn + 1) * CODES]})
            messages += [{"role": "user", "content": told_codes}, {"role": "assistant", "content": "OK."}]
            ends.append(len(self._ids(tokenizer, messages, False)))
            asks = {"role": "user", "content": question(names[0])}
            self.prompts.append(self._ids(tokenizer, [*messages, asks], True))
        self.shared = [0, *(end // BLOCK * BLOCK for end in ends)]  # tokens in whole blocks, by turns
        self.asked: Counter[int] = Counter()

    @staticmethod
    def _ids(tokenizer: Any, messages: list[dict[str, str]], generate: bool) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
        return tokenizer.encode(text, add_special_tokens=False)


class Run:
    def __init__(self, cluster: clusters.Cluster, folder: Path, options: argparse.Namespace):
        self.cluster, self.options, self.rng = cluster, options, random.Random(options.seed)
        self.engines = [
            Engine(
                MODEL, name=f"{cluster.kind}-{i}", max_model_len=2048,
                kv=kvtier({"store": node.store.path, "load_policy": "always"}),  # what is found counts, not what pays
                env={"VLLM_SERVER_DEV_MODE": "1"}, log_dir=folder,
            )
            for i, node in enumerate(cluster.nodes)
        ]  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.conversations = [Conversation(self.rng, tokenizer) for _ in range(options.conversations)]
        self.faults: dict[int, str] = {}  # by node; NODES: the master
        self.down: set[int] = set()  # whose engine does not run
        self.lock = threading.Lock()
        self.ends = 0.0
        self.rows: list[dict] = []
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

    def choose(self) -> None:
        """Leave out what the model gets wrong: computed, under a salt, so that it is not found later."""
        url = self.engines[0].base_url

        def is_right(conversation: Conversation) -> bool:
            answers = [
                complete(url, prompt, max_tokens=ANSWER, cache_salt=f"{id(conversation)} {turn}")
                for turn, prompt in enumerate(conversation.prompts)
            ]
            return all(conversation.code in answer.text for answer in answers)

        self.conversations = [each for each in self.conversations if is_right(each)]
        for node in self.cluster.nodes:
            node.forget()

    def play(self, node: int) -> None:
        rng = random.Random(f"{self.options.seed} {node}")
        while time.monotonic() < self.ends:
            if node in self.down:
                time.sleep(0.2)
                continue
            with self.lock:
                ahead = [each for each in self.conversations if each.asked[node] < max(each.asked.values(), default=0)]
                conversation = rng.choice(ahead if ahead and rng.random() < 0.5 else self.conversations)
                seen = max(conversation.asked.values(), default=0)
                turn = min(TURNS, seen + 1)
                where, fault = self._where(node, conversation, turn), dict(self.faults)
            began = time.monotonic()
            try:
                answer, tokens = self.ask(node, conversation.prompts[turn - 1])
            except httpx.HTTPError as error:
                if node not in self.down:
                    self.unexpected.append(f"node {node}: {error!r}")
                continue
            with self.lock:
                if node not in self.down:
                    conversation.asked[node] = max(turn, conversation.asked[node])
                same_fault = fault == self.faults
                earlier = conversation.shared[min(turn - 1, seen)]
                self.rows.append({
                    "node": node, "turn": turn, "where": where, "seconds": time.monotonic() - began,
                    "fault": "own" if node in fault else "another's" if fault else "none",
                    "steady": same_fault, "right": conversation.code in answer.text,
                    "earlier": earlier, "brought": min(tokens.pulled, earlier),
                })  # fmt: skip

    def _where(self, node: int, conversation: Conversation, turn: int) -> str:
        have = {each for each, turns in conversation.asked.items() if turns >= turn - 1 > 0}
        if not have:
            return "nowhere"
        if node in have:
            return "here"
        return "others" if have - set(self.faults) else "faulty"

    # -- faults -------------------------------------------------------------------------------------------------------

    def harm(self) -> None:
        has_master = self.cluster.master is not None
        kinds = [each for each in self.options.faults if has_master or not each.startswith("master")]
        queue: list[str] = []
        while time.monotonic() + self.options.every < self.ends:
            time.sleep(self.options.every)
            queue = queue or self.rng.sample(kinds, len(kinds))
            what, node = queue.pop(), self.rng.randrange(NODES)
            self._fault(what, NODES if what.startswith("master") else node)

    def _fault(self, what: str, node: int) -> None:
        with self.lock:
            self.faults[node] = what
        began = time.monotonic()
        heal = getattr(self, "_" + what.replace(" ", "_"))(node)
        heal(began + self.options.fault)
        healed = time.monotonic() - began
        with self.lock:
            del self.faults[node]
        self.history.append({"fault": what, "node": node, "seconds": round(healed, 1)})
        print(f"{self.cluster.kind}: {what} of {node}, {healed:.0f} s", flush=True)

    def _kill(self, node: int) -> Callable[[float], None]:
        self.down.add(node)
        self.engines[node].kill()
        self.cluster.nodes[node].signal(signal.SIGKILL)
        with self.lock:
            for conversation in self.conversations:
                del conversation.asked[node]

        def heal(until: float) -> None:
            time.sleep(max(0.0, until - time.monotonic()))
            self.cluster.nodes[node].start()
            self.engines[node].start().wait_ready()
            self.down.discard(node)

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

    def _master_kill(self, _: int) -> Callable[[float], None]:
        self.cluster.master.kill()

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
        self.choose()
        self.ends = time.monotonic() + self.options.seconds
        with ThreadPoolExecutor(NODES + 1) as pool:
            done = [pool.submit(self.play, node) for node in range(NODES)] + [pool.submit(self.harm)]
            for each in done:
                each.result()
        return {
            "conversations": len(self.conversations), "requests": len(self.rows),
            "wrong": sum(not row["right"] for row in self.rows),
            "unexpected errors": self.unexpected, "faults": self.history,
            "answer s": self._table("fault", self._seconds), "brought": self._table("where", self._brought),
        }  # fmt: skip

    def _table(self, by: str, summary: Callable[[list[dict]], dict]) -> dict[str, dict]:
        found = defaultdict(list)
        for row in self.rows:
            found[row[by]].append(row)
        return {name: summary(rows) for name, rows in sorted(found.items())}

    @staticmethod
    def _seconds(rows: list[dict]) -> dict:
        seconds = [row["seconds"] for row in rows]
        return {
            "requests": len(rows), "median": round(statistics.median(seconds), 2), "longest": round(max(seconds), 2)
        }

    @staticmethod
    def _brought(rows: list[dict]) -> dict:
        earlier = sum(row["earlier"] for row in rows)
        share = round(sum(row["brought"] for row in rows) / earlier, 3) if earlier else None
        return {"requests": len(rows), "tokens": earlier, "share": share}

    def close(self) -> None:
        for engine in self.engines:
            engine.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between two faults")
    parser.add_argument("--fault", type=float, default=10.0, help="seconds")
    parser.add_argument("--faults", nargs="+", default=FAULTS, choices=FAULTS, metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--conversations", type=int, default=36)
    parser.add_argument("--seed", type=int, default=24)
    options = clusters.parse(parser)
    results = {}
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder, netns.NetnsStar(NODES) as net:
            cluster = clusters.Cluster(kind, Path(folder), net)
            run = Run(cluster, Path(folder), options)
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
