"""What is compared: the same load on engines that differ in their connector, or on servers that run already.

``NAME=WHAT``, where WHAT is

  none                       vLLM alone
  kvtier                     ours, with --extra-config
  offloading                 vLLM's OffloadingConnector, with as much host memory an engine as --host-gib gives it
  {"OPTION": ...}            ours, with these options of kv_connector_extra_config over --extra-config
  {"kv_connector": ...}      any other, as vLLM's --kv-transfer-config
  {"kv": WHAT, "args": [...], "env": {...}}       one of these, with flags and variables for the engine
  http://HOST:PORT,...       servers that run already
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_kvtier.devtools.engines import kvtier
from vllm_kvtier.store.memory.memory_limits import memory_limits, pool_bytes

WORDS = ("none", "kvtier", "offloading")


@dataclass(frozen=True)
class Variant:
    """``kv``: the --kv-transfer-config of its engines, None for vLLM alone; ``urls``: of servers that run already."""

    name: str
    kv: dict[str, Any] | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    urls: tuple[str, ...] = ()

    @property
    def is_ours(self) -> bool:
        return bool(self.kv) and self.kv.get("kv_connector") == kvtier()["kv_connector"]


    @property
    def store_bytes(self) -> int:
        """Of the node store that its engines start; 0: they have none."""
        options = self.kv["kv_connector_extra_config"] if self.is_ours else {}
        if not options or options.get("store") == "off":
            return 0
        return pool_bytes(str(options["store_size"]), memory_limits())


def named(text: str, extra: Mapping[str, Any], host_bytes: int, engines: int) -> Variant:
    """``NAME=WHAT`` as above, or WHAT alone, which is then its name. ``host_bytes``: for all its engines together.

    Raises argparse.ArgumentTypeError for anything else.
    """
    name, equals, what = text.partition("=")
    if not equals or "{" in name or name.startswith("http"):
        name, what = text, text
    if what.startswith(("http://", "https://")):
        return Variant(name, urls=tuple(what.split(",")))
    return _engine(name, _value(what), extra, host_bytes, engines)


def _value(what: str) -> Any:
    if what in WORDS:
        return what
    try:
        return json.loads(what)
    except ValueError as error:
        words = ", ".join(WORDS)
        raise argparse.ArgumentTypeError(f"{what!r} is none of {words}, no URL and no JSON: {error}") from error


def _engine(name: str, what: Any, extra: Mapping[str, Any], host_bytes: int, engines: int) -> Variant:
    options = {"store_size": str(host_bytes), "store_idle_seconds": 20, **extra}
    if what is None or what == "none":
        return Variant(name)
    if what == "kvtier":
        return Variant(name, kvtier(options))
    if what == "offloading":
        each = {"cpu_bytes_to_use": host_bytes // engines}
        return Variant(
            name, {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": each}
        )
    if not isinstance(what, dict):
        raise argparse.ArgumentTypeError(f"{name}: {json.dumps(what)} is no connector; --help says what there is")
    if "kv_connector" in what:
        return Variant(name, {"kv_role": "kv_both", **what})
    if "kv" in what:
        if unknown := set(what) - {"kv", "args", "env"}:
            raise argparse.ArgumentTypeError(f"{name}: beside kv there are args and env, not {sorted(unknown)}")
        made = _engine(name, what["kv"], extra, host_bytes, engines)
        env = {key: str(value) for key, value in what.get("env", {}).items()}
        return Variant(name, made.kv, tuple(map(str, what.get("args", ()))), env)
    return Variant(name, kvtier({**options, **what}))
