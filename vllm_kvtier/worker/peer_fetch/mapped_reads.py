"""Pulls of scattered blocks from engines of this node: copied from mapped memory in place of many reads by NIXL.

NIXL reads as fast while blocks that are neighbours on both sides merge into few reads. Each read costs 4.7 us whatever
its size (NVLink, H200), so that scattered pages of 64 KiB come at 14 GB/s. The peer copier has the link's rate in any
order.

The first such pull from an engine is read by NIXL, while the reactor maps its memory. Where that is impossible, NIXL
reads all.
"""

from collections.abc import Callable

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.transfer_jobs import PullJob
from vllm_kvtier.wire.messages import RankInfo, Shared
from vllm_kvtier.worker.nixl_pull.descriptors import fewest_reads
from vllm_kvtier.worker.peer_fetch import process_memory
from vllm_kvtier.worker.peer_fetch.base import Copy
from vllm_kvtier.worker.peer_fetch.fetch_jobs import PeerFetches

# Reads from which the copier is faster by far: 1.4 ms of posting.
MANY_READS = 300


class MappedReads:
    """Decides for each pull. On the threads of pulls; ``call_soon`` runs a function on the reactor's."""

    def __init__(self, fetches: PeerFetches, call_soon: Callable[[Callable[[], None]], None]):
        self._fetches, self._call_soon = fetches, call_soon

    def ready(self, instance: str) -> bool:
        """Whether ``open`` has many reads of this engine copied."""
        return self._fetches.ready(instance)

    def open(self, job: PullJob, info: RankInfo) -> "MappedRead | None":
        """None: NIXL is to read it. ``info``: the rank whose pages lie as ours."""
        if info.shared is None or sum(len(g.local) for g in job.groups) < 2 or self._few_reads(job, info):
            return None
        if self._fetches.ready(job.instance):
            return MappedRead(self._fetches, job)
        shared = info.shared
        self._call_soon(lambda: self._map(job.instance, shared))
        return None

    def _few_reads(self, job: PullJob, info: RankInfo) -> bool:
        reads = sum(len(info.groups[g.group].regions) * fewest_reads(g.local, g.remote) for g in job.groups)
        return reads < MANY_READS

    def _map(self, instance: str, shared: Shared) -> None:
        try:
            process_memory.check(shared)
        except KVTierError:
            return  # of another node
        self._fetches.map_source(instance)


class MappedRead:
    """One pull. Nothing writes its blocks before ``end_check`` was called, nor once it returned them."""

    more = False
    copies = True  # there is no transfer to wait for: ``end_check`` begins the copy and sees its end

    def __init__(self, fetches: PeerFetches, job: PullJob):
        self._fetches, self._job = fetches, job
        self.bytes = 0
        self._copy: Copy | None = None

    def start(self) -> None:
        self._copy = None

    def begin_check(self) -> None:
        """The copier verifies as it copies."""

    def end_check(self) -> set[int] | None:
        """Our block ids whose checksum is wrong; None while it is copied, or another thread uses the copier. Raises
        KVTierError if the source's memory is not mapped any more."""
        if not self._fetches.lock.acquire(blocking=False):
            return None
        try:
            if self._copy is None:
                self._copy = self._fetches.begin_copy(self._job)
            if not self._copy.done():
                return None
            self.bytes = self._copy.nbytes
            if why := self._copy.why(0):
                raise KVTierError(why)
            return self._copy.bad(0)
        finally:
            self._fetches.lock.release()

    def close(self) -> None:
        """It holds nothing."""
