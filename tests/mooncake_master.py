"""A Mooncake master for tests and benchmarks. Imports no more than the package and Mooncake need."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from urllib.parse import quote

from support import stop

from vllm_kvtier.devtools.processes import free_port
from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.tiers.mooncake.client import load_library


@cache
def why_not() -> str:
    """Why there is no Mooncake here, "" if there is."""
    try:
        load_library()
    except KVTierError as error:
        return str(error)
    try:
        ran = subprocess.run([binary(), "--version"], capture_output=True, text=True, timeout=20)
    except OSError as error:
        return f"mooncake_master cannot be run: {error}"
    return "" if ran.returncode == 0 else f"mooncake_master cannot be run: {ran.stderr.strip()}"


def binary() -> str:
    import mooncake

    path = Path(mooncake.__file__).parent / "mooncake_master"
    if not os.access(path, os.X_OK):
        path.chmod(path.stat().st_mode | 0o111)
    return str(path)


class Master:
    """``options``: of mooncake_master. ``before``: words before its command."""

    def __init__(self, host: str = "127.0.0.1", before: Sequence[str] = (), **options):
        self.host, self.port, self.metrics_port = host, free_port(), free_port()
        self._before = list(before)
        self._options = [f"--{name}={value}" for name, value in options.items()]
        self.process: subprocess.Popen | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self) -> "Master":
        command = [*self._before, binary(), f"--rpc_address={self.host}", f"--rpc_port={self.port}"]
        command += [f"--metrics_host={self.host}", f"--metrics_port={self.metrics_port}", *self._options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return self

    def copies(self, keys: Sequence[str]) -> dict[str, int]:
        """Of each key, as the master's own interface for operators says."""
        query = ",".join(quote(key, safe="") for key in keys)
        url = f"http://{self.host}:{self.metrics_port}/batch_query_keys?keys={query}"
        fetch = f"import urllib.request; print(urllib.request.urlopen({url!r}).read().decode())"
        ran = subprocess.run([*self._before, sys.executable, "-c", fetch], capture_output=True, text=True, check=True)
        return {key: len(found.get("values") or ()) for key, found in json.loads(ran.stdout)["data"].items()}

    def stop(self) -> None:
        stop(self.process.pid)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
