"""Our counters as vLLM's connector stats: its periodic log line and its Prometheus endpoint."""

from typing import Any

from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_kvtier.logs import get_logger
from vllm_kvtier.telemetry.stats import BEFOREHAND, GAUGES, HISTOGRAMS, KINDS, MEANINGS, by_name, merge

logger = get_logger("vllm.kvtier.stats")

PREFIX = "vllm:kvtier_"
LABEL = "kind"

# What goes wrong is in the log line whenever it did: counters, and those of their kinds that are no ordinary course.
_WRONG = (
    ("integrity_failures", None), ("loads", "failed"), ("fetches", "failed"), ("pulls", "failed"), ("store_lost", None),
    ("internal_errors", None),
)  # fmt: skip


class KVTierStats(KVConnectorStats):
    """``data``: as :meth:`Counters.take` makes it."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KVTierStats":
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """The essentials for the log line, of the interval since the last: prompt tokens by source, what was copied
        and how fast, how far the planner was off, and what went wrong. What did not happen is left out."""
        found = by_name(self.data)
        out: dict[str, int | float] = {}
        for source, tokens in found.get("prompt_tokens", {}).items():
            if tokens:
                out[f"{source.replace(' ', '_')}_tokens"] = round(tokens)
        for name, nbytes, seconds in (
            ("load", "loaded_bytes", "load_seconds"), ("fetch", "fetched_bytes", "fetch_seconds"),
            ("pull", "pulled_bytes", "pull_seconds"),
        ):  # fmt: skip
            spent = sorted(each for times in found.get(seconds, {}).values() for each in times)
            if sum(spent):
                out[f"{name}_GB/s"] = round(sum(found.get(nbytes, {}).values()) / sum(spent) / 1e9, 2)
                out[f"{name}_p50_ms"] = round(1e3 * spent[(len(spent) - 1) // 2], 1)
                out[f"{name}_max_ms"] = round(1e3 * spent[-1], 1)
        if stored := sum(found.get("stored_bytes", {}).values()):
            out["stored_MB"] = round(stored / 1e6, 1)
        ratios = sorted(each for kind in found.get("planned_ratio", {}).values() for each in kind)
        if ratios:
            out["taken/expected"] = round(ratios[(len(ratios) - 1) // 2], 2)
        for name, kind in _WRONG:
            times = sum(n for k, n in found.get(name, {}).items() if kind in (None, k))
            if times:
                out[f"{name}_{kind}" if kind else name] = round(times)
        return out

    def is_empty(self) -> bool:
        return not self.data


class _Logged(KVTierStats):
    """What the log line is made of: vLLM before 0.33 writes one, with nothing in it, of whatever is not empty."""

    def is_empty(self) -> bool:
        return not self.reduce()


def build(data: dict[str, Any] | None) -> KVTierStats:
    """Of what came from the engine's process: a copy, because vLLM gives the same to its Prometheus side."""
    return _Logged(data={k: list(v) if isinstance(v, list) else v for k, v in (data or {}).items()})


class KVTierPromMetrics(KVConnectorPromMetrics):
    """``vllm:kvtier_<name>{kind=...}``, of three sorts."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        names = [*labelnames, LABEL]

        def make(sort: type, name: str, meaning: str, **more: Any) -> Any:
            return metric_types[sort](name=PREFIX + name, documentation=meaning, labelnames=names, **more)

        self._counters = {name: make(PrometheusCounter, name, meaning) for name, meaning in MEANINGS.items()}
        self._histograms = {
            name: make(Histogram, name, meaning, buckets=list(buckets))
            for name, (meaning, buckets) in HISTOGRAMS.items()
        }
        # Of several API servers' processes, the one that heard of the engine last knows.
        self._gauges = {
            name: make(Gauge, name, meaning, multiprocess_mode="mostrecent") for name, meaning in GAUGES.items()
        }
        self._children: dict[tuple[str, int, str], Any] = {}
        self._said: set[str] = set()
        for name in BEFOREHAND:
            for engine in per_engine_labelvalues:
                for kind in KINDS.get(name, ("",)):
                    self._child(name, engine, kind)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, kinds in by_name(transfer_stats_data).items():
            for kind, value in kinds.items():
                child = self._child(name, engine_idx, kind)
                if child is None:
                    continue  # of an engine that is younger than this server
                try:
                    self._show(child, name, value)
                except Exception:  # it would end the task that reads the engines' outputs, and the server with it
                    if name not in self._said:
                        self._said.add(name)
                        logger.exception("kvtier: the metric %s cannot be shown (said once)", name)

    @staticmethod
    def _show(child: Any, name: str, value: float | list[float]) -> None:
        if name in HISTOGRAMS:
            for each in value:
                child.observe(each)
        elif name in GAUGES:
            child.set(value)
        else:
            child.inc(value)

    def _child(self, name: str, engine: int, kind: str) -> Any | None:
        """Looked up once: ``labels`` costs more than what it finds."""
        key = name, engine, kind
        if key not in self._children:
            metric = self._counters.get(name) or self._histograms.get(name) or self._gauges.get(name)
            labels = *self.per_engine_labelvalues[engine], kind
            self._children[key] = metric.labels(*labels) if metric is not None else None
        return self._children[key]
