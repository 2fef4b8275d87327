"""Other nodes' stores as a source of KV for an engine that has no node store of its own.

``NodeLookups`` and ``NodeLeaseClient`` are what a store's tier process uses too (``store.tiers.nodes``); here they run
on the engine's reactor. Nothing is written anywhere. The workers read the leased slots themselves
(``worker.remote_store.remote_store_worker``), straight into their device.
"""

import itertools
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.jobs.results import LoadResult, Result
from vllm_kvtier.jobs.transfer_jobs import LoadJob, RemoteStoreInfo
from vllm_kvtier.logs import get_logger
from vllm_kvtier.remote_store import protocol as w
from vllm_kvtier.remote_store.bad_blocks import BadBlocks
from vllm_kvtier.remote_store.lease_client import NodeLeaseClient, Peer
from vllm_kvtier.remote_store.lookup import ASK_SECONDS, Answer, NodeLookups
from vllm_kvtier.remote_store.node_names import NodeNames
from vllm_kvtier.remote_store.options import Address, NodeOptions
from vllm_kvtier.scheduler.context import LoadContext
from vllm_kvtier.scheduler.sources.base import (
    BlockIds,
    LookupHit,
    LookupMiss,
    PendingLookup,
    PendingPromotion,
    RequestState,
)
from vllm_kvtier.scheduler.sources.slot_layout import SlotPlan
from vllm_kvtier.scheduler.sources.store_source import StoreSource, packed
from vllm_kvtier.store.client import Pending
from vllm_kvtier.store.protocol import HASH_BYTES, MAX_HASH_BLOCKS
from vllm_kvtier.vllm_compat.engine_info import EngineInfo
from vllm_kvtier.vllm_compat.worker_info import wants_host_buffer
from vllm_kvtier.wire import link as m

logger = get_logger(__name__)

NETWORK_BANDWIDTH = 6e9  # bytes a second: 50 Gbit/s
# Seconds that a request waits for a better answer than the first; a healthy store answers in some hundred microseconds.
BETTER_HIT_WAIT = 0.02
# Seconds of a promotion in a remote store, before any was measured; and the weight of the latest.
INITIAL_PROMOTION_SECONDS, PROMOTION_WEIGHT = 0.05, 0.2


def uses_remote_store(config: KVTierConfig) -> bool:
    """Whether the engine asks other nodes' stores itself."""
    return config.store == "off" and bool(config.store_nodes)


def store_bandwidth(config: KVTierConfig, info: EngineInfo) -> float:
    """Bytes a second of a rank's loads, before any was measured."""
    return min(info.link_bandwidth, NETWORK_BANDWIDTH) if uses_remote_store(config) else info.link_bandwidth


@dataclass(frozen=True)
class RemoteHit:
    """``lease``: this engine's number. ``remote``: the store whose memory the slots are in."""

    lease: int
    hit: w.LookupHit
    remote: RemoteStoreInfo


@dataclass(frozen=True)
class RemoteStoreReply:
    """The nodes' answer to ``asked``. ``hit``: None if no node has anything in memory. ``promotable``: hash blocks that
    one of the nodes may have in a secondary tier."""

    asked: w.LookupRequest
    hit: RemoteHit | None
    promotable: int


@dataclass(slots=True)
class RemoteLease:
    peer: Peer
    lease: int  # the peer's
    reading: bool = False
    failed: bool = False  # what was read


