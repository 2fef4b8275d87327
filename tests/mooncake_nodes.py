"""Nodes with a Mooncake tier, for tests."""

from collections.abc import Sequence

from object_nodes import BLOCKS, TierNode, blocks_of
from support import eventually

from vllm_kvtier.store.index.types import HASH_BYTES
from vllm_kvtier.store.tiers.mooncake.tier import MooncakeTier
from vllm_kvtier.wire.slots import PAGE


class MooncakeNode(TierNode):
    """``segment`` and other options without ``mooncake_``."""

    def __init__(self, master: str, before: Sequence[str] = (), segment: str = "64MiB", **options):
        given = {"master": master, "trusted_network": True, "segment": segment, "replicas": 2, "host": ""}
        given |= {"protocol": "tcp", "devices": "", **options}
        super().__init__(
            lambda context: MooncakeTier(context, {f"mooncake_{name}": value for name, value in given.items()}), before
        )

    def ready(self) -> "MooncakeNode":
        eventually(lambda: self.tier.usable and self.tier.writable, 30, "both processes of the tier are usable")
        return self

    def clear_slots(self) -> None:
        """So that what is right after a read was read by it."""
        for block in blocks_of(bytes(BLOCKS * HASH_BYTES), half=1):
            self.pool[block.slot * PAGE : (block.slot + block.pages) * PAGE] = bytes(block.pages * PAGE)

    def reader(self) -> int:
        """Pid."""
        return self.latest["mooncake"]

    def segment(self) -> int:
        return self.latest["mooncake_segment"]
