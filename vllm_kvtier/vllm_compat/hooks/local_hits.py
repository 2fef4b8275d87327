"""Local hits that attention alone has, of models with recurrent states. On vLLM's scheduler thread.

vLLM's prefix cache has the attention blocks of all tokens, and few states: a request begins where both are. From a
connector with ``supports_divergent_local_hybrid_hits`` vLLM (0.32 on) expects, for any request, the state behind
attention's hit. But this package knows one source that certainly has a state farther on: a prefill engine's hand-off.
A store may have the last one before attention's hit, which would be lost. So only requests with a hand-off get
attention's hit. If nothing comes, vLLM itself goes back to what all groups have.

vLLM before 0.27 does not: see ``require_all_groups``.
"""

from collections.abc import Callable
from typing import Any

from vllm_kvtier.errors import UnsupportedVLLM
from vllm_kvtier.vllm_compat.probe import trials
from vllm_kvtier.vllm_compat.probe.features import granted, refused
from vllm_kvtier.vllm_compat.probe.row import Feature
from vllm_kvtier.vllm_compat.version import SUPPORTED, installed_version


def require_all_groups(kv_cache_config: Any) -> None:
    """Have requests begin where all groups are, also on vLLM before 0.27. There a scheduler that has a connector, and a
    HybridKVCacheCoordinator for the prefix cache, begins behind attention's hit, whatever the connector answers: states
    are missing, and prompt logprobs of what was hit. Else it does as without a connector.

    Raises UnsupportedVLLM for a model with states if a scheduler that does so differs from the expected one.
    """
    if granted(Feature.STATE_HITS):
        if trials.begins_behind_attention():
            from vllm.v1.core.sched import scheduler

            scheduler.HybridKVCacheCoordinator = ()  # nothing is an instance of it
        return
    from vllm.v1.kv_cache_interface import MambaSpec

    if any(isinstance(group.kv_cache_spec, MambaSpec) for group in kv_cache_config.kv_cache_groups):
        raise UnsupportedVLLM(
            f"with any connector, vLLM {installed_version()} would compute wrong answers of this model: it goes on "
            f"without recurrent states ({refused(Feature.STATE_HITS)}). Leave out --kv-transfer-config, or use a vLLM "
            f"that this package was tested with ({SUPPORTED})."
        )


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
