"""Time to first token when computed, from the GPU's prefix cache and from host memory; decode latency during loads.

    python benchmarks/ttft.py run --model benchmarks/models/qwen3-8b-shapes --dummy --gpu 0 \\
        --connectors kvtier offloading lmcache --out qwen.json
    python benchmarks/ttft.py run --model models/recall-6m --connectors none kvtier --lengths 512 1024   # without GPU
    python benchmarks/ttft.py plot docs/host_hit.png qwen.json llama.json

What is stored of large steps and of many prompts at once, in about five minutes of an H200, and then of another commit:

    python benchmarks/ttft.py run --model benchmarks/models/qwen3-8b-shapes --dummy --gpu 0 --step-tokens 8192 16384 \\
        --connectors kvtier offloading --phases ttft many --lengths 32768 --repeats 4 --many 24 2048 --out stores.json
    git archive --prefix=before/ 42e2979 | tar x -C /tmp && ln -s ../csrc_triton /tmp/before/vllm_kvtier/kernels
    PYTHONPATH=/tmp/before python benchmarks/ttft.py run ... --connectors kvtier ... --out before.json

The engines of all connectors (see tiers.py) run at once and alternate; they are restarted for each of --step-tokens.
For each length and repetition, a new random prompt is sent three times to each:

  computed   the prompt is new
  hit        again: it is in the GPU's prefix cache
  host       again, after offloading has ended and the GPU's prefix cache was reset

Codecs side by side: --connectors kvtier kvtier:fp8 offloading --variants '{"fp8": {"codec": "fp8"}}'.

in ms, medians and the best of ``host``. beyond: the median of host - hit, prompt by prompt. bytes: what the prompt's
KV, with the states behind it, takes at the rate of a pinned copy, measured before; ratio: beyond / bytes. from_host:
share of the prompt that the connector says came from host memory; where it is below 0.9 the answer was asked for
again, up to three times, and what remains is reported as it was. Prompts end in a few tokens that are in no cache
(tiers.TAIL). same: share of the answers from host memory that begin as the hit's did, the token's probability included;
an answer before its KV is there says something else. None: answers do not tell (a prompt with another beginning had
the same).

``many``: so many fresh prompts of so many tokens (--many) are sent at once, and when offloading was through and the
GPU's prefix cache was emptied, at once again. computed, host: seconds until the last of them has its first token;
stored: share of their KV that the connector says it stored meanwhile; from_host: share of their tokens that came from
host memory. Medians of --repeats, behind one that warms up.

Models with recurrent states (qwen3-next-shapes, nemotron-h-shapes) have large blocks, and keep states only where a
block ends: lengths are rounded to whole blocks. Two such models on one device, about four minutes:

    for model in qwen3-next nemotron-h; do
        python benchmarks/ttft.py run --model benchmarks/models/$model-shapes --dummy --gpu 0 --phases ttft \\
            --engine-args "--gdn-prefill-backend triton" --device-lock /tmp/lock --host-gib 12 --out $model.json &
    done; wait

Then ``itl``: eight requests decode while prompts of --itl-tokens come in one after another, from host memory and fresh;
the gaps between their tokens in ms, all (p50, p99, max), outside and inside the time such a prompt waits for its first
token.
"""

import argparse
import functools
import json
import math
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from decodes import Decodes
from tiers import (
    HOST_HITS,
    TAIL,
    Peer,
    add_arguments,
    facts,
    guarded,
    median,
    percentile,
    pinned_rate,
    random_prompt,
    sees,
    start,
    state_bytes,
    stop,
    table,
    tailed_prompt,
    turns,
    vocabulary,
)

DECODES = 8
SPARE = 256  # tokens a prompt: its tail, its answer and what fills a block


class Results:
    """Rows by kind, on disk after each."""

    def __init__(self, path: Path | None, meta: dict):
        self._path, self.data = path, {"meta": meta, "ttft": [], "many": [], "itl": [], "counters": {}}

    def add(self, kind: str, row: dict) -> None:
        self.data[kind].append(row)
        print(json.dumps(row), flush=True)
        self._write()

    def counters(self, peers: list[Peer], step: int) -> None:
        """What each connector counted: the first place to look when a row is odd."""
        self.data["counters"][step] = {peer.connector: peer.counters() for peer in peers}
        self._write()

    def _write(self) -> None:
        if self._path:
            self._path.write_text(json.dumps(self.data, indent=1))


