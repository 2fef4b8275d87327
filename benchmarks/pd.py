"""P/D disaggregation: time to first token on the decode engine, this connector and vLLM's NixlConnector in one run.

Each connector has a prefill and a decode engine; all run at once. For each prompt length, new random prompts go to the
prefill engine (one token), then with its params to the decode engine, streamed. Connectors alternate. Medians in ms:

  prefill   the prefill engine's whole answer (max_tokens=1): its own first token
  after     from the end of that answer to the decode engine's first chunk: the first token beyond the prefill engine's
  pulled    the decode engine's time to the first chunk when it pulls the prefill
  hit       its time for the same prompt again, from its prefix cache
  computed  its time for a new prompt that it computes (to ``--computed`` tokens)
  beyond    pulled - hit: the cost of the pull, including the wire

Connectors: ``nixl``, ``kvtier``, and with the option ``same_node_pulls`` set ``kvtier-mapped`` and ``kvtier-nixl``.
``-follow`` behind one of ours sends the request to both engines at once, and the decode engine reads each step of the
prefill while the next one is computed (--engine-args "--max-num-batched-tokens 2048" sets the steps); it uses the same
engines. Then ``pulled`` is the time from the request to the first chunk, prefill included, and ``after`` is to be
compared.

``--decodes N``: then the same with N requests that decode there, whose time between tokens is given beside the pulls
(from the hand-off to the first chunk) and without them.

Also the rate at which the workers read (kvtier: its counters; NixlConnector: vLLM's histogram of transfers).

    python benchmarks/pd.py --model benchmarks/models/qwen3-8b-shapes --dummy --gpus 0 1 --lengths 2048 8192 32768
    python benchmarks/pd.py --model models/recall-6m --lengths 512 2048          # without a GPU
    python benchmarks/pd.py ... --connectors kvtier-follow kvtier nixl --engine-args "--max-num-batched-tokens 2048"
    python benchmarks/pd.py ... --gpus 0 0 1      # the decode engine has two ranks, one beside the prefill engine

Models with recurrent states keep the state behind a prompt's last token; several such runs may share the devices
(--device-lock FILE). A connector whose engines do not start is left out.

Beside the package of another commit: --connectors kvtier kvtier:before --trees '{"before": "/tmp/before"}'.
"""

import argparse
import json
import random
import re
import shlex
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from decodes import Decodes
from tiers import JSON, bytes_per_token, other_tree, percentile, prepare, turns

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import ServiceFailed, free_port, kill_all

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
NAMES = ("prefill", "after", "pulled", "hit", "computed", "beyond")
FOLLOW = "-follow"


class Answer(NamedTuple):
    """``time.perf_counter`` of the request and of its first chunk (or of the whole answer if not streamed), and the
    last JSON object."""

    start: float
    first: float
    last: dict[str, Any]

    @property
    def seconds(self) -> float:
        return self.first - self.start


def body_of(prompt: str, params: Mapping | None, tokens: int, stream: bool) -> bytes:
    body: dict[str, Any] = {
        "model": "model", "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream
    }  # fmt: skip
    if params:
        body["kv_transfer_params"] = params
    return f'{json.dumps(body)[:-1]}, "prompt": {prompt}}}'.encode()


class Side:
    """An engine and a connection to it that stays open, as a router's does."""

    def __init__(self, engine: Engine):
        self.engine = engine
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.Client(base_url=engine.base_url, timeout=300, limits=limits, trust_env=False)

    def ask(self, prompt: str, params: Mapping | None, tokens: int, stream: bool) -> Answer:
        """``prompt``: token ids as JSON: encoding a long one takes as long as a step."""
        request = {"content": body_of(prompt, params, tokens, stream), "headers": JSON}
        start = time.perf_counter()
        if not stream:
            response = self._http.post("/v1/completions", **request)
            first = time.perf_counter()
            return Answer(start, first, response.raise_for_status().json())
        firsts, last = [], {}
        with self._http.stream("POST", "/v1/completions", **request) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    firsts.append(time.perf_counter())
                    last = json.loads(line[6:])
        return Answer(start, firsts[0], last)

    def decode(self, prompts: list[str], tokens: int) -> Decodes:
        return Decodes(self._http, [body_of(prompt, None, tokens, True) for prompt in prompts])

    def metrics(self, pattern: str) -> float:
        """Sum of all samples whose name matches."""
        lines = self._http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(pattern, line))

    def read_rate(self) -> tuple[float, float]:
        """(bytes, seconds) read so far, by whichever path."""
        return (
            self.metrics(r"vllm:(kvtier_(pulled|fetched)_bytes_total|nixl_bytes_transferred_sum)"),
            self.metrics(r"vllm:(kvtier_(pull|fetch)_seconds_sum|nixl_xfer_time_seconds_sum)"),
        )


