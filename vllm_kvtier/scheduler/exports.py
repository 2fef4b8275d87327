"""Finished requests' GPU blocks that others may pull, and the leases on them.

An *export* pins the blocks of one finished request (the owner of the table pins them before ``add`` and frees
what ``take_freed`` returns, both on the engine's thread). It ends when its time is over, when it was consumed
(hand-off), when the budget needs its blocks, or when it is dropped. A *lease* keeps an ended export's blocks
pinned until the lease is released, its connection dies or its own deadline passes: nobody can hold blocks
longer than that. Times are this process's monotonic clock; no deadline comes from a peer.

Indexes: export id -> export; block hash -> the exports that have it, newest last (a hash is chained over the
whole prefix, so it also fixes the place); lease id -> lease; connection -> its leases.

Thread-safe: the engine's thread adds and drains, the endpoint's thread leases and expires.
"""

import enum
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

# So long a reader may keep blocks of the prefix cache that requests of our own need.
LENT_SECONDS = 2.0


class Kind(enum.Enum):
    HANDOFF = "handoff"  # a prefill another engine was promised; ends when consumed
    RETAINED = "retained"  # a finished conversation kept for its next turn
    LENT = "lent"  # blocks of the prefix cache that an engine of the node copies just now; ends with its only lease


class Refusal(enum.Enum):
    """Why a lease was not granted; the value is the wire code."""

    UNKNOWN = "unknown"
    DIGEST = "digest"
    NOTHING = "nothing"
    NOT_READY = "not_ready"
    BUSY = "busy"


