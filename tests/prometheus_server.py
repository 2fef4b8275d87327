"""A real Prometheus for tests: the one on PATH, or Debian's package unpacked into a folder that git ignores.

Nothing is installed: ``apt-get download`` and ``dpkg-deb -x`` need no root. If both fail, tests are skipped with the
reason.
"""

import fcntl
import json
import math
import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support import eventually

from vllm_kvtier.devtools.processes import free_port

CACHE = Path(__file__).parents[1] / ".cache"
PROGRAMS = ("prometheus", "promtool")
FETCH_SECONDS = 180.0  # for the package's 20 MB, and for Debian's lists where this machine has none
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback needs no proxy


class NotThere(Exception):
    """There is no Prometheus, for the reason given."""


def programs() -> dict[str, str]:
    """Paths of ``prometheus`` and ``promtool``. Raises NotThere."""
    found = {name: shutil.which(name) for name in PROGRAMS}
    if all(found.values()):
        return found
    folder = CACHE / "prometheus"
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        with (CACHE / "prometheus.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                _fetch(folder)
    return {name: str(folder / name) for name in PROGRAMS}


def _fetch(folder: Path) -> None:
    """All of it or nothing."""
    missing = [name for name in ("apt-get", "dpkg-deb") if shutil.which(name) is None]
    if missing:
        raise NotThere(
            f"no prometheus and promtool on PATH, and no {' and '.join(missing)} to get Debian's package with"
        )
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        try:
            _run(["apt-get", "download", "prometheus"], scratch)
        except NotThere:  # a machine without Debian's lists, or with old ones: into a place of our own
            lists = ["-o", f"Dir::State={scratch}/state", "-o", f"Dir::Cache={scratch}/cache"]
            Path(scratch, "state", "lists", "partial").mkdir(parents=True)
            Path(scratch, "cache", "archives", "partial").mkdir(parents=True)
            _run(["apt-get", *lists, "update"], scratch)
            _run(["apt-get", *lists, "download", "prometheus"], scratch)
        (package,) = Path(scratch).glob("prometheus_*.deb")
        _run(["dpkg-deb", "-x", str(package), "unpacked"], scratch)
        ready = Path(scratch, "ready")
        ready.mkdir()
        for name in PROGRAMS:
            Path(scratch, "unpacked", "usr", "bin", name).rename(ready / name)
        _run([str(ready / "prometheus"), "--version"], scratch)
        ready.rename(folder)


def _run(command: list[str], folder: str) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=FETCH_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotThere(f"Debian's package cannot be had: {error}") from error
    if done.returncode:
        output = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        raise NotThere(f"Debian's package cannot be had: {' '.join(command[:2])} says {output[-1]}")


class Sample(NamedTuple):
    labels: dict[str, str]
    value: float


class Prometheus:
    """Scrapes ``targets``, {job: [host:port]}, and evaluates ``rules``, files. A context manager.

    ``interval``: seconds between scrapes.
    """

    def __init__(
        self,
        program: str,
        folder: Path,
        targets: Mapping[str, Sequence[str]],
        interval: float = 1.0,
        rules: Sequence[Path] = (),
        port: int | None = None,
    ):
        self.port = port or free_port()
        self._log = folder / "prometheus.log"
        jobs = [{"job_name": job, "static_configs": [{"targets": list(where)}]} for job, where in targets.items()]
        every = f"{round(interval * 1000)}ms"
        settings = {
            "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
            "scrape_configs": jobs,
            "rule_files": [str(path) for path in rules],
        }
        file = folder / "prometheus.yml"
        file.write_text(json.dumps(settings))  # which is YAML too
        self._command = [
            program, f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn",
            f"--web.listen-address=127.0.0.1:{self.port}", "--query.lookback-delta=10m",
        ]  # fmt: skip

    def __enter__(self) -> "Prometheus":
        with self._log.open("w") as log:
            env = {**os.environ, "GOMAXPROCS": "1"}
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=env)
        eventually(self._ready, 60, "Prometheus is ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            with _DIRECT.open(f"http://127.0.0.1:{self.port}/-/ready", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def ask(self, path: str, **fields: Any) -> Any:
        """``data`` of an answer of the HTTP API. Raises ValueError with Prometheus's words for a wrong query."""
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(fields, doseq=True)}"
        try:
            with _DIRECT.open(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(json.load(error).get("error", str(error))) from error

    def query(self, expression: str) -> list[Sample]:
        """What it is now, without what is not a number."""
        data = self.ask("query", query=expression)
        if data["resultType"] != "vector":
            return [Sample({}, float(data["result"][1]))]
        found = [Sample(each["metric"], float(each["value"][1])) for each in data["result"]]
        return [sample for sample in found if not math.isnan(sample.value)]

    def scraped(self) -> dict[str, str]:
        """{job: health} of all targets; a target's last error where it is not well."""
        active = self.ask("targets")["activeTargets"]
        return {each["labels"]["job"]: each["lastError"] or each["health"] for each in active}
