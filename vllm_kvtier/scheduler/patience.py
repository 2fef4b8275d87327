"""Whether a request waits for what is on its way up in the node store, and for how long.

The store says what it has in memory at once, and what it has begun to bring up from its disk, another node or an
object store. Waiting is right as long as what comes is expected here, loaded, before it could be computed; at the end
of that time the store answers with what has come by then. On the scheduler's thread only.
"""

import time

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.planner import Planner
from vllm_kvtier.scheduler.tier import Further, HostTier
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.telemetry.stats import Counters

# To be told whether there is more takes a question to another machine. How often that was worth waiting for, lately,
# says how much of the time that it could save it may take; never nothing, or it could not become worth it again.
FIRST_LUCK, LEAST_LUCK = 0.25, 0.02
WEIGHT = 0.1  # of the latest answer
LEAST = 1e-3  # seconds: less is no wait


class Patience:
    def __init__(
        self, config: KVTierConfig, tier: HostTier, planner: Planner | None, counters: Counters, unit: int
    ):
        self._config, self._tier, self._planner, self._counters = config, tier, planner, counters
        self._unit = unit
        self._luck = FIRST_LUCK

    def worth(self, t: Tracked, have: int, further: Further | None) -> float:
        """Seconds to wait for what follows token ``have`` of the request; 0: do not."""
        if t.waits_for_answer and (further is None or not further.asking or further.tokens > have):
            t.waits_for_answer = False
            lucky = have > t.had or further is not None and further.tokens > have
            self._luck = max(LEAST_LUCK, self._luck + WEIGHT * (lucky - self._luck))
        if further is None:
            return 0.0
        now = time.monotonic()
        left = (t.waits_since or now) + self._config.store_patience - now
        prompt = t.request.num_tokens
        end = min(further.tokens, prompt - 1)
        found = self._decide(have, end, prompt, further.seconds) if end > have else 0.0
        if further.asking:
            # Nobody knows yet how much there is: if it is everything, is that worth the question?
            whole = min(len(t.request.block_hashes) * self._unit, prompt - 1)
            found = max(found, self._decide(have, whole, prompt, further.asking / self._luck))
        patience = min(found, left)
        if patience < LEAST:
            self._counters.count("waits", "slower than computing" if left > LEAST else "waited long enough")
            return 0.0
        t.waits_for_answer, t.had = end <= have, have
        self._counters.count("waits", "for an answer" if t.waits_for_answer else "for what comes up")
        t.waits_since = t.waits_since or now
        return patience

    def rewarded(self, t: Tracked, tokens: int) -> None:
        """Its wait is over; the first ``tokens`` of it are in the store's memory now."""
        before = t.held.tokens if t.held is not None else t.asked_from
        t.risen = max(0, tokens - before)
        self._counters.observe("waited_seconds", "", time.monotonic() - t.waits_since)
        self._counters.count("waited_tokens", amount=t.risen)

    def _decide(self, have: int, end: int, prompt: int, seconds: float) -> float:
        """How long tokens [have, end) may take to come up, if that is expected to be met; else 0."""
        if self._config.load_policy == "always" or self._planner is None:
            return self._config.store_patience
        compute = self._planner.compute_seconds(have, end, prompt)
        if compute is None:  # nothing was computed yet
            return self._config.store_patience
        room = compute - self._planner.load_seconds("host", self._tier.load_bytes(end - have))
        return room if seconds < room else 0.0
