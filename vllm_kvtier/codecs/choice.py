"""Which codec keeps each KV cache group of this engine, as the options say; ``auto`` by what was measured."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from vllm_kvtier import codecs
from vllm_kvtier.codecs.base import Codec
from vllm_kvtier.errors import ConfigError
from vllm_kvtier.logs import get_logger
from vllm_kvtier.wire.geometry import GroupView

logger = get_logger("vllm.kvtier.codecs")

AUTO = "auto"
# Of ``GroupView.kind``.
KINDS = ("full", "sliding", "mla", "sliding_mla", "chunked")


def check(option: str, value: str | Mapping[str, str]) -> None:
    """Raises ConfigError for a codec or a kind of attention that does not exist. ``option``: its name, for words."""
    by_kind = {} if isinstance(value, str) else value
    for kind in by_kind:
        if kind not in KINDS:
            raise ConfigError(f"{option}: {kind!r} is no kind of attention: there are {', '.join(KINDS)}.")
    for name in [value] if isinstance(value, str) else value.values():
        if name != AUTO:
            try:
                codecs.get(name)
            except ConfigError as error:
                raise ConfigError(f"{option}: {error}") from error


def resolve(option: str | Mapping[str, str], model: Callable[[], str | None]) -> str | dict[str, str]:
    """The option with ``auto`` replaced by the smallest codec that a quality record for this model admits, or raw.

    ``model``: ``fingerprint.of_files`` of the model, by which records are found; only called for ``auto``.
    Raises ConfigError for a codec that does not exist.
    """
    if isinstance(option, str):
        return _resolved(option, model)
    return {kind: _resolved(name, model) for kind, name in option.items()}


def _resolved(name: str, model: Callable[[], str | None]) -> str:
    if name != AUTO:
        return codecs.get(name).name
    from vllm_kvtier.quality import record  # only where it is asked for

    fingerprint = model()
    found = record.load(fingerprint) if fingerprint else None
    if found is None:
        logger.warning(
            "kvtier: codec auto: %s, so KV is kept as it is; `kvtier quality --model ...` measures a model",
            f"nothing was measured for this model ({fingerprint})" if fingerprint else "this model has no local files",
        )
        return Codec.RAW
    admitted = record.admitted(found)
    logger.info("kvtier: codec auto: the record of this model admits %s", ", ".join(admitted) or "no codec but raw")
    return admitted[0] if admitted else Codec.RAW


def in_words(store: str | Mapping[str, str], wire: str | Mapping[str, str]) -> str:
    """What KV of an engine with these (resolved) options may have lost on its way, for comparing two engines.

    Blocks do not remember where they came from: what was loaded from the store is exported like what was computed,
    and what was pulled is stored. So an engine that keeps KV exact takes none from one that does not.
    """
    words = []
    for place, option in (("store", store), ("wire", wire)):
        by_kind = {"": option} if isinstance(option, str) else option
        lossy = sorted((kind, name) for kind, name in by_kind.items() if codecs.get(name).lossy)
        words += [f"{place} {kind} {name}".replace("  ", " ") for kind, name in lossy]
    return ", ".join(words)


def by_group(option: str | Mapping[str, str], ranks: Sequence[Sequence[GroupView]]) -> list[Codec]:
    """A codec for each group, the same on all ranks: raw where it does not apply on one of them, which is said once.

    ``ranks[r][g]``: group g as rank r has it. ``option``: as :func:`resolve` returned it.
    """
    raw = codecs.get(Codec.RAW)
    chosen = []
    for number, views in enumerate(zip(*ranks, strict=True)):
        name = option if isinstance(option, str) else option.get(views[0].kind, Codec.RAW)
        codec = codecs.get(name)
        reason = next((r for r in map(codec.reason, views) if r is not None), None)
        if reason is not None:
            logger.warning("kvtier: KV cache group %d is kept as it is, not as %s: %s", number, name, reason)
        chosen.append(codec if reason is None else raw)
    return chosen


def names(chosen: Iterable[Codec | str | Mapping[str, str]]) -> str:
    """The codecs of these, each once, joined by "+": for metrics, where one number stands for all groups of a cache."""
    found: set[str] = set()
    for each in chosen:
        found.update(each.values() if isinstance(each, Mapping) else [each if isinstance(each, str) else each.name])
    return "+".join(sorted(found)) or Codec.RAW
