"""The record of a measurement, its file, and the codecs that it admits.

One JSON file per model, ``$XDG_CACHE_HOME/vllm-kvtier/quality/<fingerprint>.json`` (``~/.cache`` without that
variable). The fingerprint is ``vllm_kvtier.fingerprint.of_files``.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.logs import get_logger

logger = get_logger(__name__)

VERSION = 1


class RecallAt(msgspec.Struct, frozen=True):
    """Answers at one length of context."""

    tokens: int
    questions: int
    raw_right: int  # with the cache as it is
    right: int
    lost: int  # right with the cache as it is, wrong with the codec


class CodecQuality(msgspec.Struct, frozen=True):
    """What one codec costs. Shares, not per cent."""

    name: str
    formats: dict[str, str]  # by field, the formats' names: a codec that means other bytes by now is not this one
    bits: float  # a number of the cache, scales included, K and V averaged
    perplexity: float  # relative change: 0.005 is half a per cent more
    perplexity_error: float  # its standard error, over windows
    divergence: float  # KL of next-token distributions, nats a token
    agreement: float  # of the most likely next token
    recall: list[RecallAt] = []

    @property
    def lost(self) -> float | None:
        """Share of the answers that are right with the raw cache and wrong with this codec; None: not measured."""
        asked = sum(r.raw_right for r in self.recall)
        return sum(r.lost for r in self.recall) / asked if asked else None


class Text(msgspec.Struct, frozen=True):
    """The text that a record was measured on. Figures of one text and cut only stand in one record."""

    name: str
    digest: str
    windows: int
    window_tokens: int


class Record(msgspec.Struct, frozen=True):
    """Everything that was measured on one model."""

    fingerprint: str
    model: str  # as the user gave it
    made: float  # Unix time
    text: Text
    dtype: str  # of the cache; its numbers are rounded to it with and without a codec
    computed_in: str  # dtype and device of the model's arithmetic
    nats: float  # loss a token of the text with the cache as it is
    codecs: list[CodecQuality]
    version: int = VERSION


class Limits(msgspec.Struct, frozen=True):
    """Limits of ``codec: auto``.

    * ``perplexity``: maximum relative change *plus its standard error*; a short measurement admits less.
    * ``recall``: maximum share of lost answers. 0: no answer may be lost. Ignored for a model that fails the test.
    * ``agreement``: minimum share of positions with the same most likely token. Any rounding can swap two equally
      likely tokens, so that even 8-bit integers do not reach 1.
    """

    perplexity: float = 0.005
    recall: float = 0.0
    agreement: float = 0.97


DEFAULT_LIMITS = Limits()


def directory() -> Path:
    """The default directory of records."""
    # Raises nothing for a user without a home directory.
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "vllm-kvtier" / "quality"


def load(fingerprint: str, folder: Path | None = None) -> Record | None:
    """The record of a model; None if there is none, or one of another version (which is logged)."""
    file = (folder or directory()) / f"{fingerprint}.json"
    try:
        record = msgspec.json.decode(file.read_bytes(), type=Record)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("kvtier: the quality record %s cannot be read: %s; run `kvtier quality` again", file, error)
        return None
    if record.version != VERSION or record.fingerprint != fingerprint:
        logger.warning("kvtier: the quality record %s is of another version; run `kvtier quality` again", file)
        return None
    return record


def save(record: Record, folder: Path | None = None) -> Path:
    """Write a record atomically. Keep the codecs of an older record on the same text that are not in this one.

    Raises KVTierError if the file cannot be written.
    """
    folder = folder or directory()
    before = load(record.fingerprint, folder)
    if before and (before.text, before.dtype, before.computed_in) == (record.text, record.dtype, record.computed_in):
        new = {codec.name for codec in record.codecs}
        kept = [codec for codec in before.codecs if codec.name not in new]
        record = msgspec.structs.replace(record, codecs=record.codecs + kept)
    file = folder / f"{record.fingerprint}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:  # nothing is left of it on a full disk
            draft = Path(made, file.name)
            draft.touch(0o600)
            draft.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2))
            os.replace(draft, file)
    except OSError as error:
        raise KVTierError(f"the record cannot be written to {file}: {error}") from error
    return file


def refusal(codec: CodecQuality, limits: Limits = DEFAULT_LIMITS) -> str | None:
    """The limit that a codec violates, as text; None if it meets all."""
    worst = codec.perplexity + codec.perplexity_error
    if not worst < limits.perplexity:
        return f"perplexity {worst:+.2%} with its error, limit {limits.perplexity:.2%}"
    if not codec.agreement >= limits.agreement:
        return f"agreement {codec.agreement:.1%}, limit {limits.agreement:.1%}"
    if codec.lost is not None and codec.lost > limits.recall:
        return f"{codec.lost:.2%} of the answers are lost, limit {limits.recall:.2%}"
    return None


def admitted(
    record: Record, limits: Limits = DEFAULT_LIMITS, formats: Mapping[str, Mapping[str, str]] | None = None
) -> list[str]:
    """Names of the codecs that meet the limits, the smallest first.

    ``formats``: the current format names by codec (default: ``present_formats``). A codec that was measured with other
    formats or no longer exists is not admitted.
    """
    now = present_formats() if formats is None else formats
    kept = [c for c in record.codecs if now.get(c.name) == c.formats and refusal(c, limits) is None]
    return [codec.name for codec in sorted(kept, key=lambda codec: (codec.bits, codec.name))]


def present_formats() -> dict[str, dict[str, str]]:
    """The formats' names of every codec of this package, by codec and field."""
    from vllm_kvtier import codecs  # brings torch

    return {name: {field: f.name for field, f in codecs.get(name).formats.items()} for name in codecs.names()}
