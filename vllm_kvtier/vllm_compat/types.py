"""Our data in the classes vLLM carries between its processes, and how each version wants failures reported."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllm_base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from vllm_kvtier.vllm_compat.probe import Feature, granted
from vllm_kvtier.worker.half import StepResults
from vllm_kvtier.worker.pulls import PullResult
from vllm_kvtier.worker.queues import LoadResult
from vllm_kvtier.worker.work import StepWork

# vLLM 0.30 learned to hear of a failed request; before, only of failed blocks of single-group models.
TransferResults = getattr(vllm_base, "KVConnectorTransferResults", None)


@dataclass
class StepMetadata(KVConnectorMetadata):
    work: StepWork


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Pulls and loads that ended in a step, of one rank or (aggregated) of all."""

    results: list[PullResult | LoadResult] = field(default_factory=list)

    def aggregate(self, other: "WorkerReport") -> "WorkerReport":
        return WorkerReport(self.results + other.results)


def transfer_results(step: StepResults, by_request: bool) -> Any:
    """vLLM >= 0.30: failures go by request (models with several groups must), else by block."""
    return TransferResults(
        finished_sending=set(),
        finished_recving=step.finished,
        failed_recving=step.failed if by_request else set(),
    )


def recompute_failed_loads(scheduler: Any, results: list[PullResult | LoadResult]) -> None:
    """vLLM < 0.30 where failures go by request: do to failed requests what 0.30's scheduler does itself.

    Called while the scheduler reads a step's output, before it handles finished loads: a request marked so is
    freed and matched anew. Such a request is always recomputed; these versions cannot fail it by request.
    """
    for result in results:
        request = scheduler.requests.get(result.request_id)
        if result.failed and request is not None and not request.is_finished():
            request.num_computed_tokens = 0
            scheduler.failed_recving_kv_req_ids.add(result.request_id)


def hit_sources(tokens: dict[str, int]) -> dict[Any, int]:
    """vLLM >= 0.32: where a request's KV came from, in its words; ``tokens`` as ``SchedulerHalf.sources`` has them.
    What is not told vLLM counts as unspecified."""
    if not granted(Feature.HIT_SOURCES):
        return {}
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    words = {
        "host": CacheHitSource.HOST,
        "disk": CacheHitSource.DISK,
        "peer": CacheHitSource.P2P,
        "below": CacheHitSource.EXTERNAL_UNSPECIFIED,
    }
    return {words[source]: count for source, count in tokens.items() if count}
