"""What changes an engine's weights while it runs: calls of vLLM's engine core that reach its workers.

Trainers push weights by ``collective_rpc``: vLLM's own methods (``update_weights``, ``reload_weights``) and those of
worker extensions, of any name. So every method counts but those known to leave the weights alone. Sleep of level 2
throws them away. Either may change adapters as well. ``add_lora`` loads an adapter (see ``adapters``). Weights that are
changed in a worker without its engine core being called are not noticed: that takes a reset of the prefix cache, and of
the connector's with it.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from vllm_kvtier.logs import get_logger
from vllm_kvtier.vllm_compat.adapters import ADAPTERS

logger = get_logger("vllm.kvtier.weights")

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
        """Engine's thread, after the change."""

    def encoder_reset(self) -> None:
        """Engine's thread: vLLM has forgotten an encoder's outputs, which outlive a reset of the prefix cache."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(listener: Listener) -> None:
    """Of all engine cores of this process: to take one for another's is safe, to miss one is not."""
    from vllm.v1.engine.core import EngineCore

    _listeners.add(listener)
    for name, wrapped in (
        ("collective_rpc", _rpc), ("sleep", _sleep), ("add_lora", _add_lora), ("reset_encoder_cache", _reset_encoder),
    ):  # fmt: skip
        original = getattr(EngineCore, name)
        if not hasattr(original, _MARK):
            made = functools.wraps(original)(wrapped(original))
            setattr(made, _MARK, True)
            setattr(EngineCore, name, made)


def _tell(how: str) -> None:
    ADAPTERS.untold()
    for listener in list(_listeners):
        try:
            listener.weights_changed(how)
        except Exception:  # it has made everything private before anything that could fail
            logger.exception("kvtier: KV is neither loaded nor stored any more")


def _rpc(original: Callable[..., Any]) -> Callable[..., Any]:
    def collective_rpc(engine: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(engine, method, *args, **kwargs)
        finally:  # one that failed may have changed some
            if not (isinstance(method, str) and method in HARMLESS):
                _tell(method if isinstance(method, str) else repr(method)[:100])

    return collective_rpc


def _reset_encoder(original: Callable[..., Any]) -> Callable[..., Any]:
    def reset_encoder_cache(engine: Any) -> None:
        original(engine)
        for listener in list(_listeners):
            listener.encoder_reset()

    return reset_encoder_cache


def _sleep(original: Callable[..., Any]) -> Callable[..., Any]:
    def sleep(engine: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
        if level >= 2:
            _tell("sleep of level 2")
        return original(engine, level, *args, **kwargs)

    return sleep


def encoder_is_empty(scheduler: Any | None) -> bool:
    """Whether no outputs of a multimodal model's encoder are kept for other requests, as far as that can be told."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    manager = scheduler.encoder_cache_manager if scheduler is not None else None
    return type(manager) is EncoderCacheManager and not manager.cached


def _add_lora(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_lora(engine: Any, lora_request: Any) -> Any:
        return ADAPTERS.load(lora_request, lambda: original(engine, lora_request))

    return add_lora
