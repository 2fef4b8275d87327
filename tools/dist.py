#!/usr/bin/env python3
"""Build the source archive and, out of it, the wheel; install the wheel in an empty environment and try it there.

usage: dist.py [DIRECTORY]      (default: dist)

The interpreter that runs this needs setuptools. Requirements of the wheel come from where pip is configured to look.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What engines need, what the command needs, and that each entry point can be resolved where vLLM is not installed.
SMOKE = """
import importlib.metadata as metadata, importlib.util as util, pathlib, sys
import vllm_kvtier, vllm_kvtier.config, vllm_kvtier.store.client, vllm_kvtier.wire.messages
assert not {"vllm", "torch"} & sys.modules.keys()
found = metadata.distribution("vllm-kvtier")
assert found.version == vllm_kvtier.__version__, found.version
package = pathlib.Path(vllm_kvtier.__file__).parent
assert pathlib.Path(sys.prefix) in package.parents, package
assert (package / "py.typed").exists() and (package / "kernels" / "__init__.py").exists()
points = {(point.group, point.name): point for point in found.entry_points}
for key in (("vllm.general_plugins", "kvtier"), ("console_scripts", "kvtier")):
    assert callable(points[key].load()), key
"""


def main() -> None:
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvtier-dist-") as folder:
        work = Path(folder)
        tree = work / "tree"
        # setuptools leaves files behind where it builds.
        unwanted = shutil.ignore_patterns(
            ".git", ".venv", ".cache", "__pycache__", "*.egg-info", "build", "dist", "site"
        )
        shutil.copytree(ROOT, tree, ignore=unwanted)
        sdist = _build("sdist", tree, out)
        with tarfile.open(sdist) as archive:
            archive.extractall(work / "source", filter="data")
        (source,) = (work / "source").iterdir()
        wheel = _build("wheel", source, out)
        _try(wheel, work / "empty")
    print(f"{sdist}\n{wheel}")


def _build(kind: str, tree: Path, out: Path) -> Path:
    """``kind``: sdist or wheel."""
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"the {kind} cannot be built:\n{done.stdout}{done.stderr}")
    return out / done.stdout.split()[-1]


def _try(wheel: Path, folder: Path) -> None:
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    for command in (
        [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", f"{wheel}[cli]"],
        [python, "-c", SMOKE],
        [folder / "bin/kvtier", "--help"],
        [python, "-m", "vllm_kvtier.store", "--help"],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"in an empty environment {' '.join(map(str, command[1:]))} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
