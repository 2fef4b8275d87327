"""The client side of the connection to the node store. It never blocks, and works without a store.

Every request returns a :class:`Pending` at once. Its outcome is the store's answer, or Failed: without a store, after a
disconnect, or without an answer within ``lookup_timeout``.

A late answer fails its request alone; what it leases or reserves is given back when it arrives. If nothing at all came
in that time, the connection is closed, which ends its leases in the store. The client then reconnects with a growing
backoff. So a hanging store costs its clients one ``lookup_timeout``, not one per request.
"""

import itertools
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.index.presence_filter import PresenceView
from vllm_kvtier.store.launcher import Starter
from vllm_kvtier.store.memory.client_mapping import PoolMapping
from vllm_kvtier.wire.reactor import Reactor, Timer
from vllm_kvtier.wire.stream import Stream, StreamLimits

logger = get_logger(__name__)

RETRY_SECONDS = 0.05, 5.0  # first and longest backoff between connection attempts
REFUSED_SECONDS = 15.0  # backoff after a refusal, for example by a store of another version
CACHED_BYTES = 64 << 10  # of keys per message
# Reads of what has arrived, before a request counts as late: this process may have been stopped, not the store. It is
# bounded because a broken store may send forever.
MAX_LATE_READS = 64
_ID_MASK = (1 << 48) - 1  # of request ids


@dataclass(frozen=True)
class Failed:
    """Outcome of a request without an answer."""

    reason: str


Outcome = m.Found | m.Reserved | m.Done | m.Counts | m.Explained | Failed


class Pending:
    """The answer to a request. Any thread.

    ``outcome``: None until the answer arrives; then Found, Reserved, Done, Counts, Explained or Failed. ``session``:
    number of the connection. Leases and slots of the answer are only valid on it, so pass it with them
    (``release(lease, session)``, ``commit(slots, session)``).
    """

    __slots__ = ("outcome", "session", "deadline", "_callbacks")
    _lock = threading.Lock()  # one for all: it is held for a few instructions

    def __init__(self, session: int, deadline: float):
        self.outcome: Outcome | None = None
        self.session = session
        self.deadline = deadline
        self._callbacks: list[Callable[[Pending], None]] | None = None

    def wait(self, seconds: float) -> bool:
        """Block until the outcome is set, at most ``seconds``. Never on the reactor's thread."""
        if self.outcome is not None:
            return True
        done = threading.Event()
        self.then(lambda _: done.set())
        return done.wait(seconds)

    def then(self, callback: Callable[["Pending"], None]) -> None:
        """Call ``callback(self)`` on the reactor's thread when the outcome is set; at once if it is set already."""
        with self._lock:
            if self.outcome is None:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback(self)

    def resolve(self, outcome: Outcome) -> None:
        """Set the outcome; a second one is ignored. For the client only."""
        with self._lock:
            if self.outcome is not None:
                return
            self.outcome = outcome
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            try:
                callback(self)
            except Exception:
                logger.exception("kvtier: store client: unexpected error in a callback")


