"""What the store counts, for Prometheus: text over HTTP, on threads of its own.

A scrape asks the reactor for everything at once, so that its numbers belong together, and waits for it ``SECONDS`` at
most; then it says ``kvtier_store_responding 0`` and nothing else. Who scrapes slowly, or never reads, costs a thread
here, of a few, and the store nothing. The numbers are those of ``kvtier stats --json``; names and types are below.
"""

import selectors
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple
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
from vllm_kvtier.store.lower.durations import Durations
from vllm_kvtier.store.messages import PAGE, Counts
from vllm_kvtier.wire.reactor import Reactor

logger = get_logger(__name__)

SECONDS = 2.0  # for the reactor's answer
SILENT_SECONDS = 10.0  # in which a scraper neither sends nor takes anything: its connection ends
PAUSE_SECONDS = 1.0  # where nobody can be let in
MOST_SCRAPERS = 8  # at a time; whoever comes then is hung up on
PREFIX = "kvtier_store_"
STATES = ("opening", "ready", "read only", "set aside", "stopped")


class Shown(NamedTuple):
    """How a number of the statistics is shown. ``name``: behind PREFIX. ``labels``: its own, beside the tier's."""

    name: str
    meaning: str
    counter: bool = True
    labels: Mapping[str, str] = {}
    factor: int = 1


def _gauge(name: str, meaning: str, factor: int = 1) -> Shown:
    return Shown(name, meaning, counter=False, factor=factor)


def _refused(reason: str) -> Shown:
    return Shown("refused_slots", "Slots that were asked for and not given, and why.", labels={"reason": reason})


def _dropped(cause: str) -> Shown:
    meaning = "Blocks that were to be written to the tier and were not."
    return Shown("tier_dropped_blocks", meaning, labels={"cause": cause})


