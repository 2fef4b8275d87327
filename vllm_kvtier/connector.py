"""KVTierConnector: what vLLM sees. A façade: every call goes to the scheduler half or the worker half."""

from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from vllm_kvtier.codecs import choice
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.containment import Containment, contained
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.half import SchedulerHalf
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat import namespace, probe, sleep
from vllm_kvtier.vllm_compat.blocks import BlockPool
from vllm_kvtier.vllm_compat.engine import share_interpreter
from vllm_kvtier.vllm_compat.facts import engine_facts
from vllm_kvtier.vllm_compat.layout import cache_view
from vllm_kvtier.vllm_compat.stats import KVTierPromMetrics, KVTierStats, build
from vllm_kvtier.vllm_compat.types import (
    StepMetadata,
    TransferResults,
    WorkerReport,
    hit_sources,
    recompute_failed_loads,
    transfer_results,
)
from vllm_kvtier.vllm_compat.worker import cache_device, heads, rank_in_engine, shards, wants_host_buffer
from vllm_kvtier.wire.link import link_path
from vllm_kvtier.worker.coded_memory import CodedMemory
from vllm_kvtier.worker.half import StepResults, WorkerHalf
from vllm_kvtier.worker.memory import CacheMemory
from vllm_kvtier.worker.peer_memory import PeerMemory
from vllm_kvtier.worker.views import CacheView
from vllm_kvtier.worker.work import StepWork

logger = get_logger("vllm.kvtier")

