"""Which engines have a conversation: names for conversations, and the table of their routes.

A conversation is named by the client (an id), or recognised by its text: each turn repeats the turns before it, so the
chain of digests over (tenant, model, first message, second message, ...) of one turn is a prefix of the next turn's.
Only the *end* of each turn's chain is entered, and the longest entered prefix of a new turn is its route. So a common
system prompt alone is no match (nobody ended there), while a history edited in the middle still matches the last turn
before the edit. Completions have no messages; their prompts are cut into pieces.

Every name is a keyed digest over the tenant: two tenants' names never meet, whatever ids or texts they send, and the
table holds no text.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import msgspec

from vllm_kvtier.proxy import bodies
from vllm_kvtier.proxy.prefixes import Piece
from vllm_kvtier.proxy.tenants import Tenants

CHARS_PER_TOKEN = 4

# Tokens a piece has, by where it begins: smaller pieces match prompts that were cut closer to their end, larger ones
# cost fewer digests. 64 tokens are four of vLLM's default blocks, and below that a pull is not worth it.
_SIZES = ((4096, 64), (32768, 256), (1 << 62, 1024))

# A prompt is known by so many pieces at most, lest one of a million messages hold everybody up.
_MAX_PIECES = 4096


class Name(msgspec.Struct, frozen=True):
    """What to look a conversation up by.

    ``candidates``: digests, longest prefix first. ``entry``: the digest this turn is entered under, or None if the
    prompt is too short to be recognised again. ``explicit``: named by the client. ``pieces``: the prompt's prefixes,
    shortest first, for ``PrefixMemory``.
    """

    candidates: tuple[bytes, ...]
    entry: bytes | None
    explicit: bool
    pieces: tuple[Piece, ...] = ()


def name_conversation(tenants: Tenants, tenant: bytes, request: bodies.ClientRequest) -> Name:
    """Name the conversation that ``request`` belongs to, and the prefixes of its prompt."""
    model = request.model.encode("utf-8", "surrogatepass")
    pieces: list[Piece] = []
    chain: list[bytes] = []
    state = tenants.digest(b"conversation", tenant, model, request.route.name.encode())
    for text, tokens, ends_turn in itertools.islice(_pieces(request), _MAX_PIECES):
        state = tenants.digest(b"chain", state, text)
        pieces.append(Piece(state, tokens))
        if ends_turn:
            chain.append(state)
    if request.conversation_id is not None:
        given = request.conversation_id.encode("utf-8", "surrogatepass")
        digest = tenants.digest(b"conversation id", tenant, model, given)
        return Name((digest,), digest, explicit=True, pieces=tuple(pieces))
    return Name(tuple(reversed(chain)), chain[-1] if chain else None, explicit=False, pieces=tuple(pieces))


def _pieces(request: bodies.ClientRequest) -> Iterator[tuple[bytes, int, bool]]:
    """(bytes of the piece, tokens of the prompt up to its end, whether a turn can end here)."""
    prompt = request.prompt
    if prompt is None:
        return
    if request.route is bodies.Route.CHAT:
        # Sorted keys: the same message in another order of fields is the same message.
        before = 0
        for message in prompt:
            encoded = msgspec.json.encode(message, order="sorted")
            for begin, end in _cuts(len(encoded), CHARS_PER_TOKEN, whole=False):
                yield encoded[begin:end], (before + end) // CHARS_PER_TOKEN, end == len(encoded)
            before += len(encoded)
        return
    if isinstance(prompt, str):
        for begin, end in _cuts(len(prompt), CHARS_PER_TOKEN, whole=True):
            yield prompt[begin:end].encode("utf-8", "surrogatepass"), end // CHARS_PER_TOKEN, True
        return
    for begin, end in _cuts(len(prompt), 1, whole=True):
        yield msgspec.json.encode(prompt[begin:end]), end, True


def _cuts(length: int, unit: int, *, whole: bool) -> Iterator[tuple[int, int]]:
    """Where to cut ``length`` units of which ``unit`` are a token; ``whole``: without what is left at the end."""
    begin = 0
    for until, size in _SIZES:
        while begin < until * unit:
            end = begin + size * unit
            if end > length:
                if not whole and begin < length:
                    yield begin, length
                return
            yield begin, end
            begin = end


class Holder(msgspec.Struct, frozen=True):
    """A decode engine (by its index) that served a conversation, and which life of that engine it was."""

    decode: int
    life: int


class ConversationRoute(msgspec.Struct, frozen=True):
    """Where a conversation was served: ``holders``, latest first."""

    holders: tuple[Holder, ...]

    # Older holders lack the later turns; P asks each one, so few are enough.
    MAX_HOLDERS = 2

    def moved_to(self, holder: Holder) -> ConversationRoute:
        """The route after ``holder`` served a turn."""
        older = tuple(h for h in self.holders if h.decode != holder.decode)
        return ConversationRoute(holders=(holder, *older)[: self.MAX_HOLDERS])


class RouteTable:
    """Digest -> route; bounded, least recently used first out, forgotten after a time without use.

    Entries are kept in the order of their last use, so the oldest are at the front: both bounds look there only.
    """

    def __init__(self, capacity: int, ttl: float, clock: Callable[[], float] = time.monotonic):
        self.capacity = capacity
        self.ttl = ttl
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
        oldest_allowed = self._clock() - self.ttl
        while self._entries:
            used, _ = next(iter(self._entries.values()))
            if used >= oldest_allowed and len(self._entries) <= self.capacity:
                return
            self._entries.popitem(last=False)
