"""Who may go to an engine now, who waits, and who is told to come back later.

Requests wait here, first come first served, for a place at any engine of a role. A request that needs both a prefill
and a decode engine waits for its place at P first and at D then, and only then is P asked: a P that computes what no D
has room for would hold its blocks for nothing. Nobody waits for what is not there: where no engine of a role is well,
the caller is told at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.proxy.config import ProxyConfig
from vllm_kvtier.proxy.deadlines import time_limit
from vllm_kvtier.proxy.engines import Engine, Place

# The rate that Retry-After goes by is of about so many seconds.
_RATE_SECONDS = 20.0


class Choice(NamedTuple):
    """An engine for a request, and the prompt tokens that it would have to compute there. None: all are full."""

    engine: Engine | None
    tokens: int = 0


class TooBusy(KVTierError):
    """Too many requests wait, or this one has waited for too long. ``retry_after``: seconds, 1 or more."""

    def __init__(self, message: str, retry_after: int):
        super().__init__(message)
        self.retry_after = retry_after


class Rate:
    """Events a second, the older the less they count."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._began = self._seen = clock()
        self._count = 0.0

    def tick(self) -> None:
        self._count = self._decayed() + 1.0
        self._seen = self._clock()

    def value(self) -> float:
        """0 if there were none."""
        # At the beginning less time has passed than the average looks back.
        span = _RATE_SECONDS * -math.expm1(-(self._clock() - self._began) / _RATE_SECONDS)
        return self._decayed() / max(span, 1e-3)

    def _decayed(self) -> float:
        return self._count * math.exp(-(self._clock() - self._seen) / _RATE_SECONDS)


class Admission:
    """Gives out places. One for all roles: ``queue_limit`` bounds everybody who waits."""

    def __init__(self, config: ProxyConfig, roles: tuple[str, ...], clock: Callable[[], float] = time.monotonic):
        self.config = config
        self._waiting: dict[str, deque[_Waiter]] = {role: deque() for role in roles}
        self._rates = {role: Rate(clock) for role in roles}

    def waiting(self, role: str) -> int:
        return len(self._waiting[role])

    async def enter(self, role: str, choose: Callable[[], Choice | None], seconds: float) -> Place | None:
        """A place at the engine that ``choose`` names, once it names one; None where it says that there is none.

        ``choose`` is called at once if nobody waits, else in turn, whenever a place may have become free. Raises
        TooBusy if the queue is full or ``seconds`` pass.
        """
        queue = self._waiting[role]
        if not queue:
            choice = choose()
            if choice is None:
                return None
            if choice.engine is not None:
                return Place(choice.engine, choice.tokens)
        if sum(map(len, self._waiting.values())) >= self.config.queue_limit:
            raise TooBusy("Too many requests wait for an engine.", self.retry_after(role))
        waiter = _Waiter(asyncio.get_running_loop().create_future(), choose)
        queue.append(waiter)
        try:
            async with time_limit(seconds):
                return await waiter.place
        except BaseException as error:
            # Given and lost in the same moment.
            if waiter.place.done() and not waiter.place.cancelled() and waiter.place.result() is not None:
                waiter.place.result().leave()
            if isinstance(error, TimeoutError):
                raise TooBusy("No engine had room in time.", self.retry_after(role)) from error
            raise
        finally:
            if waiter in queue:
                queue.remove(waiter)

    def turn(self, role: str) -> None:
        """Serve who waits, as far as there are places now."""
        queue = self._waiting[role]
        while queue:
            waiter = queue[0]
            if waiter.place.done():
                queue.popleft()
                continue
            choice = waiter.choose()
            if choice is not None and choice.engine is None:
                return
            # Out of the queue first: taking a place may come back here.
            queue.popleft()
            waiter.place.set_result(None if choice is None else Place(choice.engine, choice.tokens))

    def left(self, role: str) -> None:
        """A request is over."""
        self._rates[role].tick()
        self.turn(role)

    def retry_after(self, role: str) -> int:
        """Seconds after which who asks again is likely to be served, by the rate at which requests end."""
        rate = self._rates[role].value()
        most = self.config.retry_after_most
        seconds = most if rate <= 0 else (len(self._waiting[role]) + 1) / rate
        return max(1, math.ceil(min(seconds, most)))


class _Waiter:
    """``place``: set to the place, or to None where nobody is left to wait for."""

    def __init__(self, place: asyncio.Future[Place | None], choose: Callable[[], Choice | None]):
        self.place = place
        self.choose = choose
