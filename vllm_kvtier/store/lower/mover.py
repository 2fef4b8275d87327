"""The server's end of a mover: starts its process, speaks with it, and sets it aside when it fails.

A mover that crashes, does not answer in time or says what no mover says is killed. Until it is reaped, I/O that it
began may still read or write slots of the pool: only then are its requests answered, with None. After a pause, longer
each time, a new one is started. Everything here belongs to the reactor's thread, and nothing waits but ``stop``.
"""

import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import zmq

from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.child import Child, spawn_mover
from vllm_kvtier.store.lower.durations import Durations
from vllm_kvtier.wire.reactor import Reactor, Timer
from vllm_kvtier.wire.stream import Stream

logger = get_logger(__name__)

OPENING, READY, SET_ASIDE, STOPPED = "opening", "ready", "set aside", "stopped"

OPEN_SECONDS = 60.0  # without a word from a mover that is opening its tier
PAUSES = 1.0, 60.0  # seconds before another is started: the first time, and the most
GRACE = 1.0  # seconds in which a process whose socket has ended ends too, and says why on stderr
STUCK_SECONDS = 10.0  # a killed process that is still there waits for a device
STOP_SECONDS = 3.0  # how long ``stop`` waits for a process that was told to end
BACKLOG = 256 << 20  # bytes waiting for a mover that is busy

Reply = m.Moved | m.Located
KINDS = {m.Read: "read", m.Write: "write", m.Look: "find"}


@dataclass(slots=True, eq=False)
class _Request:
    message: m.Read | m.Write | m.Look
    on_reply: Callable[[Reply | None], None]
    deadline: Timer
    asked: float  # clock time

    def faults(self, reply: Reply) -> str:
        """What is wrong with a reply, "" if nothing is."""
        if isinstance(self.message, m.Look) != isinstance(reply, m.Located):
            return f"it answered {type(self.message).__name__} with {type(reply).__name__}"
        if isinstance(reply, m.Moved) and len(reply.good) != len(self.message.moves):
            return f"it answered for {len(reply.good)} blocks where {len(self.message.moves)} were asked for"
        return ""


