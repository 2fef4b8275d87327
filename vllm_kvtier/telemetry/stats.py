"""What an engine counts, by name and label; drained into vLLM's stats once a step. No vLLM import here.

Counters only grow. Observations are single measurements, which Prometheus shows as histograms. A gauge is the current
value. ``docs/metrics.md`` is generated from the tables below.
"""

import threading
from collections import Counter

# Every counter, with what it counts.
MEANINGS = {
    "hits": "requests with a cached prefix, by the source of what vLLM's prefix cache lacked",
    "misses": "requests with no cached prefix in any source, by the reason of the last source that was queried",
    "prompt_tokens": "prompt tokens by the source of their KV; each request is counted once",
    "lookups_declined": "lookups, requests or sources that gave no load, by reason",
    "pulls": "ended pulls from prefill and decode engines, by outcome",
    "pulled_tokens": "prompt tokens pulled instead of computed, by source",
    "followed_tokens": "prompt tokens of pulls that follow a prefill, by when they were begun to be read: while the "
    "prefill went on, or when it had ended",
    "pulled_bytes": "bytes pulled from other engines, all ranks, by the codec of the transfer",
    "integrity_failures": "blocks with a wrong checksum on arrival, by source; the engine computes them. Of the store: "
    "changed bits; of other engines also blocks read before their checksum was made, or after their reuse",
    "fetches": "ended peer fetches (copies from GPU caches of engines of this node), by outcome",
    "fetched_tokens": "prompt tokens fetched from GPU caches of this node's engines instead of computed",
    "fetched_bytes": "bytes fetched from GPU caches of this node's engines, all ranks, in the cache's own format",
    "peer_fetches_skipped": "peers of this node that had KV a request lacked and were not queried, by reason",
    "peer_leased_blocks": "blocks of this engine's cache leased to peers of this node",
    "peer_leases_refused": "lease requests of peers of this node that this engine refused, by reason",
    "loads": "ended loads from the store, by outcome",
    "synchronous_loads": "ended loads and peer fetches for which a forward pass waited, by outcome",
    "loaded_tokens": "prompt tokens loaded from the store instead of computed, by source",
    "loaded_bytes": "bytes loaded from the store, all ranks, by the codec in which they were stored",
    "loaded_logical_bytes": "bytes of KV after decoding that loads from the store wrote, all ranks",
    "load_decisions": "decisions to load or to compute what the store or a peer's GPU has, by reason",
    "load_decision_seconds": "duration of the loads that were decided on: expected, and actual",
    "estimated_seconds": "expected duration of loading and of computing, over all such decisions",
    "promotion_prefetches": "queued requests for which the store was asked to promote their KV to memory",
    "promotion_waits": "waits of requests for a promotion, and refusals to wait, by reason",
    "promotion_wait_tokens": "prompt tokens that reached the store's memory during such a wait",
    "inflight_load_waits": "requests that waited for another request's load of the same blocks, by source",
    "stored_blocks": "blocks copied to the store",
    "stored_bytes": "bytes copied to the store, all ranks, by the codec in which they are stored",
    "stored_logical_bytes": "bytes of KV copied to the store, before encoding, all ranks, by the codec",
    "store_seconds": "time with at least one copy to the store in progress, the mean of the ranks that store",
    "stores_skipped": "full blocks that were not copied to the store and will not be offered again, by reason",
    "store_disconnects": "connections to the store that ended",
    "exports": "finished requests exported to other engines, by kind of lease",
    "export_refused": "finished requests that were not exported, by reason",
    "internal_errors": "exceptions in this package's code on vLLM's threads, by place; the log has their traceback",
}

# Seconds, with room for a load of a few blocks from GPU memory and for a pull that runs into its deadline.
SECONDS_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip
# Actual over expected: 0.5 is half as long.
RATIO_BUCKETS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)

