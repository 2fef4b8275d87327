"""vLLM servers for the demo, the tests and the benchmarks, with the settings that make small ones start fast.

On a machine without a GPU the traps are known: threads of two engines that spin on the same cores slow a
transfer a hundredfold, so each engine gets one OpenMP thread, unbound, that sleeps when idle. ``--enforce-eager`` does
not reach vLLM's sampler: the first request for logprobs would compile it, which takes longer than the start.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_kvtier.devtools.processes import Service, free_port
from vllm_kvtier.doctor.engines.endpoint import EndpointProbe, NoEndpoint
from vllm_kvtier.plugin import CONNECTOR_NAME

MIB = 1 << 20

# For every engine. PYTHONHASHSEED: up to 0.28 vLLM seeds its block hashes with it, and engines whose seeds
# differ cannot find each other's blocks.
COMMON_ENV = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}
CPU_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "KMP_BLOCKTIME": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def kvtier(extra: Mapping[str, Any] | None = None, role: str = "kv_both", **transfer: Any) -> dict[str, Any]:
    """The ``--kv-transfer-config`` of an engine with our connector; ``extra``: options of KVTierConfig."""
    return {"kv_connector": CONNECTOR_NAME, "kv_role": role, "kv_connector_extra_config": dict(extra or {}), **transfer}


class Engine(Service):
    """``python -m vllm.entrypoints.openai.api_server`` for one model.

    model: directory or hub name. kv: the ``--kv-transfer-config``, for example ``kvtier({...})``, or None.
    gpus: devices, as CUDA_VISIBLE_DEVICES names them; none means the CPU build.
    kv_cache_bytes: size of the KV cache; with num_blocks (of block_size tokens), only an upper bound of it.
    args, env: more flags and variables, which override the defaults.
    tensor_parallel: ranks; by default one for each of ``gpus``, and one on the CPU.
    worker_process: whether a CPU engine of one rank has a separate worker process, which is vLLM's default there.
    Without it, as by default on one GPU, the start takes two thirds of the time.
    python: the interpreter that has vLLM (default: this one).
    Engines of one model and seed have the same dummy weights; the connector gets a fingerprint that says so.
    """

    def __init__(
        self,
        model: str | os.PathLike,
        *,
        name: str = "engine",
        kv: Mapping[str, Any] | None = None,
        gpus: Sequence[int | str] = (),
        port: int | None = None,
        max_model_len: int = 4096,
        block_size: int | None = None,
        kv_cache_bytes: int = 64 * MIB,
        num_blocks: int | None = None,
        max_num_seqs: int = 16,
        tensor_parallel: int | None = None,
        worker_process: bool = False,
        args: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        python: str = sys.executable,
        log_dir: str | os.PathLike | None = None,
        ready_seconds: float = 240.0,
    ):
        model = str(model)
        port = port or free_port()
        if kv and kv.get("kv_connector") == CONNECTOR_NAME and "dummy" in args:
            named = {"model_fingerprint": f"dummy weights of {model}"}
            kv = {**kv, "kv_connector_extra_config": {**named, **kv.get("kv_connector_extra_config", {})}}
        self.model, self.kv = model, dict(kv) if kv else None
        if block_size is None:
            block_size = 16 if gpus else 32  # the CPU build's kernels want multiples of 32
        flags = {
            "--model": model,
            "--served-model-name": "model",
            "--host": "127.0.0.1",
            "--port": port,
            "--max-model-len": max_model_len,
            "--block-size": block_size,
            "--kv-cache-memory-bytes": kv_cache_bytes,
            "--max-num-seqs": max_num_seqs,
            "--enforce-eager": None,  # compiling takes longer than a small model's whole demo
            "--disable-uvicorn-access-log": None,
        }
        ranks = tensor_parallel or len(gpus) or 1
        device = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))} if gpus else dict(CPU_ENV)
        if ranks > 1:
            flags["--tensor-parallel-size"] = ranks
        elif not gpus and not worker_process:
            # The CPU platform uses a worker process unless vLLM's multiprocessing is off. The server's engine process
            # is not affected.
            flags["--distributed-executor-backend"] = "uni"
            device["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if num_blocks is not None:
            flags["--num-gpu-blocks-override"] = num_blocks
        if kv:
            flags["--kv-transfer-config"] = json.dumps(kv)
        command = [python, "-m", "vllm.entrypoints.openai.api_server"]
        for flag, value in flags.items():
            if not _overridden(flag, args):
                command += [flag] if value is None else [flag, str(value)]
        offline = {"HF_HUB_OFFLINE": "1"} if Path(model).is_dir() else {}
        super().__init__(
            name,
            [*command, *args],
            port=port,
            log_path=_log_path(log_dir, name),
            env={**COMMON_ENV, **device, **offline, **(env or {})},
            ready_seconds=ready_seconds,
        )

    @property
    def kv_address(self) -> str | None:
        """``HOST:PORT`` of the connector's endpoint if the options set it, else None."""
        extra = (self.kv or {}).get("kv_connector_extra_config", {})
        port = extra.get("endpoint_port")
        return f"{extra.get('advertise_host') or '127.0.0.1'}:{port}" if port else None

    def _healthy(self) -> bool:
        """vLLM serves a moment before the connector exports and stores what is computed."""
        return super()._healthy() and not (self.kv_address and _connector_starts(self.kv_address))


def _connector_starts(address: str) -> bool:
    try:
        with EndpointProbe(address) as probe:
            return probe.starting()
    except NoEndpoint:  # switched off, or with a key
        return False


def proxy(
    prefill: Sequence[Engine],
    decode: Sequence[Engine],
    *,
    name: str = "proxy",
    args: Sequence[str] = (),
    port: int | None = None,
    python: str = sys.executable,
    log_dir: str | os.PathLike | None = None,
) -> Service:
    """The package's proxy for these engines, not started yet.

    The proxy gets the endpoints that the engines' options set, because streamed answers before vLLM 0.33 lack them.
    """
    port = port or free_port()
    command = [python, "-m", "vllm_kvtier.proxy", "--host", "127.0.0.1", "--port", str(port)]
    for role, engines in (("--prefill", prefill), ("--decode", decode)):
        for engine in engines:
            command += [role, engine.base_url + (f",kv={engine.kv_address}" if engine.kv_address else "")]
    return Service(name, [*command, *args], port=port, log_path=_log_path(log_dir, name), ready_seconds=60)


def _log_path(log_dir: str | os.PathLike | None, name: str) -> Path:
    return Path(log_dir or tempfile.mkdtemp(prefix="kvtier-logs-")) / f"{name}.log"


def _overridden(flag: str, args: Sequence[str]) -> bool:
    """Whether the caller gives this flag, or its negation, itself."""
    names = {flag, f"--no-{flag[2:]}"}
    return any(arg.split("=", 1)[0] in names for arg in args)
