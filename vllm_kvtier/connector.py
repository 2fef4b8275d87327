"""KVTierConnector: vLLM's interface of this package. It forwards every call to the scheduler side or the worker side.

On vLLM's scheduler thread and the model runner's thread. Only vLLM imports this module.
"""

import sys
import time
from functools import partial
from typing import Any

import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA

from vllm_kvtier.codecs import choice
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.containment import Containment, contained
from vllm_kvtier.errors import ConfigError, KVTierError
from vllm_kvtier.jobs.results import StepResults
from vllm_kvtier.jobs.transfer_jobs import StepWork
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.connector_scheduler import KVTierConnectorScheduler
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat import namespace, sleep
from vllm_kvtier.vllm_compat.connector_types import (
    StepMetadata,
    TransferResults,
    WorkerReport,
    hit_sources,
    recompute_failed_loads,
    results_of,
    transfer_results,
)
from vllm_kvtier.vllm_compat.engine_info import engine_info
from vllm_kvtier.vllm_compat.hooks import local_hits, mm_embeddings
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
from vllm_kvtier.vllm_compat.hooks.interpreter import SwitchInterval
from vllm_kvtier.vllm_compat.hooks.step_pause import end_pause
from vllm_kvtier.vllm_compat.layout.context_parallel import context_shard
from vllm_kvtier.vllm_compat.layout.kv_layout import cache_view
from vllm_kvtier.vllm_compat.layout.token_scale import make_scale_views
from vllm_kvtier.vllm_compat.probe import features
from vllm_kvtier.vllm_compat.stats import KVTierPromMetrics, KVTierStats, build
from vllm_kvtier.vllm_compat.worker_info import (
    cache_device,
    from_first_rank,
    heads,
    in_last_stage,
    rank_in_engine,
    ranks_on_node,
    shards,
    spans_nodes,
    wants_host_buffer,
)
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.dealer import endpoint_of
from vllm_kvtier.wire.link import LinkPlace, LinkRelay, link_path
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.connector_worker import KVTierConnectorWorker
from vllm_kvtier.worker.context import CacheSetup
from vllm_kvtier.worker.nixl_pull.encoded_memory import EncodedMemory
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory
from vllm_kvtier.worker.nixl_pull.nixl_transport import UcxLimits
from vllm_kvtier.worker.nixl_pull.peer_memory import PeerMemory
from vllm_kvtier.worker.peer_fetch.process_memory import node_name
from vllm_kvtier.worker.store.store_worker import NextLaunch

logger = get_logger(__name__)

