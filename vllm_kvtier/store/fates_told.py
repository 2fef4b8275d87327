"""Answers to Inspect with ``spans``: where each block of a chain is or what became of it, and how far it goes on below.

On the server's reactor thread. In memory nothing is leased or touched, and nothing is brought up.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec

from vllm_kvtier.store import messages as m
from vllm_kvtier.store.entries import READY
from vllm_kvtier.store.index import Index
from vllm_kvtier.store.lower.base import Find, Tier, Want
from vllm_kvtier.wire.reactor import Reactor, Timer

SLICE = 1 << 12  # blocks looked at in one go: some 3 ms in memory, up to 9 ms where they are missing
MOST_MISSING = 1 << 14  # of one question so many blocks that are not in memory are looked for
# Questions whose blocks are being looked at: each keeps its chain, of 2 MiB at most. Others are told no spans.
MOST_ASKED = 32


class Teller:
    """One slice of one answer at a time, in the order of the questions; others' messages go between."""

    def __init__(self, index: Index, tiers: Sequence[Tier], reactor: Reactor):
        """``tiers``: below memory, nearest first."""
        self._index, self._tiers, self._reactor = index, tiers, reactor
        self._walks: deque[tuple[Iterator[None], Callable[[], None]]] = deque()

    def tell(self, want: Want, patience: float, begun: m.Holding, send: Callable[[m.Holding], None]) -> None:
        """``send`` the answer once: before this returns where the blocks are few and nobody is waited for, else when
        they are looked at and then within ``patience`` seconds. ``begun``: it without what is told here; ``want``: the
        chain, at hand up to where memory ends, and the asker's groups, if it has any."""
        known = self._index.shapes(want.space)
        if not want.shapes and known is not None:
            want = replace(want, unit_tokens=known[0], shapes=known[1])
        rows: list[list[m.Span]] = []

        def walked() -> None:
            known_seconds, seconds = self._index.fates.ages()
            told = msgspec.structs.replace(begun, spans=rows, known=known_seconds, seconds=seconds)
            Reach(
                self._tiers, want, patience if want.shapes else 0.0, self._reactor,
                lambda reach: send(msgspec.structs.replace(told, tiers=reach)),
            )  # fmt: skip

        if len(self._walks) >= MOST_ASKED:
            walked()
            return
        self._walks.append((walk(self._index, self._tiers, want, rows), walked))
        if len(self._walks) == 1:
            self._go_on()

    def _go_on(self) -> None:
        steps, walked = self._walks.popleft()
        try:
            if next(steps, walked) is walked:  # it has no more
                walked()
            else:
                self._walks.appendleft((steps, walked))
        finally:  # a fault in one costs the others nothing
            if self._walks:
                self._reactor.call_soon(self._go_on)


def walk(index: Index, tiers: Sequence[Tier], want: Want, told: list[list[m.Span]]) -> Iterator[None]:
    """Appends to ``told``, group by group; stops after each ``SLICE`` of blocks."""
    left, looked, fates = MOST_MISSING, 0, index.fates
    for group, shape in enumerate(want.shapes):
        runs: list[list] = []  # a Span's fields
        run: list = []  # the last of them
        for block in range(want.units // shape.units):
            if looked == SLICE:
                yield
                looked = 0
            looked += 1
            end = (block + 1) * shape.units * m.HASH
            name = want.space, group, want.chain[end - m.HASH : end]
            entry = index.find(*name)
            place, fate, ago = "memory", 0, 0.0
            if entry is None:
                left -= 1
                if left < 0:
                    break
                place = next((tier.name for tier in tiers if tier.usable and tier.has(*name)), "")
                if not place and (found := fates.find(name)) is not None:
                    fate, ago = found
            elif entry.state is not READY:
                place = "writing"
            if run and run[1] == place and run[2] == fate:
                run[0] += 1
                if fate:
                    run[3:] = min(run[3], ago), max(run[4], ago)
            elif len(runs) == m.MAX_SPANS:
                break
            else:
                run = [1, place, fate, ago, ago]
                runs.append(run)
        told.append([m.Span(*run) for run in runs])


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
