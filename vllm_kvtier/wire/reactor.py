"""One thread that owns sockets and timers. It sleeps in poll(2) while nothing is due.

All callbacks run on the reactor's thread; other threads only use ``call_soon``, ``call_within`` and ``stop``.
"""

import contextlib
import ctypes
import functools
import heapq
import itertools
import math
import os
import resource
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from vllm_kvtier.logs import get_logger

logger = get_logger(__name__)

MAX_SOCKETS = 4096  # a monitored socket is three, and ZMQ's own limit is 1023
MAX_POLL_SECONDS = 86400.0  # options of users may be for months, and poll(2) takes 24 days at most
MIN_SWEEP = 1024  # timers, from which on those that were cancelled are looked for
_EVENT = struct.Struct("=HI")  # event, value: zmq_socket_monitor(3). pyzmq's own parser imports asyncio


_libc = ctypes.PyDLL(None, use_errno=True)  # its calls keep the interpreter, which another thread would take


class Timer:
    """A scheduled call; ``cancel`` is idempotent and only valid on the reactor's thread."""

    __slots__ = ("when", "callback")

    def __init__(self, when: float, callback: Callable[[], None]):
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Reactor:
    def __init__(self, name: str):
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._poller = zmq.Poller()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()  # the descriptor must not be closed, or reused, during a write
        self._wake_closed = False
        self._poller.register(self._wake, zmq.POLLIN)
        self._alarm = _libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._alarm < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._alarm_at = math.inf  # when it rings; under the lock
        self._handlers: dict[Any, Callable[[], None]] = {}
        # Of sockets that there may be hundreds of: ZMQ's poll takes 0.4 us for each socket whenever anything happens.
        self._epoll = select.epoll()
        self._many: dict[zmq.Socket[bytes], int] = {}  # with ZMQ's descriptor for each
        self._by_fd: dict[int, zmq.Socket[bytes]] = {}
        self._unsure: dict[zmq.Socket[bytes], None] = {}  # of these, sockets to be looked at before the next sleep
        self._monitors: dict[zmq.Socket[bytes], zmq.Socket[bytes]] = {}  # monitored socket -> its monitor
        self._fds: dict[int, Callable[[int], None]] = {}
        self._soon: deque[Callable[[], object]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._sweep_at = MIN_SWEEP
        self._order = itertools.count()
        self._stopping = False
        self.errors = 0  # events dropped because a callback raised, and errors that were caught elsewhere
        self._on_stop: list[Callable[[], None]] = []
        self.add_fd(self._alarm, self._alarm_rang)
        self.add_fd(self._epoll.fileno(), lambda events: self._unsure.update(self._signalled()))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # -- any thread ----------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def call_soon(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` on the reactor's thread; after ``stop`` it is silently not run."""
        self._soon.append(callback)
        if threading.current_thread() is self._thread:
            return  # the loop checks the queue before it sleeps
        with self._wake_lock:
            if not self._wake_closed:
                os.eventfd_write(self._wake, 1)

    def call_within(self, seconds: float, callback: Callable[[], None]) -> None:
        """As ``call_soon``, but the thread wakes only after ``seconds``, or with what wakes it before: until then it
        does not take the interpreter from the caller."""
        self._soon.append(callback)
        if threading.current_thread() is self._thread:
            return
        at = time.monotonic() + seconds
        with self._wake_lock:
            if at < self._alarm_at and not self._wake_closed:
                self._alarm_at = at
                _libc.timerfd_settime(self._alarm, 0, struct.pack("4l", 0, 0, *divmod(int(seconds * 1e9), 10**9)), None)

    def stop(self, timeout: float = 5.0) -> None:
        """Run the ``on_stop`` callbacks, close every socket and join the thread. Idempotent."""
        if self._stopping or not self._thread.is_alive():
            return
        self.call_soon(self._begin_stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def on_stop(self, callback: Callable[[], None]) -> None:
        self._on_stop.append(callback)

    def off_stop(self, callback: Callable[[], None]) -> None:
        """``callback`` is not run when it stops. Idempotent."""
        if callback in self._on_stop:
            self._on_stop.remove(callback)

    # -- reactor's thread (or before start) ----------------------------------------------------------------

    def add_socket(self, socket: zmq.Socket[bytes], on_readable: Callable[[], None]) -> None:
        self._poller.register(socket, zmq.POLLIN)
        self._handlers[socket] = on_readable

    def add_one_of_many(self, socket: zmq.Socket[bytes], on_readable: Callable[[], None]) -> None:
        """As ``add_socket``, but costs nothing while nothing happens to it. ``look_at`` must follow each use of the
        socket that is not in ``on_readable``: whatever ZMQ does meanwhile takes the signal from its descriptor."""
        fd = int(socket.getsockopt(zmq.FD))
        self._epoll.register(fd, select.EPOLLIN)
        self._handlers[socket], self._many[socket], self._by_fd[fd] = on_readable, fd, socket
        self.look_at(socket)

    def look_at(self, socket: zmq.Socket[bytes]) -> None:
        if socket in self._many:
            self._unsure[socket] = None

    def remove_socket(self, socket: zmq.Socket[bytes]) -> None:
        """Unregister and close the socket and its monitor."""
        self._end_monitor(socket)
        fd = self._many.pop(socket, None)
        if fd is not None:
            self._epoll.unregister(fd)
            del self._by_fd[fd]
            self._unsure.pop(socket, None)
        if self._handlers.pop(socket, None) is not None and fd is None:
            self._poller.unregister(socket)
        socket.close(linger=0)

    def add_monitor(self, socket: zmq.Socket[bytes], events: int, on_event: Callable[[int], None]) -> None:
        """Call ``on_event`` with each of ``events`` (zmq.EVENT_... | ...) of ``socket`` until ``remove_socket``. To be
        called before it is connected. Messages that arrived before a disconnect event can be received in it."""
        # pyzmq's default address contains a descriptor number, which a new socket may get while the old name is bound.
        address = f"inproc://monitor-{next(self._order)}"
        try:
            monitor = socket.get_monitor_socket(events, address)
        except zmq.ZMQError:
            socket.disable_monitor()
            raise
        self._monitors[socket] = monitor
        self.add_one_of_many(monitor, lambda: drain(monitor, lambda frames: on_event(_EVENT.unpack(frames[0])[0])))

    def _end_monitor(self, socket: zmq.Socket[bytes]) -> None:
        monitor = self._monitors.pop(socket, None)
        if monitor is not None:
            socket.disable_monitor()  # before its reader goes: ZMQ's thread would block on the next event
            self.remove_socket(monitor)

    def add_fd(self, fd: int, on_ready: Callable[[int], None]) -> None:
        """Call ``on_ready(events)`` whenever the descriptor is readable (zmq.POLLIN) or has failed (zmq.POLLERR).
        ``on_ready`` must not block; a call may be spurious."""
        self._fds[fd] = on_ready
        self._poller.register(fd, zmq.POLLIN)

    def watch_fd(self, fd: int, events: int) -> None:
        """Change the events of a descriptor (zmq.POLLIN | POLLOUT); one that is not registered is ignored."""
        if fd in self._fds:
            self._poller.register(fd, events)

    def remove_fd(self, fd: int) -> None:
        """Unregister, before the caller closes the descriptor. Idempotent."""
        if self._fds.pop(fd, None) is not None and fd in self._poller:  # absent while its events are 0
            self._poller.unregister(fd)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(time.monotonic() + delay, callback)
        if len(self._timers) >= self._sweep_at:  # peers decide how often some are cancelled, long before they are due
            self._timers = [each for each in self._timers if each[2].callback is not None]
            heapq.heapify(self._timers)
            self._sweep_at = max(MIN_SWEEP, 2 * len(self._timers))
        heapq.heappush(self._timers, (timer.when, next(self._order), timer))
        return timer

    # -- the loop ------------------------------------------------------------------------------------------

    def _alarm_rang(self, events: int) -> None:
        # Read under the lock: an alarm set in between would be taken with this one, and none be set after it.
        with self._wake_lock, contextlib.suppress(BlockingIOError):  # what was queued before is run next
            self._alarm_at = math.inf
            os.read(self._alarm, 8)

    def _begin_stop(self) -> None:
        self._stopping = True

    def _timeout_ms(self) -> int | None:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        if self._soon or self._unsure:
            return 0
        if not self._timers:
            return None
        return max(0, int(min(self._timers[0][0] - time.monotonic(), MAX_POLL_SECONDS) * 1000) + 1)

    def _run(self) -> None:
        while not self._stopping:
            for source, events in self._poller.poll(self._timeout_ms()):
                if source == self._wake:
                    try:
                        os.eventfd_read(self._wake)
                    except BlockingIOError:
                        continue
                elif isinstance(source, int):
                    on_ready = self._fds.get(source)
                    if on_ready is not None:
                        self._guard(functools.partial(on_ready, events))
                else:
                    handler = self._handlers.get(source)
                    if handler is not None:
                        self._guard(handler)
            # Only the calls queued so far: a call that queues itself again must not starve sockets and timers.
            for _ in range(len(self._soon)):
                self._guard(self._soon.popleft())
            now = time.monotonic()
            while self._timers and self._timers[0][0] <= now:
                timer = heapq.heappop(self._timers)[2]
                if timer.callback is not None:
                    callback, timer.callback = timer.callback, None
                    self._guard(callback)
            for socket in list(self._unsure):
                self._guard(functools.partial(self._serve, socket))
        for callback in list(self._on_stop):
            self._guard(callback)
        for socket in list(self._monitors):
            self._end_monitor(socket)
        for socket in list(self._handlers):
            if socket not in self._many:
                self._poller.unregister(socket)
            socket.close()  # not at once: the last messages (released leases) are still sent
        self._handlers.clear()
        self._many.clear()
        self._epoll.close()
        self._fds.clear()  # their owners close them, in ``on_stop``
        self.context.destroy(linger=0)  # sockets that were never registered here
        with self._wake_lock:
            self._wake_closed = True
            os.close(self._wake)
            os.close(self._alarm)

    def _signalled(self) -> dict[zmq.Socket[bytes], None]:
        return {self._by_fd[fd]: None for fd, _ in self._epoll.poll(0) if fd in self._by_fd}

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        """Have one of many sockets read, if it has messages. It stays unsure if it has more than its reader takes."""
        if socket not in self._unsure:
            return  # closed just now
        if _is_readable(socket):
            self._handlers[socket]()
        if socket in self._unsure and not _is_readable(socket):
            del self._unsure[socket]

    def _guard(self, callback: Callable[[], object]) -> None:
        """Call, and log an exception: an error in one handler must not stop the others."""
        try:
            callback()
        except Exception:
            self.errors += 1
            logger.exception("kvtier: %s: unexpected error; the event is dropped", self._thread.name)


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def drain(socket: zmq.Socket[bytes], on_frames: Callable[[list[bytes]], None], limit: int = 256) -> None:
    """Hand up to ``limit`` waiting multipart messages to ``on_frames`` without blocking; it may close the socket."""
    for _ in range(limit):
        if socket.closed:
            return
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        on_frames(frames)


def raise_descriptor_limit() -> None:
    """Of this process and its children. Shells and systemd give 1,024; a request of the proxy takes three, a store's
    connection to another one four."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        logger.warning("kvtier: the limit of open files cannot be raised (%s)", error)
