"""Which engine may have a conversation, as far as we noticed ourselves."""

import time
from collections import OrderedDict

from vllm_kvtier.scheduler.offers import Address

MAX_WHEREABOUTS = 1 << 16  # chain ends remembered (about 100 bytes each)


class Whereabouts:
    """Which engine last pulled a chain from us: it has the conversation, even if no router says so."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._at: OrderedDict[bytes, tuple[Address, float]] = OrderedDict()

    def note(self, chain_end: bytes, address: Address) -> None:
        """Any thread (one assignment)."""
        self._at[chain_end] = (address, time.monotonic() + self._seconds)
        self._at.move_to_end(chain_end)
        while len(self._at) > MAX_WHEREABOUTS:
            self._at.popitem(last=False)

    def find(self, chain: list[bytes]) -> Address | None:
        for block_hash in reversed(chain):
            found = self._at.get(block_hash)
            if found and found[1] > time.monotonic():
                return found[0]
        return None
