"""Sleep mode: when vLLM takes the KV cache's memory away, and when it is there again.

vLLM 0.33 tells its connector. Before, the methods by which a worker does it are wrapped, so that the same calls come at
the same moments: before the memory goes, and when it is back.
"""

import functools
import inspect
import weakref
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

_TAG = "kv_cache"  # vLLM's name for that memory


class Follower(Protocol):
    """As vLLM's connector from 0.33 on. Both are idempotent."""

    def unregister_kv_caches(self) -> None: ...

    def restore_kv_caches(self) -> None: ...


# Of this process: an engine core without worker processes may have several engines' connectors.
_followers: "weakref.WeakSet[Follower]" = weakref.WeakSet()


def possible(vllm_config: Any) -> bool:
    """Whether the cache's memory may be taken away: it comes from the allocator that can."""
    model = vllm_config.model_config
    flags = [name for name in ("enable_sleep_mode", "enable_cumem_allocator") if hasattr(model, name)]  # 0.30: two
    return any(getattr(model, name) for name in flags)


def untold(vllm_config: Any) -> str | None:
    """Why this vLLM cannot be followed into sleep; None if it can."""
    if _told_by_vllm():
        return None
    worker = _worker_class(vllm_config)
    for name, parameter in (("sleep", "level"), ("wake_up", "tags")):
        method = getattr(worker, name, None)
        if method is None or parameter not in inspect.signature(method).parameters:
            return f"sleep mode: {worker.__name__} has no {name}({parameter}), by which it would be followed"
    return None


def follow(vllm_config: Any, follower: Follower) -> None:
    """In a worker's process, where ``untold`` gave None: ``follower`` is told from now on, as long as it lives."""
    if _told_by_vllm():
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


def _told_by_vllm() -> bool:
    """The interface has this method in the releases that call it (0.33)."""
    return hasattr(KVConnectorBase_V1, "restore_kv_caches")


def _worker_class(vllm_config: Any) -> type:
    """The worker's, which vLLM may extend when it makes one; what is set here is found first all the same."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls)
