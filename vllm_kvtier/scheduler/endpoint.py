"""The engine's endpoint: answers other engines' (and the proxy's) messages from the export table.

Runs on the reactor's thread. One ROUTER socket, and one for engines of this node; a connection is an identity of either
that said Hello. A peer that breaks the protocol loses its connection state and every lease with it; one that falls
silent for longer than a lease does too.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import zmq

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.errors import ConfigError, KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.exports import ExportTable, Lease, Refusal
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.local import LocalServer
from vllm_kvtier.wire.reactor import Reactor, Timer, drain

logger = get_logger("vllm.kvtier.endpoint")

_REASONS = {
    Refusal.UNKNOWN: "no such export (expired, consumed or dropped)",
    Refusal.DIGEST: "the asker's token chain is not the export's",
    Refusal.NOTHING: "no block of this chain beyond the start is exported",
    Refusal.NOT_READY: "checksums were not made in time",
    Refusal.BUSY: "too many blocks are lent already, or too few are free",
}
MAX_SILENT_CONNECTIONS = 4096

Question = m.Query | m.Inspect | m.Keep | m.Warm | m.Explain | m.Identify
Answer = Callable[[m.Holding | m.Inspection | m.Kept | m.Explanation | m.Identified], None]
# (what is asked for, whose connection, seconds, whom to tell the outcome)
Lend = Callable[[m.Ask, bytes, float, Callable[[Lease | Refusal], None]], None]
# An ask is parked for this share of ``ask_timeout``, so that the refusal arrives before the asker gives up.
PARK_SHARE = 0.75
# Seconds that reads are served after an ask that got no lease: its sender may be reading what it was promised
# already, and learns from the checksums that it is gone, after it has read it again some times
# (``worker.pulls.REREAD_AFTER``). Unserved, such a read would hang until its own time limit, and end its agent.
SERVE_AFTER_ASK = 3.0


@dataclass
class Connection:
    last_seen: float
    greeted: bool = False


@dataclass
class Parked:
    """An ask whose export is not summed yet; answered by the next ``mark_summed`` or at its deadline."""

    identity: bytes
    ask: m.Ask
    deadline: float


class Endpoint:
    def __init__(
        self,
        reactor: Reactor,
        config: KVTierConfig,
        key: ClusterKey | None,
        exports: ExportTable,
        on_freed: Callable[[], None],
        on_question: Callable[[Question, Answer], None],
        on_serving: Callable[[bool], None],
        on_puller: Callable[[m.Ask], None],
        lend: Lend | None = None,
        port_offset: int = 0,
        instance: str = "",
    ):
        """``on_freed``: blocks wait in ``exports.take_freed``. ``on_question``: answer on the engine's thread.

        ``on_serving``: whether any lease is out, or was asked for just now. ``on_puller``: a peer that exports too
        leased this chain. ``lend``: lease blocks of the prefix cache itself; its answer may come from another thread.
        ``instance``: ours, by which engines of this node find our socket; "": they come over TCP.
        """
        self._reactor, self._config, self._exports = reactor, config, exports
        self._on_freed, self._on_question = on_freed, on_question
        self._on_serving, self._on_puller, self._lend = on_serving, on_puller, lend
        self._connections: dict[bytes, Connection] = {}
        self._parked: list[Parked] = []
        self._timer: Timer | None = None
        self._serving = False
        self._serve_until = 0.0
        self._welcome: tuple[m.Namespace, m.Welcome] | None = None
        self.unusable: str | None = "the engine is still starting"
        self._socket = reactor.context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, m.MAX_MESSAGE)
        self._socket.setsockopt(zmq.LINGER, 0)
        # A peer whose connection broke without our noticing comes back under its name (random, known to it alone).
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if key is not None:
            self._authenticator = key.secure_server(self._socket)
            reactor.on_stop(self._authenticator.stop)
        self.port = self._bind(config, port_offset)
        self.host = config.advertise_host or config.endpoint_host
        reactor.add_socket(self._socket, lambda: drain(self._socket, self._receive))
        self._instance = instance
        self._local = self._listen_locally(instance) if instance else None

    def _listen_locally(self, instance: str) -> LocalServer | None:
        def hear(identity: bytes, frame: bytes) -> None:
            self._receive([identity, frame])

        def gone(identity: bytes) -> None:
            self._forget(identity)
            self.settle()

        try:
            return LocalServer(self._reactor, instance, m.MAX_MESSAGE, hear, gone)
        except (KVTierError, OSError) as error:
            logger.warning("kvtier: engines of this node reach this one over TCP, which takes longer: %s", error)
            return None

    def _bind(self, config: KVTierConfig, offset: int) -> int:
        if config.endpoint_port == 0:
            return self._socket.bind_to_random_port(f"tcp://{config.endpoint_host}")
        port = config.endpoint_port + offset
        try:
            self._socket.bind(f"tcp://{config.endpoint_host}:{port}")
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kvtier cannot listen on {config.endpoint_host}:{port} ({error}); "
                "set endpoint_port to a free port or to 0"
            ) from error
        return port

    # -- any thread --------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """An export was added: its deadline is watched from now on."""
        self._reactor.call_soon(self.settle)

    def recalled(self) -> None:
        """Leases were ended while peers may be reading: they are served until they have found that out."""

        def serve() -> None:
            self._serve_until = time.monotonic() + SERVE_AFTER_ASK
            self.settle()

        self._reactor.call_soon(serve)

    # -- called on the reactor's thread ----------------------------------------------------------------------

    def open(self, namespace: m.Namespace, welcome: m.Welcome) -> None:
        """From now on answer; before, and if the workers cannot serve, every Hello is refused in words. As another
        instance than before, if ``welcome`` says so."""
        self._welcome, self.unusable = (namespace, welcome), None
        if self._local is not None and welcome.instance != self._instance:
            self._local.close()
            self._local = self._listen_locally(welcome.instance)
        self._instance = welcome.instance

    def close(self, reason: str) -> None:
        """Until ``open`` is called again nothing is lent; who asks is told ``reason`` when it says Hello anew."""
        self._welcome, self.unusable = None, reason
        parked, self._parked = self._parked, []
        for p in parked:
            self._ask(p.identity, p.ask, p.deadline)

    def summed(self, step: int) -> None:
        self._exports.mark_summed(step)
        parked, self._parked = self._parked, []
        for p in parked:
            self._ask(p.identity, p.ask, p.deadline)
        self.settle()

    def settle(self) -> None:
        """After any change: report freed blocks, tell the workers whether peers read, set the next deadline."""
        now = time.monotonic()
        silent = now - self._config.lease_seconds
        for identity, connection in list(self._connections.items()):
            if connection.last_seen < silent and self._exports.disconnect(identity):
                logger.warning("kvtier: a peer fell silent while it held leases; they are void")
        for p in [p for p in self._parked if p.deadline <= now]:
            self._parked.remove(p)
            self._refuse(p.identity, p.ask.ask, Refusal.NOT_READY.value, _REASONS[Refusal.NOT_READY])
        until = self._exports.expire()
        if self._exports.has_freed():
            self._on_freed()
        serving = self._exports.counts()["served"] > 0 or now < self._serve_until
        if serving != self._serving:
            self._serving = serving
            self._on_serving(serving)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waits = [p.deadline - now for p in self._parked] + ([until] if until is not None else [])
        if now < self._serve_until:
            waits.append(self._serve_until - now)
        if waits:
            self._timer = self._reactor.call_later(max(0.001, min(waits)), self.settle)

    # -- messages ----------------------------------------------------------------------------------------------

    def _receive(self, frames: list[bytes]) -> None:
        identity = frames[0]
        try:
            if len(frames) != 2:
                raise msgspec.DecodeError(f"{len(frames) - 1} frames instead of one")
            message = m.decode_engine(frames[1])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            logger.warning("kvtier: malformed message from a peer, its connection is dropped: %s", error)
            self._refuse(identity, 0, "malformed", str(error)[:200])
            self._break_off(identity)
            self.settle()
            return
        connection = self._connections.get(identity)
        if connection is None:
            self._evict_silent()
            connection = self._connections[identity] = Connection(0.0)
        connection.last_seen = time.monotonic()
        match message:
            case m.Hello():
                self._hello(identity, connection, message)
            case m.Ask() if connection.greeted:
                patience = min(PARK_SHARE * self._config.ask_timeout, message.patience)
                self._ask(identity, message, time.monotonic() + patience)
            case m.Ask():
                self._refuse(identity, message.ask, "instance", "no handshake on this connection")
            case m.Release():
                self._exports.release(message.lease, identity, message.done)
            case m.Drop():
                self._exports.drop(message.export)
            case m.Ping():
                self._exports.renew(identity, self._config.lease_seconds)
            case m.Query() | m.Inspect() | m.Keep() | m.Warm() | m.Explain() | m.Identify():
                self._on_question(message, lambda answer: self._reactor.call_soon(lambda: self._send(identity, answer)))
            case _:
                logger.warning("kvtier: a peer sent %s, which only an answer can be; dropped", type(message).__name__)
                self._break_off(identity)
        self.settle()

    def _hello(self, identity: bytes, connection: Connection, hello: m.Hello) -> None:
        # In the asker's words, who logs them: "here" is there.
        if hello.protocol != m.PROTOCOL:
            reason = f"kvtier protocol {hello.protocol} here, {m.PROTOCOL} there: run the same vllm-kvtier on both"
        elif self._welcome is None:
            reason = self.unusable
        else:
            reason = hello.namespace.mismatch(self._welcome[0])
        if reason:
            self._refuse(identity, 0, "namespace" if self._welcome else "starting", reason)
            return
        connection.greeted = True
        self._send(identity, self._welcome[1])

    def _ask(self, identity: bytes, ask: m.Ask, deadline: float) -> None:
        if self._welcome is None or ask.instance != self._welcome[1].instance:
            self._refuse(identity, ask.ask, "instance", "this engine was restarted since the handshake")
            return
        seconds = self._config.lease_seconds
        if ask.lend:
            if self._lend is None:
                self._settled(identity, ask, deadline, Refusal.NOTHING)
                return
            self._lend(
                ask, identity, seconds,
                lambda found: self._reactor.call_soon(lambda: self._lent(identity, ask, deadline, found)),
            )
            return
        if ask.export:
            found = self._exports.lease_export(ask.export, ask.digest, ask.variant, ask.start, identity, seconds)
        else:
            found = self._exports.lease_chain(ask.chain, ask.variant, ask.start, identity, seconds)
        if isinstance(found, Refusal):
            self._serve_until = time.monotonic() + SERVE_AFTER_ASK
        self._settled(identity, ask, deadline, found)

    def _lent(self, identity: bytes, ask: m.Ask, deadline: float, found: Lease | Refusal) -> None:
        if identity not in self._connections:
            self._exports.disconnect(identity)  # it went meanwhile
        else:
            self._settled(identity, ask, deadline, found)
        self.settle()

    def _settled(self, identity: bytes, ask: m.Ask, deadline: float, found: Lease | Refusal) -> None:
        if found is Refusal.NOT_READY and time.monotonic() < deadline:
            self._parked.append(Parked(identity, ask, deadline))
        elif isinstance(found, Lease):
            self._grant(identity, ask, found)
        else:
            self._refuse(identity, ask.ask, found.value, _REASONS[found])

    def _grant(self, identity: bytes, ask: m.Ask, lease: Lease) -> None:
        if ask.reply_port and not ask.lend:
            self._on_puller(ask)
        seconds = self._config.lease_seconds
        blocks = [group.slice(lease.start, lease.tokens) for group in lease.export.groups]
        self._send(identity, m.Granted(ask.ask, lease.id, lease.tokens, lease.start, blocks, seconds))

    def _refuse(self, identity: bytes, ask: int, code: str, reason: str) -> None:
        self._send(identity, m.Refused(ask, code, reason[:500]))

    def _send(self, identity: bytes, message: msgspec.Struct) -> None:
        frame = m.encode(message)
        if self._local is not None and self._local.send(identity, frame):
            return
        try:
            self._socket.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:  # the peer is gone or does not read: its leases end by themselves
            logger.debug("kvtier: answer not sent: %s", error)

    def _forget(self, identity: bytes) -> None:
        self._connections.pop(identity, None)
        self._parked = [p for p in self._parked if p.identity != identity]
        self._exports.disconnect(identity)

    def _break_off(self, identity: bytes) -> None:
        """With who broke the protocol. Its connection ends too where that is in our hands; ZMQ's are its own."""
        self._forget(identity)
        if self._local is not None:
            self._local.drop(identity)

    def _evict_silent(self) -> None:
        """A bound on state kept for identities that come and never say goodbye."""
        if len(self._connections) >= MAX_SILENT_CONNECTIONS:
            oldest = min(self._connections, key=lambda i: self._connections[i].last_seen)
            self._forget(oldest)
