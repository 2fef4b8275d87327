"""A rank's part in the node store: its connection, its memory, its copies, and what it tells the scheduler half.

Made on the reactor's thread when the scheduler half says where the store is. Copies are begun and looked after by
two threads: the reactor's, and the model runner's where the device copies by itself, which then need not wait for
the interpreter while a request does. ``_lock`` keeps them apart; the model runner only takes it if it is free.
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from vllm_kvtier import codecs
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.client import StoreClient
from vllm_kvtier.store.messages import Hello
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.reactor import Reactor, Timer
from vllm_kvtier.wire.slots import PAGE
from vllm_kvtier.worker.copier import make_copier
from vllm_kvtier.worker.offload import Ended, Offload
from vllm_kvtier.worker.pool import Pool
from vllm_kvtier.worker.queues import LoadResult
from vllm_kvtier.worker.views import CacheView
from vllm_kvtier.worker.work import MOST_LOCKED, LoadOrder, StoreOrder

logger = get_logger("vllm.kvtier.tiering")

FENCES = 64  # steps whose fence is kept until somebody looks
# A step that was launched lets stores begin; unless they are looked after within this anyway, it asks for that.
SOON = 30e-3  # seconds; longer than stores wait for company
# How long the model runner waits for the other thread before it leaves a load to it.
PATIENCE = 5e-3
# A model runner that has looked after the copies so lately will do so again soon, while a request waits for a load, or
# while there are only stores, which nobody waits for. In a longer step, as of a prefill, the reactor does it.
STEPPING = (5e-3, 30e-3)
# A forward takes no longer to launch; where one failed, nobody says that it was launched. How often the reactor looks
# after what is under way meanwhile, each time in the launches' way: loads, which have more than that given out ahead,
# and only stores, of which none begins then.
MOST_LAUNCHING = 0.1  # seconds
LAUNCHING = (2e-3, 20e-3)
# An engine that only waits for loads stays with them for so long at a time, or for so long if that should be the last
# time: what comes meanwhile waits for its end, and each empty step in between costs a millisecond.
IDLE_STRETCH, LAST_STRETCH = 3e-3, 10e-3
IDLE_POLL = 50e-6  # how often it then looks after a device's copies
# After an unforeseen error.
FAULT_PAUSE = 0.1
# A device's link, before it was measured: about half of PCIe 5.
DEVICE_RATE = 30e9
# Loads and stores given to a device ahead: 5 and 10 ms of such a link, in which nobody need look after them.
DEVICE_PIECES = (4, 8)


class TierWorker:
    def __init__(
        self,
        reactor: Reactor,
        rank: int,
        view: CacheView,
        setup: m.PoolSetup,
        tell: Callable[[m.Stored | m.PoolReady], None],
        finish: Callable[[LoadResult], None],
        ask_timeout: float = 2.0,
    ):
        """``tell`` speaks to the scheduler half (reactor's thread), ``finish`` takes results (any thread)."""
        self._reactor, self._rank, self._tell, self._finish = reactor, rank, tell, finish
        self._writes = setup.writes[rank]
        self._offsets = setup.offsets[rank]
        layouts = [part_layout(group, codecs.get(name)) for group, name in zip(view.groups, setup.codecs, strict=True)]
        self._device, self.on_device = view.device, view.device.type == "cuda"
        self._resting = False  # the cache has no memory until the next step
        self._fault = False  # the last drive failed
        self._lock = threading.RLock()
        self._fences: deque[tuple[int, Any]] = deque(maxlen=FENCES)
        self._hurried: set[tuple[str, int]] = set()  # loads that somebody waits for in ``settle``: request, ticket
        self._timer: Timer | None = None
        self._due = math.inf  # when the timer is
        self._stepped = -math.inf  # when the model runner's thread last came by
        self._stores_at = -math.inf  # when it is to look after the copies again, while there are only stores
        self._launched_by = -math.inf  # when the forward that it launches just now is taken to have been launched
        self._nbytes = 0
        self._untold: deque[Ended] = deque()  # stores that ended, of which the scheduler half has not heard
        self._told: tuple[str, int] = ("", 0)
        hello = Hello(name=f"rank {rank}", pid=os.getpid(), kind="worker")

        def connect(on_change: Callable[[], None]) -> StoreClient:
            return StoreClient(reactor, setup.path, hello, ask_timeout=ask_timeout, on_change=on_change)

        def copier(mapping: Any) -> Any:
            made = make_copier(view, (mapping.address, mapping.nbytes, mapping), layouts, self._offsets)
            made.warm_up()
            return made

        self._pool = Pool(
            reactor, connect, copier, self._pool_changed, busy=lambda: self._offload.loading, lock=self._lock
        )
        self._offload = Offload(
            self._pool,
            [layout.nbytes for layout in layouts],
            **({"first_rate": DEVICE_RATE, "pieces": DEVICE_PIECES} if self.on_device else {}),
        )
        self._pool.start()
        reactor.on_stop(self._close)

    # -- model runner's thread -------------------------------------------------------------------------------------

    def launching(self) -> None:
        """A step's forward is about to be launched: no store begins meanwhile on the other thread. Beginning one takes
        the driver's time, and the launches, of hundreds of kernels where no graph is replayed, wait for it."""
        self._launched_by = time.monotonic() + MOST_LAUNCHING

    def step(self, step: int, fence: Any) -> None:
        """The forward of ``step`` was launched; ``fence`` marks its end, None without a device."""
        self._launched_by = -math.inf
        if step < 0:  # a call of vLLM without a step of the scheduler's
            return
        self._resting = False
        self._fences.append((step, fence))
        if not self.on_device and self._offload.queued_store_bytes and self._due > time.monotonic() + SOON:
            self._reactor.call_soon(self._drive)

    def load(self, loads: list[LoadOrder], after: Any) -> None:
        """Begin loads; their blocks may be written behind ``after`` (torch.cuda.Event; None without a device)."""
        self._resting = False
        if self.on_device and self._lock.acquire(timeout=PATIENCE):
            try:
                self._start(loads, after)
                ended = self._advance()
            finally:
                self._lock.release()
            self._ended(ended)
            self._reactor.call_soon(self._schedule)
        else:
            self._reactor.call_soon(lambda: self._load(loads, after))

    def load_now(self, loads: list[LoadOrder], after: Any) -> None:
        """Begin loads, all of them, behind ``after``: what this thread launches on its stream from now on runs behind
        them. On a host they have ended when this returns. ``settle`` is to follow. Raises KVTierError if the other
        thread is at the memory for too long; then nothing was begun. If it raises anything else, no more of them is
        begun: they are reported failed, and their blocks are others' then. ``settle`` waits for what was."""
        if not self._lock.acquire(timeout=MOST_LOCKED):
            raise KVTierError("another thread is at the node store's memory for too long")
        try:
            self._resting = False
            self._stepped = time.monotonic()
            self._hurried.update((order.request_id, order.ticket) for order in loads)
            self._start(loads, after)
            self._offload.load_now()
        except Exception:
            self._offload.cancel_orders(loads)
            self._hurried &= self._offload.load_names()  # the others have not got so far
            raise
        finally:
            self._lock.release()

    def settle(self, seconds: float) -> None:
        """Wait until the loads begun by ``load_now`` have ended, at most so long; stores do not begin meanwhile.
        Results go to ``finish``."""
        until = time.monotonic() + seconds
        while self._hurried and (left := until - time.monotonic()) > 0:
            self._stepped = time.monotonic()
            if self._lock.acquire(timeout=left):
                try:
                    ended = self._advance(stores=False)
                finally:
                    self._lock.release()
                self._ended(ended)
            if self._hurried:
                time.sleep(IDLE_POLL)
        self._hurried.clear()
        self._reactor.call_soon(self._schedule)

    def under_way(self) -> set[str]:
        """Requests whose loads have not ended. Any thread."""
        with self._lock:
            return self._offload.loads_under_way()

    def cancel_loads(self, request_ids: list[str]) -> None:
        """Begin no more of these requests' loads. They end, as loads do, when nothing writes their blocks any more."""

        def cancel() -> None:
            with self._lock:
                self._offload.cancel_loads(request_ids)
            self._drive()

        self._reactor.call_soon(cancel)  # behind the loads that went this way

    def rest(self) -> None:
        """The cache's memory is about to be taken away: nothing touches it until the next step."""
        with self._lock:
            self._resting = True
            self._offload.cancel_all("the engine went to sleep")
            if self.on_device:
                torch.cuda.synchronize(self._device)
            ended = self._advance()
        self._ended(ended)

    def collect(self, idle: bool = False) -> None:
        """Look what ended and begin more; results of loads go to ``finish``. Call after each step's launch.
        ``idle``: the step computes nothing.

        A device copies by itself, so that this costs some calls. On the reactor's thread they would cost more: each
        of them gives the interpreter up, and gets it back when the launches of the next step let it go.
        """
        loading = self._offload.loading
        if idle and loading:
            self._stay()
            return
        if not (self.on_device and (loading or self._offload.queued_store_bytes)):
            return
        self._stepped = now = time.monotonic()
        if (loading or now >= self._stores_at) and self._lock.acquire(blocking=False):
            try:
                self._ended(self._advance())
                pause = None if self._fault or self._offload.awaits_step else self._offload.next_poll()
                self._stores_at = -math.inf if pause is None else now + pause
            finally:
                self._lock.release()
        if self._due > now + 2 * STEPPING[1]:
            # This may have been the last step for long; the timer was set when its orders could not begin yet.
            self._reactor.call_soon(lambda: self._look_again(STEPPING[1]))

    def _stay(self) -> None:
        """vLLM goes through empty steps while all requests wait, a millisecond or more each. This thread has nothing
        else to do: the host's copies are made here, for which the reactor's would have to wait for the interpreter,
        and a load that ends is seen at once."""
        left = self._offload.queued_load_bytes / self._offload.rates[0]
        until = time.monotonic() + (LAST_STRETCH if left < LAST_STRETCH else IDLE_STRETCH)
        ended = Ended([], [], [])
        while not ended.loads and self._offload.loading and time.monotonic() < until:
            self._stepped = time.monotonic()
            with self._lock:
                some = self._advance(stores=self.on_device)  # the host's take this thread, and nobody waits for them
            ended = Ended(*(a + b for a, b in zip(ended, some, strict=True)))
            if self.on_device and not some.loads:
                time.sleep(IDLE_POLL)  # a device's events can only be asked
        self._ended(ended)
        self._reactor.call_soon(self._schedule)

    # -- reactor's thread ------------------------------------------------------------------------------------------

    def store(self, message: m.StoreBlocks) -> None:
        if not self._writes[message.group]:
            return
        with self._lock:
            try:
                self._submit(message)
            except Exception:
                logger.exception("kvtier: an order to store blocks could not be begun; they are offered again")
                if message.order in self._offload.stores_under_way():
                    self._offload.cancel([(message.order, 0)])
                else:
                    self._ended(Ended([], [], [(message.order, 0)]))
            self._stores_at = -math.inf
            if self._resting:
                self._offload.cancel([(message.order, 0)])
        self._drive_unless_stepping()

    def _submit(self, message: m.StoreBlocks) -> None:
        self._offload.submit_store(
            StoreOrder(
                message.order,
                message.group,
                np.frombuffer(message.blocks, np.int64),
                np.frombuffer(message.keys, np.uint64),
                np.frombuffer(message.slots, np.int64),
                message.step,
                message.instance,
            )
        )

    def cancel(self, message: m.CancelStores) -> None:
        with self._lock:
            self._offload.cancel(message.orders)
            self._stores_at = -math.inf
        self._drive_unless_stepping()

    def _load(self, loads: list[LoadOrder], after: Any) -> None:
        with self._lock:
            self._start(loads, after)
        self._drive()

    def _start(self, loads: list[LoadOrder], after: Any) -> None:
        for order in loads:
            self._offload.submit_load(order, after, None if after is None else after.query)
        if self._resting:
            self._offload.cancel_all("the engine went to sleep")

    def _advance(self, stores: bool = True) -> Ended:
        """Under the lock, on either thread. What nobody foresaw must not cost the engine: it is tried again."""
        try:
            while self._fences:
                self._offload.step_launched(*self._fences.popleft())
            ended, self._fault = self._offload.drive(stores), False
        except Exception:
            if not self._fault:
                logger.exception("kvtier: looking after copies failed; it is tried again")
            self._reactor.errors += 1  # what may be lost by it is looked for
            ended, self._fault = Ended([], [], []), True
        return ended

    def _drive_unless_stepping(self) -> None:
        """The model runner's thread does it after each step; this one only while no step ends, as in a long prefill
        (the interpreter is free then) or when the engine is idle."""
        patience = STEPPING[0 if self._offload.loading else 1]
        wait = self._stepped + patience - time.monotonic() if self.on_device else 0.0
        if wait > 0:
            self._look_again(wait)
        else:
            self._drive()

    def _drive(self) -> None:
        with self._lock:
            ended = self._advance(stores=not self._launches())
        self._ended(ended)
        self._schedule()

    def _launches(self) -> bool:
        return self.on_device and time.monotonic() < self._launched_by

    def _schedule(self) -> None:
        """Look again when that makes sense: sooner than was thought, if something came meanwhile."""
        with self._lock:
            delay = FAULT_PAUSE if self._fault else self._offload.next_poll()
            if delay is not None and self._launches():  # stores that could begin are no reason
                delay = max(delay, LAUNCHING[0 if self._offload.loading else 1])
        if delay is not None:
            self._look_again(delay)

    def _look_again(self, delay: float) -> None:
        if time.monotonic() + delay >= self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = time.monotonic() + delay
        self._timer = self._reactor.call_later(delay, self._again)

    def _again(self) -> None:
        self._timer, self._due = None, math.inf
        self._drive_unless_stepping()

    def _ended(self, ended: Ended) -> None:
        """Any thread."""
        for result in ended.loads:
            self._finish(result)
            self._hurried.discard((result.request_id, result.ticket))
        if ended.stored or ended.cut:
            self._untold.append(ended)
            self._reactor.call_soon(self._tell_stored)

    def _tell_stored(self) -> None:
        """Blocks are held until the scheduler half has heard of it."""
        try:
            while self._untold:
                ended, total = self._untold[0], self._offload.totals[1]
                nbytes = total - self._nbytes
                self._tell(m.Stored(self._rank, ended.stored, ended.cut, nbytes, nbytes / self._offload.rates[1]))
                self._nbytes = total
                self._untold.popleft()
        except Exception:
            self._reactor.call_later(FAULT_PAUSE, self._tell_stored)
            raise

    def _pool_changed(self) -> None:
        state = (self._pool.instance, self._pool.registered_pages * PAGE)
        if state != self._told:
            self._told = state
            self._tell(m.PoolReady(self._rank, *state))
        self._drive()

    def _close(self) -> None:
        with self._lock:
            self._pool.close()
