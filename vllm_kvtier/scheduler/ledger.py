"""Which GPU blocks have a checksum in the workers' tables, and under which content key.

Three facts are kept per block id: the key (content) and number of valid tokens its table entry was made with, and
the step that made it, because a block shared with an earlier request may be ordered but not made yet.
An entry dies when vLLM hands the block out anew.

While other engines may want to know (``publish``), whole blocks are also found by key, and changes are noted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_kvtier.worker.work import SumBatch

_GROUP_SALT = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Keys:
    """Content keys: 64 bits of the chained block hash, mixed with the namespace, the adapter and the group."""

    def __init__(self, namespace_digest: int):
        self._salt = namespace_digest

    @property
    def family(self) -> bytes:
        """8 bytes: engines with the same ones have the same keys for the same content."""
        return self._salt.to_bytes(8, "little")

    def mix(self, group: int, variant: bytes) -> bytes:
        """8 bytes: a block's key is the beginning of its hash, exclusive or this."""
        return self._mix(group, variant).to_bytes(8, "little")

    def key(self, block_hash: bytes, group: int, variant: bytes) -> int:
        return int.from_bytes(block_hash[:8], "little") ^ self._mix(group, variant)

    def of(self, block_hashes: Sequence[bytes], group: int, variant: bytes) -> list[int]:
        """``key`` of each."""
        mix = self._mix(group, variant)
        return [int.from_bytes(block_hash[:8], "little") ^ mix for block_hash in block_hashes]

    def keys(self, heads: np.ndarray, group: int, variant: bytes) -> np.ndarray:
        """The same of many: ``heads`` uint64 [n], the first 8 bytes of each hash, little-endian."""
        return heads ^ np.uint64(self._mix(group, variant))

    def _mix(self, group: int, variant: bytes) -> int:
        salt = self._salt ^ int.from_bytes(variant[:8].ljust(8, b"\0"), "little")
        return (salt ^ ((group + 1) * _GROUP_SALT)) & _MASK


@dataclass
class Entry:
    """One block to be summed."""

    group: int
    block: int
    key: int
    valid: int


class Ledger:
    def __init__(self, sizes: Sequence[int] = ()) -> None:
        """``sizes``: tokens of a whole block, by group."""
        self._sizes = tuple(sizes)
        self._made: dict[int, tuple[int, int, int, int]] = {}  # block id -> (key, valid, step, group)
        self._found: dict[int, int] | None = None  # key of a whole block -> block id
        self._others: dict[int, list[int]] = {}  # key -> blocks that have the same
        self._group = 0
        self._added: dict[int, None] = {}  # of that group, since changes were last taken
        self._gone: dict[int, None] = {}

    def has(self, entry: Entry) -> bool:
        return self._made.get(entry.block, ())[:2] == (entry.key, entry.valid)

    def knows(self, block: int) -> bool:
        """Whether this block has a checksum, of whatever content."""
        return block in self._made

    def mark(self, entry: Entry, step: int = -1) -> None:
        """``step`` makes it; -1: it is in the table already."""
        self._remove(entry.block)
        self._made[entry.block] = (entry.key, entry.valid, step, entry.group)
        if self._found is not None:
            self._enter(entry.block, entry.key, entry.valid, entry.group)

    def ready_step(self, entries: list[Entry]) -> int:
        """The step after which all of ``entries`` are in the table."""
        return max((self._made[e.block][2] for e in entries), default=-1)

    def forget(self, blocks: Iterable[int]) -> None:
        """These blocks get new content."""
        if self._made:
            for block in blocks:
                self._remove(block)

    def clear(self) -> None:
        for block in list(self._made):
            self._remove(block)

    def take_missing(self, entries: list[Entry], step: int) -> list[Entry]:
        """Those without a checksum; they count as made in ``step`` from now on (the caller orders them)."""
        missing = [e for e in entries if not self.has(e)]
        for entry in missing:
            self.mark(entry, step)
        return missing

    # -- what others may want ---------------------------------------------------------------------------------------

    def publish(self, group: int) -> None:
        """From now on whole blocks are found by key; those of ``group`` that are there, and each change, are to be
        taken by ``take_changes``."""
        self._found, self._others, self._group, self._added, self._gone = {}, {}, group, {}, {}
        for block, (key, valid, _, of) in self._made.items():
            self._enter(block, key, valid, of)

    def conceal(self) -> None:
        """Nobody wants to know any more."""
        self._found, self._others, self._added, self._gone = None, {}, {}, {}

    @property
    def published(self) -> bool:
        return self._found is not None

    @property
    def changes(self) -> int:
        return len(self._added) + len(self._gone)

    def take_changes(self) -> tuple[list[int], list[int]]:
        """(keys that are new, keys that are gone) since the last time."""
        added, gone = list(self._added), list(self._gone)
        self._added, self._gone = {}, {}
        return added, gone

    def find(self, key: int) -> tuple[int, int] | None:
        """(block id, the step that makes its checksum) of the whole block with this key; None also if not published."""
        block = self._found.get(key) if self._found is not None else None
        return None if block is None else (block, self._made[block][2])

    def _enter(self, block: int, key: int, valid: int, group: int) -> None:
        if valid < self._sizes[group]:
            return
        if key in self._found:  # vLLM goes on with the first, and evicts others before it
            self._others.setdefault(key, []).append(block)
            return
        if group == self._group:
            self._gone.pop(key, None)
            self._added[key] = None
        self._found[key] = block

    def _remove(self, block: int) -> None:
        entry = self._made.pop(block, None)
        if entry is None or self._found is None:
            return
        key, _, _, group = entry
        others = self._others.get(key, [])
        if self._found.get(key) != block:
            if block in others:
                others.remove(block)
        elif others:
            self._found[key] = others.pop(0)
        else:
            self._disappear(key, group)
        if not others:
            self._others.pop(key, None)

    def _disappear(self, key: int, group: int) -> None:
        if key not in self._found:
            return  # never entered
        del self._found[key]
        if group == self._group:
            if key in self._added:
                del self._added[key]  # but it may have been told before: said again, it does no harm
            self._gone[key] = None


def batches(entries: list[Entry]) -> list[SumBatch]:
    """Entries as arrays, one batch a group."""
    out = []
    for group in sorted({e.group for e in entries}):
        of_group = [e for e in entries if e.group == group]
        out.append(
            SumBatch(
                group,
                np.array([e.block for e in of_group], np.int64),
                np.array([e.key for e in of_group], np.uint64),
                np.array([e.valid for e in of_group], np.int32),
            )
        )
    return out
