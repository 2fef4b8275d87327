"""What other engines of this node have in their GPU caches, and what they may know of ours.

The node store keeps a directory: which engine has the block with which key. It says how many engines with our model
are there; only while there are any are blocks summed for them, found by key, and told of as they come and go. One
engine alone does none of this.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_kvtier.scheduler.ledger import Keys, Ledger
from vllm_kvtier.scheduler.offers import Address
from vllm_kvtier.store.client import StoreClient

# Changes wait for others so long, unless there are many or the engine goes to sleep.
FLUSH_SECONDS = 0.05
FLUSH_CHANGES = 256


@dataclass(frozen=True)
class Holder:
    """An engine that has the blocks of tokens [0, ``tokens``) as far as the asker lacks them."""

    address: Address
    instance: str
    tokens: int


class Sharing:
    def __init__(
        self,
        ledger: Ledger,
        keys: Callable[[], Keys],
        groups: list[tuple[int, int | None]],
        unit: int,
        instance: str,
        wake: Callable[[], None],
    ):
        """``groups``: (block tokens, window) a group; ``unit``: tokens a block hash covers. ``wake`` has the engine's
        thread call :meth:`settle` soon."""
        self._ledger, self._keys, self._instance, self._wake = ledger, keys, instance, wake
        # One group stands for a block of all: one that keeps whole prefixes, if there is any.
        self._group = next((g for g, (_, window) in enumerate(groups) if window is None), 0)
        self._stride = groups[self._group][0] // unit
        self._client: StoreClient | None = None
        self._address: Address | None = None
        self._presented = 0  # session of the store's connection that knows of us
        self._told = 0  # session that knows of our blocks; 0: none
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
            client.present(os.urandom(8) if self._left else self._keys().family, *self._address, self._instance)
        if self._wanted() != self._told:
            self._wake()

    # -- any thread ------------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether there is anybody to share with."""
        return self._told != 0

    def names(self, variant: bytes) -> tuple[bytes, int]:
        """(what makes keys of hashes, how many hashes a block has) for the directory; (b"", 1) while alone."""
        return (self._keys().mix(self._group, variant), self._stride) if self.active else (b"", 1)

    def _wanted(self) -> int:
        client = self._client
        present = client is not None and client.connected and client.company > 0 and not self._left
        return self._presented if present and self._presented == client.session else 0

    def leave(self) -> None:
        """For good: this engine's weights may have changed in place, so that its blocks are nobody else's any more, nor
        theirs its own; or its memory is not to be read any more. ``settle`` is to follow."""
        self._left = True
        client = self._client
        if client is not None and client.connected and self._address is not None:
            client.present(os.urandom(8), *self._address, self._instance, client.session)
        self._wake()

    # -- scheduler's thread ----------------------------------------------------------------------------------------

    def settle(self, idle: bool = False) -> None:
        """Once a step, and with ``idle`` before the engine sleeps."""
        wanted = self._wanted()
        if wanted != self._told:
            self._told = wanted
            if wanted:
                self._ledger.publish(self._group)
                self._flush(anew=True)  # what went while we were alone the store was not told
            else:
                self._ledger.conceal()
        changes = self._ledger.changes if wanted else 0
        if not changes:
            return
        now = time.monotonic()
        if idle or changes >= FLUSH_CHANGES or now - self._flushed >= FLUSH_SECONDS:
            self._flush()

    def _flush(self, anew: bool = False) -> None:
        self._flushed = time.monotonic()
        added, gone = (np.array(keys, "<u8").tobytes() for keys in self._ledger.take_changes())
        self._client.resident(added, gone, self._told, anew)
