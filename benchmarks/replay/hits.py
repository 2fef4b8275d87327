"""Where prompts' tokens came from, by tier: GPU cache, memory, disk, or computed; by the engines' own counters."""

import re
from collections.abc import Mapping

from serve.counters import SOURCES

TIERS = ("gpu", "memory", "disk", "external", "computed")
# Ours counts tokens by tier itself; OffloadingConnector counts the bytes that its tiers read.
_OURS = {"host": "memory", "secondary_tier": "disk"}
_OURS_SAMPLE = re.compile(r'vllm:kvtier_prompt_tokens_total\{kind="(\w+)"\}$')
_FS_READ = "vllm:kv_offload_tiering_read_bytes_total"


def by_tier(samples: Mapping[str, float], bytes_per_token: int) -> dict[str, float]:
    """Tokens by tier, and ``hit_rate``. ``samples``: what the counters grew by. ``external``: from a connector that
    does not say whether from memory or from disk.

    For OffloadingConnector the disk's share is what its tier read, at most what came from the connector at all: what it
    read for a prompt that was then computed counts as well.
    """
    found = dict.fromkeys(TIERS, 0.0)
    found["computed"] = samples.get(SOURCES["computed"], 0.0)
    found["gpu"] = samples.get(SOURCES["local"], 0.0)
    external = samples.get(SOURCES["external"], 0.0)
    ours = {_OURS[kind]: value for kind, value in _ours(samples) if kind in _OURS}
    if sum(ours.values()):
        scale = external / sum(ours.values()) if external else 1.0  # vLLM rounds prompts that are found whole
        found |= {tier: value * scale for tier, value in ours.items()}
    elif any(name.startswith("vllm:kv_offload") for name in samples):
        read = sum(value for name, value in samples.items() if name.startswith(_FS_READ))
        found["disk"] = min(read / bytes_per_token, external)
        found["memory"] = external - found["disk"]
    else:
        found["external"] = external
    total = sum(found.values())
    tokens: dict[str, float] = {tier: round(value) for tier, value in found.items()}
    return {**tokens, "hit_rate": round(1 - found["computed"] / total, 4) if total else 0.0}


def _ours(samples: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(match[1], value) for name, value in samples.items() if (match := _OURS_SAMPLE.match(name))]


def shares(tokens: Mapping[str, float]) -> dict[str, float]:
    """Of all prompt tokens, by tier."""
    total = sum(tokens[tier] for tier in TIERS)
    return {tier: round(tokens[tier] / total, 4) if total else 0.0 for tier in TIERS}
