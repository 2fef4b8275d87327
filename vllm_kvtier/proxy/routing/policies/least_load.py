"""``least_load``: the engine with the fewest requests under way, by weight."""

from collections.abc import Callable

from vllm_kvtier.proxy.engines.engine import Engine
from vllm_kvtier.proxy.routing.policies.base import Expected, RoutingPolicy
from vllm_kvtier.proxy.routing.prompt import Prompt


class LeastLoad(RoutingPolicy):
    """Ignores prompts, for comparisons."""

    name = "least_load"

    def expect(self, prompt: Prompt) -> Callable[[Engine], Expected]:
        return lambda engine: Expected(prompt.tokens, 0.0)

    def keeps_conversation(self, prompt: Prompt, prefilled: bool) -> bool:
        return False

    def queued(self, engine: Engine, request_cost: int) -> float:
        return engine.load
