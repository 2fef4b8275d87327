"""Overhead of a connector without any hit: throughput and time to first token, relative to vLLM without a connector.

    python benchmarks/overhead.py --model benchmarks/models/qwen3-8b-shapes --dummy --gpu 0 \\
        --connectors none kvtier offloading --out overhead.json
    python benchmarks/overhead.py --model models/recall-6m --connectors none kvtier --scale 0.1      # without a GPU

Where it comes from, with parts of the connector off one by one (ABLATION), at most five engines at a time:

    python benchmarks/overhead.py --model benchmarks/models/qwen3-8b-shapes --dummy --gpu 0 --ablation --at-once 5 \\
        --turns decode decode decode ttft-2k ttft --shares decode ttft-2k --host-gib 4 --out ablation.json
    python benchmarks/overhead.py --model models/recall-6m --ablation --at-once 2 --scale 0.1 --prompts 8 --rounds 3 \\
        --turns decode ttft-2k ttft --shares decode --host-gib 1                                     # without a GPU

The engines run at once and alternate, in another order each turn. A turn is one of

  prefill   48 prompts of 2,048 tokens, 16 tokens each
  decode    64 prompts of 128 tokens, 192 tokens each
  ttft      4 prompts of 8,192 tokens, one after the other, and then again: "hit", in the GPU's prefix cache
  ttft-2k   8 prompts of 2,048 tokens, likewise: "hit-2k"

of random tokens; all prompts are sent at once, except for the last two. A round is --turns in this order; one that is
named twice is taken twice. The first round warms up. Throughput is prompt and generated tokens per second of a turn.
Reported: medians, and the median of the turns' ratios to the first connector (none) with its 90 % interval by
bootstrap. A ratio of 0.99 is 1 % overhead; for times to the first token it is inverted, so that less than 1 is worse
everywhere, and more_ms is the median of their differences. If the host memory is smaller than what the turns write,
evictions are included. --out is written anew after each turn.

Where a turn loses time, from vLLM's own counters: its steps, the mean time to the first token and between tokens
("phases" of --out). More steps than without a connector: requests were held back. A later first token: what begins
requests. Longer between tokens: what each step, or each block, costs. The rest is what ends requests.

--shares names turns that each engine takes once more at the end, with the connector's methods timed (shares.py):
microseconds a step by method, and by thread the share of a core and the wakes a step. Code of the connector that runs
inside vLLM's own methods (vllm_compat/hooks) is in no method.
"""

import argparse
import functools
import itertools
import json
import math
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from shares import STEPS, shares
from tiers import (
    Peer,
    add_arguments,
    device,
    facts,
    guarded,
    markdown,
    median,
    percentile,
    random_prompt,
    start,
    stop,
    table,
    vocabulary,
)


class Turn(NamedTuple):
    prompts: int
    tokens: int
    generated: int
    at_once: int  # all, or 1: then the time to the first token is measured, and prompts are sent a second time

    def scaled(self, scale: float, most: int) -> "Turn":
        """``scale``: of prompt and answer lengths; ``most``: prompts."""
        tokens, generated = max(32, int(self.tokens * scale)), max(1, int(self.generated * scale))
        return Turn(min(self.prompts, most), tokens, generated, min(self.at_once, most))

    @property
    def held(self) -> int:
        """Tokens of KV cache that it needs."""
        return self.prompts * (self.tokens + self.generated + 32)


TURNS = {
    "prefill": Turn(48, 2048, 16, 48),
    "decode": Turn(64, 128, 192, 64),
    "ttft": Turn(4, 8192, 1, 1),
    "ttft-2k": Turn(8, 2048, 1, 1),
}
# By vLLM's names: seconds from arrival to the first token, of that before the first step, and between tokens.
PHASES = {
    "ttft_ms": "vllm:time_to_first_token_seconds",
    "queued_ms": "vllm:request_queue_time_seconds",
    "itl_ms": "vllm:inter_token_latency_seconds",
}
# From everything on to a store that is off. Checksums are part of all of them.
ABLATION = {
    "kvtier:all": {"bidirectional": True},
    "kvtier": {},
    "kvtier:no_peers": {"peer_fetch": "off"},
    "kvtier:prompts": {"store_write": "prompt"},
    "kvtier:no_writes": {"store_write": "off"},
    "kvtier:no_store": {"store": "off"},
}


