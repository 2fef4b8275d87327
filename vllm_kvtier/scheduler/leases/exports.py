"""Finished requests' GPU blocks that others may pull, and the leases on them.

An *export* pins the blocks of one finished request (the owner of the table pins them before ``add`` and frees what
``take_freed`` returns, both on vLLM's scheduler thread). It ends at its deadline, when it was consumed (hand-off), when
the budget needs its blocks, or by ``end_export``. A *lease* keeps an ended export's blocks pinned until it is released,
its connection ends or its own deadline passes. Times are this process's monotonic clock; no deadline comes from a peer.

Thread-safe: vLLM's scheduler thread adds and drains, the reactor ``kvtier-scheduler`` leases and expires.
"""

import enum
import itertools
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_kvtier.cache_kinds import CacheKind
from vllm_kvtier.cache_kinds.full_attention import FullAttention

# Seconds that a reader may keep blocks of the prefix cache that our own requests need.
PEER_FETCH_SECONDS = 2.0
# How long blocks wait for checksums that are being made: the next step makes the last of them. Then their workers hang.
UNREADY_SECONDS = 10.0
MAX_LEASES = 4096  # of a connection: more than a peer has requests. Each message looks at all leases
# Exports and lengths that one search by hash tries. Of models with windows hundreds of exports may have a common
# beginning that none of them can lease any more; what can be leased is found first, at the end of an export.
MAX_TRIES = 1024
MAX_EXTENSIONS = 9  # of the time that an export is kept, for its reader's queue


class LeaseKind(enum.Enum):
    HANDOFF = "handoff"  # a prefill for another engine; ends when consumed
    RETAINED = "retained"  # a finished conversation kept for its next turn
    PEER_FETCH = "peer_fetch"  # blocks of the prefix cache that a peer is copying; ends with its only lease
    STRETCH = "stretch"  # the same for a part of a prefill that goes on


# They are leased once, by ``lease_cached``, and end with that lease.
_LEASED_ONCE = (LeaseKind.PEER_FETCH, LeaseKind.STRETCH)


class Refusal(enum.Enum):
    """Why a lease was not granted; the value is the wire code."""

    UNKNOWN = "unknown_export"
    DIGEST = "digest_mismatch"
    NOTHING = "no_matching_blocks"
    NOT_READY = "checksums_not_ready"
    BUSY = "peer_busy"


