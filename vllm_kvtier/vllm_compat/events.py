"""KV events as vLLM publishes them (0.25.1 to 0.33), made of what ``telemetry.events`` says.

The fields are those of vLLM's own events for blocks of the GPU cache, so that who understands these understands ours.
0.25.1 has no ``locality``; there "STORAGE" is where either kind is.
"""

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_kvtier.telemetry.events import Place, Removed, Stored
from vllm_kvtier.vllm_compat.probe import Feature, granted

# vLLM's classes are imported where they are used: an engine without KV events needs none of them.
if TYPE_CHECKING:
    from vllm.distributed.kv_events import BlockRemoved, BlockStored

    Events = list[BlockRemoved | BlockStored]


def enabled(vllm_config: Any) -> bool:
    """Whether this engine was asked to publish KV events."""
    config = vllm_config.kv_events_config
    return config is not None and config.enable_kv_cache_events and granted(Feature.EVENTS)


def group_kinds(kv_cache_config: Any) -> list[tuple[str, int | None]]:
    """What vLLM's events say of each KV cache group: its kind of attention, and its window."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs]


def vllm_events(said: list[Removed | Stored], kinds: list[tuple[str, int | None]]) -> "Events":
    """In the same order. ``kinds``: as ``group_kinds`` returned it."""
    return [_removed(each) if isinstance(each, Removed) else _stored(each, *kinds[each.group]) for each in said]


def publish(scheduler: Any, events: "Events") -> None:
    """What vLLM's scheduler does with events after a step, when there is no step. On the engine's thread."""
    from vllm.distributed.kv_events import KVEventBatch

    own = scheduler.kv_cache_manager.take_events() or []
    scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=[*own, *events]))


def _removed(said: Removed) -> "BlockRemoved":
    from vllm.distributed.kv_events import BlockRemoved
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    hashes = [maybe_convert_block_hash(each) for each in said.hashes]
    where = _where(BlockRemoved, said.place)
    return BlockRemoved(block_hashes=hashes, medium=said.place.medium, group_idx=said.group, **where)


def _stored(said: Stored, kind: str, window: int | None) -> "BlockStored":
    from vllm.distributed.kv_events import BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    first = said.labels[0]
    extra = [None if each.extra is None else tuple(each.extra) for each in said.labels]
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(each.hash) for each in said.labels],
        parent_block_hash=maybe_convert_block_hash(first.parent) if first.parent else None,
        token_ids=np.frombuffer(b"".join(each.tokens for each in said.labels), "<i4").tolist(),
        block_size=len(first.tokens) // 4,
        lora_id=first.lora_id,
        medium=said.place.medium,
        lora_name=first.lora_name,
        extra_keys=extra,
        group_idx=said.group,
        kv_cache_spec_kind=kind,
        kv_cache_spec_sliding_window=window,
        **_where(BlockStored, said.place),
    )


def _where(event: type, place: Place) -> dict[str, str]:
    return {"locality": place.locality} if "locality" in event.__struct_fields__ else {}
