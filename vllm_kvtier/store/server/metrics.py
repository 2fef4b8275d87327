"""The store's Prometheus metrics: text over HTTP, on threads of its own.

A scrape gets all numbers from the reactor at one moment. It waits for them at most ``ANSWER_SECONDS``, and reports only
``kvtier_store_responding 0`` after that. A slow scraper occupies one of these threads and does not affect the store.
The numbers are those of ``kvtier stats --json``; names and types are below.
"""

import itertools
import selectors
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import msgspec
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    UnknownMetricFamily,
)
from prometheus_client.registry import Collector

from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.protocol import PAGE, Counts
from vllm_kvtier.store.tiers.read_time import Durations
from vllm_kvtier.wire.reactor import Reactor

logger = get_logger(__name__)

ANSWER_SECONDS = 2.0  # for the reactor's answer
SILENT_SECONDS = 10.0  # after which the connection of an idle scraper is closed
PAUSE_SECONDS = 1.0  # if no connection can be accepted
MAX_SCRAPERS = 8  # at a time; further connections are closed
PREFIX = "kvtier_store_"
STATES = ("opening", "ready", "read_only", "unavailable", "stopped")
# {new: old}. Old names work for one release, with the option ``show_hidden_metrics``.
OLD_NAMES = {
    "requested_bytes": "asked_bytes",
    "namespaces": "spaces",
    "prefix_queries": "looked_up_units",
    "prefix_hits": "found_units",
    "tier_lookups": "tier_finds",
    "tier_leased_blocks": "tier_lent_blocks",
    "tier_leases_granted": "tier_lent_leases",
    "tier_lease_promotions": "tier_lent_brought_up",
}


class Shown(NamedTuple):
    """The metric of a statistics field. ``name``: without PREFIX. ``labels``: beside the tier's."""

    name: str
    meaning: str
    counter: bool = True
    labels: Mapping[str, str] = {}
    factor: int = 1


def _gauge(name: str, meaning: str, factor: int = 1) -> Shown:
    return Shown(name, meaning, counter=False, factor=factor)


def _refused(reason: str) -> Shown:
    return Shown("refused_slots", "Slots that were requested and refused, by reason.", labels={"reason": reason})


def _dropped(cause: str) -> Shown:
    meaning = "Blocks that were queued or admitted for the tier and were not written, by cause."
    return Shown("tier_dropped_blocks", meaning, labels={"cause": cause})


def _not_promoted(reason: str) -> Shown:
    meaning = "Promotions that did not begin because of the number of others, by reason."
    return Shown("tier_refused_promotions", meaning, labels={"reason": reason})


