"""Pulls under way on this rank: read, verify, report. On the worker's reactor, or on another thread under a lock.

A pull has two ends: *it failed* (deadline, error, checksum) and *its blocks may be reused* (nothing can arrive any
more). It is reported only at the second, so that nothing writes into a block that vLLM gave to another request. For a
read that did not end, the second comes when the agent that reads has ended (see ``worker.nixl_pull.nixl_transport``).
The agent is then *retiring*: no read begins with it, reads under way have ``GRACE_SECONDS`` to end, and the others fail
with it.

``DirectReads`` and ``StagedReads`` know what is read, where to, and how it is verified. A staged pull reads in several
rounds, one after another. A direct pull of many reads is several transfers, and is verified when all have ended. A call
of ``poll`` posts one transfer of such pulls, for the first that came; short pulls do not wait for them.
"""

import enum
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.results import PullResult, failed_result
from vllm_kvtier.jobs.transfer_jobs import PullJob, remember_peer
from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire.messages import HeadRange, RankInfo
from vllm_kvtier.worker.nixl_pull.direct_reads import MAX_READS, DirectRead, DirectReads
from vllm_kvtier.worker.nixl_pull.nixl_transport import NixlTransport, Transfer, TransferState
from vllm_kvtier.worker.nixl_pull.peer_memory import PeerMemory
from vllm_kvtier.worker.nixl_pull.staged_reads import StagedRead, StagedReads

logger = get_logger(__name__)

# A prefill engine computes the checksums of a hand-off before it offers it; a busy one some moments later. Seconds
# before an early read is tried again.
REREAD_SECONDS = (0.02, 0.06, 0.2, 0.6)
# Seconds for reads under way when the agent is to retire, also for the read that took too long: a peer that is being
# read when the agent ends may fail. Over TCP, UCX ends the peer's process if that was hanging meanwhile.
GRACE_SECONDS = 1.0
# Engines that are met before the agent retires between two pulls: it keeps NIXL's lists of all blocks of each of them,
# also of those that were restarted since.
MAX_ENGINES = 64
# So long a pull is young: it may end within an idle step.
YOUNG_SECONDS = 10e-3
# Seconds between checks of an agent that did not end when it was retired.
RECHECK_SECONDS = 1.0


class Stage(enum.Enum):
    WAITING = "waiting"  # to read: for its event, another try, a new agent, room in the ring, other reads, the reactor
    READING = "reading"
    VERIFYING = "verifying"
    FAILED = "failed"  # the agent that reads may still write its blocks
    RETIRING = "retiring"  # the same, and that agent is to end


@dataclass(eq=False)
class _Pull:
    job: PullJob
    started: float
    deadline: float
    transfers: deque[Transfer] = field(default_factory=deque)  # that were posted and not seen to end
    stage: Stage = Stage.READING
    reason: str = ""
    read: DirectRead | StagedRead | None = None  # once it began
    after: torch.cuda.Event | None = None  # an earlier step uses its blocks until then
    not_before: float = 0.0  # to read
    began: float = 0.0  # to read, last
    rereads: int = 0
    num_reads: int | None = None  # of all its transfers, at least; None: not counted yet
    unreadable: bool = False  # see PullResult

    @property
    def bytes(self) -> int:
        return self.read.bytes if self.read is not None else 0

    @property
    def many_reads(self) -> bool:
        """Whether it is several transfers."""
        return self.num_reads is not None and self.num_reads > MAX_READS


