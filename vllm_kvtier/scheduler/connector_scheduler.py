"""Connector scheduler: wires matching, exports, the lease server and the lease client to vLLM's calls.

Two threads: vLLM's scheduler thread, which owns block tables and the pool, and a reactor with all sockets. They meet in
``ExportTable`` (locked), in queued calls, and in the answers to lookups. The scheduler thread waits for some
milliseconds for a source that answers soon, and when vLLM resets its prefix cache.
"""

import functools
import time
from collections.abc import Sequence
from typing import Any

from vllm_kvtier.codecs import Codec, choice
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.containment import Containment
from vllm_kvtier.jobs.results import Result
from vllm_kvtier.jobs.transfer_jobs import ChecksumJob, FailedJob, StepWork
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.admin.admin_requests import AdminRequests
from vllm_kvtier.scheduler.admin.gauges import Gauges
from vllm_kvtier.scheduler.admin.store_admin import StoreAdmin
from vllm_kvtier.scheduler.context import BlockGeometry, EngineContext, LoadContext
from vllm_kvtier.scheduler.engine_identity import EngineIdentity
from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumIndex
from vllm_kvtier.scheduler.integrity.load_results import LoadResults
from vllm_kvtier.scheduler.integrity.sync_load import SyncLoad
from vllm_kvtier.scheduler.leases.export_builder import RESERVE_PER_REQUEST, ExportBuilder
from vllm_kvtier.scheduler.leases.exports import ExportTable, LeaseKind
from vllm_kvtier.scheduler.leases.lease_client import LeaseClient
from vllm_kvtier.scheduler.leases.lease_server import LeaseServer, LeaseServerEvents
from vllm_kvtier.scheduler.leases.peer_directory_client import PeerDirectoryClient
from vllm_kvtier.scheduler.leases.prefill_stretches import PrefillStretches
from vllm_kvtier.scheduler.leases.prefix_cache_leases import PrefixCacheLeases
from vllm_kvtier.scheduler.matching.provenance import Provenance
from vllm_kvtier.scheduler.matching.request_lifecycle import State
from vllm_kvtier.scheduler.matching.request_matcher import RequestMatcher
from vllm_kvtier.scheduler.matching.transfer_params import read, write, write_report
from vllm_kvtier.scheduler.offload.block_tables import BlockTables
from vllm_kvtier.scheduler.offload.kv_events import Events
from vllm_kvtier.scheduler.offload.offloader import Offloader
from vllm_kvtier.scheduler.peer_access import PeerAccess
from vllm_kvtier.scheduler.planner.load_planner import LoadPlanner
from vllm_kvtier.scheduler.planner.step_timer import StepTimer
from vllm_kvtier.scheduler.sources.base import Job, KVSource
from vllm_kvtier.scheduler.sources.followed_prefill import FollowedPrefillSource
from vllm_kvtier.scheduler.sources.node_store import NodeStoreSource
from vllm_kvtier.scheduler.sources.peer_gpu import PeerGpuSource
from vllm_kvtier.scheduler.sources.prefill_handoff import PrefillHandoffSource
from vllm_kvtier.scheduler.sources.remote_store import RemoteStoreSource, store_bandwidth, uses_remote_store
from vllm_kvtier.scheduler.sources.retained_blocks import RetainedBlocksSource
from vllm_kvtier.scheduler.sources.slot_layout import NamespaceIds
from vllm_kvtier.scheduler.sources.store_source import StoreSource
from vllm_kvtier.vllm_compat import kv_events as vllm_events
from vllm_kvtier.vllm_compat import weights
from vllm_kvtier.vllm_compat.engine_info import BlockIds, EngineInfo
from vllm_kvtier.vllm_compat.hooks import rollback
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
from vllm_kvtier.vllm_compat.hooks.idle_hook import EngineThread
from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.link import LinkServer
from vllm_kvtier.wire.reactor import Reactor

logger = get_logger(__name__)

# A reset of vLLM's prefix cache waits so long for peers to release their leases, and as long again for copies to the
# node store to end; both take milliseconds. A store that hangs is given up after ``lookup_timeout``.
RESET_WAIT_SECONDS = 1.0
# Between two reports of what was counted: vLLM sends each to another process, and metrics are not scraped more often.
REPORT_SECONDS = 0.25
IDLE_EVENT_BATCHES = 4  # batches of KV events that an idle engine publishes in one go


