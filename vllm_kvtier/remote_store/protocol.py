"""Messages between stores of different nodes: msgpack structs, one per ZMQ message.

The client (DEALER) connects to the server (ROUTER); both are tier processes of stores. A connection begins with Hello,
answered by Welcome or Refused.

* Leases belong to a connection and end when it is silent. A client that holds leases sends Ping.
* NIXL reads the blocks from the server's pool. The client sends ``Reading`` meanwhile, because on some networks the
  server must make NIXL progress.
* A lookup with ``wait_seconds`` promotes blocks from the server's secondary tiers. PromotionStatus reports what is
  expected; the answer follows the promotion.
* A malformed message ends the connection. Slot numbers are 4 KiB pages of the server's pool. Times are durations.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from vllm_kvtier import __version__
from vllm_kvtier.store.index.types import HASH_BYTES
from vllm_kvtier.store.protocol import (
    MAX_GROUPS,
    MAX_HASH_BLOCKS,
    Count,
    GroupShape,
    Hashes,
    Name,
    NamespaceId,
    Page,
    Seconds,
    Sentence,
)
from vllm_kvtier.wire.decoding import decode
from vllm_kvtier.wire.slots import PAGE, PIECE_BYTES

PROTOCOL = 6
MAX_MESSAGE = 16 << 20  # bytes
MAX_LOOKUPS = 1024  # unanswered, per connection
MAX_METADATA = 4 << 20  # bytes; a few hundred per piece of the pool
PING_SECONDS = 1.0  # heartbeat interval of a client that holds leases or waits for answers
SILENT_SECONDS = 4.0  # after which either side treats the other as dead
MAX_SECONDS = 86400.0  # upper bound of reported durations
MAX_WAIT_SECONDS = 30.0  # upper bound of ``wait_seconds``
MAX_SHARED = 8  # digests in a Hello

HashBlockSize = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Groups = Annotated[list[GroupShape], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]
Metadata = Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA)]
Base = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]  # larger than any address of a process
Slots = Annotated[
    list[Annotated[list[Page], msgspec.Meta(max_length=MAX_HASH_BLOCKS)]], msgspec.Meta(max_length=MAX_GROUPS)
]


# -- from the client ----------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """``instance``: of the client, new at every start. ``shared``: digests of what the client reads itself and other
    nodes may use too, an object store or a Mooncake cluster; the server does not promote from the same."""

    instance: Name
    protocol: int = PROTOCOL
    version: Name = __version__
    shared: Annotated[list[Name], msgspec.Meta(max_length=MAX_SHARED)] = []


class LookupRequest(msgspec.Struct, frozen=True, tag="lookup_request"):
    """Look up blocks from hash block ``start`` on, and lease those in memory. Answer: LookupHit or LookupMiss, after
    promotions from secondary tiers if these end within ``wait_seconds``."""

    id: Count
    namespace_id: NamespaceId
    hash_block_size: HashBlockSize
    groups: Groups
    block_hashes: Hashes
    start: Count
    wait_seconds: Seconds = 0.0


class Reading(msgspec.Struct, frozen=True, tag="reading"):
    """Whether reads of this connection are in flight. No answer."""

    active: bool


class Release(msgspec.Struct, frozen=True, tag="release"):
    """End a lease. No answer. Leases of other connections are ignored."""

    lease: Count


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Heartbeat. Answer: Pong."""


