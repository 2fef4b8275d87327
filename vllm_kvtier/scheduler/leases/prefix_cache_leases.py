"""Leases on blocks of this engine's prefix cache, for another engine of the node that copies them from our memory.

Only blocks with a checksum are leased. A reader waits for checksums that a step still has to compute, rather than
compute the blocks itself.
"""

import math
from collections.abc import Hashable, Sequence

from vllm_kvtier.scheduler.context import EngineContext
from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumIndex
from vllm_kvtier.scheduler.leases.block_leases import BlockLeases
from vllm_kvtier.scheduler.leases.exports import ExportTable, GroupBlocks, Lease, LeaseKind, Refusal
from vllm_kvtier.vllm_compat.hooks.scheduler_lock import SchedulerLock
from vllm_kvtier.wire import messages as m

MIN_READY_SHARE = 0.9  # of the wanted tokens: with so many the reader does not wait for more checksums
FREE_BLOCK_SHARE = 0.02  # of all blocks: they stay free for our own requests


class PrefixCacheLeases(BlockLeases):
    kind = LeaseKind.PEER_FETCH
    unavailable, busy = Refusal.NOTHING, Refusal.BUSY

    def __init__(
        self, engine: EngineContext, scheduler_lock: SchedulerLock, checksum_index: ChecksumIndex, exports: ExportTable
    ):
        super().__init__(engine, scheduler_lock, exports)
        self._checksum_index = checksum_index
        self._keys, self._counters = engine.identity.content_keys, engine.counters
        self._align = engine.geometry.alignment // self._hash_block_size  # in hash blocks

    # -- under the lock ---------------------------------------------------------------------------------------------

    def _lease(self, request: m.LeaseRequest, connection: Hashable, seconds: float) -> Lease | Refusal:
        if request.start >= len(request.block_hashes) * self._hash_block_size:
            return Refusal.NOTHING
        tokens, groups, ready = self._longest(request.block_hashes, request.lora_fingerprint, request.start)
        if tokens <= request.start:
            return Refusal.NOTHING
        checksums_ready = self._exports.checksums_ready_step
        if ready > checksums_ready:
            most = tokens - request.start
            tokens, groups, ready = self._longest(
                request.block_hashes, request.lora_fingerprint, request.start, checksums_ready
            )
            if tokens - request.start < MIN_READY_SHARE * most:
                return Refusal.NOT_READY
        wanted = self._wanted(request, groups)
        free = self._pool.free_count() - self._pool.unheld(wanted)
        # A lease that is the only one may exceed the limit: it ends in milliseconds.
        crowded = len(wanted) > self._exports.room(self.kind) and self._exports.counts()["peer_fetch_blocks"] > 0
        if crowded or free < FREE_BLOCK_SHARE * self._pool.num_blocks:
            self._counters.count("peer_leases_refused", "too_many_blocks")
            return Refusal.BUSY
        lease = self._grant(request, connection, seconds, groups, tokens, ready)
        self._counters.count("peer_leased_blocks", amount=len(wanted))
        return lease

    def _longest(
        self, block_hashes: Sequence[bytes], lora_fingerprint: bytes, start: int, checksums_ready: float = math.inf
    ) -> tuple[int, list[GroupBlocks], int]:
        """(tokens, blocks by group, step that makes the last of their checksums) of the longest prefix of
        ``block_hashes``: all that a reader needs of it from token ``start`` on is here, with checksums made until
        step ``checksums_ready``."""
        rows: dict[int, tuple[GroupBlocks, list[int]]] = {}
        longest = len(block_hashes) - len(block_hashes) % self._align
        # Groups with ``whole_prefix`` first: of the others, only what is needed where it ends.
        for g in sorted(range(len(self._groups)), key=lambda g: not self._groups[g].kind.whole_prefix):
            size, kind = self._groups[g]
            whole = kind.whole_prefix
            ids, made = self._row(block_hashes[:longest], lora_fingerprint, start, g, whole, checksums_ready)
            rows[g] = GroupBlocks(size, ids, kind), made
            if whole:
                longest = min(longest, len(ids) * size // self._hash_block_size)
                longest -= longest % self._align
        first = start // self._hash_block_size
        groups, steps = [rows[g][0] for g in range(len(rows))], [rows[g][1] for g in range(len(rows))]
        sparse = [group for group in groups if not group.kind.whole_prefix]  # the others are there up to ``longest``
        while longest > first and not all(group.cover(start, longest * self._hash_block_size) for group in sparse):
            longest -= self._align
        tokens = max(longest, 0) * self._hash_block_size
        for group, made in zip(groups, steps, strict=True):
            last = tokens // group.block_tokens
            del group.ids[last:], made[last:]
            unneeded = min(group.kind.first_needed(tokens) // group.block_tokens, last)
            group.ids[:unneeded] = [0] * unneeded
            made[:unneeded] = [-1] * unneeded
        return tokens, groups, max((step for made in steps for step in made), default=-1)

    def _row(
        self,
        block_hashes: Sequence[bytes],
        lora_fingerprint: bytes,
        start: int,
        g: int,
        whole: bool,
        checksums_ready: float,
    ) -> tuple[list[int], list[int]]:
        """Block ids of group ``g`` by place, 0 where there is none (and before ``start``), and the steps that make
        their checksums. ``whole``: it ends where the first is missing."""
        size = self._groups[g][0]
        per, first = size // self._hash_block_size, start // size
        ids, steps = [0] * first, [-1] * first
        names = block_hashes[(first + 1) * per - 1 :: per]
        for block_hash, key in zip(names, self._keys().of(names, g, lora_fingerprint), strict=True):
            found = self._checksum_index.find(key)
            # The index has a part of the hash, and keeps evicted blocks until vLLM hands them out.
            if found is None or found[1] > checksums_ready or not self._pool.holds(found[0], block_hash, g):
                if whole:
                    break
                found = 0, -1
            ids.append(found[0])
            steps.append(found[1])
        return ids, steps
