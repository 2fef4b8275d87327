"""Engines for a variant, started here; its store too, which is its own and ends with it."""

import argparse
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tiers import GIB, bytes_per_token, prepare

from vllm_kvtier.devtools.engines import Engine
from vllm_kvtier.devtools.processes import start_all
from vllm_kvtier.devtools.stores import end_store
from vllm_kvtier.store.launcher import store_path

from .targets import Target, targets_of
from .variants import Variant

GRACE_SECONDS = 15.0


@dataclass(frozen=True)
class Needs:
    """Of an engine's KV cache: ``longest`` tokens of one request, ``held`` of all at once. ``stored``: tokens that
    host memory should have room for, over all engines. ``requests``: at once."""

    longest: int
    held: int
    stored: int
    requests: int


@dataclass
class Running:
    """A variant that is up. ``engines`` is empty where the servers are not ours."""

    variant: Variant
    targets: list[Target]
    engines: list[Engine] = field(default_factory=list)
    runtime: Path | None = None  # where its store has its socket

    def stop(self) -> None:
        for engine in self.engines:
            engine.terminate(GRACE_SECONDS)
        if self.runtime is not None:
            end_store(_socket_in(self.runtime))
            shutil.rmtree(self.runtime, ignore_errors=True)


def host_bytes(args: argparse.Namespace, needs: Needs) -> int:
    """Of a variant, all engines together: as asked for, or room for all with a fifth to spare; whole GiB."""
    if args.host_gib:
        return int(args.host_gib * GIB)
    wanted = 1.2 * needs.stored * bytes_per_token(args.model) if args.model else 0
    return max(1, -(-int(wanted) // GIB)) * GIB


def start(variants: Sequence[Variant], args: argparse.Namespace, needs: Needs) -> list[Running]:
    """Start all, together. Raises ServiceFailed with the engine's log if one does not start."""
    model = prepare(args.model, needs.longest) if any(not v.urls for v in variants) else None
    running: list[Running] = []
    try:
        for variant in variants:
            if variant.urls:
                running.append(Running(variant, targets_of(variant.urls, args.ranks)))
                continue
            running.append(_make(variant, args, needs, model))
        engines = [engine for one in running for engine in one.engines]
        # With the KV cache given by size, vLLM does not go by the memory that happens to be free meanwhile. Without a
        # GPU they would share few cores: one after the other.
        for some in [engines] if args.gpus else [[engine] for engine in engines]:
            start_all(some)
    except BaseException:
        stop(running)
        raise
    return running


def stop(running: Iterable[Running]) -> None:
    for one in running:
        one.stop()


def _make(variant: Variant, args: argparse.Namespace, needs: Needs, model: Path) -> Running:
    ranks = args.data_parallel
    cache = args.cache_tokens or needs.held
    flags = ["--no-enable-log-requests", "--enable-prompt-tokens-details"]
    if args.dummy:
        flags += ["--load-format", "dummy"]
    if args.gpus:
        flags += ["--gpu-memory-utilization", "0.2"]  # only what must be free at the start: kv_cache_bytes rules
    if args.step_tokens:
        flags += ["--max-num-batched-tokens", str(args.step_tokens)]
    if ranks > 1:
        flags += ["--data-parallel-size", str(ranks)]
    # Short: a Unix socket's path holds little.
    runtime = Path(tempfile.mkdtemp(prefix="kvs-"))
    env = {"VLLM_SERVER_DEV_MODE": "1", "XDG_RUNTIME_DIR": str(runtime)}
    servers = args.engines // ranks
    gpus = [_gpus_of(number, servers, args.gpus) for number in range(servers)]
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", variant.name)[:40]  # of a log
    engines = [
        Engine(
            model, name=f"{name}-{number}", kv=variant.kv, gpus=gpus[number],
            tensor_parallel=max(1, len(args.gpus) // args.engines),
            args=[*flags, *args.engine_args, *variant.args], log_dir=args.logs, python=args.python,
            env={**env, **(_visible(gpus[number], args.gpus) if args.see_all_gpus else {}), **variant.env},
            max_model_len=needs.longest, max_num_seqs=max(16, needs.requests), ready_seconds=args.ready,
            kv_cache_bytes=max(cache, needs.longest + 2048) * bytes_per_token(args.model),
        )
        for number in range(servers)
    ]  # fmt: skip
    targets = targets_of([engine.base_url for engine in engines], ranks)
    return Running(variant, targets, engines, runtime)


def _gpus_of(server: int, servers: int, gpus: Sequence[int]) -> list[int]:
    """The devices of one server; engines share them where there are fewer."""
    each = max(1, len(gpus) // servers)
    return [gpus[(server * each + i) % len(gpus)] for i in range(each)] if gpus else []


def _visible(own: Sequence[int], gpus: Sequence[int]) -> dict[str, str]:
    """All devices, an engine's own before the others: it computes on the first, and can map what the others hold."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, [*own, *(gpu for gpu in gpus if gpu not in own)]))}


def _socket_in(runtime: Path) -> str:
    """Path of the store's socket for a process whose runtime directory is this."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(runtime)
    try:
        return store_path()
    finally:
        os.environ.pop("XDG_RUNTIME_DIR")
        if before is not None:
            os.environ["XDG_RUNTIME_DIR"] = before


def vocabulary(model: Path) -> int:
    return json.loads((model / "config.json").read_text("utf-8"))["vocab_size"]
