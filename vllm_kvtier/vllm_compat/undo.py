"""Taking a request's computation back: what vLLM needs for a load that the step which computes on it waits for.

vLLM (0.29 on) lets a step's forward wait for a load, and drops the step's output for a request whose blocks are
reported bad. But with asynchronous scheduling the next step computes on the same blocks already, and what was loaded
has been in the prefix cache since it was allocated. So the request is preempted as vLLM itself does it when its cache
is reset, output in flight included, and computed again from the first bad block on.
"""

import time
from typing import Any

from vllm.v1.request import RequestStatus

from vllm_kvtier.logs import get_logger

logger = get_logger("vllm.kvtier.engine")


def serves(scheduler: Any, connector: Any) -> bool:
    """Whether ``connector`` is all that serves the engine.

    With another connector beside it (MultiConnector) that one would keep what was computed on unverified blocks.
    """
    return scheduler is not None and connector is not None and scheduler.connector is connector


def uses(scheduler: Any, connector: Any) -> bool:
    """Whether ``connector`` is the scheduler's own, or one of those in its MultiConnector."""

    def holds(outer: Any) -> bool:
        return outer is connector or any(holds(child) for child in getattr(outer, "_connectors", ()))

    return holds(scheduler.connector)


def settle_failure_policy(scheduler: Any, policy: str) -> None:
    """Have failed loads computed if ``policy`` is "recompute".

    A connector in a MultiConnector has a configuration of its own, where vLLM's scheduler does not see what we set.
    vLLM has one policy for all connectors of an engine.
    """
    if policy == "recompute" and not scheduler.recompute_kv_load_failures:
        scheduler.recompute_kv_load_failures = True
        logger.info("kvtier: failed loads of all connectors in this MultiConnector are computed, not failed")


def alone(scheduler: Any) -> bool:
    """Whether no request is there but the one being matched."""
    running, waiting = scheduler.get_request_counts()
    return not running and waiting <= 1


def others_wait(scheduler: Any, request: Any) -> bool:
    """Whether a request but this one is to be matched before it can run. Not in vLLM's queues only: while a step is
    scheduled, those that were passed over in it are in none."""
    return any(
        other is not request
        and other.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        and not other.num_computed_tokens
        for other in scheduler.requests.values()
    )


def drop_output(request: Any) -> None:
    """If this request was preempted with output in flight, that is dropped when it comes, and computed again."""
    if request.num_stale_output_tokens > 0:
        request.drop_stale_output = True


def compute_again(scheduler: Any, request: Any) -> None:
    """Take back what was computed of a request that runs, while the scheduler reads a step's output; one that was
    preempted or ended meanwhile has nothing to be taken back. What is not to be found again must not be in the prefix
    cache any more.

    In vLLM with ``kv_load_failure_policy`` "fail" the request has ended when this is called.
    """
    if request not in scheduler.running:
        return
    scheduler.running.remove(request)
    # No output in flight is to be delivered: it was computed on what is bad.
    scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
    # It may be scheduled again in the very next step: the model runner then needs all of its tokens anew.
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
