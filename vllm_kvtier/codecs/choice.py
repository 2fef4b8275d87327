"""Selects the codec of each KV cache group from the options; ``auto`` selects by ``kvtier quality``'s measurements."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from vllm_kvtier import codecs
from vllm_kvtier.cache_kinds import KINDS
from vllm_kvtier.codecs.base import Codec
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire.geometry import GroupView

logger = get_logger(__name__)

AUTO = "auto"


def check(option: str, value: str | Mapping[str, str]) -> None:
    """Raise ConfigError for an unknown codec or kind of KV cache. ``option``: the option's name, for the message."""
    by_kind = {} if isinstance(value, str) else value
    for kind in by_kind:
        if kind not in KINDS:
            raise ConfigError(f"{option}: {kind!r} is no kind of KV cache. There are {', '.join(KINDS)}.")
    for name in [value] if isinstance(value, str) else value.values():
        if name != AUTO:
            try:
                codecs.get(name)
            except ConfigError as error:
                raise ConfigError(f"{option}: {error}") from error


def resolve(option: str | Mapping[str, str], model: Callable[[], str | None]) -> str | dict[str, str]:
    """The option with ``auto`` replaced by the smallest codec that the model's quality record admits, or raw.

    ``model``: returns ``fingerprint.of_files`` of the model, the record's name; only called for ``auto``. Raises
    ConfigError for an unknown codec.
    """
    if isinstance(option, str):
        return _resolved(option, model)
    return {kind: _resolved(name, model) for kind, name in option.items()}


def _resolved(name: str, model: Callable[[], str | None]) -> str:
    if name != AUTO:
        return codecs.get(name).name
    from vllm_kvtier.quality import record  # only needed for ``auto``

    fingerprint = model()
    found = record.load(fingerprint) if fingerprint else None
    if found is None:
        logger.warning(
            "kvtier: codec auto: %s; KV is stored raw; `kvtier quality --model ...` measures a model",
            f"no quality record for this model ({fingerprint})" if fingerprint else "this model has no local files",
        )
        return Codec.RAW
    admitted = record.admitted(found)
    logger.info("kvtier: codec auto: the record of this model admits %s", ", ".join(admitted) or "no codec but raw")
    return admitted[0] if admitted else Codec.RAW


def format_codecs(store: str | Mapping[str, str], wire: str | Mapping[str, str]) -> str:
    """The lossy codecs of (resolved) options, as text that two engines compare.

    A block does not record its source: loaded blocks are exported like computed ones, and pulled blocks are stored. So
    an engine with exact KV must not take KV from one with a lossy codec.
    """
    words = []
    for use, option in (("store", store), ("wire", wire)):
        by_kind = {"": option} if isinstance(option, str) else option
        lossy = sorted((kind, name) for kind, name in by_kind.items() if codecs.get(name).lossy)
        words += [f"{use} {kind} {name}".replace("  ", " ") for kind, name in lossy]
    return ", ".join(words)


def by_group(option: str | Mapping[str, str], ranks: Sequence[Sequence[GroupView]]) -> list[Codec]:
    """A codec for each group, the same on all ranks: raw, and a warning, where it does not apply on one of them.

    ``ranks[r][g]``: group g on rank r. ``option``: as :func:`resolve` returned it.
    """
    raw = codecs.get(Codec.RAW)
    chosen = []
    for number, views in enumerate(zip(*ranks, strict=True)):
        name = option if isinstance(option, str) else option.get(views[0].kind, Codec.RAW)
        codec = codecs.get(name)
        reason = next((r for r in map(codec.reason, views) if r is not None), None)
        if reason is not None:
            logger.warning("kvtier: codec: %s does not apply to KV cache group %d (%s); it is stored raw", name, number,
            reason)
        chosen.append(codec if reason is None else raw)
    return chosen


def names(chosen: Iterable[Codec | str | Mapping[str, str]]) -> str:
    """The codecs' names, each once, joined by "+": for metrics, which have one number for all groups."""
    found: set[str] = set()
    for each in chosen:
        found.update(each.values() if isinstance(each, Mapping) else [each if isinstance(each, str) else each.name])
    return "+".join(sorted(found)) or Codec.RAW
