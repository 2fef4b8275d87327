"""This rank's part of the node store: its connection, its memory, its copies, and what it tells the scheduler side.

Made on the reactor's thread when the scheduler side names the store. Two threads begin and poll copies: the reactor's,
and the model runner's where the device copies by itself, which then need not wait for the interpreter while a request
does. ``_lock`` keeps them apart; the model runner takes it only if it is free or soon will be.
"""

import hashlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from vllm_kvtier import codecs
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.results import ABORTED
from vllm_kvtier.jobs.transfer_jobs import MAX_LOCK_SECONDS, LoadJob, StoreJob
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.client import StoreClient
from vllm_kvtier.store.launcher import start_store, store_path
from vllm_kvtier.store.memory.client_mapping import PoolMapping
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.protocol import Hello
from vllm_kvtier.store.tunnel import TunnelServer
from vllm_kvtier.wire import link as m
from vllm_kvtier.wire.reactor import Timer
from vllm_kvtier.wire.slots import PAGE, layout_digest
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.context import ASLEEP, RankContext
from vllm_kvtier.worker.copy.base import Copier, make_copier
from vllm_kvtier.worker.store.copy_engine import STEP_EVENTS, CopyEngine, EndedCopy
from vllm_kvtier.worker.store.store_memory import MemoryUser, StoreMemory

logger = get_logger(__name__)

# A launched step lets stores begin. Unless a poll follows within this many seconds anyway, the step asks for one;
# longer than stores wait to be batched.
POLL_AFTER_STEP = 60e-3
# How long the model runner waits for the lock before it leaves a load to the reactor.
MAX_WAIT_SECONDS = 5e-3
# If the model runner polled within this many seconds, the reactor leaves polling to it: (a request waits for a load,
# there are only stores). In a longer step, such as a prefill, the reactor polls.
STEP_POLL_SECONDS = (5e-3, 30e-3)
# The second number doubles, up to this, each time that the reactor finds that steps came: each look takes the
# interpreter.
MAX_STEP_POLL_SECONDS = 0.12
# The longest launch of a forward: no call follows a launch that failed. While one is under way the reactor polls this
# often, each time in the way of the launch: (loads, more than that is given to the device ahead; only stores, none of
# which begins then).
MAX_LAUNCH_SECONDS = 0.1
LAUNCH_POLL_SECONDS = (2e-3, 20e-3)
# The reactor reports ended stores so many seconds after the model runner saw them, when that has launched the step.
REPORT_WITHIN = 4e-3
# In an empty step the model runner stays with the loads this long, or longer if that should complete them: new
# requests wait meanwhile, and each empty step costs a millisecond.
IDLE_SECONDS, LAST_IDLE_SECONDS = 3e-3, 10e-3
IDLE_POLL_SECONDS = 50e-6  # seconds between two polls of a device's copies then
FAULT_PAUSE = 0.1  # seconds after an internal error
DEVICE_RATE = 30e9  # bytes/s of a device's link before any was measured: about half of PCIe 5
# Loads and stores given to a device ahead: 5 and 10 ms of such a link, without a poll.
DEVICE_BATCHES = (4, 8)


class NextLaunch:
    """Of this process's engine. ``since``: when it was given the request that its next step will begin, or its next
    step began."""

    since: ClassVar[float] = -math.inf


