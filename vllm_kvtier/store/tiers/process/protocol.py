"""Messages between the server and a tier process: msgpack structs, one per frame, over a socketpair
(``wire/stream.py``).

A tier process serves one tier. It maps the pool (a memfd that it inherits) and moves bytes; the server decides which.
It answers Open with Opened or Refused, and exits when the socket closes. Times are durations. ``slot`` and ``position``
are numbers of 4 KiB pages, in the pool and in the tier's own storage.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec

from vllm_kvtier.store.index.types import HASH_BYTES
from vllm_kvtier.store.protocol import Count, GroupShape, Hashes, NamespaceId, Page, Seconds, Sentence
from vllm_kvtier.store.tiers.base import Block, Want

MAX_FRAME = 64 << 20  # bytes
MAX_MOVES = 1 << 14  # blocks per Read or Write

Key = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
Options = Mapping[str, str | int | float | bool]  # of Open


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One block to copy. ``position``: on disk; other tiers find a block by its name."""

    namespace_id: Key
    group: int
    hash: Key
    parent: Key
    tenant: bytes
    slot: int
    pages: int
    position: int = 0

    @classmethod
    def of(cls, block: Block, position: int = 0) -> "Move":
        return cls(*block.name, block.parent, block.tenant, block.slot, block.pages, position)


class NamespaceShape(msgspec.Struct, frozen=True, array_like=True):
    """The shape of a namespace, which a persistent tier stores."""

    namespace_id: Key
    hash_block_size: int
    groups: list[GroupShape]


# -- server to tier process ---------------------------------------------------------------------------------


class Open(msgspec.Struct, frozen=True, tag="open"):
    """First message. ``options``: of the tier (see its ``process`` module). ``pool_bytes``: as in PoolLimit.
    ``version``: of the server's package, which lives on after the one that is installed was replaced; "": before it was
    sent."""

    options: dict[str, str | int | float | bool]
    pool_bytes: Count
    version: str = ""


class PoolLimit(msgspec.Struct, frozen=True, tag="pool_limit"):
    """Only the first ``pool_bytes`` of the mapped pool are, or will be, committed: nothing behind them may be touched
    or registered. No answer."""

    pool_bytes: Count


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Copy from the tier into slots. ``token``: of the Located that found the blocks; 0 for the disk. Answer: Moved."""

    id: Count
    token: Count
    moves: Annotated[list[Move], msgspec.Meta(max_length=MAX_MOVES)]


class Write(msgspec.Struct, frozen=True, tag="write"):
    """Copy from slots into the tier, durably. Answer: Moved.

    ``gone``: disk positions whose blocks were removed since the last Write. They must not reappear after a crash once
    this Write may overwrite them. ``namespaces``: shapes that the tier process does not have yet. ``replaced``: indices
    of ``moves`` whose stored copy, if there is one, is corrupt (Mooncake). Without moves it only records (disk).
    """

    id: Count
    moves: Annotated[list[Move], msgspec.Meta(max_length=MAX_MOVES)]
    gone: list[int] = []
    namespaces: list[NamespaceShape] = []
    replaced: list[int] = []


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Remove these positions (disk) or blocks (other tiers), also for the time after a crash. No answer."""

    gone: list[int] = []
    moves: list[Move] = []


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Look up blocks from hash block ``start`` on. Answer: Located. Not for the disk."""

    id: Count
    namespace_id: NamespaceId
    hash_block_size: Count
    groups: list[GroupShape]
    block_hashes: Hashes
    start: Count
    nodes: list[str] = []

    @classmethod
    def of(cls, id: int, want: Want) -> "Look":
        return cls(
            id, want.namespace_id, want.hash_block_size, list(want.shapes), want.block_hashes, want.start,
            list(want.nodes),
        )  # fmt: skip


class Release(msgspec.Struct, frozen=True, tag="release"):
    """The blocks of a Located are no longer needed. No answer."""

    token: Count


class LeaseReply(msgspec.Struct, frozen=True, tag="lease_reply"):
    """Answer to LeaseRequest, as ``store.protocol.Found``. ``promotable``: number of hash blocks that a request with
    ``wait_seconds`` might find."""

    id: Count
    lease: Count
    num_hash_blocks: Count
    slots: list[list[int]]
    promotable: Count = 0


class PromotionStatus(msgspec.Struct, frozen=True, tag="promotion_status"):
    """Both ways, any number of times before the answer to a LeaseRequest or a Look: the answer waits for a promotion
    of hash blocks up to ``num_hash_blocks``, expected in ``seconds``. ``store``: as in Located."""

    id: Count
    num_hash_blocks: Count
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    store: str = ""


# -- tier process to server ---------------------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """``note``: for the operator (no O_DIRECT, the reason for read only), "" if there is none."""

    writable: bool
    note: Sentence = ""
    capacity_pages: Page = 0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Instead of Opened: the tier cannot be opened. The tier process exits."""

    reason: Sentence


