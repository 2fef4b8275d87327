"""Messages between the node store and its clients: msgpack structs, one per frame (``wire/stream.py``).

Terms and sizes, the same everywhere in ``store``:

* A slot is identified by the number of its first 4 KiB page in the pool; 0 means none.
* ``block_hashes`` are the hashes of a request's hash blocks from token 0 on, each cut to ``HASH_BYTES`` and packed into
  one ``bytes``. Positions in a prefix count hash blocks.
* A *namespace id* is a digest of all other properties that make blocks interchangeable; the store only compares it.
* Block ``i`` of group ``g`` has the name ``(namespace_id, g, hash of its last hash block)``; its parent is block
  ``i - 1``.
* A *cached* block is in an engine's prefix cache, with a checksum. The store's *directory* knows the engines with it
  by content *keys*: the first 8 bytes of a block's hash XOR the number in ``key_mask``, little-endian.

A connection begins with Hello, answered by Welcome (with the pool's memfd, for an engine also the table of
``index.presence_filter``) or Refused. Its leases and reservations end with it. ``decode_*`` raise
``msgspec.DecodeError`` for a malformed message; the receiver then closes the connection. Times are durations.
"""

from typing import Annotated, Literal

import msgspec

from vllm_kvtier import __version__
from vllm_kvtier.store.index.removal_history import RemovalReason
from vllm_kvtier.store.index.types import (
    EXISTS,
    HASH_BYTES,
    NO_PARENT_STORED,
    NO_ROOM,
    ZERO,
    GroupShape,
    HashBlocks,
    IndexStats,
)
from vllm_kvtier.store.tiers.base import TierCounts
from vllm_kvtier.wire.decoding import decode
from vllm_kvtier.wire.slots import PAGE, PIECE_BYTES

# Re-exported: clients need only this module.
__all__ = ["EXISTS", "GroupShape", "HASH_BYTES", "NO_PARENT_STORED", "NO_ROOM", "PAGE", "PIECE_BYTES", "RemovalReason"]

