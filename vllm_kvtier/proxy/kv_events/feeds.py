"""The KV events of all engines: a subscriber for each publisher, and the measured cost of loading."""

import asyncio
from collections.abc import Iterator

import zmq.asyncio

from vllm_kvtier.proxy.config import ROLES, ProxyConfig
from vllm_kvtier.proxy.engines.engine import Engine
from vllm_kvtier.proxy.engines.fleet import Fleet
from vllm_kvtier.proxy.kv_events.index import BlockIndex
from vllm_kvtier.proxy.kv_events.load_costs import LoadCosts
from vllm_kvtier.proxy.kv_events.shared_blocks import SharedBlocks
from vllm_kvtier.proxy.kv_events.subscriber import EventSubscriber

_Address = tuple[str, str | None]


class KVEvents:
    """Empty until ``apply``, which starts and ends subscribers: all engines with ``events``, if the policy reads
    them."""

    def __init__(self, fleet: Fleet):
        self.load_costs = LoadCosts()
        self._fleet = fleet
        self._shared = SharedBlocks()
        self._context: zmq.asyncio.Context | None = None
        self._subscribers: dict[_Address, EventSubscriber] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._measuring: asyncio.Task[None] | None = None

    def __iter__(self) -> Iterator[EventSubscriber]:
        yield from self._subscribers.values()

    def index_of(self, engine: Engine) -> BlockIndex | None:
        """None: nothing is known of this engine's blocks."""
        events = engine.address.events
        subscriber = None if events is None else self._subscribers.get((events, engine.address.replay))
        return subscriber.index if subscriber is not None and subscriber.live else None

    def apply(self, config: ProxyConfig) -> None:
        addresses = [address for role in ROLES for address in getattr(config, role)]
        wanted: set[_Address] = set()
        if config.routing_policy == "kv_events":
            wanted = {(address.events, address.replay) for address in addresses if address.events is not None}
        for key in self._subscribers.keys() - wanted:
            self._end(self._subscribers.pop(key))
        for key in wanted - self._subscribers.keys():
            self._context = self._context or zmq.asyncio.Context()
            self._subscribers[key] = EventSubscriber(self._context, *key, BlockIndex(config.max_blocks, self._shared))
            self._subscribers[key].start()
        for subscriber in self:
            subscriber.index.capacity = config.max_blocks
        if wanted and self._measuring is None:
            self._measuring = asyncio.create_task(self.load_costs.measure(self._fleet), name="load costs")

    def _end(self, subscriber: EventSubscriber) -> None:
        async def end() -> None:
            await subscriber.aclose()
            subscriber.index.clear()  # of what the others may load

        task = asyncio.create_task(end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def aclose(self) -> None:
        if self._measuring is not None:
            self._measuring.cancel()
            await asyncio.wait([self._measuring])
        for subscriber in self:
            await subscriber.aclose()
        if self._ending:
            await asyncio.wait(self._ending)
        if self._context is not None:
            self._context.destroy(linger=0)
