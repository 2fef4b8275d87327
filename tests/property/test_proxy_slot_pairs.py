"""Requests that need a prefill and a decode engine, in random order: none holds one slot while it waits for the other,
and none waits that could go on."""

import asyncio
import random
import time
from types import SimpleNamespace

import pytest
from proxy_queue_harness import run_loop

from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.core import ProxyCore
from vllm_kvtier.proxy.routes.engine_request import Refusals
from vllm_kvtier.proxy.routes.generation import Generation
from vllm_kvtier.proxy.routing.conversations import Name
from vllm_kvtier.proxy.routing.prompt import Prompt

ROUTE = "/v1/chat/completions"
STEPS = ("end", "prefilled", "leave", "fail", "recover"), (10, 10, 2, 1, 2)


class Request(Generation):
    """Only takes its slots."""

    def __init__(self, core, tenant, model, needs_prefill):
        self._core, self._config, self._tenant, self._trace = core, core.config, tenant.encode(), {}
        self._refusals, self._asked, self._route = Refusals(), {}, None
        self._refusals.wants = ROUTE, model
        self._prompt = Prompt(Name((), None, False), 10, wants=self._refusals.wants)
        self._request = SimpleNamespace(can_prefill_elsewhere=needs_prefill, prompt_chars=100)
        self.needs_prefill, self.slots = needs_prefill, []

    async def run(self):
        self.slots = [slot for slot in await self._slots(time.monotonic() + 1000) if slot is not None]

    def could_go(self) -> bool:
        router = self._core.router
        decode = router.choose_decode(self._prompt, None, False)
        prefill = router.choose_prefill(self._prompt) if self.needs_prefill else None
        return (decode is None or decode.engine is not None) and (prefill is None or prefill.engine is not None)


class World:
    """Engines P0 with models a and b, P1 with b; D0 with a, D1 with b, D2 with both."""

    def __init__(self, limits):
        roles = {"prefill": limits[:2], "decode": limits[2:]}
        engines = {
            role: tuple(EngineAddress(f"http://{role}:{i + 1}", max_requests=n) for i, n in enumerate(of_role))
            for role, of_role in roles.items()
        }
        self.core = ProxyCore(ProxyConfig(backoff_initial=1000, backoff_max=1000, **engines), probe_on_start=False)
        (self.p0, self.p1), (self.d0, self.d1, _) = self.core.prefill, self.core.decode
        for engine, model in ((self.p1, "a"), (self.d0, "b"), (self.d1, "a")):
            engine.lacking.add((ROUTE, model))
        self.requests: list[Request] = []
        self.tasks: dict[Request, asyncio.Task] = {}

    def arrive(self, tenant, model, needs_prefill):
        request = Request(self.core, tenant, model, needs_prefill)
        self.requests.append(request)
        self.tasks[request] = asyncio.create_task(request.run())
        return request

    def waiting(self):
        return [request for request, task in self.tasks.items() if not task.done()]

    def running(self):
        return [request for request in self.requests if request.slots]

    def do(self, what, number):
        engine = (self.p0, self.p1, self.d0, self.d1)[number % 4]
        if what == "fail":
            engine.mark_unavailable("It failed.")
        elif what == "recover":
            engine.succeeded()
        elif chosen := self.waiting() if what == "leave" else self.running():
            request = chosen[number % len(chosen)]
            if what == "leave":
                self.tasks[request].cancel()
            if what == "prefilled":
                request.slots[0].release()
            else:
                self.end(request)

    def end(self, request):
        for slot in request.slots:
            slot.release()
        request.slots = []

    def check(self):
        held = [slot.engine for request in self.requests for slot in request.slots if slot._held]
        for engine in self.core.fleet:
            assert engine.outstanding == held.count(engine) <= engine.limit
            if engine.keeper is not None:
                assert engine.role == "decode" and self.waiting()
                assert self.core.router.choose_prefill(engine.keeper._prompt).engine is None
        assert not any(request.could_go() for request in self.waiting())


@pytest.mark.parametrize("seed", range(40))
def test_request_that_waits_holds_no_slot_and_goes_on_once_it_can(seed):
    rng = random.Random(seed)

    async def run():
        world = World([rng.randint(1, 2) for _ in range(5)])
        for _ in range(300):
            if rng.random() < 0.4 and len(world.waiting()) < 8:
                world.arrive(rng.choice("tu"), rng.choice("ab"), rng.random() < 0.7)
            else:
                world.do(*rng.choices(*STEPS), rng.randrange(1000))
            if rng.random() < 0.7:  # else more happens at the same moment
                await run_loop()
                world.check()
        for engine in world.core.fleet:
            engine.succeeded()
        while world.running():
            world.do("end", 0)
            await run_loop()
            world.check()
        assert not world.waiting() and not any(engine.keeper for engine in world.core.fleet)
        await world.core.aclose()

    asyncio.run(run())


def test_request_that_is_first_gets_both_slots_though_they_are_never_free_at_once():
    """The prefill engine is full with requests for another decode engine, and this one with such as need no prefill."""

    async def run():
        world = World([1, 1, 1, 1, 1])
        world.core.prefill[1].drained = world.core.decode[2].drained = True
        world.arrive("t", "a", False)
        request = world.arrive("t", "a", True)
        world.arrive("t", "b", True)
        await run_loop()
        for _ in range(3):
            world.arrive("u", "a", False)
            world.arrive("u", "b", True)
        await run_loop()
        assert len(world.running()) == 2 and not request.slots
        for _ in range(3):
            for model in "ab":
                for other in world.running():
                    if other is not request and other._refusals.wants[1] == model:
                        world.end(other)
            await run_loop()
            world.check()
        assert request.slots
        for task in world.tasks.values():
            task.cancel()
        await world.core.aclose()

    asyncio.run(run())