_SCHEDULER, _WORKER = "_scheduler", "_worker"  # attributes of the two sides: None in the other process, or if passive
_STEP = "_step"  # attribute: None if nothing ended in the last step


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):
    """``containment`` defines what each call returns to vLLM if our code raises."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        """Raises ConfigError for an option that is unknown or impossible, UnsupportedVLLM for this version of vLLM."""
        features.start(features.Side.SCHEDULER if role is KVConnectorRole.SCHEDULER else features.Side.WORKER)
        super().__init__(vllm_config, role, kv_cache_config)
        self.counters = Counters()
        self.containment = Containment(self.counters)
        self._options = KVTierConfig.from_extra_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        for option in ("codec", "wire_codec"):
            choice.check(option, getattr(self._options, option))
        SwitchInterval.lower(self._options.switch_interval_ms / 1e3)
        self._info = engine_info(vllm_config, kv_cache_config)
        idle = self._options.without_effect()
        if not self._info.prefix_caching:
            self._options = self._options.without_prefixes()
        # vLLM before 0.30 takes failed blocks from workers, but failed requests only from its own scheduler.
        self._marks_failures = TransferResults is None and self._info.reports_failed_requests
        self._link = ""  # path of the socket between both sides; "": there can be none, and this process has no side
        try:
            self._link = link_path(self._info.engine_id, self._info.instance_id)
        except KVTierError as error:
            logger.warning("kvtier: connector: disabled (%s): KV is neither pulled, stored nor loaded", error)
        self._scheduler: KVTierConnectorScheduler | None = None
        self._worker: KVTierConnectorWorker | None = None
        self._relay: LinkRelay | None = None
        self._step: StepResults | None = None  # of the last step, if anything ended in it
        self._collected: StepMetadata | None = None  # of the step that ``_step`` has the results of
        self._limits_hits = False
        self._drafts = False  # whether drafts of a step may write KV behind its forward
        self._saved: StepMetadata | None = None  # of the step whose KV is all launched
        self._caught: BaseException | None = None  # that a caller handles while the step runs
        self._ended = 0  # number of the last step that ended
        self._lost = False  # whether a step before it did not
        if role is KVConnectorRole.SCHEDULER:
            local_hits.require_all_groups(kv_cache_config)
            mm_embeddings.warn(vllm_config)
            self._set_failure_policy(vllm_config.kv_transfer_config)
            if idle and self._info.prefix_caching:
                logger.warning(
                    "kvtier: connector: this engine starts no node store (store: %s); without effect: %s",
                    self._options.store, ", ".join(idle),
                )  # fmt: skip
            namespace.fix_hash_seed(vllm_config)
            if self._info.unsupported:
                logger.warning("kvtier: connector: disabled (%s)", self._info.unsupported)
            elif not self._info.prefix_caching:
                logger.warning(
                    "kvtier: connector: vLLM's prefix caching is off; KV is neither stored, loaded nor retained; "
                    "hand-offs of prefills work (do_remote_decode, do_remote_prefill)"
                )

    def _set_failure_policy(self, transfer: Any) -> None:
        """Replace vLLM's kv_load_failure_policy by our option: vLLM's default "fail" looks like a user's choice."""
        ours, theirs = self._options.kv_load_failure_policy, transfer.kv_load_failure_policy
        if ours != theirs:
            logger.info(
                "kvtier: connector: kv_load_failure_policy=%s from kv_connector_extra_config; %s of "
                "--kv-transfer-config, or its default, is ignored",
                ours, theirs,
            )  # fmt: skip
            transfer.kv_load_failure_policy = ours

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether vLLM drops the output in flight of a request that it preempts, so that it ends with its blocks.

        Only for a prefill engine. Elsewhere every preempted request would lose its tokens in flight. There a request
        that ends without its blocks is not exported, and the decode engine recomputes its prefill.
        """
        return self._kv_transfer_config.kv_role == "kv_producer"

    # -- scheduler side ------------------------------------------------------------------------------------------------

    @contained(passes=(KVTierError,))
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        if vars(gpu_block_pool).setdefault("_kvtier", self) is not self:
            # Each would pin its blocks under a lock of its own, and the workers of both would answer the second one.
            raise ConfigError("an engine, or a MultiConnector, takes one KVTierConnector, which has all tiers and P/D")
        if not self._link:
            return
        pool = BlockPool(gpu_block_pool, self._info.group_ids, [size for size, _ in self._info.groups])
        self._scheduler = KVTierConnectorScheduler(self._info, self._options, self._link, pool, self, self.containment)

    @contained(passes=(KVTierError,))
    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._info.brings_states and features.granted(features.Feature.LOCAL_HITS):
            local_hits.limit(kv_cache_manager, self._longest_local_hit)
            self._limits_hits = True

    @contained(_SCHEDULER, int)
    def _longest_local_hit(self, request: Any) -> int:
        return self._scheduler.longest_local_hit(request)

    @property
    @contained(otherwise=bool)
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """Whether vLLM may look for attention's own hits: see ``vllm_compat.hooks.local_hits``."""
        return self._limits_hits

    @contained(_SCHEDULER, repair=lambda self, request: self._scheduler.compute(request))
    def on_new_request(self, request: Any) -> None:
        if not self._scheduler.has_requests:  # else stores would wait for each in a long step
            NextLaunch.since = time.monotonic()
        self._scheduler.on_new_request(request)

    @contained(_SCHEDULER, lambda: (0, False), lambda self, request, computed: self._scheduler.compute(request))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._marks_failures and self._scheduler.engine_scheduler is None:
            return self._scheduler.compute(request)  # vLLM would take a failed load for a good one
        return self._scheduler.match(request, num_computed_tokens)

    def _fail_load(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.fail_load(request, self._info.followed(blocks.get_block_ids()), num_external_tokens)

    @contained(_SCHEDULER, repair=_fail_load)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, self._info.followed(blocks.get_block_ids()), num_external_tokens)

    @contained(_SCHEDULER, tuple)
    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """The groups whose new blocks vLLM (0.32 on) need not clear for the load that was just offered."""
        return self._scheduler.filled_groups(request.request_id)

    @contained(_SCHEDULER, dict, lambda self, request, tokens: hit_sources({"peer": tokens}))
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        return hit_sources(self._scheduler.hit_sources(request.request_id, num_external_tokens))

    @contained(
        _SCHEDULER,
        lambda: StepMetadata(StepWork(-1)),
        lambda self, output: StepMetadata(self._scheduler.missed_step(output)),
    )
    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        work = self._scheduler.begin_step(scheduler_output)
        sys.setswitchinterval(SwitchInterval.short)
        return StepMetadata(work)

    @contained(_SCHEDULER, again=True)
    def update_connector_output(self, connector_output: Any) -> None:
        # Mostly None: a call less in each step.
        results = [] if connector_output.kv_connector_worker_meta is None else results_of(connector_output)
        if self._marks_failures and any(r.failed for r in results):
            again = partial(recompute_failed_loads, self._scheduler.engine_scheduler, results)
            self.containment.insist("recomputing failed loads", again, unsafe=True)
        finished = connector_output.finished_recving
        if finished:
            end_pause()  # their requests can be scheduled
        if results or finished:
            self._scheduler.arrived(results, set(finished or ()))

    @contained(_SCHEDULER, list)
    def take_events(self) -> list[Any]:
        return self._scheduler.take_events() if self._info.kv_events_enabled else []

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @contained(_SCHEDULER, lambda: (False, None), lambda self, request, ids: (False, self._scheduler.release(request)))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self._scheduler.finished(request, self._info.followed(block_ids))

    @contained(_SCHEDULER, bool, again=True)
    def has_pending_block_frees(self) -> bool:
        return self._scheduler.frees_blocks()

    @contained(_SCHEDULER, bool)
    def has_pending_push_work(self) -> bool:
        """Whether vLLM is to step on, and not to end, without requests."""
        return self._scheduler.waits_for_loads() or self._scheduler.waits_for_readers()

    @contained(_SCHEDULER)
    def reset_cache(self) -> bool | None:
        return self._scheduler.reset()

    # -- worker side ---------------------------------------------------------------------------------------------------

    @contained()
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        config, cache_config = self._vllm_config, self._kv_cache_config
        link = self._find_link() if spans_nodes(config) else LinkPlace(self._link)
        if link is None or not link.endpoint or self._info.unsupported:
            return
        make_scale_views(kv_caches, config)
        rank, device = rank_in_engine(), cache_device(kv_caches)
        shard = context_shard(config.parallel_config)
        self._drafts = self._info.speculates and in_last_stage()
        self._worker = KVTierConnectorWorker(
            rank,
            f"{self._info.engine_id}.{self._info.instance_id}.{rank}",
            link,
            list(self._options.nixl_backends),
            self.containment,
            UcxLimits(sleep.possible(config), loopback=self._options.cluster_key_file is None),
        )
        if sleep.possible(config):
            sleep.follow(config, self)
        setup = CacheSetup(
            lambda: cache_view(kv_caches, cache_config, config, device, shard),
            self._share,
            lambda view: shards(config, [group.kind for group in view.groups], rank, shard),
            lambda view: heads(config, view.groups, rank),
            shares=self._options.peer_fetch == "auto",
        )
        self._worker.register(setup)

    def _find_link(self) -> LinkPlace | None:
        """The way to the scheduler side, which is on the first rank's node, of an engine that may be on several nodes.
        On another one the ids that its path is made of may be others. None: there is no way.

        All ranks must come here: each waits for the first one.
        """
        key, offer = None, ("", "", "")
        try:
            if self._options.cluster_key_file:
                key = ClusterKey.load(self._options.cluster_key_file)
            if rank_in_engine() == 0 and self._link and not self._info.unsupported:
                offer = node_name(), self._link, self._open_relay(key)
        except KVTierError as error:
            logger.warning("kvtier: worker: not set up: %s", error)
        finally:
            node, path, relay = from_first_rank(offer)
        if node == node_name():
            return LinkPlace(path)
        if relay and key is not None:
            return LinkPlace(relay, key)
        if node:
            logger.warning(
                "kvtier: worker: not set up: an engine over several nodes needs cluster_key_file on each of them, and "
                "an endpoint_host that the first one can listen on"
            )
        return None

    def _open_relay(self, key: ClusterKey | None) -> str:
        """Its endpoint; "" without a key, or if it cannot listen. Only workers of other nodes need it."""
        host = self._options.endpoint_host
        if key is None:
            return ""
        try:
            self._relay = LinkRelay(self._link, host, key)
        except zmq.ZMQError as error:
            logger.warning("kvtier: worker: no workers of other nodes can connect to %s: %s", host, error)
            return ""
        return endpoint_of(self._options.advertise_host or host, self._relay.port)

    def _share(self, view: CacheView) -> PeerMemory:
        """The cache as peers read it: raw, mirrored in host memory, or encoded."""
        options, config = self._options, self._vllm_config
        codec = choice.resolve(options.wire_codec, self._info.record_key)
        codecs = choice.by_group(codec, [view.groups])
        ranks = ranks_on_node(self._info.world_size, view.device)
        if any(each.formats for each in codecs):
            return EncodedMemory(view, codecs, codec, ranks)
        memory = CacheMemory(view, wants_host_buffer(options.host_buffer, config, view.device), ranks)
        memory.wire_codec = codec  # the option's value, even if it applies to no group of this cache
        return memory

    @contained(_WORKER)
    def unregister_kv_caches(self) -> None:
        self._worker.suspend()

    @contained(_WORKER)
    def restore_kv_caches(self) -> None:
        self._worker.resume()

    @contained(again=True)
    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """vLLM (0.25.1 to 0.33) calls this before it launches a step's forward, and after it launched all kernels that
        initialize the step's new blocks."""
        super().bind_connector_metadata(connector_metadata)
        self._caught = sys.exc_info()[1]
        if self._worker is not None and isinstance(connector_metadata, StepMetadata):
            if connector_metadata.work.step > self._ended + 1:  # vLLM raised before it called this for a step
                self._lose_step()
            self._worker.begin(connector_metadata.work)

    @contained(_WORKER)
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin synchronous loads, which the step's forward waits for. ``get_finished`` begins all others, when the
        forward has been launched."""
        if isinstance(self._connector_metadata, StepMetadata):
            work = self._connector_metadata.work
            if work.loads or work.fetches:
                self._worker.sync_load(work)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: all layers are loaded at once, and the device waits for synchronous loads."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: complete blocks are read from the cache, not layer by layer."""

    @contained(_WORKER)
    def wait_for_save(self) -> None:
        """All of the step's KV is launched. Checksums and stores run on streams of their own, and no step waits for
        them. vLLM calls this before it collects results; if it speculates, behind the drafts of the step."""
        self._saved = self._connector_metadata
        if self._worker.drafting is not None:
            self._worker.drafted()

    @contained(_WORKER, lambda: (None, None), again=True)
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._end_step()
        return None, (self._step.finished or None) if self._step is not None else None

    @contained(_WORKER, transfer_results, again=True)
    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        self._end_step()
        if self._step is None:
            return transfer_results()
        return transfer_results(self._step, self._info.reports_failed_requests)

    def _end_step(self) -> None:
        metadata = self._connector_metadata
        if metadata is not None and metadata is self._collected:  # called again after an error: vLLM has these results
            return
        self._step = None  # even after an error no result is reported twice
        work = metadata.work if isinstance(metadata, StepMetadata) else StepWork(-1)
        # The forward raised: vLLM collects nevertheless, and ends. What it was to write is no KV: it must not get into
        # a store, which outlives the engine, or to peers. If a program goes on, its next step gets the loads' results.
        raised = sys.exc_info()[1] is not self._caught
        if raised:
            self._lose_step()
        if self._lost:  # vLLM had scheduled, and runs, more steps: they read the failed one's blocks
            work.step, work.checksums = -1, []
        if raised:
            self._worker.submit(work)
            return
        self._ended = max(self._ended, work.step)
        drafts_follow = self._drafts and self._saved is not metadata and not work.idle
        self._step = self._worker.end_step(work, drafts_follow)
        self._collected = metadata
        if self._step is not None and self._step.finished:
            end_pause()  # vLLM's scheduler hears of them in the next step

    def _lose_step(self) -> None:
        if not self._lost:
            logger.warning(
                "kvtier: vLLM failed in step %d: until it is restarted, this engine neither stores nor loads, and"
                " others cannot pull what it computes", self._ended + 1,
            )  # fmt: skip
            self._lost = True
            self._worker.lose_step()

    @contained(_STEP, set, again=True)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._info.reports_failed_requests else self._step.bad_blocks

    @contained(_STEP, again=True)
    def build_connector_worker_meta(self) -> WorkerReport | None:
        return WorkerReport(self._step.results) if self._step.results else None

    # -- both --------------------------------------------------------------------------------------------------

    @contained()
    def get_kv_connector_stats(self) -> KVTierStats | None:
        # vLLM calls this once for each step's output.
        due = self._scheduler is None or self._scheduler.end_step()
        return KVTierStats(data=self.counters.take()) if due and self.counters.changed else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTierStats:
        return build(data)

    @classmethod
    def build_prom_metrics(cls, vllm_config, metric_types, labelnames, per_engine_labelvalues) -> KVTierPromMetrics:
        return KVTierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        for side in (self._scheduler, self._worker, self._relay):
            if side is not None:
                self.containment.attempt("shutdown", side.shutdown)
