"""Which requests' KV is known to be what its name says: made from the first token on by weights that have a name.

All others are *private*: computed by this engine alone; nothing is asked for them, and nothing that they wrote is
stored, exported or shared. On the scheduler's thread only.
"""

from typing import Any

from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.matching import Matcher
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.adapters import ADAPTERS
from vllm_kvtier.vllm_compat.blocks import BlockPool

logger = get_logger("vllm.kvtier.provenance")


class Provenance:
    def __init__(self, matcher: Matcher, pool: BlockPool):
        self._matcher, self._pool = matcher, pool
        self._private: set[str] = set()
        # The weights were changed, and vLLM's prefix cache may still have KV of the old ones.
        self._stale = False
        ADAPTERS.listeners.add(self)

    def admits(self, request: Any, named: bool) -> bool | None:
        """Whether this request, which is to be matched, is not private. ``named``: whether the engine's weights have a
        name by now. None: it is known in a moment."""
        if request.request_id in self._private:
            return False
        if named and not self._stale:
            if vr.variant(request) is not None:
                return True
            if ADAPTERS.awaited(request.lora_request):
                return None
        self._private.add(request.request_id)
        return False

    def foresees(self, request: Any) -> bool:
        """Whether this request, which waits to be matched, would be admitted now."""
        return not self._stale and vr.variant(request) is not None

    def shares(self, t: Tracked) -> bool:
        return t.request.request_id not in self._private

    def forget(self, request_id: str) -> bool:
        """The request ended; whether it was shared."""
        shared = request_id not in self._private
        self._private.discard(request_id)
        return shared

    def weights_changing(self) -> None:
        """Until ``weights_changed`` everything is private, whatever happens in between."""
        self._stale = True
        self._private.update(t.request.request_id for t in self._matcher.requests())

    def weights_changed(self) -> None:
        """The change is over, and what was shared is given up."""
        self._stale = not self._pool.is_empty()
        if self._stale:
            logger.warning(
                "kvtier: the weights were changed while vLLM's prefix cache holds KV of the old ones: KV is neither "
                "loaded nor stored until it is reset"
            )

    def adapter_replaced(self, int_id: int) -> None:
        for t in self._matcher.requests():
            lora = t.request.lora_request
            if lora is not None and lora.lora_int_id == int_id:
                self._private.add(t.request.request_id)

    def after_reset(self) -> None:
        """vLLM has reset its prefix cache, or has failed to."""
        if self._pool.is_empty():
            self._stale = False
            ADAPTERS.cache_is_empty()
