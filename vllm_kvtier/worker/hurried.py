"""Loads and fetches that the forward of their own step computes on: begun before it, judged with its output.

The scheduler half must hear in that very output what became of each, and vLLM must not hear of them as of asynchronous
ones, whose requests it knows to wait. So what was not begun before the forward, or did not end in time, is
reported as failed, and what is heard of it later goes to nobody. Its copies may still write then; whatever the device
does with these blocks next runs behind them, because the forward does.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from vllm_kvtier.worker.fetches import FetchResult
from vllm_kvtier.worker.queues import LoadResult
from vllm_kvtier.worker.work import FetchOrder, LoadOrder

logger = logging.getLogger("vllm.kvtier.worker")

Order = LoadOrder | FetchOrder
# One request may have one of each.
_Name = tuple[type, str]


def _order_name(order: Order) -> _Name:
    return (type(order), order.request_id)


def _result_name(result: Any) -> _Name:
    kinds = {LoadResult: LoadOrder, FetchResult: FetchOrder}
    return (kinds.get(type(result), type(result)), result.request_id)


class Hurried:
    """On the model runner's thread only."""

    def __init__(self) -> None:
        self._due: list[Order] = []  # of the step whose output is being made
        self._begun: dict[_Name, float] = {}  # those that the forward waits for, and when they were begun
        self._late: set[_Name] = set()

    def begin(self, orders: list[Any], how: Callable[[list[Any]], None]) -> None:
        """Before the forward is launched: begin ``orders``, of one kind."""
        now = time.monotonic()
        try:
            how(orders)
        except Exception:  # they are computed instead; what was begun is waited for all the same
            logger.exception("kvtier: beginning a load failed")
            return
        self._begun.update((_order_name(order), now) for order in orders)

    def take(self, orders: list[Any]) -> list[Any]:
        """The step's orders: hurried ones are due from now on, the others are returned."""
        self._due += [order for order in orders if order.hurried]
        return [order for order in orders if not order.hurried]

    def settle(self, kind: type, how: Callable[[float], None]) -> None:
        """When the forward was launched: wait by ``how``, for so many seconds at most, until those of a kind that are
        due have ended."""
        timeouts = [order.timeout for order in self._due if isinstance(order, kind)]
        if timeouts:
            how(max(timeouts))

    def judge(self, results: list[Any]) -> tuple[list[Any], list[LoadResult | FetchResult]]:
        """Splits the results that came: (those of others, one for each order that is due)."""
        if not (self._due or self._late):
            return results, []
        due, self._due = {_order_name(order): order for order in self._due}, []
        named = [(_result_name(result), result) for result in results]
        found = {name: result for name, result in named if name in due}
        others = [result for name, result in named if name not in due and name not in self._late]
        self._late.difference_update(name for name, _ in named)
        judged = []
        for name, order in due.items():
            began, result = self._begun.pop(name, None), found.get(name)
            if result is None and began is not None:
                self._late.add(name)
            if result is None or began is None:
                result = _failed(order, began)
            judged.append(result)
        return others, judged


def _failed(order: Order, began: float | None) -> LoadResult | FetchResult:
    what = "load" if isinstance(order, LoadOrder) else "copy"
    reason = f"the {what} {'was not begun before' if began is None else 'did not end within'} its step"
    seconds = 0.0 if began is None else time.monotonic() - began
    if isinstance(order, LoadOrder):
        return LoadResult(order.request_id, order.all_blocks, reason, 0, seconds, 0.0)
    return FetchResult(order.request_id, order.all_blocks, True, reason, 0, seconds)
