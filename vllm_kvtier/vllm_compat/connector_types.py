"""Our data in the classes that vLLM sends between its processes, and the form in which each version gets failures."""

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllm_base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.v1.request import RequestStatus

from vllm_kvtier.jobs.results import LoadResult, PullResult, StepResults
from vllm_kvtier.jobs.transfer_jobs import StepWork
from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature

# From vLLM 0.30 on workers report failed requests; before, only failed blocks of models with one group.
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


def results_of(output: Any) -> list[PullResult | LoadResult]:
    """What the workers reported in a step's ``KVConnectorOutput``, or in None."""
    report = getattr(output, "kv_connector_worker_meta", None)
    return report.results if isinstance(report, WorkerReport) else []


def transfer_results(step: StepResults | None = None, by_request: bool = False) -> Any:
    """For vLLM >= 0.30. ``step``: None if nothing ended. ``by_request``: failures are reported by request, as models
    with several groups need, else by block."""
    if step is None:
        return TransferResults(finished_sending=set(), finished_recving=set())
    return TransferResults(
        finished_sending=set(), finished_recving=step.finished, failed_recving=step.failed if by_request else set()
    )


def recompute_failed_loads(scheduler: Any, results: list[PullResult | LoadResult]) -> None:
    """For vLLM < 0.30 with failures by request: mark failed requests as 0.30's scheduler does itself.

    Call while the scheduler reads a step's output, before it handles finished loads: vLLM then frees and matches a
    marked request again. It is always recomputed; these versions cannot fail it by request.
    """
    for result in results:
        request = scheduler.requests.get(result.request_id)
        if result.failed and request is not None and request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            request.num_computed_tokens = 0
            scheduler.failed_recving_kv_req_ids.add(result.request_id)


def hit_sources(tokens: dict[str, int]) -> dict[Any, int]:
    """For vLLM >= 0.32: its names of the sources of a request's KV; ``tokens`` as returned by
    ``KVTierConnectorScheduler.hit_sources``. vLLM counts missing sources as unspecified."""
    if not granted(Feature.HIT_SOURCES):
        return {}
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    names = {
        "host": CacheHitSource.HOST,
        "disk": CacheHitSource.DISK,
        "peer": CacheHitSource.P2P,
        "secondary": CacheHitSource.EXTERNAL_UNSPECIFIED,
    }
    return {names[source]: count for source, count in tokens.items() if count}