HISTOGRAMS = {
    "lookup_seconds": ("from a lookup in a source to its answer, by source", SECONDS_BUCKETS),
    "load_seconds": ("loads from the store, from job to verified, of the slowest rank, by outcome", SECONDS_BUCKETS),
    "fetch_seconds": ("peer fetches, from job to verified, of the slowest rank, by outcome", SECONDS_BUCKETS),
    "pull_seconds": ("pulls, from job to verified, of the slowest rank, by outcome", SECONDS_BUCKETS),
    "host_hit_seconds": ("time of a hit in the store, by stage; allocate: until vLLM has free blocks", SECONDS_BUCKETS),
    "peer_hit_seconds": ("time of a hit in a peer's GPU cache, by stage", SECONDS_BUCKETS),
    "promotion_wait_seconds": ("waits of requests for a promotion to the store's memory", SECONDS_BUCKETS),
    "load_time_ratio": ("actual over expected duration of a load, by source; 1 is right", RATIO_BUCKETS),
}

# As of the engine's last step; an idle engine makes none.
GAUGES = {
    "requests": "requests, by what they wait for",
    "loading_bytes": "bytes of one rank in submitted jobs that have not arrived, by source",
    "store_inflight_blocks": "blocks of the cache that are kept until their copy to the store is done",
    "exported_blocks": "blocks of the cache that leases of other engines keep, by kind of lease",
    "leases": "leases on blocks of GPU caches: granted to other engines, and held by this engine",
    "store_up": "1: the store answers and its memory can be reached",
    "store_registered_bytes": "memory of the store that this engine's copies can reach; it grows after a start",
    "planner_bandwidth": "bytes/s that the planner expects of one rank, by source",
    "planner_error": "recent mean of |ln(actual / expected)| (0.1: 10 % off), by what was expected",
}

# Old names work for one release: with vLLM's show_hidden_metrics these series exist as well.
OLD_NAMES = {
    "lookups_declined": "declined",
    "peer_fetches_skipped": "not_fetched",
    "peer_leased_blocks": "lent_blocks",
    "peer_leases_refused": "lending_refused",
    "load_decisions": "planned",
    "load_decision_seconds": "planned_seconds",
    "estimated_seconds": "weighed_seconds",
    "promotion_prefetches": "warmed",
    "promotion_waits": "waits",
    "promotion_wait_tokens": "waited_tokens",
    "inflight_load_waits": "awaited",
    "stores_skipped": "not_stored",
    "store_disconnects": "store_lost",
    "lookup_seconds": "ask_seconds",
    "peer_hit_seconds": "gpu_hit_seconds",
    "promotion_wait_seconds": "waited_seconds",
    "load_time_ratio": "planned_ratio",
    "store_inflight_blocks": "storing_blocks",
    "store_registered_bytes": "store_usable_bytes",
}

