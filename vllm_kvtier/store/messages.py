"""What the node store and its clients say to each other: msgpack structs, one a frame (``wire/stream.py``).

Words and sizes, the same everywhere in ``store``:

* A slot is named by the number of its first 4 KiB page in the pool; 0 names none.
* A *unit* is the tokens one block hash covers. A *chain* is the request's chained block hashes from token 0 on,
  one a unit, each cut to ``HASH`` bytes, packed into one ``bytes``.
* A *space* is a digest of everything else that makes blocks interchangeable; the store only compares it.
* Block ``i`` of group ``g`` is named ``(space, g, chain[(i + 1) * units - 1])``; its parent is block ``i - 1``.
* A *resident* block lies in an engine's own cache, verifiable. The store never sees it; its *directory* knows who has
  which, by content *keys*: the first 8 bytes of a block's hash XOR a number that a *mix* carries, little-endian.

A connection begins with Hello, answered by Welcome (which carries the pool's memfd) or Refused. Whatever a
connection has leased or reserved is free again when it ends. ``decode_*`` raise ``msgspec.DecodeError`` for
anything that is not one of these structs within these bounds, and the receiver then drops the connection. No
message carries an absolute time.
"""

from typing import Annotated, Literal

import msgspec

from vllm_kvtier import __version__
from vllm_kvtier.store.lower.base import TierCounts
from vllm_kvtier.store.records import EXISTS, HASH, NO_PARENT_STORED, NO_ROOM, ZERO, IndexStats
from vllm_kvtier.wire.slots import PAGE, PIECE

# For who speaks to the store: all of its words and numbers are here.
__all__ = ["EXISTS", "HASH", "NO_PARENT_STORED", "NO_ROOM", "PAGE", "PIECE"]

