"""The blocks in this engine's GPU cache, published in the node store's directory for other engines of this node.

The directory says which engine has the block with which key. The store says how many other engines have our model.
While there are any, blocks get checksums for them, are found by key, and each change is sent to the store.
"""

import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from vllm_kvtier.cache_kinds import CacheGroup
from vllm_kvtier.scheduler.integrity.checksum_index import ChecksumIndex, ContentKeys
from vllm_kvtier.scheduler.matching.transfer_params import Address
from vllm_kvtier.store.client import StoreClient

# Changes are collected for so long, unless there are many or the engine becomes idle.
FLUSH_SECONDS = 0.05
FLUSH_CHANGES = 256


class PeerDirectoryClient:
    def __init__(
        self,
        checksum_index: ChecksumIndex,
        keys: Callable[[], ContentKeys],
        groups: Sequence[CacheGroup],
        hash_block_size: int,
        instance: str,
        wake: Callable[[], None],
    ):
        """``hash_block_size``: tokens a block hash covers. ``wake`` has
        vLLM's scheduler thread call :meth:`publish_changes` soon."""
        self._checksum_index, self._keys, self._instance, self._wake = checksum_index, keys, instance, wake
        # One group stands for a block of all: one that keeps whole prefixes, if there is any.
        self._group = next((g for g, (_, kind) in enumerate(groups) if kind.whole_prefix), 0)
        self._hash_blocks_per_block = groups[self._group][0] // hash_block_size
        self._client: StoreClient | None = None
        self._address: Address | None = None
        self._presented = 0  # session of the store's connection that knows of us
        self._synced_session = 0  # session that knows of our blocks; 0: none
        self._flushed = 0.0
        self._left = False

    # -- reactor's thread ------------------------------------------------------------------------------------------

    def opened(self, address: Address) -> None:
        """Other engines can reach this one at ``address``."""
        self._address = address
        if self._client is not None:
            self.store_changed(self._client)

    def store_changed(self, client: StoreClient) -> None:
        self._client = client
        if client.connected and self._address is not None and self._presented != client.session:
            self._presented = client.session
            client.present(os.urandom(8) if self._left else self._keys().compat_id, *self._address, self._instance)
        if self._wanted() != self._synced_session:
            self._wake()

    # -- any thread ------------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether there are engines to share with."""
        return self._synced_session != 0

    def key_params(self, lora_fingerprint: bytes) -> tuple[bytes, int]:
        """(key mask, hashes a block) for the directory; (b"", 1) while there is no engine to share with."""
        if not self.active:
            return b"", 1
        return self._keys().key_mask(self._group, lora_fingerprint), self._hash_blocks_per_block

    def _wanted(self) -> int:
        """The session whose store is to know our blocks; 0: none."""
        client = self._client
        if client is None or not client.connected or not client.peer_count or self._left:
            return 0
        return self._presented if self._presented == client.session else 0

    def leave(self) -> None:
        """Share no blocks any more, for good: this engine's weights may have changed in place, or its memory is not to
        be read. ``publish_changes`` follows."""
        self._left = True
        client = self._client
        if client is not None and client.connected and self._address is not None:
            client.present(os.urandom(8), *self._address, self._instance, client.session)
        self._wake()

    # -- scheduler's thread ----------------------------------------------------------------------------------------

    def publish_changes(self, idle: bool = False) -> None:
        """Once a step, and with ``idle`` before the engine sleeps."""
        wanted = self._wanted()
        if wanted != self._synced_session:
            self._synced_session = wanted
            if wanted:
                self._checksum_index.publish(self._group)
                self._flush(anew=True)  # the store does not know what was removed meanwhile
            else:
                self._checksum_index.conceal()
        changes = self._checksum_index.changes if wanted else 0
        if not changes:
            return
        now = time.monotonic()
        if idle or changes >= FLUSH_CHANGES or now - self._flushed >= FLUSH_SECONDS:
            self._flush()

    def _flush(self, anew: bool = False) -> None:
        assert self._client is not None
        self._flushed = time.monotonic()
        added, gone = (np.array(keys, "<u8").tobytes() for keys in self._checksum_index.take_changes())
        self._client.send_cached(added, gone, self._synced_session, anew)
