"""What the tests of the object tier share: a reactor that runs when told to, and blocks to speak of."""

from collections import deque
from types import SimpleNamespace

from store_support import chain_of

from vllm_kvtier.store.records import HASH

CHAIN = chain_of((40, "x"))
PAGES = 2  # of a block


def hash_of(number: int) -> bytes:
    """Of a block of CHAIN."""
    return CHAIN[number * HASH : (number + 1) * HASH]


class Loop:
    """A reactor that runs when told to."""

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