PROTOCOL = 4
MAX_FRAME = 16 << 20  # bytes
NO_PARENT = ZERO  # in ``Reserve.parents``: the block is the first of its chain
MAX_UNITS = 1 << 17  # of a chain: 2 MiB
MAX_ITEMS = 1 << 16  # of one Reserve, Commit or Abort
MAX_GROUPS = 64
MAX_NODES = 8  # that one request may name
MAX_RESIDENT = 1 << 22  # blocks of one engine's cache
MAX_HOLDERS = 3  # that one answer names
MAX_SPANS = 1 << 12  # that one answer tells, of each group
MAX_FOLLOWED = 256  # spaces
MAX_LABEL = 64 << 10  # bytes

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Page = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
TakenPage = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Group = Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPS)]
Space = Annotated[bytes, msgspec.Meta(min_length=HASH, max_length=HASH)]
Hash = Annotated[bytes, msgspec.Meta(min_length=HASH, max_length=HASH)]
Hashes = Annotated[bytes, msgspec.Meta(max_length=MAX_UNITS * HASH)]
ItemHashes = Annotated[bytes, msgspec.Meta(max_length=MAX_ITEMS * HASH)]
Tenant = Annotated[bytes, msgspec.Meta(max_length=16)]
Name = Annotated[str, msgspec.Meta(max_length=256)]
Sentence = Annotated[str, msgspec.Meta(max_length=4096)]
Pages = Annotated[list[TakenPage], msgspec.Meta(max_length=MAX_ITEMS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]
Nodes = Annotated[list[Name], msgspec.Meta(max_length=MAX_NODES)]
Units = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Family = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
Keys = Annotated[bytes, msgspec.Meta(max_length=MAX_UNITS * 8)]
Mix = Annotated[bytes, msgspec.Meta(max_length=8)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Age = Annotated[float, msgspec.Meta(ge=0)]  # seconds
Label = Annotated[bytes, msgspec.Meta(max_length=MAX_LABEL)]


class GroupShape(msgspec.Struct, frozen=True):
    """One KV cache group of an engine."""

    units: Units  # of hashes a block
    slot_pages: Annotated[int, msgspec.Meta(ge=1, le=PIECE // PAGE)]  # 4 KiB pages a block, all its parts
    window: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] | None = None  # tokens a block stays needed; None: all


# -- client to store ----------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message. Only an engine may reserve, and only one with ``groups`` may look up."""

    name: Name  # for logs and statistics
    pid: Count
    kind: Literal["engine", "worker", "tool"]
    unit_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    groups: Annotated[list[GroupShape], msgspec.Meta(max_length=MAX_GROUPS)] = []
    protocol: int = PROTOCOL
    version: Name = __version__


class Lookup(msgspec.Struct, frozen=True, tag="lookup"):
    """What is stored of ``chain`` from unit ``start`` on? Leases what it finds. Answer: Found.

    What lies in a tier below memory begins to come up. The answer waits for that, for ``patience`` at most; it tells
    at once what is in memory, and what is expected, if ``patience`` is 0.
    """

    id: Count
    space: Space
    chain: Hashes  # from token 0 on, also where ``start`` is later
    start: Count  # in units; a multiple of every group's units
    pages_limit: Page  # only slots below this page: what the asker's workers have registered
    patience: Seconds = 0.0
    nodes: Nodes = []  # host:port of other nodes' stores that may have it
    mix: Mix = b""  # 8 bytes: holders of resident blocks are asked for too; only who is Present gets any
    stride: Units = 1  # units a block of the group whose blocks are looked for there


class Warm(msgspec.Struct, frozen=True, tag="warm"):
    """The chain will be asked for: what of it lies in a tier below memory may come up. No answer."""

    space: Space
    chain: Hashes
    pages_limit: Page
    nodes: Nodes = []


class Touch(msgspec.Struct, frozen=True, tag="touch"):
    """The chain was used again elsewhere (a GPU prefix hit): keeps it from growing old. No answer."""

    space: Space
    chain: Hashes


class Release(msgspec.Struct, frozen=True, tag="release"):
    """No answer. A lease that is not this connection's is ignored."""

    lease: Count


class Reserve(msgspec.Struct, frozen=True, tag="reserve"):
    """Slots to write blocks to, item by item. Answer: Reserved. Parents before children."""

    id: Count
    space: Space
    tenant: Tenant  # b"": none
    groups: Annotated[list[Group], msgspec.Meta(max_length=MAX_ITEMS)]  # of each item
    hashes: ItemHashes  # of each item, packed
    parents: ItemHashes  # of each item, packed; NO_PARENT for the first block
    pages_limit: Page


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """All parts of these reserved slots are written. No answer. Slots not reserved by the sender are ignored."""

    slots: Pages


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """These reserved slots will not be written. No answer."""

    slots: Pages


class Discard(msgspec.Struct, frozen=True, tag="discard"):
    """What lies in this slot failed its checksum: forget it, if the slot still holds this block. No answer."""

    space: Space
    group: Group
    hash: Hash
    slot: TakenPage


class Pin(msgspec.Struct, frozen=True, tag="pin"):
    """Keep (or no longer keep) what is stored of the chain from being evicted. Answer: Done, count in blocks."""

    id: Count
    space: Space
    chain: Hashes
    pinned: bool


class Clear(msgspec.Struct, frozen=True, tag="clear"):
    """Forget a space, or all of them, except what is leased or being written. Answer: Done, count in blocks."""

    id: Count
    space: Space | None = None


class Stat(msgspec.Struct, frozen=True, tag="stat"):
    """Answer: Counts."""

    id: Count


class Inspect(msgspec.Struct, frozen=True, tag="inspect"):
    """What is stored of the chain, without a lease and without touching it? Answer: Holding.

    ``spans``: where each block is, too, or what became of it. ``patience``: how far the chain goes on in tiers below
    that must be asked for it (other nodes, a bucket), the answer waits so long for that. ``mix``, ``stride`` as in
    Lookup.
    """

    id: Count
    space: Space
    chain: Hashes
    spans: bool = False
    patience: Seconds = 0.0
    mix: Mix = b""
    stride: Units = 1


class Present(msgspec.Struct, frozen=True, tag="present"):
    """The sender has resident blocks; others of its ``family`` ask for them at ``host``:``port``. No answer, but
    Company comes at once. Said again, it replaces what was said; what is resident stays unless the family changes."""

    family: Family  # engines that make the same key of the same content, and can read each other's caches
    host: Name
    port: Port
    instance: Name  # of this life of the engine


class Resident(msgspec.Struct, frozen=True, tag="resident"):
    """These became resident, and then these ceased to be. Only after Present; at most MAX_RESIDENT in all. No answer.
    What the sender never says is gone stays as long as its connection, or until it begins ``anew``."""

    added: Keys
    gone: Keys
    anew: bool = (
        False  # nothing else is: all that was said before is forgotten first, as after a time of saying nothing
    )


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """Tell me where the labelled blocks of these spaces lie, and what becomes of them; of no others any more. No
    answer, but Changes come unasked."""

    spaces: Annotated[list[Space], msgspec.Meta(max_length=MAX_FOLLOWED)]


class Labels(msgspec.Struct, frozen=True, tag="labels"):
    """What those who follow the space must know of these blocks, in words that the store does not understand. Of blocks
    that are stored or being written; others, those that have a label, and spaces that the sender does not follow are
    ignored. No answer."""

    space: Space
    groups: Annotated[list[Group], msgspec.Meta(max_length=MAX_ITEMS)]
    hashes: ItemHashes
    labels: Annotated[list[Label], msgspec.Meta(max_length=MAX_ITEMS)]


class Heard(msgspec.Struct, frozen=True, tag="heard"):
    """The sender is through with the last Changes and takes more. No answer."""


Request = (
    Hello
    | Lookup
    | Warm
    | Touch
    | Release
    | Reserve
    | Commit
    | Abort
    | Discard
    | Pin
    | Clear
    | Stat
    | Inspect
    | Present
    | Resident
    | Follow
    | Labels
    | Heard
)

# -- store to client ----------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Comes with the memfd. The file's pages from ``pool_pages`` on do not exist."""

    protocol: int
    version: Name
    instance: Name  # of this life of the server: another one has other memory
    pid: Count
    pool_pages: Page
    ready_pages: Page  # usable from the start so far; Ready tells of more
    huge_pages: bool  # the file is of 2 MiB pages
    tiers: list[Name] = []  # below memory


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Instead of Welcome, or after something that no correct client says; the connection ends."""

    reason: Sentence


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """More memory became usable. Sent unasked. ``pool_pages`` shrinks where memory ran out on the way."""

    ready_pages: Page
    pool_pages: Page


class Company(msgspec.Struct, frozen=True, tag="company"):
    """How many other connections are Present with the receiver's family: with none, nobody asks for its resident
    blocks and it need not tell of them. Sent unasked, after Present and when it changes."""

    others: Count


class Changes(msgspec.Struct, frozen=True, tag="changes"):
    """Where these blocks of a space lie now. Sent unasked to who follows the space; one is under way at a time.

    ``places``: of each block, 1 (this memory) and ``2 << i`` for the i-th of Welcome's tiers, added up; 0: nowhere any
    more. ``labels``: b"" for those. ``anew``: what was told of this space before does not count any more.
    """

    space: Space
    anew: bool
    groups: Annotated[list[Group], msgspec.Meta(max_length=MAX_ITEMS)]
    hashes: ItemHashes
    places: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]], msgspec.Meta(max_length=MAX_ITEMS)]
    labels: Annotated[list[Label], msgspec.Meta(max_length=MAX_ITEMS)]


class Below(msgspec.Struct, frozen=True):
    """What is on its way up of a chain: ``units``: where that ends as far as is known; ``seconds``: until it is
    expected in memory; ``asking``: until more is expected to be known, 0: nobody is being asked."""

    units: Count
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    asking: Annotated[float, msgspec.Meta(ge=0)]


class Holder(msgspec.Struct, frozen=True):
    """An engine that has all resident blocks of units ``[start, units)``, as far as it told; ask it."""

    host: Name
    port: Port
    instance: Name
    units: Count  # a multiple of the question's ``stride``, beyond its ``start``


class Found(msgspec.Struct, frozen=True, tag="found"):
    """Units ``[start, units)`` can be loaded; ``units == start``: nothing, and then ``lease`` is 0.

    ``slots[g][j]`` is the slot of group g's block ``start // groups[g].units + j``; 0 where its window needs none.
    ``holders``, those with most first, are named whether or not anything was found here.
    """

    id: Count
    lease: Count
    units: Count
    slots: Annotated[list[Annotated[list[Page], msgspec.Meta(max_length=MAX_UNITS)]], msgspec.Meta(max_length=64)]
    below: Below | None = None
    holders: Annotated[list[Holder], msgspec.Meta(max_length=MAX_HOLDERS)] = []


class Reserved(msgspec.Struct, frozen=True, tag="reserved"):
    """One number an item: a slot, EXISTS, NO_ROOM or NO_PARENT_STORED."""

    id: Count
    slots: Annotated[list[Annotated[int, msgspec.Meta(ge=-3, le=1 << 40)]], msgspec.Meta(max_length=MAX_ITEMS)]


class Done(msgspec.Struct, frozen=True, tag="done"):
    id: Count
    count: Count  # of blocks this changed


class Span(msgspec.Struct, frozen=True):
    """Blocks of a group, one after the other. ``place``: "memory", "writing", the name of the tier below that has
    them, or "": nowhere, and then ``fate`` is how they ended (``fates.Fate``; 0: nothing is known of them), the last
    one ``newest`` and the first one ``oldest`` seconds ago."""

    blocks: Annotated[int, msgspec.Meta(ge=1, le=MAX_UNITS)]
    place: Name
    fate: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    newest: Age = 0.0
    oldest: Age = 0.0


class TierReach(msgspec.Struct, frozen=True):
    """``units``: how far a chain goes on in this tier, from where memory and the tiers before it end; None: it was not
    asked, or did not answer in time. ``state``, ``reason`` as in TierCounts."""

    name: Name
    state: Name
    reason: Sentence
    units: Count | None = None


class Holding(msgspec.Struct, frozen=True, tag="holding"):
    """``units``: what a Lookup from 0 would find. ``blocks[g]``: how many of the chain's blocks of group g are
    stored, wherever in it; no groups: nobody has used this space yet.

    The rest is told only where ``spans`` were asked for. ``spans[g]``: the chain's blocks of group g from the first on;
    fewer where they are too many to be told. ``known``: of all that ended in the last so many seconds it is remembered
    how; ``seconds``: since the store started. ``holders``: engines of the node that have the beginning in their caches.
    """

    id: Count
    units: Count
    blocks: Annotated[list[Count], msgspec.Meta(max_length=MAX_GROUPS)]
    spans: Annotated[
        list[Annotated[list[Span], msgspec.Meta(max_length=MAX_SPANS)]], msgspec.Meta(max_length=MAX_GROUPS)
    ] = []
    tiers: Annotated[list[TierReach], msgspec.Meta(max_length=16)] = []
    holders: Annotated[list[Holder], msgspec.Meta(max_length=MAX_HOLDERS)] = []
    known: Age = 0.0
    seconds: Age = 0.0


class ClientCounts(msgspec.Struct, frozen=True):
    name: Name
    pid: Count
    kind: Name
    leases: Count
    reservations: Count  # slots being written


class DirectoryCounts(msgspec.Struct, frozen=True):
    holders: Count = 0  # engines that are Present
    keys: Count = 0  # of their resident blocks, counted once for each who has it


class Counts(msgspec.Struct, frozen=True, tag="counts"):
    """The server's state."""

    id: Count
    instance: Name
    version: Name
    pid: Count
    seconds: Annotated[float, msgspec.Meta(ge=0)]  # since the start
    policy: Name
    huge_pages: bool
    asked_bytes: Count
    pool_bytes: Count  # less than asked where memory ran out; ``note`` says why
    ready_bytes: Count
    note: Sentence
    clients: list[ClientCounts]
    index: IndexStats
    tiers: list[TierCounts] = []  # below memory, nearest first
    directory: DirectoryCounts = DirectoryCounts()


Reply = Welcome | Refused | Ready | Company | Changes | Found | Reserved | Done | Holding | Counts

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode_request(frame: bytes | memoryview) -> Request:
    return _decode(_request_decoder, frame)


def decode_reply(frame: bytes | memoryview) -> Reply:
    return _decode(_reply_decoder, frame)


def _decode(decoder: msgspec.msgpack.Decoder, frame: bytes | memoryview):
    try:
        return decoder.decode(frame)
    except msgspec.DecodeError:
        raise
    except (RecursionError, ValueError, MemoryError) as error:  # msgspec lets these through; ValueError: not UTF-8
        raise msgspec.DecodeError(f"{type(error).__name__}: {error}") from None
