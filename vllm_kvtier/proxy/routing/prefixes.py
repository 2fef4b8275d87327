"""Which engines have seen which prefixes of prompts: a bounded LRU table of the proxy.

Prompts are split into pieces, each named by a digest over itself and all pieces before it, so that equal names are
equal prefixes. The proxy does not know what an engine has evicted; a wrong guess costs a prefill.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from vllm_kvtier.proxy.engines.engine import Engine

# A prefix that more engines have is routed by load anyway.
_MAX_HOLDERS = 8


class Piece(NamedTuple):
    """``digest``: of the prompt up to the end of this piece; ``tokens``: their approximate number."""

    digest: bytes
    tokens: int


class Seen(NamedTuple):
    """One instance of an engine."""

    role: str
    index: int
    instance: int

    @classmethod
    def by(cls, engine: Engine) -> "Seen":
        return cls(engine.role, engine.index, engine.instance)


class PrefixMemory:
    """Digest -> the engine instances that computed or loaded this prefix, latest first."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._entries: OrderedDict[bytes, tuple[Seen, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def known(self, pieces: Sequence[Piece]) -> dict[Seen, int]:
        """The tokens of the prompt that each engine instance has seen; engines without any are absent."""
        found: dict[Seen, int] = {}
        for piece in pieces:
            holders = self._entries.get(piece.digest)
            if holders is None:
                break
            for holder in holders:
                found[holder] = piece.tokens
        return found

    def enter(self, pieces: Sequence[Piece], engine: Engine) -> None:
        """Enter the whole prompt for this engine."""
        entries, own = self._entries, Seen.by(engine)
        for piece in reversed(pieces):
            # Longest first, so that short prefixes, which more prompts share, are evicted last.
            holders = entries.get(piece.digest, ())
            if not holders or holders[0] != own:
                others = tuple(holder for holder in holders if holder[:2] != own[:2])
                entries[piece.digest] = (own, *others)[:_MAX_HOLDERS]
            entries.move_to_end(piece.digest)
        while len(entries) > self.capacity:
            entries.popitem(last=False)
