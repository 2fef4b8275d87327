"""The node store as a source of KV for this engine's requests, and the place to which blocks are offloaded.

The store knows blocks by content. This engine adds the *namespace* (everything that a block's bytes depend on beside
its tokens), the layout of a slot, and the number of pages of the store's memory that all its workers can reach.
"""

import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from typing import Any, TypeVar

import numpy as np
from msgspec import structs

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.jobs.results import LoadResult, Result
from vllm_kvtier.jobs.transfer_jobs import LoadJob
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.context import LoadContext
from vllm_kvtier.scheduler.leases.peer_directory_client import PeerDirectoryClient
from vllm_kvtier.scheduler.matching.request_state import lora_fingerprint_of
from vllm_kvtier.scheduler.offload.kv_events import Events
from vllm_kvtier.scheduler.sources import job_builder
from vllm_kvtier.scheduler.sources.base import (
    BlockIds,
    Candidate,
    LookupHit,
    LookupMiss,
    PendingLookup,
    PendingPromotion,
    RequestState,
)
from vllm_kvtier.scheduler.sources.peer_gpu import PeerGpuSource
from vllm_kvtier.scheduler.sources.slot_layout import SlotPlan
from vllm_kvtier.scheduler.sources.store_source import StoreSource, packed
from vllm_kvtier.store.client import Failed, Pending, StoreClient
from vllm_kvtier.store.joined_client import JoinedStoreClient
from vllm_kvtier.store.launcher import start_store, store_path
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.protocol import HASH_BYTES, MAX_HASH_BLOCKS, PAGE, Found, Hello
from vllm_kvtier.store.tunnel import TunnelClient
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.wire import link as m

logger = get_logger(__name__)

T = TypeVar("T", bound=Any)

# Seconds after which the store gets a touch, with others: the request that it is for is computed meanwhile.
TOUCH_WITHIN = 20e-3
MAX_WAIT_SECONDS = 10.0  # seconds without a store before that is logged


def _store_options(config: KVTierConfig) -> StoreOptions:
    """Those of a store that this engine starts: what the engine's options say with ``store_`` before the name."""
    given = {option.name: getattr(config, f"store_{option.name}", None) for option in fields(StoreOptions)}
    given |= {name: str(given[name]) for name in ("size", "disk_size", "object_size", "mooncake_segment")}
    given["cluster_key_file"] = config.cluster_key_file
    try:
        return StoreOptions(**{name: value for name, value in given.items() if value is not None})
    except ConfigError as error:
        if config.store == "auto":
            raise
        logger.warning("kvtier: options of a store that this engine does not start have no effect: %s", error)
        return StoreOptions()


