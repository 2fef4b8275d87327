"""What other nodes' stores are lent of ours: each is, to the index, a client like an engine.

A lease ends when it is returned, when its asker leaves or our mover ends, and by the index's own deadline. Whoever
still reads then gets what lies there now, which the checksums of whoever loads it tell from what it asked for.
"""

from collections.abc import Callable

from vllm_kvtier.store.index import Index
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.records import HASH, BadRequest

MAX_KINDS = 16  # of cache groups that one asker asks about: more than models a node serves
_ALL = 1 << 40  # a pages_limit


class Lending:
    """On the server's reactor thread. ``client``: a number which no connection has; ours in the index, and the ones
    below it. ``on_lease()``: there is one, whose deadline somebody has to look after."""

    def __init__(self, index: Index, client: int, on_lease: Callable[[], None] = lambda: None):
        self._index, self._next_client, self._on_lease = index, client, on_lease
        self._clients: dict[int, dict[tuple, int]] = {}  # by asker and what it says of its groups, oldest first
        self._leases: dict[tuple[int, int], int] = {}  # (asker, lease): client
        self.lent_blocks = self.lent_leases = 0  # since the start

    def __len__(self) -> int:
        """Leases that nobody has returned; some may be past their deadline."""
        return len(self._leases)

    def handle(self, message: m.Lend | m.Return | m.Left) -> m.Lent | None:
        """What our mover says unasked; the answer to it."""
        if isinstance(message, m.Lend):
            return self._lend(message)
        if isinstance(message, m.Return):
            client = self._leases.pop((message.asker, message.lease), None)
            if client is not None:
                self._index.release(client, message.lease)
        else:
            self._left(message.asker)
        return None

    def end(self) -> None:
        """Our mover has ended: all of its askers are gone. Idempotent."""
        for asker in list(self._clients):
            self._left(asker)

    def _lend(self, ask: m.Lend) -> m.Lent:
        nothing = m.Lent(ask.id, 0, ask.start, [[] for _ in ask.groups])
        if not ask.groups or len(ask.chain) % HASH:
            return nothing
        try:
            client = self._client(ask)
            found = self._index.lookup(client, ask.space, ask.chain, ask.start, _ALL)
        except BadRequest:  # other groups than the space has here: the asker computes what it needs
            return nothing
        if not found.lease:
            return nothing
        self._leases[ask.asker, found.lease] = client
        self.lent_leases += 1
        self.lent_blocks += sum(slot > 0 for row in found.slots for slot in row)
        self._on_lease()
        return m.Lent(ask.id, found.lease, found.units, found.slots)

    def _client(self, ask: m.Lend) -> int:
        kinds = self._clients.setdefault(ask.asker, {})
        kind = (ask.unit_tokens, *ask.groups)
        client = kinds.get(kind)
        if client is None:
            if len(kinds) >= MAX_KINDS:
                self._disconnect(kinds.pop(next(iter(kinds))))
            client, self._next_client = self._next_client, self._next_client - 1
            self._index.connect(client, ask.unit_tokens, ask.groups)
            kinds[kind] = client
        return client

    def _left(self, asker: int) -> None:
        for client in self._clients.pop(asker, {}).values():
            self._disconnect(client)

    def _disconnect(self, client: int) -> None:
        self._index.disconnect(client)
        self._leases = {name: of for name, of in self._leases.items() if of != client}
