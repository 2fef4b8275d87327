"""This rank's peer fetches, on the model runner's thread and on the reactor's: begun, polled and reported.

Where the device copies, the model runner's thread begins fetches that need no mapping and polls them itself, as it does
pulls and loads. All else is the reactor's.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.results import FetchResult
from vllm_kvtier.jobs.transfer_jobs import PeerFetchJob
from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire.messages import HeadRange, RankInfo, Shared
from vllm_kvtier.worker.context import RankContext
from vllm_kvtier.worker.nixl_pull.peer_memory import PeerMemory
from vllm_kvtier.worker.peer_fetch.fetch_jobs import PeerFetches, share_memory
from vllm_kvtier.worker.peer_fetch.peer_process_watch import PeerProcessWatch

logger = get_logger(__name__)

# An idle step polls its fetches this many seconds: each of vLLM's empty steps costs a millisecond.
IDLE_SECONDS = 3e-3
POLL_SECONDS = 50e-6  # seconds between two polls of a device's events


class FetchWorker:
    def __init__(
        self,
        fetches: PeerFetches,
        call_soon: Callable[[Callable[[], None]], None],
        finish: Callable[[FetchResult], None],
        poll_soon: Callable[[], None],
    ):
        """``finish`` takes results, on any thread. ``poll_soon`` is called on the reactor's thread when a fetch begins:
        ``poll`` must be called until nothing is ``active``."""
        self._fetches, self._call_soon, self._finish, self._poll_soon = fetches, call_soon, finish, poll_soon
        # ``begin_now``: synchronous fetches, on the model runner's thread before the forward is launched.
        self.on_device, self.under_way, self.begin_now = fetches.on_device, fetches.under_way, fetches.start_now

    @property
    def active(self) -> bool:
        return self._fetches.active

    # -- model runner's thread -----------------------------------------------------------------------------------------

    def add_engines(self, sources: dict[str, list[RankInfo]]) -> None:
        for instance, ranks in sources.items():
            self._fetches.add_engine(instance, ranks)

    def wait_until_done(self, seconds: float) -> None:
        self._report(self._fetches.wait_until_done(seconds))

    def begin(self, jobs: list[PeerFetchJob], after: Any) -> None:
        """Their blocks may be written behind ``after`` (torch.cuda.Event; None without a device)."""
        fetches, later = self._fetches, jobs
        if fetches.on_device and fetches.lock.acquire(blocking=False):
            try:
                later = [job for job in jobs if not fetches.ready(job.instance)]
                self._report(fetches.start([job for job in jobs if fetches.ready(job.instance)], after))
            finally:
                fetches.lock.release()
        self._call_soon(lambda: self._begin(later, after))

    def collect(self, idle: bool) -> None:
        """See what ended. ``idle``: the step computes nothing, so that this thread may make a host's copies, which
        would wait for the interpreter on the reactor's."""
        fetches = self._fetches
        if not fetches.active or not (idle or fetches.on_device):
            return
        until = time.monotonic() + (IDLE_SECONDS if idle else 0.0)
        while True:
            results = fetches.poll()
            if results or not fetches.active or time.monotonic() >= until:
                break
            if fetches.on_device:
                time.sleep(POLL_SECONDS)
        self._report(results)

    def stop(self, why: str) -> None:
        """The cache's memory is about to be taken away."""
        self._report(self._fetches.stop(why))

    # -- reactor's thread ----------------------------------------------------------------------------------------------

    def poll(self) -> None:
        if self._fetches.active:
            self._report(self._fetches.poll())

    def _begin(self, jobs: list[PeerFetchJob], after: Any) -> None:
        if jobs:
            self._report(self._fetches.start(jobs, after))
        self._poll_soon()

    def _report(self, results: Iterable[FetchResult]) -> None:
        for result in results:
            self._finish(result)


def open_node(
    context: RankContext, memory: PeerMemory, heads: tuple[HeadRange, ...], poll_soon: Callable[[], None]
) -> tuple[FetchWorker | None, Shared | None]:
    """On the reactor's thread: (fetches from engines of this node, the memory that they may read), each None where it
    is unavailable, which is logged."""
    if memory.transfer_view is not memory.view:
        logger.info("kvtier: peer fetch: off, because peers read a copy of the cache (wire_codec or host_buffer)")
        return None, None
    worker = shared = None
    try:
        fetches = PeerFetches(memory.view, memory.table, heads, context.rank)
        watch = PeerProcessWatch(context.reactor, fetches.remove_source)
        fetches.added, fetches.stopped = watch.follow, watch.close
        worker = FetchWorker(fetches, context.reactor.call_soon, context.finish, poll_soon)
        context.reactor.call_soon(fetches.warm_up)
    except Exception as error:
        _log_unavailable("fetched from engines of this node", error)
    try:
        shared = share_memory(memory)
    except Exception as error:
        _log_unavailable("shared with engines of this node", error)
    return worker, shared


def _log_unavailable(what: str, error: Exception) -> None:
    if not isinstance(error, KVTierError):
        logger.error("kvtier: peer fetch: a driver or library failed", exc_info=error)
    logger.warning("kvtier: peer fetch: unavailable (%s); KV is not %s", error, what)
