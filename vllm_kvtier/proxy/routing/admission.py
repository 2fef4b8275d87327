"""Admission: which request gets a slot at an engine now, which waits, and which is refused with 429.

Requests wait for a slot at any engine of a role: fairly between tenants (``_WaitQueue``), first come first served
within a tenant. A request that needs a prefill and a decode engine takes both slots before it is sent to the prefill
engine; otherwise that engine would hold computed blocks that no decode engine can take. If no engine of a role is
available, requests do not wait.

If the queue is full, a new request displaces the newest request of the tenant with most waiting, unless its own tenant
has as many. So a tenant that fills the queue does not keep others out.
"""

import asyncio
import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.proxy.config import ProxyConfig
from vllm_kvtier.proxy.deadlines import time_limit
from vllm_kvtier.proxy.engines.engine import Engine, EngineSlot
from vllm_kvtier.proxy.engines.refusals import Wants

_RATE_SECONDS = 20.0  # Retry-After is computed from the rate of about this time
# Tenants without waiting requests whose cost is remembered. Bounded, because clients can invent tenants; a tenant that
# is forgotten is served sooner.
MAX_IDLE_TENANTS = 4096


class Choice(NamedTuple):
    """An engine for a request and the prompt tokens to compute there. None: all engines are full; or with ``full``,
    those that can serve this one are, and requests behind it that others can serve go first."""

    engine: Engine | None
    tokens: int = 0
    full: frozenset[Engine] | None = None


class QueueFull(KVTierError):
    """Too many requests wait, or this one has waited too long. ``retry_after``: seconds, at least 1.
    ``displaced``: it waited, and a request of another tenant has displaced it."""

    def __init__(self, message: str, retry_after: int, *, displaced: bool = False):
        super().__init__(message)
        self.retry_after = retry_after
        self.displaced = displaced


