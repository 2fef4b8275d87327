"""Whether a request waits for what the store is promoting, and for how long.

The store's answer says what it has in memory, and what it has begun to promote from its secondary tiers. A request
waits as long as that is expected to be loaded before it could be computed; the store then answers with what it has by
that time. On vLLM's scheduler thread only.
"""

import time
from collections.abc import Callable

from vllm_kvtier.scheduler.context import LoadContext
from vllm_kvtier.scheduler.sources.base import PendingPromotion, RequestState

# Whether there is more takes a lookup on another machine. The share of such waits that lately brought tokens limits how
# long the next may take; never 0, or it could not rise again.
INITIAL_HIT_RATE, MIN_HIT_RATE = 0.25, 0.02
HIT_RATE_WEIGHT = 0.1  # of the latest answer
UNKNOWN_COMPUTE_SECONDS = 1.0  # before anything was computed; if the tier expects longer, so long
MIN_WAIT_SECONDS = 1e-3  # seconds: less is no wait


class PromotionWait:
    def __init__(self, context: LoadContext, load_bytes: Callable[[int], int]):
        """``load_bytes``: what one rank loads for so many tokens."""
        self._config, self._planner, self._counters = context.engine.config, context.planner, context.engine.counters
        self._load_bytes, self._hash_block_size = load_bytes, context.engine.geometry.hash_block_size
        self._hit_rate_estimate = INITIAL_HIT_RATE

    def wait_seconds(self, state: RequestState, have: int, pending_promotion: PendingPromotion | None) -> float:
        """Seconds to wait for what follows token ``have`` of the request; 0: do not."""
        if state.waiting_for_lookup and (
            pending_promotion is None or not pending_promotion.asking or pending_promotion.tokens > have
        ):
            state.waiting_for_lookup = False
            hit = have > state.tokens_before_wait or (pending_promotion is not None and pending_promotion.tokens > have)
            estimate = self._hit_rate_estimate + HIT_RATE_WEIGHT * (hit - self._hit_rate_estimate)
            self._hit_rate_estimate = max(MIN_HIT_RATE, estimate)
        if pending_promotion is None:
            return 0.0
        now = time.monotonic()
        left = (state.waits_since or now) + self._config.promotion_timeout - now
        prompt = state.request.num_tokens
        end = min(pending_promotion.tokens, prompt - 1)
        found = self._decide(have, end, prompt, pending_promotion.seconds) if end > have else 0.0
        if pending_promotion.asking:
            # The amount is not known yet: all of the prompt, at best.
            whole = min(len(state.request.block_hashes) * self._hash_block_size, prompt - 1)
            found = max(found, self._decide(have, whole, prompt, pending_promotion.asking / self._hit_rate_estimate))
        wait_seconds = min(found, left)
        if wait_seconds < MIN_WAIT_SECONDS:
            self._counters.count(
                "promotion_waits", "load_slower_than_compute" if left > MIN_WAIT_SECONDS else "timeout"
            )
            return 0.0
        state.waiting_for_lookup, state.tokens_before_wait = end <= have, have
        self._counters.count("promotion_waits", "lookup" if state.waiting_for_lookup else "promotion")
        state.waits_since = state.waits_since or now
        return wait_seconds

    def on_promoted(self, state: RequestState, tokens: int) -> None:
        """The request's wait is over; its first ``tokens`` tokens are in the store's memory."""
        before = state.held.tokens if state.held is not None else state.asked_from
        state.promoted_tokens = max(0, tokens - before)
        self._counters.observe("promotion_wait_seconds", "", time.monotonic() - state.waits_since)
        self._counters.count("promotion_wait_tokens", amount=state.promoted_tokens)

    def _decide(self, have: int, end: int, prompt: int, seconds: float) -> float:
        """Seconds that the promotion of tokens [have, end) may take, if it is expected to take less; else 0."""
        if self._config.load_policy == "always":
            return self._config.promotion_timeout
        compute = self._planner.compute_seconds(have, end, prompt)
        if compute is None:
            return max(UNKNOWN_COMPUTE_SECONDS, seconds)
        limit = compute - self._planner.load_seconds("host", self._load_bytes(end - have))
        return limit if seconds < limit else 0.0