class Mover:
    """``state``: OPENING, READY, SET_ASIDE (a new process is started in a while) or STOPPED; ``reason``: of SET_ASIDE.

    kind: as ``runner`` knows it. options: of ``moving.Open``. pool_fd, pool_bytes: the memory it maps.
    on_message: what it says unasked. on_up: it is READY; what it said before came first. on_down(reason): it was READY
    or OPENING and is no more; requests under way are answered after that, when its process is reaped.
    spawn(kind, socket, pool_fd, pool_bytes): starts it; raises OSError. open_seconds: see OPEN_SECONDS.
    """

    def __init__(
        self,
        kind: str,
        options: Mapping[str, str | int | float | bool],
        pool_fd: int,
        pool_bytes: int,
        reactor: Reactor,
        on_message: Callable[[m.ToServer], None],
        on_up: Callable[[m.Opened], None],
        on_down: Callable[[str], None],
        spawn: Callable[[str, socket.socket, int, int], Child] = spawn_mover,
        open_seconds: float = OPEN_SECONDS,
    ):
        self.kind, self.state, self.reason = kind, STOPPED, ""
        self.restarts = self.timeouts = 0
        self.durations = {kind: Durations() for kind in KINDS.values()}  # of what was answered
        self._options, self._pool_fd, self._pool_bytes = dict(options), pool_fd, pool_bytes
        self._reactor, self._spawn, self._open_seconds = reactor, spawn, open_seconds
        self._on_message, self._on_up, self._on_down = on_message, on_up, on_down
        self._child: Child | None = None
        self._stream: Stream | None = None
        self._requests: dict[int, _Request] = {}
        self._last_id = 0
        self._pause = PAUSES[0]
        self._timer: Timer | None = None  # of OPENING: it takes too long. Of SET_ASIDE: the next step towards a new one
        self._good: Timer | None = None  # after it, what follows is a new fault
        self._said = ""  # the last reason that was logged
        self._explained = False  # what it said or did is the reason, whatever its exit status

    def start(self) -> None:
        """Begin; again after a pause where that fails. Idempotent."""
        if self.state == STOPPED:
            self._begin()

    def next_id(self) -> int:
        """For the next request's message; never used twice, also over restarts."""
        self._last_id += 1
        return self._last_id

    def send(self, message: m.Drop | m.Release | m.Lent | m.Coming) -> bool:
        """What has no answer. False: it is not READY."""
        return self.state == READY and self._stream.send(m.encode(message))

    def request(
        self, message: m.Read | m.Write | m.Look, seconds: float, on_reply: Callable[[Reply | None], None]
    ) -> None:
        """``on_reply`` is called once; with None if it failed as a whole, and then no process touches its slots any
        more. A mover that has not answered within ``seconds`` is set aside. Not READY: None, before this returns."""
        if self.state != READY:
            on_reply(None)
            return
        timer = self._reactor.call_later(seconds, lambda: self._too_late(message, seconds))
        self._requests[message.id] = _Request(message, on_reply, timer, time.monotonic())
        self._stream.send(m.encode(message))

    def set_aside(self, reason: str) -> None:
        """Not to be trusted for now. Nothing, unless it is OPENING or READY."""
        if self.state in (OPENING, READY):
            self._explained = True
            self._go_down(reason)
            self._say_reason()
            self._kill()

    def stop(self, seconds: float = GRACE) -> None:
        """For good. Waits ``seconds`` for the process to end by itself, STOP_SECONDS more for one killed."""
        if self.state == STOPPED:
            return
        up, self.state = self.state in (OPENING, READY), STOPPED
        self._cancel_timers()
        if self._child is not None:
            self._stream.close("the store ends")
            if not _ended(self._child, seconds):
                self._child.kill()
                if not _ended(self._child, STOP_SECONDS):
                    logger.warning(
                        "kvtier: the %s tier's process %d waits for its device and is left to itself",
                        self.kind,
                        self._child.pid,
                    )
            self._hear_stderr()
            self._close_child()
        if up:
            self._on_down("the store ends")
        self._fail_requests()

    # -- its life -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.state, self._timer, self._explained = OPENING, None, False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._child = self._spawn(self.kind, theirs, self._pool_fd, self._pool_bytes)
        except OSError as error:
            ours.close()
            self._go_down(f"its process could not be started: {error.strerror or error}")
            self._say_reason()
            self._pause_then_begin()
            return
        finally:
            theirs.close()
        self._stream = Stream(
            self._reactor, ours, self._on_frame, self._on_close, max_frame=m.MAX_FRAME, backlog=BACKLOG
        )
        child = self._child
        self._reactor.add_fd(child.ended, lambda events: self._reap())
        self._reactor.add_fd(child.stderr, lambda events: self._hear_stderr())
        self._stream.send(m.encode(m.Open(self._options, self._pool_bytes)))
        self._watch_opening()

    def _watch_opening(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._reactor.call_later(
            self._open_seconds, lambda: self.set_aside(f"opening it took more than {self._open_seconds:g} s")
        )

    def _too_late(self, message: m.Read | m.Write | m.Look, seconds: float) -> None:
        self.timeouts += 1
        self.set_aside(f"it has not answered {_in_words(message)} within {seconds:.0f} s")

    def _on_close(self, reason: str) -> None:
        if self.state in (OPENING, READY):
            # The process says why when it ends; one that only closed its socket is killed.
            self._go_down(reason)
            self._timer = self._reactor.call_later(GRACE, self._end_it)

    def _go_down(self, reason: str) -> None:
        self.state, self.reason = SET_ASIDE, reason
        self._cancel_timers()
        if self._child is not None:
            self._reactor.watch_fd(self._child.ended, zmq.POLLIN)
        for request in self._requests.values():
            request.deadline.cancel()
        self._on_down(reason)

    def _end_it(self) -> None:
        self._explained = True  # by how its socket ended: it has not ended by itself
        self._say_reason()
        self._kill()

    def _kill(self) -> None:
        self._child.kill()
        self._stream.close(self.reason)
        self._timer = self._reactor.call_later(STUCK_SECONDS, self._stuck)

    def _stuck(self) -> None:
        self._timer = None
        logger.warning(
            "kvtier: the %s tier's process %d was killed and is still there: it waits for its device; %d requests and "
            "their memory wait with it",
            self.kind,
            self._child.pid,
            len(self._requests),
        )

    def _reap(self) -> None:
        child = self._child
        if self.state in (OPENING, READY):
            # What it said at last comes first, and then its socket's end.
            self._reactor.watch_fd(child.ended, 0)
            return
        status = child.reap()
        if status is None:
            return
        self._hear_stderr()
        if not self._explained:
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            self.reason = f"its process ended ({how})" + (f": {child.last_words}" if child.last_words else "")
            self._say_reason()
        self._cancel_timers()
        self._stream.close(self.reason)
        self._close_child()
        self._pause_then_begin()
        self._fail_requests()

    def _close_child(self) -> None:
        child, self._child = self._child, None
        self._reactor.remove_fd(child.ended)
        self._reactor.remove_fd(child.stderr)
        child.close()

    def _pause_then_begin(self) -> None:
        self._timer = self._reactor.call_later(self._pause, self._begin_again)
        self._pause = min(2 * self._pause, PAUSES[1])

    def _begin_again(self) -> None:
        self.restarts += 1
        self._begin()

    def _proved_good(self) -> None:
        self._good, self._pause, self._said = None, PAUSES[0], ""

    def _cancel_timers(self) -> None:
        for timer in filter(None, (self._timer, self._good)):
            timer.cancel()
        self._timer = self._good = None

    def _fail_requests(self) -> None:
        requests, self._requests = self._requests, {}
        for request in requests.values():
            request.deadline.cancel()
            request.on_reply(None)

    # -- what it says -------------------------------------------------------------------------------------------

    def _on_frame(self, frame: bytes) -> None:
        try:
            message = m.decode_to_server(frame)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            self.set_aside(f"it sent what no mover sends: {error}")
            return
        try:
            self._hear(message)
        except Exception as error:
            logger.exception("kvtier: fault in handling what the %s tier said", self.kind)
            self.set_aside(f"what it said could not be handled: {type(error).__name__}: {error}")

    def _hear(self, message: m.ToServer) -> None:
        if isinstance(message, Reply):
            self._answered(message)
        elif isinstance(message, m.Refused):
            self.set_aside(message.reason)
        elif isinstance(message, m.Opened):
            self._opened(message)
        else:
            if self.state == OPENING:
                self._watch_opening()
            self._on_message(message)

    def _opened(self, message: m.Opened) -> None:
        if self.state == READY:
            self.set_aside("it says for the second time that it is open")
            return
        self._timer.cancel()
        self._timer = None
        self.state, self.reason = READY, ""
        self._good = self._reactor.call_later(PAUSES[1], self._proved_good)
        if self._said:
            logger.info("kvtier: the %s tier is back", self.kind)
            self._said = ""
        if message.note:
            logger.info("kvtier: the %s tier: %s", self.kind, message.note)
        self._on_up(message)

    def _answered(self, reply: Reply) -> None:
        request = self._requests.get(reply.id)
        fault = "it answered what nobody asked" if request is None else request.faults(reply)
        if fault:
            self.set_aside(fault)
            return
        del self._requests[reply.id]
        request.deadline.cancel()
        self.durations[KINDS[type(request.message)]].observe(time.monotonic() - request.asked)
        request.on_reply(reply)

    def _hear_stderr(self) -> None:
        for line in self._child.read_lines():
            logger.warning("kvtier: the %s tier's process %d: %s", self.kind, self._child.pid, line)
        if self._child.silent:
            self._reactor.remove_fd(self._child.stderr)

    def _say_reason(self) -> None:
        """Once, not at every attempt that ends the same way."""
        if self.reason != self._said:
            self._said = self.reason
            logger.warning("kvtier: the %s tier is set aside, and tried again later: %s", self.kind, self.reason)


def _ended(child: Child, seconds: float) -> bool:
    poller = select.poll()
    poller.register(child.ended, select.POLLIN)
    return bool(poller.poll(seconds * 1000)) and child.reap() is not None


def _in_words(message: m.Read | m.Write | m.Look) -> str:
    if isinstance(message, m.Look):
        return "a lookup"
    pages = sum(move.pages for move in message.moves)
    what = "read" if isinstance(message, m.Read) else "write"
    return f"a {what} of {len(message.moves)} blocks ({pages / 256:.1f} MiB)"
