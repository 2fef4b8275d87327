"""A DEALER with one connection, which tells when that ends or cannot be made. On a Reactor's thread only.

ZMQ says it on a socket's monitor, as soon as the kernel knows: a process that ended, a port that nobody listens on, a
name that cannot be resolved. Of a machine that is gone, or a firewall that drops what is sent, nobody says anything.
"""

import os
from collections.abc import Callable

import zmq

from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.reactor import Reactor, drain

logger = get_logger("vllm.kvtier.peers")

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
# The first does not come for a connection that was never made; the second not after an error of protocol: then ZMQ
# does not try again.
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | _FAILED | _LOST
_EVERYTHING = 1 << 16  # messages; more than ZMQ keeps for a socket


class Dealer:
    """``on_message(frames)`` gets each message. ``on_lost(why)`` is called, after all that came before, whenever the
    connection ends and whenever an attempt to make it fails; ``on_found()`` when it stands.

    Until ``close``, ZMQ goes on trying, under the same identity; what was sent meanwhile then goes out. ``close`` drops
    what has not gone out. Raises zmq.ZMQError or ValueError if the address is none, or sockets have run out.
    """

    def __init__(
        self,
        reactor: Reactor,
        address: tuple[str, int],
        key: ClusterKey | None,
        max_message: int,
        on_message: Callable[[list[bytes]], None],
        on_lost: Callable[[str], None],
        on_found: Callable[[], None],
    ):
        self._reactor, self._address = reactor, address
        self._on_message, self._on_lost, self._on_found = on_message, on_lost, on_found
        self._stands = False
        self._failed = ""  # how the last handshake of ZMQ's went wrong
        self._socket = reactor.context.socket(zmq.DEALER)
        try:
            self._socket.setsockopt(zmq.LINGER, 200)
            self._socket.setsockopt(zmq.IDENTITY, os.urandom(16))
            self._socket.setsockopt(zmq.MAXMSGSIZE, max_message)
            self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            if key is not None:
                key.secure_client(self._socket)
            reactor.add_socket(self._socket, lambda: drain(self._socket, on_message))
            reactor.add_monitor(self._socket, _EVENTS, self._heard)
            self._socket.connect(f"tcp://{address[0]}:{address[1]}")
        except (zmq.ZMQError, ValueError):  # ValueError: a host that cannot be encoded
            reactor.remove_socket(self._socket)
            raise

    def send(self, frame: bytes) -> None:
        """Now or when the connection stands; not at all once ZMQ keeps as many (1000) as it will."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("kvtier: message to %s not sent: %s", self._address, error)

    def close(self) -> None:
        """Idempotent."""
        self._reactor.remove_socket(self._socket)

    def _heard(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._stands, self._failed = True, ""
            self._on_found()
        elif event & _FAILED:
            self._failed = "it broke off the handshake: is an engine there, and has it the same cluster_key_file?"
        elif event & _LOST:
            why = self._failed or ("the connection was closed" if self._stands else "no connection can be made")
            self._stands = False
            drain(self._socket, self._on_message, _EVERYTHING)
            if not self._socket.closed:  # by what was said last
                self._on_lost(why)
