"""What the scheduler half says of itself as it is now: requests, queues, leases, the planner's beliefs.

On the scheduler's thread, and not in every step: a second apart while requests are served, and when the last is gone.
"""

import time
from collections import Counter
from collections.abc import Callable

from vllm_kvtier.scheduler.exports import ExportTable
from vllm_kvtier.scheduler.lifecycle import State
from vllm_kvtier.scheduler.matching import Matcher
from vllm_kvtier.scheduler.offloading import Offloader
from vllm_kvtier.scheduler.peers import Peers
from vllm_kvtier.scheduler.planner import Planner
from vllm_kvtier.scheduler.tier import HostTier
from vllm_kvtier.store.messages import PAGE
from vllm_kvtier.telemetry.stats import KINDS, Counters

SECONDS = 1.0  # between two looks; nobody scrapes more often

# What a request waits for, by its state; whatever else it does is vLLM's computing.
_WAITS = {
    State.ASKING: "asking",
    State.OFFERED: "offered",
    State.LOADING: "loading",
    State.VERIFYING: "loading",
    State.ABANDONED: "loading",
}


class Gauges:
    def __init__(
        self,
        counters: Counters,
        matcher: Matcher,
        planner: Planner,
        exports: ExportTable,
        peers: Peers,
        tier: HostTier | None,
        offloader: Offloader | None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._counters, self._matcher, self._planner, self._exports = counters, matcher, planner, exports
        self._peers, self._tier, self._offloader, self._clock = peers, tier, offloader, clock
        self._looked = -SECONDS
        self._shown: dict[tuple[str, str], float] = {}

    def refresh(self) -> None:
        """After a step. Says only what changed."""
        now = self._clock()
        if now - self._looked < SECONDS and len(self._matcher):
            return
        self._looked = now
        for key, value in self._read().items():
            if self._shown.get(key) != value:
                self._shown[key] = value
                self._counters.show(*key, value)

    def _read(self) -> dict[tuple[str, str], float]:
        states = Counter(_WAITS.get(state, "computing") for state in self._matcher.states())
        counts, report = self._exports.counts(), self._planner.report()
        values = {("requests", kind): states[kind] for kind in KINDS["requests"]}
        values |= {("exported_blocks", kind): counts[f"{kind}_blocks"] for kind in KINDS["exported_blocks"]}
        values["leases", "given"], values["leases", "taken"] = counts["leases"], self._peers.held_leases()
        if self._offloader is not None:
            values["storing_blocks", ""] = self._offloader.pinned
            usable = self._tier.limit() * PAGE
            values["store_up", ""], values["store_usable_bytes", ""] = float(usable > 0), float(usable)
        for source in KINDS["loading_bytes"]:
            values["loading_bytes", source] = report[f"{source}_queued_bytes"]
            values["planner_bandwidth", source] = report[f"{source}_bandwidth"]
        for what in KINDS["planner_error"]:
            values["planner_error", what] = report[f"{what}_error"]
        return values