_OUTCOMES = ("ok", "failed")
_LEASES = ("handoff", "retained")
_LOADED = ("host", "peer_gpu")
_SOURCES = (*_LOADED, *_LEASES)
_STAGES = ("lookup", "allocate", "transfer")
_DECLINED = (
    "below_threshold", "less_than_one_block", "local_cache_hit", "lookup_slower_than_compute",
    "load_slower_than_compute", "store_has_as_much", "store_unavailable", "not_in_store", "lease_held_too_long",
    "local_prefix_evicted", "timeout", "unreachable", "idle", "malformed", "refused", "layout", "namespace_mismatch",
    "peer_restarted", "peer_starting", "unknown_export", "digest_mismatch", "no_matching_blocks",
    "checksums_not_ready", "peer_busy", "prompt_too_long", "exceeds_kv_cache", "incomplete_hit",
)  # fmt: skip
# All values of the label ``kind``, in snake_case. A name that is not here has no label, or a codec or a place as label.
KINDS: dict[str, tuple[str, ...]] = {
    "hits": ("local_cache_hit", *_SOURCES),
    "misses": (
        "no_source", "scheduled_before_answer", *_DECLINED, *(f"load_failed_{source}" for source in _SOURCES),
    ),
    "prompt_tokens": ("local_compute", "local_cache_hit", "host", "secondary_tier", "peer_gpu", *_LEASES),
    "lookups_declined": _DECLINED,
    "pulls": _OUTCOMES,
    "pulled_tokens": _LEASES,
    "followed_tokens": ("while_prefilling", "after_prefill"),
    "fetches": _OUTCOMES,
    "fetched_bytes": ("raw",),
    "peer_fetches_skipped": ("below_threshold", "no_free_blocks", "compute_within_step", "store_faster"),
    "peer_leases_refused": ("too_many_blocks",),
    "loads": (*_OUTCOMES, "aborted"),
    "integrity_failures": (*_LOADED, "engine"),
    "synchronous_loads": (*_OUTCOMES, "aborted"),
    "loaded_tokens": ("host",),
    "load_decisions": (
        "faster", "not_measured", "probe", "policy_always", "slower", "queued", "compute_within_step", "empty",
    ),
    "load_decision_seconds": ("expected", "actual"),
    "estimated_seconds": ("load", "compute"),
    "promotion_waits": ("lookup", "promotion", "timeout", "load_slower_than_compute"),
    "inflight_load_waits": _SOURCES,
    "stores_skipped": (
        "already_stored", "store_full", "parent_not_stored", "copy_dropped", "store_unavailable", "blocks_needed",
        "inflight_limit", "malformed_answer", "internal_error", "state_not_kept",
    ),
    "exports": _LEASES,
    "export_refused": ("budget", "nothing_computed"),
    "lookup_seconds": _SOURCES,
    "load_seconds": (*_OUTCOMES, "aborted"),
    "fetch_seconds": _OUTCOMES,
    "pull_seconds": _OUTCOMES,
    "host_hit_seconds": _STAGES,
    "peer_hit_seconds": _STAGES,
    "load_time_ratio": _LOADED,
    "requests": ("lookup", "leased", "loading", "computing"),
    "loading_bytes": _LOADED,
    "exported_blocks": (*_LEASES, "peer_fetch", "stretch"),
    "leases": ("granted", "held"),
    "planner_bandwidth": _LOADED,
    "planner_error": ("step", *_LOADED),
}  # fmt: skip
# These series exist from the start, as 0: rate() sees the first failure only beside an earlier sample.
BEFOREHAND = frozenset({
    "hits", "prompt_tokens", "pulls", "fetches", "loads", "load_decision_seconds", "estimated_seconds",
    "integrity_failures", "stored_blocks", "store_seconds", "store_disconnects", "peer_leased_blocks",
    "promotion_prefetches", "load_seconds", "host_hit_seconds",
})  # fmt: skip

# "name" or "name|label" -> what was counted, the observations, or the gauge's value: as vLLM ships it.
Taken = dict[str, float | list[float]]


class Counters:
    """Thread-safe counts, observations and gauges since the last ``take``; ``changed``: whether there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.changed = False
        self._counts: Counter[tuple[str, str]] = Counter()
        self._observed: dict[tuple[str, str], list[float]] = {}
        self._gauges: dict[tuple[str, str], float] = {}

    def count(self, name: str, label: str = "", amount: float = 1) -> None:
        if name not in MEANINGS:
            raise KeyError(f"{name} is not a declared counter")
        with self._lock:
            self._counts[name, label] += amount
            self.changed = True

    def observe(self, name: str, label: str, value: float) -> None:
        """Add a measurement to a histogram."""
        if name not in HISTOGRAMS:
            raise KeyError(f"{name} is not a declared histogram")
        with self._lock:
            self._observed.setdefault((name, label), []).append(value)
            self.changed = True

    def show(self, name: str, label: str, value: float) -> None:
        """Set a gauge."""
        if name not in GAUGES:
            raise KeyError(f"{name} is not a declared gauge")
        with self._lock:
            self._gauges[name, label] = value
            self.changed = True

    def take(self) -> Taken:
        """Return and clear them: {"name" or "name|label": amount, list of observations, or gauge's value}."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
            observed, self._observed = self._observed, {}
            gauges, self._gauges = self._gauges, {}
            self.changed = False
        taken = {**counts, **observed, **gauges}
        return {f"{name}|{label}" if label else name: value for (name, label), value in taken.items()}


def merge(into: Taken, more: Taken) -> None:
    """Merge a later ``more``: amounts are summed, observations joined; a gauge takes the later value."""
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