STORE = {
    "seconds": _gauge("uptime_seconds", "Since the store's start."),
    "requested_bytes": _gauge("requested_bytes", "Memory that the store was configured with."),
    "pool_bytes": _gauge("pool_bytes", "Memory that the store has, or is allocating."),
    "ready_bytes": _gauge("ready_bytes", "Memory that is allocated so far."),
}
INDEX = {
    "used_pages": _gauge("used_bytes", "Memory of slots that hold or await a block.", PAGE),
    "entries": _gauge("blocks", "Blocks in memory that can be loaded."),
    "leases": _gauge("leases", "Leases on blocks."),
    "leased_entries": _gauge("leased_blocks", "Blocks under a lease."),
    "reservations": _gauge("writing_slots", "Slots that are being written."),
    "pinned_entries": _gauge("pinned_blocks", "Pinned blocks, which are never evicted."),
    "pinned_pages": _gauge("pinned_bytes", "Memory of pinned blocks.", PAGE),
    "namespaces": _gauge("namespaces", "Namespaces (model, layout, codec, adapter) with blocks in memory."),
    "tenants": _gauge("tenants", "Tenants that have blocks in memory."),
    "lookups": Shown("lookups", "Lookups of a prompt's prefix in memory."),
    "prefix_queries": Shown("prefix_queries", "Hash blocks of prompts that were looked up."),
    "prefix_hits": Shown("prefix_hits", "Hash blocks of prompts that were found in memory."),
    "reserved_slots": Shown("reserved_slots", "Slots reserved for writing."),
    "refused_exists": _refused("exists"),
    "refused_room": _refused("room"),
    "refused_parent": _refused("parent"),
    "commits": Shown("stored_blocks", "Blocks written to memory."),
    "aborts": Shown("aborted_slots", "Slots that were reserved and not written."),
    "evictions": Shown("evicted_blocks", "Blocks evicted to make space."),
    "discards": Shown("integrity_failures", "Blocks with a wrong checksum when they were loaded."),
    "expired_leases": Shown("expired_leases", "Leases that ended by their deadline."),
    "expired_reservations": Shown("expired_reservations", "Slots that were not written before their deadline."),
}
DIRECTORY = {
    "holders": _gauge("directory_holders", "Engines that publish their GPU cache's blocks to peers."),
    "keys": _gauge("directory_keys", "Blocks that they publish."),
}
TIER = {
    "capacity_bytes": _gauge("tier_capacity_bytes", "Maximum size of the tier; 0: no limit set."),
    "used_bytes": _gauge("tier_used_bytes", "Bytes in the tier."),
    "blocks": _gauge("tier_blocks", "Blocks that the tier is known to have."),
    "lookups": Shown("tier_lookups", "Lookups of a prompt's prefix in the tier."),
    "found_blocks": Shown("tier_found_blocks", "Blocks found by these lookups."),
    "failed_lookups": Shown(
        "tier_failed_lookups", "Lookups with a failed request, or without one because the tier limits their rate."
    ),
    "read_blocks": Shown("tier_read_blocks", "Blocks promoted to memory."),
    "read_bytes": Shown("tier_read_bytes", "Bytes promoted to memory."),
    "read_seconds": Shown("tier_read_busy_seconds", "Time with at least one read in progress."),
    "read_failures": Shown("tier_read_failed_blocks", "Blocks that could not be read."),
    "written_blocks": Shown("tier_written_blocks", "Blocks written to the tier."),
    "written_bytes": Shown("tier_written_bytes", "Bytes written to the tier; they wear a disk."),
    "write_seconds": Shown("tier_write_busy_seconds", "Time with at least one write in progress."),
    "write_failures": Shown("tier_write_failed_blocks", "Blocks that could not be written."),
    "evicted_blocks": Shown("tier_evicted_blocks", "Blocks evicted from the tier to make space."),
    "discarded_blocks": Shown("tier_discarded_blocks", "Blocks discarded because they were corrupt or unreadable."),
    "timeouts": Shown("tier_timeouts", "Requests that the tier process did not answer in time."),
    "restarts": Shown("tier_restarts", "Restarts of the tier process."),
}
EXTRA = {
    "queued_blocks": _gauge("tier_queued_blocks", "Blocks queued for demotion to the tier."),
    "queued_bytes": _gauge("tier_queued_bytes", "Bytes queued for demotion to the tier."),
    "admitted": Shown("tier_admitted_blocks", "Blocks admitted for demotion to the tier."),
    "written": Shown("tier_kept_blocks", "Admitted blocks that the tier has now, including those it already had."),
    "failed": Shown("tier_failed_blocks", "Admitted blocks that the tier did not keep."),
    "dropped_full": _dropped("queue_full"),
    "dropped_evicted": _dropped("evicted_first"),
    "dropped_parent": _dropped("parent_not_queued"),
    "refused_room": _dropped("tier_full"),
    "refused_parent": _dropped("parent_missing"),
    "refused_namespace": _dropped("unknown_namespace"),
    "refused_jobs": _not_promoted("jobs"),
    "refused_finds": _not_promoted("lookups"),
    "refused_dropped": _not_promoted("dropped"),
    "leased_blocks": Shown("tier_leased_blocks", "Blocks of this memory leased to other nodes."),
    "leases_granted": Shown("tier_leases_granted", "Leases granted to other nodes."),
    "lease_promotions": Shown("tier_lease_promotions", "Leases that needed a promotion from this node's tiers."),
    "replicated_blocks": Shown("tier_replicated_blocks", "Blocks used often, for which another copy was requested."),
    "avoided_places": _gauge("tier_avoided_places", "Nodes that are not read from for some seconds after a failure."),
    "segment_up": _gauge("tier_segment_up", "1: this node's memory is part of the cluster."),
    "segment_restarts": Shown(
        "tier_segment_restarts", "Restarts of the process with this node's memory of the cluster: its blocks were lost."
    ),
    "leases_out": _gauge("tier_leases_out", "Leases that other nodes hold."),
}


