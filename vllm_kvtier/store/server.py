"""The node store's process: one thread that answers clients out of the index; it never touches what slots hold.

A connection owns its leases and reservations: however it ends, they end with it. A client that sends what no
client should is disconnected, and nobody else notices.
"""

import gc
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from vllm_kvtier import __version__
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.store import address
from vllm_kvtier.store import messages as m
from vllm_kvtier.store.changes import Changes
from vllm_kvtier.store.company import Company
from vllm_kvtier.store.directory import sought
from vllm_kvtier.store.entries import Shape
from vllm_kvtier.store.extents import SlotPool
from vllm_kvtier.store.fates import Fates
from vllm_kvtier.store.fates_told import Teller
from vllm_kvtier.store.index import Index
from vllm_kvtier.store.limits import in_words, memory_limits, pool_bytes
from vllm_kvtier.store.lower.base import Want
from vllm_kvtier.store.lower.durations import FINE, Durations
from vllm_kvtier.store.lower.tiers import lower_tiers
from vllm_kvtier.store.memory import PoolMemory
from vllm_kvtier.store.options import StoreOptions
from vllm_kvtier.store.policies import DEFAULT_POLICY, POLICIES
from vllm_kvtier.store.records import BadRequest, Found
from vllm_kvtier.wire.reactor import Reactor, Timer
from vllm_kvtier.wire.stream import Stream, accept

logger = get_logger(__name__)

HELLO_SECONDS = 10.0  # a connection that has not said who it is by then is closed
MAX_CLIENTS = 512
TICK_SECONDS = 0.02, 5.0  # least and most between two looks at deadlines; they are a matter of minutes
_FOR_ALL = (m.Pin, m.Clear, m.Stat, m.Inspect)  # all else only engines may say


@dataclass(eq=False)
class _Client:
    number: int
    stream: Stream
    hello: m.Hello | None = None
    greeting: Timer | None = None

    def __str__(self) -> str:
        return f"{self.hello.kind} {self.hello.name} (pid {self.hello.pid})" if self.hello else "a client"


