"""Answers to Inspect with ``spans``: where each block of a chain is or what became of it, and how far it goes on below.

On the server's reactor thread. In memory nothing is leased or touched, and nothing is brought up.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from vllm_kvtier.store import messages as m
from vllm_kvtier.store.entries import READY, Entry
from vllm_kvtier.store.fates import Fates
from vllm_kvtier.store.index import Index
from vllm_kvtier.store.lower.base import Find, Tier, Want
from vllm_kvtier.wire.reactor import Reactor, Timer

# Of one question so many blocks that are not in memory are looked for: some 20 ms of the server's thread.
MOST_MISSING = 1 << 14


def tell(
    index: Index,
    tiers: Sequence[Tier],
    want: Want,
    patience: float,
    reactor: Reactor,
    begun: m.Holding,
    send: Callable[[m.Holding], None],
) -> None:
    """``send`` the answer once, at once or within ``patience`` seconds. ``begun``: it without what is told here;
    ``want``: the chain, at hand up to where memory ends, and the asker's groups, if it has any."""
    fates, known = index.fates, index.shapes(want.space)
    if not want.shapes and known is not None:
        want = replace(want, unit_tokens=known[0], shapes=known[1])
    known_seconds, seconds = fates.ages()
    told = msgspec.structs.replace(begun, spans=spans(index, fates, tiers, want), known=known_seconds, seconds=seconds)
    Reach(
        tiers, want, patience if want.shapes else 0.0, reactor,
        lambda reach: send(msgspec.structs.replace(told, tiers=reach)),
    )  # fmt: skip


def spans(index: Index, fates: Fates, tiers: Sequence[Tier], want: Want) -> list[list[m.Span]]:
    """By group."""
    told, left = [], MOST_MISSING
    for group, shape in enumerate(want.shapes):
        rows: list[m.Span] = []
        blocks = want.units // shape.units
        for block in range(blocks):
            end = (block + 1) * shape.units * m.HASH
            name = want.space, group, want.chain[end - m.HASH : end]
            entry = index.find(*name)
            left -= entry is None
            if left < 0:
                break
            span = _span(entry, name, fates, tiers)
            if rows and (rows[-1].place, rows[-1].fate) == (span.place, span.fate):
                rows[-1] = _joined(rows[-1], span)
            elif len(rows) == m.MAX_SPANS:
                break
            else:
                rows.append(span)
        told.append(rows)
    return told


def _span(entry: Entry | None, name: tuple[bytes, int, bytes], fates: Fates, tiers: Sequence[Tier]) -> m.Span:
    if entry is not None:
        return m.Span(1, "memory" if entry.state is READY else "writing")
    for tier in tiers:
        if tier.usable and tier.has(*name):
            return m.Span(1, tier.name)
    found = fates.find(name)
    if found is None:
        return m.Span(1, "")
    fate, ago = found
    return m.Span(1, "", fate, ago, ago)


def _joined(a: m.Span, b: m.Span) -> m.Span:
    return m.Span(a.blocks + b.blocks, a.place, a.fate, min(a.newest, b.newest), max(a.oldest, b.oldest))


class Reach:
    """Asks tiers, nearest first, how far a chain goes on in each, and lets go at once of what they find.

    ``done`` is called once, with the tiers in order, when all have answered or after ``patience`` seconds; perhaps
    before this returns. What a tier finds later is let go all the same.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        want: Want,
        patience: float,
        reactor: Reactor,
        done: Callable[[list[m.TierReach]], None],
    ):
        self._want, self._done, self._over = want, done, False
        self._told: list[m.TierReach] = []
        for tier in tiers:
            counts = tier.counts()
            self._told.append(m.TierReach(tier.name, counts.state, counts.reason[:4096]))
        self._timer: Timer | None = reactor.call_later(patience, self._end) if patience > 0 else None
        self._next(list(enumerate(tiers)), want.start, patience > 0)

    def _next(self, tiers: list[tuple[int, Tier]], units: int, patient: bool) -> None:
        """Of tiers that answer at once only those are asked, where nobody is patient."""
        while tiers and not self._over:
            number, tier = tiers.pop(0)
            if not tier.usable or units >= self._want.units or (tier.latency() and not patient):
                continue

            def answered(find: Find, number=number, tier=tier) -> None:
                if find.units > find.want.start:
                    tier.release(find)
                if not self._over:
                    self._told[number] = msgspec.structs.replace(self._told[number], units=find.units)
                    self._next(tiers, max(units, find.units), patient)

            tier.find(replace(self._want, start=units), answered)
            return
        self._end()

    def _end(self) -> None:
        if not self._over:
            self._over = True
            if self._timer is not None:
                self._timer.cancel()
            self._done(self._told)