TIER_SECONDS = Shown(
    "tier_request_seconds", "From a request to a tier process to its answer: reads and writes of up to 32 MiB, lookups."
)
HANDLING = Shown("message_seconds", "Time of the store's thread for one message of an engine or a tool.")
CLIENTS = _gauge("clients", "Connected clients.")
TIER_UP = _gauge("tier_up", "1: the tier answers lookups.")
TIER_STATE = _gauge("tier_state", "1: the tier's current state.")
RESPONDING = _gauge(
    "responding", f"1: the store answered within {ANSWER_SECONDS:g} s; 0: not, and no other metric follows."
)
INFO = _gauge("info", "Identity of the store.")


class State(NamedTuple):
    """A snapshot. ``durations``: of requests to tier processes, by tier and kind (read, write, find). ``handling``: of
    messages from engines and tools, by name."""

    counts: Counts
    durations: Mapping[tuple[str, str], Durations]
    handling: Mapping[str, Durations] = {}


class StoreCollector(Collector):
    """Calls ``read`` on the reactor's thread. ``old_names``: export renamed metrics under both names."""

    def __init__(
        self, reactor: Reactor, read: Callable[[], State], seconds: float = ANSWER_SECONDS, old_names: bool = False
    ):
        self._reactor, self._read, self._seconds, self._old_names = reactor, read, seconds, old_names

    def describe(self) -> list[Metric]:
        """Empty, because the registration comes before the reactor's start."""
        return []

    def collect(self) -> Iterator[Metric]:
        state = self._ask()
        yield GaugeMetricFamily(PREFIX + RESPONDING.name, RESPONDING.meaning, value=float(state is not None))
        if state is not None:
            found = metrics_of(state)
            yield from found
            if self._old_names:
                yield from _under_old_names(found)

    def _ask(self) -> State | None:
        done, answer, wanted = threading.Event(), list[State](), [True]

        def look() -> None:
            try:
                if wanted:
                    answer.append(self._read())
            finally:
                done.set()

        self._reactor.call_soon(look)
        if not done.wait(self._seconds):
            wanted.clear()  # the scrape has ended when the reactor gets there
        return answer[0] if answer else None


Family = CounterMetricFamily | GaugeMetricFamily | UnknownMetricFamily
Families = dict[str, Metric]


def metrics_of(state: State) -> list[Metric]:
    numbers = msgspec.to_builtins(state.counts)
    families: Families = {}
    info = {name: str(numbers[name]) for name in ("version", "instance", "policy", "pid", "huge_pages")}
    families["info"] = InfoMetricFamily(PREFIX.rstrip("_"), INFO.meaning, value=info)
    for table, values in ((STORE, numbers), (INDEX, numbers["index"]), (DIRECTORY, numbers["directory"])):
        for key, shown in table.items():
            _add(families, shown, values[key], {})
    kinds = [client["kind"] for client in numbers["clients"]]
    for kind in ("engine", "worker", "tool"):
        _add(families, CLIENTS, kinds.count(kind), {"kind": kind})
    for tier in numbers["tiers"]:
        _add_tier(families, tier)
    for (tier, kind), durations in state.durations.items():
        _add_durations(families, TIER_SECONDS, {"tier": tier, "kind": kind}, durations)
    for message, durations in state.handling.items():
        _add_durations(families, HANDLING, {"message": message}, durations)
    return list(families.values())


def _under_old_names(found: list[Metric]) -> Iterator[Metric]:
    by_name = {family.name: family for family in found}
    for new, old in OLD_NAMES.items():
        if (family := by_name.get(PREFIX + new)) is not None:
            copy = Metric(PREFIX + old, f"Deprecated, renamed to {family.name}. {family.documentation}", family.type)
            copy.samples = [each._replace(name=each.name.replace(new, old, 1)) for each in family.samples]
            yield copy


