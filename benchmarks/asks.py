"""Latency of a lease request to a busy engine of this node, over its Unix socket and over TCP.

    python benchmarks/asks.py [--seconds 6] [--step-ms 14] [--launch-ms 8]

The leasing process launches steps in Python on its main thread, as an engine does (``--launch-ms`` of each
``--step-ms``), and runs the connector's lease server; it leases 128 blocks. No GPU is needed.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.context import EngineContext
from vllm_kvtier.scheduler.leases.exports import Export, ExportTable, GroupBlocks, LeaseKind
from vllm_kvtier.scheduler.leases.lease_client import LeaseClient, LeasedBlocks
from vllm_kvtier.scheduler.leases.lease_server import LeaseServer, LeaseServerEvents
from vllm_kvtier.shapes.read_paths import Reach, ReadPath
from vllm_kvtier.vllm_compat.hooks.interpreter import SwitchInterval
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.geometry import CacheGeometry
from vllm_kvtier.wire.reactor import Reactor

BLOCKS, HASH_BLOCK_SIZE, INSTANCE = 128, 16, "lender/1"
BLOCK_HASHES = [bytes([n % 256, n // 256]) * 16 for n in range(BLOCKS)]
NAMESPACE = m.Namespace("model", "bf16", "sha256_cbor", "seed", HASH_BLOCK_SIZE, 1, 1)
RANKS = [m.RankInfo(0, "agent", b"", "DRAM", 0, BLOCKS + 1, (), CacheGeometry((), "little"), 0)]


def lend(step: float, launch: float) -> None:
    """Wait until the parent process has ended."""
    config = KVTierConfig()
    SwitchInterval.lower(config.switch_interval_ms / 1e3)
    table, reactor = ExportTable(HASH_BLOCK_SIZE, dict.fromkeys(LeaseKind, 1 << 20)), Reactor("lender")

    def answer(request, connection, seconds, reply) -> None:
        ids = list(range(1, BLOCKS + 1))
        export = Export(
            "",
            LeaseKind.PEER_FETCH,
            BLOCKS * HASH_BLOCK_SIZE,
            (),
            b"",
            b"",
            [GroupBlocks(HASH_BLOCK_SIZE, ids)],
            ids,
            -1,
            time.monotonic(),
        )
        reply(table.lease_cached(export, 0, connection, seconds, served=False))

    endpoint = LeaseServer(
        EngineContext(
            config, SimpleNamespace(data_parallel_rank=0), None, None, None, reactor, SimpleNamespace(instance=INSTANCE)
        ),
        table,
        None,
        LeaseServerEvents(
            table.take_freed, lambda question, answer: None, lambda active: None, lambda ask: None, answer
        ),
    )
    endpoint.open(NAMESPACE, m.Welcome(m.PROTOCOL, INSTANCE, RANKS))
    reactor.start()
    print(endpoint.port, flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        begun, x = time.perf_counter(), 0
        while time.perf_counter() - begun < launch:
            for i in range(200):
                x += i * i % 7
        time.sleep(max(0.0, step - launch))


def ask(port: int, near: str, seconds: float) -> list[float]:
    """Milliseconds of each lease request, sequentially, at random times."""
    reactor, rng, took = Reactor("asker"), random.Random(1), []
    hello, mapped = m.Hello(m.PROTOCOL, "asker/1", NAMESPACE), Reach(frozenset({ReadPath.MAPPED}))
    peers = LeaseClient(reactor, KVTierConfig(), None, lambda: hello, lambda ranks: mapped)
    reactor.start()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(rng.random() * 0.03)
        begun = time.perf_counter()
        pending = peers.ask(
            ("127.0.0.1", port), same_node_instance=near, block_hashes=BLOCK_HASHES, start=0, lora_fingerprint=b"",
            from_prefix_cache=True,
        )  # fmt: skip
        pending.wait(10.0)
        took.append((time.perf_counter() - begun) * 1e3)
        if not isinstance(pending.outcome, LeasedBlocks):
            raise RuntimeError(f"the lease server answered {pending.outcome}")
        peers.release(pending.outcome, done=True)
    reactor.stop()
    return took[5:]  # the first found the way


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="a row")
    parser.add_argument("--step-ms", type=float, default=14.0)
    parser.add_argument("--launch-ms", type=float, default=8.0, help="of a step, in Python")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--lender", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.lender:
        lend(args.step_ms / 1e3, args.launch_ms / 1e3)
        return
    rows = []
    with tempfile.TemporaryDirectory(prefix="kva-") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        command = [sys.executable, __file__, "--lender", f"--step-ms={args.step_ms}", f"--launch-ms={args.launch_ms}"]
        lender = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            port = int(lender.stdout.readline())
            for number in range(args.rounds):
                for way, near in (("unix", INSTANCE), ("tcp", "")):
                    took = sorted(ask(port, near, args.seconds))
                    row = {"round": number, "way": way, "n": len(took), "mean": statistics.fmean(took)}
                    row |= {f"p{q}": took[len(took) * q // 100] for q in (50, 90, 99)}
                    rows.append({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
                    print(rows[-1], flush=True)
        finally:
            lender.kill()
            lender.wait()
    if args.out:
        args.out.write_text(json.dumps({"benchmark": "asks", "cores": os.cpu_count(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
