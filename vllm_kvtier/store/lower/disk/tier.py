"""The disk below the store's memory: what is where on it is decided here, the bytes move in its mover's process.

Options that the mover gets (``moving.Open``): ``path`` (directory), ``size`` (bytes, a multiple of 4096),
``preallocate``, ``backend`` and ``direct`` as in ``StoreOptions``. Places are numbers of 4 KiB pages below
``Opened.capacity_pages`` (0: all of ``size``); place 0 is never used.
"""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vllm_kvtier.logs import get_logger
from vllm_kvtier.store.lower import mover as mv
from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.base import Block, Find, Tier, TierCounts, Want
from vllm_kvtier.store.lower.disk.places import Gone, Places, Shapes
from vllm_kvtier.store.lower.durations import Durations
from vllm_kvtier.store.lower.rate import Rate
from vllm_kvtier.store.policies import Policy
from vllm_kvtier.store.records import EXISTS, NO_PARENT_STORED, NO_ROOM
from vllm_kvtier.wire.reactor import Reactor, Timer
from vllm_kvtier.wire.slots import PAGE

logger = get_logger(__name__)

# A read or write is late after so many seconds, and one for each so many bytes in front of and in it: a slow disk,
# or one that many share, is not a hung one.
PATIENCE_SECONDS, PATIENCE_BYTES = 10.0, 20e6
GUESS = 1e9, 0.001  # bytes/s and seconds of a read, until some were measured
PREALLOCATE_BYTES = 50e6  # a second: file systems that cannot do it at once write zeros
WRITE_PAUSES = 1.0, 60.0  # seconds without writes after one that failed, doubled each time
REOPEN_PAUSES = 300.0, 3600.0  # seconds until a tier that takes no writes any more is opened anew
MAX_GONE = 1 << 20  # places in one message
REFUSALS = {NO_ROOM: "room", NO_PARENT_STORED: "parent", 0: "space"}  # blocks that got no place, for want of what


@dataclass(slots=True, eq=False)
class _Token:
    places: Places
    lease: int


@dataclass(slots=True, eq=False)
class _Write:
    blocks: Sequence[Block]
    done: Callable[[list[bool]], None]


