"""Peer fetches of this rank: jobs, their copies, and their results.

A copier does the copying (``worker.peer_fetch.base``). A fetch is reported when no copy of it is under way. Unlike a
read over the network it always ends: a launched kernel does, even if the source ends, and plain copies are made by
``poll``.

Called on two threads, the reactor's and the model runner's, under ``lock``. It is held for as long as mapping a source
or a piece of a host's copies takes, and longer in ``start_now``, ``wait_until_done`` and ``stop``.
"""

import errno
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.results import FetchResult, failed_result
from vllm_kvtier.jobs.transfer_jobs import MAX_LOCK_SECONDS, PeerFetchJob, remember_peer
from vllm_kvtier.logs import get_logger
from vllm_kvtier.shapes.tp_mapping import check_memory, map_source_ranks
from vllm_kvtier.wire.messages import HeadRange, RankInfo, Shared
from vllm_kvtier.worker.cache_view import CacheView
from vllm_kvtier.worker.nixl_pull.peer_memory import PeerMemory
from vllm_kvtier.worker.peer_fetch import process_memory
from vllm_kvtier.worker.peer_fetch.base import Copy, CopyJob, PeerCopier

logger = get_logger(__name__)


@dataclass(eq=False)
class _Fetch:
    """One call of the copier."""

    jobs: list[PeerFetchJob]
    copy: Copy
    started: float
    synchronous: bool = False


def make_peer_copier(view: CacheView, table: torch.Tensor) -> PeerCopier:
    """A copier into ``view``; ``table``: int64 [num_blocks], our checksums, on the view's device."""
    if view.device.type == "cuda":
        from vllm_kvtier.worker.peer_fetch.cuda_copier import CudaPeerCopier

        return CudaPeerCopier(view, table)
    from vllm_kvtier.worker.peer_fetch.host_copier import HostPeerCopier

    return HostPeerCopier(view, table)


def share_memory(memory: PeerMemory) -> Shared:
    """The memory that other processes of this node may read: the raw cache and the table of its checksums. Raises
    KVTierError if it cannot be shared."""
    view = memory.view
    spans = [*view.spans, (memory.table.data_ptr(), memory.table.numel() * 8)]
    if view.device.type == "cuda":
        from vllm_kvtier.worker.peer_fetch import cuda_ipc

        return cuda_ipc.share(spans, view.device)
    return process_memory.share(spans)


