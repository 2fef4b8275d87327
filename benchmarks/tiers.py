"""Shared by ttft.py and overhead.py: engines, each with a connector that offloads to host memory, and requests to them.

Names of connectors:

  none           vLLM without a connector
  idle           a connector that does nothing (connectors/idle_connector.py)
  kvtier         this project's; kvtier:WORD: with the options of WORD in --variants, with the package of another commit
                 if --trees has WORD, and with copies (worker/tuning.py) or variables as in --tunings, --environments
  offloading     vLLM's OffloadingConnector with its defaults
  offloading256  the same, with chunks of 256 tokens as in LMCache
  lmcache        LMCacheConnectorV1 in the engine's process, with defaults except for the memory

All engines run at once on one GPU. One gets requests at a time, so that they alternate under the same conditions. The
KV cache and the host memory of each are given by size.
"""

import argparse
import fcntl
import json
import math
import os
import random
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
from shares import CONNECTORS, watched

from vllm_kvtier.devtools.engines import Engine, kvtier
from vllm_kvtier.devtools.processes import ServiceFailed
from vllm_kvtier.worker import tuning as tunings

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
STATES = 64  # of requests that run and of prefixes that are kept: room for so many in the KV cache of each engine

# Counters of KV that reached host memory, where there are any: how to know that offloading is through.
STORED = {
    "kvtier": r"vllm:kvtier_stored_logical_bytes_total",
    "offloading": r"vllm:kv_offload_store_bytes_total",
    "offloading256": r"vllm:kv_offload_store_bytes_total",
}
# The last tokens of a prompt that is to be hit, fewer than a block: no connector has them, so that the step that ends
# the prompt is one of a prefill. For a prompt that is known to its last block it is a step of one token, which vLLM
# replays from a graph of its decodes; there LMCache 0.5.3 was seen to load nothing (its log has no word of it) and to
# answer anyway, and 0.5.6 to answer in 37 ms what takes the link 87 (32k tokens).
TAIL = 15
LOCAL_HITS = r"vllm:prefix_cache_hits_total"
HOST_HITS = r"vllm:external_prefix_cache_hits_total"

PINNED = """
import json, statistics, torch
n = 2 << 30
host, device = torch.empty(n, dtype=torch.uint8, pin_memory=True), torch.empty(n, dtype=torch.uint8, device="cuda")
def rate(into, out_of):
    times = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(); into.copy_(out_of, non_blocking=True); end.record(); end.synchronize()
        times.append(begin.elapsed_time(end))
    return n / statistics.median(times[1:]) / 1e6
print(json.dumps({"h2d": rate(device, host), "d2h": rate(host, device), "device": torch.cuda.get_device_name()}))
"""


def add_arguments(parser: argparse.ArgumentParser, several_steps: bool = False) -> None:
    """``several_steps``: --step-tokens takes several sizes."""
    parser.add_argument("--model", type=Path, required=True, help="directory with a config.json")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--gpu", type=int, help="the device; none: CPU")
    parser.add_argument("--connectors", nargs="+", default=["kvtier", "offloading"])
    parser.add_argument("--kvtier-options", type=json.loads, default={}, help="JSON, beside store_size")
    parser.add_argument("--variants", type=json.loads, default={}, help="JSON, options by word: kvtier:WORD")
    parser.add_argument("--trees", type=json.loads, default={}, help="JSON, folder with another vllm_kvtier by word")
    parser.add_argument(
        "--tunings", type=json.loads, default={},
        help='JSON by word: changes of the store and the load choices, {"wide": {"store": {"programs": 264}}}',
    )  # fmt: skip
    parser.add_argument("--environments", type=json.loads, default={}, help="JSON, variables of an engine by word")
    parser.add_argument("--host-gib", type=float, help="host memory a connector (default: 1.2 times what is needed)")
    turns = "runs with one file start their engines at once, and measure one after the other"
    parser.add_argument("--device-lock", type=Path, metavar="FILE", help=turns)
    parser.add_argument("--seconds", type=float, default=400, help="no new measurement is begun after so long")
    steps = {"nargs": "+", "default": [8192]} if several_steps else {"default": 8192}
    parser.add_argument("--step-tokens", type=int, help="vLLM's max_num_batched_tokens", **steps)
    parser.add_argument("--engine-args", type=shlex.split, default=[], metavar="FLAGS", help="more flags, as one word")
    parser.add_argument("--ready", type=float, default=240, help="seconds an engine may take to start")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--logs", default=tempfile.mkdtemp(prefix="kvtier-bench-"))
    parser.add_argument("--out", type=Path, help="JSON, written anew after every row")