class Kept(msgspec.Struct, frozen=True, tag="kept"):
    """Blocks found on disk when it was opened: sent in pieces before Opened, parents before children."""

    moves: list[Move]  # slot is 0
    namespaces: list[NamespaceShape] = []


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """``good``: by move. ``error``: the reason if not all are good, or if there were none and ``gone`` could not be
    recorded; "" if the others are not, or no longer, there."""

    id: Count
    good: list[bool]
    error: Sentence = ""
    seconds: float = 0.0
    writable: bool = True  # False: read only until the tier is opened again


class Scanned(msgspec.Struct, frozen=True, tag="scanned"):
    """The tier keeps its directory below a size: the bytes in it, and the blocks that were just removed."""

    used_bytes: Count
    removed: Count


class Located(msgspec.Struct, frozen=True, tag="located"):
    """``num_hash_blocks`` as in ``base.Find``; ``token``: for Read and Release, 0 if nothing was found; ``seconds``:
    expected duration of reading all blocks, 0: unknown; ``store``: instance of the store that has them, if any.
    ``failed``: some requests of the lookup failed, so there may be more."""

    id: Count
    token: Count
    num_hash_blocks: Count
    error: Sentence = ""
    seconds: float = 0.0
    store: str = ""
    failed: bool = False


class LeaseRequest(msgspec.Struct, frozen=True, tag="lease_request"):
    """Another node's store, or an engine there, looks up blocks. Answer: LeaseReply, after promotions that end within
    ``wait_seconds``. ``shared``: digests of what the client reads itself."""

    id: Count
    client: Count  # number of its connection
    name: str
    hash_block_size: Count
    groups: list[GroupShape]
    namespace_id: NamespaceId
    block_hashes: Hashes
    start: Count
    wait_seconds: Seconds = 0.0
    shared: list[str] = []


class Availability(msgspec.Struct, frozen=True, tag="availability"):
    """Whether what the process stores in can be used now; it is asked again by the process itself. ``place``: where
    this process keeps blocks, "" if nowhere. ``late``: it was only slow, so it has forgotten nothing."""

    usable: bool
    reason: Sentence = ""
    place: Sentence = ""
    late: bool = False


class Avoid(msgspec.Struct, frozen=True, tag="avoid"):
    """Reads from ``place`` failed: nothing is read from there for so many seconds. Sent by a process that ends because
    of that, and to its successor."""

    place: Sentence
    seconds: Seconds


class Replicate(msgspec.Struct, frozen=True, tag="replicate"):
    """These blocks are used often: keep one more copy. To the process of a tier; no answer."""

    moves: list[Move]


class Return(msgspec.Struct, frozen=True, tag="return"):
    """The client has released its lease. No answer."""

    client: Count
    lease: Count


class ListedNodes(msgspec.Struct, frozen=True, tag="listed_nodes"):
    """The stores of the option ``nodes`` but this one, by address: why it did not answer when it was last tried, "" if
    it does, None if that is not known yet. Sent when the tier is opened and after changes."""

    errors: dict[str, str | None]


class Left(msgspec.Struct, frozen=True, tag="left"):
    """The client has disconnected: its leases end. No answer."""

    client: Count


# To a tier process, without an answer.
Notice = Drop | Release | LeaseReply | PromotionStatus | Avoid | Replicate | PoolLimit
ToTierProcess = Open | Read | Write | Look | Notice
ToServer = (
    Opened | Refused | Kept | Moved | Scanned | Located | PromotionStatus | LeaseRequest | Return | Left
    | Availability | Avoid | ListedNodes
)  # fmt: skip

encode = msgspec.msgpack.Encoder().encode
_to_tier_process: msgspec.msgpack.Decoder[ToTierProcess] = msgspec.msgpack.Decoder(ToTierProcess)
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
decode_to_tier_process = _to_tier_process.decode
decode_to_server = _to_server.decode
