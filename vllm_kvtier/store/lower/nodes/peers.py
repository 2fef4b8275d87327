"""Connections to other nodes' stores: made when first needed, kept while used, dropped when silent.

A peer that does not answer is left alone for a while, longer each time, so that not every question waits for it. A
connection ends as a whole: whatever was asked on it, lent through it or is being read by it ends with it.
"""

import itertools
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.lower.nodes import wire as w
from vllm_kvtier.store.lower.nodes.options import Address, NodeOptions
from vllm_kvtier.store.records import HASH
from vllm_kvtier.wire.reactor import Reactor, Timer, drain

logger = get_logger(__name__)

MAX_CONNECTIONS = 64  # kept at a time; requests name addresses, so what is remembered about them is bounded
MAX_REMEMBERED = 1024
PAUSES = 1.0, 60.0  # seconds in which a peer that failed is not asked: the first time, and the most
SELF_PAUSE = 600.0  # ours, in a list that all nodes share
GREETING_SECONDS = 5.0  # until Welcome
SLOW_SECONDS = 1.0  # since a question that was not answered yet: nothing more is asked until it is
ANSWER_SECONDS = 10.0  # until an answer, whoever still waits for it

# Coming, perhaps several times, then the answer; None: the connection ended.
Answer = Callable[["Peer", w.Offer | w.Nothing | w.Coming | None], None]


@dataclass(slots=True, eq=False)
class Peer:
    """``welcome`` None: not yet. ``closed``: it, and whatever it lent, is of no use any more."""

    address: Address
    socket: zmq.Socket
    last_used: float
    last_heard: float
    welcome: w.Welcome | None = None
    questions: dict[int, tuple[w.Ask, Answer, float]] = field(default_factory=dict)  # and when its patience ends
    leases: set[int] = field(default_factory=set)
    reads: int = 0  # that need the other side's help
    metadata: bytes = b""
    generation: int = 0  # of the metadata, over all peers
    closed: bool = False
    greeting: Timer | None = None
    pinging: Timer | None = None

    @property
    def agent(self) -> str:
        """Of NIXL; "" while it has not greeted us."""
        return self.welcome.agent if self.welcome is not None else ""

    @property
    def base(self) -> int:
        """Address of its pool, there."""
        return self.welcome.base

    @property
    def busy(self) -> bool:
        return bool(self.questions or self.leases or self.reads)

    def waiting_since(self, now: float) -> float:
        """Since when an answer could be here that is not; ``now`` if there is none. One that may wait for what is on
        the other side's disk is not late while it may."""
        return min((due for _, _, due in self.questions.values()), default=now)