def bytes_per_token(model: Path) -> int:
    """Of keys and values in 16 bits, all layers with attention."""
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    return _layers(config)[0] * 2 * (config.get("num_key_value_heads") or heads) * head * 2


def state_bytes(model: Path) -> int:
    """Of the recurrent states behind one token, all layers that have some, in vLLM's default types: gated delta nets
    have 16 bits, Nemotron-H float32. 0 for models without."""
    c = json.loads((model / "config.json").read_text())
    attention, states = _layers(c)
    if c["model_type"] == "qwen3_next":
        keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
        values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
        conv = (c["linear_conv_kernel_dim"] - 1) * (2 * keys + values)
        return states * 2 * (conv + values * c["linear_key_head_dim"])
    if c["model_type"] == "nemotron_h":
        inner = c["mamba_num_heads"] * c["mamba_head_dim"]
        conv = (c["conv_kernel"] - 1) * (inner + 2 * c["n_groups"] * c["ssm_state_size"])
        return states * (2 * conv + 4 * inner * c["ssm_state_size"])
    return 0


STATEFUL = ("mamba", "linear_attention")  # in Nemotron-H's configuration, by version of transformers


def _layers(config: dict) -> tuple[int, int]:
    """How many have attention, and how many a recurrent state."""
    count = config["num_hidden_layers"]
    if pattern := config.get("hybrid_override_pattern"):
        return pattern.count("*"), pattern.count("M")
    if kinds := config.get("layers_block_type"):
        return sum(kind in ("attention", "full_attention") for kind in kinds), sum(kind in STATEFUL for kind in kinds)
    if interval := config.get("full_attention_interval"):
        return count // interval, count - count // interval
    return count, 0


def vocabulary(model: Path) -> int:
    return json.loads((model / "config.json").read_text())["vocab_size"]


def prepare(model: Path, max_tokens: int) -> Path:
    """A copy with a tokenizer (any will do for prompts given as ids) whose positions reach ``max_tokens``."""
    folder = Path(tempfile.mkdtemp(prefix="kvtier-model-"))
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = max(config["max_position_embeddings"], max_tokens)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = model if (model / "tokenizer.json").exists() else ROOT / "models" / "recall-6m"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)
    for weights in model.glob("*.safetensors"):
        (folder / weights.name).symlink_to(weights.resolve())
    return folder


def other_tree(folder: str | None) -> dict[str, str]:
    """The environment of an engine that imports vllm_kvtier from this folder, although the current folder has one too:
    ``python -m`` would look there first."""
    if not folder:
        return {}
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}", "PYTHONSAFEPATH": "1"}


class Opening(NamedTuple):
    """How an answer began. With random weights the token alone says little about what came long before it; how likely
    it was does, to the bit, where the same step computes it on the same KV."""

    tokens: list[int]
    logprobs: list[float]

    @classmethod
    def of(cls, choice: dict) -> "Opening":
        return cls(choice.get("token_ids") or [], (choice.get("logprobs") or {}).get("token_logprobs") or [])


class PeerFailed(RuntimeError):
    """This engine is of no use any more; the others are."""


