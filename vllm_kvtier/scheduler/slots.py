"""How this engine's blocks lie in slots of a node store, its own node's or another's: which ranks' parts where, in
which codec, and the digest of all that they depend on beside their tokens. Engines with the same digest share blocks.
"""

import hashlib
import os
from dataclasses import dataclass, field

from vllm_kvtier.codecs import Codec, choice
from vllm_kvtier.codecs.parts import part_layout
from vllm_kvtier.store.messages import HASH, GroupShape
from vllm_kvtier.wire import messages as m
from vllm_kvtier.wire.slots import layout_digest, slot_layout

MAX_SPACES = 1024  # remembered: one an adapter


class Spaces:
    """Names of what this engine's blocks depend on beside their tokens. ``base``: what all of them have in common, b""
    while that is not known; it is set to a digest, and has behind it what the last ``renew`` adds. ``epoch``: offers of
    an earlier one are of another space."""

    def __init__(self) -> None:
        self.epoch = 0
        self._plan = self._renewed = b""
        self._spaces: dict[bytes, bytes] = {}

    @property
    def base(self) -> bytes:
        return self._plan and self._plan + self._renewed

    @base.setter
    def base(self, plan: bytes) -> None:
        self._plan = plan

    def of(self, variant: bytes) -> bytes:
        """``variant``: LoRA adapter fingerprint."""
        whole = self.base + variant
        space = self._spaces.get(whole)
        if space is None:
            if len(self._spaces) > MAX_SPACES:
                self._spaces.clear()
            space = self._spaces[whole] = hashlib.blake2b(whole, digest_size=HASH).digest()
        return space

    def renew(self) -> None:
        """What is stored so far is this engine's no longer (its weights may have changed in place): it goes on in
        spaces that nobody shares, also if that was before ``base`` is known. Other engines keep what they have."""
        self._renewed = os.urandom(16)
        self.epoch += 1


@dataclass
class SlotPlan:
    """Lists are by group, unless they say otherwise."""

    base: bytes  # digest of what all spaces of this engine have in common
    codecs: list[Codec]
    offsets: list[list[int]]  # by rank, then group: bytes from the slot's beginning
    writes: list[list[bool]]  # by rank, then group: whether this rank writes the part that it holds
    part_bytes: list[int] = field(default_factory=list)  # of the largest rank
    logical: list[int] = field(default_factory=list)  # bytes of KV that a slot stands for
    writers: list[set[int]] = field(default_factory=list)  # the ranks that write a part
    shapes: list[GroupShape] = field(default_factory=list)


def plan_slots(
    namespace: m.Namespace,
    described: dict[int, m.Described],
    codec: str | dict[str, str],
    groups: list[tuple[int, int | None]],
    unit: int,
    release: str,
) -> SlotPlan:
    """``described``: of all ranks. ``codec``: an option's value as ``choice.resolve`` returned it. ``groups``: (block
    tokens, window). ``unit``: tokens that a hash covers. ``release``: of vLLM; the next one may compute otherwise, and
    what is stored outlives engines. Raises ValueError for blocks that fit no slot."""
    ranks = [described[r] for r in sorted(described)]
    codecs = choice.by_group(codec, [rank.groups for rank in ranks])
    layouts = [[part_layout(*each) for each in zip(rank.groups, codecs, strict=True)] for rank in ranks]
    digest = hashlib.blake2b(m.encode(namespace) + release.encode(), digest_size=32)
    for rank, theirs in zip(ranks, layouts, strict=True):
        digest.update(layout_digest(rank.groups, theirs) + repr(rank.shards).encode())
    plan = SlotPlan(digest.digest(), codecs, [[] for _ in ranks], [[] for _ in ranks])
    for g, (size, window) in enumerate(groups):
        parts, logical = {}, {}
        for rank, theirs in zip(ranks, layouts, strict=True):
            parts.setdefault(rank.shards[g], (theirs[g].nbytes, rank.rank))
            logical.setdefault(rank.shards[g], rank.groups[g].block_bytes)
        layout = slot_layout([nbytes for nbytes, _ in parts.values()])
        at = dict(zip(parts, layout.part_offsets, strict=True))
        for n, rank in enumerate(ranks):
            plan.offsets[n].append(at[rank.shards[g]])
            plan.writes[n].append(parts[rank.shards[g]][1] == rank.rank)
        plan.part_bytes.append(max(nbytes for nbytes, _ in parts.values()))
        plan.logical.append(sum(logical.values()))
        plan.writers.append({rank for _, rank in parts.values()})
        plan.shapes.append(GroupShape(units=size // unit, slot_pages=layout.pages, window=window))
    return plan


def full_bytes(groups: list[tuple[int, int | None]], part_bytes: list[int], tokens: int) -> int:
    """What one rank loads for so many tokens, as far as they are in full attention."""
    sizes = zip(groups, part_bytes, strict=True)
    return sum(tokens // size * nbytes for (size, window), nbytes in sizes if window is None)


def offered_bytes(slots: list[list[int]], part_bytes: list[int], logical: list[int]) -> tuple[int, int]:
    """Of blocks offered by group, 0 where there is none: (what one rank loads of them, the KV that they stand for)."""
    blocks = [len(row) - row.count(0) for row in slots]
    return tuple(sum(n * count for n, count in zip(sizes, blocks, strict=True)) for sizes in (part_bytes, logical))
