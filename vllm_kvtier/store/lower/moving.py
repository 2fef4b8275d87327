"""What the server and a mover say to each other: msgpack structs, one a frame, over a socketpair (``wire/stream.py``).

A mover is the process of one tier. It maps the pool (a memfd it inherits) and moves bytes; what is where, the server
decides. It begins with Opened or Refused, after Open; it ends when the socket ends. Times are durations. ``slot`` and
``place`` are numbers of 4 KiB pages, in the pool and in the tier's own storage.
"""

from typing import Annotated

import msgspec

from vllm_kvtier.store.messages import Count, GroupShape, Hashes, Page, Seconds, Sentence, Space
from vllm_kvtier.store.records import HASH

MAX_FRAME = 64 << 20  # bytes
MAX_MOVES = 1 << 14  # blocks of one Read or Write

Key = Annotated[bytes, msgspec.Meta(min_length=HASH, max_length=HASH)]


class Move(msgspec.Struct, frozen=True, array_like=True):
    """One block to copy. ``place`` is the disk's; other tiers go by name."""

    space: Key
    group: int
    hash: Key
    parent: Key
    tenant: bytes
    slot: int
    pages: int
    place: int = 0


class SpaceShape(msgspec.Struct, frozen=True, array_like=True):
    """What a tier that outlives the server must know of a space."""

    space: Key
    unit_tokens: int
    groups: list[GroupShape]


# -- server to mover ----------------------------------------------------------------------------------------


class Open(msgspec.Struct, frozen=True, tag="open"):
    """First message. ``options`` are the tier's own (``lower/disk.py`` and its like say which)."""

    options: dict[str, str | int | float | bool]
    pool_bytes: Count


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Copy from the tier into slots. ``token``: of the Located that found them (0: the disk's). Answer: Moved."""

    id: Count
    token: Count
    moves: Annotated[list[Move], msgspec.Meta(max_length=MAX_MOVES)]


class Write(msgspec.Struct, frozen=True, tag="write"):
    """Copy from slots into the tier, durably. Answer: Moved.

    ``gone``: the disk's places whose blocks were given up since the last Write; a crash must not bring them back
    once this one has begun to overwrite them. ``spaces``: of those moved, what the mover has not been told yet.
    """

    id: Count
    moves: Annotated[list[Move], msgspec.Meta(max_length=MAX_MOVES)]
    gone: list[int] = []
    spaces: list[SpaceShape] = []


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """These places (disk), or blocks (others), are no longer to be found, also after a crash. No answer."""

    gone: list[int] = []
    moves: list[Move] = []


class Look(msgspec.Struct, frozen=True, tag="look"):
    """How far can the chain be served from unit ``start`` on? Answer: Located. Not for the disk."""

    id: Count
    space: Space
    unit_tokens: Count
    groups: list[GroupShape]
    chain: Hashes
    start: Count
    nodes: list[str] = []


class Release(msgspec.Struct, frozen=True, tag="release"):
    """What a Located found is not needed any more. No answer."""

    token: Count


class Lent(msgspec.Struct, frozen=True, tag="lent"):
    """Answer to Lend, as ``messages.Found``. ``below``: so many units might be had, were it asked with patience."""

    id: Count
    lease: Count
    units: Count
    slots: list[list[int]]
    below: Count = 0


class Coming(msgspec.Struct, frozen=True, tag="coming"):
    """Both ways, before the answer to a Lend or a Look, perhaps several times: it waits for what is brought up from
    below memory, to unit ``units`` as far as is known, which is expected in so many ``seconds``."""

    id: Count
    units: Count
    seconds: Annotated[float, msgspec.Meta(ge=0)]


# -- mover to server ----------------------------------------------------------------------------------------


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """``note``: what a person should know of it (no O_DIRECT here, read only because ...); "" if all is well."""

    writable: bool
    note: Sentence = ""
    capacity_pages: Page = 0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Instead of Opened: it cannot be opened, for this reason. The mover ends."""

    reason: Sentence


class Kept(msgspec.Struct, frozen=True, tag="kept"):
    """What was there when it was opened (disk): sent in pieces before Opened, parents before children."""

    moves: list[Move]  # slot is 0
    spaces: list[SpaceShape] = []


class Moved(msgspec.Struct, frozen=True, tag="moved"):
    """``good``: by move. ``error``: why not, in words, if not all are."""

    id: Count
    good: list[bool]
    error: Sentence = ""
    seconds: float = 0.0
    writable: bool = True  # False: it takes no more writes until it is opened again


class Located(msgspec.Struct, frozen=True, tag="located"):
    """``units`` as in ``base.Find``; ``token`` is what Read and Release name it by, 0 if nothing was found.

    ``seconds``: what reading all of it is expected to take; 0: not known.
    """

    id: Count
    token: Count
    units: Count
    error: Sentence = ""
    seconds: float = 0.0


class Lend(msgspec.Struct, frozen=True, tag="lend"):
    """Another node's store asks for a chain of ours. Answer: Lent, at once or, where there is more below memory, when
    that has come up, after ``patience`` seconds at most. ``objects``: the object store it asks itself."""

    id: Count
    asker: Count  # number of its connection
    name: str
    unit_tokens: Count
    groups: list[GroupShape]
    space: Space
    chain: Hashes
    start: Count
    patience: Seconds = 0.0
    objects: str = ""


class Return(msgspec.Struct, frozen=True, tag="return"):
    """The asker has read what was lent. No answer."""

    asker: Count
    lease: Count


class Left(msgspec.Struct, frozen=True, tag="left"):
    """The asker is gone: whatever it was lent is free. No answer."""

    asker: Count


ToMover = Open | Read | Write | Drop | Look | Release | Lent | Coming
ToServer = Opened | Refused | Kept | Moved | Located | Coming | Lend | Return | Left

encode = msgspec.msgpack.Encoder().encode
decode_to_mover = msgspec.msgpack.Decoder(ToMover).decode
decode_to_server = msgspec.msgpack.Decoder(ToServer).decode
