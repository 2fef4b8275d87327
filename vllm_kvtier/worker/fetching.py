"""A rank's fetches from other engines of the node, between its two threads: begun behind the right step, driven by
whoever has the time, and reported.

The model runner's thread begins what needs no mapping and looks for the end itself where the device copies, as it does
for pulls and loads; all else is the reactor's.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire.messages import HeadRange, RankInfo, Shared
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.worker.fetches import Fetches, FetchResult, share_memory
from vllm_kvtier.worker.peer_memory import PeerMemory
from vllm_kvtier.worker.source_watch import SourceWatch
from vllm_kvtier.worker.work import FetchOrder

logger = get_logger("vllm.kvtier.fetches")

# An engine that only waits stays with its fetches for so long at a time: vLLM's empty steps cost a millisecond each.
STAY = 3e-3
POLL = 50e-6  # how often a device's events are asked


class FetchWorker:
    def __init__(
        self,
        fetches: Fetches,
        call_soon: Callable[[Callable[[], None]], None],
        finish: Callable[[FetchResult], None],
        drive_soon: Callable[[], None],
    ):
        """``finish`` takes results, on any thread; ``drive_soon`` is called on the reactor's thread when something
        begins, and ``drive`` is to be called until nothing is ``active``."""
        self._fetches, self._call_soon, self._finish, self._drive_soon = fetches, call_soon, finish, drive_soon

    @property
    def active(self) -> bool:
        return self._fetches.active

    def under_way(self) -> set[str]:
        """Requests whose fetches have not ended."""
        return self._fetches.under_way()

    @property
    def on_device(self) -> bool:
        return self._fetches.on_device

    # -- model runner's thread -----------------------------------------------------------------------------------------

    def introduce(self, sources: dict[str, list[RankInfo]]) -> None:
        for instance, ranks in sources.items():
            self._fetches.introduce(instance, ranks)

    def begin_now(self, orders: list[FetchOrder], after: Any) -> None:
        """Before the forward is launched, which runs behind them. ``after``: as ``begin``'s."""
        self._fetches.start_now(orders, after)

    def settle(self, seconds: float) -> None:
        self._report(self._fetches.settle(seconds))

    def begin(self, orders: list[FetchOrder], after: Any) -> None:
        """Their blocks may be written behind ``after`` (torch.cuda.Event; None without a device)."""
        fetches, rest = self._fetches, orders
        if fetches.on_device and fetches.lock.acquire(blocking=False):
            try:
                rest = [order for order in orders if not fetches.ready(order.source)]
                self._report(fetches.start([order for order in orders if fetches.ready(order.source)], after))
            finally:
                fetches.lock.release()
        self._call_soon(lambda: self._begin(rest, after))

    def collect(self, idle: bool) -> None:
        """Look what ended. ``idle``: the step computes nothing, so that this thread has nothing else to do: a host's
        copies would have to wait for the interpreter elsewhere."""
        fetches = self._fetches
        if not fetches.active or not (idle or fetches.on_device):
            return
        until = time.monotonic() + (STAY if idle else 0.0)
        while True:
            results = fetches.drive()
            if results or not fetches.active or time.monotonic() >= until:
                break
            if fetches.on_device:
                time.sleep(POLL)
        self._report(results)

    def stop(self, why: str) -> None:
        """The cache's memory is about to be taken away."""
        self._report(self._fetches.stop(why))

    # -- reactor's thread ----------------------------------------------------------------------------------------------

    def drive(self) -> None:
        if self._fetches.active:
            self._report(self._fetches.drive())

    def _begin(self, orders: list[FetchOrder], after: Any) -> None:
        if orders:
            self._report(self._fetches.start(orders, after))
        self._drive_soon()

    def _report(self, results: Iterable[FetchResult]) -> None:
        for result in results:
            self._finish(result)


def open_node(
    memory: PeerMemory,
    heads: tuple[HeadRange, ...],
    rank: int,
    reactor: Reactor,
    finish: Callable[[FetchResult], None],
    drive_soon: Callable[[], None],
) -> tuple[FetchWorker | None, Shared | None]:
    """On the reactor's thread: (what fetches for us from engines of this node, what they may read of ours), each None
    where that cannot be, which is said."""
    if memory.transfer_view is not memory.view:  # peers see it encoded, or in host memory: nobody reads it as it is
        return None, None
    worker = shared = None
    try:
        fetches = Fetches(memory.view, memory.table, heads, rank)
        watch = SourceWatch(reactor, fetches.forget)
        fetches.added = watch.follow
        worker = FetchWorker(fetches, reactor.call_soon, finish, drive_soon)
        reactor.call_soon(fetches.warm_up)
    except Exception as error:
        _say("copied from engines of this node", error)
    try:
        shared = share_memory(memory)
    except Exception as error:
        _say("lent to engines of this node", error)
    return worker, shared


def _say(what: str, error: Exception) -> None:
    if not isinstance(error, KVTierError):
        logger.error("kvtier: a driver or library failed", exc_info=error)
    logger.warning("kvtier: KV is not %s: %s", what, error)
