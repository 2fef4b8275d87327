"""Reads of pages into our pages by NIXL, byte for byte, from the one rank of the source whose pages lie as ours."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.jobs.transfer_jobs import PullJob
from vllm_kvtier.shapes.read_paths import direct_source
from vllm_kvtier.wire.messages import HeadRange, RankInfo
from vllm_kvtier.worker.nixl_pull.descriptors import Elements, PageRows, Side
from vllm_kvtier.worker.nixl_pull.exported_memory import CacheMemory
from vllm_kvtier.worker.nixl_pull.nixl_transport import NixlTransport, Transfer

# The most reads of a transfer. Posting takes up to 5 us each, whatever their sizes; other pulls, the reactor and the
# model runner may wait meanwhile.
MAX_READS = 1000


@dataclass
class _Peer:
    rows: PageRows
    local: Any  # NIXL's prepared lists
    remote: Any


class DirectReads:
    def __init__(self, transport: NixlTransport, memory: CacheMemory, rank: int, heads: Sequence[HeadRange]):
        self._transport, self.memory, self._rank, self._heads = transport, memory, rank, heads
        self._geometry = memory.geometry()
        self._chosen: dict[str, RankInfo] = {}  # by source
        self._peers: dict[str, _Peer] = {}  # by agent

    def open(self, job: PullJob, ranks: Sequence[RankInfo]) -> "DirectRead":
        """Connects. Raises KVTierError for a block that does not exist."""
        info = self.source(job, ranks)
        check_blocks(job, info.num_blocks)
        self._peer(info)
        return DirectRead(self, job, info)

    def source(self, job: PullJob, ranks: Sequence[RankInfo]) -> RankInfo:
        """The rank that is read."""
        info = self._chosen.get(job.instance)
        if info is None:
            info = self._chosen[job.instance] = direct_source(self._rank, self._geometry, self._heads, ranks)
        return info

    def connected(self, instance: str) -> bool:
        info = self._chosen.get(instance)
        return info is not None and info.agent in self._peers and self._transport.knows(info.agent)

    def num_reads(self, job: PullJob) -> int:
        """How many NIXL makes of a job, at least; from a connected engine."""
        rows = self._peers[self._chosen[job.instance].agent].rows
        return sum(rows.num_reads(g.group, g.local, g.remote, self.memory.on_device) for g in job.groups)

    def remove(self, instance: str) -> None:
        """Its ranks may be others than before."""
        self._chosen.pop(instance, None)

    def release_lists(self) -> None:
        self._peers.clear()

    def start(self, read: "DirectRead") -> Transfer:
        info, triples = read.info, [(g.group, g.local, g.remote) for g in read.job.groups]
        peer = self._peer(info)
        # Without a device the cost of a read is that of its bytes: merging reads gains nothing.
        if not read.unposted:
            elements = peer.rows.indices(triples, rearrange=self.memory.on_device)
            read.unposted.extend(peer.rows.split(elements, MAX_READS))
            read.moves, read.bytes = elements.moves, 0
        part = read.unposted.popleft()
        transfer = self._transport.read(info.agent, peer.local, part.local, peer.remote, part.remote, part.size)
        read.bytes += part.size
        return transfer

    def _peer(self, info: RankInfo) -> _Peer:
        """Connect and prepare descriptor lists, once per connection."""
        peer = self._peers.get(info.agent)
        if peer is None or not self._transport.knows(info.agent):
            memory = self.memory
            self._transport.add_peer(info.agent_metadata, info.agent)
            groups, arrived = memory.transfer_view.groups, memory.arrived.data_ptr()
            rows = PageRows(
                Side(groups, memory.view.num_blocks, arrived, memory.device_id),
                Side(info.groups, info.num_blocks, info.checksum_table_addr, info.device),
            )
            remote = self._transport.prepare(info.agent, rows.remote, info.memory, ours=False)  # may be refused
            local = self._transport.prepare(info.agent, rows.local, memory.memory_type, ours=True)
            peer = self._peers[info.agent] = _Peer(rows, local, remote)
        return peer


@dataclass(eq=False)
class DirectRead:
    """One pull, in one round of one transfer or several."""

    reads: DirectReads
    job: PullJob
    info: RankInfo
    bytes: int = 0  # of what was posted
    unposted: deque[Elements] = field(default_factory=deque)  # once the first was posted
    moves: list = field(default_factory=list)
    check: Any = None
    more = False

    def start(self) -> Transfer:
        """Post the next of its transfers; the first again if it has posted all."""
        return self.reads.start(self)

    def begin_check(self) -> None:
        self.check = self.reads.memory.begin_check(self.job.groups, self.moves)

    def end_check(self) -> set[int] | None:
        """Our block ids whose checksum is wrong; None while the device is computing."""
        return self.reads.memory.end_check(self.check)

    def close(self) -> None:
        """It failed, and nothing writes its blocks any more."""
        self.reads.memory.clear_unread(self.job.groups)


def check_blocks(job: PullJob, num_blocks: int) -> None:
    """Raise KVTierError for a block that the source does not have: a job repeats a peer's answer."""
    for g in job.groups:
        if len(g.remote) and (int(g.remote.max()) >= num_blocks or int(g.remote.min()) < 1):
            raise KVTierError(f"a block id outside 1..{num_blocks - 1} in the lease")
