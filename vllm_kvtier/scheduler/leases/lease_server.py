"""The engine's endpoint: answers messages of other engines and of the proxy from the export table.

Runs on the reactor's thread. A ROUTER socket, and a Unix socket for engines of this node. A peer that misses its
heartbeats for longer than a lease loses its leases, not its connection.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import zmq

from vllm_kvtier.errors import ConfigError, KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.context import EngineContext
from vllm_kvtier.scheduler.leases.exports import ExportTable, Lease, Refusal
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.dealer import endpoint_of
from vllm_kvtier.wire.lease_connections import LeaseListener, ServerConnection
from vllm_kvtier.wire.local import LocalServer
from vllm_kvtier.wire.reactor import Timer

logger = get_logger(__name__)

_REASONS = {
    Refusal.UNKNOWN: "no such export (expired, consumed or dropped)",
    Refusal.DIGEST: "the requester's tokens are not the export's",
    Refusal.NOTHING: "no block of these tokens beyond the start is exported",
    Refusal.NOT_READY: "checksums were not computed in time",
    Refusal.BUSY: "too many blocks are leased already, or too few are free",
}
MAX_SILENT_CONNECTIONS = 4096
MAX_PARKED = 4096  # requests that wait here; those beyond are refused

Question = m.Query | m.Inspect | m.PinPrompt | m.Warm | m.Explain | m.GetIdentity
Answer = Callable[
    [m.PrefixLengths | m.Inspection | m.PinResult | m.Explanation | m.Identity | m.LeaseRefused], None
]
# (request, connection, seconds of the lease, callback for the outcome)
LeaseCached = Callable[[m.LeaseRequest, bytes, float, Callable[[Lease | Refusal], None]], None]
# A request is parked for this share of ``lookup_timeout``, so that the refusal arrives before its sender gives up.
PARK_SHARE = 0.75
# Reads are served for these seconds after a refused request: its sender may read early (``EarlyReadInfo``), and
# learns from the checksums that the blocks are gone. Such a read would hang until its time limit, and end its agent.
SERVE_AFTER_REFUSAL_SECONDS = 3.0


@dataclass(slots=True, eq=False)
class Connection(ServerConnection):
    greeted: bool = False


@dataclass(eq=False)
class Parked:
    """A request whose export has no checksums yet; answered by ``checksums_ready`` or at its deadline.

    Or one that follows a prefill (``request.follow``), which gets several grants. ``sent``: tokens up to which it has
    got stretches. ``asking``: the scheduler side was asked for the next one; ``again``: it computed more since then.
    """

    identity: bytes
    request: m.LeaseRequest
    deadline: float
    sent: int = 0
    asking: bool = False
    again: bool = False


@dataclass(frozen=True)
class LeaseServerEvents:
    """What the server tells its engine, on the reactor's thread.

    ``on_freed``: blocks wait in ``exports.take_freed``. ``on_question``: answer on vLLM's scheduler thread.
    ``on_serving``: whether any lease is out, or was asked for just now. ``on_puller``: a peer that exports too leased
    this prefix.
    ``lease_cached``: lease blocks of the prefix cache itself; its answer may come from another thread.
    ``lease_stretch``: the same of a prefill that goes on (``PrefillStretches.lease``). ``on_released``: an export that
    is not here will not be pulled. ``will_prefill``: whether vLLM has queued, or runs, the prefill of this name.
    """

    on_freed: Callable[[], object]
    on_question: Callable[[Question, Answer], object]
    on_serving: Callable[[bool], object]
    on_puller: Callable[[m.LeaseRequest], object]
    lease_cached: LeaseCached | None = None
    lease_stretch: LeaseCached | None = None
    on_released: Callable[[str], object] = lambda export: None
    will_prefill: Callable[[str], bool] = lambda export: True


class LeaseServer(LeaseListener[Connection]):
    def __init__(self, engine: EngineContext, exports: ExportTable, key: ClusterKey | None, events: LeaseServerEvents):
        """Engines of this node find our socket by ``engine.identity.instance``; if that is "", they come over TCP.
        Raises ConfigError if the port is not free."""
        super().__init__(engine.reactor, m.decode_engine, Connection, MAX_SILENT_CONNECTIONS)
        config, instance = engine.config, engine.identity.instance
        self._config, self._exports, self._events = config, exports, events
        self._parked: list[Parked] = []
        self._timer: Timer | None = None
        self._serving = False
        self._serve_until = 0.0
        self._welcome: tuple[m.Namespace, m.Welcome] | None = None
        self.unusable: str | None = m.STILL_STARTING
        port = config.endpoint_port + engine.info.data_parallel_rank if config.endpoint_port else "*"
        if isinstance(port, int) and port > 65535:  # ZMQ would listen on another one
            rank = engine.info.data_parallel_rank
            reason = f"there is no port {port}"
            raise ConfigError(f"endpoint_port {config.endpoint_port} and data-parallel rank {rank}: {reason}")
        try:
            self.port = self._listen(endpoint_of(config.endpoint_host, port), key, m.MAX_MESSAGE)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"kvtier cannot listen on {config.endpoint_host}:{port} ({error}); "
                "set endpoint_port to a free port or to 0, and endpoint_host to an address of this machine"
            ) from error
        self.host = (config.advertise_host or config.endpoint_host).strip("[]")  # as the proxy names it
        self._instance = instance
        self._local = self._listen_locally(instance) if instance else None

    def _listen_locally(self, instance: str) -> LocalServer | None:
        def on_message(identity: bytes, frame: bytes) -> None:
            self._receive([identity, frame])

        try:
            return LocalServer(self._reactor, instance, m.MAX_MESSAGE, on_message, self._remove_connection)
        except (KVTierError, OSError) as error:
            logger.warning("kvtier: engines of this node reach this one over TCP, which takes longer: %s", error)
            return None

    # -- any thread --------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """An export was added, or a prefill ended without one: its deadline is watched from now on, and engines that
        follow the prefill get an answer."""
        self._reactor.call_soon(self._on_changed)

    # -- called on the reactor's thread ----------------------------------------------------------------------

    def open(self, namespace: m.Namespace, welcome: m.Welcome) -> None:
        """Answer from now on; before, and if the workers cannot serve, every Hello is refused with the reason.
        ``welcome`` may have another instance than before."""
        self._welcome, self.unusable = (namespace, welcome), None
        if self._local is not None and welcome.instance != self._instance:
            self._local.close()
            self._local = self._listen_locally(welcome.instance)
        self._instance = welcome.instance

    def close(self, reason: str) -> None:
        """Lease nothing until ``open`` is called again; a peer that sends Hello gets ``reason``."""
        self._welcome, self.unusable = None, reason
        self._ask_parked()

    def checksums_ready(self, step: int) -> None:
        self._exports.mark_checksums_ready(step)
        self._on_changed()

    def _on_changed(self) -> None:
        if self._parked:
            self._ask_parked()
        self.update()

    def _ask_parked(self) -> None:
        parked, self._parked = self._parked, [p for p in self._parked if p.request.follow]
        for p in parked:
            if not p.request.follow:
                self._lease(p.identity, p.request, p.deadline)
            elif p.identity in self._connections:  # an answer to one before may have ended it
                self._follow(p)

    def update(self) -> None:
        """After any change: report freed blocks, tell the workers whether peers read, set the next deadline."""
        now = time.monotonic()
        silent = now - self._config.lease_seconds
        # Not all connections: ZMQ does not report those that have gone, and each step calls this.
        for identity in self._exports.holders():
            connection = self._connections.get(identity)
            if connection is not None and connection.last_seen < silent and self._exports.disconnect(identity):
                logger.warning(
                    "kvtier: lease server: a peer missed its heartbeat for %.0f s; its leases expired",
                    self._config.lease_seconds,
                )
        for p in [p for p in self._parked if p.deadline <= now]:
            self._parked.remove(p)
            self._refuse(p.identity, p.request.lookup_id, Refusal.NOT_READY.value, _REASONS[Refusal.NOT_READY])
        until = self._exports.expire()
        if self._exports.has_freed():
            self._events.on_freed()
        serving = self._exports.counts()["served"] > 0 or now < self._serve_until
        if serving != self._serving:
            self._serving = serving
            self._events.on_serving(serving)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waits = [p.deadline - now for p in self._parked] + ([until] if until is not None else [])
        if now < self._serve_until:
            waits.append(self._serve_until - now)
        if waits:
            self._timer = self._reactor.call_later(max(0.001, min(waits)), self.update)

    # -- messages ----------------------------------------------------------------------------------------------

    def _malformed(self, identity: bytes, reason: str) -> None:
        self._refuse(identity, 0, "malformed", reason[:200])

    def _handle(self, connection: Connection, message: m.EngineMessage) -> None:
        identity = connection.identity
        match message:
            case m.Hello():
                self._hello(connection, message)
            case m.LeaseRequest(follow=True) if connection.greeted:
                self._begin_following(identity, message)
            case m.StopFollowing():
                stopped = identity, message.lookup_id
                self._parked = [p for p in self._parked if (p.identity, p.request.lookup_id) != stopped]
            case m.LeaseRequest() if connection.greeted:
                wait_seconds = min(PARK_SHARE * self._config.lookup_timeout, message.wait_seconds)
                self._lease(identity, message, time.monotonic() + wait_seconds)
            case m.LeaseRequest():
                self._refuse(identity, message.lookup_id, "peer_restarted", "no handshake on this connection")
            case m.Release():
                self._exports.release(message.lease, identity, message.done)
            case m.ReleaseExport():  # the proxy sends it, which has no namespace to greet with, but knows the name
                if not self._exports.end_export(message.export):
                    self._events.on_released(message.export)
            case m.Ping():
                self._exports.renew(identity, self._config.lease_seconds)
                for export in message.exports:
                    self._exports.keep(export, self._config.handoff_seconds)
                for p in [p for p in self._parked if p.identity == identity and p.request.follow]:
                    if self._events.will_prefill(p.request.export):  # else it may have been lost on its way
                        p.deadline = time.monotonic() + p.request.wait_seconds
                        self._send(identity, m.StillPrefilling(p.request.lookup_id))
            case m.Query() | m.Inspect() | m.PinPrompt() | m.Warm() | m.Explain() | m.GetIdentity():
                self._events.on_question(message, partial(self._answer, identity))
            case _:
                raise msgspec.DecodeError(f"{type(message).__name__} is only sent as an answer")
        self.update()

    def _hello(self, connection: Connection, hello: m.Hello) -> None:
        # The peer logs the reason: "here" is the peer.
        reason: str | None
        if hello.protocol != m.PROTOCOL:
            reason = f"kvtier protocol {hello.protocol} here, {m.PROTOCOL} there: run the same vllm-kvtier on both"
        elif self._welcome is None:
            reason = self.unusable
        else:
            reason = hello.namespace.mismatch(self._welcome[0])
        if reason or self._welcome is None:
            code = "namespace_mismatch" if self._welcome else "peer_starting"
            self._refuse(connection.identity, 0, code, reason or "")
            return
        connection.greeted = True
        self._send(connection.identity, self._welcome[1])

    def _answer(self, identity: bytes, answer: msgspec.Struct) -> None:
        """Any thread."""
        self._reactor.call_soon(lambda: self._send(identity, answer))

    def _lease(self, identity: bytes, request: m.LeaseRequest, deadline: float) -> None:
        if self._welcome is None or request.instance != self._welcome[1].instance:
            self._refuse(identity, request.lookup_id, "peer_restarted", "this engine was restarted since the handshake")
            return
        seconds = self._config.lease_seconds
        if request.from_prefix_cache:
            if self._events.lease_cached is None:
                self._reply(identity, request, deadline, Refusal.NOTHING)
                return
            self._events.lease_cached(
                request, identity, seconds,
                lambda found: self._reactor.call_soon(lambda: self._on_cache_lease(identity, request, deadline, found)),
            )
            return
        what = request.lora_fingerprint, request.start, identity, seconds, not request.mapped
        if request.export:
            found = self._exports.lease_export(request.export, request.digest, *what)
        else:
            found = self._exports.lease_by_hashes(request.block_hashes, *what, request.partial_up_to)
        if isinstance(found, Refusal):
            self._serve_until = time.monotonic() + SERVE_AFTER_REFUSAL_SECONDS
        self._reply(identity, request, deadline, found)

    # -- following a prefill -------------------------------------------------------------------------------------------

    def _begin_following(self, identity: bytes, request: m.LeaseRequest) -> None:
        if len(self._parked) >= MAX_PARKED:
            self._refuse(identity, request.lookup_id, Refusal.BUSY.value, "too many requests wait for prefills here")
            return
        # Its export is found by name, and ``on_puller`` reads the last hash; a peer may send a million of them.
        request = msgspec.structs.replace(request, block_hashes=request.block_hashes[-1:])
        follower = Parked(identity, request, time.monotonic() + request.wait_seconds, request.start)
        self._parked.append(follower)
        self._follow(follower)

    def _follow(self, p: Parked) -> None:
        """Grant the whole export if the prefill has ended, else ask for its next stretch. ``p`` is parked."""
        request, seconds = p.request, self._config.lease_seconds
        if self._welcome is None or request.instance != self._welcome[1].instance:
            self._parked.remove(p)
            reason = "this engine was restarted since the handshake"
            self._refuse(p.identity, request.lookup_id, "peer_restarted", reason)
            return
        found = self._exports.lease_export(
            request.export, request.digest, request.lora_fingerprint, request.start, p.identity, seconds,
            not request.mapped,
        )  # fmt: skip
        if isinstance(found, Lease) or found in (Refusal.DIGEST, Refusal.NOTHING):
            self._parked.remove(p)
            self._reply(p.identity, request, p.deadline, found)
        elif found is Refusal.UNKNOWN and self._events.lease_stretch is not None:
            if p.asking:
                p.again = True
                return
            p.asking, p.again = True, False
            self._events.lease_stretch(
                msgspec.structs.replace(request, start=p.sent), p.identity, seconds,
                lambda stretch: self._reactor.call_soon(lambda: self._on_stretch(p, stretch)),
            )  # fmt: skip

    def _on_stretch(self, p: Parked, found: Lease | Refusal) -> None:
        p.asking = False
        if p not in self._parked:  # it left, gave up, or has got the whole export
            if isinstance(found, Lease):
                self._exports.release(found.id, p.identity, False)
        elif isinstance(found, Lease):
            p.sent, p.deadline = found.tokens, time.monotonic() + p.request.wait_seconds
            self._grant(p.identity, p.request, found, final=False)
        elif found is not Refusal.NOT_READY:
            self._on_prefill_ended(p, found)
        if p.again and p in self._parked:
            self._follow(p)
        self.update()

    def _on_prefill_ended(self, p: Parked, found: Refusal) -> None:
        """There will be no more stretches. If there is an export, it was added before."""
        known = self._exports.has(p.request.export)
        if found is Refusal.UNKNOWN and known:
            self._follow(p)
        else:
            self._parked.remove(p)
            self._refuse(p.identity, p.request.lookup_id, found.value, _REASONS[found])

    def _on_cache_lease(
        self, identity: bytes, request: m.LeaseRequest, deadline: float, found: Lease | Refusal
    ) -> None:
        if identity not in self._connections:
            self._exports.disconnect(identity)  # it went meanwhile
        else:
            self._reply(identity, request, deadline, found)
        self.update()

    def _reply(self, identity: bytes, request: m.LeaseRequest, deadline: float, found: Lease | Refusal) -> None:
        if found is Refusal.NOT_READY and time.monotonic() < deadline and len(self._parked) < MAX_PARKED:
            self._parked.append(Parked(identity, request, deadline))
        elif isinstance(found, Lease):
            self._grant(identity, request, found)
        else:
            self._refuse(identity, request.lookup_id, found.value, _REASONS[found])

    def _grant(self, identity: bytes, request: m.LeaseRequest, lease: Lease, final: bool = True) -> None:
        if request.reply_port and final and not request.from_prefix_cache:
            self._events.on_puller(request)
        seconds, number = self._config.lease_seconds, request.lookup_id
        blocks = [group.slice(lease.start, lease.tokens) for group in lease.export.groups]
        tail = lease.export.tail if lease.tokens == lease.export.tokens else b""
        granted = m.LeaseGranted(number, lease.id, lease.tokens, lease.start, blocks, seconds, tail, final)
        if not self._send(identity, granted):
            self._exports.release(lease.id, identity, False)

    def _refuse(self, identity: bytes, lookup_id: int, code: str, reason: str) -> None:
        self._send(identity, m.LeaseRefused(lookup_id, code, reason[:500]))

    def _send_frame(self, identity: bytes, frame: bytes) -> bool:
        local = self._local is not None and self._local.send(identity, frame)
        return local or super()._send_frame(identity, frame)

    def _remove_connection(self, identity: bytes) -> None:
        super()._remove_connection(identity)
        if self._local is not None:
            self._local.close_connection(identity)

    def _left(self, connection: Connection) -> None:
        self._parked = [p for p in self._parked if p.identity != connection.identity]
        self._exports.disconnect(connection.identity)
        self.update()