class NodeStoreSource(StoreSource):
    slots_by_node = True

    def __init__(
        self,
        context: LoadContext,
        send: Callable[..., None],
        on_lost: Callable[[], None],
        peer_gpu: PeerGpuSource,
        sharing: PeerDirectoryClient | None = None,
        events: Events | None = None,
    ):
        """``send(message, rank=None)``: to one worker or all. ``on_lost`` is called (reactor's thread) when the store
        disconnects. ``peer_gpu``: reads what the store says that peers have. Raises ConfigError or KVTierError for
        unusable options."""
        super().__init__(context, prefetches=True)
        self._send, self._on_lost = send, on_lost
        self.peer_gpu, self.sharing, self.events = peer_gpu, sharing, events
        config = context.engine.config
        self._path = store_path() if config.store == "auto" else config.store
        self._options = _store_options(config)
        self.client: StoreClient | JoinedStoreClient | None = None
        self._joined: JoinedStoreClient | None = None  # the client of an engine over several nodes
        self._tunnels: dict[int, TunnelClient] = {}  # by rank
        self._reached: dict[int, tuple[str, int]] = {}  # rank -> (instance, bytes its copies can reach)
        self._limit = 0  # of the connection
        self._instance = ""
        self._logged = ""
        self._waiting = self._compared = False
        whole = [size // self._hash_block_size for size, kind in self._geometry.groups if kind.whole_prefix]
        self._first_hash = whole[0] - 1 if whole else None  # index of the hash of a prompt's first block

    # -- reactor's thread ------------------------------------------------------------------------------------------

    def _connect(self, plan: SlotPlan) -> None:
        setup = m.PoolSetup(self._path, plan.offsets, plan.writes, [codec.name for codec in plan.codecs])
        if len(plan.node_shapes) == 1:
            self._send(setup)
            self.client = self._connect_node(0, self._changed)
        else:
            launch = asdict(self._options) if self._config.store == "auto" else None
            self._send(structs.replace(setup, nodes=plan.nodes, launch=launch))
            ranks = [[r for r, of in enumerate(plan.nodes) if of == node] for node in range(len(plan.node_shapes))]
            self.sharing = self.events = None  # no peer reads GPUs of several nodes; events are of one store
            self._joined = JoinedStoreClient(self._connect_node, ranks, plan.node_shapes, self._changed)
            self.client = self._joined
        if self.events is not None:
            self.events.join(self.namespace_id(b""))
        self.client.start()

    def _connect_node(self, node: int, on_change: Callable[[], None]) -> StoreClient:
        hello = Hello(
            name=self._info.engine_id, pid=os.getpid(), kind="engine", hash_block_size=self._hash_block_size,
            groups=self.plan.node_shapes[node],
        )  # fmt: skip
        path, timeout = self._path, self._config.lookup_timeout
        if node:
            rank = self.plan.nodes.index(node)
            tunnel = TunnelClient(self._reactor, lambda *frame: self._send(m.StoreFrame(rank, *frame), rank))
            self._tunnels[rank], path = tunnel, f"{path} of rank {rank}'s node"
            client = StoreClient(self._reactor, path, hello, lookup_timeout=timeout, on_change=on_change)
            client.dial = tunnel.dial
            return client
        launch = (lambda: start_store(path, self._options)) if self._config.store == "auto" else None
        return StoreClient(self._reactor, path, hello, launch=launch, lookup_timeout=timeout, on_change=on_change)

    def tunnelled(self, message: m.StoreFrame) -> None:
        tunnel = self._tunnels.get(message.rank)
        if tunnel is not None:
            tunnel.deliver(message.number, message.frame)

    def link_renewed(self, rank: int) -> None:
        tunnel = self._tunnels.get(rank)
        if tunnel is not None:
            tunnel.close()

    def reached(self, message: m.PoolReady) -> None:
        self._reached[message.rank] = (message.instance, message.nbytes)
        self._limit = self._reachable_pages()
        if self.events is not None:
            self.events.store_changed(self._one_node_client, bool(self.limit()))

    @property
    def opened_client(self) -> StoreClient | JoinedStoreClient:
        """``client``, once the store is opened."""
        assert self.client is not None
        return self.client

    @property
    def _one_node_client(self) -> StoreClient:
        client = self.opened_client
        assert not isinstance(client, JoinedStoreClient)
        return client

    def _changed(self) -> None:
        client = self.opened_client
        self._limit = self._reachable_pages()
        if client.instance != self._instance:
            self._instance = client.instance
            if not client.instance:
                self._on_lost()
        if self.sharing is not None:
            self.sharing.store_changed(self._one_node_client)
        if self.events is not None:
            self.events.store_changed(self._one_node_client, bool(self.limit()))
        if client.connected and not self._compared:
            self._compared = True
            wanted = {"disk": self._options.disk_path, "object": self._options.object_url, "nodes": self._options.nodes}
            wanted["mooncake"] = self._options.mooncake_master
            lacking = [name for name, option in wanted.items() if option and name not in client.tiers]
            if lacking:
                logger.warning(
                    "kvtier: store: running store lacks tier %s of this engine's options (it was started with others); "
                    "stop the store (SIGTERM) and the next engine starts it with the new options",
                    " or ".join(lacking),
                )
        if client.connected and self._logged:
            self._logged = ""
            logger.info("kvtier: the node store is there again")
        elif not client.connected and not self._waiting:
            self._waiting = True
            self._reactor.call_later(MAX_WAIT_SECONDS, self._still_without)

    def _still_without(self) -> None:
        """Logged only if it lasts: a store that starts or restarts is there in a second or two."""
        self._waiting = False
        reason = self.opened_client.reason
        if reason and reason != self._logged:
            self._logged = reason
            logger.warning("kvtier: serving without the node store: %s", reason)

    # -- any thread ------------------------------------------------------------------------------------------------

    @property
    def writers(self) -> list[set[int]]:
        """By group, the ranks that write a part."""
        return self.plan.writers

    @property
    def logical(self) -> list[int]:
        """By group, bytes of KV that a slot stands for."""
        return self.plan.logical

    @property
    def instance(self) -> str:
        return self._instance

    @property
    def session(self) -> int:
        """Number of the present connection; reservations are its own. 0: none, or a worker reaches no memory."""
        return self.client.session if self.client is not None and self.limit() else 0

    def limit(self) -> int:
        """Pages of the present store's memory that all workers can reach; 0 without a store."""
        return self._limit if self.client is not None and self.client.connected else 0

    def _reachable_pages(self) -> int:
        client, reached = self.opened_client, list(self._reached.values())
        if self._joined is not None:
            return self._joined.reach(self._reached)
        if not client.connected or len(reached) < self._info.world_size:
            return 0
        if any(instance != client.instance for instance, _ in reached):
            return 0
        return min(nbytes for _, nbytes in reached) // PAGE

    def renew(self) -> None:
        super().renew()
        if self.events is not None:
            self.events.leave()
            self.events.join(self.namespace_id(b""))

    def reserve(self, namespace_id: bytes, tenant: bytes, groups: list[int], hashes: bytes, parents: bytes) -> Pending:
        return self.opened_client.reserve(namespace_id, tenant, groups, hashes, parents, self.limit())

    def by_writers(self, items: list[T]) -> Iterable[tuple[list[T], set[int]]]:
        """Items of one group with reserved slots, in parts: the ranks that write each."""
        joined, writers = self._joined, self.writers[items[0].group]
        if joined is None:
            return [(items, set(writers))]
        parts = itertools.groupby(items, lambda item: joined.lacking(item.slot))
        nodes = self.plan.nodes
        return [(list(part), {rank for rank in writers if lacking[nodes[rank]]}) for lacking, part in parts]

    def slot_array(self, slots: list[int]) -> np.ndarray:
        """As in ``StoreBlocks``."""
        return np.array(slots, np.int64) if self._joined is None else self._joined.reserved_slots(slots)

    def commit(self, slots: list[int], session: int) -> None:
        self.opened_client.commit(slots, session)

    def abort(self, slots: list[int], session: int) -> None:
        self.opened_client.abort(slots, session)

    def on_load_failed(self, state: RequestState, result: Result) -> None:
        if not isinstance(result, LoadResult) or self._joined is None:
            StoreSource.on_load_failed(self, state, result)
            return
        joined, lease = self._joined, state.hit.lease
        namespace_id = self.namespace_id(lora_fingerprint_of(state.request))
        for group, slot in result.corrupt:
            [first] = joined.slots_of(lease, group, np.array([slot], np.int64), result.node)[0].tolist()
            for _, _, block_hash in job_builder.hashes_of(state, self._geometry, [(group, first)]):
                joined.discard_at(result.node, namespace_id, group, block_hash[:HASH_BYTES], slot, lease)

    def discard(self, lora_fingerprint: bytes, group: int, block_hash: bytes, slot: int, session: int) -> None:
        namespace_id = self.namespace_id(lora_fingerprint)
        self._one_node_client.discard(namespace_id, group, block_hash[:HASH_BYTES], slot, session)

    def touch(self, block_hashes: list[bytes], lora_fingerprint: bytes) -> None:
        client = self.client
        if client is not None and not self.lacks(block_hashes, 0, lora_fingerprint):
            namespace_id = self.namespace_id(lora_fingerprint)
            self._reactor.call_within(TOUCH_WITHIN, lambda: client.touch(namespace_id, packed(block_hashes)))

    # -- scheduler's thread ----------------------------------------------------------------------------------------

    def ask(
        self,
        start: int,
        block_hashes: list[bytes],
        lora_fingerprint: bytes,
        nodes: tuple[str, ...] = (),
        wait_seconds: float = 0.0,
    ) -> PendingLookup | None:
        limit = self.limit()
        if not limit or start >= MAX_HASH_BLOCKS * self._hash_block_size:
            return None
        if self.events is not None:
            self.events.join(self.namespace_id(lora_fingerprint))
        key_mask, hash_blocks_per_block = self.directory_key_params(lora_fingerprint)
        client = self.opened_client
        instance = client.instance  # before the lookup: slots must not be taken for those of a later instance
        answer = client.lookup(
            self.namespace_id(lora_fingerprint),
            packed(block_hashes),
            start // self._hash_block_size,
            limit,
            wait_seconds,
            nodes,
            key_mask=key_mask,
            hash_blocks_per_block=hash_blocks_per_block,
        )
        try:
            most = len(block_hashes) * self._hash_block_size
            return PendingLookup(self, answer, start, most, self.epoch, instance)
        except Exception:
            self._release_answer(answer)
            raise

    def lacks(
        self, block_hashes: list[bytes], start: int, lora_fingerprint: bytes, nodes: tuple[str, ...] = ()
    ) -> bool:
        """By ``PresenceView``, which knows the store's memory; not if secondary tiers or peers may have blocks. A hit
        needs the first block from ``start`` on of each group whose whole prefix is needed."""
        client = self.client
        if client is None or self._first_hash is None or client.peer_count or nodes:
            return False
        if client.tiers and self._looks_below(client, nodes):
            return False
        presence, last = client.presence, start // self._hash_block_size + self._first_hash
        if presence is None or last >= len(block_hashes):
            return False
        namespace_id = self.namespace_id(lora_fingerprint)
        if self.events is not None:
            self.events.join(namespace_id)  # as ``ask`` does: others may store there later
        return not presence.may_have(namespace_id, block_hashes[last])

    @staticmethod
    def _looks_below(client: StoreClient | JoinedStoreClient, nodes: tuple[str, ...]) -> bool:
        """Whether the store asks a secondary tier for a request that names these nodes."""
        return any(nodes or tier not in client.only_named for tier in client.tiers)

    def prefetch_lookup(self, request: Any) -> None:
        lora_fingerprint = vr.lora_fingerprint(request)
        # From the prompt's first block on: the store keeps no prefix without its beginning.
        if lora_fingerprint is None or not self.lacks(request.block_hashes, 0, lora_fingerprint):
            super().prefetch_lookup(request)

    def prefetch_promotion(self, request: Any) -> bool:
        return self.client is not None and bool(self.client.tiers) and super().prefetch_promotion(request)

    def directory_key_params(self, lora_fingerprint: bytes) -> tuple[bytes, int]:
        """As ``PeerDirectoryClient.key_params``."""
        return self.sharing.key_params(lora_fingerprint) if self.sharing is not None else (b"", 1)

    def promote(self, block_hashes: list[bytes], lora_fingerprint: bytes, nodes: tuple[str, ...] = ()) -> bool:
        limit, client = self.limit(), self.client
        if not limit or client is None or not self._looks_below(client, nodes):
            return False
        client.warm(self.namespace_id(lora_fingerprint), packed(block_hashes), limit, nodes)
        return True

    def read_answer(self, pending: PendingLookup) -> LookupHit | LookupMiss:
        """Check the answer: the store is another process, and its numbers become addresses here."""
        found, session = pending.answer.outcome, pending.answer.session
        if isinstance(found, Failed):
            return LookupMiss("store_unavailable", found.reason)
        if not isinstance(found, Found):
            return LookupMiss("malformed", f"an answer of type {type(found).__name__}")
        size, below, limit = self._hash_block_size, found.promotion, self.limit()
        tokens, promotion = found.num_hash_blocks * size, None
        candidates: tuple[Candidate, ...] = ()
        if below is not None:
            promotion = PendingPromotion(below.num_hash_blocks * size, below.seconds, below.asking)
        if pending.epoch == self.epoch:
            candidates = tuple(
                Candidate(self.peer_gpu, (h.host, h.port), h.instance, h.num_hash_blocks * size) for h in found.holders
            )
        if not found.lease:
            return LookupMiss("not_in_store", "", True, candidates, promotion)
        if tokens <= pending.start or pending.epoch != self.epoch:
            self.opened_client.release(found.lease, session)
            return LookupMiss("not_in_store", "")
        right = tokens <= pending.max_tokens and len(found.slots) == len(self._info.groups)
        if not right or any(
            tokens % size
            or len(slots) != (tokens - pending.start) // size
            or max(slots, default=0) + shape.slot_pages > limit
            or (kind.whole_prefix and not all(slots))
            for (size, kind), shape, slots in zip(self._info.groups, self.plan.shapes, found.slots, strict=True)
        ):
            self.opened_client.release(found.lease, session)
            if not limit:
                return LookupMiss("store_unavailable", "the store went away")
            return LookupMiss("malformed", "slots that this engine cannot reach")
        nbytes, logical = self.plan.hit_bytes(found.slots)
        return LookupHit(
            self, pending.instance, found.lease, pending.start, tokens, found.slots, nbytes=nbytes,
            candidates=candidates, pending_promotion=promotion, session=session, epoch=pending.epoch,
            logical_bytes=logical,
        )  # fmt: skip

    def release(self, hit: LookupHit, consumed: bool) -> None:
        self.opened_client.release(hit.lease, hit.session)

    def cancel(self, pending: PendingLookup) -> None:
        self._release_answer(pending.answer)

    def _release_answer(self, answer: Pending) -> None:
        """Release the lease of an answer, now or when it arrives."""
        answer.then(
            lambda p: (
                self.opened_client.release(p.outcome.lease, p.session)
                if isinstance(p.outcome, Found) and p.outcome.lease
                else None
            )
        )

    # -- load --------------------------------------------------------------------------------------------------------

    def supports_sync_load(self, hit: LookupHit) -> bool:
        return True

    def build_job(self, state: RequestState, block_ids: BlockIds, tokens: int) -> LoadJob:
        job = super().build_job(state, block_ids, tokens)
        if self._joined is not None:
            for load in job.groups:
                load.by_node = self._joined.slots_of(state.hit.lease, load.group, load.slots)
        return job

    def on_allocated(self, state: RequestState, num_tokens: int) -> None:
        """Publish that these blocks are in this engine's cache too."""
        if self.events is not None and self.is_current(state, state.hit):
            start = state.num_computed_tokens
            namespace_id = self.namespace_id(lora_fingerprint_of(state.request))
            self.events.loaded(namespace_id, state.request, start, start + num_tokens)

    def hit_sources(self, state: RequestState, tokens: int) -> dict[str, int]:
        """Label "host": they were in memory; "disk", "peer": the tier that they were promoted from; "secondary": one of
        several tiers."""
        promoted, tiers = min(state.promoted_tokens, tokens), self.client.tiers if self.client is not None else ()
        kind = "disk" if tiers == ("disk",) else "peer" if tiers in (("nodes",), ("mooncake",)) else "secondary"
        return {"host": tokens - promoted, kind: promoted}
