"""The contract of a routing policy."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from vllm_kvtier.proxy.engines.engine import Engine
from vllm_kvtier.proxy.kv_events.feeds import KVEvents
from vllm_kvtier.proxy.routing.prefixes import PrefixMemory
from vllm_kvtier.proxy.routing.prompt import Prompt


class Expected(NamedTuple):
    """What a prompt needs at an engine. ``uncached``: tokens to compute. ``cost``: until its first token, without the
    requests before it; in tokens to compute, so that loading counts by its share."""

    uncached: int
    cost: float


class RoutingPolicy(ABC):
    """Says what a prompt costs at each engine, and what the requests before it cost; the router takes the cheapest.

    ``name``: of the option ``routing_policy``. ``reads_tokens``: it wants the prompt's token ids.
    """

    name: ClassVar[str]
    reads_tokens: ClassVar[bool] = False

    def __init__(self, prefixes: PrefixMemory, events: KVEvents):
        self._prefixes = prefixes
        self._events = events

    @abstractmethod
    def expect(self, prompt: Prompt) -> Callable[[Engine], Expected]:
        """What the prompt needs at an engine. The result is used for one decision, at once."""

    def keeps_conversation(self, prompt: Prompt, prefilled: bool) -> bool:
        """Whether a conversation without an id stays on its decode engine within ``affinity_slack``, as one with an id
        does under any policy. ``prefilled``: a prefill engine computes the prompt."""
        return True

    def queued(self, engine: Engine, request_cost: int) -> float:
        """The cost of the requests under way there, before this one's first token, in tokens."""
        return (engine.tokens + engine.outstanding * request_cost) / (engine.weight or 1.0)
