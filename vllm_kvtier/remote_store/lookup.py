"""A lookup at several stores at once.

Each store reports what it has in memory; the longest hit is kept, and the other leases are released. If a store can
promote more from its secondary tiers, a second lookup asks that store alone to do so, and the answer waits for it. If
all stores promoted, all their memories would fill with the same blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from vllm_kvtier.remote_store import protocol as w
from vllm_kvtier.remote_store.lease_client import NodeLeaseClient, Peer, Reply
from vllm_kvtier.remote_store.options import Address
from vllm_kvtier.store.index.types import HASH_BYTES
from vllm_kvtier.store.protocol import MAX_NODES
from vllm_kvtier.wire.reactor import Reactor, Timer

ASK_SECONDS = 1.0  # for all answers to a lookup
BETTER_SECONDS = 0.25  # for better answers than the first


# The longest hit, and the peer that leases it; None: nothing is in memory.
Answer = tuple[Peer, w.LookupHit] | None


@dataclass(slots=True, eq=False)
class NodeLookup:
    """``best``: the longest hit so far. ``promoter``: the peer that could promote most, and how far, if that is beyond
    its hit. ``memory_done``: further answers about memory are too late."""

    request: w.LookupRequest
    wait_seconds: float
    decided: Callable[[Answer], None]
    on_status: Callable[[Peer, int, float], None]
    waiting: int = 0
    best: Answer = None
    promoter: tuple[Peer, int] | None = None
    memory_done: bool = False
    over: bool = False
    timers: list[Timer] = field(default_factory=list)

    @property
    def num_hash_blocks(self) -> int:
        return self.best[1].num_hash_blocks if self.best is not None else self.request.start

    @property
    def max_hash_blocks(self) -> int:
        return len(self.request.block_hashes) // HASH_BYTES

    def cancel_timers(self) -> None:
        for timer in self.timers:
            timer.cancel()
        self.timers.clear()


class NodeLookups:
    """``listed``: addresses that every lookup asks; may be replaced."""

    def __init__(self, reactor: Reactor, peers: NodeLeaseClient, listed: Sequence[Address]):
        self._reactor, self._peers, self.listed = reactor, peers, listed

    def ask(
        self,
        request: w.LookupRequest,
        named: Sequence[str],
        decided: Callable[[Answer], None],
        wait_seconds: float,
        on_status: Callable[[Peer, int, float], None],
    ) -> None:
        """Look up at ``listed`` and ``named`` addresses. ``request``: without ``wait_seconds``. ``decided`` is called
        once, perhaps before this returns; the caller releases the lease of its hit.

        ``wait_seconds``: time for one store to promote; the answer is what it has in memory by then.
        ``on_status(peer, num_hash_blocks, seconds)``: how much is expected in its memory, and when.
        """
        others = [address for text in named[:MAX_NODES] if (address := Address.parse(text)) is not None]
        lookup = NodeLookup(request, wait_seconds, decided, on_status)

        def on_reply(peer: Peer, reply: Reply) -> None:
            self._memory_answered(lookup, peer, reply)

        if request.groups and not w.request_error(request.block_hashes, request.start, request.groups):
            for address in dict.fromkeys(map(self._peers.address_of, [*others, *self.listed])):
                lookup.waiting += self._peers.lookup(address, request, on_reply)
        if lookup.waiting:
            lookup.timers.append(self._reactor.call_later(ASK_SECONDS, lambda: self._promote(lookup)))
        else:
            self._decide(lookup)

    def _memory_answered(self, lookup: NodeLookup, peer: Peer, reply: Reply) -> None:
        lookup.waiting -= 1
        known = lookup.best is not None or lookup.promoter is not None
        if isinstance(reply, w.LookupHit):
            self._keep_if_better(lookup, peer, reply, too_late=lookup.memory_done)
        if lookup.memory_done:
            return
        promotable = reply.promotable if isinstance(reply, w.LookupHit | w.LookupMiss) else 0
        promotable = min(promotable, lookup.max_hash_blocks)
        if promotable > max(lookup.request.start, lookup.promoter[1] if lookup.promoter is not None else 0):
            lookup.promoter = peer, promotable
        if not lookup.waiting or lookup.num_hash_blocks == lookup.max_hash_blocks:
            self._promote(lookup)
        elif not known and (lookup.best is not None or lookup.promoter is not None):
            lookup.timers.append(self._reactor.call_later(BETTER_SECONDS, lambda: self._promote(lookup)))

    def _keep_if_better(self, lookup: NodeLookup, peer: Peer, hit: w.LookupHit, too_late: bool) -> None:
        if too_late or lookup.num_hash_blocks >= hit.num_hash_blocks:
            self._peers.release(peer, hit.lease)
            return
        if lookup.best is not None:
            self._peers.release(lookup.best[0], lookup.best[1].lease)
        lookup.best = (peer, hit)

    def _promote(self, lookup: NodeLookup) -> None:
        """End the wait for answers about memory, and ask one store to promote more, if it can."""
        if lookup.memory_done:
            return
        lookup.memory_done = True
        lookup.cancel_timers()
        promoter = lookup.promoter
        if promoter is not None and not promoter[0].closed and promoter[1] > lookup.num_hash_blocks:
            request = msgspec.structs.replace(lookup.request, wait_seconds=lookup.wait_seconds)
            if self._peers.lookup(
                promoter[0].address, request, lambda peer, reply: self._promotion_answered(lookup, peer, reply)
            ):
                late = lookup.wait_seconds + ASK_SECONDS
                lookup.timers.append(self._reactor.call_later(late, lambda: self._decide(lookup)))
                return
        self._decide(lookup)

    def _promotion_answered(self, lookup: NodeLookup, peer: Peer, reply: Reply) -> None:
        if isinstance(reply, w.PromotionStatus):
            if not lookup.over:
                lookup.on_status(peer, max(lookup.num_hash_blocks, reply.num_hash_blocks), reply.seconds)
            return
        if isinstance(reply, w.LookupHit):
            self._keep_if_better(lookup, peer, reply, too_late=lookup.over)
        self._decide(lookup)

    def _decide(self, lookup: NodeLookup) -> None:
        if lookup.over:
            return
        lookup.over = lookup.memory_done = True
        lookup.cancel_timers()
        if lookup.best is not None and lookup.best[0].closed:
            lookup.best = None
        lookup.decided(lookup.best)
