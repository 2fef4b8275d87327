"""Our counters as vLLM's connector stats: its periodic log line and its Prometheus endpoint."""

import functools
from typing import Any

from prometheus_client import Counter as PrometheusCounter
from prometheus_client import Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_kvtier.logs import get_logger
from vllm_kvtier.telemetry.stats import BEFOREHAND, GAUGES, HISTOGRAMS, KINDS, MEANINGS, OLD_NAMES, by_name, merge
from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature

logger = get_logger(__name__)

PREFIX = "vllm:kvtier_"
LABEL = "kind"

# Failures that the log line always has: (counter, kind; None: all kinds).
_ERRORS = (
    ("integrity_failures", None), ("loads", "failed"), ("fetches", "failed"), ("pulls", "failed"),
    ("store_disconnects", None), ("internal_errors", None),
)  # fmt: skip


@functools.cache
def _log_unreadable() -> None:
    logger.exception("kvtier: stats: the log line could not be computed; it stays empty (logged once)")


class KVTierStats(KVConnectorStats):
    """``data``: as :meth:`Counters.take` makes it."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KVTierStats":
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log line. Must not raise: that would end the task that reads the engines' outputs."""
        try:
            return self._essentials()
        except Exception:
            _log_unreadable()
            return {}

    def _essentials(self) -> dict[str, int | float]:
        """Numbers of the interval since the last log line: prompt tokens by source, copied bytes and their rates, the
        planner's error, and failures. Zeros are left out."""
        found = by_name(self.data)
        out: dict[str, int | float] = {}
        for source, tokens in found.get("prompt_tokens", {}).items():
            if tokens:
                out[f"{source}_tokens"] = round(tokens)
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
        ratios = sorted(each for kind in found.get("load_time_ratio", {}).values() for each in kind)
        if ratios:
            out["load_time_ratio"] = round(ratios[(len(ratios) - 1) // 2], 2)
        for name, kind in _ERRORS:
            times = sum(n for k, n in found.get(name, {}).items() if kind in (None, k))
            if times:
                out[f"{name}_{kind}" if kind else name] = round(times)
        return out

    def is_empty(self) -> bool:
        return not self.data


class _Logged(KVTierStats):
    """Empty if the log line would be: vLLM before 0.33 writes an empty line for stats that are not empty."""

    def is_empty(self) -> bool:
        return not self.reduce()


def build(data: dict[str, Any] | None) -> KVTierStats:
    """Stats from the engine process's data; a copy, because vLLM gives the same data to its Prometheus side."""
    return _Logged(data={k: list(v) if isinstance(v, list) else v for k, v in (data or {}).items()})


class KVTierPromMetrics(KVConnectorPromMetrics):
    """``vllm:kvtier_<name>{kind=...}``: counters, histograms and gauges.

    With vLLM's ``--show-hidden-metrics-for-version`` renamed metrics have a second series under their old names.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        names = [*labelnames, LABEL]
        show_hidden = granted(Feature.HIDDEN_METRICS) and vllm_config.observability_config.show_hidden_metrics

        def make(sort: type, name: str, meaning: str, **more: Any) -> Any:
            return metric_types[sort](name=PREFIX + name, documentation=meaning, labelnames=names, **more)

        def series(sort: type, name: str, meaning: str, **more: Any) -> list[Any]:
            made = [make(sort, name, meaning, **more)]
            if show_hidden and name in OLD_NAMES:
                made.append(make(sort, OLD_NAMES[name], f"deprecated, renamed to {PREFIX}{name}: {meaning}", **more))
            return made

        self._metrics = {name: series(PrometheusCounter, name, meaning) for name, meaning in MEANINGS.items()}
        for name, (meaning, buckets) in HISTOGRAMS.items():
            self._metrics[name] = series(Histogram, name, meaning, buckets=list(buckets))
        for name, meaning in GAUGES.items():  # with several API server processes the latest value counts
            self._metrics[name] = series(Gauge, name, meaning, multiprocess_mode="mostrecent")
        self._children: dict[tuple[str, int, str], list[Any]] = {}
        self._logged: set[str] = set()
        for name in BEFOREHAND:
            for engine in per_engine_labelvalues:
                for kind in KINDS.get(name, ("",)):
                    self._of(name, engine, kind)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, kinds in by_name(transfer_stats_data).items():
            for kind, value in kinds.items():
                try:
                    for child in self._of(name, engine_idx, kind):
                        self._show(child, name, value)
                except Exception:  # it would end the task that reads the engines' outputs, and the server
                    if name not in self._logged:
                        self._logged.add(name)
                        logger.exception("kvtier: stats: metric %s could not be updated (logged once)", name)

    @staticmethod
    def _show(child: Any, name: str, value: float | list[float]) -> None:
        if name in HISTOGRAMS:
            for each in value:
                child.observe(each)
        elif name in GAUGES:
            child.set(value)
        else:
            child.inc(value)

    def _of(self, name: str, engine: int, kind: str) -> list[Any]:
        """The series of a metric, cached because ``labels`` is slow; none of a name that only a newer engine has."""
        key = name, engine, kind
        if key not in self._children:
            labels = *self.per_engine_labelvalues[engine], kind
            self._children[key] = [metric.labels(*labels) for metric in self._metrics.get(name, ())]
        return self._children[key]