class Peers:
    """``instance``: ours, in which we recognise ourselves in a list that all nodes share. ``on_gone(peer, reason)``:
    the connection has ended. ``log``: of the process that asks."""

    def __init__(
        self,
        reactor: Reactor,
        instance: str,
        options: NodeOptions,
        on_gone: Callable[[Peer, str], None],
        log: logging.Logger = logger,
    ):
        self._reactor, self._instance, self._options, self._on_gone = reactor, instance, options, on_gone
        self._log = log
        self._peers: dict[Address, Peer] = {}
        self._paused: dict[Address, tuple[float, float]] = {}  # (until, how long)
        self._aliases: dict[Address, Address] = {}  # of stores that are connected by another address
        self._said: set[tuple[Address, str]] = set()
        self._ids, self._generations = itertools.count(1), itertools.count(1)

    def __len__(self) -> int:
        return len(self._peers)

    def ask(self, address: Address, ask: w.Ask, answer: Answer) -> bool:
        """``answer(peer, reply)`` is called later, the last time with what is not Coming; an offer's lease is to be
        ``release`` d. False: this peer is not asked at present, and nothing is called."""
        peer = self._peers.get(self._aliases.get(address, address)) or self._connect(address)
        if peer is None:
            return False
        now = peer.last_used = time.monotonic()
        if now - peer.waiting_since(now) > SLOW_SECONDS:
            return False
        ask = msgspec.structs.replace(ask, id=next(self._ids))
        peer.questions[ask.id] = (ask, answer, now + ask.patience)
        if peer.welcome is not None:
            self._send(peer, ask)
        self._keep_alive(peer)
        return True

    def find(self, instance: str) -> Peer | None:
        """The connection to this life of a store."""
        return next((p for p in self._peers.values() if p.welcome and p.welcome.instance == instance), None)

    def release(self, peer: Peer, lease: int) -> None:
        """Idempotent, also after the connection's end."""
        if lease in peer.leases:
            peer.leases.discard(lease)
            self._send(peer, w.Release(lease))

    def begin_read(self, peer: Peer) -> None:
        """The other side is to look after reads, until as many ``end_read``."""
        peer.reads += 1
        if peer.reads == 1:
            self._send(peer, w.Reading(True))
            self._keep_alive(peer)

    def end_read(self, peer: Peer) -> None:
        peer.reads -= 1
        if not peer.reads:
            self._send(peer, w.Reading(False))

    def close(self, peer: Peer, reason: str, said: bool = True) -> None:
        """Forget it, and do not ask it for a while. Idempotent. ``said``: a person may want to know."""
        if peer.closed:
            return
        peer.closed = True
        del self._peers[peer.address]
        for timer in filter(None, (peer.greeting, peer.pinging)):
            timer.cancel()
        self._reactor.remove_socket(peer.socket)
        self._pause(peer.address)
        if said:
            self._say_once(peer.address, reason)
        peer.leases.clear()
        questions, peer.questions = peer.questions, {}
        for _, answer, _ in questions.values():
            answer(peer, None)
        self._on_gone(peer, reason)

    def reached(self, peer: Peer) -> None:
        """Bytes came from it: what went wrong before is forgotten."""
        self._paused.pop(peer.address, None)

    # -- connecting ---------------------------------------------------------------------------------------------

    def _connect(self, address: Address) -> Peer | None:
        if not self._options.allows(address):
            self._say_once(address, "it is beyond loopback and there is no cluster key (cluster_key_file)")
            return None
        now = time.monotonic()
        if self._paused.get(address, (0.0, 0.0))[0] > now or not self._make_place():
            return None
        socket = self._reactor.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IDENTITY, os.urandom(16))
        socket.setsockopt(zmq.MAXMSGSIZE, w.MAX_MESSAGE)
        socket.setsockopt(zmq.IPV6, ":" in address.host)
        if self._options.key is not None:
            self._options.key.secure_client(socket)
        try:
            socket.connect(address.endpoint)
        except zmq.ZMQError as error:
            socket.close(0)
            self._pause(address)
            self._say_once(address, f"cannot connect: {error}")
            return None
        peer = self._peers[address] = Peer(address, socket, now, now)
        self._reactor.add_socket(socket, lambda: drain(socket, lambda frames: self._receive(peer, frames)))
        self._send(peer, w.Hello(self._instance, objects=self._options.objects))
        peer.greeting = self._reactor.call_later(
            GREETING_SECONDS, lambda: self.close(peer, "it does not answer, or has another cluster key")
        )
        return peer

    def _make_place(self) -> bool:
        """For one more: the idle connection that was unused longest has to go."""
        if len(self._peers) < MAX_CONNECTIONS:
            return True
        idle = [peer for peer in self._peers.values() if not peer.busy]
        if not idle:
            return False
        oldest = min(idle, key=lambda peer: peer.last_used)
        self.close(oldest, "unused", said=False)
        self._paused.pop(oldest.address, None)
        return True

    # -- messages -----------------------------------------------------------------------------------------------

    def _receive(self, peer: Peer, frames: list[bytes]) -> None:
        peer.last_heard = time.monotonic()
        try:
            message = w.decode_from_server(frames)
        except msgspec.DecodeError as error:
            self.close(peer, f"it sends what no store sends: {error}")
            return
        if isinstance(message, w.Welcome):
            self._welcomed(peer, message)
        elif isinstance(message, w.Refused):
            # Where it had forgotten us, for instance because it was started anew, the next question greets it again.
            self.close(peer, f"it refused: {message.reason}", said=peer.welcome is None)
        elif isinstance(message, w.Offer | w.Nothing):
            self._answered(peer, message)
        elif isinstance(message, w.Coming):
            self._coming(peer, message)

    def _welcomed(self, peer: Peer, welcome: w.Welcome) -> None:
        if peer.welcome is not None:
            self.close(peer, "it greets twice")
        elif welcome.protocol != w.PROTOCOL:
            self.close(peer, f"it is vllm-kvtier {welcome.version} and speaks protocol {welcome.protocol}")
        elif welcome.instance == self._instance:
            self.close(peer, "this is ourselves", said=False)
            self._paused[peer.address] = (time.monotonic() + SELF_PAUSE, SELF_PAUSE)
        elif (known := self._connected(welcome.agent)) is not None:
            self._become(peer, known)
        else:
            peer.welcome = welcome
            peer.greeting.cancel()
            for ask, _, _ in peer.questions.values():
                self._send(peer, ask)

    def _connected(self, agent: str) -> Peer | None:
        return next((peer for peer in self._peers.values() if peer.welcome and peer.welcome.agent == agent), None)

    def _become(self, peer: Peer, known: Peer) -> None:
        """One store under two addresses: one connection, because what a store tells of its memory it tells once."""
        if len(self._aliases) >= MAX_REMEMBERED:
            self._aliases.clear()
        self._aliases[peer.address] = known.address
        questions, peer.questions = peer.questions, {}
        self.close(peer, "it is connected by another address", said=False)
        self._paused.pop(peer.address, None)
        known.questions.update(questions)
        for ask, _, _ in questions.values():
            self._send(known, ask)
        self._keep_alive(known)

    def _coming(self, peer: Peer, message: w.Coming) -> None:
        ask, answer, _ = peer.questions.get(message.id, (None, None, 0.0))
        if ask is None or not ask.patience or message.units * HASH > len(ask.chain):
            self.close(peer, "it promises what nobody asked for")
            return
        answer(peer, message)

    def _answered(self, peer: Peer, message: w.Offer | w.Nothing) -> None:
        ask, answer, _ = peer.questions.pop(message.id, (None, None, 0.0))
        if ask is None or peer.welcome is None:
            self.close(peer, "it answers what nobody asked")
            return
        if isinstance(message, w.Nothing):
            answer(peer, message)
            return
        if message.metadata:
            peer.metadata, peer.generation = message.metadata, next(self._generations)
        fault = w.offer_fault(message, ask.chain, ask.start, ask.groups, peer.welcome.pool_bytes)
        if fault or not peer.metadata:
            self.close(peer, f"it offers what it cannot have: {fault or 'memory without its name'}")
            answer(peer, None)
            return
        peer.leases.add(message.lease)
        answer(peer, message)

    def _send(self, peer: Peer, message: w.FromAsker) -> None:
        if peer.closed:
            return
        try:
            peer.socket.send(w.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.debug("kvtier: a message to %s was not sent: %s", peer.address, error)

    # -- life signs ---------------------------------------------------------------------------------------------

    def _keep_alive(self, peer: Peer) -> None:
        if peer.pinging is None:
            peer.last_heard = time.monotonic()  # it had no reason to say anything
            peer.pinging = self._reactor.call_later(w.PING_SECONDS, lambda: self._ping(peer))

    def _ping(self, peer: Peer) -> None:
        peer.pinging = None
        if not peer.busy:
            return
        now = time.monotonic()
        silent, waits = now - peer.last_heard, now - peer.waiting_since(now)
        if peer.welcome is not None and (silent > w.SILENT_SECONDS or waits > ANSWER_SECONDS):
            self.close(peer, "it does not answer")
            return
        if peer.welcome is not None:
            self._send(peer, w.Ping())
        peer.pinging = self._reactor.call_later(w.PING_SECONDS, lambda: self._ping(peer))

    def _pause(self, address: Address) -> None:
        now = time.monotonic()
        _, before = self._paused.get(address, (0.0, 0.0))
        if len(self._paused) >= MAX_REMEMBERED:
            self._paused = {a: p for a, p in self._paused.items() if p[0] > now}
            if len(self._paused) >= MAX_REMEMBERED:
                return
        seconds = min(max(PAUSES[0], 2 * before), PAUSES[1])
        self._paused[address] = (now + seconds, seconds)

    def _say_once(self, address: Address, text: str) -> None:
        if (address, text) not in self._said:
            if len(self._said) >= MAX_REMEMBERED:
                self._said.clear()
            self._said.add((address, text))
            self._log.warning("kvtier: nothing from the store at %s: %s (said once)", address, text)
