"""KV events in vLLM's form (0.25.1 to 0.33), made from those of ``telemetry.events``.

The fields are those of vLLM's own events for blocks of the GPU cache, so that a consumer of those understands ours.
0.25.1 has no ``locality``: there the medium "STORAGE" stands for both kinds. ``lora_id`` is always None: each engine
numbers adapters itself, and the block may be another engine's. The name is the same in all, as a part of the hash.
"""

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_kvtier.telemetry.events import Place, Removed, Stored
from vllm_kvtier.vllm_compat.probe.features import granted
from vllm_kvtier.vllm_compat.probe.row import Feature

# vLLM's classes are imported where they are used: an engine without KV events needs none of them.
if TYPE_CHECKING:
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    Events = list[BlockRemoved | BlockStored]


def enabled(vllm_config: Any) -> bool:
    """Whether this engine publishes KV events."""
    config = vllm_config.kv_events_config
    return config is not None and config.enable_kv_cache_events and granted(Feature.EVENTS)


def event_groups(kv_cache_config: Any, ids: list[int]) -> list[tuple[int, str, int | None]]:
    """Of vLLM's groups with these ids: (id, kind of attention, window), as in vLLM's events."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

    specs = [(g, kv_cache_config.kv_cache_groups[g].kv_cache_spec) for g in ids]
    return [(g, get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for g, spec in specs]


def vllm_events(events: list[Removed | Stored], groups: list[tuple[int, str, int | None]]) -> "Events":
    """In the same order. ``groups``: the result of ``event_groups``."""
    return [
        _removed(each, groups[each.group][0]) if isinstance(each, Removed) else _stored(each, *groups[each.group])
        for each in events
    ]


def publish(scheduler: Any, events: "Events") -> None:
    """Publish events while there is no step, as vLLM's scheduler does after one. On the scheduler thread."""
    from vllm.distributed.kv_events import KVEventBatch

    own = scheduler.kv_cache_manager.take_events() or []
    scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=[*own, *events]))


def _removed(event: Removed, group: int) -> "BlockRemoved":
    from vllm.distributed.kv_events import BlockRemoved
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    hashes = [maybe_convert_block_hash(each) for each in event.hashes]
    where = _where(BlockRemoved, event.place)
    return BlockRemoved(block_hashes=hashes, medium=event.place.medium, group_idx=group, **where)


def _stored(event: Stored, group: int, kind: str, window: int | None) -> "BlockStored":
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    first = event.labels[0]
    extra = [None if each.extra is None else tuple(each.extra) for each in event.labels]
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(each.hash) for each in event.labels],
        parent_block_hash=maybe_convert_block_hash(first.parent) if first.parent else None,
        token_ids=np.frombuffer(b"".join(each.tokens for each in event.labels), "<i4").tolist(),
        block_size=len(first.tokens) // 4,
        lora_id=None,
        medium=event.place.medium,
        lora_name=first.lora_name,
        extra_keys=extra,
        group_idx=group,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
        **_where(BlockStored, event.place),
    )


def _where(event: type, place: Place) -> dict[str, str]:
    return {"locality": place.locality} if "locality" in event.__struct_fields__ else {}
