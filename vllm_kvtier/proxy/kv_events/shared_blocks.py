"""Blocks in tiers that nodes share: an engine that uses such a tier can load what any engine's events say is there.

The keys are those of ``BlockIndex``, so engines find each other's blocks if they have one hash seed, as such tiers
need in any case.
"""

from vllm_kvtier.proxy.kv_events.messages import Tier

SHARED = Tier.CLUSTER, Tier.OBJECTS
SHARED_BITS = sum(1 << tier for tier in SHARED)


class SharedBlocks:
    """Each engine's index adds and removes a block of a tier once."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[int]] = {}  # key -> the block's hash, and engines by tier of SHARED

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, key: int, block_hash: int, tier: Tier) -> None:
        if (entry := self._blocks.get(key)) is None:
            entry = self._blocks[key] = [block_hash, *(0 for _ in SHARED)]
        entry[1 + SHARED.index(tier)] += 1

    def remove(self, key: int, tier: Tier) -> None:
        entry = self._blocks[key]
        entry[1 + SHARED.index(tier)] -= 1
        if not any(entry[1:]):
            del self._blocks[key]

    def find(self, key: int) -> tuple[int, int]:
        """(the block's hash, a bit for each tier that has it); the latter 0: none."""
        entry = self._blocks.get(key)
        if entry is None:
            return 0, 0
        return entry[0], sum(1 << tier for tier, engines in zip(SHARED, entry[1:], strict=True) if engines)
