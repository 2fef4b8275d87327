"""Runs the checks that were asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_kvtier.doctor import compatibility, disk, engines, gpus, keys, machine, packages, ports, store
from vllm_kvtier.doctor import prompt as prompts
from vllm_kvtier.doctor.report import Check, fail, ok, unknown
from vllm_kvtier.doctor.server import Prompt, Server
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.limits import parse_bytes


@dataclass(frozen=True)
class Options:
    """``servers`` and ``endpoints`` of one engine stand at the same place. ``socket``: of the node store.

    ``here``: whether this machine is looked at; not where only engines elsewhere are asked.
    """

    servers: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    socket: str = ""
    socket_given: bool = False
    disk: Path | None = None
    disk_size: str = "64GiB"
    store_size: str = "10%"
    listen: tuple[str, ...] = ()
    cluster_key: Path | None = None
    backends: tuple[str, ...] = ("UCX",)
    prompt: Prompt | None = None
    like: Prompt | None = None
    salts: tuple[str, ...] = ("",)  # the prompt's own, then others that it may have been sent with
    adapter: str = ""  # LoRA adapter that the prompt is for
    threshold: int = 64
    here: bool = True
    seconds: float = 3.0


def examine(options: Options, progress: Callable[[Check], None] = lambda check: None) -> list[Check]:
    """All checks, each told to ``progress`` as it is done. Raises nothing that a fault could cause."""
    done: list[Check] = []

    def add(*checks: Check) -> None:
        for check in checks:
            done.append(check)
            progress(check)

    if options.here:
        add(packages.vllm())
        if done[-1].state == "ok":
            add(*packages.probe())
        add(*gpus.gpus(gpus.load_driver()))
        add(machine.memory(options.store_size), machine.shared_memory(), machine.memlock(options.store_size))
        add(machine.open_files(), packages.nixl(options.backends))
    if options.disk is not None:
        add(machine.asynchronous_io(), *_disk(options))
    key = None
    if options.cluster_key is not None:
        check, key = keys.cluster_key(options.cluster_key)
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
        checks, counts = store.store(options.socket, expected, options.seconds)
        add(*checks)
    if options.prompt is not None:
        add(*_prompt(options, known, key, counts))
    return done


def _disk(options: Options) -> list[Check]:
    try:
        size = parse_bytes(options.disk_size, "--disk-size")
    except KVTierError as error:
        return [fail(f"disk {options.disk}", str(error), "give --disk-size as store_disk_size")]
    return disk.disk(options.disk, size)


def versions(known: list[engines.Engine]) -> list[Check]:
    found = {engine.url: engine.version for engine in known if engine.version}
    if len(set(found.values())) < 2:
        return []
    words = ", ".join(f"{version} at {url}" for url, version in found.items())
    return [
        Check(
            "vLLM versions", "warn", f"the engines run different vLLM: {words}; their caches may lie differently",
            "the same vLLM for engines that share KV; whether they can is told below, where --endpoint is given",
        )
    ]  # fmt: skip


def _prompt(options: Options, known: list[engines.Engine], key, counts) -> list[Check]:
    servers = [Server(url, 60.0) for url in options.servers if url]
    if not servers:
        return [unknown("prompt", "no server was given that could tokenize it", "give --server beside --endpoint")]
    try:
        made = [server.tokenize(options.prompt) for server in servers]
        like = servers[0].tokenize(options.like) if options.like is not None else None
    except KVTierError as error:
        return [fail("prompt", str(error), "is this a vLLM server? Its /tokenize is what is asked")]
    checks = []
    for server, tokens in zip(servers[1:], made[1:], strict=True):
        if tokens != made[0]:
            same = next((i for i, (a, b) in enumerate(zip(made[0], tokens, strict=False)) if a != b), 0)
            checks.append(
                fail(
                    "prompt",
                    f"{servers[0].url} and {server.url} make different tokens of it, from token {same} on: another "
                    "tokenizer or chat template",
                    "the same --tokenizer and --chat-template for engines that share KV",
                )
            )
    unit = next((e.identity.block_tokens for e in known if e.identity is not None), 0)
    if like is not None:
        checks.append(prompts.tokens_differ("prompt and the other", made[0], like, unit))
    if not any(engine.inspection is not None for engine in known):
        return [
            *checks,
            unknown("prompt", f"{len(made[0])} tokens; no endpoint answers that knows more", "give --endpoint"),
        ]
    own, *others = options.salts
    asked = prompts.Prompt(made[0], own, tuple(others), options.threshold, options.adapter)
    return checks + (prompts.why(asked, known, key, counts) or [ok("prompt", f"{len(made[0])} tokens")])
