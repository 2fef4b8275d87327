"""How KV is encoded in slots, by a codec's name. A codec is a file here that defines ``CODECS``; it is found by the
folder.

Owns the formats with their reference and kernels. Any thread. Imports ``wire``'s geometry and ``kernels``; never an
engine side, a store or vLLM.
"""

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache

from vllm_kvtier.codecs.base import Codec, Format
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.wire.geometry import GroupView

__all__ = ["Codec", "Format", "choose", "get", "names"]


@cache
def _codecs() -> dict[str, Codec]:
    found: dict[str, Codec] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        for codec in getattr(importlib.import_module(f"{__name__}.{module}"), "CODECS", ()):
            if codec.name in found:
                raise ImportError(f"two codecs are named {codec.name!r}; one of them is in {module}.py")
            found[codec.name] = codec
    return found


def names() -> list[str]:
    """All codecs' names, raw first."""
    return sorted(_codecs(), key=lambda name: (name != Codec.RAW, name))


def get(name: str) -> Codec:
    """The codec of this name. Raises ConfigError, with the nearest name, if there is none."""
    codec = _codecs().get(name)
    if codec is None:
        similar = difflib.get_close_matches(str(name), names(), n=1, cutoff=0.4)
        hint = f"did you mean {similar[0]!r}? " if similar else ""
        raise ConfigError(f"no codec is named {name!r}: {hint}There are {', '.join(names())}.")
    return codec


def choose(option: str | Mapping[str, str], group: GroupView) -> Codec:
    """The codec for a group: the named one, or the one of the group's kind ("full", "sliding", "mla", ...; raw for
    other kinds); raw where that does not apply. Raises ConfigError for an unknown name."""
    name = option if isinstance(option, str) else option.get(group.kind, Codec.RAW)
    codec = get(name)
    return codec if codec.applies(group) else get(Codec.RAW)
