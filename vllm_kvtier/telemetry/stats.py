"""What an engine counts, by name and label; drained into vLLM's stats once a step. No vLLM import here.

Three sorts: counters only grow; observations are single measurements, of which Prometheus makes histograms; gauges are
what is so now. ``docs/metrics.md`` is made of the tables below.
"""

import threading
from collections import Counter

# Everything that can be counted, with the meaning of its label ``kind`` (documentation of the metrics).
MEANINGS = {
    "hits": "requests whose prompt was found, if only its beginning, by who brought what vLLM lacked, or own cache",
    "misses": "requests of whose prompt nothing was found anywhere, by the reason that the last source asked gave",
    "prompt_tokens": "prompt tokens by where their KV came from, each request counted once",
    "declined": "requests or sources not pulled from, by reason",
    "pulls": "pulls that ended, by outcome",
    "pulled_tokens": "prompt tokens pulled instead of computed, by source kind",
    "pulled_bytes": "bytes read from other engines, all ranks, by the codec that they came in",
    "integrity_failures": "blocks whose checksum was wrong on arrival, by source; computed instead. Of the store: bits "
    "changed; from other engines also what was read before it was summed, or after it was reused",
    "fetches": "copies from GPU caches of other engines of this node that ended, by outcome",
    "fetched_tokens": "prompt tokens copied from GPU caches of other engines of this node instead of computed",
    "fetched_bytes": "bytes copied from GPU caches of other engines of this node, all ranks; caches as they are",
    "not_fetched": "times that an engine of this node had what a request lacked and was not asked, by reason",
    "lent_blocks": "blocks of this engine's cache that others of this node were lent",
    "lending_refused": "times that another engine of this node asked for blocks and was lent none, by reason",
    "loads": "loads from the node store that ended, by outcome",
    "synchronous_loads": "loads and fetches that the step which computes on them waited for, by outcome",
    "loaded_tokens": "prompt tokens loaded from the node store instead of computed",
    "loaded_bytes": "bytes loaded from the node store, all ranks, by the codec that they were kept in",
    "loaded_logical_bytes": "bytes of KV that loads from the node store became, all ranks",
    "planned": "offers of the node store and of GPU caches weighed against computing, by the reason of the decision",
    "planned_seconds": "seconds that loads were expected to take, and took",
    "weighed_seconds": "seconds that loading and computing were expected to take, over all such decisions",
    "warmed": "queued requests whose KV the node store was asked to have ready",
    "waits": "times a request waited, or did not, for what the node store brings up from below its memory, by reason",
    "waited_tokens": "prompt tokens that were in the node store's memory after such a wait, and not before",
    "awaited": "requests that waited for another one's load of the same blocks, by source",
    "stored_blocks": "blocks copied to the node store",
    "stored_bytes": "bytes copied to the node store, all ranks, by the codec that keeps them",
    "stored_logical_bytes": "bytes of KV copied to the node store, before encoding, all ranks, by the codec",
    "store_seconds": "seconds in which the workers had copies to the node store under way",
    "not_stored": "full blocks not copied to the node store, by reason, and not offered again",
    "store_lost": "times the node store went away",
    "exports": "finished requests offered to others, by kind",
    "export_refused": "finished requests not offered, by reason",
    "internal_errors": "exceptions in this package's code on vLLM's threads, by place; their traceback is in the log",
}

# Seconds, with room for a load of a few blocks from GPU memory and for a pull that runs into its deadline.
SECONDS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
# Of what was expected: half as long, as long, twice as long.
RATIOS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)

HISTOGRAMS = {
    "ask_seconds": ("from asking a source for what it has of a prompt until its answer was read, by source", SECONDS),
    "load_seconds": ("loads from the node store, from order to verified, of the slowest rank, by outcome", SECONDS),
    "fetch_seconds": (
        "copies from GPU caches of this node's engines, from order to verified, of the slowest rank",
        SECONDS,
    ),
    "pull_seconds": ("pulls from other engines, from order to verified, of the slowest rank, by outcome", SECONDS),
    "host_hit_seconds": (
        "time of a hit in the node store, by stage; placing: until vLLM finds room",
        SECONDS,
    ),
    "gpu_hit_seconds": ("time of a hit in another engine's GPU cache, by stage", SECONDS),
    "waited_seconds": ("waits of requests for what the node store brings up from below its memory", SECONDS),
    "planned_ratio": ("what loads took over what the planner expected, by source; 1 is right", RATIOS),
}