def _add_tier(families: Families, tier: Mapping[str, Any]) -> None:
    labels = {"tier": tier["name"]}
    _add(families, TIER_UP, float(tier["state"] in ("ready", "read_only")), labels)
    for state in STATES:
        _add(families, TIER_STATE, float(tier["state"] == state), {**labels, "state": state})
    for key, shown in TIER.items():
        _add(families, shown, tier[key], labels)
    for key, value in tier["extra"].items():
        _add(families, EXTRA.get(key), value, labels, key)


def _add(
    families: Families, shown: Shown | None, value: float, labels: Mapping[str, str], key: str = ""
) -> None:
    make: type[Family] = UnknownMetricFamily
    if shown is None:  # a count of a tier that the tables above do not have
        shown = Shown(f"tier_{key}", f"What the tier counts as {key}.")
    else:
        make = CounterMetricFamily if shown.counter else GaugeMetricFamily
    labels = {**labels, **shown.labels}
    family = families.setdefault(shown.name, make(PREFIX + shown.name, shown.meaning, labels=list(labels)))
    assert isinstance(family, Family)
    family.add_metric(list(labels.values()), value * shown.factor)


def _add_durations(families: Families, shown: Shown, labels: Mapping[str, str], durations: Durations) -> None:
    family = families.setdefault(
        shown.name, HistogramMetricFamily(PREFIX + shown.name, shown.meaning, labels=list(labels))
    )
    assert isinstance(family, HistogramMetricFamily)
    buckets = list(zip([*map(str, durations.bounds), "+Inf"], itertools.accumulate(durations.counts), strict=True))
    family.add_metric(list(labels.values()), buckets, durations.seconds)


# -- over HTTP --------------------------------------------------------------------------------------------------------


class MetricsServer:
    """Answers GET at ``host``:``port`` from now until ``close``. Raises OSError if it cannot listen there."""

    def __init__(self, collector: Collector, host: str, port: int):
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        self._server = _Server((host, port), _Handler)
        self._server.set_app(make_wsgi_app(registry))
        self.port = self._server.server_port
        self._end, self._ended = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="kvtier-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent. Scrapes in progress are still answered."""
        self._end.close()
        self._thread.join()

    def _run(self) -> None:
        """Serve without ``serve_forever``, which wakes up twice a second."""
        with selectors.DefaultSelector() as everything, selectors.DefaultSelector() as end:
            everything.register(self._server, selectors.EVENT_READ)
            for selector in (everything, end):
                selector.register(self._ended, selectors.EVENT_READ)
            while all(key.fileobj is not self._ended for key, _ in everything.select()):
                self._server.handle_request()
                if self._server.full:  # out of descriptors, perhaps: connections wait in the queue
                    end.select(PAUSE_SECONDS)
        self._server.server_close()
        self._ended.close()


def serve(
    host: str, port: int, reactor: Reactor, read: Callable[[], State], old_names: bool = False
) -> MetricsServer | None:
    """Serve metrics. None, with a warning, if the address is in use: the store works without."""
    try:
        server = MetricsServer(StoreCollector(reactor, read, old_names=old_names), host, port)
    except OSError as error:
        logger.warning(
            "kvtier: store: no metrics: cannot listen at %s port %d (%s); set another --metrics-port "
            "(store_metrics_port)",
            host,
            port,
            error.strerror or error,
        )
        return None
    logger.info("kvtier: store: metrics at http://%s:%d/metrics", f"[{host}]" if ":" in host else host, server.port)
    return server


class _Handler(WSGIRequestHandler):
    timeout = SILENT_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("kvtier: store: metrics: %s", format % args)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """``full``: the last connection could not be accepted."""

    daemon_threads = True
    block_on_close = False
    timeout = 0  # of ``handle_request``, which is called when a connection waits

    def __init__(self, address: tuple[str, int], handler: type[_Handler]):
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self._slots = threading.BoundedSemaphore(MAX_SCRAPERS)
        self.full = False
        super().__init__(address, handler)
        self.socket.setblocking(False)

    def server_bind(self) -> None:
        """Bind without resolving this host's name, which may take long."""
        socketserver.TCPServer.server_bind(self)
        host, port = self.server_address[:2]
        self.server_name, self.server_port = str(host), port
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, object]:
        self.full = True
        accepted = super().get_request()
        self.full = False
        return accepted

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started now
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Mostly a scraper that disconnected."""
        logger.debug("kvtier: a scrape from %s failed", client_address, exc_info=True)
