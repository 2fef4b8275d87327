"""A node store's protocol through the link of an engine's worker, for the scheduler side on another node.

A frame of the store's protocol is sent as it is, with the number of its connection; an empty one says that the
connection ended. A store's deadlines are those of ``StoreClient``, however long a frame is under way: it then closes
the connection, and frames of a closed one are ignored. Reactor's thread.
"""

import os
import socket
from collections.abc import Callable

from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.launcher import Starter
from vllm_kvtier.store.protocol import MAX_FRAME, Refused, Welcome, decode_reply
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.stream import Stream, StreamLimits

logger = get_logger(__name__)


class _Tunnel:
    """One end. ``send(number, frame)`` sends to the other."""

    def __init__(self, reactor: Reactor, send: Callable[[int, bytes], None]):
        self._reactor, self._send = reactor, send
        self._streams: dict[int, Stream] = {}
        self._last = 0  # number of the newest connection
        reactor.on_stop(self._close)

    def _close(self) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.close()

    def _add(self, number: int, sock: socket.socket) -> Stream:
        def ended(reason: str) -> None:
            if self._streams.pop(number, None) is not None:
                self._send(number, b"")

        stream = Stream(self._reactor, sock, lambda frame: self._forward(number, frame), ended, StreamLimits(MAX_FRAME))
        self._streams[number] = stream
        return stream

    def _forward(self, number: int, frame: bytes) -> None:
        self._send(number, frame)

    def deliver(self, number: int, frame: bytes) -> None:
        """From the other end."""
        stream = self._streams.get(number)
        if stream is not None and frame:
            stream.send(frame)
        elif stream is not None:
            del self._streams[number]
            stream.close("the other end closed it")


class TunnelClient(_Tunnel):
    """The scheduler side's end."""

    def __init__(self, reactor: Reactor, send: Callable[[int, bytes], None]):
        super().__init__(reactor, send)
        self._greeted = 0  # connection that has got a frame

    def close(self) -> None:
        """Close the connections; the client makes a new one."""
        for stream in list(self._streams.values()):
            stream.close("the link was cut")

    def dial(self) -> socket.socket:
        """A new connection to the store, for ``StoreClient``."""
        ours, theirs = socket.socketpair()
        self._last += 1
        self._add(self._last, theirs)
        return ours

    def deliver(self, number: int, frame: bytes) -> None:
        """With the first frame goes a descriptor, which the client expects: of nothing. The store's memory is not here,
        and only workers use it."""
        stream = self._streams.get(number)
        if stream is None or not frame or number == self._greeted:
            super().deliver(number, frame)
            return
        self._greeted = number
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        try:
            stream.send(frame, [nothing])
        finally:
            os.close(nothing)


class TunnelServer(_Tunnel):
    """The worker's end, on the store's node. ``launch``: starts the store, as of ``StoreClient``."""

    def __init__(
        self, reactor: Reactor, send: Callable[[int, bytes], None], path: str, launch: Callable[[], None] | None
    ):
        super().__init__(reactor, send)
        self._path = path
        self._starter = None if launch is None else Starter(reactor, launch, self._launched)
        self._welcomed = 0  # connection that has got a frame

    def deliver(self, number: int, frame: bytes) -> None:
        if number > self._last:
            self._last = number
            self._close()  # a link that was cut may have lost the end of an earlier one
            if frame:
                self._connect(number)
        super().deliver(number, frame)

    def _connect(self, number: int) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.connect(self._path)
        except OSError as error:  # the client tries again
            sock.close()
            if self._starter is not None and isinstance(error, FileNotFoundError | ConnectionRefusedError):
                self._starter.ended()
                self._starter.start()
            self._send(number, b"")
            return
        stream, user = self._add(number, sock), os.getuid()
        if user and stream.peer()[1] not in (user, 0):  # as a client of its own node
            stream.close("the store belongs to another user")

    def _forward(self, number: int, frame: bytes) -> None:
        self._send(number, frame)
        if number != self._welcomed:
            self._welcomed = number
            reply = decode_reply(frame)
            if self._starter is not None and isinstance(reply, Welcome):
                self._starter.connected(reply.launched)
            elif self._starter is not None and isinstance(reply, Refused):
                self._starter.refused(reply.reason)

    def _launched(self, failure: str) -> None:
        if failure and self._starter is not None:
            logger.warning("kvtier: %s", failure)
            self._starter.failed(failure)
