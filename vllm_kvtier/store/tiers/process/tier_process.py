"""The server's side of a tier process: starts it, exchanges messages, and replaces it when it fails.

A tier process that crashes, misses a deadline or sends a malformed message is killed. Until it is reaped, its I/O may
still read or write slots, so its requests fail only then. A new one is started after a backoff, which doubles with each
failure, and is halved each time the process has worked for as long as it. Everything runs on the reactor's thread; only
``stop`` blocks.
"""

import select
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, overload

import msgspec
import zmq

from vllm_kvtier import __version__
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.tiers.base import Tier, TierCounts
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.child import Child, spawn_tier_process
from vllm_kvtier.store.tiers.read_time import Durations
from vllm_kvtier.wire.reactor import Reactor, Timer
from vllm_kvtier.wire.stream import Stream, StreamLimits

logger = get_logger(__name__)

OPENING, READY, BACKOFF, STOPPED = "opening", "ready", "unavailable", "stopped"

OPEN_SECONDS = 60.0  # maximum time between messages while the tier is opened
BACKOFF_SECONDS = 1.0, 60.0  # first and longest backoff before a new process is started
GRACE_SECONDS = 1.0  # seconds for a process whose socket has closed to log its reason and exit
STUCK_SECONDS = 10.0  # a killed process that remains for longer is blocked by its device
STOP_SECONDS = 3.0  # for a process that was killed by ``stop``
MAX_UNSENT_BYTES = 256 << 20  # unsent bytes for a busy tier process

Request = m.Read | m.Write | m.Look
Reply = m.Moved | m.Located
KINDS: dict[type[Request], str] = {m.Read: "read", m.Write: "write", m.Look: "find"}


@dataclass(slots=True, eq=False)
class _Pending:
    message: Request
    on_reply: Callable[[Any], None]  # of the type that ``request`` declares for the message
    deadline: Timer
    sent: float  # clock time

    def error(self, reply: Reply) -> str:
        """Why the reply is invalid, or ""."""
        expected = m.Located if isinstance(self.message, m.Look) else m.Moved
        if not isinstance(reply, expected):
            return f"it answered {type(self.message).__name__} with {type(reply).__name__}"
        if isinstance(reply, m.Moved) and not isinstance(self.message, m.Look):
            if len(reply.good) != len(self.message.moves):
                return f"it answered for {len(reply.good)} blocks, not {len(self.message.moves)}"
        return ""


class TierProcessUser(Protocol):
    """The tier of a process."""

    def process_message(self, message: m.ToServer) -> None:
        """The process sent a message that is no reply."""

    def process_up(self, opened: m.Opened) -> None:
        """The process is READY."""

    def process_down(self, reason: str) -> None:
        """The process is no longer READY or OPENING. Requests in flight fail later, when it is reaped."""


