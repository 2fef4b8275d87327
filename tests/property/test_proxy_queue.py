"""The proxy's queue against a model: random arrivals, departures, time limits and released slots."""

import asyncio
import gc

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from proxy_queue_harness import ProxyQueue, run_loop

from vllm_kvtier.proxy.routing.admission import QueueFull

LIMIT, MAX_ROOM, SECONDS = 4, 2, 6.0
QUARTERS = st.integers(2, 24).map(lambda n: n / 4)  # seconds; sums of others may end just before a time limit


class Request:
    """``outcome``: the result by the model."""

    def __init__(self, number: int, tenant: str, until: float):
        self.number, self.tenant, self.until = number, tenant, until
        self.outcome = "waits"
        self.task: asyncio.Task


class Tenants(RuleBasedStateMachine):
    """All requests cost the same, so that tenants are served round-robin: a served or a new tenant goes to the end.
    Only rules move the loop's clock."""

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.now = 1000.0
        self.loop.time = lambda: self.now
        self.troubles: list[dict] = []
        self.loop.set_exception_handler(lambda loop, context: self.troubles.append(context))
        self.queue = ProxyQueue(MAX_ROOM, LIMIT)
        self.room = MAX_ROOM
        self.requests: list[Request] = []
        self.round: list[str] = []
        self.inside: list[Request] = []

    def teardown(self):
        for request in self.requests:
            request.task.cancel()
        self._run()
        for request in self.requests:
            if not request.task.cancelled():
                request.task.exception()
        gc.collect(0)
        self._run()
        self.loop.close()
        assert not self.troubles

    @initialize(room=st.integers(1, MAX_ROOM))
    def begin(self, room):
        self.room = self.queue.engine.limit = room

    # -- the model

    def _waiting(self, tenant: str | None = None) -> list[Request]:
        return [r for r in self.requests if r.outcome == "waits" and tenant in (None, r.tenant)]

    def _out(self, request: Request, outcome: str) -> None:
        request.outcome = outcome
        if not self._waiting(request.tenant):
            self.round.remove(request.tenant)

    def _serve(self) -> None:
        while self.round and len(self.inside) < self.room:
            tenant = self.round[0]
            request = self._waiting(tenant)[0]
            self._out(request, "inside")
            self.inside.append(request)
            if self._waiting(tenant):
                self.round.append(self.round.pop(0))

    def _enters(self, tenant: str, leaving: Request | None = None) -> Request | None:
        """``leaving``: cancelled, but still in the queue. Returns the displaced request."""
        request = Request(len(self.requests), tenant, self.now + SECONDS)
        waiting, displaced = self._waiting(), None
        if not waiting and len(self.inside) < self.room:
            request.outcome = "inside"
            self.inside.append(request)
        elif len(waiting) >= LIMIT:
            counts = {name: len(self._waiting(name)) for name in self.round}
            most = max(counts.values())
            if counts.get(tenant, 0) == most:
                request.outcome = "refused"
            elif leaving is not None and counts[leaving.tenant] == most:
                self._out(leaving, "cancelled")
            else:
                displaced = [r for r in waiting if counts[r.tenant] == most][-1]
                self._out(displaced, "displaced")
        if request.outcome == "waits" and tenant not in self.round:
            self.round.append(tenant)
        self.requests.append(request)
        if leaving is not None and leaving.outcome == "waits":
            self._out(leaving, "cancelled")
        return displaced

    def _time_is_over(self) -> None:
        for request in self._waiting():
            if request.until <= self.now:
                self._out(request, "late")

    # -- both

    def _run(self) -> None:
        self.loop.run_until_complete(run_loop(12))

    def _begin(self, cancelled_before: Request | None = None, cancelled_after: Request | None = None) -> None:
        """The latest request comes; one is cancelled just before that, or just after, and does not know it yet."""

        async def begin():
            request = self.requests[-1]
            request.task = self.queue.enter(f"{request.tenant}{request.number}", seconds=SECONDS)
            if cancelled_before is not None:
                cancelled_before.task.cancel()
            await asyncio.sleep(0)
            if cancelled_after is not None:
                cancelled_after.task.cancel()

        self.loop.run_until_complete(begin())

    def _leave(self, index: int) -> Request | None:
        """Release a slot in both; the model's request gets it."""
        gone = self.inside.pop(index % len(self.inside))
        gone.outcome = "gone"
        before = list(self.inside)
        self._serve()
        gone.task.result().release()
        return next((r for r in self.inside if r not in before), None)

    @rule(tenants=st.lists(st.sampled_from("aabc"), min_size=1, max_size=4))
    def enter(self, tenants):
        for tenant in tenants:
            self._enters(tenant)
            self._begin()
            self._run()

    @rule(tenant=st.sampled_from("abc"))
    def enter_in_place_of_one_that_cancels(self, tenant):
        if displaced := self._enters(tenant):
            displaced.outcome = "cancelled"
        self._begin(cancelled_after=displaced)

    @rule(tenant=st.sampled_from("abc"), index=st.integers(0, LIMIT))
    def enter_while_one_is_leaving(self, tenant, index):
        waiting = self._waiting()
        leaving = waiting[index % len(waiting)] if waiting else None
        self._enters(tenant, leaving)
        self._begin(cancelled_before=leaving)

    @rule(count=st.integers(1, 3), index=st.integers(0, MAX_ROOM))
    def leave(self, count, index):
        for _ in range(count):
            if self.inside:
                self._leave(index)
                self._run()

    @rule(index=st.integers(0, MAX_ROOM))
    def leave_to_one_that_cancels(self, index):
        """It loses its place as it gets it; its tenant does not lose its turn."""
        if self.inside and self.round:
            order = list(self.round)
            lost = self._leave(index)
            lost.task.cancel()
            self.inside.remove(lost)
            lost.outcome = "cancelled"
            self.round = [tenant for tenant in order if self._waiting(tenant)]
            self._serve()

    @rule(index=st.integers(0, LIMIT))
    def cancel(self, index):
        if waiting := self._waiting():
            request = waiting[index % len(waiting)]
            request.task.cancel()
            self._out(request, "cancelled")

    @rule(seconds=QUARTERS)
    def wait(self, seconds):
        self.now += seconds
        self._time_is_over()

    @rule(seconds=QUARTERS, index=st.integers(0, MAX_ROOM))
    def leave_late(self, seconds, index):
        """Some requests have timed out but not left yet, and one of them gets a slot."""
        self.now += seconds
        if self.inside:
            self._leave(index)
        self._time_is_over()

    @rule()
    def drain(self):
        self.queue.engine.drained = True
        self.queue.admission.serve_waiting("decode")
        self.queue.engine.drained = False
        for request in self._waiting():
            self._out(request, "nobody")

    @invariant()
    def as_the_model_says(self):
        self._run()
        for request in self.requests:
            outcome = request.outcome
            assert (outcome == "waits") == (not request.task.done()), (outcome, request.tenant)
            if outcome == "waits":
                continue
            assert request.task.cancelled() == (outcome == "cancelled"), outcome
            if outcome == "cancelled":
                continue
            error = request.task.exception()
            if outcome in ("inside", "gone", "nobody"):
                assert error is None and (request.task.result() is None) == (outcome == "nobody"), (outcome, error)
            else:
                assert isinstance(error, QueueFull) and error.displaced == (outcome == "displaced"), outcome
                assert ("in time" in str(error)) == (outcome == "late")
        assert self.queue.engine.outstanding == len(self.inside) <= self.room
        assert self.queue.admission.waiting("decode") == len(self._waiting()) <= LIMIT
        assert not self.round or len(self.inside) == self.room


TestTenants = Tenants.TestCase
