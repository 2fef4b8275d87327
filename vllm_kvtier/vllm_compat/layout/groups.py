"""vLLM's KV cache groups: which of them this package follows, and of what kind they are.

This package counts only groups that vLLM's prefix cache keeps. Its group g is vLLM's group ``followed(config)[g]``.
"""

from collections.abc import Iterator
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from vllm_kvtier import cache_kinds
from vllm_kvtier.cache_kinds import CacheGroup, CacheKind
from vllm_kvtier.errors import UnsupportedLayout
from vllm_kvtier.vllm_compat.probe.features import value


def followed(kv_cache_config: Any) -> list[int]:
    """The ids of the groups that prefixes are kept of. Left out: scratch of a request (rings that collect a group of
    tokens, windows that a replay rebuilds), and copies that vLLM rebuilds itself."""
    return [g for g, group in enumerate(kv_cache_config.kv_cache_groups) if _transferred(group) and _cached(group)]


def whole_blocks(kv_cache_config: Any) -> bool:
    """Whether KV that ends in the middle of a block is not complete: groups belong to a request without being in the
    prefix cache; or a number of another precision behind the end may be a NaN, which attention would multiply with 0.
    vLLM clears new blocks then, up to 0.31 not those of a load. Later ones ask which groups the load fills."""
    left_behind = any(_transferred(group) and not _cached(group) for group in kv_cache_config.kv_cache_groups)
    uncleared = not hasattr(KVConnectorBase_V1, "get_loaded_kv_cache_group_ids")
    return left_behind or (uncleared and bool(kv_cache_config.needs_kv_cache_zeroing))


def _transferred(group: Any) -> bool:
    return bool(value(group, "KVCacheGroupSpec.enable_kv_transfer"))


def _cached(group: Any) -> bool:
    return all(value(spec, "KVCacheSpec.prefix_cacheable") and not _replayed(spec) for spec in layer_specs(group))


def _replayed(spec: Any) -> bool:
    return hasattr(spec, "bounded_replay") and bool(value(spec, "SlidingWindowMLASpec.bounded_replay"))


def layer_specs(group: Any) -> Iterator[Any]:
    """Groups of one type but different sizes have a specification for each layer."""
    spec = group.kv_cache_spec
    yield from spec.kv_cache_specs.values() if hasattr(spec, "kv_cache_specs") else [spec]


def layer_spec(group: Any, layer: str) -> Any:
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer] if hasattr(spec, "kv_cache_specs") else spec


def cache_group(group: Any, ranks: int = 1) -> CacheGroup:
    """``ranks``: over which decode context parallelism divides a block. Raises UnsupportedLayout for a group that no
    kind describes, or layers of several kinds, and for one in host memory."""
    if value(group, "KVCacheGroupSpec.host_resident"):
        raise UnsupportedLayout("vLLM keeps a KV cache group in host memory (HiSparse)")
    tokens = group.kv_cache_spec.block_size * ranks
    return CacheGroup(tokens, common_kind({cache_kind(spec) for spec in layer_specs(group)}))


def cache_kind(spec: Any) -> CacheKind:
    """The kind of a layer's cache. Raises UnsupportedLayout for an unknown one."""
    name = type(spec).__name__
    kind = cache_kinds.of_spec(name)
    if kind is None:
        raise UnsupportedLayout(f"{name} is a kind of KV cache that this vllm-kvtier does not know")
    for field, wanted in kind.required.items():
        if getattr(spec, field) != wanted:
            raise UnsupportedLayout(f"{name} has {field} {getattr(spec, field)}, and {wanted} is needed")
    if not kind.window_field:
        return kind()
    retained = value(spec, f"SlidingWindowSpec.{kind.retained_field}") if kind.retained_field else 0
    return kind(getattr(spec, kind.window_field) + retained)


def saves_states_within_steps(group: Any) -> bool:
    """Whether kernels save a prompt's last state in the step that computes it, and vLLM ends no step there."""
    field, name = "num_prefill_checkpoint_blocks", "MambaSpec"
    return any(type(spec).__name__ == name and value(spec, f"{name}.{field}") > 0 for spec in layer_specs(group))


def common_kind(kinds: set[CacheKind]) -> CacheKind:
    """The kind of a group with layers of these. Full attention and MLA have blocks alike, and may be in one group: that
    is full attention."""
    ordered = sorted(kinds, key=lambda kind: kind.describe())
    if len(ordered) > 1 and not all(kind.whole_prefix for kind in ordered):
        raise UnsupportedLayout(f"layers of one KV cache group have {' and '.join(k.describe() for k in ordered)}")
    return ordered[0]
