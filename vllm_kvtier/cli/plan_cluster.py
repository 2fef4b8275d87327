"""``kvtier plan --nodes``: the trace over many nodes, as tables."""

import itertools
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_kvtier.cli import inputs
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.plan import pays
from vllm_kvtier.store.memory.memory_limits import parse_bytes

Nodes = Annotated[list[int] | None, typer.Option("--nodes", min=1, help="Replay over so many nodes; repeatable.")]
Routing = Annotated[
    list[str] | None, typer.Option("--routing", help="kv, prefix-hash, least-load or round-robin; repeatable.")
]
Shared = Annotated[
    list[str] | None,
    typer.Option("--shared", help="Blocks of other nodes: none, nodes (their stores) or pool (Mooncake); repeatable."),
]
Load = Annotated[
    float, typer.Option("--load", min=0.0, help="Copies of the trace per node, each with conversations of its own.")
]
Pool = Annotated[str, typer.Option("--pool", help="Memory that each node gives to the pool: 64GiB.")]
Replicas = Annotated[int, typer.Option("--replicas", min=1, help="Copies of each block in the pool.")]
Peers = Annotated[int, typer.Option("--peers", min=1, help="Other stores that a store asks.")]
NetworkRate = Annotated[str, typer.Option("--network-rate", help="Bandwidth of a node's network: 10GB/s.")]

FIRST_RATES = {"memory": 50e9, "disk": 3e9, "network": 10e9}  # bytes/s, where no option says


@dataclass(frozen=True)
class ClusterOptions:
    nodes: Sequence[int]
    routing: Sequence[str]
    shared: Sequence[str]
    load: float
    pool: str
    replicas: int
    peers: int
    network_rate: str


def replay(
    found: dict[str, Any],
    file: Path,
    tokens: int,
    codec: str,
    policies: tuple[str, str],
    rates: dict[str, Any],
    options: ClusterOptions,
) -> dict[str, Any]:
    """``found``: the sizes. ``policies``: of memory, and the disk's admission. ``rates``: those that are known."""
    from vllm_kvtier.plan import cluster, trace

    by_name = {row["codec"]: row for row in found["codecs"]}
    if codec not in by_name:
        raise KVTierError(f"no codec is named {codec!r}: there are {', '.join(by_name)}")
    row = by_name[codec]
    blocks = {tier: fits // tokens for tier, fits in row["tokens"].items()}
    if not blocks["memory"]:
        raise KVTierError(f"the memory holds less than one block of the trace ({tokens} tokens) as {codec}")
    block_bytes = row["stored_bytes_per_token"] * tokens
    pool = int(parse_bytes(options.pool, "--pool") // block_bytes) if options.pool else 0
    if "pool" in options.shared and not pool:
        raise KVTierError("--shared pool: give --pool, the memory of each node for it, more than a block of the trace")
    assumed = {name: rate for name, rate in FIRST_RATES.items() if name not in rates}
    if options.network_rate:
        assumed["network"] = pays.parse_rate(options.network_rate)
    rate = {**assumed, **rates}
    hash_blocks = max(1, tokens // found["block_tokens"])
    costs = cluster.Costs(
        block_bytes=block_bytes,
        block_tokens=tokens,
        hash_blocks=hash_blocks,
        block_keys=hash_blocks * found["parts_per_block"],
        prefill=rates.get("prefill", cluster.PREFILL),
        memory_rate=rate["memory"] * found["tensor_parallel_size"],
        disk_rate=rate["disk"],
        network_rate=rate["network"],
    )
    requests, rows = trace.read(file), []
    for nodes, routing, shared in itertools.product(options.nodes, options.routing, options.shared):
        setup = cluster.Cluster(
            nodes=nodes, routing=routing, shared=shared, pool=pool, replicas=options.replicas, peers=options.peers,
            memory_policy=policies[0], disk_admission=policies[1], **blocks,
        )  # fmt: skip
        if sys.stderr.isatty():
            print(f"replaying on {nodes:,} nodes, {routing}, {shared} ...", file=sys.stderr)
        rows.append({**asdict(setup), **cluster.simulate(requests, nodes * options.load, setup, costs)})
    return {
        "name": file.name,
        "codec": codec,
        "load": options.load,
        "prefill": "given" if "prefill" in rates else "25,000 tokens/s assumed",
        "rates": {name: rate[name] for name in FIRST_RATES},
        "rows": rows,
    }


def show(found: dict[str, Any], console: Console) -> None:
    rate = found["rates"]
    console.print(
        f"\n{found['name']} as {found['codec']}, {found['load']:g} of it per node. Prefill: {found['prefill']}; memory "
        f"{rate['memory'] / 1e9:g}, disk {rate['disk'] / 1e9:g}, network {rate['network'] / 1e9:g} GB/s",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    tiers = [tier for tier in ("cache", "memory", "disk", "cluster") if tier in ("memory", "cluster") or
             any(row[tier] for row in found["rows"])]  # fmt: skip
    rows = found["rows"]
    heads = [*(f"in {tier}" for tier in tiers), "found", "without limit"]
    cells = [(*(row["hits"][tier] for tier in tiers), row["found"], row["ideal"]) for row in rows]
    _print(console, rows, heads, [[f"{share:.1%}" for share in line] for line in cells])
    console.print()
    heads = ["compute busy", "busiest", "first token p50", "p99"]
    cells = [
        [
            *(f"{row['busy'][which]:.0%}" for which in ("mean", "max")),
            *(f"{row['first_token_seconds'][p]:.2f} s" for p in ("p50", "p99")),
        ]
        for row in rows
    ]
    _print(console, rows, heads, cells)
    console.print("\nLoad in the busiest minute", markup=False)
    heads = ["network GB/s", "a node sends", "receives", "asks/s"]
    cells = []
    for row in rows:
        network = row["network_bytes_per_second"]
        peaks = [f"{network[name] / 1e9:,.2f}" for name in ("peak", "node_sent_peak", "node_received_peak")]
        cells.append([*peaks, f"{row['asks_per_second']['peak']:,.0f}"])
    _print(console, rows, heads, cells)
    console.print()
    heads = ["master keys/s", "master cores", "router requests/s", "router cores", "event blocks/s"]
    cells = [
        [
            f"{row['master_keys_per_second']['peak']:,.0f}",
            f"{row['master_cores']['peak']:.2f}",
            f"{row['router_requests_per_second']['peak']:,.1f}",
            f"{row['router_cores']['peak']:.2f}",
            f"{row['event_blocks_per_second']['peak']:,.0f}",
        ]
        for row in rows
    ]
    _print(console, rows, heads, cells)


def _print(console: Console, rows: list[dict[str, Any]], heads: list[str], cells: list[list[str]]) -> None:
    """Heads are as narrow as their longest words: none is cut in 80 columns."""
    names = [(f"{row['nodes']:,}", row["routing"], row["shared"]) for row in rows]
    lines = [(*name, *line) for name, line in zip(names, cells, strict=True)]
    heads = ["nodes", "routing", "shared", *(head.replace(" ", "\n") for head in heads)]
    console.print(inputs.make_table(heads, lines, left=("routing", "shared")))
