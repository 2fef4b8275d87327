"""Conversations and the engines that have them.

The client names a conversation by an id, or the proxy recognises it by its text: each turn repeats the turns before it.
The running digests over (tenant, model, tools, first message, second message, ...) of one turn are a prefix of those
of the next turn. Only the digest at the *end* of a turn is entered, and the longest entered prefix of a new turn is its
route.
So a common system prompt alone does not match, while a history edited in the middle matches the last turn before the
edit. Prompts of completions, which have no messages, are split into pieces.

Every digest is keyed and includes the tenant, so that tenants never share a name. The table contains no text.
"""

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator

import msgspec

from vllm_kvtier.proxy.messages import request_bodies
from vllm_kvtier.proxy.messages.transfer_params import Source
from vllm_kvtier.proxy.routing.prefixes import Piece
from vllm_kvtier.proxy.tenants import Tenants

CHARS_PER_TOKEN = 4

# (position up to which it holds, tokens of a piece). Small pieces match longer prefixes; large ones need fewer digests.
# 64 tokens are four of vLLM's default blocks; a pull of fewer is not worthwhile.
_SIZES = ((4096, 64), (32768, 256), (1 << 62, 1024))

# At most so many pieces of a prompt are hashed, to bound the time that other requests wait.
_MAX_PIECES = 4096


class Name(msgspec.Struct, frozen=True):
    """The keys of a conversation.

    ``candidates``: digests, longest prefix first. ``entry``: the digest under which this turn is entered; None if the
    prompt is too short. ``explicit``: the client gave an id. ``pieces``: the prompt's prefixes, shortest first, for
    ``PrefixMemory``.
    """

    candidates: tuple[bytes, ...]
    entry: bytes | None
    explicit: bool
    pieces: tuple[Piece, ...] = ()


def name_conversation(tenants: Tenants, tenant: bytes, request: request_bodies.ClientRequest) -> Name:
    """Name the conversation that ``request`` belongs to, and the prefixes of its prompt."""
    model = request.model.encode("utf-8", "surrogatepass")
    pieces: list[Piece] = []
    turn_digests: list[bytes] = []
    state = tenants.digest(b"conversation", tenant, model, request.route.name.encode())
    for text, tokens, ends_turn in itertools.islice(_pieces(request), _MAX_PIECES):
        state = tenants.digest(b"chain", state, text)
        pieces.append(Piece(state, tokens))
        if ends_turn:
            turn_digests.append(state)
    if request.conversation_id is not None:
        given = request.conversation_id.encode("utf-8", "surrogatepass")
        digest = tenants.digest(b"conversation id", tenant, model, given)
        return Name((digest,), digest, explicit=True, pieces=tuple(pieces))
    entry = turn_digests[-1] if turn_digests else None
    return Name(tuple(reversed(turn_digests)), entry, explicit=False, pieces=tuple(pieces))


def _pieces(request: request_bodies.ClientRequest) -> Iterator[tuple[bytes, int, bool]]:
    """(bytes of the piece, prompt tokens up to its end, whether a turn can end here)."""
    prompt = request.prompt
    if prompt is None:
        return
    if request.route is request_bodies.Route.CHAT:
        before = 0
        for part, ends_turn in _chat_parts(request):
            for begin, end in _cuts(len(part), CHARS_PER_TOKEN, whole=False):
                yield part[begin:end], (before + end) // CHARS_PER_TOKEN, ends_turn and end == len(part)
            before += len(part)
        return
    if isinstance(prompt, str):
        for begin, end in _cuts(len(prompt), CHARS_PER_TOKEN, whole=True):
            yield prompt[begin:end].encode("utf-8", "surrogatepass"), end // CHARS_PER_TOKEN, True
        return
    for begin, end in _cuts(len(prompt), 1, whole=True):
        yield msgspec.json.encode(prompt[begin:end]), end, True


def _chat_parts(request: request_bodies.ClientRequest) -> Iterator[tuple[bytes, bool]]:
    """(what templates render of a chat, in their order, whether a turn can end with it)."""
    for raw in request.before_messages:
        yield bytes(raw), False
    for message in request.prompt:
        # Sorted keys, because the order of a message's fields does not matter.
        yield msgspec.json.encode(message, order="sorted"), True


def _cuts(length: int, per_token: int, *, whole: bool) -> Iterator[tuple[int, int]]:
    """(begin, end) of the pieces of ``length`` characters or ids, ``per_token`` a token. ``whole``: no shorter rest."""
    begin = 0
    for until, size in _SIZES:
        while begin < until * per_token:
            end = begin + size * per_token
            if end > length:
                if not whole and begin < length:
                    yield begin, length
                return
            yield begin, end
            begin = end


class Holder(msgspec.Struct, frozen=True):
    """A decode engine (by its index) that served a conversation, and its instance at that time. ``source``: the
    endpoint that its answer named, at its end: one of its data-parallel ranks has the conversation."""

    decode: int
    instance: int
    source: Source | None = None


class ConversationRoute(msgspec.Struct, frozen=True):
    """The engines that served a conversation, latest first."""

    holders: tuple[Holder, ...]

    # Older holders lack the later turns, and the prefill engine queries each holder.
    MAX_HOLDERS = 2

    def moved_to(self, holder: Holder) -> "ConversationRoute":
        """The route after ``holder`` served a turn. Until its answer has named an endpoint, that of the turn before."""
        before = next((h for h in self.holders if (h.decode, h.instance) == (holder.decode, holder.instance)), None)
        if before is not None and holder.source is None:
            holder = before
        older = tuple(h for h in self.holders if h.decode != holder.decode)
        return ConversationRoute(holders=(holder, *older)[: self.MAX_HOLDERS])


class RouteTable:
    """Digest -> route. LRU with a capacity and a time to live; the least recently used entry is at the front."""

    def __init__(self, capacity: int, ttl: float, clock: Callable[[], float] = time.monotonic):
        self.capacity = capacity
        self.ttl = ttl
        self._clock = clock
        self._entries: OrderedDict[bytes, tuple[float, ConversationRoute]] = OrderedDict()

    def __len__(self) -> int:
        self._expire()
        return len(self._entries)

    def find(self, name: Name) -> ConversationRoute | None:
        """The route of the longest known prefix; counts as a use."""
        self._expire()
        for digest in name.candidates:
            if (found := self._entries.get(digest)) is not None:
                self._put(digest, found[1])
                return found[1]
        return None

    def enter(self, name: Name, route: ConversationRoute) -> None:
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
