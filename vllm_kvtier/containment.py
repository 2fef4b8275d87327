"""Containment: an exception in our code on one of vLLM's threads costs at most a request.

vLLM's scheduler and model runner do not expect a connector to raise: the engine process would end. So every method of
the connector that vLLM calls is ``contained``, and inside the two halves each part of a step is run by ``attempt``.
An exception is counted (metric ``internal_errors``, by place), its traceback is logged once a place, and the place is
repaired. What vLLM is answered, and what the repair does:

- ``bind_gpu_block_pool``, ``register_kv_caches``: the connector is passive: no hits, no stores.
- ``on_new_request``: what was asked ahead for the request is given up.
- ``get_num_new_matched_tokens``: 0 tokens; the request gives back all that it holds. While an unverified synchronous
  load is in vLLM's prefix cache: None ("ask again"), because its blocks must not be shared.
- ``update_state_after_alloc``: vLLM counts on the load if there are external tokens: the workers report that it failed.
- ``build_connector_meta``: at least the loads that vLLM counts on. Orders that did not get into the answer stay. Block
  tables that may lack blocks are forgotten: by them content would get wrong names.
- ``update_connector_output``: a bad verdict on a synchronous load comes before all else; then each request for itself.
  One whose result could not be taken in counts as failed.
- ``request_finished*``: no export, no params; tables, pins and leases of the request go. A load goes on until it ends.
- ``take_events``, ``get_kv_connector_stats``, ``get_external_cache_hit_sources``, ``has_pending_block_frees``: nothing.
- ``reset_cache`` and vLLM's own reset: what must not outlive a reset, because weights may be others now, is tried
  twice; if it fails twice the connector is passive.
- ``start_load_kv``: synchronous loads that were not begun are reported failed with the step's output.
- ``get_finished``, ``get_transfer_results``, ``get_block_ids_with_load_errors``, ``build_connector_worker_meta``: tried
  again. Results leave their queue only when all are put together; an order that no part of the worker knows any more is
  reported failed (``WorkerHalf``).
- ``shutdown``, ``unregister_kv_caches``: the rest of it goes on.

vLLM's own methods that we wrap (``turns``, ``engine``, ``blocks``) run exactly once, whatever we do, and what they
raise passes unchanged. Errors that are meant for a user to read (``KVTierError``) pass where an engine starts. Two
things end the engine if they fail twice, since it would answer wrongly (``Unsafe``): taking back what was computed on
wrong KV, and, before vLLM 0.30, telling the scheduler which requests' loads failed.

More than ``MOST`` errors within ``WINDOW`` seconds are no accident: the scheduler half then becomes passive for good,
with one line in the log. This module is what all else relies on: it calls the logger, the counters and repairs.
"""

import functools
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm_kvtier.logs import get_logger, unlimited
from vllm_kvtier.telemetry.stats import Counters

logger = get_logger("vllm.kvtier.containment")

MOST, WINDOW = 16, 60.0  # errors, seconds
MOST_LOGGED = 64  # places whose traceback is logged


class Unsafe(Exception):
    """To go on would give wrong answers, which is worse than to end: this passes through and ends the engine."""


class Containment:
    """Of one half of the connector, on vLLM's threads."""

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.monotonic):
        self._counters, self._clock = counters, clock
        self._logged: set[tuple[str, int]] = set()
        self.recent: deque[float] = deque(maxlen=MOST + 1)
        self.errors = 0
        self.on_limit: Callable[[], None] = lambda: None  # the half becomes passive

    def failed(self, where: str) -> None:
        """Call while an exception is handled."""
        self.errors += 1
        self._counters.count("internal_errors", where)
        _, error, trace = sys.exc_info()
        while trace.tb_next is not None:
            trace = trace.tb_next
        place = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        if place not in self._logged and len(self._logged) < MOST_LOGGED:
            self._logged.add(place)
            words = "kvtier: internal error in %s; the request is computed (logged once a place)"
            logger.exception(words, where, extra=unlimited())  # all are logged on one line of this file
        now = self._clock()
        self.recent.append(now)
        if len(self.recent) > MOST and now - self.recent[0] <= WINDOW:
            self.recent.clear()
            self.give_up(f"{MOST} internal errors within {WINDOW:g} s, the last in {where}: {error!r}")

    def give_up(self, reason: str) -> None:
        """For good."""
        logger.error("kvtier: %s; from now on this engine neither loads nor keeps KV: restart it", reason)
        try:
            self.on_limit()
        except Exception:
            logger.exception("kvtier: becoming passive failed in part")

    def attempt(self, where: str, part: Callable[..., Any], *args: Any, repair: Callable[[], Any] | None = None) -> Any:
        """``part(*args)``; if it raises, what ``repair()`` returns, or None."""
        try:
            return part(*args)
        except Unsafe:
            raise
        except Exception:
            self.failed(where)
        if repair is None:
            return None
        try:
            return repair()
        except Exception:
            self.failed(f"{where} (repair)")
            return None

    def insist(self, where: str, part: Callable[[], Any], unsafe: bool = False) -> None:
        """``part()``, which must have happened before the engine goes on: tried twice, then ``give_up``. ``unsafe``: or
        Unsafe is raised, because not even a passive connector could make it good."""
        try:
            part()
            return
        except Exception:
            self.failed(where)
        try:
            part()
        except Exception as error:
            self.failed(where)
            if unsafe:
                raise Unsafe(f"{where} failed twice") from error
            self.give_up(f"{where} failed twice: {error!r}")


def contained(
    half: str = "",
    otherwise: Callable[[], Any] = lambda: None,
    repair: Callable[..., Any] | None = None,
    passes: tuple[type[Exception], ...] = (),
    again: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For a method that vLLM calls, of an object with a ``containment``.

    If it raises, vLLM gets what ``repair`` returns, called with the same arguments; if that raises too, or there is
    none, ``otherwise()``. The same if the attribute ``half`` is None: there is no such half, or it could not be made.
    ``passes``: errors meant for vLLM. ``again``: the repair is the method itself, which changes nothing.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        mend = method if again else repair

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if half and getattr(self, half) is None:
                return otherwise()
            try:
                return method(self, *args, **kwargs)
            except (Unsafe, *passes):
                raise
            except Exception:
                self.containment.failed(method.__name__)
            if mend is not None:
                try:
                    return mend(self, *args, **kwargs)
                except Exception:
                    self.containment.failed(f"{method.__name__} (repair)")
            return otherwise()

        return call

    return decorate
