"""Framed messages over a Unix stream socket on a Reactor, between the node store and its clients.

A frame is its length (4 bytes, little-endian) and that many bytes; descriptors may accompany it (SCM_RIGHTS). The
kernel closes the connection whenever either process ends, so that state can be owned by a connection.

``send`` may be called from any thread and tries the socket at once, because waking the reactor costs more than the
message. All other methods run on the reactor's thread.
"""

import errno
import os
import select
import socket
import struct
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import zmq

from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire.reactor import Reactor

logger = get_logger(__name__)

_LENGTH = struct.Struct("<I")
_READ_BYTES = 64 << 10  # bytes a system call
_MAX_BATCH = 64  # frames handled, or connections accepted, before other sockets are polled
_CREDENTIALS = struct.Struct("3i")


def accept(reactor: Reactor, listener: socket.socket) -> Iterator[socket.socket]:
    """Accept up to ``_MAX_BATCH`` waiting connections of a listener that is registered with the reactor. To be called
    whenever it is readable."""
    for _ in range(_MAX_BATCH):
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                raise
            # The connection stays in the queue: without this pause the poll would spin.
            logger.warning("kvtier: accepting clients is paused for 1 s (%s)", error.strerror)
            reactor.watch_fd(listener.fileno(), 0)
            reactor.call_later(1.0, lambda: reactor.watch_fd(listener.fileno(), zmq.POLLIN))
            return
        yield sock


@dataclass(frozen=True)
class StreamLimits:
    """The connection ends after a frame of more than ``max_frame`` bytes, or with more than ``backlog`` unsent bytes
    (the peer does not read). ``max_fds``: descriptors that come at once; 0: the kernel closes those that are sent."""

    max_frame: int = 16 << 20
    backlog: int = 32 << 20
    max_fds: int = 0


class Stream:
    """One connected, non-blocking socket. It is closed exactly once, and ``on_close`` gets the reason.

    ``on_frame(frame)`` gets each frame, and an exception in it ends the connection; ``take_fds`` returns the
    descriptors that came so far.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        on_frame: Callable[[bytes], None],
        on_close: Callable[[str], None],
        limits: StreamLimits,
    ):
        sock.setblocking(False)
        self._reactor, self._socket = reactor, sock
        self._on_frame, self._on_close = on_frame, on_close
        self._limits = limits
        self._lock = threading.Lock()  # guards the socket's closing and the fields up to the blank line
        self._closed = False
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._write_watched = False

        # Reused: allocating a buffer of this size would cost more than the system call.
        self._chunk = memoryview(bytearray(_READ_BYTES))
        self._input = bytearray()
        self._fds: list[int] = []
        self._more_queued = False
        reactor.add_fd(sock.fileno(), self._ready)

    # -- any thread ---------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self._closed

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> bool:
        """Send now or as soon as the peer reads. False if the connection has ended, or ends because of this.

        ``fds`` require that nothing is unsent: they may accompany the first messages only.
        """
        if len(frame) > self._limits.max_frame:
            raise ValueError(f"a frame of {len(frame)} bytes exceeds the limit of {self._limits.max_frame}")
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
            if self._unsent_bytes > self._limits.backlog:
                self._fail_soon(f"the peer does not read: {self._unsent_bytes} bytes are waiting")
                return False
            if not self._write_watched:
                self._write_watched = True
                self._reactor.call_soon(self._watch)
            return True

    # -- the reactor's thread -----------------------------------------------------------------------------------

    def take_fds(self) -> list[int]:
        """The descriptors received so far; the caller closes them."""
        fds, self._fds = self._fds, []
        return fds

    def has_input(self) -> bool:
        """Whether something has arrived that ``on_frame`` has not got, if only a part of a frame."""
        if self._more_queued or self._closed:
            return self._more_queued
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(0))

    def peer(self) -> tuple[int, int]:
        """(process id, user id) of the peer when it connected, from the kernel."""
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        return pid, uid

    def flush(self) -> None:
        """Block until nothing is unsent, or the peer has ended."""
        poller = select.poll()
        while self._unsent:
            poller.register(self._socket, select.POLLOUT)
            if poller.poll()[0][1] != select.POLLOUT:
                return
            self._flush()

    def close(self, reason: str = "closed here") -> None:
        """Idempotent. Bytes in the kernel's buffer still arrive; unsent frames are dropped."""
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
        """Close after reading what the peer sent before it ended, which may contain the reason."""

        def end() -> None:
            if not self._closed and (self._more_queued or self._read()):
                self._reactor.call_soon(end)  # after the frames that are queued
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
            return True  # earlier frames are handled first; the full socket buffer slows the sender down
        try:
            if self._limits.max_fds:
                size = _receive_into(self._socket, self._chunk, self._limits.max_fds, self._fds)
                if len(self._fds) > self._limits.max_fds:
                    self.close("the peer sends unexpected descriptors")
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
        """Hand complete frames to ``on_frame``, at most ``_MAX_BATCH`` before other sockets are polled."""
        if self._closed:
            return
        self._more_queued = False
        offset, handled, buffer = 0, 0, self._input
        while len(buffer) - offset >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, offset)
            if length > self._limits.max_frame:
                self.close(f"the peer sends a frame of {length} bytes, more than the {self._limits.max_frame} allowed")
                return
            end = offset + _LENGTH.size + length
            if len(buffer) < end:
                break
            if handled == _MAX_BATCH:
                self._more_queued = True
                self._reactor.call_soon(self._handle)
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
    """Receive, append descriptors to ``fds``, and return the bytes received. Sets close-on-exec on the descriptors,
    which socket.recv_fds cannot: it ignores its flags."""
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
    """Read one frame by time.monotonic() ``deadline``; append at most one descriptor to ``fds``.

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
