"""Other nodes' stores as a tier of this one: asked for what follows, read from, never written to."""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm_kvtier.store.lower import moving as m
from vllm_kvtier.store.lower.base import Block, Find, Tier, TierCounts, Want
from vllm_kvtier.store.lower.mover import OPENING, READY, Mover
from vllm_kvtier.store.lower.nodes.lending import Lending
from vllm_kvtier.store.lower.nodes.options import NodeOptions
from vllm_kvtier.store.lower.rate import Rate
from vllm_kvtier.store.messages import GroupShape
from vllm_kvtier.store.records import HASH
from vllm_kvtier.wire.reactor import Reactor
from vllm_kvtier.wire.slots import PAGE

# The mover answers well before these, whatever its peers do; one that does not is not alive itself.
LOOK_SECONDS = 10.0
READ_SECONDS = 75.0
GUESS = 1e9, 0.005  # bytes a second and seconds a read, before anything was measured
FIRST_LATENCY = 0.005  # seconds of a find, likewise
WEIGHT = 0.2  # of the latest find
MAX_BAD = 4096  # blocks remembered to have come with a wrong checksum


class NodesTier(Tier):
    """nodes, node_listen, cluster_key_file: as the options of these names. lending: what others are lent of the
    memory at ``pool_fd``; it belongs to this tier from now on.

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
        clock: Callable[[], float] = time.monotonic,
        make_mover: Callable[..., Mover] = Mover,
    ):
        # The mover does not run where we do.
        file = os.path.abspath(cluster_key_file) if cluster_key_file else ""
        options = {"nodes": nodes, "node_listen": node_listen, "cluster_key_file": file}
        self._listed = bool(NodeOptions.parse(options).nodes)
        self._lending, self._clock = lending, clock
        self._counts = TierCounts(self.name)
        self._life = 0  # of the mover: what it named in another life means nothing
        self._bad: dict[tuple[bytes, int, bytes], None] = {}  # oldest first
        self._latency, self._reads = FIRST_LATENCY, Rate(*GUESS)
        self._mover = make_mover(self.name, options, pool_fd, pool_bytes, reactor, self._hear, self._up, self._down)

    @property
    def lent(self) -> int:
        return self._lending.lent_leases

    @property
    def usable(self) -> bool:
        return self._mover.state == READY

    # -- finding -------------------------------------------------------------------------------------------------

    def find(self, want: Want, done: Callable[[Find], None]) -> None:
        if not self.usable or not (self._listed or want.nodes):
            done(Find(want, want.start))
            return
        self._counts.finds += 1
        began, life = self._clock(), self._life
        groups = [GroupShape(shape.units, shape.size, shape.window) for shape in want.shapes]
        look = m.Look(
            self._mover.next_id(), want.space, want.unit_tokens, groups, want.chain, want.start, list(want.nodes)
        )

        def answered(reply: m.Located | None) -> None:
            if reply is not None:
                self._latency += WEIGHT * (self._clock() - began - self._latency)
            if reply is None or not reply.token or not want.start < reply.units <= want.units:
                done(Find(want, want.start))
                return
            find = Find(want, self._good_units(want, reply.units), (life, reply.token))
            if find.units > want.start:
                self._counts.found_blocks += sum((find.units - want.start) // shape.units for shape in want.shapes)
            else:
                self.release(find)
            done(find)

        self._mover.request(look, LOOK_SECONDS, answered)

    def release(self, find: Find) -> None:
        life, token = find.token
        if life == self._life:
            self._mover.send(m.Release(token))

    def latency(self) -> float:
        return self._latency

    def _good_units(self, want: Want, units: int) -> int:
        """As far as nothing came with a wrong checksum before."""
        if not self._bad:
            return units
        align = math.lcm(*(shape.units for shape in want.shapes))
        for group, shape in enumerate(want.shapes):
            for end in range(want.start + shape.units, units + 1, shape.units):
                if (want.space, group, want.chain[(end - 1) * HASH : end * HASH]) in self._bad:
                    units = max(want.start, (end - shape.units) // align * align)
                    break
        return units

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
        """Not found here again for as long as it is remembered; it may be right in some store, and wrong in another."""
        self._bad[space, group, block_hash] = None
        self._counts.discarded_blocks += 1
        if len(self._bad) > MAX_BAD:
            del self._bad[next(iter(self._bad))]

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
                "leases_out": len(lending),
            },
        )

    def _hear(self, message: m.ToServer) -> None:
        if not isinstance(message, m.Lend | m.Return | m.Left):
            self._mover.set_aside(f"it sent {type(message).__name__}, which is not for a tier of nodes")
            return
        answer = self._lending.handle(message)
        if answer is not None:
            self._mover.send(answer)

    def _up(self, opened: m.Opened) -> None:
        self._life += 1
        self.on_change()

    def _down(self, reason: str) -> None:
        self._life += 1
        self._lending.end()
        self.on_change()