@dataclass
class GroupBlocks:
    """Blocks of one KV-cache group: ``ids[i]`` holds tokens ``[i*block_tokens, (i+1)*block_tokens)``; 0 is none."""

    block_tokens: int
    ids: list[int]
    window: int | None = None  # sliding-window groups keep only what the window still reaches

    def cover(self, start: int, tokens: int) -> bool:
        """Whether every block a reader at length ``tokens`` needs from ``start`` on is here.

        One token more than the window of the next token reaches: a reader of a whole prompt computes its last
        token again.
        """
        first = start if self.window is None else max(start, tokens - self.window)
        low, high = first // self.block_tokens, -(-tokens // self.block_tokens)
        return high <= len(self.ids) and all(self.ids[low:high])

    def slice(self, start: int, tokens: int) -> list[int]:
        return self.ids[start // self.block_tokens : -(-tokens // self.block_tokens)]


@dataclass(eq=False)
class Export:
    id: str
    kind: Kind
    tokens: int  # readable tokens, a partial last block included for a hand-off
    chain: Sequence[bytes]  # block hashes at hash_block_tokens granularity, token 0 on
    digest: bytes  # of the whole chain, tail included
    variant: bytes
    groups: list[GroupBlocks]
    pinned: list[int]  # block ids to free when the export is gone
    ready_step: int  # checksums are in the table once all ranks summed this step
    deadline: float
    leases: set[int] = field(default_factory=set)
    ended: bool = False

    def covers(self, start: int, tokens: int) -> bool:
        """Whether all groups have what a reader at ``tokens`` needs; windows first, which refuse soonest."""
        groups = sorted(self.groups, key=lambda group: group.window is None)
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


class ExportTable:
    def __init__(
        self,
        hash_block_tokens: int,
        budget: dict[Kind, int],
        clock: Callable[[], float] = time.monotonic,
        align: int = 1,
        longest_lease: float = 600.0,
    ):
        """``budget``: most blocks pinned by exports of each kind (a lease on an ended one comes on top).

        ``longest_lease``: seconds after which a lease is not renewed, however alive its holder is.
        ``align``: chains match in multiples of this many hash blocks (groups with larger blocks than the hash's).
        """
        self._unit = hash_block_tokens
        self._align = align
        self._longest = longest_lease
        self._budget = budget
        self._clock = clock
        self._lock = threading.RLock()
        self._returned = threading.Condition(self._lock)  # the last lease
        self._exports: OrderedDict[str, Export] = OrderedDict()  # oldest first
        self._by_hash: dict[bytes, list[Export]] = {}
        self._leases: dict[int, Lease] = {}
        self._by_connection: dict[Hashable, set[int]] = {}
        self._pinned = {kind: 0 for kind in Kind}
        self._freed: list[list[int]] = []
        self._lease_ids = itertools.count(1)
        self._summed_step = -1

    # -- engine's thread -------------------------------------------------------------------------------------

    def add(self, export: Export) -> bool:
        """Take over ``export.pinned``. False if it alone exceeds its kind's budget; its blocks are then freed."""
        with self._lock:
            if export.id in self._exports:  # a request id used twice: the newer one counts
                self._end(self._exports[export.id])
            size = len(export.pinned)
            if size > self._budget[export.kind]:
                self._freed.append(export.pinned)
                return False
            self._make_room(export.kind, size)
            self._exports[export.id] = export
            self._pinned[export.kind] += size
            for block_hash in export.chain:
                self._by_hash.setdefault(block_hash, []).append(export)
            return True

    @property
    def summed_step(self) -> int:
        """All checksums of steps up to this one have been made."""
        return self._summed_step

    def room(self, kind: Kind) -> int:
        """Blocks that may still be pinned for this kind, if nothing gives way."""
        return self._budget[kind] - self._pinned[kind]

    def lend(self, export: Export, start: int, connection: Hashable, seconds: float, served: bool) -> Lease:
        """Take over ``export.pinned`` (of kind LENT) for one lease, with which it ends; nobody else finds it."""
        with self._lock:
            export.ended = True
            lease = self._lease(export, start, export.tokens, connection, seconds, served)
            self._pinned[Kind.LENT] += len(export.pinned)
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

    def relieve(self, blocks: int) -> int:
        """End the oldest retained exports until ``blocks`` more are freed; returns how many are.

        Hand-offs are promised to somebody and live for seconds, so they stay.
        """
        with self._lock:
            got = 0
            for export in list(self._exports.values()):
                if got >= blocks:
                    break
                if export.kind is Kind.RETAINED and not export.leases:
                    got += len(export.pinned)
                    self._end(export)
            # What is lent comes back in milliseconds. A reader that keeps it longer may find it changed.
            late = self._clock() - LENT_SECONDS
            for lease in [lease for lease in self._leases.values() if lease.export.kind is Kind.LENT]:
                if got < blocks and lease.granted < late:
                    got += len(lease.export.pinned)
                    self._drop_lease(lease)
            return got

    def clear(self) -> None:
        """End every export; leased ones are freed when their leases end."""
        with self._lock:
            for export in list(self._exports.values()):
                self._end(export)

    def recall(self, seconds: float) -> int:
        """Wait so long for all leases to be released, and end those that are left: their readers find that out by the
        checksums, each of which names the content it was made of. Returns how many were ended."""
        with self._returned:
            self._returned.wait_for(lambda: not self._leases, seconds)
            left = list(self._leases.values())
            for lease in left:
                self._drop_lease(lease)
            return len(left)

    # -- endpoint's thread -----------------------------------------------------------------------------------

    def mark_summed(self, step: int) -> None:
        with self._lock:
            self._summed_step = max(self._summed_step, step)

    def lease_export(
        self, export_id: str, digest: bytes, variant: bytes, start: int, connection: Hashable, seconds: float
    ) -> Lease | Refusal:
        """Lease a whole export by id; ``digest`` proves that the asker's token chain is the export's."""
        with self._lock:
            export = self._exports.get(export_id)
            if export is None:
                return Refusal.UNKNOWN
            if export.digest != digest or export.variant != variant:
                return Refusal.DIGEST
            return self._grant(export, start, export.tokens, connection, seconds)

    def lease_chain(
        self, chain: Sequence[bytes], variant: bytes, start: int, connection: Hashable, seconds: float
    ) -> Lease | Refusal:
        """Lease the longest prefix of ``chain`` that one export still has, from token ``start`` on."""
        with self._lock:
            refusal = Refusal.NOTHING
            longest = len(chain) - len(chain) % self._align
            for i in range(longest - 1, start // self._unit - 1, -self._align):
                for export in self._holders(chain, i, variant):
                    granted = self._grant(export, start, (i + 1) * self._unit, connection, seconds)
                    if isinstance(granted, Lease):
                        return granted
                    if granted is Refusal.NOT_READY:
                        refusal = granted
            return refusal

    def longest_prefix(self, chain: Sequence[bytes], variant: bytes) -> int:
        """Exported tokens of ``chain`` as ``lease_chain`` from token 0 would find them, without leasing anything."""
        with self._lock:
            for i in range(len(chain) - len(chain) % self._align - 1, -1, -self._align):
                tokens = (i + 1) * self._unit
                if any(export.covers(0, tokens) for export in self._holders(chain, i, variant)):
                    return tokens
            return 0

    def release(self, lease_id: int, connection: Hashable, done: bool) -> bool:
        """End a lease of this connection. ``done`` consumes a hand-off. False if there is no such lease."""
        with self._lock:
            lease = self._leases.get(lease_id)
            if lease is None or lease.connection != connection:
                return False
            self._drop_lease(lease)
            if done and lease.export.kind is Kind.HANDOFF:
                self._end(lease.export)
            return True

    def drop(self, export_id: str) -> bool:
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
                self._drop_lease(self._leases[lease_id])
            return len(leases)

    def expire(self) -> float | None:
        """End what is overdue; returns the seconds until the next deadline, or None if there is none."""
        with self._lock:
            now = self._clock()
            for lease in [lease for lease in self._leases.values() if lease.deadline <= now]:
                self._drop_lease(lease)
            for export in [export for export in self._exports.values() if export.deadline <= now]:
                self._end(export)
            deadlines = [lease.deadline for lease in self._leases.values()]
            deadlines += [export.deadline for export in self._exports.values()]
            return min(deadlines) - now if deadlines else None

    # -- anyone ----------------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """exports, leases, pinned blocks by kind (for metrics and tests)."""
        with self._lock:
            return {
                "exports": len(self._exports),
                "leases": len(self._leases),
                "served": sum(lease.served for lease in self._leases.values()),
                "handoff_blocks": self._pinned[Kind.HANDOFF],
                "retained_blocks": self._pinned[Kind.RETAINED],
                "lent_blocks": self._pinned[Kind.LENT],
            }

    # -- under the lock ----------------------------------------------------------------------------------------

    def _holders(self, chain: Sequence[bytes], i: int, variant: bytes) -> list[Export]:
        """Exports whose block ``i`` is ``chain[i]``, newest first; elsewhere the hash is not the asker's to name."""
        return [
            export
            for export in reversed(self._by_hash.get(chain[i], ()))
            if export.variant == variant and export.chain[i : i + 1] == [chain[i]]
        ]

    def _make_room(self, kind: Kind, size: int) -> None:
        for export in list(self._exports.values()):
            if self._pinned[kind] + size <= self._budget[kind]:
                return
            if export.kind is kind:
                self._end(export)

    def _grant(
        self, export: Export, start: int, tokens: int, connection: Hashable, seconds: float
    ) -> Lease | Refusal:
        if export.ready_step > self._summed_step:
            return Refusal.NOT_READY
        if start >= tokens or not export.covers(start, tokens):
            return Refusal.NOTHING
        return self._lease(export, start, tokens, connection, seconds, True)

    def _lease(
        self, export: Export, start: int, tokens: int, connection: Hashable, seconds: float, served: bool
    ) -> Lease:
        now = self._clock()
        lease = Lease(next(self._lease_ids), export, connection, now, now + seconds, start, tokens, served)
        self._leases[lease.id] = lease
        self._by_connection.setdefault(connection, set()).add(lease.id)
        export.leases.add(lease.id)
        return lease

    def _drop_lease(self, lease: Lease) -> None:
        export = lease.export
        if export.ended and export.leases == {lease.id}:
            self._free(export)  # first: if it raises, nothing has changed
        del self._leases[lease.id]
        ids = self._by_connection[lease.connection]
        ids.discard(lease.id)
        if not ids:
            del self._by_connection[lease.connection]
        export.leases.discard(lease.id)
        if not self._leases:
            self._returned.notify_all()

    def _end(self, export: Export) -> None:
        """No new leases; blocks are freed now or with the last lease. Idempotent."""
        if export.ended:
            return
        size = len(export.pinned)
        if not export.leases:
            self._free(export)  # first: if it raises, nothing has changed
        export.ended = True
        del self._exports[export.id]
        self._pinned[export.kind] -= size
        for block_hash in export.chain:
            holders = self._by_hash[block_hash]
            holders.remove(export)
            if not holders:
                del self._by_hash[block_hash]

    def _free(self, export: Export) -> None:
        if export.kind is Kind.LENT:
            self._pinned[Kind.LENT] -= len(export.pinned)
        if export.pinned:
            self._freed.append(export.pinned)
            export.pinned = []
