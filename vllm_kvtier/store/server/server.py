"""The node store's process: one thread answers clients from the index. It never reads the contents of slots.

Leases and reservations belong to a connection and end with it. A client that sends an invalid message is disconnected;
other clients are not affected.
"""

import gc
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_kvtier import __version__
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger, open_files_again
from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.eviction import DEFAULT_POLICY, POLICIES
from vllm_kvtier.store.index.index import Index, IndexLimits
from vllm_kvtier.store.index.presence_filter import PresenceFilter
from vllm_kvtier.store.index.removal_history import RemovalHistory
from vllm_kvtier.store.index.types import BadRequest, Found
from vllm_kvtier.store.memory.memory_limits import MemoryInUse, format_bytes, memory_limits, pool_bytes
from vllm_kvtier.store.memory.pool_memory import PoolMemory
from vllm_kvtier.store.memory.slot_pool import SlotPool
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.server import listen_socket
from vllm_kvtier.store.server.event_feed import EventFeed
from vllm_kvtier.store.server.explain_query import ExplainQuery
from vllm_kvtier.store.server.peer_directory import PeerDirectoryService, directory_query
from vllm_kvtier.store.tiers.base import Want
from vllm_kvtier.store.tiers.read_time import FINE_BOUNDS, Durations
from vllm_kvtier.store.tiers.tier_stack import bytes_beside_pool, open_tiers
from vllm_kvtier.wire.reactor import Reactor, Timer
from vllm_kvtier.wire.stream import Stream, StreamLimits, accept

if TYPE_CHECKING:
    from vllm_kvtier.store.server.metrics import MetricsServer

logger = get_logger(__name__)

# An operator's store waits so long for its memory: engines keep that of the one before for some seconds. What engines
# launch does not: they try again, and log why it did not start.
IN_USE_SECONDS, IN_USE_POLL_SECONDS = 60.0, 2.0
HELLO_SECONDS = 10.0  # after which a connection without Hello is closed
# Between two looks at the socket's file. A store that is started where it is gone waits END_SECONDS for this one's end.
SOCKET_SECONDS = 5.0
MAX_CLIENTS = 512
TICK_SECONDS = 0.02, 5.0  # minimum and maximum between two checks of the index's deadlines
CLEAR_STEP = 2048  # blocks removed before other messages are handled: some 15 ms
_FOR_ALL = (m.Pin, m.Clear, m.Stat, m.Inspect)  # other messages are for engines only


@dataclass(eq=False)
class _Client:
    number: int
    stream: Stream
    hello: m.Hello | None = None
    greeting: Timer | None = None
    namespaces: set[bytes] = field(default_factory=set)  # that an engine uses

    def __str__(self) -> str:
        return f"{self.hello.kind} {self.hello.name} (pid {self.hello.pid})" if self.hello else "a client"


