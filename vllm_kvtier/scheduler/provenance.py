"""Which requests' KV is known to be what its name says: made from the first token on by weights that have a name.

These are *admitted*. All others are *private*: computed by this engine alone; nothing is asked for them, and nothing
that they wrote is stored, exported or shared. What an admitted request with a LoRA adapter wrote is kept back until it
has ended, when it is known whether its adapter's files were replaced meanwhile (see ``adapters``). On the scheduler's
thread only.
"""

from collections.abc import Callable
from typing import Any

from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.tracked import Tracked
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.adapters import ADAPTERS, AWAITED
from vllm_kvtier.vllm_compat.blocks import BlockPool

logger = get_logger("vllm.kvtier.provenance")


class Provenance:
    def __init__(
        self, pool: BlockPool, prefix_caching: bool = True, encoder_is_empty: Callable[[], bool] | None = None
    ):
        """``prefix_caching``: vLLM's own; without it no request gets what another one computed, but for the outputs of
        a multimodal model's encoder."""
        self._pool, self._prefix_caching, self._encoder_is_empty = pool, prefix_caching, encoder_is_empty
        # By id, of requests that have been matched and have not ended: their adapter, or True without one; None:
        # private for life. What failed on the way here is not in it, and so not shared.
        self._admitted: dict[str, Any] = {}
        # The weights were changed, and vLLM's caches may still have something of the old ones.
        self._stale = False
        ADAPTERS.engines.add(self)
        if prefix_caching or encoder_is_empty is not None:
            ADAPTERS.caches.add(self)

    def admits(self, request: Any, named: bool) -> bool | None:
        """Whether this request, which is to be matched, is not private. ``named``: whether the engine's weights have a
        name by now. None: it is known in a moment."""
        request_id, lora = request.request_id, request.lora_request
        if request_id in self._admitted:
            before = self._admitted[request_id]
            if before is None or (lora is not None and ADAPTERS.current(lora) is not before):
                self.refuse(request)
            return self._admitted[request_id] is not None
        # Whatever becomes of the request: its workers may load the adapter for it.
        adapter = ADAPTERS.admit(lora) if lora is not None else None
        if adapter is AWAITED:
            return None
        good = named and not self._stale and (lora is None or adapter is not None)
        if good and lora is not None:
            vr.keep_variant(request, adapter.digest)
        self._admitted[request_id] = (adapter or True) if good else None
        return good

    def refuse(self, request: Any) -> None:
        """It is computed here, whatever it was before."""
        self._admitted[request.request_id] = None
        if request.lora_request is not None:
            ADAPTERS.unseen(request.lora_request)

    def foresees(self, request: Any) -> bool:
        """Whether this request, which waits to be matched, would be admitted now."""
        return not self._stale and vr.variant(request) is not None

    def admitted(self, t: Tracked) -> bool:
        return self._admitted.get(t.request.request_id) is not None

    def shares(self, t: Tracked) -> bool:
        """Whether what this request, which runs, has written is what its name says."""
        return self.admitted(t) and t.request.lora_request is None

    def forget(self, request: Any) -> bool:
        """The request ended; whether what it wrote is what its name says."""
        before, lora = self._admitted.pop(request.request_id, None), request.lora_request
        if lora is None:
            return before is not None
        # Whatever it is, and however it ended: what it wrote stays in vLLM's prefix cache.
        return ADAPTERS.confirm(lora, before) and vr.ended_well(request)

    def weights_changing(self) -> None:
        """Until ``weights_changed`` everything is private, whatever happens in between."""
        self._stale = True
        self._admitted = dict.fromkeys(self._admitted)

    def weights_changed(self) -> None:
        """The change is over, and what was shared is given up."""
        self._stale = not self._is_empty()
        if self._stale:
            logger.warning(
                "kvtier: the weights were changed while vLLM's prefix cache%s holds KV of the old ones: KV is neither "
                "loaded nor stored until it is reset", "" if self._encoder_is_empty is None else " or encoder cache",
            )  # fmt: skip

    def after_reset(self) -> None:
        """vLLM has reset its prefix cache or its encoder's, or has failed to."""
        if self._is_empty():
            self._stale = False
            ADAPTERS.cache_is_empty(self)

    def _is_empty(self) -> bool:
        """Both at once: either fills the other again."""
        pool_is_empty = not self._prefix_caching or self._pool.is_empty()
        return pool_is_empty and (self._encoder_is_empty is None or self._encoder_is_empty())
