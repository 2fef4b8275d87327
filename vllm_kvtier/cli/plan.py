"""``kvtier plan``: tokens that fit in each tier, hit rates of a trace, and the break-even length of loads."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from vllm_kvtier.cli import inputs, plan_cluster
from vllm_kvtier.doctor.engines import server as vllm_server
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.plan import pays
from vllm_kvtier.store.eviction import DEFAULT_POLICY, POLICIES
from vllm_kvtier.store.memory.memory_limits import ANY_MACHINE, format_bytes, memory_limits, parse_bytes, pool_bytes

ModelName = Annotated[str, typer.Option("--model", help="config.json, its directory, or a name in the hub's cache.")]
Parallel = Annotated[int, typer.Option("--tensor-parallel-size", "--tp", min=1, help="Ranks of one engine.")]
CacheDtype = Annotated[str, typer.Option("--kv-cache-dtype", help="As vLLM's: auto, fp8, bfloat16, float16.")]
BlockSize = Annotated[int, typer.Option("--block-size", min=1, help="Tokens of vLLM's blocks.")]
Cache = Annotated[str, typer.Option("--gpu-cache", help="KV cache of each GPU (see vLLM's log): 40GiB. Empty: none.")]
Memory = Annotated[str, typer.Option("--memory", help="Memory of the node store, as store_size: 64GiB, 10%.")]
Disk = Annotated[str, typer.Option("--disk", help="Size of the disk tier, as store_disk_size: 2TiB. Empty: none.")]
Admission = Annotated[str, typer.Option("--disk-admission", help="reuse or all, as store_disk_admission.")]
Codecs = Annotated[
    list[str] | None, typer.Option("--codec", help="Codec for the replay of the trace; repeatable. Default: raw.")
]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", help="Requests, JSON lines in Mooncake's format, .xz or plain.", exists=True)
]
TraceTokens = Annotated[int, typer.Option("--trace-tokens", min=1, help="Tokens per block of the trace.")]
Policy = Annotated[str, typer.Option("--policy", help="Eviction policy of memory, as store_policy.")]
Link = Annotated[str, typer.Option("--load-rate", help="Bandwidth from memory into one GPU: 50GB/s.")]
DiskRate = Annotated[str, typer.Option("--disk-rate", help="Read bandwidth of the disk: 3GB/s.")]
PrefillRate = Annotated[
    str, typer.Option("--prefill", help="Prefill speed: tokens/s (12000), or TOKENS:SECONDS,... (2048:0.055,...).")
]
Machine = Annotated[
    Path | None, typer.Option("--machine", help="Rates from the output of `kvtier bench --json`.", exists=True)
]
Server = Annotated[str | None, typer.Option("--server", help="http://HOST:PORT of a running engine, for rates.")]


def plan(
    model: ModelName,
    tensor_parallel: Parallel = 1,
    kv_cache_dtype: CacheDtype = "auto",
    block_size: BlockSize = 16,
    gpu_cache: Cache = "",
    memory: Memory = "10%",
    disk: Disk = "",
    disk_admission: Admission = "reuse",
    codec: Codecs = None,
    trace: TraceFile = None,
    trace_tokens: TraceTokens = 512,
    policy: Policy = DEFAULT_POLICY,
    load_rate: Link = "",
    disk_rate: DiskRate = "",
    prefill: PrefillRate = "",
    machine: Machine = None,
    server: Server = None,
    nodes: plan_cluster.Nodes = None,
    routing: plan_cluster.Routing = None,
    shared: plan_cluster.Shared = None,
    load: plan_cluster.Load = 0.1,
    pool: plan_cluster.Pool = "",
    replicas: plan_cluster.Replicas = 1,
    peers: plan_cluster.Peers = 64,
    network_rate: plan_cluster.NetworkRate = "",
    as_json: inputs.AsJson = False,
) -> None:
    """Show how many tokens fit per tier and codec, the hit rates of a trace, and the break-even prompt length.

    Sizes come from the layouts that engines use; hits from a replay through the store's own policies, for one engine
    and without limits of speed; the break-even length from the given rates. With --nodes the trace is replayed over so
    many nodes instead: hits by tier, and the load on network, master and router. Exit status: 0, or 1.
    """
    with inputs.errors_as_messages():
        if policy not in POLICIES:
            raise KVTierError(f"no policy is named {policy!r}: choose one of {', '.join(POLICIES)}")
        if disk_admission not in ("reuse", "all"):
            raise KVTierError(f"--disk-admission {disk_admission!r}: reuse or all")
        found = _sizes(model, kv_cache_dtype, tensor_parallel, block_size, gpu_cache, memory, disk)
        rates = _rates(load_rate, disk_rate, prefill, machine, server)
        found["break_even"] = _break_even(found, rates)
        found["rates"] = {name: value for name, value in rates.items() if name != "prefill"}
        if nodes:
            if trace is None:
                raise KVTierError("--nodes replays a trace: give --trace")
            options = plan_cluster.ClusterOptions(
                nodes, routing or ["kv"], shared or ["none"], load, pool, replicas, peers, network_rate
            )
            found["cluster"] = plan_cluster.replay(
                found, trace, trace_tokens, (codec or ["raw"])[0], (policy, disk_admission), rates, options
            )
        elif trace is not None:
            found["trace"] = _replay(found, trace, trace_tokens, codec or ["raw"], disk_admission, policy)
    if as_json:
        print(json.dumps(found))
    else:
        _show(found, Console())


def _sizes(
    model: str, cache_dtype: str, tensor_parallel: int, block: int, cache: str, memory: str, disk: str
) -> dict[str, Any]:
    try:
        from vllm_kvtier.plan import model as models  # imports torch, which the codecs need
    except ModuleNotFoundError as error:
        raise KVTierError(f"the layouts of slots need {error.name}, which vLLM brings: pip install torch") from error
    read = models.read(model, cache_dtype)
    # A size may be for another machine; a share is of this one, whatever is free of it now.
    limits = memory_limits() if memory.strip().endswith("%") else ANY_MACHINE
    tiers = {"memory": pool_bytes(memory, replace(limits, free=limits.limit))}
    if disk:
        tiers["disk"] = parse_bytes(disk, "--disk")
    cache_bytes = parse_bytes(cache, "--gpu-cache") if cache else 0
    rows = []
    try:
        sizes = {name: models.footprint(read, name, tensor_parallel, block) for name in models.codec_names()}
    except ValueError as error:
        raise KVTierError(str(error)) from error
    for name, of in sorted(sizes.items(), key=lambda item: -item[1].stored):
        fits = {tier: of.tokens_in_store(nbytes) for tier, nbytes in tiers.items()}
        if cache_bytes:
            fits = {"cache": of.tokens_in_cache(cache_bytes), **fits}
        rows.append(
            {
                "codec": name,
                "stored_bytes_per_token": of.stored,
                "loaded_bytes_per_token_and_rank": of.loaded,
                "smaller": of.logical / of.stored,
                "tokens": fits,
            }
        )
    return {
        "model": read.name,
        "layers": models.describe_groups(read),
        "kv_cache_dtype": read.dtype,
        "tensor_parallel_size": tensor_parallel,
        "block_tokens": block,
        "parts_per_block": sizes["raw"].parts,
        "longest_prompt": read.longest,
        "bytes_per_token_and_gpu": of.gpu,
        "remarks": list(read.remarks),
        "tiers": {**({"cache": cache_bytes} if cache_bytes else {}), **tiers},
        "codecs": rows,
    }


def _rates(load: str, disk: str, prefill: str, machine: Path | None, server: str | None) -> dict[str, Any]:
    """Rates from the options; otherwise from the engine, otherwise from the measurement."""
    found: dict[str, Any] = {}
    if machine is not None:
        try:
            found |= pays.from_bench(json.loads(machine.read_text("utf-8")))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise KVTierError(f"{machine} is not what `kvtier bench --json` prints: {error}") from error
    if server is not None:
        found |= _measured(server)
    if load:
        found["memory"] = pays.parse_rate(load)
    if disk:
        found["disk"] = pays.parse_rate(disk)
    if prefill:
        found["prefill"] = pays.Prefill.parse(prefill)
    return found


def _measured(url: str) -> dict[str, Any]:
    """Rates that an engine has measured: bytes/s of loads to one rank, tokens/s of prefills."""
    scrape, found = vllm_server.Server(url).metrics(), {}
    if scrape.ours("loads", "ok") and (rate := scrape.mean(f"{vllm_server.PREFIX}planner_bandwidth", "host")):
        found["memory"] = rate
    spent = scrape.total("vllm:request_prefill_time_seconds_sum")
    brought = sum(scrape.ours(f"{kind}_tokens") for kind in ("loaded", "fetched", "pulled"))
    computed = scrape.total("vllm:prompt_tokens") - scrape.total("vllm:prefix_cache_hits") - brought
    if spent > 0 and computed > 0:
        found["prefill"] = pays.Prefill.parse(str(computed / spent))
    if not found:
        raise KVTierError(f"{url} has neither loaded nor computed anything yet, so it has no rates")
    return found


def _break_even(found: dict[str, Any], rates: dict[str, Any]) -> list[dict[str, Any]]:
    if "prefill" not in rates or "memory" not in rates:
        return []
    rows = []
    for row in found["codecs"]:
        links = {"memory": [(pays.Link(rates["memory"]), row["loaded_bytes_per_token_and_rank"])]}
        if "disk" in found["tiers"] and "disk" in rates:
            link = pays.Link(rates["disk"], latency=2e-3, shared=True)
            links["disk"] = [(link, row["stored_bytes_per_token"]), *links["memory"]]
        lengths = {
            tier: pays.break_even(of_tier, rates["prefill"], found["block_tokens"], found["longest_prompt"])
            for tier, of_tier in links.items()
        }
        rows.append({"codec": row["codec"], "tokens": lengths})
    return rows


def _replay(
    found: dict[str, Any], file: Path, tokens: int, codecs: list[str], admitted: str, policy: str
) -> dict[str, Any]:
    from vllm_kvtier.plan import trace as traces
    from vllm_kvtier.plan.replay import replay
    from vllm_kvtier.store.tiers.admission import admission

    requests = traces.read(file)
    by_name = {row["codec"]: row["tokens"] for row in found["codecs"]}
    if unknown := [name for name in codecs if name not in by_name]:
        raise KVTierError(f"no codec is named {unknown[0]!r}: there are {', '.join(by_name)}")
    rows = []
    for name in codecs:
        blocks = {tier: fits // tokens for tier, fits in by_name[name].items()}
        if not blocks["memory"]:
            raise KVTierError(f"the memory holds less than one block of the trace ({tokens} tokens) as {name}")
        if sys.stderr.isatty():
            print(f"replaying {len(requests):,} requests as {name} ...", file=sys.stderr)
        seen = replay(
            requests,
            blocks["memory"],
            blocks.get("disk", 0),
            lambda: admission(admitted),
            cache=blocks.get("cache", 0),
            memory_policy=policy,
        )
        rows.append({"codec": name, "blocks": blocks, **{key: v for key, v in seen.items() if key != "us_per_block"}})
    asked = sum(len(ids) for _, ids in requests)
    return {
        "name": file.name,
        "requests": len(requests),
        "tokens": asked * tokens,
        "policy": policy,
        "ideal": traces.ideal(requests),
        "runs": rows,
    }


def _show(found: dict[str, Any], console: Console) -> None:
    _print(console, f"{found['model']}: {found['layers']}")
    ranks = found["tensor_parallel_size"]
    _print(
        console,
        f"{format_bytes(round(found['bytes_per_token_and_gpu']))} a token in {'the' if ranks == 1 else 'each'} GPU's "
        f"cache ({found['kv_cache_dtype']}, {ranks} rank{'s' * (ranks > 1)}, blocks of {found['block_tokens']} tokens)",
    )
    for remark in found["remarks"]:
        console.print(remark, style="yellow", markup=False)
    names = {"cache": "GPU cache", "memory": "memory", "disk": "disk"}
    _print(console, "\nTokens that fit")
    sizes = [f"{names[tier]} ({format_bytes(nbytes)})" for tier, nbytes in found["tiers"].items()]
    rows = [
        (
            row["codec"],
            f"{row['stored_bytes_per_token']:,.0f}",
            f"{row['smaller']:.2f} x",
            *(f"{row['tokens'][tier]:,}" for tier in found["tiers"]),
        )
        for row in found["codecs"]
    ]
    console.print(inputs.make_table(("codec", "bytes a token", "smaller", *sizes), rows, left=("codec",)))
    _show_break_even(found, names, console)
    if "trace" in found:
        _show_trace(found["trace"], names, console)
    if "cluster" in found:
        plan_cluster.show(found["cluster"], console)


def _show_break_even(found: dict[str, Any], names: dict[str, str], console: Console) -> None:
    if not found["break_even"]:
        missing = "\nBreak-even prompt length: give --prefill, and --load-rate, --machine or --server"
        console.print(missing, style="dim", markup=False)
        return
    tiers = list(found["break_even"][0]["tokens"])
    rates = ", ".join(f"{names[tier]} {found['rates'][tier] / 1e9:.2f} GB/s" for tier in tiers)
    _print(console, f"\nLoading beats computing from so many tokens on, up to {found['longest_prompt']:,} (at {rates})")
    rows = []
    for row in found["break_even"]:
        lengths = ("never" if row["tokens"][tier] is None else f"{row['tokens'][tier]:,}" for tier in tiers)
        rows.append((row["codec"], *lengths))
    console.print(inputs.make_table(("codec", *(names[tier] for tier in tiers)), rows, left=("codec",)))


def _show_trace(trace: dict[str, Any], names: dict[str, str], console: Console) -> None:
    _print(
        console, f"\n{trace['name']}: {trace['requests']:,} requests, {trace['tokens']:,} tokens; share of them found"
    )
    tiers = list(trace["runs"][0]["blocks"])
    heads = ["codec", *(f"in {names[tier]}" for tier in tiers), "together", "without limit"]
    if "disk" in tiers:
        heads.append("written to disk")
    rows = []
    for run in trace["runs"]:
        hits = (f"{run[f'{tier}_hits']:.1%}" for tier in tiers)
        written = [f"{run['written_blocks']:,} blocks"] if "disk" in tiers else []
        rows.append((run["codec"], *hits, f"{run['hits']:.1%}", f"{trace['ideal']:.1%}", *written))
    console.print(inputs.make_table(heads, rows, left=("codec",)))


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