# As of the last step of the engine; an engine without requests makes none.
GAUGES = {
    "requests": "requests, by what they wait for",
    "loading_bytes": "bytes of one rank that are ordered and have not arrived, by source",
    "storing_blocks": "blocks of the cache held until they are copied to the node store, or are found there",
    "exported_blocks": "blocks of the cache held for others, by kind",
    "leases": "leases on blocks of GPU caches between engines, by direction",
    "store_up": "1: the node store answers and its memory can be reached",
    "store_usable_bytes": "memory of the node store that this engine's copies can reach by now; it grows after a start",
    "planner_bandwidth": "bytes/s that the planner goes by, one rank, by source",
    "planner_error": "mean of |ln(taken / expected)| lately (0.1: 10 % off), by what was expected",
}

_OUTCOMES = ("ok", "failed")
_PEERS = ("handoff", "retained")
_STAGES = ("asking", "placing", "loading")
# The labels that there are, where they are few and fixed; nothing here: no label, or one of many reasons or codecs.
KINDS: dict[str, tuple[str, ...]] = {
    "hits": ("own cache", "host", "gpu", *_PEERS),
    "prompt_tokens": ("computed", "own cache", "host", "below memory", "gpu", *_PEERS),
    "pulls": _OUTCOMES,
    "pulled_tokens": _PEERS,
    "fetches": _OUTCOMES,
    "fetched_bytes": ("raw",),
    "loads": (*_OUTCOMES, "aborted"),
    "integrity_failures": ("host", "gpu", "engine"),
    "synchronous_loads": (*_OUTCOMES, "aborted"),
    "loaded_tokens": ("host",),
    "planned_seconds": ("expected", "taken"),
    "weighed_seconds": ("load", "compute"),
    "awaited": ("host", "gpu", *_PEERS),
    "exports": _PEERS,
    "ask_seconds": ("host", "gpu", *_PEERS),
    "load_seconds": (*_OUTCOMES, "aborted"),
    "fetch_seconds": _OUTCOMES,
    "pull_seconds": _OUTCOMES,
    "host_hit_seconds": _STAGES,
    "gpu_hit_seconds": _STAGES,
    "planned_ratio": ("host", "gpu"),
    "requests": ("asking", "offered", "loading", "computing"),
    "loading_bytes": ("host", "gpu"),
    "exported_blocks": (*_PEERS, "lent"),
    "leases": ("given", "taken"),
    "planner_bandwidth": ("host", "gpu"),
    "planner_error": ("step", "host", "gpu"),
}
# Their samples are there from the beginning, as 0: a first failure is an increase only beside a sample from before it.
BEFOREHAND = frozenset({
    "hits", "prompt_tokens", "pulls", "fetches", "loads", "planned_seconds", "weighed_seconds", "integrity_failures",
    "stored_blocks", "store_seconds", "store_lost", "lent_blocks", "warmed", "load_seconds",
    "host_hit_seconds",
})  # fmt: skip

# "name" or "name|label" -> what was counted, the observations, or the gauge's value: as vLLM ships it.
Taken = dict[str, float | list[float]]


class Counters:
    """Thread-safe; ``take`` returns what was counted since the last call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._observed: dict[tuple[str, str], list[float]] = {}
        self._gauges: dict[tuple[str, str], float] = {}

    def count(self, name: str, label: str = "", amount: float = 1) -> None:
        if name not in MEANINGS:
            raise KeyError(f"{name} is not a declared counter")
        with self._lock:
            self._counts[name, label] += amount

    def observe(self, name: str, label: str, value: float) -> None:
        """One measurement of a histogram."""
        if name not in HISTOGRAMS:
            raise KeyError(f"{name} is not a declared histogram")
        with self._lock:
            self._observed.setdefault((name, label), []).append(value)

    def show(self, name: str, label: str, value: float) -> None:
        """What a gauge says from now on."""
        if name not in GAUGES:
            raise KeyError(f"{name} is not a declared gauge")
        with self._lock:
            self._gauges[name, label] = value

    def take(self) -> Taken:
        """{"name" or "name|label": amount, list of observations, or gauge's value}, with plain keys."""
        with self._lock:
            if not (self._counts or self._observed or self._gauges):
                return {}
            counts, self._counts = self._counts, Counter()
            observed, self._observed = self._observed, {}
            gauges, self._gauges = self._gauges, {}
        taken = {**counts, **observed, **gauges}
        return {f"{name}|{label}" if label else name: value for (name, label), value in taken.items()}


def merge(into: Taken, more: Taken) -> None:
    """Add a later ``more``: amounts are summed, observations joined, and of gauges the later counts."""
    for key, value in more.items():
        if isinstance(value, list):
            into.setdefault(key, []).extend(value)
        elif key.partition("|")[0] in GAUGES:
            into[key] = value
        else:
            into[key] = into.get(key, 0) + value


def by_name(data: Taken) -> dict[str, dict[str, float | list[float]]]:
    """{"a|x": 1, "a|y": 2} -> {"a": {"x": 1, "y": 2}}."""
    out: dict[str, dict[str, float | list[float]]] = {}
    for key, value in data.items():
        name, _, label = key.partition("|")
        out.setdefault(name, {})[label] = value
    return out
