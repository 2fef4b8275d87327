"""Leases of this store's memory that other nodes hold. To the index, each such client is like an engine.

A lease ends when the client returns it or disconnects, when the tier process ends, and at the index's own deadline. A
client that reads later may get other bytes, which its checksums reveal.

A request with ``wait_seconds`` waits for promotions from this store's disk, Mooncake cluster and object store. It never
waits for other nodes, which may be waiting for this one, nor for what it shares with the client, which reads it itself.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from vllm_kvtier.store.index.index import Index
from vllm_kvtier.store.index.types import HASH_BYTES, BadRequest, Found
from vllm_kvtier.store.protocol import GroupShape, TierQuery
from vllm_kvtier.store.tiers.base import Want
from vllm_kvtier.store.tiers.process import protocol as m

MAX_SHAPES = 16  # sets of cache groups that one client may look up; a node serves fewer models
_ANY_PAGES = 1 << 40  # a pages_limit

Answer = Callable[[m.LeaseReply | m.PromotionStatus], object]


class SecondaryTiers(Protocol):
    """The part of ``tier_stack.TierStack`` that is used here."""

    def peek(self, want: Want) -> int: ...

    def lookup(
        self, client: int, want: Want, pages_limit: int, wait_seconds: float,
        answer: Callable[[Found, TierQuery | None], None],
    ) -> None: ...  # fmt: skip

    def remove_client(self, client: int) -> None: ...


class NodeLeaseTable:
    """On the server's reactor thread. ``client``: this number and smaller ones identify the clients in the index; no
    connection has them. ``on_lease()``: the index has a lease, whose deadline must be watched. ``shared``: digests
    of what this store's tiers share with other nodes, by tier. ``secondary_tiers``: set after construction; None: only
    blocks in memory are leased."""

    secondary_tiers: SecondaryTiers | None = None

    def __init__(
        self,
        index: Index,
        client: int,
        on_lease: Callable[[], None] = lambda: None,
        *,
        shared: Mapping[str, str] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ):
        self._index, self._next_client, self._on_lease = index, client, on_lease
        self._shared, self._clock = shared, clock
        # Client numbers in the index, by connection and the shape of its groups, oldest first.
        self._clients: dict[int, dict[tuple[int, tuple[GroupShape, ...]], int]] = {}
        self._leases: dict[tuple[int, int], int] = {}  # (connection, lease): client number
        self._waiting: dict[int, dict[int, Callable[[], object]]] = {}  # by client number and request: answers a miss
        self.leased_blocks = self.leases_granted = 0  # since the start
        self.promotions = 0  # requests that waited for a promotion

    def __len__(self) -> int:
        """Leases that were not returned; some may be past their deadline."""
        return len(self._leases)

    def handle(self, message: m.LeaseRequest | m.Return | m.Left, answer: Answer) -> None:
        """Handle a message of the tier process. ``answer``: of a LeaseRequest, perhaps later; not called if the client
        or the tier process ends first."""
        if isinstance(message, m.LeaseRequest):
            self._request(message, answer)
        elif isinstance(message, m.Return):
            client = self._leases.pop((message.client, message.lease), None)
            if client is not None:
                self._index.release(client, message.lease)
        else:
            self._left(message.client)

    def end(self) -> None:
        """The tier process has ended, and with it all connections. Idempotent."""
        for connection in list(self._clients):
            self._left(connection)

    # -- leases -------------------------------------------------------------------------------------------------

    def _request(self, request: m.LeaseRequest, answer: Answer) -> None:
        if not request.groups or len(request.block_hashes) % HASH_BYTES:
            answer(_miss(request))
            return
        skip = ("nodes", *(tier for tier, digest in self._shared.items() if digest in request.shared))
        want = Want(
            request.namespace_id, request.hash_block_size, request.groups, request.block_hashes, request.start,
            skip=skip,
        )
        tiers = self.secondary_tiers
        try:
            client = self._client(request)
            if request.wait_seconds and tiers is not None:
                self._promote(tiers, request, client, want, answer)
                return
            found = self._index.lookup(client, request.namespace_id, request.block_hashes, request.start, _ANY_PAGES)
        except BadRequest:  # the namespace has other groups here
            answer(_miss(request))
            return
        promotable = 0
        if tiers is not None and found.num_hash_blocks < want.num_hash_blocks:
            promotable = tiers.peek(replace(want, start=found.num_hash_blocks))
        self._grant(request, client, found, answer, promotable if promotable > found.num_hash_blocks else 0)

    def _promote(self, tiers: SecondaryTiers, request: m.LeaseRequest, client: int, want: Want, answer: Answer) -> None:
        """Look up again after each promotion, until nothing more is expected or the wait ends."""
        until = self._clock() + request.wait_seconds
        waiting = self._waiting.setdefault(client, {})

        def on_found(found: Found, more: TierQuery | None) -> None:
            left = until - self._clock()
            if more is None or left <= 0:
                waiting.pop(request.id, None)
                self._grant(request, client, found, answer)
                return
            if request.id not in waiting:
                self.promotions += 1
                waiting[request.id] = lambda: answer(_miss(request))
            if found.lease:
                self._index.release(client, found.lease)
            answer(m.PromotionStatus(request.id, more.num_hash_blocks, max(more.seconds, more.asking)))
            look(left)

        def look(wait_seconds: float) -> None:
            try:
                tiers.lookup(client, want, _ANY_PAGES, wait_seconds, on_found)
            except BadRequest:  # the namespace was cleared, and an engine with other groups uses it now
                waiting.pop(request.id, None)
                answer(_miss(request))

        look(0.0)

    def _grant(self, request: m.LeaseRequest, client: int, found: Found, answer: Answer, promotable: int = 0) -> None:
        if found.lease:
            self._leases[request.client, found.lease] = client
            self.leases_granted += 1
            self.leased_blocks += sum(slot > 0 for row in found.slots for slot in row)
            self._on_lease()
        answer(m.LeaseReply(request.id, found.lease, found.num_hash_blocks, found.slots, promotable))

    # -- clients ------------------------------------------------------------------------------------------------

    def _client(self, request: m.LeaseRequest) -> int:
        shapes = self._clients.setdefault(request.client, {})
        shape = (request.hash_block_size, tuple(request.groups))
        client = shapes.get(shape)
        if client is None:
            if len(shapes) >= MAX_SHAPES:
                for answer_miss in self._disconnect(shapes.pop(next(iter(shapes)))):
                    answer_miss()
            client, self._next_client = self._next_client, self._next_client - 1
            self._index.connect(client, request.hash_block_size, request.groups)
            shapes[shape] = client
        return client

    def _left(self, connection: int) -> None:
        for client in self._clients.pop(connection, {}).values():
            self._disconnect(client)

    def _disconnect(self, client: int) -> list[Callable[[], object]]:
        """Remove a client from the index. Returns the calls that answer a miss to its waiting requests."""
        if self.secondary_tiers is not None:
            self.secondary_tiers.remove_client(client)
        self._index.disconnect(client)
        self._leases = {name: of for name, of in self._leases.items() if of != client}
        return list(self._waiting.pop(client, {}).values())


def _miss(request: m.LeaseRequest) -> m.LeaseReply:
    return m.LeaseReply(request.id, 0, request.start, [[] for _ in request.groups])