class Peer:
    """One engine with one connector, and a connection to it."""

    def __init__(self, connector: str, args: argparse.Namespace, model: Path, gpu_tokens: int, host_tokens: int):
        per_token, self.state = bytes_per_token(model), state_bytes(model)
        host = int(args.host_gib * GIB) if args.host_gib else int(1.2 * host_tokens * per_token)
        host = max(math.ceil(host / GIB), 1) * GIB
        kv, env = self._transfer(connector, host, args)
        self.times = Path(args.logs) / f"times-{connector}"
        if getattr(args, "shares", None):
            kv, timing = watched(kv, self.times)
            env = {**env, **timing}
        env["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(CONNECTORS), env.get("PYTHONPATH") or os.environ.get("PYTHONPATH")])
        )
        flags = ["--max-num-batched-tokens", str(args.step_tokens), "--no-enable-log-requests"]
        flags += ["--load-format", "dummy"] if args.dummy else []
        flags += args.engine_args
        if args.gpu is not None:
            flags += ["--gpu-memory-utilization", "0.2"]  # only what must be free at the start: kv_cache_bytes rules
        self.connector, self.host_bytes, self.per_token = connector, host, per_token
        self.step_tokens = args.step_tokens
        self._stored = STORED.get(connector.partition(":")[0])
        self.opening: Opening | None = None  # how the last answer began
        self.engine = Engine(
            model, name=connector, kv=kv, gpus=[] if args.gpu is None else [args.gpu], log_dir=args.logs, args=flags,
            env={"VLLM_SERVER_DEV_MODE": "1", **env}, max_model_len=gpu_tokens, max_num_seqs=128, python=args.python,
            kv_cache_bytes=(gpu_tokens + 2048) * per_token + STATES * self.state, ready_seconds=args.ready,
        )
        # vLLM closes a connection that was idle for 5 s, maybe while the next request is on its way.
        limits = httpx.Limits(max_connections=256, keepalive_expiry=2.0)
        self.client = httpx.Client(base_url=self.engine.base_url, timeout=300, limits=limits, trust_env=False)

    @staticmethod
    def _transfer(connector: str, host: int, args: argparse.Namespace) -> tuple[dict | None, dict]:
        kind, _, word = connector.partition(":")
        if connector == "none":
            return None, {}
        if connector == "idle":
            return {
                "kv_connector": "IdleConnector", "kv_connector_module_path": "idle_connector", "kv_role": "kv_both"
            }, {}
        if kind == "kvtier":
            # A store of its own: sockets are looked for below this directory.
            run = Path(args.logs) / f"run-{word}"
            run.mkdir(parents=True, exist_ok=True)
            options = {"store_size": str(host), "store_idle_seconds": 20, **args.kvtier_options}
            known = (args.variants, args.trees, args.tunings, args.environments)
            if word and not any(word in each for each in known):
                raise SystemExit(f"none of --variants, --trees, --tunings and --environments has {word!r}")
            options |= args.variants.get(word, {})
            env = {"XDG_RUNTIME_DIR": str(run), **other_tree(args.trees.get(word)), **args.environments.get(word, {})}
            if word in args.tunings:
                env |= tuned(device(args), args.tunings[word], run)
            return kvtier(options), env
        if connector in ("offloading", "offloading256"):
            extra: dict = {"cpu_bytes_to_use": host}
            if connector == "offloading256":
                extra["block_size"] = 256
            return {
                "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra
            }, {}
        if connector == "lmcache":
            return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}, {
                "LMCACHE_LOCAL_CPU": "True",
                "LMCACHE_MAX_LOCAL_CPU_SIZE": str(host / 1e9 if host < GIB else host / GIB),
                "LMCACHE_TRACK_USAGE": "false",
            }
        raise SystemExit(f"unknown connector {connector!r}: none, idle, kvtier, offloading, offloading256 or lmcache")

    def body(self, prompt: list[int], tokens: int, stream: bool = True) -> bytes:
        """A request, encoded before the clock starts."""
        return json.dumps({
            "model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
            "stream": stream, "return_token_ids": True, **({"logprobs": 0} if stream else {}),
        }).encode()  # fmt: skip

    def first_token(self, prompt: list[int], tokens: int = 1) -> float:
        """Seconds to the first chunk of the answer, which ``opening`` then has"""
        body, first = self.body(prompt, tokens), None
        start = time.perf_counter()
        with self.client.stream("POST", "/v1/completions", content=body, headers=JSON) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    if first is None:
                        first, self.opening = now - start, Opening.of(json.loads(line[6:])["choices"][0])
        if first is None:
            raise PeerFailed(f"{self.connector} answered nothing; its log is {self.engine.log_path}")
        return first

    def answer(self, prompt: list[int], tokens: int) -> None:
        self.client.post(
            "/v1/completions", content=self.body(prompt, tokens, False), headers=JSON
        ).raise_for_status()

    def _text(self) -> str:
        return self.client.get("/metrics").text

    def metrics(self) -> dict[str, float]:
        """Sample with its labels -> value."""
        samples = {}
        for line in self._text().splitlines():
            if line.startswith("vllm:"):
                name, _, value = line.rpartition(" ")
                samples[name] = float(value)
        return samples

    def total(self, pattern: str) -> float:
        """Sum of all samples whose name matches."""
        return sum(value for name, value in self.metrics().items() if re.match(pattern, name))

    def counters(self) -> dict[str, float]:
        """The connector's own, without buckets and with their distinguishing labels only."""
        found = {}
        for name, value in self.metrics().items():
            if value and re.match(r"vllm:(kvtier|kv_offload|external_prefix|lmcache)", name) and "_bucket" not in name:
                if not re.search(r"_created|config_info", name):
                    found[re.sub(r'(engine|model_name)="[^"]*",?', "", name).replace("{}", "")] = round(value, 4)
        return found

    def nudge(self) -> None:
        """A request of a few tokens: connectors report, and some only work, in an engine's steps."""
        self.answer([random.randrange(1000, 2000) for _ in range(4)], 2)

    def settle(self, before: float, tokens: int, seconds: float = 15.0) -> None:
        """Until what ``tokens`` take is offloaded since the counter was ``before``, or nothing moves for a second."""
        pattern = self._stored
        wanted, last, moved = 0.97 * (tokens * self.per_token + self.state), -1.0, time.monotonic()
        deadline = moved + seconds
        while time.monotonic() < deadline:
            self.nudge()
            stored = self.total(pattern) - before if pattern else 0.0
            if stored != last:
                last, moved = stored, time.monotonic()
            if (pattern and stored >= wanted) or time.monotonic() - moved > 1.0:
                return
            time.sleep(0.05)  # there is nothing to wait for but the counter

    @property
    def block(self) -> int:
        """Tokens, as vLLM chose it: large where a state must fit in one."""
        (found,) = {int(n) for n in re.findall(r'cache_config_info\{.*?[{,]block_size="(\d+)"', self._text())}
        return found

    @property
    def offloads(self) -> bool:
        """Whether it says what it stored."""
        return self._stored is not None

    def stored(self) -> float:
        return self.total(self._stored) if self._stored else 0.0

    def forget(self) -> None:
        """Empty the GPU's prefix cache, and that alone. It refuses while blocks are held, by copies for example."""
        deadline, silent = time.monotonic() + 15, 0
        while True:
            answer = self.client.post("/reset_prefix_cache").raise_for_status().content
            silent += not answer
            # vLLM 0.25 does not report it; the tokens by source show it.
            if silent == 3 or (answer and json.loads(answer)["success"]):
                return
            if time.monotonic() > deadline:
                raise PeerFailed(f"{self.connector} holds GPU blocks for more than 15 s: prefix cache not reset")
            self.nudge()


