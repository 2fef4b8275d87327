"""Framed messages over a Unix stream socket on a Reactor: how clients and the node store talk.

A frame is its length (4 bytes, little-endian) and that many bytes; descriptors may ride on one (SCM_RIGHTS).
The kernel closes the connection when either process ends, however it ends: what a connection owns dies with it.

``send`` may be called from any thread and tries the socket at once, because waking the reactor first would cost
more than the message; everything else belongs to the reactor's thread.
"""

import errno
import os
import socket
import struct
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import zmq

from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire.reactor import Reactor

logger = get_logger("vllm.kvtier.wire")

_LENGTH = struct.Struct("<I")
_READ = 64 << 10  # bytes a system call
_TURN = 64  # frames handled, or connections taken, before other sockets get their turn
_CREDENTIALS = struct.Struct("3i")


def accept(reactor: Reactor, listener: socket.socket) -> Iterator[socket.socket]:
    """Whoever waits at a listener that is registered with the reactor, up to a number; to be called whenever it is
    readable."""
    for _ in range(_TURN):
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                raise
            # The next one waits in the queue; without a pause this would spin until somebody leaves.
            logger.warning("kvtier: a client has to wait: %s", error.strerror)
            reactor.watch_fd(listener.fileno(), 0)
            reactor.call_later(1.0, lambda: reactor.watch_fd(listener.fileno(), zmq.POLLIN))
            return
        yield sock


class Stream:
    """One connected, non-blocking socket; closed exactly once, with the reason told to ``on_close``.

    ``on_frame(frame)`` gets each frame; ``take_fds`` what descriptors came so far. A frame longer than
    ``max_frame``, a fault in ``on_frame``, and more than ``backlog`` unsent bytes (a peer that does not read) end
    the connection. ``max_fds`` 0: descriptors that the peer sends are closed unseen, by the kernel.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        on_frame: Callable[[bytes], None],
        on_close: Callable[[str], None],
        *,
        max_frame: int = 16 << 20,
        backlog: int = 32 << 20,
        max_fds: int = 0,
    ):
        sock.setblocking(False)
        self._reactor, self._socket = reactor, sock
        self._on_frame, self._on_close = on_frame, on_close
        self._max_frame, self._max_backlog, self._max_fds = max_frame, backlog, max_fds
        self._lock = threading.Lock()  # guards the socket's life and what is below, up to the blank line
        self._closed = False
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._write_watched = False

        # Kept: a fresh buffer of this size for each call would cost more than the call.
        self._chunk = memoryview(bytearray(_READ))
        self._input = bytearray()
        self._fds: list[int] = []
        self._more_queued = False
        reactor.add_fd(sock.fileno(), self._ready)

    # -- any thread ---------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> bool:
        """Send now or as soon as the peer reads; False if the connection has ended, or ends because of this.

        ``fds`` only as long as nothing is unsent, that is at the beginning of a conversation.
        """
        if len(frame) > self._max_frame:
            raise ValueError(f"a frame of {len(frame)} bytes exceeds the limit of {self._max_frame}")
        data = _LENGTH.pack(len(frame)) + frame
        with self._lock:
            if self._closed:
                return False
            sent = 0
            if not self._unsent:
                try:
                    sent = socket.send_fds(self._socket, [data], fds) if fds else self._socket.send(data)
                except (BlockingIOError, InterruptedError):
                    sent = 0
                except OSError as error:
                    self._end_soon(f"sending failed: {error.strerror}")
                    return False
                if sent == len(data):
                    return True
            if fds and not sent:
                self._fail_soon("the peer does not read")
                return False
            self._unsent.append(memoryview(data)[sent:])
            self._unsent_bytes += len(data) - sent
            if self._unsent_bytes > self._max_backlog:
                self._fail_soon(f"the peer does not read: {self._unsent_bytes} bytes are waiting")
                return False
            if not self._write_watched:
                self._write_watched = True
                self._reactor.call_soon(self._watch)
            return True

    # -- the reactor's thread -----------------------------------------------------------------------------------

    def take_fds(self) -> list[int]:
        """The descriptors that came so far; the caller closes them."""
        fds, self._fds = self._fds, []
        return fds

    def peer(self) -> tuple[int, int]:
        """(process id, user id) of whoever connected, as the kernel saw it then."""
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        return pid, uid

    def close(self, reason: str = "closed here") -> None:
        """Idempotent; what the kernel took already still arrives, what waits here does not."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._reactor.remove_fd(self._socket.fileno())
            self._socket.close()
            self._unsent.clear()
        for fd in self.take_fds():
            os.close(fd)
        self._on_close(reason)

    def _fail_soon(self, reason: str) -> None:
        self._reactor.call_soon(lambda: self.close(reason))

    def _end_soon(self, reason: str) -> None:
        """Of a peer that is gone: what it said before it went, why perhaps, is still to be heard."""

        def end() -> None:
            if not self._closed and (self._more_queued or self._read()):
                self._reactor.call_soon(end)  # behind what of it is handled before
            else:
                self.close(reason)

        self._reactor.call_soon(end)

    def _watch(self) -> None:
        with self._lock:
            if not self._closed:
                events = zmq.POLLIN | (zmq.POLLOUT if self._write_watched else 0)
                self._reactor.watch_fd(self._socket.fileno(), events)

    def _ready(self, events: int) -> None:
        if events & zmq.POLLOUT:
            self._flush()
        if events & ~zmq.POLLOUT and not self._closed:
            self._read()

    def _flush(self) -> None:
        with self._lock:
            try:
                while self._unsent and not self._closed:
                    sent = self._socket.send(self._unsent[0])
                    self._unsent_bytes -= sent
                    if sent == len(self._unsent[0]):
                        self._unsent.popleft()
                    else:
                        self._unsent[0] = self._unsent[0][sent:]
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._end_soon(f"sending failed: {error.strerror}")
                return
            self._write_watched = bool(self._unsent)
        self._watch()

    def _read(self) -> bool:
        """Whether there may be more to read."""
        if self._more_queued:
            return True  # frames that came earlier are handled first, and what is not read holds the sender back
        try:
            if self._max_fds:
                size = _receive_into(self._socket, self._chunk, self._max_fds, self._fds)
                if len(self._fds) > self._max_fds:
                    self.close("the peer sends descriptors that nobody asked for")
                    return False
            else:
                size = self._socket.recv_into(self._chunk)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self.close(f"the connection broke: {error.strerror}")
            return False
        if not size:
            self.close("the peer closed the connection")
            return False
        self._input += self._chunk[:size]
        self._handle()
        return True

    def _handle(self) -> None:
        """Hand out whole frames, a bounded number before other sockets get their turn."""
        self._more_queued = False
        offset, handled, buffer = 0, 0, self._input
        while len(buffer) - offset >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, offset)
            if length > self._max_frame:
                self.close(f"the peer sends a frame of {length} bytes, more than the {self._max_frame} allowed")
                return
            end = offset + _LENGTH.size + length
            if len(buffer) < end:
                break
            if handled == _TURN:
                self._more_queued = True
                self._reactor.call_soon(lambda: self._closed or self._handle())
                break
            frame = bytes(memoryview(buffer)[offset + _LENGTH.size : end])
            offset, handled = end, handled + 1
            try:
                self._on_frame(frame)
            except Exception as error:
                self.close(f"a message could not be handled: {type(error).__name__}: {error}")
                raise
            if self._closed:
                return
        del buffer[:offset]


