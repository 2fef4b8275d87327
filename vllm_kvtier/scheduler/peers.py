"""Asking other engines for leases, and keeping and releasing those we hold.

Runs on the reactor's thread; the scheduler's thread calls ``ask``, ``cancel`` and ``release``, which only queue,
and reads ``PendingAsk.outcome``. One connection an address, opened when first needed: over its Unix socket to an
engine of this node (``wire.local``), over TCP to others. A handshake that failed or was refused is remembered for a
while, so that requests do not wait for it one by one.

The asks on a connection that ends or cannot be made end at once, as "unreachable". Who falls silent without that (its
machine is gone, or it hangs) is found out by the time limits.
"""

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.exports import Refusal
from vllm_kvtier.scheduler.offers import Address, Loan, NoOffer, Offer, PendingAsk
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.auth import ClusterKey
from vllm_kvtier.wire.dealer import Dealer
from vllm_kvtier.wire.local import LocalDealer
from vllm_kvtier.wire.reactor import Reactor, Timer

logger = get_logger("vllm.kvtier.peers")

HERE = -1  # in place of a port: the address is the name of an instance, by which its socket on this node is found
REFUSED_PAUSE = 30.0  # seconds before an incompatible peer is asked again
DOWN_PAUSE = 2.0  # seconds before an unreachable peer is asked again
IDLE_CLOSE = 600.0  # seconds after which an unused connection is closed
# Clients name addresses, so what is kept about them is bounded.
MAX_CONNECTIONS = 512
MAX_REMEMBERED = 1024

# What an engine refuses with. They become labels of metrics, and whoever listens at an address that a client named may
# say anything.
CODES = frozenset({"namespace", "instance", "starting", "malformed", *(each.value for each in Refusal)})
# Refusals that the user can do something about; the others are the ordinary course of things.
SAID = ("namespace", "layout", "malformed", "timeout", "unreachable")


@dataclass
class _Connection:
    address: Address
    dealer: Dealer | LocalDealer
    last_used: float
    welcome: m.Welcome | None = None
    unlike: str | None = None  # why its pages cannot be read as they lie; mapped, they can be rearranged
    waiting: list[PendingAsk] = field(default_factory=list)  # for the handshake
    asked: dict[int, PendingAsk] = field(default_factory=dict)
    leases: set[int] = field(default_factory=set)
    handshake_timer: Timer | None = None
    ping_timer: Timer | None = None
    idle_timer: Timer | None = None
    unanswered: int = 0  # asks in a row that timed out
    lost: NoOffer | None = None  # its connection ended, and leases wait for ZMQ to make it anew
    lost_timer: Timer | None = None  # when they are void


