"""The contract of an eviction policy. It orders the blocks of one slot size; the index decides whether one may go."""

import abc
from collections.abc import Iterable

from vllm_kvtier.store.index.block_entry import BlockEntry


class Policy(abc.ABC):
    """Holds the entries that were added and not removed: ready and unpinned, of one size.

    ``entry.mark`` and ``entry.stamp`` belong to the policy. ``add`` and ``touch`` get the blocks of a prefix last block
    first, so that a policy that orders by time evicts a prefix from its tail. The index evicts a descendant of the
    block that ``coldest`` names, if it has any.
    """

    @abc.abstractmethod
    def add(self, entry: BlockEntry) -> None:
        """A block was stored. If ``entry.key`` was evicted before, it is a ghost hit."""

    @abc.abstractmethod
    def touch(self, entries: Iterable[BlockEntry]) -> None:
        """These blocks were used by one request. All are held."""

    @abc.abstractmethod
    def remove(self, entry: BlockEntry, evicted: bool) -> None:
        """A block was removed. ``evicted``: to make room, so that its key may be remembered."""

    @abc.abstractmethod
    def coldest(self) -> BlockEntry | None:
        """The block to evict next; None: nothing is held. The same block until something changes."""

    @abc.abstractmethod
    def defer(self, entries: Iterable[BlockEntry]) -> None:
        """The named block, and those on the path to a block in use, cannot be evicted now: name others. Repeated calls
        must eventually name every block held."""

    @abc.abstractmethod
    def __len__(self) -> int: ...