class KVTierConnectorScheduler:
    _report_at = 0.0  # when vLLM next gets what was counted

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
        containment.on_limit = self._become_passive
        self._passive = False
        key = ClusterKey.load(config.cluster_key_file) if config.cluster_key_file else None
        # -- what the engine is
        uses_store = not info.unsupported and (config.store != "off" or uses_remote_store(config))
        self._identity = identity = EngineIdentity(
            config, info, pool.hash_block_size, uses_store, lambda: self._reactor.call_soon(self._access.open_if_ready)
        )
        self._engine = EngineThread(
            self._on_idle,
            containment,
            connector,
            lambda engine: rollback.set_failure_policy(engine, config.kv_load_failure_policy),
        )
        self._reactor = Reactor("kvtier-scheduler")
        self._link = LinkServer(self._reactor, link_path, lambda message: self._access.on_message(message))
        left_behind = bool(info.left_behind)
        geometry = BlockGeometry(info.groups, pool.hash_block_size, left_behind, info.draft_lookahead)
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
            on_dropped=lambda export: self._stretches.drop(export),
        )
        self._endpoint = LeaseServer(engine, self._exports, key, events)
        identity.address = (self._endpoint.host, self._endpoint.port)
        if info.unsupported:
            self._endpoint.unusable = info.unsupported
        self._exporter = ExportBuilder(
            engine, self._exports, self._checksum_index,
            shared=lambda: self._sharing is not None and self._sharing.active,
        )  # fmt: skip
        self._stretches = PrefillStretches(engine, self._engine.scheduler_lock, self._exporter, self._exports)
        # -- load or recompute
        bandwidths = {"host": store_bandwidth(config, info), "peer_gpu": info.peer_bandwidth}
        self._planner = LoadPlanner(bandwidths, step_tokens=info.step_tokens, known=2)
        self._step_timer = StepTimer(self._planner)
        waits = info.supports_sync_load and not uses_remote_store(config)
        waits = waits and info.groups[0][0] == geometry.hash_block_size
        self._sync_load = SyncLoad(
            config.sync_load_ms if waits else 0.0, config.transfer_timeout, pool, lambda: self._engine.scheduler,
            connector, self._planner,
        )  # fmt: skip
        # -- sources; the store's answer names the peers whose GPUs are queried next
        self._peers = LeaseClient(
            self._reactor, config, key, lambda: self._access.hello(), identity.reach, info.world_size
        )
        context = LoadContext(engine, self._planner, self._checksum_index, self._peers, self._sync_load, NamespaceIds())
        peer_gpu, self._retained = PeerGpuSource(context), RetainedBlocksSource(context)
        self._wire_store(context, peer_gpu)
        self._access = PeerAccess(engine, self._endpoint, self._store, self._offloader, self._sharing)
        handoffs = FollowedPrefillSource(context), PrefillHandoffSource(context)
        sources: list[KVSource | None] = [*handoffs, self._store, peer_gpu, self._retained]
        self._matcher = RequestMatcher(context, [source for source in sources if source is not None])
        self._outcomes = LoadResults(context, self._matcher, self._step_timer, containment, self._form)
        # -- what requests fill, and questions about it
        offload = self._offloader is not None and self._offloader.wanted()
        self._tables = BlockTables(
            info.groups, geometry.hash_block_size, self._checksum_index.forget,
            lambda state: self._provenance.is_admitted(state) and (offload or self._exporter.checksums(state)),
            None if info.group_ids is None else self._followed,
        )  # fmt: skip
        self._tables.rewritten = max(0, info.draft_lookahead - 1)
        encoder_is_empty = (lambda: weights.encoder_is_empty(self.engine_scheduler)) if info.multimodal else None
        self._provenance = Provenance(pool, info.prefix_caching, encoder_is_empty)
        self._gauges = Gauges(context, self._matcher, self._exports, self._store, self._offloader)
        self._questions = AdminRequests(
            context, self._exports, self._matcher, self._store_admin, self._offloader, self._engine.wake
        )
        identity.start(self._engine.wake)
        pool.around_reset(self._before_reset, self._after_reset, containment)
        weights.watch(self)
        self._reactor.start()

    def _followed(self, block_ids: BlockIds) -> BlockIds:
        """Of new blocks by vLLM's groups, those of the groups that we follow. The others' get new content too."""
        for ids in self._info.left_out(block_ids):
            self._checksum_index.forget(ids)
        return self._info.followed(block_ids)

    def _wire_store(self, context: LoadContext, peer_gpu: PeerGpuSource) -> None:
        """The node store, and what it brings: offloading, KV events, the other engines of the node. Or other nodes'."""
        engine, info, config, wake = context.engine, context.engine.info, context.engine.config, self._engine.wake
        self._store: StoreSource | None = None
        self._events: Events | None = None
        self._sharing: PeerDirectoryClient | None = None
        self._offloader: Offloader | None = None
        self._store_admin: StoreAdmin | None = None
        if info.unsupported:
            return
        if uses_remote_store(config):
            self._store = RemoteStoreSource(context, self._link.send)
        if config.store == "off":
            return
        groups, hash_block_size = info.groups, engine.geometry.hash_block_size
        if info.kv_events_enabled:
            self._events = Events(groups, hash_block_size, self._reactor, wake)
        if config.peer_fetch == "auto" and granted(Feature.PEER_FETCH) and info.supports_partial_prefix:
            identity = engine.identity
            self._sharing = PeerDirectoryClient(
                self._checksum_index, identity.content_keys, groups, hash_block_size, identity.instance, wake
            )
        send, verified = self._link.send, lambda: not self._sync_load.verification_pending
        node_store = NodeStoreSource(context, send, self._store_lost, peer_gpu, self._sharing, self._events)
        self._store, self._store_admin = node_store, StoreAdmin(node_store)
        self._offloader = Offloader(engine, node_store, send, wake, verified, self._events)

    # -- vLLM's calls (scheduler's thread) ---------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """vLLM will schedule a request. Send its lookup; and if others are before it, have the store promote its
        blocks. A prefill for another engine ends where that one can go on."""
        if not (self._info.unsupported or self._passive or self._access.closed):
            self._exporter.prepare(request)
        if self._store is None or self._info.unsupported or self._passive or not self._provenance.would_admit(request):
            return
        if len(self._matcher):
            self._matcher.prefetch_promotion(request)
        self._matcher.prefetch_lookup(request)

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        if self._passive:
            return self.compute(request)
        self._identity.resolve_namespace()
        if self._questions.waiting or self.has_pending_frees():
            self._run_jobs()
        if self._info.unsupported:
            return 0, False
        admitted = self._provenance.admit(request, self._identity.namespace is not None)
        if not admitted:
            # vLLM's prefix cache has blocks that are not verified yet: see ``SyncLoad``.
            if admitted is None or self._sync_load.verification_pending:
                return None, False
            self._matcher.release_all(request)
            return 0, False
        tokens, asynchronous = self._matcher.match(request, computed)
        if tokens is not None:
            self._free_blocks(self._exporter.needed(request.num_tokens - computed))
        return tokens, asynchronous

    def longest_local_hit(self, request: Any) -> int:
        """See ``RequestMatcher.longest_local_hit``."""
        unused = self._passive or self._info.unsupported or not self._provenance.would_admit(request)
        return 0 if unused else self._matcher.longest_local_hit(request)

    def compute(self, request: Any) -> tuple[int | None, bool]:
        """In place of ``match`` after an exception in our code: release all that the request holds."""
        self._provenance.refuse(request)
        self._release_all(request.request_id)
        # vLLM's prefix cache has blocks that are not verified yet: no other request may use them.
        return (None, False) if self._sync_load.verification_pending else (0, False)

    def _release_all(self, request_id: str, gone: bool = False) -> None:
        for step in self._matcher.release_steps(request_id, gone):
            self._contain.attempt("release", step)

    def _free_blocks(self, needed: int) -> None:
        """vLLM needs ``needed`` blocks: end exports, then cancel copies, that hold some."""
        if needed > self._pool.free_count():
            self._exporter.release_for_requests(needed)
            short = needed - self._pool.free_count()
            if short > 0 and self._offloader is not None:
                self._offloader.cancel_for_requests(short)

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], external: int) -> None:
        if not self._info.unsupported:
            self._matcher.allocated(request, block_ids, external)
            state = self._matcher.get(request.request_id)
            if external and state is not None and state.hit is not None:
                state.hit.source.on_allocated(state, external)

    def fail_load(self, request: Any, block_ids: tuple[list[int], ...], external: int) -> None:
        """``allocated`` failed. If vLLM counts on a load, the workers report that it failed."""
        if external > 0:
            self._matcher.fail_load(request, block_ids, external)
        else:
            self._release_all(request.request_id)

    def hit_sources(self, request_id: str, tokens: int) -> dict[str, int]:
        """As ``KVSource.hit_sources``, for ``tokens`` tokens that this request loads."""
        state = self._matcher.get(request_id)
        if state is None or state.hit is None:
            return {"peer": tokens}
        return state.hit.source.hit_sources(state, tokens)

    def begin_step(self, output: Any) -> StepWork:
        """The work of a step. vLLM counts on the loads, whatever else raises.

        In most steps of a busy engine nothing happens for us, and each call of a part costs the step time.
        """
        attempt, synchronous = self._contain.attempt, self._sync_load.verification_pending
        if self._questions.waiting or self.has_pending_frees():
            attempt("jobs", self._run_jobs)
        if synchronous:
            # Contained twice: if the step preempted the request, a failed verification cannot drop its output later.
            self._contain.insist("unverified output", self._sync_load.drop_unverified_output)
        checksums: list[ChecksumJob] = []
        if not (self._passive or self._info.unsupported):
            checksums = attempt("step", self._follow, output, synchronous, repair=self._forget_tables) or []
        for grown in self._matcher.grown:
            if grown:
                attempt("following prefills", self._matcher.collect_jobs)
                break
        idle = not output.total_num_scheduled_tokens
        if checksums or self._matcher.has_jobs():
            return self.step_work(checksums, idle)
        return StepWork(self._exporter.step, idle=idle, urgent=self._exporter.urgent)

    def _follow(self, output: Any, synchronous: bool) -> list[ChecksumJob]:
        """Follow the blocks that the step's requests fill: checksums to compute, blocks to store."""
        needed = RESERVE_PER_REQUEST * len(output.num_scheduled_tokens) * len(self._info.groups)
        short = needed > self._pool.free_count()
        if short:
            self._free_blocks(needed)
        if short is not self._tables.each_block:
            self._tables.look_at_each_block(short)
        growth = self._tables.begin_step(output, self._matcher.get)
        # The time of a step that waits for a load is not that of computing. Its blocks are followed once verified: as
        # the request grows further, or at its end.
        self._step_timer.begin_step(output, self._matcher.get, not synchronous)
        if synchronous:
            growth = [each for each in growth if each.state.life.state is not State.VERIFYING]
        if growth:
            growth = [each for each in growth if self._provenance.may_share(each.state)]
        checksums = self._exporter.begin_step(growth)
        if self._offloader is not None:
            self._offloader.begin_step(self._exporter.step, growth)
        if self._matcher.prefetching:
            self._matcher.expire_prefetches()
        if self._sharing is not None:
            self._sharing.publish_changes()
        return checksums

    def missed_step(self) -> StepWork:
        """In place of ``begin_step``, if it failed as a whole."""
        self._contain.insist("unverified output", self._sync_load.drop_unverified_output)
        self._contain.insist("forgetting tables", self._forget_tables)
        return self.step_work()

    def _forget_tables(self) -> None:
        """After an exception tables may lack blocks that vLLM handed out, and would give content wrong names; and the
        index may name checksums that no step computes."""
        self._tables.clear()
        self._checksum_index.clear()

    def step_work(self, checksums: Sequence[ChecksumJob] = (), idle: bool = False) -> StepWork:
        """The workers' jobs of this step. After an exception the matcher has them again."""
        jobs: list[Job | FailedJob] = []
        new_peers: dict[str, list[m.RankInfo]] = {}
        aborted: list[str] = []
        try:
            jobs, new_peers = self._matcher.take_jobs()
            aborted = self._matcher.take_aborted()
            step, urgent = self._exporter.step, self._exporter.urgent
            work = StepWork(step, list(checksums), new_peers=new_peers, aborted=aborted, idle=idle, urgent=urgent)
            for job in jobs:
                getattr(work, job.step_list).append(job)
            return work
        except Exception:
            self._matcher.put_back(jobs, new_peers, aborted)
            raise

    def end_step(self) -> bool:
        """A step's output was read. Returns whether vLLM gets what was counted: a few times a second, and when the last
        request has ended."""
        # Not while a step is scheduled, which the request may be in already.
        if self._sync_load.verification_pending and (overdue := self._sync_load.overdue()):
            self.arrived([overdue], set())
        self._step_timer.end_step()
        now = time.monotonic()
        if now < self._report_at and len(self._matcher):
            return False
        self._report_at = now + REPORT_SECONDS
        if not self._info.unsupported:
            self._gauges.refresh()
        return True

    def arrived(self, results: list[Result], finished: set[str]) -> None:
        """``results`` of any rank; ``finished`` are the requests all ranks are through with, as vLLM counts."""
        self._outcomes.arrived(results, finished)

    def take_events(self) -> list[Any]:
        """KV events for vLLM to publish after this step: blocks stored in tiers and removed from them."""
        return vllm_events.vllm_events(self._events.take(), self._info.event_groups) if self._events is not None else []

    def finished(self, request: Any, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """The request ended; returns the params for its answer. vLLM may free its blocks at once: exports pin them."""
        state = self._matcher.finished(request)
        table = self._tables.forget(request.request_id)
        shared = self._provenance.forget(request)
        if self._offloader is not None and not self._passive:
            table = table if shared else None
            last = not len(self._matcher)
            self._contain.attempt("offloading", self._offloader.finished, state, table, block_ids, last)
        if self._info.unsupported or self._access.closed or not shared:
            export = None  # no engine could ask for it: pin nothing
        else:
            export = self._exporter.finished(state, block_ids)
        if state.hints.export_as:
            self._exporter.prefill_ended(state.hints.export_as)
        if export is not None or state.hints.export_as:
            self._endpoint.changed()
        self._exporter.drain()
        if not state.hints.asked:
            return None
        report = state.report()
        if export is None:
            return write_report(report)
        handoff = export.kind is LeaseKind.HANDOFF
        seconds = self._config.handoff_seconds if handoff else self._config.retain_seconds
        instance, address = self._identity.instance, self._identity.address
        return write(
            export, self._info.engine_id, instance, address, seconds, self._info.tensor_parallel, report,
            follow=self._stretches.possible,
        )  # fmt: skip

    def release(self, request: Any) -> None:
        """In place of ``finished`` after an exception: keep and export nothing. A load goes on until it ends."""
        attempt, request_id = self._contain.attempt, request.request_id
        attempt("dropping a request", self._release_all, request_id, True)
        attempt("dropping a table", self._tables.forget, request_id)
        attempt("dropping an export", self._exports.end_export, request_id)
        if name := read(request.kv_transfer_params).export_as:
            attempt("dropping an export", self._exports.end_export, name)
            attempt("ending a prefill", self._exporter.prefill_ended, name)
            self._endpoint.changed()
        attempt("forgetting checksums", self._checksum_index.clear)  # it may name some that no step computes
        self._provenance.forget(request)

    def has_pending_frees(self) -> bool:
        return self._exports.has_freed() or (self._offloader is not None and self._offloader.has_frees())

    @property
    def engine_scheduler(self) -> Any | None:
        return self._engine.scheduler

    def _before_reset(self) -> None:
        """vLLM resets its prefix cache, maybe for new weights: end all exports, leases and copies of its blocks."""
        attempt, insist = self._contain.attempt, self._contain.insist
        insist("ending exports", self._exports.clear)
        attempt("unpinning", self._sync_load.unpin, repair=self._sync_load.unpin)
        insist("forgetting checksums", self._checksum_index.clear)  # nothing more is leased
        if self._events is not None:
            attempt("repeating events", self._events.publish_again)
        insist("revoking leases", lambda: self._exports.revoke(RESET_WAIT_SECONDS))
        attempt("giving blocks back", self._exporter.drain, repair=self._exporter.drain)
        if self._offloader is not None:
            cancel = functools.partial(self._offloader.cancel_all, self._config.lookup_timeout + RESET_WAIT_SECONDS)
            attempt("ending copies", cancel, repair=cancel)

    def _after_reset(self) -> None:
        self._contain.attempt("provenance", self._provenance.after_reset)
        self._contain.attempt("pinning again", self._sync_load.pin_again, repair=self._sync_load.pin_again)

    def reset(self) -> bool:
        """vLLM was asked to reset its connector's cache as well: start new namespaces, and leave the peers."""
        self._before_reset()
        self._after_reset()
        if self._sharing is not None:
            self._contain.insist("leaving the node", self._sharing.leave)
            self._contain.attempt("sharing", self._sharing.publish_changes)
        if self._store is not None:
            self._contain.insist("renewing the store's namespace", self._store.renew)
            # No block from before may go into the new namespace.
            self._contain.insist("forgetting tables", self._tables.clear)
        return True

    def _become_passive(self) -> None:
        """Too much of our code failed: load and keep nothing any more, and release all that is held."""
        self._passive = True
        attempt = self._contain.attempt
        attempt("refusing", self._access.refuse, "internal errors; see this engine's log")
        attempt("ending exports", self._exports.clear)
        attempt("giving blocks back", self._exporter.drain)
        if self._offloader is not None:
            attempt("ending copies", self._offloader.cancel_all, 0.0)
        attempt("forgetting tables", self._tables.clear)
        for request_id in self._matcher.request_ids():
            attempt("release", self._release_all, request_id)

    def weights_changed(self, how: str) -> None:
        """The weights are not those of the namespace any more. From now on only this engine finds what it stores. It
        leaves its peers, unless the option ``model_fingerprint`` names the weights."""
        logger.info("kvtier: the weights may have been changed (%s): what is stored is not used any more", how)
        self._engine.scheduler_lock.held(self._follow_weights)()

    def encoder_reset(self) -> None:
        self._contain.attempt("provenance", self._provenance.after_reset)

    def _follow_weights(self) -> None:
        self._provenance.weights_changing()
        if not self._config.model_fingerprint:
            self._access.refuse("its weights were changed while it ran, and no option model_fingerprint names them")
        self.reset()
        self._provenance.weights_changed()

    def shutdown(self) -> None:
        self._reactor.stop()

    # -- scheduler's thread, between calls -----------------------------------------------------------------------------

    def _on_idle(self) -> None:
        attempt = self._contain.attempt
        attempt("namespace", self._identity.resolve_namespace)
        attempt("jobs", self._run_jobs)
        if self._offloader is not None and not self._passive:
            attempt("offloading", self._offloader.idle)
        if self._sharing is not None:
            attempt("sharing", self._sharing.publish_changes, True)
        attempt("events", self._publish_idle)

    def _publish_idle(self) -> None:
        """vLLM publishes events after a step; an idle engine has none, but its tiers change."""
        scheduler = self._engine.scheduler
        if self._events is None or scheduler is None:
            return
        for _ in range(IDLE_EVENT_BATCHES):
            events = self.take_events()
            if events:
                vllm_events.publish(scheduler, events)
            elif not self._events.behind:
                return
        self._engine.wake()  # there may be more; other work of this thread goes first

    def _freed(self) -> None:
        """Exports or leases ended (reactor's thread): unpin their blocks."""
        if self._engine.scheduler_lock.known:
            self._engine.scheduler_lock.run_when_free(self._exporter.drain)
        else:
            self._engine.wake()

    def _form(self, kind: str) -> str:
        """The codecs of a load, fetch or pull, for the metrics."""
        if kind == "load" and self._store is not None:
            return choice.names(self._store.codecs)
        return Codec.RAW if kind == "fetch" else choice.names([self._identity.wire_codec])

    def _run_jobs(self) -> None:
        self._exporter.drain()
        if self._offloader is not None:
            self._contain.attempt("unpinning", self._offloader.drain)
        self._questions.run()

    # -- reactor's thread --------------------------------------------------------------------------------------

    def _store_lost(self) -> None:
        """Cancel copies: what was reserved there may be another engine's now."""
        self.counters.count("store_disconnects")
        if self._offloader is not None:
            self._offloader.jobs.lost()
