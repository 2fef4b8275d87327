"""Local hits that attention alone has, of models with recurrent states. On vLLM's scheduler thread.

vLLM's prefix cache has the attention blocks of all tokens, and few states: a request begins where both are. From a
connector with ``supports_divergent_local_hybrid_hits`` vLLM (0.32 on) expects, for any request, the state behind
attention's hit. But this package knows one source that certainly has a state farther on: a prefill engine's hand-off.
A store may have the last one before attention's hit, which would be lost. So only requests with a hand-off get
attention's hit. If nothing comes, vLLM itself goes back to what all groups have.
"""

from collections.abc import Callable
from typing import Any


def limit(manager: Any, longest: Callable[[Any], int]) -> None:
    """Make the scheduler's KV cache manager answer with attention's hit only up to ``longest(request)`` tokens (0: not
    at all), and else with the hit of all groups."""
    of_attention, of_all = manager.get_computed_blocks_for_connector, manager.get_computed_blocks

    def get_computed_blocks_for_connector(request: Any, *args: Any, **kwargs: Any) -> tuple[Any, int, int, bool]:
        # 0.33 has one more argument: how many tokens may be hit at most.
        most = longest(request)
        if most > 0:
            found = of_attention(request, *args, **kwargs)
            if found[1] <= most:
                return found
        return (*of_all(request, *args, **kwargs), False)

    manager.get_computed_blocks_for_connector = get_computed_blocks_for_connector