class DiskTier(Tier):
    """See ``base.Tier``. A mover that fails takes what is known of the disk with it; the next one tells it anew.

    options: above. pool_fd, pool_bytes: the memory. shapes(space): (tokens a unit, groups) of a space, None where
    nobody knows. policy, tenant_share: as ``Index``'s. make_mover: ``Mover``, or what stands in for it.
    """

    name = "disk"

    def __init__(
        self,
        options: Mapping[str, str | int | float | bool],
        pool_fd: int,
        pool_bytes: int,
        reactor: Reactor,
        shapes: Callable[[bytes], Shapes | None],
        *,
        policy: Callable[[], Policy] | None = None,
        tenant_share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        make_mover: Callable[..., mv.Mover] = mv.Mover,
    ):
        self._reactor, self._shapes, self._clock = reactor, shapes, clock
        self._make_places = lambda: Places(policy, clock, tenant_share, self._gone, lambda *name: self.on_moved(*name))
        self._pages = int(options["size"]) // PAGE
        self._gone = Gone()
        self._places = self._make_places()
        self._filling: Iterator[None] | None = None
        self._writes: deque[_Write] = deque()
        self._writing: _Write | None = None
        self._moving: list[m.Move] = []  # of it
        self._reads, self._written = Rate(*GUESS), Rate(*GUESS)
        self._counts = TierCounts(name=self.name)
        self._refused = dict.fromkeys(REFUSALS, 0)
        self._no_writes = self._said = ""  # why it takes none at present; what was logged of that last
        self._evicted_before = 0  # by indexes that are no more
        self._write_pause, self._reopen_pause = WRITE_PAUSES[0], REOPEN_PAUSES[0]
        self._again: Timer | None = None  # when writes are tried again
        opening = mv.OPEN_SECONDS + (self._pages * PAGE / PREALLOCATE_BYTES if options.get("preallocate") else 0)
        self._mover = make_mover(
            self.name,
            options,
            pool_fd,
            pool_bytes,
            reactor,
            self._hear,
            self._up,
            self._down,
            open_seconds=opening,
        )

    def start(self) -> None:
        self._mover.start()

    def stop(self) -> None:
        self._mover.stop()

    @property
    def durations(self) -> Mapping[str, Durations]:
        return self._mover.durations

    @property
    def usable(self) -> bool:
        return self._places.filled and self._mover.state == mv.READY

    @property
    def writable(self) -> bool:
        return self.usable and not self._no_writes

    @property
    def reading(self) -> bool:
        return self._reads.under_way > 0

    # -- finding and reading ------------------------------------------------------------------------------------

    def find(self, want: Want, done: Callable[[Find], None]) -> None:
        found = self._places.find(want) if self.usable else None
        self._counts.finds += 1
        if found is None:
            done(Find(want, want.start))
            return
        self._counts.found_blocks += sum(place > 0 for row in found.slots for place in row)
        done(Find(want, found.units, _Token(self._places, found.lease)))

    def release(self, find: Find) -> None:
        if isinstance(find.token, _Token):
            find.token.places.release(find.want, find.token.lease)

    def read(self, find: Find, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        places = self._places
        if not self.usable or not isinstance(find.token, _Token) or find.token.places is not places:
            done([False] * len(blocks))
            return
        result = [False] * len(blocks)
        left = -(-len(blocks) // m.MAX_MOVES)

        def over(first: int, good: list[bool]) -> None:
            nonlocal left
            result[first : first + len(good)] = good
            left -= 1
            if not left:
                done(result)

        if not blocks:
            done(result)
        for first in range(0, len(blocks), m.MAX_MOVES):
            some = blocks[first : first + m.MAX_MOVES]
            self._read(places, some, lambda good, first=first: over(first, good))

    def _read(self, places: Places, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        lease, where = places.hold([(b.space, b.group, b.hash) for b in blocks])
        there = [i for i, place in enumerate(where) if place]
        if not there:
            done([False] * len(blocks))
            return
        message = m.Read(self._mover.next_id(), 0, [_move(blocks[i], where[i]) for i in there])
        nbytes = PAGE * sum(blocks[i].pages for i in there)
        begun = self._reads.begin(nbytes, self._clock())

        def answered(reply: m.Moved | None) -> None:
            good = reply.good if reply is not None else [False] * len(there)
            self._reads.end(begun, nbytes, self._clock(), all(good))
            places.let_go(lease)
            counts = self._counts
            counts.read_blocks += sum(good)
            counts.read_failures += len(good) - sum(good)
            counts.read_bytes += PAGE * sum(blocks[i].pages for i, is_good in zip(there, good, strict=True) if is_good)
            if reply is not None and reply.error:
                logger.warning("kvtier: a read of the disk tier failed: %s", reply.error)
            result = [False] * len(blocks)
            for i, is_good in zip(there, good, strict=True):
                result[i] = is_good
                if reply is not None and not is_good and places is self._places:
                    # Whatever ails it, it would be found again and read in vain; stored anew it lies elsewhere.
                    self.discard(blocks[i].space, blocks[i].group, blocks[i].hash)
            done(result)
            if not self._reads.under_way:
                self.on_quiet()

        self._mover.request(message, self._patience(), answered)

    def seconds(self, nbytes: int) -> float:
        return self._reads.seconds(nbytes)

    def has(self, space: bytes, group: int, block_hash: bytes) -> bool:
        return self._places.has((space, group, block_hash))

    def keeps(self, space: bytes, group: int, block_hash: bytes) -> bool:
        return self.usable and self._places.is_ready((space, group, block_hash))

    # -- writing ------------------------------------------------------------------------------------------------

    def write(self, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        """At most ``moving.MAX_MOVES`` blocks; those beyond are not kept."""
        self._writes.append(_Write(blocks, done))
        self._write_next()

    def _write_next(self) -> None:
        """One at a time: what a write gives up must be known to the mover before the next one uses its places."""
        while self._writes and self._writing is None:
            write = self._writes.popleft()
            if not self.writable:
                write.done([False] * len(write.blocks))
            else:
                self._writing = write
                self._write(write)

    def _write(self, write: _Write) -> None:
        places, blocks = self._places, write.blocks
        where = places.reserve(blocks[: m.MAX_MOVES], self._shapes)
        where += [0] * (len(blocks) - len(where))
        for place in where:
            if place in self._refused:
                self._refused[place] += 1
        new = [i for i, place in enumerate(where) if place > 0]
        kept = [
            place == EXISTS and places.is_ready((block.space, block.group, block.hash))
            for block, place in zip(blocks, where, strict=True)
        ]
        if not new:
            self._write_over(write, kept)
            return
        moves = [_move(blocks[i], where[i]) for i in new]
        spaces = places.untold(move.space for move in moves)
        message = m.Write(self._mover.next_id(), moves, self._gone.say(writing=True), spaces)
        self._moving = moves
        nbytes = PAGE * sum(move.pages for move in moves)
        begun = self._written.begin(nbytes, self._clock())

        def answered(reply: m.Moved | None) -> None:
            good = reply.good if reply is not None else [False] * len(moves)
            self._written.end(begun, nbytes, self._clock(), all(good))
            # What an earlier mover began is forgotten with all that was known of its disk.
            if reply is not None and places is self._places:
                self._gone.answered(any(good))
                good = places.settle(moves, good, [space.space for space in spaces] if all(good) else ())
                self._drop(places.forgotten)
                self._learn(reply)
            counts = self._counts
            counts.written_blocks += sum(good)
            counts.write_failures += len(good) - sum(good)
            counts.written_bytes += PAGE * sum(x.pages for x, is_good in zip(moves, good, strict=True) if is_good)
            for i, is_good in zip(new, good, strict=True):
                kept[i] = is_good
            self._write_over(write, kept)

        self._mover.request(message, self._patience(), answered)

    def _write_over(self, write: _Write, kept: list[bool]) -> None:
        self._writing, self._moving = None, []
        write.done(kept)
        self._write_next()

    def _learn(self, reply: m.Moved) -> None:
        """Whether it makes sense to go on writing."""
        if not reply.writable:
            pause, self._reopen_pause = self._reopen_pause, min(2 * self._reopen_pause, REOPEN_PAUSES[1])
            self._stop_writes(reply.error or "it does not say why", pause, self._reopen)
        elif not all(reply.good):
            pause, self._write_pause = self._write_pause, min(2 * self._write_pause, WRITE_PAUSES[1])
            self._stop_writes(reply.error or "it does not say why", pause, self._try_writes)
        elif self._said:
            self._write_pause, self._said = WRITE_PAUSES[0], ""
            logger.info("kvtier: the disk tier takes writes again")

    def _stop_writes(self, reason: str, pause: float, then: Callable[[], None]) -> None:
        if reason != self._said:
            logger.warning("kvtier: the disk tier takes no writes for now: %s", reason)
        self._no_writes = self._said = reason
        self._again = self._reactor.call_later(pause, then)
        self.on_change()

    def _try_writes(self) -> None:
        self._again, self._no_writes = None, ""
        self.on_change()

    def _reopen(self) -> None:
        self._again = None
        if self._reads.under_way:
            self._again = self._reactor.call_later(WRITE_PAUSES[0], self._reopen)
        else:
            self._mover.set_aside(f"it is opened anew, because it took no writes: {self._no_writes}")

    def _patience(self) -> float:
        return PATIENCE_SECONDS + (self._reads.waiting_bytes + self._written.waiting_bytes) / PATIENCE_BYTES

    # -- forgetting ---------------------------------------------------------------------------------------------

    def discard(self, space: bytes, group: int, block_hash: bytes) -> None:
        before = len(self._gone)
        self._places.discard((space, group, block_hash))
        self._counts.discarded_blocks += len(self._gone) - before
        self._drop()

    def clear(self, space: bytes | None) -> None:
        self._places.clear(space)
        self._drop()

    def _drop(self, now: bool = True) -> None:
        """What was given up by force, the mover hears at once: also a crash must not bring it back."""
        if now and self.usable and len(self._gone):
            places = self._gone.say(writing=False)
            for first in range(0, len(places), MAX_GONE):
                self._mover.send(m.Drop(places[first : first + MAX_GONE]))

    # -- its mover ----------------------------------------------------------------------------------------------

    def _hear(self, message: m.ToServer) -> None:
        if isinstance(message, m.Kept) and self._mover.state == mv.OPENING:
            self._places.hear(message)
        else:
            self._mover.set_aside(f"it sent {type(message).__name__}, which no disk sends then")

    def _up(self, opened: m.Opened) -> None:
        pages = min(opened.capacity_pages, self._pages) if opened.capacity_pages else self._pages
        self._no_writes = "" if opened.writable else opened.note or "it can only be read"
        self._counts.capacity_bytes = pages * PAGE
        self._filling = self._places.fill(pages)
        self._fill(self._filling)

    def _fill(self, filling: Iterator[None]) -> None:
        if filling is not self._filling:
            return  # its mover is gone
        for _ in filling:
            # What is put back stays for long: no collection need look at millions of blocks, again and again.
            gc.freeze()
            self._reactor.call_soon(lambda: self._fill(filling))
            return
        self._filling = None
        found = self._places.blocks_found
        if found:
            used = self._places.stats().used_pages * PAGE
            logger.info("kvtier: the disk tier has %d blocks (%.1f GiB) of an earlier life", found, used / (1 << 30))
        self._drop()
        self.on_change()

    def _down(self, reason: str) -> None:
        self._evicted_before += self._places.stats().evictions
        self._places.give_up_forgotten(self._moving)
        self._gone.down()
        later = self._places.later
        self._places, self._filling = self._make_places(), None
        self._places.later = later
        if self._again is not None:
            self._again.cancel()
            self._again = None
        self._no_writes = ""
        self.on_change()

    def counts(self) -> TierCounts:
        stats, now, state, reason = self._places.stats(), self._clock(), self._mover.state, self._mover.reason
        if state == mv.READY and not self._places.filled:
            state = mv.OPENING
        elif state == mv.READY and self._no_writes:
            state, reason = "read only", self._no_writes
        return replace(
            self._counts,
            state=state,
            reason=reason,
            used_bytes=stats.used_pages * PAGE,
            blocks=stats.entries,
            evicted_blocks=self._evicted_before + stats.evictions,
            read_seconds=self._reads.busy_seconds(now),
            write_seconds=self._written.busy_seconds(now),
            timeouts=self._mover.timeouts,
            restarts=self._mover.restarts,
            extra={f"refused_{why}": float(self._refused[place]) for place, why in REFUSALS.items()},
        )


def _move(block: Block, place: int) -> m.Move:
    return m.Move(block.space, block.group, block.hash, block.parent, block.tenant, block.slot, block.pages, place)
