"""The mover of other nodes' stores: asks them for chains, reads their blocks into our pool, and lets them read ours.

Options of Open are StoreOptions' ``nodes``, ``node_listen`` and ``cluster_key_file``. A question goes to all stores
that may know, at once; the one that has most is kept, the others are told so.
"""

import itertools
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.nodes import wire as w
from vllm_kvtier.store.lower.nodes.agent import Drive, Reader, Server, quiet_ucx
from vllm_kvtier.store.lower.nodes.options import Address, NodeOptions
from vllm_kvtier.store.lower.nodes.peers import Peer, Peers
from vllm_kvtier.store.lower.nodes.reads import Job, Reads
from vllm_kvtier.store.lower.nodes.serving import Serving
from vllm_kvtier.store.lower.runner import Host
from vllm_kvtier.store.messages import MAX_NODES
from vllm_kvtier.store.records import HASH
from vllm_kvtier.wire.reactor import Timer

ASK_SECONDS = 1.0  # for all answers to a question
BETTER_SECONDS = 0.25  # for better answers than the first


@dataclass(slots=True, eq=False)
class Question:
    """One Look. ``best``: of the offers so far, whose lease we hold."""

    look: m.Look
    waiting: int = 0
    best: tuple[Peer, w.Offer] | None = None
    over: bool = False
    timers: list[Timer] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Held:
    """What a Located found. ``slots``: by (group, hash), made when first needed."""

    look: m.Look
    peer: Peer
    offer: w.Offer
    slots: dict[tuple[int, bytes], int] = field(default_factory=dict)


class NodeMover:
    """A ``runner.Backend``."""

    def __init__(self, host: Host, options: Mapping[str, str | int | float | bool]):
        self._host, self._reactor = host, host.reactor
        self._options = NodeOptions.parse(options)
        self._instance = uuid.uuid4().hex
        self._peers = Peers(self._reactor, self._instance, self._options, self._peer_gone)
        self._reads = Reads(host.pool, self._make_reader, self._read_over, self._read_broke, host.fail)
        self._drive = Drive(self._reactor, host.guard)
        self._drive.add(self._reads.drive)
        self._serving: Serving | None = None
        self._tokens = itertools.count(1)
        self._held: dict[int, Held] = {}

    def open(self) -> m.Opened:
        quiet_ucx(loopback=self._options.key is None)
        self._reads.open()
        if self._options.listen is not None:
            agent = Server(self._host.pool, f"server of {self._instance}")
            pool = self._host.pool
            self._serving = Serving(
                self._host, self._instance, self._options, agent, pool.address, pool.nbytes, self._drive.wake
            )

            def serve() -> bool:
                if self._serving.reading:
                    agent.progress()
                return self._serving.reading

            self._drive.add(serve)
        return m.Opened(writable=False)

    def handle(self, message: m.ToMover) -> None:
        if isinstance(message, m.Look):
            self._look(message)
        elif isinstance(message, m.Read):
            self._read(message)
        elif isinstance(message, m.Release):
            held = self._held.pop(message.token, None)
            if held is not None:
                self._peers.release(held.peer, held.offer.lease)
        elif isinstance(message, m.Lent) and self._serving is not None:
            self._serving.lent(message)
        else:
            raise KVTierError(f"{type(message).__name__} is nothing for other nodes")

    def close(self) -> None:
        """Connections end with the process; peers notice by themselves."""

    # -- asking -------------------------------------------------------------------------------------------------

    def _look(self, look: m.Look) -> None:
        named = [address for text in look.nodes[:MAX_NODES] if (address := Address.parse(text)) is not None]
        question = Question(look)
        ask = w.Ask(0, look.space, look.unit_tokens, look.groups, look.chain, look.start)
        if look.groups and not w.ask_fault(look.chain, look.start, look.groups):
            for address in dict.fromkeys([*named, *self._options.nodes]):
                question.waiting += self._peers.ask(
                    address, ask, lambda peer, offer: self._answered(question, peer, offer)
                )
        if question.waiting:
            question.timers.append(self._reactor.call_later(ASK_SECONDS, lambda: self._decide(question)))
        else:
            self._decide(question)

    def _answered(self, question: Question, peer: Peer, offer: w.Offer | None) -> None:
        question.waiting -= 1
        if offer is not None:
            if question.over or question.best is not None and question.best[1].units >= offer.units:
                self._peers.release(peer, offer.lease)
            else:
                if question.best is not None:
                    self._peers.release(question.best[0], question.best[1].lease)
                else:
                    question.timers.append(self._reactor.call_later(BETTER_SECONDS, lambda: self._decide(question)))
                question.best = (peer, offer)
        if not question.over and (not question.waiting or self._is_all(question)):
            self._decide(question)

    def _is_all(self, question: Question) -> bool:
        return question.best is not None and question.best[1].units == len(question.look.chain) // HASH

    def _decide(self, question: Question) -> None:
        if question.over:
            return
        question.over = True
        for timer in question.timers:
            timer.cancel()
        look = question.look
        if question.best is None or question.best[0].closed:
            self._host.send(m.Located(look.id, 0, look.start))
            return
        peer, offer = question.best
        token = next(self._tokens)
        self._held[token] = Held(look, peer, offer)
        self._host.send(m.Located(look.id, token, offer.units))

    # -- reading ------------------------------------------------------------------------------------------------

    def _read(self, read: m.Read) -> None:
        held = self._held.get(read.token)
        if held is None or held.peer.closed or not read.moves:
            error = "" if not read.moves else "the store that had these blocks is gone"
            self._host.send(m.Moved(read.id, [False] * len(read.moves), error))
            return
        look = held.look
        if not held.slots:
            held.slots = w.slots_by_name(held.offer, look.chain, look.start, look.groups)
        far = [
            held.slots.get((move.group, move.hash), 0)
            if move.space == look.space and move.group < len(look.groups)
            and move.pages == look.groups[move.group].slot_pages
            else 0
            for move in read.moves
        ]  # fmt: skip
        self._peers.begin_read(held.peer)
        self._reads.start(read, held.peer, far)
        self._drive.wake()

    def _make_reader(self, name: str) -> Reader:
        return Reader(self._host.pool, f"{name} of {self._instance}")

    def _read_over(self, job: Job, seconds: float) -> None:
        if any(job.good):
            self._peers.reached(job.peer)
        self._peers.end_read(job.peer)
        self._host.send(m.Moved(job.message.id, job.good, job.error[:1000], seconds))

    def _read_broke(self, peer: Peer, reason: str) -> None:
        self._peers.close(peer, reason)

    def _peer_gone(self, peer: Peer, reason: str) -> None:
        for token in [token for token, held in self._held.items() if held.peer is peer]:
            del self._held[token]
        self._reads.gone(peer, reason)
        self._drive.wake()
