"""``/metrics``: what Prometheus is told. A registry of its own, so that several proxies can live in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from vllm_kvtier.proxy.core import ProxyCore

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
_PREFIX = "kvtier_proxy_"


class Metrics:
    """Counters and histograms; gauges are read from the core when somebody asks."""

    def __init__(self, core: ProxyCore):
        self._registry = CollectorRegistry()

        def make(kind, name: str, text: str, labels=(), **more):
            return kind(_PREFIX + name, text, labels, registry=self._registry, **more)

        self._requests = make(Counter, "requests", "Requests by route and outcome.", ("route", "outcome"))
        self._request_seconds = make(
            Histogram,
            "request_seconds",
            "From a request's body to the end of its answer.",
            ("route",),
            buckets=_SECONDS,
        )
        self._first_seconds = make(
            Histogram,
            "first_byte_seconds",
            "From a request's body to the first byte of its answer.",
            ("route",),
            buckets=_SECONDS,
        )
        self._prefill_seconds = make(Histogram, "prefill_seconds", "P's answers.", buckets=_SECONDS)
        self._queue_seconds = make(
            Histogram, "queue_seconds", "Waits for a place at an engine.", ("role",), buckets=_SECONDS
        )
        self._retries = make(Counter, "retries", "Requests given to a further engine.", ("role",))
        self._events = make(Counter, "events", "What else happened, as in /kvtier/state.", ("event",))
        self._prompt_tokens = make(Counter, "prompt_tokens", "Estimated tokens of prompts.")
        self._known_tokens = make(
            Counter, "prompt_tokens_known", "Of these, those that the chosen P (or D alone) had seen before."
        )
        self._registry.register(_Gauges(core))
        # Looked up once; labels() costs more than what it finds.
        self._children: dict[tuple, object] = {}

    def request(self, route: str, outcome: str, seconds: float, first: float | None) -> None:
        """One request is over. ``first``: seconds to its first byte, if it had any."""
        self._child(self._requests, route, outcome).inc()
        self._child(self._request_seconds, route).observe(seconds)
        if first is not None:
            self._child(self._first_seconds, route).observe(first)

    def prefilled(self, seconds: float) -> None:
        self._prefill_seconds.observe(seconds)

    def waited(self, role: str, seconds: float) -> None:
        self._child(self._queue_seconds, role).observe(seconds)

    def retried(self, role: str) -> None:
        self._child(self._retries, role).inc()

    def event(self, name: str) -> None:
        self._child(self._events, name).inc()

    def prompt(self, tokens: int, known: int) -> None:
        self._prompt_tokens.inc(tokens)
        self._known_tokens.inc(known)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def _child(self, metric, *labels: str):
        key = (metric, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child


class _Gauges:
    """What is so now; a collector that prometheus_client asks."""

    def __init__(self, core: ProxyCore):
        self._core = core

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield self._of_engines("engine_up", "1: used; 0: set aside.", lambda engine: engine.well)
        yield self._of_engines("engine_in_flight", "Requests under way.", lambda engine: engine.outstanding)
        yield self._of_engines("engine_tokens", "Prompt tokens yet to be computed.", lambda engine: engine.tokens)
        yield self._of_engines("engine_weight", "0: drained.", lambda engine: engine.weight if engine.open else 0)
        queue = GaugeMetricFamily(_PREFIX + "queue", "Requests that wait for a place.", labels=("role",))
        for role in ("prefill", "decode"):
            queue.add_metric((role,), self._core.admission.waiting(role))
        yield queue
        yield self._one("conversations", "Conversations whose engines are known.", len(self._core.routes))
        yield self._one("prefixes", "Prefixes whose engines are known.", len(self._core.prefixes))
        yield self._one("ready", "1: answers 200 to /ready.", self._core.ready)

    def _of_engines(self, name: str, text: str, value: Callable) -> Metric:
        family = GaugeMetricFamily(_PREFIX + name, text, labels=("role", "engine"))
        engines = {(engine.role, engine.url): engine for engine in (*self._core.fleet.leaving(), *self._core.fleet)}
        for labels, engine in engines.items():
            family.add_metric(labels, value(engine))
        return family

    def _one(self, name: str, text: str, value: float) -> Metric:
        return GaugeMetricFamily(_PREFIX + name, text, value=value)
