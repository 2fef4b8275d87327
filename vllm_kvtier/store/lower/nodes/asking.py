"""A question to all stores that may know, at once, for what they have in memory: the one that has most is kept, the
others are told so. If one might have more below its memory, that one is then asked to bring it up, and the answer waits
for it: not all of them, who would fill their memories with the same.

Stores' movers ask so, and engines that have no store of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from vllm_kvtier.store.lower.nodes import wire as w
from vllm_kvtier.store.lower.nodes.options import Address
from vllm_kvtier.store.lower.nodes.peers import Peer, Peers
from vllm_kvtier.store.messages import MAX_NODES
from vllm_kvtier.store.records import HASH
from vllm_kvtier.wire.reactor import Reactor, Timer

ASK_SECONDS = 1.0  # for all answers to a question
BETTER_SECONDS = 0.25  # for better answers than the first


@dataclass(frozen=True, slots=True)
class Answer:
    """``peer`` and ``offer`` None: nobody has anything in memory. ``below``: so many units somebody might have below
    it, who was not asked to bring them up; 0 if nobody was left to be asked."""

    peer: Peer | None = None
    offer: w.Offer | None = None
    below: int = 0


@dataclass(slots=True, eq=False)
class Question:
    """``best``: of the offers so far, whose lease we hold. ``deeper``: who might have most, and how much, if that is
    more than it offers. ``all_asked``: answers to the first question come too late."""

    ask: w.Ask
    patience: float
    decided: Callable[[Answer], None]
    coming: Callable[[int, float], None]
    waiting: int = 0
    best: tuple[Peer, w.Offer] | None = None
    deeper: tuple[Peer, int] | None = None
    all_asked: bool = False
    over: bool = False
    timers: list[Timer] = field(default_factory=list)

    @property
    def units(self) -> int:
        return self.best[1].units if self.best is not None else self.ask.start

    @property
    def most(self) -> int:
        return len(self.ask.chain) // HASH


class Asking:
    """``listed``: who is asked every time. ``better``: seconds for better answers than the first."""

    def __init__(self, reactor: Reactor, peers: Peers, listed: Sequence[Address], better: float = BETTER_SECONDS):
        self._reactor, self._peers, self._listed, self._better = reactor, peers, listed, better

    def ask(
        self,
        ask: w.Ask,
        named: Sequence[str],
        decided: Callable[[Answer], None],
        patience: float = 0.0,
        coming: Callable[[int, float], None] = lambda units, seconds: None,
    ) -> None:
        """``ask``: what is asked of each, without patience. ``named``: addresses of others that may know, as a request
        has them. ``decided`` is called once, perhaps at once; the lease of its offer is to be released.

        ``patience``: seconds that whoever might have more below its memory gets to bring it up; what it has by then is
        the answer. ``coming(units, seconds)``: until when how much is expected so.
        """
        others = [address for text in named[:MAX_NODES] if (address := Address.parse(text)) is not None]
        question = Question(ask, patience, decided, coming)
        if ask.groups and not w.ask_fault(ask.chain, ask.start, ask.groups):
            for address in dict.fromkeys([*others, *self._listed]):
                question.waiting += self._peers.ask(
                    address, ask, lambda peer, reply: self._answered(question, peer, reply)
                )
        if question.waiting:
            question.timers.append(self._reactor.call_later(ASK_SECONDS, lambda: self._go_deeper(question)))
        else:
            self._decide(question)

    def _answered(self, question: Question, peer: Peer, reply: w.Offer | w.Nothing | None) -> None:
        """To the question what is in memory."""
        question.waiting -= 1
        known = question.best is not None or question.deeper is not None
        if isinstance(reply, w.Offer):
            self._keep_if_better(question, peer, reply, too_late=question.all_asked)
        if question.all_asked:
            return
        below = min(reply.below, question.most) if reply is not None else 0
        if below > max(question.ask.start, question.deeper[1] if question.deeper is not None else 0):
            question.deeper = peer, below
        if not question.waiting or question.units == question.most:
            self._go_deeper(question)
        elif not known and (question.best is not None or question.deeper is not None):
            question.timers.append(self._reactor.call_later(self._better, lambda: self._go_deeper(question)))

    def _keep_if_better(self, question: Question, peer: Peer, offer: w.Offer, too_late: bool) -> None:
        if too_late or question.units >= offer.units:
            self._peers.release(peer, offer.lease)
            return
        if question.best is not None:
            self._peers.release(question.best[0], question.best[1].lease)
        question.best = (peer, offer)

    def _go_deeper(self, question: Question) -> None:
        """Nobody has more in memory. Below it?"""
        if question.all_asked:
            return
        question.all_asked = True
        _cancel(question.timers)
        if question.patience and self._below(question):
            peer, _ = question.deeper
            ask = msgspec.structs.replace(question.ask, patience=question.patience)
            if self._peers.ask(peer.address, ask, lambda peer, reply: self._deeper(question, peer, reply)):
                late = question.patience + ASK_SECONDS
                question.timers.append(self._reactor.call_later(late, lambda: self._decide(question)))
                question.deeper = None
                return
        self._decide(question)

    def _deeper(self, question: Question, peer: Peer, reply: w.Offer | w.Nothing | w.Coming | None) -> None:
        """To the question with patience."""
        if isinstance(reply, w.Coming):
            if not question.over:
                question.coming(max(question.units, reply.units), reply.seconds)
            return
        if isinstance(reply, w.Offer):
            self._keep_if_better(question, peer, reply, too_late=question.over)
        self._decide(question)

    def _below(self, question: Question) -> int:
        """Units that somebody might have below his memory, beyond what anybody has in it."""
        if question.deeper is None or question.deeper[0].closed or question.deeper[1] <= question.units:
            return 0
        return question.deeper[1]

    def _decide(self, question: Question) -> None:
        if question.over:
            return
        question.over = question.all_asked = True
        _cancel(question.timers)
        peer, offer = question.best or (None, None)
        if peer is not None and peer.closed:
            peer, offer, question.best = None, None, None
        question.decided(Answer(peer, offer, self._below(question)))


def _cancel(timers: list[Timer]) -> None:
    for timer in timers:
        timer.cancel()
    timers.clear()
