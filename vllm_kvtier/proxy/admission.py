"""Who may go to an engine now, who waits, and who is told to come back later.

Requests wait here for a place at any engine of a role: tenants in turns (``_Line``), of one tenant first come first
served. A request that needs both a prefill and a decode engine waits for its place at P first and at D then, and only
then is P asked: a P that computes what no D has room for would hold its blocks for nothing. Nobody waits for what is
not there: where no engine of a role is well, the caller is told at once.

Where too many wait, who comes takes the place of the newest of the tenant that has most waiting, if its own has fewer:
a tenant that fills the queue keeps nobody else out of it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.proxy.config import ProxyConfig
from vllm_kvtier.proxy.deadlines import time_limit
from vllm_kvtier.proxy.engines import Engine, Place

# The rate that Retry-After goes by is of about so many seconds.
_RATE_SECONDS = 20.0
# So many tenants of whom nobody waits are remembered with what they have had: whoever makes up tenants must not fill
# the memory. One that is forgotten has its next turn sooner.
_OWING_KEPT = 4096


class Choice(NamedTuple):
    """An engine for a request, and the prompt tokens that it would have to compute there. None: all are full."""

    engine: Engine | None
    tokens: int = 0


class TooBusy(KVTierError):
    """Too many requests wait, or this one has waited for too long. ``retry_after``: seconds, 1 or more.
    ``displaced``: it did wait, and another tenant's has come in its stead."""

    def __init__(self, message: str, retry_after: int, *, displaced: bool = False):
        super().__init__(message)
        self.retry_after = retry_after
        self.displaced = displaced


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
        self._lines = {role: _Line() for role in roles}
        self._rates = {role: Rate(clock) for role in roles}
        self._numbers = itertools.count()

    def waiting(self, role: str) -> int:
        return len(self._lines[role])

    async def enter(
        self, role: str, tenant: bytes, choose: Callable[[], Choice | None], seconds: float
    ) -> Place | None:
        """A place at the engine that ``choose`` names, once it names one; None where it says that there is none.

        ``choose`` is called at once if nobody waits, else in turn, whenever a place may have become free. Raises
        TooBusy if the queue is full, also if it is so later and this is who has to go, or if ``seconds`` pass.
        """
        line = self._lines[role]
        if not line:
            choice = choose()
            if choice is None:
                return None
            if choice.engine is not None:
                return Place(choice.engine, choice.tokens)
        if sum(map(len, self._lines.values())) >= self.config.queue_limit and not self._make_room(tenant):
            raise self._full(role, tenant)
        loop = asyncio.get_running_loop()
        waiter = _Waiter(role, tenant, choose, loop.create_future(), (loop.time() + seconds, next(self._numbers)))
        line.join(waiter, self._cost())
        try:
            async with time_limit(seconds):
                given = await waiter.given
        except BaseException as error:
            # Given and lost in the same moment. Its tenant gets its turn back before the place goes on.
            if waiter.given.done() and not waiter.given.cancelled() and isinstance(waiter.given.result(), Place):
                line.refund(waiter)
                waiter.given.result().leave()
            if isinstance(error, TimeoutError):
                raise TooBusy("No engine had room in time.", self.retry_after(role, tenant)) from error
            raise
        finally:
            line.leave(waiter)
        if isinstance(given, TooBusy):
            raise given
        return given

    def turn(self, role: str) -> None:
        """Serve who waits, as far as there are places now."""
        line = self._lines[role]
        while (waiter := line.first()) is not None:
            choice = waiter.choose()
            if choice is None:
                line.leave(waiter)
                waiter.given.set_result(None)
            elif choice.engine is None:
                return
            else:
                # Out of the line first: taking a place may come back here.
                line.serve(waiter, self._cost(choice.tokens))
                waiter.given.set_result(Place(choice.engine, choice.tokens))

    def left(self, role: str) -> None:
        """A request is over."""
        self._rates[role].tick()
        self.turn(role)

    def retry_after(self, role: str, tenant: bytes) -> int:
        """Seconds after which who asks again is likely to be served, by the rate at which requests end: its tenant's
        wait before it, and of every other tenant as many as have their turn meanwhile, if all turns cost the same."""
        waiting = self._lines[role].counts()
        turns = waiting[tenant] + 1
        rate = self._rates[role].value()
        most = self.config.retry_after_most
        seconds = most if rate <= 0 else (turns + sum(min(n, turns) for t, n in waiting.items() if t != tenant)) / rate
        return max(1, math.ceil(min(seconds, most)))

    def _cost(self, tokens: int = 0) -> int:
        """What a place costs a tenant: what the router takes the request for, in prompt tokens."""
        return max(1, self.config.request_tokens + tokens)

    def _full(self, role: str, tenant: bytes, *, displaced: bool = False) -> TooBusy:
        message = "Too many requests wait for an engine."
        return TooBusy(message, self.retry_after(role, tenant), displaced=displaced)

    def _make_room(self, tenant: bytes) -> bool:
        """Send away the newest of who has most waiting, in whatever role; False if ``tenant`` itself has as many."""
        waiting = sum((line.counts() for line in self._lines.values()), Counter())
        most = max(waiting.values(), default=0)
        if waiting[tenant] >= most:
            return False
        waiters = (w for line in self._lines.values() for w in line if waiting[w.tenant] == most)
        # Rather one that is leaving anyway, and has only not come to it yet.
        newest = max(waiters, key=lambda w: (w.given.done(), w.until))
        self._lines[newest.role].leave(newest)
        if not newest.given.done():
            newest.given.set_result(self._full(newest.role, newest.tenant, displaced=True))
        return True


