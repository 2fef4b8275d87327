"""Rolls back a request after a synchronous load failed. On the scheduler thread.

vLLM (0.29 on) lets a step's forward wait for a load. It drops the step's output for a request with bad blocks, but only
of models with one KV cache group. With asynchronous scheduling the next step computes on the same blocks already, and
the loaded blocks have been in the prefix cache since their allocation. So, before vLLM reads the step's output
(``before_output``), the request is preempted with all of its output in flight, as vLLM does when its cache is reset,
and recomputed from the first bad block on.

With priorities vLLM may take a request back out of the step that is being scheduled: see ``evict_uncomputed``.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.request import RequestStatus

from vllm_kvtier.containment import Containment
from vllm_kvtier.logs import get_logger
from vllm_kvtier.vllm_compat.hooks.admission import READY

logger = get_logger(__name__)


def serves(scheduler: Any, connector: Any) -> bool:
    """Whether ``connector`` is the engine's only one.

    Another connector (MultiConnector) would keep KV that was computed on unverified blocks.
    """
    return scheduler is not None and connector is not None and scheduler.connector is connector


def possible(scheduler: Any, connector: Any, request: Any, tokens: int) -> bool:
    """Whether this request can be rolled back after a step that computed behind its first ``tokens`` tokens.

    vLLM itself rolls back tokens of a session that goes on with more input. Its workers get the media of a new request
    without those that end within what is computed. Those of the V1 model runner get none when it is resumed, and end.
    """
    if request.resumable or not serves(scheduler, connector):
        return False
    places = (feature.mm_position for feature in request.mm_features or ())
    return not any(place.offset + place.length <= tokens for place in places) or scheduler.use_v2_model_runner


def uses(scheduler: Any, connector: Any) -> bool:
    """Whether ``connector`` is the scheduler's own, or one of those in its MultiConnector."""

    def holds(outer: Any) -> bool:
        return outer is connector or any(holds(child) for child in getattr(outer, "_connectors", ()))

    return holds(scheduler.connector)


def set_failure_policy(scheduler: Any, policy: str) -> None:
    """Make vLLM's scheduler recompute failed loads if ``policy`` is "recompute".

    A connector in a MultiConnector has a configuration of its own, which vLLM's scheduler does not read. vLLM has one
    policy for all connectors of an engine.
    """
    if policy == "recompute" and not scheduler.recompute_kv_load_failures:
        scheduler.recompute_kv_load_failures = True
        logger.info("kvtier: connector: failed loads of all connectors in this MultiConnector are recomputed")


def alone(scheduler: Any) -> bool:
    """Whether the request being matched is the only one."""
    running, waiting = scheduler.get_request_counts()
    return not running and waiting <= 1


def any_running(scheduler: Any) -> bool:
    """Whether a request has blocks for steps. One that was preempted has none."""
    return bool(getattr(scheduler, "running", ()))


def others_wait(scheduler: Any, request: Any) -> bool:
    """Whether another request must be matched before it can run. Looks at all requests: while a step is scheduled, the
    requests that were skipped in it are in none of vLLM's queues. Another thread may ask, while one is added."""
    return any(
        other is not request
        and other.status in READY
        and not other.num_computed_tokens
        for other in list(scheduler.requests.values())
    )


def before_output(scheduler: Any, containment: Containment, verify: Callable[[Any], object]) -> None:
    """Have ``verify`` called with the workers' ``KVConnectorOutput``, or None, before vLLM reads the output of a step
    that waited for a load. Outside of the scheduler's methods, once a scheduler."""
    read = scheduler.update_from_output

    @functools.wraps(read)
    def update_from_output(scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.has_sync_kv_loads:
            part = functools.partial(verify, model_runner_output.kv_connector_output)
            containment.insist("verification", part, unsafe=True)
        return read(scheduler_output, model_runner_output, *args, **kwargs)

    scheduler.update_from_output = update_from_output


def drop_output(request: Any) -> None:
    """Drop the output in flight of this request if it was preempted, so that it is recomputed."""
    if request.num_stale_output_tokens > 0:
        request.drop_stale_output = True


def waits_for_load(scheduler: Any, request: Any) -> bool:
    """Whether vLLM waits for the end of this request's asynchronous load."""
    return request.status is RequestStatus.WAITING_FOR_REMOTE_KVS and request.request_id in scheduler.requests


def end_load(scheduler: Any, request: Any) -> None:
    """Have the next step take the request's asynchronous load for one that has ended well. Between two calls of the
    scheduler."""
    scheduler.finished_recving_kv_req_ids.add(request.request_id)


def is_paused(scheduler: Any) -> bool:
    """Whether vLLM was asked to pause: it has ended its steps, or is about to."""
    return bool(scheduler.pause_state.name != "UNPAUSED")


def drop_load(scheduler: Any, request: Any) -> bool:
    """Take back the blocks of a load that has ended, if no step has had its request since: when vLLM resets its prefix
    cache, it takes back those of running requests only. What a session has computed stays: there may be media that its
    workers do not get again, see ``possible``. Between two steps. False: there is no such load."""
    if request.request_id in scheduler.finished_recving_kv_req_ids:
        scheduler.failed_recving_kv_req_ids.add(request.request_id)  # as of a load that brought nothing
    elif request.status not in READY or request not in scheduler._inflight_prefills:
        return False
    scheduler.kv_cache_manager.free(request)
    scheduler._inflight_prefills.discard(request)  # as ``admission`` says
    request.num_computed_tokens = 0
    return True


def preempt_and_recompute(scheduler: Any, request: Any, tokens: int = 0) -> None:
    """Roll back a running request before the scheduler reads a step's output; one that was preempted or ended has
    nothing to roll back. Remove its unverified blocks from the prefix cache before. ``tokens``: what is right; one that
    waits with its blocks goes on from there."""
    if request not in scheduler.running:
        if not request.is_finished():
            request.num_computed_tokens = min(request.num_computed_tokens, tokens)
        return
    scheduler.running.remove(request)
    # Output in flight was computed on bad blocks and must not be delivered.
    scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
    # The next step may schedule it again: the model runner then needs all of its tokens.
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)


def evict_uncomputed(scheduler: Any, containment: Containment) -> None:
    """Have each preemption remove blocks from the prefix cache that were never computed. Once a scheduler.

    By priority vLLM (0.25.1 to 0.33) also preempts a request that is in the step being scheduled already. The step is
    without it then, but the blocks that it was to fill have been in the prefix cache since they were allocated, and
    other requests, or the same one again, would take them for computed. Does nothing for another policy, and for a
    scheduler of the user's own that preempts in another way."""
    known = all(hasattr(scheduler, name) for name in ("policy", "kv_cache_manager", "_preempt_request"))
    if not known or getattr(scheduler.policy, "name", "") != "PRIORITY":
        return
    preempt, manager = scheduler._preempt_request, scheduler.kv_cache_manager

    def evict(request: Any) -> None:
        for group in manager.coordinator.single_type_managers:  # their pools may differ
            blocks = group.req_to_blocks.get(request.request_id, ())[request.num_computed_tokens // group.block_size :]
            group.block_pool.evict_blocks({block.block_id for block in blocks if block.block_hash is not None})

    @functools.wraps(preempt)
    def preempt_request(request: Any, *args: Any, **kwargs: Any) -> Any:
        containment.insist("evicting what was not computed", functools.partial(evict, request))
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = preempt_request
