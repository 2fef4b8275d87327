"""The connectors that are compared, each with the same memory and the same disk below it.

``NAME`` or ``NAME=WHAT``, where WHAT is

  none          vLLM alone
  kvtier        ours: the node store with --host-gib of memory and a disk tier
  memory        ours without the disk tier
  offloading    vLLM's OffloadingConnector with as much memory, and its fs tier
  lmcache       LMCacheConnectorV1 with as much memory and local disk, on a vLLM that it loads with
  {"OPTION": ...}            ours, with these options of kv_connector_extra_config added
  {"kv_connector": ...}      any other, as vLLM's --kv-transfer-config
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.variants import Variant
from tiers import GIB

from vllm_kvtier.devtools.engines import kvtier
from vllm_kvtier.store.memory.memory_limits import parse_bytes

IDLE_SECONDS = 600


@dataclass(frozen=True)
class Sizes:
    """Bytes that a connector may use of memory and of disk; ``folder``: on the disk."""

    memory: int
    disk: int
    folder: Path


def named(text: str, sizes: Sizes) -> Variant:
    """Raises argparse.ArgumentTypeError for a word that is unknown, and for what is no JSON."""
    name, equals, what = text.partition("=")
    if not equals or "{" in name:
        name, what = text, text
    if what in WORDS:
        return WORDS[what](name, sizes)
    try:
        options = json.loads(what)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{what!r} is none of {', '.join(WORDS)} and no JSON: {error}") from error
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f"{what!r} is no JSON object")
    if "kv_connector" in options:
        return Variant(name, {"kv_role": "kv_both", **options})
    return _ours(name, sizes, **options)


def _ours(name: str, sizes: Sizes, **options: Any) -> Variant:
    disk = {"store_disk_path": str(sizes.folder), "store_disk_size": str(sizes.disk)} if sizes.disk else {}
    return Variant(name, kvtier({
        "store_size": str(sizes.memory), "store_idle_seconds": IDLE_SECONDS, **disk, **options,
    }))  # fmt: skip


def _memory(name: str, sizes: Sizes) -> Variant:
    return _ours(name, Sizes(sizes.memory, 0, sizes.folder))


def _offloading(name: str, sizes: Sizes) -> Variant:
    extra: dict[str, Any] = {"cpu_bytes_to_use": sizes.memory}
    if sizes.disk:
        fs = {"type": "fs", "root_dir": str(sizes.folder)}
        extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [fs]}
    return Variant(
        name, {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    )


def _lmcache(name: str, sizes: Sizes) -> Variant:
    env = {
        "LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": str(sizes.memory / GIB),
        "LMCACHE_TRACK_USAGE": "false",
    }  # fmt: skip
    if sizes.disk:
        env |= {
            "LMCACHE_LOCAL_DISK": f"{sizes.folder}/", "LMCACHE_MAX_LOCAL_DISK_SIZE": str(sizes.disk / GIB),
            "LMCACHE_EXTRA_CONFIG": json.dumps({"use_odirect": True}),
        }  # fmt: skip
    return Variant(name, {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}, env=env)


WORDS: dict[str, Callable[[str, Sizes], Variant]] = {
    "none": lambda name, sizes: Variant(name), "kvtier": _ours, "memory": _memory, "offloading": _offloading,
    "lmcache": _lmcache,
}  # fmt: skip


def store_bytes(variant: Variant) -> int:
    """Of the node store that its engine starts; 0: it has none. Whether so much is free is not asked: it may be in use
    already."""
    options = variant.kv["kv_connector_extra_config"] if variant.is_ours else {}
    if options.get("store", "auto") != "auto" or "store_size" not in options:
        return 0
    return parse_bytes(options["store_size"], "store_size")


def unlimited_folders(variant: Variant) -> list[str]:
    """Where it writes without limit: vLLM's fs tier deletes nothing, so that operators delete its oldest files."""
    options = (variant.kv or {}).get("kv_connector_extra_config", {})
    return [tier["root_dir"] for tier in options.get("secondary_tiers", ()) if "root_dir" in tier]
