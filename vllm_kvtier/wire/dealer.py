"""A DEALER socket with one connection that reports when the connection ends or fails. On a Reactor's thread only.

ZMQ reports it on the socket's monitor as soon as the kernel knows: the process ended, the port is closed, the name does
not resolve. A machine that lost power, or a firewall that drops packets, is not reported.

Names are resolved on threads of their own. ZMQ would do it on the thread that moves all messages of the reactor's
sockets, which DNS may keep for seconds; and clients name hosts.
"""

import ipaddress
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.reactor import Reactor, drain

logger = get_logger(__name__)

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
# DISCONNECTED needs a connection that was made. CONNECT_RETRIED does not follow a protocol error, which ZMQ never
# retries.
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED | _LOST
_MAX_QUEUED = 1 << 16  # messages; more than ZMQ keeps for a socket
MAX_RECEIVED_BYTES = 256 << 20  # of a connection, that wait to be read; the kernel slows the sender down
MAX_UNSENT = 2048  # messages of a connection, or for its host's address; ZMQ drops those beyond
# Seconds without data until the first probe and between two, and how many of them may be lost.
_KEEPALIVE = {zmq.TCP_KEEPALIVE_IDLE: 120, zmq.TCP_KEEPALIVE_INTVL: 30, zmq.TCP_KEEPALIVE_CNT: 4}
MAX_RESOLVED = 16  # names at a time; DNS may hang
_resolving = threading.BoundedSemaphore(MAX_RESOLVED)


def limit_connections(socket: zmq.Socket[bytes], max_message: int) -> None:
    """Bound what a peer sends faster than it is read: by ZMQ's own limits a connection keeps 1000 messages of any
    size. And end connections of machines that have vanished. Before the socket is connected or bound."""
    socket.setsockopt(zmq.MAXMSGSIZE, max_message)
    socket.setsockopt(zmq.SNDHWM, MAX_UNSENT)
    socket.setsockopt(zmq.RCVHWM, min(1000, max(1, MAX_RECEIVED_BYTES // max_message)))
    keep_alive(socket)


def keep_alive(socket: zmq.Socket[bytes]) -> None:
    """End connections of machines that have vanished. Before the socket is connected or bound."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        socket.setsockopt(option, value)


@dataclass(frozen=True)
class SocketEvents:
    """``on_message(frames)`` gets each message. ``on_lost(why)`` is called whenever the connection ends, after all
    earlier messages, and whenever a connection attempt fails. ``on_found()`` is called when the connection is made."""

    on_message: Callable[[list[bytes]], None]
    on_lost: Callable[[str], None]
    on_found: Callable[[], None]


class Dealer:
    """``endpoint``: "tcp://host:port", an IPv6 address in brackets or not.

    Until ``close``, ZMQ reconnects under the same identity and then sends the queued messages. ``close`` drops queued
    messages. Raises zmq.ZMQError or ValueError if the endpoint is invalid or no socket is left. A name is resolved
    once; if that fails, ``on_lost`` is called, and no connection is made.
    """

    def __init__(self, reactor: Reactor, endpoint: str, key: ClusterKey | None, max_message: int, events: SocketEvents):
        self._reactor, self._endpoint, self._events = reactor, endpoint, events
        self._connected = False
        self._unresolved: list[bytes] | None = None  # messages that wait for the host's address
        self._handshake_error = ""  # of ZMQ's last handshake
        self._socket = reactor.context.socket(zmq.DEALER)
        try:
            self._socket.setsockopt(zmq.LINGER, 200)
            self._socket.setsockopt(zmq.IDENTITY, os.urandom(16))
            limit_connections(self._socket, max_message)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            self._socket.setsockopt(zmq.IPV6, endpoint.count(":") > 2)
            if key is not None:
                key.secure_client(self._socket)
            reactor.add_one_of_many(self._socket, lambda: drain(self._socket, events.on_message))
            reactor.add_monitor(self._socket, _EVENTS, self._on_event)
            host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
            if _is_name(host):
                self._unresolved = []
                self._resolve(host, port)
            else:
                self._socket.connect(endpoint)
                reactor.look_at(self._socket)
        except (zmq.ZMQError, ValueError):  # ValueError: a host that cannot be encoded
            reactor.remove_socket(self._socket)
            raise

    def send(self, frame: bytes) -> bool:
        """Send now or once connected. False: dropped, because ``MAX_UNSENT`` messages wait."""
        if self._unresolved is not None:
            if len(self._unresolved) >= MAX_UNSENT:
                return False
            self._unresolved.append(frame)
            return True
        sent = True
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            sent = False
            logger.debug("kvtier: message to %s not sent: %s", self._endpoint, error)
        self._reactor.look_at(self._socket)
        return sent

    def close(self) -> None:
        """Idempotent."""
        self._reactor.remove_socket(self._socket)

    def _resolve(self, host: str, port: str) -> None:
        def resolve() -> None:
            endpoint = why = ""
            try:
                endpoint = resolved(host, port)
            except (OSError, ValueError) as error:  # ValueError: it cannot be encoded
                why = f"the name cannot be resolved: {error}"
            finally:
                _resolving.release()
            self._reactor.call_soon(lambda: self._resolved(endpoint, why))

        failed = f"{MAX_RESOLVED} other names are being resolved"
        if _resolving.acquire(blocking=False):
            try:
                threading.Thread(target=resolve, name="kvtier-dns", daemon=True).start()
                return
            except RuntimeError as error:  # of a limit of threads
                _resolving.release()
                failed = str(error)
        self._reactor.call_soon(lambda: self._resolved("", failed))

    def _resolved(self, endpoint: str, why: str) -> None:
        if self._socket.closed or self._unresolved is None:
            return
        if why:
            self._events.on_lost(why)
            return
        self._socket.setsockopt(zmq.IPV6, endpoint.count(":") > 2)
        self._socket.connect(endpoint)
        self._reactor.look_at(self._socket)
        frames, self._unresolved = self._unresolved, None
        for frame in frames:
            self.send(frame)

    def _on_event(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected, self._handshake_error = True, ""
            self._events.on_found()
        elif event & _FAILED:
            self._handshake_error = (
                "the handshake failed: check what listens there, and that it has the same cluster_key_file"
            )
        elif event & _LOST:
            ended = "the connection was closed" if self._connected else "no connection can be made"
            why = self._handshake_error or ended
            self._connected = False
            drain(self._socket, self._events.on_message, _MAX_QUEUED)
            self._reactor.look_at(self._socket)
            if not self._socket.closed:  # the last message may have closed it
                self._events.on_lost(why)


def endpoint_of(host: str, port: int | str) -> str:
    """ZMQ's endpoint; ``host``: a name or an address, an IPv6 one in brackets or not. ``port``: "*" for any."""
    host = host.strip("[]")
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def resolved(host: str, port: int | str) -> str:
    """ZMQ's endpoint of a host: of its IPv4 address, if it has one. Blocks. Raises OSError, and ValueError for a name
    that no host can have."""
    if host == "*":
        raise ValueError("* is no host")  # glibc takes it for loopback
    found = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM)
    *_, address = min(found, key=lambda each: each[0])
    return endpoint_of(str(address[0]), port)


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return True
    return False