JSON = {"Content-Type": "application/json"}


def start(
    args: argparse.Namespace, gpu_tokens: int, host_tokens: int, make: type[Peer] = Peer
) -> list[Peer]:
    """Engines of all connectors, with a KV cache for ``gpu_tokens`` and host memory for ``host_tokens`` each.

    An engine that does not start is omitted, and its log is printed.
    """
    model = prepare(args.model, gpu_tokens)
    peers = [make(connector, args, model, gpu_tokens, host_tokens) for connector in args.connectors]
    begin = time.monotonic()
    up = []
    try:
        # At once: with the KV cache given by size vLLM does not go by the memory that happens to be free meanwhile.
        # (Without a GPU one after the other: they would share few cores.)
        for peer in peers if args.gpu is not None else []:
            peer.engine.start()
        for peer in peers:
            try:
                if args.gpu is None:
                    peer.engine.start()
                peer.engine.wait_ready()
                peer.first_token([1000] * 64)
                up.append(peer)
            except (ServiceFailed, PeerFailed, httpx.HTTPError) as error:
                print(f"LEFT OUT: {peer.connector}: {error}", flush=True)
                stop([peer])
    except BaseException:
        stop(peers)
        raise
    if not up:
        raise SystemExit("no engine came up")
    print(f"{len(up)} engines up after {time.monotonic() - begin:.0f} s", flush=True)
    return up


