"""Connections over which blocks are leased: between engines, and between stores of different nodes.

Shared is how a connection begins, lives and ends; messages and the rules of leases are the subclasses'. A message that
does not decode, or for which ``_handle`` raises msgspec.DecodeError, ends its connection, and with it its leases. Peers
choose addresses and identities, so the state kept for them is bounded. On the reactor's thread.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.dealer import Dealer, SocketEvents, limit_connections
from vllm_kvtier.wire.decoding import only
from vllm_kvtier.wire.local import LocalDealer
from vllm_kvtier.wire.messages import encode
from vllm_kvtier.wire.reactor import Reactor, Timer, drain

logger = get_logger(__name__)

MAX_REMEMBERED = 1024  # addresses that are paused, and lines that are logged once


@dataclass(eq=False)
class ClientConnection:
    """``last_received``: time of the last message; if none was expected, of the first heartbeat."""

    address: Any
    dealer: Dealer | LocalDealer
    last_used: float = field(default_factory=time.monotonic)
    last_received: float = 0.0
    heartbeat_seconds: float = 0.0  # between them, if there are any
    leases: set[int] = field(default_factory=set)
    timers: dict[str, Timer] = field(default_factory=dict)  # by purpose

    def cancel(self, purpose: str) -> None:
        if purpose in self.timers:
            self.timers.pop(purpose).cancel()


Client = TypeVar("Client", bound=ClientConnection)


class LeaseConnections(Generic[Client]):
    """The client's side: at most one connection an address."""

    def __init__(
        self, reactor: Reactor, decode: Callable[[bytes], Any], make: Callable[[Any, Dealer | LocalDealer], Client]
    ):
        """``decode``: of a server's message. ``make``: a connection to an address over a socket."""
        self._reactor, self._decode, self._make = reactor, decode, make
        self._connections: dict[Any, Client] = {}
        self._paused: dict[Any, tuple[float, float, Any]] = {}  # (end, seconds, reason)
        self._logged: set[tuple[Any, str]] = set()

    def _handle(self, connection: Client, message: Any) -> None:
        """To be overridden, as all methods up to ``_found``."""

    def _malformed(self, connection: Client, reason: str) -> None:
        """End the connection, whose server sent a malformed message."""

    def _heartbeat(self, connection: Client) -> bool:
        """Send a heartbeat, if the connection needs one. Returns whether it needs another later."""
        raise NotImplementedError

    def _lost(self, connection: Client, reason: str) -> None:
        """The socket's connection ended, or cannot be made. ZMQ tries again."""

    def _found(self, connection: Client) -> None:
        """The socket's connection was made, perhaps anew."""

    def _open(
        self, address: Any, hello: msgspec.Struct, connect: Callable[[SocketEvents], Dealer | LocalDealer]
    ) -> Client:
        """Connect and send Hello. Raises what ``connect`` and ``send`` raise."""

        def on_message(frames: list[bytes]) -> None:
            self._receive(connection, frames)

        events = SocketEvents(on_message, lambda why: self._lost(connection, why), lambda: self._found(connection))
        connection = self._connections[address] = self._make(address, connect(events))
        try:
            self._send(connection, hello)
        except BaseException:
            self._end(connection)
            raise
        return connection

    def _end(self, connection: Client) -> bool:
        """Remove a connection and close its socket. False if it has ended already."""
        if self._connections.get(connection.address) is not connection:
            return False
        del self._connections[connection.address]
        for timer in connection.timers.values():
            timer.cancel()
        connection.dealer.close()
        return True

    def _send(self, connection: Client, message: msgspec.Struct) -> bool:
        """False: the message is lost."""
        return connection.dealer.send(encode(message))

    def _receive(self, connection: Client, frames: list[bytes]) -> None:
        connection.last_received = time.monotonic()
        try:
            self._handle(connection, self._decode(only(frames)))
        except msgspec.DecodeError as error:
            self._malformed(connection, f"malformed message: {error}")

    def _after(self, connection: Client, purpose: str, seconds: float, callback: Callable[[], None]) -> None:
        """Call back in ``seconds``, unless the connection has ended or cancels it."""
        connection.timers[purpose] = self._reactor.call_later(seconds, callback)

    def _keep_alive(self, connection: Client, seconds: float) -> None:
        """Send heartbeats every ``seconds`` from now on, or more often, if they are under way already."""

        def beat() -> None:
            del connection.timers["heartbeat"]
            if self._heartbeat(connection):
                self._after(connection, "heartbeat", seconds, beat)

        if "heartbeat" not in connection.timers:
            connection.last_received = time.monotonic()  # an idle server sends nothing
        elif seconds >= connection.heartbeat_seconds:
            return
        connection.cancel("heartbeat")
        connection.heartbeat_seconds = seconds
        self._after(connection, "heartbeat", seconds, beat)

    def _pause(self, address: Any, seconds: float, reason: Any = True) -> None:
        """Do not ask the address for so long."""
        now = time.monotonic()
        if len(self._paused) >= MAX_REMEMBERED:
            self._paused = {each: pause for each, pause in self._paused.items() if pause[0] > now}
        if len(self._paused) < MAX_REMEMBERED:
            self._paused[address] = now + seconds, seconds, reason

    def _pause_reason(self, address: Any) -> Any:
        """None if the address may be asked now."""
        end, _, reason = self._paused.get(address, (0.0, 0.0, None))
        return reason if end > time.monotonic() else None

    def _is_new(self, address: Any, text: str) -> bool:
        """Whether this text was not logged yet for the address."""
        if (address, text) in self._logged:
            return False
        if len(self._logged) >= MAX_REMEMBERED:
            self._logged.clear()
        self._logged.add((address, text))
        return True