STORE = {
    "seconds": _gauge("uptime_seconds", "Since the store began."),
    "asked_bytes": _gauge("asked_bytes", "Memory that the store was asked to take."),
    "pool_bytes": _gauge("pool_bytes", "Memory that it has, or is going to have."),
    "ready_bytes": _gauge("ready_bytes", "Memory that is usable by now."),
}
INDEX = {
    "used_pages": _gauge("used_bytes", "Memory of slots that hold or await a block.", PAGE),
    "entries": _gauge("blocks", "Blocks in memory that can be loaded."),
    "leases": _gauge("leases", "Leases on blocks."),
    "leased_entries": _gauge("leased_blocks", "Blocks under a lease."),
    "reservations": _gauge("writing_slots", "Slots that somebody is writing."),
    "pinned_entries": _gauge("pinned_blocks", "Blocks that are never evicted."),
    "pinned_pages": _gauge("pinned_bytes", "Memory of blocks that are never evicted.", PAGE),
    "spaces": _gauge("spaces", "Kinds of blocks that are not interchangeable: models, layouts."),
    "tenants": _gauge("tenants", "Tenants that have blocks in memory."),
    "lookups": Shown("lookups", "Questions what is in memory of a chain."),
    "looked_up_units": Shown("looked_up_units", "Units (blocks of prompts) that were asked for."),
    "found_units": Shown("found_units", "Units that were found in memory."),
    "reserved_slots": Shown("reserved_slots", "Slots given to be written."),
    "refused_exists": _refused("exists"),
    "refused_room": _refused("room"),
    "refused_parent": _refused("parent"),
    "commits": Shown("stored_blocks", "Blocks that were written to memory."),
    "aborts": Shown("aborted_slots", "Slots that were given and not written."),
    "evictions": Shown("evicted_blocks", "Blocks that made room for others."),
    "discards": Shown("integrity_failures", "Blocks whose checksum was wrong when they were loaded."),
    "expired_leases": Shown("expired_leases", "Leases that ended by their deadline."),
    "expired_reservations": Shown("expired_reservations", "Slots that were not written before their deadline."),
}
DIRECTORY = {
    "holders": _gauge("directory_holders", "Engines that let others fetch from their caches."),
    "keys": _gauge("directory_keys", "Blocks that they have there."),
}
TIER = {
    "capacity_bytes": _gauge("tier_capacity_bytes", "Most that the tier may hold; 0: no limit of ours."),
    "used_bytes": _gauge("tier_used_bytes", "What it holds."),
    "blocks": _gauge("tier_blocks", "Blocks that it is known to have."),
    "finds": Shown("tier_finds", "Questions what it has of a chain."),
    "found_blocks": Shown("tier_found_blocks", "Blocks that it was found to have."),
    "read_blocks": Shown("tier_read_blocks", "Blocks brought up into memory."),
    "read_bytes": Shown("tier_read_bytes", "Bytes brought up into memory."),
    "read_seconds": Shown("tier_read_busy_seconds", "Time with at least one read under way."),
    "read_failures": Shown("tier_read_failed_blocks", "Blocks that could not be read."),
    "written_blocks": Shown("tier_written_blocks", "Blocks written to it."),
    "written_bytes": Shown("tier_written_bytes", "Bytes written to it, which is what wears a disk."),
    "write_seconds": Shown("tier_write_busy_seconds", "Time with at least one write under way."),
    "write_failures": Shown("tier_write_failed_blocks", "Blocks that could not be written."),
    "evicted_blocks": Shown("tier_evicted_blocks", "Blocks that made room for others there."),
    "discarded_blocks": Shown("tier_discarded_blocks", "Blocks that were wrong, or could not be read, and went."),
    "timeouts": Shown("tier_timeouts", "Requests that its process did not answer in time."),
    "restarts": Shown("tier_restarts", "How often its process was started again."),
}
EXTRA = {
    "queued_blocks": _gauge("tier_queued_blocks", "Blocks that wait to be written to it."),
    "queued_bytes": _gauge("tier_queued_bytes", "Bytes that wait to be written to it."),
    "admitted": Shown("tier_admitted_blocks", "Blocks that were to be written to it."),
    "written": Shown("tier_kept_blocks", "Of those, what it has by now, also where it had it already."),
    "failed": Shown("tier_failed_blocks", "Of those, what it did not keep."),
    "dropped_full": _dropped("queue full"),
    "dropped_evicted": _dropped("left memory"),
    "dropped_parent": _dropped("no parent queued"),
    "refused_room": _dropped("no room"),
    "refused_parent": _dropped("no parent"),
    "refused_space": _dropped("unknown space"),
    "lent_blocks": Shown("tier_lent_blocks", "Blocks of this memory that other nodes were lent."),
    "lent_leases": Shown("tier_lent_leases", "How often they were lent some."),
    "lent_brought_up": Shown("tier_lent_brought_up", "How often that was brought up from this node's disk or objects."),
    "leases_out": _gauge("tier_leases_out", "Leases that other nodes have not returned."),
}


TIER_SECONDS = Shown(
    "tier_request_seconds", "From asking a tier's process to its answer: reads and writes of up to 32 MiB, and finds."
)
HANDLING = Shown("message_seconds", "What the store's one thread needed for a message of an engine or a tool.")
CLIENTS = _gauge("clients", "Who is connected.")
TIER_UP = _gauge("tier_up", "1: the tier can be asked.")
TIER_STATE = _gauge("tier_state", "1: the state that it is in.")
RESPONDING = _gauge("responding", f"1: it answered within {SECONDS:g} s; 0: it did not, and nothing else is known.")
INFO = _gauge("info", "Which store this is.")


class State(NamedTuple):
    """All of one moment. ``durations``: of requests to tiers' processes, by tier and kind (read, write, find).
    ``handling``: of messages from engines and tools, by their name."""

    counts: Counts
    durations: Mapping[tuple[str, str], Durations]
    handling: Mapping[str, Durations] = {}


