"""``prefix_hash``: an engine has the prefixes that the proxy sent there before."""

from collections.abc import Callable

from vllm_kvtier.proxy.engines.engine import Engine
from vllm_kvtier.proxy.routing.policies.base import Expected, RoutingPolicy
from vllm_kvtier.proxy.routing.prefixes import Seen
from vllm_kvtier.proxy.routing.prompt import Prompt


class PrefixHash(RoutingPolicy):
    """Needs nothing of the engines. What they have evicted, or loaded for others, is not known."""

    name = "prefix_hash"

    def expect(self, prompt: Prompt) -> Callable[[Engine], Expected]:
        known = self._prefixes.known(prompt.name.pieces)

        def expected(engine: Engine) -> Expected:
            uncached = max(0, prompt.tokens - known.get(Seen.by(engine), 0))
            return Expected(uncached, uncached)

        return expected