def take(
    peer: Peer, name: str, turn: Turn, rng: random.Random, vocab: int, pool: ThreadPoolExecutor
) -> dict[str, float]:
    """By what is measured: tokens per second, or the inverse of the mean seconds to the first token."""
    fresh = [random_prompt(rng, vocab, turn.tokens) for _ in range(turn.prompts)]
    if turn.at_once == 1:
        measured = (name, name.replace("ttft", "hit"))
        return {what: turn.prompts / sum(peer.first_token(prompt) for prompt in fresh) for what in measured}
    begin = time.perf_counter()
    list(pool.map(lambda prompt: peer.answer(prompt, turn.generated), fresh))
    return {name: turn.prompts * (turn.tokens + turn.generated) / (time.perf_counter() - begin)}


def interval(ratios: list[float]) -> tuple[float, float]:
    """90 % of the medians of samples drawn with replacement."""
    rng = random.Random(3)
    medians = [median(rng.choices(ratios, k=len(ratios))) for _ in range(500)]
    return percentile(medians, 0.05), percentile(medians, 0.95)


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Steps, and milliseconds to the first token and between tokens, between two readings of vLLM's metrics."""

    def grown(name: str) -> float:
        return sum(value - before.get(key, 0.0) for key, value in after.items() if key.partition("{")[0] == name)

    found = {"steps": grown(STEPS)}
    for short, name in PHASES.items():
        found[short] = 1000 * grown(f"{name}_sum") / max(1.0, grown(f"{name}_count"))
    return found


class Measurement:
    """Of engines that run at once. The first is what the others are compared with."""

    def __init__(self, peers: list[Peer], args: argparse.Namespace, turns: dict[str, Turn]):
        self.peers, self.all, self.args, self.turns = peers, list(peers), args, turns
        self.rates: dict[str, dict[Peer, list[float]]] = {}
        self.before = {peer: peer.stored() for peer in peers}
        self.stored_gb: dict[Peer, float] = {}
        self.phases: dict[str, dict[Peer, list[dict[str, float]]]] = {}
        self.methods: list[dict] = []
        self.threads: list[dict] = []
        self._took: dict[str, float] = {}
        self._rng, self._vocab = random.Random(17), vocabulary(args.model)
        self._pool = ThreadPoolExecutor(max(turn.at_once for turn in turns.values()))
        self._orders = itertools.count()

    def run(self, deadline: float, write: Callable[[], None]) -> None:
        """``write`` is called after each turn."""
        for name in dict.fromkeys(self.args.turns):
            self._turn(name)
            write()
        self.rates.clear()
        self.phases.clear()
        for name in self.args.turns * self.args.rounds:
            if time.monotonic() + self._took[name] > deadline:
                break
            self._turn(name)
            write()
        self.stored_gb = {p: round((p.stored() - self.before[p]) / 1e9, 2) for p in self.peers if p.offloads}
        for name in self.args.shares:
            for peer in list(self.peers):
                self._timed(peer, name)
                write()

    def _turn(self, name: str) -> None:
        begin, number = time.monotonic(), next(self._orders)
        order = self.peers[number % len(self.peers) :] + self.peers[: number % len(self.peers)]
        for peer in order if number % 2 else order[::-1]:
            measured = guarded(self.peers, peer, lambda peer=peer: self._counted(peer, name))
            for what, rate in (measured or {}).items():
                self.rates.setdefault(what, {}).setdefault(peer, []).append(rate)
        self._took[name] = time.monotonic() - begin

    def _counted(self, peer: Peer, name: str) -> dict[str, float]:
        """As ``_take``; of turns of throughput also the phases."""
        if self.turns[name].at_once == 1:
            return self._take(peer, name)
        before = peer.metrics()
        measured = self._take(peer, name)
        phases = difference(before, peer.metrics())
        self.phases.setdefault(name, {}).setdefault(peer, []).append(phases)
        return measured

    def _timed(self, peer: Peer, name: str) -> None:
        try:
            found = guarded(self.peers, peer, lambda: shares(peer, lambda: self._take(peer, name)))
        except OSError as error:  # it does not answer to signals
            print(f"NOT TIMED: {peer.connector}: {error}", flush=True)
            return
        for rows, more in zip((self.methods, self.threads), found or ((), ()), strict=True):
            rows += [{"turn": name, **row} for row in more]

    def _take(self, peer: Peer, name: str) -> dict[str, float]:
        return take(peer, name, self.turns[name], self._rng, self._vocab, self._pool)

    def rows(self) -> list[dict]:
        return [self._row(what, peer) for what, rates in self.rates.items() for peer in self.all if peer in rates]

    def phase_rows(self) -> list[dict]:
        """Medians of the turns' phases."""
        return [
            {"turn": what, "connector": peer.connector}
            | {name: round(median([each[name] for each in found]), 3) for name in found[0]}
            for what, peers in self.phases.items() for peer, found in peers.items()
        ]  # fmt: skip

    def samples(self) -> list[dict]:
        """Tokens per second, or prompts per second to the first token, of each turn."""
        return [
            {"turn": what, "connector": peer.connector, "rates": [round(rate, 4) for rate in mine]}
            for what, rates in self.rates.items() for peer, mine in rates.items()
        ]  # fmt: skip

    def _row(self, what: str, peer: Peer) -> dict:
        mine, base = self.rates[what][peer], self.rates[what].get(self.all[0], [])
        pairs = list(zip(mine, base, strict=False))  # an engine that failed has fewer
        ratios = [a / b for a, b in pairs]
        low, high = interval(ratios) if ratios else (math.nan, math.nan)
        ms = what not in self.turns or self.turns[what].at_once == 1
        return {
            "turn": what, "connector": peer.connector, "rounds": len(mine),
            "median": round(1000 / median(mine) if ms else median(mine), 1), "unit": "ms" if ms else "tokens/s",
            "ratio": round(median(ratios), 4), "low": round(low, 4), "high": round(high, 4),
            "more_ms": round(median([1000 / a - 1000 / b for a, b in pairs]), 2) if ms else None,
            "stored_gb": self.stored_gb.get(peer),
        }  # fmt: skip