class RemoteStoreSource(StoreSource):
    def __init__(self, context: LoadContext, send: Callable[[m.RemoteStoreSetup], None]):
        """``send``: to all workers. Raises ConfigError for options that contradict each other, or that would connect to
        other nodes without a key."""
        super().__init__(context, prefetches=False)
        self._send = send
        config = context.engine.config
        options = NodeOptions.parse({"nodes": config.store_nodes, "cluster_key_file": config.cluster_key_file or ""})
        instance = uuid.uuid4().hex
        self._peers = NodeLeaseClient(self._reactor, instance, options, self._gone, logger)
        self._listed = options.nodes
        self._asking = NodeLookups(self._reactor, self._peers, options.nodes, BETTER_HIT_WAIT)
        NodeNames(self._reactor, options.names, instance, self._named).start()
        self._bad_blocks = BadBlocks()
        self._able: set[int] = set()  # ranks
        self._lease_ids = itertools.count(1)
        self._leases: dict[int, RemoteLease] = {}
        self._promotion_seconds = INITIAL_PROMOTION_SECONDS

    # -- reactor's thread ------------------------------------------------------------------------------------------

    def _named(self, addresses: tuple[Address, ...]) -> None:
        self._asking.listed = [*self._listed, *addresses]

    def _connect(self, plan: SlotPlan) -> None:
        host = wants_host_buffer(self._config.host_buffer, self._info.config, torch.device("cuda"))
        pages, names = [shape.slot_pages for shape in plan.shapes], [codec.name for codec in plan.codecs]
        loopback = self._config.cluster_key_file is None
        self._send(m.RemoteStoreSetup(plan.offsets, pages, names, host, loopback))

    def reached(self, message: m.PoolReady) -> None:
        """A rank can read from other nodes, or cannot any more."""
        (self._able.add if message.nbytes else self._able.discard)(message.rank)

    def lost(self, message: m.RemoteStoreLost) -> None:
        peer = self._peers.find(message.instance)
        # Another rank may report a connection late that this rank's message has ended.
        if peer is not None and 0 < peer.first_generation <= message.generation:
            self._peers.close(peer, message.reason)

    def _ask(self, ask: w.LookupRequest, nodes: tuple[str, ...], wait_seconds: float, pending: Pending) -> None:
        began = time.monotonic()

        def decided(answer: Answer) -> None:
            if wait_seconds:
                self._promotion_seconds += PROMOTION_WEIGHT * (time.monotonic() - began - self._promotion_seconds)
            pending.resolve(self._reply(ask, answer))  # type: ignore[arg-type]  # not an answer of the node store

        self._asking.ask(ask, nodes, decided, wait_seconds)

    def _reply(self, asked: w.LookupRequest, answer: Answer) -> RemoteStoreReply:
        if answer.hit is None:
            return RemoteStoreReply(asked, None, answer.promotable)
        peer, hit = answer.hit
        lease = next(self._lease_ids)
        self._leases[lease] = RemoteLease(peer, hit.lease)
        remote = RemoteStoreInfo(peer.instance, peer.agent, peer.base, peer.metadata, peer.generation)
        return RemoteStoreReply(asked, RemoteHit(lease, hit, remote), answer.promotable)

    def _begin(self, lease: int) -> None:
        remote_lease = self._leases.get(lease)
        if remote_lease is not None and not remote_lease.reading:
            remote_lease.reading = True
            self._peers.begin_read(remote_lease.peer)

    def _release_lease(self, lease: int) -> None:
        remote_lease = self._leases.pop(lease, None)
        if remote_lease is None:
            return
        if remote_lease.reading:
            self._peers.end_read(remote_lease.peer)
            if not remote_lease.failed:
                self._peers.reached(remote_lease.peer)
        self._peers.release(remote_lease.peer, remote_lease.lease)

    def _read_failed(self, lease: int, late: bool) -> None:
        remote_lease = self._leases.get(lease)
        if remote_lease is not None:
            remote_lease.failed = True
            if late:
                self._peers.pause_lookups(remote_lease.peer)

    def _gone(self, peer: Peer, reason: str) -> None:
        self._leases = {lease: held for lease, held in self._leases.items() if held.peer is not peer}

    # -- any thread ------------------------------------------------------------------------------------------------

    def limit(self) -> int:
        """0: some rank cannot read from other nodes."""
        return int(self.opened and len(self._able) == self._info.world_size)

    def touch(self, block_hashes: list[bytes], lora_fingerprint: bytes) -> None:
        """Nothing: remote stores do not take hints."""

    def promote(self, block_hashes: list[bytes], lora_fingerprint: bytes, nodes: tuple[str, ...] = ()) -> bool:
        """False: this node has no memory to promote to."""
        return False

    # -- scheduler's thread ----------------------------------------------------------------------------------------

    def ask(
        self,
        start: int,
        block_hashes: list[bytes],
        lora_fingerprint: bytes,
        nodes: tuple[str, ...] = (),
        wait_seconds: float = 0.0,
    ) -> PendingLookup | None:
        if not self.limit() or start >= MAX_HASH_BLOCKS * self._hash_block_size:
            return None
        wait_seconds = min(wait_seconds, w.MAX_WAIT_SECONDS)
        ask = w.LookupRequest(
            0,
            self.namespace_id(lora_fingerprint),
            self._hash_block_size,
            self.plan.shapes,
            packed(block_hashes),
            start // self._hash_block_size,
        )
        answer = Pending(0, time.monotonic() + wait_seconds + 2 * ASK_SECONDS)
        pending = PendingLookup(self, answer, start, len(block_hashes) * self._hash_block_size, self.epoch)
        self._reactor.call_soon(lambda: self._ask(ask, nodes, wait_seconds, answer))
        return pending

    def read_answer(self, pending: PendingLookup) -> LookupHit | LookupMiss:
        """``NodeLeaseClient`` has checked the number of slots and their range."""
        reply: RemoteStoreReply = pending.answer.outcome
        asked, shapes, remote = reply.asked, self.plan.shapes, reply.hit
        have = remote.hit.num_hash_blocks if remote is not None else pending.start // self._hash_block_size
        promotion = None
        if reply.promotable > have:
            promotion = PendingPromotion(have * self._hash_block_size, 0.0, self._promotion_seconds)
        if remote is None:
            return LookupMiss("not_in_store", "", True, pending_promotion=promotion)
        num_hash_blocks = self._bad_blocks.good_hash_blocks(
            asked.namespace_id, asked.block_hashes, shapes, asked.start, have, remote.remote.instance
        )
        tokens = num_hash_blocks * self._hash_block_size
        if num_hash_blocks < have:
            promotion = None
        if tokens <= pending.start or pending.epoch != self.epoch:
            self._return(remote.lease)
            return LookupMiss("not_in_store", "")
        counts = [(num_hash_blocks - asked.start) // shape.hash_blocks_per_block for shape in shapes]
        slots = [row[:count] for row, count in zip(remote.hit.slots, counts, strict=True)]
        nbytes, logical = self.plan.hit_bytes(slots)
        return LookupHit(
            self, remote.remote.instance, remote.lease, pending.start, tokens, slots, nbytes=nbytes,
            pending_promotion=promotion, session=remote.lease, epoch=pending.epoch, logical_bytes=logical,
            remote=remote.remote,
        )  # fmt: skip

    def is_current(self, state: RequestState, hit: LookupHit) -> bool:
        """False as well if the lease has ended, with its connection."""
        return hit.lease in self._leases and super().is_current(state, hit)

    def build_job(self, state: RequestState, block_ids: BlockIds, tokens: int) -> LoadJob:
        job, lease = super().build_job(state, block_ids, tokens), state.hit.lease
        job.remote_store = state.hit.remote
        self._reactor.call_soon(lambda: self._begin(lease))  # the store there may have to help
        return job

    def release(self, hit: LookupHit, consumed: bool) -> None:
        self._return(hit.lease)

    def cancel(self, pending: PendingLookup) -> None:
        pending.answer.then(lambda p: self._return(p.outcome.hit.lease) if p.outcome.hit is not None else None)

    def _return(self, lease: int) -> None:
        self._reactor.call_soon(lambda: self._release_lease(lease))

    def on_load_failed(self, state: RequestState, result: Result) -> None:
        super().on_load_failed(state, result)
        if isinstance(result, LoadResult):  # as there
            lease, late = state.hit.lease, result.seconds >= self._config.transfer_timeout
            self._reactor.call_soon(lambda: self._read_failed(lease, late))

    def discard(self, lora_fingerprint: bytes, group: int, block_hash: bytes, slot: int, session: int) -> None:
        """``session``: the lease of the load. If it has ended, the slot may have had another content by then."""
        lease = self._leases.get(session)
        if lease is not None:
            namespace_id, store = self.namespace_id(lora_fingerprint), lease.peer.instance
            self._bad_blocks.add(namespace_id, group, block_hash[:HASH_BYTES], store)
