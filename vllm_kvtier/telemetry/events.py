"""KV events of tiers, before their translation to vLLM's format (``vllm_compat.kv_events``)."""

from dataclasses import dataclass
from typing import Any

import msgspec


class Label(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One block. ``tokens``: int32, little-endian; ``parent``: b"" for the first; ``extra``: vLLM's extra keys of the
    block hash (adapter, images, salt)."""

    hash: bytes
    parent: bytes
    tokens: bytes
    lora_name: str | None = None
    extra: list[Any] | None = None


@dataclass(frozen=True)
class Place:
    """A tier in vLLM's terms: ``medium`` "CPU" or "STORAGE", or Dynamo's "EXTERNAL", for memory of a cluster;
    ``locality``, from the engine, "LOCAL" or "REMOTE"."""

    medium: str
    locality: str


# By bit of a block's tiers. Other tiers are not published: other nodes publish their own blocks.
PLACES = Place("CPU", "LOCAL"), Place("STORAGE", "LOCAL"), Place("STORAGE", "REMOTE"), Place("EXTERNAL", "REMOTE")
MEMORY, TIERS = 1, {"disk": 2, "object": 4, "mooncake": 8}
STORED = 6  # the bits of medium "STORAGE"


@dataclass
class Stored:
    """These blocks, each the parent of the next, are in the tier now."""

    group: int
    place: Place
    labels: list[Label]


@dataclass
class Removed:
    """Blocks of these hashes are no longer in the tier."""

    group: int
    place: Place
    hashes: list[bytes]
