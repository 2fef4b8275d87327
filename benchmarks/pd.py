"""P/D disaggregation: time to first token on the decode engine, this connector and vLLM's NixlConnector in one run.

Each connector has a prefill and a decode engine; all run at once. For each prompt length, new random prompts go to the
prefill engine (one token), then with its params to the decode engine, streamed. Connectors alternate. Medians in ms:

  prefill   the prefill engine's whole answer (max_tokens=1)
  pulled    the decode engine's time to the first chunk when it pulls the prefill
  hit       its time for the same prompt again, from its prefix cache
  computed  its time for a new prompt that it computes
  beyond    pulled - hit: the cost of the pull, including the wire
  after     from the end of the prefill engine's answer to the decode engine's first chunk

``kvtier-follow`` sends the request to both engines at once, and the decode engine reads each step of the prefill while
the next one is computed (--engine-args "--max-num-batched-tokens 2048" sets the steps). Then ``pulled`` is the time
from the request to the first chunk, prefill included, and ``after`` is to be compared.

Also the rate at which the workers read (kvtier: its counters; NixlConnector: vLLM's histogram of transfers).

    python benchmarks/pd.py --model benchmarks/models/qwen3-8b-shapes --dummy --gpus 0 1 --lengths 2048 8192 32768
    python benchmarks/pd.py --model models/recall-6m --lengths 512 2048          # without a GPU
    python benchmarks/pd.py ... --connectors kvtier-follow kvtier nixl --engine-args "--max-num-batched-tokens 2048"

Beside the package of another commit: --connectors kvtier kvtier:before --trees '{"before": "/tmp/before"}'.
"""

import argparse
import json
import random
import re
import shlex
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from tiers import bytes_per_token, other_tree

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import free_port, start_all

ROOT = Path(__file__).resolve().parent.parent
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def with_tokenizer(model: Path) -> Path:
    """Shapes alone have no tokenizer; any will do for prompts given as token ids."""
    if (model / "tokenizer.json").exists():
        return model
    folder = Path(tempfile.mkdtemp(prefix="kvtier-model-"))
    shutil.copy(model / "config.json", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models" / "recall-6m" / name, folder)
    return folder


def ask(engine: Engine, prompt: list[int], params: dict | None, tokens: int, stream: bool) -> tuple[float, dict]:
    """Seconds to the first chunk (or the whole answer if not streamed), and the last JSON object."""
    body = {
        "model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
        "stream": stream,
    }
    if params:
        body["kv_transfer_params"] = params
    start = time.perf_counter()
    if not stream:
        answer = httpx.post(f"{engine.base_url}/v1/completions", json=body, timeout=300).raise_for_status().json()
        return time.perf_counter() - start, answer
    first, last = None, {}
    with httpx.stream("POST", f"{engine.base_url}/v1/completions", json=body, timeout=300) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - start
                last = json.loads(line[6:])
    return first, last


def metrics(engine: Engine, pattern: str) -> float:
    """Sum of all samples whose name matches."""
    text = httpx.get(f"{engine.base_url}/metrics", timeout=30).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(pattern, line))


def read_rate(engine: Engine, connector: str) -> tuple[float, float]:
    """(bytes, seconds) read so far."""
    if connector.startswith("kvtier"):
        return metrics(engine, r"vllm:kvtier_pulled_bytes_total"), metrics(engine, r"vllm:kvtier_pull_seconds_sum")
    return metrics(engine, r"vllm:nixl_bytes_transferred_sum"), metrics(engine, r"vllm:nixl_xfer_time_seconds_sum")


NAMES = ("prefill", "pulled", "hit", "computed", "beyond", "after")


def follow(p: Engine, d: Engine, prompt: list[int]) -> tuple[float, float]:
    """Seconds to the end of the prefill engine's answer, and to the decode engine's first chunk, both asked at once."""
    name, (host, port) = uuid.uuid4().hex, p.kv_address.rsplit(":", 1)
    to_p = {"do_remote_decode": True, "do_remote_prefill": False, "kvtier": {"export_as": name}}
    own = {"export": name, "follow": True}
    to_d = {"do_remote_prefill": True, "remote_host": host, "remote_port": port, "kvtier": own}
    with ThreadPoolExecutor(2) as threads:
        prefill, decode = threads.submit(ask, p, prompt, to_p, 1, False), threads.submit(ask, d, prompt, to_d, 2, True)
        return prefill.result()[0], decode.result()[0]


