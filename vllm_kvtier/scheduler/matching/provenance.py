"""Which requests may load and share KV: those whose weights and adapter are identified, and whose KV is that of their
tokens.

These are *admitted*. All others are *private*: this engine computes them alone, asks no source for them, and neither
stores, exports nor shares their KV. The KV of an admitted request with a LoRA adapter is shared when the request has
ended: only then is it known whether the adapter's files were replaced meanwhile (see ``adapters``). On vLLM's scheduler
thread only.
"""

from collections.abc import Callable
from typing import Any

from vllm_kvtier.logs import get_logger
from vllm_kvtier.scheduler.matching.request_state import RequestState
from vllm_kvtier.vllm_compat import requests as vr
from vllm_kvtier.vllm_compat.adapters import ADAPTERS, AWAITED
from vllm_kvtier.vllm_compat.hooks.block_pool import BlockPool

logger = get_logger(__name__)


class Provenance:
    def __init__(
        self,
        pool: BlockPool,
        prefix_caching: bool = True,
        encoder_is_empty: Callable[[], bool] | None = None,
        keeps_sessions: bool = True,
    ):
        """``prefix_caching``: vLLM's own; without it no request gets what another one computed, but for the outputs of
        a multimodal model's encoder. ``keeps_sessions``: as of ``EngineInfo``."""
        self._keeps_sessions = keeps_sessions
        self._pool, self._prefix_caching, self._encoder_is_empty = pool, prefix_caching, encoder_is_empty
        # By id, of requests that have been matched and have not ended: their adapter, or True without one; None:
        # private. A request whose matching failed is not in it, and so not shared.
        self._admitted: dict[str, Any] = {}
        # The weights were changed, and vLLM's caches may still have something of the old ones.
        self._stale = False
        ADAPTERS.engines.add(self)
        if prefix_caching or encoder_is_empty is not None:
            ADAPTERS.caches.add(self)

    def admit(self, request: Any, identified: bool) -> bool | None:
        """Whether this request, which is to be matched, is admitted; None: not known yet. ``identified``: the engine's
        weights are."""
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
        private = self._stale or (request.resumable and not self._keeps_sessions)
        good = identified and not private and (lora is None or adapter is not None)
        if good and adapter is not None and adapter.digest is not None:
            vr.keep_variant(request, adapter.digest)
        self._admitted[request_id] = (adapter or True) if good else None
        return good

    def refuse(self, request: Any) -> None:
        """Make the request private, whatever it was before."""
        self._admitted[request.request_id] = None
        if request.lora_request is not None:
            ADAPTERS.unseen(request.lora_request)

    def would_admit(self, request: Any) -> bool:
        """Whether this request, which waits to be matched, would be admitted now."""
        private = self._stale or (request.resumable and not self._keeps_sessions)
        return not private and vr.lora_fingerprint(request) is not None

    def is_admitted(self, state: RequestState) -> bool:
        return self._admitted.get(state.request.request_id) is not None

    def may_share(self, state: RequestState) -> bool:
        """Whether the KV of this request, which runs, may be shared now."""
        return self.is_admitted(state) and state.request.lora_request is None

    def remove(self, request: Any) -> bool:
        """The request ended. Returns whether its KV may be shared."""
        before, lora = self._admitted.pop(request.request_id, None), request.lora_request
        if lora is None:
            return before is not None
        # In any case, because its KV stays in vLLM's prefix cache.
        return ADAPTERS.confirm(lora, before) and vr.kept_well(request)

    def weights_changing(self) -> None:
        """Until ``weights_changed`` all requests are private."""
        self._stale = True
        self._admitted = dict.fromkeys(self._admitted)

    def weights_changed(self) -> None:
        """The weights were changed, and ``KVTierConnectorScheduler.reset`` was called."""
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