def host_hit(peer: Peer, prompt: list[int], before: float) -> tuple[float, float]:
    """Seconds to the first token and the share of the prompt that came from host memory."""
    seconds = share = 0.0
    for _ in range(3):
        peer.settle(before, len(prompt))
        peer.forget()
        hits, before = peer.total(HOST_HITS), peer.stored()
        seconds = peer.first_token(prompt)
        share = (peer.total(HOST_HITS) - hits) / len(prompt)
        if share >= 0.9:
            break
    return seconds, share


def sample(peer: Peer, prompt: list[int]) -> dict:
    before = peer.stored()
    computed = peer.first_token(prompt)
    hit = peer.first_token(prompt)
    opening = peer.opening
    if peer.connector == "none":
        return {"computed": computed, "hit": hit, "host": None, "beyond": None, "share": 0.0, "same": 1.0}
    host, share = host_hit(peer, prompt, before)
    same = float(peer.opening == opening)
    return {"computed": computed, "hit": hit, "host": host, "beyond": host - hit, "share": share, "same": same}


def summary(peer: Peer, tokens: int, taken: list[dict], h2d: float) -> dict:
    def ms(name: str, of=median) -> float | None:
        values = [t[name] for t in taken if t[name] is not None]
        return round(of(values) * 1000, 1) if values else None

    moving = (tokens * peer.per_token + peer.state) / h2d / 1e6 if h2d else None
    beyond = ms("beyond")
    return {
        "connector": peer.connector, "step": peer.step_tokens, "tokens": tokens, "n": len(taken),
        "computed": ms("computed"), "hit": ms("hit"),
        "host": ms("host"), "host_best": ms("host", min), "beyond": beyond,
        "bytes": moving and round(moving, 1), "ratio": round(beyond / moving, 2) if moving and beyond else None,
        "from_host": round(median([t["share"] for t in taken]), 3),
        "same": round(sum(t["same"] for t in taken) / len(taken), 3),
    }  # fmt: skip


def whole(length: int, peers: list[Peer]) -> int:
    """The closest length of whole blocks of all of them."""
    block = math.lcm(*(peer.block for peer in peers))
    return max(round(length / block), 1) * block