def summary(rows: list[dict]) -> list[dict]:
    """A row per connector, a column per turn; an engine that took part several times has its first figures."""
    found: dict[str, dict] = {}
    for row in rows:
        more = "" if row["more_ms"] is None else f", {row['more_ms']:+.2f} ms"
        text = f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f}){more}"
        found.setdefault(row["connector"], {"connector": row["connector"]}).setdefault(row["turn"], text)
    columns = dict.fromkeys(["connector", *(row["turn"] for row in rows)])
    return [{column: cells.get(column) for column in columns} for cells in found.values()]


def groups(connectors: list[str], at_once: int) -> list[list[str]]:
    """Each of at most ``at_once`` connectors, with the first one in all."""
    base, *others = connectors
    if not others:
        return [[base]]
    size = max(at_once - 1, 1) if at_once else len(others)
    return [[base, *others[n : n + size]] for n in range(0, len(others), size)]


def publish(measurement: Measurement, done: dict[str, list[dict]], result: dict, out: Path | None) -> None:
    """``done``: rows of groups before."""
    new = {
        "rows": measurement.rows(), "methods": measurement.methods, "threads": measurement.threads,
        "samples": measurement.samples(), "phases": measurement.phase_rows(),
    }  # fmt: skip
    result.update({section: rows + new[section] for section, rows in done.items()})
    if out:
        out.write_text(json.dumps(result, indent=1))


def show(result: dict) -> None:
    print(table(result["rows"]))
    for rows in (summary(result["rows"]), result["phases"], result["methods"], result["threads"]):
        print(f"\n{markdown(rows)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--ablation", action="store_true", help="these connectors: none, idle, ABLATION, offloading")
    parser.add_argument("--at-once", type=int, default=0, help="most engines that run at once; 0: all")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", nargs="+", default=["prefill", "decode", "ttft"], choices=list(TURNS))
    parser.add_argument("--shares", nargs="+", default=[], choices=list(TURNS), metavar="TURN", help="timed turns")
    parser.add_argument("--prompts", type=int, default=64, help="most of a turn, where many engines share a GPU")
    parser.add_argument("--scale", type=float, default=1.0, help="of prompt and answer lengths")
    args = parser.parse_args()
    args.variants = {**{name.partition(":")[2]: options for name, options in ABLATION.items()}, **args.variants}
    if args.ablation:
        args.connectors = ["none", "idle", *ABLATION, "offloading"]
    begin = time.monotonic()
    turns = {name: TURNS[name].scaled(args.scale, args.prompts) for name in [*args.turns, *args.shares]}
    held = max(turn.held for turn in turns.values())
    result: dict = {"meta": {"turns": turns, "device": device(args)}}
    done: dict[str, list[dict]] = {"rows": [], "methods": [], "threads": [], "samples": [], "phases": []}
    every = groups(args.connectors, args.at_once)
    for number, connectors in enumerate(every, 1):
        peers = start(argparse.Namespace(**{**vars(args), "connectors": connectors}), held, held)
        try:
            result["meta"] |= facts(args, peers)
            measurement = Measurement(peers, args, turns)
            write = functools.partial(publish, measurement, done, result, args.out)
            # What is left of the time is shared by the groups that are left.
            now = time.monotonic()
            measurement.run(now + (begin + args.seconds - now) / (len(every) - number + 1), write)
            write()
            done = {section: result[section] for section in done}
            if number == len(every):
                show(result)
        finally:
            stop(peers)
    print(f"{time.monotonic() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