_SCHEDULER, _WORKER = "_scheduler", "_worker"  # the halves, by attribute: None in the other process, or if passive


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):
    """What vLLM calls. What each call answers if our code raises: see ``containment``."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        """Raises ConfigError for an option that is unknown or impossible, UnsupportedVLLM if this vLLM cannot do."""
        probe.start(probe.Side.SCHEDULER if role is KVConnectorRole.SCHEDULER else probe.Side.WORKER)
        super().__init__(vllm_config, role, kv_cache_config)
        self.counters = Counters()
        self.containment = Containment(self.counters)
        self._options = KVTierConfig.from_extra_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        for option in ("codec", "wire_codec"):
            choice.check(option, getattr(self._options, option))
        share_interpreter(self._options.switch_interval_ms / 1e3)
        self._facts = engine_facts(vllm_config, kv_cache_config)
        if not self._facts.prefix_caching:
            self._options = self._options.without_prefixes()
        # vLLM before 0.30 takes failed blocks from a worker, but failed requests only from its own scheduler.
        self._marks_failures = TransferResults is None and self._facts.fails_by_request
        self._link = link_path(self._facts.engine_id, self._facts.instance_id)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._step: StepResults = StepResults()
        self._collected: StepMetadata | None = None  # of the step that these are of
        if role is KVConnectorRole.SCHEDULER:
            self._settle_failure_policy(vllm_config.kv_transfer_config)
            namespace.settle_hash_seed(vllm_config)
            if self._facts.unsupported:
                logger.warning("kvtier: %s", self._facts.unsupported)
            elif not self._facts.prefix_caching:
                logger.warning(
                    "kvtier: vLLM's prefix caching is off: nothing is stored, loaded or kept for a next turn; "
                    "prefills are handed off (do_remote_decode, do_remote_prefill)"
                )

    def _settle_failure_policy(self, transfer: Any) -> None:
        """vLLM's own default is "fail" and cannot be told from a user's wish, so ours is an option of ours."""
        ours, theirs = self._options.kv_load_failure_policy, transfer.kv_load_failure_policy
        if ours != theirs:
            logger.info(
                "kvtier: kv_load_failure_policy is %s, as the option in kv_connector_extra_config says; "
                "%s in --kv-transfer-config itself, which is also vLLM's default, is not used",
                ours, theirs,
            )  # fmt: skip
            transfer.kv_load_failure_policy = ours

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether vLLM drops the output in flight of a request that it preempts, so that it ends with its blocks.

        Only for an engine that does nothing but prefill for others. Elsewhere that would cost every preempted request
        its tokens in flight. One that ends without its blocks is not exported, and a prefill that is lost so is
        computed by the engine it was promised to.
        """
        return self._kv_transfer_config.kv_role == "kv_producer"

    # -- scheduler half ------------------------------------------------------------------------------------------------

    @contained(passes=(KVTierError,))
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        pool = BlockPool(gpu_block_pool)
        self._scheduler = SchedulerHalf(self._facts, self._options, self._link, pool, self, self.containment)

    @contained(_SCHEDULER, repair=lambda self, request: self._scheduler.compute(request))
    def on_new_request(self, request: Any) -> None:
        self._scheduler.queued(request)

    @contained(_SCHEDULER, lambda: (0, False), lambda self, request, computed: self._scheduler.compute(request))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._marks_failures and self._scheduler.engine_scheduler is None:
            return self._scheduler.compute(request)  # vLLM would take a load that failed for one that did not
        return self._scheduler.match(request, num_computed_tokens)

    def _fail_load(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.fail_load(request, blocks.get_block_ids(), num_external_tokens)

    @contained(_SCHEDULER, repair=_fail_load)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @contained(_SCHEDULER, dict, lambda self, request, tokens: hit_sources({"peer": tokens}))
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        return hit_sources(self._scheduler.sources(request.request_id, num_external_tokens))

    @contained(
        _SCHEDULER, lambda: StepMetadata(StepWork(-1)), lambda self, output: StepMetadata(self._scheduler.missed_step())
    )
    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return StepMetadata(self._scheduler.begin_step(scheduler_output))

    @contained(_SCHEDULER, again=True)
    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        results = report.results if isinstance(report, WorkerReport) else []
        if self._marks_failures and any(r.failed for r in results):
            again = partial(recompute_failed_loads, self._scheduler.engine_scheduler, results)
            self.containment.insist("recomputing failed loads", again, unsafe=True)
        finished = connector_output.finished_recving
        if results or finished:
            self._scheduler.arrived(results, set(finished or ()))

    @contained(_SCHEDULER, list)
    def take_events(self) -> list[Any]:
        return self._scheduler.take_events()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @contained(_SCHEDULER, lambda: (False, None), lambda self, request, ids: (False, self._scheduler.drop(request)))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request, block_ids)

    @contained(_SCHEDULER, bool, again=True)
    def has_pending_block_frees(self) -> bool:
        return self._scheduler.has_pending_frees()

    @contained(_SCHEDULER)
    def reset_cache(self) -> bool | None:
        return self._scheduler.reset()

    # -- worker half ---------------------------------------------------------------------------------------------------

    @contained()
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._facts.unsupported:
            return
        config, cache_config = self._vllm_config, self._kv_cache_config
        rank, device = rank_in_engine(), cache_device(kv_caches)
        shares = self._options.peer_fetch == "auto" and self._options.store != "off"
        self._worker = WorkerHalf(
            rank,
            f"{self._facts.engine_id}.{self._facts.instance_id}.{rank}",
            self._link,
            list(self._options.nixl_backends),
            self.containment,
            movable=sleep.possible(config),
        )
        if sleep.possible(config):
            sleep.follow(config, self)
        self._worker.register(
            lambda: cache_view(kv_caches, cache_config, config, device),
            self._share,
            lambda view: shards(config, [group.kind for group in view.groups], rank),
            # () where no engine of the node is asked or answered: then nobody may read this process's memory either.
            lambda view: heads(config, view.groups, rank) if shares else (),
        )

    def _share(self, view: CacheView) -> PeerMemory:
        """The cache as peers read it: itself, its mirror in host memory, or encoded."""
        options, config = self._options, self._vllm_config
        codec = choice.resolve(options.wire_codec, self._facts.record_key)
        codecs = choice.by_group(codec, [view.groups])
        if any(each.formats for each in codecs):
            return CodedMemory(view, codecs, codec)
        memory = CacheMemory(view, wants_host_buffer(options.host_buffer, config, view.device))
        memory.wire_codec = codec  # as the option says, though it applies to no group of this cache
        return memory

    @contained(_WORKER)
    def unregister_kv_caches(self) -> None:
        self._worker.sleep()

    @contained(_WORKER)
    def restore_kv_caches(self) -> None:
        self._worker.wake()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """vLLM (0.25.1 to 0.33) calls this before it launches anything of a step's forward, and when it has launched
        all that it does to the step's new blocks."""
        super().bind_connector_metadata(connector_metadata)
        self._begin_step()

    @contained(_WORKER)
    def _begin_step(self) -> None:
        if isinstance(self._connector_metadata, StepMetadata):
            self._worker.begin(self._connector_metadata.work)

    @contained(_WORKER)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads that the step's forward waits for. All else is asynchronous: it starts when the forward has been
        launched, in ``get_finished``."""
        if isinstance(self._connector_metadata, StepMetadata):
            self._worker.hurry(self._connector_metadata.work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers are loaded at once; the device waits, where the forward has to."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are read from the cache itself once complete, not layer by layer."""

    def wait_for_save(self) -> None:
        """Checksums are made on a stream of their own; nothing of the step waits for them."""

    @contained(_WORKER, lambda: (None, None), again=True)
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        metadata = self._connector_metadata
        if metadata is not None and metadata is self._collected:  # called again after an error: it has these results
            return None, self._step.finished or None
        self._step = StepResults()  # whatever happens: no result is reported twice
        work = metadata.work if isinstance(metadata, StepMetadata) else StepWork(-1)
        submit, collect = partial(self._worker.submit, work), self._worker.collect
        self.containment.attempt("submit", submit, repair=submit)
        self._step = self.containment.attempt("collect", collect, repair=collect) or self._step
        self._collected = metadata
        return None, self._step.finished or None

    @contained(again=True)
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        self.get_finished(finished_req_ids)
        return transfer_results(self._step, self._facts.fails_by_request)

    @contained(otherwise=set, again=True)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._facts.fails_by_request else self._step.bad_blocks

    @contained(again=True)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        return WorkerReport(self._step.results) if self._step.results else None

    # -- both --------------------------------------------------------------------------------------------------

    @contained()
    def get_kv_connector_stats(self) -> KVTierStats | None:
        if self._scheduler is not None:
            self._scheduler.end_step()  # vLLM asks once for each step's output that it reads
        counts = self.counters.take()
        return KVTierStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTierStats:
        return build(data)

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues) -> KVTierPromMetrics:
        return KVTierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                self.containment.attempt("shutdown", half.shutdown)
