"""Lending blocks of this engine's prefix cache to another engine of the node, which copies them from our memory.

The blocks are pinned between two turns of vLLM's scheduler (``vllm_compat.turns``) and stay so until the copy is done,
the reader's connection ends or the lease's deadline passes: what is read is not handed out meanwhile. Only blocks with
a checksum are lent. One whose checksum a step still has to make is lent when it is there: the reader waits for that
rather than compute what is being computed here.
"""

import math
import time
from collections.abc import Callable, Hashable, Sequence

from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.exports import Export, ExportTable, GroupBlocks, Kind, Lease, Refusal
from vllm_kvtier.scheduler.ledger import Keys, Ledger
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat.blocks import BlockPool
from vllm_kvtier.vllm_compat.turns import Turns
from vllm_kvtier.wire import messages as m

logger = get_logger("vllm.kvtier.lending")

# If so much of what is wanted has its checksums, the reader does not wait for the rest of them.
ENOUGH = 0.9
# Requests of our own come first: so many blocks stay free whatever others would like to read.
SPARE = 0.02  # of all blocks


class Lender:
    def __init__(
        self,
        turns: Turns,
        pool: BlockPool,
        ledger: Ledger,
        exports: ExportTable,
        keys: Callable[[], Keys],
        groups: list[tuple[int, int | None]],
        unit: int,
        align: int,
        counters: Counters,
    ):
        """``groups``: (block tokens, window) a group; ``unit``: tokens a block hash covers; ``align``: in hash units,
        where a chain may end."""
        self._turns, self._pool, self._ledger, self._exports, self._keys = turns, pool, ledger, exports, keys
        self._groups, self._unit, self._align, self._counters = groups, unit, align, counters

    def ask(self, ask: m.Ask, connection: Hashable, seconds: float, answer: Callable[[Lease | Refusal], None]) -> None:
        """Any thread but vLLM's in a turn; ``answer`` is called on whichever thread has the turn, once."""
        if not self._turns.known:
            answer(Refusal.NOTHING)
            return

        def lend() -> None:
            try:
                found = self._lend(ask, connection, seconds)
            except Exception:
                logger.exception("kvtier: lending blocks failed")
                found = Refusal.NOTHING
            answer(found)

        self._turns.run(lend)

    # -- in a turn ---------------------------------------------------------------------------------------------------

    def _lend(self, ask: m.Ask, connection: Hashable, seconds: float) -> Lease | Refusal:
        if ask.start >= len(ask.chain) * self._unit:
            return Refusal.NOTHING
        tokens, groups, ready = self._longest(ask.chain, ask.variant, ask.start)
        if tokens <= ask.start:
            return Refusal.NOTHING
        summed = self._exports.summed_step
        if ready > summed:
            most = tokens - ask.start
            tokens, groups, ready = self._longest(ask.chain, ask.variant, ask.start, summed)
            if tokens - ask.start < ENOUGH * most:
                return Refusal.NOT_READY
        first = [ask.start // group.block_tokens for group in groups]
        wanted = [i for group, at in zip(groups, first, strict=True) for i in group.ids[at:] if i]
        free = self._pool.free_count() - self._pool.unheld(wanted)
        # One loan alone may be larger than all together should be: it is over in milliseconds.
        crowded = len(wanted) > self._exports.room(Kind.LENT) and self._exports.counts()["lent_blocks"] > 0
        if crowded or free < SPARE * self._pool.num_blocks:
            self._counters.count("lending_refused", "too many blocks")
            return Refusal.BUSY
        export = Export(
            id="",
            kind=Kind.LENT,
            tokens=tokens,
            chain=(),
            digest=b"",
            variant=ask.variant,
            groups=groups,
            pinned=self._pool.pin(wanted),
            ready_step=ready,
            deadline=time.monotonic(),
        )
        try:
            lease = self._exports.lend(export, ask.start, connection, seconds, served=not ask.mapped)
        except Exception:
            self._pool.free(export.pinned)
            raise
        self._counters.count("lent_blocks", amount=len(wanted))
        return lease

    def _longest(
        self, chain: Sequence[bytes], variant: bytes, start: int, summed: float = math.inf
    ) -> tuple[int, list[GroupBlocks], int]:
        """(tokens, blocks by group, step that makes the last of their checksums) of the longest prefix of ``chain``
        of which all that a reader needs from token ``start`` on is here, with checksums made until step ``summed``."""
        rows: dict[int, tuple[GroupBlocks, list[int]]] = {}
        longest = len(chain) - len(chain) % self._align
        # Those that keep whole prefixes first: nobody looks for a window where the prefix has ended.
        for g in sorted(range(len(self._groups)), key=lambda g: self._groups[g][1] is not None):
            size, window = self._groups[g]
            ids, made = self._row(chain[:longest], variant, start, g, window is None, summed)
            rows[g] = GroupBlocks(size, ids, window), made
            if window is None:
                longest = min(longest, len(ids) * size // self._unit)
                longest -= longest % self._align
        first = start // self._unit
        groups, steps = [rows[g][0] for g in range(len(rows))], [rows[g][1] for g in range(len(rows))]
        windows = [group for group in groups if group.window is not None]  # the others are there up to ``longest``
        while longest > first and not all(group.cover(start, longest * self._unit) for group in windows):
            longest -= self._align
        tokens = max(longest, 0) * self._unit
        for group, made in zip(groups, steps, strict=True):
            last = tokens // group.block_tokens
            del group.ids[last:], made[last:]
            if group.window is not None:  # what lies behind the window nobody will read
                behind = max(0, tokens - group.window) // group.block_tokens
                group.ids[:behind] = [0] * min(behind, len(group.ids))
                made[:behind] = [-1] * min(behind, len(made))
        return tokens, groups, max((step for made in steps for step in made), default=-1)

    def _row(
        self, chain: Sequence[bytes], variant: bytes, start: int, g: int, whole: bool, summed: float
    ) -> tuple[list[int], list[int]]:
        """Block ids of group ``g`` by place, 0 where there is none (and before ``start``), and the steps that make
        their checksums. ``whole``: it ends where the first is missing."""
        size = self._groups[g][0]
        per, first, keys = size // self._unit, start // size, self._keys()
        ids, steps = [0] * first, [-1] * first
        for place in range(first, len(chain) // per):
            block_hash = chain[(place + 1) * per - 1]
            found = self._ledger.find(keys.key(block_hash, g, variant))
            # The ledger goes by a part of the hash, and hears of evictions only when blocks are handed out.
            if found is None or found[1] > summed or not self._pool.holds(found[0], block_hash, g):
                if whole:
                    break
                found = 0, -1
            ids.append(found[0])
            steps.append(found[1])
        return ids, steps
