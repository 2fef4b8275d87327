"""What an offer is worth: whether it says what was asked for, and how many tokens it adds to what vLLM has itself.

Another process made it, and its numbers become indices here. On the scheduler's thread only.
"""

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.scheduler.offers import Loan, Offer
from vllm_kvtier.scheduler.params import Handoff
from vllm_kvtier.scheduler.planner import Planner
from vllm_kvtier.scheduler.tier import HostOffer, HostTier
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.telemetry.stats import Counters


class Scales:
    def __init__(
        self,
        config: KVTierConfig,
        groups: list[tuple[int, int | None]],
        unit: int,
        resumes: bool,
        tier: HostTier | None,
        planner: Planner | None,
        counters: Counters,
    ):
        """As Matcher's."""
        self._config, self._groups, self._unit, self._resumes = config, groups, unit, resumes
        self._tier, self._planner, self._counters = tier, planner, counters
        self._windowed = any(window is not None for _, window in groups)

    def fits(self, t: Tracked, offer: Offer) -> bool:
        """Whether a peer's offer says what was asked for."""
        most = t.request.num_tokens if isinstance(t.asking, Handoff) else len(t.pending.ask.chain) * self._unit
        if not (t.pending.ask.start <= offer.start < offer.tokens <= most and len(offer.blocks) == len(self._groups)):
            return False
        for ids, (size, window) in zip(offer.blocks, self._groups, strict=True):
            if len(ids) != -(-offer.tokens // size) - offer.start // size:
                return False
            if window is None and not all(ids):
                return False  # what is not there would be read by nobody
            if isinstance(offer, Loan) and (offer.start % size or offer.tokens % size):
                return False  # blocks of a prefix cache are whole
        return True

    def gain(self, t: Tracked, computed: int, now: float, alone: bool = True) -> int:
        """Tokens that ``t.offer`` adds to ``computed``; 0 if it is no longer worth it or held for too long. ``alone``:
        no other request is there, or the step itself waits for the load."""
        offer = t.offer
        if isinstance(offer, HostOffer) and offer.epoch != self._tier.epoch:
            return 0  # the engine's cache was reset: not ours any more
        if isinstance(offer, Loan) and self._tier is not None and t.epoch != self._tier.epoch:
            return 0  # as well: what others have was ours until then
        if offer.start > computed or now - t.offered_at > self._config.transfer_timeout:
            return 0
        prompt = t.request.num_tokens
        tokens = min(offer.tokens, prompt)
        if tokens == prompt and self._windowed:
            # vLLM would compute the last token again, after it has given up the blocks that only this token's
            # window reaches (``get_num_skipped_tokens`` is asked for the next token's).
            tokens -= 1
        if tokens < prompt - 1 and not self._resumes or not self._reaches(offer, tokens):
            return 0
        gain = tokens - computed
        if offer.place:
            return gain if gain > 0 and self._worth(t, computed, tokens, alone) else 0
        return gain if gain >= max(1, self._config.pull_threshold) else 0

    def _worth(self, t: Tracked, computed: int, tokens: int, alone: bool) -> bool:
        """Whether the blocks are expected here before they could be computed."""
        if self._planner is None:
            return True
        if t.plan is not None and t.planned == (computed, tokens):
            return True  # vLLM had no room for it then
        # A load among others is of use when their steps are over; what is computed is computed in such a step.
        least = 0.0 if alone else self._planner.handover_seconds()
        t.plan = self._planner.decide(t.offer.place, computed, tokens, t.offer.nbytes, t.request.num_tokens, least)
        t.planned = (computed, tokens)
        load = t.plan.load or self._config.load_policy == "always"
        self._counters.count("planned", t.plan.reason if load == t.plan.load else "always")
        if t.plan.compute_seconds is not None:
            self._counters.count("weighed_seconds", "load", t.plan.load_seconds)
            self._counters.count("weighed_seconds", "compute", t.plan.compute_seconds)
        return load

    def _reaches(self, offer: Offer, tokens: int) -> bool:
        """Whether the offer has all blocks that the windows of the token after ``tokens`` reach."""
        for ids, (size, window) in zip(offer.blocks, self._groups, strict=True):
            if window is not None:
                skipped = offer.start // size
                first = max(0, tokens - window + 1) // size
                if not all(ids[max(0, first - skipped) : -(-tokens // size) - skipped]):
                    return False
        return True