class StoreWorker:
    """Loads and stores this rank's blocks; results of loads go to ``context.finish``."""

    def __init__(self, context: RankContext, view: CacheView, setup: m.PoolSetup):
        self._rank, self._reactor = context.rank, context.reactor
        self._send, self._finish = context.send, context.finish
        self._view, self.on_device = view, view.device.type == "cuda"
        self._lock = threading.RLock()
        self._suspended = False  # the cache has no memory until the next step
        self._writes = setup.writes[context.rank]
        self._node = setup.nodes[context.rank] if setup.nodes else None  # None: the engine is on one
        path = store_path() if self._node and setup.launch is not None else setup.path
        self._tunnel: TunnelServer | None = None
        if self._node and setup.nodes.index(self._node) == context.rank:
            launch = None if setup.launch is None else partial(start_store, path, StoreOptions(**setup.launch))
            self._tunnel = TunnelServer(self._reactor, self._send_frame, path, launch)
        self._fault = False  # the last poll failed
        self._step_events: deque[tuple[int, Any]] = deque(maxlen=STEP_EVENTS)  # until the next poll
        self._sync_loads: set[tuple[str, int]] = set()  # (request, load_id) that ``wait_until_done`` waits for
        self._timer: Timer | None = None
        self._timer_at = math.inf
        self._runner_polled = -math.inf  # when the model runner last polled, or made a step and need not poll
        self._step_poll_seconds = STEP_POLL_SECONDS[1]  # the current value for stores
        self._stores_at = math.inf  # when the model runner polls again while there are only stores
        self._reported_bytes = 0
        self._unsent: deque[EndedCopy] = deque()  # ended stores that the scheduler side does not know of
        self._sent_state: tuple[str, int] = ("", 0)
        self._withdrawn = False
        layouts = [part_layout(group, codecs.get(name)) for group, name in zip(view.groups, setup.codecs, strict=True)]
        hello = Hello(name=f"rank {self._rank}", pid=os.getpid(), kind="worker")

        def connect(on_change: Callable[[], None]) -> StoreClient:
            return StoreClient(self._reactor, path, hello, on_change=on_change)

        def copier(mapping: PoolMapping) -> Copier:
            made = make_copier(view, (mapping.address, mapping.nbytes, mapping), layouts, setup.offsets[context.rank])
            made.warm_up()
            return made

        user = MemoryUser(self._pool_changed, lambda: bool(self._engine.loads), self._lock)
        self._pool = StoreMemory(self._reactor, connect, copier, user)
        device = {"first_rate": DEVICE_RATE, "batches": DEVICE_BATCHES} if self.on_device else {}
        self._engine = CopyEngine(self._pool, [layout.nbytes for layout in layouts], **device)
        # By group, for the keys of checksums in slots: a late copy may find the same block there, but of an engine that
        # keeps other parts of it.
        ranks = repr([rank for rank, node in enumerate(setup.nodes) if node == self._node]).encode()
        parts = [layout_digest([each], [layout]) for each, layout in zip(view.groups, layouts, strict=True)]
        digests = [hashlib.blake2b(part + ranks, digest_size=8).digest() for part in parts]
        self._engine.salts = [np.uint64(int.from_bytes(digest, "little")) for digest in digests]
        self._pool.start()
        self._reactor.on_stop(self._close)

    # -- model runner's thread -------------------------------------------------------------------------------------

    def step(self, step: int, event: Any, lone: bool = False) -> bool:
        """The forward of ``step`` was launched; ``event`` marks its end, None without a device. A negative step is a
        call of vLLM without a step of the scheduler. Returns whether ``collect`` is due though nothing is loaded: not
        in a ``lone`` step (as of StepWork), whose output is as late as its launch."""
        NextLaunch.since = -math.inf
        if step < 0:
            return False
        self._suspended = False
        self._step_events.append((step, event))
        self._runner_polled = now = time.monotonic()
        if self._engine.on_model_stream and self._engine.model_stream is None:
            self._engine.model_stream = torch.cuda.current_stream(self._view.device)
        if not self._engine.stores.nbytes:
            return False
        if not self.on_device:
            if self._timer_at > now + POLL_AFTER_STEP:
                self._reactor.call_soon(self._reactor_poll)
            return False
        if self._timer_at > now + 2 * MAX_STEP_POLL_SECONDS:
            # This may be the last step for long; the timer was set when these jobs could not begin yet.
            self._reactor.call_soon(lambda: self._poll_within(STEP_POLL_SECONDS[1]))
        if lone and now >= self._stores_at:
            self._leave_to_reactor()
            return False
        return now >= self._stores_at

    def withdraw(self) -> None:
        """Report for good that this rank reaches no memory of the store."""
        self._withdrawn = True
        self._reactor.call_soon(self._pool_changed)

    def load(self, jobs: list[LoadJob], after: Any) -> None:
        """Begin loads; their blocks may be written behind ``after`` (torch.cuda.Event; None without a device)."""
        self._suspended = False
        if self._node is not None:
            jobs = [self._of_node(job) for job in jobs]
        if self.on_device and self._lock.acquire(timeout=MAX_WAIT_SECONDS):
            try:
                self._start(jobs, after)
                ended = self._poll()
            finally:
                self._lock.release()
            self._report(ended)
            self._reactor.call_soon(self._schedule)
        else:
            self._reactor.call_soon(lambda: self._load(jobs, after))

    def load_now(self, jobs: list[LoadJob], after: Any) -> None:
        """Begin all of these synchronous loads behind ``after``. What this thread launches on its stream from now on
        runs behind them; on a host they have ended when this returns. ``wait_until_done`` must follow.

        Raises KVTierError if the reactor holds the lock for too long; then nothing was begun. If it raises anything
        else, no more of them begins: they are reported failed, and vLLM may reuse their blocks. ``wait_until_done``
        waits for those that had begun.
        """
        if not self._lock.acquire(timeout=MAX_LOCK_SECONDS):
            raise KVTierError("the worker's reactor holds the node store's memory for too long")
        try:
            self._suspended = False
            self._runner_polled = time.monotonic()
            if self._node is not None:
                jobs = [self._of_node(job) for job in jobs]
            self._sync_loads.update((job.request_id, job.load_id) for job in jobs)
            self._start(jobs, after)
            self._engine.load_now()
        except Exception:
            self._engine.cancel_loads(lambda job: any(job is each for each in jobs), ABORTED)
            self._sync_loads &= self._engine.loads.names()  # the others were not queued
            raise
        finally:
            self._lock.release()

    def wait_until_done(self, seconds: float) -> None:
        """Wait at most ``seconds`` until the loads begun by ``load_now`` have ended; no store begins meanwhile."""
        until = time.monotonic() + seconds
        while self._sync_loads and (left := until - time.monotonic()) > 0:
            self._runner_polled = time.monotonic()
            if self._lock.acquire(timeout=left):
                try:
                    ended = self._poll(stores=False)
                finally:
                    self._lock.release()
                self._report(ended)
            if self._sync_loads:
                time.sleep(IDLE_POLL_SECONDS)
        self._sync_loads.clear()
        self._reactor.call_soon(self._schedule)

    def under_way(self) -> set[str]:
        """Requests whose loads have not ended. Any thread."""
        with self._lock:
            return self._engine.loads.request_ids()

    def collect(self, idle: bool = False) -> None:
        """See what ended and begin more. Call after each step's launch; ``idle``: the step computes nothing.

        A device copies by itself, so that this costs few calls. On the reactor each of them would release the
        interpreter and wait for it until the launches of the next step release it."""
        loading = bool(self._engine.loads)
        if idle and loading:
            self._stay()
            return
        if idle:  # perhaps the last step for long
            self._leave_to_reactor()
            return
        self._runner_polled = now = time.monotonic()
        if not (self.on_device and (loading or self._engine.stores.nbytes)):
            return
        if (loading or now >= self._stores_at) and self._lock.acquire(blocking=False):
            try:
                self._report(self._poll())
                pause = 0.0 if self._fault else self._engine.next_poll(steps_follow=True)
                self._stores_at = math.inf if pause is None else now + pause
            finally:
                self._lock.release()

    def cancel_loads(self, request_ids: list[str]) -> None:
        """Begin no more of these requests' loads. Each load still ends when nothing writes its blocks any more."""

        gone = set(request_ids)

        def cancel() -> None:
            with self._lock:
                self._engine.cancel_loads(lambda job: job.request_id in gone, ABORTED)
            self._reactor_poll()

        self._reactor.call_soon(cancel)  # behind the loads that went this way

    def suspend(self) -> None:
        """Stop using the cache's memory until the next step: vLLM takes it away when this returns."""
        with self._lock:
            self._suspended = True
            self._engine.cancel_all(ASLEEP)
            if self.on_device:
                torch.cuda.synchronize(self._view.device)
            ended = self._poll()
        self._report(ended)

    def _leave_to_reactor(self) -> None:
        """It takes over behind the output that waits for this thread: others may follow that are not polled behind,
        or none for long."""
        self._runner_polled = -math.inf
        if self.on_device and self._engine.stores.nbytes:
            self._reactor.call_within(REPORT_WITHIN, self._schedule)

    def _stay(self) -> None:
        """Copy and poll on this thread for a while. vLLM runs empty steps of a millisecond or more while all requests
        wait, and this thread has nothing else to do: the reactor's would have to wait for the interpreter."""
        left = self._engine.queued_load_bytes / self._engine.rates[0]
        until = time.monotonic() + (LAST_IDLE_SECONDS if left < LAST_IDLE_SECONDS else IDLE_SECONDS)
        ended = EndedCopy([], [], [])
        while not ended.loads and self._engine.loads and time.monotonic() < until:
            self._runner_polled = time.monotonic()
            with self._lock:
                some = self._poll(stores=self.on_device)  # a host's stores take this thread, and no request needs them
            ended = EndedCopy(*(a + b for a, b in zip(ended, some, strict=True)))
            if self.on_device and not some.loads:
                time.sleep(IDLE_POLL_SECONDS)
        self._report(ended)
        self._reactor.call_soon(self._schedule)

    # -- reactor's thread ------------------------------------------------------------------------------------------

    def store(self, message: m.StoreBlocks) -> None:
        if not self._writes[message.group]:
            return
        slots, instance = np.frombuffer(message.slots, np.int64), message.instance
        if self._node is not None:
            instances = instance.split(" ")
            slots, instance = slots.reshape(len(instances), -1)[self._node], instances[self._node]
            if not slots.all():
                return  # this node's store has these blocks
        with self._lock:
            try:
                self._engine.submit_store(
                    StoreJob(
                        message.order,
                        message.group,
                        np.frombuffer(message.blocks, np.int64),
                        np.frombuffer(message.keys, np.uint64),
                        slots,
                        message.step,
                        instance,
                    )
                )
            except Exception:
                logger.exception("kvtier: store worker: a store job could not be queued; its blocks are offered again")
                if message.order in self._engine.stores.ids():
                    self._engine.stores.cancel([(message.order, 0)])
                else:
                    self._report(EndedCopy([], [], [(message.order, 0)]))
            self._stores_at = min(self._stores_at, self._engine.stores_ready_at)
            if self._suspended:
                self._engine.stores.cancel([(message.order, 0)])
        self._poll_unless_stepping()

    def _send_frame(self, number: int, frame: bytes) -> None:
        self._send(m.StoreFrame(self._rank, number, frame))

    def tunnelled(self, message: m.StoreFrame) -> None:
        if self._tunnel is not None and message.rank == self._rank:
            self._tunnel.deliver(message.number, message.frame)

    def cancel(self, message: m.CancelStores) -> None:
        with self._lock:
            if self._node is not None:
                lost = [(order, 0) for order, _ in message.orders if order not in self._engine.stores.ids()]
                if lost:  # or ended already: the scheduler side hears of each from all its ranks, if it waits for them
                    self._send(m.Stored(self._rank, [], lost, 0, 0.0))
            self._engine.stores.cancel(message.orders)
            self._stores_at = -math.inf
        self._poll_unless_stepping()

    def _load(self, jobs: list[LoadJob], after: Any) -> None:
        with self._lock:
            self._start(jobs, after)
        self._reactor_poll()

    def _poll_unless_stepping(self) -> None:
        """The model runner polls after each step; this thread only while no step ends, as in a long prefill (the
        interpreter is free then), or when the engine is idle."""
        seconds = STEP_POLL_SECONDS[0] if self._engine.loads else self._step_poll_seconds
        wait = self._runner_polled + seconds - time.monotonic()
        if self.on_device and wait > 0 and not self._engine.stores.has_results:
            self._poll_within(wait)
        else:
            self._step_poll_seconds = STEP_POLL_SECONDS[1]
            self._reactor_poll()

    def _reactor_poll(self) -> None:
        with self._lock:
            ended = self._poll(stores=not self._launches())
        self._report(ended)
        self._schedule()

    def _launches(self) -> bool:
        """Whether a step's forward is being launched, or will be at once: this thread begins no store meanwhile.
        Beginning one holds the interpreter and the driver, and the launches wait for it: hundreds of kernels where no
        graph is replayed."""
        return self.on_device and time.monotonic() < NextLaunch.since + MAX_LAUNCH_SECONDS

    def _schedule(self) -> None:
        """Set the timer for the next poll; earlier than it was if something came meanwhile."""
        with self._lock:
            delay = FAULT_PAUSE if self._fault else self._engine.next_poll()
            if delay is not None and self._launches():  # stores that could begin are no reason
                delay = max(delay, LAUNCH_POLL_SECONDS[0 if self._engine.loads else 1])
        if delay is not None:
            self._poll_within(delay)

    def _poll_within(self, delay: float) -> None:
        if time.monotonic() + delay >= self._timer_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = time.monotonic() + delay
        self._timer = self._reactor.call_later(delay, self._timer_ran)

    def _timer_ran(self) -> None:
        self._timer, self._timer_at = None, math.inf
        if self._runner_polled + self._step_poll_seconds > time.monotonic():  # steps come: look less often
            self._step_poll_seconds = min(2 * self._step_poll_seconds, MAX_STEP_POLL_SECONDS)
        self._poll_unless_stepping()

    def _send_stored(self) -> None:
        """The scheduler side holds the blocks until it has this message."""
        try:
            while self._unsent:
                ended, total = self._unsent[0], self._engine.totals[1]
                nbytes = total - self._reported_bytes
                self._send(m.Stored(self._rank, ended.stored, ended.cut, nbytes, nbytes / self._engine.rates[1]))
                self._reported_bytes = total
                self._unsent.popleft()
        except Exception:
            self._reactor.call_later(FAULT_PAUSE, self._send_stored)
            raise

    def _pool_changed(self) -> None:
        state = ("", 0) if self._withdrawn else (self._pool.instance, self._pool.registered_pages * PAGE)
        if state != self._sent_state:
            self._sent_state = state
            self._send(m.PoolReady(self._rank, *state))
        self._reactor_poll()

    def _close(self) -> None:
        with self._lock:
            self._pool.close()

    # -- either thread ---------------------------------------------------------------------------------------------

    def _of_node(self, job: LoadJob) -> LoadJob:
        """With the slots of this rank's node."""
        groups = [replace(group, slots=group.by_node[self._node], by_node=None) for group in job.groups]
        return replace(job, groups=groups, instance=job.instance.split(" ")[self._node])

    def _start(self, jobs: list[LoadJob], after: Any) -> None:
        for job in jobs:
            self._engine.submit_load(job, after, None if after is None else after.query)
        if self._suspended:
            self._engine.cancel_all(ASLEEP)

    def _poll(self, stores: bool = True) -> EndedCopy:
        """Under the lock. An internal error must not cost the engine: the next poll tries again."""
        try:
            while self._step_events:
                self._engine.step_launched(*self._step_events.popleft())
            ended, self._fault = self._engine.poll(stores), False
        except Exception:
            if not self._fault:
                logger.exception("kvtier: store worker: polling copies failed; the next poll tries again")
            self._reactor.errors += 1  # the connector's worker looks for jobs that were lost by it
            ended, self._fault = EndedCopy([], [], []), True
        return ended

    def _report(self, ended: EndedCopy) -> None:
        for result in ended.loads:
            if result.corrupt:
                count = len(result.corrupt)
                logger.warning("kvtier: store worker: %d blocks have a wrong checksum; the store discards them", count)
            result.node = self._node or 0
            self._finish(result)
            self._sync_loads.discard((result.request_id, result.load_id))
        if ended.stored or ended.cut:
            self._unsent.append(ended)
            self._reactor.call_within(REPORT_WITHIN, self._send_stored)