@contextmanager
def turns(file: Path | None) -> Iterator[Callable[[], None]]:
    """What it gives waits until every run with this file has started its engines, and none measures."""
    if file is None:
        yield lambda: None
        return
    with file.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        yield lambda: fcntl.flock(lock, fcntl.LOCK_EX)


def guarded(peers: list[Peer], peer: Peer, measure: Callable[[], Any]) -> Any:
    """What ``measure`` returns; if the engine fails meanwhile it is taken from ``peers``, and the answer is None."""
    try:
        return measure()
    except (PeerFailed, httpx.HTTPError) as error:
        print(f"LEFT OUT from here: {peer.connector}: {error!r}\n{peer.engine.log_tail(20)}", flush=True)
        peers.remove(peer)
        stop([peer])
        return None


def stop(peers: list[Peer]) -> None:
    for peer in peers:
        peer.client.close()
    with ThreadPoolExecutor(max(len(peers), 1)) as pool:
        list(pool.map(lambda peer: peer.engine.terminate(), peers))


def pinned_rate(args: argparse.Namespace) -> dict:
    """GB/s of a pinned copy of 2 GiB each way; empty without a GPU."""
    if args.gpu is None:
        return {}
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": str(args.gpu)}
    done = subprocess.run([args.python, "-c", PINNED], capture_output=True, text=True, env=env, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def device(args: argparse.Namespace) -> str:
    if args.gpu is None:
        return "cpu"
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", f"--id={args.gpu}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def tuned(device: str, changes: dict[str, dict], home: Path) -> dict[str, str]:
    """Variables of an engine whose copies on ``device`` have these ``changes``, of "store" and "load" choices. They are
    written below ``home``. Raises ValueError for an impossible choice."""
    tuning = msgspec.structs.replace(tunings.MEASURED.get(device, tunings.DEFAULT), device=device)
    for direction, values in changes.items():
        tuning = tunings.changed(tuning, direction, **values)
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm"
    tunings.save(tuning, home)
    return {"XDG_CACHE_HOME": str(home), "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT") or str(usual)}


def facts(args: argparse.Namespace, peers: list[Peer]) -> dict:
    version = peers[0].client.get("/version").json().get("version")
    return {
        "model": args.model.name, "vllm": version, "bytes_per_token": bytes_per_token(args.model),
        "state_bytes": state_bytes(args.model), "block": {peer.connector: peer.block for peer in peers},
        "host_gib": {peer.connector: round(peer.host_bytes / GIB, 2) for peer in peers},
        "start_seconds": {peer.connector: round(peer.engine.ready_after or 0, 1) for peer in peers},
        "step_tokens": args.step_tokens,
    }  # fmt: skip


def random_prompt(rng: random.Random, vocab: int, tokens: int) -> list[int]:
    return rng.choices(range(min(1000, vocab // 2), vocab), k=tokens)


def tailed_prompt(rng: random.Random, vocab: int, tokens: int) -> list[int]:
    """Of which ``tokens`` can be had from elsewhere."""
    return random_prompt(rng, vocab, tokens + TAIL)


def sees(peer: Peer, prompt: list[int], rng: random.Random, vocab: int) -> bool:
    """Whether the answer to ``prompt`` (its ``opening``) is another one on other KV before the same tail."""
    opening = peer.opening
    peer.first_token(random_prompt(rng, vocab, len(prompt) - TAIL) + prompt[-TAIL:])
    return peer.opening != opening


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def median(values: list[float]) -> float:
    return statistics.median(values) if values else math.nan


def markdown(rows: list[dict]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)] if rows else []
    return "\n".join(f"| {' | '.join('' if cell is None else str(cell) for cell in line)} |" for line in lines)


def table(rows: list[dict]) -> str:
    if not rows:
        return "(nothing measured)"
    columns = list(rows[0])
    widths = [max(len(c), *(len(str(row[c])) for row in rows)) + 2 for c in columns]
    lines = ["".join(c.rjust(w) for c, w in zip(columns, widths, strict=True))]
    lines += ["".join(str(row[c]).rjust(w) for c, w in zip(columns, widths, strict=True)) for row in rows]
    return "\n".join(lines)
