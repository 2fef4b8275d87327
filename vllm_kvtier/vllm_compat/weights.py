"""Reports changes of an engine's weights while it runs: calls of vLLM's engine core that reach its workers.

Trainers push weights by ``collective_rpc``: vLLM's own methods (``update_weights``, ``reload_weights``) and worker
extensions of any name. So every method counts except those known to leave the weights unchanged. Sleep of level 2 drops
them. Both may change adapters as well. ``add_lora`` loads an adapter (see ``adapters``). Weights that are changed in a
worker without a call of the engine core are not noticed: the user must reset the prefix cache, and the connector's with
it. On vLLM's scheduler thread.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from vllm_kvtier.logs import get_logger
from vllm_kvtier.vllm_compat.adapters import ADAPTERS

logger = get_logger(__name__)

# Methods of vLLM's workers, 0.25.1 to 0.33, that are called through the engine core and change no weights.
HARMLESS = {
    "check_health", "compute_weight_checksums", "get_encoder_timing_stats", "get_model_inspection", "list_loras",
    "init_weight_transfer_engine", "profile", "release_late_interaction_query_cache", "reset_encoder_cache",
    "reset_mm_cache", "save_sharded_state", "save_tensorized_model", "shutdown_weight_transfer_engine",
    "synchronize_device", "update_max_model_len",
}  # fmt: skip

_MARK = "_kvtier_weights"


class Listener(Protocol):
    def weights_changed(self, how: str) -> None:
        """Scheduler thread, after the change."""

    def encoder_reset(self) -> None:
        """Scheduler thread: vLLM dropped an encoder's outputs, which a reset of the prefix cache keeps."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(listener: Listener) -> None:
    """Report changes of all engine cores of this process: a report of another engine's change is safe, a missed one is
    not."""
    from vllm.v1.engine.core import EngineCore

    _listeners.add(listener)
    for name, wrapper in (
        ("collective_rpc", _rpc), ("sleep", _sleep), ("add_lora", _add_lora), ("reset_encoder_cache", _reset_encoder),
    ):  # fmt: skip
        original = getattr(EngineCore, name)
        if not hasattr(original, _MARK):
            setattr(EngineCore, name, _wrapped(original, wrapper))


def _wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """``wrapper`` gets ``original`` as a method of its engine core, then the arguments."""

    @functools.wraps(original)
    def wrapped(engine: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(functools.partial(original, engine), *args, **kwargs)

    setattr(wrapped, _MARK, True)
    return wrapped


def _report_change(how: str) -> None:
    ADAPTERS.clear_loaded()
    for listener in list(_listeners):
        try:
            listener.weights_changed(how)
        except Exception:  # the listener started a new namespace before anything that could fail
            logger.exception("kvtier: weights: handling their change failed; KV is no longer loaded or stored")


def _rpc(call: Callable[..., Any], method: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return call(method, *args, **kwargs)
    finally:  # a call that failed may have changed weights
        if not (isinstance(method, str) and method in HARMLESS):
            _report_change(method if isinstance(method, str) else repr(method)[:100])


def _reset_encoder(call: Callable[[], None]) -> None:
    call()
    for listener in list(_listeners):
        listener.encoder_reset()


def _sleep(call: Callable[..., Any], level: int = 1, *args: Any, **kwargs: Any) -> Any:
    if level >= 2:
        _report_change("sleep of level 2")
    return call(level, *args, **kwargs)


def _add_lora(call: Callable[[Any], Any], lora_request: Any) -> Any:
    return ADAPTERS.load(lora_request, lambda: call(lora_request))


def encoder_is_empty(scheduler: Any | None) -> bool:
    """Whether no outputs of a multimodal model's encoder are cached for other requests; False if unknown."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    manager = scheduler.encoder_cache_manager if scheduler is not None else None
    return type(manager) is EncoderCacheManager and not manager.cached
