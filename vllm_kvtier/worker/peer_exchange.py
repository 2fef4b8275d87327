"""KV between this rank and other engines: what peers read of its cache, its pulls and its peer fetches.

Set-up, checksums and polling run on the worker's reactor, which sleeps while nothing is under way. NIXL allows one
thread at a time, so ``lock`` guards ``transport``, ``memory`` and ``pulls``. The model runner's thread takes the lock
only if it is free: then it posts reads and polls them itself, which saves a pull the wait for the interpreter.
Set-up takes seconds, and no lock that a step waits for.
"""

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import torch

from vllm_kvtier.containment import Containment
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.results import failed_result
from vllm_kvtier.jobs.transfer_jobs import ChecksumJob, PullJob, StepWork, remember_peer
from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire import link as lm
from vllm_kvtier.wire import messages as m
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.context import ASLEEP, CacheSetup, RankContext
from vllm_kvtier.worker.nixl_pull.exported_memory import Pending
from vllm_kvtier.worker.nixl_pull.nixl_transport import NixlTransport
from vllm_kvtier.worker.nixl_pull.peer_memory import PeerMemory
from vllm_kvtier.worker.nixl_pull.pulls import Pulls
from vllm_kvtier.worker.peer_fetch.fetch_worker import IDLE_SECONDS, FetchWorker, open_node
from vllm_kvtier.worker.peer_fetch.process_memory import node_name
from vllm_kvtier.worker.store.store_worker import StoreWorker

logger = get_logger(__name__)

# Seconds between polls while a transfer runs: finer than a decode step, and the model runner keeps the interpreter.
POLL_SECONDS = 50e-6
# The longest run of polls before the reactor serves its sockets.
POLL_RUN_SECONDS = 2e-3
# The same while peers read from this rank: NIXL needs progress only where it emulates reads (TCP, shared memory).
SERVE_POLL_SECONDS = 200e-6
# The same for what a device does by itself (copies, checksums that no peer waits for): a poll takes the interpreter
# from the model runner, which needs all of it where steps are short.
DEVICE_PAUSE = 2e-3
FAULT_PAUSE = 0.1  # after an internal error while polling
RETIRING_PAUSE = 1.0  # between polls of reads that did not end when the cache's memory was taken away


