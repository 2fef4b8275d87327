"""Our counters as vLLM's connector stats: its periodic log line and its Prometheus endpoint."""

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter as PrometheusCounter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from vllm_kvtier.telemetry.stats import MEANINGS

_LOGGED = (
    "loaded_tokens", "loaded_bytes", "stored_bytes", "pulled_tokens", "pulled_bytes", "integrity_failures", "exports",
    "declined",
)
_RATES = (("pull", "pulled_bytes", "pull_seconds"), ("load", "loaded_bytes", "load_seconds"))


class KVTierStats(KVConnectorStats):
    """``data``: {"name" or "name|label": amount}, as :meth:`Counters.take` makes it."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KVTierStats":
        for key, amount in other.data.items():
            self.data[key] = self.data.get(key, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """The essentials for the log line, labels summed up."""
        totals = by_name(self.data)
        out: dict[str, int | float] = {n: round(sum(totals[n].values())) for n in _LOGGED if n in totals}
        for name, nbytes, seconds in _RATES:
            spent = sum(totals.get(seconds, {}).values())
            if spent:
                out[f"{name}_GB/s"] = round(sum(totals.get(nbytes, {}).values()) / spent / 1e9, 2)
        return out

    def is_empty(self) -> bool:
        return not self.data


def by_name(data: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """{"a|x": 1, "a|y": 2} -> {"a": {"x": 1, "y": 2}}."""
    out: dict[str, dict[str, float]] = {}
    for key, amount in data.items():
        name, _, label = key.partition("|")
        out.setdefault(name, {})[label] = amount
    return out


class KVTierPromMetrics(KVConnectorPromMetrics):
    """``vllm:kvtier_<name>_total{kind=...}``, one counter a name."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter = metric_types[PrometheusCounter]
        self._counters = {
            name: counter(name=f"vllm:kvtier_{name}", documentation=meaning, labelnames=[*labelnames, "kind"])
            for name, meaning in MEANINGS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for name, labels in by_name(transfer_stats_data).items():
            for label, amount in labels.items():
                if name in self._counters:
                    self._counters[name].labels(*values, label).inc(amount)
