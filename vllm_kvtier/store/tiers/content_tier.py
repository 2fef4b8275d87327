"""A tier of immutable blocks that are named by their content: nodes share it and need no coordination.

The tier has no index, because other nodes write and delete. Each lookup asks; the tier only remembers a bounded number
of blocks that it wrote or read. The object tier and the Mooncake tier are its subclasses.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vllm_kvtier.ewma import Ewma
from vllm_kvtier.store.index.block_entry import BlockName
from vllm_kvtier.store.tiers.base import Block, Find, TierCounts, Want
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.tier_process import BACKOFF, READY, ProcessTier, TierContext, TierProcess
from vllm_kvtier.wire.reactor import Timer
from vllm_kvtier.wire.slots import PAGE

MIN_RATE = 2e6  # bytes/s; a slower tier process is replaced
MAX_REMEMBERED_BLOCKS = 1 << 19  # blocks known to be stored
REMEMBERED_BYTES = MAX_REMEMBERED_BLOCKS * 264  # memory of so many (measured, Python 3.11)
# Before any measurement; pessimistic, so that no request waits in vain.
FIRST_RATE, FIRST_LATENCY = 200e6, 0.05  # bytes/s, seconds
LATENCY_WEIGHT = 0.2  # of the latest find
EXPIRE_BLOCKS, EXPIRE_SECONDS = 256, 1.0  # forgotten at a time; shortest time between two times
MEASURED_BYTES = 512 << 20  # bytes moved before the latest so many have half the weight


@dataclass(frozen=True)
class Limits:
    """In seconds. ``look``, ``read``, ``write``: in which the tier process must answer; moves get more by their size.
    ``pauses``: first and longest pause after refused writes, each ``pause_factor`` times the one before. ``known``: for
    which a block that was written or read is not written again. ``kept``: for which KV events say that it is stored."""

    look: float
    read: float
    write: float
    pauses: tuple[float, float]
    pause_factor: float
    known: float = math.inf
    kept: float = math.inf


class ContentTier(ProcessTier):
    """options: of the tier process. ``backoff``: before it is replaced; None: as for other tiers."""

    def __init__(
        self, context: TierContext, options: m.Options, limits: Limits, backoff: tuple[float, float] | None = None
    ):
        super().__init__(context, options, backoff=backoff)
        self._limits = limits
        self._note, self._refused = "", ""  # of Opened; why writes are refused now
        self._pause = limits.pauses[0]
        self._retry: Timer | None = None
        self._known = OrderedDict[BlockName, float]()  # when it was written or read; the latest is last
        self._expiry: Timer | None = None  # of the first of these
        self._writing: dict[BlockName, bool] = {}  # False: discarded meanwhile
        self._undropped: dict[BlockName, None] = {}  # to be sent to the next tier process
        self._reads, self._writes = _Flow(self._clock), _Flow(self._clock)
        self._latency = Ewma(FIRST_LATENCY, LATENCY_WEIGHT)

    @property
    def _writer(self) -> TierProcess:
        """The process that writes and drops blocks."""
        return self._tier_process

    @property
    def _can_drop(self) -> bool:
        """Whether that process can reach what stores the blocks."""
        return True

    @property
    def writable(self) -> bool:
        return self.usable and not self._refused

    def find(self, want: Want, done: Callable[[Find], None]) -> None:
        nothing = Find(want, want.start)
        if not self.usable or want.start >= want.num_hash_blocks:
            done(nothing)
            return
        began = self._clock()
        self._counts.lookups += 1
        message = m.Look.of(self._tier_process.next_id(), want)

        def answered(reply: m.Located | None) -> None:
            self._counts.failed_lookups += reply is None or reply.failed or bool(reply.error)
            if reply is not None and not reply.error:
                align = math.lcm(*(shape.hash_blocks_per_block for shape in want.shapes))
                end, count = reply.num_hash_blocks, reply.num_hash_blocks - want.start
                if 0 <= count and end <= want.num_hash_blocks and not count % align:
                    self._latency.observe(self._clock() - began)
                    end = self._good_hash_blocks(want, end)
                    count = end - want.start
                    self._counts.found_blocks += sum(count // shape.hash_blocks_per_block for shape in want.shapes)
                    done(Find(want, end, reply.token) if count else nothing)
                    return
                self._tier_process.back_off(f"it found hash blocks {want.start} to {end} of {want.num_hash_blocks}")
            elif reply is not None:
                self._tier_process.back_off(reply.error)
            done(nothing)

        self._tier_process.request(message, self._limits.look, answered)

    def _good_hash_blocks(self, want: Want, num_hash_blocks: int) -> int:
        """End of what was found that may be used."""
        return num_hash_blocks

    def release(self, find: Find) -> None:
        """Nothing to release: a find holds nothing."""

    def read(self, find: Find, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        nbytes = sum(block.pages for block in blocks) * PAGE
        message = m.Read(self._tier_process.next_id(), find.token, [m.Move.of(block) for block in blocks])
        self._reads.begin(nbytes)

        def answered(reply: m.Moved | None) -> None:
            good = self._moved(reply, blocks, self._reads, nbytes)
            for block, there in zip(blocks, good, strict=True):
                if there:
                    self._know(block.name)
                elif reply is not None:
                    self._remove(block.name)
            self._counts.read_failures += good.count(False)
            done(good)

        self._tier_process.request(message, self._limits.read + self._reads.waiting / MIN_RATE, answered)

    def seconds(self, nbytes: int) -> float:
        return self._reads.seconds(nbytes)

    def latency(self) -> float:
        return self._latency.value

    def has(self, namespace_id: bytes, group: int, block_hash: bytes) -> bool:
        name = namespace_id, group, block_hash
        known = self._known.get(name)
        return (known is not None and self._clock() < known + self._limits.known) or self._writing.get(name, False)

    def keeps(self, namespace_id: bytes, group: int, block_hash: bytes) -> bool:
        """Whether it is remembered as stored. Another node may have deleted it, which a read finds."""
        return self.usable and (namespace_id, group, block_hash) in self._known

    def write(self, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        if not self.writable:
            done([False] * len(blocks))
            return
        nbytes = sum(block.pages for block in blocks) * PAGE
        moves, replaced = [m.Move.of(block) for block in blocks], self._replaced(blocks)
        message = m.Write(self._writer.next_id(), moves, replaced=replaced)
        self._writing.update((block.name, True) for block in blocks)
        self._writes.begin(nbytes)

        def answered(reply: m.Moved | None) -> None:
            good = self._moved(reply, blocks, self._writes, nbytes)
            for i, block in enumerate(blocks):
                if not self._writing.pop(block.name, True):
                    good[i] = False
                    self._drop(*block.name)
                elif good[i]:
                    self._know(block.name)
            self._counts.write_failures += good.count(False)
            if reply is not None and not reply.writable:
                self._refuse(reply.error)
            elif any(good):
                self._pause = self._limits.pauses[0]
            done(good)

        self._writer.request(message, self._limits.write + self._writes.waiting / MIN_RATE, answered)

    def _replaced(self, blocks: Sequence[Block]) -> list[int]:
        """Indices of blocks whose stored copy is corrupt, and may not have been removed."""
        return []

    def discard(self, namespace_id: bytes, group: int, block_hash: bytes) -> None:
        name = namespace_id, group, block_hash
        self._counts.discarded_blocks += 1
        if name in self._writing:
            self._writing[name] = False  # dropped again when it is written
        self._drop(*name)
        self._remove(name)

    def clear(self, namespace_id: bytes | None) -> None:
        """Forget the remembered blocks, of all namespaces. What is stored stays, because other nodes share it."""
        self._known.clear()
        self.on_change()

    def counts(self) -> TierCounts:
        state, reason = self._state_and_reason()
        return replace(
            self._counts,
            state=state,
            reason=reason,
            blocks=len(self._known),
            read_blocks=self._reads.blocks,
            read_bytes=self._reads.nbytes,
            read_seconds=self._reads.busy_seconds(),
            written_blocks=self._writes.blocks,
            written_bytes=self._writes.nbytes,
            write_seconds=self._writes.busy_seconds(),
            timeouts=self._tier_process.timeouts,
            restarts=self._tier_process.restarts,
        )

    def _state_and_reason(self) -> tuple[str, str]:
        state = self._tier_process.state
        if state == READY and self._refused:
            return "read_only", self._refused
        return state, self._tier_process.reason if state == BACKOFF else self._note

    def stop(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        super().stop()

    # -- the tier process ---------------------------------------------------------------------------------------

    def process_message(self, message: m.ToServer) -> None:
        self._tier_process.back_off(f"unexpected message {type(message).__name__}")

    def process_up(self, opened: m.Opened) -> None:
        self._note = opened.note
        self._allow_writes()
        if not opened.writable:
            self._refuse(opened.note)
        self._drop_again()
        self.on_change()

    def process_down(self, reason: str) -> None:
        self.on_change()

    def _drop_again(self) -> None:
        """Drop what was to be dropped while the process was not ready."""
        undropped, self._undropped = self._undropped, {}
        for name in undropped:
            self._drop(*name)

    def _moved(self, reply: m.Moved | None, blocks: Sequence[Block], flow: "_Flow", nbytes: int) -> list[bool]:
        """Which blocks were moved. Backs off if none was, and the process reports that its store has failed."""
        good = [False] * len(blocks) if reply is None else list(reply.good)
        moved = [block.pages * PAGE for block, ok in zip(blocks, good, strict=True) if ok]
        flow.end(nbytes, len(moved), sum(moved))
        if reply is not None and reply.error and reply.writable and not moved:
            self._tier_process.back_off(reply.error)
        return good

    def _refuse(self, reason: str) -> None:
        """Stop writes for a while."""
        if self._refused:
            return
        self._refused = reason
        pause, self._pause = self._pause, min(self._limits.pause_factor * self._pause, self._limits.pauses[1])
        self._retry = self._reactor.call_later(pause, self._allow)
        self.on_change()

    def _allow(self) -> None:
        self._allow_writes()
        self.on_change()

    def _allow_writes(self) -> None:
        self._refused = ""
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _know(self, name: BlockName) -> None:
        """It is stored now."""
        before = self._known.pop(name, None)
        self._known[name] = self._clock()
        if before is None:
            self.on_moved(*name)
        if len(self._known) > MAX_REMEMBERED_BLOCKS:
            self._remove(next(iter(self._known)))
        if self._expiry is None and self._limits.kept < math.inf:
            self._expiry = self._reactor.call_later(self._limits.kept, self._expire)

    def _remove(self, name: BlockName) -> None:
        if self._known.pop(name, None) is not None:
            self.on_moved(*name)

    def _expire(self) -> None:
        """Forget what was neither written nor read for a long time, a few blocks at a time."""
        self._expiry = None
        for _ in range(min(EXPIRE_BLOCKS, len(self._known))):
            name, known = next(iter(self._known.items()))
            if self._clock() < known + self._limits.kept:
                left = max(EXPIRE_SECONDS, known + self._limits.kept - self._clock())
                self._expiry = self._reactor.call_later(left, self._expire)
                return
            self._remove(name)
        if self._known:
            self._expiry = self._reactor.call_later(0.0, self._expire)

    def _drop(self, namespace_id: bytes, group: int, block_hash: bytes) -> None:
        block = m.Move(namespace_id, group, block_hash, bytes(len(block_hash)), b"", 0, 0)
        sent = self._can_drop and self._writer.send(m.Drop(moves=[block]))
        if not sent and len(self._undropped) < MAX_REMEMBERED_BLOCKS:
            self._undropped[namespace_id, group, block_hash] = None


class _Flow:
    """Bytes in one direction: the number in flight, and their rate while any are."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self.waiting = self.blocks = self.nbytes = 0
        self._busy = self._counted = self._since = 0.0
        self._recent_bytes, self._recent_seconds = MEASURED_BYTES / 8, MEASURED_BYTES / 8 / FIRST_RATE

    def begin(self, nbytes: int) -> None:
        if not self.waiting:
            self._since = self._clock()
        self.waiting += nbytes

    def end(self, nbytes: int, blocks: int, moved: int) -> None:
        """A transfer of ``nbytes`` ended; ``blocks`` and ``moved`` bytes of it arrived."""
        self.waiting -= nbytes
        self.blocks += blocks
        self.nbytes += moved
        now = self._clock()
        self._busy += now - self._since
        self._since = now
        if moved:
            self._recent_bytes += moved
            self._recent_seconds += self._busy - self._counted
            if self._recent_bytes > MEASURED_BYTES:
                self._recent_bytes, self._recent_seconds = self._recent_bytes / 2, self._recent_seconds / 2
        self._counted = self._busy

    def busy_seconds(self) -> float:
        return self._busy + (self._clock() - self._since if self.waiting else 0.0)

    def seconds(self, nbytes: int) -> float:
        return (self.waiting + nbytes) * self._recent_seconds / self._recent_bytes
