"""Shared by the tests of the object tier: a reactor that the test runs, and blocks."""

from collections import deque
from types import SimpleNamespace

from store_support import block_hashes_of

from vllm_kvtier.store.index.types import HASH_BYTES
from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.tier_process import BACKOFF, READY
from vllm_kvtier.wire.slots import PAGE

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


class FakeMover:
    """As ``TierProcess``, without a process: the test answers ``requests``."""

    def __init__(self, kind, options, context, user, open_seconds, backoff=None):
        assert (context.pool_fd, context.pool_bytes) == (5, 64 * PAGE)
        self.kind = kind
        self.options, self.on_message, self.on_up, self.on_down = (
            options, user.process_message, user.process_up, user.process_down,
        )  # fmt: skip
        self.state, self.reason, self.restarts, self.timeouts = "opening", "", 0, 0
        self.requests, self.sent, self.last = deque(), [], 0

    def start(self, opened=None):
        self.state = READY
        self.on_up(opened or m.Opened(writable=True))

    def stop(self):
        self.state = "stopped"

    def next_id(self):
        self.last += 1
        return self.last

    def send(self, message):
        if self.state == READY:
            self.sent.append(message)
        return self.state == READY

    def request(self, message, seconds, on_reply):
        if self.state != READY:
            on_reply(None)
        else:
            self.requests.append((message, seconds, on_reply))

    def back_off(self, reason):
        self.state, self.reason = BACKOFF, reason
        self.on_down(reason)

    def answer(self, kind, *arguments, **more):
        message, _, on_reply = self.requests.popleft()
        on_reply(kind(message.id, *arguments, **more))

    def fail(self):
        self.requests.popleft()[2](None)
