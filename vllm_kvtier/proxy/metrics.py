"""``/metrics`` for Prometheus. Each proxy has its own registry, so that one process can run several."""

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from vllm_kvtier.proxy.config import ROLES
from vllm_kvtier.proxy.kv_events.messages import Tier
from vllm_kvtier.proxy.kv_events.subscriber import OUTCOMES

if TYPE_CHECKING:
    from vllm_kvtier.proxy.engines.fleet import Fleet
    from vllm_kvtier.proxy.kv_events.feeds import KVEvents
    from vllm_kvtier.proxy.routing.admission import Admission

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
PREFIX = "kvtier_proxy_"


class Shown(NamedTuple):
    """``sort``: prometheus_client's class; gauges are read at each scrape."""

    sort: type
    meaning: str
    labels: tuple[str, ...] = ()


SHOWN = {
    "requests": Shown(Counter, "Requests by route and outcome.", ("route", "outcome")),
    "request_seconds": Shown(Histogram, "From the end of a request's body to that of its answer.", ("route",)),
    "first_byte_seconds": Shown(
        Histogram, "From the end of a request's body to the first byte of its answer.", ("route",)
    ),
    "prefill_seconds": Shown(Histogram, "Duration of the prefill engine's answers."),
    "queue_seconds": Shown(Histogram, "Waits for a slot at an engine.", ("role",)),
    "retries": Shown(Counter, "Requests sent to another engine after a failure or a refusal.", ("role",)),
    "events": Shown(Counter, "Other events, as in /kvtier/state.", ("event",)),
    "prompt_tokens": Shown(Counter, "Estimated tokens of all prompts."),
    "prompt_tokens_known": Shown(
        Counter, "Estimated tokens that the chosen engine had seen before; its hits may be more or fewer."
    ),
    "engine_up": Shown(Gauge, "1: available; 0: unavailable.", ("role", "engine")),
    "engine_in_flight": Shown(Gauge, "Requests in flight.", ("role", "engine")),
    "engine_tokens": Shown(Gauge, "Prompt tokens still to be computed.", ("role", "engine")),
    "engine_weight": Shown(Gauge, "Its weight; 0: drained.", ("role", "engine")),
    "queue": Shown(Gauge, "Requests that wait for a slot.", ("role",)),
    "conversations": Shown(Gauge, "Conversations whose engines are kept."),
    "prefixes": Shown(Gauge, "Prefixes whose engines are kept."),
    "kv_blocks": Shown(Gauge, "Blocks of engines by their KV events, with policy kv_events.", ("events", "tier")),
    "kv_blocks_dropped": Shown(
        Counter,
        "Blocks left out of a full index of KV events, or dropped from it for newer ones: raise max_blocks.",
        ("events",),
    ),
    "kv_event_batches": Shown(
        Counter, "Batches of KV events by outcome, with policy kv_events; restarts of engines.", ("events", "outcome")
    ),
    "buffered_bytes": Shown(
        Gauge, "Bytes of request bodies, and of answers, that count towards max_buffered_bytes.", ("kind",)
    ),
    "ready": Shown(Gauge, "1: answers 200 to /ready."),
}


class Metrics:
    """Counters, histograms and ``gauges``, which are read at each scrape."""

    def __init__(self, gauges: "Gauges"):
        self._registry = CollectorRegistry()

        def make(name: str):
            sort, meaning, labels = SHOWN[name]
            more = {"buckets": _SECONDS} if sort is Histogram else {}
            return sort(PREFIX + name, meaning, labels, registry=self._registry, **more)

        self._requests, self._request_seconds = make("requests"), make("request_seconds")
        self._first_seconds, self._prefill_seconds = make("first_byte_seconds"), make("prefill_seconds")
        self._queue_seconds, self._retries, self._events = make("queue_seconds"), make("retries"), make("events")
        self._prompt_tokens, self._known_tokens = make("prompt_tokens"), make("prompt_tokens_known")
        self._registry.register(gauges)
        # Looked up once; labels() costs more than what it finds.
        self._children: dict[tuple, object] = {}
        for role in ROLES[:2]:  # rate() sees the first retry only beside an earlier sample
            self._child(self._retries, role)
            self._child(self._queue_seconds, role)

    def request(self, route: str, outcome: str, seconds: float, first: float | None) -> None:
        """Count an ended request. ``first``: seconds to its first byte, if there was one."""
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


class Gauges:
    """A collector of prometheus_client: the state of the engines, queues and tables at the time of a scrape."""

    def __init__(
        self,
        fleet: "Fleet",
        admission: "Admission",
        tables: Mapping[str, Sized],
        events: "KVEvents",
        buffered: Callable[[], dict[str, int]],
        ready: Callable[[], bool],
    ):
        """``tables``: by the name of the gauge of their lengths. ``buffered``: bytes by kind."""
        self._fleet, self._admission, self._tables = fleet, admission, tables
        self._events, self._buffered, self._ready = events, buffered, ready

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield self._of_engines("engine_up", lambda engine: engine.healthy)
        yield self._of_engines("engine_in_flight", lambda engine: engine.outstanding)
        yield self._of_engines("engine_tokens", lambda engine: engine.tokens)
        yield self._of_engines("engine_weight", lambda engine: engine.weight if engine.open else 0)
        queue = self._family("queue")
        for role in ROLES:
            queue.add_metric((role,), self._admission.waiting(role))
        yield queue
        buffered = self._family("buffered_bytes")
        for kind, nbytes in self._buffered().items():
            buffered.add_metric((kind,), nbytes)
        yield buffered
        yield from self._of_events()
        values = {name: len(table) for name, table in self._tables.items()}
        for name, value in (values | {"ready": self._ready()}).items():
            family = self._family(name)
            family.add_metric((), value)
            yield family

    def _of_events(self) -> Iterator[Metric]:
        """Of the engines' KV events; nothing without the policy that reads them."""
        blocks = self._family("kv_blocks")
        batches, dropped = (
            CounterMetricFamily(PREFIX + name, SHOWN[name].meaning, labels=SHOWN[name].labels)
            for name in ("kv_event_batches", "kv_blocks_dropped")
        )
        for subscriber in self._events:
            dropped.add_metric((subscriber.address,), subscriber.index.dropped)
            for tier in Tier:
                blocks.add_metric((subscriber.address, tier.name.lower()), subscriber.index.counts[tier])
            for outcome in OUTCOMES:
                batches.add_metric((subscriber.address, outcome), subscriber.counts[outcome])
        yield blocks
        yield dropped
        yield batches

    @staticmethod
    def _family(name: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(PREFIX + name, SHOWN[name].meaning, labels=SHOWN[name].labels)

    def _of_engines(self, name: str, value: Callable) -> Metric:
        family = self._family(name)
        engines = {(engine.role, engine.url): engine for engine in (*self._fleet.leaving(), *self._fleet)}
        for labels, engine in engines.items():
            family.add_metric(labels, value(engine))
        return family
