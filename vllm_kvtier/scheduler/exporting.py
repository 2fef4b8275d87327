"""Exporting: checksums of blocks as they complete, and exports of finished requests.

On the scheduler's thread only. Blocks of a request that will be exported get their checksum in the step that
completes them, so that nothing is left to do when the request finishes but the blocks filled last.
"""

import math
import time
from collections.abc import Callable
from typing import Any

from vllm_kvtier.config import KVTierConfig
from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.exports import Export, ExportTable, GroupBlocks, Kind
from vllm_kvtier.scheduler.ledger import Entry, Keys, Ledger, batches
from vllm_kvtier.scheduler.tables import Growth, Table
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.telemetry.stats import Counters
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.blocks import BlockPool
from vllm_kvtier.worker.work import SumBatch

logger = get_logger("vllm.kvtier.exporting")

# Blocks that only engines of this node may want are summed some at a time, since each launch costs the engine some
# hundred microseconds: when there are so many, or as many steps have passed, or a request has ended.
HELD_BLOCKS = 32
HELD_STEPS = 64
PROMPT_BLOCKS = 4  # as many of one request in a step are a prompt's: at once

RUNNING_RESERVE = 2  # blocks a running request may take in the steps before we look again


def alignment(groups: list[tuple[int, int | None]], unit: int) -> int:
    """Tokens in which chains match: every group's blocks must end there."""
    return math.lcm(unit, *(size for size, _ in groups))


