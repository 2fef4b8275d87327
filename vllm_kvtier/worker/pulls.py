"""Pulls under way on this worker: read, verify, report. Runs on the worker's reactor.

A pull has two ends: *when it failed* (deadline, error, checksum) and *when its blocks may be reused* (NIXL gave
the memory back). It is reported only at the second, so that nothing writes into a block vLLM handed on.
"""

import enum
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.messages import RankInfo
from vllm_kvtier.worker.descriptors import PageRows
from vllm_kvtier.worker.memory import CacheMemory, Check
from vllm_kvtier.worker.transport import NixlTransport, Transfer, TransferState
from vllm_kvtier.worker.work import PullOrder

logger = logging.getLogger("vllm.kvtier.pulls")


# A source makes the checksums of a hand-off before it offers it, unless it is busy; then a moment later.
REREAD_AFTER = 0.02


class Stage(enum.Enum):
    WAITING = "waiting"  # to read once more
    READING = "reading"
    VERIFYING = "verifying"
    ABORTING = "aborting"  # failed, but NIXL may still write into the blocks


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
    again_at: float | None = None  # when to read a second time; set once


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

    @property
    def active(self) -> bool:
        return bool(self._pulls)

    def introduce(self, instance: str, ranks: list[RankInfo]) -> None:
        for info in ranks:
            if info.rank == self._rank:
                self._sources[instance] = info

    def connected(self, source: str) -> bool:
        """Whether a pull from this engine can start without connecting first."""
        info = self._sources.get(source)
        return info is not None and info.agent in self._peers and self._transport.knows(info.agent)

    def start(self, order: PullOrder) -> PullResult | None:
        """Begin reading; a result at once if that is impossible."""
        now = time.monotonic()
        pull = _Pull(order, now, now + order.timeout)
        pull.blocks = {int(i) for g in order.groups for i in g.local}
        try:
            self._read(pull)
        except Exception as error:  # NIXL raises its own classes; any of them only costs this pull
            return self._fail_now(pull, f"cannot read from {pull.order.source}: {error}")
        self._pulls.append(pull)
        return None

    def drive(self) -> list[PullResult]:
        """Advance every pull; the results of those that ended."""
        results = []
        for pull in list(self._pulls):
            try:
                result = self._advance(pull)
            except Exception as error:  # one pull's fault must not leave the others waiting for ever
                logger.exception("kvtier: a pull from %s failed in an unforeseen way", pull.order.source)
                result = self._broken(pull, str(error))
            if result is not None:
                self._pulls.remove(pull)
                results.append(result)
        if not self._pulls:
            self._transport.release_stale()
        return results

    # -- stages ------------------------------------------------------------------------------------------------

    def _read(self, pull: _Pull) -> None:
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

    def _advance(self, pull: _Pull) -> PullResult | None:
        if pull.stage is Stage.WAITING:
            if time.monotonic() < pull.again_at:
                return None
            try:
                self._read(pull)
            except Exception as error:
                return self._fail_now(pull, f"cannot read from {pull.order.source}: {error}")
            pull.stage = Stage.READING
        if pull.stage is Stage.READING:
            state = self._transport.poll(pull.transfer)
            if state is TransferState.RUNNING and time.monotonic() < pull.deadline:
                return None
            if state is TransferState.DONE:
                self._transport.release(pull.transfer)
                pull.stage = Stage.VERIFYING
                pull.check = self._memory.begin_check(pull.order.groups, pull.moves)
            else:
                pull.reason = (
                    f"the read from {pull.order.source} failed"
                    if state is TransferState.FAILED
                    else f"the read from {pull.order.source} did not end within {pull.order.timeout:g} s"
                )
                # A connection that broke or stalled is not trusted again: the next pull makes a new one.
                self._disconnect(pull)
                pull.stage = Stage.ABORTING
        if pull.stage is Stage.VERIFYING:
            bad = self._memory.end_check(pull.check)
            if bad is None:
                return None
            if bad and pull.order.promised and pull.again_at is None:
                pull.again_at, pull.stage = time.monotonic() + REREAD_AFTER, Stage.WAITING
                return None
            return self._verified(pull, bad)
        if pull.stage is Stage.ABORTING and self._transport.release(pull.transfer):
            return self._fail_now(pull, pull.reason)
        return None

    def _broken(self, pull: _Pull, reason: str) -> PullResult | None:
        if pull.stage is Stage.VERIFYING:
            return self._fail_now(pull, reason)
        pull.reason, pull.stage = reason, Stage.ABORTING
        return None

    def _disconnect(self, pull: _Pull) -> None:
        info = self._sources[pull.order.source]
        try:
            self._transport.remove_peer(info.agent)
        except Exception as error:
            logger.debug("kvtier: disconnecting %s: %s", info.agent, error)

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
