"""A Mooncake master, and nodes with a Mooncake tier, for tests."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from urllib.parse import quote

from object_nodes import BLOCKS, TierNode, blocks_of
from support import eventually, stop

from vllm_kvtier.errors import KVTierError
from vllm_kvtier.store.index.types import HASH_BYTES
from vllm_kvtier.store.tiers.mooncake.client import load_library
from vllm_kvtier.store.tiers.mooncake.tier import MooncakeTier
from vllm_kvtier.wire.slots import PAGE


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


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


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


class MooncakeNode(TierNode):
    """``segment`` and other options without ``mooncake_``."""

    def __init__(self, master: str, before: Sequence[str] = (), segment: str = "64MiB", **options):
        given = {"master": master, "trusted_network": True, "segment": segment, "replicas": 2, "host": ""}
        given |= {"protocol": "tcp", "devices": "", **options}
        super().__init__(
            lambda context: MooncakeTier(context, {f"mooncake_{name}": value for name, value in given.items()}), before
        )

    def ready(self) -> "MooncakeNode":
        eventually(lambda: self.tier.usable and self.tier.writable, 30, "both processes of the tier are usable")
        return self

    def clear_slots(self) -> None:
        """So that what is right after a read was read by it."""
        for block in blocks_of(bytes(BLOCKS * HASH_BYTES), half=1):
            self.pool[block.slot * PAGE : (block.slot + block.pages) * PAGE] = bytes(block.pages * PAGE)

    def reader(self) -> int:
        """Pid."""
        return self.latest["mooncake"]

    def segment(self) -> int:
        return self.latest["mooncake_segment"]