PROTOCOL = 11
MAX_FRAME = 16 << 20  # bytes
NO_PARENT = ZERO  # in ``Reserve.parents``: a first block
MAX_HASH_BLOCKS = 1 << 17  # per message: 2 MiB
MAX_ITEMS = 1 << 16  # per Reserve, Commit or Abort
MAX_GROUPS = 64
MAX_NODES = 8  # per request
MAX_NAME = 256  # characters
MAX_CACHED_BLOCKS = 1 << 22  # blocks per engine's cache
MAX_HOLDERS = 3  # per answer
MAX_SPANS = 1 << 12  # per answer and group
MAX_FOLLOWED = 256  # namespaces
MAX_LABEL = 64 << 10  # bytes
# For which an engine, or another node's store, keeps leased blocks before it begins to read them. The read needs as
# long again: behind the lease's end the slots may have other blocks.
HOLD_SECONDS = 30.0

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Page = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
TakenPage = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
Group = Annotated[int, msgspec.Meta(ge=0, lt=MAX_GROUPS)]
NamespaceId = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Hashes = Annotated[bytes, msgspec.Meta(max_length=MAX_HASH_BLOCKS * HASH_BYTES)]
ItemHashes = Annotated[bytes, msgspec.Meta(max_length=MAX_ITEMS * HASH_BYTES)]
Tenant = Annotated[bytes, msgspec.Meta(max_length=16)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
MAX_SENTENCE = 4096  # characters
Sentence = Annotated[str, msgspec.Meta(max_length=MAX_SENTENCE)]
Pages = Annotated[list[TakenPage], msgspec.Meta(max_length=MAX_ITEMS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]
Nodes = Annotated[list[Name], msgspec.Meta(max_length=MAX_NODES)]
CompatId = Annotated[bytes, msgspec.Meta(min_length=8, max_length=8)]
Keys = Annotated[bytes, msgspec.Meta(max_length=MAX_HASH_BLOCKS * 8)]
KeyMask = Annotated[bytes, msgspec.Meta(max_length=8)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Age = Annotated[float, msgspec.Meta(ge=0)]  # seconds
Label = Annotated[bytes, msgspec.Meta(max_length=MAX_LABEL)]


# -- client to store ----------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message. Only an engine may reserve, and only one with ``groups`` may look up."""

    name: Name  # for logs and statistics
    pid: Count
    kind: Literal["engine", "worker", "tool"]
    hash_block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1
    groups: Annotated[list[GroupShape], msgspec.Meta(max_length=MAX_GROUPS)] = []
    protocol: int = PROTOCOL
    version: Name = __version__


class AnyHello(msgspec.Struct, frozen=True, tag="hello"):
    """What the Hello of every protocol has; its other fields may be of kinds that this version does not know."""

    protocol: int
    kind: Name = "engine"
    version: Name = ""


class Lookup(msgspec.Struct, frozen=True, tag="lookup"):
    """Look up blocks from hash block ``start`` on, and lease those in memory. Answer: Found.

    Blocks in secondary tiers are promoted. The answer waits for that, ``wait_seconds`` at most. If that is 0, the
    answer comes at once, with the blocks in memory and the expected promotion.
    """

    id: Count
    namespace_id: NamespaceId
    block_hashes: Hashes  # from token 0 on, whatever ``start`` is
    start: Count  # a block boundary of every group
    pages_limit: Page  # only slots below this page, which the client's workers have registered
    wait_seconds: Seconds = 0.0
    nodes: Nodes = []  # host:port of other nodes' stores that may have the blocks
    key_mask: KeyMask = b""  # 8 bytes: also query the directory; b"": not. Requires Present
    hash_blocks_per_block: HashBlocks = 1  # of the group that the directory query is for


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    """Promote the blocks of a prefix that will be looked up. No answer."""

    namespace_id: NamespaceId
    block_hashes: Hashes
    pages_limit: Page
    nodes: Nodes = []


class Touch(msgspec.Struct, frozen=True, tag="touch"):
    """The prefix was used elsewhere (a GPU prefix hit): count as a use, which delays eviction. No answer.

    Any message that names a namespace, also one without hashes: the sender uses it, see ``Pin``."""

    namespace_id: NamespaceId
    block_hashes: Hashes


class Release(msgspec.Struct, frozen=True, tag="release"):
    """End a lease. No answer. Leases of other connections are ignored."""

    lease: Count


class Reserve(msgspec.Struct, frozen=True, tag="reserve"):
    """Reserve a slot for each item, parents before children. Answer: Reserved."""

    id: Count
    namespace_id: NamespaceId
    tenant: Tenant  # b"": none
    groups: Annotated[list[Group], msgspec.Meta(max_length=MAX_ITEMS)]  # of each item
    hashes: ItemHashes  # of each item, packed
    parents: ItemHashes  # of each item, packed; NO_PARENT for the first block
    pages_limit: Page


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """All parts of these slots are written. No answer. Slots not reserved by the sender are ignored."""

    slots: Pages


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """These reserved slots will not be written. No answer."""

    slots: Pages


class Discard(msgspec.Struct, frozen=True, tag="discard"):
    """The block in this slot failed its checksum: remove it from memory, if the slot still holds it, and from the
    secondary tiers, unless memory has another copy now. No answer."""

    namespace_id: NamespaceId
    group: Group
    hash: Hash
    slot: TakenPage


class Pin(msgspec.Struct, frozen=True, tag="pin"):
    """Pin (or unpin) the blocks of a prefix in memory; pinned blocks are not evicted. Answer: Done, count in blocks.

    ``leaves``: the sender uses this namespace no more. If no other connected engine does, all of it is unpinned.
    """

    id: Count
    namespace_id: NamespaceId
    block_hashes: Hashes
    pinned: bool
    leaves: bool = False


class Clear(msgspec.Struct, frozen=True, tag="clear"):
    """Remove the blocks of a namespace, or of all. Answer: Done, count in blocks of the memory; once the tiers have
    recorded it, or with the ``reason`` why one has not."""

    id: Count
    namespace_id: NamespaceId | None = None


class Stat(msgspec.Struct, frozen=True, tag="stat"):
    """Ask for statistics. Answer: Counts."""

    id: Count


class Inspect(msgspec.Struct, frozen=True, tag="inspect"):
    """Ask for the stored blocks of a prefix, without a lease or a touch. Answer: Explained.

    ``spans``: also each block's tier or removal reason. ``wait_seconds``: maximum wait for tiers that must be asked
    (other nodes, object store). ``key_mask``, ``hash_blocks_per_block`` as in Lookup.
    """

    id: Count
    namespace_id: NamespaceId
    block_hashes: Hashes
    spans: bool = False
    wait_seconds: Seconds = 0.0
    key_mask: KeyMask = b""
    hash_blocks_per_block: HashBlocks = 1


class Present(msgspec.Struct, frozen=True, tag="present"):
    """The sender has cached blocks, which peers with its ``compat_id`` can request at ``host``:``port``. PeerCount
    follows at once. A second Present replaces the first; cached blocks stay unless the compat_id changes."""

    compat_id: CompatId  # engines with equal keys for equal content that can read each other's caches
    host: Name
    port: Port
    instance: Name  # of the engine


class Cached(msgspec.Struct, frozen=True, tag="cached"):
    """Blocks entered the engine's cache, and then others left it. Only after Present; at most MAX_CACHED_BLOCKS in all.
    No answer. A block counts as cached until it is ``gone``, the connection ends, or ``anew``."""

    added: Keys
    gone: Keys
    anew: bool = False  # remove all earlier keys first


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """Set the followed namespaces. Changes with the locations of their labelled blocks follow, unrequested."""

    namespaces: Annotated[list[NamespaceId], msgspec.Meta(max_length=MAX_FOLLOWED)]


class Labels(msgspec.Struct, frozen=True, tag="labels"):
    """Attach labels to blocks: opaque bytes for the namespace's followers. Ignored: blocks that are neither stored nor
    being written, blocks with a label, and namespaces that the sender does not follow. No answer."""

    namespace_id: NamespaceId
    groups: Annotated[list[Group], msgspec.Meta(max_length=MAX_ITEMS)]
    hashes: ItemHashes
    labels: Annotated[list[Label], msgspec.Meta(max_length=MAX_ITEMS)]


class ChangesAck(msgspec.Struct, frozen=True, tag="changes_ack"):
    """The sender has handled the last Changes; the next may follow. No answer."""


Request = (
    Hello | Lookup | Prefetch | Touch | Release | Reserve | Commit | Abort | Discard | Pin | Clear | Stat | Inspect
    | Present | Cached | Follow | Labels | ChangesAck
)  # fmt: skip

# -- store to client ----------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Comes with the memfd; ``pool_pages`` of its pages exist."""

    protocol: int
    version: Name
    instance: Name  # of the server; another instance has other memory
    pid: Count
    pool_pages: Page
    ready_pages: Page  # usable pages so far, from the start; Ready updates it
    huge_pages: bool  # the file has 2 MiB pages
    tiers: list[Name] = []  # secondary tiers
    launched: bool = True  # by an engine; else an operator runs it, and may start it again when it has ended
    only_named: list[Name] = []  # of ``tiers``, those that find blocks only for lookups that name other nodes
    places: dict[Name, str] = {}  # as ``StoreOptions.places``


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Instead of Welcome, or after an invalid message; the connection ends."""

    reason: Sentence


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """More memory is usable. Sent unrequested. ``pool_pages`` shrinks if the memory could not be committed."""

    ready_pages: Page
    pool_pages: Page


class PeerCount(msgspec.Struct, frozen=True, tag="peer_count"):
    """Number of other connections that are Present with the receiver's compat_id; with 0 it need not send Cached. Sent
    after Present and at each change."""

    others: Count


class Changes(msgspec.Struct, frozen=True, tag="changes"):
    """Current locations of blocks of a namespace. Sent unrequested to its followers, one message at a time.

    ``places``: of each block, the sum of 1 (the store's memory) and ``2 << i`` for the i-th of Welcome's tiers; 0:
    removed, with label b"". ``anew``: earlier Changes of this namespace are void.
    """

    namespace_id: NamespaceId
    anew: bool
    groups: Annotated[list[Group], msgspec.Meta(max_length=MAX_ITEMS)]
    hashes: ItemHashes
    places: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]], msgspec.Meta(max_length=MAX_ITEMS)]
    labels: Annotated[list[Label], msgspec.Meta(max_length=MAX_ITEMS)]


class TierQuery(msgspec.Struct, frozen=True):
    """A promotion: ``num_hash_blocks``: its end as far as known; ``seconds``: until it is expected in memory;
    ``asking``: until more is expected to be known, 0: no tier is being asked."""

    num_hash_blocks: Count
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    asking: Annotated[float, msgspec.Meta(ge=0)]


class Holder(msgspec.Struct, frozen=True):
    """An engine with all cached blocks of hash blocks ``[start, num_hash_blocks)``, according to the directory."""

    host: Name
    port: Port
    instance: Name
    num_hash_blocks: Count  # a multiple of the query's ``hash_blocks_per_block``, beyond its ``start``


class Found(msgspec.Struct, frozen=True, tag="found"):
    """Hash blocks ``[start, num_hash_blocks)`` are leased; ``num_hash_blocks == start``: nothing, and ``lease`` is 0.

    ``slots[g][j]`` is the slot of group g's block ``start // groups[g].hash_blocks_per_block + j``; 0 if the prefix
    does not need it. ``promotion``: the one in progress. ``holders``: longest prefix first, also without a hit.
    """

    id: Count
    lease: Count
    num_hash_blocks: Count
    slots: Annotated[list[Annotated[list[Page], msgspec.Meta(max_length=MAX_HASH_BLOCKS)]], msgspec.Meta(max_length=64)]
    promotion: TierQuery | None = None
    holders: Annotated[list[Holder], msgspec.Meta(max_length=MAX_HOLDERS)] = []


class Reserved(msgspec.Struct, frozen=True, tag="reserved"):
    """For each item a slot, EXISTS, NO_ROOM or NO_PARENT_STORED."""

    id: Count
    slots: Annotated[list[Annotated[int, msgspec.Meta(ge=-3, le=1 << 40)]], msgspec.Meta(max_length=MAX_ITEMS)]


class Done(msgspec.Struct, frozen=True, tag="done"):
    """``reason``: why not all was done; "" if it was."""

    id: Count
    count: Count  # of changed blocks
    reason: Sentence = ""


class Span(msgspec.Struct, frozen=True):
    """Consecutive blocks of a group. ``tier``: "memory", "writing", the name of a secondary tier, or "": not stored.
    Then ``removal_reason`` is a ``store.index.removal_history.RemovalReason`` (0: unknown); the removals were between
    ``newest`` and ``oldest`` seconds ago."""

    blocks: Annotated[int, msgspec.Meta(ge=1, le=MAX_HASH_BLOCKS)]
    tier: Name
    removal_reason: Annotated[int, msgspec.Meta(ge=0, le=255)] = 0
    newest: Age = 0.0
    oldest: Age = 0.0


class TierReach(msgspec.Struct, frozen=True):
    """``num_hash_blocks``: end of the prefix in this tier, from the end of memory and of the tiers before it; None: not
    asked, or no answer in time. ``state``, ``reason`` as in TierCounts."""

    name: Name
    state: Name
    reason: Sentence
    num_hash_blocks: Count | None = None


class Explained(msgspec.Struct, frozen=True, tag="explained"):
    """``num_hash_blocks``: result of a Lookup from 0. ``blocks[g]``: number of stored blocks of group g in the whole
    prefix; no groups: the namespace is unknown.

    The other fields are set if ``spans`` were requested. ``spans[g]``: the blocks of group g from the first on, cut off
    if there are too many spans. ``known``: length of the removal history in seconds; ``seconds``: since the store's
    start. ``holders``: engines of the node with the beginning of the prefix in their caches.
    """

    id: Count
    num_hash_blocks: Count
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
    keys: Count = 0  # of their cached blocks, counted once per engine


class Counts(msgspec.Struct, frozen=True, tag="counts"):
    """The server's state."""

    id: Count
    instance: Name
    version: Name
    pid: Count
    seconds: Annotated[float, msgspec.Meta(ge=0)]  # since the start
    policy: Name
    huge_pages: bool
    requested_bytes: Count
    pool_bytes: Count  # less than ``requested_bytes`` if memory ran out; ``note`` gives the reason
    ready_bytes: Count
    note: Sentence
    clients: list[ClientCounts]
    index: IndexStats
    tiers: list[TierCounts] = []  # secondary tiers, nearest first
    directory: DirectoryCounts = DirectoryCounts()


Reply = Welcome | Refused | Ready | PeerCount | Changes | Found | Reserved | Done | Explained | Counts

encode = msgspec.msgpack.Encoder().encode
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_hello_decoder: msgspec.msgpack.Decoder[AnyHello] = msgspec.msgpack.Decoder(AnyHello)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def decode_request(frame: bytes) -> Request:
    return decode(_request_decoder, frame)


def decode_any_hello(frame: bytes) -> AnyHello:
    return decode(_hello_decoder, frame)


def decode_reply(frame: bytes) -> Reply:
    return decode(_reply_decoder, frame)
