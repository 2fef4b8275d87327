"""Runs the requested checks."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_kvtier.doctor import prompt as prompts
from vllm_kvtier.doctor import store
from vllm_kvtier.doctor.engines import checks as engines
from vllm_kvtier.doctor.engines import compatibility
from vllm_kvtier.doctor.engines.server import Prompt, Server
from vllm_kvtier.doctor.machine import disk, gpus, limits, mooncake, objects, packages, ports
from vllm_kvtier.doctor.report import Check, fail, ok, unknown, warn
from vllm_kvtier.errors import ConfigError, KVTierError
from vllm_kvtier.store.launcher import serves
from vllm_kvtier.store.memory.memory_limits import parse_bytes
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.tiers.tier_stack import bytes_beside_pool
from vllm_kvtier.wire.auth import ClusterKey


@dataclass(frozen=True)
class Options:
    """``servers[i]`` and ``endpoints[i]`` are of one engine. ``socket``: of the node store; ``other_sockets``: where
    processes of another environment have theirs. ``here``: check this machine; False if only engines on other machines
    are checked."""

    servers: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    socket: str = ""
    socket_given: bool = False
    other_sockets: tuple[str, ...] = ()
    disk: Path | None = None
    disk_size: str = "64GiB"
    object_url: str = ""
    object_endpoint: str = ""
    object_region: str = ""
    object_size: str = "64GiB"
    mooncake_master: str = ""
    mooncake_metrics_port: int = mooncake.METRICS_PORT
    mooncake_segment: str = "4GiB"
    mooncake_protocol: str = "tcp"
    store_size: str = "10%"
    listen: tuple[str, ...] = ()
    cluster_key: Path | None = None
    backends: tuple[str, ...] = ("UCX",)
    prompt: Prompt | None = None
    compare_with: Prompt | None = None
    salts: tuple[str, ...] = ("",)  # the prompt's own, then others that requests may have carried
    adapter: str = ""  # LoRA adapter that the prompt is for
    threshold: int = 64
    here: bool = True
    seconds: float = 3.0


def examine(options: Options, progress: Callable[[Check], None] = lambda check: None) -> list[Check]:
    """Run all checks and report each to ``progress`` when it is done. A fault becomes a check, not an exception."""
    done: list[Check] = []

    def add(*checks: Check) -> None:
        for check in checks:
            done.append(check)
            progress(check)

    if options.here:
        add(packages.vllm())
        if done[-1].state == "ok":
            add(*packages.probe())
        driver = gpus.load_driver()
        add(*gpus.gpus(driver))
        running = bool(options.socket) and serves(options.socket, options.seconds)
        add(*_memory(options, running), limits.shared_memory(engines=driver is not None or not running))
        add(limits.open_files(), packages.nixl(options.backends))
    if options.disk is not None:
        add(limits.asynchronous_io(), *_disk(options))
    if options.object_url:
        add(*_objects(options))
    if options.mooncake_master:
        add(*mooncake.mooncake(options.mooncake_master, options.mooncake_protocol, options.mooncake_metrics_port))
    key = None
    if options.cluster_key is not None:
        check, key = _cluster_key(options.cluster_key)
        add(check)
    add(*(ports.port(address, key is not None) for address in options.listen))
    known = []
    for at in range(max(len(options.servers), len(options.endpoints))):
        url, address = (given[at] if at < len(given) else "" for given in (options.servers, options.endpoints))
        known.append(engines.look_at(url, address, key, options.seconds))
        add(*known[-1].checks)
    add(*versions(known))
    add(*compatibility.compatibility({e.name: e.identity for e in known if e.identity is not None}))
    counts = None
    if options.socket:
        expected = options.socket_given or any(e.inspection is not None and e.inspection.store for e in known)
        checks, counts = store.store(options.socket, expected, options.seconds, options.other_sockets)
        add(*checks)
    if options.prompt is not None:
        add(*_prompt(options, known, key, counts))
    return done


def _cluster_key(file: Path) -> tuple[Check, ClusterKey | None]:
    """The key too, for the checks that need it."""
    try:
        key = ClusterKey.load(str(file))
    except ConfigError as error:
        message, _, fix = str(error).partition("; ")
        return fail("cluster key", message, fix or "let its owner alone read it"), None
    return ok("cluster key", f"{file} holds a key that only its owner reads"), key


def _memory(options: Options, running: bool) -> list[Check]:
    """Of the store and its tiers. ``running``: it has its memory, and no second one is started beside it."""
    try:
        tiers = bytes_beside_pool(
            StoreOptions(
                disk_path=str(options.disk or ""),
                disk_size=options.disk_size,
                object_url=options.object_url,
                mooncake_master=options.mooncake_master,
                mooncake_trusted_network=True,
                mooncake_segment=options.mooncake_segment,
                mooncake_protocol=options.mooncake_protocol,
            )
        )
    except ConfigError as error:
        return [fail("memory", str(error), "give --mooncake-... and --disk-size as the options store_...")]
    segment = tiers.get("mooncake_segment", 0) if options.mooncake_protocol == "rdma" else 0
    size = "off" if running else options.store_size
    return [limits.memory(size, tiers=tiers), limits.memlock(options.store_size, segment=segment)]


def _disk(options: Options) -> list[Check]:
    try:
        size = parse_bytes(options.disk_size, "--disk-size")
    except KVTierError as error:
        return [fail(f"disk {options.disk}", str(error), "give --disk-size as store_disk_size")]
    return disk.disk(options.disk, size)


def _objects(options: Options) -> list[Check]:
    try:
        size = parse_bytes(options.object_size, "--object-size")
    except KVTierError as error:
        return [fail("objects", str(error), "give --object-size as store_object_size")]
    return objects.objects(options.object_url, options.object_endpoint, options.object_region, size)


def versions(known: list[engines.Engine]) -> list[Check]:
    found = {engine.url: engine.version for engine in known if engine.version}
    if len(set(found.values())) < 2:
        return []
    engines_run = ", ".join(f"{version} at {url}" for url, version in found.items())
    message = f"the engines run different vLLM: {engines_run}; their cache layouts may differ"
    fix = "the same vLLM for engines that share KV; with --endpoint the checks below compare the layouts"
    return [warn("vLLM versions", message, fix)]


def _prompt(options: Options, known: list[engines.Engine], key, counts) -> list[Check]:
    servers = [Server(url, 60.0) for url in options.servers if url]
    if not servers:
        return [unknown("prompt", "no server was given to tokenize it", "give --server beside --endpoint")]
    try:
        made = [server.tokenize(options.prompt) for server in servers]
        other = servers[0].tokenize(options.compare_with) if options.compare_with is not None else None
    except KVTierError as error:
        return [fail("prompt", str(error), "is this a vLLM server? doctor needs its /tokenize")]
    checks = []
    for server, tokens in zip(servers[1:], made[1:], strict=True):
        if tokens != made[0]:
            same = next((i for i, (a, b) in enumerate(zip(made[0], tokens, strict=False)) if a != b), 0)
            message = f"{servers[0].url} and {server.url} tokenize it differently, from token {same} on: another "
            fix = "the same --tokenizer and --chat-template for engines that share KV"
            checks.append(fail("prompt", message + "tokenizer or chat template", fix))
    hash_block_size = next((e.identity.hash_block_size for e in known if e.identity is not None), 0)
    if other is not None:
        checks.append(prompts.tokens_differ("prompt and the other", made[0], other, hash_block_size))
    if not any(engine.inspection is not None for engine in known):
        return [*checks, unknown("prompt", f"{len(made[0])} tokens; no endpoint answers", "give --endpoint")]
    own, *others = options.salts
    asked = prompts.Prompt(made[0], own, tuple(others), options.threshold, options.adapter)
    return checks + (prompts.why(asked, known, key, counts) or [ok("prompt", f"{len(made[0])} tokens")])
