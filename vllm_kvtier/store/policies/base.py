"""What an eviction policy is asked. It orders the blocks of one slot size; whether a block may go is the index's."""

import abc
from collections.abc import Iterable

from vllm_kvtier.store.entries import Entry


class Policy(abc.ABC):
    """Holds exactly the entries added and not removed: ready, unpinned ones of one size.

    ``entry.mark`` and ``entry.stamp`` are the policy's own. Entries of one chain come with the last block first, in
    ``add`` and ``touch``, so that where a policy orders by time a chain goes from its tail. What ``coldest`` names
    need not be what goes: the index takes a descendant that nothing depends on.
    """

    @abc.abstractmethod
    def add(self, entry: Entry) -> None:
        """A block was stored. It may be one that was evicted before (``entry.key``): a ghost hit."""

    @abc.abstractmethod
    def touch(self, entries: Iterable[Entry]) -> None:
        """These blocks were used by one request. All are held."""

    @abc.abstractmethod
    def remove(self, entry: Entry, evicted: bool) -> None:
        """Not held any more; ``evicted``: for want of room, so it may be remembered."""

    @abc.abstractmethod
    def coldest(self) -> Entry | None:
        """What should go next; None: nothing is held. The same again until something changes."""

    @abc.abstractmethod
    def defer(self, entries: Iterable[Entry]) -> None:
        """In use just now (the named one, and those on the way to what uses it): name others.

        However often what is named is deferred, everything held is named at some time.
        """

    @abc.abstractmethod
    def __len__(self) -> int: ...