class Peers:
    def __init__(
        self,
        reactor: Reactor,
        config: KVTierConfig,
        key: ClusterKey | None,
        hello: Callable[[], m.Hello | None],
        check_ranks: Callable[[list[m.RankInfo]], str | None],
        world: int = 1,
    ):
        """``hello``: our greeting, None while the engine starts or sleeps: then nothing is asked. ``check_ranks``: why
        a peer's pages cannot be read as they lie, or None. ``world``: our ranks."""
        self._reactor, self._config, self._key = reactor, config, key
        self._hello, self._check_ranks, self._world = hello, check_ranks, world
        self._connections: dict[Address, _Connection] = {}
        self._paused: dict[Address, tuple[float, NoOffer]] = {}
        self._said: set[tuple[Address, str]] = set()
        self._ask_ids = itertools.count(1)
        reactor.on_stop(self._release_all)

    # -- scheduler's thread ------------------------------------------------------------------------------------

    def ask(self, address: Address, timeout: float = math.inf, near: str = "", **fields) -> PendingAsk:
        """Queue an ask; the answer, a refusal or a time-out appears in ``outcome``. ``timeout``: seconds, where the
        option's are too many. ``near``: the instance, if it is said to be on this node."""
        ask = m.Ask(ask=next(self._ask_ids), instance="", **fields)
        pending = PendingAsk(address, ask, time.monotonic() + min(timeout, self._config.ask_timeout), near)
        self._reactor.call_soon(lambda: self._begin(pending))
        return pending

    def cancel(self, pending: PendingAsk) -> None:
        def cancel() -> None:
            pending.cancelled = True
            if isinstance(pending.outcome, Offer):
                self._release(pending.outcome, done=False)

        self._reactor.call_soon(cancel)

    def release(self, offer: Offer, done: bool) -> None:
        self._reactor.call_soon(lambda: self._release(offer, done))

    def drop(self, address: Address, export: str) -> None:
        """Tell the engine at ``address`` that nobody will fetch ``export``; its time limit is the backstop."""

        def drop() -> None:
            connection = self._connections.get(address)
            if connection is None:
                paused = self._remembered(address)
                if paused is None or paused.code != "unreachable":
                    connection = self._connect(address)
            if connection is not None:
                self._send(connection, m.Drop(export))

        self._reactor.call_soon(drop)

    def known(self, address: Address, instance: str) -> list[m.RankInfo] | None:
        """The ranks of an engine that we shook hands with, if it is still that instance."""
        connection = self._connections.get(address)
        welcome = connection.welcome if connection is not None else None
        if self._hello() is None or welcome is None or welcome.instance != instance:
            return None
        if connection.unlike or connection.lost is not None:
            return None
        return welcome.ranks

    def held_leases(self) -> int:
        return sum(len(c.leases) for c in list(self._connections.values()))

    # -- reactor's thread --------------------------------------------------------------------------------------

    def _begin(self, pending: PendingAsk) -> None:
        if self._hello() is None:
            self._settle(pending, NoOffer("unreachable", "this engine is still starting, or sleeps"))
            return
        here, connection = (pending.near, HERE), None
        paused = self._remembered(here) or self._remembered(pending.address)
        if paused is not None:
            self._settle(pending, paused)
            return
        if pending.near:
            connection = self._connections.get(here) or self._connect(here)
        if connection is None:
            connection = self._connections.get(pending.address) or self._connect(pending.address)
        if connection is None:
            self._settle(pending, NoOffer("unreachable", "no connection can be made to this address"))
            return
        if connection.lost is not None:
            self._settle(pending, connection.lost)
            return
        connection.last_used = time.monotonic()
        pending.timer = self._reactor.call_later(
            max(0.0, pending.deadline - time.monotonic()), lambda: self._timed_out(connection, pending)
        )
        if connection.welcome is None:
            connection.waiting.append(pending)
        else:
            self._send_ask(connection, pending)

    def _connect(self, address: Address) -> _Connection | None:
        hello = self._hello()
        if hello is None:
            return None
        if len(self._connections) >= MAX_CONNECTIONS:
            self._say_once(address, f"{MAX_CONNECTIONS} connections are open already")
            return None
        connection: _Connection

        def hear(frames: list[bytes]) -> None:
            self._receive(connection, frames)

        def lose(why: str) -> None:
            self._lost(connection, why)

        try:
            if address[1] == HERE:
                dealer = LocalDealer(self._reactor, address[0], m.MAX_MESSAGE, hear, lose)
            else:
                dealer = Dealer(
                    self._reactor, address, self._key, m.MAX_MESSAGE, hear, lose, lambda: self._found(connection)
                )
        except (KVTierError, OSError, zmq.ZMQError, ValueError) as error:
            if address[1] != HERE:
                self._say_once(address, f"cannot connect: {error}")
            return None
        connection = self._connections[address] = _Connection(address, dealer, time.monotonic())
        self._greet(connection, hello)
        self._watch_idle(connection)
        return connection

    def _greet(self, connection: _Connection, hello: m.Hello) -> None:
        self._send(connection, hello)
        connection.handshake_timer = self._reactor.call_later(
            self._config.handshake_timeout,
            lambda: self._close(connection, NoOffer("unreachable", "the handshake was not answered"), DOWN_PAUSE),
        )

    def _lost(self, connection: _Connection, why: str) -> None:
        """The connection ended, or could not be made: nothing that was asked over it will be answered."""
        outcome = NoOffer("unreachable", why)
        known = connection.welcome is not None
        if known:  # who was silent is gone; whether anybody is there now, the next ask finds out at once
            self._paused.pop(connection.address, None)
        if not connection.leases or isinstance(connection.dealer, LocalDealer):  # that process has ended
            self._close(connection, outcome, 0.0 if known else DOWN_PAUSE)
            return
        # Perhaps only the connection broke: pings and releases that wait in the socket go out when ZMQ has made it
        # anew. An ask among them is granted to nobody, and given back.
        connection.lost = outcome
        self._end_asks(connection, outcome)
        if connection.lost_timer is None:
            connection.lost_timer = self._reactor.call_later(
                self._config.lease_seconds, lambda: self._close(connection, outcome, 0.0)
            )

    def _found(self, connection: _Connection) -> None:
        connection.lost = None
        if connection.lost_timer is not None:
            connection.lost_timer.cancel()
            connection.lost_timer = None

    def _receive(self, connection: _Connection, frames: list[bytes]) -> None:
        if connection.unanswered:  # slow, but alive
            connection.unanswered = 0
            self._paused.pop(connection.address, None)
        try:
            message = m.decode_engine(frames[-1])
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            self._close(connection, NoOffer("malformed", f"malformed answer: {error}"), REFUSED_PAUSE)
            return
        match message:
            case m.Welcome():
                self._welcomed(connection, message)
            case m.Granted():
                self._granted(connection, message)
            case m.Refused(ask=0):
                pause = DOWN_PAUSE if message.code == "starting" else REFUSED_PAUSE
                self._close(connection, _refusal(message), pause)
            case m.Refused(code="instance"):
                self._restarted(connection, _refusal(message))
            case m.Refused():
                self._answer(connection, message.ask, _refusal(message))
            case _:
                self._close(connection, NoOffer("malformed", f"unexpected {type(message).__name__}"), REFUSED_PAUSE)

    def _restarted(self, connection: _Connection, outcome: NoOffer) -> None:
        """Another instance answers at this address: greet it, and ask it once more; it may be whom the asks are for."""
        again = [p for p in connection.asked.values() if not (p.again or p.cancelled) and p.outcome is None]
        for pending in again:
            del connection.asked[pending.ask.ask]
            pending.timer.cancel()
            pending.again = True
        self._close(connection, outcome, 0.0)
        for pending in again:
            self._begin(pending)

    def _welcomed(self, connection: _Connection, welcome: m.Welcome) -> None:
        connection.unlike = self._check_ranks(welcome.ranks)
        if connection.handshake_timer:
            connection.handshake_timer.cancel()
        connection.welcome = welcome
        waiting, connection.waiting = connection.waiting, []
        for pending in waiting:
            if pending.outcome is None and not pending.cancelled:
                self._send_ask(connection, pending)

    def _send_ask(self, connection: _Connection, pending: PendingAsk) -> None:
        if connection.unlike and not pending.ask.mapped:
            self._settle(pending, NoOffer("layout", connection.unlike))
            return
        connection.asked[pending.ask.ask] = pending
        self._send(connection, msgspec.structs.replace(pending.ask, instance=connection.welcome.instance))

    def _granted(self, connection: _Connection, granted: m.Granted) -> None:
        pending = connection.asked.pop(granted.ask, None)
        offer = self._offer(connection, granted, pending)
        connection.leases.add(granted.lease)
        self._keep_alive(connection)
        if pending is None or pending.cancelled or pending.outcome is not None:
            self._release(offer, done=False)  # too late: nobody waits for it
            if pending is not None and pending.timer is not None:
                pending.timer.cancel()  # it was answered: the peer is not to be taken for silent
        else:
            self._settle(pending, offer)

    def _offer(self, connection: _Connection, granted: m.Granted, pending: PendingAsk | None) -> Offer:
        welcome, ask = connection.welcome, pending.ask if pending is not None else None
        ranks = welcome.ranks if welcome is not None else []
        fields = (
            connection.address if pending is None else pending.address,
            welcome.instance if welcome is not None else "", granted.lease, granted.start, granted.tokens,
            granted.blocks, ranks,
        )
        if ask is None or not ask.lend:
            return Offer(*fields)
        groups = ranks[0].groups if ranks else ()
        share = len(ranks) / max(1, self._world)
        nbytes = sum(len(ids) * group.block_bytes for ids, group in zip(granted.blocks, groups, strict=False))
        return Loan(*fields, mapped=ask.mapped, alike=connection.unlike is None, nbytes=int(nbytes * share))

    def _answer(self, connection: _Connection, ask: int, outcome: NoOffer) -> None:
        pending = connection.asked.pop(ask, None)
        if pending is not None:
            self._settle(pending, outcome)

    def _timed_out(self, connection: _Connection, pending: PendingAsk) -> None:
        # A grant that still comes belongs to nobody, and is released on arrival.
        sent = connection.asked.pop(pending.ask.ask, None) is not None
        if pending in connection.waiting:
            connection.waiting.remove(pending)
        if pending.outcome is None:
            outcome = NoOffer("timeout", "no answer in time")
            if sent and self._connections.get(connection.address) is connection:
                # It may have died since the handshake: not every request should find that out by waiting.
                connection.unanswered += 1
                pause = min(DOWN_PAUSE * 2 ** (connection.unanswered - 1), REFUSED_PAUSE)
                self._pause(connection.address, pause, outcome)
            self._settle(pending, outcome)

    def _settle(self, pending: PendingAsk, outcome: Offer | NoOffer) -> None:
        if pending.timer is not None:
            pending.timer.cancel()
        if isinstance(outcome, NoOffer) and outcome.code in SAID:
            self._say_once(pending.address, f"{outcome.reason}; prompts are computed instead")
        pending.outcome = outcome
        pending.settled.set()

    def _keep_alive(self, connection: _Connection) -> None:
        if connection.ping_timer is None:
            connection.ping_timer = self._reactor.call_later(
                self._config.lease_seconds / 3, lambda: self._ping(connection)
            )

    def _ping(self, connection: _Connection) -> None:
        connection.ping_timer = None
        if connection.leases and self._connections.get(connection.address) is connection:
            self._send(connection, m.Ping())
            self._keep_alive(connection)

    def _watch_idle(self, connection: _Connection) -> None:
        """Close a connection that nobody used for long: its peer may be gone for good."""
        left = connection.last_used + IDLE_CLOSE - time.monotonic()
        if left <= 0 and not (connection.leases or connection.asked):
            self._close(connection, NoOffer("idle", "idle"), 0.0)
        else:
            connection.idle_timer = self._reactor.call_later(max(left, 1.0), lambda: self._watch_idle(connection))

    def _release(self, offer: Offer, done: bool) -> None:
        for address in ((offer.instance, HERE), offer.address):
            connection = self._connections.get(address)
            if connection is None or offer.lease not in connection.leases:
                continue  # the connection is gone and the lease with it
            if connection.welcome is None or connection.welcome.instance != offer.instance:
                continue  # the engine was restarted: that number is another request's lease there
            connection.leases.discard(offer.lease)
            self._send(connection, m.Release(offer.lease, done))
            return

    def _release_all(self) -> None:
        for connection in self._connections.values():
            for lease in connection.leases:
                self._send(connection, m.Release(lease, done=False))
            if isinstance(connection.dealer, LocalDealer):  # ZMQ's go with their context, when this has left
                connection.dealer.close()

    def _send(self, connection: _Connection, message: msgspec.Struct) -> None:
        connection.dealer.send(m.encode(message))

    def _close(self, connection: _Connection, outcome: NoOffer, pause: float) -> None:
        """Forget the connection; every ask on it ends with ``outcome``."""
        if self._connections.get(connection.address) is not connection:
            return
        del self._connections[connection.address]
        timers = (connection.handshake_timer, connection.ping_timer, connection.idle_timer, connection.lost_timer)
        for timer in timers:
            if timer is not None:
                timer.cancel()
        if pause:
            self._pause(connection.address, pause, outcome)
        self._end_asks(connection, outcome)
        connection.dealer.close()

    def _end_asks(self, connection: _Connection, outcome: NoOffer) -> None:
        asks = [*connection.waiting, *connection.asked.values()]
        connection.waiting, connection.asked = [], {}
        for pending in asks:
            if pending.outcome is None:
                self._settle(pending, outcome)

    def _remembered(self, address: Address) -> NoOffer | None:
        """Why it is not asked just now."""
        paused = self._paused.get(address)
        return paused[1] if paused is not None and paused[0] > time.monotonic() else None

    def _pause(self, address: Address, seconds: float, outcome: NoOffer) -> None:
        now = time.monotonic()
        self._paused = {a: p for a, p in self._paused.items() if p[0] > now}
        if len(self._paused) < MAX_REMEMBERED:
            self._paused[address] = (now + seconds, outcome)

    def _say_once(self, address: Address, text: str) -> None:
        if (address, text) not in self._said:
            if len(self._said) >= MAX_REMEMBERED:
                self._said.clear()
            self._said.add((address, text))
            # A host comes with a request: whatever is in it, it does not begin a line of the log or break it.
            words = ascii(f"{address[0]}:{address[1]}: {text}")[1:-1]
            logger.warning("kvtier: no pull from %s", words)


def _refusal(said: m.Refused) -> NoOffer:
    return NoOffer(said.code if said.code in CODES else "refused", said.reason)
