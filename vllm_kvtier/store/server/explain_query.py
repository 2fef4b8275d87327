"""Answers to Inspect with ``spans``: the tier of each block or the reason of its removal, and the prefix in each tier.

On the server's reactor thread. Leases, touches and promotes nothing.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from vllm_kvtier.store import protocol as m
from vllm_kvtier.store.index.block_entry import READY
from vllm_kvtier.store.index.index import Index
from vllm_kvtier.store.tiers.base import Find, Tier, Want
from vllm_kvtier.wire.reactor import Reactor, Timer

SLICE_BLOCKS = 1 << 12  # blocks before other messages are handled: some 3 ms in memory, up to 9 ms if they are missing
MAX_MISSING = 1 << 14  # blocks per query that are not in memory
MAX_QUERIES = 32  # in progress; each holds up to 2 MiB of hashes. Further ones get no spans


class ExplainQuery:
    """Handles one slice of one query at a time, in order; other messages are handled between slices."""

    def __init__(self, index: Index, tiers: Sequence[Tier], reactor: Reactor):
        """``tiers``: secondary tiers, nearest first."""
        self._index, self._tiers, self._reactor = index, tiers, reactor
        self._walks: deque[tuple[Iterator[None], Callable[[], None]]] = deque()

    def explain(
        self, want: Want, wait_seconds: float, begun: m.Explained, send: Callable[[m.Explained], object]
    ) -> None:
        """``send`` the answer once, perhaps before this returns: after the walk over all blocks, and at most
        ``wait_seconds`` for tiers. ``begun``: the answer without the fields that are set here. ``want``: starts at the
        end of the blocks in memory; ``shapes``: of the client, if it has any."""
        known = self._index.shapes(want.namespace_id)
        if not want.shapes and known is not None:
            want = replace(want, hash_block_size=known[0], shapes=known[1])
        rows: list[list[m.Span]] = []

        def walked() -> None:
            history = self._index.removal_history
            known_seconds, seconds = history.ages() if history is not None else (0.0, 0.0)
            explained = msgspec.structs.replace(begun, spans=rows, known=known_seconds, seconds=seconds)
            Reach(
                self._tiers, want, wait_seconds if want.shapes else 0.0, self._reactor,
                lambda reach: send(msgspec.structs.replace(explained, tiers=reach)),
            )  # fmt: skip

        if len(self._walks) >= MAX_QUERIES:
            walked()
            return
        self._walks.append((walk(self._index, self._tiers, want, rows), walked))
        if len(self._walks) == 1:
            self._go_on()

    def _go_on(self) -> None:
        steps, walked = self._walks.popleft()
        try:
            if next(steps, walked) is walked:  # the walk has ended
                walked()
            else:
                self._walks.appendleft((steps, walked))
        finally:  # an error in one query must not stop the others
            if self._walks:
                self._reactor.call_soon(self._go_on)


def walk(index: Index, tiers: Sequence[Tier], want: Want, explained: list[list[m.Span]]) -> Iterator[None]:
    """Append each group's spans to ``explained``; yield after each ``SLICE_BLOCKS`` of blocks."""
    left, looked, removal_history = MAX_MISSING, 0, index.removal_history
    for group, shape in enumerate(want.shapes):
        spans: list[m.Span] = []
        for block in range(want.num_hash_blocks // shape.hash_blocks_per_block):
            if looked == SLICE_BLOCKS:
                yield
                looked = 0
            looked += 1
            end = (block + 1) * shape.hash_blocks_per_block * m.HASH_BYTES
            name = want.namespace_id, group, want.block_hashes[end - m.HASH_BYTES : end]
            entry = index.find(*name)
            span = m.Span(1, "memory")
            if entry is None:
                left -= 1
                if left < 0:
                    break
                span = m.Span(1, next((tier.name for tier in tiers if tier.usable and tier.has(*name)), ""))
                if not span.tier and removal_history is not None:
                    reason, ago = removal_history.find(name) or (0, 0.0)
                    span = m.Span(1, "", reason, ago, ago)
            elif entry.state is not READY:
                span = m.Span(1, "writing")
            if spans and (spans[-1].tier, spans[-1].removal_reason) == (span.tier, span.removal_reason):
                last = spans[-1]
                newest, oldest = min(last.newest, span.newest), max(last.oldest, span.oldest)
                spans[-1] = m.Span(last.blocks + 1, last.tier, last.removal_reason, newest, oldest)
            elif len(spans) == m.MAX_SPANS:
                break
            else:
                spans.append(span)
        explained.append(spans)


class Reach:
    """Looks up the prefix in the tiers, nearest first, and releases what they find.

    ``done`` is called once, with the tiers in order, when all have answered or after ``wait_seconds``; perhaps before
    this returns. Later answers are released, too.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        want: Want,
        wait_seconds: float,
        reactor: Reactor,
        done: Callable[[list[m.TierReach]], object],
    ):
        self._want, self._done, self._over = want, done, False
        self._reaches: list[m.TierReach] = []
        for tier in tiers:
            counts = tier.counts()
            self._reaches.append(m.TierReach(tier.name, counts.state, counts.reason[:4096]))
        self._timer: Timer | None = reactor.call_later(wait_seconds, self._end) if wait_seconds > 0 else None
        self._next(list(enumerate(tiers)), want.start, wait_seconds > 0)

    def _next(self, tiers: list[tuple[int, Tier]], num_hash_blocks: int, may_wait: bool) -> None:
        """Ask the next tier. Without ``may_wait`` only tiers that answer at once."""
        while tiers and not self._over:
            number, tier = tiers.pop(0)
            if tier.usable and num_hash_blocks < self._want.num_hash_blocks and (may_wait or not tier.latency()):
                want = replace(self._want, start=num_hash_blocks)
                tier.find(want, partial(self._answered, tiers, number, tier, may_wait))
                return
        self._end()

    def _answered(
        self, tiers: list[tuple[int, Tier]], number: int, tier: Tier, may_wait: bool, find: Find
    ) -> None:
        if find.num_hash_blocks > find.want.start:
            tier.release(find)
        if not self._over:
            reach = msgspec.structs.replace(self._reaches[number], num_hash_blocks=find.num_hash_blocks)
            self._reaches[number] = reach
            self._next(tiers, max(find.want.start, find.num_hash_blocks), may_wait)

    def _end(self) -> None:
        if not self._over:
            self._over = True
            if self._timer is not None:
                self._timer.cancel()
            self._done(self._reaches)