class PeerFetches:
    def __init__(
        self,
        view: CacheView,
        table: torch.Tensor,
        heads: tuple[HeadRange, ...],
        rank: int,
        copier: PeerCopier | None = None,
    ):
        """``table``: int64 [num_blocks], our checksums, on ``view``'s device. ``heads``: by group, the heads that we
        hold."""
        # Called for each source that is read for the first time; ``remove_source`` it when a process of it ends.
        self.added: Callable[[str, Iterable[Shared]], None] = lambda source, shared: None
        self.stopped: Callable[[], None] = lambda: None  # called when no source is read any more
        self.lock = threading.RLock()
        self.on_device = view.device.type == "cuda"
        self._view, self._heads, self._rank = view, heads, rank
        self._copier = make_peer_copier(view, table) if copier is None else copier
        self._engines: OrderedDict[str, list[RankInfo]] = OrderedDict()
        self._ready: dict[str, int] = {}  # of each mapped source, the number of blocks that all of its ranks have
        self._unmappable: dict[str, str] = {}
        self._running: deque[_Fetch] = deque()
        self._ended: list[FetchResult] = []  # that were not returned yet
        self._stopped = ""  # the reason
        self._logged: set[str] = set()

    @property
    def active(self) -> bool:
        return bool(self._running or self._ended)

    def under_way(self) -> set[str]:
        """Requests whose fetches have not ended, or whose results were not taken yet."""
        with self.lock:
            running = {job.request_id for fetch in self._running for job in fetch.jobs}
            return running | {result.request_id for result in self._ended}

    def add_engine(self, instance: str, ranks: list[RankInfo]) -> None:
        """Without the lock, which mapping a source holds for long: the model runner would wait."""
        for each in remember_peer(self._engines, instance, ranks):
            self._logged.discard(each)
            self._unmappable.pop(each, None)

    def ready(self, instance: str) -> bool:
        """Whether this engine's memory is mapped, so that a fetch can begin at once."""
        return instance in self._ready

    def warm_up(self) -> None:
        """Compile now instead of in the first copies; seconds on a device."""
        with self.lock:
            if not self._stopped:
                self._copier.warm_up()

    def start(self, jobs: Sequence[PeerFetchJob], after: Any = None) -> list[FetchResult]:
        """Begin to copy, all jobs in one launch; returns the results of impossible jobs. ``after``: torch.cuda.Event
        behind which our blocks may be written."""
        with self.lock:
            return self._start(jobs, after, synchronous=False)

    def start_now(self, jobs: Sequence[PeerFetchJob], after: Any = None) -> None:
        """The same for synchronous fetches: kernels that this thread launches on its current stream from now on run
        behind them. On a host they have ended when this returns. ``wait_until_done`` must follow and returns the
        results. Raises KVTierError if another thread maps a source, which may take long."""
        if not self.lock.acquire(timeout=MAX_LOCK_SECONDS):
            raise KVTierError("another thread holds the lock of the fetches for too long")
        try:
            before = len(self._running)
            self._ended += self._start(jobs, after, synchronous=True)
            for fetch in list(self._running)[before:]:
                if self.on_device:
                    fetch.copy.wait_on(torch.cuda.current_stream(self._view.device))
                else:
                    self._wait(fetch, max(job.timeout for job in fetch.jobs))
        finally:
            self.lock.release()

    def wait_until_done(self, timeout: float) -> list[FetchResult]:
        """Wait at most ``timeout`` seconds until the fetches of ``start_now`` have ended; returns all that ended."""
        until = time.monotonic() + timeout
        if not self.lock.acquire(timeout=timeout):
            return []
        try:
            for fetch in [fetch for fetch in self._running if fetch.synchronous]:
                self._wait(fetch, max(0.0, until - time.monotonic()))
                fetch.synchronous = False  # a late one is polled like all others
            return self._take()
        finally:
            self.lock.release()

    def poll(self) -> list[FetchResult]:
        """Results since the last call. On a host each call does a piece of one fetch, of each in turn. Nothing if
        another thread holds the lock."""
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

    def remove_source(self, instance: str) -> None:
        """The source's engine has ended. Copies under way end by themselves."""
        with self.lock:
            self._engines.pop(instance, None)
            self._remove_source(instance)
            self._unmappable.pop(instance, None)
            self._logged.discard(instance)

    def stop(self, why: str) -> list[FetchResult]:
        """Wait until no copy writes the cache and unmap all sources, because vLLM takes the cache's memory away.
        Fetches under way fail, and so do all later ones."""
        with self.lock:
            self._stopped = why
            self._copier.close()
            self._ready.clear()
            while self._running:
                fetch = self._running.popleft()
                self._ended += [self._failed(job, why, fetch.started) for job in fetch.jobs]
            self.stopped()
            return self._take()

    # -- under the lock ------------------------------------------------------------------------------------------------

    def _start(self, jobs: Sequence[PeerFetchJob], after: Any, synchronous: bool) -> list[FetchResult]:
        now = time.monotonic()
        results, possible = [], []
        for job in jobs:
            try:
                self._prepare(job.instance)
                self._check(job)
                possible.append(job)
            except KVTierError as error:
                results.append(self._failed(job, f"cannot read from {job.instance}: {error}", now))
        # A host copies one after another: one call per job, so that no job waits for the end of all.
        launches = [possible] if self.on_device else [[job] for job in possible]
        for launch in filter(None, launches):
            copy_jobs = [CopyJob(job.instance, job.groups, now + job.timeout) for job in launch]
            try:
                copy = self._copier.start(copy_jobs, after)
            except Exception as error:  # of the device, or an internal error: the blocks are recomputed
                logger.exception("kvtier: peer fetch: beginning to copy failed; the blocks are recomputed")
                results += [self._failed(job, f"cannot read from {job.instance}: {error}", now) for job in launch]
            else:
                self._running.append(_Fetch(launch, copy, now, synchronous))
        return results

    def _prepare(self, instance: str) -> None:
        """Raises KVTierError if this source cannot be read."""
        if self._stopped:
            raise KVTierError(self._stopped)
        if instance in self._ready:
            return
        if instance in self._unmappable:
            raise KVTierError(self._unmappable[instance])
        ranks = self._engines.get(instance)
        if ranks is None:
            raise KVTierError("that engine is unknown")
        try:
            parts = map_source_ranks(self._view.groups, self._heads, self._rank, ranks)
            for part in parts:
                check_memory(part.source)
            self._copier.add(instance, parts)
        except Exception as error:  # drivers raise their own classes
            if not _passes(error):
                if not isinstance(error, KVTierError):
                    logger.exception("kvtier: peer fetch: mapping the memory of %s failed", instance)
                self._unmappable[instance] = str(error)
            raise KVTierError(str(error)) from error
        self._ready[instance] = min((part.source.num_blocks for part in parts), default=0)
        self.added(instance, [part.source.shared for part in parts])

    def _check(self, job: PeerFetchJob) -> None:
        """Raise KVTierError for groups and blocks that do not exist: a job repeats a peer's answer."""
        for g in job.groups:
            if not 0 <= g.group < len(self._view.groups):
                raise KVTierError(f"there is no KV cache group {g.group}")
            lengths = {len(array) for array in (g.local, g.remote, g.keys, g.valid)}
            if len(lengths) > 1:
                raise KVTierError(f"lists of {sorted(lengths)} blocks")
            for ids, count in ((g.remote, self._ready[job.instance]), (g.local, self._view.num_blocks)):
                if len(ids) and not (1 <= int(np.min(ids)) and int(np.max(ids)) < count):
                    raise KVTierError(f"a block id outside 1..{count - 1} in the lease")

    def _wait(self, fetch: _Fetch, seconds: float) -> None:
        """Wait at most ``seconds`` on a device; do at least one piece on a host. Take the results if it has ended."""
        try:
            over = fetch.copy.wait(seconds) if seconds else fetch.copy.done()
        except Exception as error:
            logger.exception("kvtier: peer fetch: internal error in a fetch from %s; it fails", fetch.jobs[0].instance)
            self._running.remove(fetch)
            self._ended += [self._failed(job, str(error), fetch.started) for job in fetch.jobs]
            return
        if over:
            self._running.remove(fetch)
            self._ended += [self._result(fetch, number) for number in range(len(fetch.jobs))]

    def _result(self, fetch: _Fetch, number: int) -> FetchResult:
        job = fetch.jobs[number]
        bad, why = fetch.copy.bad(number), fetch.copy.why(number)
        if why:
            # The next fetch maps the source again.
            self._remove_source(job.instance)
            return self._failed(job, f"the copy from {job.instance} failed: {why}", fetch.started)
        seconds, nbytes = time.monotonic() - fetch.started, self._bytes(job)
        if not bad:
            return FetchResult(job.request_id, set(), False, "", nbytes, seconds, load_id=job.load_id)
        reason = f"{len(bad)} of {len(job.all_blocks)} blocks from {job.instance} have a wrong checksum"
        self._log_once(job.instance, reason)
        return FetchResult(
            job.request_id, bad, True, reason, nbytes, seconds, checksum_mismatch=True, load_id=job.load_id
        )

    def _failed(self, job: PeerFetchJob, reason: str, started: float) -> FetchResult:
        if not self._stopped:
            self._log_once(job.instance, reason)
        return failed_result(job, reason, time.monotonic() - started, self._unmappable.get(job.instance, ""))

    def _bytes(self, job: PeerFetchJob) -> int:
        return sum(g.num_blocks * self._view.groups[g.group].block_bytes for g in job.groups)

    def _remove_source(self, instance: str) -> None:
        self._ready.pop(instance, None)
        self._copier.remove(instance)

    def _take(self) -> list[FetchResult]:
        ended, self._ended = self._ended, []
        return ended

    def _log_once(self, instance: str, reason: str) -> None:
        """Once per source: one that sends bad data or dies must not fill the log; counters have the rest."""
        if instance not in self._logged:
            self._logged.add(instance)
            logger.warning("kvtier: peer fetch: %s (logged once for this source)", reason)


def _passes(error: Exception) -> bool:
    """Whether mapping a source may succeed another time: descriptors or device memory lacked. torch, Triton and the
    driver have no class in common for the latter."""
    return getattr(error.__cause__, "errno", None) in (errno.EMFILE, errno.ENFILE) or "out of memory" in str(error)
