"""Overhead of a connector without any hit: throughput and time to first token, relative to vLLM without a connector.

    python benchmarks/overhead.py --model benchmarks/models/qwen3-8b-shapes --dummy --gpu 0 \\
        --connectors none kvtier offloading --out overhead.json
    python benchmarks/overhead.py --model models/recall-6m --connectors none kvtier --scale 0.1      # without a GPU

The engines run at once and alternate, in another order each round. A turn is one of

  prefill   48 prompts of 2,048 tokens, 16 tokens each
  decode    64 prompts of 128 tokens, 192 tokens each
  ttft      4 prompts of 8,192 tokens, one after the other

of random tokens; all prompts are sent at once, except for ttft. The first round warms up. Throughput is prompt and
generated tokens per second of a turn. Reported: medians, and the median of the rounds' ratios to the first connector
(none) with its 90 % interval by bootstrap. A ratio of 0.99 is 1 % overhead; for ttft it is inverted, so that less than
1 is worse everywhere. If the host memory is smaller than what the turns write, evictions are included.
"""

import argparse
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

from tiers import (
    Peer,
    add_arguments,
    facts,
    median,
    percentile,
    pinned_rate,
    random_prompt,
    start,
    stop,
    table,
    vocabulary,
)

# name -> (prompts, their tokens, tokens generated, at a time)
TURNS = {"prefill": (48, 2048, 16, 48), "decode": (64, 128, 192, 64), "ttft": (4, 8192, 1, 1)}


def scaled(turn: tuple[int, int, int, int], scale: float, most: int) -> tuple[int, int, int, int]:
    prompts, tokens, generated, at_once = turn
    return min(prompts, most), max(32, int(tokens * scale)), max(1, int(generated * scale)), min(at_once, most)


def take(peer: Peer, turn: tuple[int, int, int, int], rng: random.Random, vocab: int, pool) -> float:
    """Tokens per second, or the inverse of the mean seconds to the first token."""
    prompts, tokens, generated, at_once = turn
    fresh = [random_prompt(rng, vocab, tokens) for _ in range(prompts)]
    if at_once == 1:
        return prompts / sum(peer.first_token(prompt) for prompt in fresh)
    begin = time.perf_counter()
    list(pool.map(lambda prompt: peer.answer(prompt, generated), fresh))
    return prompts * (tokens + generated) / (time.perf_counter() - begin)


def interval(ratios: list[float]) -> tuple[float, float]:
    """90 % of the medians of samples drawn with replacement."""
    rng = random.Random(3)
    medians = [median(rng.choices(ratios, k=len(ratios))) for _ in range(500)]
    return percentile(medians, 0.05), percentile(medians, 0.95)


def measure(peers: list[Peer], args: argparse.Namespace, deadline: float) -> list[dict]:
    rng, vocab = random.Random(17), vocabulary(args.model)
    turns = {name: scaled(turn, args.scale, args.prompts) for name, turn in TURNS.items() if name in args.turns}
    rates: dict[tuple[str, Peer], list[float]] = {(name, peer): [] for name in turns for peer in peers}
    stored = {peer: peer.stored() for peer in peers}
    with ThreadPoolExecutor(max(turn[3] for turn in turns.values())) as pool:
        for number in range(args.rounds + 1):
            if number > 2 and time.monotonic() > deadline:
                break
            order = peers[number % len(peers) :] + peers[: number % len(peers)]
            for name, turn in turns.items():
                for peer in order if number % 2 else order[::-1]:
                    rate = take(peer, turn, rng, vocab, pool)
                    if number:
                        rates[name, peer].append(rate)
    rows = []
    for name in turns:
        for peer in peers:
            mine = rates[name, peer]
            ratios = [a / b for a, b in zip(mine, rates[name, peers[0]], strict=True)]
            low, high = interval(ratios)
            value = 1000 / median(mine) if name == "ttft" else median(mine)
            rows.append({
                "turn": name, "connector": peer.connector, "rounds": len(mine), "median": round(value, 1),
                "unit": "ms" if name == "ttft" else "tokens/s", "ratio": round(median(ratios), 4),
                "low": round(low, 4), "high": round(high, 4),
                "stored_gb": round((peer.stored() - stored[peer]) / 1e9, 2) if peer.offloads else None,
            })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--turns", nargs="+", default=list(TURNS), choices=list(TURNS))
    parser.add_argument("--prompts", type=int, default=64, help="most of a turn, where many engines share a GPU")
    parser.add_argument("--scale", type=float, default=1.0, help="of prompt and answer lengths")
    args = parser.parse_args()
    begin = time.monotonic()
    pinned = pinned_rate(args)
    turns = [scaled(TURNS[name], args.scale, args.prompts) for name in args.turns]
    held = max(at_once * (tokens + generated + 32) for _, tokens, generated, at_once in turns)
    peers = start(args, held, held)
    try:
        meta = {**facts(args, peers), "pinned": pinned, "turns": dict(zip(args.turns, turns, strict=True))}
        rows = measure(peers, args, begin + args.seconds)
    finally:
        stop(peers)
    print(table(rows))
    print(f"{time.monotonic() - begin:.0f} s in all")
    if args.out:
        args.out.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
