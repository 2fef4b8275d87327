"""Unix sockets between engines of one node, in this user's runtime directory.

A lease request competes for the interpreter lock of the engine that answers it, while that engine launches a step. Over
these sockets the answer takes two thirds of the time that it takes over ZMQ and TCP (``benchmarks/asks.py``). The
kernel closes the connection whenever either process ends.

The directory has mode 0700: only this user can connect, and this user could read the engines' memory anyway. An engine
in another container has another directory and is reached over TCP.
"""

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.runtime_dir import private_path
from vllm_kvtier.wire.dealer import SocketEvents
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.stream import Stream, StreamLimits, accept

MAX_WAITING = 128  # connections that may wait to be accepted
MAX_CONNECTIONS = 512  # a node has fewer engines
_SUFFIX = ".peer"
# The second: of the release before. The third: links to workers; the names of stores' sockets begin otherwise.
_SWEPT = (f"*{_SUFFIX}", "*.near", "[0-9a-f]*.sock")
_NEW_SECONDS = 60  # ZMQ's sockets may have a path and not listen yet


def local_path(instance: str) -> str:
    """Raises KVTierError as ``private_path``."""
    return private_path(instance, suffix=_SUFFIX)


def _listen(path: str) -> socket.socket:
    """Listen, then link the socket to ``path``: ``sweep`` of another engine would remove one that does not listen."""
    listener, new = _socket(), str(Path(path).with_suffix(".new"))
    try:
        listener.bind(new)
        try:
            listener.listen(MAX_WAITING)
            os.link(new, path)
        finally:
            os.unlink(new)
    except OSError:
        listener.close()
        raise
    return listener


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


def _limits(max_message: int) -> StreamLimits:
    return StreamLimits(max_message, backlog=4 * max_message)


class LocalServer:
    """The socket on which ``instance`` listens for engines of this node. ``on_message(identity, frame)`` gets each
    message; ``on_gone(identity)`` is called when a connection has ended. On the Reactor's thread, or before it starts.

    Raises KVTierError or OSError if it cannot listen.
    """

    def __init__(
        self,
        reactor: Reactor,
        instance: str,
        max_message: int,
        on_message: Callable[[bytes, bytes], None],
        on_gone: Callable[[bytes], None],
    ):
        self._reactor, self._max_message = reactor, max_message
        self._on_message, self._on_gone = on_message, on_gone
        self._streams: dict[bytes, Stream] = {}
        self._path = local_path(instance)
        sweep(Path(self._path).parent)
        self._listener = _listen(self._path)
        reactor.add_fd(self._listener.fileno(), lambda events: self._accept())
        reactor.on_stop(self.close)

    def send(self, identity: bytes, frame: bytes) -> bool:
        """False if there is no such connection."""
        stream = self._streams.get(identity)
        if stream is not None:
            stream.send(frame)
        return stream is not None

    def close_connection(self, identity: bytes) -> None:
        """Close this connection, if it exists."""
        stream = self._streams.get(identity)
        if stream is not None:
            stream.close("malformed message")

    def close(self) -> None:
        """Idempotent."""
        if self._listener.fileno() < 0:
            return
        self._reactor.off_stop(self.close)
        self._reactor.remove_fd(self._listener.fileno())
        self._listener.close()
        Path(self._path).unlink(missing_ok=True)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.close()

    def _accept(self) -> None:
        for sock in accept(self._reactor, self._listener):
            self._welcome(sock)

    def _welcome(self, sock: socket.socket) -> None:
        if len(self._streams) >= MAX_CONNECTIONS:
            sock.close()
            return
        identity = os.urandom(16)  # random, so that no ZMQ peer can choose the same
        self._streams[identity] = Stream(
            self._reactor, sock,
            on_frame=lambda frame: self._on_message(identity, frame),
            on_close=lambda reason: self._gone(identity),
            limits=_limits(self._max_message),
        )  # fmt: skip

    def _gone(self, identity: bytes) -> None:
        if self._streams.pop(identity, None) is not None:
            self._on_gone(identity)


class LocalDealer:
    """The client side. As ``Dealer``, but it never reconnects: an instance that ended does not come back.

    Raises KVTierError or OSError if the instance does not listen.
    """

    def __init__(self, reactor: Reactor, instance: str, max_message: int, events: SocketEvents):
        self._on_lost: Callable[[str], None] | None = events.on_lost
        sock = _socket()
        try:
            sock.connect(local_path(instance))
        except (KVTierError, OSError):
            sock.close()
            raise
        self._stream = Stream(
            reactor, sock, lambda frame: events.on_message([frame]), self._ended, _limits(max_message)
        )

    def send(self, frame: bytes) -> bool:
        return self._stream.send(frame)

    def close(self) -> None:
        """Idempotent."""
        self._on_lost = None
        self._stream.close()

    def _ended(self, reason: str) -> None:
        if self._on_lost is not None:
            self._on_lost(reason)


def sweep(folder: Path) -> None:
    """Remove the sockets of engines that were killed. No connection is made to those that are bound in this network
    namespace: libzmq 4.3.5 aborts a process that has no file descriptor left for a connection to its link's socket."""
    bound = b""
    with contextlib.suppress(OSError):
        bound = Path("/proc/net/unix").read_bytes()
    for path in [path for pattern in _SWEPT for path in folder.glob(pattern) if path.is_socket()]:
        with _socket() as sock, contextlib.suppress(FileNotFoundError, BlockingIOError, PermissionError):
            if path.suffix == ".sock" and path.stat().st_mtime > time.time() - _NEW_SECONDS:
                continue
            if b" %s\n" % os.fsencode(path) in bound:
                continue
            try:
                sock.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
