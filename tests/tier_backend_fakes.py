"""Fakes for secondary tiers: a reactor whose clock the test moves, and a tier process without a process."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable

from support import Clock

from vllm_kvtier.store.tiers.process import protocol as m
from vllm_kvtier.store.tiers.process.tier_process import BACKOFF, OPENING, READY, STOPPED
from vllm_kvtier.wire.reactor import Timer


class FakeReactor:
    """A reactor that the test runs; ``clock`` is its time."""

    def __init__(self, clock: Clock):
        self.clock = clock
        self._soon: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def call_soon(self, callback: Callable[[], None]) -> None:
        self._soon.append(callback)

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self.clock.now + delay, callback)
        heapq.heappush(self._timers, (timer.when, next(self._order), timer))
        return timer

    def step(self) -> None:
        """What is queued by now, once."""
        for _ in range(len(self._soon)):
            self._soon.popleft()()

    def run(self, seconds: float = 0.0) -> None:
        """So much time passes."""
        until = self.clock.now + seconds
        while True:
            while self._soon:
                self._soon.popleft()()
            if not self._timers or self._timers[0][0] > until:
                break
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                self.clock.now = max(self.clock.now, timer.when)
                timer.callback()
        self.clock.now = until


class FakeMover:
    """As ``Mover``, without a process: what is asked waits in ``asked`` until the test answers it."""

    def __init__(self, kind, options, context, user, open_seconds, backoff=None):
        self.kind, self.options, self.open_seconds = kind, options, open_seconds
        self.hear, self._user = user.process_message, user
        self.state, self.reason, self.restarts, self.timeouts = STOPPED, "", 0, 0
        self.asked: list[tuple[m.Read | m.Write, Callable]] = []
        self.sent: list = []
        self.limit = 0.0  # seconds that the last request had
        self.on_ask: Callable[[], None] = lambda: None
        self.dying: list[tuple] = []  # asked of one that was killed and is not reaped yet
        self._ids = itertools.count(1)

    def start(self) -> None:
        self.state = OPENING

    def next_id(self) -> int:
        return next(self._ids)

    def send(self, message) -> bool:
        if self.state == READY:
            self.sent.append(message)
        return self.state == READY

    def request(self, message, seconds, on_reply) -> None:
        if self.state != READY:
            on_reply(None)
            return
        self.asked.append((message, on_reply))
        self.limit = seconds
        self.sent.append(message)
        self.on_ask()

    def back_off(self, reason: str) -> None:
        if self.state in (OPENING, READY):
            self.state, self.reason = BACKOFF, reason
            self.dying, self.asked = self.dying + self.asked, []
            self._user.process_down(reason)

    def stop(self) -> None:
        self.back_off("the store ends")
        self.reap()
        self.state = STOPPED

    # -- the test's side ----------------------------------------------------------------------------------------

    def opened(self, kept: list[m.Move] = (), namespaces: list[m.NamespaceShape] = (), **options) -> None:
        self.state, self.reason = OPENING, ""
        for at in range(0, len(kept), 8192):
            self.hear(m.Kept(list(kept[at : at + 8192]), list(namespaces)))
        self.state = READY
        self._user.process_up(m.Opened(**{"writable": True, **options}))

    def answer(self, good=None, at: int = 0, **words) -> m.Read | m.Write:
        """The oldest that was asked (or the ``at``th); good None: all of it."""
        message, on_reply = self.asked.pop(at)
        on_reply(m.Moved(message.id, [True] * len(message.moves) if good is None else good, **words))
        return message

    def reap(self) -> None:
        dying, self.dying = self.dying, []
        for _, on_reply in dying:
            on_reply(None)
