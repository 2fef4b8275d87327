"""Containment: an exception in our code on one of vLLM's threads costs at most a request.

vLLM's scheduler and model runner do not expect a connector to raise: the engine process would end. So every method of
the connector that vLLM calls is ``contained``, and each part of a step on either side is run by ``attempt``. An
exception is counted (metric ``internal_errors``, by place), its traceback is logged once per place, and the state is
repaired. vLLM's answer and the repair:

- ``bind_gpu_block_pool``, ``register_kv_caches``: the connector is passive: no hits, no stores.
- ``on_new_request``: lookups that were prefetched for the request are cancelled.
- ``get_num_new_matched_tokens``: 0 tokens; the request releases all leases. While an unverified synchronous load is in
  vLLM's prefix cache: None ("ask again"), because its blocks must not be shared.
- ``update_state_after_alloc``: vLLM counts on the load if there are external tokens: the workers report that it failed.
- ``build_connector_meta``: at least the loads that vLLM counts on. Jobs that did not get into the answer stay. Block
  tables that may lack blocks are dropped: blocks would be stored under wrong hashes.
- ``update_connector_output``: a failed synchronous load is handled before all else; then each request separately. A
  request whose result could not be handled counts as failed.
- ``request_finished*``: no export, no params; tables, pins and leases of the request go. A load continues until it
  ends.
- ``take_events``, ``get_kv_connector_stats``, ``get_external_cache_hit_sources``, ``has_pending_block_frees``,
  ``get_loaded_kv_cache_group_ids``: empty.
- ``reset_cache`` and vLLM's own reset: state that must not survive a reset, because weights may have changed, is
  dropped twice; if that fails twice, the connector is passive.
- ``start_load_kv``: synchronous loads that were not begun are reported failed with the step's output.
- ``bind_connector_metadata``, ``get_finished``, ``get_transfer_results``, ``get_block_ids_with_load_errors``,
  ``build_connector_worker_meta``: called again. Results leave their table only when all are put together; a job that no
  part of the worker knows any more is reported failed (``worker.job_table``).
- ``shutdown``, ``unregister_kv_caches``: the remaining parts run.

vLLM's own methods that hooks wrap (``vllm_compat.hooks``) run exactly once, and their exceptions pass unchanged. Errors
for the user (``KVTierError``) pass when an engine starts. Two failures end the engine if they happen twice, since it
would answer wrongly (``Unsafe``): rolling back tokens that were computed on wrong KV, and, before vLLM 0.30, marking
requests with failed loads in vLLM's scheduler.

After more than ``MAX_ERRORS`` errors within ``WINDOW`` seconds the scheduler side becomes passive for good, with one
line in the log. This module calls only the logger, the counters and repairs.
"""

import functools
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from vllm_kvtier.logs import get_logger, unlimited
from vllm_kvtier.telemetry.stats import Counters

logger = get_logger(__name__)

MAX_ERRORS, WINDOW = 16, 60.0  # errors, seconds
MAX_LOGGED = 64  # places whose traceback is logged
_NONE = type(None)  # returns None when called


class Unsafe(Exception):
    """The engine would give wrong answers: this exception passes and ends it."""


class Containment:
    """For one side of the connector, on vLLM's threads."""

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.monotonic):
        self._counters, self._clock = counters, clock
        self._logged: set[tuple[str, int]] = set()
        self.recent: deque[float] = deque(maxlen=MAX_ERRORS + 1)
        self.errors = 0
        self.on_limit: Callable[[], None] | None = None  # makes the side passive; None: a worker, which never is

    def failed(self, where: str) -> None:
        """Call while an exception is handled."""
        self.errors += 1
        self._counters.count("internal_errors", re.sub(r"\W+", "_", where).strip("_"))
        _, error, trace = sys.exc_info()
        while trace.tb_next is not None:
            trace = trace.tb_next
        where_raised = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        if where_raised not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(where_raised)
            words = "kvtier: internal error in %s; the request is recomputed (logged once per place)"
            logger.exception(words, where, extra=unlimited())  # the limit counts by line of code, and this is one line
        now = self._clock()
        self.recent.append(now)
        if len(self.recent) > MAX_ERRORS and now - self.recent[0] <= WINDOW:
            self.recent.clear()
            self.disable(f"{MAX_ERRORS} internal errors within {WINDOW:g} s, the last in {where}: {error!r}")

    def disable(self, reason: str) -> None:
        """Make the side passive for good."""
        if self.on_limit is None:
            return
        logger.error("kvtier: connector: disabled (%s); this engine neither loads nor stores KV: restart it", reason)
        try:
            self.on_limit()
        except Exception:
            logger.exception("kvtier: connector: disabling it failed in part")

    def attempt(self, where: str, part: Callable[..., Any], *args: Any, repair: Callable[[], Any] | None = None) -> Any:
        """Return ``part(*args)``; if it raises, ``repair()`` or None."""
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
        """Run ``part()``, without which the engine must not continue: tried twice, then ``disable``. ``unsafe``: raise
        Unsafe instead, because even a passive connector would give wrong answers."""
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
            self.disable(f"{where} failed twice: {error!r}")


def contained(
    needs: str = "",
    otherwise: Callable[[], Any] = _NONE,
    repair: Callable[..., Any] | None = None,
    passes: tuple[type[Exception], ...] = (),
    again: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Contain a method that vLLM calls, of an object with a ``containment``.

    If it raises, vLLM gets the result of ``repair``, called with the same arguments; if that raises too, or there is
    none, ``otherwise()``. vLLM also gets ``otherwise()`` if the attribute ``needs`` is None: this process has no such
    side, making it failed, or there is nothing to report. ``passes``: errors meant for vLLM. ``again``: the repair is
    the method itself, called again.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        mend = method if again else repair

        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if needs and getattr(self, needs) is None:
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
