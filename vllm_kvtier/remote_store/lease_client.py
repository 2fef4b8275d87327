"""Connections to other nodes' stores: made when first needed, kept while used, closed when the peer is silent.

A peer that does not answer is unavailable for a backoff time that doubles with each failure. When a connection ends,
its lookups, leases and reads end too.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import msgspec
import zmq

from vllm_kvtier.logs import get_logger
from vllm_kvtier.remote_store import protocol as w
from vllm_kvtier.remote_store.options import MAX_NODES, Address, NodeOptions
from vllm_kvtier.store.index.types import HASH_BYTES
from vllm_kvtier.wire.dealer import Dealer
from vllm_kvtier.wire.lease_connections import MAX_REMEMBERED, ClientConnection, LeaseConnections
from vllm_kvtier.wire.reactor import Reactor

logger = get_logger(__name__)

MAX_CONNECTIONS = 2 * MAX_NODES  # to those in the list, and to others that requests name
BACKOFF_SECONDS = 1.0, 60.0  # first and longest backoff after a failure
UNREACHED_BACKOFF = 10.0  # longest one from a peer that no connection was made to: attempts are cheap
SELF_BACKOFF = 600.0  # seconds; a list that all nodes share contains this store's own address
ITSELF = "it is this store itself"
GREETING_SECONDS = 5.0  # until Welcome
SLOW_SECONDS = 1.0  # with a lookup unanswered for so long, a peer gets no more lookups
ANSWER_SECONDS = 10.0  # until an answer, even if its lookup was given up

# PromotionStatus (any number), then the answer; None: the connection ended.
Reply = w.LookupHit | w.LookupMiss | w.PromotionStatus | None
OnReply = Callable[["Peer", Reply], None]


@dataclass(slots=True)
class Lookup:
    request: w.LookupRequest
    on_reply: OnReply
    due: float  # end of its wait for a promotion


@dataclass(eq=False)
class Peer(ClientConnection):
    """``welcome``: None until it arrives. ``lost``: why ZMQ has no connection now, "" if it has one or makes the first.
    ``closed``: the connection and its leases have ended."""

    welcome: w.Welcome | None = None
    lookups: dict[int, Lookup] = field(default_factory=dict)
    slow: tuple[float, float] = 0.0, 0.0  # until when it gets no lookups after a late answer, and for how many seconds
    reads: int = 0  # during which the peer makes NIXL progress
    metadata: bytes = b""
    generation: int = 0  # of the metadata; unique over all peers
    lost: str = ""
    closed: bool = False

    @property
    def instance(self) -> str:
        """Of its store, "" before Welcome."""
        return self.welcome.instance if self.welcome is not None else ""

    @property
    def agent(self) -> str:
        """Name of its NIXL agent, "" before Welcome."""
        return self.welcome.agent if self.welcome is not None else ""

    @property
    def base(self) -> int:
        """Address of its pool in its process, 0 before Welcome."""
        return self.welcome.base if self.welcome is not None else 0

    @property
    def busy(self) -> bool:
        return bool(self.lookups or self.leases or self.reads)

    def waiting_since(self, now: float) -> float:
        """When the oldest unanswered lookup was due; ``now`` if there is none. A lookup that may wait for a promotion
        is due at the end of that wait."""
        return min((lookup.due for lookup in self.lookups.values()), default=now)


class NodeLeaseClient(LeaseConnections[Peer]):
    """``instance``: this process's own, to recognize itself in a list that all nodes share. ``on_gone(peer, reason)``:
    the connection has ended."""

    def __init__(
        self,
        reactor: Reactor,
        instance: str,
        options: NodeOptions,
        on_gone: Callable[[Peer, str], None],
    ):
        super().__init__(reactor, w.decode_from_server, Peer)
        self._instance, self._options, self._on_gone = instance, options, on_gone
        # Of stores that are connected under another address: that, and the store's agent.
        self._aliases: dict[Address, tuple[Address, str]] = {}
        self._ids, self._generations = itertools.count(1), itertools.count(1)

    def __len__(self) -> int:
        return len(self._connections)

    def lookup(self, address: Address, request: w.LookupRequest, on_reply: OnReply) -> bool:
        """Send a lookup. ``on_reply(peer, reply)`` is called later, the last time with a hit, a miss or None; the
        caller ``release`` s a hit's lease. False: the peer is unavailable, or owes ``MAX_LOOKUPS`` answers; nothing is
        called."""
        peer = self._connections.get(address) or self._aliased(address) or self._connect(address)
        if peer is None:
            return False
        now = peer.last_used = time.monotonic()
        failed = peer.welcome is None and address in self._paused  # before: nothing waits until it answers again
        slow = now < peer.slow[0] or now - peer.waiting_since(now) > SLOW_SECONDS
        if failed or slow or len(peer.lookups) >= w.MAX_LOOKUPS:
            return False
        request = msgspec.structs.replace(request, id=next(self._ids))
        peer.lookups[request.id] = Lookup(request, on_reply, now + request.wait_seconds)
        if peer.welcome is not None:
            self._send(peer, request)
        self._keep_alive(peer, w.PING_SECONDS)
        return True

    def greet(self, address: Address) -> None:
        """Connect to a store of the list before it is needed, unless it is unavailable."""
        peer = self._connections.get(address) or self._aliased(address)
        if peer is None and len(self) < MAX_CONNECTIONS:
            self._connect(address)

    def close_lost(self) -> None:
        """Idle ones have no heartbeat. ZMQ would go on trying, also addresses that are in no list any more."""
        for peer in list(self._connections.values()):
            if peer.welcome is not None and peer.lost and not peer.busy:
                self.close(peer, peer.lost)

    def error_of(self, address: Address) -> str | None:
        """Why the store there did not answer when it was last tried, "" if it does; None: not known yet."""
        peer = self._connections.get(address) or self._aliased(address)
        if peer is not None and (peer.welcome is not None or peer.lost):
            return peer.lost
        reason: str | None = self._paused.get(address, (0.0, 0.0, None))[2]
        return reason

    def address_of(self, address: Address) -> Address:
        """Where the store of this address is connected, if that is under another one."""
        peer = self._aliased(address)
        return peer.address if peer is not None else address

    def release(self, peer: Peer, lease: int) -> None:
        """Idempotent, also after the connection's end."""
        if lease in peer.leases:
            peer.leases.discard(lease)
            self._send(peer, w.Release(lease))

    def begin_read(self, peer: Peer) -> None:
        """Ask the peer to make NIXL progress until as many ``end_read``."""
        peer.reads += 1
        if peer.reads == 1:
            self._send(peer, w.Reading(True))
            self._keep_alive(peer, w.PING_SECONDS)

    def end_read(self, peer: Peer) -> None:
        peer.reads -= 1
        if not peer.reads:
            self._send(peer, w.Reading(False))

    def close(self, peer: Peer, reason: str, log: bool = True) -> None:
        """End the connection and back off from the peer. Idempotent. ``log``: warn the operator, once."""
        if not self._end(peer):
            return
        peer.closed = True
        self._back_off(peer.address, reason, BACKOFF_SECONDS[1] if peer.welcome is not None else UNREACHED_BACKOFF)
        if log:
            self._log_once(peer.address, reason)
        peer.leases.clear()
        lookups, peer.lookups = peer.lookups, {}
        for lookup in lookups.values():
            lookup.on_reply(peer, None)
        self._on_gone(peer, reason)

    def reached(self, peer: Peer) -> None:
        """A read from the peer succeeded: its next failure counts as the first, unless its connection broke."""
        if not peer.closed:
            self._paused.pop(peer.address, None)

    def _aliased(self, address: Address) -> Peer | None:
        """The connection under another address, if it is still to the same store."""
        other, agent = self._aliases.get(address, (address, ""))
        peer = self._connections.get(other)
        return peer if peer is not None and peer.agent == agent else None

    # -- connecting ---------------------------------------------------------------------------------------------

    def _connect(self, address: Address) -> Peer | None:
        if not self._options.allows(address):
            self._log_once(address, "the address is not loopback and no cluster_key_file is set")
            return None
        if self._pause_reason(address) or not self._make_room():
            return None
        hello = w.Hello(self._instance, shared=list(self._options.shared))
        connect = partial(Dealer, self._reactor, address.endpoint, self._options.key, w.MAX_MESSAGE)
        try:
            peer = self._open(address, hello, connect)
        except zmq.ZMQError as error:
            self._back_off(address, f"cannot connect: {error}")
            self._log_once(address, f"cannot connect: {error}")
            return None
        late = "it does not answer, or has another cluster key"
        self._after(peer, "hello", GREETING_SECONDS, lambda: self.close(peer, peer.lost or late))
        return peer

    def _lost(self, peer: Peer, reason: str) -> None:
        peer.lost = reason

    def _found(self, peer: Peer) -> None:
        peer.lost = ""

    def _make_room(self) -> bool:
        """Close the least recently used idle connection if there are too many. False if none is idle."""
        if len(self._connections) < MAX_CONNECTIONS:
            return True
        idle = [peer for peer in self._connections.values() if not peer.busy]
        if not idle:
            return False
        oldest = min(idle, key=lambda peer: peer.last_used)
        self.close(oldest, "unused", log=False)
        self._paused.pop(oldest.address, None)
        return True

    # -- messages -----------------------------------------------------------------------------------------------

    def _malformed(self, peer: Peer, reason: str) -> None:
        self.close(peer, reason)

    def _handle(self, peer: Peer, message: w.FromServer) -> None:
        if isinstance(message, w.Welcome):
            self._welcomed(peer, message)
        elif isinstance(message, w.Refused):
            # If the peer restarted and does not know this connection, the next lookup sends Hello again.
            self.close(peer, f"it refused: {message.reason}", log=peer.welcome is None)
        elif isinstance(message, w.LookupHit | w.LookupMiss):
            self._answered(peer, message)
        elif isinstance(message, w.PromotionStatus):
            self._promotion_status(peer, message)

    def _welcomed(self, peer: Peer, welcome: w.Welcome) -> None:
        known = next((p for p in self._connections.values() if p.welcome and p.agent == welcome.agent), None)
        if peer.welcome is not None:
            self.close(peer, "it sent Welcome twice")
        elif welcome.protocol != w.PROTOCOL:
            self.close(peer, f"it is vllm-kvtier {welcome.version} with protocol {welcome.protocol}, not {w.PROTOCOL}")
        elif welcome.instance == self._instance:
            self.close(peer, ITSELF, log=False)
            self._pause(peer.address, SELF_BACKOFF, ITSELF)
        elif known is not None:
            self._merge(peer, known)
        else:
            peer.welcome = welcome
            peer.cancel("hello")
            for lookup in peer.lookups.values():
                self._send(peer, lookup.request)

    def _merge(self, peer: Peer, known: Peer) -> None:
        """Move the lookups of a second connection to the same store to the first: NIXL needs one agent per store."""
        if len(self._aliases) >= MAX_REMEMBERED:
            self._aliases.clear()
        self._aliases[peer.address] = known.address, known.agent
        lookups, peer.lookups = peer.lookups, {}
        self.close(peer, "it is connected under another address", log=False)
        self._paused.pop(peer.address, None)
        for number, lookup in lookups.items():
            if len(known.lookups) < w.MAX_LOOKUPS:
                known.lookups[number] = lookup
                self._send(known, lookup.request)
            else:
                lookup.on_reply(known, None)
        self._keep_alive(known, w.PING_SECONDS)

    def _promotion_status(self, peer: Peer, message: w.PromotionStatus) -> None:
        lookup = peer.lookups.get(message.id)
        if (
            lookup is None
            or not lookup.request.wait_seconds
            or message.num_hash_blocks * HASH_BYTES > len(lookup.request.block_hashes)
        ):
            self.close(peer, "it sent a promotion status that matches no lookup")
            return
        lookup.on_reply(peer, message)

    def _answered(self, peer: Peer, message: w.LookupHit | w.LookupMiss) -> None:
        lookup = peer.lookups.pop(message.id, None)
        if lookup is None or peer.welcome is None:
            self.close(peer, "it sent an answer that matches no lookup")
            return
        self._answer_took(peer, time.monotonic(), lookup)
        if isinstance(message, w.LookupHit):
            request = lookup.request
            if message.metadata:
                peer.metadata, peer.generation = message.metadata, next(self._generations)
            error = w.hit_error(message, request.block_hashes, request.start, request.groups, peer.welcome.pool_bytes)
            if error or not peer.metadata:
                self.close(peer, f"it sent an invalid hit: {error or 'memory without NIXL metadata'}")
                lookup.on_reply(peer, None)
                return
            peer.leases.add(message.lease)
        lookup.on_reply(peer, message)

    def _answer_took(self, peer: Peer, now: float, lookup: Lookup) -> None:
        """After a late answer, wait before the next lookup; each request waited for it."""
        until, seconds = peer.slow
        if now - lookup.due <= SLOW_SECONDS:
            peer.slow = 0.0, 0.0
        elif now >= until:
            seconds = min(max(BACKOFF_SECONDS[0], 2 * seconds), BACKOFF_SECONDS[1])
            peer.slow = now + seconds, seconds

    def _send(self, peer: Peer, message: msgspec.Struct) -> bool:
        sent = not peer.closed and super()._send(peer, message)
        if not sent and not peer.closed:  # later, because callers go on; a lost Release would keep its lease for good
            self._reactor.call_soon(lambda: self.close(peer, "it does not read"))
        return sent

    def _heartbeat(self, peer: Peer) -> bool:
        if not peer.busy:
            return False
        now = time.monotonic()
        silent, waits = now - peer.last_received, now - peer.waiting_since(now)
        if peer.welcome is not None and (silent > w.SILENT_SECONDS or waits > ANSWER_SECONDS):
            self.close(peer, "it does not answer")
            return False
        if peer.welcome is not None:
            self._send(peer, w.Ping())
        return True

    def _back_off(self, address: Address, reason: str, longest: float = UNREACHED_BACKOFF) -> None:
        _, before, _ = self._paused.get(address, (0.0, 0.0, None))
        self._pause(address, min(max(BACKOFF_SECONDS[0], 2 * before), BACKOFF_SECONDS[1], longest), reason)

    def _log_once(self, address: Address, text: str) -> None:
        if self._is_new(address, text):
            logger.warning("kvtier: remote store: %s is unavailable (%s); logged once", address, text)
