"""Which engines have seen which beginnings of prompts: the proxy's own memory, bounded, least recently used first out.

Prompts are cut into pieces, each named by a digest over itself and all before it, so that equal names are equal
prefixes. Nothing tells the proxy what an engine has evicted; this is a guess that costs a prefill if it is wrong.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from vllm_kvtier.proxy.engines import Engine

# Among more engines than this, a request for a prefix that everybody has goes where the load is least anyway.
_MAX_HOLDERS = 8


class Piece(NamedTuple):
    """``digest``: of the prompt up to the end of this piece; ``tokens``: about how many those are."""

    digest: bytes
    tokens: int


class Seen(NamedTuple):
    """One life of an engine."""

    role: str
    index: int
    life: int

    @classmethod
    def by(cls, engine: Engine) -> Seen:
        return cls(engine.role, engine.index, engine.life)


class PrefixMemory:
    """Digest -> the lives of engines that computed or got this prefix, latest first."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._entries: OrderedDict[bytes, tuple[Seen, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def known(self, pieces: Sequence[Piece]) -> dict[Seen, int]:
        """How many tokens of the prompt each life of an engine has seen; those not named: none."""
        found: dict[Seen, int] = {}
        for piece in pieces:
            holders = self._entries.get(piece.digest)
            if holders is None:
                break
            for holder in holders:
                found[holder] = piece.tokens
        return found

    def enter(self, pieces: Sequence[Piece], engine: Engine) -> None:
        """This engine has the whole prompt now."""
        entries, own = self._entries, Seen.by(engine)
        for piece in reversed(pieces):
            # Longest first, so that the short prefixes, which more prompts share, are forgotten last.
            holders = entries.get(piece.digest, ())
            if not holders or holders[0] != own:
                others = tuple(holder for holder in holders if holder[:2] != own[:2])
                entries[piece.digest] = (own, *others)[:_MAX_HOLDERS]
            entries.move_to_end(piece.digest)
        while len(entries) > self.capacity:
            entries.popitem(last=False)
