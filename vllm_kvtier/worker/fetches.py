"""Blocks fetched from other engines' caches on this node: orders, what becomes of each, and when it is known.

A copier does the copying (``peer_copier``). A fetch is reported when nothing of it is under way any more, right or
wrong. Unlike a read over the network it always ends: a kernel that was launched does, whatever happens to the source,
and plain copies are made by whoever drives this.

Called from two threads, the reactor's and the model runner's; ``lock`` keeps them apart, and none of them holds it for
longer than it takes to map a source, or for a piece of a host's copies, but for ``start_now``, ``settle`` and ``stop``.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire.messages import HeadRange, RankInfo, Shared
from vllm_kvtier.worker import process_memory
from vllm_kvtier.worker.cover import cover
from vllm_kvtier.worker.peer_copier import Copy, CopyJob, PeerCopier, make_peer_copier
from vllm_kvtier.worker.peer_memory import PeerMemory
from vllm_kvtier.worker.pulls import PullResult
from vllm_kvtier.worker.views import CacheView
from vllm_kvtier.worker.work import MOST_LOCKED, FetchOrder

logger = get_logger("vllm.kvtier.fetches")



@dataclass
class FetchResult(PullResult):
    unmappable: str = ""  # why this source can never be read so; then all blocks are bad
    ticket: int = 0  # of its order


@dataclass(eq=False)
class _Fetch:
    """What one call of the copier does."""

    orders: list[FetchOrder]
    copy: Copy
    started: float
    hurried: bool = False


def share_memory(memory: PeerMemory) -> Shared:
    """What other processes of this node may read: the cache as it is and the table of its checksums. Raises KVTierError
    if it cannot be shared."""
    view = memory.view
    spans = [*view.spans, (memory.table.data_ptr(), memory.table.numel() * 8)]
    if view.device.type == "cuda":
        from vllm_kvtier.worker import cuda_ipc

        return cuda_ipc.share(spans, view.device)
    return process_memory.share(spans)


class Fetches:
    def __init__(
        self,
        view: CacheView,
        table: torch.Tensor,
        heads: tuple[HeadRange, ...],
        rank: int,
        copier: PeerCopier | None = None,
    ):
        """``table``: int64 [num_blocks], our checksums, where ``view`` is. ``heads``: by group, which ones we hold."""
        # Told of each source that is read for the first time: it is to be ``forgotten`` when a process of it ends.
        self.added: Callable[[str, Iterable[Shared]], None] = lambda source, shared: None
        self.lock = threading.RLock()
        self.on_device = view.device.type == "cuda"
        self._view, self._heads, self._rank = view, heads, rank
        self._copier = make_peer_copier(view, table) if copier is None else copier
        self._introduced: dict[str, list[RankInfo]] = {}
        self._ready: dict[str, int] = {}  # sources that were added: how many blocks all of their ranks have
        self._unmappable: dict[str, str] = {}
        self._running: deque[_Fetch] = deque()
        self._ended: list[FetchResult] = []  # that nobody was told of yet
        self._stopped = ""  # why
        self._logged: set[str] = set()

    @property
    def active(self) -> bool:
        return bool(self._running or self._ended)

    def under_way(self) -> set[str]:
        """Requests whose fetches have not ended, or whose results were not taken yet."""
        with self.lock:
            running = {order.request_id for fetch in self._running for order in fetch.orders}
            return running | {result.request_id for result in self._ended}

    def introduce(self, instance: str, ranks: list[RankInfo]) -> None:
        self._introduced[instance] = ranks

    def ready(self, source: str) -> bool:
        """Whether a fetch from this engine begins without anything to be mapped."""
        return source in self._ready

    def warm_up(self) -> None:
        """Compiles what the first copies would need; seconds on a device."""
        with self.lock:
            if not self._stopped:
                self._copier.warm_up()

    def start(self, orders: Sequence[FetchOrder], after: Any = None) -> list[FetchResult]:
        """Begin to copy, all orders in one launch; results of those that are impossible. ``after``: torch.cuda.Event
        behind which our blocks may be written."""
        with self.lock:
            return self._start(orders, after, hurried=False)

    def start_now(self, orders: Sequence[FetchOrder], after: Any = None) -> None:
        """The same, and what this thread launches on its current stream from now on runs behind them. On a host they
        have ended when this returns. ``settle`` is to follow, and tells the results. Raises KVTierError if another
        thread maps a source meanwhile, which may take long."""
        if not self.lock.acquire(timeout=MOST_LOCKED):
            raise KVTierError("another thread is at the fetches for too long")
        try:
            before = len(self._running)
            self._ended += self._start(orders, after, hurried=True)
            for fetch in list(self._running)[before:]:
                if self.on_device:
                    fetch.copy.wait_on(torch.cuda.current_stream(self._view.device))
                else:
                    self._wait(fetch, max(order.timeout for order in fetch.orders))
        finally:
            self.lock.release()

    def settle(self, timeout: float) -> list[FetchResult]:
        """Wait until those that were started by ``start_now`` have ended, at most so many seconds; whatever ended."""
        until = time.monotonic() + timeout
        if not self.lock.acquire(timeout=timeout):
            return []
        try:
            for fetch in [fetch for fetch in self._running if fetch.hurried]:
                self._wait(fetch, max(0.0, until - time.monotonic()))
                fetch.hurried = False  # what is late is driven as all others
            return self._take()
        finally:
            self.lock.release()

    def drive(self) -> list[FetchResult]:
        """What has ended since the last call. On a host this does a piece of one fetch, of each in turn. Nothing, if
        another thread is at it."""
        if not self.lock.acquire(blocking=False):
            return []
        try:
            for _ in range(len(self._running) if self.on_device else min(1, len(self._running))):
                fetch = self._running[0]
                self._running.rotate(-1)
                self._wait(fetch, 0.0)
            return self._take()
        finally:
            self.lock.release()

    def forget(self, source: str) -> None:
        """Its engine has ended. What is under way ends by itself."""
        with self.lock:
            self._introduced.pop(source, None)
            self._forget(source)
            self._unmappable.pop(source, None)
            self._logged.discard(source)

    def stop(self, why: str) -> list[FetchResult]:
        """The cache's memory is about to be taken away: waits until nothing writes it and gives back what was mapped.
        All that was under way has failed, and so will what is ordered from now on."""
        with self.lock:
            self._stopped = why
            self._copier.close()
            self._ready.clear()
            while self._running:
                fetch = self._running.popleft()
                self._ended += [self._failed(order, why, fetch.started) for order in fetch.orders]
            return self._take()

    # -- under the lock ------------------------------------------------------------------------------------------------

    def _start(self, orders: Sequence[FetchOrder], after: Any, hurried: bool) -> list[FetchResult]:
        now = time.monotonic()
        results, possible = [], []
        for order in orders:
            try:
                self._prepare(order.source)
                self._check(order)
                possible.append(order)
            except KVTierError as error:
                results.append(self._failed(order, f"cannot read from {order.source}: {error}", now))
        # A host copies one after another anyway: on their own, none waits for the end of all.
        launches = [possible] if self.on_device else [[order] for order in possible]
        for launch in filter(None, launches):
            jobs = [CopyJob(order.source, order.groups, now + order.timeout) for order in launch]
            try:
                copy = self._copier.start(jobs, after)
            except Exception as error:  # of the device, or of what nobody foresaw: they are computed instead
                logger.exception("kvtier: beginning to copy from other engines failed")
                results += [self._failed(order, f"cannot read from {order.source}: {error}", now) for order in launch]
            else:
                self._running.append(_Fetch(launch, copy, now, hurried))
        return results

    def _prepare(self, source: str) -> None:
        """Raises KVTierError if this source cannot be read."""
        if self._stopped:
            raise KVTierError(self._stopped)
        if source in self._ready:
            return
        if source in self._unmappable:
            raise KVTierError(self._unmappable[source])
        ranks = self._introduced.get(source)
        if ranks is None:
            raise KVTierError("that engine was never introduced")
        try:
            parts = cover(self._view.groups, self._heads, self._rank, ranks)
            self._copier.add(source, parts)
        except Exception as error:  # also what a driver says in its own classes
            if not isinstance(error, KVTierError):
                logger.exception("kvtier: mapping the memory of %s failed", source)
            self._unmappable[source] = str(error)
            raise KVTierError(str(error)) from error
        self._ready[source] = min((part.source.num_blocks for part in parts), default=0)
        self.added(source, [part.source.shared for part in parts])

    def _check(self, order: FetchOrder) -> None:
        """Raises KVTierError for what a lease, or our own scheduler half, must not name."""
        for g in order.groups:
            if not 0 <= g.group < len(self._view.groups):
                raise KVTierError(f"there is no KV cache group {g.group}")
            lengths = {len(array) for array in (g.local, g.remote, g.keys, g.valid)}
            if len(lengths) > 1:
                raise KVTierError(f"lists of {sorted(lengths)} blocks")
            for ids, count in ((g.remote, self._ready[order.source]), (g.local, self._view.num_blocks)):
                if len(ids) and not (1 <= int(np.min(ids)) and int(np.max(ids)) < count):
                    raise KVTierError(f"a block id outside 1..{count - 1} in the lease")

    def _wait(self, fetch: _Fetch, seconds: float) -> None:
        """On a device: at most so long. On a host, at least a piece is done. What has ended is taken."""
        try:
            over = fetch.copy.wait(seconds) if seconds else fetch.copy.done()
        except Exception as error:
            logger.exception("kvtier: a fetch from %s failed in an unforeseen way", fetch.orders[0].source)
            self._running.remove(fetch)
            self._ended += [self._failed(order, str(error), fetch.started) for order in fetch.orders]
            return
        if over:
            self._running.remove(fetch)
            self._ended += [self._verdict(fetch, number) for number in range(len(fetch.orders))]

    def _verdict(self, fetch: _Fetch, number: int) -> FetchResult:
        order = fetch.orders[number]
        bad, why = fetch.copy.bad(number), fetch.copy.why(number)
        if why:
            # Whether it can be read at all is asked anew the next time.
            self._forget(order.source)
            return self._failed(order, f"the copy from {order.source} failed: {why}", fetch.started)
        seconds, nbytes = time.monotonic() - fetch.started, self._bytes(order)
        if not bad:
            return FetchResult(order.request_id, set(), False, "", nbytes, seconds, ticket=order.ticket)
        reason = f"{len(bad)} of {len(order.all_blocks)} blocks from {order.source} have a wrong checksum"
        self._log_once(order.source, reason)
        return FetchResult(order.request_id, bad, True, reason, nbytes, seconds, checksum=True, ticket=order.ticket)

    def _failed(self, order: FetchOrder, reason: str, started: float) -> FetchResult:
        if not self._stopped:
            self._log_once(order.source, reason)
        seconds, unmappable = time.monotonic() - started, self._unmappable.get(order.source, "")
        return FetchResult(
            order.request_id, order.all_blocks, True, reason, 0, seconds, unmappable=unmappable, ticket=order.ticket
        )

    def _bytes(self, order: FetchOrder) -> int:
        return sum(len(g.local) * self._view.groups[g.group].block_bytes for g in order.groups)

    def _forget(self, source: str) -> None:
        self._ready.pop(source, None)
        self._copier.forget(source)

    def _take(self) -> list[FetchResult]:
        ended, self._ended = self._ended, []
        return ended

    def _log_once(self, source: str, reason: str) -> None:
        """Once a source: one that lies or dies would otherwise fill the log; the counters have the rest."""
        if source not in self._logged:
            self._logged.add(source)
            logger.warning("kvtier: %s (said once for this source)", reason)
