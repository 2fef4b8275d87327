"""What stores of different nodes say to each other: msgpack structs, one a ZMQ message, from asker to server and back.

The asker connects (DEALER) to the server (ROUTER), where a store asks, its mover does, where one is asked, its mover
answers. A connection begins with Hello, answered by Welcome or Refused. What a connection was lent is free again when
it falls silent, which is why it says Ping while it holds something. The bytes themselves are read by NIXL, out of the
server's pool and without its doing; while it does, the asker says so (``Reading``), because some networks need the
server to look after them. What the server has below its memory it brings up when it is asked with patience; the answer
waits for that, and until then Coming says what is expected. A message that is none of these, or out of these bounds,
costs the sender the connection. Numbers of slots are 4 KiB pages of the server's pool. No message carries an absolute
time.
"""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from vllm_kvtier import __version__
from vllm_kvtier.store.messages import (
    MAX_GROUPS,
    MAX_UNITS,
    Count,
    GroupShape,
    Hashes,
    Name,
    Page,
    Seconds,
    Sentence,
    Space,
)
from vllm_kvtier.store.records import HASH
from vllm_kvtier.wire.slots import PAGE, PIECE

PROTOCOL = 2
MAX_MESSAGE = 16 << 20  # bytes
MAX_METADATA = 4 << 20  # bytes; a few hundred a piece of the pool, at most
PING_SECONDS = 1.0  # between two of an asker that holds something or waits for something
SILENT_SECONDS = 4.0  # after which either side takes the other for dead
MOST_SECONDS = 86400.0  # that anything is said to take
MAX_PATIENCE = 30.0  # seconds that anybody's answer may wait for what is below the server's memory

UnitTokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Groups = Annotated[list[GroupShape], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]
Metadata = Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA)]
Base = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]  # no address of a process is beyond
Slots = Annotated[list[Annotated[list[Page], msgspec.Meta(max_length=MAX_UNITS)]], msgspec.Meta(max_length=MAX_GROUPS)]


# -- from the asker -----------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """``instance``: of the asking mover, new at every start. ``objects``: digest of the object store that the asker
    asks itself, "" if none: nobody need look there for it."""

    instance: Name
    protocol: int = PROTOCOL
    version: Name = __version__
    objects: Name = ""


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """What do you have of this chain from unit ``start`` on? Leases what is in memory. Answer: Offer or Nothing, at
    once, or with ``patience`` when what is below memory has been brought up, after so many seconds at most."""

    id: Count
    space: Space
    unit_tokens: UnitTokens
    groups: Groups
    chain: Hashes
    start: Count
    patience: Seconds = 0.0


class Reading(msgspec.Struct, frozen=True, tag="reading"):
    """Reads of this connection are under way, or are not any more. No answer."""

    active: bool


class Release(msgspec.Struct, frozen=True, tag="release"):
    """No answer. A lease that is not this connection's is ignored."""

    lease: Count


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Still there. Answer: Pong."""


# -- from the server ----------------------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """``agent``: name of the NIXL agent whose metadata comes with offers; ``base``: the pool's address there."""

    instance: Name
    agent: Name
    base: Base
    pool_bytes: Count
    protocol: int = PROTOCOL
    version: Name = __version__


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Instead of Welcome, or after something that no asker says: the connection is forgotten."""

    reason: Sentence


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Units [start, units), under a lease; ``slots`` as in ``messages.Found``. ``metadata``: of the agent, where it
    grew since the last that this connection was given, else empty. ``below``: units there might be, if it is asked
    with patience; 0, or no more than ``units``: nothing further."""

    id: Count
    lease: Count
    units: Count
    slots: Slots
    metadata: Metadata = b""
    below: Count = 0


class Nothing(msgspec.Struct, frozen=True, tag="nothing"):
    """``lacks``: there is nothing in memory; otherwise there may be, but not now. ``below``: as in Offer."""

    id: Count
    lacks: bool = True
    below: Count = 0


class Coming(msgspec.Struct, frozen=True, tag="coming"):
    """Before the answer to an Ask with patience, perhaps several times: it is being brought up, to unit ``units`` as
    far as is known, which is expected in so many ``seconds``; the answer comes when patience ends if that is earlier,
    with what there is by then."""

    id: Count
    units: Count
    seconds: Seconds


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    pass


FromAsker = Hello | Ask | Reading | Release | Ping
FromServer = Welcome | Refused | Offer | Nothing | Coming | Pong

encode = msgspec.msgpack.Encoder().encode
_from_asker = msgspec.msgpack.Decoder(FromAsker)
_from_server = msgspec.msgpack.Decoder(FromServer)


def decode_from_asker(frames: Sequence[bytes]) -> FromAsker:
    """Raises msgspec.DecodeError for what no asker sends."""
    return _decode(_from_asker, frames)


def decode_from_server(frames: Sequence[bytes]) -> FromServer:
    """Raises msgspec.DecodeError for what no server sends."""
    return _decode(_from_server, frames)


def _decode(decoder: msgspec.msgpack.Decoder, frames: Sequence[bytes]):
    if len(frames) != 1:
        raise msgspec.DecodeError(f"{len(frames)} frames instead of one")
    try:
        return decoder.decode(frames[0])
    except msgspec.DecodeError:
        raise
    except (RecursionError, ValueError, MemoryError) as error:  # msgspec lets these through; ValueError: not UTF-8
        raise msgspec.DecodeError(f"{type(error).__name__}: {error}") from None


# -- what decoding cannot check -----------------------------------------------------------------------------


def ask_fault(chain: bytes, start: int, groups: Sequence[GroupShape]) -> str:
    """Why no asker asks so, or ""."""
    if len(chain) % HASH:
        return f"a chain of {len(chain)} bytes: hashes have {HASH}"
    if start > len(chain) // HASH or start % math.lcm(*(group.units for group in groups)):
        return f"unit {start} is beyond the chain, or where not every group's block begins"
    return ""


def offer_fault(offer: Offer, chain: bytes, start: int, groups: Sequence[GroupShape], pool_bytes: int) -> str:
    """Why nothing of the offer can be used, or ""; ``pool_bytes``: of the pool it is from."""
    if not offer.lease or not start < offer.units <= len(chain) // HASH:
        return f"units [{start}, {offer.units}) of {len(chain) // HASH}"
    if offer.units % math.lcm(*(group.units for group in groups)):
        return f"unit {offer.units} is not where every group's block ends"
    if len(offer.slots) != len(groups):
        return f"slots of {len(offer.slots)} groups, not {len(groups)}"
    for shape, row in zip(groups, offer.slots, strict=True):
        if len(row) != (offer.units - start) // shape.units:
            return f"{len(row)} slots for {(offer.units - start) // shape.units} blocks"
        slots = np.array(row, np.int64)
        if shape.window is None and not slots.all():
            return "a missing slot of a group that needs all"
        ends = slots + shape.slot_pages
        if (ends[slots > 0] > pool_bytes // PAGE).any():
            return "a slot beyond the end of the pool"
        if (slots // (PIECE // PAGE) != (ends - 1) // (PIECE // PAGE)).any():
            return "a slot in two pieces of the pool"
    return ""


def slots_by_name(offer: Offer, chain: bytes, start: int, groups: Sequence[GroupShape]) -> dict[tuple[int, bytes], int]:
    """{(group, hash): slot} of the blocks offered."""
    slots = {}
    for group, (shape, row) in enumerate(zip(groups, offer.slots, strict=True)):
        end = (start + shape.units) * HASH
        for slot in row:
            if slot:
                slots[group, chain[end - HASH : end]] = slot
            end += shape.units * HASH
    return slots
