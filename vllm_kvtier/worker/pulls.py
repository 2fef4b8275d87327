"""Pulls under way on this worker: read, verify, report. Runs on the worker's reactor.

A pull has two ends: *when it failed* (deadline, error, checksum) and *when its blocks may be reused* (nothing can
arrive any more). It is reported only at the second, so that nothing writes into a block vLLM handed on. For a read that
did not end, the second comes when the agent that reads has ended (``transport`` says why): the agent is condemned,
nothing new begins with it, reads under way may end within a while, and what did not fails with it.
"""

import enum
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire.messages import RankInfo
from vllm_kvtier.worker.descriptors import PageRows
from vllm_kvtier.worker.memory import CacheMemory, Check
from vllm_kvtier.worker.transport import NixlTransport, Transfer, TransferState
from vllm_kvtier.worker.work import PullOrder

logger = get_logger("vllm.kvtier.pulls")

# A source makes the checksums of a hand-off before it offers it, unless it is busy; then some moments later.
REREAD_AFTER = (0.02, 0.06, 0.2, 0.6)
# For reads under way when the agent is condemned; also for the one that took too long, because a peer that is being
# read from when the agent ends may break off: over TCP, UCX ends its process if it was hanging meanwhile.
GRACE = 1.0
# Between two looks at an agent that did not end when it was to.
LOOK_AGAIN = 1.0


class Stage(enum.Enum):
    WAITING = "waiting"  # to read: behind its fence, once more, or with another agent
    READING = "reading"
    VERIFYING = "verifying"
    FAILED = "failed"  # its blocks may still be written into, by the agent that reads
    LEAVING = "leaving"  # the same, and that agent is to end


@dataclass
class PullResult:
    request_id: str
    bad_blocks: set[int]  # our block ids that must be computed
    failed: bool
    reason: str
    bytes: int
    seconds: float
    checksum: bool = False  # failed because what arrived was wrong


@dataclass(eq=False)
class _Pull:
    order: PullOrder
    started: float
    deadline: float
    transfer: Transfer | None = None
    stage: Stage = Stage.READING
    reason: str = ""
    check: Check | None = None
    bytes: int = 0
    blocks: set[int] = field(default_factory=set)
    moves: list = field(default_factory=list)
    after: torch.cuda.Event | None = None  # its blocks are another's until then
    not_before: float = 0.0  # to read
    began: float = 0.0  # to read, last
    rereads: int = 0


@dataclass
class _Peer:
    rows: PageRows
    local: Any  # NIXL's prepared lists
    remote: Any


