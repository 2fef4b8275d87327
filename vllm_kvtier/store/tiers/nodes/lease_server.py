"""The socket on which other nodes look up blocks of this store: connections, their leases, and whether they read.

The server decides about leases (``store.tiers.nodes.lease_table``). A connection that misses its heartbeats ends, and
its leases with it.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import zmq

from vllm_kvtier import __version__
from vllm_kvtier.errors import ConfigError, KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.remote_store import protocol as w
from vllm_kvtier.remote_store.nixl_agent import Server, pieces_of
from vllm_kvtier.remote_store.options import NodeOptions
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.main import TierProcessMain
from vllm_kvtier.wire.lease_connections import LeaseListener, ServerConnection
from vllm_kvtier.wire.reactor import Timer

logger = get_logger(__name__)

MAX_CONNECTIONS = 1024  # of other nodes' stores
MAX_LEASES = 2048  # per connection: one that waits for a promotion here keeps what it has found
CHECK_SECONDS = 1.0  # between two checks for silent connections


@dataclass(slots=True, eq=False)
class Connection(ServerConnection):
    number: int  # in messages to the server
    name: str = ""  # "": no Hello yet
    shared: list[str] = field(default_factory=list)  # as in Hello
    lookups: int = 0  # unanswered
    leases: set[int] = field(default_factory=set)
    metadata_generation: int = 0  # of the agent's metadata that was sent last
    reading: bool = False


class NodeLeaseServer(LeaseListener[Connection]):
    """``options.listen`` must be set. ``on_reading``: a client reads from now on, and the agent needs ``progress``.
    Raises ConfigError if it cannot listen."""

    def __init__(
        self, host: TierProcessMain, instance: str, options: NodeOptions, agent: Server, on_reading: Callable[[], None]
    ):
        numbers = itertools.count(1)
        super().__init__(
            host.reactor, w.decode_from_client, lambda identity, now: Connection(identity, now, next(numbers)),
            MAX_CONNECTIONS,
        )  # fmt: skip
        self._host, self._agent, self._on_reading = host, agent, on_reading
        self._welcome = w.Welcome(instance, agent.name, host.pool.address, host.pool.nbytes)
        self._pending: dict[int, tuple[Connection, int]] = {}  # by id of the LeaseRequest: whose, and the client's id
        self._ids = itertools.count(1)
        self._check: Timer | None = None
        self._readers = 0
        assert options.listen is not None
        address = options.listen
        endpoint = f"tcp://127.0.0.1:{address.port}" if address.host == "localhost" else address.endpoint
        try:
            self._listen(endpoint, options.key, w.MAX_MESSAGE)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"the store cannot listen at {address} ({error}); set node_listen to an IP address of this node (or to "
                "0.0.0.0) and a free port"
            ) from error

    @property
    def reading(self) -> bool:
        """Whether a client reads now."""
        return self._readers > 0

    def promotion_status(self, message: m.PromotionStatus) -> None:
        """The server's answer waits for a promotion."""
        if message.id in self._pending:
            connection, number = self._pending[message.id]
            seconds = min(message.seconds, w.MAX_SECONDS)
            self._send(connection.identity, w.PromotionStatus(number, message.num_hash_blocks, seconds))

    def lease_reply(self, message: m.LeaseReply) -> None:
        """The server's answer."""
        if message.id not in self._pending:
            return  # the client disconnected; the server got Left after the request
        connection, number = self._pending.pop(message.id)
        connection.lookups -= 1
        if not message.lease:
            self._send(connection.identity, w.LookupMiss(number, promotable=message.promotable))
            return
        try:
            slots = np.concatenate([np.array(row, np.int64) for row in message.slots])
            if self._agent.register(pieces_of(slots[slots > 0])):
                self._pending[message.id] = connection, number
                connection.lookups += 1
                again = self._host.guard(lambda: self.lease_reply(message))
                self._host.reactor.call_soon(again)  # other messages come between
                return
        except KVTierError as error:
            logger.warning("kvtier: lease server: no lease granted to %s (%s)", connection.name[:8], error)
            self._host.send(m.Return(connection.number, message.lease))
            self._send(connection.identity, w.LookupMiss(number))
            return
        metadata = self._agent.metadata if connection.metadata_generation != self._agent.generation else b""
        hit = w.LookupHit(
            number, message.lease, message.num_hash_blocks, message.slots, metadata, message.promotable
        )
        if not self._send(connection.identity, hit):
            self._host.send(m.Return(connection.number, message.lease))
            return
        connection.leases.add(message.lease)
        connection.metadata_generation = self._agent.generation
        self._watch()

    def close(self) -> None:
        for identity in list(self._connections):
            self._remove_connection(identity)

    # -- messages -----------------------------------------------------------------------------------------------

    def _malformed(self, identity: bytes, reason: str) -> None:
        self._send(identity, w.Refused(f"malformed message for protocol {w.PROTOCOL}: {reason}"[:500]))

    def _handle(self, connection: Connection, message: w.FromClient) -> None:
        if isinstance(message, w.Hello):
            self._greet(connection, message)
        elif not connection.name:
            # This process restarted, or closed the connection before.
            self._send(connection.identity, w.Refused("no hello on this connection"))
            self._remove_connection(connection.identity)
        elif isinstance(message, w.LookupRequest):
            self._lookup(connection, message)
        elif isinstance(message, w.Release):
            if message.lease in connection.leases:
                connection.leases.discard(message.lease)
                self._host.send(m.Return(connection.number, message.lease))
                if not connection.leases:
                    self._set_reading(connection, False)
        elif isinstance(message, w.Reading):
            self._set_reading(connection, message.active and bool(connection.leases))
        else:
            self._send(connection.identity, w.Pong())

    def _greet(self, connection: Connection, hello: w.Hello) -> None:
        if hello.protocol != w.PROTOCOL:
            reason = (
                f"the store there is vllm-kvtier {__version__} with node protocol {w.PROTOCOL}, the one here is "
                f"{hello.version} with {hello.protocol}: run the same vllm-kvtier on all nodes"
            )
            self._send(connection.identity, w.Refused(reason))
            self._remove_connection(connection.identity)
            return
        connection.name, connection.shared, connection.metadata_generation = hello.instance or "?", hello.shared, 0
        self._send(connection.identity, self._welcome)

    def _lookup(self, connection: Connection, request: w.LookupRequest) -> None:
        error = w.request_error(request.block_hashes, request.start, request.groups)
        if error:
            raise msgspec.DecodeError(error)
        if connection.lookups >= w.MAX_LOOKUPS or len(connection.leases) >= MAX_LEASES:
            self._send(connection.identity, w.LookupMiss(request.id))
            return
        number = next(self._ids)
        self._pending[number] = connection, request.id  # without its hashes
        connection.lookups += 1
        self._host.send(
            m.LeaseRequest(
                number, connection.number, connection.name, request.hash_block_size, request.groups,
                request.namespace_id, request.block_hashes, request.start,
                min(request.wait_seconds, w.MAX_WAIT_SECONDS), connection.shared,
            )
        )  # fmt: skip

    # -- connections --------------------------------------------------------------------------------------------

    def _left(self, connection: Connection) -> None:
        self._set_reading(connection, False)
        if connection.lookups:
            self._pending = {number: each for number, each in self._pending.items() if each[0] is not connection}
        self._host.send(m.Left(connection.number))

    def _set_reading(self, connection: Connection, active: bool) -> None:
        if connection.reading != active:
            connection.reading = active
            self._readers += 1 if active else -1
            if active:
                self._on_reading()

    def _watch(self) -> None:
        if self._check is None:
            self._check = self._reactor.call_later(CHECK_SECONDS, self._check_heartbeats)

    def _check_heartbeats(self) -> None:
        self._check = None
        silent = time.monotonic() - w.SILENT_SECONDS
        holders = [connection for connection in self._connections.values() if connection.leases]
        for connection in holders:
            if connection.last_seen < silent:
                logger.info(
                    "kvtier: lease server: client %s missed its heartbeat for %.0f s; its %d leases end",
                    connection.name[:8], w.SILENT_SECONDS, len(connection.leases),
                )  # fmt: skip
                self._remove_connection(connection.identity)
            else:
                self._watch()
