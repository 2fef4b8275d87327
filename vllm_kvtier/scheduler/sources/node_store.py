"""The node store that this engine uses: the connection to it, and what its blocks are called and look like there.

The store knows blocks by content. This engine adds the *namespace* (everything that a block's bytes depend on beside
its tokens), the layout of a slot, and the number of pages of the store's memory that all its workers can reach.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

import numpy as np
from msgspec import structs

from vllm_kvtier.codecs import Codec
from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.context import LoadContext
from vllm_kvtier.scheduler.leases.peer_directory_client import PeerDirectoryClient
from vllm_kvtier.scheduler.offload.kv_events import Events
from vllm_kvtier.scheduler.sources.slot_layout import SlotPlan, plan_slots
from vllm_kvtier.store.client import Pending, StoreClient
from vllm_kvtier.store.joined_client import JoinedStoreClient
from vllm_kvtier.store.launcher import start_store, store_path
from vllm_kvtier.store.options import StoreOptions, same_place
from vllm_kvtier.store.protocol import PAGE, Hello
from vllm_kvtier.store.tunnel import TunnelClient
from vllm_kvtier.wire import link as lm
from vllm_kvtier.wire import messages as m

logger = get_logger(__name__)

T = TypeVar("T", bound=Any)

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


class NodeStore:
    def __init__(
        self,
        context: LoadContext,
        send: Callable[..., None],
        on_lost: Callable[[], None],
        sharing: PeerDirectoryClient | None = None,
        events: Events | None = None,
    ):
        """``send(message, rank=None)``: to one worker or all. ``on_lost`` is called (reactor's thread) when the store
        disconnects. Raises ConfigError or KVTierError for unusable options."""
        self._send, self._on_lost, self.sharing, self.events = send, on_lost, sharing, events
        engine = context.engine
        self._config, self._info, self._reactor = engine.config, engine.info, engine.reactor
        self._geometry, self._hash_block_size = engine.geometry, engine.geometry.hash_block_size
        self._namespace_ids = context.namespace_ids
        self._plan: SlotPlan | None = None
        self._path = store_path() if self._config.store == "auto" else self._config.store
        self._options = _store_options(self._config)
        self.client: StoreClient | JoinedStoreClient | None = None
        self._joined: JoinedStoreClient | None = None  # the client of an engine over several nodes
        self._tunnels: dict[int, TunnelClient] = {}  # by rank
        self._reached: dict[int, tuple[str, int]] = {}  # rank -> (instance, bytes its copies can reach)
        self._limit = 0  # of the connection
        self._instance = ""
        self._logged = ""
        self._waiting = self._compared = False

    # -- reactor's thread ------------------------------------------------------------------------------------------

    def open(
        self, namespace: m.Namespace, described: dict[int, lm.Described], codec: str | Mapping[str, str] = Codec.RAW
    ) -> None:
        """All ranks are known: lay out the slots, connect, and set up the workers.

        ``codec``: the option's value as ``choice.resolve`` returned it. Raises ValueError for blocks that fit no slot.
        """
        plan = plan_slots(
            namespace, described, codec, self._geometry.groups, self._hash_block_size, self._info.release
        )
        self._plan, self._namespace_ids.base = plan, plan.base
        self._connect(plan)

    def _connect(self, plan: SlotPlan) -> None:
        setup = lm.PoolSetup(self._path, plan.offsets, plan.writes, [codec.name for codec in plan.codecs])
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
            tunnel = TunnelClient(self._reactor, lambda *frame: self._send(lm.StoreFrame(rank, *frame), rank))
            self._tunnels[rank], path = tunnel, f"{path} of rank {rank}'s node"
            client = StoreClient(self._reactor, path, hello, lookup_timeout=timeout, on_change=on_change)
            client.dial = tunnel.dial
            return client
        launch = (lambda: start_store(path, self._options)) if self._config.store == "auto" else None
        return StoreClient(self._reactor, path, hello, launch=launch, lookup_timeout=timeout, on_change=on_change)

    def tunnelled(self, message: lm.StoreFrame) -> None:
        tunnel = self._tunnels.get(message.rank)
        if tunnel is not None:
            tunnel.deliver(message.number, message.frame)

    def link_renewed(self, rank: int) -> None:
        tunnel = self._tunnels.get(rank)
        if tunnel is not None:
            tunnel.close()

    def reached(self, message: lm.PoolReady) -> None:
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
            if client.instance:
                self._name_namespace()
            else:
                self._on_lost()
        if self.sharing is not None:
            self.sharing.store_changed(self._one_node_client)
        if self.events is not None:
            self.events.store_changed(self._one_node_client, bool(self.limit()))
        if client.connected and not self._compared:
            self._compared = True
            self._compare_places(client)
        if client.connected and self._logged:
            self._logged = ""
            logger.info("kvtier: the node store is there again")
        elif not client.connected and not self._waiting:
            self._waiting = True
            self._reactor.call_later(MAX_WAIT_SECONDS, self._still_without)

    def _name_namespace(self) -> None:
        """So that the store keeps its pinned blocks before this engine's first request, too."""
        self.opened_client.touch(self.namespace_id(b""), b"")

    def _compare_places(self, client: StoreClient | JoinedStoreClient) -> None:
        """Warn of a running store whose tiers are elsewhere. What this engine does not set may be the operator's."""
        others = [
            f"store_{name} is {client.places.get(name) or 'not set'}, not {place}"
            for name, place in self._options.places().items()
            if not same_place(place, client.places.get(name, ""))
        ]
        if others:
            logger.warning(
                "kvtier: store: the running store keeps the options that it was started with, others than this "
                "engine's: %s. To change them, end it (kill %d)%s",
                "; ".join(others),
                client.pid,
                ": an engine starts the next one" if self._config.store == "auto" else " and start it with these",
            )

    def _still_without(self) -> None:
        """Logged only if it lasts: a store that starts or restarts is there in a second or two."""
        self._waiting = False
        reason = self.opened_client.reason
        if reason and reason != self._logged:
            self._logged = reason
            logger.warning("kvtier: serving without the node store: %s", reason)

    # -- any thread ------------------------------------------------------------------------------------------------

    @property
    def opened(self) -> bool:
        return self._plan is not None

    @property
    def plan(self) -> SlotPlan:
        """Of an opened store."""
        assert self._plan is not None
        return self._plan

    @property
    def codecs(self) -> list[Codec]:
        """By group; [] until the store is opened."""
        return self._plan.codecs if self._plan is not None else []

    def load_bytes(self, tokens: int) -> int:
        """Bytes that one rank loads for so many tokens, see ``SlotPlan.full_bytes``."""
        return self.plan.full_bytes(self._info.groups, tokens)

    @property
    def epoch(self) -> int:
        return self._namespace_ids.epoch

    def namespace_id(self, lora_fingerprint: bytes) -> bytes:
        return self._namespace_ids.of(lora_fingerprint)

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
        """Start new namespaces: this engine uses nothing any more that is stored so far."""
        if self.client is not None:
            self.client.leave(self.namespace_id(b""))  # it could not name its pinned blocks any more
        self._namespace_ids.renew()
        if self.client is not None:
            self._name_namespace()
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
