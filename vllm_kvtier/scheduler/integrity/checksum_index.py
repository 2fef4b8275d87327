"""Which GPU blocks have a checksum in the workers' tables, and under which content key.

Kept by block id: the key (content) and the number of valid tokens that the checksum covers, and the step that computes
it, which may not have run yet. An entry ends when vLLM hands the block out anew.

While engines of this node share their caches (``publish``), whole blocks are also found by key, and changes are noted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_kvtier.jobs.transfer_jobs import ChecksumJob

_GROUP_SALT = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class ContentKeys:
    """Content keys: 64 bits of the chained block hash, mixed with the namespace, the adapter and the group."""

    def __init__(self, namespace_digest: int):
        self._salt = namespace_digest

    @property
    def compat_id(self) -> bytes:
        """8 bytes: engines with equal ones have equal keys for equal content."""
        return self._salt.to_bytes(8, "little")

    def key_mask(self, group: int, lora_fingerprint: bytes) -> bytes:
        """8 bytes: a block's key is the first 8 bytes of its hash XOR these."""
        return self._mask(group, lora_fingerprint).to_bytes(8, "little")

    def key(self, block_hash: bytes, group: int, lora_fingerprint: bytes) -> int:
        return int.from_bytes(block_hash[:8], "little") ^ self._mask(group, lora_fingerprint)

    def of(self, block_hashes: Sequence[bytes], group: int, lora_fingerprint: bytes) -> list[int]:
        """``key`` of each."""
        mask = self._mask(group, lora_fingerprint)
        return [int.from_bytes(block_hash[:8], "little") ^ mask for block_hash in block_hashes]

    def keys(self, hash_prefixes: np.ndarray, group: int, lora_fingerprint: bytes) -> np.ndarray:
        """``key`` of each, uint64 [n]. ``hash_prefixes``: uint64 [n], the first 8 bytes of each hash, little-endian."""
        keyed: np.ndarray = hash_prefixes ^ np.uint64(self._mask(group, lora_fingerprint))
        return keyed

    def _mask(self, group: int, lora_fingerprint: bytes) -> int:
        salt = self._salt ^ int.from_bytes(lora_fingerprint[:8].ljust(8, b"\0"), "little")
        return (salt ^ ((group + 1) * _GROUP_SALT)) & _MASK


@dataclass(slots=True)
class ChecksumEntry:
    """A block, and the content and number of tokens that its checksum covers."""

    group: int
    block: int
    key: int
    valid: int


class ChecksumIndex:
    def __init__(self, sizes: Sequence[int] = ()) -> None:
        """``sizes``: tokens of a whole block, by group."""
        self._sizes = tuple(sizes)
        self._made: dict[int, tuple[int, int, int, int]] = {}  # block id -> (key, valid, step, group)
        self.clears = 0  # calls of ``clear``
        self.published = False
        self._found: dict[int, int] = {}  # while published: key of a whole block -> block id
        self._others: dict[int, list[int]] = {}  # key -> other blocks with this content
        self._group = 0
        self._added: dict[int, None] = {}  # of that group, since changes were last taken
        self._gone: dict[int, None] = {}

    def has(self, entry: ChecksumEntry) -> bool:
        return self._made.get(entry.block, ())[:2] == (entry.key, entry.valid)

    def knows(self, block: int) -> bool:
        """Whether this block has a checksum, of whatever content."""
        return block in self._made

    def mark(self, entry: ChecksumEntry, step: int = -1) -> None:
        """``step`` makes it; -1: it is in the table already."""
        self._remove(entry.block)
        self._made[entry.block] = (entry.key, entry.valid, step, entry.group)
        if self.published:
            self._enter(entry.block, entry.key, entry.valid, entry.group)

    def ready_step(self, entries: list[ChecksumEntry]) -> int:
        """The step after which all of ``entries`` are in the table."""
        return max((self._made[e.block][2] for e in entries), default=-1)

    def last_step(self, blocks: list[int], valid: int) -> int | None:
        """The step after which all of ``blocks``, with ``valid`` tokens each, are in the table; None if one has no such
        checksum. -1 without blocks."""
        made = [self._made.get(block, (0, -1, -1, 0)) for block in blocks]
        return max([each[2] for each in made], default=-1) if all([each[1] == valid for each in made]) else None

    def remove(self, blocks: Iterable[int]) -> None:
        """These blocks get new content."""
        if self._made:
            for block in blocks:
                self._remove(block)

    def clear(self) -> None:
        self.clears += 1
        for block in list(self._made):
            self._remove(block)

    def take_missing(self, entries: list[ChecksumEntry], step: int) -> list[ChecksumEntry]:
        """Entries without a checksum; ``step`` is to compute them (the caller gives it the job)."""
        made = self._made.get
        missing = [e for e in entries if made(e.block, ())[:2] != (e.key, e.valid)]
        for entry in missing:
            self.mark(entry, step)
        return missing

    # -- for engines of this node ------------------------------------------------------------------------------------

    def publish(self, group: int) -> None:
        """From now on whole blocks are found by key, and ``take_changes`` returns the blocks of ``group``: those that
        are there, and each change."""
        self.conceal()
        self.published, self._group = True, group
        for block, (key, valid, _, of) in self._made.items():
            self._enter(block, key, valid, of)

    def conceal(self) -> None:
        """End ``publish``."""
        self.published, self._found, self._others, self._added, self._gone = False, {}, {}, {}, {}

    @property
    def changes(self) -> int:
        return len(self._added) + len(self._gone)

    def take_changes(self) -> tuple[list[int], list[int]]:
        """(new keys, removed keys) since the last call."""
        added, gone = list(self._added), list(self._gone)
        self._added, self._gone = {}, {}
        return added, gone

    def find(self, key: int) -> tuple[int, int] | None:
        """(block id, step that computes its checksum) of the whole block with this key; None also if not published."""
        block = self._found.get(key)
        return None if block is None else (block, self._made[block][2])

    def _enter(self, block: int, key: int, valid: int, group: int) -> None:
        if valid < self._sizes[group]:
            return
        if key in self._found:  # vLLM keeps the first longest
            self._others.setdefault(key, []).append(block)
            return
        if group == self._group:
            self._gone.pop(key, None)
            self._added[key] = None
        self._found[key] = block

    def _remove(self, block: int) -> None:
        entry = self._made.pop(block, None)
        if entry is None or not self.published:
            return
        key, _, _, group = entry
        others = self._others.get(key, [])
        if self._found.get(key) != block:
            if block in others:
                others.remove(block)
        elif others:
            self._found[key] = others.pop(0)
        else:
            del self._found[key]
            if group == self._group:
                self._added.pop(key, None)
                self._gone[key] = None  # in any case, because its addition may have been sent before
        if not others:
            self._others.pop(key, None)


def batches(entries: list[ChecksumEntry]) -> list[ChecksumJob]:
    """Entries as arrays, one batch a group."""
    out = []
    for group in sorted({e.group for e in entries}):
        of_group = [e for e in entries if e.group == group]
        out.append(
            ChecksumJob(
                group,
                np.array([e.block for e in of_group], np.int64),
                np.array([e.key for e in of_group], np.uint64),
                np.array([e.valid for e in of_group], np.int32),
            )
        )
    return out
