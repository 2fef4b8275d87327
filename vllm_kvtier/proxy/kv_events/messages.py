"""vLLM's KV events (0.25.1 to 0.33) as they are on the wire, decoded without vLLM. docs/kv-events.md describes them.

Older releases encode an event as an array, newer ones as a map. Each event is decoded by itself, so that a malformed
or unknown one costs no other.
"""

import enum
from typing import Any, NamedTuple

import msgspec

from vllm_kvtier.proxy.messages.transfer_params import UNREADABLE

BlockHash = int | bytes
# Kinds of KV cache groups whose blocks every longer prefix needs. Older releases name none.
_WHOLE_PREFIX = (None, "full_attention", "mla_attention", "sink_full_attention", "unknown")


class Tier(enum.IntEnum):
    """Where a block is; the fastest first."""

    GPU = 0
    HOST = 1
    DISK = 2
    CLUSTER = 3
    OBJECTS = 4


class _Map(msgspec.Struct, omit_defaults=True, tag=True, gc=False):
    pass


class _Array(msgspec.Struct, array_like=True, omit_defaults=True, tag=True, gc=False):
    pass


def _events(base: type) -> Any:
    """The union of vLLM's three events, encoded as ``base``."""
    stored = [
        ("block_hashes", list[BlockHash]),
        ("parent_block_hash", BlockHash | None),
        ("token_ids", list[int]),
        ("block_size", int),
        ("lora_id", int | None, None),
        ("medium", str | None, None),
        ("lora_name", str | None, None),
        ("extra_keys", list[Any] | None, None),
        ("group_idx", int | None, None),
        ("kv_cache_spec_kind", str | None, None),
        ("kv_cache_spec_sliding_window", int | None, None),
        ("locality", str | None, None),
    ]
    removed = [
        ("block_hashes", list[BlockHash]),
        ("medium", str | None, None),
        ("group_idx", int | None, None),
        ("locality", str | None, None),
    ]
    made = (
        msgspec.defstruct(name, fields, bases=(base,), tag=name, gc=False)
        for name, fields in (("BlockStored", stored), ("BlockRemoved", removed), ("AllBlocksCleared", []))
    )
    first, second, third = made
    return first | second | third


_DECODERS = {kind: msgspec.msgpack.Decoder(_events(kind)) for kind in (_Map, _Array)}


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]


_BATCH = msgspec.msgpack.Decoder(_RawBatch)


class Stored(NamedTuple):
    """Consecutive blocks of one prompt. ``extra``: of each block, what beside its tokens its hash depends on."""

    tier: Tier
    group: int
    block_size: int
    parent: BlockHash | None
    hashes: list[BlockHash]
    tokens: list[int]
    extra: list[Any]
    adapter: str | None = None


class Removed(NamedTuple):
    tier: Tier
    group: int | None
    hashes: list[BlockHash]


class Cleared(NamedTuple):
    """The engine's GPU cache is empty."""


class Batch(NamedTuple):
    """``time``: the engine's clock. ``malformed``: events that were left out."""

    time: float
    events: list[Stored | Removed | Cleared]
    malformed: int


def decode(payload: bytes) -> Batch | None:
    """None if it is no batch."""
    try:
        raw = _BATCH.decode(payload)
    except UNREADABLE:
        return None
    events, malformed = [], 0
    for each in raw.events:
        try:
            if (event := _event(each)) is not None:
                events.append(event)
        except UNREADABLE:
            malformed += 1
    return Batch(raw.ts, events, malformed)


def _event(raw: msgspec.Raw) -> Stored | Removed | Cleared | None:
    """None: of a group that does not say which prefixes there are. Raises ``UNREADABLE``."""
    first = memoryview(raw)[0]
    is_array = 0x90 <= first <= 0x9F or first in (0xDC, 0xDD)  # as in msgpack's specification
    event = _DECODERS[_Array if is_array else _Map].decode(raw)
    match type(event).__name__:
        case "BlockStored":
            count = len(event.block_hashes)
            extra = event.extra_keys or [None] * count
            if not 0 < event.block_size <= 1 << 16 or len(event.token_ids) != count * event.block_size:
                raise msgspec.ValidationError("token_ids and block_hashes differ in length")
            if len(extra) != count:
                raise msgspec.ValidationError("extra_keys and block_hashes differ in length")
            if event.kv_cache_spec_sliding_window is not None or event.kv_cache_spec_kind not in _WHOLE_PREFIX:
                return None
            return Stored(
                _tier(event), event.group_idx or 0, event.block_size, event.parent_block_hash, event.block_hashes,
                event.token_ids, extra, event.lora_name,
            )  # fmt: skip
        case "BlockRemoved":
            return Removed(_tier(event), event.group_idx, event.block_hashes)
    return Cleared()


def _tier(event: Any) -> Tier:
    match event.medium:
        case None | "GPU":
            return Tier.GPU
        case "CPU":
            return Tier.HOST
        case "EXTERNAL":
            return Tier.CLUSTER
    return Tier.OBJECTS if event.locality == "REMOTE" else Tier.DISK
