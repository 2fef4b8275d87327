"""KV events as vLLM publishes them (0.25.1 to 0.33), made of what ``telemetry.events`` says.

The fields are those of vLLM's own events for blocks of the GPU cache, so that who understands these understands ours.
0.25.1 has no ``locality``; there "STORAGE" is where either kind is.
"""

import time
from typing import Any

import numpy as np
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from vllm_kvtier.telemetry.events import Place, Removed, Stored

_LOCALITY = "locality" in BlockStored.__struct_fields__


def enabled(vllm_config: Any) -> bool:
    """Whether this engine was asked to publish KV events."""
    config = getattr(vllm_config, "kv_events_config", None)
    return bool(config is not None and config.enable_kv_cache_events)


def group_kinds(kv_cache_config: Any) -> list[tuple[str, int | None]]:
    """What vLLM's events say of each KV cache group: its kind of attention, and its window."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return [(get_kv_cache_spec_kind(spec).value, get_kv_cache_spec_sliding_window(spec)) for spec in specs]


def vllm_events(said: list[Removed | Stored], kinds: list[tuple[str, int | None]]) -> list[BlockRemoved | BlockStored]:
    """In the same order. ``kinds``: as ``group_kinds`` returned it."""
    return [_removed(each) if isinstance(each, Removed) else _stored(each, *kinds[each.group]) for each in said]


def publish(scheduler: Any, events: list[BlockRemoved | BlockStored]) -> None:
    """What vLLM's scheduler does with events after a step, when there is no step. On the engine's thread."""
    own = scheduler.kv_cache_manager.take_events() or []
    scheduler.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=[*own, *events]))


def _removed(said: Removed) -> BlockRemoved:
    hashes = [maybe_convert_block_hash(each) for each in said.hashes]
    return BlockRemoved(block_hashes=hashes, medium=said.place.medium, group_idx=said.group, **_where(said.place))


def _stored(said: Stored, kind: str, window: int | None) -> BlockStored:
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
        **_where(said.place),
    )


def _where(place: Place) -> dict[str, str]:
    return {"locality": place.locality} if _LOCALITY else {}
