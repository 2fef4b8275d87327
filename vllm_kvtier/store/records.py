"""What the index is told and what it answers."""

from dataclasses import dataclass
from typing import Protocol

HASH = 16  # bytes of a block hash; also of a space and, at most, of a tenant
ZERO = bytes(HASH)  # as a parent: none

# In place of a slot, where a reservation got none:
EXISTS = -1  # the block is there already, or somebody is writing it
NO_ROOM = -2  # nothing evictable
NO_PARENT_STORED = -3  # the block before it is neither there nor being written, so nobody could ever find it


class BadRequest(ValueError):
    """A client asked for something that no correct client asks: the server closes its connection. Nothing changed."""


class GroupShape(Protocol):
    """What the index reads of ``messages.GroupShape``."""

    units: int  # hash units a block
    window: int | None  # tokens, None: full attention
    slot_pages: int


@dataclass(slots=True)
class Found:
    """What a lookup found. ``units == start``: nothing, and ``lease`` is 0."""

    lease: int
    units: int  # chain units [start, units) are there
    slots: list[list[int]]  # [group][j]: slot of block start // groups[g].units + j; 0 where a window needs none


@dataclass(slots=True)
class Holding:
    """``units``: as a lookup from 0 would find; ``blocks[g]``: how many of the chain's blocks are ready."""

    units: int
    blocks: list[int]


@dataclass
class IndexStats:
    """Numbers of now, then (from ``lookups``) counts since the start."""

    pool_pages: int = 0
    ready_pages: int = 0
    used_pages: int = 0  # of slots that hold or await a block
    entries: int = 0  # ready
    leases: int = 0
    leased_entries: int = 0
    reservations: int = 0  # slots being written
    pinned_entries: int = 0
    pinned_pages: int = 0
    spaces: int = 0
    tenants: int = 0
    lookups: int = 0
    looked_up_units: int = 0  # beyond ``start``
    found_units: int = 0
    reserved_slots: int = 0
    refused_exists: int = 0
    refused_room: int = 0
    refused_parent: int = 0
    commits: int = 0
    aborts: int = 0  # asked for, timed out, cleared or left by a client that went
    evictions: int = 0
    discards: int = 0
    expired_leases: int = 0
    expired_reservations: int = 0
