"""The proxy's admission with one engine, for tests of its queue."""

import asyncio

from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.engines.engine import Engine, EngineSlot
from vllm_kvtier.proxy.engines.engine_http import Secrets
from vllm_kvtier.proxy.routing.admission import Admission, Choice

D = (EngineAddress("http://d:1"),)
REQUEST = 100  # request_cost_tokens: the cost of a request in addition to its prompt


class ProxyQueue:
    """An admission with one decode engine of ``room`` slots. ``order``: names in the order in which they got a slot."""

    def __init__(self, room=1, queue_limit=10_000):
        config = ProxyConfig(decode=D, engine_requests=room, queue_limit=queue_limit, request_cost_tokens=REQUEST)
        self.admission = Admission(config, ("prefill", "decode"))
        self.engine = Engine("decode", 0, D[0], config, Secrets())
        self.engine.on_request_end = lambda engine: self.admission.request_ended("decode")
        self.order: list[str] = []
        self.inside: list[EngineSlot] = []

    def enter(self, name: str, tokens=0, seconds=1000.0, role="decode") -> asyncio.Task:
        """The tenant is the name's first letter."""

        def choose() -> Choice | None:
            return None if self.engine.drained else Choice(None if self.engine.full else self.engine, tokens)

        async def acquire() -> EngineSlot | None:
            slot = await self.admission.acquire(role, name[0].encode(), choose, seconds)
            if slot is not None:
                self.order.append(name)
                self.inside.append(slot)
            return slot

        return asyncio.create_task(acquire())

    async def full(self, *names: str, tokens=0) -> list[asyncio.Task]:
        """Another request has the only slot; ``names`` wait in this order."""
        self.enter("-")
        await run_loop()
        tasks = [self.enter(name, tokens) for name in names]
        await run_loop()
        self.order.clear()
        return tasks

    async def free(self, count=1) -> str:
        """Free the slot ``count`` times; returns the tenants that got it, one letter each."""
        before = len(self.order)
        for _ in range(count):
            self.inside.pop(0).release()
            await run_loop()
        return "".join(name[0] for name in self.order[before:])


async def run_loop(count=5):
    for _ in range(count):
        await asyncio.sleep(0)
