"""What the server expects of a tier below its memory. All of it is called on the server's reactor thread.

Blocks move whole and as they lie in the pool's slots, encoded, each part with its checksum at its end; no tier looks
into them. Who loads a block checks it, so that whatever a tier got wrong is found there and ``discard`` ed.
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from vllm_kvtier.store.entries import Shape
from vllm_kvtier.store.lower.durations import Durations
from vllm_kvtier.store.records import HASH


class Block(msgspec.Struct, frozen=True, array_like=True):
    """A block and the slot of the pool it is written from, or read into."""

    space: bytes
    group: int
    hash: bytes
    parent: bytes  # records.ZERO: the first of its chain, or of a windowed group
    tenant: bytes
    slot: int  # its first 4 KiB page in the pool
    pages: int
    unit: int = 0  # of the chain, where the block ends; for admission and order, not part of its name


@dataclass(frozen=True, slots=True)
class Want:
    """A chain of which units [0, start) are at hand, and what follows is looked for.

    ``shapes``: of the space's groups. ``nodes``: addresses of stores of other nodes that the request names. ``skip``:
    names of tiers that are not to be asked for it.
    """

    space: bytes
    unit_tokens: int
    shapes: Sequence[Shape]
    chain: bytes
    start: int
    nodes: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()

    @property
    def units(self) -> int:
        return len(self.chain) // HASH


@dataclass(slots=True, eq=False)
class Find:
    """What a tier has of a Want: units [start, units) of the chain, in all groups as far as their windows reach.

    ``units == want.start``: nothing. What was found stays there until the tier is told to ``release`` it (where the
    tier can see to that), or its own deadline. ``token``: the tier's own.
    """

    want: Want
    units: int
    token: object = None


@dataclass
class TierCounts:
    """For statistics. Bytes and counts since the start, the rest as of now."""

    name: str = ""
    state: str = "opening"  # opening, ready, "read only", "set aside"
    reason: str = ""  # for the last two, in words
    capacity_bytes: int = 0  # 0: no limit of ours
    used_bytes: int = 0
    blocks: int = 0
    finds: int = 0
    found_blocks: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0  # at least one read under way
    read_failures: int = 0
    written_blocks: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0
    write_failures: int = 0
    evicted_blocks: int = 0
    discarded_blocks: int = 0
    timeouts: int = 0
    restarts: int = 0  # of its process
    extra: dict[str, float] = field(default_factory=dict)


class Tier(abc.ABC):
    """``on_change()``, set by who owns the tier, is called when ``usable`` or ``writable`` may have changed;
    ``on_quiet()``, set by demotion, when the last read under way is over; ``on_coming(want, units, seconds)``, set by
    promotion, when it is known before ``find`` is through what it is expected to come to, and in how many seconds;
    ``on_moved(space, group, hash)``, set once somebody follows, when what ``keeps`` says of a block may have changed
    (where that is so of many, ``on_change()`` is called instead)."""

    name: str
    lent: int = 0  # how often, so far, others were lent of this store's memory through it
    on_change: Callable[[], None] = staticmethod(lambda: None)
    on_quiet: Callable[[], None] = staticmethod(lambda: None)
    on_coming: Callable[[Want, int, float], None] = staticmethod(lambda want, units, seconds: None)
    on_moved: Callable[[bytes, int, bytes], None] = staticmethod(lambda space, group, block_hash: None)

    @property
    def durations(self) -> Mapping[str, Durations]:
        """Of the answers of its process, by kind of request: read, write, find."""
        return {}

    @property
    @abc.abstractmethod
    def usable(self) -> bool:
        """Whether it can be asked at present."""

    @property
    @abc.abstractmethod
    def writable(self) -> bool:
        """Whether ``write`` makes sense at present."""

    @abc.abstractmethod
    def find(self, want: Want, done: Callable[[Find], None]) -> None:
        """``done`` is called exactly once, perhaps before this returns; nothing found if anything is wrong."""

    @abc.abstractmethod
    def release(self, find: Find) -> None:
        """What was found need not stay any longer. Exactly once for every Find with ``units > want.start``."""

    @abc.abstractmethod
    def read(self, find: Find, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        """Bring blocks of ``find`` into their slots; ``done(which are there)`` is called exactly once.

        Until then the slots may be written at any time, however long that takes: they must not be reused.
        """

    @abc.abstractmethod
    def seconds(self, nbytes: int) -> float:
        """How long a read of so much would take from now on, behind what is under way; from measured rates."""

    def latency(self) -> float:
        """How long a ``find`` takes, as measured lately; 0 where it answers at once."""
        return 0.0

    @abc.abstractmethod
    def has(self, space: bytes, group: int, block_hash: bytes) -> bool:
        """Whether the block is known to be there (or on its way): what need not be written. No I/O."""

    def keeps(self, space: bytes, group: int, block_hash: bytes) -> bool:
        """Whether the block is known to be there, and can be read at present. No I/O. A tier that does not know what it
        has says False."""
        return False

    @property
    def reading(self) -> bool:
        """Whether reads are under way that writes should let pass."""
        return False

    @abc.abstractmethod
    def write(self, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        """Keep these; parents before children. ``done(which are kept)`` is called exactly once.

        Until then the slots' contents stay as they are (the caller leases them).
        """

    @abc.abstractmethod
    def discard(self, space: bytes, group: int, block_hash: bytes) -> None:
        """What came from here, or from its copy in memory, failed its checksum: nobody may find it here again."""

    @abc.abstractmethod
    def clear(self, space: bytes | None) -> None:
        """Forget a space, or all. A tier that other nodes share forgets only what it remembers itself."""

    @abc.abstractmethod
    def counts(self) -> TierCounts: ...

    @abc.abstractmethod
    def start(self) -> None:
        """Begin to open it in the background."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Its process ends; what is under way is answered with failure. Idempotent."""
