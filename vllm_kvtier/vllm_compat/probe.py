"""What this package needs of vLLM beyond its documented interface, and whether the installed one has it.

``probe_rows.ROWS`` is the table: one row for each thing, with the feature that it carries. A row that fails switches
off its feature, which is logged once; without a row of ``Feature.ALL`` the engine does not start. Where a version may
lack something, the row says since when or until when vLLM has it; a version that is not known counts as the newest.

Rows are checked when a feature is first asked for, and once for each process. No row needs a device or a model.
"""

import enum
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_kvtier.errors import UnsupportedVLLM
from vllm_kvtier.logs import get_logger
from vllm_kvtier.vllm_compat import probe_checks as checks
from vllm_kvtier.vllm_compat.probe_checks import NotHere, Unmet
from vllm_kvtier.vllm_compat.version import SUPPORTED, check_supported, installed_version, is_tested

logger = get_logger("vllm.kvtier.probe")

Release = tuple[int, int, int]


class Feature(enum.Enum):
    ALL = "everything"
    HANDOFFS = "hand-offs of prefills"
    GROUPS = "models with several KV cache groups, or MLA without chunked prefill"
    IDLE = "work while the engine is idle"
    PEER_FETCH = "peer fetch"
    SYNC_LOADS = "synchronous loads"
    EVENTS = "KV events"
    HIT_SOURCES = "vLLM's metrics of cache hits by source"
    PROMPTS = "questions about prompts (kvtier doctor --prompt, pin, warm)"
    ADAPTERS = "sharing of LoRA adapters' KV"
    CODECS = "codecs"
    CPU_CACHE = "KV caches of CPUs"
    CPU_CODECS = "codecs on CPUs"
    LAUNCHER = "launches of compiled kernels without Triton's launcher"


# vLLM's scheduler is found by the idle hook; without it no step is waited for and no other engine may read.
NEEDS = {
    Feature.PEER_FETCH: (Feature.IDLE,),
    Feature.SYNC_LOADS: (Feature.IDLE,),
    Feature.CPU_CODECS: (Feature.CODECS,),
}


class Side(enum.Enum):
    SCHEDULER = "scheduler"
    WORKER = "worker"
    BOTH = "both"


class State(enum.Enum):
    OK = "ok"
    ABSENT = "not here"  # in this version, or on this machine, nor should it be
    FAILED = "failed"


class Absence(NamedTuple):
    """A field that versions before ``since``, or from ``until`` on, do not have; there it would be ``means``."""

    means: Any
    since: Release | None = None
    until: Release | None = None

    def fits(self, release: Release) -> bool:
        return (self.since is not None and release < self.since) or (self.until is not None and release >= self.until)


@dataclass(frozen=True)
class Row:
    """One thing of vLLM. Paths are "module:name" or "module:Class.name".

    ``calls``: (path, number of positional arguments, names of keyword arguments) of our calls; ``fields``: of a class,
    as declared or as properties; ``sets``: attributes that ``__init__`` of a class sets; ``optional``: fields by
    "module:Class.name"; ``trial``: what must hold on a small instance, raises otherwise; ``tried``: what it covers.
    """

    name: str
    feature: Feature
    need: str
    side: Side = Side.SCHEDULER
    names: tuple[str, ...] = ()
    calls: tuple[tuple[str, int, tuple[str, ...]], ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    sets: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, Absence] = field(default_factory=dict)
    trial: Callable[[], None] | None = None
    tried: tuple[str, ...] = ()
    tries: str = "behaviour"  # what ``trial`` looks at: that, or only "signature", "fields" or "code"
    since: Release | None = None  # older versions do not have it
    until: Release | None = None  # nor do this one and later ones
    late: bool = False  # takes seconds to import, and not every worker needs it: checked when it is first needed

    @property
    def how(self) -> str:
        ways = [("signature", self.calls), ("fields", self.fields or self.optional), ("code", self.sets)]
        used = {way for way, of in [*ways, ("name", self.names), (self.tries, self.trial)] if of}
        return " + ".join(way for way in ("behaviour", "signature", "code", "fields", "name") if way in used)

    def covers(self) -> Iterable[str]:
        """Every path that this row verifies."""
        yield from self.names
        yield from (path for path, *_ in self.calls)
        yield from self.optional
        yield from self.tried
        for of in (self.fields, self.sets):
            for owner, listed in of.items():
                yield owner
                yield from (f"{owner}.{each}" for each in listed.split())

    def check(self, release: Release) -> None:
        """Raises Unmet."""
        for path in self.names:
            checks.find(path)
        for path, positional, keywords in self.calls:
            checks.takes(path, positional, keywords)
        for owner, listed in self.fields.items():
            checks.has_fields(owner, listed.split())
        for owner, listed in self.sets.items():
            checks.sets(owner, listed.split())
        for path, absence in self.optional.items():
            if not absence.fits(release):
                owner, _, name = path.rpartition(".")
                checks.has_fields(owner, [name])
        if self.trial is not None:
            checks.trial(self.trial)


