"""The contract of a secondary tier. All methods are called on the server's reactor thread.

A tier moves whole blocks, byte for byte as in the pool's slots: encoded, each part followed by its checksum. No tier
interprets them. The engine that loads a block verifies it and discards a corrupt one.
"""

import abc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_kvtier.store.index.block_entry import BlockName
from vllm_kvtier.store.index.types import HASH_BYTES, GroupShape
from vllm_kvtier.store.tiers.read_time import Durations


class Block(msgspec.Struct, frozen=True, array_like=True):
    """A block and the slot of the pool that it is written from or read into."""

    namespace_id: bytes
    group: int
    hash: bytes
    parent: bytes  # index.types.ZERO: a first block, or one that needs no parent
    tenant: bytes
    slot: int  # its first 4 KiB page in the pool
    pages: int
    end_hash_block: int = 0  # index of its end in the prefix, for admission and order; not part of its name

    @property
    def name(self) -> BlockName:
        return self.namespace_id, self.group, self.hash


@dataclass(frozen=True, slots=True)
class Want:
    """A lookup: hash blocks [0, start) are in memory, and those from ``start`` on are wanted.

    ``shapes``: of the namespace's groups. ``nodes``: addresses of other nodes' stores that the request names.
    ``skip``: names of tiers to leave out.
    """

    namespace_id: bytes
    hash_block_size: int
    shapes: Sequence[GroupShape]
    block_hashes: bytes
    start: int
    nodes: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()

    @property
    def num_hash_blocks(self) -> int:
        return len(self.block_hashes) // HASH_BYTES


@dataclass(slots=True, eq=False)
class Find:
    """A tier's result for a Want: hash blocks [want.start, num_hash_blocks) of all groups, as far as a prefix
    reach.

    ``num_hash_blocks == want.start``: nothing. A tier that can keeps the blocks until ``release`` or its own deadline.
    ``source``: what it reads from, of several that do not share one rate. ``token``: private to the tier.
    """

    want: Want
    num_hash_blocks: int
    token: Any = None  # of a type of the tier
    source: str = ""


@dataclass
class TierCounts:
    """Statistics of a tier. Bytes and counts since the start, the rest as of now."""

    name: str = ""
    state: str = "opening"  # opening, ready, "read_only", "unavailable"
    reason: str = ""  # of the last two states; of other nodes' stores also how many answer, if not all do
    capacity_bytes: int = 0  # 0: unlimited
    used_bytes: int = 0
    blocks: int = 0
    lookups: int = 0
    found_blocks: int = 0
    failed_lookups: int = 0  # among ``lookups``
    read_blocks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0  # with at least one read in flight
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
    # Of the tier "nodes", by address: why the store there does not answer, "" if it does, None if not known yet.
    nodes: dict[str, str | None] = field(default_factory=dict)


class Tier(abc.ABC):
    """A secondary tier. Its users set these callbacks:

    * ``on_change()``: ``usable`` or ``writable``, or ``keeps`` of many blocks, may have changed.
    * ``on_quiet()``: the last read in flight has ended.
    * ``on_promotion_status(want, num_hash_blocks, seconds)``: the result that a running ``find`` is expected to have,
      and when.
    * ``on_moved(namespace_id, group, hash)``: ``keeps`` of this block may have changed.
    """

    name: str
    pins_pool = False  # its process registers the whole pool with a device
    on_change: Callable[[], None] = staticmethod(lambda: None)
    on_quiet: Callable[[], None] = staticmethod(lambda: None)
    on_promotion_status: Callable[[Want, int, float], None] = staticmethod(lambda want, num_hash_blocks, seconds: None)
    on_moved: Callable[[bytes, int, bytes], None] = staticmethod(lambda namespace_id, group, block_hash: None)

    @property
    def leases_granted(self) -> int:
        """Leases of this store's memory that other nodes got through this tier, since the start."""
        return 0

    @property
    def durations(self) -> Mapping[str, Durations]:
        """Response times of its process, by request: read, write, find."""
        return {}

    @property
    def only_named(self) -> bool:
        """Whether ``find`` finds blocks only for a Want that names ``nodes``. Does not change."""
        return False

    @property
    @abc.abstractmethod
    def usable(self) -> bool:
        """Whether ``find`` and ``read`` are possible now."""

    @property
    @abc.abstractmethod
    def writable(self) -> bool:
        """Whether ``write`` is possible now."""

    @abc.abstractmethod
    def find(self, want: Want, done: Callable[[Find], None]) -> None:
        """Look up blocks. ``done`` is called exactly once, perhaps before this returns; after an error with nothing
        found."""

    @abc.abstractmethod
    def release(self, find: Find) -> None:
        """The blocks of ``find`` are no longer needed. Called exactly once for each Find that found blocks."""

    @abc.abstractmethod
    def read(self, find: Find, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        """Read blocks of ``find`` into their slots. ``done(which succeeded)`` is called exactly once. Until then the
        slots may be written at any time and must not be reused."""

    @abc.abstractmethod
    def seconds(self, nbytes: int) -> float:
        """Expected time of a read of ``nbytes``, behind the reads in flight, from measured rates."""

    def latency(self) -> float:
        """Measured time of a ``find``; 0 if it answers at once."""
        return 0.0

    @abc.abstractmethod
    def has(self, namespace_id: bytes, group: int, block_hash: bytes) -> bool:
        """Whether the block is known to be stored or being written, so that it need not be written. No I/O."""

    def keeps(self, namespace_id: bytes, group: int, block_hash: bytes) -> bool:
        """Whether the block is known to be stored and readable now. No I/O. False if the tier has no index."""
        return False

    def tenant_of(self, namespace_id: bytes, group: int, block_hash: bytes) -> bytes:
        """The tenant that a stored block belongs to; b"": none, or the tier does not know. No I/O."""
        return b""

    @property
    def reading(self) -> bool:
        """Whether reads are in flight, for which writes should wait."""
        return False

    @abc.abstractmethod
    def write(self, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        """Write blocks, parents before children. ``done(which succeeded)`` is called exactly once. Until then the
        caller leases the slots, so that their contents do not change."""

    @abc.abstractmethod
    def discard(self, namespace_id: bytes, group: int, block_hash: bytes) -> None:
        """Remove a block whose copy from this tier, or from memory, failed its checksum."""

    @abc.abstractmethod
    def clear(self, namespace_id: bytes | None) -> None:
        """Remove the blocks of a namespace, or all. A tier that nodes share only clears its own state."""

    def clear_in_steps(self, namespace_id: bytes | None) -> Iterator[None]:
        """Remove most of what ``clear`` will have to remove, so that this is short. For a tier with an index."""
        return iter(())

    def when_recorded(self, done: Callable[[str], None]) -> None:
        """Call ``done`` once: with "" when no later store finds what was removed so far, or with the reason if that
        may be long or never. For a tier whose own blocks outlive the store."""
        done("")

    @abc.abstractmethod
    def counts(self) -> TierCounts: ...

    @abc.abstractmethod
    def start(self) -> None:
        """Open the tier in the background. If it ``pins_pool``, not before all of the pool is committed: to register
        other memory would allocate it, whether there is any or not."""

    def pool_committed(self) -> None:  # noqa: B027  most tiers need not know
        """All of the pool that can be is committed, perhaps less than the whole."""

    @abc.abstractmethod
    def stop(self) -> None:
        """End its process; requests in flight fail. Idempotent."""
