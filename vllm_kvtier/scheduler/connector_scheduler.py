"""Connector scheduler: what vLLM calls, passed on to the parts that ``wiring`` makes.

Two threads: vLLM's scheduler thread, which owns block tables and the pool, and a reactor with all sockets. They meet in
``ExportTable`` (locked), in queued calls, and in the answers to lookups. The scheduler thread waits for some
milliseconds for a source that answers soon, and when vLLM resets its prefix cache.
"""

import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

from vllm_kvtier.jobs.results import Result
from vllm_kvtier.jobs.transfer_jobs import ChecksumJob, FailedJob, StepWork
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.leases.export_builder import RESERVE_PER_REQUEST
from vllm_kvtier.scheduler.leases.exports import LeaseKind
from vllm_kvtier.scheduler.matching.request_lifecycle import State
from vllm_kvtier.scheduler.matching.transfer_params import hints, write, write_report
from vllm_kvtier.scheduler.offload.block_tables import Growth
from vllm_kvtier.scheduler.peer_access import WORKERS_SECONDS
from vllm_kvtier.scheduler.sources.base import Job
from vllm_kvtier.scheduler.wiring import SchedulerParts
from vllm_kvtier.vllm_compat import kv_events as vllm_events
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat import weights
from vllm_kvtier.vllm_compat.hooks import rollback
from vllm_kvtier.vllm_compat.hooks.interpreter import SwitchInterval
from vllm_kvtier.wire import messages as m

logger = get_logger(__name__)

# A reset of vLLM's prefix cache waits so long for peers to release their leases, and as long again for copies to the
# node store to end; both take milliseconds. A store that hangs is given up after ``lookup_timeout``.
RESET_WAIT_SECONDS = 1.0
# Between two reports of what was counted: vLLM sends each to another process, and metrics are not scraped more often.
REPORT_SECONDS = 1.0
# Empty steps after which a loaded request that vLLM has no blocks for gives its own back. Frees that vLLM defers to the
# end of a step take two.
MAX_STUCK_STEPS = 8
IDLE_EVENT_BATCHES = 4  # batches of KV events that an idle engine publishes in one go


