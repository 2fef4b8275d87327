"""Checks that the installed vLLM has what this package needs beyond vLLM's documented interface.

``vllm_compat.probe.rows.ROWS`` is the table: one row for each need, with its feature. A row that fails switches off its
feature, which is logged once; if a row of ``Feature.ALL`` fails, the engine does not start. If a version may lack
something, the row has the first or the last version with it; an unknown version counts as the newest.

Rows are checked when a feature is first asked for, once per process. No row needs a device or a model.
"""

import enum
import threading
from typing import Any, NamedTuple

from vllm_kvtier.errors import UnsupportedVLLM
from vllm_kvtier.logs import get_logger
from vllm_kvtier.vllm_compat.probe import checks
from vllm_kvtier.vllm_compat.probe.checks import NotHere, Unmet
from vllm_kvtier.vllm_compat.probe.row import Absence, Feature, Release, Row, Side
from vllm_kvtier.vllm_compat.version import SUPPORTED, check_supported, installed_version, is_tested

logger = get_logger(__name__)


# The idle hook finds vLLM's scheduler, which synchronous loads and peer fetches need.
NEEDS = {
    Feature.LOCAL_HITS: (Feature.STATES,),
    Feature.PAUSES: (Feature.IDLE,),
    Feature.QUEUES: (Feature.IDLE,),
    Feature.ADMISSION: (Feature.IDLE,),
    Feature.PRIORITIES: (Feature.IDLE,),
    Feature.DRAINING: (Feature.IDLE,),
    Feature.PAUSED: (Feature.IDLE,),
    Feature.PEER_FETCH: (Feature.IDLE,),
    Feature.SYNC_LOADS: (Feature.IDLE,),
    Feature.CPU_CODECS: (Feature.CODECS,),
}


class State(enum.Enum):
    OK = "ok"
    ABSENT = "not here"  # in this version or on this machine, as expected
    FAILED = "failed"


class Result(NamedTuple):
    row: Row
    state: State
    reason: str = ""


_results: dict[str, Result] = {}
_logged: set[Feature] = set()
_lock = threading.RLock()


def rows() -> tuple[Row, ...]:
    from vllm_kvtier.vllm_compat.probe.rows import ROWS

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
    """Whether vLLM has all that the feature needs. If it should and has not, that is logged once."""
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
        "kvtier: probe: vLLM %s differs from the expected interface (%s: %s); switched off: %s",
        installed_version(), found.row.name, found.reason, ", ".join([feature.value, *others]),
    )  # fmt: skip


def refused(feature: Feature) -> str:
    """Why a feature is not granted; "" if it is."""
    for row in rows():
        if row.feature is feature and result(row).state is not State.OK:
            return f"{row.name}: {result(row).reason}"
    return next((reason for needed in NEEDS.get(feature, ()) if (reason := refused(needed))), "")


def release() -> Release:
    """The installed version; a development build without a number is later than any."""
    return check_supported()


def value(owner: Any, path: str) -> Any:
    """The value of an optional field of the table ("Class.name"), or the meaning of its absence in this version.

    Raises UnsupportedVLLM if this version should have the field.
    """
    name = path.rpartition(".")[2]
    try:
        return getattr(owner, name)
    except AttributeError:
        absence = {key.partition(":")[2]: each for row in rows() for key, each in row.optional.items()}[path]
    if not absence.fits(release()):
        raise UnsupportedVLLM(f"{type(owner).__name__} has no {name} in vLLM {installed_version()}")
    return absence.means


def start(side: Side) -> None:
    """Check all rows that this side of a connector uses, and log which features are off.

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
            "kvtier: probe: vLLM %s is newer than the releases that vllm-kvtier was tested with (%s); features whose "
            "checks pass are used (kvtier doctor shows the table)",
            installed_version(), SUPPORTED,
        )  # fmt: skip
    for feature in {row.feature: None for row in mine if row.feature is not Feature.ALL}:
        granted(feature)


def clear() -> None:
    """Check and log everything again. For tests, and for tools that change the installation."""
    with _lock:
        _results.clear()
        _logged.clear()
        checks.clear()
