"""Other nodes' stores ask this one: who is connected, what it was lent, and whether it is reading just now.

What is lent, and for how long, is our server's to say (``lending``); here is the socket. Whoever falls silent, or says
what no asker says, is forgotten, and what it was lent goes back.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import zmq

from vllm_kvtier.errors import ConfigError, KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.nodes import wire as w
from vllm_kvtier.store.lower.nodes.agent import Server, pieces_of
from vllm_kvtier.store.lower.nodes.options import Address, NodeOptions
from vllm_kvtier.wire.reactor import Reactor, Timer, drain

logger = get_logger(__name__)

MAX_CONNECTIONS = 256
MAX_ASKS = 64  # of a connection, not answered yet
MAX_LEASES = 256  # of a connection
CHECK_SECONDS = 1.0  # between two looks at who fell silent


class Host(Protocol):
    """What is needed of ``runner.Host``."""

    reactor: Reactor

    def send(self, message: m.ToServer) -> None: ...


@dataclass(slots=True, eq=False)
class Connection:
    identity: bytes
    number: int  # as our server knows it
    last_seen: float
    name: str = ""  # "": has not said hello
    objects: str = ""  # as in Hello
    asks: int = 0
    leases: set[int] = field(default_factory=set)
    told: int = 0  # generation of the agent's metadata that it was given
    reading: bool = False


class Serving:
    """``on_reading``: somebody reads from now on, and the agent needs ``progress``. Raises ConfigError if the address
    cannot be listened at."""

    def __init__(
        self,
        host: Host,
        instance: str,
        options: NodeOptions,
        agent: Server,
        base: int,
        pool_bytes: int,
        on_reading: Callable[[], None],
    ):
        self._host, self._reactor, self._agent, self._on_reading = host, host.reactor, agent, on_reading
        self._welcome = w.Welcome(instance, agent.name, base, pool_bytes)
        self._connections: dict[bytes, Connection] = {}
        self._asked: dict[int, tuple[Connection, w.Ask]] = {}  # our server, by number of Lend
        self._numbers, self._lends = itertools.count(1), itertools.count(1)
        self._check: Timer | None = None
        self._readers = 0
        self._socket = self._listen(options)
        self._reactor.add_socket(self._socket, lambda: drain(self._socket, self._receive))

    @property
    def reading(self) -> bool:
        """Whether anybody reads just now."""
        return self._readers > 0

    def coming(self, message: m.Coming) -> None:
        """Our server's answer will take a while."""
        connection, ask = self._asked.get(message.id, (None, None))
        if connection is not None:
            self._send(connection, w.Coming(ask.id, message.units, min(message.seconds, w.MOST_SECONDS)))

    def lent(self, message: m.Lent) -> None:
        """Our server's answer."""
        connection, ask = self._asked.pop(message.id, (None, None))
        if connection is None:
            return  # it left, which our server was told after it was asked
        connection.asks -= 1
        if not message.lease:
            self._send(connection, w.Nothing(ask.id, below=message.below))
            return
        try:
            slots = np.concatenate([np.array(row, np.int64) for row in message.slots])
            self._agent.register(pieces_of(slots[slots > 0]))
        except KVTierError as error:
            logger.warning("kvtier: what is here cannot be lent: %s", error)
            self._host.send(m.Return(connection.number, message.lease))
            self._send(connection, w.Nothing(ask.id, lacks=False))
            return
        connection.leases.add(message.lease)
        metadata = self._agent.metadata if connection.told != self._agent.generation else b""
        connection.told = self._agent.generation
        self._send(connection, w.Offer(ask.id, message.lease, message.units, message.slots, metadata, message.below))
        self._watch()

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._forget(connection)

    # -- messages -----------------------------------------------------------------------------------------------

    def _listen(self, options: NodeOptions) -> zmq.Socket:
        address: Address = options.listen
        socket = self._reactor.context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.MAXMSGSIZE, w.MAX_MESSAGE)
        socket.setsockopt(zmq.LINGER, 0)
        # A peer whose connection broke without our noticing comes back under its name (random, known to it alone).
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.IPV6, ":" in address.host)
        if options.key is not None:
            self._reactor.on_stop(options.key.secure_server(socket).stop)
        try:
            socket.bind(f"tcp://127.0.0.1:{address.port}" if address.host == "localhost" else address.endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            raise ConfigError(
                f"the store cannot listen at {address} ({error}); set node_listen to an IP address of this node (or "
                "0.0.0.0) and a free port"
            ) from error
        return socket

    def _receive(self, frames: list[bytes]) -> None:
        identity = frames[0]
        connection = self._connections.get(identity)
        try:
            message = w.decode_from_asker(frames[1:])
            if connection is None:
                connection = self._meet(identity)
            connection.last_seen = time.monotonic()
            self._hear(connection, message)
        except msgspec.DecodeError as error:
            logger.warning("kvtier: another node's store is disconnected for what it sent: %s", error)
            self._answer(identity, w.Refused(f"not what an asker of protocol {w.PROTOCOL} says: {error}"[:500]))
            if connection is not None:
                self._forget(connection)

    def _hear(self, connection: Connection, message: w.FromAsker) -> None:
        if isinstance(message, w.Hello):
            self._greet(connection, message)
        elif not connection.name:
            # We were started anew, or had forgotten it.
            self._answer(connection.identity, w.Refused("no hello on this connection"))
            self._forget(connection)
        elif isinstance(message, w.Ask):
            self._ask(connection, message)
        elif isinstance(message, w.Release):
            if message.lease in connection.leases:
                connection.leases.discard(message.lease)
                self._host.send(m.Return(connection.number, message.lease))
                if not connection.leases:
                    self._set_reading(connection, False)
        elif isinstance(message, w.Reading):
            self._set_reading(connection, message.active and bool(connection.leases))
        else:
            self._send(connection, w.Pong())

    def _greet(self, connection: Connection, hello: w.Hello) -> None:
        if hello.protocol != w.PROTOCOL:
            reason = (
                f"the store there is vllm-kvtier {w.__version__} and speaks protocol {w.PROTOCOL} between nodes, "
                f"ours is {hello.version} and speaks {hello.protocol}: run the same vllm-kvtier on all nodes"
            )
            self._answer(connection.identity, w.Refused(reason))
            self._forget(connection)
            return
        connection.name, connection.objects, connection.told = hello.instance or "?", hello.objects, 0
        self._send(connection, self._welcome)

    def _ask(self, connection: Connection, ask: w.Ask) -> None:
        fault = w.ask_fault(ask.chain, ask.start, ask.groups)
        if fault:
            raise msgspec.DecodeError(fault)
        if connection.asks >= MAX_ASKS or len(connection.leases) >= MAX_LEASES:
            self._send(connection, w.Nothing(ask.id, lacks=False))
            return
        lend = next(self._lends)
        self._asked[lend] = (connection, ask)
        connection.asks += 1
        self._host.send(
            m.Lend(
                lend,
                connection.number,
                connection.name,
                ask.unit_tokens,
                ask.groups,
                ask.space,
                ask.chain,
                ask.start,
                min(ask.patience, w.MAX_PATIENCE),
                connection.objects,
            )
        )

    def _send(self, connection: Connection, message: w.FromServer) -> None:
        self._answer(connection.identity, message)

    def _answer(self, identity: bytes, message: w.FromServer) -> None:
        try:
            self._socket.send_multipart([identity, w.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # it is gone, or does not read: it falls silent
            logger.debug("kvtier: an answer was not sent: %s", error)

    # -- who is there -------------------------------------------------------------------------------------------

    def _meet(self, identity: bytes) -> Connection:
        if len(self._connections) >= MAX_CONNECTIONS:
            self._forget(min(self._connections.values(), key=lambda connection: connection.last_seen))
        connection = self._connections[identity] = Connection(identity, next(self._numbers), time.monotonic())
        return connection

    def _forget(self, connection: Connection) -> None:
        del self._connections[connection.identity]
        self._set_reading(connection, False)
        if connection.asks:
            self._asked = {lend: asked for lend, asked in self._asked.items() if asked[0] is not connection}
        self._host.send(m.Left(connection.number))

    def _set_reading(self, connection: Connection, active: bool) -> None:
        if connection.reading != active:
            connection.reading = active
            self._readers += 1 if active else -1
            if active:
                self._on_reading()

    def _watch(self) -> None:
        if self._check is None:
            self._check = self._reactor.call_later(CHECK_SECONDS, self._look_for_silent)

    def _look_for_silent(self) -> None:
        self._check = None
        silent = time.monotonic() - w.SILENT_SECONDS
        holders = [connection for connection in self._connections.values() if connection.leases]
        for connection in holders:
            if connection.last_seen < silent:
                logger.info("kvtier: the store %s fell silent; what it was lent is free", connection.name[:8])
                self._forget(connection)
            else:
                self._watch()
