"""The kinds of KV cache groups (vLLM's ``KVCacheSpec``): one file a kind. Imports neither vLLM nor torch; any thread.

A kind says which blocks of a group exist when, which of them a prefix needs, and what a block's bytes are. All else
asks it; nothing compares names of kinds or looks for a window.

* Matching: ``store.index`` and the secondary tiers find the longest prefix for which every group has what it needs
  (``whole_prefix``, ``first_needed``), and so does ``scheduler.leases`` for other engines. ``scheduler.planner`` cuts a
  hit to what vLLM can take (``usable_tokens``, ``num_skipped_tokens``).
* Storing: ``scheduler.offload`` stores blocks that are still the request's own (``num_skipped_tokens``), behind their
  parents if a prefix needs all (``whole_prefix``); or those that vLLM's prefix cache names (``by_position``).
* Exporting: ``scheduler.leases.export_builder`` ends an export where every group has what a reader needs: of states
  that is not any token (``by_position``, ``lookup_tokens``).
* Free blocks: how many a request takes at most (``taken_blocks``), and a load (``CacheGroup.load_blocks``).
* Layout: ``vllm_compat.layout`` finds the kind of a specification by ``specs``, which also say what a cell holds:
  codecs encode cells whose contents are known. ``vllm_compat.worker_info`` asks how a block is divided over ranks
  (``split``).
* Reports: ``kvtier plan`` reads a model's configuration by ``layer_types``; reports and refusals have ``describe()``.

A specification that no kind names is refused for that engine. Groups that vLLM keeps no prefixes for are left out
(``vllm_compat.layout.groups``).
"""

from functools import lru_cache

from vllm_kvtier.cache_kinds.base import (
    UNKNOWN_IN_FLIGHT,
    CacheGroup,
    CacheKind,
    Contents,
    InFlight,
    Split,
    describe_kind,
)
from vllm_kvtier.cache_kinds.chunked_local_attention import ChunkedLocalAttention
from vllm_kvtier.cache_kinds.full_attention import FullAttention, MLAAttention
from vllm_kvtier.cache_kinds.mamba import Mamba
from vllm_kvtier.cache_kinds.sliding_window import SlidingWindow, SlidingWindowMLA

__all__ = [
    "KINDS", "UNKNOWN_IN_FLIGHT", "CacheGroup", "CacheKind", "Contents", "InFlight", "Split",
    "get", "describe_kind", "of_layer_type", "of_spec",
]  # fmt: skip

KINDS: dict[str, type[CacheKind]] = {
    kind.name: kind
    for kind in (FullAttention, SlidingWindow, MLAAttention, SlidingWindowMLA, ChunkedLocalAttention, Mamba)
}


@lru_cache(maxsize=1024)  # other nodes send any window
def get(name: str, window: int | None = None) -> CacheKind:
    """Raises ValueError for an unknown name, and for a window that the kind does not have or lacks."""
    if name not in KINDS:
        raise ValueError(f"{name!r} is no kind of KV cache. There are {', '.join(KINDS)}.")
    return KINDS[name](window)


def of_spec(spec: str) -> type[CacheKind] | None:
    """The kind of vLLM's specification class of this name; None: unknown."""
    return next((kind for kind in KINDS.values() if spec in kind.specs), None)


def of_layer_type(layer_type: str) -> type[CacheKind] | None:
    """The kind of layers that a model's configuration (``layer_types``) calls so; None: unknown."""
    return next((kind for kind in KINDS.values() if layer_type in kind.layer_types), None)
