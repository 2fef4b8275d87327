"""The disk tier: the server allocates positions here; the tier process moves the bytes.

Options of the tier process: ``path`` (directory), ``size`` (bytes, a multiple of 4096), ``preallocate``, ``backend``
and ``direct`` as in ``StoreOptions``. Positions are numbers of 4 KiB pages below ``Opened.capacity_pages`` (0: all of
``size``); position 0 is never used.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.eviction.base import Policy
from vllm_kvtier.store.index.types import EXISTS, NO_PARENT_STORED, NO_ROOM
from vllm_kvtier.store.memory.memory_limits import ANY_MACHINE
from vllm_kvtier.store.tiers.base import Block, Find, TierCounts, Want
from vllm_kvtier.store.tiers.disk.block_limit import RESTORED_BYTES, BlockLimit
from vllm_kvtier.store.tiers.disk.slot_map import Gone, Shapes, SlotMap
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process import tier_process as mv
from vllm_kvtier.store.tiers.read_time import ReadTime
from vllm_kvtier.wire.reactor import Timer
from vllm_kvtier.wire.slots import PAGE

logger = get_logger(__name__)

# Time limits: so many seconds, and the queued bytes at the rate of a slow or shared disk. No request waits for a write,
# and the three syncs of one may wait for all that others have written to the file system.
READ_SECONDS, WRITE_SECONDS, MIN_RATE = 10.0, 90.0, 20e6  # seconds, bytes/s
FIRST_READ_RATE = 1e9, 0.001  # bytes/s and seconds of a read, before any measurement
PREALLOCATE_RATE = 50e6  # bytes/s; file systems without fallocate write zeros
OPEN_RATE = 1e9  # bytes/s: the journal of four million blocks is read and sorted in 8 s of a core, which others use too
WRITE_BACKOFF = 1.0, 60.0  # first and longest time without writes after a failed one, in seconds
SLOW_BACKOFF = 60.0, 3600.0  # first and longest time without writes after one that was not done in time, in seconds
REOPEN_BACKOFF = 300.0, 3600.0  # first and longest time until a read-only tier is opened again, in seconds
REOPEN_TRIES = 60  # one a second, to do so while nothing is read; a busy disk always is
MAX_GONE = 1 << 20  # positions per message
REFUSALS = {NO_ROOM: "room", NO_PARENT_STORED: "parent", 0: "namespace"}  # why blocks got no position, for metrics


@dataclass(slots=True, eq=False)
class _Token:
    slot_map: SlotMap
    lease: int


@dataclass(slots=True, eq=False)
class _Write:
    blocks: Sequence[Block]  # none: it records what was removed before
    done: Callable[[list[bool]], None]  # which are stored; of none: [True] if it is recorded


class DiskTier(mv.ProcessTier):
    """See ``base.Tier``. When the tier process ends, the slot map is dropped; the next process reports the disk's
    blocks again.

    options: above. shapes(namespace): (tokens per hash block, groups), None if unknown. policy, tenant_share: as
    ``Index``'s. free_memory: as ``BlockLimit``'s.
    """

    name = "disk"

    def __init__(
        self,
        context: mv.TierContext,
        options: m.Options,
        shapes: Callable[[bytes], Shapes | None],
        policy: Callable[[], Policy] | None = None,
        tenant_share: float = 1.0,
        free_memory: Callable[[], int] = lambda: ANY_MACHINE.fits,
    ):
        self._shapes, self._pages, self._gone = shapes, int(options["size"]) // PAGE, Gone()
        rate = PREALLOCATE_RATE if options.get("preallocate") else OPEN_RATE
        opening = mv.OPEN_SECONDS + self._pages * PAGE / rate
        super().__init__(context, options, opening)
        self._policy, self._tenant_share = policy, tenant_share
        self._block_limit = BlockLimit(self._pages, free_memory)
        self._slot_map = self._make_slot_map()
        self._filling: Iterator[None] | None = None
        self._writes: deque[_Write] = deque()
        self._writing: _Write | None = None
        self._moving: list[m.Move] = []  # of it
        self._reads, self._written = ReadTime(*FIRST_READ_RATE), ReadTime(*FIRST_READ_RATE)
        self._refused = dict.fromkeys(REFUSALS, 0)
        self._no_writes = self._logged = ""  # why it is read only now; the reason logged last
        self._evicted_before = 0  # by earlier slot maps
        self._write_backoff, self._reopen_backoff = WRITE_BACKOFF[0], REOPEN_BACKOFF[0]
        self._slow_backoff, self._slow, self._slow_until = SLOW_BACKOFF[0], "", 0.0  # no writes until then
        self._timeouts = 0  # of its process, at its end
        self._again: Timer | None = None  # end of the backoff
        self._unrecorded: list[Callable[[str], None]] = []  # called when its process has recorded all removals

    @property
    def usable(self) -> bool:
        return self._slot_map.filled and self._tier_process.state == mv.READY

    @property
    def writable(self) -> bool:
        return self.usable and not self._no_writes

    @property
    def reading(self) -> bool:
        return self._reads.under_way > 0

    # -- finding and reading ------------------------------------------------------------------------------------

    def find(self, want: Want, done: Callable[[Find], None]) -> None:
        found = self._slot_map.find(want) if self.usable else None
        self._counts.lookups += 1
        if found is None:
            done(Find(want, want.start))
            return
        self._counts.found_blocks += sum(position > 0 for row in found.slots for position in row)
        done(Find(want, found.num_hash_blocks, _Token(self._slot_map, found.lease)))

    def release(self, find: Find) -> None:
        if isinstance(find.token, _Token):
            find.token.slot_map.release(find.want, find.token.lease)

    def read(self, find: Find, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        """Read at most ``MAX_MOVES`` blocks; those beyond fail."""
        slot_map = self._slot_map
        if not self.usable or not isinstance(find.token, _Token) or find.token.slot_map is not slot_map:
            done([False] * len(blocks))
            return
        lease, where = slot_map.lease_blocks([block.name for block in blocks[: m.MAX_MOVES]])
        there = [i for i, position in enumerate(where) if position]
        if not there:
            done([False] * len(blocks))
            return
        message = m.Read(self._tier_process.next_id(), 0, [m.Move.of(blocks[i], where[i]) for i in there])
        nbytes = PAGE * sum(blocks[i].pages for i in there)
        begun = self._reads.begin(nbytes, self._clock())

        def answered(reply: m.Moved | None) -> None:
            good = reply.good if reply is not None else [False] * len(there)
            self._reads.end(begun, nbytes, self._clock(), all(good))
            slot_map.release_blocks(lease)
            counts = self._counts
            counts.read_blocks += sum(good)
            counts.read_failures += len(good) - sum(good)
            counts.read_bytes += PAGE * sum(blocks[i].pages for i, is_good in zip(there, good, strict=True) if is_good)
            if reply is not None and reply.error:
                logger.warning("kvtier: disk tier: a read failed (%s)", reply.error)
            result = [False] * len(blocks)
            for i, is_good in zip(there, good, strict=True):
                result[i] = is_good
                if reply is not None and not is_good and slot_map is self._slot_map:
                    # Otherwise it would be found and fail again; a copy stored meanwhile has another position.
                    if slot_map.position_of(blocks[i].name) == where[i]:
                        self.discard(*blocks[i].name)
            done(result)
            if not self._reads.under_way:
                self.on_quiet()

        self._tier_process.request(message, self._wait_seconds(READ_SECONDS), answered)

    def seconds(self, nbytes: int) -> float:
        return self._reads.seconds(nbytes)

    def has(self, namespace_id: bytes, group: int, block_hash: bytes) -> bool:
        return self._slot_map.has((namespace_id, group, block_hash))

    def keeps(self, namespace_id: bytes, group: int, block_hash: bytes) -> bool:
        return self.usable and self._slot_map.is_ready((namespace_id, group, block_hash))

    def tenant_of(self, namespace_id: bytes, group: int, block_hash: bytes) -> bytes:
        return self._slot_map.tenant_of((namespace_id, group, block_hash))

    # -- writing ------------------------------------------------------------------------------------------------

    def write(self, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        """Write at most ``MAX_MOVES`` blocks; those beyond fail."""
        self._writes.append(_Write(blocks, done))
        self._write_next()

    def _write_next(self) -> None:
        """One at a time: the tier process must record the removals of a write before the next reuses the positions."""
        while self._writes and self._writing is None:
            write = self._writes.popleft()
            if not (self.writable if write.blocks else self.usable):
                write.done([False] * len(write.blocks))
            else:
                self._writing = write
                self._write(write)

    def _write(self, write: _Write) -> None:
        slot_map, blocks = self._slot_map, write.blocks
        where = slot_map.reserve(blocks[: m.MAX_MOVES], self._shapes)
        where += [0] * (len(blocks) - len(where))
        for position in where:
            if position in self._refused:
                self._refused[position] += 1
        new = [i for i, position in enumerate(where) if position > 0]
        kept = [
            position == EXISTS and slot_map.is_ready(block.name)
            for block, position in zip(blocks, where, strict=True)
        ]
        if not new and blocks:
            self._write_over(write, kept)
            return
        moves = [m.Move.of(blocks[i], where[i]) for i in new]
        namespaces = slot_map.new_namespaces(move.namespace_id for move in moves)
        message = m.Write(self._tier_process.next_id(), moves, self._gone.report(writing=True), namespaces)
        self._moving = moves
        nbytes = PAGE * sum(move.pages for move in moves)
        begun = self._written.begin(nbytes, self._clock())

        def answered(reply: m.Moved | None) -> None:
            good = reply.good if reply is not None else [False] * len(moves)
            self._written.end(begun, nbytes, self._clock(), all(good))
            # The slot map of an earlier tier process is dropped already.
            if reply is not None and slot_map is self._slot_map:
                self._gone.answered(any(good) if moves else not reply.error)
                bad_before = slot_map.bad_positions
                good = slot_map.end_write(moves, good, [each.namespace_id for each in namespaces] if all(good) else ())
                self._drop(slot_map.removed_meanwhile)
                slot_map.evict(self._block_limit.beyond(slot_map.stats().entries))
                if moves or not (reply.writable or self._no_writes):
                    self._check_writable(reply, slot_map.bad_positions > bad_before)
            counts = self._counts
            counts.written_blocks += sum(good)
            counts.write_failures += len(good) - sum(good)
            counts.written_bytes += PAGE * sum(x.pages for x, is_good in zip(moves, good, strict=True) if is_good)
            for i, is_good in zip(new, good, strict=True):
                kept[i] = is_good
            if not moves:
                kept.append(reply is not None and not reply.error)
            self._write_over(write, kept)

        self._tier_process.request(message, self._wait_seconds(WRITE_SECONDS), answered)

    def _write_over(self, write: _Write, kept: list[bool]) -> None:
        self._writing, self._moving = None, []
        write.done(kept)
        self._write_next()

    def _check_writable(self, reply: m.Moved, new_bad: bool) -> None:
        """Stop writes for a while after a failed one. ``new_bad``: the one position that failed is not used again."""
        if not reply.writable:
            self._reopen_later(reply.error or "no reason given")
        elif new_bad and any(reply.good):
            logger.warning("kvtier: disk tier: a block was not written (%s); its position is left out", reply.error)
        elif not all(reply.good):
            seconds, self._write_backoff = self._write_backoff, min(2 * self._write_backoff, WRITE_BACKOFF[1])
            self._stop_writes(reply.error or "no reason given", seconds, self._try_writes)
        elif self._logged:
            self._write_backoff, self._reopen_backoff, self._logged = WRITE_BACKOFF[0], REOPEN_BACKOFF[0], ""
            self._slow_backoff = SLOW_BACKOFF[0]
            logger.info("kvtier: disk tier: writable again")

    def _stop_writes(self, reason: str, seconds: float, then: Callable[[], None]) -> None:
        if reason != self._logged:
            logger.warning("kvtier: disk tier: read only for now (%s)", reason)
        self._no_writes = self._logged = reason
        self._again = self._reactor.call_later(seconds, then)
        self.on_change()

    def _try_writes(self) -> None:
        self._again, self._no_writes = None, ""
        self.on_change()

    def _reopen_later(self, reason: str) -> None:
        """Its process cannot write any more."""
        seconds, self._reopen_backoff = self._reopen_backoff, min(2 * self._reopen_backoff, REOPEN_BACKOFF[1])
        self._stop_writes(reason, seconds, self._reopen)

    def _reopen(self, tries: int = REOPEN_TRIES) -> None:
        self._again = None
        if self._reads.under_way and tries:
            self._again = self._reactor.call_later(WRITE_BACKOFF[0], lambda: self._reopen(tries - 1))
        else:
            self._tier_process.back_off(f"it is opened again because it was read only: {self._no_writes}")

    def _wait_seconds(self, seconds: float) -> float:
        return seconds + (self._reads.waiting_bytes + self._written.waiting_bytes) / MIN_RATE

    # -- removing -----------------------------------------------------------------------------------------------

    def discard(self, namespace_id: bytes, group: int, block_hash: bytes) -> None:
        before, name = len(self._gone), (namespace_id, group, block_hash)
        self._fail_waiting(lambda block: block.name == name)
        self._slot_map.discard(name)
        self._counts.discarded_blocks += len(self._gone) - before
        self._drop()

    def clear_in_steps(self, namespace_id: bytes | None) -> Iterator[None]:
        for _ in self._slot_map.clear_in_steps(namespace_id):
            self._drop()
            yield

    def clear(self, namespace_id: bytes | None) -> None:
        self._fail_waiting(lambda block: namespace_id in (None, block.namespace_id))
        self._slot_map.clear(namespace_id)
        self._drop()

    def _fail_waiting(self, is_removed: Callable[[Block], bool]) -> None:
        """Writes that wait for another have no positions yet, so that their blocks are not in the slot map."""
        failed = [write for write in self._writes if any(map(is_removed, write.blocks))]
        for write in failed:
            self._writes.remove(write)
            write.done([False] * len(write.blocks))

    def when_recorded(self, done: Callable[[str], None]) -> None:
        self._unrecorded.append(done)
        if self._slot_map.filled:
            self._record(done)
        elif self._tier_process.state not in (mv.OPENING, mv.READY):
            self._end_wait(done, [])

    def _record(self, done: Callable[[str], None]) -> None:
        self.write([], lambda recorded: self._end_wait(done, recorded))

    def _end_wait(self, done: Callable[[str], None], recorded: list[bool]) -> None:
        if done in self._unrecorded:
            self._unrecorded.remove(done)
            counts = self.counts()
            done("" if any(recorded) else counts.state + (f" ({counts.reason})" if counts.reason else ""))

    def _drop(self, now: bool = True) -> None:
        """Send discarded and cleared blocks to the tier process at once, so that a crash does not bring them back."""
        if now and self._tier_process.state == mv.READY and len(self._gone):
            positions = self._gone.report(writing=False)
            for first in range(0, len(positions), MAX_GONE):
                self._tier_process.send(m.Drop(positions[first : first + MAX_GONE]))

    # -- its tier process ---------------------------------------------------------------------------------------

    def _make_slot_map(self) -> SlotMap:
        return SlotMap(self._policy, self._clock, self._tenant_share, self._gone, lambda *name: self.on_moved(*name))

    def process_message(self, message: m.ToServer) -> None:
        if isinstance(message, m.Kept) and self._tier_process.state == mv.OPENING:
            restored = self._slot_map.blocks_kept
            self._slot_map.on_kept(
                message, self._block_limit.beyond(restored + len(message.moves), restored * RESTORED_BYTES)
            )
        else:
            self._tier_process.back_off(f"unexpected message {type(message).__name__}")

    def process_up(self, opened: m.Opened) -> None:
        pages = min(opened.capacity_pages, self._pages) if opened.capacity_pages else self._pages
        if not opened.writable:
            self._reopen_later(opened.note or "read only")
        elif (left := self._slow_until - self._clock()) > 0:
            self._stop_writes(self._slow, left, self._try_writes)
        self._counts.capacity_bytes = pages * PAGE
        self._filling = self._slot_map.fill(pages)
        self._fill(self._filling)

    def _fill(self, filling: Iterator[None]) -> None:
        if filling is not self._filling:
            return  # its tier process has ended
        for _ in filling:
            self._drop()
            self._reactor.call_soon(lambda: self._fill(filling))
            return
        self._filling = None
        found = self._slot_map.blocks_found
        if found:
            used = self._slot_map.stats().used_pages * PAGE
            logger.info("kvtier: disk tier: restored %d blocks (%.1f GiB)", found, used / (1 << 30))
        self._drop()
        self.on_change()
        for done in list(self._unrecorded):
            self._record(done)

    def _dismantle(self, steps: Iterator[None]) -> None:
        """The garbage collector does not see blocks, so they are freed one by one."""
        for _ in steps:
            self._reactor.call_soon(lambda: self._dismantle(steps))
            return

    def process_down(self, reason: str) -> None:
        self._evicted_before += self._slot_map.stats().evictions
        self._slot_map.free_removed(self._moving)
        self._gone.down()
        self._dismantle(self._slot_map.dismantle())
        later = self._slot_map.later
        self._slot_map, self._filling = self._make_slot_map(), None
        self._slot_map.later = later
        if self._again is not None:
            self._again.cancel()
            self._again = None
        self._no_writes = ""
        if self._writing is not None and self._tier_process.timeouts > self._timeouts:
            self._slow, self._slow_until = reason, self._clock() + self._slow_backoff
            self._slow_backoff = min(2 * self._slow_backoff, SLOW_BACKOFF[1])
        self._timeouts = self._tier_process.timeouts
        self.on_change()
        for done in list(self._unrecorded):
            self._end_wait(done, [])

    def counts(self) -> TierCounts:
        stats, now = self._slot_map.stats(), self._clock()
        state, reason = self._tier_process.state, self._tier_process.reason
        if state == mv.READY and not self._slot_map.filled:
            state = mv.OPENING
        elif state == mv.READY and self._no_writes:
            state, reason = "read_only", self._no_writes
        return replace(
            self._counts,
            state=state,
            reason=reason,
            used_bytes=stats.used_pages * PAGE,
            blocks=stats.entries,
            evicted_blocks=self._evicted_before + stats.evictions,
            read_seconds=self._reads.busy_seconds(now),
            write_seconds=self._written.busy_seconds(now),
            timeouts=self._tier_process.timeouts,
            restarts=self._tier_process.restarts,
            extra={f"refused_{why}": float(self._refused[position]) for position, why in REFUSALS.items()},
        )

