"""How this engine's blocks lie in slots of the node store: which ranks' parts where, in which codec, and the digest of
all that they depend on beside their tokens. Engines with the same digest share blocks.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_kvtier.cache_kinds import CacheGroup
from vllm_kvtier.codecs import Codec, choice
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.store.protocol import HASH_BYTES, GroupShape
from vllm_kvtier.wire import link as lm
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.slots import layout_digest, slot_layout

MAX_NAMESPACE_IDS = 1024  # remembered: one an adapter


class NamespaceIds:
    """Names of what this engine's blocks depend on beside their tokens, by LoRA fingerprint.

    ``base``: what all of them have in common, b"" while that is not known. It is set to a digest; the last ``renew``
    adds to it. ``epoch``: hits of an earlier one are of another namespace.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._plan = self._renewed = b""
        self._namespace_ids: dict[bytes, bytes] = {}

    @property
    def base(self) -> bytes:
        return self._plan and self._plan + self._renewed

    @base.setter
    def base(self, plan: bytes) -> None:
        self._plan = plan

    def of(self, lora_fingerprint: bytes) -> bytes:
        whole = (self._plan and self._plan + self._renewed) + lora_fingerprint
        namespace_id = self._namespace_ids.get(whole)
        if namespace_id is None:
            if len(self._namespace_ids) > MAX_NAMESPACE_IDS:
                self._namespace_ids.clear()
            namespace_id = self._namespace_ids[whole] = hashlib.blake2b(whole, digest_size=HASH_BYTES).digest()
        return namespace_id

    def renew(self) -> None:
        """What is stored so far is this engine's no longer (its weights may have changed in place): it goes on in
        namespaces that no other engine shares, also if that was before ``base`` is known. Other engines keep what they
        have."""
        self._renewed = os.urandom(16)
        self.epoch += 1


@dataclass
class SlotPlan:
    """Lists are by group, unless they say otherwise."""

    base: bytes  # digest of what all namespaces of this engine have in common
    codecs: list[Codec]
    offsets: list[list[int]]  # by rank, then group: bytes from the slot's beginning
    writes: list[list[bool]]  # by rank, then group: whether this rank writes the part that it holds
    part_bytes: list[int] = field(default_factory=list)  # of the largest rank
    logical: list[int] = field(default_factory=list)  # bytes of KV that a slot stands for
    writers: list[set[int]] = field(default_factory=list)  # the ranks that write a part
    nodes: list[int] = field(default_factory=list)  # by rank: whose store has its part, the first rank's is 0
    node_shapes: list[list[GroupShape]] = field(default_factory=list)  # by node, then group

    @property
    def shapes(self) -> list[GroupShape]:
        """On the first rank's node."""
        return self.node_shapes[0]

    def full_bytes(self, groups: Sequence[CacheGroup], tokens: int) -> int:
        """Bytes that one rank loads for so many tokens in groups with ``whole_prefix``."""
        sizes = zip(groups, self.part_bytes, strict=True)
        return sum(tokens // size * nbytes for (size, kind), nbytes in sizes if kind.whole_prefix)

    def hit_bytes(self, slots: list[list[int]]) -> tuple[int, int]:
        """(bytes that one rank loads, bytes of KV that these become) of slots by group, 0 where there is none."""
        blocks = [len(row) - row.count(0) for row in slots]
        nbytes, logical = (
            sum(n * count for n, count in zip(sizes, blocks, strict=True)) for sizes in (self.part_bytes, self.logical)
        )
        return nbytes, logical


def plan_slots(
    namespace: m.Namespace,
    described: dict[int, lm.Described],
    codec: str | Mapping[str, str],
    groups: Sequence[CacheGroup],
    hash_block_size: int,
    release: str,
) -> SlotPlan:
    """``described``: of all ranks. ``codec``: an option's value as ``choice.resolve`` returned it. ``hash_block_size``:
    tokens that a hash covers. ``release``: of vLLM; the next one may compute otherwise, and what is stored outlives
    engines. The ranks of each node have slots of their own, in its store. Raises ValueError for blocks that fit no
    slot."""
    ranks = [described[r] for r in sorted(described)]
    codecs = choice.by_group(codec, [rank.groups for rank in ranks])
    layouts = [[part_layout(*each) for each in zip(rank.groups, codecs, strict=True)] for rank in ranks]
    digest = hashlib.blake2b(m.encode(namespace) + release.encode(), digest_size=32)
    for rank, theirs in zip(ranks, layouts, strict=True):
        digest.update(layout_digest(rank.groups, theirs) + repr(rank.shards).encode())
    if widened := [group.stored_window for group in groups if group.stored_window != group.kind.window]:
        digest.update(repr(widened).encode())  # a namespace's groups have one shape, whatever version stored there
    homes = list(dict.fromkeys(rank.node for rank in ranks))
    plan = SlotPlan(digest.digest(), codecs, [[] for _ in ranks], [[] for _ in ranks])
    plan.nodes = [homes.index(rank.node) for rank in ranks]
    plan.node_shapes = [[] for _ in homes]
    for g, group in enumerate(groups):
        # node -> shards -> (bytes, the rank that writes them)
        nodes: list[dict[Any, tuple[int, int]]] = [{} for _ in homes]
        logical: dict[Any, int] = {}
        for rank, theirs, node in zip(ranks, layouts, plan.nodes, strict=True):
            nodes[node].setdefault(rank.shards[g], (theirs[g].nbytes, rank.rank))
            logical.setdefault(rank.shards[g], rank.groups[g].block_bytes)
        for parts, shapes in zip(nodes, plan.node_shapes, strict=True):
            layout = slot_layout([nbytes for nbytes, _ in parts.values()])
            at = dict(zip(parts, layout.part_offsets, strict=True))
            for n, rank in enumerate(ranks):
                if nodes[plan.nodes[n]] is parts:
                    plan.offsets[n].append(at[rank.shards[g]])
                    plan.writes[n].append(parts[rank.shards[g]][1] == rank.rank)
            shapes.append(
                GroupShape(
                    group.block_tokens // hash_block_size, layout.pages, group.stored_window, group.kind.stored_as
                )
            )
        plan.part_bytes.append(max(nbytes for parts in nodes for nbytes, _ in parts.values()))
        plan.logical.append(sum(logical.values()))
        plan.writers.append({rank for parts in nodes for _, rank in parts.values()})
    return plan