@dataclass
class GroupBlocks:
    """Blocks of one KV-cache group: ``ids[i]`` holds tokens ``[i*block_tokens, (i+1)*block_tokens)``; 0 is none."""

    block_tokens: int
    ids: list[int]
    kind: CacheKind = FullAttention()  # noqa: RUF009  # immutable

    def cover(self, start: int, tokens: int) -> bool:
        """Whether every block a reader at length ``tokens`` needs from ``start`` on is here.

        Also one that computes the last of these tokens again.
        """
        first = max(start, self.kind.first_needed(tokens))
        low, high = first // self.block_tokens, -(-tokens // self.block_tokens)
        return high <= len(self.ids) and all(self.ids[low:high])

    def slice(self, start: int, tokens: int) -> list[int]:
        return self.ids[start // self.block_tokens : -(-tokens // self.block_tokens)]


@dataclass(eq=False)
class Export:
    id: str
    kind: LeaseKind
    tokens: int  # readable tokens, a partial last block included
    block_hashes: Sequence[bytes]  # block hashes at hash_block_size granularity, token 0 on
    digest: bytes  # of the whole chain, tail included
    lora_fingerprint: bytes
    groups: list[GroupBlocks]
    pinned: list[int]  # block ids to free when the export is gone
    ready_step: int  # checksums are in the table once all ranks summed this step
    deadline: float
    tail: bytes = b""  # hash of the partial block
    latest: float = 0.0  # when it ends, however long its reader's request is queued; 0: it is not, as far as is known
    leases: set[int] = field(default_factory=set)
    ended: bool = False

    def covers(self, start: int, tokens: int) -> bool:
        """Whether all groups have what a reader at ``tokens`` needs; those that it needs few blocks of first."""
        groups = sorted(self.groups, key=lambda group: group.kind.whole_prefix)
        return all(group.cover(start, tokens) for group in groups)


@dataclass(eq=False)
class Lease:
    id: int
    export: Export
    connection: Hashable
    granted: float
    deadline: float
    start: int
    tokens: int
    served: bool = True  # it is read through NIXL, which has to be driven here
    by_name: bool = False  # by the engine that a hand-off is for, not by one whose prompt begins alike


class ExportTable:
    def __init__(
        self,
        hash_block_size: int,
        budget: dict[LeaseKind, int],
        clock: Callable[[], float] = time.monotonic,
        align: int = 1,
        longest_lease: float = 600.0,
    ):
        """``budget``: most blocks pinned by exports of each kind, each counted once (a lease on an ended one comes on
        top).

        ``longest_lease``: seconds after which a lease is not renewed, however alive its holder is.
        ``align``: chains match in multiples of this many hash blocks (groups with larger blocks than the hash's).
        """
        self._hash_block_size = hash_block_size
        self._align = align
        self._longest = longest_lease
        self._budget = budget
        self._clock = clock
        self._lock = threading.RLock()
        self._returned = threading.Condition(self._lock)  # a lease
        # Oldest first: by id, by kind, by the hash of each full block, and by that of the last one. Thousands may begin
        # with the same prompt: one that ends is not searched for among them.
        self._exports: dict[str, Export] = {}
        self._by_kind: dict[LeaseKind, OrderedDict[Export, None]] = {kind: OrderedDict() for kind in LeaseKind}
        self._by_hash: dict[bytes, dict[Export, None]] = {}
        self._by_last: dict[LeaseKind, dict[bytes, dict[Export, None]]] = {kind: {} for kind in LeaseKind}
        self._leases: dict[int, Lease] = {}
        self._by_connection: dict[Hashable, set[int]] = {}
        # By kind, how many exports have a block. Prompts that begin alike have blocks in common: they count once.
        self._pinned: dict[LeaseKind, Counter[int]] = {kind: Counter() for kind in LeaseKind}
        self._freed: list[list[int]] = []
        self._unready: list[tuple[int, float, list[int]]] = []  # blocks to be freed after this step, or at this time
        self._retained: int | None = None  # ``retained_blocks``
        self._earliest = math.inf  # no deadline is before it: each message asks, and there may be thousands
        self._lease_ids = itertools.count(1)
        self._checksums_ready_step = -1

    # -- vLLM's scheduler thread ------------------------------------------------------------------------------

    def add(self, export: Export) -> bool:
        """Take over ``export.pinned``. A prefill that alone exceeds the budget is taken, and all others give way. False
        if an export of another kind does; its blocks are then freed."""
        with self._lock:
            if export.id in self._exports:  # a request id used twice: the newer one counts
                self._end(self._exports[export.id])
            if len(export.pinned) > self._budget[export.kind] and export.kind is not LeaseKind.HANDOFF:
                self._free_when_ready(export)
                return False
            if export.kind is LeaseKind.RETAINED:
                self._end_extended(export)
            self._make_room(export)
            self._exports[export.id], self._retained = export, None
            self._by_kind[export.kind][export] = None
            self._pinned[export.kind].update(export.pinned)
            self._earliest = min(self._earliest, export.deadline)
            for block_hash in export.block_hashes:
                self._by_hash.setdefault(block_hash, {})[export] = None
            for block_hash in export.block_hashes[-1:]:
                self._by_last[export.kind].setdefault(block_hash, {})[export] = None
            return True

    @property
    def checksums_ready_step(self) -> int:
        """All checksums of steps up to this one have been made."""
        return self._checksums_ready_step

    def room(self, kind: LeaseKind) -> int:
        """Blocks that may still be pinned for this kind, if nothing gives way."""
        return self._budget[kind] - len(self._pinned[kind])

    def has_most(self, connection: Hashable) -> bool:
        """Whether the connection has so many leases that it gets no other."""
        return len(self._by_connection.get(connection, ())) >= MAX_LEASES

    def lease_cached(self, export: Export, start: int, connection: Hashable, seconds: float, served: bool) -> Lease:
        """Take over ``export.pinned`` (of kind PEER_FETCH or STRETCH) for one lease, with which it ends; no other can
        lease it."""
        with self._lock:
            export.ended = True
            lease = self._lease(export, start, export.tokens, connection, seconds, served)
            self._pinned[export.kind].update(export.pinned)
            return lease

    def take_freed(self) -> list[list[int]]:
        """Block ids to unpin now, an inner list an export, in sequence order."""
        with self._lock:
            freed, self._freed = self._freed, []
            return freed

    def put_back(self, freed: list[list[int]]) -> None:
        """These, taken just now, could not be unpinned yet."""
        with self._lock:
            self._freed = freed + self._freed

    def has_freed(self) -> bool:
        return bool(self._freed)

    def release_for_requests(self, blocks: int) -> int:
        """End the oldest retained exports until ``blocks`` more are freed; returns how many are. Hand-offs, which live
        for seconds, stay."""
        with self._lock:
            got = 0
            for export in list(self._by_kind[LeaseKind.RETAINED]):
                if got >= blocks:
                    break
                if not export.leases:
                    before = len(self._pinned[export.kind])
                    self._end(export)
                    got += before - len(self._pinned[export.kind])
            # Peer fetches take milliseconds. A reader that takes longer may find its blocks changed.
            late = self._clock() - PEER_FETCH_SECONDS
            for lease in [lease for lease in self._leases.values() if lease.export.kind in _LEASED_ONCE]:
                if got < blocks and lease.granted < late:
                    got += len(lease.export.pinned)
                    self._release(lease)
            return got

    def retained_blocks(self) -> int:
        """Blocks that ``release_for_requests`` can free now, but for those that a request has too."""
        with self._lock:
            if self._retained is None:  # counted anew only after a change: requests that wait ask in every step
                retained = self._by_kind[LeaseKind.RETAINED]
                self._retained = len({block for e in retained if not e.leases for block in e.pinned})
            return self._retained

    def pinned_blocks(self) -> int:
        """Blocks that exports and leases hold; requests may have some of them too."""
        with self._lock:
            waiting = (ids for _, _, ids in self._unready)
            leased = (lease.export.pinned for lease in self._leases.values())  # of ended exports too
            return len(set().union(*self._pinned.values(), *leased, *waiting, *self._freed))

    def clear(self) -> None:
        """End every export; leased ones are freed when their leases end."""
        with self._lock:
            for export in list(self._exports.values()):
                self._end(export)
            self._free_ready(math.inf)  # a reset, after which the workers make none of these checksums

    def revoke(self, seconds: float) -> None:
        """Wait at most ``seconds`` for leases on ended exports, then free the blocks of those that are left. Their
        readers notice by the checksums, which cover the content keys."""
        with self._returned:
            self._returned.wait_for(lambda: not any(lease.export.pinned for lease in self._leases.values()), seconds)
            for lease in self._leases.values():
                if lease.export.ended:
                    self._free(lease.export)

    # -- the reactor kvtier-scheduler -------------------------------------------------------------------------

    def mark_checksums_ready(self, step: int) -> None:
        with self._lock:
            self._checksums_ready_step = max(self._checksums_ready_step, step)
            self._free_ready(self._clock())

    def lease_export(
        self,
        export_id: str,
        digest: bytes,
        lora_fingerprint: bytes,
        start: int,
        connection: Hashable,
        seconds: float,
        served: bool = True,
    ) -> Lease | Refusal:
        """Lease a whole export by id; ``digest`` proves that the peer's prompt is the export's."""
        with self._lock:
            export = self._exports.get(export_id)
            if export is None:
                return Refusal.UNKNOWN
            if self.has_most(connection):
                return Refusal.BUSY
            if export.digest != digest or export.lora_fingerprint != lora_fingerprint:
                return Refusal.DIGEST
            granted = self._grant(export, start, export.tokens, connection, seconds, served)
            if isinstance(granted, Lease):
                granted.by_name = True
            return granted

    def lease_by_hashes(
        self,
        block_hashes: Sequence[bytes],
        lora_fingerprint: bytes,
        start: int,
        connection: Hashable,
        seconds: float,
        served: bool = True,
        partial_up_to: int = 0,
    ) -> Lease | Refusal:
        """Lease the longest prefix of ``block_hashes`` that one export still has, from token ``start`` on.

        ``partial_up_to``: a whole export of up to so many tokens may be leased that ends within a block. The asker
        compares its ``tail``.
        """
        with self._lock:
            if self.has_most(connection):
                return Refusal.BUSY
            refusal, first = Refusal.NOTHING, max(0, start // self._hash_block_size - 1)
            found = (
                (export, tokens)
                for i in range(len(block_hashes) - 1, first - 1, -1)
                for export in self._holders(block_hashes, i, lora_fingerprint)
                for tokens in self._ends(export, i + 1, partial_up_to)
            )
            for export, tokens in itertools.islice(found, MAX_TRIES):
                granted = self._grant(export, start, tokens, connection, seconds, served)
                if isinstance(granted, Lease):
                    return granted
                if granted is Refusal.NOT_READY:
                    refusal = granted
            return refusal

    def _ends(self, export: Export, num_hash_blocks: int, partial_up_to: int) -> list[int]:
        """Lengths at which an export may be leased that has so many of the asker's hash blocks."""
        whole = num_hash_blocks % self._align == 0
        ends = [num_hash_blocks * self._hash_block_size] if whole else []
        is_partial = export.tail or not whole
        if is_partial and len(export.block_hashes) == num_hash_blocks and export.tokens <= partial_up_to:
            ends.insert(0, export.tokens)
        return ends

    def longest_prefix(self, block_hashes: Sequence[bytes], lora_fingerprint: bytes) -> int:
        """Exported tokens of ``block_hashes`` that ``lease_by_hashes`` from token 0 would lease."""
        with self._lock:
            indices = range(len(block_hashes) - len(block_hashes) % self._align - 1, -1, -self._align)
            found = (
                (export, (i + 1) * self._hash_block_size)
                for i in indices
                for export in self._holders(block_hashes, i, lora_fingerprint)
            )
            tries = itertools.islice(found, MAX_TRIES)
            return next((tokens for export, tokens in tries if export.covers(0, tokens)), 0)

    def release(self, lease_id: int, connection: Hashable, done: bool) -> bool:
        """End a lease of this connection. ``done`` consumes a hand-off that was leased by its name. False if there is
        no such lease."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None or lease.connection != connection:
                return False
            self._release(lease)
            if done and lease.by_name and lease.export.kind is LeaseKind.HANDOFF:
                self._end(lease.export)
            return True

    def has_handoffs(self) -> bool:
        return bool(self._pinned[LeaseKind.HANDOFF])

    def has(self, export_id: str) -> bool:
        return export_id in self._exports

    def keep(self, export_id: str, seconds: float) -> None:
        """Its reader's request is queued: a prefill is kept for ``seconds`` from now."""
        with self._lock:
            export = self._exports.get(export_id)
            if export is not None and export.kind is LeaseKind.HANDOFF:
                export.latest = export.latest or export.deadline + MAX_EXTENSIONS * seconds
                export.deadline = max(export.deadline, min(self._clock() + seconds, export.latest))

    def end_export(self, export_id: str) -> bool:
        with self._lock:
            export = self._exports.get(export_id)
            if export is None:
                return False
            self._end(export)
            return True

    def renew(self, connection: Hashable, seconds: float) -> int:
        """Extend the leases of a connection to ``seconds`` from now; returns how many there are."""
        with self._lock:
            leases = self._by_connection.get(connection, ())
            for lease_id in leases:
                lease = self._leases[lease_id]
                lease.deadline = max(lease.deadline, min(self._clock() + seconds, lease.granted + self._longest))
            return len(leases)

    def disconnect(self, connection: Hashable) -> int:
        """All leases of a dead connection end; hand-offs stay until their own deadline. Returns how many ended."""
        with self._lock:
            leases = list(self._by_connection.get(connection, ()))
            for lease_id in leases:
                self._release(self._leases[lease_id])
            return len(leases)

    def holders(self) -> list[Any]:
        """The connections that hold leases."""
        with self._lock:
            return list(self._by_connection)

    def expire(self) -> float | None:
        """End what is overdue; returns the seconds until the next deadline, or fewer, or None if there is none."""
        with self._lock:
            now = self._clock()
            self._free_ready(now)
            if not (self._leases or self._exports):
                return self._unready[0][1] - now if self._unready else None
            if now < self._earliest:
                return self._earliest - now
            for lease in [lease for lease in self._leases.values() if lease.deadline <= now]:
                self._release(lease)
            for export in [export for export in self._exports.values() if export.deadline <= now]:
                self._end(export)
            deadlines = [lease.deadline for lease in self._leases.values()]
            deadlines += [until for _, until, _ in self._unready]
            deadlines += [export.deadline for export in self._exports.values()]
            self._earliest = min(deadlines, default=math.inf)
            return self._earliest - now if deadlines else None

    # -- any thread ----------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """exports, leases, pinned blocks by kind (for metrics and tests)."""
        with self._lock:
            return {
                "exports": len(self._exports),
                "leases": len(self._leases),
                "served": sum(lease.served for lease in self._leases.values()),
                "handoff_blocks": len(self._pinned[LeaseKind.HANDOFF]),
                "retained_blocks": len(self._pinned[LeaseKind.RETAINED]),
                "peer_fetch_blocks": len(self._pinned[LeaseKind.PEER_FETCH]),
                "stretch_blocks": len(self._pinned[LeaseKind.STRETCH]),
            }

    # -- under the lock ----------------------------------------------------------------------------------------

    def _holders(self, block_hashes: Sequence[bytes], i: int, lora_fingerprint: bytes) -> Iterator[Export]:
        """Exports whose block ``i`` is ``block_hashes[i]``, newest first."""
        return (
            export
            for export in reversed(self._by_hash.get(block_hashes[i], {}))
            if export.lora_fingerprint == lora_fingerprint and export.block_hashes[i : i + 1] == [block_hashes[i]]
        )

    def _end_extended(self, export: Export) -> None:
        """End the earlier turns of this conversation: all that readers find in them, they find in this export."""
        if not all(group.kind.whole_prefix for group in export.groups):
            return  # only at its own end an earlier turn has a window's blocks, or a state
        by_last = self._by_last[export.kind]
        for block_hash in filter(by_last.__contains__, export.block_hashes):
            for other in list(by_last[block_hash]):
                if not other.leases and other.lora_fingerprint == export.lora_fingerprint:
                    self._end(other)

    def _make_room(self, export: Export) -> None:
        pinned, others, budget = self._pinned[export.kind], self._by_kind[export.kind], self._budget[export.kind]
        if len(pinned) + len(export.pinned) <= budget:
            return
        blocks = set(export.pinned)
        new = sum(i not in pinned for i in blocks)
        while others and len(pinned) + new > budget:
            oldest = next(iter(others))
            ids = blocks.intersection(oldest.pinned)
            self._end(oldest)
            new += sum(i not in pinned for i in ids)

    def _grant(
        self, export: Export, start: int, tokens: int, connection: Hashable, seconds: float, served: bool
    ) -> Lease | Refusal:
        if export.ready_step > self._checksums_ready_step:
            return Refusal.NOT_READY
        if start >= tokens or not export.covers(start, tokens):
            return Refusal.NOTHING
        return self._lease(export, start, tokens, connection, seconds, served)

    def _lease(
        self, export: Export, start: int, tokens: int, connection: Hashable, seconds: float, served: bool
    ) -> Lease:
        now = self._clock()
        lease = Lease(next(self._lease_ids), export, connection, now, now + seconds, start, tokens, served)
        self._leases[lease.id] = lease
        self._earliest = min(self._earliest, lease.deadline)
        self._by_connection.setdefault(connection, set()).add(lease.id)
        export.leases.add(lease.id)
        self._retained = None
        return lease

    def _release(self, lease: Lease) -> None:
        export = lease.export
        if export.ended and export.leases == {lease.id}:
            self._free(export)  # first: if it raises, nothing has changed
        del self._leases[lease.id]
        ids = self._by_connection[lease.connection]
        ids.discard(lease.id)
        if not ids:
            del self._by_connection[lease.connection]
        export.leases.discard(lease.id)
        self._retained = None
        self._returned.notify_all()

    def _end(self, export: Export) -> None:
        """No new leases; blocks are freed now or with the last lease. Idempotent."""
        if export.ended:
            return
        ids = export.pinned
        if not export.leases:
            self._free(export)  # first: if it raises, nothing has changed
        export.ended, self._retained = True, None
        del self._exports[export.id], self._by_kind[export.kind][export]
        pinned = self._pinned[export.kind]
        for i in ids:
            if left := pinned[i] - 1:
                pinned[i] = left
            else:
                pinned.pop(i)  # ``del`` is Python code of Counter
        hashes, by_last = export.block_hashes, self._by_last[export.kind]
        for index, block_hashes in ((self._by_hash, hashes), (by_last, hashes[-1:])):
            for block_hash in block_hashes:
                holders = index[block_hash]
                del holders[export]
                if not holders:
                    del index[block_hash]

    def _free_when_ready(self, export: Export) -> None:
        """Its blocks are freed when their checksums are made. One that is made later is of other content, under the
        export's keys, and a decode engine that reads early needs no lease."""
        if export.ready_step > self._checksums_ready_step:
            until = self._clock() + UNREADY_SECONDS
            self._unready.append((export.ready_step, until, export.pinned))
            self._earliest = min(self._earliest, until)
        else:
            self._freed.append(export.pinned)

    def _free_ready(self, now: float) -> None:
        if self._unready:
            over = [step <= self._checksums_ready_step or until <= now for step, until, _ in self._unready]
            self._freed += [ids for (_, _, ids), done in zip(self._unready, over, strict=True) if done]
            self._unready = [each for each, done in zip(self._unready, over, strict=True) if not done]

    def _free(self, export: Export) -> None:
        if not export.pinned:
            return
        self._free_when_ready(export)
        if export.kind in _LEASED_ONCE:
            pinned = self._pinned[export.kind]
            for i in export.pinned:  # as in ``_end``; a function for both could raise when half is done
                if left := pinned[i] - 1:
                    pinned[i] = left
                else:
                    pinned.pop(i)
        export.pinned = []