class _Waiter:
    """``given``: set to the place, to None where nobody is left to wait for, or to why it must go. ``until``: when its
    time is over, and its number. All have equally long, those who have waited in another role before less: of two,
    the newer request is the one whose time is over later."""

    def __init__(
        self,
        role: str,
        tenant: bytes,
        choose: Callable[[], Choice | None],
        given: asyncio.Future[Place | TooBusy | None],
        until: tuple[float, int],
    ):
        self.role = role
        self.tenant = tenant
        self.choose = choose
        self.given = given
        self.until = until
        self.paid = 0


class _Line:
    """Those who wait for one role: the tenant that is due first goes first, and of it who came first.

    Fair queuing by start times, where time is what tenants have had: the prompt tokens that their requests have an
    engine compute, and ``request_tokens`` for each, as the router counts. By requests alone a tenant with long prompts
    would have hundreds of times as much of the Ps as one with short ones. At a D whose prompts P computes, tokens are 0
    and turns go by requests: how long an answer will be nobody knows.

    ``_now`` is when the tenant that had the last turn was due; a turn puts its tenant off by what it costs. That is
    known only once an engine is chosen. To charge afterwards has another merit: of a tenant that has had nothing, a
    long prompt waits no longer than a short one.

    Who joins is due after ``least``, what the cheapest turn costs: a turn of any other puts that one off by no less, so
    nobody has two before it. Nor can a stream of new tenants hold up an old one forever, as ``_now`` goes on with them.
    Time in which nobody of a tenant waits is no credit, and what it has had still counts when it comes back, or it
    would have more by sending one request after the other than by sending two. When nobody waits all is forgotten.
    """

    def __init__(self) -> None:
        # Among those due at the same time the first in here has the next turn.
        self._tenants: dict[bytes, _Tenant] = {}
        self._owing: dict[bytes, int] = {}
        self._now = 0

    def __len__(self) -> int:
        return sum(len(tenant.waiters) for tenant in self._tenants.values())

    def __iter__(self) -> Iterator[_Waiter]:
        for tenant in self._tenants.values():
            yield from tenant.waiters

    def counts(self) -> Counter[bytes]:
        """How many wait, by tenant."""
        return Counter({name: len(tenant.waiters) for name, tenant in self._tenants.items()})

    def join(self, waiter: _Waiter, least: int) -> None:
        """``least``: what a turn costs at least."""
        tenant = self._tenants.get(waiter.tenant)
        if tenant is None:
            due = max(self._owing.pop(waiter.tenant, 0), self._now + least)
            tenant = self._tenants[waiter.tenant] = _Tenant(due)
        tenant.waiters[waiter] = None

    def first(self) -> _Waiter | None:
        """Whose turn it is."""
        while self._tenants:
            waiter = next(iter(min(self._tenants.values(), key=lambda tenant: tenant.due).waiters))
            if not waiter.given.done():
                return waiter
            self.leave(waiter)
        return None

    def serve(self, waiter: _Waiter, cost: int) -> None:
        """Its turn, for which its tenant pays."""
        tenant = self._tenants.pop(waiter.tenant)
        self._tenants[waiter.tenant] = tenant
        self._now = tenant.due
        tenant.due += cost
        waiter.paid = cost
        self.leave(waiter)

    def refund(self, waiter: _Waiter) -> None:
        """Its turn was none: its tenant is where it was, though not before now."""
        if waiter.tenant in self._owing:
            self._owing[waiter.tenant] -= waiter.paid
        elif (tenant := self._tenants.pop(waiter.tenant, None)) is not None:
            tenant.due = max(tenant.due - waiter.paid, self._now)
            self._tenants = {waiter.tenant: tenant, **self._tenants}

    def leave(self, waiter: _Waiter) -> None:
        """No turn for it; or none any more."""
        tenant = self._tenants.get(waiter.tenant)
        if tenant is None or waiter not in tenant.waiters:
            return
        del tenant.waiters[waiter]
        if not tenant.waiters:
            del self._tenants[waiter.tenant]
            self._owing[waiter.tenant] = tenant.due
        if not self._tenants:
            self._owing.clear()
            self._now = 0
        elif len(self._owing) > _OWING_KEPT:
            del self._owing[next(iter(self._owing))]


class _Tenant:
    """Of whom somebody waits: when its turn is, and who they are in the order in which they came."""

    def __init__(self, due: int):
        self.due = due
        self.waiters: dict[_Waiter, None] = {}
