"""What other nodes' stores are lent of ours: each is, to the index, a client like an engine.

A lease ends when it is returned, when its asker leaves or our mover ends, and by the index's own deadline. Whoever
still reads then gets what lies there now, which the checksums of whoever loads it tell from what it asked for.

Who asks with patience waits for what our own disk or objects have of the chain: never for other nodes, which might be
asking us, and not for objects that the asker finds by itself.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from vllm_kvtier.store.entries import Shape
from vllm_kvtier.store.index import Index
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.base import Want
from vllm_kvtier.store.messages import Below
from vllm_kvtier.store.records import HASH, BadRequest, Found

MAX_KINDS = 16  # of cache groups that one asker asks about: more than models a node serves
_ALL = 1 << 40  # a pages_limit

Answer = Callable[[m.Lent | m.Coming], object]


class Underneath(Protocol):
    """What is needed of ``tiers.Lower``."""

    def peek(self, want: Want) -> int: ...

    def lookup(
        self,
        client: int,
        want: Want,
        pages_limit: int,
        patience: float,
        answer: Callable[[Found, Below | None], None],
    ) -> None: ...

    def forget(self, client: int) -> None: ...


class Lending:
    """On the server's reactor thread. ``client``: a number which no connection has; ours in the index, and the ones
    below it. ``on_lease()``: there is one, whose deadline somebody has to look after. ``objects``: digest of the
    object store below us. ``below``: set by who makes both; None: only what is in memory is lent."""

    below: Underneath | None = None

    def __init__(
        self,
        index: Index,
        client: int,
        on_lease: Callable[[], None] = lambda: None,
        *,
        objects: str = "",
        clock: Callable[[], float] = time.monotonic,
    ):
        self._index, self._next_client, self._on_lease = index, client, on_lease
        self._objects, self._clock = objects, clock
        self._clients: dict[int, dict[tuple, int]] = {}  # by asker and what it says of its groups, oldest first
        self._leases: dict[tuple[int, int], int] = {}  # (asker, lease): client
        self._waiting: dict[int, dict[int, Callable[[], None]]] = {}  # by client and number of Lend: gives it up
        self.lent_blocks = self.lent_leases = 0  # since the start
        self.brought_up = 0  # how often an answer waited for what came from below

    def __len__(self) -> int:
        """Leases that nobody has returned; some may be past their deadline."""
        return len(self._leases)

    def handle(self, message: m.Lend | m.Return | m.Left, answer: Answer) -> None:
        """What our mover says unasked. ``answer``: of a Lend, perhaps later; not if its asker or our mover goes."""
        if isinstance(message, m.Lend):
            self._lend(message, answer)
        elif isinstance(message, m.Return):
            client = self._leases.pop((message.asker, message.lease), None)
            if client is not None:
                self._index.release(client, message.lease)
        else:
            self._left(message.asker)

    def end(self) -> None:
        """Our mover has ended: all of its askers are gone. Idempotent."""
        for asker in list(self._clients):
            self._left(asker)

    # -- lending ------------------------------------------------------------------------------------------------

    def _lend(self, ask: m.Lend, answer: Answer) -> None:
        if not ask.groups or len(ask.chain) % HASH:
            answer(_nothing(ask))
            return
        shapes = [Shape(group.units, group.window, group.slot_pages) for group in ask.groups]
        skip = ("nodes", "object") if self._objects and ask.objects == self._objects else ("nodes",)
        want = Want(ask.space, ask.unit_tokens, shapes, ask.chain, ask.start, skip=skip)
        try:
            client = self._client(ask)
            if ask.patience and self.below is not None:
                self._bring_up(ask, client, want, answer)
                return
            found = self._index.lookup(client, ask.space, ask.chain, ask.start, _ALL)
        except BadRequest:  # other groups than the space has here: the asker computes what it needs
            answer(_nothing(ask))
            return
        further = 0
        if self.below is not None and found.units < want.units:
            further = self.below.peek(replace(want, start=found.units))
        self._lent(ask, client, found, answer, further if further > found.units else 0)

    def _bring_up(self, ask: m.Lend, client: int, want: Want, answer: Answer) -> None:
        """Looked up again whenever something has come or is known, as long as it pays to wait."""
        until = self._clock() + ask.patience
        waiting = self._waiting.setdefault(client, {})

        def heard(found: Found, more: Below | None) -> None:
            left = until - self._clock()
            if more is None or left <= 0:
                waiting.pop(ask.id, None)
                self._lent(ask, client, found, answer)
                return
            if ask.id not in waiting:
                self.brought_up += 1
                waiting[ask.id] = lambda: answer(_nothing(ask))
            if found.lease:
                self._index.release(client, found.lease)
            answer(m.Coming(ask.id, more.units, max(more.seconds, more.asking)))
            look(left)

        def look(patience: float) -> None:
            try:
                self.below.lookup(client, want, _ALL, patience, heard)
            except BadRequest:  # the space was cleared meanwhile, and belongs to an engine with other groups now
                waiting.pop(ask.id, None)
                answer(_nothing(ask))

        look(0.0)

    def _lent(self, ask: m.Lend, client: int, found: Found, answer: Answer, further: int = 0) -> None:
        if found.lease:
            self._leases[ask.asker, found.lease] = client
            self.lent_leases += 1
            self.lent_blocks += sum(slot > 0 for row in found.slots for slot in row)
            self._on_lease()
        answer(m.Lent(ask.id, found.lease, found.units, found.slots, further))

    # -- askers -------------------------------------------------------------------------------------------------

    def _client(self, ask: m.Lend) -> int:
        kinds = self._clients.setdefault(ask.asker, {})
        kind = (ask.unit_tokens, *ask.groups)
        client = kinds.get(kind)
        if client is None:
            if len(kinds) >= MAX_KINDS:
                for give_up in self._disconnect(kinds.pop(next(iter(kinds)))):
                    give_up()
            client, self._next_client = self._next_client, self._next_client - 1
            self._index.connect(client, ask.unit_tokens, ask.groups)
            kinds[kind] = client
        return client

    def _left(self, asker: int) -> None:
        for client in self._clients.pop(asker, {}).values():
            self._disconnect(client)

    def _disconnect(self, client: int) -> list[Callable[[], None]]:
        """Returns what tells those of its Lends that still wait that they get nothing."""
        if self.below is not None:
            self.below.forget(client)
        self._index.disconnect(client)
        self._leases = {name: of for name, of in self._leases.items() if of != client}
        return list(self._waiting.pop(client, {}).values())


def _nothing(ask: m.Lend) -> m.Lent:
    return m.Lent(ask.id, 0, ask.start, [[] for _ in ask.groups])