def _receive_into(sock: socket.socket, buffer: memoryview, max_fds: int, fds: list[int]) -> int:
    """Bytes received; descriptors with them go to ``fds`` and are not inherited by children, as they would be from
    socket.recv_fds (it ignores its flags)."""
    size, ancillary, _, _ = sock.recvmsg_into([buffer], socket.CMSG_SPACE(max_fds * 4), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received = array("i")
            received.frombytes(content[: len(content) // received.itemsize * received.itemsize])
            fds += received
    return size


# -- the same frames on a blocking socket, for tools and tests ----------------------------------------------------


def write_frame(sock: socket.socket, frame: bytes) -> None:
    sock.sendall(_LENGTH.pack(len(frame)) + frame)


def read_frame(sock: socket.socket, deadline: float, fds: list[int], max_frame: int = 16 << 20) -> bytes:
    """One frame, by time.monotonic() ``deadline``; at most one descriptor with it is appended to ``fds``.

    Raises OSError (TimeoutError among them) or EOFError.
    """
    (length,) = _LENGTH.unpack(_read_exactly(sock, _LENGTH.size, deadline, fds))
    if length > max_frame:
        raise EOFError(f"the peer sends a frame of {length} bytes, more than the {max_frame} allowed")
    return _read_exactly(sock, length, deadline, fds)


def _read_exactly(sock: socket.socket, length: int, deadline: float, fds: list[int]) -> bytes:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        sock.settimeout(left)
        size = _receive_into(sock, view, 1, fds)
        if not size:
            raise EOFError("the peer closed the connection")
        view = view[size:]
    return bytes(data)
