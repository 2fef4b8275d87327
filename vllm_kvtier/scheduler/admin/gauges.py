"""The scheduler side's gauges: requests, queues, leases, the planner's estimates.

On vLLM's scheduler thread: once a second while requests are served, and, but for the planner's estimates, when the last
has ended.
"""

import time
from collections.abc import Callable

from vllm_kvtier.scheduler.context import LoadContext
from vllm_kvtier.scheduler.leases.exports import ExportTable
from vllm_kvtier.scheduler.matching.request_lifecycle import State
from vllm_kvtier.scheduler.matching.request_matcher import RequestMatcher
from vllm_kvtier.scheduler.offload.offloader import Offloader
from vllm_kvtier.scheduler.sources.node_store import NodeStore
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
_REQUESTS = [("requests", kind) for kind in KINDS["requests"]]
_EXPORTED = {("exported_blocks", kind): f"{kind}_blocks" for kind in KINDS["exported_blocks"]}


class Gauges:
    def __init__(
        self,
        context: LoadContext,
        matcher: RequestMatcher,
        exports: ExportTable,
        store: NodeStore | None,
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
        due = now - self._looked >= REFRESH_SECONDS
        if not due and len(self._matcher):
            return
        values = self._read()
        if due:
            self._looked = now
            values |= self._estimates()
        for key, value in values.items():
            if self._shown.get(key) != value:
                self._shown[key] = value
                self._counters.show(*key, value)

    def _read(self) -> dict[tuple[str, str], float]:
        counts = self._exports.counts()
        values: dict[tuple[str, str], float] = dict.fromkeys(_REQUESTS, 0)
        for state in self._matcher.states():
            values["requests", _WAITS.get(state, "computing")] += 1
        for key, count in _EXPORTED.items():
            values[key] = counts[count]
        values["leases", "granted"], values["leases", "held"] = counts["leases"], self._peers.held_leases()
        if self._offloader is not None and self._store is not None:
            values["store_inflight_blocks", ""] = self._offloader.pinned
            usable = self._store.limit() * PAGE
            values["store_up", ""], values["store_registered_bytes", ""] = float(usable > 0), float(usable)
        for source in KINDS["loading_bytes"]:
            values["loading_bytes", source] = self._planner.loading_bytes(source)
        return values

    def _estimates(self) -> dict[tuple[str, str], float]:
        report = self._planner.report()
        values = {("planner_bandwidth", source): report[f"{source}_bandwidth"] for source in KINDS["planner_bandwidth"]}
        return values | {("planner_error", what): report[f"{what}_error"] for what in KINDS["planner_error"]}
