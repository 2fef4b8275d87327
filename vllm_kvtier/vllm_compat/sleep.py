"""Sleep mode: calls the connector before vLLM takes the KV cache's memory away and after it is back.

vLLM 0.33 calls its connector itself. Before, this module wraps the worker's methods, so that the same calls come at the
same moments. On the model runner's thread.
"""

import functools
import inspect
import weakref
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

_TAG = "kv_cache"  # vLLM's name for that memory


class Follower(Protocol):
    """The methods of vLLM's connector from 0.33 on. Both are idempotent."""

    def unregister_kv_caches(self) -> None: ...

    def restore_kv_caches(self) -> None: ...


# All connectors of this process: without worker processes several engines may share it.
_followers: "weakref.WeakSet[Follower]" = weakref.WeakSet()


def possible(vllm_config: Any) -> bool:
    """Whether vLLM may take the cache's memory away: it comes from an allocator that can."""
    model = vllm_config.model_config
    return model.enable_sleep_mode or model.enable_cumem_allocator


def unsupported_reason(vllm_config: Any) -> str | None:
    """Why sleep mode of this vLLM is not supported; None if it is."""
    if _vllm_notifies():
        return None
    worker = _worker_class(vllm_config)
    for name, parameter in (("sleep", "level"), ("wake_up", "tags")):
        method = getattr(worker, name, None)
        if method is None or parameter not in inspect.signature(method).parameters:
            return f"sleep mode is not supported: {worker.__name__} has no {name}({parameter})"
    return None


def follow(vllm_config: Any, follower: Follower) -> None:
    """Call ``follower`` from now on, as long as it exists. In a worker's process, if ``unsupported_reason`` is None."""
    if _vllm_notifies():
        return
    _followers.add(follower)
    worker = _worker_class(vllm_config)
    for name in ("sleep", "discard", "wake_up"):
        method = getattr(worker, name, None)  # discard: 0.31 and 0.32
        if method is not None and not hasattr(method, "_kvtier_sleep"):
            setattr(worker, name, _wrapped(name, method))


def _wrapped(name: str, method: Any) -> Any:
    signature = inspect.signature(method)

    @functools.wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        tags = signature.bind(self, *args, **kwargs).arguments.get("tags")  # None: all
        if tags is not None and _TAG not in tags:
            return method(self, *args, **kwargs)
        if name != "wake_up":
            for follower in list(_followers):
                follower.unregister_kv_caches()
            return method(self, *args, **kwargs)
        result = method(self, *args, **kwargs)
        for follower in list(_followers):
            follower.restore_kv_caches()
        return result

    wrapped._kvtier_sleep = True
    return wrapped


def _vllm_notifies() -> bool:
    """Releases that call the connector (0.33) have this method in its interface."""
    return hasattr(KVConnectorBase_V1, "restore_kv_caches")


def _worker_class(vllm_config: Any) -> type:
    """The worker's class. vLLM may extend it later; methods set here are still found first."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls)