class Rate:
    """Events per second, as an exponentially decaying average."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._began = self._seen = clock()
        self._count = 0.0

    def tick(self) -> None:
        self._count = self._decayed() + 1.0
        self._seen = self._clock()

    def value(self) -> float:
        """0 without events."""
        # At first, less time has passed than the average covers.
        span = _RATE_SECONDS * -math.expm1(-(self._clock() - self._began) / _RATE_SECONDS)
        return self._decayed() / max(span, 1e-3)

    def _decayed(self) -> float:
        return self._count * math.exp(-(self._clock() - self._seen) / _RATE_SECONDS)


class Admission:
    """Grants engine slots. One for all roles, since ``queue_limit`` bounds all waiting requests."""

    def __init__(self, config: ProxyConfig, roles: tuple[str, ...], clock: Callable[[], float] = time.monotonic):
        self.config = config
        self._queues = {role: _WaitQueue() for role in roles}
        self._rates = {role: Rate(clock) for role in roles}
        self._numbers = itertools.count()

    def waiting(self, role: str) -> int:
        return len(self._queues[role])

    async def acquire(
        self, role: str, tenant: bytes, choose: Callable[[], Choice | None], seconds: float, wants: Wants = None
    ) -> EngineSlot | None:
        """A slot at the engine that ``choose`` names, once it names one; None if ``choose`` returns None.

        ``choose`` is called at once (no waiting request can use a slot that is free then), and in the request's turn
        when a slot may be free. Raises QueueFull if the queue is full, if this request is displaced, or after
        ``seconds``.
        """
        choice = choose()
        if choice is None:
            return None
        if choice.engine is not None:
            return EngineSlot(choice.engine, choice.tokens)
        queue = self._queues[role]
        if sum(map(len, self._queues.values())) >= self.config.queue_limit and not self._displace_newest(tenant):
            raise self._queue_full(role, tenant)
        loop = asyncio.get_running_loop()
        deadline = (loop.time() + seconds, next(self._numbers))
        waiter = _Waiter(role, tenant, choose, loop.create_future(), deadline, wants)
        waiter.full = choice.full
        queue.join(waiter, self._cost())
        try:
            async with time_limit(seconds):
                result = await waiter.result
        except BaseException as error:
            # The slot was granted at the moment of the timeout or cancellation. Its tenant is refunded first.
            done = waiter.result.done() and not waiter.result.cancelled()
            if done and isinstance(slot := waiter.result.result(), EngineSlot):
                queue.refund(waiter)
                slot.release()
            if isinstance(error, TimeoutError):
                raise QueueFull("No engine had a free slot in time.", self.retry_after(role, tenant)) from error
            raise
        finally:
            queue.remove(waiter)
        if isinstance(result, QueueFull):
            raise result
        return result

    def serve_waiting(self, role: str, *, anew: bool = False, wants: Wants = None) -> None:
        """Grant the free slots to waiting requests. Of those for the same full engines, the first is asked. ``anew``:
        all are, or all that want ``wants``: other engines may serve them than when they were asked last, or none."""
        queue = self._queues[role]
        full: set[frozenset[Engine]] = set()
        for waiter in queue.in_turn():
            if waiter.full in full or (wants is not None and waiter.wants != wants):
                continue
            choice = waiter.choose()
            if choice is None:
                queue.remove(waiter)
                waiter.result.set_result(None)
            elif choice.engine is None:
                waiter.full = choice.full
                if anew:
                    continue
                if choice.full is None:
                    return
                full.add(choice.full)
            else:
                # Removed from the queue first, because taking the slot may call this method.
                queue.serve(waiter, self._cost(choice.tokens))
                waiter.result.set_result(EngineSlot(choice.engine, choice.tokens))

    def request_ended(self, role: str) -> None:
        self._rates[role].tick()
        self.serve_waiting(role)

    def retry_after(self, role: str, tenant: bytes) -> int:
        """Seconds until a new request of the tenant is likely to be served, by the rate at which requests end.

        Before it go its tenant's waiting requests, and as many of each other tenant if all cost the same.
        """
        waiting = self._queues[role].counts()
        ahead = waiting[tenant] + 1
        rate = self._rates[role].value()
        most = self.config.retry_after_max
        seconds = most if rate <= 0 else (ahead + sum(min(n, ahead) for t, n in waiting.items() if t != tenant)) / rate
        return max(1, math.ceil(min(seconds, most)))

    def _cost(self, tokens: int = 0) -> int:
        """The cost of a slot in prompt tokens, as the router counts a request."""
        return max(1, self.config.request_cost_tokens + tokens)

    def _queue_full(self, role: str, tenant: bytes, *, displaced: bool = False) -> QueueFull:
        message = "Too many requests wait for an engine."
        return QueueFull(message, self.retry_after(role, tenant), displaced=displaced)

    def _displace_newest(self, tenant: bytes) -> bool:
        """Refuse the newest request of the tenant with most waiting in all roles; False if ``tenant`` has as many."""
        waiting = sum((queue.counts() for queue in self._queues.values()), Counter())
        most = max(waiting.values(), default=0)
        if waiting[tenant] >= most:
            return False
        waiters = (w for queue in self._queues.values() for w in queue if waiting[w.tenant] == most)
        # First a waiter that is cancelled already and has not left the queue yet.
        newest = max(waiters, key=lambda w: (w.result.done(), w.deadline))
        self._queues[newest.role].remove(newest)
        if not newest.result.done():
            newest.result.set_result(self._queue_full(newest.role, newest.tenant, displaced=True))
        return True


@dataclass(eq=False)
class _Waiter:
    """``result``: the slot, None if no engine is available, or the refusal.

    ``deadline``: with a number that makes it unique. All requests may wait equally long in total, so that of two the
    newer one has the later deadline. ``wants``: what not every engine may have. ``full``: of its last choice.
    """

    role: str
    tenant: bytes
    choose: Callable[[], Choice | None]
    result: asyncio.Future[EngineSlot | QueueFull | None]
    deadline: tuple[float, int]
    wants: Wants
    full: frozenset[Engine] | None = None
    charged: int = 0


class _WaitQueue:
    """The waiting requests of one role: the tenant that is due first is served first, FIFO within a tenant.

    Start-time fair queuing. Virtual time is the cost that tenants have had: the prompt tokens computed for them, plus
    ``request_cost_tokens`` for each request, as the router counts. Counting requests alone would give a tenant with
    long prompts hundreds of times as much of the prefill engines. At a decode engine whose prompts are prefilled
    elsewhere, tokens are 0 and requests count equally, since the length of an answer is unknown.

    ``_virtual_time`` is the due time of the tenant served last. Serving a request moves its tenant's due time by its
    cost, which is known only after an engine is chosen. So a tenant's first long prompt waits no longer than a short
    one.

    A tenant that joins is due after ``least``, the cost of the cheapest request. Any other request moves its tenant by
    at least that, so no tenant is served twice before a new one. New tenants cannot starve an old one, because
    ``_virtual_time`` advances with them. A tenant without waiting requests gains no credit, and its past cost counts
    when it returns; otherwise sending requests one by one would get more than two at once. An empty queue forgets all.
    """

    def __init__(self) -> None:
        # Of several due at the same time, the first in this dict is served first.
        self._tenants: dict[bytes, _Tenant] = {}
        self._idle_due: dict[bytes, int] = {}
        self._virtual_time = 0

    def __len__(self) -> int:
        return sum(len(tenant.waiters) for tenant in self._tenants.values())

    def __iter__(self) -> Iterator[_Waiter]:
        for tenant in self._tenants.values():
            yield from tenant.waiters

    def counts(self) -> Counter[bytes]:
        """The number of waiting requests by tenant."""
        return Counter({name: len(tenant.waiters) for name, tenant in self._tenants.items()})

    def join(self, waiter: _Waiter, least: int) -> None:
        """``least``: the cost of the cheapest request."""
        tenant = self._tenants.get(waiter.tenant)
        if tenant is None:
            due = max(self._idle_due.pop(waiter.tenant, 0), self._virtual_time + least)
            tenant = self._tenants[waiter.tenant] = _Tenant(due)
        tenant.waiters[waiter] = None

    def in_turn(self) -> Iterator[_Waiter]:
        """Each request once, in the order to serve them. The caller serves it, removes it or passes it over."""
        places = itertools.count()
        heap = [(tenant.due, next(places), tenant) for tenant in self._tenants.values()]
        heapq.heapify(heap)
        left: dict[_Tenant, Iterator[_Waiter]] = {}
        while heap:
            due, _, tenant = heap[0]
            if tenant.due > due:  # one of its requests was served
                heapq.heapreplace(heap, (tenant.due, next(places), tenant))
                continue
            if tenant not in left:
                left[tenant] = iter(list(tenant.waiters))
            if (waiter := next(left[tenant], None)) is None:
                heapq.heappop(heap)
            elif waiter.result.done():
                self.remove(waiter)
            else:
                yield waiter

    def serve(self, waiter: _Waiter, cost: int) -> None:
        """Remove the request and charge its tenant."""
        tenant = self._tenants.pop(waiter.tenant)
        self._tenants[waiter.tenant] = tenant
        self._virtual_time = max(self._virtual_time, tenant.due)  # requests that were passed are due before it
        tenant.due += cost
        waiter.charged = cost
        self.remove(waiter)

    def refund(self, waiter: _Waiter) -> None:
        """The granted slot was not used: reverse the charge, but not to before ``_virtual_time``."""
        if waiter.tenant in self._idle_due:
            self._idle_due[waiter.tenant] -= waiter.charged
        elif (tenant := self._tenants.pop(waiter.tenant, None)) is not None:
            tenant.due = max(tenant.due - waiter.charged, self._virtual_time)
            self._tenants = {waiter.tenant: tenant, **self._tenants}

    def remove(self, waiter: _Waiter) -> None:
        """Idempotent."""
        tenant = self._tenants.get(waiter.tenant)
        if tenant is None or waiter not in tenant.waiters:
            return
        del tenant.waiters[waiter]
        if not tenant.waiters:
            del self._tenants[waiter.tenant]
            self._idle_due[waiter.tenant] = tenant.due
        if not self._tenants:
            self._idle_due.clear()
            self._virtual_time = 0
        elif len(self._idle_due) > MAX_IDLE_TENANTS:
            del self._idle_due[next(iter(self._idle_due))]


@dataclass(eq=False)
class _Tenant:
    """A tenant with waiting requests: its due time, and its requests in order of arrival."""

    due: int
    waiters: dict[_Waiter, None] = field(default_factory=dict)
