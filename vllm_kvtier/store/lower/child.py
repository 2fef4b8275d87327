"""The process of a mover, as its parent sees it: nothing here blocks."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import vllm_kvtier

LINE = 1000  # characters of a line of its stderr that are kept
LINES = 500  # of its stderr; a process that complains more than that has been heard


class Child(Protocol):
    """``ended``: a descriptor that is readable when the process has ended, all of its I/O with it. ``stderr``: one to
    read from without blocking. ``silent``: nothing more will come from it. ``last_words``: its last line."""

    pid: int
    ended: int
    stderr: int
    silent: bool
    last_words: str

    def kill(self) -> None:
        """SIGKILL. Idempotent, also when it has ended."""

    def reap(self) -> int | None:
        """Its exit status, less than 0: the signal that ended it; None: it runs."""

    def read_lines(self) -> list[str]:
        """What it has written to stderr since."""

    def close(self) -> None:
        """Of descriptors; once, when it is reaped or given up."""


class MoverChild:
    def __init__(self, process: subprocess.Popen):
        self._process = process
        self.pid = process.pid
        self.ended = os.pidfd_open(process.pid)
        self.stderr = process.stderr.fileno()
        os.set_blocking(self.stderr, False)
        self.silent, self.last_words = False, ""
        self._rest, self._lines = b"", 0

    def kill(self) -> None:
        if self._process.returncode is None:
            signal.pidfd_send_signal(self.ended, signal.SIGKILL)

    def reap(self) -> int | None:
        return self._process.poll()

    def read_lines(self) -> list[str]:
        while not self.silent:
            try:
                data = os.read(self.stderr, 1 << 16)
            except BlockingIOError:
                break
            self.silent = not data
            self._rest += data
            if len(self._rest) > 1 << 20:  # a mover that floods its log gets its turn to be read, and no more
                break
        *whole, self._rest = self._rest.split(b"\n")
        if self.silent or len(self._rest) > 1 << 16:
            whole, self._rest = [*whole, self._rest], b""
        lines = [text for line in whole if (text := line.decode("utf-8", "replace").strip()[:LINE])]
        if lines:
            self.last_words = lines[-1]
        heard, self._lines = self._lines, self._lines + len(lines)
        return lines[: max(0, LINES - heard)]

    def close(self) -> None:
        os.close(self.ended)
        self._process.stderr.close()


def spawn_mover(kind: str, sock: socket.socket, pool_fd: int, pool_bytes: int) -> MoverChild:
    """Start ``runner`` for that kind with this end of a socketpair; the caller closes ``sock``. Raises OSError."""
    command = [sys.executable, "-m", "vllm_kvtier.store.lower.runner", f"--kind={kind}"]
    arguments = [f"--socket={sock.fileno()}", f"--pool={pool_fd}", f"--bytes={pool_bytes}"]
    return spawn([*command, *arguments], (sock.fileno(), pool_fd))


def spawn(command: Sequence[str], fds: Sequence[int]) -> MoverChild:
    # It must find this very package, however this process found it.
    package = str(Path(vllm_kvtier.__file__).resolve().parents[1])
    search = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH", "")]))
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd="/",
        env={**os.environ, "PYTHONPATH": search},
        pass_fds=fds,
        start_new_session=True,  # Ctrl-C is for the server
    )
    return MoverChild(process)
