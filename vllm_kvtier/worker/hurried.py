"""Loads that the forward of their own step computes on: begun before it, judged with its output.

The scheduler half must hear in that very output what became of each, and vLLM must not hear of them as of asynchronous
loads, whose requests it knows to wait. So a load that was not begun before the forward, or did not end in time, is
reported as failed, and what is heard of it later goes to nobody. Its copies may still write then; whatever the device
does with these blocks next runs behind them, because the forward does.
"""

import logging
import time
from typing import Any

from vllm_kvtier.worker.queues import LoadResult
from vllm_kvtier.worker.tiering import TierWorker
from vllm_kvtier.worker.work import LoadOrder

logger = logging.getLogger("vllm.kvtier.worker")

class Hurried:
    """On the model runner's thread only."""

    def __init__(self) -> None:
        self.due: list[LoadOrder] = []  # of the step whose output is being made
        self._begun: dict[str, float] = {}  # those that the forward waits for, and when they were begun
        self._late: set[str] = set()

    def begin(self, loads: list[LoadOrder], tier: TierWorker | None) -> None:
        """Before the forward is launched."""
        if tier is None:
            return
        now = time.monotonic()
        try:
            tier.load_now(loads)
        except Exception:  # they are computed instead; what was begun is waited for all the same
            logger.exception("kvtier: beginning a load failed")
            return
        self._begun.update((order.request_id, now) for order in loads)

    def settle(self, tier: TierWorker | None) -> None:
        """When the forward was launched: wait until they have ended."""
        if self.due and tier is not None:
            tier.settle(max(order.timeout for order in self.due))

    def judge(self, results: list[Any]) -> tuple[list[Any], list[LoadResult]]:
        """Splits the results that came: (those of others, one for each load that is due)."""
        if not (self.due or self._late):
            return results, []
        due, self.due = {order.request_id: order for order in self.due}, []
        found = {result.request_id: result for result in results if result.request_id in due}
        others = [r for r in results if r.request_id not in due and r.request_id not in self._late]
        self._late.difference_update(result.request_id for result in results)
        judged = []
        for name, order in due.items():
            began, result = self._begun.pop(name, None), found.get(name)
            if result is None and began is not None:
                self._late.add(name)
            if result is None or began is None:
                reason = f"the load {'was not begun before' if began is None else 'did not end within'} its step"
                seconds = 0.0 if began is None else time.monotonic() - began
                result = LoadResult(name, order.all_blocks, reason, 0, seconds, 0.0)
            judged.append(result)
        return others, judged
