"""Which requests' KV is known to be what its name says: made from the first token on by weights that have a name.

These are *admitted*. All others are *private*: computed by this engine alone; nothing is asked for them, and nothing
that they wrote is stored, exported or shared. On the scheduler's thread only.
"""

from typing import Any

from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.adapters import ADAPTERS
from vllm_kvtier.vllm_compat.blocks import BlockPool

logger = get_logger("vllm.kvtier.provenance")


class Provenance:
    def __init__(self, pool: BlockPool, prefix_caching: bool = True):
        """``prefix_caching``: vLLM's own; without it no request gets what another one computed."""
        self._pool, self._prefix_caching = pool, prefix_caching
        # By id, of requests that have been matched and have not ended; None: private for life. What failed on the way
        # here is not in it, and so not shared.
        self._admitted: dict[str, Any | None] = {}
        # The weights were changed, and vLLM's prefix cache may still have KV of the old ones.
        self._stale = False
        ADAPTERS.listeners.add(self)

    def admits(self, request: Any, named: bool) -> bool | None:
        """Whether this request, which is to be matched, is not private. ``named``: whether the engine's weights have a
        name by now. None: it is known in a moment."""
        request_id = request.request_id
        if request_id in self._admitted:
            return self._admitted[request_id] is not None
        if named and not self._stale:
            if vr.variant(request) is not None:
                self._admitted[request_id] = request
                return True
            if ADAPTERS.awaited(request.lora_request):
                return None
        self._admitted[request_id] = None
        return False

    def refuse(self, request: Any) -> None:
        """It is computed here, whatever it was before."""
        self._admitted[request.request_id] = None

    def foresees(self, request: Any) -> bool:
        """Whether this request, which waits to be matched, would be admitted now."""
        return not self._stale and vr.variant(request) is not None

    def shares(self, t: Tracked) -> bool:
        return self._admitted.get(t.request.request_id) is not None

    def forget(self, request_id: str) -> bool:
        """The request ended; whether it was shared."""
        return self._admitted.pop(request_id, None) is not None

    def weights_changing(self) -> None:
        """Until ``weights_changed`` everything is private, whatever happens in between."""
        self._stale = True
        self._admitted = dict.fromkeys(self._admitted)

    def weights_changed(self) -> None:
        """The change is over, and what was shared is given up."""
        self._stale = self._prefix_caching and not self._pool.is_empty()
        if self._stale:
            logger.warning(
                "kvtier: the weights were changed while vLLM's prefix cache holds KV of the old ones: KV is neither "
                "loaded nor stored until it is reset"
            )

    def adapter_replaced(self, int_id: int) -> None:
        for request_id, request in self._admitted.items():
            if request is not None and request.lora_request is not None and request.lora_request.lora_int_id == int_id:
                self._admitted[request_id] = None

    def after_reset(self) -> None:
        """vLLM has reset its prefix cache, or has failed to."""
        if self._pool.is_empty():
            self._stale = False
            ADAPTERS.cache_is_empty()
