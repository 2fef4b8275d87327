"""The blocks of one engine, by tier: how much of a prompt's prefix it has where.

An entry's key is made of the hash of the block before it, as the engine sends it, and of the block's own tokens. So
the prefix of a prompt is found from its token ids, without the engine's hash seed, and events may come in any order: a
block is found as soon as those before it are there. A lost event costs a worse choice of an engine, nothing else.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from vllm_kvtier.proxy.kv_events.messages import BlockHash, Cleared, Removed, Stored, Tier
from vllm_kvtier.proxy.kv_events.prefix_walk import PrefixWalk, Walks
from vllm_kvtier.proxy.kv_events.shared_blocks import SHARED, SHARED_BITS, SharedBlocks

_TIER_BITS = len(Tier)
_GPU, _ANY = 1 << Tier.GPU, (1 << _TIER_BITS) - 1
_IN_MEMORY = _GPU | 1 << Tier.HOST
_MAX_ADAPTERS = 4096
BLOCK_BYTES = 640  # memory of a block's entry, also among the shared blocks; 230 without (measured, Python 3.11)


class PromptTokens:
    """A prompt's token ids, as ``BlockIndex`` looks them up; ``model``: perhaps an adapter's name."""

    def __init__(self, tokens: Sequence[int], salt: str, model: str = ""):
        self.tokens = tokens
        self.model = model
        self._salt = salt
        self._by_size: dict[int, list[int]] = {}

    def extra(self, with_adapter: bool) -> tuple[int, int]:
        """What beside its tokens the hash of the first block, and of each other block, depends on."""
        adapter = (self.model,) if with_adapter else ()
        return _hash_extra((*adapter, self._salt)), _hash_extra(adapter)

    def blocks(self, size: int) -> list[int]:
        """Digests of the tokens of each whole block."""
        if (found := self._by_size.get(size)) is None:
            found = self._by_size[size] = _digests(self.tokens, size)
        return found


class BlockIndex:
    """``capacity``: blocks. When it is full, a new block takes the place of the one that has been in neither GPU nor
    host memory for longest: tiers behind these may keep blocks for ever. If there is none, the new one is not entered.
    ``shared``: what all engines say of tiers that nodes share. ``dropped``: blocks that were left out, or made room."""

    def __init__(self, capacity: int, shared: SharedBlocks | None = None):
        self.capacity = capacity
        self._shared = shared if shared is not None else SharedBlocks()
        self._uses = 0  # bits of shared tiers in which this engine has had a block
        self.dropped = 0
        #: Whether the engine may have blocks that are not here: then what is not found is unknown, not absent.
        self.incomplete = False
        self.counts = [0] * _TIER_BITS  # by tier
        self._blocks: dict[int, int] = {}  # block's hash -> its key, and a bit for each tier
        self._hashes: dict[int, int] = {}  # key -> block's hash
        # Hashes of blocks in neither GPU nor host memory, oldest first. A dict would find its first item slowly when
        # many were taken.
        self._not_in_memory: OrderedDict[int, None] = OrderedDict()
        self._adapters: set[str] = set()
        self._block_size = 0
        self._group: int | None = None
        self._has_ghosts = False

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, events: Iterable[Stored | Removed | Cleared]) -> None:
        for event in events:
            if isinstance(event, Stored):
                self._store(event)
            elif isinstance(event, Removed):
                if event.group in (None, self._group):
                    self._remove(event.tier, map(_fold, event.hashes))
            else:
                self._remove(Tier.GPU, [h for h, value in self._blocks.items() if value & _GPU])

    def clear(self) -> None:
        """The engine has begun anew."""
        for value in self._blocks.values() if self._uses else ():
            for tier in SHARED:
                if value >> tier & 1:
                    self._shared.remove(value >> _TIER_BITS, tier)
        self._uses = 0
        self._blocks.clear()
        self._hashes.clear()
        self._not_in_memory.clear()
        self.counts = [0] * _TIER_BITS
        self._group, self._has_ghosts, self.incomplete = None, False, False

    def invalidate(self) -> None:
        """What the engine has is not known any more."""
        self.clear()
        self.incomplete = True

    def lost_events(self) -> None:
        """Some blocks may be gone; they are kept, as an engine that gets a request for one of them has it again. Others
        may be there."""
        self._has_ghosts, self.incomplete = bool(self._blocks), True

    def prefix(self, prompt: PromptTokens, walks: Walks | None = None) -> list[int]:
        """The tokens of the prompt that the engine would take from each tier: from the GPU as many as there are in one
        piece, from then on from the fastest other tier. ``walks``: for the indexes of all engines with the same shared
        blocks."""
        found = [0] * _TIER_BITS
        size = self._block_size
        if not size or not (digests := prompt.blocks(size)):
            return found
        walks = {} if walks is None else walks
        with_adapter = prompt.model in self._adapters
        begin = size, with_adapter, -1, 0
        if (walk := walks.get(begin)) is None:
            first, extra = prompt.extra(with_adapter)
            walk = walks[begin] = PrefixWalk(digests, extra, self._shared, hash((0, first, digests[0])))
        at, usable = 0, _ANY
        while walk is not None and at < len(walk.keys):
            block_hash = self._hashes.get(walk.keys[at], 0)
            tiers, end, is_own = self._blocks.get(block_hash, 0) & usable, at + 1, True
            if not tiers and self._uses:
                is_absent, is_own = not block_hash, False
                block_hash, tiers, shared_end = walk.shared_run(at)
                tiers &= self._uses
                if tiers and is_absent:
                    end = next((i for i in range(end, shared_end) if walk.keys[i] in self._hashes), shared_end)
            if not tiers:
                break
            if not tiers & _GPU:
                usable = _ANY & ~_GPU
            bit = tiers & -tiers
            if at == len(walk.hashes):
                walk.append(block_hash)
            elif walk.hashes[at] != block_hash:
                behind = size, with_adapter, at, block_hash
                if behind not in walks:
                    walks[behind] = walk.branch(at, block_hash)
                walk = walks[behind]
            elif is_own:
                end = self._run_end(walk, end, usable, bit)
            found[bit.bit_length() - 1] += size * (end - at)
            at = end
        return found

    def _run_end(self, walk: PrefixWalk, at: int, usable: int, bit: int) -> int:
        """The end of the run of the walk's blocks from ``at`` on whose fastest usable tier is that of ``bit``."""
        mask = usable & (2 * bit - 1)
        for i in range(at, len(walk.hashes)):
            block_hash = walk.hashes[i]
            if self._hashes.get(walk.keys[i]) != block_hash or self._blocks[block_hash] & mask != bit:
                return i
        return len(walk.hashes)

    def _store(self, event: Stored) -> None:
        if not self._is_followed(event):
            return
        if self._has_ghosts and len(self._blocks) + len(event.hashes) > self.capacity:
            # Blocks whose removal was lost must not fill the index for ever.
            self.invalidate()
            self._group = event.group
        if event.adapter is not None and len(self._adapters) < _MAX_ADAPTERS:
            self._adapters.add(event.adapter)
        bit = 1 << event.tier
        parent = 0 if event.parent is None else _fold(event.parent)
        for each, digest, extra in zip(
            event.hashes, _digests(event.tokens, event.block_size), event.extra, strict=True
        ):
            block_hash = _fold(each)
            value = self._blocks.get(block_hash)
            if value is None:
                if not self._make_room():
                    parent = block_hash
                    continue
                key = hash((parent, _hash_extra(extra), digest))
                value = key << _TIER_BITS
                self._hashes[key] = block_hash
            if not value & bit:
                self.counts[event.tier] += 1
                if bit & SHARED_BITS:
                    self._uses |= bit
                    self._shared.add(value >> _TIER_BITS, block_hash, event.tier)
            self._blocks[block_hash] = value = value | bit
            if value & _IN_MEMORY:
                self._not_in_memory.pop(block_hash, None)
            else:
                self._not_in_memory.setdefault(block_hash, None)
            parent = block_hash

    def _is_followed(self, event: Stored) -> bool:
        """Whether the blocks are entered. Of several groups that all prefixes need, the first stands for all."""
        if self._group is not None:
            if event.group > self._group:
                return False
            if event.group == self._group:
                if event.block_size == self._block_size:
                    return True
                if event.block_size < self._block_size:
                    if len(event.hashes) == 1:
                        return False  # vLLM's entry for the end of a prompt within a block
                    self.incomplete = True  # blocks of one group have one size: what the engine has is not clear
        # The first blocks of the engine, or what was entered were such ends of prompts.
        incomplete = self.incomplete
        self.clear()
        self._group, self._block_size, self.incomplete = event.group, event.block_size, incomplete
        return True

    def _make_room(self) -> bool:
        """Whether one more block may be entered."""
        while len(self._blocks) >= self.capacity:
            self.dropped += 1
            self.incomplete = True
            if not self._not_in_memory:
                return False
            oldest = next(iter(self._not_in_memory))
            value = self._blocks[oldest]
            for tier in Tier:
                if value >> tier & 1:
                    self._remove(tier, (oldest,))
        return True

    def _remove(self, tier: Tier, hashes: Iterable[int]) -> None:
        bit = 1 << tier
        for block_hash in hashes:
            value = self._blocks.get(block_hash, 0)
            if not value & bit:
                continue
            self.counts[tier] -= 1
            if bit & SHARED_BITS:
                self._shared.remove(value >> _TIER_BITS, tier)
            value ^= bit
            if value & _ANY:
                self._blocks[block_hash] = value
                if not value & _IN_MEMORY:
                    self._not_in_memory.setdefault(block_hash, None)
                continue
            del self._blocks[block_hash]
            self._not_in_memory.pop(block_hash, None)
            key = value >> _TIER_BITS
            if self._hashes.get(key) == block_hash:
                del self._hashes[key]


def _fold(block_hash: BlockHash) -> int:
    """64 bits of a block's hash; never 0, which stands for the beginning of a prompt."""
    if isinstance(block_hash, bytes):
        block_hash = int.from_bytes(block_hash[:8], "big")
    return block_hash & (1 << 64) - 1 or 1


def _digests(tokens: Sequence[int], size: int) -> list[int]:
    return [hash(tuple(tokens[i : i + size])) for i in range(0, len(tokens) - size + 1, size)]


def _hash_extra(extra: Any) -> int:
    """What a block's hash depends on beside its tokens: strings, numbers, bytes and lists of these."""
    return hash(_frozen(extra) or ())


def _frozen(extra: Any) -> Hashable:
    if isinstance(extra, list | tuple):
        return tuple(_frozen(each) for each in extra)
    return extra if isinstance(extra, Hashable) else repr(extra)