class PeerExchange:
    def __init__(
        self,
        context: RankContext,
        agent_name: str,
        make_transport: Callable[[str], NixlTransport],
        containment: Containment,
    ):
        """``make_transport(name)``: NIXL under an agent name that no other agent has or had."""
        self._rank, self._reactor = context.rank, context.reactor
        self._context, self._send, self._finish = context, context.send, context.finish
        self._agent_name, self._make_transport, self._contain = agent_name, make_transport, containment
        self._generations = itertools.count(1)  # of the cache's memory
        self.lock = threading.Lock()
        self._set_up_lock = threading.Lock()  # during set-up; taken before ``lock``
        self.view: CacheView | None = None
        self.memory: PeerMemory | None = None
        self.transport: NixlTransport | None = None
        self.pulls: Pulls | None = None
        self.fetching: FetchWorker | None = None
        self.unusable: str | None = None  # why this rank neither pulls nor fetches
        self.suspended = False
        self._unfinished: list[tuple[str, Callable[[], object]]] = []  # what ``suspend`` could not end yet
        self._retiring: list[Pulls] = []  # of memory that was taken away; their agents may not have ended
        self._engines: OrderedDict[str, list[m.RankInfo]] = OrderedDict()  # ranks of the engines that jobs may name
        self._checksums: list[tuple[int, Pending]] = []  # of each step, under way on the device
        self._urgent_step = -1  # peers wait for the checksums of steps up to this one
        self.generation = 0  # of the checksums, as ``StepWork.generation``
        self._serving = self._polling = False

    # -- model runner's thread -------------------------------------------------------------------------------------

    def add_engines(self, engines: dict[str, list[m.RankInfo]]) -> None:
        for instance, ranks in engines.items():
            remember_peer(self._engines, instance, ranks)

    def clear_checksums(self, generation: int) -> None:
        """None from before this generation counts. Before the first step of it begins anything; any thread."""
        with self.lock:
            if generation > self.generation:
                if self.memory is not None:
                    self.memory.clear_checksums()
                self.generation = generation  # last: if that raises, it is called again

    def start_pulls(self, work: StepWork, before: torch.cuda.Event | None) -> None:
        """Begin the pulls of ``work`` from connected engines, if the lock is free; ``step`` begins the rest."""
        if work.pulls and self.pulls is not None and self.lock.acquire(blocking=False):
            try:
                self._contain.attempt("pulls", self._start_pulls, work, before, False)
            finally:
                self.lock.release()

    def collect(self, idle: bool) -> None:
        """See which fetches and pulls ended. Not on a CPU, where verifying a pull takes this thread as long as copying
        it."""
        if self.fetching is not None:
            self._contain.attempt("fetches", self.fetching.collect, idle)
        pulls = self.pulls
        if pulls is None or not pulls.active or not self.memory.on_device:
            return
        # What ends within an idle step vLLM hears of with that step, which saves it another empty one.
        until, young = time.monotonic() + IDLE_SECONDS, pulls.num_young()
        while True:
            self._collect_pulls(pulls)
            if not idle or not young or pulls.num_young() < young or time.monotonic() >= until:
                return
            time.sleep(POLL_SECONDS)

    def _collect_pulls(self, pulls: Pulls) -> None:
        if self.lock.acquire(blocking=False):
            try:
                for result in self._contain.attempt("pulls", pulls.poll, True) or ():
                    self._finish(result)
            finally:
                self.lock.release()

    def suspend(self, store: Callable[[], StoreWorker | None], device: int | None) -> None:
        """vLLM takes the KV cache's memory away when this returns; loads of aborted requests may be under way. Nothing
        touches the memory then. Idempotent; a call that is repeated completes what failed.

        The addresses come back with other memory behind them. Copies to and from the store do not mind, but what NIXL
        registered and peers mapped is gone for good. ``store`` is called under the lock: ``set_up`` may run.
        """
        with self._set_up_lock, self.lock:
            suspended, self.suspended, self.unusable = self.suspended, True, ASLEEP
            try:
                # NIXL first: a read that it answers for a peer when the memory is gone ends this process.
                if not suspended:
                    self._unfinished += self._take_parts(store(), device)
                self._unfinished = [part for part in self._unfinished if not self._end(*part)]
            finally:
                if not suspended:
                    self._reactor.call_soon(lambda: self._send(lm.Asleep(self._rank)))

    def _take_parts(self, store: StoreWorker | None, device: int | None) -> list[tuple[str, Callable[[], object]]]:
        """(name, end) of all that touches the cache's memory. ``end`` may be called again if it failed. Only the store
        stays in use."""
        pulls, fetching, memory = self.pulls, self.fetching, self.memory
        self.fetching = self.pulls = self.transport = self.memory = None
        parts: list[tuple[str, Callable[[], object]]] = []
        if pulls is not None:
            self._retiring.append(pulls)
            self._reactor.call_soon(lambda: self._poll_retiring(pulls))  # after ``suspend``, even if NIXL ends in it
            parts.append(("ending NIXL", lambda: self._stop_pulls(pulls)))
        if store is not None:
            parts.append(("ending the store's copies", store.suspend))
        if fetching is not None:
            parts.append(("ending fetches", lambda: fetching.stop(ASLEEP)))
        if device is not None:  # checksums, and blocks being encoded for peers
            parts.append(("waiting for the device", lambda: torch.cuda.synchronize(device)))
        if memory is not None:
            parts.append(("closing the memory", memory.close))
        return parts

    def _end(self, where: str, part: Callable[[], object]) -> bool:
        """Whether ``part`` succeeded: tried twice, and again by the next ``suspend``."""
        ended = lambda: part() or True  # noqa: E731
        return bool(self._contain.attempt(where, ended, repair=ended))

    def _stop_pulls(self, pulls: Pulls) -> None:
        for result in pulls.stop(ASLEEP):
            self._finish(result)

    def resume(self) -> bool:
        """The cache has memory again, at the same addresses; whether it had none. ``set_up`` must follow."""
        with self.lock:
            suspended, self.suspended = self.suspended, False
            if suspended:
                self.unusable = None
        return suspended

    def close(self) -> None:
        """After the reactor ended."""
        fetching, self.fetching = self.fetching, None
        if fetching is not None:
            self._contain.attempt("ending fetches", fetching.stop, "the engine ends")
        if self.memory is not None:
            self._contain.attempt("closing the memory", self.memory.close)

    # -- reactor's thread: set-up ----------------------------------------------------------------------------------

    def set_up(self, setup: CacheSetup, device: int | None) -> None:
        """Register the cache with NIXL and share it with engines of the node; tell the scheduler side."""
        with self._set_up_lock:
            if not self.suspended and self.memory is None:
                self._set_up(setup, device)

    def _set_up(self, setup: CacheSetup, device: int | None) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a new thread starts on device 0
            view = self.view = setup.describe()
            self._send(lm.Described(self._rank, view.groups, setup.shards(view), node_name()))
            memory = self.memory = setup.share(view)
            heads = setup.heads(view)
            shared = None
            if heads and setup.shares:
                self.fetching, shared = open_node(self._context, memory, heads, self.poll_soon)
                if self.fetching is not None:
                    self.fetching.add_engines(dict(self._engines))  # a step may add to them meanwhile
            transport = self._open_nixl(memory, needed=shared is None)
            info = m.RankInfo(
                rank=self._rank,
                agent="" if transport is None else transport.name,
                agent_metadata=b"" if transport is None else transport.metadata(),
                memory=memory.memory_type,
                device=memory.device_id,
                num_blocks=view.num_blocks,
                groups=memory.transfer_view.groups,
                geometry=memory.geometry(),
                checksum_table_addr=memory.table.data_ptr(),
                heads=heads,
                shared=shared,
            )
        except Exception as error:  # whatever is wrong with NIXL or the cache, the engine serves without pulls
            self.unusable = str(error)
            if not isinstance(error, KVTierError):
                logger.exception("kvtier: worker: setting up rank %d failed; it neither pulls nor is read", self._rank)
            self._send(lm.Unusable(self._rank, str(error)[:1000]))
            return
        if transport is not None:
            pulls = Pulls(transport, memory, self._rank, heads)
            for instance, ranks in dict(self._engines).items():
                pulls.add_engine(instance, ranks)
            self.transport, self.pulls = transport, pulls
        self._send(lm.Register(info, memory.wire_codec))

    def _open_nixl(self, memory: PeerMemory, needed: bool) -> NixlTransport | None:
        """None if NIXL fails and is not ``needed``; raises if it is."""
        try:
            generation = next(self._generations)
            transport = self._make_transport(self._agent_name + ("" if generation == 1 else f".{generation}"))
            memory.register(transport)
            return transport
        except Exception as error:
            if needed:
                raise
            if not isinstance(error, KVTierError):
                logger.exception("kvtier: worker: setting up NIXL on rank %d failed", self._rank)
            self.unusable = str(error)
            logger.warning("kvtier: worker: NIXL is unavailable (%s); only engines of this node exchange KV", error)
            return None

    # -- reactor's thread: a step ----------------------------------------------------------------------------------

    def serve(self, active: bool) -> None:
        """Whether peers read from this rank."""
        self._serving = active
        self.poll_soon()

    def step(self, work: StepWork, before: torch.cuda.Event | None, event: torch.cuda.Event | None) -> None:
        """Begin the step's pulls behind ``before``, and its checksums behind ``event``, its forward's end."""
        with self.lock:  # ``suspend`` takes ``pulls`` and ``memory`` away
            if self.pulls is not None:
                self._start_pulls(work, before, connect=True)
            if work.checksums and self.memory is not None:
                if work.urgent:
                    self._urgent_step = work.step
                # Of a step before a reset none is computed: vLLM may have given its blocks to other requests.
                current = work.generation >= self.generation
                self._compute_checksums(work.step, work.checksums if current else [], event)
        self.poll_soon()
        for job in work.pulls:
            self._finish(failed_result(job, self.unusable or "not set up yet"))

    def _start_pulls(self, work: StepWork, before: torch.cuda.Event | None, connect: bool) -> None:
        """Under the lock. Without ``connect`` only pulls from engines that this rank is connected to."""
        for instance, ranks in work.new_peers.items():
            self.pulls.add_engine(instance, ranks)
        work.new_peers = {}
        jobs: list[PullJob] = [job for job in work.pulls if connect or self.pulls.connected(job.instance)]
        for job in jobs:
            work.pulls.remove(job)
            result = self.pulls.start(job, before, quick=not connect)
            if result is not None:
                self._finish(result)

    def _compute_checksums(self, step: int, jobs: list[ChecksumJob], event: torch.cuda.Event | None) -> None:
        try:
            self._checksums.append((step, self.memory.compute_checksums(jobs, event)))
        except Exception:
            # Without checksums no peer can verify these blocks: their entries stay wrong, and peers recompute.
            logger.exception("kvtier: worker: computing the checksums of step %d failed; peers recompute", step)
            self._checksums.append((step, Pending(None)))  # reported in turn: it stands for the steps before it too

    # -- reactor's thread: polling ---------------------------------------------------------------------------------

    def under_way(self) -> set[str]:
        """Requests whose pulls or fetches have not ended."""
        known = set() if self.fetching is None else self.fetching.under_way()
        with self.lock:
            for pulls in (*self._retiring, *filter(None, [self.pulls])):
                known |= pulls.under_way()
        return known

    def _poll_retiring(self, pulls: Pulls) -> None:
        """Report reads of memory that was taken away when their agent has ended."""
        with self.lock:
            for result in pulls.poll() if pulls.active else ():
                self._finish(result)
            if not pulls.active:
                self._retiring.remove(pulls)
                return
        self._reactor.call_later(RETIRING_PAUSE, lambda: self._poll_retiring(pulls))

    def poll_soon(self) -> None:
        if not self._polling and self._busy():
            self._polling = True
            self._reactor.call_soon(self._run_polls)

    def _busy(self) -> bool:
        serving = self._serving and self.transport is not None
        ours = (self.pulls, self.fetching)
        return bool(serving or self._checksums or any(each is not None and each.active for each in ours))

    def _run_polls(self) -> None:
        """Poll for a while; runs again until nothing is under way."""
        try:
            pause = self._poll()
        except Exception:
            logger.exception("kvtier: worker: polling failed; it is tried again")
            self._reactor.errors += 1
            pause = FAULT_PAUSE
        self._polling = pause is not None
        if pause:
            self._reactor.call_later(pause, self._run_polls)
        elif pause is not None:
            self._reactor.call_soon(self._run_polls)

    def _poll(self) -> float | None:
        """Poll for ``POLL_RUN_SECONDS``; the pause until the next call, None if nothing is under way."""
        end = time.monotonic() + POLL_RUN_SECONDS
        while True:
            with self.lock:
                while self._checksums and self._checksums[0][1].done():
                    self._send(lm.ChecksumsReady(self._rank, self._checksums.pop(0)[0]))
                pulling = self.pulls is not None and self.pulls.active
                for result in self.pulls.poll() if pulling else ():
                    self._finish(result)
                pulling = pulling and not self.pulls.all_waiting
                serving = self._serving and self.transport is not None
                if serving:
                    self.transport.progress()
            fetching = self.fetching
            if fetching is not None:
                fetching.poll()
            if not self._busy():
                return None
            awaited = self._checksums and self._checksums[0][0] <= self._urgent_step
            # A device copies by itself, and the model runner polls it after each step.
            copying = fetching is not None and fetching.active and not fetching.on_device
            soon = pulling or awaited or copying
            if not (soon or serving):
                return DEVICE_PAUSE
            time.sleep(POLL_SECONDS if soon else SERVE_POLL_SECONDS)  # for threads that wait for the lock too
            if time.monotonic() >= end:
                return 0.0
