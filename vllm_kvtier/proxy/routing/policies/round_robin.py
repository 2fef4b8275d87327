"""``round_robin``: engines in rotation, by weight."""

from vllm_kvtier.proxy.engines.engine import Engine
from vllm_kvtier.proxy.routing.policies.least_load import LeastLoad


class RoundRobin(LeastLoad):
    """Ignores prompts and load, for comparisons: the router takes the engine with the fewest picks of equal ones."""

    name = "round_robin"

    def queued(self, engine: Engine, request_cost: int) -> float:
        return 0.0
