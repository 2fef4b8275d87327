"""The node store's part of the ``kvtier`` commands: pins, promotions, where a prompt's blocks are and why not more.

On the reactor's thread. An engine without a node store has none of this.
"""

from vllm_kvtier.scheduler.sources.store_source import NodeStoreSource, packed
from vllm_kvtier.store.client import Pending

EXPLAIN_WAIT = 0.5  # seconds for the answers of other nodes and object stores


class StoreAdmin:
    def __init__(self, store: NodeStoreSource):
        self._store = store

    @property
    def instance(self) -> str:
        return self._store.instance

    def pin(self, block_hashes: list[bytes], pinned: bool) -> Pending | None:
        client = self._store.client
        return client.pin(self._store.namespace_id(b""), packed(block_hashes), pinned) if client is not None else None

    def inspect(self, block_hashes: list[bytes]) -> Pending | None:
        client = self._store.client
        return client.inspect(self._store.namespace_id(b""), packed(block_hashes)) if client is not None else None

    def promote(self, block_hashes: list[bytes]) -> bool:
        """Promote these blocks. False: no secondary tier, or no answer."""
        return self._store.promote(block_hashes, b"")

    def explain(self, block_hashes: list[bytes], lora_fingerprint: bytes) -> Pending | None:
        """Where the prefix is, or why it was removed; None without a store."""
        client = self._store.client
        if client is None or not self.instance:
            return None
        key_params = self._store.directory_key_params(lora_fingerprint)
        return client.explain(
            self._store.namespace_id(lora_fingerprint), packed(block_hashes), EXPLAIN_WAIT, *key_params
        )

    def namespace(self, lora_fingerprint: bytes) -> str:
        """As in ``wire.messages.Explanation``."""
        client = self._store.client
        names = client.names_of(self._store.namespace_id(lora_fingerprint)) if client is not None else []
        return " ".join(name.hex() for name in names)

    def load_bytes(self, tokens: int) -> int:
        return self._store.load_bytes(tokens)

    @property
    def problem(self) -> str:
        """Why nothing can be loaded from it; "" if something can."""
        client = self._store.client
        if client is None:
            return "the engine's workers have not described their KV caches yet"
        if not client.connected:
            return client.reason
        return "" if self._store.limit() else "the engine's workers cannot reach the store's memory yet"
