"""Which blocks are worth being written to a tier: asked when one is stored in memory, and each time it is used there.

A block that is refused is asked about again at its next use; one that is admitted takes along the blocks before it.
"""

import abc
from collections import OrderedDict

from vllm_kvtier.store.entries import Entry

GHOSTS = 1 << 18  # names remembered of blocks that memory forgot: some 50 MB
DEFAULT = "reuse"


class Admission(abc.ABC):
    """Of one tier. ``stored`` and ``used`` say whether the block may be written now."""

    @abc.abstractmethod
    def stored(self, entry: Entry) -> bool: ...

    @abc.abstractmethod
    def used(self, entry: Entry) -> bool: ...

    def gone(self, entry: Entry) -> None:  # noqa: B027 (most have no memory)
        """Memory has forgotten it."""


class All(Admission):
    """Whatever is stored."""

    def stored(self, entry: Entry) -> bool:
        return True

    def used(self, entry: Entry) -> bool:
        return True


class Reuse(Admission):
    """What is seen for the second time: used while in memory, or stored again after memory had forgotten it.

    A prompt that never returns is written nowhere, however long. Names of forgotten blocks are kept in the order of
    being forgotten, ``ghosts`` at most; spaces apart: a clash would cost a write, no more.

    The default. On Mooncake's conversations it finds a third (of a disk that holds everything) to two thirds (of a
    small one) of what ``All`` adds to memory's hits, for 22 to 24 % of the writes; a scan of 100,000 blocks adds half
    again to ``All``'s writes, and none to these (benchmarks/admission.py). To write also what continues a chain that
    came back found 9 % more, for 55 % more writes.
    """

    def __init__(self, ghosts: int = GHOSTS):
        self._most = ghosts
        self._ghosts: OrderedDict[tuple[bytes, int], None] = OrderedDict()

    def stored(self, entry: Entry) -> bool:
        return self._ghosts.pop(entry.key, self) is None

    def used(self, entry: Entry) -> bool:
        return True

    def gone(self, entry: Entry) -> None:
        self._ghosts[entry.key] = None
        if len(self._ghosts) > self._most:
            self._ghosts.popitem(last=False)


class Longer(Admission):
    """Of what ``inner`` admits, chains of at least ``tokens``: shorter ones are computed in no time.

    A block's own end counts, so a chain's first blocks are refused until one that lies deep enough takes them along.
    """

    def __init__(self, inner: Admission, tokens: int):
        self._inner, self._tokens = inner, tokens

    def stored(self, entry: Entry) -> bool:
        return self._inner.stored(entry) and self._is_long(entry)

    def used(self, entry: Entry) -> bool:
        return self._is_long(entry) and self._inner.used(entry)

    def gone(self, entry: Entry) -> None:
        self._inner.gone(entry)

    def _is_long(self, entry: Entry) -> bool:
        return entry.depth * entry.space.unit_tokens >= self._tokens


ADMISSIONS = {"all": All, "reuse": Reuse}


def admission(name: str, min_tokens: int = 0) -> Admission:
    """By ``StoreOptions.disk_admission`` and ``disk_min_tokens``."""
    made = ADMISSIONS[name]()
    return Longer(made, min_tokens) if min_tokens else made
