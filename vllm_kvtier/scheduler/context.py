"""Frozen objects that most parts of the scheduler side share, in place of a dozen constructor arguments.

``EngineContext``: the engine. ``LoadContext``: what loading KV needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from vllm_kvtier.cache_kinds import UNKNOWN_IN_FLIGHT, CacheGroup, InFlight

if TYPE_CHECKING:  # what reads one of these objects needs not import vLLM for the others
    from collections.abc import Callable

    from vllm_kvtier.config import KVTierConfig
    from vllm_kvtier.scheduler.engine_identity import EngineIdentity
    from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumIndex
    from vllm_kvtier.scheduler.integrity.sync_load import SyncLoad
    from vllm_kvtier.scheduler.leases.lease_client import LeaseClient
    from vllm_kvtier.scheduler.planner.load_planner import LoadPlanner
    from vllm_kvtier.scheduler.sources.base import LookupHit
    from vllm_kvtier.scheduler.sources.slot_layout import NamespaceIds
    from vllm_kvtier.telemetry.stats import Counters
    from vllm_kvtier.vllm_compat.engine_info import EngineInfo
    from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool
    from vllm_kvtier.wire.reactor import Reactor


@dataclass(frozen=True)
class BlockGeometry:
    """``hash_block_size``: tokens that a block hash covers. ``whole_blocks``: KV is complete only at multiples of
    ``alignment`` (see ``vllm_compat.layout.groups``). The kinds of ``groups`` get their ``recomputed`` here."""

    groups: list[CacheGroup]
    hash_block_size: int
    whole_blocks: bool = False
    draft_lookahead: int = 0  # see EngineInfo
    in_flight: InFlight = UNKNOWN_IN_FLIGHT

    def __post_init__(self) -> None:
        kinds = [replace(kind, recomputed=self.recomputed_tokens) for _, kind in self.groups]
        groups = [CacheGroup(size, kind) for (size, _), kind in zip(self.groups, kinds, strict=True)]
        object.__setattr__(self, "groups", groups)

    @cached_property
    def alignment(self) -> int:
        """Tokens in which prefixes match: every group's blocks end there."""
        return math.lcm(self.hash_block_size, *(size for size, _ in self.groups))

    @cached_property
    def recomputed_tokens(self) -> int:
        """The most tokens at a hit's end that ``usable_tokens`` leaves out. Before the rest a window begins earlier:
        stores, leases and exports of a prefix have those blocks, too."""
        ahead = self.draft_lookahead if self.by_position else 0
        return max(1, -(-ahead // self.alignment) * self.alignment if self.whole_blocks else ahead)

    def usable_tokens(self, tokens: int, prompt: int) -> int:
        """As ``CacheKind.usable_tokens``, for all groups. The last tokens are computed again if KV of draft layers may
        belong to another continuation, except behind a state, where none can be."""
        usable = min(group.kind.usable_tokens(tokens, prompt) for group in self.groups)
        certain = min(tokens, prompt) - self.draft_lookahead
        if min(usable, prompt - 1) > certain and self.by_position:
            usable = max(0, certain)
        return min(usable, prompt - 1) // self.alignment * self.alignment if self.whole_blocks else usable

    def lookup_tokens(self, prompt: int) -> int:
        """As ``CacheKind.lookup_tokens``, for all groups."""
        return min(group.kind.lookup_tokens(prompt) - self.whole_blocks for group in self.groups)

    def taken_blocks(self, tokens: int) -> int:
        """The most blocks that a request takes at once for ``tokens`` more tokens."""
        return sum([kind.taken_blocks(-(-tokens // size), size, self.in_flight) for size, kind in self.groups])

    def load_blocks(self, start: int, tokens: int) -> int:
        """Blocks that a load of ``tokens`` tokens fills from token ``start`` on, where blocks of all groups begin."""
        return sum(group.load_blocks(start, tokens) for group in self.groups)

    def least_blocks(self, tokens: int) -> int:
        """The fewest blocks that vLLM gives a request at once for a load up to ``tokens`` tokens, those that its prefix
        cache has included."""
        states = sum(not group.kind.by_position for group in self.groups)
        blocks = sum(group.num_blocks(tokens) - group.num_skipped_blocks(tokens) for group in self.groups)
        return blocks + states * self.in_flight.drafts

    def load_bytes(self, hit: LookupHit, start: int) -> int:
        """What one rank transfers of ``hit`` from token ``start`` on. Windows and states are needed in any case."""
        return hit.bytes_from(start) if all(group.kind.whole_prefix for group in self.groups) else hit.nbytes

    def goes_on_in_step(self, tokens: int, prompt: int) -> bool:
        """Whether the step that loads ``tokens`` tokens of a prompt can compute behind them. vLLM copies a state to the
        block that the step changes before loads begin; ``job_builder.state_copies`` repeats it. A state from within a
        block must stay in that block up to its end: vLLM has the block in its prefix cache by then."""
        return all(
            kind.by_position or tokens % size == 0 or prompt <= -(-tokens // size) * size for size, kind in self.groups
        )

    @cached_property
    def by_position(self) -> bool:
        return all(group.kind.by_position for group in self.groups)

    @cached_property
    def has_stretches(self) -> bool:
        """Whether a running prefill can be read in stretches: behind a window blocks are freed while it goes on."""
        return self.by_position and not self.whole_blocks and all(g.kind.whole_prefix for g in self.groups)


@dataclass(frozen=True)
class EngineContext:
    config: KVTierConfig
    info: EngineInfo
    geometry: BlockGeometry
    pool: BlockPool
    counters: Counters
    reactor: Reactor
    identity: EngineIdentity

    @property
    def states_within_blocks(self) -> bool:
        """Whether hashes are finer than the states' blocks, and vLLM saves states from within a step. It keeps a
        prompt's last state where its last hash ends then, mostly none behind a whole block. And under the hash of a
        whole block it may have the state that a request went on from, within that block."""
        sizes = [size for size, kind in self.geometry.groups if not kind.by_position]
        return self.info.states_within_steps and max(sizes, default=0) > self.geometry.hash_block_size


@dataclass(frozen=True)
class LoadContext:
    engine: EngineContext
    planner: LoadPlanner
    checksum_index: ChecksumIndex
    lease_client: LeaseClient
    sync_load: SyncLoad
    namespace_ids: NamespaceIds  # of this engine's blocks in stores
    retained_blocks: Callable[[], int]  # that exports hold only until a request needs them
    pinned_blocks: Callable[[], int]  # that any exports or leases hold
    draft_blocks: Callable[[], int]  # that vLLM wants free beside those of an asynchronous load

    def has_blocks(self, count: int) -> bool:
        """Whether a request can get ``count`` blocks."""
        free = self.engine.pool.free_count()
        return count <= free or count <= free + self.retained_blocks()

    def ever_has_blocks(self, tokens: int) -> bool:
        """Whether an asynchronous load up to ``tokens`` tokens fits into the cache when no other request is there."""
        blocks = self.engine.geometry.least_blocks(tokens) + self.draft_blocks()
        return blocks < self.engine.pool.num_blocks  # one is vLLM's null block

    def no_request_has_blocks(self) -> bool:
        """Whether all blocks are free, or held by exports and leases alone."""
        return self.engine.pool.is_unused(self.pinned_blocks())
