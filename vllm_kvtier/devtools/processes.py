"""Start, await, stop, kill or pause a server process with its children.

Every service leads a process group, so that its children end with it. A small shell waits for the end of a pipe that
only this process holds, and then kills the group. So the group ends even if this process is killed.
"""

import errno
import http.client
import os
import random
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_kvtier.fingerprint import process_fields
from vllm_kvtier.store import linux

POLL_SECONDS = 0.25  # between health checks of a starting service; its death is noticed at once
# Kills the group of the process whose number is the next word when its input ends (POSIX sh).
LEASH = ("sh", "-c", 'read -r _; kill -s KILL -- "-$1"', "leash")
# The last line of a traceback, wherever a logger's prefix puts it.
_ERROR = re.compile(r"(?:(?<=\s)|^)[A-Za-z_][\w.]*(?:Error|Exception|Unsupported\w+): .+$", re.MULTILINE)
_FIRST_PORT = 10000
_HOST = "127.0.0.1"
_claims: list[socket.socket] = []  # one per port; their names vanish with this process


class ServiceFailed(RuntimeError):
    """A service ended while starting, or was not ready in time; the message ends with the tail of its log."""


def free_port(host: str = "127.0.0.1") -> int:
    """A free TCP port that this function has given to no other process of this machine.

    It is reserved until this process ends, so that a service can be restarted on it. It is below the range of ports for
    outgoing connections, which therefore cannot take it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    end = _first_ephemeral_port()
    draw = random.SystemRandom()
    for _ in range(10 * (end - _FIRST_PORT)):
        port = draw.randrange(_FIRST_PORT, end)
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0kvtier-test-port-{port}")
            with socket.socket(family) as probe:
                probe.bind((host, port))
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        _claims.append(claim)
        return port
    raise OSError(errno.EADDRINUSE, f"no free port was found from {_FIRST_PORT} to {end - 1}")


def _first_ephemeral_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        first = 0
    return first if first >= 2 * _FIRST_PORT else 32768  # Linux's own default


class Service:
    """One HTTP server run as ``command``, ready once ``GET /health`` answers 200.

    It can be started again with the same port. ``with service:`` starts it, waits until it is ready and stops it.
    Environment: that of this process, changed by ``env`` (None removes a name). Raises ServiceFailed if it does not
    become ready.
    """

    popen: Callable[..., Any] = subprocess.Popen  # replaced by tests that fork engines

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        port: int,
        log_path: Path | str,
        env: Mapping[str, str | None] | None = None,
        ready_seconds: float = 240.0,
    ):
        self.name = name
        self.command = list(command)
        self.port = port
        self.log_path = Path(log_path)
        self.ready_seconds = ready_seconds
        self.started_at = 0.0  # time.monotonic() of the last start
        self.ready_after: float | None = None  # seconds from that start until it was ready
        self._env = {name: value for name, value in {**os.environ, **(env or {})}.items() if value is not None}
        self._process: subprocess.Popen | None = None
        self._leash: subprocess.Popen | None = None
        self._pidfd = -1

    @property
    def base_url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the leader, which is the id of the group too."""
        if self._process is None:
            raise ServiceFailed(f"{self.name} is not started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def ended(self) -> int | None:
        """The exit code, if it ended and ``kill`` or ``terminate`` was not called."""
        return self._process.poll() if self._process is not None and self._pidfd >= 0 else None

    def start(self) -> "Service":
        """Start without waiting. A restart appends to the log."""
        if self.running:
            raise ServiceFailed(f"{self.name} is running already (pid {self.pid})")
        self._release()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.started_at, self.ready_after = time.monotonic(), None  # before it runs: it may get a core sooner than this
        with open(self.log_path, "ab") as log:
            self._process = self.popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )
        self._leash = subprocess.Popen(
            [*LEASH, str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._pidfd = linux.pidfd_open(self._process.pid)
        return self

    def wait_ready(self) -> "Service":
        """Block until ready. Stops the service and raises if that fails."""
        return wait_all([self])[0]

    def check_ready(self) -> bool:
        """Ask once. Raises ServiceFailed if the process has ended or its time is over."""
        waited = time.monotonic() - self.started_at
        if not self.running:
            code = self._process.returncode if self._process else None
            raise ServiceFailed(f"{self.name} ended with code {code} after {waited:.0f} s.\n{self._errors_and_tail()}")
        if self.ready_after is not None:
            return True
        if self._healthy():
            self.ready_after = time.monotonic() - self.started_at
            return True
        if waited > self.ready_seconds:
            raise ServiceFailed(f"{self.name} was not ready within {waited:.0f} s.\n{self._errors_and_tail()}")
        return False

    def terminate(self, grace: float = 15.0) -> None:
        """Send SIGTERM to the leader, and kill the rest of the group after ``grace`` seconds. Idempotent."""
        if self.running:
            os.kill(self.pid, signal.SIGCONT)  # a stopped process does not handle SIGTERM
            os.kill(self.pid, signal.SIGTERM)
            _wait_readable([self._pidfd], grace)
        self.kill()

    def kill(self) -> None:
        """Kill the whole group at once, as a crash of the machine; returns when it is gone."""
        if self._process is None:
            return
        deadline = time.monotonic() + 30.0
        while members := self._members():
            for pid in members:
                _signal(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise ServiceFailed(f"{self.name}: processes {members} survive SIGKILL")
            self._process.poll()
            _wait_gone(members, 0.5)
        self._process.wait()
        self._release()

    def kill_leader(self) -> None:
        """SIGKILL the leader alone; its children must notice."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait()

    def pause(self) -> None:
        """Stop the whole group in its tracks (SIGSTOP): a peer that hangs without closing its sockets."""
        for pid in self._members():
            _signal(pid, signal.SIGSTOP)

    def resume(self) -> None:
        for pid in self._members():
            _signal(pid, signal.SIGCONT)

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the log, under its path."""
        return "\n".join([f"--- end of {self.log_path}", *self._log().splitlines()[-lines:]])

    def _log(self) -> str:
        return self.log_path.read_text("utf-8", "replace") if self.log_path.exists() else ""

    def _errors_and_tail(self) -> str:
        """The errors in the log, each once, then its tail: the cause is often long before the last line."""
        errors = dict.fromkeys(match.group() for match in _ERROR.finditer(self._log()))
        return "\n".join([*list(errors)[:10], self.log_tail()])

    def cpu_seconds(self) -> float:
        """Processor time that the group's living processes have used so far, all threads, user and system."""
        ticks = 0
        for pid in self._members():
            fields = _stat(pid)
            ticks += int(fields[11]) + int(fields[12]) if fields else 0
        return ticks / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> "Service":
        self.start()
        return self.wait_ready()

    def __exit__(self, *_) -> None:
        self.terminate()

    def _members(self) -> list[int]:
        """Of the group. Once the leader was reaped and all others have ended, its number may be another group's."""
        reaped, members = not self.running, group_members(self.pid)
        return [] if reaped and self.pid in members else members

    def _healthy(self) -> bool:
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False  # it does not listen yet, or is busy starting
        finally:
            connection.close()

    def _release(self) -> None:
        if self._leash is not None:
            self._leash.kill()  # before its pipe closes: it must not kill a group whose number may be reused
            self._leash.wait()
            self._leash.stdin.close()
            self._leash = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def wait_all(services: Sequence[Service], tick: Callable[[Sequence[Service]], None] | None = None):
    """Block until every started service is ready; the first that fails stops all of them and raises."""
    try:
        while not all([service.check_ready() for service in services]):
            if tick:
                tick(services)
            _wait_readable([service._pidfd for service in services], POLL_SECONDS)
    except BaseException:  # also on Ctrl-C
        kill_all(services)
        raise
    return services


def start_all(services: Sequence[Service], tick: Callable[[Sequence[Service]], None] | None = None):
    """Start several at the same time and wait until all are ready; ``tick`` is called at every poll."""
    try:
        for service in services:
            service.start()
    except BaseException:
        kill_all(services)
        raise
    return wait_all(services, tick)


def kill_all(services: Iterable[Service]) -> None:
    for service in services:
        service.kill()


def group_members(group: int) -> list[int]:
    """Ids of the group's processes that are alive; a zombie is not."""
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return [pid for pid in pids if (fields := _stat(pid)) and int(fields[2]) == group and fields[0] not in "ZX"]


def lives(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    return (fields := _stat(pid)) != [] and fields[0] not in "ZX"


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third (state) on; empty if the process is gone."""
    try:
        return process_fields(pid)
    except (FileNotFoundError, ProcessLookupError):
        return []


def _signal(pid: int, sig: int) -> None:
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        return  # it has ended


def _wait_readable(fds: Iterable[int], seconds: float) -> None:
    poller = select.poll()
    for fd in fds:
        if fd >= 0:
            poller.register(fd, select.POLLIN)
    poller.poll(seconds * 1000)


def _wait_gone(pids: Iterable[int], seconds: float) -> None:
    """Wait until each process ended, or the time is over."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        try:
            fd = linux.pidfd_open(pid)
        except ProcessLookupError:
            continue
        _wait_readable([fd], max(0.0, deadline - time.monotonic()))
        os.close(fd)