def one(p: Engine, d: Engine, connector: str, fresh: list[int], other: list[int]) -> tuple[dict, float, float]:
    """Milliseconds of each kind for one prompt; bytes and seconds of the read."""
    if connector == "kvtier-follow":
        before = read_rate(d, connector)
        prefill, pulled = follow(p, d, fresh)
        waited = pulled - prefill
    else:
        prefill, answer = ask(p, fresh, {"do_remote_decode": True, "do_remote_prefill": False}, 1, False)
        before = read_rate(d, connector)
        waited = pulled = ask(d, fresh, answer["kv_transfer_params"], 2, True)[0]
    after = read_rate(d, connector)
    hit, _ = ask(d, fresh, None, 2, True)
    computed, _ = ask(d, other, None, 2, True)
    values = (prefill, pulled, hit, computed, pulled - hit, waited)
    row = {name: value * 1000 for name, value in zip(NAMES, values, strict=True)}
    return row, after[0] - before[0], after[1] - before[1]


def summary(connector: str, length: int, taken: list[tuple[dict, float, float]]) -> dict:
    row: dict = {"connector": connector, "tokens": length}
    for name in NAMES:
        row[name] = round(statistics.median(t[0][name] for t in taken), 1)
    row["pulled_min"] = round(min(t[0]["pulled"] for t in taken), 1)
    row["pulled_max"] = round(max(t[0]["pulled"] for t in taken), 1)
    seconds = statistics.median(t[2] for t in taken)
    size = statistics.median(t[1] for t in taken)
    row["GB/s"] = round(size / seconds / 1e9, 1) if seconds else None
    row["MB"] = round(size / 1e6, 1)
    return row


def pair(connector: str, args: argparse.Namespace, model: Path) -> tuple[Engine, Engine]:
    engines = []
    flags = [*(["--load-format", "dummy"] if args.dummy else []), *args.engine_args]
    cache = args.cache_gib << 30 or 3 * (max(args.lengths) + 64) * bytes_per_token(args.model)
    if args.gpus:  # the connectors' engines share the devices
        flags += ["--gpu-memory-utilization", "0.05"]  # its size is given: more need not be free
    for i, name in enumerate(("p", "d")):
        options = {"bidirectional": False, "store": "off", "endpoint_port": free_port()}
        kv, env = kvtier(options), other_tree(args.trees.get(connector[7:]))
        if connector == "nixl":
            kv, env = NIXL, {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        engines.append(
            Engine(
                model, name=f"{connector}-{name}", kv=kv, env=env, gpus=args.gpus[i : i + 1], log_dir=args.logs,
                max_model_len=max(args.lengths) + 64, kv_cache_bytes=cache,
                args=flags, python=args.python, ready_seconds=args.ready,
            )
        )
    return engines[0], engines[1]


def run(args: argparse.Namespace, model: Path) -> list[dict]:
    """Run all connectors' engines at once, alternating prompt by prompt, so that noise affects them alike."""
    pairs = {connector: pair(connector, args, model) for connector in args.connectors}
    engines = [engine for both in pairs.values() for engine in both]
    rng = random.Random(7)
    rows = []
    try:
        start_all(engines)
        for length in args.lengths:
            taken: dict[str, list] = {connector: [] for connector in pairs}
            for i in range(args.repeats + 2):
                fresh, other = ([rng.randrange(1000, args.vocab) for _ in range(length)] for _ in range(2))
                for connector, (p, d) in pairs.items():
                    values = one(p, d, connector, fresh, other)
                    if i >= 2:  # the first two warm up
                        taken[connector].append(values)
            for connector in pairs:
                rows.append(summary(connector, length, taken[connector]))
                print(json.dumps(rows[-1]), flush=True)
    finally:
        for engine in engines:
            engine.terminate()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--gpus", type=int, nargs="*", default=[], help="prefill, then decode; none: CPU")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--connectors", nargs="+", default=["kvtier", "nixl"])
    parser.add_argument("--trees", type=json.loads, default={}, help="JSON, folder with another vllm_kvtier by word")
    parser.add_argument("--cache-gib", type=int, default=0, help="of each engine (default: room for three prompts)")
    parser.add_argument("--engine-args", type=shlex.split, default=[], metavar="FLAGS", help="more flags, as one word")
    parser.add_argument("--vocab", type=int, default=0, help="token ids are drawn below this (default: the model's)")
    parser.add_argument("--ready", type=float, default=300, help="seconds an engine may take to start")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--logs", default=tempfile.mkdtemp(prefix="kvtier-bench-"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.vocab = args.vocab or json.loads((args.model / "config.json").read_text())["vocab_size"]
    model = with_tokenizer(args.model)
    rows = run(args, model)
    columns = list(rows[0])
    print(" ".join(f"{c:>10}" for c in columns))
    for row in rows:
        print(" ".join(f"{row[c]!s:>10}" for c in columns))
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
