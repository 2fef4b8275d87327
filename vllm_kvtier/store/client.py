"""A client's end of the connection to the node store: asks without waiting, and lives on without a store.

Every question gives a :class:`Pending` at once, which always ends: with the store's answer, or with Failed when
there is no store, it disconnects, or it does not answer within ``ask_timeout``.

A store that leaves a question unanswered for so long counts as gone: the connection is closed, so that what it
lent dies there if it ever wakes, and a new one is tried, at growing intervals. So a store that hangs costs its
clients one ``ask_timeout``, not one a question.
"""

import itertools
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from vllm_kvtier.logs import get_logger
from vllm_kvtier.store import messages as m
from vllm_kvtier.store.mapping import PoolMapping
from vllm_kvtier.store.pending import Failed, Pending
from vllm_kvtier.store.starting import Starter
from vllm_kvtier.wire.reactor import Reactor, Timer
from vllm_kvtier.wire.stream import Stream

logger = get_logger(__name__)

RETRY_SECONDS = 0.05, 5.0  # first and longest pause between two attempts to connect; doubled in between
REFUSED_SECONDS = 15.0  # a store of another version stays one until somebody replaces it, as an upgrade does
RESIDENT_BYTES = 64 << 10  # of keys a message
_MASK = (1 << 48) - 1  # of question ids

__all__ = ["Failed", "Pending", "StoreClient"]


