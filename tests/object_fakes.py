"""Shared by the tests of the object tier: a reactor that the test runs, and blocks."""

from collections import deque
from types import SimpleNamespace

from store_support import block_hashes_of

from vllm_kvtier.store.index.types import HASH_BYTES

BLOCK_HASHES = block_hashes_of((40, "x"))
PAGES = 2  # of a block


def hash_of(number: int) -> bytes:
    """Of a block of CHAIN."""
    return BLOCK_HASHES[number * HASH_BYTES : (number + 1) * HASH_BYTES]


class Loop:
    """A reactor that the test runs."""

    def __init__(self):
        self.soon, self.timers = deque(), []

    def call_soon(self, call):
        self.soon.append(call)

    def call_later(self, delay, call):
        timer = SimpleNamespace(delay=delay, call=call, cancelled=False)
        timer.cancel = lambda: setattr(timer, "cancelled", True)
        self.timers.append(timer)
        return timer

    def run(self):
        while self.soon:
            self.soon.popleft()()

    def fire(self):
        """All timers, whatever their time."""
        timers, self.timers = self.timers, []
        for timer in timers:
            if not timer.cancelled:
                timer.call()
        self.run()
