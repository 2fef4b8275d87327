"""Engines of one node talk over Unix sockets in this user's runtime directory, not through TCP.

Others' steps wait for the answer of an engine that is asked for its blocks, and that is at work: its thread launches a
step in Python, and whoever else wants the interpreter waits for it. Over a socket of our own the answer comes in two
thirds of the time (``benchmarks/asks.py``). And the kernel ends these connections when a process ends, however it does.

The directory is mode 0700, as for the link between an engine's halves: who can connect is this user, and could read the
engines' memory as well. An engine in another container has another directory, and is reached over TCP.
"""

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.wire.link import private_path
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.stream import Stream, accept

QUEUE = 128  # connections that may wait to be accepted
MOST = 512  # connections: a node has fewer engines
BACKLOG = 4  # longest messages that may wait for who does not read just now
_SUFFIX = ".near"


def local_path(instance: str) -> str:
    """Raises KVTierError if the directory is not ours alone."""
    return private_path(instance, suffix=_SUFFIX)


def _listen(path: str) -> socket.socket:
    """It appears there when it listens: before, an engine that sweeps would take it for one that was left."""
    listener, new = _socket(), str(Path(path).with_suffix(".new"))
    try:
        listener.bind(new)
        try:
            listener.listen(QUEUE)
            os.link(new, path)
        finally:
            os.unlink(new)
    except OSError:
        listener.close()
        raise
    return listener


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


class LocalServer:
    """Where ``instance`` listens for engines of this node. ``on_message(identity, frame)`` gets each message, and
    ``on_gone(identity)`` is told when its connection has ended. On the Reactor's thread, or before it starts.

    Raises KVTierError or OSError if nobody could be heard here.
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
        """False if that is no connection of ours."""
        stream = self._streams.get(identity)
        if stream is not None:
            stream.send(frame)
        return stream is not None

    def drop(self, identity: bytes) -> None:
        """End that connection, if it is one of ours."""
        stream = self._streams.get(identity)
        if stream is not None:
            stream.close("for what it sent")

    def close(self) -> None:
        """Idempotent."""
        if self._listener.fileno() < 0:
            return
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
        if len(self._streams) >= MOST:
            sock.close()
            return
        identity = os.urandom(16)  # nobody who chooses one of ZMQ's can guess it
        self._streams[identity] = Stream(
            self._reactor, sock,
            on_frame=lambda frame: self._on_message(identity, frame),
            on_close=lambda reason: self._gone(identity),
            max_frame=self._max_message, backlog=BACKLOG * self._max_message,
        )  # fmt: skip

    def _gone(self, identity: bytes) -> None:
        if self._streams.pop(identity, None) is not None:
            self._on_gone(identity)


class LocalDealer:
    """The other end; see ``dealer.Dealer``, but for this: who is gone does not come back, so it is not tried again.

    Raises KVTierError or OSError if nobody listens there.
    """

    def __init__(
        self,
        reactor: Reactor,
        instance: str,
        max_message: int,
        on_message: Callable[[list[bytes]], None],
        on_lost: Callable[[str], None],
    ):
        self._on_lost: Callable[[str], None] | None = on_lost
        sock = _socket()
        try:
            sock.connect(local_path(instance))
        except (KVTierError, OSError):
            sock.close()
            raise
        self._stream = Stream(
            reactor, sock, on_frame=lambda frame: on_message([frame]), on_close=self._ended, max_frame=max_message,
            backlog=BACKLOG * max_message,
        )  # fmt: skip

    def send(self, frame: bytes) -> None:
        self._stream.send(frame)

    def close(self) -> None:
        """Idempotent."""
        self._on_lost = None
        self._stream.close()

    def _ended(self, reason: str) -> None:
        if self._on_lost is not None:
            self._on_lost(reason)


def sweep(folder: Path) -> None:
    """Remove what engines left there that were killed."""
    for path in filter(Path.is_socket, folder.glob(f"*{_SUFFIX}")):
        with _socket() as sock, contextlib.suppress(FileNotFoundError, BlockingIOError, PermissionError):
            try:
                sock.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