class StoreServer:
    """Serves ``path`` from ``start`` to ``stop``. ``on_idle`` is called, on the reactor's thread, when no engine or
    worker has been connected, and no other node been lent anything, for ``idle_seconds``; new ones are refused from
    then on.

    Raises address.ServedAlready if the path is taken, ConfigError if the pool does not fit, KVTierError otherwise.
    """

    def __init__(self, path: str, options: StoreOptions, on_idle: Callable[[], None] = lambda: None):
        if options.policy and options.policy not in POLICIES:
            raise ConfigError(f"store option policy={options.policy!r}: choose one of {', '.join(POLICIES)}")
        self.path, self.options, self.instance = path, options, uuid.uuid4().hex
        self._on_idle = on_idle
        self.policy = options.policy or DEFAULT_POLICY
        self._tick: Timer | None = None
        with ExitStack() as undo:
            self._lock = address.take(path)
            undo.callback(os.close, self._lock)
            self.memory = PoolMemory(
                pool_bytes(options.size, memory_limits()),
                huge_pages=options.huge_pages,
                interleave=options.numa == "interleave",
            )
            undo.callback(self.memory.close)
            self._listener = address.listen(path)
            undo.callback(self._listener.close)
            self.reactor = Reactor("kvtier-store")
            self.index = Index(
                SlotPool(self.memory.nbytes // m.PAGE, m.PIECE // m.PAGE),
                POLICIES[self.policy],
                time.monotonic,
                lease_seconds=options.lease_seconds,
                reserve_seconds=options.reserve_seconds,
                pin_share=options.pin_share,
                tenant_share=options.tenant_share,
            )
            self.index.fates = Fates(time.monotonic)
            self.lower = lower_tiers(options, self.index, self.memory, self.reactor, self._watch_deadlines)
            address.sign(self._lock)
            undo.pop_all()
        self._started = time.monotonic()
        self._clients: dict[int, _Client] = {}
        self._next_client = 1
        self._company = Company(self._tell, self.reactor.call_soon)
        self.changes = Changes(self.index, self.lower.all, self._tell, self.reactor.call_soon)
        self._teller = Teller(self.index, self.lower.all, self.reactor)
        self._idle: Timer | None = None
        self._metrics = None
        self._handlers = {
            m.Lookup: self._lookup,
            m.Warm: self._warm,
            m.Touch: lambda c, r: self.index.touch(c.number, r.space, r.chain),
            m.Release: lambda c, r: self.index.release(c.number, r.lease),
            m.Reserve: self._reserve,
            m.Commit: lambda c, r: self.index.commit(c.number, r.slots),
            m.Abort: lambda c, r: self.index.abort(c.number, r.slots),
            m.Discard: self._discard,
            m.Pin: self._pin,
            m.Clear: self._clear,
            m.Stat: self._stat,
            m.Inspect: self._inspect,
            m.Present: lambda c, r: self._company.present(c.number, r),
            m.Resident: lambda c, r: self._company.resident(c.number, r),
            m.Follow: lambda c, r: self.changes.follow(c.number, r.spaces),
            m.Labels: lambda c, r: self.changes.label(c.number, r),
            m.Heard: lambda c, r: self.changes.heard(c.number),
        }
        self._handling = {kind: Durations(bounds=FINE) for kind in self._handlers}
        self.reactor.on_stop(self._close)

    def start(self) -> None:
        self.reactor.add_fd(self._listener.fileno(), lambda events: self._accept())
        self._watch_idle()
        self.reactor.call_soon(self.lower.start)
        self.reactor.start()
        self.memory.start(lambda: self.reactor.call_soon(self._progress))
        if self.options.metrics_port:
            from vllm_kvtier.store import metrics  # few want them, and everybody waits for the store to start

            self._metrics = metrics.serve(
                self.options.metrics_host,
                self.options.metrics_port,
                self.reactor,
                lambda: metrics.State(self._counts(), self.lower.durations(), self._handled()),
            )

    def stop(self) -> None:
        """Orderly: clients see the connection end, the socket and the lock go. Idempotent."""
        self.reactor.stop()
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    # -- connections --------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for sock in accept(self.reactor, self._listener):
            self._welcome_socket(sock)

    def _welcome_socket(self, sock: socket.socket) -> None:
        number, self._next_client = self._next_client, self._next_client + 1
        client = _Client(number, None)  # type: ignore[arg-type]  # one line below
        client.stream = Stream(
            self.reactor,
            sock,
            lambda frame: self._hear(client, frame),
            lambda reason: self._gone(client, reason),
            max_frame=m.MAX_FRAME,
        )
        self._clients[number] = client
        client.greeting = self.reactor.call_later(
            HELLO_SECONDS, lambda: client.stream.close("it did not say who it is")
        )
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
        self.lower.forget(client.number)
        self.index.disconnect(client.number)
        self._company.left(client.number)
        self.changes.left(client.number)
        if client.hello is not None and client.hello.kind != "tool":
            logger.info("kvtier: %s left: %s", client, reason)
        else:
            logger.debug("kvtier: %s left: %s", client, reason)
        self._watch_idle()

    def _watch_idle(self) -> None:
        """Tools (statistics, clear) do not keep a store alive that nobody uses."""
        used = any(c.hello is not None and c.hello.kind != "tool" for c in self._clients.values())
        if used and self._idle is not None:
            self._idle.cancel()
            self._idle = None
        elif not used and self._idle is None and self.options.idle_seconds:
            lent = self.lower.lent
            self._idle = self.reactor.call_later(self.options.idle_seconds, lambda: self._end_idle(lent))

    def _end_idle(self, lent: int) -> None:
        if self.lower.lent > lent:  # nobody here, but other nodes have used it meanwhile
            self._idle = None
            self._watch_idle()
            return
        logger.info("kvtier: nobody has used the store for %g s; it ends", self.options.idle_seconds)
        self.reactor.remove_fd(self._listener.fileno())
        self._listener.close()  # whoever comes now is told so at once, and starts another store
        self._on_idle()

    # -- messages -----------------------------------------------------------------------------------------------

    def _hear(self, client: _Client, frame: bytes) -> None:
        try:
            request = m.decode_request(frame)
            if client.hello is None:
                self._greet(client, request)
                return
            handler = self._handlers.get(type(request))
            if handler is None or (client.hello.kind != "engine" and not isinstance(request, _FOR_ALL)):
                raise BadRequest(f"{type(request).__name__} is not for a connected {client.hello.kind}")
            if len(getattr(request, "chain", b"")) % m.HASH:
                raise BadRequest(f"a chain of {len(request.chain)} bytes: hashes have {m.HASH}")
            began = time.monotonic()
            handler(client, request)
            self._handling[type(request)].observe(time.monotonic() - began)
        except (msgspec.DecodeError, BadRequest) as error:
            if client.hello is None:
                reason = f"this is not how a client of protocol {m.PROTOCOL} begins ({error})"
                self._refuse(client, reason[:1000])
            else:
                logger.warning("kvtier: %s is disconnected for what it sent: %s", client, error)
                self._refuse(client, f"{error}"[:1000])

    def _greet(self, client: _Client, hello: m.Request) -> None:
        if not isinstance(hello, m.Hello):
            raise BadRequest("no hello")
        if hello.protocol != m.PROTOCOL:
            self._refuse(
                client,
                f"the running store is vllm-kvtier {__version__} and speaks protocol {m.PROTOCOL}, the client is "
                f"{hello.version or 'unknown'} and speaks {hello.protocol}; stop the store (pid {os.getpid()}), or "
                "give engines of one version a store of their own",
            )
            return
        self.index.connect(client.number, hello.unit_tokens, hello.groups)
        client.hello = hello
        client.greeting.cancel()
        welcome = m.Welcome(
            protocol=m.PROTOCOL,
            version=__version__,
            instance=self.instance,
            pid=os.getpid(),
            pool_pages=self.memory.usable // m.PAGE,
            ready_pages=self.memory.ready // m.PAGE,
            huge_pages=self.memory.huge_pages,
            tiers=self.lower.names,
        )
        client.stream.send(m.encode(welcome), [self.memory.fd])
        self._watch_idle()
        logger.log(logging.DEBUG if hello.kind == "tool" else logging.INFO, "kvtier: %s connected", client)

    def _lookup(self, client: _Client, r: m.Lookup) -> None:
        elsewhere = sought(r.chain, r.start, r.mix, r.stride)

        def answer(found: Found, below: m.Below | None) -> None:
            holders = self._company.holders(client.number, elsewhere)
            client.stream.send(m.encode(m.Found(r.id, found.lease, found.units, found.slots, below, holders)))
            self._watch_deadlines()

        want = _want(client, r.space, r.chain, r.start, r.nodes)
        self.lower.lookup(client.number, want, r.pages_limit, r.patience, answer)

    def _warm(self, client: _Client, r: m.Warm) -> None:
        self.lower.warm(_want(client, r.space, r.chain, 0, r.nodes), r.pages_limit)

    def _discard(self, client: _Client, r: m.Discard) -> None:
        """Its copies below may be what it came from: they go too, or it would come up again."""
        if self.index.discard(client.number, r.space, r.group, r.hash, r.slot):
            self.lower.discard(r.space, r.group, r.hash)

    def _reserve(self, client: _Client, r: m.Reserve) -> None:
        slots = self.index.reserve(client.number, r.space, r.tenant, r.groups, r.hashes, r.parents, r.pages_limit)
        client.stream.send(m.encode(m.Reserved(r.id, slots)))
        self._watch_deadlines()

    def _pin(self, client: _Client, r: m.Pin) -> None:
        count = self.index.pin(client.number, r.space, r.chain, r.pinned)
        client.stream.send(m.encode(m.Done(r.id, count)))

    def _clear(self, client: _Client, r: m.Clear) -> None:
        count = self.index.clear(r.space)
        self.lower.clear(r.space)
        logger.info("kvtier: %s cleared %s: %d blocks", client, r.space.hex() if r.space else "everything", count)
        client.stream.send(m.encode(m.Done(r.id, count)))

    def _inspect(self, client: _Client, r: m.Inspect) -> None:
        holding = self.index.inspect(client.number, r.space, r.chain)
        short = m.Holding(r.id, holding.units, holding.blocks)
        if not r.spans:
            client.stream.send(m.encode(short))
            return
        holders = self._company.holders(client.number, sought(r.chain, 0, r.mix, r.stride))
        want = _want(client, r.space, r.chain, holding.units, [])
        begun = msgspec.structs.replace(short, holders=holders)
        self._teller.tell(want, r.patience, begun, lambda said: client.stream.send(m.encode(said)))

    def _stat(self, client: _Client, r: m.Stat) -> None:
        client.stream.send(m.encode(self._counts(r.id)))

    def _tell(self, number: int, message: m.Reply) -> None:
        self._clients[number].stream.send(m.encode(message))

    def _handled(self) -> dict[str, Durations]:
        """How long messages took, by name; a copy, for another thread."""
        return {kind.__name__.lower(): durations.copy() for kind, durations in self._handling.items()}

    def _counts(self, id: int = 0) -> m.Counts:
        clients = [(c.hello, self.index.held(c.number)) for c in self._clients.values() if c.hello is not None]
        return m.Counts(
            id=id,
            instance=self.instance,
            version=__version__,
            pid=os.getpid(),
            seconds=time.monotonic() - self._started,
            policy=self.policy,
            huge_pages=self.memory.huge_pages,
            asked_bytes=self.memory.nbytes,
            pool_bytes=self.memory.usable,
            ready_bytes=self.memory.ready,
            note=self.memory.note,
            clients=[m.ClientCounts(hello.name, hello.pid, hello.kind, *held) for hello, held in clients],
            index=self.index.stats(),
            tiers=self.lower.counts(),
            directory=self._company.counts(),
        )

    # -- time and memory ----------------------------------------------------------------------------------------

    def _watch_deadlines(self) -> None:
        if self._tick is None and self.index.next_deadline() is not None:
            least, most = TICK_SECONDS
            period = min(self.options.lease_seconds, self.options.reserve_seconds) / 4
            self._tick = self.reactor.call_later(min(max(period, least), most), self._look_at_deadlines)

    def _look_at_deadlines(self) -> None:
        self._tick = None
        self.index.tick()
        self._watch_deadlines()

    def _progress(self) -> None:
        self.index.grow(self.memory.ready // m.PAGE)
        ready = m.encode(m.Ready(self.memory.ready // m.PAGE, self.memory.usable // m.PAGE))
        for client in list(self._clients.values()):
            if client.hello is not None:
                client.stream.send(ready)
        if self.memory.ready == self.memory.usable:
            took = time.monotonic() - self._started
            logger.info("kvtier: all of %s is usable after %.1f s", in_words(self.memory.ready), took)

    def _close(self) -> None:
        # Only as long as the lock is ours can the socket be ours.
        Path(self.path).unlink(missing_ok=True)
        self._listener.close()
        for client in list(self._clients.values()):
            client.stream.close("the store ends")
        self.lower.stop()
        self.memory.close()
        os.close(self._lock)


def _want(client: _Client, space: bytes, chain: bytes, start: int, nodes: list[str]) -> Want:
    shapes = [Shape(group.units, group.window, group.slot_pages) for group in client.hello.groups]
    return Want(space, client.hello.unit_tokens, shapes, chain, start, tuple(nodes))


def serve(path: str, options: StoreOptions, on_listening: Callable[[], None] = lambda: None) -> None:
    """Serve until SIGTERM, SIGINT or idleness; on the main thread. Raises as StoreServer does."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(read_end, True)
    server = StoreServer(path, options, on_idle=lambda: os.write(write_end, b"\0"))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # the byte that Python writes for it is what ends the wait
    signal.set_wakeup_fd(write_end)
    server.start()
    gc.collect()
    gc.freeze()  # a full collection then has only the index to look at
    logger.info(
        "kvtier: the store %s serves %s at %s (pid %d, %s)",
        server.instance[:8],
        in_words(server.memory.nbytes),
        path,
        os.getpid(),
        "2 MiB pages" if server.memory.huge_pages else "4 KiB pages",
    )
    on_listening()
    os.read(read_end, 1)
    server.stop()
    logger.info("kvtier: the store %s ended", server.instance[:8])
