"""The multi-turn benchmark of vLLM PR #32553: the gain of pulls from the decode engine, bidirectional off and on.

Conversations have a common prefix, a separate prefix (lognormal length) and several turns; a turn's prompt is the whole
history. A few clients send them concurrently through the proxy. Off and on run the same conversations on new engines.
Reported: percentiles of the time to first token and of the inter-token latency ((latency - ttft) / (tokens - 1)) for
turns after the first, and prompt tokens by source.

``--size paper`` has the PR's parameters (24 conversations of 12 to 18 turns, 500 tokens in common, 4,000 more on
average and 10,000 at most, input 120 to 160, output 800 to 1,200); ``gpu`` and ``laptop`` scale them to the machine.

    python benchmarks/multiturn.py --model models/recall-6m --size laptop
    python benchmarks/multiturn.py --model benchmarks/models/qwen3-8b-shapes --dummy --gpus 0 1 --size gpu
"""

import argparse
import json
import math
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from tiers import prepare

from vllm_kvtier.devtools.engines import Engine, kvtier, proxy


@dataclass(frozen=True)
class Size:
    clients: int
    conversations: int
    turns: tuple[int, int]
    common: int
    own_mean: int
    own_max: int
    input: tuple[int, int]
    output: tuple[int, int]
    prefill_cache: float  # the prefill engine's KV cache as a share of what all conversations together would fill


SIZES = {
    "paper": Size(2, 24, (12, 18), 500, 4000, 10000, (120, 160), (800, 1200), 0.5),
    "gpu": Size(2, 8, (5, 7), 500, 4000, 10000, (120, 160), (80, 120), 0.5),
    "laptop": Size(2, 6, (4, 5), 100, 400, 900, (30, 40), (60, 90), 0.6),
}


@dataclass
class Turn:
    conversation: int
    turn: int
    prompt: int
    ttft: float
    itl: float
    pulled_by_p: int
    computed_by_p: int
    pulled_by_d: int


def conversations(size: Size, vocab: int) -> list[list[tuple[list[int], int]]]:
    """For each conversation its turns as (new prompt tokens, tokens to generate); the same in each run."""
    rng = random.Random(32553)

    def tokens(n: int) -> list[int]:
        return [rng.randrange(1000, vocab) for _ in range(n)]

    common, out = tokens(size.common), []
    for _ in range(size.conversations):
        # A lognormal of this mean with sigma 1, cut at the maximum as the PR's benchmark does.
        own = min(size.own_max, int(rng.lognormvariate(math.log(size.own_mean) - 0.5, 1.0)))
        turns = []
        for i in range(rng.randint(*size.turns)):
            new = tokens(rng.randint(*size.input))
            turns.append((common + tokens(own) + new if i == 0 else new, rng.randint(*size.output)))
        out.append(turns)
    return out


def play(base_url: str, number: int, turns: list[tuple[list[int], int]], results: list[Turn]) -> None:
    history: list[int] = []
    with httpx.Client(timeout=600, trust_env=False) as client:
        for i, (new, output) in enumerate(turns):
            history += new
            body = {
                "model": "model", "prompt": history, "max_tokens": output, "temperature": 0, "ignore_eos": True,
                "stream": True, "return_token_ids": True, "conversation_id": f"c{number}",
            }
            start, first, generated, report = time.perf_counter(), None, [], {}
            headers = {"X-KVTier-Report": "1"}
            with client.stream("POST", f"{base_url}/v1/completions", json=body, headers=headers) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(event["error"])
                    report = (event.get("kv_transfer_params") or {}).get("kvtier") or report
                    for choice in event.get("choices", ()):
                        first = first or time.perf_counter() - start
                        generated += choice.get("token_ids") or ()
            latency = time.perf_counter() - start
            p, d = report.get("prefill") or {}, report.get("decode") or {}
            results.append(
                Turn(
                    number, i, len(history), first, (latency - first) / max(1, len(generated) - 1),
                    p.get("pulled_tokens", 0), p.get("computed_tokens", 0), d.get("pulled_tokens", 0),
                )
            )
            history = history + generated


def percentiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    picked = {"min": min(values), "p50": cuts[49], "p75": cuts[74], "p90": cuts[89], "p99": cuts[98]}
    return {name: round(value * 1000, 1) for name, value in picked.items()}


def run(bidirectional: bool, args: argparse.Namespace, model: Path, work, cache_tokens: int) -> dict:
    size = SIZES[args.size]
    longest = max(sum(len(n) + o for n, o in turns) for turns in work) + 64
    options = kvtier({"bidirectional": bidirectional, "retain_share": 0.8, "store": "off"})
    engines = []
    for i, (name, share) in enumerate((("p", size.prefill_cache), ("d", 1.5))):
        cache = max(int(cache_tokens * share), int(longest * 1.25)) * args.token_bytes
        engines.append(
            Engine(
                model, name=f"{name}-{'on' if bidirectional else 'off'}", kv=options, gpus=args.gpus[i : i + 1],
                log_dir=args.logs, max_model_len=longest, kv_cache_bytes=cache, python=args.python,
                args=["--load-format", "dummy"] if args.dummy else [], ready_seconds=args.ready,
            )
        )
    front = proxy(engines[:1], engines[1:], log_dir=args.logs, python=args.python)
    services = [*engines, front]
    results: list[Turn] = []
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            engine.wait_ready()
        front.start().wait_ready()
        waiting: queue.SimpleQueue = queue.SimpleQueue()
        for item in enumerate(work):
            waiting.put(item)
        failures: list[BaseException] = []

        def client() -> None:
            while not failures:
                try:
                    number, turns = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    play(front.base_url, number, turns, results)
                except BaseException as error:
                    failures.append(error)

        clients = [threading.Thread(target=client) for _ in range(size.clients)]
        begun = time.perf_counter()
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        if failures:
            raise failures[0]
        seconds = time.perf_counter() - begun
    finally:
        for service in reversed(services):
            service.terminate()
    later = [t for t in results if t.turn > 0]
    return {
        "bidirectional": bidirectional,
        "turns": len(results),
        "seconds": round(seconds, 1),
        "ttft_ms": percentiles([t.ttft for t in later]),
        "itl_ms": percentiles([t.itl for t in later]),
        "prompt_tokens": sum(t.prompt for t in later),
        "pulled_by_p": sum(t.pulled_by_p for t in later),
        "computed_by_p": sum(t.computed_by_p for t in later),
        "pulled_by_d": sum(t.pulled_by_d for t in later),
        "all": [asdict(t) for t in results],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--gpus", type=int, nargs="*", default=[])
    parser.add_argument("--size", choices=SIZES, default="laptop")
    parser.add_argument("--ready", type=float, default=300)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--logs", default=tempfile.mkdtemp(prefix="kvtier-bench-"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = json.loads((args.model / "config.json").read_text())
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    args.token_bytes = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head
    work = conversations(SIZES[args.size], config["vocab_size"])
    cache_tokens = sum(len(new) + output for turns in work for new, output in turns)
    model = prepare(args.model, 0)
    rows = [run(on, args, model, work, cache_tokens) for on in (False, True)]
    for row in rows:
        print(json.dumps({k: v for k, v in row.items() if k != "all"}))
    off, on = (row["ttft_ms"] for row in rows)
    print("TTFT on/off: " + ", ".join(f"{name} {on[name] / off[name] - 1:+.1%}" for name in off))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
