"""Wiring of the scheduler side: what its parts are, and what each of them gets.

``KVTierConnectorScheduler`` has what vLLM calls. The list ``sources`` is the order in which a prompt's KV is
looked for.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from vllm_kvtier.codecs import Codec, choice
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.containment import Containment
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.admin.admin_requests import AdminRequests
from vllm_kvtier.scheduler.admin.gauges import Gauges
from vllm_kvtier.scheduler.admin.store_admin import StoreAdmin
from vllm_kvtier.scheduler.context import BlockGeometry, EngineContext, LoadContext
from vllm_kvtier.scheduler.engine_identity import EngineIdentity
from vllm_kvtier.scheduler.integrity.checksum_clearing import ChecksumClearing
from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumIndex
from vllm_kvtier.scheduler.integrity.load_results import LoadResults
from vllm_kvtier.scheduler.integrity.sync_load import SyncLoad
from vllm_kvtier.scheduler.leases.export_builder import ExportBuilder
from vllm_kvtier.scheduler.leases.exports import ExportTable, LeaseKind
from vllm_kvtier.scheduler.leases.lease_client import LeaseClient
from vllm_kvtier.scheduler.leases.lease_server import LeaseServer, LeaseServerEvents
from vllm_kvtier.scheduler.leases.peer_directory_client import PeerDirectoryClient
from vllm_kvtier.scheduler.leases.prefill_stretches import PrefillStretches
from vllm_kvtier.scheduler.leases.prefix_cache_leases import PrefixCacheLeases
from vllm_kvtier.scheduler.matching.provenance import Provenance
from vllm_kvtier.scheduler.matching.request_matcher import RequestMatcher
from vllm_kvtier.scheduler.offload.block_tables import BlockTables
from vllm_kvtier.scheduler.offload.kv_events import Events
from vllm_kvtier.scheduler.offload.offloader import Offloader
from vllm_kvtier.scheduler.peer_access import PeerAccess
from vllm_kvtier.scheduler.planner.load_planner import LoadPlanner
from vllm_kvtier.scheduler.planner.step_timer import StepTimer
from vllm_kvtier.scheduler.sources.base import KVSource
from vllm_kvtier.scheduler.sources.followed_prefill import FollowedPrefillSource
from vllm_kvtier.scheduler.sources.peer_gpu import PeerGpuSource
from vllm_kvtier.scheduler.sources.prefill_handoff import PrefillHandoffSource
from vllm_kvtier.scheduler.sources.retained_blocks import RetainedBlocksSource
from vllm_kvtier.scheduler.sources.slot_layout import NamespaceIds
from vllm_kvtier.scheduler.sources.store_source import NodeStoreSource
from vllm_kvtier.vllm_compat import weights
from vllm_kvtier.vllm_compat.connector_types import results_of
from vllm_kvtier.vllm_compat.engine_info import BlockIds, EngineInfo
from vllm_kvtier.vllm_compat.hooks import other_connectors, rollback
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
from vllm_kvtier.vllm_compat.hooks.idle_hook import EngineThread
from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature
from vllm_kvtier.wire import link as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.link import LinkServer
from vllm_kvtier.wire.reactor import Reactor

logger = get_logger(__name__)


class SchedulerParts(ABC):
    """The parts, as attributes."""

    # vLLM's scheduler, once ``before_output`` is in it: without that no load may be synchronous.
    _watched: Callable[[], Any] = staticmethod(lambda: None)

    def __init__(
        self,
        info: EngineInfo,
        config: KVTierConfig,
        link_path: str,
        pool: BlockPool,
        connector: Any,
        containment: Containment,
    ):
        """``connector``: the connector that this is one side of. Raises ConfigError if the endpoint cannot listen or
        the cluster key is unusable."""
        self._info, self._config, self._pool = info, config, pool
        self.counters, self._contain = connector.counters, containment
        key = ClusterKey.load(config.cluster_key_file) if config.cluster_key_file else None
        # -- what the engine is
        uses_store = not info.unsupported and config.store != "off"
        self._identity = identity = EngineIdentity(
            config, info, pool.hash_block_size, uses_store, lambda: self._reactor.call_soon(self._access.open_if_ready)
        )
        self._engine = EngineThread(
            self._on_idle,
            containment,
            connector,
            lambda engine: self._meet_scheduler(engine, connector),
        )
        self._reactor = Reactor("kvtier-scheduler")
        self._link = link = LinkServer(self._reactor, link_path, lambda message: self._access.on_message(message))
        self._clearing = ChecksumClearing(lambda message: self._reactor.call_soon(lambda: link.send(message)))
        self._geometry = geometry = BlockGeometry(
            info.groups, pool.hash_block_size, info.whole_blocks, info.draft_lookahead, info.in_flight
        )
        engine = EngineContext(config, info, geometry, pool, self.counters, self._reactor, identity)
        # -- what other engines hold of ours
        self._checksum_index = ChecksumIndex([size for size, _ in info.groups])
        budget = {
            LeaseKind.HANDOFF: int(pool.num_blocks * config.handoff_share),
            LeaseKind.RETAINED: int(pool.num_blocks * config.retain_share),
            LeaseKind.PEER_FETCH: int(pool.num_blocks * config.peer_lease_share),
            LeaseKind.STRETCH: int(pool.num_blocks * config.handoff_share),
        }
        longest = 3 * config.transfer_timeout + config.lease_seconds  # any reader that works ends long before
        align = geometry.alignment // geometry.hash_block_size
        self._exports = ExportTable(geometry.hash_block_size, budget, align=align, longest_lease=longest)
        cache_leases = PrefixCacheLeases(engine, self._engine.scheduler_lock, self._checksum_index, self._exports)
        events = LeaseServerEvents(
            on_freed=self._freed,
            on_question=lambda question, answer: self._questions.ask(question, answer),
            on_serving=lambda active: self._link.send(m.Serve(active)),
            on_puller=lambda request: self._retained.record_puller(request),
            lease_cached=cache_leases.lease,
            lease_stretch=lambda *request: self._stretches.lease(*request),
            on_released=lambda export: self._stretches.release_export(export),
            will_prefill=lambda export: export in self._exporter.queued,
        )
        self._endpoint = LeaseServer(engine, self._exports, key, events)
        identity.address = (self._endpoint.host, self._endpoint.port)
        if info.unsupported:
            self._endpoint.unusable = info.unsupported
        self._exporter = ExportBuilder(
            engine, self._exports, self._checksum_index,
            shared=lambda: self._sharing is not None and self._sharing.active,
            unverified=self._is_unverified,
        )  # fmt: skip
        self._stretches = PrefillStretches(engine, self._engine.scheduler_lock, self._exporter, self._exports)
        # -- load or recompute
        bandwidths = {"host": info.link_bandwidth, "peer_gpu": info.peer_bandwidth}
        self._planner = LoadPlanner(bandwidths, step_tokens=info.step_tokens, known=2)
        self._step_timer = StepTimer(self._planner)
        waits = info.supports_sync_load and config.kv_load_failure_policy != "fail"
        self._sync_load = SyncLoad(
            config.sync_load_ms if waits else 0.0, config.transfer_timeout, pool, lambda: self._watched(),
            connector, self._planner,
        )  # fmt: skip
        # -- sources; the store's answer names the peers whose GPUs are queried next
        self._peers = LeaseClient(
            self._reactor, config, key, lambda: self._access.hello(), identity.reach, info.world_size
        )
        self._peers.steps = lambda: self._exporter.step
        context = LoadContext(
            engine, self._planner, self._checksum_index, self._peers, self._sync_load, NamespaceIds(),
            self._exports.retained_blocks, self._exports.pinned_blocks, lambda: self._engine.admission.draft_blocks(),
        )  # fmt: skip
        peer_gpu, self._retained = PeerGpuSource(context), RetainedBlocksSource(context)
        self._wire_store(context, peer_gpu)
        self._access = PeerAccess(
            engine, self._endpoint, self._store, self._offloader, self._sharing, self._clearing
        )
        handoffs = FollowedPrefillSource(context, self._engine.scheduler_lock), PrefillHandoffSource(context)
        sources: list[KVSource | None] = [*handoffs, self._store, peer_gpu, self._retained]
        self._matcher = RequestMatcher(context, [source for source in sources if source is not None])
        self._outcomes = LoadResults(context, self._matcher, self._step_timer, containment, self._form)
        # -- what requests fill, and questions about it
        offload = self._offloader is not None and self._offloader.wanted()
        self._tables = BlockTables(
            info.groups, geometry.hash_block_size, self._checksum_index.remove,
            lambda state: self._provenance.is_admitted(state) and (offload or self._exporter.checksums(state)),
            None if info.group_ids is None else self._followed,
        )  # fmt: skip
        self._tables.rewritten = max(0, info.draft_lookahead - 1)
        encoder_is_empty = (lambda: weights.encoder_is_empty(self.engine_scheduler)) if info.multimodal else None
        self._provenance = Provenance(pool, info.prefix_caching, encoder_is_empty, info.keeps_sessions)
        self._gauges = Gauges(context, self._matcher, self._exports, self._store, self._offloader)
        self._questions = AdminRequests(
            context, self._exports, self._matcher, self._store_admin, self._offloader, self._engine.wake
        )
        identity.start(self._engine.wake)
        self._start()

    def _meet_scheduler(self, scheduler: Any, connector: Any) -> None:
        """vLLM's scheduler is known, before it has the first request."""
        rollback.set_failure_policy(scheduler, self._config.kv_load_failure_policy)
        self._only_connector = rollback.serves(scheduler, connector)
        if self._only_connector and self._sync_load.possible:
            rollback.before_output(scheduler, self._contain, self._engine.scheduler_lock.held(self._verify))
            self._watched = weakref.ref(scheduler)
        if other := other_connectors.handing_off(scheduler, connector):
            self._exporter.exports = self._matcher.hands_off_alone = False
            logger.info(
                "kvtier: connector: in this MultiConnector hand-offs are left to %s; ours only stores and loads", other
            )

    def _verify(self, output: Any) -> None:
        """vLLM is about to read the output of a step that waited for a load. ``output``: of the workers, or None."""
        self._sync_load.verify(results_of(output), self._info.world_size)

    def _followed(self, block_ids: BlockIds) -> BlockIds:
        """Of new blocks by vLLM's groups, those of the groups that we follow. The others' get new content too."""
        for ids in self._info.left_out(block_ids):
            self._checksum_index.remove(ids)
        return self._info.followed(block_ids)

    def _wire_store(self, context: LoadContext, peer_gpu: PeerGpuSource) -> None:
        """The node store, and what it brings: offloading, KV events, the other engines of the node."""
        engine, info, config, wake = context.engine, context.engine.info, context.engine.config, self._engine.wake
        self._store: NodeStoreSource | None = None
        self._events: Events | None = None
        self._sharing: PeerDirectoryClient | None = None
        self._offloader: Offloader | None = None
        self._store_admin: StoreAdmin | None = None
        if info.unsupported or config.store == "off":
            return
        groups, hash_block_size = info.groups, engine.geometry.hash_block_size
        if engine.states_within_blocks:
            logger.warning(
                "kvtier: store: nothing is stored, and other engines copy only what is exported: hashes are of %d "
                "tokens, and vLLM keeps states within their blocks. Leave out --prefix-match-unit, and drafts with "
                "smaller blocks", hash_block_size,
            )  # fmt: skip
        if info.kv_events_enabled:
            self._events = Events(groups, hash_block_size, self._reactor, wake)
        if config.peer_fetch == "auto" and granted(Feature.PEER_FETCH) and info.supports_partial_prefix:
            identity = engine.identity
            self._sharing = PeerDirectoryClient(
                self._checksum_index, identity.content_keys, groups, hash_block_size, identity.instance, wake
            )
        send = self._link.send
        self._store = NodeStoreSource(context, send, self._store_lost, peer_gpu, self._sharing, self._events)
        self._store_admin = StoreAdmin(self._store)
        self._offloader = Offloader(engine, self._store, send, wake, self._is_unverified, self._events)

    def _is_unverified(self, block_hash: bytes) -> bool:
        return self._sync_load.is_unverified(block_hash)

    @abstractmethod
    def _start(self) -> None:
        """All parts exist: hook into vLLM and start the reactor."""

    @abstractmethod
    def _on_idle(self) -> None:
        """The engine is idle, or was woken (scheduler's thread)."""

    @property
    def engine_scheduler(self) -> Any | None:
        return self._engine.scheduler

    def _form(self, kind: str) -> str:
        """The codecs of a load, fetch or pull, for the metrics."""
        if kind == "load" and self._store is not None:
            return choice.names(self._store.codecs)
        return Codec.RAW if kind == "fetch" else choice.names([self._identity.wire_codec])

    # -- reactor's thread --------------------------------------------------------------------------------------

    def _freed(self) -> None:
        """Exports or leases ended (reactor's thread): unpin their blocks."""
        if self._engine.scheduler_lock.known:
            self._engine.scheduler_lock.run_when_free(self._exporter.drain)
        else:
            self._engine.wake()

    def _store_lost(self) -> None:
        """Cancel copies: what was reserved there may be another engine's now."""
        self.counters.count("store_disconnects")
        if self._offloader is not None:
            self._offloader.jobs.lost()