class Result(NamedTuple):
    row: Row
    state: State
    reason: str = ""


_results: dict[str, Result] = {}
_logged: set[Feature] = set()
_lock = threading.RLock()


def rows() -> tuple[Row, ...]:
    from vllm_kvtier.vllm_compat.probe_rows import ROWS

    return ROWS


def result(row: Row) -> Result:
    with _lock:
        if row.name not in _results:
            _results[row.name] = _examine(row, release())
        return _results[row.name]


def _examine(row: Row, version: Release) -> Result:
    try:
        row.check(version)
    except Unmet as unmet:
        if isinstance(unmet, NotHere) or Absence(None, row.since, row.until).fits(version):
            return Result(row, State.ABSENT, str(unmet))
        return Result(row, State.FAILED, str(unmet))
    return Result(row, State.OK)


def table() -> list[Result]:
    return [result(row) for row in rows()]


def granted(feature: Feature) -> bool:
    """Whether vLLM has all that the feature needs. If it should have it and has not, that is logged, once."""
    lacking = [found for row in rows() if row.feature is feature and (found := result(row)).state is not State.OK]
    for found in lacking:
        if found.state is State.FAILED:
            _log(found)
    return not lacking and all(granted(needed) for needed in NEEDS.get(feature, ()))


def _log(found: Result) -> None:
    feature = found.row.feature
    with _lock:
        if feature in _logged:
            return
        _logged.add(feature)
    others = [each.value for each, needed in NEEDS.items() if feature in needed]
    logger.warning(
        "kvtier: probe: vLLM %s is not as expected (%s: %s); switched off: %s",
        installed_version(), found.row.name, found.reason, ", ".join([feature.value, *others]),
    )  # fmt: skip


def refused(feature: Feature) -> str:
    """Why a feature is not granted; "" if it is."""
    for row in rows():
        if row.feature is feature and result(row).state is not State.OK:
            return f"{row.name}: {result(row).reason}"
    return next((reason for needed in NEEDS.get(feature, ()) if (reason := refused(needed))), "")


def release() -> Release:
    """The installed version; that of a development build without a number is later than any."""
    return check_supported()


def value(owner: Any, path: str) -> Any:
    """What ``owner`` has in an optional field of the table ("Class.name"), or what its absence means in this version.

    Raises UnsupportedVLLM where this version should have it.
    """
    name = path.rpartition(".")[2]
    try:
        return getattr(owner, name)
    except AttributeError:
        absence = _absences()[path]
    if not absence.fits(release()):
        raise UnsupportedVLLM(f"{type(owner).__name__} has no {name} in vLLM {installed_version()}")
    return absence.means


def _absences() -> dict[str, Absence]:
    return {path.partition(":")[2]: absence for row in rows() for path, absence in row.optional.items()}


def start(side: Side) -> None:
    """Check all rows that this half of a connector uses, and log what is switched off.

    Raises UnsupportedVLLM if the connector cannot work with this vLLM.
    """
    mine = [row for row in rows() if row.side in (side, Side.BOTH) and not row.late]
    for row in mine:
        found = result(row)
        if row.feature is Feature.ALL and found.state is not State.OK:
            raise UnsupportedVLLM(
                f"vllm-kvtier cannot work with vLLM {installed_version()}: {row.name}: {found.reason}. "
                f"Install a vLLM that it was tested with ({SUPPORTED}), or a newer vllm-kvtier."
            )
    if side is Side.SCHEDULER and not is_tested(release()):
        logger.warning(
            "kvtier: vLLM %s is newer than the releases that vllm-kvtier was tested with (%s); "
            "it works with what the probe found to be as expected (kvtier doctor shows the table)",
            installed_version(), SUPPORTED,
        )  # fmt: skip
    for feature in {row.feature: None for row in mine if row.feature is not Feature.ALL}:
        granted(feature)


def forget() -> None:
    """Check everything anew, and log it again. For tests and for tools that change what is installed."""
    with _lock:
        _results.clear()
        _logged.clear()
        checks.forget()
