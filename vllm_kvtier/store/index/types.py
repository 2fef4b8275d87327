"""Arguments and results of the index."""

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec.structs import force_setattr

from vllm_kvtier import cache_kinds
from vllm_kvtier.cache_kinds import CacheKind
from vllm_kvtier.wire.slots import PAGE, PIECE_BYTES

HASH_BYTES = 16  # bytes of a block hash; also of a namespace id and, at most, of a tenant
ZERO = bytes(HASH_BYTES)  # as a parent: none

HashBlocks = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]

# Instead of a slot in the result of a reservation:
EXISTS = -1  # the block is stored or being written
NO_ROOM = -2  # nothing is evictable
NO_PARENT_STORED = -3  # the block before it is neither stored nor being written, so no lookup could reach it


class BadRequest(ValueError):
    """An invalid request: the server closes the client's connection. Nothing has changed."""


class GroupShape(msgspec.Struct, frozen=True):
    """The blocks of one KV cache group of an engine."""

    hash_blocks_per_block: HashBlocks
    slot_pages: Annotated[int, msgspec.Meta(ge=1, le=PIECE_BYTES // PAGE)]  # 4 KiB pages per block, all its parts
    window: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] | None = None  # tokens of the kind's window, if it has one
    kind: Annotated[str, msgspec.Meta(max_length=64)] = "full"  # ``CacheKind.stored_as``

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown kind."""
        if self.window is not None and self.kind == "full":  # in journals from before there were more kinds
            force_setattr(self, "kind", "sliding")
        cache_kinds.get(self.kind, self.window)

    @property
    def cache_kind(self) -> CacheKind:
        return cache_kinds.get(self.kind, self.window)

    def first_block(self, hash_block_size: int, start: int, end: int) -> int:
        """The first block from hash block ``start`` on that a reader of the tokens before hash block ``end`` needs."""
        needed = self.cache_kind.first_needed(end * hash_block_size) // hash_block_size
        return max(start, needed) // self.hash_blocks_per_block


@dataclass(slots=True)
class Found:
    """The result of a lookup. ``num_hash_blocks == start``: nothing, and ``lease`` is 0."""

    lease: int
    num_hash_blocks: int  # hash blocks [start, num_hash_blocks) are in memory
    # [group][j]: slot of block start // groups[g].hash_blocks_per_block + j; 0 if the prefix does not need it
    slots: list[list[int]]


@dataclass(slots=True)
class Holding:
    """``num_hash_blocks``: as a lookup from 0 would find; ``blocks[g]``: number of the group's blocks that are
    ready."""

    num_hash_blocks: int
    blocks: list[int]


@dataclass
class IndexStats:
    """Current numbers, and from ``lookups`` on counts since the start."""

    pool_pages: int = 0
    ready_pages: int = 0
    used_pages: int = 0  # of slots that hold a block or are reserved
    entries: int = 0  # ready
    leases: int = 0
    leased_entries: int = 0
    reservations: int = 0  # slots being written
    pinned_entries: int = 0
    pinned_pages: int = 0
    namespaces: int = 0
    tenants: int = 0
    lookups: int = 0
    prefix_queries: int = 0  # beyond ``start``
    prefix_hits: int = 0
    reserved_slots: int = 0
    refused_exists: int = 0
    refused_room: int = 0
    refused_parent: int = 0
    commits: int = 0
    aborts: int = 0  # requested, timed out, cleared, or of a disconnected client
    evictions: int = 0
    discards: int = 0
    expired_leases: int = 0
    expired_reservations: int = 0
