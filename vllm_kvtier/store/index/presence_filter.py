"""Which blocks the store's memory may have, for engines to read without a message.

A table of counters in a memfd that engines map read-only: a block's hash and namespace name its counter, which says how
many ready blocks share it. 0: the memory has no such block. Most prompts are found nowhere; their engines need not ask,
so that such a prompt costs neither a message nor a wait. Any other value says nothing certain: the engine asks.

A reader may be a moment behind or ahead of the index, as a lookup is that was sent a moment earlier or later. Counters
are changed by the store's reactor alone, one byte at a time.
"""

import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store import linux

if TYPE_CHECKING:  # engines use the other end only
    from vllm_kvtier.store.index.block_entry import BlockEntry

# Counters of one byte. Of a node store with 100,000 blocks one prompt in 160 is asked for in vain. Only what is used
# takes memory.
COUNTERS = 1 << 24
_FULL = 255  # such a counter is not exact any more, and stays


def _place(namespace_id: bytes, block_hash: bytes) -> int:
    return (int.from_bytes(block_hash[:4], "little") ^ int.from_bytes(namespace_id[:4], "little")) % COUNTERS


class PresenceFilter:
    """The store's end: a ``Watch`` of the index of its memory. ``fd``: the file, read-only, for clients."""

    def __init__(self) -> None:
        writable = linux.memfd_create("kvtier-presence")
        try:
            os.ftruncate(writable, COUNTERS)
            self._counters = mmap.mmap(writable, COUNTERS)
            self.fd = os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise KVTierError(f"the table of stored blocks cannot be made: {error.strerror}") from error
        finally:
            os.close(writable)

    def stored(self, entries: Sequence["BlockEntry"]) -> None:
        counters = self._counters
        for entry in entries:
            place = _place(entry.namespace.name, entry.hash)
            if counters[place] < _FULL:
                counters[place] += 1

    def used(self, entries: Sequence["BlockEntry"]) -> None:
        """Nothing changes."""

    def gone(self, entry: "BlockEntry") -> None:
        place = _place(entry.namespace.name, entry.hash)
        if 0 < self._counters[place] < _FULL:
            self._counters[place] -= 1

    def close(self) -> None:
        os.close(self.fd)
        self._counters.close()


class PresenceView:
    """An engine's end. ``fd`` is closed. Raises KVTierError if the file cannot be mapped."""

    def __init__(self, fd: int):
        try:
            if os.fstat(fd).st_size < COUNTERS:
                raise KVTierError(f"the store's table of blocks has {os.fstat(fd).st_size} bytes, not {COUNTERS}")
            self._counters = mmap.mmap(fd, COUNTERS, prot=mmap.PROT_READ)
        except OSError as error:
            raise KVTierError(f"the store's table of blocks cannot be mapped: {error.strerror}") from error
        finally:
            os.close(fd)

    def may_have(self, namespace_id: bytes, block_hash: bytes) -> bool:
        """Whether the store's memory may have a block of this hash, of whatever group."""
        return self._counters[_place(namespace_id, block_hash)] > 0