def follow(p: Side, d: Side, prompt: str) -> tuple[Answer, Answer]:
    """The answers of prefill and decode engine, both asked at once."""
    name, (host, port) = uuid.uuid4().hex, p.engine.kv_address.rsplit(":", 1)
    to_p = {"do_remote_decode": True, "do_remote_prefill": False, "kvtier": {"export_as": name}}
    own = {"export": name, "follow": True}
    to_d = {"do_remote_prefill": True, "remote_host": host, "remote_port": port, "kvtier": own}
    with ThreadPoolExecutor(2) as threads:
        prefill, decode = threads.submit(p.ask, prompt, to_p, 1, False), threads.submit(d.ask, prompt, to_d, 2, True)
        return prefill.result(), decode.result()


class Taken(NamedTuple):
    """Milliseconds of each kind for one prompt, and bytes and seconds of the read."""

    values: dict[str, float]
    nbytes: float
    seconds: float


def one(p: Side, d: Side, follows: bool, fresh: str, other: str | None) -> Taken:
    """``other``: a prompt to compute, if one is to be."""
    before = d.read_rate()
    if follows:
        prefill, pulled = follow(p, d, fresh)
    else:
        prefill = p.ask(fresh, {"do_remote_decode": True, "do_remote_prefill": False}, 1, False)
        pulled = d.ask(fresh, prefill.last["kv_transfer_params"], 2, True)
    after = d.read_rate()
    hit = d.ask(fresh, None, 2, True)
    seconds = {
        "prefill": prefill.seconds, "after": pulled.first - prefill.first, "pulled": pulled.seconds,
        "hit": hit.seconds, "beyond": pulled.seconds - hit.seconds,
    }  # fmt: skip
    if other is not None:
        seconds["computed"] = d.ask(other, None, 2, True).seconds
    return Taken({name: value * 1000 for name, value in seconds.items()}, after[0] - before[0], after[1] - before[1])


def beside(p: Side, d: Side, follows: bool, prompts: list[str], decodes: Decodes) -> dict[str, Any]:
    """Milliseconds: the first tokens of ``prompts``, and between tokens of ``decodes``."""
    spans, after = [], []
    decodes.flowing()
    for prompt in prompts:
        time.sleep(0.5)  # without pulls
        if follows:
            prefill, pulled = follow(p, d, prompt)
        else:
            prefill = p.ask(prompt, {"do_remote_decode": True, "do_remote_prefill": False}, 1, False)
            pulled = d.ask(prompt, prefill.last["kv_transfer_params"], 2, True)
        spans.append((pulled.start, pulled.first))
        after.append(1e3 * (pulled.first - prefill.first))
    decodes.stop()
    row = {"decodes": len(decodes.times), "after": round(statistics.median(after), 1)}
    for name, gaps in (("quiet", decodes.gaps(spans, outside=True)), ("beside", decodes.gaps(spans))):
        row |= {f"{name}_p{q}": round(percentile(gaps, q / 100), 2) for q in (50, 90, 99)}
        row |= {f"{name}_mean": round(statistics.mean(gaps), 2), f"{name}_max": round(max(gaps), 2)}
    return row