class TierProcess:
    """``state``: OPENING, READY, BACKOFF (a new process will be started) or STOPPED; ``reason``: of BACKOFF.

    kind: a key of ``main.KINDS``. options: of Open. user: gets its messages and changes of state. open_seconds: see
    OPEN_SECONDS. backoff: as BACKOFF_SECONDS.
    """

    def __init__(
        self,
        kind: str,
        options: m.Options,
        context: "TierContext",
        user: "TierProcessUser",
        open_seconds: float = OPEN_SECONDS,
        backoff: tuple[float, float] | None = None,
    ):
        self.kind, self.state, self.reason = kind, STOPPED, ""
        self.restarts = self.timeouts = 0
        self.durations = {kind: Durations() for kind in KINDS.values()}  # response times
        self._options, self._context, self._user, self._open_seconds = dict(options), context, user, open_seconds
        self._reactor = context.reactor
        self._child: Child | None = None
        self._stream: Stream | None = None
        self._requests: dict[int, _Pending] = {}
        self._last_id = 0
        self._pool_bytes = 0  # of the last Open or PoolLimit
        self._backoffs = backoff or BACKOFF_SECONDS
        self._backoff = self._backoffs[0]
        self._timer: Timer | None = None  # OPENING: the deadline; BACKOFF: the next step towards a new process
        self._proven: Timer | None = None  # READY: halves the backoff
        self._logged = ""  # the reason logged last
        self._explained = False  # ``reason`` is known, whatever the exit status

    def start(self) -> None:
        """Start the process; again after a backoff if that fails. Idempotent."""
        if self.state == STOPPED:
            self._begin()

    def next_id(self) -> int:
        """Id of the next request; unique over restarts."""
        self._last_id += 1
        return self._last_id

    def limit_pool(self) -> None:
        """Report that less of the pool may be used than the process knows."""
        usable = self._context.usable_bytes
        if usable < self._pool_bytes and self.send(m.PoolLimit(usable)):
            self._pool_bytes = usable

    def send(self, message: m.Notice) -> bool:
        """Send a message without a reply. False: not READY."""
        return self.state == READY and self._send(message)

    @overload
    def request(self, message: m.Look, seconds: float, on_reply: Callable[[m.Located | None], None]) -> None: ...
    @overload
    def request(
        self, message: m.Read | m.Write, seconds: float, on_reply: Callable[[m.Moved | None], None]
    ) -> None: ...
    def request(self, message: Request, seconds: float, on_reply: Callable[[Any], None]) -> None:
        """Send a request. ``on_reply`` is called once; with None if the request failed as a whole, when no process can
        touch its slots any more (before this returns, if not READY). If no reply arrives within ``seconds``, the
        process is replaced."""
        if self.state != READY:
            on_reply(None)
            return
        timer = self._reactor.call_later(seconds, lambda: self._too_late(message, seconds))
        self._requests[message.id] = _Pending(message, on_reply, timer, time.monotonic())
        self._send(message)

    def back_off(self, reason: str) -> None:
        """Kill the process, and start another after the backoff. Ignored unless OPENING or READY."""
        if self.state in (OPENING, READY):
            self._explained = True
            self._go_down(reason)
            self._log_reason()
            self._kill()

    def stop(self, seconds: float = GRACE_SECONDS) -> None:
        """End the process for good. Blocks ``seconds`` until it exits, then STOP_SECONDS after a kill."""
        if self.state == STOPPED:
            return
        up, self.state = self.state in (OPENING, READY), STOPPED
        self._cancel_timers()
        child = self._child
        if child is not None:
            self._close_stream("the store ends")
            if not _ended(child, seconds):
                child.kill()
                if not _ended(child, STOP_SECONDS):
                    logger.warning(
                        "kvtier: %s tier: process %d is blocked by its device; it is left behind", self.kind, child.pid
                    )
            self._log_stderr(child)
            self._close_child(child)
        if up:
            self._user.process_down("the store ends")
        self._fail_requests()

    # -- start and end ------------------------------------------------------------------------------------------

    def _send(self, message: m.ToTierProcess) -> bool:
        return self._stream is not None and self._stream.send(m.encode(message))

    def _close_stream(self, reason: str) -> None:
        if self._stream is not None:
            self._stream.close(reason)

    def _begin(self) -> None:
        self.state, self._timer, self._explained = OPENING, None, False
        try:
            ours, self._child = self._spawn()
        except OSError as error:
            self._go_down(f"its process could not be started: {error.strerror or error}")
            self._log_reason()
            self._begin_after_backoff()
            return
        self._stream = Stream(
            self._reactor, ours, self._on_frame, self._on_close, StreamLimits(m.MAX_FRAME, MAX_UNSENT_BYTES)
        )
        child = self._child
        self._reactor.add_fd(child.ended, lambda events: self._reap(child))
        self._reactor.add_fd(child.stderr, lambda events: self._log_stderr(child))
        self._pool_bytes = self._context.usable_bytes
        self._send(m.Open(self._options, self._pool_bytes, __version__))
        self._watch_opening()

    def _spawn(self) -> tuple[socket.socket, Child]:
        """Raises OSError, also if there are too many descriptors for the sockets."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            return ours, self._context.spawn(self.kind, theirs, self._context.pool_fd, self._context.pool_bytes)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()

    def _watch_opening(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._reactor.call_later(
            self._open_seconds, lambda: self.back_off(f"opening it took more than {self._open_seconds:g} s")
        )

    def _too_late(self, message: Request, seconds: float) -> None:
        self.timeouts += 1
        self.back_off(f"it has not answered {_text(message)} within {seconds:.0f} s")

    def _on_close(self, reason: str) -> None:
        if self.state in (OPENING, READY):
            # The process logs its reason when it exits; one that only closed its socket is killed.
            self._go_down(reason)
            self._timer = self._reactor.call_later(GRACE_SECONDS, self._end_it)

    def _go_down(self, reason: str) -> None:
        self.state, self.reason = BACKOFF, reason
        self._cancel_timers()
        if self._child is not None:
            self._reactor.watch_fd(self._child.ended, zmq.POLLIN)
        for request in self._requests.values():
            request.deadline.cancel()
        self._user.process_down(reason)

    def _end_it(self) -> None:
        self._explained = True  # the reason is how its socket closed: the process has not exited
        self._log_reason()
        self._kill()

    def _kill(self) -> None:
        child = self._child
        if child is None:
            return
        child.kill()
        self._close_stream(self.reason)
        self._timer = self._reactor.call_later(STUCK_SECONDS, lambda: self._stuck(child))

    def _stuck(self, child: Child) -> None:
        self._timer = None
        logger.warning(
            "kvtier: %s tier: process %d was killed but is blocked by its device; %d requests and their memory wait "
            "for its end",
            self.kind,
            child.pid,
            len(self._requests),
        )

    def _reap(self, child: Child) -> None:
        if self.state in (OPENING, READY):
            # Its last messages are handled first, then the end of its socket.
            self._reactor.watch_fd(child.ended, 0)
            return
        status = child.reap()
        if status is None:
            return
        self._log_stderr(child)
        if not self._explained:
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            self.reason = f"its process ended ({how})" + (f": {child.last_line}" if child.last_line else "")
            self._log_reason()
        self._cancel_timers()
        self._close_stream(self.reason)
        self._close_child(child)
        self._begin_after_backoff()
        self._fail_requests()

    def _close_child(self, child: Child) -> None:
        self._child = None
        self._reactor.remove_fd(child.ended)
        self._reactor.remove_fd(child.stderr)
        child.close()

    def _begin_after_backoff(self) -> None:
        self._timer = self._reactor.call_later(self._backoff, self._begin_again)
        self._backoff = min(2 * self._backoff, self._backoffs[1])

    def _begin_again(self) -> None:
        self.restarts += 1
        self._begin()

    def _halve_backoff_later(self) -> None:
        self._proven = self._reactor.call_later(self._backoff, self._halve_backoff)

    def _halve_backoff(self) -> None:
        self._proven, self._backoff = None, max(self._backoff / 2, self._backoffs[0])
        if self._backoff > self._backoffs[0]:
            self._halve_backoff_later()

    def _cancel_timers(self) -> None:
        for timer in filter(None, (self._timer, self._proven)):
            timer.cancel()
        self._timer = self._proven = None

    def _fail_requests(self) -> None:
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.deadline.cancel()
            request.on_reply(None)

    # -- its messages -------------------------------------------------------------------------------------------

    def _on_frame(self, frame: bytes) -> None:
        try:
            message = m.decode_to_server(frame)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            self.back_off(f"malformed message: {error}")
            return
        try:
            self._handle(message)
        except Exception as error:
            logger.exception("kvtier: %s tier: unexpected error in a message handler", self.kind)
            self.back_off(f"its message could not be handled: {type(error).__name__}: {error}")

    def _handle(self, message: m.ToServer) -> None:
        if isinstance(message, Reply):
            self._answered(message)
        elif isinstance(message, m.Refused):
            self.back_off(message.reason)
        elif isinstance(message, m.Opened):
            self._opened(message)
        else:
            if self.state == OPENING:
                self._watch_opening()
            self._user.process_message(message)

    def _opened(self, message: m.Opened) -> None:
        if self.state == READY:
            self.back_off("it sent Opened twice")
            return
        self._cancel_timers()
        self.state, self.reason = READY, ""
        self._halve_backoff_later()
        if self._logged:
            logger.info("kvtier: %s tier: available again", self.kind)
            self._logged = ""
        if message.note:
            logger.info("kvtier: %s tier: %s", self.kind, message.note)
        self._user.process_up(message)
        self.limit_pool()

    def _answered(self, reply: Reply) -> None:
        request = self._requests.get(reply.id)
        error = "its reply matches no request" if request is None else request.error(reply)
        if request is None or error:
            self.back_off(error)
            return
        del self._requests[reply.id]
        request.deadline.cancel()
        self.durations[KINDS[type(request.message)]].observe(time.monotonic() - request.sent)
        request.on_reply(reply)

    def _log_stderr(self, child: Child) -> None:
        for line in child.read_lines():
            logger.warning("kvtier: %s tier: process %d: %s", self.kind, child.pid, line)
        if child.silent:
            self._reactor.remove_fd(child.stderr)

    def _log_reason(self) -> None:
        """Log the reason, unless the previous attempt ended in the same way."""
        if self.reason != self._logged:
            self._logged = self.reason
            logger.warning("kvtier: %s tier: unavailable (%s); it is started again later", self.kind, self.reason)


@dataclass(frozen=True)
class TierContext:
    """What every tier with a process of its own is given.

    pool_fd, pool_bytes: the pool's memfd. spawn(kind, socket, pool_fd, pool_bytes): starts a process; raises OSError.
    make_process: ``TierProcess`` or a fake. limit(): bytes of the pool that are, or will be, committed.
    """

    pool_fd: int
    pool_bytes: int
    reactor: Reactor
    clock: Callable[[], float] = time.monotonic
    spawn: Callable[[str, socket.socket, int, int], Child] = spawn_tier_process
    make_process: Callable[..., TierProcess] = TierProcess
    limit: Callable[[], int] = lambda: sys.maxsize

    @property
    def usable_bytes(self) -> int:
        return min(self.pool_bytes, self.limit())


class ProcessTier(Tier, TierProcessUser):
    """A tier with a process of its own. options: of Open."""

    def __init__(
        self,
        context: TierContext,
        options: m.Options,
        open_seconds: float = OPEN_SECONDS,
        backoff: tuple[float, float] | None = None,
    ):
        self._reactor, self._clock = context.reactor, context.clock
        self._counts = TierCounts(self.name)
        self._tier_process = context.make_process(self.name, options, context, self, open_seconds, backoff)

    @property
    def durations(self) -> Mapping[str, Durations]:
        return self._tier_process.durations

    @property
    def usable(self) -> bool:
        return self._tier_process.state == READY

    def start(self) -> None:
        self._tier_process.start()

    def pool_committed(self) -> None:
        self._tier_process.limit_pool()

    def stop(self) -> None:
        self._tier_process.stop()


def _ended(child: Child, seconds: float) -> bool:
    poller = select.poll()
    poller.register(child.ended, select.POLLIN)
    return bool(poller.poll(seconds * 1000)) and child.reap() is not None


def _text(message: Request) -> str:
    if isinstance(message, m.Look):
        return "a lookup"
    pages = sum(move.pages for move in message.moves)
    what = "read" if isinstance(message, m.Read) else "write"
    return f"a {what} of {len(message.moves)} blocks ({pages / 256:.1f} MiB)"
