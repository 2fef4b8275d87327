"""Loads and fetches that the forward of their own step computes on: begun before it, judged with its output.

The scheduler half must hear in that very output what became of each, and vLLM must not hear of them as of asynchronous
ones, whose requests it knows to wait: it would end the engine. So what was not begun before the forward, or did not end
in time, is reported as failed, and what is heard of it later goes to nobody. A request may have another load by then,
even a hurried one: each has a ticket of its own, by which its result is known.

What is late writes to nobody's blocks that it should not. A device runs the forward behind the copies, and the
scheduler half hears the verdict when that forward has ended: giving a copy up frees nobody who waits for the device, it
only ends this thread's wait. On a host all loads end in ``begin``, and of a copy that is late no piece is begun.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.worker.fetches import FetchResult
from vllm_kvtier.worker.queues import LoadResult
from vllm_kvtier.worker.work import FailedOrder, FetchOrder, LoadOrder

logger = get_logger("vllm.kvtier.worker")

Order = LoadOrder | FetchOrder | FailedOrder


class Hurried:
    """On the model runner's thread only."""

    def __init__(self) -> None:
        self.due: list[Order] = []  # of the step whose output is being made
        self._begun: dict[int, float] = {}  # by ticket: those that the forward waits for, and when they were begun
        self._tickets = itertools.count(1)

    def begin(self, orders: list[Any], how: Callable[[list[Any]], None]) -> None:
        """Before the forward is launched: begin ``orders``, of one kind."""
        now = time.monotonic()
        for order in orders:
            order.ticket = next(self._tickets)
        try:
            how(orders)
        except KVTierError as error:
            logger.info("kvtier: a load or copy was not begun: %s", error)
            return
        except Exception:  # they are computed instead; what was begun is waited for all the same
            logger.exception("kvtier: beginning a load failed")
            return
        self._begun.update((order.ticket, now) for order in orders)

    def settle(self, kind: type, worker: Any) -> None:
        """When the forward was launched: wait, by what ``worker.settle`` does for so many seconds at most, until those
        of a kind that are due have ended. A worker of which nothing is hurried need not have it."""
        timeouts = [order.timeout for order in self.due if isinstance(order, kind)]
        if not timeouts:
            return
        try:
            worker.settle(max(timeouts))
        except Exception:  # it costs these requests what they loaded, not all others the engine
            logger.exception("kvtier: waiting for a load failed")

    def judge(self, results: list[Any]) -> tuple[list[Any], list[LoadResult | FetchResult]]:
        """Splits the results that came: (those of others, one for each order that is due). ``forget_due`` follows."""
        found = {_ticket(result): result for result in results}
        judged = []
        for order in self.due:
            began = self._begun.get(order.ticket)
            result = found.get(order.ticket) if began is not None else None
            judged.append(_failed(order, began) if result is None else result)
        return [result for result in results if not _ticket(result)], judged

    def forget_due(self) -> None:
        """What was judged is on its way."""
        for order in self.due:
            self._begun.pop(order.ticket, None)
        self.due = []


def _ticket(result: Any) -> int:
    """0: of no hurried one. With another ticket than those that are due it is late, and nobody's."""
    return getattr(result, "ticket", 0)


def _failed(order: Order, began: float | None) -> LoadResult | FetchResult:
    what = "copy" if isinstance(order, FetchOrder) else "load"
    reason = f"the {what} {'was not begun before' if began is None else 'did not end within'} its step"
    seconds = 0.0 if began is None else time.monotonic() - began
    if isinstance(order, FetchOrder):
        return FetchResult(order.request_id, order.all_blocks, True, reason, 0, seconds)
    return LoadResult(order.request_id, order.all_blocks, reason, 0, seconds, 0.0)
