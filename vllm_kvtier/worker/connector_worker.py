"""The connector's worker side of one rank, in the model runner's process: wiring, and the calls of a step.

The model runner's thread hands over each step's work and collects results. Connecting, set-up and all waiting happen on
the worker's reactor.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vllm_kvtier.containment import Containment
from vllm_kvtier.jobs.results import StepResults, failed_result
from vllm_kvtier.jobs.transfer_jobs import LoadJob, PeerFetchJob, StepWork
from vllm_kvtier.wire import link as m
from vllm_kvtier.wire.link import LinkClient, LinkPlace
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker.context import CacheSetup, RankContext
from vllm_kvtier.worker.device.cpu_threads import stay_on_one_core
from vllm_kvtier.worker.device.step_events import StepEvents
from vllm_kvtier.worker.job_table import Job, JobTable
from vllm_kvtier.worker.nixl_pull.nixl_transport import NO_LIMITS, NixlTransport, UcxLimits
from vllm_kvtier.worker.peer_exchange import PeerExchange
from vllm_kvtier.worker.store.store_worker import NextLaunch, StoreWorker


class KVTierConnectorWorker:
    def __init__(
        self,
        rank: int,
        agent_name: str,
        link: LinkPlace,
        backends: list[str],
        containment: Containment,
        limits: UcxLimits = NO_LIMITS,
    ):
        self._contain = containment
        self._reactor = Reactor(f"kvtier-worker-{rank}")
        self._link = LinkClient(self._reactor, link, self._on_message, self._on_connected)
        self._jobs = JobTable()
        self._context = RankContext(rank, self._reactor, self._link.send, self._jobs.finish)
        self._exchange = PeerExchange(
            self._context, agent_name, lambda name: NixlTransport(name, backends, limits), containment
        )
        self._store: StoreWorker | None = None
        self._errors = 0  # internal errors seen so far
        self._submitted: StepWork | None = None
        self._set_up: Callable[[], None] = lambda: None  # what ``register`` was given
        self._connected = False  # to the scheduler side
        self._on_connect: Callable[[], None] | None = None
        self._device: int | None = None  # of CUDA
        self._step_events: StepEvents | None = None
        # A step, and the event of what was launched before its forward.
        self._before: tuple[StepWork, torch.cuda.Event | None] | None = None
        self.drafting: StepWork | None = None  # a step whose drafts may not be launched yet
        self._idle = False  # whether the last step computes nothing
        self._reactor.call_soon(stay_on_one_core)  # the model has the others
        self._reactor.start()

    # -- model runner's thread -------------------------------------------------------------------------------------

    def register(self, setup: CacheSetup) -> None:
        """Set up in the background; requests before it is ready are computed.

        It begins when the scheduler side connects: vLLM makes that when the model is warmed up. Until then it captures
        CUDA graphs. A capture fails, and the engine with it, if another thread allocates, pins or loads meanwhile.
        """
        device = self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._set_up = lambda: self._exchange.set_up(setup, device)
        self._reactor.call_soon(lambda: self._when_connected(self._set_up))

    def lose_step(self) -> None:
        """vLLM failed in a step, maybe on this rank alone. Other ranks may store the blocks that all have alike (MLA):
        without this rank the scheduler side commits none."""
        if self._store is not None:
            self._store.withdraw()

    def suspend(self) -> None:
        """vLLM is about to take the KV cache's memory away: nothing touches it when this returns. Idempotent."""
        self._exchange.suspend(lambda: self._store, self._device)

    def resume(self) -> None:
        """The KV cache has memory again, where it was before. Idempotent."""
        if self._exchange.resume():
            self._reactor.call_soon(lambda: self._when_connected(self._set_up))

    def begin(self, work: StepWork) -> None:
        """Call when a step begins, before vLLM launches anything of its forward.

        The blocks that its jobs fill were other requests' a moment ago. Kernels launched before may still write them
        (the forward or the drafts of a request that was aborted or preempted; the kernel that zeroes new blocks), or
        read them (a window's last blocks). So every job waits on the device for what was launched before, whatever the
        engine's role: vLLM holds blocks back for consumers only, and only those of requests that ended.
        """
        if self.drafting is not None:  # else ``wait_for_save`` did it
            self.drafted()
        if self._store is not None:
            NextLaunch.since = time.monotonic()
        if work.new_peers:
            self._exchange.add_engines(work.new_peers)
        if work.generation > self._exchange.generation:
            self._exchange.clear_checksums(work.generation)
        if work.pulls or work.loads or work.fetches:
            self._before = work, self._record_event()

    def _event_before(self, work: StepWork) -> torch.cuda.Event | None:
        """The event that ``begin`` recorded; if it failed, one behind all that has been launched by now."""
        if self._before is None or self._before[0] is not work:
            self._before = work, self._record_event()
        return self._before[1]

    def sync_load(self, work: StepWork) -> None:
        """Begin the step's synchronous loads and fetches. Call before the forward is launched: it runs behind them."""
        store, fetching, tracker = self._store, self._exchange.fetching, self._jobs.sync_loads
        loads = [job for job in work.loads if job.synchronous]
        if loads and store is not None:
            tracker.begin(loads, lambda jobs: self._begin_now(store.load_now, jobs, work))
        fetches = [job for job in work.fetches if job.synchronous]
        if fetches and fetching is not None:
            fetching.add_engines(work.new_peers)
            tracker.begin(fetches, lambda jobs: self._begin_now(fetching.begin_now, jobs, work))

    def _begin_now(self, begin: Callable[[list[Any], Any], None], jobs: list[Any], work: StepWork) -> None:
        begin(jobs, self._event_before(work))
        copies = [copy for job in jobs for copy in job.state_copies]
        if copies:
            self._exchange.view.copy_blocks(copies)

    def end_step(self, work: StepWork, drafts_follow: bool = False) -> StepResults | None:
        """``submit`` and ``collect``; None: nothing ended. Most steps bring nothing while no job is outstanding: these
        make as few calls as possible.

        ``drafts_follow``: the step's drafts write KV of the same blocks, and are launched after this: its blocks are
        read only behind ``drafted``."""
        brings = work.loads or work.fetches or work.pulls or work.new_peers or work.checksums
        if brings or work.aborted or work.failed or self._jobs.outstanding or self._jobs.sync_loads.due:
            submit = partial(self.submit, work, drafts_follow)
            self._contain.attempt("submit", submit, repair=submit)
            return self._contain.attempt("collect", self.collect, repair=self.collect)
        store = self._store
        if store is not None and drafts_follow:
            self.drafting = work
        elif store is not None and (store.step(work.step, self._record_event(), work.lone) or work.idle):
            self._contain.attempt("copies", store.collect, work.idle)
        return None

    def submit(self, work: StepWork, drafts_follow: bool = False) -> None:
        """Take a step's work; call when the step's forward has been launched. Waits for synchronous loads and fetches:
        they are verified before anything that was computed on them is stored or exported."""
        if work is self._submitted:  # vLLM's call is repeated after an error
            return
        attempt, store, fetching = self._contain.attempt, self._store, self._exchange.fetching
        self._idle = work.idle
        self._jobs.submit(work)
        self._submitted = work
        if work.failed:
            attempt("failed jobs", self._jobs.fail, work.failed)
        if fetching is not None and work.new_peers:
            attempt("sources", fetching.add_engines, work.new_peers)
        if work.loads or work.fetches:
            attempt("loads", self._begin_loads, work)
        if work.aborted and store is not None:
            attempt("aborts", store.cancel_loads, work.aborted)
        if drafts_follow:
            self.drafting = work
            if work.pulls:
                attempt("pulls", self._exchange.start_pulls, work, self._event_before(work))
                self._reactor.call_soon(self._exchange.poll_soon)
        else:
            attempt("step", self._launched, work)

    def drafted(self) -> None:
        """All that writes KV in the last step has been launched. Idempotent."""
        work, self.drafting = self.drafting, None
        if work is not None and self._contain.attempt("step", self._launched, work):
            self._contain.attempt("copies", self._store.collect, False)

    def _launched(self, work: StepWork) -> bool:
        """Returns whether the store's copies are to be collected though nothing is loaded."""
        store, due = self._store, False
        event = self._record_event() if work.checksums or store is not None else None
        if store is not None:
            due = bool(self._contain.attempt("step of the store's copies", store.step, work.step, event, work.lone))
        if work.checksums or work.pulls or work.new_peers:
            before = self._event_before(work) if work.pulls else None
            self._exchange.start_pulls(work, before)
            self._reactor.call_soon(lambda: self._exchange.step(work, before, event))
        self._before = None
        return due

    def _begin_loads(self, work: StepWork) -> None:
        loads, fetches = ([job for job in jobs if not job.synchronous] for jobs in (work.loads, work.fetches))
        for kind, worker in ((LoadJob, self._store), (PeerFetchJob, self._exchange.fetching)):
            if worker is not None:
                self._jobs.sync_loads.wait_until_done(kind, worker)
        if loads:
            self._contain.attempt("loads", self._load, loads, work)
        if fetches:
            self._contain.attempt("fetches", self._fetch, fetches, work)

    def _record_event(self) -> torch.cuda.Event | None:
        """An event behind all that was launched so far; None without a device. Recorded even while the cache is being
        set up: it may be there when this step's checksums are computed, and a block that is encoded before it was
        computed is wrong without a checksum that tells."""
        view = self._exchange.view
        if self._device is None or (view is not None and view.device.type != "cuda"):
            return None
        if self._step_events is None:
            self._step_events = StepEvents(self._device)
        return self._step_events.record()

    def _load(self, jobs: list[LoadJob], work: StepWork) -> None:
        if self._store is not None:
            self._store.load(jobs, self._event_before(work))
            return
        for job in jobs:
            self._jobs.finish(failed_result(job, "the node store's memory is not mapped here"))

    def _fetch(self, jobs: list[PeerFetchJob], work: StepWork) -> None:
        if self._exchange.fetching is not None:
            self._exchange.fetching.begin(jobs, self._event_before(work))
            return
        reason = self._exchange.unusable or "this rank cannot read other engines' memory, or not yet"
        for job in jobs:
            # ``unmappable``, so that the scheduler side does not try again: no job comes before all ranks are set up.
            self._jobs.finish(failed_result(job, reason, unmappable=reason))

    def collect(self) -> StepResults:
        """Everything that ended since the last call."""
        attempt, results = self._contain.attempt, self._jobs.results
        if self._store is not None:
            attempt("copies", self._store.collect, self._idle)
        self._exchange.collect(self._idle)
        if self._jobs.outstanding:
            attempt("lost jobs", self._look_for_lost)
        return attempt("results", results, repair=results) or StepResults()

    def _look_for_lost(self) -> None:
        """After an internal error: fail the jobs that no part of the worker knows any more. All that is queued on the
        reactor by now runs before; pulls that wait for the step's drafts begin behind it."""
        errors = self._contain.errors + self._reactor.errors
        if errors != self._errors:
            waiting = {pull.request_id for pull in self.drafting.pulls} if self.drafting is not None else set()
            jobs = [job for job in self._jobs.under_way() if job.request_id not in waiting]
            if not waiting and len({job.request_id for job in jobs}) == len(jobs):
                self._errors = errors  # else look again when one of a load's two jobs has ended, or they have begun
            self._reactor.call_soon(lambda: self._fail_lost(jobs))

    def shutdown(self) -> None:
        self._contain.attempt("ending the reactor", self._reactor.stop)
        self._exchange.close()

    # -- reactor's thread ------------------------------------------------------------------------------------------

    def _fail_lost(self, jobs: list[Job]) -> None:
        known = set() if self._store is None else self._store.under_way()
        if not self._jobs.fail_lost(jobs, known | self._exchange.under_way()):
            self._errors = -1  # look again

    def _when_connected(self, begin: Callable[[], None]) -> None:
        if self._connected:
            begin()
        else:
            self._on_connect = begin

    def _on_connected(self) -> None:
        if self._store is not None:  # not for the first time
            self._link.send(m.LinkRenewed(self._context.rank))
        self._connected = True
        begin, self._on_connect = self._on_connect, None
        if begin is not None:
            begin()

    def _on_message(self, message: m.LinkMessage) -> None:
        view, store = self._exchange.view, self._store
        match message:
            case m.Serve():
                self._exchange.serve(message.active)
            case m.ClearChecksums():
                self._exchange.clear_checksums(message.generation)
                self._link.send(m.ChecksumsCleared(self._context.rank, self._exchange.generation))
            case m.PoolSetup() if store is None and view is not None:
                self._store = StoreWorker(self._context, view, message)
            case m.StoreFrame() if store is not None:
                store.tunnelled(message)
            case m.StoreBlocks() if store is not None:
                store.store(message)
            case m.CancelStores() if store is not None:
                store.cancel(message)