class Pulls:
    def __init__(self, transport: NixlTransport, memory: CacheMemory, rank: int):
        self._transport, self._memory, self._rank = transport, memory, rank
        self._sources: dict[str, RankInfo] = {}
        self._pulls: list[_Pull] = []
        self._peers: dict[str, _Peer] = {}
        self._logged: set[str] = set()
        self._condemned: float | None = None  # until when reads under way may end
        self._look_at = 0.0  # whether the old agent has ended

    @property
    def active(self) -> bool:
        return bool(self._pulls)

    def under_way(self) -> set[str]:
        """Requests whose pulls have not ended."""
        return {pull.order.request_id for pull in self._pulls}

    @property
    def resting(self) -> bool:
        """Whether all of them wait for a time to read again, or for the device."""
        now = time.monotonic()
        return all(
            pull.stage is Stage.WAITING and (now < pull.not_before or not _free(pull)) for pull in self._pulls
        )

    def introduce(self, instance: str, ranks: list[RankInfo]) -> None:
        for info in ranks:
            if info.rank == self._rank:
                self._sources[instance] = info

    def connected(self, source: str) -> bool:
        """Whether a pull from this engine can start without connecting first."""
        info = self._sources.get(source)
        known = info is not None and info.agent in self._peers and self._transport.knows(info.agent)
        return known and self._condemned is None

    def start(self, order: PullOrder, after: torch.cuda.Event | None = None) -> PullResult | None:
        """Begin reading; a result at once if that is impossible. ``after``: behind which our blocks may be written;
        NIXL knows no stream, so that it is not told to read before."""
        now = time.monotonic()
        pull = _Pull(order, now, now + order.timeout, after=after)
        pull.blocks = {int(i) for g in order.groups for i in g.local}
        if self._condemned is not None or not _free(pull):
            pull.stage = Stage.WAITING
        else:
            try:
                self._read(pull)
            except Exception as error:  # NIXL raises its own classes; any of them only costs this pull
                return self._fail_now(pull, f"cannot read from {pull.order.source}: {error}")
        self._pulls.append(pull)
        return None

    def drive(self, quick: bool = False) -> list[PullResult]:
        """Advance every pull; the results of those that ended. ``quick``: leave what may take long, ending an agent
        and making another, to a later call."""
        results = []
        for pull in list(self._pulls):
            try:
                result = self._advance(pull, quick)
            except Exception as error:  # one pull's fault must not leave the others waiting for ever
                logger.exception("kvtier: a pull from %s failed in an unforeseen way", pull.order.source)
                result = self._broken(pull, str(error))
            if result is not None:
                self._pulls.remove(pull)
                results.append(result)
        if quick:
            return results
        try:
            if self._condemned is not None:
                self._judge()
            if any(pull.stage is Stage.LEAVING for pull in self._pulls):
                results += self._left()
        except Exception:  # what has ended is reported all the same
            logger.exception("kvtier: the memory of failed reads is not free yet")
            self._look_at = time.monotonic() + LOOK_AGAIN
        return results

    def stop(self, why: str) -> list[PullResult]:
        """The cache's memory is about to be taken away: ends the transport, and with it all that is under way, which
        has failed. A read whose agent does not end is not among the results; ``drive`` until nothing is ``active``."""
        for pull in self._pulls:
            if pull.stage is Stage.READING:
                pull.stage, pull.reason = Stage.FAILED, why
            elif pull.stage is Stage.WAITING:
                pull.deadline = 0.0  # if the rest raises, ``drive`` must not begin it
        self._end_agent(time.monotonic())
        self._transport.close()
        if self._memory.view.device.type == "cuda":
            torch.cuda.synchronize(self._memory.view.device)  # checks, and what is decoded
        over = [pull for pull in self._pulls if pull.stage is not Stage.LEAVING]
        self._pulls = [pull for pull in self._pulls if pull.stage is Stage.LEAVING]
        results = [self._fail_now(pull, why) for pull in over]
        return results + self._left() if self._pulls else results

    # -- stages ------------------------------------------------------------------------------------------------

    def _read(self, pull: _Pull) -> None:
        pull.began = time.monotonic()
        info = self._sources.get(pull.order.source)
        if info is None:
            raise KVTierError(f"rank {self._rank} of that engine was never introduced")
        for g in pull.order.groups:
            if len(g.remote) and (int(g.remote.max()) >= info.num_blocks or int(g.remote.min()) < 1):
                raise KVTierError(f"a block id outside 1..{info.num_blocks - 1} in the lease")
        peer = self._peer(info)
        triples = [(g.group, g.local, g.remote) for g in pull.order.groups]
        # Elsewhere a read costs what its bytes cost, so that nothing is won by merging reads.
        read = peer.rows.indices(triples, rearrange=self._memory.on_device)
        pull.moves, pull.bytes = read.moves, read.size
        pull.transfer = self._transport.read(
            info.agent, peer.local, read.local, peer.remote, read.remote, read.size
        )

    def _peer(self, info: RankInfo) -> _Peer:
        """Connect and prepare descriptor lists, once for each connection."""
        peer = self._peers.get(info.agent)
        if peer is None or not self._transport.knows(info.agent):
            memory = self._memory
            self._transport.add_peer(info.agent_metadata, info.agent)
            rows = PageRows(
                memory.transfer_view.groups, info.groups, memory.view.num_blocks, info.num_blocks,
                memory.arrived.data_ptr(), info.sums_base, memory.device_id, info.device,
            )
            peer = self._peers[info.agent] = _Peer(
                rows,
                self._transport.prepare(info.agent, rows.local, memory.memory_type, ours=True),
                self._transport.prepare(info.agent, rows.remote, info.memory, ours=False),
            )
        return peer

    def _advance(self, pull: _Pull, quick: bool) -> PullResult | None:
        now = time.monotonic()
        if pull.stage is Stage.WAITING:
            if now >= pull.deadline:
                return self._fail_now(pull, f"the read from {pull.order.source} could not begin in time")
            if now < pull.not_before or self._condemned is not None or not _free(pull):
                return None
            if quick and not self.connected(pull.order.source):
                return None
            try:
                self._read(pull)
            except Exception as error:
                return self._fail_now(pull, f"cannot read from {pull.order.source}: {error}")
            pull.stage = Stage.READING
        if pull.stage is Stage.READING:
            state = self._transport.poll(pull.transfer)
            if state is TransferState.DONE:
                transfer, pull.transfer = pull.transfer, None
                pull.stage = Stage.VERIFYING
                self._transport.release(transfer)
                pull.check = self._memory.begin_check(pull.order.groups, pull.moves)
            elif state is TransferState.FAILED:
                pull.stage, pull.reason = Stage.FAILED, f"the read from {pull.order.source} failed"
                self._condemn(now)
            elif now >= pull.deadline:
                self._condemn(now)
        if pull.stage is Stage.VERIFYING:
            bad = self._memory.end_check(pull.check)
            if bad is None:
                return None
            if bad and pull.order.promised and pull.rereads < len(REREAD_AFTER):
                again = now + REREAD_AFTER[pull.rereads]
                if again + (now - pull.began) < pull.deadline:  # else it would be cut off, and the agent with it
                    pull.not_before, pull.stage = again, Stage.WAITING
                    pull.rereads += 1
                    return None
            return self._verified(pull, bad)
        return None

    def _broken(self, pull: _Pull, reason: str) -> PullResult | None:
        if pull.stage in (Stage.WAITING, Stage.VERIFYING):
            return self._fail_now(pull, reason)
        pull.stage, pull.reason = Stage.FAILED, reason
        self._condemn(time.monotonic())
        return None

    # -- the agent that reads ----------------------------------------------------------------------------------

    def _condemn(self, now: float) -> None:
        if self._condemned is None:
            self._condemned = now + GRACE

    def _judge(self) -> None:
        """Of a condemned agent: whether it has to go, and when."""
        now = time.monotonic()
        reading = [pull for pull in self._pulls if pull.stage is Stage.READING]
        failed = any(pull.stage is Stage.FAILED for pull in self._pulls)
        if not failed and not any(now >= pull.deadline for pull in reading):
            self._condemned = None  # what took too long has ended after all
        elif not reading or now >= self._condemned:
            self._end_agent(now)

    def _end_agent(self, now: float) -> None:
        for pull in self._pulls:
            if pull.stage is Stage.READING:
                late, timeout = now >= pull.deadline, f"did not end within {pull.order.timeout:g} s"
                why = timeout if late else "did not end in time when another had failed"
                pull.stage, pull.reason = Stage.FAILED, f"the read from {pull.order.source} {why}"
            if pull.stage is Stage.FAILED:
                pull.stage = Stage.LEAVING
                transfer, pull.transfer = pull.transfer, None
                self._transport.release(transfer)
                del transfer  # whoever holds its handle keeps the agent alive
        self._peers.clear()  # as do prepared lists
        self._condemned, self._look_at = None, 0.0
        self._transport.retire()

    def _left(self) -> list[PullResult]:
        """Pulls whose agent has ended."""
        now = time.monotonic()
        if now < self._look_at:
            return []
        if not self._transport.retired():
            if not self._look_at:
                logger.error(
                    "kvtier: NIXL does not give back the memory of a read that failed; its blocks stay out of use, "
                    "and their requests wait: restart this engine"
                )
            self._look_at = now + LOOK_AGAIN
            return []
        if self._memory.view.device.type == "cuda":
            torch.cuda.synchronize(self._memory.view.device)  # copies that the agent has left to the GPU
        left = [pull for pull in self._pulls if pull.stage is Stage.LEAVING]
        self._pulls = [pull for pull in self._pulls if pull.stage is not Stage.LEAVING]
        return [self._fail_now(pull, pull.reason) for pull in left]

    def _verified(self, pull: _Pull, bad: set[int]) -> PullResult:
        seconds = time.monotonic() - pull.started
        if not bad:
            return PullResult(pull.order.request_id, set(), False, "", pull.bytes, seconds)
        reason = f"{len(bad)} of {len(pull.blocks)} blocks from {pull.order.source} have a wrong checksum"
        self._log_once(pull.order.source, reason)
        return PullResult(pull.order.request_id, bad, True, reason, pull.bytes, seconds, checksum=True)

    def _fail_now(self, pull: _Pull, reason: str) -> PullResult:
        self._log_once(pull.order.source, reason)
        return PullResult(
            pull.order.request_id, pull.blocks, True, reason, pull.bytes, time.monotonic() - pull.started
        )

    def _log_once(self, source: str, reason: str) -> None:
        """Once a source: a peer that lies or dies would otherwise fill the log; the counters have the rest."""
        if source not in self._logged:
            self._logged.add(source)
            logger.warning("kvtier: %s; these blocks are computed (said once for this source)", reason)


def _free(pull: _Pull) -> bool:
    """Whether its blocks may be written."""
    if pull.after is not None and pull.after.query():
        pull.after = None  # it marks a later step some time
    return pull.after is None
