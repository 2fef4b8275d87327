"""The scheduler side's gauges: requests, queues, leases, the planner's estimates.

On vLLM's scheduler thread: once a second while requests are served, and when the last has ended.
"""

import time
from collections import Counter
from collections.abc import Callable

from vllm_kvtier.scheduler.context import LoadContext
from vllm_kvtier.scheduler.leases.exports import ExportTable
from vllm_kvtier.scheduler.matching.request_lifecycle import State
from vllm_kvtier.scheduler.matching.request_matcher import RequestMatcher
from vllm_kvtier.scheduler.offload.offloader import Offloader
from vllm_kvtier.scheduler.sources.store_source import StoreSource
from vllm_kvtier.store.protocol import PAGE
from vllm_kvtier.telemetry.stats import KINDS

REFRESH_SECONDS = 1.0  # metrics are not scraped more often

# What a request waits for, by its state; in any other state vLLM computes it.
_WAITS = {
    State.LOOKUP: "lookup",
    State.HIT: "leased",
    State.LOADING: "loading",
    State.VERIFYING: "loading",
    State.ABANDONED: "loading",
}


class Gauges:
    def __init__(
        self,
        context: LoadContext,
        matcher: RequestMatcher,
        exports: ExportTable,
        store: StoreSource | None,
        offloader: Offloader | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._counters, self._planner = context.engine.counters, context.planner
        self._matcher, self._exports = matcher, exports
        self._peers, self._store, self._offloader, self._clock = context.lease_client, store, offloader, clock
        self._looked = -REFRESH_SECONDS
        self._shown: dict[tuple[str, str], float] = {}

    def refresh(self) -> None:
        """After a step: show the values that changed."""
        now = self._clock()
        if now - self._looked < REFRESH_SECONDS and len(self._matcher):
            return
        self._looked = now
        for key, value in self._read().items():
            if self._shown.get(key) != value:
                self._shown[key] = value
                self._counters.show(*key, value)

    def _read(self) -> dict[tuple[str, str], float]:
        states = Counter(_WAITS.get(state, "computing") for state in self._matcher.states())
        counts, report = self._exports.counts(), self._planner.report()
        values: dict[tuple[str, str], float] = {("requests", kind): states[kind] for kind in KINDS["requests"]}
        values |= {("exported_blocks", kind): counts[f"{kind}_blocks"] for kind in KINDS["exported_blocks"]}
        values["leases", "granted"], values["leases", "held"] = counts["leases"], self._peers.held_leases()
        if self._offloader is not None and self._store is not None:
            values["store_inflight_blocks", ""] = self._offloader.pinned
            usable = self._store.limit() * PAGE
            values["store_up", ""], values["store_registered_bytes", ""] = float(usable > 0), float(usable)
        for source in KINDS["loading_bytes"]:
            values["loading_bytes", source] = report[f"{source}_queued_bytes"]
            values["planner_bandwidth", source] = report[f"{source}_bandwidth"]
        for what in KINDS["planner_error"]:
            values["planner_error", what] = report[f"{what}_error"]
        return values