# -- from the server ----------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """``agent``: name of the NIXL agent whose metadata comes with hits; ``base``: the pool's address in its process."""

    instance: Name
    agent: Name
    base: Base
    pool_bytes: Count
    protocol: int = PROTOCOL
    version: Name = __version__


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Instead of Welcome, or after a malformed message; the server has closed the connection."""

    reason: Sentence


class LookupHit(msgspec.Struct, frozen=True, tag="lookup_hit"):
    """Hash blocks [start, num_hash_blocks) are leased; ``slots`` as in ``store.protocol.Found``. ``metadata``: of the
    agent, if it changed since the last hit of this connection, else empty. ``promotable``: number of hash blocks that
    a lookup with ``wait_seconds`` might find; not above ``num_hash_blocks``: no more."""

    id: Count
    lease: Count
    num_hash_blocks: Count
    slots: Slots
    metadata: Metadata = b""
    promotable: Count = 0


class LookupMiss(msgspec.Struct, frozen=True, tag="lookup_miss"):
    """Nothing is in memory, or the server is too busy. ``promotable``: as in LookupHit."""

    id: Count
    promotable: Count = 0


class PromotionStatus(msgspec.Struct, frozen=True, tag="promotion_status"):
    """Any number of times before the answer to a LookupRequest with ``wait_seconds``: hash blocks up to
    ``num_hash_blocks`` are expected in memory in ``seconds``. The answer comes at the end of ``wait_seconds`` at the
    latest, with the blocks in memory by then."""

    id: Count
    num_hash_blocks: Count
    seconds: Seconds


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    pass


FromClient = Hello | LookupRequest | Reading | Release | Ping
FromServer = Welcome | Refused | LookupHit | LookupMiss | PromotionStatus | Pong

encode = msgspec.msgpack.Encoder().encode
_from_client: msgspec.msgpack.Decoder[FromClient] = msgspec.msgpack.Decoder(FromClient)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def decode_from_client(frame: bytes) -> FromClient:
    """Raises msgspec.DecodeError for a message that no client sends."""
    return decode(_from_client, frame)


def decode_from_server(frame: bytes) -> FromServer:
    """Raises msgspec.DecodeError for a message that no server sends."""
    return decode(_from_server, frame)


# -- checks that decoding cannot do -------------------------------------------------------------------------


def request_error(block_hashes: bytes, start: int, groups: Sequence[GroupShape]) -> str:
    """Why a lookup is invalid, or ""."""
    if len(block_hashes) % HASH_BYTES:
        return f"block hashes of {len(block_hashes)} bytes, not a multiple of {HASH_BYTES}"
    if start > len(block_hashes) // HASH_BYTES or start % math.lcm(*(group.hash_blocks_per_block for group in groups)):
        return f"start {start} is beyond the hash blocks, or not at a block boundary of every group"
    return ""


def hit_error(offer: LookupHit, block_hashes: bytes, start: int, groups: Sequence[GroupShape], pool_bytes: int) -> str:
    """Why a hit is invalid, or "". ``pool_bytes``: size of the server's pool."""
    if not offer.lease or not start < offer.num_hash_blocks <= len(block_hashes) // HASH_BYTES:
        return f"hash blocks [{start}, {offer.num_hash_blocks}) of {len(block_hashes) // HASH_BYTES}"
    if offer.num_hash_blocks % math.lcm(*(group.hash_blocks_per_block for group in groups)):
        return f"its end {offer.num_hash_blocks} is not at a block boundary of every group"
    if len(offer.slots) != len(groups):
        return f"slots of {len(offer.slots)} groups, not {len(groups)}"
    for shape, row in zip(groups, offer.slots, strict=True):
        blocks = (offer.num_hash_blocks - start) // shape.hash_blocks_per_block
        if len(row) != blocks:
            return f"{len(row)} slots for {blocks} blocks"
        slots = np.array(row, np.int64)
        if shape.cache_kind.whole_prefix and not slots.all():
            return "a slot is missing in a group that needs all"
        ends = slots + shape.slot_pages
        if (ends[slots > 0] > pool_bytes // PAGE).any():
            return "a slot beyond the end of the pool"
        if (slots // (PIECE_BYTES // PAGE) != (ends - 1) // (PIECE_BYTES // PAGE)).any():
            return "a slot crosses a piece of the pool"
    return ""


def slots_by_name(
    offer: LookupHit, block_hashes: bytes, start: int, groups: Sequence[GroupShape]
) -> dict[tuple[int, bytes], int]:
    """{(group, hash): slot} of the leased blocks."""
    slots = {}
    for group, (shape, row) in enumerate(zip(groups, offer.slots, strict=True)):
        end = (start + shape.hash_blocks_per_block) * HASH_BYTES
        for slot in row:
            if slot:
                slots[group, block_hashes[end - HASH_BYTES : end]] = slot
            end += shape.hash_blocks_per_block * HASH_BYTES
    return slots