class KVTierConnectorScheduler(SchedulerParts):
    _report_at = 0.0  # when vLLM next gets what was counted
    _passive = False  # too much of our code failed
    _unverified: tuple[Growth, ...] = ()  # of steps that wait for a load, whose verification is pending
    _stuck_steps = 0  # in a row, that were empty because the first loaded request lacks blocks
    _only_connector = True  # of this engine: it has no MultiConnector
    _answered = ""  # the request that vLLM was last given an answer to, until it has blocks

    def _start(self) -> None:
        self._contain.on_limit = self._become_passive
        self._pool.around_reset(self._before_pool_reset, self._after_reset, self._contain)
        weights.watch(self)
        if not self._info.unsupported:
            self._reactor.call_later(WORKERS_SECONDS, self._access.look_for_workers)
        self._reactor.start()

    # -- vLLM's calls (scheduler's thread) ---------------------------------------------------------------------------

    @property
    def has_requests(self) -> bool:
        return len(self._matcher) > 0

    def on_new_request(self, request: Any) -> None:
        """vLLM will schedule a request. Send its lookup; and if others are before it, have the store promote its
        blocks. A prefill for another engine ends where that one can go on; one by another engine is kept there."""
        if name := hints(request).export_as:
            self._exporter.on_queued(name)
        if not (self._info.unsupported or self._passive or self._access.closed):
            self._exporter.prepare(request)
            if request.kv_transfer_params:
                self._matcher.keep_export(request)
        if self._store is None or self._info.unsupported or self._passive or not self._provenance.would_admit(request):
            return
        if len(self._matcher):
            self._matcher.prefetch_promotion(request)
        self._matcher.prefetch_lookup(request)

    def match(self, request: Any, computed: int) -> tuple[int | None, bool]:
        kept_free = self._engine.admission.asked_for(request)
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
                if not vr.admitted_unanswered(request):
                    self._engine.waiting_loop.skipped()
                return None, False
            self._matcher.release_all(request)
        tokens, asynchronous = self._matcher.match(request, computed) if admitted else (0, False)
        if tokens is None:
            if not vr.admitted_unanswered(request):
                state = self._matcher.get(request.request_id)
                self._engine.waiting_loop.skipped(state.asked_at if state is not None else 0.0)
        else:
            # vLLM asks again where it lacked blocks. It also takes the free ones that hold what it has computed, and
            # may want more of each group for what it speculates.
            again, self._answered = self._answered == request.request_id, request.request_id
            more = self._engine.admission.draft_tokens() if again else -computed
            needed = self._geometry.taken_blocks(request.num_tokens + more) + again * len(self._info.groups) + kept_free
            if again and asynchronous:
                needed += self._engine.admission.reserved_blocks()
            if needed > self._pool.free_count():
                self._free_blocks(needed)
                if needed > self._pool.free_count() and self._engine.admission.is_before_loaded(request):
                    return None, False
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
        """vLLM needs ``needed`` blocks, more than are free: end exports, then cancel copies, that hold some."""
        self._exporter.release_for_requests(needed)
        short = needed - self._pool.free_count()
        if short > 0 and self._offloader is not None:
            self._offloader.cancel_for_requests(short)

    def allocated(self, request: Any, block_ids: tuple[list[int], ...], external: int) -> None:
        self._answered = ""
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

    def filled_groups(self, request_id: str) -> tuple[int, ...]:
        """vLLM's ids of the groups whose blocks this request's load fills as a whole. Of a block that the load ends in,
        not all paths write more than the verified tokens. vLLM clears blocks where a recurrent state, or numbers of
        another precision, may have left a NaN behind them, which attention would multiply with 0."""
        state, ids = self._matcher.get(request_id), self._info.group_ids
        if state is None or state.hit is None:
            return ()
        end = self._geometry.usable_tokens(state.hit.tokens, state.request.num_tokens)
        whole = [g for g, (size, kind) in enumerate(self._geometry.groups) if end % size == 0 or not kind.by_position]
        return tuple(whole if ids is None else [ids[g] for g in whole])

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
            self._contain.insist("synchronous load", functools.partial(self._sync_load.announce, output))
        checksums: list[ChecksumJob] = []
        if not (self._passive or self._info.unsupported):
            checksums = attempt("step", self._follow, output, synchronous, repair=self._clear_tables) or []
        for grown in self._matcher.grown:
            if grown:
                attempt("following prefills", self._matcher.collect_jobs)
                break
        if checksums or self._matcher.has_jobs():
            work = self.step_work(checksums)
        else:
            work = StepWork(self._exporter.step, urgent=self._exporter.urgent, generation=self._clearing.generation)
        work.idle = not output.total_num_scheduled_tokens
        work.lone = len(output.num_scheduled_tokens) == 1 == len(output.scheduled_new_reqs)
        return work

    def _drop_first_load(self) -> None:
        """Nothing runs, and vLLM goes no further than the first ready request with blocks, which lacks more than are
        free. Sessions go on without the first that was only loaded so far: this or one that holds what this lacks."""
        scheduler, queues = self._engine.admission.scheduler, self._engine.admission.queues
        if not queues or scheduler is None or scheduler.running or self._engine.paused_scheduler is not None:
            return
        if State.LOADING not in self._matcher.states():
            for request in (request for queue in queues for request in queue):
                if rollback.drop_load(scheduler, request):
                    return

    def _follow(self, output: Any, synchronous: bool) -> list[ChecksumJob]:
        """Follow the blocks that the step's requests fill: checksums to compute, blocks to store."""
        needed = RESERVE_PER_REQUEST * len(output.num_scheduled_tokens) * len(self._info.groups)
        short = needed > self._pool.free_count()
        admission = self._engine.admission
        lacking = admission.lacking_tokens() if any(admission.queues) else 0
        if lacking:
            needed += self._geometry.taken_blocks(lacking + admission.draft_tokens())
            needed += len(self._info.groups) + admission.kept_free()
        if short or (lacking and needed > self._pool.free_count()):
            self._free_blocks(needed)
        stuck = lacking and needed > self._pool.free_count() and not output.total_num_scheduled_tokens
        self._stuck_steps = self._stuck_steps + 1 if stuck else 0
        if self._stuck_steps >= MAX_STUCK_STEPS:
            self._stuck_steps = 0
            self._contain.attempt("dropping a load", self._drop_first_load)
        if short is not self._tables.each_block:
            self._tables.look_at_each_block(short)
        # Another connector's load, whose output comes with the step's. vLLM names it from 0.29 on.
        others_load = not (synchronous or self._only_connector) and getattr(output, "has_sync_kv_loads", True)
        growth = self._tables.begin_step(output, self._matcher.get, others_load)
        # The time of a step that waits for a load is not that of computing. Its blocks are followed once verified.
        self._step_timer.begin_step(output, self._matcher.get, not synchronous)
        if synchronous:
            self._unverified += tuple(each for each in growth if each.state.life.state is State.VERIFYING)
            growth = [each for each in growth if each.state.life.state is not State.VERIFYING]
        elif self._unverified:
            # Before vLLM has freed those behind a window. Of a request that has ended, ``finished`` took care.
            growth = [each for each in self._unverified if self._is_verified(each)] + growth
            self._unverified = ()
        if growth:
            growth = [each for each in growth if self._provenance.may_share(each.state)]
        checksums = self._exporter.begin_step(growth)
        if self._offloader is not None:
            idle = not output.total_num_scheduled_tokens
            self._offloader.begin_step(self._exporter.step, growth, needed if lacking else 0, idle)
        if self._matcher.prefetching:
            self._matcher.expire_prefetches()
        if self._sharing is not None:
            self._sharing.publish_changes()
        return checksums

    def _is_verified(self, growth: Growth) -> bool:
        state = growth.state
        still = self._matcher.get(state.request.request_id) is state and state.life.state is State.LOADED
        return still and growth.computed <= state.request.num_computed_tokens

    def missed_step(self, output: Any) -> StepWork:
        """In place of ``begin_step``, if it failed as a whole."""
        self._contain.insist("synchronous load", functools.partial(self._sync_load.announce, output))
        self._contain.insist("unverified output", self._sync_load.drop_unverified_output)
        self._contain.insist("clearing tables", self._clear_tables)
        return self.step_work()

    def _clear_tables(self) -> None:
        """After an exception tables may lack blocks that vLLM handed out, and would give content wrong names; and the
        index may name checksums that no step computes."""
        self._tables.clear()
        self._checksum_index.clear()
        self._unverified = ()

    def step_work(self, checksums: Sequence[ChecksumJob] = ()) -> StepWork:
        """The workers' jobs of this step. After an exception the matcher has them again."""
        jobs: list[Job | FailedJob] = []
        new_peers: dict[str, list[m.RankInfo]] = {}
        aborted: list[str] = []
        try:
            jobs, new_peers = self._matcher.take_jobs()
            aborted = self._matcher.take_aborted()
            step, urgent = self._exporter.step, self._exporter.urgent
            work = StepWork(
                step, list(checksums), new_peers=new_peers, aborted=aborted, urgent=urgent,
                generation=self._clearing.generation,
            )  # fmt: skip
            for job in jobs:
                getattr(work, job.step_list).append(job)
            return work
        except Exception:
            self._matcher.put_back(jobs, new_peers, aborted)
            raise

    def end_step(self) -> bool:
        """A step's output was read. Returns whether vLLM gets what was counted: once a second, and when the last
        request has ended."""
        # Not while a step is scheduled, which the request may be in already.
        if self._sync_load.verification_pending and (overdue := self._sync_load.overdue()):
            self.arrived([overdue], set())
        self._step_timer.end_step()
        self._tables.end_step()
        now = time.monotonic()
        if not len(self._matcher):
            # Nothing is scheduled that messages, such as a grant of the last request's blocks, would delay.
            sys.setswitchinterval(SwitchInterval.short)
        elif now < self._report_at:
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
        table = self._tables.remove(request.request_id)
        shared = self._provenance.remove(request)
        if self._offloader is not None and not self._passive:
            table = table if shared else None
            last = not self.has_requests
            self._contain.attempt("offloading", self._offloader.finished, state, table, block_ids, last)
        if self._info.unsupported or self._access.closed or not shared:
            export = None  # no engine could ask for it: pin nothing
        else:
            export = self._exporter.finished(state, block_ids, table)
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
        attempt("removing a table", self._tables.remove, request_id)
        attempt("dropping an export", self._exports.end_export, request_id)
        if name := hints(request).export_as:
            attempt("dropping an export", self._exports.end_export, name)
            attempt("ending a prefill", self._exporter.prefill_ended, name)
            self._endpoint.changed()
        attempt("clearing checksums", self._checksum_index.clear)  # it may name some that no step computes
        self._provenance.remove(request)

    def frees_blocks(self) -> bool:
        """vLLM lacks blocks for a running request: give back those of exports and copies that have ended. Whether that
        freed any, for which vLLM waits a step; requests may hold the same ones, and it had better preempt one."""
        free = self._pool.free_count()
        self._exporter.drain()
        if self._offloader is not None:
            self._offloader.drain()
        return self._pool.free_count() > free

    def has_pending_frees(self) -> bool:
        return self._exports.has_freed() or (self._offloader is not None and self._offloader.has_frees())

    def waits_for_readers(self) -> bool:
        """Of an engine that drains: its hand-offs are read, or reach their time limit, before it ends."""
        return self._exports.has_handoffs() and self._engine.draining

    def waits_for_loads(self) -> bool:
        """Of an engine that pauses: its loads end, and are verified, before its steps do. They hold blocks, with which
        vLLM cannot reset its prefix cache. Those that wait for more of a prefill do not wait for it any longer."""
        if self._engine.paused_scheduler is None:
            return False
        loading = State.LOADING in self._matcher.states()
        if loading:
            self._matcher.end_waiting_loads()
        return self._sync_load.verification_pending or loading

    def _before_pool_reset(self) -> None:
        """vLLM is about to reset its prefix cache, and will not if a request is running, whose blocks are held."""
        scheduler = self._engine.scheduler
        if scheduler is None or not rollback.any_running(scheduler):
            self._before_reset()

    def _before_reset(self) -> None:
        """vLLM resets its prefix cache, maybe for new weights: end all exports, leases and copies of its blocks."""
        attempt, insist = self._contain.attempt, self._contain.insist
        if (scheduler := self._engine.paused_scheduler) is not None:
            for request in self._matcher.requests():
                attempt("dropping a load", rollback.drop_load, scheduler, request)
        insist("ending exports", self._exports.clear)
        attempt("unpinning", self._sync_load.unpin, repair=self._sync_load.unpin)
        insist("clearing checksums", self._checksum_index.clear)  # nothing more is leased
        if self._events is not None:
            attempt("repeating events", self._events.publish_again)
        insist("revoking leases", lambda: self._exports.revoke(RESET_WAIT_SECONDS))
        insist("clearing hand-offs' checksums", self._matcher.clear_checksums)
        # Behind the reads under these leases. The weights may be others now.
        insist("clearing the workers' checksums", lambda: self._clearing.clear(RESET_WAIT_SECONDS))
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
            self._contain.insist("clearing tables", self._clear_tables)
        return True

    def _become_passive(self) -> None:
        """Too much of our code failed: load and keep nothing any more, and release all that is held."""
        self._passive = True
        attempt = self._contain.attempt
        attempt("refusing", self._access.refuse, "internal errors; see this engine's log")
        attempt("ending exports", self._exports.clear)
        # Before their blocks have other content: one that is made late names it by the export's keys.
        attempt("clearing the workers' checksums", self._clearing.clear, RESET_WAIT_SECONDS)
        attempt("giving blocks back", self._exporter.drain)
        if self._offloader is not None:
            attempt("ending copies", self._offloader.cancel_all, 0.0)
        attempt("clearing tables", self._tables.clear)
        for request_id in self._matcher.request_ids():
            state = self._matcher.get(request_id)
            # vLLM may be about to give blocks to a request with a hit. Otherwise it is released when matched again.
            if state is None or state.life.state is not State.HIT:
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
        sys.setswitchinterval(SwitchInterval.short)
        attempt = self._contain.attempt
        attempt("namespace", self._identity.resolve_namespace)
        attempt("jobs", self._run_jobs)
        attempt("planner", self._planner.fit_steps)
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

    def _run_jobs(self) -> None:
        self._exporter.drain()
        if self._offloader is not None:
            self._contain.attempt("unpinning", self._offloader.drain)
        self._questions.run()
