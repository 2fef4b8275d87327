"""An admission of the proxy with one engine, for tests of its queue."""

import asyncio

from vllm_kvtier.proxy.admission import Admission, Choice
from vllm_kvtier.proxy.config import EngineAddress, ProxyConfig
from vllm_kvtier.proxy.engines import Engine, Place

D = (EngineAddress("http://d:1"),)
REQUEST = 100  # request_tokens: what a turn costs beside its prompt


class Desk:
    """An admission with one D that has ``room``. ``order``: the names of those who got a place, as they got it."""

    def __init__(self, room=1, queue_limit=10_000):
        config = ProxyConfig(decode=D, engine_requests=room, queue_limit=queue_limit, request_tokens=REQUEST)
        self.admission = Admission(config, ("prefill", "decode"))
        self.engine = Engine("decode", 0, D[0], config)
        self.engine.on_left = lambda engine: self.admission.left("decode")
        self.order: list[str] = []
        self.inside: list[Place] = []

    def enter(self, name: str, tokens=0, seconds=1000.0, role="decode") -> asyncio.Task:
        """The tenant is the name's first letter."""

        def choose() -> Choice | None:
            return None if self.engine.drained else Choice(None if self.engine.full else self.engine, tokens)

        async def entering() -> Place | None:
            place = await self.admission.enter(role, name[0].encode(), choose, seconds)
            if place is not None:
                self.order.append(name)
                self.inside.append(place)
            return place

        return asyncio.create_task(entering())

    async def full(self, *names: str, tokens=0) -> list[asyncio.Task]:
        """Somebody else has the only place; ``names`` wait in this order."""
        self.enter("-")
        await turns()
        tasks = [self.enter(name, tokens) for name in names]
        await turns()
        self.order.clear()
        return tasks

    async def free(self, count=1) -> str:
        """Free the place so many times; who got it, one letter each."""
        before = len(self.order)
        for _ in range(count):
            self.inside.pop(0).leave()
            await turns()
        return "".join(name[0] for name in self.order[before:])


async def turns(count=5):
    for _ in range(count):
        await asyncio.sleep(0)
