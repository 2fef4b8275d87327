"""Mooncake Store as a secondary tier, shared by the nodes of a cluster.

Two processes: one reads, and is replaced when a read fails; the other holds this node's memory of the cluster, and
writes. Each reports whether the master answers. A block that this node reads for the second time, or uses again a
minute after it has read it, gets another copy here: of a prefix there are as many as nodes that ask for it often.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

from vllm_kvtier.remote_store.bad_blocks import BadBlocks
from vllm_kvtier.store.index.types import HASH_BYTES
from vllm_kvtier.store.tiers.base import Block, Find, TierCounts, Want
from vllm_kvtier.store.tiers.content_tier import ContentTier, Limits
from vllm_kvtier.store.tiers.mooncake.options import MooncakeOptions
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.tier_process import OPEN_SECONDS, READY, STOPPED, TierContext, TierProcess

# The processes end their calls themselves: lookups after 1 s, reads after 3 s; a write may hang for 60 s. One that does
# not answer in these times has stopped. ``known``: the master evicts what it likes, so a block is soon written again.
# ``kept``: nothing but a lookup tells that a block was evicted, and each lookup would make it last longer.
LIMITS = Limits(look=5.0, read=10.0, write=90.0, pauses=(1.0, 64.0), pause_factor=2.0, known=60.0, kept=1800.0)
READER_BACKOFF = 0.1, 10.0  # a new reader is ready in 0.2 s
REPLICATE_READS = 2  # reads of a block by this node, or uses of what it has read, after which it gets a copy here
MAX_COUNTED_READS = 1 << 18  # blocks


class MooncakeTier(ContentTier):
    """options: those of MooncakeOptions. Raises ConfigError for invalid ones."""

    name = "mooncake"

    def __init__(self, context: TierContext, options: m.Options):
        parsed = MooncakeOptions.parse(options)
        self._replicas, self._gives_memory = parsed.replicas, bool(parsed.segment_bytes)
        self.pins_pool = parsed.protocol == "rdma"
        self._reader_state = self._segment_state = m.Availability(False, "not connected to the master yet")
        self._bad_blocks = BadBlocks()
        self._avoided: dict[str, float] = {}  # place -> until when
        # By hash of the name; the last read is last. A dict would find its first item slowly when many were taken.
        self._read_counts: OrderedDict[int, int] = OrderedDict()
        self._replicated = 0
        super().__init__(context, options, LIMITS, READER_BACKOFF)
        self._counts.capacity_bytes = parsed.segment_bytes
        self._segment = context.make_process(f"{self.name}_segment", options, context, _SegmentUser(self), OPEN_SECONDS)

    @property
    def _writer(self) -> TierProcess:
        return self._segment

    @property
    def _can_drop(self) -> bool:
        return self._segment_state.usable

    @property
    def usable(self) -> bool:
        return super().usable and self._reader_state.usable

    @property
    def writable(self) -> bool:
        return self._segment.state == READY and self._segment_state.usable and not self._refused

    def start(self) -> None:
        super().start()
        self._segment.start()

    def stop(self) -> None:
        super().stop()
        self._segment.stop()

    def read(self, find: Find, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        def over(good: list[bool]) -> None:
            self._count_reads([block for block, ok in zip(blocks, good, strict=True) if ok])
            done(good)

        super().read(find, blocks, over)

    def write(self, blocks: Sequence[Block], done: Callable[[list[bool]], None]) -> None:
        def over(good: list[bool]) -> None:
            for block, ok in zip(blocks, good, strict=True):
                if ok:
                    self._bad_blocks.remove(block.name)
            # What was read from the cluster is there already: it is written again because it was used.
            read = [hash(block.name) in self._read_counts for block in blocks]
            self._count_reads([block for block, *both in zip(blocks, good, read, strict=True) if all(both)])
            done(good)

        super().write(blocks, over)

    def _replaced(self, blocks: Sequence[Block]) -> list[int]:
        return [i for i, block in enumerate(blocks) if block.name in self._bad_blocks]

    def discard(self, namespace_id: bytes, group: int, block_hash: bytes) -> None:
        self._bad_blocks.add(namespace_id, group, block_hash)  # its removal may fail
        super().discard(namespace_id, group, block_hash)

    def counts(self) -> TierCounts:
        counts = super().counts()
        counts.timeouts += self._segment.timeouts
        counts.restarts += self._segment.restarts
        counts.extra = {
            "replicated_blocks": self._replicated,
            "avoided_places": sum(self._clock() < until for until in self._avoided.values()),
            "segment_up": float(self._segment.state == READY and self._segment_state.usable),
            "segment_restarts": self._segment.restarts,
        }
        return counts

    # -- inside -------------------------------------------------------------------------------------------------

    def _good_hash_blocks(self, want: Want, num_hash_blocks: int) -> int:
        # One of the blocks that end next is not stored, or its place does not answer. If the master does not answer,
        # the reader reports that before, and nothing is known.
        align = math.lcm(*(shape.hash_blocks_per_block for shape in want.shapes))
        for group, shape in enumerate(want.shapes if self._reader_state.usable else ()):
            step = shape.hash_blocks_per_block
            for end in range(num_hash_blocks + step, min(num_hash_blocks + align, want.num_hash_blocks) + 1, step):
                self._remove((want.namespace_id, group, want.block_hashes[(end - 1) * HASH_BYTES : end * HASH_BYTES]))
        return self._bad_blocks.good_hash_blocks(
            want.namespace_id, want.block_hashes, want.shapes, want.start, num_hash_blocks
        )

    def _state_and_reason(self) -> tuple[str, str]:
        state = self._tier_process.state
        if state != READY:
            return state, self._tier_process.reason
        if not self._reader_state.usable:
            return "unavailable", self._reader_state.reason
        if self._refused:
            return "read_only", self._refused
        if self._segment.state != READY:
            return "read_only", self._segment.reason
        return ("ready", "") if self._segment_state.usable else ("read_only", self._segment_state.reason)

    def _count_reads(self, blocks: Sequence[Block]) -> None:
        """Ask for another copy of what is used often."""
        often = []
        for block in blocks:
            number = hash(block.name)
            count = self._read_counts.pop(number, 0) + 1
            self._read_counts[number] = count
            if count == REPLICATE_READS:
                often.append(m.Move.of(block))
            if len(self._read_counts) > MAX_COUNTED_READS:
                self._read_counts.popitem(last=False)
        if often and self._replicas > 1 and self._gives_memory and self._segment.send(m.Replicate(often)):
            self._replicated += len(often)

    # -- the processes ------------------------------------------------------------------------------------------

    def process_message(self, message: m.ToServer) -> None:
        if isinstance(message, m.Availability):
            self._reader_state = message
            if not message.usable and not message.late:
                self._known.clear()  # a master that restarts has forgotten all
            self.on_change()
        elif isinstance(message, m.Avoid):
            self._avoided[message.place] = self._clock() + message.seconds
        else:
            super().process_message(message)

    def process_up(self, opened: m.Opened) -> None:
        now = self._clock()
        self._avoided = {place: until for place, until in self._avoided.items() if now < until}
        for place, until in self._avoided.items():
            self._tier_process.send(m.Avoid(place, until - now))
        self.on_change()

    def process_down(self, reason: str) -> None:
        self._reader_state = m.Availability(False, reason)
        super().process_down(reason)

    def segment_message(self, message: m.ToServer) -> None:
        if isinstance(message, m.Availability):
            self._segment_state = message
            if message.usable:
                self._drop_again()
            self.on_change()
        else:
            self._segment.back_off(f"unexpected message {type(message).__name__}")

    def segment_down(self, reason: str) -> None:
        self._segment_state = m.Availability(False, reason)
        if self._segment.state != STOPPED:
            self.on_change()


class _SegmentUser:
    """The segment's ``TierProcessUser``."""

    def __init__(self, tier: MooncakeTier):
        self._tier = tier

    def process_message(self, message: m.ToServer) -> None:
        self._tier.segment_message(message)

    def process_up(self, opened: m.Opened) -> None:
        """It is usable when it says that the master answers."""

    def process_down(self, reason: str) -> None:
        self._tier.segment_down(reason)
