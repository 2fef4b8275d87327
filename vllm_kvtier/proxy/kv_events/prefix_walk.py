"""The blocks of a prompt, as engines' indexes find one behind another: walked once for all engines.

The key of a block is made of the hash of the block before it, which engines with one hash seed have in common. So the
keys that the first engine was looked up with are those of the others, too, up to the first block for which they have
another hash; so is what the shared blocks have of them.
"""

from bisect import bisect_right

from vllm_kvtier.proxy.kv_events.shared_blocks import SharedBlocks

_OTHER = -1  # the shared blocks have another hash for it


class PrefixWalk:
    """``keys`` are known up to the first block without a known hash; ``hashes`` and ``keys`` count from the prompt's
    first block. ``digests``: of its blocks' tokens. ``extra``: what all keys but the first depend on, too."""

    def __init__(self, digests: list[int], extra: int, shared: SharedBlocks, key: int, begin: int = 0):
        """``key``: of block ``begin``; of those before it nothing is known."""
        self.hashes = [0] * begin
        self.keys = [*self.hashes, key]
        self._digests = digests
        self._extra = extra
        self._shared = shared
        self._looked_up = begin  # blocks before it are in runs of equal tiers:
        self._ends: list[int] = []
        self._tiers: list[int] = []

    def append(self, block_hash: int) -> None:
        self.hashes.append(block_hash)
        if (at := len(self.hashes)) < len(self._digests):
            self.keys.append(self._key_behind(block_hash, at))

    def branch(self, at: int, block_hash: int) -> "PrefixWalk | None":
        """The walk of an engine with another hash for block ``at``, behind that; None if it is the last."""
        at += 1
        if at == len(self._digests):
            return None
        return PrefixWalk(self._digests, self._extra, self._shared, self._key_behind(block_hash, at), at)

    def shared_run(self, at: int) -> tuple[int, int, int]:
        """As ``SharedBlocks.find`` for block ``at``, and the end of the run of blocks of this walk that are in the
        same tiers."""
        while self._looked_up < len(self.keys):
            block_hash, tiers = self._shared.find(self.keys[self._looked_up])
            if self._looked_up == len(self.hashes):
                if not tiers:
                    break
                self.append(block_hash)
            elif tiers and block_hash != self.hashes[self._looked_up]:
                tiers = _OTHER
            if self._tiers and self._tiers[-1] == tiers:
                self._ends.pop()
            else:
                self._tiers.append(tiers)
            self._looked_up += 1
            self._ends.append(self._looked_up)
        run = bisect_right(self._ends, at)
        if run == len(self._ends):
            return 0, 0, at
        if self._tiers[run] == _OTHER:
            return *self._shared.find(self.keys[at]), at + 1
        return self.hashes[at], self._tiers[run], self._ends[run]

    def _key_behind(self, block_hash: int, at: int) -> int:
        return hash((block_hash, self._extra, self._digests[at]))


#: Of one prompt at one moment: by block size, whether the adapter counts, and the block and its hash that a walk is
#: behind.
Walks = dict[tuple[int, bool, int, int], PrefixWalk | None]
