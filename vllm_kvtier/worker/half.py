"""Worker half of the connector: one per rank, on the engine's model-runner process.

The model runner's thread hands over each step's work and collects results; connecting, checksums on CPU and waiting
happen on the worker's reactor, which sleeps while nothing is under way. NIXL knows one thread at a time, so a lock
guards it. The model runner's thread takes that lock only if it is free: then it posts reads and looks for their end
itself, which saves a pull the time its own thread would wait for the interpreter.
"""

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from vllm_kvtier.containment import Containment
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.link import LinkClient
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker.far import FarWorker
from vllm_kvtier.worker.fences import Fences
from vllm_kvtier.worker.fetches import FetchResult
from vllm_kvtier.worker.fetching import FetchWorker, open_node
from vllm_kvtier.worker.hurried import Hurried
from vllm_kvtier.worker.memory import Pending
from vllm_kvtier.worker.one_core import stay_on_one_core
from vllm_kvtier.worker.peer_memory import PeerMemory
from vllm_kvtier.worker.pulls import PullResult, Pulls
from vllm_kvtier.worker.queues import LoadResult
from vllm_kvtier.worker.tiering import TierWorker
from vllm_kvtier.worker.transport import NixlTransport
from vllm_kvtier.worker.views import CacheView
from vllm_kvtier.worker.work import FailedOrder, FetchOrder, LoadOrder, PullOrder, StepWork, SumBatch

logger = get_logger("vllm.kvtier.worker")

Order = LoadOrder | FetchOrder | PullOrder | FailedOrder
Result = PullResult | FetchResult | LoadResult

# While a transfer runs, the reactor polls NIXL this often: finer than a decode step, coarse enough to leave the
# interpreter to the model runner.
POLL = 50e-6
# One stretch of polling before sockets get a turn.
STRETCH = 2e-3
# While peers read from us, NIXL needs progress only where reads are emulated (TCP, shared memory); RDMA does not.
SERVE_POLL = 200e-6
# What a device does by itself (checksums that nobody waits for, copies) is looked at this often: each look takes the
# interpreter from the model runner, which needs all of it where steps are short.
DEVICE_PAUSE = 2e-3
# After an unforeseen error while polling.
FAULT_PAUSE = 0.1
# Between two looks at reads that did not end when the cache's memory was taken away.
LEFT_PAUSE = 1.0
ASLEEP = "the engine went to sleep"