class Exporter:
    def __init__(
        self,
        config: KVTierConfig,
        table: ExportTable,
        pool: BlockPool,
        ledger: Ledger,
        keys: Callable[[], Keys],
        groups: list[tuple[int, int | None]],
        counters: Counters,
        lookahead: bool,
        shared: Callable[[], bool] = lambda: False,
    ):
        """``lookahead``: vLLM's hashes also cover tokens after the block (some speculative decoding); then there are
        no partial tails. ``shared``: whether engines of this node may copy any block as long as it is in the cache."""
        self._config, self._table, self._pool, self._ledger, self._keys = config, table, pool, ledger, keys
        self._groups, self._counters, self._lookahead, self._shared = groups, counters, lookahead, shared
        self._unit = pool.hash_block_tokens
        self._align = alignment(groups, self._unit)
        self._pending: list[Entry] = []
        self._held: list[tuple[Entry, bytes]] = []  # with the hash of what they hold
        self._held_since = 0  # step
        self._hasten = False
        self.urgent = False  # somebody waits for this step's checksums
        self.step = 0

    # -- as blocks fill ---------------------------------------------------------------------------------------------

    def kind(self, tracked: Tracked) -> Kind | None:
        """How this request will be exported when it ends well; None if not at all."""
        if tracked.hints.export_prefill:
            return Kind.HANDOFF
        return Kind.RETAINED if self._config.bidirectional else None

    def sums(self, tracked: Tracked) -> bool:
        """Whether others may read this request's blocks."""
        return self._shared() or self.kind(tracked) is not None

    def begin_step(self, growth: list[Growth]) -> list[SumBatch]:
        """What a step's scheduled requests fill; the checksums to make behind its forward."""
        self.step += 1
        # An export may have ended meanwhile and its blocks been handed out anew: what they held is gone.
        entries, self._pending = [e for e in self._pending if self._ledger.has(e)], []
        self.urgent = False
        for tracked, table, computed in growth:
            if self.kind(tracked) is not None:
                self.urgent |= self.kind(tracked) is Kind.HANDOFF
                entries += self._completed(tracked, table, computed)
            elif self._shared():
                entries += self._filled(tracked, table, computed)
        return batches(entries + self._due())

    def _filled(self, t: Tracked, table: Table, computed: int) -> list[Entry]:
        """As ``_completed``, of a request that will not be exported: a prompt's; what it generates is held back."""
        hashes = t.request.block_hashes
        hashed = min(computed, len(hashes) * self._unit)
        filled: list[tuple[Entry, bytes]] = []
        for g, (size, _) in enumerate(self._groups):
            first, last, per = self._known(t, table, g), hashed // size, size // self._unit
            first = max(first, self._own(t, g))
            table.summed[g] = max(first, last)
            new = self._entries(t, g, table.groups[g], first, last)
            places = [i for i in range(first, min(last, len(table.groups[g]))) if table.groups[g][i]]
            filled += [(entry, bytes(hashes[(i + 1) * per - 1])) for entry, i in zip(new, places, strict=True)]
        if len(filled) >= PROMPT_BLOCKS:
            return self._ledger.take_missing([entry for entry, _ in filled], self.step)
        if filled and not self._held:
            self._held_since = self.step
        self._held += filled
        return []

    def _known(self, t: Tracked, table: Table, g: int) -> int:
        """Blocks of group ``g`` that need not be looked at: if the last of a prefix hit has its checksum, so do those
        before it, unless nobody was there to make it for."""
        hit = min(table.offered[g], len(table.groups[g]))
        if not table.summed[g] and hit:
            last = self._entries(t, g, table.groups[g], hit - 1, hit)
            if last and self._ledger.has(last[0]):
                table.summed[g] = hit
        return table.summed[g]

    def _own(self, t: Tracked, g: int) -> int:
        """Blocks of group ``g`` behind its window: vLLM may have given them to others, where nobody wanted the checksum
        when they were filled."""
        size, window = self._groups[g]
        return 0 if window is None else max(0, t.request.num_computed_tokens - window + 1) // size

    def _due(self) -> list[Entry]:
        """Those that were held back for long enough, and still hold what they did."""
        waited = self.step - self._held_since >= HELD_STEPS
        if not self._held or not (self._hasten or waited or len(self._held) >= HELD_BLOCKS):
            return []
        held, self._held, self._hasten = self._held, [], False
        # One that has got a checksum meanwhile got it for somebody who needs it as it is.
        new = {entry.block: (entry, block_hash) for entry, block_hash in held if not self._ledger.knows(entry.block)}
        here = [entry for entry, block_hash in new.values() if self._pool.holds(entry.block, block_hash, entry.group)]
        return self._ledger.take_missing(here, self.step)

    def _completed(self, t: Tracked, table: Table, computed: int) -> list[Entry]:
        """Entries of blocks complete once this step ran (and of the prompt's partial tail, for a hand-off)."""
        request = t.request
        hashed = min(computed, len(request.block_hashes) * self._unit)
        if self.kind(t) is Kind.HANDOFF:  # what P generates beyond the prompt is not handed off
            hashed = min(hashed, request.num_prompt_tokens // self._unit * self._unit)
        tail = None if table.tailed else self._tail_tokens(t, computed)
        table.tailed |= tail is not None
        if tail is None and all(
            hashed // size <= done for (size, _), done in zip(self._groups, table.summed, strict=True)
        ):
            return []
        entries = []
        for g, (size, _) in enumerate(self._groups):
            last = hashed // size
            entries += self._entries(t, g, table.groups[g], max(table.summed[g], self._own(t, g)), last)
            table.summed[g] = max(table.summed[g], last)
            if tail is not None and tail % size and tail // size >= last:  # a block has one checksum at a time
                entries += self._tail_entry(t, g, table.groups[g], tail)
        return self._ledger.take_missing(entries, self.step)

    def _tail_tokens(self, t: Tracked, computed: int) -> int | None:
        prompt = t.request.num_prompt_tokens
        if self.kind(t) is Kind.HANDOFF and not self._lookahead and computed >= prompt:
            return prompt
        return None

    def _entries(self, t: Tracked, g: int, ids: list[int], first: int, last: int) -> list[Entry]:
        if first >= last:
            return []
        size, hashes, keys = self._groups[g][0], t.request.block_hashes, self._keys()
        variant = vr.variant(t.request)
        return [
            Entry(g, ids[i], keys.key(bytes(hashes[(i + 1) * size // self._unit - 1]), g, variant), size)
            for i in range(first, min(last, len(ids)))
            if ids[i]
        ]

    def _tail_entry(self, t: Tracked, g: int, ids: list[int], tokens: int) -> list[Entry]:
        size = self._groups[g][0]
        place = tokens // size
        if place >= len(ids) or not ids[place]:
            return []
        if tokens % self._unit:
            block_hash = vr.tail_hash(t.request, tokens, self._unit)
        else:
            block_hash = bytes(t.request.block_hashes[tokens // self._unit - 1])
        key = self._keys().key(block_hash, g, vr.variant(t.request))
        return [Entry(g, ids[place], key, tokens - place * size)]

    # -- finishing -------------------------------------------------------------------------------------------------

    def finished(self, t: Tracked, block_ids: tuple[list[int], ...]) -> Export | None:
        """Export a request that ended well; None if it is not to be exported or does not fit."""
        self._hasten |= bool(self._held)
        kind = self.kind(t)
        if kind is None or not vr.ended_well(t.request):
            return None
        export = self._make(t, kind, block_ids)
        if export is None:
            return None
        try:
            taken = self._table.add(export)
        except Exception:
            self._pool.free(export.pinned)
            raise
        if not taken:
            self._counters.count("export_refused", "budget")
            return None
        self._counters.count("exports", kind.value)
        return export

    def _make(self, t: Tracked, kind: Kind, block_ids: tuple[list[int], ...]) -> Export | None:
        request, unit = t.request, self._unit
        written = vr.written_tokens(request)
        hashed = min(written, len(request.block_hashes) * unit) // self._align * self._align
        handoff = kind is Kind.HANDOFF
        tokens = min(written, request.num_prompt_tokens) if handoff and not self._lookahead else hashed
        if not tokens:
            self._counters.count("export_refused", "nothing written")
            return None
        entries: list[Entry] = []
        groups, held = [], []
        for g, (size, window) in enumerate(self._groups):
            ids = list(block_ids[g])[: -(-tokens // size)]
            if window is not None:
                self._keep_window(request, g, ids, tokens)
            entries += self._entries(t, g, ids, 0, tokens // size)
            if tokens % size:
                entries += self._tail_entry(t, g, ids, tokens)
            groups.append(GroupBlocks(size, ids, window))
            held += ids
        # What is still to be summed goes with the next step; the rest was ordered by this request or another one.
        self._pending += self._ledger.take_missing(entries, self.step + 1)
        ready = self._ledger.ready_step(entries)
        hashes = vr.chain(request, tokens, unit)
        tail = vr.tail_hash(request, tokens, unit) if tokens % unit else b""
        seconds = self._config.handoff_seconds if handoff else self._config.retain_seconds
        return Export(
            id=request.request_id,
            kind=kind,
            tokens=tokens,
            chain=hashes,
            digest=vr.chain_digest(hashes, tail),
            variant=vr.variant(request),
            groups=groups,
            pinned=self._pool.pin(held),
            ready_step=ready,
            deadline=time.monotonic() + seconds,
        )

    def _keep_window(self, request: Any, g: int, ids: list[int], tokens: int) -> None:
        """Blocks behind the next token's window, which vLLM has given up just now, may still be in a reader's: one
        that goes on from the last whole block, or computes a prompt's last token again. Take them back if they are
        still in the prefix cache (vLLM 0.32 does not put a window's generated blocks there)."""
        size, window = self._groups[g]
        for place in range(max(0, (tokens - window) // size), tokens // size):
            if ids[place]:
                break
            ids[place] = self._pool.cached_block(request.block_hashes[(place + 1) * size // self._unit - 1], g)

    # -- giving back -----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Unpin what no export and no lease needs any more."""
        freed = self._table.take_freed()
        try:
            while freed:
                self._pool.free(freed[0])
                del freed[0]
        finally:
            if freed:
                self._table.put_back(freed)

    def needed(self, tokens: int) -> int:
        """Blocks a request needs for ``tokens`` more."""
        return sum(-(-tokens // size) for size, _ in self._groups)

    def reserve(self, running: int) -> int:
        """Blocks to keep free: running requests take some as they grow, and short of them vLLM preempts."""
        return RUNNING_RESERVE * running * len(self._groups)

    def relieve(self, needed: int) -> None:
        """``needed`` blocks should be free: give up retained exports rather than make a request wait."""
        short = needed - self._pool.free_count()
        if short > 0 and self._table.relieve(short):
            self.drain()
