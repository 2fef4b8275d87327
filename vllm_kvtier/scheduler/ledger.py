"""Which GPU blocks have a checksum in the workers' tables, and under which content key.

Three facts are kept per block id: the key (content) and number of valid tokens its table entry was made with, and
the step that made it, because a block shared with an earlier request may be ordered but not made yet.
An entry dies when vLLM hands the block out anew.
"""

from dataclasses import dataclass

import numpy as np

from vllm_kvtier.worker.work import SumBatch

_GROUP_SALT = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Keys:
    """Content keys: 64 bits of the chained block hash, mixed with the namespace, the adapter and the group."""

    def __init__(self, namespace_digest: int):
        self._salt = namespace_digest

    def key(self, block_hash: bytes, group: int, variant: bytes) -> int:
        return int.from_bytes(block_hash[:8], "little") ^ self._mix(group, variant)

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
    def __init__(self) -> None:
        self._made: dict[int, tuple[int, int, int]] = {}  # block id -> (key, valid, step)

    def has(self, entry: Entry) -> bool:
        return self._made.get(entry.block, ())[:2] == (entry.key, entry.valid)

    def mark(self, entry: Entry, step: int = -1) -> None:
        """``step`` makes it; -1: it is in the table already."""
        self._made[entry.block] = (entry.key, entry.valid, step)

    def ready_step(self, entries: list[Entry]) -> int:
        """The step after which all of ``entries`` are in the table."""
        return max((self._made[e.block][2] for e in entries), default=-1)

    def forget(self, blocks) -> None:
        """These blocks get new content."""
        if self._made:
            for block in blocks:
                self._made.pop(block, None)

    def clear(self) -> None:
        self._made.clear()

    def take_missing(self, entries: list[Entry], step: int) -> list[Entry]:
        """Those without a checksum; they count as made in ``step`` from now on (the caller orders them)."""
        missing = [e for e in entries if not self.has(e)]
        for entry in missing:
            self.mark(entry, step)
        return missing


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
