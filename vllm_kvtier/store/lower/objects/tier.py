"""The object store as a tier: blocks that any number of nodes and clusters share (``object_mover`` moves them).

Nobody can list what is there, and others come and go: what follows a chain is asked for each time, and what is known
to be there is only what went there or came from there, remembered as far as memory for it goes. When the store fails
altogether, the tier is set aside and opened again later; when only writing is refused, it is read only for a while.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.base import Block, Find, Tier, TierCounts, Want
from vllm_kvtier.store.lower.child import Child, spawn_mover
from vllm_kvtier.store.lower.durations import Durations
from vllm_kvtier.store.lower.mover import READY, SET_ASIDE, Mover
from vllm_kvtier.store.lower.objects.names import check_endpoint, parse_url
from vllm_kvtier.store.messages import GroupShape
from vllm_kvtier.wire.reactor import Reactor, Timer
from vllm_kvtier.wire.slots import PAGE

# Seconds, as object_mover's options name them; on top of its own deadlines, what the server gives it.
TIMEOUT, LOOK_SECONDS, READ_SECONDS = 5.0, 4.0, 20.0
SLACK = 30.0
SLOWEST = 2e6  # bytes/s; a mover that is slower than that with all it was given is set aside
REMEMBERED = 1 << 19  # blocks known to be there
REFUSED_SECONDS = 60.0, 960.0  # pause before a write is tried again where they are refused: the first, and the most
# What is expected before anything was measured: little, so that nobody waits for it in vain.
FIRST_RATE, FIRST_LATENCY = 200e6, 0.05  # bytes/s, seconds
MEASURED_BYTES = 512 << 20  # what was moved before the last so many counts half


class ObjectTier(Tier):
    """url: s3://bucket/prefix. endpoint, region, backend: as the options object_endpoint and so on say.

    pool_fd, pool_bytes: the pool's memfd. seconds: timeout, look_seconds, read_seconds for the mover.
    Raises ConfigError for a url or endpoint that is none.
    """

    name = "object"

    def __init__(
        self,
        url: str,
        endpoint: str,
        region: str,
        backend: str,
        pool_fd: int,
        pool_bytes: int,
        reactor: Reactor,
        *,
        spawn: Callable[..., Child] = spawn_mover,
        clock: Callable[[], float] = time.monotonic,
        **seconds: float,
    ):
        parse_url(url)
        check_endpoint(endpoint)
        waits = {"timeout": TIMEOUT, "look_seconds": LOOK_SECONDS, "read_seconds": READ_SECONDS, **seconds}
        options = {"url": url, "endpoint": endpoint, "region": region, "backend": backend, **waits}
        self._look_slack = waits["look_seconds"] + SLACK
        self._move_slack = waits["read_seconds"] + SLACK
        self._reactor, self._clock = reactor, clock
        self._mover = Mover(
            "object", options, pool_fd, pool_bytes, reactor, self._heard, self._up, self._down, spawn=spawn
        )
        self._counts = TierCounts(self.name)
        self._note, self._refused = "", ""  # of Opened; why writes are refused at present
        self._pause = REFUSED_SECONDS[0]
        self._retry: Timer | None = None
        # By a number made of the name: two of the same would cost one block that is not written.
        self._known: dict[int, None] = {}
        self._writing: dict[int, bool] = {}  # False: discarded meanwhile
        self._undropped: dict[tuple[bytes, int, bytes], None] = {}  # to be told when the mover is back
        self._reads, self._writes = _Flow(clock), _Flow(clock)
        self._latency = FIRST_LATENCY

    # -- Tier ---------------------------------------------------------------------------------------------------

    @property
    def durations(self) -> Mapping[str, Durations]:
        return self._mover.durations

    @property
    def usable(self) -> bool:
        return self._mover.state == READY

    @property
    def writable(self) -> bool:
        return self.usable and not self._refused

    def find(self, want: Want, done: Callable[[Find], None]) -> None:
        nothing = Find(want, want.start)
        if not self.usable or want.start >= want.units:
            done(nothing)
            return
        began = self._clock()
        self._counts.finds += 1
        groups = [GroupShape(shape.units, shape.size, shape.window) for shape in want.shapes]
        message = m.Look(self._mover.next_id(), want.space, want.unit_tokens, groups, want.chain, want.start)

        def answered(reply: m.Located | None) -> None:
            if reply is not None and not reply.error:
                align = math.lcm(*(shape.units for shape in want.shapes))
                if not want.start <= reply.units <= want.units or (reply.units - want.start) % align:
                    self._mover.set_aside(f"it found units {want.start} to {reply.units} of {want.units}")
                else:
                    self._latency += 0.2 * (self._clock() - began - self._latency)
                    self._counts.found_blocks += sum((reply.units - want.start) // s.units for s in want.shapes)
                    done(Find(want, reply.units, reply.token) if reply.units > want.start else nothing)
                    return
            elif reply is not None:
                self._mover.set_aside(reply.error)
            done(nothing)

        self._mover.request(message, self._look_slack, answered)

    def release(self, find: Find) -> None:
        """Nothing is held for anybody."""

    def read(self, find: Find, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        nbytes = sum(block.pages for block in blocks) * PAGE
        message = m.Read(self._mover.next_id(), find.token, _moves(blocks))
        self._reads.begin(nbytes)

        def answered(reply: m.Moved | None) -> None:
            good = self._settle(reply, blocks, self._reads, nbytes)
            for block, there in zip(blocks, good, strict=True):
                if there:
                    self._know(_number(block.space, block.group, block.hash))
                elif reply is not None:
                    self._known.pop(_number(block.space, block.group, block.hash), None)
                self.on_moved(block.space, block.group, block.hash)
            self._counts.read_failures += good.count(False)
            done(good)

        self._mover.request(message, self._move_slack + self._reads.waiting / SLOWEST, answered)

    def seconds(self, nbytes: int) -> float:
        return self._reads.seconds(nbytes)

    def latency(self) -> float:
        return self._latency

    def has(self, space: bytes, group: int, block_hash: bytes) -> bool:
        number = _number(space, group, block_hash)
        return number in self._known or self._writing.get(number, False)

    def keeps(self, space: bytes, group: int, block_hash: bytes) -> bool:
        """As far as is remembered; others may have removed it meanwhile, which is learned when it is read in vain."""
        return self.usable and _number(space, group, block_hash) in self._known

    def write(self, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        if not self.writable:
            done([False] * len(blocks))
            return
        numbers = [_number(block.space, block.group, block.hash) for block in blocks]
        nbytes = sum(block.pages for block in blocks) * PAGE
        message = m.Write(self._mover.next_id(), _moves(blocks))
        self._writing.update(dict.fromkeys(numbers, True))
        self._writes.begin(nbytes)

        def answered(reply: m.Moved | None) -> None:
            good = self._settle(reply, blocks, self._writes, nbytes)
            for i, (block, number) in enumerate(zip(blocks, numbers, strict=True)):
                if not self._writing.pop(number, True):
                    good[i] = False
                    self._drop(block.space, block.group, block.hash)
                elif good[i]:
                    self._know(number)
                    self.on_moved(block.space, block.group, block.hash)
            self._counts.write_failures += good.count(False)
            if reply is not None and not reply.writable:
                self._refuse(reply.error)
            elif any(good):
                self._pause = REFUSED_SECONDS[0]
            done(good)

        self._mover.request(message, self._move_slack + self._writes.waiting / SLOWEST, answered)

    def discard(self, space: bytes, group: int, block_hash: bytes) -> None:
        number = _number(space, group, block_hash)
        self._known.pop(number, None)
        self._counts.discarded_blocks += 1
        if number in self._writing:
            self._writing[number] = False  # and dropped when it is written
        self._drop(space, group, block_hash)
        self.on_moved(space, group, block_hash)

    def clear(self, space: bytes | None) -> None:
        """Others share the objects: only what we remember of them is forgotten, of all spaces."""
        self._known.clear()
        self.on_change()

    def counts(self) -> TierCounts:
        mover, state = self._mover, self._mover.state
        if state == READY and self._refused:
            state = "read only"
        return replace(
            self._counts,
            state=state,
            reason=self._refused if state == "read only" else mover.reason if state == SET_ASIDE else self._note,
            blocks=len(self._known),
            read_blocks=self._reads.blocks,
            read_bytes=self._reads.nbytes,
            read_seconds=self._reads.busy_seconds(),
            written_blocks=self._writes.blocks,
            written_bytes=self._writes.nbytes,
            write_seconds=self._writes.busy_seconds(),
            timeouts=mover.timeouts,
            restarts=mover.restarts,
        )

    def start(self) -> None:
        self._mover.start()

    def stop(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._mover.stop()

    # -- the mover ----------------------------------------------------------------------------------------------

    def _heard(self, message: m.ToServer) -> None:
        self._mover.set_aside(f"it said {type(message).__name__}, which nobody asked for")

    def _up(self, opened: m.Opened) -> None:
        self._note = opened.note
        self._allow_writes()
        if not opened.writable:
            self._refuse(opened.note)
        undropped, self._undropped = self._undropped, {}
        for name in undropped:
            self._drop(*name)
        self.on_change()

    def _down(self, reason: str) -> None:
        self.on_change()

    def _settle(self, reply: m.Moved | None, blocks: Sequence[Block], flow: "_Flow", nbytes: int) -> list[bool]:
        """Which of them were moved; sets the tier aside where nothing was, and the object store is at fault."""
        good = [False] * len(blocks) if reply is None else list(reply.good)
        moved = [block.pages * PAGE for block, ok in zip(blocks, good, strict=True) if ok]
        flow.end(nbytes, len(moved), sum(moved))
        if reply is not None and reply.error and reply.writable and not moved:
            self._mover.set_aside(reply.error)
        return good

    def _refuse(self, reason: str) -> None:
        """No writes for a while; then they are tried again."""
        if self._refused:
            return
        self._refused = reason
        pause, self._pause = self._pause, min(4 * self._pause, REFUSED_SECONDS[1])
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

    def _know(self, number: int) -> None:
        self._known.pop(number, None)
        self._known[number] = None
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]

    def _drop(self, space: bytes, group: int, block_hash: bytes) -> None:
        block = m.Move(space, group, block_hash, bytes(len(block_hash)), b"", 0, 0)
        if not self._mover.send(m.Drop(moves=[block])) and len(self._undropped) < REMEMBERED:
            self._undropped[space, group, block_hash] = None


class _Flow:
    """Bytes in one direction: how many are under way, and how fast they went while any were."""

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
        """Of ``nbytes`` that were under way so many blocks and bytes arrived."""
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


def _moves(blocks: Sequence[Block]) -> list[m.Move]:
    return [m.Move(b.space, b.group, b.hash, b.parent, b.tenant, b.slot, b.pages) for b in blocks]


def _number(space: bytes, group: int, block_hash: bytes) -> int:
    return hash((space, group, block_hash))
