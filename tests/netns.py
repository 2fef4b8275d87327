"""Two network namespaces joined by a cable (veth), for tests of what crosses a network: two nodes on one machine.

    with NetnsPair() as pair:
        pair.popen(0, ["python", ...])      # on the first node, whose address is pair.addresses[0]

The nodes share everything else: files, processes, shared memory. The namespaces are removed even if a test fails. If
this process is killed, remove the kvtier-* namespaces of ``ip netns list`` by ``ip netns del``.
"""

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache

from support import eventually

_PATHS = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])  # a user's PATH often lacks these


class NetnsPair:
    """``addresses``: an IPv4 address of each. Raises subprocess.CalledProcessError where that is not permitted."""

    _made = 0

    def __init__(self):
        NetnsPair._made += 1
        self._ip = shutil.which("ip", path=_PATHS)
        self.names = [f"kvtier-{os.getpid()}-{NetnsPair._made}-{side}" for side in "ab"]
        self.addresses = ["10.213.77.1", "10.213.77.2"]
        self.devices = ["kvtier0", "kvtier1"]

    def __enter__(self) -> "NetnsPair":
        try:
            for name in self.names:
                self._run("netns", "add", name)
                self._run("-n", name, "link", "set", "lo", "up")
            ends = [["name", device, "netns", name] for device, name in zip(self.devices, self.names, strict=True)]
            self._run("-n", self.names[0], "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for name, device, address in zip(self.names, self.devices, self.addresses, strict=True):
                self._run("-n", name, "addr", "add", f"{address}/24", "dev", device)
                self._run("-n", name, "link", "set", device, "up")
            # The kernel sees the cable a moment later, and UCX takes what is there when a process begins: only the
            # loopback, if that is sooner.
            eventually(self._running, what="a veth pair that is up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run([self._ip, "netns", "del", name], stderr=subprocess.DEVNULL, check=False)

    def command(self, side: int, command: Sequence[str]) -> list[str]:
        """``command``, to run on that side. The process that it starts becomes the command's."""
        return [self._ip, "netns", "exec", self.names[side], *command]

    def popen(self, side: int, command: Sequence[str], **options) -> subprocess.Popen:
        return subprocess.Popen(self.command(side, command), **options)

    def plug(self, side: int, up: bool) -> None:
        """Pull the cable out at one end, or put it back: packets are lost, and connections stay open."""
        self._run("-n", self.names[side], "link", "set", self.devices[side], "up" if up else "down")

    def _running(self) -> bool:
        pairs = zip(self.names, self.devices, strict=True)
        said = [self._run("-n", name, "link", "show", device) for name, device in pairs]
        return all("LOWER_UP" in each and "state UP" in each for each in said)

    def _run(self, *arguments: str) -> str:
        return subprocess.run([self._ip, *arguments], check=True, capture_output=True, text=True).stdout


class NetnsStar:
    """Network namespaces on a switch: ``names[i]`` has ``addresses[i]``; the last one is the switch's own. To be used
    as NetnsPair."""

    def __init__(self, nodes: int):
        NetnsPair._made += 1
        self._ip = shutil.which("ip", path=_PATHS)
        self.names = [f"kvtier-{os.getpid()}-{NetnsPair._made}-{i}" for i in range(nodes + 1)]
        self.addresses = [f"10.213.78.{i + 1}" for i in range(nodes + 1)]

    def __enter__(self) -> "NetnsStar":
        hub = self.names[-1]
        try:
            for name in self.names:
                self._run("netns", "add", name)
                self._run("-n", name, "link", "set", "lo", "up")
            self._run("-n", hub, "link", "add", "switch", "type", "bridge")
            self._run("-n", hub, "addr", "add", f"{self.addresses[-1]}/24", "dev", "switch")
            self._run("-n", hub, "link", "set", "switch", "up")
            for i, (name, address) in enumerate(zip(self.names[:-1], self.addresses, strict=False)):
                end = ["peer", "name", f"port{i}", "netns", hub]
                self._run("-n", name, "link", "add", "kvtier0", "type", "veth", *end)
                self._run("-n", name, "addr", "add", f"{address}/24", "dev", "kvtier0")
                self._run("-n", name, "link", "set", "kvtier0", "up")
                self._run("-n", hub, "link", "set", f"port{i}", "master", "switch", "up")
            eventually(lambda: all(map(self._is_up, self.names[:-1])), what="cables that are up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run([self._ip, "netns", "del", name], stderr=subprocess.DEVNULL, check=False)

    def before(self, node: int) -> list[str]:
        """Words before a command, to run it there. The process that it starts becomes the command's."""
        return [self._ip, "netns", "exec", self.names[node]]

    def plug(self, node: int, up: bool) -> None:
        """Pull the cable out of the switch, or put it back: packets are lost, and connections stay open."""
        self._run("-n", self.names[-1], "link", "set", f"port{node}", "up" if up else "down")

    def limit(self, node: int, rate: str | None) -> None:
        """Let the cable carry ``rate`` (tc's words: 10mbit) each way, with a queue of 100 ms. None: as ever."""
        shape = ["tbf", "rate", rate, "burst", "64kb", "latency", "100ms"] if rate else []
        for name, device in (self.names[node], "kvtier0"), (self.names[-1], f"port{node}"):
            tc = ["tc", "qdisc", "replace" if rate else "del", "dev", device, "root", *shape]
            self._run("netns", "exec", name, *tc)

    def _is_up(self, name: str) -> bool:
        shown = self._run("-n", name, "link", "show", "kvtier0")
        return "LOWER_UP" in shown and "state UP" in shown

    def _run(self, *arguments: str) -> str:
        return subprocess.run([self._ip, *arguments], check=True, capture_output=True, text=True).stdout


@cache
def why_not() -> str:
    """Why this machine does not let us, "" if it does."""
    if shutil.which("ip", path=_PATHS) is None:
        return "no `ip` here (Debian: iproute2)"
    try:
        with NetnsPair():
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