@dataclass
class StepResults:
    """What ended since the last step, for vLLM and for the scheduler half."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad_blocks: set[int] = field(default_factory=set)
    results: list[Result] = field(default_factory=list)


class WorkerHalf:
    def __init__(
        self,
        rank: int,
        agent_name: str,
        link_path: str,
        backends: list[str],
        containment: Containment,
        movable: bool = False,
    ):
        """``movable``: vLLM may take the cache's memory away, as in sleep mode."""
        self._rank, self._agent_name, self._backends, self._movable = rank, agent_name, backends, movable
        self._contain, self._errors = containment, 0  # seen so far
        self._submitted: StepWork | None = None
        self._outstanding: dict[str, Order] = {}  # by request: asynchronous orders whose end vLLM has not been told
        self._lives = itertools.count(1)  # of the cache's memory
        self._asleep = False
        self._to_end: list[tuple[str, Callable[[], object]]] = []  # what ``sleep`` could not end yet, with its name
        self._leaving: list[Pulls] = []  # of memory that was taken away; their agents may not have ended
        self._set_up: Callable[[], None] = lambda: None  # reactor's thread: what ``register`` was given
        self._reactor = Reactor(f"kvtier-worker-{rank}")
        self._link = LinkClient(self._reactor, link_path, self._heard, self._meet)
        self._met = False  # whether there is a scheduler half
        self._begin: Callable[[], None] | None = None  # what is to be done then
        self._transport: NixlTransport | None = None
        self._memory: PeerMemory | None = None
        self._pulls: Pulls | None = None
        self._tier: TierWorker | FarWorker | None = None
        self._fetching: FetchWorker | None = None
        self._sources: dict[str, list[m.RankInfo]] = {}  # engines that were introduced
        self._view: CacheView | None = None
        self._unusable: str | None = None
        self._device: int | None = None  # of CUDA
        self._fences: Fences | None = None  # of the model runner's thread
        # A step, and what was launched before its forward.
        self._before: tuple[StepWork, torch.cuda.Event | None] | None = None
        self._serving = False
        self._driving = False
        self._idle = False  # whether the last step computes nothing
        self._summing: list[tuple[int, Pending]] = []
        self._urgent = -1  # checksums of steps up to this one are waited for
        self._hurried = Hurried()
        self._done: list[Result] = []
        self._done_lock = threading.Lock()
        self._nixl = threading.Lock()  # guards transport, pulls and memory
        self._reactor.call_soon(stay_on_one_core)  # the model has the others
        self._reactor.start()

    # -- model runner's thread -----------------------------------------------------------------------------------

    def register(
        self,
        describe: Callable[[], CacheView],
        share: Callable[[CacheView], PeerMemory],
        shards: Callable[[CacheView], tuple[int, ...]],
        heads: Callable[[CacheView], tuple[m.HeadRange, ...]] = lambda view: (),
    ) -> None:
        """Set up in the background from the engine's tensors; requests before it is ready are computed.

        It begins when the scheduler half is there. vLLM makes that when the model is warmed up: until then it captures
        CUDA graphs, which fails, and the engine with it, if another thread allocates, pins or loads meanwhile.

        ``share``: what peers are to read of the cache, and how. ``shards``: by group, which part of a block this rank
        holds (ranks with equal bytes name the same). ``heads``: by group, which KV heads; () if that is not known:
        then nothing is shared with other engines of the node, or fetched from them."""
        device = self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._set_up = lambda: self._register(describe, share, shards, heads, device)
        self._reactor.call_soon(lambda: self._when_met(self._set_up))

    def sleep(self) -> None:
        """vLLM is about to take the KV cache's memory away; loads of aborted requests may be under way. Nothing touches
        it when this returns. Idempotent; a call that is repeated completes what failed.

        The addresses come back with other memory behind them: copies to and from the store do not mind, but what NIXL
        registered, and peers mapped, is gone for good."""
        with self._nixl:
            slept, self._asleep, self._unusable = self._asleep, True, ASLEEP
            try:
                # NIXL first: reads that it answers for peers would end this process when the memory is gone.
                if not slept:
                    self._to_end += self._parts_to_end()
                self._to_end = [part for part in self._to_end if not self._ended(*part)]
            finally:
                if not slept:
                    self._reactor.call_soon(lambda: self._link.tell(m.Asleep(self._rank)))

    def _parts_to_end(self) -> list[tuple[str, Callable[[], object]]]:
        """What touches the cache's memory, with its name; each may be called again where it failed. But for ``_tier``
        nothing of this half knows of them any more."""
        pulls, tier, fetching, memory, device = self._pulls, self._tier, self._fetching, self._memory, self._device
        self._fetching = self._pulls = self._transport = self._memory = None
        parts: list[tuple[str, Callable[[], object]]] = []
        if pulls is not None:
            self._leaving.append(pulls)
            self._reactor.call_soon(lambda: self._see_off(pulls))  # after ``sleep``, whether or not NIXL ends in it
            parts.append(("ending NIXL", lambda: self._end_pulls(pulls)))
        if tier is not None:
            parts.append(("ending the store's copies", tier.rest))
        if fetching is not None:
            parts.append(("ending fetches", lambda: fetching.stop(ASLEEP)))
        if device is not None:  # checksums, and what is encoded for peers
            parts.append(("waiting for the device", lambda: torch.cuda.synchronize(device)))
        if memory is not None:
            parts.append(("closing the memory", memory.close))
        return parts

    def _ended(self, where: str, part: Callable[[], object]) -> bool:
        """Whether ``part`` went well: tried twice, and again by the next ``sleep``."""
        ended = lambda: part() or True  # noqa: E731
        return bool(self._contain.attempt(where, ended, repair=ended))

    def _end_pulls(self, pulls: Pulls) -> None:
        for result in pulls.stop(ASLEEP):
            self._finish(result)

    def wake(self) -> None:
        """The KV cache has memory again, where it was before: peers may read it anew. Idempotent."""
        with self._nixl:
            if not self._asleep:
                return
            self._asleep, self._unusable = False, None
        self._reactor.call_soon(lambda: self._when_met(self._set_up))

    def begin(self, work: StepWork) -> None:
        """Call when a step begins: of its forward nothing has been launched.

        The blocks that its orders fill were given up by other requests a moment ago. What was launched before may
        write them yet (the forward or the drafts of a request that was aborted or preempted; what zeroes new blocks),
        or read them (a window's last blocks). So nothing is brought into them before that has ended on the device,
        whatever the engine's role: vLLM holds blocks back for consumers only, and only those of requests that ended.
        """
        self._before = work, self._fence() if work.pulls or work.loads or work.fetches else None
        self._sources.update(work.sources)

    def _begun(self, work: StepWork) -> torch.cuda.Event | None:
        """What ``begin`` marked; if it failed, what has been launched by now, which is more."""
        if self._before is None or self._before[0] is not work:
            self.begin(work)
        return self._before[1]

    def hurry(self, work: StepWork) -> None:
        """Call before a step's forward is launched: it runs behind the step's hurried loads and fetches."""
        if self._tier is not None:
            self._tier.launching()
        if not (work.loads or work.fetches):
            return
        loads = [order for order in work.loads if order.hurried]
        if loads and self._tier is not None:
            self._hurried.begin(loads, lambda orders: self._tier.load_now(orders, self._begun(work)))
        fetches = [order for order in work.fetches if order.hurried]
        if fetches and self._fetching is not None:
            self._fetching.introduce(work.sources)
            self._hurried.begin(fetches, lambda orders: self._fetching.begin_now(orders, self._begun(work)))

    def submit(self, work: StepWork) -> None:
        """A step's work; call when the step's forward has been launched (sums are made behind it). Waits for hurried
        loads and fetches: nothing computed on them goes anywhere before they have been checked."""
        if work is self._submitted:  # vLLM's call is repeated after an error
            return
        attempt, tier, fetching = self._contain.attempt, self._tier, self._fetching
        self._idle = work.idle
        # Before anything else: from now on the end of each of these is reported, whatever happens.
        for order in (*work.loads, *work.fetches, *work.failed):
            if order.hurried:
                self._hurried.due.append(order)
            else:
                self._outstanding[order.request_id] = order
        for order in work.pulls:
            self._outstanding[order.request_id] = order
        self._submitted = work
        if work.failed:
            attempt("failed orders", self._fail, work.failed)
        if fetching is not None and work.sources:
            attempt("sources", fetching.introduce, work.sources)
        if work.loads or work.fetches:
            attempt("loads", self._begin_loads, work)
        if work.aborted and tier is not None:
            attempt("aborts", tier.cancel_loads, work.aborted)
        attempt("step", self._launched, work, tier)

    def _launched(self, work: StepWork, tier: TierWorker | FarWorker | None) -> None:
        fence = self._fence() if work.sums or tier is not None else None
        if tier is not None:
            self._contain.attempt("step of the store's copies", tier.step, work.step, fence)
        before, self._before = self._begun(work), None
        if not (work.sums or work.pulls or work.sources):
            return
        if work.pulls and self._pulls is not None and self._nixl.acquire(blocking=False):
            try:
                self._contain.attempt("pulls", self._start, work, before, False)
            finally:
                self._nixl.release()
        self._reactor.call_soon(lambda: self._work(work, before, fence))

    def _begin_loads(self, work: StepWork) -> None:
        tier, fetching = self._tier, self._fetching
        loads, fetches = ([order for order in orders if not order.hurried] for orders in (work.loads, work.fetches))
        if tier is not None:
            self._hurried.settle(LoadOrder, tier)
        if fetching is not None:
            self._hurried.settle(FetchOrder, fetching)
        if loads:
            self._contain.attempt("loads", self._load, loads, work)
        if fetches:
            self._contain.attempt("fetches", self._fetch, fetches, work)

    def _fail(self, orders: list[FailedOrder]) -> None:
        """The scheduler half could not order them."""
        for order in orders:
            if not order.hurried:
                self._finish(_lost(order))

    def _fence(self) -> torch.cuda.Event | None:
        """Marks what was launched so far. While the cache is being set up too: by the time that this step's sums are
        looked at it may be there, and what is encoded before it was computed is wrong without anybody noticing."""
        if self._device is None or (self._view is not None and self._view.device.type != "cuda"):
            return None
        if self._fences is None:
            self._fences = Fences(self._device)
        return self._fences.mark()

    def _load(self, loads: list[LoadOrder], work: StepWork) -> None:
        if self._tier is not None:
            self._tier.load(loads, self._begun(work))
            return
        for order in loads:
            reason = "the node store's memory is not mapped here"
            self._finish(LoadResult(order.request_id, order.all_blocks, reason, 0, 0.0, 0.0))

    def _fetch(self, orders: list[FetchOrder], work: StepWork) -> None:
        if self._fetching is not None:
            self._fetching.begin(orders, self._begun(work))
            return
        reason = self._unusable or "this engine reads no other's memory, or not yet"
        for order in orders:
            # No source is asked again: before all ranks are set up no order comes, so it stays as it is.
            self._finish(FetchResult(order.request_id, order.all_blocks, True, reason, 0, 0.0, unmappable=reason))

    def collect(self) -> StepResults:
        """Everything that ended since the last call."""
        attempt = self._contain.attempt
        if self._tier is not None:
            attempt("copies", self._tier.collect, self._idle)
        if self._fetching is not None:
            attempt("fetches", self._fetching.collect, self._idle)
        # Not on a CPU, where checking what arrived takes the calling thread as long as copying it.
        look = self._pulls is not None and self._pulls.active and self._memory.on_device
        if look and self._nixl.acquire(blocking=False):
            try:
                for result in attempt("pulls", self._pulls.drive, True) or ():
                    self._finish(result)
            finally:
                self._nixl.release()
        if self._outstanding:
            attempt("lost orders", self._look_for_lost)
        return attempt("results", self._results, repair=self._results) or StepResults()

    def _results(self) -> StepResults:
        """Nothing is taken from where it waits before all is put together."""
        with self._done_lock:
            done = list(self._done)
        others, hurried = self._hurried.judge(done)
        # One that was given up here may be heard of later.
        ended = [result for result in others if result.request_id in self._outstanding]
        out = StepResults(results=ended + hurried)
        out.finished.update(result.request_id for result in ended)
        for result in out.results:
            if result.failed:
                out.failed.add(result.request_id)
                out.bad_blocks |= result.bad_blocks
        self._hurried.forget_due()
        for request_id in out.finished:
            del self._outstanding[request_id]
        with self._done_lock:
            del self._done[: len(done)]
        return out

    def _look_for_lost(self) -> None:
        """After an error: a load of which no part of this half knows any more would never be reported. All that is
        queued on the reactor by now is run before the look."""
        errors = self._contain.errors + self._reactor.errors
        if errors != self._errors:
            self._errors = errors
            orders = list(self._outstanding.values())
            self._reactor.call_soon(lambda: self._give_up_lost(orders))

    def shutdown(self) -> None:
        attempt = self._contain.attempt
        attempt("ending the reactor", self._reactor.stop)
        fetching, self._fetching = self._fetching, None
        if fetching is not None:
            attempt("ending fetches", fetching.stop, "the engine ends")
        if self._memory is not None:
            attempt("closing the memory", self._memory.close)

    # -- reactor's thread ----------------------------------------------------------------------------------------

    def _give_up_lost(self, orders: list[Order]) -> None:
        known = set()
        if self._tier is not None:
            known |= self._tier.under_way()
        if self._fetching is not None:
            known |= self._fetching.under_way()
        with self._nixl:
            for pulls in (*self._leaving, *filter(None, [self._pulls])):
                known |= pulls.under_way()
        with self._done_lock:
            known.update(result.request_id for result in self._done)
        for order in orders:
            if order.request_id not in known:
                self._finish(_lost(order))

    def _when_met(self, begin: Callable[[], None]) -> None:
        if self._met:
            begin()
        else:
            self._begin = begin

    def _meet(self) -> None:
        self._met = True
        begin, self._begin = self._begin, None
        if begin is not None:
            begin()

    def _register(self, describe, share, shards, heads, device: int | None) -> None:
        with self._nixl:  # sleep mode may want the memory just now
            if not self._asleep and self._memory is None:
                self._register_now(describe, share, shards, heads, device)

    def _register_now(self, describe, share, shards, heads, device: int | None) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # a new thread starts on device 0
            view = self._view = describe()
            self._link.tell(m.Described(self._rank, view.groups, shards(view)))
            memory = self._memory = share(view)
            held = heads(view)
            shared = None
            if held:
                self._fetching, shared = open_node(
                    memory, held, self._rank, self._reactor, self._finish, self._drive_soon
                )
                if self._fetching is not None:
                    self._fetching.introduce(self._sources)
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
                sums_base=memory.table.data_ptr(),
                heads=held,
                shared=shared,
            )
        except Exception as error:  # whatever is wrong with NIXL or the cache, the engine serves without pulls
            self._unusable = str(error)
            if not isinstance(error, KVTierError):
                logger.exception("kvtier: setting up rank %d failed", self._rank)
            self._link.tell(m.Unusable(self._rank, str(error)[:1000]))
            return
        if transport is not None:
            self._transport = transport
            self._pulls = Pulls(transport, memory, self._rank)
            for instance, ranks in self._sources.items():
                self._pulls.introduce(instance, ranks)
        self._link.tell(m.Register(info, memory.wire_codec))

    def _open_nixl(self, memory: PeerMemory, needed: bool) -> NixlTransport | None:
        """None if NIXL is of no use here; raises whatever is wrong if it is ``needed``."""
        try:
            life = next(self._lives)
            name = self._agent_name if life == 1 else f"{self._agent_name}.{life}"
            transport = NixlTransport(name, self._backends, self._movable)
            memory.register(transport)
            return transport
        except Exception as error:
            if needed:
                raise
            if not isinstance(error, KVTierError):
                logger.exception("kvtier: setting up NIXL on rank %d failed", self._rank)
            self._unusable = str(error)
            logger.warning("kvtier: KV is exchanged with engines of this node only: %s", error)
            return None

    def _heard(self, message: m.LinkMessage) -> None:
        match message:
            case m.Serve():
                self._serving = message.active
                self._drive_soon()
            case m.PoolSetup() if self._tier is None and self._view is not None:
                self._tier = TierWorker(
                    self._reactor, self._rank, self._view, message, self._link.tell, self._finish
                )
            case m.FarSetup() if self._tier is None and self._view is not None:
                self._tier = FarWorker(self._reactor, self._rank, self._view, message, self._link.tell, self._finish)
            case m.StoreBlocks() if self._tier is not None:
                self._tier.store(message)
            case m.CancelStores() if self._tier is not None:
                self._tier.cancel(message)

    def _work(self, work: StepWork, before, fence) -> None:
        with self._nixl:
            # Looked at under the lock: sleep mode takes the cache's memory away.
            if self._pulls is not None:
                self._start(work, before, connect=True)
            if work.sums and (self._pulls is not None or self._fetching is not None):
                if work.urgent:
                    self._urgent = work.step
                self._sum(work.step, work.sums, fence)
        self._drive_soon()
        for order in work.pulls:
            self._finish(self._impossible(order))

    def _start(self, work: StepWork, before, connect: bool) -> None:
        """Under the lock: begin the step's pulls, behind ``before``; without ``connect`` only from peers we are
        connected to."""
        for instance, ranks in work.sources.items():
            self._pulls.introduce(instance, ranks)
        work.sources = {}
        if not connect:
            now = [order for order in work.pulls if self._pulls.connected(order.source)]
        else:
            now = list(work.pulls)
        for order in now:
            work.pulls.remove(order)
            result = self._pulls.start(order, before)
            if result is not None:
                self._finish(result)

    def _sum(self, step: int, sums: list[SumBatch], fence) -> None:
        try:
            self._summing.append((step, self._memory.make_sums(sums, fence)))
        except Exception:
            # Without checksums nobody can verify these blocks: their entries stay wrong and peers compute instead.
            logger.exception("kvtier: checksums of step %d failed", step)
            self._summing.append((step, Pending(None)))  # in its turn: it also speaks for the steps before it

    def _impossible(self, order: PullOrder) -> PullResult:
        blocks = {int(i) for g in order.groups for i in g.local}
        return PullResult(order.request_id, blocks, True, self._unusable or "not set up yet", 0, 0.0)

    def _finish(self, result: Result) -> None:
        with self._done_lock:
            self._done.append(result)

    def _see_off(self, pulls: Pulls) -> None:
        """Reads of a memory that was taken away, whose agent did not end: reported when it has."""
        with self._nixl:
            for result in pulls.drive() if pulls.active else ():
                self._finish(result)
            if not pulls.active:
                self._leaving.remove(pulls)
                return
        self._reactor.call_later(LEFT_PAUSE, lambda: self._see_off(pulls))

    def _drive_soon(self) -> None:
        if not self._driving and self._busy():
            self._driving = True
            self._reactor.call_soon(self._drive)

    def _busy(self) -> bool:
        serving = self._serving and self._transport is not None
        ours = (self._pulls, self._fetching)
        return bool(serving or self._summing or any(each is not None and each.active for each in ours))

    def _drive(self) -> None:
        """Poll what is under way for a stretch; runs again until nothing is."""
        try:
            pause = self._poll()
        except Exception:
            logger.exception("kvtier: polling failed; trying again")
            self._reactor.errors += 1
            pause = FAULT_PAUSE
        self._driving = pause is not None
        if pause:
            self._reactor.call_later(pause, self._drive)
        elif pause is not None:
            self._reactor.call_soon(self._drive)

    def _poll(self) -> float | None:
        """One stretch; after how many seconds the next one should follow, None if nothing is under way."""
        end = time.monotonic() + STRETCH
        while True:
            while self._summing and self._summing[0][1].done():
                self._link.tell(m.Summed(self._rank, self._summing.pop(0)[0]))
            with self._nixl:
                pulling = self._pulls is not None and self._pulls.active
                for result in self._pulls.drive() if pulling else ():
                    self._finish(result)
                pulling = pulling and not self._pulls.resting
                serving = self._serving and self._transport is not None
                if serving:
                    self._transport.progress()
            fetching = self._fetching
            if fetching is not None:
                fetching.drive()
            if not self._busy():
                return None
            awaited = self._summing and self._summing[0][0] <= self._urgent
            # A device copies by itself, and whoever runs the steps looks for the end as well.
            copying = fetching is not None and fetching.active and not fetching.on_device
            soon = pulling or awaited or copying
            if not (soon or serving):
                return DEVICE_PAUSE
            if time.monotonic() >= end:
                return 0.0
            time.sleep(POLL if soon else SERVE_POLL)


def _lost(order: Order) -> Result:
    """Of an order that was not begun, or of whose end nothing was heard; nothing writes its blocks."""
    blocks = {block for group in order.groups for block in group.blocks.tolist()}
    reason = "an internal error; see the log"
    if isinstance(order, PullOrder):
        return PullResult(order.request_id, blocks, True, reason, 0, 0.0)
    if isinstance(order, FetchOrder):
        return FetchResult(order.request_id, blocks, True, reason, 0, 0.0)
    return LoadResult(order.request_id, blocks, reason, 0, 0.0, 0.0)
