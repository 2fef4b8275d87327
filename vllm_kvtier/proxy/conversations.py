"""Which engines have a conversation: names for conversations, and the table of their routes.

A conversation is named by the client (an id), or recognised by its text: each turn repeats the turns before
it, so the chain of digests over (tenant, model, first message, second message, ...) of one turn is a prefix
of the next turn's. Only the *end* of each turn's chain is entered, and the longest entered prefix of a new
turn is its route. So a common system prompt alone is no match (nobody ended there), while a history edited
in the middle still matches the last turn before the edit. Completions have no messages; their prompts are
cut into pieces of fixed size.

Every name is a keyed digest over the tenant: two tenants' names never meet, whatever ids or texts they
send, and the table holds no text.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from vllm_kvtier.proxy import bodies
from vllm_kvtier.proxy.tenants import Tenants

# Smaller pieces match prompts that were cut closer to their end, larger ones cost fewer digests; 256
# characters are about four of vLLM's default blocks, and below that a pull is not worth it.
_TEXT_PIECE = 256
_TOKEN_PIECE = 64


class Name(msgspec.Struct, frozen=True):
    """What to look a conversation up by.

    ``candidates``: digests, longest prefix first. ``entry``: the digest this turn is entered under, or None
    if the prompt is too short to be recognised again. ``explicit``: named by the client.
    """

    candidates: tuple[bytes, ...]
    entry: bytes | None
    explicit: bool


def name_conversation(tenants: Tenants, tenant: bytes, request: bodies.ClientRequest) -> Name:
    """Name the conversation that ``request`` belongs to."""
    model = request.model.encode("utf-8", "surrogatepass")
    if request.conversation_id is not None:
        given = request.conversation_id.encode("utf-8", "surrogatepass")
        digest = tenants.digest(b"conversation id", tenant, model, given)
        return Name((digest,), digest, explicit=True)
    chain = []
    state = tenants.digest(b"conversation", tenant, model, request.route.name.encode())
    for piece in _pieces(request):
        state = tenants.digest(b"chain", state, piece)
        chain.append(state)
    return Name(tuple(reversed(chain)), chain[-1] if chain else None, explicit=False)


def _pieces(request: bodies.ClientRequest) -> Iterable[bytes]:
    prompt = request.prompt
    if prompt is None:
        return
    if request.route is bodies.Route.CHAT:
        for message in prompt:
            # Sorted keys: the same message in another order of fields is the same message.
            yield msgspec.json.encode(message, order="sorted")
        return
    size = _TEXT_PIECE if isinstance(prompt, str) else _TOKEN_PIECE
    for begin in range(0, len(prompt) - size + 1, size):
        piece = prompt[begin : begin + size]
        yield piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else msgspec.json.encode(piece)


class Holder(msgspec.Struct, frozen=True):
    """A decode engine that served a conversation, and which life of that engine it was."""

    decode: int
    life: int


class ConversationRoute(msgspec.Struct, frozen=True):
    """Where a conversation was served: ``holders`` latest first; ``prefill``: the last P, if any."""

    holders: tuple[Holder, ...]
    prefill: int | None

    # Older holders lack the later turns; P asks each one, so few are enough.
    MAX_HOLDERS = 2

    def moved_to(self, holder: Holder, prefill: int | None) -> ConversationRoute:
        """The route after ``holder`` served a turn; a P is forgotten only for another one."""
        older = tuple(h for h in self.holders if h.decode != holder.decode)
        return ConversationRoute(
            holders=(holder, *older)[: self.MAX_HOLDERS],
            prefill=self.prefill if prefill is None else prefill,
        )


class RouteTable:
    """Digest -> route; bounded, least recently used first out, forgotten after a time without use.

    Entries are kept in the order of their last use, so the oldest are at the front: both bounds look there
    only.
    """

    def __init__(self, capacity: int, ttl: float, clock: Callable[[], float] = time.monotonic):
        self._capacity = capacity
        self._ttl = ttl
        self._clock = clock
        self._entries: OrderedDict[bytes, tuple[float, ConversationRoute]] = OrderedDict()

    def __len__(self) -> int:
        self._expire()
        return len(self._entries)

    def find(self, name: Name) -> ConversationRoute | None:
        """The route of the longest known prefix, whose life this extends."""
        self._expire()
        for digest in name.candidates:
            if (found := self._entries.get(digest)) is not None:
                self._put(digest, found[1])
                return found[1]
        return None

    def enter(self, name: Name, route: ConversationRoute) -> None:
        """Remember where this turn was served."""
        if name.entry is not None:
            self._put(name.entry, route)
            self._expire()

    def _put(self, digest: bytes, route: ConversationRoute) -> None:
        self._entries[digest] = (self._clock(), route)
        self._entries.move_to_end(digest)

    def _expire(self) -> None:
        oldest_allowed = self._clock() - self._ttl
        while self._entries:
            used, _ = next(iter(self._entries.values()))
            if used >= oldest_allowed and len(self._entries) <= self._capacity:
                return
            self._entries.popitem(last=False)