@dataclass(slots=True, eq=False)
class ServerConnection:
    """``identity``: of the client's socket, random and known to it alone. ``last_seen``: time of its last message."""

    identity: bytes
    last_seen: float


Server = TypeVar("Server", bound=ServerConnection)


class LeaseListener(Generic[Server]):
    """The server's side: a ROUTER socket. A connection begins with a message that decodes, and ends with
    ``_remove_connection``. Of more than ``max_connections`` the one that was silent for longest ends."""

    def __init__(
        self, reactor: Reactor, decode: Callable[[bytes], Any], make: Callable[[bytes, float], Server],
        max_connections: int,
    ):  # fmt: skip
        """``decode``: of a client's message. ``make``: a connection, by the fields of ServerConnection."""
        self._reactor, self._decode, self._make, self._max_connections = reactor, decode, make, max_connections
        self._connections: dict[bytes, Server] = {}

    def _handle(self, connection: Server, message: Any) -> None:
        """To be overridden, as ``_malformed`` and ``_left``."""

    def _malformed(self, identity: bytes, reason: str) -> None:
        """Tell a client that its message was malformed, before its connection ends."""

    def _left(self, connection: Server) -> None:
        """The connection has ended: end its leases."""

    def _listen(self, endpoint: str, key: ClusterKey | None, max_message: int) -> int:
        """Listen at "tcp://host:port" (port "*": any free one), an IPv6 address in brackets or not. Returns the port.
        Raises zmq.ZMQError."""
        self._socket = socket = self._reactor.context.socket(zmq.ROUTER)
        limit_connections(socket, max_message)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # or ZMQ would not tell of messages that it drops
        # A client whose connection broke comes back under its identity, also if the old one seems to be open.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.IPV6, endpoint.count(":") > 2)
        if key is not None:
            self._reactor.on_stop(key.secure_server(socket).stop)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError:
            socket.close(0)
            raise
        self._reactor.add_socket(socket, lambda: drain(socket, self._receive))
        return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def _receive(self, frames: list[bytes]) -> None:
        identity = frames[0]
        try:
            message = self._decode(only(frames[1:]))
            connection = self._connections.get(identity)
            if connection is None:
                if len(self._connections) >= self._max_connections:
                    self._remove_connection(min(self._connections.values(), key=lambda each: each.last_seen).identity)
                connection = self._connections[identity] = self._make(identity, 0.0)
            connection.last_seen = time.monotonic()
            self._handle(connection, message)
        except msgspec.DecodeError as error:
            logger.warning("kvtier: lease server: a client sent a malformed message (%s); disconnected", error)
            self._malformed(identity, str(error))
            self._remove_connection(identity)

    def _remove_connection(self, identity: bytes) -> None:
        """End a connection. Idempotent."""
        connection = self._connections.pop(identity, None)
        if connection is not None:
            self._left(connection)

    def _send(self, identity: bytes, message: msgspec.Struct) -> bool:
        """False: the message is lost. What it leased is to be released."""
        return self._send_frame(identity, encode(message))

    def _send_frame(self, identity: bytes, frame: bytes) -> bool:
        try:
            self._socket.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the client is gone or does not read
            logger.debug("kvtier: lease server: an answer was not sent: %s", error)
            return False
        return True
