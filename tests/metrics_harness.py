"""All metrics of this project in one process: a store with a disk, a proxy with fake engines, and the metrics that vLLM
makes of the connector's counters.
"""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)  # fmt: skip
from proxy_fakes import Cluster
from store_process import POOL, Engine
from store_support import RawClient as StoreSocket
from store_support import block_hashes_of, tool_hello
from support import eventually

from vllm_kvtier.devtools.processes import free_port
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.server.server import StoreServer
from vllm_kvtier.telemetry.stats import GAUGES, HISTOGRAMS, KINDS, MEANINGS, Counters
from vllm_kvtier.vllm_compat.stats import KVTierPromMetrics, KVTierStats, build

MODEL = "recall"


def _kinds(name: str, meaning: str) -> tuple[str, ...]:
    return KINDS.get(name) or ("some reason or codec" if " by " in meaning else "",)


def vllm_config(show_hidden_metrics: bool = False) -> SimpleNamespace:
    """What vLLM's metrics classes read of its configuration."""
    observability = SimpleNamespace(show_hidden_metrics=show_hidden_metrics)
    return SimpleNamespace(kv_transfer_config=None, observability_config=observability)


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pytest would show it."""


class EngineMetrics:
    """``/metrics`` of a vLLM server with two engines: real classes, a registry of its own, and vLLM's own histogram of
    the time to the first token."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        names, values = ["model_name", "engine"], {0: [MODEL, "0"], 1: [MODEL, "1"]}
        types = {sort: self._registered(sort) for sort in (Counter, Gauge, Histogram)}
        self.metrics = KVTierPromMetrics(vllm_config(), types, names, values)
        self._first = types[Histogram]("vllm:time_to_first_token_seconds", "vLLM's own.", names)
        self.counters = Counters()
        self._server = make_server("127.0.0.1", 0, self._answer, handler_class=_Quiet)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics")
        self._thread.start()

    def _answer(self, environ: Any, start_response: Any) -> list[bytes]:
        """As vLLM's instrumentator: always as text, whatever Prometheus would rather have. prometheus_client's own
        server would speak OpenMetrics to it, and write ``vllm_`` for ``vllm:``."""
        start_response("200 OK", [("Content-Type", CONTENT_TYPE_LATEST)])
        return [generate_latest(self.registry)]

    def _registered(self, sort: type) -> Callable[..., Any]:
        return lambda *given, **more: sort(*given, registry=self.registry, **more)

    def load(self) -> None:
        """A step in which everything happened that can."""
        for name, meaning in MEANINGS.items():
            for kind in _kinds(name, meaning):
                self.counters.count(name, kind, 10)
        for name, (meaning, bounds) in HISTOGRAMS.items():
            for kind in _kinds(name, meaning):
                self.counters.observe(name, kind, bounds[3])
        for name, meaning in GAUGES.items():
            for kind in _kinds(name, meaning):
                self.counters.show(name, kind, 1)
        stats = KVTierStats(data=self.counters.take())
        for engine in (0, 1):
            self.metrics.observe(build(stats.data).data, engine)
            self._first.labels(MODEL, str(engine)).observe(0.1)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class ProxyThread:
    """A proxy with one prefill and one decode engine, on a separate event loop. ``port``: of its address."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy")
        self._thread.start()
        self._cluster = self._run(self._begin())
        self.port = int(self._cluster.url.rpartition(":")[2])
        self._asked = 0

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _begin(self) -> Cluster:
        return await Cluster(p=1, d=1).__aenter__()

    def load(self) -> None:
        self._asked += 1
        for _ in range(2):
            self._run(self._cluster.chat(f"question {self._asked} " * 50, stream=True))

    def close(self) -> None:
        self._run(self._cluster.__aexit__())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class StoreWithDisk:
    """``load`` stores more than its memory holds, and reads it again."""

    def __init__(self, folder: Path) -> None:
        self.port, self._rounds = free_port(), 0
        options = StoreOptions(
            size=str(POOL), metrics_port=self.port, disk_path=str(folder / "disk"), disk_size="32MiB",
            disk_admission="all", node_listen=f"127.0.0.1:{free_port()}",
            mooncake_master=f"127.0.0.1:{free_port()}", mooncake_trusted_network=True, mooncake_segment="1MiB",  # none
        )  # fmt: skip
        self.server = StoreServer(str(folder / "s.sock"), options)
        self.server.start()
        eventually(lambda: self.server.memory.ready == self.server.memory.usable, 30)
        with StoreSocket(self.server.path, tool_hello()) as tool:
            eventually(lambda: all(t.state == "ready" for t in tool.stat().tiers if t.name == "disk"), 30)

    def load(self) -> None:
        self._rounds += 1
        prefixes = [block_hashes_of((32, self._rounds * 100 + number)) for number in range(10)]
        with Engine(self.server) as engine:
            for block_hashes in prefixes:
                engine.fill(block_hashes)
            for block_hashes in prefixes:
                engine.find(block_hashes)

    def close(self) -> None:
        self.server.stop()


class MetricsWorld:
    """``targets``: by job, as in examples/grafana/prometheus.yml."""

    def __init__(self, folder: Path) -> None:
        self._open: list[Any] = []
        try:
            self.engine, self.store, self.proxy = (
                self._begun(make) for make in (EngineMetrics, lambda: StoreWithDisk(folder), ProxyThread)
            )
        except BaseException:
            self.close()
            raise
        ports = {"vllm": self.engine, "kvtier-store": self.store, "kvtier-proxy": self.proxy}
        self.targets = {job: [f"127.0.0.1:{each.port}"] for job, each in ports.items()}

    def _begun(self, make: Callable[[], Any]) -> Any:
        self._open.append(make())
        return self._open[-1]

    def load(self) -> None:
        for each in self._open:
            each.load()

    def close(self) -> None:
        for each in reversed(self._open):
            each.close()
