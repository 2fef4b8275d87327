"""What is said of blocks in tiers, before it is put into vLLM's words (``vllm_compat.events``)."""

from dataclasses import dataclass
from typing import Any

import msgspec


class Label(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of one block. ``tokens``: int32, little-endian; ``parent``: b"" for the first; ``extra``: what vLLM publishes
    beside the tokens that were hashed (adapter, images, salt)."""

    hash: bytes
    parent: bytes
    tokens: bytes
    lora_id: int | None = None
    lora_name: str | None = None
    extra: list[Any] | None = None


@dataclass(frozen=True)
class Place:
    """In vLLM's words: ``medium`` "CPU" or "STORAGE"; ``locality``, seen from the engine, "LOCAL" or "REMOTE"."""

    medium: str
    locality: str


# By bit of a block's places here. A tier that is not named here is nobody's business: other nodes publish their own.
PLACES = Place("CPU", "LOCAL"), Place("STORAGE", "LOCAL"), Place("STORAGE", "REMOTE")
MEMORY, TIERS = 1, {"disk": 2, "object": 4}
STORED = 6  # the bits of medium "STORAGE"


@dataclass
class Stored:
    """These blocks, each the next one's parent, lie there now."""

    group: int
    place: Place
    labels: list[Label]


@dataclass
class Removed:
    """Blocks of these hashes lie there no more."""

    group: int
    place: Place
    hashes: list[bytes]
