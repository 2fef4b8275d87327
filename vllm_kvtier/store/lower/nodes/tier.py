"""Other nodes' stores as a tier of this one: asked for what follows, read from, never written to."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.base import Block, Find, Tier, TierCounts, Want
from vllm_kvtier.store.lower.durations import Durations
from vllm_kvtier.store.lower.mover import OPENING, READY, Mover
from vllm_kvtier.store.lower.nodes.lending import Lending
from vllm_kvtier.store.lower.nodes.options import NodeOptions
from vllm_kvtier.store.lower.nodes.wrong import WrongBlocks
from vllm_kvtier.store.lower.rate import Rate
from vllm_kvtier.store.messages import GroupShape
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.slots import PAGE

# The mover answers well before these, whatever its peers do and bring up; one that does not is not alive itself.
LOOK_SECONDS = 30.0
READ_SECONDS = 75.0
GUESS = 1e9, 0.005  # bytes a second and seconds a read, before anything was measured
FIRST_LATENCY = 0.005  # seconds of a find, likewise
WEIGHT = 0.2  # of the latest find


class NodesTier(Tier):
    """nodes, node_listen, cluster_key_file: as the options of these names. lending: what others are lent of the
    memory at ``pool_fd``; it belongs to this tier from now on. objects: digest of the object store below this store.

    Raises ConfigError, in words, for options that cannot be meant or would speak to others without a key.
    """

    name = "nodes"
    writable = False

    def __init__(
        self,
        nodes: str,
        node_listen: str,
        cluster_key_file: str,
        lending: Lending,
        pool_fd: int,
        pool_bytes: int,
        reactor: Reactor,
        *,
        objects: str = "",
        clock: Callable[[], float] = time.monotonic,
        make_mover: Callable[..., Mover] = Mover,
    ):
        # The mover does not run where we do.
        file = os.path.abspath(cluster_key_file) if cluster_key_file else ""
        options = {"nodes": nodes, "node_listen": node_listen, "cluster_key_file": file, "objects": objects}
        self._listed = bool(NodeOptions.parse(options).nodes)
        self._lending, self._clock = lending, clock
        self._counts = TierCounts(self.name)
        self._life = 0  # of the mover: what it named in another life means nothing
        self._wrong = WrongBlocks()
        self._looks: dict[int, tuple[Want, float]] = {}  # under way; since when, 0: that was learned from
        self._latency, self._reads = FIRST_LATENCY, Rate(*GUESS)
        self._mover = make_mover(self.name, options, pool_fd, pool_bytes, reactor, self._hear, self._up, self._down)

    @property
    def lent(self) -> int:
        return self._lending.lent_leases

    @property
    def durations(self) -> Mapping[str, Durations]:
        return self._mover.durations

    @property
    def usable(self) -> bool:
        return self._mover.state == READY

    # -- finding -------------------------------------------------------------------------------------------------

    def find(self, want: Want, done: Callable[[Find], None]) -> None:
        if not self.usable or not (self._listed or want.nodes):
            done(Find(want, want.start))
            return
        self._counts.finds += 1
        life = self._life
        groups = [GroupShape(shape.units, shape.size, shape.window) for shape in want.shapes]
        look = m.Look(
            self._mover.next_id(), want.space, want.unit_tokens, groups, want.chain, want.start, list(want.nodes)
        )

        def answered(reply: m.Located | None) -> None:
            if reply is not None:
                self._learn(look.id)
            self._looks.pop(look.id, None)
            if reply is None or not reply.token or not want.start < reply.units <= want.units:
                done(Find(want, want.start))
                return
            find = Find(want, self._good_units(want, reply.units), (life, reply.token))
            if find.units > want.start:
                self._counts.found_blocks += sum((find.units - want.start) // shape.units for shape in want.shapes)
            else:
                self.release(find)
            done(find)

        self._looks[look.id] = want, self._clock()
        self._mover.request(look, LOOK_SECONDS, answered)

    def _learn(self, look: int) -> None:
        """What it takes to be told something: what somebody's disk takes on top of it, he says himself."""
        _, began = self._looks[look]
        if began:
            self._latency += WEIGHT * (self._clock() - began - self._latency)

    def _coming(self, coming: m.Coming) -> None:
        want, _ = self._looks.get(coming.id, (None, 0.0))
        if want is not None:
            self._learn(coming.id)
            self._looks[coming.id] = want, 0.0
            self.on_coming(want, self._good_units(want, min(coming.units, want.units)), coming.seconds)

    def release(self, find: Find) -> None:
        life, token = find.token
        if life == self._life:
            self._mover.send(m.Release(token))

    def latency(self) -> float:
        return self._latency

    def _good_units(self, want: Want, units: int) -> int:
        return self._wrong.good_units(want.space, want.chain, want.shapes, want.start, units)

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, find: Find, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        life, token = find.token
        if life != self._life or not self.usable:
            self._counts.read_failures += len(blocks)
            done([False] * len(blocks))
            return
        moves = [m.Move(b.space, b.group, b.hash, b.parent, b.tenant, b.slot, b.pages) for b in blocks]
        nbytes = sum(block.pages for block in blocks) * PAGE
        begun = self._reads.begin(nbytes, self._clock())

        def answered(reply: m.Moved | None) -> None:
            good = reply.good if reply is not None else [False] * len(blocks)
            self._reads.end(begun, nbytes, self._clock(), all(good))
            counts = self._counts
            counts.read_blocks += sum(good)
            counts.read_bytes += sum(block.pages for block, ok in zip(blocks, good, strict=True) if ok) * PAGE
            counts.read_failures += len(good) - sum(good)
            done(good)
            if not self._reads.under_way:
                self.on_quiet()

        self._mover.request(m.Read(self._mover.next_id(), token, moves), READ_SECONDS, answered)

    def seconds(self, nbytes: int) -> float:
        return self._reads.seconds(nbytes)

    @property
    def reading(self) -> bool:
        return self._reads.under_way > 0

    def discard(self, space: bytes, group: int, block_hash: bytes) -> None:
        self._wrong.add(space, group, block_hash)
        self._counts.discarded_blocks += 1

    # -- what it is not ------------------------------------------------------------------------------------------

    def has(self, space: bytes, group: int, block_hash: bytes) -> bool:
        return False

    def write(self, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        done([False] * len(blocks))

    def clear(self, space: bytes | None) -> None:
        """What others hold is theirs."""

    # -- its process ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._mover.start()

    def stop(self) -> None:
        self._mover.stop()

    def counts(self) -> TierCounts:
        mover, lending = self._mover, self._lending
        return replace(
            self._counts,
            state={READY: "ready", OPENING: "opening"}.get(mover.state, "set aside"),
            reason=mover.reason,
            read_seconds=self._reads.busy_seconds(self._clock()),
            restarts=mover.restarts,
            timeouts=mover.timeouts,
            extra={
                "lent_blocks": lending.lent_blocks,
                "lent_leases": lending.lent_leases,
                "lent_brought_up": lending.brought_up,
                "leases_out": len(lending),
            },
        )

    def _hear(self, message: m.ToServer) -> None:
        if isinstance(message, m.Coming):
            self._coming(message)
        elif isinstance(message, m.Lend | m.Return | m.Left):
            self._lending.handle(message, self._mover.send)
        else:
            self._mover.set_aside(f"it sent {type(message).__name__}, which is not for a tier of nodes")

    def _up(self, opened: m.Opened) -> None:
        self._life += 1
        self.on_change()

    def _down(self, reason: str) -> None:
        self._life += 1
        self._lending.end()
        self.on_change()
