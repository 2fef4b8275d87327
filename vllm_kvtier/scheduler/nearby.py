"""Whether to copy from the GPU cache of another engine of this node, load from host memory, or compute.

All three are measured as the engine runs (``planner``). Before a holder is asked, what a copy would bring is weighed
against what the store offered; and once it has lent its blocks, the loan against that offer.
"""

import time
from collections.abc import Callable

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.exporting import alignment
from vllm_kvtier.scheduler.hurry import Hurry
from vllm_kvtier.scheduler.offers import Loan
from vllm_kvtier.scheduler.planner import Planner
from vllm_kvtier.scheduler.sharing import Holder
from vllm_kvtier.scheduler.tier import HostOffer
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.telemetry.stats import Counters

logger = get_logger("vllm.kvtier.nearby")


# While it is not known what computing costs.
UNKNOWN_PATIENCE = 0.25  # seconds
ANSWER = 1e-3  # seconds that an engine of this node may well take to answer
FAILED_PAUSE = 10.0  # seconds after which an engine is asked again from which a copy came wrong


class Nearby:
    def __init__(
        self,
        config: KVTierConfig,
        groups: list[tuple[int, int | None]],
        unit: int,
        instance: str,
        planner: Planner | None,
        counters: Counters,
        bytes_of: Callable[[int], int],
        free: Callable[[], int],
        hurry: Hurry | None = None,
    ):
        """``instance``: this engine's. ``bytes_of``: what one rank would copy for so many tokens. ``free``: blocks that
        could be given to a request now."""
        self._config, self._groups, self.instance = config, groups, instance
        self._planner, self._counters, self._bytes_of, self._free = planner, counters, bytes_of, free
        self._hurry = hurry
        self._align = alignment(groups, unit)
        self._paused: dict[str, float] = {}  # instance -> until when it is not asked
        self._unmapped: dict[str, bool] = {}  # instance that cannot be mapped here -> whether NIXL reads it

    def cannot_map(self, instance: str, alike: bool) -> None:
        """A worker found that this engine's memory cannot be mapped (it said so). ``alike``: NIXL could read it."""
        self._unmapped[instance] = alike

    def failed(self, instance: str) -> None:
        """A copy from this engine came wrong: for a while other requests need not find that out as well."""
        now = time.monotonic()
        self._paused = {name: until for name, until in self._paused.items() if until > now}
        self._paused[instance] = now + FAILED_PAUSE

    def suits(self, t: Tracked, holder: Holder, computed: int, alone: bool = True) -> bool | None:
        """Whether ``holder`` is worth asking: True: its memory is to be mapped; False: NIXL is to read it; None: no.
        ``alone``: no other request is there."""
        mapped = holder.instance not in self._unmapped
        tokens = min(holder.tokens, t.request.num_tokens)
        reason = None
        if holder.instance == self.instance or holder.instance in t.failed or computed % self._align:
            return None
        if self._paused.get(holder.instance, 0.0) > time.monotonic():
            return None
        if not mapped and not self._unmapped[holder.instance]:
            return None  # said by the worker; the store has what it can
        if tokens - computed < max(1, self._config.pull_threshold):
            reason = "below threshold"
        elif sum(-(-(tokens - computed) // size) for size, _ in self._groups) > self._free():
            reason = "too few free blocks"
        elif not alone and self._computed_meanwhile(holder, computed, tokens, t.request.num_tokens):
            reason = "computed within a step"
        elif t.held is not None and not self._sooner(t, tokens, self._bytes_of(tokens - computed), t.held):
            reason = "the node store is faster"
        if reason is not None:
            self._counters.count("not_fetched", reason)
            return None
        return mapped

    def _computed_meanwhile(self, holder: Holder, computed: int, tokens: int, prompt: int) -> bool:
        """Whether computing them is over before a copy could be used: after steps of others, or, if it is brief, when
        the holder has answered and it is done."""
        if self._planner is None or self._config.load_policy == "always":
            return False
        brief = None
        if self._hurry is not None:
            brief = self._hurry.brief("gpu", self._bytes_of(tokens - computed), holder.instance)
        seconds = self._planner.compute_seconds(computed, tokens, prompt)
        least = self._planner.handover_seconds() if brief is None else brief + ANSWER
        return seconds is not None and seconds < least

    def patience(self, t: Tracked, holder: Holder, computed: int) -> float:
        """Seconds that ``t`` may wait for what the holder is computing just now: not longer than it would compute."""
        prompt, known = t.request.num_tokens, None
        have = max(computed, t.held.tokens if t.held is not None else 0)
        tokens = min(holder.tokens, prompt)
        if self._planner is not None and tokens > have:
            known = self._planner.compute_seconds(have, tokens, prompt)
        return UNKNOWN_PATIENCE if known is None else known

    def better(self, t: Tracked, loan: Loan, held: HostOffer) -> bool:
        """Whether the loan brings the first token sooner than what the store offers."""
        return self._sooner(t, min(loan.tokens, t.request.num_tokens), loan.nbytes, held)

    def _sooner(self, t: Tracked, tokens: int, nbytes: int, held: HostOffer) -> bool:
        planner, prompt = self._planner, t.request.num_tokens
        if planner is None:
            return tokens >= held.tokens
        here, there = planner.load_seconds("gpu", nbytes), planner.load_seconds("host", held.nbytes)
        few, many = sorted((tokens, min(held.tokens, prompt)))
        rest = planner.compute_seconds(few, many, prompt) if few < many else 0.0
        if rest is None:  # what computing costs is not known: more is better
            return tokens > held.tokens
        if tokens < held.tokens:
            here += rest
        else:
            there += rest
        return here <= there