class StoreCollector(Collector):
    """``read``: called on the reactor's thread."""

    def __init__(self, reactor: Reactor, read: Callable[[], State], seconds: float = SECONDS):
        self._reactor, self._read, self._seconds = reactor, read, seconds

    def describe(self) -> list[Metric]:
        """Nothing: to be registered, it need not ask a reactor that does not run yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        state = self._ask()
        yield GaugeMetricFamily(PREFIX + RESPONDING.name, RESPONDING.meaning, value=float(state is not None))
        if state is not None:
            yield from metrics_of(state)

    def _ask(self) -> State | None:
        done, answer, wanted = threading.Event(), [], [True]

        def look() -> None:
            try:
                if wanted:
                    answer.append(self._read())
            finally:
                done.set()

        self._reactor.call_soon(look)
        if not done.wait(self._seconds):
            wanted.clear()  # nobody waits for it when the reactor gets there
        return answer[0] if answer else None


def metrics_of(state: State) -> list[Metric]:
    numbers = msgspec.to_builtins(state.counts)
    families: dict[str, Metric] = {}
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


def _add_tier(families: dict[str, Metric], tier: Mapping) -> None:
    labels = {"tier": tier["name"]}
    usable = tier["state"] in ("ready", "read only")
    _add(families, TIER_UP, float(usable), labels)
    for state in STATES:
        _add(families, TIER_STATE, float(tier["state"] == state), {**labels, "state": state})
    for key, shown in TIER.items():
        _add(families, shown, tier[key], labels)
    for key, value in tier["extra"].items():
        _add(families, EXTRA.get(key), value, labels, key)


def _add(families: dict[str, Metric], shown: Shown | None, value: float, labels: Mapping[str, str], key="") -> None:
    if shown is None:  # of a tier that is younger than the tables above: shown, without a claim to what it is
        shown, make = Shown(f"tier_{key}", f"What the tier counts as {key}."), UnknownMetricFamily
    else:
        make = CounterMetricFamily if shown.counter else GaugeMetricFamily
    labels = {**labels, **shown.labels}
    if shown.name not in families:
        families[shown.name] = make(PREFIX + shown.name, shown.meaning, labels=list(labels))
    families[shown.name].add_metric(list(labels.values()), value * shown.factor)


def _add_durations(families: dict[str, Metric], shown: Shown, labels: Mapping[str, str], durations: Durations) -> None:
    if shown.name not in families:
        families[shown.name] = HistogramMetricFamily(PREFIX + shown.name, shown.meaning, labels=list(labels))
    buckets, total = [], 0
    for bound, count in zip([*map(str, durations.bounds), "+Inf"], durations.counts, strict=True):
        total += count
        buckets.append((bound, total))
    families[shown.name].add_metric(list(labels.values()), buckets, durations.seconds)


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
        """Idempotent. Whoever is being answered just now still is."""
        self._end.close()
        self._thread.join()

    def _run(self) -> None:
        """Not ``serve_forever``, which wakes up twice a second."""
        with selectors.DefaultSelector() as everything, selectors.DefaultSelector() as end:
            everything.register(self._server, selectors.EVENT_READ)
            for selector in (everything, end):
                selector.register(self._ended, selectors.EVENT_READ)
            while all(key.fileobj is not self._ended for key, _ in everything.select()):
                self._server.handle_request()
                if self._server.full:  # of this process's descriptors, perhaps: who wants to come in has to wait
                    end.select(PAUSE_SECONDS)
        self._server.server_close()
        self._ended.close()


def serve(host: str, port: int, reactor: Reactor, read: Callable[[], State]) -> MetricsServer | None:
    """None, with a line in the log, where that address cannot be had: the store does without."""
    try:
        server = MetricsServer(StoreCollector(reactor, read), host, port)
    except OSError as error:
        logger.warning(
            "kvtier: no metrics: the store cannot listen at %s port %d (%s); give it another --metrics-port "
            "(store_metrics_port), or end who has it",
            host,
            port,
            error.strerror or error,
        )
        return None
    logger.info("kvtier: metrics at http://%s:%d/metrics", f"[{host}]" if ":" in host else host, server.port)
    return server


class _Handler(WSGIRequestHandler):
    timeout = SILENT_SECONDS

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("kvtier: metrics: " + format, *args)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """``full``: the last one who came could not be let in."""

    daemon_threads = True
    block_on_close = False
    timeout = 0  # of ``handle_request``, which is called when somebody is there

    def __init__(self, address: tuple[str, int], handler: type[_Handler]):
        self.address_family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        self._places = threading.BoundedSemaphore(MOST_SCRAPERS)
        self.full = False
        super().__init__(address, handler)
        self.socket.setblocking(False)

    def server_bind(self) -> None:
        """Without asking anybody for our name, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, object]:
        self.full = True
        accepted = super().get_request()
        self.full = False
        return accepted

    def process_request(self, request, client_address) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request, client_address) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request, client_address) -> None:
        """Of one who hung up, mostly."""
        logger.debug("kvtier: a scrape from %s failed", client_address, exc_info=True)