class StoreClient:
    """``on_change()`` is called on the reactor's thread when an attribute below has changed.

    Attributes (any thread): ``connected``; ``reason`` (why not connected, "" while connected); ``instance`` ("" while
    not connected); ``session`` (number of this connection, grows); ``pool_pages``, ``ready_pages`` (pushed by the store
    as memory becomes usable; 0 while not connected); ``tiers`` (names of the secondary tiers); ``only_named`` (those of
    them that find blocks only for lookups that name other nodes); ``places``, ``pid`` (as in Welcome); ``peer_count``
    (number of other engines with this one's ``compat_id``; 0 until ``present``); ``presence`` (which blocks the store's
    memory may have; None while not connected, or for a client that is no engine). ``on_changes``, to be set before
    ``follow``, gets Changes on the reactor's thread.

    ``launch`` is called on a thread of its own if no store listens at ``path``; it returns once one does, or raises
    KVTierError. ``dial``, to be set before ``start``, connects to the store. No method blocks. Requests without an
    answer (touch, release, commit, abort, discard, present, send_cached, follow, label) do nothing while not connected,
    or if ``session`` is given and not the current one.
    """

    def __init__(
        self,
        reactor: Reactor,
        path: str,
        hello: m.Hello,
        *,
        launch: Callable[[], None] | None = None,
        lookup_timeout: float = 2.0,
        on_change: Callable[[], None] | None = None,
    ):
        self.dial: Callable[[], socket.socket | None] = lambda: None  # None: by the path
        self.connected, self.reason = False, "not connected yet"
        self.instance, self.session, self.pool_pages, self.ready_pages = "", 0, 0, 0
        self.tiers: tuple[str, ...] = ()
        self.only_named: tuple[str, ...] = ()
        self.places: dict[str, str] = {}
        self.pid = 0
        self.peer_count = 0
        self.on_changes: Callable[[m.Changes], None] = lambda changes: None
        self.presence: PresenceView | None = None
        self._reactor, self._path, self._hello = reactor, path, m.encode(hello)
        self._max_fds = 2 if hello.kind == "engine" else 1
        self._starter = None if launch is None else Starter(reactor, launch, self._launched)
        self._lookup_timeout = lookup_timeout
        self._on_change = on_change or (lambda: None)
        self._lock = threading.Lock()  # guards the fields up to the blank line, and the order of requests
        self._stream: Stream | None = None  # None until Welcome
        self._presented = 0  # the session on which Present was sent
        self._pending: dict[int, Pending] = {}  # by request id, oldest first, answered in this order
        self._waiting: dict[int, Pending] = {}  # with ``wait_seconds``: answered in any order
        self._next_id = random.getrandbits(32)
        self._watched = False  # a timer watches the oldest request
        self._pool_fd = -1
        self._closed = False

        # Only the reactor's thread uses these.
        self._greeting: Stream | None = None
        self._greeting_timer: Timer | None = None
        self._retry_timer: Timer | None = None
        self._backoff = RETRY_SECONDS[0]
        self._refused = False  # the connection is being closed by a refusal
        self._received = 0.0  # when the latest frame came

    def start(self) -> None:
        """Start connecting; before or after the reactor's start, any thread."""
        self._reactor.on_stop(self._end)
        self._reactor.call_soon(self._connect)

    def close(self) -> None:
        """Disconnect for good; pending requests fail. Any thread; idempotent. The reactor's stop calls it too."""
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

    # -- requests -----------------------------------------------------------------------------------------------

    def lookup(
        self,
        namespace_id: bytes,
        block_hashes: bytes,
        start: int,
        pages_limit: int,
        wait_seconds: float = 0.0,
        nodes: Sequence[str] = (),
        key_mask: bytes = b"",
        hash_blocks_per_block: int = 1,
    ) -> Pending:
        """Outcome: Found, with a lease. Hashes beyond MAX_HASH_BLOCKS are left out. ``wait_seconds``: maximum wait for
        promotions. ``key_mask``, ``hash_blocks_per_block``: the directory query, as in Lookup; requires ``present``."""
        block_hashes, nodes = block_hashes[: m.MAX_HASH_BLOCKS * m.HASH_BYTES], list(nodes)
        return self._ask(
            lambda id: m.Lookup(
                id, namespace_id, block_hashes, start, pages_limit, wait_seconds, nodes, key_mask, hash_blocks_per_block
            ),
            wait_seconds,
        )

    def warm(self, namespace_id: bytes, block_hashes: bytes, pages_limit: int, nodes: Sequence[str] = ()) -> None:
        self._send(
            m.Prefetch(namespace_id, block_hashes[: m.MAX_HASH_BLOCKS * m.HASH_BYTES], pages_limit, list(nodes)), None
        )

    def reserve(
        self, namespace_id: bytes, tenant: bytes, groups: Sequence[int], hashes: bytes, parents: bytes, pages_limit: int
    ) -> Pending:
        """Outcome: Reserved. At most MAX_ITEMS at once."""
        if len(groups) > m.MAX_ITEMS:
            raise ValueError(f"{len(groups)} items in one reservation; at most {m.MAX_ITEMS} are allowed")
        return self._ask(lambda id: m.Reserve(id, namespace_id, tenant, list(groups), hashes, parents, pages_limit))

    def stat(self) -> Pending:
        """Outcome: Counts."""
        return self._ask(m.Stat)

    def inspect(self, namespace_id: bytes, block_hashes: bytes) -> Pending:
        """Outcome: Explained, without spans."""
        return self._ask(lambda id: m.Inspect(id, namespace_id, block_hashes))

    def explain(
        self,
        namespace_id: bytes,
        block_hashes: bytes,
        wait_seconds: float,
        key_mask: bytes = b"",
        hash_blocks_per_block: int = 1,
    ) -> Pending:
        """Outcome: Explained, with spans."""
        return self._ask(
            lambda id: m.Inspect(id, namespace_id, block_hashes, True, wait_seconds, key_mask, hash_blocks_per_block),
            wait_seconds,
        )

    def pin(self, namespace_id: bytes, block_hashes: bytes, pinned: bool = True) -> Pending:
        """Outcome: Done, with the number of blocks."""
        return self._ask(lambda id: m.Pin(id, namespace_id, block_hashes, pinned))

    def names_of(self, namespace_id: bytes) -> list[bytes]:
        """The id that the namespace has in each node's store."""
        return [namespace_id]

    def leave(self, namespace_id: bytes) -> Pending:
        """This engine uses the namespace no more. Outcome: Done, with the number of blocks that were unpinned."""
        return self._ask(lambda id: m.Pin(id, namespace_id, b"", False, leaves=True))

    def clear(self, namespace_id: bytes | None = None) -> Pending:
        """Outcome: Done, with the number of blocks."""
        return self._ask(lambda id: m.Clear(id, namespace_id))

    def touch(self, namespace_id: bytes, block_hashes: bytes) -> None:
        self._send(m.Touch(namespace_id, block_hashes), None)

    def release(self, lease: int, session: int | None = None) -> None:
        self._send(m.Release(lease), session)

    def commit(self, slots: Sequence[int], session: int | None = None) -> None:
        self._send(m.Commit(list(slots)), session)

    def abort(self, slots: Sequence[int], session: int | None = None) -> None:
        self._send(m.Abort(list(slots)), session)

    def discard(self, namespace_id: bytes, group: int, hash: bytes, slot: int, session: int | None = None) -> None:
        self._send(m.Discard(namespace_id, group, hash, slot), session)

    def present(self, compat_id: bytes, host: str, port: int, instance: str, session: int | None = None) -> None:
        """Send Present; to be repeated on each connection."""
        with self._lock:
            if self._stream is not None and session in (None, self.session):
                self._presented = self.session
                self._stream.send(m.encode(m.Present(compat_id, host, port, instance)))

    def send_cached(self, added: bytes, gone: bytes, session: int | None = None, anew: bool = False) -> bool:
        """Send Cached: packed keys, 8 bytes each. False: not sent, because not connected or not ``present`` on this
        connection (the store would close it)."""
        with self._lock:
            if self._stream is None or self._presented != self.session or session not in (None, self.session):
                return False
            parts = [(added, gone)] if added or gone or anew else []
            if len(added) + len(gone) > CACHED_BYTES:  # parts of a few milliseconds' work, so that others are served
                parts = [(added[at : at + CACHED_BYTES], b"") for at in range(0, len(added), CACHED_BYTES)]
                parts += [(b"", gone[at : at + CACHED_BYTES]) for at in range(0, len(gone), CACHED_BYTES)]
            for number, part in enumerate(parts):
                self._stream.send(m.encode(m.Cached(*part, anew and not number)))
            return True

    def follow(self, namespaces: Sequence[bytes], session: int | None = None) -> None:
        """Send Follow; to be repeated on each connection. ``on_changes`` gets the Changes."""
        self._send(m.Follow(list(namespaces)), session)

    def label(self, namespace_id: bytes, groups: Sequence[int], hashes: bytes, labels: Sequence[bytes]) -> None:
        """Send Labels; at most MAX_ITEMS at once, and less than MAX_FRAME bytes."""
        self._send(m.Labels(namespace_id, list(groups), hashes, list(labels)), None)

    def _ask(self, make: Callable[[int], msgspec.Struct], wait_seconds: float = 0.0) -> Pending:
        with self._lock:
            pending = Pending(self.session, time.monotonic() + self._lookup_timeout + wait_seconds)
            stream = self._stream
            if stream is not None:
                self._next_id = id = (self._next_id + 1) & _ID_MASK
                frame = m.encode(make(id))
                (self._waiting if wait_seconds else self._pending)[id] = pending
                stream.send(frame)  # after an error the stream closes, which ends the request
                if not self._watched:
                    self._watched = True
                    self._reactor.call_soon(self._watch)
                return pending
            reason = self.reason
        pending.resolve(Failed(reason))
        return pending

    def _send(self, message: msgspec.Struct, session: int | None) -> None:
        with self._lock:
            if self._stream is not None and session in (None, self.session):
                self._stream.send(m.encode(message))

    # -- the reactor's thread: connecting -----------------------------------------------------------------------

    def _connect(self) -> None:
        self._retry_timer = None
        if self._closed or self._stream is not None or self._greeting is not None:
            return
        sock = None
        try:
            sock = self.dial()
            if sock is None:
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
                sock.connect(self._path)
        except OSError as error:  # includes BlockingIOError: its queue of connections is full
            if sock is not None:
                sock.close()
            if isinstance(error, FileNotFoundError | ConnectionRefusedError):
                self._not_listening()
            else:
                self._disconnected(f"no connection to the node store at {self._path}: {error.strerror or error}")
            return
        stream = Stream(
            self._reactor,
            sock,
            lambda frame: self._on_frame(stream, frame),
            lambda reason: self._lost(stream, reason),
            StreamLimits(m.MAX_FRAME, max_fds=self._max_fds),
        )
        self._greeting = stream
        user, (_, owner) = os.getuid(), stream.peer()
        if user and owner not in (user, 0):  # as the store does: it would see this user's KV
            self._refused = True
            stream.close(f"it belongs to user {owner}, not to user {user}")
            return
        self._greeting_timer = self._reactor.call_later(
            self._lookup_timeout, lambda: stream.close("it does not answer Hello")
        )
        stream.send(self._hello)

    def _not_listening(self) -> None:
        if self._starter is None:
            self._disconnected(f"no node store listens at {self._path}; `kvtier store` starts one")
        else:
            self._starter.ended()
            # Go on trying: another process may start a store, and the start of this one may hang.
            self._disconnected(self._starter.start())

    def _launched(self, failure: str) -> None:
        if self._stream is not None or self._greeting is not None:
            return
        if failure:
            if self._starter is not None:
                self._starter.failed(failure)
            self._disconnected(failure)
            return
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._connect()

    def _disconnected(self, reason: str, backoff: float | None = None) -> None:
        """Set the reason and connect again after the backoff."""
        if reason != self.reason:
            self.reason = reason
            self._changed()
        if self._closed:
            return
        if backoff is None:
            backoff = self._backoff
            self._backoff = min(self._backoff * 2, RETRY_SECONDS[1])
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        # Random, so that the clients of a node do not reconnect at the same moment.
        self._retry_timer = self._reactor.call_later(backoff * random.uniform(0.8, 1.2), self._connect)

    def _changed(self) -> None:
        if self._closed:
            return
        try:
            self._on_change()
        except Exception:  # it must not end the connection or prevent the next attempt
            logger.exception("kvtier: store client: unexpected error in on_change")

    # -- the reactor's thread: connected ------------------------------------------------------------------------

    def _on_frame(self, stream: Stream, frame: bytes) -> None:
        try:
            reply = m.decode_reply(frame)
        except msgspec.DecodeError as error:
            hint = " (another version?)" if stream is self._greeting else ""
            stream.close(f"malformed message{hint}: {error}")
            return
        self._received = time.monotonic()
        if stream is self._greeting:
            self._greeted(stream, reply)
        elif isinstance(reply, m.Ready):
            self.pool_pages, self.ready_pages = reply.pool_pages, reply.ready_pages
            self._changed()
        elif isinstance(reply, m.PeerCount):
            self.peer_count = reply.others
            self._changed()
        elif isinstance(reply, m.Changes):
            self.on_changes(reply)
            stream.send(m.encode(m.ChangesAck()))
        elif isinstance(reply, m.Refused):
            self._refused = True
            stream.close(f"it refuses: {reply.reason}")
        elif isinstance(reply, m.Welcome):
            stream.close("it sent Welcome twice")
        else:
            with self._lock:
                pending = self._pending.pop(reply.id, None) or self._waiting.pop(reply.id, None)
            if pending is not None:
                pending.resolve(reply)
            elif isinstance(reply, m.Found) and reply.lease:
                stream.send(m.encode(m.Release(reply.lease)))
            elif isinstance(reply, m.Reserved) and (slots := [slot for slot in reply.slots if slot > 0]):
                stream.send(m.encode(m.Abort(slots)))

    def _greeted(self, stream: Stream, reply: m.Reply) -> None:
        if isinstance(reply, m.Refused):
            self._refused = True
            stream.close(f"it refuses: {reply.reason}")
            return
        fds = stream.take_fds()
        if not isinstance(reply, m.Welcome) or reply.protocol != m.PROTOCOL or not 0 < len(fds) <= self._max_fds:
            for fd in fds:
                os.close(fd)
            stream.close("it has another version, or sent an invalid Welcome")
            return
        try:
            presence = PresenceView(fds[1]) if len(fds) > 1 else None
        except KVTierError as error:
            os.close(fds[0])
            stream.close(str(error))
            return
        self._clear_greeting()
        self._backoff = RETRY_SECONDS[0]
        if self._starter is not None:
            self._starter.connected(reply.launched)
        with self._lock:
            self.connected, self.reason, self.instance = True, "", reply.instance
            self.tiers, self.only_named = tuple(reply.tiers), tuple(reply.only_named)
            self.places, self.pid = reply.places, reply.pid
            self.pool_pages, self.ready_pages = reply.pool_pages, reply.ready_pages
            self.session += 1
            self._pool_fd, self.presence = fds[0], presence
            self._stream = stream
        self._changed()

    def _clear_greeting(self) -> None:
        self._greeting = None
        if self._greeting_timer is not None:
            self._greeting_timer.cancel()
            self._greeting_timer = None

    def _lost(self, stream: Stream, reason: str) -> None:
        backoff = REFUSED_SECONDS if self._refused else None
        self._refused = False
        text = f"the node store at {self._path} is unavailable: {reason}"
        if stream is self._greeting:
            self._clear_greeting()
            if backoff is not None and self._starter is not None:
                self._starter.refused(text)
            self._disconnected(text, backoff)
            return
        if stream is not self._stream:
            return
        with self._lock:
            self._stream = None
            self.connected, self.reason, self.instance = False, text, ""
            self.pool_pages = self.ready_pages = self.peer_count = 0
            self.presence = None
            fd, self._pool_fd = self._pool_fd, -1
            pending = [*self._pending.values(), *self._waiting.values()]
            self._pending, self._waiting = {}, {}
        os.close(fd)
        for one in pending:
            one.resolve(Failed(text))
        self._changed()
        self._disconnected(text, backoff)

    def _watch(self, reads: int = 0) -> None:
        """One timer for all requests: of those answered in order the oldest is due first. ``reads``: since one is
        late."""
        with self._lock:
            due = [pending.deadline for pending in self._waiting.values()]
            due += [pending.deadline for pending in itertools.islice(self._pending.values(), 1)]
            if not due:
                self._watched = False
                return
            stream = self._stream
            now = time.monotonic()
            left = min(due) - now
        if left > 0:
            # At most lookup_timeout, because a request that is sent meanwhile may be due earlier.
            self._reactor.call_later(min(left, self._lookup_timeout), self._watch)
            return
        if stream is not None and reads < MAX_LATE_READS and stream.has_input():
            self._reactor.call_soon(lambda: self._watch(reads + 1))
            return
        reason = f"it has not answered for {self._lookup_timeout:g} s"
        if stream is not None and now - self._received >= self._lookup_timeout:
            stream.close(reason)
        else:
            self._fail_late(now, f"the node store at {self._path} is too slow: {reason}")
        self._reactor.call_soon(self._watch)

    def _fail_late(self, now: float, reason: str) -> None:
        late = []
        with self._lock:
            for requests in (self._pending, self._waiting):
                late += [requests.pop(id) for id in [id for id, each in requests.items() if each.deadline <= now]]
        for pending in late:
            pending.resolve(Failed(reason))

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