class Pulls:
    def __init__(self, transport: NixlTransport, memory: PeerMemory, rank: int, heads: Sequence[HeadRange] = ()):
        """``heads``: by group, the KV heads that this rank holds; (): unknown."""
        self._transport, self._memory = transport, memory
        self._sources: OrderedDict[str, list[RankInfo]] = OrderedDict()
        self._direct = DirectReads(transport, memory, rank, heads)
        self._staged = StagedReads(transport, memory, rank, heads)
        self._pulls: list[_Pull] = []
        self._logged: set[str] = set()
        self._retire_by: float | None = None  # when the agent retires; None: it is not retiring
        self._next_check = 0.0  # of the retired agents; 0: none was found alive yet
        self._engines_met = 0  # by the agent that reads
        # Reads that may be posted until ``poll`` ends: of pulls of one transfer, and of all others.
        self._budget = [MAX_READS, MAX_READS]

    @property
    def active(self) -> bool:
        return bool(self._pulls)

    def under_way(self) -> set[str]:
        """Requests whose pulls have not ended."""
        return {pull.job.request_id for pull in self._pulls}

    @property
    def all_waiting(self) -> bool:
        """Whether all pulls wait for the device, for another try, or for a retired agent to end."""
        now = time.monotonic()
        return all(
            pull.stage is Stage.RETIRING or (pull.stage is Stage.WAITING and (now < pull.not_before or not _free(pull)))
            for pull in self._pulls
        )

    def num_young(self) -> int:
        """Pulls that came, or began to read, a moment ago. Any thread."""
        since = time.monotonic() - YOUNG_SECONDS
        return sum(max(pull.started, pull.began) >= since for pull in list(self._pulls))

    def add_engine(self, instance: str, ranks: list[RankInfo]) -> None:
        for each in (instance, *remember_peer(self._sources, instance, ranks)):
            self._direct.remove(each)
            self._logged.discard(each)
        self._engines_met += 1

    def connected(self, instance: str) -> bool:
        """Whether a pull from this engine can start without a new connection."""
        known = self._direct.connected(instance) or self._staged.connected(instance)
        return known and self._retire_by is None

    def start(self, job: PullJob, after: torch.cuda.Event | None = None, quick: bool = False) -> PullResult | None:
        """Begin reading; returns a result if that is impossible. Our blocks may be written once ``after`` has passed:
        NIXL knows no stream, so the read is not posted before. ``quick``: as for ``poll``."""
        now = time.monotonic()
        pull = _Pull(job, now, now + job.timeout, after=after)
        try:
            if not _free(pull) or not self._may_read(pull, quick):
                pull.stage = Stage.WAITING
            else:
                self._read(pull)
        except Exception as error:  # NIXL raises its own classes; any of them only costs this pull
            return self._cannot_read(pull, error)
        self._pulls.append(pull)
        return None

    def poll(self, quick: bool = False) -> list[PullResult]:
        """Advance every pull; returns the results of those that ended. ``quick``: leave slow work (retiring an agent,
        making another, posting many reads) to a later call."""
        results = []
        for pull in list(self._pulls):
            try:
                result = self._advance(pull, quick)
            except Exception as error:  # one pull's error must not stop the others
                if not isinstance(error, KVTierError):
                    logger.exception("kvtier: pulls: internal error in a pull from %s; it fails", pull.job.instance)
                result = self._broken(pull, str(error))
            if result is not None:
                self._pulls.remove(pull)
                results.append(result)
        self._budget = [MAX_READS, MAX_READS]
        if quick:
            return results
        try:
            if self._retire_by is not None:
                self._retire_if_due()
            if any(pull.stage is Stage.RETIRING for pull in self._pulls):
                results += self._take_retired()
            if self._engines_met > MAX_ENGINES and not self._pulls:
                self._end_agent(time.monotonic())
        except Exception:  # pulls that have ended are reported nevertheless
            logger.exception("kvtier: pulls: the agent of failed reads could not be ended; it is tried again")
            self._next_check = time.monotonic() + RECHECK_SECONDS
        return results

    def stop(self, why: str) -> list[PullResult]:
        """End the transport, because vLLM takes the cache's memory away; all pulls under way fail. The results lack
        reads whose agent does not end: call ``poll`` until nothing is ``active``."""
        for pull in self._pulls:
            if pull.stage is Stage.READING:
                pull.stage, pull.reason = Stage.FAILED, why
            elif pull.stage is Stage.WAITING:
                pull.deadline = 0.0  # if this raises, ``poll`` must not begin it
        self._end_agent(time.monotonic())
        self._transport.close()
        self._staged.close()
        if self._memory.view.device.type == "cuda":
            torch.cuda.synchronize(self._memory.view.device)  # checks and decoding
        over = [pull for pull in self._pulls if pull.stage is not Stage.RETIRING]
        self._pulls = [pull for pull in self._pulls if pull.stage is Stage.RETIRING]
        results = [self._fail_now(pull, why) for pull in over]
        return results + self._take_retired() if self._pulls else results

    # -- stages ------------------------------------------------------------------------------------------------

    def _read(self, pull: _Pull) -> None:
        """Post its next transfer."""
        if pull.read is None or not pull.read.unposted:
            pull.began = time.monotonic()
        if pull.read is None:
            ranks = self._sources.get(pull.job.instance)
            if ranks is None:
                raise KVTierError("that engine is unknown")
            pull.read = (self._staged if pull.job.staged else self._direct).open(pull.job, ranks)
        self._count_reads(pull)
        transfer = pull.read.start()
        if transfer is None:
            pull.stage = Stage.WAITING
            return
        pull.stage = Stage.READING
        pull.transfers.append(transfer)
        self._budget[pull.many_reads] -= min(pull.num_reads, MAX_READS)

    def _may_read(self, pull: _Pull, quick: bool) -> bool:
        """Whether its next transfer may be posted now. ``quick``: only of few reads, from a connected engine."""
        job = pull.job
        if self._retire_by is not None:
            return False
        if not (self._staged if job.staged else self._direct).connected(job.instance):
            return not quick
        self._count_reads(pull)
        return self._budget[pull.many_reads] > 0 and not (quick and pull.many_reads)

    def _count_reads(self, pull: _Pull) -> None:
        if pull.num_reads is None:  # a round of a staged pull has few
            pull.num_reads = 0 if pull.job.staged else self._direct.num_reads(pull.job)

    def _cannot_read(self, pull: _Pull, error: Exception) -> PullResult | None:
        if not isinstance(error, KVTierError):
            logger.warning("kvtier: pulls: reading from %s failed", pull.job.instance, exc_info=error)
        return self._broken(pull, f"cannot read from {pull.job.instance}: {error}")

    def _advance(self, pull: _Pull, quick: bool) -> PullResult | None:
        now = time.monotonic()
        if pull.stage is Stage.WAITING:
            if now >= pull.deadline:
                return self._fail_now(pull, f"the read from {pull.job.instance} could not begin or go on in time")
            ready = now >= pull.not_before and _free(pull)
        else:
            ready = pull.stage is Stage.READING and bool(pull.read.unposted) and now < pull.deadline
        if ready and self._may_read(pull, quick):
            try:
                self._read(pull)
            except Exception as error:
                return self._cannot_read(pull, error)
        if pull.stage is Stage.READING:
            state = self._end_transfers(pull)
            if state is TransferState.DONE and pull.read.unposted:
                pull.stage = Stage.WAITING
            elif state is TransferState.DONE:
                pull.stage = Stage.VERIFYING
                pull.read.begin_check()
            elif state is TransferState.FAILED:
                pull.stage, pull.reason = Stage.FAILED, f"the read from {pull.job.instance} failed"
                pull.unreadable = True
                self._begin_retiring(now)
            elif now >= pull.deadline:
                self._begin_retiring(now)
        if pull.stage is Stage.VERIFYING:
            bad = pull.read.end_check()
            if bad is None:
                return None
            if pull.read.more:
                pull.stage = Stage.WAITING
                return None
            if bad and pull.job.promised and pull.rereads < len(REREAD_SECONDS):
                again = now + REREAD_SECONDS[pull.rereads]
                if again + (now - pull.began) < pull.deadline:  # else the deadline would retire the agent
                    pull.not_before, pull.stage = again, Stage.WAITING
                    pull.rereads += 1
                    return None
            return self._verified(pull, bad)
        return None

    def _end_transfers(self, pull: _Pull) -> TransferState:
        """Release those that ended; the state of the first that did not, DONE if there is none."""
        while pull.transfers:
            state = self._transport.poll(pull.transfers[0])
            if state is not TransferState.DONE:
                return state
            self._transport.release(pull.transfers.popleft())
        return TransferState.DONE

    def _broken(self, pull: _Pull, reason: str) -> PullResult | None:
        if not pull.transfers:
            return self._fail_now(pull, reason)
        pull.stage, pull.reason = Stage.FAILED, reason
        self._begin_retiring(time.monotonic())
        return None

    # -- the agent that reads ----------------------------------------------------------------------------------

    def _begin_retiring(self, now: float) -> None:
        if self._retire_by is None:
            self._retire_by = now + GRACE_SECONDS

    def _retire_if_due(self) -> None:
        now = time.monotonic()
        reading = [pull for pull in self._pulls if pull.stage is Stage.READING]
        failed = any(pull.stage is Stage.FAILED for pull in self._pulls)
        if not failed and not any(now >= pull.deadline for pull in reading):
            self._retire_by = None  # the late reads have ended after all
        elif not reading or now >= self._retire_by:
            self._end_agent(now)

    def _end_agent(self, now: float) -> None:
        for pull in self._pulls:
            if pull.stage is Stage.READING:
                pull.unreadable, timeout = now >= pull.deadline, f"did not end within {pull.job.timeout:g} s"
                why = timeout if pull.unreadable else "did not end in time after another had failed"
                pull.stage, pull.reason = Stage.FAILED, f"the read from {pull.job.instance} {why}"
            if pull.stage is Stage.FAILED:
                while pull.transfers:  # a reference to a handle keeps the agent alive
                    self._transport.release(pull.transfers.popleft())
                pull.stage = Stage.RETIRING
        self._direct.release_lists()  # so do prepared lists
        self._staged.release_lists()
        self._retire_by, self._next_check, self._engines_met = None, 0.0, 0
        self._transport.retire()

    def _take_retired(self) -> list[PullResult]:
        now = time.monotonic()
        if now < self._next_check:
            return []
        if not self._transport.retired():
            if not self._next_check:
                logger.error(
                    "kvtier: pulls: NIXL does not free the memory of a failed read; its blocks stay out of use "
                    "and their requests wait; restart this engine"
                )
            self._next_check = now + RECHECK_SECONDS
            return []
        if self._memory.view.device.type == "cuda":
            torch.cuda.synchronize(self._memory.view.device)  # copies that the agent left on the GPU
        left = [pull for pull in self._pulls if pull.stage is Stage.RETIRING]
        self._pulls = [pull for pull in self._pulls if pull.stage is not Stage.RETIRING]
        return [self._fail_now(pull, pull.reason) for pull in left]

    def _verified(self, pull: _Pull, bad: set[int]) -> PullResult:
        seconds = time.monotonic() - pull.started
        if not bad:
            return PullResult(pull.job.request_id, set(), False, "", pull.bytes, seconds)
        reason = f"{len(bad)} of {len(pull.job.all_blocks)} blocks from {pull.job.instance} have a wrong checksum"
        self._log_once(pull.job.instance, reason)
        return PullResult(pull.job.request_id, bad, True, reason, pull.bytes, seconds, checksum_mismatch=True)

    def _fail_now(self, pull: _Pull, reason: str) -> PullResult:
        """Nothing writes its blocks, or what it holds of the ring, any more."""
        if pull.read is not None:
            pull.read.close()
        self._log_once(pull.job.instance, reason)
        result = failed_result(pull.job, reason, time.monotonic() - pull.started)
        result.bytes, result.unreadable = pull.bytes, pull.unreadable
        return result

    def _log_once(self, instance: str, reason: str) -> None:
        """Once per source: a peer that sends bad data or dies must not fill the log; counters have the rest."""
        if instance not in self._logged:
            self._logged.add(instance)
            logger.warning("kvtier: pulls: %s; these blocks are recomputed (logged once for this source)", reason)


def _free(pull: _Pull) -> bool:
    """Whether its blocks may be written."""
    if pull.after is not None and pull.after.query():
        pull.after = None  # the event is recorded again by a later step
    return pull.after is None