class StoreClient:
    """``on_change()`` is called on the reactor's thread when any of the attributes below changed.

    Attributes (any thread): ``connected``; ``reason`` (why not connected, in words; "" while connected);
    ``instance`` ("" while not connected), ``session`` (number of this connection, grows), ``pool_pages``,
    ``ready_pages`` (pushed by the store as memory becomes usable; both 0 while not connected), ``tiers`` (names of
    those below its memory), ``company`` (how many others are present with this one's family; 0 until ``present``).
    ``on_changes``, to be set before ``follow``, hears on the reactor's thread what the store tells of spaces.

    ``launch`` is called on a thread of its own when nobody listens at ``path``; it returns once somebody does, or
    raises KVTierError. Nothing here blocks. Questions without an answer (touch, release, commit, abort, discard,
    present, resident, follow, label) do nothing while not connected, or when ``session`` is given and is not the
    current one.
    """

    def __init__(
        self,
        reactor: Reactor,
        path: str,
        hello: m.Hello,
        *,
        launch: Callable[[], None] | None = None,
        ask_timeout: float = 2.0,
        on_change: Callable[[], None] | None = None,
    ):
        self.connected, self.reason = False, "not connected yet"
        self.instance, self.session, self.pool_pages, self.ready_pages = "", 0, 0, 0
        self.tiers: tuple[str, ...] = ()
        self.company = 0
        self.on_changes: Callable[[m.Changes], None] = lambda changes: None
        self._reactor, self._path, self._hello = reactor, path, m.encode(hello)
        self._starter = None if launch is None else Starter(reactor, launch, self._launched)
        self._ask_timeout = ask_timeout
        self._on_change = on_change or (lambda: None)
        self._lock = threading.Lock()  # guards what is above, below, and the order of questions on the stream
        self._stream: Stream | None = None  # None until welcomed
        self._presented = 0  # the session that knows of our resident blocks
        self._pending: dict[int, Pending] = {}  # by question, oldest first, and so answered
        self._patient: dict[int, Pending] = {}  # answered in any order
        self._next_id = random.getrandbits(32)
        self._watched = False  # a timer looks after the oldest question
        self._pool_fd = -1
        self._closed = False

        # Only the reactor's thread uses these.
        self._greeting: Stream | None = None
        self._greeting_timer: Timer | None = None
        self._retry_timer: Timer | None = None
        self._pause = RETRY_SECONDS[0]
        self._refused = False  # the end that comes is a refusal

    def start(self) -> None:
        """Begin to connect; before or after the reactor's start, any thread."""
        self._reactor.on_stop(self._end)
        self._reactor.call_soon(self._connect)

    def close(self) -> None:
        """Say goodbye for good; any thread; idempotent. What is pending fails. The reactor's stop does it too."""
        self._reactor.call_soon(self._end)

    def open_pool(self) -> PoolMapping | None:
        """Map the connected instance's memory; the caller closes it. None while not connected. Any thread.

        Raises KVTierError if the memory cannot be mapped.
        """
        with self._lock:
            if not self.connected:
                return None
            fd, nbytes, instance = os.dup(self._pool_fd), self.pool_pages * m.PAGE, self.instance
        return PoolMapping(fd, nbytes, instance)

    # -- questions ----------------------------------------------------------------------------------------------

    def lookup(
        self,
        space: bytes,
        chain: bytes,
        start: int,
        pages_limit: int,
        patience: float = 0.0,
        nodes: Sequence[str] = (),
        mix: bytes = b"",
        stride: int = 1,
    ) -> Pending:
        """Outcome: messages.Found, with a lease on what was found. Of a chain longer than messages.MAX_UNITS only
        so much is asked for. ``patience``: seconds that the store may wait for what comes up from below. ``mix``,
        ``stride``: which resident blocks holders are asked for, as in messages.Lookup; nobody before ``present``."""
        chain, nodes = chain[: m.MAX_UNITS * m.HASH], list(nodes)
        return self._ask(
            lambda id: m.Lookup(id, space, chain, start, pages_limit, patience, nodes, mix, stride), patience
        )

    def warm(self, space: bytes, chain: bytes, pages_limit: int, nodes: Sequence[str] = ()) -> None:
        self._tell(m.Warm(space, chain[: m.MAX_UNITS * m.HASH], pages_limit, list(nodes)), None)

    def reserve(
        self, space: bytes, tenant: bytes, groups: Sequence[int], hashes: bytes, parents: bytes, pages_limit: int
    ) -> Pending:
        """Outcome: messages.Reserved. At most messages.MAX_ITEMS at once."""
        if len(groups) > m.MAX_ITEMS:
            raise ValueError(f"{len(groups)} items in one reservation, at most {m.MAX_ITEMS} are possible")
        return self._ask(lambda id: m.Reserve(id, space, tenant, list(groups), hashes, parents, pages_limit))

    def stat(self) -> Pending:
        """Outcome: messages.Counts."""
        return self._ask(m.Stat)

    def inspect(self, space: bytes, chain: bytes) -> Pending:
        """Outcome: messages.Holding."""
        return self._ask(lambda id: m.Inspect(id, space, chain))

    def explain(self, space: bytes, chain: bytes, patience: float, mix: bytes = b"", stride: int = 1) -> Pending:
        """Outcome: messages.Holding, with all that Inspect says of ``spans``."""
        return self._ask(lambda id: m.Inspect(id, space, chain, True, patience, mix, stride), patience)

    def pin(self, space: bytes, chain: bytes, pinned: bool = True) -> Pending:
        """Outcome: messages.Done, with the number of blocks."""
        return self._ask(lambda id: m.Pin(id, space, chain, pinned))

    def clear(self, space: bytes | None = None) -> Pending:
        """Outcome: messages.Done, with the number of blocks."""
        return self._ask(lambda id: m.Clear(id, space))

    def touch(self, space: bytes, chain: bytes) -> None:
        self._tell(m.Touch(space, chain), None)

    def release(self, lease: int, session: int | None = None) -> None:
        self._tell(m.Release(lease), session)

    def commit(self, slots: Sequence[int], session: int | None = None) -> None:
        self._tell(m.Commit(list(slots)), session)

    def abort(self, slots: Sequence[int], session: int | None = None) -> None:
        self._tell(m.Abort(list(slots)), session)

    def discard(self, space: bytes, group: int, hash: bytes, slot: int, session: int | None = None) -> None:
        self._tell(m.Discard(space, group, hash, slot), session)

    def present(self, family: bytes, host: str, port: int, instance: str, session: int | None = None) -> None:
        """Others of the family may ask for our resident blocks there. Anew on each connection; see messages.Present."""
        with self._lock:
            if self._stream is not None and session in (None, self.session):
                self._presented = self.session
                self._stream.send(m.encode(m.Present(family, host, port, instance)))

    def resident(self, added: bytes, gone: bytes, session: int | None = None, anew: bool = False) -> bool:
        """These became resident, then these ceased to be: packed keys, 8 bytes each; ``anew``: nothing else is. False:
        not told, because not connected or not ``present`` on this connection (which would cost the connection)."""
        with self._lock:
            if self._stream is None or self._presented != self.session or session not in (None, self.session):
                return False
            parts = [(added, gone)] if added or gone or anew else []
            if len(added) + len(gone) > RESIDENT_BYTES:  # a few milliseconds' work each, others' questions in between
                parts = [(added[at : at + RESIDENT_BYTES], b"") for at in range(0, len(added), RESIDENT_BYTES)]
                parts += [(b"", gone[at : at + RESIDENT_BYTES]) for at in range(0, len(gone), RESIDENT_BYTES)]
            for number, part in enumerate(parts):
                self._stream.send(m.encode(m.Resident(*part, anew and not number)))
            return True

    def follow(self, spaces: Sequence[bytes], session: int | None = None) -> None:
        """See messages.Follow. Anew on each connection; ``on_changes`` hears what becomes of them."""
        self._tell(m.Follow(list(spaces)), session)

    def label(self, space: bytes, groups: Sequence[int], hashes: bytes, labels: Sequence[bytes]) -> None:
        """See messages.Labels; at most messages.MAX_ITEMS at once, and less than messages.MAX_FRAME bytes."""
        self._tell(m.Labels(space, list(groups), hashes, list(labels)), None)

    def _ask(self, make: Callable[[int], msgspec.Struct], patience: float = 0.0) -> Pending:
        with self._lock:
            pending = Pending(self.session, time.monotonic() + self._ask_timeout + patience)
            stream = self._stream
            if stream is not None:
                self._next_id = id = (self._next_id + 1) & _MASK
                frame = m.encode(make(id))
                (self._patient if patience else self._pending)[id] = pending
                stream.send(frame)  # if it fails, the stream's end ends the question
                if not self._watched:
                    self._watched = True
                    self._reactor.call_soon(self._watch)
                return pending
            reason = self.reason
        pending.resolve(Failed(reason))
        return pending

    def _tell(self, message: msgspec.Struct, session: int | None) -> None:
        with self._lock:
            if self._stream is not None and session in (None, self.session):
                self._stream.send(m.encode(message))

    # -- the reactor's thread: connecting -----------------------------------------------------------------------

    def _connect(self) -> None:
        self._retry_timer = None
        if self._closed or self._stream is not None or self._greeting is not None:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.connect(self._path)
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            self._nobody_listens()
            return
        except OSError as error:  # BlockingIOError too: its queue of connections is full
            sock.close()
            self._disconnected(f"no connection to the node store at {self._path}: {error.strerror or error}")
            return
        stream = Stream(
            self._reactor,
            sock,
            lambda frame: self._hear(stream, frame),
            lambda reason: self._lost(stream, reason),
            max_frame=m.MAX_FRAME,
            max_fds=1,
        )
        self._greeting = stream
        self._greeting_timer = self._reactor.call_later(
            self._ask_timeout, lambda: stream.close("it does not answer a greeting")
        )
        stream.send(self._hello)

    def _nobody_listens(self) -> None:
        if self._starter is None:
            self._disconnected(f"no node store listens at {self._path}; `kvtier store` starts one")
        else:
            # Tried again meanwhile: somebody else may bring one up, and whoever is starting ours may hang.
            self._disconnected(self._starter.start())

    def _launched(self, failure: str) -> None:
        if self._stream is not None or self._greeting is not None:
            return
        if failure:
            self._starter.failed(failure)
            self._disconnected(failure)
            return
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._connect()

    def _disconnected(self, reason: str, pause: float | None = None) -> None:
        """State the reason and try again later."""
        self._set_reason(reason)
        if self._closed:
            return
        if pause is None:
            pause = self._pause
            self._pause = min(self._pause * 2, RETRY_SECONDS[1])
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        # Not all clients of a node at the same moment.
        self._retry_timer = self._reactor.call_later(pause * random.uniform(0.8, 1.2), self._connect)

    def _set_reason(self, reason: str) -> None:
        if reason != self.reason:
            self.reason = reason
            self._changed()

    def _changed(self) -> None:
        if self._closed:
            return
        try:
            self._on_change()
        except Exception:  # it must not cost the connection, or the next attempt at one
            logger.exception("kvtier: what was to follow a change of the node store failed")

    # -- the reactor's thread: connected ------------------------------------------------------------------------

    def _hear(self, stream: Stream, frame: bytes) -> None:
        try:
            reply = m.decode_reply(frame)
        except msgspec.DecodeError as error:
            other = "is of another version or " if stream is self._greeting else ""
            stream.close(f"it {other}sends nonsense: {error}")
            return
        if stream is self._greeting:
            self._greeted(stream, reply)
        elif isinstance(reply, m.Ready):
            self.pool_pages, self.ready_pages = reply.pool_pages, reply.ready_pages
            self._changed()
        elif isinstance(reply, m.Company):
            self.company = reply.others
            self._changed()
        elif isinstance(reply, m.Changes):
            self.on_changes(reply)
            stream.send(m.encode(m.Heard()))
        elif isinstance(reply, m.Refused):
            self._refused = True
            stream.close(f"it refuses: {reply.reason}")
        elif isinstance(reply, m.Welcome):
            stream.close("it greets twice")
        else:
            with self._lock:
                pending = self._pending.pop(reply.id, None) or self._patient.pop(reply.id, None)
            if pending is not None:
                pending.resolve(reply)

    def _greeted(self, stream: Stream, reply: m.Reply) -> None:
        if isinstance(reply, m.Refused):
            self._refused = True
            stream.close(f"it refuses: {reply.reason}")
            return
        fds = stream.take_fds()
        if not isinstance(reply, m.Welcome) or reply.protocol != m.PROTOCOL or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            stream.close("it is of another version or sends nonsense")
            return
        self._forget_greeting()
        self._pause = RETRY_SECONDS[0]
        if self._starter is not None:
            self._starter.succeeded()
        with self._lock:
            self.connected, self.reason, self.instance = True, "", reply.instance
            self.tiers = tuple(reply.tiers)
            self.pool_pages, self.ready_pages = reply.pool_pages, reply.ready_pages
            self.session += 1
            self._pool_fd = fds[0]
            self._stream = stream
        self._changed()

    def _forget_greeting(self) -> None:
        self._greeting = None
        if self._greeting_timer is not None:
            self._greeting_timer.cancel()
            self._greeting_timer = None

    def _lost(self, stream: Stream, reason: str) -> None:
        pause = REFUSED_SECONDS if self._refused else None
        self._refused = False
        words = f"the node store at {self._path} is no use: {reason}"
        if stream is self._greeting:
            self._forget_greeting()
            self._disconnected(words, pause)
            return
        if stream is not self._stream:
            return
        with self._lock:
            self._stream = None
            self.connected, self.reason, self.instance = False, words, ""
            self.pool_pages = self.ready_pages = self.company = 0
            fd, self._pool_fd = self._pool_fd, -1
            pending = [*self._pending.values(), *self._patient.values()]
            self._pending, self._patient = {}, {}
        os.close(fd)
        for one in pending:
            one.resolve(Failed(words))
        self._changed()
        self._disconnected(words, pause)

    def _watch(self) -> None:
        """One timer for all questions: of those answered in order the oldest is due first."""
        with self._lock:
            due = [pending.deadline for pending in self._patient.values()]
            due += [pending.deadline for pending in itertools.islice(self._pending.values(), 1)]
            if not due:
                self._watched = False
                return
            stream = self._stream
            left = min(due) - time.monotonic()
        if left > 0:
            # Not longer than a question that is asked meanwhile may take.
            self._reactor.call_later(min(left, self._ask_timeout), self._watch)
            return
        if stream is not None:
            stream.close(f"it has not answered for {self._ask_timeout:g} s")
        self._reactor.call_soon(self._watch)

    def _end(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        for stream in (self._greeting, self._stream):
            if stream is not None:
                stream.close("closed here")
        self.reason = "closed here"