class StoreServer:
    """Serves ``path`` from ``start`` to ``stop``. ``on_idle`` is called on the reactor's thread after ``idle_seconds``
    without an engine or worker, and without a lease for another node; new clients are refused from then on.
    ``launched``: by an engine. Such a store makes way for engines of another protocol once it has none of its own.

    Raises listen_socket.ServedAlready if another process serves the path, ConfigError if the pool does not fit, and
    KVTierError otherwise.
    """

    def __init__(
        self, path: str, options: StoreOptions, on_idle: Callable[[], object] = lambda: None, launched: bool = True
    ):
        self.path, self.options, self.instance = path, options, uuid.uuid4().hex
        self._on_idle, self._launched = on_idle, launched
        self.policy = options.policy or DEFAULT_POLICY
        self._tick: Timer | None = None
        with ExitStack() as cleanup:
            self._lock = listen_socket.take(path)
            cleanup.callback(os.close, self._lock)
            self.memory = PoolMemory(
                _pool_bytes(options, 0.0 if launched else IN_USE_SECONDS),
                huge_pages=options.huge_pages,
                interleave=options.numa == "interleave",
            )
            cleanup.callback(self.memory.close)
            if not self.memory.huge_pages:  # those that are free may be forbidden; then it must fit without them
                _pool_bytes(replace(options, huge_pages="never"), 0.0)
            self._listener = listen_socket.listen(path)
            self._socket_file = listen_socket.file_id(path)
            cleanup.callback(self._listener.close)
            self.reactor = Reactor("kvtier-store")
            self.index = Index(
                SlotPool(self.memory.nbytes // m.PAGE, m.PIECE_BYTES // m.PAGE),
                POLICIES[self.policy],
                time.monotonic,
                IndexLimits(
                    options.lease_seconds,
                    options.reserve_seconds,
                    options.pin_share,
                    options.tenant_share,
                    options.state_share,
                ),
            )
            self.index.removal_history = RemovalHistory(time.monotonic)
            self._presence = PresenceFilter()
            cleanup.callback(self._presence.close)
            self.index.watches.append(self._presence)
            self.tiers = open_tiers(options, self.index, self.memory, self.reactor, self._watch_deadlines)
            listen_socket.sign(self._lock)
            cleanup.pop_all()
        self._started = time.monotonic()
        self._clients: dict[int, _Client] = {}
        self._next_client = 1
        self._peer_directory = PeerDirectoryService(self._send, self.reactor.call_soon)
        self.changes = EventFeed(self.index, self.tiers.all, self._send, self.reactor.call_soon)
        self._explain_query = ExplainQuery(self.index, self.tiers.all, self.reactor)
        self._idle: Timer | None = None
        self._socket_watch = self.reactor.call_later(SOCKET_SECONDS, self._watch_socket)
        self._unreachable = False  # its socket is gone, and could not be made again
        self._metrics: MetricsServer | None = None
        # Any: each handler takes the message type that is its key.
        self._handlers: dict[type[m.Request], Callable[[_Client, Any], object]] = {
            m.Lookup: self._lookup,
            m.Prefetch: self._prefetch,
            m.Touch: lambda c, r: self.index.touch(c.number, r.namespace_id, r.block_hashes),
            m.Release: lambda c, r: self.index.release(c.number, r.lease),
            m.Reserve: self._reserve,
            m.Commit: lambda c, r: self.index.commit(c.number, r.slots),
            m.Abort: lambda c, r: self.index.abort(c.number, r.slots),
            m.Discard: self._discard,
            m.Pin: self._pin,
            m.Clear: self._clear,
            m.Stat: self._stat,
            m.Inspect: self._inspect,
            m.Present: lambda c, r: self._peer_directory.present(c.number, r),
            m.Cached: lambda c, r: self._peer_directory.cached(c.number, r),
            m.Follow: lambda c, r: self.changes.follow(c.number, r.namespaces),
            m.Labels: lambda c, r: self.changes.label(c.number, r),
            m.ChangesAck: lambda c, r: self.changes.acknowledged(c.number),
        }
        self._handling = {kind: Durations(bounds=FINE_BOUNDS) for kind in self._handlers}
        self.reactor.on_stop(self._close)

    def start(self) -> None:
        self.reactor.add_fd(self._listener.fileno(), lambda events: self._accept())
        self._watch_idle()
        self.reactor.call_soon(self.tiers.start)
        self.reactor.start()
        self.memory.start(lambda: self.reactor.call_soon(self._progress))
        if self.options.metrics_port:
            from vllm_kvtier.store.server import metrics  # imported on use, so that the store starts faster

            self._metrics = metrics.serve(
                self.options.metrics_host,
                self.options.metrics_port,
                self.reactor,
                lambda: metrics.State(self._counts(), self.tiers.durations(), self._handled()),
                self.options.show_hidden_metrics,
            )

    def stop(self) -> None:
        """Close all connections, the socket and the lock. Idempotent."""
        self.reactor.stop()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    # -- connections --------------------------------------------------------------------------------------------

    def _watch_socket(self) -> None:
        """Listen anew if the socket's file was removed: by the user's last logout, with the runtime directory, or by
        what cleans /tmp. Where another store serves by then, that one stays."""
        self._socket_watch = self.reactor.call_later(SOCKET_SECONDS, self._watch_socket)
        try:
            if listen_socket.file_id(self.path) == self._socket_file:
                return
            lock, listener = listen_socket.listen_again(self.path, self._lock)
        except (KVTierError, OSError) as error:
            if not self._unreachable:
                logger.warning("kvtier: store: its socket was removed (%s); new engines cannot find it", error)
            self._unreachable = True
            return
        self._stop_listening()
        if lock != self._lock:
            os.close(self._lock)
        self._lock, self._listener, self._unreachable = lock, listener, False
        self._socket_file = listen_socket.file_id(self.path)
        self.reactor.add_fd(listener.fileno(), lambda events: self._accept())
        listen_socket.sign(lock)
        open_files_again()  # the log lies beside the socket, mostly
        logger.info("kvtier: store: its socket was removed; it listens at %s again", self.path)

    def _stop_listening(self) -> None:
        self.reactor.remove_fd(self._listener.fileno())
        self._listener.close()

    def _accept(self) -> None:
        for sock in accept(self.reactor, self._listener):
            self._add_client(sock)

    def _add_client(self, sock: socket.socket) -> None:
        number, self._next_client = self._next_client, self._next_client + 1
        client = _Client(number, None)  # type: ignore[arg-type]  # one line below
        client.stream = Stream(
            self.reactor,
            sock,
            lambda frame: self._on_frame(client, frame),
            lambda reason: self._gone(client, reason),
            StreamLimits(m.MAX_FRAME),
        )
        self._clients[number] = client
        client.greeting = self.reactor.call_later(HELLO_SECONDS, lambda: client.stream.close("it sent no Hello"))
        _, uid = client.stream.peer()
        if uid not in (os.getuid(), 0):
            self._refuse(client, f"this store belongs to user {os.getuid()}, not to user {uid}")
        elif len(self._clients) > MAX_CLIENTS:
            self._refuse(client, f"{MAX_CLIENTS} clients are connected already")

    def _refuse(self, client: _Client, reason: str) -> None:
        client.stream.send(m.encode(m.Refused(reason)))
        client.stream.close(f"refused: {reason}")

    def _gone(self, client: _Client, reason: str) -> None:
        self._clients.pop(client.number, None)
        if client.greeting is not None:
            client.greeting.cancel()
        self.tiers.remove_client(client.number)
        self._take_steps(self.index.disconnect_in_steps(client.number))
        self._peer_directory.left(client.number)
        self.changes.left(client.number)
        if client.hello is not None and client.hello.kind != "tool":
            logger.info("kvtier: store: %s disconnected (%s)", client, reason)
        else:
            logger.debug("kvtier: store: %s disconnected (%s)", client, reason)
        self._watch_idle()

    def _used(self) -> bool:
        """Tools (statistics, clear) do not keep the store alive."""
        return any(c.hello is not None and c.hello.kind != "tool" for c in self._clients.values())

    def _watch_idle(self) -> None:
        """Start or stop the idle timer."""
        used = self._used()
        if used and self._idle is not None:
            self._idle.cancel()
            self._idle = None
        elif not used and self._idle is None and self.options.idle_seconds:
            leases = self.tiers.leases_granted
            self._idle = self.reactor.call_later(self.options.idle_seconds, lambda: self._end_idle(leases))

    def _end_idle(self, leases: int) -> None:
        if self.tiers.leases_granted > leases:  # other nodes have used it meanwhile
            self._idle = None
            self._watch_idle()
            return
        self._end(f"unused for {self.options.idle_seconds:g} s")

    def _end(self, reason: str) -> None:
        logger.info("kvtier: store: %s; it ends", reason)
        self._stop_listening()  # a new client fails at once, and starts another store
        self._socket_watch.cancel()
        self._on_idle()

    # -- messages -----------------------------------------------------------------------------------------------

    def _on_frame(self, client: _Client, frame: bytes) -> None:
        try:
            if client.hello is None:
                self._greet(client, frame)
                return
            request = m.decode_request(frame)
            handler = self._handlers.get(type(request))
            if handler is None or (client.hello.kind != "engine" and not isinstance(request, _FOR_ALL)):
                raise BadRequest(f"a connected {client.hello.kind} must not send {type(request).__name__}")
            nbytes = len(getattr(request, "block_hashes", b""))
            if nbytes % m.HASH_BYTES:
                raise BadRequest(f"block hashes of {nbytes} bytes, not a multiple of {m.HASH_BYTES}")
            if client.hello.kind == "engine" and (namespace_id := getattr(request, "namespace_id", None)):
                client.namespaces.add(namespace_id)
            began = time.monotonic()
            handler(client, request)
            self._handling[type(request)].observe(time.monotonic() - began)
        except (msgspec.DecodeError, BadRequest) as error:
            if client.hello is None:
                self._refuse(client, f"no Hello of protocol {m.PROTOCOL} ({error})"[:1000])
            else:
                logger.warning("kvtier: store: %s sent an invalid message (%s); disconnected", client, error)
                self._refuse(client, f"{error}"[:1000])

    def _greet(self, client: _Client, frame: bytes) -> None:
        any_hello = m.decode_any_hello(frame)
        if any_hello.protocol != m.PROTOCOL:
            self._refuse(
                client,
                f"the running store is vllm-kvtier {__version__} with protocol {m.PROTOCOL}, the client is "
                f"{any_hello.version or 'unknown'} with protocol {any_hello.protocol}; "
                + (
                    "it ends once its own engines have left"
                    if self._launched
                    else f"stop it (pid {os.getpid()}) and run one of the engines' version"
                ),
            )
            if self._launched and any_hello.kind != "tool" and not self._used():
                self._end(f"only engines of protocol {any_hello.protocol} ask for it")
            return
        hello = m.decode_request(frame)
        assert isinstance(hello, m.Hello)  # of its tag
        self.index.connect(client.number, hello.hash_block_size, hello.groups)
        client.hello = hello
        if client.greeting is not None:
            client.greeting.cancel()
        welcome = m.Welcome(
            protocol=m.PROTOCOL,
            version=__version__,
            instance=self.instance,
            pid=os.getpid(),
            pool_pages=self.memory.usable // m.PAGE,
            ready_pages=self.memory.ready // m.PAGE,
            huge_pages=self.memory.huge_pages,
            tiers=self.tiers.names,
            launched=self._launched,
            only_named=self.tiers.only_named,
            places=self.options.places(),
        )
        fds = [self.memory.fd, self._presence.fd] if hello.kind == "engine" else [self.memory.fd]
        client.stream.send(m.encode(welcome), fds)
        self._watch_idle()
        logger.log(logging.DEBUG if hello.kind == "tool" else logging.INFO, "kvtier: store: %s connected", client)

    def _lookup(self, client: _Client, r: m.Lookup) -> None:
        query = directory_query(r.block_hashes, r.start, r.key_mask, r.hash_blocks_per_block)

        def answer(found: Found, promotion: m.TierQuery | None) -> None:
            holders = self._peer_directory.holders(client.number, query)
            reply = m.Found(r.id, found.lease, found.num_hash_blocks, found.slots, promotion, holders)
            client.stream.send(m.encode(reply))
            self._watch_deadlines()

        want = _want(client, r.namespace_id, r.block_hashes, r.start, r.nodes)
        self.tiers.lookup(client.number, want, r.pages_limit, r.wait_seconds, answer)

    def _prefetch(self, client: _Client, r: m.Prefetch) -> None:
        self.tiers.prefetch(_want(client, r.namespace_id, r.block_hashes, 0, r.nodes), r.pages_limit)

    def _discard(self, client: _Client, r: m.Discard) -> None:
        """Also in the secondary tiers, from which the corrupt copy may have been promoted; but not if the block is no
        longer in that slot. An engine sends this before it ends its lease: the lease has expired, and what did not
        match may have been another block."""
        if self.index.discard(client.number, r.namespace_id, r.group, r.hash, r.slot):
            self.tiers.discard(r.namespace_id, r.group, r.hash)

    def _reserve(self, client: _Client, r: m.Reserve) -> None:
        slots = self.index.reserve(
            client.number, r.namespace_id, r.tenant, r.groups, r.hashes, r.parents, r.pages_limit
        )
        client.stream.send(m.encode(m.Reserved(r.id, slots)))
        self._watch_deadlines()

    def _pin(self, client: _Client, r: m.Pin) -> None:
        left, reason = 0, ""
        if not r.leaves:
            count, left = self.index.pin(client.number, r.namespace_id, r.block_hashes, r.pinned, self._in_use)
        else:
            client.namespaces.discard(r.namespace_id)
            count = 0 if self._in_use(r.namespace_id) else self.index.unpin_namespace(r.namespace_id)
        if left:
            reason = f"{count} blocks are pinned and {left} are not: pinned blocks may hold no more than "
            reason += f"{self.options.pin_share:.0%} of the memory (pin_share), and do. Unpin other prompts"
        client.stream.send(m.encode(m.Done(r.id, count, reason)))

    def _in_use(self, namespace_id: bytes) -> bool:
        """By a connected engine."""
        return any(namespace_id in client.namespaces for client in self._clients.values())

    def _clear(self, client: _Client, r: m.Clear) -> None:
        self._take_steps(self._clear_in_steps(client, r))

    def _take_steps(self, steps: Iterator[None]) -> None:
        """Other messages are handled between."""
        for _ in steps:
            self.reactor.call_soon(lambda: self._take_steps(steps))
            return

    def _clear_in_steps(self, client: _Client, r: m.Clear) -> Iterator[None]:
        count = yield from self.index.clear_in_steps(r.namespace_id, CLEAR_STEP)
        yield from self.tiers.clear_in_steps(r.namespace_id)
        count += self.index.clear(r.namespace_id)  # what was stored or promoted meanwhile, and now all at once
        self.tiers.clear(r.namespace_id)
        what = f"namespace {r.namespace_id.hex()}" if r.namespace_id else "all namespaces"
        logger.info("kvtier: store: %s cleared %s (%d blocks)", client, what, count)

        def recorded(reason: str) -> None:
            client.stream.send(m.encode(m.Done(r.id, count, reason[: m.MAX_SENTENCE])))

        self.tiers.when_recorded(recorded)

    def _inspect(self, client: _Client, r: m.Inspect) -> None:
        holding = self.index.inspect(client.number, r.namespace_id, r.block_hashes)
        short = m.Explained(r.id, holding.num_hash_blocks, holding.blocks)
        if not r.spans:
            client.stream.send(m.encode(short))
            return
        holders = self._peer_directory.holders(
            client.number, directory_query(r.block_hashes, 0, r.key_mask, r.hash_blocks_per_block)
        )
        want = _want(client, r.namespace_id, r.block_hashes, holding.num_hash_blocks, [])
        begun = msgspec.structs.replace(short, holders=holders)
        self._explain_query.explain(want, r.wait_seconds, begun, lambda reply: client.stream.send(m.encode(reply)))

    def _stat(self, client: _Client, r: m.Stat) -> None:
        client.stream.send(m.encode(self._counts(r.id)))

    def _send(self, number: int, message: m.Reply) -> None:
        self._clients[number].stream.send(m.encode(message))

    def _handled(self) -> dict[str, Durations]:
        """Durations of message handlers, by name; a copy for another thread."""
        return {kind.__name__.lower(): durations.copy() for kind, durations in self._handling.items()}

    def _counts(self, id: int = 0) -> m.Counts:
        clients = [(c.hello, self.index.client_counts(c.number)) for c in self._clients.values() if c.hello is not None]
        return m.Counts(
            id=id,
            instance=self.instance,
            version=__version__,
            pid=os.getpid(),
            seconds=time.monotonic() - self._started,
            policy=self.policy,
            huge_pages=self.memory.huge_pages,
            requested_bytes=self.memory.nbytes,
            pool_bytes=self.memory.usable,
            ready_bytes=self.memory.ready,
            note=self.memory.note,
            clients=[m.ClientCounts(hello.name, hello.pid, hello.kind, *counts) for hello, counts in clients],
            index=self.index.stats(),
            tiers=self.tiers.counts(),
            directory=self._peer_directory.counts(),
        )

    # -- time and memory ----------------------------------------------------------------------------------------

    def _watch_deadlines(self) -> None:
        if self._tick is None and self.index.next_deadline() is not None:
            shortest, longest = TICK_SECONDS
            period = min(self.options.lease_seconds, self.options.reserve_seconds) / 4
            self._tick = self.reactor.call_later(min(max(period, shortest), longest), self._check_deadlines)

    def _check_deadlines(self) -> None:
        self._tick = self.reactor.call_later(0.0, self._check_deadlines) if self.index.tick() else None
        self._watch_deadlines()

    def _progress(self) -> None:
        self.index.limit(self.memory.usable // m.PAGE)
        self.index.grow(self.memory.ready // m.PAGE)
        ready = m.encode(m.Ready(self.memory.ready // m.PAGE, self.memory.usable // m.PAGE))
        for client in list(self._clients.values()):
            if client.hello is not None:
                client.stream.send(ready)
        if self.memory.ready == self.memory.usable:
            self.tiers.pool_committed()
            took = time.monotonic() - self._started
            logger.info("kvtier: store: all %s usable after %.1f s", format_bytes(self.memory.ready), took)

    def _close(self) -> None:
        # Before the lock is freed: afterwards the socket may be another store's. If files were removed, it already is.
        if listen_socket.file_id(self.path) == self._socket_file:
            Path(self.path).unlink(missing_ok=True)
        self._listener.close()
        for client in list(self._clients.values()):
            client.stream.close("the store ends")
        self.tiers.stop()
        self.memory.close()
        self._presence.close()
        os.close(self._lock)


def _pool_bytes(options: StoreOptions, wait_seconds: float) -> int:
    """Bytes of the pool. Blocks for ``wait_seconds`` until other processes have given back so many. Raises
    ConfigError."""
    until = time.monotonic() + wait_seconds
    while True:
        try:
            return pool_bytes(options.size, memory_limits(), bytes_beside_pool(options), options.huge_pages)
        except MemoryInUse as error:
            if time.monotonic() >= until:
                raise
            logger.warning("kvtier: store: %s; waiting up to %g s for that", error, wait_seconds)
        time.sleep(IN_USE_POLL_SECONDS)


def _want(client: _Client, namespace_id: bytes, block_hashes: bytes, start: int, nodes: list[str]) -> Want:
    hello = client.hello
    assert hello is not None  # other messages come after it
    return Want(namespace_id, hello.hash_block_size, hello.groups, block_hashes, start, tuple(nodes))


def serve(
    path: str, options: StoreOptions, on_listening: Callable[[], None] = lambda: None, launched: bool = True
) -> None:
    """Serve until SIGTERM, SIGINT or ``idle_seconds``; on the main thread. Raises as StoreServer does."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(read_end, True)
    # Until it serves. The first process of a container has no default action.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    server = StoreServer(path, options, lambda: os.write(write_end, b"\0"), launched)
    signal.set_wakeup_fd(write_end)  # first: the byte that Python writes to it ends the wait
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    server.start()
    gc.collect()
    gc.freeze()  # a full collection then only visits the index's tables, not its blocks
    logger.info(
        "kvtier: store: instance %s serves %s at %s (pid %d, %s)",
        server.instance[:8],
        format_bytes(server.memory.nbytes),
        path,
        os.getpid(),
        "2 MiB pages" if server.memory.huge_pages else "4 KiB pages",
    )
    on_listening()
    os.read(read_end, 1)
    server.stop()
    logger.info("kvtier: store: instance %s ended", server.instance[:8])
