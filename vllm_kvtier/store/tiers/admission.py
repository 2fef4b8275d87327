"""Admission policies: whether a block is written to a secondary tier. Asked when the block is stored in memory and at
each use there. An admitted block is written together with the blocks before it.
"""

import abc
from collections import OrderedDict

from vllm_kvtier.store.index.block_entry import BlockEntry

MAX_GHOSTS = 1 << 18  # names of evicted blocks that are remembered: some 50 MB
DEFAULT = "reuse"


class Admission(abc.ABC):
    """The policy of one tier. ``stored`` and ``used`` return whether the block may be written now."""

    @abc.abstractmethod
    def stored(self, entry: BlockEntry) -> bool: ...

    @abc.abstractmethod
    def used(self, entry: BlockEntry) -> bool: ...

    def gone(self, entry: BlockEntry) -> None:  # noqa: B027 (most policies have no state)
        """The block left memory."""


class All(Admission):
    """Admits every block."""

    def stored(self, entry: BlockEntry) -> bool:
        return True

    def used(self, entry: BlockEntry) -> bool:
        return True


class Reuse(Admission):
    """Admits a block at its second sight: when it is used in memory, or stored again after its eviction. The default.

    A prompt that does not return is never written. Up to ``ghosts`` names of evicted blocks are kept, oldest first, not
    separated by namespace: a clash costs one write.

    On Mooncake's conversation trace it finds a third (disk that holds everything) to two thirds (small disk) of the
    hits that ``All`` adds to memory's, with 22 to 24 % of the writes. A scan of 100,000 blocks adds half again to
    ``All``'s writes, and none here (benchmarks/admission.py). Also writing the continuation of a returned prefix found
    9 % more hits with 55 % more writes.
    """

    def __init__(self, ghosts: int = MAX_GHOSTS):
        self._max_ghosts = ghosts
        self._ghosts: OrderedDict[tuple[bytes, int], None] = OrderedDict()

    def stored(self, entry: BlockEntry) -> bool:
        return self._ghosts.pop(entry.key, self) is None

    def used(self, entry: BlockEntry) -> bool:
        return True

    def gone(self, entry: BlockEntry) -> None:
        self._ghosts[entry.key] = None
        if len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)


class Longer(Admission):
    """Admits what ``inner`` admits if the prefix has at least ``tokens``, or is of unknown length: shorter ones are
    recomputed quickly.

    A block's own end counts: the first blocks are refused until a later one is admitted and takes them along.
    """

    def __init__(self, inner: Admission, tokens: int):
        self._inner, self._tokens = inner, tokens

    def stored(self, entry: BlockEntry) -> bool:
        return self._inner.stored(entry) and self._is_long(entry)

    def used(self, entry: BlockEntry) -> bool:
        return self._is_long(entry) and self._inner.used(entry)

    def gone(self, entry: BlockEntry) -> None:
        self._inner.gone(entry)

    def _is_long(self, entry: BlockEntry) -> bool:
        # A block that needs no parent knows its end only if the block before it is stored. Blocks of other groups that
        # end with it have the same hash. Before a state mostly none is stored: without other groups its end is unknown.
        same = (table.get(entry.hash) for table in entry.namespace.tables)
        depths = [each.depth for each in same if each is not None and not each.is_state]
        if entry.is_state and not depths:
            return True
        depth = max(depths, default=entry.depth)
        return depth * entry.namespace.hash_block_size >= self._tokens


ADMISSIONS = {"all": All, "reuse": Reuse}


def admission(name: str, min_tokens: int = 0) -> Admission:
    """The policy for ``StoreOptions.disk_admission`` and ``disk_min_tokens``."""
    made = ADMISSIONS[name]()
    return Longer(made, min_tokens) if min_tokens else made
