"""Exporting: checksums of blocks as they complete, and exports of finished requests.

On vLLM's scheduler thread only. Blocks of a request that will be exported get their checksum in the step that
completes them, so that nothing is left to do when the request finishes but the blocks filled last.

A recurrent state is behind one token (kinds that are not ``by_position``). vLLM changes it in place, so that a request
which ends has one, behind the last token that was computed. Of those before, vLLM's prefix cache keeps some, and they
do not change. An export ends at the former if its reader can go on there, else at one of the latter. A reader of a
prompt needs the state behind its last token but one: ``prepare`` ends the prefill there.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from vllm_kvtier.jobs.transfer_jobs import ChecksumJob
from vllm_kvtier.scheduler.context import EngineContext
from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumEntry, ChecksumIndex, batches
from vllm_kvtier.scheduler.leases.exports import Export, ExportTable, GroupBlocks, LeaseKind
from vllm_kvtier.scheduler.matching.request_state import RequestState, lora_fingerprint_of
from vllm_kvtier.scheduler.matching.transfer_params import hints
from vllm_kvtier.scheduler.offload.block_tables import Growth, Table
from vllm_kvtier.vllm_compat import requests as vr

# Checksums of generated blocks that only engines of this node may want are deferred until there are so many, as many
# steps passed, or a request ended: each launch costs the engine some hundred microseconds.
MAX_DEFERRED_BLOCKS = 32
MAX_DEFERRED_STEPS = 64
MIN_PROMPT_BLOCKS = 4  # as many of one request in a step are a prompt's: at once

# Blocks of each group that are kept free for a running request, which vLLM would preempt otherwise: it may take so many
# in the steps before we look again.
RESERVE_PER_REQUEST = 2
MAX_NAMES = 1 << 12  # of ended and of unwanted prefills that are remembered


class ExportBuilder:
    def __init__(
        self,
        engine: EngineContext,
        table: ExportTable,
        checksum_index: ChecksumIndex,
        shared: Callable[[], bool] = lambda: False,
        unverified: Callable[[bytes], bool] = lambda block_hash: False,
    ):
        """``shared``: whether engines of this node may copy any block as long as it is in the cache. ``unverified``:
        whether vLLM's prefix cache may have this content from a load that is not verified."""
        self._config, self._table, self._pool, self._checksum_index = engine.config, table, engine.pool, checksum_index
        self._unverified = unverified
        self._keys, self._counters, self._shared = engine.identity.content_keys, engine.counters, shared
        # vLLM's hashes also cover tokens after the block (some speculative decoding): there are no partial tails.
        self._lookahead = engine.info.hash_lookahead > 0
        self._geometry, self._speculates = engine.geometry, engine.info.speculates
        self._groups, self._hash_block_size = engine.geometry.groups, engine.geometry.hash_block_size
        self._states_within_blocks = engine.states_within_blocks
        self._states = [g for g, group in enumerate(self._groups) if not group.kind.by_position]
        self._partial = not (self._lookahead or engine.geometry.whole_blocks)  # whether exports end within a block
        self._align = engine.geometry.alignment
        self._pending: list[ChecksumEntry] = []
        self._deferred: list[tuple[ChecksumEntry, bytes]] = []  # with the hash of what they hold
        self._deferred_since = 0  # step
        self._hasten = False
        self.exports = True  # whether any request is exported: not beside another connector that does this
        self.urgent = False  # a peer waits for this step's checksums
        self._urgent_next = False  # for those of the next one
        self.step = 0
        # Prefills that other engines know by name before they end (``Hints.export_as``): names of all that vLLM has
        # queued or runs, those that run, and names of those that ended.
        self.queued: set[str] = set()
        self.running: dict[str, tuple[RequestState, Table]] = {}
        self.ended: OrderedDict[str, None] = OrderedDict()
        self.unwanted: OrderedDict[str, None] = OrderedDict()  # not to be exported: they run, or wait for that

    # -- as blocks fill ---------------------------------------------------------------------------------------------

    def prepare(self, request: Any) -> None:
        """vLLM will schedule this request (its own object)."""
        if self._states and self._partial and self.exports and hints(request).export_prefill:
            vr.leave_last_token(request, self._hash_block_size)

    def kind(self, state: RequestState) -> LeaseKind | None:
        """How this request will be exported when it ends well; None if not at all."""
        if not self.exports:
            return None
        if state.hints.export_prefill:
            return LeaseKind.HANDOFF
        return LeaseKind.RETAINED if self._config.bidirectional else None

    def checksums(self, state: RequestState) -> bool:
        """Whether others may read this request's blocks."""
        return self._shared() or self.kind(state) is not None

    def begin_step(self, growth: list[Growth]) -> list[ChecksumJob]:
        """The checksums to compute after the forward of a step, for the blocks that its requests fill."""
        self.step += 1
        self.urgent, self._urgent_next = self._urgent_next, False
        if not (growth or self._pending or self._deferred):
            return []
        # Without blocks that vLLM has handed out anew since their export ended.
        entries, self._pending = [e for e in self._pending if self._checksum_index.has(e)], []
        for tracked, table, computed in growth:
            if self.kind(tracked) is not None:
                self.urgent |= self.kind(tracked) is LeaseKind.HANDOFF
                if tracked.hints.export_as:
                    self.running[tracked.hints.export_as] = tracked, table
                entries += self._completed(tracked, table, computed)
            elif self._shared():
                entries += self._filled(tracked, table, computed)
        return batches(entries + self._due())

    def _filled(self, state: RequestState, table: Table, computed: int) -> list[ChecksumEntry]:
        """As ``_completed``, for a request that is not exported: at once for a prompt, else deferred."""
        hashes = state.request.block_hashes
        hashed = min(computed, len(hashes) * self._hash_block_size)
        filled: list[tuple[ChecksumEntry, bytes]] = []
        for g, (size, _) in enumerate(self._groups):
            first, last, per = self._known(state, table, g), hashed // size, size // self._hash_block_size
            first = max(first, self._own(state, g))
            table.checksums_ready[g] = max(first, last)
            ids = self._ids(state.request, g, table.groups[g], first, last)
            new = self._entries(state, g, ids, first, last)
            positions = [i for i in range(first, min(last, len(ids))) if ids[i]]
            filled += [(entry, bytes(hashes[(i + 1) * per - 1])) for entry, i in zip(new, positions, strict=True)]
        if len(filled) >= MIN_PROMPT_BLOCKS:
            return self._checksum_index.take_missing([entry for entry, _ in filled], self.step)
        if filled and not self._deferred:
            self._deferred_since = self.step
        self._deferred += filled
        return []

    def _known(self, state: RequestState, table: Table, g: int) -> int:
        """Blocks of group ``g`` that need no check: if the last block of a prefix hit has its checksum, so do those
        before it."""
        hit = min(table.offered[g], len(table.groups[g]))
        if not table.checksums_ready[g] and hit:
            last = self._entries(state, g, table.groups[g], hit - 1, hit)
            if last and self._checksum_index.has(last[0]):
                table.checksums_ready[g] = hit
        return table.checksums_ready[g]

    def _own(self, state: RequestState, g: int) -> int:
        """Number of blocks of group ``g`` that vLLM has freed and may have given to other requests."""
        group = self._groups[g]
        if group.kind.whole_prefix or not group.kind.by_position:
            return 0
        return group.num_skipped_blocks(state.request.num_computed_tokens)

    def _ids(self, request: Any, g: int, ids: list[int], first: int, last: int) -> list[int]:
        """By place, the blocks of group ``g`` that are to be read, of places [first, last). ``ids``: the request's."""
        if self._groups[g].kind.by_position:
            return ids
        # vLLM's prefix cache may have states of other weights under these hashes, or of other tokens.
        if request.lora_request is not None or self._states_within_blocks:
            return []
        per = self._groups[g].block_tokens // self._hash_block_size
        hashes = [bytes(request.block_hashes[(i + 1) * per - 1]) for i in range(first, last)]
        return [0] * first + [self._cached_block(block_hash, g) for block_hash in hashes]

    def _cached_block(self, block_hash: bytes, g: int) -> int:
        return 0 if self._unverified(block_hash) else self._pool.cached_block(block_hash, g)

    def _due(self) -> list[ChecksumEntry]:
        """Deferred entries, once they are due, of blocks that have the same content still."""
        waited = self.step - self._deferred_since >= MAX_DEFERRED_STEPS
        if not self._deferred or not (self._hasten or waited or len(self._deferred) >= MAX_DEFERRED_BLOCKS):
            return []
        held, self._deferred, self._hasten = self._deferred, [], False
        # Not in place of a checksum that an export needs.
        new = {entry.block: (entry, key) for entry, key in held if not self._checksum_index.knows(entry.block)}
        here = [entry for entry, block_hash in new.values() if self._pool.holds(entry.block, block_hash, entry.group)]
        return self._checksum_index.take_missing(here, self.step)

    def _completed(self, state: RequestState, table: Table, computed: int) -> list[ChecksumEntry]:
        """Entries of blocks complete once this step ran (and of the prompt's partial tail, for a hand-off)."""
        request = state.request
        hashed = min(computed, len(request.block_hashes) * self._hash_block_size)
        if self.kind(state) is LeaseKind.HANDOFF:  # without the tokens that a prefill engine generates
            hashed = min(hashed, request.num_prompt_tokens // self._hash_block_size * self._hash_block_size)
        if not any(table.checksums_ready):
            table.clears = self._checksum_index.clears
        tail = None if table.tailed else self._tail_tokens(state, computed)
        table.tailed |= tail is not None
        if tail is None and all(
            hashed // size <= done for (size, _), done in zip(self._groups, table.checksums_ready, strict=True)
        ):
            return []
        entries = []
        for g, (size, kind) in enumerate(self._groups):
            last, first = hashed // size, max(table.checksums_ready[g], self._own(state, g))
            ids = self._ids(request, g, table.groups[g], first, last)
            entries += self._entries(state, g, ids, first, last)
            table.checksums_ready[g] = max(table.checksums_ready[g], last)
            if tail is None or not (kind.by_position or vr.ends_with_prompt(request)):
                continue
            if tail % size == 0 and not kind.by_position and not any(ids[-1:]):
                entries += self._entries(state, g, table.groups[g], tail // size - 1, tail // size)
            if tail % size and tail // size >= last:  # a block has one checksum at a time
                entries += self._tail_entry(state, g, table.groups[g], tail)
        return self._checksum_index.take_missing(entries, self.step)

    def _tail_tokens(self, state: RequestState, computed: int) -> int | None:
        prompt: int = state.request.num_prompt_tokens
        if self.kind(state) is LeaseKind.HANDOFF and not self._lookahead and computed >= prompt:
            return prompt
        return None

    def _entries(self, state: RequestState, g: int, ids: list[int], first: int, last: int) -> list[ChecksumEntry]:
        if first >= last:
            return []
        size, hashes = self._groups[g][0], state.request.block_hashes
        per, places = size // self._hash_block_size, [i for i in range(first, min(last, len(ids))) if ids[i]]
        ends = [hashes[(i + 1) * per - 1] for i in places]
        keys = self._keys().of(ends, g, lora_fingerprint_of(state.request))
        return [ChecksumEntry(g, ids[i], key, size) for i, key in zip(places, keys, strict=True)]

    def _tail_entry(self, state: RequestState, g: int, ids: list[int], tokens: int) -> list[ChecksumEntry]:
        size = self._groups[g][0]
        position = tokens // size
        if position >= len(ids) or not ids[position]:
            return []
        if tokens % self._hash_block_size:
            block_hash = vr.tail_hash(state.request, tokens, self._hash_block_size)
        else:
            block_hash = bytes(state.request.block_hashes[tokens // self._hash_block_size - 1])
        key = self._keys().key(block_hash, g, lora_fingerprint_of(state.request))
        return [ChecksumEntry(g, ids[position], key, tokens - position * size)]

    # -- while a prefill runs ----------------------------------------------------------------------------------------

    def ready_blocks(self, state: RequestState, table: Table, g: int, first: int) -> list[int]:
        """Block ids of group ``g`` from position ``first`` on that hold the prompt and have their checksums by now.

        A block that vLLM took from a preempted request is in the index no more, once it has other content.
        """
        ids, ready = table.groups[g], self._table.checksums_ready_step
        last = min(table.checksums_ready[g], len(ids), state.request.num_prompt_tokens // self._groups[g][0])
        found: list[int] = []
        for position, entry in enumerate(self._entries(state, g, ids, first, last), first):
            made = self._checksum_index.has(entry) and self._checksum_index.ready_step([entry]) <= ready
            if not made or entry.block != ids[position]:  # a group that lacks a block
                break
            found.append(entry.block)
        return found

    def on_queued(self, name: str) -> None:
        """A prefill that was named ahead is queued. An earlier one may have had the same name."""
        self.queued.add(name)
        self.ended.pop(name, None)

    def prefill_ended(self, name: str) -> None:
        """Call after ``finished``, or in place of it: a prefill that was named ahead has ended, with an export or
        not."""
        self.queued.discard(name)
        self.running.pop(name, None)
        self.unwanted.pop(name, None)
        _remember(self.ended, name)

    def release_export(self, name: str) -> None:
        """No engine will pull the prefill of this name: when it ends it is not exported. It may not run yet."""
        if name and name not in self.ended:
            _remember(self.unwanted, name)

    # -- finishing -------------------------------------------------------------------------------------------------

    def finished(
        self, state: RequestState, block_ids: tuple[list[int], ...], table: Table | None = None
    ) -> Export | None:
        """Export a request that ended well; None if it is not to be exported or does not fit. ``table``: of its blocks,
        whose checksums ``begin_step`` entered; None if that is not known."""
        self._hasten |= bool(self._deferred)
        kind = self.kind(state)
        if kind is None or not vr.ended_well(state.request) or state.hints.export_as in self.unwanted:
            return None
        export = self._make(state, kind, block_ids, table)
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

    def _make(
        self, state: RequestState, kind: LeaseKind, block_ids: tuple[list[int], ...], table: Table | None
    ) -> Export | None:
        request, hash_block_size, handoff = state.request, self._hash_block_size, kind is LeaseKind.HANDOFF
        tokens, ends_with_state = self._exported_tokens(request, handoff, block_ids)
        if not tokens:
            self._counters.count("export_refused", "nothing_computed")
            return None
        entries: list[ChecksumEntry] = []
        groups, held, ready = [], [], -1
        for g, (size, cache_kind) in enumerate(self._groups):
            ids, first = list(block_ids[g])[: -(-tokens // size)], 0
            if not cache_kind.by_position:
                last = ids[-1] if ends_with_state else 0
                ids = self._ids(request, g, ids, 0, tokens // size)
                ids += [0] * (-(-tokens // size) - len(ids))
                ids[-1] = last or ids[-1]
            elif not cache_kind.whole_prefix:
                self._keep_freed(request, g, ids, tokens)
            elif table is not None and not request.resumable:
                first, step = self._entered(table, g, ids[: tokens // size])
                ready = max(ready, step)
            entries += self._entries(state, g, ids, first, tokens // size)
            if tokens % size:
                entries += self._tail_entry(state, g, ids, tokens)
            groups.append(GroupBlocks(size, ids, cache_kind))
            held += ids
        # The next step computes the checksums that are missing.
        missing = self._checksum_index.take_missing(entries, self.step + 1)
        self._pending += missing
        self._urgent_next |= handoff and bool(missing)
        ready = max(ready, self._checksum_index.ready_step(entries))
        hashes = vr.block_hashes(request, tokens, hash_block_size)
        tail = vr.tail_hash(request, tokens, hash_block_size) if tokens % hash_block_size else b""
        seconds = self._config.handoff_seconds if handoff else self._config.retain_seconds
        return Export(
            id=state.hints.export_as or request.request_id,
            kind=kind,
            tokens=tokens,
            block_hashes=hashes,
            digest=vr.prefix_digest(hashes, tail),
            lora_fingerprint=lora_fingerprint_of(request),
            groups=groups,
            pinned=self._pool.pin(held),
            ready_step=ready,
            deadline=time.monotonic() + seconds,
            tail=tail,
        )

    def _entered(self, table: Table, g: int, ids: list[int]) -> tuple[int, int]:
        """(number, step) of the first of these full blocks of group ``g`` that need no look at their hashes:
        ``begin_step`` entered their checksums, and none was removed since. ``step`` makes the last of these."""
        done = table.checksums_ready[g]
        step = self._checksum_index.last_step(ids[:done], self._groups[g].block_tokens)
        return (0, -1) if step is None or table.clears != self._checksum_index.clears else (min(done, len(ids)), step)

    def _exported_tokens(self, request: Any, handoff: bool, block_ids: tuple[list[int], ...]) -> tuple[int, bool]:
        """Tokens to export. Whether they end with the request's own recurrent states, not with those of vLLM's prefix
        cache."""
        hashed = len(request.block_hashes) * self._hash_block_size
        written = vr.written_tokens(request)
        most = self._geometry.lookup_tokens(vr.prompt_tokens(request)) if handoff else request.num_tokens
        certain = not self._speculates or (handoff and vr.ends_with_prompt(request))
        if self._states and not certain:  # nor is it certain which state is behind a generated token
            most = min(most, vr.prompt_tokens(request))
        if self._states and self._partial and certain:
            # A step in flight may move the state on by the last token that was sampled; what is behind it is no answer.
            tokens = vr.scheduled_tokens(request)
            here = all(any(block_ids[g][: self._groups[g].num_blocks(tokens)][-1:]) for g in self._states)
            if 0 < tokens <= most and tokens // self._hash_block_size <= len(request.block_hashes) and here:
                return tokens, True
        elif handoff and self._partial and not self._states:
            return min(written, most), False
        tokens = min(written, hashed, most) // self._align * self._align
        while tokens and not all(self._has_state(request, g, tokens) for g in self._states):
            tokens -= self._align
        return tokens, False

    def _has_state(self, request: Any, g: int, tokens: int) -> bool:
        last = tokens // self._groups[g].block_tokens
        return any(self._ids(request, g, [], last - 1, last)[-1:])

    def _keep_freed(self, request: Any, g: int, ids: list[int], tokens: int) -> None:
        """Add blocks that vLLM has just freed, because the next token does not read them, if its prefix cache still has
        them. A reader needs them that continues from the last whole block, or computes the last tokens again."""
        size = self._groups[g][0]
        for position in range(self._groups[g].first_needed_block(tokens), tokens // size):
            if ids[position]:
                break
            last = (position + 1) * size // self._hash_block_size - 1
            ids[position] = self._cached_block(bytes(request.block_hashes[last]), g)

    # -- giving back -----------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Unpin blocks whose exports and leases ended."""
        freed = self._table.take_freed()
        try:
            while freed:
                self._pool.free(freed[0])
                del freed[0]
        finally:
            if freed:
                self._table.put_back(freed)

    def release_for_requests(self, needed: int) -> None:
        """End retained exports, if fewer than ``needed`` blocks are free."""
        short = needed - self._pool.free_count()
        if short > 0 and self._table.release_for_requests(short):
            self.drain()


def _remember(names: OrderedDict[str, None], name: str) -> None:
    names[name] = None
    names.move_to_end(name)
    while len(names) > MAX_NAMES:
        names.popitem(last=False)