def summary(connector: str, length: int, taken: list[Taken]) -> dict[str, Any]:
    row: dict[str, Any] = {"connector": connector, "tokens": length, "n": len(taken)}
    for name in NAMES:
        values = [t.values[name] for t in taken if name in t.values]
        row[name] = round(statistics.median(values), 1) if values else None
    for name in ("after", "pulled"):
        row[f"{name}_min"] = round(min(t.values[name] for t in taken), 1)
        row[f"{name}_max"] = round(max(t.values[name] for t in taken), 1)
    seconds = statistics.median(t.seconds for t in taken)
    nbytes = statistics.median(t.nbytes for t in taken)
    row["GB/s"] = round(nbytes / seconds / 1e9, 1) if seconds else None
    row["MB"] = round(nbytes / 1e6, 1)
    return row


def pair(connector: str, args: argparse.Namespace, model: Path) -> tuple[Engine, Engine]:
    engines = []
    name, _, tree = connector.partition(":")
    flags = [*(["--load-format", "dummy"] if args.dummy else []), *args.engine_args]
    longest = max(max(args.lengths) + 64, args.decodes and args.decode_tokens + 128)
    cache = int(args.cache_gib * (1 << 30)) or (3 + args.decodes) * longest * bytes_per_token(model)
    if args.gpus:  # the connectors' engines share the devices
        flags += ["--gpu-memory-utilization", "0.05"]  # its size is given: more need not be free
    for side, gpus in (("p", args.gpus[:1]), ("d", args.gpus[1:])):
        options = {"bidirectional": False, "store": "off", "endpoint_port": free_port(), **args.options}
        if name.startswith("kvtier-"):
            options["same_node_pulls"] = name.removeprefix("kvtier-")
        kv, env = kvtier(options), other_tree(args.trees.get(tree))
        if name == "nixl":
            kv, env = NIXL, {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        ranks = max(1, len(gpus)) if gpus or side == "p" else args.d_ranks
        engines.append(
            Engine(
                model, name=f"{connector.replace(':', '-')}-{side}", kv=kv, env=env, gpus=gpus, log_dir=args.logs,
                max_model_len=longest, kv_cache_bytes=cache // ranks, tensor_parallel=ranks,
                args=flags, python=args.python, ready_seconds=args.ready,
            )
        )  # fmt: skip
    return engines[0], engines[1]


def up(pairs: Mapping[str, tuple[Engine, Engine]]) -> dict[str, tuple[Side, Side]]:
    """Those that came up."""
    sides = {}
    for key, both in pairs.items():
        try:
            for engine in both:
                engine.wait_ready()
            sides[key] = Side(both[0]), Side(both[1])
        except ServiceFailed as error:
            print(f"LEFT OUT: {key}: {error}", flush=True)
            kill_all(both)
    return sides


def run(args: argparse.Namespace, model: Path, measures: Callable[[], None]) -> list[dict]:
    """Run all connectors' engines at once, alternating prompt by prompt, so that noise affects them alike.
    ``measures`` waits until nothing else does."""
    keys = list(dict.fromkeys(connector.removesuffix(FOLLOW) for connector in args.connectors))
    pairs = {key: pair(key, args, model) for key in keys}
    engines = [engine for both in pairs.values() for engine in both]
    rng = random.Random(7)

    def prompt(length: int) -> str:
        return json.dumps([rng.randrange(1000, args.vocab) for _ in range(length)])

    rows: list[dict] = []
    latency: list[dict] = []

    def publish(row: dict, to: list[dict]) -> None:
        to.append(row)
        print(json.dumps(row), flush=True)
        if args.out:  # a run that is killed leaves what there is
            args.out.write_text(json.dumps(rows + latency, indent=1) + "\n")

    try:
        for engine in engines:
            engine.start()
        sides = up(pairs)
        connectors = [each for each in args.connectors if each.removesuffix(FOLLOW) in sides]
        measures()
        for at, length in enumerate(args.lengths):
            repeats = args.repeats[min(at, len(args.repeats) - 1)]
            warm_up = 2 if at == 0 else 1
            taken: dict[str, list[Taken]] = {connector: [] for connector in connectors}
            for i in range(repeats + warm_up):
                for connector in connectors:
                    p, d = sides[connector.removesuffix(FOLLOW)]
                    other = prompt(length) if length <= args.computed else None
                    values = one(p, d, connector.endswith(FOLLOW), prompt(length), other)
                    if i >= warm_up:
                        taken[connector].append(values)
            for connector in connectors:
                publish(summary(connector, length, taken[connector]), rows)
        for length in args.lengths if args.decodes else ():
            for connector in connectors:
                p, d = sides[connector.removesuffix(FOLLOW)]
                decodes = d.decode([prompt(64) for _ in range(args.decodes)], args.decode_tokens)
                prompts = [prompt(length) for _ in range(args.decode_pulls)]
                row = beside(p, d, connector.endswith(FOLLOW), prompts, decodes)
                publish({"connector": connector, "tokens": length, **row}, latency)
    finally:
        for engine in engines:
            engine.terminate()
    return rows


def table(rows: list[dict]) -> str:
    """Markdown: the decode engine's first token beyond the prefill engine's own, by connector (least to most)."""
    connectors = list(dict.fromkeys(row["connector"] for row in rows))
    heads = ["prompt", "n", "first token on P", *connectors, "hit on D"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        same = {row["connector"]: row for row in rows if row["tokens"] == tokens}
        cells = [f"{row['after']} ({row['after_min']} to {row['after_max']})" for row in map(same.get, connectors)]
        own = [round(statistics.median(row[name] for row in same.values()), 1) for name in ("prefill", "hit")]
        lines.append(f"| {tokens:,} | {same[connectors[0]]['n']} | {own[0]} | {' | '.join(cells)} | {own[1]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--gpus", type=int, nargs="*", default=[], help="prefill, then each rank of decode; none: CPU")
    parser.add_argument("--d-ranks", type=int, default=1, help="of the decode engine, without GPUs")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--repeats", type=int, nargs="+", default=[5], help="by length; the last one: of all others")
    parser.add_argument("--computed", type=int, default=1 << 30, help="longest prompt that D computes")
    parser.add_argument("--decodes", type=int, default=0, help="requests that decode beside further pulls")
    parser.add_argument("--decode-pulls", type=int, default=8, help="by connector and length")
    parser.add_argument("--decode-tokens", type=int, default=4096, help="of each of them at most")
    parser.add_argument("--layers", type=int, help="instead of the model's number of layers, for smaller GPUs")
    parser.add_argument("--connectors", nargs="+", default=["kvtier", "nixl"])
    parser.add_argument("--options", type=json.loads, default={}, help="JSON, more options of our connector")
    parser.add_argument("--trees", type=json.loads, default={}, help="JSON, folder with another vllm_kvtier by word")
    parser.add_argument("--cache-gib", type=float, default=0, help="of each engine (default: room for three prompts)")
    parser.add_argument("--engine-args", type=shlex.split, default=[], metavar="FLAGS", help="more flags, as one word")
    parser.add_argument("--vocab", type=int, default=0, help="token ids are drawn below this (default: the model's)")
    parser.add_argument("--ready", type=float, default=300, help="seconds an engine may take to start")
    parser.add_argument("--device-lock", type=Path, metavar="FILE", help="of all runs that share the devices")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--logs", default=tempfile.mkdtemp(prefix="kvtier-bench-"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = prepare(args.model, max(args.lengths) + 64)
    config = json.loads((model / "config.json").read_text())
    if args.layers:
        config["num_hidden_layers"] = args.layers
        (model / "config.json").write_text(json.dumps(config))
    args.vocab = args.vocab or config["vocab_size"]
    with turns(args.device_lock) as measures:
        rows = run(args, model, measures)
    if not rows:
        raise SystemExit("no engine came up")
    columns = list(rows[0])
    print(" ".join(f"{c:>10}" for c in columns))
    for row in rows:
        print(" ".join(f"{row[c]!s:>10}" for c in columns))
    print(table(rows))


if __name__ == "__main__":
    main()