def ttft(peers: list[Peer], args: argparse.Namespace, results: Results, deadline: float) -> None:
    # Others for each step size: the node store outlives the engines of the one before.
    rng, vocab = random.Random(11 + args.step_tokens), vocabulary(args.model)
    blind: set[int] = set()  # lengths at which answers do not tell other KV
    for length in [whole(length, peers) for length in args.lengths]:
        repeats = max(2, args.repeats * min(8192, 16384 * 8192 // length) // min(length, 8192))
        warm = 1 if length <= 32768 else 0
        taken: dict[Peer, list[dict]] = {peer: [] for peer in peers}
        for i in range(repeats + warm):
            if time.monotonic() > deadline and all(taken[peer] for peer in peers):
                break
            prompt = tailed_prompt(rng, vocab, length)
            for peer in list(peers):
                values = guarded(peers, peer, functools.partial(sample, peer, prompt))
                if values and i == 0 and not guarded(peers, peer, functools.partial(sees, peer, prompt, rng, vocab)):
                    blind.add(length)
                if values and i >= warm:
                    taken[peer].append(values)
        h2d = results.data["meta"].get("pinned", {}).get("h2d", 0.0)
        for peer, values in taken.items():
            if values:
                found = summary(peer, length, values, h2d)
                results.add("ttft", found | ({"same": None} if length in blind else {}))
        if time.monotonic() > deadline:
            print("out of time: longer prompts are left out", flush=True)
            return


def together(peer: Peer, prompts: list[list[int]]) -> float:
    """Seconds until the last of them, sent at once, has its first token."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        start = time.perf_counter()
        list(pool.map(peer.first_token, prompts))
        return time.perf_counter() - start


def burst(peer: Peer, prompts: list[list[int]]) -> dict:
    """See ``many``."""
    tokens = sum(len(prompt) - TAIL for prompt in prompts)
    before = peer.stored()
    computed = together(peer, prompts)
    peer.settle(before, tokens)
    stored = (peer.stored() - before) / (tokens * peer.per_token)
    peer.forget()
    hits = peer.total(HOST_HITS)
    host = together(peer, prompts)
    share = (peer.total(HOST_HITS) - hits) / tokens
    return {"computed": computed, "host": host, "stored": stored, "from_host": share}


def many(peers: list[Peer], args: argparse.Namespace, results: Results, deadline: float) -> None:
    rng, vocab = random.Random(12 + args.step_tokens), vocabulary(args.model)
    count, length = args.many
    taken: dict[Peer, list[dict]] = {peer: [] for peer in peers}
    for i in range(args.repeats + 1):
        if time.monotonic() > deadline:
            break
        prompts = [tailed_prompt(rng, vocab, length) for _ in range(count)]
        for peer in list(peers):
            values = guarded(peers, peer, functools.partial(burst, peer, prompts))
            if values and i:
                taken[peer].append(values)
    for peer, values in taken.items():
        if values:
            medians = {name: round(median([value[name] for value in values]), 3) for name in values[0]}
            results.add("many", {
                "connector": peer.connector, "step": peer.step_tokens, "prompts": count, "tokens": length,
                "n": len(values), **medians,
            })  # fmt: skip


def itl(peers: list[Peer], args: argparse.Namespace, results: Results) -> None:
    for peer in list(peers):
        for source in ("host", "fresh"):
            if peer in peers and (peer.connector, source) != ("none", "host"):
                row = guarded(peers, peer, functools.partial(decode_latency, peer, source, args))
                if row:
                    results.add("itl", row)


def decode_latency(peer: Peer, source: str, args: argparse.Namespace) -> dict:
    vocab, rng = vocabulary(args.model), random.Random()
    prompts = [tailed_prompt(rng, vocab, args.itl_tokens) for _ in range(3)]
    if source == "host":
        for prompt in prompts:
            before = peer.stored()
            peer.first_token(prompt)
            peer.settle(before, len(prompt))
        peer.forget()
    hits = peer.total(HOST_HITS)
    bodies = [peer.body(random_prompt(rng, vocab, 64), args.decode_tokens) for _ in range(DECODES)]  # these never hit
    decodes = Decodes(peer.client, bodies)
    spans = []
    try:
        decodes.flowing()
        time.sleep(args.quiet)
        for prompt in prompts:
            begin = time.perf_counter()
            peer.first_token(prompt)
            spans.append((begin, time.perf_counter()))
            time.sleep(args.quiet / 4)
    finally:
        decodes.stop()
    quiet, busy = decodes.gaps(spans, outside=True), decodes.gaps(spans)
    share = (peer.total(HOST_HITS) - hits) / sum(map(len, prompts))
    return {
        "connector": peer.connector, "step": peer.step_tokens, "source": source, "tokens": args.itl_tokens,
        "ttft": round(1000 * statistics.median(b - a for a, b in spans), 1), "from_host": round(share, 3),
        **{f"quiet_p{p}": round(percentile(quiet, p / 100), 2) for p in (50, 99)},
        **{f"busy_p{p}": round(percentile(busy, p / 100), 2) for p in (50, 99)},
        "busy_max": round(max(busy, default=0.0), 2), "n_busy": len(busy),
    }  # fmt: skip


def run(args: argparse.Namespace) -> None:
    begin = time.monotonic()
    results = Results(args.out, {"steps": {}})
    for step in args.step_tokens:
        measure(argparse.Namespace(**{**vars(args), "step_tokens": step}), results)
    for kind in ("ttft", "many", "itl"):
        print(table(results.data[kind]))
    print(f"{time.monotonic() - begin:.0f} s in all")


def sizes(args: argparse.Namespace) -> tuple[int, int]:
    """Tokens on the GPU and in host memory: what the largest of the phases that run needs."""
    gpu, host = [], []
    if "ttft" in args.phases:  # thrice in host memory: what came before is there too, and was asked for more often
        longest = max(args.lengths)
        gpu.append(longest + SPARE + (2048 if state_bytes(args.model) else 0))  # see ``whole``
        host.append(3 * longest)
    if "many" in args.phases:
        count, length = args.many
        gpu.append(count * (length + SPARE))
        host.append(3 * count * length)
    if "itl" in args.phases:
        gpu.append(DECODES * (64 + args.decode_tokens) + args.itl_tokens + SPARE)
        host.append(9 * args.itl_tokens)  # thrice its three prompts
    return max(gpu), max(host)


def measure(args: argparse.Namespace, results: Results) -> None:
    """With engines of one step size."""
    begin = time.monotonic()
    with turns(args.device_lock) as my_turn:
        peers = start(args, *sizes(args))
        try:
            if args.device_lock:
                my_turn()
                begin = time.monotonic()
            if "pinned" not in results.data["meta"]:
                results.data["meta"]["pinned"] = pinned_rate(args)
            results.data["meta"] |= facts(args, peers)
            results.data["meta"]["steps"][args.step_tokens] = results.data["meta"]["start_seconds"]
            print(json.dumps(results.data["meta"]), flush=True)
            if "ttft" in args.phases:
                ttft(peers, args, results, begin + args.seconds)
            if "many" in args.phases:
                many(peers, args, results, begin + args.seconds + 30)
            if "itl" in args.phases and time.monotonic() < begin + args.seconds + 60:
                itl(peers, args, results)
            results.counters(peers, args.step_tokens)
        finally:
            stop(peers)


NAMES = {"kvtier": "vllm-kvtier", "offloading": "OffloadingConnector", "offloading256": "OffloadingConnector, 256",
         "lmcache": "LMCache", "none": "vLLM"}  # fmt: skip
COLORS = {"kvtier": "#1b7837", "offloading": "#998ec3", "offloading256": "#542788", "lmcache": "#e08214",
          "none": "#bbbbbb"}  # fmt: skip


def plot(args: argparse.Namespace) -> None:
    """Left to right, one file each: what a host hit costs beyond a GPU hit, by length, beside its bytes' time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import matplotlib.ticker

    figure, axes = plt.subplots(1, len(args.results), figsize=(4.8 * len(args.results), 3.5), squeeze=False)
    for axis, file in zip(axes[0], args.results, strict=True):
        data = json.loads(file.read_text())
        rows = [row for row in data["ttft"] if row["connector"] != "none"]
        rows = [row for row in rows if row.get("step") == rows[0].get("step")]
        lengths = sorted({row["tokens"] for row in rows})
        for connector in dict.fromkeys(row["connector"] for row in rows):
            mine = [row for row in rows if row["connector"] == connector]
            places, values = [row["tokens"] for row in mine], [row["beyond"] for row in mine]
            axis.plot(places, values, "o-", label=NAMES.get(connector, connector), color=COLORS.get(connector))
        first = [row for row in rows if row["connector"] == rows[0]["connector"]]
        places = [row["tokens"] for row in first]
        axis.plot(places, [row["computed"] - row["hit"] for row in first], "s--", label="computed", color="#bbbbbb")
        if first[0]["bytes"]:
            axis.plot(places, [row["bytes"] for row in first], "k:", label="its bytes, pinned copy")
        axis.set(xscale="log", yscale="log", xlabel="prompt tokens", title=data["meta"]["model"])
        axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        axis.xaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        axis.grid(alpha=0.3, which="both")
    axes[0][0].set_ylabel("first token later than on a GPU hit, ms")
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(args.png, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    add_arguments(one, several_steps=True)
    one.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768, 131072])
    repeats = "of 8k tokens; more of shorter prompts, whose steps vary more; fewer of longer ones, at least two"
    one.add_argument("--repeats", type=int, default=8, help=repeats)
    one.add_argument("--phases", nargs="+", default=["ttft", "itl"], choices=["ttft", "many", "itl"])
    one.add_argument("--many", type=int, nargs=2, default=[24, 2048], metavar=("PROMPTS", "TOKENS"))
    one.add_argument("--itl-tokens", type=int, default=32768, help="length of the prompts that come in meanwhile")
    one.add_argument("--decode-tokens", type=int, default=800, help="most tokens of each decode")
    one.add_argument("--quiet", type=float, default=2.0, help="seconds of decoding alone")
    one.set_defaults(run=run)
    two = commands.add_parser("plot")
    two.add_argument("png", type=Path)
    two.add_argument("results", type=Path, nargs="+")
    two.set_defaults(run=plot)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    sys.exit(main())
